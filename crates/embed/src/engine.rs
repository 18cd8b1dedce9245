//! Runs the encoder in a session and returns the values of sequences in input order. Invariant: every sequence
//! that is pushed is written once, in input order, with finite values; otherwise an error names it.

use super::Pool;
use super::input::Sequence;
use crate::EmbedError;
use plimsoll_data::pack::{Fill, Order};
use plimsoll_runtime::session::{Completed, InOrder, ModelId, Next, Push, Session, Stop, Usage};
use plimsoll_runtime::{RuntimeError, Tokenizer};

/// Name of the encoder's plan.
pub(super) const ENCODER: &str = "encoder";

/// A session of the encoder, with the sequences in flight and the writer of the results.
pub(super) struct Engine<'a, R> {
    session: Session<'a>,
    encoder: ModelId,
    /// Index and width of each output that is part of a sequence's values, in the order of concatenation.
    outputs: Vec<(usize, usize)>,
    /// Number of special tokens at the start and at the end of a sequence that are removed from per-token
    /// results.
    ends: [usize; 2],
    waiting: InOrder<Sequence>,
    tokens: u64,
    /// Number of sequences that were written without being computed.
    replayed: u64,
    results: R,
}

/// Layout of the values that a step returns for a sequence.
pub(super) struct OutputLayout {
    pub(super) pool: Pool,
    /// Names of the encoder's outputs that are concatenated to the values of a sequence.
    pub(super) outputs: Vec<String>,
    /// Width of each output.
    pub(super) width: usize,
    pub(super) order: Order,
}

/// Receives the values of each sequence, in input order.
pub(super) trait Rows {
    /// Result of the run.
    type Written;

    /// Writes the values of the next sequence.
    fn write(&mut self, sequence: &Sequence, values: &[f32]) -> Result<(), EmbedError>;

    /// Writes the next sequence from the results of an interrupted run; false if they do not have it, and it must be
    /// computed.
    fn replay(&mut self, _: &Sequence) -> Result<bool, EmbedError> {
        Ok(false)
    }

    /// Keeps the rows that were written, for a run that ends early.
    fn save(&mut self) -> Result<(), EmbedError> {
        Ok(())
    }

    /// Completes the output; files become visible under their final names.
    fn finish(self) -> Result<Self::Written, EmbedError>;
}

impl<'a, R: Rows> Engine<'a, R> {
    pub(super) fn new(
        session: Session<'a>,
        tokenizer: &Tokenizer,
        reading: OutputLayout,
        results: R,
    ) -> Result<Self, EmbedError> {
        let ends = match (reading.pool, tokenizer) {
            (Pool::Tokens, Tokenizer::Esm) => [1, 1],
            (Pool::Tokens, Tokenizer::Bpe(_) | Tokenizer::Text(_))
            | (Pool::Mean | Pool::Cls | Pool::Last, _) => [0, 0],
        };
        let encoder = session.model(ENCODER).ok_or_else(|| RuntimeError::bug("the program has no encoder"))?;
        let known = session.outputs(encoder);
        let position = |name: &String| {
            let at = known.iter().position(|output| output.name == *name);
            let missing = || RuntimeError::bug(format!("the encoder has no output `{name}`"));
            at.map(|at| (at, known[at].width)).ok_or_else(missing)
        };
        let outputs = reading.outputs.iter().map(position).collect::<Result<_, _>>()?;
        Ok(Self {
            session,
            encoder,
            outputs,
            ends,
            waiting: InOrder::default(),
            tokens: 0,
            replayed: 0,
            results,
        })
    }

    /// Writes a sequence from the results of an interrupted run; false if it must be computed. Sequences that are written
    /// so come before all others.
    pub(super) fn replay(&mut self, sequence: &Sequence) -> Result<bool, EmbedError> {
        let is_there = self.results.replay(sequence)?;
        self.replayed += u64::from(is_there);
        Ok(is_there)
    }

