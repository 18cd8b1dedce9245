//! Plimsoll on NVIDIA GPUs of compute capability 8.0 and up. Nothing of CUDA is needed to build it: the driver, NVRTC
//! and cuBLASLt are found at run time, and kernels are compiled for the card when they are first used.
//!
//! Invariant of the crate: a plan is followed as on the CPU. Every address was computed before the arena existed, and
//! the bits of a sequence do not depend on its neighbours.

mod api;
mod arena;
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
mod machine;
pub mod nvml;
mod staging;
mod tensor_map;
mod trace;

pub use compile::{Compiler, Resources};
pub use context::{Card, cards};
pub use device::{CudaDevice, Options};
pub use error::CudaError;
pub use gemm::Candidate;
pub use kernel::{File, Kernel, every_kernel};
pub use library::{Found, Libraries};
pub use machine::CudaMachine;
