//! Tests of the files of `plimsoll embed`: names of rows, metadata, element types, one writer at a time, and runs that
//! are killed and resumed.

use crate::embeddings::{PROTEINS, embed, many, npy, tensor};
use crate::harness::{Folder, golden};
use plimsoll_data::weights::Weights;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

fn description(folder: &Folder, name: &str) -> Value {
    serde_json::from_slice(&folder.read(name)).expect("JSON")
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|name| name.as_str().expect("a text")).collect()
}

#[test]
fn rows_have_unique_printable_names_in_every_format() {
    let folder = Folder::new("row_names");
    let table = [
        ("a", "a"),
        ("a", "a#1.2#"),
        ("a#1.2", "a#1.2"),
        ("", "unnamed#1.4"),
        ("\"q", "\\\"q"),
        ("NA", "NA#1.6"),
        ("__metadata__", "__metadata__#1.7"),
        ("x\u{1b}y", "x\\u{1b}y"),
        ("z\u{202e}", "z\\u{202e}"),
        ("a", "a#1.10"),
    ];
    let text: String = table.iter().map(|(id, _)| format!(">{id}\nMKVLATGS\n")).collect();
    folder.write("p.faa", text);
    let wanted: Vec<&str> = table.iter().map(|(_, name)| *name).collect();
    let esm = golden("esm2");
    let ran = folder.run(&["embed", "--model", &esm, "p.faa", "-o", "e.npy", "--no-progress"]);
    ran.assert_code(0).assert_printable("\u{1b}");
    assert!(ran.stderr().contains("'NA' is a word that readers"), "{}", ran.stderr());
    embed(&folder, "esm2", &["p.faa", "-o", "t.safetensors", "--pool", "tokens"]);
    embed(&folder, "esm2", &["p.faa", "-o", "m.safetensors"]);
    assert_eq!(String::from_utf8(folder.read("e.ids.txt")).expect("text"), wanted.join("\n") + "\n");
    assert_eq!(strings(&description(&folder, "e.json")["ids"]), wanted);
    let matrix = Weights::open(&folder.path("m.safetensors")).expect("opened");
    assert_eq!(serde_json::from_str::<Vec<String>>(&matrix.metadata()["ids"]).expect("a list"), wanted);
    let tokens = Weights::open(&folder.path("t.safetensors")).expect("opened");
    for name in wanted {
        assert_eq!(tokens.tensor(name).expect("there").shape(), [8, 40]);
    }
}

