//! Tests of row kernels on bf16: the bits of the f32 kernel on the widened numbers, rounded once; for GELU, of the
//! SIMD GELU for bf16.

use super::math::for_bf16;
use super::{machines, numbers};
use crate::rows::elementwise::Gate;
use crate::rows::embed::{self, EmbeddingTable, EsmTokenDropout};
use crate::rows::norm::{LayerNormOutputs, LayerNormParams, RmsNormParams, layer_norm, rms_norm};
use crate::rows::reduce::{self, MeanSpans};
use crate::{Bf16, Cpu, Element, Rows, RowsMut, rows::elementwise};
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};

const COLUMNS: [usize; 6] = [1, 15, 16, 17, 320, 1001];

fn narrow(x: &[f32]) -> Vec<Bf16> {
    x.iter().map(|&v| Bf16(f32_to_bf16(v))).collect()
}

fn wide(x: &[Bf16]) -> Vec<f32> {
    x.iter().map(|v| bf16_to_f32(v.0)).collect()
}

/// `n` bf16 numbers, and the same numbers in f32.
fn pair(seed: u64, n: usize) -> (Vec<Bf16>, Vec<f32>) {
    let x = narrow(&numbers(seed, n));
    let same = wide(&x);
    (x, same)
}

/// The matrix (m, n), initially full of `fill`, after `kernel` has written it.
fn written<E: Element>(fill: E, m: usize, n: usize, kernel: impl FnOnce(RowsMut<'_, E>)) -> Vec<E> {
    let mut y = vec![fill; m * n];
    kernel(RowsMut::new(&mut y, m, n, n));
    y
}

/// NaN, the content of outputs before a kernel writes them.
const NONE: Bf16 = Bf16(0x7FC0);

/// Panics unless the first equals the second, rounded to bf16.
#[track_caller]
fn rounded(found: &[Bf16], wanted: &[f32], what: &str) {
    assert_eq!(found, narrow(wanted), "{what}");
}

#[test]
fn norms_round_once() {
    for n in COLUMNS {
        let m = 40;
        let (x, xf) = pair(1, m * n);
        let (g, gf) = pair(2, n);
        let (b, bf) = pair(3, n);
        let view = Rows::new(&x, m, n, n);
        let wide_view = Rows::new(&xf, m, n, n);
        for cpu in machines() {
            let [mut mean, mut mean_f, mut rstd, mut rstd_f] = [0; 4].map(|_| vec![f32::NAN; m]);
            let params = LayerNormParams { gamma: &gf[..], beta: &bf[..], eps: 1e-5 };
            let wanted = written(f32::NAN, m, n, |y| {
                let outputs = LayerNormOutputs { y: Some(y), mean: Some(&mut mean_f), rstd: Some(&mut rstd_f) };
                layer_norm(&cpu, wide_view, params, outputs);
            });
            let found = written(NONE, m, n, |y| {
                let outputs = LayerNormOutputs { y: Some(y), mean: Some(&mut mean), rstd: Some(&mut rstd) };
                layer_norm(&cpu, view, params, outputs);
            });
            rounded(&found, &wanted, "layer norm");
            assert_eq!((mean, rstd), (mean_f, rstd_f), "statistics are f32");
            let params = LayerNormParams { gamma: &g[..], beta: &b[..], eps: 1e-5 };
            let found = written(NONE, m, n, |y| {
                layer_norm(&cpu, view, params, LayerNormOutputs { y: Some(y), mean: None, rstd: None });
            });
            rounded(&found, &wanted, "layer norm with parameters of bf16");

            let params = RmsNormParams { gamma: &gf[..], eps: 1e-5 };
            let wanted = written(f32::NAN, m, n, |y| rms_norm(&cpu, wide_view, params, Some(y), None));
            let found = written(NONE, m, n, |y| rms_norm(&cpu, view, params, Some(y), None));
            rounded(&found, &wanted, "RMS norm");
        }
    }
}

#[test]
fn element_wise_ops_round_once() {
    for n in COLUMNS {
        let m = 30;
        let (a, af) = pair(4, m * n);
        let (b, bf) = pair(5, m * n);
        let x = Rows::new(&a, m, n, n);
        let y = Rows::new(&b, m, n, n);
        let xf = Rows::new(&af, m, n, n);
        let yf = Rows::new(&bf, m, n, n);
        for cpu in machines() {
            // A closure cannot be generic over the element type, so each op is written twice.
            let wanted = |kernel: &dyn Fn(RowsMut<'_>)| written(f32::NAN, m, n, kernel);
            let found = |kernel: &dyn Fn(RowsMut<'_, Bf16>)| written(NONE, m, n, kernel);
            let add = wanted(&|out| elementwise::add(&cpu, xf, yf, out));
            rounded(&found(&|out| elementwise::add(&cpu, x, y, out)), &add, "add");
            let gelu = for_bf16(cpu.isa(), Gate::Gelu, &af);
            rounded(&found(&|out| elementwise::gelu(&cpu, x, out)), &gelu, "gelu");
            let relu = wanted(&|out| elementwise::relu(&cpu, xf, out));
            rounded(&found(&|out| elementwise::relu(&cpu, x, out)), &relu, "relu");
            let scale = wanted(&|out| elementwise::scale(&cpu, 0.3, xf, out));
            rounded(&found(&|out| elementwise::scale(&cpu, 0.3, x, out)), &scale, "scale");
            let copy = wanted(&|out| elementwise::copy(&cpu, xf, out));
            rounded(&found(&|out| elementwise::copy(&cpu, x, out)), &copy, "copy");
        }
    }
}

#[test]
fn gates_and_concatenations_round_once() {
    for n in COLUMNS {
        let m = 20;
        let (x, xf) = pair(6, m * 2 * n);
        let view = Rows::new(&x, m, 2 * n, 2 * n);
        for cpu in machines() {
            for gate in [Gate::Gelu, Gate::Silu] {
                let gated = |row: &[f32]| {
                    let activated = for_bf16(cpu.isa(), gate, &row[..n]);
                    activated.iter().zip(&row[n..]).map(|(g, v)| g * v).collect::<Vec<_>>()
                };
                let wanted: Vec<f32> = xf.chunks(2 * n).flat_map(gated).collect();
                let found = written(NONE, m, n, |y| elementwise::glu(&cpu, gate, view, y));
                rounded(&found, &wanted, "gate");
            }
            // Rows longer than the written part: the last column of each must not change.
            let mut both = vec![NONE; m * (2 * n + 1)];
            let mut cat = RowsMut::new(&mut both, m, 2 * n, 2 * n + 1);
            elementwise::copy(&cpu, view.columns(0, n), cat.columns(n, n));
            elementwise::copy(&cpu, view.columns(n, n), cat.columns(0, n));
            for (row, from) in both.chunks(2 * n + 1).zip(x.chunks(2 * n)) {
                assert_eq!([&row[..n], &row[n..2 * n]], [&from[n..], &from[..n]], "concat");
                assert_eq!(row[2 * n], NONE, "wrote past the columns");
            }
        }
    }
}

#[test]
fn embeddings_and_means_round_once() {
    let ids = [0, 5, 32, 4, 32, 7, 2];
    let spans = [[0, 4], [4, 7]];
    let v = 33;
    let m = ids.len();
    for n in COLUMNS {
        let (table, table_f) = pair(8, v * n);
        let (plus, plus_f) = pair(9, n);
        let rows = Rows::new(&table, v, n, n);
        let rows_f = Rows::new(&table_f, v, n, n);
        for cpu in machines() {
            for (plus, plus_f) in [(None, None), (Some(&plus[..]), Some(&plus_f[..]))] {
                let embedding = EmbeddingTable { table: rows, plus };
                let embedding_f = EmbeddingTable { table: rows_f, plus: plus_f };
                let dropout = EsmTokenDropout { spans: &spans, mask_id: 32, keep: 0.88 };
                let wanted = written(f32::NAN, m, n, |y| embed::gather(&cpu, &ids, embedding_f, y));
                let found = written(NONE, m, n, |y| embed::gather(&cpu, &ids, embedding, y));
                rounded(&found, &wanted, "gather");
                let wanted =
                    written(f32::NAN, m, n, |y| embed::gather_esm(&cpu, &ids, embedding_f, dropout, y));
                let found = written(NONE, m, n, |y| embed::gather_esm(&cpu, &ids, embedding, dropout, y));
                rounded(&found, &wanted, "gather_esm");
            }
            // Means are f32 for both element types, so they must be equal without rounding.
            let segments = MeanSpans { spans: &[[0, 20], [20, 33]], skip_first: 1, skip_last: 1 };
            let mean = |y: RowsMut<'_>| reduce::segment_mean(&cpu, rows, segments, y);
            let mean_f = |y: RowsMut<'_>| reduce::segment_mean(&cpu, rows_f, segments, y);
            assert_eq!(written(f32::NAN, 2, n, mean), written(f32::NAN, 2, n, mean_f), "segment mean");
        }
    }
}

#[test]
fn a_nan_of_bf16_shows() {
    let x = [Bf16(0x3F80), NONE, Bf16(0xBF80)];
    let cpu = Cpu::new(1);
    let y = written(Bf16(0), 1, 3, |y| elementwise::gelu(&cpu, Rows::new(&x, 1, 3, 3), y));
    let nan: Vec<bool> = wide(&y).iter().map(|v| v.is_nan()).collect();
    assert_eq!(nan, [false, true, false]);
    let y = written(Bf16(0), 1, 3, |y| elementwise::relu(&cpu, Rows::new(&x, 1, 3, 3), y));
    assert_eq!(y, [Bf16(0x3F80), NONE, Bf16(0)]);
}
