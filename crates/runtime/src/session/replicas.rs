//! Distributes the steps of a session over devices: one thread per device takes steps from one queue. Invariant: a step
//! that was sent is returned exactly once, with its outputs, whichever device computed it; a failing device returns its
//! steps to the queue and the other devices continue.

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

use super::bounds::in_flight_target;
use super::replica::{Replica, SharedQueue};
use crate::{Level, Observer, RuntimeError};
use plimsoll_data::limits::spawn;
use plimsoll_exec::{Data, DeviceError, DeviceInfo, Executor, Prepared};
use plimsoll_graph::{Bytes, Counts, Dim};
use plimsoll_plan::{InputId, OutputId, Program};
use std::any::Any;
use std::error::Error;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Callback called periodically while waiting for a step; an error ends the wait.
pub type StopCheck<'a> = &'a dyn Fn() -> Result<(), RuntimeError>;

/// Interval between calls of [`StopCheck`].
const PATIENCE: Duration = Duration::from_millis(50);

/// An output of a plan; its number of rows depends on a step's counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOutput {
    /// The output's id.
    pub id: OutputId,
    /// Its name in the plan's graph.
    pub name: String,
    /// Whether there is a row per sequence or per token.
    pub per: RowUnit,
    /// Columns of a row.
    pub width: usize,
}

/// Row unit of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUnit {
    /// One row per sequence.
    Sequence,
    /// One row per token.
    Token,
}

impl StepOutput {
    /// The outputs of a plan, in the order of its graph.
    pub(super) fn of(program: &Program, plan: usize) -> Vec<Self> {
        let graph = &program.plans()[plan].1.graph;
        graph
            .outputs
            .iter()
            .map(|(role, value)| {
                let spec = graph.spec(*value);
                let (per, columns) = match spec.shape.first() {
                    Some(Dim::Tokens(_)) => (RowUnit::Token, &spec.shape[1..]),
                    Some(Dim::Sequences(_)) => (RowUnit::Sequence, &spec.shape[1..]),
                    // No output of a model has a row for each pack.
                    Some(Dim::Fixed(_) | Dim::Packs(_)) | None => (RowUnit::Sequence, &spec.shape[..]),
                };
                let width = columns.iter().filter_map(|dim| dim.fixed()).product::<u64>() as usize;
                Self { id: OutputId { plan, value: *value }, name: role.to_string(), per, width }
            })
            .collect()
    }

    /// Number of elements of the output in a step with these counts.
    pub(super) fn elements(&self, counts: Counts) -> usize {
        let rows = match self.per {
            RowUnit::Sequence => counts.sequences,
            RowUnit::Token => counts.tokens,
        };
        rows as usize * self.width
    }
}

/// A step of a plan, with its input and output buffers.
pub(super) struct StepWork<T> {
    /// Index of the plan in the program.
    pub(super) plan: usize,
    /// The inputs, each with exactly the elements that `counts` implies.
    pub(super) inputs: Vec<(InputId, InputValues)>,
    /// Numbers of tokens and sequences of the step.
    pub(super) counts: Counts,
    /// The outputs to read.
    pub(super) outputs: Arc<[StepOutput]>,
    /// One vector per output: reusable buffers until the step is done, then the output values.
    pub(super) values: Vec<Vec<f32>>,
    /// The client's identification of the step.
    pub(super) tag: T,
}

/// Values of an input.
pub(super) enum InputValues {
    /// Integers, such as token ids.
    I32(Vec<i32>),
    /// Start and end of each sequence: (S, 2).
    Spans(Vec<[i32; 2]>),
    /// f32 values.
    F32(Vec<f32>),
}

impl InputValues {
    pub(super) fn data(&self) -> Data<'_> {
        match self {
            Self::I32(values) => Data::I32(values),
            Self::Spans(spans) => Data::I32(bytemuck::cast_slice(spans)),
            Self::F32(values) => Data::F32(values),
        }
    }

    /// The values if they are f32.
    pub(super) fn into_f32(self) -> Option<Vec<f32>> {
        match self {
            Self::F32(rows) => Some(rows),
            Self::I32(_) | Self::Spans(_) => None,
        }
    }
}

