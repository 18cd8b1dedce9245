//! The state of a run apart from its tensors, as stored in a checkpoint. Invariant: together with the tensors and the
//! configuration it determines every following step bit for bit.

use super::config::PrecisionSection;
use super::dynamic::MicroStepSizeChange;
use crate::TrainError;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Position and counters of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Optimizer steps completed, including skipped steps.
    pub step: u64,
    /// Epochs completed.
    pub epoch: u64,
    /// Updates applied to the weights; in fp16 the count in Adam's bias corrections, which elsewhere is the number of steps.
    pub updates: u64,
    /// Steps skipped because a gradient was not finite.
    pub skipped: u64,
    /// Length of the current run of consecutive skipped steps.
    #[serde(default)]
    pub skipped_in_a_row: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Targets trained on.
    pub targets: u64,
    /// Loss scale of fp16.
    pub scale: LossScale,
    /// The evaluation with the lowest loss.
    pub best: Option<Best>,
    /// Loss of the last evaluation that was lower by more than `run.min_delta` than the one before it in this field.
    #[serde(default)]
    pub improved: Option<f64>,
    /// Number of evaluations since that one.
    pub stale: u64,
    /// Step after which the last evaluation ran.
    pub evaluated: u64,
    /// Size of the micro-steps of the next step, with its first step; `None` without `memory.dynamic`. Earlier versions
    /// wrote a list of all changes under the key `sizes`; of such a list the last entry is read.
    #[serde(default, alias = "sizes", deserialize_with = "last_size", skip_serializing_if = "Option::is_none")]
    pub size: Option<MicroStepSizeChange>,
    /// Position in the training data.
    pub position: Value,
}

/// Reads a size, or the last one of a list.
fn last_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MicroStepSizeChange>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Sizes {
        Last(MicroStepSizeChange),
        All(Vec<MicroStepSizeChange>),
    }
    Ok(match Sizes::deserialize(deserializer)? {
        Sizes::Last(size) => Some(size),
        Sizes::All(mut sizes) => sizes.pop(),
    })
}

/// The evaluation with the lowest loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Step after which it ran.
    pub step: u64,
    /// Mean loss per target.
    pub loss: f64,
}

/// Dynamic loss scale, which keeps fp16 gradients from underflowing to zero (Micikevicius et al. 2018): halved at an
/// overflow, doubled after many steps without one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The scale; 1 for other formats.
    pub factor: f64,
    /// Steps without overflow since the scale last changed.
    pub good: u64,
}

/// Number of consecutive skipped steps at which a run without loss scale fails. A single skipped step may be a batch of
/// outliers; after ten, the weights have no finite gradients for any batch. In fp16 the loss scale is halved at each
/// skipped step, and the run fails when it cannot be halved further.
pub const SKIPS_IN_A_ROW: u64 = 10;

/// Upper limit of the loss scale, which keeps it finite in f32; gradients overflow long before.
const LARGEST: f64 = (1u64 << 40) as f64;

impl LossScale {
    /// Returns the loss scale at the start of a run.
    pub fn new(precision: &PrecisionSection) -> Self {
        let factor = if precision.scales_loss() { precision.initial_scale } else { 1.0 };
        Self { factor, good: 0 }
    }

    /// The factor of the summed cross-entropy of a micro-batch in a step of `tokens` tokens. In fp16 it is the loss scale
    /// divided by the tokens of a step, so that fp16 tensors hold gradients of a mean, whose magnitude does not depend on
    /// the size of the micro-batch. f32 and bf16 have the range for the sum, which is divided by the number of targets in
    /// the update.
    pub fn of_micro_batch(&self, precision: &PrecisionSection, tokens: u64) -> f32 {
        let factor = if precision.scales_loss() { self.factor / tokens as f64 } else { self.factor };
        factor as f32
    }

