//! What a device that does everything at once keeps for others: bytes that were fetched, and spans by the host's clock.
//! Invariant: buffers of collected bytes are used again, so fetching allocates only until it has seen the widest, and no more
//! than that.

use crate::device::{DeviceError, Span, Ticket, Tracer};
use graph::Bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes that were fetched and not yet collected, oldest first.
#[derive(Debug, Default)]
pub struct Fetched {
    /// The number of the next.
    next: u64,
    open: VecDeque<Vec<u8>>,
    /// Buffers of those that were collected; the oldest is used next, so equal steps find equal buffers.
    spare: VecDeque<Vec<u8>>,
}

impl Fetched {
    /// Keeps a copy.
    pub fn put(&mut self, bytes: &[u8]) -> Ticket {
        let mut buffer = self.spare.pop_front().unwrap_or_default();
        buffer.clear();
        // To the byte: what is held of a step is in the ledger.
        buffer.reserve_exact(bytes.len());
        buffer.extend_from_slice(bytes);
        self.open.push_back(buffer);
        self.next += 1;
        Ticket(self.next - 1)
    }

    /// Gives the oldest copy.
    pub fn take(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        let oldest = self.next - self.open.len() as u64;
        let open = self.open.front().filter(|bytes| ticket.0 == oldest && bytes.len() == out.len());
        out.copy_from_slice(open.ok_or_else(|| ticket.refused(oldest))?);
        self.spare.extend(self.open.pop_front());
        Ok(())
    }
}

/// Spans since tracing began; none while it is off.
#[derive(Debug, Default)]
pub struct Clock {
    began: Option<Instant>,
    spans: Vec<Span>,
}

impl Clock {
    /// The start of what [`Clock::note`] will end.
    pub fn start(&self) -> Option<Instant> {
        self.began.map(|_| Instant::now())
    }

    /// The end of what has `start`ed.
    pub fn note(&mut self, start: Option<Instant>, track: &'static str, name: &str) {
        if let (Some(began), Some(start)) = (self.began, start) {
            let (from, seconds) = ((start - began).as_secs_f64(), start.elapsed().as_secs_f64());
            self.spans.push(Span { track, name: name.to_owned(), start: from, seconds });
        }
    }

    /// The same of a copy.
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
