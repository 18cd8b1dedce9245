//! Tests of `linear_bf16::linear` against f64, and of its bits against itself: on every instruction set, and on
//! emulated tiles.

#[cfg(target_arch = "x86_64")]
use super::double::Double;
use super::{machines, numbers, workspace};
#[cfg(target_arch = "x86_64")]
use crate::Isa;
use crate::matmul::linear_bf16::*;
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_bf16_amx::{self, LinearKind};
use crate::matmul::{Act, LinearCall, MatmulEpilogue};
#[cfg(target_arch = "x86_64")]
use crate::rows::elementwise::Gate;
use crate::{Bf16, Cpu, Rows, RowsMut};
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};

pub(super) fn halves(seed: u64, n: usize) -> Vec<Bf16> {
    numbers(seed, n).into_iter().map(|x| Bf16(f32_to_bf16(x))).collect()
}

fn number(x: Bf16) -> f64 {
    f64::from(bf16_to_f32(x.0))
}

pub(super) fn pack(w: &[Bf16], k: usize) -> Vec<Bf16> {
    let w: Vec<f32> = w.iter().map(|w| bf16_to_f32(w.0)).collect();
    if k == 0 { Vec::new() } else { packed(&w, k) }
}

/// An implementation of the matmul: `linear` with its own choice, or emulated tiles.
pub(super) type Linear = fn(&Cpu, LinearCall<'_, Bf16>, &mut [f32]);

/// All implementations by name, and whether each has the bits of a chain of fused multiply-adds.
pub(super) fn ways() -> impl Iterator<Item = (String, bool, Cpu, Linear)> {
    let chosen = machines().map(|cpu| {
        let chain = cpu.isa().has_fma() && !cpu.isa().has_tiles();
        (format!("{} x {}", cpu.isa().name(), cpu.threads()), chain, cpu, linear as Linear)
    });
    let lanes = machines().filter(|cpu| !cpu.isa().has_tiles()).map(|cpu| {
        let name = format!("{} in lanes x {}", cpu.isa().name(), cpu.threads());
        (name, cpu.isa().has_fma(), cpu, IN_LANES)
    });
    let chosen = chosen.chain(lanes);
    #[cfg(target_arch = "x86_64")]
    let chosen = chosen.chain(
        [1, 3]
            .into_iter()
            .filter(|_| has_bf16())
            .map(|threads| (format!("tiles in plain code x {threads}"), false, Cpu::new(threads), ON_DOUBLE)),
    );
    chosen
}

const IN_LANES: Linear =
    |cpu, call, workspace| linear_by(cpu, Bf16Instructions::Lanes, call.operands(), workspace);

/// Whether this CPU has the vector instructions that the kernels use around the tile products; says so if not.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_bf16() -> bool {
    let has = Isa::detect().name().starts_with("avx512") && is_x86_feature_detected!("avx512bf16");
    if !has {
        println!("skipped: no AVX-512 with BF16 here");
    }
    has
}

#[cfg(target_arch = "x86_64")]
const ON_DOUBLE: Linear = |cpu, call, workspace| {
    if call.x.cols() == 0 {
        return linear(cpu, call, workspace);
    }
    let operands = call.operands();
    let each = workspace.len() / cpu.threads() * 4;
    // SAFETY: plain code runs everywhere, and `ways` saw AVX-512 with BF16.
    unsafe { linear_bf16_amx::linear::<Double>(cpu, operands, LinearKind::Plain, workspace.as_mut_ptr(), each) }
};

/// Operands of one matmul.
struct Case {
    size: (usize, usize, usize),
    x: Vec<Bf16>,
    w: Vec<Bf16>,
    bias: Option<Vec<Bf16>>,
    act: Act,
    residual: Option<Vec<Bf16>>,
}

impl Case {
    fn new((m, k, n): (usize, usize, usize), act: Act, bias: bool, residual: bool) -> Case {
        Case {
            size: (m, k, n),
            x: halves(1, m * k),
            w: halves(2, n * k),
            bias: bias.then(|| halves(3, n)),
            act,
            residual: residual.then(|| halves(4, m * n)),
        }
    }

