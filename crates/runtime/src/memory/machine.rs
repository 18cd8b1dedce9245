//! Resources of this machine: cores, memory and their limits, as reported by the kernel and its containers.
//! Invariant: a limit that cannot be read is treated as absent; nothing is cached.

use crate::{RequestError, RuntimeError};
use plimsoll_exec::Machine;
use plimsoll_exec::memory::kib;
use plimsoll_graph::Bytes;
use serde::Serialize;
use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;

pub use plimsoll_exec::memory::{Memory, available};

/// Number of cores that this process may use, after CPU affinity and container quota.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Resident memory of this process: the current value and the peak.
pub fn resident() -> (Bytes, Bytes) {
    let mut reading = Reading::default();
    reading.read_process();
    (reading.process, reading.process_peak)
}

/// Parses a memory budget such as `2GiB`, `500MB`, `80%` (of `free`) or a plain number of bytes. Several limits with the word
/// `and` between them, such as `20GB and 90%`, give the smallest.
pub fn parse_budget(text: &str, free: Bytes) -> Result<Bytes, RuntimeError> {
    let mut smallest = None;
    for limit in text.split(" and ") {
        let bytes = parse_limit(limit, free)?;
        smallest = Some(smallest.map_or(bytes, |other: Bytes| other.min(bytes)));
    }
    smallest.ok_or_else(|| bad_size(text).into())
}

/// Parses a single limit of a memory budget.
fn parse_limit(text: &str, free: Bytes) -> Result<Bytes, RuntimeError> {
    let limit = text.trim();
    if let Some(percent) = limit.strip_suffix('%') {
        let percent = percent.trim().parse::<u64>().ok().filter(|p| (1..=100).contains(p));
        let percent = percent.ok_or_else(|| bad_size(text))?;
        return Ok(Bytes((u128::from(free.0) * u128::from(percent) / 100) as u64));
    }
    let digits = limit.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(limit.len());
    let (number, unit) = limit.split_at(digits);
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
        _ => return Err(bad_size(text).into()),
    };
    Ok(decimal(number, unit).map(Bytes).ok_or_else(|| bad_size(text))?)
}

fn bad_size(text: &str) -> RequestError {
    RequestError::BadSize { text: text.to_owned() }
}

/// Free bytes on the disk of a folder; larger than any disk if they are unknown.
pub fn free_on_disk(folder: &Path) -> Bytes {
    plimsoll_exec::disk::free(folder).unwrap_or(Bytes(u64::MAX))
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

/// Memory in use at one moment: of this process, of the host, and of the GPU. In reports, the memory of all processes is given
/// as the used and all bytes, and `anonymous` is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "ReadingReport")]
pub struct Reading {
    /// Resident memory of this process, mapped files included.
    pub process: Bytes,
    /// Peak of `process` since the process started.
    pub process_peak: Bytes,
    /// Resident memory of this process without pages of files: heap, stacks and, on a CPU, the arena. `None` if the
    /// system does not report it.
    pub anonymous: Option<Bytes>,
    /// Host memory in use by all processes, within the limits of containers.
    pub host: Memory,
    /// Memory of the GPU; `None` if plans are in host memory or the GPU does not report it.
    pub card: Option<CardReading>,
}

/// Memory of a GPU at one moment. With several GPUs, of the GPU with the least free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CardReading {
    /// Memory in use by this process, with driver and libraries.
    pub process: Bytes,
    /// Memory in use by all processes.
    pub all: Memory,
}

impl Reading {
    /// Reads the memory of the process and the host.
    pub fn of_host() -> Self {
        let mut reading = Self { host: available(), ..Self::default() };
        reading.read_process();
        reading
    }

    /// Reads the memory of the process again, which takes less time than a whole reading.
    pub fn read_process(&mut self) {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        self.process = kib(&status, "VmRSS:").unwrap_or_default();
        self.process_peak = kib(&status, "VmHWM:").unwrap_or_default();
        self.anonymous = kib(&status, "RssAnon:");
    }

    /// Reads the memory of the process, the host and the GPUs among `machines`.
    pub fn of(machines: &[Arc<dyn Machine>]) -> Self {
        Self { card: card(machines), ..Self::of_host() }
    }
}

/// The form of a [`Reading`] in reports.
#[derive(Serialize)]
struct ReadingReport {
    resident_bytes: Bytes,
    peak_bytes: Bytes,
    host_used_bytes: Bytes,
    host_total_bytes: Bytes,
    /// Without a GPU its keys are absent.
    #[serde(flatten)]
    card: Option<CardReport>,
}

/// The form of a [`CardReading`] in reports.
#[derive(Serialize)]
struct CardReport {
    card_bytes: Bytes,
    card_used_bytes: Bytes,
    card_total_bytes: Bytes,
}

