//! The engine of a prediction, between the front end and the outputs. The front end (`produce.rs`) reads records, cuts
//! them into windows and tokenizes their open reading frames; the engine passes the frames to the models
//! (`compute.rs`), holds the windows in input order until all of their frames have results, then writes the windows to
//! the result files and the journal. Invariant: windows leave in the order in which they arrived, and the journal entry
//! of a window holds exactly the results that are written.
//!
//! Under a tight memory budget a run has two stages, each with an engine of its own: the first computes the nucleotide
//! embeddings and writes them to a journal, the second reads them and computes the rest (`stage.rs`).

use crate::VirusError;
use crate::output::{
    CallerWindow, Note, OrfScore, OutputError, RecordEnd, ResultFiles, Window as OutputWindow,
};
use crate::pipeline::compute::{Compute, Sink};
use crate::pipeline::journal::{JournalEntry, JournalReader, JournalWriter, OrfEntry};
use crate::pipeline::letters::WindowLetters;
use crate::pipeline::queue::{OrfState, OutputItem, PendingOrf, Queue, Window};
use crate::pipeline::queues::QueueSizes;
use crate::pipeline::records::{Batch, Event, OrfTokens};
use plimsoll_data::chunk::Chunk;
use plimsoll_data::intermediate::orf_name;
use plimsoll_data::pack::Fill;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::session::Stop;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{FinishedBytes, Observer, Progress};
use std::sync::Arc;
use std::time::Instant;

/// Time in seconds by activity; encoders and head are summed over all devices, the others are of the main thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seconds {
    /// From the first record to the last result.
    pub(crate) streaming: f64,
    /// Waiting for the front end, which reads and tokenizes.
    pub(crate) waiting: f64,
    /// Waiting for devices.
    pub(crate) devices: f64,
    /// Steps of the encoders, by encoder.
    pub(crate) encoders: [f64; 2],
    /// Steps of the head.
    pub(crate) head: f64,
    /// Writing results and the journal.
    pub(crate) writing: f64,
}

impl Seconds {
    /// The remaining time of the main thread, spent on packing and slots.
    pub(crate) fn between(&self) -> f64 {
        (self.streaming - self.waiting - self.devices - self.writing).max(0.0)
    }
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) records: u64,
    /// Windows whose results were taken from the journal of an interrupted run.
    pub(crate) kept: u64,
    /// Open reading frames that this run has finished, failed frames included.
    pub(crate) orfs: u64,
    /// Failed open reading frames of all written windows.
    pub(crate) failed: u64,
    /// Tokens of the completed steps, by encoder.
    pub(crate) tokens: [u64; 2],
    pub(crate) seconds: Seconds,
}

impl Totals {
    /// Adds the tokens and times of the preceding stage. Records and windows are not added: each stage reads
    /// all of them.
    pub(crate) fn add_stage(&mut self, earlier: &Totals) {
        for encoder in 0..2 {
            self.tokens[encoder] += earlier.tokens[encoder];
            self.seconds.encoders[encoder] += earlier.seconds.encoders[encoder];
        }
        self.seconds.streaming += earlier.seconds.streaming;
        self.seconds.waiting += earlier.seconds.waiting;
        self.seconds.devices += earlier.seconds.devices;
        self.seconds.writing += earlier.seconds.writing;
    }
}

/// The models, journals and outputs of an engine; a field is `None` if the stage does not need it.
pub(crate) struct Parts<'a> {
    /// The models, for results that are in no journal. If `None`, all results must be in journals.
    pub(crate) compute: Option<Compute<'a>>,
    /// Results journaled by an earlier run.
    pub(crate) results: JournalReader,
    /// Nucleotide embeddings of an earlier stage.
    pub(crate) embeddings: Option<JournalReader>,
    /// Journal that finished results are written to.
    pub(crate) writer: Option<JournalWriter>,
    /// Result files.
    pub(crate) outputs: Option<ResultFiles>,
    /// Whether notes on the input are errors (`--strict`).
    pub(crate) strict: bool,
    /// Number of this stage, from 0, and number of stages, for the progress.
    pub(crate) stage: (u64, u64),
}

/// The work that a stage has taken from the input, for its progress.
#[derive(Default)]
struct TakenWork {
    /// Stored bytes of the input up to the last batch taken.
    bytes: u64,
    /// Tokens of the open reading frames of all batches taken.
    tokens: u64,
    /// Bases of the windows of all batches taken, and of those whose results were in the journal.
    bases: u64,
    kept_bases: u64,
    finished: FinishedBytes,
}

