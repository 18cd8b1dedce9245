//! Tests of `plimsoll embed` against the goldens: values, order and formats; and that the bits do not depend on
//! how the command is run.

use crate::harness::{Folder, golden};
use plimsoll_data::weights::Weights;
use std::path::Path;

/// Maximum absolute difference of a value from the reference implementation in f32.
const TOLERANCE: f32 = 1e-5;

pub const PROTEINS: &str = "esm2/proteins.faa";
pub const READS: &str = "dnabert_s/reads.fa";

/// Runs `embed` in f32, the precision of the goldens, whatever precision the machine would choose.
pub fn embed(folder: &Folder, model: &str, words: &[&str]) {
    let model = golden(model);
    let command = ["embed", "--no-progress", "--precision", "f32", "--model"];
    folder.run(&[&command[..], &[&model], words].concat()).assert_code(0);
}

/// Ids and rows of a `.npy` file and its `.ids.txt`; a row with several layers has them in sequence. Parsed as
/// numpy's format description specifies.
pub fn npy(folder: &Folder, stem: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = folder.read(&format!("{stem}.npy"));
    let (header, data) = bytes.split_at(10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]])));
    let ids = String::from_utf8(folder.read(&format!("{stem}.ids.txt"))).expect("text");
    let ids: Vec<&str> = ids.lines().collect();
    let width = data.len() / 4 / ids.len();
    let header = String::from_utf8_lossy(header);
    let shape = header.split(['(', ')']).nth(1).expect("a shape");
    let sizes: Vec<usize> = shape.split(", ").map(|n| n.parse().expect("a size")).collect();
    assert_eq!((sizes[0], sizes[1..].iter().product::<usize>()), (ids.len(), width), "{header}");
    let values: Vec<f32> = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    ids.iter().map(|id| (*id).to_owned()).zip(values.chunks_exact(width).map(<[f32]>::to_vec)).collect()
}

pub fn tensor(weights: &Weights, name: &str) -> Vec<f32> {
    let n = weights.tensor(name).expect("there").elements();
    let mut values = vec![0.0; n as usize];
    weights.read_f32(name, 0..n, &mut values).expect("read");
    values
}

/// Ids and rows of a safetensors file with a matrix `embeddings` and the ids in its metadata.
fn matrix(path: &Path) -> Vec<(String, Vec<f32>)> {
    let weights = Weights::open(path).expect("opened");
    let ids: Vec<String> = serde_json::from_str(&weights.metadata()["ids"]).expect("a JSON array");
    let values = tensor(&weights, "embeddings");
    assert_eq!(weights.tensor("embeddings").expect("there").shape()[0] as usize, ids.len());
    let width = values.len() / ids.len();
    ids.into_iter().zip(values.chunks_exact(width).map(<[f32]>::to_vec)).collect()
}

pub fn assert_close(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let worst = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= TOLERANCE, "{what}: {worst}");
}

/// Ids of a FASTA file.
fn ids(path: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path).expect("read");
    text.lines().filter_map(|l| l.strip_prefix('>')).map(str::to_owned).collect()
}

fn check_means(model: &str, input: &str) {
    let folder = Folder::new(&format!("means_{model}"));
    let wanted = Weights::open(Path::new(&golden(&format!("{model}/golden.safetensors")))).expect("golden");
    embed(&folder, model, &[&golden(input), "-o", "e.npy"]);
    embed(&folder, model, &[&golden(input), "-o", "e.safetensors"]);
    let rows = npy(&folder, "e");
    assert_eq!(rows.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>(), ids(&golden(input)));
    for (id, row) in &rows {
        assert_close(row, &tensor(&wanted, &format!("{id}.mean")), id);
    }
    assert_eq!(matrix(&folder.path("e.safetensors")), rows);
}

#[test]
fn means_of_proteins() {
    check_means("esm2", PROTEINS);
}

#[test]
fn means_of_reads() {
    check_means("dnabert_s", READS);
}

/// Compares the pools tokens and cls with the golden hidden states. `skip` is the number of rows at each end of
/// a hidden state that belong to special tokens.
fn check_tokens_and_cls(model: &str, input: &str, skip: usize) {
    let folder = Folder::new(&format!("tokens_{model}"));
    let wanted = Weights::open(Path::new(&golden(&format!("{model}/golden.safetensors")))).expect("golden");
    embed(&folder, model, &[&golden(input), "-o", "t.safetensors", "--pool", "tokens"]);
    embed(&folder, model, &[&golden(input), "-o", "c.safetensors", "--pool", "cls"]);
    let tokens = Weights::open(&folder.path("t.safetensors")).expect("opened");
    assert_eq!(tokens.metadata()["pool"], "tokens");
    for (id, cls) in matrix(&folder.path("c.safetensors")) {
        let name = format!("{id}.hidden");
        // The goldens omit the hidden states of the longest sequences.
        if wanted.get(&name).is_none() {
            continue;
        }
        let hidden = tensor(&wanted, &name);
        let width = cls.len();
        assert_close(&cls, &hidden[..width], &id);
        let inside = &hidden[skip * width..hidden.len() - skip * width];
        assert_close(&tensor(&tokens, &id), inside, &id);
        assert_eq!(tokens.tensor(&id).expect("there").shape(), [(inside.len() / width) as u64, width as u64]);
    }
}

