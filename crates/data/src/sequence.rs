//! Streaming reader for FASTA and FASTQ files. Invariant: records come in input order, only the current record is
//! held in memory, and input that is in neither format, or is truncated, is an error that names the file and the line.
//!
//! Records are parsed as Biopython's `SeqIO` does (formats `fasta` and `fastq`), which VirNucPro reads with: the id
//! is the first word of the title, sequence lines are joined without whitespace and carriage returns, case is
//! preserved, and letters are not checked against an alphabet. There are two differences: text before the first `>`
//! is an error (Biopython skips it), and so is an id that is not UTF-8.

mod decode;
pub(crate) mod source;
mod stored;
mod texts;
mod zstd;

use std::collections::VecDeque;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::printable::Name;
use crate::{DataError, DataErrorKind};
pub use decode::Compression;
use source::Source;
pub use stored::{Input, digests, files, stem};
use texts::Texts;

/// Maximum bytes of a record's name. Results repeat the name for every window, so a name of megabytes would fill a
/// disk.
const LONGEST_NAME: usize = 4096;

/// One sequence record: name, letters and, for FASTQ, qualities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The first word of the title; empty if the title is empty.
    pub id: String,
    /// The rest of the title after the id, without surrounding whitespace: the bytes as they are in the file.
    pub description: Vec<u8>,
    /// The letters as they are in the file, one byte each, without whitespace.
    pub seq: Vec<u8>,
    /// The qualities of a FASTQ record as they are in the file, one byte per letter; empty unless
    /// [`Reader::keep_qualities`] was enabled.
    pub quality: Vec<u8>,
}

/// Reads the records of one or more files in sequence. Each file may be FASTA or FASTQ, plain or compressed (see
/// [`Compression`]); `-` is standard input.
pub struct Reader {
    /// Files that are not opened yet, in order.
    waiting: VecDeque<PathBuf>,
    /// The file that is being read.
    current: Option<Open>,
    /// Files that were read to their end.
    finished: Vec<Input>,
    /// Sum of the stored bytes of `finished`.
    finished_bytes: u64,
    /// Stored bytes of all files; `None` if a file is a pipe or standard input.
    total_bytes: Option<u64>,
    /// Buffer for the title of the current record.
    title: Vec<u8>,
    keep_qualities: bool,
    /// Whether files of texts are accepted.
    accept_texts: bool,
    /// Upper bounds on the records, for input whose [`Extent`] could not be measured beforehand.
    most: Option<Extent>,
    /// Records read so far.
    records: u64,
}

/// A sequence file that is being read.
struct Open {
    source: Source,
    format: Format,
    /// The format of a file of texts, which has no `format`.
    texts: Option<Texts>,
    /// Line number of the title that was read last, from 1.
    line: u64,
}

/// The format of a sequence file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A title after `>`, then lines of letters.
    Fasta,
    /// A title after `@`, lines of letters, a line with `+`, lines of qualities.
    Fastq,
}

/// Checks the format of a file and the name of its first record, without holding the record in memory.
pub fn look(path: &Path) -> Result<(), DataError> {
    let (mut open, mut title) = (Open::new(Source::open(path)?)?, Vec::new());
    match open.measure(&mut title)? {
        Some(_) => open.name(&title, &mut String::new()),
        None => Ok(()),
    }
}

/// Number and maximum sizes of the records of an input, measured without holding a record in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Number of records.
    pub records: u64,
    /// Letters of the longest record.
    pub longest: u64,
    /// Name of the longest record; invalid UTF-8 is replaced.
    pub name: String,
    /// Bytes of the longest name.
    pub longest_name: u64,
    /// Bytes of the longest title.
    pub longest_title: u64,
}

/// Reads files to their ends and measures their records. A malformed file ends its own measurement without an
/// error, since the reader of the records reports it later. `between` is called before every record; its error aborts
/// the measurement.
pub fn extent<E>(paths: &[PathBuf], between: &dyn Fn() -> Result<(), E>) -> Result<Extent, E> {
    let (mut all, mut title) = (Extent::default(), Vec::new());
    for path in paths {
        let Ok(mut open) = Source::open(path).and_then(Open::new) else { return Ok(all) };
        loop {
            between()?;
            let Ok(Some(Measured { letters, title_bytes })) = open.measure(&mut title) else { break };
            all.longest_title = all.longest_title.max(title_bytes);
            let name = title.split(|&b| is_blank(b)).find(|word| !word.is_empty()).unwrap_or_default();
            let name = &name[..name.len().min(LONGEST_NAME)];
            if letters >= all.longest {
                all.longest = letters;
                all.name = String::from_utf8_lossy(name).into_owned();
            }
            all.longest_name = all.longest_name.max(name.len() as u64);
            all.records += 1;
        }
    }
    Ok(all)
}

