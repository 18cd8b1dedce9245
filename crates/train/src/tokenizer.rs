//! The tokenizer files stored in a checkpoint, so that users of the checkpoint tokenize text as training did.
//! Invariant: copies of the files that the run was given, byte for byte; ESM-2's built-in alphabet is written in the
//! format of the Hugging Face Hub.

use crate::TrainError;
use crate::config::{ModelKind, TrainConfig};
use crate::feed;
use plimsoll_data::bounded;
use plimsoll_data::tokenize::{bpe, esm};
use plimsoll_data::train::TokenizerKind;
use plimsoll_runtime::hub::{TOKENIZER, tokenizer_files};
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::{OwnTokenizer, RuntimeError};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Tokenizer configuration file, which the transformers library reads first.
const CONFIG: &str = "tokenizer_config.json";

/// Special tokens of DNABERT-S, by role.
const ROLES: [(&str, &str); 5] = [
    ("unk_token", "[UNK]"),
    ("cls_token", "[CLS]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("mask_token", "[MASK]"),
];

/// Whether a language model reads its data with the tokenizer of `model.from`.
pub fn reads_own(config: &TrainConfig) -> bool {
    if !is_language_model(config) || config.data.tokenizer != "auto" {
        return false;
    }
    // A format that is not known is reported where the data are opened; a plan without data needs no tokenizer.
    feed::format(config).is_ok_and(|format| !matches!(format, plimsoll_data::train::DatasetFormat::Ids { .. }))
}

fn is_language_model(config: &TrainConfig) -> bool {
    matches!(config.model.kind, ModelKind::MoeLm | ModelKind::DenseLm)
}

/// Returns the file of the tokenizer that belongs to the model `name` in `folder`; `None` if it has none, which a language
/// model may not have unless its tokens are bytes or the data are read otherwise.
///
/// # Errors
/// A language model without the tokenizer that its data need.
pub fn own(config: &TrainConfig, name: &str, folder: &Path) -> Result<Option<PathBuf>, TrainError> {
    if !reads_own(config) {
        return Ok(Some(folder.join(TOKENIZER)).filter(|path| path.is_file()));
    }
    let text = read_config(&folder.join("config.json"))?;
    Ok(OwnTokenizer::find(name, folder, &text)?.file().map(Path::to_owned))
}

/// Whether the tokens of a language model whose weights come from `folder` are the bytes of a text.
pub fn reads_bytes(config: &TrainConfig, folder: Option<&Path>) -> Result<bool, TrainError> {
    if !is_language_model(config) {
        return Ok(false);
    }
    let name = config.model.from.as_deref().unwrap_or_default();
    let own = folder.map_or(Ok(None), |folder| own(config, name, folder))?;
    Ok(match feed::tokens(config, &feed::format(config)?, own.as_deref())? {
        TokenizerKind::Bytes { .. } => true,
        // Ids are those of the model that they continue.
        TokenizerKind::Ids { .. } => match folder {
            Some(folder) => plimsoll_models::reads_bytes(&read_config(&folder.join("config.json"))?),
            None => false,
        },
        TokenizerKind::Esm | TokenizerKind::Dna(_) | TokenizerKind::BytePairs { .. } => false,
    })
}

/// Returns names and contents of the tokenizer files of a run whose weights come from `folder`. Byte-level models and
/// raw ids need no files.
pub fn files(config: &TrainConfig, folder: Option<&Path>) -> Result<Vec<(String, Vec<u8>)>, TrainError> {
    // The codons of a caller need no file.
    if matches!(config.model.kind, ModelKind::Head | ModelKind::Caller) {
        return Ok(vec![]);
    }
    let name = config.model.from.as_deref().unwrap_or_default();
    let own = folder.map_or(Ok(None), |folder| own(config, name, folder))?;
    match feed::tokens(config, &feed::format(config)?, own.as_deref())? {
        TokenizerKind::Bytes { .. } => Ok(vec![]),
        TokenizerKind::Ids { .. } => Ok(folder.map_or(Ok(vec![]), tokenizer_files)?),
        TokenizerKind::Esm => {
            let mut files = folder.map_or(Ok(vec![]), tokenizer_files)?;
            for (name, bytes) in alphabet() {
                if !files.iter().any(|(there, _)| *there == name) {
                    files.push((name, bytes));
                }
            }
            Ok(files)
        }
        TokenizerKind::Dna(path) | TokenizerKind::BytePairs { file: path, .. } => {
            let named = path.file_name().is_some_and(|name| name == TOKENIZER);
            let found = match path.parent().filter(|_| named) {
                Some(folder) => tokenizer_files(folder)?,
                None => vec![(TOKENIZER.to_owned(), read(&path)?)],
            };
            Ok(classified(found, config.model.kind))
        }
    }
}

/// Adds a tokenizer_config.json if it is missing; without it, transformers would select the tokenizer class by the
/// model type, which is a different tokenizer.
fn classified(mut files: Vec<(String, Vec<u8>)>, kind: ModelKind) -> Vec<(String, Vec<u8>)> {
    if files.iter().any(|(name, _)| name == CONFIG) {
        return files;
    }
    let mut class = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    if kind == ModelKind::DnabertS {
        for (role, name) in ROLES {
            class[role] = json!(name);
        }
    }
    files.push((CONFIG.to_owned(), format!("{class:#}\n").into_bytes()));
    files
}

fn read(path: &PathBuf) -> Result<Vec<u8>, TrainError> {
    Ok(bounded::read(path, bpe::LARGEST).map_err(RuntimeError::io(path))?)
}

/// The tokenizer files of ESM-2's alphabet.
fn alphabet() -> Vec<(String, Vec<u8>)> {
    let class = json!({
        "tokenizer_class": "EsmTokenizer",
        "cls_token": "<cls>",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    });
    vec![
        (CONFIG.to_owned(), format!("{class:#}\n").into_bytes()),
        ("vocab.txt".to_owned(), esm::vocabulary().into_bytes()),
    ]
}
