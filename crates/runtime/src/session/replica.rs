//! Device thread, and the queue from which the device threads take steps. Invariant: each device keeps up to its
//! pipeline depth of steps in flight, but leaves in the queue a step that an idle device could start.

use super::replicas::{CompletedWork, ReplicaEvent, StepWork};
use plimsoll_exec::{Data, DeviceError, Executor, Submitted};
use plimsoll_plan::{InputId, OutputId};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Step queue shared by the device threads.
pub(super) struct SharedQueue<T> {
    state: Mutex<QueueState<T>>,
    /// Signalled when steps are added and when the queue is closed.
    changed: Condvar,
}

struct QueueState<T> {
    /// Waiting steps, next first.
    queue: VecDeque<StepWork<T>>,
    /// Number of devices without in-flight steps.
    idle: usize,
    /// Whether the threads shall end.
    closed: bool,
    /// Whether the session answers a lack of memory with smaller steps. Otherwise the device fails.
    gives_way: bool,
    /// The last request for a size of steps.
    resize: ResizeRequest,
}

/// Request that all devices use a size of steps.
#[derive(Clone, Copy, Default)]
struct ResizeRequest {
    /// Number of the size.
    size: usize,
    /// Number of the request, from 1; 0 before the first. Two requests for one size are answered separately.
    number: u64,
}

/// Next task of a device without in-flight steps.
enum ReplicaTask<T> {
    Step(StepWork<T>),
    /// Use the size of this number.
    Resize(usize),
}

