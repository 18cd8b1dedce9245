//! From files to tokens: a thread reads, others tokenize. Invariant: records are taken in input order by the same
//! rules whether they are only measured or embedded; empty records are skipped, and later ones of an id get
//! names of their own.

use super::RuntimeError;
use data::alphabet::{Alphabet, uracil_to_thymine};
use data::ids::IdSet;
use data::limits::spawn;
use data::sequence::{Extent, Reader, Record};
use data::{DataError, DataErrorKind};
use runtime::Tokenizer;
use runtime::ordered::{Feed, Results, Worker, start};
use std::path::PathBuf;
use std::thread::JoinHandle;

/// Letters of a batch, or a little more: some milliseconds of an encoder.
pub(super) const BATCH_LETTERS: usize = 16 << 10;

/// Bytes of names with which a batch is full.
pub(super) const BATCH_NAMES: usize = 256 << 10;

/// How long a sequence may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Letters of the longest.
    pub(super) letters: Option<usize>,
    /// Whether a longer one is cut; otherwise it is an error.
    pub(super) truncate: bool,
}

/// The unit of a batch's sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Residues or bases, as they are read.
    Letters,
    /// Tokens of the model.
    Tokens,
}

/// A record that is not embedded.
#[derive(Debug)]
pub(super) enum Skipped {
    Empty(String),
}

/// A record whose id came before.
#[derive(Debug)]
pub(super) struct Renamed {
    /// As it stands in the file.
    pub(super) id: String,
    /// As results name the record.
    pub(super) name: String,
}

/// A sequence that is embedded.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: String,
    /// Its letters in the input, also where it is cut.
    pub(super) length: u64,
    /// The number of its result: 0, or with a result for each input that of its input.
    pub(super) result: usize,
}

/// Some sequences, in input order.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) heads: Vec<Sequence>,
    /// The letters of all, one after the other.
    letters: Vec<u8>,
    /// Their tokens, once the batch is tokenized.
    tokens: Vec<i32>,
    /// The end of each sequence in `letters`, or in `tokens` once the batch is tokenized.
    ends: Vec<usize>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) renamed: Vec<Renamed>,
    pub(super) truncated: u64,
    /// Sequences with U, which a DNA model reads as T.
    pub(super) rna: u64,
    /// Bytes taken from the files so far.
    pub(super) bytes_read: u64,
    /// Bytes of names.
    names: usize,
}

impl Batch {
    /// Letters become tokens.
    fn tokenized(mut self, tokenizer: &Tokenizer) -> Result<Self, RuntimeError> {
        let letters = std::mem::take(&mut self.letters);
        let mut start = 0;
        for end in &mut self.ends {
            tokenizer.encode(&letters[start..*end], &mut self.tokens)?;
            start = std::mem::replace(end, self.tokens.len());
        }
        Ok(self)
    }

    /// The length of each sequence: in tokens once the batch is tokenized, else in letters.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| end - start)
    }

    /// The sequences of a batch that is tokenized, with their tokens.
    pub(super) fn sequences(&self) -> impl Iterator<Item = (&Sequence, &[i32])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let spans = starts.zip(&self.ends).map(|(start, &end)| &self.tokens[start..end]);
        self.heads.iter().zip(spans)
    }

    fn is_full(&self) -> bool {
        self.letters.len() >= BATCH_LETTERS
            || self.skipped.len() + self.renamed.len() >= BATCH_LETTERS
            || self.names >= BATCH_NAMES
    }
}

/// Reads records.
pub(super) struct Front {
    reader: Reader,
    record: Record,
    /// Of the result that records go to now.
    ids: IdSet,
    /// The numbers of the file and of the record in it, from 1.
    place: (usize, u64),
    result: usize,
    per_input: bool,
    tokenizer: Tokenizer,
    limits: Limits,
}

impl Front {
    /// With `per_input` every input has a result of its own, and ids of its own. `most` is what the records of a pipe may take.
    pub(super) fn open(
        inputs: &[PathBuf],
        per_input: bool,
        tokenizer: Tokenizer,
        limits: Limits,
        most: Option<Extent>,
    ) -> Result<Self, RuntimeError> {
        let (mut reader, record) = (Reader::open(inputs)?, Record::default());
        most.into_iter().for_each(|most| reader.hold_to(most));
        Ok(Self { reader, record, ids: IdSet::new(), place: (0, 0), result: 0, per_input, tokenizer, limits })
    }

    /// Bytes of the input; `None` with a pipe, which can be read only once.
    pub(super) fn bytes_total(&self) -> Option<u64> {
        self.reader.total_bytes()
    }

