//! Steps that were recorded, to be run again by one call. Invariant: a record is run only for the plan, counts and status
//! word it was made for, and all are forgotten when anything is prepared or the arena changes.

use crate::CudaError;
use crate::context::Context;
use cudarc::driver::sys as cu;
use exec::Repeat;
use graph::Counts;
use std::ptr;

/// Records, and counts that came once.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Oldest use first.
    seen: Vec<Seen>,
    /// What is being recorded.
    recording: Option<Key>,
}

/// Plan, counts, status word.
pub(crate) type Key = (usize, Counts, usize);

struct Seen {
    key: Key,
    /// None where it came once.
    step: Option<cu::CUgraphExec>,
}

// SAFETY: handles of the driver may be used from any thread to which the context is current.
unsafe impl Send for Graphs {}

/// The most records that are kept: those of two plans in a few sizes.
const MOST: usize = 16;

impl Graphs {
    /// Runs the record of a step, or begins one where its counts come a second time.
    pub(crate) fn repeat(&mut self, context: &Context, key: Key) -> Result<Repeat, CudaError> {
        let Some(at) = self.seen.iter().position(|seen| seen.key == key) else {
            if self.seen.len() == MOST {
                forget(context, self.seen.remove(0));
            }
            self.seen.push(Seen { key, step: None });
            return Ok(Repeat::Plain);
        };
        let seen = self.seen.remove(at);
        let step = seen.step;
        self.seen.push(seen);
        let (api, stream) = (context.api, context.stream);
        if let Some(step) = step {
            // SAFETY: the record lives, and what it calls on too.
            api.check("cuGraphLaunch", unsafe { (api.cuGraphLaunch)(step, stream) })?;
            return Ok(Repeat::Done);
        }
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
        let Some(seen) = self.seen.iter_mut().find(|seen| whole && seen.key == key) else { return Ok(()) };
        seen.step = Some(step);
        // SAFETY: as in `repeat`.
        api.check("cuGraphLaunch", unsafe { (api.cuGraphLaunch)(step, stream) })
    }

    /// Forgets all; the stream is idle, or its work needs no record.
    pub(crate) fn clear(&mut self, context: &Context) {
        self.seen.drain(..).for_each(|seen| forget(context, seen));
    }
}

fn forget(context: &Context, seen: Seen) {
    if let Some(step) = seen.step {
        // SAFETY: it is ours; while it runs, the driver keeps what it needs. A failure changes nothing here.
        unsafe { (context.api.cuGraphExecDestroy)(step) };
    }
}
