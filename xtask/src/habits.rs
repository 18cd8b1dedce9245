//! Counts constructs that make Rust code hard to read, for `sizes`: long parameter lists, tuples as parameters, several bindings in
//! one `let`, named closures, `match` on booleans, type names that are defined more than once; and the comments in bodies.
//!
//! The counts are read from the text, not from a syntax tree. They are made to be compared with one another, between crates and
//! between revisions.

use std::collections::BTreeMap;
use std::ops::{AddAssign, Range};

use crate::source::File;

/// Number of parameters, without `self`, from which on a list is long.
const LONG_LIST: usize = 6;

/// Counts of a crate, outside of tests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// Lines of code.
    pub lines: usize,
    /// Functions with [`LONG_LIST`] parameters or more.
    pub long_lists: usize,
    /// Functions with a tuple as a parameter.
    pub tuples: usize,
    /// `let (a, b) = (x, y);`
    pub paired_lets: usize,
    /// Closures that a `let` names.
    pub named_closures: usize,
    /// `match` with an arm `true` or `false` first.
    pub boolean_matches: usize,
    /// Comments in bodies, without those on safety.
    pub comments: usize,
    /// Names of the types that are defined.
    pub types: Vec<String>,
}

impl AddAssign<&Habits> for Habits {
    fn add_assign(&mut self, other: &Habits) {
        self.lines += other.lines;
        self.long_lists += other.long_lists;
        self.tuples += other.tuples;
        self.paired_lets += other.paired_lets;
        self.named_closures += other.named_closures;
        self.boolean_matches += other.boolean_matches;
        self.comments += other.comments;
        self.types.extend(other.types.iter().cloned());
    }
}

impl Habits {
    /// Counts one Rust file; what lies in test items is left out.
    pub fn of(file: &File) -> Self {
        let tests = file.test_items();
        let code = Code { file, tests: &tests };
        Self {
            lines: file.line_count().saturating_sub(file.inner_test_lines()),
            long_lists: code.parameter_lists().filter(|list| list.len() >= LONG_LIST).count(),
            tuples: code
                .parameter_lists()
                .filter(|list| list.iter().any(|parameter| is_tuple(parameter)))
                .count(),
            paired_lets: code.words("let").filter(|&at| code.is_paired_let(at)).count(),
            named_closures: code.words("let").filter(|&at| code.is_named_closure(at)).count(),
            boolean_matches: code.words("match").filter(|&at| code.is_boolean_match(at)).count(),
            comments: code.comments(),
            types: code.types(),
        }
    }

    /// Number of type names that occur more than once.
    pub fn duplicate_types(&self) -> usize {
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        for name in &self.types {
            *count.entry(name).or_default() += 1;
        }
        count.values().filter(|&&count| count > 1).count()
    }

    /// A line of the table.
    pub fn row(&self, name: &str) -> String {
        let thousands = (self.lines as f64 / 1000.0).max(1e-9);
        format!(
            "{name:<8} {:>8} {:>6} {:>6} {:>10.1} {:>10.1} {:>8} {:>10} {:>10.1}\n",
            self.lines,
            self.long_lists,
            self.tuples,
            self.paired_lets as f64 / thousands,
            self.named_closures as f64 / thousands,
            self.boolean_matches,
            self.duplicate_types(),
            self.comments as f64 / thousands / 10.0,
        )
    }

    /// The heading of the table.
    pub fn heading() -> String {
        format!(
            "{:<8} {:>8} {:>6} {:>6} {:>10} {:>10} {:>8} {:>10} {:>10}\n",
            "crate",
            "lines",
            "6 par.",
            "tuples",
            "let (,)/k",
            "closures/k",
            "match b.",
            "names > 1",
            "comments/c"
        )
    }
}

/// A file without its tests.
struct Code<'a> {
    file: &'a File,
    tests: &'a [Range<usize>],
}

