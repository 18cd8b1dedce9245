//! The engine of a prediction, between the front end and the results. The front end (`records.rs`) reads records, cuts
//! them into windows and tokenizes the sequences of the windows; the engine passes the sequences to the models
//! (`compute.rs`), holds the windows in input order until all of their sequences have results, then writes the windows to
//! the result files and the journal. Invariant: windows leave in the order in which they arrived, and the journal entry
//! of a window holds exactly the results that are written.
//!
//! Under a tight memory budget a run has two stages, each with an engine of its own: the first computes the rows of the first
//! encoder and writes them to a journal, the second reads them and computes the rest (`stage.rs`).

use crate::VirusError;
use crate::methods::{FinishedWindow, ResultsWriter};
use crate::output::{Note, OutputError, RecordEnd};
use crate::pipeline::compute::{ModelRunner, ResultSink};
use crate::pipeline::journal::{JournalEntry, JournalReader, JournalWriter};
use crate::pipeline::queue::{OutputItem, OutputQueue, QueuedWindow, SequenceState};
use crate::pipeline::queues::QueueSizes;
use crate::pipeline::records::{InputEvent, SequenceTokens, WindowBatch};
use crate::pipeline::shape::ENCODERS;
use plimsoll_data::pack::Fill;
use plimsoll_data::sequence::NoteKind;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::run::StreamEngine;
use plimsoll_runtime::session::StopCheck;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{FinishedBytes, Level, Observer, Progress};
use std::time::Instant;

/// Time in seconds by activity; encoders and head are summed over all devices, the others are of the main thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StageSeconds {
    /// From the first record to the last result.
    pub(crate) streaming: f64,
    /// Waiting for the front end, which reads and tokenizes.
    pub(crate) waiting: f64,
    /// Waiting for devices.
    pub(crate) devices: f64,
    /// Steps of the encoders, by encoder.
    pub(crate) encoders: [f64; ENCODERS],
    /// Steps of the head.
    pub(crate) head: f64,
    /// Writing results and the journal.
    pub(crate) writing: f64,
}

impl StageSeconds {
    /// The remaining time of the main thread, spent on packing and slots.
    pub(crate) fn between(&self) -> f64 {
        (self.streaming - self.waiting - self.devices - self.writing).max(0.0)
    }
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StageTotals {
    pub(crate) records: u64,
    /// Windows whose results were taken from the journal of an interrupted run.
    pub(crate) windows_from_journal: u64,
    /// Sequences that this run has finished, failed ones included.
    pub(crate) sequences: u64,
    /// Failed sequences of all written windows.
    pub(crate) failed: u64,
    /// Tokens of the completed steps, by encoder.
    pub(crate) tokens: [u64; ENCODERS],
    pub(crate) seconds: StageSeconds,
}

impl StageTotals {
    /// Adds the tokens and times of the preceding stage. Records and windows are not added: each stage reads
    /// all of them.
    pub(crate) fn add_stage(&mut self, earlier: &StageTotals) {
        for encoder in 0..ENCODERS {
            self.tokens[encoder] += earlier.tokens[encoder];
            self.seconds.encoders[encoder] += earlier.seconds.encoders[encoder];
        }
        self.seconds.streaming += earlier.seconds.streaming;
        self.seconds.waiting += earlier.seconds.waiting;
        self.seconds.devices += earlier.seconds.devices;
        self.seconds.writing += earlier.seconds.writing;
    }
}

/// The models, journals and results of an engine; a field is `None` if the stage does not need it.
pub(crate) struct EngineParts<'a> {
    /// The models, for results that are in no journal; `None` for a method without models.
    pub(crate) compute: Option<ModelRunner<'a>>,
    /// Whether all results must be in journals, as in a merge of shards.
    pub(crate) only_merges: bool,
    /// Results journaled by an earlier run.
    pub(crate) journal: JournalReader,
    /// Rows of the first encoder from an earlier stage.
    pub(crate) first_rows: Option<JournalReader>,
    /// Journal that finished results are written to.
    pub(crate) writer: Option<JournalWriter>,
    /// Result files.
    pub(crate) results: Option<Box<dyn ResultsWriter>>,
    /// Whether notes on the input are errors (`--strict`).
    pub(crate) strict: bool,
    pub(crate) pass: InputPass,
}

/// A pass over the input.
#[derive(Clone, Copy)]
pub(crate) struct InputPass {
    /// Number of the pass, from 0.
    pub(crate) number: u64,
    /// Number of passes of the run.
    pub(crate) count: u64,
}

