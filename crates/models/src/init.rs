//! Initial values of parameters that no weight file provides. Invariant: an element is a function of the seed,
//! the name of its tensor and its index in the tensor, so it does not depend on how tensors are stacked or split,
//! nor on the order in which they are initialised.

use libm::{log, sqrt};
use plimsoll_graph::{Param, ParamPiece};
use std::ops::Range;

/// The distribution of a tensor's initial values.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// 0 everywhere.
    Zeros,
    /// 1 everywhere.
    Ones,
    /// Normal with mean 0 and the given standard deviation.
    Normal(f32),
    /// Uniform between `-bound` and `bound`, with the given bound.
    Uniform(f32),
    /// Values computed from the configuration, such as rotary frequencies; one for each element of the tensor.
    Values(Vec<f32>),
}

/// Standard deviation of initial weights: 0.02, as in BERT and GPT-2.
pub(crate) const DEVIATION: f32 = 0.02;

/// The default initialisation: gains of norms and running variances are 1, other tensors of fewer than two dimensions
/// 0, and matrices normal with [`DEVIATION`].
pub(crate) fn default_init(piece: &ParamPiece) -> Init {
    let vector = piece.shape.len() < 2;
    match (vector, piece.tensor.rsplit('.').next()) {
        (true, Some("weight" | "running_var")) => Init::Ones,
        (true, _) => Init::Zeros,
        (false, _) => Init::Normal(DEVIATION),
    }
}

/// Writes the initial values of elements `range` of `param` to `out`, with the distribution `rule(piece)` for
/// each piece. `out` has one element for each index of `range`.
pub fn init_param(
    rule: impl Fn(&ParamPiece) -> Init,
    seed: u64,
    param: &Param,
    range: Range<u64>,
    out: &mut [f32],
) {
    let mut rest = out;
    for (i, first, count) in param.split_by_piece(range) {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(count);
        rest = after;
        let piece = &param.pieces[i];
        init(&rule(piece), seed, &piece.tensor, first, part);
    }
}

/// Fills `out` with the initial values of the tensor `name`, from element `first` on.
///
/// # Panics
/// With [`Init::Values`] if `first + out.len()` exceeds the number of values.
pub fn init(rule: &Init, seed: u64, name: &str, first: u64, out: &mut [f32]) {
    // Mixed, so that the keys of close seeds, whose bits differ in few places, are far apart in the generator's sequence.
    let key = mix(seed ^ fnv(name));
    match rule {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal(deviation) => fill_with(first, out, |i| f64::from(*deviation) * quantile(uniform(key, i))),
        Init::Uniform(bound) => fill_with(first, out, |i| f64::from(*bound) * (2.0 * uniform(key, i) - 1.0)),
        Init::Values(values) => out.copy_from_slice(&values[first as usize..first as usize + out.len()]),
    }
}

/// Sets `out[j]` to `value(first + j)`, rounded to f32.
fn fill_with(first: u64, out: &mut [f32], value: impl Fn(u64) -> f64) {
    for (i, x) in (first..).zip(out) {
        *x = value(i) as f32;
    }
}

/// The quantile function of the standard normal distribution, for `p` in (0, 1): algorithm AS 241, PPND7 (Wichura
/// 1988), with an accuracy of about 1e-7.
fn quantile(p: f64) -> f64 {
    // Inversion needs one uniform number for each normal number, so element i depends on counter i alone, and no
    // logarithm in the centre (85 % of all p). `log` and `sqrt` come from `libm`, which gives equal bits on
    // every platform; std's functions may differ between platforms.
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        let numerator = ((59.109_374_720 * r + 159.291_132_02) * r + 50.434_271_938) * r + 3.387_132_717_9;
        let denominator = ((67.187_563_600 * r + 78.757_757_664) * r + 17.895_169_469) * r + 1.0;
        return q * numerator / denominator;
    }
    let r = sqrt(-log(p.min(1.0 - p)));
    let tail = if r <= 5.0 {
        let r = r - 1.6;
        let numerator = ((0.170_238_211_03 * r + 1.306_728_481_6) * r + 2.756_815_390_0) * r + 1.423_437_277_7;
        numerator / ((0.120_211_329_75 * r + 0.737_001_642_50) * r + 1.0)
    } else {
        let r = r - 5.0;
        let numerator =
            ((0.017_337_203_997 * r + 0.428_682_943_37) * r + 3.081_226_386_0) * r + 6.657_905_115_0;
        numerator / ((0.012_258_202_635 * r + 0.241_978_942_25) * r + 1.0)
    };
    if q < 0.0 { -tail } else { tail }
}

