//! Admission and OOM fallback: starts executors for a program where memory is short. Invariant: nothing is allocated
//! for a program larger than the free memory. If another process takes memory between planning and start, the steps
//! become smaller with a warning, or the run is refused with a bill.

use super::bounds::{TOKEN_STEP, tokens};
use super::search::{SearchPoint, SearchStage};
use crate::budget::Budget;
use crate::machine::{self, Reading};
use crate::observer::on_start;
use crate::settings::free;
use crate::{Level, Observer, OomPhase, OutOfMemory, RequestError, RuntimeError, Settings};
use plimsoll_data::limits;
use plimsoll_exec::{DeviceError, Executor, Machine, Prepared};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Bill, Build, Ledger, LimitKind, PlanError, Program, Search, Streaming, fit};
use plimsoll_setting::Setting;
use std::sync::Arc;

/// Number of largest tensors that a bill names.
const LARGEST: usize = 4;

/// Largest number of bytes that a GPU may count above the plan without a warning.
const SLACK: Bytes = Bytes(2 << 20);

/// Largest number of bytes that a GPU may count below the plan without a warning. What a target reserves for kernels is what large
/// models need; on an H200 the driver loads 4 MB less for small ones.
const UNUSED: Bytes = Bytes(6 << 20);

/// The machines of a run, with the number of replicas and the memory budget.
#[derive(Clone, Debug)]
pub struct Site {
    machines: Vec<Arc<dyn Machine>>,
    threads: usize,
    replicas: usize,
    budget: Budget,
    /// Tokens of a step requested by the user; `None` if chosen by the search.
    tokens: Option<u64>,
    stream: Streaming,
}

/// The OOM fallback of a session at the moment when no smaller step is left.
pub(crate) struct OomFallback<'a> {
    /// Phase of the session in which the memory ran out.
    pub(crate) phase: OomPhase,
    /// Tokens of the smaller steps that lacked memory too.
    pub(crate) tried: &'a [u64],
    /// Whether the run changes the size of its steps with the free memory.
    pub(crate) dynamic: bool,
}

impl Site {
    /// The machines of the settings with `replicas` replicas. If a number of `tokens` was requested, steps are never
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

    /// The memory budget, with the entries of the process.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Whether the user requested a number of tokens.
    pub(crate) fn has_requested_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// The machines.
    pub(crate) fn machines(&self) -> &[Arc<dyn Machine>] {
        &self.machines
    }

    /// The error of a lack of memory, with the largest tensors of the program, what holds the memory and what to
    /// try.
    pub(crate) fn out_of_memory(
        &self,
        program: &Program,
        fallback: OomFallback<'_>,
        source: DeviceError,
    ) -> RuntimeError {
        let OomFallback { phase, tried, dynamic } = fallback;
        let scarce = self.machines.iter().min_by_key(|machine| machine.free().unwrap_or_default());
        let largest = Ledger { entries: program.largest_tensors(LARGEST) }.line();
        let holders = scarce.map(|machine| machine::holders(machine, self.budget.on_host));
        let remedy = if dynamic {
            format!(
                "End other processes, or give a smaller {} (to predict also smaller {} or {})",
                Setting::MemoryBudget,
                Setting::DnaTokens,
                Setting::ProteinTokens
            )
        } else {
            format!(
                "End other processes, give a smaller {}, or give {} to predict, embed or classify, whose steps then shrink \
                 before memory is short",
                Setting::MemoryBudget,
                Setting::Dynamic
            )
        };
        RuntimeError::OutOfMemory(Box::new(OutOfMemory {
            phase,
            tried: tried.to_vec(),
            largest,
            holders: holders.unwrap_or_default(),
            remedy,
            source,
        }))
    }

    /// Reads the memory of the process, the host and the machines.
    pub fn reading(&self) -> Reading {
        Reading::of(&self.machines)
    }

    /// Number of in-flight steps that keeps all devices together busy.
    pub fn in_flight_target(&self) -> usize {
        if self.budget.on_host {
            super::bounds::in_flight_target(self.replicas)
        } else {
            self.machines.iter().map(|machine| machine.depth() + 1).sum()
        }
    }

    /// Opens every device and allocates the program's arena on it. The executors are in the order of the machines; the
    /// replicas of a CPU are consecutive.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] where the program is larger than the free memory; device errors.
    pub fn start(&self, program: Program, observer: &mut dyn Observer) -> Result<Vec<Executor>, RuntimeError> {
        match self.without_room(&program, &[])? {
            Some(free) => Err(refused(self.bill(&program, free, UNSTARTED))),
            None => self.follow(&[program], vec![], observer),
        }
    }

