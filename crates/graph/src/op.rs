//! The closed set of ops. Invariant: a `match` on [`Op`] names every variant, so that a new op is a compile error at
//! each place that must decide about it. At present that is the reference evaluation in the crate `exec`; all other
//! code uses the op's rules ([`OpRules`]) or tests for single ops.

use crate::ops::*;
use serde::{Deserialize, Serialize};

macro_rules! ops {
    ($($variant:ident $name:literal)*) => {
        /// A coarse transformer op. Its attributes and rules are in a file of `ops/`.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[allow(missing_docs, reason = "each is documented at the struct that it holds")]
        pub enum Op {
            $($variant($variant),)*
        }

        /// An op without its attributes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "each is documented at the struct of its op")]
        pub enum OpKind {
            $($variant,)*
        }

        impl OpKind {
            /// The name in text forms, kernel tables and ledgers.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        $(impl<'a> TryFrom<&'a Op> for &'a $variant {
            type Error = &'a Op;

            fn try_from(op: &'a Op) -> Result<Self, &'a Op> {
                if let Op::$variant(op) = op { Ok(op) } else { Err(op) }
            }
        })*

        impl Op {
            /// The op without its attributes.
            pub fn kind(&self) -> OpKind {
                match self {
                    $(Self::$variant(_) => OpKind::$variant,)*
                }
            }

            /// The op called `name` with its attributes as JSON; `None` if no op has this name.
            pub(crate) fn from_parts(name: &str, attributes: serde_json::Value) -> Option<serde_json::Result<Self>> {
                match name {
                    $($name => Some(serde_json::from_value(attributes).map(Self::$variant)),)*
                    _ => None,
                }
            }

            /// The names of all ops, in the order of their declaration.
            pub const NAMES: &[&str] = &[$($name,)*];

            /// The name in text forms, kernel tables and ledgers.
            pub fn name(&self) -> &'static str {
                self.kind().name()
            }

            /// The rules of the op.
            pub fn rules(&self) -> &dyn OpRules {
                match self {
                    $(Self::$variant(op) => op,)*
                }
            }
        }
    };
}

ops! {
    Accumulate "accumulate"
    Adafactor "adafactor"
    AdamW "adamw"
    AdamW8bit "adamw_8bit"
    Add "add"
    Attention "attention"
    AttentionGrad "attention_grad"
    BatchNorm "batch_norm"
    BatchNormGrad "batch_norm_grad"
    BatchNormTrain "batch_norm_train"
    BatchNormTrainGrad "batch_norm_train_grad"
    Cast "cast"
    Combine "combine"
    CombineGrad "combine_grad"
    Concat "concat"
    ConcatGrad "concat_grad"
    CountSteps "count_steps"
    Dispatch "dispatch"
    DispatchGrad "dispatch_grad"
    Dropout "dropout"
    Ema "ema"
    Embed "embed"
    EmbedGrad "embed_grad"
    Gelu "gelu"
    GeluGrad "gelu_grad"
    Glu "glu"
    GluGrad "glu_grad"
    GradScale "grad_scale"
    GroupedLinear "grouped_linear"
    GroupedLinearInputGrad "grouped_linear_input_grad"
    GroupedLinearWeightGrad "grouped_linear_weight_grad"
    Join "join"
    KlDivergence "kl_divergence"
    KlDivergenceGrad "kl_divergence_grad"
    LayerNorm "layer_norm"
    LayerNormGrad "layer_norm_grad"
    Linear "linear"
    LinearCrossEntropy "linear_cross_entropy"
    LinearCrossEntropyGrad "linear_cross_entropy_grad"
    LinearInputGrad "linear_input_grad"
    LinearWeightGrad "linear_weight_grad"
    Move "move"
    Part "part"
    Quantize "quantize"
    Relu "relu"
    ReluGrad "relu_grad"
    RmsNorm "rms_norm"
    RmsNormGrad "rms_norm_grad"
    RotaryTable "rotary_table"
    Route "route"
    RouteGrad "route_grad"
    RouterLoss "router_loss"
    RouterLossGrad "router_loss_grad"
    Scale "scale"
    SegmentMean "segment_mean"
    SegmentMeanGrad "segment_mean_grad"
    SelectRows "select_rows"
    SelectRowsGrad "select_rows_grad"
    Sgd "sgd"
    Softmax "softmax"
    SoftmaxGrad "softmax_grad"
}
