//! Tests of a hundred steps of every optimizer against PyTorch (torch.optim.AdamW and SGD, transformers' Adafactor)
//! and, for 8-bit moments, numpy: `bench/fixtures/optimizers.py`. Invariant: every device is tested.

use crate::rig::{ByName, On, bare, output, output_u8, run};
use plimsoll_data::weights::Weights;
use plimsoll_exec::Executor;
use plimsoll_graph::ops::*;
use plimsoll_graph::{Bounds, Builder, Counts, DType, Dim, Op, OutputRole};
use std::path::PathBuf;

const STEPS: usize = 100;
const SHAPES: [(&str, &[u64]); 2] = [("matrix", &[12, 7]), ("vector", &[5])];
const LR: f32 = 1e-2;
const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
const SGD: Sgd = Sgd { momentum: 0.0, weight_decay: 0.05, nesterov: false };
const MOMENTUM: Sgd = Sgd { momentum: 0.9, ..SGD };
const ONE: Counts = Counts { tokens: 1, sequences: 1, packs: 1 };

/// A graph that consists of an optimizer, and the values that it updates: p and its states.
struct Stepper {
    executor: Executor,
    states: Vec<StateValues>,
}

#[derive(Clone, Debug, PartialEq)]
enum StateValues {
    F32(Vec<f32>),
    U8(Vec<u8>),
}

impl Stepper {
    /// Creates the optimizer with the initial p and zeros in the states.
    fn new(on: On, op: Op, shapes: &[(Vec<u64>, DType)], p: Vec<f32>, hyper: u64) -> Self {
        let mut g = Builder::new(Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 });
        let scalars = [2, hyper].map(|n| (vec![n], DType::F32));
        let (first, states) = shapes.split_first().expect("p");
        let operands = [first, first].into_iter().chain(states).chain(&scalars).enumerate();
        let input = |(i, (shape, dtype)): (usize, &(Vec<u64>, DType))| {
            let shape: Vec<Dim> = shape.iter().copied().map(Dim::Fixed).collect();
            g.input(&format!("in{i}"), &shape, *dtype)
        };
        let inputs: Vec<_> = operands.map(input).collect();
        for (i, out) in g.node(op, &inputs).into_iter().enumerate() {
            g.output(format!("out{i}"), out);
        }
        let executor = bare(on, &g.finish().expect("verified"), false, plimsoll_plan::Weights::Resident);
        let zeros = states.iter().map(|(shape, dtype)| match dtype {
            DType::F8 | DType::I8 => panic!("no state is in codes with scales"),
            DType::U8 => StateValues::U8(vec![0; shape.iter().product::<u64>() as usize]),
            DType::F32 | DType::Bf16 | DType::F16 | DType::I32 => {
                StateValues::F32(vec![0.0; shape.iter().product::<u64>() as usize])
            }
        });
        let states = [StateValues::F32(p)].into_iter().chain(zeros).collect();
        Self { executor: executor.expect("planned"), states }
    }

    fn p(&self) -> &[f32] {
        match &self.states[0] {
            StateValues::F32(p) => p,
            StateValues::U8(_) => panic!("p is f32"),
        }
    }

    fn step(&mut self, g: &[f32], scale: [f32; 2], hyper: &[f32]) {
        let Self { executor, states } = self;
        let last = states.len() + 1;
        let give = |e: &mut Executor| {
            let mut floats = |i: usize, x: &[f32]| e.input_f32(0, &format!("in{i}"), x).expect("given");
            floats(1, g);
            floats(last, &scale);
            floats(last + 1, hyper);
            for (k, state) in states.iter().enumerate() {
                let name = format!("in{}", k + usize::from(k > 0));
                match state {
                    StateValues::F32(x) => e.input_f32(0, &name, x).expect("given"),
                    StateValues::U8(x) => e.input_u8(0, &name, x).expect("given"),
                }
            }
        };
        run(executor, give, ONE);
        for (k, state) in states.iter_mut().enumerate() {
            let name = format!("out{k}");
            *state = match state {
                StateValues::F32(x) => StateValues::F32(output(executor, &name, x.len())),
                StateValues::U8(x) => StateValues::U8(output_u8(executor, &name, x.len())),
            };
        }
    }
}

fn every_device() -> impl Iterator<Item = On> {
    [On::Reference].into_iter().chain(On::every_cpu())
}

fn fixture(file: &str) -> Weights {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training/optimizers");
    Weights::open(&folder.join(file)).expect("a fixture")
}

fn read(file: &Weights, name: &str) -> Vec<f32> {
    let elements = file.tensor(name).expect("a tensor").elements();
    let mut out = vec![0.0; elements as usize];
    file.read_f32(name, 0..elements, &mut out).expect("read");
    out
}

fn codes(file: &Weights, name: &str) -> Vec<u8> {
    let mut out = vec![];
    file.read_bytes(name, 0..file.tensor(name).expect("a tensor").elements(), &mut out).expect("read");
    out
}

