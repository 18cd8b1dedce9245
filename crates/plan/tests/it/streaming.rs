//! Tests of streamed weights: memory saved, predicted cost, and when streaming is chosen.

use crate::cases::{MEAN, bill, bounds, encoder, plan, streamed_plan, target, waste_permille, with_updates};
use crate::oracle;
use plimsoll_graph::ops::Embed;
use plimsoll_graph::{Builder, Bytes, DType, Dim, Graph, Op, Role};
use plimsoll_models::KNOWN;
use plimsoll_plan::{
    Instr, Plan, PlanError, Policy, Program, Region, Search, Streaming, Weights, check, compile, fit,
};
use std::time::{Duration, Instant};

const ID: &str = "facebook/esm2_t12_35M_UR50D";

fn alone(plan: Plan, target_name: &str) -> Program {
    Program::new(target(target_name), vec![("encoder".to_owned(), plan)], vec![])
}

fn model(id: &str, tokens: u64) -> Graph {
    encoder(id).graph(bounds(tokens), MEAN).expect("verified")
}

fn params(p: &Plan) -> Bytes {
    let bytes = |v: &plimsoll_graph::Value| match v.spec.role {
        Role::Param(_) => v.spec.bytes(&p.graph.bounds),
        Role::Input | Role::Activation | Role::Grad | Role::State(_) => Bytes::ZERO,
    };
    p.graph.values.iter().map(bytes).sum()
}

/// For every known model, target and size: the ledger sums to the peak, both checkers accept the plan, no weight is
/// resident, the peak is no higher than with resident weights, and packing wastes less than 2 %.
#[test]
fn streaming_never_takes_more() {
    println!("{:<30} {:<6} {:>6} {:>16} {:>16} waste", "model", "target", "T", "resident", "streamed");
    for (id, _) in KNOWN {
        for target_name in ["cpu", "h200"] {
            for tokens in [128, 1024, 16384] {
                let (graph, t) = (model(id, tokens), target(target_name));
                let resident = alone(plan(&graph, &t), target_name);
                let streamed = alone(streamed_plan(&graph, &t), target_name);
                let p = &streamed.plans()[0].1;
                let waste = waste_permille(&p.memory);
                let peaks = (resident.peak().0, streamed.peak().0);
                println!(
                    "{id:<30} {target_name:<6} {tokens:>6} {:>16} {:>16} {waste:>4} permille",
                    peaks.0, peaks.1
                );
                assert!(peaks.1 <= peaks.0 && waste < 20, "{id} on {target_name} at {tokens}");
                assert_eq!(check(&p.graph, &p.schedule, &p.memory), Ok(()));
                assert_eq!(oracle::fault(p), None);
                assert_eq!(p.memory.persistent, Bytes::ZERO);
                assert_eq!((p.streamed(), resident.streamed()), (params(p), Bytes::ZERO));
                let ledger = streamed.ledger();
                assert_eq!(ledger.total(), streamed.peak(), "{ledger}");
                assert_eq!(ledger.get("params"), Bytes::ZERO, "{ledger}");
                let reading = params(p).0 as f64 / t.rates.storage;
                let slower = streamed.seconds() - resident.seconds();
                assert!((slower - reading).abs() <= 1e-9 * reading, "{slower} s, not {reading} s");
            }
        }
    }
}

/// Only the weights of one node are live at a time.
#[test]
fn one_layer_at_a_time() {
    let graph = model("facebook/esm2_t33_650M_UR50D", 64);
    let streamed = alone(streamed_plan(&graph, &target("cpu")), "cpu");
    let largest = graph.param_values().map(|(v, ..)| graph.spec(v).bytes(&graph.bounds)).max();
    let ledger = streamed.ledger();
    let weights = ledger.get("streamed params");
    assert!(Some(weights) >= largest && Some(Bytes(weights.0 / 2)) < largest, "{ledger}");
    let all = plan(&graph, &target("cpu")).memory.persistent;
    assert!(streamed.peak().0 * 50 < all.0, "{ledger}\n{all} in all");
}

