//! What the tests of several crates share: devices that fail, wait or run out of memory where a test asks for it.
//!
//! Invariant of the crate: only `[dev-dependencies]` name it, so no published package contains it.
#![forbid(unsafe_code)]

pub mod cards;
mod device;
pub mod tight;

pub use device::{Call, HookedDevice, Hooks};
