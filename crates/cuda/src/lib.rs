//! The CUDA backend of Plimsoll, for NVIDIA GPUs of compute capability 8.0 and higher. Building the crate needs no CUDA
//! toolkit: the driver, NVRTC and cuBLASLt are loaded at run time, and kernels are compiled for the GPU on first use.
//!
//! Invariant of the crate: a plan is executed exactly as on the CPU. All addresses are computed before the arena is
//! allocated, and the bits of a sequence's result do not depend on the other sequences in its batch.

mod api;
mod arena;
mod capability;
mod compile;
mod context;
mod device;
mod error;
mod event;
mod gemm;
mod graphs;
mod kernel;
mod launch;
mod library;
mod loaded_kernels;
mod machine;
pub mod nvml;
mod row_kernels;
mod staging;
mod tensor_map;
mod trace;

pub use context::{Card, cards};
pub use device::{CudaDevice, Options};
pub use error::CudaError;
pub use library::{FoundLibrary, Libraries};
pub use machine::CudaMachine;

/// Internals that the tests and measurements of this crate use. No part of the public interface.
#[doc(hidden)]
pub mod internals {
    pub use crate::compile::{Compiler, Resources};
    pub use crate::gemm::GemmCandidate;
    pub use crate::kernel::{Kernel, KernelFile};
    pub use crate::launch::every_kernel;
}
