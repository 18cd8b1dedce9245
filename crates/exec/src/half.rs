//! Conversions between 16-bit floats and f32 in integer operations. Invariant: widening is exact; narrowing rounds
//! once, to nearest with ties to even (IEEE 754); NaN stays NaN.

/// Converts bf16 to f32: the bf16 bits are the upper half of the f32.
#[inline(always)]
pub fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Converts f16 to f32. Multiplying by 2^112 corrects the exponent bias and also turns subnormal numbers into normal
/// ones.
#[inline(always)]
pub fn f16_to_f32(x: u16) -> f32 {
    let magnitude = u32::from(x & 0x7FFF) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    // Infinity and NaN have all exponent bits set in both formats.
    let bits = if magnitude >= 0x7C00 << 13 { magnitude | 0x7F80_0000 } else { finite };
    f32::from_bits(bits | (u32::from(x & 0x8000) << 16))
}

/// Converts f32 to bf16. Adding 0x7FFF, plus 1 if the last kept bit is odd, rounds to nearest with ties to even by
/// carrying into the kept bits.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    if bits & 0x7FFF_FFFF > 0x7F80_0000 { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// Converts f32 to f16. Normal results round as in `f32_to_bf16`. For subnormal results, adding 1/2 makes the
/// hardware round to multiples of 2^-24, the unit in the last place of 1/2.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    let sign = ((x.to_bits() >> 16) & 0x8000) as u16;
    let normal = (bits.wrapping_sub(112 << 23).wrapping_add(0xFFF + ((bits >> 13) & 1)) >> 13) as u16;
    let small = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits()) as u16;
    let finite = if bits < (127 - 14) << 23 { small } else { normal };
    // 65520 is the midpoint between the largest finite f16 and 2^16, and rounds to infinity.
    let large = if bits > 0x7F80_0000 { 0x7E00 } else { 0x7C00 };
    sign | if bits >= 65_520.0_f32.to_bits() { large } else { finite }
}
