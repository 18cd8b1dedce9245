//! Tests of result files: a file is complete or absent, and its format is what other programs expect. `tables.rs`
//! has Parquet tables.

use std::fs;
use std::io::Write;
use std::path::Path;

use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::rows::{NpyWriter, NpzLayout, NpzWriter, SafetensorsLayout, SafetensorsWriter, ValueType};
use serde_json::{Value, json};

use crate::support::folder;

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let folder = folder("atomic");
    let target = folder.join("out.tsv");
    fs::write(&target, "old").unwrap();
    let mut file = AtomicFile::create(&target).unwrap();
    file.write_all(b"new and ").unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"old");
    assert_eq!(names(&folder).len(), 2);
    drop(file);
    assert_eq!(names(&folder), ["out.tsv"]);
    assert_eq!(fs::read(&target).unwrap(), b"old");

    let mut file = AtomicFile::create(&target).unwrap();
    file.write_all(b"new and whole").unwrap();
    file.patch(0, b"NEW").unwrap();
    file.write_all(b"!").unwrap();
    let mut spool = AtomicFile::create(&target).unwrap();
    spool.write_all(b" spooled").unwrap();
    file.append(spool).unwrap();
    file.write_all(b".").unwrap();
    file.commit().unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"NEW and whole! spooled.");
    assert_eq!(names(&folder), ["out.tsv"]);
}

#[test]
fn what_cannot_be_written_is_refused() {
    let folder = folder("atomic_refused");
    let error = AtomicFile::create(folder.join("absent/out")).unwrap_err();
    assert!(error.to_string().contains("absent/out: cannot be written, because its folder does not exist"));
    let error = AtomicFile::create(&folder).unwrap_err();
    assert!(error.to_string().contains("not a regular file"));
    assert!(AtomicFile::create("..").is_err());
}

/// A file that appears after the temporary file was created is not replaced, and one that was there before is.
#[test]
fn a_file_that_appears_during_the_run_stays() {
    let folder = folder("atomic_new");
    for (before, during, wanted) in [
        (None, None, "ours"),
        (Some("old"), None, "ours"),
        (None, Some("theirs"), "theirs"),
        (Some("old"), Some("theirs"), "ours"),
    ] {
        let target = folder.join("out");
        before.iter().for_each(|text| fs::write(&target, text).unwrap());
        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"ours").unwrap();
        during.iter().for_each(|text| fs::write(&target, text).unwrap());
        let done = file.commit().map_err(|e| e.to_string());
        let found = fs::read_to_string(&target).unwrap();
        assert_eq!(found, wanted, "{before:?} {during:?}");
        assert_eq!(done.is_ok(), wanted == "ours");
        assert!(done.err().is_none_or(|text| text.contains("out: the file already exists")));
        assert_eq!(names(&folder), ["out"]);
        fs::remove_file(target).unwrap();
    }
}

/// Temporary files of killed processes are removed by the next process that writes the same file, and those of running
/// processes and of other files are not.
#[test]
fn what_killed_processes_left_is_removed() {
    let folder = folder("atomic_leftovers");
    let left = [".out.npy.4194305-0.part", ".out.npy.4194305.part"];
    let others = [".out.npy.part", ".out.npy.x-0.part", ".other.npy.4194305-0.part", ".thesis.4194305-0.part"];
    left.iter().chain(&others).for_each(|name| fs::write(folder.join(name), "half").unwrap());
    let running = AtomicFile::create(folder.join("other.npy")).unwrap();
    drop(AtomicFile::create(folder.join("out.npy")).unwrap());
    let found = names(&folder);
    assert!(left.iter().all(|name| !found.contains(&(*name).to_owned())), "{found:?}");
    // The first leftover of `other.npy` went when that file was created; the file itself is locked.
    assert_eq!(found.len(), others.len() - 1 + 1, "{found:?}");
    plimsoll_data::atomic::remove_leftover(
        &folder.join(found.iter().find(|name| name.starts_with(".other")).unwrap()),
    );
    assert_eq!(names(&folder), found);
    drop(running);
}

