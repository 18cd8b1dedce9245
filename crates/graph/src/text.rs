//! The text form of a graph: what `--dump-after` prints, and what tests read (`tests/filetests`).
//!
//! A graph is a line of bounds, then one line for each source value, node, output and update:
//! ```text
//! graph T <= 64, S <= 1, longest <= 64
//!   %0: f32[T, 8] = input x
//!   %1: f32[32, 8] = param fc1.weight
//!   %2: f32[24, 8] = param qkv.weight (q.weight[8, 8], k.weight[8, 8], v.weight[16, 8] rows 0..8)
//!   %3: f32[32, 8] = state m fc1.weight: optimizer, 0
//!   %4: f32[T, 32], _ = linear {"bias":false,"prologue":"none","epilogue":"none"} %0, %1  ; layer 0
//!   output y = %4
//!   update %3 = %5
//! ```
//! The bounds end with `, P <= N` if the graph has more than one pack. `_` is an output that nobody reads. The type of
//! a value is followed by its role (` grad`) and its space (` on host`, ` in file`) where they differ from the default. After ` ; ` follow the layer of a node, and its phase
//! unless it is the forward pass. Attributes are the JSON of the op. Empty lines and lines that begin with `;` are
//! skipped.
//!
//! Invariant: parsing the text of a graph gives an equal graph, if its parameters and states are numbered in the order
//! of their values.