/// The work that a stage has taken from the input, for its progress.
#[derive(Default)]
struct TakenWork {
    /// Stored bytes of the input up to the last batch taken.
    bytes: u64,
    /// Tokens of the sequences of all batches taken.
    tokens: u64,
    /// Bases of the windows of all batches taken.
    bases: u64,
    /// Bases of those windows whose results were in the journal.
    journaled_bases: u64,
    finished: FinishedBytes,
}

impl TakenWork {
    /// Estimates the bytes of the input that are computed after `tokens` tokens. Work is measured in bases of windows,
    /// which are also known of windows from a journal.
    fn finished(&mut self, tokens: u64, total: Option<u64>) -> u64 {
        let share = if self.tokens == 0 { 1.0 } else { (tokens as f64 / self.tokens as f64).min(1.0) };
        let computed = ((self.bases - self.journaled_bases) as f64 * share) as u64;
        self.finished.update(self.bytes, total, self.journaled_bases + computed, self.bases)
    }
}

/// The engine of one stage.
pub(crate) struct PredictEngine<'a> {
    parts: EngineParts<'a>,
    queue: OutputQueue,
    /// Limits of `queue`. When they are exceeded behind an incomplete window, partly filled packs are flushed:
    /// input with few sequences would fill packs slowly and accumulate.
    queues: QueueSizes,
    /// Reused buffer for the journal entry of the window being written.
    entry: JournalEntry,
    pub(crate) totals: StageTotals,
    taken: TakenWork,
    started: Instant,
}

impl StreamEngine for PredictEngine<'_> {
    type Batch = WindowBatch;
    type Error = VirusError;

    /// Reports notes on the input, those on single records at detail level; they are written to notes.tsv later.
    fn announce(&mut self, batch: &WindowBatch, observer: &mut dyn Observer) -> Result<(), VirusError> {
        let kinds_of_files =
            [NoteKind::Spacing, NoteKind::Gaps, NoteKind::Unknown, NoteKind::NoRecords].map(NoteKind::name);
        for event in &batch.events {
            if let InputEvent::Note(Note { seq_name, kind, detail, action }) = event {
                if kinds_of_files.contains(kind) {
                    observer.say(Level::Warning, &format!("{detail}: {action}"));
                } else {
                    observer.say(Level::Detail, &format!("'{seq_name}': {kind}: {detail}: {action}"));
                }
            }
        }
        Ok(())
    }

    /// Queues the events of one job of the front end, and gives each of its sequences a slot of the models. Waits for results
    /// while the models can take no further sequence, and while the queue exceeds its limits.
    fn take(&mut self, mut batch: WindowBatch, stop: StopCheck<'_>) -> Result<(), VirusError> {
        self.taken.bytes = batch.bytes_read;
        if let Some(compute) = &self.parts.compute {
            self.taken.tokens +=
                batch.sequences.iter().map(|sequence| compute.tokens_of(sequence)).sum::<u64>();
        }
        let mut sequences = std::mem::take(&mut batch.sequences).into_iter();
        self.queue.push(OutputItem::Text(std::mem::take(&mut batch.texts)));
        for event in std::mem::take(&mut batch.events) {
            match event {
                InputEvent::Window { number, record, location, sequences: count, letters } => {
                    let window = QueuedWindow::new(number, record, location, count).with_letters(letters);
                    let first_rows = self.queue_window(window, count)?;
                    // Without rows of an earlier stage `width` is 0, and the empty rows are filtered out.
                    let width = first_rows.len() / count.max(1);
                    for (i, sequence) in sequences.by_ref().take(count).enumerate() {
                        let row = first_rows.get(i * width..(i + 1) * width).filter(|r| !r.is_empty());
                        self.admit(&batch, &sequence, row, stop)?;
                    }
                }
                InputEvent::Source(name) => self.queue.push(OutputItem::Source(name)),
                InputEvent::End { record, length, text, mate } => {
                    self.queue.push(OutputItem::End { record, length, text, mate });
                }
                InputEvent::Note(note) => self.queue_note(note)?,
            }
        }
        self.run_models(stop, ModelRunner::step)?;
        let devices = self.parts.compute.as_ref().map_or(1, ModelRunner::devices);
        let QueueSizes { items, bytes, .. } = self.queues;
        while self.queue.len() > devices * items || self.queue.bytes() > devices * bytes {
            self.run_models(stop, ModelRunner::flush)?;
        }
        Ok(())
    }

    /// Processes some of the waiting work after the end of the input; returns whether there is more.
    fn drain(&mut self, stop: StopCheck<'_>) -> Result<bool, VirusError> {
        self.run_models(stop, ModelRunner::drain)?;
        Ok(self.queue.len() > 0)
    }

    /// Returns the warnings that were raised since the last call.
    fn warnings(&mut self) -> Vec<String> {
        self.parts.compute.as_mut().map_or(vec![], ModelRunner::warnings)
    }

    /// Reports the changes of the size of the steps since the last call.
    fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer) {
        if let Some(compute) = &mut self.parts.compute {
            compute.report_sizes(watch, observer);
        }
    }

    fn add_wait(&mut self, seconds: f64) {
        self.totals.seconds.waiting += seconds;
    }

    fn progress(&mut self, bytes_total: Option<u64>) -> Progress {
        self.progress_after(None, bytes_total)
    }
}

