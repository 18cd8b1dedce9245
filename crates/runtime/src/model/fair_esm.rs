//! ESM-2 checkpoints of fair-esm, such as `esm2_t33_650M_UR50D.pt`: their location and configuration. Invariant: the
//! sizes that the file states, or that a known model has, agree with the file's tensors, or the file is refused.

use super::hub::CONFIG;
use super::tensors::rows;
use crate::report::path_text;
use crate::{ModelError, RuntimeError};
use plimsoll_data::tokenize::esm;
use plimsoll_data::weights::{FOLDER_FILES, HubEnv, ObjectKind, PickleValue, Weights, read_pt_object};
use plimsoll_models::{Encoder, Esm2Config, KNOWN, TrainingTask, known};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefixes of fair-esm's tensor names: as published, in older files, and after loading.
const PREFIXES: [&str; 3] = ["encoder.sentence_encoder.", "encoder.", ""];

/// Returns the only checkpoint of a folder that has neither a config.json nor other weights; `None` without any.
///
/// # Errors
/// [`ModelError::SeveralCheckpoints`], or an unreadable folder.
pub fn in_folder(folder: &Path) -> Result<Option<PathBuf>, RuntimeError> {
    let has_other_files =
        folder.join(CONFIG).exists() || FOLDER_FILES.iter().any(|name| folder.join(name).exists());
    if !folder.is_dir() || has_other_files {
        return Ok(None);
    }
    let entries = fs::read_dir(folder).map_err(RuntimeError::io(folder))?;
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("esm2_") && name.ends_with(".pt") && !name.ends_with("-contact-regression.pt")
        })
        .collect();
    found.sort();
    match &found[..] {
        [] => Ok(None),
        [file] => Ok(Some(file.clone())),
        [one, other, ..] => {
            let folder = folder.to_owned();
            let one = one.clone();
            let other = other.clone();
            Err(ModelError::SeveralCheckpoints { folder, one, other }.into())
        }
    }
}

/// Returns a released model's checkpoint in torch.hub's cache, where `torch.hub` and fair-esm store it.
pub(crate) fn in_torch_cache(model: &str, env: &HubEnv) -> Option<PathBuf> {
    let name = model.strip_prefix("facebook/").unwrap_or(model);
    let name = name.strip_suffix(".pt").unwrap_or(name);
    match known(name) {
        Some(Encoder::Esm2(_)) => {}
        Some(Encoder::DnabertS(_)) | None => return None,
    }
    Some(env.torch_checkpoints()?.join(format!("{name}.pt"))).filter(|file| file.is_file())
}

/// A released model's checkpoint in torch.hub's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FairEsmCheckpoint {
    /// Hub id of the model.
    pub model: &'static str,
    /// Path of the checkpoint.
    #[serde(serialize_with = "path_text")]
    pub file: PathBuf,
    /// Size of the file in bytes.
    #[serde(rename = "file_bytes")]
    pub bytes: u64,
}

/// Lists the released models whose checkpoints are in torch.hub's cache.
pub fn cached(env: &HubEnv) -> Vec<FairEsmCheckpoint> {
    KNOWN
        .iter()
        .filter_map(|(model, _)| {
            let file = in_torch_cache(model, env)?;
            let bytes = fs::metadata(&file).ok()?.len();
            Some(FairEsmCheckpoint { model, file, bytes })
        })
        .collect()
}

/// Whether a file's tensors have fair-esm's names. Only `.pt` files are opened.
pub fn is_checkpoint(file: &Path) -> Result<bool, RuntimeError> {
    if file.extension().is_none_or(|extension| extension != "pt") || !file.is_file() {
        return Ok(false);
    }
    Ok(prefix(&Weights::open(file)?).is_some())
}

/// The prefix of the tensor names, or `None` if they are not fair-esm's.
fn prefix(weights: &Weights) -> Option<&'static str> {
    const TENSORS: [&str; 2] = ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight"];
    PREFIXES
        .into_iter()
        .find(|prefix| TENSORS.iter().all(|name| weights.get(&format!("{prefix}{name}")).is_some()))
}

