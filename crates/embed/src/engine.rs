//! From tokens to rows: packs, the encoder, and back into input order. Invariant: a sequence that goes in
//! comes out once, in order, with finite values; otherwise an error names it.

use super::front::Sequence;
use super::output::Written;
use super::{Pool, RuntimeError};
use data::pack::{Fill, Order, Pack, Packer};
use exec::Executor;
use graph::Counts;
use models::Encoder;
use runtime::lanes::{Done, Lanes, PARTS, Stop, Usage, Values, Work};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The encoder's plan in the program.
const ENCODER: usize = 0;

/// The running encoder.
pub(super) struct Engine {
    /// A step belongs to the owners of its sequences.
    lanes: Lanes<Vec<u64>>,
    packer: Packer,
    pool: Pool,
    outputs: Arc<[String]>,
    width: usize,
    /// Special tokens at the start and the end of a sequence that `tokens` leaves out.
    ends: [usize; 2],
    longest: usize,
    /// Sequences that are not written yet, oldest first.
    waiting: VecDeque<Waiting>,
    /// The number of the oldest of them; numbers count pushes.
    first: u64,
    /// Buffers of rows that were written.
    free: Vec<Vec<f32>>,
    /// Buffers of steps that are back: a vector for each output.
    spare: Vec<Vec<Vec<f32>>>,
    tokens: u64,
    results: Box<dyn Rows>,
}

/// What a step gives.
pub(super) struct Reading {
    pub(super) pool: Pool,
    /// The outputs of the plan that make the values of a sequence, one after the other.
    pub(super) outputs: Vec<String>,
    /// Columns of each.
    pub(super) width: usize,
    pub(super) order: Order,
}

/// Where values go, in input order.
pub(super) trait Rows {
    /// Those of the next sequence.
    fn write(&mut self, sequence: &Sequence, values: &[f32]) -> Result<(), RuntimeError>;

    /// What is held of so many sequences, where that is known, with names of so many bytes.
    fn held(&self, sequences: Option<u64>, name: u64) -> u64;

    /// The files appear.
    fn finish(self: Box<Self>) -> Result<Vec<Written>, RuntimeError>;
}

struct Waiting {
    sequence: Sequence,
    /// Once it is computed.
    values: Option<Vec<f32>>,
}

impl Engine {
    pub(super) fn new(
        executors: Vec<Executor>,
        encoder: &Encoder,
        reading: Reading,
        results: Box<dyn Rows>,
    ) -> Result<Self, RuntimeError> {
        let Reading { pool, outputs, width, order } = reading;
        let lanes = Lanes::new(executors)?;
        let bounds = lanes.program().plans()[ENCODER].1.graph.bounds;
        let (tokens, longest) = (bounds.tokens as usize, bounds.longest as usize);
        let ends = match encoder {
            Encoder::Esm2(_) => [1, 1],
            Encoder::DnabertS(_) => [0, 0],
        };
        Ok(Self {
            packer: Packer::new(tokens, bounds.sequences as usize, longest, order),
            pool,
            outputs: outputs.into(),
            width,
            ends,
            longest: longest.min(tokens),
            waiting: VecDeque::new(),
            first: 0,
            free: vec![],
            spare: vec![],
            tokens: 0,
            lanes,
            results,
        })
    }

    /// Adds a sequence and sends off the packs that are full by now.
    pub(super) fn push(
        &mut self,
        sequence: &Sequence,
        tokens: &[i32],
        stop: Stop<'_>,
    ) -> Result<(), RuntimeError> {
        let id = &sequence.id;
        if tokens.len() > self.longest {
            let (n, most) = (tokens.len(), self.longest);
            let text = format!("'{id}' has {n} tokens and a step holds {most}; give --tokens {n} or more");
            return Err(RuntimeError::Refused(text));
        }
        let owner = self.first + self.waiting.len() as u64;
        self.packer.push(owner, tokens).map_err(|e| e.with_id(id.as_str()))?;
        self.waiting.push_back(Waiting { sequence: sequence.clone(), values: None });
        self.compute(false, stop)
    }

    /// Computes what is left, cut so that every device gets some.
    pub(super) fn drain(&mut self, stop: Stop<'_>) -> Result<(), RuntimeError> {
        if self.lanes.working() > 1 {
            self.packer.cut(PARTS * self.lanes.working());
        }
        self.compute(true, stop)?;
        while self.wait(stop)? {}
        Ok(())
    }

    /// What the devices follow.
    pub(super) fn program(&self) -> &plan::Program {
        self.lanes.program()
    }

    /// What each device did.
    pub(super) fn usage(&self) -> &[Usage] {
        self.lanes.usage()
    }

