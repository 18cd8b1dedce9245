//! Models: opens their configuration, weights and tokenizer under one name, from files, from the hub, or built in. Invariant:
//! every tensor that a graph reads was found with the expected shape before the first byte is allocated.

pub mod adapter;
mod bundle;
mod caller;
mod encoder;
pub mod fair_esm;
mod head;
pub mod hub;
pub mod identity;
pub mod leftovers;
mod sequence_model;
mod tensors;
mod tokenizer;

pub use caller::CallerModel;
pub use encoder::EncoderModel;
pub use head::{HEAD_NAMES, HeadModel};
pub use sequence_model::{DecoderModel, Model, OwnTokenizer, check_decoder, find_in_decoder};
pub use tokenizer::Tokenizer;

use crate::{ModelError, RuntimeError};
use plimsoll_data::bounded;
use plimsoll_data::hex::hex;
use plimsoll_data::printable::Name;
use plimsoll_data::tokenize::esm;
use sha2::{Digest, Sha256};
use std::io::ErrorKind;
use std::path::Path;

/// File with the model's vocabulary, one token a line.
pub(crate) const VOCABULARY: &str = "vocab.txt";

/// Largest accepted config.json, in bytes; files on the hub have about one thousand.
const LARGEST_CONFIG: u64 = 1 << 20;

/// Reads the text of a model's configuration.
///
/// # Errors
/// The file is missing, unreadable, or larger than 1 MiB.
pub fn read_config(path: &Path) -> Result<String, RuntimeError> {
    bounded::read_text(path, LARGEST_CONFIG).map_err(|source| match source.kind() {
        ErrorKind::NotFound => ModelError::NoSuchFile { path: path.to_owned() }.into(),
        _ => RuntimeError::io(path)(source),
    })
}

/// Refuses the folder of an ESM-2 model whose `vocab.txt` differs from ESM-2's alphabet, because token ids would then
/// stand for other residues. A missing file is accepted.
fn check_vocabulary(folder: &Path) -> Result<(), RuntimeError> {
    let path = folder.join(VOCABULARY);
    if !path.exists() {
        return Ok(());
    }
    let text = bounded::read_text(&path, LARGEST_CONFIG).map_err(RuntimeError::io(&path))?;
    let Some(difference) = esm::vocabulary_difference(&text) else { return Ok(()) };
    let expected = printed_token(difference.expected);
    let found = printed_token(difference.found);
    Err(ModelError::Vocabulary { path, line: difference.line, expected, found }.into())
}

/// A token of a vocabulary in a message; `None` is the end of the file.
fn printed_token(token: Option<String>) -> String {
    match token {
        Some(token) => format!("`{}`", Name(&token)),
        None => "the end of the file".to_owned(),
    }
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
