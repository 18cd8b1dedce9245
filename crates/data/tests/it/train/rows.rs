//! Tests of rows of embeddings for training a head: values, splits, and resuming from any position.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plimsoll_data::rows::{NpyWriter, NpzLayout, NpzWriter, SafetensorsWriter, ValueType};
use plimsoll_data::train::rows::{RowGroupPart, RowPack, RowPosition, RowSet, RowSettings};
use plimsoll_data::train::{Classes, Split};

use super::file;
use crate::support::{folder, golden};

fn part(path: &Path) -> RowGroupPart {
    RowGroupPart { files: vec![path.to_owned()], tensors: "*".to_owned() }
}

/// Values of row `i` of a part with rows of `width` values.
fn row(i: usize, width: usize) -> Vec<f32> {
    (0..width).map(|j| (i * 10 + j) as f32 / 4.0).collect()
}

/// Settings for two parts in files of the three formats, and a label table; row `i` has the class `i % 2`.
fn settings(folder: &Path, count: usize) -> RowSettings {
    let names: Vec<String> = (0..count).map(|i| format!("r{i}")).collect();
    let npy = folder.join("dna.npy");
    let mut writer = NpyWriter::create(&npy, &[3]).unwrap();
    names.iter().enumerate().for_each(|(i, _)| writer.row(&row(i, 3)).unwrap());
    writer.finish().unwrap();
    file(folder, "dna.ids.txt", names.join("\n") + "\n");
    // The rows of the second part are in two files, in reverse order.
    let matrix = folder.join("p.safetensors");
    let single = folder.join("q.safetensors");
    let mut first = SafetensorsWriter::matrix(&matrix, &[2]).unwrap();
    let mut second = SafetensorsWriter::tensor_per_id(&single, &[2]).unwrap();
    for (i, name) in names.iter().enumerate().rev() {
        let writer = if i % 3 == 0 { &mut second } else { &mut first };
        writer.write(name, &row(i, 2)).unwrap();
    }
    first.finish(&[]).unwrap();
    second.finish(&[]).unwrap();
    let table: String = names.iter().enumerate().map(|(i, name)| format!("{name}\t{}\n", i % 2)).collect();
    let protein = RowGroupPart { files: vec![matrix, single], tensors: "*".to_owned() };
    RowSettings {
        parts: vec![part(&npy), protein],
        labels: file(folder, "labels.tsv", table),
        classes: Classes::Count(2),
        validation: 0.25,
        validation_seed: 0,
        seed: 3,
        rows: 4,
    }
}

fn packs(set: &RowSet, split: Split, from: &RowPosition, count: usize) -> Vec<(bool, RowPack)> {
    let mut stream = set.stream(split, from).unwrap();
    let next = |_| {
        let mut pack = RowPack::default();
        (stream.fill(&mut pack).unwrap(), pack)
    };
    (0..count).map(next).collect()
}

#[test]
fn every_row_comes_once_with_its_parts_and_class() {
    let folder = folder("train_rows");
    let set = RowSet::open(settings(&folder, 41)).unwrap();
    assert_eq!(set.widths(), [3, 2]);
    let mut seen = BTreeMap::new();
    for split in [Split::Train, Split::Validation] {
        let mut sizes = Vec::new();
        for (_, pack) in packs(&set, split, &set.start(), 40).into_iter().take_while(|(more, _)| *more) {
            sizes.push(pack.targets.len());
            for (s, &class) in pack.targets.iter().enumerate() {
                let i = (pack.parts[0][3 * s] * 4.0) as usize / 10;
                assert_eq!(pack.parts[0][3 * s..][..3], row(i, 3));
                assert_eq!(pack.parts[1][2 * s..][..2], row(i, 2));
                assert_eq!(class as usize, i % 2);
                assert_eq!(seen.insert(i, split), None, "row {i}");
            }
        }
        assert!(sizes.iter().all(|&n| (2..=4).contains(&n)), "no pack of one row: {sizes:?}");
    }
    assert_eq!(seen.len(), 41);
    let census = set.census();
    assert_eq!(census.train.documents + census.validation.documents, 41);
    assert!(census.validation.documents > 2);
}

#[test]
fn rows_continue_anywhere() {
    let folder = folder("train_rows_resume");
    let set = RowSet::open(settings(&folder, 20)).unwrap();
    let whole = packs(&set, Split::Train, &set.start(), 25);
    let ends = whole.iter().filter(|(more, _)| !more).count();
    assert!(ends >= 3, "{ends}");
    for cut in 0..24 {
        let position = whole[cut].1.position_after.clone().unwrap();
        let text = serde_json::to_string(&position).unwrap();
        let position: RowPosition = serde_json::from_str(&text).unwrap();
        assert_eq!(packs(&set, Split::Train, &position, 24 - cut), whole[cut + 1..], "cut at {cut}");
    }
    let numbers: Vec<u64> = whole.iter().filter(|(more, _)| *more).map(|(_, pack)| pack.number).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    assert_eq!(set.packs_of_epoch(), whole.iter().take_while(|(more, _)| *more).count() as u64);
    for other in
        [RowSettings { seed: 4, ..settings(&folder, 20) }, RowSettings { rows: 5, ..settings(&folder, 20) }]
    {
        let other = RowSet::open(other).unwrap();
        assert!(other.stream(Split::Train, &set.start()).err().unwrap().to_string().contains("other data"));
    }
    let last = RowPosition { pack: u64::MAX, ..set.start() };
    assert!(set.stream(Split::Train, &last).err().unwrap().to_string().contains("after the last pack"));
}

