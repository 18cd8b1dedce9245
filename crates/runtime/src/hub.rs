//! A model by name, brought here if it must be. Invariant: a path, a model that is complete in the cache, and
//! `HF_HUB_OFFLINE` never touch the network; what is fetched is what the model's family needs, and nothing else.

use crate::model::read_config;
use crate::{Level, Observer, RuntimeError, Transfer, fair_esm};
use data::bounded;
use data::printable::Place;
use data::tokenize::bpe;
use data::weights::{
    FOLDER_FILES, HubEnv, HubError, HubErrorKind, ModelPath, Repository, Step, WeightsError, find_in_hub,
    is_hub_id, resolve_model, shard_files,
};
use graph::Bytes;
use models::{ConfigError, DecoderConfig, Encoder};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A model's configuration.
pub const CONFIG: &str = "config.json";
/// What tokens are made with.
pub const TOKENIZER: &str = "tokenizer.json";

/// How much of a model is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Enough to plan.
    Config,
    /// Enough to run.
    Model,
}

/// A model that can be trained.
pub enum Trainable {
    /// A language model.
    Decoder(DecoderConfig),
    /// An encoder of sequences.
    Encoder(Encoder),
}

impl Trainable {
    /// Reads a config.json; one of no known family is refused with the error of the decoders, which names theirs, where
    /// it does not say that it is an encoder.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        match Encoder::from_json(text) {
            Err(ConfigError::Kind(_)) => DecoderConfig::from_json(text).map(Self::Decoder),
            encoder => encoder.map(Self::Encoder),
        }
    }

    /// The tokenizer's file: whether the model needs it, or may have it.
    fn tokenizer(&self) -> Asked {
        match self {
            Self::Encoder(encoder) => tokenizer(encoder).map_or(Asked::Nothing, Asked::Required),
            // A language model over bytes has none.
            Self::Decoder(_) => Asked::Optional(TOKENIZER),
        }
    }
}

/// A file beside the weights.
#[derive(Clone, Copy)]
enum Asked {
    Nothing,
    Required(&'static str),
    Optional(&'static str),
}

/// What may be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Encoders,
    Trainable,
}

/// What a `--model` word means, with its files on this machine.
pub fn local(
    model: &str,
    need: Need,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    local_of(model, need, Family::Encoders, env, observer)
}

/// What the key `model.from` means, with its files on this machine: an encoder or a language model.
pub fn trainable(
    model: &str,
    need: Need,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<ModelPath, RuntimeError> {
    local_of(model, need, Family::Trainable, env, observer)
}

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
    let found = find_in_hub(model, env);
    let complete = found.as_ref().is_ok_and(|folder| lacks(folder, need).is_empty());
    if let Some(file) = fair_esm::in_torch_cache(model, env).filter(|_| !complete) {
        observer.say(Level::Info, &format!("{model} is {}, which torch.hub fetched", Place(&file)));
        return Ok(ModelPath::WeightFile(file));
    }
    if !is_hub_id(model) {
        return Ok(resolve_model(model, env)?);
    }
    if env.offline || complete {
        return Ok(ModelPath::Folder(found?));
    }
    let mut fetch = Fetch { repository: Repository::open(model, env)?, family, observer };
    let into = env.cache_dir().unwrap_or_default();
    fetch.observer.say(Level::Info, &format!("{model} is not complete in {}: fetching it", Place(&into)));
    fetch.all(need)?;
    Ok(resolve_model(model, env)?)
}

/// The text of a model's configuration and the path that stands for it in messages: config.json, or a fair-esm
/// checkpoint that has none beside it.
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

/// The files that a model's folder needs and has not; a model of an unknown family lacks nothing that could be
/// named.
pub fn lacks(folder: &Path, need: Need) -> Vec<String> {
    let has = |name: &str| folder.join(name).exists();
    let Ok(config) = fs::read_to_string(folder.join(CONFIG)) else { return vec![CONFIG.to_owned()] };
    if need == Need::Config {
        return vec![];
    }
    let beside = Encoder::from_json(&config).ok().and_then(|encoder| tokenizer(&encoder));
    let mut missing: Vec<String> = beside.filter(|name| !has(name)).map(str::to_owned).into_iter().collect();
    match FOLDER_FILES.iter().find(|name| has(name)) {
        None => missing.push(FOLDER_FILES[0].to_owned()),
        Some(name) if name.ends_with(".index.json") => {
            let shards = shard_files(&folder.join(name)).unwrap_or_default();
            missing.extend(shards.iter().filter(|shard| !shard.exists()).map(|shard| name_of(shard)));
        }
        Some(_) => {}
    }
    missing
}

/// The file that a family reads sequences with, where its alphabet is not compiled in.
fn tokenizer(encoder: &Encoder) -> Option<&'static str> {
    match encoder {
        Encoder::Esm2(_) => None,
        Encoder::DnabertS(_) => Some(TOKENIZER),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// One model on its way.
struct Fetch<'a> {
    repository: Repository,
    family: Family,
    observer: &'a mut dyn Observer,
}

impl Fetch<'_> {
    fn all(&mut self, need: Need) -> Result<(), RuntimeError> {
        let path = self.required(CONFIG)?;
        let text = fs::read_to_string(&path).map_err(RuntimeError::io(&path))?;
        // A model that cannot be run is refused before its weights are fetched.
        let model = match self.family {
            Family::Encoders => Encoder::from_json(&text).map(Trainable::Encoder),
            Family::Trainable => Trainable::from_json(&text),
        };
        let model = model.map_err(|source| RuntimeError::Config { path, source })?;
        if need == Need::Model {
            // Before the weights: a model whose weights are there is taken for complete.
            match model.tokenizer() {
                Asked::Nothing => {}
                Asked::Required(name) => drop(self.required(name)?),
                Asked::Optional(name) => drop(self.file(name)?),
            }
            self.weights()?;
        }
        Ok(self.repository.keep()?)
    }

