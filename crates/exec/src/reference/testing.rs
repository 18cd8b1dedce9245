//! Helpers for the tests of the reference kernels. Invariant: the caller states the tolerance.

use super::{Tensor, eval};
use plimsoll_graph::Op;

/// Runs `op` and returns all outputs, which have the given shapes.
pub(super) fn run(op: Op, ins: &[Tensor], shapes: &[&[usize]]) -> Vec<Tensor> {
    let ins: Vec<&Tensor> = ins.iter().collect();
    let outs: Vec<Option<Vec<usize>>> = shapes.iter().map(|s| Some(s.to_vec())).collect();
    let results = eval(&op, &ins, &outs).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    results.into_iter().flatten().collect()
}

/// Asserts that the outputs of `op`, rounded to f32, equal `wanted` within the absolute `tolerance`.
pub(super) fn check(op: Op, ins: &[Tensor], wanted: &[Tensor], tolerance: f64) {
    let shapes: Vec<&[usize]> = wanted.iter().map(|t| &t.shape[..]).collect();
    for (i, (got, wanted)) in run(op, ins, &shapes).iter().zip(wanted).enumerate() {
        let [got, wanted] = [got, wanted].map(|t| t.rounded().expect("floats"));
        for (g, w) in got.iter().zip(&wanted) {
            let error = (f64::from(*g) - f64::from(*w)).abs();
            let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
            assert!(same || error <= tolerance, "{op:?} output {i}: {got:?}, not {wanted:?}");
        }
    }
}

/// `n` pseudo-random floats in -1..1, determined by the seed (splitmix64, Steele et al. 2014).
pub(super) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut numbers = Vec::with_capacity(n);
    for _ in 0..n {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        numbers.push(((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0);
    }
    numbers
}

/// A matrix or vector of noise.
pub(super) fn random(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::f32(shape, noise(seed, shape.iter().product()))
}

/// Asserts that `grad` is the gradient of `sum dy . y` with respect to input `input`, where y is output 0 of `op`, by
/// central differences with h = 1e-5. Their error is eps(f64) / h = 2e-11 from rounding and h^2 = 1e-10 from
/// truncation, so the tolerance is 1e-8 (relative if the gradient is above 1).
pub(super) fn check_gradient(
    op: Op,
    ins: &[Tensor],
    input: usize,
    dy: &Tensor,
    grad: &Tensor,
    outs: &[&[usize]],
) {
    assert_eq!(grad.shape, ins[input].shape);
    let x = floats(&ins[input]);
    for i in 0..x.len() {
        // The step is the difference of the rounded points, which is not exactly 2e-5.
        let points = [x[i] + 1e-5, x[i] - 1e-5];
        let losses = points.map(|point| {
            let mut moved = ins.to_vec();
            let mut x = x.to_vec();
            x[i] = point;
            moved[input] = Tensor::f64(&ins[input].shape, x);
            super::dot(floats(&run(op, &moved, outs)[0]), floats(dy))
        });
        let wanted = (losses[0] - losses[1]) / (points[0] - points[1]);
        let got = floats(grad)[i];
        assert!(
            (got - wanted).abs() <= 1e-8 * wanted.abs().max(1.0),
            "{op:?}: d/dx[{i}] = {got}, not {wanted}"
        );
    }
}

/// The packs of a step, as rows of words ([`plimsoll_graph::packs`]).
pub(super) fn packs(rows: &[[i32; plimsoll_graph::packs::WORDS]]) -> Tensor {
    Tensor::i32(&[rows.len(), plimsoll_graph::packs::WORDS], rows.as_flattened().to_vec())
}

pub(super) fn floats(tensor: &Tensor) -> &[f64] {
    tensor.floats().expect("floats")
}
