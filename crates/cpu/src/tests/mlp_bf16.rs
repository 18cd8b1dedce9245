//! Tests of `mlp_bf16::mlp` against the separate kernels, bit by bit: on every instruction set, and on emulated
//! tiles.

#[cfg(target_arch = "x86_64")]
use super::double::Double;
use super::gemm_bf16::{Linear, halves, pack, ways as products};
use super::workspace;
use crate::elementwise::{Gate, glu};
use crate::gemm::Act;
use crate::gemm_bf16::{self, EpilogueBf16};
use crate::mlp_bf16::*;
#[cfg(target_arch = "x86_64")]
use crate::mlp_bf16_amx;
use crate::norm::layer_norm;
use crate::{Bf16, Cpu, Rows, RowsMut};
use plimsoll_graph::ops::Hidden;

/// An implementation of the MLP: `mlp` with its own choice, or emulated tiles.
type Fused = fn(&Cpu, Rows<'_, Bf16>, Mlp<'_>, RowsMut<'_, Bf16>, &mut [f32]);

/// All implementations: name, machine, the matmul for the separate kernels, and the fused MLP.
fn ways() -> impl Iterator<Item = (String, Cpu, Linear, Fused)> {
    products().map(|(name, _, cpu, linear)| {
        #[cfg(target_arch = "x86_64")]
        if name.starts_with("tiles in plain code") {
            return (name, cpu, linear, on_double as Fused);
        }
        (name, cpu, linear, mlp as Fused)
    })
}

#[cfg(target_arch = "x86_64")]
fn on_double(cpu: &Cpu, x: Rows<'_, Bf16>, op: Mlp<'_>, y: RowsMut<'_, Bf16>, workspace: &mut [f32]) {
    let each = workspace.len() / cpu.threads() / 16 * 64;
    // SAFETY: plain code runs everywhere, and `ways` saw AVX-512 with BF16.
    unsafe { mlp_bf16_amx::mlp::<Double>(cpu, x, op, &y, workspace.as_mut_ptr(), each) }
}

/// Operands of one MLP.
struct Case {
    /// (M, K, F, N).
    size: [usize; 4],
    hidden: Hidden,
    x: Vec<Bf16>,
    norm: Option<[Vec<f32>; 2]>,
    w: [Vec<Bf16>; 2],
    b: [Option<Vec<Bf16>>; 2],
    residual: Option<Vec<Bf16>>,
}

impl Case {
    /// The bits of `form` select a norm, b1, b2 and r.
    fn new(size: [usize; 4], hidden: Hidden, form: u32) -> Case {
        let [m, k, f, n] = size;
        let width = if hidden == Hidden::Gate { 2 * f } else { f };
        let has = |bit: u32| form >> bit & 1 == 1;
        Case {
            size,
            hidden,
            x: halves(1, m * k),
            norm: has(0).then(|| [super::numbers(2, k), super::numbers(3, k)]),
            w: [halves(4, width * k), halves(5, n * f)],
            b: [has(1).then(|| halves(6, width)), has(2).then(|| halves(7, n))],
            residual: has(3).then(|| halves(8, m * n)),
        }
    }

    fn residual(&self, from: usize, m: usize) -> Option<Rows<'_, Bf16>> {
        let n = self.size[3];
        self.residual.as_ref().map(|r| Rows::new(&r[from * n..], m, n, n))
    }

    /// Computes rows `from..from + m` alone, with strides in x and y; elements between the rows of y must not change.
    fn run(&self, cpu: &Cpu, fused: Fused, from: usize, m: usize) -> Vec<Bf16> {
        let [_, k, f, n] = self.size;
        let (ldx, ldy) = (k + 5, n + 3);
        let mut strided = vec![Bf16(0x7fc0); m * ldx];
        for r in 0..m {
            strided[r * ldx..][..k].copy_from_slice(&self.x[(from + r) * k..][..k]);
        }
        let w = [pack(&self.w[0], k), pack(&self.w[1], f)];
        let op = Mlp {
            norm: self.norm.as_ref().map(|[gamma, beta]| Norm { gamma, beta, eps: 1e-5 }),
            hidden: self.hidden,
            columns: f,
            w1: &w[0],
            b1: self.b[0].as_deref(),
            w2: &w[1],
            b2: self.b[1].as_deref(),
            residual: self.residual(from, m),
        };
        let mut y = vec![Bf16(7); m * ldy];
        let mut scratch = workspace(cpu, bytes(self.size));
        fused(cpu, Rows::new(&strided, m, k, ldx), op, RowsMut::new(&mut y, m, n, ldy), &mut scratch);
        assert!(y.chunks(ldy).all(|row| row[n..].iter().all(|&v| v == Bf16(7))), "wrote past the row");
        y.chunks(ldy).flat_map(|row| row[..n].to_vec()).collect()
    }

    /// Computes the MLP with separate kernels.
    fn parts(&self, cpu: &Cpu, linear: Linear) -> Vec<Bf16> {
        let [m, k, f, n] = self.size;
        let width = if self.hidden == Hidden::Gate { 2 * f } else { f };
        let mut x = self.x.clone();
        if let Some([gamma, beta]) = &self.norm {
            let rows = RowsMut::new(&mut x, m, k, k);
            layer_norm(cpu, Rows::new(&self.x, m, k, k), gamma, beta, 1e-5, Some(rows), None, None);
        }
        let mut scratch = workspace(cpu, gemm_bf16::WORKSPACE_BYTES);
        let act = if self.hidden == Hidden::Gate { Act::None } else { Act::Gelu };
        let e = EpilogueBf16 { bias: self.b[0].as_deref(), act, residual: None };
        let mut hidden = vec![Bf16(7); m * width];
        let (rows, out) = (Rows::new(&x, m, k, k), RowsMut::new(&mut hidden, m, width, width));
        linear(cpu, rows, &pack(&self.w[0], k), e, out, &mut scratch);
        if self.hidden == Hidden::Gate {
            let sums = std::mem::replace(&mut hidden, vec![Bf16(7); m * f]);
            glu(cpu, Gate::Gelu, Rows::new(&sums, m, width, width), RowsMut::new(&mut hidden, m, f, f));
        }
        let e = EpilogueBf16 { bias: self.b[1].as_deref(), act: Act::None, residual: self.residual(0, m) };
        let mut y = vec![Bf16(7); m * n];
        let (rows, out) = (Rows::new(&hidden, m, f, f), RowsMut::new(&mut y, m, n, n));
        linear(cpu, rows, &pack(&self.w[1], f), e, out, &mut scratch);
        y
    }
}

