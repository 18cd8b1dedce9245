//! Tests of Parquet results, read with the parquet crate: schema, values, metadata, row groups.

use std::fs::{self, File};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float32Type, Int64Type};
use arrow_schema::{DataType, SchemaRef};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use plimsoll_data::rows::{ParquetWriter, TableLayout, ValueType};

use crate::support::folder;

struct Table {
    batches: Vec<RecordBatch>,
    /// Number of rows of each row group.
    groups: Vec<i64>,
    metadata: Vec<(String, String)>,
    schema: SchemaRef,
}

fn read(path: &Path) -> Table {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let schema = builder.schema().clone();
    let facts = builder.metadata();
    let groups = facts.row_groups().iter().map(|g| g.num_rows()).collect();
    let pairs = facts.file_metadata().key_value_metadata().unwrap();
    let pairs = pairs.iter().filter(|p| p.key != "ARROW:schema");
    let metadata = pairs.map(|p| (p.key.clone(), p.value.clone().unwrap_or_default())).collect();
    let batches = builder.with_batch_size(1000).build().unwrap().map(Result::unwrap).collect();
    Table { batches, groups, metadata, schema }
}

impl Table {
    /// Id, length and concatenated list values of each row.
    fn rows(&self) -> Vec<(String, i64, Vec<f32>)> {
        let mut rows = vec![];
        for batch in &self.batches {
            let ids = batch.column(0).as_string::<i32>();
            let lengths = batch.column(1).as_primitive::<Int64Type>();
            for i in 0..batch.num_rows() {
                let lists = batch.columns()[2..].iter().map(|c| c.as_fixed_size_list().value(i));
                let values = lists.flat_map(|l| l.as_primitive::<Float32Type>().values().to_vec()).collect();
                rows.push((ids.value(i).to_owned(), lengths.value(i), values));
            }
        }
        rows
    }
}

#[test]
fn a_table_is_read_as_it_was_written() {
    let folder = folder("parquet");
    let path = folder.join("e.parquet");
    let columns = ["layer_0", "layer_33"].map(str::to_owned);
    let wanted = [
        ("a", 3, vec![1.0, -2.5, f32::MAX, 0.1]),
        ("\u{e9} \"x\"", i64::MAX, vec![0.0, -0.0, 1e-45, 7.0]),
        ("", 0, vec![f32::MIN_POSITIVE; 4]),
    ];
    let mut out = ParquetWriter::create(&path, &columns, 2, &[("model", "m"), ("pool", "mean")]).unwrap();
    for (id, length, values) in &wanted {
        out.write_sequence(id, *length as u64, values).unwrap();
    }
    let error = out.write_sequence("short", 1, &[1.0; 3]).unwrap_err().to_string();
    assert!(error.ends_with("'short': a row of 3 values in a file of 4 columns"), "{error}");
    assert!(!path.exists());
    assert_eq!(out.finish().unwrap(), 3);

    let table = read(&path);
    let found = table.rows();
    assert_eq!(found, wanted.map(|(id, length, values)| (id.to_owned(), length, values)));
    assert!(found[1].2[1].is_sign_negative());
    assert_eq!(table.metadata, [("model", "m"), ("pool", "mean")].map(|(k, v)| (k.to_owned(), v.to_owned())));
    let schema = table.schema;
    assert_eq!(schema.metadata().get("pool").map(String::as_str), Some("mean"));
    let types: Vec<String> = schema.fields().iter().map(|f| f.name().clone()).collect();
    assert_eq!(types, ["id", "length", "layer_0", "layer_33"]);
    assert_eq!(schema.field(0).data_type(), &DataType::Utf8);
    assert_eq!(schema.field(1).data_type(), &DataType::Int64);
    let DataType::FixedSizeList(element, 2) = schema.field(3).data_type() else { panic!("{schema}") };
    assert_eq!((element.data_type(), element.is_nullable()), (&DataType::Float32, false));
}

