//! The JSON schema of the configuration, and validation of a YAML tree against it. Invariant: types, ranges, allowed
//! words and descriptions are defined once, on the configuration structs; all other code queries this schema.

use super::TrainConfig;
use super::yaml::{NodeKind, YamlNode};
use schemars::generate::SchemaSettings;
use serde_json::Value;

/// Returns the JSON schema (draft 2020-12) of the configuration, for example for editors.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<TrainConfig>().to_value()
}

/// A configuration key that holds a value, as opposed to a section.
#[derive(Clone, Debug, PartialEq)]
pub struct Leaf {
    /// Dotted path of the key.
    pub path: String,
    /// Description of the key.
    pub about: String,
    /// The allowed values in words.
    pub allowed: String,
    /// What the key can affect: `results`, `rounding` (the order of sums alone: a resumed run keeps the value, unless another
    /// is stated), `end` (when the run ends), `machine` (memory and speed) or `log` (what is written).
    pub changes: String,
}

/// Returns all keys that hold values, sorted by path.
pub fn leaves(schema: &Value) -> Vec<Leaf> {
    let mut found = vec![];
    collect(schema, "", &mut found);
    found
}

fn collect(schema: &Value, path: &str, found: &mut Vec<Leaf>) {
    if let Some(keys) = properties(schema) {
        for (key, inner) in keys {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            collect(inner, &path, found);
        }
        return;
    }
    let about = schema["description"].as_str().unwrap_or_default().replace('\n', " ");
    let changes = schema["changes"].as_str().unwrap_or("results").replace('\n', " ");
    found.push(Leaf { path: path.to_owned(), about, allowed: allowed(schema), changes });
}

/// Returns the keys of a section; `None` for the schema of a value.
pub fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    schema["properties"].as_object().or_else(|| branches(schema).find_map(properties))
}

/// Returns the schema of the elements of a list of sections; `None` for the schema of anything else.
fn sections(schema: &Value) -> Option<&Value> {
    schema.get("items").filter(|inner| properties(inner).is_some())
}

fn branches(schema: &Value) -> impl Iterator<Item = &Value> {
    ["anyOf", "oneOf"].into_iter().filter_map(|word| schema[word].as_array()).flatten()
}

/// A fault found at a key.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemaFault {
    /// Dotted path of the key.
    pub path: String,
    /// Line of the key; 0 if it was set by a flag.
    pub line: usize,
    /// The kind of fault.
    pub what: Wrong,
}

/// Kinds of faults at a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Wrong {
    /// The key does not exist.
    Unknown,
    /// The value has the wrong type or is out of range.
    Value {
        /// The value as written.
        found: String,
        /// The allowed values, phrased as the end of `it is ...`.
        allowed: String,
    },
}

/// Returns all faults of a tree with respect to a schema, in the order of the tree.
pub fn faults(node: &YamlNode, schema: &Value) -> Vec<SchemaFault> {
    let mut found = vec![];
    check(node, schema, "", &mut found);
    found
}

fn check(node: &YamlNode, schema: &Value, path: &str, found: &mut Vec<SchemaFault>) {
    let NodeKind::Map(entries) = &node.kind else {
        if let (NodeKind::List(sections), Some(inner)) = (&node.kind, sections(schema)) {
            for (number, section) in sections.iter().enumerate() {
                check(section, inner, &format!("{path}[{number}]"), found);
            }
            return;
        }
        if !fits(node, schema) || !is_single(node) {
            let found_text = node.inline();
            let allowed = if is_single(node) {
                allowed(schema)
            } else {
                format!("{}, and 0 or in the range of 32-bit floating point", allowed(schema))
            };
            let what = Wrong::Value { found: found_text, allowed };
            found.push(SchemaFault { path: path.to_owned(), line: node.line, what });
        }
        return;
    };
    let Some(keys) = properties(schema) else {
        let what = Wrong::Value { found: node.inline(), allowed: allowed(schema) };
        found.push(SchemaFault { path: path.to_owned(), line: node.line, what });
        return;
    };
    for (key, value) in entries {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match keys.get(key) {
            Some(schema) => check(value, schema, &path, found),
            None => unknown(value, path, found),
        }
    }
}

/// Reports every key inside an unknown section separately, because each key may have its own equivalent.
fn unknown(node: &YamlNode, path: String, found: &mut Vec<SchemaFault>) {
    match &node.kind {
        NodeKind::Map(entries) if !entries.is_empty() => {
            for (key, value) in entries {
                unknown(value, format!("{path}.{key}"), found);
            }
        }
        _ => found.push(SchemaFault { path, line: node.line, what: Wrong::Unknown }),
    }
}

/// Whether a value other than a mapping satisfies the schema.
fn fits(node: &YamlNode, schema: &Value) -> bool {
    schema.get("const").is_none_or(|value| *value == node.to_json())
        && fits_any(node, &schema["anyOf"])
        && fits_any(node, &schema["oneOf"])
        && schema["enum"].as_array().is_none_or(|words| words.contains(&node.to_json()))
        && has_type(node, &schema["type"])
        && in_range(node, schema)
        && items(node, schema)
}

/// Whether a value satisfies one of a list of schemas; true if there is no list.
fn fits_any(node: &YamlNode, schemas: &Value) -> bool {
    schemas.as_array().is_none_or(|all| all.iter().any(|schema| fits(node, schema)))
}

