//! Names of records in result files. Invariant: the names of a result are unique, not empty, printable on one line, and
//! read back unchanged by readers of tab-separated tables with default settings; a record keeps its id as its name
//! wherever the id allows it, and no other record gets this name.

use crate::ids::IdSet;
use crate::printable::is_printable;
use crate::sequence::{Reader, Record};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Place of a record in the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordPlace {
    /// Number of the file, from 1.
    pub file: usize,
    /// Number of the record in its file, from 1.
    pub record: u64,
}

/// Reason why a record has another name in the results than in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renaming {
    /// Another record has the id.
    Repeated,
    /// The id is empty.
    Empty,
    /// Readers of tables or of safetensors take the id for something else, such as `NA`.
    Reserved,
    /// The id has characters that a line of a table cannot have; they are escaped.
    Escaped,
}

impl Renaming {
    /// The reason as a clause after the id.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Repeated => "occurs more than once",
            Self::Empty => "is an empty name",
            Self::Reserved => "is a word that readers of results take for something else than a name",
            Self::Escaped => "has characters that are not printable or that readers of tables treat as syntax",
        }
    }
}

/// Name of a record in the results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultName {
    /// The name.
    pub name: String,
    /// Reason why the name is not the id; `None` if it is the id.
    pub renaming: Option<Renaming>,
}

/// Names the records of one result, in input order.
pub struct RecordNames {
    /// Names given so far.
    taken: IdSet,
    own: OwnNames,
}

/// Names that ids of the input take, which are not given to records with other ids.
enum OwnNames {
    /// The input can be read only once, so later ids are unknown.
    Unknown,
    /// Reads the input when the first record needs another name than its id. Few inputs have such a record, and the
    /// others are not read a second time.
    Unread(Box<dyn FnOnce() -> IdSet + Send>),
    Known(IdSet),
}

/// Words that default settings of pandas or R read as a missing value (pandas: `STR_NA_VALUES` of
/// `pandas/_libs/parsers.pyx`), and the key that safetensors reserves.
const RESERVED: [&str; 19] = [
    "#N/A",
    "#N/A N/A",
    "#NA",
    "-1.#IND",
    "-1.#QNAN",
    "-NaN",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "<NA>",
    "N/A",
    "NA",
    "NULL",
    "NaN",
    "None",
    "n/a",
    "nan",
    "null",
    "__metadata__",
];

/// Beginning of the name of a record without an id.
const UNNAMED: &str = "unnamed";

impl RecordNames {
    /// Names for an input that can be read only once. A record whose id equals a name that was made up for an earlier
    /// record gets another name.
    pub fn of_pipe() -> Self {
        Self { taken: IdSet::new(), own: OwnNames::Unknown }
    }

    /// Names for an input of which `own` returns the ids that are names (see [`own_names`]). `own` is called at most once,
    /// when the first record needs another name than its id.
    pub fn new(own: impl FnOnce() -> IdSet + Send + 'static) -> Self {
        Self { taken: IdSet::new(), own: OwnNames::Unread(Box::new(own)) }
    }

    /// Names the next record: after its id, escaped where needed. A record with the id of an earlier one is named `id#F`
    /// if it is the first with this id in its file and the file is not the first, else `id#F.R`, where it is record R
    /// of file F; a record with a reserved id `id#F.R`; and a record without an id `unnamed#F.R`. `#` is appended to such
    /// a name until no record has it.
    pub fn name(&mut self, id: &str, place: RecordPlace) -> ResultName {
        let written = written(id);
        let is_escaped = matches!(written, Cow::Owned(_));
        let refused = refused(&written);
        // The escaped form of an id may be the id of another record, which then keeps it.
        let is_free =
            refused.is_none() && if is_escaped { self.take(&written) } else { self.taken.insert(&written) };
        if is_free {
            let renaming = is_escaped.then_some(Renaming::Escaped);
            return ResultName { name: written.into_owned(), renaming };
        }
        let is_taken = self.taken.contains(&written);
        let renaming = refused.unwrap_or(if is_taken { Renaming::Repeated } else { Renaming::Escaped });
        let base = if renaming == Renaming::Empty { UNNAMED } else { &*written };
        let mut name = format!("{base}#{}", place.file);
        if renaming == Renaming::Repeated && place.file > 1 && self.take(&name) {
            return ResultName { name, renaming: Some(renaming) };
        }
        // Writing to a String cannot fail.
        let _ = write!(name, ".{}", place.record);
        while !self.take(&name) {
            name.push('#');
        }
        ResultName { name, renaming: Some(renaming) }
    }

