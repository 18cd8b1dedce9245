//! The integration tests of `virus`. Invariant: hermetic; every test works in a folder of its own.
#![forbid(unsafe_code)]

extern crate plimsoll_virus as virus;

#[allow(dead_code, reason = "shared with the tests of `run`")]
#[path = "../../../runtime/tests/it/cards.rs"]
mod cards;
#[allow(dead_code, reason = "shared with other crates' tests, which use all of it")]
#[path = "../../../runtime/tests/it/rig.rs"]
mod folders;
mod lanes;
mod memory;
mod narrow;
mod predict;
mod resume;
mod rig;
