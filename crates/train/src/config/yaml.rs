//! YAML parser and printer for configurations: an ordered tree with the line of every value. Invariant: printed
//! text parses to an equal tree (apart from lines). Anchors, aliases and tags are rejected, so that a small
//! file cannot expand to a large tree, and duplicate keys are errors.
//!
//! Plain scalars follow the core schema of YAML 1.2.2 (section 10.3.2): `1e-5` is a number, `no` is a string.

use crate::TrainError;
use plimsoll_runtime::RuntimeError;
use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span};
use serde_json::{Number, Value};
use std::fmt::Write as _;

/// A value with its line.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlNode {
    /// The value.
    pub kind: NodeKind,
    /// Line of the value, or of its key in a mapping, from 1; 0 for values of flags.
    pub line: usize,
}

/// A YAML value.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeKind {
    /// `null`, `~` or an empty scalar.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer in any notation, such as `10000` or `1e4`.
    Integer(i64),
    /// Any other number, including infinities and NaN.
    Float(f64),
    /// A string.
    Text(String),
    /// A sequence.
    List(Vec<YamlNode>),
    /// A mapping: keys with values in the order of the file, without duplicates.
    Map(Vec<(String, YamlNode)>),
}

/// Maximum nesting depth, which bounds the recursion on hostile input.
const MAX_DEPTH: usize = 16;

/// Error of parsing YAML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct SyntaxError {
    /// Line of the error, from 1.
    pub line: usize,
    /// Description of the error.
    pub message: String,
}

/// Parses a text with at most one document. An empty text, and the text `null`, give an empty mapping.
///
/// # Errors
/// Invalid YAML; anchors, aliases, tags, duplicate keys, a second document, or too deep nesting.
pub fn parse(text: &str) -> Result<YamlNode, SyntaxError> {
    let mut events = Parser::new_from_str(text);
    let mut next = || -> Result<(Event<'_>, usize), SyntaxError> {
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
            (_, at) if root.is_some() => {
                return Err(at_line(
                    at,
                    "the file contains a second document; give only \
                one",
                ));
            }
            (event, at) => root = Some(node(event, at, MAX_DEPTH, &mut next)?),
        }
    }
    let empty = YamlNode { kind: NodeKind::Map(vec![]), line: 1 };
    Ok(root.filter(|node| node.kind != NodeKind::Null).unwrap_or(empty))
}

fn line(span: &Span) -> usize {
    span.start.line()
}

fn broken(error: &ScanError) -> SyntaxError {
    at_line(error.marker().line(), format!("not YAML: {}", error.info()))
}

fn at_line(line: usize, message: impl Into<String>) -> SyntaxError {
    SyntaxError { line, message: message.into() }
}

/// Parses the value that begins with `event`; `depth` is the number of nesting levels that are left.
fn node<'a>(
    event: Event<'a>,
    line: usize,
    depth: usize,
    next: &mut dyn FnMut() -> Result<(Event<'a>, usize), SyntaxError>,
) -> Result<YamlNode, SyntaxError> {
    if depth == 0 {
        return Err(at_line(line, "nested too deep for a configuration"));
    }
    let (anchor, tag) = match &event {
        Event::Alias(_) => return Err(at_line(line, "aliases are not supported; write the value out")),
        Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
        Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => (*anchor, tag.is_some()),
        _ => (0, false),
    };
    if anchor != 0 || tag {
        return Err(at_line(line, "anchors and tags are not supported; write the value out"));
    }
    let kind = match event {
        Event::Scalar(text, ScalarStyle::Plain, ..) => scalar(&text),
        Event::Scalar(text, ..) => NodeKind::Text(text.into_owned()),
        Event::SequenceStart(..) => {
            let mut values = vec![];
            loop {
                match next()? {
                    (Event::SequenceEnd, _) => break NodeKind::List(values),
                    (event, line) => values.push(node(event, line, depth - 1, next)?),
                }
            }
        }
        Event::MappingStart(..) => NodeKind::Map(mapping(depth, next)?),
        _ => return Err(at_line(line, "not a value")),
    };
    Ok(YamlNode { kind, line })
}

