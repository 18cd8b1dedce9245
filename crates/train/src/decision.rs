//! Decisions of the training loop: when it evaluates, writes a checkpoint, changes the size of micro-steps, repeats what failed,
//! and stops. Invariant: [`decide`] is a pure function, and a clock, a signal, the memory in use or a lack of memory change the
//! course of a run only through its [`Decision`], so ranks that share the value do the same. Skipped updates and the loss scale
//! follow from the results of a step, which all ranks have ([`RunState::after`]). A size for which a device has no memory is an
//! outcome, not a decision: the run keeps the size it has.

use super::config::{Interval, RunSection};
use super::dynamic::DynamicBatch;
use super::state::RunState;
use plimsoll_exec::memory::Memory;
use plimsoll_runtime::dynamic::{RETRIES, Reason};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Actions of the training loop at one [`LoopMoment`], carried out in the order of the fields. The default is no action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Decision {
    /// Whether the validation loss is computed.
    pub evaluate: bool,
    /// Whether a checkpoint is written.
    pub save: Save,
    /// New size of micro-steps. After a lack of memory, the step, evaluation or checkpoint that failed is repeated with it.
    pub size: Option<NewSize>,
    /// Reason to end the run.
    pub stop: Option<StopReason>,
}

/// Whether a checkpoint is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Save {
    /// No.
    #[default]
    No,
    /// Yes, if the evaluation of the same decision has the lowest loss so far.
    IfBest,
    /// Yes, unless there is one of the same step.
    Yes,
}

/// A change of the size of micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSize {
    /// Number of the size, in ascending order.
    pub to: usize,
    /// Cause of the change.
    pub reason: Reason,
    /// Share of the memory that was in use, if it was read.
    pub utilisation: Option<f64>,
}

/// Reason to end a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StopReason {
    /// A limit of the configuration was reached.
    Limit(Ended),
    /// A signal, by its number.
    Signal(u8),
    /// The device has too little memory, and smaller micro-steps cannot help.
    OutOfMemory,
}

/// The limit that ended a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// `run.steps` was reached.
    Steps,
    /// `run.epochs` was reached.
    Epochs,
    /// `run.max_tokens` was reached.
    Tokens,
    /// `run.patience` was exhausted.
    Patience,
}

impl Ended {
    /// The configuration key of the limit.
    pub fn key(self) -> &'static str {
        match self {
            Self::Steps => "run.steps",
            Self::Epochs => "run.epochs",
            Self::Tokens => "run.max_tokens",
            Self::Patience => "run.patience",
        }
    }

    /// The limit that a run in this state has reached, if any.
    pub(super) fn of(run: &RunSection, state: &RunState) -> Option<Self> {
        let limits = [
            (Self::Steps, run.steps, state.step),
            (Self::Epochs, run.epochs, state.epoch),
            (Self::Tokens, run.max_tokens, state.targets),
            (Self::Patience, run.patience, state.stale),
        ];
        let reached = limits.into_iter().find(|(_, limit, now)| limit.is_some_and(|limit| *now >= limit));
        reached.map(|(ended, ..)| ended)
    }
}

/// Inputs of [`decide`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Situation<'a> {
    /// Limits of the run, and intervals of evaluations and checkpoints.
    pub run: &'a RunSection,
    /// Counters of the run.
    pub state: &'a RunState,
    /// Sizes of micro-steps; `None` without `memory.dynamic`.
    pub dynamic: Option<&'a DynamicBatch>,
    /// Position in the loop, with the measurements made there.
    pub moment: LoopMoment,
}

/// Position in the training loop at which a decision is made, with the measurements made there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LoopMoment {
    /// Before a step, when the evaluation and the checkpoint that the earlier step made due are done.
    BeforeStep {
        /// Signal that asks the run to end.
        signal: Option<u8>,
        /// Free and total memory of the device; `None` if the size of micro-steps does not follow it at this step.
        memory: Option<Memory>,
    },
    /// After a step was started, or after the data of an epoch ended before one began.
    AfterStep {
        /// Whether a step was started.
        has_stepped: bool,
        /// Whether an epoch ended.
        ends_epoch: bool,
        /// Time since the newest checkpoint was written, or since the run began.
        since_save: Duration,
    },
    /// The device had too little memory for a step, an evaluation or a checkpoint.
    OutOfMemory {
        /// Number of times that it was repeated with smaller micro-steps.
        retries: usize,
        /// Whether it can be repeated. An update that changed weights cannot.
        is_repeatable: bool,
    },
}

