//! Tests that a stream that starts at a saved position gives the packs of an uninterrupted stream.

use plimsoll_data::train::{
    Classes, DataPosition, Dataset, DatasetFormat, DatasetSettings, LabelsFrom, MaskRates, Objective,
    PackLimits, Shuffle, Split, TokenizerKind, TrainingPack, Validation,
};
use proptest::prelude::*;

use super::{file, lines, settings};
use crate::support::folder;

/// The results of `count` calls of `fill` from a position on: `false` at the end of an epoch, and the pack.
fn from(data: &Dataset, position: &DataPosition, count: usize) -> Vec<(bool, TrainingPack)> {
    let mut stream = data.stream(Split::Train, position).expect("opened");
    let next = |_| {
        let mut pack = TrainingPack::default();
        let more = stream.fill(&mut pack).expect("filled");
        (more, pack)
    };
    (0..count).map(next).collect()
}

fn check(settings: DatasetSettings, cut: usize) {
    let data = Dataset::open(settings).unwrap();
    let whole = from(&data, &data.start(), 160);
    // The packs extend over the end of an epoch, and their numbers go on.
    assert!(whole.iter().any(|(more, _)| !more));
    let numbers: Vec<u64> = whole.iter().filter(|(more, _)| *more).map(|(_, pack)| pack.number).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let position = whole[cut].1.position_after.as_ref().expect("set");
    // A checkpoint stores the position as JSON.
    let text = serde_json::to_string(position).unwrap();
    assert!(text.len() < 200, "{text}");
    let position: DataPosition = serde_json::from_str(&text).unwrap();
    let reopened = Dataset::open(DatasetSettings { workers: 1, ..data.settings().clone() }).unwrap();
    assert_eq!(from(&reopened, &position, 40), whole[cut + 1..][..40]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn cut_anywhere_and_continue(
        cut in 0_usize..119,
        documents in 0_usize..20,
        bytes in 1_usize..1500,
        tokens in 60_usize..120,
        longest in 10_usize..40,
        seed in 0_u64..100,
        fraction in prop::option::of(Just(0.2)),
    ) {
        let folder = folder("train_resume");
        let all = lines(30);
        let (first, second) = all.split_at(all.len() / 2);
        let paths = [file(&folder, "a.txt", first), file(&folder, "b.txt", second), file(&folder, "c.txt", "")];
        check(DatasetSettings {
            bounds: PackLimits { tokens, sequences: 8, longest },
            shuffle: Shuffle { documents, bytes },
            validation: fraction.map_or(Validation::None, |fraction| Validation::Fraction { fraction, seed: 0 }),
            seed,
            ..settings(&[&paths[0], &paths[1], &paths[2]])
        }, cut);
    }

    #[test]
    fn masks_are_the_same_again(cut in 0_usize..119, seed in 0_u64..100) {
        let folder = folder("train_resume_masked");
        let fasta: String = (0..25).map(|i| format!(">p{i}\n{}\n", "MKVLAGSTRE".repeat(1 + i * 5 % 9))).collect();
        let path = file(&folder, "a.fa", fasta);
        check(DatasetSettings {
            bounds: PackLimits { tokens: 70, sequences: 5, longest: 30 },
            shuffle: Shuffle { documents: 8, bytes: 1 << 16 },
            format: DatasetFormat::Sequences,
            tokens: TokenizerKind::Esm,
            task: Objective::Masked(MaskRates::BERT),
            seed,
            ..settings(&[&path])
        }, cut);
    }
}

/// A position at every pack of an epoch and of the start of the next one continues as the uninterrupted stream does.
#[test]
fn every_position_continues() {
    let folder = folder("train_resume_every");
    let fasta = |count: usize, most: usize| -> String {
        (0..count).map(|i| format!(">p{i}\n{}\n", "MKVLAGSTRE".repeat(1 + i * 5 % most))).collect()
    };
    let long = file(&folder, "a.fa", fasta(60, 13));
    let short = file(&folder, "b.fa", fasta(150, 3));
    let table: String = (0..150).map(|i| format!("p{i}\t{}\n", i % 2)).collect();
    let table = file(&folder, "b.tsv", table);
    let text = file(&folder, "a.txt", lines(60));
    let base = settings(&[&text]);
    let proteins = DatasetSettings {
        train: vec![long],
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        ..base.clone()
    };
    let classify =
        Objective::Classify { labels: LabelsFrom::Table(table), classes: Classes::Count(2), truncate: true };
    // Blocks end in the middle of windows: all epochs have more packs than a block.
    for (settings, (tokens, sequences, longest)) in [
        (base, (20, 3, 17)),
        (DatasetSettings { task: Objective::Masked(MaskRates::BERT), ..proteins.clone() }, (25, 3, 20)),
        (DatasetSettings { task: classify, train: vec![short], ..proteins }, (30, 1, 30)),
    ] {
        for documents in [0, 23, 1000] {
            let data = Dataset::open(DatasetSettings {
                bounds: PackLimits { tokens, sequences, longest },
                shuffle: Shuffle { documents, bytes: 1 << 20 },
                ..settings.clone()
            })
            .unwrap();
            let start = from(&data, &data.start(), 400);
            let epoch = start.iter().position(|(more, _)| !more).expect("the end of an epoch");
            assert!(epoch > 140 && epoch + 60 < 400, "{epoch} packs");
            let sets = [1, 2, 3].map(|workers| {
                Dataset::open(DatasetSettings { workers, prefetch: 1, ..data.settings().clone() }).unwrap()
            });
            for cut in 0..epoch + 40 {
                let position = start[cut].1.position_after.as_ref().expect("set");
                assert_eq!(from(&sets[cut % 3], position, 4), start[cut + 1..cut + 5], "cut at {cut}");
            }
        }
    }
}