impl<T> SharedQueue<T> {
    pub(super) fn new(replicas: usize) -> Self {
        let state = QueueState {
            queue: VecDeque::new(),
            idle: replicas,
            closed: false,
            gives_way: false,
            resize: ResizeRequest::default(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the state. A poisoned lock is usable: the critical sections are short and leave the queue consistent.
    fn state(&self) -> MutexGuard<'_, QueueState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the queue through `put` and wakes the device threads.
    pub(super) fn put(&self, put: impl FnOnce(&mut VecDeque<StepWork<T>>)) {
        put(&mut self.state().queue);
        self.changed.notify_all();
    }

    /// Removes and returns all waiting steps.
    pub(super) fn clear(&self) -> Vec<StepWork<T>> {
        self.state().queue.drain(..).collect()
    }

    /// Drops all waiting steps and makes the device threads end.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.queue.clear();
        self.changed.notify_all();
    }

    /// Sets whether a device that lacks memory returns its steps instead of failing.
    pub(super) fn set_gives_way(&self, gives_way: bool) {
        self.state().gives_way = gives_way;
    }

    fn gives_way(&self) -> bool {
        self.state().gives_way
    }

    /// Requests that every device uses size number `size`; each answers with [`ReplicaEvent::Resized`].
    pub(super) fn resize(&self, size: usize) {
        let mut state = self.state();
        state.resize = ResizeRequest { size, number: state.resize.number + 1 };
        self.changed.notify_all();
    }

    /// Waits for the next task of a device without in-flight steps, which has answered `answered` requests for a size;
    /// `None` after [`SharedQueue::close`].
    fn first(&self, answered: &mut u64) -> Option<ReplicaTask<T>> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            // Before the queue: steps in it are planned for the new size.
            if state.resize.number > *answered {
                *answered = state.resize.number;
                return Some(ReplicaTask::Resize(state.resize.size));
            }
            if let Some(work) = state.queue.pop_front() {
                state.idle -= 1;
                return Some(ReplicaTask::Step(work));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a further step for a device that already has one in flight. Leaves one step in the queue for each idle
    /// device.
    fn another(&self) -> Option<StepWork<T>> {
        let mut state = self.state();
        // Without the reserve, near the end of the input one device would hold two steps while another has none.
        if state.queue.len() > state.idle { state.queue.pop_front() } else { None }
    }

    /// Records that a device has no in-flight steps.
    fn is_idle(&self) {
        self.state().idle += 1;
    }

    /// Returns the steps of a failed device to the head of the queue, in their order.
    fn hand_back(&self, works: Vec<StepWork<T>>) {
        self.put(|queue| works.into_iter().rev().for_each(|work| queue.push_front(work)));
    }
}

/// One device with its thread's state.
pub(super) struct Replica<T> {
    /// Index of the device.
    number: usize,
    executor: Executor,
    shared: Arc<SharedQueue<T>>,
    events: Sender<ReplicaEvent<T>>,
    /// In-flight steps, oldest first.
    open: VecDeque<(StepWork<T>, Submitted)>,
    /// Number of requests for a size that were answered.
    answered: u64,
    /// Time since which the oldest in-flight step has had the device for itself: when it was submitted to an idle device,
    /// or when the step before it completed. The seconds of steps then sum to the time in which the device was busy.
    since: Instant,
}

impl<T> Replica<T> {
    pub(super) fn new(
        number: usize,
        executor: Executor,
        shared: Arc<SharedQueue<T>>,
        events: Sender<ReplicaEvent<T>>,
    ) -> Self {
        Self { number, executor, shared, events, open: VecDeque::new(), answered: 0, since: Instant::now() }
    }
}

/// A step that could not be completed, with its error.
struct Failed<T>(DeviceError, Box<StepWork<T>>);

impl<T: Send> Replica<T> {
    /// Runs the device thread; returns the executor unless the device failed or the thread panicked.
    pub(super) fn run(mut self) -> Option<Executor> {
        match catch_unwind(AssertUnwindSafe(|| self.work())) {
            Ok(true) => Some(self.executor),
            Ok(false) => None,
            Err(panic) => {
                let _ = self.events.send(ReplicaEvent::Panicked(panic));
                None
            }
        }
    }

    /// Processes steps until the queue is closed, with up to the executor's depth in flight. Returns false if the
    /// device failed.
    fn work(&mut self) -> bool {
        loop {
            let next = match self.open.len() {
                0 => match self.shared.first(&mut self.answered) {
                    None => return true,
                    Some(ReplicaTask::Resize(size)) => {
                        self.resize(size);
                        continue;
                    }
                    Some(ReplicaTask::Step(work)) => Some(work),
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
                Err(Failed(error, work)) if error.is_out_of_memory() && self.shared.gives_way() => {
                    self.lacks_memory(error, *work);
                }
                Err(Failed(error, work)) if is_of_the_device(&error) => {
                    self.retire(error, *work);
                    return false;
                }
                Err(Failed(error, _)) => {
                    let _ = self.events.send(ReplicaEvent::Refused(error));
                    self.ended();
                }
            }
        }
    }

    /// Changes the size of the steps and reports the result.
    fn resize(&mut self, size: usize) {
        let result = self.executor.use_size(size);
        let _ = self.events.send(ReplicaEvent::Resized { replica: self.number, result });
    }

    /// Returns the step that failed and the in-flight steps to the session, which repeats them as smaller steps.
    fn lacks_memory(&mut self, error: DeviceError, work: StepWork<T>) {
        let mut works = vec![work];
        while let Some((work, step)) = self.open.pop_front() {
            // The device returns outputs in order, so they are collected, and dropped with their errors.
            let mut values = vec![vec![]; work.outputs.len()];
            let _ = self.executor.collect(step, &mut values);
            works.push(work);
        }
        self.ended();
        let _ = self.events.send(ReplicaEvent::LacksMemory { replica: self.number, error, works });
    }

    /// Submits a step to the device.
    fn begin(&mut self, work: StepWork<T>) -> Result<(), Failed<T>> {
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

    /// Waits for the oldest in-flight step and reports it.
    fn end(&mut self) -> Result<(), Failed<T>> {
        let Some((mut work, step)) = self.open.pop_front() else { return Ok(()) };
        work.values.resize_with(work.outputs.len(), Vec::new);
        if let Err(error) = self.executor.collect(step, &mut work.values) {
            return Err(Failed(error, Box::new(work)));
        }
        let now = Instant::now();
        let seconds = now.duration_since(self.since).as_secs_f64();
        self.since = now;
        // Before the event: the session answers it with the next step, and a busy device leaves that step in the queue
        // only for a device that counts as idle.
        self.ended();
        // Sending fails if the run has failed and dropped the receiver.
        let replica = self.number;
        let done = CompletedWork { work, seconds };
        let given_back = self.executor.given_back();
        let note = self.executor.note();
        let _ = self.events.send(ReplicaEvent::Done { replica, done, given_back, note });
        Ok(())
    }

    /// Marks the device idle if no step is in flight.
    fn ended(&self) {
        if self.open.is_empty() {
            self.shared.is_idle();
        }
    }

    /// Returns all in-flight steps to the queue and reports the failed device. The failed step goes first: it was the
    /// oldest or the youngest of them, and the queue guarantees no order.
    fn retire(&mut self, error: DeviceError, work: StepWork<T>) {
        let works: Vec<StepWork<T>> =
            std::iter::once(work).chain(self.open.drain(..).map(|(work, _)| work)).collect();
        let replica = self.number;
        let handed_back = works.len();
        // Before the event: when no device is left, the session empties the queue and sets its count of in-flight steps
        // to 0; `cancel` would later subtract steps that come back after that. The device is not counted as idle again:
        // the others would leave a step in the queue that it never takes.
        self.shared.hand_back(works);
        let _ = self.events.send(ReplicaEvent::Retired { replica, error, handed_back });
    }
}

/// Whether the error concerns the device, so that another device may succeed. Kernel errors about data and file errors
/// about weights would recur on any device.
fn is_of_the_device(error: &DeviceError) -> bool {
    matches!(
        error,
        DeviceError::Machine { .. } | DeviceError::OutOfMemory { .. } | DeviceError::Exhausted { .. }
    )
}
