//! The compute side: events in, results out. Open reading frames get a slot, travel through both packers and
//! encoders in any company, meet in their slot, and are scored by the head.
//! Invariant: embeddings are keyed by slot and never by position in a batch; a slot is free again only when
//! its result has been taken.

use super::output::{Note, OrfScore, Outputs, RecordEnd, Window as OutputWindow};
use super::produce::{Batch, Event, OrfTokens};
use super::program::{DNA, HEAD, HEAD_ROWS, PROTEIN, Shape};
use super::queue::{Item, Place, Queue, State, Window};
use crate::{Progress, RunError};
use data::intermediate::orf_name;
use data::pack::{Fill, Pack, Packer};
use exec::Executor;
use graph::{Bytes, Counts};
use std::sync::Arc;
use std::time::Instant;

/// Items that may wait for one open reading frame: beyond it packs are sent off half empty, so that input
/// with hardly any open reading frames does not pile up.
const MOST_WAITING: usize = 1 << 16;

/// Bytes of sequences and texts that may wait so: 2^16 windows of 100 000 bases would be 6 GB.
const MOST_BYTES_WAITING: usize = 32 << 20;

/// What an open reading frame has so far.
#[derive(Clone, Copy, Default)]
struct Slot {
    place: Place,
    have: [bool; 2],
    failed: bool,
}

/// Seconds by stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seconds {
    pub(crate) waiting: f64,
    pub(crate) encoders: [f64; 2],
    pub(crate) head: f64,
    pub(crate) writing: f64,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) records: u64,
    pub(crate) orfs: u64,
    pub(crate) failed: u64,
    pub(crate) tokens: [u64; 2],
    pub(crate) seconds: Seconds,
}

/// How the engine treats what it finds.
#[derive(Clone, Copy)]
pub(crate) struct Manner {
    /// What is odd is an error.
    pub(crate) strict: bool,
    /// Embeddings are written.
    pub(crate) embeddings: bool,
}

/// The compute side.
pub(crate) struct Engine {
    executor: Executor,
    packers: [Packer; 2],
    widths: [usize; 2],
    slots: Vec<Slot>,
    free: Vec<usize>,
    ready: Vec<usize>,
    queue: Queue,
    outputs: Outputs,
    manner: Manner,
    /// Rows of an encoder's step, or of the head's.
    rows: Vec<f32>,
    row: Vec<f32>,
    scored: Vec<OrfScore>,
    pub(crate) totals: Totals,
    started: Instant,
}

impl Engine {
    pub(crate) fn new(executor: Executor, shape: &Shape, outputs: Outputs, manner: Manner) -> Self {
        let bounds = |plan: usize| executor.program().plans()[plan].1.graph.bounds;
        let packer = |plan: usize| {
            let b = bounds(plan);
            Packer::new(b.tokens as usize, b.sequences as usize, b.longest as usize)
        };
        let packers = [packer(DNA), packer(PROTEIN)];
        let widths = [shape.head.dna as usize, shape.head.protein as usize];
        let slots = shape.slots(bounds(DNA).tokens) as usize;
        let most_rows = bounds(DNA).sequences.max(bounds(PROTEIN).sequences).max(HEAD_ROWS) as usize;
        let width = widths[0].max(widths[1]);
        Self {
            executor,
            packers,
            widths,
            slots: vec![Slot::default(); slots],
            // Taken from the end: low numbers first.
            free: (0..slots).rev().collect(),
            ready: Vec::with_capacity(slots),
            queue: Queue::default(),
            outputs,
            manner,
            rows: vec![0.0; most_rows * width],
            row: vec![0.0; widths[0] + widths[1]],
            scored: Vec::with_capacity(6),
            totals: Totals::default(),
            started: Instant::now(),
        }
    }

    /// Takes what happened in one job.
    pub(crate) fn take(&mut self, mut batch: Batch) -> Result<(), RunError> {
        let mut orfs = std::mem::take(&mut batch.orfs).into_iter();
        self.queue.push(Item::Text(std::mem::take(&mut batch.text)));
        for event in std::mem::take(&mut batch.events) {
            match event {
                Event::Window { record, chunk, orfs: count } => {
                    self.queue.push(Item::Window(Window::new(record, chunk, count)));
                    for orf in orfs.by_ref().take(count) {
                        self.admit(&batch, &orf)?;
                    }
                }
                Event::End { record, length, sequence } => {
                    self.queue.push(Item::End { record, length, sequence });
                }
                Event::Note(note) => self.note(note)?,
            }
        }
        self.advance(false)?;
        while self.queue.len() > MOST_WAITING || self.queue.bytes() > MOST_BYTES_WAITING {
            self.advance(true)?;
        }
        Ok(())
    }

