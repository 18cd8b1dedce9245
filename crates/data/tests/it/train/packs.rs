//! Tests of the content of training packs: every token is a target once, packs stay within their bounds and are nearly
//! full, and targets belong to the inputs of the same document.

use plimsoll_data::train::{
    Classes, Dataset, DatasetFormat, DatasetSettings, DatasetStream, IdWidth, LabelsFrom, MaskRates, Objective,
    PackLimits, Shuffle, Split, TextDocuments, TokenizerKind, TrainingPack, Validation,
};
use proptest::prelude::*;

use super::{epoch, file, lines, refusal, settings, texts};
use crate::support::{folder, golden};

fn check_bounds(pack: &TrainingPack, bounds: &PackLimits) {
    assert!(!pack.ids.is_empty() && pack.ids.len() <= bounds.tokens && pack.spans.len() <= bounds.sequences);
    let mut at = 0;
    for &[start, end] in &pack.spans {
        assert!(start == at && end > start && (end - start) as usize <= bounds.longest, "{:?}", pack.spans);
        at = end;
    }
    assert_eq!(at as usize, pack.ids.len(), "no padding");
}

#[test]
fn pieces_of_a_document_follow_each_other() {
    let folder = folder("train_pieces");
    let path = file(&folder, "a.txt", "abcdefghijkl\nxyz\n\nq\n");
    let bounds = PackLimits { tokens: 10, sequences: 3, longest: 8 };
    let shuffle = Shuffle { documents: 1, bytes: 1 };
    let data = Dataset::open(DatasetSettings { bounds, shuffle, ..settings(&[&path]) }).unwrap();
    let packs = epoch(&data, Split::Train);
    // A document is cut at the maximum sequence length alone. The last target of a piece is the first input of the next.
    // The longest piece fills the first pack but for two tokens, and of the others only the last fits there.
    assert_eq!(texts(&packs), ["abcdefghi", "q$", "ijkl$", "xyz$"]);
    let targets: Vec<u64> = packs.iter().map(|pack| pack.target_tokens).collect();
    assert_eq!(targets, [9, 7]);
    assert_eq!(packs.iter().map(|pack| pack.number).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(packs[0].spans, [[0, 8], [8, 9]]);
    assert_eq!(packs[0].targets, [98, 99, 100, 101, 102, 103, 104, 105, 256]);
    // Without an end token the last byte of a document is only a target, so a document of one byte has none.
    let tokens = TokenizerKind::Bytes { end: false };
    let data = Dataset::open(DatasetSettings { bounds, shuffle, tokens, ..settings(&[&path]) }).unwrap();
    assert_eq!(texts(&epoch(&data, Split::Train)), ["abcdefghi", "xyz", "ijkl"]);
}

/// Uniform numbers in (0, 1] of a linear congruential generator.
fn uniform(seed: u64) -> impl Iterator<Item = f64> {
    let step = |state: &u64| {
        Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    };
    std::iter::successors(Some(seed), step)
        .skip(1)
        .map(|state| ((state >> 11) + 1) as f64 / (1_u64 << 53) as f64)
}

/// FASTA of `count` proteins with the log-normal lengths exp N(5.6, 0.75).
fn proteins(count: usize) -> String {
    let mut draws = uniform(11);
    let mut fasta = String::new();
    for number in 0..count {
        // Box-Muller.
        let radius = (-2.0 * draws.next().unwrap().ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * draws.next().unwrap()).cos();
        let length = (5.6 + 0.75 * normal).exp().max(1.0) as usize;
        let residue = |draw: f64| char::from(b"LAGVSERTIDPKQNFYMHWC"[(draw * 19.99) as usize]);
        fasta += &format!(">p{number}\n");
        fasta.extend(draws.by_ref().take(length).map(residue));
        fasta.push('\n');
    }
    fasta
}

/// Lines of text: three of four are short paragraphs, the others have up to nine times the tokens of a pack.
fn paragraphs(count: usize) -> String {
    let mut draws = uniform(12);
    let mut text = String::new();
    for number in 0..count {
        let draw = draws.next().unwrap();
        let length = if number % 4 == 3 { 1500.0 + 7700.0 * draw } else { 20.0 + 180.0 * draw };
        text += &format!("{number} {}\n", "word and ".repeat(1 + length as usize / 9));
    }
    text
}

#[test]
fn packs_are_nearly_full() {
    let folder = folder("train_full");
    let fasta = file(&folder, "a.fa", proteins(4000));
    let text = file(&folder, "a.txt", paragraphs(1000));
    let base = DatasetSettings {
        shuffle: Shuffle { documents: 10_000, bytes: 64 << 20 },
        longest_document: 1 << 20,
        ..settings(&[&fasta])
    };
    let masked = DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        task: Objective::Masked(MaskRates::BERT),
        ..base.clone()
    };
    let texts = DatasetSettings { train: vec![text], ..base };
    let ordered = Shuffle { documents: 0, bytes: 1 };
    for (settings, tokens, sequences, least) in [
        (masked.clone(), 1024, 1024, 0.97),
        (masked.clone(), 4096, 4096, 0.97),
        (masked.clone(), 1024, 16, 0.97),
        (DatasetSettings { shuffle: ordered, ..masked.clone() }, 1024, 1024, 0.97),
        (DatasetSettings { task: Objective::Causal, ..masked }, 1024, 1024, 0.97),
        (texts.clone(), 1024, 1024, 0.99),
        (texts, 4096, 4096, 0.99),
    ] {
        let bounds = PackLimits { tokens, sequences, longest: 1024 };
        let data = Dataset::open(DatasetSettings { bounds, ..settings }).unwrap();
        let mut stream = data.stream(Split::Train, &data.start()).unwrap();
        let mut pack = TrainingPack::with_capacity(&bounds);
        while stream.fill(&mut pack).unwrap() {
            check_bounds(&pack, &bounds);
        }
        let counts = stream.counts();
        let share = counts.tokens as f64 / (counts.packs * tokens as u64) as f64;
        println!("{share:.4} of {} packs of {tokens} tokens, {sequences} sequences", counts.packs);
        assert!(share >= least, "{share} of the tokens of packs of {bounds:?}");
    }
}

