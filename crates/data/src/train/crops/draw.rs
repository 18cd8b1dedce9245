//! Makes crops: position, mutations, strand and shuffling. Invariant: the letters of a crop are a function of the record,
//! the length and the key alone, and making one allocates nothing once the buffers have their size.

use std::ops::Range;

use super::super::random::RandomKey;
use super::packed::{self, Packed};
use super::settings::Mutations;
use super::shuffle::Shuffler;
use crate::bases;

/// Key words that separate the draws of a crop.
const START: u64 = 1;
const STRAND: u64 = 2;
const RATE: u64 = 3;
const SUBSTITUTIONS: u64 = 4;
const INDELS: u64 = 5;
const INSERTED: u64 = 6;
const SHUFFLED: u64 = 7;

/// Maximum length of an insertion or deletion.
const LONGEST_INDEL: usize = 3;

/// Change of the letters of a crop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum CropChange {
    /// Mutated; the default rates of 0 leave the letters as they are.
    Mutated(Mutations),
    /// Shuffled with the counts of dinucleotides kept.
    Shuffled,
}

/// Makes crops in reusable buffers.
#[derive(Debug)]
pub(super) struct Cropper {
    /// Letters of the crop.
    letters: Vec<u8>,
    /// Letters of the record from which a crop with insertions and deletions is assembled.
    source: Vec<u8>,
    shuffler: Shuffler,
}

impl Cropper {
    /// Buffers for crops of at most `longest` bases.
    pub(super) fn new(longest: usize) -> Self {
        Cropper {
            letters: Vec::with_capacity(longest + 6),
            // Deletions at most double the bases that a crop takes.
            source: Vec::with_capacity(2 * longest + 6),
            shuffler: Shuffler::with_capacity(longest),
        }
    }

    /// Bytes of the buffers for crops of at most `longest` bases.
    pub(super) fn bytes(longest: usize) -> usize {
        4 * longest + 12
    }

    /// The letters of a crop of `length` bases, at most those of the record.
    pub(super) fn make(
        &mut self,
        record: &Packed,
        length: usize,
        change: CropChange,
        key: RandomKey,
    ) -> &mut [u8] {
        let indels = match change {
            CropChange::Mutated(Mutations { indels, .. }) if indels > 0.0 => indels,
            CropChange::Mutated(_) | CropChange::Shuffled => 0.0,
        };
        if indels > 0.0 {
            self.assemble(record, length, indels, key);
        } else {
            let start = key.with(START).below(record.len() - length + 1);
            record.unpack(start..start + length, &mut self.letters);
        }
        match change {
            CropChange::Mutated(Mutations { substitutions, .. }) => {
                let rate = key.with(RATE).unit() * substitutions;
                substitute(&mut self.letters, rate, key.with(SUBSTITUTIONS));
            }
            CropChange::Shuffled => self.shuffler.shuffle(&mut self.letters, key.with(SHUFFLED)),
        }
        if key.with(STRAND).unit() < 0.5 {
            packed::reverse_complement(&mut self.letters);
        }
        &mut self.letters
    }

    /// Fills `letters` with a crop with insertions and deletions.
    fn assemble(&mut self, record: &Packed, length: usize, rate: f64, key: RandomKey) {
        // The indels are drawn twice with the same keys: first to know how many bases of the record they need, so that
        // the start can be uniform over all positions with that many bases, then to apply them.
        let (needed, _) = edits(record.len(), length, rate, key, |_, _| {});
        let start = key.with(START).below(record.len() - needed + 1);
        record.unpack(start..start + needed, &mut self.source);
        self.letters.clear();
        let letters = &mut self.letters;
        let source = &self.source;
        let (needed, copied) = edits(record.len(), length, rate, key, |range, inserted| {
            letters.extend_from_slice(&source[range]);
            for _ in 0..inserted {
                let base = key.with(INSERTED).with(letters.len() as u64).below(4);
                letters.push(packed::letter(base as u8));
            }
        });
        letters.extend_from_slice(&source[copied..needed]);
    }
}

