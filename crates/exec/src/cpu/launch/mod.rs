//! Launches of the ops of training: operands to kernel arguments, a file for each family. Invariant: nothing is
//! computed here.

pub(super) mod attention;
pub(super) mod backward;
pub(super) mod moe;
pub(super) mod optimizer;
pub(super) mod product;
