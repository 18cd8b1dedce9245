//! `gemm_bf16::linear` against f64 and against itself, on every instruction set.

use super::{machines, numbers, workspace};
use crate::cpu::cast::{bf16_to_f32, f32_to_bf16};
use crate::cpu::gemm::Act;
use crate::cpu::gemm_bf16::*;
use crate::cpu::{Bf16, Cpu, Isa, Rows, RowsMut};

fn halves(seed: u64, n: usize) -> Vec<Bf16> {
    numbers(seed, n).into_iter().map(|x| Bf16(f32_to_bf16(x))).collect()
}

fn number(x: Bf16) -> f64 {
    f64::from(bf16_to_f32(x.0))
}

fn pack(w: &[Bf16], n: usize, k: usize) -> Vec<Bf16> {
    let mut packed = vec![Bf16(0x7fc0); packed_len(n, k)];
    if k > 0 {
        let panels = packed.chunks_exact_mut(packed_len(32, k));
        w.chunks(32 * k).zip(panels).for_each(|(rows, out)| pack_panel(rows, k, out));
    }
    packed
}

/// The operands of one product.
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

    /// Rows `from..from + m` alone, x and y with strides; what lies between the rows of y must stay as it was.
    fn run(&self, cpu: &Cpu, from: usize, m: usize) -> Vec<Bf16> {
        let (_, k, n) = self.size;
        let (ldx, ldy) = (k + 5, n + 3);
        let mut strided = vec![Bf16(0x7fc0); m * ldx];
        for r in 0..m {
            strided[r * ldx..][..k].copy_from_slice(&self.x[(from + r) * k..][..k]);
        }
        let mut y = vec![Bf16(7); m * ldy];
        let mut scratch = workspace(cpu, WORKSPACE.per_unit.0 as usize);
        let residual = self.residual.as_ref().map(|r| Rows::new(&r[from * n..], m, n, n));
        let e = EpilogueBf16 { bias: self.bias.as_deref(), act: self.act, residual };
        let (rows, out) = (Rows::new(&strided, m, k, ldx), RowsMut::new(&mut y, m, n, ldy));
        linear(cpu, rows, &pack(&self.w, n, k), e, out, &mut scratch);
        assert!(y.chunks(ldy).all(|row| row[n..].iter().all(|&v| v == Bf16(7))), "wrote past the row");
        y.chunks(ldy).flat_map(|row| row[..n].to_vec()).collect()
    }

    /// Half a unit of the last place of bf16, beside what the chain of k roundings of f32 may be off by (as in the
    /// tests of `gemm`).
    fn check(&self, y: &[Bf16], what: &str) {
        let (m, k, n) = self.size;
        let root = (k.max(1) as f64).sqrt();
        let chain = 2.0 * f64::from(f32::EPSILON) * root * (root / 3.0 + 1.0);
        assert_eq!(y.len(), m * n);
        for (at, &y) in y.iter().enumerate() {
            let (i, j) = (at / n, at % n);
            let pairs = self.x[i * k..][..k].iter().zip(&self.w[j * k..][..k]);
            let mut v: f64 = pairs.map(|(&a, &b)| number(a) * number(b)).sum();
            v += self.bias.as_ref().map_or(0.0, |b| number(b[j]));
            v = match self.act {
                Act::None => v,
                Act::Gelu => v * 0.5 * libm::erfc(-v / std::f64::consts::SQRT_2),
                Act::Relu => v.max(0.0),
            };
            v += self.residual.as_ref().map_or(0.0, |r| number(r[at]));
            let off = (number(y) - v).abs();
            assert!(off <= v.abs() / 256.0 + chain, "{what} [{i}, {j}]: {} for {v}", number(y));
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
        (170, 1030, 330),
        (5, 0, 7),
        (0, 4, 4),
    ];
    for cpu in machines() {
        for size in sizes {
            for act in [Act::None, Act::Gelu, Act::Relu] {
                for (bias, residual) in [(false, false), (true, false), (false, true), (true, true)] {
                    let case = Case::new(size, act, bias, residual);
                    let what = format!("{} {size:?} {act:?} {bias} {residual}", cpu.isa().name());
                    case.check(&case.run(&cpu, 0, size.0), &what);
                }
            }
        }
    }
}

#[test]
fn the_residual_may_be_the_output() {
    let size @ (m, k, n) = (31, 1100, 70);
    let case = Case::new(size, Act::None, false, true);
    for cpu in machines() {
        let mut y = case.residual.clone().unwrap();
        let at = y.as_mut_ptr();
        let mut scratch = workspace(&cpu, WORKSPACE.per_unit.0 as usize);
        // SAFETY: the residual is exactly y, which `linear` allows.
        let (residual, out) = unsafe { (Rows::from_raw(at, m, n, n), RowsMut::from_raw(at, m, n, n)) };
        let e = EpilogueBf16 { residual: Some(residual), ..Default::default() };
        linear(&cpu, Rows::new(&case.x, m, k, k), &pack(&case.w, n, k), e, out, &mut scratch);
        same(&y, &case.run(&cpu, 0, m), "in place");
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let case = Case::new((400, 1050, 97), Act::Gelu, true, false);
    let plain = |isa: Isa| isa.has_fma() && !isa.has_tiles();
    let fused = Isa::available().find(|&isa| plain(isa)).unwrap_or(Isa::detect());
    let fused = case.run(&Cpu::with_isa(1, fused), 0, 400);
    for cpu in machines() {
        let all = if plain(cpu.isa()) { fused.clone() } else { case.run(&cpu, 0, 400) };
        for m in [1, 2, 13, 14, 15, 16, 17, 31, 32, 33, 200] {
            for start in [0, 1, 5, 150, 400 - m] {
                let y = case.run(&cpu, start, m);
                let what = format!("{} {m} rows from {start}", cpu.isa().name());
                same(&y, &all[start * 97..][..m * 97], &what);
            }
        }
    }
}

#[test]
fn a_panel_is_two_tiles_for_each_step() {
    let (n, k) = (35, 33);
    let w: Vec<Bf16> = (0..n * k).map(|i| Bf16(i as u16)).collect();
    let packed = pack(&w, n, k);
    assert_eq!(packed.len(), 2 * 2 * 2 * 512);
    for row in 0..64 {
        for kk in 0..64 {
            let tile = (row / 32 * 2 + kk / 32) * 2 + row % 32 / 16;
            let at = tile * 512 + kk % 32 / 2 * 32 + row % 16 * 2 + kk % 2;
            let want = if row < n && kk < k { w[row * k + kk] } else { Bf16(0) };
            assert_eq!(packed[at], want, "row {row}, k {kk}");
        }
    }
}
