//! Tests of the content of training batches: every token is a target once, batches stay within their bounds, and
//! targets belong to the inputs of the same document.

use plimsoll_data::train::{
    Batch, Bounds, Classes, Dataset, Format, IdWidth, LabelsFrom, MaskRates, Objective, Settings, Shuffle,
    Split, Stream, TextDocuments, TokenizerKind, Validation,
};
use proptest::prelude::*;

use super::{epoch, file, lines, refusal, settings, texts};
use crate::support::{folder, golden};

fn check_bounds(batch: &Batch, bounds: &Bounds) {
    assert!(!batch.ids.is_empty() && batch.ids.len() <= bounds.tokens && batch.spans.len() <= bounds.sequences);
    let mut at = 0;
    for &[start, end] in &batch.spans {
        assert!(start == at && end > start && (end - start) as usize <= bounds.longest, "{:?}", batch.spans);
        at = end;
    }
    assert_eq!(at as usize, batch.ids.len(), "no padding");
}

#[test]
fn pieces_of_a_document_follow_each_other() {
    let folder = folder("train_pieces");
    let path = file(&folder, "a.txt", "abcdefghijkl\nxyz\n\nq\n");
    let bounds = Bounds { tokens: 10, sequences: 3, longest: 8 };
    let shuffle = Shuffle { documents: 1, bytes: 1 };
    let data = Dataset::open(Settings { bounds, shuffle, ..settings(&[&path]) }).unwrap();
    let batches = epoch(&data, Split::Train);
    // A full batch ends a piece of a document. Its last target is the first input of the next piece.
    assert_eq!(texts(&batches), ["abcdefghi", "ijk", "kl$", "xyz$", "q$"]);
    let targets: Vec<u64> = batches.iter().map(|b| b.target_tokens).collect();
    assert_eq!(targets, [10, 6]);
    assert_eq!(batches[0].spans, [[0, 8], [8, 10]]);
    assert_eq!(batches[0].targets, b"bcdefghijk".map(i32::from));
    // Without an end token the last byte of a document is only a target, so a document of one byte has none.
    let tokens = TokenizerKind::Bytes { end: false };
    let data = Dataset::open(Settings { bounds, shuffle, tokens, ..settings(&[&path]) }).unwrap();
    assert_eq!(texts(&epoch(&data, Split::Train)), ["abcdefghi", "ijk", "kl", "xyz"]);
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
        let bounds = Bounds { tokens, sequences, longest };
        let shuffle = Shuffle { documents, bytes };
        let base = Settings { bounds, shuffle, ..settings(&[&paths[0], &paths[1]]) };
        let data = Dataset::open(base.clone()).unwrap();
        let batches = epoch(&data, Split::Train);
        batches.iter().for_each(|batch| check_bounds(batch, &bounds));
        // Joins the pieces of a document: the last target of a piece must be the first input of the next one.
        let mut whole = String::new();
        for text in texts(&batches) {
            if !whole.is_empty() && !whole.ends_with('$') {
                prop_assert_eq!(whole.pop(), text.chars().next());
            }
            whole.push_str(&text);
        }
        let mut found: Vec<&str> = whole.split_terminator('$').collect();
        if documents < 2 {
            prop_assert_eq!(&found, &all.iter().map(|line| line.trim_end()).collect::<Vec<_>>());
        }
        found.sort_unstable();
        prop_assert_eq!(found, all.iter().map(|line| line.trim_end()).collect::<Vec<_>>());
        let other = Dataset::open(Settings { workers, prefetch, ..base }).unwrap();
        prop_assert_eq!(epoch(&other, Split::Train), batches);
    }
}

#[test]
fn epochs_differ_and_seeds_do() {
    let folder = folder("train_epochs");
    let paths = ["a.txt", "b.txt"].map(|name| file(&folder, name, lines(100).replace(' ', name)));
    let shuffle = Shuffle { documents: 10, bytes: 1 << 20 };
    let base = Settings { shuffle, ..settings(&[&paths[0], &paths[1]]) };
    let two = |settings: Settings| {
        let data = Dataset::open(settings).unwrap();
        let mut stream = data.stream(Split::Train, &data.start()).unwrap();
        let mut batch = Batch::default();
        let mut epochs = [Vec::new(), Vec::new()];
        for ids in &mut epochs {
            while stream.fill(&mut batch).unwrap() {
                ids.extend_from_slice(&batch.ids);
            }
        }
        assert_eq!(stream.counts().documents, 400);
        epochs
    };
    let [first, second] = two(base.clone());
    assert_eq!((first.len(), two(base.clone())), (second.len(), [first.clone(), second.clone()]));
    assert_ne!(first, second);
    assert_ne!(two(Settings { seed: 8, ..base.clone() })[0], first);
    // With a shuffle window of one document, documents keep the order of the files.
    let [first, second] = two(Settings { shuffle: Shuffle { documents: 1, bytes: 1 }, ..base });
    assert_eq!(first, second);
}

