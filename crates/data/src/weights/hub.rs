//! Resolves a model argument: an existing path, or a hub id in the local Hugging Face cache. [`Repository`] downloads
//! missing files into the cache. Invariant: resolving makes no network requests, and a hub id or commit cannot lead
//! out of the cache folder. Source of layout and variables: the huggingface_hub documentation, "Understand caching"
//! and "Environment variables".

mod client;
mod digest;
mod error;
mod fetch;
mod patience;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{HubError, HubErrorKind};
pub use fetch::{FetchEvent, FetchProgress, Repository};

use super::WeightsError;

/// Address of the hub if `HF_ENDPOINT` is not set.
const ENDPOINT: &str = "https://huggingface.co";

/// Maximum length of a hub id in bytes (huggingface_hub, `validate_repo_id`).
const MAX_ID: usize = 96;

/// Environment variables that locate the cache and the hub. They are read once into this struct, so that tests can
/// pass their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HubEnv {
    /// `HF_HUB_CACHE`: the cache folder itself.
    pub hub_cache: Option<PathBuf>,
    /// `HF_HOME`: the cache is its folder `hub`.
    pub hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: the cache is `huggingface/hub` in it.
    pub xdg_cache_home: Option<PathBuf>,
    /// `TORCH_HOME`: torch.hub's checkpoints are in its folder `hub/checkpoints`.
    pub torch_home: Option<PathBuf>,
    /// `HOME`: the cache is `.cache/huggingface/hub` in it.
    pub home: Option<PathBuf>,
    /// `HF_HUB_OFFLINE`: nothing is fetched.
    pub offline: bool,
    /// `HF_ENDPOINT`: the address of another hub.
    pub endpoint: Option<String>,
    /// `HF_TOKEN`: the access token.
    pub token: Option<Token>,
    /// `HF_TOKEN_PATH`: the file with the access token, used if `HF_TOKEN` is not set.
    pub token_path: Option<PathBuf>,
    /// `SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE` or `CURL_CA_BUNDLE`: certificates instead of the bundled ones.
    pub certificates: Option<PathBuf>,
    /// Whether to use the proxies that `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` of the process name.
    pub proxies: bool,
    /// Timeouts and retries; `HF_HUB_DOWNLOAD_TIMEOUT` sets `answer`, in seconds.
    pub patience: RetryPolicy,
}

/// An access token. Its `Debug` output does not contain the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Timeouts and retries of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Timeout of each of: resolving the name, connecting, the response's headers, and each read of the body.
    pub timeout: Duration,
    /// Pause before the second attempt; doubled before each further attempt.
    pub backoff: Duration,
    /// Maximum number of consecutive attempts without progress.
    pub attempts: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy { timeout: Duration::from_secs(30), backoff: Duration::from_secs(1), attempts: 5 }
    }
}

/// The kind of path that a model argument resolved to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelPath {
    /// A folder with `config.json`, weights and tokenizer.
    Folder(PathBuf),
    /// A weight file or a shard index.
    WeightFile(PathBuf),
    /// A config without weights, which is sufficient for planning.
    Config(PathBuf),
}

impl HubEnv {
    /// Reads the environment of the process, with proxies enabled.
    pub fn from_process() -> HubEnv {
        HubEnv { proxies: true, ..HubEnv::from_lookup(|name| std::env::var_os(name)) }
    }

