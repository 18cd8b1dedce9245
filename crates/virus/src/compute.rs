//! The arithmetic of a prediction: open reading frames get a slot, travel through the packers and encoders in
//! any company, meet in their slot, and are scored by the head.
//! Invariant: embeddings are keyed by slot and never by position in a batch; a slot is free again only when
//! its result has been taken.

use super::Options;
use super::engine::Totals;
use super::produce::{Batch, OrfTokens};
use super::program::{DNA, HEAD, HEAD_ROWS, PLANS, PROTEIN, Shape};
use super::queue::{PendingOrf, Place, Queue, State, Window};
use super::stage::Stage;
use data::pack::{Fill, Order, Pack, Packer};
use exec::Executor;
use graph::Counts;
use plan::{Program, step_seconds};
use runtime::RuntimeError;
use runtime::lanes::{Done, Lanes, PARTS, Stop, Usage, Values, Work};
use std::sync::Arc;
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

/// Where what is through goes, and who may end a wait.
pub(crate) struct Sink<'a> {
    pub(crate) queue: &'a mut Queue,
    pub(crate) totals: &'a mut Totals,
    pub(crate) stop: Stop<'a>,
}

/// The arithmetic of a prediction.
pub(crate) struct Compute {
    lanes: Lanes<Tag>,
    stage: Stage,
    /// Whether slots keep their embeddings until the window is written.
    holds_rows: bool,
    /// The places of both encoders and the head in the program.
    plans: [Option<usize>; 3],
    packers: [Packer; 2],
    /// What is left when the input has ended, in packs; the longest step is the last.
    rest: Option<Vec<(usize, Pack)>>,
    widths: [usize; 2],
    slots: Vec<Slot>,
    free: Vec<usize>,
    ready: Vec<usize>,
    /// Steps of the head that are on their way.
    scoring: usize,
    /// The embeddings of every slot, by encoder.
    rows: [Vec<f32>; 2],
    /// The outputs of encoders and head.
    mean: Arc<[String]>,
    scores: Arc<[String]>,
    /// Buffers of steps that are back: of encoders, and of the head.
    spare: Vec<Vec<f32>>,
    spare_rows: Vec<[Vec<f32>; 2]>,
}

/// Whose step it is.
enum Tag {
    /// An encoder's, over sequences that these slots own.
    Encoded { encoder: usize, owners: Vec<u64> },
    /// The head's, over these slots.
    Scored { slots: Vec<usize> },
}

impl Compute {
    pub(crate) fn new(
        executors: Vec<Executor>,
        stage: Stage,
        shape: &Shape,
        options: &Options,
    ) -> Result<Self, RuntimeError> {
        let lanes = Lanes::new(executors)?;
        let program = lanes.program();
        let plans = PLANS.map(|name| program.index(name));
        let bounds = |encoder: usize| plans[encoder].map(|plan| program.plans()[plan].1.graph.bounds);
        let order = if options.sort_by_length { Order::ByLength } else { Order::Input };
        let packers = [DNA, PROTEIN].map(|encoder| match bounds(encoder) {
            Some(b) => Packer::new(b.tokens as usize, b.sequences as usize, b.longest as usize, order),
            None => Packer::new(0, 0, 0, order),
        });
        let widths = [shape.head.dna as usize, shape.head.protein as usize];
        let tokens = [DNA, PROTEIN].map(bounds).iter().flatten().map(|b| b.tokens).max().unwrap_or(0);
        let slots = shape.slots(tokens, lanes.enough()) as usize;
        // Pages of slots that are never taken are never made.
        let rows = |waits: bool, width: usize| if waits { vec![0.0; slots * width] } else { vec![] };
        let rows = [rows(true, widths[DNA]), rows(stage.runs(PROTEIN), widths[PROTEIN])];
        Ok(Self {
            stage,
            holds_rows: options.save_embeddings.is_some() || stage == Stage::Nucleotide,
            plans,
            packers,
            rest: None,
            widths,
            slots: vec![Slot::default(); slots],
            // Taken from the end: low numbers first.
            free: (0..slots).rev().collect(),
            ready: Vec::with_capacity(slots),
            scoring: 0,
            rows,
            mean: Arc::new(["mean".to_owned()]),
            scores: Arc::new(["scores".to_owned()]),
            spare: vec![],
            spare_rows: vec![],
            lanes,
        })
    }

