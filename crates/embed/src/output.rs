//! Writers of embeddings: `.npy` with a list of ids and a description beside it, `.npz`, `.safetensors`, or a `.parquet`
//! table. Invariant: the files of a result appear together when all are complete, and never beside files of another run; one
//! run at a time writes a result; with one result per input, the results complete in input order.

use super::input::SequenceRecord;
use super::journaled::{Committing, FileRows, NameSizes, ResultFacts};
use super::states::LayerSelection;
use super::{EmbedDestination, EmbedError, EmbedFormat, Pooling};
use plimsoll_data::atomic::{AtomicFile, commit_together};
use plimsoll_data::destination::ResolvedPath as Place;
use plimsoll_data::outputs::OutputGuard;
use plimsoll_data::rows::{
    NpyWriter, NpzLayout, NpzWriter, ParquetWriter, SafetensorsLayout, SafetensorsWriter, TableLayout,
    ValueType,
};
use plimsoll_data::sequence::stem;
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::lock::{FileLock, Lock, take, take_file};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

impl EmbedFormat {
    /// File name extension.
    pub fn ending(self) -> &'static str {
        match self {
            Self::Npy => "npy",
            Self::Npz => "npz",
            Self::Safetensors => "safetensors",
            Self::Parquet => "parquet",
        }
    }

    /// The format of a file name's extension.
    fn of(output: &Path) -> Result<Self, EmbedError> {
        let all = [Self::Npy, Self::Npz, Self::Safetensors, Self::Parquet];
        let ending = output.extension().and_then(|e| e.to_str());
        all.into_iter()
            .find(|format| Some(format.ending()) == ending)
            .ok_or_else(|| EmbedError::UnknownFormat { path: output.to_owned() })
    }

    /// The files of the result `output`, the main one first and the one that describes the others last.
    fn files(self, output: &Path) -> Vec<PathBuf> {
        match self {
            Self::Npy => vec![output.to_owned(), ids_path(output), description_path(output)],
            Self::Npz | Self::Safetensors | Self::Parquet => vec![output.to_owned()],
        }
    }
}

/// Path of the list of ids: `OUT.ids.txt` for `OUT.npy`.
fn ids_path(output: &Path) -> PathBuf {
    output.with_extension("ids.txt")
}

/// Path of the description: `OUT.json` for `OUT.npy`.
fn description_path(output: &Path) -> PathBuf {
    output.with_extension("json")
}

/// Name of the journal of a run with one result per input, in the folder of the results.
const FOLDER_JOURNAL: &str = "embed.journal";

/// The result files of a run, which this run alone may write.
pub(super) struct Targets {
    /// The files of each result: of one for all inputs, or of one per input.
    files: Vec<Vec<PathBuf>>,
    /// The journal of the run.
    pub(super) journal: PathBuf,
    /// Which files may be written, and whether existing results are replaced.
    guard: OutputGuard,
    /// Held until the results are complete.
    lock: OutputLock,
}

/// The lock of the output, held until it is dropped.
enum OutputLock {
    /// Lock of the only result.
    File { _lock: FileLock },
    /// Lock of the folder of the results.
    Folder { _lock: Lock },
    /// A device or a pipe, which has no lock.
    Stream,
}

impl Targets {
    /// Locks the file `path`, with the other files of its result.
    pub(super) fn file(files: Vec<PathBuf>, guard: OutputGuard) -> Result<Self, EmbedError> {
        let path = &files[0];
        let journal = journal_path(path);
        let destination = Place::of(path).map_err(|e| DataError::at(path, DataErrorKind::Write(e)))?;
        let lock = match destination {
            // Of the file after all links, so that two names of it have one lock.
            Place::File(destination) => OutputLock::File { _lock: take_file(&destination)? },
            Place::Stream(_) | Place::Unsuitable => OutputLock::Stream,
        };
        Self::locked(lock, vec![files], journal, guard)
    }

    /// Creates and locks the folder of the results.
    fn folder(folder: &Path, files: Vec<Vec<PathBuf>>, guard: OutputGuard) -> Result<Self, EmbedError> {
        // Only the last of the ancestors of a relative path is empty.
        if !folder.ancestors().all(|path| path.as_os_str().is_empty() || !path.exists() || path.is_dir()) {
            return Err(EmbedError::NotAFolder { path: folder.to_owned() });
        }
        let lock = take(folder, &[FOLDER_JOURNAL])?;
        Self::locked(OutputLock::Folder { _lock: lock }, files, folder.join(FOLDER_JOURNAL), guard)
    }

