//! YAML as an ordered tree with line numbers, and its printer. Invariant: printed text parses to the same tree; anchors
//! and tags are rejected, so that a small file cannot expand, and duplicate keys are errors.
//!
//! Scalars follow the core schema of YAML 1.2.2 (section 10.3.2): `1e-5` is a number, `no` is a string.

use crate::TrainError;
use runtime::RuntimeError;
use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span};
use serde_json::{Number, Value};
use std::fmt::Write as _;

/// A value and its line number.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Type and contents of the value.
    pub kind: Kind,
    /// Line of the value, from 1; 0 if the value was set by a flag.
    pub line: usize,
}

/// Types of values.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A null.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer; `1e4` counts as an integer.
    Integer(i64),
    /// A floating-point number.
    Float(f64),
    /// A string.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping in the order of the file; every key is unique.
    Map(Vec<(String, Node)>),
}

/// Limit on the nesting depth; no configuration is that deep.
const DEEPEST: usize = 16;

/// Parses a YAML text; an empty text gives an empty mapping. The error message includes the line but not the file name.
pub fn parse(text: &str) -> Result<Node, String> {
    let mut events = Parser::new_from_str(text);
    let mut next = || -> Result<(Event<'_>, usize), String> {
        match events.next() {
            Some(Ok((event, span))) => Ok((event, line(&span))),
            Some(Err(e)) => Err(broken(&e)),
            None => Ok((Event::StreamEnd, 0)),
        }
    };
    let mut root = None;
    loop {
        match next()? {
            (Event::StreamEnd, _) => break,
            (Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing, _) => {}
            (_, at) if root.is_some() => return Err(format!("line {at}: a second document; give one")),
            (event, at) => root = Some(node(event, at, DEEPEST, &mut next)?),
        }
    }
    let empty = Node { kind: Kind::Map(vec![]), line: 1 };
    Ok(root.filter(|node| node.kind != Kind::Null).unwrap_or(empty))
}

fn line(span: &Span) -> usize {
    span.start.line()
}

fn broken(error: &ScanError) -> String {
    format!("line {}: not YAML: {}", error.marker().line(), error.info())
}

/// Parses the value that begins with `event`.
fn node<'a>(
    event: Event<'a>,
    line: usize,
    depth: usize,
    next: &mut dyn FnMut() -> Result<(Event<'a>, usize), String>,
) -> Result<Node, String> {
    let refuse = |what: &str| Err(format!("line {line}: {what}"));
    if depth == 0 {
        return refuse("nested too deep for a configuration");
    }
    let (anchor, tag) = match &event {
        Event::Alias(_) => return refuse("aliases are not read; write the value out"),
        Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
        Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => (*anchor, tag.is_some()),
        _ => (0, false),
    };
    if anchor != 0 || tag {
        return refuse("anchors and tags are not read; write the value out");
    }
    let kind = match event {
        Event::Scalar(text, ScalarStyle::Plain, ..) => scalar(&text),
        Event::Scalar(text, ..) => Kind::Text(text.into_owned()),
        Event::SequenceStart(..) => {
            let mut values = vec![];
            loop {
                match next()? {
                    (Event::SequenceEnd, _) => break Kind::List(values),
                    (event, line) => values.push(node(event, line, depth - 1, next)?),
                }
            }
        }
        Event::MappingStart(..) => Kind::Map(mapping(depth, next)?),
        _ => return refuse("not a value"),
    };
    Ok(Node { kind, line })
}

fn mapping<'a>(
    depth: usize,
    next: &mut dyn FnMut() -> Result<(Event<'a>, usize), String>,
) -> Result<Vec<(String, Node)>, String> {
    let mut entries: Vec<(String, Node)> = vec![];
    loop {
        let (key, line) = match next()? {
            (Event::MappingEnd, _) => return Ok(entries),
            (Event::Scalar(key, _, 0, None), line) => (key.into_owned(), line),
            (_, line) => return Err(format!("line {line}: a key is a plain word")),
        };
        if entries.iter().any(|(other, _)| *other == key) {
            return Err(format!("line {line}: `{key}` is given twice"));
        }
        let (event, _) = next()?;
        // The value gets the line of its key, which is where an editor should jump to.
        let value = node(event, line, depth - 1, next)?;
        entries.push((key, value));
    }
}

