//! Test cases of row-wise ops. Invariant: each op runs with every number of rows and of columns.

use super::{Case, CasePack, Noise, PACKINGS, Packing, ROWS, Tolerance, UNIT};
use plimsoll_graph::ops::*;
use plimsoll_graph::{DType, Dim, Op};

/// Numbers of columns: whole vectors, tails, and a single one.
const COLUMNS: [u64; 7] = [8, 24, 33, 40, 160, 320, 1];

/// Positive numbers: variances and reciprocal deviations.
const POSITIVE: Noise = Noise { offset: 1.0, amplitude: 0.9 };

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (rows, columns)) in shapes().enumerate() {
        cases.extend(elementwise(rows, columns));
        cases.push(dropout(rows, columns, Dropout { p: 0.1, stream: 0 }, PACKINGS[i % 3]));
        cases.push(dropout(rows, columns, Dropout { p: 0.5, stream: 7 }, PACKINGS[(i + 1) % 3]));
        cases.push(dropout_of_sequences(rows, columns));
        cases.extend(norms(rows, columns, UNIT));
        cases.push(softmax(rows, columns, UNIT));
        cases.push(concat(rows, Dim::Tokens(1), &[columns, 8, 33]));
        cases.push(concat_grad(rows, columns));
        cases.push(softmax_grad(rows, columns));
        cases.push(kl_divergence(rows, Dim::Tokens(1), columns, UNIT));
        cases.push(kl_divergence_grad(rows, columns, UNIT));
    }
    for (rows, heads, columns) in [(1, 2, 8), (13, 3, 33), (70, 16, 64), (5, 8, 128)] {
        cases.extend(norms_of_heads(rows, heads, columns));
    }
    // A mean far from zero, where E[x^2] - E[x]^2 loses precision.
    cases.extend(norms(13, 160, Noise { offset: 100.0, amplitude: 1.0 }));
    cases.push(softmax(33, 40, Noise { offset: 500.0, amplitude: 100.0 }));
    cases.push(softmax(5, 2, UNIT));
    let far = Noise { offset: 100.0, amplitude: 20.0 };
    cases.push(kl_divergence(33, Dim::Tokens(1), 40, far));
    cases.push(kl_divergence_grad(33, 40, far));
    // Rows of windows, as in a caller.
    cases.push(kl_divergence(70, Dim::Sequences(1), 9, UNIT));
    cases.push(concat(3, Dim::Sequences(1), &[33]));
    cases.push(concat(70, Dim::Sequences(1), &[768, 320]));
    cases.push(concat(13, Dim::Fixed(13), &[1, 1, 1, 1]));
    cases
}

fn shapes() -> impl Iterator<Item = (u64, u64)> {
    ROWS.into_iter().zip(COLUMNS).chain(COLUMNS.map(|columns| (5, columns)))
}

/// A case of `rows` tokens. If `rows` is odd, the counts are below the bounds.
fn case(op: Op, rows: u64, columns: u64, noise: Noise, tolerance: Tolerance) -> Case {
    let name = format!("{} {rows} x {columns} around {}", op.name(), noise.offset);
    Case::new(name, op, &[rows], rows % 2 * 3, tolerance)
}

/// Element-wise ops. Tolerance: c = 0 for copies, 1 for one exactly rounded operation, 4 if erf or exp is
/// approximated.
fn elementwise(rows: u64, columns: u64) -> [Case; 11] {
    let x = [Dim::Tokens(1), Dim::Fixed(columns)];
    let halves = [Dim::Tokens(1), Dim::Fixed(2 * columns)];
    // An amplitude that reaches both tails of erf.
    let wide = Noise { offset: 0.0, amplitude: 6.0 };
    let of = |op, c| case(op, rows, columns, UNIT, Tolerance::sum(c, 1));
    let [gelu, silu] = [Activation::Gelu, Activation::Silu];
    let with = |what: &str, mut case: Case| {
        case.name = format!("{} {what}", case.name);
        case
    };
    let glu = |activation| with(&format!("{activation:?}"), of(Op::Glu(Glu { activation }), 4.0));
    let glu_grad = |activation| with(&format!("{activation:?}"), of(Op::GluGrad(GluGrad { activation }), 8.0));
    [
        of(Op::Add(Add {}), 1.0).noise(&x, UNIT).noise(&x, UNIT),
        of(Op::Scale(Scale { factor: -0.3 }), 1.0).noise(&x, UNIT),
        of(Op::Cast(Cast { to: DType::F32 }), 0.0).noise(&x, UNIT),
        of(Op::Relu(Relu {}), 0.0).noise(&x, UNIT),
        of(Op::ReluGrad(ReluGrad {}), 0.0).noise(&x, UNIT).noise(&x, UNIT),
        of(Op::Gelu(Gelu {}), 4.0).noise(&x, wide),
        of(Op::GeluGrad(GeluGrad {}), 4.0).noise(&x, UNIT).noise(&x, wide),
        glu(gelu).noise(&halves, wide),
        glu(silu).noise(&halves, wide),
        glu_grad(gelu).noise(&x, UNIT).noise(&halves, wide),
        glu_grad(silu).noise(&x, UNIT).noise(&halves, wide),
    ]
}