    /// Reads variables through `lookup`, with proxies disabled; empty values count as unset, and a leading `~` in a
    /// path is replaced by `HOME`.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> HubEnv {
        let home = lookup("HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = |name| {
            let path = PathBuf::from(lookup(name).filter(|value| !value.is_empty())?);
            match (path.strip_prefix("~"), &home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path),
            }
        };
        let text = |name| Some(lookup(name)?.to_str()?.trim().to_owned()).filter(|text| !text.is_empty());
        let mut patience = RetryPolicy::default();
        let seconds = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
        if let Some(seconds) = seconds.filter(|seconds| *seconds > 0) {
            patience.timeout = Duration::from_secs(seconds);
        }
        HubEnv {
            hub_cache: path("HF_HUB_CACHE"),
            hf_home: path("HF_HOME"),
            xdg_cache_home: path("XDG_CACHE_HOME"),
            torch_home: path("TORCH_HOME"),
            offline: text("HF_HUB_OFFLINE")
                .is_some_and(|text| matches!(&*text.to_uppercase(), "1" | "ON" | "YES" | "TRUE")),
            endpoint: text("HF_ENDPOINT"),
            token: text("HF_TOKEN").map(Token),
            token_path: path("HF_TOKEN_PATH"),
            certificates: path("SSL_CERT_FILE")
                .or_else(|| path("REQUESTS_CA_BUNDLE"))
                .or_else(|| path("CURL_CA_BUNDLE")),
            proxies: false,
            patience,
            home,
        }
    }

    /// The cache folder, whether or not it exists; `None` when no variable is set.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.hub_cache.clone().or_else(|| Some(self.hf_folder()?.join("hub")))
    }

    /// The folder in which torch.hub keeps downloaded checkpoints, whether or not it exists; `None` when no variable
    /// is set. Source: torch/hub.py, `_get_torch_home` and `load_state_dict_from_url`.
    pub fn torch_checkpoints(&self) -> Option<PathBuf> {
        Some(
            self.torch_home
                .clone()
                .or_else(|| Some(self.xdg_cache_home.as_ref()?.join("torch")))
                .or_else(|| Some(self.home.as_ref()?.join(".cache/torch")))?
                .join("hub/checkpoints"),
        )
    }

    /// The home folder of huggingface_hub (`HF_HOME`), which contains the cache and the token.
    fn hf_folder(&self) -> Option<PathBuf> {
        self.hf_home
            .clone()
            .or_else(|| Some(self.xdg_cache_home.as_ref()?.join("huggingface")))
            .or_else(|| Some(self.home.as_ref()?.join(".cache/huggingface")))
    }

    fn endpoint(&self) -> &str {
        self.endpoint.as_deref().unwrap_or(ENDPOINT)
    }

    /// The token from `HF_TOKEN`, or else from the file that `hf auth login` writes.
    fn token(&self) -> Option<String> {
        if let Some(Token(token)) = &self.token {
            return Some(token.clone());
        }
        let path = self.token_path.clone().or_else(|| Some(self.hf_folder()?.join("token")))?;
        let token = fs::read_to_string(path).ok()?.trim().to_owned();
        Some(token).filter(|token| !token.is_empty())
    }
}

impl ModelPath {
    /// The path itself.
    pub fn path(&self) -> &Path {
        match self {
            ModelPath::Folder(path) | ModelPath::WeightFile(path) | ModelPath::Config(path) => path,
        }
    }

    /// The path of the model's config: `config.json` in the folder or beside the weight file, or the path itself. The
    /// file need not exist.
    pub fn config(&self) -> PathBuf {
        match self {
            ModelPath::Folder(folder) => folder.join("config.json"),
            ModelPath::WeightFile(file) => file.with_file_name("config.json"),
            ModelPath::Config(path) => path.clone(),
        }
    }

    /// The path to pass to `Weights::open`; `None` for a config without weights.
    pub fn weights(&self) -> Option<&Path> {
        match self {
            ModelPath::Folder(path) | ModelPath::WeightFile(path) => Some(path),
            ModelPath::Config(_) => None,
        }
    }
}

/// Whether `arg` has the form of a hub id, `org/name` or `org/name@revision`, where the revision is a branch, a tag or a commit.
pub fn is_hub_id(arg: &str) -> bool {
    let (id, revision) = match arg.split_once('@') {
        Some((id, revision)) => (id, revision),
        None => (arg, MAIN),
    };
    is_repository(id) && is_name(revision) && revision.len() <= MAX_ID
}

/// The revision that is used if none is named.
const MAIN: &str = "main";

/// Whether `text` is a name of letters, digits, `-`, `_` and `.` that cannot lead out of a folder.
fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("..")
}

/// The repository and the revision of a hub id.
fn revision_of(id: &str) -> (&str, &str) {
    id.split_once('@').unwrap_or((id, MAIN))
}

/// Whether `arg` has the form `org/name`.
fn is_repository(arg: &str) -> bool {
    let parts = arg.split_once('/').is_some_and(|(org, name)| is_name(org) && is_name(name));
    parts && arg.len() <= MAX_ID && !arg.contains("--")
}

