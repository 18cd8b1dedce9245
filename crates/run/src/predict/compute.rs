//! The arithmetic of a prediction: open reading frames get a slot, travel through the packers and encoders in
//! any company, meet in their slot, and are scored by the head.
//! Invariant: embeddings are keyed by slot and never by position in a batch; a slot is free again only when
//! its result has been taken.

use super::Options;
use super::engine::Totals;
use super::produce::{Batch, OrfTokens};
use super::program::{DNA, HEAD_ROWS, PLANS, PROTEIN, Shape};
use super::queue::{PendingOrf, Place, Queue, State, Window};
use super::stage::Stage;
use crate::RunError;
use data::pack::{Fill, Order, Pack, Packer};
use exec::Executor;
use graph::{Bytes, Counts};
use std::time::Instant;

/// Rows that are worth a step of the head. Not many: what waits for the head is lost in a kill.
const SCORED_AT: usize = 16;

/// What an open reading frame has so far.
#[derive(Clone, Copy, Default)]
struct Slot {
    place: Place,
    have: [bool; 2],
    failed: bool,
}

/// The arithmetic of a prediction.
pub(crate) struct Compute {
    executor: Executor,
    stage: Stage,
    /// Whether slots keep their embeddings until the window is written.
    holds_rows: bool,
    /// The places of both encoders and the head in the program.
    plans: [Option<usize>; 3],
    packers: [Packer; 2],
    widths: [usize; 2],
    slots: Vec<Slot>,
    free: Vec<usize>,
    ready: Vec<usize>,
    /// Rows of an encoder's step.
    rows: Vec<f32>,
}

