//! Checks SentencePiece models in a `tokenizer.json`: Unigram (Kudo 2018), or BPE over characters, with normalizers and
//! a pre-tokenizer that marks spaces. Invariant: for an accepted file the `tokenizers` crate does not panic, runs no
//! regular expression from the file and draws no random numbers, and every character that is left after normalization
//! has a token, which may be the unknown token.

use serde_json::Value;

use super::byte_pairs::{MAX_IDS, TokenizerRefusal, is_unset, is_zero};
use crate::tokenize::bpe::makes_token;

/// Names of supported normalizers. The parameters of `Replace` and `Precompiled` are checked before.
const NORMALIZERS: [&str; 10] =
    ["NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "Precompiled", "Prepend"];
/// Names of supported pre-tokenizers; none of them takes a regular expression from the file.
const PRE_TOKENIZERS: [&str; 6] =
    ["Metaspace", "WhitespaceSplit", "Whitespace", "Digits", "Punctuation", "UnicodeScripts"];

/// Checks a file and returns the id of its unknown token, or `None` if the model falls back to bytes and has a token
/// for each.
///
/// # Errors
/// The first unsupported or inconsistent part, by name.
pub(super) fn check(file: &Value) -> Result<Option<i32>, TokenizerRefusal> {
    for_each_step(&file["normalizer"], "normalizers", &mut |part| normalizer(part))?;
    for_each_step(&file["pre_tokenizer"], "pretokenizers", &mut |part| match part["type"].as_str() {
        Some(kind) if PRE_TOKENIZERS.contains(&kind) => Ok(()),
        kind => Err(format!("its pre-tokenizer {} is not supported", kind.unwrap_or("of no type")).into()),
    })?;
    let added = file["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !added.iter().all(|token| is_id(&token["id"])) {
        return Err("the id of an added token is not a whole number below 2^20".into());
    }
    match file["model"]["type"].as_str() {
        Some("Unigram") => unigram(&file["model"]),
        Some("BPE") | None => byte_pairs(&file["model"]),
        Some(kind) => Err(format!("its model {kind} is neither BPE nor Unigram").into()),
    }
}

/// Whether a value is a token id below [`MAX_IDS`].
fn is_id(id: &Value) -> bool {
    id.as_u64().is_some_and(|id| id < MAX_IDS)
}

/// Calls `check` on a normalizer or pre-tokenizer, or on each element of a `Sequence` (in its field `list`); does
/// nothing for `null`.
fn for_each_step(
    part: &Value,
    list: &str,
    check: &mut dyn FnMut(&Value) -> Result<(), TokenizerRefusal>,
) -> Result<(), TokenizerRefusal> {
    match (part, part["type"].as_str()) {
        (Value::Null, _) => Ok(()),
        (_, Some("Sequence")) => {
            let Some(parts) = part[list].as_array() else {
                return Err(format!("its sequence has no {list}").into());
            };
            parts.iter().try_for_each(check)
        }
        _ => check(part),
    }
}

/// Checks a normalizer.
fn normalizer(part: &Value) -> Result<(), TokenizerRefusal> {
    match part["type"].as_str() {
        Some("Replace") if part["pattern"]["String"].as_str().is_some_and(|text| !text.is_empty()) => Ok(()),
        Some("Replace") => Err("its normalizer Replace has another pattern than a text".into()),
        Some("Precompiled") => {
            let map = part["precompiled_charsmap"].as_str().and_then(decoded);
            if map.is_some_and(|map| is_sound(&map)) {
                Ok(())
            } else {
                Err("its normalizer Precompiled is damaged".into())
            }
        }
        Some(kind) if NORMALIZERS.contains(&kind) => Ok(()),
        kind => Err(format!("its normalizer {} is not supported", kind.unwrap_or("of no type")).into()),
    }
}

/// Checks a Unigram model: distinct pieces with finite scores (log probabilities). Returns the id of the unknown token
/// as [`check`] does.
fn unigram(model: &Value) -> Result<Option<i32>, TokenizerRefusal> {
    let Some(pieces) = model["vocab"].as_array() else {
        return Err("its model has no list of pieces and scores".into());
    };
    if pieces.len() as u64 >= MAX_IDS || !pieces.iter().all(is_piece) {
        return Err("a piece of its model is not a text with a score, or it has 2^20 of them or more".into());
    }
    let names: std::collections::HashSet<&str> = pieces.iter().filter_map(|piece| piece[0].as_str()).collect();
    if names.len() < pieces.len() {
        return Err("a piece of its model stands twice".into());
    }
    let unknown = match model["unk_id"].as_u64() {
        Some(id) if id < pieces.len() as u64 => Some(id as i32),
        Some(_) => return Err("the id of its unknown piece is not in its vocabulary".into()),
        None => None,
    };
    covers(model, unknown, &|name| names.contains(name))
}

/// Whether an element of a Unigram vocabulary is a text with a finite score.
fn is_piece(piece: &Value) -> bool {
    piece.as_array().is_some_and(|pair| pair.len() == 2)
        && piece[0].is_string()
        && piece[1].as_f64().is_some_and(f64::is_finite)
}

/// Checks a BPE model. Returns the id of the unknown token as [`check`] does.
fn byte_pairs(model: &Value) -> Result<Option<i32>, TokenizerRefusal> {
    let vocab = model["vocab"].as_object().ok_or("it has no model with a vocabulary")?;
    if !vocab.values().all(is_id) {
        return Err("an id of its vocabulary is not a whole number below 2^20".into());
    }
    let rules = [
        ("dropout", is_zero(&model["dropout"])),
        ("continuing_subword_prefix", is_unset(&model["continuing_subword_prefix"])),
        ("end_of_word_suffix", is_unset(&model["end_of_word_suffix"])),
    ];
    if let Some((name, _)) = rules.iter().find(|(_, kept)| !kept) {
        return Err(format!("its model sets {name}, which is not supported").into());
    }
    let merges = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !merges.iter().all(|merge| makes_token(merge, vocab)) {
        return Err("a merge does not produce a token".into());
    }
    let unknown = match model["unk_token"].as_str() {
        Some(name) => {
            Some(vocab.get(name).and_then(Value::as_u64).ok_or("its unknown token is not in its vocabulary")?)
        }
        None => None,
    };
    covers(model, unknown.map(|id| id as i32), &|name| vocab.contains_key(name))
}

/// Returns `None` if the model falls back to bytes and has a token for each of the 256, otherwise the id of the unknown
/// token; an error if it has neither. `has` tells whether the vocabulary contains a token.
fn covers(
    model: &Value,
    unknown: Option<i32>,
    has: &dyn Fn(&str) -> bool,
) -> Result<Option<i32>, TokenizerRefusal> {
    let bytes = model["byte_fallback"] == true && (0..=255u8).all(|byte| has(&format!("<0x{byte:02X}>")));
    match (bytes, unknown) {
        (true, _) => Ok(None),
        (false, Some(id)) => Ok(Some(id)),
        (false, None) => {
            Err("it has neither an unknown token nor one for each byte, so a text may have no tokens".into())
        }
    }
}

/// Decodes base64 (RFC 4648, section 4).
fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut bits = 0u32;
    let mut bit_count = 0;
    for c in text.trim_end_matches('=').bytes() {
        bits = bits << 6 | u32::from(base64_value(c)?);
        bit_count += 6;
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.push((bits >> bit_count) as u8);
        }
    }
    Some(bytes)
}

