//! Tests that `plimsoll convert` writes all tensors bit for bit into one safetensors file.

use crate::harness::{Folder, golden};
use plimsoll_data::weights::{FileDType, Weights};
use serde_json::Value;
use std::fs;

/// Name, element type, shape and bytes of every tensor of a file.
fn everything(path: &std::path::Path) -> Vec<(String, FileDType, Vec<u64>, Vec<u8>)> {
    let weights = Weights::open(path).expect("weights");
    let all = weights.tensors().map(|t| {
        let mut bytes = vec![];
        weights.read_bytes(t.name(), 0..t.elements(), &mut bytes).expect("read");
        (t.name().to_owned(), t.dtype(), t.shape().to_vec(), bytes)
    });
    all.collect()
}

#[test]
fn torch_files_become_safetensors() {
    let folder = Folder::new("convert");
    for (input, output) in
        [("head.pth", "head.safetensors"), ("dnabert_s", "d.safetensors"), ("esm2", "e.safetensors")]
    {
        folder.run(&["convert", &golden(input), "-o", output]).assert_code(0);
        let wanted = everything(golden(input).as_ref());
        let found = everything(&folder.path(output));
        assert!(wanted == found, "{input}");
        let bytes = folder.read(output);
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
        assert_eq!(header["__metadata__"], serde_json::json!({"format": "pt"}));
        let data: usize = wanted.iter().map(|(.., bytes)| bytes.len()).sum();
        assert_eq!(bytes.len(), 8 + length + data, "{input}");
    }
    assert!(everything(&folder.path("head.safetensors")).iter().any(|(_, dtype, ..)| *dtype == FileDType::I64));
}

#[test]
fn a_converted_model_computes_the_same() {
    let folder = Folder::new("convert_used");
    for file in ["config.json", "tokenizer.json"] {
        folder.write(&format!("m/{file}"), fs::read(golden("dnabert_s/") + file).expect("golden"));
    }
    let input = golden("dnabert_s/pytorch_model.bin");
    folder.run(&["convert", &input, "-o", "m/model.safetensors", "-q"]).assert_code(0);
    let reads = golden("dnabert_s/reads.fa");
    let original = golden("dnabert_s");
    for (model, out) in [("m", "a.npy"), (original.as_str(), "b.npy")] {
        folder.run(&["embed", "--model", model, &reads, "-o", out]).assert_code(0);
    }
    assert_eq!(folder.read("a.npy"), folder.read("b.npy"));
}

#[test]
fn what_is_there_is_not_replaced() {
    let folder = Folder::new("convert_there");
    folder.write("out.safetensors", "precious");
    let head = golden("head.pth");
    let json = golden("esm2/config.json");
    let refused = |words: &[&str], why: &str| {
        let ran = folder.run(&[&["convert"], words].concat());
        assert!(ran.assert_code(1).stderr().contains(why), "{}", ran.stderr());
        assert_eq!(folder.read("out.safetensors"), b"precious");
    };
    refused(&[&head, "-o", "out.safetensors"], "out.safetensors: the file already exists; use --force");
    refused(&[&head, "-o", "out.pt"], "out.pt: give an output that ends in .safetensors");
    refused(&[&json, "-o", "new.safetensors"], "is not a weight file");
    refused(&["nowhere.pt", "-o", "new.safetensors"], "cannot read `nowhere.pt`");
    let ran = folder.run(&["convert", &head, "-o", "out.safetensors", "--force", "--json"]);
    let report: Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
    assert_eq!(report["tensors"], everything(head.as_ref()).len());
    // A file is not converted onto itself, which would destroy it if the conversion were wrong.
    let before = folder.read("out.safetensors");
    let ran = folder.run(&["convert", "out.safetensors", "-o", "out.safetensors", "--force"]);
    assert!(ran.assert_code(1).stderr().contains("an input of this command"), "{}", ran.stderr());
    assert!(before == folder.read("out.safetensors"));
}
