//! Dynamic sizes of steps: decides from the memory that is in use by all processes when a run changes to a smaller or a
//! larger plan. Invariant: the decision is a pure function of the settings, the sizes and a reading; it allocates and
//! measures nothing.

use plimsoll_exec::memory::Memory;
use plimsoll_graph::Bytes;

/// Shares of the memory at which a run changes the size of its steps, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// A run grows to a size with which it stays below this share.
    pub target: f64,
    /// From this share on a run shrinks.
    pub warning: f64,
    /// From this share on a run shrinks until the target is met, without intermediate sizes.
    pub critical: f64,
    /// From this share on a run shrinks to the smallest size. Read before every step.
    pub emergency: f64,
}

/// Settings of dynamic sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dynamic {
    /// Shares of the memory that cause a change.
    pub thresholds: Thresholds,
    /// Number of steps between two readings.
    pub every: u64,
    /// Whether a run changes by one size at a time, except at the critical and emergency thresholds.
    pub smooth: bool,
}

/// Cause of a change of size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The warning threshold was reached.
    Warning,
    /// The critical threshold was reached.
    Critical,
    /// The emergency threshold was reached.
    Emergency,
    /// Memory became free.
    Grow,
    /// A resumed run repeats a step.
    Replay,
    /// The device had too little memory for a step, or for a larger size.
    OutOfMemory,
}

/// A change of size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Number of the new size.
    pub to: usize,
    /// Cause of the change.
    pub reason: Reason,
    /// Share of the memory in use, before the change.
    pub utilisation: f64,
}

impl Thresholds {
    /// Explains why the thresholds cannot be used; `None` if they are in order.
    pub fn fault(&self) -> Option<String> {
        let Self { target, warning, critical, emergency } = *self;
        let is_sorted = 0.0 < target && target < warning && warning < critical && critical < emergency;
        (!is_sorted || emergency > 1.0).then(|| {
            format!(
                "target {target}, warning {warning}, critical {critical} and emergency {emergency} must be above 0, each \
                 greater than the one before, and at most 1"
            )
        })
    }
}

impl Reason {
    /// The word for the reason in metrics.jsonl.
    pub fn name(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
            Self::Emergency => "emergency",
            Self::Grow => "grow",
            Self::Replay => "replay",
            Self::OutOfMemory => "out_of_memory",
        }
    }
}

impl Dynamic {
    /// Whether the memory is read before step number `step`, counted from 1. At other steps only an emergency is acted
    /// upon.
    pub fn is_due(&self, step: u64) -> bool {
        (step - 1).is_multiple_of(self.every.max(1))
    }

