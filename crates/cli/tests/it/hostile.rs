//! Tests of hostile names in records, tensors, files and configurations. Invariant: in messages and tables a
//! name is shown as printable text on one line, and no name leads to a file outside the output folder.

use crate::harness::{Folder, golden};
use plimsoll_data::names::written;
use plimsoll_data::sequence::Reader;
use plimsoll_data::weights::Weights;
use std::collections::BTreeSet;
use std::fs;

/// Start of a line that a name with a newline would forge in the output.
const FORGED: &str = "error: none";

/// Hostile record ids. None has a blank, because the reader ends an id at the first blank.
fn ids() -> Vec<String> {
    let ids = [
        "../../evil",
        "/evil",
        "a\0b",
        "\x1b[2J",
        "\u{9b}31m",
        "\u{202e}rtl",
        "e\u{301}\u{4e2d}",
        "a\\tb\\n",
        "-o",
        "$(touch",
        "\"quoted\"",
        "'",
        "a|b",
        ">x",
        "=1+1",
        "NA",
        "#",
        "track",
        "\x07\x08\x7f",
        "%s%n",
        "..",
    ];
    ids.into_iter().map(str::to_owned).chain(["long".repeat(700)]).collect()
}

/// A record for each id, then a record with a duplicate id, an empty record, and a record with invalid letters.
fn fasta(sequence: &str) -> String {
    let mut text: String = ids().iter().map(|id| format!(">{id} words\n{sequence}\n")).collect();
    text += &format!(">\x1b[2J\n{sequence}\n>../../empty\x1b[2J\n>odd\x1b[31m\n{sequence}J\n");
    text
}

fn entries(folder: &Folder, name: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder.path(name)).expect("a folder");
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn text(folder: &Folder, name: &str) -> String {
    String::from_utf8(folder.read(name)).expect("text")
}

fn names(folder: &Folder, name: &str) -> Vec<String> {
    let records = Reader::open([folder.path(name)]).expect("opened").records();
    records.map(|record| record.expect("read").id).collect()
}