    pub(crate) fn program(&self) -> &Program {
        self.lanes.program()
    }

    /// How many devices it began with; lanes of the CPU are one.
    pub(crate) fn devices(&self) -> usize {
        self.usage().len().div_ceil(self.program().lanes())
    }

    /// What each device did.
    pub(crate) fn usage(&self) -> &[Usage] {
        self.lanes.usage()
    }

    /// What is to be said since the last call.
    pub(crate) fn warnings(&mut self) -> Vec<String> {
        self.lanes.warnings()
    }

    /// The executors, for another run of this stage.
    pub(crate) fn into_executors(self) -> (Stage, Vec<Executor>) {
        (self.stage, self.lanes.into_executors())
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
    ) -> Result<(), RuntimeError> {
        let Some(slot) = self.free.pop() else {
            return Err(RuntimeError::Refused("no slot is free; this is a bug of ours".to_owned()));
        };
        let place = queue.push_orf(orf.frame, orf.bases, slot);
        self.slots[slot] = Slot { place, ..Slot::default() };
        if let Some(row) = embedding {
            self.keep(DNA, slot, row);
        }
        if self.stage.runs(DNA) {
            self.packers[DNA].push(slot as u64, &batch.dna[orf.dna.clone()])?;
        }
        if self.stage.runs(PROTEIN) {
            self.packers[PROTEIN].push(slot as u64, &batch.protein[orf.protein.clone()])?;
        }
        Ok(())
    }

    /// Sends off full packs of both encoders, one of each, where there are any, and what the head can score; takes what
    /// is back. Whether anything was sent to an encoder.
    pub(crate) fn step(&mut self, sink: &mut Sink<'_>) -> Result<bool, RuntimeError> {
        self.send_packs(false, sink)
    }

    /// Gets something through: waits for a step, and sends off what is there, full or not, where devices would have
    /// nothing to do.
    pub(crate) fn press(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        if self.lanes.in_flight() < self.lanes.working() {
            self.send_packs(true, sink)?;
        }
        self.wait(sink).map(drop)
    }

    /// The input has ended: sends off a pack of what is left, or where all was sent waits for a step. What is left is cut
    /// so that every device gets some, and the longest steps come first.
    pub(crate) fn drain(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        let mut rest = match self.rest.take() {
            Some(rest) => rest,
            None => self.all_packs(),
        };
        let next = rest.pop();
        self.rest = Some(rest);
        match next {
            Some((encoder, pack)) => {
                self.send_pack(encoder, pack, sink)?;
                self.settle_back(sink)?;
                self.score_ready(SCORED_AT)
            }
            None => {
                self.score_ready(1)?;
                self.wait(sink).map(drop)
            }
        }
    }

    /// The run ends early: what has begun is waited for, and what has both embeddings by then is scored.
    pub(crate) fn give_up(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        for work in self.lanes.cancel() {
            if let Tag::Scored { slots } = work.tag {
                self.ready.extend(slots);
                self.scoring -= 1;
            }
        }
        loop {
            if self.lanes.working() > 0 {
                self.score_ready(1)?;
            }
            if !self.wait(sink)? {
                return Ok(());
            }
        }
    }

    /// Appends the embeddings of a window's frames to `rows`, in the order of frames, and frees their slots.
    pub(crate) fn release(&mut self, window: &Window, rows: &mut Vec<f32>) {
        if !self.holds_rows {
            return;
        }
        let encoders: &[usize] = if self.stage == Stage::Nucleotide { &[DNA] } else { &[DNA, PROTEIN] };
        for slot in window.embedded().filter_map(PendingOrf::slot) {
            for &encoder in encoders {
                rows.extend_from_slice(self.row(encoder, slot));
            }
        }
        self.free.extend(window.orfs().filter_map(PendingOrf::slot));
    }