#[test]
fn every_format_has_the_values_and_says_how_they_were_computed() {
    let folder = Folder::new("embedding_metadata");
    let proteins = golden(PROTEINS);
    embed(&folder, "esm2", &[&proteins, "-o", "e.npy"]);
    let facts = description(&folder, "e.json");
    for (key, wanted) in [
        ("files", r#"["e.npy","e.ids.txt","e.json"]"#),
        ("shape", "[9,40]"),
        ("dtype", "\"float32\""),
        ("pool", "\"mean\""),
        ("precision", "\"f32\""),
        ("device", "\"cpu\""),
    ] {
        assert_eq!(facts[key].to_string(), wanted, "{key}");
    }
    assert_eq!(facts["plimsoll"], env!("CARGO_PKG_VERSION"));
    assert_eq!(facts["model_sha256"]["model.safetensors"].as_str().map(str::len), Some(64), "{facts}");
    assert!(facts["kernels"].as_object().is_some_and(|kernels| kernels.contains_key("linear")), "{facts}");
    let rows = npy(&folder, "e");

    // The same values in half the bytes, in every format.
    for name in ["h.npy", "h.npz", "h.safetensors", "h.parquet"] {
        embed(&folder, "esm2", &[&proteins, "-o", name, "--dtype", "float16"]);
    }
    let whole = folder.read("h.npy");
    assert!(String::from_utf8_lossy(&whole[..128]).contains("'<f2'"));
    assert_eq!(whole.len(), 128 + rows.len() * 40 * 2);
    let halves = Weights::open(&folder.path("h.safetensors")).expect("opened");
    assert_eq!(halves.metadata()["dtype"], "float16");
    assert_eq!(halves.metadata()["model_sha256"], facts["model_sha256"].to_string());
    let found = tensor(&halves, "embeddings");
    for (found, wanted) in found.iter().zip(rows.iter().flat_map(|(_, row)| row)) {
        assert!((found - wanted).abs() <= wanted.abs() / 2048.0 + 6e-8, "{found} {wanted}");
    }
    let bytes = |name: &str, start: usize| folder.read(name)[start..][..whole.len() - 128].to_vec();
    // The values of a .npz follow the header of the archive's first entry, which has 30 + 14 + 20 bytes.
    assert!(bytes("h.npz", 64 + 128) == whole[128..]);

    // A value beyond the range of float16 names its record.
    let mut file = fs::read(golden("esm2/model.safetensors")).expect("golden");
    let weights = Weights::open(golden("esm2/model.safetensors").as_ref()).expect("opened");
    let norm = weights.tensor("esm.encoder.emb_layer_norm_after.bias").expect("there");
    file[norm.offset() as usize..][..4].copy_from_slice(&1e5_f32.to_le_bytes());
    folder.write("m/model.safetensors", file);
    folder.write("m/config.json", fs::read(golden("esm2/config.json")).expect("golden"));
    for name in ["w.npy", "w.npz", "w.safetensors", "w.parquet"] {
        let words = ["embed", "--model", "m", &proteins, "-o", name, "--dtype", "float16", "-q"];
        let ran = folder.run(&words);
        assert!(ran.assert_code(1).stderr().contains("'p0': the value 100000"), "{}", ran.stderr());
        assert!(ran.stderr().contains("beyond the range of float16"), "{}", ran.stderr());
        assert!(!folder.path(name).exists());
    }
    let left: Vec<String> = fs::read_dir(folder.path(""))
        .expect("listed")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('.') || name.ends_with(".journal"))
        .filter(|name| name.contains("w."))
        .collect();
    assert_eq!(left, [""; 0]);
}

#[test]
fn one_run_at_a_time_writes_a_result() {
    let folder = Folder::new("embedding_lock");
    folder.write("p.faa", ">a\nMKV\n");
    let esm = golden("esm2");
    for (output, more) in [("e.npy", &[][..]), ("out", &["--per-input"])] {
        let words = [&["embed", "--model", &esm, "-o", output, "-q", "--max-length", "9"], more].concat();
        let mut first = folder.command(&[&words[..], &["-"]].concat());
        let mut first = first.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let start = Instant::now();
        let held = match output {
            "e.npy" => folder.path(".e.npy.lock"),
            _ => folder.path("out"),
        };
        while !held.exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "the first run does not begin");
            sleep(Duration::from_millis(5));
        }
        let second = folder.run(&[&words[..], &["p.faa"]].concat());
        let said = second.assert_code(1).stderr();
        assert!(said.contains("another run is writing to") && said.contains(output), "{said}");
        first.stdin.take().expect("a pipe").write_all(b">b\nMKVL\n").expect("written");
        assert!(first.wait().expect("it ends").success());
    }
    assert_eq!(npy(&folder, "e")[0].0, "b");
    assert!(folder.path("out/stdin.npy").exists() && !folder.path(".e.npy.lock").exists());
}

