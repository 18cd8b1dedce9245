//! Dynamic storage allocation: assigns items with a size and a lifetime offsets in one memory region, such that items
//! that are live at the same time never overlap and the region is small.
//!
//! Invariant: a packing is a pure function of the problem (no clock, no hash order, no randomness), and [`validate`]
//! checks packings without sharing code with [`solve`].
//!
//! The problem is NP-hard (Garey & Johnson 1979, SR2). [`Problem::lower_bound`], the largest sum of live bytes,
//! bounds the distance of a packing from the optimum.

mod first_fit;
mod problem;
mod skyline;
mod solve;
#[cfg(test)]
mod tests;
mod validate;

pub use problem::{PackItem, Peak, Problem};
pub use solve::{Packing, solve};
pub use validate::{PackingError, validate};
