//! One step of AdamW, SGD and Adafactor, gradient accumulation, the common gradient scale, and averages of weights.
//! Invariant: if `ok` is 0, every output equals its input.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::{Adafactor, AdamW, CountSteps, Ema, GradScale, Sgd};

/// Factor on all gradients of a step, and whether the step is applied.
#[derive(Clone, Copy)]
pub(super) struct StepScale {
    factor: f64,
    ok: bool,
}

impl StepScale {
    /// Takes the scale as the next input.
    pub(super) fn take(ins: &mut Operands<'_>) -> Result<Self, ReferenceError> {
        let scale = ins.shaped("scale", &[2])?;
        Ok(Self { factor: scale[0], ok: scale[1] != 0.0 })
    }

    /// The scaled gradient, or `None` if the step is not applied.
    pub(super) fn of(self, g: &[f64]) -> Option<Vec<f64>> {
        self.ok.then(|| g.iter().map(|g| self.factor * g).collect())
    }
}

pub(super) fn eval_adamw(op: &AdamW, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, p) = ins.floats("p")?;
    let [g, m, v] = [ins.shaped("g", shape)?, ins.shaped("m", shape)?, ins.shaped("v", shape)?];
    let scale = StepScale::take(ins)?;
    let hyper = ins.shaped("hyper", &[3])?;
    let mut states = [p.to_vec(), m.to_vec(), v.to_vec()];
    if let Some(g) = scale.of(g) {
        adamw(op, hyper, &g, &mut states);
    }
    Ok(states.map(|x| Tensor::f64(shape, x)).to_vec())
}

/// Advances (p, m, v) by one AdamW step; hyper = (lr, 1 - b1^t, 1 - b2^t).
pub(super) fn adamw(op: &AdamW, hyper: &[f64], g: &[f64], [p, m, v]: &mut [Vec<f64>; 3]) {
    let [b1, b2, eps, decay] = [op.beta1, op.beta2, op.eps, op.weight_decay].map(f64::from);
    let [lr, c1, c2] = [hyper[0], hyper[1], hyper[2]];
    for (i, g) in g.iter().enumerate() {
        m[i] = b1 * m[i] + (1.0 - b1) * g;
        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
        p[i] -= lr * decay * p[i];
        p[i] -= lr * (m[i] / c1) / ((v[i] / c2).sqrt() + eps);
    }
}

pub(super) fn eval_sgd(op: &Sgd, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, p) = ins.floats("p")?;
    let g = ins.shaped("g", shape)?;
    let [momentum, decay] = [op.momentum, op.weight_decay].map(f64::from);
    let buffer = (momentum != 0.0).then(|| ins.shaped("b", shape)).transpose()?;
    let scale = StepScale::take(ins)?;
    let lr = ins.shaped("hyper", &[1])?[0];
    let mut p = p.to_vec();
    let mut buffer = buffer.map(<[f64]>::to_vec);
    for (i, g) in scale.of(g).iter().flatten().enumerate() {
        let mut step = g + decay * p[i];
        if let Some(buffer) = &mut buffer {
            buffer[i] = momentum * buffer[i] + step;
            step = if op.nesterov { step + momentum * buffer[i] } else { buffer[i] };
        }
        p[i] -= lr * step;
    }
    let states = [Some(p), buffer].into_iter().flatten();
    Ok(states.map(|x| Tensor::f64(shape, x)).collect())
}

/// Adafactor. A vector is treated as one row; its row statistic equals its mean, so R / mean(R) is 1.
pub(super) fn eval_adafactor(op: &Adafactor, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, p) = ins.floats("p")?;
    let g = ins.shaped("g", shape)?;
    let (rows, columns, row, column) = match *shape {
        [r, c] => (r, c, Some(ins.shaped("row", &[r])?), ins.shaped("column", &[c])?),
        [n] => (1, n, None, ins.shaped("v", &[n])?),
        _ => return Err(ReferenceError::Rank { what: "p", wanted: 2, found: shape.to_vec() }),
    };
    let scale = StepScale::take(ins)?;
    let hyper = ins.shaped("hyper", &[2])?;
    let mut state = AdafactorState { p: p.to_vec(), row: row.map(<[f64]>::to_vec), column: column.to_vec() };
    if let Some(g) = scale.of(g) {
        state.update(op, hyper, &g, rows);
    }
    let lengths = [shape, &[rows][..], &[columns][..]];
    let states = [Some(state.p), state.row, Some(state.column)].into_iter().zip(lengths);
    Ok(states.filter_map(|(x, shape)| x.map(|x| Tensor::f64(shape, x))).collect())
}

