//! Tests of the messages for refused training data and settings.

use plimsoll_data::train::{
    DataPosition, Dataset, DatasetFormat, DatasetSettings, MaskRates, Objective, PackLimits, Split,
    TokenizerKind, TrainingPack, Validation,
};

use super::{file, lines, refusal, settings};
use crate::support::folder;

#[test]
fn no_data_says_which_and_why() {
    let folder = folder("train_no_data");
    let empty = file(&folder, "e.txt", "");
    let blank = file(&folder, "s.txt", "\n \n");
    let one = file(&folder, "one.txt", "only\n");
    let check = |settings: DatasetSettings, expected: &str| {
        let found = refusal(settings);
        assert!(found.contains(expected), "{found}");
    };
    check(settings(&[&empty, &blank]), "e.txt: no document to train on in 2 files");
    let both = |fraction| DatasetSettings {
        validation: Validation::Fraction { fraction, seed: 0 },
        ..settings(&[&one])
    };
    check(
        both(0.000_1),
        "no document to validate on: with the validation fraction 0.0001 all 1 are trained on",
    );
    check(both(0.999_9), "no document to train on: with the validation fraction 0.9999 all 1 are validated on");
    let files = |path: &std::path::Path, train| DatasetSettings {
        validation: Validation::Files(vec![path.to_owned()]),
        ..settings(&[train])
    };
    check(files(&empty, &one), "no document to validate on: the validation files are empty");
    check(files(&one, &one), "all 1 of the validation files are also training documents");
    check(files(&one, &empty), "no document to train on: the training files are empty");
    check(settings(&[]), "no training data is named");
    check(settings(&[&folder.join("absent")]), "there is no such file");

    // Documents of one byte, which have no target without an end token.
    let short = file(&folder, "short.txt", "a\nb\nc\n");
    let data =
        Dataset::open(DatasetSettings { tokens: TokenizerKind::Bytes { end: false }, ..settings(&[&short]) })
            .unwrap();
    let error =
        data.stream(Split::Train, &data.start()).unwrap().fill(&mut TrainingPack::default()).unwrap_err();
    assert!(error.to_string().contains("short.txt: no document contains a target"), "{error}");
}

#[test]
fn settings_that_contradict_themselves() {
    let folder = folder("train_settings");
    let path = file(&folder, "a.txt", lines(5));
    let base = settings(&[&path]);
    let bounds = |tokens, sequences, longest| DatasetSettings {
        bounds: PackLimits { tokens, sequences, longest },
        ..base.clone()
    };
    let mask = Objective::Masked(MaskRates { select: 0.0, ..MaskRates::BERT });
    for (settings, expected) in [
        (bounds(8, 1, 9), "the longest sequence has more tokens than a pack"),
        (bounds(8, 0, 8), "must hold a sequence"),
        (DatasetSettings { workers: 0, ..base.clone() }, "at least one worker"),
        (
            DatasetSettings { tokens: TokenizerKind::Ids { vocab: 5 }, ..base.clone() },
            "token ids go with files of ids",
        ),
        (DatasetSettings { task: mask, ..base.clone() }, "the masked part must be above 0"),
        (
            DatasetSettings { task: Objective::Masked(MaskRates::BERT), ..base.clone() },
            "this tokenizer has no mask token",
        ),
        (
            DatasetSettings { validation: Validation::Fraction { fraction: 1.0, seed: 0 }, ..base.clone() },
            "the validation fraction must be above 0 and below 1",
        ),
        (
            DatasetSettings { longest_document: 20, ..base.clone() },
            "a.txt, line 2: a document of more than 20 bytes",
        ),
        (
            DatasetSettings { format: DatasetFormat::JsonLines { field: "text".into() }, ..base.clone() },
            "a.txt, line 1: ",
        ),
    ] {
        let found = refusal(settings);
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn a_position_is_one_in_its_data() {
    let folder = folder("train_other_data");
    let path = file(&folder, "a.txt", lines(30));
    let base = settings(&[&path]);
    let data = Dataset::open(base.clone()).unwrap();
    let refused = |settings: DatasetSettings, position: &DataPosition| {
        let data = Dataset::open(settings).unwrap();
        data.stream(Split::Train, position).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let start = data.start();
    assert_eq!(refused(base.clone(), &start), "");
    let bounds = PackLimits { tokens: 128, sequences: 2, longest: 9 };
    assert_eq!(
        refused(DatasetSettings { workers: 1, ..base.clone() }, &start),
        "",
        "another number of workers"
    );
    let other = "the saved position belongs to other data";
    assert!(
        refused(DatasetSettings { bounds, ..base.clone() }, &start).contains(other),
        "packs of another size"
    );
    assert!(refused(DatasetSettings { seed: 8, ..base.clone() }, &start).contains(other));
    assert!(
        refused(DatasetSettings { tokens: TokenizerKind::Bytes { end: false }, ..base.clone() }, &start)
            .contains(other)
    );
    let mut damaged = start.clone();
    damaged.window.file = 2;
    assert!(refused(base.clone(), &damaged).contains("after the last file"));
    damaged.window.file = 0;
    damaged.window.skip = 99;
    let mut stream = data.stream(Split::Train, &damaged).unwrap();
    assert!(
        stream.fill(&mut TrainingPack::default()).unwrap_err().to_string().contains("after the end of a file")
    );
    let last = DataPosition { pack: u64::MAX, ..start.clone() };
    assert!(refused(base.clone(), &last).contains("after the last pack"));
    // The whole data is one block: no number of its packs, and no number of another document, continues in it.
    let packs = super::epoch(&data, Split::Train).len() as u32;
    for (place, packed, expected) in [
        (0, packs, "after the last pack of its documents"),
        (29, packs - 1, "after the last pack of its documents"),
        (30, 1, "after the last pack of its documents"),
        (31, 0, "after the last document of its window"),
    ] {
        let mut stream = data.stream(Split::Train, &DataPosition { place, packed, ..start.clone() }).unwrap();
        let error = stream.fill(&mut TrainingPack::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!stream.fill(&mut TrainingPack::default()).unwrap());
    }
    file(&folder, "a.txt", lines(31));
    assert!(refused(base, &start).contains(other));
}

#[test]
fn data_that_changes_while_it_is_read() {
    let folder = folder("train_changing");
    let path = file(&folder, "a.txt", lines(30));
    let data = Dataset::open(settings(&[&path])).unwrap();
    for text in [lines(29), lines(30) + "more\n", "x".repeat(3000)] {
        file(&folder, "a.txt", text);
        let mut stream = data.stream(Split::Train, &data.start()).unwrap();
        let error = stream.fill(&mut TrainingPack::default()).unwrap_err();
        assert!(error.to_string().contains("a.txt: it changed while the run read it"), "{error}");
    }
}