#[cfg(unix)]
#[test]
fn links_stay_and_streams_are_written_to() {
    use std::os::unix::fs::symlink;
    let folder = folder("atomic_links");
    let write = |name: &str, text: &str| {
        let mut file = AtomicFile::create(folder.join(name))?;
        file.write_all(text.as_bytes()).unwrap();
        file.patch(0, b"W").unwrap();
        file.commit()
    };
    fs::create_dir(folder.join("inner")).unwrap();
    fs::write(folder.join("inner/file"), "old").unwrap();
    for (target, name) in [("inner/file", "link"), ("inner/new", "dangling"), ("/dev/null", "null")] {
        symlink(target, folder.join(name)).unwrap();
    }
    for (name, place, wanted) in [
        ("link", "inner/file", "Written"),
        ("dangling", "inner/new", "Written"),
        ("null", "inner/file", "Written"),
    ] {
        write(name, "written").unwrap();
        assert!(fs::symlink_metadata(folder.join(name)).unwrap().is_symlink(), "{name}");
        assert_eq!(fs::read_to_string(folder.join(place)).unwrap(), wanted);
    }
    let pipe = folder.join("pipe");
    if std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
        let reader = std::thread::spawn(move || fs::read_to_string(pipe).unwrap());
        write("pipe", "written").unwrap();
        assert_eq!(reader.join().unwrap(), "Written");
    }
    assert_eq!(names(&folder.join("inner")), ["file", "new"]);
}

#[test]
fn a_name_without_a_folder_is_in_the_current_one() {
    // The parent of this path is the empty path, which cannot be opened as a folder.
    let name = format!("plimsoll-data-test-{}", std::process::id());
    AtomicFile::create(&name).unwrap().commit().unwrap();
    fs::remove_file(name).unwrap();
}

#[test]
fn npy() {
    let path = folder("npy").join("e.npy");
    let mut out = NpyWriter::create(&path, &[2]).unwrap();
    for row in [[1.0, -2.5], [f32::MAX, 0.1], [0.0, 1e-45]] {
        out.row(&row).unwrap();
    }
    assert!(out.row(&[1.0]).unwrap_err().to_string().contains("a row of 1 values in a file of 2"));
    assert_eq!(out.finish().unwrap(), 3);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 128 + 24);
    let header = String::from_utf8_lossy(&bytes[10..128]);
    assert!(header.contains("'shape': (3, 2), }"), "{header}");
    assert_eq!(floats(&bytes[128..]), [1.0, -2.5, f32::MAX, 0.1, 0.0, 1e-45]);
    drop(NpyWriter::create(&path, &[3]).unwrap());
    assert_eq!(names(path.parent().unwrap()), ["e.npy"]);
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Reads a safetensors file: its header, and its data as f32.
fn read(path: &Path) -> (Value, Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!(size % 8, 0);
    let header = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    (header, floats(&bytes[8 + size..]))
}

