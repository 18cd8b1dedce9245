//! The thread of a device, and the queue from which it takes its steps. Invariant: as many steps are open as the device
//! has room for, but none that an idle device could begin.

use super::replicas::{Done, Event, Work};
use exec::{Data, DeviceError, Executor, Submitted};
use plan::{InputId, OutputId};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The queue.
pub(super) struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    queue: VecDeque<Work<T>>,
    /// Lanes with no open step.
    idle: usize,
    closed: bool,
}

impl<T> Shared<T> {
    pub(super) fn new(lanes: usize) -> Self {
        let state = State { queue: VecDeque::new(), idle: lanes, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A panic of another thread leaves the queue as it was before or after one of these short changes.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, put: impl FnOnce(&mut VecDeque<Work<T>>)) {
        put(&mut self.state().queue);
        self.changed.notify_all();
    }

    pub(super) fn clear(&self) -> Vec<Work<T>> {
        self.state().queue.drain(..).collect()
    }

    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.queue.clear();
        self.changed.notify_all();
    }

    /// The next step for a lane with nothing open, waited for; `None` when there will be no more.
    fn first(&self) -> Option<Work<T>> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(work) = state.queue.pop_front() {
                state.idle -= 1;
                return Some(work);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next step for a lane that has others open: what idle lanes will take is left to them.
    fn another(&self) -> Option<Work<T>> {
        let mut state = self.state();
        if state.queue.len() > state.idle { state.queue.pop_front() } else { None }
    }

    /// A lane has nothing open any more.
    fn is_idle(&self) {
        self.state().idle += 1;
    }

    /// A lane ends whose device failed; its steps come before the others.
    fn hand_back(&self, works: Vec<Work<T>>) {
        self.put(|queue| works.into_iter().rev().for_each(|work| queue.push_front(work)));
    }
}

/// The thread of a device.
pub(super) struct Replica<T> {
    number: usize,
    executor: Executor,
    shared: Arc<Shared<T>>,
    events: Sender<Event<T>>,
    /// Oldest first.
    open: VecDeque<(Work<T>, Submitted)>,
    /// When the oldest open step had the device for itself.
    since: Instant,
}

impl<T> Replica<T> {
    pub(super) fn new(
        number: usize,
        executor: Executor,
        shared: Arc<Shared<T>>,
        events: Sender<Event<T>>,
    ) -> Self {
        Self { number, executor, shared, events, open: VecDeque::new(), since: Instant::now() }
    }
}

/// Why a step did not come to its end, and the step.
struct Failed<T>(DeviceError, Box<Work<T>>);

impl<T: Send> Replica<T> {
    pub(super) fn run(mut self) -> Option<Executor> {
        match catch_unwind(AssertUnwindSafe(|| self.work())) {
            Ok(true) => Some(self.executor),
            Ok(false) => None,
            Err(panic) => {
                let _ = self.events.send(Event::Panicked(panic));
                None
            }
        }
    }

    /// Until the queue is closed: as many steps are open as the executor has room for. False where the device failed.
    fn work(&mut self) -> bool {
        loop {
            let next = match self.open.len() {
                0 => match self.shared.first() {
                    None => return true,
                    work => work,
                },
                open if open < self.executor.depth() => self.shared.another(),
                _ => None,
            };
            let done = match next {
                Some(work) => self.begin(work),
                None => self.end(),
            };
            match done {
                Ok(()) => {}
                Err(Failed(error, work)) if is_of_the_device(&error) => {
                    self.retire(error, *work);
                    return false;
                }
                Err(Failed(error, _)) => {
                    let _ = self.events.send(Event::Refused(error));
                    self.ended();
                }
            }
        }
    }

    fn begin(&mut self, work: Work<T>) -> Result<(), Failed<T>> {
        if self.open.is_empty() {
            self.since = Instant::now();
        }
        let inputs: Vec<(InputId, Data<'_>)> =
            work.inputs.iter().map(|(input, values)| (*input, values.data())).collect();
        let outputs: Vec<(OutputId, usize)> =
            work.outputs.iter().map(|output| (output.id, output.elements(work.counts))).collect();
        match self.executor.submit(work.plan, &inputs, work.counts, &outputs) {
            Ok(step) => {
                self.open.push_back((work, step));
                Ok(())
            }
            Err(error) => Err(Failed(error, Box::new(work))),
        }
    }

    /// Waits for the oldest open step.
    fn end(&mut self) -> Result<(), Failed<T>> {
        let Some((mut work, step)) = self.open.pop_front() else { return Ok(()) };
        work.values.resize_with(work.outputs.len(), Vec::new);
        if let Err(error) = self.executor.collect(step, &mut work.values) {
            return Err(Failed(error, Box::new(work)));
        }
        let now = Instant::now();
        let seconds = now.duration_since(self.since).as_secs_f64();
        self.since = now;
        self.ended();
        // Nobody listens any more when the run has failed.
        let (lane, done) = (self.number, Done { work, seconds });
        let (given_back, note) = (self.executor.given_back(), self.executor.note());
        let _ = self.events.send(Event::Done { lane, done, given_back, note });
        Ok(())
    }

    /// A step is not open any more.
    fn ended(&self) {
        if self.open.is_empty() {
            self.shared.is_idle();
        }
    }

    /// Hands back what is open. The step that failed was the oldest or the youngest of it; a queue promises no order.
    fn retire(&mut self, error: DeviceError, work: Work<T>) {
        let works: Vec<Work<T>> =
            std::iter::once(work).chain(self.open.drain(..).map(|(work, _)| work)).collect();
        let (lane, handed_back) = (self.number, works.len());
        self.shared.hand_back(works);
        let _ = self.events.send(Event::Retired { lane, error, handed_back });
    }
}

/// Whether another device may do better. What a kernel says about its data, or a file about its weights, would be said
/// again.
fn is_of_the_device(error: &DeviceError) -> bool {
    matches!(error, DeviceError::Machine { .. } | DeviceError::OutOfMemory { .. })
}
