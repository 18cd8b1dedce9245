//! Tile registers one by one, so that attention on tiles is written once: for those of AMX, for their like by dot
//! products (`dots`), and for their double in tests.
//!
//! Invariant: a register is 16 rows of 64 bytes, but for those of heads packed together (`Shape`); what a product of two does is
//! said in `amx`.

use super::super::super::amx::{Config, Tiles};
use core::arch::asm;

/// Registers 2, 3 and 5 of heads that are packed together: queries, a row of so many pairs each, and keys, so many rows.
/// Others have whole ones.
#[derive(Clone, Copy)]
pub(in super::super::super) struct Shape {
    pub(in super::super::super) pairs: usize,
}

/// `Tiles` of that shape.
///
/// # Safety
/// The CPU has tiles, and this thread no other `Tiles`.
pub(super) unsafe fn configure(shape: Shape) -> Tiles {
    let mut config = Config::WHOLE;
    config.cut(2, 16, 4 * shape.pairs);
    config.cut(3, shape.pairs, 64);
    config.cut(5, shape.pairs, 64);
    // SAFETY: as the caller promises.
    unsafe { Tiles::configure_as(&config) }
}

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
