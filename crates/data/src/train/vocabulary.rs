//! Tokenizers for training behind one interface. Invariant: all ids are below [`Vocabulary::size`]; start, end and mask
//! tokens are added only by the program, so text that spells a special token is not encoded as that token.

use super::byte_pairs::{BytePairs, TextFrame};
use super::settings::{DatasetFormat, DatasetSettings, IdWidth, TokenizerKind};
use crate::tokenize::{Bpe, BpeKind, esm};
use crate::{DataError, DataErrorKind};

/// Name of the mask token in the `tokenizer.json` of a DNA model.
const MASK: &str = "[MASK]";

/// An open tokenizer and the roles of its ids: start and end tokens, mask token, ordinary tokens.
pub struct Vocabulary {
    kind: VocabularyKind,
    size: usize,
    /// The start and end token of a sequence.
    frame: [Option<i32>; 2],
    mask: Option<i32>,
    /// The ids of ordinary (not special) tokens, ascending.
    ordinary: Vec<i32>,
    /// Tokens before and after every text; empty for training documents.
    around: TextFrame,
}

enum VocabularyKind {
    Bytes,
    Esm,
    Dna(Box<Bpe>),
    BytePairs(Box<BytePairs>),
    Ids(IdWidth),
}

impl Vocabulary {
    /// Opens the tokenizer that the settings name.
    ///
    /// # Errors
    /// A tokenizer file that cannot be read or is not supported; an end-of-document token that it does not define.
    pub fn open(settings: &DatasetSettings) -> Result<Self, DataError> {
        let width = match settings.format {
            DatasetFormat::Ids { width, .. } => width,
            DatasetFormat::Text(_) | DatasetFormat::JsonLines { .. } | DatasetFormat::Sequences => IdWidth::U16,
        };
        Self::of(&settings.tokens, width)
    }

    /// Opens a tokenizer; `width` is that of stored ids.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::open`].
    pub fn of(tokens: &TokenizerKind, width: IdWidth) -> Result<Self, DataError> {
        match tokens {
            TokenizerKind::Bytes { end } => {
                let last = end.then_some(256);
                Ok(Self::new(VocabularyKind::Bytes, 256 + usize::from(*end), [None, last], None, |id| id < 256))
            }
            TokenizerKind::Esm => Ok(Self::new(
                VocabularyKind::Esm,
                esm::VOCAB,
                [Some(esm::CLS), Some(esm::EOS)],
                Some(esm::MASK),
                |id| esm::letter(id).is_some(),
            )),
            TokenizerKind::Dna(path) => Self::dna(Bpe::from_file(path)?),
            TokenizerKind::BytePairs { file, end } => {
                let pairs = BytePairs::from_file(file)?;
                let last = end.as_deref().map(|name| pairs.special(name, file)).transpose()?;
                let size = pairs.size();
                let special = pairs.specials().to_vec();
                let kind = VocabularyKind::BytePairs(Box::new(pairs));
                Ok(Self::new(kind, size, [None, last], None, |id| !special.contains(&id)))
            }
            TokenizerKind::Ids { vocab } => {
                Ok(Self::new(VocabularyKind::Ids(width), *vocab, [None; 2], None, |_| true))
            }
        }
    }

    fn dna(bpe: Bpe) -> Result<Self, DataError> {
        let size = bpe.vocab_size();
        let frame = ["[CLS]", "[SEP]"].map(|name| id_of(&bpe, name));
        let mask = id_of(&bpe, MASK);
        // Ordinary tokens consist of nucleotide letters; special tokens have names in brackets, such as `[PAD]`.
        let ids = 0..size as i32;
        let ordinary: Vec<i32> =
            ids.filter(|&id| bpe.token(id).is_some_and(|token| !token.starts_with('['))).collect();
        let around = TextFrame::default();
        Ok(Vocabulary { kind: VocabularyKind::Dna(Box::new(bpe)), size, frame, mask, ordinary, around })
    }

    fn new(
        kind: VocabularyKind,
        size: usize,
        frame: [Option<i32>; 2],
        mask: Option<i32>,
        ordinary: impl Fn(i32) -> bool,
    ) -> Self {
        let ordinary = (0..size as i32).filter(|&id| ordinary(id)).collect();
        Vocabulary { kind, size, frame, mask, ordinary, around: TextFrame::default() }
    }

