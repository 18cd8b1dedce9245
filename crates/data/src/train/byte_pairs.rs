//! Tokenizer of a language model, read from a `tokenizer.json`: byte-level byte-pair encoding (GPT-2) or a
//! SentencePiece model (`sentence_piece`). Invariant: the ids equal those of the `tokenizers` crate for the whole text
//! (except around a cut at `LONGEST_PART`), with special tokens in the text read as plain text; a file that uses an
//! unsupported feature is rejected with the name of the feature.
//!
//! The `tokenizers` crate encodes. Byte-level text is passed to it in parts, because its working memory is hundreds of
//! times the text. A part ends before whitespace that follows a printable ASCII character: no match of the patterns of
//! [`PATTERNS`] spans that boundary, except that punctuation takes the line ends after it. SentencePiece tokens depend on
//! the preceding text, so that text is passed as a whole.

use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::{ModelWrapper, Tokenizer};

use super::sentence_piece;
use crate::bounded;
use crate::printable::Name;
use crate::tokenize::bpe::{LARGEST, makes_token};
use crate::{DataError, DataErrorKind};

/// Minimum size of a part in bytes; a part extends to the next possible boundary.
const PART: usize = 16 << 10;
/// Maximum size of a part in bytes. A part without a possible boundary is cut here between characters, and the tokens
/// around the cut may differ from those of the whole text.
const LONGEST_PART: usize = 64 << 10;
/// Working memory of the crate per byte of a part, measured and rounded up (`tests/it/train/memory.rs`).
const SCRATCH: u64 = 528;
/// Maximum number of tokens per byte of a SentencePiece text: a space becomes U+2581, which has three bytes in UTF-8
/// and may need a token for each of them.
const MAX_TOKENS: usize = 3;
/// Maximum number of tokens that a normalizer or pre-tokenizer adds before a text.
const MARKS: usize = 16;
/// Capacity of the crate's cache of tokenized words for each thread. It stores the first words of less than 256 bytes.
const CACHED: u64 = 2048;
/// Maximum number of bytes of a cached word: 32 for each of its at most 256 tokens, its text, and its entry in the hash
/// table.
const CACHED_BYTES: u64 = 256 * 33 + 256;
/// Exclusive upper bound of token ids, because the crate iterates up to the largest id.
pub(super) const MAX_IDS: u64 = 1 << 20;

/// Reason why a tokenizer file is refused.
pub(super) type TokenizerRefusal = Box<dyn std::error::Error + Send + Sync>;

/// The regular expressions by which byte-level tokenizers part words: those of Llama 3, Qwen2 and GPT-2. No
/// other expression of a file is run.
const PATTERNS: [&str; 3] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];

/// Tokens that the post-processor of a file puts before and after a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextFrame {
    /// Tokens before the text.
    pub before: Vec<i32>,
    /// Tokens after the text.
    pub after: Vec<i32>,
}

/// A byte-level BPE tokenizer or a SentencePiece model. It can be shared between threads; encoding starts no threads.
pub struct BytePairs {
    tokenizer: Tokenizer,
    size: usize,
    /// Ids of the special tokens, ascending.
    specials: Vec<i32>,
    /// Id of the unknown token; `None` if every text can be encoded without it.
    unknown: Option<i32>,
    /// Whether a text may be encoded in parts.
    parts: bool,
    /// Whether a normalizer may lengthen a text.
    normalizes: bool,
    frame: TextFrame,
}

