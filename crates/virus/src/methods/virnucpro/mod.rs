//! VirNucPro's method.

pub mod embeddings;
pub mod intermediate;
pub mod tables;
pub mod verdict;
