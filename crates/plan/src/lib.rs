//! Planning: turns a graph into an executable plan by passes, scheduling and address assignment, and reports
//! its memory use.
//!
//! Invariant of the crate: it is pure and deterministic. No I/O, no device, no clock, no hash-map iteration
//! order and no randomness, so every machine computes the same plan from the same graph, policy and target.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod bill;
mod check;
mod compile;
mod cost;
mod error;
mod in_flight;
mod kernels;
mod largest;
mod ledger;
mod liveness;
mod memory;
pub mod pack;
pub mod passes;
mod policy;
mod precision;
mod program;
mod schedule;
mod search;
mod sharing;
mod target;
mod timeline;
pub mod training;
mod views;

pub use bill::{Bill, LimitKind, Remedy};
pub use check::{CheckError, check, check_target};
pub use compile::{Dump, Plan, compile, compile_shared, compile_with};
pub use cost::{instruction_seconds, node_seconds, plan_seconds, step_seconds};
pub use error::PlanError;
pub use in_flight::{Direction, InFlightPlace, PIECE, PIPELINE_DEPTH};
pub use kernels::{
    ADAFACTOR_ROWS, BIAS_ROWS, Capability, CpuKernel, CudaKernel, Fusions, GRAD_ROWS, GateFusion, INT8_STEP,
    InstructionSet, KernelId, Kernels, LONGEST_GATED, LossSizes, MAX_EXPERTS, MAX_HEADS, ROUTE_CHUNK,
    ROUTER_LOSS_CHUNK, RUN_ROWS, ReferenceKernel, SORT_CHUNK, SQUARES, SUM_ROWS, TILE_STEP, WIDEST_CPU_HEAD,
    WIDEST_CUDA_HEAD, WORKSPACE_ALIGN, chunk_words, column_sums_parts, copy_bytes, cuda_flash_grad_parts,
    flash_bytes, flash_grad_bytes, indexed_sums_parts, input_grad_parts, library_sums_rows, route_bytes,
    router_loss_bytes, router_loss_grad_bytes, weight_grad_parts,
};
pub use ledger::{Ledger, LedgerEntry};
pub use memory::{MemoryPlan, Persistent, Region, RegionSizes, Slice};
pub use passes::{ActivationOffload, Offload, RecomputePolicy};
pub use policy::{AutodiffPolicy, Fuse, Policy, Weights, Window};
pub use precision::{Precision, PrecisionPolicy};
pub use program::{InputId, Location, OutputId, Program, Staging};
pub use schedule::{Instr, Queue, Schedule, moved};
pub use search::{Build, Room, Search, Streaming, fit, grow, largest};
pub use sharing::Sharing;
pub use target::{ArenaMemory, Link, Rates, Reserved, Target};
pub use timeline::{Timeline, TimelineInstruction, TimelineLines, TimelinePlan, TimelineTensor};
pub use training::{
    ActivationPolicy, Candidate, Optimizer, ParameterGroup, RejectedCandidate, RematChoice, TRAINING_DEPTH,
    Training, TrainingChoice, TrainingSearch,
};
