//! Methods of finding viral sequences.

pub mod caller;
pub mod virnucpro;
