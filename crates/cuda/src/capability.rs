//! Compute capabilities at which the kernels that a GPU can run change.

use plimsoll_plan::Capability;

/// The lowest supported compute capability, (major, minor).
pub(crate) const OLDEST: (u32, u32) = (8, 0);

/// Lowest compute capability with e4m3 matrix multiplication.
pub(crate) const FP8: (u32, u32) = (Capability::FP8.0, Capability::FP8.1);

/// The only compute capability with wgmma (warpgroup matrix multiplication) instructions.
pub(crate) const HOPPER: (u32, u32) = (9, 0);
