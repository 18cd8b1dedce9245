//! Traces when kernels and copies ran, by a pair of timing events around each. Invariant: while tracing is off, no
//! event is recorded and a launch only tests a flag.

use crate::CudaError;
use crate::api::Driver;
use crate::event::CudaEvent;
use cudarc::driver::sys as cu;
use plimsoll_exec::Span;
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// The stream of a traced operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamTrack {
    In,
    Compute,
    Out,
}

impl StreamTrack {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Compute => "compute",
            Self::Out => "out",
        }
    }
}

/// The recorder of traced operations and marks.
pub(crate) struct StreamTrace {
    api: &'static Driver,
    on: Cell<bool>,
    /// Name of the op whose kernels are being launched.
    op: Cell<&'static str>,
    noted: RefCell<Noted>,
}

/// Events recorded so far and not yet read.
#[derive(Default)]
struct Noted {
    began: Option<CudaEvent>,
    spans: Vec<(StreamTrack, String, CudaEvent, CudaEvent)>,
    /// Events that can be reused.
    spare: Vec<CudaEvent>,
    marks: Vec<CudaEvent>,
}

impl StreamTrace {
    pub(crate) fn new(api: &'static Driver) -> Self {
        Self { api, on: Cell::new(false), op: Cell::new(""), noted: RefCell::default() }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.get()
    }

    /// Switches tracing on or off and discards recorded operations; times count from the call that switches it on.
    pub(crate) fn set(&self, on: bool, stream: cu::CUstream) -> Result<(), CudaError> {
        let noted = &mut *self.noted.borrow_mut();
        for (.., start, end) in noted.spans.drain(..) {
            noted.spare.extend([start, end]);
        }
        if on {
            let began = CudaEvent::timing(self.api)?;
            began.record(stream)?;
            noted.began = Some(began);
        }
        self.on.set(on);
        Ok(())
    }

    /// Sets the op that the next kernels belong to.
    pub(crate) fn of_op(&self, op: &'static str) {
        self.op.set(op);
    }

    /// Calls `call`, which launches a kernel, and traces it as `op: name`.
    pub(crate) fn kernel(
        &self,
        stream: cu::CUstream,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let named = || match (self.op.get(), name()) {
            (op, name) if name == op => name,
            (op, name) => format!("{op}: {name}"),
        };
        self.span(StreamTrack::Compute, stream, named, call)
    }

    /// Calls `call`, which enqueues work in `stream`, and traces the time that this work takes.
    pub(crate) fn span(
        &self,
        track: StreamTrack,
        stream: cu::CUstream,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if !self.is_on() {
            return call();
        }
        let start = self.point(stream)?;
        call()?;
        let end = self.point(stream)?;
        self.noted.borrow_mut().spans.push((track, name(), start, end));
        Ok(())
    }

    fn point(&self, stream: cu::CUstream) -> Result<CudaEvent, CudaError> {
        let spare = self.noted.borrow_mut().spare.pop();
        let event = spare.map_or_else(|| CudaEvent::timing(self.api), Ok)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Returns the traced operations and removes them; the streams must be idle.
    pub(crate) fn take(&self) -> Result<Vec<Span>, CudaError> {
        let noted = &mut *self.noted.borrow_mut();
        let Some(began) = &noted.began else { return Ok(vec![]) };
        let mut spans = Vec::with_capacity(noted.spans.len());
        for (track, name, start, end) in noted.spans.drain(..) {
            spans.push(Span {
                track: track.name(),
                name,
                start: start.since(began)?,
                seconds: end.since(&start)?,
            });
            noted.spare.extend([start, end]);
        }
        Ok(spans)
    }

    /// Records mark `n` behind the work enqueued in `stream`.
    pub(crate) fn mark(&self, n: usize, stream: cu::CUstream) -> Result<(), CudaError> {
        let marks = &mut self.noted.borrow_mut().marks;
        while marks.len() <= n {
            marks.push(CudaEvent::timing(self.api)?);
        }
        marks[n].record(stream)
    }

    /// Adds the time between marks `i` and `i + 1` to `times[i]`; the stream must be idle.
    pub(crate) fn marked(&self, times: &mut [Duration]) -> Result<(), CudaError> {
        let marks = &self.noted.borrow().marks;
        for (time, two) in times.iter_mut().zip(marks.windows(2)) {
            *time += Duration::from_secs_f64(two[1].since(&two[0])?.max(0.0));
        }
        Ok(())
    }
}