/// The sequences of an epoch, inputs and targets, sorted.
fn sequences(settings: DatasetSettings) -> Vec<(Vec<i32>, Vec<i32>)> {
    let mut all = Vec::new();
    for pack in epoch(&Dataset::open(settings).unwrap(), Split::Train) {
        for &[start, end] in &pack.spans {
            let range = start as usize..end as usize;
            all.push((pack.ids[range.clone()].to_vec(), pack.targets[range].to_vec()));
        }
    }
    all.sort_unstable();
    all
}

#[test]
fn masks_do_not_depend_on_the_size_of_a_pack() {
    let folder = folder("train_masks_of_packs");
    let path = file(&folder, "a.fa", proteins(60));
    let base = DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        task: Objective::Masked(MaskRates::BERT),
        ..settings(&[&path])
    };
    let of = |tokens, sequences| PackLimits { tokens, sequences, longest: 100 };
    let first = sequences(DatasetSettings { bounds: of(100, 3), ..base.clone() });
    assert!(first.len() > 150);
    for bounds in [of(250, 9), of(5000, 2)] {
        assert_eq!(sequences(DatasetSettings { bounds, ..base.clone() }), first);
    }
    assert_ne!(sequences(DatasetSettings { seed: 8, bounds: of(100, 3), ..base }), first);
}

