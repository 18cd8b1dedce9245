//! Emulation of tile registers by AVX512-BF16 dot products, for CPUs with AVX512-BF16 but no AMX.
//!
//! Invariant: an element of C adds its pairs in ascending order, the second product of each pair first, each with its
//! own rounding (as `dot::Bf16Pairs`; AMX tiles sum in another order). Loading a register only records the address: the
//! memory is read when the register is multiplied or stored, so attention must leave it unchanged until then.

use super::registers::Registers;
use super::{LINE, SCORES, SIDE, TILE};
use core::arch::x86_64::*;

/// Eight emulated registers: each is either held in `own` (the result of a product or of `zero`), or in memory at
/// address and row stride `at`.
pub(crate) struct DotRegisters {
    own: [RegisterLines; 8],
    at: [Option<TileRows>; 8],
    /// Number of pairs per row of register 2 as a left factor: the queries of a narrow head.
    pairs: usize,
}

/// Rows of a register in memory.
#[derive(Clone, Copy)]
struct TileRows {
    first: *const u8,
    /// Bytes from one row to the next.
    stride: isize,
}

/// Contents of one register.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct RegisterLines([u8; TILE]);

impl DotRegisters {
    /// Creates the registers for heads of `head_dim` columns.
    ///
    /// # Safety
    /// The CPU has AVX-512 with BF16.
    pub(super) unsafe fn new(head_dim: usize) -> DotRegisters {
        DotRegisters {
            own: [RegisterLines([0; TILE]); 8],
            at: [None; 8],
            pairs: head_dim.div_ceil(2).min(SIDE),
        }
    }

    /// The rows from which register `t` is read.
    #[inline(always)]
    fn rows(&self, t: usize) -> TileRows {
        self.at[t].unwrap_or(TileRows { first: self.own[t].0.as_ptr(), stride: LINE as isize })
    }
}

impl Registers for DotRegisters {
    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: isize) {
        self.at[T] = Some(TileRows { first: from, stride });
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: isize) {
        let from = self.rows(T);
        for r in 0..SIDE as isize {
            // SAFETY: rows of 64 bytes, guaranteed by the callers of `load` and `store`.
            unsafe {
                let line = _mm512_loadu_si512(from.first.wrapping_offset(r * from.stride).cast());
                _mm512_storeu_si512(to.wrapping_offset(r * stride).cast(), line);
            }
        }
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        self.own[T] = RegisterLines([0; TILE]);
        self.at[T] = None;
    }

    #[inline(always)]
    fn multiply<const C: usize, const A: usize, const B: usize>(&mut self) {
        const SCORE: isize = 4 * SCORES as isize;
        const WHOLE: isize = LINE as isize;
        let c = self.rows(C);
        let a = self.rows(A);
        let b = self.rows(B);
        let pairs = if A == 2 { self.pairs } else { SIDE };
        let to = self.own[C].0.as_mut_ptr();
        // SAFETY: the caller of `new` guarantees the instructions, and the callers of `load` that the registers are
        // readable.
        unsafe {
            match a.stride {
                WHOLE => product::<WHOLE>(c, a.first, b, pairs, to),
                SCORE => product::<SCORE>(c, a.first, b, pairs, to),
                apart => unreachable!("rows of a left factor lie {apart} bytes apart"),
            }
        }
        self.at[C] = None;
    }
}

/// Computes `to = c + a b`, 16 rows of 16 sums; rows of `a` hold `pairs` pairs and lie `APART` bytes apart, `b` holds
/// `pairs` lines.
///
/// # Safety
/// `a`, `b` and `c` must be readable and `to` writable; the CPU must have AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn product<const APART: isize>(c: TileRows, a: *const u8, b: TileRows, pairs: usize, to: *mut u8) {
    // SAFETY: guaranteed by the caller; any 64 bytes are 32 valid bf16.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); SIDE];
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = _mm512_loadu_ps(c.first.offset(r as isize * c.stride).cast());
        }
        for j in 0..pairs as isize {
            let line = _mm512_loadu_si512(b.first.offset(j * b.stride).cast());
            let line = core::mem::transmute::<__m512i, __m512bh>(line);
            for (r, sum) in sums.iter_mut().enumerate() {
                let pair = a.offset(r as isize * APART + 4 * j).cast::<i32>().read_unaligned();
                let pair = core::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair));
                *sum = _mm512_dpbf16_ps(*sum, line, pair);
            }
        }
        for (r, &sum) in sums.iter().enumerate() {
            _mm512_storeu_ps(to.add(r * LINE).cast(), sum);
        }
    }
}
