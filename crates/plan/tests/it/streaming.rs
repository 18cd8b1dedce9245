//! Tests of streamed weights: memory saved, predicted cost, and when streaming is chosen.

use crate::cases::{
    FROM_FILE, MEAN, bill, bounds, encoder, plan, streamed, streamed_plan, target, waste_permille, with_updates,
};
use plimsoll_graph::ops::Embed;
use plimsoll_graph::{Builder, Bytes, DType, Def, Dim, Graph, Op, Role, Space, ValueId};
use plimsoll_models::KNOWN;
use plimsoll_plan::{
    Instr, Plan, PlanError, Policy, Program, Region, Remedy, Room, Search, Streaming, Weights, check, compile,
    fit, node_seconds,
};
use std::time::{Duration, Instant};

const ID: &str = "facebook/esm2_t12_35M_UR50D";

fn alone(plan: Plan, target_name: &str) -> Program {
    Program::new(target(target_name), vec![("encoder".to_owned(), plan)], vec![])
}

fn model(id: &str, tokens: u64) -> Graph {
    encoder(id).graph(bounds(tokens), MEAN).expect("verified")
}

/// Bytes of the copies of parameters that a step fetches.
fn params(p: &Plan) -> Bytes {
    let is_fetched = |v: &&plimsoll_graph::Value| {
        matches!(v.spec.role, Role::Param(_)) && v.def != Def::Source && v.spec.space == Space::Device
    };
    p.graph.values.iter().filter(is_fetched).map(|v| v.spec.bytes(&p.graph.bounds)).sum()
}

/// For every known model, target, size and way to stream: the ledger sums to the peak, both checkers accept the plan, no weight
/// is resident, the peak is no higher than with resident weights, packing wastes less than 3 %, and the expected time is at
/// least that of the kernels and of the copies, and at most their sum.
#[test]
fn streaming_never_takes_more() {
    println!("{:<30} {:<6} {:>6} {:>16} {:>16} waste", "model", "target", "T", "resident", "streamed");
    for (id, _) in KNOWN {
        for target_name in ["cpu", "h200"] {
            for tokens in [128, 1024, 16384] {
                let (graph, t) = (model(id, tokens), target(target_name));
                let resident = alone(plan(&graph, &t), target_name);
                for weights in streamed(&t) {
                    let policy = Policy { weights, ..Policy::default() };
                    let streamed = alone(compile(&graph, &policy, &t).expect("planned"), target_name);
                    let p = &streamed.plans()[0].1;
                    let waste = waste_permille(&p.memory);
                    let peaks = (resident.peak().0, streamed.peak().0);
                    let what = format!("{id} on {target_name} at {tokens}, {weights:?}");
                    println!("{:>16} {:>16} {waste:>4} permille: {what}", peaks.0, peaks.1);
                    assert!(peaks.1 <= peaks.0 && waste < 30, "{what}: {peaks:?} {waste}");
                    assert_eq!(check(&p.graph, &p.schedule, &p.memory), Ok(()));
                    assert_eq!(p.memory.device.persistent, Bytes::ZERO);
                    assert_eq!((p.streamed(), resident.streamed()), (params(p), Bytes::ZERO));
                    let ledger = streamed.ledger();
                    assert_eq!(ledger.total(), streamed.peak(), "{ledger}");
                    assert_eq!(ledger.get("params"), Bytes::ZERO, "{ledger}");
                    let moves = p.graph.nodes.iter().filter(|node| node.op.name() == "move");
                    let seconds = moves.map(|node| node_seconds(&p.graph, node, &t, p.graph.bounds.full()));
                    let copies: f64 = seconds.sum();
                    let (alone, both) = (resident.seconds(), streamed.seconds());
                    let longest = alone.max(copies / 2.0) * (1.0 - 1e-9);
                    assert!((longest..=(alone + copies) * (1.0 + 1e-9)).contains(&both), "{what}: {both} s");
                }
            }
        }
    }
}

