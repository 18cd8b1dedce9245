//! Plimsoll runs and trains transformers inside a memory budget that is known, to the byte, before launch.
//!
//! A model is a function that builds a [`plimsoll_graph::Graph`] of coarse transformer ops. Passes transform the graph, a planner
//! gives every byte an address before the first allocation, and an executor follows the plan on a CPU or an NVIDIA GPU.
//! This crate re-exports the public API of the crates that do this; the command `plimsoll` is built on them.
//!
//! | to | start at |
//! |---|---|
//! | compute embeddings of sequences | [`plimsoll_embed::embed_sequences`] in memory, [`plimsoll_embed::embed`] from files into files |
//! | run a model of your own choice step by step | [`plimsoll_runtime::session::Session`] |
//! | find viral reads | [`virus`] |
//! | know the memory of a model on a machine | [`plimsoll_runtime::price`] |
//! | plan or run training | [`train`] |
//! | build a model | [`models`], [`plimsoll_graph::Builder`] |
//! | add an op | [`plimsoll_graph::OpRules`] and [a new op](#a-new-op) |
//!
//! # Embeddings of sequences in memory
//! [`plimsoll_runtime::EncoderModel::open`] opens a model by its folder or by its name on the hub; the built-in encoder of this example has
//! random weights.
//! ```
//! use plimsoll::embed::{EmbedError, Pool, embed_sequences};
//! use plimsoll::graph::Bytes;
//! use plimsoll::runtime::{EncoderModel, Settings, Silent};
//!
//! # fn main() -> Result<(), EmbedError> {
//! let model = EncoderModel::builtin_protein()?;
//! let settings = Settings { budget: Some(Bytes(256 << 20)), ..Settings::default() };
//! let proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "MVLSPADKTNVKAAW"];
//! let means = embed_sequences(&model, &proteins, Pool::Mean, None, &settings, &mut Silent)?;
//! assert_eq!(means.len(), 2);
//! assert_eq!(means[0].len() as u64, model.encoder.hidden_size());
//! # Ok(())
//! # }
//! ```
//!
//! # The memory of a model on a machine
//! Neither weights nor the machine are needed: the configuration and the description of the target are enough.
//! ```
//! use plimsoll::plan::{Room, Streaming};
//! use plimsoll::runtime::{RuntimeError, price};
//!
//! # fn main() -> Result<(), RuntimeError> {
//! let target = price::target("h100")?;
//! let request = price::Request {
//!     tokens: Some(16384),
//!     budget: None,
//!     room: Room::UNLIMITED,
//!     stream: Streaming::Never,
//!     precision: None,
//!     target,
//! };
//! let program = price::program("facebook/esm2_t33_650M_UR50D", &request)?;
//! println!("{}", program.ledger());
//! assert_eq!(program.ledger().total(), program.peak());
//! # Ok(())
//! # }
//! ```
//!
//! # The memory of a training run
//! The planner chooses recomputation and the size of micro-batches inside the budget.
//! ```
//! use plimsoll::runtime::Silent;
//! use plimsoll::train::config::TrainConfig;
//! use plimsoll::train::{TrainError, priced};
//!
//! # fn main() -> Result<(), TrainError> {
//! let text = "
//! model: {kind: moe_lm, hidden: 64, layers: 2, heads: 4, intermediate: 128, experts: {count: 4, top_k: 2}}
//! data: {train: [corpus.txt], document: paragraph, tokenizer: bytes, longest: 128}
//! memory: {budget: 256MiB}
//! run: {steps: 100}
//! ";
//! let config = TrainConfig::parse(text, "example", &[])?;
//! let target = priced::target(&config, "cpu")?;
//! let plan = priced::found(&config, &target, &mut Silent)?;
//! assert!(plan.program.peak() <= priced::budget(&config, &target)?);
//! println!("{}", priced::to_text(&config, &plan)?);
//! # Ok(())
//! # }
//! ```
//!
//! # A new op
//! An op is a struct of attributes with [`plimsoll_graph::OpRules`]: types, gradient, cost, aliasing and precision. The rules of an op `y = -x`:
//! ```
//! use plimsoll::graph::ops::Scale;
//! use plimsoll::graph::{
//!     Bounds, Cost, Counts, DType, Dim, NotDifferentiable, Op, OpRules, PrecisionClass, RuleError, TensorSpec, Vjp,
//! };
//!
//! struct Negate;
//!
//! impl OpRules for Negate {
//!     fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
//!         match ins {
//!             [x] => Ok(vec![(*x).clone()]),
//!             _ => Err(RuleError(format!("{} inputs instead of 1", ins.len()))),
//!         }
//!     }
//!
//!     // dx = -dy
//!     fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
//!         let dy = cx.dy()?;
//!         cx.input_grads[0] = Some(cx.builder.one(Op::Scale(Scale { factor: -1.0 }), &[dy]));
//!         Ok(())
//!     }
//!
//!     fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], bounds: &Bounds, _: Counts) -> Cost {
//!         let bytes = |specs: &[&TensorSpec]| specs.iter().map(|spec| spec.bytes(bounds).0 as f64).sum::<f64>();
//!         Cost { flops: bytes(outs) / 4.0, bytes: bytes(ins) + bytes(outs) }
//!     }
//!
//!     // An element of y depends on the same element of x alone, so y may take the storage of x.
//!     fn alias(&self, _: usize) -> &'static [usize] {
//!         &[0]
//!     }
//!
//!     fn precision(&self) -> PrecisionClass {
//!         PrecisionClass::Elementwise
//!     }
//! }
//!
//! let bounds = Bounds { tokens: 128, sequences: 16, longest: 64, packs: 1 };
//! let x = TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(32)], DType::F32);
//! assert_eq!(Negate.infer(&[&x], &bounds).unwrap(), [x.clone()]);
//! assert!(Negate.infer(&[], &bounds).is_err());
//! ```
//! The set of ops is closed, so that the compiler lists every place that must decide about a new one. Within the source tree an
//! op gets a variant in `crates/graph/src/op.rs`, a reference kernel in `crates/exec/src/reference`, rows in the kernel
//! tables of `crates/plan/src/kernels`, and its op cases in `crates/exec/tests/it/op_cases`; CONTRIBUTING.md has the steps.
#![forbid(unsafe_code)]

#[doc(inline)]
pub use plimsoll_cpu as cpu;
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use plimsoll_cuda as cuda;
#[doc(inline)]
pub use plimsoll_data as data;
#[doc(inline)]
pub use plimsoll_embed as embed;
#[doc(inline)]
pub use plimsoll_exec as exec;
#[doc(inline)]
pub use plimsoll_graph as graph;
#[doc(inline)]
pub use plimsoll_models as models;
#[doc(inline)]
pub use plimsoll_plan as plan;
#[doc(inline)]
pub use plimsoll_runtime as runtime;
#[doc(inline)]
pub use plimsoll_setting as setting;
#[doc(inline)]
pub use plimsoll_train as train;
#[doc(inline)]
pub use plimsoll_virus as virus;
