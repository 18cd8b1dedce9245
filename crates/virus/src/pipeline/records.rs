//! The front end: one thread reads records and cuts them into jobs, worker threads tokenize the windows of the jobs, and the
//! engine receives the results in input order. Invariant: number and size of the jobs in flight are bounded (see
//! `QueueSizes::bytes_held`), whatever the records look like.

use crate::methods::{CutWindow, WindowBases, WindowSource, WindowTokenizer};
use crate::options::WindowShard;
use crate::output::{HitsFormat, Note, RecordText};
use crate::pipeline::journal::Coverage;
use crate::pipeline::letters::WindowLetters;
use crate::pipeline::mates::{Mate, common_name};
use crate::pipeline::queues::QueueSizes;
use crate::pipeline::shape::ENCODERS;
use plimsoll_data::alphabet::{Alphabet, UnknownLetters, count_uracil, uracil_to_thymine};
use plimsoll_data::limits::spawn;
use plimsoll_data::names::{RecordNames, RecordPlace, Renaming, ResultName, own_names};
use plimsoll_data::printable;
use plimsoll_data::sequence::{Input, InputExtent, InputNote, NoteKind, Reader, Record, SequenceFormat};
use plimsoll_data::window::RecordWindow;
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::ordered::{self, Gone, JobSender, JobWorker, OrderedResults};
use plimsoll_runtime::run::BatchSource;
use plimsoll_setting::Setting;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Maximum number of files of a method's own that its tokenizers write texts for.
pub(crate) const TEXTS: usize = 3;

/// Settings of the front end.
pub(crate) struct InputPipelineSettings {
    /// The part of the method that cuts and tokenizes.
    pub(crate) window_source: Arc<dyn WindowSource>,
    /// Output format of records called virus; if set, the end of a record carries its text.
    pub(crate) hits: Option<HitsFormat>,
    /// Number of threads that tokenize.
    pub(crate) workers: usize,
    /// Number of jobs in flight per worker thread.
    pub(crate) prefetch: usize,
    /// Size limits of jobs.
    pub(crate) queues: QueueSizes,
    /// Windows whose results are in a journal; they are passed on without sequences.
    pub(crate) journaled: Arc<Coverage>,
    /// Shard to compute; windows of other shards are skipped.
    pub(crate) shard: Option<WindowShard>,
    /// Upper bounds for records that were not measured beforehand.
    pub(crate) limits: Option<InputExtent>,
}

/// An event of the input, in input order.
pub(crate) enum InputEvent {
    /// A window of a record. Its sequences are the next `sequences` of the job.
    Window { number: u64, record: Arc<str>, location: RecordWindow, sequences: usize, letters: WindowLetters },
    /// Name of the input that the following records come from.
    Source(Arc<str>),
    /// The end of a record; a record without letters has no windows.
    End { record: Arc<str>, length: usize, text: Option<Arc<RecordText>>, mate: Option<Mate> },
    /// A note on an oddity of the input.
    Note(Note),
}

/// Tokens of a sequence of a window, as ranges of the job's token vectors.
pub(crate) struct SequenceTokens {
    /// Number of the sequence in its window.
    pub(crate) label: u8,
    /// Length of the sequence in bases.
    pub(crate) bases: u32,
    /// Range of its tokens, by encoder; empty for encoders that the method does not have.
    pub(crate) tokens: [Range<usize>; ENCODERS],
}

/// A tokenized job.
#[derive(Default)]
pub(crate) struct WindowBatch {
    pub(crate) events: Vec<InputEvent>,
    pub(crate) sequences: Vec<SequenceTokens>,
    /// Tokens of all sequences, by encoder.
    pub(crate) tokens: [Vec<i32>; ENCODERS],
    /// Texts for the method's own files.
    pub(crate) texts: [Vec<u8>; TEXTS],
    /// Stored bytes of the input up to the end of the batch.
    pub(crate) bytes_read: u64,
}

