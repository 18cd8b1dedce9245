//! CUDA graph capture and replay of whole steps. Invariant: a graph is replayed only for the plan, counts and status
//! word that it was captured for, and all graphs are dropped when a launch is prepared or the arena changes.
//!
//! A graph takes up to 2 MiB of device memory. So only the graphs of a single (plan, counts) pair are kept, one for
//! each in-flight step, and a step is captured only after the same counts came several times in a row, which packs of
//! sequences of varying lengths rarely do. If the GPU has no memory for a graph, steps are launched kernel by kernel,
//! with the same bits.

use crate::CudaError;
use crate::context::Context;
use crate::error::OUT_OF_MEMORY;
use cudarc::driver::sys as cu;
use plimsoll_exec::GraphCapture;
use plimsoll_graph::Counts;
use std::ffi::c_int;
use std::ptr;

/// The captured graphs, and the recent steps that decide what is captured next.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Plan and counts of the last step.
    last: Option<(usize, Counts)>,
    /// Number of steps in a row that had this plan and these counts.
    times: usize,
    /// Instantiated graphs, all of one plan and counts.
    instantiated: Vec<(GraphKey, cu::CUgraphExec)>,
    /// Key of the step that is being captured.
    capturing: Option<GraphKey>,
    /// Whether the GPU had no memory for a graph. Capture is then not tried again before the arena or the prepared
    /// launches change, since a failed capture takes as long as several steps.
    full: bool,
    /// Whether the lack of memory is still to be reported by `note`.
    unreported: bool,
}

/// How the next step runs.
#[derive(Debug, PartialEq)]
enum StepMode {
    /// Replay this graph.
    Replay(cu::CUgraphExec),
    /// Capture the step while it is launched.
    Capture,
    /// Launch the step kernel by kernel.
    Plain,
}

/// (plan, counts, status word): the word is part of the key because its address is an argument of captured kernels.
pub(crate) type GraphKey = (usize, Counts, usize);

// SAFETY: driver handles may be used from any thread to which the context is current.
unsafe impl Send for Graphs {}

/// Number of steps in a row with the same plan and counts after which a step is captured.
const STEPS_BEFORE_CAPTURE: usize = 4;

impl Graphs {
    /// Replays the graph of a step, or starts a capture if the same counts came often enough.
    pub(crate) fn repeat(&mut self, context: &Context, key: GraphKey) -> Result<GraphCapture, CudaError> {
        match self.next(key) {
            StepMode::Replay(step) => return self.launch(context, step),
            StepMode::Plain => return Ok(GraphCapture::Plain),
            StepMode::Capture => {}
        }
        let (plan, counts, _) = key;
        let others = self.instantiated.extract_if(.., |((p, c, _), _)| (*p, *c) != (plan, counts));
        others.for_each(|(_, step)| forget(context, step));
        let api = context.api;
        let stream = context.stream;
        // Each GPU of a process is driven by a thread of its own. In the global mode, a call such as a memory
        // allocation by the thread of another GPU would fail while this one captures.
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and no capture is active in it.
        api.check("cuStreamBeginCapture", unsafe { (api.cuStreamBeginCapture_v2)(stream, mode) })?;
        self.capturing = Some(key);
        Ok(GraphCapture::Record)
    }

    /// Counts a step and decides how it runs.
    fn next(&mut self, key: GraphKey) -> StepMode {
        let (plan, counts, _) = key;
        self.times = if self.last == Some((plan, counts)) { self.times + 1 } else { 1 };
        self.last = Some((plan, counts));
        match self.instantiated.iter().find(|(of, _)| *of == key) {
            Some((_, step)) => StepMode::Replay(*step),
            None if self.times < STEPS_BEFORE_CAPTURE || self.full => StepMode::Plain,
            None => StepMode::Capture,
        }
    }

    /// Replays a graph; [`GraphCapture::Plain`] if the GPU has no memory for it.
    fn launch(&mut self, context: &Context, step: cu::CUgraphExec) -> Result<GraphCapture, CudaError> {
        // SAFETY: the graph is alive, and so are the kernels and the memory that it uses.
        let launched = unsafe { (context.api.cuGraphLaunch)(step, context.stream) };
        if !has_memory(launched) {
            return Ok(self.disable(context));
        }
        context.api.check("cuGraphLaunch", launched)?;
        Ok(GraphCapture::Done)
    }