#[test]
fn tokens_and_cls_of_proteins() {
    check_tokens_and_cls("esm2", PROTEINS, 1);
}

#[test]
fn tokens_and_cls_of_reads() {
    check_tokens_and_cls("dnabert_s", READS, 0);
}

/// 150 proteins of random lengths, more than one pack holds.
pub fn many() -> String {
    let letters = b"LAGVSERTIDPKQNFYMHWC";
    let mut state = 1u64;
    let mut random = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut text = String::new();
    for i in 0..150 {
        text += &format!(">s{i}\n");
        let length = 1 + random(90);
        text.extend((0..length).map(|_| char::from(letters[random(20) as usize])));
        text += "\n";
    }
    text
}

#[test]
fn the_same_bits_however_it_is_run() {
    let folder = Folder::new("bits");
    folder.write("many.faa", many());
    embed(&folder, "esm2", &["many.faa", "-o", "e.npy"]);
    let wanted = folder.read("e.npy");
    let ways: &[&[&str]] = &[
        &["--tokens", "128"],
        &["--tokens", "512", "--threads", "1"],
        &["--tokens", "4096", "--threads", "2"],
        &["--tokens", "1000", "--threads", "5", "--prefetch", "1"],
        &["--memory-budget", "70MB"],
    ];
    for words in ways {
        embed(&folder, "esm2", &[&["many.faa", "-o", "e.npy", "--force"], *words].concat());
        assert!(folder.read("e.npy") == wanted, "{words:?}");
    }
    let words = ["embed", "--precision", "f32", "--model", &golden("esm2"), "-", "-o", "e.npy", "--force"];
    folder.run_with(&words, many().as_bytes()).assert_code(0);
    assert!(folder.read("e.npy") == wanted, "standard input");
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let folder = Folder::new("neighbours");
    let text = many();
    let mut records: Vec<&str> = text.split_inclusive('\n').collect();
    folder.write("forward.faa", &text);
    let mut turned: Vec<&str> = vec![];
    while records.len() >= 2 {
        let sequence = records.pop().expect("two left");
        turned.extend([records.pop().expect("one left"), sequence]);
    }
    folder.write("backward.faa", turned.concat());
    folder.write("one.faa", text.split_inclusive('\n').take(2).collect::<String>());
    embed(&folder, "esm2", &["forward.faa", "-o", "f.npy"]);
    embed(&folder, "esm2", &["backward.faa", "-o", "b.npy", "--tokens", "256"]);
    embed(&folder, "esm2", &["one.faa", "-o", "o.npy"]);
    let mut backward = npy(&folder, "b");
    backward.reverse();
    let forward = npy(&folder, "f");
    assert_eq!(forward, backward);
    assert_eq!(forward[..1], npy(&folder, "o")[..]);
}

#[test]
fn dna_does_not_depend_on_tokens_either() {
    let folder = Folder::new("dna_bits");
    embed(&folder, "dnabert_s", &[&golden(READS), "-o", "a.npy", "--tokens", "640", "--threads", "1"]);
    embed(&folder, "dnabert_s", &[&golden(READS), "-o", "b.npy", "--tokens", "4096", "--threads", "2"]);
    assert!(folder.read("a.npy") == folder.read("b.npy"));
}

#[test]
fn what_is_skipped_is_said() {
    let folder = Folder::new("skipped");
    folder.write("p.faa", ">a\nMKV\n>empty\n>a\nAAAA\n>stop\n*\n>b\nMKVLAT*\n");
    let words = ["embed", "--precision", "f32", "--model", &golden("esm2"), "p.faa", "-o", "e.npy", "--json"];
    let ran = folder.run(&words);
    let summary: serde_json::Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
    assert_eq!(summary["skipped"], serde_json::json!({"empty": 2}));
    assert_eq!(summary["renamed"], 1);
    for line in ["warning: 'empty' is empty", "warning: 'a' occurs more than once", "warning: 'stop' is empty"]
    {
        assert!(ran.stderr().contains(line), "{}", ran.stderr());
    }
    assert_eq!(npy(&folder, "e").iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["a", "a#1.3", "b"]);
    // Both records with a duplicate id are computed, and a stop `*` at the end is not a residue.
    folder.write("q.faa", ">a\nMKV\n>a#1.3\nAAAA\n>b\nMKVLAT\n");
    embed(&folder, "esm2", &["q.faa", "-o", "q.npy"]);
    assert_eq!(npy(&folder, "e"), npy(&folder, "q"));
}