    /// Keeps the rows that were written, for a run that ends early.
    pub(super) fn save(&mut self) -> Result<(), EmbedError> {
        self.results.save()
    }

    /// Adds a sequence, submits the packs that are full, and writes the results that are complete. `Err` if the
    /// sequence is longer than a step.
    pub(super) fn push(
        &mut self,
        sequence: &Sequence,
        tokens: &[i32],
        stop: Stop<'_>,
    ) -> Result<(), EmbedError> {
        let (id, most) = (&sequence.id, self.session.longest(self.encoder));
        if tokens.len() > most {
            return Err(EmbedError::LongerThanStep { id: id.clone(), tokens: tokens.len(), most });
        }
        let key = self.waiting.next_key();
        while self.session.push([(self.encoder, key, tokens)])? == Push::Full {
            let next = self.session.next(stop)?;
            self.complete(next)?;
        }
        self.waiting.add(sequence.clone());
        // Submit every full pack before returning, so that devices compute while the reader waits for input.
        while self.session.has_packs() {
            let next = self.session.next(stop)?;
            self.complete(next)?;
        }
        loop {
            let next = self.session.poll()?;
            if !self.complete(next)? {
                return Ok(());
            }
        }
    }

    /// Computes a step of the remaining sequences and writes its results; returns false if none remain.
    pub(super) fn drain(&mut self, stop: Stop<'_>) -> Result<bool, EmbedError> {
        self.session.end();
        let next = self.session.next(stop)?;
        self.complete(next)
    }

    /// Work of each device.
    pub(super) fn usage(&self) -> &[Usage] {
        self.session.usage()
    }

    /// The program of the size of steps that is in use.
    pub(super) fn program_in_use(&self) -> &plimsoll_plan::Program {
        self.session.program_in_use()
    }

    /// The session.
    pub(super) fn session(&mut self) -> &mut Session<'a> {
        &mut self.session
    }

    /// Warnings since the last call.
    pub(super) fn warnings(&mut self) -> Vec<String> {
        self.session.warnings()
    }

    /// Number of tokens computed so far.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of sequences written so far.
    pub(super) fn sequences(&self) -> u64 {
        self.replayed + self.waiting.taken()
    }

    pub(super) fn fill(&self) -> Fill {
        self.session.fill(self.encoder)
    }

    /// Completes the output. `Err` if a sequence has no result.
    pub(super) fn finish(self) -> Result<R::Written, EmbedError> {
        match self.waiting.oldest() {
            Some(sequence) => Err(RuntimeError::bug(format!("'{}' has no result", sequence.id)).into()),
            None => self.results.finish(),
        }
    }

    /// Stores the values of a completed step and writes the results that are next in input order. Returns false
    /// if no step was complete.
    fn complete(&mut self, next: Next) -> Result<bool, EmbedError> {
        let step = match next {
            Next::Ready(step) => step,
            Next::Pending | Next::Finished => return Ok(false),
        };
        self.tokens += step.counts.tokens;
        for (i, &key) in step.keys.iter().enumerate() {
            self.store_values(key, &step, i)?;
        }
        self.session.recycle(step);
        let Self { waiting, results, .. } = self;
        waiting.take(|sequence, values| results.write(sequence, values))?;
        Ok(true)
    }

    /// Stores the values of every output for sequence `i` of a step. `Err` if a value is not finite.
    fn store_values(&mut self, key: u64, step: &Completed, i: usize) -> Result<(), EmbedError> {
        let (sequence, kept) = self.waiting.values_of(key)?;
        for &(output, width) in &self.outputs {
            let (values, [start, end]) = (step.values(output, i), self.ends.map(|rows| rows * width));
            kept.extend_from_slice(&values[start..values.len() - end]);
        }
        if !kept.iter().all(|x| x.is_finite()) {
            return Err(EmbedError::NotFinite { id: sequence.id.clone() });
        }
        Ok(())
    }
}
