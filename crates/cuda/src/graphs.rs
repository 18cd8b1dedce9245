//! Steps that were recorded, to be run again by one call. Invariant: a record is run only for the plan, counts and status
//! word it was made for, and all are forgotten when anything is prepared or the arena changes. Records take memory of the
//! card, up to 2 MiB each: only those of one plan and counts are kept, one for each open step, and only where they came
//! several times in a row, which packs of sequences of any length do not. A card without room for one runs the step by its
//! launches, which have the same bits.

use crate::CudaError;
use crate::context::Context;
use cudarc::driver::sys as cu;
use exec::Repeat;
use graph::Counts;
use std::ffi::c_int;
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
    /// Whether the card had no room for a record. None is tried again before the arena or what is prepared changes: a
    /// record that is made in vain takes as long as several steps.
    full: bool,
    /// Whether that is still to be said.
    unsaid: bool,
}

/// How a step runs.
#[derive(Debug, PartialEq)]
enum Next {
    /// By this record.
    Kept(cu::CUgraphExec),
    Record,
    Plain,
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
        match self.next(key) {
            Next::Kept(step) => return self.launch(context, step),
            Next::Plain => return Ok(Repeat::Plain),
            Next::Record => {}
        }
        let (plan, counts, _) = key;
        let others = self.kept.extract_if(.., |((p, c, _), _)| (*p, *c) != (plan, counts));
        others.for_each(|(_, step)| forget(context, step));
        let (api, stream) = (context.api, context.stream);
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and nothing is being recorded in it.
        api.check("cuStreamBeginCapture", unsafe { (api.cuStreamBeginCapture_v2)(stream, mode) })?;
        self.recording = Some(key);
        Ok(Repeat::Record)
    }

    /// Counts a step, and says how it runs.
    fn next(&mut self, key: Key) -> Next {
        let (plan, counts, _) = key;
        self.times = if self.last == Some((plan, counts)) { self.times + 1 } else { 1 };
        self.last = Some((plan, counts));
        match self.kept.iter().find(|(kept, _)| *kept == key) {
            Some((_, step)) => Next::Kept(*step),
            None if self.times < TIMES || self.full => Next::Plain,
            None => Next::Record,
        }
    }

    /// Runs a record; [`Repeat::Plain`] where the card has no room for what it needs.
    fn launch(&mut self, context: &Context, step: cu::CUgraphExec) -> Result<Repeat, CudaError> {
        // SAFETY: the record lives, and what it calls on too.
        let launched = unsafe { (context.api.cuGraphLaunch)(step, context.stream) };
        match has_room(launched) {
            true => context.api.check("cuGraphLaunch", launched).map(|()| Repeat::Done),
            false => Ok(self.without_room(context)),
        }
    }

    /// Gives back what records hold, and makes no more.
    fn without_room(&mut self, context: &Context) -> Repeat {
        self.clear(context);
        (self.full, self.unsaid) = (true, true);
        Repeat::Plain
    }

    /// The card has room again.
    pub(crate) fn given_back(&mut self) {
        self.full = false;
    }

    /// What has not been said yet.
    pub(crate) fn note(&mut self) -> Option<String> {
        std::mem::take(&mut self.unsaid).then(|| {
            "the card has no room for the record of a step (a CUDA graph); steps are launched kernel by kernel, with the \
             same bits"
                .to_owned()
        })
    }

    /// Ends a record, and runs it unless it broke off; [`Repeat::Plain`] where the card has no room for it.
    pub(crate) fn recorded(&mut self, context: &Context, whole: bool) -> Result<Repeat, CudaError> {
        let (api, stream) = (context.api, context.stream);
        let (Some(key), mut graph, mut step) = (self.recording.take(), ptr::null_mut(), ptr::null_mut()) else {
            return Ok(Repeat::Done);
        };
        // SAFETY: recording has begun; pointers are to locals.
        api.check("cuStreamEndCapture", unsafe { (api.cuStreamEndCapture)(stream, &mut graph) })?;
        // SAFETY: the graph is ours until it is destroyed; what was made of it does not need it.
        let code = unsafe {
            let code = if whole { (api.cuGraphInstantiateWithFlags)(&mut step, graph, 0) } else { 0 };
            (api.cuGraphDestroy)(graph);
            code
        };
        if !has_room(code) {
            return Ok(self.without_room(context));
        }
        api.check("cuGraphInstantiate", code)?;
        if !whole {
            return Ok(Repeat::Done);
        }
        self.kept.push((key, step));
        self.launch(context, step)
    }

    /// Forgets all; the stream is idle, or its work needs no record.
    pub(crate) fn clear(&mut self, context: &Context) {
        self.kept.drain(..).for_each(|(_, step)| forget(context, step));
        self.last = None;
        self.full = false;
    }
}

/// Whether a call did not fail for want of memory (cuda.h, `CUDA_ERROR_OUT_OF_MEMORY`).
fn has_room(code: c_int) -> bool {
    code != 2
}

fn forget(context: &Context, step: cu::CUgraphExec) {
    // SAFETY: it is ours; while it runs, the driver keeps what it needs. A failure changes nothing here.
    unsafe { (context.api.cuGraphExecDestroy)(step) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: u64) -> Counts {
        Counts { tokens, sequences: 1 }
    }

    #[test]
    fn counts_that_come_in_a_row_are_recorded_and_kept() {
        let mut graphs = Graphs::default();
        let key = |tokens| (0, counts(tokens), 0);
        let steps = [7, 7, 7, 8, 7, 7, 7, 7].map(|tokens| graphs.next(key(tokens)));
        assert!(steps[..7].iter().all(|next| *next == Next::Plain), "{steps:?}");
        assert_eq!(steps[7], Next::Record);
        let step = ptr::without_provenance_mut(8);
        graphs.kept.push((key(7), step));
        assert_eq!([graphs.next(key(7)), graphs.next(key(8))], [Next::Kept(step), Next::Plain]);
        assert_eq!(graphs.next((0, counts(7), 1)), Next::Plain, "another status word is another record");
    }

    #[test]
    fn a_full_card_is_said_once_and_not_asked_again() {
        let mut graphs = Graphs { full: true, unsaid: true, ..Graphs::default() };
        assert!((0..20).all(|_| graphs.next((0, counts(7), 0)) == Next::Plain));
        let notes = [graphs.note(), graphs.note()];
        assert!(matches!(&notes, [Some(note), None] if note.contains("kernel by kernel")), "{notes:?}");
        graphs.given_back();
        assert_eq!(graphs.next((0, counts(7), 0)), Next::Record);
    }

    #[test]
    fn only_want_of_memory_is_no_error() {
        assert_eq!([0, 1, 2, 700, 900].map(has_room), [true, true, false, true, true]);
    }
}
