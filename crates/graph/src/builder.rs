//! Builder of graphs: names parameters by scope and infers tensor types. Invariant: `finish` returns only a
//! verified graph. The first violated rule is recorded and returned by `finish`, so model code needs no `?` on
//! every line.

use crate::limits::{Count, check_logits};
use crate::ops::*;
use crate::{
    Bounds, Bytes, DType, Def, Dim, Graph, Layout, Node, NodeId, Op, OutputRole, Param, ParamId, ParamPiece,
    Phase, Role, Space, StateDef, StateId, StateRole, TensorSpec, Value, ValueId, VerifyError,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// The largest number of outputs of any op (`Route`).
const MAX_OUTPUTS: usize = 6;

/// A graph under construction.
#[derive(Debug)]
pub struct Builder {
    graph: Graph,
    prefix: String,
    layer: Option<u32>,
    phase: Phase,
    error: Option<VerifyError>,
    /// Bytes of all values so far.
    bytes: Bytes,
    /// Parameter values, indexed by the name of the first tensor of each parameter.
    params: BTreeMap<String, Vec<ValueId>>,
    /// State values by role.
    states: BTreeMap<StateRole, ValueId>,
}

impl Builder {
    /// Creates a builder of an empty graph with steps of at most `bounds`.
    pub fn new(bounds: Bounds) -> Self {
        Self::from_graph(Graph::new(bounds), Phase::Forward)
    }

    /// Continues building `graph`; new nodes belong to `phase`.
    pub fn from_graph(graph: Graph, phase: Phase) -> Self {
        let mut params: BTreeMap<String, Vec<ValueId>> = BTreeMap::new();
        for (v, _, param) in graph.param_values() {
            params.entry(first_tensor(param)).or_default().push(v);
        }
        let states = graph.state_values().map(|(v, _, state)| (state.role.clone(), v)).collect();
        let error = graph.bounds.check().err().map(VerifyError::from);
        let mut builder = Self {
            graph,
            prefix: String::new(),
            layer: None,
            phase,
            error,
            bytes: Bytes::ZERO,
            params,
            states,
        };
        for (id, value) in builder.graph.values() {
            match builder.graph.add_limited(builder.bytes, id, value) {
                Ok(sum) => builder.bytes = sum,
                Err(error) => builder.error = builder.error.or(Some(error.into())),
            }
        }
        builder
    }

    /// Returns the graph built so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Sets the name prefix of the parameters, and the layer of the nodes, that are added from now on.
    pub fn scope(&mut self, prefix: impl Into<String>, layer: Option<u32>) {
        self.prefix = prefix.into();
        self.layer = layer;
    }

    /// Adds an input: a tensor supplied with every step.
    pub fn input(&mut self, name: &str, shape: &[Dim], dtype: DType) -> ValueId {
        // Before its value, so that an error can name it.
        let v = ValueId::at(self.graph.values.len());
        self.graph.inputs.push((name.to_owned(), v));
        self.source(TensorSpec::activation(shape, dtype).with_role(Role::Input))
    }

    /// Returns the state with the role `state.role`, adding it to the graph if it does not exist yet.
    pub fn state(&mut self, state: StateDef, shape: &[Dim], dtype: DType) -> ValueId {
        if let Some(&known) = self.states.get(&state.role) {
            return known;
        }
        let id = StateId::at(self.graph.states.len());
        let role = state.role.clone();
        self.graph.states.push(state);
        let v = self.source(TensorSpec::activation(shape, dtype).with_role(Role::State(id)));
        self.states.insert(role, v);
        v
    }

    /// Returns the whole tensor `name` of the weight file, prefixed by the current scope, as an f32 parameter.
    /// Requesting a tensor twice returns the same value, which is how weights are tied.
    pub fn param(&mut self, name: &str, shape: &[u64]) -> ValueId {
        let whole = ParamPiece::whole(format!("{}{name}", self.prefix), shape.to_vec());
        self.param_piece(whole)
    }

    /// Returns a range of rows of the tensor `name` as a parameter; `shape` is the shape of the whole tensor in the file.
    pub fn param_rows(&mut self, name: &str, shape: &[u64], rows: Range<u64>) -> ValueId {
        let tensor = format!("{}{name}", self.prefix);
        self.param_piece(ParamPiece { tensor, shape: shape.to_vec(), rows: (rows.start, rows.end) })
    }

    /// Returns a piece of a tensor as a parameter of the tensor's name.
    fn param_piece(&mut self, piece: ParamPiece) -> ValueId {
        self.param_of(Param { name: piece.tensor.clone(), pieces: [piece].into() }, DType::F32)
    }

    /// Returns the parameter that is the concatenation of `param.pieces` along dimension 0, adding it if no
    /// parameter with the same pieces and element type exists.
    pub fn param_of(&mut self, param: Param, dtype: DType) -> ValueId {
        let first = first_tensor(&param);
        for &known in self.params.get(&first).into_iter().flatten() {
            let spec = self.graph.spec(known);
            if let Role::Param(p) = spec.role
                && self.graph.params[p.index()].pieces == param.pieces
                && spec.dtype == dtype
            {
                return known;
            }
        }
        let rows = param.pieces.iter().map(|p| Count::from(p.rows.1.saturating_sub(p.rows.0)));
        // Without a number, the sum is above the limit of a dimension, which `define` checks.
        let rows = rows.sum::<Count>().get().unwrap_or(u64::MAX);
        let tail = param.pieces.first().map_or(&[][..], |p| p.shape.get(1..).unwrap_or(&[]));
        let shape = std::iter::once(rows).chain(tail.iter().copied()).map(Dim::Fixed);
        let id = ParamId::at(self.graph.params.len());
        let spec = TensorSpec::activation(shape.collect::<Vec<_>>(), dtype).with_role(Role::Param(id));
        self.graph.params.push(param);
        let value = self.source(spec);
        self.params.entry(first).or_default().push(value);
        value
    }

    /// Makes `value` an output of the graph. A string is the name of an output without a meaning to the planner
    /// ([`OutputRole::Named`]).
    pub fn output(&mut self, role: impl Into<OutputRole>, value: ValueId) {
        self.graph.outputs.push((role.into(), value));
    }

    /// Declares that `new` replaces the contents of `state` at the end of the step.
    pub fn update(&mut self, state: ValueId, new: ValueId) {
        self.graph.updates.push((state, new));
    }

    /// Adds a node that applies `op` to `inputs`, and returns all outputs of the op.
    pub fn node(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        let id = NodeId::at(self.graph.nodes.len());
        let specs: Vec<&TensorSpec> = inputs.iter().map(|&v| self.graph.spec(v)).collect();
        if let Err(error) = check_logits(&op, &specs, self.graph.bounds.full()) {
            self.error.get_or_insert(error.into());
        }
        let outs = op.rules().infer(&specs, &self.graph.bounds).unwrap_or_else(|rule| {
            self.error.get_or_insert(VerifyError::rule(id, op.name(), rule.0));
            // Callers index the outputs that a valid op would have returned, so placeholders are returned here;
            // `finish` reports the error.
            vec![TensorSpec::activation([Dim::Fixed(0), Dim::Fixed(0)], DType::F32); MAX_OUTPUTS]
        });
        let role = match self.phase {
            Phase::Forward | Phase::Update | Phase::Recompute => Role::Activation,
            Phase::Backward => Role::Grad,
        };
        let is_copy = op.is_copy();
        // Before its values, so that an error can name the node.
        self.graph.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: vec![],
            layer: self.layer,
            phase: self.phase,
        });
        let mut values = Vec::with_capacity(outs.len());
        for (i, spec) in outs.into_iter().enumerate() {
            let def = Def::Node(id, i as u32);
            // The rules of moves and views give the role of their operands.
            let spec = if is_copy { spec } else { spec.with_role(role) };
            values.push(self.define(Value { spec, def }));
        }
        self.graph.nodes[id.index()].outputs = values.iter().copied().map(Some).collect();
        values
    }

    /// Sets the layer of the nodes that follow, without changing the name prefix of parameters.
    pub fn in_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Sets the phase of the nodes that follow.
    pub fn in_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Adds a [`Linear`] with the weight `{name}.weight` of shape (`n`, K), where K is the row length of `x`,
    /// and with `bias` the bias `{name}.bias` of shape (`n`).
    pub fn linear(&mut self, x: ValueId, name: &str, n: u64, bias: bool) -> ValueId {
        let k = self.graph.spec(x).row_elements();
        let mut inputs = vec![x, self.param(&format!("{name}.weight"), &[n, k])];
        if bias {
            inputs.push(self.param(&format!("{name}.bias"), &[n]));
        }
        self.one(Op::Linear(Linear::new(bias, Epilogue::None)), &inputs)
    }

    /// Adds a [`LayerNorm`] with the parameters `{name}.weight` and `{name}.bias`.
    pub fn layer_norm(&mut self, x: ValueId, name: &str, eps: f32) -> ValueId {
        let d = self.graph.spec(x).row_elements();
        let gamma = self.param(&format!("{name}.weight"), &[d]);
        let beta = self.param(&format!("{name}.bias"), &[d]);
        self.one(Op::LayerNorm(LayerNorm { eps }), &[x, gamma, beta])
    }

    /// Adds the elementwise sum `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.one(Op::Add(Add {}), &[a, b])
    }

    /// Adds an [`RmsNorm`] with the parameter `{name}.weight`.
    pub fn rms_norm(&mut self, x: ValueId, name: &str, eps: f32) -> ValueId {
        let d = self.graph.spec(x).row_elements();
        let gamma = self.param(&format!("{name}.weight"), &[d]);
        self.one(Op::RmsNorm(RmsNorm { eps, heads: 1 }), &[x, gamma])
    }

    /// Adds an [`RmsNorm`] of each of the `heads` heads of a row, with the parameter `{name}.weight` of all heads.
    pub fn rms_norm_of_heads(&mut self, x: ValueId, name: &str, eps: f32, heads: u32) -> ValueId {
        let columns = self.graph.spec(x).row_elements().checked_div(heads.into()).unwrap_or_default();
        let gamma = self.param(&format!("{name}.weight"), &[columns]);
        self.one(Op::RmsNorm(RmsNorm { eps, heads }), &[x, gamma])
    }

    /// Adds the exact (erf) GELU of `x`.
    pub fn gelu(&mut self, x: ValueId) -> ValueId {
        self.one(Op::Gelu(Gelu {}), &[x])
    }

    /// Adds a node that applies `op` to `inputs`, and returns its first output.
    pub fn one(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.node(op, inputs)[0]
    }

    /// Verifies and returns the graph.
    ///
    /// # Errors
    /// The first rule violated while building, or found by [`Graph::verify`].
    pub fn finish(self) -> Result<Graph, VerifyError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.graph.verify()?;
        Ok(self.graph)
    }

    fn source(&mut self, mut spec: TensorSpec) -> ValueId {
        spec.layout = Layout::of(spec.dtype);
        spec.space = Space::Device;
        self.define(Value { spec, def: Def::Source })
    }

    /// Adds a value. If it is too large, the error is recorded and an empty tensor takes its place, so that the rules of the
    /// ops that read it compute with numbers that cannot exceed 64 bits.
    fn define(&mut self, mut value: Value) -> ValueId {
        let id = ValueId::at(self.graph.values.len());
        match self.graph.add_limited(self.bytes, id, &value) {
            Ok(sum) => self.bytes = sum,
            Err(error) => {
                self.error.get_or_insert(error.into());
                value.spec.shape.iter_mut().for_each(|dim| *dim = Dim::Fixed(0));
            }
        }
        self.graph.values.push(value);
        id
    }
}

fn first_tensor(param: &Param) -> String {
    param.pieces.first().map_or_else(String::new, |p| p.tensor.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers index the outputs that the op would have returned for valid inputs, so a failed inference must
    /// still return that many values.
    #[test]
    fn a_broken_rule_is_an_error_of_finish_not_a_panic() {
        let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 });
        let logits = g.input("logits", &[Dim::Tokens(1), Dim::Fixed(3)], DType::F32);
        let route = Route { experts: 3, top_k: 4, renormalise: true, capacity: 0 };
        let outs = g.node(Op::Route(route), &[logits]);
        let good = g.node(Op::Route(Route { top_k: 2, ..route }), &[logits]);
        assert_eq!(outs.len(), MAX_OUTPUTS);
        assert_eq!(good.len(), MAX_OUTPUTS);
        let error = g.finish().expect_err("four of three");
        assert!(error.to_string().contains("cannot choose 4 of 3 experts"), "{error}");
    }
}