    /// Updates the scale after a step; an error if a step overflowed at the smallest scale.
    pub fn after(&mut self, ok: bool, precision: &PrecisionSection, step: u64) -> Result<(), TrainError> {
        if !precision.scales_loss() {
            return Ok(());
        }
        if ok {
            self.good += 1;
            if self.good >= precision.growth_interval {
                *self = Self { factor: (self.factor * 2.0).min(LARGEST), good: 0 };
            }
            return Ok(());
        }
        if self.factor > 1.0 {
            *self = Self { factor: (self.factor / 2.0).max(1.0), good: 0 };
            return Ok(());
        }
        Err(TrainError::GradientsNotFinite { step })
    }
}

impl RunState {
    /// Counts a step that was applied (`ok`) or skipped.
    ///
    /// # Errors
    /// In fp16 if the loss scale cannot be halved further; in other formats after `SKIPS_IN_A_ROW` consecutive
    /// skipped steps.
    pub fn after(&mut self, ok: bool, precision: &PrecisionSection, step: u64) -> Result<(), TrainError> {
        self.scale.after(ok, precision, step)?;
        if ok {
            self.updates += 1;
            self.skipped_in_a_row = 0;
            return Ok(());
        }
        self.skipped += 1;
        self.skipped_in_a_row += 1;
        if !precision.scales_loss() && self.skipped_in_a_row >= SKIPS_IN_A_ROW {
            return Err(TrainError::StepsSkipped { step, steps: SKIPS_IN_A_ROW });
        }
        Ok(())
    }

    /// Counts an evaluation after the current step. Returns whether its loss is the lowest so far.
    pub fn evaluated(&mut self, loss: f64, min_delta: f64) -> bool {
        self.evaluated = self.step;
        // Checkpoints of versions without `run.min_delta` have no `improved`; there it was the best loss.
        let before = self.improved.or(self.best.map(|best| best.loss));
        if loss.is_finite() && before.is_none_or(|before| loss < before - min_delta) {
            (self.improved, self.stale) = (Some(loss), 0)
        } else {
            (self.improved, self.stale) = (before, self.stale + 1)
        }
        let best = loss.is_finite() && self.best.is_none_or(|best| loss < best.loss);
        if best {
            self.best = Some(Best { step: self.step, loss });
        }
        best
    }

    /// Records the size of the micro-steps from `step` on.
    pub fn resized(&mut self, step: u64, tokens: u64) {
        self.size = Some(MicroStepSizeChange { step, tokens });
    }