/// A run that is killed leaves no result; the same command goes on after the rows in the journal and writes the same
/// bytes as a run without interruption, and nothing is left beside the results.
#[test]
fn killed_it_resumes_with_the_same_bytes() {
    let folder = Folder::new("embedding_killed");
    let text: String = (0..12).map(|i| many().replace(">s", &format!(">r{i}_s"))).collect();
    folder.write("a.faa", &text);
    folder.write("b.faa", many());
    let esm = golden("esm2");
    let base =
        ["embed", "--model", &esm, "--tokens", "256", "--threads", "1", "--precision", "f32", "--no-progress"];
    let table: [&[&str]; 5] = [
        &["-o", "KIND/e.npy"],
        &["-o", "KIND/e.npz", "--pool", "tokens", "--dtype", "float16"],
        &["-o", "KIND/e.safetensors", "--pool", "tokens"],
        &["-o", "KIND/e.parquet", "--pool", "tokens", "--layers", "0,-1"],
        &["-o", "KIND", "--per-input", "--format", "parquet"],
    ];
    let mut resumed = 0;
    for (case, words) in table.into_iter().enumerate() {
        let [whole, broken] = ["whole", "broken"].map(|kind| format!("{kind}{case}"));
        let words = |kind: &str| -> Vec<String> {
            let words = words.iter().map(|word| word.replace("KIND", kind));
            words.chain(["a.faa", "b.faa", "--commit-every", "0"].map(str::to_owned)).collect()
        };
        let run = |kind: &str| {
            let words = words(kind);
            folder.command(&[&base[..], &words.iter().map(String::as_str).collect::<Vec<_>>()].concat())
        };
        for kind in [&whole, &broken] {
            fs::create_dir_all(folder.path(kind)).expect("created");
        }
        assert!(run(&whole).stderr(Stdio::null()).status().expect("it starts").success());
        let mut child = run(&broken).stderr(Stdio::null()).spawn().expect("it starts");
        let journal = || {
            let files = fs::read_dir(folder.path(&broken)).expect("listed").flatten();
            files.map(|file| file.path()).find(|path| path.extension().is_some_and(|e| e == "journal"))
        };
        let size = || journal().and_then(|path| fs::metadata(path).ok()).map_or(0, |facts| facts.len());
        while size() < 20_000 && child.try_wait().expect("a child").is_none() {
            sleep(Duration::from_millis(1));
        }
        child.kill().expect("killed");
        child.wait().expect("it ended");
        let ran = run(&broken).output().expect("it starts");
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        let done = ran.status.success();
        // A run that had ended before it was killed is complete, and is not replaced.
        assert!(done || said.contains("already exists"), "{said}");
        resumed += usize::from(said.contains("sequences are finished"));
        let files = |kind: &str| -> Vec<(String, Vec<u8>)> {
            let files = fs::read_dir(folder.path(kind)).expect("listed").flatten().map(|file| file.path());
            let name =
                |path: &std::path::Path| path.file_name().expect("a name").to_string_lossy().into_owned();
            let mut all: Vec<_> = files.map(|path| (name(&path), fs::read(&path).expect("bytes"))).collect();
            all.sort();
            all
        };
        let [whole, broken] = [files(&whole), files(&broken)];
        let names = |files: &[(String, Vec<u8>)]| files.iter().map(|file| file.0.clone()).collect::<Vec<_>>();
        assert_eq!(names(&whole), names(&broken), "{said}");
        for (whole, broken) in whole.iter().zip(&broken) {
            assert!(whole == broken, "{} differs", whole.0);
        }
    }
    assert!(resumed >= 4, "only {resumed} runs were killed when rows were finished");
}

#[test]
fn a_journal_belongs_to_its_run() {
    let folder = Folder::new("embedding_journal");
    let text: String = (0..12).map(|i| many().replace(">s", &format!(">r{i}_s"))).collect();
    folder.write("a.faa", &text);
    let esm = golden("esm2");
    let base = ["embed", "--model", &esm, "a.faa", "-o", "e.npy", "--tokens", "256", "--threads", "1", "-q"];
    let words = [&base[..], &["--commit-every", "0"]].concat();
    let mut child = folder.command(&words).stderr(Stdio::null()).spawn().expect("it starts");
    let journal = folder.path("e.npy.journal");
    while fs::metadata(&journal).map_or(0, |facts| facts.len()) < 20_000 {
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it was killed");
        sleep(Duration::from_millis(1));
    }
    child.kill().expect("killed");
    child.wait().expect("it ended");
    let other = [&base[..], &["--pool", "cls"]].concat();
    let said = folder.run(&other).assert_code(1).stderr();
    assert!(said.contains("`pool` was \"mean\", is \"cls\"") && said.contains("--force"), "{said}");
    assert!(journal.exists() && !folder.path("e.npy").exists());
    folder.run(&[&other[..], &["--force"]].concat()).assert_code(0);
    assert!(!journal.exists() && folder.path("e.npy").exists());
    let alone = [&base[..], &["--no-journal", "--force"]].concat();
    folder.run(&alone).assert_code(0);
    let refused = folder.run(&[&base[..], &["--no-journal", "--commit-every", "1"]].concat());
    assert!(refused.assert_code(1).stderr().contains("--no-journal"), "{}", refused.stderr());
}
