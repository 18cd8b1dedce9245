//! Tests of output formats: Parquet tables of `embed`, one output file per input (`--per-input`), and results
//! that do not depend on the order of computation.

use crate::embeddings::{PROTEINS, embed, many, npy};
use crate::harness::{Folder, golden};
use plimsoll_data::rows::ParquetWriter;
use plimsoll_data::sequence::Reader;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Number of letters of each record, by id.
fn lengths(path: &Path) -> HashMap<String, u64> {
    let records = Reader::open([path]).expect("opened").records();
    records.map(|r| r.expect("a record")).map(|r| (r.id, r.seq.len() as u64)).collect()
}

/// Bytes of a Parquet file with `rows`, written with the writer that the tests of `data` verify.
fn table(
    folder: &Folder,
    columns: &[&str],
    rows: &[(String, Vec<f32>)],
    lengths: &HashMap<String, u64>,
    metadata: &[(&str, String)],
) -> Vec<u8> {
    let metadata: Vec<(&str, &str)> = metadata.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let columns: Vec<String> = columns.iter().map(|&name| name.to_owned()).collect();
    let width = rows[0].1.len() / columns.len();
    let mut out = ParquetWriter::create(folder.path("wanted"), &columns, width, &metadata).expect("created");
    for (id, values) in rows {
        out.write_sequence(id, lengths[id], values).expect("written");
    }
    out.finish().expect("finished");
    folder.read("wanted")
}

/// Metadata of a table, from the description of the `.npy` result `stem` of the same run.
fn metadata(folder: &Folder, stem: &str) -> Vec<(&'static str, String)> {
    let facts: Value = serde_json::from_slice(&folder.read(&format!("{stem}.json"))).expect("JSON");
    let keys = [
        "plimsoll",
        "model",
        "model_sha256",
        "precision",
        "device",
        "instructions",
        "kernels",
        "max_length",
        "pool",
        "layers",
        "dtype",
    ];
    let text = |value: &Value| match (value, value.as_str()) {
        (_, Some(text)) => text.to_owned(),
        (Value::Array(list), _) => list.iter().map(Value::to_string).collect::<Vec<_>>().join(","),
        (value, _) => value.to_string(),
    };
    keys.into_iter().filter_map(|key| facts.get(key).map(|value| (key, text(value)))).collect()
}

#[test]
fn a_table_holds_ids_lengths_and_embeddings() {
    let folder = Folder::new("parquet");
    let proteins = golden(PROTEINS);
    let lengths = lengths(Path::new(&proteins));
    embed(&folder, "esm2", &[&proteins, "-o", "e.npy"]);
    embed(&folder, "esm2", &[&proteins, "-o", "e.parquet", "--tokens", "2000"]);
    let facts = metadata(&folder, "e");
    let wanted = table(&folder, &["embedding"], &npy(&folder, "e"), &lengths, &facts);
    assert!(folder.read("e.parquet") == wanted);

    let words = [&proteins, "--layers", "-1,0", "--pool", "cls", "-o"];
    embed(&folder, "esm2", &[&words[..], &["l.npy"]].concat());
    embed(&folder, "esm2", &[&words[..], &["l.parquet"]].concat());
    let facts = metadata(&folder, "l");
    assert!(facts.contains(&("layers", "2,0".to_owned())) && facts.contains(&("pool", "cls".to_owned())));
    let wanted = table(&folder, &["layer_2", "layer_0"], &npy(&folder, "l"), &lengths, &facts);
    assert!(folder.read("l.parquet") == wanted);
}

#[test]
fn the_length_is_that_of_the_input_also_where_it_is_cut() {
    let folder = Folder::new("parquet_cut");
    folder.write("p.faa", ">a\nMKVLATGSER*\n");
    let words = ["p.faa", "--max-length", "4", "--truncate", "-o"];
    embed(&folder, "esm2", &[&words[..], &["e.npy"]].concat());
    embed(&folder, "esm2", &[&words[..], &["e.parquet"]].concat());
    let lengths = HashMap::from([("a".to_owned(), 10)]);
    let wanted = table(&folder, &["embedding"], &npy(&folder, "e"), &lengths, &metadata(&folder, "e"));
    assert!(folder.read("e.parquet") == wanted);
}

#[test]
fn a_prediction_saves_its_embeddings_as_a_table() {
    let folder = Folder::new("predict_parquet");
    let reads = golden("pipeline/reads.fa");
    let predict = |words: &[&str]| {
        let all =
            ["predict", &reads, "--weights", &golden(""), "-q", "--keep-intermediate", "--save-embeddings"];
        folder.run(&[&all[..], words].concat()).assert_code(0);
    };
    predict(&["npy", "-o", "n"]);
    predict(&["parquet", "-o", "p", "--tokens", "4096"]);
    let lengths = lengths(&folder.path("n/nucleotide.fa"));
    let record: Value = serde_json::from_slice(&folder.read("p/run.json")).expect("JSON");
    let identity = &record["identity"];
    let arithmetic = |name| (name, identity["arithmetic"][name].as_str().expect("a text").to_owned());
    let facts = [
        ("plimsoll", record["plimsoll"].as_str().expect("a text").to_owned()),
        ("model_sha256", identity["models"].to_string()),
        arithmetic("precision"),
        arithmetic("device"),
        arithmetic("instructions"),
    ];
    let wanted = table(&folder, &["embedding"], &npy(&folder, "n/embeddings"), &lengths, &facts);
    assert!(folder.read("p/embeddings.parquet") == wanted);
    assert!(!folder.path("p/embeddings.npy").exists());
}