#[test]
fn sequences_without_a_target_are_left_out() {
    let folder = folder("train_no_targets");
    // The letter J is no residue of the tokenizer, and unknown tokens are not predicted: the first piece has no target.
    let path = file(&folder, "a.fa", ">a\nJJJJJJJJJJMKVLAGSTREMK\n>b\nMK\n");
    let found = sequences(DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        task: Objective::Masked(MaskRates::BERT),
        bounds: PackLimits { tokens: 12, sequences: 4, longest: 12 },
        ..settings(&[&path])
    });
    let mut sizes: Vec<usize> = found.iter().map(|(ids, _)| ids.len()).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [4, 4, 12]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_token_is_a_target_once_and_workers_change_nothing(
        lengths in prop::collection::vec(1_usize..90, 1..60),
        tokens in 20_usize..100,
        sequences in 1_usize..9,
        longest in 1_usize..20,
        documents in 0_usize..30,
        bytes in 1_usize..600,
        workers in 1_usize..4,
        prefetch in 1_usize..3,
    ) {
        let folder = folder("train_once");
        let line = |i: usize| format!("{i:03}{}\n", "abcdefghi".repeat(10).split_at(lengths[i]).0);
        let all: Vec<String> = (0..lengths.len()).map(line).collect();
        let (first, second) = all.split_at(all.len() / 3);
        let paths = [file(&folder, "a.txt", first.concat()), file(&folder, "b.txt", second.concat())];
        let bounds = PackLimits { tokens, sequences, longest };
        let shuffle = Shuffle { documents, bytes };
        let base = DatasetSettings { bounds, shuffle, ..settings(&[&paths[0], &paths[1]]) };
        let data = Dataset::open(base.clone()).unwrap();
        let packs = epoch(&data, Split::Train);
        packs.iter().for_each(|pack| check_bounds(pack, &bounds));
        // Each document is cut at the maximum length of a sequence, wherever its pieces are packed.
        let pieces = |line: &String| {
            let text = line.trim_end().to_owned() + "$";
            let inputs = text.len() - 1;
            let piece = |from| text[from..=inputs.min(from + longest)].to_owned();
            (0..inputs).step_by(longest).map(piece).collect::<Vec<_>>()
        };
        let mut expected: Vec<String> = all.iter().flat_map(pieces).collect();
        let mut found = texts(&packs);
        expected.sort_unstable();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
        let numbers: Vec<u64> = packs.iter().map(|pack| pack.number).collect();
        prop_assert_eq!(numbers, (0..packs.len() as u64).collect::<Vec<_>>());
        let other = Dataset::open(DatasetSettings { workers, prefetch, ..base }).unwrap();
        prop_assert_eq!(epoch(&other, Split::Train), packs);
    }
}

#[test]
fn epochs_differ_and_seeds_do() {
    let folder = folder("train_epochs");
    let paths = ["a.txt", "b.txt"].map(|name| file(&folder, name, lines(100).replace(' ', name)));
    let shuffle = Shuffle { documents: 10, bytes: 1 << 20 };
    let base = DatasetSettings { shuffle, ..settings(&[&paths[0], &paths[1]]) };
    let two = |settings: DatasetSettings| {
        let data = Dataset::open(settings).unwrap();
        let mut stream = data.stream(Split::Train, &data.start()).unwrap();
        let mut pack = TrainingPack::default();
        let mut epochs = [Vec::new(), Vec::new()];
        for ids in &mut epochs {
            while stream.fill(&mut pack).unwrap() {
                ids.extend_from_slice(&pack.ids);
            }
        }
        assert_eq!(stream.counts().documents, 400);
        epochs
    };
    let [first, second] = two(base.clone());
    assert_eq!((first.len(), two(base.clone())), (second.len(), [first.clone(), second.clone()]));
    assert_ne!(first, second);
    assert_ne!(two(DatasetSettings { seed: 8, ..base.clone() })[0], first);
    // With a shuffle window of one document, documents keep the order of the files, and packs that of their documents.
    let [first, second] = two(DatasetSettings { shuffle: Shuffle { documents: 1, bytes: 1 }, ..base });
    assert_eq!(first, second);
}

#[test]
fn files_of_ids_are_documents() {
    let folder = folder("train_ids");
    let ids: Vec<u16> = (0..1000).map(|i| if i % 37 == 36 { 9 } else { 10 + i }).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let path = file(&folder, "a.bin", bytes);
    let format = DatasetFormat::Ids { width: IdWidth::U16, end: Some(9) };
    let base = DatasetSettings { format, tokens: TokenizerKind::Ids { vocab: 2000 }, ..settings(&[&path]) };
    let base = DatasetSettings { shuffle: Shuffle { documents: 1, bytes: 1 }, ..base };
    let data = Dataset::open(base.clone()).unwrap();
    let packs = epoch(&data, Split::Train);
    assert_eq!(data.census().train.documents, 28);
    let pairs = packs.iter().flat_map(|pack| pack.ids.iter().copied().zip(pack.targets.iter().copied()));
    let mut pairs: Vec<(i32, i32)> = pairs.collect();
    let documents = ids.split_inclusive(|&id| id == 9);
    let expected = documents.flat_map(|d| d.windows(2)).map(|w| (i32::from(w[0]), i32::from(w[1])));
    let mut expected: Vec<(i32, i32)> = expected.collect();
    pairs.sort_unstable();
    expected.sort_unstable();
    assert_eq!(pairs, expected);
    // An id outside the vocabulary.
    let error = refusal(DatasetSettings { tokens: TokenizerKind::Ids { vocab: 500 }, ..base });
    assert!(error.contains("a.bin, 'document 14': the id 500 is not below 500"), "{error}");
}

