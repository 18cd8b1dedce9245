//! The reference kernels: the numerical definition of every op. Plain loops, one file per op as in
//! `plimsoll_graph::ops`; all arithmetic is f64, weights are in C order. The kernels round nothing, except where an
//! op's definition says f32 (ESM's dropout scale, rotary angles); the [`ReferenceDevice`] rounds results to element
//! types.
//!
//! Invariant: invalid data gives a [`ReferenceError`], never a panic; the same input gives the same bits on every
//! machine, whatever else is in the batch.
#![forbid(unsafe_code)]

mod adamw_8bit;
mod add;
mod attention;
mod attention_grad;
mod batch_norm;
mod batch_norm_train;
mod concat;
mod cross_entropy;
mod device;
mod dispatch;
mod dropout;
mod embed;
mod error;
mod gelu;
mod glu;
mod grouped_linear;
pub mod half;
mod kl_divergence;
mod layer_norm;
mod layer_norm_grad;
mod linear;
mod linear_grad;
mod machine;
mod operands;
mod optimizer;
mod quantize;
mod relu;
mod rms_norm;
mod rotary_table;
mod route;
mod router_loss;
mod scale;
mod segment_mean;
mod select_rows;
mod softmax;
mod tensor;
#[cfg(test)]
mod testing;
mod view;

pub use device::{Moves, ReferenceDevice};
pub use error::ReferenceError;
pub(crate) use half::{BF16, F16};
pub use machine::ReferenceMachine;
pub use tensor::{Data, Tensor};

use operands::Operands;
use plimsoll_graph::Op;

