//! Integration tests of the crate. Invariant: the tests are hermetic; every test has its own temporary folder.
#![forbid(unsafe_code)]

mod caller;
mod dynamic;
#[allow(dead_code, reason = "shared with other crates' tests, which use all of it")]
#[path = "../../../runtime/tests/it/rig.rs"]
mod folders;
mod memory;
mod narrow;
mod predict;
mod replicas;
mod resume;
mod rig;
