//! Sequence files, FASTA and FASTQ, as a stream of records. Invariant: records come in input order,
//! only the current one is held, and input that is neither format, or is cut short, is an error that
//! names the file and the line.
//!
//! What a record is follows Biopython's `SeqIO` (formats `fasta` and `fastq`), which is what
//! VirNucPro reads with: the id is the first word of the title, sequence lines are joined without
//! blanks and carriage returns, case is kept, and no alphabet is checked. Two differences: text
//! before the first `>` is an error (Biopython skips it), and so is an id that is not UTF-8.

mod decode;
pub(crate) mod source;
mod stored;
mod zstd;

use std::collections::VecDeque;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::printable::Name;
use crate::{DataError, DataErrorKind};
pub use decode::Compression;
use source::Source;
pub use stored::{Input, digests, files, stem};

/// Bytes of a name. Results repeat it for every chunk, so that one of megabytes would fill a disk.
const LONGEST_NAME: usize = 4096;

/// One sequence with its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The first word of the title; empty when the title is.
    pub id: String,
    /// What follows that word in the title, without blanks at its ends: bytes as they stand in the file.
    pub description: Vec<u8>,
    /// The letters as they stand in the file, one byte each, without blanks.
    pub seq: Vec<u8>,
    /// The qualities of a FASTQ record as they stand in the file, one byte for each letter: where
    /// [`Reader::keep_qualities`] asked for them, else empty.
    pub quality: Vec<u8>,
}

/// Reads the records of one or more files, one after the other. Each may be FASTA or FASTQ, plain or
/// compressed (see [`Compression`]); `-` is standard input.
pub struct Reader {
    waiting: VecDeque<PathBuf>,
    current: Option<Open>,
    /// Files read to their end.
    finished: Vec<Input>,
    finished_bytes: u64,
    total_bytes: Option<u64>,
    title: Vec<u8>,
    keep_qualities: bool,
    /// The most that records may take, where the files were not measured.
    most: Option<Extent>,
    records: u64,
}

/// A file that is being read.
struct Open {
    source: Source,
    format: Format,
    /// The line of the title last read.
    line: u64,
}

/// The format of a sequence file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Titles after `>`, then letters.
    Fasta,
    /// Titles after `@`, letters, `+`, qualities.
    Fastq,
}

/// Checks the format of a file and the name of its first record, without holding the record.
pub fn look(path: &Path) -> Result<(), DataError> {
    let (mut open, mut title) = (Open::new(Source::open(path)?)?, Vec::new());
    match open.measure(&mut title)? {
        Some(_) => open.name(&title, &mut String::new()),
        None => Ok(()),
    }
}

/// What records take, without holding one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Records.
    pub records: u64,
    /// Letters of the longest.
    pub longest: u64,
    /// Its name, as far as it is text.
    pub name: String,
    /// Bytes of the longest name.
    pub longest_name: u64,
    /// Bytes of the longest title.
    pub longest_title: u64,
}

/// Reads files to their ends and measures their records. Where a file is not what it should be, this ends without an error:
/// whoever reads the records meets it. `between` is asked at every record, and its error ends the reading.
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
    /// A reader over `paths`, in this order. All of them must be there now; each is opened at its
    /// turn.
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

    /// A reader over bytes from anywhere; `name` stands for the path in errors.
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
            most: None,
            records: 0,
        }
    }

    /// Holds the input to what memory was planned for: a record beyond `most` is an error before it is held. For pipes, which
    /// cannot be measured.
    pub fn hold_to(&mut self, most: Extent) {
        self.most = Some(most);
    }

    /// Also reads the qualities of FASTQ records into [`Record::quality`].
    pub fn keep_qualities(&mut self, keep: bool) {
        self.keep_qualities = keep;
    }

    /// The format of the file of the last record; none when no file is open, as for [`Reader::position`].
    pub fn format(&self) -> Option<Format> {
        self.current.as_ref().map(|open| open.format)
    }

    /// Reads the next record into `record`, whose buffers are reused; false after the last one.
    /// After an error there are no more records.
    pub fn read_into(&mut self, record: &mut Record) -> Result<bool, DataError> {
        let result = self.advance(record);
        if result.is_err() {
            self.current = None;
            self.waiting.clear();
        }
        result
    }

    /// The records as an iterator; [`Reader::read_into`] saves an allocation for each.
    pub fn records(mut self) -> impl Iterator<Item = Result<Record, DataError>> {
        std::iter::from_fn(move || {
            let mut record = Record::default();
            self.read_into(&mut record).map(|more| more.then_some(record)).transpose()
        })
    }

    /// The file of the last record and the line of its title, from 1; none when no file is open:
    /// before the first record and after the last.
    pub fn position(&self) -> Option<(&Path, u64)> {
        self.current.as_ref().map(|open| (open.source.path(), open.line))
    }

    /// The files read to their end so far, in order, with the sha256 of their bytes as stored: all
    /// of them once [`Reader::read_into`] has returned false.
    pub fn inputs(&self) -> &[Input] {
        &self.finished
    }

    /// Bytes taken from the files so far, as stored (compressed, if they are).
    pub fn bytes_read(&self) -> u64 {
        self.finished_bytes + self.current.as_ref().map_or(0, |open| open.source.bytes())
    }

    /// Bytes of all the files, as stored; unknown when one of them is a pipe.
    pub fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }

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
            self.current = Some(Open::new(Source::open(&path)?)?);
        }
    }
}

