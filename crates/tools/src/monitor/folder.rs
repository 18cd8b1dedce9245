//! Reader of the folder of a run. Invariant: files that a run is writing are read without waiting for it; a line that is not
//! complete is read the next time.

use super::{End, RunView};
use crate::ToolError;
use plimsoll_data::bounded;
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::live::{LiveCard, LiveState};
use plimsoll_runtime::metrics::MetricsReader;
use plimsoll_runtime::{RuntimeError, lock};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Largest accepted run.json in bytes.
const LARGEST_RECORD: u64 = 1 << 28;

/// Seconds without a new state after which the process of a run is looked for.
const QUIET: u64 = 5;

/// The folder of a run.
pub struct Watched {
    folder: PathBuf,
    view: RunView,
    metrics: MetricsReader,
}

impl Watched {
    /// Opens the folder of a run of `train` or `predict`.
    ///
    /// # Errors
    /// A folder that is not there, or in which there is no run.
    pub fn open(folder: &Path) -> Result<Self, ToolError> {
        let name = EscapedPath(folder).to_string();
        let view = RunView { name, ..RunView::default() };
        let mut watched = Self { folder: folder.to_owned(), view, metrics: MetricsReader::new(folder) };
        std::fs::read_dir(folder).map_err(RuntimeError::io(folder))?;
        watched.update()?;
        if watched.view.state.command.is_empty() {
            return Err(ToolError::NoRun { folder: folder.to_owned() });
        }
        Ok(watched)
    }

    /// Reads what is new.
    ///
    /// # Errors
    /// A file that cannot be read, a run.json that is not a record of a run, or a damaged line of metrics.jsonl.
    pub fn update(&mut self) -> Result<&RunView, ToolError> {
        // A run writes run.json before it removes progress.json, so in this order one of the two is found.
        let state = LiveState::read(&self.folder);
        let record = self.record()?;
        let end = record.as_ref().and_then(end_of);
        match (state, record) {
            // A prediction with --force goes on beside the record of the earlier one.
            (Some(state), _) => {
                self.running(state);
                self.view.end = end.filter(|end| *end != End::Finished).or(self.view.end.take());
            }
            (None, Some(record)) => {
                self.view.state = state_of(&record);
                // Without an end it is the record of a run that starts, or that was killed before its first state.
                self.view.end =
                    end.or_else(|| (lock::is_taken(&self.folder) == Some(false)).then_some(End::Gone));
            }
            (None, None) => self.without_files(),
        }
        self.metrics()?;
        Ok(&self.view)
    }

    /// Takes the state of a folder without progress.json and run.json: a run is starting, a run has failed without a record, as
    /// predictions do, or there is none.
    fn without_files(&mut self) {
        let has_run = !self.view.state.command.is_empty();
        match (lock::is_taken(&self.folder), has_run) {
            // It is about to write a file, or to end.
            (Some(true), true) => {}
            (Some(true), false) => {
                "run".clone_into(&mut self.view.state.command);
                "starting".clone_into(&mut self.view.state.stage);
            }
            (Some(false) | None, true) => {
                self.view.end.get_or_insert(End::Gone);
            }
            (Some(false) | None, false) => {}
        }
    }

    /// Takes the state of a run that has not ended.
    fn running(&mut self, state: LiveState) {
        let is_gone = state.age() >= QUIET && lock::is_taken(&self.folder) == Some(false);
        self.view.end = is_gone.then_some(End::Gone);
        self.view.state = state;
    }

    /// Reads run.json; `None` without one.
    fn record(&self) -> Result<Option<Value>, ToolError> {
        let path = self.folder.join("run.json");
        let text = match bounded::read_text(&path, LARGEST_RECORD) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(RuntimeError::io(&path)(error).into()),
        };
        let record = serde_json::from_str::<Value>(&text).ok().filter(|record| record["plimsoll"].is_string());
        record.map(Some).ok_or(ToolError::NotARecord { path })
    }

    /// Reads the new complete lines of metrics.jsonl.
    fn metrics(&mut self) -> Result<(), ToolError> {
        let Some(mut lines) = self.metrics.open().map_err(RuntimeError::from)? else { return Ok(()) };
        if lines.are_from_start() {
            (self.view.losses, self.view.validations) = Default::default();
        }
        while let Some(line) = lines.next_line().map_err(RuntimeError::from)? {
            let step = line.get("step").and_then(Value::as_u64);
            let series = [("loss", &mut self.view.losses), ("validation_loss", &mut self.view.validations)];
            for (key, series) in series {
                let Some(loss) = line.get(key).and_then(Value::as_f64) else { continue };
                let added = match step {
                    Some(step) => series.try_add(step, loss),
                    None => Err(format!("`{key}` without `step`")),
                };
                added.map_err(|what| RuntimeError::from(lines.malformed(what)))?;
            }
        }
        Ok(())
    }
}