/// A completed step.
pub(super) struct CompletedWork<T> {
    /// The step, with its output values.
    pub(super) work: StepWork<T>,
    /// Device time in seconds.
    pub(super) seconds: f64,
}

/// Work done by a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Name of the device.
    pub name: String,
    /// Properties of the device, beside the plan, on which result bits depend.
    pub arithmetic: String,
    /// Number of steps computed.
    pub steps: u64,
    /// Number of tokens in these steps.
    pub tokens: u64,
    /// Seconds with at least one step in flight.
    pub busy: f64,
    /// Bytes no longer used by any plan that the device unmapped between steps.
    pub given_back: Bytes,
    /// Error with which the device failed and was excluded; `None` while it works.
    pub failed: Option<String>,
}

/// The devices that share the steps of a program.
pub(super) struct ReplicaPool<T> {
    /// The step queue.
    shared: Arc<SharedQueue<T>>,
    /// Events of the device threads.
    events: Receiver<ReplicaEvent<T>>,
    threads: Vec<JoinHandle<Option<Executor>>>,
    programs: Prepared,
    /// Index of the program in use.
    size: usize,
    /// Work done by each device, by device index.
    usage: Vec<Usage>,
    /// Number of steps that were sent and not returned.
    in_flight: usize,
    /// Number of in-flight steps at which every device has its next step ready when it completes one.
    target: usize,
    /// Number of working devices.
    working: usize,
    /// Warnings not yet taken by the client.
    warnings: Vec<String>,
    /// Names of the failed devices, in the order in which they failed.
    failed: Vec<String>,
    /// Error of the device that failed first.
    first: Option<Arc<DeviceError>>,
}

/// Result that a device returned to the session.
pub(super) enum Returned<T> {
    /// A completed step.
    Done(CompletedWork<T>),
    /// Steps that were not computed, because the device lacks memory for steps of this size.
    LacksMemory(DeviceError, Vec<StepWork<T>>),
}

/// Event reported by a device thread.
pub(super) enum ReplicaEvent<T> {
    Done {
        replica: usize,
        done: CompletedWork<T>,
        given_back: Bytes,
        /// The device's remark about an unusual event.
        note: Option<String>,
    },
    /// The device failed, and `handed_back` steps were returned to the queue.
    Retired {
        replica: usize,
        error: DeviceError,
        handed_back: usize,
    },
    /// The device lacks memory; its steps are returned, and it remains in use.
    LacksMemory {
        replica: usize,
        error: DeviceError,
        works: Vec<StepWork<T>>,
    },
    /// The answer to a request for a size.
    Resized {
        replica: usize,
        result: Result<(), DeviceError>,
    },
    /// Error of a step that no device can compute.
    Refused(DeviceError),
    Panicked(Box<dyn Any + Send>),
}

