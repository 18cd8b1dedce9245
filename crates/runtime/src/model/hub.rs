//! Finds a model's files by name and downloads missing files. Invariant: a path, a model that is complete in the cache,
//! and `HF_HUB_OFFLINE` never touch the network; only the files that the model's family needs are downloaded.

use super::{VOCABULARY, fair_esm, read_config};
use crate::{FileTransfer, Level, ModelError, Observer, RuntimeError};
use plimsoll_data::bounded;
use plimsoll_data::outputs::InputFiles;
use plimsoll_data::printable::EscapedPath;
use plimsoll_data::tokenize::bpe;
use plimsoll_data::weights::{
    FOLDER_FILES, FetchEvent, HubEnv, HubError, HubErrorKind, ModelPath, Repository, WeightsError, find_in_hub,
    is_hub_id, missing_path, resolve_model, shard_files,
};
use plimsoll_graph::Bytes;
use plimsoll_models::{ConfigError, Encoder, ModelConfig, SequenceModel, reads_bytes};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// File name of a model's configuration.
pub const CONFIG: &str = "config.json";
/// File name of a model's tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// The files of a model that the caller needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The configuration: enough to plan.
    Config,
    /// Configuration and weights, and the tokenizer if there is one: enough for data that are token ids.
    Weights,
    /// All files: enough to run.
    Model,
}

/// The tokenizer files of a model, in the order in which they are looked for.
struct TokenizerFiles {
    /// File names; the first that exists is the tokenizer.
    names: &'static [&'static str],
    /// Whether a model without any of them cannot read sequences or texts.
    required: bool,
}

impl TokenizerFiles {
    /// The files of a model whose config.json has the text `text`.
    fn of(model: &ModelConfig, text: &str) -> Self {
        match model {
            // The alphabet is built in; the file shows whether it is the model's.
            ModelConfig::Encoder(Encoder::Esm2(_)) => Self { names: &[VOCABULARY], required: false },
            ModelConfig::Encoder(Encoder::DnabertS(_)) => Self { names: &[TOKENIZER], required: true },
            ModelConfig::Decoder(_) if reads_bytes(text) => Self { names: &[], required: false },
            // A language model of proteins may have the alphabet of ESM-2.
            ModelConfig::Decoder(_) => Self { names: &[TOKENIZER, VOCABULARY], required: true },
            // The codons of a caller are its tokens.
            ModelConfig::Caller(_) => Self { names: &[], required: false },
        }
    }
}

/// Families of models that a caller accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// Encoders only.
    Encoders,
    /// Encoders and decoders.
    Sequences,
    /// All models.
    Trainable,
}

impl Family {
    /// Reads a config.json.
    ///
    /// # Errors
    /// A model that is not known, or of another family.
    fn read(self, text: &str) -> Result<ModelConfig, ConfigError> {
        match self {
            Self::Encoders => Encoder::from_json(text).map(ModelConfig::Encoder),
            Self::Sequences => SequenceModel::from_json(text).map(|model| match model {
                SequenceModel::Encoder(encoder) => ModelConfig::Encoder(encoder),
                SequenceModel::Decoder(decoder) => ModelConfig::Decoder(decoder),
            }),
            Self::Trainable => ModelConfig::from_json(text),
        }
    }
}

/// Resolves the value of `--model` to local files of an encoder, downloading missing files.
pub fn local(
    model: &str,
    need: Need,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    local_of(model, need, Family::Encoders, env, observer)
}

/// Resolves the value of `--model` to local files of an encoder or a decoder, downloading missing files.
pub fn sequence_model(
    model: &str,
    need: Need,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    local_of(model, need, Family::Sequences, env, observer)
}

/// Resolves the value of the key `model.from` to local files of an encoder or a language model, downloading missing
/// files.
pub fn trainable(
    model: &str,
    need: Need,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    local_of(model, need, Family::Trainable, env, observer)
}

