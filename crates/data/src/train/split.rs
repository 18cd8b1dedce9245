//! Which side a document is on. Invariant: it depends on what is in the document and on nothing else, so equal
//! documents are always on one side.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use super::settings::{Format, Validation};

/// The two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// What is trained on.
    Train,
    /// What is validated on.
    Validation,
}

/// Where documents go.
#[derive(Debug)]
pub(super) struct Splitter {
    /// Hashes below this are validated on.
    below: u64,
    seed: u64,
    /// Sequences are the same in upper and lower case: some models read them so.
    ignores_case: bool,
    /// Of documents in the validation files that are trained on.
    dropped: HashSet<u64>,
}

impl Splitter {
    pub(super) fn new(validation: &Validation, format: &Format) -> Self {
        let (fraction, seed) = match *validation {
            Validation::Fraction { fraction, seed } => (fraction, seed),
            Validation::None | Validation::Files(_) => (0.0, 0),
        };
        // 2^64, exactly; the product is below it and rounded down.
        let below = (fraction * 18_446_744_073_709_551_616.0) as u64;
        Splitter { below, seed, ignores_case: *format == Format::Sequences, dropped: HashSet::new() }
    }

    /// The first eight bytes of the sha256 of the seed and the document. Two of n documents share it by chance
    /// with probability n^2 / 2^65; they are then taken for one.
    pub(super) fn hash(&self, document: &[u8]) -> u64 {
        let mut hash = Sha256::new();
        hash.update(self.seed.to_le_bytes());
        match self.ignores_case {
            true => document.chunks(4096).for_each(|part| {
                let mut upper = [0; 4096];
                let upper = &mut upper[..part.len()];
                upper.copy_from_slice(part);
                upper.make_ascii_uppercase();
                hash.update(upper);
            }),
            false => hash.update(document),
        }
        let digest: [u8; 32] = hash.finalize().into();
        digest.iter().take(8).fold(0, |word, &byte| word << 8 | u64::from(byte))
    }

    /// The side of a document of the training files.
    pub(super) fn side(&self, hash: u64) -> Split {
        if hash < self.below { Split::Validation } else { Split::Train }
    }

    /// Documents of the validation files with these hashes are not validated on.
    pub(super) fn drop_from_validation(&mut self, hashes: HashSet<u64>) {
        self.dropped = hashes;
    }

    /// Whether a document of the validation files is trained on.
    pub(super) fn is_dropped(&self, hash: u64) -> bool {
        self.dropped.contains(&hash)
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> u64 {
        // A table of hashes is at most half empty, with a byte of control each.
        2 * (self.dropped.capacity() * (size_of::<u64>() + 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splitter(fraction: f64, seed: u64, format: &Format) -> Splitter {
        Splitter::new(&Validation::Fraction { fraction, seed }, format)
    }

    fn validated(fraction: f64, seed: u64) -> Vec<bool> {
        let split = splitter(fraction, seed, &Format::JsonLines { field: "text".into() });
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
        let sequences = splitter(0.5, 0, &Format::Sequences);
        let long: Vec<u8> = b"ACGTn".repeat(2000);
        assert_eq!(sequences.hash(&long), sequences.hash(&long.to_ascii_lowercase()));
        let lines = splitter(0.5, 0, &Format::Text(super::super::TextDocuments::Lines));
        assert_ne!(lines.hash(b"a"), lines.hash(b"A"));
        assert_eq!(lines.hash(b"A"), sequences.hash(b"a"));
    }
}