/// Resolves the type of a plain scalar.
fn scalar(text: &str) -> Kind {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Kind::Null,
        "true" | "True" | "TRUE" => return Kind::Bool(true),
        "false" | "False" | "FALSE" => return Kind::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    // Rust also parses words such as `inf` as numbers; a YAML number begins with a digit or a point.
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    let integer = || text.parse::<i64>().ok().filter(|_| is_number);
    let float =
        || text.parse::<f64>().ok().filter(|_| is_number && digits.contains(|c: char| c.is_ascii_digit()));
    match (integer(), float()) {
        (Some(n), _) => Kind::Integer(n),
        (None, Some(x)) => number(x),
        (None, None) => match digits {
            ".inf" | ".Inf" | ".INF" if text.starts_with('-') => Kind::Float(f64::NEG_INFINITY),
            ".inf" | ".Inf" | ".INF" => Kind::Float(f64::INFINITY),
            ".nan" | ".NaN" | ".NAN" => Kind::Float(f64::NAN),
            _ => Kind::Text(text.to_owned()),
        },
    }
}

/// Classifies integral values as integers whatever their spelling, as JSON Schema does, provided that an `f64`
/// represents them exactly.
fn number(x: f64) -> Kind {
    match x.fract() == 0.0 && x.abs() < (1u64 << 53) as f64 {
        true => Kind::Integer(x as i64),
        false => Kind::Float(x),
    }
}

impl Node {
    /// Converts a serialisable value into a tree, keeping the order of its fields.
    pub fn of<T: serde::Serialize>(value: &T) -> Result<Self, TrainError> {
        // Goes through text because JSON is valid YAML and keeps the field order, which `serde_json::Value` does not.
        let text = serde_json::to_string(value).map_err(|e| RuntimeError::bug(e.to_string()))?;
        // `parse` would turn a document that is only `null` into an empty mapping.
        if text == "null" {
            return Ok(Self { kind: Kind::Null, line: 0 });
        }
        Ok(parse(&text).map_err(RuntimeError::bug)?)
    }

