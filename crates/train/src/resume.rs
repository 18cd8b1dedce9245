//! Which checkpoint a run goes on from. Invariant: none of another configuration, as far as keys can change a result;
//! and a run that is there is never begun anew over.

use super::checkpoint::{Checkpoint, Checkpoints, Named};
use super::config::schema::{leaves, schema};
use super::config::{TrainConfig, Warmup};
use crate::error::{ConfigDifference, TrainError};
use data::printable::Place;
use runtime::{Level, Observer, RuntimeError};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// At the newest checkpoint of its folder that can be used; at the start where there is none.
    #[default]
    Auto,
    /// At the start; the folder must hold no checkpoints.
    Never,
    /// At this checkpoint, or at the newest of this run's folder.
    From(PathBuf),
}

/// The checkpoint to go on from.
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
        && let Some(difference) = difference(&checkpoint.record.config, config)?
    {
        return Err(TrainError::OtherConfiguration { path: checkpoint.path.clone(), difference });
    }
    Ok(found)
}

/// The newest that can be used.
fn newest(all: &[Named], observer: &mut dyn Observer) -> Result<Option<Checkpoint>, TrainError> {
    let mut last = None;
    for Named { path, .. } in all.iter().rev() {
        match Checkpoint::open(path) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(why) => {
                let path = Place(path);
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

/// A checkpoint that was named, or the newest of a run that was.
fn at(path: &Path, observer: &mut dyn Observer) -> Result<Checkpoint, TrainError> {
    if path.join("checkpoints").is_dir() {
        let found = newest(&Checkpoints::open(path)?.list()?, observer)?;
        return found.ok_or_else(|| TrainError::NoCheckpoint { folder: path.to_owned() });
    }
    Checkpoint::open(path).map_err(|why| TrainError::BadCheckpoint { path: path.to_owned(), why })
}

/// A run that went back would meet its own later checkpoints.
fn older_than_none(own: &Checkpoints, found: &Checkpoint) -> Result<(), TrainError> {
    let newer = own.list()?.into_iter().rfind(|named| named.step > found.record.state.step);
    newer.map_or(Ok(()), |named| {
        Err(TrainError::OlderCheckpoint { path: found.path.clone(), newer: named.path })
    })
}

/// The first key that can change a result and differs.
fn difference(old: &Value, config: &TrainConfig) -> Result<Option<ConfigDifference>, TrainError> {
    let new = serde_json::to_value(config)
        .map_err(|e| RuntimeError::bug(format!("a configuration that cannot be written as JSON: {e}")))?;
    let keys = leaves(&schema()).into_iter().filter(|leaf| leaf.changes == "results");
    for leaf in keys {
        let (was, is) = (at_path(old, &leaf.path), at_path(&new, &leaf.path));
        if was != is {
            let (was, is) = (was.clone(), is.clone());
            return Ok(Some(ConfigDifference::Key { key: leaf.path, was, is }));
        }
    }
    // How long a run is may change, unless the learning rate already bent towards its end.
    let old: TrainConfig =
        serde_json::from_value(old.clone()).map_err(|source| TrainError::CheckpointConfig { source })?;
    let (was, is) = (old.horizon(), config.horizon());
    let bends = config.schedule.kind.ends() || matches!(config.schedule.warmup, Warmup::Share(_));
    Ok((bends && was != is).then_some(ConfigDifference::ScheduleEnd { was, is }))
}

fn at_path<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, key| &value[key])
}