    /// Decides on a change from size number `now` of `sizes`, the bytes of each size in ascending order. `due`: this reading
    /// is a regular one, see [`Dynamic::is_due`].
    ///
    /// A run grows only if the larger size stays below the target, and does not shrink below the warning threshold, so that
    /// it does not swing between two sizes while other processes keep what they have.
    pub fn decide(&self, memory: Memory, sizes: &[Bytes], now: usize, due: bool) -> Option<Switch> {
        let Thresholds { target, warning, critical, emergency } = self.thresholds;
        let used = memory.share();
        let switch = |to: usize, reason| Some(Switch { to, reason, utilisation: used });
        // Share of the memory in use after a change to size `k`.
        let after = |k: usize| {
            let bytes = (memory.used() + sizes[k]).saturating_sub(sizes[now]);
            bytes.0 as f64 / memory.total.0.max(1) as f64
        };
        let meets_target = || (0..now).rev().find(|&k| after(k) < target).unwrap_or(0);
        match used {
            _ if now > 0 && used >= emergency => switch(0, Reason::Emergency),
            _ if !due => None,
            _ if now > 0 && used >= critical => switch(meets_target(), Reason::Critical),
            _ if now > 0 && used >= warning => {
                switch(if self.smooth { now - 1 } else { meets_target() }, Reason::Warning)
            }
            _ => {
                let last = if self.smooth { (now + 2).min(sizes.len()) } else { sizes.len() };
                let to = (now + 1..last).rev().find(|&k| after(k) < target)?;
                switch(to, Reason::Grow)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BALANCED: Thresholds = Thresholds { target: 0.90, warning: 0.92, critical: 0.95, emergency: 0.97 };

    /// Size that a run changes to, and why, with `used` of 1000 bytes in use; a larger size takes 20 bytes more each.
    fn decided(smooth: bool, used: u64, now: usize, due: bool) -> Option<(usize, Reason)> {
        let dynamic = Dynamic { thresholds: BALANCED, every: 10, smooth };
        let sizes = [100, 120, 140, 160].map(Bytes);
        let memory = Memory { free: Bytes(1000 - used), total: Bytes(1000) };
        let switch = dynamic.decide(memory, &sizes, now, due)?;
        assert_eq!(switch.utilisation, used as f64 / 1000.0);
        Some((switch.to, switch.reason))
    }

    #[test]
    fn sizes_follow_the_memory_in_use() {
        use Reason::{Critical, Emergency, Grow, Warning};
        for (smooth, used, now, due, wanted) in [
            (true, 900, 2, true, None),
            (true, 919, 2, true, None),
            (true, 920, 2, true, Some((1, Warning))),
            (true, 920, 2, false, None),
            (true, 920, 0, true, None),
            (false, 920, 3, true, Some((1, Warning))),
            (false, 935, 3, true, Some((1, Warning))),
            (false, 945, 3, true, Some((0, Warning))),
            (true, 950, 3, true, Some((0, Critical))),
            (true, 950, 3, false, None),
            (true, 969, 1, true, Some((0, Critical))),
            (true, 970, 3, true, Some((0, Emergency))),
            (true, 970, 3, false, Some((0, Emergency))),
            (true, 1000, 0, true, None),
            (true, 880, 2, true, None),
            (true, 879, 2, true, Some((3, Grow))),
            (true, 879, 2, false, None),
            (true, 879, 3, true, None),
            (true, 500, 0, true, Some((1, Grow))),
            (false, 500, 0, true, Some((3, Grow))),
            (false, 850, 0, true, Some((2, Grow))),
            (false, 879, 0, true, Some((1, Grow))),
        ] {
            assert_eq!(
                decided(smooth, used, now, due),
                wanted,
                "smooth {smooth}, {used} in use, size {now}, {due}"
            );
        }
    }

    /// With other processes that keep what they have, a run that has grown or shrunk does not change back.
    #[test]
    fn sizes_do_not_swing() {
        let dynamic = Dynamic { thresholds: BALANCED, every: 1, smooth: true };
        let sizes = [100, 120, 140, 160].map(Bytes);
        for others in (600..900).step_by(7) {
            for start in 0..sizes.len() {
                let (mut now, mut directions) = (start, vec![]);
                for _ in 0..20 {
                    let used = Bytes(others) + sizes[now];
                    let memory = Memory { free: Bytes(1000).saturating_sub(used), total: Bytes(1000) };
                    let Some(Switch { to, .. }) = dynamic.decide(memory, &sizes, now, true) else { break };
                    directions.push(to > now);
                    now = to;
                }
                directions.dedup();
                assert!(directions.len() < 2, "others {others}, from size {start}: {directions:?}");
            }
        }
    }

    #[test]
    fn thresholds_ascend() {
        assert_eq!(BALANCED.fault(), None);
        assert_eq!(Thresholds { emergency: 1.0, ..BALANCED }.fault(), None);
        for bad in [
            Thresholds { target: 0.92, ..BALANCED },
            Thresholds { target: 0.0, ..BALANCED },
            Thresholds { critical: 0.99, ..BALANCED },
            Thresholds { emergency: 1.01, ..BALANCED },
            Thresholds { warning: f64::NAN, ..BALANCED },
        ] {
            assert!(bad.fault().is_some_and(|why| why.contains("at most 1")), "{bad:?}");
        }
    }

    #[test]
    fn memory_is_read_at_the_first_step_and_then_regularly() {
        let due = |every| {
            let dynamic = Dynamic { thresholds: BALANCED, every, smooth: true };
            (1..=7).filter(|&step| dynamic.is_due(step)).collect::<Vec<u64>>()
        };
        assert_eq!((due(1).len(), due(3), due(10)), (7, vec![1, 4, 7], vec![1]));
    }
}