    /// Computes rows `from..from + m` alone, with strides in x and y; elements between the rows of y must not change.
    fn run(&self, cpu: &Cpu, linear: Linear, from: usize, m: usize) -> Vec<Bf16> {
        let (_, k, n) = self.size;
        let ldx = k + 5;
        let ldy = n + 3;
        let mut strided = vec![Bf16(0x7fc0); m * ldx];
        for r in 0..m {
            strided[r * ldx..][..k].copy_from_slice(&self.x[(from + r) * k..][..k]);
        }
        let mut y = vec![Bf16(7); m * ldy];
        let mut scratch = workspace(cpu, WORKSPACE_BYTES);
        let residual = self.residual.as_ref().map(|r| Rows::new(&r[from * n..], m, n, n));
        let e = MatmulEpilogue { bias: self.bias.as_deref(), act: self.act, residual };
        let rows = Rows::new(&strided, m, k, ldx);
        let out = RowsMut::new(&mut y, m, n, ldy);
        let w = pack(&self.w, k);
        linear(cpu, LinearCall { x: rows, w: &w, epilogue: e, y: out }, &mut scratch);
        assert!(y.chunks(ldy).all(|row| row[n..].iter().all(|&v| v == Bf16(7))), "wrote past the row");
        y.chunks(ldy).flat_map(|row| row[..n].to_vec()).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let (m, k, n) = self.size;
        let wide = |x: &[Bf16]| x.iter().map(|&x| number(x)).collect::<Vec<f64>>();
        let x = wide(&self.x);
        let w = wide(&self.w);
        let element = |at: usize| {
            let i = at / n;
            let j = at % n;
            let mut v: f64 = x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(a, b)| a * b).sum();
            v += self.bias.as_ref().map_or(0.0, |b| number(b[j]));
            v = match self.act {
                Act::None => v,
                Act::Gelu => v * 0.5 * libm::erfc(-v / std::f64::consts::SQRT_2),
            };
            v + self.residual.as_ref().map_or(0.0, |r| number(r[at]))
        };
        (0..m * n).map(element).collect()
    }

    /// Tolerance: half a unit in the last place of bf16, plus the error of a chain of k roundings of f32 (as in the
    /// tests of `linear_f32`) and of GELU for bf16: 2^-16 of its tail, at most 0.17, plus 2^-19.
    fn check(&self, y: &[Bf16], exact: &[f64], what: &str) {
        let root = (self.size.1.max(1) as f64).sqrt();
        let mut chain = 2.0 * f64::from(f32::EPSILON) * root * (root / 3.0 + 1.0);
        if self.act == Act::Gelu {
            chain += 0.17 / 65536.0 + 1.0 / 524_288.0;
        }
        assert_eq!(y.len(), exact.len());
        for (at, (&y, &v)) in y.iter().zip(exact).enumerate() {
            let off = (number(y) - v).abs();
            assert!(off <= v.abs() / 256.0 + chain, "{what} [{at}]: {} for {v}", number(y));
        }
    }
}

fn same(a: &[Bf16], b: &[Bf16], what: &str) {
    assert_eq!(a.len(), b.len());
    if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
        panic!("{what} [{at}]: {:#06x} and {:#06x}", a[at].0, b[at].0);
    }
}

#[test]
fn linear_is_the_product_with_its_epilogue() {
    let sizes = [
        (1, 1, 1),
        (2, 3, 5),
        (13, 480, 96),
        (33, 31, 33),
        (15, 513, 64),
        (70, 2100, 40),
        (35, 3300, 70),
        (70, 700, 700),
        (15, 1700, 600),
        (5, 0, 7),
        (0, 4, 4),
        (5, 7, 0),
        (40, 1700, 0),
    ];
    let ways: Vec<_> = ways().collect();
    for size in sizes {
        for act in [Act::None, Act::Gelu] {
            for (bias, residual) in [(false, false), (true, false), (false, true), (true, true)] {
                let case = Case::new(size, act, bias, residual);
                let exact = case.exact();
                for (name, _, cpu, linear) in &ways {
                    let what = format!("{name} {size:?} {act:?} {bias} {residual}");
                    case.check(&case.run(cpu, *linear, 0, size.0), &exact, &what);
                }
            }
        }
    }
}

