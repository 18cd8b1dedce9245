//! What a `tokenizer.json` says, reduced to merge rules over the four letters of DNA. Invariant: a
//! file that [`Rules::read`] accepts asks for nothing that the rules do not say; the reason stands
//! beside every other file.
//!
//! Pieces are numbered by age: the letters, then what each merge makes, by rank. So "is merged
//! earlier" is "has the smaller number".

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// The most pieces: the table of neighbours is 8 MiB then.
const MOST_PIECES: usize = 8192;
/// The most letters: two bits each.
const MOST_LETTERS: usize = 4;

/// The merge rules of a file and the ids around them.
pub(super) struct Rules {
    /// The letters that are tokens, in no special order; they are the first pieces.
    pub letters: Vec<u8>,
    /// The two parts of each later piece, both older than itself.
    pub merges: Vec<(u16, u16)>,
    /// The letters of every piece.
    pub texts: Vec<Vec<u8>>,
    /// The id of every piece.
    pub ids: Vec<i32>,
    /// `[CLS]` and `[SEP]`.
    pub ends: [i32; 2],
    /// The id of every character that is neither a letter nor a blank.
    pub unknown: i32,
    /// The bytes a token with its own markup (`[MASK]`) starts with.
    pub markup: Vec<u8>,
}

/// The merges as the crate writes them: by rank, each pair once.
#[derive(Deserialize)]
struct Merges {
    merges: Vec<(String, String)>,
}

/// The part of the post-processor that matters to a single sequence.
#[derive(Deserialize)]
struct Ends {
    single: serde_json::Value,
    special_tokens: HashMap<String, SpecialToken>,
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl Rules {
    /// The rules of a tokenizer without truncation and padding; why there are none, if so.
    pub(super) fn read(tokenizer: &Tokenizer, model: &BPE) -> Result<Rules, &'static str> {
        check_frame(tokenizer, model)?;
        let vocab = model.get_vocab();
        if vocab.values().collect::<HashSet<_>>().len() != vocab.len() {
            return Err("two tokens share an id");
        }
        let id = |token: &str| vocab.get(token).map(|id| id.cast_signed());
        let letters = letters(vocab.keys())?;
        let unknown = model.unk_token.as_deref().and_then(id).ok_or("it has no token for the unknown")?;
        let mut rules = Rules {
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

    /// Numbers what the merges make.
    fn add_merges(&mut self, model: &BPE, id: impl Fn(&str) -> Option<i32>) -> Result<(), &'static str> {
        let text = serde_json::to_vec(model).map_err(|_| "its merges cannot be read")?;
        let Merges { merges } = serde_json::from_slice(&text).map_err(|_| "its merges cannot be read")?;
        if self.letters.len() + merges.len() > MOST_PIECES {
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
            // At most `MOST_PIECES`.
            if known.insert(token, (self.ids.len() - 1) as u16).is_some() {
                return Err("two merges make the same token");
            }
        }
        Ok(())
    }
}

/// Everything around the merges: it must be what DNABERT-S has.
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

/// The tokens of one character.
fn letters<'a>(tokens: impl Iterator<Item = &'a String>) -> Result<Vec<u8>, &'static str> {
    let mut letters = Vec::new();
    for token in tokens.filter(|token| token.chars().count() == 1) {
        match token.as_bytes() {
            // The pre-tokenizer never cuts between two of them.
            [letter] if letter.is_ascii_alphanumeric() => letters.push(*letter),
            _ => return Err("a character of its alphabet is not an ASCII letter"),
        }
    }
    letters.sort_unstable();
    match letters.len() {
        1..=MOST_LETTERS => Ok(letters),
        _ => Err("its alphabet has not one to four letters"),
    }
}

/// `[CLS]` and `[SEP]`, if exactly they stand around a sequence.
fn ends(tokenizer: &Tokenizer) -> Result<[i32; 2], &'static str> {
    const WHY: &str = "its post-processor is not the template [CLS] A [SEP]";
    let template = tokenizer.get_post_processor().and_then(|p| serde_json::to_value(p).ok()).ok_or(WHY)?;
    let Ends { single, special_tokens } = serde_json::from_value(template).map_err(|_| WHY)?;
    let name = |piece: usize, kind: &str| single[piece][kind]["id"].as_str().map(str::to_owned);
    let [cls, a, sep] = [(0, "SpecialToken"), (1, "Sequence"), (2, "SpecialToken")].map(|(i, k)| name(i, k));
    if single.as_array().map(Vec::len) != Some(3) || a.as_deref() != Some("A") {
        return Err(WHY);
    }
    let id = |name: Option<String>| match special_tokens.get(&name?)?.ids[..] {
        [id] => Some(id.cast_signed()),
        _ => None,
    };
    id(cls).zip(id(sep)).map(|(cls, sep)| [cls, sep]).ok_or(WHY)
}

/// The first bytes of the tokens that are found in the text before it is split into words.
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
