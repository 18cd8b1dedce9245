//! placeholder until cast.rs is merged
#[inline(always)]
pub(super) fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}
#[inline(always)]
pub(super) fn f16_to_f32(x: u16) -> f32 {
    let magnitude = u32::from(x & 0x7FFF) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let bits = if magnitude >= 0x7C00 << 13 { magnitude | 0x7F80_0000 } else { finite };
    f32::from_bits(bits | u32::from(x & 0x8000) << 16)
}
