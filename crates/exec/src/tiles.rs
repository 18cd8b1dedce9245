//! Packed weights in the order in which AMX tile products read them: bf16 in blocks of [`plimsoll_plan::TILE_STEP`], int8 in
//! blocks of [`plimsoll_plan::INT8_STEP`]. Invariant: every number is rounded once, to nearest with ties to even; elements
//! past the last row or column are zero.

use crate::half::f32_to_bf16;
use plimsoll_plan::{INT8_STEP, TILE_STEP};

/// Rows of a panel, and k of a step.
pub const STEP: usize = TILE_STEP as usize;
/// Rows of the weight in a tile. A line of a tile holds a pair of consecutive k for each of them.
const SIDE: usize = STEP / 2;
/// Elements of a tile.
const TILE: usize = SIDE * STEP;

/// Elements of a panel: 32 rows of `k`, padded.
pub const fn panel(k: usize) -> usize {
    k.div_ceil(STEP) * 2 * TILE
}

/// Packs up to 32 rows of `k` elements as a bf16 panel, tile by tile: 16 rows are first rounded in row order, then
/// their pairs are written line by line. This takes a third of the time of writing row by row, where the pairs of a
/// row go to distant addresses.
pub fn pack(rows: &[f32], k: usize, to: &mut [u16]) {
    assert!(rows.len() <= STEP * k && to.len() == panel(k), "{} elements of rows of {k}", rows.len());
    for (i, tile) in to.chunks_exact_mut(TILE).enumerate() {
        let first = i % 2 * SIDE;
        let columns = i / 2 * STEP..k.min((i / 2 + 1) * STEP);
        let mut whole = [[0; STEP]; SIDE];
        for (n, narrow) in whole.iter_mut().enumerate() {
            // Rows past the last one keep the zeros of `whole`: products read all 16 rows of a tile.
            let Some(row) = rows.get((first + n) * k..(first + n + 1) * k) else { break };
            narrow.iter_mut().zip(&row[columns.clone()]).for_each(|(to, &w)| *to = f32_to_bf16(w));
        }
        for (j, line) in tile.chunks_exact_mut(STEP).enumerate() {
            for (narrow, pair) in whole.iter().zip(line.chunks_exact_mut(2)) {
                pair.copy_from_slice(&narrow[2 * j..2 * j + 2]);
            }
        }
    }
}

/// Bytes of a row of int8 values before packing, padded to whole steps.
pub const fn codes_stride(k: usize) -> usize {
    k.next_multiple_of(INT8_STEP as usize)
}

/// Bytes of a panel of 32 rows of `k` int8 values.
pub const fn codes_panel(k: usize) -> usize {
    STEP * codes_stride(k)
}

/// Packs up to 32 rows of int8 values, each of [`codes_stride`] bytes, as a panel.
pub fn pack_codes(rows: &[u8], stride: usize, to: &mut [u8]) {
    assert!(rows.len() <= to.len() && to.len() == STEP * stride, "{} codes of rows of {stride}", rows.len());
    const LINE: usize = 4 * SIDE;
    for (i, tile) in to.chunks_exact_mut(SIDE * LINE).enumerate() {
        let first = i % 2 * SIDE;
        let column = i / 2 * LINE;
        for (j, line) in tile.chunks_exact_mut(LINE).enumerate() {
            for (n, quad) in line.chunks_exact_mut(4).enumerate() {
                let at = (first + n) * stride + column + 4 * j;
                quad.copy_from_slice(rows.get(at..at + 4).unwrap_or(&[0; 4]));
            }
        }
    }
}

/// Packs a whole weight with rows of `k` elements as bf16 panels.
pub fn packed(w: &[f32], k: usize) -> Vec<u16> {
    let bands = w.chunks(STEP * k);
    let mut tiles = vec![0; bands.len() * panel(k)];
    for (rows, to) in bands.zip(tiles.chunks_exact_mut(panel(k))) {
        pack(rows, k, to);
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of W[n][k], directly from the definition of the layout.
    fn place(n: usize, k: usize, columns: usize) -> usize {
        let p = n / 32;
        let h = n / 16 % 2;
        let r = n % 16;
        let s = k / 32;
        let j = k % 32 / 2;
        let odd = k % 2;
        let bytes = p * columns.div_ceil(32) * 2048 + s * 2048 + h * 1024 + j * 64 + r * 4 + odd * 2;
        bytes / 2
    }

    #[test]
    fn every_code_has_its_place() {
        for (rows, k) in [(1, 1), (17, 64), (32, 65), (5, 130)] {
            let stride = codes_stride(k);
            let code = |n: usize, k: usize| (n * 7 + k * 3) as u8 | 1;
            let mut all = vec![0; rows * stride];
            (0..rows * k).for_each(|i| all[i / k * stride + i % k] = code(i / k, i % k));
            let mut tiles = vec![9; codes_panel(k)];
            let mut seen = vec![0; codes_panel(k)];
            pack_codes(&all, stride, &mut tiles);
            for (n, k) in (0..rows * k).map(|i| (i / k, i % k)) {
                seen[k / 64 * 2048 + n / 16 * 1024 + k % 64 / 4 * 64 + n % 16 * 4 + k % 4] = code(n, k);
            }
            assert!(tiles == seen, "({rows}, {k})");
        }
    }

    #[test]
    fn every_element_has_its_place_and_the_rest_is_zero() {
        for (rows, columns) in [(1, 1), (16, 32), (17, 33), (32, 64), (33, 31), (70, 98)] {
            let w: Vec<f32> = (1..=rows * columns).map(|i| (i % 251) as f32 + 1.0).collect();
            let tiles = packed(&w, columns);
            assert_eq!(tiles.len(), rows.div_ceil(32) * columns.div_ceil(32) * 1024);
            let mut seen = vec![0; tiles.len()];
            for n in 0..rows {
                for k in 0..columns {
                    seen[place(n, k, columns)] = f32_to_bf16(w[n * columns + k]);
                }
            }
            assert!(tiles == seen, "({rows}, {columns})");
        }
    }
}
