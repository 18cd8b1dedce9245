//! Tests of the caller against a second implementation (`bench/fixtures/caller.py`, numpy in f64). Invariant: the f32
//! error of a logit is at most 1e-5 on every device, and its bits do not depend on the other windows of the step.

use crate::rig::{ByName, On, load, output, run};
use plimsoll_data::weights::Weights;
use plimsoll_exec::Executor;
use plimsoll_graph::{Bounds, Counts, Param};
use plimsoll_models::CallerConfig;
use plimsoll_plan::Precision;
use std::ops::Range;
use std::path::PathBuf;

const TOLERANCE: f32 = 1e-5;
const WINDOWS: usize = 6;

struct Golden {
    config: CallerConfig,
    weights: Weights,
    answers: Weights,
}

impl Golden {
    fn open() -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens/caller");
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a fixture");
        Self {
            config: CallerConfig::from_json(&config).expect("a caller"),
            weights: Weights::open(&folder.join("model.safetensors")).expect("weights"),
            answers: Weights::open(&folder.join("golden.safetensors")).expect("answers"),
        }
    }

    /// Token ids of a window, and its logits.
    fn window(&self, number: usize) -> (Vec<i32>, Vec<f32>) {
        let ids = format!("w{number}.ids");
        let logits = format!("w{number}.logits");
        let n = self.answers.tensor(&ids).expect("ids").elements();
        let mut values = vec![0; n as usize];
        self.answers.read_i64(&ids, 0..n, &mut values).expect("read");
        let mut wanted = vec![0.0; self.config.logits() as usize];
        self.answers.read_f32(&logits, 0..wanted.len() as u64, &mut wanted).expect("read");
        (values.into_iter().map(|v| v as i32).collect(), wanted)
    }

    fn executor(&self, on: On, bounds: Bounds, fuse: bool) -> Executor {
        let graph = self.config.graph(bounds).expect("verified");
        let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
            let mut left = out;
            for (i, first, count) in param.split_by_piece(range) {
                let (part, after) = left.split_at_mut(count);
                left = after;
                let tensor = &param.pieces[i].tensor;
                match self.config.derived(tensor) {
                    Some(values) => part.copy_from_slice(&values[first as usize..first as usize + count]),
                    None => self.weights.read_f32(tensor, first..first + count as u64, part).expect("read"),
                }
            }
        };
        load(on, &graph, fuse, read).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Packs windows and runs them; returns the logits of each window.
fn logits(executor: &mut Executor, windows: &[&[i32]], classes: usize) -> Vec<Vec<f32>> {
    let mut tokens = vec![];
    let mut spans = vec![];
    let mut frames = vec![];
    for ids in windows {
        let start = tokens.len() as i32;
        let length = ids.len() as i32 / 6;
        frames.extend((0..6).flat_map(|f| [start + f * length, start + (f + 1) * length]));
        tokens.extend_from_slice(ids);
        spans.extend([start, tokens.len() as i32]);
    }
    let counts = Counts { tokens: tokens.len() as u64, sequences: windows.len() as u64, packs: 1 };
    let give = |e: &mut Executor| {
        e.input_i32(0, "ids", &tokens).expect("ids");
        e.input_i32(0, "spans", &spans).expect("spans");
        e.input_i32(0, "frames", &frames).expect("frames");
    };
    run(executor, give, counts);
    output(executor, "logits", windows.len() * classes).chunks(classes).map(<[f32]>::to_vec).collect()
}

/// Checks all windows together against the answers, and each window alone and in another order against its own bits.
fn check(golden: &Golden, on: On, fuse: bool, tolerance: f32) {
    let windows: Vec<(Vec<i32>, Vec<f32>)> = (0..WINDOWS).map(|i| golden.window(i)).collect();
    let ids: Vec<&[i32]> = windows.iter().map(|(ids, _)| &ids[..]).collect();
    let tokens: usize = ids.iter().map(|ids| ids.len()).sum();
    let bounds = Bounds { tokens: tokens as u64 + 7, sequences: 9, longest: 340, packs: 1 };
    let classes = golden.config.logits() as usize;
    let mut executor = golden.executor(on, bounds, fuse);
    let together = logits(&mut executor, &ids, classes);
    for (i, ((ids, wanted), found)) in windows.iter().zip(&together).enumerate() {
        let worst = found.iter().zip(wanted).map(|(f, w)| (f - w).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "window {i} on {}: off by {worst}", on.name());
        let alone = logits(&mut executor, &[ids], classes);
        assert!(alone[0] == *found, "window {i} on {}: its company changes its bits", on.name());
    }
    let reversed: Vec<&[i32]> = ids.iter().rev().copied().collect();
    let back = logits(&mut executor, &reversed, classes);
    assert!(back.iter().rev().eq(&together), "{}: the order changes bits", on.name());
}

#[test]
fn the_caller_on_the_reference() {
    check(&Golden::open(), On::Reference, false, TOLERANCE);
}

#[test]
fn the_caller_on_the_cpu() {
    let golden = Golden::open();
    for on in On::every_cpu() {
        for fuse in [true, false] {
            check(&golden, on, fuse, TOLERANCE);
        }
    }
}

/// Logits are of order 1; rounding weights and activations to 8 bits of mantissa moves them by some per cent.
#[test]
fn the_caller_on_the_cpu_in_bf16_and_int8() {
    let golden = Golden::open();
    for precision in [Precision::Bf16, Precision::Int8] {
        for on in On::every_cpu_in(precision) {
            check(&golden, on, true, 0.05);
        }
    }
}

#[test]
fn the_caller_on_cuda() {
    let golden = Golden::open();
    for (precision, tolerance) in [
        (Precision::F32, TOLERANCE),
        (Precision::Tf32, 0.01),
        (Precision::Bf16, 0.05),
        (Precision::Fp16, 0.01),
        (Precision::Fp8, 0.2),
    ] {
        if let Some(on) = On::cuda(precision) {
            check(&golden, on, true, tolerance);
        }
    }
}
