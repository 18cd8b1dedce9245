//! Tests of `linear_int8::linear` against f64, and of its bits against itself: on every instruction set, and on
//! emulated tiles.

#[cfg(target_arch = "x86_64")]
use super::double::Double;
#[cfg(target_arch = "x86_64")]
use super::linear_bf16::has_bf16;
use super::{machines, numbers, workspace};
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_bf16_amx::{self, LinearKind};
use crate::matmul::linear_int8::*;
use crate::matmul::{Act, MatmulEpilogue};
use crate::{Bf16, Cpu, QuantizedRows, QuantizedTiles, Rows, RowsMut};
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};
use plimsoll_exec::scaled::QuantizedFormat;
use plimsoll_exec::tiles::{STEP, codes_stride, pack_codes};

type Linear = fn(&Cpu, QuantizedLinearCall<'_>, &mut [f32]);

/// All implementations by name, and whether GELU has the bits of fused multiply-adds.
fn ways() -> impl Iterator<Item = (String, bool, Cpu, Linear)> {
    let chosen = machines().map(|cpu| {
        (format!("{} x {}", cpu.isa().name(), cpu.threads()), cpu.isa().has_fma(), cpu, linear as Linear)
    });
    // AVX-512 without VNNI must be tested even if the machine has VNNI.
    let lanes =
        machines().filter(|cpu| Int8Instructions::of(cpu.isa()) != Int8Instructions::Lanes).map(|cpu| {
            let name = format!("{} in lanes x {}", cpu.isa().name(), cpu.threads());
            (name, cpu.isa().has_fma(), cpu, IN_LANES)
        });
    let chosen = chosen.chain(lanes);
    #[cfg(target_arch = "x86_64")]
    let chosen = chosen.chain([1, 3].into_iter().filter(|_| has_bf16()).map(|threads| {
        (format!("tiles in plain code x {threads}"), true, Cpu::new(threads), on_double as Linear)
    }));
    chosen
}

const IN_LANES: Linear = |cpu, call, workspace| {
    linear_by(cpu, Int8Instructions::Lanes, call.operands(), call.scales(), workspace);
};

#[cfg(target_arch = "x86_64")]
fn on_double(cpu: &Cpu, call: QuantizedLinearCall<'_>, workspace: &mut [f32]) {
    let form = LinearKind::Scaled(call.scales());
    let each = workspace.len() / cpu.threads() * 4;
    // SAFETY: plain code runs everywhere, and `ways` saw AVX-512 with BF16.
    unsafe { linear_bf16_amx::linear::<Double<true>>(cpu, call.operands(), form, workspace.as_mut_ptr(), each) }
}

/// Copies bytes to aligned memory.
fn words(bytes: &[u8]) -> Vec<f32> {
    let mut words = vec![0.0; bytes.len() / 4];
    bytemuck::cast_slice_mut(&mut words).copy_from_slice(bytes);
    words
}

/// A quantized matrix in a device's format, as f32 words for alignment; the values include -127, 0 and 127.
fn matrix(seed: u64, rows: usize, columns: usize) -> (Vec<f64>, Vec<f32>) {
    let mut codes = numbers(seed, rows * columns);
    codes.iter_mut().enumerate().for_each(|(i, code)| {
        *code = (*code * 127.0 * if i % 7 == 0 { 9.0 } else { 1.0 }).round().clamp(-127.0, 127.0)
    });
    codes.chunks_mut(columns).for_each(|row| row[0] = 127.0);
    coded(&codes, columns)
}

/// As `matrix`, with the given quantized values, of which each row must contain one of magnitude 127.
fn coded(codes: &[f32], columns: usize) -> (Vec<f64>, Vec<f32>) {
    let rows = codes.len() / columns;
    let values: Vec<f64> = codes
        .chunks(columns)
        .enumerate()
        .flat_map(|(r, row)| row.iter().map(move |&code| f64::from(code) * (1.0 + r as f64 % 3.0) / 64.0))
        .collect();
    let bytes = QuantizedFormat::Int8.encode(&values, columns);
    (QuantizedFormat::Int8.decode(&bytes, rows, columns), words(&bytes))
}

/// Packs quantized rows as tiles, with their scales.
fn packed(bytes: &[u8], n: usize, k: usize) -> Vec<f32> {
    let rows = QuantizedRows::new(bytes, n, k);
    let mut tiles = vec![];
    let stride = codes_stride(k);
    for band in rows.values.chunks(STEP * rows.stride()) {
        let mut wide = vec![0; band.len() / rows.stride() * stride];
        band.chunks(rows.stride())
            .zip(wide.chunks_mut(stride))
            .for_each(|(row, to)| to[..k].copy_from_slice(&row[..k]));
        let mut panel = vec![0; STEP * stride];
        pack_codes(&wide, stride, &mut panel);
        tiles.extend(panel);
    }
    let mut words = words(&tiles);
    words.extend(rows.scales);
    words.resize(words.len() + n.next_multiple_of(STEP) - n, 0.0);
    words
}

fn halves(seed: u64, n: usize) -> Vec<Bf16> {
    numbers(seed, n).into_iter().map(|x| Bf16(f32_to_bf16(x))).collect()
}

fn number(x: Bf16) -> f64 {
    f64::from(bf16_to_f32(x.0))
}

/// Operands of one matmul.
struct Case {
    size: (usize, usize, usize),
    x: (Vec<f64>, Vec<f32>),
    w: (Vec<f64>, Vec<f32>),
    bias: Option<Vec<Bf16>>,
    act: Act,
    residual: Option<Vec<Bf16>>,
}

impl Case {
    fn new((m, k, n): (usize, usize, usize), act: Act, bias: bool, residual: bool) -> Case {
        let (wide, w) = matrix(2, n, k);
        Case {
            size: (m, k, n),
            x: matrix(1, m, k),
            w: (wide, packed(bytemuck::cast_slice(&w), n, k)),
            bias: bias.then(|| halves(3, n)),
            act,
            residual: residual.then(|| halves(4, m * n)),
        }
    }

    /// Computes rows `from..from + m` alone, with a stride in y; elements between its rows must not change.
    fn run(&self, cpu: &Cpu, linear: Linear, from: usize, m: usize) -> Vec<Bf16> {
        let (_, k, n) = self.size;
        let all = QuantizedRows::new(bytemuck::cast_slice(&self.x.1), self.size.0, k);
        let values = &all.values[from * all.stride()..(from + m) * all.stride()];
        let x = QuantizedRows { values, scales: &all.scales[from..from + m], columns: k };
        let w = QuantizedTiles::new(bytemuck::cast_slice(&self.w.1), n.div_ceil(STEP), k);
        let ldy = n + 3;
        let mut y = vec![Bf16(7); m * ldy];
        let mut scratch = workspace(cpu, WORKSPACE_BYTES);
        let residual = self.residual.as_ref().map(|r| Rows::new(&r[from * n..], m, n, n));
        let e = MatmulEpilogue { bias: self.bias.as_deref(), act: self.act, residual };
        let y_rows = RowsMut::new(&mut y, m, n, ldy);
        linear(cpu, QuantizedLinearCall { x, w, epilogue: e, y: y_rows }, &mut scratch);
        assert!(y.chunks(ldy).all(|row| row[n..].iter().all(|&v| v == Bf16(7))), "wrote past the row");
        y.chunks(ldy).flat_map(|row| row[..n].to_vec()).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let (m, k, n) = self.size;
        let element = |at: usize| {
            let i = at / n;
            let j = at % n;
            let mut v: f64 =
                self.x.0[i * k..][..k].iter().zip(&self.w.0[j * k..][..k]).map(|(a, b)| a * b).sum();
            v += self.bias.as_ref().map_or(0.0, |b| number(b[j]));
            v = match self.act {
                Act::None => v,
                Act::Gelu => v * 0.5 * libm::erfc(-v / std::f64::consts::SQRT_2),
            };
            v + self.residual.as_ref().map_or(0.0, |r| number(r[at]))
        };
        (0..m * n).map(element).collect()
    }

    /// Tolerance: half a unit in the last place of bf16, plus five roundings of f32 and the error of GELU for bf16:
    /// 2^-16 of its tail, at most 0.17, plus 2^-19.
    fn check(&self, y: &[Bf16], exact: &[f64], what: &str) {
        assert_eq!(y.len(), exact.len());
        let largest = exact.iter().fold(1.0, |most: f64, v| most.max(v.abs()));
        for (at, (&y, &v)) in y.iter().zip(exact).enumerate() {
            let off = (number(y) - v).abs();
            let limit =
                v.abs() / 256.0 + 5.0 * f64::from(f32::EPSILON) * largest + 0.17 / 65536.0 + 1.0 / 524_288.0;
            assert!(off <= limit, "{what} [{at}]: {} for {v}", number(y));
        }
    }
}

#[test]
fn linear_is_the_product_with_its_epilogue_and_the_same_bits_everywhere() {
    let sizes = [
        (1, 1, 1),
        (2, 3, 5),
        (13, 480, 96),
        (33, 31, 33),
        (15, 513, 64),
        (70, 2660, 40),
        (70, 700, 700),
        (15, 1700, 600),
        (0, 4, 4),
        (5, 7, 0),
        (40, 1700, 0),
    ];
    let ways: Vec<_> = ways().collect();
    for size in sizes {
        for act in [Act::None, Act::Gelu] {
            for (bias, residual) in [(false, false), (true, true)] {
                let case = Case::new(size, act, bias, residual);
                let exact = case.exact();
                let mut wanted = None;
                for (name, fused, cpu, linear) in &ways {
                    let what = format!("{name} {size:?} {act:?} {bias} {residual}");
                    let y = case.run(cpu, *linear, 0, size.0);
                    case.check(&y, &exact, &what);
                    if *fused || act != Act::Gelu {
                        assert!(y == *wanted.get_or_insert(y.clone()), "{what}: other bits");
                    }
                }
            }
        }
    }
}

/// The longest row of the largest values: its i32 sums just do not overflow, even with unsigned weights.
#[test]
fn sums_of_the_longest_row_are_exact() {
    let size @ (m, k, n) = (3, 65_536, 33);
    for of_w in [127.0, -127.0] {
        let mut case = Case::new((m, 1, n), Act::None, false, false);
        let (wide, w) = coded(&vec![of_w; n * k], k);
        case.size = size;
        case.x = coded(&vec![127.0; m * k], k);
        case.w = (wide, packed(bytemuck::cast_slice(&w), n, k));
        let exact = case.exact();
        for (name, _, cpu, linear) in ways() {
            case.check(&case.run(&cpu, linear, 0, m), &exact, &format!("{name}, weights {of_w}"));
        }
    }
}

#[test]
fn a_row_of_codes_has_the_same_bits_in_any_company() {
    let n = 97;
    // K of two slices on tiles, and of one.
    for k in [2600, 672] {
        let case = Case::new((400, k, n), Act::Gelu, true, false);
        for (name, _, cpu, linear) in ways() {
            let all = case.run(&cpu, linear, 0, 400);
            for m in [1, 2, 15, 31, 32, 33, 100] {
                for start in [0, 5, 400 - m] {
                    let y = case.run(&cpu, linear, start, m);
                    assert!(y == all[start * n..][..m * n], "{name} {m} rows from {start}");
                }
            }
        }
    }
}

/// The scale of a row with NaN or infinity is NaN.
#[test]
fn what_is_not_a_number_stays_that() {
    let case = Case::new((3, 70, 40), Act::None, true, false);
    for (name, _, cpu, linear) in ways() {
        let mut lost = Case::new(case.size, case.act, true, false);
        let scale = lost.x.1.len() - 2;
        lost.x.1[scale] = f32::NAN;
        let y = lost.run(&cpu, linear, 0, 3);
        let wanted = case.run(&cpu, linear, 0, 3);
        assert!(y[40..80].iter().all(|&y| number(y).is_nan()), "{name}");
        assert!(y[..40] == wanted[..40] && y[80..] == wanted[80..], "{name}");
    }
}
