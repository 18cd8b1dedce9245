//! Tests of the memory of programs whose values share less memory.

use crate::training::{ADAM, language_model, program, training};
use plimsoll_plan::{Optimizer, Sharing};

#[test]
fn every_kind_of_sharing_saves_memory() {
    let graph = language_model(6, 64, 96, 64);
    for accumulation in [1, 2] {
        let t = plimsoll_plan::Training { accumulation, ..training(Optimizer::AdamW(ADAM)) };
        let program = program(&t, &graph).expect("planned");
        for less in Sharing::ALL {
            let peak = program.peak_without(less).expect("planned");
            assert!(peak >= program.peak(), "{less:?}, {accumulation}: {peak}, {}", program.peak());
        }
        let apart = program.peak_without(Sharing::Lifetimes).expect("planned");
        assert!(apart > program.peak(), "{apart}");
    }
    // A step of few tokens needs most memory in the update, where new states then have bytes of their own.
    let t = plimsoll_plan::Training { accumulation: 2, ..training(Optimizer::AdamW(ADAM)) };
    let program = program(&t, &language_model(6, 64, 96, 4)).expect("planned");
    let copied = program.peak_without(Sharing::States).expect("planned");
    assert!(copied > program.peak(), "{copied} {}", program.peak());
}
