//! Tests that a stream that starts at a saved position gives the batches of an uninterrupted stream.

use plimsoll_data::train::{
    Batch, Bounds, Dataset, Format, MaskRates, Objective, Position, Settings, Shuffle, Split, TokenizerKind,
    Validation,
};
use proptest::prelude::*;

use super::{file, lines, settings};
use crate::support::folder;

/// The results of `count` calls of `fill` from a position on: `false` at the end of an epoch, and the batch.
fn from(data: &Dataset, position: &Position, count: usize) -> Vec<(bool, Batch)> {
    let mut stream = data.stream(Split::Train, position).expect("opened");
    let next = |_| {
        let mut batch = Batch::default();
        let more = stream.fill(&mut batch).expect("filled");
        (more, batch)
    };
    (0..count).map(next).collect()
}

fn check(settings: Settings, cut: usize) {
    let data = Dataset::open(settings).unwrap();
    let whole = from(&data, &data.start(), 40);
    // The batches extend over the end of an epoch.
    assert!(whole.iter().any(|(more, _)| !more));
    let position = whole[cut].1.position_after.as_ref().expect("set");
    // A checkpoint stores the position as JSON.
    let text = serde_json::to_string(position).unwrap();
    assert!(text.len() < 200, "{text}");
    let position: Position = serde_json::from_str(&text).unwrap();
    let reopened = Dataset::open(Settings { workers: 1, ..data.settings().clone() }).unwrap();
    assert_eq!(from(&reopened, &position, 39 - cut), whole[cut + 1..]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn cut_anywhere_and_continue(
        cut in 0_usize..39,
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
        check(Settings {
            bounds: Bounds { tokens, sequences: 8, longest },
            shuffle: Shuffle { documents, bytes },
            validation: fraction.map_or(Validation::None, |fraction| Validation::Fraction { fraction, seed: 0 }),
            seed,
            ..settings(&[&paths[0], &paths[1], &paths[2]])
        }, cut);
    }

    #[test]
    fn masks_are_the_same_again(cut in 0_usize..39, seed in 0_u64..100) {
        let folder = folder("train_resume_masked");
        let fasta: String = (0..25).map(|i| format!(">p{i}\n{}\n", "MKVLAGSTRE".repeat(1 + i * 5 % 9))).collect();
        let path = file(&folder, "a.fa", fasta);
        check(Settings {
            bounds: Bounds { tokens: 70, sequences: 5, longest: 30 },
            shuffle: Shuffle { documents: 8, bytes: 1 << 16 },
            format: Format::Sequences,
            tokens: TokenizerKind::Esm,
            task: Objective::Masked(MaskRates::BERT),
            seed,
            ..settings(&[&path])
        }, cut);
    }
}

#[test]
fn a_position_goes_on_with_batches_of_another_size() {
    let folder = folder("train_resume_bounds");
    let path = file(&folder, "a.txt", lines(50));
    let base = Settings { shuffle: Shuffle { documents: 9, bytes: 1 << 16 }, ..settings(&[&path]) };
    let bounds = Bounds { tokens: 150, sequences: 3, longest: 100 };
    let small = Dataset::open(base.clone()).unwrap();
    let large = Dataset::open(Settings { bounds, ..base }).unwrap();
    let ids = |batches: Vec<(bool, Batch)>| {
        let epoch = batches.into_iter().take_while(|(more, _)| *more);
        epoch.flat_map(|(_, batch)| batch.ids).collect::<Vec<i32>>()
    };
    let whole = from(&small, &small.start(), 99);
    for cut in [0, 3, 10, 20] {
        let before = ids(whole[..=cut].to_vec());
        let position = whole[cut].1.position_after.as_ref().unwrap();
        assert_eq!([before, ids(from(&large, position, 99))].concat(), ids(whole.clone()), "cut at {cut}");
    }
}