    /// Opens the only device, for clients that compute on one executor.
    ///
    /// # Errors
    /// As [`Site::start`], and [`RequestError::SeveralDevices`].
    pub(crate) fn start_one(
        &self,
        program: Program,
        observer: &mut dyn Observer,
    ) -> Result<Executor, RuntimeError> {
        self.start_alone(program, observer)?.pop().ok_or_else(several)
    }

    /// Opens the replicas of the only device.
    ///
    /// # Errors
    /// As [`Site::start_one`].
    pub(crate) fn start_alone(
        &self,
        program: Program,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Executor>, RuntimeError> {
        if self.machines.len() > 1 { Err(several()) } else { self.start(program, observer) }
    }

    /// Like [`Site::start`], but uses smaller steps if another process has taken memory since planning: the next of
    /// `programs`, which are for steps of several sizes, the largest first; behind the last, half the tokens, unless a
    /// number of tokens was requested. Executors in `running` are switched to the programs instead of opening new ones.
    pub(crate) fn start_smaller(
        &self,
        mut programs: Vec<Program>,
        stage: &SearchStage<'_>,
        mut running: Vec<Executor>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Executor>, RuntimeError> {
        let target = programs[0].target().clone();
        let depth = programs[0].depth();
        let point = SearchPoint { target: &target, depth, replicas: self.replicas };
        let build: Build<'_> = &mut |tokens, weights| stage.program(&point, tokens, weights, &mut |_, _| {});
        let longest = stage.longest;
        while let Some(free) = self.without_room(&programs[0], &running)? {
            if programs.len() > 1 {
                let text = format!("{free} are free, too little for steps of {} tokens", tokens(&programs[0]));
                observer.say(Level::Warning, &text);
                programs.remove(0);
                continue;
            }
            let bill = self.bill(&programs[0], free, UNSTARTED);
            return Err(refused(self.with_remedies(bill, &programs[0], longest, build)?));
        }
        let held = held_by(&running);
        // The free memory sufficed, but another process may take it before the arena is allocated, and the driver may lack one
        // range of that size.
        loop {
            let program = programs[0].clone();
            if !self.budget.on_host {
                switching(&running, &program, observer);
            }
            match self.follow(&programs, std::mem::take(&mut running), observer) {
                Err(RuntimeError::Device(DeviceError::OutOfMemory { .. })) => {}
                other => return other.inspect(|_| self.compare(&program, held, "at the start", observer)),
            }
            let phase = format!("at start: an arena of {} could not be allocated", program.arena_bytes());
            let others = programs.split_off(1);
            let may_shrink = self.tokens.is_none() && tokens(&program) > longest;
            if others.is_empty() && !may_shrink {
                let bill = self.bill(&program, self.free()?, &phase);
                return Err(refused(self.with_remedies(bill, &program, longest, build)?));
            }
            programs = if others.is_empty() { vec![self.smaller(&program, longest, build)?] } else { others };
            let smaller = &programs[0];
            let text = format!(
                "{phase}, another process took memory since this run was planned: steps now have {} tokens \
                    instead of {}, and the plan takes {} instead of {}",
                tokens(smaller),
                tokens(&program),
                smaller.peak(),
                program.peak()
            );
            observer.say(Level::Warning, &text);
        }
    }

    /// Reports, for each device that counts its memory, the difference between the memory this process holds and the
    /// planned memory. Up to `held` bytes of an earlier arena may still be mapped and are not counted as a difference.
    pub fn compare(&self, program: &Program, held: Bytes, when: &str, observer: &mut dyn Observer) {
        for machine in &self.machines {
            // A device that does not report its memory is not compared.
            let Ok(Some(taken)) = machine.taken() else { continue };
            let planned = program.peak();
            let above = taken.saturating_sub(planned + held.saturating_sub(program.arena_bytes()));
            let below = planned.saturating_sub(taken);
            let text = format!("{} {when}: {taken} of its memory taken, {planned} planned", machine.name());
            // Other processes on the card are in its count.
            if (above > SLACK || below > UNUSED) && machine.holders().is_empty() {
                observer.say(Level::Warning, &format!("{text}: {} apart", above.max(below)));
            } else {
                observer.say(Level::Detail, &text);
            }
        }
    }

    /// Plans the program with half the tokens, halved again until it fits the free memory; never below the longest
    /// sequence.
    fn smaller(&self, program: &Program, longest: u64, build: Build<'_>) -> Result<Program, RuntimeError> {
        let weights = program.weights();
        let free = self.free()?;
        let mut tokens = tokens(program);
        loop {
            tokens = (tokens / 2 / TOKEN_STEP * TOKEN_STEP).max(longest);
            let smaller = build(tokens, weights)?;
            if smaller.peak() <= free || tokens == longest {
                return Ok(smaller);
            }
        }
    }

    /// Returns the free memory where the program does not fit it; `None` where it fits or the device cannot report free
    /// memory. The arenas of `running` executors count as free, because the program replaces them.
    fn without_room(&self, program: &Program, running: &[Executor]) -> Result<Option<Bytes>, RuntimeError> {
        // Free host memory varies with every process; the budget was fixed when the run was planned.
        if self.budget.on_host {
            return Ok(None);
        }
        let free = self.free()? + held_by(running);
        Ok((program.peak() > free).then_some(free))
    }

    /// Returns executors for programs of one or several sizes: switches the running ones, or opens the devices if there are
    /// none.
    fn follow(
        &self,
        programs: &[Program],
        mut running: Vec<Executor>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Executor>, RuntimeError> {
        let mut report = on_start(observer);
        let programs = Prepared::new(programs.to_vec())?.with_scratch(&self.budget.scratch);
        // On the CPU there are no compiled kernels or chosen algorithms to keep, and while replicas were switched one
        // by one the weights of both programs would be in memory.
        if self.budget.on_host {
            running.clear();
        }
        if running.is_empty() {
            return self
                .open()?
                .into_iter()
                .map(|device| Ok(Executor::start_sizes(device, programs.clone(), &mut report)?))
                .collect();
        }
        running.iter_mut().try_for_each(|executor| executor.switch_sizes(programs.clone(), &mut report))?;
        Ok(running)
    }

    /// Opens every device, without an arena.
    fn open(&self) -> Result<Vec<Box<dyn plimsoll_exec::Device>>, RuntimeError> {
        limits::room_for_threads(self.threads).map_err(RuntimeError::thread("compute"))?;
        let opened = self.machines.iter().map(|machine| machine.open()).collect::<Result<Vec<_>, _>>()?;
        Ok(opened.into_iter().flatten().collect())
    }

    /// Free memory of the machine with the least.
    fn free(&self) -> Result<Bytes, RuntimeError> {
        free(&self.machines)
    }

    /// The bill that refuses a program on `free` bytes, with the largest tensors and the other holders of the memory.
    fn bill(&self, program: &Program, free: Bytes, phase: &str) -> Bill {
        let mut bill = program.bill(free, vec![]);
        let largest = Ledger { entries: program.largest_tensors(LARGEST) };
        bill.line = LimitKind::Free;
        bill.notes = vec![phase.to_owned(), format!("largest tensors: {}", largest.line())];
        let scarce = self.machines.iter().min_by_key(|machine| machine.free().unwrap_or_default());
        bill.notes.extend(scarce.and_then(holders));
        bill
    }

    /// Adds to the bill the remedies: the settings that would fit.
    fn with_remedies(
        &self,
        mut bill: Bill,
        program: &Program,
        longest: u64,
        build: Build<'_>,
    ) -> Result<Bill, RuntimeError> {
        let ceiling = tokens(program);
        let search = Search {
            floor: longest.min(ceiling),
            ceiling,
            step: TOKEN_STEP,
            budget: bill.budget,
            room: self.budget.room,
        };
        // A program that already streams its weights has no streaming remedy.
        let stream = if program.is_streamed() { Streaming::Always } else { self.stream };
        match fit(Some(ceiling), search, stream, build) {
            Err(PlanError::OverBudget(priced)) => bill.remedies = priced.remedies,
            Err(error) => return Err(error.into()),
            // It fits now: another process has returned the memory.
            Ok(_) => {}
        }
        Ok(bill)
    }
}

/// Arena size of the running executors, all of which run the same program.
fn held_by(running: &[Executor]) -> Bytes {
    running.first().map_or(Bytes::ZERO, |executor| executor.program().arena_bytes())
}

/// Phase named by a refusal that came before any allocation.
const UNSTARTED: &str = "before the first allocation";

fn refused(bill: Bill) -> RuntimeError {
    PlanError::OverBudget(Box::new(bill)).into()
}

fn several() -> RuntimeError {
    RequestError::SeveralDevices.into()
}

/// Reports the change of arena size of each executor that is switched to another program.
fn switching(running: &[Executor], program: &Program, observer: &mut dyn Observer) {
    for executor in running {
        let name = executor.device().info().name;
        let before = executor.program().arena_bytes();
        let after = program.arena_bytes();
        observer.say(Level::Detail, &format!("{name} continues with an arena of {after} instead of {before}"));
    }
}

/// Lists the other processes that hold a machine's memory; `None` without any.
fn holders(machine: &Arc<dyn Machine>) -> Option<String> {
    let holders: Vec<String> = machine.holders().iter().map(ToString::to_string).collect();
    (!holders.is_empty()).then(|| format!("of {} {}", machine.name(), holders.join(", ")))
}
