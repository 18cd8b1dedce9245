//! Changes of the size of micro-steps during a run (`memory.dynamic`). Invariant: a change takes place between two steps,
//! or before a step is repeated, and is recorded in metrics.jsonl and in checkpoints, so that a resumed run repeats it.

use crate::config::TrainConfig;
use crate::decision::NewSize;
use crate::opened_model::MicroStepSize;
use plimsoll_exec::memory::Memory;
use plimsoll_runtime::dynamic::{DynamicSizes, Reason, Switch};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The size of the micro-steps from a step on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MicroStepSizeChange {
    /// First step with this size.
    pub step: u64,
    /// Maximum number of tokens of a micro-step.
    pub tokens: u64,
}

/// Changes of an earlier process that a resumed run repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SizeReplay {
    /// The changes, in the order of their steps.
    pub changes: VecDeque<MicroStepSizeChange>,
    /// Last step that the earlier process is known to have begun. Later steps follow readings of the memory.
    pub until: u64,
}

/// Sizes of the micro-steps of a run with `memory.dynamic`, and the size in use.
#[derive(Clone, Debug)]
pub(super) struct DynamicBatch {
    control: DynamicSizes,
    sizes: Vec<MicroStepSize>,
    replay: SizeReplay,
}

impl DynamicBatch {
    /// Sizes of a run whose model has these `sizes`, in ascending order, and begins with the largest; `None` without
    /// `memory.dynamic`.
    pub(super) fn of(config: &TrainConfig, sizes: Vec<MicroStepSize>, replay: SizeReplay) -> Option<Self> {
        let settings = config.memory.dynamic.as_ref()?.settings();
        let now = sizes.len().checked_sub(1)?;
        let bytes = sizes.iter().map(|size| size.bytes).collect();
        Some(Self { control: DynamicSizes::new(settings, bytes, now), sizes, replay })
    }

    /// Tokens of the micro-steps at present.
    pub(super) fn tokens(&self) -> u64 {
        self.sizes[self.now()].tokens
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
        self.control.now()
    }

    /// Number of the largest size of at most `tokens` tokens, or of the smallest. A resumed run may have other sizes than
    /// before, if its budget is another.
    pub(super) fn size_of(&self, tokens: u64) -> usize {
        self.sizes.iter().rposition(|size| size.tokens <= tokens).unwrap_or(0)
    }

    /// Whether the size of the micro-steps of `step` is that of an earlier process. Returns the change, if there is one.
    fn replayed(&self, step: u64) -> Option<Option<usize>> {
        if self.follows_memory(step) {
            return None;
        }
        let changes = &self.replay.changes;
        let last = changes.partition_point(|change| change.step <= step).checked_sub(1);
        let size = last.and_then(|last| changes.get(last)).map(|change| self.size_of(change.tokens));
        Some(size.filter(|&size| size != self.now()))
    }

    /// Whether the size of the micro-steps of `step` follows the memory: it is not that of an earlier process.
    pub(super) fn follows_memory(&self, step: u64) -> bool {
        step > self.replay.until
    }

    /// Records that the memory was read before `step`.
    pub(super) fn record_reading(&mut self, step: u64) {
        self.control.record_reading(step);
    }

    /// The change before `step` that an earlier process made, or that a recorded reading of the memory demands or allows.
    pub(super) fn choose(&self, step: u64, memory: Option<Memory>) -> Option<NewSize> {
        if let Some(to) = self.replayed(step) {
            return to.map(|to| NewSize { to, reason: Reason::Replay, utilisation: None });
        }
        let Switch { to, reason, utilisation } = self.control.choose(step, memory?)?;
        Some(NewSize { to, reason, utilisation: Some(utilisation) })
    }

    /// Records that size number `size` is in use.
    pub(super) fn set(&mut self, size: usize) {
        self.control.set(size);
    }

    /// Records that the device had too little memory at `step`, at the size in use or at a larger one.
    pub(super) fn lacks_memory(&mut self, step: u64) {
        self.control.lacks_memory(step);
        // From here on, the run is not that of the earlier process.
        self.replay = SizeReplay::default();
    }

    /// Words for a message on a change ([`DynamicSizes::cause`]).
    pub(super) fn cause(&self, reason: Reason, utilisation: Option<f64>) -> String {
        self.control.cause(reason, utilisation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::Bytes;

    fn batch(replay: SizeReplay) -> DynamicBatch {
        let text = "data: {train: [x], longest: 2}\nmodel: {kind: dense_lm}\nbatch: {tokens: 64}\nrun: {steps: 1}\n\
                    memory: {dynamic: {adjustment_frequency: 2}}";
        let config = TrainConfig::parse(text, "test", &[]).expect("sound");
        let size = |tokens| MicroStepSize { tokens, bytes: Bytes(10 * tokens) };
        DynamicBatch::of(&config, [8, 16, 32].map(size).to_vec(), replay).expect("dynamic")
    }

    #[test]
    fn changes_of_an_earlier_process_are_repeated_step_by_step() {
        let change = |step, tokens| MicroStepSizeChange { step, tokens };
        let changes = VecDeque::from([change(3, 8), change(5, 16), change(5, 24)]);
        let mut batch = batch(SizeReplay { changes, until: 6 });
        for (step, wanted) in
            [(2, Some(None)), (3, Some(Some(0))), (4, Some(None)), (5, Some(Some(1))), (7, None)]
        {
            let found = batch.replayed(step);
            assert_eq!(found, wanted, "step {step}");
            found.flatten().into_iter().for_each(|size| batch.set(size));
        }
        assert_eq!((batch.tokens(), batch.size_of(4), batch.size_of(99)), (16, 0, 2));
    }

    /// A resumed run reads the memory for the first time after the steps that it repeats, whose number need not be that of a
    /// regular reading.
    #[test]
    fn the_first_reading_is_acted_upon_at_any_step() {
        let mut batch = batch(SizeReplay { until: 7, ..SizeReplay::default() });
        let memory = Memory { free: Bytes(70), total: Bytes(1000) };
        let choice = |batch: &DynamicBatch, step| batch.choose(step, Some(memory)).map(|size| size.to);
        assert!(!batch.follows_memory(7) && batch.follows_memory(8));
        assert_eq!(choice(&batch, 8), None, "no regular reading");
        batch.record_reading(8);
        assert_eq!(choice(&batch, 8), Some(1));
        batch.record_reading(10);
        assert_eq!((choice(&batch, 10), choice(&batch, 11)), (None, Some(1)));
    }
}
