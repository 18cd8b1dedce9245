//! The runtime: opens models, plans them inside a memory budget, runs sessions on the CPU or on GPUs, and accounts for
//! the memory of the process. The applications (`embed`, `virus`, `train`, `tools`) are built on this crate.
//!
//! Invariant: tensor sizes and addresses are decided by the planner, options by the command line; every figure that
//! this crate reports was measured or read from a plan.
//!
//! [`session::Session`] runs a model on sequences inside a memory budget; its plan states the memory before anything is
//! allocated.
//!
//! Planning alone, as `plimsoll plan` does:
//! ```
//! use plimsoll_plan::{Room, Streaming};
//! use plimsoll_runtime::{machine, price};
//!
//! # fn main() -> Result<(), plimsoll_runtime::RuntimeError> {
//! let target = price::target("cpu")?;
//! let request = price::PriceRequest {
//!     tokens: Some(4096),
//!     budget: None,
//!     stream: Streaming::Auto,
//!     room: Room::UNLIMITED,
//!     precision: None,
//!     target,
//! };
//! let program = price::program("facebook/esm2_t6_8M_UR50D", &request)?;
//! assert_eq!(program.ledger().total(), program.peak());
//!
//! let mut tracker = machine::Tracker::new();
//! tracker.track("planned");
//! println!("{} free, peak {}", machine::available().free, program.peak());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod device;
mod error;
mod memory;
pub mod model;
pub mod observer;
mod output_error;
mod planning;
pub mod report;
pub mod run;
pub mod session;
mod settings;
pub mod timeline;

pub use memory::{budget, dynamic, health, leak, live, machine, process, watch};
pub use model::{adapter, fair_esm, hub, identity, leftovers};
pub use planning::{explain, largest, price};
pub use run::{lock, metrics, ordered, series};

pub use budget::Budget;
pub use device::Device;
pub use error::{Failure, ModelError, OomPhase, OutOfMemory, RequestError, RuntimeError, SequenceError};
pub use fair_esm::FairEsmCheckpoint;
pub use model::{
    CallerModel, DecoderModel, EncoderModel, HEAD_NAMES, HeadModel, Model, OwnTokenizer, Tokenizer,
    check_decoder, find_in_decoder,
};
pub use observer::{
    FileTransfer, FinishedBytes, Level, Observer, Progress, Silent, StartProgress, StartStage, Trained,
};
pub use output_error::OutputError;
pub use plimsoll_data::destination::is_standard_output;
pub use plimsoll_data::limits::Limit;
pub use plimsoll_data::outputs::{InputFiles, OutputGuard};
pub use plimsoll_data::printable::{EscapedPath, is_printable};
pub use plimsoll_exec::Machine;
pub use plimsoll_exec::heap::{Heap, limit_slack};
pub use plimsoll_graph::Bytes;
pub use plimsoll_plan::{Precision, Room, Streaming, Target};
pub use process::bill_whole_process;
pub use session::Usage;
pub use settings::{Arithmetic, LETTERS_OF_REPLICA, Replicas, Settings, on_cpu, replicas_for_input};
