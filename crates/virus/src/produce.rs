//! The front end: one thread reads records and cuts them into jobs, worker threads translate and tokenize the
//! jobs, and the engine receives the results in input order. Invariant: number and size of the jobs in flight
//! are bounded (see `QueueSizes::held`), whatever the records look like.

use crate::journal::Coverage;
use crate::options::Shard;
use crate::output::{Field, HitsFormat, Note, RecordText};
use crate::queues::QueueSizes;
use plimsoll_data::alphabet::{Alphabet, count_uracil, uracil_to_thymine};
use plimsoll_data::chunk::{Chunk, chunks};
use plimsoll_data::ids::IdSet;
use plimsoll_data::intermediate::{chunk_name, orf_name, write_chunk, write_nucleotide, write_protein};
use plimsoll_data::limits::spawn;
use plimsoll_data::sequence::{Extent, Format, Input, Reader, Record};
use plimsoll_data::translate::{Frame, Orf, Scratch, orfs};
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_runtime::ordered::{self, Feed, Gone, Results, Worker};
use plimsoll_runtime::{RuntimeError, Tokenizer};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Settings of the front end.
pub(crate) struct InputPipeline {
    /// Window length in bases.
    pub(crate) length: usize,
    pub(crate) dna: Tokenizer,
    pub(crate) protein: Tokenizer,
    /// Whether U is kept as in VirNucPro, which drops codons that contain it; otherwise U is read as T.
    pub(crate) original_alphabet: bool,
    /// Whether jobs produce the text of the intermediate files.
    pub(crate) intermediate: bool,
    /// Output format of records called virus; if set, the end of a record carries its text.
    pub(crate) hits: Option<HitsFormat>,
    /// Number of threads that translate and tokenize.
    pub(crate) workers: usize,
    /// Number of jobs in flight per worker thread.
    pub(crate) prefetch: usize,
    /// Size limits of jobs.
    pub(crate) queues: QueueSizes,
    /// Windows with known results; they are passed on without open reading frames.
    pub(crate) kept: Arc<Coverage>,
    /// Shard to compute; windows of other shards are skipped.
    pub(crate) shard: Option<Shard>,
    /// Upper bounds for records that were not measured beforehand.
    pub(crate) most: Option<Extent>,
}

/// An event of the input, in input order.
pub(crate) enum Event {
    /// A window of a record. Its open reading frames are the next `orfs` of the job.
    Window { number: u64, record: Arc<str>, chunk: Chunk, orfs: usize },
    /// Name of the input that the following records come from.
    Source(Arc<str>),
    /// The end of a record; a record without letters has no windows.
    End { record: Arc<str>, length: usize, text: Option<Arc<RecordText>> },
    /// A note on an oddity of the input.
    Note(Note),
}

/// Tokens of an open reading frame, as ranges of the job's token vectors.
pub(crate) struct OrfTokens {
    pub(crate) frame: Frame,
    /// Length of the nucleotide sequence in bases.
    pub(crate) bases: u32,
    pub(crate) dna: Range<usize>,
    pub(crate) protein: Range<usize>,
}

/// A translated and tokenized job.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    pub(crate) orfs: Vec<OrfTokens>,
    pub(crate) dna: Vec<i32>,
    pub(crate) protein: Vec<i32>,
    /// Text for chunked.fa, nucleotide.fa and protein.faa; empty unless [`Front::intermediate`] is set.
    pub(crate) text: [Vec<u8>; 3],
}

/// Windows and events that a worker translates and tokenizes as a unit.
#[derive(Default)]
struct Job {
    /// Windows and events in input order.
    parts: Vec<JobPart>,
    /// Bases of the windows; neighbouring windows share the bases of their overlap.
    bases: Vec<u8>,
}

/// A part of a job.
enum JobPart {
    /// A window, whose bases are the range `bases` of [`Job::bases`].
    Chunk { number: u64, record: Arc<str>, chunk: Chunk, bases: Range<usize> },
    /// An event that is passed on unchanged.
    Event(Event),
}

/// The running front end. Dropping it does not join the threads, because the reader may be blocked on a silent pipe for
/// hours.
pub(crate) struct Stream {
    batches: Results<Batch>,
    reader: JoinHandle<Result<Vec<Input>, RuntimeError>>,
    /// Bytes of input read so far.
    pub(crate) bytes_read: Arc<AtomicU64>,
    /// Total bytes of input, if known.
    pub(crate) bytes_total: Option<u64>,
}

