//! The closed set of ops. Invariant: whoever matches on [`Op`] names every variant, so that a new one is a
//! list of compile errors and nothing else.

use crate::ops::*;
use serde::{Deserialize, Serialize};

macro_rules! ops {
    ($($variant:ident $name:literal)*) => {
        /// A coarse transformer op; attributes and rules stand in its own file under `ops/`.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[allow(missing_docs, reason = "each is documented at the struct that it holds")]
        pub enum Op {
            $($variant($variant),)*
        }

        impl Op {
            /// The names of all ops, in the order of their declaration.
            pub const NAMES: &[&str] = &[$($name,)*];

            /// The name in text forms, kernel tables and ledgers.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
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
    Add "add"
    Attention "attention"
    AttentionGrad "attention_grad"
    BatchNorm "batch_norm"
    Concat "concat"
    Embed "embed"
    Gelu "gelu"
    GeluGrad "gelu_grad"
    Glu "glu"
    LayerNorm "layer_norm"
    LayerNormGrad "layer_norm_grad"
    Linear "linear"
    LinearInputGrad "linear_input_grad"
    LinearWeightGrad "linear_weight_grad"
    Relu "relu"
    RotaryTable "rotary_table"
    SegmentMean "segment_mean"
    SelectRows "select_rows"
    Softmax "softmax"
}
