//! Tests of norms, softmax, means, embeddings and element-wise ops.

use super::{close, machines, numbers, same_bits};
use crate::rows::embed::{self, EmbeddingTable, EsmTokenDropout};
use crate::rows::norm::{LayerNormOutputs, LayerNormParams, RunningBatchNorm, batch_norm, layer_norm};
use crate::rows::reduce::{self, MeanSpans};
use crate::{Cpu, Rows, RowsMut, rows::elementwise, rows::rope};

const EPS: f64 = f32::EPSILON as f64;

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

/// Layer norm of x (m, n) with (gamma, beta) = `gb`; returns y, mean and rstd.
fn norm_of(cpu: &Cpu, x: &[f32], m: usize, n: usize, gb: [&[f32]; 2], eps: f32) -> [Vec<f32>; 3] {
    let mut y = vec![f32::NAN; m * n];
    let mut mean = vec![0.0; m];
    let mut rstd = vec![0.0; m];
    let rows = Rows::new(x, m, n, n);
    let out = RowsMut::new(&mut y, m, n, n);
    let params = LayerNormParams { gamma: gb[0], beta: gb[1], eps };
    let outputs = LayerNormOutputs { y: Some(out), mean: Some(&mut mean), rstd: Some(&mut rstd) };
    layer_norm(cpu, rows, params, outputs);
    [y, mean, rstd]
}

#[test]
fn layer_norm_is_two_pass() {
    for n in [1, 2, 15, 16, 17, 320, 1001] {
        let m = 50;
        // A mean far from zero, with which a one-pass variance would cancel.
        let x: Vec<f32> = numbers(1, m * n).iter().map(|v| v + 30.0).collect();
        let gamma = numbers(2, n);
        let beta = numbers(3, n);
        for cpu in machines() {
            let [y, mean, rstd] = norm_of(&cpu, &x, m, n, [&gamma, &beta], 1e-3);
            for r in 0..m {
                let row = wide(&x[r * n..][..n]);
                let mu = row.iter().sum::<f64>() / n as f64;
                let var = row.iter().map(|v| (v - mu) * (v - mu)).sum::<f64>() / n as f64;
                let k = 1.0 / (var + f64::from(1e-3f32)).sqrt();
                let want: Vec<f64> =
                    (0..n).map(|j| (row[j] - mu) * k * f64::from(gamma[j]) + f64::from(beta[j])).collect();
                // The mean has an error of about 2 eps * 30, which rstd multiplies.
                close(&y[r * n..][..n], &want, 4.0 * EPS * 30.0 * k, "layer norm");
                close(&mean[r..=r], &[mu], 2.0 * EPS * 30.0, "mean");
                close(&rstd[r..=r], &[k], 8.0 * EPS * k * (1.0 + 30.0 * k * EPS * 30.0 * k), "rstd");
            }
            // Recomputation may need the statistics without the rows.
            let mut means = vec![0.0; m];
            let mut rstds = vec![0.0; m];
            let rows = Rows::new(&x, m, n, n);
            let params = LayerNormParams { gamma: &gamma, beta: &beta, eps: 1e-3 };
            let outputs = LayerNormOutputs { y: None, mean: Some(&mut means), rstd: Some(&mut rstds) };
            layer_norm(&cpu, rows, params, outputs);
            same_bits(&means, &mean, "means alone");
            same_bits(&rstds, &rstd, "deviations alone");
            if cpu.isa().has_fma() {
                let alone = norm_of(&Cpu::new(1), &x[7 * n..][..n], 1, n, [&gamma, &beta], 1e-3);
                same_bits(&y[7 * n..][..n], &alone[0], "a row alone");
            }
        }
    }
}

