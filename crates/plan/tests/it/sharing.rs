//! Tests of plans whose values share less memory.

use crate::training::{ADAM, language_model, program, training};
use plimsoll_plan::{Optimizer, Sharing};

#[test]
fn every_kind_of_sharing_saves_memory() {
    let graph = language_model(6, 64, 96, 64);
    for accumulation in [1, 2] {
        let t = plimsoll_plan::Training { accumulation, ..training(Optimizer::AdamW(ADAM)) };
        let program = program(&t, &graph).expect("planned");
        let all = Sharing::default();
        assert_eq!(program.peak_with(all).expect("planned"), program.peak());
        let nothing = Sharing { lifetimes: false, operands: false, states: false };
        let most = program.peak_with(nothing).expect("planned");
        for less in [
            Sharing { lifetimes: false, ..all },
            Sharing { operands: false, ..all },
            Sharing { states: false, ..all },
        ] {
            let peak = program.peak_with(less).expect("planned");
            assert!(peak >= program.peak() && peak <= most, "{less:?}: {peak}");
        }
        let apart = program.peak_with(Sharing { lifetimes: false, ..all }).expect("planned");
        assert!(apart > program.peak(), "{apart}");
        // Every new value of a parameter and a state then has bytes of its own.
        assert!(most.0 > apart.0 + 4 * graph.parameter_count(), "{most} {apart}");
    }
}