impl From<Reading> for ReadingReport {
    fn from(reading: Reading) -> Self {
        Self {
            resident_bytes: reading.process,
            peak_bytes: reading.process_peak,
            host_used_bytes: reading.host.used(),
            host_total_bytes: reading.host.total,
            card: reading.card.map(|card| CardReport {
                card_bytes: card.process,
                card_used_bytes: card.all.used(),
                card_total_bytes: card.all.total,
            }),
        }
    }
}

/// Other processes that hold memory of a machine, or how much all others hold together; empty if unknown.
pub fn holders(machine: &Arc<dyn Machine>, on_host: bool) -> String {
    let holders: Vec<String> = machine.holders().iter().map(ToString::to_string).collect();
    if !holders.is_empty() {
        return holders.join(", ");
    }
    let own = if on_host { Some(resident().0) } else { machine.taken().ok().flatten() };
    match (machine.usage(), own) {
        (Ok(memory), Some(own)) => {
            format!("other processes hold {} together", memory.used().saturating_sub(own))
        }
        (_, _) => String::new(),
    }
}

/// Reads the memory of the GPU with the least free memory. A GPU that does not answer is left out: a failed reading
/// must not end a run.
pub fn card(machines: &[Arc<dyn Machine>]) -> Option<CardReading> {
    let readings = machines.iter().filter_map(|machine| {
        let process = machine.taken().ok()??;
        let all = machine.usage().ok()?;
        Some(CardReading { process, all })
    });
    readings.min_by_key(|card| card.all.free)
}

/// Records memory at the end of each stage of a run.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    machines: Vec<Arc<dyn Machine>>,
    stages: Vec<MemoryStage>,
}

/// Memory at the end of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryStage {
    /// Name of the stage.
    #[serde(rename = "stage")]
    pub name: String,
    /// Optimizer step at the end of the stage; `None` outside of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Memory at the end of the stage.
    #[serde(flatten)]
    pub reading: Reading,
}

impl Tracker {
    /// Returns a tracker of host memory, without stages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a tracker of host memory and of the memory of the GPUs among `machines`, without stages.
    pub fn on(machines: Vec<Arc<dyn Machine>>) -> Self {
        Self { machines, stages: vec![] }
    }

    /// Sets the machines whose memory is read.
    pub fn set_machines(&mut self, machines: Vec<Arc<dyn Machine>>) {
        self.machines = machines;
    }

    /// Reads the memory now, without recording it.
    pub fn read(&self) -> Reading {
        Reading::of(&self.machines)
    }

    /// Records the end of the stage `name`, with the memory at this moment.
    pub fn track(&mut self, name: &str) {
        let stage = MemoryStage { name: name.to_owned(), step: None, reading: self.read() };
        self.record(stage);
    }

    /// Records the end of a stage. Of a stage that occurs often, the first and the last occurrence are kept, so that the
    /// list does not grow with the length of the run.
    pub fn record(&mut self, stage: MemoryStage) {
        let mut earlier = self.stages.iter().enumerate().filter(|(_, other)| other.name == stage.name);
        if let (Some(_), Some((last, _))) = (earlier.next(), earlier.next()) {
            self.stages.remove(last);
        }
        self.stages.push(stage);
    }

    /// The stages recorded so far.
    pub fn stages(&self) -> &[MemoryStage] {
        &self.stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::to_json;

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

    #[test]
    fn a_reading_has_process_and_host() {
        let reading = Reading::of_host();
        assert!(reading.process.0 > 0 && reading.process <= reading.process_peak);
        assert!(reading.anonymous.is_some_and(|bytes| bytes.0 > 0 && bytes <= reading.process));
        assert!(reading.host.used().0 > 0 && reading.host.used() <= reading.host.total);
        assert_eq!(reading.card, None);
        assert!(to_json(&reading).get("card_bytes").is_none());
    }

    #[test]
    fn of_a_frequent_stage_the_first_and_the_last_are_kept() {
        let mut tracker = Tracker::new();
        for (name, step) in [("start", 0), ("save", 1), ("evaluate", 1), ("save", 2), ("save", 3), ("end", 3)] {
            let reading = Reading::default();
            tracker.record(MemoryStage { name: name.to_owned(), step: Some(step), reading });
        }
        let kept: Vec<_> =
            tracker.stages().iter().map(|stage| (&*stage.name, stage.step.expect("a step"))).collect();
        assert_eq!(kept, [("start", 0), ("save", 1), ("evaluate", 1), ("save", 3), ("end", 3)]);
    }

    #[test]
    fn a_card_is_in_the_json_of_a_reading() {
        let all = Memory { free: Bytes(50), total: Bytes(80) };
        let reading = Reading { card: Some(CardReading { process: Bytes(20), all }), ..Reading::default() };
        let json = to_json(&MemoryStage { name: "loaded".to_owned(), step: None, reading });
        let card = ["card_bytes", "card_used_bytes", "card_total_bytes"].map(|key| json[key].as_u64());
        assert_eq!((card, json["stage"].as_str()), ([Some(20), Some(30), Some(80)], Some("loaded")));
    }
}
