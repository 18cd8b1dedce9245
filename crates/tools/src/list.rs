//! `plimsoll list`: lists supported models and their files on this machine. Invariant: read-only and offline; parameter
//! counts come from the graphs.

use crate::ToolError;
use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_data::weights::{FOLDER_FILES, HubEnv, find_in_hub, shard_files};
use plimsoll_graph::{Bounds, Bytes, VerifyError};
use plimsoll_models::{Encoder, KNOWN, Output, SequenceModel, known};
use plimsoll_runtime::fair_esm::{self, FairEsmCheckpoint};
use plimsoll_runtime::hub::{CONFIG, Need, lacks};
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::report::optional_path_text;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The list of models.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList {
    /// Folder of the hub cache; `None` if no environment variable locates it.
    #[serde(serialize_with = "optional_path_text")]
    pub cache: Option<PathBuf>,
    /// The known models, followed by other supported models in the cache.
    pub models: Vec<ListedModel>,
    /// Folder of the torch hub cache; `None` if no environment variable locates it.
    #[serde(serialize_with = "optional_path_text")]
    pub torch_cache: Option<PathBuf>,
}

/// A listed model.
#[derive(Clone, Debug)]
pub struct ListedModel {
    /// Hub id: `org/name`.
    pub id: String,
    /// One-line description of a known model.
    pub about: Option<&'static str>,
    /// The architecture.
    pub architecture: SequenceModel,
    /// Number of trained parameters, for ESM-2 and decoders including the language-model head.
    pub parameters: u64,
    /// State of the model's files in the hub cache.
    pub cached: Cached,
    /// Checkpoint in the torch hub cache, used by a run if the hub cache is incomplete.
    pub checkpoint: Option<FairEsmCheckpoint>,
}

/// State of a model's files in the hub cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cached {
    /// All files for a run are cached; the number is the size of the weight files in bytes.
    Complete(u64),
    /// Some files are cached; the listed files are missing.
    Incomplete(Vec<String>),
    /// No file is cached.
    Absent,
}

/// Bytes of a parameter in f32.
const F32: u64 = 4;

/// Lists the known models and the supported models in the caches.
pub fn list() -> Result<ModelList, ToolError> {
    let env = HubEnv::from_process();
    let cached = cached_ids(&env).into_iter().filter(|id| !KNOWN.iter().any(|(known, _)| known == id));
    let known_models = KNOWN
        .iter()
        .filter_map(|(id, about)| Some(((*id).to_owned(), Some(*about), SequenceModel::Encoder(known(id)?))));
    let others = cached.filter_map(|id| {
        let config = read_config(&find_in_hub(&id, &env).ok()?.join(CONFIG)).ok()?;
        // Unsupported models are left to `doctor`.
        let architecture = SequenceModel::from_json(&config).ok()?;
        Some((id, None, architecture))
    });
    let checkpoints = fair_esm::cached(&env);
    let models = known_models
        .chain(others)
        .map(|(id, about, architecture)| {
            let parameters = parameters(&architecture)?;
            let cached = cached_state(&id, &env);
            let checkpoint = checkpoints.iter().find(|checkpoint| checkpoint.model == id).cloned();
            Ok(ListedModel { id, about, architecture, parameters, cached, checkpoint })
        })
        .collect::<Result<_, ToolError>>()?;
    Ok(ModelList { cache: env.cache_dir(), models, torch_cache: env.torch_checkpoints() })
}

/// Hub ids of all cached model repositories, sorted.
pub(crate) fn cached_ids(env: &HubEnv) -> Vec<String> {
    let folders = env.cache_dir().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let names = folders.filter_map(|e| e.file_name().into_string().ok());
    let mut ids: Vec<String> =
        names.filter_map(|name| Some(name.strip_prefix("models--")?.replacen("--", "/", 1))).collect();
    ids.sort();
    ids
}

/// Number of trained parameters: for ESM-2 with its language-model head, whose decoder shares the embedding, for decoders
/// with the output projection, counted once if it is the embedding table; and without the rotary frequencies, which are constants.
pub(crate) fn parameters(model: &SequenceModel) -> Result<u64, VerifyError> {
    let outputs: &[Output] = match model {
        SequenceModel::Encoder(Encoder::Esm2(_)) | SequenceModel::Decoder(_) => {
            &[Output::Hidden, Output::Logits]
        }
        SequenceModel::Encoder(Encoder::DnabertS(_)) => &[Output::Hidden],
    };
    let graph = model.graph(Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 }, outputs)?;
    let pieces = graph.params.iter().flat_map(|p| &p.pieces);
    let learnt = pieces.filter(|piece| !piece.tensor.ends_with("inv_freq"));
    Ok(learnt.map(|piece| piece.shape.iter().product::<u64>()).sum())
}

/// State of the files of the model `id` in the hub cache.
fn cached_state(id: &str, env: &HubEnv) -> Cached {
    let Ok(folder) = find_in_hub(id, env) else { return Cached::Absent };
    match lacks(&folder, Need::Model) {
        missing if missing.is_empty() => Cached::Complete(weight_bytes(&folder)),
        missing => Cached::Incomplete(missing),
    }
}

