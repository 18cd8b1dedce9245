//! Tests of rules that all ops share, on one valid set of inputs per op. Invariant: expected types are computed
//! independently of the op's own code.

use super::*;
use crate::Op;
use DType::{Bf16, F32, I32};
use Dim::{Fixed, Tokens};

const BOUNDS: Bounds = Bounds { tokens: 6, sequences: 2, longest: 4, packs: 1 };

fn spec(shape: &[Dim], dtype: DType) -> TensorSpec {
    TensorSpec::activation(shape, dtype)
}

/// An activation (T, 8) of element type `dtype`.
fn x(dtype: DType) -> TensorSpec {
    spec(&[Tokens(1), Fixed(8)], dtype)
}

fn vector(n: u64) -> TensorSpec {
    spec(&[Fixed(n)], F32)
}

fn infer(op: Op, ins: &[TensorSpec]) -> Result<Vec<TensorSpec>, RuleError> {
    op.rules().infer(&ins.iter().collect::<Vec<_>>(), &BOUNDS)
}

/// All ops that may overwrite an input, each with valid inputs.
fn in_place() -> Vec<(Op, Vec<TensorSpec>)> {
    let (w, row) = (spec(&[Fixed(8), Fixed(8)], F32), spec(&[Tokens(1)], F32));
    let choices = [spec(&[Tokens(1), Fixed(2)], F32), spec(&[Tokens(2)], I32), spec(&[Tokens(2)], I32)];
    let rows = spec(&[Tokens(2), Fixed(8)], Bf16);
    let wide = spec(&[Tokens(1), Fixed(16)], F32);
    let adamw = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let codes = spec(&[Fixed(8), Fixed(8)], DType::U8);
    let tail = |n| [vector(2), vector(n)];
    let linear = |bias| Op::Linear(Linear::new(bias, Epilogue::Residual));
    let norm = [x(F32), vector(8)];
    vec![
        (Op::Add(Add {}), vec![x(F32), x(F32)]),
        (linear(false), vec![x(F32), w.clone(), x(F32)]),
        (linear(true), vec![x(F32), w.clone(), vector(8), x(F32)]),
        (Op::Gelu(Gelu {}), vec![x(F32)]),
        (Op::GeluGrad(GeluGrad {}), vec![x(F32), x(F32)]),
        (Op::Relu(Relu {}), vec![x(F32)]),
        (Op::ReluGrad(ReluGrad {}), vec![x(F32), x(F32)]),
        (Op::Scale(Scale { factor: 2.0 }), vec![x(F32)]),
        (
            Op::Dropout(Dropout { p: 0.5, stream: 0 }),
            vec![x(F32), spec(&[Fixed(2)], I32), spec(&[Dim::Packs(1), Fixed(6)], I32)],
        ),
        (Op::Softmax(Softmax {}), vec![x(F32)]),
        (Op::SoftmaxGrad(SoftmaxGrad {}), vec![x(F32), x(F32)]),
        (Op::KlDivergenceGrad(KlDivergenceGrad {}), vec![vector(1), x(F32), x(F32)]),
        (Op::GluGrad(GluGrad { activation: Activation::Silu }), vec![x(F32), wide]),
        (Op::LayerNorm(LayerNorm { eps: 0.1 }), vec![x(F32), vector(8), vector(8)]),
        (Op::LayerNormGrad(LayerNormGrad {}), vec![x(F32), x(F32), row.clone(), row.clone(), vector(8)]),
        (
            Op::Quantize(Quantize { of: Quantized::LayerNorm(LayerNorm { eps: 0.1 }), to: DType::F8 }),
            vec![x(Bf16), vector(8), vector(8)],
        ),
        (Op::Quantize(Quantize { of: Quantized::Gelu(Gelu {}), to: DType::I8 }), vec![x(Bf16)]),
        (Op::RmsNorm(RmsNorm { eps: 0.1, heads: 1 }), norm.to_vec()),
        (Op::RmsNorm(RmsNorm { eps: 0.1, heads: 4 }), vec![x(F32), vector(2)]),
        (Op::RmsNormGrad(RmsNormGrad { heads: 1 }), vec![x(F32), x(F32), row, vector(8)]),
        (Op::BatchNorm(BatchNorm { eps: 0.1 }), [&norm[..], &vec![vector(8); 3]].concat()),
        (Op::CombineGrad(CombineGrad { top_k: 2 }), [&[x(Bf16), rows][..], &choices].concat()),
        (Op::Accumulate(Accumulate {}), vec![x(F32), x(Bf16), vector(1)]),
        (Op::CountSteps(CountSteps {}), vec![vector(1), vector(2)]),
        (Op::Ema(Ema { decay: 0.9 }), vec![w.clone(), w.clone(), vector(2), vector(1)]),
        (Op::AdamW(adamw), [&vec![w.clone(); 4][..], &tail(3)].concat()),
        (
            Op::AdamW8bit(AdamW8bit { adamw }),
            [&[w.clone(), w.clone(), codes.clone(), vector(1), codes, vector(1)][..], &tail(3)].concat(),
        ),
        (
            Op::Adafactor(Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.0 }),
            [&[w.clone(), w.clone(), vector(8), vector(8)][..], &tail(2)].concat(),
        ),
        (
            Op::Sgd(Sgd { momentum: 0.9, weight_decay: 0.0, nesterov: false }),
            [&vec![w; 3][..], &tail(1)].concat(),
        ),
    ]
}

