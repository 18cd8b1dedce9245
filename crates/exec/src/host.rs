//! Host-side bookkeeping of synchronous devices: fetched bytes that wait to be collected, and spans measured with the
//! host's clock. Invariant: buffers of collected bytes are reused, so fetching allocates only until the largest range
//! has been seen, and never more than that.

use crate::device::{DeviceError, Span, Ticket, Tracer};
use plimsoll_graph::Bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes that were fetched and not yet collected, oldest first.
#[derive(Debug, Default)]
pub struct Fetched {
    /// Number of the next ticket.
    next: u64,
    open: VecDeque<Vec<u8>>,
    /// Buffers of collected ranges. The buffer that was returned first is reused first, so in equal steps each range
    /// finds a buffer of its size.
    spare: VecDeque<Vec<u8>>,
}

impl Fetched {
    /// Stores a copy of `bytes` until it is collected.
    pub fn put(&mut self, bytes: &[u8]) -> Ticket {
        let mut buffer = self.spare.pop_front().unwrap_or_default();
        buffer.clear();
        // Exactly this size: the memory ledger counts these bytes.
        buffer.reserve_exact(bytes.len());
        buffer.extend_from_slice(bytes);
        self.open.push_back(buffer);
        self.next += 1;
        Ticket(self.next - 1)
    }

    /// Copies the oldest stored bytes to `out`. `Err` unless `ticket` is the oldest and `out` has its length.
    pub fn take(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        let oldest = self.next - self.open.len() as u64;
        let open = self.open.front().filter(|bytes| ticket.0 == oldest && bytes.len() == out.len());
        out.copy_from_slice(open.ok_or_else(|| ticket.refused(oldest))?);
        self.spare.extend(self.open.pop_front());
        Ok(())
    }
}

/// Spans recorded since tracing was turned on; none while it is off.
#[derive(Debug, Default)]
pub struct Clock {
    began: Option<Instant>,
    spans: Vec<Span>,
}

impl Clock {
    /// Start time for [`Clock::note`]; `None` while tracing is off.
    pub fn start(&self) -> Option<Instant> {
        self.began.map(|_| Instant::now())
    }

    /// Records the span from `start` to now.
    pub fn note(&mut self, start: Option<Instant>, track: &'static str, name: &str) {
        if let (Some(began), Some(start)) = (self.began, start) {
            let (from, seconds) = ((start - began).as_secs_f64(), start.elapsed().as_secs_f64());
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

impl Tracer for Clock {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_as_large_as_the_widest() {
        let mut fetched = Fetched::default();
        for bytes in [100, 150, 151, 20] {
            let ticket = fetched.put(&vec![7; bytes]);
            fetched.take(ticket, &mut vec![0; bytes]).expect("the oldest");
        }
        assert_eq!(fetched.spare.iter().map(Vec::capacity).collect::<Vec<_>>(), [151]);
    }
}