    /// What is to be said since the last call.
    pub(super) fn warnings(&mut self) -> Vec<String> {
        self.lanes.warnings()
    }

    /// Tokens computed so far.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Sequences written so far.
    pub(super) fn sequences(&self) -> u64 {
        self.first
    }

    pub(super) fn fill(&self) -> Fill {
        self.packer.fill()
    }

    /// The files appear. Every sequence must have been computed.
    pub(super) fn finish(self) -> Result<Vec<Written>, RuntimeError> {
        match self.waiting.front() {
            Some(w) => {
                let text = format!("'{}' has no result; this is a bug of ours", w.sequence.id);
                Err(RuntimeError::Refused(text))
            }
            None => self.results.finish(),
        }
    }

    fn compute(&mut self, flush: bool, stop: Stop<'_>) -> Result<(), RuntimeError> {
        while let Some(pack) = self.packer.next_pack(flush) {
            while !self.lanes.has_room() && self.wait(stop)? {}
            self.send(pack);
        }
        while let Some(done) = self.lanes.poll()? {
            self.settle(done)?;
        }
        Ok(())
    }

    fn send(&mut self, pack: Pack) {
        let Pack { tokens, spans, owners } = pack;
        let counts = Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64 };
        let rows = match self.pool {
            Pool::Mean | Pool::Cls => spans.len(),
            Pool::Tokens => tokens.len(),
        };
        let firsts: Option<Vec<i32>> =
            (self.pool == Pool::Cls).then(|| spans.iter().map(|[start, _]| *start).collect());
        let mut inputs = vec![("ids", Values::I32(tokens)), ("spans", Values::Spans(spans))];
        // What `cls` selects: the first token of each sequence.
        inputs.extend(firsts.map(|rows| ("rows", Values::I32(rows))));
        self.lanes.send(Work {
            plan: ENCODER,
            inputs,
            counts,
            outputs: Arc::clone(&self.outputs),
            wanted: rows * self.width,
            values: self.spare.pop().unwrap_or_default(),
            tag: owners,
        });
    }

    /// Waits for a step; false where none is on its way.
    fn wait(&mut self, stop: Stop<'_>) -> Result<bool, RuntimeError> {
        let Some(done) = self.lanes.wait(stop)? else { return Ok(false) };
        self.settle(done)?;
        Ok(true)
    }

    /// Takes the values of a step, and writes what is complete by then.
    fn settle(&mut self, done: Done<Vec<u64>>) -> Result<(), RuntimeError> {
        let Work { inputs, counts, values, tag: owners, .. } = done.work;
        let mut buffers = inputs.into_iter().map(|(_, values)| values);
        let (Some(Values::I32(tokens)), Some(Values::Spans(spans))) = (buffers.next(), buffers.next()) else {
            return Err(RuntimeError::Refused(
                "a step came back without its sequences; this is a bug of ours".to_owned(),
            ));
        };
        self.tokens += counts.tokens;
        for (i, (&owner, &[start, end])) in owners.iter().zip(&spans).enumerate() {
            let rows = match self.pool {
                Pool::Mean | Pool::Cls => i..i + 1,
                Pool::Tokens => start as usize + self.ends[0]..end as usize - self.ends[1],
            };
            self.keep(owner, rows.start * self.width..rows.end * self.width, &values)?;
        }
        self.spare.push(values);
        self.packer.recycle(Pack { tokens, spans, owners });
        self.write()
    }

    /// Puts a range of the values of every output in its owner's place.
    fn keep(&mut self, owner: u64, range: Range<usize>, values: &[Vec<f32>]) -> Result<(), RuntimeError> {
        let place = owner.checked_sub(self.first).and_then(|at| self.waiting.get_mut(at as usize));
        let Some(waiting) = place.filter(|w| w.values.is_none()) else {
            return Err(RuntimeError::Refused(format!(
                "sequence {owner} has two results; this is a bug of ours"
            )));
        };
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.clear();
        for values in values {
            buffer.extend_from_slice(&values[range.clone()]);
        }
        if !buffer.iter().all(|x| x.is_finite()) {
            let text = format!(
                "'{}': its embedding has a value that is no finite number; check the weights",
                waiting.sequence.id
            );
            return Err(RuntimeError::Refused(text));
        }
        waiting.values = Some(buffer);
        Ok(())
    }

    /// Writes the oldest sequences up to the first that is not computed.
    fn write(&mut self) -> Result<(), RuntimeError> {
        while let Some(Waiting { sequence, values: Some(values) }) = self.waiting.front_mut() {
            self.results.write(sequence, values)?;
            self.free.push(std::mem::take(values));
            self.waiting.pop_front();
            self.first += 1;
        }
        Ok(())
    }
}