impl Reader {
    /// Creates a reader over `paths`, in this order. All files must exist now; each is opened when the reader reaches
    /// it.
    pub fn open<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Result<Self, DataError> {
        let waiting: VecDeque<PathBuf> = paths.into_iter().map(Into::into).collect();
        let mut total_bytes = Some(0);
        for (i, path) in waiting.iter().enumerate() {
            if stored::is_stdin(path) && waiting.iter().take(i).any(|p| stored::is_stdin(p)) {
                let what = "given twice; it can be read only once".to_owned();
                return Err(DataError::at(path, DataErrorKind::Malformed(what)));
            }
            let size = stored::size(path)?;
            total_bytes = total_bytes.zip(size).map(|(sum, n)| sum + n);
        }
        Ok(Self::over(waiting, None, total_bytes))
    }

    /// Creates a reader over the bytes of `read`; `name` replaces the path in errors.
    pub fn from_read(name: impl AsRef<Path>, read: impl Read + Send + 'static) -> Result<Self, DataError> {
        let open = Open::new(Source::new(name.as_ref(), Box::new(read))?)?;
        Ok(Self::over(VecDeque::new(), Some(open), None))
    }

    fn over(waiting: VecDeque<PathBuf>, current: Option<Open>, total_bytes: Option<u64>) -> Self {
        let (finished, title) = (Vec::new(), Vec::new());
        Reader {
            waiting,
            current,
            finished,
            finished_bytes: 0,
            total_bytes,
            title,
            keep_qualities: false,
            accept_texts: false,
            most: None,
            records: 0,
        }
    }

    /// Makes a record beyond the bounds `most` an error before it is held in memory. For pipes, whose records cannot be
    /// measured before memory is planned.
    pub fn hold_to(&mut self, most: Extent) {
        self.most = Some(most);
    }

    /// Accepts files of texts: `.txt`, with a text on each line, and `.jsonl`, with a JSON object on each line, of which the
    /// field `text` is the text and the field `id` the id. Without an id, the number of the line is the id. Files with
    /// other extensions are read as sequences.
    pub fn accept_texts(&mut self) {
        self.accept_texts = true;
    }

    /// Sets whether the qualities of FASTQ records are read into [`Record::quality`].
    pub fn keep_qualities(&mut self, keep: bool) {
        self.keep_qualities = keep;
    }

    /// Returns the format of the file of the last record; `None` when no file is open, as for [`Reader::position`].
    pub fn format(&self) -> Option<Format> {
        self.current.as_ref().map(|open| open.format)
    }

    /// Reads the next record into `record`, whose buffers are reused; returns false after the last record. After an
    /// error the reader has no more records.
    pub fn read_into(&mut self, record: &mut Record) -> Result<bool, DataError> {
        let result = self.advance(record);
        if result.is_err() {
            self.current = None;
            self.waiting.clear();
        }
        result
    }

    /// Returns an iterator over the records; [`Reader::read_into`] saves the allocation of each record.
    pub fn records(mut self) -> impl Iterator<Item = Result<Record, DataError>> {
        std::iter::from_fn(move || {
            let mut record = Record::default();
            self.read_into(&mut record).map(|more| more.then_some(record)).transpose()
        })
    }

    /// Returns the file of the last record and the line of its title, from 1; `None` when no file is open: before the
    /// first record and after the last.
    pub fn position(&self) -> Option<(&Path, u64)> {
        self.current.as_ref().map(|open| (open.source.path(), open.line))
    }

    /// Returns the files that were read to their end so far, in order, with the SHA-256 of their stored bytes. These
    /// are all files once [`Reader::read_into`] has returned false.
    pub fn inputs(&self) -> &[Input] {
        &self.finished
    }