impl<'a> PredictEngine<'a> {
    pub(crate) fn new(parts: EngineParts<'a>, queues: QueueSizes) -> Self {
        Self {
            parts,
            queue: OutputQueue::default(),
            queues,
            entry: JournalEntry::default(),
            totals: StageTotals::default(),
            taken: TakenWork::default(),
            started: Instant::now(),
        }
    }

    /// Commits finished windows to the journal before the run ends early; returns the number of windows on disk.
    pub(crate) fn commit(&mut self) -> Result<u64, VirusError> {
        // The run already ends for another reason: a device error must not prevent the commit of finished windows.
        let _ = self.run_models(&|| Ok(()), ModelRunner::cancel);
        self.emit()?;
        let Some(writer) = &mut self.parts.writer else { return Ok(0) };
        writer.commit()?;
        Ok(writer.committed)
    }

    /// Packing fill, by encoder.
    pub(crate) fn fill(&self) -> [Fill; ENCODERS] {
        self.parts.compute.as_ref().map_or([Fill::default(); ENCODERS], ModelRunner::fill)
    }

    /// Returns the progress of the run; `read` are the bytes of the input if the stage has finished. Each stage reads
    /// the whole input and counts for the same share of it.
    pub(crate) fn progress_after(&mut self, read: Option<u64>, bytes_total: Option<u64>) -> Progress {
        let tokens = self.totals.tokens.iter().sum();
        let bytes_of_stage = read.unwrap_or_else(|| self.taken.finished(tokens, bytes_total));
        let InputPass { number, count } = self.parts.pass;
        let bytes = bytes_total.map_or(bytes_of_stage, |total| (number * total + bytes_of_stage) / count);
        Progress {
            bytes,
            bytes_total,
            records: self.totals.records,
            sequences: self.totals.sequences,
            tokens,
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// Returns the components and the counters after the last window.
    pub(crate) fn into_parts(self) -> (EngineParts<'a>, StageTotals) {
        (self.parts, self.totals)
    }

    /// Queues a note on the input; with `--strict` it is an error.
    fn queue_note(&mut self, note: Note) -> Result<(), VirusError> {
        if self.parts.strict {
            let Note { seq_name, kind, detail, .. } = note;
            return Err(VirusError::Strict { record: seq_name, kind, detail });
        }
        self.queue.push(OutputItem::Note(note));
        Ok(())
    }

    /// Queues a window of a number of sequences, with its results if a journal has them. Returns the rows that the first encoder
    /// computed for these sequences in an earlier stage; empty without such a stage, and for a window with results.
    fn queue_window(&mut self, window: QueuedWindow, sequences: usize) -> Result<Vec<f32>, VirusError> {
        let QueuedWindow { number, location, .. } = window;
        let bases = (location.end() - location.start) as u64;
        self.taken.bases += bases;
        if let Some(entry) = self.parts.journal.take(number, &window.record, location.index)? {
            self.totals.windows_from_journal += 1;
            self.taken.journaled_bases += bases;
            let window = QueuedWindow::journaled(window.record, location, entry).with_letters(window.letters);
            self.queue.push(OutputItem::Window(window));
            return Ok(vec![]);
        }
        // A merge computes nothing: every window must be in the journal of a shard.
        if self.parts.only_merges {
            return Err(window.missing("the results"));
        }
        let mut rows = vec![];
        if let (Some(reader), Some(compute)) = (&mut self.parts.first_rows, &self.parts.compute) {
            let entry = reader.take(number, &window.record, location.index)?;
            let entry = entry.filter(|entry| entry.sequences.len() == sequences);
            let entry = entry.ok_or_else(|| window.missing("the rows of the first encoder"))?;
            rows = entry.rows_of_all(compute.first_width());
        }
        self.queue.push(OutputItem::Window(window));
        Ok(rows)
    }

    /// Gives a sequence of the window that was queued last to the models, after waiting until they have a free slot. `first_row`
    /// is its row of the first encoder, if an earlier stage has computed it.
    fn admit(
        &mut self,
        batch: &WindowBatch,
        sequence: &SequenceTokens,
        first_row: Option<&[f32]>,
        stop: StopCheck<'_>,
    ) -> Result<(), VirusError> {
        while self.parts.compute.as_ref().is_some_and(|c| !c.has_room()) {
            self.run_models(stop, ModelRunner::flush)?;
        }
        match &mut self.parts.compute {
            Some(compute) => Ok(compute.admit(batch, sequence, &mut self.queue, first_row)?),
            None => Err(RuntimeError::bug("a method without models has a sequence").into()),
        }
    }

    /// Calls `stop`, runs `work` on the models if the stage has any, then writes the windows that are complete. An
    /// error of `stop` ends the run before any work.
    fn run_models<T>(
        &mut self,
        stop: StopCheck<'_>,
        work: impl FnOnce(&mut ModelRunner<'a>, &mut ResultSink<'_>) -> Result<T, RuntimeError>,
    ) -> Result<Option<T>, VirusError> {
        stop()?;
        let mut sink = ResultSink { queue: &mut self.queue, totals: &mut self.totals, stop };
        let done = self.parts.compute.as_mut().map(|compute| work(compute, &mut sink)).transpose()?;
        self.emit()?;
        Ok(done)
    }

    /// Writes all complete items at the front of the queue, in input order.
    fn emit(&mut self) -> Result<(), VirusError> {
        let start = Instant::now();
        while let Some(item) = self.queue.pop_complete() {
            match item {
                OutputItem::Window(window) => self.write_window(window)?,
                OutputItem::End { record, length, text, mate } => {
                    self.totals.records += 1;
                    let text = text.as_deref();
                    let end = RecordEnd { id: &record, length, text, mate: mate.as_ref() };
                    self.write_results(|results| results.record(&end))?;
                }
                OutputItem::Note(note) => self.write_results(|results| results.common().note(&note))?,
                OutputItem::Source(name) => self.write_results(|results| {
                    results.common().set_source(&name);
                    Ok(())
                })?,
                OutputItem::Text(texts) => self.write_results(|results| results.texts(&texts))?,
            }
        }
        if let Some(writer) = &mut self.parts.writer {
            writer.commit_if_due()?;
        }
        self.totals.seconds.writing += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Calls `write` on the result files if the stage writes any.
    fn write_results(
        &mut self,
        write: impl FnOnce(&mut dyn ResultsWriter) -> Result<(), OutputError>,
    ) -> Result<(), VirusError> {
        match &mut self.parts.results {
            Some(results) => Ok(write(&mut **results)?),
            None => Ok(()),
        }
    }

    /// Writes a complete window to the result files and the journal.
    fn write_window(&mut self, window: QueuedWindow) -> Result<(), VirusError> {
        let entry = &mut self.entry;
        entry.rows.clear();
        match &mut self.parts.compute {
            Some(compute) if !window.is_journaled => compute.release(&window, &mut entry.rows),
            Some(_) | None => entry.rows.extend_from_slice(&window.rows),
        }
        entry.sequences.clear();
        entry.sequences.extend(window.sequences());
        // Counted when the window is written, so that results from a journal count too.
        let failed = entry.sequences.iter().filter(|sequence| sequence.state == SequenceState::Failed).count();
        self.totals.failed += failed as u64;
        if let Some(results) = &mut self.parts.results {
            results.window(&FinishedWindow {
                record: &window.record,
                location: window.location,
                letters: window.letters,
                sequences: &entry.sequences,
                rows: &entry.rows,
            })?;
        }
        // A window whose results came from this journal is not written to it again.
        let Some(writer) = self.parts.writer.as_mut().filter(|_| !window.is_journaled) else { return Ok(()) };
        entry.number = window.number;
        entry.index = window.location.index as u64;
        entry.record.clear();
        entry.record.push_str(&window.record);
        writer.append(entry)
    }
}
