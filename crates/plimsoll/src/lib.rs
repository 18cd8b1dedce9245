//! Plimsoll runs and trains transformers inside a memory budget that is known, to the byte, before launch.
//!
//! A model is a function that builds a [`Graph`](graph::Graph) of coarse transformer ops. Passes transform the graph, a planner
//! gives every byte an address before the first allocation, and an executor follows the plan on a CPU or an NVIDIA GPU.
//! This page is the public API; the command `plimsoll` is built on it. Every example compiles and runs in the tests.
//!
//! | to | start at |
//! |---|---|
//! | run a model on sequences | [`Session`] |
//! | compute embeddings | [`embed::embed_sequences`] in memory, [`embed::embed`] from files into files |
//! | classify sequences | [`embed::classify`] |
//! | find viral reads | [`predict::predict`] |
//! | know the memory of a model on a machine | [`price::program`] |
//! | plan training | [`train::priced`] |
//! | train | [`train::train_with`] |
//! | build a model | [`graph::Builder`] |
//! | plan and run a graph | [`plan::compile`], [`machine`] |
//! | add an op | [a new op](#a-new-op) |
//!
//! # A session
//! A session runs a model on sequences. Its plan chooses the tokens of a step and states the memory before anything is allocated;
//! rows are returned in input order. [`Model::open`] opens a model by its folder or by its name on the hub; the built-in encoder
//! of this example has random weights.
//! ```
//! use plimsoll::{EncoderModel, Next, Push, RuntimeError, Session, SessionRequest, SessionRow};
//!
//! fn print(row: SessionRow<'_>) -> Result<(), RuntimeError> {
//!     Ok(println!("{}: {:?}", row.position(), row.values(0)))
//! }
//!
//! # fn main() -> Result<(), RuntimeError> {
//! let model = EncoderModel::builtin_protein()?;
//! let planned = Session::plan(&[&model], &SessionRequest::default())?; // Err: the bill, and what would fit
//! println!("{}", planned.ledger());
//! let mut session = planned.start()?;
//! for protein in ["MKVLAW", "TRESNDQCEGHIL"] {
//!     while session.push(protein)? == Push::Full {
//!         if let Next::Ready(row) = session.next()? { print(row)? }
//!     }
//! }
//! session.finish(print)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Embeddings
//! ```
//! use plimsoll::embed::{EmbedError, InMemoryOptions, Pooling, embed_sequences};
//! use plimsoll::{Bytes, EncoderModel, Settings, Silent};
//!
//! # fn main() -> Result<(), EmbedError> {
//! let model = EncoderModel::builtin_protein()?;
//! let settings = Settings { budget: Some(Bytes(256 << 20)), ..Settings::default() };
//! let proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "MVLSPADKTNVKAAW"];
//! let options = InMemoryOptions { pool: Pooling::Mean, layers: None, settings: &settings };
//! let means = embed_sequences(&model, &proteins, &options, &mut Silent)?;
//! assert_eq!(means.len(), 2);
//! assert_eq!(means[0].len() as u64, model.encoder.hidden_size());
//! # Ok(())
//! # }
//! ```
//! From a file into a file, with a journal from which an interrupted run resumes:
//! ```no_run
//! use plimsoll::Silent;
//! use plimsoll::embed::{EmbedError, EmbedOptions, Pooling, embed};
//!
//! # fn main() -> Result<(), EmbedError> {
//! let options = EmbedOptions::usual("facebook/esm2_t33_650M_UR50D", "proteins.faa.gz", "embeddings.npy");
//! let report = embed(&EmbedOptions { pool: Pooling::Cls, ..options }, &mut Silent)?;
//! println!("{} sequences, {:.0} tokens/s", report.sequences, report.tokens_per_second);
//! # Ok(())
//! # }
//! ```
//!
//! # Viral reads
//! ```no_run
//! use plimsoll::predict::{CallerOptions, MethodOptions, PredictOptions, VirusError, caller_window, predict};
//! use plimsoll::{Settings, Silent};
//!
//! # fn main() -> Result<(), VirusError> {
//! let method = MethodOptions::Caller(CallerOptions::usual(None)); // the built-in caller
//! let usual = PredictOptions::usual(vec!["reads.fq.gz".into()], "viruses".into(), method, Settings::default());
//! let report = predict(&PredictOptions { length: caller_window(None)?, ..usual }, &mut Silent)?;
//! println!("{}", report.output_dir.display());
//! # Ok(())
//! # }
//! ```
//!
//! # The memory of a model on a machine
//! Neither weights nor the machine are needed: the configuration and the description of the target are enough.
//! ```
//! use plimsoll::price;
//! use plimsoll::{Room, RuntimeError, Streaming};
//!
//! # fn main() -> Result<(), RuntimeError> {
//! let request = price::PriceRequest {
//!     target: price::target("h100")?,
//!     tokens: Some(16384),
//!     budget: None,
//!     room: Room::UNLIMITED,
//!     stream: Streaming::Never,
//!     precision: None,
//! };
//! let program = price::program("facebook/esm2_t33_650M_UR50D", &request)?;
//! println!("{}", program.ledger());
//! assert_eq!(program.ledger().total(), program.peak());
//! # Ok(())
//! # }
//! ```
//!
//! # Training
//! The planner chooses recomputation, offload and the packs of a micro-step inside the budget.
//! ```
//! use plimsoll::Silent;
//! use plimsoll::train::{TrainConfig, TrainError, priced};
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
//! The run itself; started again, it resumes from its newest checkpoint with the same bits:
//! ```no_run
//! use plimsoll::train::{Resume, TrainConfig, TrainError, TrainRequest, open, train_with};
//! use plimsoll::{Device, Silent};
//!
//! # fn main() -> Result<(), TrainError> {
//! let config = TrainConfig::parse(&std::fs::read_to_string("run.yaml").expect("a configuration"), "run.yaml", &[])?;
//! let request = TrainRequest { config, output: "run".into(), resume: Resume::Auto };
//! let report = train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)?;
//! println!("loss {:?} after {} steps", report.loss, report.steps);
//! # Ok(())
//! # }
//! ```
//!
//! # A new op
//! An op is a struct of attributes with [`graph::OpRules`]: types, gradient, cost, aliasing and precision. The rules of an op `y = -x`:
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

