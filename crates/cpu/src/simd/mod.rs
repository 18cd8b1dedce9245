//! The SIMD interface that every kernel is written in, and its portable implementation.
//!
//! Invariant: a vector is always sixteen f32 lanes (one zmm register, two ymm registers, or an array), reductions
//! always pair lanes (i, i+8), (i, i+4), (i, i+2), (i, i+1), and `fma` rounds once if the hardware can. So a kernel
//! written in these operations gives the same bits on every instruction set with FMA, and is independent of the
//! instruction set it runs on.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod dot;
pub(crate) mod isa;
pub(crate) mod math;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use dot::Dot;
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Operations on vectors of sixteen f32 lanes. A value of an implementing type proves that this CPU has the
/// instructions: only `Isa::run` makes one. Every method must be inlined into the function that enables the target
/// features, hence `#[inline(always)]` on all of them.
#[allow(private_bounds)] // `Dot` is internal to this crate
pub trait Simd: Dot {
    /// A vector of sixteen f32.
    type V: Copy;
    /// Rows of the widest register tile of a matmul.
    const ROWS: usize;
    /// Vectors per row of that tile.
    const VECS: usize;

    /// A vector with `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// The vector 0, 1, ... 15.
    fn iota(self) -> Self::V;
    /// Loads sixteen f32.
    /// # Safety
    /// Sixteen f32 must be readable at `p`.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Stores sixteen f32.
    /// # Safety
    /// Sixteen f32 must be writable at `p`.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Loads the first `n` (at most 16) lanes; the others are zero.
    /// # Safety
    /// `n` f32 must be readable at `p`.
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V;
    /// Stores the first `n` (at most 16) lanes.
    /// # Safety
    /// `n` f32 must be writable at `p`.
    unsafe fn store_part(self, p: *mut f32, v: Self::V, n: usize);
    /// Loads sixteen bf16, given by their bits, as f32.
    /// # Safety
    /// Sixteen u16 must be readable at `p`.
    unsafe fn widen(self, p: *const u16) -> Self::V;
    /// Loads sixteen pairs of bf16 as f32: a vector of the first elements and a vector of the second.
    /// # Safety
    /// Thirty-two u16 must be readable at `p`.
    unsafe fn widen_pairs(self, p: *const u16) -> [Self::V; 2];
    /// Stores the lanes as bf16, rounded to nearest with ties to even; NaN stays NaN.
    /// # Safety
    /// Sixteen u16 must be writable at `p`.
    unsafe fn narrow(self, p: *mut u16, v: Self::V);
    /// Stores the lowest byte of the bits of each lane.
    /// # Safety
    /// Sixteen bytes must be writable at `p`.
    unsafe fn store_low(self, p: *mut u8, v: Self::V);
    /// Prefetches the cache line at `p` into L1. `p` need not be readable.
    fn prefetch(self, p: *const f32);
    /// Prefetches the cache line at `p` into L2. `p` need not be readable.
    fn prefetch_far(self, p: *const f32);
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a - b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c, rounded once if the hardware has fused multiply-add.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger value in each lane; `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller value in each lane; `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// |a|
    fn abs(self, a: Self::V) -> Self::V;
    /// -|a|, but not less than `least`, which must be negative; `least` where `a` is NaN.
    fn neg_abs(self, a: Self::V, least: Self::V) -> Self::V;
    /// The square root.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// The bits of each lane shifted left by 23: the low eight bits become the exponent.
    fn shl23(self, a: Self::V) -> Self::V;
    /// Zero in the lanes where `x < limit`, `a` in the others (also where `x` is NaN).
    fn zero_below(self, a: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// The first `n` lanes of `a` and the remaining lanes of `b`.
    fn first(self, a: Self::V, b: Self::V, n: usize) -> Self::V;
    /// The sum of all lanes, in the fixed tree.
    fn sum(self, a: Self::V) -> f32;
    /// The largest lane.
    fn max_lane(self, a: Self::V) -> f32;

    /// Transposes a 16 x 16 block: lane i of vector j becomes lane j of vector i.
    #[inline(always)]
    fn transpose(self, rows: &mut [Self::V; LANES]) {
        let mut square = [[0.0f32; LANES]; LANES];
        for (row, &v) in square.iter_mut().zip(rows.iter()) {
            // SAFETY: a row of the square is sixteen f32.
            unsafe { self.store(row.as_mut_ptr(), v) };
        }
        for (j, column) in rows.iter_mut().enumerate() {
            let lanes: [f32; LANES] = core::array::from_fn(|i| square[i][j]);
            // SAFETY: sixteen f32.
            *column = unsafe { self.load(lanes.as_ptr()) };
        }
    }

    /// As `load_part`, with a faster path for full vectors.
    /// # Safety
    /// `n` f32 must be readable at `p`.
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: the caller promises n f32.
        unsafe { if n == LANES { self.load(p) } else { self.load_part(p, n) } }
    }

