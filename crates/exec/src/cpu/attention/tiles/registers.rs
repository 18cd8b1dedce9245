//! Tile registers one by one, so that attention on tiles is written once for those of AMX and for their double in tests.
//!
//! Invariant: a register is 16 rows of 64 bytes; what a product of two does is said in `amx`.

use super::super::super::amx::Tiles;
use core::arch::asm;

/// Eight registers of this thread's own, by number.
pub(in super::super::super) trait Registers {
    /// Row r from `from + r * stride`.
    ///
    /// # Safety
    /// Those rows are readable.
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: isize);

    /// Row r to `to + r * stride`.
    ///
    /// # Safety
    /// Those rows are writable.
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: isize);

    /// All zero.
    fn zero<const T: usize>(&mut self);

    /// C += A B, of bf16 to f32.
    fn multiply<const C: usize, const A: usize, const B: usize>(&mut self);
}

impl Registers for Tiles {
    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: isize) {
        // SAFETY: reads the 16 rows; `self` proves that the registers are configured.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {stride}*1]",
                t = const T,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: isize) {
        // SAFETY: writes the 16 rows; `self` proves that the registers are configured.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}*1], tmm{t}",
                t = const T,
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: a register only; `self` proves that it is configured.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
    }

    #[inline(always)]
    fn multiply<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: registers only; `self` proves that they are configured.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}