    /// Frees all graphs and disables capture.
    fn disable(&mut self, context: &Context) -> GraphCapture {
        self.clear(context);
        self.full = true;
        self.unreported = true;
        GraphCapture::Plain
    }

    /// Enables capture again, after device memory was given back.
    pub(crate) fn given_back(&mut self) {
        self.full = false;
    }

    /// Returns the message that capture is disabled, once.
    pub(crate) fn note(&mut self) -> Option<String> {
        std::mem::take(&mut self.unreported).then(|| {
            "the GPU does not have enough free memory for a CUDA graph of the step; kernels are launched one by one, \
                with the same results"
                .to_owned()
        })
    }

    /// Ends a capture and, if it is `complete`, replays the graph. Returns [`GraphCapture::Plain`] if the GPU has no
    /// memory for the graph.
    pub(crate) fn recorded(&mut self, context: &Context, complete: bool) -> Result<GraphCapture, CudaError> {
        let api = context.api;
        let stream = context.stream;
        let Some(key) = self.capturing.take() else { return Ok(GraphCapture::Done) };
        let mut graph = ptr::null_mut();
        let mut step = ptr::null_mut();
        // SAFETY: a capture is active; the pointers are to locals.
        api.check("cuStreamEndCapture", unsafe { (api.cuStreamEndCapture)(stream, &mut graph) })?;
        // SAFETY: the graph is owned until it is destroyed; an instantiated graph does not depend on it.
        let code = unsafe {
            let code = if complete { (api.cuGraphInstantiateWithFlags)(&mut step, graph, 0) } else { 0 };
            (api.cuGraphDestroy)(graph);
            code
        };
        if !has_memory(code) {
            return Ok(self.disable(context));
        }
        api.check("cuGraphInstantiate", code)?;
        if !complete {
            return Ok(GraphCapture::Done);
        }
        self.instantiated.push((key, step));
        self.launch(context, step)
    }

    /// Drops all graphs and enables capture; no stream may still need them.
    pub(crate) fn clear(&mut self, context: &Context) {
        self.instantiated.drain(..).for_each(|(_, step)| forget(context, step));
        self.last = None;
        self.full = false;
    }
}

/// Whether a status code is anything but a lack of memory.
fn has_memory(code: c_int) -> bool {
    code != OUT_OF_MEMORY
}

fn forget(context: &Context, step: cu::CUgraphExec) {
    // SAFETY: the graph is owned; if it is running, the driver keeps what it needs. A failure is ignored.
    unsafe { (context.api.cuGraphExecDestroy)(step) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: u64) -> Counts {
        Counts { tokens, sequences: 1, packs: 1 }
    }

    #[test]
    fn counts_that_come_in_a_row_are_captured_and_kept() {
        let mut graphs = Graphs::default();
        let key = |tokens| (0, counts(tokens), 0);
        let steps = [7, 7, 7, 8, 7, 7, 7, 7].map(|tokens| graphs.next(key(tokens)));
        assert!(steps[..7].iter().all(|next| *next == StepMode::Plain), "{steps:?}");
        assert_eq!(steps[7], StepMode::Capture);
        let step = ptr::without_provenance_mut(8);
        graphs.instantiated.push((key(7), step));
        assert_eq!([graphs.next(key(7)), graphs.next(key(8))], [StepMode::Replay(step), StepMode::Plain]);
        assert_eq!(graphs.next((0, counts(7), 1)), StepMode::Plain, "another status word is another record");
    }

    #[test]
    fn a_full_card_is_said_once_and_not_asked_again() {
        let mut graphs = Graphs { full: true, unreported: true, ..Graphs::default() };
        assert!((0..20).all(|_| graphs.next((0, counts(7), 0)) == StepMode::Plain));
        let notes = [graphs.note(), graphs.note()];
        assert!(matches!(&notes, [Some(note), None] if note.contains("one by one")), "{notes:?}");
        graphs.given_back();
        assert_eq!(graphs.next((0, counts(7), 0)), StepMode::Capture);
    }

    #[test]
    fn only_want_of_memory_is_no_error() {
        assert_eq!([0, 1, 2, 700, 900].map(has_memory), [true, true, false, true, true]);
    }
}