    /// Returns the value of a key; `None` if there is no such key or the node is not a mapping.
    pub fn get(&self, key: &str) -> Option<&Node> {
        let Kind::Map(entries) = &self.kind else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// Returns the value at a dotted path.
    pub fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, Node::get)
    }

    /// Sets the value at a path; nodes on the way that are not mappings are replaced by mappings.
    pub fn set(&mut self, path: &[&str], value: Node) {
        let [key, rest @ ..] = path else {
            *self = value;
            return;
        };
        if !matches!(self.kind, Kind::Map(_)) {
            *self = Node { kind: Kind::Map(vec![]), line: 0 };
        }
        let Kind::Map(entries) = &mut self.kind else { return };
        let position = entries.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
            entries.push(((*key).to_owned(), Node { kind: Kind::Null, line: 0 }));
            entries.len() - 1
        });
        entries[position].1.set(rest, value);
    }

    /// Converts the tree to JSON. Non-finite numbers, which JSON cannot represent, were rejected by the schema before.
    pub fn to_json(&self) -> Value {
        match &self.kind {
            Kind::Null => Value::Null,
            Kind::Bool(b) => Value::from(*b),
            Kind::Integer(n) => Value::from(*n),
            Kind::Float(x) => Number::from_f64(*x).map_or(Value::Null, Value::Number),
            Kind::Text(text) => Value::from(text.as_str()),
            Kind::List(values) => values.iter().map(Node::to_json).collect(),
            Kind::Map(entries) => entries.iter().map(|(k, v)| (k.clone(), v.to_json())).collect(),
        }
    }

    /// Formats the tree as YAML, one line per key.
    pub fn to_yaml(&self) -> String {
        let mut text = String::new();
        self.block(0, &mut text);
        text
    }

    fn block(&self, indent: usize, out: &mut String) {
        let Kind::Map(entries) = &self.kind else {
            *out += &self.inline();
            return;
        };
        for (key, value) in entries {
            let key = Node { kind: Kind::Text(key.clone()), line: 0 }.inline();
            // Writing to a String cannot fail.
            let _ = match &value.kind {
                Kind::Map(entries) if !entries.is_empty() => {
                    let written = writeln!(out, "{:indent$}{key}:", "");
                    value.block(indent + 2, out);
                    written
                }
                _ => writeln!(out, "{:indent$}{key}: {}", "", value.inline()),
            };
        }
    }

    /// Formats the value on one line.
    pub fn inline(&self) -> String {
        match &self.kind {
            Kind::Text(text) => quoted(text),
            Kind::List(values) => format!("[{}]", joined(values.iter().map(Node::inline))),
            Kind::Map(entries) => {
                format!("{{{}}}", joined(entries.iter().map(|(k, v)| format!("{}: {}", quoted(k), v.inline()))))
            }
            // `{:?}` prints the shortest digits that parse to the same number.
            Kind::Float(x) => format!("{x:?}"),
            Kind::Null | Kind::Bool(_) | Kind::Integer(_) => self.to_json().to_string(),
        }
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

/// Prints a string without quotes if it parses back as the same string, otherwise as a JSON string, which is valid
/// YAML.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '.' | '-');
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '/' | '.'));
    match starts && text.chars().all(plain) && scalar(text) == Kind::Text(text.to_owned()) {
        true => text.to_owned(),
        false => Value::from(text).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_follow_the_core_schema() {
        let text = |t: &str| Kind::Text(t.to_owned());
        for (written, wanted) in [
            ("1e-5", Kind::Float(1e-5)),
            ("3E4", Kind::Integer(30_000)),
            ("-2", Kind::Integer(-2)),
            (".5", Kind::Float(0.5)),
            ("1.", Kind::Integer(1)),
            ("true", Kind::Bool(true)),
            ("no", text("no")),
            ("off", text("off")),
            ("~", Kind::Null),
            ("inf", text("inf")),
            ("nan", text("nan")),
            (".inf", Kind::Float(f64::INFINITY)),
            ("1e", text("1e")),
            (".", text(".")),
            ("24GiB", text("24GiB")),
            ("'7'", text("7")),
            ("65_536", text("65_536")),
        ] {
            let tree = parse(&format!("a: {written}")).expect(written);
            assert_eq!(tree.get("a").expect("there").kind, wanted, "{written}");
        }
    }

    #[test]
    fn faults_have_lines() {
        for (text, wanted) in [
            ("a: 1\na: 2\n", "line 2: `a` is given twice"),
            ("a: &x 1\nb: *x\n", "line 1: anchors and tags are not read; write the value out"),
            ("a: !!str 1\n", "line 1: anchors and tags are not read; write the value out"),
            ("a: 1\n---\nb: 2\n", "line 3: a second document; give one"),
            ("? [a]\n: 1\n", "line 1: a key is a plain word"),
        ] {
            assert_eq!(parse(text).expect_err(text), wanted);
        }
        assert!(parse("a: [1, 2\nb: 3\n").expect_err("open").starts_with("line "));
        assert!(parse(&"[".repeat(1000)).expect_err("deep").starts_with("line "));
    }

    #[test]
    fn lines_are_those_of_the_keys() {
        let tree = parse("# words\na:\n  b: 1\n\n  c:\n    - 2\n").expect("YAML");
        let line = |path: &str| tree.at(path).expect("there").line;
        assert_eq!([line("a"), line("a.b"), line("a.c")], [2, 3, 5]);
    }

    #[test]
    fn what_is_printed_reads_back() {
        let text =
            "a: 1e-5\nb:\n  c: [x, \"7\", \"no way\"]\n  d: {}\ne: \"\"\nf: null\ng: \"true\"\nh: \"a: b\"\n";
        let tree = parse(text).expect("YAML");
        assert_eq!(tree.to_yaml(), text);
        assert_eq!(parse("").expect("nothing").kind, Kind::Map(vec![]));
    }

    proptest::proptest! {
        /// Everything that parses also parses from its printed form, to the same tree.
        #[test]
        fn no_text_breaks_it(text in "[\\[\\]{}:,\\- \n#&*!|>'\"%@`?ab1.~\t\u{e9}]{0,60}") {
            if let Ok(tree) = parse(&text) && matches!(tree.kind, Kind::Map(_)) {
                let again = parse(&tree.to_yaml()).expect("what is printed is YAML");
                proptest::prop_assert_eq!(again.to_json(), tree.to_json());
            }
        }
    }
}
