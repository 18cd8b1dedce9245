//! Tests of bf16 attention on AMX tiles with emulated tile registers, so that everything except the AMX
//! instructions is tested on CPUs without AMX, and of bf16 attention with AVX512-BF16 dot products.

use super::registers::Double;
use super::{Case, same_bits, workspace};
use crate::attention::tiles::{attention_on, has_lanes};
use crate::attention::*;
use crate::{Bf16, Cpu, Isa, Rows, RowsMut};
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};

/// A CPU and the implementation to test: emulated tile registers if `double`, otherwise the implementation that
/// the CPU's instruction set selects, which is dot products.
struct On {
    cpu: Cpu,
    double: bool,
}

/// Both implementations, each on one and on three threads; none on a CPU without the instructions.
fn ways() -> Vec<[On; 2]> {
    if !has_lanes() {
        println!("skipped: no AVX-512 with VBMI and BF16 here");
        return vec![];
    }
    println!("AMX to compare with: {}", Isa::detect().has_tiles());
    let dots = Isa::available().find(|isa| isa.has_dots() && !isa.has_tiles()).expect("has_lanes");
    vec![
        [1, 3].map(|threads| On { cpu: Cpu::new(threads), double: true }),
        [1, 3].map(|threads| On { cpu: Cpu::with_isa(threads, dots), double: false }),
    ]
}

/// Both implementations with all numbers of threads.
fn cpus() -> Vec<On> {
    ways().into_iter().flatten().collect()
}

/// Rounds the case's q, k and v to bf16 numbers.
fn rounded(mut case: Case) -> Case {
    case.qkv.iter_mut().for_each(|x| *x = bf16_to_f32(f32_to_bf16(*x)));
    case
}

/// Returns o of the fused rows (T, (H + 2 G) hd) of the case's data with G key-value heads, `tokens` rows from
/// row `from` on. Rows outside of `spans` stay 5. On a CPU with AMX, also checks that AMX gives the bits of the
/// emulation.
fn run(
    case: &Case,
    On { cpu, double }: &On,
    kv_heads: usize,
    (from, tokens): (usize, usize),
    spans: &[[u32; 2]],
) -> Vec<f32> {
    let d = case.heads * case.hd;
    let kv = kv_heads * case.hd;
    let x: Vec<Bf16> = case.qkv.iter().map(|&x| Bf16(f32_to_bf16(x))).collect();
    let ld = d + 2 * kv;
    let x = Rows::new(&x[from * ld..], tokens, ld, ld);
    let [q, k, v] = [x.columns(0, d), x.columns(d, kv), x.columns(d + kv, kv)];
    let config = AttentionConfig { kv_heads, ..case.config() };
    let mut scratch = workspace(cpu, workspace_bytes(case.hd));
    let mut o = vec![Bf16(f32_to_bf16(5.0)); tokens * d];
    let operands = AttentionOperands { q, k, v, spans, o: RowsMut::new(&mut o, tokens, d, d), lse: None };
    if !double {
        attention_bf16(cpu, config, operands, &mut scratch);
        return o.iter().map(|x| bf16_to_f32(x.0)).collect();
    }
    attention_on(cpu, config, &operands, &mut scratch, &Double::new);
    let double = o.iter().map(|x| bf16_to_f32(x.0)).collect();
    if cpu.isa().has_tiles() {
        let mut real = vec![Bf16(f32_to_bf16(5.0)); tokens * d];
        let out = RowsMut::new(&mut real, tokens, d, d);
        let operands = AttentionOperands { q, k, v, spans, o: out, lse: None };
        attention_bf16(cpu, config, operands, &mut scratch);
        // Any NaN equals any other: their bits are not specified.
        let same = |(a, b): (&Bf16, &Bf16)| a == b || bf16_to_f32(a.0).is_nan() && bf16_to_f32(b.0).is_nan();
        assert!(real.iter().zip(&o).all(same), "AMX does what its double does");
    }
    double
}

