//! Writers of embeddings: `.npy` with a list of ids beside it, `.safetensors`, or a `.parquet` table.
//! Invariant: a file appears under its final name only when it is complete, the `.npy` array after its list of
//! ids; with one result per input, the results complete in input order.

use super::engine::{FileRows, Rows};
use super::input::Sequence;
use super::states::LayerSelection;
use super::{Destination, EmbedError, Format, Pool};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::outputs::OutputGuard;
use plimsoll_data::rows::{NpyWriter, ParquetWriter, SafetensorsWriter};
use plimsoll_data::sequence::stem;
use plimsoll_runtime::RuntimeError;
use std::collections::HashMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

impl Format {
    /// File name extension.
    pub fn ending(self) -> &'static str {
        match self {
            Self::Npy => "npy",
            Self::Safetensors => "safetensors",
            Self::Parquet => "parquet",
        }
    }

    /// The format of a file name's extension.
    fn of(output: &Path) -> Result<Self, EmbedError> {
        let all = [Self::Npy, Self::Safetensors, Self::Parquet];
        let ending = output.extension().and_then(|e| e.to_str());
        all.into_iter()
            .find(|format| Some(format.ending()) == ending)
            .ok_or_else(|| EmbedError::UnknownFormat { path: output.to_owned() })
    }
}

/// Path of the list of ids: `OUT.ids.txt` for `OUT.npy`.
fn ids_path(output: &Path) -> PathBuf {
    output.with_extension("ids.txt")
}

/// The result files of a run.
pub(super) struct Targets {
    format: Format,
    /// One for all inputs, or one per input.
    paths: Vec<PathBuf>,
    /// With one result per input, the folder of the results.
    folder: Option<PathBuf>,
}

impl Targets {
    /// Checks, before the model is opened, that the results can be written: the format is known and fits the
    /// pooling, paths are distinct, and `guard` permits every file.
    pub(super) fn new(
        destination: &Destination,
        inputs: &[PathBuf],
        pool: Pool,
        mut guard: OutputGuard,
    ) -> Result<Self, EmbedError> {
        let targets = match destination {
            Destination::File(path) => {
                Self { format: Format::of(path)?, paths: vec![path.clone()], folder: None }
            }
            Destination::PerInput { folder, format } => {
                let paths = per_input(inputs, folder, *format)?;
                Self { format: *format, paths, folder: Some(folder.clone()) }
            }
        };
        if targets.format != Format::Safetensors && pool == Pool::Tokens {
            return Err(EmbedError::TokensNeedSafetensors);
        }
        let ids = targets.paths.iter().filter(|_| targets.format == Format::Npy).map(|path| ids_path(path));
        targets.paths.iter().cloned().chain(ids).try_for_each(|path| guard.file(&path))?;
        Ok(targets)
    }
}

