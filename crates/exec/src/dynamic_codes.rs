//! Quantization tables of 8-bit optimizer moments: the dynamic data type of Dettmers et al. 2022 ("8-bit Optimizers
//! via Block-wise Quantization", section 1.3; `create_dynamic_map` of bitsandbytes), signed for the first moment and
//! unsigned for the second. Invariant: one table of each, computed at compile time; the reference and all kernels
//! read the same tables.

/// Number of decades below one.
const DECADES: usize = 7;

/// The scale of each decade, 10^-6 to 10^0.
const POWERS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// First cell of the lookup table. Cells are the upper 16 bits of f32 magnitudes, from 2^-23, which is nearer to zero
/// than to any other table value, to 1.
const FIRST_CELL: usize = 0x3400;
/// Number of cells of the lookup table.
const CELLS: usize = 0x3F80 - FIRST_CELL + 1;

/// A quantization table of 256 values in -1..=1, ascending. A quantized value is an index into it.
pub struct DynamicCodes {
    values: [f32; 256],
    /// The largest number that is quantized to each index, rounded down to f32 so that comparing an f32 with it is
    /// exact.
    last: [f32; 256],
    /// For each sign and each value of the upper 16 bits of a number: the index of the lowest number with these bits.
    /// The index of any other number with these bits is equal or one more, which [`Self::nearest`] decides by `last`.
    cells: [[u8; CELLS]; 2],
}

/// Table with negative values, for first moments.
pub static SIGNED: DynamicCodes = DynamicCodes::new(true);

/// Table of values from zero on, for second moments. Only zero itself is quantized to zero: a second moment that
/// became zero would no longer damp the step, and the remaining first moment could give a step of any size.
pub static UNSIGNED: DynamicCodes = DynamicCodes::new(false);

impl DynamicCodes {
    /// Builds a table: zero, one, and in each decade the midpoints of equal parts of 0.1..1. The lowest decade has
    /// one part (two if unsigned) for each sign, and every following decade twice as many as the one before.
    const fn new(signed: bool) -> Self {
        let mut values = [0.0; 256];
        let zero = if signed { 127 } else { 0 };
        let mut code = zero;
        let mut decade = 0;
        while decade < DECADES {
            let parts = 1 << (if signed { decade } else { decade + 1 });
            let mut part = 0;
            while part < parts {
                code += 1;
                values[code] = ((edge(part, parts) + edge(part + 1, parts)) / 2.0 * POWERS[decade]) as f32;
                if signed {
                    values[2 * zero - code] = -values[code];
                }
                part += 1;
            }
            decade += 1;
        }
        values[255] = 1.0;
        let last = last(&values);
        Self { values, last, cells: [cells(&last, false), cells(&last, true)] }
    }

    /// Dequantizes: the value at index `code`.
    #[inline(always)]
    pub fn value(&self, code: u8) -> f32 {
        self.values[code as usize]
    }

    /// Quantizes: the index of the value nearest to `x`, the lower index of two equally near. For numbers beyond
    /// -1..=1 and NaN, any index.
    #[inline(always)]
    pub fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = ((bits & 0x7FFF_FFFF) >> 16) as usize;
        let cell = cell.saturating_sub(FIRST_CELL).min(CELLS - 1);
        let code = self.cells[(bits >> 31) as usize][cell];
        code.wrapping_add(u8::from(x > self.last[code as usize]))
    }

    /// Quantizes an f64 directly by the definition, which is slower.
    pub(crate) fn nearest_exact(&self, x: f64) -> u8 {
        (0..255).position(|i| x <= boundary(&self.values, i)).unwrap_or(255) as u8
    }
}

/// Lower edge of interval `i` when the interval from 0.1 to 1 is divided into `parts` equal intervals; 1 for `i =
/// parts`.
const fn edge(i: usize, parts: usize) -> f64 {
    if i == parts { 1.0 } else { i as f64 * ((1.0 - 0.1) / parts as f64) + 0.1 }
}

/// The largest number that is quantized to index `i`: the midpoint between value i and the next. For a zero at the
/// end of the table it is zero.
const fn boundary(values: &[f32; 256], i: usize) -> f64 {
    if i == 0 && values[0] == 0.0 { 0.0 } else { (values[i] as f64 + values[i + 1] as f64) / 2.0 }
}

/// Computes the table `DynamicCodes::last` for the given values.
const fn last(values: &[f32; 256]) -> [f32; 256] {
    // The last index has no upper limit.
    let mut last = [f32::INFINITY; 256];
    let mut i = 0;
    while i < 255 {
        let exact = boundary(values, i);
        let rounded = exact as f32;
        last[i] = if rounded as f64 > exact { rounded.next_down() } else { rounded };
        i += 1;
    }
    last
}

/// For each cell of magnitudes, the index of the lowest number in the cell. No cell contains more than one boundary
/// between indices; otherwise the assertion below fails at compile time.
const fn cells(last: &[f32; 256], negative: bool) -> [u8; CELLS] {
    let mut cells = [0; CELLS];
    let mut code = 0;
    let mut i = 0;
    while i < CELLS {
        let cell = if negative { CELLS - 1 - i } else { i };
        // Cell 0 extends down to zero; cell CELLS - 1 is the number 1 alone.
        let inner = if cell == 0 { 0 } else { (FIRST_CELL + cell) << 16 };
        let outer = if cell == CELLS - 1 { inner } else { ((FIRST_CELL + cell) << 16) | 0xFFFF };
        let inner = f32::from_bits(inner as u32);
        let outer = f32::from_bits(outer as u32);
        let (lowest, highest) = if negative { (-outer, -inner) } else { (inner, outer) };
        while lowest > last[code] {
            code += 1;
        }
        cells[cell] = code as u8;
        assert!(code == 255 || highest <= last[code + 1], "a cell of three codes");
        i += 1;
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_code_is_the_nearest() {
        for codes in [&SIGNED, &UNSIGNED] {
            let around = |x: f32| [x.next_down(), x, x.next_up()];
            let numbers = codes.last[..255].iter().chain(&codes.values).flat_map(|&x| around(x));
            let steps = (0..=0x3F80_0000_u32).step_by(997).map(f32::from_bits);
            for x in numbers.chain(steps).flat_map(|x| [x, -x]).filter(|x| x.abs() <= 1.0) {
                assert_eq!(codes.nearest(x), codes.nearest_exact(f64::from(x)), "{x:e}");
            }
            for x in [f32::NAN, f32::INFINITY, -f32::INFINITY, 2.0, -f32::NAN] {
                codes.nearest(x);
            }
        }
    }

    #[test]
    fn every_code_is_its_own_nearest_and_codes_ascend() {
        for codes in [&SIGNED, &UNSIGNED] {
            assert!(codes.values.windows(2).all(|pair| pair[0] < pair[1]));
            assert!((0..=255).all(|code| codes.nearest(codes.value(code)) == code));
        }
        assert_eq!((SIGNED.value(127), UNSIGNED.value(0)), (0.0, 0.0));
        assert_eq!((SIGNED.value(255), UNSIGNED.value(255)), (1.0, 1.0));
    }
}
