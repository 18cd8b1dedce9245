//! Sharded weights: the index beside the shards. Invariant: only files inside the index's folder
//! are opened, and every tensor that the index promises is there.

use std::collections::{BTreeMap, BTreeSet};
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

/// The shards that an index names, beside it and sorted by name, whether or not they are there.
///
/// # Errors
/// `Json` or `ShardOutside`, and what reading a file may give.
pub fn shard_files(index: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    shards(index, &parse(index)?)
}

/// Reads an index and checks that its shards are beside it.
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
    let source = Source::open(path)?;
    let bytes = source.read_vec(0, source.len(), INDEX_LIMIT, "an index")?;
    serde_json::from_slice(&bytes).map_err(|error| WeightsError::json(path, error))
}

fn shards(index: &Path, parsed: &IndexFile) -> Result<Vec<PathBuf>, WeightsError> {
    let folder = index.parent().unwrap_or(Path::new(""));
    let names: BTreeSet<&String> = parsed.weight_map.values().collect();
    let inside = |shard: &str| {
        !shard.is_empty() && Path::new(shard).components().all(|part| matches!(part, Component::Normal(_)))
    };
    let place = |shard: &String| match inside(shard) {
        true => Ok(folder.join(shard)),
        false => Err(WeightsError::ShardOutside { path: index.to_owned(), shard: shard.clone() }),
    };
    names.into_iter().map(place).collect()
}