impl Open {
    /// Finds out the format by the first byte that is not blank.
    fn new(mut source: Source) -> Result<Self, DataError> {
        source.skip_byte_order_mark()?;
        let format = match source.skip_blank()? {
            None | Some(b'>') => Format::Fasta,
            Some(b'@') => Format::Fastq,
            Some(first) => return Err(source.error(DataErrorKind::NotSequences { first })),
        };
        Ok(Open { line: source.line(), source, format })
    }

    /// The next record of this file; false at its end.
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
        if record.id.len() > named {
            return Err(self.no_room(&format!("a name has more than {named} bytes")));
        }
        record.description.extend_from_slice(after_first_word(title));
        match self.format {
            Format::Fasta => self.fasta_sequence(&mut record.seq, letters)?,
            Format::Fastq => {
                let Record { id, seq, quality, .. } = record;
                let quality = keep_qualities.then_some(quality);
                self.fastq_sequence(seq, quality, title, letters).map_err(|e| e.with_id(id.as_str()))?
            }
        }
        if record.seq.len() > letters {
            return Err(self
                .no_room(&format!("a record has more than {letters} letters"))
                .with_id(record.id.as_str()));
        }
        Ok(true)
    }

    /// The lengths of the next record, whose title is put into `title`, at most as many bytes of it as a name may have;
    /// nothing at the end of the file.
    fn measure(&mut self, title: &mut Vec<u8>) -> Result<Option<Measured>, DataError> {
        if self.source.skip_blank()?.is_none() {
            return Ok(None);
        }
        self.source.skip_byte();
        title.clear();
        let mut title_bytes = 0;
        self.source.line_pieces(|piece| {
            title_bytes += piece.len() as u64;
            let room = (2 * LONGEST_NAME).saturating_sub(title.len());
            title.extend_from_slice(&piece[..piece.len().min(room)]);
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

    /// The first word of `title`.
    fn name(&self, title: &[u8], id: &mut String) -> Result<(), DataError> {
        // A word may be nothing but blanks beyond ASCII.
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
                return Err(self.at_title(what + "; put a blank behind the name"));
            }
            id.push_str(word);
            break;
        }
        Ok(())
    }

    fn at_title(&self, what: String) -> DataError {
        DataError::at(self.source.path(), DataErrorKind::Malformed(what)).with_line(self.line)
    }

    fn no_room(&self, what: &str) -> DataError {
        let what = format!(
            "{what}, the most that the memory of this run leaves for input of which a part comes through a pipe; give \
             files alone, or more memory"
        );
        DataError::at(self.source.path(), DataErrorKind::NoRoom(what)).with_line(self.line)
    }

    /// All lines up to the next title, or until there are more than `most` letters.
    fn fasta_sequence(&mut self, seq: &mut Vec<u8>, most: usize) -> Result<(), DataError> {
        while seq.len() <= most && !matches!(self.source.peek()?, None | Some(b'>')) {
            sequence_line(&mut self.source, seq, most)?;
        }
        Ok(())
    }

    /// The lines up to `+`, then as many of quality as there are letters; or no more than `most` letters and a few.
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
        // A longer one differs, but for blanks.
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

    fn fastq(&self, what: &str) -> DataError {
        self.source.error(DataErrorKind::Fastq(what.to_owned()))
    }
}

/// The lengths of a record.
struct Measured {
    letters: u64,
    title_bytes: u64,
}

/// A title without its first word and the blanks around the rest.
fn after_first_word(title: &[u8]) -> &[u8] {
    let trim_start = |text: &[u8]| text.iter().take_while(|&&b| is_blank(b)).count();
    let title = &title[trim_start(title)..];
    let rest = &title[title.iter().take_while(|&&b| !is_blank(b)).count()..];
    let rest = &rest[trim_start(rest)..];
    &rest[..rest.len() - rest.iter().rev().take_while(|&&b| is_blank(b)).count()]
}

/// What Python's `split()` splits a title at, in ASCII.
fn is_blank(b: u8) -> bool {
    matches!(b, b'\t'..=b'\r' | 0x1c..=0x1f | b' ')
}

/// Appends a piece of a line to `text`, which is let grow no further once it is longer than `most`.
fn take(text: &mut Vec<u8>, piece: &[u8], most: usize) {
    if text.len() <= most {
        text.extend_from_slice(piece);
    }
}

/// Appends the rest of a line to `seq`: without spaces, and without other blanks at its end. What is behind a piece that makes
/// it longer than `most` is passed over.
fn sequence_line(source: &mut Source, seq: &mut Vec<u8>, most: usize) -> Result<(), DataError> {
    let (start, mut whole) = (seq.len(), true);
    source.line_pieces(|piece| {
        if seq.len() > most {
            // Blanks at the end of a line are no letters.
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

/// Makes room for `more` bytes. `Vec` doubles, which for a record of 100 Mb could hold 3 bytes per
/// base while it copies (the old buffer and a new one of twice its size). Here a buffer of over
/// 1 MiB grows by an eighth: 1.125 bytes per base, at most 2.13 if the allocator must copy, of which
/// at most 2 are ever touched; and a base is copied at most about nine times. (On Linux a buffer
/// of this size moves by remapping, without a copy.)
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