/// Value of a digit of base64.
fn base64_value(digit: u8) -> Option<u8> {
    match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}

/// Whether a precompiled normalizer table of SentencePiece is safe to use for any text. The table consists of the
/// length of a trie in bytes (u32, little-endian), the trie (a double array of 32-bit units, Aoe 1989), and the
/// replacement texts, each ended by a zero byte, which the values of the trie point to.
///
/// The crate indexes the trie and the texts without checks. This function therefore visits every node that a text can
/// reach: the entries of all 255 next bytes must be inside the array, and each value must be the start of a character.
fn is_sound(map: &[u8]) -> bool {
    let Some((length, rest)) = map.split_first_chunk::<4>() else { return false };
    let length = u32::from_le_bytes(*length) as usize / 4 * 4;
    let Some((trie, texts)) = rest.split_at_checked(length) else { return false };
    let Ok(texts) = std::str::from_utf8(texts) else { return false };
    let units: Vec<u32> = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    // Bits of a unit (darts-clone): 0 to 7 and 31 label, 8 has a leaf, 9 offset in units of 256, 10 to 30 offset.
    let Some(&root) = units.first() else { return false };
    let mut seen = vec![false; units.len()];
    let mut open = vec![unit_offset(root)];
    while let Some(base) = open.pop() {
        if base >= units.len() || std::mem::replace(&mut seen[base], true) {
            if base >= units.len() {
                return false;
            }
            continue;
        }
        for byte in 1..=255 {
            let at = base ^ byte;
            let Some(&unit) = units.get(at) else { return false };
            // Another label: the node has no child for this byte.
            if (unit & (1 << 31 | 0xff)) as usize != byte {
                continue;
            }
            let next = at ^ unit_offset(unit);
            if unit >> 8 & 1 == 1 {
                let start = units.get(next).map(|leaf| (leaf & !(1 << 31)) as usize);
                if !start.is_some_and(|start| texts.is_char_boundary(start)) {
                    return false;
                }
            }
            open.push(next);
        }
    }
    true
}