pub use plimsoll_data::pack::Order;
pub use plimsoll_models::Output;
pub use plimsoll_plan::{Bill, Ledger, PlanError, Precision, Program, Remedy, Room, Streaming, Target};
pub use plimsoll_runtime::session::{
    Next, PlannedSession, Push, Session, SessionModel, SessionRequest, SessionRow, WeightSource,
};
pub use plimsoll_runtime::{
    Bytes, DecoderModel, Device, EncoderModel, Failure, Level, Model, ModelError, Observer, Progress, Replicas,
    RequestError, RuntimeError, SequenceError, Settings, Silent, Tokenizer,
};

/// Embeddings and classes of sequences.
pub mod embed {
    pub use plimsoll_embed::classify::{ClassifyOptions, classify};
    pub use plimsoll_embed::{
        EmbedDestination, EmbedError, EmbedFormat, EmbedOptions, EmbedReport, InMemoryOptions, Pooling,
        ValueType, embed, embed_sequences,
    };
}

/// Viral reads, by VirNucPro's pipeline or by a caller.
pub mod predict {
    pub use plimsoll_virus::output::{EmbeddingFormat, HitsFormat};
    pub use plimsoll_virus::planned;
    pub use plimsoll_virus::{
        CallerOptions, MethodOptions, Models, PredictOptions, PredictReport, VirNucProOptions, VirusError,
        WindowShard, caller_window, predict, predict_each,
    };
}

/// Training: plans, runs, evaluations.
pub mod train {
    pub use plimsoll_train::config::TrainConfig;
    pub use plimsoll_train::priced;
    pub use plimsoll_train::{
        Ended, EvaluationReport, EvaluationRequest, Resume, RunState, TrainConfigError, TrainError,
        TrainReport, TrainRequest, evaluate, open, train_with,
    };
}

/// The memory and the time of a model on a machine, without weights and without the machine.
pub mod price {
    pub use plimsoll_runtime::price::{PriceRequest, program, target, to_text};
}

/// Graphs of coarse transformer ops, and how they are built.
pub mod graph {
    pub use plimsoll_graph::ops;
    pub use plimsoll_graph::{
        Bounds, Builder, Cost, Counts, DType, Dim, Graph, NotDifferentiable, Op, OpRules, Param,
        PrecisionClass, RuleError, TensorSpec, ValueId, VerifyError, Vjp,
    };
}

/// Plans: passes, schedule, kernels and the address of every tensor.
pub mod plan {
    pub use plimsoll_plan::{Plan, Policy, Program, check, compile};
}

/// Settings that errors and remedies name, as data, and the words in which a front end writes them.
pub mod setting {
    pub use plimsoll_setting::{Assignment, Command, MessageWords, Setting, set_words};
}

/// Machines that follow a plan.
pub mod machine {
    pub use plimsoll_cpu::CpuMachine;
    #[cfg(feature = "cuda")]
    pub use plimsoll_cuda::CudaMachine;
    pub use plimsoll_exec::{Executor, Machine};
}