#[test]
fn longer_sequences_are_cut_or_refused() {
    let folder = Folder::new("lengths");
    let long = "MKVLATGSER".repeat(110);
    folder.write("p.faa", format!(">a\nMKV\n>long\n{long}\n"));
    folder.write("cut.faa", format!(">a\nMKV\n>long\n{}\n", &long[..1022]));
    let esm = golden("esm2");
    let ran = folder.run(&["embed", "--model", &esm, "p.faa", "-o", "e.npy"]);
    assert!(
        ran.assert_code(1).stderr().contains("'long': 1100 letters, the limit is 1022"),
        "{}",
        ran.stderr()
    );
    // From standard input the record is refused when it is read.
    let ran = folder.run_with(&["embed", "--model", &esm, "-", "-o", "e.npy"], &folder.read("p.faa"));
    assert!(ran.assert_code(1).stderr().contains("'long': 1100 letters"), "{}", ran.stderr());
    assert!(!folder.path("e.npy").exists() && !folder.path("e.ids.txt").exists());
    embed(&folder, "esm2", &["p.faa", "-o", "e.npy", "--truncate"]);
    embed(&folder, "esm2", &["cut.faa", "-o", "c.npy"]);
    assert_eq!(npy(&folder, "e"), npy(&folder, "c"));
    embed(&folder, "esm2", &["p.faa", "-o", "l.npy", "--max-length", "1100"]);
    assert_ne!(npy(&folder, "l"), npy(&folder, "c"));
    // DNABERT-S has no maximum length to which --truncate could cut.
    folder
        .run(&["embed", "--model", &golden("dnabert_s"), &golden(READS), "-o", "d.npy", "--truncate"])
        .assert_code(1);
}

#[test]
fn dna_from_a_pipe_names_the_tokens_it_needs() {
    let folder = Folder::new("pipe");
    let reads = std::fs::read(golden(READS)).expect("golden");
    let words = ["embed", "--model", &golden("dnabert_s"), "-", "-o", "d.npy", "--tokens"];
    let ran = folder.run_with(&[&words[..], &["256"]].concat(), &reads);
    assert!(ran.assert_code(1).stderr().contains("'d5' has 627 tokens"), "{}", ran.stderr());
    assert!(ran.stderr().contains("--tokens 627"), "{}", ran.stderr());
    folder.run_with(&[&words[..], &["627"]].concat(), &reads).assert_code(0);
}

#[test]
fn an_empty_input_has_an_empty_result() {
    let folder = Folder::new("nothing");
    folder.write("p.faa", "");
    let ran = folder.run(&["embed", "--model", &golden("esm2"), "p.faa", "-o", "e.npy"]);
    assert!(ran.assert_code(0).stderr().contains("no sequence"), "{}", ran.stderr());
    assert_eq!(folder.read("e.npy").len(), 128);
}

#[test]
fn weights_that_give_no_numbers_are_an_error() {
    let folder = Folder::new("nan");
    let mut file = std::fs::read(golden("esm2/model.safetensors")).expect("golden");
    let weights = Weights::open(Path::new(&golden("esm2/model.safetensors"))).expect("opened");
    let norm = weights.tensor("esm.encoder.emb_layer_norm_after.bias").expect("there");
    file[norm.offset() as usize..][..4].fill(0xff);
    folder.write("m/model.safetensors", file);
    folder.write("m/config.json", std::fs::read(golden("esm2/config.json")).expect("golden"));
    folder.write("p.faa", ">first\nMKV\n>second\nMK\n");
    let ran = folder.run(&["embed", "--model", "m", "p.faa", "-o", "e.npy"]);
    assert!(
        ran.assert_code(1).stderr().contains("'first': its embedding contains a NaN or infinite value"),
        "{}",
        ran.stderr()
    );
    assert!(!folder.path("e.npy").exists());
}

#[test]
fn the_log_has_the_details_and_the_time() {
    let folder = Folder::new("log");
    folder.write("p.faa", ">a\nMKV\n");
    embed(&folder, "esm2", &["p.faa", "-o", "e.npy", "-q", "--log-file", "log.txt"]);
    let log = String::from_utf8(folder.read("log.txt")).expect("text");
    assert!(log.lines().count() >= 2 && log.contains("memory budget") && log.contains("cpu ("), "{log}");
    assert!(log.lines().all(|l| l.starts_with("20") && l.as_bytes()[19] == b'Z'), "{log}");
}

#[test]
fn an_esm2_folder_with_another_vocabulary_is_refused() {
    let folder = Folder::new("other_vocabulary");
    folder.model("esm2", "vocab.txt", |text| text.replace("L\nA\n", "A\nL\n"));
    folder.write("p.faa", ">a\nMKVLA\n");
    let ran = folder.run(&["embed", "--model", "esm2", "p.faa", "-o", "e.npy"]);
    let wanted = "vocab.txt, line 5: expected `L`, found `A`";
    assert!(ran.assert_code(1).stderr().contains(wanted), "{}", ran.stderr());
    assert!(!folder.path("e.npy").exists());
}
