//! DNABERT-S's byte-pair encoding (BPE), read from the model's `tokenizer.json`. Invariant: for every input, both
//! encoders return the token ids of the `tokenizers` crate, independent of earlier calls and of the thread, and no
//! sequence is truncated or padded.
//!
//! The crate `tokenizers` parses the file and is one of two encoders. The other is this module's `dna`, which is twenty
//! times as fast and supports only files with merges over at most four letters, such as DNABERT's. The file alone
//! decides which encoder is used; [`Bpe::kind`] returns it.

mod dna;
mod file;
mod neighbours;
mod rules;

use std::path::Path;

use tokenizers::{ModelWrapper, Tokenizer};

use crate::bounded;
use crate::printable::Name;
use crate::{DataError, DataErrorKind};
use dna::Dna;
pub(crate) use file::makes_token;
use rules::MergeRules;

/// Maximum size of a `tokenizer.json` in bytes; a file with a vocabulary of a million tokens is smaller.
pub const LARGEST: u64 = 64 << 20;

/// A BPE tokenizer for DNA. It can be shared between threads; encoding starts no threads.
pub struct Bpe {
    tokenizer: Tokenizer,
    /// The table-based encoder, or the reason why it does not support the file.
    own: Result<Dna, &'static str>,
    /// Largest token id plus one.
    vocab: usize,
    /// Id of the unknown token.
    unknown: Option<i32>,
}

/// Encoder that a [`Bpe`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpeKind {
    /// The lookup tables of this crate. A sequence that contains the first character of an added token (the `[` of
    /// `[MASK]`) is still encoded by the `tokenizers` crate, because only that crate searches for added tokens.
    Tables,
    /// The `tokenizers` crate; holds the reason why the tables do not support the file.
    Library(&'static str),
}

impl Bpe {
    /// Creates a tokenizer from the content of a `tokenizer.json`; errors name `path`.
    ///
    /// The truncation and the padding of the published file (to 2000 tokens each) are removed: they are settings of the
    /// authors' training, not of the model. Components that no DNA tokenizer needs (regular expressions, normalizers
    /// that lengthen the text) are errors. The crate's cache of whole words is disabled: a DNA read is one word and
    /// seldom occurs twice, so the cache would use megabytes per thread without benefit.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        let bytes = file::checked(bytes).map_err(|why| refused(path, why))?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|why| refused(path, why))?;
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err(refused(path, "its model is not of the type BPE".into()));
        };
        if model.dropout.is_some_and(|p| p != 0.0) {
            return Err(refused(path, "it drops merges at random (dropout); set dropout to null".into()));
        }
        let mut model = model.clone();
        model.resize_cache(0);
        let unknown = model.unk_token.as_deref().and_then(|t| tokenizer.token_to_id(t));
        let own = MergeRules::read(&tokenizer, &model).and_then(|rules| Dna::new(&rules));
        tokenizer.with_model(model);
        let vocab = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let unknown = unknown.map(u32::cast_signed);
        let new = Bpe { tokenizer, own, vocab, unknown };
        new.check_ends().map_err(|why| refused(path, why))?;
        Ok(new)
    }

    /// Reads a tokenizer from the `tokenizer.json` at `path`; errors if the file is larger than [`LARGEST`].
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let bytes = bounded::read(path, LARGEST).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        Self::from_bytes(&bytes, path)
    }

    /// Returns the encoder that is used, which depends on the file alone.
    pub fn kind(&self) -> BpeKind {
        match &self.own {
            Ok(_) => BpeKind::Tables,
            Err(why) => BpeKind::Library(why),
        }
    }

    /// Returns the largest token id plus one. The model's embedding table must have at least this number of rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// Returns the text of a token id; `None` if no token has this id.
    pub fn token(&self, id: i32) -> Option<String> {
        self.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Appends the token ids of `sequence` to `tokens`, including `[CLS]` and `[SEP]`, and returns the number of
    /// unknown tokens among them. Encoding is case-sensitive, as it is for the model: with the published vocabulary
    /// lower-case letters are unknown. Bytes that are not valid UTF-8 are unknown too.
    pub fn encode(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Result<usize, DataError> {
        if let Ok(own) = &self.own
            && let Some(unknown) = own.encode(sequence, tokens)
        {
            return Ok(unknown);
        }
        self.encode_by_library(sequence, tokens)
    }

    fn encode_by_library(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Result<usize, DataError> {
        let text = String::from_utf8_lossy(sequence);
        // `encode_fast` does not compute the offsets of tokens in the text, which are not needed.
        let encoding = self
            .tokenizer
            .encode_fast(text.as_ref(), true)
            .map_err(|e| DataError::new(DataErrorKind::Tokenizer(e)))?;
        let before = tokens.len();
        tokens.extend(encoding.get_ids().iter().map(|&id| id.cast_signed()));
        let unknown = tokens[before..].iter().filter(|&&t| Some(t) == self.unknown).count();
        Ok(unknown)
    }

    /// Errors unless the empty sequence is encoded as `[CLS] [SEP]`. A DNABERT-S embedding is the mean over all tokens,
    /// including these two, so a tokenizer without them would change every embedding.
    fn check_ends(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let ends = ["[CLS]", "[SEP]"].map(|name| self.tokenizer.token_to_id(name));
        let empty = self.tokenizer.encode_fast("", true)?;
        let found: Vec<Option<u32>> = empty.get_ids().iter().map(|&id| Some(id)).collect();
        if found == ends {
            Ok(())
        } else {
            Err("it does not put [CLS] before and [SEP] after a sequence".into())
        }
    }
}

/// The error for a tokenizer file at `path`. The crate's messages quote the file, which is untrusted text: `Name` makes it
/// printable.
fn refused(path: &Path, why: file::BpeRefusal) -> DataError {
    DataError::at(path, DataErrorKind::Tokenizer(Name(&why.to_string()).to_string().into()))
}

#[cfg(test)]
mod tests;
