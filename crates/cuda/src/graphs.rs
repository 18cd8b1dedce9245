//! Steps that were recorded, to be run again by one call. Invariant: a record is run only for the plan, counts and status
//! word it was made for, and all are forgotten when anything is prepared or the arena changes. Records take memory of the
//! card, up to 2 MiB each: only those of one plan and counts are kept, one for each open step, and only where they came
//! several times in a row, which packs of sequences of any length do not.

use crate::CudaError;
use crate::context::Context;
use cudarc::driver::sys as cu;
use exec::Repeat;
use graph::Counts;
use std::ptr;

/// Records, and what the last steps were.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Plan and counts of the last step, and how many times they came in a row.
    last: Option<(usize, Counts)>,
    times: usize,
    /// All of one plan and counts.
    kept: Vec<(Key, cu::CUgraphExec)>,
    /// What is being recorded.
    recording: Option<Key>,
}

/// Plan, counts, status word.
pub(crate) type Key = (usize, Counts, usize);

// SAFETY: handles of the driver may be used from any thread to which the context is current.
unsafe impl Send for Graphs {}

/// A step is recorded when its counts come this many times in a row.
const TIMES: usize = 4;

impl Graphs {
    /// Runs the record of a step, or begins one where its counts came often enough.
    pub(crate) fn repeat(&mut self, context: &Context, key: Key) -> Result<Repeat, CudaError> {
        let (plan, counts, _) = key;
        self.times = if self.last == Some((plan, counts)) { self.times + 1 } else { 1 };
        self.last = Some((plan, counts));
        let (api, stream) = (context.api, context.stream);
        if let Some((_, step)) = self.kept.iter().find(|(kept, _)| *kept == key) {
            // SAFETY: the record lives, and what it calls on too.
            api.check("cuGraphLaunch", unsafe { (api.cuGraphLaunch)(*step, stream) })?;
            return Ok(Repeat::Done);
        }
        if self.times < TIMES {
            return Ok(Repeat::Plain);
        }
        let others = self.kept.extract_if(.., |((p, c, _), _)| (*p, *c) != (plan, counts));
        others.for_each(|(_, step)| forget(context, step));
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and nothing is being recorded in it.
        api.check("cuStreamBeginCapture", unsafe { (api.cuStreamBeginCapture_v2)(stream, mode) })?;
        self.recording = Some(key);
        Ok(Repeat::Record)
    }

    /// Ends a record, and runs it unless it broke off.
    pub(crate) fn recorded(&mut self, context: &Context, whole: bool) -> Result<(), CudaError> {
        let (api, stream) = (context.api, context.stream);
        let (Some(key), mut graph, mut step) = (self.recording.take(), ptr::null_mut(), ptr::null_mut()) else {
            return Ok(());
        };
        // SAFETY: recording has begun; pointers are to locals.
        api.check("cuStreamEndCapture", unsafe { (api.cuStreamEndCapture)(stream, &mut graph) })?;
        // SAFETY: the graph is ours until it is destroyed; what was made of it does not need it.
        let code = unsafe {
            let code = if whole { (api.cuGraphInstantiateWithFlags)(&mut step, graph, 0) } else { 0 };
            (api.cuGraphDestroy)(graph);
            code
        };
        api.check("cuGraphInstantiate", code)?;
        if !whole {
            return Ok(());
        }
        self.kept.push((key, step));
        // SAFETY: as in `repeat`.
        api.check("cuGraphLaunch", unsafe { (api.cuGraphLaunch)(step, stream) })
    }

    /// Forgets all; the stream is idle, or its work needs no record.
    pub(crate) fn clear(&mut self, context: &Context) {
        self.kept.drain(..).for_each(|(_, step)| forget(context, step));
        self.last = None;
    }
}

fn forget(context: &Context, step: cu::CUgraphExec) {
    // SAFETY: it is ours; while it runs, the driver keeps what it needs. A failure changes nothing here.
    unsafe { (context.api.cuGraphExecDestroy)(step) };
}
