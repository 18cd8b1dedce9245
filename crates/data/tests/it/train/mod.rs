//! Tests of training data, from files to packs.

mod crops;
mod memory;
mod packs;
mod refused;
mod resume;
mod rows;
mod sides;

use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_data::DataError;
use plimsoll_data::train::{
    Dataset, DatasetFormat, DatasetSettings, Objective, PackLimits, Shuffle, Split, TextDocuments,
    TokenizerKind, TrainingPack, Validation,
};

/// Settings for text files with one document per line, tokenized by bytes, with a shuffle window larger than the data.
pub fn settings(train: &[&Path]) -> DatasetSettings {
    DatasetSettings {
        train: train.iter().map(PathBuf::from).collect(),
        validation: Validation::None,
        format: DatasetFormat::Text(TextDocuments::Lines),
        tokens: TokenizerKind::Bytes { end: true },
        task: Objective::Causal,
        bounds: PackLimits { tokens: 64, sequences: 8, longest: 32 },
        seed: 7,
        shuffle: Shuffle { documents: 1000, bytes: 1 << 20 },
        longest_document: 4096,
        strict: false,
        workers: 2,
        prefetch: 2,
    }
}

/// `count` different lines of several lengths.
pub fn lines(count: usize) -> String {
    let line = |i: usize| format!("{i} {}\n", "abcdefghij".repeat(i * 7 % 13));
    (0..count).map(line).collect()
}

/// Writes a file in the folder of a test and returns its path.
pub fn file(folder: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    path
}

/// The packs of the first epoch of a split.
pub fn epoch(data: &Dataset, split: Split) -> Vec<TrainingPack> {
    let mut stream = data.stream(split, &data.start()).expect("opened");
    let mut packs = Vec::new();
    loop {
        let mut pack = TrainingPack::default();
        if stream.fill(&mut pack).expect("filled") { packs.push(pack) } else { return packs }
    }
}

/// The inputs of each sequence and its last target, as text. The end token is shown as `$`.
pub fn texts(packs: &[TrainingPack]) -> Vec<String> {
    let of = |pack: &TrainingPack, [start, end]: [i32; 2]| {
        let ids = &pack.ids[start as usize..end as usize];
        let last = pack.targets[end as usize - 1];
        ids.iter().chain(&[last]).map(|&id| if id == 256 { '$' } else { char::from(id as u8) }).collect()
    };
    packs.iter().flat_map(|pack| pack.spans.iter().map(|&span| of(pack, span))).collect()
}

/// The message with which a data set is refused.
pub fn refusal(settings: DatasetSettings) -> String {
    let error: DataError = Dataset::open(settings).err().expect("refused");
    error.to_string()
}