/// Parses the entries of a mapping up to its end.
fn mapping<'a>(
    depth: usize,
    next: &mut dyn FnMut() -> Result<(Event<'a>, usize), SyntaxError>,
) -> Result<Vec<(String, YamlNode)>, SyntaxError> {
    let mut entries: Vec<(String, YamlNode)> = vec![];
    loop {
        let (key, line) = match next()? {
            (Event::MappingEnd, _) => return Ok(entries),
            (Event::Scalar(key, _, 0, None), line) => (key.into_owned(), line),
            (_, line) => return Err(at_line(line, "a key is a plain word")),
        };
        if entries.iter().any(|(other, _)| *other == key) {
            return Err(at_line(line, format!("`{key}` is given twice")));
        }
        let (event, _) = next()?;
        // The value gets the key's line, because messages name keys and a value may begin on a later line.
        let value = node(event, line, depth - 1, next)?;
        entries.push((key, value));
    }
}

/// Value of an unquoted scalar.
fn scalar(text: &str) -> NodeKind {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return NodeKind::Null,
        "true" | "True" | "TRUE" => return NodeKind::Bool(true),
        "false" | "False" | "FALSE" => return NodeKind::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    // Rust's parser also accepts words such as `inf` and `nan`. In YAML a number begins with a digit or a point.
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if is_number && let Ok(n) = text.parse::<i64>() {
        return NodeKind::Integer(n);
    }
    let has_digit = digits.contains(|c: char| c.is_ascii_digit());
    if is_number
        && has_digit
        && let Ok(x) = text.parse::<f64>()
    {
        // A number that is too small for a float, such as 1e-400, is not 0; as a text the schema refuses it.
        let mantissa = digits.split(['e', 'E']).next().unwrap_or_default();
        let underflows = x == 0.0 && mantissa.contains(|c: char| matches!(c, '1'..='9'));
        return if underflows { NodeKind::Text(text.to_owned()) } else { number(x) };
    }
    match digits {
        ".inf" | ".Inf" | ".INF" if text.starts_with('-') => NodeKind::Float(f64::NEG_INFINITY),
        ".inf" | ".Inf" | ".INF" => NodeKind::Float(f64::INFINITY),
        ".nan" | ".NaN" | ".NAN" => NodeKind::Float(f64::NAN),
        _ => NodeKind::Text(text.to_owned()),
    }
}

/// Converts a float without a fractional part to an integer, as JSON Schema does, if its magnitude is below
/// 2^53. From there on a float no longer represents every integer exactly.
fn number(x: f64) -> NodeKind {
    if x.fract() == 0.0 && x.abs() < (1u64 << 53) as f64 {
        NodeKind::Integer(x as i64)
    } else {
        NodeKind::Float(x)
    }
}

impl YamlNode {
    /// Serialises a value to a tree with the keys in the order of the struct's fields.
    pub fn of<T: serde::Serialize>(value: &T) -> Result<Self, TrainError> {
        // JSON is a subset of YAML. A `serde_json::Value` in between would sort the keys.
        let text = serde_json::to_string(value).map_err(|e| RuntimeError::bug(e.to_string()))?;
        // `parse` treats a document that is only `null` as an empty mapping.
        if text == "null" {
            return Ok(Self { kind: NodeKind::Null, line: 0 });
        }
        Ok(parse(&text).map_err(|e| RuntimeError::bug(e.to_string()))?)
    }

