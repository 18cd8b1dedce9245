//! Input pipeline: one thread reads records, other threads tokenize them. Invariant: a measuring run and an
//! embedding run take records in input order by the same rules; empty records are skipped, and records whose id cannot
//! be a name in the results get another one.

use super::RuntimeError;
use plimsoll_data::alphabet::{Alphabet, is_nucleotides, unknown_refusal};
use plimsoll_data::ids::IdSet;
use plimsoll_data::limits::spawn;
use plimsoll_data::names::{RecordNames, RecordPlace, Renaming, is_name, written};
use plimsoll_data::sequence::{Input, InputExtent, InputNote, Reader, Record};
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_runtime::Tokenizer;
use plimsoll_runtime::ordered::{JobSender, JobWorker, OrderedResults, start};
use plimsoll_runtime::run::BatchSource;
use plimsoll_setting::Setting;
use std::path::PathBuf;
use std::thread::JoinHandle;

/// A batch is full when it has this number of letters, or slightly more: a few milliseconds of encoder time.
pub(super) const BATCH_LETTERS: usize = 16 << 10;

/// A batch is full when its names have this number of bytes.
pub(super) const BATCH_NAMES: usize = 256 << 10;

/// Limit of the sequence length.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceLimits {
    /// Maximum number of letters; `None` means no limit.
    pub(super) letters: Option<usize>,
    /// Whether longer sequences are truncated; otherwise they are errors.
    pub(super) truncate: bool,
    /// Whether a protein model accepts sequences whose letters are those of DNA.
    pub(super) allow_dna: bool,
}

/// Unit of the lengths in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LengthUnit {
    /// Residues or bases of the input; batches are not tokenized.
    Letters,
    /// Tokens of the model.
    Tokens,
}

/// A record without an embedding.
#[derive(Debug)]
pub(super) enum SkippedRecord {
    /// The record has no letters, or no tokens; its id.
    Empty(String),
}

/// A record whose name in the results is not its id.
#[derive(Debug)]
pub(super) struct RecordRename {
    /// Id in the file.
    pub(super) id: String,
    /// Unique name in the results.
    pub(super) name: String,
    /// Why it has another name.
    pub(super) why: Renaming,
}

/// Unknown tokens of a sequence.
#[derive(Debug)]
pub(super) struct RecordUnknowns {
    /// Id of the sequence.
    pub(super) id: String,
    /// Number of unknown tokens.
    pub(super) tokens: usize,
}

/// How the records of a pass over the input are named.
pub(super) enum Naming {
    /// By their ids, followed by room for the longest ending that makes a name unique: for a pass that measures.
    Measured,
    /// By [`RecordNames`], with the ids of the records of each result.
    OfFiles(Vec<IdSet>),
    /// By [`RecordNames`], without knowledge of later ids.
    OfPipe,
}

/// Names of the records of the present result.
enum NameState {
    Measured(IdSet),
    Given(Box<RecordNames>),
}

/// Results of a pass over the whole input.
#[derive(Default)]
pub(super) struct InputSummary {
    /// The files with their digests.
    pub(super) inputs: Vec<Input>,
    /// Of a measuring pass, the ids of each result that are names; an empty set for a result in which every id is one.
    pub(super) ids: Vec<IdSet>,
    /// Of a measuring pass, the number of records that need another name.
    pub(super) renamed: u64,
}

/// Characters of the longest ending that makes a name unique, of a billion files with as many records: a word for
/// records without a name, two numbers, and some `#`.
const ROOM: &str = "########################################";

/// Identity of a sequence that is embedded.
#[derive(Clone, Debug)]
pub(super) struct SequenceRecord {
    pub(super) id: String,
    /// Number of letters in the input, before truncation.
    pub(super) length: u64,
    /// Index of its result file: 0, or with one result per input the index of its input.
    pub(super) result: usize,
}

/// Consecutive sequences of the input.
#[derive(Default)]
pub(super) struct SequenceBatch {
    pub(super) heads: Vec<SequenceRecord>,
    /// The letters of all sequences, concatenated; empty after tokenization.
    letters: Vec<u8>,
    /// The tokens of all sequences, concatenated; empty before tokenization.
    tokens: Vec<i32>,
    /// The end of each sequence in `letters`, or in `tokens` after tokenization.
    ends: Vec<usize>,
    pub(super) skipped: Vec<SkippedRecord>,
    pub(super) renamed: Vec<RecordRename>,
    /// Sequences with unknown tokens; empty before tokenization.
    pub(super) unknown: Vec<RecordUnknowns>,
    /// Notes on files that were read to their end.
    pub(super) notes: Vec<InputNote>,
    pub(super) truncated: u64,
    /// Number of sequences with the letter U, which DNA models read as T.
    pub(super) rna: u64,
    /// Bytes read from the files so far.
    pub(super) bytes_read: u64,
    /// Bytes of the names in this batch.
    names: usize,
    /// Results of the pass, in the last batch.
    pub(super) summary: Option<InputSummary>,
}

