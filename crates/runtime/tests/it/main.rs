//! The integration tests of `runtime`. Invariant: hermetic; every test works in a folder of its own.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "shared with the tests of other crates, which use all of it")]
mod rig;
mod streaming;