/// Without copying ahead only the weights of one node are live at a time; with it those of about two layers.
#[test]
fn one_node_or_two_layers_at_a_time() {
    let graph = model("facebook/esm2_t33_650M_UR50D", 64);
    let t = target("cpu");
    let largest = graph.param_values().map(|(v, ..)| graph.spec(v).bytes(&graph.bounds)).max();
    let all = plan(&graph, &t).memory.device.persistent;
    for (weights, most, least_saving) in [
        (Weights::Streamed { from: Space::File, prefetch: false }, 2, 50),
        (Weights::Streamed { from: Space::File, prefetch: true }, 9, 12),
    ] {
        let policy = Policy { weights, ..Policy::default() };
        let streamed = alone(compile(&graph, &policy, &t).expect("planned"), "cpu");
        let ledger = streamed.ledger();
        let bytes = ledger.get("streamed params");
        assert!(Some(bytes) >= largest && Some(Bytes(bytes.0 / most)) < largest, "{ledger}");
        assert!(streamed.peak().0 * least_saving < all.0, "{ledger}\n{all} in all");
    }
}

/// Each parameter is copied once for each reader, in the order of the readers, and is complete before its reader; states stay
/// resident.
#[test]
fn copies_come_before_their_readers() {
    for (graph, weights) in [model(ID, 256), with_updates()]
        .into_iter()
        .flat_map(|graph| streamed(&target("cpu")).into_iter().map(move |weights| (graph.clone(), weights)))
    {
        let policy = Policy { weights, ..Policy::default() };
        let p = compile(&graph, &policy, &target("cpu")).expect("planned");
        let mut complete: Vec<ValueId> = vec![];
        for (i, instr) in p.schedule.instrs.iter().enumerate() {
            match *instr {
                Instr::Start(id) if weights == AT_ONCE => {
                    // Between the start and its reader are only moves.
                    let result = p.graph.node(id).outputs[0].expect("a result");
                    if p.graph.updates.iter().any(|(_, new)| *new == result) {
                        continue;
                    }
                    let reader = p.schedule.instrs[i..].iter().find(|i| matches!(i, Instr::Launch(_)));
                    let Some(Instr::Launch(reader)) = reader else { panic!("nobody reads it") };
                    assert!(p.graph.node(*reader).inputs.contains(&result));
                }
                Instr::Start(_) => {}
                Instr::Wait(id) => complete.extend(p.graph.node(id).outputs[0]),
                Instr::Launch(id) => {
                    let params = |v: &&ValueId| matches!(p.graph.spec(**v).role, Role::Param(_));
                    assert!(p.graph.node(id).inputs.iter().filter(params).all(|v| complete.contains(v)));
                }
            }
        }
        for (v, value) in p.graph.values() {
            let slice = p.memory.slice(v).expect("a slice");
            let place = (slice.space, slice.region);
            match value.spec.role {
                Role::Param(_) if value.def == Def::Source => {
                    assert_eq!(place, (Space::File, Region::Persistent))
                }
                Role::Param(_) => assert_eq!(place, (Space::Device, Region::Transient)),
                Role::State(_) => assert_eq!(place, (Space::Device, Region::Persistent)),
                Role::Input | Role::Activation | Role::Grad => assert_eq!(slice.space, Space::Device),
            }
        }
    }
}

/// Weights that are copied directly before their reader.
const AT_ONCE: Weights = Weights::Streamed { from: Space::File, prefetch: false };

/// The peak may be at a move: an in-place op needs no more memory than is live after its last operand has arrived.
#[test]
fn a_peak_may_fall_at_a_move() {
    let mut g = Builder::new(bounds(64));
    let (ids, table) = (g.input("ids", &[Dim::Tokens(1)], DType::I32), g.param("table", &[1, 512]));
    let x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
    let y = g.layer_norm(x, "norm", 1e-5);
    g.output("y", y);
    let policy = Policy { weights: AT_ONCE, ..Policy::default() };
    let plan = compile(&g.finish().expect("verified"), &policy, &target("null")).expect("planned");
    let program = alone(plan, "null");
    assert_eq!(program.peak_at().1, "move norm.bias");
    let ledger = program.ledger();
    assert_eq!((ledger.total(), ledger.get("streamed params")), (program.peak(), Bytes(2 * 512 * 4)));
}

