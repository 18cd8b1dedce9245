//! Resumption of interrupted runs: journals identified by a key that contains everything results depend on. Invariant:
//! a damaged journal or a journal of another run is never used, mixed with this run's, or removed without `--force`.

use crate::VirusError;
use crate::methods::Method;
use crate::options::WindowShard;
use crate::pipeline::journal::{CommitLimits, InputStamps, JournalReader, JournalWriter, ScannedJournal};
use crate::pipeline::record;
use crate::pipeline::stage::PredictStage;
use crate::{PredictOptions, folder};
use plimsoll_data::journal::{Blocks, Journal};
use plimsoll_data::sequence::Input;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Level, Observer, RuntimeError};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the journal of finished results.
pub(crate) const RESULTS_JOURNAL: &str = "progress.journal";
/// Name of the journal of the rows of the first encoder, used if the encoders do not fit in memory together.
pub(crate) const EMBEDDINGS_JOURNAL: &str = "nucleotide.journal";

/// Identifies the journals that a run may use.
pub(crate) struct JournalKeys {
    /// The output folder, which holds the journals.
    dir: PathBuf,
    /// Key of the run's journals: version, identity, shard, and whether the run replaces results.
    key: Value,
    /// Interval between two commits.
    commit_every: Duration,
    watch: InputStamps,
}

/// Sizes of the entries of a journal.
#[derive(Clone, Copy)]
pub(crate) struct JournalForm {
    /// Number of values of a row; 0 if the journal stores no rows.
    pub(crate) width: usize,
    /// Size in bytes at which a block is committed.
    pub(crate) block: usize,
}

/// A journal opened for a run.
pub(crate) struct StageJournal {
    /// Reader of the results that the journal already has.
    pub(crate) reader: JournalReader,
    /// Writer for the remaining windows; `None` if the journal is complete.
    pub(crate) writer: Option<JournalWriter>,
}