/// Runs one op. `outs` gives the shapes of the requested outputs for this step; `None` for an output that `dce`
/// removed. Inputs are as in the op's documentation: floats (or i32, or quantized values, where it says so), in C
/// order. Results are f64 and not rounded, so central differences of them are accurate to about 1e-8.
///
/// In the results of `Attention`, its gradient, and `Embed` with token dropout, rows outside of all spans are zero.
///
/// # Errors
/// Inputs that do not fit the op or each other, an index or span out of range, and shapes in `outs` that the op does
/// not give.
pub fn eval(
    op: &Op,
    ins: &[&Tensor],
    outs: &[Option<Vec<usize>>],
) -> Result<Vec<Option<Tensor>>, ReferenceError> {
    let mut operands = Operands::new(ins)?;
    let results = match op {
        Op::Add(_) => add::eval(&mut operands),
        Op::Attention(op) => attention::eval(op, &mut operands),
        Op::AttentionGrad(op) => attention_grad::eval(op, &mut operands),
        Op::BatchNorm(op) => batch_norm::eval(op, &mut operands),
        Op::Concat(_) => concat::eval(&mut operands),
        // As a function, a move is the identity; devices do not launch it.
        Op::Move(_) => return keep(ins.iter().map(|x| (*x).clone()).collect(), outs),
        // Neither are views, of which a device sees the addresses alone.
        Op::Part(op) => return keep(vec![view::eval_part(op, ins)?], outs),
        Op::Join(_) => return keep(vec![view::eval_join(ins)?], outs),
        Op::Embed(op) => embed::eval(op, &mut operands),
        Op::Gelu(_) => gelu::eval(&mut operands),
        Op::GeluGrad(_) => gelu::eval_grad(&mut operands),
        Op::Glu(op) => glu::eval(op, &mut operands),
        Op::LayerNorm(op) => layer_norm::eval(op, &mut operands),
        Op::LayerNormGrad(_) => layer_norm_grad::eval(&mut operands),
        Op::Linear(op) => linear::eval(op, &mut operands),
        Op::LinearInputGrad(_) => linear_grad::eval_input(&mut operands),
        Op::LinearWeightGrad(op) => linear_grad::eval_weight(op, &mut operands),
        Op::Quantize(op) => quantize::eval(op, &mut operands),
        Op::Relu(_) => relu::eval(&mut operands),
        Op::RotaryTable(_) => rotary_table::eval(&mut operands, rows(outs)?),
        Op::SegmentMean(op) => segment_mean::eval(op, &mut operands),
        Op::SelectRows(_) => select_rows::eval(&mut operands),
        Op::Softmax(_) => softmax::eval(&mut operands),
        Op::BatchNormGrad(op) => batch_norm_train::eval_grad(op, &mut operands),
        Op::BatchNormTrain(op) => batch_norm_train::eval(op, &mut operands),
        Op::BatchNormTrainGrad(_) => batch_norm_train::eval_train_grad(&mut operands),
        Op::Cast(_) => scale::eval_cast(&mut operands),
        Op::ConcatGrad(op) => concat::eval_grad(op, &mut operands),
        Op::Dropout(op) => dropout::eval(op, &mut operands),
        Op::EmbedGrad(op) => embed::eval_grad(op, &mut operands),
        Op::GluGrad(op) => glu::eval_grad(op, &mut operands),
        Op::ReluGrad(_) => relu::eval_grad(&mut operands),
        Op::RmsNorm(op) => rms_norm::eval(op, &mut operands),
        Op::RmsNormGrad(op) => rms_norm::eval_grad(op, &mut operands),
        Op::Scale(op) => scale::eval(op, &mut operands),
        Op::SegmentMeanGrad(op) => segment_mean::eval_grad(op, &mut operands, rows(outs)?),
        Op::SelectRowsGrad(_) => select_rows::eval_grad(&mut operands, rows(outs)?),
        Op::SoftmaxGrad(_) => softmax::eval_grad(&mut operands),
        Op::Combine(op) => dispatch::eval_combine(op, &mut operands),
        Op::CombineGrad(op) => dispatch::eval_combine_grad(op, &mut operands),
        Op::Dispatch(op) => dispatch::eval(op, &mut operands),
        Op::DispatchGrad(op) => dispatch::eval_grad(op, &mut operands),
        Op::Route(op) => route::eval(op, &mut operands),
        Op::RouteGrad(op) => route::eval_grad(op, &mut operands),
        Op::RouterLoss(op) => router_loss::eval(op, &mut operands),
        Op::RouterLossGrad(op) => router_loss::eval_grad(op, &mut operands),
        Op::GroupedLinear(op) => grouped_linear::eval(op, &mut operands),
        Op::GroupedLinearInputGrad(op) => grouped_linear::eval_input_grad(op, &mut operands),
        Op::GroupedLinearWeightGrad(op) => grouped_linear::eval_weight_grad(op, &mut operands),
        Op::LinearCrossEntropy(op) => cross_entropy::eval(op, &mut operands),
        Op::LinearCrossEntropyGrad(op) => cross_entropy::eval_grad(op, &mut operands),
        Op::KlDivergence(_) => kl_divergence::eval(&mut operands),
        Op::KlDivergenceGrad(_) => kl_divergence::eval_grad(&mut operands),
        Op::Accumulate(_) => optimizer::eval_accumulate(&mut operands),
        Op::Adafactor(op) => optimizer::eval_adafactor(op, &mut operands),
        Op::AdamW(op) => optimizer::eval_adamw(op, &mut operands),
        Op::AdamW8bit(op) => adamw_8bit::eval(op, &mut operands),
        Op::CountSteps(_) => optimizer::eval_count_steps(&mut operands),
        Op::Ema(op) => optimizer::eval_ema(op, &mut operands),
        Op::GradScale(op) => optimizer::eval_grad_scale(op, &mut operands),
        Op::Sgd(op) => optimizer::eval_sgd(op, &mut operands),
    }?;
    operands.end()?;
    keep(results, outs)
}

/// Number of rows of the first requested output, for ops whose inputs do not determine it (positions, tokens).
fn rows(outs: &[Option<Vec<usize>>]) -> Result<usize, ReferenceError> {
    let Some(shape) = outs.iter().flatten().next() else { return Ok(0) };
    match shape[..] {
        [rows, _] => Ok(rows),
        _ => Err(ReferenceError::Rank { what: "an output", wanted: 2, found: shape.clone() }),
    }
}

