//! The bill: what a refusal prints. Invariant: every number on it comes from a plan.

use crate::Ledger;
use crate::ledger::short;
use graph::Bytes;
use std::fmt;

/// Why something does not fit, and what would.
#[derive(Clone, Debug, PartialEq)]
pub struct Bill {
    /// The memory space.
    pub space: String,
    /// What the line is.
    pub line: Line,
    /// The line.
    pub budget: Bytes,
    /// What the bytes would be for.
    pub ledger: Ledger,
    /// Where the peak falls.
    pub peak_at: String,
    /// Expected time of this step per token: what each remedy's is held against.
    pub seconds_per_token: f64,
    /// The memory of the target; zero where it is not known. A larger budget is never offered.
    pub memory: Bytes,
    /// How more budget is asked for.
    pub budget_flag: &'static str,
    /// What else is known, a line each: when it happened, what is large, who holds the rest.
    pub notes: Vec<String>,
    /// What fits, cheapest first.
    pub remedies: Vec<Remedy>,
}

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// What was allowed.
    Budget,
    /// What is free.
    Free,
}

/// A way to fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// The flag to use.
    pub flag: String,
    /// Bytes that it saves.
    pub saves: Bytes,
    /// Expected time per token against the refused plan: 0.008 is 0.8 % slower.
    pub slower: f64,
}

impl Bill {
    /// A remedy, by its flags: what fits with them has such a peak and takes so long for a token.
    pub fn offer(&mut self, flag: String, peak: Bytes, seconds_per_token: f64) {
        let saves = self.ledger.total().saturating_sub(peak);
        self.remedies.push(Remedy { flag, saves, slower: seconds_per_token / self.seconds_per_token - 1.0 });
        self.remedies.sort_by(|a, b| a.slower.total_cmp(&b.slower));
    }

    /// Bytes that are missing.
    pub fn short_by(&self) -> Bytes {
        self.ledger.total().saturating_sub(self.budget)
    }
}

impl fmt::Display for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.ledger.total();
        let line = match self.line {
            Line::Budget => format!("the budget is {}", self.budget),
            Line::Free => format!("free are {}", self.budget),
        };
        writeln!(f, "this step needs {total} on `{}`; {line} (short by {})", self.space, self.short_by())?;
        writeln!(f, "  peak at {}: {}", self.peak_at, self.ledger.line())?;
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))?;
        match self.line {
            Line::Budget if self.remedies.is_empty() && self.memory > Bytes::ZERO && total > self.memory => {
                return write!(
                    f,
                    "  nothing smaller fits, and the target has {}: plan for a larger one",
                    self.memory
                );
            }
            Line::Budget if self.remedies.is_empty() => {
                return write!(f, "  nothing smaller fits; give it {} {} or more", self.budget_flag, total.0);
            }
            Line::Free if self.remedies.is_empty() => {
                return write!(f, "  nothing smaller fits; {total} must be free");
            }
            Line::Budget | Line::Free => {}
        }
        let lines: Vec<String> = self
            .remedies
            .iter()
            .map(|r| format!("{}  saves {}, {:+.1} % time", r.flag, short(r.saves), 100.0 * r.slower))
            .collect();
        write!(f, "  what fits, cheapest first:  {}", lines.join("   |   "))
    }
}
