//! DNABERT-S's byte-pair encoding, from the model's `tokenizer.json`. Invariant: the ids are those of
//! the `tokenizers` crate for every input, whichever encoder makes them; they do not depend on what
//! was encoded before or on which thread, and no sequence is cut or padded.
//!
//! The crate `tokenizers` parses the file and is one of two encoders. The other is this module's `dna`, which is twenty
//! times as fast and supports only files with merges over at most four letters, as those of DNABERT. The file alone
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
use rules::Rules;

/// Bytes of a tokenizer.json: a vocabulary of a million tokens takes less.
pub const LARGEST: u64 = 64 << 20;

/// A tokenizer for DNA. It can be shared between threads; encoding starts none of its own.
pub struct Bpe {
    tokenizer: Tokenizer,
    own: Result<Dna, &'static str>,
    vocab: usize,
    unknown: Option<i32>,
}

/// Which encoder a [`Bpe`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpeKind {
    /// Our own tables. A sequence with a character that an added token (`[MASK]`) starts with still
    /// goes to the crate, which knows how to find such tokens.
    Tables,
    /// The `tokenizers` crate, for this reason.
    Library(&'static str),
}

impl Bpe {
    /// From the text of a `tokenizer.json`; `path` stands in errors.
    ///
    /// The truncation and the fixed padding that the real file carries (2000 each) are dropped: they
    /// are settings of its authors' training, not of the model. Parts that no tokenizer for DNA needs
    /// (patterns, normalizers that make texts longer) are refused. The crate's cache of whole words is
    /// off: a DNA read is one word and seldom comes twice, so it would cost megabytes on each thread
    /// and save nothing.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        // The crate's messages quote the file.
        let refuse = |e: file::Refusal| {
            DataError::at(path, DataErrorKind::Tokenizer(Name(&e.to_string()).to_string().into()))
        };
        let bytes = file::checked(bytes).map_err(refuse)?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(refuse)?;
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return Err(refuse("its model is not of the type BPE".into()));
        };
        if model.dropout.is_some_and(|p| p != 0.0) {
            return Err(refuse("it drops merges at random (dropout); set dropout to null".into()));
        }
        let mut model = model.clone();
        model.resize_cache(0);
        let unknown = model.unk_token.as_deref().and_then(|t| tokenizer.token_to_id(t));
        let own = Rules::read(&tokenizer, &model).and_then(|rules| Dna::new(&rules));
        tokenizer.with_model(model);
        let vocab = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let unknown = unknown.map(u32::cast_signed);
        let new = Bpe { tokenizer, own, vocab, unknown };
        new.check_ends().map_err(refuse)?;
        Ok(new)
    }

    /// From the file at `path`.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let bytes = bounded::read(path, LARGEST).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        Self::from_bytes(&bytes, path)
    }

    /// The encoder that the file allows.
    pub fn kind(&self) -> BpeKind {
        match &self.own {
            Ok(_) => BpeKind::Tables,
            Err(why) => BpeKind::Library(why),
        }
    }

    /// The ids that occur are less than this: at most the rows of the model's embedding table.
    pub fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// The id of what the vocabulary does not know.
    pub fn unknown_id(&self) -> Option<i32> {
        self.unknown
    }

    /// The text that an id stands for.
    pub fn token(&self, id: i32) -> Option<String> {
        self.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Appends the tokens of `sequence` to `tokens`, `[CLS]` and `[SEP]` included; how many of them
    /// are unknown. Case matters, as it does to the model: lower case is unknown. Bytes that are not
    /// UTF-8 are unknown too.
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
        // `encode_fast` keeps no offsets.
        let encoding = self
            .tokenizer
            .encode_fast(text.as_ref(), true)
            .map_err(|e| DataError::new(DataErrorKind::Tokenizer(e)))?;
        let before = tokens.len();
        tokens.extend(encoding.get_ids().iter().map(|&id| id.cast_signed()));
        let unknown = tokens[before..].iter().filter(|&&t| Some(t) == self.unknown).count();
        Ok(unknown)
    }

    /// The mean over all tokens that a DNABERT-S embedding is contains those of `[CLS]` and `[SEP]`.
    fn check_ends(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let ends = ["[CLS]", "[SEP]"].map(|name| self.tokenizer.token_to_id(name));
        let empty = self.tokenizer.encode_fast("", true)?;
        let found: Vec<Option<u32>> = empty.get_ids().iter().map(|&id| Some(id)).collect();
        match found == ends {
            true => Ok(()),
            false => Err("it does not put [CLS] before and [SEP] after a sequence".into()),
        }
    }
}

#[cfg(test)]
mod tests;
