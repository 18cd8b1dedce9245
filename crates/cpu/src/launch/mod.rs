//! Launches: operands to kernel arguments, a file for each family of ops. Invariant: nothing is computed here.

pub(super) mod attention;
pub(super) mod backward;
pub(super) mod forward;
pub(super) mod linear;
pub(super) mod mlp;
pub(super) mod moe;
pub(super) mod optimizer;
pub(super) mod product;

use exec::DeviceError;

/// Whether a launch could run.
pub(super) type Launched = Result<(), DeviceError>;
