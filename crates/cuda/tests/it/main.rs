//! Integration tests of the crate, in one binary. Tests that need a CUDA device print `skipped: no CUDA device`
//! and pass if the machine has none.

mod arena;
mod attention;
mod compile;
mod gradients;
mod matmuls;
mod packs;
mod whole;
