//! The ledger: what the bytes at the peak are for. Invariant: its entries sum to the peak exactly; nobody
//! writes a second formula.

use graph::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What the bytes at the peak are for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// In the order of printing; entries of zero bytes are left out.
    pub entries: Vec<Entry>,
}

/// One line of a ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What the bytes are for.
    pub label: String,
    /// How many.
    pub bytes: Bytes,
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Self {
        Self { entries: vec![] }
    }

    /// Adds bytes to a line, which is opened where it is new.
    pub fn add(&mut self, label: &str, bytes: Bytes) {
        if bytes == Bytes::ZERO {
            return;
        }
        match self.entries.iter_mut().find(|e| e.label == label) {
            Some(entry) => entry.bytes += bytes,
            None => self.entries.push(Entry { label: label.to_owned(), bytes }),
        }
    }

    /// The peak.
    pub fn total(&self) -> Bytes {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    /// The bytes of a line; zero where there is none.
    pub fn get(&self, label: &str) -> Bytes {
        self.entries.iter().find(|e| e.label == label).map_or(Bytes::ZERO, |e| e.bytes)
    }

    /// All lines in one: `params 5.7 GB, activations 31.8 GB`.
    pub fn line(&self) -> String {
        let lines: Vec<String> =
            self.entries.iter().map(|e| format!("{} {}", e.label, short(e.bytes))).collect();
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

/// Three digits and a decimal unit, for people.
pub(crate) fn short(bytes: Bytes) -> String {
    let units = [("GB", 1_000_000_000u64), ("MB", 1_000_000), ("kB", 1000)];
    for (name, unit) in units {
        if bytes.0 >= unit {
            let tenths = bytes.0 / (unit / 10);
            return format!("{}.{} {name}", tenths / 10, tenths % 10);
        }
    }
    format!("{} B", bytes.0)
}