/// Consecutive windows and events of the input, which one worker thread tokenizes.
#[derive(Default)]
struct WindowJob {
    /// Windows and events in input order.
    parts: Vec<JobPart>,
    /// Bases of the windows; neighbouring windows share the bases of their overlap.
    bases: Vec<u8>,
    /// Stored bytes of the input up to the end of the job.
    bytes_read: u64,
}

/// A window or an event of a job.
enum JobPart {
    /// A window, whose bases are the range `bases` of [`WindowJob::bases`].
    Window { number: u64, record: Arc<str>, cut: CutWindow, bases: Range<usize> },
    /// An event that is passed on unchanged.
    Event(InputEvent),
}

/// The running front end. Dropping it does not join the threads, because the reader may be blocked on a silent pipe for
/// hours.
pub(crate) struct BatchStream {
    batches: OrderedResults<WindowBatch>,
    reader: JoinHandle<Result<Vec<Input>, RuntimeError>>,
    /// Total bytes of input, if known.
    pub(crate) bytes_total: Option<u64>,
}

impl BatchSource for BatchStream {
    type Batch = WindowBatch;

    fn next(
        &mut self,
        wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
    ) -> Result<Option<WindowBatch>, RuntimeError> {
        self.batches.next(wait)
    }

    fn bytes_total(&self) -> Option<u64> {
        self.bytes_total
    }
}

