//! The calibration of a caller, calibration.json beside its weights: how the margin of a record becomes a probability, what
//! was measured at the presets, and the parameters of regions. Invariant: a calibration that was read is complete and
//! consistent: lengths ascend, probabilities are probabilities, slopes are positive.
//!
//! ```json
//! {
//!   "format": "plimsoll_calibration",
//!   "version": 3,
//!   "window": 1000,
//!   "class_temperature": 1.2,
//!   "lengths": [
//!     {
//!       "length": 300, "slope": 0.9, "intercept": -0.1, "auroc": 0.84, "ece": 0.02,
//!       "presets": {
//!         "default": {"threshold": 0.5, "tpr": 0.7, "fpr": 0.15},
//!         "relaxed": {"threshold": 0.3, "tpr": 0.85, "fpr": 0.3},
//!         "conservative": {"threshold": 0.95, "tpr": 0.2, "fpr": 0.01}
//!       }
//!     }
//!   ],
//!   "regions": {"background": 0.75, "background_limit": 1.5, "offset": 0.5, "min_score": 8.0, "min_length": 2000, "merge_gap": 2000, "x_drop": 20.0}
//! }
//! ```
//! All keys are required, other keys are errors. The *margin* of a window is its logit of `virus` minus its logit of
//! `other`; the margin of a record is the mean over its windows. The log odds of a record are `slope * margin + intercept`
//! at equal numbers of viral and other records (a prior of 0.5). Thresholds are probabilities at that prior; `ece` is the
//! expected calibration error (Guo et al. 2017). Between two lengths of the table every number is linear in the logarithm
//! of the length; below the shortest and above the longest length the nearest row applies.

use super::logit;
use crate::VirusError;
use plimsoll_data::bounded;
use plimsoll_data::hex::hex;
use plimsoll_data::printable::Name;
use plimsoll_runtime::{CallerModel, RuntimeError};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::io::ErrorKind;
use std::path::Path;

/// Name of the file in the folder of a caller.
pub const CALIBRATION: &str = "calibration.json";

/// Value of the key `format`.
const FORMAT: &str = "plimsoll_calibration";
/// Accepted values of the key `version`. Version 2 is that before `regions.x_drop`: its regions have no such limit.
const VERSIONS: [u64; 2] = [2, 3];
/// Largest accepted file in bytes.
const LARGEST: u64 = 1 << 20;
/// Maximum number of lengths.
const MAX_LENGTHS: usize = 1000;

/// A named operating point of the classifier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThresholdPreset {
    /// A balance between found viruses and false calls.
    #[default]
    Default,
    /// More viruses, more false calls.
    Relaxed,
    /// Fewer false calls, fewer viruses.
    Conservative,
}

impl ThresholdPreset {
    /// All presets, in the order of [`LengthCalibration::points`].
    pub const ALL: [Self; 3] = [Self::Default, Self::Relaxed, Self::Conservative];

    /// Name on the command line and in calibration.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Relaxed => "relaxed",
            Self::Conservative => "conservative",
        }
    }
}

/// Error rates measured at a threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperatingPoint {
    /// Least probability, at equal priors, of a record that is called virus.
    pub threshold: f64,
    /// True positive rate: share of the viral records that are called virus.
    pub tpr: f64,
    /// False positive rate: share of the other records that are called virus.
    pub fpr: f64,
}

/// The calibration of records of one length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthCalibration {
    /// Factor of the margin.
    pub slope: f64,
    /// Log odds of a margin of 0.
    pub intercept: f64,
    /// Measured area under the ROC curve.
    pub auroc: f64,
    /// Measured expected calibration error.
    pub ece: f64,
    /// The operating points of the presets, in the order of [`ThresholdPreset::ALL`].
    pub points: [OperatingPoint; 3],
}

/// Parameters of regions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegionParameters {
    /// Share of the median log odds of a record's windows that is subtracted from them, 0 to 1.
    pub background: f64,
    /// The largest median of a record with a background; above it the record is itself a virus, for the most part.
    pub background_limit: f64,
    /// Subtracted from the log odds of every window.
    pub offset: f64,
    /// Least sum of the windows' scores of a region.
    pub min_score: f64,
    /// Least length of a region in bases.
    pub min_length: u64,
    /// Regions with at most this number of bases between them are merged.
    pub merge_gap: u64,
    /// A region ends where the sum of its windows' scores has dropped by more than this below the highest sum before.
    pub x_drop: f64,
}

/// Bounds of the error rates at a threshold; both are equal where the threshold is that of a preset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorBounds {
    /// Least and largest true positive rate.
    pub tpr: [f64; 2],
    /// Least and largest false positive rate.
    pub fpr: [f64; 2],
}

