//! The index file (`*.index.json`) of sharded weights. Invariant: shard names cannot lead out of the index's folder,
//! and every shard named by the index exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::WeightsError;
use super::source::ByteSource;

/// Maximum size of an index file in bytes; the index of a few thousand tensors takes less than a megabyte.
const INDEX_LIMIT: u64 = 64 << 20;

/// The JSON of `*.index.json` as transformers writes it. Its `metadata` (total sizes) is ignored.
#[derive(serde::Deserialize)]
struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

/// A parsed index.
pub(super) struct Index {
    /// The shard files, sorted by name.
    pub(super) shards: Vec<PathBuf>,
    /// The index into `shards` of each tensor, by tensor name.
    pub(super) tensors: BTreeMap<String, usize>,
}

/// Returns the paths of the shards that an index names, sorted by name. The shards need not exist.
///
/// # Errors
/// `Json` or `ShardOutside`, and the errors of reading a file.
pub fn shard_files(index: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    shards(index, &parse(index)?)
}

/// Reads an index and checks that its shards exist.
pub(super) fn read_index(path: &Path) -> Result<Index, WeightsError> {
    let parsed = parse(path)?;
    let shards = shards(path, &parsed)?;
    if let Some(shard) = shards.iter().find(|shard| !shard.is_file()) {
        return Err(WeightsError::MissingShard { path: path.to_owned(), shard: shard.clone() });
    }
    let names: BTreeSet<&String> = parsed.weight_map.values().collect();
    let numbers: BTreeMap<&String, usize> = names.into_iter().zip(0..).collect();
    let tensors = parsed.weight_map.iter().map(|(name, shard)| (name.clone(), numbers[shard])).collect();
    Ok(Index { shards, tensors })
}

fn parse(path: &Path) -> Result<IndexFile, WeightsError> {
    let source = ByteSource::open(path)?;
    let bytes = source.read_vec(0, source.len(), INDEX_LIMIT, "an index")?;
    serde_json::from_slice(&bytes).map_err(|error| WeightsError::json(path, error))
}

fn shards(index: &Path, parsed: &IndexFile) -> Result<Vec<PathBuf>, WeightsError> {
    let folder = index.parent().unwrap_or(Path::new(""));
    let names: BTreeSet<&String> = parsed.weight_map.values().collect();
    let mut paths = vec![];
    for shard in names {
        if !is_relative_name(shard) {
            return Err(WeightsError::ShardOutside { path: index.to_owned(), shard: shard.clone() });
        }
        paths.push(folder.join(shard));
    }
    Ok(paths)
}

/// Whether a path has only names, so that it leads neither out of its folder nor to the folder itself.
fn is_relative_name(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}
