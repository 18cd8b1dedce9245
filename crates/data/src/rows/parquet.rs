//! Writer of embeddings as a parquet table: a table row for each sequence, or for each token of a sequence, with the columns
//! `id`, `length`, for rows of tokens `token`, and one or more columns of embeddings. Invariant: table rows are written in row
//! groups of about [`GROUP`] bytes, and at most one row group is in memory.
//!
//! Source: the parquet format. The key `ARROW:schema`, which the library adds, declares an embedding as a list of fixed
//! size, for readers that support such lists.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::{ArrowPrimitiveType, Float16Type};
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Float16Array, Float32Array, Int64Array, RecordBatch, StringArray,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use super::{ValueType, at, half};
use crate::atomic::AtomicFile;
use crate::{DataError, DataErrorKind};

/// Size of a row group in bytes, before encoding.
const GROUP: usize = 16 << 20;

/// Columns of a table of embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableLayout {
    /// Names of the columns of embeddings.
    pub columns: Vec<String>,
    /// Number of values of an embedding.
    pub width: usize,
    /// Type of the values.
    pub value_type: ValueType,
    /// Whether a sequence has a table row for each token, with the column `token`, its number from 0.
    pub by_token: bool,
}

/// Writes a parquet table, one sequence at a time.
pub struct ParquetWriter {
    target: PathBuf,
    writer: ArrowWriter<AtomicFile>,
    schema: SchemaRef,
    layout: TableLayout,
    /// Cells of the current row group: ids and lengths of the sequences.
    ids: Vec<String>,
    lengths: Vec<i64>,
    /// Numbers of the tokens; empty unless the table has a row for each token.
    token_numbers: Vec<i64>,
    /// Values of each column of embeddings, one embedding after the other.
    embeddings: Vec<Vec<f32>>,
    /// Bytes of the cells.
    group_bytes: usize,
    /// Sequences written so far.
    sequences: u64,
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
        let columns = columns.to_vec();
        Self::with_layout(
            path,
            TableLayout { columns, width, value_type: ValueType::F32, by_token: false },
            metadata,
        )
    }

    /// Starts writing the file `path` as [`create`](Self::create) does, with the columns of `layout`.
    pub fn with_layout(
        path: impl AsRef<Path>,
        layout: TableLayout,
        metadata: &[(&str, &str)],
    ) -> Result<Self, DataError> {
        let target = path.as_ref().to_owned();
        let file = AtomicFile::create(&target)?;
        let schema = Arc::new(schema(&layout, metadata));
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties(metadata)));
        let writer = writer.map_err(|e| refused(&target, e))?;
        Ok(ParquetWriter {
            target,
            writer,
            schema,
            embeddings: vec![Vec::new(); layout.columns.len()],
            layout,
            ids: vec![],
            lengths: vec![],
            token_numbers: vec![],
            group_bytes: 0,
            sequences: 0,
        })
    }

    /// Appends a sequence. `values` holds the embeddings of all columns, one column after the other: one embedding for each
    /// column, or in a table by token an embedding for each token.
    pub fn write_sequence(&mut self, id: &str, length: u64, values: &[f32]) -> Result<(), DataError> {
        let width = self.layout.width;
        let values_per_row = self.embeddings.len() * width;
        let rows = if self.layout.by_token { values.len() / values_per_row.max(1) } else { 1 };
        super::width(values.len(), rows * values_per_row).map_err(|kind| at(&self.target, id, kind))?;
        if self.layout.value_type == ValueType::F16 {
            // Checked here, where the sequence is known; converted when the group is written.
            values.iter().try_for_each(|&x| half(x).map(drop)).map_err(|kind| at(&self.target, id, kind))?;
        }
        self.sequences += 1;
        for row in 0..rows {
            // `values` has the embeddings of a column together, a table row has one embedding of each column. `max(1)`:
            // without values, `chunks_exact` would panic at a size of 0.
            let columns = values.chunks_exact((rows * width).max(1));
            for (cells, column) in self.embeddings.iter_mut().zip(columns) {
                cells.extend_from_slice(&column[row * width..][..width]);
            }
            self.ids.push(id.to_owned());
            self.lengths.push(length as i64);
            if self.layout.by_token {
                self.token_numbers.push(row as i64);
            }
            self.group_bytes += id.len() + 2 * size_of::<i64>() + values_per_row * size_of::<f32>();
            // A long sequence fills several groups.
            if self.group_bytes >= GROUP {
                self.write_group()?;
            }
        }
        Ok(())
    }

    /// Completes the file and returns it, ready to be committed.
    pub fn into_file(mut self) -> Result<AtomicFile, DataError> {
        self.write_group()?;
        self.writer.into_inner().map_err(|e| refused(&self.target, e))
    }

    /// Completes the file, gives it its final path, and returns the number of sequences.
    pub fn finish(self) -> Result<u64, DataError> {
        let sequences = self.sequences;
        self.into_file()?.commit()?;
        Ok(sequences)
    }

    /// Writes the current row group, unless it is empty, and starts the next one.
    fn write_group(&mut self) -> Result<(), DataError> {
        if self.ids.is_empty() {
            return Ok(());
        }
        self.group_bytes = 0;
        self.append_group().map_err(|e| refused(&self.target, e))
    }

    /// Moves the cells of the current row group to the file.
    fn append_group(&mut self) -> Result<(), ParquetError> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(self.ids.drain(..))),
            Arc::new(Int64Array::from(std::mem::take(&mut self.lengths))),
        ];
        if self.layout.by_token {
            columns.push(Arc::new(Int64Array::from(std::mem::take(&mut self.token_numbers))));
        }
        let TableLayout { width, value_type, .. } = self.layout;
        for embeddings in &mut self.embeddings {
            let values = array(value_type, std::mem::take(embeddings));
            let list = FixedSizeListArray::try_new(element(value_type), width as i32, values, None)?;
            columns.push(Arc::new(list) as Arc<dyn Array>);
        }
        self.writer.write(&RecordBatch::try_new(self.schema.clone(), columns)?)?;
        // Ends the row group here, and not where the library would.
        self.writer.flush()
    }
}

/// Returns values as an Arrow array of `value_type`.
fn array(value_type: ValueType, values: Vec<f32>) -> ArrayRef {
    type Half = <Float16Type as ArrowPrimitiveType>::Native;
    match value_type {
        ValueType::F32 => Arc::new(Float32Array::from(values)),
        ValueType::F16 => Arc::new(Float16Array::from_iter_values(
            values.into_iter().map(|x| Half::from_bits(crate::weights::f32_to_f16(x))),
        )),
    }
}

/// Returns the field of a list element: a value that is never null.
fn element(value_type: ValueType) -> Arc<Field> {
    let data_type = match value_type {
        ValueType::F32 => DataType::Float32,
        ValueType::F16 => DataType::Float16,
    };
    Arc::new(Field::new("element", data_type, false))
}

/// Returns the Arrow schema. `metadata` is stored in it and in the file's key-value metadata, because readers differ in
/// which of the two they use.
fn schema(layout: &TableLayout, metadata: &[(&str, &str)]) -> Schema {
    let list = DataType::FixedSizeList(element(layout.value_type), layout.width as i32);
    let mut fields =
        vec![Field::new("id", DataType::Utf8, false), Field::new("length", DataType::Int64, false)];
    if layout.by_token {
        fields.push(Field::new("token", DataType::Int64, false));
    }
    fields.extend(layout.columns.iter().map(|name| Field::new(name, list.clone(), false)));
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