use crate::{
    Bounds, Def, Dim, Graph, Layout, Node, NodeId, Op, Param, ParamId, ParamPiece, Phase, Role, Space,
    StateDef, StateId, StateRole, TensorSpec, Value, ValueId,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::str::FromStr;

/// Label of a node in ledgers and messages: its op, and its parameter or layer if it has one.
pub fn node_label(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    // The label of a matmul has its weight, even if another parameter is an earlier input.
    let weights = node.op.weights().iter().filter_map(|&i| node.inputs.get(i));
    // The verifier also labels nodes that read values which do not exist.
    let param = weights.chain(&node.inputs).find_map(|v| match graph.values.get(v.index())?.spec.role {
        Role::Param(p) => graph.params.get(p.index()).map(|param| param.name.as_str()),
        Role::Input | Role::Activation | Role::Grad | Role::State(_) => None,
    });
    match (param, node.layer) {
        (Some(name), _) => format!("{} {}", node.op.name(), name.trim_end_matches(".weight")),
        (None, Some(layer)) => format!("{} layer {layer}", node.op.name()),
        (None, None) => node.op.name().to_owned(),
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.bounds;
        write!(f, "graph T <= {}, S <= {}, longest <= {}", b.tokens, b.sequences, b.longest)?;
        if b.packs != 1 {
            write!(f, ", P <= {}", b.packs)?;
        }
        writeln!(f)?;
        for (name, v) in &self.inputs {
            writeln!(f, "  {} = input {name}", typed(self, *v))?;
        }
        for (v, _, param) in self.param_values() {
            writeln!(f, "  {} = param {}{}", typed(self, v), param.name, pieces(param, self.spec(v)))?;
        }
        for (v, _, state) in self.state_values() {
            let kind = name_of(state.role.kind());
            writeln!(f, "  {} = state {}: {kind}, {}", typed(self, v), state.role, state.init)?;
        }
        for (_, node) in self.nodes() {
            writeln!(f, "  {}", node_line(self, node)?)?;
        }
        for (role, v) in &self.outputs {
            writeln!(f, "  output {role} = {v}")?;
        }
        for (state, new) in &self.updates {
            writeln!(f, "  update {state} = {new}")?;
        }
        Ok(())
    }
}

/// A value with its type.
fn typed(graph: &Graph, id: ValueId) -> String {
    let spec = graph.spec(id);
    let role = match spec.role {
        Role::Param(_) | Role::Input | Role::Activation | Role::State(_) => "",
        Role::Grad => " grad",
    };
    let space = match spec.space {
        Space::Device => "",
        Space::Host => " on host",
        Space::File => " in file",
    };
    format!("{id}: {spec}{role}{space}")
}

/// The pieces of a parameter as text; empty if the parameter is a whole tensor that has the parameter's name.
fn pieces(param: &Param, spec: &TensorSpec) -> String {
    if let [piece] = &param.pieces[..]
        && *piece == whole(&param.name, spec)
    {
        return String::new();
    }
    let pieces: Vec<String> = param.pieces.iter().map(piece_text).collect();
    format!(" ({})", pieces.join(", "))
}

/// A piece as text: `a[8, 4] rows 0..2`, without the rows if the piece has all of them.
fn piece_text(piece: &ParamPiece) -> String {
    let ParamPiece { tensor, shape, rows: (start, end) } = piece;
    let dims = shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    if *piece == ParamPiece::whole(tensor.clone(), shape.clone()) {
        return format!("{tensor}[{dims}]");
    }
    format!("{tensor}[{dims}] rows {start}..{end}")
}

/// The piece that is all of a tensor of the shape of `spec`.
fn whole(tensor: &str, spec: &TensorSpec) -> ParamPiece {
    ParamPiece::whole(tensor.to_owned(), spec.shape.iter().filter_map(|dim| dim.fixed()).collect())
}

/// The name of a unit variant in the text form: its name in saved graphs.
fn name_of(variant: impl Serialize) -> String {
    // Units of an enum are strings in JSON, so there is always a name.
    serde_json::to_value(variant).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The unit variant of a name; see [`name_of`].
fn variant<T: DeserializeOwned>(name: &str) -> Option<T> {
    serde_json::from_value(name.into()).ok()
}

fn node_line(graph: &Graph, node: &Node) -> Result<String, fmt::Error> {
    let outs: Vec<String> =
        node.outputs.iter().map(|o| o.map_or_else(|| "_".to_owned(), |v| typed(graph, v))).collect();
    let ins: Vec<String> = node.inputs.iter().map(ValueId::to_string).collect();
    // {"gelu":{}} -> {}: the attributes as JSON, without the name of the op, which was written before.
    let json = serde_json::to_string(&node.op).map_err(|_| fmt::Error)?;
    let attributes = json.split_once(':').and_then(|(_, a)| a.strip_suffix('}')).filter(|a| *a != "{}");
    let mut line = format!("{} = {}", outs.join(", "), node.op.name());
    if let Some(attributes) = attributes {
        line = format!("{line} {attributes}");
    }
    if !ins.is_empty() {
        line = format!("{line} {}", ins.join(", "));
    }
    let phase = (node.phase != Phase::Forward).then(|| name_of(node.phase));
    let layer = node.layer.map(|layer| format!("layer {layer}"));
    let notes: Vec<String> = layer.into_iter().chain(phase).collect();
    if !notes.is_empty() {
        line = format!("{line}  ; {}", notes.join(", "));
    }
    Ok(line)
}

/// A text that is not a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextError {
    /// Line number, counted from 1.
    pub line: usize,
    /// The text that the parser expected, and the text that it found.
    pub message: String,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for TextError {}

/// Parses the text form. The graph is not verified: a test may read one that breaks a rule.
impl FromStr for Graph {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        let last = text.lines().count();
        let numbered = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
        let mut lines = numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with(';'));
        let Some((number, header)) = lines.next() else {
            let message = "expected `graph T <= N, S <= N, longest <= N`".to_owned();
            return Err(TextError { line: last, message });
        };
        let mut parser = Parser::new(header).map_err(|message| TextError { line: number, message })?;
        for (number, line) in lines {
            parser.line(line).map_err(|message| TextError { line: number, message })?;
        }
        parser.finish().map_err(|message| TextError { line: last, message })
    }
}

/// A graph whose text is read up to some line. Values are indexed by id and may be defined in any order.
struct Parser {
    graph: Graph,
    values: Vec<Option<Value>>,
    params: Vec<(ValueId, Param)>,
    states: Vec<(ValueId, StateDef)>,
}

impl Parser {
    /// Reads the line of bounds.
    fn new(header: &str) -> Result<Self, String> {
        let mut cursor = LineCursor(header);
        cursor.expect("graph T <= ")?;
        let tokens = cursor.number()?;
        cursor.expect(", S <= ")?;
        let sequences = cursor.number()?;
        cursor.expect(", longest <= ")?;
        let longest = cursor.number()?;
        let packs = if cursor.take(", P <= ") { cursor.number()? } else { 1 };
        cursor.end()?;
        let graph = Graph::new(Bounds { tokens, sequences, longest, packs });
        Ok(Self { graph, values: vec![], params: vec![], states: vec![] })
    }

