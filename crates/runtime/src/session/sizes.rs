//! Sizes of the steps of a session: when they change with the memory in use, and after a lack of memory. Invariant: a change
//! takes place while no step is in flight, and loses and repeats no sequence.

use super::bounds::tokens;
use super::planned::Reload;
use crate::dynamic::{DynamicSizes, RETRIES, Reason, StepSizeChange, Switch};
use crate::{Observer, RuntimeError};
use plimsoll_exec::memory::Memory;
use plimsoll_exec::{DeviceError, Executor, Machine, Prepared};
use plimsoll_graph::Bytes;
use plimsoll_plan::Program;
use std::sync::Arc;

/// Sizes of the steps of a session.
pub(super) struct StepSizes {
    /// Chooses among programs of several sizes; `None` if there is one.
    control: Option<DynamicSizes>,
    /// Maximum number of tokens of a step, of each size, in ascending order: size number 0 is the last program.
    tokens: Vec<u64>,
    machines: Vec<Arc<dyn Machine>>,
    /// Number of steps that were sent.
    sent: u64,
    /// Number of steps that were sent before the last reading.
    read: Option<u64>,
    /// The change that waits until no step is in flight.
    pending: Option<PendingSize>,
    /// Smaller sizes that were used since a step was completed.
    tried: Vec<u64>,
    /// Changes not yet taken by the client.
    changes: Vec<StepSizeChange>,
}

/// A change of size that was decided on.
enum PendingSize {
    /// To size number `to` of the programs.
    Resize { to: usize, reason: Reason, utilisation: Option<f64> },
    /// To a program that is planned for half the tokens, because of this lack of memory.
    Reload(DeviceError),
}

/// Action of the session that a change of size requires, once no step is in flight.
pub(super) enum SizeAction {
    /// Use the program of this index.
    Resize(usize),
    /// Start again with a smaller program, because of this lack of memory.
    Reload(DeviceError),
}

impl StepSizes {
    /// Sizes of a session with these programs, the largest first, of which number `current` is in use. The steps follow the
    /// memory if there are several.
    pub(super) fn new(programs: &Prepared, current: usize, reload: &Reload<'_>) -> Self {
        let settings = reload.dynamic();
        let machines = reload.site().machines().to_vec();
        let (bytes, tokens): (Vec<Bytes>, Vec<u64>) =
            programs.programs().rev().map(|program| (program.all_arenas_bytes(), tokens(program))).unzip();
        let count = bytes.len();
        // Sizes are numbered from the smallest on, programs from the largest on.
        let now = count - 1 - current;
        let control = settings.filter(|_| count > 1).map(|settings| DynamicSizes::new(settings, bytes, now));
        Self { control, tokens, machines, sent: 0, read: None, pending: None, tried: vec![], changes: vec![] }
    }

    /// Whether the size changes with the memory in use.
    pub(super) fn is_dynamic(&self) -> bool {
        self.control.is_some()
    }

    /// Whether the next step may be sent. Before each step, the memory is read; if it demands or allows another size, steps
    /// wait for the change.
    pub(super) fn admits_step(&mut self) -> Result<bool, RuntimeError> {
        if let Some(control) = &mut self.control
            && self.pending.is_none()
            && self.read != Some(self.sent)
        {
            // One reading for each step: after the change that it led to, the step is sent. With another reading the
            // same step would be due again, and the size could change several times without a step between the changes.
            self.read = Some(self.sent);
            let switch = control.decide(self.sent + 1, fullest(&self.machines)?);
            self.pending = switch.map(|Switch { to, reason, utilisation }| PendingSize::Resize {
                to,
                reason,
                utilisation: Some(utilisation),
            });
        }
        Ok(self.pending.is_none())
    }

    /// Records that a step was sent.
    pub(super) fn sent(&mut self) {
        self.sent += 1;
    }

    /// Records that a step was completed. Returns whether it is the first since a lack of memory.
    pub(super) fn completed(&mut self) -> bool {
        // A step that is completed while a change waits has the old size. It does not show that the smaller size has
        // enough memory, so it must not reset the number of attempts, which `RETRIES` limits.
        let is_first = self.pending.is_none() && !self.tried.is_empty();
        if is_first {
            self.tried.clear();
        }
        is_first
    }

