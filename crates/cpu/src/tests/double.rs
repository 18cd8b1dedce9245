//! Tile registers emulated in plain code, following the manual: for tests of tile kernels on CPUs without AMX.

use crate::simd::amx::{SIDE, STEP, STRIP, TileUnit};

/// The accumulators as bits, the rows of A, and for each pair of k one line of B with its 32 columns. For int8, a
/// pair is four values.
pub(crate) struct Double<const INT8: bool = false> {
    c: [[f32; STRIP]; STRIP],
    a: [[u16; STEP]; STRIP],
    b: [[[u16; 2]; STRIP]; SIDE],
}

/// Replaces a denormal number by zero, as AMX does.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// A bf16 number as f32; denormals become zero.
fn number(x: u16) -> f32 {
    flushed(f32::from_bits(u32::from(x) << 16))
}

impl<const INT8: bool> TileUnit for Double<INT8> {
    unsafe fn configure() -> Self {
        Self { c: [[f32::NAN; STRIP]; STRIP], a: [[0x7fc0; STEP]; STRIP], b: [[[0x7fc0; 2]; STRIP]; SIDE] }
    }

    fn zero(&mut self) {
        self.c = [[0.0; STRIP]; STRIP];
    }

    unsafe fn begin(&mut self, c: *const f32) {
        // SAFETY: as the caller promises.
        self.c = unsafe { c.cast::<[[f32; STRIP]; STRIP]>().read_unaligned() };
    }

    unsafe fn end(&mut self, c: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { c.cast::<[[f32; STRIP]; STRIP]>().write_unaligned(self.c) }
    }

    unsafe fn load_a(&mut self, a: *const u8, row: usize, _near: bool) {
        for (r, to) in self.a.iter_mut().enumerate() {
            // SAFETY: row r of the rows that the caller promises.
            *to = unsafe { a.add(r * row).cast::<[u16; STEP]>().read_unaligned() };
        }
    }

    unsafe fn load_b(&mut self, b: *const u8) {
        // SAFETY: the caller promises two tiles of 16 lines of 16 pairs.
        let tiles = unsafe { b.cast::<[[[[u16; 2]; SIDE]; SIDE]; 2]>().read_unaligned() };
        for (half, lines) in tiles.iter().enumerate() {
            for (line, to) in lines.iter().zip(&mut self.b) {
                to[half * SIDE..][..SIDE].copy_from_slice(line);
            }
        }
    }

    /// Of the 32 products of an element, the even and the odd products are summed separately, then added together, then
    /// added to C.
    /// The exact product and its sum in f64 come before each rounding to f32.
    fn multiply(&mut self) {
        if INT8 {
            return self.multiply_codes();
        }
        for (sums, a) in self.c.iter_mut().zip(&self.a) {
            for (n, sum) in sums.iter_mut().enumerate() {
                let mut apart = [0.0f32; 2];
                for (pair, line) in a.chunks_exact(2).zip(&self.b) {
                    for (odd, s) in apart.iter_mut().enumerate() {
                        let product = f64::from(number(pair[odd])) * f64::from(number(line[n][odd]));
                        *s = flushed((product + f64::from(*s)) as f32);
                    }
                }
                *sum = flushed(flushed(*sum) + flushed(apart[0] + apart[1]));
            }
        }
    }
}

impl<const INT8: bool> Double<INT8> {
    /// int8 products with wrapping i32 sums.
    fn multiply_codes(&mut self) {
        let codes = |pair: [u16; 2]| {
            let [[a, b], [c, d]] = pair.map(u16::to_le_bytes);
            [a, b, c, d].map(|code| i32::from(code as i8))
        };
        for (sums, a) in self.c.iter_mut().zip(&self.a) {
            for (n, sum) in sums.iter_mut().enumerate() {
                let mut bits = sum.to_bits() as i32;
                for (pair, line) in a.chunks_exact(2).zip(&self.b) {
                    let a = codes([pair[0], pair[1]]);
                    let b = codes(line[n]);
                    a.iter().zip(b).for_each(|(a, b)| bits = bits.wrapping_add(a * b));
                }
                *sum = f32::from_bits(bits as u32);
            }
        }
    }
}