#[test]
fn golden_embeddings_are_rows() {
    let folder = folder("train_rows_golden");
    let part =
        |file: &str, tensors: &str| RowGroupPart { files: vec![golden(file)], tensors: tensors.to_owned() };
    let set = RowSet::open(RowSettings {
        parts: vec![
            part("dnabert_s/golden.safetensors", "d*.mean"),
            part("esm2/golden.safetensors", "p*.mean"),
        ],
        labels: file(&folder, "t.tsv", (0..9).map(|i| format!("{i}\t{}\n", i % 2)).collect::<String>()),
        validation: 0.0,
        ..settings(&folder, 2)
    })
    .unwrap();
    assert_eq!((set.widths(), set.census().train.documents), (&[96, 40][..], 7));
    let pack = &packs(&set, Split::Train, &set.start(), 1)[0].1;
    assert_eq!((pack.parts[0].len(), pack.parts[1].len()), (4 * 96, 4 * 40));
}

#[test]
fn rows_that_cannot_be_trained_on() {
    let folder = folder("train_rows_refused");
    let base = || settings(&folder, 8);
    let check = |settings: RowSettings, expected: &str| {
        let error = RowSet::open(settings).err().expect("refused").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(RowSettings { parts: vec![], ..base() }, "no file of rows is named");
    check(RowSettings { rows: 0, ..base() }, "a pack needs a row");
    check(RowSettings { validation: 1e-9, ..base() }, "no row to validate on");
    let mut settings = base();
    file(&folder, "labels.tsv", "r0\t1\n");
    check(settings.clone(), "'r1': it has no class in the table of labels");
    settings = base();
    settings.parts[1].files.pop();
    check(settings.clone(), "p.safetensors, 'r0': no row of this name in these files");
    let again = settings.parts[1].files[0].clone();
    settings.parts[1].files.push(again);
    check(settings, "p.safetensors: a second row 'r7'");
    let settings = base();
    file(&folder, "dna.ids.txt", "r0\n");
    check(settings, "dna.ids.txt: 1 names for 8 rows");
    let settings = base();
    file(&folder, "dna.npy", b"\x93NUMPY\x01\x00\x02\x00{}\n\n");
    check(settings, "not in C order");
    let settings = base();
    let mut writer = NpyWriter::create(folder.join("dna.npy"), &[3]).unwrap();
    (0..8).for_each(|i| writer.row(&[f32::NAN, i as f32, 0.0]).unwrap());
    writer.finish().unwrap();
    check(settings, "'r0': it contains a NaN or infinite value");
    let width = RowGroupPart {
        files: vec![folder.join("p.safetensors"), PathBuf::from(&golden("esm2/golden.safetensors"))],
        tensors: "p*.mean".into(),
    };
    check(RowSettings { parts: vec![width], ..base() }, "a row of 40 values in a file of 2 columns");
}

/// Every file of rows that is written for both types of values is read again, by name.
#[test]
fn what_is_written_is_read() {
    let folder = folder("rows_written");
    let names = ["a", "\u{e9} \u{1f9ec}", "b/../c", "a#1.2"];
    for values in [ValueType::F32, ValueType::F16] {
        let npy = folder.join("w.npy");
        let mut writer = NpyWriter::with_values(&npy, &[3], values).unwrap();
        (0..names.len()).for_each(|i| writer.row(&row(i, 3)).unwrap());
        writer.finish().unwrap();
        file(&folder, "w.ids.txt", names.join("\n") + "\n");
        let npz = folder.join("w.npz");
        let mut writer = NpzWriter::create(&npz, NpzLayout::Matrix, &[3], values).unwrap();
        names.iter().enumerate().for_each(|(i, name)| writer.write(name, 9, &row(i, 3)).unwrap());
        assert_eq!(writer.finish("{}").unwrap(), 4);
        let matrix = folder.join("w.safetensors");
        let mut writer = SafetensorsWriter::matrix(&matrix, &[3]).unwrap().with_values(values);
        names.iter().enumerate().for_each(|(i, name)| writer.write(name, &row(i, 3)).unwrap());
        writer.finish(&[]).unwrap();
        let single = folder.join("s.safetensors");
        let mut writer = SafetensorsWriter::tensor_per_id(&single, &[3]).unwrap().with_values(values);
        names.iter().enumerate().for_each(|(i, name)| writer.write(name, &row(i, 3)).unwrap());
        writer.finish(&[]).unwrap();
        let table: String = names.iter().enumerate().map(|(i, name)| format!("{name}\t{}\n", i % 2)).collect();
        let labels = file(&folder, "written.tsv", table);
        for path in [npy, npz, matrix, single] {
            let set = RowSet::open(RowSettings {
                parts: vec![part(&path)],
                labels: labels.clone(),
                validation: 0.0,
                ..settings(&folder, 2)
            });
            let set = set.unwrap();
            let pack = &packs(&set, Split::Train, &set.start(), 1)[0].1;
            let rows = pack.parts[0].chunks_exact(3).zip(&pack.targets);
            let mut found: Vec<(Vec<f32>, i32)> = rows.map(|(row, &class)| (row.to_vec(), class)).collect();
            found.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap());
            let wanted: Vec<(Vec<f32>, i32)> = (0..4).map(|i| (row(i, 3), (i % 2) as i32)).collect();
            assert_eq!(found, wanted, "{}", path.display());
        }
    }
}
