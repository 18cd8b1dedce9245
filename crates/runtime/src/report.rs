//! Reports as JSON, and parts that the reports of several commands share. Invariant: the keys of an object are in alphabetical
//! order, whatever the order of the fields of its struct is, so that files of two versions can be compared line by line.

use crate::session::Usage;
use plimsoll_graph::Bytes;
use plimsoll_plan::{LedgerEntry, Staging};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A report as JSON. Numbers that are not finite become null.
pub fn to_json(report: &impl Serialize) -> Value {
    json!(report)
}

/// Work of a device in a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceReport {
    /// Name of the device.
    pub name: String,
    /// Number of steps computed.
    pub steps: u64,
    /// Number of tokens in these steps.
    pub tokens: u64,
    /// Seconds with at least one step in flight.
    pub seconds_busy: f64,
    /// `seconds_busy` divided by the seconds of the run.
    pub share_busy: f64,
    /// Bytes no longer used by any plan that the device unmapped between steps.
    pub given_back_bytes: Bytes,
    /// Error with which the device failed and was excluded; `None` if it worked to the end.
    pub failed: Option<String>,
}

impl DeviceReport {
    /// Reports the devices of a run that took `seconds` seconds.
    pub fn of(devices: &[Usage], seconds: f64) -> Vec<Self> {
        devices
            .iter()
            .map(|device| Self {
                name: device.name.clone(),
                steps: device.steps,
                tokens: device.tokens,
                seconds_busy: device.busy,
                share_busy: device.busy / seconds.max(1e-9),
                given_back_bytes: device.given_back,
                failed: device.failed.clone(),
            })
            .collect()
    }
}

/// Serializes buffers as an object of bytes by label.
pub fn staging_by_label<S: Serializer>(lines: &[Staging], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(lines.iter().map(|line| (&line.label, line.bytes)))
}

/// Serializes the entries of a ledger as an object of bytes by label.
pub fn ledger_by_label<S: Serializer>(entries: &[LedgerEntry], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|entry| (&entry.label, entry.bytes)))
}

/// Serializes a path as text, in which bytes that are not UTF-8 are replaced.
pub fn path_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Serializes paths as texts, in which bytes that are not UTF-8 are replaced.
pub fn path_texts<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.display().to_string()))
}

/// Serializes an optional path as [`path_text`] does.
pub fn optional_path_text<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.display().to_string()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dynamic::{Reason, StepSizeChange};
    use crate::machine::{CardReading, Memory, MemoryStage, Reading};

    fn text(report: &impl Serialize) -> String {
        to_json(report).to_string()
    }

    #[test]
    fn keys_of_reports_are_in_alphabetical_order() {
        let device = Usage { name: "cpu".to_owned(), steps: 2, tokens: 10, busy: 1.0, ..Usage::default() };
        let wanted = "[{\"failed\":null,\"given_back_bytes\":0,\"name\":\"cpu\",\"seconds_busy\":1.0,\
            \"share_busy\":0.25,\"steps\":2,\"tokens\":10}]";
        assert_eq!(text(&DeviceReport::of(&[device], 4.0)), wanted);
        let change = StepSizeChange {
            step: 3,
            from: 64,
            to: 32,
            reason: Reason::OutOfMemory,
            utilisation: None,
            cause: "out of memory".to_owned(),
        };
        let wanted = "{\"from\":64,\"reason\":\"out_of_memory\",\"step\":3,\"to\":32,\"utilisation\":null}";
        assert_eq!(text(&change), wanted);
    }

    #[test]
    fn a_stage_has_the_keys_of_a_step_and_of_a_card_only_with_them() {
        let host = Memory { free: Bytes(1), total: Bytes(4) };
        let reading = Reading { process: Bytes(2), process_peak: Bytes(5), host, ..Reading::default() };
        let plain = MemoryStage { name: "start".to_owned(), step: None, reading };
        let wanted = "{\"host_total_bytes\":4,\"host_used_bytes\":3,\"peak_bytes\":5,\"resident_bytes\":2,\
            \"stage\":\"start\"}";
        assert_eq!(text(&plain), wanted);
        let card = CardReading { process: Bytes(6), all: Memory { free: Bytes(1), total: Bytes(8) } };
        let reading = Reading { card: Some(card), ..plain.reading };
        let wanted = "{\"card_bytes\":6,\"card_total_bytes\":8,\"card_used_bytes\":7,\"host_total_bytes\":4,\
            \"host_used_bytes\":3,\"peak_bytes\":5,\"resident_bytes\":2,\"stage\":\"end\",\"step\":9}";
        assert_eq!(text(&MemoryStage { name: "end".to_owned(), step: Some(9), reading }), wanted);
    }
}
