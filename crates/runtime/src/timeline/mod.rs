//! Files of timelines: snapshots for PyTorch's memory viewer and traces for Perfetto. Invariant: every number is that of
//! the planner's timeline.

pub mod memory_viz;
mod pickle;
mod trace;

pub use plimsoll_plan::{Timeline, TimelineInstruction, TimelineLines, TimelinePlan, TimelineTensor};
pub use trace::{Trace, TraceEvent, name as phase_name, to_trace};
