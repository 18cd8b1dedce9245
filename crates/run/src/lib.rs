//! The library below the applications, and the user stories of single models: embed, classify, plan, bench, doctor, list, verify, convert, merge. Each is readable from top
//! to bottom.
//!
//! Invariant of the crate: it decides nothing about numbers or addresses (that is below) and nothing about
//! words or flags (that is above); what it reports it has measured or read from the plan.
//!
//! A library user asks the plan what the command line asks:
//! ```
//! use plan::Stream;
//! use plimsoll_run::{machine, price};
//!
//! # fn main() -> Result<(), plimsoll_run::RunError> {
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
pub mod bench;
mod bundle;
pub mod classify {
    //! `plimsoll classify`.
    pub use crate::embed::classify::{Options, classify};
}
pub mod convert;
mod device;
pub mod doctor;
pub mod embed;
mod error;
pub mod fair_esm;
pub mod hub;
pub mod ladder;
pub mod lanes;
pub mod list;
pub mod lock;
pub mod machine;
pub mod merge;
pub mod model;
pub mod observer;
pub mod ordered;
mod output_error;
pub mod price;
pub mod process;
pub mod session;
pub mod verify;

pub use data::printable::{Place, is_printable};
pub use device::Device;
pub use error::RunError;
pub use exec::Machine;
pub use exec::heap::{Heap, limit_slack};
pub use fair_esm::Checkpoint;
pub use lanes::Usage;
pub use model::{EncoderModel, HEAD_NAMES, HeadModel, Tokenizer};
pub use observer::{Level, Observer, Progress, Silent, Trained, Transfer};
pub use output_error::OutputError;
pub use plan::{Precision, Stream, Target};
pub use process::bill_whole_process;
pub use session::Settings;
