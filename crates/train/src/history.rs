//! Reader of the folder of a training run: metrics.jsonl as series of numbers over steps, run.json and config.yaml. Used by
//! the report and by the pictures of training. Invariant: memory does not grow with the length of a run
//! (`plimsoll_runtime::series`).
//!
//! The folder may belong to a run that is still training (`plimsoll_runtime::metrics`). Fields that
//! this version does not know become series of their own if they are numbers, and are passed over if they are not.

use crate::TrainError;
use crate::config::{TrainConfigError, yaml};
use plimsoll_data::printable::{EscapedPath, Name, is_printable};
use plimsoll_data::{DataError, DataErrorKind, bounded};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::metrics::{FILE, MetricsReader};
use plimsoll_runtime::series::{Series, append};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Maximum number of events that are kept.
pub const MOST_EVENTS: usize = 1000;
/// Maximum number of series of a run: a file of another program could have a new name on every line.
const MOST_SERIES: usize = 256;
/// Maximum number of shares of experts that are kept for one layer.
const MOST_SHARES: usize = 1 << 16;
/// Maximum number of layers and of experts in a line.
const MOST_LAYERS: usize = 1 << 14;
/// Largest step: a number that f64 holds exactly.
const LARGEST_STEP: u64 = 1 << 53;
/// Maximum bytes of the name of a series.
const LONGEST_NAME: usize = 200;
/// Maximum number of values of a stage.
const MOST_NUMBERS: usize = 64;
/// Names of the files of a run that are read.
pub const FILES: [&str; 4] =
    [plimsoll_runtime::metrics::FILE, "run.json", "config.yaml", plimsoll_runtime::live::FILE];

/// Maximum bytes of run.json and of config.yaml.
const LARGEST: u64 = 16 << 20;

/// Key of the shares of the experts in metrics.jsonl.
pub const EXPERT_LOAD: &str = "expert_load";
/// Name of a series that is computed from the shares of the experts: the largest share of an expert in any layer, divided
/// by the share of an even distribution.
pub const FULLEST_EXPERT: &str = "fullest_expert";

/// Fields of a line that are positions of the run and no series.
const POSITIONS: [&str; 1] = ["step"];

/// A training run.
#[derive(Clone, Debug)]
pub struct RunHistory {
    /// The folder.
    pub folder: PathBuf,
    /// Name of the folder.
    pub name: String,
    /// Contents of run.json; null without the file.
    pub record: Value,
    /// The configuration, with dotted keys: that of config.yaml, or of run.json before the first step.
    pub settings: BTreeMap<String, String>,
    /// Series in the order in which they first occur.
    pub series: Vec<Series>,
    /// Load of the experts for each layer of a mixture of experts.
    pub loads: Vec<ExpertLoad>,
    /// The first [`MOST_EVENTS`] events.
    pub events: Vec<RunEvent>,
    /// Number of all events.
    pub event_count: u64,
    /// Stages of the run with their numbers, from metrics.jsonl or else from run.json: of each name the first and the last.
    pub stages: Vec<RunStage>,
    /// Step of the last line.
    pub last_step: u64,
}

/// Shares of the routed rows that the experts of a layer received, over the steps of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertLoad {
    /// Number of the layer, from 0.
    pub layer: usize,
    /// Number of experts.
    pub experts: usize,
    /// Columns in ascending order of steps.
    pub columns: Vec<LoadColumn>,
    /// Number of steps of a column.
    width: u64,
}

/// Shares of the experts in neighbouring steps.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadColumn {
    /// First step.
    pub first: u64,
    /// Last step.
    pub last: u64,
    /// Number of steps.
    count: u64,
    /// Sum of the shares of each expert.
    sums: Vec<f64>,
}

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEvent {
    /// Step at which it happened, if the line has one.
    pub step: Option<u64>,
    /// Name of the event.
    pub name: String,
    /// The other fields of its line, as text.
    pub text: String,
}

/// Numbers at the end of a stage of a run, such as `opened`.
#[derive(Clone, Debug, PartialEq)]
pub struct RunStage {
    /// Name of the stage.
    pub name: String,
    /// Step after which it ended, if its line has one.
    pub step: Option<u64>,
    /// Its other numbers, by key.
    pub numbers: Vec<(String, f64)>,
}

