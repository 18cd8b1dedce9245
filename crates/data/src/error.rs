//! The error type of this crate. Invariant: a message says where (path, line, record) the error is, what is wrong, and
//! what to do next; the cause, if there is one, is in `source()` and not repeated in the text.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::foreign::ForeignFormat;
use crate::printable::{EscapedPath, Name};
use crate::sequence::Compression;
use plimsoll_setting::{Command, Setting};

/// Bad input, or a file that cannot be read or written.
#[derive(Debug)]
pub struct DataError {
    /// The file; `-` for standard input.
    pub path: Option<PathBuf>,
    /// The line in that file, from 1.
    pub line: Option<u64>,
    /// The id of the record, or the name of the tensor, that the error is in.
    pub id: Option<String>,
    /// Kind of the error.
    pub kind: DataErrorKind,
}

/// The kind of a [`DataError`].
#[derive(Debug)]
#[non_exhaustive]
pub enum DataErrorKind {
    /// The file cannot be opened or read.
    Read(io::Error),
    /// The file cannot be created or written.
    Write(io::Error),
    /// The compressed stream ends early, is corrupt, or needs more memory or features than are supported.
    Compressed(Compression, io::Error),
    /// A thread cannot be started.
    Thread(io::Error),
    /// The first byte that is not blank is neither `>` nor `@`.
    NotSequences {
        /// The first non-blank byte.
        first: u8,
    },
    /// The file is in a format that is not read.
    Foreign(ForeignFormat),
    /// A FASTQ record violates the format; the text says how.
    Fastq(String),
    /// A sequence has more tokens than a pack can hold, or than the longest sequence that was planned for.
    TooLong {
        /// Tokens of the sequence.
        tokens: usize,
        /// Maximum number of tokens.
        bound: usize,
    },
    /// A tokenizer file does not hold a tokenizer.
    Tokenizer(Box<dyn Error + Send + Sync>),
    /// A row does not have the width that its output file was created with.
    RowWidth {
        /// Values given.
        found: usize,
        /// Values expected.
        expected: usize,
    },
    /// Any other violation of a file format; the text says what is wrong and what to do.
    Malformed(String),
    /// No data to train or validate on; the text says why and what to do.
    NoData(String),
    /// A record read from a pipe is larger than the memory plan allows; the text names the exceeded bound.
    NoRoom(String),
    /// A file written by this program was changed afterwards; the text says where.
    Damaged(String),
    /// The output is a file that the command reads.
    IsInput {
        /// The path under which the command reads it.
        input: PathBuf,
    },
    /// Two outputs of the command are one file.
    SameOutput {
        /// The path of the other output.
        other: PathBuf,
    },
    /// The output exists and was not written by a run that this one continues.
    Exists,
}

impl DataError {
    /// Creates an error without a location.
    pub fn new(kind: DataErrorKind) -> Self {
        DataError { path: None, line: None, id: None, kind }
    }

    /// Creates an error in the file at `path`.
    pub fn at(path: impl AsRef<Path>, kind: DataErrorKind) -> Self {
        DataError { path: Some(path.as_ref().to_owned()), ..Self::new(kind) }
    }

    /// Creates an error in the content of the file at `path`; the text says what is wrong and what to do.
    pub fn malformed(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::at(path, DataErrorKind::Malformed(what.into()))
    }

    /// Returns a function that makes an error of reading the file at `path` from its cause, for `map_err`.
    pub fn reading(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::at(path, DataErrorKind::Read(cause))
    }

    /// Returns a function that makes an error of writing the file at `path` from its cause, for `map_err`.
    pub fn writing(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::at(path, DataErrorKind::Write(cause))
    }

    /// Sets the file.
    pub fn with_path(self, path: impl AsRef<Path>) -> Self {
        DataError { path: Some(path.as_ref().to_owned()), ..self }
    }

    /// Adds the line number, from 1.
    pub fn with_line(self, line: u64) -> Self {
        DataError { line: Some(line), ..self }
    }