/// Whether a value has the type, or one of the types, of a schema; true if the schema has none.
fn has_type(node: &YamlNode, types: &Value) -> bool {
    match types {
        Value::String(name) => is_type(node, name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(|name| is_type(node, name)),
        _ => true,
    }
}

fn is_type(node: &YamlNode, name: &str) -> bool {
    match &node.kind {
        NodeKind::Null => name == "null",
        NodeKind::Bool(_) => name == "boolean",
        NodeKind::Integer(_) => name == "integer" || name == "number",
        NodeKind::Float(x) => name == "number" && x.is_finite(),
        NodeKind::Text(_) => name == "string",
        NodeKind::List(_) => name == "array",
        NodeKind::Map(_) => name == "object",
    }
}

/// Whether a number is 0 or a normal number of 32 bits, which the kernels compute with; smaller ones would become 0.
fn is_single(node: &YamlNode) -> bool {
    match &node.kind {
        NodeKind::Float(x) if x.is_finite() => *x == 0.0 || (*x as f32).is_normal(),
        NodeKind::List(values) => values.iter().all(is_single),
        NodeKind::Float(_)
        | NodeKind::Null
        | NodeKind::Bool(_)
        | NodeKind::Integer(_)
        | NodeKind::Text(_)
        | NodeKind::Map(_) => true,
    }
}

fn in_range(node: &YamlNode, schema: &Value) -> bool {
    let number = match node.kind {
        NodeKind::Integer(n) => n as f64,
        NodeKind::Float(x) => x,
        NodeKind::Null | NodeKind::Bool(_) | NodeKind::Text(_) | NodeKind::List(_) | NodeKind::Map(_) => {
            return true;
        }
    };
    schema["minimum"].as_f64().is_none_or(|limit| number >= limit)
        && schema["maximum"].as_f64().is_none_or(|limit| number <= limit)
        && schema["exclusiveMinimum"].as_f64().is_none_or(|limit| number > limit)
        && schema["exclusiveMaximum"].as_f64().is_none_or(|limit| number < limit)
}

fn items(node: &YamlNode, schema: &Value) -> bool {
    let NodeKind::List(values) = &node.kind else { return true };
    schema["minItems"].as_u64().is_none_or(|min| values.len() as u64 >= min)
        && schema["maxItems"].as_u64().is_none_or(|max| values.len() as u64 <= max)
        && schema.get("items").is_none_or(|inner| values.iter().all(|value| fits(value, inner)))
}

/// Describes in words the values that a schema allows.
pub fn allowed(schema: &Value) -> String {
    let mut parts: Vec<String> = vec![];
    collect_allowed(schema, schema, &mut parts);
    parts.dedup();
    match parts.len() {
        0 => "a section of keys".to_owned(),
        1 => parts.remove(0),
        _ => {
            let last = parts.pop().unwrap_or_default();
            format!("{} or {last}", parts.join(", "))
        }
    }
}

fn collect_allowed(schema: &Value, limits: &Value, parts: &mut Vec<String>) {
    if let Some(word) = schema.get("const").and_then(Value::as_str) {
        return parts.push(word.to_owned());
    }
    if let Some(words) = schema["enum"].as_array() {
        return parts.extend(words.iter().map(|w| w.as_str().map_or_else(|| w.to_string(), str::to_owned)));
    }
    if branches(schema).next().is_some() {
        return branches(schema).for_each(|s| collect_allowed(s, limits, parts));
    }
    let mut types: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    // `null` is listed last because it is the exceptional value.
    types.sort_by_key(|name| *name == "null");
    parts.extend(types.into_iter().map(|name| one_type(name, schema, limits)));
}

fn one_type(name: &str, schema: &Value, limits: &Value) -> String {
    match name {
        "null" => "null".to_owned(),
        "boolean" => "true or false".to_owned(),
        "integer" => format!("a whole number{}", range(schema, limits)),
        "number" => format!("a number{}", range(schema, limits)),
        "string" => "a text".to_owned(),
        "array" => {
            let inner = allowed(&schema["items"]);
            match (schema["minItems"].as_u64(), schema["maxItems"].as_u64()) {
                (Some(min), Some(max)) if min == max => format!("a list of {min}: each {inner}"),
                (Some(1), None) => format!("a list of at least one: each {inner}"),
                _ => format!("a list: each {inner}"),
            }
        }
        _ => "a section of keys".to_owned(),
    }
}

/// A limit as text; one with many digits in scientific notation.
fn limit_text(x: f64) -> String {
    if x.abs() < 1e19 { x.to_string() } else { format!("{x:e}") }
}

/// Describes the range of a number by the tighter of the limits of a branch and of the key itself.
fn range(schema: &Value, outer: &Value) -> String {
    let [exclusive_min, min] =
        ["exclusiveMinimum", "minimum"].map(|word| tighter(schema, outer, word, f64::max));
    let [exclusive_max, max] =
        ["exclusiveMaximum", "maximum"].map(|word| tighter(schema, outer, word, f64::min));
    let lower = match (exclusive_min, min) {
        (Some(x), _) => format!(" above {}", limit_text(x)),
        (None, Some(x)) => format!(" from {}", limit_text(x)),
        (None, None) => String::new(),
    };
    match (exclusive_max, max) {
        (Some(x), _) => format!("{lower} to below {}", limit_text(x)),
        (None, Some(x)) => format!("{lower} to {}", limit_text(x)),
        (None, None) if lower.starts_with(" from") => format!("{lower} on"),
        (None, None) => lower,
    }
}

/// A limit that a branch, the key itself, or both have; `choose` returns the tighter of two.
fn tighter(schema: &Value, outer: &Value, word: &str, choose: fn(f64, f64) -> f64) -> Option<f64> {
    match (schema[word].as_f64(), outer[word].as_f64()) {
        (Some(a), Some(b)) => Some(choose(a, b)),
        (a, b) => a.or(b),
    }
}