#[test]
fn masked_pieces_have_their_ends() {
    let path = golden("esm2/proteins.faa");
    let bounds = PackLimits { tokens: 128, sequences: 8, longest: 50 };
    let task = Objective::Masked(MaskRates::BERT);
    let base = DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        task,
        bounds,
        ..settings(&[&path])
    };
    let data = Dataset::open(base).unwrap();
    let packs = epoch(&data, Split::Train);
    let mut residues = 0;
    let mut chosen = 0;
    for pack in &packs {
        check_bounds(pack, &bounds);
        assert_eq!(pack.targets.len(), pack.ids.len());
        for &[start, end] in &pack.spans {
            let ids = &pack.ids[start as usize..end as usize];
            let targets = &pack.targets[start as usize..end as usize];
            assert_eq!([ids[0], ids[ids.len() - 1]], [0, 2]);
            assert!(targets[0] == -100 && targets[ids.len() - 1] == -100);
            assert!(targets.iter().any(|&target| target != -100));
            assert!(targets.iter().all(|&t| t == -100 || (4..31).contains(&t)));
            assert!(ids[1..ids.len() - 1].iter().all(|&id| id >= 3));
            residues += ids.len() - 2;
        }
        chosen += pack.targets.iter().filter(|&&t| t != -100).count() as u64;
    }
    assert_eq!(chosen, packs.iter().map(|b| b.target_tokens).sum::<u64>());
    assert!((0.10..0.22).contains(&(chosen as f64 / residues as f64)), "{chosen} of {residues}");
}

#[test]
fn dna_keeps_its_special_tokens_apart() {
    let reads = golden("dnabert_s/reads.fa");
    let tokenizer = golden("dnabert_s/tokenizer.json");
    let bounds = PackLimits { tokens: 256, sequences: 8, longest: 200 };
    let base = DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Dna(tokenizer),
        ..settings(&[&reads])
    };
    let base = DatasetSettings { bounds, task: Objective::Masked(MaskRates::BERT), ..base };
    let data = Dataset::open(base).unwrap();
    assert_eq!((data.vocabulary().mask(), data.vocabulary().frame()), (Some(4), [Some(1), Some(2)]));
    for pack in epoch(&data, Split::Train) {
        check_bounds(&pack, &bounds);
        assert!(pack.targets.iter().all(|&target| target == -100 || target > 4));
        assert!(pack.spans.iter().all(|&[s, e]| pack.ids[s as usize] == 1 && pack.ids[e as usize - 1] == 2));
    }
}

#[test]
fn a_sequence_has_a_class() {
    let folder = folder("train_classes");
    let json = file(
        &folder,
        "a.jsonl",
        "{\"text\":\"abc\",\"y\":\"in\"}\n{\"y\":\"out\",\"text\":\"defghijklmnopq\"}\n",
    );
    let classes = Classes::Names(vec!["out".into(), "in".into()]);
    let task = |labels, truncate| Objective::Classify { labels, classes: classes.clone(), truncate };
    let bounds = PackLimits { tokens: 20, sequences: 4, longest: 8 };
    let base = DatasetSettings {
        format: DatasetFormat::JsonLines { field: "text".into() },
        task: task(LabelsFrom::Field("y".into()), true),
        shuffle: Shuffle { documents: 0, bytes: 1 },
        bounds,
        ..settings(&[&json])
    };
    let data = Dataset::open(base.clone()).unwrap();
    let packs = epoch(&data, Split::Train);
    assert_eq!((packs.len(), &packs[0].targets, packs[0].target_tokens), (1, &vec![1, 0], 2));
    assert_eq!(packs[0].spans, [[0, 4], [4, 12]]);
    assert_eq!(packs[0].ids[10..], [i32::from(b'j'), 256], "the end stays when a sequence is cut");
    let data =
        Dataset::open(DatasetSettings { task: task(LabelsFrom::Field("y".into()), false), ..base.clone() })
            .unwrap();
    let error =
        data.stream(Split::Train, &data.start()).unwrap().fill(&mut TrainingPack::default()).unwrap_err();
    assert!(error.to_string().contains("a.jsonl, 'document 2': 15 tokens, and data.longest is 8"), "{error}");

    let fasta = file(&folder, "a.fa", ">p x\nMKV\n>q\nMK\n");
    let table = file(&folder, "a.tsv", "q\tin\np\tout\n");
    let task = task(LabelsFrom::Table(table), false);
    let settings = DatasetSettings {
        format: DatasetFormat::Sequences,
        tokens: TokenizerKind::Esm,
        task,
        train: vec![fasta],
        ..base
    };
    let packs = epoch(&Dataset::open(settings).unwrap(), Split::Train);
    assert_eq!(packs[0].targets, [0, 1]);
    assert_eq!(packs[0].ids, [0, 20, 15, 7, 2, 0, 20, 15, 2]);
}

