//! The runtime: opens models, plans them inside a memory budget, starts sessions on the CPU or on GPUs, and accounts for
//! the memory of the process. The applications (`embed`, `virus`, `train`, `tools`) are its clients.
//!
//! Invariant: numbers and addresses are decided by the planner, flags by the command line; every figure that this crate
//! reports was measured or read from a plan.
//!
//! A library user asks the plan what the command line asks:
//! ```
//! use plan::Stream;
//! use plimsoll_runtime::{machine, price};
//!
//! # fn main() -> Result<(), plimsoll_runtime::RuntimeError> {
//! let target = price::target("cpu")?;
//! let request = price::Request { tokens: Some(4096), budget: None, stream: Stream::Auto, precision: None, target };
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

pub mod adapter;
pub mod budget;
mod bundle;
mod device;
mod error;
pub mod fair_esm;
pub mod hub;
pub mod lock;
pub mod machine;
pub mod model;
pub mod observer;
pub mod ordered;
mod output_error;
pub mod price;
pub mod process;
pub mod session;
mod settings;

pub use budget::Budget;
pub use data::limits::Limit;
pub use data::printable::{Place, is_printable};
pub use device::Device;
pub use error::{Failure, ModelError, RequestError, RuntimeError};
pub use exec::Machine;
pub use exec::heap::{Heap, limit_slack};
pub use fair_esm::Checkpoint;
pub use model::{EncoderModel, HEAD_NAMES, HeadModel, Tokenizer};
pub use observer::{Level, Observer, Progress, Silent, Trained, Transfer};
pub use output_error::OutputError;
pub use plan::{Precision, Stream, Target};
pub use process::bill_whole_process;
pub use session::Usage;
pub use settings::{LETTERS_OF_REPLICA, Replicas, Settings, on_cpu, replicas_for_input};