    /// Adds the id of the record.
    pub fn with_id(self, id: impl Into<String>) -> Self {
        DataError { id: Some(id.into()), ..self }
    }
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            if path.as_os_str() == "-" { write!(f, "standard input")? } else { EscapedPath(path).fmt(f)? }
        }
        if let Some(line) = self.line {
            write!(f, "{}line {line}", if self.path.is_some() { ", " } else { "" })?;
        }
        if let Some(id) = &self.id {
            let placed = self.path.is_some() || self.line.is_some();
            write!(f, "{}'{}'", if placed { ", " } else { "" }, Name(id))?;
        }
        if self.path.is_some() || self.line.is_some() || self.id.is_some() {
            write!(f, ": ")?;
        }
        // Most often both are one path, which is named once.
        if let DataErrorKind::IsInput { input } = &self.kind
            && self.path.as_ref() == Some(input)
        {
            return f.write_str("an input of this command cannot be its output too; choose another output");
        }
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for DataErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(e) if e.kind() == io::ErrorKind::NotFound => {
                write!(f, "there is no such file; check the path")
            }
            // The file was read, and its content is what is wrong, which the cause says.
            Self::Read(e) if e.kind() == io::ErrorKind::InvalidData => write!(f, "cannot be used"),
            Self::Read(_) => write!(f, "cannot be read; check its permissions and its disk"),
            // Files are created in folders that must exist.
            Self::Write(e) if e.kind() == io::ErrorKind::NotFound => {
                write!(f, "cannot be written, because its folder does not exist; create the folder first")
            }
            Self::Write(_) => {
                write!(f, "cannot be written; check the folder's permissions and free space")
            }
            Self::Compressed(how, e) => {
                let name = how.name();
                write!(f, "the {name} data ")?;
                match e.kind() {
                    io::ErrorKind::UnexpectedEof => {
                        write!(f, "ends early (truncated); copy or download it again")
                    }
                    io::ErrorKind::OutOfMemory => write!(
                        f,
                        "needs more than 128 MiB to be decompressed; pipe it in: {name} -dc FILE | {}",
                        Command::StandardInput
                    ),
                    io::ErrorKind::Unsupported => write!(
                        f,
                        "uses a feature that is not supported; pipe it in: {name} -dc FILE | {}",
                        Command::StandardInput
                    ),
                    _ => write!(f, "is corrupt; copy or download it again"),
                }
            }
            Self::Thread(_) => write!(f, "a thread cannot be started"),
            Self::NotSequences { first } => write!(
                f,
                "not FASTA or FASTQ: it starts with '{}', expected '>' or '@'; \
                 give a FASTA or FASTQ file, plain or as .gz, .bz2, .zst or .xz",
                first.escape_ascii()
            ),
            Self::Foreign(ForeignFormat { what, advice, .. }) => write!(f, "this is {what}; {advice}"),
            Self::Fastq(what) => write!(f, "not valid FASTQ: {what}; repair or re-export the file"),
            Self::TooLong { tokens, bound } => {
                write!(f, "{tokens} tokens, at most {bound} fit; raise {} or cut the sequence", Setting::Tokens)
            }
            Self::Tokenizer(_) => {
                write!(f, "not a tokenizer.json that can be used")
            }
            Self::RowWidth { found, expected } => {
                write!(f, "a row of {found} values in a file of {expected} columns")
            }
            Self::Malformed(what) | Self::Damaged(what) | Self::NoData(what) | Self::NoRoom(what) => {
                f.write_str(what)
            }
            Self::IsInput { input } => write!(
                f,
                "this file is {}, an input of this command, which cannot be its output too; choose another output",
                EscapedPath(input)
            ),
            Self::SameOutput { other } => write!(
                f,
                "this file is also the output {}; choose another path for one of them",
                EscapedPath(other)
            ),
            Self::Exists => {
                write!(
                    f,
                    "the file already exists; use {} to replace it, or choose another output",
                    Setting::Force
                )
            }
        }
    }
}

impl Error for DataError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.kind {
            DataErrorKind::Read(e)
            | DataErrorKind::Write(e)
            | DataErrorKind::Compressed(_, e)
            | DataErrorKind::Thread(e) => Some(e),
            DataErrorKind::Tokenizer(e) => Some(e.as_ref()),
            DataErrorKind::NotSequences { .. }
            | DataErrorKind::Foreign(_)
            | DataErrorKind::Fastq(_)
            | DataErrorKind::TooLong { .. }
            | DataErrorKind::RowWidth { .. }
            | DataErrorKind::Malformed(_)
            | DataErrorKind::NoData(_)
            | DataErrorKind::NoRoom(_)
            | DataErrorKind::Damaged(_)
            | DataErrorKind::IsInput { .. }
            | DataErrorKind::SameOutput { .. }
            | DataErrorKind::Exists => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(error: DataError, expected: &str) {
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn messages_name_the_place_and_the_next_step() {
        let none = io::Error::from(io::ErrorKind::NotFound);
        check(DataError::at("a.fa", DataErrorKind::Read(none)), "a.fa: there is no such file; check the path");
        check(
            DataError::at("-", DataErrorKind::NotSequences { first: b'P' }).with_line(2),
            "standard input, line 2: not FASTA or FASTQ: it starts with 'P', expected '>' or '@'; \
             give a FASTA or FASTQ file, plain or as .gz, .bz2, .zst or .xz",
        );
        check(
            DataError::new(DataErrorKind::TooLong { tokens: 9, bound: 8 }).with_id("r1"),
            "'r1': 9 tokens, at most 8 fit; raise tokens or cut the sequence",
        );
    }

    #[test]
    fn the_cause_is_in_the_chain() {
        let early = io::ErrorKind::UnexpectedEof.into();
        let e = DataError::at("a.gz", DataErrorKind::Compressed(Compression::Gzip, early));
        assert!(e.source().is_some());
        assert!(DataError::new(DataErrorKind::Malformed("x".into())).source().is_none());
    }
}