    /// Reads a line after the bounds.
    fn line(&mut self, line: &str) -> Result<(), String> {
        let mut cursor = LineCursor(line);
        let graph = &mut self.graph;
        if cursor.take("output ") {
            let (name, value) = cursor.0.rsplit_once(" = ").ok_or("expected `output NAME = %N`")?;
            let mut cursor = LineCursor(value);
            let Ok(role) = name.parse();
            graph.outputs.push((role, cursor.value()?));
            return cursor.end();
        }
        if cursor.take("update ") {
            let state = cursor.value()?;
            cursor.expect(" = ")?;
            graph.updates.push((state, cursor.value()?));
            return cursor.end();
        }
        let mut outs = vec![];
        loop {
            outs.push(if cursor.take("_") { None } else { Some(cursor.typed()?) });
            if !cursor.take(", ") {
                break;
            }
        }
        cursor.expect(" = ")?;
        self.definition(outs, cursor)
    }

    /// Reads the right side of ` = `: the source of one value, or an op with its operands.
    fn definition(
        &mut self,
        mut outs: Vec<Option<(ValueId, TensorSpec)>>,
        mut cursor: LineCursor<'_>,
    ) -> Result<(), String> {
        for source in ["input ", "param ", "state "] {
            if !cursor.take(source) {
                continue;
            }
            let (Some(Some((id, spec))), 1) = (outs.pop(), outs.len() + 1) else {
                return Err(format!("{source}defines one value"));
            };
            return self.source(source, id, spec, cursor);
        }
        let name = cursor.word();
        let attributes = if cursor.take(" {") {
            cursor.object()?
        } else {
            serde_json::Value::Object(serde_json::Map::new())
        };
        let op = Op::from_parts(name, attributes)
            .ok_or_else(|| format!("`{name}` is not an op"))?
            .map_err(|e| format!("{name}: {e}"))?;
        let mut inputs = vec![];
        if cursor.0.starts_with(" %") {
            cursor.expect(" ")?;
            inputs.push(cursor.value()?);
            while cursor.take(", ") {
                inputs.push(cursor.value()?);
            }
        }
        let mut layer = None;
        let mut phase = Phase::Forward;
        if cursor.take("  ; ") {
            for note in std::mem::take(&mut cursor.0).split(", ") {
                match variant(note) {
                    Some(named) => phase = named,
                    None => {
                        let number = note.strip_prefix("layer ").and_then(|n| n.parse().ok());
                        layer = Some(number.ok_or_else(|| format!("`{note}` is neither a layer nor a phase"))?);
                    }
                }
            }
        }
        cursor.end()?;
        let node = NodeId::at(self.graph.nodes.len());
        let outputs = outs.iter().map(|out| out.as_ref().map(|(id, _)| *id)).collect();
        self.graph.nodes.push(Node { op, inputs, outputs, layer, phase });
        for (position, out) in outs.into_iter().enumerate() {
            if let Some((id, spec)) = out {
                self.define(id, Value { spec, def: Def::Node(node, position as u32) })?;
            }
        }
        Ok(())
    }

    fn source(
        &mut self,
        source: &str,
        id: ValueId,
        spec: TensorSpec,
        cursor: LineCursor<'_>,
    ) -> Result<(), String> {
        let role = match source {
            "input " => {
                self.graph.inputs.push((cursor.0.to_owned(), id));
                Role::Input
            }
            "param " => {
                let (name, pieces) = match cursor.0.strip_suffix(')').and_then(|text| text.split_once(" (")) {
                    Some((name, pieces)) => (name, LineCursor(pieces).pieces()?),
                    None => (cursor.0, vec![whole(cursor.0, &spec)]),
                };
                self.params.push((id, Param { name: name.to_owned(), pieces: pieces.into() }));
                Role::Param(ParamId::at(0))
            }
            _ => {
                let (name, rest) = cursor.0.rsplit_once(": ").ok_or("expected `state NAME: KIND, INIT`")?;
                let (kind, init) = rest.split_once(", ").ok_or("expected `state NAME: KIND, INIT`")?;
                let kind = variant(kind).ok_or("a state is a gradient, optimizer, master or buffer")?;
                let init = init.parse().map_err(|_| format!("`{init}` is not a number"))?;
                self.states.push((id, StateDef { role: StateRole::parsed(kind, name)?, init }));
                Role::State(StateId::at(0))
            }
        };

        self.define(id, Value { spec: spec.with_role(role), def: Def::Source })
    }

