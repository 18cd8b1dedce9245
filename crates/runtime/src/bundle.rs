//! The models that are compiled in, so that the first command works on a fresh machine. Their weights are
//! random today (`trained` in the head's metadata says so); `cargo run -p xtask -- regen bundle` makes them.

/// Vocabulary of the nucleotide encoder.
pub(crate) const TOKENIZER: &[u8] = include_bytes!("../bundle/dnabert_s/tokenizer.json");
/// Configuration of the nucleotide encoder.
pub(crate) const DNA_CONFIG: &str = include_str!("../bundle/dnabert_s/config.json");
/// Weights of the nucleotide encoder.
pub(crate) const DNA: &[u8] = include_bytes!("../bundle/dnabert_s/model.safetensors");
/// Configuration of the protein encoder.
pub(crate) const PROTEIN_CONFIG: &str = include_str!("../bundle/esm2/config.json");
/// Weights of the protein encoder.
pub(crate) const PROTEIN: &[u8] = include_bytes!("../bundle/esm2/model.safetensors");
/// The head.
pub(crate) const HEAD: &[u8] = include_bytes!("../bundle/head.safetensors");