impl LoadColumn {
    /// Mean share of each expert.
    pub fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        self.sums.iter().map(|sum| sum / self.count as f64)
    }

    fn join(&mut self, other: &Self) {
        self.last = other.last;
        self.count += other.count;
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, more)| *sum += more);
    }
}

impl ExpertLoad {
    fn add(&mut self, column: LoadColumn) {
        let max_columns = (MOST_SHARES / self.experts.max(1)).clamp(16, 512);
        append(
            &mut self.columns,
            &mut self.width,
            max_columns,
            column,
            |column| column.first,
            LoadColumn::join,
        );
    }

    /// The columns, joined so that there are at most `max_columns`.
    pub fn thinned(&self, max_columns: usize) -> Vec<LoadColumn> {
        let mut columns = vec![];
        let mut width = self.width;
        for column in &self.columns {
            append(
                &mut columns,
                &mut width,
                max_columns.max(1),
                column.clone(),
                |column| column.first,
                LoadColumn::join,
            );
        }
        columns
    }
}

/// Whether `folder` is the folder of a training run, finished or not.
pub fn is_training_run(folder: &Path) -> bool {
    if folder.join(FILE).is_file() {
        return true;
    }
    // A run that failed before its first step has no metrics. The run record of a prediction has no `config`.
    let record = bounded::read_text(&folder.join("run.json"), LARGEST).ok();
    let record = record.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    record.is_some_and(|record| record.get("config").is_some() && record.get("status").is_some())
}

/// A folder of a training run and another folder, where all must be of one kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is a training run and {} {}; give only training runs, or one folder of a prediction",
    EscapedPath(training),
    EscapedPath(other),
    reason(*is_missing)
)]
pub struct MixedFolders {
    /// Folder of a training run.
    pub training: PathBuf,
    /// Another folder.
    pub other: PathBuf,
    /// Whether there is no other folder of that name.
    pub is_missing: bool,
}

/// Says why a folder is not that of a training run.
fn reason(is_missing: bool) -> &'static str {
    if is_missing { "does not exist" } else { "is not" }
}

/// Whether all folders are training runs; false if none is.
///
/// # Errors
/// [`MixedFolders`] if some are and some are not.
pub fn are_training_runs(folders: &[PathBuf]) -> Result<bool, MixedFolders> {
    let training = folders.iter().find(|folder| is_training_run(folder));
    let other = folders.iter().find(|folder| !is_training_run(folder));
    match (training, other) {
        (Some(training), Some(other)) => {
            let is_missing = !other.exists();
            Err(MixedFolders { training: training.clone(), other: other.clone(), is_missing })
        }
        (training, _) => Ok(training.is_some()),
    }
}