#[test]
fn safetensors_of_one_matrix() {
    let folder = folder("safetensors_matrix");
    let path = folder.join("e.safetensors");
    let ids = ["a", "q\"uo\\te", "\u{e9}\u{1}", "", "b,c"];
    let mut out = SafetensorsWriter::matrix(&path, &[3]).unwrap();
    for (i, id) in ids.iter().enumerate() {
        out.write(id, &[i as f32, 0.5, -1.0]).unwrap();
    }
    let error = out.write("a", &[0.0; 3]).unwrap_err();
    assert!(error.to_string().ends_with("'a': two results for this name; each is written once"));
    assert!(out.write("z", &[0.0; 2]).is_err());
    assert_eq!(out.finish(&[("model", "m\"1")]).unwrap(), 5);
    let (header, data) = read(&path);
    let kept = header["__metadata__"]["ids"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Vec<String>>(kept).unwrap(), ids);
    assert_eq!(header["__metadata__"]["model"], "m\"1");
    let entry = json!({"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60]});
    assert_eq!(header["embeddings"], entry);
    let expected: Vec<f32> = (0..5).flat_map(|i| [i as f32, 0.5, -1.0]).collect();
    assert_eq!(data, expected);
    assert_eq!(names(&folder), ["e.safetensors"]);
}

#[test]
fn safetensors_of_a_tensor_for_each_id() {
    let folder = folder("safetensors_tokens");
    let path = folder.join("t.safetensors");
    let mut out = SafetensorsWriter::tensor_per_id(&path, &[2]).unwrap();
    out.write("p \"1\"", &[1.0, 2.0, 3.0, 4.0]).unwrap();
    out.write("p2", &[5.0, 6.0]).unwrap();
    assert!(out.write("p3", &[5.0]).is_err());
    assert!(out.write("__metadata__", &[5.0, 6.0]).is_err());
    assert_eq!(out.finish(&[]).unwrap(), 2);
    let (header, data) = read(&path);
    let first = json!({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]});
    let second = json!({"dtype": "F32", "shape": [1, 2], "data_offsets": [16, 24]});
    assert_eq!(header, json!({"__metadata__": {}, "p \"1\"": first, "p2": second}));
    assert_eq!(data, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn rows_with_layers() {
    let folder = folder("layers");
    let mut out = NpyWriter::create(folder.join("e.npy"), &[2, 3]).unwrap();
    out.row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    assert!(out.row(&[1.0, 2.0, 3.0]).is_err());
    out.finish().unwrap();
    let bytes = fs::read(folder.join("e.npy")).unwrap();
    assert!(String::from_utf8_lossy(&bytes[10..128]).contains("'shape': (1, 2, 3), }"));

    let mut out = SafetensorsWriter::matrix(folder.join("m"), &[2, 1]).unwrap();
    out.write("a", &[1.0, 2.0]).unwrap();
    out.write("b", &[3.0, 4.0]).unwrap();
    out.finish(&[]).unwrap();
    let (header, data) = read(&folder.join("m"));
    assert_eq!(header["embeddings"], json!({"dtype": "F32", "shape": [2, 2, 1], "data_offsets": [0, 16]}));
    assert_eq!(data, [1.0, 2.0, 3.0, 4.0]);

    let mut out = SafetensorsWriter::tensor_per_id(folder.join("t"), &[2, 1]).unwrap();
    out.write("a", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    assert!(out.write("b", &[1.0, 2.0, 3.0]).is_err());
    out.finish(&[]).unwrap();
    let (header, _) = read(&folder.join("t"));
    assert_eq!(header["a"], json!({"dtype": "F32", "shape": [2, 3, 1], "data_offsets": [0, 24]}));
}

#[test]
fn files_without_rows_are_valid() {
    let folder = folder("no_rows");
    for name in ["m", "t"] {
        let path = folder.join(name);
        let out = match name {
            "m" => SafetensorsWriter::matrix(&path, &[4]),
            _ => SafetensorsWriter::tensor_per_id(&path, &[4]),
        };
        assert_eq!(out.unwrap().finish(&[("k", "v")]).unwrap(), 0);
        let (header, data) = read(&path);
        assert_eq!(header["__metadata__"]["k"], "v");
        assert!(data.is_empty());
    }
    let (header, _) = read(&folder.join("m"));
    assert_eq!(header["__metadata__"]["ids"], "[]");
    assert_eq!(header["embeddings"]["shape"], json!([0, 4]));
}

/// Limits of a format for names are known from their sizes, before the first row is computed.
#[test]
fn names_beyond_the_limits_of_a_format_are_refused() {
    for layout in [SafetensorsLayout::Matrix, SafetensorsLayout::TensorPerId] {
        let each = layout.name_bytes("protein_1");
        layout.check_names(each * 100_000).unwrap();
        let error = layout.check_names(each * 20_000_000).unwrap_err().to_string();
        assert!(error.contains("100000000") && error.contains("write .parquet"), "{error}");
    }
    NpzWriter::check_names(1_000_000, 20).unwrap();
    let error = NpzWriter::check_names(1_000_000, 4096).unwrap_err().to_string();
    assert!(error.contains("write .npy or .parquet"), "{error}");
    assert!(NpzWriter::check_names(u64::MAX, u64::MAX).is_err());
}

#[test]
fn npz_of_tokens() {
    let folder = folder("npz_tokens");
    let path = folder.join("t.npz");
    let mut out = NpzWriter::create(&path, NpzLayout::Tokens, &[2, 1], ValueType::F32).unwrap();
    // Two layers of three tokens, then of one.
    out.write("a", 5, &[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]).unwrap();
    out.write("\u{e9}", 1, &[3.0, 13.0]).unwrap();
    assert!(out.write("c", 1, &[3.0]).is_err());
    assert_eq!(out.finish("{\"pool\":\"tokens\"}").unwrap(), 2);
    assert_eq!(names(&folder), ["t.npz"]);
    let bytes = fs::read(&path).unwrap();
    // The values follow the headers of the first entry and of its array, a token after the other.
    let start = 30 + "embeddings.npy".len() + 20;
    assert!(String::from_utf8_lossy(&bytes[start..start + 128]).contains("'shape': (4, 2, 1)"));
    let values = floats(&bytes[start + 128..start + 128 + 32]);
    assert_eq!(values, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0]);
    let text = String::from_utf8_lossy(&bytes);
    for part in ["ids.npy", "<U1", "lengths.npy", "offsets.npy", "'shape': (3,)", "metadata.npy", "'shape': ()"]
    {
        assert!(text.contains(part), "{part}");
    }
}
