//! Writer of event files for TensorBoard, beside metrics.jsonl and with the same numbers in f32. Invariant: a file begins with
//! the version of the format and the first step that it has, so that TensorBoard forgets the steps that a resumed run
//! repeats.
//!
//! A file is a sequence of records (length, its checksum, data, its checksum), and the data of each is a protobuf message
//! `Event`. Sources: tensorflow/core/lib/io/record_writer.cc, tensorflow/core/util/event.proto,
//! tensorboard/compat/proto/summary.proto.

use crate::TrainError;
use plimsoll_runtime::RuntimeError;
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions, create_dir_all};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Folder of the event files in the folder of a run.
pub const FOLDER: &str = "tensorboard";

/// Numbers of lines of metrics.jsonl that are no scalars of their own: the step is the axis, and TensorBoard has the time.
const NO_SCALARS: [&str; 2] = ["step", "seconds"];

/// An open event file.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates an event file for a run in `folder` whose next step is `next`.
    pub fn create(folder: &Path, next: u64) -> Result<Self, TrainError> {
        let folder = folder.join(FOLDER);
        create_dir_all(&folder).map_err(RuntimeError::io(&folder))?;
        // TensorBoard reads the files of a folder in the order of their names.
        let now = now();
        let name = format!("events.out.tfevents.{:010}.{:09}.plimsoll", now.as_secs(), now.subsec_nanos());
        let path = folder.join(name);
        let file =
            OpenOptions::new().append(true).create_new(true).open(&path).map_err(RuntimeError::io(&path))?;
        let mut events = Self { path, file };
        events.write(&event(now, None, |out| field_bytes(out, 3, b"brain.Event:2")))?;
        // A session log with status START.
        events.write(&event(now, Some(next), |out| field_bytes(out, 7, &[0x08, 1])))?;
        Ok(events)
    }

    /// Writes the numbers of a line of metrics.jsonl as scalars: `train/KEY`, or `validation/KEY` for `validation_KEY`. Those of
    /// an object or an array have their keys or places as further parts of the name: `train/expert_load/LAYER/EXPERT`.
    pub fn put(&mut self, line: &Map<String, Value>) -> Result<(), TrainError> {
        let step = line.get("step").and_then(Value::as_u64);
        let step = step.ok_or_else(|| RuntimeError::bug("a line of metrics without a step".to_owned()))?;
        let mut summary = vec![];
        for (key, value) in line {
            if NO_SCALARS.contains(&&**key) {
                continue;
            }
            let tag = match key.strip_prefix("validation_") {
                Some(key) => format!("validation/{key}"),
                None => format!("train/{key}"),
            };
            add_scalars(&mut summary, &tag, value);
        }
        self.write(&event(now(), Some(step), |out| field_bytes(out, 5, &summary)))
    }

    /// Appends a record.
    fn write(&mut self, data: &[u8]) -> Result<(), TrainError> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        // One write for each record, so that a killed process leaves at most its last record incomplete.
        Ok(self.file.write_all(&record).map_err(RuntimeError::io(&self.path))?)
    }
}

/// Appends a value to a summary if it is a number, and all numbers in it if it is an object or an array.
fn add_scalars(summary: &mut Vec<u8>, tag: &str, value: &Value) {
    match value {
        Value::Number(number) => {
            let mut scalar = vec![];
            field_bytes(&mut scalar, 1, tag.as_bytes());
            scalar.push(2 << 3 | FIXED32);
            scalar.extend((number.as_f64().unwrap_or(f64::NAN) as f32).to_le_bytes());
            field_bytes(summary, 1, &scalar);
        }
        Value::Object(entries) => {
            entries.iter().for_each(|(key, value)| add_scalars(summary, &format!("{tag}/{key}"), value));
        }
        Value::Array(values) => {
            values
                .iter()
                .zip(0..)
                .for_each(|(value, place)| add_scalars(summary, &format!("{tag}/{place}"), value));
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Wire types of protobuf.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// Time since the epoch.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// An `Event` with its time, its step, and what `rest` adds.
fn event(time: Duration, step: Option<u64>, rest: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    // The key of a field is its number, shifted by the three bits of the wire type.
    let mut out = vec![1 << 3 | FIXED64];
    out.extend(time.as_secs_f64().to_le_bytes());
    if let Some(step) = step {
        out.push(2 << 3 | VARINT);
        varint(&mut out, step);
    }
    rest(&mut out);
    out
}

/// Appends a field of bytes: a text or a message.
fn field_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Appends a number in groups of seven bits, lowest first.
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// CRC-32C, masked as record files have it: a checksum of data that contains checksums would be weak otherwise.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    /// The records of an event file, with their checksums checked.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = vec![];
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
            let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
            assert_eq!(crc(8), masked_crc(&bytes[..8]));
            let data = &bytes[12..12 + length];
            assert_eq!(crc(12 + length), masked_crc(data));
            found.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        found
    }

    #[test]
    fn numbers_are_varints() {
        for (number, wanted) in [(0, &[0][..]), (127, &[127]), (128, &[0x80, 1]), (300, &[0xac, 2])] {
            let mut out = vec![];
            varint(&mut out, number);
            assert_eq!(out, wanted);
        }
    }

    /// Event files that TensorFlow wrote begin with these twelve bytes: a first record of 24 bytes.
    #[test]
    fn checksums_are_those_of_record_files() {
        assert_eq!(masked_crc(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn lines_become_scalars() {
        let folder = Folder::new("tensorboard");
        let mut events = EventFile::create(&folder.path("runs"), 8).expect("created");
        let line = serde_json::json!({"step": 300, "loss": 0.5, "lr": null, "seconds": 2.0, "best": true});
        let Value::Object(line) = line else { panic!("an object") };
        events.put(&line).expect("written");
        let [version, start, scalars] = &records(&std::fs::read(&events.path).expect("read"))[..] else {
            panic!("three records")
        };
        // Each begins with the time: a key and eight bytes.
        assert_eq!(version[9..], [&[3 << 3 | BYTES, 13], &b"brain.Event:2"[..]].concat());
        assert_eq!(start[9..], [2 << 3, 8, 7 << 3 | BYTES, 2, 8, 1]);
        let scalar =
            [&[1 << 3 | BYTES, 10], &b"train/loss"[..], &[2 << 3 | FIXED32], &0.5f32.to_le_bytes()].concat();
        let summary = [&[1 << 3 | BYTES, scalar.len() as u8], &scalar[..]].concat();
        assert_eq!(
            scalars[9..],
            [&[2 << 3, 0xac, 2, 5 << 3 | BYTES, summary.len() as u8], &summary[..]].concat()
        );
    }

    #[test]
    fn numbers_in_objects_and_arrays_have_their_place_in_the_name() {
        let tags = |value: Value| {
            let mut summary = vec![];
            add_scalars(&mut summary, "train/expert_load", &value);
            String::from_utf8_lossy(&summary).matches("train/expert_load").count()
        };
        assert_eq!(tags(serde_json::json!({"0": [0.5, 0.25, null], "3": [1]})), 3);
        let mut summary = vec![];
        add_scalars(&mut summary, "a", &serde_json::json!({"3": [7, 0.5]}));
        let scalar = |tag: &[u8], number: f32| {
            let scalar = [&[1 << 3 | BYTES, 5], tag, &[2 << 3 | FIXED32], &number.to_le_bytes()].concat();
            [&[1 << 3 | BYTES, scalar.len() as u8], &scalar[..]].concat()
        };
        assert_eq!(summary, [scalar(b"a/3/0", 7.0), scalar(b"a/3/1", 0.5)].concat());
    }
}