/// A calibration that was read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Length in bases of the windows of long records for which everything was measured.
    pub window: u64,
    /// Rows by ascending length.
    rows: Vec<(u64, LengthCalibration)>,
    /// Divisor of the logits of the task `class`.
    pub class_temperature: f64,
    /// Parameters of regions.
    pub regions: RegionParameters,
    /// SHA-256 of the file in hexadecimal.
    pub sha256: String,
    /// The file as JSON, for run.json.
    pub json: Value,
}

impl LengthCalibration {
    /// Log odds at equal priors of a record with this margin.
    pub fn log_odds(&self, margin: f64) -> f64 {
        self.slope * margin + self.intercept
    }

    /// The operating point of a preset.
    pub fn point(&self, preset: ThresholdPreset) -> OperatingPoint {
        self.points[preset as usize]
    }

    /// Bounds of the error rates at a threshold on the log odds at equal priors. Both rates fall with the threshold, so
    /// the nearest measured thresholds on either side bound them.
    pub fn errors(&self, threshold: f64) -> ErrorBounds {
        let mut bounds = ErrorBounds { tpr: [0.0, 1.0], fpr: [0.0, 1.0] };
        for OperatingPoint { threshold: measured, tpr, fpr } in self.points {
            if logit(measured) <= threshold {
                bounds.tpr[1] = bounds.tpr[1].min(tpr);
                bounds.fpr[1] = bounds.fpr[1].min(fpr);
            }
            if logit(measured) >= threshold {
                bounds.tpr[0] = bounds.tpr[0].max(tpr);
                bounds.fpr[0] = bounds.fpr[0].max(fpr);
            }
        }
        bounds
    }

    /// Linear interpolation of every number between two rows; `t` is 0 at `self` and 1 at `other`.
    fn between(&self, other: &Self, t: f64) -> Self {
        let mut points = self.points;
        for (point, next) in points.iter_mut().zip(&other.points) {
            point.threshold = lerp(point.threshold, next.threshold, t);
            point.tpr = lerp(point.tpr, next.tpr, t);
            point.fpr = lerp(point.fpr, next.fpr, t);
        }
        Self {
            slope: lerp(self.slope, other.slope, t),
            intercept: lerp(self.intercept, other.intercept, t),
            auroc: lerp(self.auroc, other.auroc, t),
            ece: lerp(self.ece, other.ece, t),
            points,
        }
    }
}

/// Linear interpolation from `a` at `t` = 0 to `b` at `t` = 1.
fn lerp(a: f64, b: f64, t: f64) -> f64 {
    a + (b - a) * t
}

impl Calibration {
    /// Reads and checks the calibration.json in the folder of a caller.
    ///
    /// # Errors
    /// A file that is missing or not JSON, another format or version, and keys that are missing, unknown or out of range.
    pub fn open(folder: &Path) -> Result<Self, VirusError> {
        let path = folder.join(CALIBRATION);
        match bounded::read_text(&path, LARGEST) {
            Ok(text) => Self::parse(&text, &path),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(VirusError::NoCalibration { path }),
            Err(error) => Err(RuntimeError::io(&path)(error).into()),
        }
    }

    /// The calibration of the built-in caller.
    ///
    /// # Errors
    /// Those of [`Self::open`]; none of them occurs with the file that the program contains.
    pub fn builtin() -> Result<Self, VirusError> {
        Self::parse(CallerModel::builtin_calibration(), Path::new("built-in calibration.json"))
    }

