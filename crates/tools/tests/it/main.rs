//! Integration tests of `tools`. Invariant: tests are hermetic; each test works in a folder of its own.
#![forbid(unsafe_code)]

mod verify;
