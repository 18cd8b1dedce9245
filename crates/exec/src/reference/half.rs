//! The 16-bit float formats, to and from f64. Invariant: every 16-bit number is widened exactly, and f64 is rounded
//! once, to nearest with ties to even (IEEE 754-2019, 4.3.1); larger numbers become infinity.

/// A 16-bit binary floating-point format.
#[derive(Clone, Copy)]
pub struct HalfFormat {
    /// Stored bits of the significand.
    significand: u32,
    /// Exponent of the largest finite number, which is also the exponent bias.
    largest: i32,
}

/// bfloat16.
pub const BF16: HalfFormat = HalfFormat { significand: 7, largest: 127 };

/// IEEE binary16.
pub const F16: HalfFormat = HalfFormat { significand: 10, largest: 15 };

impl HalfFormat {
    /// Bits of positive infinity.
    fn infinity(self) -> u16 {
        0x7FFF >> self.significand << self.significand
    }

    /// The number with these bits.
    pub fn widen(self, bits: u16) -> f64 {
        let magnitude = bits & 0x7FFF;
        let exponent = i32::from(magnitude >> self.significand);
        let fraction = i32::from(magnitude) - (exponent << self.significand);
        // Exponent of the last fraction bit of a number whose exponent field is 0.
        let unit = -self.largest - self.significand as i32;
        let x = if magnitude > self.infinity() {
            f64::NAN
        } else if magnitude == self.infinity() {
            f64::INFINITY
        } else if exponent == 0 {
            libm::scalbn(f64::from(fraction), unit + 1)
        } else {
            libm::scalbn(f64::from(fraction + (1 << self.significand)), unit + exponent)
        };
        if bits == magnitude { x } else { -x }
    }

    /// Bits of the nearest number.
    pub fn round(self, x: f64) -> u16 {
        let sign = u16::from(x.is_sign_negative()) << 15;
        if x.is_nan() {
            return sign | 0x7FFF;
        }
        // Zero and subnormal f64 have exponents far below the range of either format.
        let exponent = (x.to_bits() >> 52 & 0x7FF) as i32 - 1023;
        if exponent > self.largest {
            return sign | self.infinity();
        }
        let biased = (exponent + self.largest).max(1);
        let unit = biased - self.largest - self.significand as i32;
        let units = libm::scalbn(x.abs(), -unit).round_ties_even() as i32;
        // A subnormal number has no leading one; a carry out of the significand gives the next exponent.
        let code = units + ((biased - 1) << self.significand);
        sign | (code as u16).min(self.infinity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives() {
        for half in [BF16, F16] {
            for bits in 0..=u16::MAX {
                let x = half.widen(bits);
                assert_eq!(x.is_nan(), bits & 0x7FFF > half.infinity());
                if !x.is_nan() {
                    assert_eq!(half.round(x), bits, "{x}");
                }
            }
            assert!(half.widen(half.round(f64::NAN)).is_nan());
        }
    }

    #[test]
    fn bf16_is_the_upper_half_of_f32() {
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7FFF <= BF16.infinity()) {
            assert_eq!(BF16.widen(bits), f64::from(f32::from_bits(u32::from(bits) << 16)));
        }
    }

    #[test]
    fn known_numbers() {
        // IEEE 754 binary16: 1, 2/3 rounded, the largest, the smallest normal and subnormal numbers.
        let cases = [(1.0, 0x3C00), (2.0 / 3.0, 0x3955), (-65504.0, 0xFBFF), (6.103_515_625e-5, 0x0400)];
        for (x, bits) in cases {
            assert_eq!(F16.round(x), bits, "{x}");
        }
        assert_eq!(F16.round(5.960_464_477_539_063e-8), 1);
        assert_eq!(F16.round(65519.99), 0x7BFF);
        assert_eq!(F16.round(65520.0), 0x7C00);
        assert_eq!(BF16.round(1e300), 0x7F80);
    }

    /// Between neighbours a < b, the midpoint rounds to the even one, and numbers beside the midpoint to the nearer
    /// one.
    #[test]
    fn ties_go_to_even() {
        for half in [BF16, F16] {
            for bits in (0..half.infinity() - 1).step_by(37).chain(0..4) {
                let a = half.widen(bits);
                let b = half.widen(bits + 1);
                let middle = 0.5 * (a + b);
                assert_eq!(half.round(middle), bits + bits % 2);
                assert_eq!(half.round(middle - 1e-3 * (b - a)), bits);
                assert_eq!(half.round(-(middle + 1e-3 * (b - a))), 0x8000 | (bits + 1));
            }
        }
    }
}
