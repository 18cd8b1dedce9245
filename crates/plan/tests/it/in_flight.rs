//! Staging buffers for in-flight steps, and replicas: addresses in the arena and entries in the ledger.

use plimsoll_graph::Bytes;
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
        assert_eq!(buffered.peak(), bare.peak() + each(inputs) + each(outputs));
        assert_eq!(buffered.ledger().total(), buffered.peak());
        assert_ne!(buffered.digest().expect("saved"), bare.digest().expect("saved"));
        let (of, first) =
            (|n, way| buffered.in_flight_address(n, way).expect("a place"), buffered.staging_address(1));
        for n in 0..2 * depth as u64 {
            assert_eq!(of(n, Direction::In), first + n % depth as u64 * inputs);
            assert_eq!(of(n, Direction::Out), first + each(inputs).0 + n % depth as u64 * outputs);
        }
        let one_more = |step: u64| Bytes(step * (depth as u64 + 1));
        // The host buffers also hold pieces of weights that are transferred to the arena, 4 MiB in total.
        assert_eq!(buffered.host_staging(), [one_more(inputs) + Bytes(4 << 20), one_more(outputs)]);
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

#[test]
fn streamed_weights_travel_through_the_hosts_memory() {
    // Elements of the largest weight: the first linear of the MLP.
    const WIDEST: u64 = 640 * 2560;
    let of = |weights| program_of("facebook/esm2_t30_150M_UR50D", "h200", weights).with_pipeline_depth(2);
    let [resident, streamed] = [Weights::Resident, Weights::Streamed].map(of);
    let [of_resident, of_streamed] = [resident.host_staging(), streamed.host_staging()];
    assert_eq!(of_streamed[1], of_resident[1]);
    // Streaming buffers two weights of the largest size instead of four pieces.
    assert_eq!(of_streamed[0].0 + (4 << 20), of_resident[0].0 + 2 * 4 * WIDEST);
}

#[test]
fn where_the_arena_is_the_hosts_memory_steps_need_no_staging() {
    let bare = program("cpu", Weights::Resident);
    assert_eq!(bare.clone().with_pipeline_depth(4), bare);
    assert_eq!(
        (bare.depth(), bare.host_staging(), bare.in_flight_address(0, Direction::In)),
        (1, [Bytes::ZERO; 2], None)
    );
}
