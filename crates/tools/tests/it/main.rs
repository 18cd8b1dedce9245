//! Integration tests of `tools`. Invariant: tests are hermetic; each test works in a folder of its own.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "shared with the tests of other crates, which use all of it")]
#[path = "../../../runtime/tests/it/rig.rs"]
mod rig;
mod verify;
