//! Finding a model: a path that exists, or a hub id in the local Hugging Face cache. Invariant:
//! nothing is downloaded and nothing but the cache's own layout is followed. Source of layout and
//! variables: the huggingface_hub documentation, "Understand caching" and "Environment variables".

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::WeightsError;

/// Hub ids are at most this long (huggingface_hub, `validate_repo_id`).
const MAX_ID: usize = 96;

/// The environment that places the cache; taken once, so that tests can set their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HubEnv {
    /// `HF_HUB_CACHE`: the cache folder itself.
    pub hub_cache: Option<PathBuf>,
    /// `HF_HOME`: the cache is its folder `hub`.
    pub hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: the cache is `huggingface/hub` in it.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HOME`: the cache is `.cache/huggingface/hub` in it.
    pub home: Option<PathBuf>,
}

/// What a model argument turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelPath {
    /// A folder with `config.json`, weights and tokenizer.
    Folder(PathBuf),
    /// A weight file or a shard index.
    WeightFile(PathBuf),
    /// A config alone: enough to plan.
    Config(PathBuf),
}

impl HubEnv {
    /// The process's environment.
    pub fn from_process() -> HubEnv {
        HubEnv::from_lookup(|name| std::env::var_os(name))
    }

    /// Any environment; empty values count as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> HubEnv {
        let home = lookup("HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = |name| {
            let path = PathBuf::from(lookup(name).filter(|value| !value.is_empty())?);
            match (path.strip_prefix("~"), &home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path),
            }
        };
        let (hub_cache, hf_home, xdg_cache_home) =
            (path("HF_HUB_CACHE"), path("HF_HOME"), path("XDG_CACHE_HOME"));
        HubEnv { hub_cache, hf_home, xdg_cache_home, home }
    }

    /// The cache folder, whether or not it exists; `None` when no variable is set.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        let from_home = || Some(self.home.as_ref()?.join(".cache/huggingface/hub"));
        let from_xdg = || Some(self.xdg_cache_home.as_ref()?.join("huggingface/hub"));
        let from_hf_home = || Some(self.hf_home.as_ref()?.join("hub"));
        self.hub_cache.clone().or_else(from_hf_home).or_else(from_xdg).or_else(from_home)
    }
}

impl ModelPath {
    /// The path itself.
    pub fn path(&self) -> &Path {
        match self {
            ModelPath::Folder(path) | ModelPath::WeightFile(path) | ModelPath::Config(path) => path,
        }
    }

    /// The model's config: in the folder, beside the weight file, or the path itself. It may not
    /// exist.
    pub fn config(&self) -> PathBuf {
        match self {
            ModelPath::Folder(folder) => folder.join("config.json"),
            ModelPath::WeightFile(file) => file.with_file_name("config.json"),
            ModelPath::Config(path) => path.clone(),
        }
    }

    /// What `Weights::open` takes; `None` for a config alone.
    pub fn weights(&self) -> Option<&Path> {
        match self {
            ModelPath::Folder(path) | ModelPath::WeightFile(path) => Some(path),
            ModelPath::Config(_) => None,
        }
    }
}

/// Whether `arg` has the form of a hub id, `org/name`.
pub fn is_hub_id(arg: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
    };
    let parts = arg.split_once('/').is_some_and(|(org, name)| part(org) && part(name));
    parts && arg.len() <= MAX_ID && !arg.contains("--") && !arg.contains("..")
}

/// The snapshot folder of a hub id's main revision.
///
/// # Errors
/// `NotAModel` when `id` is no hub id; `NotInCache` with the path looked at when it is not there.
pub fn find_in_hub(id: &str, env: &HubEnv) -> Result<PathBuf, WeightsError> {
    if !is_hub_id(id) {
        return Err(WeightsError::NotAModel { arg: id.to_owned() });
    }
    let missing = |looked_at| WeightsError::NotInCache { id: id.to_owned(), looked_at };
    let cache = env.cache_dir().ok_or_else(|| missing(None))?;
    let repository = cache.join(format!("models--{}", id.replace('/', "--")));
    if !repository.is_dir() {
        return Err(missing(Some(repository)));
    }
    let reference = repository.join("refs/main");
    let commit = fs::read_to_string(&reference).map_err(|_| missing(Some(reference.clone())))?;
    let commit = commit.trim();
    // A commit is hexadecimal, so it cannot lead out of the cache.
    if commit.is_empty() || !commit.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(missing(Some(reference)));
    }
    let snapshot = repository.join("snapshots").join(commit);
    match snapshot.is_dir() {
        true => Ok(snapshot),
        false => Err(missing(Some(snapshot))),
    }
}

/// Finds what a `--model` argument means: an existing path wins, then a hub id in the cache.
///
/// # Errors
/// `NotInCache` for a hub id that is not there, `NotAModel` for anything else.
pub fn resolve_model(arg: &str, env: &HubEnv) -> Result<ModelPath, WeightsError> {
    let path = PathBuf::from(arg);
    if path.is_dir() {
        return Ok(ModelPath::Folder(path));
    }
    if path.exists() {
        let is_config = arg.ends_with(".json") && !arg.ends_with(".index.json");
        return Ok(if is_config { ModelPath::Config(path) } else { ModelPath::WeightFile(path) });
    }
    find_in_hub(arg, env).map(ModelPath::Folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_have_an_organisation_and_a_name() {
        let check = |arg, expected| assert_eq!(is_hub_id(arg), expected, "{arg}");
        check("facebook/esm2_t6_8M_UR50D", true);
        check("zhihan1996/DNABERT-S", true);
        check("esm2", false);
        check("a/b/c", false);
        check("../b", false);
        check("/etc", false);
        check("./model", false);
        check("a/..", false);
        check("a/b--c", false);
        check("a b/c", false);
        check("a/", false);
    }

    #[test]
    fn the_nearest_variable_places_the_cache() {
        let check = |pairs: &[(&str, &str)], expected: Option<&str>| {
            let lookup = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            assert_eq!(HubEnv::from_lookup(lookup).cache_dir(), expected.map(PathBuf::from), "{pairs:?}");
        };
        check(&[], None);
        check(&[("HOME", "/h")], Some("/h/.cache/huggingface/hub"));
        check(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], Some("/x/huggingface/hub"));
        check(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/f")], Some("/h/f/hub"));
        check(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], Some("/c"));
        check(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "")], Some("/f/hub"));
    }
}