    /// Reads and checks a text; `path` is named in errors.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, VirusError> {
        Self::from_text(text).map_err(|what| VirusError::Calibration { path: path.to_owned(), what })
    }

    fn from_text(text: &str) -> Result<Self, String> {
        let json: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
        let mut calibration = Self::of(&json)?;
        calibration.sha256 = hex(&Sha256::digest(text.as_bytes()));
        calibration.json = json;
        Ok(calibration)
    }

    /// Reads and checks the keys; the digest and the JSON are left empty.
    fn of(json: &Value) -> Result<Self, String> {
        let keys = CalibrationKeys::of(
            json,
            String::new(),
            &["format", "version", "window", "class_temperature", "lengths", "regions"],
        )?;
        let format = keys.get("format")?;
        if format != FORMAT {
            return Err(format!("`format` must be \"{FORMAT}\", found {}", excerpt(format)));
        }
        let version = keys.get("version")?;
        if !version.as_u64().is_some_and(|version| VERSIONS.contains(&version)) {
            let [before, latest] = VERSIONS;
            return Err(format!(
                "`version` must be {before} or {latest}, found {}; use the version of plimsoll that the caller was made for",
                excerpt(version)
            ));
        }
        let lengths = keys.get("lengths")?.as_array().filter(|l| (1..=MAX_LENGTHS).contains(&l.len()));
        let lengths = lengths
            .ok_or_else(|| format!("`lengths` must be a list of 1 to {MAX_LENGTHS} objects, by length"))?;
        let mut rows: Vec<(u64, LengthCalibration)> = vec![];
        for (number, row) in lengths.iter().enumerate() {
            let (length, row) = parse_row(row, &format!("lengths[{number}]"))?;
            if rows.last().is_some_and(|(before, _)| *before >= length) {
                return Err(format!("`lengths[{number}].length` must be above the length before it"));
            }
            rows.push((length, row));
        }
        let all =
            ["background", "background_limit", "offset", "min_score", "min_length", "merge_gap", "x_drop"];
        let has_drop = version != VERSIONS[0];
        let known = if has_drop { &all[..] } else { &all[..all.len() - 1] };
        let regions = CalibrationKeys::of(keys.get("regions")?, "regions.".to_owned(), known)?;
        Ok(Self {
            window: keys.count("window")?,
            rows,
            class_temperature: keys.number("class_temperature", 0.01, 100.0)?,
            regions: RegionParameters {
                background: regions.number("background", 0.0, 1.0)?,
                background_limit: regions.number("background_limit", -100.0, 100.0)?,
                offset: regions.number("offset", -100.0, 100.0)?,
                min_score: regions.number("min_score", 0.0, 1e6)?,
                min_length: regions.count("min_length")?,
                merge_gap: regions.count("merge_gap")?,
                x_drop: if has_drop { regions.number("x_drop", 0.0, 1e6)? } else { f64::INFINITY },
            },
            sha256: String::new(),
            json: Value::Null,
        })
    }

    /// The shortest length that was measured.
    pub fn shortest(&self) -> u64 {
        self.rows.first().map_or(0, |(length, _)| *length)
    }

    /// The lengths that were measured, ascending.
    pub fn lengths(&self) -> impl Iterator<Item = u64> {
        self.rows.iter().map(|(length, _)| *length)
    }

    /// The calibration of records of `length` bases.
    pub fn at(&self, length: u64) -> LengthCalibration {
        let above = self.rows.partition_point(|(l, _)| *l < length);
        match (above.checked_sub(1).map(|i| &self.rows[i]), self.rows.get(above)) {
            (Some((shorter, a)), Some((longer, b))) => {
                let [x, from, to] = [length, *shorter, *longer].map(|l| (l as f64).ln());
                a.between(b, (x - from) / (to - from))
            }
            (Some((_, row)), None) | (None, Some((_, row))) => *row,
            // Does not occur: there is at least one row.
            (None, None) => LengthCalibration {
                slope: 1.0,
                intercept: 0.0,
                auroc: 0.5,
                ece: 1.0,
                points: [OperatingPoint { threshold: 1.0, tpr: 0.0, fpr: 0.0 }; 3],
            },
        }
    }
}

/// Reads a row of `lengths`.
fn parse_row(value: &Value, place: &str) -> Result<(u64, LengthCalibration), String> {
    let known = ["length", "slope", "intercept", "auroc", "ece", "presets"];
    let keys = CalibrationKeys::of(value, format!("{place}."), &known)?;
    let presets = CalibrationKeys::of(
        keys.get("presets")?,
        format!("{place}.presets."),
        &ThresholdPreset::ALL.map(ThresholdPreset::name),
    )?;
    let mut points = [OperatingPoint { threshold: 0.5, tpr: 0.0, fpr: 0.0 }; 3];
    for (preset, point) in ThresholdPreset::ALL.into_iter().zip(&mut points) {
        let place = format!("{place}.presets.{}.", preset.name());
        let keys = CalibrationKeys::of(presets.get(preset.name())?, place, &["threshold", "tpr", "fpr"])?;
        point.threshold = keys.number("threshold", 0.0, 1.0)?;
        point.tpr = keys.number("tpr", 0.0, 1.0)?;
        point.fpr = keys.number("fpr", 0.0, 1.0)?;
    }
    // Both rates fall with the threshold. A table that contradicts this was not measured on one set of records.
    let mut sorted = points;
    sorted.sort_by(|a, b| a.threshold.total_cmp(&b.threshold));
    for (lower, higher) in sorted.iter().zip(&sorted[1..]) {
        if higher.threshold > lower.threshold && (higher.tpr > lower.tpr || higher.fpr > lower.fpr) {
            return Err(format!("`{place}.presets`: a higher threshold must not have a higher tpr or fpr"));
        }
    }
    let length = keys.count("length")?;
    if length == 0 {
        return Err(format!("`{place}.length` must be at least 1"));
    }
    let row = LengthCalibration {
        slope: keys.number("slope", 1e-6, 1e6)?,
        intercept: keys.number("intercept", -1e3, 1e3)?,
        auroc: keys.number("auroc", 0.0, 1.0)?,
        ece: keys.number("ece", 0.0, 1.0)?,
        points,
    };
    Ok((length, row))
}

