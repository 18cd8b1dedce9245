//! Regression tests for damaged and hostile files that once exposed a bug. `cargo run -p xtask -- fuzz` searches for
//! more such files.

use std::fs;
use std::io::Cursor;

use plimsoll_data::DataError;
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::tokenize::Bpe;
use plimsoll_data::weights::{Weights, safetensors_bytes};
use serde_json::{Value, json};

use crate::support::{folder, golden};

fn read(bytes: Vec<u8>) -> Result<Vec<Record>, DataError> {
    Reader::from_read("reads.fa", Cursor::new(bytes))?.records().collect()
}

/// A byte order mark is skipped if each read returns a single byte, as with gzip members of one byte.
#[test]
fn a_byte_order_mark_in_pieces() {
    struct Pieces<I>(I);
    impl<I: Iterator<Item = u8>> std::io::Read for Pieces<I> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let next = out.first_mut().zip(self.0.next());
            Ok(next.map(|(place, byte)| *place = byte).iter().count())
        }
    }
    let check = |text: &'static [u8], expected: Option<&[&str]>| {
        let pieces = Pieces(text.iter().copied());
        let read: Result<Vec<Record>, _> =
            Reader::from_read("reads.fa", pieces).and_then(|reader| reader.records().collect());
        let ids = read.ok().map(|records| records.into_iter().map(|r| r.id).collect::<Vec<_>>());
        assert_eq!(ids, expected.map(|ids| ids.iter().map(|&id| id.to_owned()).collect()));
    };
    check(b"\xef\xbb\xbf>a\nA\n", Some(&["a"]));
    check(b"\xef\xbb\xbf", Some(&[]));
    check(b"\xef\xbb", None);
    check(b"\xef\xbb>a\nA\n", None);
}

#[test]
fn a_title_that_starts_with_a_blank_beyond_ascii() {
    let ids =
        |text: &str| read(text.as_bytes().to_vec()).unwrap().into_iter().map(|r| r.id).collect::<Vec<_>>();
    assert_eq!(ids(">\u{a0} name words\nA\n>\u{2003}\nA\n>\u{85}b\nA\n"), ["name", "", "b"]);
}

#[test]
fn a_name_of_megabytes() {
    let check = |name: Vec<u8>, expected: &str| {
        let error = read([b">", &name[..], b"\nACGT\n"].concat()).expect_err(expected).to_string();
        assert!(error.starts_with("reads.fa, line 1: the name '") && error.contains(expected), "{error}");
        assert!(error.len() < 400, "{error}");
    };
    check(vec![b'x'; 3 << 20], "has 3145728 bytes, at most 4096; put a space after the name");
    check(vec![0xff; 3 << 20], "is not UTF-8");
    assert_eq!(read([b">", &vec![b'x'; 4096][..], b" y\nA\n"].concat()).unwrap()[0].id.len(), 4096);
}

