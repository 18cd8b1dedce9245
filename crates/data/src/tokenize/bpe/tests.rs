//! Tests that the table-based encoder returns the token ids of the `tokenizers` crate for every input.

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::{Bpe, BpeKind};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/goldens/dnabert_s/tokenizer.json");
const REAL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/real/dnabert_s_tokenizer/tokenizer.json");

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(GOLDEN).unwrap()).unwrap()
}

fn load(file: &Value) -> Bpe {
    Bpe::from_bytes(file.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap()
}

/// Loads the tokenizer of the test fixtures and, if the file exists, the published DNABERT-S tokenizer.
fn tokenizers() -> Vec<Bpe> {
    let there = [GOLDEN, REAL].into_iter().filter(|path| Path::new(path).exists());
    let all: Vec<Bpe> = there.map(|path| Bpe::from_file(Path::new(path)).unwrap()).collect();
    assert!(all.iter().all(|bpe| bpe.kind() == BpeKind::Tables));
    all
}

/// Asserts that both encoders append equal ids and return equal numbers of unknown tokens.
fn check(bpe: &Bpe, sequence: &[u8]) {
    let mut found = vec![-7];
    let mut expected = vec![-7];
    let unknown = bpe.encode(sequence, &mut found).unwrap();
    let expected_unknown = bpe.encode_by_library(sequence, &mut expected).unwrap();
    assert_eq!(found, expected, "{}", sequence.escape_ascii());
    assert_eq!(unknown, expected_unknown, "{}", sequence.escape_ascii());
}

#[test]
fn edge_cases() {
    let cases: [&[u8]; 22] = [
        b"",
        b" ",
        b"A",
        b"acgt",
        b"ACGTNNNNACGT",
        b"NNNN",
        b"ACG TTT\tGG\nA\r\nC\x0bC\x0cG",
        b"ACGT-ACGT*ACGT.",
        b"AC_GT",
        b"ACGT\x1cACGT\0A",
        b"[MASK]ACGT[CLS]ACGT[ACGT]",
        b"ACGT[UNK]N",
        b"[PAD]",
        "AC\u{e9}GT\u{4e2d}\u{1f9ec}A".as_bytes(),
        "AC\u{a0}GT\u{85}A\u{3000}C\u{2028}G\u{200b}T\u{feff}".as_bytes(),
        b"AC\xffGT\xe2\x82A\xe2\x82\xac\xc2",
        b"\xc2\xa0\xc2\xc2\xa0",
        b"e\xcc\x81A\xcc\x81",
        b"RYSWKMBDHVNU",
        b"ACGTRYACGTTTGACA",
        b"1A2C",
        b"A C G T",
    ];
    for bpe in tokenizers() {
        cases.iter().for_each(|sequence| check(&bpe, sequence));
        for unit in ["A", "C", "TA", "GA", "TC", "CAG", "AAT", "ACGT", "TTAGGG", "GATTACA"] {
            for times in (0..70).chain([500, 5000]) {
                check(&bpe, unit.repeat(times).as_bytes());
                check(&bpe, (unit.repeat(times) + "GC" + &unit.repeat(times)).as_bytes());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn dna(sequence in prop::collection::vec(select(b"ACGT".to_vec()), 0..700)) {
        tokenizers_once(|bpe| check(bpe, &sequence));
    }

    #[test]
    fn repeats(units in prop::collection::vec(("[ACGT]{1,6}", 1_usize..40), 0..8)) {
        let sequence: String = units.iter().map(|(unit, times)| unit.repeat(*times)).collect();
        tokenizers_once(|bpe| check(bpe, sequence.as_bytes()));
    }

    #[test]
    fn dna_with_anything_between(
        parts in prop::collection::vec(
            prop_oneof![
                5 => "[ACGT]{0,40}".prop_map(String::into_bytes),
                1 => "[acgtACGTRYSWKMBDHVN]{0,12}".prop_map(String::into_bytes),
                1 => "N{1,30}".prop_map(String::into_bytes),
                1 => "[ \t\r\n*.-]{1,3}".prop_map(String::into_bytes),
                1 => "\\PC{0,4}".prop_map(String::into_bytes),
                1 => prop::collection::vec(any::<u8>(), 0..4),
                1 => select(vec!["[MASK]", "[CLS]", "[", "]", "\u{a0}", "\u{1680}", "\u{1c}", "\u{301}"])
                    .prop_map(|text| text.as_bytes().to_vec()),
            ],
            0..8,
        ),
    ) {
        tokenizers_once(|bpe| check(bpe, &parts.concat()));
    }
}

/// Calls `f` with each of [`tokenizers`], which are loaded once per process rather than once per test case.
fn tokenizers_once(f: impl Fn(&Bpe)) {
    static ALL: std::sync::OnceLock<Vec<Bpe>> = std::sync::OnceLock::new();
    ALL.get_or_init(tokenizers).iter().for_each(f);
}

/// Trains BPE on a single word and returns a `tokenizer.json` with its first `merges` merges.
fn trained(word: &str, merges: usize) -> Value {
    let mut pieces: Vec<String> = word.chars().map(String::from).collect();
    let mut vocab: Vec<String> = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"].map(String::from).to_vec();
    let mut letters = pieces.clone();
    letters.sort();
    letters.dedup();
    vocab.extend(letters);
    let mut rules = Vec::new();
    for _ in 0..merges {
        let mut counts = HashMap::new();
        pieces.windows(2).for_each(|pair| *counts.entry((pair[0].clone(), pair[1].clone())).or_insert(0) += 1);
        let best = counts.into_iter().filter(|(pair, _)| !vocab.contains(&(pair.0.clone() + &pair.1)));
        let Some(((left, right), _)) = best.max_by_key(|(pair, count)| (*count, pair.clone())) else { break };
        vocab.push(left.clone() + &right);
        let mut at = 0;
        while at + 1 < pieces.len() {
            if pieces[at] == left && pieces[at + 1] == right {
                pieces[at] += &right;
                pieces.remove(at + 1);
            }
            at += 1;
        }
        rules.push(json!([left, right]));
    }
    let mut file = golden();
    file["model"]["merges"] = rules.into();
    file["model"]["vocab"] = vocab.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    file
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_trained_rules(
        letters in select(vec!["A", "AC", "ACT", "ACGT"]),
        corpus in prop::collection::vec(any::<u8>(), 1..300),
        merges in 0_usize..60,
        words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..120), 12),
    ) {
        let spell = |digits: &[u8]| -> Vec<u8> {
            digits.iter().map(|d| letters.as_bytes()[usize::from(*d) % letters.len()]).collect()
        };
        let bpe = load(&trained(&String::from_utf8(spell(&corpus)).unwrap(), merges));
        prop_assert_eq!(bpe.kind(), BpeKind::Tables);
        words.iter().for_each(|word| check(&bpe, &spell(word)));
    }

    /// Random merge rules, which training would not produce. If the table-based encoder accepts a file, its ids must
    /// still agree.
    #[test]
    fn any_rules_at_all(
        pairs in prop::collection::vec((any::<u16>(), any::<u16>()), 0..14),
        words in prop::collection::vec("[ACG]{0,60}", 12),
    ) {
        let mut pieces: Vec<String> = ["A", "C", "G"].map(String::from).to_vec();
        let mut rules = Vec::new();
        for (left, right) in pairs {
            let [left, right] = [left, right].map(|i| pieces[usize::from(i) % pieces.len()].clone());
            rules.push(json!([left, right]));
            if !pieces.contains(&(left.clone() + &right)) {
                pieces.push(left + &right);
            }
        }
        let names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"].map(String::from);
        let mut file = golden();
        file["model"]["merges"] = rules.into();
        let vocab = names.into_iter().chain(pieces).enumerate();
        file["model"]["vocab"] = vocab.map(|(id, token)| (token, json!(id))).collect();
        let bpe = load(&file);
        words.iter().for_each(|word| check(&bpe, word.as_bytes()));
    }
}

#[test]
fn a_file_that_asks_for_more_keeps_the_library() {
    let check_why = |change: &dyn Fn(&mut Value), expected: &'static str| {
        let mut file = golden();
        change(&mut file);
        let bpe = load(&file);
        assert_eq!(bpe.kind(), BpeKind::Library(expected));
        for sequence in [&b"ACGTTGCANNACGT ACGT"[..], b"acgtACGT", b"[MASK]A"] {
            check(&bpe, sequence);
        }
    };
    let model = |key: &'static str, value: Value| move |file: &mut Value| file["model"][key] = value.clone();
    let affix = "its pieces of words have a prefix or a suffix";
    check_why(&model("fuse_unk", true.into()), "it fuses unknown characters (fuse_unk)");
    check_why(&model("byte_fallback", true.into()), "it falls back to bytes (byte_fallback)");
    check_why(&model("ignore_merges", true.into()), "it takes whole words before merges (ignore_merges)");
    check_why(&model("end_of_word_suffix", "</w>".into()), affix);
    check_why(&model("unk_token", Value::Null), "it has no token for the unknown");
    check_why(&|f| f["normalizer"] = json!({"type": "Lowercase"}), "it has a normalizer");
    let split = json!({"type": "WhitespaceSplit"});
    check_why(&|f| f["pre_tokenizer"] = split.clone(), "its pre-tokenizer is not Whitespace");
    let bert = json!({"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]});
    let ends = "its post-processor is not the template [CLS] A [SEP]";
    check_why(&|f| f["post_processor"] = bert.clone(), ends);
    let moved = |from: usize, to: usize| {
        move |f: &mut Value| {
            let merges = f["model"]["merges"].as_array_mut().unwrap();
            let merge = merges.remove(from);
            merges.insert(to, merge);
        }
    };
    check_why(&moved(0, 1014), "a merge comes before its parts are made");
    let twice = |f: &mut Value| {
        let merges = f["model"]["merges"].as_array_mut().unwrap();
        for pair in [json!(["CA", "A"]), json!(["C", "AA"])] {
            // A pair that the file already lists would only move to the end, not become a second merge.
            if !merges.contains(&pair) {
                merges.push(pair);
            }
        }
        let vocab = f["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.len();
        vocab.entry("CAA").or_insert(id.into());
    };
    check_why(&twice, "two merges make the same token");
}

/// Each case adds one token, with an unused id, to the vocabulary or to the added tokens of the golden file.
#[test]
fn odd_alphabets_keep_the_library() {
    let check_why = |token: &str, added: bool, expected: &'static str| {
        let mut file = golden();
        let id = file["model"]["vocab"].as_object().unwrap().len();
        if added {
            let mut new = file["added_tokens"][0].clone();
            new["content"] = token.into();
            new["id"] = id.into();
            file["added_tokens"].as_array_mut().unwrap().push(new);
        } else {
            file["model"]["vocab"][token] = id.into();
        }
        let bpe = load(&file);
        assert_eq!(bpe.kind(), BpeKind::Library(expected));
        check(&bpe, format!("ACGT{token}ACGT").as_bytes());
    };
    check_why("N", false, "its alphabet has not one to four letters");
    check_why("-", false, "a character of its alphabet is not an ASCII letter");
    check_why("\u{e9}", false, "a character of its alphabet is not an ASCII letter");
    check_why("ACGT", true, "an added token starts like a sequence");
}