    /// Sends off everything that waits.
    pub(crate) fn drain(&mut self) -> Result<(), RunError> {
        while self.queue.len() > 0 {
            self.advance(true)?;
        }
        Ok(())
    }

    /// Packing fill of both encoders.
    pub(crate) fn fill(&self) -> [Fill; 2] {
        [self.packers[0].fill(), self.packers[1].fill()]
    }

    /// How far it is.
    pub(crate) fn progress(&self, bytes: u64, bytes_total: Option<u64>) -> Progress {
        Progress {
            bytes,
            bytes_total,
            records: self.totals.records,
            sequences: self.totals.orfs,
            tokens: self.totals.tokens.iter().sum(),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// The executor and the results, when everything is through.
    pub(crate) fn into_parts(self) -> (Executor, Outputs, Totals) {
        (self.executor, self.outputs, self.totals)
    }

    fn note(&mut self, note: Note) -> Result<(), RunError> {
        if self.manner.strict {
            let Note { seq_name, kind, detail, .. } = note;
            let text = format!("--strict: '{seq_name}': {kind}: {detail}; mend it, or leave --strict away");
            return Err(RunError::Refused(text));
        }
        self.queue.push(Item::Note(note));
        Ok(())
    }

    fn admit(&mut self, batch: &Batch, orf: &OrfTokens) -> Result<(), RunError> {
        while self.free.is_empty() {
            self.advance(true)?;
        }
        let Some(slot) = self.free.pop() else {
            return Err(RunError::Refused("no slot is free; this is a bug of ours".to_owned()));
        };
        let place = self.queue.push_orf(orf.frame, slot);
        self.slots[slot] = Slot { place, ..Slot::default() };
        self.packers[DNA].push(slot as u64, &batch.dna[orf.dna.clone()])?;
        self.packers[PROTEIN].push(slot as u64, &batch.protein[orf.protein.clone()])?;
        Ok(())
    }

    /// Runs what is ready; with `force` also a pack of what is there, full or not.
    fn advance(&mut self, force: bool) -> Result<(), RunError> {
        for plan in [DNA, PROTEIN] {
            let mut flush = force;
            while let Some(pack) = self.packers[plan].next_pack(flush) {
                self.encode(plan, &pack)?;
                self.packers[plan].recycle(pack);
                flush = false;
            }
        }
        while self.ready.len() >= HEAD_ROWS as usize || (force && !self.ready.is_empty()) {
            self.score()?;
        }
        self.emit()
    }

    /// One step of an encoder: embeddings go to the slots of their owners.
    fn encode(&mut self, plan: usize, pack: &Pack) -> Result<(), RunError> {
        let start = Instant::now();
        let (n, width) = (pack.owners.len(), self.widths[plan]);
        let counts = Counts { tokens: pack.tokens.len() as u64, sequences: n as u64 };
        self.executor.input_i32(plan, "ids", &pack.tokens)?;
        self.executor.input_i32(plan, "spans", bytemuck::cast_slice(&pack.spans))?;
        self.executor.run(plan, counts)?;
        self.executor.output_f32(plan, "mean", &mut self.rows[..n * width])?;
        let from = self.executor.output_address(plan, "mean")?;
        let staging = self.executor.program().staging_address(plan);
        let bytes = Bytes(width as u64 * 4);
        for (i, &owner) in pack.owners.iter().enumerate() {
            let slot = owner as usize;
            self.executor.copy(from + i as u64 * bytes.0, staging + owner * bytes.0, bytes)?;
            let finite = self.rows[i * width..(i + 1) * width].iter().all(|x| x.is_finite());
            self.slots[slot].have[plan] = true;
            self.slots[slot].failed |= !finite;
            match (self.slots[slot].have, self.slots[slot].failed) {
                ([true, true], false) => self.ready.push(slot),
                ([true, true], true) => self.settle(slot, State::Failed),
                _ => {}
            }
        }
        self.totals.tokens[plan] += counts.tokens;
        self.totals.seconds.encoders[plan] += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// One step of the head over slots that have both embeddings.
    fn score(&mut self) -> Result<(), RunError> {
        let start = Instant::now();
        let n = self.ready.len().min(HEAD_ROWS as usize);
        let batch: Vec<usize> = self.ready.drain(..n).collect();
        for (plan, name) in [(DNA, "dna"), (PROTEIN, "protein")] {
            let input = self.executor.input_address(HEAD, name)?;
            let staging = self.executor.program().staging_address(plan);
            let bytes = Bytes(self.widths[plan] as u64 * 4);
            for (i, &slot) in batch.iter().enumerate() {
                self.executor.copy(staging + slot as u64 * bytes.0, input + i as u64 * bytes.0, bytes)?;
            }
        }
        self.executor.run(HEAD, Counts { tokens: 0, sequences: n as u64 })?;
        let mut scores = vec![0.0; 2 * n];
        self.executor.output_f32(HEAD, "scores", &mut scores)?;
        for (&slot, s) in batch.iter().zip(scores.chunks_exact(2)) {
            let finite = s.iter().all(|x| x.is_finite());
            self.settle(slot, if finite { State::Scored([s[0], s[1]]) } else { State::Failed });
        }
        self.totals.seconds.head += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// An open reading frame is through.
    fn settle(&mut self, slot: usize, state: State) {
        self.totals.orfs += 1;
        self.queue.settle(self.slots[slot].place, state);
        if !self.manner.embeddings {
            self.free.push(slot);
        }
    }

    /// Writes what is complete, in input order.
    fn emit(&mut self) -> Result<(), RunError> {
        let start = Instant::now();
        while let Some(item) = self.queue.pop_complete() {
            match item {
                Item::Window(window) => self.write(&window)?,
                Item::End { record, length, sequence } => {
                    self.totals.records += 1;
                    let sequence = sequence.as_deref().map(Vec::as_slice);
                    self.outputs.record(&RecordEnd { id: &record, length, sequence })?;
                }
                Item::Note(note) => self.outputs.note(&note)?,
                Item::Text(text) => self.outputs.intermediate(&text)?,
            }
        }
        self.totals.seconds.writing += start.elapsed().as_secs_f64();
        Ok(())
    }

    fn write(&mut self, window: &Window) -> Result<(), RunError> {
        if self.manner.embeddings {
            self.write_embeddings(&window.record, window)?;
        }
        self.note_failures(window)?;
        self.scored.clear();
        self.scored.extend(window.scores().map(|(score, _)| score));
        let (start, end) = (window.chunk.start, window.chunk.end());
        let row =
            OutputWindow { record: &window.record, index: window.chunk.index, start, end, orfs: &self.scored };
        Ok(self.outputs.window(&row)?)
    }

    /// Failures are noted when their window is written, so that notes come in input order too.
    fn note_failures(&mut self, window: &Window) -> Result<(), RunError> {
        for orf in window.orfs().filter(|orf| orf.state == State::Failed) {
            self.totals.failed += 1;
            let (number, frame) = (window.chunk.index + 1, orf.frame.name());
            self.outputs.note(&Note {
                seq_name: window.record.to_string(),
                kind: "failed",
                detail: format!("window {number} frame {frame}: a value is not a number"),
                action: "not scored",
            })?;
        }
        Ok(())
    }

    fn write_embeddings(&mut self, record: &Arc<str>, window: &Window) -> Result<(), RunError> {
        let mut name = String::new();
        for (score, slot) in window.scores() {
            let (dna, protein) = self.row.split_at_mut(self.widths[DNA]);
            for (plan, row) in [(DNA, dna), (PROTEIN, protein)] {
                let at = self.executor.program().staging_address(plan) + (slot * row.len() * 4) as u64;
                self.executor.download_f32(at, row)?;
            }
            orf_name(record, window.chunk.index, score.frame, &mut name);
            self.outputs.embedding(&name, &self.row)?;
        }
        self.free.extend(window.orfs().map(|orf| orf.slot));
        Ok(())
    }
}
