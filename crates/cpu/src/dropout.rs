//! Dropout by a counter-based generator.
//!
//! Invariant: whether an element is kept is a function of seed, stream and position; so is the mask of a
//! recomputation, on any instruction set.

use super::Cpu;
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};
use core::ops::Range;

/// What decides about each element.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The share that becomes zero, in 0..1.
    pub p: f32,
    /// Tells one dropout of a step from another.
    pub stream: u32,
    /// The key of the generator.
    pub seed: [u32; 2],
}

/// y = x / (1 - p) where element i = r cols + c is kept, and 0 elsewhere: kept is where word i % 4 of
/// Philox4x32-10 (counter i / 4 in two words, stream, 0; key seed) is at least p 2^32. `y` may be exactly `x`.
pub fn dropout(cpu: &Cpu, dropout: Dropout, x: Rows<'_>, y: RowsMut<'_>) {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    assert!((x.ld() == cols && y.ld() == cols) || rows <= 1, "elements count without gaps");
    // Fewer than 2^32, since p < 1: p has 24 bits.
    let threshold = (f64::from(dropout.p) * 4_294_967_296.0).ceil() as u32;
    let factor = 1.0 / (1.0 - dropout.p);
    let (n, elements) = (rows * cols, GROUP * 256);
    cpu.pool().run(n.div_ceil(elements), &|task, _| {
        let range = task * elements..n.min((task + 1) * elements);
        cpu.isa().run(Drop { dropout, threshold, factor, x: x.row(0), y: y.row(0), range });
    });
}

/// Elements of one round of the generator on all lanes: four words a lane.
const GROUP: usize = 4 * LANES;

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
            // SAFETY: n elements from `start` on lie in x and y; they are read before they are written, and
            // this task alone writes them.
            unsafe { core::ptr::copy_nonoverlapping(self.x.add(start), group.as_mut_ptr(), n) };
            for (v, word) in group.iter_mut().zip(words.as_flattened()) {
                *v = if *word >= self.threshold { *v * self.factor } else { 0.0 };
            }
            // SAFETY: as above.
            unsafe { core::ptr::copy_nonoverlapping(group.as_ptr(), self.y.add(start), n) };
        }
    }
}

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011) of sixteen counters from `first` on: a loop over lanes in
/// each step, so that the compiler takes vectors.
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