/// State that Adafactor updates: the parameter, and its statistics by row (none for a vector) and by column.
struct AdafactorState {
    p: Vec<f64>,
    row: Option<Vec<f64>>,
    column: Vec<f64>,
}

impl AdafactorState {
    fn update(&mut self, op: &Adafactor, hyper: &[f64], g: &[f64], rows: usize) {
        let columns = self.column.len();
        let [eps1, clip, decay] = [op.eps1, op.clip, op.weight_decay].map(f64::from);
        let [lr, b2] = [hyper[0], hyper[1]];
        let squares: Vec<f64> = g.iter().map(|g| g * g + eps1).collect();
        for (c, column) in self.column.iter_mut().enumerate() {
            let mean = (0..rows).map(|r| squares[r * columns + c]).sum::<f64>() / rows as f64;
            *column = b2 * *column + (1.0 - b2) * mean;
        }
        // R / mean(R)
        let mut share = vec![1.0; rows];
        if let Some(row) = &mut self.row {
            for (r, row) in row.iter_mut().enumerate() {
                let mean = (0..columns).map(|c| squares[r * columns + c]).sum::<f64>() / columns as f64;
                *row = b2 * *row + (1.0 - b2) * mean;
            }
            let mean = row.iter().sum::<f64>() / rows as f64;
            share = row.iter().map(|row| row / mean).collect();
        }
        let mut u = Vec::with_capacity(g.len());
        for (i, g) in g.iter().enumerate() {
            u.push(g / (share[i / columns] * self.column[i % columns]).sqrt());
        }
        // The update is clipped by its own size, not by that of the gradient: the statistics lag behind a sudden change.
        let rms = (super::dot(&u, &u) / u.len() as f64).sqrt();
        for (p, u) in self.p.iter_mut().zip(&u) {
            *p -= lr * decay * *p;
            *p -= lr * u / (rms / clip).max(1.0);
        }
    }
}

pub(super) fn eval_grad_scale(op: &GradScale, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let mut sum = 0.0;
    let mut last = ins.floats("unscale")?;
    while !ins.is_empty() {
        sum += super::dot(last.1, last.1);
        last = ins.floats("unscale")?;
    }
    let (shape, &[unscale]) = last else {
        let wanted = vec![1];
        let found = last.0.to_vec();
        return Err(ReferenceError::Shape { what: "unscale", wanted, found });
    };
    let norm = unscale.abs() * sum.sqrt();
    let clip = match f64::from(op.max_norm) {
        0.0 => 1.0,
        max_norm => (max_norm / (norm + 1e-6)).min(1.0),
    };
    // The norm is stored as f32, so it must be finite as f32.
    let ok = f64::from(u8::from((norm as f32).is_finite()));
    Ok(vec![Tensor::f64(&[2], vec![unscale * clip, ok]), Tensor::f64(shape, vec![norm])])
}

pub(super) fn eval_accumulate(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, acc) = ins.floats("acc")?;
    let g = ins.shaped("g", shape)?;
    let keep = ins.shaped("keep", &[1])?[0];
    let sum = acc.iter().zip(g).map(|(acc, g)| if keep == 0.0 { *g } else { acc + g });
    Ok(vec![Tensor::f64(shape, sum.collect())])
}

pub(super) fn eval_ema(op: &Ema, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, ema) = ins.floats("ema")?;
    let p = ins.shaped("p", shape)?;
    let StepScale { ok, .. } = StepScale::take(ins)?;
    let t = ins.shaped("steps", &[1])?[0] + 1.0;
    let decay = f64::from(op.decay).min((1.0 + t) / (10.0 + t));
    let mean = ema.iter().zip(p).map(|(ema, p)| if ok { decay * ema + (1.0 - decay) * p } else { *ema });
    Ok(vec![Tensor::f64(shape, mean.collect())])
}

pub(super) fn eval_count_steps(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let steps = ins.shaped("steps", &[1])?[0];
    let StepScale { ok, .. } = StepScale::take(ins)?;
    let most = f64::from(CountSteps::MOST);
    Ok(vec![Tensor::f64(&[1], vec![if ok { (steps + 1.0).min(most) } else { steps }])])
}