impl Stream {
    /// Returns the next batch in input order; `None` at the end of the input. While waiting, calls `wait` repeatedly
    /// and returns its error, so that a silent pipe does not block an interrupt.
    pub(crate) fn next(
        &self,
        wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
    ) -> Result<Option<Batch>, RuntimeError> {
        self.batches.next(wait)
    }

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
pub(crate) fn start(front: InputPipeline, inputs: &[PathBuf]) -> Result<Stream, RuntimeError> {
    let mut input = Reader::open(inputs)?;
    input.keep_qualities(front.hits.is_some_and(HitsFormat::has_qualities));
    front.most.iter().for_each(|most| input.hold_to(most.clone()));
    let front = Arc::new(front);
    let bytes_total = input.total_bytes();
    let bytes_read = Arc::new(AtomicU64::new(0));
    let worker = |_| -> Worker<Job, Batch> {
        let (front, mut scratch, mut name) = (Arc::clone(&front), Scratch::default(), String::new());
        Box::new(move |job| translate(&front, job, &mut scratch, &mut name))
    };
    let workers = (0..front.workers).map(worker).collect();
    let (feed, batches) = ordered::start(workers, front.workers * front.prefetch)?;
    let progress = Arc::clone(&bytes_read);
    let reader = move || {
        let (job, ids, source) = (Job::default(), IdSet::new(), None);
        let mut cutter = Cutter { front, job, feed, ids, progress, windows: 0, source, file: 0, record: 0 };
        cutter.read(input)
    };
    let reader = spawn("reader", reader).map_err(RuntimeError::thread("reader"))?;
    Ok(Stream { batches, reader, bytes_read, bytes_total })
}

/// The reader thread: reads records and cuts them into jobs.
struct Cutter {
    front: Arc<InputPipeline>,
    job: Job,
    feed: Feed<Job, Batch>,
    ids: IdSet,
    progress: Arc<AtomicU64>,
    /// Number of windows so far.
    windows: u64,
    /// File of the current record.
    source: Option<PathBuf>,
    /// Number of that file, from 1.
    file: usize,
    /// Number of the current record in the file, from 1.
    record: u64,
}

impl Cutter {
    /// Reads all records and sends their jobs. Returns the inputs with their digests; an empty list after an error,
    /// which the engine receives in input order, or if the engine has ended.
    fn read(&mut self, mut reader: Reader) -> Result<Vec<Input>, RuntimeError> {
        let mut record = Record::default();
        loop {
            match reader.read_into(&mut record) {
                Ok(true) => {}
                Ok(false) => {
                    let _ = self.flush();
                    return Ok(reader.inputs().to_vec());
                }
                Err(error) => {
                    // Earlier records are computed first; the engine then receives the error in input order.
                    let _ = self.flush();
                    self.feed.fail(error.into());
                    return Ok(vec![]);
                }
            }
            self.announce(&reader);
            let accepted =
                self.check_qualities(&reader).and_then(|()| Alphabet::Nucleotides.check(&record, &reader));
            if let Err(error) = accepted {
                let _ = self.flush();
                self.feed.fail(error.into());
                return Ok(vec![]);
            }
            let place = reader.position().map_or(String::new(), |(p, line)| format!("{}:{line}", p.display()));
            if self.cut(&mut record, &place).and_then(|()| self.flush_full()).is_err() {
                return Ok(vec![]);
            }
            self.progress.store(reader.bytes_read(), Ordering::Relaxed);
        }
    }

    /// Emits an event if the current record comes from a different file than the previous one.
    fn announce(&mut self, reader: &Reader) {
        let file = reader.inputs().len() + 1;
        self.record = if file == self.file { self.record + 1 } else { 1 };
        self.file = file;
        let Some((path, _)) = reader.position() else { return };
        if self.source.as_deref() != Some(path) {
            self.source = Some(path.to_owned());
            let name: Arc<str> = path.display().to_string().into();
            self.job.parts.push(JobPart::Event(Event::Source(name)));
        }
    }