    /// Takes a name that is no id of the input; false if a record has it.
    fn take(&mut self, name: &str) -> bool {
        if matches!(self.own, OwnNames::Unread(_))
            && let OwnNames::Unread(read) = std::mem::replace(&mut self.own, OwnNames::Unknown)
        {
            self.own = OwnNames::Known(read());
        }
        let is_own = match &self.own {
            OwnNames::Known(ids) => ids.contains(name),
            OwnNames::Unknown | OwnNames::Unread(_) => false,
        };
        !is_own && self.taken.insert(name)
    }
}

/// The form of an id in results: characters that are not printable, and a quotation mark at the start, which begins a
/// quoted field, are Rust escapes.
pub fn written(id: &str) -> Cow<'_, str> {
    let quoted = id.starts_with(['"', '\'']);
    if !quoted && id.chars().all(is_printable) {
        return Cow::Borrowed(id);
    }
    let mut text = String::with_capacity(id.len() + 8);
    for (at, c) in id.char_indices() {
        if is_printable(c) && !(at == 0 && quoted) {
            text.push(c);
        } else {
            text.extend(c.escape_default());
        }
    }
    Cow::Owned(text)
}

/// Returns the reason why a written id cannot be a name.
fn refused(written: &str) -> Option<Renaming> {
    if written.trim().is_empty() {
        return Some(Renaming::Empty);
    }
    RESERVED.contains(&written).then_some(Renaming::Reserved)
}

/// Returns the ids of `inputs` that are names without a change, up to the first malformed record: the run that names the
/// records reports it. `texts` is whether files of texts are accepted ([`Reader::accept_texts`]).
pub fn own_names(inputs: &[PathBuf], texts: bool) -> IdSet {
    let mut names = IdSet::new();
    let Ok(mut reader) = Reader::open(inputs) else { return names };
    if texts {
        reader.accept_texts();
    }
    let mut record = Record::default();
    while let Ok(true) = reader.read_into(&mut record) {
        if is_name(&record.id) {
            names.insert(&record.id);
        }
    }
    names
}

