//! Where a run is: what a checkpoint holds beside tensors. Invariant: with the tensors and the configuration it decides
//! every bit that follows.

use super::config::{Precision, PrecisionKind};
use crate::TrainError;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Optimizer steps done, skipped ones included.
    pub step: u64,
    /// Epochs done.
    pub epoch: u64,
    /// Updates that moved the weights: what Adam's corrections count.
    pub updates: u64,
    /// Steps skipped because a gradient was not finite.
    pub skipped: u64,
    /// Of these, the newest in a row.
    #[serde(default)]
    pub skipped_in_a_row: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Targets trained on.
    pub targets: u64,
    /// Of fp16.
    pub scale: LossScale,
    /// The lowest evaluation.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub stale: u64,
    /// The step after which the last one was.
    pub evaluated: u64,
    /// The place in the training data.
    pub position: Value,
}

/// The lowest evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// After which step.
    pub step: u64,
    /// The loss of a target.
    pub loss: f64,
}

/// The factor of the loss, so that gradients are no zeros in fp16 (Micikevicius et al. 2018): halved at an overflow,
/// doubled after many good steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The factor; 1 for other formats.
    pub factor: f64,
    /// Good steps since it last changed.
    pub good: u64,
}

/// A run in f32 or bf16 ends at so many skipped steps in a row. One may be a batch of outliers; ten are weights that no
/// batch has finite gradients for. In fp16 the loss scale falls at each, and the run ends where no smaller one is left.
pub const SKIPS_IN_A_ROW: u64 = 10;

/// The largest, so that it stays a number in f32; gradients overflow long before.
const LARGEST: f64 = (1u64 << 40) as f64;

impl LossScale {
    /// At the start of a run.
    pub fn new(precision: &Precision) -> Self {
        match precision.kind {
            PrecisionKind::F32 | PrecisionKind::Bf16 => Self { factor: 1.0, good: 0 },
            PrecisionKind::Fp16 => Self { factor: precision.initial_scale, good: 0 },
        }
    }

    /// After a step; an error where no smaller factor is left.
    pub fn after(&mut self, ok: bool, precision: &Precision, step: u64) -> Result<(), TrainError> {
        let scales = precision.kind == PrecisionKind::Fp16;
        match ok {
            true if !scales => {}
            true => {
                self.good += 1;
                if self.good >= precision.growth_interval {
                    *self = Self { factor: (self.factor * 2.0).min(LARGEST), good: 0 };
                }
            }
            false if scales && self.factor > 1.0 => {
                *self = Self { factor: (self.factor / 2.0).max(1.0), good: 0 }
            }
            false if !scales => {}
            false => {
                return Err(TrainError::GradientsNotFinite { step });
            }
        }
        Ok(())
    }
}

impl State {
    /// Counts a step that was applied (`ok`) or skipped.
    ///
    /// # Errors
    /// In fp16 where no smaller loss scale is left, in other formats at [`SKIPS_IN_A_ROW`].
    pub fn after(&mut self, ok: bool, precision: &Precision, step: u64) -> Result<(), TrainError> {
        self.scale.after(ok, precision, step)?;
        if ok {
            self.updates += 1;
            self.skipped_in_a_row = 0;
            return Ok(());
        }
        self.skipped += 1;
        self.skipped_in_a_row += 1;
        if precision.kind != PrecisionKind::Fp16 && self.skipped_in_a_row >= SKIPS_IN_A_ROW {
            return Err(TrainError::StepsSkipped { step, steps: SKIPS_IN_A_ROW });
        }
        Ok(())
    }

    /// Before the first step.
    pub fn new(precision: &Precision, position: Value) -> Self {
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
            stale: 0,
            evaluated: 0,
            position,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_follows_overflows() {
        let precision = Precision { kind: PrecisionKind::Fp16, initial_scale: 8.0, growth_interval: 3 };
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
            error.starts_with("step 9: the gradients are no numbers any more, even without a loss scale"),
            "{error}"
        );
    }

    #[test]
    fn other_formats_have_no_scale() {
        for kind in [PrecisionKind::F32, PrecisionKind::Bf16] {
            let precision = Precision { kind, ..Precision::default() };
            let mut scale = LossScale::new(&precision);
            for _ in 0..3000 {
                scale.after(true, &precision, 1).expect("good");
            }
            scale.after(false, &precision, 1).expect("nothing to lower");
            assert_eq!(scale, LossScale { factor: 1.0, good: 0 });
        }
    }

    #[test]
    fn a_row_of_skipped_steps_is_an_error() {
        let precision = Precision { kind: PrecisionKind::Bf16, ..Precision::default() };
        let mut state = State::new(&precision, Value::Null);
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