#[test]
fn ids_stay_in_their_fields() {
    let folder = Folder::new("hostile_predict");
    folder.write("in/reads.fa", fasta("ACGAAAGCAGCAGCAGCA"));
    let bundle = golden("");
    let words = ["predict", "in/reads.fa", "--weights", &bundle, "--threshold", "0", "-v", "-o", "in/out"];
    let more = ["--keep-intermediate", "--save-embeddings", "npy", "--log-file", "in/log"];
    folder.run(&[&words[..], &more].concat()).assert_code(0).assert_printable(FORGED);
    assert_eq!(entries(&folder, ""), ["in"].map(str::to_owned).into());
    assert_eq!(entries(&folder, "in"), ["log", "out", "reads.fa"].map(str::to_owned).into());
    // The record with a duplicate id gets a unique name.
    let results = named();
    // predictions.tsv also has a row for the empty record, before the last row.
    let mut predicted = results.clone();
    predicted.insert(results.len() - 1, written("../../empty\x1b[2J").into_owned());
    // (file, lines of the header, number of rows, tabs in a row)
    for (file, header, rows, tabs) in [
        ("predictions.tsv", 1, predicted.len(), 6),
        ("windows.tsv", 1, results.len(), 8),
        ("windows.bed", 0, results.len(), 5),
        // The duplicate, the empty and the odd record, ten records whose ids are not their names, and the unknown letters.
        ("notes.tsv", 1, 14, 3),
        ("prediction_results_highestscore.csv", 1, results.len(), 1),
    ] {
        let table = text(&folder, &format!("in/out/{file}"));
        assert!(!table.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{file}: {table:?}");
        let lines: Vec<&str> = table.lines().skip(header).collect();
        assert_eq!(lines.len(), rows, "{file}: {table}");
        assert!(lines.iter().all(|line| line.matches('\t').count() == tabs), "{file}: {table}");
    }
    let table = text(&folder, "in/out/predictions.tsv");
    let first: Vec<&str> = table.lines().skip(1).filter_map(|line| line.split('\t').next()).collect();
    let wanted: Vec<String> = predicted.iter().map(|name| shown(name)).collect();
    assert_eq!(first, wanted);
    let virus = names(&folder, "in/out/virus.fna");
    assert_eq!(virus[..ids().len()], results[..ids().len()]);
    let chunks = names(&folder, "in/out/chunked.fa");
    assert_eq!(chunks[0], "../../evil_chunk_1");
    assert_eq!(chunks.len(), results.len());
    let frames = names(&folder, "in/out/protein.faa").len();
    assert_eq!(text(&folder, "in/out/embeddings.ids.txt").lines().count(), frames);
    let record: serde_json::Value = serde_json::from_slice(&folder.read("in/out/run.json")).expect("JSON");
    assert_eq!(record["counts"]["records"], predicted.len());
}

/// A name as it is written in tables: formulas of spreadsheets are quoted.
fn shown(name: &str) -> String {
    let quote = if name.len() > 1 && name.starts_with(['=', '-']) { "'" } else { "" };
    format!("{quote}{name}")
}

/// Names of the records with a sequence in results.
fn named() -> Vec<String> {
    let name = |(position, id): (usize, &String)| match id.as_str() {
        "NA" => format!("NA#1.{}", position + 1),
        id => written(id).into_owned(),
    };
    let repeated = format!("{}#1.23", written(&ids()[3]));
    ids().iter().enumerate().map(name).chain([repeated, written("odd\x1b[31m").into_owned()]).collect()
}

#[test]
fn ids_are_kept_in_embeddings() {
    let folder = Folder::new("hostile_embed");
    folder.write("p.faa", fasta("MKVLAAGIVG"));
    let esm = golden("esm2");
    let wanted = named();
    for (name, pool) in [("e.npy", "mean"), ("e.safetensors", "mean"), ("t.safetensors", "tokens")] {
        let words = ["embed", "--model", &esm, "p.faa", "-o", name, "--pool", pool, "-v"];
        folder.run(&words).assert_code(0).assert_printable(FORGED);
    }
    let there = ["e.ids.txt", "e.json", "e.npy", "e.safetensors", "p.faa", "t.safetensors"];
    assert_eq!(entries(&folder, ""), there.map(str::to_owned).into());
    assert_eq!(text(&folder, "e.ids.txt").lines().count(), wanted.len());
    let matrix = Weights::open(&folder.path("e.safetensors")).expect("opened");
    let found: Vec<String> = serde_json::from_str(&matrix.metadata()["ids"]).expect("a JSON array");
    assert_eq!(found, wanted);
    let each = Weights::open(&folder.path("t.safetensors")).expect("opened");
    let found: BTreeSet<String> = each.tensors().map(|tensor| tensor.name().to_owned()).collect();
    assert_eq!(found, wanted.into_iter().collect());
    // `__metadata__` is the only name that the safetensors format reserves: the record gets another one.
    folder.write("reserved.faa", ">__metadata__\nMKV\n");
    let words = ["embed", "--model", &esm, "reserved.faa", "-o", "r.safetensors", "--pool", "tokens"];
    let ran = folder.run(&words);
    assert!(ran.assert_code(0).stderr().contains("'__metadata__'"), "{}", ran.stderr());
    let named = Weights::open(&folder.path("r.safetensors")).expect("opened");
    assert!(named.get("__metadata__#1.1").is_some());
}

/// Runs a command on a model with hostile contents, and asserts that the output is plain text.
fn check_model(name: &str, edit: impl Fn(&Folder), words: &[&str], says: &str) {
    let folder = Folder::new(name);
    folder.model("esm2", "config.json", |text| text.replace('{', "{ "));
    folder.write("p.faa", ">a\nMKV\n");
    edit(&folder);
    let ran = folder.run(words);
    ran.assert_code(1).assert_printable(FORGED);
    assert!(ran.stderr().contains(says), "{}", ran.stderr());
}

#[test]
fn names_in_models_are_text() {
    let embed = ["embed", "--model", "esm2", "p.faa", "-o", "e.npy"];
    let tensor = |header: &str| {
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        move |folder: &Folder| folder.write("esm2/model.safetensors", &file)
    };
    let odd = r#"{"\u001b[2J\nerror: none":{"dtype":"F8_E5M2","shape":[0],"data_offsets":[0,0]}}"#;
    check_model("hostile_tensor", tensor(odd), &embed, "tensor `\\u{1b}[2J\\nerror: none`");
    let alike =
        r#"{"\u001b[2J\nerror: none.word_embeddings.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    check_model(
        "hostile_alike",
        tensor(alike),
        &embed,
        "it contains `\\u{1b}[2J\\nerror: none.word_embeddings.weight`",
    );
    let kind = |folder: &Folder| folder.write("esm2/config.json", r#"{"model_type":"\u001b[2J\nerror: none"}"#);
    check_model(
        "hostile_kind",
        kind,
        &["plan", "--model", "esm2"],
        "model_type `?[2J?error: none` is not known",
    );
    let shards = |folder: &Folder| {
        fs::remove_file(folder.path("esm2/model.safetensors")).expect("there");
        let index = r#"{"weight_map":{"a":"../outside\u001b\nerror: none.safetensors"}}"#;
        folder.write("esm2/model.safetensors.index.json", index);
    };
    check_model("hostile_shard", shards, &embed, "which is outside its folder");
    let target = |folder: &Folder| folder.write("t.toml", "name = \"\\u001b[2J\\nerror: none\"\n\x1b[2J");
    check_model(
        "hostile_target",
        target,
        &["plan", "--model", "esm2", "--target", "t.toml"],
        "target `t.toml`",
    );
}

#[test]
fn file_names_are_text() {
    let folder = Folder::new("hostile_files");
    let name = "\x1b[2J\nerror: none.fa";
    folder.write(name, ">a\nACGAAAGCAGCAGCAGCA\n");
    let ran = folder.run(&["predict", name]);
    ran.assert_code(0).assert_printable(FORGED);
    assert!(ran.stdout().contains("results in \\u{1b}[2J\\nerror: none_plimsoll"), "{}", ran.stdout());
    folder.run(&["predict", name]).assert_code(0).assert_printable(FORGED);
    folder.run(&["predict", name, "--json"]).assert_code(0).assert_printable(FORGED);
    folder.run(&["predict", "nowhere\x1b[2J\nerror: none"]).assert_code(1).assert_printable(FORGED);
    folder.run(&["predict", "--\x1b[2J", name]).assert_code(1).assert_printable(FORGED);
    folder.run(&["predict", name, "--length", "\x1b[2J"]).assert_code(1).assert_printable(FORGED);
    let model = "\x1b[2J\nerror: none";
    folder.write(&format!("{model}/config.json"), fs::read(golden("esm2/config.json")).expect("golden"));
    folder.run(&["plan", "--model", model]).assert_code(0).assert_printable(FORGED);
    folder.write(&format!("{model}/config.json"), "{");
    folder.run(&["plan", "--model", model]).assert_code(1).assert_printable(FORGED);
}
