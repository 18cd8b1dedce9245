//! Lengths of the generated sequences of a benchmark. Invariant: they are deterministic and do not depend on
//! the machine.

use super::case::numbers;
use serde::{Serialize, Serializer};
use std::fmt;

/// Distribution of sequence lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All sequences have this length.
    Equal(u64),
    /// Log-normal: `exp N(5.6, 0.75)` residues, clamped to 30..=1022, plus two special tokens; similar to the
    /// lengths of proteins.
    LogNormal,
}

impl Lengths {
    /// Lengths of `sequences` sequences.
    pub(super) fn of(self, sequences: u64) -> Vec<u64> {
        let mut uniform = numbers(7).map(|x| f64::from(x).mul_add(0.5, 0.5).clamp(1e-9, 1.0));
        let mut normal = || {
            // Standard normal numbers by Box and Muller 1958. `u` is clamped to at least 1e-9 above, so `ln` is
            // finite.
            let u = uniform.next().unwrap_or(1.0);
            let v = uniform.next().unwrap_or(1.0);
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        (0..sequences)
            .map(|_| match self {
                Self::Equal(length) => length,
                Self::LogNormal => normal().mul_add(0.75, 5.6).exp().clamp(30.0, 1022.0) as u64 + 2,
            })
            .collect()
    }
}

/// The length, or `lognormal`.
impl Serialize for Lengths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Equal(length) => serializer.serialize_u64(*length),
            Self::LogNormal => serializer.serialize_str("lognormal"),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal(length) => length.fmt(f),
            Self::LogNormal => f.write_str("log-normal"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_normal_lengths_are_in_range_and_spread() {
        let mut lengths = Lengths::LogNormal.of(2000);
        lengths.sort_unstable();
        assert!(lengths.iter().all(|n| (32..=1024).contains(n)));
        // The median of exp N(5.6, 0.75) is exp 5.6 = 270; a sixth lies above exp 6.35 = 572.
        assert!((240..310).contains(&lengths[1000]), "{}", lengths[1000]);
        assert!((500..660).contains(&lengths[2000 * 84 / 100]), "{}", lengths[2000 * 84 / 100]);
        assert_eq!(Lengths::Equal(5).of(3), [5, 5, 5]);
    }
}
