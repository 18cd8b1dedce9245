//! The table of the CPU's kernels: what `launch` runs, with the scratch that each takes. Invariant: the target file
//! `cpu` states the same rows; an executor refuses where they differ.

use super::{attention, cross_entropy, gemm, product, route, router_loss};
use crate::device::Launch;
use graph::{DType, Layout};
use plan::{KernelRow, Workspace};

/// (op, kernel). A linear has two: weights in panels, packed when they are loaded, and rows that training changes.
const KERNELS: &[(&str, &str)] = &[
    ("accumulate", "accumulate_f32"),
    ("adafactor", "adafactor_f32"),
    ("adamw", "adamw_f32"),
    ("adamw_8bit", "adamw_8bit_f32"),
    ("add", "add_f32"),
    ("attention", "flash_f32"),
    ("attention_grad", "flash_grad_f32"),
    ("batch_norm", "batch_norm_f32"),
    ("batch_norm_grad", "batch_norm_grad_f32"),
    ("batch_norm_train", "batch_norm_train_f32"),
    ("batch_norm_train_grad", "batch_norm_train_grad_f32"),
    ("cast", "cast"),
    ("combine", "combine_f32"),
    ("combine_grad", "combine_grad_f32"),
    ("concat", "copy_f32"),
    ("concat_grad", "concat_grad_f32"),
    ("dispatch", "dispatch_f32"),
    ("dispatch_grad", "dispatch_grad_f32"),
    ("dropout", "dropout_f32"),
    ("embed", "gather_f32"),
    ("embed_grad", "embed_grad_f32"),
    ("gelu", "gelu_erf_f32"),
    ("gelu_grad", "gelu_grad_f32"),
    ("glu", "geglu_f32"),
    ("glu_grad", "glu_grad_f32"),
    ("grad_scale", "grad_scale_f32"),
    ("grouped_linear", "grouped_linear_f32"),
    ("grouped_linear_input_grad", "grouped_linear_input_grad_f32"),
    ("grouped_linear_weight_grad", "grouped_linear_weight_grad_f32"),
    ("layer_norm", "layer_norm_f32"),
    ("layer_norm_grad", "layer_norm_grad_f32"),
    ("linear", "gemm_f32"),
    ("linear", "product_f32"),
    ("linear_cross_entropy", "linear_cross_entropy_f32"),
    ("linear_cross_entropy_grad", "linear_cross_entropy_grad_f32"),
    ("linear_input_grad", "linear_input_grad_f32"),
    ("linear_weight_grad", "linear_weight_grad_f32"),
    ("relu", "relu_f32"),
    ("relu_grad", "relu_grad_f32"),
    ("rms_norm", "rms_norm_f32"),
    ("rms_norm_grad", "rms_norm_grad_f32"),
    ("rotary_table", "rotary_table_f32"),
    ("route", "route_f32"),
    ("route_grad", "route_grad_f32"),
    ("router_loss", "router_loss_f32"),
    ("router_loss_grad", "router_loss_grad_f32"),
    ("scale", "scale_f32"),
    ("segment_mean", "segment_mean_f32"),
    ("segment_mean_grad", "segment_mean_grad_f32"),
    ("select_rows", "gather_f32"),
    ("select_rows_grad", "select_rows_grad_f32"),
    ("sgd", "sgd_f32"),
    ("softmax", "softmax_f32"),
    ("softmax_grad", "softmax_grad_f32"),
];

/// The rows of every kernel.
pub(super) fn rows() -> Vec<KernelRow> {
    KERNELS.iter().map(|&(op, kernel)| row(op, kernel)).collect()
}

fn row(op: &str, kernel: &str) -> KernelRow {
    let (weights, workspace) = match kernel {
        "gemm_f32" => (Layout::Panels { width: gemm::PANEL as u32 }, gemm::WORKSPACE),
        "product_f32"
        | "linear_input_grad_f32"
        | "linear_weight_grad_f32"
        | "grouped_linear_f32"
        | "grouped_linear_input_grad_f32"
        | "grouped_linear_weight_grad_f32" => (Layout::RowMajor, product::WORKSPACE),
        "linear_cross_entropy_f32" | "linear_cross_entropy_grad_f32" => {
            (Layout::RowMajor, cross_entropy::WORKSPACE)
        }
        "flash_f32" => (Layout::RowMajor, attention::WORKSPACE),
        "flash_grad_f32" => (Layout::RowMajor, attention::GRAD_WORKSPACE),
        "route_f32" => (Layout::RowMajor, route::WORKSPACE),
        "router_loss_f32" => (Layout::RowMajor, router_loss::WORKSPACE),
        "router_loss_grad_f32" => (Layout::RowMajor, router_loss::GRAD_WORKSPACE),
        _ => (Layout::RowMajor, Workspace::default()),
    };
    KernelRow {
        op: op.to_owned(),
        dtypes: vec![DType::F32, DType::Bf16, DType::F16],
        kernel: kernel.to_owned(),
        weights,
        workspace,
        widen: !NATIVE.contains(&op),
    }
}

/// Ops whose kernels take operands of 16 bits as they are. What ends a step reads gradients so: an f32 copy of all of
/// them would cost what they save.
const NATIVE: &[&str] = &["accumulate", "adafactor", "adamw", "adamw_8bit", "cast", "grad_scale", "sgd"];

/// Whether the kernel of a launch works on f32 copies of operands of 16 bits.
pub(super) fn widens(launch: &Launch<'_>) -> bool {
    !NATIVE.contains(&launch.op.name())
}
