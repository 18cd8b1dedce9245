//! Streaming reader for FASTA and FASTQ files. Invariant: records come in input order, only the current record is
//! held in memory, and input that is in neither format, or is truncated, is an error that names the file and the line.
//!
//! Records are parsed as Biopython's `SeqIO` does (formats `fasta` and `fastq`), which VirNucPro reads with: the id
//! is the first word of the title, sequence lines are joined without whitespace and carriage returns, case is
//! preserved, and every letter is kept, whether or not it is in an alphabet. There are these differences: text before the
//! first `>` is an error (Biopython skips it), and so is an id that is not UTF-8; bytes that are no letters are dropped with a
//! note, or are errors (see `sequence/letters.rs`), where Biopython keeps all but blanks; and the start of a record inside of a sequence
//! line is an error.

mod decode;
mod letters;
mod listing;
mod notes;
pub(crate) mod source;
mod stored;
mod texts;
mod zstd;

use std::collections::VecDeque;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::alphabet::Alphabet;
use crate::printable::Name;
use crate::{DataError, DataErrorKind, foreign};
pub use decode::Compression;
use letters::{ByteClass, Dropped, LineCleaner};
pub use listing::{ListedFile, Listing, SkipReason, SkippedEntry, stem};
pub(crate) use listing::{ending, entries, without_compression};
pub use notes::{InputNote, NoteKind};
use source::LineSource;
pub use stored::{Input, digests};
use texts::Texts;

/// Maximum bytes of a record's name. Results repeat the name for every window, so a name of megabytes would fill a
/// disk.
const LONGEST_NAME: usize = 4096;

/// A sequence record: name, letters and, for FASTQ, qualities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The first word of the title; empty if the title is empty.
    pub id: String,
    /// The rest of the title after the id, without surrounding whitespace: the bytes as they are in the file.
    pub description: Vec<u8>,
    /// The letters as they are in the file, one byte each, without white space, digits and gaps.
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
    current: Option<OpenSequences>,
    /// Files that were read to their end.
    finished: Vec<Input>,
    /// Sum of the stored bytes of `finished`.
    finished_bytes: u64,
    /// Stored bytes of all files; `None` if a file is a pipe or standard input.
    total_bytes: Option<u64>,
    /// Buffer for the title of the current record.
    title: Vec<u8>,
    keep_qualities: bool,
    /// Alphabet of the sequences, which decides whether `*`, `?` and `#` may occur.
    alphabet: Alphabet,
    keep_bytes: bool,
    /// Whether files of texts are accepted.
    accept_texts: bool,
    /// Notes on files that were read to their end.
    notes: Vec<InputNote>,
    /// Upper bounds on the records, for input whose [`InputExtent`] could not be measured beforehand.
    bounds: Option<InputExtent>,
    /// Records read so far.
    records: u64,
}

/// A sequence file that is being read.
struct OpenSequences {
    source: LineSource,
    format: SequenceFormat,
    /// The format of a file of texts, which has no `format`.
    texts: Option<Texts>,
    /// Line number of the title that was read last, from 1.
    line: u64,
    /// Records so far.
    records: u64,
    /// White space and digits in sequence lines.
    spacing: DroppedBytes,
    /// Gaps in sequence lines.
    gaps: DroppedBytes,
    /// The preceding FASTQ record, if its quality line begins like a title.
    doubtful: Option<Doubtful>,
}

/// Bytes that were dropped from the records of a file.
#[derive(Default)]
struct DroppedBytes {
    bytes: u64,
    /// Number of records that had them.
    records: u64,
    /// Id of the first of these records.
    id: String,
    /// Line of the first byte.
    line: u64,
}

impl DroppedBytes {
    /// Adds the bytes that were dropped from the record `id`.
    fn add(&mut self, dropped: Dropped, id: &str) {
        if dropped.bytes == 0 {
            return;
        }
        if self.records == 0 {
            id.clone_into(&mut self.id);
            self.line = dropped.line;
        }
        self.bytes += dropped.bytes;
        self.records += 1;
    }