    /// Makes the tokenizer enclose every text in the tokens of the file's post-processor, such as `<|begin_of_text|>`,
    /// as inputs of the model are. Documents of a training run are encoded without them.
    pub fn framed(mut self) -> Self {
        if let VocabularyKind::BytePairs(pairs) = &self.kind {
            self.around = pairs.frame().clone();
            let last = self.around.before.iter().chain(&self.around.after).max();
            self.size = self.size.max(last.map_or(0, |&id| id as usize + 1));
        }
        self
    }

    /// Vocabulary size; all ids are below it.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The start and end token of a sequence, `None` where the tokenizer does not add one.
    pub fn frame(&self) -> [Option<i32>; 2] {
        self.frame
    }

    /// The id of the mask token, if the tokenizer has one.
    pub fn mask(&self) -> Option<i32> {
        self.mask
    }

    /// The ids of the ordinary (not special) tokens, ascending.
    pub fn ordinary(&self) -> &[i32] {
        &self.ordinary
    }

    /// Appends the tokens of a document, enclosed in the start and end token of [`Vocabulary::frame`]. Returns the
    /// number of unknown tokens.
    ///
    /// # Errors
    /// A document that is not valid input of the tokenizer, for example text that is not UTF-8.
    pub fn encode(&self, document: &[u8], tokens: &mut Vec<i32>) -> Result<usize, DataError> {
        match &self.kind {
            VocabularyKind::Bytes => {
                tokens.extend(document.iter().map(|&b| i32::from(b)));
                tokens.extend(self.frame[1]);
                Ok(0)
            }
            VocabularyKind::Esm => Ok(esm::encode(document, tokens)),
            VocabularyKind::Dna(bpe) => bpe.encode(document, tokens),
            VocabularyKind::BytePairs(pairs) => {
                tokens.extend(&self.around.before);
                let unknown = pairs.encode(document, tokens)?;
                tokens.extend(&self.around.after);
                tokens.extend(self.frame[1]);
                Ok(unknown)
            }
            VocabularyKind::Ids(width) => {
                self.check(document)?;
                tokens.extend(ids(document, *width));
                Ok(0)
            }
        }
    }

    /// Maximum number of tokens, start and end token included, of a document of `bytes` bytes.
    pub fn most_tokens(&self, bytes: usize) -> usize {
        match &self.kind {
            VocabularyKind::Bytes | VocabularyKind::Esm => bytes + 2,
            VocabularyKind::BytePairs(pairs) => {
                pairs.most_tokens(bytes) + 2 + self.around.before.len() + self.around.after.len()
            }
            // `tokenize::bpe` rejects tokenizer files that yield more than three tokens per byte.
            VocabularyKind::Dna(_) => 3 * bytes + 2,
            VocabularyKind::Ids(width) => bytes / width.bytes(),
        }
    }

    /// Upper bound in bytes of the encoder's working memory in one worker for documents of at most `longest` bytes,
    /// apart from the output tokens.
    pub(super) fn scratch(&self, longest: usize) -> u64 {
        match &self.kind {
            VocabularyKind::Bytes | VocabularyKind::Esm | VocabularyKind::Ids(_) => 0,
            VocabularyKind::Dna(bpe) => match bpe.kind() {
                BpeKind::Tables => 0,
                BpeKind::Library(_) => super::byte_pairs::library_scratch(longest),
            },
            VocabularyKind::BytePairs(pairs) => pairs.scratch(longest),
        }
    }

    /// Checks a document without tokenizing it: text for UTF-8 where the tokenizer requires it, and ids for the
    /// vocabulary size. Errors that only tokenization finds are not reported here.
    pub(super) fn check(&self, document: &[u8]) -> Result<(), DataError> {
        match &self.kind {
            VocabularyKind::Bytes | VocabularyKind::Esm | VocabularyKind::Dna(_) => Ok(()),
            VocabularyKind::BytePairs(_) => super::byte_pairs::text(document).map(drop),
            VocabularyKind::Ids(width) => {
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

/// The id of a token of a byte-pair encoding.
fn id_of(bpe: &Bpe, token: &str) -> Option<i32> {
    (0..bpe.vocab_size() as i32).find(|&id| bpe.token(id).as_deref() == Some(token))
}

/// Decodes the little-endian ids of a document. An id of 2^31 or more becomes negative, which [`Vocabulary::check`]
/// rejects.
fn ids(document: &[u8], width: IdWidth) -> impl Iterator<Item = i32> {
    document.chunks_exact(width.bytes()).map(|id| id.iter().rev().fold(0, |word, &b| word << 8 | i32::from(b)))
}