impl BytePairs {
    /// Creates a tokenizer from the content of a `tokenizer.json`; errors name `path`.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        Self::parse(bytes)
            .map_err(|e| DataError::at(path, DataErrorKind::Tokenizer(Name(&e.to_string()).to_string().into())))
    }

    /// Reads a tokenizer from the file at `path`.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let bytes = bounded::read(path, LARGEST).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        Self::from_bytes(&bytes, path)
    }

    fn parse(bytes: &[u8]) -> Result<Self, TokenizerRefusal> {
        let mut file: Value = serde_json::from_slice(bytes)?;
        let over_bytes = is_byte_level(&file["pre_tokenizer"]) && file["model"]["type"] != "Unigram";
        let unknown = if over_bytes { check(&file).map(|()| None)? } else { sentence_piece::check(&file)? };
        let frame = frame(&file["post_processor"])?;
        // Documents are encoded without truncation, padding and added special tokens, and are never decoded.
        // Removing the unused fields also avoids errors from values that the crate does not support.
        for unused in ["truncation", "padding", "decoder", "post_processor"] {
            file[unused] = Value::Null;
        }
        let mut tokenizer = Tokenizer::from_bytes(serde_json::to_vec(&file)?)?;
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) => {
                let mut model: BPE = model.clone();
                model.resize_cache(CACHED as usize);
                tokenizer.with_model(model);
            }
            ModelWrapper::Unigram(model) => {
                let mut pieces: Vec<(String, f64)> = model.iter().cloned().collect();
                // A Unigram model matches every piece in a text, including special tokens. Special pieces are therefore
                // renamed to a text that no document is expected to contain. The tokenizer has already stored their
                // ids.
                for (&id, token) in tokenizer.get_added_tokens_decoder().iter() {
                    if let Some((name, _)) = pieces.get_mut(id as usize).filter(|_| token.special) {
                        *name = format!("\u{ffff}special {id}\u{ffff}");
                    }
                }
                let unknown = file["model"]["unk_id"].as_u64().map(|id| id as usize);
                let byte_fallback = file["model"]["byte_fallback"] == true;
                let mut model = Unigram::from(pieces, unknown, byte_fallback)?;
                model.resize_cache(CACHED as usize);
                tokenizer.with_model(model);
            }
            _ => return Err("its model is neither BPE nor Unigram".into()),
        }
        tokenizer.set_encode_special_tokens(true);
        let added = tokenizer.get_added_tokens_decoder();
        let mut specials: Vec<i32> =
            added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id.cast_signed()).collect();
        specials.sort_unstable();
        let size = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        // Encoding in parts would change results in two cases: an added token that is not special is matched before the
        // text is divided into words and may span a boundary; a prefix space is added once per encoded text.
        let parts = over_bytes
            && specials.len() == added.len()
            && steps(&file["pre_tokenizer"], "pretokenizers")
                .into_iter()
                .all(|part| part["type"] != "ByteLevel" || part["add_prefix_space"] == false);
        let normalizes = !file["normalizer"].is_null();
        Ok(BytePairs { tokenizer, size, specials, unknown, parts, normalizes, frame })
    }

    /// Returns an exclusive upper bound of the token ids.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Id of the unknown token; `None` if every text can be encoded without it.
    pub fn unknown(&self) -> Option<i32> {
        self.unknown
    }

    /// The tokens that belong before and after a text that is not a part of a longer document.
    pub fn frame(&self) -> &TextFrame {
        &self.frame
    }

    /// Ids of the special tokens, ascending. Encoding a text gives none of them, except the unknown token.
    pub fn specials(&self) -> &[i32] {
        &self.specials
    }

    /// Returns the id of the special token `name`.
    ///
    /// # Errors
    /// The tokenizer has no such token, or the token is not special; the error names `path`.
    pub(super) fn special(&self, name: &str, path: &Path) -> Result<i32, DataError> {
        let id = self.tokenizer.token_to_id(name).map(u32::cast_signed);
        id.filter(|id| self.specials.contains(id)).ok_or_else(|| {
            let what = format!("it has no special token '{}'", Name(name));
            DataError::at(path, DataErrorKind::Malformed(what))
        })
    }

    /// Appends the tokens of `text`, without added special tokens, and returns how many of them are the unknown token.
    ///
    /// # Errors
    /// Text that is not UTF-8; text that a normalizer expands to more than three tokens per byte; an error of
    /// the `tokenizers` crate.
    pub fn encode(&self, text: &[u8], tokens: &mut Vec<i32>) -> Result<usize, DataError> {
        let start = tokens.len();
        let mut rest = self::text(text)?;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(if self.parts { part(rest) } else { rest.len() });
            let encoding = self
                .tokenizer
                .encode_fast(part, false)
                .map_err(|e| DataError::new(DataErrorKind::Tokenizer(e)))?;
            tokens.extend(encoding.get_ids().iter().map(|&id| id.cast_signed()));
            rest = after;
        }
        let new = &tokens[start..];
        if new.len() > self.most_tokens(text.len()) {
            let what = format!(
                "{} tokens of {} bytes: the normalizer of the tokenizer expands the text too far",
                new.len(),
                text.len()
            );
            return Err(DataError::new(DataErrorKind::Malformed(what)));
        }
        Ok(self.unknown.map_or(0, |unknown| new.iter().filter(|id| **id == unknown).count()))
    }

    /// Maximum number of tokens of a text of `bytes` bytes.
    pub(super) fn most_tokens(&self, bytes: usize) -> usize {
        // Normalization to NFC makes at most three bytes of one.
        if self.parts && !self.normalizes { bytes } else { MAX_TOKENS * bytes + MARKS }
    }

    /// Upper bound in bytes of the working memory and cache of the crate for documents of at most `longest` bytes.
    pub(super) fn scratch(&self, longest: usize) -> u64 {
        let part = if self.parts { longest.min(LONGEST_PART) } else { longest };
        library_scratch(part) + CACHED * CACHED_BYTES
    }
}

