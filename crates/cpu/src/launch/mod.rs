//! Launch functions: convert a launch's operands to kernel arguments. One file per family of ops. Invariant: nothing
//! is computed here.

pub(super) mod attention;
pub(super) mod backward;
pub(super) mod forward;
pub(super) mod linear;
pub(super) mod matmul;
pub(super) mod moe;
pub(super) mod operands;
pub(super) mod optimizer;
pub(super) mod widening;

use plimsoll_exec::DeviceError;

/// Result of a launch.
pub(super) type Launched = Result<(), DeviceError>;
