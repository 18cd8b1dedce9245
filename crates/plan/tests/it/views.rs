//! Tests of plans with views: an update that runs by blocks.

use crate::cases::target;
use crate::training::{language_model, training};
use plimsoll_graph::ops::AdamW;
use plimsoll_graph::{Bytes, NodeId, Op, Space, ValueId};
use plimsoll_plan::{Instr, Offload, Optimizer, Plan, Precision, Region, Training, Window, check};

const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// The micro-step of an embedding of 40 rows of 16 elements, which is updated in blocks of 16, 16 and 8 rows if `block` is
/// the states of 16 rows.
fn planned(block: Option<Bytes>) -> Plan {
    let offload = Offload { optimizer: true, masters: true, to: Space::Host, ..Offload::default() };
    let training = Training {
        precision: Precision::Bf16,
        accumulation: 1,
        max_norm: 0.0,
        offload,
        // Two blocks and what the norm has: one is read while the next one arrives.
        window: Window::Bytes(Bytes(2 * BLOCK.0 + 1024)),
        block,
        ..training(Optimizer::AdamW(ADAM))
    };
    let graph = language_model(0, 16, 40, 64);
    let program = training.program(&graph, &graph, &target("h200")).unwrap_or_else(|e| panic!("{e}"));
    program.plans()[0].1.clone()
}

/// The states of 16 rows: the master copy and two moments in f32.
const BLOCK: Bytes = Bytes(16 * 16 * 4 * 3);

/// The AdamW nodes of the embedding, whose states are matrices.
fn updates(plan: &Plan) -> Vec<NodeId> {
    let is_of_matrix = |node: &plimsoll_graph::Node| {
        matches!(node.op, Op::AdamW(_)) && plan.graph.spec(node.inputs[0]).shape.len() == 2
    };
    plan.graph.nodes().filter(|(_, node)| is_of_matrix(node)).map(|(id, _)| id).collect()
}

fn position(plan: &Plan, wanted: Instr) -> usize {
    plan.schedule.instrs.iter().position(|instr| *instr == wanted).expect("it is scheduled")
}

/// The move that gives a value.
fn fetch(plan: &Plan, v: ValueId) -> NodeId {
    let found = plan.graph.nodes().find(|(_, node)| node.outputs == [Some(v)]);
    let (id, node) = found.expect("it is computed");
    assert!(matches!(node.op, Op::Move(_)), "{v} is no copy");
    id
}

/// The move that reads a value.
fn store(plan: &Plan, v: ValueId) -> NodeId {
    let is_store = |node: &plimsoll_graph::Node| matches!(node.op, Op::Move(_)) && node.inputs == [v];
    plan.graph.nodes().find(|(_, node)| is_store(node)).expect("it is stored").0
}

/// Three blocks: each has its rows of the states in host memory; the next one is fetched and the last one stored while one is
/// updated; and a state in host memory holds its new value part by part.
#[test]
fn an_update_runs_by_blocks() {
    let plan = planned(Some(BLOCK));
    let graph = &plan.graph;
    let blocks = updates(&plan);
    let rows: Vec<u64> =
        blocks.iter().map(|id| graph.spec(graph.node(*id).inputs[0]).rows(graph.bounds.full())).collect();
    assert_eq!(rows, [16, 16, 8]);
    // Operand 0 is the master copy; the moments are operands 2 and 3 and results 1 and 2.
    for (operand, result) in [(0, 0), (2, 1), (3, 2)] {
        let mut start = None;
        for (k, &id) in blocks.iter().enumerate() {
            let node = graph.node(id);
            let fetch = graph.node(fetch(&plan, node.inputs[operand]));
            let store = graph.node(store(&plan, node.outputs[result].expect("a result")));
            let from = plan.memory.slice(fetch.inputs[0]).expect("an address");
            let to = plan.memory.slice(store.outputs[0].expect("a copy")).expect("an address");
            assert_eq!(from, to, "the new rows lie in place of the old ones");
            assert_eq!((from.space, from.region), (Space::Host, Region::Persistent));
            assert_eq!(from.offset - *start.get_or_insert(from.offset), k as u64 * 16 * 16 * 4);
        }
    }
    for pair in blocks.windows(2) {
        let [now, next] = [pair[0], pair[1]];
        let start = position(&plan, Instr::Start(fetch(&plan, graph.node(next).inputs[0])));
        let update = position(&plan, Instr::Launch(now));
        let stored = store(&plan, graph.node(now).outputs[0].expect("a result"));
        let next_update = position(&plan, Instr::Launch(next));
        assert!(start < update, "the next block is fetched before the update of this one ends");
        assert!(
            position(&plan, Instr::Start(stored)) < next_update
                && next_update < position(&plan, Instr::Wait(stored))
        );
    }
    let views = |plan: &Plan| plan.graph.nodes.iter().filter(|node| node.op.is_view()).count();
    assert!(views(&plan) > 0);
    // Updates of small parameters stay whole.
    assert_eq!((updates(&planned(None)).len(), views(&planned(None))), (1, 0));
}

/// A view at another place than its rows is refused, and so is a store before the rows were fetched.
#[test]
fn views_at_wrong_places_are_refused() {
    let plan = planned(Some(BLOCK));
    let refused = |what: &str, plan: &Plan| {
        let error = check(&plan.graph, &plan.schedule, &plan.memory).expect_err(what).to_string();
        assert!(error.contains(what), "{error}, not {what}");
    };
    let views: Vec<ValueId> =
        plan.graph.nodes.iter().filter(|node| node.op.is_view()).filter_map(|node| node.outputs[0]).collect();
    for v in views {
        let mut moved = plan.clone();
        let slice = moved.memory.slices[v.index()].as_mut().expect("an address");
        slice.offset = if slice.offset >= 64 { slice.offset - 64 } else { slice.offset + 64 };
        refused("is no view of", &moved);
    }
    let blocks = updates(&plan);
    let first = store(&plan, plan.graph.node(blocks[0]).outputs[0].expect("a result"));
    let fetched = fetch(&plan, plan.graph.node(blocks[0]).inputs[0]);
    let mut early = plan.clone();
    let from = position(&plan, Instr::Start(first));
    let instr = early.schedule.instrs.remove(from);
    let workspace = early.memory.workspaces.remove(from);
    let to = position(&plan, Instr::Wait(fetched));
    early.schedule.instrs.insert(to, instr);
    early.memory.workspaces.insert(to, workspace);
    refused("does not hold it any more, or not yet", &early);
}
