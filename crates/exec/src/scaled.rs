//! Quantized matrices in [`plimsoll_graph::Layout::Scaled`]: rows of quantized values, followed by one scale per row.
//! Invariant: quantized values and scales of activations equal the definition of `plimsoll_graph::ops::Quantize`, bit
//! for bit, on every device; weights are quantized here for all devices.

use plimsoll_graph::GRANULE;

/// Lower bound of a row's largest magnitude for quantization, so that no scale underflows.
pub const TINY: f32 = f32::from_bits(27 << 23); // 2^-100
/// 1.5 * 2^23. Adding it rounds to an integer, ties to even, whose two's complement is then in the low bits.
pub const ROUND: f32 = 12_582_912.0;
/// NaN of e4m3, with positive sign.
const NAN: u8 = 0x7F;

/// Element type of quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedFormat {
    /// 8-bit floats, e4m3.
    E4m3,
    /// 8-bit signed integers.
    Int8,
}

/// Bytes of a row of quantized values, padded.
#[inline]
pub fn stride(columns: usize) -> usize {
    columns.next_multiple_of(GRANULE as usize)
}

/// Rows of at least this length use the scale of their largest magnitude only; rows of half the length try four
/// scales.
const LONG: usize = 1280;
/// Maximum number of scales tried for a row.
const MAX_TRIED: usize = 512;

impl QuantizedFormat {
    /// The largest representable value.
    #[inline]
    pub fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::Int8 => 127.0,
        }
    }

    /// The nearest quantized value, ties to even; larger values saturate.
    fn round(self, x: f32) -> u8 {
        match self {
            Self::E4m3 => round(x),
            // The addition rounds without the function call that rounding takes on plain x86-64.
            Self::Int8 => (x.clamp(-127.0, 127.0) + ROUND).to_bits() as u8,
        }
    }

    /// The f32 value of a quantized value, without its scale.
    fn widen(self, code: u8) -> f32 {
        match self {
            Self::E4m3 => widen(code),
            Self::Int8 => f32::from(code as i8),
        }
    }

    /// Quantizes a row with the scale of its largest magnitude, and fills the padding with zeros. Returns the scale.
    fn quantise(self, row: &[f32], codes: &mut [u8]) -> f32 {
        self.with_scale_of(row, self.largest_of(row), codes)
    }

    /// Quantizes a row of weights with the scale, of several candidates, that has the least squared error. Returns
    /// the scale. The choice matters less the longer the row is, because the errors of n values average out with 1 /
    /// sqrt n.
    pub(crate) fn quantise_weights(self, row: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = self.largest_of(row);
        let tried = (LONG / row.len().max(1)).pow(2).clamp(1, MAX_TRIED);
        let candidates = (0..tried).map(|i| absmax * self.factor(i as f32 / tried as f32));
        if tried == 1 {
            return self.with_scale_of(row, absmax, codes);
        }
        let errors = candidates.map(|absmax| (self.squared_error(row, absmax), absmax));
        let best = errors.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(absmax, |(_, absmax)| absmax);
        self.with_scale_of(row, best, codes)
    }

    /// Factor on the largest magnitude for a candidate scale; `share` in 0..1 is the candidate's position. For
    /// floats, scales an octave apart give the same error, so candidates cover one octave. For integers, larger
    /// scales increase the rounding error and smaller ones cut off large values, so candidates reach down to 0.75.
    fn factor(self, share: f32) -> f32 {
        match self {
            Self::E4m3 => 1.0 + share,
            Self::Int8 => 1.0 - 0.25 * share,
        }
    }

    /// The largest magnitude of a row, at least `TINY`.
    fn largest_of(self, row: &[f32]) -> f32 {
        let absmax = row.iter().fold(TINY, |absmax, x| absmax.max(x.abs()));
        match self {
            Self::E4m3 => absmax,
            // No integer represents NaN. For rows with NaN or infinity the sum is NaN, which makes the scale NaN.
            Self::Int8 => absmax + row.iter().map(|x| 0.0 * x).sum::<f32>(),
        }
    }

    /// Quantizes a row whose largest magnitude is taken to be `absmax`; fills the padding with zeros and returns the
    /// scale.
    fn with_scale_of(self, row: &[f32], absmax: f32, codes: &mut [u8]) -> f32 {
        let inverse = self.largest() / absmax;
        let (codes, padding) = codes.split_at_mut(row.len());
        codes.iter_mut().zip(row).for_each(|(code, &x)| *code = self.round(x * inverse));
        padding.fill(0);
        absmax / self.largest()
    }

    /// Squared error of a row quantized with the largest magnitude `absmax`.
    fn squared_error(self, row: &[f32], absmax: f32) -> f32 {
        let inverse = self.largest() / absmax;
        let scale = absmax / self.largest();
        row.iter().map(|&x| (self.widen(self.round(x * inverse)) * scale - x).powi(2)).sum()
    }

    /// Quantizes a matrix and returns its bytes: all rows, then all scales.
    pub fn encode(self, numbers: &[f64], columns: usize) -> Vec<u8> {
        let mut codes = vec![];
        let mut scales = vec![];
        for row in numbers.chunks(columns.max(1)) {
            let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
            let at = codes.len();
            codes.resize(at + stride(columns), 0);
            scales.extend(self.quantise(&row, &mut codes[at..]).to_le_bytes());
        }
        codes.extend(scales);
        codes
    }

    /// Dequantizes a matrix exactly, from its bytes.
    pub fn decode(self, bytes: &[u8], rows: usize, columns: usize) -> Vec<f64> {
        let stride = stride(columns);
        let (codes, scales) = bytes.split_at(rows * stride);
        let scales = scales.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let mut numbers = vec![0.0; rows * columns];
        let to = numbers.chunks_mut(columns.max(1));
        for ((row, codes), scale) in to.zip(codes.chunks(stride.max(1))).zip(scales) {
            for (x, &code) in row.iter_mut().zip(codes) {
                *x = f64::from(self.widen(code)) * f64::from(scale);
            }
        }
        numbers
    }
}