/// Each parameter is loaded immediately before its reader, once per reader; states stay resident.
#[test]
fn loads_stand_before_their_readers() {
    for graph in [model(ID, 256), with_updates()] {
        let p = streamed_plan(&graph, &target("cpu"));
        let mut waiting = vec![];
        for instr in &p.schedule.instrs {
            match *instr {
                Instr::Load(v) => waiting.push(v),
                Instr::Launch(id) => {
                    let reads = &p.graph.node(id).inputs;
                    assert!(waiting.drain(..).all(|v| reads.contains(&v)));
                }
                Instr::Copy { .. } => assert!(waiting.is_empty()),
            }
        }
        for (v, value) in p.graph.values() {
            let loads = p.schedule.loads().filter(|&loaded| loaded == v).count();
            let region = p.memory.slice(v).map(|s| s.region);
            match value.spec.role {
                Role::Param(_) => assert_eq!((loads, region), (1, Some(Region::Transient))),
                Role::State(_) => assert_eq!((loads, region), (0, Some(Region::Persistent))),
                Role::Input | Role::Activation | Role::Grad => assert_eq!(loads, 0),
            }
        }
    }
}

/// The peak may be at a load: an in-place op needs no more memory than is live after its last load.
#[test]
fn a_peak_may_fall_at_a_load() {
    let mut g = Builder::new(bounds(64));
    let (ids, table) = (g.input("ids", &[Dim::Tokens(1)], DType::I32), g.param("table", &[1, 512]));
    let x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
    let y = g.layer_norm(x, "norm", 1e-5);
    g.output("y", y);
    let program = alone(streamed_plan(&g.finish().expect("verified"), &target("null")), "null");
    assert_eq!(program.peak_at().1, "load of norm.bias");
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
    assert_ne!(digest(Weights::Resident), digest(Weights::Streamed));
    let text = serde_json::to_string(&streamed_plan(&graph, &t)).expect("saved");
    assert!(text.contains(r#"{"load":"#), "the saved plan says what is loaded");
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
    Search { floor: 512, ceiling: 4096, step: 128, budget }
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
    let (widest, floor) = (peak(1 << 16, Weights::Streamed), peak(512, Weights::Streamed));
    assert!(floor < least && least < enough && enough < widest);
    type Outcome<'a> = Result<(u64, bool), &'a [&'a str]>;
    let cases: &[(Option<u64>, Bytes, Streaming, Outcome<'_>)] = &[
        (None, enough, Auto, Ok((4096, false))),
        (None, widest, Auto, Ok((4096, false))),
        (None, least, Auto, Ok((512, false))),
        (None, floor, Auto, Ok((512, true))),
        (None, less(floor), Auto, Err(&[])),
        (None, least, Never, Ok((512, false))),
        (None, less(least), Never, Err(&["--stream-weights always"])),
        (None, less(floor), Never, Err(&[])),
        (None, widest, Always, Ok((1 << 16, true))),
        (None, floor, Always, Ok((512, true))),
        (None, less(floor), Always, Err(&[])),
        (Some(4096), enough, Auto, Ok((4096, false))),
        (Some(4096), less(enough), Auto, Err(&["--tokens 3968", "--stream-weights always"])),
        (Some(4096), less(enough), Always, Ok((4096, true))),
        (Some(512), less(least), Auto, Ok((512, true))),
        (Some(4096), floor, Auto, Err(&["--tokens 512"])),
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
                let flags: Vec<&str> = refused.remedies.iter().map(|r| r.flag.as_str()).collect();
                assert_eq!(flags, *wanted, "{what}");
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
    assert!(program.peak() <= below && peak(tokens + 128, Weights::Streamed) > below, "{tokens} tokens");
}

/// The bill of a search states the memory of the smallest streamed step, with which it would succeed.
#[test]
fn the_bill_names_the_streamed_minimum() {
    let floor = peak(512, Weights::Streamed);
    let refused = bill(fit(None, search(Bytes(1000)), Streaming::Auto, &mut build));
    assert_eq!(refused.ledger.total(), floor);
    assert!(refused.to_string().ends_with(&format!("--memory-budget {} or more", floor.0)), "{refused}");
}

#[test]
fn streaming_is_priced() {
    let budget = Bytes(peak(512, Weights::Resident).0 - 1);
    let refused = bill(fit(Some(512), search(budget), Streaming::Never, &mut build));
    let [remedy] = &refused.remedies[..] else { panic!("{refused}") };
    let (resident, streamed) = (build(512, Weights::Resident), build(512, Weights::Streamed));
    let (resident, streamed) = (resident.expect("planned"), streamed.expect("planned"));
    assert_eq!(remedy.saves, resident.peak() - streamed.peak());
    let reading = streamed.streamed().0 as f64 / streamed.target().rates.storage;
    assert!((remedy.slower - reading / resident.seconds()).abs() < 1e-9, "{refused}");
    assert!(refused.to_string().contains("--stream-weights always  saves "), "{refused}");
}
