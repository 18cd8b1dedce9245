//! Sessions for benchmarks: all replicas of one device repeat a fixed list of steps, and the session measures
//! the seconds of a whole pass over the list, or of each instruction. `bench` and the calibration of `doctor`
//! use them.
//!
//! Invariant: each step of a pass is computed once, by the first replica that is free. The time of a step
//! includes the copy of its inputs from the host and of its outputs to the host.

use super::admission::Site;
use super::report::name;
use super::weights::load;
use crate::timeline::{MeasuredStep, MeasuredTimeline, sampled};
use crate::{RuntimeError, Settings, Silent};
use plimsoll_exec::{Data, Executor, Machine, Span, Submitted};
use plimsoll_graph::{Counts, Graph, Param, VerifyError};
use plimsoll_plan::{InputId, OutputId, PlanError, Policy, Program, compile};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A program on one device that computes steps and measures their time.
pub struct TimedSession {
    replicas: Vec<TimedReplica>,
}

/// A step of a [`TimedSession`].
pub struct TimedStep<'a> {
    /// Index of the plan in the program.
    pub plan: usize,
    /// Number of tokens and sequences of the step.
    pub counts: Counts,
    /// Inputs to copy from the host before the step; other inputs keep their previous contents in the arena.
    pub inputs: Vec<(InputId, Data<'a>)>,
    /// Outputs to copy to the host after the step.
    pub outputs: Vec<OutputId>,
}

/// The spans of a replica's launches and copies, with the name of its device.
pub type ReplicaSpans = (String, Vec<Span>);

struct TimedReplica {
    executor: Executor,
    /// Buffers of the outputs of a step.
    outputs: Vec<Vec<f32>>,
}

/// Steps of one or more passes that no replica has started.
struct PassQueue<'a> {
    steps: &'a [TimedStep<'a>],
    next: AtomicUsize,
    end: usize,
}

impl<'a> PassQueue<'a> {
    /// Takes the next step; `None` after the last step of the last pass.
    fn take(&self) -> Option<&'a TimedStep<'a>> {
        // Relaxed: the counter only has to give each number to one replica; the steps are not written while it
        // is used.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Numbers run through all passes; a replica that is ahead starts the next pass without waiting for the others.
        (number < self.end).then(|| &self.steps[number % self.steps.len()])
    }
}

impl Settings {
    /// Compiles a graph into a program of one plan, for one replica that uses all threads. The memory budget is
    /// checked by [`TimedSession::start_single`].
    ///
    /// # Errors
    /// A graph that breaks a rule, or for which the target has no kernel.
    pub fn single_program(
        &self,
        policy: &Policy,
        graph: Result<Graph, VerifyError>,
    ) -> Result<Program, RuntimeError> {
        let graph = graph.map_err(|source| PlanError::of_graph("build", source))?;
        let target = self.target()?;
        let plan = compile(&graph, policy, &target)?;
        Ok(Program::new(target, vec![("bench".to_owned(), plan)], vec![]))
    }
}

impl TimedSession {
    /// Starts a program on the only device of the settings, in one replica that uses all threads.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] if the program exceeds the memory budget or the free memory;
    /// [`crate::RequestError::SeveralDevices`].
    pub fn start_single(settings: &Settings, program: Program) -> Result<Self, RuntimeError> {
        let site = Site::new(settings, 1, settings.tokens, settings.read_budget()?);
        let program = program.within(site.budget().bytes)?;
        Self::start(&site, program)
    }

    /// Starts a program on the only device of a site.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] if the program exceeds the free memory; [`crate::RequestError::SeveralDevices`].
    pub fn start(site: &Site, program: Program) -> Result<Self, RuntimeError> {
        let executors = site.start_alone(program, &mut Silent)?;
        let replicas = executors.into_iter().map(|executor| TimedReplica { executor, outputs: vec![] });
        Ok(Self { replicas: replicas.collect() })
    }

    /// Loads the parameters of the first plan; replicas share one copy.
    ///
    /// # Errors
    /// Errors of the device and of `read`.
    pub fn load(
        &mut self,
        mut read: impl FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        load(self.first_mut(), 0, &mut read)
    }

