//! Integration tests of `plot`. Invariant: hermetic; every test works in its own folder.
#![forbid(unsafe_code)]

mod pictures;
#[allow(dead_code, reason = "shared with the tests of `virus`, which use all of it")]
#[path = "../../../virus/tests/it/rig.rs"]
mod rig;
mod training;
