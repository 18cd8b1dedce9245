//! Selection of the checkpoint from which a run continues. Invariant: a run continues only from a checkpoint
//! whose configuration agrees in every key that changes results, and never overwrites newer checkpoints of its
//! own folder.

use super::checkpoint::{CHECKPOINTS, CheckpointRecord, Checkpoints, Named, VerifiedCheckpoint};
use super::config::schema::{leaves, schema};
use super::config::{ModelKind, TrainConfig};
use crate::error::{ConfigDifference, TrainError};
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Level, Observer, RuntimeError, metrics};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The state from which a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// The newest usable checkpoint of the run's folder; step 0 if the folder has no checkpoints.
    #[default]
    Auto,
    /// Step 0; the folder must hold no checkpoints and no metrics of another run.
    Never,
    /// Step 0; the checkpoints and metrics of a run in the folder are deleted.
    StartOver,
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
) -> Result<Option<VerifiedCheckpoint>, TrainError> {
    let found = match resume {
        Resume::Auto => newest(&own.list()?, observer)?,
        Resume::From(path) => {
            let found = open_named(path, observer)?;
            refuse_older(own, &found)?;
            Some(found)
        }
        Resume::Never => match own.list()?.pop().map(|named| named.path).or_else(|| metrics_of(own)) {
            None => None,
            Some(path) => return Err(TrainError::CheckpointExists { path }),
        },
        Resume::StartOver => {
            own.clear()?;
            if let Some(path) = metrics_of(own) {
                fs::remove_file(&path).map_err(RuntimeError::io(&path))?;
            }
            None
        }
    };
    if let Some(checkpoint) = &found
        && let Some(difference) = difference(&checkpoint.record, config)?
    {
        return Err(TrainError::OtherConfiguration { path: checkpoint.path.clone(), difference });
    }
    Ok(found)
}

/// The metrics of a run beside the checkpoints; `None` if there are none, or if they are empty.
fn metrics_of(own: &Checkpoints) -> Option<PathBuf> {
    let path = own.run().join(metrics::FILE);
    path.metadata().is_ok_and(|file| file.is_file() && file.len() > 0).then_some(path)
}

/// The configuration that checkpoints of a resumed run record. A value that the first process chose for a key may be stated
/// now, as in the config.yaml of the run: there the key stays as it was, so that the original file resumes the run as well.
pub(super) fn asked(record: &CheckpointRecord, config: &TrainConfig) -> Result<Value, TrainError> {
    let mut asked = json_of(config)?;
    for (key, chosen) in &record.choices {
        if at_path(&asked, key) == chosen {
            let was = at_path(&record.config, key).clone();
            *key.split('.').fold(&mut asked, |section, key| &mut section[key]) = was;
        }
    }
    Ok(asked)
}

