//! Matrices as [`graph::Layout::Scaled`] has them: rows of e4m3 codes, and a scale for each behind them all. Invariant:
//! codes and scales of activations are those of `graph::ops::Quantize`, bit for bit on every device; those of weights are
//! made here for all devices.

use graph::GRANULE;

/// The largest number of e4m3.
const LARGEST: f32 = 448.0;
/// Rows of smaller numbers are quantised as if this were their largest, so that no scale vanishes.
const TINY: f32 = f32::from_bits(27 << 23); // 2^-100
/// Neither sign.
const NAN: u8 = 0x7F;

/// Bytes of a row of codes.
pub(crate) fn stride(columns: usize) -> usize {
    columns.next_multiple_of(GRANULE as usize)
}

/// The codes of a row, zeros behind them, and its scale: that of its largest number.
fn quantise(row: &[f32], codes: &mut [u8]) -> f32 {
    with_scale_of(row, largest(row), codes)
}

/// The same for a row of weights: of several scales, that with the least squared error. Where in its octave a row lies
/// makes the less difference the longer it is (the errors of n numbers average out with 1 / sqrt n).
pub(crate) fn quantise_weights(row: &[f32], codes: &mut [u8]) -> f32 {
    let most = largest(row);
    let tried = (LONG / row.len().max(1)).pow(2).clamp(1, MOST_TRIED);
    let candidates = (0..tried).map(|i| most * (1.0 + i as f32 / tried as f32));
    if tried == 1 {
        return with_scale_of(row, most, codes);
    }
    let errors = candidates.map(|most| (squared_error(row, most), most));
    let best = errors.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(most, |(_, most)| most);
    with_scale_of(row, best, codes)
}

/// Rows of this length and longer have one scale that is tried; those of half the length have four.
const LONG: usize = 1280;
/// The most scales of a row that are tried.
const MOST_TRIED: usize = 512;

fn largest(row: &[f32]) -> f32 {
    row.iter().fold(TINY, |most, x| most.max(x.abs()))
}

/// With the scale of a row whose largest number is `most`.
fn with_scale_of(row: &[f32], most: f32, codes: &mut [u8]) -> f32 {
    let inverse = LARGEST / most;
    let (codes, padding) = codes.split_at_mut(row.len());
    codes.iter_mut().zip(row).for_each(|(code, &x)| *code = round(x * inverse));
    padding.fill(0);
    most / LARGEST
}

fn squared_error(row: &[f32], most: f32) -> f32 {
    let (inverse, scale) = (LARGEST / most, most / LARGEST);
    row.iter().map(|&x| (widen(round(x * inverse)) * scale - x).powi(2)).sum()
}

/// A row from its codes, which may be more, and its scale: not rounded.
fn widen_row(codes: &[u8], scale: f32, row: &mut [f64]) {
    row.iter_mut().zip(codes).for_each(|(x, &code)| *x = f64::from(widen(code)) * f64::from(scale));
}

/// A whole matrix as its bytes.
pub fn encode(numbers: &[f64], columns: usize) -> Vec<u8> {
    let (mut codes, mut scales) = (vec![], vec![]);
    for row in numbers.chunks(columns.max(1)) {
        let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
        let at = codes.len();
        codes.resize(at + stride(columns), 0);
        scales.extend(quantise(&row, &mut codes[at..]).to_le_bytes());
    }
    codes.extend(scales);
    codes
}

/// A whole matrix from its bytes, widened exactly.
pub fn decode(bytes: &[u8], rows: usize, columns: usize) -> Vec<f64> {
    let stride = stride(columns);
    let (codes, scales) = bytes.split_at(rows * stride);
    let scales = scales.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let mut numbers = vec![0.0; rows * columns];
    let to = numbers.chunks_mut(columns.max(1));
    for ((row, codes), scale) in to.zip(codes.chunks(stride.max(1))).zip(scales) {
        widen_row(codes, scale, row);
    }
    numbers
}

/// The code of the nearest number, ties to even; what is too large becomes the largest.
fn round(x: f32) -> u8 {
    let bits = x.to_bits();
    let (sign, magnitude) = ((bits >> 24 & 0x80) as u8, bits & 0x7FFF_FFFF);
    if x.is_nan() {
        return NAN;
    }
    // From 2^-6 on numbers have a leading one: three bits of the fraction stay, and the exponent's bias is 7.
    let code = if magnitude >= 121 << 23 {
        ((magnitude + 0x7_FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)
    } else {
        // In units of 2^-9.
        (f32::from_bits(magnitude) * 512.0).round_ties_even() as u32
    };
    sign | code.min(0x7E) as u8
}

/// The number of a code.
fn widen(code: u8) -> f32 {
    let (exponent, fraction) = (u32::from(code >> 3 & 15), u32::from(code & 7));
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
            let (a, b) = (widen(code), widen(code + 1));
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
    fn rows_keep_their_largest_number_and_zeros_stay() {
        let rows = [[1.0, -7.0, 0.0], [0.0; 3], [1e-38, 2e-38, 0.0], [3e38, 1e38, -1.0]];
        let bytes = encode(&rows.concat(), 3);
        assert_eq!(bytes.len(), 4 * (16 + 4));
        assert!(bytes[3..16].iter().all(|&code| code == 0), "padding");
        let back = decode(&bytes, 4, 3);
        for (r, row) in rows.iter().enumerate() {
            let most = row.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (x, y) in row.iter().zip(&back[3 * r..]) {
                // Half of the last of three bits, or half of the smallest number.
                assert!((x - y).abs() <= x.abs() / 16.0 + most / 448.0 / 1024.0 + 1e-33, "{x} is {y}");
            }
        }
        // Weights lose no more than at the scale of their largest number.
        let row: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
        let error = |quantise: fn(&[f32], &mut [u8]) -> f32| {
            let mut codes = [0; 48];
            let scale = quantise(&row, &mut codes);
            row.iter().zip(codes).map(|(x, code)| (widen(code) * scale - x).powi(2)).sum::<f32>()
        };
        assert!(error(quantise_weights) < 0.9 * error(quantise));
        let lost = decode(&encode(&[f64::NAN, 1.0], 2), 1, 2);
        assert!(lost[0].is_nan() && (lost[1] - 1.0).abs() < 1e-6);
        assert!(decode(&encode(&[f64::INFINITY, 1.0], 2), 1, 2)[0].is_nan());
    }
}
