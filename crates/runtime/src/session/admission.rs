//! Admission: from a program to executors where memory is short. Invariant: nothing is allocated of a program that is larger
//! than what is free; memory that another process takes in between makes steps smaller and is said, or is refused with a
//! bill.

use super::bounds::{TOKEN_STEP, tokens};
use super::search::{Point, Stage};
use crate::budget::Budget;
use crate::settings::free;
use crate::{Level, Observer, RequestError, RuntimeError, Settings};
use data::limits;
use exec::{DeviceError, Executor, Machine};
use graph::Bytes;
use plan::{Bill, Build, Ledger, Line, PlanError, Program, Search, Stream, Weights, fit};
use std::sync::Arc;

/// The largest tensors that a bill names.
const LARGEST: usize = 4;

/// The difference between planned and counted bytes of a card that is no cause for a warning.
const SLACK: Bytes = Bytes(2 << 20);

/// The machines of a run: with a number of replicas and a budget.
#[derive(Clone, Debug)]
pub struct Site {
    machines: Vec<Arc<dyn Machine>>,
    threads: usize,
    replicas: usize,
    budget: Budget,
    /// Tokens that were asked for.
    tokens: Option<u64>,
    stream: Stream,
}

impl Site {
    /// The machines of the settings with this many replicas. With a number of `tokens` that was asked for, steps are never
    /// made smaller.
    pub fn new(settings: &Settings, replicas: usize, tokens: Option<u64>, budget: Budget) -> Self {
        Self {
            machines: settings.machines(replicas),
            threads: settings.threads,
            replicas,
            budget,
            tokens,
            stream: settings.stream,
        }
    }

    /// The memory budget, with the lines of the process.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Steps that should be in flight on all devices together.
    pub fn in_flight_target(&self) -> usize {
        match self.budget.on_host {
            true => super::bounds::in_flight_target(self.replicas),
            false => self.machines.iter().map(|machine| machine.depth() + 1).sum(),
        }
    }

    /// Every device, with an arena of the program: in the order of the machines, replicas of a CPU one after the other.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] where the program is larger than what is free; errors of the devices.
    pub fn start(&self, program: Program) -> Result<Vec<Executor>, RuntimeError> {
        match self.without_room(&program, &[])? {
            Some(free) => Err(refused(self.bill(&program, free, UNSTARTED))),
            None => self.follow(&program, vec![]),
        }
    }

    /// The only device, for those who compute on one.
    ///
    /// # Errors
    /// As [`Site::start`], and [`RequestError::SeveralDevices`].
    pub(crate) fn start_one(&self, program: Program) -> Result<Executor, RuntimeError> {
        self.start_alone(program)?.pop().ok_or_else(several)
    }

    /// The replicas of the only device.
    ///
    /// # Errors
    /// As [`Site::start_one`].
    pub(crate) fn start_alone(&self, program: Program) -> Result<Vec<Executor>, RuntimeError> {
        if self.machines.len() > 1 { Err(several()) } else { self.start(program) }
    }

