//! The models of a prediction: assigns each sequence a slot, runs its tokens through the packers and encoders, and scores the
//! slot with the head, if there is one, when the rows of all encoders are available. Invariant: rows are keyed by slot and
//! never by position in a batch; a slot is reused only after its result has been taken.

use crate::pipeline::engine::StageTotals;
use crate::pipeline::queue::{OutputQueue, QueuedWindow, SequenceLocation, SequenceState};
use crate::pipeline::records::{SequenceTokens, WindowBatch};
use crate::pipeline::shape::{ENCODERS, HEAD, HEAD_CLASSES, HEAD_ROWS, MethodShape};
use crate::pipeline::stage::PredictStage;
use plimsoll_data::pack::Fill;
use plimsoll_exec::Executor;
use plimsoll_plan::Program;
use plimsoll_runtime::session::bounds::tokens;
use plimsoll_runtime::session::{Completed, ModelId, Next, Push, StepSession, StopCheck};
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Observer, RuntimeError, Usage};
use std::time::Instant;

/// Minimum number of rows for a step of the head. Kept small, because results that wait for the head are lost if the
/// process is killed.
const MIN_HEAD_ROWS: usize = 16;

/// Progress of the sequence in a slot.
#[derive(Clone, Copy, Default)]
struct SlotState {
    location: SequenceLocation,
    /// Whether the slot has a row, by encoder.
    has_row: [bool; ENCODERS],
    /// Whether a row has a non-finite value.
    failed: bool,
}

/// Destination of finished results, and the callback that can interrupt a wait.
pub(crate) struct ResultSink<'a> {
    pub(crate) queue: &'a mut OutputQueue,
    pub(crate) totals: &'a mut StageTotals,
    pub(crate) stop: StopCheck<'a>,
}

/// Runs the models of a stage on the sequences in flight, each of which has a slot.
pub(crate) struct ModelRunner<'a> {
    session: StepSession<'a>,
    /// Whether slots keep their rows until the window is written.
    keeps_rows: bool,
    /// The encoders that run in this session.
    encoders: [Option<ModelId>; ENCODERS],
    /// The encoders whose rows a slot needs before it is scored, or has finished.
    needs_row: [bool; ENCODERS],
    head: Option<SessionHead>,
    /// Number of values of a row, by encoder.
    widths: [usize; ENCODERS],
    slots: Vec<SlotState>,
    /// Indices of the free slots.
    free_slots: Vec<usize>,
    /// Slots that have the rows of all encoders and wait for the head.
    ready_slots: Vec<usize>,
    /// Rows of all slots by encoder, shape (slots, width); empty for an encoder whose rows the stage does not hold.
    rows: [Vec<f32>; ENCODERS],
}

/// The head and the positions of its inputs.
struct SessionHead {
    model: ModelId,
    /// Position of the input that takes the rows of each encoder.
    inputs: Vec<usize>,
}