/// Dropout of tokens. Tolerance: c = 2 for the scale and a product.
fn dropout(rows: u64, columns: u64, op: Dropout, packing: Packing) -> Case {
    let name = format!("dropout {rows} x {columns}, {} of {} in {packing:?}", op.p, op.stream);
    let lengths = packing.lengths(rows);
    let case = Case::new(name, Op::Dropout(op), &lengths, rows % 2 * 3, Tolerance::sum(2.0, 1));
    let seed = case.random(2).map(|bits| bits as i32).collect();
    let case = case.noise(&[Dim::Tokens(1), Dim::Fixed(columns)], UNIT).integers(&[Dim::Fixed(2)], seed);
    case.packs(&packing.packs(rows))
}

/// Dropout of sequences of two tokens, in packs of a third, none, and the rest. Tolerance as in [`dropout`].
fn dropout_of_sequences(sequences: u64, columns: u64) -> Case {
    let name = format!("dropout of {sequences} sequences x {columns}");
    let op = Op::Dropout(Dropout { p: 0.4, stream: 3 });
    let lengths = vec![2; sequences as usize];
    let case = Case::new(name, op, &lengths, sequences % 2 * 3, Tolerance::sum(2.0, 1));
    let seed = case.random(2).map(|bits| bits as i32).collect();
    let case = case.noise(&[Dim::Sequences(1), Dim::Fixed(columns)], UNIT).integers(&[Dim::Fixed(2)], seed);
    let pack = |sequences| CasePack { tokens: 2 * sequences, sequences, targets: sequences };
    case.packs(&[pack(sequences / 3), pack(0), pack(sequences - sequences / 3)])
}

/// Norms and their gradients. Tolerance: c = 2; 4 for gradients, which have further sums, and for batch norm,
/// which a kernel may compute as x s + t. `k` is the number of columns, for sums over rows the number of rows,
/// and 1 for batch norm with running statistics.
fn norms(rows: u64, columns: u64, noise: Noise) -> Vec<Case> {
    let x = [Dim::Tokens(1), Dim::Fixed(columns)];
    let scale = noise.offset.abs() + noise.amplitude;
    let tolerance = |c, k| Tolerance { c, k, scale };
    let of = |op, tolerance| case(op, rows, columns, noise, tolerance);
    let sums = tolerance(4.0, columns.max(rows));
    let norm = of(Op::LayerNorm(LayerNorm { eps: 1e-5 }), tolerance(2.0, columns));
    let grad = of(Op::LayerNormGrad(LayerNormGrad {}), sums);
    let rms = of(Op::RmsNorm(RmsNorm { eps: 1e-5, heads: 1 }), tolerance(2.0, columns));
    let rms_grad = of(Op::RmsNormGrad(RmsNormGrad { heads: 1 }), sums);
    let batch = of(Op::BatchNorm(BatchNorm { eps: 1e-5 }), tolerance(4.0, 1));
    let statistic = [Dim::Tokens(1)];
    let mean = Noise { amplitude: 0.1, ..noise };
    let mut cases = vec![
        norm.noise(&x, noise).weight(&[columns], UNIT).weight(&[columns], UNIT),
        grad.noise(&x, UNIT)
            .noise(&x, noise)
            .noise(&statistic, mean)
            .noise(&statistic, POSITIVE)
            .weight(&[columns], UNIT),
        rms.noise(&x, noise).weight(&[columns], UNIT),
        rms_grad.noise(&x, UNIT).noise(&x, noise).noise(&statistic, POSITIVE).weight(&[columns], UNIT),
        batch
            .noise(&x, noise)
            .weight(&[columns], UNIT)
            .weight(&[columns], UNIT)
            .weight(&[columns], mean)
            .weight(&[columns], POSITIVE),
    ];
    cases.extend(batch_norms(rows, columns, noise));
    cases
}

/// The RMS norm of heads of `columns` columns, and its gradient. Tolerance as in [`norms`].
fn norms_of_heads(rows: u64, heads: u32, columns: u64) -> [Case; 2] {
    let all = u64::from(heads);
    let x = [Dim::Tokens(1), Dim::Fixed(all * columns)];
    let of = |op: Op, c, k| {
        let name = format!("{} {rows} x {heads} heads of {columns}", op.name());
        Case::new(name, op, &[rows], rows % 2 * 3, Tolerance { c, k, scale: 1.0 })
    };
    let norm = of(Op::RmsNorm(RmsNorm { eps: 1e-5, heads }), 2.0, columns);
    let grad = of(Op::RmsNormGrad(RmsNormGrad { heads }), 4.0, columns.max(rows * all));
    let grad = grad.noise(&x, UNIT).noise(&x, UNIT).noise(&[Dim::Tokens(all)], POSITIVE);
    [norm.noise(&x, UNIT).weight(&[columns], UNIT), grad.weight(&[columns], UNIT)]
}

