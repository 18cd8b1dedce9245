//! Notes on oddities of a sequence file that are no errors. Invariant: a file has at most one note of each kind, with the
//! count and the first place.

use crate::printable::{EscapedPath, Name};
use std::fmt;
use std::path::PathBuf;

/// Kind of an [`InputNote`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoteKind {
    /// White space and digits in sequence lines, which were dropped.
    Spacing,
    /// `-` and `.`, which were removed.
    Gaps,
    /// Letters that are unknown to the model.
    Unknown,
    /// A file without a record.
    NoRecords,
}

impl NoteKind {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spacing => "white_space",
            Self::Gaps => "gaps",
            Self::Unknown => "unknown_letters",
            Self::NoRecords => "no_records",
        }
    }

    /// The action taken, for tables.
    pub fn action(self) -> &'static str {
        match self {
            Self::Spacing => "dropped",
            Self::Gaps => "removed; positions count the letters that remain",
            Self::Unknown => "unknown to the models",
            Self::NoRecords => "no results",
        }
    }
}

/// A note on one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputNote {
    /// The file; `-` for standard input.
    pub path: PathBuf,
    /// Kind of the oddity.
    pub kind: NoteKind,
    /// Number of bytes, letters or tokens.
    pub count: u64,
    /// Number of records that have them.
    pub records: u64,
    /// Id of the first of these records; empty if its title is empty, or for [`NoteKind::NoRecords`].
    pub id: String,
    /// Line of the first byte, or of the title of the first record; 0 if it is not known.
    pub line: u64,
}

impl InputNote {
    /// The count and the first place, without the file.
    pub fn detail(&self) -> String {
        let Self { kind, count, records, id, line, .. } = self;
        let first = match line {
            0 => format!("the first in '{}'", Name(id)),
            line => format!("the first in '{}', line {line}", Name(id)),
        };
        let records = if *records == 1 { "1 record".to_owned() } else { format!("{records} records") };
        match kind {
            NoteKind::Spacing => format!("{count} blanks and digits in sequence lines of {records}, {first}"),
            NoteKind::Gaps => {
                let gaps = if *count == 1 { "gap" } else { "gaps" };
                format!("{count} {gaps} ('-' and '.') in {records}, {first}")
            }
            NoteKind::Unknown => format!("unknown letters: {count} in {records}, {first}"),
            NoteKind::NoRecords => "the file has no record".to_owned(),
        }
    }
}

impl fmt::Display for InputNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.as_os_str() == "-" {
            f.write_str("standard input")?
        } else {
            EscapedPath(&self.path).fmt(f)?
        }
        write!(f, ": {}", self.detail())?;
        match self.kind {
            NoteKind::NoRecords => Ok(()),
            kind => write!(f, ": {}", kind.action()),
        }
    }
}
