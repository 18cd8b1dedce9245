//! Where embeddings go: `.npy` with a list of ids beside it, or `.safetensors`. Invariant: the files appear
//! when all rows are in them, the matrix last.

use super::{Pool, RunError};
use data::atomic::AtomicFile;
use data::rows::{NpyWriter, SafetensorsWriter};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The format that a name asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Npy,
    Safetensors,
}

fn format(output: &Path) -> Result<Format, RunError> {
    match output.extension().and_then(|e| e.to_str()) {
        Some("npy") => Ok(Format::Npy),
        Some("safetensors") => Ok(Format::Safetensors),
        _ => Err(RunError::Refused(format!(
            "{}: the name of the result must end in .npy or .safetensors",
            output.display()
        ))),
    }
}

/// `OUT.ids.txt` beside `OUT.npy`.
fn ids_path(output: &Path) -> PathBuf {
    output.with_extension("ids.txt")
}

/// Whether the result may be written, before anything is computed.
pub(super) fn check(output: &Path, pool: Pool, force: bool) -> Result<(), RunError> {
    let format = format(output)?;
    if (format, pool) == (Format::Npy, Pool::Tokens) {
        let text =
            "--pool tokens gives a matrix for each sequence, and .npy holds only one; name a .safetensors";
        return Err(RunError::Refused(text.to_owned()));
    }
    let ids = (format == Format::Npy).then(|| ids_path(output));
    let there = |path: &Path| !force && path.exists();
    match std::iter::once(output.to_owned()).chain(ids).find(|p| there(p)) {
        Some(path) => Err(RunError::Refused(format!(
            "{}: the file is there already; use --force to replace it, or another name with -o",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// The files, being written.
pub(super) enum Sink {
    Npy { matrix: NpyWriter, ids: AtomicFile, path: PathBuf },
    Safetensors { writer: Box<SafetensorsWriter>, path: PathBuf },
}

impl Sink {
    pub(super) fn create(output: &Path, pool: Pool, width: usize) -> Result<Self, RunError> {
        let path = output.to_owned();
        Ok(match (format(output)?, pool) {
            (Format::Npy, _) => Self::Npy {
                matrix: NpyWriter::create(output, width)?,
                ids: AtomicFile::create(ids_path(output))?,
                path,
            },
            (Format::Safetensors, Pool::Mean | Pool::Cls) => {
                Self::Safetensors { writer: Box::new(SafetensorsWriter::matrix(output, width)?), path }
            }
            (Format::Safetensors, Pool::Tokens) => {
                Self::Safetensors { writer: Box::new(SafetensorsWriter::tensor_per_id(output, width)?), path }
            }
        })
    }

    /// Appends the values of a sequence.
    pub(super) fn write(&mut self, id: &str, values: &[f32]) -> Result<(), RunError> {
        match self {
            Self::Npy { matrix, ids, .. } => {
                matrix.row(values)?;
                writeln!(ids, "{id}").map_err(|e| ids.error(e))?;
            }
            Self::Safetensors { writer, .. } => writer.write(id, values)?,
        }
        Ok(())
    }

    /// The files appear; which they are, and how many sequences are in them.
    pub(super) fn finish(self, metadata: &[(&str, &str)]) -> Result<(Vec<PathBuf>, u64), RunError> {
        Ok(match self {
            Self::Npy { matrix, ids, path } => {
                let names = ids.target().to_owned();
                ids.commit()?;
                let rows = matrix.finish()?;
                (vec![path, names], rows)
            }
            Self::Safetensors { writer, path } => {
                let sequences = writer.finish(metadata)?;
                (vec![path], sequences)
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
            assert_eq!(super::check(Path::new(name), pool, false).is_ok(), wanted, "{name}");
        };
        check("nowhere/a.npy", Pool::Mean, true);
        check("nowhere/a.safetensors", Pool::Tokens, true);
        check("nowhere/a.npy", Pool::Tokens, false);
        check("nowhere/a", Pool::Mean, false);
        check("nowhere/a.npz", Pool::Cls, false);
        check("Cargo.toml", Pool::Mean, false);
        assert_eq!(ids_path(Path::new("a/b.c.npy")), Path::new("a/b.c.ids.txt"));
    }
}
