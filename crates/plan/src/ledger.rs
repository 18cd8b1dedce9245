//! Breakdown of memory use at the peak. Invariant: the entries sum to the peak exactly, and no other code
//! computes these sums.

use plimsoll_graph::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Breakdown of the bytes in use at the peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Entries in the order in which they are printed; entries of zero bytes are omitted.
    pub entries: Vec<LedgerEntry>,
}

/// One line of a ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Purpose of the bytes.
    pub label: String,
    /// Number of bytes.
    pub bytes: Bytes,
}

impl Ledger {
    /// Creates an empty ledger.
    pub fn new() -> Self {
        Self { entries: vec![] }
    }

    /// Adds `bytes` to the entry named `label`, creating it if it does not exist.
    pub fn add(&mut self, label: &str, bytes: Bytes) {
        if bytes == Bytes::ZERO {
            return;
        }
        match self.entries.iter_mut().find(|e| e.label == label) {
            Some(entry) => entry.bytes += bytes,
            None => self.entries.push(LedgerEntry { label: label.to_owned(), bytes }),
        }
    }

    /// Sum of all entries: the peak.
    pub fn total(&self) -> Bytes {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    /// Bytes of the entry named `label`; zero if there is none.
    pub fn get(&self, label: &str) -> Bytes {
        self.entries.iter().find(|e| e.label == label).map_or(Bytes::ZERO, |e| e.bytes)
    }

    /// Formats all entries on one line: `params 5.7 GB, activations 31.8 GB`.
    pub fn line(&self) -> String {
        let lines: Vec<String> =
            self.entries.iter().map(|e| format!("{} {}", e.label, e.bytes.tenths())).collect();
        lines.join(", ")
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.entries.iter().map(|e| e.label.len()).max().unwrap_or(0).max(4);
        for e in &self.entries {
            writeln!(f, "  {:<width$}  {:>22}", e.label, e.bytes.to_string())?;
        }
        write!(f, "  {:<width$}  {:>22}", "peak", self.total().to_string())
    }
}