    /// Initializes gradients and optimizer states as before the first training step.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn start_states(&mut self) -> Result<(), RuntimeError> {
        Ok(self.first_mut().start_states()?)
    }

    /// Copies an input to the arena of the first replica, for steps that do not list it in [`TimedStep::inputs`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn write(&mut self, input: InputId, data: &[u8]) -> Result<(), RuntimeError> {
        Ok(self.first_mut().write_u8(input, data)?)
    }

    /// Copies an output of the first replica's last step to the host.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn read(&mut self, output: OutputId, values: &mut [f32]) -> Result<(), RuntimeError> {
        Ok(self.first_mut().read_f32(output, values)?)
    }

    /// The program that all replicas run.
    pub fn program(&self) -> &Program {
        self.replicas[0].executor.program()
    }

    /// Name of the device, with its replicas and threads.
    pub fn device_name(&self) -> String {
        name(&self.replicas[0].executor)
    }

    /// The device properties that determine the bits of results together with the plan.
    pub fn arithmetic(&self) -> String {
        self.replicas[0].executor.device().info().arithmetic
    }

    /// Number of replicas that share the steps.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Computes every step `times` times, with as many steps in flight as the device allows, and returns the
    /// elapsed seconds.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn passes(&mut self, steps: &[TimedStep<'_>], times: u32) -> Result<f64, RuntimeError> {
        self.replicas.iter_mut().try_for_each(|replica| replica.executor.wait())?;
        let start = Instant::now();
        self.in_parallel(steps, times, TimedReplica::steps)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Computes every step once, without overlap, and returns the total seconds of each instruction, averaged
    /// over the replicas. All steps must use the same plan.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn instructions(&mut self, steps: &[TimedStep<'_>]) -> Result<Vec<f64>, RuntimeError> {
        let times = self.in_parallel(steps, 1, TimedReplica::instructions)?;
        Ok((0..times.iter().map(Vec::len).max().unwrap_or(0))
            .map(|i: usize| {
                let of_replicas = times.iter().filter_map(|replica| replica.get(i)).map(Duration::as_secs_f64);
                of_replicas.sum::<f64>() / times.len() as f64
            })
            .collect())
    }

    /// Computes one step on the first replica and returns the times of its instructions, and the memory while it ran.
    /// `machine` is that of the replica.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn measured(
        &mut self,
        step: &TimedStep<'_>,
        machine: &dyn Machine,
    ) -> Result<MeasuredTimeline, RuntimeError> {
        let replica = &mut self.replicas[0];
        replica.executor.wait()?;
        replica.inputs(step)?;
        let executor = &mut replica.executor;
        let mut times = vec![Duration::ZERO; executor.program().plans()[step.plan].1.schedule.instrs.len()];
        let start = Instant::now();
        let (done, samples) = sampled(machine, || executor.run_timed(step.plan, step.counts, &mut times));
        done?;
        executor.wait()?;
        let measured =
            MeasuredStep { plan: step.plan, counts: step.counts, times: &times, start, samples: &samples };
        Ok(MeasuredTimeline::new(executor.program(), &measured))
    }

    /// Computes every step `times` times and returns the begin and end of each kernel and copy, for each replica.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn spans(&mut self, steps: &[TimedStep<'_>], times: u32) -> Result<Vec<ReplicaSpans>, RuntimeError> {
        self.replicas.iter_mut().try_for_each(|replica| replica.executor.trace(true))?;
        self.passes(steps, times)?;
        self.replicas
            .iter_mut()
            .map(|TimedReplica { executor, .. }| {
                let spans = executor.spans()?;
                executor.trace(false)?;
                Ok((executor.device().info().name, spans))
            })
            .collect()
    }

    fn first_mut(&mut self) -> &mut Executor {
        &mut self.replicas[0].executor
    }

    /// Calls `run` for all replicas in parallel, each on a thread of its own, and returns their results.
    fn in_parallel<T: Send>(
        &mut self,
        steps: &[TimedStep<'_>],
        times: u32,
        run: impl Fn(&mut TimedReplica, &PassQueue<'_>) -> Result<T, RuntimeError> + Sync,
    ) -> Result<Vec<T>, RuntimeError> {
        let queue = PassQueue { steps, next: AtomicUsize::new(0), end: times as usize * steps.len() };
        let Some((first, others)) = self.replicas.split_first_mut() else { return Ok(vec![]) };
        thread::scope(|scope| {
            let queue = &queue;
            let run = &run;
            let others: Result<Vec<_>, _> = others
                .iter_mut()
                .map(|replica| thread::Builder::new().spawn_scoped(scope, move || run(replica, queue)))
                .collect();
            let others = others.map_err(RuntimeError::thread("replica"))?;
            let first = run(first, queue);
            let others =
                others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            std::iter::once(first).chain(others).collect()
        })
    }
}

impl TimedReplica {
    /// Computes steps until the queue is empty, with as many in flight as the device allows.
    fn steps(&mut self, queue: &PassQueue<'_>) -> Result<(), RuntimeError> {
        let mut in_flight = VecDeque::new();
        while let Some(step) = queue.take() {
            if in_flight.len() >= self.executor.depth() {
                self.collect(&mut in_flight)?;
            }
            let graph = &self.executor.program().plans()[step.plan].1.graph;
            let outputs: Vec<_> = step
                .outputs
                .iter()
                .map(|id| (*id, graph.spec(id.value).elements_at(step.counts) as usize))
                .collect();
            let submitted = self.executor.submit(step.plan, &step.inputs, step.counts, &outputs)?;
            in_flight.push_back((submitted, outputs.len()));
        }
        while !in_flight.is_empty() {
            self.collect(&mut in_flight)?;
        }
        // Steps without outputs are not waited for by `collect`.
        Ok(self.executor.wait()?)
    }

    /// Waits for the oldest in-flight step and copies its outputs to this replica's buffers.
    fn collect(&mut self, in_flight: &mut VecDeque<(Submitted, usize)>) -> Result<(), RuntimeError> {
        let Some((step, outputs)) = in_flight.pop_front() else { return Ok(()) };
        self.outputs.resize_with(outputs, Vec::new);
        Ok(self.executor.collect(step, &mut self.outputs)?)
    }

    /// Copies the inputs of a step to the arena.
    fn inputs(&mut self, step: &TimedStep<'_>) -> Result<(), RuntimeError> {
        for &(input, data) in &step.inputs {
            match data {
                Data::I32(values) => self.executor.write_i32(input, values)?,
                Data::F32(values) => self.executor.write_f32(input, values)?,
            }
        }
        Ok(())
    }

    /// Computes steps without overlap, because the time of a kernel is only known after waiting for it.
    fn instructions(&mut self, queue: &PassQueue<'_>) -> Result<Vec<Duration>, RuntimeError> {
        let mut times = vec![];
        while let Some(step) = queue.take() {
            self.inputs(step)?;
            times.resize(self.executor.program().plans()[step.plan].1.schedule.instrs.len(), Duration::ZERO);
            self.executor.run_timed(step.plan, step.counts, &mut times)?;
        }
        self.executor.wait()?;
        Ok(times)
    }
}