    fn note(self, path: &Path, kind: NoteKind) -> Option<InputNote> {
        let Self { bytes: count, records, id, line } = self;
        (count > 0).then(|| InputNote { path: path.to_owned(), kind, count, records, id, line })
    }
}

/// A FASTQ record whose quality line begins with `@`: if the next line is no title, the quality line is missing, and the title
/// of the next record was taken for it.
struct Doubtful {
    id: String,
    /// Line of its title.
    line: u64,
}

/// Options and bounds with which records are read.
#[derive(Clone, Copy)]
struct ReadRules<'a> {
    alphabet: Alphabet,
    /// Whether all bytes of sequence lines but white space are kept.
    keep_bytes: bool,
    keep_qualities: bool,
    bounds: Option<&'a InputExtent>,
}

/// The format of a sequence file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceFormat {
    /// A title after `>`, then lines of letters.
    Fasta,
    /// A title after `@`, lines of letters, a line with `+`, lines of qualities.
    Fastq,
}

/// Checks the format of a file and the name of its first record, without holding the record in memory.
pub fn check_start(path: &Path) -> Result<(), DataError> {
    let mut open = OpenSequences::new(LineSource::open(path)?)?;
    let mut title = Vec::new();
    match open.measure(&mut title)? {
        Some(_) => open.name(&title, &mut String::new()),
        None => Ok(()),
    }
}