/// Resolves a model name to local files, restricted to `family` if files must be downloaded.
fn local_of(
    model: &str,
    need: Need,
    family: Family,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    if let Some(file) = fair_esm::in_folder(Path::new(model))? {
        return Ok(ModelPath::WeightFile(file));
    }
    if Path::new(model).exists() || !is_hub_id(model) {
        return Ok(resolve_model(model, env)?);
    }
    // Before anything is asked of the hub.
    if let Some(error) = missing_path(model) {
        return Err(error.into());
    }
    let found = find_in_hub(model, env);
    let complete = found.as_ref().is_ok_and(|folder| lacks(folder, need).is_empty());
    if let Some(file) = fair_esm::in_torch_cache(model, env).filter(|_| !complete) {
        observer.say(Level::Info, &format!("{model} is {}, which torch.hub fetched", EscapedPath(&file)));
        return Ok(ModelPath::WeightFile(file));
    }
    if env.offline || complete {
        return Ok(ModelPath::Folder(found?));
    }
    let repository = Repository::open(model, env)?;
    let mut fetch = Fetch { model: model.to_owned(), repository, family, observer };
    let into = env.cache_dir().unwrap_or_default();
    fetch.observer.say(
        Level::Info,
        &format!("{model} is not complete in {}: downloading the missing files", EscapedPath(&into)),
    );
    fetch.all(need)?;
    Ok(resolve_model(model, env)?)
}

/// Adds the local files of the value of `--model` to the inputs of a command: those of a path, or those that are in the
/// cache of the hub. Downloads nothing: a file that is still to be downloaded cannot be an output.
pub fn add_model_files(model: &str, files: &mut InputFiles) {
    let path = Path::new(model);
    if path.exists() {
        return files.add_model(path);
    }
    if !is_hub_id(model) {
        return;
    }
    let env = HubEnv::from_process();
    if let Ok(folder) = find_in_hub(model, &env) {
        files.add_model(&folder);
    }
    if let Some(file) = fair_esm::in_torch_cache(model, &env) {
        files.add_model(&file);
    }
}

/// Returns the text of a model's configuration and the path to name in messages: config.json, or the fair-esm
/// checkpoint itself if it has no config.json beside it.
pub fn config_text(place: &ModelPath) -> Result<(PathBuf, String), RuntimeError> {
    let path = place.config();
    if let ModelPath::WeightFile(file) = place
        && !path.exists()
        && fair_esm::is_checkpoint(file)?
    {
        return Ok((file.clone(), fair_esm::config(file)?));
    }
    let text = read_config(&path)?;
    Ok((path, text))
}

/// Lists the files that a model's folder lacks. For a model that is not known only weights and configuration can be
/// listed.
pub fn lacks(folder: &Path, need: Need) -> Vec<String> {
    let Ok(config) = read_config(&folder.join(CONFIG)) else { return vec![CONFIG.to_owned()] };
    if need == Need::Config {
        return vec![];
    }
    let model = ModelConfig::from_json(&config).ok().filter(|_| need == Need::Model);
    let tokenizer_files = model.map(|model| TokenizerFiles::of(&model, &config));
    let lacked = tokenizer_files
        .filter(|files| files.required && !files.names.iter().any(|name| folder.join(name).exists()));
    let mut missing: Vec<String> =
        lacked.and_then(|files| files.names.first()).map(|name| (*name).to_owned()).into_iter().collect();
    match FOLDER_FILES.iter().find(|name| folder.join(name).exists()) {
        None => missing.push(FOLDER_FILES[0].to_owned()),
        Some(name) if name.ends_with(".index.json") => {
            let shards = shard_files(&folder.join(name)).unwrap_or_default();
            missing.extend(shards.iter().filter(|shard| !shard.exists()).map(|shard| name_of(shard)));
        }
        Some(_) => {}
    }
    missing
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Download of one model.
struct Fetch<'a> {
    model: String,
    repository: Repository,
    family: Family,
    observer: &'a mut dyn Observer,
}