#[test]
fn batch_norm_uses_running_statistics() {
    let m = 9;
    let n = 37;
    let [x, gamma, beta, mean] = [1, 2, 3, 4].map(|seed| numbers(seed, if seed == 1 { m * n } else { n }));
    let var: Vec<f32> = numbers(5, n).iter().map(|v| v.abs() + 0.1).collect();
    let norm = RunningBatchNorm { gamma: &gamma, beta: &beta, mean: &mean, var: &var, eps: 1e-5 };
    let want: Vec<f64> = (0..m * n)
        .map(|i| {
            let [x, g, b, mu, v] = [x[i], gamma[i % n], beta[i % n], mean[i % n], var[i % n]].map(f64::from);
            (x - mu) / (v + 1e-5).sqrt() * g + b
        })
        .collect();
    for cpu in machines() {
        let mut y = x.clone();
        let at = y.as_mut_ptr();
        // SAFETY: y is exactly x, which `batch_norm` allows.
        let (x, out) = unsafe { (Rows::from_raw(at, m, n, n), RowsMut::from_raw(at, m, n, n)) };
        batch_norm(&cpu, x, norm, out);
        close(&y, &want, 32.0 * EPS, "batch norm");
    }
}

#[test]
fn softmax_sums_to_one() {
    for n in [1, 2, 16, 33, 500] {
        let m = 40;
        let x: Vec<f32> = numbers(6, m * n).iter().map(|v| v * 20.0).collect();
        for cpu in machines() {
            let mut y = vec![f32::NAN; m * n];
            reduce::softmax(&cpu, Rows::new(&x, m, n, n), RowsMut::new(&mut y, m, n, n));
            for r in 0..m {
                let row = wide(&x[r * n..][..n]);
                let top = row.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = row.iter().map(|v| (v - top).exp()).sum();
                let want: Vec<f64> = row.iter().map(|v| (v - top).exp() / sum).collect();
                close(&y[r * n..][..n], &want, 4.0 * EPS, "softmax");
            }
        }
    }
    let x = [1.0, f32::NAN, 2.0];
    let mut y = [0.0; 3];
    reduce::softmax(&Cpu::new(1), Rows::new(&x, 1, 3, 3), RowsMut::new(&mut y, 1, 3, 3));
    assert!(y.iter().all(|v| v.is_nan()), "NaN shows");
}

#[test]
fn a_segment_mean_leaves_out_the_ends() {
    let t = 3100;
    let d = 70;
    let x: Vec<f32> = numbers(7, t * d).iter().map(|v| v + 1.0).collect();
    let spans = [[0, 5], [5, 7], [8, 8], [8, 11], [11, 3100]];
    for cpu in machines() {
        let mut y = vec![f32::NAN; spans.len() * d];
        let out = RowsMut::new(&mut y, spans.len(), d, d);
        let segments = MeanSpans { spans: &spans, skip_first: 1, skip_last: 1 };
        reduce::segment_mean(&cpu, Rows::new(&x, t, d, d), segments, out);
        for (s, &[start, end]) in spans.iter().enumerate() {
            let rows = (start as usize + 1)..(end as usize).saturating_sub(1);
            let count = rows.len().max(1) as f64;
            let sum = |j: usize| rows.clone().map(|r| f64::from(x[r * d + j])).sum::<f64>();
            let want: Vec<f64> = (0..d).map(|j| sum(j) / count).collect();
            close(&y[s * d..][..d], &want, 2.0 * EPS, "segment mean"); // one rounding, |mean| < 2
        }
    }
}