impl<'a> Code<'a> {
    fn blanked(&self) -> &'a str {
        &self.file.code
    }

    /// Offsets of a word outside of tests.
    fn words(&self, word: &'a str) -> impl Iterator<Item = usize> + '_ {
        self.file.words(word).filter(|at| !self.tests.iter().any(|test| test.contains(at)))
    }

    /// The parameters of each function, without `self`.
    fn parameter_lists(&self) -> impl Iterator<Item = Vec<&'a str>> + '_ {
        self.words("fn").filter_map(|at| {
            let text = self.blanked();
            // A type `fn(..)` has no name.
            let name_end = at + 3 + text[at + 3..].find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
            let open = match text.as_bytes()[name_end] {
                b'(' => name_end,
                b'<' => name_end + angle_end(&text[name_end..])?,
                _ => return None,
            };
            let close = self.file.close(open)?;
            let list = split(&text[open + 1..close]);
            Some(list.into_iter().filter(|parameter| !is_self(parameter)).collect())
        })
    }

    /// Whether the `let` at `at` binds a tuple pattern to a tuple.
    fn is_paired_let(&self, at: usize) -> bool {
        let text = self.blanked();
        let pattern = at + 3 + skip_spaces(&text[at + 3..]);
        if text.as_bytes().get(pattern) != Some(&b'(') {
            return false;
        }
        let Some(pattern_end) = self.file.close(pattern) else { return false };
        let Some(equals) = text[pattern_end..].find('=') else { return false };
        let value = pattern_end + equals + 1;
        let value = value + skip_spaces(&text[value..]);
        if text.as_bytes().get(value) != Some(&b'(') {
            return false;
        }
        let Some(value_end) = self.file.close(value) else { return false };
        text[value_end + 1..].trim_start().starts_with(';') && split(&text[value + 1..value_end]).len() > 1
    }

    /// Whether the `let` at `at` names a closure.
    fn is_named_closure(&self, at: usize) -> bool {
        let text = &self.blanked()[at + 3..];
        let Some(equals) = text.find('=') else { return false };
        let name = text[..equals].trim().trim_start_matches("mut ");
        let name = name.split(':').next().unwrap_or_default().trim();
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
        let value = text[equals + 1..].trim_start();
        is_name && (value.starts_with('|') || value.starts_with("move |"))
    }

    /// Whether the first arm of the `match` at `at` is `true` or `false`.
    fn is_boolean_match(&self, at: usize) -> bool {
        let Some(body) = self.file.body(at) else { return false };
        let arm = self.blanked()[body.start + 1..].trim_start();
        ["true", "false"].iter().any(|word| arm.strip_prefix(word).is_some_and(|rest| rest.starts_with(" =>")))
    }

    /// Lines of comments in bodies: `//` without `///` and `//!`, and not about safety.
    fn comments(&self) -> usize {
        let mut offset = 0;
        let mut count = 0;
        for line in self.file.text.split_inclusive('\n') {
            let start = line.trim_start();
            let is_comment = start.starts_with("//") && !start.starts_with("///") && !start.starts_with("//!");
            let in_test = self.tests.iter().any(|test| test.contains(&offset));
            count += usize::from(is_comment && !in_test && !start.contains("SAFETY"));
            offset += line.len();
        }
        count
    }

    /// Names of structs, enums and traits.
    fn types(&self) -> Vec<String> {
        let mut names = vec![];
        for keyword in ["struct", "enum", "trait"] {
            for at in self.words(keyword) {
                let rest = self.blanked()[at + keyword.len()..].trim_start();
                let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
                names.push(rest[..end].to_owned());
            }
        }
        names
    }
}

fn skip_spaces(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

fn is_self(parameter: &str) -> bool {
    let name = parameter.split(':').next().unwrap_or_default();
    name.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "self")
}

/// Whether a parameter is a tuple pattern, or has a type that is a tuple or a reference to one.
fn is_tuple(parameter: &str) -> bool {
    if parameter.starts_with('(') {
        return true;
    }
    let Some((_, of_type)) = parameter.split_once(':') else { return false };
    let of_type = of_type.trim_start().trim_start_matches('&').trim_start_matches("mut ");
    of_type.starts_with('(') && of_type.contains(',')
}

/// Offset behind the `>` that closes the `<` at the start of `text`.
fn angle_end(text: &str) -> Option<usize> {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            // Not the arrow of a function type.
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at + 1);
        }
        before = c;
    }
    None
}

/// Splits a list at its outermost commas.
fn split(list: &str) -> Vec<&str> {
    let mut parts = vec![];
    let mut depth = 0;
    let mut start = 0;
    let mut before = ' ';
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' && before != '=' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    parts.push(list[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constructs_are_counted_outside_of_tests() {
        let text = "\
//! A module.
fn long(a: u8, b: u8, c: u8, d: u8, e: Map<u8, u8>, f: u8) {}
fn method(&self, a: u8, b: u8, c: u8, d: u8, e: u8) {}
fn tuple<T: Fn(u8) -> u8>(&mut self, (a, b): (u8, u8), t: T) {}
fn tuple_type(pair: &(u8, u8)) {}
struct Row { f: fn(u8, u8) }
enum Row {}
fn body() {
    // Why it is so.
    let (a, b) = (1, 2);
    let (c, d) = pair();
    let add = |x: u8| x + 1;
    let sum: u8 = list.iter().map(|x| x + 1).sum();
    match a == b { true => 1, false => 2 }
    match a { Some(true) => 1, _ => 2 }
}
#[cfg(test)]
mod tests {
    fn test((a, b): (u8, u8)) { let (a, b) = (1, 2); }
}
";
        let found = Habits::of(&File::new("crates/plan/src/a.rs", text));
        let types = vec!["Row".to_owned(), "Row".to_owned()];
        let wanted = Habits {
            lines: 16,
            long_lists: 1,
            tuples: 2,
            paired_lets: 1,
            named_closures: 1,
            boolean_matches: 1,
            comments: 1,
            types,
        };
        assert_eq!(found, wanted);
        assert_eq!(found.duplicate_types(), 1);
    }
}