/// Returns the error for an `arg` that does not exist and is a path rather than a hub id; `None` if it may be a hub id. A path
/// has more than two parts, or a parent that exists here, or a parent whose name resembles that of a folder here that has the last part.
pub fn missing_path(arg: &str) -> Option<WeightsError> {
    let path = Path::new(arg);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty())?;
    let similar = similar_path(path);
    let is_path = !is_hub_id(arg) || parent.exists() || similar.is_some();
    is_path.then(|| WeightsError::NoSuchPath { arg: arg.to_owned(), similar })
}

/// An existing path that differs from `path` by a typing error in one of its last two parts.
fn similar_path(path: &Path) -> Option<PathBuf> {
    let parent = path.parent()?;
    let name = path.file_name()?.to_str()?;
    if parent.is_dir() {
        return similar_names(parent, name).into_iter().map(|found| parent.join(found)).next();
    }
    let above = parent.parent()?;
    let folder = parent.file_name()?.to_str()?;
    let found = similar_names(above, folder).into_iter().map(|found| above.join(found).join(name));
    found.into_iter().find(|path| path.exists())
}

/// The names in a folder that differ from `wanted` by a typing error, sorted.
fn similar_names(folder: &Path, wanted: &str) -> Vec<String> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let names = fs::read_dir(folder).into_iter().flatten().flatten().take(MOST_ENTRIES);
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names.retain(|name| is_typing_error(name, wanted));
    names
}

/// Maximum number of entries of a folder that are compared with a name.
const MOST_ENTRIES: usize = 10_000;

/// Whether two names differ by at most two letters that were left out, added or replaced, and agree in most letters.
fn is_typing_error(one: &str, other: &str) -> bool {
    let one: Vec<char> = one.chars().collect();
    let other: Vec<char> = other.chars().collect();
    let longest = one.len().max(other.len());
    if one == other || one.len().abs_diff(other.len()) > 2 || longest > 256 {
        return false;
    }
    // Levenshtein's distance, a row at a time.
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    let distance = row[other.len()];
    distance <= 2 && 3 * distance <= longest
}

/// Returns the snapshot folder of a hub id in the cache, of its revision or else of the main one.
///
/// # Errors
/// `NotAModel` if `id` is not a hub id; `NotInCache`, with the missing path, if the cache does not have it.
pub fn find_in_hub(id: &str, env: &HubEnv) -> Result<PathBuf, WeightsError> {
    let repository = repository_folder(id, env)?;
    if !repository.is_dir() {
        return Err(not_in_cache(id, env, repository));
    }
    let commit =
        cached_commit(&repository, revision_of(id).1).map_err(|reference| not_in_cache(id, env, reference))?;
    let snapshot = repository.join("snapshots").join(commit);
    if snapshot.is_dir() { Ok(snapshot) } else { Err(not_in_cache(id, env, snapshot)) }
}

/// The error for a model whose path `missing` is not in the cache.
fn not_in_cache(id: &str, env: &HubEnv, missing: PathBuf) -> WeightsError {
    WeightsError::NotInCache { id: id.to_owned(), looked_at: Some(missing), offline: env.offline }
}

/// The folder of a hub id in the cache, whether or not it exists.
fn repository_folder(id: &str, env: &HubEnv) -> Result<PathBuf, WeightsError> {
    if !is_hub_id(id) {
        return Err(WeightsError::NotAModel { arg: id.to_owned() });
    }
    let offline = env.offline;
    let (repository, _) = revision_of(id);
    Ok(env
        .cache_dir()
        .ok_or_else(|| WeightsError::NotInCache { id: id.to_owned(), looked_at: None, offline })?
        .join(format!("models--{}", repository.replace('/', "--"))))
}

/// Whether a revision is a whole commit, which names a snapshot without a reference.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Reads the commit of a repository's revision from `refs/REVISION`; a commit stands for itself. The error is the path of that
/// file.
fn cached_commit(repository: &Path, revision: &str) -> Result<String, PathBuf> {
    if is_commit(revision) {
        return Ok(revision.to_owned());
    }
    let reference = repository.join("refs").join(revision);
    let commit = fs::read_to_string(&reference).unwrap_or_default();
    let commit = commit.trim();
    // A commit is hexadecimal, so it cannot lead out of the cache.
    if !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_hexdigit()) {
        Ok(commit.to_owned())
    } else {
        Err(reference)
    }
}