#[test]
fn the_residual_may_be_the_output() {
    let size @ (m, k, n) = (31, 1100, 70);
    let case = Case::new(size, Act::None, false, true);
    for (name, _, cpu, linear) in ways() {
        let mut y = case.residual.clone().unwrap();
        let at = y.as_mut_ptr();
        let mut scratch = workspace(&cpu, WORKSPACE_BYTES);
        // SAFETY: the residual is exactly y, which `linear` allows.
        let (residual, out) = unsafe { (Rows::from_raw(at, m, n, n), RowsMut::from_raw(at, m, n, n)) };
        let e = MatmulEpilogue { residual: Some(residual), ..Default::default() };
        let w = pack(&case.w, k);
        let call = LinearCall { x: Rows::new(&case.x, m, k, k), w: &w, epilogue: e, y: out };
        linear(&cpu, call, &mut scratch);
        same(&y, &case.run(&cpu, linear, 0, m), &name);
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let n = 97;
    // K with several slices, with packed strips, and with strips that fit in L1.
    for k in [3300, 1290, 672] {
        let case = Case::new((400, k, n), Act::Gelu, true, false);
        let mut chain_bits: Option<Vec<Bf16>> = None;
        for (name, chain, cpu, linear) in ways() {
            let all = case.run(&cpu, linear, 0, 400);
            if chain {
                same(&all, chain_bits.get_or_insert(all.clone()), &name);
            }
            for m in [1, 2, 15, 31, 32, 33, 100] {
                for start in [0, 5, 400 - m] {
                    let y = case.run(&cpu, linear, start, m);
                    same(&y, &all[start * n..][..m * n], &format!("{name} {m} rows from {start}"));
                }
            }
        }
    }
}

/// Strips of whole lines are read in place, others are packed first.
#[test]
fn where_x_lies_says_nothing() {
    let n = 40;
    for k in [3328, 1312, 96] {
        let case = Case::new((70, k, n), Act::None, true, false);
        let ld = k + 32;
        let mut lines = vec![Bf16(0x7fc0); 70 * ld + 64];
        let from = lines.as_ptr().align_offset(64);
        let room = &mut lines[from..];
        for (to, row) in room.chunks_mut(ld).zip(case.x.chunks(k)) {
            to[..k].copy_from_slice(row);
        }
        for (name, _, cpu, linear) in ways() {
            let mut scratch = workspace(&cpu, WORKSPACE_BYTES);
            let mut y = vec![Bf16(7); 70 * n];
            let e = MatmulEpilogue { bias: case.bias.as_deref(), ..Default::default() };
            let rows = Rows::new(room, 70, k, ld);
            let out = RowsMut::new(&mut y, 70, n, n);
            let w = pack(&case.w, k);
            linear(&cpu, LinearCall { x: rows, w: &w, epilogue: e, y: out }, &mut scratch);
            same(&y, &case.run(&cpu, linear, 0, 70), &format!("{name} {k}"));
        }
    }
}

/// A matmul with a gate: `gated` on tiles, or on emulated tiles.
#[cfg(target_arch = "x86_64")]
type Gated = fn(&Cpu, GatedLinearCall<'_>, &mut [f32]);

#[cfg(target_arch = "x86_64")]
const GATED_ON_DOUBLE: Gated = |cpu, call, workspace| {
    let (operands, form) = call.operands();
    let each = workspace.len() / cpu.threads() * 4;
    // SAFETY: plain code runs everywhere, and the test saw AVX-512 with BF16.
    unsafe { linear_bf16_amx::linear::<Double>(cpu, operands, form, workspace.as_mut_ptr(), each) };
};

/// Sums of gates and values are of order 1. The tolerance is half a unit in the last place of bf16, plus the errors of the
/// sums and of the activation.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_gate_multiplies_the_value_of_its_column_in_any_company() {
    if !has_bf16() {
        return;
    }
    let real = machines().filter(|cpu| cpu.isa().has_tiles()).map(|cpu| (cpu, gated as Gated));
    let double = [1, 3].into_iter().map(|threads| (Cpu::new(threads), GATED_ON_DOUBLE));
    let ways: Vec<_> = real.chain(double).collect();
    for (m, k, f) in [(1, 1, 32), (70, 192, 96), (33, 40, 64), (130, 1024, 32)] {
        let x = halves(1, m * k);
        let b = halves(3, 2 * f);
        let w: Vec<f32> = numbers(2, 2 * f * k).iter().map(|w| w * 3.0 / (k as f32).sqrt()).collect();
        let w: Vec<Bf16> = w.into_iter().map(|w| Bf16(f32_to_bf16(w))).collect();
        let packed = pack(&w, k);
        for (gate, bias) in [(Gate::Silu, true), (Gate::Silu, false), (Gate::Gelu, true)] {
            let bias = bias.then_some(&b[..]);
            let sum = |i: usize, j: usize| {
                let products =
                    x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(&a, &b)| number(a) * number(b));
                products.sum::<f64>() + bias.map_or(0.0, |bias| number(bias[j]))
            };
            for (cpu, gated) in &ways {
                let run = |from: usize, rows: usize| {
                    let mut scratch = workspace(cpu, WORKSPACE_BYTES);
                    let mut y = vec![Bf16(7); rows * (f + 3)];
                    let out = RowsMut::new(&mut y, rows, f, f + 3);
                    let x = Rows::new(&x[from * k..], rows, k, k);
                    gated(cpu, GatedLinearCall { x, w: &packed, bias, gate, y: out }, &mut scratch);
                    assert!(y.chunks(f + 3).all(|row| row[f..].iter().all(|&v| v == Bf16(7))), "past the row");
                    y.chunks(f + 3).flat_map(|row| row[..f].to_vec()).collect::<Vec<_>>()
                };
                let all = run(0, m);
                let what = format!("{} x {} {gate:?} {m} {k} {f}", cpu.isa().name(), cpu.threads());
                for (at, &y) in all.iter().enumerate() {
                    let a = sum(at / f, at % f);
                    let value = sum(at / f, f + at % f);
                    let of = match gate {
                        Gate::Gelu => a * 0.5 * libm::erfc(-a / std::f64::consts::SQRT_2),
                        Gate::Silu => a / (1.0 + libm::exp(-a)),
                    };
                    let most = (of * value).abs() / 256.0 + 2e-5 * (1.0 + a.abs() + value.abs());
                    assert!(
                        (number(y) - of * value).abs() <= most,
                        "{what} [{at}]: {} for {}",
                        number(y),
                        of * value
                    );
                }
                for (from, rows) in [(0, 1), (m / 2, m - m / 2), (m - 1, 1)] {
                    same(&run(from, rows), &all[from * f..][..rows * f], &what);
                }
            }
        }
    }
}