#[test]
fn large_tables_are_written_in_groups() {
    let path = folder("parquet_groups").join("e.parquet");
    let mut out = ParquetWriter::create(&path, &["embedding".to_owned()], 1024, &[]).unwrap();
    let row = |i: usize| -> Vec<f32> { (0..1024).map(|j| (i * 1024 + j) as f32).collect() };
    for i in 0..9000 {
        out.write_sequence(&format!("s{i}"), i as u64, &row(i)).unwrap();
    }
    out.finish().unwrap();
    let table = read(&path);
    assert_eq!(table.groups.iter().sum::<i64>(), 9000);
    assert!(table.groups.len() == 3 && table.groups.iter().all(|&rows| rows < 4200), "{:?}", table.groups);
    for (i, (id, length, values)) in table.rows().into_iter().enumerate() {
        assert!(id == format!("s{i}") && length == i as i64 && values == row(i), "{i}");
    }
}

#[test]
fn a_table_appears_whole_or_not_at_all() {
    let folder = folder("parquet_dropped");
    let path = folder.join("e.parquet");
    let columns = ["embedding".to_owned()];
    let mut out = ParquetWriter::create(&path, &columns, 2, &[]).unwrap();
    out.write_sequence("a", 1, &[1.0, 2.0]).unwrap();
    drop(out);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    assert_eq!(ParquetWriter::create(&path, &columns, 2, &[("k", "v")]).unwrap().finish().unwrap(), 0);
    let table = read(&path);
    assert!(table.rows().is_empty() && table.metadata[0].0 == "k");
    let absent = folder.join("absent/e.parquet");
    assert!(ParquetWriter::create(absent, &columns, 2, &[]).is_err());
}

/// A table of tokens has a row for each token, with its number and the values of its layers, and an f16 table has the
/// nearest values.
#[test]
fn tokens_have_a_row_each() {
    let path = folder("parquet_tokens").join("t.parquet");
    let layout = TableLayout {
        columns: ["layer_0", "layer_1"].map(str::to_owned).to_vec(),
        width: 2,
        value_type: ValueType::F16,
        by_token: true,
    };
    let mut out = ParquetWriter::with_layout(&path, layout, &[("pool", "tokens")]).unwrap();
    // Three tokens, then two; each layer has the rows of all tokens.
    let first: Vec<f32> = (0..12).map(|i| i as f32 / 8.0).collect();
    out.write_sequence("a", 9, &first).unwrap();
    out.write_sequence("b", 4, &first[..8]).unwrap();
    let error = out.write_sequence("c", 1, &[1e9, 0.0, 0.0, 0.0]).unwrap_err().to_string();
    assert!(error.contains("'c': the value 1000000000 is beyond the range of float16"), "{error}");
    assert_eq!(out.finish().unwrap(), 2);
    let table = read(&path);
    let names: Vec<String> = table.schema.fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!(names, ["id", "length", "token", "layer_0", "layer_1"]);
    let batch = &table.batches[0];
    let ids = batch.column(0).as_string::<i32>();
    let numbers = batch.column(2).as_primitive::<Int64Type>();
    let values = |column: usize, row: usize| -> Vec<f32> {
        let list = batch.column(column).as_fixed_size_list().value(row);
        list.as_primitive::<Float16Type>().values().iter().map(|half| half.to_f32()).collect()
    };
    let found: Vec<(&str, i64, Vec<f32>, Vec<f32>)> = (0..batch.num_rows())
        .map(|row| (ids.value(row), numbers.value(row), values(3, row), values(4, row)))
        .collect();
    let pair = |i: usize| first[i..i + 2].to_vec();
    let wanted = vec![
        ("a", 0, pair(0), pair(6)),
        ("a", 1, pair(2), pair(8)),
        ("a", 2, pair(4), pair(10)),
        ("b", 0, pair(0), pair(4)),
        ("b", 1, pair(2), pair(6)),
    ];
    assert_eq!(found, wanted);
}
