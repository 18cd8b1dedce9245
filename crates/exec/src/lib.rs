//! Runs plans: devices, the executor, the CPU's kernels and the reference kernels that define every op.
//!
//! Invariant of the crate: whoever is here only follows a plan. Nothing is allocated during a step, and the
//! bits of a sequence do not depend on its neighbours, on their order, or on the number of threads.

mod arena;
pub mod cpu;
mod device;
pub mod disk;
mod dynamic_codes;
mod executor;
pub mod heap;
mod host;
mod load;
pub mod memory;
mod persistent;
pub mod reference;
pub mod scaled;
mod submit;
pub mod tiles;

pub use device::{Device, DeviceError, Holder, Launch, Machine, Operand, Repeat, Span, Ticket};
pub use executor::Executor;
pub use graph::Param;
pub use load::{ParamSource, ReadError, ReadParam, ReadShared, load_all};
pub use persistent::{Resident, Survivor};
pub use submit::{Data, Submitted};
