//! Devices that share the steps of a session: a thread for each over one queue, so that the device that is free takes the
//! next step. Invariant: a step that was sent comes back once, with its outputs, whichever device computed it; a device that
//! fails hands back the steps it had begun, and the others go on.

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

use super::bounds::in_flight_target;
use super::replica::{Replica, Shared};
use crate::{Level, Observer, RuntimeError};
use data::limits::spawn;
use exec::{Data, DeviceError, Executor};
use graph::{Bytes, Counts, Dim, ValueId};
use plan::HOST;
use plan::{InputId, OutputId, Program};
use serde_json::{Value, json};
use std::any::Any;
use std::error::Error;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Asked now and then while a step is waited for: an error ends the wait.
pub type Stop<'a> = &'a dyn Fn() -> Result<(), RuntimeError>;

/// How often [`Stop`] is asked.
const PATIENCE: Duration = Duration::from_millis(50);

/// An output of a plan, with the shape that a step's counts give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The output.
    pub id: OutputId,
    /// Its name in the plan's graph.
    pub name: String,
    /// The unit that has a row of it.
    pub per: Per,
    /// Columns of a row.
    pub width: usize,
}

/// The unit that has a row of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// Each sequence.
    Sequence,
    /// Each token.
    Token,
}

impl Output {
    /// The outputs of a plan, in the order of its graph.
    pub(super) fn of(program: &Program, plan: usize) -> Vec<Self> {
        let graph = &program.plans()[plan].1.graph;
        let output = |(name, value): &(String, ValueId)| {
            let spec = graph.spec(*value);
            let (per, columns) = match spec.shape.first() {
                Some(Dim::Tokens(_)) => (Per::Token, &spec.shape[1..]),
                Some(Dim::Sequences(_)) => (Per::Sequence, &spec.shape[1..]),
                Some(Dim::Fixed(_)) | None => (Per::Sequence, &spec.shape[..]),
            };
            let width = columns.iter().filter_map(|dim| dim.fixed()).product::<u64>() as usize;
            Self { id: OutputId { plan, value: *value }, name: name.clone(), per, width }
        };
        graph.outputs.iter().map(output).collect()
    }

    /// The values of a step's output.
    pub(super) fn elements(&self, counts: Counts) -> usize {
        let rows = match self.per {
            Per::Sequence => counts.sequences,
            Per::Token => counts.tokens,
        };
        rows as usize * self.width
    }
}

/// A step of a plan. Its buffers come back with it.
pub(super) struct Work<T> {
    /// The plan's position in the program.
    pub(super) plan: usize,
    /// Exactly `counts` of each.
    pub(super) inputs: Vec<(InputId, Values)>,
    /// What the step holds.
    pub(super) counts: Counts,
    /// The outputs that are read.
    pub(super) outputs: Arc<[Output]>,
    /// The values of the outputs once the step is done; buffers until then.
    pub(super) values: Vec<Vec<f32>>,
    /// Whose step it is.
    pub(super) tag: T,
}

/// The values of an input.
pub(super) enum Values {
    /// Integers, such as token ids.
    I32(Vec<i32>),
    /// Start and end of each sequence.
    Spans(Vec<[i32; 2]>),
    /// Numbers.
    F32(Vec<f32>),
}

impl Values {
    pub(super) fn data(&self) -> Data<'_> {
        match self {
            Self::I32(values) => Data::I32(values),
            Self::Spans(spans) => Data::I32(bytemuck::cast_slice(spans)),
            Self::F32(values) => Data::F32(values),
        }
    }
}

/// A step that came back.
pub(super) struct Done<T> {
    /// The step, with its outputs.
    pub(super) work: Work<T>,
    /// Seconds of its device's time.
    pub(super) seconds: f64,
}

/// What a device did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Its name.
    pub name: String,
    /// What its bits depend on beside the plan.
    pub arithmetic: String,
    /// Steps computed.
    pub steps: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Seconds in which at least one step was open.
    pub busy: f64,
    /// Bytes of its memory that no plan used any more and that it gave back between steps.
    pub given_back: Bytes,
    /// Why it was left out before the end.
    pub failed: Option<String>,
}

impl Usage {
    /// For the record of a run of so many seconds.
    pub fn to_json(&self, seconds: f64) -> Value {
        json!({
            "name": self.name,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds_busy": self.busy,
            "share_busy": self.busy / seconds.max(1e-9),
            "given_back_bytes": self.given_back.0,
            "failed": self.failed,
        })
    }
}

/// Devices that share the steps of a program.
pub(super) struct Replicas<T> {
    shared: Arc<Shared<T>>,
    events: Receiver<Event<T>>,
    threads: Vec<JoinHandle<Option<Executor>>>,
    program: Program,
    usage: Vec<Usage>,
    /// Steps that were sent and are not back.
    in_flight: usize,
    /// How many of them there should be, so that every device has its next step when it ends one.
    target: usize,
    /// How many devices work.
    working: usize,
    warnings: Vec<String>,
}

/// What the thread of a device reports.
pub(super) enum Event<T> {
    Done {
        lane: usize,
        done: Done<T>,
        given_back: Bytes,
        /// What the device did otherwise than usual.
        note: Option<String>,
    },
    /// The device failed; so many steps were handed back.
    Retired {
        lane: usize,
        error: DeviceError,
        handed_back: usize,
    },
    /// A step that no device can compute.
    Refused(DeviceError),
    Panicked(Box<dyn Any + Send>),
}