impl RunHistory {
    /// Reads the folder of a run.
    ///
    /// # Errors
    /// [`TrainError::NoMetrics`] without a metrics.jsonl; files that cannot be read or parsed, with file and line.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = full.file_name().map_or("run".into(), |name| name.to_string_lossy());
        let record = read_record(&folder.join("run.json"))?;
        let mut run = Self {
            folder: folder.to_owned(),
            name: Name(&name).to_string(),
            settings: read_settings(&folder.join("config.yaml"), &record)?,
            record,
            series: vec![],
            loads: vec![],
            events: vec![],
            event_count: 0,
            stages: vec![],
            last_step: 0,
        };
        run.read()?;
        if run.stages.is_empty() {
            let stages = run.record["memory"].as_array().into_iter().flatten();
            run.stages = stages.filter_map(|stage| Some(RunStage::of(stage.as_object()?))).collect();
        }
        run.series.retain(|series| series.count > 0);
        Ok(run)
    }

    /// Status, device and version of the program, as far as run.json has them.
    pub fn about(&self) -> impl Iterator<Item = String> {
        let version = self.record_text("plimsoll").map(|version| format!("plimsoll {version}"));
        [self.record_text("status"), self.record_text("device"), version].into_iter().flatten()
    }

    /// A text of run.json, printable.
    fn record_text(&self, key: &str) -> Option<String> {
        self.record[key].as_str().map(|text| Name(text).to_string())
    }

    /// The first `max_events` events that belong to a step, each with the step.
    pub fn marked_events(&self, max_events: usize) -> impl Iterator<Item = (u64, &RunEvent)> {
        self.events.iter().filter_map(|event| Some((event.step?, event))).take(max_events)
    }

    /// The series of a name.
    pub fn series(&self, name: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.name == name)
    }

    /// Reads metrics.jsonl.
    fn read(&mut self) -> Result<(), TrainError> {
        let mut reader = MetricsReader::new(&self.folder);
        let Some(mut lines) = reader.open()? else {
            return Err(TrainError::NoMetrics { folder: self.folder.clone() });
        };
        while let Some(line) = lines.next_line()? {
            self.add(&line).map_err(|what| lines.malformed(what))?;
        }
        Ok(())
    }

    /// Adds a line of metrics.jsonl.
    fn add(&mut self, line: &Map<String, Value>) -> Result<(), String> {
        let step = line.get("step").and_then(Value::as_u64).filter(|&step| step <= LARGEST_STEP);
        if let Some(name) = line.get("event") {
            self.add_event(RunEvent {
                step,
                name: Name(&text_of(name)).to_string(),
                text: fields(line, &["event", "step"]),
            });
            return Ok(());
        }
        if line.contains_key("stage") {
            self.add_stage(RunStage::of(line));
            return Ok(());
        }
        let step = step.ok_or("no `step`; a line has the whole number of its step, an `event` or a `stage`")?;
        self.last_step = self.last_step.max(step);
        let before = self.series("skipped").map_or(0.0, |series| series.last);
        for (key, value) in line {
            match key.as_str() {
                EXPERT_LOAD => self.add_load(step, value)?,
                key if POSITIONS.contains(&key) => {}
                key => self.add_numbers(step, key, value)?,
            }
        }
        if let Some(skipped) = line.get("skipped").and_then(Value::as_u64)
            && skipped as f64 > before
        {
            let text = format!("a gradient was not finite; {skipped} skipped so far");
            self.add_event(RunEvent { step: Some(step), name: "skipped".to_owned(), text });
        }
        Ok(())
    }

    /// Adds a stage. Evaluations and checkpoints repeat hundreds of times, so the last one replaces those after the first.
    fn add_stage(&mut self, stage: RunStage) {
        let first = self.stages.iter().position(|earlier| earlier.name == stage.name);
        let last = self.stages.iter().rposition(|earlier| earlier.name == stage.name);
        if let Some(last) = last.filter(|_| first < last) {
            self.stages.remove(last);
        }
        if self.stages.len() < MOST_EVENTS {
            self.stages.push(stage);
        }
    }

    fn add_event(&mut self, event: RunEvent) {
        self.event_count += 1;
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        }
    }

    /// Adds a number, or the numbers of an object, to their series. Other values are no series; null is a number that was not
    /// finite.
    fn add_numbers(&mut self, step: u64, name: &str, value: &Value) -> Result<(), String> {
        if let Value::Object(object) = value {
            return object
                .iter()
                .try_for_each(|(key, value)| self.add_numbers(step, &format!("{name}.{key}"), value));
        }
        let Some(number) = value.as_f64() else { return Ok(()) };
        if !name.chars().all(is_printable) {
            return self.add_numbers(step, &Name(name).to_string(), value);
        }
        let place = match self.series.iter().position(|series| series.name == name) {
            Some(place) => place,
            None if self.series.len() == MOST_SERIES => {
                return Err(format!("more than {MOST_SERIES} different fields"));
            }
            None if name.len() > LONGEST_NAME => {
                return Err(format!("a field with a name of more than {LONGEST_NAME} bytes"));
            }
            None => {
                self.series.push(Series::new(name));
                self.series.len() - 1
            }
        };
        self.series[place].try_add(step, number)
    }

    /// Adds the shares of the experts: an object with an array of numbers for each layer.
    fn add_load(&mut self, step: u64, value: &Value) -> Result<(), String> {
        let layers = value.as_object().ok_or_else(malformed_load)?;
        let mut fullest = f64::NAN;
        for (layer, shares) in layers {
            let layer = layer.parse::<usize>().ok().filter(|&n| n < MOST_LAYERS).ok_or_else(malformed_load)?;
            let shares = shares
                .as_array()
                .filter(|all| (1..=MOST_LAYERS).contains(&all.len()))
                .ok_or_else(malformed_load)?;
            let sums =
                shares.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>().ok_or_else(malformed_load)?;
            fullest = sums.iter().fold(fullest, |most, share| most.max(share * sums.len() as f64));
            let experts = sums.len();
            let place = match self.loads.binary_search_by_key(&layer, |load| load.layer) {
                Ok(place) => place,
                Err(place) => {
                    self.loads.insert(place, ExpertLoad { layer, experts, columns: vec![], width: 1 });
                    place
                }
            };
            let load = &mut self.loads[place];
            if load.experts != experts {
                return Err(format!("layer {layer} has {experts} experts, earlier {}", load.experts));
            }
            if load.columns.last().is_some_and(|column| step < column.last) {
                return Err(format!("step {step} comes after a later step; the steps of a run ascend"));
            }
            load.add(LoadColumn { first: step, last: step, count: 1, sums });
        }
        if fullest.is_nan() { Ok(()) } else { self.add_numbers(step, FULLEST_EXPERT, &Value::from(fullest)) }
    }
}

