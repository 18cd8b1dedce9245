//! Tests that token ids equal the ids of the models' original tokenizers.

use std::fs;
use std::path::Path;
use std::thread;

use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::tokenize::{Bpe, esm};
use serde_json::Value;

use crate::support::{folder, golden, real};

/// Header and tensor data of a small safetensors file.
struct Tensors {
    header: Value,
    data: Vec<u8>,
}

impl Tensors {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let (size, rest) = bytes.split_at(8);
        let size = u64::from_le_bytes(size.try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&rest[..size]).unwrap();
        Tensors { header, data: rest[size..].to_vec() }
    }

    fn ids(&self, name: &str) -> Vec<i32> {
        let entry = &self.header[name];
        let [start, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
        let bytes = &self.data[start..end];
        match entry["dtype"].as_str().unwrap() {
            "I32" => bytes.chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect(),
            "I64" => {
                let wide = bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
                wide.map(|id| id as i32).collect()
            }
            other => panic!("{name} is {other}"),
        }
    }
}

fn records(path: &Path) -> Vec<Record> {
    Reader::open([path]).unwrap().records().collect::<Result<_, _>>().unwrap()
}

#[test]
fn dna_goldens() {
    let bpe = Bpe::from_file(&golden("dnabert_s/tokenizer.json")).unwrap();
    let expected = Tensors::read(&golden("dnabert_s/golden.safetensors"));
    let reads = records(&golden("dnabert_s/reads.fa"));
    assert!(!reads.is_empty());
    for read in reads {
        let mut tokens = Vec::new();
        bpe.encode(&read.seq, &mut tokens).unwrap();
        assert_eq!(tokens, expected.ids(&format!("{}.ids", read.id)), "{}", read.id);
        assert!(tokens.iter().all(|&t| (t as usize) < bpe.vocab_size()));
    }
}

#[test]
fn the_real_dna_tokenizer() {
    let Some(path) = real("dnabert_s_tokenizer/tokenizer.json") else { return };
    let bpe = Bpe::from_file(&path).unwrap();
    assert_eq!((bpe.vocab_size(), bpe.token(0).as_deref()), (4096, Some("[UNK]")));
    let cases = fs::read(path.with_file_name("cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    for case in cases.as_array().unwrap() {
        let sequence = case["sequence"].as_str().unwrap();
        let expected: Vec<i64> =
            case["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        let mut tokens = Vec::new();
        let unknown = bpe.encode(sequence.as_bytes(), &mut tokens).unwrap();
        assert_eq!(tokens.iter().map(|&t| i64::from(t)).collect::<Vec<_>>(), expected, "{sequence}");
        assert_eq!(unknown, expected.iter().filter(|&&id| id == 0).count());
    }
    // The sequence is longer than the truncation length in the tokenizer file, which is not applied.
    let mut tokens = Vec::new();
    bpe.encode("ACGTTGCA".repeat(4000).as_bytes(), &mut tokens).unwrap();
    assert!(tokens.len() > 2000 && !tokens.contains(&3), "{}", tokens.len());
}

#[test]
fn threads_share_one_tokenizer() {
    let bpe = Bpe::from_file(&golden("dnabert_s/tokenizer.json")).unwrap();
    let reads = records(&golden("pipeline/reads.fa"));
    let encode = || -> Vec<i32> {
        let mut tokens = Vec::new();
        for read in &reads {
            bpe.encode(&read.seq, &mut tokens).unwrap();
        }
        tokens
    };
    let expected = encode();
    thread::scope(|scope| {
        let all: Vec<_> = (0..3).map(|_| scope.spawn(encode)).collect();
        for one in all {
            assert_eq!(one.join().unwrap(), expected);
        }
    });
}

#[test]
fn a_tokenizer_that_cannot_be_used_names_its_file() {
    let path = folder("tokens_bad").join("tokenizer.json");
    let good = fs::read_to_string(golden("dnabert_s/tokenizer.json")).unwrap();
    let mut other: Value = serde_json::from_str(&good).unwrap();
    other["post_processor"] = Value::Null;
    let mut dropout: Value = serde_json::from_str(&good).unwrap();
    dropout["model"]["dropout"] = 0.1.into();
    let mut wordlevel: Value = serde_json::from_str(&good).unwrap();
    wordlevel["model"] = serde_json::json!({"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"});
    let check = |text: &str, cause: &str| {
        fs::write(&path, text).unwrap();
        let error = Bpe::from_file(&path).err().expect(cause);
        let expected = "not a tokenizer.json that can be used";
        assert_eq!(error.to_string(), format!("{}: {expected}", path.display()));
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains(cause), "{source}");
    };
    check("{", "EOF");
    check("{}", "it has no model with a vocabulary");
    check(&other.to_string(), "it does not put [CLS] before and [SEP] after a sequence");
    check(&dropout.to_string(), "it drops merges at random");
    check(&wordlevel.to_string(), "its model is not of the type BPE");
    let error = Bpe::from_file(&path.with_file_name("absent.json")).err().unwrap();
    assert!(error.to_string().ends_with("there is no such file; check the path"));
}

#[test]
fn the_protein_alphabet_is_the_models() {
    let vocab = fs::read_to_string(golden("esm2/vocab.txt")).unwrap();
    let names: Vec<&str> = vocab.lines().collect();
    assert_eq!(names.len(), esm::VOCAB);
    let special = [("<cls>", esm::CLS), ("<pad>", esm::PAD), ("<eos>", esm::EOS)];
    for (name, token) in special.into_iter().chain([("<unk>", esm::UNK), ("<mask>", esm::MASK)]) {
        assert_eq!(names[token as usize], name);
    }
    for (token, name) in names.iter().enumerate().filter(|(_, name)| name.len() == 1) {
        let mut tokens = Vec::new();
        assert_eq!(esm::encode(name.as_bytes(), &mut tokens), 0);
        assert_eq!(tokens, [esm::CLS, token as i32, esm::EOS]);
    }
}

#[test]
fn a_proteins_tokens_are_the_rows_of_its_golden() {
    let golden_file = Tensors::read(&golden("esm2/golden.safetensors"));
    let mut compared = 0;
    for protein in records(&golden("esm2/proteins.faa")) {
        let mut tokens = Vec::new();
        esm::encode(&protein.seq, &mut tokens);
        let entry = &golden_file.header[format!("{}.hidden", protein.id)];
        // The golden file has no hidden states for the longest sequences.
        if let Some(rows) = entry["shape"][0].as_u64() {
            assert_eq!(rows, tokens.len() as u64, "{}", protein.id);
            compared += 1;
        }
    }
    assert!(compared > 3);
}
