//! Training data, from files to batches.

mod batches;
mod memory;
mod refused;
mod resume;
mod rows;
mod sides;

use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_data::DataError;
use plimsoll_data::train::{
    Batch, Bounds, Dataset, Format, Objective, Settings, Shuffle, Split, TextDocuments, TokenizerKind,
    Validation,
};

/// Text by bytes, a document a line, everything in one window.
pub fn settings(train: &[&Path]) -> Settings {
    Settings {
        train: train.iter().map(PathBuf::from).collect(),
        validation: Validation::None,
        format: Format::Text(TextDocuments::Lines),
        tokens: TokenizerKind::Bytes { end: true },
        task: Objective::Causal,
        bounds: Bounds { tokens: 64, sequences: 8, longest: 32 },
        seed: 7,
        shuffle: Shuffle { documents: 1000, bytes: 1 << 20 },
        longest_document: 4096,
        workers: 2,
        prefetch: 2,
    }
}

/// Lines of many lengths, no two alike.
pub fn lines(count: usize) -> String {
    let line = |i: usize| format!("{i} {}\n", "abcdefghij".repeat(i * 7 % 13));
    (0..count).map(line).collect()
}

/// A file in the folder of a test.
pub fn file(folder: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    path
}

/// One epoch of a side from the start.
pub fn epoch(data: &Dataset, split: Split) -> Vec<Batch> {
    let mut stream = data.stream(split, &data.start()).expect("opened");
    let mut batches = Vec::new();
    loop {
        let mut batch = Batch::default();
        match stream.fill(&mut batch).expect("filled") {
            true => batches.push(batch),
            false => return batches,
        }
    }
}

/// The inputs of a batch's sequences, as text; the byte after the last as `$` where it is the document's end.
pub fn texts(batches: &[Batch]) -> Vec<String> {
    let of = |batch: &Batch, [start, end]: [i32; 2]| {
        let ids = &batch.ids[start as usize..end as usize];
        let last = batch.targets[end as usize - 1];
        ids.iter().chain(&[last]).map(|&id| if id == 256 { '$' } else { char::from(id as u8) }).collect()
    };
    batches.iter().flat_map(|batch| batch.spans.iter().map(|&span| of(batch, span))).collect()
}

/// Why a data set is refused.
pub fn refusal(settings: Settings) -> String {
    let error: DataError = Dataset::open(settings).err().expect("refused");
    error.to_string()
}