#[test]
fn files_of_ids_are_documents() {
    let folder = folder("train_ids");
    let ids: Vec<u16> = (0..1000).map(|i| if i % 37 == 36 { 9 } else { 10 + i }).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let path = file(&folder, "a.bin", bytes);
    let format = Format::Ids { width: IdWidth::U16, end: Some(9) };
    let base = Settings { format, tokens: TokenizerKind::Ids { vocab: 2000 }, ..settings(&[&path]) };
    let base = Settings { shuffle: Shuffle { documents: 1, bytes: 1 }, ..base };
    let data = Dataset::open(base.clone()).unwrap();
    let batches = epoch(&data, Split::Train);
    assert_eq!(data.census().train.documents, 28);
    let inputs: Vec<i32> = batches.iter().flat_map(|b| b.ids.clone()).collect();
    let targets: Vec<i32> = batches.iter().flat_map(|b| b.targets.clone()).collect();
    let expected = |skip: usize| {
        let documents = ids.split_inclusive(|&id| id == 9);
        documents.flat_map(move |d| d[skip..d.len() - 1 + skip].to_vec()).map(i32::from).collect::<Vec<_>>()
    };
    assert_eq!((inputs, targets), (expected(0), expected(1)));
    // An id outside the vocabulary.
    let error = refusal(Settings { tokens: TokenizerKind::Ids { vocab: 500 }, ..base });
    assert!(error.contains("a.bin, 'document 14': the id 500 is not below 500"), "{error}");
}

#[test]
fn masked_pieces_have_their_ends() {
    let path = golden("esm2/proteins.faa");
    let bounds = Bounds { tokens: 128, sequences: 8, longest: 50 };
    let task = Objective::Masked(MaskRates::BERT);
    let base =
        Settings { format: Format::Sequences, tokens: TokenizerKind::Esm, task, bounds, ..settings(&[&path]) };
    let data = Dataset::open(base).unwrap();
    let batches = epoch(&data, Split::Train);
    let (mut residues, mut chosen) = (0, 0);
    for batch in &batches {
        check_bounds(batch, &bounds);
        assert_eq!(batch.targets.len(), batch.ids.len());
        for &[start, end] in &batch.spans {
            let (ids, targets) =
                (&batch.ids[start as usize..end as usize], &batch.targets[start as usize..end as usize]);
            assert_eq!([ids[0], ids[ids.len() - 1]], [0, 2]);
            assert!(targets[0] == -100 && targets[ids.len() - 1] == -100);
            assert!(targets.iter().any(|&target| target != -100));
            assert!(targets.iter().all(|&t| t == -100 || (4..31).contains(&t)));
            assert!(ids[1..ids.len() - 1].iter().all(|&id| id >= 3));
            residues += ids.len() - 2;
        }
        chosen += batch.targets.iter().filter(|&&t| t != -100).count() as u64;
    }
    assert_eq!(chosen, batches.iter().map(|b| b.target_tokens).sum::<u64>());
    assert!((0.10..0.22).contains(&(chosen as f64 / residues as f64)), "{chosen} of {residues}");
}

