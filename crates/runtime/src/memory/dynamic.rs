//! Dynamic sizes of steps: decides from the memory that is in use by all processes when a run changes to a smaller or a
//! larger plan. Invariant: the decision is a pure function of the settings, the sizes and a reading; it allocates and
//! measures nothing.

use plimsoll_exec::memory::Memory;
use plimsoll_graph::Bytes;
use serde::{Deserialize, Serialize, Serializer};
use std::str::FromStr;

/// Shares of the memory at which a run changes the size of its steps, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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

/// Profiles of thresholds, by name.
pub const PROFILES: [(&str, Thresholds); 3] = [
    ("aggressive", Thresholds::AGGRESSIVE),
    ("balanced", Thresholds::BALANCED),
    ("conservative", Thresholds::CONSERVATIVE),
];

/// Number of steps between two readings, unless it is given.
pub const EVERY: u64 = 10;

/// Maximum number of step sizes that are derived by halving. `memory.dynamic.min_batch` may demand more.
pub const MAX_SIZES: usize = 6;

/// Maximum number of smaller step sizes that are tried in a row after a lack of memory, before the run fails.
pub const RETRIES: usize = 3;

/// Number of readings after a lack of memory at which a run does not grow: a process that takes memory for a moment at a
/// time would cause another failure at once.
const PAUSE: u64 = 10;

/// Settings of dynamic sizes; in reports, with the keys of `memory.dynamic`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DynamicSettings {
    /// Shares of the memory that cause a change.
    #[serde(flatten)]
    pub thresholds: Thresholds,
    /// Number of steps between two readings.
    #[serde(rename = "adjustment_frequency")]
    pub every: u64,
    /// Whether a run changes by one size at a time, except at the critical and emergency thresholds.
    #[serde(rename = "smooth_transitions")]
    pub smooth: bool,
}

/// Cause of a change of size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// The sizes of a run, and the size in use.
#[derive(Clone, Debug)]
pub struct DynamicSizes {
    settings: DynamicSettings,
    /// Bytes of the arenas with each size, in ascending order.
    bytes: Vec<Bytes>,
    now: usize,
    /// Step before which the first reading was taken.
    first: Option<u64>,
    /// Step before which the run does not grow.
    paused: u64,
}

impl DynamicSizes {
    /// A run with sizes of these `bytes`, in ascending order and at least one, that begins with size number `now`.
    pub fn new(settings: DynamicSettings, bytes: Vec<Bytes>, now: usize) -> Self {
        Self { settings, bytes, now, first: None, paused: 0 }
    }

    /// Number of the size in use; 0 is the smallest.
    pub fn now(&self) -> usize {
        self.now
    }

    /// Records a reading before `step` and decides on a change from it, as [`DynamicSizes::choose`] does.
    pub fn decide(&mut self, step: u64, memory: Memory) -> Option<Switch> {
        self.record_reading(step);
        self.choose(step, memory)
    }

    /// Records that the memory was read before `step`: the first reading is acted upon whatever the number of the step is.
    pub fn record_reading(&mut self, step: u64) {
        self.first.get_or_insert(step);
    }

    /// The change before `step` that a recorded reading of the memory demands or allows.
    pub fn choose(&self, step: u64, memory: Memory) -> Option<Switch> {
        let due = self.first == Some(step) || self.settings.is_due(step);
        let switch = self.settings.decide(memory, &self.bytes, self.now, due)?;
        (switch.reason != Reason::Grow || step >= self.paused).then_some(switch)
    }

    /// Records that size number `size` is in use.
    pub fn set(&mut self, size: usize) {
        self.now = size;
    }

    /// Records that the device had too little memory at `step`, at the size in use or at a larger one.
    pub fn lacks_memory(&mut self, step: u64) {
        self.paused = step + PAUSE * self.settings.every;
    }

    /// Words for a message on a change: the share of the memory that was in use, if known, and the threshold that `reason`
    /// names.
    pub fn cause(&self, reason: Reason, utilisation: Option<f64>) -> String {
        let used = utilisation
            .map_or_else(String::new, |share| format!("{} % of the memory is in use, ", percent(share)));
        let of = self.settings.thresholds;
        let why = match reason {
            Reason::Warning => format!("warning from {} %", percent(of.warning)),
            Reason::Critical => format!("critical from {} %", percent(of.critical)),
            Reason::Emergency => format!("emergency from {} %", percent(of.emergency)),
            Reason::Grow => format!("target {} %", percent(of.target)),
            Reason::Replay => "as before the run was resumed".to_owned(),
            Reason::OutOfMemory => "out of memory".to_owned(),
        };
        used + &why
    }
}

