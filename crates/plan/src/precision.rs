//! Precisions and their policies. Invariant: what a precision means is stated only in the table of
//! [`Precision::policy`]; everything else reads the fields of the policy.

use plimsoll_graph::DType;
use plimsoll_graph::ops::OperandFormat;
use serde::{Deserialize, Serialize};

/// Name of a precision in configurations, flags and reports; [`PrecisionPolicy`] says what it means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE binary32 everywhere.
    #[default]
    F32,
    /// IEEE binary32, with the operands of linears and of their gradients rounded to TF32 (10 bits of mantissa).
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    Fp16,
    /// e4m3 in the linears of encoder layers, bfloat16 elsewhere; for inference.
    Fp8,
    /// 8-bit integers in the linears of encoder layers, bfloat16 elsewhere; for inference.
    Int8,
}

/// Number formats of a precision. Norms, softmax, means and losses are computed in f32 under every policy
/// ([`PrecisionClass`](plimsoll_graph::PrecisionClass)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrecisionPolicy {
    /// Element type of weights and activations that are not quantized.
    pub storage: DType,
    /// Format in which linears multiply. Quantized formats are for the linears of layers alone.
    pub forward: OperandFormat,
    /// Format in which the gradients of linears multiply; `None` if the precision is for inference only.
    pub backward: Option<OperandFormat>,
    /// Element type in which the gradients of micro-batches are summed.
    pub sums: DType,
    /// Element type of the copies of narrower parameters that the optimizer updates; `None` if it updates the
    /// parameters themselves.
    pub masters: Option<DType>,
    /// Whether training multiplies the loss by a scale that follows overflows, because small gradients are zero in
    /// `storage`.
    pub scales_loss: bool,
}

impl PrecisionPolicy {
    const F32: Self = Self {
        storage: DType::F32,
        forward: OperandFormat::Stored,
        backward: Some(OperandFormat::Stored),
        sums: DType::F32,
        masters: None,
        scales_loss: false,
    };
    const BF16: Self = Self { storage: DType::Bf16, masters: Some(DType::F32), ..Self::F32 };
}

impl Precision {
    /// All precisions.
    pub const ALL: [Self; 6] = [Self::F32, Self::Tf32, Self::Bf16, Self::Fp16, Self::Fp8, Self::Int8];

    /// The number formats of this precision.
    pub const fn policy(self) -> PrecisionPolicy {
        use OperandFormat::{E4m3, Int8, Tf32};
        const F32: PrecisionPolicy = PrecisionPolicy::F32;
        const BF16: PrecisionPolicy = PrecisionPolicy::BF16;
        match self {
            Self::F32 => F32,
            Self::Tf32 => PrecisionPolicy { forward: Tf32, backward: Some(Tf32), ..F32 },
            Self::Bf16 => BF16,
            Self::Fp16 => PrecisionPolicy { storage: DType::F16, scales_loss: true, ..BF16 },
            Self::Fp8 => PrecisionPolicy { forward: E4m3, backward: None, masters: None, ..BF16 },
            Self::Int8 => PrecisionPolicy { forward: Int8, backward: None, masters: None, ..BF16 },
        }
    }

    /// Name in configurations and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }

    /// The precision with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|precision| precision.name() == name)
    }

    /// The precisions in which models are trained.
    pub fn trained() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|precision| precision.policy().backward.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_consistent() {
        for precision in Precision::ALL {
            let policy = precision.policy();
            let PrecisionPolicy { storage, forward, backward, sums, masters, scales_loss } = policy;
            assert_eq!(sums, DType::F32, "{precision:?}");
            // Operands are what is stored, or rounded or quantized from it.
            let rounded = forward.element().filter(|dtype| !dtype.is_scaled());
            assert!(rounded.is_none_or(|dtype| dtype == storage), "{precision:?}");
            if forward.quantized().is_some() {
                assert_eq!((storage, backward), (DType::Bf16, None), "{precision:?}");
            }
            let narrow_and_trained = storage.size() == 2 && backward.is_some();
            assert_eq!(masters, narrow_and_trained.then_some(DType::F32), "{precision:?}");
            assert_eq!(scales_loss, storage == DType::F16, "{precision:?}");
        }
    }

    #[test]
    fn names_tell_precisions_apart() {
        for precision in Precision::ALL {
            assert_eq!(Precision::named(precision.name()), Some(precision));
            let name = serde_json::to_value(precision).expect("a name");
            assert_eq!(name, precision.name());
        }
        assert_eq!(Precision::named("auto"), None);
        let trained: Vec<&str> = Precision::trained().map(Precision::name).collect();
        assert_eq!(trained, ["f32", "tf32", "bf16", "fp16"]);
    }
}
