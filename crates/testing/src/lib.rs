//! What the tests of several crates share: devices that fail, wait or run out of memory where a test asks for it, temporary
//! folders, and tests in a process of their own.
//!
//! Invariant of the crate: only `[dev-dependencies]` name it, so no published package contains it.
#![forbid(unsafe_code)]

pub mod cards;
mod device;
mod folder;
mod process;
pub mod tight;

pub use device::{DeviceCall, HookedDevice, Hooks};
pub use folder::{Folder, fixture};
pub use process::in_own_process;