fn malformed_load() -> String {
    format!("`{EXPERT_LOAD}` is not an object with the shares of experts for each layer")
}

impl RunStage {
    fn of(line: &Map<String, Value>) -> Self {
        let numbers = line.iter().filter_map(|(key, value)| Some((key.clone(), value.as_f64()?)));
        let numbers = numbers.filter(|(key, _)| key != "step" && key.len() <= LONGEST_NAME);
        let numbers = numbers.take(MOST_NUMBERS).collect();
        let step = line.get("step").and_then(Value::as_u64);
        Self { name: Name(&line.get("stage").map(text_of).unwrap_or_default()).to_string(), step, numbers }
    }
}

/// A value as text: strings without quotes.
fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The fields of a line as text, without those in `without`.
fn fields(line: &Map<String, Value>, without: &[&str]) -> String {
    let all = line.iter().filter(|(key, value)| !without.contains(&key.as_str()) && !value.is_null());
    let all: Vec<String> = all.map(|(key, value)| format!("{key} {}", text_of(value))).collect();
    Name(&all.join(", ")).to_string()
}

/// Reads run.json; null without the file.
fn read_record(path: &Path) -> Result<Value, TrainError> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
    let parsed = serde_json::from_str::<Value>(&text);
    Ok(parsed.map_err(|e| DataError::at(path, DataErrorKind::Malformed(format!("not JSON: {e}"))))?)
}

/// Reads config.yaml as dotted keys; that of the run record if there is no file.
fn read_settings(path: &Path, record: &Value) -> Result<BTreeMap<String, String>, TrainError> {
    let config = if path.exists() {
        let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
        let name = EscapedPath(path).to_string();
        yaml::parse(&text).map_err(|error| TrainConfigError::Syntax { name, error })?.to_json()
    } else {
        record["config"].clone()
    };
    let mut settings = BTreeMap::new();
    flatten("", &config, &mut settings);
    Ok(settings)
}

fn flatten(path: &str, value: &Value, out: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, out);
            }
        }
        Value::Null if path.is_empty() => {}
        value => {
            out.insert(path.to_owned(), text_of(value));
        }
    }
}