/// A share in percent, with one decimal place where it is not whole.
fn percent(share: f64) -> f64 {
    (share * 1000.0).round() / 10.0
}

/// A change of the size of the steps of an inference run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepSizeChange {
    /// Number of steps that were sent to devices before.
    pub step: u64,
    /// Maximum number of tokens of a step before the change.
    pub from: u64,
    /// Maximum number of tokens of a step from now on.
    pub to: u64,
    /// Cause of the change.
    #[serde(serialize_with = "name_of_reason")]
    pub reason: Reason,
    /// Share of the memory that was in use, if it was read.
    pub utilisation: Option<f64>,
    /// The cause in words, which is not in reports.
    #[serde(skip)]
    pub cause: String,
}

impl StepSizeChange {
    /// Line of a run's log.
    pub fn words(&self) -> String {
        let Self { step, from, to, cause, .. } = self;
        format!("after {step} steps: steps of {to} tokens instead of {from} ({cause})")
    }
}

/// Serializes a reason as its name. [`Reason`] itself is serialized as its variant in checkpoints, which must stay readable.
fn name_of_reason<S: Serializer>(reason: &Reason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(reason.name())
}

impl FromStr for DynamicSettings {
    type Err = String;

    /// Parses a list, separated by commas, of a profile (default `balanced`) and `key=value` pairs with the keys of
    /// `memory.dynamic`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut dynamic = Self { thresholds: Thresholds::BALANCED, every: EVERY, smooth: true };
        for (i, item) in text.split(',').enumerate() {
            match item.split_once('=') {
                Some((key, value)) => dynamic.set(key, value)?,
                None => {
                    let profile = PROFILES.iter().find(|(name, _)| i == 0 && *name == item);
                    let names = PROFILES.map(|(name, _)| name).join(", ");
                    dynamic.thresholds = profile
                        .ok_or_else(|| {
                            format!("`{item}` is no profile ({names}, first in the list) and no key=value")
                        })?
                        .1;
                }
            }
        }
        dynamic.thresholds.fault().map_or(Ok(dynamic), Err)
    }
}

impl Thresholds {
    /// Uses most of the memory.
    pub const AGGRESSIVE: Self = Self { target: 0.92, warning: 0.94, critical: 0.96, emergency: 0.98 };
    /// The default.
    pub const BALANCED: Self = Self { target: 0.90, warning: 0.92, critical: 0.95, emergency: 0.97 };
    /// Leaves memory for other processes.
    pub const CONSERVATIVE: Self = Self { target: 0.85, warning: 0.88, critical: 0.92, emergency: 0.95 };

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

impl DynamicSettings {
    /// Sets the value of a key.
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "target" => self.thresholds.target = parse_share(key, value)?,
            "warning" => self.thresholds.warning = parse_share(key, value)?,
            "critical" => self.thresholds.critical = parse_share(key, value)?,
            "emergency" => self.thresholds.emergency = parse_share(key, value)?,
            "adjustment_frequency" => {
                let every = value.parse().ok().filter(|&every| every > 0);
                self.every = every.ok_or_else(|| unexpected(key, value, "a whole number from 1 on"))?;
            }
            "smooth_transitions" => {
                self.smooth = value.parse().map_err(|_| unexpected(key, value, "true or false"))?
            }
            _ => {
                return Err(format!(
                    "`{key}` is no key; the keys are target, warning, critical, emergency, adjustment_frequency and \
                     smooth_transitions"
                ));
            }
        }
        Ok(())
    }

    /// Whether the memory is read before step number `step`, counted from 1. At other steps only an emergency is acted
    /// upon.
    pub fn is_due(&self, step: u64) -> bool {
        (step - 1).is_multiple_of(self.every.max(1))
    }

    /// Decides on a change from size number `now` of `sizes`, the bytes of each size in ascending order. `due`: this reading
    /// is a regular one, see [`DynamicSettings::is_due`].
    ///
    /// A run grows only if the larger size stays below the target, and does not shrink below the warning threshold, so that
    /// it does not swing between two sizes while other processes keep what they have.
    pub fn decide(&self, memory: Memory, sizes: &[Bytes], now: usize, due: bool) -> Option<Switch> {
        let Thresholds { target, warning, critical, emergency } = self.thresholds;
        let used = memory.share();
        let can_shrink = now > 0;
        let fits = |k: usize| share_after(memory, sizes[now], sizes[k]) < target;
        // An emergency is acted upon at every reading, and so comes before `due`.
        let (to, reason) = if can_shrink && used >= emergency {
            (0, Reason::Emergency)
        } else if !due {
            return None;
        } else if can_shrink && used >= critical {
            ((0..now).rev().find(|&k| fits(k)).unwrap_or(0), Reason::Critical)
        } else if can_shrink && used >= warning {
            let to = if self.smooth { now - 1 } else { (0..now).rev().find(|&k| fits(k)).unwrap_or(0) };
            (to, Reason::Warning)
        } else {
            let last = if self.smooth { (now + 2).min(sizes.len()) } else { sizes.len() };
            ((now + 1..last).rev().find(|&k| fits(k))?, Reason::Grow)
        };
        Some(Switch { to, reason, utilisation: used })
    }
}

