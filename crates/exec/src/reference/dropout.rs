//! Dropout with a counter-based random generator. Invariant: whether an element is kept depends only on the seed, the
//! stream, the number of its pack, and its position in the pack.

use super::operands::{PackInputs, PackRange};
use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::Dropout;
use plimsoll_graph::packs::{SEQUENCES, TOKENS};

pub(super) fn eval(op: &Dropout, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let seed = ins.integers("seed")?;
    let [low, high] = *seed else {
        return Err(ReferenceError::Shape { what: "seed", wanted: vec![2], found: vec![seed.len()] });
    };
    let packs = packs_of(ins.packs()?, x.rows)?;
    let key = [low as u32, high as u32];
    let p = f64::from(op.p);
    let mut y = Vec::with_capacity(x.data.len());
    for pack in packs {
        for (row, r) in pack.rows.enumerate() {
            for (c, &x) in x.row(r).iter().enumerate() {
                let words = philox4x32_10([(c / 4) as u32, row as u32, op.stream, pack.number], key);
                let is_kept = f64::from(words[c % 4]) >= p * 2.0_f64.powi(32);
                y.push(if is_kept { x / (1.0 - p) } else { 0.0 });
            }
        }
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y)])
}

/// The packs of `rows` rows that are tokens or sequences. A tensor does not say which: they are those that the packs
/// cover. `Err` if the packs cover both, as different rows.
fn packs_of(packs: PackInputs<'_>, rows: usize) -> Result<Vec<PackRange>, ReferenceError> {
    match (packs.of(TOKENS, rows), packs.of(SEQUENCES, rows)) {
        (Ok(tokens), Ok(sequences)) if tokens != sequences => Err(ReferenceError::Attribute {
            why: "the rows of x may be the tokens or the sequences of the packs",
        }),
        (Ok(packs), _) | (Err(_), Ok(packs)) => Ok(packs),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let x = u64::from(a) * 0xD251_1F53;
        let y = u64::from(c) * 0xCD9E_8D57;
        counter = [(y >> 32) as u32 ^ b ^ key[0], y as u32, (x >> 32) as u32 ^ d ^ key[1], x as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::super::{
        eval,
        testing::{floats, noise, packs, random, run},
    };
    use super::*;
    use plimsoll_graph::Op;

    /// Test vectors of the authors' Random123 library, file `kat_vectors`.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in cases {
            assert_eq!(philox4x32_10(counter, key), words);
        }
    }

    fn dropped(op: Dropout, seed: [i32; 2], x: &Tensor, packs: &Tensor) -> Tensor {
        let ins = [x.clone(), Tensor::i32(&[2], seed.to_vec()), packs.clone()];
        run(Op::Dropout(op), &ins, &[&x.shape]).remove(0)
    }

    /// One pack of `rows` tokens and one sequence.
    fn one(rows: i32) -> Tensor {
        packs(&[[0, rows, 0, 1, rows, 0]])
    }

    /// The words of counter (0, 0, stream 0, pack 0) under key 0, see above: the word 0x66... is below one half, the
    /// others are not.
    #[test]
    fn words_decide() {
        let ones = Tensor::f32(&[1, 4], vec![1.0; 4]);
        let of = |p| floats(&dropped(Dropout { p, stream: 0 }, [0, 0], &ones, &one(1))).to_vec();
        assert_eq!(of(0.5), [0.0, 2.0, 2.0, 2.0]);
        assert_eq!(of(0.75), [0.0, 4.0, 0.0, 0.0]);
        let op = Dropout { p: 0.0, stream: 3 };
        assert_eq!(dropped(op, [7, -9], &ones, &one(1)), ones);
    }

    /// The rows of a pack are the same alone and behind other packs, also where numbers wrap around, whether they are
    /// tokens or sequences.
    #[test]
    fn the_mask_of_a_pack_does_not_depend_on_others() {
        const COLUMNS: usize = 6;
        // Rows: 2 tokens or 1 sequence, none, 5 tokens or 3 sequences.
        let joined = [[0, 2, 0, 1, 2, -1], [2, 2, 1, 1, 0, 0], [2, 7, 1, 4, 0, 1]];
        let op = Dropout { p: 0.5, stream: 2 };
        for word in [TOKENS, SEQUENCES] {
            let rows = joined[2][word + 1] as usize;
            let x = noise(5, rows * COLUMNS);
            let all = dropped(op, [3, 4], &Tensor::f32(&[rows, COLUMNS], x.clone()), &packs(&joined));
            for pack in joined {
                let elements = pack[word] as usize * COLUMNS..pack[word + 1] as usize * COLUMNS;
                let alone = [0, pack[1] - pack[0], 0, pack[3] - pack[2], pack[4], pack[5]];
                let rows = elements.len() / COLUMNS;
                let x = Tensor::f32(&[rows, COLUMNS], x[elements.clone()].to_vec());
                let y = dropped(op, [3, 4], &x, &packs(&[alone]));
                assert_eq!(floats(&y), &floats(&all)[elements.clone()], "{pack:?}");
                for (i, (x, y)) in floats(&x).iter().zip(floats(&y)).enumerate() {
                    let row = i / COLUMNS;
                    let column = i % COLUMNS;
                    let counter = [column as u32 / 4, row as u32, 2, pack[5] as u32];
                    let word = philox4x32_10(counter, [3, 4])[column % 4];
                    assert_eq!(*y, if word >= 1 << 31 { 2.0 * x } else { 0.0 }, "{pack:?}: {row}, {column}");
                }
            }
        }
    }

    #[test]
    fn shares_and_streams() {
        let x = Tensor::f32(&[100, 101], vec![1.0; 10_100]);
        let of = |stream, seed, number| {
            let packs = packs(&[[0, 100, 0, 1, 100, number]]);
            dropped(Dropout { p: 0.25, stream }, seed, &x, &packs)
        };
        let y = of(0, [1, 2], 0);
        let kept = floats(&y).iter().filter(|&&y| y != 0.0).count() as f64 / 10_100.0;
        // Five standard deviations of a share of 0.75 of 10 100 elements.
        assert!((kept - 0.75).abs() < 5.0 * (0.75_f64 * 0.25 / 10_100.0).sqrt());
        for other in [of(1, [1, 2], 0), of(0, [2, 2], 0), of(0, [1, 3], 0), of(0, [1, 2], 1)] {
            let same = floats(&y).iter().zip(floats(&other)).filter(|(a, b)| a == b).count() as f64 / 10_100.0;
            assert!((same - 0.625).abs() < 5.0 * (0.625_f64 * 0.375 / 10_100.0).sqrt(), "independent");
        }
    }

    /// The error of a dropout of two rows.
    fn refused(seed: Vec<i32>, rows: &[[i32; 6]]) -> String {
        let ins = [random(1, &[2, 1]), Tensor::i32(&[seed.len()], seed), packs(rows)];
        let op = Op::Dropout(Dropout { p: 0.5, stream: 0 });
        let found = eval(&op, &ins.iter().collect::<Vec<_>>(), &[Some(vec![2, 1])]);
        found.unwrap_err().to_string()
    }

    #[test]
    fn bad_operands_are_refused() {
        let pack = [0, 2, 0, 1, 2, 0];
        assert_eq!(refused(vec![1], &[pack]), "seed must be [2], not [1]");
        let cases: [(&[[i32; 6]], &str); 7] = [
            (&[], "packs are rows 0..0 of 2"),
            (&[[0, 1, 0, 1, 2, 0]], "packs are rows 0..1 of 2"),
            (&[[0, 3, 0, 1, 2, 0]], "pack 0 is rows 0..3, not rows from 0 on in 0..2"),
            (&[[-1, 2, 0, 1, 2, 0]], "pack 0 is rows -1..2, not rows from 0 on in 0..2"),
            (&[pack, [1, 2, 1, 1, 0, 1]], "pack 1 is rows 1..2, not rows from 2 on in 0..2"),
            (&[[0, 2, 0, 1, -1, 0]], "pack 0 has -1 targets"),
            (
                &[[0, 1, 0, 2, 1, 0], [1, 2, 2, 2, 1, 1]],
                "the rows of x may be the tokens or the sequences of the packs",
            ),
        ];
        for (rows, wanted) in cases {
            assert_eq!(refused(vec![1, 2], rows), wanted, "{rows:?}");
        }
    }
}