#[test]
fn the_order_of_work_changes_packs_and_nothing_else() {
    let folder = Folder::new("order");
    folder.write("many.faa", many());
    let run = |words: &[&str]| -> (Vec<u8>, f64) {
        let all = ["embed", "--model", &golden("esm2"), "many.faa", "-o", "e.npy", "--force", "--json", "-q"];
        let ran = folder.run(&[&all[..], &["--tokens", "256"], words].concat());
        let report: Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
        (folder.read("e.npy"), report["packing_fill_but_last"].as_f64().expect("several packs"))
    };
    let (bytes, fill) = run(&[]);
    assert!(run(&["--sort-by-length"]) == (bytes.clone(), fill));
    let (in_turn, less) = run(&["--no-sort-by-length"]);
    assert!(in_turn == bytes, "results depend on the order of work");
    assert!(fill > 0.98 && less < 0.95, "{fill} and {less}");
    assert!(run(&["--no-sort-by-length", "--sort-by-length"]).1 == fill, "the last word counts");
}

#[test]
fn a_result_for_each_input() {
    let folder = Folder::new("per_input");
    let many = many();
    let half = many.match_indices('>').nth(75).expect("150 records").0;
    folder.write("a.faa", &many[..half]);
    // With --per-input, an id is a duplicate only if it occurs twice in one file.
    folder.write("x/b.c.fasta", format!("{}{}>s0\nMKV\n", &many[half..], &many[..half]));
    folder.write("empty.fa", "");
    folder.write("z.fa", ">last\nMKVL\n");
    let inputs = ["a.faa", "x/b.c.fasta", "empty.fa", "z.fa"];
    for format in ["npy", "npz", "safetensors", "parquet"] {
        let words = ["embed", "--model", &golden("esm2"), "--per-input", "--format", format, "-o", "out/here"];
        let ran = folder.run(&[&words[..], &["--precision", "f32"], &inputs].concat());
        assert!(ran.assert_code(0).stderr().contains("'s0' occurs more than once"), "{}", ran.stderr());
        assert!(ran.stderr().contains(&format!("no sequence: out/here/empty.{format}")), "{}", ran.stderr());
        for (input, stem) in inputs.iter().zip(["a", "b.c", "empty", "z"]) {
            let file = format!("{stem}.{format}");
            embed(&folder, "esm2", &[input, "-o", &file]);
            assert!(folder.read(&file) == folder.read(&format!("out/here/{file}")), "{file}");
        }
    }
    assert_eq!(folder.read("b.c.ids.txt"), folder.read("out/here/b.c.ids.txt"));
    // The default format is npy.
    let words = ["embed", "--model", &golden("esm2"), "--per-input", "-o", "out/here", "a.faa"];
    let ran = folder.run(&words);
    assert!(
        ran.assert_code(1).stderr().contains("out/here/a.npy: the file already exists"),
        "{}",
        ran.stderr()
    );
    folder.run(&[&words[..], &["--force"]].concat()).assert_code(0);
}

#[test]
fn what_cannot_be_asked_for() {
    let folder = Folder::new("formats_refused");
    folder.write("a.fa", ">a\nMKV\n");
    folder.write("b/a.faa", ">a\nMKV\n");
    let check = |words: &[&str], wanted: &str| {
        let ran = folder.run(&[&["embed", "--model", &golden("esm2"), "a.fa"], words].concat());
        assert!(ran.assert_code(1).stderr().contains(wanted), "{}", ran.stderr());
    };
    check(&["b/a.faa", "--per-input", "-o", "o"], "a.fa and b/a.faa would both be written to o/a.npy");
    check(&["--per-input", "-o", "a.fa"], "a.fa");
    check(&["-o", "o", "--format", "npy"], "--per-input");
    check(&["-o", "e.npy", "--pool", "tokens"], "ends in .safetensors, .parquet or .npz");
    check(&["-o", "e.npy", "--pool", "last"], "--pool last: the last token of ESM-2 is a special token");
    check(&["-o", "e.csv"], "must end in .npy, .npz, .safetensors or .parquet");
    check(
        &["-o", "e.npy", "--layers", "3"],
        "--layers 3: the model has layers 0 (the embedding) to 2 (the last)",
    );
    check(&["-o", "e.npy", "--layers", "2,-1"], "layer 2 is listed twice");
    check(&["-o", "e.npy", "--layers", "a"], "such as 0,6,-1");
    assert!(!folder.path("o").exists() && !folder.path("e.npy").exists());
}