/// The keys of which the values differ between runs, with the value of each run.
pub fn differences(runs: &[RunHistory]) -> Vec<(String, Vec<Option<String>>)> {
    let keys: std::collections::BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let all = keys.into_iter().map(|key| {
        let values: Vec<_> = runs.iter().map(|run| run.settings.get(key).cloned()).collect();
        (key.clone(), values)
    });
    all.filter(|(_, values)| values.iter().any(|value| *value != values[0])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;
    use proptest::prelude::*;
    use std::fs;

    /// A folder with metrics.
    fn with_metrics(metrics: &str) -> Folder {
        let folder = Folder::new("history");
        folder.write(FILE, metrics);
        folder
    }

    fn read(metrics: &str) -> Result<RunHistory, String> {
        let folder = with_metrics(metrics);
        RunHistory::open(&folder.0).map_err(|e| {
            let mut text = e.to_string();
            let mut source = std::error::Error::source(&e);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            text.replace(&format!("{}/", folder.0.display()), "")
        })
    }

    fn values(run: &RunHistory, name: &str) -> Vec<(u64, f64)> {
        let series = run.series(name).unwrap_or_else(|| panic!("no {name}"));
        series.points.iter().map(|point| (point.first, point.mean())).collect()
    }

    #[test]
    fn lines_become_series_events_and_stages() {
        let metrics = concat!(
            r#"{"stage":"planned","resident_bytes":5,"peak_bytes":7}"#,
            "\n",
            r#"{"step":1,"loss":3.5,"grad_norm":null,"skipped":0,"host":{"heap_bytes":9},"note":"new"}"#,
            "\n",
            r#"{"event":"health","step":1,"what":"loss spike","ratio":2.5}"#,
            "\n",
            r#"{"step":2,"loss":2.5,"grad_norm":0.5,"skipped":1,"host":{"heap_bytes":8}}"#,
            "\n",
            r#"{"step":2,"validation_loss":2.25,"validation_targets":10,"best":true}"#,
            "\n",
            r#"{"step":3,"loss":1"#
        );
        let run = read(metrics).expect("read");
        assert_eq!(values(&run, "loss"), [(1, 3.5), (2, 2.5)]);
        assert_eq!(values(&run, "grad_norm"), [(2, 0.5)]);
        assert_eq!(values(&run, "host.heap_bytes"), [(1, 9.0), (2, 8.0)]);
        assert_eq!(values(&run, "validation_loss"), [(2, 2.25)]);
        assert!(run.series("note").is_none() && run.series("best").is_none());
        assert_eq!((run.last_step, run.event_count), (2, 2));
        let event = |name: &str, step, text: &str| RunEvent {
            step: Some(step),
            name: name.to_owned(),
            text: text.to_owned(),
        };
        assert_eq!(
            run.events,
            [
                event("health", 1, "ratio 2.5, what loss spike"),
                event("skipped", 2, "a gradient was not finite; 1 skipped so far"),
            ]
        );
        let numbers = vec![("peak_bytes".to_owned(), 7.0), ("resident_bytes".to_owned(), 5.0)];
        assert_eq!(run.stages, [RunStage { name: "planned".to_owned(), step: None, numbers }]);
        let loss = run.series("loss").expect("there");
        assert_eq!((loss.last, loss.lowest, loss.highest), (2.5, (2.5, 2), (3.5, 1)));
        assert_eq!((loss.at(2), loss.at(3)), (Some(2.5), None));
    }

    #[test]
    fn stages_that_repeat_have_their_first_and_last_end() {
        let lines: String = (1..=3000)
            .flat_map(|step| ["evaluation", "checkpoint"].map(|stage| (step, stage)))
            .map(|(step, stage)| format!("{{\"stage\":\"{stage}\",\"step\":{step},\"peak_bytes\":{step}}}\n"))
            .collect();
        let run = read(&format!("{{\"stage\":\"start\"}}\n{lines}")).expect("read");
        let found: Vec<_> = run.stages.iter().map(|stage| (stage.name.as_str(), stage.step)).collect();
        let [first, last] = [1, 3000].map(Some);
        let wanted = [
            ("start", None),
            ("evaluation", first),
            ("checkpoint", first),
            ("evaluation", last),
            ("checkpoint", last),
        ];
        assert_eq!(found, wanted);
        assert_eq!(run.stages[4].numbers, [("peak_bytes".to_owned(), 3000.0)]);
    }

    #[test]
    fn damaged_files_are_named_with_their_line() {
        for (metrics, wanted) in [
            ("{\"step\":1}\nnonsense\n", "metrics.jsonl, line 2: not a line of JSON"),
            ("7\n", "metrics.jsonl, line 1: not a JSON object"),
            ("{\"loss\":1}\n", "metrics.jsonl, line 1: no `step`"),
            (
                "{\"step\":5,\"loss\":1}\n{\"step\":4,\"loss\":1}\n",
                "metrics.jsonl, line 2: step 4 comes after step 5",
            ),
            ("{\"step\":1,\"expert_load\":[1]}\n", "metrics.jsonl, line 1: `expert_load` is not"),
            (
                "{\"step\":1,\"expert_load\":{\"0\":[1]}}\n{\"step\":2,\"expert_load\":{\"0\":[1,0]}}\n",
                "metrics.jsonl, line 2: layer 0 has 2 experts, earlier 1",
            ),
        ] {
            let error = read(metrics).expect_err("refused");
            assert!(error.starts_with(wanted), "{error}");
        }
        let folder = with_metrics("");
        fs::remove_file(folder.path(FILE)).expect("removed");
        let error = RunHistory::open(&folder.0).expect_err("refused").to_string();
        assert!(error.contains("no metrics.jsonl"), "{error}");
        folder.write(FILE, "");
        folder.write("run.json", "{");
        let error = RunHistory::open(&folder.0).expect_err("refused").to_string();
        assert!(error.contains("run.json"), "{error}");
    }

    #[test]
    fn shares_of_experts_are_means_of_their_steps() {
        let lines: String = (1..=2000)
            .map(|step| {
                let first = if step % 2 == 0 { 1.0 } else { 0.5 };
                format!("{{\"step\":{step},\"expert_load\":{{\"3\":[{first},{}]}}}}\n", 1.0 - first)
            })
            .collect();
        let run = read(&lines).expect("read");
        let [load] = &run.loads[..] else { panic!("one layer") };
        assert_eq!((load.layer, load.experts), (3, 2));
        assert!(load.columns.len() <= 512);
        // The first column of an even number of steps, from step 4 on.
        let shares: Vec<f64> = load.thinned(100)[1].shares().collect();
        assert_eq!(shares, [0.75, 0.25]);
        assert_eq!(
            run.series(FULLEST_EXPERT).map(|series| (series.count, series.highest.0)),
            Some((2000, 2.0))
        );
    }

    proptest! {
        /// Any damage of a file is read or refused with its line, and never panics.
        #[test]
        fn damaged_lines_are_refused_or_read(at in 0usize..400, byte in any::<u8>(), cut in 0usize..400) {
            let mut text = concat!(
                r#"{"step":1,"loss":3.5,"expert_load":{"0":[0.5,0.5]},"skipped":0,"host":{"heap_bytes":9}}"#, "\n",
                r#"{"stage":"planned","resident_bytes":5}"#, "\n",
                r#"{"event":"health","step":1,"what":"x"}"#, "\n",
                r#"{"step":2,"loss":1e308,"expert_load":{"0":[1,0]},"skipped":1}"#, "\n",
                r#"{"step":9007199254740992,"validation_loss":-1e-308,"best":true}"#, "\n"
            ).as_bytes().to_vec();
            if let Some(found) = text.get_mut(at) {
                *found = byte;
            }
            text.drain(cut.min(text.len() - 1)..(cut + 3).min(text.len()));
            let folder = Folder::new("history");
            folder.write(FILE, &text);
            match RunHistory::open(&folder.0) {
                Ok(run) => prop_assert!(run.series.iter().all(|series| series.count > 0)),
                Err(error) => {
                    let error = error.to_string();
                    prop_assert!(error.contains("metrics.jsonl, line ") && !error.contains('\n'), "{}", error);
                }
            }
        }
    }

    #[test]
    fn configurations_are_compared() {
        let run = |lr: &str| {
            let folder = with_metrics("");
            let text = format!("optimizer:\n  lr: {lr}\n  betas: [0.9, 0.95]\nrun:\n  steps: 10\n");
            folder.write("config.yaml", text);
            RunHistory::open(&folder.0).expect("read")
        };
        let runs = [run("1e-3"), run("3e-4")];
        let different = differences(&runs);
        let value = |text: &str| Some(text.to_owned());
        assert_eq!(different, [("optimizer.lr".to_owned(), vec![value("0.001"), value("0.0003")])]);
        assert_eq!(runs[0].settings.get("optimizer.betas"), value("[0.9,0.95]").as_ref());
    }
}
