//! Sessions that measure: fixed steps of one program, repeated by all replicas of one device, as passes whose seconds count or
//! instruction by instruction. `bench` and the calibration of `doctor` are their clients.
//!
//! Invariant: a step of a pass is computed once, by the replica that is free first; what is timed begins with the inputs of a
//! step on the host and ends with its outputs there.

use super::admission::Site;
use super::report::name;
use super::weights::load;
use crate::{RuntimeError, Settings};
use exec::{Data, Executor, Span, Submitted};
use graph::{Counts, Graph, Param, VerifyError};
use plan::{InputId, OutputId, PlanError, Policy, Program, compile};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A program with weights on one device, whose steps are timed.
pub struct TimedSession {
    replicas: Vec<TimedReplica>,
}

/// A step to be timed.
pub struct TimedStep<'a> {
    /// The position of its plan in the program.
    pub plan: usize,
    /// The tokens and sequences of the step.
    pub counts: Counts,
    /// The inputs that are written for the step; all others keep what lies in the arena.
    pub inputs: Vec<(InputId, Data<'a>)>,
    /// The outputs that are read, with their numbers of elements.
    pub outputs: Vec<(OutputId, usize)>,
}

/// The spans of a replica's launches and copies, with the name of its device.
pub type ReplicaSpans = (String, Vec<Span>);

struct TimedReplica {
    executor: Executor,
    /// Buffers of the outputs of a step.
    outputs: Vec<Vec<f32>>,
}

/// The steps of some passes, from which replicas take the next one.
struct Queue<'a> {
    steps: &'a [TimedStep<'a>],
    next: AtomicUsize,
    end: usize,
}

impl<'a> Queue<'a> {
    fn take(&self) -> Option<&'a TimedStep<'a>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.end).then(|| &self.steps[number % self.steps.len()])
    }
}

impl Settings {
    /// Compiles a graph into a program of one plan, for one replica that has all threads.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] where it is larger than the budget; a graph that cannot be compiled.
    pub fn single_program(
        &self,
        policy: &Policy,
        graph: Result<Graph, VerifyError>,
    ) -> Result<Program, RuntimeError> {
        let graph = graph.map_err(|source| PlanError::Verify { after: "build", source })?;
        let target = self.target()?;
        let plan = compile(&graph, policy, &target)?;
        Ok(Program::new(target, vec![("bench".to_owned(), plan)], vec![]))
    }
}

impl TimedSession {
    /// Starts a program on the only device of the settings, in one replica that has all threads.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] where it is larger than the budget or than what is free;
    /// [`crate::RequestError::SeveralDevices`].
    pub fn start_single(settings: &Settings, program: Program) -> Result<Self, RuntimeError> {
        let site = Site::new(settings, 1, settings.tokens, settings.read_budget()?);
        let program = program.within(site.budget().bytes)?;
        Self::start(&site, program)
    }

    /// Starts a program on the only device of a site.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] where it is larger than what is free; [`crate::RequestError::SeveralDevices`].
    pub fn start(site: &Site, program: Program) -> Result<Self, RuntimeError> {
        let executors = site.start_alone(program)?;
        let replicas = executors.into_iter().map(|executor| TimedReplica { executor, outputs: vec![] });
        Ok(Self { replicas: replicas.collect() })
    }

    /// Sets the parameters of the first plan; replicas share them.
    ///
    /// # Errors
    /// Errors of the device and of `read`.
    pub fn load(
        &mut self,
        mut read: impl FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        load(self.first_mut(), 0, &mut read)
    }

