//! The crate's one integration-test binary.

mod compressed;
mod hostile;
mod packs;
mod pipeline;
mod reader;
mod results;
mod support;
mod tables;
mod tokens;
mod train;
mod weights;
