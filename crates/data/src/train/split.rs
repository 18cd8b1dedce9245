//! Assignment of documents to the training or validation split. Invariant: the split depends only on the content of
//! the document and the split's seed, so identical documents are always in the same split.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use super::settings::{DatasetFormat, Validation};

/// Split of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training documents.
    Train,
    /// Validation documents.
    Validation,
}

/// Assigns documents to splits by a hash of their content.
#[derive(Debug)]
pub(super) struct DocumentSplitter {
    /// Documents with a hash below this value belong to the validation split.
    below: u64,
    seed: u64,
    /// Whether sequences that differ only in letter case are identical, which they are for some models.
    ignores_case: bool,
    /// Hashes of the validation documents that also occur in the training files.
    dropped: HashSet<u64>,
}

impl DocumentSplitter {
    pub(super) fn new(validation: &Validation, format: &DatasetFormat) -> Self {
        let (fraction, seed) = match *validation {
            Validation::Fraction { fraction, seed } => (fraction, seed),
            Validation::None | Validation::Files(_) => (0.0, 0),
        };
        // The constant is exactly 2^64. The fraction is below 1, so the product is below 2^64 and the cast truncates.
        let below = (fraction * 18_446_744_073_709_551_616.0) as u64;
        DocumentSplitter {
            below,
            seed,
            ignores_case: *format == DatasetFormat::Sequences,
            dropped: HashSet::new(),
        }
    }

    /// Content hash of a document: the first eight bytes of the SHA-256 of seed and document. Among `n` different
    /// documents a collision has probability of about n^2 / 2^65; colliding documents are treated as identical.
    pub(super) fn hash(&self, document: &[u8]) -> u64 {
        let mut hash = Sha256::new();
        hash.update(self.seed.to_le_bytes());
        if self.ignores_case {
            document.chunks(4096).for_each(|part| {
                let mut upper = [0; 4096];
                let upper = &mut upper[..part.len()];
                upper.copy_from_slice(part);
                upper.make_ascii_uppercase();
                hash.update(upper);
            })
        } else {
            hash.update(document)
        }
        let digest: [u8; 32] = hash.finalize().into();
        digest.iter().take(8).fold(0, |word, &byte| word << 8 | u64::from(byte))
    }

    /// The split of a document of the training files, given its hash.
    pub(super) fn side(&self, hash: u64) -> Split {
        if hash < self.below { Split::Validation } else { Split::Train }
    }

    /// Excludes the documents with these hashes from the validation files.
    pub(super) fn drop_from_validation(&mut self, hashes: HashSet<u64>) {
        self.dropped = hashes;
    }

    /// Whether a document of the validation files was excluded because it also occurs in the training files.
    pub(super) fn is_dropped(&self, hash: u64) -> bool {
        self.dropped.contains(&hash)
    }

    /// Estimated heap size in bytes.
    pub(super) fn bytes(&self) -> u64 {
        // `capacity` does not count the empty buckets of the hash table, hence the factor of two; each bucket has one
        // control byte.
        2 * (self.dropped.capacity() * (size_of::<u64>() + 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splitter(fraction: f64, seed: u64, format: &DatasetFormat) -> DocumentSplitter {
        DocumentSplitter::new(&Validation::Fraction { fraction, seed }, format)
    }

    fn validated(fraction: f64, seed: u64) -> Vec<bool> {
        let split = splitter(fraction, seed, &DatasetFormat::JsonLines { field: "text".into() });
        let side = |i: u32| split.side(split.hash(format!("document {i}").as_bytes()));
        (0..20_000).map(|i| side(i) == Split::Validation).collect()
    }

    #[test]
    fn about_the_fraction_is_validated_on() {
        let count = |sides: Vec<bool>| sides.into_iter().filter(|&v| v).count();
        assert!((900..1100).contains(&count(validated(0.05, 0))));
        assert!((9_700..10_300).contains(&count(validated(0.5, 1))));
        assert_ne!(validated(0.5, 1), validated(0.5, 2));
    }

    #[test]
    fn sequences_are_the_same_in_any_case() {
        let sequences = splitter(0.5, 0, &DatasetFormat::Sequences);
        let long: Vec<u8> = b"ACGTn".repeat(2000);
        assert_eq!(sequences.hash(&long), sequences.hash(&long.to_ascii_lowercase()));
        let lines = splitter(0.5, 0, &DatasetFormat::Text(super::super::TextDocuments::Lines));
        assert_ne!(lines.hash(b"a"), lines.hash(b"A"));
        assert_eq!(lines.hash(b"A"), sequences.hash(b"a"));
    }
}
