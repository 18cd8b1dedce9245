//! Resources of this machine: cores, memory and their limits, as reported by the kernel and its containers.
//! Invariant: a limit that cannot be read is treated as absent; nothing is cached.

use crate::{RequestError, RuntimeError};
use plimsoll_exec::memory::kib;
use plimsoll_graph::Bytes;
use std::fs;
use std::num::NonZero;

pub use plimsoll_exec::memory::{Memory, available};

/// Number of cores that this process may use, after CPU affinity and container quota.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Resident memory of this process: the current value and the peak.
pub fn resident() -> (Bytes, Bytes) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name| kib(&status, name).unwrap_or(Bytes::ZERO);
    (field("VmRSS:"), field("VmHWM:"))
}

/// Parses a memory budget such as `2GiB`, `500MB`, `80%` (of `free`) or a plain number of bytes.
pub fn parse_budget(text: &str, free: Bytes) -> Result<Bytes, RuntimeError> {
    let bad = || RequestError::BadSize { text: text.to_owned() };
    let text = text.trim();
    if let Some(percent) = text.strip_suffix('%') {
        let percent = percent.trim().parse::<u64>().ok().filter(|p| (1..=100).contains(p)).ok_or_else(bad)?;
        return Ok(Bytes((u128::from(free.0) * u128::from(percent) / 100) as u64));
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1u64 << 40,
        _ => return Err(bad().into()),
    };
    Ok(decimal(number, unit).map(Bytes).ok_or_else(bad)?)
}

/// Returns `number * unit` without floating-point arithmetic, so that `1.5` GiB is exact; `None` for more than three
/// decimal places, a malformed number, or overflow.
fn decimal(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 3 || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let thousandths: u64 = format!("{fraction:0<3}").parse().ok()?;
    whole.checked_mul(unit)?.checked_add((u128::from(thousandths) * u128::from(unit) / 1000) as u64)
}

/// Records resident memory at the end of each stage of a run.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    stages: Vec<DeviceStage>,
}

/// Resident memory at the end of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStage {
    /// Name of the stage.
    pub name: String,
    /// Resident memory at the end of the stage.
    pub resident: Bytes,
    /// Peak resident memory of the process up to the end of the stage.
    pub peak: Bytes,
}

impl Tracker {
    /// Returns a tracker without stages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records the end of the stage `name`.
    pub fn track(&mut self, name: &str) {
        let (resident, peak) = resident();
        self.stages.push(DeviceStage { name: name.to_owned(), resident, peak });
    }

    /// The stages recorded so far.
    pub fn stages(&self) -> &[DeviceStage] {
        &self.stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets() {
        let free = Bytes(1_000_000);
        for (text, wanted) in [
            ("2GiB", Some(2u64 << 30)),
            ("1.5GiB", Some(3 << 29)),
            ("500MB", Some(500_000_000)),
            ("80%", Some(800_000)),
            ("100 %", Some(1_000_000)),
            ("123", Some(123)),
            ("0.25 kb", Some(250)),
            ("", None),
            ("GiB", None),
            ("101%", None),
            ("-1GiB", None),
            ("2 parsecs", None),
            ("1.2345GB", None),
        ] {
            assert_eq!(parse_budget(text, free).ok(), wanted.map(Bytes), "{text}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = available();
        assert!(memory.free.0 > 0 && memory.free <= memory.total);
        let (now, peak) = resident();
        assert!(now.0 > 0 && now <= peak);
    }
}