    fn locked(
        lock: OutputLock,
        files: Vec<Vec<PathBuf>>,
        journal: PathBuf,
        guard: OutputGuard,
    ) -> Result<Self, EmbedError> {
        let targets = Self { files, journal, guard, lock };
        // With a journal, an interrupted run may have committed results; its key tells which.
        let committed = if targets.journal.exists() { targets.files.len() } else { 0 };
        targets.check(committed)?;
        Ok(targets)
    }

    /// Checks that the results can be written: no file of a result is an input, two files are not one, and a file that exists
    /// is replaced only by force. The first `committed` results are those of this run, which was interrupted.
    pub(super) fn check(&self, committed: usize) -> Result<(), EmbedError> {
        let mut guard = self.guard.clone();
        for (at, files) in self.files.iter().enumerate() {
            for path in files {
                let checked = if at < committed { guard.own_file(path) } else { guard.file(path) };
                checked?;
            }
        }
        Ok(())
    }

    /// The main file of the first result.
    pub(super) fn main(&self) -> &Path {
        &self.files[0][0]
    }

    /// Whether existing results are replaced.
    pub(super) fn force(&self) -> bool {
        self.guard.force()
    }
}

/// Path of the journal beside the file `output`: `OUT.npy.journal`.
fn journal_path(output: &Path) -> PathBuf {
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    output.with_file_name(format!("{name}.journal"))
}

/// Paths of the results of `destination`, and their format. `Err` if the format does not fit the pooling, or two inputs
/// have one result.
fn paths(
    destination: &EmbedDestination,
    inputs: &[PathBuf],
    pool: Pooling,
) -> Result<(EmbedFormat, Vec<PathBuf>), EmbedError> {
    let (format, paths) = match destination {
        EmbedDestination::File(path) => (EmbedFormat::of(path)?, vec![path.clone()]),
        EmbedDestination::PerInput { folder, format } => (*format, per_input(inputs, folder, *format)?),
    };
    if format == EmbedFormat::Npy && pool == Pooling::Tokens {
        return Err(EmbedError::TokensOfNpy);
    }
    Ok((format, paths))
}

/// `FOLDER/STEM.EXTENSION` for each input. `Err` if two inputs have the same stem.
fn per_input(inputs: &[PathBuf], folder: &Path, format: EmbedFormat) -> Result<Vec<PathBuf>, EmbedError> {
    let mut known: HashMap<String, &PathBuf> = HashMap::new();
    let mut paths = vec![];
    for input in inputs {
        let stem = stem(input);
        let path = folder.join(format!("{stem}.{}", format.ending()));
        if let Some(other) = known.insert(stem, input) {
            return Err(EmbedError::SameResult { one: other.clone(), other: input.clone(), result: path });
        }
        paths.push(path);
    }
    Ok(paths)
}

/// The files of one result, after they were written.
pub(super) struct WrittenResult {
    pub(super) files: Vec<PathBuf>,
    pub(super) sequences: u64,
}

/// Properties that all results of a run share.
pub(super) struct ResultSchema {
    pub(super) states: LayerSelection,
    /// Hidden size D of the model.
    pub(super) width: usize,
    pub(super) values: ValueType,
    pub(super) format: EmbedFormat,
}

impl ResultSchema {
    /// Metadata of the results: `facts` and the properties of the values.
    fn metadata(&self, facts: &ResultFacts) -> Vec<(&'static str, Value)> {
        let pool = [("pool", json!(self.states.pool.name()))];
        let layers = self.states.numbers().map(|layers| ("layers", json!(layers)));
        let values = [("dtype", json!(self.values.name()))];
        facts.entries().into_iter().chain(pool).chain(layers).chain(values).collect()
    }
}