impl BatchStream {
    /// Returns the inputs with their digests, or the error of the reader.
    pub(crate) fn finish(self) -> Result<Vec<Input>, RuntimeError> {
        drop(self.batches);
        match self.reader.join() {
            Ok(inputs) => inputs,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Starts the threads. They end at the end of the input, or after the stream was dropped.
pub(crate) fn start(settings: InputPipelineSettings, inputs: &[PathBuf]) -> Result<BatchStream, RuntimeError> {
    let records = RecordReader::open(&settings, inputs)?;
    let settings = Arc::new(settings);
    let bytes_total = records.total_bytes();
    let names = match bytes_total {
        Some(_) => {
            let inputs = inputs.to_vec();
            RecordNames::new(move || own_names(&inputs, false))
        }
        None => RecordNames::of_pipe(),
    };
    let mut workers: Vec<JobWorker<WindowJob, WindowBatch>> = vec![];
    for _ in 0..settings.workers {
        let settings = Arc::clone(&settings);
        let mut tokenizer = settings.window_source.tokenizer();
        workers.push(Box::new(move |job| tokenize(&settings, job, &mut *tokenizer)));
    }
    let (feed, batches) = ordered::start(workers, settings.workers * settings.prefetch)?;
    let cutter = RecordCutter {
        settings,
        job: WindowJob::default(),
        feed,
        names,
        bytes: [0; 2],
        windows: 0,
        file: None,
        records: vec![],
        unknown: UnknownLetters::default(),
    };
    let reader = spawn("reader", move || cutter.read(records)).map_err(RuntimeError::thread("reader"))?;
    Ok(BatchStream { batches, reader, bytes_total })
}

/// Reader of the records of all inputs: of one file after another, or, of pairs of files, of the two files in turn.
struct RecordReader {
    /// One reader for all files, or one for the files of first mates and one for the files of second mates.
    readers: Vec<Reader>,
    /// Index of the reader of the current record.
    turn: usize,
    /// Whether records come in pairs.
    paired: bool,
    /// Number of records so far.
    records: u64,
}

/// File and line of a record.
type RecordLine = (PathBuf, u64);

impl RecordReader {
    fn open(settings: &InputPipelineSettings, inputs: &[PathBuf]) -> Result<Self, DataError> {
        let paired = settings.window_source.is_paired();
        let mut readers = if paired && inputs.len() > 1 {
            // Files are given in pairs: A_1 A_2 B_1 B_2.
            let first_mates = inputs.iter().step_by(2);
            let second_mates = inputs.iter().skip(1).step_by(2);
            vec![Reader::open(first_mates.cloned())?, Reader::open(second_mates.cloned())?]
        } else {
            vec![Reader::open(inputs.to_vec())?]
        };
        for reader in &mut readers {
            reader.keep_qualities(settings.hits.is_some_and(HitsFormat::has_qualities));
            if let Some(limits) = &settings.limits {
                reader.hold_to(limits.clone());
            }
        }
        Ok(Self { readers, turn: 0, paired, records: 0 })
    }

    /// Reads the next record; false at the end of the input.
    ///
    /// # Errors
    /// Those of [`Reader::read_into`]; a record without a mate.
    fn read_into(&mut self, record: &mut Record) -> Result<bool, DataError> {
        self.turn = self.records as usize % self.readers.len();
        let has_two_readers = self.readers.len() == 2;
        let is_second = self.paired && self.records % 2 == 1;
        // The place of the first mate, before its file is closed at its end.
        let first = if is_second { self.place_of(0) } else { None };
        if !self.readers[self.turn].read_into(record)? {
            if is_second {
                return Err(without_mate(first));
            }
            // The files of a pair must end at the same record.
            if has_two_readers && self.readers[1].read_into(record)? {
                self.turn = 1;
                return Err(without_mate(self.place_of(1)));
            }
            return Ok(false);
        }
        if is_second && has_two_readers {
            let [first_files, second_files] = [0, 1].map(|reader| self.readers[reader].inputs().len());
            if first_files != second_files {
                // The reader of the file with more records is still at that file.
                self.turn = usize::from(second_files < first_files);
                return Err(without_mate(if self.turn == 1 { self.place_of(1) } else { first }));
            }
        }
        self.records += 1;
        Ok(true)
    }

    /// Place of the record that a reader read last; `None` before its first record.
    fn place_of(&self, reader: usize) -> Option<RecordLine> {
        self.readers[reader].position().map(|(path, line)| (path.to_owned(), line))
    }

    /// The reader of the current record.
    fn reader(&self) -> &Reader {
        &self.readers[self.turn]
    }

    /// Number of the file of the current record, from 1.
    fn file(&self) -> usize {
        // `inputs` has the files that were read to their end, so their number is the index of the current file of this
        // reader. The files of two readers alternate on the command line: A_1 and B_1 are 1 and 3, A_2 and B_2 2 and 4.
        self.turn + self.readers.len() * self.reader().inputs().len() + 1
    }

    /// Notes on files that were read to their end since the last call.
    fn take_notes(&mut self) -> Vec<InputNote> {
        self.readers.iter_mut().flat_map(Reader::take_notes).collect()
    }

    /// The inputs with their digests, in the order of the command, after the last record.
    fn inputs(&self) -> Vec<Input> {
        let files = self.readers.iter().map(|reader| reader.inputs().len()).max().unwrap_or(0);
        let mut inputs = vec![];
        for file in 0..files {
            inputs.extend(self.readers.iter().filter_map(|reader| reader.inputs().get(file).cloned()));
        }
        inputs
    }

    fn bytes_read(&self) -> u64 {
        self.readers.iter().map(Reader::bytes_read).sum()
    }

    fn total_bytes(&self) -> Option<u64> {
        self.readers.iter().map(Reader::total_bytes).sum()
    }
}

/// The error for a record without a mate.
fn without_mate(place: Option<RecordLine>) -> DataError {
    let Some((path, line)) = place else {
        return DataError::new(DataErrorKind::Malformed("a record has no mate".to_owned()));
    };
    let what = format!(
        "this record has no mate, because the other file, or the input, ends before it; give both files of the \
         pairs, or one file with the mates one after another, or omit {}",
        Setting::Paired
    );
    DataError::at(path, DataErrorKind::Malformed(what)).with_line(line)
}

/// A record with its place in the input.
#[derive(Default)]
struct PlacedRecord {
    record: Record,
    position: Option<RecordLine>,
    /// Number of its file, from 1.
    file: usize,
    /// Number of the record in the file, from 1.
    number: u64,
}

impl PlacedRecord {
    /// Path and line, for notes.
    fn place(&self) -> String {
        self.position.as_ref().map_or(String::new(), |(path, line)| format!("{}:{line}", path.display()))
    }
}

/// A record or pair whose name in the results is not its id.
struct RenamedRecord<'a> {
    id: &'a str,
    name: &'a str,
    /// `record` or `pair`.
    what: &'static str,
}

/// The reader thread: reads records and cuts them into jobs.
struct RecordCutter {
    settings: Arc<InputPipelineSettings>,
    job: WindowJob,
    feed: JobSender<WindowJob, WindowBatch>,
    names: RecordNames,
    /// Stored bytes of the input before and after the current record or pair.
    bytes: [u64; 2],
    /// Number of windows so far.
    windows: u64,
    /// File of the current record.
    file: Option<PathBuf>,
    /// Number of records read of each file.
    records: Vec<u64>,
    /// Letters of all records that the models do not know.
    unknown: UnknownLetters,
}

impl RecordCutter {
    /// Reads all records and sends their jobs. Returns the inputs with their digests; an empty list after an error,
    /// which the engine receives in input order, or if the engine has ended.
    fn read(mut self, mut records: RecordReader) -> Result<Vec<Input>, RuntimeError> {
        let mut current = PlacedRecord::default();
        let mut first = PlacedRecord::default();
        loop {
            let next = self.next(&mut records, &mut current);
            for note in records.take_notes() {
                self.note_of_file(&note);
            }
            match next {
                Ok(true) => {}
                Ok(false) => {
                    let unknown = std::mem::take(&mut self.unknown).note(Path::new("the input"));
                    unknown.iter().for_each(|note| self.note_of_file(note));
                    let _ = self.flush();
                    return Ok(records.inputs());
                }
                Err(error) => {
                    // Earlier records are computed first; the engine then receives the error in input order.
                    let _ = self.flush();
                    self.feed.fail(error.into());
                    return Ok(vec![]);
                }
            }
            if records.paired && records.records % 2 == 1 {
                std::mem::swap(&mut current, &mut first);
                continue;
            }
            self.bytes = [self.bytes[1], records.bytes_read()];
            let sent = if records.paired {
                match self.name_pair(&mut first, &mut current) {
                    Ok(name) => self.cut_pair(&records, name, [&mut first, &mut current]),
                    Err(error) => {
                        let _ = self.flush();
                        self.feed.fail(error.into());
                        return Ok(vec![]);
                    }
                }
            } else {
                self.announce_file(records.reader());
                self.cut(&mut current)
            };
            if sent.and_then(|()| self.flush_full()).is_err() {
                return Ok(vec![]);
            }
        }
    }

    /// Reads and checks the next record; false at the end of the input.
    fn next(&mut self, records: &mut RecordReader, current: &mut PlacedRecord) -> Result<bool, DataError> {
        if !records.read_into(&mut current.record)? {
            return Ok(false);
        }
        current.file = records.file();
        if self.records.len() < current.file {
            self.records.resize(current.file, 0);
        }
        self.records[current.file - 1] += 1;
        current.number = self.records[current.file - 1];
        let reader = records.reader();
        self.check_qualities(reader)?;
        Alphabet::Nucleotides.check(&current.record, reader)?;
        current.position = reader.position().map(|(path, line)| (path.to_owned(), line));
        Ok(true)
    }

    /// Emits an event if the current record comes from a different file than the previous one.
    fn announce_file(&mut self, reader: &Reader) {
        let Some((path, _)) = reader.position() else { return };
        if self.file.as_deref() != Some(path) {
            self.file = Some(path.to_owned());
            let name: Arc<str> = path.display().to_string().into();
            self.job.parts.push(JobPart::Event(InputEvent::Source(name)));
        }
    }

    /// Returns the name of a pair, and names its mates after it.
    ///
    /// # Errors
    /// Records that are not mates.
    fn name_pair(
        &mut self,
        first: &mut PlacedRecord,
        second: &mut PlacedRecord,
    ) -> Result<Arc<str>, DataError> {
        let Some(name) = common_name(&first.record.id, &second.record.id) else {
            let what = format!(
                "'{}' follows '{}' of {}, which is not its mate: mates have the same name, or names that end with /1 and /2, \
                 or with .1 and .2 behind a spot as in SRA (RUN.SPOT.1); files are paired in the order of the command; \
                 correct the order of the records, or omit {}",
                printable::Name(&second.record.id),
                printable::Name(&first.record.id),
                first.place(),
                Setting::Paired
            );
            let kind = DataErrorKind::Malformed(what);
            return Err(match &second.position {
                Some((path, line)) => DataError::at(path, kind).with_line(*line),
                None => DataError::new(kind),
            });
        };
        let id = name.to_owned();
        let place = RecordPlace { file: first.file, record: first.number };
        let ResultName { name, renaming } = self.names.name(&id, place);
        if let Some(why) = renaming {
            let renamed = RenamedRecord { id: &id, name: &name, what: "pair" };
            self.note_name(renamed, why, &first.place());
        }
        first.record.id = format!("{name}/1");
        second.record.id = format!("{name}/2");
        Ok(name.into())
    }

    /// Appends both mates of a pair to the job.
    fn cut_pair(
        &mut self,
        records: &RecordReader,
        pair: Arc<str>,
        mates: [&mut PlacedRecord; 2],
    ) -> Result<(), Gone> {
        for (number, mate) in mates.into_iter().enumerate() {
            self.announce_file(&records.readers[number % records.readers.len()]);
            let place = mate.place();
            let in_pair = Mate { pair: Arc::clone(&pair), is_second: number == 1 };
            self.cut_named(&mut mate.record, &place, Some(in_pair))?;
        }
        Ok(())
    }

    /// Appends a note on a file to the job, under the name of its first record or of the file.
    fn note_of_file(&mut self, note: &InputNote) {
        let InputNote { path, kind, id, .. } = note;
        let name = match kind {
            NoteKind::NoRecords => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            NoteKind::Spacing | NoteKind::Gaps | NoteKind::Unknown => id.clone(),
        };
        let detail = format!("{}: {}", path.display(), note.detail());
        self.note(&name, kind.name(), detail, kind.action());
    }

    /// Appends a note to the job.
    fn note(&mut self, name: &str, kind: &'static str, detail: String, action: &'static str) {
        let note = Note { seq_name: name.to_owned(), kind, detail, action };
        self.job.parts.push(JobPart::Event(InputEvent::Note(note)));
    }

    /// Appends a note of a record or pair that has another name in the results. The note is filed under that name, and
    /// its detail has the id.
    fn note_name(&mut self, renamed: RenamedRecord<'_>, why: Renaming, place: &str) {
        let RenamedRecord { id, name, what } = renamed;
        let action = "computed under another name";
        match why {
            Renaming::Repeated => {
                let detail =
                    format!("{place}: the id occurs before; in the tables this {what} is named {name}");
                self.note(id, "duplicate_id", detail, action);
            }
            Renaming::Empty => {
                self.note(name, "renamed", format!("{place}: the {what} has no name"), action);
            }
            Renaming::Reserved | Renaming::Escaped => {
                let detail = format!("{place}: the id '{}' {}", printable::Name(id), why.reason());
                self.note(name, "renamed", detail, action);
            }
        }
    }

    /// Rejects FASTA records if the output format needs qualities.
    fn check_qualities(&self, reader: &Reader) -> Result<(), DataError> {
        if !self.settings.hits.is_some_and(HitsFormat::has_qualities)
            || reader.format() != Some(SequenceFormat::Fasta)
        {
            return Ok(());
        }
        let Some((path, line)) = reader.position() else { return Ok(()) };
        let what = format!(
            "FASTA has no qualities, which {} writes; use {}",
            Setting::HitsFormat.to("fastq"),
            Setting::HitsFormat.to("fasta")
        );
        Err(DataError::at(path, DataErrorKind::Malformed(what)).with_line(line))
    }

    /// Appends a record to the job, under another name if its id occurs before.
    fn cut(&mut self, current: &mut PlacedRecord) -> Result<(), Gone> {
        let place = current.place();
        let PlacedRecord { record, file, number, .. } = current;
        let ordinal = RecordPlace { file: *file, record: *number };
        let ResultName { name, renaming } = self.names.name(&record.id, ordinal);
        if let Some(why) = renaming {
            let id = std::mem::replace(&mut record.id, name);
            self.note_name(RenamedRecord { id: &id, name: &record.id, what: "record" }, why, &place);
        }
        self.cut_named(record, &place, None)
    }

    /// Appends the windows, notes and end of a record to the job, and sends the job whenever it is full.
    /// `place` is the position of the record in the input, for notes.
    fn cut_named(&mut self, record: &mut Record, place: &str, mate: Option<Mate>) -> Result<(), Gone> {
        let notes = self.settings.window_source.notes();
        let id: Arc<str> = record.id.as_str().into();
        if record.seq.is_empty() {
            self.note(&id, "empty", place.to_owned(), "skipped");
            self.job.parts.push(JobPart::Event(InputEvent::End { record: id, length: 0, text: None, mate }));
            return Ok(());
        }
        let unknown = Alphabet::Nucleotides.count_unknown(&record.seq);
        self.unknown.count(unknown, || record.id.clone());
        // Only the job's copy is changed: a record called virus is written with its original letters.
        let uracil = if self.settings.window_source.keeps_uracil() { 0 } else { count_uracil(&record.seq) };
        if uracil > 0 {
            self.note(&id, "rna", format!("{place}: {uracil} letters are U"), "U is read as T");
        }
        if let Some(detail) = odd_characters(&record.seq) {
            self.note(&id, "non_iupac", detail, notes.non_iupac);
        }
        // Position in the record of its first base in the job, and offset of this base in `job.bases`.
        let mut copied: Option<(usize, usize)> = None;
        // Letters in no window beside runs of unknown letters that are too long for a window.
        let mut gaps = 0;
        let mut left_out = 0u64;
        for cut in self.settings.window_source.cut(&record.seq) {
            let location = cut.location;
            if cut.left_out.letters as usize > notes.longest_gap {
                gaps += 1;
                left_out += u64::from(cut.left_out.letters);
            }
            // Windows of other shards are counted too, so that a window has the same number in every shard and
            // in the merge.
            let number = self.windows;
            self.windows += 1;
            if self.settings.shard.is_some_and(|shard| !shard.contains(number)) {
                continue;
            }
            if self.job.bases.len() >= self.settings.queues.job_bases {
                self.flush()?;
                // The new job has none of the record's bases yet.
                copied = None;
            }
            let end = self.job.bases.len();
            // `bases[base..end]` holds the bases `from..from + (end - base)` of the record. Windows overlap, so
            // only the bases after these are appended; after a skipped window (another shard) there is a gap
            // and the copy starts anew.
            let (from, base) = match copied {
                Some((from, base)) if from + (end - base) >= location.start => (from, base),
                Some(_) | None => (location.start, end),
            };
            copied = Some((from, base));
            self.job.bases.extend_from_slice(&record.seq[from + (end - base)..location.end()]);
            if uracil > 0 {
                uracil_to_thymine(&mut self.job.bases[end..]);
            }
            let bases = base + location.start - from..base + location.end() - from;
            // A long record fills several jobs, of which each covers a part of the record's bytes.
            let [before, after] = self.bytes;
            let share = location.end() as f64 / record.seq.len().max(1) as f64;
            self.job.bytes_read = before + (after.saturating_sub(before) as f64 * share) as u64;
            self.job.parts.push(JobPart::Window { number, record: Arc::clone(&id), cut, bases });
        }
        if gaps > 0 {
            let places = if gaps == 1 { "place" } else { "places" };
            self.note(
                &id,
                "unknown_run",
                format!("{place}: {left_out} letters, in {gaps} {places}"),
                notes.gap,
            );
        }
        let length = record.seq.len();
        let text = self.settings.hits.map(|_| {
            let description = std::mem::take(&mut record.description);
            let sequence = std::mem::take(&mut record.seq);
            Arc::new(RecordText { description, sequence, quality: std::mem::take(&mut record.quality) })
        });
        self.job.bytes_read = self.bytes[1];
        self.job.parts.push(JobPart::Event(InputEvent::End { record: id, length, text, mate }));
        Ok(())
    }

    /// Sends the job if it is full. Called after every record, also after skipped ones, because notes take memory too.
    fn flush_full(&mut self) -> Result<(), Gone> {
        let QueueSizes { job_bases, job_parts, .. } = self.settings.queues;
        if self.job.bases.len() < job_bases && self.job.parts.len() < job_parts {
            return Ok(());
        }
        self.flush()
    }

    /// Sends the job unless it is empty, and starts another.
    fn flush(&mut self) -> Result<(), Gone> {
        if self.job.parts.is_empty() {
            return Ok(());
        }
        self.feed.send(std::mem::take(&mut self.job))
    }
}

/// Describes the characters of a sequence that are not IUPAC nucleotide codes; `None` if there are none.
fn odd_characters(sequence: &[u8]) -> Option<String> {
    const IUPAC: [bool; 256] = {
        let mut table = [false; 256];
        let letters = b"ACGTURYSWKMBDHVNacgturyswkmbdhvn-";
        let mut i = 0;
        while i < letters.len() {
            table[letters[i] as usize] = true;
            i += 1;
        }
        table
    };
    let mut odd = sequence.iter().filter(|letter| !IUPAC[usize::from(**letter)]);
    let first = odd.next()?;
    let count = 1 + odd.count();
    Some(format!("{count} characters, the first is {:?}", char::from(*first)))
}

/// Tokenizes a job. Windows whose results are in a journal get no sequences, but letters and texts.
fn tokenize(
    settings: &InputPipelineSettings,
    job: WindowJob,
    tokenizer: &mut dyn WindowTokenizer,
) -> Result<WindowBatch, RuntimeError> {
    let mut batch = WindowBatch { bytes_read: job.bytes_read, ..WindowBatch::default() };
    for part in job.parts {
        match part {
            JobPart::Event(event) => batch.events.push(event),
            JobPart::Window { number, record, cut, bases } => {
                let bases = &job.bases[bases];
                let location = cut.location;
                if bases.iter().all(|b| b.eq_ignore_ascii_case(&b'N')) {
                    batch.events.push(InputEvent::Note(Note {
                        seq_name: record.to_string(),
                        kind: "all_n",
                        detail: format!("window {}", location.index + 1),
                        action: settings.window_source.notes().all_n,
                    }));
                }
                let before = batch.sequences.len();
                let is_journaled = settings.journaled.contains(number);
                let window = WindowBases { record: &record, cut: &cut, bases, is_journaled };
                let letters = tokenizer.tokenize(&window, &mut batch)?;
                let sequences = batch.sequences.len() - before;
                batch.events.push(InputEvent::Window { number, record, location, sequences, letters });
            }
        }
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::gc::GcWindows;
    use plimsoll_testing::Folder;

    /// Records without letters produce notes, which take memory, so jobs must also be bounded by the number of
    /// parts.
    #[test]
    fn jobs_of_skipped_records_are_bounded() {
        let job_parts = QueueSizes::USUAL.job_parts;
        let folder = Folder::new("skipped");
        let path = folder.write("empty.fa", ">empty\n".repeat(10 * job_parts));
        let settings = InputPipelineSettings {
            window_source: Arc::new(GcWindows { length: 500 }),
            hits: None,
            workers: 2,
            prefetch: 2,
            queues: QueueSizes::USUAL,
            journaled: Arc::default(),
            shard: None,
            limits: None,
        };
        let mut stream = start(settings, std::slice::from_ref(&path)).expect("started");
        let (mut notes, mut ends) = (0, 0);
        while let Some(batch) = stream.next(&mut || Ok(())).expect("a batch") {
            // An empty record adds at most three events: two notes and its end.
            assert!(batch.events.len() < job_parts + 3, "{}", batch.events.len());
            ends += batch.events.iter().filter(|e| matches!(e, InputEvent::End { length: 0, .. })).count();
            notes += batch.events.iter().filter(|e| matches!(e, InputEvent::Note(_))).count();
        }
        assert_eq!((notes, ends), (2 * 10 * job_parts - 1, 10 * job_parts), "all but the first have its id");
        stream.finish().expect("ended");
    }
}
