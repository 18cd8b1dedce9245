//! The models of a prediction: assigns each open reading frame (ORF) a slot, runs its two sequences through the packers
//! and encoders, and scores the slot with the head when both embeddings are available. Invariant: embeddings are keyed
//! by slot and never by position in a batch; a slot is reused only after its result has been taken.

use crate::Options;
use crate::pipeline::engine::Totals;
use crate::pipeline::queue::{OrfLocation, OrfState, PendingOrf, Queue, Window};
use crate::pipeline::records::{Batch, OrfTokens};
use crate::pipeline::shape::{CALLER, DNA, HEAD, HEAD_ROWS, PLANS, PROTEIN, Shape};
use crate::pipeline::stage::PredictStage;
use plimsoll_data::pack::Fill;
use plimsoll_exec::Executor;
use plimsoll_plan::Program;
use plimsoll_runtime::session::bounds::tokens;
use plimsoll_runtime::session::{Completed, ModelId, Next, Push, Session, Stop};
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Observer, RuntimeError, Usage};
use std::time::Instant;

/// Minimum number of rows for a step of the head. Kept small, because results that wait for the head are lost if the
/// process is killed.
const SCORED_AT: usize = 16;

/// Progress of the open reading frame in a slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    place: OrfLocation,
    /// Whether the slot has an embedding, by encoder.
    have: [bool; 2],
    /// Whether an embedding has a non-finite value.
    failed: bool,
}

/// Destination of finished results, and the callback that can interrupt a wait.
pub(crate) struct Sink<'a> {
    pub(crate) queue: &'a mut Queue,
    pub(crate) totals: &'a mut Totals,
    pub(crate) stop: Stop<'a>,
}

/// The models of a prediction and the open reading frames in flight.
pub(crate) struct Compute<'a> {
    session: Session<'a>,
    stage: PredictStage,
    /// Whether slots keep their embeddings until the window is written.
    keeps_embeddings: bool,
    /// The encoders that run in this session, by `DNA` and `PROTEIN`.
    encoders: [Option<ModelId>; 2],
    head: Option<Head>,
    /// Number of values of an embedding, by encoder.
    widths: [usize; 2],
    slots: Vec<Slot>,
    /// Indices of the free slots.
    free: Vec<usize>,
    /// Slots that have both embeddings and wait for the head.
    ready: Vec<usize>,
    /// Embeddings of all slots by encoder, shape (slots, width); empty for an encoder whose embeddings the
    /// stage does not hold.
    rows: [Vec<f32>; 2],
}

/// The head and the positions of its two inputs.
#[derive(Clone, Copy)]
struct Head {
    model: ModelId,
    inputs: [usize; 2],
}

impl<'a> Compute<'a> {
    pub(crate) fn new(
        session: Session<'a>,
        stage: PredictStage,
        shape: &Shape,
        options: &Options,
    ) -> Result<Self, RuntimeError> {
        let encoders = match stage {
            PredictStage::Caller => [session.model(CALLER), None],
            PredictStage::Whole | PredictStage::Nucleotide | PredictStage::Protein => {
                [DNA, PROTEIN].map(|encoder| session.model(PLANS[encoder]))
            }
        };
        let head = session.model(PLANS[HEAD]).map(|model| {
            let missing = || RuntimeError::bug("the head lacks an input");
            let input = |name: &str| session.row_input(model, name).ok_or_else(missing);
            Ok::<Head, RuntimeError>(Head { model, inputs: [input("dna")?, input("protein")?] })
        });
        let widths = shape.widths();
        let slots = shape.slots(tokens(session.program()), session.in_flight_target()) as usize;
        // Zeroed pages are mapped lazily, so slots that are never used cost no physical memory.
        let rows = |waits: bool, width: usize| if waits { vec![0.0; slots * width] } else { vec![] };
        let rows = [rows(true, widths[DNA]), rows(stage.runs(PROTEIN), widths[PROTEIN])];
        Ok(Self {
            stage,
            keeps_embeddings: options.save_embeddings.is_some() || !stage.scores(),
            encoders,
            head: head.transpose()?,
            widths,
            slots: vec![Slot::default(); slots],
            // Popped from the end, so slots with low numbers are used first.
            free: (0..slots).rev().collect(),
            ready: Vec::with_capacity(slots),
            rows,
            session,
        })
    }

    pub(crate) fn program(&self) -> &Program {
        self.session.program()
    }

    /// Number of devices at the start of the run; all replicas of the CPU count as one device.
    pub(crate) fn devices(&self) -> usize {
        self.usage().len().div_ceil(self.program().replicas())
    }

    /// Statistics of each device.
    pub(crate) fn usage(&self) -> &[Usage] {
        self.session.usage()
    }

