//! Interface to individual tile registers, so that attention on tiles is written once: for AMX, for the emulation by
//! dot products (`dots`), and for a test double.
//!
//! Invariant: a register is 16 rows of 64 bytes, except those that `TileShape` restricts for heads packed together; `amx`
//! defines the product of two registers.

use crate::simd::amx::{TileConfig, Tiles};
use core::arch::asm;

/// Sizes of registers 2, 3 and 5: the queries have `pairs` pairs per row (register 2), the keys `pairs` rows
/// (registers 3 and 5). Less than full size for heads packed together only.
#[derive(Clone, Copy)]
pub(crate) struct TileShape {
    pub(crate) pairs: usize,
}

/// Configures this thread's AMX tiles in the given shape.
///
/// # Safety
/// The CPU has tiles, and this thread no other `Tiles`.
pub(super) unsafe fn configure(shape: TileShape) -> Tiles {
    let mut config = TileConfig::WHOLE;
    config.restrict(2, 16, 4 * shape.pairs);
    config.restrict(3, shape.pairs, 64);
    config.restrict(5, shape.pairs, 64);
    // SAFETY: as the caller promises.
    unsafe { Tiles::configure_as(&config) }
}

/// Eight tile registers of the current thread, addressed by number.
pub(crate) trait Registers {
    /// Loads row r from `from + r * stride`.
    ///
    /// # Safety
    /// 16 rows of 64 bytes (less if `TileShape` restricts register `T`) must be readable there.
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: isize);

    /// Stores row r to `to + r * stride`.
    ///
    /// # Safety
    /// 16 rows of 64 bytes (less if `TileShape` restricts register `T`) must be writable there.
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: isize);

    /// Sets register `T` to zero.
    fn zero<const T: usize>(&mut self);

    /// C += A B, with A and B in bf16 and C in f32.
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
