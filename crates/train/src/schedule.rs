//! The learning-rate schedule and the other per-step hyperparameters of the optimizer. Invariant: a function of the
//! configuration and the step alone, so a resumed run has the same learning rates as an uninterrupted one.

use super::config::{
    DecayShape, OptimizerKind, OptimizerSection, Scaling, ScheduleKind, ScheduleSection, ScheduleUnit,
    TrainConfig,
};
use std::f64::consts::PI;

/// The learning-rate schedule of a run.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    schedule: ScheduleSection,
    /// Peak learning rate, with batch-size scaling applied.
    peak: f64,
    /// Number of warm-up steps.
    warmup: u64,
    /// Step at which a decaying learning rate ends.
    end: u64,
}

impl Rate {
    /// Builds the schedule of a validated configuration.
    pub fn new(config: &TrainConfig) -> Self {
        let schedule = config.schedule;
        let batch = config.batch.tokens as f64;
        let times = batch / schedule.reference_tokens.map_or(batch, |tokens| tokens as f64);
        let factor = match schedule.scaling {
            Scaling::None => 1.0,
            Scaling::Linear => times,
            Scaling::Sqrt => times.sqrt(),
        };
        let warmup = config.warmup();
        let end = config.horizon().unwrap_or(u64::MAX);
        Self { schedule, peak: config.optimizer.lr * factor, warmup, end }
    }