    /// The program of the size of steps that is in use.
    pub(crate) fn program_in_use(&self) -> &Program {
        self.session.program_in_use()
    }

    /// Reports the changes of the size of the steps since the last call.
    pub(crate) fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer) {
        self.session.report_sizes(watch, observer);
    }

    /// Returns the warnings that were raised since the last call.
    pub(crate) fn warnings(&mut self) -> Vec<String> {
        self.session.warnings()
    }

    /// Returns the executors, for another run of the same stage.
    pub(crate) fn into_executors(self) -> (PredictStage, Vec<Executor>) {
        (self.stage, self.session.into_executors())
    }

    /// Number of values of a nucleotide embedding.
    pub(crate) fn nucleotide_width(&self) -> usize {
        self.widths[DNA]
    }

    /// Packing fill of both encoders.
    pub(crate) fn fill(&self) -> [Fill; 2] {
        self.encoders.map(|encoder| encoder.map_or_else(Fill::default, |model| self.session.fill(model)))
    }

    /// Whether another open reading frame can be admitted.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() && !self.session.is_full()
    }

    /// Admits an open reading frame of the window queued last, with its nucleotide embedding if an earlier
    /// stage has computed it. Must be called only while `has_room`.
    pub(crate) fn admit(
        &mut self,
        batch: &Batch,
        orf: &OrfTokens,
        queue: &mut Queue,
        embedding: Option<&[f32]>,
    ) -> Result<(), RuntimeError> {
        let Some(slot) = self.free.pop() else {
            return Err(RuntimeError::bug("no slot is free"));
        };
        let place = queue.push_orf(orf.frame, orf.bases, slot);
        self.slots[slot] = Slot { place, ..Slot::default() };
        if let Some(row) = embedding {
            self.keep(DNA, slot, row);
        }
        let tokens = [&batch.dna[orf.dna.clone()], &batch.protein[orf.protein.clone()]];
        let sequences = self.encoders.into_iter().zip(tokens);
        let sequences = sequences.filter_map(|(model, tokens)| Some((model?, slot as u64, tokens)));
        match self.session.push(sequences)? {
            Push::Taken => Ok(()),
            Push::Full => Err(RuntimeError::bug("the session is full")),
        }
    }

    /// Number of tokens that the encoders compute for an open reading frame.
    pub(crate) fn tokens_of(&self, orf: &OrfTokens) -> u64 {
        let tokens = self.encoders.iter().zip([&orf.dna, &orf.protein]);
        tokens.filter(|(model, _)| model.is_some()).map(|(_, range)| range.len() as u64).sum()
    }

    /// Collects finished steps, and submits full packs and rows for the head. Blocks until all full packs are
    /// submitted: the input may stall for a long time, and devices should compute meanwhile.
    pub(crate) fn step(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        self.take_done(sink)?;
        while self.session.has_packs() {
            self.score_ready(SCORED_AT)?;
            self.wait(sink)?;
        }
        self.take_done(sink)?;
        self.score_ready(SCORED_AT)
    }

    /// Waits for a step to complete. If devices would be idle, first flushes the waiting sequences, even into partly
    /// filled packs.
    pub(crate) fn flush(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        if self.session.in_flight() < self.session.working() {
            self.session.flush();
            self.take_done(sink)?;
            self.score_ready(1)?;
        }
        self.score_ready(SCORED_AT)?;
        self.wait(sink).map(drop)
    }

    /// Submits the remaining sequences after the end of the input and waits for a step.
    pub(crate) fn drain(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        self.session.end();
        self.take_done(sink)?;
        self.score_ready(if self.session.has_packs() { SCORED_AT } else { 1 })?;
        self.wait(sink).map(drop)
    }

    /// Ends the run early: waits for the steps in flight and scores the slots that have both embeddings by then.
    pub(crate) fn cancel(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        // The rows of cancelled steps are still in their slots, which are freed only with the scores.
        self.ready.extend(self.session.cancel().into_iter().map(|slot| slot as usize));
        loop {
            if self.session.working() > 0 {
                self.score_ready(1)?;
            }
            if !self.wait(sink)? {
                return Ok(());
            }
        }
    }

    /// Appends the embeddings of a window's frames to `rows`, in the order of frames, and frees their slots.
    pub(crate) fn release(&mut self, window: &Window, rows: &mut Vec<f32>) {
        if !self.keeps_embeddings {
            return;
        }
        let encoders: &[usize] = if self.stage.scores() { &[DNA, PROTEIN] } else { &[DNA] };
        for slot in window.embedded().filter_map(PendingOrf::slot) {
            for &encoder in encoders {
                rows.extend_from_slice(self.row(encoder, slot));
            }
        }
        // Includes the slots of failed frames: with `keeps_embeddings`, `finish_slot` frees no slots.
        self.free.extend(window.orfs().filter_map(PendingOrf::slot));
    }

    /// Returns the embedding in a slot.
    fn row(&self, encoder: usize, slot: usize) -> &[f32] {
        let width = self.widths[encoder];
        &self.rows[encoder][slot * width..(slot + 1) * width]
    }

    /// Stores an embedding in a slot; a non-finite value marks the slot as failed.
    fn keep(&mut self, encoder: usize, slot: usize, row: &[f32]) {
        let width = self.widths[encoder];
        self.rows[encoder][slot * width..(slot + 1) * width].copy_from_slice(row);
        self.slots[slot].have[encoder] = true;
        self.slots[slot].failed |= !row.iter().all(|x| x.is_finite());
    }

    /// Submits slots with both embeddings to the head while at least `least` of them wait and the session
    /// accepts another step of rows.
    fn score_ready(&mut self, least: usize) -> Result<(), RuntimeError> {
        while self.ready.len() >= least && self.session.has_room_for_rows() {
            self.score()?;
        }
        Ok(())
    }

    /// Submits one step of the head over slots that have both embeddings.
    fn score(&mut self) -> Result<(), RuntimeError> {
        let Some(Head { model, inputs }) = self.head else {
            return Err(RuntimeError::bug("a stage without the head has rows for it"));
        };
        let n = self.ready.len().min(HEAD_ROWS as usize);
        let slots: Vec<u64> = self.ready.drain(..n).map(|slot| slot as u64).collect();
        let mut rows = self.session.row_buffers(model);
        for (encoder, input) in inputs.into_iter().enumerate() {
            slots.iter().for_each(|&slot| rows[input].extend_from_slice(self.row(encoder, slot as usize)));
        }
        self.session.submit_rows(model, slots, rows)
    }

    /// Collects the steps that have completed.
    fn take_done(&mut self, sink: &mut Sink<'_>) -> Result<(), RuntimeError> {
        while let Next::Ready(step) = self.session.poll()? {
            self.complete(step, sink);
        }
        Ok(())
    }

    /// Waits for a step to complete; returns false if none is in flight.
    fn wait(&mut self, sink: &mut Sink<'_>) -> Result<bool, RuntimeError> {
        let start = Instant::now();
        let next = self.session.next(sink.stop);
        sink.totals.seconds.devices += start.elapsed().as_secs_f64();
        match next? {
            Next::Ready(step) => {
                self.complete(step, sink);
                Ok(true)
            }
            Next::Pending | Next::Finished => Ok(false),
        }
    }

    /// Distributes the results of a step: embeddings to the slots of their keys, scores to their windows.
    fn complete(&mut self, step: Completed, sink: &mut Sink<'_>) {
        match self.encoders.iter().position(|model| *model == Some(step.model)) {
            Some(encoder) => {
                for (i, &slot) in step.keys.iter().enumerate() {
                    self.keep(encoder, slot as usize, step.values(0, i));
                    self.on_embedding(slot as usize, sink);
                }
                sink.totals.tokens[encoder] += step.counts.tokens;
                sink.totals.seconds.encoders[encoder] += step.seconds;
            }
            None => {
                for (i, &slot) in step.keys.iter().enumerate() {
                    let scores = step.values(0, i);
                    let finite = scores.iter().all(|x| x.is_finite());
                    let state =
                        if finite { OrfState::Scored([scores[0], scores[1]]) } else { OrfState::Failed };
                    self.finish_slot(slot as usize, state, sink);
                }
                sink.totals.seconds.head += step.seconds;
            }
        }
        self.session.recycle(step);
    }

    /// Advances a slot that has received an embedding. Once the slot has all embeddings of the stage, the frame
    /// has failed, is ready for the head, or, in a stage without the head, is finished.
    fn on_embedding(&mut self, slot: usize, sink: &mut Sink<'_>) {
        let Slot { have, failed, .. } = self.slots[slot];
        let all = if self.stage.scores() { have == [true, true] } else { have[DNA] };
        match (all, failed, self.stage.scores()) {
            (false, _, _) => {}
            (true, true, _) => self.finish_slot(slot, OrfState::Failed, sink),
            (true, false, true) => self.ready.push(slot),
            (true, false, false) => self.finish_slot(slot, OrfState::Embedded, sink),
        }
    }

    /// Marks the open reading frame in `slot` as finished, and frees the slot unless its embeddings are still
    /// needed.
    fn finish_slot(&mut self, slot: usize, state: OrfState, sink: &mut Sink<'_>) {
        sink.totals.orfs += 1;
        sink.queue.complete(self.slots[slot].place, state);
        if !self.keeps_embeddings {
            self.free.push(slot);
        }
    }
}
