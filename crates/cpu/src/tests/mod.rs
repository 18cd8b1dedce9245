//! Tests of the kernels against plain f64 loops, and of their bits against themselves. Helpers of all tests are here.

mod attention;
mod cast;
#[cfg(target_arch = "x86_64")]
mod double;
mod experts;
mod linear_bf16;
mod linear_f32;
#[cfg(target_arch = "x86_64")]
mod linear_f32_amx;
mod linear_int8;
mod math;
mod optimizer;
mod packs;
mod peer;
mod row_major;
mod rows;
mod rows_bf16;
mod training;

use crate::{Cpu, Isa};

/// Uniform numbers in about -1..1, the same on every machine.
pub(super) fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// Every available instruction set, on one and on three threads.
pub(super) fn machines() -> impl Iterator<Item = Cpu> {
    Isa::available().flat_map(|isa| [1, 3].map(|threads| Cpu::with_isa(threads, isa)))
}

/// A workspace filled with NaN like the arena, so that reading memory that was never written shows.
pub(super) fn workspace(cpu: &Cpu, bytes_per_thread: usize) -> Vec<f32> {
    vec![f32::NAN; bytes_per_thread / 4 * cpu.threads()]
}

/// Panics unless each |got - want| <= tolerance.
#[track_caller]
pub(super) fn close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got) - want).abs();
        assert!(off <= tolerance, "{what} [{i}]: {got} for {want}, off by {off:e} > {tolerance:e}");
    }
}

/// Panics unless the bits are equal.
#[track_caller]
pub(super) fn same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what} [{i}]: {a:e} and {b:e}");
    }
}
