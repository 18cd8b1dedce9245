//! False discovery rate of records ranked by their scores: for each record the mean of 1 - p over the called records with the
//! same or a higher probability p, as in geNomad (Camargo et al. 2024). Records with equal scores have equal rates.
//! Invariant: memory is bounded by the limit of the sorters; the rates are returned in input order.
//!
//! Only records whose score makes them virus are part of the mean, so that the rate of the last call is the expected share of
//! false calls. Every other record gets the mean as if it were called too.

use crate::output::sorted::{SortLimits, Sorter};
use plimsoll_data::{DataError, DataErrorKind};
use std::path::Path;

/// Computes the false discovery rates of records.
#[derive(Debug)]
pub(crate) struct FdrRanking {
    by_score: Sorter,
    by_number: Sorter,
    /// Sum of 1 - p over the called records, in units of 2^-52: integers, so that a sum less its parts is exact.
    wrong: u128,
    /// Number of called records.
    called: u64,
    /// Records so far, those without a score included.
    records: u64,
}

impl FdrRanking {
    /// Ranks with temporary files in `folder`; each of the two sorts holds `bytes` bytes of lines in memory.
    pub(crate) fn new(folder: &Path, bytes: usize) -> Self {
        let limits = SortLimits { run_bytes: bytes, ..SortLimits::default() };
        Self {
            by_score: Sorter::new(folder, limits),
            by_number: Sorter::new(folder, limits),
            wrong: 0,
            called: 0,
            records: 0,
        }
    }

    /// Adds the next record with its probability; `called` tells whether its score makes it virus.
    pub(crate) fn add(&mut self, probability: Option<f64>, called: bool) -> Result<(), DataError> {
        let number = self.records;
        self.records += 1;
        let Some(p) = probability else { return Ok(()) };
        if called {
            self.wrong += units(1.0 - p);
            self.called += 1;
        }
        // Probabilities are not negative, so their bits ascend with them.
        let line = format!("{:016x}{number:016x}{}", p.to_bits(), u8::from(called));
        self.by_score.push(line.as_bytes())
    }

    /// Calls `on_rate` with the rate of every record in input order; `None` for records without a score.
    pub(crate) fn finish<E: From<DataError>>(
        self,
        mut on_rate: impl FnMut(Option<f64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self { by_score, mut by_number, mut wrong, mut called, records } = self;
        // Lines come by ascending probability: before the first record of a probability, `wrong` and `called` are those of
        // all called records with this or a higher one. Records with the same probability must share these sums, so they are
        // kept while the sums go on to the next probability.
        let mut current_bits = None;
        let mut current_wrong = wrong;
        let mut current_called = called;
        by_score.finish(|line| {
            let bits = hex(line, 0)?;
            let number = hex(line, 16)?;
            let is_called = line.get(32) == Some(&b'1');
            let own = units(1.0 - f64::from_bits(bits));
            if current_bits != Some(bits) {
                current_bits = Some(bits);
                current_wrong = wrong;
                current_called = called;
            }
            let rate = if is_called {
                wrong -= own;
                called -= 1;
                current_wrong as f64 / UNIT / current_called as f64
            } else {
                (current_wrong + own) as f64 / UNIT / (current_called + 1) as f64
            };
            by_number.push(format!("{number:016x}{:016x}", rate.to_bits()).as_bytes())
        })?;
        let mut next = 0;
        by_number.finish(|line| {
            let number = hex(line, 0)?;
            // Records without a score have no line.
            while next < number {
                next += 1;
                on_rate(None)?;
            }
            next += 1;
            on_rate(Some(f64::from_bits(hex(line, 16)?)))
        })?;
        (next..records).try_for_each(|_| on_rate(None))
    }
}

/// Units of a probability in [`FdrRanking::wrong`].
const UNIT: f64 = (1u64 << 52) as f64;

/// A probability in units, rounded.
fn units(probability: f64) -> u128 {
    (probability * UNIT).round() as u128
}

/// The number of 16 hexadecimal digits at `at` of a line.
fn hex(line: &[u8], at: usize) -> Result<u64, DataError> {
    let digits = line.get(at..at + 16).and_then(|digits| std::str::from_utf8(digits).ok());
    digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).ok_or_else(|| {
        DataError::new(DataErrorKind::Malformed(
            "a temporary file of the ranking changed while it was read".to_owned(),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    fn rates(records: &[(Option<f64>, bool)], bytes: usize) -> Vec<Option<f64>> {
        let folder = Folder::new("rates");
        let mut ranking = FdrRanking::new(&folder.0, bytes);
        for &(p, counts) in records {
            ranking.add(p, counts).expect("added");
        }
        let mut rates = vec![];
        ranking
            .finish(|rate| {
                rates.push(rate);
                Ok::<(), DataError>(())
            })
            .expect("ranked");
        assert!(folder.names().is_empty());
        rates
    }

    #[test]
    fn rates_are_running_means_by_rank() {
        let yes = |p| (Some(p), true);
        let found = rates(&[yes(0.5), (None, true), yes(1.0), yes(0.75), yes(0.5), (None, false)], 1 << 20);
        let wanted = [Some(1.25 / 4.0), None, Some(0.0), Some(0.125), Some(1.25 / 4.0), None];
        assert_eq!(found, wanted);
        assert!(rates(&[], 100).is_empty());
        assert_eq!(rates(&[(None, false), (None, true)], 100), [None, None]);
    }

    #[test]
    fn a_record_that_is_not_called_is_not_part_of_the_mean() {
        let found = rates(&[(Some(1.0), true), (Some(0.75), false), (Some(0.5), true)], 1 << 20);
        assert_eq!(found, [Some(0.0), Some(0.125), Some(0.25)]);
    }

    /// Runs of a few lines on disk give the rates of a sort in memory.
    #[test]
    fn rates_do_not_depend_on_memory() {
        let record = |i: u64| {
            let p = (i.wrapping_mul(2_654_435_761) % 1000) as f64 / 1000.0;
            ((!i.is_multiple_of(7)).then_some(p), !i.is_multiple_of(5))
        };
        let records: Vec<_> = (0..2000).map(record).collect();
        let wanted = rates(&records, 1 << 20);
        assert_eq!(rates(&records, 300), wanted);
        let mut ranked: Vec<(f64, usize)> =
            records.iter().enumerate().filter_map(|(i, r)| Some((r.0.filter(|_| r.1)?, i))).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for &(p, i) in &ranked {
            let above: Vec<f64> = ranked.iter().filter(|(q, _)| *q >= p).map(|(q, _)| 1.0 - q).collect();
            let mean = above.iter().sum::<f64>() / above.len() as f64;
            assert!(wanted[i].is_some_and(|rate| (rate - mean).abs() < 1e-12), "{i}");
        }
    }
}