impl JournalKeys {
    /// Builds the keys of a run on `inputs`; `watch` must have been created before the inputs were hashed.
    pub(crate) fn new(
        options: &PredictOptions,
        method: &dyn Method,
        inputs: &[Input],
        watch: InputStamps,
    ) -> Result<Self, VirusError> {
        let shard = options.shard.map(|p| format!("{}/{}", p.number, p.of));
        let key = json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "identity": record::identity(options, method, inputs, to_json(&options.settings.arithmetic()?)),
            "shard": shard,
            // Recorded so that a later call without --force may resume a forced run (`replaces`). Not compared by
            // `difference`.
            "replaces": options.force,
        });
        Ok(Self { dir: options.output_dir.clone(), key, commit_every: options.commit_every, watch })
    }

    /// Whether the journal is of an interrupted run with `--force` that is otherwise identical to this run.
    pub(crate) fn replaces(&self) -> Result<bool, VirusError> {
        let path = self.dir.join(RESULTS_JOURNAL);
        let Some(blocks) = open(&path)? else { return Ok(false) };
        let found = parse(&path, blocks.key())?;
        Ok(difference(&found, &self.key).is_none() && found["replaces"] == true)
    }

    /// Opens or creates the journal of a stage.
    pub(crate) fn open(
        &self,
        stage: PredictStage,
        form: JournalForm,
        observer: &mut dyn Observer,
    ) -> Result<StageJournal, VirusError> {
        let JournalForm { width, block } = form;
        let limits = CommitLimits { block_bytes: block, interval: self.commit_every };
        let (name, what) = match stage {
            PredictStage::Whole | PredictStage::Rest => (RESULTS_JOURNAL, "windows are finished"),
            PredictStage::First => (EMBEDDINGS_JOURNAL, "windows have passed the first encoder"),
        };
        let path = self.dir.join(name);
        let Some(blocks) = self.existing(&path)? else {
            let journal = Journal::create(&path, self.key.to_string().as_bytes())?;
            let writer = JournalWriter::new(journal, self.watch.clone(), limits, 0);
            return Ok(StageJournal { reader: JournalReader::default(), writer: Some(writer) });
        };
        let scanned = ScannedJournal::through(&path, blocks, width).map_err(unusable)?;
        let count = scanned.coverage.count();
        let (reader, journal) = scanned.open(width)?;
        if count > 0 {
            let text = format!("{count} {what} ({}): resuming after them", path.display());
            observer.say(Level::Info, &text);
        }
        let writer = journal.map(|journal| JournalWriter::new(journal, self.watch.clone(), limits, count));
        Ok(StageJournal { reader, writer })
    }

    /// Opens the existing journal of this run. A journal that holds only a key is ignored even if it belongs to another
    /// run, since nothing is lost by replacing it.
    fn existing(&self, path: &Path) -> Result<Option<Blocks>, VirusError> {
        let Some(blocks) = open(path)? else { return Ok(None) };
        let Err(refused) = same_run(path, blocks.key(), &self.key) else { return Ok(Some(blocks)) };
        let mut blocks = blocks;
        if blocks.next_into(&mut vec![]).map_err(|e| unusable(e.into()))? { Err(refused) } else { Ok(None) }
    }

    /// Opens the complete rows of the first encoder left by the preceding stage.
    pub(crate) fn first_rows(&self, width: usize) -> Result<JournalReader, VirusError> {
        let path = self.dir.join(EMBEDDINGS_JOURNAL);
        let Some(blocks) = open(&path)? else { return Ok(JournalReader::default()) };
        same_run(&path, blocks.key(), &self.key)?;
        let scanned = ScannedJournal::through(&path, blocks, width).map_err(unusable)?;
        JournalReader::of([(path.as_path(), scanned.coverage)], width)
    }

    /// Opens the journals of all shards, and returns how they were computed. Every shard must be complete and belong to
    /// this run.
    pub(crate) fn merge(
        &self,
        folders: &[PathBuf],
        width: usize,
    ) -> Result<(JournalReader, Value), VirusError> {
        let mut journals = vec![];
        let mut shards = vec![];
        let mut arithmetic: Option<Value> = None;
        for folder in folders {
            let path = folder.join(RESULTS_JOURNAL);
            let Some(blocks) = open(&path)? else {
                return Err(VirusError::NoShard { path });
            };
            let found = parse(&path, blocks.key())?;
            // Shards of one result must agree in arithmetic with each other; the merging run computes nothing, so its
            // own does not matter.
            let mut wanted = self.key.clone();
            wanted["shard"] = found["shard"].clone();
            let computed = arithmetic.get_or_insert_with(|| found["identity"]["arithmetic"].clone());
            wanted["identity"]["arithmetic"] = computed.clone();
            same_run(&path, blocks.key(), &wanted)?;
            let scanned = ScannedJournal::through(&path, blocks, width).map_err(unusable)?;
            if !scanned.complete {
                let shard = found["shard"].as_str().unwrap_or("1/1").to_owned();
                return Err(VirusError::ShardIncomplete { folder: folder.clone(), shard });
            }
            shards.extend(found["shard"].as_str().and_then(parse_shard));
            journals.push(scanned);
        }
        check_shards(&shards)?;
        let journals = journals.iter().map(|journal| (journal.path.as_path(), journal.coverage.clone()));
        Ok((JournalReader::of(journals, width)?, arithmetic.unwrap_or_default()))
    }

    /// Removes journals of exactly this run that were left next to its complete results. Others are kept: they may
    /// belong to an interrupted run with `--force`.
    pub(crate) fn remove_leftovers(&self) -> Result<(), VirusError> {
        for path in [RESULTS_JOURNAL, EMBEDDINGS_JOURNAL].map(|name| self.dir.join(name)) {
            let Ok(Some(blocks)) = Blocks::open(&path) else { continue };
            if same_run(&path, blocks.key(), &self.key).is_ok() {
                plimsoll_runtime::lock::remove(&path)?;
            }
        }
        Ok(())
    }

    /// Removes the journals. To be called after the results are complete and on disk.
    pub(crate) fn done(&self) -> Result<(), VirusError> {
        remove(&self.dir)
    }
}