#[test]
fn the_policy_changes_the_digest() {
    let (graph, t) = (model(ID, 256), target("cpu"));
    let digest = |weights| {
        let plan = compile(&graph, &Policy { weights, ..Policy::default() }, &t).expect("planned");
        alone(plan, "cpu").digest().expect("hashed")
    };
    let all = [Weights::Resident, FROM_FILE, AT_ONCE].map(digest);
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{all:?}");
    let text = serde_json::to_string(&streamed_plan(&graph, &t)).expect("saved");
    assert!(text.contains(r#"{"start":"#) && text.contains(r#"{"wait":"#), "the saved plan has its moves");
}

#[test]
fn streaming_plans_of_the_largest_model_are_quick() {
    let graph = model("facebook/esm2_t48_15B_UR50D", 65536);
    let start = Instant::now();
    streamed_plan(&graph, &target("cpu"));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

fn build(tokens: u64, weights: Weights) -> Result<Program, PlanError> {
    let policy = Policy { weights, ..Policy::default() };
    Ok(alone(compile(&model(ID, tokens), &policy, &target("cpu"))?, "cpu"))
}

fn search(budget: Bytes) -> Search {
    Search { floor: 512, ceiling: 4096, step: 128, budget, room: Room::UNLIMITED }
}

fn peak(tokens: u64, weights: Weights) -> Bytes {
    build(tokens, weights).expect("planned").peak()
}

fn tokens_of(program: &Program) -> u64 {
    program.plans()[0].1.graph.bounds.tokens
}

/// Cases (requested tokens, budget, streaming option) -> (tokens, whether weights are streamed), or the flags of the
/// remedies.
#[test]
fn resident_as_long_as_a_step_fits() {
    use Streaming::{Always, Auto, Never};
    let less = |bytes: Bytes| Bytes(bytes.0 - 1);
    let (enough, least) = (peak(4096, Weights::Resident), peak(512, Weights::Resident));
    let (widest, floor) = (peak(1 << 16, FROM_FILE), peak(512, AT_ONCE));
    assert!(floor < least && least < enough && enough < widest);
    type Outcome<'a> = Result<(u64, bool), &'a [&'a str]>;
    let cases: &[(Option<u64>, Bytes, Streaming, Outcome<'_>)] = &[
        (None, enough, Auto, Ok((4096, false))),
        (None, widest, Auto, Ok((4096, false))),
        (None, least, Auto, Ok((512, false))),
        (None, floor, Auto, Ok((512, true))),
        (None, less(floor), Auto, Err(&[])),
        (None, least, Never, Ok((512, false))),
        (None, less(least), Never, Err(&["stream_weights=always"])),
        (None, less(floor), Never, Err(&[])),
        (None, widest, Always, Ok((1 << 16, true))),
        (None, floor, Always, Ok((512, true))),
        (None, less(floor), Always, Err(&[])),
        (Some(4096), enough, Auto, Ok((4096, false))),
        (Some(4096), less(enough), Auto, Err(&["tokens=3968", "stream_weights=always"])),
        (Some(4096), less(enough), Always, Ok((4096, true))),
        (Some(512), less(least), Auto, Ok((512, true))),
        (Some(4096), floor, Auto, Err(&["tokens=512"])),
        (Some(4096), floor, Never, Err(&[])),
    ];
    for (tokens, budget, stream, wanted) in cases {
        let what = format!("{tokens:?} in {budget}, {stream:?}");
        match (fit(*tokens, search(*budget), *stream, &mut build), wanted) {
            (Ok(program), Ok(wanted)) => {
                assert_eq!((tokens_of(&program), program.streamed() > Bytes::ZERO), *wanted, "{what}");
                assert!(program.peak() <= *budget, "{what}");
            }
            (result, Err(wanted)) => {
                let refused = bill(result);
                let settings: Vec<String> = refused.remedies.iter().map(Remedy::words).collect();
                assert_eq!(settings, *wanted, "{what}");
            }
            (Err(error), Ok(_)) => panic!("{what}: {error}"),
        }
    }
}

/// Immediately below the budget of the smallest resident step, weights are streamed and the step is as large as fits.
#[test]
fn streamed_steps_are_as_large_as_fits() {
    let below = Bytes(peak(512, Weights::Resident).0 - 1);
    let program = fit(None, search(below), Streaming::Auto, &mut build).expect("streamed");
    let tokens = tokens_of(&program);
    assert!(program.streamed() > Bytes::ZERO && tokens > 4096, "{tokens} tokens");
    assert!(program.peak() <= below && peak(tokens + 128, FROM_FILE) > below, "{tokens} tokens");
}

/// The bill of a search states the memory of the smallest streamed step, with which it would succeed.
#[test]
fn the_bill_names_the_streamed_minimum() {
    let floor = peak(512, AT_ONCE);
    let refused = bill(fit(None, search(Bytes(1000)), Streaming::Auto, &mut build));
    assert_eq!(refused.ledger.total(), floor);
    assert!(refused.to_string().ends_with(&format!("memory_budget={} or more", floor.0)), "{refused}");
}

#[test]
fn streaming_is_priced() {
    let budget = Bytes(peak(512, Weights::Resident).0 - 1);
    let refused = bill(fit(Some(512), search(budget), Streaming::Never, &mut build));
    let [remedy] = &refused.remedies[..] else { panic!("{refused}") };
    let (resident, streamed) = (build(512, Weights::Resident), build(512, FROM_FILE));
    let (resident, streamed) = (resident.expect("planned"), streamed.expect("planned"));
    assert_eq!(remedy.saves, resident.peak() - streamed.peak());
    assert!((remedy.slower - (streamed.seconds() / resident.seconds() - 1.0)).abs() < 1e-9, "{refused}");
    assert!(refused.to_string().contains("stream_weights=always  saves "), "{refused}");
}

/// Weights are streamed from host memory if the target has it and it has room, otherwise from a file; without room anywhere
/// the refusal names the space.
#[test]
fn streamed_weights_lie_where_there_is_room() {
    let t = target("h200");
    let mut build = |tokens, weights| {
        let policy = Policy { weights, ..Policy::default() };
        Ok(alone(compile(&model(ID, tokens), &policy, &t)?, "h200"))
    };
    let all = build(512, Weights::Resident).expect("planned").ledger().get("params");
    let none = Bytes::ZERO;
    let much = Bytes(2 * all.0);
    for (room, wanted) in [
        (Room { host: much, file: much }, Some(Space::Host)),
        (Room { host: much, file: none }, Some(Space::Host)),
        // Copies pass through host memory, which needs room for those.
        (Room { host: Bytes(all.0 / 2), file: much }, Some(Space::File)),
        (Room { host: Bytes(all.0 / 2), file: none }, None),
        (Room { host: none, file: much }, None),
    ] {
        let search = Search { room, ..search(Bytes(u64::MAX >> 1)) };
        match (fit(None, search, Streaming::Always, &mut build), wanted) {
            (Ok(program), Some(space)) => {
                assert_eq!(program.weights(), Weights::Streamed { from: space, prefetch: true }, "{room:?}");
            }
            (Err(error @ PlanError::OverRoom { space: Space::Host, .. }), None) => {
                assert!(error.to_string().contains("in host memory"), "{error}");
            }
            (found, wanted) => panic!("{room:?}: {found:?}, not {wanted:?}"),
        }
    }
}
