//! ESM-2 checkpoints of fair-esm, such as `esm2_t33_650M_UR50D.pt`: their location and configuration. Invariant: the
//! sizes that the file states, or that a known model has, agree with the file's tensors, or the file is refused.

use crate::hub::CONFIG;
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
    let has = |name: &&str| folder.join(name).exists();
    if !folder.is_dir() || has(&CONFIG) || FOLDER_FILES.iter().any(has) {
        return Ok(None);
    }
    let is_checkpoint = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("esm2_") && name.ends_with(".pt") && !name.ends_with("-contact-regression.pt")
    };
    let entries = fs::read_dir(folder).map_err(RuntimeError::io(folder))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_checkpoint).collect();
    found.sort();
    match &found[..] {
        [] => Ok(None),
        [file] => Ok(Some(file.clone())),
        [one, other, ..] => {
            let (folder, one, other) = (folder.to_owned(), one.clone(), other.clone());
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
pub struct Checkpoint {
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
pub fn cached(env: &HubEnv) -> Vec<Checkpoint> {
    let checkpoint = |(model, _): &(&'static str, _)| {
        let file = in_torch_cache(model, env)?;
        let bytes = fs::metadata(&file).ok()?.len();
        Some(Checkpoint { model, file, bytes })
    };
    KNOWN.iter().filter_map(checkpoint).collect()
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
    let has = |prefix: &&str, name| weights.get(&format!("{prefix}{name}")).is_some();
    PREFIXES.into_iter().find(|p| has(p, "embed_tokens.weight") && has(p, "layers.0.self_attn.q_proj.weight"))
}

/// Returns the text of a config.json, in the format of the hub's files, for a checkpoint.
pub fn config(file: &Path) -> Result<String, RuntimeError> {
    let refused = |why: String| RuntimeError::from(ModelError::Checkpoint { path: file.to_owned(), why });
    let weights = Weights::open(file)?;
    let Some(prefix) = prefix(&weights) else {
        return Err(refused("its tensors do not have the names of fair-esm's ESM-2".to_owned()));
    };
    // ESM-1b and ESM-1v have the same tensor names and these two modules in addition.
    for tensor in ["embed_positions.weight", "emb_layer_norm_before.weight"] {
        if weights.get(&format!("{prefix}{tensor}")).is_some() {
            return Err(refused(format!(
                "it contains `{prefix}{tensor}`, so it is ESM-1; only ESM-2 is supported"
            )));
        }
    }
    let rows = |name: &str| -> Result<u64, RuntimeError> {
        let tensor = weights.tensor(&format!("{prefix}{name}"))?;
        Ok(tensor.shape().first().copied().unwrap_or(0))
    };
    let is_there = |i: &u64| weights.get(&format!("{prefix}layers.{i}.self_attn.q_proj.weight")).is_some();
    let layers = (0..).take_while(is_there).count() as u64;
    let (vocab_size, hidden_size) = (rows("embed_tokens.weight")?, rows("layers.0.self_attn.q_proj.weight")?);
    if vocab_size != esm::VOCAB as u64 {
        let wanted = esm::VOCAB;
        return Err(refused(format!("its embedding has {vocab_size} rows, ESM-2's alphabet {wanted} tokens")));
    }
    let sizes = match stated(file)? {
        Some(sizes) => sizes,
        None => released(file, layers, hidden_size).ok_or_else(|| {
            refused(format!(
                "it states no sizes (`cfg` or `args`), and no released model has {layers} layers of width \
                 {hidden_size}; put a {CONFIG} beside it"
            ))
        })?,
    };
    if (sizes.layers, sizes.hidden_size) != (layers, hidden_size) {
        return Err(refused(format!(
            "it should have {} layers of width {}, but its tensors are of {layers} layers of width {hidden_size}",
            sizes.layers, sizes.hidden_size
        )));
    }
    let config = Esm2Config {
        vocab_size,
        hidden_size,
        layers,
        heads: sizes.heads,
        intermediate_size: rows("layers.0.fc1.weight")?,
        eps: 1e-5,
        token_dropout: sizes.token_dropout,
        mask_token_id: esm::MASK as u64,
    };
    Ok(Encoder::Esm2(config).to_json(TrainingTask::MaskedLm, "{}"))
}

/// Sizes of a model. Head count and token dropout cannot be derived from tensors; layers and width must agree with
/// them.
struct Sizes {
    layers: u64,
    hidden_size: u64,
    heads: u64,
    token_dropout: bool,
}

/// Reads the sizes from a checkpoint's `cfg` (ESM-2 as published: `cfg["model"]`) or `args`, each a dict or an
/// argparse.Namespace. `None` if the file has neither, or lacks a size.
fn stated(file: &Path) -> Result<Option<Sizes>, RuntimeError> {
    let object = read_pt_object(file)?;
    let root = object.root();
    let cfg = root.get("cfg").map(|cfg| member(cfg, "model").unwrap_or(cfg));
    let Some(arguments) = cfg.or_else(|| root.get("args")) else { return Ok(None) };
    let size = |name| u64::try_from(member(arguments, name)?.as_i64()?).ok();
    let read = || {
        Some(Sizes {
            layers: size("encoder_layers")?,
            hidden_size: size("encoder_embed_dim")?,
            heads: size("encoder_attention_heads")?,
            token_dropout: match member(arguments, "token_dropout")?.kind() {
                ObjectKind::Bool(dropout) => dropout,
                _ => return None,
            },
        })
    };
    Ok(read())
}

/// Returns an entry of a dict or an attribute of a Namespace.
fn member<'a>(value: PickleValue<'a>, name: &str) -> Option<PickleValue<'a>> {
    value.get(name).or_else(|| value.attribute(name))
}

/// Sizes of the released model named like the file, or else of the released model with these layers and width.
fn released(file: &Path, layers: u64, hidden_size: u64) -> Option<Sizes> {
    let esm2 = |id: &str| match known(id)? {
        Encoder::Esm2(config) => Some(config),
        Encoder::DnabertS(_) => None,
    };
    let by_name = file.file_stem().and_then(|stem| esm2(stem.to_str()?));
    let by_sizes = || {
        let mut all = KNOWN.iter().filter_map(|(id, _)| esm2(id));
        all.find(|config| (config.layers, config.hidden_size) == (layers, hidden_size))
    };
    let Esm2Config { layers, hidden_size, heads, token_dropout, .. } = by_name.or_else(by_sizes)?;
    Some(Sizes { layers, hidden_size, heads, token_dropout })
}
