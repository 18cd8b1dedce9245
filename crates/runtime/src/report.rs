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
        let report = |device: &Usage| Self {
            name: device.name.clone(),
            steps: device.steps,
            tokens: device.tokens,
            seconds_busy: device.busy,
            share_busy: device.busy / seconds.max(1e-9),
            given_back_bytes: device.given_back,
            failed: device.failed.clone(),
        };
        devices.iter().map(report).collect()
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
