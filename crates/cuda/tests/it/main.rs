//! The tests of the crate, in one binary. What needs a card says `skipped: no CUDA device` where there is none.

mod arena;
mod attention;
mod compile;
mod products;
mod whole;