/// Number and maximum sizes of the records of an input, measured without holding a record in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputExtent {
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
pub fn extent<E>(paths: &[PathBuf], between: &dyn Fn() -> Result<(), E>) -> Result<InputExtent, E> {
    let mut all = InputExtent::default();
    let mut title = Vec::new();
    for path in paths {
        let Ok(mut open) = LineSource::open(path).and_then(OpenSequences::new) else { return Ok(all) };
        loop {
            between()?;
            let Ok(Some(MeasuredRecord { letters, title_bytes })) = open.measure(&mut title) else { break };
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
        let open = OpenSequences::new(LineSource::new(name.as_ref(), Box::new(read))?)?;
        Ok(Self::over(VecDeque::new(), Some(open), None))
    }

    fn over(waiting: VecDeque<PathBuf>, current: Option<OpenSequences>, total_bytes: Option<u64>) -> Self {
        Reader {
            waiting,
            current,
            finished: Vec::new(),
            finished_bytes: 0,
            total_bytes,
            title: Vec::new(),
            keep_qualities: false,
            alphabet: Alphabet::Nucleotides,
            keep_bytes: false,
            accept_texts: false,
            notes: vec![],
            bounds: None,
            records: 0,
        }
    }

    /// Makes a record beyond `bounds` an error before it is held in memory. For pipes, whose records cannot be
    /// measured before memory is planned.
    pub fn hold_to(&mut self, bounds: InputExtent) {
        self.bounds = Some(bounds);
    }

    /// Accepts files of texts: `.txt`, with a text on each line, and `.jsonl`, with a JSON object on each line, of which the
    /// field `text` is the text and the field `id` the id. Without an id, the number of the line is the id. Files with
    /// other extensions are read as sequences.
    pub fn accept_texts(&mut self) {
        self.accept_texts = true;
    }

    /// Sets the alphabet of the sequences, by default nucleotides. In files of proteins `*`, `?` and `#` are kept, which are
    /// errors in nucleotide sequences.
    pub fn set_alphabet(&mut self, alphabet: Alphabet) {
        self.alphabet = alphabet;
    }

    /// Keeps every byte of sequence lines but white space, as Biopython does: for files of which the results of other programs
    /// are compared.
    pub fn keep_bytes(&mut self) {
        self.keep_bytes = true;
    }

    /// Returns the notes on the files that were read to their end since the last call.
    pub fn take_notes(&mut self) -> Vec<InputNote> {
        std::mem::take(&mut self.notes)
    }

    /// Sets whether the qualities of FASTQ records are read into [`Record::quality`].
    pub fn keep_qualities(&mut self, keep: bool) {
        self.keep_qualities = keep;
    }

    /// Returns the format of the file of the last record; `None` when no file is open, as for [`Reader::position`].
    pub fn format(&self) -> Option<SequenceFormat> {
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

    /// Adds the id of `record`, the last record, with its file and line to an error.
    pub(crate) fn error_at(&self, record: &Record, error: DataError) -> DataError {
        let error = error.with_id(record.id.as_str());
        match self.position() {
            Some((path, line)) => error.with_path(path).with_line(line),
            None => error,
        }
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
            let rules = ReadRules {
                alphabet: self.alphabet,
                keep_bytes: self.keep_bytes,
                keep_qualities: self.keep_qualities,
                bounds: self.bounds.as_ref(),
            };
            if let Some(open) = &mut self.current
                && open.read(record, &mut self.title, rules)?
            {
                open.records += 1;
                self.records += 1;
                if let Some(max) =
                    self.bounds.as_ref().map(|bounds| bounds.records).filter(|&n| self.records > n)
                {
                    return Err(open.no_room(&format!("there are more than {max} records")));
                }
                return Ok(true);
            }
            if let Some(mut open) = self.current.take() {
                self.notes.extend(open.notes());
                let input = open.source.finish();
                self.finished_bytes += input.bytes;
                self.finished.push(input);
            }
            let Some(path) = self.waiting.pop_front() else { return Ok(false) };
            let source = LineSource::open(&path)?;
            let texts = Texts::of(&path).filter(|_| self.accept_texts);
            self.current = Some(match texts {
                Some(texts) => OpenSequences::texts(source, texts)?,
                None => OpenSequences::new(source)?,
            });
        }
    }
}

impl OpenSequences {
    /// Detects the format by the first non-blank byte.
    fn new(mut source: LineSource) -> Result<Self, DataError> {
        source.skip_byte_order_mark()?;
        // Before white space is skipped: the signature of gzip begins with a byte that counts as white space.
        if source.peek()?.is_some_and(|first| !matches!(first, b'>' | b'@' | b' ' | b'\t' | b'\n' | b'\r')) {
            source.refuse_foreign(false)?;
        }
        let format = match source.skip_blank()? {
            None => SequenceFormat::Fasta,
            Some(b'>') if source.ahead(4)?.get(1) != Some(&0) => SequenceFormat::Fasta,
            Some(b'@') if foreign::recognise(source.ahead(8)?, None).is_none() => SequenceFormat::Fastq,
            Some(first) => {
                source.refuse_foreign(false)?;
                return Err(source.error(DataErrorKind::NotSequences { first }));
            }
        };
        Ok(Self::with(source, format, None))
    }

    /// Opens a file of texts.
    fn texts(mut source: LineSource, texts: Texts) -> Result<Self, DataError> {
        source.skip_byte_order_mark()?;
        source.refuse_foreign(true)?;
        Ok(Self::with(source, SequenceFormat::Fasta, Some(texts)))
    }

    fn with(source: LineSource, format: SequenceFormat, texts: Option<Texts>) -> Self {
        OpenSequences {
            line: source.line(),
            source,
            format,
            texts,
            records: 0,
            spacing: DroppedBytes::default(),
            gaps: DroppedBytes::default(),
            doubtful: None,
        }
    }

    /// The notes on this file, which was read to its end.
    fn notes(&mut self) -> impl Iterator<Item = InputNote> {
        let path = self.source.path();
        let [spacing, gaps] = [&mut self.spacing, &mut self.gaps].map(std::mem::take);
        let none = (self.records == 0).then(|| InputNote {
            path: path.to_owned(),
            kind: NoteKind::NoRecords,
            count: 0,
            records: 0,
            id: String::new(),
            line: 0,
        });
        let notes = [none, spacing.note(path, NoteKind::Spacing), gaps.note(path, NoteKind::Gaps)];
        notes.into_iter().flatten()
    }

    /// Reads the next record of this file; false at the end of the file.
    fn read(
        &mut self,
        record: &mut Record,
        title: &mut Vec<u8>,
        rules: ReadRules<'_>,
    ) -> Result<bool, DataError> {
        let [max_letters, max_name, max_title] = rules.bounds.map_or([usize::MAX; 3], |bounds| {
            [bounds.longest, bounds.longest_name, bounds.longest_title]
                .map(|n| usize::try_from(n).unwrap_or(usize::MAX))
        });
        record.id.clear();
        record.description.clear();
        record.seq.clear();
        record.quality.clear();
        if let Some(texts) = self.texts {
            let Some(line) = texts.read(&mut self.source, record, max_letters)? else { return Ok(false) };
            self.line = line;
            return self.is_bounded(record, max_letters, max_name).map(|()| true);
        }
        let Some(first) = self.source.skip_blank()? else { return Ok(false) };
        if self.format == SequenceFormat::Fastq && first != b'@' {
            return Err(self.no_title(first));
        }
        self.line = self.source.line();
        self.doubtful = None;
        self.source.skip_byte();
        title.clear();
        self.source.line_pieces(|piece| push_bounded(title, piece, max_title))?;
        if title.len() > max_title {
            return Err(self.no_room(&format!("a title has more than {max_title} bytes")));
        }
        self.name(title, &mut record.id)?;
        self.is_bounded(record, usize::MAX, max_name)?;
        record.description.extend_from_slice(after_first_word(title));
        let mut cleaner = LineCleaner::new(rules.alphabet, self.format == SequenceFormat::Fastq);
        if rules.keep_bytes {
            cleaner.keep_all();
        }
        match self.format {
            SequenceFormat::Fasta => self.fasta_sequence(record, &mut cleaner, max_letters)?,
            SequenceFormat::Fastq => {
                let sizes = FastqSizes { keep_qualities: rules.keep_qualities, max_letters };
                self.fastq_sequence(record, &mut cleaner, title, sizes)
                    .map_err(|e| e.with_id(record.id.as_str()))?;
            }
        }
        self.is_bounded(record, max_letters, max_name)?;
        if let Some(why) = cleaner.refusal(&record.seq) {
            return Err(self.at_title(why).with_id(record.id.as_str()));
        }
        let spacing = Dropped {
            bytes: cleaner.blanks.bytes + cleaner.digits.bytes,
            line: match (cleaner.blanks, cleaner.digits) {
                (blanks, digits) if blanks.bytes > 0 && digits.bytes > 0 => blanks.line.min(digits.line),
                (blanks, digits) => blanks.line.max(digits.line),
            },
        };
        self.spacing.add(spacing, &record.id);
        self.gaps.add(cleaner.gaps, &record.id);
        Ok(true)
    }

    /// Returns the error for a FASTQ record that begins with `first` instead of `@`.
    fn no_title(&self, first: u8) -> DataError {
        if let Some(Doubtful { id, line }) = &self.doubtful {
            let what = "its quality line is missing: the line behind its '+' is the title of the next record";
            let error = DataError::at(self.source.path(), DataErrorKind::Fastq(what.to_owned()));
            return error.with_line(*line).with_id(id.as_str());
        }
        let what = match first {
            b'>' => "FASTA records stand behind FASTQ records; give the two in files of their own".to_owned(),
            _ => format!("a record starts with '{}', expected '@'", first.escape_ascii()),
        };
        self.source.error(DataErrorKind::Fastq(what))
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
    fn measure(&mut self, title: &mut Vec<u8>) -> Result<Option<MeasuredRecord>, DataError> {
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
        let mut characters = 0;
        let end = if self.format == SequenceFormat::Fasta { b'>' } else { b'+' };
        while self.source.peek()?.is_some_and(|first| first != end) {
            self.source.line_pieces(|piece| {
                letters +=
                    piece.iter().filter(|byte| ByteClass::of(**byte).is_kept(Alphabet::AminoAcids)).count()
                        as u64;
                characters += piece.iter().filter(|&&b| !is_blank(b)).count() as u64;
            })?;
        }
        if self.format == SequenceFormat::Fastq && self.source.peek()?.is_some() {
            self.source.line_pieces(|_| {})?;
            let mut quality = 0;
            while quality < characters && self.source.peek()?.is_some() {
                self.source
                    .line_pieces(|piece| quality += piece.iter().filter(|&&b| !is_blank(b)).count() as u64)?;
            }
        }
        // A FASTQ record holds its digits and gaps until its qualities are read.
        let letters = if self.format == SequenceFormat::Fastq { characters } else { letters };
        Ok(Some(MeasuredRecord { letters, title_bytes }))
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

    /// Reads all lines up to the next title, or until the record has more than `max_letters` letters.
    fn fasta_sequence(
        &mut self,
        record: &mut Record,
        cleaner: &mut LineCleaner,
        max_letters: usize,
    ) -> Result<(), DataError> {
        while record.seq.len() <= max_letters && !matches!(self.source.peek()?, None | Some(b'>')) {
            self.sequence_line(record, cleaner, max_letters)?;
        }
        Ok(())
    }

    /// Appends the letters of the rest of a line to the record. Once it has more than `max_letters` letters, the remaining
    /// pieces of the line are skipped.
    fn sequence_line(
        &mut self,
        record: &mut Record,
        cleaner: &mut LineCleaner,
        max_letters: usize,
    ) -> Result<(), DataError> {
        let line = self.source.line();
        let seq = &mut record.seq;
        cleaner.begin_line();
        self.source.line_pieces(|piece| {
            if seq.len() <= max_letters {
                reserve(seq, piece.len());
                cleaner.push(piece, line, seq);
            }
        })?;
        let Some(bad) = cleaner.bad() else { return Ok(()) };
        self.source.check_rest()?;
        let what = bad.complaint(self.format == SequenceFormat::Fastq, cleaner.alphabet());
        let error = DataError::at(self.source.path(), DataErrorKind::Malformed(what)).with_line(line);
        Err(error.with_id(record.id.as_str()))
    }

    /// Reads the sequence lines up to `+`, then quality lines until there is a quality for each letter. Stops early once the
    /// record has more letters than allowed, which the caller reports.
    fn fastq_sequence(
        &mut self,
        record: &mut Record,
        cleaner: &mut LineCleaner,
        title: &mut Vec<u8>,
        sizes: FastqSizes,
    ) -> Result<(), DataError> {
        let FastqSizes { keep_qualities, max_letters } = sizes;
        loop {
            match self.source.peek()? {
                _ if record.seq.len() > max_letters => return Ok(()),
                None => return Err(self.fastq("the file ends before its '+' line")),
                Some(b'+') => break,
                Some(_) => self.sequence_line(record, cleaner, max_letters)?,
            }
        }
        self.source.skip_byte();
        let length = title.trim_ascii_end().len();
        title.truncate(length);
        // The second title needs at most one byte more than the first: if it is longer than `max_bytes`, it differs, unless
        // the rest of it is blank.
        let max_bytes = 2 * length + 1;
        let mut longer = false;
        self.source.line_pieces(|piece| {
            longer |= title.len() > max_bytes && !piece.iter().all(|&b| is_blank(b));
            push_bounded(title, piece, max_bytes);
        })?;
        let (first, second) = title.split_at(length);
        let second = second.trim_ascii_end();
        if longer || !second.is_empty() && first != second {
            return Err(self.fastq("the title after '+' differs from the one after '@'"));
        }
        self.qualities(record, keep_qualities)?;
        if cleaner.keeps_dropped() {
            LineCleaner::drop_from_fastq(&mut record.seq, &mut record.quality);
        }
        Ok(())
    }

    /// Reads quality lines until there is a quality for each character of `record.seq`. Errors name the line of the record's
    /// title: what is read as qualities may be other records.
    fn qualities(&mut self, record: &mut Record, keep: bool) -> Result<(), DataError> {
        let Record { id, seq, quality: qualities, .. } = record;
        let is_like_title = self.source.peek()? == Some(b'@');
        let mut quality = 0;
        let mut lines = 0u64;
        while quality < seq.len() {
            let place = self.source.line();
            if self.source.peek()?.is_none() {
                let what = match quality {
                    0 => "its quality line is missing: the file ends behind its '+' line".to_owned(),
                    found => format!("the file ends after {found} of {} qualities", seq.len()),
                };
                return Err(self.fastq_record(what));
            }
            let before = quality;
            self.source.line_pieces(|piece| {
                let enough = quality > seq.len();
                quality += piece.iter().filter(|&&b| !is_blank(b)).count();
                if keep && !enough {
                    reserve(qualities, piece.len());
                    qualities.extend(piece.iter().filter(|&&b| !is_blank(b)));
                }
            })?;
            lines += 1;
            if quality == before {
                let what = format!("its quality line is empty (line {place})");
                return Err(self.fastq_record(what));
            }
        }
        if quality > seq.len() {
            let what = if is_like_title {
                "its quality line is missing: the line behind its '+' is the title of the next record"
                    .to_owned()
            } else {
                format!("{quality} qualities for {} letters", seq.len())
            };
            return Err(self.fastq_record(what));
        }
        if is_like_title && lines == 1 {
            self.doubtful = Some(Doubtful { id: id.clone(), line: self.line });
        }
        Ok(())
    }

    /// Returns a FASTQ format error at the current line.
    fn fastq(&self, what: &str) -> DataError {
        self.source.error(DataErrorKind::Fastq(what.to_owned()))
    }

    /// Returns a FASTQ format error at the title of the current record.
    fn fastq_record(&self, what: String) -> DataError {
        DataError::at(self.source.path(), DataErrorKind::Fastq(what)).with_line(self.line)
    }
}

/// Options and bound with which a FASTQ record is read.
#[derive(Clone, Copy)]
struct FastqSizes {
    keep_qualities: bool,
    /// Maximum number of letters.
    max_letters: usize,
}

/// Sizes of a record that was skipped, in bytes.
struct MeasuredRecord {
    letters: u64,
    title_bytes: u64,
}

/// Returns a title without its first word and without whitespace around the rest.
fn after_first_word(title: &[u8]) -> &[u8] {
    let title = &title[leading_blanks(title)..];
    let rest = &title[title.iter().take_while(|&&b| !is_blank(b)).count()..];
    let rest = &rest[leading_blanks(rest)..];
    &rest[..rest.len() - rest.iter().rev().take_while(|&&b| is_blank(b)).count()]
}

/// Number of blanks at the start of a text.
fn leading_blanks(text: &[u8]) -> usize {
    text.iter().take_while(|&&b| is_blank(b)).count()
}

/// Returns whether `b` is ASCII whitespace in the sense of Python's `str.split()`.
fn is_blank(b: u8) -> bool {
    matches!(b, b'\t'..=b'\r' | 0x1c..=0x1f | b' ')
}

/// Whether a sequence keeps `byte`: not white space, digits and gaps. Bytes that no sequence has are kept, for the models to
/// count as unknown.
pub(crate) fn is_letter_or_unknown(byte: u8) -> bool {
    !matches!(ByteClass::of(byte), ByteClass::Blank | ByteClass::Digit | ByteClass::Gap)
}

/// Appends a piece of a line to `text`, unless `text` is already longer than `max_bytes`.
fn push_bounded(text: &mut Vec<u8>, piece: &[u8], max_bytes: usize) {
    if text.len() <= max_bytes {
        text.extend_from_slice(piece);
    }
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