    /// Rejects FASTA records if the output format needs qualities.
    fn check_qualities(&self, reader: &Reader) -> Result<(), DataError> {
        let wanted = self.front.hits.is_some_and(HitsFormat::has_qualities);
        let (true, Some(Format::Fasta), Some((path, line))) = (wanted, reader.format(), reader.position())
        else {
            return Ok(());
        };
        let what =
            "FASTA has no qualities, which --hits-format fastq writes; use --hits-format fasta".to_owned();
        Err(DataError::at(path, DataErrorKind::Malformed(what)).with_line(line))
    }

    /// Appends the windows, notes and end of a record to the job, and sends the job whenever it is full.
    /// `place` is the position of the record in the input, for notes. A duplicate id is replaced.
    fn cut(&mut self, record: &mut Record, place: &str) -> Result<(), Gone> {
        let name = record.id.clone();
        let note = |kind: &'static str, detail: String, action: &'static str| {
            JobPart::Event(Event::Note(Note { seq_name: name.clone(), kind, detail, action }))
        };
        // Ids are compared as they appear in tables, where two ids must not become equal.
        let shown = |name: &str| Field(name).to_string();
        if let Some(name) = self.ids.rename(&record.id, self.file, self.record, shown) {
            let detail =
                format!("{place}: the id occurs before; in the tables this record is named {}", Field(&name));
            self.job.parts.push(note("duplicate_id", detail, "computed under another name"));
            record.id = name;
        }
        if record.seq.is_empty() {
            self.job.parts.push(note("empty", place.to_owned(), "skipped"));
            let record = record.id.as_str().into();
            self.job.parts.push(JobPart::Event(Event::End { record, length: 0, text: None }));
            return Ok(());
        }
        // Only the job's copy is changed: a record called virus is written with its original letters.
        let uracil = if self.front.original_alphabet { 0 } else { count_uracil(&record.seq) };
        if uracil > 0 {
            let detail = format!("{place}: {uracil} letters are U");
            self.job.parts.push(note("rna", detail, "U is read as T"));
        }
        if let Some(detail) = odd_characters(&record.seq) {
            self.job.parts.push(note("non_iupac", detail, "codons that contain U are dropped"));
        }
        let id: Arc<str> = record.id.as_str().into();
        // Position in the record of its first base in the job, and offset of this base in `job.bases`.
        let mut held: Option<(usize, usize)> = None;
        for chunk in chunks(record.seq.len(), self.front.length) {
            // Windows of other shards are counted too, so that a window has the same number in every shard and
            // in the merge.
            let number = self.windows;
            self.windows += 1;
            if self.front.shard.is_some_and(|shard| !shard.contains(number)) {
                continue;
            }
            if self.job.bases.len() >= self.front.queues.job_bases {
                self.flush()?;
                // The new job has none of the record's bases yet.
                held = None;
            }
            let end = self.job.bases.len();
            // `bases[base..end]` holds the bases `from..from + (end - base)` of the record. Windows overlap, so
            // only the bases after these are appended; after a skipped window (another shard) there is a gap
            // and the copy starts anew.
            let reaches = |&(from, base): &(usize, usize)| from + (end - base) >= chunk.start;
            let (from, base) = held.filter(reaches).unwrap_or((chunk.start, end));
            held = Some((from, base));
            self.job.bases.extend_from_slice(&record.seq[from + (end - base)..chunk.end()]);
            if uracil > 0 {
                uracil_to_thymine(&mut self.job.bases[end..]);
            }
            let bases = base + chunk.start - from..base + chunk.end() - from;
            self.job.parts.push(JobPart::Chunk { number, record: Arc::clone(&id), chunk, bases });
        }
        let length = record.seq.len();
        let text = self.front.hits.map(|_| {
            let description = std::mem::take(&mut record.description);
            let sequence = std::mem::take(&mut record.seq);
            Arc::new(RecordText { description, sequence, quality: std::mem::take(&mut record.quality) })
        });
        self.job.parts.push(JobPart::Event(Event::End { record: id, length, text }));
        Ok(())
    }