/// Metadata as texts, for formats without other values: a text as it is, any other value as JSON.
fn texts(metadata: &[(&'static str, Value)]) -> Vec<(&'static str, String)> {
    metadata.iter().map(|(key, value)| (*key, text(value))).collect()
}

fn text(value: &Value) -> String {
    match (value.as_str(), value.as_array()) {
        (Some(text), _) => text.to_owned(),
        // Lists of numbers read as `0,6,33`.
        (None, Some(list)) => list.iter().map(Value::to_string).collect::<Vec<_>>().join(","),
        (None, None) => value.to_string(),
    }
}

/// Writes the results one after the other.
pub(super) struct EmbeddingFiles {
    schema: ResultSchema,
    metadata: Vec<(&'static str, Value)>,
    /// The writer of result number `done.len()`; `None` before [`FileRows::begin`].
    open: Option<ResultFiles>,
    done: Vec<WrittenResult>,
    /// Dropped last: the lock is released, and a new folder removed if it is empty, after the temporary files are gone.
    targets: Targets,
}

/// Checks, before the model is opened, that the results can be written, and locks them: the format is known and fits the
/// pooling, paths are distinct, no other run writes them, and `guard` permits every file.
pub(super) fn lock(
    destination: &EmbedDestination,
    inputs: &[PathBuf],
    pool: Pooling,
    guard: OutputGuard,
) -> Result<(EmbedFormat, Targets), EmbedError> {
    let (format, paths) = paths(destination, inputs, pool)?;
    let mut files = paths.iter().map(|path| format.files(path));
    let targets = match destination {
        EmbedDestination::File(_) => Targets::file(files.next().unwrap_or_default(), guard)?,
        EmbedDestination::PerInput { folder, .. } => Targets::folder(folder, files.collect(), guard)?,
    };
    Ok((format, targets))
}

impl EmbeddingFiles {
    pub(super) fn new(targets: Targets, schema: ResultSchema) -> Self {
        Self { targets, schema, metadata: vec![], open: None, done: vec![] }
    }

    fn sink(&self, at: usize) -> Result<ResultFiles, EmbedError> {
        ResultFiles::create(&self.targets, at, &self.schema, &self.metadata)
    }

    /// Completes the open result, and opens the next one if there is one.
    fn complete(&mut self, committing: Committing<'_>) -> Result<(), EmbedError> {
        let Some(open) = self.open.take() else {
            return Err(RuntimeError::bug("a result was written before it was begun").into());
        };
        // The journal first: after a kill between the two, the next run may replace the files of this result. In the
        // other order it would refuse them as the files of another run.
        committing(self.done.len())?;
        self.done.push(open.finish(&self.metadata)?);
        if self.done.len() < self.targets.files.len() {
            self.open = Some(self.sink(self.done.len())?);
        }
        Ok(())
    }
}

impl FileRows for EmbeddingFiles {
    fn begin(&mut self, facts: &ResultFacts, committed: usize) -> Result<(), EmbedError> {
        self.targets.check(committed)?;
        self.metadata = self.schema.metadata(facts);
        self.open = Some(self.sink(0)?);
        Ok(())
    }

    /// Appends to the result of the sequence's input, after completing all results before it.
    fn write(
        &mut self,
        sequence: &SequenceRecord,
        values: &[f32],
        committing: Committing<'_>,
    ) -> Result<(), EmbedError> {
        while self.done.len() < sequence.result {
            self.complete(&mut *committing)?;
        }
        match &mut self.open {
            Some(open) => open.write(&sequence.id, sequence.length, values),
            None => Err(RuntimeError::bug("a result was written before it was begun").into()),
        }
    }

    /// Completes the open result, and creates the results of inputs that are left, which have no sequence.
    fn finish(&mut self, committing: Committing<'_>) -> Result<Vec<WrittenResult>, EmbedError> {
        while self.done.len() < self.targets.files.len() {
            self.complete(&mut *committing)?;
        }
        Ok(std::mem::take(&mut self.done))
    }

    fn memory_bytes(&self, sequences: Option<u64>, name: u64) -> u64 {
        /// Write buffers of the files of one result, and one row.
        const BUFFERS: u64 = 1 << 20;
        BUFFERS
            + match self.schema.format {
                EmbedFormat::Npy => 0,
                // One element of the array of names.
                EmbedFormat::Npz => 5 * name,
                // The header has an entry for each name, which is formatted as text at the end.
                EmbedFormat::Safetensors => sequences.unwrap_or_default() * (256 + 4 * name),
                // A row group: its values, and their encoded form.
                EmbedFormat::Parquet => 3 * (16 << 20),
            }
    }

    fn name_bytes(&self, name: &str) -> u64 {
        match self.schema.format {
            EmbedFormat::Safetensors => self.schema.states.safetensors().name_bytes(name),
            EmbedFormat::Npy | EmbedFormat::Npz | EmbedFormat::Parquet => 0,
        }
    }

    fn check_names(&self, names: &NameSizes) -> Result<(), DataErrorKind> {
        match self.schema.format {
            EmbedFormat::Safetensors => self.schema.states.safetensors().check_names(names.bytes),
            EmbedFormat::Npz => NpzWriter::check_names(names.count, names.longest),
            EmbedFormat::Npy | EmbedFormat::Parquet => Ok(()),
        }
    }

    fn journal(&self) -> &Path {
        &self.targets.journal
    }

    fn force(&self) -> bool {
        self.targets.force()
    }
}

/// The open files of one result.
struct ResultFiles {
    /// The files, the main one first.
    files: Vec<PathBuf>,
    writer: ResultWriter,
    sequences: u64,
    shape: Vec<usize>,
    /// With one result per input, the lock of the result; `None` where the run has it.
    _lock: Option<FileLock>,
}

enum ResultWriter {
    Npy { matrix: Box<NpyWriter>, ids: Box<AtomicFile>, description: Box<AtomicFile> },
    Npz(Box<NpzWriter>),
    Safetensors(Box<SafetensorsWriter>),
    Parquet(Box<ParquetWriter>),
}

impl ResultFiles {
    fn create(
        targets: &Targets,
        at: usize,
        schema: &ResultSchema,
        metadata: &[(&'static str, Value)],
    ) -> Result<Self, EmbedError> {
        let files = targets.files[at].clone();
        let lock = match &targets.lock {
            OutputLock::File { .. } | OutputLock::Stream => None,
            // A run with one result may write to a file of this folder.
            OutputLock::Folder { .. } => Some(take_file(&files[0])?),
        };
        let path = &files[0];
        let row = schema.states.row(schema.width);
        let writer = match schema.format {
            EmbedFormat::Npy => ResultWriter::Npy {
                matrix: Box::new(NpyWriter::with_values(path, &row, schema.values)?),
                ids: Box::new(AtomicFile::create(&files[1])?),
                description: Box::new(AtomicFile::create(&files[2])?),
            },
            EmbedFormat::Npz => {
                let layout = match schema.states.pool {
                    Pooling::Mean | Pooling::Cls | Pooling::Last => NpzLayout::Matrix,
                    Pooling::Tokens => NpzLayout::Tokens,
                };
                ResultWriter::Npz(Box::new(NpzWriter::create(path, layout, &row, schema.values)?))
            }
            EmbedFormat::Safetensors => {
                let writer = match schema.states.safetensors() {
                    SafetensorsLayout::Matrix => SafetensorsWriter::matrix(path, &row)?,
                    SafetensorsLayout::TensorPerId => SafetensorsWriter::tensor_per_id(path, &row)?,
                };
                ResultWriter::Safetensors(Box::new(writer.with_values(schema.values)))
            }
            EmbedFormat::Parquet => {
                let layout = TableLayout {
                    columns: schema.states.columns(),
                    width: schema.width,
                    value_type: schema.values,
                    by_token: schema.states.pool == Pooling::Tokens,
                };
                let metadata = texts(metadata);
                let metadata: Vec<(&str, &str)> = metadata.iter().map(|(k, v)| (*k, v.as_str())).collect();
                ResultWriter::Parquet(Box::new(ParquetWriter::with_layout(path, layout, &metadata)?))
            }
        };
        Ok(Self { files, writer, sequences: 0, shape: row, _lock: lock })
    }

    fn write(&mut self, id: &str, length: u64, values: &[f32]) -> Result<(), EmbedError> {
        self.sequences += 1;
        match &mut self.writer {
            ResultWriter::Npy { matrix, ids, .. } => {
                matrix.row(values).map_err(|e| e.with_id(id))?;
                writeln!(ids, "{id}").map_err(|e| ids.error(e))?;
            }
            ResultWriter::Npz(writer) => writer.write(id, length, values)?,
            ResultWriter::Safetensors(writer) => writer.write(id, values)?,
            ResultWriter::Parquet(writer) => writer.write_sequence(id, length, values)?,
        }
        Ok(())
    }

    /// Completes the files and moves them to their final names.
    fn finish(self, metadata: &[(&'static str, Value)]) -> Result<WrittenResult, EmbedError> {
        let Self { files, writer, sequences, shape, _lock } = self;
        match writer {
            ResultWriter::Npy { matrix, mut ids, mut description } => {
                let shape: Vec<u64> =
                    std::iter::once(sequences).chain(shape.iter().map(|&n| n as u64)).collect();
                let names: Vec<String> = files.iter().map(|path| file_name(path)).collect();
                let mut facts = vec![("files", json!(names)), ("shape", json!(shape))];
                facts.extend(metadata.iter().cloned());
                describe(&mut description, &facts, &mut ids)?;
                // The description last: where it is, the others are complete.
                commit_together(vec![matrix.into_file()?, *ids, *description])?;
            }
            ResultWriter::Npz(writer) => {
                let object: Value =
                    metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
                writer.finish(&object.to_string())?;
            }
            ResultWriter::Safetensors(writer) => {
                let metadata = texts(metadata);
                let metadata: Vec<(&str, &str)> = metadata.iter().map(|(k, v)| (*k, v.as_str())).collect();
                writer.finish(&metadata)?;
            }
            ResultWriter::Parquet(writer) => {
                writer.finish()?;
            }
        }
        Ok(WrittenResult { files, sequences })
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Writes the description of a matrix: a JSON object with `facts`, and `ids`, the names of `list` in order. Names are read
/// from the list one by one, because all of them may be more than the memory budget has room for.
fn describe(
    file: &mut AtomicFile,
    facts: &[(&'static str, Value)],
    list: &mut AtomicFile,
) -> Result<(), EmbedError> {
    let mut head = String::from("{\n");
    for (key, value) in facts {
        head.push_str(&format!("  {}: {value},\n", json!(key)));
    }
    head.push_str("  \"ids\": [");
    file.write_all(head.as_bytes()).map_err(|e| file.error(e))?;
    let mut lines = list.read_back()?;
    let mut line = String::new();
    let mut separator = "\n";
    loop {
        line.clear();
        if lines.read_line(&mut line).map_err(|e| file.error(e))? == 0 {
            break;
        }
        let name = json!(line.strip_suffix('\n').unwrap_or(&line));
        write!(file, "{separator}    {name}").map_err(|e| file.error(e))?;
        separator = ",\n";
    }
    write!(file, "\n  ]\n}}\n").map_err(|e| file.error(e))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_result_may_be_called() {
        let check = |name: &str, pool, wanted: bool| {
            let found = paths(&EmbedDestination::File(name.into()), &[], pool);
            assert_eq!(found.is_ok(), wanted, "{name}");
        };
        check("nowhere/a.npy", Pooling::Mean, true);
        check("nowhere/a.parquet", Pooling::Cls, true);
        check("nowhere/a.safetensors", Pooling::Tokens, true);
        check("nowhere/a.npy", Pooling::Tokens, false);
        check("nowhere/a.parquet", Pooling::Tokens, true);
        check("nowhere/a.npz", Pooling::Tokens, true);
        check("nowhere/a.npz", Pooling::Last, true);
        check("nowhere/a", Pooling::Mean, false);
        check("nowhere/a.csv", Pooling::Cls, false);
        check("Cargo.toml", Pooling::Mean, false);
        assert_eq!(journal_path(Path::new("a/b.npy")), Path::new("a/b.npy.journal"));
        assert_eq!(description_path(Path::new("a/b.c.npy")), Path::new("a/b.c.json"));
        assert_eq!(ids_path(Path::new("a/b.c.npy")), Path::new("a/b.c.ids.txt"));
    }

    #[test]
    fn a_result_for_each_input() {
        let inputs = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let found = per_input(&inputs(&["x/a.fa.gz", "b.c.faa", "-"]), Path::new("out"), EmbedFormat::Npy);
        assert_eq!(found.expect("three"), inputs(&["out/a.npy", "out/b.c.npy", "out/stdin.npy"]));
        let error =
            per_input(&inputs(&["x/a.fa", "b.fa", "y/a.fq.xz"]), Path::new("out"), EmbedFormat::Parquet);
        let error = error.expect_err("of one stem").to_string();
        assert!(error.contains("x/a.fa and y/a.fq.xz would both be written to out/a.parquet"), "{error}");
    }
}
