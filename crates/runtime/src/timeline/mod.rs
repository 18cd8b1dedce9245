//! Files of timelines: snapshots for PyTorch's memory viewer and traces for Perfetto. Invariant: every number is that of
//! the planner's timeline.

mod measured;
pub mod memory_viz;
mod pickle;
mod trace;

pub use measured::{MeasuredMemory, MeasuredStep, MeasuredTimeline, MemorySample, sampled};
pub use plimsoll_plan::{Timeline, TimelineInstruction, TimelineLines, TimelinePlan, TimelineTensor};
pub use trace::{EventTrace, TraceDetails, TraceEvent, name as phase_name, to_trace};

use crate::RuntimeError;
use crate::report::to_json;
use plimsoll_data::atomic::AtomicFile;
use std::io::Write as _;
use std::path::Path;

/// Writes the snapshot of titled timelines for PyTorch's memory viewer; an existing file is replaced.
pub fn write_memory_viz(path: &Path, timelines: &[(String, &Timeline)]) -> Result<(), RuntimeError> {
    write(path, &memory_viz::to_pickle(timelines))
}

/// Writes the trace of titled timelines as JSON; an existing file is replaced.
pub fn write_trace(path: &Path, timelines: &[(String, &Timeline)]) -> Result<(), RuntimeError> {
    write(path, to_json(&to_trace(timelines)).to_string().as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), RuntimeError> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|error| file.error(error))?;
    Ok(file.commit()?)
}