/// Share of the memory in use after a run has replaced `present` bytes by `new` bytes.
fn share_after(memory: Memory, present: Bytes, new: Bytes) -> f64 {
    let bytes = (memory.used() + new).saturating_sub(present);
    bytes.0 as f64 / memory.total.0.max(1) as f64
}

/// Parses a threshold.
fn parse_share(key: &str, value: &str) -> Result<f64, String> {
    value.parse().map_err(|_| unexpected(key, value, "a share of the memory, above 0 to 1,"))
}

/// Message for a value that cannot be parsed.
fn unexpected(key: &str, value: &str, wanted: &str) -> String {
    format!("{key}={value}: {wanted} is expected")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BALANCED: Thresholds = Thresholds::BALANCED;

    /// Size that a run changes to, and why, with `used` of 1000 bytes in use; a larger size takes 20 bytes more each.
    fn decided(smooth: bool, used: u64, now: usize, due: bool) -> Option<(usize, Reason)> {
        let dynamic = DynamicSettings { thresholds: BALANCED, every: 10, smooth };
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
        let dynamic = DynamicSettings { thresholds: BALANCED, every: 1, smooth: true };
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
            let dynamic = DynamicSettings { thresholds: BALANCED, every, smooth: true };
            (1..=7).filter(|&step| dynamic.is_due(step)).collect::<Vec<u64>>()
        };
        assert_eq!((due(1).len(), due(3), due(10)), (7, vec![1, 4, 7], vec![1]));
    }

    #[test]
    fn settings_are_parsed_as_a_profile_with_keys() {
        let parsed = |text: &str| text.parse::<DynamicSettings>();
        let balanced = DynamicSettings { thresholds: BALANCED, every: EVERY, smooth: true };
        assert_eq!(parsed("balanced"), Ok(balanced));
        assert_eq!(
            parsed("aggressive,target=0.5,adjustment_frequency=1,smooth_transitions=false"),
            Ok(DynamicSettings {
                thresholds: Thresholds { target: 0.5, ..Thresholds::AGGRESSIVE },
                every: 1,
                smooth: false
            })
        );
        assert_eq!(
            parsed("warning=0.91"),
            Ok(DynamicSettings { thresholds: Thresholds { warning: 0.91, ..BALANCED }, ..balanced })
        );
        for (text, wanted) in [
            ("", "`` is no profile (aggressive, balanced, conservative"),
            ("often", "`often` is no profile"),
            ("target=0.5,aggressive", "`aggressive` is no profile"),
            ("target=high", "target=high: a share"),
            ("target=0.95", "must be above 0, each greater than the one before"),
            ("emergency=1.5", "at most 1"),
            ("adjustment_frequency=0", "a whole number from 1 on"),
            ("smooth_transitions=2", "true or false"),
            ("every=3", "`every` is no key"),
        ] {
            let error = parsed(text).expect_err(text);
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn a_run_does_not_grow_soon_after_a_lack_of_memory() {
        let settings = DynamicSettings { thresholds: BALANCED, every: 2, smooth: true };
        let mut sizes = DynamicSizes::new(settings, [80, 160, 320].map(Bytes).to_vec(), 2);
        let used = |used: u64| Memory { free: Bytes(1000 - used), total: Bytes(1000) };
        assert_eq!(sizes.decide(1, used(930)).map(|s| (s.to, s.reason)), Some((1, Reason::Warning)));
        sizes.set(0);
        sizes.lacks_memory(2);
        let grown: Vec<u64> = (2..40).filter(|&step| sizes.decide(step, used(100)).is_some()).collect();
        assert_eq!(grown.first(), Some(&23), "{grown:?}");
        assert_eq!(sizes.decide(4, used(980)), None, "nothing smaller");
        assert_eq!(
            sizes.cause(Reason::Warning, Some(0.9304)),
            "93 % of the memory is in use, warning from 92 %"
        );
    }
}