/// The keys of an object at `place`.
struct CalibrationKeys<'a> {
    object: &'a Map<String, Value>,
    /// Path of the object with a dot at its end; empty for the root.
    place: String,
}

impl<'a> CalibrationKeys<'a> {
    /// Checks that `value` is an object without keys other than `known`.
    fn of(value: &'a Value, place: String, known: &[&str]) -> Result<Self, String> {
        let Some(object) = value.as_object() else {
            let place = if place.is_empty() {
                "the file".to_owned()
            } else {
                format!("`{}`", place.trim_end_matches('.'))
            };
            return Err(format!("{place} must be an object with the keys {}", known.join(", ")));
        };
        match object.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(format!(
                "`{place}{}` is not a key of a calibration; known are {}",
                Name(key),
                known.join(", ")
            )),
            None => Ok(Self { object, place }),
        }
    }

    fn get(&self, key: &str) -> Result<&'a Value, String> {
        self.object.get(key).ok_or_else(|| format!("`{}{key}` is missing", self.place))
    }

    /// A number from `min` to `max`.
    fn number(&self, key: &str, min: f64, max: f64) -> Result<f64, String> {
        let value = self.get(key)?;
        let number = value.as_f64().filter(|x| (min..=max).contains(x));
        number.ok_or_else(|| {
            format!("`{}{key}` must be a number from {min} to {max}, found {}", self.place, excerpt(value))
        })
    }

    /// A whole number of bases.
    fn count(&self, key: &str) -> Result<u64, String> {
        let value = self.get(key)?;
        let number = value.as_u64().filter(|&n| n <= 1 << 40);
        number.ok_or_else(|| {
            format!("`{}{key}` must be a whole number of bases, found {}", self.place, excerpt(value))
        })
    }
}

