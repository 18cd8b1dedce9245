//! Tests of the views of packs, and of dropout by packs.

use super::{machines, numbers, same_bits};
use crate::packs::{Packs, PacksError};
use crate::training::dropout::{DropoutParams, dropout};
use crate::{Cpu, Rows, RowsMut};
use core::ops::Range;
use plimsoll_graph::packs::{NUMBER, SEQUENCES, TOKENS, WORDS};

/// Three packs, the second without rows: tokens 0..3, 3..3, 3..8; sequences 0..1, 1..1, 1..4.
const WORDS_OF_PACKS: [[u32; WORDS]; 3] = [[0, 3, 0, 1, 2, u32::MAX], [3, 3, 1, 1, 0, 0], [3, 8, 1, 4, 5, 1]];

/// A range of rows, and the index, the first row and the end row of its part in each pack.
struct Parts {
    range: Range<usize>,
    indices: &'static [usize],
    rows: &'static [[usize; 2]],
}

#[test]
fn parts_are_the_rows_of_a_range_in_each_pack() {
    let cases = [
        Parts { range: 0..8, indices: &[0, 2], rows: &[[0, 3], [3, 8]] },
        Parts { range: 2..4, indices: &[0, 2], rows: &[[2, 3], [3, 4]] },
        Parts { range: 0..3, indices: &[0], rows: &[[0, 3]] },
        Parts { range: 3..4, indices: &[2], rows: &[[3, 4]] },
        Parts { range: 7..8, indices: &[2], rows: &[[7, 8]] },
        Parts { range: 4..4, indices: &[], rows: &[] },
        Parts { range: 8..8, indices: &[], rows: &[] },
    ];
    let packs = Packs::new(&WORDS_OF_PACKS, TOKENS, 8).expect("packs");
    for Parts { range, indices, rows } in cases {
        let parts = || packs.parts(range.clone());
        assert_eq!(parts().map(|part| part.index).collect::<Vec<_>>(), indices, "{range:?}");
        assert_eq!(parts().map(|part| [part.rows.start, part.rows.end]).collect::<Vec<_>>(), rows, "{range:?}");
    }
    let sequences = Packs::new(&WORDS_OF_PACKS, SEQUENCES, 4).expect("packs");
    assert_eq!(sequences.iter().map(|pack| pack.rows).collect::<Vec<_>>(), [0..1, 1..1, 1..4]);
    assert_eq!((sequences.count(), sequences.rows()), (3, 4));
    let last = sequences.get(2);
    assert_eq!((last.targets, last.number), (5, 1));
}

/// The first and the end token and the number of targets of packs of five tokens, and the error.
struct Refusal {
    packs: &'static [[u32; 3]],
    error: Option<PacksError>,
}

#[test]
fn packs_that_do_not_cover_all_rows_are_refused() {
    let rows = |pack, start, end, next| Some(PacksError::Rows { pack, start, end, next, rows: 5 });
    let uncovered = |end| Some(PacksError::Uncovered { end, rows: 5 });
    let cases = [
        Refusal { packs: &[[0, 5, 2]], error: None },
        Refusal { packs: &[[0, 0, 0], [0, 5, 0], [5, 5, 0]], error: None },
        Refusal { packs: &[], error: uncovered(0) },
        Refusal { packs: &[[0, 4, 2]], error: uncovered(4) },
        Refusal { packs: &[[0, 6, 2]], error: rows(0, 0, 6, 0) },
        Refusal { packs: &[[1, 5, 2]], error: rows(0, 1, 5, 0) },
        Refusal { packs: &[[0, 3, 2], [2, 5, 2]], error: rows(1, 2, 5, 3) },
        Refusal { packs: &[[0, 3, 2], [3, u32::MAX, 2]], error: rows(1, 3, u32::MAX, 3) },
        Refusal { packs: &[[0, 5, u32::MAX]], error: Some(PacksError::Targets { pack: 0, targets: -1 }) },
    ];
    for Refusal { packs, error } in cases {
        let words: Vec<[u32; WORDS]> = packs.iter().map(|&[a, b, targets]| [a, b, 0, 0, targets, 0]).collect();
        assert_eq!(Packs::new(&words, TOKENS, 5).err(), error, "{packs:?}");
    }
}

/// Dropout of rows of `columns` columns, out of place or in place.
fn dropped(cpu: &Cpu, x: &[f32], columns: usize, packs: Packs<'_>, in_place: bool) -> Vec<f32> {
    let rows = x.len() / columns;
    let how = DropoutParams { p: 0.4, stream: 3, seed: [8, 9] };
    let mut y = if in_place { x.to_vec() } else { vec![f32::NAN; x.len()] };
    let start = y.as_mut_ptr();
    let x = if in_place { start.cast_const() } else { x.as_ptr() };
    // SAFETY: both views have as many elements as x and y, which no other code accesses; `dropout` allows them to be
    // equal.
    unsafe {
        let x = Rows::from_raw(x, rows, columns, columns);
        dropout(cpu, how, x, packs, RowsMut::from_raw(start, rows, columns, columns));
    }
    y
}

/// The bits of a pack are those of the pack alone, in steps of more and of fewer rows than a task has, on every machine,
/// in place and not.
#[test]
fn the_mask_of_a_pack_does_not_depend_on_others() {
    for columns in [1, 6, 64, 100, 130] {
        for scale in [1, 300] {
            let words = WORDS_OF_PACKS.map(|words| {
                let [start, end] = [TOKENS, TOKENS + 1].map(|word| words[word] * scale);
                [start, end, 0, 0, 0, words[NUMBER]]
            });
            let packs = Packs::new(&words, TOKENS, 8 * scale as usize).expect("packs");
            let x = numbers(9, packs.rows() * columns);
            let wanted = dropped(&Cpu::new(1), &x, columns, packs, false);
            assert!(wanted.contains(&0.0) || columns == 1 && scale == 1, "nothing is dropped");
            for cpu in machines() {
                for in_place in [false, true] {
                    same_bits(&dropped(&cpu, &x, columns, packs, in_place), &wanted, "y");
                }
                for pack in packs.iter() {
                    let elements = pack.rows.start * columns..pack.rows.end * columns;
                    let alone = [[0, pack.rows.len() as u32, 0, 0, 0, pack.number]];
                    let alone = Packs::new(&alone, TOKENS, pack.rows.len()).expect("a pack");
                    let y = dropped(&cpu, &x[elements.clone()], columns, alone, false);
                    same_bits(&y, &wanted[elements], "a pack alone");
                }
            }
        }
    }
}