/// Workspace that the plan reserves for a thread.
fn bytes([_, k, f, n]: [usize; 4]) -> usize {
    workspace_bytes(k.max(f).max(n))
}

fn same(a: &[Bf16], b: &[Bf16], what: &str) {
    assert_eq!(a.len(), b.len());
    if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
        panic!("{what} [{at}]: {:#06x} and {:#06x}", a[at].0, b[at].0);
    }
}

#[test]
fn an_mlp_has_the_bits_of_its_parts() {
    let sizes = [
        [1, 8, 32, 8],
        [33, 31, 64, 33],
        [70, 160, 96, 64],
        [13, 700, 2080, 40],
        [15, 800, 800, 300],
        [0, 8, 32, 8],
    ];
    for (name, cpu, linear, fused) in ways() {
        for size in sizes {
            for hidden in [Hidden::Gelu, Hidden::Gate] {
                for form in [0, 5, 10, 15] {
                    let case = Case::new(size, hidden, form);
                    let what = format!("{name} {size:?} {hidden:?} {form}");
                    same(&case.run(&cpu, fused, 0, size[0]), &case.parts(&cpu, linear), &what);
                }
            }
        }
        // Without a gate, F may be any number.
        let case = Case::new([37, 40, 75, 41], Hidden::Gelu, 15);
        same(&case.run(&cpu, fused, 0, 37), &case.parts(&cpu, linear), &name);
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let [m, k, f, n] = [400, 96, 160, 70];
    for hidden in [Hidden::Gelu, Hidden::Gate] {
        let case = Case::new([m, k, f, n], hidden, 15);
        for (name, cpu, _, fused) in ways() {
            let all = case.run(&cpu, fused, 0, m);
            for rows in [1, 2, 31, 32, 33, 100] {
                for start in [0, 5, m - rows] {
                    let y = case.run(&cpu, fused, start, rows);
                    same(&y, &all[start * n..][..rows * n], &format!("{name} {rows} rows from {start}"));
                }
            }
        }
    }
}

/// x, r and y are one matrix, as in a plan in which x is not read later.
#[test]
fn x_may_be_the_residual_and_the_output() {
    for m in [5, 45, 300] {
        let mut case = Case::new([m, 64, 96, 64], Hidden::Gelu, 7);
        case.residual = Some(case.x.clone());
        for (name, cpu, _, fused) in ways() {
            let mut y = case.x.clone();
            let at = y.as_mut_ptr();
            let mut scratch = workspace(&cpu, bytes(case.size));
            // SAFETY: x and the residual are exactly y, which `mlp` allows.
            let (x, out) = unsafe { (Rows::from_raw(at, m, 64, 64), RowsMut::from_raw(at, m, 64, 64)) };
            let w = [pack(&case.w[0], 64), pack(&case.w[1], 96)];
            let norm = case.norm.as_ref().map(|[gamma, beta]| Norm { gamma, beta, eps: 1e-5 });
            let op = Mlp {
                norm,
                hidden: Hidden::Gelu,
                columns: 96,
                w1: &w[0],
                b1: case.b[0].as_deref(),
                w2: &w[1],
                b2: case.b[1].as_deref(),
                residual: Some(x),
            };
            fused(&cpu, x, op, out, &mut scratch);
            same(&y, &case.run(&cpu, fused, 0, m), &format!("{name} {m}"));
        }
    }
}
