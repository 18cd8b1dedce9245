//! Documents to token ids for training, whatever the tokenizer. Invariant: all ids are below
//! [`Vocabulary::size`]; the special tokens stand at the ends of a document and nowhere else, so that text
//! cannot make one.

use super::byte_pairs::BytePairs;
use super::settings::{Format, IdWidth, Settings, Tokens};
use crate::tokenize::{Bpe, BpeKind, esm};
use crate::{DataError, DataErrorKind};

/// What masked models call a masked token, in a `tokenizer.json` for DNA.
const MASK: &str = "[MASK]";

/// An open tokenizer, and what training must know of its ids.
pub struct Vocabulary {
    kind: Kind,
    size: usize,
    /// The ids before and after the tokens of a sequence.
    frame: [Option<i32>; 2],
    mask: Option<i32>,
    /// The ids that are not special, ascending.
    ordinary: Vec<i32>,
}

enum Kind {
    Bytes,
    Esm,
    Dna(Box<Bpe>),
    BytePairs(Box<BytePairs>),
    Ids(IdWidth),
}

impl Vocabulary {
    /// Opens what the settings name.
    pub fn open(settings: &Settings) -> Result<Self, DataError> {
        match &settings.tokens {
            Tokens::Bytes { end } => {
                let last = end.then_some(256);
                Ok(Self::new(Kind::Bytes, 256 + usize::from(*end), [None, last], None, |id| id < 256))
            }
            Tokens::Esm => {
                let letter = |id| esm::letter(id).is_some();
                Ok(Self::new(Kind::Esm, esm::VOCAB, [Some(esm::CLS), Some(esm::EOS)], Some(esm::MASK), letter))
            }
            Tokens::Dna(path) => Self::dna(Bpe::from_file(path)?),
            Tokens::BytePairs { file, end } => {
                let pairs = BytePairs::from_file(file)?;
                let last = end.as_deref().map(|name| pairs.special(name, file)).transpose()?;
                let (size, special) = (pairs.size(), pairs.specials().to_vec());
                let kind = Kind::BytePairs(Box::new(pairs));
                Ok(Self::new(kind, size, [None, last], None, |id| !special.contains(&id)))
            }
            Tokens::Ids { vocab } => {
                let width = match settings.format {
                    Format::Ids { width, .. } => width,
                    Format::Text(_) | Format::JsonLines { .. } | Format::Sequences => IdWidth::U16,
                };
                Ok(Self::new(Kind::Ids(width), *vocab, [None; 2], None, |_| true))
            }
        }
    }

    fn dna(bpe: Bpe) -> Result<Self, DataError> {
        let size = bpe.vocab_size();
        let id_of = |name: &str| (0..size as i32).find(|&id| bpe.token(id).as_deref() == Some(name));
        let frame = ["[CLS]", "[SEP]"].map(id_of);
        let mask = id_of(MASK);
        // The pieces are letters; a name in brackets is none.
        let ordinary = |id: i32| bpe.token(id).is_some_and(|token| !token.starts_with('['));
        let ordinary: Vec<i32> = (0..size as i32).filter(|&id| ordinary(id)).collect();
        Ok(Vocabulary { kind: Kind::Dna(Box::new(bpe)), size, frame, mask, ordinary })
    }

    fn new(
        kind: Kind,
        size: usize,
        frame: [Option<i32>; 2],
        mask: Option<i32>,
        ordinary: impl Fn(i32) -> bool,
    ) -> Self {
        let ordinary = (0..size as i32).filter(|&id| ordinary(id)).collect();
        Vocabulary { kind, size, frame, mask, ordinary }
    }

    /// The ids that occur are less than this.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The ids before and after the tokens of a sequence, where the tokenizer has such.
    pub fn frame(&self) -> [Option<i32>; 2] {
        self.frame
    }

    /// The id of a masked token, where the tokenizer has one.
    pub fn mask(&self) -> Option<i32> {
        self.mask
    }

    /// The ids that are not special, ascending.
    pub fn ordinary(&self) -> &[i32] {
        &self.ordinary
    }

    /// Appends the tokens of a document with the [`Vocabulary::frame`] around them; how many of them the
    /// vocabulary does not know.
    pub fn encode(&self, document: &[u8], tokens: &mut Vec<i32>) -> Result<usize, DataError> {
        match &self.kind {
            Kind::Bytes => {
                tokens.extend(document.iter().map(|&b| i32::from(b)));
                tokens.extend(self.frame[1]);
                Ok(0)
            }
            Kind::Esm => Ok(esm::encode(document, tokens)),
            Kind::Dna(bpe) => bpe.encode(document, tokens),
            Kind::BytePairs(pairs) => {
                let unknown = pairs.encode(document, tokens)?;
                tokens.extend(self.frame[1]);
                Ok(unknown)
            }
            Kind::Ids(width) => {
                self.check(document)?;
                tokens.extend(ids(document, *width));
                Ok(0)
            }
        }
    }

    /// The tokens that a document of so many bytes has at most.
    pub(super) fn most_tokens(&self, bytes: usize) -> usize {
        match &self.kind {
            Kind::Bytes | Kind::Esm => bytes + 2,
            Kind::BytePairs(pairs) => pairs.most_tokens(bytes) + 2,
            // `tokenize::bpe` refuses files that give more.
            Kind::Dna(_) => 3 * bytes + 2,
            Kind::Ids(width) => bytes / width.bytes(),
        }
    }

    /// Bytes that the encoder of one worker may hold for a document of `longest` bytes, beside its tokens.
    pub(super) fn scratch(&self, longest: usize) -> u64 {
        match &self.kind {
            Kind::Bytes | Kind::Esm | Kind::Ids(_) => 0,
            Kind::Dna(bpe) => match bpe.kind() {
                BpeKind::Tables => 0,
                BpeKind::Library(_) => super::byte_pairs::library_scratch(longest),
            },
            Kind::BytePairs(pairs) => pairs.scratch(longest),
        }
    }

    /// Refuses a document that has no tokens, as far as that shows without making them.
    pub(super) fn check(&self, document: &[u8]) -> Result<(), DataError> {
        match &self.kind {
            Kind::Bytes | Kind::Esm | Kind::Dna(_) => Ok(()),
            Kind::BytePairs(_) => super::byte_pairs::text(document).map(drop),
            Kind::Ids(width) => {
                match ids(document, *width).find(|&id| usize::try_from(id).map_or(true, |id| id >= self.size)) {
                    None => Ok(()),
                    Some(id) => {
                        let what = format!(
                            "the id {} is not below {}, the size of the vocabulary",
                            id as u32, self.size
                        );
                        Err(DataError::new(DataErrorKind::Malformed(what)))
                    }
                }
            }
        }
    }
}

/// The ids of a document. One of 2^31 or more is negative.
fn ids(document: &[u8], width: IdWidth) -> impl Iterator<Item = i32> {
    document.chunks_exact(width.bytes()).map(|id| id.iter().rev().fold(0, |word, &b| word << 8 | i32::from(b)))
}
