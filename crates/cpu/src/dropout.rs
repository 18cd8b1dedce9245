//! Dropout with a counter-based random number generator.
//!
//! Invariant: whether an element is dropped is a function of seed, stream and position only, so a recomputation drops
//! the same elements, on every instruction set.

use super::Cpu;
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};
use core::ops::Range;

/// Parameters of a dropout.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Probability that an element is dropped, in 0..1.
    pub p: f32,
    /// Distinguishes the dropouts of one step.
    pub stream: u32,
    /// Key of the generator.
    pub seed: [u32; 2],
}

/// Dropout: y = x / (1 - p), and 0 for dropped elements. Element i = r cols + c is dropped if word i % 4 of
/// Philox4x32-10 is below p 2^32; its counter is (i / 4 in two words, stream, 0) and its key the seed. `y` may be
/// exactly `x`. Panics if the shapes differ or there are gaps between rows.
pub fn dropout(cpu: &Cpu, dropout: Dropout, x: Rows<'_>, y: RowsMut<'_>) {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    assert!((x.ld() == cols && y.ld() == cols) || rows <= 1, "elements count without gaps");
    // Fits in 32 bits: p < 1 is an f32, so it is at most 1 - 2^-24.
    let threshold = (f64::from(dropout.p) * 4_294_967_296.0).ceil() as u32;
    let factor = 1.0 / (1.0 - dropout.p);
    let (n, elements) = (rows * cols, GROUP * 256);
    cpu.pool().run(n.div_ceil(elements), &|task, _| {
        let range = task * elements..n.min((task + 1) * elements);
        cpu.isa().run(Drop { dropout, threshold, factor, x: x.row(0), y: y.row(0), range });
    });
}

/// Elements per call of the generator: sixteen counters of four words each.
const GROUP: usize = 4 * LANES;

/// Dropout of the elements `range`, for `Isa::run`.
struct Drop {
    dropout: Dropout,
    threshold: u32,
    factor: f32,
    x: *const f32,
    y: *mut f32,
    range: Range<usize>,
}

impl Kernel for Drop {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for start in self.range.clone().step_by(GROUP) {
            let words = philox(start as u64 / 4, self.dropout.stream, self.dropout.seed);
            let n = GROUP.min(self.range.end - start);
            let mut group = [0.0_f32; GROUP];
            // SAFETY: x and y hold n elements from `start` on; they are read before they are written, and only this
            // task writes them.
            unsafe { core::ptr::copy_nonoverlapping(self.x.add(start), group.as_mut_ptr(), n) };
            for (v, word) in group.iter_mut().zip(words.as_flattened()) {
                *v = if *word >= self.threshold { *v * self.factor } else { 0.0 };
            }
            // SAFETY: as above.
            unsafe { core::ptr::copy_nonoverlapping(group.as_ptr(), self.y.add(start), n) };
        }
    }
}

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011) for the sixteen counters from `first` on; four words per
/// counter. Each round is a loop over lanes, which the compiler vectorises.
#[inline(always)]
fn philox(first: u64, stream: u32, seed: [u32; 2]) -> [[u32; 4]; LANES] {
    let mut a: [u32; LANES] = core::array::from_fn(|i| (first + i as u64) as u32);
    let mut b: [u32; LANES] = core::array::from_fn(|i| ((first + i as u64) >> 32) as u32);
    let (mut c, mut d) = ([stream; LANES], [0_u32; LANES]);
    let mut key = seed;
    for _ in 0..10 {
        for i in 0..LANES {
            let (x, y) = (u64::from(a[i]) * 0xD251_1F53, u64::from(c[i]) * 0xCD9E_8D57);
            a[i] = (y >> 32) as u32 ^ b[i] ^ key[0];
            b[i] = y as u32;
            c[i] = (x >> 32) as u32 ^ d[i] ^ key[1];
            d[i] = x as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    core::array::from_fn(|i| [a[i], b[i], c[i], d[i]])
}
