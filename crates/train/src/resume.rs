//! Selects the checkpoint that a run resumes from. Invariant: never a checkpoint whose configuration differs in a key
//! that can change results, and an existing run is never overwritten by a new one.

use super::checkpoint::{Checkpoint, Checkpoints, Named};
use super::config::schema::{leaves, schema};
use super::config::{TrainConfig, Warmup};
use crate::TrainError;
use data::printable::Place;
use runtime::{Level, Observer};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Where a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// From the newest usable checkpoint in the run's folder; from scratch if there is none.
    #[default]
    Auto,
    /// From scratch; the folder must not contain checkpoints.
    Never,
    /// From this checkpoint, or from the newest checkpoint of this run folder.
    From(PathBuf),
}

/// Selects the checkpoint to resume from; `None` to start from scratch.
pub(super) fn choose(
    resume: &Resume,
    own: &Checkpoints,
    config: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Option<Checkpoint>, TrainError> {
    let found = match resume {
        Resume::Auto => newest(&own.list()?, observer)?,
        Resume::From(path) => {
            let found = at(path, observer)?;
            older_than_none(own, &found)?;
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
        && let Some(what) = difference(&checkpoint.record.config, config)?
    {
        return Err(TrainError::OtherConfiguration { path: checkpoint.path.clone(), what });
    }
    Ok(found)
}

/// Opens the newest checkpoint that is intact; an error if there are checkpoints and all of them are damaged.
fn newest(all: &[Named], observer: &mut dyn Observer) -> Result<Option<Checkpoint>, TrainError> {
    let mut last = None;
    for Named { path, .. } in all.iter().rev() {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(why) => {
                let path = Place(path);
                observer
                    .say(Level::Warning, &format!("{path} cannot be used: {why}; looking for an older one"));
                last = Some(format!("{path}: {why}"));
            }
        }
    }
    match last {
        None => Ok(None),
        Some(why) => Err(TrainError::NoUsableCheckpoint { why: why.to_string() }),
    }
}

/// Opens the checkpoint at a path, or the newest checkpoint of the run folder at that path.
fn at(path: &Path, observer: &mut dyn Observer) -> Result<Checkpoint, TrainError> {
    if path.join("checkpoints").is_dir() {
        let found = newest(&Checkpoints::open(path)?.list()?, observer)?;
        return found.ok_or_else(|| TrainError::NoCheckpoint { folder: path.to_owned() });
    }
    Checkpoint::open(path)
        .map_err(|why| TrainError::BadCheckpoint { path: path.to_owned(), why: why.to_string() })
}

/// Rejects a checkpoint that is older than a checkpoint in the run's own folder: the run would reach the steps of its
/// own later checkpoints again.
fn older_than_none(own: &Checkpoints, found: &Checkpoint) -> Result<(), TrainError> {
    let newer = own.list()?.into_iter().rfind(|named| named.step > found.record.state.step);
    newer.map_or(Ok(()), |named| {
        Err(TrainError::OlderCheckpoint { path: found.path.clone(), newer: named.path })
    })
}

/// Describes the first key that differs and can change results; `None` if there is none.
fn difference(old: &Value, config: &TrainConfig) -> Result<Option<String>, TrainError> {
    let broken = |e: serde_json::Error| TrainError::CheckpointConfig { why: e.to_string() };
    let new = serde_json::to_value(config).map_err(broken)?;
    let keys = leaves(&schema()).into_iter().filter(|leaf| leaf.changes == "results");
    for leaf in keys {
        let (was, is) = (at_path(old, &leaf.path), at_path(&new, &leaf.path));
        if was != is {
            return Ok(Some(format!("`{}` was {was}, is {is}", leaf.path)));
        }
    }
    // The length of a run may change, unless the learning rate already depends on the step at which it ends.
    let old: TrainConfig = serde_json::from_value(old.clone()).map_err(broken)?;
    let (was, is) = (old.horizon(), config.horizon());
    let text = |end: Option<u64>| end.map_or("never".to_owned(), |step| format!("at step {step}"));
    let bends = config.schedule.kind.ends() || matches!(config.schedule.warmup, Warmup::Share(_));
    Ok((bends && was != is)
        .then(|| format!("the schedule ended {}, ends {}; schedule.steps says where", text(was), text(is))))
}

fn at_path<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, key| &value[key])
}
