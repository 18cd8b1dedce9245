//! Tokenizers of models. Invariant: a sequence is normalized before it is encoded, so the tokens do not depend on case, gaps or
//! line breaks; a sequence of another alphabet is refused.

use crate::{ModelError, RuntimeError, SequenceError};
use plimsoll_data::alphabet::{Alphabet, Normalized, unknown_refusal};
use plimsoll_data::tokenize::{bpe::Bpe, esm};
use plimsoll_data::train::Vocabulary;
use std::sync::Arc;

/// The tokenizer of a model.
#[derive(Clone)]
pub enum Tokenizer {
    /// One token per residue, with ESM-2's alphabet.
    Esm,
    /// Byte-pair encoding, read from a tokenizer.json.
    Bpe(Arc<Bpe>),
    /// The tokenizer of a language model: bytes, or a tokenizer.json.
    Text(Arc<Vocabulary>),
}

impl Tokenizer {
    /// Alphabet of the sequences that the tokenizer encodes; `None` for any text.
    pub fn alphabet(&self) -> Option<Alphabet> {
        match self {
            Self::Esm => Some(Alphabet::AminoAcids),
            Self::Bpe(_) => Some(Alphabet::Nucleotides),
            Self::Text(_) => None,
        }
    }

    /// Letters of a sequence that are encoded: a protein's `*` at the end, which marks the stop codon, is left out.
    pub fn letters<'a>(&self, sequence: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Esm => esm::residues(sequence),
            Self::Bpe(_) | Self::Text(_) => sequence,
        }
    }

    /// Brings a sequence into the form in which the model reads it (see [`Alphabet::normalize`]); text stays as it is.
    pub fn normalize(&self, sequence: &mut Vec<u8>) -> Normalized {
        self.alphabet().map(|alphabet| alphabet.normalize(sequence)).unwrap_or_default()
    }

    /// Number of special tokens that [`Tokenizer::encode`] adds to every sequence.
    pub fn special_tokens(&self) -> usize {
        match self {
            Self::Esm | Self::Bpe(_) => 2,
            Self::Text(vocabulary) => vocabulary.frame().iter().flatten().count(),
        }
    }

    /// Appends the tokens of a sequence to `tokens` and returns the number of unknown tokens among them.
    pub fn encode(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Result<usize, RuntimeError> {
        match self {
            Self::Esm => Ok(esm::encode(sequence, tokens)),
            Self::Bpe(bpe) => Ok(bpe.encode(sequence, tokens)?),
            Self::Text(vocabulary) => Ok(vocabulary.encode(sequence, tokens)?),
        }
    }

    /// Normalizes a sequence, appends its tokens to `tokens`, and returns the number of unknown tokens among them. White space,
    /// digits and gaps between letters are dropped. Errors name the sequence by its `position`.
    ///
    /// # Errors
    /// [`SequenceError`]: no letters, letters of another alphabet, or more than half of the tokens unknown.
    pub fn encode_sequence(
        &self,
        position: u64,
        letters: &[u8],
        tokens: &mut Vec<i32>,
    ) -> Result<usize, RuntimeError> {
        let refused = |source| RuntimeError::Sequence { position, source };
        let mut letters = letters.to_vec();
        self.normalize(&mut letters);
        if self.letters(&letters).is_empty() {
            return Err(refused(SequenceError::Empty));
        }
        if let Some(reason) = self.alphabet().and_then(|alphabet| alphabet.refusal(&letters)) {
            return Err(refused(SequenceError::Unsuitable { reason }));
        }
        let before = tokens.len();
        let unknown = self.encode(&letters, tokens)?;
        let letter_tokens = (tokens.len() - before).saturating_sub(self.special_tokens());
        match unknown_refusal(unknown, letter_tokens) {
            Some(reason) => Err(refused(SequenceError::Unsuitable { reason })),
            None => Ok(unknown),
        }
    }

    /// Maximum number of tokens of a sequence of `letters` bytes, start and end token included.
    pub fn most_tokens(&self, letters: u64) -> u64 {
        match self {
            Self::Esm | Self::Bpe(_) => letters + 2,
            Self::Text(vocabulary) => vocabulary.most_tokens(letters as usize) as u64,
        }
    }

    /// Number of tokens that the tokenizer knows; all ids are below it.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Esm => esm::VOCAB,
            Self::Bpe(bpe) => bpe.vocab_size(),
            Self::Text(vocabulary) => vocabulary.size(),
        }
    }

    /// Checks that a model with `rows` rows in its embedding table has a row for every token.
    pub(super) fn fits(&self, name: &str, rows: u64) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        let tokens = self.vocab_size();
        if tokens as u64 > rows { Err(ModelError::Tokenizer { name, tokens, rows }.into()) } else { Ok(()) }
    }
}
