//! Changes of the size of micro-steps during a run (`memory.dynamic`). Invariant: a change takes place between two steps,
//! or before a step is repeated, and is recorded in metrics.jsonl and in checkpoints, so that a resumed run repeats it.

use crate::config::TrainConfig;
use crate::trainable::MicroStepSize;
use plimsoll_exec::memory::Memory;
use plimsoll_graph::Bytes;
use plimsoll_runtime::dynamic::{Dynamic, Reason, Switch};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The size of the micro-steps from a step on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeChange {
    /// First step with this size.
    pub step: u64,
    /// Maximum number of tokens of a micro-step.
    pub tokens: u64,
}

/// Changes of an earlier process that a resumed run repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// The changes, in the order of their steps.
    pub changes: VecDeque<SizeChange>,
    /// Last step that the earlier process is known to have begun. Later steps follow readings of the memory.
    pub until: u64,
}

/// Number of readings after a lack of memory at which a run does not grow: a process that takes memory for a moment at a
/// time would cause another failure at once.
const PAUSE: u64 = 10;

/// Sizes of the micro-steps of a run with `memory.dynamic`, and the size in use.
#[derive(Clone, Debug)]
pub(super) struct DynamicBatch {
    settings: Dynamic,
    sizes: Vec<MicroStepSize>,
    now: usize,
    replay: Replay,
    /// Whether no reading was taken yet.
    is_first: bool,
    /// Step before which the run does not grow.
    paused: u64,
}

impl DynamicBatch {
    /// Sizes of a run whose model has these `sizes`, in ascending order, and begins with the largest; `None` without
    /// `memory.dynamic`.
    pub(super) fn of(config: &TrainConfig, sizes: Vec<MicroStepSize>, replay: Replay) -> Option<Self> {
        let settings = config.memory.dynamic.as_ref()?.settings();
        let now = sizes.len().checked_sub(1)?;
        Some(Self { settings, sizes, now, replay, is_first: true, paused: 0 })
    }

    /// Tokens of the micro-steps at present.
    pub(super) fn tokens(&self) -> u64 {
        self.sizes[self.now].tokens
    }

    /// Tokens of the smallest and of the largest micro-step.
    pub(super) fn range(&self) -> [u64; 2] {
        [self.sizes[0].tokens, self.sizes[self.sizes.len() - 1].tokens]
    }

    /// Tokens of size number `size`.
    pub(super) fn tokens_of(&self, size: usize) -> u64 {
        self.sizes[size].tokens
    }

    /// Number of the size in use.
    pub(super) fn now(&self) -> usize {
        self.now
    }

    /// Number of the largest size of at most `tokens` tokens, or of the smallest. A resumed run may have other sizes than
    /// before, if its budget is another.
    pub(super) fn size_of(&self, tokens: u64) -> usize {
        self.sizes.iter().rposition(|size| size.tokens <= tokens).unwrap_or(0)
    }

    /// Whether the size of the micro-steps of `step` is that of an earlier process. Returns the change, if there is one.
    pub(super) fn replayed(&mut self, step: u64) -> Option<Option<usize>> {
        if step > self.replay.until {
            return None;
        }
        let mut tokens = None;
        while let Some(change) = self.replay.changes.pop_front_if(|change| change.step <= step) {
            tokens = Some(change.tokens);
        }
        Some(tokens.map(|tokens| self.size_of(tokens)).filter(|&size| size != self.now))
    }

    /// Decides on a change before `step`, from a reading of the memory.
    pub(super) fn decide(&mut self, step: u64, memory: Memory) -> Option<Switch> {
        let due = std::mem::take(&mut self.is_first) || self.settings.is_due(step);
        let bytes: Vec<Bytes> = self.sizes.iter().map(|size| size.bytes).collect();
        let switch = self.settings.decide(memory, &bytes, self.now, due)?;
        (switch.reason != Reason::Grow || step >= self.paused).then_some(switch)
    }

    /// Records that size number `size` is in use.
    pub(super) fn set(&mut self, size: usize) {
        self.now = size;
    }

    /// Records that the device had too little memory at `step`, at the size in use or at a larger one.
    pub(super) fn lacks_memory(&mut self, step: u64) {
        self.paused = step + PAUSE * self.settings.every;
        // From here on, the run is not that of the earlier process.
        self.replay = Replay::default();
    }

    /// Shares of the memory for a message: the word of the threshold that `reason` names, with its value.
    pub(super) fn threshold(&self, reason: Reason) -> String {
        let of = self.settings.thresholds;
        match reason {
            Reason::Warning => format!("warning from {} %", percent(of.warning)),
            Reason::Critical => format!("critical from {} %", percent(of.critical)),
            Reason::Emergency => format!("emergency from {} %", percent(of.emergency)),
            Reason::Grow => format!("target {} %", percent(of.target)),
            Reason::Replay => "as before the run was resumed".to_owned(),
            Reason::OutOfMemory => "out of memory".to_owned(),
        }
    }
}

/// A share in percent, with one decimal place where it is not whole.
pub(super) fn percent(share: f64) -> f64 {
    (share * 1000.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(replay: Replay) -> DynamicBatch {
        let text = "data: {train: [x], longest: 2}\nmodel: {kind: dense_lm}\nbatch: {tokens: 64}\nrun: {steps: 1}\n\
                    memory: {dynamic: {adjustment_frequency: 2}}";
        let config = TrainConfig::parse(text, "test", &[]).expect("sound");
        let size = |tokens| MicroStepSize { tokens, bytes: Bytes(10 * tokens) };
        DynamicBatch::of(&config, [8, 16, 32].map(size).to_vec(), replay).expect("dynamic")
    }

    fn used(used: u64) -> Memory {
        Memory { free: Bytes(1000 - used), total: Bytes(1000) }
    }

    #[test]
    fn changes_of_an_earlier_process_are_repeated_step_by_step() {
        let change = |step, tokens| SizeChange { step, tokens };
        let changes = VecDeque::from([change(3, 8), change(5, 16), change(5, 24)]);
        let mut batch = batch(Replay { changes, until: 6 });
        for (step, wanted) in
            [(2, Some(None)), (3, Some(Some(0))), (4, Some(None)), (5, Some(Some(1))), (7, None)]
        {
            let found = batch.replayed(step);
            assert_eq!(found, wanted, "step {step}");
            found.flatten().into_iter().for_each(|size| batch.set(size));
        }
        assert_eq!((batch.tokens(), batch.size_of(4), batch.size_of(99)), (16, 0, 2));
    }

    #[test]
    fn a_run_does_not_grow_soon_after_a_lack_of_memory() {
        let mut batch = batch(Replay::default());
        assert_eq!(batch.decide(1, used(930)).map(|s| (s.to, s.reason)), Some((1, Reason::Warning)));
        batch.set(0);
        batch.lacks_memory(2);
        let grown: Vec<u64> = (2..40).filter(|&step| batch.decide(step, used(100)).is_some()).collect();
        assert_eq!(grown.first(), Some(&23), "{grown:?}");
        assert_eq!(batch.decide(4, used(980)), None, "nothing smaller");
    }
}
