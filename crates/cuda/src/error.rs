//! What can go wrong between us and a card. Invariant: a library that is missing is an error that says where it was
//! looked for and what brings it.

use exec::DeviceError;
use std::fmt;

/// Why there is no CUDA device, or why it stopped.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CudaError {
    /// A library was not found, or lacks a function.
    Library {
        /// Its name.
        name: &'static str,
        /// What was tried, and what came of it.
        tried: Vec<String>,
        /// What brings it.
        remedy: &'static str,
    },
    /// There is no card, or not this one.
    NoDevice {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The card is older than the kernels can be.
    TooOld {
        /// Its name.
        card: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// A call failed.
    Call {
        /// The function.
        function: &'static str,
        /// Its code.
        code: i32,
        /// What the library says about it.
        message: String,
    },
    /// A kernel does not compile: our bug.
    Compile {
        /// Its file and constants.
        kernel: String,
        /// What the compiler says.
        log: String,
    },
    /// What a step wants was not shown to the device before: our bug.
    Unprepared {
        /// The kernel or product.
        what: String,
    },
    /// A kernel met data that it refuses.
    Data {
        /// What it met.
        what: &'static str,
    },
}

impl CudaError {
    /// Whether this machine has no NVIDIA GPU at all, rather than one that cannot be used.
    pub fn is_absent(&self) -> bool {
        match self {
            Self::Library { name, tried, .. } => {
                *name == crate::library::DRIVER_NAME && !tried.iter().any(|t| t.starts_with("it has"))
            }
            Self::NoDevice { found, .. } => *found == 0,
            // CUDA's code for a driver without a device.
            Self::Call { function, code, .. } => *function == "cuInit" && *code == 100,
            Self::TooOld { .. } | Self::Compile { .. } | Self::Unprepared { .. } | Self::Data { .. } => false,
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
        Self::Machine { source: Box::new(error) }
    }
}
