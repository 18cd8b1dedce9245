//! Devices that share the work: a thread for each of them over one queue, so that whoever is free takes what comes next.
//! Invariant: a step that was sent comes back once, with its outputs, whichever device computed it; a device that fails
//! hands back what it had begun, and the others go on.

mod lane;
pub mod planned;
#[cfg(test)]
mod tests;

use crate::{Level, Observer, RuntimeError};
use data::limits::spawn;
use exec::{Data, DeviceError, Executor};
use graph::{Bytes, Counts};
use lane::{Lane, Shared};
use plan::Program;
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

/// Into how many packs for each device what is left at the end is cut: with several, the last of them end closer
/// together.
pub const PARTS: usize = 2;

/// The memory space of machines whose arena is the host's memory.
pub const HOST: &str = "host";

/// Steps that are on their way so that so many lanes of the CPU always have one.
pub fn enough(lanes: usize) -> usize {
    if lanes == 1 { 1 } else { 2 * lanes }
}

/// A step on its way. Its buffers come back with it.
pub struct Work<T> {
    /// The plan of the program.
    pub plan: usize,
    /// By name, of exactly `counts`.
    pub inputs: Vec<(&'static str, Values)>,
    /// What the step holds.
    pub counts: Counts,
    /// Which outputs are wanted.
    pub outputs: Arc<[String]>,
    /// How many values of each, from the first on.
    pub wanted: usize,
    /// The outputs once it is done, in their order; buffers until then.
    pub values: Vec<Vec<f32>>,
    /// Whose step it is.
    pub tag: T,
}

/// An input.
pub enum Values {
    /// Integers, such as token ids.
    I32(Vec<i32>),
    /// Start and end of each sequence.
    Spans(Vec<[i32; 2]>),
    /// Numbers.
    F32(Vec<f32>),
}

impl Values {
    fn data(&self) -> Data<'_> {
        match self {
            Self::I32(values) => Data::I32(values),
            Self::Spans(spans) => Data::I32(bytemuck::cast_slice(spans)),
            Self::F32(values) => Data::F32(values),
        }
    }
}

/// A step that came back.
pub struct Done<T> {
    /// The step, with its outputs.
    pub work: Work<T>,
    /// What it took of its device's time.
    pub seconds: f64,
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

/// Devices that share the work.
pub struct Lanes<T> {
    shared: Arc<Shared<T>>,
    events: Receiver<Event<T>>,
    threads: Vec<JoinHandle<Option<Executor>>>,
    program: Program,
    usage: Vec<Usage>,
    /// Steps that were sent and are not back.
    in_flight: usize,
    /// How many of them there should be.
    enough: usize,
    /// How many devices work.
    working: usize,
    warnings: Vec<String>,
}

/// What a lane tells.
enum Event<T> {
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

impl<T: Send + 'static> Lanes<T> {
    /// A lane for each executor; they run one program with the same weights.
    pub fn new(executors: Vec<Executor>) -> Result<Self, RuntimeError> {
        let Some(first) = executors.first() else {
            return Err(RuntimeError::Refused("there is no device to compute on".to_owned()));
        };
        let (program, lanes) = (first.program().clone(), executors.len());
        let enough = match program.target().space == HOST {
            // What waits takes of the same memory as what runs.
            true if program.lanes() == 1 => lanes,
            true => enough(lanes),
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
            let lane = Lane::new(number, executor, shared, events);
            spawn("device", move || lane.run()).map_err(RuntimeError::thread("device"))
        };
        let (in_flight, working, warnings) = (0, lanes, vec![]);
        let threads = vec![];
        // Dropped on an error, it ends the threads that were started.
        let mut all = Self { shared, events, threads, program, usage, in_flight, enough, working, warnings };
        for thread in executors.into_iter().enumerate().map(start) {
            all.threads.push(thread?);
        }
        Ok(all)
    }

    /// What they run.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// How many devices work.
    pub fn working(&self) -> usize {
        self.working
    }

    /// Steps that should be on their way, so that every device has its next one when it ends one.
    pub fn enough(&self) -> usize {
        self.enough
    }

    /// Whether another step would not wait for long.
    pub fn has_room(&self) -> bool {
        self.in_flight < self.enough
    }

    /// Steps that were sent and are not back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What each did so far.
    pub fn usage(&self) -> &[Usage] {
        &self.usage
    }

    /// What is to be said since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Puts a step behind those that wait.
    pub fn send(&mut self, work: Work<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_back(work));
    }

    /// Puts a step before those that wait.
    pub fn send_first(&mut self, work: Work<T>) {
        self.in_flight += 1;
        self.shared.put(|queue| queue.push_front(work));
    }

    /// A step that is back, waited for; `None` where none is on its way.
    pub fn wait(&mut self, stop: Stop<'_>) -> Result<Option<Done<T>>, RuntimeError> {
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
    pub fn poll(&mut self) -> Result<Option<Done<T>>, RuntimeError> {
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
    pub fn cancel(&mut self) -> Vec<Work<T>> {
        let works = self.shared.clear();
        self.in_flight -= works.len();
        works
    }

    /// The executors that still work, for another run. What is on its way is forgotten.
    pub fn into_executors(mut self) -> Vec<Executor> {
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
        RuntimeError::Refused("no device is left to compute on".to_owned())
    }
}

impl<T> Lanes<T> {
    fn join(&mut self) -> Vec<Option<Executor>> {
        self.shared.close();
        // A lane's panic was heard, or nobody waits for its work.
        self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect()
    }
}

impl<T> Drop for Lanes<T> {
    fn drop(&mut self) {
        self.join();
    }
}

/// What devices gave back between steps.
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
