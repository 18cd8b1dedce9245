//! Errors of the CUDA backend. Invariant: the error for a missing library names the paths tried and a remedy.

use plimsoll_exec::DeviceError;
use std::fmt;

/// Display name of the driver library in messages.
pub(crate) const DRIVER_NAME: &str = "the NVIDIA driver (libcuda)";

/// The reason why a CUDA device cannot be opened or stopped working.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CudaError {
    /// A library was not found, or lacks a function that is needed.
    Library {
        /// Display name of the library.
        name: &'static str,
        /// The error of each attempt to load the library.
        tried: Vec<String>,
        /// Instruction that provides the library.
        remedy: &'static str,
    },
    /// No CUDA device has the requested ordinal.
    NoDevice {
        /// The requested ordinal.
        ordinal: usize,
        /// Number of devices that the driver reports.
        found: usize,
    },
    /// The GPU's compute capability is below 8.0, the lowest that the kernels support.
    TooOld {
        /// Name of the GPU.
        card: String,
        /// Compute capability (major, minor) of the GPU.
        capability: (u32, u32),
    },
    /// A call into a library failed.
    Call {
        /// Name of the function or kernel.
        function: &'static str,
        /// Status code that the function returned.
        code: i32,
        /// The library's description of the status code.
        message: String,
    },
    /// NVRTC rejected a kernel; a bug in this crate.
    Compile {
        /// The kernel's entry, file and constants.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// A launch uses a kernel or matmul that was not prepared; a bug in this workspace.
    Unprepared {
        /// Description of the kernel or matmul.
        what: String,
    },
    /// A kernel found invalid input data, such as a token id out of range.
    Data {
        /// Description of the invalid data.
        what: &'static str,
    },
}

impl CudaError {
    /// Whether this machine has no NVIDIA GPU or driver at all, as opposed to a GPU that cannot be used.
    pub fn is_absent(&self) -> bool {
        match self {
            Self::Library { name, tried, .. } => {
                *name == DRIVER_NAME && !tried.iter().any(|t| t.starts_with("it has"))
            }
            Self::NoDevice { found, .. } => *found == 0,
            // 100 is `CUDA_ERROR_NO_DEVICE` (cuda.h).
            Self::Call { function, code, .. } => *function == "cuInit" && *code == 100,
            Self::TooOld { .. } | Self::Compile { .. } | Self::Unprepared { .. } | Self::Data { .. } => false,
        }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY` (cuda.h).
pub(crate) const OUT_OF_MEMORY: i32 = 2;

impl CudaError {
    /// Whether a call failed because the GPU has too little memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            // CUBLAS_STATUS_ALLOC_FAILED is 3. Codes of NVRTC and NVML mean something else.
            Self::Call { function, code, .. } if function.starts_with("cublas") => *code == 3,
            Self::Call { function, code, .. } => {
                *code == OUT_OF_MEMORY && !function.starts_with("nvrtc") && !function.starts_with("nvml")
            }
            Self::Library { .. }
            | Self::NoDevice { .. }
            | Self::TooOld { .. }
            | Self::Compile { .. }
            | Self::Unprepared { .. }
            | Self::Data { .. } => false,
        }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { name, tried, remedy } => {
                write!(f, "{name} was not found; {remedy}. Tried: {}", tried.join("; "))
            }
            Self::NoDevice { ordinal, found } => {
                write!(f, "there is no CUDA device {ordinal}; the driver shows {found}")
            }
            Self::TooOld { card, capability: (major, minor) } => {
                write!(
                    f,
                    "{card} has compute capability {major}.{minor}; 8.0 or later is needed (Ampere and newer)"
                )
            }
            Self::Call { function, code, message } => write!(f, "{function} failed with {code}: {message}"),
            Self::Compile { kernel, log } => write!(f, "the kernel {kernel} does not compile: {log}"),
            Self::Unprepared { what } => write!(f, "{what} was not prepared before it was called"),
            Self::Data { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for CudaError {}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        if error.is_out_of_memory() {
            return Self::Exhausted { source: Box::new(error) };
        }
        Self::Machine { source: Box::new(error) }
    }
}