#[test]
fn dna_keeps_its_special_tokens_apart() {
    let (reads, tokenizer) = (golden("dnabert_s/reads.fa"), golden("dnabert_s/tokenizer.json"));
    let bounds = Bounds { tokens: 256, sequences: 8, longest: 200 };
    let base =
        Settings { format: Format::Sequences, tokens: TokenizerKind::Dna(tokenizer), ..settings(&[&reads]) };
    let base = Settings { bounds, task: Objective::Masked(MaskRates::BERT), ..base };
    let data = Dataset::open(base).unwrap();
    assert_eq!((data.vocabulary().mask(), data.vocabulary().frame()), (Some(4), [Some(1), Some(2)]));
    for batch in epoch(&data, Split::Train) {
        check_bounds(&batch, &bounds);
        assert!(batch.targets.iter().all(|&target| target == -100 || target > 4));
        assert!(batch.spans.iter().all(|&[s, e]| batch.ids[s as usize] == 1 && batch.ids[e as usize - 1] == 2));
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
    let bounds = Bounds { tokens: 20, sequences: 4, longest: 8 };
    let base = Settings {
        format: Format::JsonLines { field: "text".into() },
        task: task(LabelsFrom::Field("y".into()), true),
        shuffle: Shuffle { documents: 0, bytes: 1 },
        bounds,
        ..settings(&[&json])
    };
    let data = Dataset::open(base.clone()).unwrap();
    let batches = epoch(&data, Split::Train);
    assert_eq!((batches.len(), &batches[0].targets, batches[0].target_tokens), (1, &vec![1, 0], 2));
    assert_eq!(batches[0].spans, [[0, 4], [4, 12]]);
    assert_eq!(batches[0].ids[10..], [i32::from(b'j'), 256], "the end stays when a sequence is cut");
    let data =
        Dataset::open(Settings { task: task(LabelsFrom::Field("y".into()), false), ..base.clone() }).unwrap();
    let error = data.stream(Split::Train, &data.start()).unwrap().fill(&mut Batch::default()).unwrap_err();
    assert!(error.to_string().contains("a.jsonl, 'document 2': 15 tokens, and data.longest is 8"), "{error}");

    let (fasta, table) =
        (file(&folder, "a.fa", ">p x\nMKV\n>q\nMK\n"), file(&folder, "a.tsv", "q\tin\np\tout\n"));
    let task = task(LabelsFrom::Table(table), false);
    let settings =
        Settings { format: Format::Sequences, tokens: TokenizerKind::Esm, task, train: vec![fasta], ..base };
    let batches = epoch(&Dataset::open(settings).unwrap(), Split::Train);
    assert_eq!(batches[0].targets, [0, 1]);
    assert_eq!(batches[0].ids, [0, 20, 15, 7, 2, 0, 20, 15, 2]);
}

#[test]
fn paragraphs_come_compressed_and_from_folders() {
    let folder = folder("train_folder");
    file(&folder, "b.txt", "one\ntwo\n\nthree");
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, b"zero\n\n").unwrap();
    file(&folder, "a.txt.gz", packed.finish().unwrap());
    let base = Settings { format: Format::Text(TextDocuments::Paragraphs), ..settings(&[&folder]) };
    let data = Dataset::open(Settings { shuffle: Shuffle { documents: 0, bytes: 1 }, ..base }).unwrap();
    assert_eq!(texts(&epoch(&data, Split::Train)), ["zero$", "one\ntwo$", "three$"]);
}

#[test]
fn the_validation_side_comes_in_the_order_of_the_data() {
    let folder = folder("train_validation_order");
    let path = file(&folder, "a.txt", lines(300));
    let validation = Validation::Fraction { fraction: 0.2, seed: 0 };
    let data = Dataset::open(Settings { validation, ..settings(&[&path]) }).unwrap();
    let whole: String = texts(&epoch(&data, Split::Validation)).concat();
    let starts: Vec<usize> =
        whole.split_terminator('$').map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(starts.len() as u64, data.census().validation.documents);
    assert!(starts.is_sorted(), "{starts:?}");
    let mut stream = data.stream(Split::Validation, &data.start()).unwrap();
    let mut batch = Batch::default();
    while stream.fill(&mut batch).unwrap() {}
    assert!(!stream.fill(&mut batch).unwrap(), "validation ends");
}

/// Fills the batches of one gradient-accumulation step; returns how many the epoch had left for it.
fn fill_group(stream: &mut Stream, batches: &mut [Batch]) -> usize {
    for (filled, batch) in batches.iter_mut().enumerate() {
        if !stream.fill(batch).unwrap() {
            return filled;
        }
    }
    batches.len()
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
        let mut batches = vec![Batch::default(); size];
        let mut groups = Vec::new();
        while stream.position().epoch == 0 {
            groups.push(fill_group(&mut stream, &mut batches));
        }
        let mut expected = vec![size; count / size];
        expected.push(count % size);
        assert_eq!(groups, expected);
        // The next call starts the next epoch.
        assert_eq!(fill_group(&mut stream, &mut batches[..1]), 1);
    }
}