impl SequenceBatch {
    /// Replaces the letters by their tokens. A text without a token, such as one of blanks, is skipped like an empty one.
    fn tokenized(mut self, tokenizer: &Tokenizer) -> Result<Self, RuntimeError> {
        let letters = std::mem::take(&mut self.letters);
        let mut start = 0;
        let mut first = 0;
        let mut empty = vec![];
        for (place, (end, head)) in self.ends.iter_mut().zip(&self.heads).enumerate() {
            // `end` was an offset into `letters` and becomes an offset into `tokens`; `start` takes the old
            // value.
            let encoded = tokenizer.encode(&letters[start..*end], &mut self.tokens);
            let unknown = encoded.map_err(|error| with_id(error, &head.id))?;
            if unknown > 0 {
                let tokens = (self.tokens.len() - first).saturating_sub(tokenizer.special_tokens());
                if let Some(why) = unknown_refusal(unknown, tokens) {
                    let error = DataError::new(DataErrorKind::Malformed(why));
                    return Err(error.with_id(head.id.as_str()).into());
                }
                self.unknown.push(RecordUnknowns { id: head.id.clone(), tokens: unknown });
            }
            start = std::mem::replace(end, self.tokens.len());
            if *end == first {
                empty.push(place);
            }
            first = *end;
        }
        let skipped = self.skipped.len();
        for place in empty.into_iter().rev() {
            self.ends.remove(place);
            let SequenceRecord { id: name, .. } = self.heads.remove(place);
            // A record that is not in the results has no other name there.
            let renamed = self.renamed.iter().position(|renamed| renamed.name == name);
            let id = renamed.map_or(name, |at| self.renamed.remove(at).id);
            self.skipped.push(SkippedRecord::Empty(id));
        }
        self.skipped[skipped..].reverse();
        Ok(self)
    }

    /// Length of each sequence: in tokens if the batch is tokenized, else in letters.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| end - start)
    }

    /// The sequences of a tokenized batch, with their tokens.
    pub(super) fn sequences(&self) -> impl Iterator<Item = (&SequenceRecord, &[i32])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let spans = starts.zip(&self.ends).map(|(start, &end)| &self.tokens[start..end]);
        self.heads.iter().zip(spans)
    }

    fn is_full(&self) -> bool {
        self.letters.len() >= BATCH_LETTERS
            || self.skipped.len() + self.renamed.len() + self.notes.len() >= BATCH_LETTERS
            || self.names >= BATCH_NAMES
    }
}

/// Adds the id of a record to the error of its data.
fn with_id(error: RuntimeError, id: &str) -> RuntimeError {
    match error {
        RuntimeError::Data(error) => error.with_id(id).into(),
        other => other,
    }
}

/// Number of bytes of `text`, at most `limit`, that end with a whole UTF-8 character.
fn whole_characters(text: &[u8], limit: usize) -> usize {
    // Continuation bytes have the form 10xxxxxx, and a character has at most three. More of them are not UTF-8, which
    // the tokenizer reports.
    let end = limit.min(text.len());
    let is_continuation = |byte: &u8| byte & 0xc0 == 0x80;
    (end.saturating_sub(3)..=end).rev().find(|&end| !text.get(end).is_some_and(is_continuation)).unwrap_or(end)
}

/// The inputs of a pipeline, and how their records are read and named.
pub(super) struct InputOptions<'a> {
    pub(super) inputs: &'a [PathBuf],
    /// Whether every input has its own result file; names are then unique per input.
    pub(super) per_input: bool,
    pub(super) tokenizer: Tokenizer,
    pub(super) limits: SequenceLimits,
    /// Limits on the records of a pipe.
    pub(super) most: Option<InputExtent>,
    pub(super) naming: Naming,
}

/// Reader of the input records, which applies the limits and makes ids unique.
pub(super) struct SequencePipeline {
    reader: Reader,
    record: Record,
    naming: Naming,
    /// Names of the present result file.
    names: NameState,
    summary: InputSummary,
    /// Whether the present result has a record that needs another name.
    is_renamed: bool,
    place: RecordPlace,
    result: usize,
    per_input: bool,
    tokenizer: Tokenizer,
    limits: SequenceLimits,
}