/// Checks all journals in the output folder, including those that the run will only remove at its end; an error if one
/// holds results of another run.
pub(crate) fn check_journals(options: &PredictOptions, keys: Option<&JournalKeys>) -> Result<(), VirusError> {
    // A merge into the folder of one of its shards: the journal there is an input, which `JournalKeys::merge` checks.
    if crate::contains_folder(&options.merge, &options.output_dir) {
        return Ok(());
    }
    for path in [RESULTS_JOURNAL, EMBEDDINGS_JOURNAL].map(|name| options.output_dir.join(name)) {
        let Some(mut blocks) = open(&path)? else { continue };
        let other = match keys {
            Some(keys) => same_run(&path, blocks.key(), &keys.key),
            None => Err(VirusError::JournalOfPipe { path: path.clone() }),
        };
        // A journal with only a key can be removed without losing results.
        if other.is_err() && blocks.next_into(&mut vec![]).map_err(|e| unusable(e.into()))? {
            return other;
        }
    }
    Ok(())
}

/// Parses the shard in the key of a journal, such as `2/3`.
fn parse_shard(text: &str) -> Option<WindowShard> {
    let (number, of) = text.split_once('/')?;
    Some(WindowShard { number: number.parse().ok()?, of: of.parse().ok()? })
}

/// Checks that all shards are present. The error names the missing shards.
fn check_shards(shards: &[WindowShard]) -> Result<(), VirusError> {
    let Some(&WindowShard { of, .. }) = shards.first() else { return Ok(()) };
    if let Some(shard) = shards.iter().find(|shard| shard.of != of) {
        return Err(VirusError::ShardsDiffer { of, number: shard.number, other: shard.of });
    }
    let missing = (1..=of).filter(|number| !shards.iter().any(|shard| shard.number == *number));
    let missing: Vec<String> = missing.take(10).map(|number| format!("{number}/{of}")).collect();
    if missing.is_empty() { Ok(()) } else { Err(VirusError::ShardsMissing { missing }) }
}

/// Removes the journals in `dir`, whichever run they belong to.
pub(crate) fn remove(dir: &Path) -> Result<(), VirusError> {
    Ok([RESULTS_JOURNAL, EMBEDDINGS_JOURNAL]
        .iter()
        .try_for_each(|name| plimsoll_runtime::lock::remove(&dir.join(name)))?)
}

/// Opens a journal for reading; `None` if it does not exist or has no complete key.
fn open(path: &Path) -> Result<Option<Blocks>, VirusError> {
    Blocks::open(path).map_err(|e| unusable(e.into()))
}

/// Parses the key of a journal.
fn parse(path: &Path, key: &[u8]) -> Result<Value, VirusError> {
    serde_json::from_slice(key).map_err(|_| VirusError::NotAJournal { path: path.to_owned() })
}

/// Checks that the key of a journal is `wanted`, apart from fields that [`difference`] does not compare.
fn same_run(path: &Path, key: &[u8], wanted: &Value) -> Result<(), VirusError> {
    match difference(&parse(path, key)?, wanted) {
        None => Ok(()),
        Some(what) => Err(VirusError::OtherRun { path: path.to_owned(), what }),
    }
}

/// Describes the first difference between two keys; `None` if they belong to the same run.
fn difference(old: &Value, new: &Value) -> Option<String> {
    folder::difference(&old["identity"], &new["identity"]).or_else(|| {
        let names = [("plimsoll", "version"), ("shard", "shard")];
        let differs = names.iter().find(|(field, _)| old[field] != new[field]);
        differs.map(|(field, name)| format!("{name}: was {}, is {}", old[field], new[field]))
    })
}

/// Converts a data error caused by damage into the error for an unusable journal.
fn unusable(error: VirusError) -> VirusError {
    match error {
        VirusError::Runtime(RuntimeError::Data(damage))
            if matches!(damage.kind, plimsoll_data::DataErrorKind::Damaged(_)) =>
        {
            VirusError::DamagedJournal { damage }
        }
        other => other,
    }
}