    /// Returns the stored (possibly compressed) bytes that were read so far.
    pub fn bytes_read(&self) -> u64 {
        self.finished_bytes + self.current.as_ref().map_or(0, |open| open.source.bytes())
    }

    /// Returns the stored bytes of all files; `None` if a file is a pipe.
    pub fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }

    /// Reads the next record, opening the next file where one ends; false after the last file.
    fn advance(&mut self, record: &mut Record) -> Result<bool, DataError> {
        loop {
            if let Some(open) = &mut self.current
                && open.read(record, &mut self.title, self.keep_qualities, self.most.as_ref())?
            {
                self.records += 1;
                if let Some(most) = self.most.as_ref().map(|most| most.records).filter(|&n| self.records > n) {
                    return Err(open.no_room(&format!("there are more than {most} records")));
                }
                return Ok(true);
            }
            if let Some(open) = self.current.take() {
                let input = open.source.finish();
                self.finished_bytes += input.bytes;
                self.finished.push(input);
            }
            let Some(path) = self.waiting.pop_front() else { return Ok(false) };
            let (source, texts) = (Source::open(&path)?, Texts::of(&path).filter(|_| self.accept_texts));
            self.current = Some(match texts {
                Some(texts) => Open::texts(source, texts)?,
                None => Open::new(source)?,
            });
        }
    }
}

impl Open {
    /// Detects the format by the first non-blank byte.
    fn new(mut source: Source) -> Result<Self, DataError> {
        source.skip_byte_order_mark()?;
        let format = match source.skip_blank()? {
            None | Some(b'>') => Format::Fasta,
            Some(b'@') => Format::Fastq,
            Some(first) => return Err(source.error(DataErrorKind::NotSequences { first })),
        };
        Ok(Open { line: source.line(), source, format, texts: None })
    }

    /// Opens a file of texts.
    fn texts(mut source: Source, texts: Texts) -> Result<Self, DataError> {
        source.skip_byte_order_mark()?;
        Ok(Open { line: source.line(), source, format: Format::Fasta, texts: Some(texts) })
    }

    /// Reads the next record of this file; false at the end of the file.
    fn read(
        &mut self,
        record: &mut Record,
        title: &mut Vec<u8>,
        keep_qualities: bool,
        most: Option<&Extent>,
    ) -> Result<bool, DataError> {
        let [letters, named, titled] = most.map_or([usize::MAX; 3], |most| {
            [most.longest, most.longest_name, most.longest_title]
                .map(|n| usize::try_from(n).unwrap_or(usize::MAX))
        });
        record.id.clear();
        record.description.clear();
        record.seq.clear();
        record.quality.clear();
        if let Some(texts) = self.texts {
            let Some(line) = texts.read(&mut self.source, record, letters)? else { return Ok(false) };
            self.line = line;
            return self.is_bounded(record, letters, named).map(|()| true);
        }
        let Some(first) = self.source.skip_blank()? else { return Ok(false) };
        self.line = self.source.line();
        if self.format == Format::Fastq && first != b'@' {
            let what = format!("a record starts with '{}', expected '@'", first.escape_ascii());
            return Err(self.source.error(DataErrorKind::Fastq(what)));
        }
        self.source.skip_byte();
        title.clear();
        self.source.line_pieces(|piece| take(title, piece, titled))?;
        if title.len() > titled {
            return Err(self.no_room(&format!("a title has more than {titled} bytes")));
        }
        self.name(title, &mut record.id)?;
        self.is_bounded(record, usize::MAX, named)?;
        record.description.extend_from_slice(after_first_word(title));
        match self.format {
            Format::Fasta => self.fasta_sequence(&mut record.seq, letters)?,
            Format::Fastq => {
                let Record { id, seq, quality, .. } = record;
                let quality = keep_qualities.then_some(quality);
                self.fastq_sequence(seq, quality, title, letters).map_err(|e| e.with_id(id.as_str()))?
            }
        }
        self.is_bounded(record, letters, named).map(|()| true)
    }

    /// Checks a record against the bounds of [`Reader::hold_to`].
    fn is_bounded(&self, record: &Record, letters: usize, named: usize) -> Result<(), DataError> {
        if record.id.len() > named {
            return Err(self.no_room(&format!("a name has more than {named} bytes")));
        }
        if record.seq.len() > letters {
            return Err(self
                .no_room(&format!("a record has more than {letters} letters"))
                .with_id(record.id.as_str()));
        }
        Ok(())
    }

