//! Intermediate representation: a [`Graph`] of coarse transformer ops in SSA form, stored as index tables, with
//! the rules of each op, a builder, a verifier and a text form.
//!
//! Invariant of the crate: every function is a pure function of its arguments (no I/O, no device, no clock),
//! and the size of a tensor in bytes is computed from its [`TensorSpec`] and nowhere else.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod builder;
mod graph;
mod id;
pub mod limits;
mod op;
pub mod ops;
pub mod packs;
mod roles;
mod spec;
mod text;
mod verify;

pub use builder::Builder;
pub use graph::{Def, Graph, Node, Param, ParamPiece, Phase, Pieces, Value};
pub use id::{NodeId, ParamId, StateId, ValueId};
pub use limits::{Count, TooLarge};
pub use op::{Op, OpKind};
pub use ops::{Cost, NotDifferentiable, OpRules, PrecisionClass, RuleError, Vjp};
pub use roles::{Moment, OutputRole, StateDef, StateKind, StateRole};
pub use spec::{Bounds, Bytes, Counts, DType, Dim, GRANULE, Layout, Role, Space, TensorSpec};
pub use text::{TextError, node_label};
pub use verify::VerifyError;
