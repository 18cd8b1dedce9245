//! The runtime: opens models, plans them inside a memory budget, runs sessions on the CPU or on GPUs, and accounts for
//! the memory of the process. The applications (`embed`, `virus`, `train`, `tools`) are built on this crate.
//!
//! Invariant: tensor sizes and addresses are decided by the planner, options by the command line; every figure that
//! this crate reports was measured or read from a plan.
//!
//! A session runs a model on sequences inside a memory budget. The plan states the session's memory before anything is
//! allocated:
//! ```
//! use plimsoll_data::pack::Order;
//! use plimsoll_graph::Bytes;
//! use plimsoll_models::Output;
//! use plimsoll_runtime::session::bounds::{bounds, copies, output_bytes, with_outputs};
//! use plimsoll_runtime::session::{Next, PlanPart, Push, Request, SearchStage, Start};
//! use plimsoll_runtime::{EncoderModel, RuntimeError, Settings, Silent};
//!
//! # fn main() -> Result<(), RuntimeError> {
//! let model = EncoderModel::builtin_protein()?;
//! let settings = Settings { budget: Some(Bytes(256 << 20)), ..Settings::default() };
//! let encoder = PlanPart {
//!     name: "encoder",
//!     graph: Box::new(|tokens| model.encoder.graph(bounds(tokens, 128), &[Output::Mean])),
//!     policy: settings.policy()?,
//!     streams: true,
//! };
//! let stage = SearchStage {
//!     parts: vec![encoder],
//!     longest: 128,
//!     finish: Box::new(|program, replicas| with_outputs(program, copies(replicas), 0, None)),
//!     kept: Box::new(|program, steps| Bytes(output_bytes(program).0 * steps as u64)),
//! };
//! let planned = settings.plan(Request {
//!     alternatives: vec![vec![stage]],
//!     replicas: 1,
//!     tokens: None,
//!     budgets: vec![settings.read_budget()?],
//! })?; // on failure: the memory ledger, and the sizes that would fit
//! println!("{}", planned.programs()[0].ledger());
//!
//! let start = Start { order: Order::ByLength, weights: vec![&model], running: vec![], kept: "means" };
//! let mut session = planned.start(0, start, &mut Silent)?;
//! let encoder = session.model("encoder").expect("planned");
//! for (key, sequence) in ["MKVLAW", "TRESNDQCEGHIL"].into_iter().enumerate() {
//!     let mut tokens = vec![];
//!     model.tokenizer.encode(sequence.as_bytes(), &mut tokens)?;
//!     assert_eq!(session.push([(encoder, key as u64, &tokens[..])])?, Push::Taken);
//! }
//! session.end();
//! while let Next::Ready(step) = session.next(&|| Ok(()))? {
//!     for (i, key) in step.keys.iter().enumerate() {
//!         println!("sequence {key}: {:?}", step.values(0, i));
//!     }
//!     session.recycle(step);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Planning alone, as `plimsoll plan` does:
//! ```
//! use plimsoll_plan::{Room, Streaming};
//! use plimsoll_runtime::{machine, price};
//!
//! # fn main() -> Result<(), plimsoll_runtime::RuntimeError> {
//! let target = price::target("cpu")?;
//! let request = price::Request {
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

pub mod adapter;
pub mod budget;
mod bundle;
mod caller;
mod device;
pub mod dynamic;
mod error;
pub mod explain;
pub mod fair_esm;
pub mod health;
pub mod hub;
pub mod identity;
pub mod largest;
pub mod leak;
pub mod leftovers;
pub mod live;
pub mod lock;
pub mod machine;
pub mod metrics;
pub mod model;
pub mod observer;
pub mod ordered;
mod output_error;
pub mod price;
pub mod process;
pub mod report;
pub mod run;
mod sequence_model;
pub mod series;
pub mod session;
mod settings;
pub mod timeline;
pub mod watch;

pub use budget::Budget;
pub use caller::CallerModel;
pub use device::Device;
pub use error::{Failure, ModelError, OutOfMemory, Phase, RequestError, RuntimeError};
pub use fair_esm::Checkpoint;
pub use model::{EncoderModel, HEAD_NAMES, HeadModel, Tokenizer};
pub use observer::{
    FinishedBytes, Level, Observer, Progress, Silent, StartProgress, StartStage, Trained, Transfer,
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
pub use sequence_model::{DecoderModel, ModelParts, OpenedModel, OwnTokenizer, check_decoder, find_in_decoder};
pub use session::Usage;
pub use settings::{Arithmetic, LETTERS_OF_REPLICA, Replicas, Settings, on_cpu, replicas_for_input};