/// Converts to the nearest e4m3, ties to even; larger values saturate.
fn round(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24 & 0x80) as u8;
    let magnitude = bits & 0x7FFF_FFFF;
    if x.is_nan() {
        return NAN;
    }
    // From 2^-6 on values are normal: three fraction bits are kept, and the exponent's bias is 7.
    let code = if magnitude >= 121 << 23 {
        ((magnitude + 0x7_FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)
    } else {
        // Subnormal values are multiples of 2^-9.
        (f32::from_bits(magnitude) * 512.0).round_ties_even() as u32
    };
    sign | code.min(0x7E) as u8
}

/// Converts e4m3 to f32.
fn widen(code: u8) -> f32 {
    let exponent = u32::from(code >> 3 & 15);
    let fraction = u32::from(code & 7);
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, _) => fraction as f32 / 512.0,
        _ => f32::from_bits(((exponent + 120) << 23) + (fraction << 20)),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_and_ties_go_to_even() {
        for code in 0..=0x7Eu8 {
            assert_eq!((round(widen(code)), round(-widen(code))), (code, code | 0x80), "{}", widen(code));
        }
        assert_eq!((round(f32::NAN), round(f32::INFINITY), round(-1e9)), (NAN, 0x7E, 0xFE));
        for code in 0..0x7Eu8 {
            let a = widen(code);
            let b = widen(code + 1);
            let middle = 0.5 * (a + b);
            assert_eq!(round(middle), code + code % 2, "{middle}");
            assert_eq!(round(middle - 1e-3 * (b - a)), code);
            assert_eq!(round(-(middle + 1e-3 * (b - a))), 0x80 | (code + 1));
        }
    }

    /// arXiv:2209.05433, table 1.
    #[test]
    fn known_numbers() {
        let known =
            [(0x7E, 448.0), (0x08, 2f32.powi(-6)), (0x07, 0.875 * 2f32.powi(-6)), (0x01, 2f32.powi(-9))];
        for (code, number) in known {
            assert_eq!((widen(code), round(number)), (number, code));
        }
        assert_eq!(TINY, 2f32.powi(-100));
    }

    #[test]
    fn rows_of_integers_keep_their_largest_number() {
        let rows = [[1.0, -7.0, 0.0], [0.0; 3], [1e-38, 2e-38, 0.0], [3e38, 1e38, -1.0]];
        let bytes = QuantizedFormat::Int8.encode(&rows.concat(), 3);
        // 127 / 7 is 18.14; the second row is all zero, and the third far below the smallest scale.
        assert_eq!(bytes[..16], [18, (-127i8) as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((&bytes[16..48], &bytes[48..51]), (&[0; 32][..], &[127, 42, 0][..]));
        let back = QuantizedFormat::Int8.decode(&bytes, 4, 3);
        for (r, row) in rows.iter().enumerate() {
            let absmax = row.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (x, y) in row.iter().zip(&back[3 * r..]) {
                assert!((x - y).abs() <= absmax / 253.9 + 1e-33, "{x} is {y}");
            }
        }
        for (x, code) in [(0.5, 0), (1.5, 2), (-2.5, -2), (126.6, 127), (1e9, 127), (f32::NAN, 0)] {
            assert_eq!(QuantizedFormat::Int8.round(x) as i8, code);
        }
        for none in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let bytes = QuantizedFormat::Int8.encode(&[1.0, none, 2.0, 2.0], 2);
            assert_eq!(bytes[..2], [0, 0]);
            let back = QuantizedFormat::Int8.decode(&bytes, 2, 2);
            assert!(back[..2].iter().all(|x| x.is_nan()) && (back[2] - 2.0).abs() < 1e-6, "{back:?}");
        }
    }

    #[test]
    fn rows_keep_their_largest_number_and_zeros_stay() {
        let rows = [[1.0, -7.0, 0.0], [0.0; 3], [1e-38, 2e-38, 0.0], [3e38, 1e38, -1.0]];
        let bytes = QuantizedFormat::E4m3.encode(&rows.concat(), 3);
        assert_eq!(bytes.len(), 4 * (16 + 4));
        assert!(bytes[3..16].iter().all(|&code| code == 0), "padding");
        let back = QuantizedFormat::E4m3.decode(&bytes, 4, 3);
        for (r, row) in rows.iter().enumerate() {
            let absmax = row.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (x, y) in row.iter().zip(&back[3 * r..]) {
                // Half of the last of three fraction bits, or half of the smallest subnormal.
                assert!((x - y).abs() <= x.abs() / 16.0 + absmax / 448.0 / 1024.0 + 1e-33, "{x} is {y}");
            }
        }
        // The error of weights is lower than with the scale of their largest magnitude.
        let row: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
        for of in [QuantizedFormat::E4m3, QuantizedFormat::Int8] {
            let error = |quantise: fn(QuantizedFormat, &[f32], &mut [u8]) -> f32| {
                let mut codes = [0; 48];
                let scale = quantise(of, &row, &mut codes);
                row.iter().zip(codes).map(|(x, code)| (of.widen(code) * scale - x).powi(2)).sum::<f32>()
            };
            assert!(
                error(QuantizedFormat::quantise_weights) < 0.9 * error(QuantizedFormat::quantise),
                "{of:?}"
            );
        }
        let lost = QuantizedFormat::E4m3.decode(&QuantizedFormat::E4m3.encode(&[f64::NAN, 1.0], 2), 1, 2);
        assert!(lost[0].is_nan() && (lost[1] - 1.0).abs() < 1e-6);
        assert!(
            QuantizedFormat::E4m3.decode(&QuantizedFormat::E4m3.encode(&[f64::INFINITY, 1.0], 2), 1, 2)[0]
                .is_nan()
        );
    }
}
