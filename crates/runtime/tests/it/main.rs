//! Integration tests of `runtime`. Invariant: tests are hermetic; each test works in a folder of its own.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "its `main` is for the example")]
#[path = "../../examples/max_pooling.rs"]
mod max_pooling;
mod pooling;
#[allow(dead_code, reason = "shared with the tests of other crates, which use all of it")]
mod rig;
mod streaming;
mod timeline;