    /// Sends the job if it is full. Called after every record, also after skipped ones, because notes take memory too.
    fn flush_full(&mut self) -> Result<(), Gone> {
        let QueueSizes { job_bases, job_parts, .. } = self.front.queues;
        match self.job.bases.len() >= job_bases || self.job.parts.len() >= job_parts {
            true => self.flush(),
            false => Ok(()),
        }
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
    let odd = |b: &&u8| !IUPAC[usize::from(**b)];
    let count = sequence.iter().filter(odd).count();
    let first = sequence.iter().find(odd)?;
    Some(format!("{count} characters, the first is {:?}", char::from(*first)))
}

/// Translates and tokenizes a job. Windows with known results get no open reading frames, but their
/// intermediate text is produced.
fn translate(
    front: &InputPipeline,
    job: Job,
    scratch: &mut Scratch,
    name: &mut String,
) -> Result<Batch, RuntimeError> {
    let mut batch = Batch::default();
    for part in job.parts {
        match part {
            JobPart::Event(event) => batch.events.push(event),
            JobPart::Chunk { number, record, chunk, bases } => {
                let bases = &job.bases[bases];
                let kept = front.kept.contains(number);
                if bases.iter().all(|b| b.eq_ignore_ascii_case(&b'N')) {
                    batch.events.push(Event::Note(Note {
                        seq_name: record.to_string(),
                        kind: "all_n",
                        detail: format!("window {}", chunk.index + 1),
                        action: "no open reading frame, no call",
                    }));
                }
                if front.intermediate {
                    chunk_name(&record, chunk.index, name);
                    // Writing to a Vec cannot fail.
                    let _ = write_chunk(&mut batch.text[0], name, bases);
                }
                if kept && !front.intermediate {
                    batch.events.push(Event::Window { number, record, chunk, orfs: 0 });
                    continue;
                }
                let before = batch.orfs.len();
                let mut failed = None;
                // The callback cannot return an error: the first one is stored.
                orfs(bases, scratch, |orf| {
                    if front.intermediate {
                        orf_name(&record, chunk.index, orf.frame, name);
                        let _ = write_nucleotide(&mut batch.text[1], name, &orf);
                        let _ = write_protein(&mut batch.text[2], name, &orf);
                    }
                    if kept {
                        return;
                    }
                    if let Err(error) = tokenize(front, &orf, &mut batch) {
                        failed.get_or_insert(error);
                    }
                });
                if let Some(error) = failed {
                    return Err(error);
                }
                let orfs = batch.orfs.len() - before;
                batch.events.push(Event::Window { number, record, chunk, orfs });
            }
        }
    }
    Ok(batch)
}

/// Appends the tokens of an open reading frame to the batch.
fn tokenize(front: &InputPipeline, orf: &Orf<'_>, batch: &mut Batch) -> Result<(), RuntimeError> {
    let (dna, protein) = (batch.dna.len(), batch.protein.len());
    front.dna.encode(orf.nucleotide, &mut batch.dna)?;
    front.protein.encode(orf.protein, &mut batch.protein)?;
    batch.orfs.push(OrfTokens {
        frame: orf.frame,
        bases: orf.nucleotide.len() as u32,
        dna: dna..batch.dna.len(),
        protein: protein..batch.protein.len(),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_runtime::EncoderModel;

    /// Records without letters produce notes, which take memory, so jobs must also be bounded by the number of
    /// parts.
    #[test]
    fn jobs_of_skipped_records_are_bounded() {
        let job_parts = QueueSizes::USUAL.job_parts;
        let path = std::env::temp_dir().join(format!("plimsoll-skipped-{}.fa", std::process::id()));
        std::fs::write(&path, ">empty\n".repeat(10 * job_parts)).expect("written");
        let front = InputPipeline {
            length: 500,
            dna: EncoderModel::builtin_dna().expect("built in").tokenizer,
            protein: Tokenizer::Esm,
            original_alphabet: false,
            intermediate: false,
            hits: None,
            workers: 2,
            prefetch: 2,
            queues: QueueSizes::USUAL,
            kept: Arc::default(),
            shard: None,
            most: None,
        };
        let stream = start(front, std::slice::from_ref(&path)).expect("started");
        let (mut notes, mut ends) = (0, 0);
        while let Some(batch) = stream.next(&mut || Ok(())).expect("a batch") {
            // An empty record adds at most three events: two notes and its end.
            assert!(batch.events.len() < job_parts + 3, "{}", batch.events.len());
            ends += batch.events.iter().filter(|e| matches!(e, Event::End { length: 0, .. })).count();
            notes += batch.events.iter().filter(|e| matches!(e, Event::Note(_))).count();
        }
        assert_eq!((notes, ends), (2 * 10 * job_parts - 1, 10 * job_parts), "all but the first have its id");
        stream.finish().expect("ended");
        std::fs::remove_file(path).expect("removed");
    }
}
