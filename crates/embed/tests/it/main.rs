//! Integration tests of `embed`. Invariant: hermetic; every test works in its own folder.
#![forbid(unsafe_code)]

mod in_memory;
mod in_place;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;

/// Counts the allocations of the test process.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;
