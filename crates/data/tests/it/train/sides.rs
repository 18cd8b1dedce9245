//! Tests that no training document is a validation document.

use std::collections::BTreeSet;

use plimsoll_data::train::{Dataset, DatasetSettings, PackLimits, Split, Validation};

use super::{epoch, file, lines, settings, texts};
use crate::support::folder;

/// The documents of a split, each of which must fit one sequence.
fn documents(data: &Dataset, split: Split) -> BTreeSet<String> {
    texts(&epoch(data, split)).into_iter().collect()
}

fn open(settings: DatasetSettings) -> Dataset {
    let bounds = PackLimits { tokens: 1 << 16, sequences: 1000, longest: 4096 };
    Dataset::open(DatasetSettings { bounds, ..settings }).unwrap()
}

#[test]
fn equal_documents_are_on_one_side() {
    let folder = folder("train_sides");
    let path = file(&folder, "a.txt", lines(60).repeat(3));
    let bytes = lines(60).lines().map(|line| line.trim_end().len() as u64).sum::<u64>();
    for seed in 0..5 {
        let validation = Validation::Fraction { fraction: 0.3, seed };
        let data = open(DatasetSettings { validation, ..settings(&[&path]) });
        let train = documents(&data, Split::Train);
        let validation = documents(&data, Split::Validation);
        assert_eq!((train.len() + validation.len(), train.intersection(&validation).count()), (60, 0));
        let census = data.census();
        assert_eq!(census.train.documents, 3 * train.len() as u64);
        assert_eq!(census.validation.documents, 3 * validation.len() as u64);
        assert_eq!(census.train.bytes + census.validation.bytes, 3 * bytes);
    }
}

#[test]
fn validation_files_lose_what_is_trained_on() {
    let folder = folder("train_validation_files");
    let train = file(&folder, "a.txt", "one\ntwo\nthree\n");
    let other = file(&folder, "b.txt", "two\nfour\ntwo  \nfive\n");
    let validation = Validation::Files(vec![other]);
    let data = open(DatasetSettings { validation, ..settings(&[&train]) });
    let census = data.census();
    assert_eq!((census.train.documents, census.validation.documents, census.dropped), (3, 2, 2));
    let texts = |names: &[&str]| names.iter().map(|name| format!("{name}$")).collect::<BTreeSet<_>>();
    assert_eq!(documents(&data, Split::Validation), texts(&["four", "five"]));
    assert_eq!(documents(&data, Split::Train), texts(&["one", "two", "three"]));
}
