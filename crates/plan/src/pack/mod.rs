//! Dynamic storage allocation: items with a size and a lifetime get offsets in one region, so that
//! items alive at the same time never overlap and the region is as low as it can be made.
//!
//! Invariant: a packing is a pure function of the problem (no clock, no hash order, no
//! randomness), and [`validate`] judges it without sharing a line with [`solve`].
//!
//! The problem is NP-hard (Garey & Johnson 1979, SR2); [`Problem::lower_bound`], the largest sum of
//! live bytes, says how far a packing can be from the best one.

mod exact;
mod greedy;
mod problem;
mod skyline;
mod solve;
#[cfg(test)]
mod tests;
mod validate;

pub use problem::{Item, Peak, Problem};
pub use solve::{Packing, solve};
pub use validate::{PackingError, validate};
