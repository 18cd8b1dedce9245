//! Staging buffers for in-flight steps, and replicas: addresses in the arena and entries in the ledger.

use plimsoll_graph::{Bytes, Space};
use plimsoll_models::{Output, known};
use plimsoll_plan::{Direction, Policy, Program, Staging, Target, Weights, compile};

fn program_of(model: &str, target: &str, weights: Weights) -> Program {
    let target = Target::named(target).expect("built in");
    let bounds = plimsoll_graph::Bounds { tokens: 1000, sequences: 7, longest: 500, packs: 1 };
    let encoder = known(model).expect("known");
    let graph = encoder.graph(bounds, &[Output::Mean]).expect("verified");
    let plan = compile(&graph, &Policy { weights, ..Policy::default() }, &target).expect("planned");
    let staging = Staging { label: "embeddings".to_owned(), bytes: Bytes(1000) };
    Program::new(target, vec![("encoder".to_owned(), plan)], vec![staging])
}

fn program(target: &str, weights: Weights) -> Program {
    program_of("facebook/esm2_t6_8M_UR50D", target, weights)
}

#[test]
fn open_steps_have_places_of_their_own_in_the_ledger() {
    let bare = program("h200", Weights::Resident);
    // Inputs: token ids and spans; outputs: means. Each is padded to a multiple of 256 bytes.
    let (inputs, outputs) = (4096 + 256, 4 * 320 * 7);
    for depth in [2, 3, 5] {
        let buffered = bare.clone().with_pipeline_depth(depth);
        let each = |step: u64| Bytes(step * depth as u64);
        assert_eq!(buffered.depth(), depth);
        assert_eq!(buffered.ledger().get("staging: inputs ahead"), each(inputs));
        assert_eq!(buffered.ledger().get("staging: outputs waiting"), each(outputs));
        // The driver keeps 8 bytes on the card for each pinned page of 4 KiB.
        let tables = Bytes((each(inputs) + each(outputs)).0.div_ceil(512));
        assert_eq!(buffered.ledger().get("reserved: page tables of pinned host memory"), tables);
        assert_eq!(buffered.peak(), bare.peak() + each(inputs) + each(outputs) + tables);
        assert_eq!(buffered.ledger().total(), buffered.peak());
        assert_ne!(buffered.digest().expect("saved"), bare.digest().expect("saved"));
        let place = |n, way| buffered.in_flight_place(n, way).expect("a place");
        let first = buffered.staging_address(1);
        for n in 0..2 * depth as u64 {
            let slot = n % depth as u64;
            let (input, output) = (place(n, Direction::In), place(n, Direction::Out));
            assert_eq!(input.arena.at, first + slot * inputs);
            assert_eq!(output.arena.at, first + each(inputs).0 + slot * outputs);
            // The same in pinned host memory, which holds nothing else.
            assert_eq!((input.host.space, output.host.space), (Space::Host, Space::Host));
            assert_eq!(input.host.at, slot * inputs);
            assert_eq!(output.host.at, each(inputs).0 + slot * outputs);
        }
        assert_eq!(buffered.space_bytes(Space::Host), each(inputs) + each(outputs));
        assert_eq!(buffered.space_ledger(Space::Host).total(), buffered.space_bytes(Space::Host));
        assert_eq!(buffered.space_bytes(Space::File), Bytes::ZERO);
        assert_eq!(buffered.clone().with_pipeline_depth(depth), buffered, "once is enough");
        assert_eq!(buffered.with_pipeline_depth(1).arena_bytes(), bare.arena_bytes());
    }
}

/// Replicas share the weights; each has its own staging and transient region.
#[test]
fn replicas_are_in_the_ledger() {
    let one = program("cpu", Weights::Resident);
    let each = one.arena_bytes() - one.persistent();
    assert!(each > Bytes::ZERO && one.persistent() > each);
    for (replicas, label) in [(2, "1 replica beside the first"), (5, "4 replicas beside the first")] {
        let several = one.clone().with_replicas(replicas);
        let more = Bytes(each.0 * (replicas as u64 - 1));
        assert_eq!(several.replicas(), replicas);
        assert_eq!(several.arena_bytes(), one.arena_bytes());
        assert_eq!(several.peak(), one.peak() + more);
        assert_eq!(several.ledger().total(), several.peak());
        assert_eq!(several.ledger().get(label), more);
        assert!(several.lower_bound() > one.lower_bound() && several.lower_bound() <= several.peak());
        assert_ne!(several.digest().expect("saved"), one.digest().expect("saved"));
        assert_eq!(several.with_replicas(1), one);
    }
}

/// Streamed weights lie in host memory before the buffers of in-flight steps, or in a file, from which they pass through host
/// memory.
#[test]
fn streamed_weights_are_in_the_ledger_of_their_space() {
    let of = |weights| program("h200", weights).with_pipeline_depth(2);
    let resident = of(Weights::Resident);
    let in_flight = resident.space_bytes(Space::Host);
    let params = resident.ledger().get("params");
    for weights in crate::cases::streamed(&Target::named("h200").expect("built in")) {
        let Weights::Streamed { from, prefetch } = weights else { panic!("{weights:?}") };
        let streamed = of(weights);
        let ledgers = [Space::Host, Space::File].map(|space| streamed.space_ledger(space));
        for (space, ledger) in [Space::Host, Space::File].iter().zip(&ledgers) {
            assert_eq!(ledger.total(), streamed.space_bytes(*space), "{weights:?}");
            assert_eq!(ledger.get("params") > Bytes::ZERO, *space == from, "{weights:?}");
        }
        let [host, file] = &ledgers;
        assert_eq!(host.get("inputs and outputs of steps in flight"), in_flight);
        // A parameter that two nodes read lies there once. Padding of packed layouts may differ.
        let kept = if from == Space::Host { host } else { file };
        assert!(kept.get("params").0.abs_diff(params.0) < params.0 / 100, "{kept}");
        let passing = host.get("copies on their way");
        assert_eq!(passing > Bytes::ZERO, from == Space::File, "{host}");
        assert!(passing < params && (prefetch || passing.0 < params.0 / 4), "{host}");
        let place = streamed.in_flight_place(0, Direction::In).expect("a place");
        assert_eq!(Bytes(place.host.at) + in_flight, streamed.space_bytes(Space::Host));
    }
}

#[test]
fn where_the_arena_is_the_hosts_memory_steps_need_no_staging() {
    let bare = program("cpu", Weights::Resident);
    assert_eq!(bare.clone().with_pipeline_depth(4), bare);
    assert_eq!(
        (bare.depth(), bare.space_bytes(Space::Host), bare.in_flight_place(0, Direction::In)),
        (1, Bytes::ZERO, None)
    );
}