/// A uniform number in the open interval (0, 1): output i of SplitMix64 (Steele et al. 2014) started at `key`. The
/// generator's state is a counter, so output i is computed directly.
fn uniform(key: u64, i: u64) -> f64 {
    let bits = mix(key.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    // An integer of 52 bits plus one half is exact in f64, so the quotient is never 0 or 1, where the quantile is
    // infinite.
    ((bits >> 12) as f64 + 0.5) / (1u64 << 52) as f64
}

/// The output function (finaliser) of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The 64-bit FNV-1a hash (Fowler, Noll and Vo). Its definition is fixed, whereas std's hasher may change, so initial
/// values do not depend on the Rust version.
fn fnv(name: &str) -> u64 {
    let mut hash: u64 = 0xCBF2_9CE4_8422_2325;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(rule: &Init, name: &str, n: usize) -> Vec<f32> {
        let mut out = vec![0.0; n];
        init(rule, 1, name, 0, &mut out);
        out
    }

    /// The first outputs of SplitMix64 from state 0 are the published ones.
    #[test]
    fn splitmix() {
        let step = |i: u64| mix(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        assert_eq!([step(1), step(2)], [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]);
    }

    /// Quantiles of Python's statistics.NormalDist().
    #[test]
    fn quantiles() {
        for (p, wanted) in [
            (0.5, 0.0),
            (0.975, 1.959_963_984_540_054),
            (0.075, -1.439_531_470_938_456),
            (0.925, 1.439_531_470_938_456),
            (0.01, -2.326_347_874_040_841),
            (1e-9, -5.997_807_015_007_687),
            (1e-14, -7.650_628_092_935_268),
        ] {
            let found = quantile(p);
            assert!((found - wanted).abs() < 2e-6, "{p}: {found}, not {wanted}");
        }
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 200_000;
        for (rule, variance, fourth) in [(Init::Normal(1.0), 1.0, 3.0), (Init::Uniform(1.0), 1.0 / 3.0, 0.2)] {
            let x = drawn(&rule, "a", n);
            let moment = |k: i32| x.iter().map(|&x| f64::from(x).powi(k)).sum::<f64>() / n as f64;
            assert!(moment(1).abs() < 0.01 && moment(3).abs() < 0.03, "{rule:?}");
            assert!((moment(2) - variance).abs() < 0.01 && (moment(4) - fourth).abs() < 0.06, "{rule:?}");
        }
    }

    #[test]
    fn names_and_seeds_tell_tensors_apart() {
        let rule = Init::Normal(1.0);
        let (a, b) = (drawn(&rule, "a", 64), drawn(&rule, "b", 64));
        let mut c = vec![0.0; 64];
        init(&rule, 2, "a", 0, &mut c);
        for (x, y) in [(&a, &b), (&a, &c)] {
            assert!(x.iter().zip(y).all(|(x, y)| x != y));
        }
    }

    /// Any range of a stacked parameter has the values of the pieces initialised one by one.
    #[test]
    fn ranges_of_stacked_pieces() {
        let piece = |tensor: &str, rows| ParamPiece { tensor: tensor.to_owned(), shape: vec![4, 3], rows };
        let pieces = vec![piece("a", (0, 4)), piece("b", (1, 3)), piece("c", (0, 4))];
        let rule = |p: &ParamPiece| if p.tensor == "b" { Init::Ones } else { Init::Normal(0.5) };
        let (a, c) = (drawn(&Init::Normal(0.5), "a", 12), drawn(&Init::Normal(0.5), "c", 12));
        let whole: Vec<f32> = a.into_iter().chain([1.0; 6]).chain(c).collect();
        let param = Param { name: "abc".to_owned(), pieces: pieces.into() };
        for range in [0..30, 0..12, 5..13, 12..18, 13..14, 17..30, 3..29] {
            let mut out = vec![f32::NAN; (range.end - range.start) as usize];
            init_param(rule, 1, &param, range.clone(), &mut out);
            assert_eq!(out, whole[range.start as usize..range.end as usize], "{range:?}");
        }
    }
}