/// Draws the indels of a crop of `length` bases from a record of `available` bases, and calls `apply` for each with the
/// range of source bases that are copied before it and the number of inserted bases, 0 for a deletion. Returns the
/// number of source bases of the crop, and the index of the first that is copied after the last indel.
fn edits(
    available: usize,
    length: usize,
    rate: f64,
    key: RandomKey,
    mut apply: impl FnMut(Range<usize>, usize),
) -> (usize, usize) {
    // The bases of the record, and the capacity of `source` (see [`Cropper::new`]).
    let max_bases = available.min(2 * length);
    // `made` letters of the crop come from `used` source bases, of which those from `copied` on are not yet copied.
    let mut made = 0;
    let mut used = 0;
    let mut copied = 0;
    for draw in 0.. {
        let key = key.with(INDELS).with(draw);
        let gap = gap(rate, key);
        if gap >= length - made {
            break;
        }
        made += gap;
        used += gap;
        let bases = 1 + key.with(1).below(LONGEST_INDEL);
        if key.with(2).unit() < 0.5 {
            let bases = bases.min(length - made);
            apply(copied..used, bases);
            copied = used;
            made += bases;
            // The next indel begins at the next base at the earliest.
            let next = usize::from(made < length);
            made += next;
            used += next;
        } else if used + bases + (length - made) <= max_bases {
            apply(copied..used, 0);
            used += bases;
            copied = used;
        } else {
            // The deletion would need more bases than there are to reach `length`: the base where it was drawn is
            // copied, and the trials go on behind it.
            made += 1;
            used += 1;
        }
    }
    (used + (length - made), copied)
}

/// Replaces each base with the probability `rate` by one of the three others; N stays N.
fn substitute(letters: &mut [u8], rate: f64, key: RandomKey) {
    if rate <= 0.0 {
        return;
    }
    let mut at = 0;
    for draw in 0.. {
        let key = key.with(draw);
        // Saturates: a gap may be as large as an integer can be.
        at = gap(rate, key).saturating_add(at);
        let Some(letter) = letters.get_mut(at) else { return };
        let code = bases::code(*letter);
        if code < 4 {
            *letter = packed::letter(code + 1 + key.with(1).below(3) as u8);
        }
        at += 1;
    }
}

/// Number of trials of probability `rate` that fail before one succeeds: geometric, by inversion.
fn gap(rate: f64, key: RandomKey) -> usize {
    // `1 - unit` is in (0, 1], so the logarithm is finite. The cast saturates.
    (libm::log(1.0 - key.unit()) / libm::log1p(-rate)) as usize
}

