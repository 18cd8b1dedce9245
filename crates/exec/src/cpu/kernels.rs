//! The table of the CPU's kernels: what `launch` runs, with the scratch that each takes. Invariant: the target file
//! `cpu` states the same rows; an executor refuses where they differ, and a launch runs as its row says.

use super::{
    attention, cross_entropy, gemm, gemm_bf16, gemm_int8, mlp_bf16, product, quantize, route, router_loss,
};
use crate::device::Launch;
use graph::{DType, Layout};
use plan::{KernelRow, Workspace};

use Takes::{Native, Widened, WidenedF16};

/// Which element types the floating-point inputs of a kernel may have, and how those of 16 bits are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// All, those of 16 bits through f32 copies of every operand.
    Widened,
    /// The same but for bf16, for which the op has a further row.
    WidenedF16,
    /// f32 alone, as weights in panels are.
    F32,
    /// All as they lie. What ends a step reads gradients so: an f32 copy of all of them would cost what they save.
    Native,
    /// bf16 as it lies, and nothing else.
    Bf16Alone,
    /// bf16 as it lies, beside parameters of norms, tables and statistics, which stay f32.
    Bf16,
    /// Integers with their scales, beside bf16.
    Int8,
}

/// (op, kernel, element types), the preferred kernel first. Weights of linears are packed when they are loaded, or
/// rows that training changes.
const KERNELS: &[(&str, &str, Takes)] = &[
    ("accumulate", "accumulate_f32", Native),
    ("adafactor", "adafactor_f32", Native),
    ("adamw", "adamw_f32", Native),
    ("adamw_8bit", "adamw_8bit_f32", Native),
    ("add", "add_f32", WidenedF16),
    ("add", "add_bf16", Takes::Bf16),
    ("attention", "flash_f32", WidenedF16),
    ("attention", "flash_bf16", Takes::Bf16),
    ("attention_grad", "flash_grad_f32", Widened),
    ("batch_norm", "batch_norm_f32", Widened),
    ("batch_norm_grad", "batch_norm_grad_f32", Widened),
    ("batch_norm_train", "batch_norm_train_f32", Widened),
    ("batch_norm_train_grad", "batch_norm_train_grad_f32", Widened),
    ("cast", "cast", Native),
    ("combine", "combine_f32", Widened),
    ("combine_grad", "combine_grad_f32", Widened),
    ("concat", "copy_f32", WidenedF16),
    ("concat", "copy_bf16", Takes::Bf16),
    ("concat_grad", "concat_grad_f32", Widened),
    ("dispatch", "dispatch_f32", Widened),
    ("dispatch_grad", "dispatch_grad_f32", Widened),
    ("dropout", "dropout_f32", Widened),
    ("embed", "gather_f32", WidenedF16),
    ("embed", "gather_bf16", Takes::Bf16),
    ("embed_grad", "embed_grad_f32", Widened),
    ("gelu", "gelu_erf_f32", WidenedF16),
    ("gelu", "gelu_erf_bf16", Takes::Bf16),
    ("gelu_grad", "gelu_grad_f32", Widened),
    ("glu", "geglu_f32", WidenedF16),
    ("glu", "geglu_bf16", Takes::Bf16),
    ("glu_grad", "glu_grad_f32", Widened),
    ("grad_scale", "grad_scale_f32", Native),
    ("grouped_linear", "grouped_linear_f32", Widened),
    ("grouped_linear_input_grad", "grouped_linear_input_grad_f32", Widened),
    ("grouped_linear_weight_grad", "grouped_linear_weight_grad_f32", Widened),
    ("layer_norm", "layer_norm_f32", WidenedF16),
    ("layer_norm", "layer_norm_bf16", Takes::Bf16),
    ("layer_norm_grad", "layer_norm_grad_f32", Widened),
    ("linear", "gemm_f32", Takes::F32),
    ("linear", "gemm_bf16", Takes::Bf16Alone),
    ("linear", "gemm_int8", Takes::Int8),
    ("linear", "product_f32", Widened),
    ("linear_cross_entropy", "linear_cross_entropy_f32", Widened),
    ("linear_cross_entropy_grad", "linear_cross_entropy_grad_f32", Widened),
    ("linear_input_grad", "linear_input_grad_f32", Widened),
    ("linear_weight_grad", "linear_weight_grad_f32", Widened),
    ("mlp", "mlp_bf16", Takes::Bf16),
    ("quantize", "quantize_f32", WidenedF16),
    ("quantize", "quantize_bf16", Takes::Bf16),
    ("relu", "relu_f32", WidenedF16),
    ("relu", "relu_bf16", Takes::Bf16),
    ("relu_grad", "relu_grad_f32", Widened),
    ("rms_norm", "rms_norm_f32", WidenedF16),
    ("rms_norm", "rms_norm_bf16", Takes::Bf16),
    ("rms_norm_grad", "rms_norm_grad_f32", Widened),
    ("rotary_table", "rotary_table_f32", Widened),
    ("route", "route_f32", Widened),
    ("route_grad", "route_grad_f32", Widened),
    ("router_loss", "router_loss_f32", Widened),
    ("router_loss_grad", "router_loss_grad_f32", Widened),
    ("scale", "scale_f32", WidenedF16),
    ("scale", "scale_bf16", Takes::Bf16),
    ("segment_mean", "segment_mean_f32", WidenedF16),
    ("segment_mean", "segment_mean_bf16", Takes::Bf16),
    ("segment_mean_grad", "segment_mean_grad_f32", Widened),
    ("select_rows", "gather_f32", WidenedF16),
    ("select_rows", "gather_bf16", Takes::Bf16),
    ("select_rows_grad", "select_rows_grad_f32", Widened),
    ("sgd", "sgd_f32", Native),
    ("softmax", "softmax_f32", Widened),
    ("softmax_grad", "softmax_grad_f32", Widened),
];