/// Relative L2 distance of `found` from `wanted`.
fn distance(found: &[f32], wanted: &[f64]) -> f64 {
    let off: f64 = found.iter().zip(wanted).map(|(&f, &w)| (f64::from(f) - w).powi(2)).sum();
    (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

/// The lengths are just below, at and just above a tile (16), a step (32) and a block (256); the head dimensions
/// are of one and of several steps, some multiples of a tile and some not.
#[test]
fn it_is_softmax_of_scores_times_values() {
    let spans = [[0, 1], [1, 16], [18, 34], [34, 51], [51, 83], [83, 116], [116, 371], [371, 627], [627, 884]];
    let forms = [
        (8, true, false),
        (16, true, false),
        (16, false, true),
        (24, true, false),
        (32, true, true),
        (17, false, false),
        (40, true, false),
        (64, false, true),
        (100, false, false),
        (128, true, true),
    ];
    for cpu in cpus() {
        for (hd, rope, alibi) in forms {
            let case = rounded(Case::new(2, hd, 890, rope, alibi));
            let found = run(&case, &cpu, 2, (0, 890), &spans);
            let (want, _) = case.reference(0, 890, &spans);
            let off = distance(&found, &want);
            println!("head dim {hd}, {} threads: {off:.2e}", cpu.cpu.threads());
            assert!(off < 5e-3, "head dim {hd}: relative L2 {off:e}");
            for row in [16, 17, 884, 889] {
                assert!(found[row * 2 * hd..][..2 * hd].iter().all(|&x| x == 5.0), "row {row} is nobody's");
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_in_any_company() {
    let spans = [[3, 60], [60, 250], [250, 251], [251, 810], [811, 850]];
    for (heads, hd, rope, alibi) in [(3, 24, true, false), (4, 16, true, false), (3, 64, false, true)] {
        let case = rounded(Case::new(heads, hd, 851, rope, alibi));
        for cpus in ways() {
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus {
                let all = run(&case, &cpu, heads, (0, 851), &spans);
                same_bits(first.get_or_insert_with(|| all.clone()), &all, "threads");
                for [start, end] in spans.map(|s| s.map(|row| row as usize)) {
                    let alone = run(&case, &cpu, heads, (start, end - start), &[[0, (end - start) as u32]]);
                    same_bits(&alone, &all[start * heads * hd..end * heads * hd], "alone");
                }
            }
        }
    }
}

/// Heads that share keys and values (grouped-query attention) have the bits of heads with their own copies of them.
#[test]
fn shared_heads_are_repeated_ones() {
    let heads = 4;
    let kv = 2;
    let hd = 32;
    let t = 70;
    let shared = rounded(Case::new(heads, hd, t, true, false));
    let width = (heads + 2 * kv) * hd;
    let fused: Vec<f32> = shared.qkv[..t * width].to_vec();
    let repeated = fused.chunks(width).flat_map(|row| {
        let (q, kvs) = row.split_at(heads * hd);
        let twice = kvs.chunks(hd).flat_map(|head| [head, head].concat());
        q.iter().copied().chain(twice).collect::<Vec<f32>>()
    });
    let own = Case { qkv: repeated.collect(), ..rounded(Case::new(heads, hd, t, true, false)) };
    let shared = Case { qkv: fused, ..shared };
    for cpu in cpus() {
        let [a, b] =
            [(&shared, kv), (&own, heads)].map(|(case, kv)| run(case, &cpu, kv, (0, t), &[[0, t as u32]]));
        same_bits(&a, &b, "shared");
    }
}

/// Keys of later blocks, or queries of later strips, are too large for the bound on scores, so the kernel
/// computes row maxima instead. The bits of a sequence are the same alone and packed with others.
#[test]
fn rows_with_and_without_a_bound_are_softmax_too() {
    let t = 600;
    let spans = [[0, 40], [40, 600]];
    for (heads, hd, rope, alibi) in [(2, 16, true, false), (1, 24, true, false), (1, 64, false, true)] {
        for (which, from) in [(0, 100), (1, 320), (1, 150)] {
            let mut case = rounded(Case::new(heads, hd, t, rope, alibi));
            for row in from..t {
                let at = (row * 3 + which) * heads * hd;
                case.qkv[at..][..heads * hd].iter_mut().for_each(|x| *x *= 16.0);
            }
            for cpus in ways() {
                let mut first: Option<Vec<f32>> = None;
                for cpu in cpus {
                    let found = run(&case, &cpu, heads, (0, t), &spans);
                    same_bits(first.get_or_insert_with(|| found.clone()), &found, "threads");
                    let alone = run(&case, &cpu, heads, (40, t - 40), &[[0, t as u32 - 40]]);
                    same_bits(&alone, &found[40 * heads * hd..], "alone");
                    let off = distance(&found, &case.reference(0, t, &spans).0);
                    println!("head dim {hd}, {which} from {from}: {off:.2e}");
                    assert!(off < 2e-2, "head dim {hd}: relative L2 {off:e}");
                }
            }
        }
    }
}

/// With scores far apart, only the largest counts and the exponentials of the others are zero: for scores of any
/// size in the range of f32, with and without rotary embedding.
#[test]
fn peaked_rows_are_those_of_one_key() {
    let hd = 16;
    let t = 300;
    for (rope, power) in
        [0, 15, 24, 25, 33, 60, 100].into_iter().flat_map(|power| [(false, power), (true, power)])
    {
        let mut case = rounded(Case::new(1, hd, t, rope, false));
        case.scale = 400.0 * (power as f32).exp2();
        let (want, _) = case.reference(0, t, &[[0, t as u32]]);
        for cpu in cpus() {
            let found = run(&case, &cpu, 1, (0, t), &[[0, t as u32]]);
            let near = (0..t).filter(|i| {
                let row = i * hd..(i + 1) * hd;
                distance(&found[row.clone()], &want[row]) < 0.01
            });
            // Where two scores are nearly equal, rounding q decides which is larger, so a few rows may differ.
            let near = near.count();
            assert!(near > t * 9 / 10, "2^{power}, rotated {rope}: {near} of {t}");
        }
    }
}

#[test]
fn what_is_not_finite_shows() {
    let t = 340;
    let spans = [[0, 15], [15, 335]];
    // Two heads of 16 columns are packed together; heads of 24 columns are not.
    for (cpu, hd) in cpus().iter().flat_map(|cpu| [16, 24].map(|hd| (cpu, hd))) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // A query with a bad element makes its row NaN, a key all rows of its sequence, a value one column of all
            // rows of its sequence; all of them only in their own head.
            for (which, row) in [(0, 20), (1, 20), (1, 334), (2, 333)] {
                let mut case = rounded(Case::new(2, hd, t, which < 2, false));
                case.qkv[(row * 3 + which) * 2 * hd + hd + 5] = bad;
                let found = run(&case, cpu, 2, (0, t), &spans);
                for (at, x) in found.iter().enumerate().filter(|(at, _)| at / (2 * hd) < 335) {
                    let i = at / (2 * hd);
                    let head = at / hd % 2;
                    let column = at % hd;
                    let spoilt = head == 1 && if which == 0 { i == row } else { i >= 15 };
                    let spoilt = spoilt && (which < 2 || column == 5);
                    assert!(x.is_finite() != spoilt, "{bad} in {which} of row {row}: row {i} has {x}");
                }
            }
        }
    }
}
