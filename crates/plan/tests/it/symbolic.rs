//! Symbolic meaning of a graph as hashed terms: graphs of equal meaning compute the same function.
//! Invariant: fused ops are expanded to their unfused form, so an incorrect rewrite by a pass changes the meaning.

use plimsoll_graph::ops::{Attention, Epilogue, Glu, Linear, Prologue, Qkv};
use plimsoll_graph::{Def, Graph, Op, OutputRole, Role, TensorSpec, ValueId};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// Hash of a term.
type Term = u64;

/// Meaning of a graph: (name, shape) of inputs, (role, term, shape) of outputs and (state, new value, shape) of
/// updates, each in order.
#[derive(Debug, PartialEq, Eq)]
pub struct Meaning {
    inputs: Vec<(String, String)>,
    outputs: Vec<(OutputRole, Term, String)>,
    updates: Vec<(Term, Term, String)>,
}

/// Hashes a term, with the fixed keys of `DefaultHasher::new`.
fn term(of: impl Hash) -> Term {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

pub fn meaning(g: &Graph) -> Meaning {
    let mut terms: Vec<Term> = vec![0; g.values.len()];
    for (v, value) in g.values() {
        terms[v.index()] = match value.spec.role {
            // A copy in another space; its term follows with its node.
            _ if value.def != Def::Source => 0,
            Role::Input => term(("input", g.inputs.iter().find(|(_, i)| *i == v).map(|(name, _)| name))),
            Role::Param(p) => term(("param", pieces(&g.params[p.index()].pieces))),
            // States are identified by the position of their update.
            Role::State(_) => term(("state", g.updates.iter().position(|(s, _)| *s == v))),
            Role::Activation | Role::Grad => 0,
        };
    }
    for node in &g.nodes {
        for (k, out) in node.outputs.iter().enumerate() {
            let Some(v) = *out else { continue };
            let ins: Vec<Term> = node.inputs.iter().map(|i| terms[i.index()]).collect();
            terms[v.index()] = if let Op::Linear(linear) = node.op {
                linear_term(g, &node.inputs, &ins, linear)
            } else if let Op::Attention(a) = node.op {
                term(("attention", attention_terms(g, &terms, &node.inputs, a), k))
            } else if let Op::Add(_) = node.op {
                sum(ins[0], ins[1])
            } else if let Op::Move(_) = node.op {
                ins[0]
            } else if let Op::Gelu(_) = node.op {
                term(("gelu", ins[0]))
            } else {
                term((format!("{:?}", node.op), ins, k))
            };
        }
    }
    let shape = |v: &ValueId| shape(g.spec(*v));
    Meaning {
        inputs: g.inputs.iter().map(|(n, v)| (n.clone(), shape(v))).collect(),
        outputs: g.outputs.iter().map(|(role, v)| (role.clone(), terms[v.index()], shape(v))).collect(),
        updates: g.updates.iter().map(|(s, n)| (terms[s.index()], terms[n.index()], shape(s))).collect(),
    }
}

/// Shape and element type; the layout is excluded because it depends on the target.
fn shape(spec: &TensorSpec) -> String {
    format!("{:?} {:?}", spec.shape, spec.dtype)
}

fn pieces(pieces: &[plimsoll_graph::ParamPiece]) -> Term {
    term(pieces.iter().map(|p| (p.tensor.clone(), p.shape.clone(), p.rows)).collect::<Vec<_>>())
}

fn sum(a: Term, b: Term) -> Term {
    term(("add", a.min(b), a.max(b)))
}

fn linear_term(g: &Graph, inputs: &[ValueId], ins: &[Term], linear: Linear) -> Term {
    let operands = 2 + usize::from(linear.bias);
    let plain = term(("rows", plain_terms(g, &inputs[..operands], rows_of(linear, ins))));
    match linear.epilogue {
        Epilogue::None => plain,
        Epilogue::Gelu => term(("gelu", plain)),
        Epilogue::Residual => sum(plain, ins[operands]),
        Epilogue::Gate | Epilogue::SiluGate => {
            let gate = linear.epilogue.gate().map(|activation| Op::Glu(Glu { activation }));
            term((format!("{:?}", gate.expect("a gate")), vec![plain], 0_usize))
        }
    }
}

/// Term of the left operand of a linear's matmul: x, or its fused layer norm.
fn rows_of(linear: Linear, ins: &[Term]) -> Term {
    match linear.prologue {
        Prologue::None => ins[0],
        Prologue::LayerNorm(norm) => {
            let operands = [&ins[..1], &ins[linear.norm_at()..]].concat();
            term((format!("{:?}", Op::LayerNorm(norm)), operands, 0_usize))
        }
    }
}

/// Terms of the linears with x and each of the concatenated weights.
fn plain_terms(g: &Graph, inputs: &[ValueId], x: Term) -> Vec<Term> {
    let parts = |v: ValueId| -> Vec<Term> {
        match g.spec(v).role {
            Role::Param(p) => {
                g.params[p.index()].pieces.iter().map(|p| pieces(std::slice::from_ref(p))).collect()
            }
            Role::Input | Role::State(_) | Role::Activation | Role::Grad => vec![term(v)],
        }
    };
    let weights: Vec<Vec<Term>> = inputs[1..].iter().map(|&v| parts(v)).collect();
    (0..weights[0].len()).map(|i| term((x, weights.iter().map(|w| w[i]).collect::<Vec<_>>()))).collect()
}

/// Terms of an attention: its options, q, k and v, fused or separate, and its other inputs.
fn attention_terms(g: &Graph, terms: &[Term], inputs: &[ValueId], a: Attention) -> Vec<Term> {
    let mut all = vec![term(format!("{:?}", Attention { qkv: Qkv::Separate, ..a }))];
    let fused = a.qkv == Qkv::Fused;
    match g.value(inputs[0]).def {
        Def::Node(id, _) if fused => {
            let node = g.node(id);
            let ins: Vec<Term> = node.inputs.iter().map(|v| terms[v.index()]).collect();
            let Op::Linear(linear) = node.op else { unreachable!("{} makes q, k and v", node.op.name()) };
            let operands = 2 + usize::from(linear.bias);
            all.extend(
                plain_terms(g, &node.inputs[..operands], rows_of(linear, &ins))
                    .into_iter()
                    .map(|part| term(("rows", vec![part]))),
            );
        }
        Def::Node(..) | Def::Source => all.extend(inputs[..a.operands()].iter().map(|v| terms[v.index()])),
    }
    all.extend(inputs[a.operands()..].iter().map(|v| terms[v.index()]));
    all
}