/// An aliased output must have the type of the input: otherwise its elements would be at other addresses than
/// the elements of the input.
#[test]
fn an_output_takes_over_only_storage_of_its_own_type() {
    for (op, ins) in in_place() {
        let outs = infer(op, &ins).unwrap_or_else(|e| panic!("{op:?}: {e}"));
        let mut aliases = 0;
        for (k, out) in outs.iter().enumerate() {
            for &j in op.rules().alias(k) {
                aliases += 1;
                let same = (&out.shape, out.dtype) == (&ins[j].shape, ins[j].dtype);
                assert!(same, "{op:?}: output {k} is {out}, input {j} is {}", ins[j]);
            }
        }
        assert!(aliases > 0, "{op:?} aliases nothing");
    }
}

/// Elementwise operands of different types, or a gradient whose type differs from its value's, would round
/// implicitly; the rules reject both.
#[test]
fn what_meets_element_by_element_has_one_element_type() {
    let (row, choices) = (spec(&[Tokens(1)], F32), spec(&[Tokens(1), Fixed(2)], F32));
    let slots = spec(&[Tokens(2)], I32);
    let rows = spec(&[Tokens(2), Fixed(8)], F32);
    for (op, rest) in [
        (Op::Add(Add {}), vec![x(F32)]),
        (Op::GeluGrad(GeluGrad {}), vec![x(F32)]),
        (Op::ReluGrad(ReluGrad {}), vec![x(F32)]),
        (Op::SoftmaxGrad(SoftmaxGrad {}), vec![x(F32)]),
        (Op::KlDivergence(KlDivergence {}), vec![x(F32)]),
        (Op::GluGrad(GluGrad { activation: Activation::Gelu }), vec![spec(&[Tokens(1), Fixed(16)], F32)]),
        (Op::LayerNormGrad(LayerNormGrad {}), vec![x(F32), row.clone(), row.clone(), vector(8)]),
        (Op::RmsNormGrad(RmsNormGrad { heads: 1 }), vec![x(F32), row, vector(8)]),
        (Op::BatchNormGrad(BatchNormGrad { eps: 0.1 }), [&[x(F32)][..], &vec![vector(8); 3]].concat()),
        (Op::BatchNormTrainGrad(BatchNormTrainGrad {}), [&[x(F32)][..], &vec![vector(8); 3]].concat()),
        (Op::CombineGrad(CombineGrad { top_k: 2 }), vec![rows, choices, slots.clone(), slots]),
    ] {
        let with = |dtype| infer(op, &[&[x(dtype)][..], &rest].concat());
        assert!(with(F32).is_ok(), "{op:?}: {:?}", with(F32));
        let error = with(Bf16).expect_err(op.name()).to_string();
        assert!(error.contains("must be"), "{op:?}: {error}");
    }
}

