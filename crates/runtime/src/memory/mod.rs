//! Memory of a run: its budget, the machine and the process, readings while it runs, and steps whose size follows them.
//! The modules are public at the root of the crate.

pub mod budget;
pub mod dynamic;
pub mod health;
pub mod leak;
pub mod live;
pub mod machine;
pub mod process;
pub mod watch;