/// Gradients of batch norm and, for two rows or more, batch norm with the statistics of the batch: a single row
/// has no variance. Tolerance as in [`norms`].
fn batch_norms(rows: u64, columns: u64, noise: Noise) -> Vec<Case> {
    let x = [Dim::Tokens(1), Dim::Fixed(columns)];
    let scale = noise.offset.abs() + noise.amplitude;
    let of = |op, k| case(op, rows, columns, noise, Tolerance { c: 4.0, k, scale });
    let mean = Noise { amplitude: 0.1, ..noise };
    let backward = |op| of(op, rows).noise(&x, UNIT).noise(&x, noise);
    let grad = backward(Op::BatchNormGrad(BatchNormGrad { eps: 1e-5 }));
    let train_grad = backward(Op::BatchNormTrainGrad(BatchNormTrainGrad {}));
    let mut cases = vec![
        grad.weight(&[columns], UNIT).weight(&[columns], mean).weight(&[columns], POSITIVE),
        train_grad.weight(&[columns], mean).weight(&[columns], POSITIVE).weight(&[columns], UNIT),
    ];
    if rows > 1 {
        let train = of(Op::BatchNormTrain(BatchNormTrain { eps: 1e-2, momentum: 0.1 }), rows);
        let train = train.noise(&x, noise).weight(&[columns], UNIT).weight(&[columns], UNIT);
        cases.push(train.weight(&[columns], mean).weight(&[columns], POSITIVE));
    }
    cases
}

/// Tolerance: c = 2; `k` is the number of columns. The magnitude of the inputs does not matter, because the
/// maximum is subtracted.
fn softmax(rows: u64, columns: u64, noise: Noise) -> Case {
    let op = Op::Softmax(Softmax {});
    case(op, rows, columns, noise, Tolerance::sum(2.0, columns))
        .noise(&[Dim::Tokens(1), Dim::Fixed(columns)], noise)
}

/// Tolerance: c = 4 for a sum and two further operations; `k` is the number of columns.
fn softmax_grad(rows: u64, columns: u64) -> Case {
    let x = [Dim::Tokens(1), Dim::Fixed(columns)];
    let op = Op::SoftmaxGrad(SoftmaxGrad {});
    case(op, rows, columns, UNIT, Tolerance::sum(4.0, columns)).noise(&x, UNIT).noise(&x, POSITIVE)
}

/// Tolerance: c = 4 for exponentials, their sum, and the sum of distances; `k` is the number of columns. The terms are
/// distances of logits, one for each row.
fn kl_divergence(rows: u64, dim: Dim, columns: u64, noise: Noise) -> Case {
    let lengths: &[u64] = match dim {
        Dim::Sequences(_) => &vec![1; rows as usize],
        Dim::Tokens(_) | Dim::Packs(_) | Dim::Fixed(_) => &[rows],
    };
    let tolerance = Tolerance { c: 4.0, k: columns, scale: rows as f32 * 2.0 * noise.amplitude };
    let name = format!("kl_divergence {rows} of {dim}, {columns} around {}", noise.offset);
    let case = Case::new(name, Op::KlDivergence(KlDivergence {}), lengths, rows % 2 * 3, tolerance);
    let logits = [dim, Dim::Fixed(columns)];
    case.noise(&logits, noise).noise(&logits, noise)
}

/// Tolerance: c = 4 as for [`kl_divergence`]; the largest terms are probabilities.
fn kl_divergence_grad(rows: u64, columns: u64, noise: Noise) -> Case {
    let op = Op::KlDivergenceGrad(KlDivergenceGrad {});
    let logits = [Dim::Tokens(1), Dim::Fixed(columns)];
    let case = case(op, rows, columns, noise, Tolerance::sum(4.0, columns));
    case.noise(&[Dim::Fixed(1)], UNIT).noise(&logits, noise).noise(&logits, noise)
}

/// Copies the columns from `first` on. Tolerance 0.
fn concat_grad(rows: u64, columns: u64) -> Case {
    let first = columns * 2 / 3;
    let op = Op::ConcatGrad(ConcatGrad { first, count: columns - first });
    case(op, rows, columns, UNIT, Tolerance::sum(0.0, 1)).noise(&[Dim::Tokens(1), Dim::Fixed(columns)], UNIT)
}

/// Copies columns. Tolerance 0.
fn concat(rows: u64, dim: Dim, columns: &[u64]) -> Case {
    let name = format!("concat {rows} rows of {dim} x {columns:?}");
    let lengths: &[u64] = match dim {
        Dim::Sequences(_) => &vec![1; rows as usize],
        Dim::Tokens(_) | Dim::Packs(_) | Dim::Fixed(_) => &[rows],
    };
    let case = Case::new(name, Op::Concat(Concat {}), lengths, rows % 2 * 3, Tolerance::sum(0.0, 1));
    columns.iter().fold(case, |case, &c| case.noise(&[dim, Dim::Fixed(c)], UNIT))
}