impl Fetch<'_> {
    /// Downloads all files of the model that `need` requires.
    fn all(&mut self, need: Need) -> Result<(), RuntimeError> {
        let path = self.required(CONFIG)?;
        let text = read_config(&path)?;
        // Check the configuration first: an unsupported model is refused before its weights are downloaded.
        let model = self.family.read(&text).map_err(|source| RuntimeError::Config { path, source })?;
        if need != Need::Config {
            // Before the weights: a cached model that has its weights counts as complete.
            self.tokenizer(&TokenizerFiles::of(&model, &text), need)?;
            self.weights()?;
        }
        Ok(self.repository.write_ref()?)
    }

    /// Downloads the first of the tokenizer's files that the repository has.
    fn tokenizer(&mut self, files: &TokenizerFiles, need: Need) -> Result<(), RuntimeError> {
        for name in files.names {
            if self.file(name)?.is_some() {
                return Ok(());
            }
        }
        match files.names {
            [only] if files.required => Err(self.repository.missing_file_error(only).into()),
            [] => Ok(()),
            _ if files.required && need == Need::Model => {
                Err(ModelError::NoTokenizer { name: self.model.clone(), instead: String::new() }.into())
            }
            _ => Ok(()),
        }
    }

    /// Downloads the first known weight file that the repository has, with all shards if the file is an index. A file
    /// that is already in the cache is preferred to a file that must be downloaded.
    fn weights(&mut self) -> Result<(), RuntimeError> {
        let snapshot = self.repository.snapshot().unwrap_or_default();
        let here = FOLDER_FILES.iter().filter(|name| snapshot.join(name).exists());
        for name in here.chain(&FOLDER_FILES) {
            let Some(path) = self.file(name)? else { continue };
            if name.ends_with(".index.json") {
                for shard in shard_files(&path)? {
                    self.required(&name_of(&shard))?;
                }
            }
            return Ok(());
        }
        Err(WeightsError::NoWeights { folder: snapshot, looked_for: &FOLDER_FILES }.into())
    }

    /// Downloads a file; a missing file is an error.
    fn required(&mut self, name: &str) -> Result<PathBuf, RuntimeError> {
        match self.file(name)? {
            Some(path) => Ok(path),
            None => Err(self.repository.missing_file_error(name).into()),
        }
    }

    /// Downloads a file and reports progress; `None` if the repository has no such file.
    fn file(&mut self, name: &str) -> Result<Option<PathBuf>, RuntimeError> {
        let observer = &mut *self.observer;
        let mut announced = false;
        let place = self.repository.fetch(name, &mut |file, total, step| {
            match step {
                FetchEvent::Waiting => {
                    observer.say(Level::Info, &format!("{file}: another process is downloading it; waiting"))
                }
                FetchEvent::Again => {
                    observer.say(Level::Info, &format!("{file}: the connection failed; trying again"))
                }
                FetchEvent::Pause(pause) => {
                    let seconds = pause.as_secs();
                    observer.say(Level::Info, &format!("{file}: the hub asks to wait for {seconds} s; waiting"))
                }
                FetchEvent::Idle => {}
                FetchEvent::Checking => observer.say(Level::Detail, &format!("{file}: checking its digest")),
                FetchEvent::Bytes(bytes) => {
                    if !announced {
                        observer.say(Level::Info, &format!("{file}: {}", Bytes(total)));
                        announced = true;
                    }
                    observer.transfer(&FileTransfer { file, bytes, total });
                }
            }
            match observer.stop() {
                None => ControlFlow::Continue(()),
                Some(_) => ControlFlow::Break(()),
            }
        });
        place.map_err(|error| match (&error, self.observer.stop()) {
            (WeightsError::Hub(HubError { kind: HubErrorKind::Stopped, .. }), Some(signal)) => {
                let kept = "the downloaded part is kept, and the same command resumes the download".to_owned();
                RuntimeError::Interrupted { signal, kept }
            }
            _ => error.into(),
        })
    }
}
/// File names that belong to a tokenizer.
const TOKENIZER_FILES: [&str; 7] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
];

/// Reads the tokenizer files that exist in a folder: names and bytes.
pub fn tokenizer_files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, RuntimeError> {
    let all = TOKENIZER_FILES.iter().map(|name| (name, folder.join(name)));
    all.filter(|(_, path)| path.is_file())
        .map(|(name, path)| {
            Ok(((*name).to_owned(), bounded::read(&path, bpe::LARGEST).map_err(RuntimeError::io(&path))?))
        })
        .collect()
}