#[test]
fn paragraphs_come_compressed_and_from_folders() {
    let folder = folder("train_folder");
    file(&folder, "b.txt", "one\ntwo\n\nthree");
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, b"zero\n\n").unwrap();
    file(&folder, "a.txt.gz", packed.finish().unwrap());
    let base =
        DatasetSettings { format: DatasetFormat::Text(TextDocuments::Paragraphs), ..settings(&[&folder]) };
    let data = Dataset::open(DatasetSettings { shuffle: Shuffle { documents: 0, bytes: 1 }, ..base }).unwrap();
    assert_eq!(texts(&epoch(&data, Split::Train)), ["zero$", "one\ntwo$", "three$"]);
}

#[test]
fn the_validation_side_comes_in_the_order_of_the_data() {
    let folder = folder("train_validation_order");
    let path = file(&folder, "a.txt", lines(300));
    let validation = Validation::Fraction { fraction: 0.2, seed: 0 };
    let bounds = PackLimits { tokens: 300, sequences: 8, longest: 300 };
    let data = Dataset::open(DatasetSettings { validation, bounds, ..settings(&[&path]) }).unwrap();
    let packs = epoch(&data, Split::Validation);
    assert!(packs.len() > 5);
    let number = |text: &String| text.split([' ', '$']).next().unwrap().parse().unwrap();
    let starts =
        |pack: &TrainingPack| texts(std::slice::from_ref(pack)).iter().map(number).collect::<Vec<usize>>();
    let starts: Vec<Vec<usize>> = packs.iter().map(starts).collect();
    assert_eq!(starts.iter().flatten().count() as u64, data.census().validation.documents);
    assert!(starts.iter().all(|pack| pack.is_sorted()), "{starts:?}");
    assert!(starts.iter().map(|pack| pack[0]).is_sorted(), "{starts:?}");
    let mut stream = data.stream(Split::Validation, &data.start()).unwrap();
    let mut pack = TrainingPack::default();
    while stream.fill(&mut pack).unwrap() {}
    assert!(!stream.fill(&mut pack).unwrap(), "validation ends");
}

/// Fills the packs of one gradient-accumulation step; returns how many the epoch had left for it.
fn fill_group(stream: &mut DatasetStream, packs: &mut [TrainingPack]) -> usize {
    for (filled, pack) in packs.iter_mut().enumerate() {
        if !stream.fill(pack).unwrap() {
            return filled;
        }
    }
    packs.len()
}

#[test]
fn the_last_group_of_an_epoch_is_what_is_left() {
    let folder = folder("train_groups");
    let path = file(&folder, "a.txt", lines(40));
    let data = Dataset::open(settings(&[&path])).unwrap();
    let count = epoch(&data, Split::Train).len();
    assert!(count > 9, "{count}");
    for size in [3, count, count + 1] {
        let mut stream = data.stream(Split::Train, &data.start()).unwrap();
        let mut packs = vec![TrainingPack::default(); size];
        let mut groups = Vec::new();
        while stream.position().epoch == 0 {
            groups.push(fill_group(&mut stream, &mut packs));
        }
        let mut expected = vec![size; count / size];
        expected.push(count % size);
        assert_eq!(groups, expected);
        // The next call starts the next epoch.
        assert_eq!(fill_group(&mut stream, &mut packs[..1]), 1);
    }
}