/// The start of a JSON value, for messages.
fn excerpt(value: &Value) -> String {
    Name(&value.to_string()).to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A calibration with the given rows of length, slope and intercept.
    pub(crate) fn table(rows: &[(u64, f64, f64)]) -> Value {
        let mut lengths = vec![];
        for &(length, slope, intercept) in rows {
            lengths.push(json!({
                "length": length, "slope": slope, "intercept": intercept, "auroc": 0.9, "ece": 0.02,
                "presets": {
                    "default": {"threshold": 0.5, "tpr": 0.8, "fpr": 0.1},
                    "relaxed": {"threshold": 0.25, "tpr": 0.9, "fpr": 0.25},
                    "conservative": {"threshold": 0.75, "tpr": 0.5, "fpr": 0.01},
                },
            }));
        }
        json!({
            "format": "plimsoll_calibration",
            "version": 3,
            "window": 1000,
            "class_temperature": 2.0,
            "lengths": lengths,
            "regions": {
                "background": 0.0, "background_limit": 0.0, "offset": 0.0, "min_score": 2.0, "min_length": 100, "merge_gap": 0,
                "x_drop": 1000.0,
            },
        })
    }

    pub(crate) fn parsed(json: &Value) -> Result<Calibration, VirusError> {
        Calibration::parse(&json.to_string(), Path::new("calibration.json"))
    }

    #[test]
    fn numbers_are_linear_in_the_logarithm_of_the_length() {
        let calibration = parsed(&table(&[(100, 1.0, 0.0), (400, 3.0, -1.0)])).expect("read");
        assert_eq!(calibration.shortest(), 100);
        for (length, slope, intercept) in
            [(1, 1.0, 0.0), (100, 1.0, 0.0), (200, 2.0, -0.5), (400, 3.0, -1.0), (1 << 30, 3.0, -1.0)]
        {
            let at = calibration.at(length);
            assert!(
                (at.slope - slope).abs() < 1e-12 && (at.intercept - intercept).abs() < 1e-12,
                "{length}: {at:?}"
            );
        }
        assert!((calibration.at(200).log_odds(2.0) - 3.5).abs() < 1e-12);
    }

    #[test]
    fn error_rates_are_bounded_by_the_nearest_presets() {
        let at = parsed(&table(&[(100, 1.0, 0.0)])).expect("read").at(100);
        let errors = |threshold: f64| at.errors(logit(threshold));
        assert_eq!(errors(0.5), ErrorBounds { tpr: [0.8, 0.8], fpr: [0.1, 0.1] });
        assert_eq!(errors(0.6), ErrorBounds { tpr: [0.5, 0.8], fpr: [0.01, 0.1] });
        assert_eq!(errors(0.1), ErrorBounds { tpr: [0.9, 1.0], fpr: [0.25, 1.0] });
        assert_eq!(errors(1.0), ErrorBounds { tpr: [0.0, 0.5], fpr: [0.0, 0.01] });
    }

    /// Replaces the value at a JSON pointer, and checks that the refusal names the key.
    #[test]
    fn faults_are_refused_by_key() {
        let valid = table(&[(100, 1.0, 0.0), (400, 3.0, -1.0)]);
        let cases = [
            ("/format", json!("other"), "`format`"),
            ("/version", json!(1), "`version` must be 2 or 3, found 1"),
            // A key of version 3.
            ("/version", json!(2), "`regions.x_drop` is not a key"),
            ("/regions/x_drop", json!(-1), "`regions.x_drop`"),
            ("/class_temperature", json!(0), "`class_temperature`"),
            ("/lengths", json!([]), "`lengths`"),
            ("/lengths/1/length", json!(100), "`lengths[1].length`"),
            ("/lengths/1/length", json!(1.5), "`lengths[1].length`"),
            ("/lengths/0/slope", json!(-1), "`lengths[0].slope`"),
            ("/lengths/0/ece", json!("0.1"), "`lengths[0].ece`"),
            ("/lengths/0/presets/relaxed", json!(0.5), "`lengths[0].presets.relaxed`"),
            ("/lengths/0/presets/default/fpr", json!(1.5), "`lengths[0].presets.default.fpr`"),
            ("/lengths/0/presets/conservative/tpr", json!(0.99), "`lengths[0].presets`"),
            ("/regions/min_length", json!(-1), "`regions.min_length`"),
            (
                "/regions",
                json!({"background": 0, "background_limit": 0, "offset": 0, "min_score": 1, "min_length": 1}),
                "`regions.merge_gap` is missing",
            ),
        ];
        for (pointer, value, named) in cases {
            let mut json = valid.clone();
            *json.pointer_mut(pointer).expect("a key") = value;
            let error = parsed(&json).expect_err("refused").to_string();
            assert!(error.contains(named) && error.starts_with("calibration.json"), "{pointer}: {error}");
        }
        for (pointer, named) in
            [("", "`extra`"), ("/lengths/1", "`lengths[1].extra`"), ("/regions", "`regions.extra`")]
        {
            let mut json = valid.clone();
            json.pointer_mut(pointer).expect("an object")["extra"] = json!(1);
            let error = parsed(&json).expect_err("refused").to_string();
            assert!(error.contains(named), "{pointer}: {error}");
        }
        let error = Calibration::parse("{", Path::new("calibration.json")).expect_err("refused").to_string();
        assert!(error.contains("not JSON"), "{error}");
    }

    #[test]
    fn the_version_without_x_drop_has_no_limit() {
        let mut json = table(&[(100, 1.0, 0.0)]);
        assert_eq!(parsed(&json).expect("read").regions.x_drop, 1000.0);
        json["version"] = json!(2);
        json["regions"].as_object_mut().expect("an object").remove("x_drop");
        assert_eq!(parsed(&json).expect("read").regions.x_drop, f64::INFINITY);
    }

    /// Damaged files are refused with one printable line that names the file, or are read; nothing panics.
    #[test]
    fn damaged_files_are_refused() {
        let text = table(&[(100, 1.0, 0.0), (400, 3.0, -1.0)]).to_string();
        let read = |text: &str| {
            let Err(error) = Calibration::parse(text, Path::new("calibration.json")) else { return true };
            let error = error.to_string();
            assert!(error.starts_with("calibration.json: "), "{error}");
            assert!(
                error.len() < 1000 && error.chars().all(plimsoll_data::printable::is_printable),
                "{error:?}"
            );
            false
        };
        assert!(read(&text));
        let mut accepted = 0;
        for at in 0..text.len() {
            assert!(!read(&text[..at]), "{at}");
            for damage in ["", "9", "-", "1e999", "\"", "\\u001b", "{", "null"] {
                accepted += u32::from(read(&[&text[..at], damage, &text[at + 1..]].concat()));
            }
        }
        assert!(accepted > 0, "some changes of a digit are valid");
    }
}
