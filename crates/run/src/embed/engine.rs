//! From tokens to rows: packs, the encoder, and back into input order. Invariant: a sequence that goes in
//! comes out once, in order, with finite values; otherwise an error names it.

use super::output::Sink;
use super::{Pool, RunError};
use data::pack::{Fill, Pack, Packer};
use exec::Executor;
use graph::Counts;
use models::Encoder;
use std::collections::VecDeque;
use std::path::PathBuf;

/// The encoder's plan in the program.
const ENCODER: usize = 0;

/// The running encoder.
pub(super) struct Engine {
    executor: Executor,
    packer: Packer,
    pool: Pool,
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
    values: Vec<f32>,
    tokens: u64,
    sink: Sink,
}

struct Waiting {
    id: String,
    /// Once it is computed.
    values: Option<Vec<f32>>,
}

impl Engine {
    pub(super) fn new(executor: Executor, encoder: &Encoder, pool: Pool, sink: Sink) -> Self {
        let bounds = executor.program().plans()[ENCODER].1.graph.bounds;
        let (tokens, longest) = (bounds.tokens as usize, bounds.longest as usize);
        let ends = match encoder {
            Encoder::Esm2(_) => [1, 1],
            Encoder::DnabertS(_) => [0, 0],
        };
        Self {
            packer: Packer::new(tokens, bounds.sequences as usize, longest),
            pool,
            width: encoder.hidden_size() as usize,
            ends,
            longest: longest.min(tokens),
            waiting: VecDeque::new(),
            first: 0,
            free: vec![],
            rows: vec![],
            values: vec![],
            tokens: 0,
            executor,
            sink,
        }
    }

    /// Adds a sequence and computes the packs that are full by now.
    pub(super) fn push(&mut self, id: &str, tokens: &[i32]) -> Result<(), RunError> {
        if tokens.len() > self.longest {
            let (n, most) = (tokens.len(), self.longest);
            let text = format!("'{id}' has {n} tokens and a step holds {most}; give --tokens {n} or more");
            return Err(RunError::Refused(text));
        }
        let owner = self.first + self.waiting.len() as u64;
        self.packer.push(owner, tokens).map_err(|e| e.with_id(id))?;
        self.waiting.push_back(Waiting { id: id.to_owned(), values: None });
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
    pub(super) fn finish(self, metadata: &[(&str, &str)]) -> Result<(Vec<PathBuf>, u64), RunError> {
        match self.waiting.front() {
            Some(w) => Err(RunError::Refused(format!("'{}' has no result; this is a bug of ours", w.id))),
            None => self.sink.finish(metadata),
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
        let (name, rows) = match self.pool {
            Pool::Mean => ("mean", sequences),
            Pool::Cls => {
                self.rows.clear();
                self.rows.extend(pack.spans.iter().map(|[start, _]| *start));
                self.executor.input_i32(ENCODER, "rows", &self.rows)?;
                ("cls", sequences)
            }
            Pool::Tokens => ("hidden", tokens),
        };
        self.executor.run(ENCODER, Counts { tokens: tokens as u64, sequences: sequences as u64 })?;
        self.values.resize(rows * self.width, 0.0);
        self.executor.output_f32(ENCODER, name, &mut self.values)?;
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

    /// Puts a range of the values in its owner's place.
    fn keep(&mut self, owner: u64, range: std::ops::Range<usize>) -> Result<(), RunError> {
        let place = owner.checked_sub(self.first).and_then(|at| self.waiting.get_mut(at as usize));
        let Some(waiting) = place.filter(|w| w.values.is_none()) else {
            return Err(RunError::Refused(format!("sequence {owner} has two results; this is a bug of ours")));
        };
        let values = &self.values[range];
        if !values.iter().all(|x| x.is_finite()) {
            let text = format!(
                "'{}': its embedding has a value that is no finite number; check the weights",
                waiting.id
            );
            return Err(RunError::Refused(text));
        }
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(values);
        waiting.values = Some(buffer);
        Ok(())
    }

    /// Writes the oldest sequences up to the first that is not computed.
    fn write(&mut self) -> Result<(), RunError> {
        while let Some(Waiting { id, values: Some(values) }) = self.waiting.front_mut() {
            self.sink.write(id, values)?;
            self.free.push(std::mem::take(values));
            self.waiting.pop_front();
            self.first += 1;
        }
        Ok(())
    }
}