    /// As [`Site::start`], where a smaller step than planned may do: if another process takes memory in between, and nobody
    /// asked for a number of tokens. Executors that are `running` are switched to the program.
    pub(crate) fn start_smaller(
        &self,
        mut program: Program,
        stage: &Stage<'_>,
        mut running: Vec<Executor>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Executor>, RuntimeError> {
        let (target, depth) = (program.target().clone(), program.depth());
        let point = Point { target: &target, depth, replicas: self.replicas };
        let build: Build<'_> = &mut |tokens, weights| stage.program(&point, tokens, weights, &mut |_, _| {});
        let longest = stage.longest;
        if let Some(free) = self.without_room(&program, &running)? {
            let bill = self.bill(&program, free, UNSTARTED);
            return Err(refused(self.with_remedies(bill, &program, longest, build)?));
        }
        let held = held_by(&running);
        loop {
            if !self.budget.on_host {
                switching(&running, &program, observer);
            }
            match self.follow(&program, std::mem::take(&mut running)) {
                Err(RuntimeError::Device(DeviceError::OutOfMemory { .. })) => {}
                other => return other.inspect(|_| self.compare(&program, held, "at the start", observer)),
            }
            let phase = format!("at start: an arena of {} could not be had", program.arena_bytes());
            if self.tokens.is_some() || tokens(&program) <= longest {
                let bill = self.bill(&program, self.free()?, &phase);
                return Err(refused(self.with_remedies(bill, &program, longest, build)?));
            }
            let smaller = self.smaller(&program, longest, build)?;
            let text = format!(
                "{phase}, another process took memory since this run was planned: steps are of {} tokens now instead of \
                 {}, planned {} instead of {}",
                tokens(&smaller),
                tokens(&program),
                smaller.peak(),
                program.peak()
            );
            observer.say(Level::Warning, &text);
            program = smaller;
        }
    }

    /// Reports for each device that counts its memory what this process holds of it beside what is planned. Of an arena that
    /// it `held` before, some may be there still.
    pub fn compare(&self, program: &Program, held: Bytes, when: &str, observer: &mut dyn Observer) {
        for machine in &self.machines {
            // What cannot be told is not compared.
            let Ok(Some(taken)) = machine.taken() else { continue };
            let planned = program.peak();
            let most = planned + held.saturating_sub(program.arena_bytes());
            let off = taken.saturating_sub(most).max(planned.saturating_sub(taken));
            let text = format!("{} {when}: {taken} of its memory taken, {planned} planned", machine.name());
            match off > SLACK && machine.holders().is_empty() {
                true => observer.say(Level::Warning, &format!("{text}: {off} apart")),
                false => observer.say(Level::Detail, &text),
            }
        }
    }

    /// A program of half the tokens, or of less, that fits what is free now; at least that of the longest sequence.
    fn smaller(&self, program: &Program, longest: u64, build: Build<'_>) -> Result<Program, RuntimeError> {
        let weights = if program.is_streamed() { Weights::Streamed } else { Weights::Resident };
        let (free, mut tokens) = (self.free()?, tokens(program));
        loop {
            tokens = (tokens / 2 / TOKEN_STEP * TOKEN_STEP).max(longest);
            let smaller = build(tokens, weights)?;
            if smaller.peak() <= free || tokens == longest {
                return Ok(smaller);
            }
        }
    }

    /// What is free for a program that is larger, on a device that can tell. What is `running` gives way to it.
    fn without_room(&self, program: &Program, running: &[Executor]) -> Result<Option<Bytes>, RuntimeError> {
        // What is free of the host's memory changes with every process, and its line was drawn when the run was planned.
        if self.budget.on_host {
            return Ok(None);
        }
        let free = self.free()? + held_by(running);
        Ok((program.peak() > free).then_some(free))
    }

    /// Every device with the program: those of executors that run, or else new ones.
    fn follow(&self, program: &Program, mut running: Vec<Executor>) -> Result<Vec<Executor>, RuntimeError> {
        // On the CPU nothing was compiled or chosen, and replicas would hold weights of both programs for a while.
        if self.budget.on_host {
            running.clear();
        }
        if running.is_empty() {
            return self
                .open()?
                .into_iter()
                .map(|device| Ok(Executor::new(device, program.clone())?))
                .collect();
        }
        running.iter_mut().try_for_each(|executor| executor.switch(program.clone()))?;
        Ok(running)
    }

    /// Every device, without an arena.
    fn open(&self) -> Result<Vec<Box<dyn exec::Device>>, RuntimeError> {
        limits::room_for_threads(self.threads).map_err(RuntimeError::thread("compute"))?;
        let opened = self.machines.iter().map(|machine| machine.open()).collect::<Result<Vec<_>, _>>()?;
        Ok(opened.into_iter().flatten().collect())
    }

    fn free(&self) -> Result<Bytes, RuntimeError> {
        free(&self.machines)
    }

    /// The refusal of a program on what is free, with all that is known about it.
    fn bill(&self, program: &Program, free: Bytes, phase: &str) -> Bill {
        let mut bill = program.bill(free, vec![]);
        let largest = Ledger { entries: program.largest_tensors(LARGEST) };
        bill.line = Line::Free;
        bill.notes = vec![phase.to_owned(), format!("largest tensors: {}", largest.line())];
        let scarce = self.machines.iter().min_by_key(|machine| machine.free().unwrap_or_default());
        bill.notes.extend(scarce.and_then(holders));
        bill
    }

    /// The same bill with what would fit.
    fn with_remedies(
        &self,
        mut bill: Bill,
        program: &Program,
        longest: u64,
        build: Build<'_>,
    ) -> Result<Bill, RuntimeError> {
        let ceiling = tokens(program);
        let search = Search { floor: longest.min(ceiling), ceiling, step: TOKEN_STEP, budget: bill.budget };
        // Those that stream their weights already have nothing else to try.
        let stream = if program.is_streamed() { Stream::Always } else { self.stream };
        match fit(Some(ceiling), search, stream, build) {
            Err(PlanError::OverBudget(priced)) => bill.remedies = priced.remedies,
            Err(error) => return Err(error.into()),
            // It fits by now: whoever held the memory gave it back.
            Ok(_) => {}
        }
        Ok(bill)
    }
}

/// The arena of executors that run, of which all have the same.
fn held_by(running: &[Executor]) -> Bytes {
    running.first().map_or(Bytes::ZERO, |executor| executor.program().arena_bytes())
}

/// When a refusal came before anything was done.
const UNSTARTED: &str = "before the first allocation";

fn refused(bill: Bill) -> RuntimeError {
    PlanError::OverBudget(Box::new(bill)).into()
}

fn several() -> RuntimeError {
    RequestError::SeveralDevices.into()
}

fn switching(running: &[Executor], program: &Program, observer: &mut dyn Observer) {
    for executor in running {
        let (name, before) = (executor.device().name(), executor.program().arena_bytes());
        let after = program.arena_bytes();
        observer.say(Level::Detail, &format!("{name} goes on: its arena of {before} becomes one of {after}"));
    }
}

/// Who holds the rest of a machine's memory.
fn holders(machine: &Arc<dyn Machine>) -> Option<String> {
    let holders: Vec<String> = machine.holders().iter().map(ToString::to_string).collect();
    (!holders.is_empty()).then(|| format!("of {} {}", machine.name(), holders.join(", ")))
}
