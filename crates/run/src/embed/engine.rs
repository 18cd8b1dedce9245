//! From tokens to rows: packs, the encoder, and back into input order. Invariant: a sequence that goes in
//! comes out once, in order, with finite values; otherwise an error names it.

use super::front::Sequence;
use super::output::Written;
use super::{Pool, RunError};
use data::pack::{Fill, Order, Pack, Packer};
use exec::Executor;
use graph::Counts;
use models::Encoder;
use std::collections::VecDeque;

/// The encoder's plan in the program.
const ENCODER: usize = 0;

/// The running encoder.
pub(super) struct Engine {
    executor: Executor,
    packer: Packer,
    pool: Pool,
    outputs: Vec<String>,
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
    /// The first token of each sequence of a pack: what `cls` selects.
    rows: Vec<i32>,
    /// The values of each output, of a whole pack.
    values: Vec<Vec<f32>>,
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
    fn write(&mut self, sequence: &Sequence, values: &[f32]) -> Result<(), RunError>;

    /// The files appear.
    fn finish(self: Box<Self>) -> Result<Vec<Written>, RunError>;
}

struct Waiting {
    sequence: Sequence,
    /// Once it is computed.
    values: Option<Vec<f32>>,
}

impl Engine {
    pub(super) fn new(executor: Executor, encoder: &Encoder, reading: Reading, results: Box<dyn Rows>) -> Self {
        let Reading { pool, outputs, width, order } = reading;
        let bounds = executor.program().plans()[ENCODER].1.graph.bounds;
        let (tokens, longest) = (bounds.tokens as usize, bounds.longest as usize);
        let ends = match encoder {
            Encoder::Esm2(_) => [1, 1],
            Encoder::DnabertS(_) => [0, 0],
        };
        Self {
            packer: Packer::new(tokens, bounds.sequences as usize, longest, order),
            pool,
            values: vec![vec![]; outputs.len()],
            outputs,
            width,
            ends,
            longest: longest.min(tokens),
            waiting: VecDeque::new(),
            first: 0,
            free: vec![],
            rows: vec![],
            tokens: 0,
            executor,
            results,
        }
    }

    /// Adds a sequence and computes the packs that are full by now.
    pub(super) fn push(&mut self, sequence: &Sequence, tokens: &[i32]) -> Result<(), RunError> {
        let id = &sequence.id;
        if tokens.len() > self.longest {
            let (n, most) = (tokens.len(), self.longest);
            let text = format!("'{id}' has {n} tokens and a step holds {most}; give --tokens {n} or more");
            return Err(RunError::Refused(text));
        }
        let owner = self.first + self.waiting.len() as u64;
        self.packer.push(owner, tokens).map_err(|e| e.with_id(id.as_str()))?;
        self.waiting.push_back(Waiting { sequence: sequence.clone(), values: None });
        self.compute(false)
    }

    /// Computes what is left.
    pub(super) fn drain(&mut self) -> Result<(), RunError> {
        self.compute(true)
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
    pub(super) fn finish(self) -> Result<Vec<Written>, RunError> {
        match self.waiting.front() {
            Some(w) => {
                let text = format!("'{}' has no result; this is a bug of ours", w.sequence.id);
                Err(RunError::Refused(text))
            }
            None => self.results.finish(),
        }
    }

    fn compute(&mut self, flush: bool) -> Result<(), RunError> {
        while let Some(pack) = self.packer.next_pack(flush) {
            self.step(&pack)?;
            self.packer.recycle(pack);
        }
        Ok(())
    }

    fn step(&mut self, pack: &Pack) -> Result<(), RunError> {
        let (tokens, sequences) = (pack.tokens.len(), pack.spans.len());
        self.executor.input_i32(ENCODER, "ids", &pack.tokens)?;
        self.executor.input_i32(ENCODER, "spans", bytemuck::cast_slice(&pack.spans))?;
        if self.pool == Pool::Cls {
            self.rows.clear();
            self.rows.extend(pack.spans.iter().map(|[start, _]| *start));
            self.executor.input_i32(ENCODER, "rows", &self.rows)?;
        }
        let rows = match self.pool {
            Pool::Mean | Pool::Cls => sequences,
            Pool::Tokens => tokens,
        };
        self.executor.run(ENCODER, Counts { tokens: tokens as u64, sequences: sequences as u64 })?;
        for (name, values) in self.outputs.iter().zip(&mut self.values) {
            values.resize(rows * self.width, 0.0);
            self.executor.output_f32(ENCODER, name, values)?;
        }
        self.tokens += tokens as u64;
        for (i, (&owner, &[start, end])) in pack.owners.iter().zip(&pack.spans).enumerate() {
            let rows = match self.pool {
                Pool::Mean | Pool::Cls => i..i + 1,
                Pool::Tokens => start as usize + self.ends[0]..end as usize - self.ends[1],
            };
            self.keep(owner, rows.start * self.width..rows.end * self.width)?;
        }
        self.write()
    }

    /// Puts a range of the values of every output in its owner's place.
    fn keep(&mut self, owner: u64, range: std::ops::Range<usize>) -> Result<(), RunError> {
        let place = owner.checked_sub(self.first).and_then(|at| self.waiting.get_mut(at as usize));
        let Some(waiting) = place.filter(|w| w.values.is_none()) else {
            return Err(RunError::Refused(format!("sequence {owner} has two results; this is a bug of ours")));
        };
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.clear();
        for values in &self.values {
            buffer.extend_from_slice(&values[range.clone()]);
        }
        if !buffer.iter().all(|x| x.is_finite()) {
            let text = format!(
                "'{}': its embedding has a value that is no finite number; check the weights",
                waiting.sequence.id
            );
            return Err(RunError::Refused(text));
        }
        waiting.values = Some(buffer);
        Ok(())
    }

    /// Writes the oldest sequences up to the first that is not computed.
    fn write(&mut self) -> Result<(), RunError> {
        while let Some(Waiting { sequence, values: Some(values) }) = self.waiting.front_mut() {
            self.results.write(sequence, values)?;
            self.free.push(std::mem::take(values));
            self.waiting.pop_front();
            self.first += 1;
        }
        Ok(())
    }
}
