//! AMX tile registers emulated in plain code, following the manual: for tests of tile kernels on CPUs without AMX.

use crate::attention::tiles::{Registers, TileShape};

/// Eight registers of 16 rows of 64 bytes. Registers 2, 3 and 5 are smaller, as the shape says.
pub(crate) struct Double([[[u8; 64]; 16]; 8], TileShape);

impl Double {
    /// Registers with arbitrary content, which a kernel must not read.
    pub(crate) fn new(shape: TileShape) -> Self {
        Self([[[0xff; 64]; 16]; 8], shape)
    }

    /// (rows, bytes per row) of register `t`.
    fn size(&self, t: usize) -> (usize, usize) {
        match t {
            2 => (16, 4 * self.1.pairs),
            3 | 5 => (self.1.pairs, 64),
            _ => (16, 64),
        }
    }
}

/// Replaces a denormal number by zero, as AMX does.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// The bf16 numbers of each row as f32, those at even and those at odd positions separately. Denormals become zero.
fn numbers(tile: &[[u8; 64]; 16]) -> [[[f32; 16]; 2]; 16] {
    tile.map(|row| {
        [0, 2].map(|at| {
            core::array::from_fn(|j| {
                let bits = u16::from_le_bytes([row[4 * j + at], row[4 * j + at + 1]]);
                flushed(f32::from_bits(u32::from(bits) << 16))
            })
        })
    })
}

impl Registers for Double {
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: isize) {
        let (rows, bytes) = self.size(T);
        // Elements outside of the register's shape are zero, so that they contribute nothing to a sum.
        self.0[T] = [[0; 64]; 16];
        for (r, row) in self.0[T].iter_mut().enumerate().take(rows) {
            // SAFETY: row r of the rows that the caller promises.
            let from = unsafe { core::slice::from_raw_parts(from.offset(r as isize * stride), bytes) };
            row[..bytes].copy_from_slice(from);
        }
    }

    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: isize) {
        assert!(self.size(T) == (16, 64), "a whole register");
        for (r, row) in self.0[T].iter().enumerate() {
            // SAFETY: row r of the rows that the caller promises.
            unsafe { to.offset(r as isize * stride).cast::<[u8; 64]>().write(*row) };
        }
    }

    fn zero<const T: usize>(&mut self) {
        self.0[T] = [[0; 64]; 16];
    }

    /// Of the 32 products of an element, the even and the odd products are summed separately; the two sums are added,
    /// then added to C. A product of two bf16 numbers is exact in f32, so adding it to a sum rounds once.
    fn multiply<const C: usize, const A: usize, const B: usize>(&mut self) {
        let a = numbers(&self.0[A]);
        let b = numbers(&self.0[B]);
        for (c, a) in self.0[C].iter_mut().zip(&a) {
            let mut apart = [[0.0f32; 16]; 2];
            for (j, line) in b.iter().enumerate() {
                for odd in 0..2 {
                    let x = a[odd][j];
                    apart[odd].iter_mut().zip(&line[odd]).for_each(|(s, y)| *s = flushed(*s + x * y));
                }
            }
            for (n, c) in c.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let sum = flushed(f32::from_le_bytes(*c)) + flushed(apart[0][n] + apart[1][n]);
                *c = flushed(sum).to_le_bytes();
            }
        }
    }
}