    /// As `store_part`, with a faster path for full vectors.
    /// # Safety
    /// `n` f32 must be writable at `p`.
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the caller promises n f32.
        unsafe { if n == LANES { self.store(p, v) } else { self.store_part(p, v, n) } }
    }
}

/// The portable implementation: arrays that the compiler vectorises as far as it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// The larger of two numbers; `b` if either is NaN, as `Simd::max`.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// a * b + c, fused only if the target has the instruction: otherwise `f32::mul_add` is a library call per element.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for Portable {
    type V = [f32; LANES];
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
    const VECS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn iota(self) -> Self::V {
        core::array::from_fn(|i| i as f32)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller promises sixteen readable f32.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller promises sixteen writable f32.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        let mut v = [0.0; LANES];
        // SAFETY: the caller promises n <= 16 readable f32; `v` holds sixteen.
        unsafe { core::ptr::copy_nonoverlapping(p, v.as_mut_ptr(), n) };
        v
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the caller promises n <= 16 writable f32; `v` holds sixteen.
        unsafe { core::ptr::copy_nonoverlapping(v.as_ptr(), p, n) };
    }
    #[inline(always)]
    unsafe fn widen(self, p: *const u16) -> Self::V {
        // SAFETY: the caller promises sixteen readable u16.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn widen_pairs(self, p: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller promises thirty-two readable u16.
        let pairs = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        [pairs.map(|pair| bf16_to_f32(pair[0])), pairs.map(|pair| bf16_to_f32(pair[1]))]
    }
    #[inline(always)]
    unsafe fn narrow(self, p: *mut u16, v: Self::V) {
        // SAFETY: the caller promises sixteen writable u16.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(v.map(f32_to_bf16)) }
    }
    #[inline(always)]
    unsafe fn store_low(self, p: *mut u8, v: Self::V) {
        // SAFETY: the caller promises sixteen writable bytes.
        unsafe { p.cast::<[u8; LANES]>().write_unaligned(v.map(|x| x.to_bits() as u8)) }
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}
    #[inline(always)]
    fn prefetch_far(self, _: *const f32) {}
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        core::array::from_fn(|i| mul_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        core::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i].abs())
    }
    #[inline(always)]
    fn neg_abs(self, a: Self::V, least: Self::V) -> Self::V {
        self.max(a.map(|a| -a.abs()), least)
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        core::array::from_fn(|i| a[i].sqrt())
    }
    #[inline(always)]
    fn shl23(self, a: Self::V) -> Self::V {
        core::array::from_fn(|i| f32::from_bits(a[i].to_bits() << 23))
    }
    #[inline(always)]
    fn zero_below(self, a: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        core::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { a[i] })
    }
    #[inline(always)]
    fn first(self, a: Self::V, b: Self::V, n: usize) -> Self::V {
        core::array::from_fn(|i| if i < n { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        let b: [f32; 8] = core::array::from_fn(|i| a[i] + a[i + 8]);
        let c: [f32; 4] = core::array::from_fn(|i| b[i] + b[i + 4]);
        (c[0] + c[2]) + (c[1] + c[3])
    }
    #[inline(always)]
    fn max_lane(self, a: Self::V) -> f32 {
        let b: [f32; 8] = core::array::from_fn(|i| larger(a[i], a[i + 8]));
        let c: [f32; 4] = core::array::from_fn(|i| larger(b[i], b[i + 4]));
        larger(larger(c[0], c[2]), larger(c[1], c[3]))
    }
}