impl SequencePipeline {
    /// Opens the inputs.
    pub(super) fn open(options: InputOptions<'_>) -> Result<Self, RuntimeError> {
        let InputOptions { inputs, per_input, tokenizer, limits, most, mut naming } = options;
        let mut reader = Reader::open(inputs)?;
        match tokenizer.alphabet() {
            Some(alphabet) => reader.set_alphabet(alphabet),
            None => {
                // A language model may read sequences of either kind; those of proteins have more characters.
                reader.set_alphabet(Alphabet::AminoAcids);
                reader.accept_texts();
            }
        }
        most.into_iter().for_each(|most| reader.hold_to(most));
        let names = naming.of_result(0);
        Ok(Self {
            reader,
            record: Record::default(),
            naming,
            names,
            summary: InputSummary::default(),
            is_renamed: false,
            place: RecordPlace::default(),
            result: 0,
            per_input,
            tokenizer,
            limits,
        })
    }

    /// Total bytes of the input; `None` if an input is a pipe, which can be read only once.
    pub(super) fn bytes_total(&self) -> Option<u64> {
        self.reader.total_bytes()
    }

    /// Appends the next record to `batch`; returns false after the last record.
    fn read(&mut self, batch: &mut SequenceBatch) -> Result<bool, RuntimeError> {
        let more = self.reader.read_into(&mut self.record)?;
        batch.notes.extend(self.reader.take_notes());
        if !more {
            return Ok(false);
        }
        let input = self.reader.inputs().len();
        // Also for inputs without a record: every input has a result, and an entry in the summary.
        while self.per_input && input != self.result {
            self.end_result();
            self.result += 1;
            self.names = self.naming.of_result(self.result);
        }
        let is_same_file = self.place.file == input + 1;
        let record = if is_same_file { self.place.record + 1 } else { 1 };
        self.place = RecordPlace { file: input + 1, record };
        let alphabet = self.tokenizer.alphabet();
        let insists =
            self.limits.allow_dna && alphabet == Some(Alphabet::AminoAcids) && is_nucleotides(&self.record.seq);
        if let Some(alphabet) = alphabet.filter(|_| !insists) {
            alphabet.check(&self.record, &self.reader)?;
            let unknown = alphabet.count_unknown(&self.record.seq);
            if let Some(why) = unknown_refusal(unknown, self.record.seq.len()) {
                return Err(self.placed(why).into());
            }
        }
        batch.rna += u64::from(self.tokenizer.normalize(&mut self.record.seq).uracil > 0);
        let id = &self.record.id;
        let letters = self.tokenizer.letters(&self.record.seq);
        if letters.is_empty() {
            batch.skipped.push(SkippedRecord::Empty(id.clone()));
            return Ok(true);
        }
        let limit = self.limits.letters.unwrap_or(usize::MAX);
        if letters.len() > limit {
            if !self.limits.truncate {
                return Err(self.too_long(letters.len(), limit));
            }
            batch.truncated += 1;
        }
        let letter_count = match alphabet {
            Some(_) => letters.len().min(limit),
            None => whole_characters(letters, limit),
        };
        batch.letters.extend_from_slice(&letters[..letter_count]);
        batch.ends.push(batch.letters.len());
        let length = letters.len() as u64;
        let id = self.name(batch);
        batch.names += id.len();
        batch.heads.push(SequenceRecord { id, length, result: self.result });
        Ok(true)
    }

    /// Names the present record.
    fn name(&mut self, batch: &mut SequenceBatch) -> String {
        let id = &self.record.id;
        match &mut self.names {
            NameState::Measured(ids) => {
                if is_name(id) && ids.insert(id) {
                    return id.clone();
                }
                self.is_renamed = true;
                self.summary.renamed += 1;
                let name = written(id).into_owned() + ROOM;
                let why = if is_name(id) { Renaming::Repeated } else { Renaming::Escaped };
                batch.renamed.push(RecordRename { id: id.clone(), name: name.clone(), why });
                name
            }
            NameState::Given(names) => {
                // With one result file per input, a name needs no file number.
                let file = if self.per_input { 1 } else { self.place.file };
                let given = names.name(id, RecordPlace { file, ..self.place });
                if let Some(why) = given.renaming {
                    batch.renamed.push(RecordRename { id: id.clone(), name: given.name.clone(), why });
                }
                given.name
            }
        }
    }

    /// Keeps the ids of a measured result in which a record needs another name.
    fn end_result(&mut self) {
        let NameState::Measured(ids) = &mut self.names else { return };
        let ids = std::mem::take(ids);
        self.summary.ids.push(if self.is_renamed { ids } else { IdSet::new() });
        self.is_renamed = false;
    }

    /// The error for a sequence over the limit, with its file, line and id.
    fn too_long(&self, letters: usize, limit: usize) -> RuntimeError {
        let what = format!(
            "{letters} letters, the limit is {limit}; truncate it with {}, or raise the limit with {}",
            Setting::Truncate,
            Setting::MaxLength
        );
        self.placed(what).into()
    }