#[test]
fn names_in_messages_are_printable() {
    let check = |text: &[u8], expected: &str| {
        let error = read(text.to_vec()).expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    check(b"@a\x1b[2J\nAC\n+\nI", "reads.fa, line 1, 'a\\u{1b}[2J': not valid FASTQ");
    check(b"@\0\nAC", "reads.fa, line 2, '\\u{0}': not valid FASTQ");
}

/// Applies `change` to the golden tokenizer file and returns the cause of its refusal.
fn refused(change: impl Fn(&mut Value)) -> String {
    let path = folder("hostile_tokenizer").join("tokenizer.json");
    let mut file: Value =
        serde_json::from_slice(&fs::read(golden("dnabert_s/tokenizer.json")).unwrap()).unwrap();
    change(&mut file);
    fs::write(&path, file.to_string()).unwrap();
    let error = Bpe::from_file(&path).err().expect("it must be refused");
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    std::error::Error::source(&error).expect("a cause").to_string()
}

#[test]
fn tokenizers_that_would_panic_or_grow() {
    let ends = "it does not put [CLS] before and [SEP] after a sequence";
    // The template uses a token that its `special_tokens` lack; the `tokenizers` crate panics on such a file.
    assert_eq!(refused(|f| f["post_processor"]["special_tokens"] = json!({})), ends);
    // The template omits the sequence, or has it twice.
    assert_eq!(refused(|f| drop(f["post_processor"]["single"].as_array_mut().unwrap().remove(1))), ends);
    let twice = |f: &mut Value| {
        let parts = f["post_processor"]["single"].as_array_mut().unwrap();
        parts.insert(1, parts[1].clone());
    };
    assert_eq!(refused(twice), ends);
    // A normalizer that expands one letter to 8^10 letters (1 GiB), and a regex that takes a minute to compile.
    let growth = json!({"type": "Replace", "pattern": {"String": "A"}, "content": "AAAAAAAA"});
    let growth = json!({"type": "Sequence", "normalizers": vec![growth; 10]});
    assert_eq!(refused(|f| f["normalizer"] = growth.clone()), "its normalizer is neither none nor Lowercase");
    let pattern =
        json!({"type": "Split", "pattern": {"Regex": "((a{1,99}){1,99}){1,99}"}, "behavior": "Isolated"});
    let pre_tokenizer = "its pre-tokenizer is neither none, Whitespace nor WhitespaceSplit";
    assert_eq!(refused(|f| f["pre_tokenizer"] = pattern.clone()), pre_tokenizer);
    // Ids of 2^20 or more; 2^31 would be negative as i32.
    let vocabulary = "an id of its vocabulary is not a whole number below 2^20";
    assert_eq!(refused(|f| f["model"]["vocab"]["A"] = json!(1u64 << 31)), vocabulary);
    let added = "the id of an added token is not a whole number below 2^20";
    assert_eq!(refused(|f| f["added_tokens"][0]["id"] = json!(1 << 20)), added);
    // A merge longer than every token, and a subword prefix that the tokens do not have.
    let grow = |f: &mut Value| {
        let longest = f["model"]["vocab"].as_object().unwrap().keys().max_by_key(|token| token.len()).cloned();
        f["model"]["merges"].as_array_mut().unwrap().push(json!([longest, longest]));
    };
    assert_eq!(refused(grow), "a merge does not produce a token");
    let prefix = |f: &mut Value| f["model"]["continuing_subword_prefix"] = "##".into();
    assert_eq!(refused(prefix), "its pieces of words have a prefix");
}

/// Fields that encoding does not use are ignored. The `tokenizers` crate panics on some of these values.
#[test]
fn parts_that_do_not_matter_are_not_read() {
    let path = folder("hostile_parts").join("tokenizer.json");
    let mut file: Value =
        serde_json::from_slice(&fs::read(golden("dnabert_s/tokenizer.json")).unwrap()).unwrap();
    let expected = Bpe::from_bytes(file.to_string().as_bytes(), &path).unwrap();
    file["decoder"] = json!({"type": "Nonsense"});
    file["padding"] = json!("nonsense");
    file["post_processor"]["pair"] = json!([{"SpecialToken": {"id": "[NONE]", "type_id": 0}}]);
    let found = Bpe::from_bytes(file.to_string().as_bytes(), &path).unwrap();
    let [mut a, mut b] = [vec![], vec![]];
    found.encode(b"ACGTTGCANACGT", &mut a).unwrap();
    expected.encode(b"ACGTTGCANACGT", &mut b).unwrap();
    assert_eq!((a, found.kind()), (b, expected.kind()));
}

#[test]
fn a_tensor_of_more_dimensions_than_any() {
    let mut file = safetensors_bytes(&[], &Default::default(), plimsoll_data::weights::StoredAs::F32).unwrap();
    let header =
        format!(r#"{{"a":{{"dtype":"F32","shape":[{}0],"data_offsets":[0,0]}}}}"#, "1,".repeat(100_000));
    file.splice(.., (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()));
    let path = folder("hostile_dimensions").join("w.safetensors");
    fs::write(&path, file).unwrap();
    let error = Weights::open(&path).expect_err("no model has it").to_string();
    assert!(
        error.contains("tensor `a`") && error.ends_with("more than 16 dimensions, which no model has"),
        "{error}"
    );
}