impl TakenWork {
    /// Estimates the bytes of the input that are computed after `tokens` tokens. Work is measured in bases of windows,
    /// which are also known of windows from a journal.
    fn finished(&mut self, tokens: u64, total: Option<u64>) -> u64 {
        let share = if self.tokens == 0 { 1.0 } else { (tokens as f64 / self.tokens as f64).min(1.0) };
        let computed = ((self.bases - self.kept_bases) as f64 * share) as u64;
        self.finished.update(self.bytes, total, self.kept_bases + computed, self.bases)
    }
}

/// The engine of one stage.
pub(crate) struct Engine<'a> {
    parts: Parts<'a>,
    queue: Queue,
    /// Limits of `queue`. When they are exceeded behind an incomplete window, partly filled packs are flushed:
    /// input with few open reading frames would fill packs slowly and accumulate.
    queues: QueueSizes,
    /// Reused buffer for the journal entry of the window being written.
    entry: JournalEntry,
    /// Reused buffer for the scores of the window being written.
    scored: Vec<OrfScore>,
    pub(crate) totals: Totals,
    taken: TakenWork,
    started: Instant,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(parts: Parts<'a>, queues: QueueSizes) -> Self {
        let (queue, totals, started) = (Queue::default(), Totals::default(), Instant::now());
        Self {
            parts,
            queue,
            queues,
            entry: JournalEntry::default(),
            scored: Vec::with_capacity(6),
            totals,
            taken: TakenWork::default(),
            started,
        }
    }

    /// Queues the events of one job of the front end, and gives each of its open reading frames a slot of the models.
    /// Waits for results while the models can take no further frame, and while the queue exceeds its limits.
    pub(crate) fn take(&mut self, mut batch: Batch, stop: Stop<'_>) -> Result<(), VirusError> {
        self.taken.bytes = batch.bytes_read;
        if let Some(compute) = &self.parts.compute {
            self.taken.tokens += batch.orfs.iter().map(|orf| compute.tokens_of(orf)).sum::<u64>();
        }
        let mut orfs = std::mem::take(&mut batch.orfs).into_iter();
        self.queue.push(OutputItem::Text(std::mem::take(&mut batch.text)));
        for event in std::mem::take(&mut batch.events) {
            match event {
                Event::Window { number, record, chunk, orfs: count, letters } => {
                    let embeddings = self.window((number, record, chunk), count, letters)?;
                    // Without embeddings of an earlier stage `width` is 0, and the empty rows are filtered out.
                    let width = embeddings.len() / count.max(1);
                    for (i, orf) in orfs.by_ref().take(count).enumerate() {
                        let row = embeddings.get(i * width..(i + 1) * width).filter(|r| !r.is_empty());
                        self.admit(&batch, &orf, row, stop)?;
                    }
                }
                Event::Source(name) => self.queue.push(OutputItem::Source(name)),
                Event::End { record, length, text, mate } => {
                    self.queue.push(OutputItem::End { record, length, text, mate });
                }
                Event::Note(note) => self.note(note)?,
            }
        }
        self.compute(stop, Compute::step)?;
        let devices = self.parts.compute.as_ref().map_or(1, Compute::devices);
        let QueueSizes { items, bytes, .. } = self.queues;
        while self.queue.len() > devices * items || self.queue.bytes() > devices * bytes {
            self.compute(stop, Compute::flush)?;
        }
        Ok(())
    }

    /// Processes some of the waiting work after the end of the input; returns whether there is more.
    pub(crate) fn drain(&mut self, stop: Stop<'_>) -> Result<bool, VirusError> {
        self.compute(stop, Compute::drain)?;
        Ok(self.queue.len() > 0)
    }

    /// Commits finished windows to the journal before the run ends early; returns the number of windows on disk.
    pub(crate) fn commit(&mut self) -> Result<u64, VirusError> {
        // The run already ends for another reason: a device error must not prevent the commit of finished windows.
        let _ = self.compute(&|| Ok(()), Compute::cancel);
        self.emit()?;
        let Some(writer) = &mut self.parts.writer else { return Ok(0) };
        writer.commit()?;
        Ok(writer.committed)
    }

    /// Returns the warnings that were raised since the last call.
    pub(crate) fn warnings(&mut self) -> Vec<String> {
        self.parts.compute.as_mut().map_or(vec![], Compute::warnings)
    }

    /// Reports the changes of the size of the steps since the last call.
    pub(crate) fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer) {
        if let Some(compute) = &mut self.parts.compute {
            compute.report_sizes(watch, observer);
        }
    }

    /// How full the packs of both encoders were.
    pub(crate) fn fill(&self) -> [Fill; 2] {
        self.parts.compute.as_ref().map_or([Fill::default(); 2], Compute::fill)
    }

    /// Returns the progress of the run; `read` are the bytes of the input if the stage has finished. Each stage reads
    /// the whole input and counts for the same share of it.
    pub(crate) fn progress(&mut self, read: Option<u64>, bytes_total: Option<u64>) -> Progress {
        let tokens = self.totals.tokens.iter().sum();
        let of_stage = read.unwrap_or_else(|| self.taken.finished(tokens, bytes_total));
        let (stage, stages) = self.parts.stage;
        let bytes = bytes_total.map_or(of_stage, |total| (stage * total + of_stage) / stages);
        Progress {
            bytes,
            bytes_total,
            records: self.totals.records,
            sequences: self.totals.orfs,
            tokens,
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// Returns the components and the counters after the last window.
    pub(crate) fn into_parts(self) -> (Parts<'a>, Totals) {
        (self.parts, self.totals)
    }

    /// Queues a note on the input; with `--strict` it is an error.
    fn note(&mut self, note: Note) -> Result<(), VirusError> {
        if self.parts.strict {
            let Note { seq_name, kind, detail, .. } = note;
            return Err(VirusError::Strict { record: seq_name, kind, detail });
        }
        self.queue.push(OutputItem::Note(note));
        Ok(())
    }

    /// Queues a window, with its results if a journal has them. Returns the nucleotide embeddings of its open reading
    /// frames if an earlier stage has computed them.
    fn window(
        &mut self,
        (number, record, chunk): (u64, Arc<str>, Chunk),
        orfs: usize,
        letters: WindowLetters,
    ) -> Result<Vec<f32>, VirusError> {
        let bases = (chunk.end() - chunk.start) as u64;
        self.taken.bases += bases;
        if let Some(entry) = self.parts.results.take(number, &record, chunk.index)? {
            self.totals.kept += 1;
            self.taken.kept_bases += bases;
            self.queue.push(OutputItem::Window(Window::kept(record, chunk, entry).with_letters(letters)));
            return Ok(vec![]);
        }
        let missing =
            |what| VirusError::MissingWindow { what, window: chunk.index + 1, record: record.to_string() };
        let Some(compute) = &self.parts.compute else { return Err(missing("the results")) };
        let mut rows = vec![];
        if let Some(reader) = &mut self.parts.embeddings {
            let entry = reader.take(number, &record, chunk.index)?.filter(|e| e.orfs.len() == orfs);
            let entry = entry.ok_or_else(|| missing("the nucleotide embeddings"))?;
            rows = entry.rows_of_all(compute.nucleotide_width());
        }
        self.queue.push(OutputItem::Window(Window::new(number, record, chunk, orfs).with_letters(letters)));
        Ok(rows)
    }

    /// Gives an open reading frame of the window that was queued last to the models, after waiting until they have a
    /// free slot. `embedding` is the frame's nucleotide embedding, if an earlier stage has computed it.
    fn admit(
        &mut self,
        batch: &Batch,
        orf: &OrfTokens,
        embedding: Option<&[f32]>,
        stop: Stop<'_>,
    ) -> Result<(), VirusError> {
        while self.parts.compute.as_ref().is_some_and(|c| !c.has_room()) {
            self.compute(stop, Compute::flush)?;
        }
        match &mut self.parts.compute {
            Some(compute) => Ok(compute.admit(batch, orf, &mut self.queue, embedding)?),
            None => Ok(()),
        }
    }

    /// Calls `stop`, runs `part` on the models if the stage has any, then writes the windows that are complete. An
    /// error of `stop` ends the run before any work.
    fn compute<T>(
        &mut self,
        stop: Stop<'_>,
        part: impl FnOnce(&mut Compute<'a>, &mut Sink<'_>) -> Result<T, RuntimeError>,
    ) -> Result<Option<T>, VirusError> {
        stop()?;
        let mut sink = Sink { queue: &mut self.queue, totals: &mut self.totals, stop };
        let done = self.parts.compute.as_mut().map(|compute| part(compute, &mut sink)).transpose()?;
        self.emit()?;
        Ok(done)
    }

    /// Writes all complete items at the front of the queue, in input order.
    fn emit(&mut self) -> Result<(), VirusError> {
        let start = Instant::now();
        while let Some(item) = self.queue.pop_complete() {
            match item {
                OutputItem::Window(window) => self.write(window)?,
                OutputItem::End { record, length, text, mate } => {
                    self.totals.records += 1;
                    let end = RecordEnd { id: &record, length, text: text.as_deref() };
                    match &mut self.parts.outputs {
                        Some(ResultFiles::VirNucPro(outputs)) => drop(outputs.record(&end)?),
                        Some(ResultFiles::Caller(outputs)) => {
                            outputs.record(&end, mate.as_ref().map(|mate| (&*mate.pair, mate.is_second)))?;
                        }
                        None => {}
                    }
                }
                OutputItem::Note(note) => self.written(|outputs| outputs.note(&note))?,
                OutputItem::Source(name) => self.written(|outputs| outputs.source(&name))?,
                OutputItem::Text(text) => self.written(|outputs| outputs.intermediate(&text))?,
            }
        }
        if let Some(writer) = &mut self.parts.writer {
            writer.commit_if_due()?;
        }
        self.totals.seconds.writing += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Calls `write` on the result files if the stage writes any.
    fn written(
        &mut self,
        write: impl FnOnce(&mut ResultFiles) -> Result<(), OutputError>,
    ) -> Result<(), VirusError> {
        Ok(self.parts.outputs.as_mut().map_or(Ok(()), write)?)
    }

    /// Writes a complete window to the outputs and the journal.
    fn write(&mut self, window: Window) -> Result<(), VirusError> {
        self.entry.rows.clear();
        match &mut self.parts.compute {
            Some(compute) if !window.kept => compute.release(&window, &mut self.entry.rows),
            Some(_) | None => self.entry.rows.extend_from_slice(&window.rows),
        }
        self.write_embeddings(&window)?;
        self.note_failures(&window)?;
        self.scored.clear();
        self.scored.extend(window.scores());
        let (record, chunk) = (&window.record, &window.chunk);
        let (index, start, end) = (chunk.index, chunk.start, chunk.end());
        match &mut self.parts.outputs {
            Some(ResultFiles::VirNucPro(outputs)) => {
                outputs.window(&OutputWindow { record, index, start, end, orfs: &self.scored })?;
            }
            Some(ResultFiles::Caller(outputs)) => {
                // A window is one sequence, so its only row, if it has one, is that of the logits.
                let logits = window.embedded().next().map(|_| &self.entry.rows[..]);
                let failed = window.orfs().any(|orf| orf.state == OrfState::Failed);
                let letters = window.letters;
                outputs.window(&CallerWindow { record, index, start, end, letters, logits, failed })?;
            }
            None => {}
        }
        // A window whose results came from this journal is not written to it again.
        let Some(writer) = self.parts.writer.as_mut().filter(|_| !window.kept) else { return Ok(()) };
        (self.entry.number, self.entry.index) = (window.number, chunk.index as u64);
        self.entry.record.clear();
        self.entry.record.push_str(record);
        self.entry.orfs.clear();
        let kept = |orf: &PendingOrf| OrfEntry { frame: orf.frame, bases: orf.bases, state: orf.state };
        self.entry.orfs.extend(window.orfs().map(kept));
        writer.append(&self.entry)
    }

    /// Writes a note for each failed frame of a window. Called when the window is written, not when the frame fails, so
    /// that notes are in input order.
    fn note_failures(&mut self, window: &Window) -> Result<(), VirusError> {
        for orf in window.orfs().filter(|orf| orf.state == OrfState::Failed) {
            self.totals.failed += 1;
            let (number, frame) = (window.chunk.index + 1, orf.frame.name());
            let of_caller = matches!(self.parts.outputs, Some(ResultFiles::Caller(_)));
            let frame = if of_caller { String::new() } else { format!(" frame {frame}") };
            let note = Note {
                seq_name: window.record.to_string(),
                kind: "failed",
                detail: format!("window {number}{frame}: a value is not a number"),
                action: "not scored",
            };
            self.written(|outputs| outputs.note(&note))?;
        }
        Ok(())
    }

    /// Writes the embeddings in `self.entry` to the result files, if `--save-embeddings` is given.
    fn write_embeddings(&mut self, window: &Window) -> Result<(), VirusError> {
        let count = window.embedded().count();
        let Some(ResultFiles::VirNucPro(outputs)) = self.parts.outputs.as_mut().filter(|_| count > 0) else {
            return Ok(());
        };
        let mut name = String::new();
        // One row per embedded frame. `max(1)`: without saved embeddings there are no rows, and `chunks_exact` panics
        // at a size of 0.
        let rows = self.entry.rows.chunks_exact((self.entry.rows.len() / count).max(1));
        for (orf, row) in window.embedded().zip(rows) {
            orf_name(&window.record, window.chunk.index, orf.frame, &mut name);
            outputs.embedding(&name, orf.bases.into(), row)?;
        }
        Ok(())
    }
}
