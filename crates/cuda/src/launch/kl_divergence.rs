//! Kullback-Leibler divergence between the softmaxes of rows of logits, and its gradient. Invariant: a row is computed by
//! one warp, whatever else is in the batch.

use super::OpLaunch;
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;

/// Threads of a block, and its warps; must agree with the kernels.
const THREADS: u32 = 256;
const WARPS: u64 = THREADS as u64 / 32;

pub(super) fn kl_divergence(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.input(1)?;
    let loss = call.output(0)?;
    let args = [x.pointer(), y.pointer(), loss.pointer(), Arg::long(x.rows), Arg::int(x.columns)];
    call.kernel(&kernel("kl_divergence", x.dtype), LaunchShape::of(1, THREADS), &args)
}

pub(super) fn kl_divergence_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let dloss = call.input(0)?;
    let x = call.input(1)?;
    let y = call.input(2)?;
    let dx = call.output(0)?;
    let args =
        [dloss.pointer(), x.pointer(), y.pointer(), dx.pointer(), Arg::long(dx.rows), Arg::int(dx.columns)];
    call.kernel(
        &kernel("kl_divergence_grad", dx.dtype),
        LaunchShape::of(dx.rows.div_ceil(WARPS), THREADS),
        &args,
    )
}

fn kernel(entry: &'static str, dtype: DType) -> Kernel {
    Kernel::new(KernelFile::KlDivergence, entry, dtype)
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let entries = ["kl_divergence", "kl_divergence_grad"].into_iter();
    entries.flat_map(|entry| [DType::F32, DType::Bf16, DType::F16].map(|dtype| kernel(entry, dtype))).collect()
}