/// A log-uniform length between two lengths.
pub(super) fn length(shortest: usize, longest: usize, key: RandomKey) -> usize {
    let [low, high] = [shortest as f64, longest as f64 + 1.0].map(libm::log);
    (libm::exp(low + key.unit() * (high - low)) as usize).clamp(shortest, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Mutations = Mutations { substitutions: 0.0, indels: 0.0 };

    /// A record of random bases.
    fn random(len: usize) -> (Vec<u8>, Packed) {
        let letters: Vec<u8> = (0..len).map(|i| b"ACGT"[RandomKey::new(3).with(i as u64).below(4)]).collect();
        let packed = Packed::new(&letters);
        (letters, packed)
    }

    fn reversed(letters: &[u8]) -> Vec<u8> {
        let mut letters = letters.to_vec();
        packed::reverse_complement(&mut letters);
        letters
    }

    #[test]
    fn crops_lie_anywhere_on_either_strand() {
        let (letters, record) = random(60);
        let mut cropper = Cropper::new(60);
        let mut counts = [[0_u32; 2]; 51];
        for i in 0..20_400 {
            let crop = cropper.make(&record, 10, CropChange::Mutated(NONE), RandomKey::new(1).with(i));
            let at = |crop: &[u8]| letters.windows(10).position(|window| window == crop);
            match (at(crop), at(&reversed(crop))) {
                (Some(start), None) => counts[start][0] += 1,
                (None, Some(start)) => counts[start][1] += 1,
                other => panic!("{other:?}"),
            }
        }
        // 102 cells of 200 expected crops each.
        let chi_square: f64 = counts.iter().flatten().map(|&n| (f64::from(n) - 200.0).powi(2) / 200.0).sum();
        assert!(chi_square < 101.0 + 4.0 * 202_f64.sqrt(), "{chi_square}");
        let whole = cropper.make(&record, 60, CropChange::Mutated(NONE), RandomKey::new(1)).to_vec();
        assert!(whole == letters || whole == reversed(&letters));
    }

    #[test]
    fn substitutions_have_their_rate() {
        let (letters, record) = random(10_000);
        let mut cropper = Cropper::new(10_000);
        let mutations = Mutations { substitutions: 0.08, indels: 0.0 };
        let mut rates = Vec::new();
        let mut sum = 0.0;
        for i in 0..400 {
            let crop = cropper.make(&record, 10_000, CropChange::Mutated(mutations), RandomKey::new(2).with(i));
            let differing = |crop: &[u8]| crop.iter().zip(&letters).filter(|(a, b)| a != b).count();
            let rate = differing(crop).min(differing(&reversed(crop))) as f64 / 10_000.0;
            rates.push(rate);
            sum += rate;
        }
        // Uniform in [0, 0.08]: mean 0.04, standard deviation 0.023, of the mean of 400 crops 0.00116.
        assert!((sum / 400.0 - 0.04).abs() < 4.0 * 0.00116, "{}", sum / 400.0);
        let below = rates.iter().filter(|&&rate| rate < 0.02).count();
        assert!((65..135).contains(&below), "{below} of 400 in the first quarter");
        assert!(rates.iter().all(|&rate| rate < 0.09));
        // Each other base is equally likely; N stays.
        let mut changed = vec![b'C'; 30_000];
        substitute(&mut changed, 0.999, RandomKey::new(4));
        for base in *b"AGT" {
            let count = changed.iter().filter(|&&letter| letter == base).count();
            assert!((9_600..10_400).contains(&count), "{count}");
        }
        let mut unknown = vec![b'N'; 100];
        substitute(&mut unknown, 0.5, RandomKey::new(4));
        assert_eq!(unknown, vec![b'N'; 100]);
    }

    #[test]
    fn indels_have_their_rate_and_keep_the_length() {
        let mut inserted = 0_u32;
        let mut deleted = 0_u32;
        let mut sizes = [[0_usize; 4]; 2];
        let mut bases = 0;
        for i in 0..300 {
            // The source bases between two copied ranges are deleted.
            let mut end = 0;
            let mut was_deletion = false;
            edits(100_000, 10_000, 0.02, RandomKey::new(6).with(i), |range, length| {
                bases += range.len();
                inserted += u32::from(length > 0);
                deleted += u32::from(length == 0);
                sizes[0][length] += usize::from(length > 0);
                sizes[1][range.start - end] += usize::from(was_deletion);
                (end, was_deletion) = (range.end, length == 0);
            });
        }
        // A trial for each copied base and for the first base of each deletion.
        let trials = bases as f64 + f64::from(deleted);
        let rate = f64::from(inserted + deleted) / trials;
        assert!((rate - 0.02).abs() < 0.0004, "{rate}");
        assert!((f64::from(inserted) / f64::from(deleted) - 1.0).abs() < 0.03, "{inserted} {deleted}");
        for n in sizes.iter().flat_map(|sizes| &sizes[1..]) {
            assert!((*n as f64 / (f64::from(inserted) / 3.0) - 1.0).abs() < 0.05, "{sizes:?}");
        }
        // The length is kept even if the record has no more bases than the crop.
        let (_, record) = random(500);
        let mut cropper = Cropper::new(500);
        for i in 0..500 {
            for length in [5, 100, 499, 500] {
                let mutations = Mutations { substitutions: 0.1, indels: 0.2 };
                let key = RandomKey::new(7).with(i);
                assert_eq!(cropper.make(&record, length, CropChange::Mutated(mutations), key).len(), length);
            }
        }
    }

    /// Undoes the indels of a crop and finds the copied parts in the record.
    #[test]
    fn the_rest_of_a_crop_is_copied() {
        let (letters, record) = random(3000);
        let mut cropper = Cropper::new(1000);
        for i in 0..50 {
            let key = RandomKey::new(8).with(i);
            let mutations = Mutations { substitutions: 0.0, indels: 0.01 };
            let crop = cropper.make(&record, 1000, CropChange::Mutated(mutations), key);
            let crop = if key.with(STRAND).unit() < 0.5 { reversed(crop) } else { crop.to_vec() };
            let (needed, _) = edits(3000, 1000, 0.01, key, |_, _| {});
            let source = &letters[key.with(START).below(3000 - needed + 1)..][..needed];
            let mut made = 0;
            let (_, rest) = edits(3000, 1000, 0.01, key, |range, inserted| {
                assert_eq!(crop[made..made + range.len()], source[range.clone()]);
                made += range.len() + inserted;
            });
            assert_eq!(crop[made..], source[rest..]);
        }
    }

    #[test]
    fn lengths_are_log_uniform() {
        let mut counts = [0_u32; 4];
        for i in 0..40_000 {
            let length = length(100, 1599, RandomKey::new(1).with(i));
            assert!((100..=1599).contains(&length));
            counts[(length as f64 / 100.0).log2() as usize] += 1;
        }
        // Four octaves with 10 000 expected lengths each.
        assert!(counts.iter().all(|n| (9_650..10_350).contains(n)), "{counts:?}");
        assert_eq!(length(7, 7, RandomKey::new(2)), 7);
    }

    #[test]
    fn crops_need_no_memory() {
        let (_, record) = random(5000);
        let mut cropper = Cropper::new(1000);
        let counted = allocation_counter::measure(|| {
            for i in 0..100 {
                for indels in [0.0, 0.2] {
                    let change = CropChange::Mutated(Mutations { substitutions: 0.1, indels });
                    cropper.make(&record, 1000, change, RandomKey::new(1).with(i));
                }
                cropper.make(&record, 1000, CropChange::Shuffled, RandomKey::new(1).with(i));
            }
        });
        assert_eq!(counted.count_total, 0);
        let made = allocation_counter::measure(|| drop(Cropper::new(1000)));
        assert!(made.bytes_max as usize <= Cropper::bytes(1000));
    }
}