#[test]
fn embeddings_are_rows_of_the_table() {
    let v = 33;
    let d = 21;
    let table = numbers(8, v * d);
    let plus = numbers(9, d);
    let ids = [0, 5, 32, 4, 32, 7, 2];
    let spans = [[0, 4], [4, 6]];
    for cpu in machines() {
        let table_rows = Rows::new(&table, v, d, d);
        let mut y = vec![f32::NAN; ids.len() * d];
        let with_row = EmbeddingTable { table: table_rows, plus: Some(&plus) };
        embed::gather(&cpu, &ids, with_row, RowsMut::new(&mut y, ids.len(), d, d));
        for (i, &id) in ids.iter().enumerate() {
            let want: Vec<f32> = (0..d).map(|j| table[id as usize * d + j] + plus[j]).collect();
            same_bits(&y[i * d..][..d], &want, "gather");
        }
        y.fill(9.0);
        let out = RowsMut::new(&mut y, ids.len(), d, d);
        let dropout = EsmTokenDropout { spans: &spans, mask_id: 32, keep: 0.88 };
        embed::gather_esm(&cpu, &ids, EmbeddingTable { table: table_rows, plus: None }, dropout, out);
        for (i, &id) in ids.iter().enumerate() {
            let scale = [0.88 / (1.0f32 - 0.25), 0.88 / (1.0 - 0.5)][usize::from(i >= 4)];
            let row = |j| match i {
                6 => 9.0, // outside the spans
                _ if id == 32 => 0.0,
                _ => table[id as usize * d + j] * scale,
            };
            same_bits(&y[i * d..][..d], &(0..d).map(row).collect::<Vec<_>>(), "gather_esm");
        }
    }
}

#[test]
#[should_panic(expected = "token 33 of a table of 33")]
fn a_token_outside_the_table_is_refused() {
    let table = [0.0; 33];
    let mut y = [0.0; 1];
    let embedding = EmbeddingTable { table: Rows::new(&table, 33, 1, 1), plus: None };
    embed::gather(&Cpu::new(1), &[33], embedding, RowsMut::new(&mut y, 1, 1, 1));
}

#[test]
fn element_wise_ops_stay_at_their_place() {
    let m = 300;
    let n = 75;
    let a = numbers(10, m * n);
    let b = numbers(11, m * n);
    let shape = |x| Rows::new(x, m, n, n);
    for cpu in machines() {
        let mut y = vec![f32::NAN; m * n];
        elementwise::add(&cpu, shape(&a), shape(&b), RowsMut::new(&mut y, m, n, n));
        same_bits(&y, &a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>(), "add");
        elementwise::relu(&cpu, shape(&a), RowsMut::new(&mut y, m, n, n));
        close(&y, &wide(&a).iter().map(|v| v.max(0.0)).collect::<Vec<_>>(), 0.0, "relu");

        let mut both = vec![f32::NAN; m * (2 * n + 1)];
        let mut cat = RowsMut::new(&mut both, m, 2 * n, 2 * n + 1);
        elementwise::copy(&cpu, shape(&a), cat.columns(0, n));
        elementwise::copy(&cpu, shape(&b), cat.columns(n, n));
        assert!(both.chunks(2 * n + 1).all(|row| row[2 * n].is_nan()), "wrote past the columns");
        elementwise::glu(
            &cpu,
            elementwise::Gate::Gelu,
            Rows::new(&both, m, 2 * n, 2 * n + 1),
            RowsMut::new(&mut y, m, n, n),
        );
        let mut gelu = vec![f32::NAN; m * n];
        elementwise::gelu(&cpu, shape(&a), RowsMut::new(&mut gelu, m, n, n));
        same_bits(&y, &gelu.iter().zip(&b).map(|(g, b)| g * b).collect::<Vec<_>>(), "glu");
        elementwise::fill(&cpu, 0.0, RowsMut::new(&mut y, m, n, n));
        assert!(y.iter().all(|&v| v == 0.0));
    }
}

#[test]
fn rotary_tables_are_rounded_once() {
    let freq = [1.0f32, 0.316_227_76, 1e-4];
    let mut cos = vec![0.0; 3000];
    let mut sin = vec![0.0; 3000];
    rope::table(&freq, 1000, &mut cos, &mut sin);
    for pos in 0..1000 {
        for (j, f) in freq.iter().enumerate() {
            let angle = f64::from(pos as f32 * f);
            assert_eq!(cos[pos * 3 + j], libm::cos(angle) as f32);
            assert_eq!(sin[pos * 3 + j], libm::sin(angle) as f32);
        }
    }
}
