//! Formats an f32 as numpy does, which is the format of the scores in VirNucPro's result files. Invariant: the text is
//! the shortest that parses back to the same f32.
//!
//! Source: numpy's `scalartypes.c.src` (`@name@type_str_either`) up to version 2.2, the versions that the original was
//! run with: positional with at least one decimal for 0 and for 1e-4 <= |x| < 1e16, compared in more than single
//! precision (so the f32 nearest to 1e-4, which is slightly less, prints `1e-04`); otherwise scientific, with at least
//! two digits of exponent.

use std::fmt::{self, Write};

/// Displays an f32 as `str(numpy.float32(x))` does: `0.002076708`, `1e-05`, `1.0`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NumpyF32(pub f32);

impl fmt::Display for NumpyF32 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = self.0;
        let size = f64::from(x.abs());
        if x.is_nan() {
            f.write_str("nan")
        } else if x.is_infinite() {
            f.write_str(if x > 0.0 { "inf" } else { "-inf" })
        } else if x == 0.0 || (1e-4..1e16).contains(&size) {
            // Rust's `{}` also prints the shortest text, and never in scientific notation.
            let decimals = if x.fract() == 0.0 { ".0" } else { "" };
            write!(f, "{x}{decimals}")
        } else {
            scientific(x, f)
        }
    }
}

/// Writes `1.5e-07`, `1e+16`: Rust's shortest digits with numpy's exponent.
fn scientific(x: f32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut text = StackText { bytes: [0; 24], len: 0 };
    write!(text, "{x:e}")?;
    let text = std::str::from_utf8(&text.bytes[..text.len]).map_err(|_| fmt::Error)?;
    let (digits, exponent) = text.split_once('e').ok_or(fmt::Error)?;
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(rest) => ('-', rest),
        None => ('+', exponent),
    };
    write!(f, "{digits}e{sign}{exponent:0>2}")
}

/// A short text on the stack: nine digits, signs, point and exponent of an f32 take at most 15 bytes.
struct StackText {
    bytes: [u8; 24],
    len: usize,
}

impl Write for StackText {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        let end = self.len + piece.len();
        let place = self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?;
        place.copy_from_slice(piece.as_bytes());
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the f32 with these `bits` against the text that numpy 2.2.6 printed for it.
    fn check(bits: u32, expected: &str) {
        assert_eq!(NumpyF32(f32::from_bits(bits)).to_string(), expected, "{bits:#x}");
    }

    #[test]
    fn as_numpy_prints() {
        for (bits, expected) in [
            (0x0000_0000, "0.0"),
            (0x8000_0000, "-0.0"),
            (0x3f80_0000, "1.0"),
            (0xc020_0000, "-2.5"),
            (0x3dcc_cccd, "0.1"),
            (0x3b08_1961, "0.002076708"),
            (0x3eaa_aaab, "0.33333334"),
            (0x3f7f_ffff, "0.99999994"),
            (0x38d1_b719, "0.00010000001"),
            (0x38d1_b717, "1e-04"),
            (0x38d1_b1b9, "9.999e-05"),
            (0x3727_c5ac, "1e-05"),
            (0xb727_c5ac, "-1e-05"),
            (0x3421_0fb0, "1.5e-07"),
            (0x0080_0000, "1.1754944e-38"),
            (0x0001_56e0, "1.23e-40"),
            (0x0000_0001, "1e-45"),
            (0x47c3_4fff, "99999.99"),
            (0x4996_b43f, "1234567.9"),
            (0x4b00_0001, "8388609.0"),
            (0x4b80_0000, "16777216.0"),
            (0x4ceb_79a3, "123456790.0"),
            (0x5863_5fa9, "1000000000000000.0"),
            (0x598e_1bca, "5000000000000000.0"),
            (0x5a0e_1bc9, "9999999000000000.0"),
            (0x5a0e_1bca, "1e+16"),
            (0x5a8e_1bca, "2e+16"),
            (0x60d6_29d3, "1.2345678e+20"),
            (0x7f7f_ffff, "3.4028235e+38"),
            (0x7fc0_0000, "nan"),
            (0x7f80_0000, "inf"),
            (0xff80_0000, "-inf"),
        ] {
            check(bits, expected);
        }
    }

    #[test]
    fn reads_back_as_the_same_number() {
        // Every 65 521st f32: 65 550 values, over all exponents.
        for bits in (0..=u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            if x.is_finite() {
                let text = NumpyF32(x).to_string();
                assert_eq!(text.parse::<f32>().unwrap().to_bits(), bits, "{text}");
            }
        }
    }
}