/// The end of a run according to its record; `None` if the run goes on. The record of a prediction is written when it is
/// complete, and has no status.
fn end_of(record: &Value) -> Option<End> {
    match record["status"].as_str() {
        Some("running") => None,
        Some("interrupted") => Some(End::Interrupted),
        Some("failed") => Some(End::Failed(record["error"].as_str().unwrap_or_default().to_owned())),
        Some(_) | None => Some(End::Finished),
    }
}

/// The last state of a run from its record.
fn state_of(record: &Value) -> LiveState {
    let is_training = record.get("config").is_some();
    let last = record["memory"].as_array().and_then(|stages| stages.last()).unwrap_or(&Value::Null);
    let card = last["card_total_bytes"].as_u64().map(|total_bytes| LiveCard {
        process_bytes: bytes(&last["card_bytes"]),
        used_bytes: bytes(&last["card_used_bytes"]),
        total_bytes,
    });
    let health = &record["health"];
    let both = LiveState {
        process_bytes: bytes(&last["resident_bytes"]),
        host_used_bytes: bytes(&last["host_used_bytes"]),
        host_total_bytes: bytes(&last["host_total_bytes"]),
        card,
        status: health["status"].as_str().unwrap_or_default().to_owned(),
        utilisation: float(&health["utilisation"]),
        oom_risk: float(&health["oom_risk"]),
        leak_bytes_per_step: health["leak"]["bytes_per_step"].as_u64(),
        ..LiveState::default()
    };
    if is_training {
        LiveState {
            command: "train".to_owned(),
            stage: "starting".to_owned(),
            unit: "steps".to_owned(),
            done: bytes(&record["state"]["step"]),
            total: record["config"]["run"]["steps"].as_u64(),
            seconds: float(&record["seconds"]),
            tokens_per_second: float(&record["tokens_per_second"]),
            loss: record["loss"].as_f64(),
            budget_bytes: bytes(&record["budget_bytes"]),
            planned_bytes: bytes(&record["peak_bytes"]),
            ..both
        }
    } else {
        let input = record["identity"]["inputs"].as_array().into_iter().flatten();
        let input: u64 = input.map(|input| bytes(&input["bytes"])).sum();
        LiveState {
            command: "predict".to_owned(),
            stage: "finished".to_owned(),
            unit: "bytes".to_owned(),
            done: input,
            total: Some(input),
            records: record["sequences"]["records"].as_u64(),
            seconds: float(&record["seconds"]["total"]),
            tokens_per_second: float(&record["tokens_per_second"]["all"]),
            budget_bytes: bytes(&record["settings"]["budget_bytes"]),
            planned_bytes: bytes(&record["plan"]["peak_bytes"]),
            ..both
        }
    }
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn float(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_runtime::live;
    use plimsoll_testing::Folder;
    use std::fs::{self, File};

    /// Damaged lines are named, and a line without an end does not fill the memory.
    #[test]
    fn damaged_metrics_are_refused_with_their_line() {
        let folder = Folder::new("monitor");
        let state = LiveState { command: "train".to_owned(), ..LiveState::default() };
        folder.write(live::FILE, serde_json::to_vec(&state).expect("JSON"));
        let first = "{\"step\":1,\"loss\":2.0}\n{\"step\":1,\"validation_loss\":3.0}\n";
        for (more, wanted) in [
            ("{\"step\":2,\"lo", None),
            ("{\"step\":2,\n", Some("line 3: not a line of JSON")),
            ("{\"loss\":2.0}\n", Some("line 3: `loss` without `step`")),
            ("{\"step\":0,\"loss\":2.0}\n", Some("line 3: step 0 comes after step 1")),
            (&"x".repeat(17 << 20), Some("line 3: longer than 16777216 bytes")),
        ] {
            folder.write("metrics.jsonl", format!("{first}{more}"));
            let found = Watched::open(&folder.0)
                .map(|watched| (watched.view.losses.last, watched.view.validations.last));
            match wanted {
                None => assert_eq!(found.expect("a run"), (2.0, 3.0)),
                Some(wanted) => {
                    let error = found.expect_err("refused").to_string();
                    assert!(error.contains(&format!("metrics.jsonl, {wanted}")), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_run_that_leaves_no_record_is_gone() {
        let folder = Folder::new("monitor");
        assert!(matches!(Watched::open(&folder.0), Err(ToolError::NoRun { .. })));
        let state = LiveState {
            command: "predict".to_owned(),
            stage: "computing".to_owned(),
            updated: u64::MAX,
            ..LiveState::default()
        };
        let text = serde_json::to_vec(&state).expect("JSON");
        folder.write(live::FILE, &text);
        let mut watched = Watched::open(&folder.0).expect("a run");
        assert_eq!(watched.update().expect("read").end, None);
        fs::remove_file(folder.path(live::FILE)).expect("removed");
        let lock = File::open(&folder.0).expect("a folder");
        lock.lock().expect("locked");
        assert_eq!(watched.update().expect("read").end, None);
        lock.unlock().expect("unlocked");
        assert_eq!(watched.update().expect("read").end, Some(End::Gone));
        // The next run in the folder goes on.
        folder.write(live::FILE, &text);
        assert_eq!(watched.update().expect("read").end, None);
    }
}