/// `FOLDER/STEM.EXTENSION` for each input. `Err` if two inputs have the same stem.
fn per_input(inputs: &[PathBuf], folder: &Path, format: Format) -> Result<Vec<PathBuf>, EmbedError> {
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
pub(super) struct Written {
    pub(super) files: Vec<PathBuf>,
    pub(super) sequences: u64,
}

/// Properties that all results of a run share.
pub(super) struct ResultSchema {
    pub(super) states: LayerSelection,
    /// Hidden size D of the model.
    pub(super) width: usize,
    /// Metadata, written by the formats that have a field for it.
    pub(super) metadata: Vec<(&'static str, String)>,
}

impl ResultSchema {
    fn metadata(&self) -> Vec<(&str, &str)> {
        self.metadata.iter().map(|(key, value)| (*key, value.as_str())).collect()
    }
}

/// Writes the results one after the other.
pub(super) struct Results {
    targets: Targets,
    kind: ResultSchema,
    /// The writer of result number `done.len()`.
    open: Sink,
    done: Vec<Written>,
}

impl Results {
    /// Creates the output folder if needed, and the first result.
    pub(super) fn create(targets: Targets, kind: ResultSchema) -> Result<Self, EmbedError> {
        if let Some(folder) = &targets.folder {
            fs::create_dir_all(folder).map_err(|source| match source.kind() {
                ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                    EmbedError::NotAFolder { path: folder.clone() }
                }
                _ => RuntimeError::io(folder)(source).into(),
            })?;
        }
        let open = Sink::create(&targets, 0, &kind)?;
        Ok(Self { targets, kind, open, done: vec![] })
    }
}

impl Rows for Results {
    type Written = Vec<Written>;

    /// Appends to the result of the sequence's input, after completing all results before it.
    fn write(&mut self, sequence: &Sequence, values: &[f32]) -> Result<(), EmbedError> {
        while self.done.len() < sequence.result {
            let next = Sink::create(&self.targets, self.done.len() + 1, &self.kind)?;
            let before = std::mem::replace(&mut self.open, next);
            self.done.push(before.finish(&self.kind)?);
        }
        self.open.write(&sequence.id, sequence.length, values)
    }

    /// Completes the open result, and creates the results of inputs that are left, which have no sequence.
    fn finish(self) -> Result<Vec<Written>, EmbedError> {
        let Self { targets, kind, open, mut done } = self;
        done.push(open.finish(&kind)?);
        for at in done.len()..targets.paths.len() {
            done.push(Sink::create(&targets, at, &kind)?.finish(&kind)?);
        }
        Ok(done)
    }
}

impl FileRows for Results {
    fn memory_bytes(&self, sequences: Option<u64>, name: u64) -> u64 {
        /// Write buffers of the files of one result, and one row.
        const BUFFERS: u64 = 1 << 20;
        BUFFERS
            + match self.targets.format {
                Format::Npy => 0,
                // The header has an entry for each name, which is formatted as text at the end.
                Format::Safetensors => sequences.unwrap_or_default() * (256 + 4 * name),
                // A row group: its values, and their encoded form.
                Format::Parquet => 3 * (16 << 20),
            }
    }
}

/// The open files of one result.
enum Sink {
    Npy { matrix: Box<NpyWriter>, ids: AtomicFile, path: PathBuf },
    Safetensors { writer: Box<SafetensorsWriter>, path: PathBuf },
    Parquet { writer: Box<ParquetWriter>, path: PathBuf },
}

impl Sink {
    fn create(targets: &Targets, at: usize, kind: &ResultSchema) -> Result<Self, EmbedError> {
        let path = targets.paths[at].clone();
        let row = kind.states.row(kind.width);
        Ok(match targets.format {
            Format::Npy => Self::Npy {
                matrix: Box::new(NpyWriter::create(&path, &row)?),
                ids: AtomicFile::create(ids_path(&path))?,
                path,
            },
            Format::Safetensors => {
                let writer = match kind.states.pool {
                    Pool::Mean | Pool::Cls => SafetensorsWriter::matrix(&path, &row)?,
                    Pool::Tokens => SafetensorsWriter::tensor_per_id(&path, &row)?,
                };
                Self::Safetensors { writer: Box::new(writer), path }
            }
            Format::Parquet => {
                let columns = kind.states.columns();
                let writer = ParquetWriter::create(&path, &columns, kind.width, &kind.metadata())?;
                Self::Parquet { writer: Box::new(writer), path }
            }
        })
    }

    fn write(&mut self, id: &str, length: u64, values: &[f32]) -> Result<(), EmbedError> {
        match self {
            Self::Npy { matrix, ids, .. } => {
                matrix.row(values)?;
                writeln!(ids, "{id}").map_err(|e| ids.error(e))?;
            }
            Self::Safetensors { writer, .. } => writer.write(id, values)?,
            Self::Parquet { writer, .. } => writer.row(id, length, values)?,
        }
        Ok(())
    }

    /// Completes the files and moves them to their final names.
    fn finish(self, kind: &ResultSchema) -> Result<Written, EmbedError> {
        Ok(match self {
            Self::Npy { mut matrix, ids, path } => {
                let names = ids.target().to_owned();
                // Write both files completely before either is renamed, so that a full disk leaves neither.
                matrix.complete()?;
                ids.commit()?;
                let sequences = matrix.finish()?;
                Written { files: vec![path, names], sequences }
            }
            Self::Safetensors { writer, path } => {
                let sequences = writer.finish(&kind.metadata())?;
                Written { files: vec![path], sequences }
            }
            Self::Parquet { writer, path } => {
                let sequences = writer.finish()?;
                Written { files: vec![path], sequences }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_result_may_be_called() {
        let check = |name: &str, pool, wanted: bool| {
            let found = Targets::new(&Destination::File(name.into()), &[], pool, OutputGuard::default());
            assert_eq!(found.is_ok(), wanted, "{name}");
        };
        check("nowhere/a.npy", Pool::Mean, true);
        check("nowhere/a.parquet", Pool::Cls, true);
        check("nowhere/a.safetensors", Pool::Tokens, true);
        check("nowhere/a.npy", Pool::Tokens, false);
        check("nowhere/a.parquet", Pool::Tokens, false);
        check("nowhere/a", Pool::Mean, false);
        check("nowhere/a.npz", Pool::Cls, false);
        check("Cargo.toml", Pool::Mean, false);
        assert_eq!(ids_path(Path::new("a/b.c.npy")), Path::new("a/b.c.ids.txt"));
    }

    #[test]
    fn a_result_for_each_input() {
        let inputs = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let found = per_input(&inputs(&["x/a.fa.gz", "b.c.faa", "-"]), Path::new("out"), Format::Npy);
        assert_eq!(found.expect("three"), inputs(&["out/a.npy", "out/b.c.npy", "out/stdin.npy"]));
        let error = per_input(&inputs(&["x/a.fa", "b.fa", "y/a.fq.xz"]), Path::new("out"), Format::Parquet);
        let error = error.expect_err("of one stem").to_string();
        assert!(error.contains("x/a.fa and y/a.fq.xz would both be written to out/a.parquet"), "{error}");
    }
}
