//! Selection of the checkpoint from which a run continues. Invariant: a run continues only from a checkpoint
//! whose configuration agrees in every key that changes results, and never overwrites newer checkpoints of its
//! own folder.

use super::checkpoint::{CHECKPOINTS, Checkpoint, Checkpoints, Named};
use super::config::schema::{leaves, schema};
use super::config::{TrainConfig, Warmup};
use crate::error::{ConfigDifference, TrainError};
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Level, Observer, RuntimeError};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The state from which a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// The newest usable checkpoint of the run's folder; step 0 if the folder has no checkpoints.
    #[default]
    Auto,
    /// Step 0; the folder must hold no checkpoints.
    Never,
    /// The checkpoint folder at this path, or the newest usable checkpoint if the path is the folder of a run.
    From(PathBuf),
}

/// Opens the checkpoint from which the run in `own` continues; `None` to start at step 0.
///
/// # Errors
/// The folder has checkpoints although `resume` is [`Resume::Never`], no checkpoint is usable, the checkpoint
/// is older than another of `own`, or its configuration differs in a key that changes results.
pub(super) fn choose(
    resume: &Resume,
    own: &Checkpoints,
    config: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Option<Checkpoint>, TrainError> {
    let found = match resume {
        Resume::Auto => newest(&own.list()?, observer)?,
        Resume::From(path) => {
            let found = open_named(path, observer)?;
            refuse_older(own, &found)?;
            Some(found)
        }
        Resume::Never => match own.list()?.last() {
            None => None,
            Some(Named { path, .. }) => {
                return Err(TrainError::CheckpointExists { path: path.clone() });
            }
        },
    };
    if let Some(checkpoint) = &found
        && let Some(difference) = difference(&checkpoint.record.config, config)?
    {
        return Err(TrainError::OtherConfiguration { path: checkpoint.path.clone(), difference });
    }
    Ok(found)
}

/// Opens the newest checkpoint that is complete and undamaged, with a warning for each newer damaged checkpoint;
/// `None` if `all` is empty. `Err` if none of them is usable.
fn newest(all: &[Named], observer: &mut dyn Observer) -> Result<Option<Checkpoint>, TrainError> {
    let mut last = None;
    for Named { path, .. } in all.iter().rev() {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(why) => {
                let path = EscapedPath(path);
                observer
                    .say(Level::Warning, &format!("{path} cannot be used: {why}; trying an older checkpoint"));
                last = Some((path.0.to_owned(), why));
            }
        }
    }
    match last {
        None => Ok(None),
        Some((path, why)) => Err(TrainError::NoUsableCheckpoint { path, why }),
    }
}

/// Opens the checkpoint at `path`, or the newest usable checkpoint of the run at `path`.
fn open_named(path: &Path, observer: &mut dyn Observer) -> Result<Checkpoint, TrainError> {
    if path.join(CHECKPOINTS).is_dir() {
        let found = newest(&Checkpoints::list_in(path)?, observer)?;
        return found.ok_or_else(|| TrainError::NoCheckpoint { folder: path.to_owned() });
    }
    Checkpoint::open(path).map_err(|why| TrainError::BadCheckpoint { path: path.to_owned(), why })
}

/// `Err` if `own` has a checkpoint of a later step than `found`. A run that continued from `found` would reach
/// the step of that checkpoint again.
fn refuse_older(own: &Checkpoints, found: &Checkpoint) -> Result<(), TrainError> {
    let newer = own.list()?.into_iter().rfind(|named| named.step > found.record.state.step);
    newer.map_or(Ok(()), |named| {
        Err(TrainError::OlderCheckpoint { path: found.path.clone(), newer: named.path })
    })
}

/// Returns the first key that changes results and has different values in the configurations, or a different
/// end of the schedule.
fn difference(old: &Value, config: &TrainConfig) -> Result<Option<ConfigDifference>, TrainError> {
    let text = |config: &TrainConfig| {
        serde_json::to_value(config)
            .map_err(|e| RuntimeError::bug(format!("a configuration that cannot be written as JSON: {e}")))
    };
    // A checkpoint of a version without a key has the default of the key.
    let before: TrainConfig =
        serde_json::from_value(old.clone()).map_err(|source| TrainError::CheckpointConfig { source })?;
    let (old, new) = (text(&before)?, text(config)?);
    let keys = leaves(&schema()).into_iter().filter(|leaf| leaf.changes == "results");
    for leaf in keys {
        let (was, is) = (at_path(&old, &leaf.path), at_path(&new, &leaf.path));
        if was != is {
            let (was, is) = (was.clone(), is.clone());
            return Ok(Some(ConfigDifference::Key { key: leaf.path, was, is }));
        }
    }
    // The length of the run may change unless the learning rate of the completed steps depended on it: a decaying
    // schedule, or a warm-up that is a fraction of the steps.
    let (was, is) = (before.horizon(), config.horizon());
    let bends = config.schedule.kind.ends() || matches!(config.schedule.warmup, Warmup::Share(_));
    Ok((bends && was != is).then_some(ConfigDifference::ScheduleEnd { was, is }))
}

/// The value at a dotted path; null if the path does not exist.
fn at_path<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, key| &value[key])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint of a version without a key continues with the default of the key, and with no other value.
    #[test]
    fn keys_that_a_checkpoint_lacks_have_their_defaults() {
        let config = TrainConfig::default();
        let mut old = serde_json::to_value(&config).expect("JSON");
        old.as_object_mut().expect("a section").remove("distillation");
        old["data"]["masking"].as_object_mut().expect("a section").remove("unit");
        assert_eq!(difference(&old, &config).expect("compared"), None);
        let mut other = config;
        other.distillation.weight = 0.25;
        let found = difference(&old, &other).expect("compared").expect("a difference").to_string();
        assert_eq!(found, "`distillation.weight` was 0.5, is 0.25");
    }
}