    fn define(&mut self, id: ValueId, value: Value) -> Result<(), String> {
        let index = id.index();
        // A text of some bytes must not ask for a table of gigabytes.
        if index > self.values.len() + 100_000 {
            return Err(format!("{id} is far beyond the values before it"));
        }
        if self.values.len() <= index {
            self.values.resize(index + 1, None);
        }
        match self.values[index].replace(value) {
            None => Ok(()),
            Some(_) => Err(format!("{id} is defined twice")),
        }
    }

    /// The graph, with parameters and states numbered in the order of their values.
    fn finish(mut self) -> Result<Graph, String> {
        let mut graph = self.graph;
        self.params.sort_by_key(|(id, _)| *id);
        self.states.sort_by_key(|(id, _)| *id);
        for (number, value) in self.values.into_iter().enumerate() {
            graph.values.push(value.ok_or_else(|| format!("%{number} is not defined"))?);
        }
        for (number, (id, param)) in self.params.into_iter().enumerate() {
            graph.values[id.index()].spec.role = Role::Param(ParamId::at(number));
            graph.params.push(param);
        }
        for (number, (id, state)) in self.states.into_iter().enumerate() {
            graph.values[id.index()].spec.role = Role::State(StateId::at(number));
            graph.states.push(state);
        }
        // A copy or view has the role of its operands. Nodes are in topological order.
        for node in &graph.nodes {
            let [Some(to)] = node.outputs[..] else { continue };
            let values = node.inputs.iter().map(|v| graph.values.get(v.index()));
            let operands: Option<Vec<Role>> = values.map(|value| value.map(|value| value.spec.role)).collect();
            if let Some(role) = operands.and_then(|operands| node.op.role_of_copy(&operands)) {
                graph.values[to.index()].spec.role = role;
            }
        }
        Ok(graph)
    }
}

/// The rest of a line.
struct LineCursor<'a>(&'a str);

impl<'a> LineCursor<'a> {
    fn take(&mut self, text: &str) -> bool {
        self.0.strip_prefix(text).map(|rest| self.0 = rest).is_some()
    }

    fn expect(&mut self, text: &str) -> Result<(), String> {
        if self.take(text) { Ok(()) } else { Err(format!("expected `{text}` before `{}`", self.0)) }
    }