/// Whether an id can be a name as it is.
pub fn is_name(id: &str) -> bool {
    matches!(written(id), Cow::Borrowed(id) if refused(id).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records of an input in order, as (id, file, record, wanted name); a name that differs from its id has a reason.
    type Case = (&'static str, usize, u64, &'static str);

    fn check(what: &str, mut names: RecordNames, cases: &[Case]) {
        let mut given = std::collections::BTreeSet::new();
        for &(id, file, record, wanted) in cases {
            let found = names.name(id, RecordPlace { file, record });
            assert_eq!(found.name, wanted, "{what}: {id:?} {file}.{record}");
            assert_eq!(found.renaming.is_some(), wanted != id, "{what}: {id:?} {:?}", found.renaming);
            assert!(found.name.chars().all(is_printable) && !found.name.starts_with('"'), "{what}: {found:?}");
            assert!(given.insert(found.name), "{what}: {id:?} is named as another record");
        }
    }

    #[test]
    fn names_are_unique_printable_and_read_back() {
        let cases: [(&str, &[Case]); 8] = [
            (
                "repeated ids",
                &[
                    ("a", 1, 1, "a"),
                    ("b#2", 1, 2, "b#2"),
                    ("a", 1, 3, "a#1.3"),
                    ("b", 1, 4, "b"),
                    ("a", 2, 1, "a#2"),
                    ("b", 2, 2, "b#2.2"),
                    ("a", 2, 3, "a#2.3"),
                ],
            ),
            (
                "an id like the name of a repeated one",
                &[("a", 1, 1, "a"), ("a", 1, 2, "a#1.2#"), ("a#1.2", 1, 3, "a#1.2")],
            ),
            (
                "the same before it",
                &[("a", 1, 1, "a"), ("a#1.3", 1, 2, "a#1.3"), ("a", 1, 3, "a#1.3#"), ("a", 1, 4, "a#1.4")],
            ),
            (
                "three of a kind beside the name of a later file",
                &[("a", 1, 1, "a"), ("a#2", 1, 2, "a#2"), ("a", 2, 1, "a#2.1"), ("a", 3, 1, "a#3")],
            ),
            (
                "characters of lines, tables and terminals",
                &[
                    ("a\nb", 1, 1, "a\\nb#1.1"),
                    ("a\rb", 1, 2, "a\\rb"),
                    ("a\tb", 1, 3, "a\\tb"),
                    ("a\\nb", 1, 4, "a\\nb"),
                    ("\u{2028}\u{85}", 1, 5, "\\u{2028}\\u{85}"),
                    ("\u{feff}a", 1, 6, "\\u{feff}a"),
                    ("\u{202e}gpj", 1, 7, "\\u{202e}gpj"),
                    ("\0", 1, 8, "\\u{0}"),
                    ("\0", 1, 10, "\\u{0}#1.10"),
                    ("\u{e9} \u{4e2d} \\ \" x", 1, 9, "\u{e9} \u{4e2d} \\ \" x"),
                ],
            ),
            (
                "quotation marks",
                &[
                    ("\"a", 1, 1, "\\\"a"),
                    ("\"", 1, 2, "\\\""),
                    ("'b'", 1, 3, "\\'b'"),
                    ("5'UTR", 1, 4, "5'UTR"),
                ],
            ),
            (
                "missing values",
                &[
                    ("NA", 1, 1, "NA#1.1"),
                    ("nan", 1, 2, "nan#1.2"),
                    ("null", 2, 1, "null#2.1"),
                    ("NA", 2, 2, "NA#2.2"),
                    ("NA12878", 2, 3, "NA12878"),
                    ("__metadata__", 2, 4, "__metadata__#2.4"),
                ],
            ),
            (
                "no id",
                &[
                    ("", 1, 1, "unnamed#1.1"),
                    (" ", 1, 2, "unnamed#1.2"),
                    ("unnamed#1.4", 1, 3, "unnamed#1.4"),
                    ("", 1, 4, "unnamed#1.4#"),
                ],
            ),
        ];
        for (what, cases) in cases {
            let ids: Vec<&str> = cases.iter().map(|case| case.0).collect();
            let own = move || {
                let mut set = IdSet::new();
                ids.iter().filter(|id| is_name(id)).for_each(|id| _ = set.insert(id));
                set
            };
            check(what, RecordNames::new(own), cases);
        }
        // Of a pipe the first record to have a name keeps it.
        let pipe: &[Case] = &[("a", 1, 1, "a"), ("a", 1, 2, "a#1.2"), ("a#1.2", 1, 3, "a#1.2#1.3")];
        check("a pipe", RecordNames::of_pipe(), pipe);
    }

    #[test]
    fn an_input_is_read_again_only_where_a_record_needs_another_name() {
        let mut names = RecordNames::new(|| panic!("read"));
        for id in ["a", "b", "c d"] {
            names.name(id, RecordPlace { file: 1, record: 1 });
        }
    }

    #[test]
    fn every_reserved_word_is_renamed() {
        for word in RESERVED {
            let found = RecordNames::of_pipe().name(word, RecordPlace { file: 3, record: 7 });
            assert_eq!(found, ResultName { name: format!("{word}#3.7"), renaming: Some(Renaming::Reserved) });
        }
    }
}
