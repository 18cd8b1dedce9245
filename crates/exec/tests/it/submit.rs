//! Steps that are submitted are steps that are run: the same bits, in order, and refusals that leave nothing open.

use crate::rig::{On, load, output, run};
use graph::{Bounds, Counts};
use models::{Encoder, Output};
use plimsoll_exec::cpu::Isa;
use plimsoll_exec::{Data, Executor};

const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 4, longest: 40 };

/// Ids and spans of a step of so many sequences.
fn step(n: i32) -> (Vec<i32>, Vec<i32>, Counts) {
    let length = 7 + n;
    let ids = (0..n * length).map(|i| 4 + i * 7 % 20).collect();
    let spans = (0..n).flat_map(|s| [s * length, (s + 1) * length]).collect();
    (ids, spans, Counts { tokens: (n * length) as u64, sequences: n as u64 })
}

fn encoder(on: On) -> Executor {
    let config = include_str!("../../../../fixtures/goldens/esm2/config.json");
    let graph = Encoder::from_json(config).expect("known").graph(BOUNDS, &[Output::Mean, Output::Hidden]);
    let weights = |_: &graph::Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        out.iter_mut().zip(range).for_each(|(x, i)| *x = (i * 7919 % 101) as f32 / 500.0 - 0.1);
    };
    load(on, &graph.expect("verified"), true, weights).expect("planned")
}

#[test]
fn what_is_submitted_is_what_is_run() {
    for on in [On::Reference, On::Cpu(Isa::detect(), 2)] {
        let mut executor = encoder(on);
        for n in [3, 1, 4, 2] {
            let (ids, spans, counts) = step(n);
            let give = |e: &mut Executor| {
                e.input_i32(0, "ids", &ids).expect("ids");
                e.input_i32(0, "spans", &spans).expect("spans");
            };
            run(&mut executor, give, counts);
            let (means, hidden) = (40 * n as usize, 40 * counts.tokens as usize);
            let wanted = [output(&mut executor, "hidden", hidden), output(&mut executor, "mean", means)];
            executor.poison().expect("inside");
            let inputs = [("spans", Data::I32(&spans)), ("ids", Data::I32(&ids))];
            let outputs = [("hidden", hidden), ("mean", means)];
            let open = executor.submit(0, &inputs, counts, &outputs).expect("submitted");
            let mut found = [vec![], vec![1.0; 1000]];
            executor.collect(open, &mut found).expect("collected");
            assert_eq!(found, wanted, "{} with {n} sequences", on.name());
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing_open() {
    let mut executor = encoder(On::Cpu(Isa::detect(), 2));
    let (ids, spans, counts) = step(2);
    let (i, s) = (("ids", Data::I32(&ids)), ("spans", Data::I32(&spans)));
    let floats = vec![0.0; ids.len()];
    for (inputs, outputs, word) in [
        ([("idz", Data::I32(&ids)), s], ("mean", 80), "no `idz`"),
        ([("ids", Data::I32(&ids[1..])), s], ("mean", 80), "`ids` is"),
        ([("ids", Data::F32(&floats)), s], ("mean", 80), "`ids` is"),
        ([i, s], ("mean", 81), "`mean` is"),
        ([i, s], ("mode", 80), "no `mode`"),
    ] {
        let error = executor.submit(0, &inputs, counts, &[outputs]).expect_err("refused");
        assert!(error.to_string().contains(word), "{error}");
    }
    let open: Vec<_> =
        (0..executor.depth()).map(|_| executor.submit(0, &[i, s], counts, &[("mean", 80)])).collect();
    let error = executor.submit(0, &[i, s], counts, &[]).expect_err("full");
    assert!(error.to_string().contains("are open"), "{error}");
    for step in open {
        executor.collect(step.expect("there was room"), &mut [vec![]]).expect("collected");
    }
}

#[test]
fn a_trace_has_every_launch() {
    let mut executor = encoder(On::Cpu(Isa::detect(), 2));
    let (ids, spans, counts) = step(2);
    let inputs = [("ids", Data::I32(&ids[..])), ("spans", Data::I32(&spans[..]))];
    let mut traced = |on| {
        executor.trace(on).expect("possible");
        let step = executor.submit(0, &inputs, counts, &[("mean", 80)]).expect("submitted");
        executor.collect(step, &mut [vec![]]).expect("collected");
        executor.spans().expect("spans")
    };
    let (noted, none) = (traced(true), traced(false));
    assert_eq!(none, []);
    let launches = executor.program().plans()[0].1.schedule.instrs.len();
    let on = |track| noted.iter().filter(|span| span.track == track).count();
    assert_eq!([on("in"), on("compute"), on("out")], [2, launches, 1]);
    assert!(noted.windows(2).all(|two| two[0].start + two[0].seconds <= two[1].start), "one after the other");
}