    /// Measures the next record without storing it and puts its title into `title`, at most `2 * LONGEST_NAME` bytes of
    /// it; `None` at the end of the file.
    fn measure(&mut self, title: &mut Vec<u8>) -> Result<Option<Measured>, DataError> {
        if self.source.skip_blank()?.is_none() {
            return Ok(None);
        }
        self.source.skip_byte();
        title.clear();
        let mut title_bytes = 0;
        self.source.line_pieces(|piece| {
            title_bytes += piece.len() as u64;
            let free = (2 * LONGEST_NAME).saturating_sub(title.len());
            title.extend_from_slice(&piece[..piece.len().min(free)]);
        })?;
        let mut letters = 0;
        let end = if self.format == Format::Fasta { b'>' } else { b'+' };
        while self.source.peek()?.is_some_and(|first| first != end) {
            self.source
                .line_pieces(|piece| letters += piece.iter().filter(|&&b| !is_blank(b)).count() as u64)?;
        }
        if self.format == Format::Fastq && self.source.peek()?.is_some() {
            self.source.line_pieces(|_| {})?;
            let mut quality = 0;
            while quality < letters && self.source.peek()?.is_some() {
                self.source
                    .line_pieces(|piece| quality += piece.iter().filter(|&&b| !is_blank(b)).count() as u64)?;
            }
        }
        Ok(Some(Measured { letters, title_bytes }))
    }

    /// Appends the first word of `title` to `id`.
    fn name(&self, title: &[u8], id: &mut String) -> Result<(), DataError> {
        // The word between ASCII blanks may consist of Unicode whitespace only; then the next word counts.
        for word in title.split(|&b| is_blank(b)) {
            let Ok(word) = std::str::from_utf8(word) else {
                let shown = word[..word.len().min(60)].escape_ascii();
                let what = format!("the name '{shown}' is not UTF-8; convert the file (iconv -t utf-8)");
                return Err(self.at_title(what));
            };
            let Some(word) = word.split_whitespace().next() else { continue };
            if word.len() > LONGEST_NAME {
                let shown = Name(word);
                let what = format!("the name '{shown}' has {} bytes, at most {LONGEST_NAME}", word.len());
                return Err(self.at_title(what + "; put a space after the name"));
            }
            id.push_str(word);
            break;
        }
        Ok(())
    }

    /// Returns an error at the title of the current record.
    fn at_title(&self, what: String) -> DataError {
        DataError::at(self.source.path(), DataErrorKind::Malformed(what)).with_line(self.line)
    }

    /// Returns the error for a record that exceeds the bounds of [`Reader::hold_to`].
    fn no_room(&self, what: &str) -> DataError {
        let what = format!(
            "{what}, the limit under the memory budget of this run for input that comes partly through a pipe; \
                give only files, or a larger budget"
        );
        DataError::at(self.source.path(), DataErrorKind::NoRoom(what)).with_line(self.line)
    }

    /// Reads all lines up to the next title, or until `seq` has more than `most` letters.
    fn fasta_sequence(&mut self, seq: &mut Vec<u8>, most: usize) -> Result<(), DataError> {
        while seq.len() <= most && !matches!(self.source.peek()?, None | Some(b'>')) {
            sequence_line(&mut self.source, seq, most)?;
        }
        Ok(())
    }