impl Takes {
    fn dtypes(self) -> &'static [DType] {
        match self {
            Widened | Native => &[DType::F32, DType::Bf16, DType::F16],
            WidenedF16 => &[DType::F32, DType::F16],
            Self::F32 => &[DType::F32],
            Self::Bf16Alone => &[DType::Bf16],
            Self::Bf16 => &[DType::Bf16, DType::F32],
            Self::Int8 => &[DType::I8, DType::Bf16],
        }
    }

    fn widens(self) -> bool {
        match self {
            Widened | WidenedF16 => true,
            Native | Self::F32 | Self::Bf16Alone | Self::Bf16 | Self::Int8 => false,
        }
    }
}

/// The rows of every kernel.
pub(super) fn rows() -> Vec<KernelRow> {
    KERNELS.iter().map(|&(op, kernel, takes)| row(op, kernel, takes)).collect()
}

fn row(op: &str, kernel: &str, takes: Takes) -> KernelRow {
    let (weights, workspace) = needs(kernel);
    KernelRow {
        op: op.to_owned(),
        dtypes: takes.dtypes().to_vec(),
        kernel: kernel.to_owned(),
        weights,
        workspace,
        widen: takes.widens(),
        tf32: false,
    }
}

/// How a kernel wants its weights, and its scratch.
fn needs(kernel: &str) -> (Layout, Workspace) {
    match kernel {
        "gemm_f32" => (Layout::Panels { width: gemm::PANEL as u32 }, gemm::WORKSPACE),
        "gemm_bf16" => (Layout::Tiles, gemm_bf16::WORKSPACE),
        "mlp_bf16" => (Layout::Tiles, mlp_bf16::WORKSPACE),
        "gemm_int8" => (Layout::ScaledTiles, gemm_int8::WORKSPACE),
        "quantize_f32" | "quantize_bf16" => (Layout::RowMajor, quantize::WORKSPACE),
        "product_f32"
        | "linear_input_grad_f32"
        | "linear_weight_grad_f32"
        | "grouped_linear_f32"
        | "grouped_linear_input_grad_f32"
        | "grouped_linear_weight_grad_f32" => (Layout::RowMajor, product::WORKSPACE),
        "linear_cross_entropy_f32" | "linear_cross_entropy_grad_f32" => {
            (Layout::RowMajor, cross_entropy::WORKSPACE)
        }
        "flash_f32" | "flash_bf16" => (Layout::RowMajor, attention::WORKSPACE),
        "flash_grad_f32" => (Layout::RowMajor, attention::GRAD_WORKSPACE),
        "route_f32" => (Layout::RowMajor, route::WORKSPACE),
        "router_loss_f32" => (Layout::RowMajor, router_loss::WORKSPACE),
        "router_loss_grad_f32" => (Layout::RowMajor, router_loss::GRAD_WORKSPACE),
        _ => (Layout::RowMajor, Workspace::default()),
    }
}

/// Whether the kernel of a launch works on f32 copies of operands of 16 bits: the row is the one that the plan chose.
pub(super) fn widens(launch: &Launch<'_>) -> bool {
    let dtypes = launch.ins.iter().map(|o| o.spec.dtype).filter(|dtype| dtype.is_float());
    let layout = launch.op.weights().first().map_or(Layout::RowMajor, |&i| launch.ins[i].spec.layout);
    let runs = |&&(op, kernel, takes): &&(&str, &str, Takes)| {
        op == launch.op.name()
            && dtypes.clone().all(|dtype| takes.dtypes().contains(&dtype))
            && needs(kernel).0 == layout
    };
    KERNELS.iter().find(runs).is_some_and(|(.., takes)| takes.widens())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::Target;

    #[test]
    fn the_target_states_the_same_rows() {
        let stated = Target::named("cpu").expect("a target").kernels;
        assert_eq!(stated.len(), rows().len());
        for row in rows() {
            let of_op = |rows: Vec<KernelRow>| -> Vec<KernelRow> {
                rows.into_iter().filter(|r| r.op == row.op).collect()
            };
            assert_eq!(of_op(stated.clone()), of_op(rows()));
        }
    }

    /// f32 in the list of a native row is for operands beside the first.
    #[test]
    fn no_two_rows_are_for_one_element_type() {
        for (i, a) in rows().iter().enumerate() {
            for b in rows().iter().skip(i + 1).filter(|b| a.op == b.op && a.weights == b.weights) {
                let both = |d: &&DType| b.dtypes.contains(d);
                let shared: Vec<&DType> = a.dtypes.iter().filter(both).collect();
                assert!(a.widen && !b.widen && shared == [&DType::F32], "{} and {}", a.kernel, b.kernel);
            }
        }
    }
}
