//! Writers for `--save-embeddings`: one row per open reading frame, the nucleotide embedding followed by the protein
//! embedding. Invariant: rows and names are in input order and equal in number, and every value is finite.

use crate::output::OutputError;
use crate::output::table::{PlainField, TableWriter};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::rows::{NpyWriter, ParquetWriter, SafetensorsWriter};
use std::path::Path;

/// The matrix in numpy format.
pub(crate) const NPY: &str = "embeddings.npy";
/// The names of the matrix's rows, one per line.
pub(crate) const NPY_IDS: &str = "embeddings.ids.txt";
/// Matrix and names in safetensors format.
pub(crate) const SAFETENSORS: &str = "embeddings.safetensors";
/// Names, lengths and rows as a Parquet table.
pub(crate) const PARQUET: &str = "embeddings.parquet";

/// File formats for embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EmbeddingFormat {
    /// `embeddings.npy`, `[n, d]` f32, and `embeddings.ids.txt`.
    Npy,
    /// `embeddings.safetensors`: the tensor `embeddings`, `[n, d]` f32, and the names as a JSON array under
    /// `ids` in the metadata. All names are in the header of the file, therefore in memory, and limited to 100
    /// MB.
    Safetensors,
    /// `embeddings.parquet`: a table with the columns `id`, `length` (of the open reading frame, in bases) and
    /// `embedding` (a list of d f32 values).
    Parquet,
}

impl EmbeddingFormat {
    /// Name of the format on the command line and in the run record.
    pub fn name(self) -> &'static str {
        match self {
            EmbeddingFormat::Npy => "npy",
            EmbeddingFormat::Safetensors => "safetensors",
            EmbeddingFormat::Parquet => "parquet",
        }
    }
}

/// Writer of the embedding files.
pub(crate) enum EmbeddingFiles {
    /// Writers of the matrix and of the names.
    Npy(Box<NpyWriter>, TableWriter),
    /// Writer of matrix and names in one file, and its metadata.
    Safetensors(Box<SafetensorsWriter>, Vec<(&'static str, String)>),
    /// Writer of the Parquet table.
    Parquet(Box<ParquetWriter>),
}

impl EmbeddingFiles {
    /// Creates the files in `folder`, for rows of `width` values. The formats with metadata have `metadata`; for an array
    /// of numpy, run.json has it.
    pub(crate) fn create(
        folder: &Path,
        format: EmbeddingFormat,
        width: usize,
        metadata: &[(&'static str, String)],
    ) -> Result<Self, OutputError> {
        Ok(match format {
            EmbeddingFormat::Npy => {
                let matrix = NpyWriter::create(folder.join(NPY), &[width])?;
                EmbeddingFiles::Npy(Box::new(matrix), TableWriter::bare(folder, NPY_IDS)?)
            }
            EmbeddingFormat::Safetensors => {
                let writer = SafetensorsWriter::matrix(folder.join(SAFETENSORS), &[width])?;
                EmbeddingFiles::Safetensors(Box::new(writer), metadata.to_vec())
            }
            EmbeddingFormat::Parquet => {
                let columns = ["embedding".to_owned()];
                let metadata = texts(metadata);
                let table = ParquetWriter::create(folder.join(PARQUET), &columns, width, &metadata)?;
                EmbeddingFiles::Parquet(Box::new(table))
            }
        })
    }

    /// Appends the embedding of the open reading frame `orf`, which has `bases` bases.
    ///
    /// # Errors
    /// A value that is not finite, a row of a different width, a file that cannot be written.
    pub(crate) fn row(&mut self, orf: &str, bases: u64, values: &[f32]) -> Result<(), OutputError> {
        if !values.iter().all(|x| x.is_finite()) {
            return Err(OutputError::Embedding { orf: orf.to_owned() });
        }
        match self {
            EmbeddingFiles::Npy(matrix, ids) => {
                matrix.row(values).map_err(|e| e.with_id(orf))?;
                ids.row(format_args!("{}", PlainField(orf)))
            }
            EmbeddingFiles::Safetensors(writer, _) => Ok(writer.write(orf, values)?),
            EmbeddingFiles::Parquet(writer) => Ok(writer.write_sequence(orf, bases, values)?),
        }
    }

    /// Completes the files and returns them, ready to be committed.
    pub(crate) fn into_files(self) -> Result<Vec<AtomicFile>, OutputError> {
        Ok(match self {
            EmbeddingFiles::Npy(matrix, ids) => vec![matrix.into_file()?, ids.into_file()],
            EmbeddingFiles::Safetensors(writer, metadata) => vec![writer.into_file(&texts(&metadata))?],
            EmbeddingFiles::Parquet(writer) => vec![writer.into_file()?],
        })
    }
}

fn texts<'a>(metadata: &'a [(&'static str, String)]) -> Vec<(&'a str, &'a str)> {
    metadata.iter().map(|(key, value)| (*key, value.as_str())).collect()
}