    /// Reads the sequence lines up to `+`, then quality lines until there is a quality for each letter. Stops early
    /// once `seq` has more than `most` letters, which the caller reports.
    fn fastq_sequence(
        &mut self,
        seq: &mut Vec<u8>,
        mut qualities: Option<&mut Vec<u8>>,
        title: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), DataError> {
        loop {
            match self.source.peek()? {
                _ if seq.len() > most => return Ok(()),
                None => return Err(self.fastq("the file ends before its '+' line")),
                Some(b'+') => break,
                Some(_) => sequence_line(&mut self.source, seq, most)?,
            }
        }
        self.source.skip_byte();
        let length = title.trim_ascii_end().len();
        title.truncate(length);
        // The second title needs at most one byte more than the first: if it is longer than `most`, it differs, unless
        // the rest of it is blank.
        let (most, mut longer) = (2 * length + 1, false);
        self.source.line_pieces(|piece| {
            longer |= title.len() > most && !piece.iter().all(|&b| is_blank(b));
            take(title, piece, most);
        })?;
        let (first, second) = title.split_at(length);
        let second = second.trim_ascii_end();
        if longer || !second.is_empty() && first != second {
            return Err(self.fastq("the title after '+' differs from the one after '@'"));
        }
        let mut quality = 0;
        while quality < seq.len() {
            if self.source.peek()?.is_none() {
                let what = format!("the file ends after {quality} of {} qualities", seq.len());
                return Err(self.fastq(&what));
            }
            self.source.line_pieces(|piece| {
                let letters = || piece.iter().filter(|&&b| !is_blank(b));
                let enough = quality > seq.len();
                quality += letters().count();
                if let Some(qualities) = qualities.as_mut().filter(|_| !enough) {
                    reserve(qualities, piece.len());
                    qualities.extend(letters());
                }
            })?;
        }
        if quality > seq.len() {
            let what = format!("{quality} qualities for {} letters", seq.len());
            return Err(self.fastq(&what));
        }
        Ok(())
    }

    /// Returns a FASTQ format error at the current line.
    fn fastq(&self, what: &str) -> DataError {
        self.source.error(DataErrorKind::Fastq(what.to_owned()))
    }
}

/// Sizes of a record that was skipped, in bytes.
struct Measured {
    letters: u64,
    title_bytes: u64,
}

/// Returns a title without its first word and without whitespace around the rest.
fn after_first_word(title: &[u8]) -> &[u8] {
    let trim_start = |text: &[u8]| text.iter().take_while(|&&b| is_blank(b)).count();
    let title = &title[trim_start(title)..];
    let rest = &title[title.iter().take_while(|&&b| !is_blank(b)).count()..];
    let rest = &rest[trim_start(rest)..];
    &rest[..rest.len() - rest.iter().rev().take_while(|&&b| is_blank(b)).count()]
}

/// Returns whether `b` is ASCII whitespace in the sense of Python's `str.split()`.
fn is_blank(b: u8) -> bool {
    matches!(b, b'\t'..=b'\r' | 0x1c..=0x1f | b' ')
}

/// Appends a piece of a line to `text`, unless `text` is already longer than `most`.
fn take(text: &mut Vec<u8>, piece: &[u8], most: usize) {
    if text.len() <= most {
        text.extend_from_slice(piece);
    }
}

/// Appends the rest of a line to `seq`, without spaces and without other whitespace at its end. Once `seq` is longer
/// than `most`, the remaining pieces of the line are skipped.
fn sequence_line(source: &mut Source, seq: &mut Vec<u8>, most: usize) -> Result<(), DataError> {
    let (start, mut whole) = (seq.len(), true);
    source.line_pieces(|piece| {
        if seq.len() > most {
            // If only whitespace is skipped, the end of `seq` is still the end of the line and is trimmed below.
            whole &= piece.iter().all(|&b| is_blank(b));
            return;
        }
        reserve(seq, piece.len());
        match memchr::memchr(b' ', piece) {
            None => seq.extend_from_slice(piece),
            Some(_) => seq.extend(piece.iter().filter(|&&b| b != b' ')),
        }
    })?;
    while whole && seq.len() > start && seq.last().is_some_and(|&b| is_blank(b)) {
        seq.pop();
    }
    Ok(())
}

/// Reserves capacity for `more` bytes. `Vec` doubles its capacity, which for a record of 100 Mb could hold 3 bytes
/// per base during a copy (the old buffer and a new one of twice its size). Here a buffer of over 1 MiB grows by an
/// eighth: 1.125 bytes per base, at most 2.13 if the allocator must copy, of which at most 2 are ever touched; and a
/// base is copied at most about nine times. (On Linux a buffer of this size moves by remapping, without a copy.)
fn reserve(seq: &mut Vec<u8>, more: usize) {
    const SMALL: usize = 1 << 20;
    let capacity = seq.capacity();
    let free = capacity - seq.len();
    if free < more {
        let step = if capacity < SMALL { capacity.max(256) } else { capacity / 8 };
        seq.reserve_exact((free + step).max(more));
    }
}

#[cfg(test)]
mod tests;