/// Opens the newest checkpoint that is complete and undamaged, with a warning for each newer damaged checkpoint;
/// `None` if `all` is empty. `Err` if none of them is usable.
fn newest(all: &[Named], observer: &mut dyn Observer) -> Result<Option<VerifiedCheckpoint>, TrainError> {
    let mut last = None;
    for Named { path, .. } in all.iter().rev() {
        match VerifiedCheckpoint::open(path) {
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
fn open_named(path: &Path, observer: &mut dyn Observer) -> Result<VerifiedCheckpoint, TrainError> {
    if path.join(CHECKPOINTS).is_dir() {
        let found = newest(&Checkpoints::list_in(path)?, observer)?;
        return found.ok_or_else(|| TrainError::NoCheckpoint { folder: path.to_owned() });
    }
    VerifiedCheckpoint::open(path).map_err(|why| TrainError::BadCheckpoint { path: path.to_owned(), why })
}

/// `Err` if `own` has a checkpoint of a later step than `found`. A run that continued from `found` would reach
/// the step of that checkpoint again.
fn refuse_older(own: &Checkpoints, found: &VerifiedCheckpoint) -> Result<(), TrainError> {
    let newer = own.list()?.into_iter().rfind(|named| named.step > found.record.state.step);
    newer.map_or(Ok(()), |named| {
        Err(TrainError::OlderCheckpoint { path: found.path.clone(), newer: named.path })
    })
}

fn json_of(config: &TrainConfig) -> Result<Value, RuntimeError> {
    serde_json::to_value(config)
        .map_err(|e| RuntimeError::bug(format!("a configuration that cannot be written as JSON: {e}")))
}

/// Returns the first key that changes results and has different values in the configurations, or a different
/// end of the schedule. Keys without effect may differ, and a key may state the value that was chosen for it.
fn difference(record: &CheckpointRecord, config: &TrainConfig) -> Result<Option<ConfigDifference>, TrainError> {
    // A checkpoint of a version without a key has the default of the key.
    let before: TrainConfig = serde_json::from_value(record.config.clone())
        .map_err(|source| TrainError::CheckpointConfig { source })?;
    let old = json_of(&before.with_effect())?;
    let new = json_of(&config.with_effect())?;
    let keys = leaves(&schema()).into_iter().filter(|leaf| leaf.changes == "results");
    for leaf in keys {
        let was = at_path(&old, &leaf.path);
        let is = at_path(&new, &leaf.path);
        if was != is && record.choices.get(&leaf.path) != Some(is) {
            let was = was.clone();
            let is = is.clone();
            return Ok(Some(ConfigDifference::Key { key: leaf.path, was, is }));
        }
    }
    // Whether a run evaluates decides which data it holds out. A caller trains on the records of its table in any case.
    if config.model.kind != ModelKind::Caller
        && before.run.evaluate_every.is_none() != config.run.evaluate_every.is_none()
    {
        return Ok(Some(ConfigDifference::HeldOut { evaluated: before.run.evaluate_every.is_some() }));
    }
    // The length of the run may change unless the learning rate of the completed steps depended on it: a decaying
    // schedule, or a warm-up that is a fraction of the steps.
    if !config.rates_depend_on_end() {
        return Ok(None);
    }
    let chosen = record.choices.get("schedule.steps").and_then(Value::as_u64);
    if config.schedule.steps.is_some() && chosen == config.schedule.steps {
        return Ok(None);
    }
    let was = before.horizon();
    let is = config.horizon();
    let epochs_before = schedule_epochs(&before);
    let epochs = schedule_epochs(config);
    if was == is && epochs_before != epochs {
        return Ok(Some(ConfigDifference::ScheduleEpochs { was: epochs_before, is: epochs }));
    }
    Ok((was != is).then_some(ConfigDifference::ScheduleEnd { was, is }))
}

/// Number of epochs after which the schedule ends; `None` if it ends by steps.
fn schedule_epochs(config: &TrainConfig) -> Option<u64> {
    config.run.epochs.filter(|_| config.schedule.steps.is_none())
}

/// The value at a dotted path; null if the path does not exist.
pub(super) fn at_path<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, key| &value[key])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint of a version without a key continues with the default of the key, and with no other value.
    #[test]
    fn keys_that_a_checkpoint_lacks_have_their_defaults() {
        let config = TrainConfig::default();
        let mut old = record(&config, &[]);
        old.config.as_object_mut().expect("a section").remove("distillation");
        old.config["data"]["masking"].as_object_mut().expect("a section").remove("unit");
        assert_eq!(difference(&old, &config).expect("compared"), None);
        let mut other = config;
        other.distillation.weight = 0.25;
        let found = difference(&old, &other).expect("compared").expect("a difference").to_string();
        assert_eq!(found, "`distillation.weight` was 0.5, is 0.25");
    }

    /// The record of a checkpoint of a run that chose values for keys.
    fn record(config: &TrainConfig, choices: &[(&str, Value)]) -> CheckpointRecord {
        CheckpointRecord {
            plimsoll: String::new(),
            state: crate::RunState::new(&config.precision, Value::Null),
            config: json_of(config).expect("JSON"),
            choices: choices.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect(),
        }
    }

    fn config(flags: &str) -> TrainConfig {
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        TrainConfig::parse("data: {train: [a.txt]}\nrun: {steps: 9}", "test", &flags).expect("a configuration")
    }

    /// (flags of the run, choices of the run, flags of the resumption, the difference that refuses it)
    #[test]
    fn what_a_checkpoint_is_resumed_with() {
        let micro = || vec![("batch.micro_tokens", Value::from(4096))];
        let steps = || vec![("schedule.steps", Value::from(30))];
        let epochs = "run.steps=null run.epochs=3";
        for (run, choices, resumed, wanted) in [
            ("", vec![], "", None),
            ("", vec![], "optimizer.lr=1e-3", Some("`optimizer.lr` was 0.0003, is 0.001")),
            // Keys without effect.
            (
                "",
                vec![],
                "optimizer.momentum=0.5 schedule.power=2 schedule.cycle=7 schedule.decay_share=0.3",
                None,
            ),
            ("", vec![], "schedule.gamma=0.5 schedule.every=2 optimizer.update_clip=2", None),
            ("optimizer.kind=sgd", vec![], "optimizer.kind=sgd optimizer.eps=1e-6", None),
            // The same keys with an effect.
            (
                "optimizer.kind=sgd",
                vec![],
                "optimizer.kind=sgd optimizer.momentum=0.5",
                Some("`optimizer.momentum` was 0.9, is 0.5"),
            ),
            ("", vec![], "model.experts.count=16", Some("`model.experts.count` was 8, is 16")),
            // The configuration in the folder of the run states what was chosen.
            ("", micro(), "batch.micro_tokens=4096", None),
            // Other micro-steps have the same packs.
            ("", micro(), "batch.micro_tokens=8192", None),
            ("", vec![], "batch.pack_tokens=2048", Some("`batch.pack_tokens` was \"auto\", is 2048")),
            // The data that is held out.
            (
                "",
                vec![],
                "run.evaluate_every=2",
                Some("the run held no data out, and does with run.evaluate_every"),
            ),
            ("run.evaluate_every=3", vec![], "run.evaluate_every=2", None),
            // The end of the schedule.
            (
                "",
                vec![],
                "run.steps=10",
                Some("the schedule ended at step 9, ends at step 10; schedule.steps says where"),
            ),
            ("schedule.kind=constant", vec![], "schedule.kind=constant run.steps=10", None),
            (epochs, steps(), epochs, None),
            (epochs, steps(), "run.steps=null run.epochs=3 schedule.steps=30", None),
            (epochs, steps(), "run.steps=null run.epochs=5 schedule.steps=30", None),
            (
                epochs,
                steps(),
                "run.steps=null run.epochs=5",
                Some("the schedule ended after 3 epochs, ends after 5 epochs; schedule.steps says where"),
            ),
        ] {
            let found = difference(&record(&config(run), &choices), &config(resumed)).expect("compared");
            assert_eq!(found.map(|found| found.to_string()).as_deref(), wanted, "{run}: {resumed}");
        }
        let old = record(&config(""), &micro());
        let asked = asked(&old, &config("batch.micro_tokens=4096")).expect("JSON");
        assert_eq!(asked, old.config, "the original configuration resumes the run again");
    }
}
