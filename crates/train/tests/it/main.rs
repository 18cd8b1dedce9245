//! Integration tests of `train`. Invariant: tests are hermetic; each test works in a folder of its own.
#![forbid(unsafe_code)]

mod caller;
mod dynamic;
mod evaluate;
mod interop;
mod packs;
#[allow(dead_code, reason = "shared with the tests of `virus`, which use all of it")]
#[path = "../../../virus/tests/it/rig.rs"]
mod rig;
mod train;
mod train_keys;
mod train_planned;
mod train_quiet;
mod training;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;

#[global_allocator]
pub(crate) static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;
