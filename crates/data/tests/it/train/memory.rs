//! Tests that the memory of a training data stream stays within the figures of `DataMemory`.

use std::fs;
use std::path::Path;
use std::process::Command;

use plimsoll_data::train::{
    BytePairs, Dataset, DatasetFormat, DatasetSettings, PackLimits, Shuffle, Split, TokenizerKind,
    TrainingPack, Vocabulary,
};
use serde_json::{Map, Value, json};

use super::{file, settings};
use crate::support::folder;

/// Environment variable of the child process that measures. A separate process is needed because peak resident memory
/// is a property of the process.
const MEASURE: &str = "PLIMSOLL_MEASURE_DATA";

/// A field of `/proc/self/status` in bytes; `None` on systems without this file.
fn status(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// A data set of documents of about a megabyte, with JSON escapes, so that every buffer of the reader is filled.
fn open(folder: &Path) -> Dataset {
    let text = |i: usize| format!("{i} {}", "word after word\n".repeat(65_000 - 2000 * (i % 3)));
    let lines: String = (0..12).map(|i| json!({"text": text(i)}).to_string() + "\n").collect();
    let path = file(folder, "a.jsonl", lines);
    let base =
        DatasetSettings { format: DatasetFormat::JsonLines { field: "text".into() }, ..settings(&[&path]) };
    Dataset::open(DatasetSettings {
        longest_document: 2 << 20,
        shuffle: Shuffle { documents: 100, bytes: 4 << 20 },
        ..base
    })
    .unwrap()
}

#[test]
fn a_stream_holds_at_most_what_the_ledger_says() {
    let Some(_) = status("VmHWM") else { return eprintln!("skipped: this system does not say what is held") };
    if std::env::var_os(MEASURE).is_some() {
        return measure();
    }
    open(&folder("train_memory"));
    let name = "train::memory::a_stream_holds_at_most_what_the_ledger_says";
    let child = Command::new(std::env::current_exe().unwrap());
    let output = { child }.args([name, "--exact", "--nocapture"]).env(MEASURE, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn measure() {
    let data = open(&folder("train_memory_measured"));
    let ledger = data.host_bytes().iter().map(|held| held.bytes).sum::<u64>();
    let before = status("VmRSS").unwrap();
    let mut stream = data.stream(Split::Train, &data.start()).unwrap();
    let mut pack = TrainingPack::default();
    while stream.fill(&mut pack).unwrap() {}
    let held = status("VmHWM").unwrap() - before;
    println!("held {held}, ledger {ledger}: {:?}", data.host_bytes());
    // The margin covers thread stacks and memory that the allocator has not returned.
    assert!(held <= ledger + (2 << 20), "{held} held, {ledger} in the ledger");
    assert!(held >= ledger / 2, "{held} held, {ledger} in the ledger: it says too much");
}

#[test]
fn a_stream_allocates_when_it_is_opened() {
    let folder = folder("train_memory_start");
    let path = file(&folder, "a.txt", super::lines(5000));
    let bounds = PackLimits { tokens: 512, sequences: 40, longest: 100 };
    let data = Dataset::open(DatasetSettings { bounds, ..settings(&[&path]) }).unwrap();
    let ledger = data.host_bytes();
    let ledger = ledger.iter().filter(|held| ["parcels", "packing"].contains(&held.what));
    let ledger: u64 = ledger.map(|held| held.bytes).sum();
    // Parcels and blocks are allocated by the thread that opens the stream.
    let mut stream = None;
    let opening = allocation_counter::measure(|| {
        stream = Some(data.stream(Split::Train, &data.start()).unwrap());
    });
    println!("opening: {} of {ledger}", opening.bytes_max);
    // The margin covers channels, handles of threads, and file names.
    assert!(opening.bytes_max <= ledger + (64 << 10) && opening.bytes_max >= ledger / 2);
    let mut pack = None;
    let made = allocation_counter::measure(|| pack = Some(TrainingPack::with_capacity(&bounds)));
    assert_eq!(made.bytes_max, TrainingPack::host_bytes(&bounds));
    let mut stream = stream.unwrap();
    let mut pack = pack.unwrap();
    stream.fill(&mut pack).unwrap();
    let filling = allocation_counter::measure(|| {
        (0..400).for_each(|_| assert!(stream.fill(&mut pack).unwrap()));
    });
    // The channels allocate their lists of waiting threads; a pack must not allocate.
    assert!(filling.count_total < 16, "{} allocations in 400 packs", filling.count_total);
}

/// A byte-level BPE tokenizer file with a token for each byte and two merges.
fn byte_pairs() -> String {
    let printable = (b'!'..=b'~').chain(0xa1..=0xac).chain(0xae..=0xff).map(u32::from);
    let others = (0..68).map(|i| 256 + i);
    let mut names: Vec<String> = printable.chain(others).filter_map(char::from_u32).map(String::from).collect();
    names.extend(["th", "the"].map(str::to_owned));
    let vocab: Map<String, Value> = names.into_iter().zip((0..).map(Value::from)).collect();
    json!({"version": "1.0", "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true}, "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e"]}})
    .to_string()
}

#[test]
fn the_library_holds_less_of_a_text_than_the_ledger_says() {
    let pairs = BytePairs::from_bytes(byte_pairs().as_bytes(), Path::new("t")).unwrap();
    // Texts of words and of letters, which are encoded in parts; a text of one word; characters of several bytes;
    // words of one byte.
    for text in ["the word ", "a b c d ", "ab", "\u{e9}\u{4e2d} ", "1.", "\u{e9} "] {
        let text = text.repeat((64 << 10) / text.len());
        let mut tokens = Vec::with_capacity(text.len());
        let counted = allocation_counter::measure(|| {
            pairs.encode(text.as_bytes(), &mut tokens).unwrap();
        });
        let each = counted.bytes_max / text.len() as u64;
        println!("{each} bytes for one of the text");
        assert!(each < 384, "{each} bytes for one of {:?}", &text[..8]);
        assert!(tokens.len() * 4 >= text.len());
    }
}

/// A SentencePiece tokenizer file: `Unigram` divides the text into words, `whole` is a Unigram model without words, and
/// any other name gives BPE over characters.
fn sentence_pieces(model: &str) -> String {
    let mut names: Vec<String> = ["<unk>", "\u{2581}", "\u{2581}the", "th", "the"].map(str::to_owned).into();
    names.extend(('a'..='z').map(String::from));
    let vocab: Map<String, Value> = names.iter().cloned().zip((0..).map(Value::from)).collect();
    let pieces: Vec<Value> = names.iter().map(|name| json!([name, -1.0 / name.len() as f64])).collect();
    let mark = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    match model {
        "Unigram" => json!({"normalizer": {"type": "NFKC"}, "pre_tokenizer": mark,
            "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces}}),
        "whole" => json!({"normalizer": replace, "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces}}),
        _ => json!({"normalizer": replace, "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab,
            "merges": ["t h"]}}),
    }
    .to_string()
}

#[test]
fn sentence_pieces_hold_less_than_the_ledger_says() {
    let folder = folder("train_memory_pieces");
    let text = file(&folder, "a.txt", "a");
    for model in ["Unigram", "whole", "BPE"] {
        let tokenizer = file(&folder, &format!("{model}.json"), sentence_pieces(model));
        let settings = DatasetSettings {
            tokens: TokenizerKind::BytePairs { file: tokenizer, end: None },
            longest_document: 1 << 16,
            workers: 1,
            ..settings(&[&text])
        };
        let vocabulary = Vocabulary::open(&settings).unwrap();
        let ledger = settings.host_bytes(&vocabulary);
        let ledger = ledger.iter().find(|held| held.what == "tokenizers").unwrap().bytes;
        for text in ["the word ", "a b c d ", "ab", "\u{e9}\u{4e2d} ", "1.", "\u{e9} ", "\u{fdfa}"] {
            let text = text.repeat((1 << 16) / text.len());
            let mut tokens = Vec::with_capacity(4 * text.len());
            let counted = allocation_counter::measure(|| {
                let _ = vocabulary.encode(text.as_bytes(), &mut tokens);
            });
            println!(
                "{model}, {:?}: {} bytes for one of the text",
                &text[..6],
                counted.bytes_max / text.len() as u64
            );
            assert!(counted.bytes_max <= ledger, "{model}: {} held, {ledger} in the ledger", counted.bytes_max);
        }
    }
}

#[test]
fn words_that_the_library_keeps_are_in_the_ledger() {
    let folder = folder("train_memory_words");
    let text = file(&folder, "a.txt", "a");
    let tokenizer = file(&folder, "tokenizer.json", byte_pairs());
    let settings = DatasetSettings {
        tokens: TokenizerKind::BytePairs { file: tokenizer, end: None },
        longest_document: 1 << 20,
        workers: 1,
        ..settings(&[&text])
    };
    let vocabulary = Vocabulary::open(&settings).unwrap();
    let ledger = settings.host_bytes(&vocabulary);
    let ledger = ledger.iter().find(|held| held.what == "tokenizers").unwrap().bytes;
    // More words than the crate caches, each of the maximum length that it caches.
    let letters = |i: usize| (0..253).map(move |j| char::from(b'a' + ((i >> (j % 13)) % 2 + j % 5) as u8));
    let text: String = (0..3000).map(|i| letters(i).collect::<String>() + " ").collect();
    let mut tokens = Vec::with_capacity(text.len());
    let counted = allocation_counter::measure(|| {
        vocabulary.encode(text.as_bytes(), &mut tokens).unwrap();
    });
    println!("held {}, ledger {ledger}", counted.bytes_max);
    assert!(counted.bytes_max <= ledger, "{} held, {ledger} in the ledger", counted.bytes_max);
    assert!(counted.bytes_max >= ledger / 3, "{} held, {ledger} in the ledger", counted.bytes_max);
}