    /// Returns the value of a key; `None` if this is not a mapping or does not have the key.
    pub fn get(&self, key: &str) -> Option<&YamlNode> {
        let NodeKind::Map(entries) = &self.kind else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    /// Returns the value at a path of keys with dots between them.
    pub fn at(&self, path: &str) -> Option<&YamlNode> {
        path.split('.').try_fold(self, YamlNode::get)
    }

    /// Sets the value at a path. Missing keys are added, and values on the path that are not mappings are
    /// replaced by mappings.
    pub fn set(&mut self, path: &[&str], value: YamlNode) {
        let [key, rest @ ..] = path else {
            *self = value;
            return;
        };
        if !matches!(self.kind, NodeKind::Map(_)) {
            *self = YamlNode { kind: NodeKind::Map(vec![]), line: 0 };
        }
        let NodeKind::Map(entries) = &mut self.kind else { return };
        let position = entries.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
            entries.push(((*key).to_owned(), YamlNode { kind: NodeKind::Null, line: 0 }));
            entries.len() - 1
        });
        entries[position].1.set(rest, value);
    }

    /// Converts the tree to JSON. Infinities and NaN become null; the schema rejects them before.
    pub fn to_json(&self) -> Value {
        match &self.kind {
            NodeKind::Null => Value::Null,
            NodeKind::Bool(b) => Value::from(*b),
            NodeKind::Integer(n) => Value::from(*n),
            NodeKind::Float(x) => Number::from_f64(*x).map_or(Value::Null, Value::Number),
            NodeKind::Text(text) => Value::from(text.as_str()),
            NodeKind::List(values) => values.iter().map(YamlNode::to_json).collect(),
            NodeKind::Map(entries) => entries.iter().map(|(k, v)| (k.clone(), v.to_json())).collect(),
        }
    }

    /// Formats a mapping as block-style YAML with one line per key; other values as in [`YamlNode::inline`].
    pub fn to_yaml(&self) -> String {
        let mut text = String::new();
        self.block(0, &mut text);
        text
    }

    /// Appends the block form, indented by `indent` spaces, to `out`.
    fn block(&self, indent: usize, out: &mut String) {
        let NodeKind::Map(entries) = &self.kind else {
            *out += &self.inline();
            return;
        };
        for (key, value) in entries {
            let key = YamlNode { kind: NodeKind::Text(key.clone()), line: 0 }.inline();
            // Writing to a String cannot fail.
            let _ = match &value.kind {
                NodeKind::Map(entries) if !entries.is_empty() => {
                    let written = writeln!(out, "{:indent$}{key}:", "");
                    value.block(indent + 2, out);
                    written
                }
                _ => writeln!(out, "{:indent$}{key}: {}", "", value.inline()),
            };
        }
    }

    /// Formats the value on one line, in YAML's flow style.
    pub fn inline(&self) -> String {
        match &self.kind {
            NodeKind::Text(text) => quoted(text),
            NodeKind::List(values) => format!("[{}]", joined(values.iter().map(YamlNode::inline))),
            NodeKind::Map(entries) => {
                format!("{{{}}}", joined(entries.iter().map(|(k, v)| format!("{}: {}", quoted(k), v.inline()))))
            }
            // `Debug` prints the shortest digits that parse to the same number.
            NodeKind::Float(x) => format!("{x:?}"),
            NodeKind::Null | NodeKind::Bool(_) | NodeKind::Integer(_) => self.to_json().to_string(),
        }
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

/// Formats a string: unquoted if it parses back to the same string, otherwise as a JSON string, which is also a
/// YAML string.
fn quoted(text: &str) -> String {
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '/' | '.'));
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '.' | '-'));
    if starts && is_plain && scalar(text) == NodeKind::Text(text.to_owned()) {
        text.to_owned()
    } else {
        Value::from(text).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_follow_the_core_schema() {
        let text = |t: &str| NodeKind::Text(t.to_owned());
        for (written, wanted) in [
            ("1e-5", NodeKind::Float(1e-5)),
            ("3E4", NodeKind::Integer(30_000)),
            ("-2", NodeKind::Integer(-2)),
            (".5", NodeKind::Float(0.5)),
            ("1.", NodeKind::Integer(1)),
            ("0e5", NodeKind::Integer(0)),
            ("-0.0", NodeKind::Integer(0)),
            ("1e-400", text("1e-400")),
            ("-0.001e-330", text("-0.001e-330")),
            ("true", NodeKind::Bool(true)),
            ("no", text("no")),
            ("off", text("off")),
            ("~", NodeKind::Null),
            ("inf", text("inf")),
            ("nan", text("nan")),
            (".inf", NodeKind::Float(f64::INFINITY)),
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
            ("a: &x 1\nb: *x\n", "line 1: anchors and tags are not supported; write the value out"),
            ("a: !!str 1\n", "line 1: anchors and tags are not supported; write the value out"),
            ("a: 1\n---\nb: 2\n", "line 3: the file contains a second document; give only one"),
            ("? [a]\n: 1\n", "line 1: a key is a plain word"),
        ] {
            assert_eq!(parse(text).expect_err(text).to_string(), wanted);
        }
        assert!(parse("a: [1, 2\nb: 3\n").expect_err("open").line > 0);
        assert!(parse(&"[".repeat(1000)).expect_err("deep").line > 0);
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
        assert_eq!(parse("").expect("nothing").kind, NodeKind::Map(vec![]));
    }

    proptest::proptest! {
        /// Every mapping that can be parsed is equal to the tree parsed from its printed form.
        #[test]
        fn no_text_breaks_it(text in "[\\[\\]{}:,\\- \n#&*!|>'\"%@`?ab1.~\t\u{e9}]{0,60}") {
            if let Ok(tree) = parse(&text) && matches!(tree.kind, NodeKind::Map(_)) {
                let again = parse(&tree.to_yaml()).expect("what is printed is YAML");
                proptest::prop_assert_eq!(again.to_json(), tree.to_json());
            }
        }
    }
}