    /// Sets the states of an optimizer to those before the first step.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn start_states(&mut self) -> Result<(), RuntimeError> {
        Ok(self.first_mut().start_states()?)
    }

    /// Writes an input once, for steps that do not write it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn write(&mut self, input: InputId, data: &[u8]) -> Result<(), RuntimeError> {
        Ok(self.first_mut().write_u8(input, data)?)
    }

    /// Reads an output of the last step.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn read(&mut self, output: OutputId, values: &mut [f32]) -> Result<(), RuntimeError> {
        Ok(self.first_mut().read_f32(output, values)?)
    }

    /// The program that all replicas follow.
    pub fn program(&self) -> &Program {
        self.replicas[0].executor.program()
    }

    /// The name of the device, with its replicas.
    pub fn device_name(&self) -> String {
        name(&self.replicas[0].executor)
    }

    /// What the bits of the device depend on beside the plan.
    pub fn arithmetic(&self) -> String {
        self.replicas[0].executor.device().arithmetic()
    }

    /// The number of replicas that share the steps.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Computes every step `times` times, with as many steps in flight as the device takes. Returns the elapsed seconds.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn passes(&mut self, steps: &[TimedStep<'_>], times: u32) -> Result<f64, RuntimeError> {
        self.replicas.iter_mut().try_for_each(|replica| replica.executor.wait())?;
        let start = Instant::now();
        self.beside_each_other(steps, times, TimedReplica::steps)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Computes every step once, one after the other, and returns the seconds of each instruction of their plan: the mean
    /// of the replicas. All steps are of one plan.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn instructions(&mut self, steps: &[TimedStep<'_>]) -> Result<Vec<f64>, RuntimeError> {
        let times = self.beside_each_other(steps, 1, TimedReplica::instructions)?;
        let mean = |i: usize| {
            let of_replicas = times.iter().filter_map(|replica| replica.get(i)).map(Duration::as_secs_f64);
            of_replicas.sum::<f64>() / times.len() as f64
        };
        Ok((0..times.iter().map(Vec::len).max().unwrap_or(0)).map(mean).collect())
    }

    /// Computes every step `times` times and returns when each launch and copy ran, for each replica.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn spans(&mut self, steps: &[TimedStep<'_>], times: u32) -> Result<Vec<ReplicaSpans>, RuntimeError> {
        self.replicas.iter_mut().try_for_each(|replica| replica.executor.trace(true))?;
        self.passes(steps, times)?;
        let of_replica = |TimedReplica { executor, .. }: &mut TimedReplica| {
            let spans = executor.spans()?;
            executor.trace(false)?;
            Ok((executor.device().name(), spans))
        };
        self.replicas.iter_mut().map(of_replica).collect()
    }

    fn first_mut(&mut self) -> &mut Executor {
        &mut self.replicas[0].executor
    }

    /// Passes over the steps by all replicas beside each other, and what each of them returns.
    fn beside_each_other<T: Send>(
        &mut self,
        steps: &[TimedStep<'_>],
        times: u32,
        run: impl Fn(&mut TimedReplica, &Queue<'_>) -> Result<T, RuntimeError> + Sync,
    ) -> Result<Vec<T>, RuntimeError> {
        let queue = Queue { steps, next: AtomicUsize::new(0), end: times as usize * steps.len() };
        let Some((first, others)) = self.replicas.split_first_mut() else { return Ok(vec![]) };
        thread::scope(|scope| {
            let (queue, run) = (&queue, &run);
            let start = |replica| thread::Builder::new().spawn_scoped(scope, move || run(replica, queue));
            let others: Result<Vec<_>, _> = others.iter_mut().map(start).collect();
            let others = others.map_err(RuntimeError::thread("replica"))?;
            let first = run(first, queue);
            let others =
                others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            std::iter::once(first).chain(others).collect()
        })
    }
}

impl TimedReplica {
    /// Computes steps until the queue is empty, with as many in flight as the device takes.
    fn steps(&mut self, queue: &Queue<'_>) -> Result<(), RuntimeError> {
        let mut in_flight = VecDeque::new();
        while let Some(step) = queue.take() {
            if in_flight.len() >= self.executor.depth() {
                self.collect(&mut in_flight)?;
            }
            let submitted = self.executor.submit(step.plan, &step.inputs, step.counts, &step.outputs)?;
            in_flight.push_back((submitted, step.outputs.len()));
        }
        while !in_flight.is_empty() {
            self.collect(&mut in_flight)?;
        }
        // Steps without outputs are not waited for by `collect`.
        Ok(self.executor.wait()?)
    }

    fn collect(&mut self, in_flight: &mut VecDeque<(Submitted, usize)>) -> Result<(), RuntimeError> {
        let Some((step, outputs)) = in_flight.pop_front() else { return Ok(()) };
        self.outputs.resize_with(outputs, Vec::new);
        Ok(self.executor.collect(step, &mut self.outputs)?)
    }

    /// Computes steps one after the other, since a device can only tell the time of a launch by waiting for it.
    fn instructions(&mut self, queue: &Queue<'_>) -> Result<Vec<Duration>, RuntimeError> {
        let mut times = vec![];
        while let Some(step) = queue.take() {
            for &(input, data) in &step.inputs {
                match data {
                    Data::I32(values) => self.executor.write_i32(input, values)?,
                    Data::F32(values) => self.executor.write_f32(input, values)?,
                }
            }
            times.resize(self.executor.program().plans()[step.plan].1.schedule.instrs.len(), Duration::ZERO);
            self.executor.run_timed(step.plan, step.counts, &mut times)?;
        }
        self.executor.wait()?;
        Ok(times)
    }
}