/// Total size in bytes of the weight files that a run would open.
fn weight_bytes(folder: &Path) -> u64 {
    let Some(file) = FOLDER_FILES.iter().map(|name| folder.join(name)).find(|path| path.exists()) else {
        return 0;
    };
    let files = if file.to_string_lossy().ends_with(".index.json") {
        shard_files(&file).unwrap_or_default()
    } else {
        vec![file]
    };
    files.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum()
}

/// Serializes the model with the dimensions of its architecture.
impl Serialize for ListedModel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (word, files, missing) = match &self.cached {
            Cached::Complete(bytes) => ("complete", Some(*bytes), &[][..]),
            Cached::Incomplete(missing) => ("incomplete", None, &missing[..]),
            Cached::Absent => ("absent", None, &[][..]),
        };
        let checkpoint = self.checkpoint.as_ref();
        let mut model = serializer.serialize_map(None)?;
        model.serialize_entry("id", &self.id)?;
        model.serialize_entry("about", &self.about)?;
        model.serialize_entry("family", self.architecture.family())?;
        model.serialize_entry("layers", &self.architecture.layers())?;
        model.serialize_entry("width", &self.architecture.hidden_size())?;
        model.serialize_entry("parameters", &self.parameters)?;
        model.serialize_entry("f32_bytes", &(F32 * self.parameters))?;
        model.serialize_entry("cached", word)?;
        model.serialize_entry("file_bytes", &files)?;
        model.serialize_entry("missing", missing)?;
        model.serialize_entry("torch_checkpoint", &checkpoint.map(|c| c.file.display().to_string()))?;
        model.serialize_entry("torch_checkpoint_bytes", &checkpoint.map(|c| c.bytes))?;
        model.end()
    }
}

impl ListedModel {
    /// The model's columns of the text table.
    fn columns(&self) -> [String; 7] {
        let cached = match (&self.cached, &self.checkpoint) {
            (Cached::Complete(bytes), None) => format!("complete, {}", Bytes(*bytes)),
            (Cached::Complete(bytes), Some(checkpoint)) => {
                format!("complete, {}; also {}", Bytes(*bytes), in_torch_hub(checkpoint))
            }
            (Cached::Incomplete(missing), None) => format!("without {}", Name(&missing.join(", "))),
            (Cached::Incomplete(_) | Cached::Absent, Some(checkpoint)) => in_torch_hub(checkpoint),
            (Cached::Absent, None) => "no".to_owned(),
        };
        [
            Name(&self.id).to_string(),
            self.architecture.family().to_owned(),
            self.architecture.layers().to_string(),
            self.architecture.hidden_size().to_string(),
            // Digit grouping as in byte counts.
            Bytes(self.parameters).to_string().trim_end_matches(" B").to_owned(),
            Bytes(F32 * self.parameters).to_string(),
            cached,
        ]
    }
}

fn in_torch_hub(checkpoint: &FairEsmCheckpoint) -> String {
    format!("torch hub, {}", Bytes(checkpoint.bytes))
}

/// Column headings of the text table.
const HEADINGS: [&str; 7] =
    ["model", "family", "layers", "width", "parameters", "weights in f32", "in the cache"];

impl fmt::Display for ModelList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![HEADINGS.map(str::to_owned)];
        rows.extend(self.models.iter().map(ListedModel::columns));
        let widths: [usize; 7] =
            std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
        for row in &rows {
            for (column, cell) in row.iter().enumerate() {
                match column {
                    0 | 1 => write!(f, "{cell:<0$}  ", widths[column])?,
                    2..=5 => write!(f, "{cell:>0$}  ", widths[column])?,
                    _ => writeln!(f, "{cell}")?,
                }
            }
        }
        match &self.cache {
            Some(folder) => write!(f, "the cache is {}", EscapedPath(folder))?,
            None => write!(f, "there is no cache: neither HF_HUB_CACHE, HF_HOME nor HOME is set")?,
        }
        match &self.torch_cache {
            Some(folder) if self.models.iter().any(|model| model.checkpoint.is_some()) => {
                write!(f, "\nthe torch hub cache is {}", EscapedPath(folder))
            }
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_that_are_published() {
        for (id, wanted) in [
            ("esm2_t6_8M_UR50D", 7_512_353),
            ("esm2_t12_35M_UR50D", 33_501_153),
            ("esm2_t30_150M_UR50D", 148_139_553),
            ("esm2_t33_650M_UR50D", 651_042_593),
            ("esm2_t36_3B_UR50D", 2_839_004_193),
            ("esm2_t48_15B_UR50D", 15_129_098_273),
            ("zhihan1996/DNABERT-S", 116_477_952),
        ] {
            let encoder = known(id).expect("known");
            assert_eq!(parameters(&SequenceModel::Encoder(encoder)).expect("verified"), wanted, "{id}");
        }
    }
}
