//! The integration tests of `run`. Invariant: hermetic; every test works in a folder of its own.
#![forbid(unsafe_code)]

mod cards;
mod in_place;
mod lanes;
mod memory;
mod narrow;
mod plot;
mod predict;
mod resume;
mod rig;
mod streaming;
mod verify;
