//! Extracts the merge rules over at most four letters from a `tokenizer.json`. Invariant: the rules describe a file
//! that [`MergeRules::read`] accepts completely; for any other file it returns the reason.
//!
//! Pieces are numbered in the order of their creation: the letters, then the product of each merge by rank. A piece
//! with a smaller number is therefore merged earlier.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// Maximum number of pieces; the table of neighbours then has 8 MiB.
const MAX_PIECES: usize = 8192;
/// Maximum number of letters, which are encoded with two bits each.
const MAX_LETTERS: usize = 4;

/// The merge rules of a file and the ids around them.
pub(super) struct MergeRules {
    /// The letters of the alphabet in ascending order; they are the first pieces.
    pub letters: Vec<u8>,
    /// Left and right part of each further piece; both have smaller numbers than the piece.
    pub merges: Vec<(u16, u16)>,
    /// Text of every piece.
    pub texts: Vec<Vec<u8>>,
    /// Token id of every piece.
    pub ids: Vec<i32>,
    /// Ids of `[CLS]` and `[SEP]`.
    pub ends: [i32; 2],
    /// Id of the unknown token, for every character that is neither a letter nor whitespace.
    pub unknown: i32,
    /// First bytes of the added tokens (`[MASK]`).
    pub markup: Vec<u8>,
}

/// The merges as the `tokenizers` crate serializes them: in the order of ranks, each pair once.
#[derive(Deserialize)]
struct Merges {
    merges: Vec<(String, String)>,
}

/// The fields of the post-processor that apply to a single sequence.
#[derive(Deserialize)]
struct SingleTemplate {
    single: serde_json::Value,
    special_tokens: HashMap<String, SpecialToken>,
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl MergeRules {
    /// Reads the rules of a tokenizer without truncation and padding. Errors with the reason if they cannot represent
    /// it.
    pub(super) fn read(tokenizer: &Tokenizer, model: &BPE) -> Result<MergeRules, &'static str> {
        check_frame(tokenizer, model)?;
        let vocab = model.get_vocab();
        if vocab.values().collect::<HashSet<_>>().len() != vocab.len() {
            return Err("two tokens share an id");
        }
        let id = |token: &str| vocab.get(token).map(|id| id.cast_signed());
        let letters = letters(vocab.keys())?;
        let unknown = model.unk_token.as_deref().and_then(id).ok_or("it has no token for the unknown")?;
        let mut rules = MergeRules {
            texts: letters.iter().map(|&b| vec![b]).collect(),
            ids: letters.iter().filter_map(|&b| id(char::from(b).encode_utf8(&mut [0; 4]))).collect(),
            merges: Vec::new(),
            ends: ends(tokenizer)?,
            markup: markup(tokenizer, &letters)?,
            unknown,
            letters,
        };
        rules.add_merges(model, id)?;
        if rules.ids.contains(&unknown) || rules.ends.contains(&unknown) {
            return Err("the token for the unknown stands for something else too");
        }
        Ok(rules)
    }

    /// Appends the product of each merge as a piece.
    fn add_merges(&mut self, model: &BPE, id: impl Fn(&str) -> Option<i32>) -> Result<(), &'static str> {
        let text = serde_json::to_vec(model).map_err(|_| "its merges cannot be read")?;
        let Merges { merges } = serde_json::from_slice(&text).map_err(|_| "its merges cannot be read")?;
        if self.letters.len() + merges.len() > MAX_PIECES {
            return Err("it has more than 8192 pieces");
        }
        let letters = self.letters.iter().zip(0_u16..);
        let mut known: HashMap<String, u16> =
            letters.map(|(&letter, piece)| (char::from(letter).to_string(), piece)).collect();
        for (left, right) in merges {
            let parts = known.get(&left).copied().zip(known.get(&right).copied());
            let parts = parts.ok_or("a merge comes before its parts are made")?;
            let token = left + &right;
            let id = id(&token).ok_or("a merge does not produce a token")?;
            self.merges.push(parts);
            self.texts.push(token.clone().into_bytes());
            self.ids.push(id);
            // The cast is lossless: there are at most `MAX_PIECES` pieces.
            if known.insert(token, (self.ids.len() - 1) as u16).is_some() {
                return Err("two merges make the same token");
            }
        }
        Ok(())
    }
}

/// Errors if a setting other than the merges differs from DNABERT-S.
fn check_frame(tokenizer: &Tokenizer, model: &BPE) -> Result<(), &'static str> {
    let prefix = model.continuing_subword_prefix.is_some() || model.end_of_word_suffix.is_some();
    let whitespace = matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::Whitespace(_)));
    let checks = [
        (tokenizer.get_normalizer().is_some(), "it has a normalizer"),
        (!whitespace, "its pre-tokenizer is not Whitespace"),
        (prefix, "its pieces of words have a prefix or a suffix"),
        (model.fuse_unk, "it fuses unknown characters (fuse_unk)"),
        (model.byte_fallback, "it falls back to bytes (byte_fallback)"),
        (model.ignore_merges, "it takes whole words before merges (ignore_merges)"),
    ];
    checks.into_iter().find(|(differs, _)| *differs).map_or(Ok(()), |(_, why)| Err(why))
}

/// Returns the letters of the alphabet: the tokens of one character, sorted. Errors unless they are one to four ASCII
/// letters or digits.
fn letters<'a>(tokens: impl Iterator<Item = &'a String>) -> Result<Vec<u8>, &'static str> {
    let mut letters = Vec::new();
    for token in tokens.filter(|token| token.chars().count() == 1) {
        match token.as_bytes() {
            // The pre-tokenizer never splits between two ASCII letters or digits.
            [letter] if letter.is_ascii_alphanumeric() => letters.push(*letter),
            _ => return Err("a character of its alphabet is not an ASCII letter"),
        }
    }
    letters.sort_unstable();
    match letters.len() {
        1..=MAX_LETTERS => Ok(letters),
        _ => Err("its alphabet has not one to four letters"),
    }
}

/// Returns the ids of the tokens that the post-processor puts before and after a sequence; errors unless it is the
/// template of one special token, the sequence, and one special token.
fn ends(tokenizer: &Tokenizer) -> Result<[i32; 2], &'static str> {
    const WHY: &str = "its post-processor is not the template [CLS] A [SEP]";
    let template = tokenizer.get_post_processor().and_then(|p| serde_json::to_value(p).ok()).ok_or(WHY)?;
    let SingleTemplate { single, special_tokens } = serde_json::from_value(template).map_err(|_| WHY)?;
    if single.as_array().map(Vec::len) != Some(3) || single[1]["Sequence"]["id"] != "A" {
        return Err(WHY);
    }
    let [cls, sep] = [&single[0], &single[2]].map(|piece| {
        match special_tokens.get(piece["SpecialToken"]["id"].as_str()?)?.ids[..] {
            [id] => Some(id.cast_signed()),
            _ => None,
        }
    });
    cls.zip(sep).map(|(cls, sep)| [cls, sep]).ok_or(WHY)
}

/// Returns the first bytes of the added tokens, which are searched in the text before it is split into words. Errors if
/// an added token starts with a letter of the alphabet or a non-ASCII byte.
fn markup(tokenizer: &Tokenizer, letters: &[u8]) -> Result<Vec<u8>, &'static str> {
    let mut firsts = Vec::new();
    for token in tokenizer.get_added_tokens_decoder().values() {
        match token.content.as_bytes() {
            [] => {}
            [first, ..] if first.is_ascii() && !letters.contains(first) => firsts.push(*first),
            _ => return Err("an added token starts like a sequence"),
        }
    }
    Ok(firsts)
}