/// The document as text, or an error if it is not UTF-8.
pub(super) fn text(document: &[u8]) -> Result<&str, DataError> {
    std::str::from_utf8(document).map_err(|e| {
        let what = format!("not UTF-8 from byte {} of the document on; convert it", e.valid_up_to());
        DataError::new(DataErrorKind::Malformed(what))
    })
}

/// Working memory of the crate, in bytes, while it encodes a text of `bytes` bytes.
pub(super) fn library_scratch(bytes: usize) -> u64 {
    bytes as u64 * SCRATCH
}

/// End of the first part of `text`, as a byte index.
fn part(text: &str) -> usize {
    let bytes = text.as_bytes();
    if bytes.len() <= PART {
        return bytes.len();
    }
    // The character before must not be whitespace. Requiring printable ASCII avoids decoding Unicode whitespace.
    // Punctuation and the line ends after it may be one match.
    let limit = bytes.len().min(LONGEST_PART);
    (PART..limit).find(|&at| ends_part(bytes, at)).unwrap_or_else(|| text.floor_char_boundary(limit))
}

/// Whether the first part of a text may end before byte `at`.
fn ends_part(bytes: &[u8], at: usize) -> bool {
    let last = bytes[at - 1];
    let ends_line = matches!(bytes[at], b'\r' | b'\n');
    bytes[at].is_ascii_whitespace() && last.is_ascii_graphic() && !(ends_line && last.is_ascii_punctuation())
}

/// The steps of a normalizer, pre-tokenizer or post-processor: the elements of a `Sequence` (in its field `list`), or the
/// step itself; none for `null`.
fn steps<'a>(part: &'a Value, list: &str) -> Vec<&'a Value> {
    match part["type"].as_str() {
        Some("Sequence") => part[list].as_array().into_iter().flatten().collect(),
        _ if part.is_null() => vec![],
        _ => vec![part],
    }
}

/// Whether a pre-tokenizer maps text to the characters that stand for bytes.
fn is_byte_level(words: &Value) -> bool {
    steps(words, "pretokenizers").iter().any(|step| step["type"] == "ByteLevel")
}

/// The tokens that a post-processor puts before and after a single text.
///
/// # Errors
/// A form with other parts than special tokens around the text.
fn frame(processor: &Value) -> Result<TextFrame, TokenizerRefusal> {
    let mut frame = TextFrame::default();
    for step in steps(processor, "processors") {
        match step["type"].as_str() {
            // It changes offsets alone.
            Some("ByteLevel") => {}
            Some("BertProcessing" | "RobertaProcessing") => {
                let ends = token_id(&step["cls"][1]).zip(token_id(&step["sep"][1]));
                let (cls, sep) = ends.ok_or("its post-processor has no ids of its tokens")?;
                frame.before.insert(0, cls);
                frame.after.push(sep);
            }
            Some("TemplateProcessing") => {
                let mut before = vec![];
                let mut after = None::<Vec<i32>>;
                for part in step["single"].as_array().into_iter().flatten() {
                    if part["Sequence"]["id"] == "A" && after.is_none() {
                        after = Some(vec![]);
                        continue;
                    }
                    let name = part["SpecialToken"]["id"].as_str();
                    let ids = name.and_then(|name| step["special_tokens"][name]["ids"].as_array());
                    let ids: Option<Vec<i32>> = ids.and_then(|ids| ids.iter().map(token_id).collect());
                    let ids =
                        ids.ok_or("its post-processor has a template of another form than tokens around $A")?;
                    after.as_mut().unwrap_or(&mut before).extend(ids);
                }
                let after = after.ok_or("its post-processor has a template without $A")?;
                frame.before.splice(0..0, before);
                frame.after.extend(after);
            }
            kind => {
                return Err(
                    format!("its post-processor {} is not supported", kind.unwrap_or("of no type")).into()
                );
            }
        }
    }
    Ok(frame)
}

