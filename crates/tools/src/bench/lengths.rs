//! How long the sequences are that a bench makes. Invariant: the same on every machine.

use super::subject::numbers;
use serde_json::{Value, json};
use std::fmt;

/// Tokens of the sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All alike.
    Equal(u64),
    /// `exp N(5.6, 0.75)` residues, from 30 to 1022, and two special tokens: about what proteins have.
    LogNormal,
}

impl Lengths {
    /// Those of so many sequences.
    pub(super) fn of(self, sequences: u64) -> Vec<u64> {
        let mut uniform = numbers(7).map(|x| f64::from(x).mul_add(0.5, 0.5).clamp(1e-9, 1.0));
        let mut normal = || {
            // Box and Muller 1958.
            let (u, v) = (uniform.next().unwrap_or(1.0), uniform.next().unwrap_or(1.0));
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        let length = |_| match self {
            Self::Equal(length) => length,
            Self::LogNormal => normal().mul_add(0.75, 5.6).exp().clamp(30.0, 1022.0) as u64 + 2,
        };
        (0..sequences).map(length).collect()
    }

    /// As JSON.
    pub(super) fn to_json(self) -> Value {
        match self {
            Self::Equal(length) => json!(length),
            Self::LogNormal => json!("lognormal"),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal(length) => length.fmt(f),
            Self::LogNormal => f.write_str("log-normally many"),
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
