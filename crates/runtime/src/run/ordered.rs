//! Runs jobs on several threads and returns their results in the order of the jobs. Invariant: the number of jobs in
//! flight is bounded, and an error is returned at the position of its job.

use crate::RuntimeError;
use plimsoll_data::limits::spawn;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Function with which a thread computes the result of a job.
pub type JobWorker<J, B> = Box<dyn FnMut(J) -> Result<B, RuntimeError> + Send>;

/// Sends a job's result.
type ResultSender<B> = SyncSender<Result<B, RuntimeError>>;
/// Receives a job's result.
type ResultReceiver<B> = Receiver<Result<B, RuntimeError>>;

/// Sender of jobs.
pub struct JobSender<J, B> {
    /// Receivers of results in job order; the channel's capacity bounds the jobs in flight.
    order: SyncSender<ResultReceiver<B>>,
    /// Jobs for the worker threads, each with the sender of its result.
    work: SyncSender<(J, ResultSender<B>)>,
}

/// Receiver of results in job order. Dropping it does not join the worker threads.
pub struct OrderedResults<B> {
    /// One receiver for each job, in job order.
    slots: Receiver<ResultReceiver<B>>,
}

/// Error of a closed channel: the receiving side is gone and has reported its own error, so the sender just stops.
pub struct Gone;

/// Starts one thread for each worker. The threads end when the [`JobSender`] is dropped; up to `depth` results may be
/// pending.
pub fn start<J: Send + 'static, B: Send + 'static>(
    workers: Vec<JobWorker<J, B>>,
    depth: usize,
) -> Result<(JobSender<J, B>, OrderedResults<B>), RuntimeError> {
    let (order, slots) = sync_channel(depth);
    let (work, jobs) = sync_channel::<(J, ResultSender<B>)>(workers.len());
    let jobs = Arc::new(Mutex::new(jobs));
    for mut worker in workers {
        let jobs = Arc::clone(&jobs);
        spawn("tokenizer", move || {
            loop {
                // A poisoned lock means that another worker panicked while waiting for a job: the receiver is still
                // usable.
                let job = jobs.lock().unwrap_or_else(|e| e.into_inner()).recv();
                let Ok((job, reply)) = job else { return };
                // Sending fails if the receiver was dropped after an error; the result is then not needed.
                let _ = reply.send(worker(job));
            }
        })
        .map_err(RuntimeError::thread("tokenizer"))?;
    }
    Ok((JobSender { order, work }, OrderedResults { slots }))
}

impl<J, B> JobSender<J, B> {
    /// Enqueues a job; blocks while the maximum number of jobs is in flight.
    pub fn send(&self, job: J) -> Result<(), Gone> {
        let (reply, slot) = sync_channel(1);
        // The slot goes first: the order of slots is the order of results, whichever worker takes the job.
        self.order.send(slot).map_err(|_| Gone)?;
        self.work.send((job, reply)).map_err(|_| Gone)
    }

    /// Enqueues an error as the result at this position in job order.
    pub fn fail(&self, error: RuntimeError) {
        let (reply, slot) = sync_channel(1);
        let _ = reply.send(Err(error));
        let _ = self.order.send(slot);
    }
}

impl<B> OrderedResults<B> {
    /// Returns the next result in job order; `None` when the feed was dropped and all results were received. While no
    /// result is available, `wait` is called every 50 ms and its error is returned: an input pipe may deliver nothing
    /// for hours.
    pub fn next(&self, wait: &mut dyn FnMut() -> Result<(), RuntimeError>) -> Result<Option<B>, RuntimeError> {
        let Some(slot) = receive(&self.slots, wait)? else { return Ok(None) };
        match receive(&slot, wait)? {
            Some(result) => result.map(Some),
            None => Err(RuntimeError::bug("a worker thread died")),
        }
    }
}

/// Receives the next value, calling `wait` at every timeout; `None` when all senders were dropped.
fn receive<T>(
    from: &Receiver<T>,
    wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
) -> Result<Option<T>, RuntimeError> {
    const PATIENCE: Duration = Duration::from_millis(50);
    loop {
        match from.recv_timeout(PATIENCE) {
            Ok(found) => return Ok(Some(found)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => wait()?,
        }
    }
}