    /// Returns the learning rate of `step` in `epoch`, both counted from 0.
    pub fn at(&self, step: u64, epoch: u64) -> f64 {
        let s = &self.schedule;
        if step < self.warmup {
            // `step + 1`: the first step already has a non-zero rate, and the last warm-up step has the peak rate.
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let step = step - self.warmup;
        let span = self.end.saturating_sub(self.warmup).max(1);
        let done = (step as f64 / span as f64).min(1.0);
        let left = match s.kind {
            ScheduleKind::Constant => return self.peak,
            ScheduleKind::Step => {
                let count = match s.unit {
                    ScheduleUnit::Steps => step,
                    ScheduleUnit::Epochs => epoch,
                };
                return self.peak * s.gamma.powf((count / s.every) as f64);
            }
            ScheduleKind::Linear => 1.0 - done,
            ScheduleKind::Cosine => half_cosine(done),
            ScheduleKind::CosineRestarts => half_cosine(cycle(step, s.cycle, s.cycle_growth)),
            ScheduleKind::Polynomial => (1.0 - done).powf(s.power),
            ScheduleKind::Wsd => self.fall(step, span),
        };
        self.peak * (s.min_ratio + (1.0 - s.min_ratio) * left)
    }

    /// Returns the factor of the wsd schedule: 1 until the decay phase at its end begins.
    fn fall(&self, step: u64, span: u64) -> f64 {
        let share = ((self.end as f64 * self.schedule.decay_share).round() as u64).clamp(1, span);
        let stable = span - share;
        if step < stable {
            return 1.0;
        }
        let done = ((step - stable) as f64 / share as f64).min(1.0);
        match self.schedule.decay_shape {
            DecayShape::Linear => 1.0 - done,
            DecayShape::Sqrt => 1.0 - done.sqrt(),
            DecayShape::Cosine => half_cosine(done),
        }
    }
}

/// Cosine decay from 1 to 0 (Loshchilov and Hutter 2017, equation 5).
fn half_cosine(done: f64) -> f64 {
    0.5 * (1.0 + (PI * done).cos())
}

/// Returns the elapsed fraction of the restart cycle that `step` lies in.
fn cycle(mut step: u64, mut length: u64, growth: u64) -> f64 {
    if growth == 1 {
        return (step % length) as f64 / length as f64;
    }
    while step >= length {
        step -= length;
        length = length.saturating_mul(growth);
    }
    step as f64 / length as f64
}

/// Returns the hyperparameters of update `t`, counted from 1. `kind` is the optimizer that was planned.
pub fn hyper(kind: OptimizerKind, o: &OptimizerSection, lr: f64, t: u64) -> Vec<f32> {
    let t = t as f64;
    let values = match kind {
        // The bias corrections of both moments: Kingma and Ba 2015, algorithm 1.
        OptimizerKind::Auto | OptimizerKind::Adamw | OptimizerKind::Adamw8bit => {
            vec![lr, 1.0 - o.betas[0].powf(t), 1.0 - o.betas[1].powf(t)]
        }
        // Decay of the second moment: Shazeer and Stern 2018, section 7.2.
        OptimizerKind::Adafactor => vec![lr, 1.0 - t.powf(-o.decay_exponent)],
        OptimizerKind::Sgd => vec![lr],
    };
    values.into_iter().map(|x| x as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The schedule of the flags in `text`, with a peak rate of 1 and a run of 10 steps.
    fn rate(text: &str) -> Rate {
        let flags: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let base = "data: {train: [a]}\nrun: {steps: 10}\noptimizer: {lr: 1}\n";
        Rate::new(&TrainConfig::parse(base, "test", &flags).expect(text))
    }

    fn check(text: &str, wanted: &[f64]) {
        let rate = rate(text);
        for (step, &wanted) in wanted.iter().enumerate() {
            let found = rate.at(step as u64, step as u64 / 2);
            assert!((found - wanted).abs() <= 1e-12, "{text}: step {step}: {found}, wanted {wanted}");
        }
    }

    /// Values of torch.optim.lr_scheduler 2.15: StepLR(3, 0.85), CosineAnnealingLR(10, 0.1),
    /// CosineAnnealingWarmRestarts(4, 2, 0.1), PolynomialLR(8, 2), LinearLR(1, 0.1, 8).
    #[test]
    fn the_rates_of_pytorch() {
        let step =
            [1.0, 1.0, 1.0, 0.85, 0.85, 0.85, 0.7224999999999999, 0.7224999999999999, 0.7224999999999999];
        check("schedule.kind=step schedule.every=3 schedule.gamma=0.85 schedule.unit=steps", &step);
        check(
            "schedule.min_ratio=0.1",
            &[
                1.0,
                0.9779754323328191,
                0.9140576474687263,
                0.8145033635316129,
                0.6890576474687263,
                0.55,
                0.41094235253127376,
                0.2854966364683872,
                0.18594235253127372,
                0.12202456766718092,
                0.1,
                0.1,
            ],
        );
        check(
            "schedule.kind=cosine_restarts schedule.cycle=4 schedule.cycle_growth=2 schedule.min_ratio=0.1",
            &[
                1.0,
                0.8681980515339464,
                0.55,
                0.23180194846605365,
                1.0,
                0.9657457896300791,
                0.8681980515339464,
                0.7222075445642904,
                0.55,
                0.3777924554357096,
                0.23180194846605365,
                0.13425421036992097,
                1.0,
                0.9913533761814537,
            ],
        );
        let polynomial = "schedule.kind=polynomial schedule.power=2 schedule.min_ratio=0 schedule.steps=8";
        check(polynomial, &[1.0, 0.765625, 0.5625, 0.390625, 0.25, 0.140625, 0.0625, 0.015625, 0.0]);
        let linear = [1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1, 0.1];
        check("schedule.kind=linear schedule.steps=8", &linear);
    }

    #[test]
    fn formulas() {
        let half = |x: f64| 0.5 * (1.0 + (PI * x).cos());
        check("schedule.kind=constant schedule.warmup=4", &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        let warm = [0.25, 0.5, 0.75, 1.0, 1.0, half(1.0 / 6.0), half(2.0 / 6.0), half(0.5)];
        check("schedule.warmup=4 schedule.min_ratio=0", &warm);
        let wsd = "schedule.kind=wsd schedule.min_ratio=0 schedule.decay_share=0.4";
        let stable = [1.0; 7];
        for (shape, fall) in [
            ("linear", [0.75, 0.5, 0.25, 0.0]),
            ("sqrt", [0.5, 1.0 - 0.5f64.sqrt(), 1.0 - 0.75f64.sqrt(), 0.0]),
            ("cosine", [half(0.25), 0.5, half(0.75), 0.0]),
        ] {
            check(&format!("{wsd} schedule.decay_shape={shape}"), &[&stable[..], &fall].concat());
        }
        check(
            "schedule.kind=wsd schedule.warmup=9 schedule.decay_share=1 schedule.min_ratio=0.5",
            &[1.0 / 9.0],
        );
        // An epoch is two steps here; VirNucPro's StepLR counts epochs.
        check(
            "schedule.kind=step schedule.every=2 schedule.gamma=0.5",
            &[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25],
        );
    }

    #[test]
    fn rates_grow_with_the_batch() {
        for (scaling, wanted) in [("linear", 4.0), ("sqrt", 2.0)] {
            let base = "schedule.kind=constant schedule.reference_tokens=4096 batch.tokens=16384";
            assert_eq!(rate(&format!("{base} schedule.scaling={scaling}")).at(0, 0), wanted);
        }
    }

    #[test]
    fn what_an_update_is_told() {
        let o = OptimizerSection::default();
        for (kind, t, wanted) in [
            (OptimizerKind::Adamw, 1, vec![0.5, 0.1, 0.05]),
            (OptimizerKind::Adamw8bit, 2, vec![0.5, 0.19, 0.0975]),
            (OptimizerKind::Adafactor, 1, vec![0.5, 0.0]),
            (OptimizerKind::Adafactor, 32, vec![0.5, 0.9375]),
            (OptimizerKind::Sgd, 9, vec![0.5]),
        ] {
            let found = hyper(kind, &o, 0.5, t);
            let near = found.iter().zip(&wanted).all(|(a, b): (&f32, &f32)| (a - b).abs() < 1e-6);
            assert!(near && found.len() == wanted.len(), "{kind:?} {t}: {found:?}");
        }
    }
}