/// Distance from a node of a double array to its children, from bits 9 to 30 of its unit: bit 9 says that bits 10 to 30
/// count in steps of 256.
fn unit_offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

#[cfg(test)]
mod tests {
    use super::super::byte_pairs::BytePairs;
    use super::*;
    use serde_json::json;
    use std::path::Path;

    /// A Unigram file with marked spaces, as for T5.
    fn unigram_file() -> Value {
        let pieces = json!([
            ["<pad>", 0.0],
            ["</s>", 0.0],
            ["<unk>", 0.0],
            ["\u{2581}", -3.0],
            ["a", -4.0],
            ["b", -4.0],
            ["ab", -2.0],
            ["\u{2581}ab", -1.5],
            ["c", -4.0],
            ["bc", -2.5]
        ]);
        let special = |id: u32, name: &str| {
            json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        json!({"version": "1.0", "added_tokens": [special(0, "<pad>"), special(1, "</s>"), special(2, "<unk>")],
            "normalizer": {"type": "NFKC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
                {"type": "Metaspace", "replacement": "\u{2581}", "add_prefix_space": true}]},
            "model": {"type": "Unigram", "unk_id": 2, "vocab": pieces}})
    }

    /// A file of BPE over characters with byte fallback, as for Llama 2.
    fn llama_file() -> Value {
        let mut names = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
        names.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
        names.extend(["\u{2581}", "a", "b", "ab", "\u{2581}ab"].map(str::to_owned));
        let vocab: serde_json::Map<String, Value> = names.into_iter().zip((0..).map(Value::from)).collect();
        json!({"version": "1.0", "added_tokens": [{"id": 2, "content": "</s>", "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
            "pre_tokenizer": null,
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                "merges": ["a b", "\u{2581} ab"]}})
    }

    fn open(file: &Value) -> Result<BytePairs, crate::DataError> {
        BytePairs::from_bytes(&serde_json::to_vec(file).unwrap(), Path::new("t"))
    }

    fn encode(pairs: &BytePairs, text: &str) -> (Vec<i32>, usize) {
        let mut tokens = Vec::new();
        let unknown = pairs.encode(text.as_bytes(), &mut tokens).unwrap();
        (tokens, unknown)
    }

    #[test]
    fn the_likeliest_pieces() {
        let pieces = open(&unigram_file()).unwrap();
        assert_eq!(pieces.size(), 10);
        // By hand: the sums of scores of _ab + c (-5.5), _ + a + bc (-9.5) and _ + ab + c (-9).
        assert_eq!(encode(&pieces, "ab"), (vec![7], 0));
        assert_eq!(encode(&pieces, "abc"), (vec![7, 8], 0));
        assert_eq!(encode(&pieces, "bc  ab"), (vec![3, 9, 7], 0));
        // NFKC maps a full-width letter to a letter; unknown tokens are counted; a text gives no special token.
        assert_eq!(encode(&pieces, "\u{ff41}b"), (vec![7], 0));
        assert_eq!(encode(&pieces, "abx"), (vec![7, 2], 1));
        assert!(!encode(&pieces, "ab</s>").0.contains(&1));
        assert_eq!(pieces.special("</s>", Path::new("t")).unwrap(), 1);
    }

    #[test]
    fn byte_pairs_over_characters() {
        let pairs = open(&llama_file()).unwrap();
        let first = 3 + 256;
        assert_eq!(encode(&pairs, "ab ab"), (vec![first + 4, first + 4], 0));
        // A character without a token is encoded as its bytes.
        assert_eq!(encode(&pairs, "\u{e9}"), (vec![first, 3 + 0xc3, 3 + 0xa9], 0));
        assert!(!encode(&pairs, "a</s>").0.contains(&2));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let unigram = unigram_file();
        let llama = llama_file();
        let regex =
            json!({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false});
        for (file, pointer, value, why) in [
            (&unigram, "/model/vocab/3/1", json!(null), "not a text with a score"),
            (&unigram, "/model/vocab/3/0", json!("a"), "a piece of its model stands twice"),
            (&unigram, "/model/unk_id", json!(10), "the id of its unknown piece is not in its vocabulary"),
            (&unigram, "/model/unk_id", json!(null), "neither an unknown token nor one for each byte"),
            (&unigram, "/model/type", json!("WordPiece"), "its model WordPiece is neither BPE nor Unigram"),
            (
                &unigram,
                "/normalizer",
                json!({"type": "BertNormalizer"}),
                "its normalizer BertNormalizer is not supported",
            ),
            (
                &unigram,
                "/normalizer",
                json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": ""}),
                "another pattern",
            ),
            (
                &unigram,
                "/normalizer",
                json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}),
                "is damaged",
            ),
            (&unigram, "/pre_tokenizer", regex, "its pre-tokenizer Split is not supported"),
            (&llama, "/model/dropout", json!(0.1), "its model sets dropout"),
            (&llama, "/model/merges", json!(["a \u{2581}"]), "a merge does not produce a token"),
            (&llama, "/model/unk_token", json!("none"), "its unknown token is not in its vocabulary"),
        ] {
            let mut file = file.clone();
            match file.pointer_mut(pointer) {
                Some(place) => *place = value,
                None => file["model"]["dropout"] = value,
            }
            let error = open(&file).err().expect(why);
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains(why), "{why}: {cause}");
        }
    }

    /// The table has one entry, `A` to `b`, in a double array with the children of the root at base 256.
    #[test]
    fn tables_of_normalizers_are_followed_before_they_are_used() {
        let mut units = vec![0u32; 1024];
        units[0] = 256 << 10;
        // The node of `A`, with a leaf at its own base 512.
        let at = 256 ^ usize::from(b'A');
        units[at] = ((at ^ 512) as u32) << 10 | 1 << 8 | u32::from(b'A');
        units[512] = 1 << 31;
        let map = |units: &[u32], texts: &str| {
            let trie: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
            [&(trie.len() as u32).to_le_bytes()[..], &trie, texts.as_bytes()].concat()
        };
        assert!(is_sound(&map(&units, "b\0")));
        let mut wrong = units.clone();
        wrong[512] = 1 << 31 | 7;
        assert!(!is_sound(&map(&wrong, "b\0")), "a value beyond the texts");
        assert!(!is_sound(&map(&units[..300], "b\0")), "a child beyond the trie");
        assert!(!is_sound(b"abc") && !is_sound(&map(&[], "b\0")));
        let mut file = unigram_file();
        file["normalizer"] =
            json!({"type": "Precompiled", "precompiled_charsmap": encoded(&map(&units, "b\0"))});
        let pieces = open(&file).unwrap();
        assert_eq!(encode(&pieces, "aA").0, [7], "A reads as b");
        assert_eq!(decoded("aGk="), Some(b"hi".to_vec()));
        assert_eq!(decoded("a*"), None);
    }

    fn encoded(bytes: &[u8]) -> String {
        let letters: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['+', '/']).collect();
        let triple = |three: &[u8]| {
            let word = three.iter().fold(0u32, |word, &b| word << 8 | u32::from(b)) << (8 * (3 - three.len()));
            let each =
                |i: usize| if i <= three.len() { letters[(word >> (18 - 6 * i) & 63) as usize] } else { '=' };
            (0..4).map(each).collect::<String>()
        };
        bytes.chunks(3).map(triple).collect()
    }
}