/// (1 - b1^t, 1 - b2^t), with the betas of the kernels.
fn corrections(op: &AdamW, step: usize) -> [f32; 2] {
    [op.beta1, op.beta2].map(|beta| (1.0 - f64::from(beta).powi(step as i32)) as f32)
}

#[track_caller]
fn close(found: &[f32], wanted: &[f32], limit: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (f, w)) in found.iter().zip(wanted).enumerate() {
        assert!((f - w).abs() <= limit, "{what} [{i}]: {f}, not {w} (limit {limit:e})");
    }
}

/// Every step rounds p, of order 1, a few times, and errors add up like a random walk: 4 eps(f32) sqrt(steps).
#[test]
fn a_hundred_steps_are_those_of_pytorch() {
    let file = fixture("steps.safetensors");
    let kinds = ["adamw", "sgd", "momentum", "nesterov", "adafactor"];
    for (on, kind) in every_device().flat_map(|on| kinds.map(|kind| (on, kind))) {
        for (name, shape) in SHAPES {
            let (op, states, hyper) = optimizer(kind, shape);
            let shapes: Vec<_> = [shape.to_vec()].into_iter().chain(states).map(|s| (s, DType::F32)).collect();
            let [start, g] = ["p", "g"].map(|x| read(&file, &format!("{name}.{x}")));
            let n = start.len();
            let mut stepper = Stepper::new(on, op, &shapes, start, hyper(1).len() as u64);
            for (step, g) in (1..=STEPS).zip(g.chunks_exact(n)) {
                // Halving a doubled gradient is exact.
                let g: Vec<f32> = g.iter().map(|g| 2.0 * g).collect();
                stepper.step(&g, [0.5, 1.0], &hyper(step));
                if file.get(&format!("{kind}.{name}.p.{step}")).is_some() {
                    let wanted = read(&file, &format!("{kind}.{name}.p.{step}"));
                    let what = format!("{kind}.{name}.p.{step} on {}", on.name());
                    close(stepper.p(), &wanted, 4.0 * f32::EPSILON * (step as f32).sqrt(), &what);
                }
            }
        }
    }
}

type Hyper = Box<dyn Fn(usize) -> Vec<f32>>;

/// The op of a kind, the shapes of its states and its hyper-parameters by step.
fn optimizer(kind: &str, shape: &[u64]) -> (Op, Vec<Vec<u64>>, Hyper) {
    let lr: Hyper = Box::new(|_| vec![LR]);
    let same = shape.to_vec();
    match kind {
        "adamw" => {
            let hyper = |step| [&[LR][..], &corrections(&ADAMW, step)].concat();
            (Op::AdamW(ADAMW), vec![same.clone(), same], Box::new(hyper))
        }
        "sgd" => (Op::Sgd(SGD), vec![], lr),
        "momentum" => (Op::Sgd(MOMENTUM), vec![same], lr),
        "nesterov" => (Op::Sgd(Sgd { nesterov: true, ..MOMENTUM }), vec![same], lr),
        _ => {
            let op = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
            let hyper = |step: usize| vec![LR, (1.0 - (step as f64).powf(-0.8)) as f32];
            (Op::Adafactor(op), shape.iter().map(|&n| vec![n]).collect(), Box::new(hyper))
        }
    }
}

/// g = a (p - t). In the first three steps no value is near a tie of the quantization, so quantized moments are
/// equal. Later, single quantized values may differ by one, which moves few elements of p, by a fifth of lr at
/// most.
#[test]
fn moments_of_8_bits_are_those_of_the_definition() {
    let file = fixture("adamw8bit.safetensors");
    let [p, a, t] = ["p", "a", "t"].map(|name| read(&file, name));
    let n = p.len() as u64;
    let moment = [(vec![n], DType::U8), (vec![n.div_ceil(BLOCK)], DType::F32)];
    let shapes = [&[(vec![n], DType::F32)][..], &moment, &moment].concat();
    let zero = read(&file, "codes.signed").iter().position(|&x| x == 0.0).expect("zero") as u8;
    for on in every_device() {
        let op = Op::AdamW8bit(AdamW8bit { adamw: ADAMW });
        let mut stepper = Stepper::new(on, op, &shapes, p.clone(), 3);
        stepper.states[1] = StateValues::U8(vec![zero; n as usize]);
        for step in 1..=STEPS {
            let g: Vec<f32> = stepper.p().iter().zip(&a).zip(&t).map(|((p, a), t)| a * (p - t)).collect();
            let [c1, c2] = corrections(&ADAMW, step);
            stepper.step(&g, [1.0, 1.0], &[LR, c1, c2]);
            if step <= 3 {
                check_8bit(&stepper, &file, step, &on.name());
            }
        }
        let wanted = read(&file, "p.100");
        let off: Vec<f32> = stepper.p().iter().zip(&wanted).map(|(f, w)| (f - w).abs()).collect();
        let worst = off.iter().copied().fold(0.0, f32::max);
        let mean = off.iter().sum::<f32>() / off.len() as f32;
        assert!(worst <= LR / 5.0 && mean <= 3e-6, "{}: worst {worst:e}, mean {mean:e}", on.name());
    }
}