    fn row(&self, encoder: usize, slot: usize) -> &[f32] {
        let width = self.widths[encoder];
        &self.rows[encoder][slot * width..(slot + 1) * width]
    }

    /// A slot has got an embedding.
    fn keep(&mut self, encoder: usize, slot: usize, row: &[f32]) {
        let width = self.widths[encoder];
        self.rows[encoder][slot * width..(slot + 1) * width].copy_from_slice(row);
        self.slots[slot].have[encoder] = true;
        self.slots[slot].failed |= !row.iter().all(|x| x.is_finite());
    }

    fn plan(&self, part: usize) -> Result<usize, RuntimeError> {
        self.plans[part]
            .ok_or_else(|| RuntimeError::Refused("a plan is missing; this is a bug of ours".to_owned()))
    }

    /// A pack of each encoder where there is one; with `force` of what is there, full or not.
    fn send_packs(&mut self, force: bool, sink: &mut Sink<'_>) -> Result<bool, RuntimeError> {
        let mut sent = false;
        for encoder in [DNA, PROTEIN] {
            if let Some(pack) = self.packers[encoder].next_pack(force) {
                self.send_pack(encoder, pack, sink)?;
                sent = true;
            }
        }
        self.settle_back(sink)?;
        self.score_ready(if force { 1 } else { SCORED_AT })?;
        Ok(sent)
    }