    fn end(&self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("`{}` is too much", self.0)) }
    }

    /// The text up to a space, a comma or a bracket.
    fn word(&mut self) -> &'a str {
        let end = self.0.find([' ', ',', '[', ']', ')']).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        word
    }

    fn number<T: FromStr>(&mut self) -> Result<T, String> {
        let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        let number = digits.parse().map_err(|_| format!("expected a number before `{}`", self.0))?;
        self.0 = rest;
        Ok(number)
    }

    fn value(&mut self) -> Result<ValueId, String> {
        self.expect("%")?;
        Ok(ValueId(self.number()?))
    }

    /// A JSON object, of which the `{` is gone.
    fn object(&mut self) -> Result<serde_json::Value, String> {
        // An op's attributes hold no braces in strings.
        let mut depth = 1;
        let mut end = None;
        for (at, c) in self.0.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                end = Some(at + 1);
                break;
            }
        }
        let (text, rest) = self.0.split_at(end.ok_or("the attributes have no `}`")?);
        self.0 = rest;
        serde_json::from_str(&format!("{{{text}")).map_err(|e| format!("attributes: {e}"))
    }

    /// `%3: f32[T, 8]` with layout, role and space.
    fn typed(&mut self) -> Result<(ValueId, TensorSpec), String> {
        let id = self.value()?;
        self.expect(": ")?;
        let name = self.word();
        let dtype = variant(name).ok_or_else(|| format!("`{name}` is not an element type"))?;
        let shape = self.list(Self::dim)?;
        let mut spec = TensorSpec { layout: Layout::RowMajor, ..TensorSpec::activation(shape, dtype) };
        if self.take(" packed ") {
            let rows = self.number()?;
            self.expect("x")?;
            spec.layout = Layout::Packed { rows, columns: self.number()? };
        } else if self.take(" scaled") {
            spec.layout = Layout::Scaled;
        }
        if self.take(" grad") {
            spec.role = Role::Grad;
        }
        if self.take(" on host") {
            spec.space = Space::Host;
        } else if self.take(" in file") {
            spec.space = Space::File;
        }
        Ok((id, spec))
    }

    /// `[A, B]`.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T, String>) -> Result<Vec<T>, String> {
        self.expect("[")?;
        let mut items = vec![];
        while !self.take("]") {
            if !items.is_empty() {
                self.expect(", ")?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn dim(&mut self) -> Result<Dim, String> {
        let has_factor = self.0.starts_with(|c: char| c.is_ascii_digit());
        let factor = if has_factor { Some(self.number()?) } else { None };
        if self.take("T") {
            return Ok(Dim::Tokens(factor.unwrap_or(1)));
        }
        if self.take("S") {
            return Ok(Dim::Sequences(factor.unwrap_or(1)));
        }
        if self.take("P") {
            return Ok(Dim::Packs(factor.unwrap_or(1)));
        }
        factor.map(Dim::Fixed).ok_or_else(|| format!("expected a dimension before `{}`", self.0))
    }

    /// `q.weight[8, 8], v.weight[16, 8] rows 0..8`.
    fn pieces(&mut self) -> Result<Vec<ParamPiece>, String> {
        let mut pieces = vec![];
        loop {
            let tensor = self.word().to_owned();
            let shape: Vec<u64> = self.list(Self::number)?;
            let mut piece = ParamPiece::whole(tensor, shape);
            if self.take(" rows ") {
                let start = self.number()?;
                self.expect("..")?;
                piece.rows = (start, self.number()?);
            }
            pieces.push(piece);
            if !self.take(", ") {
                self.end()?;
                return Ok(pieces);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_graph_names_its_line() {
        let head = "graph T <= 8, S <= 1, longest <= 8\n";
        for (text, wanted) in [
            ("", "line 0: expected `graph T <= N, S <= N, longest <= N`"),
            ("graph T <= x", "line 1: expected a number before `x`"),
            ("graph T <= 8, S <= 1, longest <= 8 more", "line 1: ` more` is too much"),
            ("  %0: f31[T] = input x", "line 2: `f31` is not an element type"),
            ("  %0: f32[T = input x", "line 2: expected `, ` before ` = input x`"),
            ("  %0: f32[X] = input x", "line 2: expected a dimension before `X] = input x`"),
            ("  %0: f32[T] = input x\n  %0: f32[T] = input y", "line 3: %0 is defined twice"),
            ("  %1: f32[T] = input x", "line 2: %0 is not defined"),
            ("  %4000000000: f32[T] = input x", "line 2: %4000000000 is far beyond the values before it"),
            ("  %0: f32[T], %1: f32[T] = input x", "line 2: input defines one value"),
            ("  %0: f32[T] = blend %1", "line 2: `blend` is not an op"),
            ("  %0: f32[T] = scale %1", "line 2: scale: missing field `factor`"),
            ("  %0: f32[T] = scale {\"factor\":1 %1", "line 2: the attributes have no `}`"),
            (
                "  %0: f32[T] = scale {\"factor\":x} %1",
                "line 2: attributes: expected value at line 1 column 11",
            ),
            ("  %0: f32[T] = gelu %1  ; layer x", "line 2: `layer x` is neither a layer nor a phase"),
            ("  %0: f32[8] = state m: moment, 0", "line 2: a state is a gradient, optimizer, master or buffer"),
            ("  %0: f32[8] = state m: master, x", "line 2: `x` is not a number"),
            (
                "  %0: f32[8] = state m: master, 0",
                "line 2: `m` is not the name of a state of the kind `master weights`",
            ),
            ("  %0: f32[8] = param w (a[8] rows 0-8)", "line 2: expected `..` before `-8`"),
        ] {
            let text = if text.starts_with("  ") { format!("{head}{text}") } else { text.to_owned() };
            assert_eq!(text.parse::<Graph>().expect_err(&text).to_string(), wanted, "{text}");
        }
    }
}
