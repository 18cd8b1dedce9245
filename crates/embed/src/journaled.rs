//! Writers of result files behind a journal: rows that an interrupted run has finished are written from the journal, all
//! others are written and appended to it. Invariant: the journal is removed after the results are complete and on disk,
//! and while this run holds their lock.

use crate::EmbedError;
use crate::engine::RowWriter;
use crate::input::SequenceRecord;
use crate::output::WrittenResult;
use crate::resume::{RowJournal, RowReplay};
use plimsoll_data::DataErrorKind;
use plimsoll_runtime::Arithmetic;
use plimsoll_runtime::price::KernelNames;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Called with the number of a result before its files are committed.
pub(super) type Committing<'a> = &'a mut dyn FnMut(usize) -> Result<(), EmbedError>;

/// Facts of a run that are metadata of its results.
#[derive(Clone, Debug)]
pub(super) struct ResultFacts {
    /// Name of the model.
    pub(super) model: String,
    /// SHA-256 of each file of the model.
    pub(super) digests: BTreeMap<String, String>,
    /// How the values were computed.
    pub(super) arithmetic: Arithmetic,
    /// The kernels that computed them.
    pub(super) kernels: KernelNames,
    /// Maximum sequence length in letters.
    pub(super) max_length: Option<usize>,
}

impl ResultFacts {
    /// The facts by name, in the order in which they are written.
    pub(super) fn entries(&self) -> Vec<(&'static str, Value)> {
        let Arithmetic { device, instructions, precision } = &self.arithmetic;
        let mut entries = vec![
            ("plimsoll", json!(env!("CARGO_PKG_VERSION"))),
            ("model", json!(self.model)),
            ("model_sha256", json!(self.digests)),
            ("precision", json!(precision)),
            ("device", json!(device)),
            ("instructions", json!(instructions)),
            ("kernels", json!(self.kernels)),
        ];
        entries.extend(self.max_length.map(|letters| ("max_length", json!(letters))));
        entries
    }
}

/// Sizes of the names of a result.
#[derive(Clone, Debug, Default)]
pub(super) struct NameSizes {
    pub(super) count: u64,
    /// Bytes of the longest name.
    pub(super) longest: u64,
    /// Sum of [`FileRows::name_bytes`].
    pub(super) bytes: u64,
}

/// Writer of the result files of a run, which it has locked.
pub(super) trait FileRows {
    /// Creates the first files. The files of the first `committed` results may exist: an interrupted run of the same
    /// identity has written them. Called once, before the first row.
    fn begin(&mut self, facts: &ResultFacts, committed: usize) -> Result<(), EmbedError>;

    /// Writes the values of the next sequence.
    fn write(
        &mut self,
        sequence: &SequenceRecord,
        values: &[f32],
        committing: Committing<'_>,
    ) -> Result<(), EmbedError>;

    /// Completes all results; files become visible under their final names.
    fn finish(&mut self, committing: Committing<'_>) -> Result<Vec<WrittenResult>, EmbedError>;

    /// Bytes that the writer holds in memory for `sequences` sequences (`None` if unknown) with names of up to
    /// `name` bytes.
    fn memory_bytes(&self, sequences: Option<u64>, name: u64) -> u64;

    /// Bytes that a name takes where the format limits their sum.
    fn name_bytes(&self, name: &str) -> u64;

    /// Errors if the format cannot hold the names of a result.
    fn check_names(&self, names: &NameSizes) -> Result<(), DataErrorKind>;

    /// Path of the journal.
    fn journal(&self) -> &Path;

    /// Whether existing results, and a journal of another run, are replaced.
    fn force(&self) -> bool;
}

/// Result files with a journal.
pub(super) struct Journaled<R> {
    /// `None` if the run cannot be resumed.
    pub(super) journal: Option<RowJournal>,
    /// Rows of an interrupted run that are not written yet.
    pub(super) replay: Option<RowReplay>,
    /// The writer of the files, which holds their lock. Dropped last, after a journal without rows was removed.
    pub(super) inner: R,
}

impl<R: FileRows> RowWriter for Journaled<R> {
    type Written = Vec<WrittenResult>;

    fn write(&mut self, sequence: &SequenceRecord, values: &[f32]) -> Result<(), EmbedError> {
        let Self { inner, journal, .. } = self;
        inner.write(sequence, values, &mut |result| mark(journal, result))?;
        journal.iter_mut().try_for_each(|journal| journal.append(&sequence.id, values))
    }

    fn replay(&mut self, sequence: &SequenceRecord) -> Result<bool, EmbedError> {
        let Self { inner, journal, replay } = self;
        let Some(rows) = replay else { return Ok(false) };
        let Some(values) = rows.next(sequence)? else {
            *replay = None;
            return Ok(false);
        };
        inner.write(sequence, values, &mut |result| mark(journal, result))?;
        Ok(true)
    }

    fn save(&mut self) -> Result<(), EmbedError> {
        self.journal.iter_mut().try_for_each(RowJournal::commit)
    }

    fn finish(mut self) -> Result<Vec<WrittenResult>, EmbedError> {
        let Self { inner, journal, .. } = &mut self;
        let written = inner.finish(&mut |result| mark(journal, result))?;
        self.journal.map_or(Ok(()), RowJournal::remove)?;
        Ok(written)
    }
}

/// Records in the journal that a result is about to be committed.
fn mark(journal: &mut Option<RowJournal>, result: usize) -> Result<(), EmbedError> {
    journal.iter_mut().try_for_each(|journal| journal.result(result))
}