/// Returns the text of a config.json, in the format of the hub's files, for a checkpoint.
pub fn config(file: &Path) -> Result<String, RuntimeError> {
    let weights = Weights::open(file)?;
    let Some(prefix) = prefix(&weights) else {
        return Err(unusable(file, "its tensors do not have the names of fair-esm's ESM-2".to_owned()));
    };
    // ESM-1b and ESM-1v have the same tensor names and these two modules in addition.
    for tensor in ["embed_positions.weight", "emb_layer_norm_before.weight"] {
        if weights.get(&format!("{prefix}{tensor}")).is_some() {
            let why = format!("it contains `{prefix}{tensor}`, so it is ESM-1; only ESM-2 is supported");
            return Err(unusable(file, why));
        }
    }
    let layers = (0..)
        .take_while(|i: &u64| weights.get(&format!("{prefix}layers.{i}.self_attn.q_proj.weight")).is_some())
        .count() as u64;
    let vocab_size = rows(&weights, &format!("{prefix}embed_tokens.weight"))?;
    let hidden_size = rows(&weights, &format!("{prefix}layers.0.self_attn.q_proj.weight"))?;
    if vocab_size != esm::VOCAB as u64 {
        let wanted = esm::VOCAB;
        let why = format!("its embedding has {vocab_size} rows, ESM-2's alphabet {wanted} tokens");
        return Err(unusable(file, why));
    }
    let sizes = match stated(file)? {
        Some(sizes) => sizes,
        None => released(file, layers, hidden_size).ok_or_else(|| {
            let why = format!(
                "it states no sizes (`cfg` or `args`), and no released model has {layers} layers of width \
                 {hidden_size}; put a {CONFIG} beside it"
            );
            unusable(file, why)
        })?,
    };
    if (sizes.layers, sizes.hidden_size) != (layers, hidden_size) {
        let why = format!(
            "it should have {} layers of width {}, but its tensors are of {layers} layers of width {hidden_size}",
            sizes.layers, sizes.hidden_size
        );
        return Err(unusable(file, why));
    }
    let config = Esm2Config {
        vocab_size,
        hidden_size,
        layers,
        heads: sizes.heads,
        intermediate_size: rows(&weights, &format!("{prefix}layers.0.fc1.weight"))?,
        eps: 1e-5,
        token_dropout: sizes.token_dropout,
        mask_token_id: esm::MASK as u64,
    };
    Ok(Encoder::Esm2(config).to_json(TrainingTask::MaskedLm, "{}"))
}

/// The error for a checkpoint that cannot be used.
fn unusable(file: &Path, why: String) -> RuntimeError {
    ModelError::Checkpoint { path: file.to_owned(), why }.into()
}

/// Sizes of a model. Head count and token dropout cannot be derived from tensors; layers and width must agree with
/// them.
struct Esm2Sizes {
    layers: u64,
    hidden_size: u64,
    heads: u64,
    token_dropout: bool,
}

/// Reads the sizes from a checkpoint's `cfg` (ESM-2 as published: `cfg["model"]`) or `args`, each a dict or an
/// argparse.Namespace. `None` if the file has neither, or lacks a size.
fn stated(file: &Path) -> Result<Option<Esm2Sizes>, RuntimeError> {
    let object = read_pt_object(file)?;
    let root = object.root();
    let cfg = root.get("cfg").map(|cfg| member(cfg, "model").unwrap_or(cfg));
    let Some(arguments) = cfg.or_else(|| root.get("args")) else { return Ok(None) };
    Ok(sizes_of(arguments))
}

/// The sizes among the arguments of a training run; `None` if one is missing.
fn sizes_of(arguments: PickleValue<'_>) -> Option<Esm2Sizes> {
    Some(Esm2Sizes {
        layers: size(arguments, "encoder_layers")?,
        hidden_size: size(arguments, "encoder_embed_dim")?,
        heads: size(arguments, "encoder_attention_heads")?,
        token_dropout: match member(arguments, "token_dropout")?.kind() {
            ObjectKind::Bool(dropout) => dropout,
            _ => return None,
        },
    })
}

fn size(arguments: PickleValue<'_>, name: &str) -> Option<u64> {
    u64::try_from(member(arguments, name)?.as_i64()?).ok()
}

/// Returns an entry of a dict or an attribute of a Namespace.
fn member<'a>(value: PickleValue<'a>, name: &str) -> Option<PickleValue<'a>> {
    value.get(name).or_else(|| value.attribute(name))
}

/// Sizes of the released model named like the file, or else of the released model with these layers and width.
fn released(file: &Path, layers: u64, hidden_size: u64) -> Option<Esm2Sizes> {
    let by_name = file.file_stem().and_then(|stem| esm2(stem.to_str()?));
    let Esm2Config { layers, hidden_size, heads, token_dropout, .. } = by_name.or_else(|| {
        let mut all = KNOWN.iter().filter_map(|(id, _)| esm2(id));
        all.find(|config| (config.layers, config.hidden_size) == (layers, hidden_size))
    })?;
    Some(Esm2Sizes { layers, hidden_size, heads, token_dropout })
}

/// The configuration of a known ESM-2 model.
fn esm2(id: &str) -> Option<Esm2Config> {
    match known(id)? {
        Encoder::Esm2(config) => Some(config),
        Encoder::DnabertS(_) => None,
    }
}
