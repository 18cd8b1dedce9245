//! Integration tests of the crate. Invariant: the tests are hermetic; every test has its own temporary folder.
#![forbid(unsafe_code)]

mod caller;
mod dynamic;
mod memory;
mod narrow;
mod predict;
mod replicas;
mod resume;
mod rig;
