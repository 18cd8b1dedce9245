//! Element types of weight files and their conversions. Invariant: every conversion to f32 is exact except that of
//! f64, which rounds to nearest even; bytes are little-endian.

/// The element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileDType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper 16 bits of a binary32.
    BF16,
    /// Signed, 64 bits.
    I64,
    /// Signed, 32 bits.
    I32,
    /// Signed, 16 bits.
    I16,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl FileDType {
    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            FileDType::F64 | FileDType::I64 => 8,
            FileDType::F32 | FileDType::I32 => 4,
            FileDType::F16 | FileDType::BF16 | FileDType::I16 => 2,
            FileDType::I8 | FileDType::U8 | FileDType::Bool => 1,
        }
    }

    /// The type's name in safetensors headers.
    pub const fn name(self) -> &'static str {
        match self {
            FileDType::F64 => "F64",
            FileDType::F32 => "F32",
            FileDType::F16 => "F16",
            FileDType::BF16 => "BF16",
            FileDType::I64 => "I64",
            FileDType::I32 => "I32",
            FileDType::I16 => "I16",
            FileDType::I8 => "I8",
            FileDType::U8 => "U8",
            FileDType::Bool => "BOOL",
        }
    }

    /// Whether the type is a floating-point type, which `Weights::read_f32` can read.
    pub const fn is_float(self) -> bool {
        matches!(self, FileDType::F64 | FileDType::F32 | FileDType::F16 | FileDType::BF16)
    }
}

/// Converts the bytes of a floating-point type to f32, one element of `out` per `dtype.size()` bytes. Integer types
/// leave `out` unchanged; callers check `is_float` first.
pub(super) fn to_f32(dtype: FileDType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        FileDType::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        FileDType::F32 => each(bytes, out, f32::from_le_bytes),
        FileDType::F16 => each(bytes, out, |b| f16_to_f32(u16::from_le_bytes(b))),
        FileDType::BF16 => each(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
        FileDType::I64 | FileDType::I32 | FileDType::I16 | FileDType::I8 | FileDType::U8 | FileDType::Bool => {}
    }
}

/// Converts the bytes of an integer or boolean type to i64, one element of `out` per `dtype.size()` bytes.
/// Floating-point types leave `out` unchanged.
pub(super) fn to_i64(dtype: FileDType, bytes: &[u8], out: &mut [i64]) {
    match dtype {
        FileDType::I64 => each(bytes, out, i64::from_le_bytes),
        FileDType::I32 => each(bytes, out, |b| i64::from(i32::from_le_bytes(b))),
        FileDType::I16 => each(bytes, out, |b| i64::from(i16::from_le_bytes(b))),
        FileDType::I8 => each(bytes, out, |b| i64::from(i8::from_le_bytes(b))),
        FileDType::U8 | FileDType::Bool => each(bytes, out, |[b]| i64::from(b)),
        FileDType::F64 | FileDType::F32 | FileDType::F16 | FileDType::BF16 => {}
    }
}

/// Converts binary16 to binary32 exactly, including NaN payloads. The exponent bias is corrected by a multiplication
/// with 2^112, which is exact for normal numbers and subnormals, so that subnormals need no branch.
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff) << 13;
    let bits = match half & 0x7c00 {
        0x7c00 => magnitude | 0x7f80_0000,
        _ => (f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23)).to_bits(),
    };
    f32::from_bits(sign | bits)
}

/// Converts binary32 to binary16, rounding to nearest even. Overflow gives infinity, NaN gives a quiet NaN.
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    // 65520 is half way between the largest binary16 (65504) and 2^16; by the rule of ties it rounds to infinity.
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14 (subnormals) the result is a multiple of 2^-24. The last place of an f32 near 0.5 is 2^-24,
        // so adding 0.5 makes the addition itself round to nearest even.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let odd = (magnitude >> 13) & 1;
    // Drops 13 fraction bits: half of the last place minus one, plus one where the last place is odd, carries
    // exactly where round-to-nearest-even rounds up. 112 is the difference of the exponent biases.
    let rounded = magnitude + 0xfff + odd;
    sign | ((rounded - (112 << 23)) >> 13) as u16
}

/// Copies the bytes of elements of N bytes without conversion.
pub(super) fn to_raw<const N: usize>(_: FileDType, bytes: &[u8], out: &mut [[u8; N]]) {
    each(bytes, out, |b| b);
}

/// Applies `convert` to each group of N bytes and stores the results in `out`.
fn each<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    for (value, group) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *value = convert(*group);
    }
}

/// Converts binary32 to bfloat16, rounding to nearest even. NaN gives a quiet NaN.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    // Half of the last place minus one, plus one where the last place is odd, carries exactly where
    // round-to-nearest-even rounds up.
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a binary16 by its definition in IEEE 754-2008, section 3.4.
    fn defined(half: u16) -> f64 {
        let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from((half >> 10) & 0x1f);
        let fraction = f64::from(half & 0x3ff);
        match exponent {
            0 => sign * fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            e => sign * (1.0 + fraction / 1024.0) * 2f64.powi(e - 15),
        }
    }

    #[test]
    fn every_half_converts_exactly_and_back() {
        for half in 0..=u16::MAX {
            let value = f16_to_f32(half);
            let expected = defined(half);
            if expected.is_nan() {
                assert!(value.is_nan(), "{half:#06x}");
                assert!(f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{half:#06x}");
                assert_eq!(f32_to_f16(value), half, "{half:#06x}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        for half in 0..0x7bffu16 {
            let low = f16_to_f32(half);
            let high = f16_to_f32(half + 1);
            let middle = (low + high) / 2.0;
            let even = if half & 1 == 0 { half } else { half + 1 };
            assert_eq!(f32_to_f16(middle), even, "{half:#06x}");
            assert_eq!(f32_to_f16(middle.next_down()), half, "{half:#06x}");
            assert_eq!(f32_to_f16(middle.next_up()), half + 1, "{half:#06x}");
        }
        assert_eq!(f32_to_f16(65519.99), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(-1e30), 0xfc00);
        assert_eq!(f32_to_f16(1e-30), 0);
    }

    #[test]
    fn bytes_are_little_endian() {
        let check = |dtype, bytes: &[u8], expected: &[f32]| {
            let mut out = vec![0.0; expected.len()];
            to_f32(dtype, bytes, &mut out);
            assert_eq!(out, expected, "{dtype:?}");
        };
        check(FileDType::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &[1.0, -2.0]);
        check(FileDType::F16, &[0, 0x3c, 0, 0xc0], &[1.0, -2.0]);
        check(FileDType::BF16, &[0x80, 0x3f, 0, 0xc0], &[1.0, -2.0]);
        check(FileDType::F64, &1.5f64.to_le_bytes(), &[1.5]);
        let mut out = [0; 2];
        to_i64(FileDType::I16, &[0xff, 0xff, 0, 1], &mut out);
        assert_eq!(out, [-1, 256]);
        to_i64(FileDType::U8, &[0xff, 1], &mut out);
        assert_eq!(out, [255, 1]);
        to_i64(FileDType::I8, &[0xff, 1], &mut out);
        assert_eq!(out, [-1, 1]);
    }
}