impl Compute {
    pub(crate) fn new(executor: Executor, stage: Stage, shape: &Shape, options: &Options) -> Self {
        let program = executor.program();
        let plans = PLANS.map(|name| program.index(name));
        let bounds = |encoder: usize| plans[encoder].map(|plan| program.plans()[plan].1.graph.bounds);
        let order = if options.sort_by_length { Order::ByLength } else { Order::Input };
        let packers = [DNA, PROTEIN].map(|encoder| match bounds(encoder) {
            Some(b) => Packer::new(b.tokens as usize, b.sequences as usize, b.longest as usize, order),
            None => Packer::new(0, 0, 0, order),
        });
        let widths = [shape.head.dna as usize, shape.head.protein as usize];
        let both = [DNA, PROTEIN].map(bounds);
        let tokens = both.iter().flatten().map(|b| b.tokens).max().unwrap_or(0);
        let most_rows = both.iter().flatten().map(|b| b.sequences).max().unwrap_or(0);
        let slots = shape.slots(tokens) as usize;
        Self {
            stage,
            holds_rows: options.save_embeddings.is_some() || stage == Stage::Nucleotide,
            plans,
            packers,
            widths,
            slots: vec![Slot::default(); slots],
            // Taken from the end: low numbers first.
            free: (0..slots).rev().collect(),
            ready: Vec::with_capacity(slots),
            rows: vec![0.0; most_rows as usize * widths[0].max(widths[1])],
            executor,
        }
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// The executor, for another run of this stage.
    pub(crate) fn into_executor(self) -> (Stage, Executor) {
        (self.stage, self.executor)
    }

    /// Values of a nucleotide embedding.
    pub(crate) fn nucleotide_width(&self) -> usize {
        self.widths[DNA]
    }

    /// Packing fill of both encoders.
    pub(crate) fn fill(&self) -> [Fill; 2] {
        [self.packers[DNA].fill(), self.packers[PROTEIN].fill()]
    }

    /// Whether another open reading frame can come in.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes an open reading frame of the window that was queued last; its nucleotide embedding, where another
    /// run has computed it. Only while there is room.
    pub(crate) fn admit(
        &mut self,
        batch: &Batch,
        orf: &OrfTokens,
        queue: &mut Queue,
        embedding: Option<&[f32]>,
    ) -> Result<(), RunError> {
        let Some(slot) = self.free.pop() else {
            return Err(RunError::Refused("no slot is free; this is a bug of ours".to_owned()));
        };
        let place = queue.push_orf(orf.frame, orf.bases, slot);
        self.slots[slot] = Slot { place, ..Slot::default() };
        if let Some(row) = embedding {
            self.executor.upload_f32(self.staging(DNA, slot), row)?;
            self.slots[slot].have[DNA] = true;
            self.slots[slot].failed = !row.iter().all(|x| x.is_finite());
        }
        if self.stage.runs(DNA) {
            self.packers[DNA].push(slot as u64, &batch.dna[orf.dna.clone()])?;
        }
        if self.stage.runs(PROTEIN) {
            self.packers[PROTEIN].push(slot as u64, &batch.protein[orf.protein.clone()])?;
        }
        Ok(())
    }

    /// Runs a full pack of each encoder, where there is one; with `force` one of what is there, full or not.
    /// Whether anything ran.
    pub(crate) fn step(
        &mut self,
        force: bool,
        queue: &mut Queue,
        totals: &mut Totals,
    ) -> Result<bool, RunError> {
        let mut ran = false;
        for encoder in [DNA, PROTEIN] {
            let Some(pack) = self.packers[encoder].next_pack(force) else { continue };
            self.encode(encoder, &pack, queue, totals)?;
            self.packers[encoder].recycle(pack);
            ran = true;
        }
        if self.ready.len() >= SCORED_AT || force {
            self.score_ready(queue, totals)?;
        }
        Ok(ran)
    }

    /// Scores what has both embeddings.
    pub(crate) fn score_ready(&mut self, queue: &mut Queue, totals: &mut Totals) -> Result<(), RunError> {
        while !self.ready.is_empty() {
            self.score(queue, totals)?;
        }
        Ok(())
    }

    /// Appends the embeddings of a window's frames to `rows`, in the order of frames, and frees their slots.
    pub(crate) fn release(&mut self, window: &Window, rows: &mut Vec<f32>) -> Result<(), RunError> {
        if !self.holds_rows {
            return Ok(());
        }
        let encoders: &[usize] = if self.stage == Stage::Nucleotide { &[DNA] } else { &[DNA, PROTEIN] };
        for slot in window.embedded().filter_map(PendingOrf::slot) {
            for &encoder in encoders {
                let start = rows.len();
                rows.resize(start + self.widths[encoder], 0.0);
                self.executor.download_f32(self.staging(encoder, slot), &mut rows[start..])?;
            }
        }
        self.free.extend(window.orfs().filter_map(PendingOrf::slot));
        Ok(())
    }

    /// Where in the arena a slot's embedding is.
    fn staging(&self, encoder: usize, slot: usize) -> u64 {
        self.executor.program().staging_address(encoder) + (slot * self.widths[encoder] * 4) as u64
    }

    fn plan(&self, part: usize) -> Result<usize, RunError> {
        self.plans[part].ok_or_else(|| RunError::Refused("a plan is missing; this is a bug of ours".to_owned()))
    }

    /// One step of an encoder: embeddings go to the slots of their owners.
    fn encode(
        &mut self,
        encoder: usize,
        pack: &Pack,
        queue: &mut Queue,
        totals: &mut Totals,
    ) -> Result<(), RunError> {
        let start = Instant::now();
        let plan = self.plan(encoder)?;
        let (n, width) = (pack.owners.len(), self.widths[encoder]);
        let counts = Counts { tokens: pack.tokens.len() as u64, sequences: n as u64 };
        self.executor.input_i32(plan, "ids", &pack.tokens)?;
        self.executor.input_i32(plan, "spans", bytemuck::cast_slice(&pack.spans))?;
        self.executor.run(plan, counts)?;
        self.executor.output_f32(plan, "mean", &mut self.rows[..n * width])?;
        let from = self.executor.output_address(plan, "mean")?;
        let bytes = Bytes(width as u64 * 4);
        for (i, &owner) in pack.owners.iter().enumerate() {
            let slot = owner as usize;
            self.executor.copy(from + i as u64 * bytes.0, self.staging(encoder, slot), bytes)?;
            let finite = self.rows[i * width..(i + 1) * width].iter().all(|x| x.is_finite());
            self.slots[slot].have[encoder] = true;
            self.slots[slot].failed |= !finite;
            self.meet(slot, queue, totals);
        }
        totals.tokens[encoder] += counts.tokens;
        totals.seconds.encoders[encoder] += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// What comes next for a slot that has got an embedding.
    fn meet(&mut self, slot: usize, queue: &mut Queue, totals: &mut Totals) {
        let Slot { have, failed, .. } = self.slots[slot];
        let all = if self.stage.scores() { have == [true, true] } else { have[DNA] };
        match (all, failed, self.stage.scores()) {
            (false, _, _) => {}
            (true, true, _) => self.settle(slot, State::Failed, queue, totals),
            (true, false, true) => self.ready.push(slot),
            (true, false, false) => self.settle(slot, State::Embedded, queue, totals),
        }
    }

    /// One step of the head over slots that have both embeddings.
    fn score(&mut self, queue: &mut Queue, totals: &mut Totals) -> Result<(), RunError> {
        let start = Instant::now();
        let head = self.plan(super::program::HEAD)?;
        let n = self.ready.len().min(HEAD_ROWS as usize);
        let batch: Vec<usize> = self.ready.drain(..n).collect();
        for (encoder, name) in [(DNA, "dna"), (PROTEIN, "protein")] {
            let input = self.executor.input_address(head, name)?;
            let bytes = Bytes(self.widths[encoder] as u64 * 4);
            for (i, &slot) in batch.iter().enumerate() {
                self.executor.copy(self.staging(encoder, slot), input + i as u64 * bytes.0, bytes)?;
            }
        }
        self.executor.run(head, Counts { tokens: 0, sequences: n as u64 })?;
        let mut scores = vec![0.0; 2 * n];
        self.executor.output_f32(head, "scores", &mut scores)?;
        for (&slot, s) in batch.iter().zip(scores.chunks_exact(2)) {
            let finite = s.iter().all(|x| x.is_finite());
            let state = if finite { State::Scored([s[0], s[1]]) } else { State::Failed };
            self.settle(slot, state, queue, totals);
        }
        totals.seconds.head += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// An open reading frame is through.
    fn settle(&mut self, slot: usize, state: State, queue: &mut Queue, totals: &mut Totals) {
        totals.orfs += 1;
        queue.settle(self.slots[slot].place, state);
        if !self.holds_rows {
            self.free.push(slot);
        }
    }
}