#[test]
fn products_of_codes_give_bf16() {
    for (operands, other) in [(OperandFormat::E4m3, DType::I8), (OperandFormat::Int8, DType::F8)] {
        let to = operands.quantized().expect("quantized");
        let linear = Op::Linear(Linear { operands, ..Linear::new(false, Epilogue::None) });
        let w = |dtype| spec(&[Fixed(4), Fixed(8)], dtype);
        let quantised = infer(Op::Quantize(Quantize { of: Quantized::Rows, to }), &[x(Bf16)]).expect("rows");
        assert_eq!(quantised, [x(to)]);
        let y = infer(linear, &[quantised[0].clone(), w(to)]).expect("codes");
        assert_eq!(y, [spec(&[Tokens(1), Fixed(4)], Bf16)]);
        for (x, w) in [(x(Bf16), w(to)), (x(to), w(Bf16)), (x(to), w(other))] {
            let error = infer(linear, &[x, w]).expect_err("mixed").to_string();
            assert!(error.contains(to.name()), "{error}");
        }
        let grad =
            infer(Op::LinearInputGrad(LinearInputGrad { operands }), &[x(to), spec(&[Fixed(8), Fixed(4)], to)]);
        assert_eq!(grad.expect("quantized"), [spec(&[Tokens(1), Fixed(4)], Bf16)]);
        let stored = Op::Linear(Linear::new(false, Epilogue::None));
        let error = infer(stored, &[x(to), w(to)]).expect_err("quantized").to_string();
        assert!(error.contains("x must be floating point"), "{error}");
        let glu = Quantized::Glu(Glu { activation: Activation::Gelu });
        let outs = infer(Op::Quantize(Quantize { of: glu, to }), &[x(Bf16)]).expect("a gate");
        assert_eq!(outs, [spec(&[Tokens(1), Fixed(4)], to), spec(&[Tokens(1), Fixed(4)], Bf16)]);
    }
    let error = infer(Op::Quantize(Quantize { of: Quantized::Rows, to: DType::U8 }), &[x(Bf16)]);
    assert!(error.expect_err("no codes").to_string().contains("f8 or i8"));
}

/// TF32 rounds f32 operands and changes no type.
#[test]
fn operands_of_tf32_are_f32() {
    let operands = OperandFormat::Tf32;
    let linear = Op::Linear(Linear { operands, ..Linear::new(false, Epilogue::None) });
    let dx = Op::LinearInputGrad(LinearInputGrad { operands });
    let dw = Op::LinearWeightGrad(LinearWeightGrad { bias: false, operands });
    let w = |dtype| spec(&[Fixed(8), Fixed(8)], dtype);
    for (op, other) in [(linear, w(F32)), (dx, w(F32)), (dw, x(F32))] {
        assert_eq!(infer(op, &[x(F32), other.clone()]).expect("f32")[0].dtype, F32);
        let error = infer(op, &[x(Bf16), other]).expect_err("16 bits").to_string();
        assert!(error.contains("must be f32 for Tf32 operands"), "{error}");
    }
}

#[test]
fn experts_are_chosen_from_tokens() {
    let logits = |rows, experts| spec(&[rows, Fixed(experts)], F32);
    let route = |top_k| Op::Route(Route { experts: 4, top_k, renormalise: true, capacity: 0 });
    for (op, logits, says) in [
        (route(0), logits(Tokens(1), 4), "cannot choose 0 of 4"),
        (route(5), logits(Tokens(1), 4), "cannot choose 5 of 4"),
        (route(2), logits(Tokens(1), 5), "logits must be f32[T, 4]"),
        (route(2), logits(Tokens(2), 4), "logits must be f32[T, 4]"),
    ] {
        let error = infer(op, &[logits]).expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    }
    let slots = spec(&[Tokens(0)], I32);
    let error =
        infer(Op::Dispatch(Dispatch { top_k: 0 }), &[x(F32), slots.clone(), slots]).expect_err("no choice");
    assert!(error.to_string().contains("at least one expert"), "{error}");
}

#[test]
fn a_capacity_is_rounded_up() {
    let route = |capacity| Route { experts: 3, top_k: 2, renormalise: true, capacity };
    for (capacity, tokens, wanted) in
        [(0, 9, None), (1000, 9, Some(6)), (1001, 9, Some(7)), (1, 1, Some(1)), (1500, 0, Some(0))]
    {
        assert_eq!(route(capacity).limit(tokens), wanted);
    }
}
