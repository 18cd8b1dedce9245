//! Runs the model in a session and writes the values of sequences in input order. Invariant: every sequence that is pushed is
//! written once, in input order, with finite values; otherwise an error names it.

use super::Pooling;
use super::input::SequenceRecord;
use crate::EmbedError;
use plimsoll_data::pack::Fill;
use plimsoll_runtime::session::{Next, Push, Session, SessionRow, StepSession, StopCheck, Usage};
use plimsoll_runtime::{RuntimeError, SequenceError, Tokenizer};
use std::collections::VecDeque;

/// A session, with the sequences in flight and the writer of the results.
pub(super) struct EmbedEngine<'a, R> {
    session: Session<'a>,
    /// Number of special tokens at the start and at the end of a sequence that are removed from per-token
    /// results.
    ends: [usize; 2],
    /// The sequences whose rows were not written, oldest first.
    waiting: VecDeque<SequenceRecord>,
    /// Number of sequences that were written without being computed.
    replayed: u64,
    results: R,
}

/// Receives the values of each sequence, in input order.
pub(super) trait RowWriter {
    /// Result of the run.
    type Written;

    /// Writes the values of the next sequence.
    fn write(&mut self, sequence: &SequenceRecord, values: &[f32]) -> Result<(), EmbedError>;

    /// Writes the next sequence from the results of an interrupted run; false if they do not have it, and it must be
    /// computed.
    fn replay(&mut self, _: &SequenceRecord) -> Result<bool, EmbedError> {
        Ok(false)
    }

    /// Keeps the rows that were written, for a run that ends early.
    fn save(&mut self) -> Result<(), EmbedError> {
        Ok(())
    }

    /// Completes the output; files become visible under their final names.
    fn finish(self) -> Result<Self::Written, EmbedError>;
}

impl<'a, R: RowWriter> EmbedEngine<'a, R> {
    pub(super) fn new(session: Session<'a>, pool: Pooling, tokenizer: &Tokenizer, results: R) -> Self {
        let ends = match (pool, tokenizer) {
            (Pooling::Tokens, Tokenizer::Esm) => [1, 1],
            (Pooling::Tokens, Tokenizer::Bpe(_) | Tokenizer::Text(_))
            | (Pooling::Mean | Pooling::Cls | Pooling::Last, _) => [0, 0],
        };
        Self { session, ends, waiting: VecDeque::new(), replayed: 0, results }
    }

    /// Writes a sequence from the results of an interrupted run; false if it must be computed. Sequences that are written
    /// so come before all others.
    pub(super) fn replay(&mut self, sequence: &SequenceRecord) -> Result<bool, EmbedError> {
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
        sequence: &SequenceRecord,
        tokens: &[i32],
        stop: StopCheck<'_>,
    ) -> Result<(), EmbedError> {
        self.waiting.push_back(sequence.clone());
        while self.push_tokens(tokens)? == Push::Full {
            self.write_next(Some(stop))?;
        }
        // Submit every full pack before returning, so that devices compute while the reader waits for input.
        while self.session.steps().has_packs() {
            self.write_next(Some(stop))?;
        }
        while self.write_next(None)? {}
        Ok(())
    }

    /// Computes a step of the remaining sequences and writes its results; returns false if none remain.
    pub(super) fn drain(&mut self, stop: StopCheck<'_>) -> Result<bool, EmbedError> {
        self.session.end();
        if !self.write_next(Some(stop))? {
            return Ok(false);
        }
        while self.write_next(None)? {}
        Ok(true)
    }

    /// Work of each device.
    pub(super) fn usage(&self) -> &[Usage] {
        self.session.steps().usage()
    }

    /// The program of the size of steps that is in use.
    pub(super) fn program_in_use(&self) -> &plimsoll_plan::Program {
        self.session.steps().program_in_use()
    }

    /// The steps of the session.
    pub(super) fn steps(&mut self) -> &mut StepSession<'a> {
        self.session.steps_mut()
    }

    /// Number of tokens computed so far.
    pub(super) fn tokens(&self) -> u64 {
        self.session.tokens()
    }

    /// Number of sequences written so far.
    pub(super) fn sequences(&self) -> u64 {
        self.replayed + self.session.returned()
    }

    /// Utilization of the packs.
    pub(super) fn fill(&self) -> Fill {
        self.session.fill(0)
    }

    /// Completes the output. `Err` if a sequence has no result.
    pub(super) fn finish(self) -> Result<R::Written, EmbedError> {
        match self.waiting.front() {
            Some(sequence) => Err(RuntimeError::bug(format!("'{}' has no result", sequence.id)).into()),
            None => self.results.finish(),
        }
    }

    fn push_tokens(&mut self, tokens: &[i32]) -> Result<Push, EmbedError> {
        let first = self.session.returned();
        self.session.push_tokens(0, tokens).map_err(|error| named(error, &self.waiting, first))
    }

    /// Writes the next row in input order. Waits for it if `stop` is given, which is called while it waits. Returns false if no row
    /// is complete.
    fn write_next(&mut self, stop: Option<StopCheck<'_>>) -> Result<bool, EmbedError> {
        let Self { session, ends, waiting, results, .. } = self;
        let first = session.returned();
        let next = match stop {
            Some(stop) => session.next_or_stop(stop),
            None => session.poll(),
        };
        let row = match next {
            Ok(Next::Ready(row)) => row,
            Ok(Next::Pending | Next::Finished) => return Ok(false),
            Err(error) => return Err(named(error, waiting, first)),
        };
        let sequence = waiting.front().ok_or_else(|| RuntimeError::bug("a row belongs to no sequence"))?;
        if *ends == [0, 0] {
            results.write(sequence, row.all_values())?;
        } else {
            results.write(sequence, &without_ends(&row, *ends))?;
        }
        waiting.pop_front();
        Ok(true)
    }
}

/// The values of the per-token outputs of a row without those of the special tokens at its `ends`.
fn without_ends(row: &SessionRow<'_>, ends: [usize; 2]) -> Vec<f32> {
    let mut inner = vec![];
    for output in 0..row.outputs() {
        let values = row.values(output);
        // A per-token output has a row for every token of the sequence, special tokens included.
        let width = values.len() / row.tokens();
        inner.extend_from_slice(&values[ends[0] * width..values.len() - ends[1] * width]);
    }
    inner
}

/// Names the sequence of an error by its id. `waiting` are the sequences whose rows were not returned, the first of which has the
/// position `first`.
fn named(error: RuntimeError, waiting: &VecDeque<SequenceRecord>, first: u64) -> EmbedError {
    let RuntimeError::Sequence { position, source } = error else { return error.into() };
    let index = position.saturating_sub(first) as usize;
    let Some(id) = waiting.get(index).map(|sequence| sequence.id.clone()) else {
        return RuntimeError::Sequence { position, source }.into();
    };
    match source {
        SequenceError::LongerThanStep { tokens, most } => EmbedError::LongerThanStep { id, tokens, most },
        SequenceError::NotFinite => EmbedError::NotFinite { id },
        other => RuntimeError::Sequence { position, source: other }.into(),
    }
}
