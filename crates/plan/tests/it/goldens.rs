//! Each pass before and after, as text. With PLIMSOLL_BLESS=1 the goldens are written instead of compared.

use crate::cases::{MEAN, bounds, gradients, mlp, narrow, state, target};
use graph::ops::SelectRows;
use graph::{Builder, DType, Dim, Graph, Op};
use models::Output;
use plimsoll_plan::{Precision, Weights, passes};
use std::path::Path;

fn golden(name: &str, before: &Graph, after: &Graph) {
    for graph in [before, after] {
        graph.verify().unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let text = format!("before\n{before}\nafter {name}\n{after}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(format!("{name}.txt"));
    if std::env::var_os("PLIMSOLL_BLESS").is_some_and(|v| v == "1") {
        std::fs::write(&path, &text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        return;
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(text == wanted, "{name} differs; if it should, bless it.\n\nfound\n{text}\n\nwanted\n{wanted}");
}

#[test]
fn autodiff() {
    let before = mlp(bounds(64));
    let policy = gradients().autodiff.expect("gradients");
    golden("autodiff", &before, &passes::autodiff(&before, &policy).expect("differentiable"));
}

#[test]
fn fuse_esm2() {
    let before = narrow("facebook/esm2_t6_8M_UR50D", 1).graph(bounds(64), MEAN).expect("verified");
    golden("fuse_esm2", &before, &passes::fuse(before.clone(), Weights::Resident));
}

#[test]
fn fuse_dnabert_s() {
    let before = narrow("zhihan1996/DNABERT-S", 1).graph(bounds(64), MEAN).expect("verified");
    golden("fuse_dnabert_s", &before, &passes::fuse(before.clone(), Weights::Resident));
}

/// Statistics of a norm, a branch, its weights and a state that nobody reads go; inputs stay.
#[test]
fn dce() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    g.input("unread", &[Dim::Sequences(1)], DType::I32);
    let rows = g.input("rows", &[Dim::Sequences(1)], DType::I32);
    let shape = [Dim::Fixed(2), Dim::Fixed(8)];
    let (kept, _dropped) = (state(&mut g, "s4", &shape), state(&mut g, "s5", &shape));
    let dead = g.linear(x, "dead", 16, true);
    g.gelu(dead);
    let y = g.layer_norm(x, "norm", 1e-5);
    let y = g.one(Op::SelectRows(SelectRows {}), &[y, rows]);
    let new = g.gelu(kept);
    g.output("y", y);
    g.update(kept, new);
    let before = g.finish().expect("verified");
    golden("dce", &before, &passes::dce(&before));
}

/// A norm and a linear whose parameters have two readers each: the second reads copies. What is an output too
/// keeps all of its readers, and so does what one node reads twice.
#[test]
fn stream() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let mut h = x;
    for _ in 0..2 {
        h = g.layer_norm(h, "norm", 1e-5);
        h = g.linear(h, "fc", 8, true);
    }
    let (kept, twice) = (g.param("kept", &[4, 8]), g.param("twice", &[4, 8]));
    let (a, b) = (g.gelu(kept), g.add(twice, twice));
    let sum = g.add(a, b);
    let sum = g.add(sum, kept);
    for (name, v) in [("y", h), ("kept", kept), ("sum", sum)] {
        g.output(name, v);
    }
    let before = g.finish().expect("verified");
    golden("stream", &before, &passes::stream(&before));
}

#[test]
fn mlp_of_esm2() {
    let graph = narrow("facebook/esm2_t6_8M_UR50D", 1).graph(bounds(64), MEAN).expect("verified");
    let narrow = passes::inference(&graph, Precision::Bf16).expect("inference");
    let before = passes::fuse(narrow.clone(), Weights::Resident);
    golden("mlp", &before, &passes::mlp(&before));
}

/// The tied embedding stays in rows for the lookup and has a packed copy for the logits.
#[test]
fn layout() {
    let encoder = narrow("facebook/esm2_t6_8M_UR50D", 1);
    let before =
        passes::fuse(encoder.graph(bounds(64), &[Output::Logits]).expect("verified"), Weights::Resident);
    golden("layout", &before, &passes::layout(&before, &target("cpu")).expect("packed"));
}