/// Asserts that quantized values are equal, and numbers within 8 eps(f32) of the largest.
fn check_8bit(stepper: &Stepper, file: &Weights, step: usize, on: &str) {
    for (state, name) in stepper.states.iter().zip(["p", "m", "m_absmax", "v", "v_absmax"]) {
        let what = format!("{name}.{step} on {on}");
        let name = format!("{name}.{step}");
        match state {
            StateValues::U8(found) => assert!(*found == codes(file, &name), "{what}"),
            StateValues::F32(found) => {
                let wanted = read(file, &name);
                let largest = wanted.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
                close(found, &wanted, 8.0 * f32::EPSILON * largest, &what);
            }
        }
    }
}

/// A step with NaN or infinite gradients is skipped: no bit of any state changes.
#[test]
fn a_step_that_is_not_ok_changes_no_bit() {
    for on in every_device() {
        for kind in ["adamw", "sgd", "momentum", "adafactor"] {
            let (op, states, hyper) = optimizer(kind, &[12, 7]);
            let shapes: Vec<_> = [vec![12, 7]].into_iter().chain(states).map(|s| (s, DType::F32)).collect();
            let start = (0..84).map(|i| (i as f32).sin()).collect();
            let mut stepper = Stepper::new(on, op, &shapes, start, hyper(1).len() as u64);
            stepper.step(&[0.5; 84], [1.0, 1.0], &hyper(1));
            let before = stepper.states.clone();
            for factor in [f32::NAN, f32::INFINITY, 0.0] {
                stepper.step(&[f32::NAN; 84], [factor, 0.0], &hyper(2));
                assert_eq!(stepper.states, before, "{kind} on {}", on.name());
            }
            stepper.step(&[0.5; 84], [1.0, 1.0], &hyper(2));
            assert_ne!(stepper.states, before, "{kind} on {}", on.name());
        }
    }
}

/// Clips like torch.nn.utils.clip_grad_norm_, on the unscaled gradients. The norm is over all gradients; if it is NaN
/// or infinite, nothing is changed.
#[test]
fn the_norm_of_all_gradients_is_clipped() {
    let large = 1e20;
    let cases: [([f32; 2], f32, f32, [f32; 3]); 8] = [
        // (both gradients, unscale, max_norm) -> (factor, ok, norm)
        ([3.0, 4.0], 1.0, 0.0, [1.0, 1.0, 5.0]),
        ([3.0, 4.0], 1.0, 10.0, [1.0, 1.0, 5.0]),
        ([3.0, 4.0], 1.0, 1.0, [1.0 / 5.000_001, 1.0, 5.0]),
        ([3.0, -4.0], 0.5, 1.0, [0.5 / 2.500_001, 1.0, 2.5]),
        ([0.0, 0.0], 1.0, 1.0, [1.0, 1.0, 0.0]),
        // The squares overflow f32, the norm does not.
        ([3.0 * large, 4.0 * large], 1.0, 0.0, [1.0, 1.0, 5.0 * large]),
        ([f32::INFINITY, 1.0], 1.0, 1.0, [0.0, 0.0, f32::INFINITY]),
        ([1.0, f32::NAN], 1.0, 1.0, [f32::NAN, 0.0, f32::NAN]),
    ];
    for on in every_device() {
        for (grads, unscale, max_norm, [factor, ok, norm]) in cases {
            let mut g = Builder::new(Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 });
            let inputs = ["a", "b", "unscale"].map(|name| g.input(name, &[Dim::Fixed(1)], DType::F32));
            let outs = g.node(Op::GradScale(GradScale { max_norm }), &inputs);
            for (role, out) in [OutputRole::GradientScale, OutputRole::GradientNorm].into_iter().zip(outs) {
                g.output(role, out);
            }
            let graph = g.finish().expect("verified");
            let mut executor = bare(on, &graph, false, plimsoll_plan::Weights::Resident).expect("planned");
            let give = |e: &mut Executor| {
                for (name, x) in [("a", grads[0]), ("b", grads[1]), ("unscale", unscale)] {
                    e.input_f32(0, name, &[x]).expect("given");
                }
            };
            run(&mut executor, give, ONE);
            let scale = output(&mut executor, OutputRole::GradientScale, 2);
            let found = output(&mut executor, OutputRole::GradientNorm, 1)[0];
            let what = format!("{grads:?} x {unscale}, at most {max_norm}, on {}", on.name());
            assert_eq!(scale[1], ok, "{what}");
            if norm.is_nan() {
                assert!(found.is_nan(), "{what}");
                continue;
            }
            assert_eq!(found, norm, "{what}");
            if ok == 1.0 {
                close(&scale[..1], &[factor], 2.0 * f32::EPSILON * factor, &what);
            }
        }
    }
}
