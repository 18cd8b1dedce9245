//! Class labels of documents. Invariant: in a classification task every document has a label, and the label is one of
//! the task's classes.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::bounded;
use crate::printable::Name;
use crate::{DataError, DataErrorKind};

/// Maximum size of a label table in bytes; 1 GiB is enough for about twenty million sequences.
const LARGEST: u64 = 1 << 30;

/// Source of the labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelsFrom {
    /// The field of this name in each JSON line.
    Field(String),
    /// A tab-separated table with two columns, sequence name and class. Blank lines and lines that start with `#` are
    /// ignored.
    Table(PathBuf),
}

/// Set of classes of a classification task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Classes {
    /// Classes given as integers from 0 to below this count.
    Count(u32),
    /// Named classes, numbered from 0 in this order. A number in place of a name is accepted.
    Names(Vec<String>),
}

impl Classes {
    /// Number of classes.
    pub fn count(&self) -> usize {
        match self {
            Classes::Count(n) => *n as usize,
            Classes::Names(names) => names.len(),
        }
    }

    /// Parses the name or number of a class and returns the class index.
    ///
    /// # Errors
    /// The text names none of the classes; the error is the message for the user.
    pub fn of_text(&self, text: &str) -> Result<i32, String> {
        match self {
            Classes::Count(_) => {
                let number: Result<u32, _> = text.parse();
                let why = "is not a whole number; name the classes with model.class_names";
                self.number(number.map_err(|_| format!("the class '{}' {why}", Name(text)))?)
            }
            Classes::Names(names) => {
                let found = names.iter().position(|name| name == text);
                if let Some(at) = found {
                    return Ok(at as i32);
                }
                self.number(
                    text.parse().map_err(|_| {
                        format!("the class '{}' is not one of {}", Name(text), names.join(", "))
                    })?,
                )
            }
        }
    }

    /// Like [`Classes::of_text`], for a JSON value: a string for named classes, otherwise an integer or a boolean
    /// (`false` is 0, `true` is 1).
    pub(super) fn of_json(&self, value: &Value) -> Result<i32, String> {
        match (self, value) {
            (Classes::Names(_), Value::String(text)) => self.of_text(text),
            (Classes::Names(_) | Classes::Count(_), Value::Number(n)) => self.of_text(&n.to_string()),
            (Classes::Names(_) | Classes::Count(_), Value::Bool(yes)) => self.number(u32::from(*yes)),
            (Classes::Names(_), other) => Err(format!("the class {} is not a name", Name(&other.to_string()))),
            (Classes::Count(_), Value::String(text)) => self.of_text(text),
            (Classes::Count(_), other) => {
                Err(format!("the class {} is not a whole number", Name(&other.to_string())))
            }
        }
    }

    /// Checks that a class index is below the number of classes.
    fn number(&self, number: u32) -> Result<i32, String> {
        if (number as usize) < self.count() {
            Ok(number as i32)
        } else {
            Err(format!("the class {number} is not below {}", self.count()))
        }
    }
}

/// The classes of a label table ([`LabelsFrom::Table`]) in alphabetical order, if at least one of them is a word; empty if all
/// are whole numbers.
///
/// # Errors
/// A file that cannot be read or is too large.
pub fn class_words(path: &Path) -> Result<Vec<String>, DataError> {
    let text = bounded::read_text(path, LARGEST).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
    let classes = lines(&text).filter_map(|(_, line)| Some(line.split_once('\t')?.1.trim()));
    let words: BTreeSet<&str> = classes.filter(|class| !class.is_empty()).collect();
    if words.iter().all(|class| class.parse::<u32>().is_ok()) {
        Ok(vec![])
    } else {
        Ok(words.into_iter().map(str::to_owned).collect())
    }
}

/// The lines of a label table with their numbers, without blank lines and comments.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
}

/// Labels by sequence name. The table is shared between clones because it may be large.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels {
    /// `None` if the task has no labels or reads them from JSON fields.
    table: Option<Arc<HashMap<String, i32>>>,
}

