//! Writer of rows as a parquet table with the columns `id`, `length`, and one or more columns of embeddings. Invariant:
//! rows are written in row groups of about [`GROUP`] bytes, and at most one row group is in memory.
//!
//! Source: the parquet format. The key `ARROW:schema`, which the library adds, declares an embedding as a list of fixed
//! size, for readers that support such lists.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use super::at;
use crate::atomic::AtomicFile;
use crate::{DataError, DataErrorKind};

/// Size of a row group in bytes, before encoding.
const GROUP: usize = 16 << 20;

/// Writes a parquet table, one row at a time.
pub struct ParquetWriter {
    target: PathBuf,
    writer: ArrowWriter<AtomicFile>,
    schema: SchemaRef,
    /// Number of values of a row in each column of embeddings.
    width: usize,
    ids: Vec<String>,
    lengths: Vec<i64>,
    /// Values of the current row group, by column of embeddings.
    values: Vec<Vec<f32>>,
    bytes: usize,
    rows: u64,
}

impl ParquetWriter {
    /// Starts writing the file `path`, which appears at [`finish`](Self::finish), with the columns `id` (text),
    /// `length` (64-bit integer) and a list of `width` f32 for each name in `columns`; `metadata` becomes key-value
    /// metadata.
    pub fn create(
        path: impl AsRef<Path>,
        columns: &[String],
        width: usize,
        metadata: &[(&str, &str)],
    ) -> Result<Self, DataError> {
        let target = path.as_ref().to_owned();
        let file = AtomicFile::create(&target)?;
        let schema = Arc::new(schema(columns, width, metadata));
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties(metadata)));
        let writer = writer.map_err(|e| refused(&target, e))?;
        let values = vec![Vec::new(); columns.len()];
        let (ids, lengths) = (Vec::new(), Vec::new());
        Ok(ParquetWriter { target, writer, schema, width, ids, lengths, values, bytes: 0, rows: 0 })
    }

    /// Appends a row. `values` holds the values of all columns of embeddings, one column after the other.
    pub fn row(&mut self, id: &str, length: u64, values: &[f32]) -> Result<(), DataError> {
        super::width(values.len(), self.values.len() * self.width)
            .map_err(|kind| at(&self.target, id, kind))?;
        for (column, values) in self.values.iter_mut().zip(values.chunks_exact(self.width.max(1))) {
            column.extend_from_slice(values);
        }
        self.ids.push(id.to_owned());
        self.lengths.push(length as i64);
        self.rows += 1;
        self.bytes += id.len() + size_of::<i64>() + size_of_val(values);
        if self.bytes >= GROUP { self.write_group() } else { Ok(()) }
    }

    /// Completes the file and returns it, ready to be committed.
    pub fn into_file(mut self) -> Result<AtomicFile, DataError> {
        self.write_group()?;
        self.writer.into_inner().map_err(|e| refused(&self.target, e))
    }

    /// Completes the file, gives it its final path, and returns the number of rows.
    pub fn finish(self) -> Result<u64, DataError> {
        let rows = self.rows;
        self.into_file()?.commit()?;
        Ok(rows)
    }

    fn write_group(&mut self) -> Result<(), DataError> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(self.ids.drain(..))),
            Arc::new(Int64Array::from(std::mem::take(&mut self.lengths))),
        ];
        let write = || {
            for values in &mut self.values {
                let values = Arc::new(Float32Array::from(std::mem::take(values)));
                let list = FixedSizeListArray::try_new(element(), self.width as i32, values, None)?;
                columns.push(Arc::new(list) as Arc<dyn Array>);
            }
            self.writer.write(&RecordBatch::try_new(self.schema.clone(), columns)?)?;
            self.writer.flush()
        };
        self.bytes = 0;
        write().map_err(|e| refused(&self.target, e))
    }
}

/// Returns the field of a list element: an f32 that is never null.
fn element() -> Arc<Field> {
    Arc::new(Field::new("element", DataType::Float32, false))
}

/// Returns the Arrow schema. `metadata` is stored in it and in the file's key-value metadata, because readers differ in
/// which of the two they use.
fn schema(columns: &[String], width: usize, metadata: &[(&str, &str)]) -> Schema {
    let list = DataType::FixedSizeList(element(), width as i32);
    let mut fields =
        vec![Field::new("id", DataType::Utf8, false), Field::new("length", DataType::Int64, false)];
    fields.extend(columns.iter().map(|name| Field::new(name, list.clone(), false)));
    let pairs = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Schema::new(fields).with_metadata(pairs.collect::<HashMap<_, _>>())
}

/// Returns the settings of the file. Dictionaries are disabled, because values rarely repeat. Minimum and maximum are
/// stored for `id` and `length`, where they help readers to skip row groups, and not for embeddings.
fn properties(metadata: &[(&str, &str)]) -> WriterProperties {
    let pairs = metadata.iter().map(|(key, value)| KeyValue::new((*key).to_owned(), (*value).to_owned()));
    WriterProperties::builder()
        .set_key_value_metadata(Some(pairs.collect()))
        .set_compression(Compression::SNAPPY)
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_column_statistics_enabled("id".into(), EnabledStatistics::Chunk)
        .set_column_statistics_enabled("length".into(), EnabledStatistics::Chunk)
        .set_max_row_group_row_count(None)
        .build()
}

fn refused(target: &Path, e: ParquetError) -> DataError {
    DataError::at(target, DataErrorKind::Write(io::Error::other(e)))
}