impl<T: Send + 'static> Replicas<T> {
    /// A lane for each executor; they run one program with the same weights.
    pub(super) fn new(executors: Vec<Executor>) -> Result<Self, RuntimeError> {
        let Some(first) = executors.first() else {
            return Err(RuntimeError::bug("there is no device to compute on"));
        };
        let (program, lanes) = (first.program().clone(), executors.len());
        let target = match program.target().space == HOST {
            // What waits takes of the same memory as what runs.
            true if program.lanes() == 1 => lanes,
            true => in_flight_target(lanes),
            false => executors.iter().map(|e| e.depth() + 1).sum(),
        };
        let usage = executors.iter().map(|e| {
            let (name, arithmetic) = (e.device().name(), e.device().arithmetic());
            Usage { name, arithmetic, ..Usage::default() }
        });
        let usage = usage.collect();
        let shared = Arc::new(Shared::new(lanes));
        let queue = Arc::clone(&shared);
        let (sender, events) = channel();
        let start = |(number, executor)| {
            let (shared, events) = (Arc::clone(&queue), sender.clone());
            let lane = Replica::new(number, executor, shared, events);
            spawn("device", move || lane.run()).map_err(RuntimeError::thread("device"))
        };
        let (in_flight, working, warnings) = (0, lanes, vec![]);
        let threads = vec![];
        // Dropped on an error, it ends the threads that were started.
        let mut all = Self { shared, events, threads, program, usage, in_flight, target, working, warnings };
        for thread in executors.into_iter().enumerate().map(start) {
            all.threads.push(thread?);
        }
        Ok(all)
    }

    /// What they run.
    pub(super) fn program(&self) -> &Program {
        &self.program
    }

    /// How many devices work.
    pub(super) fn working(&self) -> usize {
        self.working
    }

    /// Steps that should be in flight, so that every device has its next one when it ends one.
    pub(super) fn in_flight_target(&self) -> usize {
        self.target
    }

    /// Steps that were sent and are not back.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What each did so far.
    pub(super) fn usage(&self) -> &[Usage] {
        &self.usage
    }

    /// What is to be said since the last call.
    pub(super) fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Puts a step behind those that wait.
    pub(super) fn send(&mut self, work: Work<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_back(work));
    }

    /// Puts a step before those that wait.
    pub(super) fn send_first(&mut self, work: Work<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_front(work));
    }

    /// A step that is back, waited for; `None` where none is on its way.
    pub(super) fn wait(&mut self, stop: Stop<'_>) -> Result<Option<Done<T>>, RuntimeError> {
        while self.in_flight > 0 {
            match self.events.recv_timeout(PATIENCE) {
                Ok(event) => {
                    if let Some(done) = self.hear(event)? {
                        return Ok(Some(done));
                    }
                }
                Err(RecvTimeoutError::Timeout) => stop()?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.none_left()),
            }
        }
        Ok(None)
    }

    /// A step that is back by now.
    pub(super) fn poll(&mut self) -> Result<Option<Done<T>>, RuntimeError> {
        loop {
            match self.events.try_recv() {
                Ok(event) => {
                    if let Some(done) = self.hear(event)? {
                        return Ok(Some(done));
                    }
                }
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) if self.in_flight == 0 => return Ok(None),
                Err(TryRecvError::Disconnected) => return Err(self.none_left()),
            }
        }
    }

    /// Takes back the steps that no device has begun.
    pub(super) fn cancel(&mut self) -> Vec<Work<T>> {
        let works = self.shared.clear();
        self.in_flight -= works.len();
        works
    }

    /// The executors that still work, for another run. What is on its way is forgotten.
    pub(super) fn into_executors(mut self) -> Vec<Executor> {
        self.join().into_iter().flatten().collect()
    }

    fn hear(&mut self, event: Event<T>) -> Result<Option<Done<T>>, RuntimeError> {
        match event {
            Event::Done { lane, done, given_back, note } => {
                self.in_flight -= 1;
                let usage = &mut self.usage[lane];
                usage.steps += 1;
                usage.tokens += done.work.counts.tokens;
                usage.busy += done.seconds;
                usage.given_back += given_back;
                self.warnings.extend(note.map(|note| format!("{}: {note}", usage.name)));
                Ok(Some(done))
            }
            Event::Retired { lane, error, handed_back } => {
                self.working -= 1;
                let (name, why) = (&self.usage[lane].name, told(&error));
                let steps = if handed_back == 1 { "step" } else { "steps" };
                self.warnings.push(format!(
                    "{name} failed and is left out from here on: {why}; its {handed_back} open {steps} go to the others"
                ));
                self.usage[lane].failed = Some(why);
                if self.working > 0 {
                    return Ok(None);
                }
                self.cancel();
                // It is the run's error now.
                self.warnings.pop();
                Err(error.into())
            }
            Event::Refused(error) => {
                self.in_flight -= 1;
                Err(error.into())
            }
            Event::Panicked(panic) => resume_unwind(panic),
        }
    }

    fn none_left(&mut self) -> RuntimeError {
        self.in_flight = 0;
        RuntimeError::bug("no device is left to compute on")
    }
}

impl<T> Replicas<T> {
    fn join(&mut self) -> Vec<Option<Executor>> {
        self.shared.close();
        // A lane's panic was heard, or nobody waits for its work.
        self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect()
    }
}

impl<T> Drop for Replicas<T> {
    fn drop(&mut self) {
        self.join();
    }
}

/// Reports the bytes that devices gave back between steps.
pub fn say_given_back(usage: &[Usage], observer: &mut dyn Observer) {
    for Usage { name, given_back, .. } in usage.iter().filter(|usage| usage.given_back > Bytes::ZERO) {
        observer
            .say(Level::Info, &format!("{name}: {given_back} that no plan used were given back between steps"));
    }
}

/// An error with what it comes from, as one line.
fn told(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