    /// Appends the next record to `batch`; false after the last one.
    fn read(&mut self, batch: &mut Batch) -> Result<bool, RuntimeError> {
        if !self.reader.read_into(&mut self.record)? {
            return Ok(false);
        }
        let input = self.reader.inputs().len();
        if self.per_input && input != self.result {
            (self.ids, self.result) = (IdSet::new(), input);
        }
        let same = self.place.0 == input + 1;
        self.place = (input + 1, if same { self.place.1 + 1 } else { 1 });
        let alphabet = self.tokenizer.alphabet();
        alphabet.check(&self.record, &self.reader)?;
        if alphabet == Alphabet::Nucleotides && uracil_to_thymine(&mut self.record.seq) > 0 {
            batch.rna += 1;
        }
        let id = &self.record.id;
        let letters = self.tokenizer.letters(&self.record.seq);
        if letters.is_empty() {
            batch.skipped.push(Skipped::Empty(id.clone()));
            return Ok(true);
        }
        // With a result for each input, names are those of an input alone.
        let file = if self.per_input { 1 } else { self.place.0 };
        let name = self.ids.rename(id, file, self.place.1, str::to_owned);
        let limit = self.limits.letters.unwrap_or(usize::MAX);
        if letters.len() > limit {
            if !self.limits.truncate {
                return Err(self.too_long(letters.len(), limit));
            }
            batch.truncated += 1;
        }
        batch.letters.extend_from_slice(&letters[..letters.len().min(limit)]);
        batch.ends.push(batch.letters.len());
        if let Some(name) = &name {
            batch.renamed.push(Renamed { id: id.clone(), name: name.clone() });
        }
        let id = name.unwrap_or_else(|| id.clone());
        batch.names += id.len();
        batch.heads.push(Sequence { id, length: letters.len() as u64, result: self.result });
        Ok(true)
    }

    fn too_long(&self, letters: usize, limit: usize) -> RuntimeError {
        let what = format!(
            "{letters} letters, the limit is {limit}; truncate it with --truncate, or raise the limit with \
                --max-length"
        );
        let kind = DataErrorKind::Malformed(what);
        let error = match self.reader.position() {
            Some((path, line)) => DataError::at(path, kind).with_line(line),
            None => DataError::new(kind),
        };
        error.with_id(self.record.id.as_str()).into()
    }

    /// Reads on a thread of its own and tokenizes on others, up to `ahead` batches ahead for each of them. Batches stay letters
    /// where the lengths of sequences are wanted in `unit` letters.
    pub(super) fn start(self, workers: usize, ahead: usize, unit: Unit) -> Result<Stream, RuntimeError> {
        let worker = |_| -> Worker<Batch, Batch> {
            let tokenizer = self.tokenizer.clone();
            match unit {
                Unit::Letters => Box::new(Ok),
                Unit::Tokens => Box::new(move |batch: Batch| batch.tokenized(&tokenizer)),
            }
        };
        let (feed, batches) = start((0..workers.max(1)).map(worker).collect(), workers.max(1) * ahead)?;
        let thread = spawn("reader", move || self.run(&feed)).map_err(RuntimeError::thread("reader"))?;
        Ok(Stream { batches, thread: Some(thread) })
    }

    /// Until the input ends, fails, or nobody listens any more.
    fn run(mut self, feed: &Feed<Batch, Batch>) {
        let mut more = true;
        while more {
            let mut batch = Batch::default();
            let mut failed = None;
            while more && !batch.is_full() {
                match self.read(&mut batch) {
                    Ok(next) => more = next,
                    Err(error) => (more, failed) = (false, Some(error)),
                }
            }
            // The last batch may hold no record, and the progress it reports is that of the whole input.
            batch.bytes_read = self.reader.bytes_read();
            // What came before an error is computed first; then the error is met in its place.
            if feed.send(batch).is_err() {
                return;
            }
            if let Some(error) = failed {
                feed.fail(error);
            }
        }
    }
}

/// The running front. Dropping it leaves the threads to end by themselves: the reader may wait for a pipe.
pub(super) struct Stream {
    batches: Results<Batch>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    /// The next batch; `None` at the end of the input. While there is none, `wait` is asked now and then.
    pub(super) fn next(
        &mut self,
        wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
    ) -> Result<Option<Batch>, RuntimeError> {
        if let Some(batch) = self.batches.next(wait)? {
            return Ok(Some(batch));
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            Some(Ok(())) | None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_batch_has_read_all_bytes() {
        let path = std::env::temp_dir().join(format!("plimsoll-front-{}.fa", std::process::id()));
        // The first record fills a batch, so nothing is left for the second one.
        let text = format!(">a\n{}\n", "M".repeat(BATCH_LETTERS));
        std::fs::write(&path, &text).unwrap();
        let limits = Limits { letters: None, truncate: false };
        let front = Front::open(std::slice::from_ref(&path), false, Tokenizer::Esm, limits, None).unwrap();
        let mut stream = front.start(1, 1, Unit::Tokens).unwrap();
        let mut read = vec![];
        while let Some(batch) = stream.next(&mut || Ok(())).unwrap() {
            read.push((batch.heads.len(), batch.bytes_read));
        }
        std::fs::remove_file(path).unwrap();
        assert_eq!(read.last(), Some(&(0, text.len() as u64)), "{read:?}");
    }
}