    /// Returns the state before the first step.
    pub fn new(precision: &PrecisionSection, position: Value) -> Self {
        let scale = LossScale::new(precision);
        Self {
            step: 0,
            epoch: 0,
            updates: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            tokens: 0,
            targets: 0,
            scale,
            best: None,
            improved: None,
            stale: 0,
            evaluated: 0,
            size: None,
            position,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_follows_overflows() {
        let precision =
            PrecisionSection { kind: plimsoll_plan::Precision::Fp16, initial_scale: 8.0, growth_interval: 3 };
        let mut scale = LossScale::new(&precision);
        for (ok, wanted) in [
            (true, (8.0, 1)),
            (false, (4.0, 0)),
            (true, (4.0, 1)),
            (true, (4.0, 2)),
            (true, (8.0, 0)),
            (false, (4.0, 0)),
            (false, (2.0, 0)),
            (false, (1.0, 0)),
        ] {
            scale.after(ok, &precision, 1).expect("a smaller scale is left");
            assert_eq!((scale.factor, scale.good), wanted);
        }
        let error = scale.after(false, &precision, 9).expect_err("no smaller scale").to_string();
        assert!(
            error.starts_with("step 9: the gradients are not finite, even without a loss scale"),
            "{error}"
        );
    }

    /// A state does not grow with the number of changes, and that of an earlier version, which did, is read.
    #[test]
    fn only_the_last_size_is_kept() {
        let text = |state: &RunState| serde_json::to_string(state).expect("JSON");
        let mut state = RunState::new(&PrecisionSection::default(), Value::Null);
        assert!(!text(&state).contains("size"));
        state.resized(100_001, 128);
        let length = text(&state).len();
        (100_002..110_000).for_each(|step| state.resized(step, 64 << (step % 2)));
        let change = |step, tokens| Some(MicroStepSizeChange { step, tokens });
        assert_eq!((state.size, text(&state).len()), (change(109_999, 128), length));
        assert_eq!(serde_json::from_str::<RunState>(&text(&state)).expect("read"), state);
        let one = r#""size":{"step":109999,"tokens":128}"#;
        for (other, wanted) in [
            (r#""sizes":[{"step":1,"tokens":256},{"step":7,"tokens":32}]"#, change(7, 32)),
            (r#""sizes":[]"#, None),
        ] {
            let earlier = text(&state).replace(one, other);
            assert_eq!(serde_json::from_str::<RunState>(&earlier).expect("read").size, wanted);
        }
        let damaged = text(&state).replace(one, r#""size":{"step":1,"tokens":2,"more":3}"#);
        assert!(serde_json::from_str::<RunState>(&damaged).is_err());
    }

    #[test]
    fn other_formats_have_no_scale() {
        for kind in
            [plimsoll_plan::Precision::F32, plimsoll_plan::Precision::Tf32, plimsoll_plan::Precision::Bf16]
        {
            let precision = PrecisionSection { kind, ..PrecisionSection::default() };
            let mut scale = LossScale::new(&precision);
            for _ in 0..3000 {
                scale.after(true, &precision, 1).expect("good");
            }
            scale.after(false, &precision, 1).expect("nothing to lower");
            assert_eq!(scale, LossScale { factor: 1.0, good: 0 });
        }
    }

    /// (loss, whether it is the lowest so far, evaluations since the last improvement): with a smallest improvement, a
    /// lower loss need not count.
    #[test]
    fn small_improvements_do_not_count() {
        let small = [
            (2.0, true, 0),
            (1.9, true, 1),
            (1.8, true, 2),
            (1.6, true, 0),
            (f64::NAN, false, 1),
            (1.7, false, 2),
            (1.3, true, 3),
            (1.0, true, 0),
        ];
        let any = [(2.0, true, 0), (1.9, true, 0), (1.9, false, 1), (f64::NAN, false, 2), (1.8, true, 0)];
        for (min_delta, wanted) in [(0.3, &small[..]), (0.0, &any[..])] {
            let mut state = RunState::new(&PrecisionSection::default(), Value::Null);
            for (step, &(loss, lowest, stale)) in (1..).zip(wanted) {
                state.step = step;
                assert_eq!(state.evaluated(loss, min_delta), lowest, "{min_delta}: {loss}");
                assert_eq!((state.stale, state.evaluated), (stale, step), "{min_delta}: {loss}");
            }
        }
        let old = Best { step: 1, loss: 1.0 };
        let mut state =
            RunState { best: Some(old), ..RunState::new(&PrecisionSection::default(), Value::Null) };
        assert!(!state.evaluated(1.5, 0.0));
        assert_eq!((state.stale, state.improved), (1, Some(1.0)), "a checkpoint without `improved`");
    }

    #[test]
    fn a_row_of_skipped_steps_is_an_error() {
        let precision =
            PrecisionSection { kind: plimsoll_plan::Precision::Bf16, ..PrecisionSection::default() };
        let mut state = RunState::new(&precision, Value::Null);
        for _ in 0..3 {
            for n in 1..SKIPS_IN_A_ROW {
                state.after(false, &precision, n).expect("not yet");
                assert_eq!(state.skipped_in_a_row, n);
            }
            state.after(true, &precision, 1).expect("a good step");
            assert_eq!(state.skipped_in_a_row, 0);
        }
        assert_eq!((state.updates, state.skipped), (3, 3 * (SKIPS_IN_A_ROW - 1)));
        let error = (0..SKIPS_IN_A_ROW).find_map(|_| state.after(false, &precision, 40).err()).expect("an end");
        assert!(
            error.to_string().starts_with("step 40: a gradient was not finite in 10 steps in a row"),
            "{error}"
        );
    }
}