/// Returns the actions of the training loop in a situation.
pub(super) fn decide(situation: &Situation<'_>) -> Decision {
    let &Situation { run, state, dynamic, moment } = situation;
    match moment {
        // Before any limit: an evaluation of the last step may take longer than the sender of the signal waits.
        LoopMoment::BeforeStep { signal: Some(signal), .. } => {
            Decision { save: Save::Yes, stop: Some(StopReason::Signal(signal)), ..Decision::default() }
        }
        LoopMoment::BeforeStep { signal: None, memory } => match Ended::of(run, state) {
            Some(limit) => Decision {
                evaluate: run.evaluate_every.is_some() && state.step > 0 && state.evaluated != state.step,
                save: Save::Yes,
                size: None,
                stop: Some(StopReason::Limit(limit)),
            },
            None => {
                let size = dynamic.and_then(|dynamic| dynamic.choose(state.step + 1, memory));
                Decision { size, ..Decision::default() }
            }
        },
        LoopMoment::AfterStep { has_stepped, ends_epoch, since_save } => {
            let is_due = |every: &Option<Interval>, since: Duration| {
                every.as_ref().is_some_and(|every| {
                    (has_stepped && every.is_due(state.step, since))
                        || (ends_epoch && every.is_due_after_epoch(state.epoch))
                })
            };
            // Time does not bring an evaluation about: `run.evaluate_every` is no duration.
            let evaluate = is_due(&run.evaluate_every, Duration::ZERO) && state.evaluated != state.step;
            let save = if is_due(&run.save_every, since_save) {
                Save::Yes
            } else if evaluate && run.keep_best {
                Save::IfBest
            } else {
                Save::No
            };
            Decision { evaluate, save, ..Decision::default() }
        }
        LoopMoment::OutOfMemory { retries, is_repeatable } => {
            let smaller = dynamic.and_then(|dynamic| dynamic.now().checked_sub(1));
            match smaller.filter(|_| is_repeatable && retries < RETRIES) {
                Some(to) => {
                    let size = NewSize { to, reason: Reason::OutOfMemory, utilisation: None };
                    Decision { size: Some(size), ..Decision::default() }
                }
                None => Decision { stop: Some(StopReason::OutOfMemory), ..Decision::default() },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TrainConfig;
    use super::super::dynamic::{MicroStepSizeChange, SizeReplay};
    use super::super::opened_model::MicroStepSize;
    use super::*;
    use plimsoll_graph::Bytes;
    use serde_json::Value;
    use std::collections::VecDeque;

    const NOTHING: Decision = Decision { evaluate: false, save: Save::No, size: None, stop: None };

    fn config(flags: &str) -> TrainConfig {
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let text = "data: {train: [x], longest: 2}\nmodel: {kind: dense_lm}\nbatch: {tokens: 64}";
        TrainConfig::parse(text, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
    }

    /// The state of a run that has done nothing.
    fn start() -> RunState {
        RunState::new(&TrainConfig::default().precision, Value::Null)
    }

    /// A decision that was written and read again, as ranks exchange it.
    fn sent(decision: Decision) -> Decision {
        let text = serde_json::to_string(&decision).expect("JSON");
        let read = serde_json::from_str(&text).expect("a decision");
        assert_eq!(decision, read, "{text}");
        read
    }

    /// The decision of a run without `memory.dynamic`.
    fn decided(config: &TrainConfig, state: &RunState, moment: LoopMoment) -> Decision {
        sent(decide(&Situation { run: &config.run, state, dynamic: None, moment }))
    }

    #[test]
    fn a_run_ends_at_its_limits_and_on_signals() {
        let ends = |evaluate, stop| Decision { evaluate, save: Save::Yes, stop: Some(stop), ..NOTHING };
        let limit = |evaluate, ended| ends(evaluate, StopReason::Limit(ended));
        let at = |step| RunState { step, ..start() };
        let evaluates = "run.evaluate_every=10 run.steps=4";
        let patient = "run.evaluate_every=2 run.steps=90 run.patience=3";
        for (flags, state, signal, wanted) in [
            ("run.steps=4", at(3), None, NOTHING),
            ("run.steps=4", at(4), None, limit(false, Ended::Steps)),
            ("run.epochs=2", RunState { epoch: 1, ..at(9) }, None, NOTHING),
            ("run.epochs=2", RunState { epoch: 2, ..at(9) }, None, limit(false, Ended::Epochs)),
            ("run.max_tokens=99", RunState { targets: 98, ..at(9) }, None, NOTHING),
            ("run.max_tokens=99", RunState { targets: 99, ..at(9) }, None, limit(false, Ended::Tokens)),
            (patient, RunState { evaluated: 8, stale: 2, ..at(8) }, None, NOTHING),
            (patient, RunState { evaluated: 8, stale: 3, ..at(8) }, None, limit(false, Ended::Patience)),
            // Of two limits the first in the order of the list is named.
            ("run.steps=4 run.epochs=1", RunState { epoch: 1, ..at(4) }, None, limit(false, Ended::Steps)),
            // The last step is evaluated, but not twice.
            (evaluates, at(4), None, limit(true, Ended::Steps)),
            (evaluates, RunState { evaluated: 4, ..at(4) }, None, limit(false, Ended::Steps)),
            // A signal comes before a limit, and before the evaluation of the last step.
            (evaluates, at(3), Some(15), ends(false, StopReason::Signal(15))),
            (evaluates, at(4), Some(2), ends(false, StopReason::Signal(2))),
        ] {
            let found = decided(&config(flags), &state, LoopMoment::BeforeStep { signal, memory: None });
            assert_eq!(found, wanted, "{flags}: {state:?}, signal {signal:?}");
        }
    }

    #[test]
    fn evaluations_and_checkpoints_are_due_by_steps_epochs_and_time() {
        // A step, the last step of an epoch, and the end of an epoch where a step would have begun.
        let [step, last, end] = [[true, false], [true, true], [false, true]];
        let does = |evaluate, save| Decision { evaluate, save, ..NOTHING };
        let long = 1 << 40;
        for (flags, [steps, epochs, evaluated], moment, seconds, wanted) in [
            ("run.save_every=null", [4, 0, 0], step, long, NOTHING),
            ("run.save_every=never", [4, 1, 0], last, long, NOTHING),
            // By steps.
            ("run.save_every=4", [4, 0, 0], step, 0, does(false, Save::Yes)),
            ("run.save_every=4", [5, 0, 0], step, long, NOTHING),
            ("run.save_every=4", [4, 1, 0], end, long, NOTHING),
            ("run.evaluate_every=2", [4, 0, 2], step, 0, does(true, Save::IfBest)),
            ("run.evaluate_every=2 run.keep_best=false", [4, 0, 2], step, 0, does(true, Save::No)),
            ("run.evaluate_every=2 run.save_every=4", [4, 0, 2], step, 0, does(true, Save::Yes)),
            ("run.evaluate_every=2", [5, 0, 4], step, 0, NOTHING),
            // By time.
            ("run.save_every=10min", [5, 0, 0], step, 599, NOTHING),
            ("run.save_every=10min", [5, 0, 0], step, 600, does(false, Save::Yes)),
            ("run.save_every=10min", [5, 1, 0], end, 600, NOTHING),
            // By epochs.
            ("run.save_every=epoch", [5, 1, 0], last, 0, does(false, Save::Yes)),
            ("run.save_every=epoch", [5, 1, 0], end, 0, does(false, Save::Yes)),
            ("run.save_every=epoch", [5, 1, 0], step, long, NOTHING),
            ("run.save_every=2epochs", [5, 1, 0], end, 0, NOTHING),
            ("run.evaluate_every=epoch", [5, 1, 3], end, 0, does(true, Save::IfBest)),
            // A step is evaluated once.
            ("run.evaluate_every=epoch", [5, 1, 5], end, 0, NOTHING),
        ] {
            let config = config(&format!("run.steps=90 {flags}"));
            let state = RunState { step: steps, epoch: epochs, evaluated, ..start() };
            let [has_stepped, ends_epoch] = moment;
            let since_save = Duration::from_secs(seconds);
            let moment = LoopMoment::AfterStep { has_stepped, ends_epoch, since_save };
            assert_eq!(decided(&config, &state, moment), wanted, "{flags}: {state:?}, {moment:?}");
        }
    }

    const DYNAMIC: &str = "run.steps=90 memory.dynamic.adjustment_frequency=1";

    /// Sizes of 8, 16 and 32 tokens, of which number `now` is in use. Steps up to 6 repeat those of an earlier process, which
    /// changed to 8 tokens at step 3 and to 16 at step 5.
    fn dynamic(config: &TrainConfig, now: usize) -> DynamicBatch {
        let size = |tokens| MicroStepSize { tokens, bytes: Bytes(tokens) };
        let change = |step, tokens| MicroStepSizeChange { step, tokens };
        let replay = SizeReplay { changes: VecDeque::from([change(3, 8), change(5, 16)]), until: 6 };
        let mut dynamic = DynamicBatch::of(config, [8, 16, 32].map(size).to_vec(), replay).expect("dynamic");
        dynamic.set(now);
        dynamic
    }

    #[test]
    fn the_size_of_micro_steps_follows_the_memory() {
        let config = config(DYNAMIC);
        let used = |used: u64| Some(Memory { free: Bytes(1000 - used), total: Bytes(1000) });
        let to =
            |to, reason, utilisation| Decision { size: Some(NewSize { to, reason, utilisation }), ..NOTHING };
        for (step, now, memory, wanted) in [
            // The next step is one of the earlier process: the memory decides nothing.
            (1, 2, used(999), NOTHING),
            (2, 2, None, to(0, Reason::Replay, None)),
            (3, 0, used(100), NOTHING),
            (4, 0, None, to(1, Reason::Replay, None)),
            // It is the first one after them, or a later one.
            (6, 2, None, NOTHING),
            (6, 2, used(900), NOTHING),
            (6, 2, used(930), to(1, Reason::Warning, Some(0.93))),
            (9, 2, used(980), to(0, Reason::Emergency, Some(0.98))),
            (9, 0, used(980), NOTHING),
            (9, 1, used(500), to(2, Reason::Grow, Some(0.5))),
        ] {
            let dynamic = dynamic(&config, now);
            let moment = LoopMoment::BeforeStep { signal: None, memory };
            let state = RunState { step, ..start() };
            let situation = Situation { run: &config.run, state: &state, dynamic: Some(&dynamic), moment };
            assert_eq!(sent(decide(&situation)), wanted, "after step {step}, size {now}, {memory:?}");
            // A run that ends does not change its size.
            let state = RunState { step: 90, ..start() };
            let found = sent(decide(&Situation { state: &state, ..situation }));
            assert_eq!((found.size, found.stop), (None, Some(StopReason::Limit(Ended::Steps))));
        }
    }

    #[test]
    fn a_lack_of_memory_is_met_with_the_next_smaller_size_or_ends_the_run() {
        let config = config(DYNAMIC);
        let state = RunState { step: 4, ..start() };
        let smaller = |to| {
            let size = NewSize { to, reason: Reason::OutOfMemory, utilisation: None };
            Decision { size: Some(size), ..NOTHING }
        };
        let fails = Decision { stop: Some(StopReason::OutOfMemory), ..NOTHING };
        for (now, retries, is_repeatable, wanted) in [
            (2, 0, true, smaller(1)),
            (1, 1, true, smaller(0)),
            (0, 2, true, fails),
            (2, 0, false, fails),
            (2, RETRIES - 1, true, smaller(1)),
            (2, RETRIES, true, fails),
        ] {
            let dynamic = dynamic(&config, now);
            let moment = LoopMoment::OutOfMemory { retries, is_repeatable };
            let situation = Situation { run: &config.run, state: &state, dynamic: Some(&dynamic), moment };
            let found = sent(decide(&situation));
            assert_eq!(found, wanted, "size {now}, {retries} retries, repeatable {is_repeatable}");
            assert_eq!(decided(&config, &state, moment), fails, "a single size");
        }
    }
}
