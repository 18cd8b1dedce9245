//! Dropout with a counter-based random number generator.
//!
//! Invariant: whether an element is dropped is a function of the seed, the stream, the number of its pack and its
//! position in the pack, so a recomputation drops the same elements, on every instruction set, and the mask of a pack
//! does not depend on the packs beside it.

use crate::Cpu;
use crate::packs::{PackPart, Packs};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Parameters of a dropout.
#[derive(Clone, Copy, Debug)]
pub struct DropoutParams {
    /// Probability that an element is dropped, in 0..1.
    pub p: f32,
    /// Distinguishes the dropouts of one step.
    pub stream: u32,
    /// Key of the generator.
    pub seed: [u32; 2],
}

/// Dropout: y = x / (1 - p), and 0 for dropped elements. The element in column c of row r of pack number n, where r
/// counts from the first row of the pack, is dropped if word c % 4 of Philox4x32-10 is below p 2^32; its counter is
/// (c / 4, r, stream, n) and its key the seed. `y` may be exactly `x`. Panics if the shapes differ or the packs have
/// another number of rows.
pub fn dropout(cpu: &Cpu, dropout: DropoutParams, x: Rows<'_>, packs: Packs<'_>, y: RowsMut<'_>) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    assert_eq!(packs.rows(), rows, "rows of the packs");
    // Fits in 32 bits: p < 1 is an f32, so it is at most 1 - 2^-24.
    let threshold = (f64::from(dropout.p) * 4_294_967_296.0).ceil() as u32;
    let factor = 1.0 / (1.0 - dropout.p);
    cpu.by_rows(rows, cols, &|range| {
        for part in packs.parts(range) {
            cpu.isa().run(DropoutRows { dropout, threshold, factor, x, y: &y, part });
        }
    });
}

/// Elements per call of the generator: sixteen counters of four words each.
const GROUP: usize = 4 * LANES;

/// Dropout of the rows of `part`, for `Isa::run`.
struct DropoutRows<'a> {
    dropout: DropoutParams,
    threshold: u32,
    factor: f32,
    x: Rows<'a>,
    y: &'a RowsMut<'a>,
    part: PackPart,
}

impl SimdKernel for DropoutRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let cols = self.x.cols();
        let stream = self.dropout.stream;
        let number = self.part.pack.number;
        for r in self.part.rows.clone() {
            let row = (r - self.part.pack.rows.start) as u32;
            for c in (0..cols).step_by(GROUP) {
                let counter = [(c / 4) as u32, row, stream, number];
                let words = philox(counter, self.dropout.seed);
                let n = GROUP.min(cols - c);
                let mut group = [0.0_f32; GROUP];
                // SAFETY: row r of x and of y has n elements from column c on; they are read before they are written,
                // and only this task writes them.
                unsafe { core::ptr::copy_nonoverlapping(self.x.row(r).add(c), group.as_mut_ptr(), n) };
                for (v, word) in group.iter_mut().zip(words.as_flattened()) {
                    *v = if *word >= self.threshold { *v * self.factor } else { 0.0 };
                }
                // SAFETY: as above.
                unsafe { core::ptr::copy_nonoverlapping(group.as_ptr(), self.y.row(r).add(c), n) };
            }
        }
    }
}

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011) for sixteen counters, which differ from `first` by 0 to 15 in
/// their first word; four words per counter. Each round is a loop over lanes, which the compiler vectorises.
#[inline(always)]
fn philox(first: [u32; 4], seed: [u32; 2]) -> [[u32; 4]; LANES] {
    let mut a: [u32; LANES] = core::array::from_fn(|i| first[0].wrapping_add(i as u32));
    let mut b = [first[1]; LANES];
    let mut c = [first[2]; LANES];
    let mut d = [first[3]; LANES];
    let mut key = seed;
    for _ in 0..10 {
        for i in 0..LANES {
            let x = u64::from(a[i]) * 0xD251_1F53;
            let y = u64::from(c[i]) * 0xCD9E_8D57;
            a[i] = (y >> 32) as u32 ^ b[i] ^ key[0];
            b[i] = y as u32;
            c[i] = (x >> 32) as u32 ^ d[i] ^ key[1];
            d[i] = x as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    core::array::from_fn(|i| [a[i], b[i], c[i], d[i]])
}