/// The id of a token in a post-processor; `None` for anything but a whole number below [`MAX_IDS`].
fn token_id(token: &Value) -> Option<i32> {
    token.as_u64().filter(|id| *id < MAX_IDS).map(|id| id as i32)
}

/// Checks the pre-tokenizer of a byte-level file: `ByteLevel`, after at most one `Split` by one of [`PATTERNS`] or a
/// `Digits`.
fn check_words(words: &Value) -> Result<(), TokenizerRefusal> {
    let all = steps(words, "pretokenizers");
    let Some((last, before)) = all.split_last() else {
        return Err("its pre-tokenizer has no steps".into());
    };
    if last["type"] != "ByteLevel" {
        return Err("its pre-tokenizer does not end with ByteLevel".into());
    }
    for step in before {
        match step["type"].as_str() {
            Some("Digits") => {}
            Some("Split") => {
                let pattern = step["pattern"]["Regex"].as_str().unwrap_or_default();
                if !PATTERNS.contains(&pattern) {
                    return Err(
                        "its pre-tokenizer Split has another pattern than those of GPT-2, Llama 3 and Qwen2"
                            .into(),
                    );
                }
                // Both forms keep the matches, and no character is outside of them.
                let keeps = [("Isolated", false), ("Removed", true)];
                if !keeps.iter().any(|(behavior, invert)| {
                    step["behavior"] == *behavior && step["invert"].as_bool().unwrap_or(false) == *invert
                }) {
                    return Err(
                        "its pre-tokenizer Split does not keep what it matches (behavior, invert)".into()
                    );
                }
            }
            kind => {
                return Err(
                    format!("its pre-tokenizer {} is not supported", kind.unwrap_or("of no type")).into()
                );
            }
        }
    }
    let splits = before.iter().any(|step| step["type"] == "Split");
    if !splits && last["use_regex"] == false {
        return Err("its pre-tokenizer does not part words (use_regex is false)".into());
    }
    Ok(())
}

/// Checks a byte-level BPE file: `Err` names the first field with an unsupported value.
fn check(file: &Value) -> Result<(), TokenizerRefusal> {
    let model = &file["model"];
    let words = &file["pre_tokenizer"];
    if !(model["type"].is_null() || model["type"] == "BPE") {
        return Err(format!("its model {} is not BPE", kind_of(model)).into());
    }
    if let Some(step) = steps(&file["normalizer"], "normalizers").iter().find(|step| step["type"] != "NFC") {
        return Err(format!("its normalizer {} is not supported", kind_of(step)).into());
    }
    check_words(words)?;
    let rules = [
        ("dropout", is_zero(&model["dropout"])),
        ("continuing_subword_prefix", is_unset(&model["continuing_subword_prefix"])),
        ("end_of_word_suffix", is_unset(&model["end_of_word_suffix"])),
        ("fuse_unk", is_unset(&model["fuse_unk"])),
        ("byte_fallback", is_unset(&model["byte_fallback"])),
    ];
    if let Some((name, _)) = rules.iter().find(|(_, kept)| !kept) {
        return Err(format!("its model sets {name}, which is not supported").into());
    }
    check_ids(file)
}

/// Whether a text or a flag of a tokenizer file is empty, false or missing.
pub(super) fn is_unset(value: &Value) -> bool {
    value.is_null() || *value == "" || *value == false
}

/// Whether a number of a tokenizer file is 0 or missing.
pub(super) fn is_zero(value: &Value) -> bool {
    value.is_null() || value.as_f64() == Some(0.0)
}

/// The type of a part of a tokenizer file, for messages.
fn kind_of(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("of no type")
}