/// Resolves a `--model` argument: an existing path takes precedence over a hub id in the cache.
///
/// # Errors
/// `NotInCache` for a hub id that is not in the cache, `NotAModel` for any other argument.
pub fn resolve_model(arg: &str, env: &HubEnv) -> Result<ModelPath, WeightsError> {
    let path = PathBuf::from(arg);
    if path.is_dir() {
        return Ok(ModelPath::Folder(path));
    }
    if path.exists() {
        let is_config = arg.ends_with(".json") && !arg.ends_with(".index.json");
        return Ok(if is_config { ModelPath::Config(path) } else { ModelPath::WeightFile(path) });
    }
    match missing_path(arg) {
        Some(error) => Err(error),
        None => find_in_hub(arg, env).map(ModelPath::Folder),
    }
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
        check("org/name@v1.0", true);
        check("org/name@0123456789abcdef0123456789abcdef01234567", true);
        for id in ["org/name@", "org/name@../x", "org/name@a/b", "org/name@.x", "org/name@a@b", "org/name@a..b"]
        {
            check(id, false);
        }
        check("name@v1", false);
    }

    #[test]
    fn a_revision_is_found_by_its_reference_or_its_commit() {
        let cache = std::env::temp_dir().join(format!("plimsoll-revisions-{}", std::process::id()));
        let repository = cache.join("models--org--name");
        let commit = "0123456789abcdef0123456789abcdef01234567";
        fs::create_dir_all(repository.join("refs")).unwrap();
        for (reference, commit) in [("main", "aa"), ("v1.0", commit)] {
            fs::write(repository.join("refs").join(reference), commit).unwrap();
            fs::create_dir_all(repository.join("snapshots").join(commit)).unwrap();
        }
        let env = HubEnv { hub_cache: Some(cache.clone()), ..HubEnv::default() };
        for (id, wanted) in [
            ("org/name", Some("aa")),
            ("org/name@main", Some("aa")),
            ("org/name@v1.0", Some(commit)),
            ("org/name@0123456789abcdef0123456789abcdef01234567", Some(commit)),
            ("org/name@v2", None),
            ("org/name@ffffffffffffffffffffffffffffffffffffffff", None),
        ] {
            let found = find_in_hub(id, &env).ok();
            assert_eq!(found, wanted.map(|commit| repository.join("snapshots").join(commit)), "{id}");
        }
        fs::remove_dir_all(&cache).unwrap();
    }

    #[test]
    fn what_exists_nearby_makes_an_argument_a_path() {
        let here = std::env::temp_dir().join(format!("plimsoll-paths-{}", std::process::id()));
        fs::create_dir_all(here.join("cls1/best")).unwrap();
        let of = |arg: &str| missing_path(&format!("{}/{arg}", here.display())).map(|error| error.to_string());
        for (arg, similar) in [
            ("clsl1/best", Some("cls1/best")),
            ("cls1/bests", Some("cls1/best")),
            ("cls1/other", None),
            ("nowhere/of/it", None),
        ] {
            let error = of(arg).unwrap_or_else(|| panic!("{arg}"));
            let wanted = similar.map_or("check the path".to_owned(), |path| {
                format!("did you mean `{}`?", here.join(path).display())
            });
            assert!(error.contains(&wanted), "{arg}: {error}");
        }
        fs::remove_dir_all(&here).unwrap();
        // A name of two parts may be that of the hub where nothing here resembles it.
        assert!(missing_path("facebook/esm2_t6_8M_UR50D").is_none());
        assert!(missing_path("esm2").is_none());
        assert!(missing_path("a/b/c").is_some());
        // The folder of this package has a folder `src`.
        assert!(missing_path("src/esm2").is_some() && missing_path("srcc/lib.rs").is_some());
    }

    #[test]
    fn torch_hub_has_a_folder_of_its_own() {
        let check = |pairs: &[(&str, &str)], expected: Option<&str>| {
            let lookup = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            let found = HubEnv::from_lookup(lookup).torch_checkpoints();
            assert_eq!(found, expected.map(PathBuf::from), "{pairs:?}");
        };
        check(&[], None);
        check(&[("HOME", "/h")], Some("/h/.cache/torch/hub/checkpoints"));
        check(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], Some("/x/torch/hub/checkpoints"));
        check(&[("HOME", "/h"), ("TORCH_HOME", "~/t"), ("XDG_CACHE_HOME", "/x")], Some("/h/t/hub/checkpoints"));
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
