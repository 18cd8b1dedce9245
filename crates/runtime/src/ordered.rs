//! Jobs for several threads whose results come back in the order of the jobs. Invariant: what is in flight is bounded,
//! and an error is met in its place.

use crate::RuntimeError;
use data::limits::spawn;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a thread makes of a job.
pub type Worker<J, B> = Box<dyn FnMut(J) -> Result<B, RuntimeError> + Send>;

type Reply<B> = SyncSender<Result<B, RuntimeError>>;
type Slot<B> = Receiver<Result<B, RuntimeError>>;

/// Where jobs go.
pub struct Feed<J, B> {
    order: SyncSender<Slot<B>>,
    work: SyncSender<(J, Reply<B>)>,
}

/// Where results come from. Dropping it leaves the threads to end by themselves.
pub struct Results<B> {
    /// One receiver for each job, in order.
    slots: Receiver<Slot<B>>,
}

/// Nobody listens any more: stop quietly, they know why.
pub struct Gone;

/// Starts a thread for each worker. They end when the feed is dropped; results may be `depth` jobs behind.
pub fn start<J: Send + 'static, B: Send + 'static>(
    workers: Vec<Worker<J, B>>,
    depth: usize,
) -> Result<(Feed<J, B>, Results<B>), RuntimeError> {
    let (order, slots) = sync_channel(depth);
    let (work, jobs) = sync_channel::<(J, Reply<B>)>(workers.len());
    let jobs = Arc::new(Mutex::new(jobs));
    for mut worker in workers {
        let jobs = Arc::clone(&jobs);
        let work = move || {
            loop {
                // A poisoned lock means that another worker panicked while it waited: the receiver is still sound.
                let job = jobs.lock().unwrap_or_else(|e| e.into_inner()).recv();
                let Ok((job, reply)) = job else { return };
                // Nobody listens any more when the engine has failed.
                let _ = reply.send(worker(job));
            }
        };
        spawn("tokenizer", work).map_err(RuntimeError::thread("tokenizer"))?;
    }
    Ok((Feed { order, work }, Results { slots }))
}

impl<J, B> Feed<J, B> {
    /// A job behind the others; waits while too many are in flight.
    pub fn send(&self, job: J) -> Result<(), Gone> {
        let (reply, slot) = sync_channel(1);
        self.order.send(slot).map_err(|_| Gone)?;
        self.work.send((job, reply)).map_err(|_| Gone)
    }

    /// An error in the place of a job.
    pub fn fail(&self, error: RuntimeError) {
        let (reply, slot) = sync_channel(1);
        let _ = reply.send(Err(error));
        let _ = self.order.send(slot);
    }
}

impl<B> Results<B> {
    /// The next result in the order of jobs; `None` when the feed is gone. While there is none, `wait` is asked now and
    /// then, and its error ends the wait: a pipe may say nothing for hours.
    pub fn next(&self, wait: &mut dyn FnMut() -> Result<(), RuntimeError>) -> Result<Option<B>, RuntimeError> {
        let Some(slot) = receive(&self.slots, wait)? else { return Ok(None) };
        match receive(&slot, wait)? {
            Some(result) => result.map(Some),
            None => Err(RuntimeError::bug("a worker thread died")),
        }
    }
}

/// What comes next; `None` when nobody sends any more.
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