/// Keeps the requested `results` and checks their shapes.
fn keep(results: Vec<Tensor>, outs: &[Option<Vec<usize>>]) -> Result<Vec<Option<Tensor>>, ReferenceError> {
    if results.len() != outs.len() {
        return Err(ReferenceError::Outputs { wanted: outs.len(), found: results.len() });
    }
    let mut kept = Vec::with_capacity(outs.len());
    for (result, out) in results.into_iter().zip(outs) {
        if let Some(shape) = out
            && *shape != result.shape
        {
            let wanted = shape.clone();
            let found = result.shape;
            return Err(ReferenceError::Shape { what: "an output", wanted, found });
        }
        kept.push(out.is_some().then_some(result));
    }
    Ok(kept)
}

/// Dot product `sum_i a[i] b[i]`, over the shorter length.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::ops::*;

    fn f32s(shape: &[usize]) -> Tensor {
        Tensor::f32(shape, vec![1.0; shape.iter().product()])
    }

    fn refused(op: Op, ins: &[Tensor], outs: &[Option<Vec<usize>>], error: ReferenceError) {
        let ins: Vec<&Tensor> = ins.iter().collect();
        assert_eq!(eval(&op, &ins, outs), Err(error), "{op:?}");
    }

    #[test]
    fn bad_operands_are_refused() {
        let one = |shape: &[usize]| vec![Some(shape.to_vec())];
        let add = Op::Add(Add {});
        let softmax = Op::Softmax(Softmax {});
        let linear = |bias| Op::Linear(Linear::new(bias, Epilogue::None));
        let shape = |what, wanted: &[usize], found: &[usize]| ReferenceError::Shape {
            what,
            wanted: wanted.to_vec(),
            found: found.to_vec(),
        };
        let cases = [
            (add, vec![f32s(&[2])], one(&[2]), ReferenceError::Inputs { wanted: 2, found: 1 }),
            (add, vec![f32s(&[2]), f32s(&[3])], one(&[2]), shape("b", &[2], &[3])),
            (softmax, vec![f32s(&[2, 2]); 2], one(&[2, 2]), ReferenceError::Inputs { wanted: 1, found: 2 }),
            (
                softmax,
                vec![f32s(&[4])],
                one(&[4]),
                ReferenceError::Rank { what: "x", wanted: 2, found: vec![4] },
            ),
            (
                softmax,
                vec![Tensor::i32(&[1, 1], vec![0])],
                one(&[1, 1]),
                ReferenceError::DType { what: "x", wanted: "floats" },
            ),
            (
                softmax,
                vec![Tensor::f32(&[2, 3], vec![0.0; 5])],
                one(&[2, 3]),
                ReferenceError::Length { input: 0, wanted: 6, found: 5 },
            ),
            (softmax, vec![f32s(&[2, 3])], one(&[2, 4]), shape("an output", &[2, 4], &[2, 3])),
            (softmax, vec![f32s(&[2, 3])], vec![], ReferenceError::Outputs { wanted: 0, found: 1 }),
            (linear(false), vec![f32s(&[2, 3]), f32s(&[4, 5])], one(&[2, 4]), shape("w", &[4, 3], &[4, 5])),
            (
                linear(true),
                vec![f32s(&[2, 3]), f32s(&[4, 3]), f32s(&[3])],
                one(&[2, 4]),
                shape("b", &[4], &[3]),
            ),
        ];
        for (op, ins, outs, error) in cases {
            refused(op, &ins, &outs, error);
        }
    }

    #[test]
    fn unwanted_outputs_are_dropped() {
        let ins = [f32s(&[2, 4]), f32s(&[4]), f32s(&[4])];
        let op = Op::LayerNorm(LayerNorm { eps: 1e-5 });
        let got = eval(&op, &ins.each_ref(), &[Some(vec![2, 4]), None, Some(vec![2])]).unwrap();
        let kept: Vec<Option<&[usize]>> = got.iter().map(|t| t.as_ref().map(|t| &t.shape[..])).collect();
        assert_eq!(kept, [Some(&[2, 4][..]), None, Some(&[2][..])]);
    }
}