impl<T: Send + 'static> ReplicaPool<T> {
    /// Starts one thread per executor; all executors have the same program and weights.
    pub(super) fn new(executors: Vec<Executor>) -> Result<Self, RuntimeError> {
        let Some(first) = executors.first() else {
            return Err(RuntimeError::bug("there is no device to compute on"));
        };
        let programs = first.prepared().clone();
        let size = first.size();
        let program = programs.program(0);
        let replicas = executors.len();
        let target = if !program.target().arena_in_host() {
            executors.iter().map(|e| e.depth() + 1).sum()
        } else if program.replicas() == 1 {
            // On the host, waiting steps use the same memory as running steps, so few are kept.
            replicas
        } else {
            in_flight_target(replicas)
        };
        let usage = executors.iter().map(|e| {
            let DeviceInfo { name, arithmetic, .. } = e.device().info();
            Usage { name, arithmetic, ..Usage::default() }
        });
        let usage = usage.collect();
        let shared = Arc::new(SharedQueue::new(replicas));
        let (sender, events) = channel();
        // From here on, an error drops `pool`, which ends the threads that were started.
        let mut pool = Self {
            shared,
            events,
            threads: vec![],
            programs,
            size,
            usage,
            in_flight: 0,
            target,
            working: replicas,
            warnings: vec![],
            failed: vec![],
            first: None,
        };
        for (number, executor) in executors.into_iter().enumerate() {
            let replica = Replica::new(number, executor, Arc::clone(&pool.shared), sender.clone());
            let thread = spawn("device", move || replica.run()).map_err(RuntimeError::thread("device"))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// The program in use.
    pub(super) fn program(&self) -> &Program {
        self.programs.program(self.size)
    }

    /// The programs of all sizes, the largest first.
    pub(super) fn programs(&self) -> &Prepared {
        &self.programs
    }

    /// Index of the program in use.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Sets whether a device that lacks memory returns its steps instead of failing.
    pub(super) fn set_gives_way(&self, gives_way: bool) {
        self.shared.set_gives_way(gives_way);
    }

    /// Makes every device use program number `size`; no step may be in flight. After an error, all devices use the size that
    /// they had before.
    pub(super) fn resize(&mut self, size: usize) -> Result<(), RuntimeError> {
        let before = std::mem::replace(&mut self.size, size);
        if let Err(error) = self.resize_all(size) {
            // Some devices may have changed their size already, and all must run the same program.
            self.size = before;
            self.resize_all(before)?;
            return Err(error);
        }
        Ok(())
    }

    /// Requests a size of every working device, and waits for all answers. The error is that of the first that failed.
    fn resize_all(&mut self, size: usize) -> Result<(), RuntimeError> {
        if self.in_flight > 0 {
            return Err(RuntimeError::bug("steps are in flight during a change of their size"));
        }
        self.shared.resize(size);
        let mut answers = 0;
        let mut failed = None;
        while answers < self.working {
            match self.events.recv() {
                Ok(ReplicaEvent::Resized { result, .. }) => {
                    answers += 1;
                    failed = failed.or(result.err());
                }
                Ok(ReplicaEvent::Panicked(panic)) => resume_unwind(panic),
                Ok(
                    ReplicaEvent::Done { .. }
                    | ReplicaEvent::Retired { .. }
                    | ReplicaEvent::LacksMemory { .. }
                    | ReplicaEvent::Refused(_),
                ) => {
                    return Err(RuntimeError::bug("a device returned a step that was not in flight"));
                }
                Err(_) => return Err(self.none_left()),
            }
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Number of working devices.
    pub(super) fn working(&self) -> usize {
        self.working
    }

    /// Number of in-flight steps at which every device has its next step ready when it completes one.
    pub(super) fn in_flight_target(&self) -> usize {
        self.target
    }

    /// Number of steps that were sent and not returned.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Work done so far by each device.
    pub(super) fn usage(&self) -> &[Usage] {
        &self.usage
    }

    /// Returns the warnings since the last call.
    pub(super) fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Appends a step to the queue.
    pub(super) fn send(&mut self, work: StepWork<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_back(work));
    }

    /// Puts a step at the head of the queue.
    pub(super) fn send_first(&mut self, work: StepWork<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_front(work));
    }

    /// Waits until a device returns steps; `None` if none is in flight.
    pub(super) fn wait(&mut self, stop: StopCheck<'_>) -> Result<Option<Returned<T>>, RuntimeError> {
        while self.in_flight > 0 {
            match self.events.recv_timeout(PATIENCE) {
                Ok(event) => {
                    if let Some(returned) = self.hear(event)? {
                        return Ok(Some(returned));
                    }
                }
                Err(RecvTimeoutError::Timeout) => stop()?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.none_left()),
            }
        }
        Ok(None)
    }

    /// Returns what a device has returned, without waiting.
    pub(super) fn poll(&mut self) -> Result<Option<Returned<T>>, RuntimeError> {
        loop {
            match self.events.try_recv() {
                Ok(event) => {
                    if let Some(returned) = self.hear(event)? {
                        return Ok(Some(returned));
                    }
                }
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) if self.in_flight == 0 => return Ok(None),
                Err(TryRecvError::Disconnected) => return Err(self.none_left()),
            }
        }
    }

    /// Removes and returns the steps that no device has started.
    pub(super) fn cancel(&mut self) -> Vec<StepWork<T>> {
        let works = self.shared.clear();
        self.in_flight -= works.len();
        works
    }

    /// Returns the executors of the working devices for another run; in-flight steps are dropped.
    pub(super) fn into_executors(mut self) -> Vec<Executor> {
        self.stop()
    }

    /// Ends the device threads and returns the executors of the working devices; [`ReplicaPool::go_on`] starts them again. No
    /// step may be in flight.
    pub(super) fn stop(&mut self) -> Vec<Executor> {
        self.join().into_iter().flatten().collect()
    }

    /// Continues on executors with another program.
    pub(super) fn go_on(&mut self, executors: Vec<Executor>) -> Result<(), RuntimeError> {
        let mut next = Self::new(executors)?;
        // Devices that failed before stay in the record, behind the working ones: events number devices by position.
        let usage = std::mem::take(&mut self.usage);
        let (gone, kept): (Vec<Usage>, Vec<Usage>) = usage.into_iter().partition(|one| one.failed.is_some());
        for (new, old) in next.usage.iter_mut().zip(kept) {
            *new = Usage { name: std::mem::take(&mut new.name), ..old };
        }
        next.usage.extend(gone);
        next.warnings = std::mem::take(&mut self.warnings);
        next.failed = std::mem::take(&mut self.failed);
        next.first = self.first.take();
        *self = next;
        Ok(())
    }

    /// Processes an event; returns the steps that a device returned with it.
    fn hear(&mut self, event: ReplicaEvent<T>) -> Result<Option<Returned<T>>, RuntimeError> {
        match event {
            ReplicaEvent::Done { replica, done, given_back, note } => {
                self.in_flight -= 1;
                let usage = &mut self.usage[replica];
                usage.steps += 1;
                usage.tokens += done.work.counts.tokens;
                usage.busy += done.seconds;
                usage.given_back += given_back;
                self.warnings.extend(note.map(|note| format!("{}: {note}", usage.name)));
                Ok(Some(Returned::Done(done)))
            }
            ReplicaEvent::LacksMemory { replica, error, works } => {
                self.in_flight -= works.len();
                let name = &self.usage[replica].name;
                let why = told(&error);
                self.warnings.push(format!("{name} has too little memory: {why}"));
                Ok(Some(Returned::LacksMemory(error, works)))
            }
            ReplicaEvent::Resized { replica, .. } => {
                let name = &self.usage[replica].name;
                Err(RuntimeError::bug(format!("{name} changed its size without a request")))
            }
            ReplicaEvent::Retired { replica, error, handed_back } => {
                self.working -= 1;
                let name = &self.usage[replica].name;
                let why = told(&error);
                let steps = if handed_back == 1 { "step" } else { "steps" };
                self.warnings.push(format!(
                    "{name} failed and is no longer used: {why}; its {handed_back} in-flight {steps} are \
                        computed by the other devices"
                ));
                self.failed.push(name.clone());
                self.first.get_or_insert_with(|| Arc::new(error));
                self.usage[replica].failed = Some(why);
                if self.working > 0 {
                    return Ok(None);
                }
                // No other device computes the steps that the warning speaks of.
                self.warnings.pop();
                Err(self.none_left())
            }
            ReplicaEvent::Refused(error) => {
                self.in_flight -= 1;
                Err(error.into())
            }
            ReplicaEvent::Panicked(panic) => resume_unwind(panic),
        }
    }

    /// Error of a session whose device threads have all ended. Steps in flight or sent later are dropped.
    fn none_left(&mut self) -> RuntimeError {
        self.cancel();
        self.in_flight = 0;
        match &self.first {
            Some(first) => {
                let devices = self.failed.clone();
                let first = Arc::clone(first);
                DeviceError::NoneLeft { devices, first }.into()
            }
            None => RuntimeError::bug("no device is left to compute on"),
        }
    }
}

impl<T> ReplicaPool<T> {
    /// Closes the queue and joins the device threads.
    fn join(&mut self) -> Vec<Option<Executor>> {
        self.shared.close();
        // The panic of a device thread was reported as an event, or nobody waits for its steps.
        self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect()
    }
}

impl<T> Drop for ReplicaPool<T> {
    fn drop(&mut self) {
        self.join();
    }
}

/// Reports the bytes that devices unmapped between steps.
pub fn say_given_back(usage: &[Usage], observer: &mut dyn Observer) {
    for Usage { name, given_back, .. } in usage.iter().filter(|usage| usage.given_back > Bytes::ZERO) {
        observer.say(
            Level::Info,
            &format!("{name}: {given_back} that the plan does not use were freed between steps"),
        );
    }
}

/// Formats an error with its chain of sources as one line.
fn told(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
