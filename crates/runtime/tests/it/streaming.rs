//! Streamed weights: reading the parameters of a model in every step allocates no memory.

use plimsoll_data::weights::HubEnv;
use plimsoll_graph::{Bounds, Layout};
use plimsoll_models::Output;
use plimsoll_runtime::{EncoderModel, Silent};
use plimsoll_testing::fixture;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;

#[global_allocator]
pub static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The allocation counter sees all threads of the process, including those of tests that run concurrently. One read
/// without a counted allocation proves that reading does not allocate, so the read is repeated until that happens.
#[test]
fn a_source_reads_what_the_model_reads_and_allocates_nothing() {
    for name in ["esm2", "dnabert_s"] {
        let path = fixture("goldens").join(name).display().to_string();
        let model = EncoderModel::open(&path, &HubEnv::from_process(), &mut Silent).expect("a golden model");
        let bounds = Bounds { tokens: 8, sequences: 1, longest: 8, packs: 1 };
        let graph = model.encoder.graph(bounds, &[Output::Mean]).expect("verified");
        let mut source = model.source(&graph);
        for (v, _, param) in graph.param_values() {
            let spec = graph.spec(v);
            assert_eq!(spec.layout, Layout::RowMajor);
            let elements = spec.elements_at(bounds.full());
            let mut wanted = vec![0.0; elements as usize];
            model.read(param, 0..elements, &mut wanted).expect("read");
            // Starts in the middle of the parameter, because streamed parameters are read in several ranges.
            let (start, mut found) = (elements / 2, vec![0.0; (elements - elements / 2) as usize]);
            let mut read = || {
                let region = Region::new(ALLOCATOR);
                source(param, start..elements, &mut found).expect("read");
                region.change().allocations
            };
            let quiet = (0..100_000).any(|_| read() == 0);
            assert!(quiet, "{name}: reading {} allocates", param.name);
            assert!(found == wanted[start as usize..], "{name}: {}", param.name);
        }
    }
}
