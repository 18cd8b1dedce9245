//! Integration tests of `runtime`. Invariant: tests are hermetic; each test works in a folder of its own.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "its `main` is for the example")]
#[path = "../../examples/max_pooling.rs"]
mod max_pooling;
mod models;
mod pooling;
mod timeline;
