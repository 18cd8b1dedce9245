//! Sharded weights: the index beside the shards. Invariant: only files inside the index's folder
//! are opened, and every tensor that the index promises is there.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::WeightsError;
use super::source::Source;

/// An index of a few thousand tensors takes less than a megabyte.
const INDEX_LIMIT: u64 = 64 << 20;

/// `*.index.json` as transformers writes it; its metadata only repeats the sizes.
#[derive(serde::Deserialize)]
struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

/// A parsed index.
pub(super) struct Index {
    /// The shard files, sorted by name.
    pub(super) shards: Vec<PathBuf>,
    /// Tensor name to a place in `shards`.
    pub(super) tensors: BTreeMap<String, usize>,
}

/// Reads an index and checks that its shards are beside it.
pub(super) fn read_index(path: &Path) -> Result<Index, WeightsError> {
    let source = Source::open(path)?;
    let bytes = source.read_vec(0, source.len(), INDEX_LIMIT, "an index")?;
    let parsed: IndexFile = serde_json::from_slice(&bytes).map_err(|error| WeightsError::json(path, error))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut numbers: BTreeMap<&str, usize> =
        parsed.weight_map.values().map(|shard| (shard.as_str(), 0)).collect();
    let mut shards = Vec::with_capacity(numbers.len());
    for (shard, number) in &mut numbers {
        *number = shards.len();
        shards.push(shard_path(path, folder, shard)?);
    }
    let tensors =
        parsed.weight_map.iter().map(|(name, shard)| (name.clone(), numbers[shard.as_str()])).collect();
    Ok(Index { shards, tensors })
}

fn shard_path(index: &Path, folder: &Path, shard: &str) -> Result<PathBuf, WeightsError> {
    let inside =
        !shard.is_empty() && Path::new(shard).components().all(|part| matches!(part, Component::Normal(_)));
    if !inside {
        return Err(WeightsError::ShardOutside { path: index.to_owned(), shard: shard.to_owned() });
    }
    let shard = folder.join(shard);
    match shard.is_file() {
        true => Ok(shard),
        false => Err(WeightsError::MissingShard { path: index.to_owned(), shard }),
    }
}
