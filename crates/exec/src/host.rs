//! Spans of launches and copies that synchronous devices measure with the host's clock. Invariant: while recording is off,
//! nothing is measured.

use crate::device::{DeviceError, Span, Tracer};
use plimsoll_graph::Bytes;
use std::time::{Duration, Instant};

/// Spans recorded since tracing was turned on; none while it is off.
#[derive(Debug, Default)]
pub struct HostClock {
    began: Option<Instant>,
    spans: Vec<Span>,
}

impl HostClock {
    /// Start time for [`HostClock::note`]; `None` while tracing is off.
    pub fn start(&self) -> Option<Instant> {
        self.began.map(|_| Instant::now())
    }

    /// Records the span from `start` to now.
    pub fn note(&mut self, start: Option<Instant>, track: &'static str, name: &str) {
        if let (Some(began), Some(start)) = (self.began, start) {
            let from = (start - began).as_secs_f64();
            let seconds = start.elapsed().as_secs_f64();
            self.spans.push(Span { track, name: name.to_owned(), start: from, seconds });
        }
    }

    /// Records a copy from `start` to now.
    pub fn copied(&mut self, start: Option<Instant>, track: &'static str, bytes: Bytes) {
        if start.is_some() {
            self.note(start, track, &format!("copy {track}, {bytes}"));
        }
    }
}

impl Tracer for HostClock {
    fn set(&mut self, on: bool) -> Result<(), DeviceError> {
        self.began = on.then(Instant::now);
        self.spans.clear();
        Ok(())
    }

    fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        Ok(std::mem::take(&mut self.spans))
    }

    fn mark(&mut self, _: usize) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn marked(&mut self, _: &mut [Duration]) -> Result<(), DeviceError> {
        Ok(())
    }
}
