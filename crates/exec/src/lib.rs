//! Runs plans: the machine and device interfaces, the executor, and the reference kernels that define every op.
//!
//! Invariant of the crate: its code only follows a plan. Nothing is allocated during a step, and the bits of a
//! sequence's result do not depend on the other sequences of its batch, their order, or the number of threads.

pub mod arena;
mod device;
pub mod disk;
pub mod dynamic_codes;
mod executor;
pub mod half;
pub mod heap;
pub mod host;
mod load;
pub mod memory;
mod output;
mod persistent;
mod progress;
pub mod reference;
pub mod scaled;
pub mod scratch_file;
mod submit;
pub mod tiles;
mod transfer;

pub use device::{
    Device, DeviceError, DeviceInfo, DeviceKind, GraphCapture, Holder, Launch, Machine, Operand, Recorder,
    Span, Tracer,
};
pub use executor::{Executor, Prepared};
pub use load::{Copies, ReadError, ReadParam, ReadShared, load_all};
pub use output::{OutputBuffer, OutputValues};
pub use persistent::{PersistentKind, PersistentTensor};
pub use plimsoll_graph::Param;
pub use progress::{OnStart, StartProgress, StartStage};
pub use submit::{Data, Submitted};
pub use transfer::{Allocation, Transfer, TransferOrder};