/// Checks that every byte has a token, that ids are below [`MAX_IDS`], and that merges produce tokens.
fn check_ids(file: &Value) -> Result<(), TokenizerRefusal> {
    let vocab = file["model"]["vocab"].as_object().ok_or("it has no model with a vocabulary")?;
    let added = file["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut ids = vocab.values().chain(added.iter().map(|token| &token["id"]));
    if ids.any(|id| id.as_u64().is_none_or(|id| id >= MAX_IDS)) {
        return Err("an id of its vocabulary is not a whole number below 2^20".into());
    }
    let bytes = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let missing = bytes.into_iter().filter(|c| !vocab.contains_key(&c.to_string())).count();
    if missing > 0 {
        return Err(format!("{missing} of the 256 bytes have no token").into());
    }
    let merges = file["model"]["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !merges.iter().all(|merge| makes_token(merge, vocab)) {
        return Err("a merge does not produce a token".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A tokenizer file with a token for each byte, then `th`, `the`, ` the`, `ab`, and a special token.
    fn file() -> Value {
        let mut alphabet: Vec<char> =
            tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        alphabet.sort_unstable();
        let mut names: Vec<String> = alphabet.iter().map(char::to_string).collect();
        names.extend(["th", "the", "\u{120}the", "ab"].map(str::to_owned));
        let vocab: serde_json::Map<String, Value> = names.into_iter().zip((0..).map(Value::from)).collect();
        let merges = ["t h", "th e", "\u{120} the", "a b"];
        let added = json!([{"id": 260, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}]);
        json!({"version": "1.0", "added_tokens": added, "normalizer": null, "truncation": {"max_length": 2},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "vocab": vocab, "merges": merges}})
    }

    fn open(file: &Value) -> Result<BytePairs, DataError> {
        BytePairs::from_bytes(&serde_json::to_vec(file).unwrap(), Path::new("t"))
    }

    fn encode(pairs: &BytePairs, text: &str) -> Vec<i32> {
        let mut tokens = Vec::new();
        pairs.encode(text.as_bytes(), &mut tokens).unwrap();
        tokens
    }

    #[test]
    fn merges_stay_in_words() {
        let pairs = open(&file()).unwrap();
        assert_eq!(pairs.size(), 261);
        assert_eq!(encode(&pairs, "the the"), [257, 258]);
        assert_eq!(encode(&pairs, "ab").len(), 1);
        assert_eq!(encode(&pairs, "a b").len(), 3);
        assert_eq!(pairs.special("<|endoftext|>", Path::new("t")).unwrap(), 260);
        assert!(pairs.special("the", Path::new("t")).is_err());
        // The name of a special token in a text is not encoded as that token.
        assert!(!encode(&pairs, "a<|endoftext|>").contains(&260));
        assert!(pairs.encode(b"\xff", &mut Vec::new()).unwrap_err().to_string().contains("from byte 0"));
    }

    #[test]
    fn parts_are_the_whole() {
        let pairs = open(&file()).unwrap();
        let text = "the  other\n\n the th\u{e9}the \u{a0}ab, the's  \t1234 ab\r\n".repeat(3000);
        let whole = pairs.tokenizer.encode_fast(text.as_str(), false).unwrap();
        let whole: Vec<i32> = whole.get_ids().iter().map(|&id| id.cast_signed()).collect();
        assert!(text.len() > 6 * PART && part(&text) < PART + 100);
        assert_eq!(encode(&pairs, &text), whole);
        // Random sequences of words, punctuation and whitespace, so that many combinations occur at boundaries.
        let pieces =
            ["the", " ", "\n", "\t\t", "'s", "'", "\u{a0}", "\u{2003}", "12", "\u{e9}", ".", "\r\n", "\x0b"];
        let key = super::super::random::RandomKey::new(3);
        let text: String = (0..60_000).map(|i| pieces[key.with(i).below(pieces.len())]).collect();
        let whole = pairs.tokenizer.encode_fast(text.as_str(), false).unwrap();
        let whole: Vec<i32> = whole.get_ids().iter().map(|&id| id.cast_signed()).collect();
        assert_eq!(encode(&pairs, &text), whole);
        // A text without whitespace is cut at the maximum size, between characters.
        let text = "\u{e9}".repeat(LONGEST_PART);
        assert_eq!(encode(&pairs, &text).len(), text.len());
        assert_eq!((part(&text), part(&text[..PART + 2])), (LONGEST_PART, PART + 2));
    }

    /// The file with the words of Llama 3 or Qwen2, a normalizer and a template.
    fn modern(pattern: usize) -> Value {
        let mut file = file();
        file["normalizer"] = json!({"type": "NFC"});
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        file["post_processor"] = json!({"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|endoftext|>":
                    {"id": "<|endoftext|>", "ids": [260], "tokens": ["<|endoftext|>"]}}},
        ]});
        file
    }

    /// Words of Llama 3 and Qwen2 part punctuation and line ends in other places than those of GPT-2; a part never ends
    /// inside of a match.
    #[test]
    fn parts_of_other_words_are_the_whole() {
        let pieces = [
            "the", " ", "\n", "\t\t", "'S", "'", "\u{a0}", "\u{2003}", "1234", "e\u{301}", ".", "\r\n",
            "!?\n\n", "\u{958}",
        ];
        let key = super::super::random::RandomKey::new(5);
        let text: String = (0..60_000).map(|i| pieces[key.with(i).below(pieces.len())]).collect();
        for (at, pattern) in PATTERNS.iter().enumerate() {
            let pairs = open(&modern(at)).unwrap();
            assert!(pairs.parts);
            assert_eq!(pairs.frame(), &TextFrame { before: vec![260], after: vec![] });
            let whole = pairs.tokenizer.encode_fast(text.as_str(), false).unwrap();
            let whole: Vec<i32> = whole.get_ids().iter().map(|&id| id.cast_signed()).collect();
            assert_eq!(encode(&pairs, &text), whole, "{pattern}");
        }
        // A digit a token for Qwen2, and up to three for Llama 3; normalization makes one character of two.
        let [llama, qwen] = [0, 1].map(|pattern| open(&modern(pattern)).unwrap());
        assert_eq!([&llama, &qwen].map(|pairs| encode(pairs, "12").len()), [2, 2]);
        assert_eq!(encode(&llama, "e\u{301}"), encode(&llama, "\u{e9}"));
    }

    #[test]
    fn post_processors_are_read_or_refused() {
        let special = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let ids = json!({"<|endoftext|>": {"id": "<|endoftext|>", "ids": [260], "tokens": ["<|endoftext|>"]}});
        let template =
            |single: Value| json!({"type": "TemplateProcessing", "single": single, "special_tokens": ids});
        for (processor, wanted) in [
            (json!(null), Ok((vec![], vec![]))),
            (json!({"type": "ByteLevel"}), Ok((vec![], vec![]))),
            (template(json!([special, text])), Ok((vec![260], vec![]))),
            (template(json!([text, special])), Ok((vec![], vec![260]))),
            (json!({"type": "RobertaProcessing", "cls": ["a", 1], "sep": ["b", 2]}), Ok((vec![1], vec![2]))),
            (template(json!([special])), Err("a template without $A")),
            (template(json!([text, text])), Err("a template of another form")),
            (json!({"type": "Other"}), Err("its post-processor Other is not supported")),
        ] {
            let found = frame(&processor).map(|frame| (frame.before, frame.after));
            match (found, wanted) {
                (Ok(found), Ok(wanted)) => assert_eq!(found, wanted, "{processor}"),
                (Err(error), Err(why)) => assert!(error.to_string().contains(why), "{processor}: {error}"),
                (found, _) => panic!("{processor}: {found:?}"),
            }
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (pointer, value, why) in [
            ("/model/type", json!("WordPiece"), "its model WordPiece is not BPE"),
            ("/model/type", json!("Unigram"), "its pre-tokenizer ByteLevel is not supported"),
            ("/model/dropout", json!(0.1), "its model sets dropout"),
            ("/normalizer", json!({"type": "NFD"}), "its normalizer NFD is not supported"),
            ("/pre_tokenizer", json!({"type": "Metaspace"}), "neither an unknown token nor one for each byte"),
            ("/pre_tokenizer", json!(null), "neither an unknown token nor one for each byte"),
            ("/pre_tokenizer", json!({"type": "Split"}), "its pre-tokenizer Split is not supported"),
            ("/pre_tokenizer", json!({"type": "ByteLevel", "use_regex": false}), "use_regex is false"),
            (
                "/pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false},
                    {"type": "ByteLevel", "use_regex": false}]}),
                "its pre-tokenizer Split has another pattern than those of GPT-2, Llama 3 and Qwen2",
            ),
            (
                "/pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": PATTERNS[0]}, "behavior": "Removed", "invert": false},
                    {"type": "ByteLevel", "use_regex": false}]}),
                "its pre-tokenizer Split does not keep what it matches",
            ),
            (
                "/pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Punctuation"}]}),
                "its pre-tokenizer does not end with ByteLevel",
            ),
            ("/model/vocab/!", json!(1 << 20), "not a whole number below 2^20"),
            ("/model/vocab", json!({"a": 0}), "255 of the 256 bytes have no token"),
        ] {
            let mut file = file();
            *file.pointer_mut(pointer).unwrap() = value;
            let error = open(&file).err().expect("refused");
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains(why), "{cause}");
        }
    }
}
