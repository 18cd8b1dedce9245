//! Dropout with a counter-based random generator. Invariant: whether an element is kept depends only on the seed, the
//! stream and the element's position.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::Dropout;

pub(super) fn eval(op: &Dropout, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let seed = ins.integers("seed")?;
    let [low, high] = *seed else {
        return Err(ReferenceError::Shape { what: "seed", wanted: vec![2], found: vec![seed.len()] });
    };
    let p = f64::from(op.p);
    let kept = |i: u64| {
        let words =
            philox4x32_10([(i / 4) as u32, ((i / 4) >> 32) as u32, op.stream, 0], [low as u32, high as u32]);
        f64::from(words[(i % 4) as usize]) >= p * 2.0_f64.powi(32)
    };
    let one = |(i, &x): (usize, &f64)| if kept(i as u64) { x / (1.0 - p) } else { 0.0 };
    Ok(vec![Tensor::f64(&[x.rows, x.columns], x.data.iter().enumerate().map(one).collect())])
}

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let (x, y) = (u64::from(a) * 0xD251_1F53, u64::from(c) * 0xCD9E_8D57);
        let high = |product: u64| (product >> 32) as u32;
        counter = [high(y) ^ b ^ key[0], y as u32, high(x) ^ d ^ key[1], x as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::super::{
        eval,
        testing::{floats, random, run},
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

    fn dropped(p: f32, stream: u32, seed: [i32; 2], x: &Tensor) -> Tensor {
        let ins = [x.clone(), Tensor::i32(&[2], seed.to_vec())];
        run(Op::Dropout(Dropout { p, stream }), &ins, &[&x.shape]).remove(0)
    }

    /// The words of counter (0, 0, stream 0, 0) under key 0, see above: the word 0x66... is below one half, the
    /// others are not.
    #[test]
    fn words_decide() {
        let ones = Tensor::f32(&[2, 2], vec![1.0; 4]);
        assert_eq!(floats(&dropped(0.5, 0, [0, 0], &ones)), [0.0, 2.0, 2.0, 2.0]);
        assert_eq!(floats(&dropped(0.75, 0, [0, 0], &ones)), [0.0, 4.0, 0.0, 0.0]);
        assert_eq!(dropped(0.0, 3, [7, -9], &ones), ones);
    }

    #[test]
    fn shares_and_streams() {
        let x = Tensor::f32(&[100, 101], vec![1.0; 10_100]);
        let kept = |y: &Tensor| floats(y).iter().filter(|&&y| y != 0.0).count() as f64 / 10_100.0;
        let y = dropped(0.25, 0, [1, 2], &x);
        // Five standard deviations of a share of 0.75 of 10 100 elements.
        assert!((kept(&y) - 0.75).abs() < 5.0 * (0.75_f64 * 0.25 / 10_100.0).sqrt());
        for other in [dropped(0.25, 1, [1, 2], &x), dropped(0.25, 0, [2, 2], &x), dropped(0.25, 0, [1, 3], &x)]
        {
            let same = floats(&y).iter().zip(floats(&other)).filter(|(a, b)| a == b).count() as f64 / 10_100.0;
            assert!((same - 0.625).abs() < 5.0 * (0.625_f64 * 0.375 / 10_100.0).sqrt(), "independent");
        }
    }

    #[test]
    fn a_seed_has_two_words() {
        let error = eval(
            &Op::Dropout(Dropout { p: 0.5, stream: 0 }),
            &[&random(1, &[1, 1]), &Tensor::i32(&[1], vec![1])],
            &[Some(vec![1, 1])],
        );
        assert_eq!(error.unwrap_err().to_string(), "seed must be [2], not [1]");
    }
}