impl Labels {
    /// Reads a label table ([`LabelsFrom::Table`]).
    ///
    /// # Errors
    /// A file that cannot be read or exceeds [`LARGEST`]; a line without a tab, with an unknown class, or with a
    /// sequence that has another class before. Exact repetitions are allowed.
    pub(super) fn read(path: &Path, classes: &Classes) -> Result<Self, DataError> {
        let text =
            bounded::read_text(path, LARGEST).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let mut table = HashMap::new();
        for (line, text) in lines(&text) {
            let line = line as u64;
            let Some((name, class)) = text.split_once('\t') else {
                return Err(DataError::malformed(
                    path,
                    "no tab; a line is the name of a sequence, a tab, its class".to_owned(),
                )
                .with_line(line));
            };
            let class = classes
                .of_text(class.trim())
                .map_err(|what| DataError::malformed(path, what).with_line(line))?;
            if table.insert(name.to_owned(), class).is_some_and(|other| other != class) {
                return Err(DataError::malformed(path, format!("'{}' has another class before", Name(name)))
                    .with_line(line));
            }
        }
        Ok(Labels { table: Some(Arc::new(table)) })
    }

    /// The class index of a sequence, or 0 if there is no table.
    ///
    /// # Errors
    /// A sequence that the table does not contain.
    pub(super) fn of(&self, name: &str) -> Result<i32, DataError> {
        let Some(table) = &self.table else { return Ok(0) };
        let missing = "it has no class in the table of labels; add it, or remove the sequence";
        let class = table.get(name).copied();
        class.ok_or_else(|| DataError::new(DataErrorKind::Malformed(missing.to_owned())).with_id(name))
    }

    /// Estimated heap size of the table in bytes: names, classes and one control byte per entry. The factor of two
    /// allows for empty buckets of the hash table.
    pub(super) fn bytes(&self) -> u64 {
        let table = self.table.iter().flat_map(|table| table.keys());
        table.map(|name| 2 * (name.capacity() + size_of::<(String, i32)>() + 1) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_numbers() {
        let names = Classes::Names(vec!["virus".into(), "host".into()]);
        assert_eq!(names.of_text("host"), Ok(1));
        assert_eq!(names.of_text("x").unwrap_err(), "the class 'x' is not one of virus, host");
        assert_eq!(names.of_text("1"), Ok(1));
        assert_eq!(names.of_json(&0.into()), Ok(0));
        assert_eq!(names.of_json(&2.into()).unwrap_err(), "the class 2 is not below 2");
        assert_eq!(names.of_json(&Value::Null).unwrap_err(), "the class null is not a name");
        let count = Classes::Count(2);
        assert_eq!(count.of_text("1"), Ok(1));
        assert_eq!(count.of_json(&true.into()), Ok(1));
        assert_eq!(count.of_json(&2.into()).unwrap_err(), "the class 2 is not below 2");
        assert_eq!(
            count.of_json(&0.5.into()).unwrap_err(),
            "the class '0.5' is not a whole number; name the classes with model.class_names"
        );
    }

    #[test]
    fn a_table_names_each_sequence_once() {
        let path = std::env::temp_dir().join(format!("plimsoll-labels-{}.tsv", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Labels::read(&path, &Classes::Count(2))
        };
        let labels = read("# name\tclass\na\t1\r\nb b\t0\n\na\t1\n").unwrap();
        assert_eq!(labels.of("a").unwrap(), 1);
        assert_eq!(labels.of("b b").unwrap(), 0);
        assert!(labels.of("c").unwrap_err().to_string().contains("'c': it has no class"));
        assert!(read("a 1").unwrap_err().to_string().contains("line 1: no tab"));
        for (text, wanted) in [
            ("a\t1\nb\t0\n", vec![]),
            ("# id\tclass\na\tvirus\nb\thost\nc\tvirus\n", vec!["host", "virus"]),
            ("a\t0\nb\tvirus\n", vec!["0", "virus"]),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(class_words(&path).unwrap(), wanted, "{text}");
        }
        assert!(read("a\t1\na\t0").unwrap_err().to_string().contains("line 2: 'a' has another class before"));
        std::fs::remove_file(&path).unwrap();
    }
}
