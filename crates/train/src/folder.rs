//! The folder of a training run: which folders a run may write to, and what of a folder is the run's own. Invariant: a
//! folder that holds anything belongs to a run only if its run.json is the record of a training run; a configuration that a
//! user edited in the folder is never replaced.

use crate::TrainError;
use crate::config::TrainConfig;
use plimsoll_data::atomic::{AtomicFile, target_of_temporary};
use plimsoll_data::bounded;
use plimsoll_data::outputs::{InputFiles, WrittenFile, WrittenFiles};
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Level, Observer, RuntimeError, hub, live, metrics};
use serde_json::Value;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Name of the run record.
pub(crate) const RECORD: &str = "run.json";
/// Name of the configuration with all values that were chosen.
pub(crate) const CONFIG: &str = "config.yaml";

/// Maximum size of a run record in bytes.
const LONGEST_RECORD: u64 = 256 << 20;

impl TrainConfig {
    /// The files that a run with this configuration reads, apart from its own folder.
    pub fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        let data = &self.data;
        for path in data.train.iter().chain(&data.proteins).chain(&data.validation).chain(&data.labels) {
            files.add_file_or_folder(Path::new(path));
        }
        files.add(Path::new(&data.tokenizer));
        for model in self.model.from.iter().chain(&self.distillation.teacher) {
            hub::add_model_files(model, &mut files);
        }
        files
    }
}

/// Checks that a training run may write to `folder`, and that none of the files that it writes there is one of `inputs`. A
/// folder that does not exist, or is empty, may be written to.
///
/// # Errors
/// [`TrainError::PredictionFolder`], [`TrainError::ForeignFolder`]; an input at the place of an output.
pub fn check_folder(folder: &Path, inputs: &InputFiles) -> Result<(), TrainError> {
    for name in [RECORD, metrics::FILE, live::FILE] {
        inputs.check(&folder.join(name))?;
    }
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(RuntimeError::io(folder))?,
    };
    if folder.join(RECORD).exists() {
        let record = record(folder);
        if record["plimsoll"].is_string() && record["status"].is_string() {
            return Ok(());
        }
        let folder = folder.to_owned();
        return Err(if record["identity"].is_object() {
            TrainError::PredictionFolder { folder }
        } else {
            TrainError::ForeignFolder { folder, name: RECORD.to_owned() }
        });
    }
    for entry in entries {
        let name = entry.map_err(RuntimeError::io(folder))?.file_name().to_string_lossy().into_owned();
        // Left by a run that was killed before its record was complete.
        let is_left = target_of_temporary(&name).is_some_and(|of| [RECORD, live::FILE].contains(&of));
        let is_state = name == live::FILE && live::LiveState::read(folder).is_some_and(|s| s.process_id > 0);
        if !is_left && !is_state {
            return Err(TrainError::ForeignFolder { folder: folder.to_owned(), name });
        }
    }
    Ok(())
}

/// The run record in a folder; null without a record.
fn record(folder: &Path) -> Value {
    let text = bounded::read_text(&folder.join(RECORD), LONGEST_RECORD).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// The files that the record of the run in `folder` lists as written by the run.
pub(crate) fn written(folder: &Path) -> WrittenFiles {
    WrittenFiles::of_record(&bounded::read_text(&folder.join(RECORD), LONGEST_RECORD).unwrap_or_default())
}

/// Whether the run in `folder` wrote the file at `path`, such as its timeline, as it is now.
pub fn has_written(folder: &Path, path: &Path) -> bool {
    std::path::absolute(path).is_ok_and(|path| written(folder).has(folder, &path.to_string_lossy()))
}

/// Enters a file outside of the folder, such as a timeline, in the record of the run in `folder`, so that the same command
/// may replace the file.
///
/// # Errors
/// The record cannot be written.
pub fn add_written(folder: &Path, path: &Path) -> Result<(), TrainError> {
    let Ok(path) = std::path::absolute(path) else { return Ok(()) };
    let mut record = record(folder);
    let mut written = written(folder);
    written.insert(&path.to_string_lossy(), WrittenFile::of(&path));
    if record.is_object() {
        record[WrittenFiles::KEY] = serde_json::json!(written);
        write_text(&folder.join(RECORD), &format!("{record:#}\n"))?;
    }
    Ok(())
}

/// Writes the configuration of a run to its folder and enters it in `written`. A configuration that was edited since a run
/// wrote it stays as it is: it may be the one that this run was started with.
pub(crate) fn write_config(
    folder: &Path,
    config: &TrainConfig,
    written: &mut WrittenFiles,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let path = folder.join(CONFIG);
    let text = config.to_yaml()?;
    let existing = bounded::read_text(&path, LONGEST_RECORD).ok();
    if path.exists() && existing.as_deref() != Some(&*text) && !written.has(folder, CONFIG) {
        let same = existing.and_then(|existing| TrainConfig::parse(&existing, CONFIG, &[]).ok());
        if same.as_ref() != Some(config) {
            let text = format!(
                "{} was changed since a run wrote it and stays as it is; {RECORD} has the configuration of this run",
                EscapedPath(&path)
            );
            observer.say(Level::Warning, &text);
        }
        return Ok(());
    }
    write_text(&path, &text)?;
    written.insert(CONFIG, WrittenFile::of(&path));
    Ok(())
}

/// Writes a file that appears complete or not at all.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), TrainError> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    Ok(file.commit()?)
}
