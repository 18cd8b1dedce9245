//! The integration tests of `run`. Invariant: hermetic; every test works in a folder of its own.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "shared with the tests of `virus`, which use all of it")]
mod cards;
mod in_place;
mod rig;
mod streaming;
mod verify;
