//! Refusals of requests that exceed the memory: what the bytes would be used for, and the alternatives that
//! fit. Invariant: every number is taken from a plan.

use crate::Ledger;
use plimsoll_graph::Bytes;
use plimsoll_setting::{Assignment, Setting};
use std::fmt;

/// Explains why a step does not fit into memory, and lists the settings with which it would.
#[derive(Clone, Debug, PartialEq)]
pub struct Bill {
    /// Name of the memory space.
    pub space: String,
    /// Whether `budget` is a configured budget or the memory that is free.
    pub line: LimitKind,
    /// The limit that the step exceeds, in bytes.
    pub budget: Bytes,
    /// Breakdown of the required bytes.
    pub ledger: Ledger,
    /// Label of the instruction at which memory use peaks.
    pub peak_at: String,
    /// Predicted time per token of the refused plan; the times of remedies are relative to it.
    pub seconds_per_token: f64,
    /// Total memory of the target; zero if unknown. No budget larger than this is suggested.
    pub memory: Bytes,
    /// The setting of the budget.
    pub budget_setting: Setting,
    /// Further lines for the user: when the refusal happened, which tensors are large, which process holds the
    /// rest of the memory.
    pub notes: Vec<String>,
    /// Settings that fit, fastest first.
    pub remedies: Vec<Remedy>,
}

/// Kind of a memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// The configured budget.
    Budget,
    /// The memory that is free.
    Free,
}

/// Settings with which a step fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// The settings.
    pub settings: Vec<Assignment>,
    /// Bytes saved against the refused plan.
    pub saves: Bytes,
    /// Relative slowdown per token against the refused plan: 0.008 is 0.8 % slower.
    pub slower: f64,
}

impl Remedy {
    /// The settings in the words of the front end, separated by spaces.
    pub fn words(&self) -> String {
        self.settings.iter().map(Assignment::to_string).collect::<Vec<_>>().join(" ")
    }
}

impl Bill {
    /// Adds a remedy: with `settings`, the step needs `peak` bytes and takes `seconds_per_token`.
    pub fn offer(&mut self, settings: Vec<Assignment>, peak: Bytes, seconds_per_token: f64) {
        let saves = self.ledger.total().saturating_sub(peak);
        self.remedies.push(Remedy {
            settings,
            saves,
            slower: seconds_per_token / self.seconds_per_token - 1.0,
        });
        self.remedies.sort_by(|a, b| a.slower.total_cmp(&b.slower));
    }

    /// Number of bytes missing.
    pub fn short_by(&self) -> Bytes {
        self.ledger.total().saturating_sub(self.budget)
    }
}

impl fmt::Display for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.ledger.total();
        let line = match self.line {
            LimitKind::Budget => format!("the budget is {}", self.budget),
            LimitKind::Free => format!("free are {}", self.budget),
        };
        writeln!(f, "this step needs {total} on `{}`; {line} (short by {})", self.space, self.short_by())?;
        writeln!(f, "  peak at {}: {}", self.peak_at, self.ledger.line())?;
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))?;
        match self.line {
            LimitKind::Budget
                if self.remedies.is_empty() && self.memory > Bytes::ZERO && total > self.memory =>
            {
                return write!(
                    f,
                    "  no smaller plan fits, and the target has {}; choose a target with more memory",
                    self.memory
                );
            }
            LimitKind::Budget if self.remedies.is_empty() => {
                let budget = self.budget_setting.clone().to(total.0);
                return write!(f, "  no smaller plan fits; give {budget} or more");
            }
            LimitKind::Free if self.remedies.is_empty() => {
                return write!(f, "  no smaller plan fits; {total} must be free");
            }
            LimitKind::Budget | LimitKind::Free => {}
        }
        let lines: Vec<String> = self
            .remedies
            .iter()
            .map(|r| format!("{}  saves {}, {:+.1} % time", r.words(), r.saves.tenths(), 100.0 * r.slower))
            .collect();
        write!(f, "  what fits, cheapest first:  {}", lines.join("   |   "))
    }
}