    /// Sends off a step of an encoder when there is room for it.
    fn send_pack(&mut self, encoder: usize, pack: Pack, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        while self.lanes.in_flight() - self.scoring >= self.lanes.enough() && self.wait(sink)? {}
        let Pack { tokens, spans, owners } = pack;
        let work = Work {
            plan: self.plan(encoder)?,
            counts: Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64 },
            wanted: spans.len() * self.widths[encoder],
            inputs: vec![("ids", Values::I32(tokens)), ("spans", Values::Spans(spans))],
            outputs: Arc::clone(&self.mean),
            values: self.spare.pop().into_iter().collect(),
            tag: Tag::Encoded { encoder, owners },
        };
        self.lanes.send(work);
        Ok(())
    }

    /// All that is in both pools; the last is to be sent first.
    fn all_packs(&mut self) -> Vec<(usize, Pack)> {
        let devices = self.lanes.working();
        let mut packs = vec![];
        if devices > 1 {
            self.packers.iter_mut().for_each(|packer| packer.cut(PARTS * devices));
        }
        let [dna, protein] = &mut self.packers;
        loop {
            let before = packs.len();
            packs.extend(dna.next_pack(true).map(|pack| (DNA, pack)));
            packs.extend(protein.next_pack(true).map(|pack| (PROTEIN, pack)));
            if packs.len() == before {
                break;
            }
        }
        packs.reverse();
        if devices > 1 {
            packs.sort_by(|a, b| self.seconds(a).total_cmp(&self.seconds(b)));
        }
        packs
    }

    /// What a step is expected to take.
    fn seconds(&self, (encoder, pack): &(usize, Pack)) -> f64 {
        let Some(plan) = self.plans[*encoder] else { return 0.0 };
        let program = self.lanes.program();
        let counts = Counts { tokens: pack.tokens.len() as u64, sequences: pack.spans.len() as u64 };
        step_seconds(&program.plans()[plan].1.graph, program.target(), counts)
    }

    /// Sends off what has both embeddings, where it is at least `least` and not too much is on its way. The head's steps
    /// are short, and what waits for them holds slots, so they come first.
    fn score_ready(&mut self, least: usize) -> Result<(), RuntimeError> {
        while self.ready.len() >= least && self.scoring < self.lanes.enough() {
            self.score()?;
        }
        Ok(())
    }

    /// One step of the head over slots that have both embeddings.
    fn score(&mut self) -> Result<(), RuntimeError> {
        let n = self.ready.len().min(HEAD_ROWS as usize);
        let slots: Vec<usize> = self.ready.drain(..n).collect();
        let mut rows = self.spare_rows.pop().unwrap_or_default();
        for (encoder, rows) in rows.iter_mut().enumerate() {
            rows.clear();
            slots.iter().for_each(|&slot| rows.extend_from_slice(self.row(encoder, slot)));
        }
        let [dna, protein] = rows;
        let work = Work {
            plan: self.plan(HEAD)?,
            counts: Counts { tokens: 0, sequences: n as u64 },
            wanted: 2 * n,
            inputs: vec![("dna", Values::F32(dna)), ("protein", Values::F32(protein))],
            outputs: Arc::clone(&self.scores),
            values: vec![],
            tag: Tag::Scored { slots },
        };
        self.scoring += 1;
        self.lanes.send_first(work);
        Ok(())
    }

    /// Takes what is back by now.
    fn settle_back(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        while let Some(done) = self.lanes.poll()? {
            self.settle_step(done, sink);
        }
        Ok(())
    }

    /// Waits for a step; false where none is on its way.
    fn wait(&mut self, sink: &mut Sink<'_>) -> Result<bool, RuntimeError> {
        let start = Instant::now();
        let done = self.lanes.wait(sink.stop);
        sink.totals.seconds.devices += start.elapsed().as_secs_f64();
        let Some(done) = done? else { return Ok(false) };
        self.settle_step(done, sink);
        Ok(true)
    }

    /// Embeddings go to the slots of their owners, scores to their windows.
    fn settle_step(&mut self, done: Done<Tag>, sink: &mut Sink<'_>) {
        let Done { work: Work { inputs, counts, mut values, tag, .. }, seconds } = done;
        let values = values.pop().unwrap_or_default();
        match tag {
            Tag::Encoded { encoder, owners } => {
                for (row, &owner) in values.chunks_exact(self.widths[encoder]).zip(&owners) {
                    self.keep(encoder, owner as usize, row);
                    self.meet(owner as usize, sink);
                }
                sink.totals.tokens[encoder] += counts.tokens;
                sink.totals.seconds.encoders[encoder] += seconds;
                self.spare.push(values);
                if let Ok([(_, Values::I32(tokens)), (_, Values::Spans(spans))]) = <[_; 2]>::try_from(inputs) {
                    self.packers[encoder].recycle(Pack { tokens, spans, owners });
                }
            }
            Tag::Scored { slots } => {
                for (slot, s) in slots.into_iter().zip(values.chunks_exact(2)) {
                    let finite = s.iter().all(|x| x.is_finite());
                    let state = if finite { State::Scored([s[0], s[1]]) } else { State::Failed };
                    self.settle(slot, state, sink);
                }
                sink.totals.seconds.head += seconds;
                self.scoring -= 1;
                if let Ok([(_, Values::F32(dna)), (_, Values::F32(protein))]) = <[_; 2]>::try_from(inputs) {
                    self.spare_rows.push([dna, protein]);
                }
            }
        }
    }

    /// What comes next for a slot that has got an embedding.
    fn meet(&mut self, slot: usize, sink: &mut Sink<'_>) {
        let Slot { have, failed, .. } = self.slots[slot];
        let all = if self.stage.scores() { have == [true, true] } else { have[DNA] };
        match (all, failed, self.stage.scores()) {
            (false, _, _) => {}
            (true, true, _) => self.settle(slot, State::Failed, sink),
            (true, false, true) => self.ready.push(slot),
            (true, false, false) => self.settle(slot, State::Embedded, sink),
        }
    }

    /// An open reading frame is through.
    fn settle(&mut self, slot: usize, state: State, sink: &mut Sink<'_>) {
        sink.totals.orfs += 1;
        sink.queue.settle(self.slots[slot].place, state);
        if !self.holds_rows {
            self.free.push(slot);
        }
    }
}