    /// The first of the known weight files that the repository has, and the shards of an index. One that is in the
    /// cache comes before one that would have to be fetched.
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

    fn required(&mut self, name: &str) -> Result<PathBuf, RuntimeError> {
        match self.file(name)? {
            Some(path) => Ok(path),
            None => Err(self.repository.lacks(name).into()),
        }
    }

    fn file(&mut self, name: &str) -> Result<Option<PathBuf>, RuntimeError> {
        let observer = &mut *self.observer;
        let mut announced = false;
        let place = self.repository.fetch(name, &mut |file, total, step| {
            match step {
                Step::Waiting => {
                    observer.say(Level::Info, &format!("{file}: another process fetches it; waiting"))
                }
                Step::Again => {
                    observer.say(Level::Info, &format!("{file}: the connection failed; trying again"))
                }
                Step::Checking => observer.say(Level::Detail, &format!("{file}: checking its digest")),
                Step::Bytes(bytes) => {
                    if !announced {
                        observer.say(Level::Info, &format!("{file}: {}", Bytes(total)));
                        announced = true;
                    }
                    observer.transfer(&Transfer { file, bytes, total });
                }
            }
            match observer.stop() {
                None => ControlFlow::Continue(()),
                Some(_) => ControlFlow::Break(()),
            }
        });
        place.map_err(|error| match (&error, self.observer.stop()) {
            (WeightsError::Hub(HubError { kind: HubErrorKind::Stopped, .. }), Some(signal)) => {
                let kept = "what is fetched is kept, and the same command goes on from there".to_owned();
                RuntimeError::Interrupted { signal, kept }
            }
            _ => error.into(),
        })
    }
}
/// Files of a tokenizer.
const TOKENIZER_FILES: [&str; 7] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
];

/// The tokenizer's files of a folder: names and bytes.
pub fn tokenizer_files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, RuntimeError> {
    let all = TOKENIZER_FILES.iter().map(|name| (name, folder.join(name)));
    all.filter(|(_, path)| path.is_file())
        .map(|(name, path)| {
            Ok(((*name).to_owned(), bounded::read(&path, bpe::LARGEST).map_err(RuntimeError::io(&path))?))
        })
        .collect()
}