    /// An error with the file, line and id of the current record.
    fn placed(&self, what: String) -> DataError {
        let kind = DataErrorKind::Malformed(what);
        let error = match self.reader.position() {
            Some((path, line)) => DataError::at(path, kind).with_line(line),
            None => DataError::new(kind),
        };
        error.with_id(self.record.id.as_str())
    }

    /// Starts one reading thread and `workers` tokenizing threads, which run up to `workers * ahead` batches
    /// ahead. With `Unit::Letters` batches are not tokenized.
    pub(super) fn start(
        self,
        workers: usize,
        ahead: usize,
        unit: LengthUnit,
    ) -> Result<RunningInput, RuntimeError> {
        let threads = workers.max(1);
        let mut workers: Vec<JobWorker<SequenceBatch, SequenceBatch>> = vec![];
        for _ in 0..threads {
            let tokenizer = self.tokenizer.clone();
            workers.push(match unit {
                LengthUnit::Letters => Box::new(Ok),
                LengthUnit::Tokens => Box::new(move |batch: SequenceBatch| batch.tokenized(&tokenizer)),
            });
        }
        let (feed, batches) = start(workers, threads * ahead)?;
        let bytes_total = self.bytes_total();
        let thread = spawn("reader", move || self.run(&feed)).map_err(RuntimeError::thread("reader"))?;
        Ok(RunningInput { batches, thread: Some(thread), bytes_total })
    }

    /// Reads until the input ends or fails, or the receiver is dropped.
    fn run(mut self, feed: &JobSender<SequenceBatch, SequenceBatch>) {
        let mut more = true;
        while more {
            let mut batch = SequenceBatch::default();
            let mut failed = None;
            while more && !batch.is_full() {
                match self.read(&mut batch) {
                    Ok(next) => more = next,
                    Err(error) => (more, failed) = (false, Some(error)),
                }
            }
            // The last batch may hold no record; its progress must still cover the whole input.
            batch.bytes_read = self.reader.bytes_read();
            if !more && failed.is_none() {
                self.end_result();
                self.summary.inputs = self.reader.inputs().to_vec();
                batch.summary = Some(std::mem::take(&mut self.summary));
            }
            // Records before a malformed record are sent first, so that the error takes its place in input
            // order.
            if feed.send(batch).is_err() {
                return;
            }
            if let Some(error) = failed {
                feed.fail(error);
            }
        }
    }
}

impl Naming {
    /// The names of result number `result`.
    fn of_result(&mut self, result: usize) -> NameState {
        match self {
            Self::Measured => NameState::Measured(IdSet::new()),
            Self::OfFiles(all) => {
                let ids = all.get_mut(result).map(std::mem::take).unwrap_or_default();
                NameState::Given(Box::new(RecordNames::new(move || ids)))
            }
            Self::OfPipe => NameState::Given(Box::new(RecordNames::of_pipe())),
        }
    }
}

/// A running input pipeline. Dropping it does not join the threads, because the reader may block on a pipe;
/// they end by themselves.
pub(super) struct RunningInput {
    batches: OrderedResults<SequenceBatch>,
    thread: Option<JoinHandle<()>>,
    bytes_total: Option<u64>,
}

impl BatchSource for RunningInput {
    type Batch = SequenceBatch;

    fn next(
        &mut self,
        wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
    ) -> Result<Option<SequenceBatch>, RuntimeError> {
        if let Some(batch) = self.batches.next(wait)? {
            return Ok(Some(batch));
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            Some(Ok(())) | None => Ok(None),
        }
    }

    fn bytes_total(&self) -> Option<u64> {
        self.bytes_total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    #[test]
    fn the_last_batch_has_read_all_bytes() {
        // The first record fills a batch, so nothing is left for the second one.
        let text = format!(">a\n{}\n", "M".repeat(BATCH_LETTERS));
        let folder = Folder::new("front");
        let path = folder.write("proteins.fa", &text);
        let limits = SequenceLimits { letters: None, truncate: false, allow_dna: false };
        let front = SequencePipeline::open(InputOptions {
            inputs: std::slice::from_ref(&path),
            per_input: false,
            tokenizer: Tokenizer::Esm,
            limits,
            most: None,
            naming: Naming::OfPipe,
        })
        .unwrap();
        let mut stream = front.start(1, 1, LengthUnit::Tokens).unwrap();
        let mut read = vec![];
        while let Some(batch) = stream.next(&mut || Ok(())).unwrap() {
            read.push((batch.heads.len(), batch.bytes_read));
        }
        assert_eq!(read.last(), Some(&(0, text.len() as u64)), "{read:?}");
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let text = "a\u{e9}\u{20ac}\u{1f600}".as_bytes();
        let ends: Vec<usize> = (0..=text.len() + 1).map(|limit| whole_characters(text, limit)).collect();
        assert_eq!(ends, [0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10]);
        assert_eq!(whole_characters(&[0x80; 9], 5), 5);
    }
}