impl<'a> ModelRunner<'a> {
    /// Creates the slots for a stage of a method. If `saves_rows`, rows are kept beside the scores of the head.
    pub(crate) fn new(
        session: StepSession<'a>,
        stage: PredictStage,
        shape: &MethodShape,
        saves_rows: bool,
    ) -> Result<Self, RuntimeError> {
        let mut encoders = [None; ENCODERS];
        for (model, encoder) in encoders.iter_mut().zip(&shape.encoders) {
            *model = session.model(encoder.plan);
        }
        let head = match session.model(HEAD) {
            Some(model) => {
                let mut inputs = vec![];
                for encoder in &shape.encoders {
                    let input = encoder.head_input.and_then(|name| session.row_input(model, name));
                    inputs.push(input.ok_or_else(|| RuntimeError::bug("the head lacks an input"))?);
                }
                Some(SessionHead { model, inputs })
            }
            None => None,
        };
        let widths = shape.widths();
        let slots = shape.slots(tokens(session.program()), session.in_flight_target()) as usize;
        let needs_row = std::array::from_fn(|encoder| shape.holds(stage, encoder));
        // Zeroed pages are mapped lazily, so slots that are never used cost no physical memory.
        let rows =
            std::array::from_fn(
                |encoder| if needs_row[encoder] { vec![0.0; slots * widths[encoder]] } else { vec![] },
            );
        Ok(Self {
            keeps_rows: saves_rows || head.is_none(),
            encoders,
            needs_row,
            head,
            widths,
            slots: vec![SlotState::default(); slots],
            // Popped from the end, so slots with low numbers are used first.
            free_slots: (0..slots).rev().collect(),
            ready_slots: Vec::with_capacity(slots),
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

    /// Returns the executors, for another run.
    pub(crate) fn into_executors(self) -> Vec<Executor> {
        self.session.into_executors()
    }

    /// Number of values of a row of the first encoder.
    pub(crate) fn first_width(&self) -> usize {
        self.widths[0]
    }

    /// Packing fill, by encoder.
    pub(crate) fn fill(&self) -> [Fill; ENCODERS] {
        self.encoders.map(|encoder| encoder.map_or_else(Fill::default, |model| self.session.fill(model)))
    }

    /// Whether another sequence can be admitted.
    pub(crate) fn has_room(&self) -> bool {
        !self.free_slots.is_empty() && !self.session.is_full()
    }

    /// Admits a sequence of the window queued last, with its row of the first encoder if an earlier stage has computed it. Must be
    /// called only while `has_room`.
    pub(crate) fn admit(
        &mut self,
        batch: &WindowBatch,
        sequence: &SequenceTokens,
        queue: &mut OutputQueue,
        first_row: Option<&[f32]>,
    ) -> Result<(), RuntimeError> {
        let Some(slot) = self.free_slots.pop() else {
            return Err(RuntimeError::bug("no slot is free"));
        };
        let location = queue.push_sequence(sequence.label, sequence.bases, slot);
        self.slots[slot] = SlotState { location, ..SlotState::default() };
        if let Some(row) = first_row {
            self.store_row(0, slot, row);
        }
        let tokens = batch.tokens.iter().zip(&sequence.tokens).map(|(tokens, range)| &tokens[range.clone()]);
        let sequences = self.encoders.into_iter().zip(tokens);
        let sequences = sequences.filter_map(|(model, tokens)| Some((model?, slot as u64, tokens)));
        match self.session.push(sequences)? {
            Push::Taken => Ok(()),
            Push::Full => Err(RuntimeError::bug("the session is full")),
        }
    }

    /// Number of tokens that the encoders compute for a sequence.
    pub(crate) fn tokens_of(&self, sequence: &SequenceTokens) -> u64 {
        let tokens = self.encoders.iter().zip(&sequence.tokens);
        tokens.filter(|(model, _)| model.is_some()).map(|(_, range)| range.len() as u64).sum()
    }

    /// Collects finished steps, and submits full packs and rows for the head. Blocks until all full packs are
    /// submitted: the input may stall for a long time, and devices should compute meanwhile.
    pub(crate) fn step(&mut self, sink: &mut ResultSink<'_>) -> Result<(), RuntimeError> {
        self.collect_completed(sink)?;
        while self.session.has_packs() {
            self.score_ready(MIN_HEAD_ROWS)?;
            self.wait(sink)?;
        }
        self.collect_completed(sink)?;
        self.score_ready(MIN_HEAD_ROWS)
    }

    /// Waits for a step to complete. If devices would be idle, first flushes the waiting sequences, even into partly
    /// filled packs.
    pub(crate) fn flush(&mut self, sink: &mut ResultSink<'_>) -> Result<(), RuntimeError> {
        // While every working replica has a step, its result frees slots, and packs can go on filling.
        if self.session.in_flight() < self.session.working() {
            self.session.flush();
            self.collect_completed(sink)?;
            // Even a single row: the engine calls this until a slot is free or the queue is shorter, and where nothing
            // else is in flight, only the rows that wait for the head can complete a window.
            self.score_ready(1)?;
        }
        self.score_ready(MIN_HEAD_ROWS)?;
        self.wait(sink).map(drop)
    }

    /// Submits the remaining sequences after the end of the input and waits for a step.
    pub(crate) fn drain(&mut self, sink: &mut ResultSink<'_>) -> Result<(), RuntimeError> {
        self.session.end();
        self.collect_completed(sink)?;
        self.score_ready(if self.session.has_packs() { MIN_HEAD_ROWS } else { 1 })?;
        self.wait(sink).map(drop)
    }

    /// Ends the run early: waits for the steps in flight and scores the slots that have the rows of all encoders by then.
    pub(crate) fn cancel(&mut self, sink: &mut ResultSink<'_>) -> Result<(), RuntimeError> {
        // The rows of cancelled steps are still in their slots, which are freed only with the scores.
        self.ready_slots.extend(self.session.cancel().into_iter().map(|slot| slot as usize));
        loop {
            if self.session.working() > 0 {
                self.score_ready(1)?;
            }
            if !self.wait(sink)? {
                return Ok(());
            }
        }
    }

    /// Appends the rows of a window's sequences to `rows`, in the order of labels, and frees their slots.
    pub(crate) fn release(&mut self, window: &QueuedWindow, rows: &mut Vec<f32>) {
        if !self.keeps_rows {
            return;
        }
        for slot in window.slots_with_rows() {
            for encoder in (0..ENCODERS).filter(|&encoder| self.needs_row[encoder]) {
                rows.extend_from_slice(self.row(encoder, slot));
            }
        }
        // Includes the slots of failed sequences: with `keeps_rows`, `finish_slot` frees no slots.
        self.free_slots.extend(window.slots());
    }

    /// Returns the row of an encoder in a slot.
    fn row(&self, encoder: usize, slot: usize) -> &[f32] {
        let width = self.widths[encoder];
        &self.rows[encoder][slot * width..(slot + 1) * width]
    }

    /// Stores a row in a slot; a non-finite value marks the slot as failed.
    fn store_row(&mut self, encoder: usize, slot: usize, row: &[f32]) {
        let width = self.widths[encoder];
        self.rows[encoder][slot * width..(slot + 1) * width].copy_from_slice(row);
        self.slots[slot].has_row[encoder] = true;
        self.slots[slot].failed |= !row.iter().all(|x| x.is_finite());
    }

    /// Submits slots with all rows to the head while at least `min_rows` of them wait and the session
    /// accepts another step of rows.
    fn score_ready(&mut self, min_rows: usize) -> Result<(), RuntimeError> {
        while self.ready_slots.len() >= min_rows && self.session.has_room_for_rows() {
            self.score()?;
        }
        Ok(())
    }

    /// Submits one step of the head over slots that have the rows of all encoders.
    fn score(&mut self) -> Result<(), RuntimeError> {
        let Some(head) = &self.head else {
            return Err(RuntimeError::bug("a stage without the head has rows for it"));
        };
        let count = self.ready_slots.len().min(HEAD_ROWS as usize);
        let slots: Vec<u64> = self.ready_slots.drain(..count).map(|slot| slot as u64).collect();
        let mut rows = self.session.row_buffers(head.model);
        for (encoder, &input) in head.inputs.iter().enumerate() {
            slots.iter().for_each(|&slot| rows[input].extend_from_slice(self.row(encoder, slot as usize)));
        }
        self.session.submit_rows(head.model, slots, rows)
    }

    /// Collects the steps that have completed.
    fn collect_completed(&mut self, sink: &mut ResultSink<'_>) -> Result<(), RuntimeError> {
        while let Next::Ready(step) = self.session.poll()? {
            self.complete(step, sink);
        }
        Ok(())
    }

    /// Waits for a step to complete; returns false if none is in flight.
    fn wait(&mut self, sink: &mut ResultSink<'_>) -> Result<bool, RuntimeError> {
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

    /// Distributes the results of a step: rows to the slots of their keys, scores to their windows.
    fn complete(&mut self, step: Completed, sink: &mut ResultSink<'_>) {
        match self.encoders.iter().position(|model| *model == Some(step.model)) {
            Some(encoder) => {
                for (i, &slot) in step.keys.iter().enumerate() {
                    self.store_row(encoder, slot as usize, step.values(0, i));
                    self.on_row(slot as usize, sink);
                }
                sink.totals.tokens[encoder] += step.counts.tokens;
                sink.totals.seconds.encoders[encoder] += step.seconds;
            }
            None => {
                for (i, &slot) in step.keys.iter().enumerate() {
                    // `HeadModel::open` refuses heads with another number of classes.
                    let mut scores = [0.0; HEAD_CLASSES];
                    scores.copy_from_slice(step.values(0, i));
                    let state = if scores.iter().all(|x| x.is_finite()) {
                        SequenceState::Scored(scores)
                    } else {
                        SequenceState::Failed
                    };
                    self.finish_slot(slot as usize, state, sink);
                }
                sink.totals.seconds.head += step.seconds;
            }
        }
        self.session.recycle(step);
    }

    /// Advances a slot that has received a row. Once the slot has the rows of all encoders of the stage, the sequence has failed,
    /// is ready for the head, or, in a stage without the head, is finished.
    fn on_row(&mut self, slot: usize, sink: &mut ResultSink<'_>) {
        let SlotState { has_row, failed, .. } = self.slots[slot];
        if has_row != self.needs_row {
            return;
        }
        if failed {
            self.finish_slot(slot, SequenceState::Failed, sink);
        } else if self.head.is_some() {
            self.ready_slots.push(slot);
        } else {
            self.finish_slot(slot, SequenceState::Encoded, sink);
        }
    }

    /// Marks the sequence in `slot` as finished, and frees the slot unless its rows are still needed.
    fn finish_slot(&mut self, slot: usize, state: SequenceState, sink: &mut ResultSink<'_>) {
        sink.totals.sequences += 1;
        sink.queue.complete(self.slots[slot].location, state);
        if !self.keeps_rows {
            self.free_slots.push(slot);
        }
    }
}