    /// Whether a change waits until no step is in flight.
    pub(super) fn is_changing(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether a lack of memory is answered with a smaller size: of the programs, or by another start (`reload`).
    pub(super) fn gives_way(&self, reload: Option<&Reload<'_>>) -> bool {
        let has_smaller = match &self.control {
            Some(control) => control.now() > 0,
            None => reload.is_some_and(|reload| reload.has_smaller(self.tokens[0])),
        };
        has_smaller && self.tried.len() < RETRIES
    }

    /// Decides on the next smaller size after a lack of memory, unless that change waits already: several devices may lack
    /// memory for steps of one size.
    pub(super) fn lacks_memory(&mut self, error: DeviceError) {
        let Some(control) = &mut self.control else {
            self.pending.get_or_insert(PendingSize::Reload(error));
            return;
        };
        control.lacks_memory(self.sent);
        let Some(next) = control.now().checked_sub(1) else { return };
        let to = match self.pending {
            Some(PendingSize::Resize { to, .. }) => to.min(next),
            Some(PendingSize::Reload(_)) | None => next,
        };
        self.pending = Some(PendingSize::Resize { to, reason: Reason::OutOfMemory, utilisation: None });
    }

    /// The change that waits. A reload is returned once.
    pub(super) fn wanted(&mut self) -> Option<SizeAction> {
        match self.pending.take()? {
            PendingSize::Reload(error) => Some(SizeAction::Reload(error)),
            resize @ PendingSize::Resize { to, .. } => {
                // Kept until the devices have answered: `resized` and `refused` read it.
                self.pending = Some(resize);
                Some(SizeAction::Resize(self.tokens.len() - 1 - to))
            }
        }
    }

    /// Records that the devices use the size of [`SizeAction::Resize`].
    pub(super) fn resized(&mut self) {
        let (Some(PendingSize::Resize { to, reason, utilisation }), Some(control)) =
            (self.pending.take(), &mut self.control)
        else {
            return;
        };
        let from = self.tokens[control.now()];
        let cause = control.cause(reason, utilisation);
        control.set(to);
        self.record(StepSizeChange { step: self.sent, from, to: self.tokens[to], reason, utilisation, cause });
    }

    /// Switches the executors to the program for half the tokens and loads the weights again, with `reload`; `None` if there
    /// is no such program, so that the run fails for lack of memory.
    pub(super) fn reload(
        &mut self,
        reload: Option<&Reload<'_>>,
        program: &Program,
        executors: Vec<Executor>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Vec<Executor>>, RuntimeError> {
        let Some(reload) = reload else { return Ok(None) };
        let Some(executors) = reload.smaller(program, executors, observer)? else { return Ok(None) };
        let from = self.tokens[0];
        self.tokens = executors.first().map_or(vec![], |executor| vec![tokens(executor.program())]);
        self.record(StepSizeChange {
            step: self.sent,
            from,
            to: self.tokens[0],
            reason: Reason::OutOfMemory,
            utilisation: None,
            cause: "out of memory; the weights were loaded again".to_owned(),
        });
        Ok(Some(executors))
    }

    fn record(&mut self, change: StepSizeChange) {
        if change.reason == Reason::OutOfMemory {
            self.tried.push(change.to);
        }
        self.changes.push(change);
    }

    /// Records that there was no memory for the larger size of [`SizeAction::Resize`]. Returns words for a warning; `None` if the
    /// change is not to a larger size, so that the run fails.
    pub(super) fn refused(&mut self) -> Option<String> {
        let (Some(PendingSize::Resize { to, reason: Reason::Grow, .. }), Some(control)) =
            (&self.pending, &mut self.control)
        else {
            return None;
        };
        control.lacks_memory(self.sent);
        let to = self.tokens[*to];
        let from = self.tokens[control.now()];
        self.pending = None;
        Some(format!("there is no memory for steps of {to} tokens; {from} are kept"))
    }

    /// Returns the changes since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<StepSizeChange> {
        std::mem::take(&mut self.changes)
    }

    /// Tokens of the smaller sizes that were used since a step was completed.
    pub(super) fn tried(&self) -> &[u64] {
        &self.tried
    }
}

/// The memory of the machine that has the largest share in use.
fn fullest(machines: &[Arc<dyn Machine>]) -> Result<Memory, RuntimeError> {
    let readings = machines.iter().map(|machine| Ok(machine.usage()?));
    let readings = readings.collect::<Result<Vec<Memory>, RuntimeError>>()?;
    let fullest = readings.into_iter().max_by(|a, b| a.share().total_cmp(&b.share()));
    fullest.ok_or_else(|| RuntimeError::bug("a session has no machine"))
}
