//! Training data: texts, JSON lines, files of token ids, arrays of rows, byte-level tokenizers, and tables of genomes.
//! Invariant: accepted data is used completely: every byte of a document is a target once, every id is in the
//! vocabulary, every row is finite, every crop of a genome has a class of its tasks.

use super::{CaseResult, FuzzFormat, Seeds, check_error, measured};
use plimsoll_data::DataError;
use plimsoll_data::codons;
use plimsoll_data::rows::{NpzLayout, NpzWriter, ValueType};
use plimsoll_data::train::crops::{
    CropObjective, CropSet, CropSettings, CropTask, CropTokenizer, Mutations, SamplingLevel, ShuffledCrops,
    ValidationCrops,
};
use plimsoll_data::train::rows::{RowGroupPart, RowPack, RowSet, RowSettings};
use plimsoll_data::train::{
    BytePairs, Classes, Dataset, DatasetFormat as Kind, DatasetSettings, IdWidth, Objective, PackLimits,
    Shuffle, Split, TextDocuments, TokenizerKind, TrainingPack, Validation,
};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory limit of the buffers of readers and decoders, in bytes.
const BUFFERS: u64 = 2 << 20;
/// Maximum length of a document in bytes.
const LONGEST: usize = 1 << 16;
/// Vocabulary size of files of ids.
const VOCAB: usize = 1000;

/// One format for each kind of file.
pub fn formats() -> Vec<FuzzFormat> {
    let texts =
        [&b"one\ntwo words\r\n\r\n\xef\xbb\xbfthree\n"[..], b"", b"\xef\xbb\xbfa\rb\r\r\n c \n\n\n", b"x"];
    let lines = [
        &b"{\"text\":\"a\\u00e9\\n\",\"y\":[1,{\"text\":0}]}\n\n{\"y\":null,\"text\":\"b c\"}\r\n"[..],
        b"\xef\xbb\xbf{\"text\":\"\"}\n{\"text\":\"d\"}",
    ];
    let ids = [[1_u16, 9, 2, 3, 999, 9, 4].map(u16::to_le_bytes).concat(), vec![9, 0, 9, 0], vec![]];
    let json: &[&[u8]] =
        &[b"\"text\":", b"{", b"}", b"[", b"\\ud800", b"\n", b"null", b"\"text\":\"z\",", b"\\u0000"];
    let numbers: &[&[u8]] =
        &[b"'descr': '<f4', ", b"(3, 2)", b"18446744073709551615", b"-1", b"'<f8'", b"\x93NUMPY"];
    let mut rows = FuzzFormat::new("rows.npy", "rows.npy", seeds(npys(), numbers), check_rows);
    rows.other_files =
        vec![("rows.ids.txt", b"a\nb\nc\n".to_vec()), ("labels.tsv", b"a\t0\nb\t1\nc\t1\n".to_vec())];
    let archive: &[&[u8]] = &[
        b"'<f2'",
        b"(3, 2)",
        b"(4,)",
        b"<U1",
        b"<U4294967295",
        b"PK\x01\x02",
        b"ids.npy",
        b"\xff\xff\xff\xff",
    ];
    let npz = [ValueType::F32, ValueType::F16].map(npz).to_vec();
    let mut archives = FuzzFormat::new("rows.npz", "rows.npz", seeds(npz, archive), check_rows);
    archives.other_files = vec![("labels.tsv", b"a\t0\nb\t1\nc\t1\n".to_vec())];
    let tables = [
        &b"id\tsplit\tclass\tfamily\nr0\ttrain\tvirus\ta\nr1\ttrain\t?\t\nr2\tvalidation\tother\tb\nr3\t-\tx\t\n"[..],
        b"\xef\xbb\xbffamily\tclass\tid\tnote\tsplit\r\n\r\n\t\tr3\t\ttrain\r\n\tother\tr0\t\tvalidation\r\na\tvirus\tr1\tx\ttrain\r\na\tvirus\tr2\t\ttrain",
    ];
    let cells: &[&[u8]] = &[
        b"\t",
        b"\n",
        b"\r",
        b"-",
        b"?",
        b"train",
        b"validation",
        b"\t\t\t",
        b"id",
        b"\nr1\t-\t\t",
        b"\x1b[2J",
    ];
    let mut crops = FuzzFormat::new("crops.tsv", "records.tsv", seeds(owned(&tables), cells), check_crops);
    let records: String =
        (0..4).map(|number| format!(">r{number}\n{}\n", "ACGTTGCANacgu".repeat(3 + number))).collect();
    crops.other_files = vec![("records.fa", records.into_bytes())];
    let text = seeds(owned(&texts), &[b"\n\n", b"\r", b"\r\n", b" ", b"\0", b"\xff"]);
    let ids = seeds(ids.to_vec(), &[b"\x09\0", b"\xe7\x03", b"\xe8\x03"]);
    let tokenizers = vec![byte_pairs(), sentence_pieces(), llama3(&byte_pairs())];
    vec![
        crops,
        FuzzFormat::new("train.txt", "t.txt", text, check_text),
        FuzzFormat::new("train.jsonl", "t.jsonl", seeds(owned(&lines), json), check_json),
        FuzzFormat::new("train.bin", "t.bin", ids, check_ids),
        FuzzFormat::new("byte pairs", "tokenizer.json", seeds(tokenizers, TOKENIZER), check_byte_pairs),
        rows,
        archives,
    ]
}

fn seeds(corpus: Vec<Vec<u8>>, words: &[&[u8]]) -> Seeds {
    Seeds { corpus, words: owned(words) }
}

const TOKENIZER: &[&[u8]] = &[
    b"\"dropout\":0.5",
    b"\"th\":4294967295",
    b"\"t h\"",
    b"\"th e\",",
    b"{\"type\":\"NFC\"}",
    b"{\"type\":\"Digits\",\"individual_digits\":true},",
    b"\"Removed\"",
    b"\"ids\":[4294967295]",
    b"{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},",
    b"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a+)+$\"},\"behavior\":\"Isolated\",\"invert\":false}",
    b"\"use_regex\":false",
    b"\"add_prefix_space\":true",
    b"\"end_of_word_suffix\":\"</w>\"",
    b"\"ignore_merges\":true",
    b"{\"id\":300,\"content\":\"<|x|>\",\"single_word\":false,\"lstrip\":true,\"rstrip\":true,\"normalized\":true,\"special\":false},",
    b"null",
    b"\"type\":\"Unigram\"",
    b"\\u001b[31m",
];

fn owned(texts: &[&[u8]]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.to_vec()).collect()
}

/// A byte-level BPE tokenizer with a token for every byte and two merges.
fn byte_pairs() -> Vec<u8> {
    let printable = (b'!'..=b'~').chain(0xa1..=0xac).chain(0xae..=0xff).map(u32::from);
    let names = printable.chain(256..324).filter_map(char::from_u32).map(String::from);
    let names = names.chain(["th", "the"].map(str::to_owned));
    // For these characters the escapes of Rust's `Debug` are those of JSON.
    let vocab: Vec<String> = names.enumerate().map(|(id, name)| format!("{name:?}:{id}")).collect();
    format!(
        r#"{{"added_tokens":[{{"id":258,"content":"<|end|>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}}],"normalizer":null,"pre_tokenizer":{{"type":"ByteLevel",
        "add_prefix_space":false,"trim_offsets":true}},"model":{{"type":"BPE","dropout":null,
        "vocab":{{{}}},"merges":["t h","th e"]}}}}"#,
        vocab.join(",")
    )
    .into_bytes()
}

/// The words, normalizer and template of Llama 3 around the tokens of another byte-level tokenizer.
fn llama3(pairs: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(pairs);
    let plain = "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\n        \"add_prefix_space\":false,\"trim_offsets\":true}";
    let words = r#""normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split",
        "pattern":{"Regex":"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
        "behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,
        "use_regex":false}]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|end|>",
        "type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<|end|>":{"id":"<|end|>",
        "ids":[258],"tokens":["<|end|>"]}}}"#;
    assert!(text.contains(plain), "another form of the byte-level tokenizer");
    text.replace(plain, words).into_bytes()
}

/// A unigram tokenizer with scores and normalizers.
fn sentence_pieces() -> Vec<u8> {
    br#"{"added_tokens":[{"id":0,"content":"<unk>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}],"normalizer":{"type":"Sequence","normalizers":[{"type":"NFKC"},
        {"type":"Replace","pattern":{"String":"  "},"content":" "}]},"pre_tokenizer":{"type":"Metaspace",
        "replacement":"_","prepend_scheme":"always","split":true},"model":{"type":"Unigram","unk_id":0,
        "byte_fallback":false,"vocab":[["<unk>",0.0],["_",-2.0],["t",-3.5],["he",-2.5],["_the",-1.5]]}}"#
        .to_vec()
}

/// `.npy` files of shape (3, 2): finite, and with a NaN.
fn npys() -> Vec<Vec<u8>> {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }\n";
    vec![npy(header, &[0.0, 1.0, 2.5, -3.0, 4.0, 5.0]), npy(header, &[0.0, f32::NAN, 1.0, 2.0, 3.0, 4.0])]
}

/// A `.npy` file with this header.
fn npy(header: &str, values: &[f32]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// A `.npz` file with a matrix of shape (3, 2).
fn npz(values: ValueType) -> Vec<u8> {
    // Two tests make the formats at the same time, so each file has a name of its own.
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("plimsoll-fuzz-{}-{number}.npz", std::process::id()));
    let mut writer = NpzWriter::create(&path, NpzLayout::Matrix, &[2], values).expect("created");
    for (name, row) in [("a", [0.0, 1.0]), ("b", [2.5, -3.0]), ("c", [4.0, 5.0])] {
        writer.write(name, 7, &row).expect("written");
    }
    writer.finish("{}").expect("finished");
    let bytes = std::fs::read(&path).expect("read");
    std::fs::remove_file(&path).expect("removed");
    bytes
}

fn settings(path: &Path, format: Kind, tokens: TokenizerKind) -> DatasetSettings {
    DatasetSettings {
        train: vec![path.to_owned()],
        validation: Validation::None,
        format,
        tokens,
        task: Objective::Causal,
        bounds: PackLimits { tokens: 64, sequences: 8, longest: 20 },
        seed: 1,
        shuffle: Shuffle { documents: 3, bytes: 100 },
        longest_document: LONGEST,
        strict: false,
        workers: 1,
        prefetch: 1,
    }
}

fn check_text(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let format = Kind::Text(TextDocuments::Paragraphs);
    check(path, bytes, settings(path, format, TokenizerKind::Bytes { end: true }), |bytes, _| bytes)
}

fn check_json(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let format = Kind::JsonLines { field: "text".to_owned() };
    check(path, bytes, settings(path, format, TokenizerKind::Bytes { end: true }), |bytes, _| bytes)
}

fn check_ids(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let format = Kind::Ids { width: IdWidth::U16, end: Some(9) };
    let settings = settings(path, format, TokenizerKind::Ids { vocab: VOCAB });
    // The first id of a document is not a target.
    check(path, bytes, settings, |bytes, documents| bytes / 2 - documents)
}

/// Opens a data set and reads an epoch. `targets` gives the expected number of targets from the numbers of
/// bytes and documents.
fn check(
    path: &Path,
    bytes: &[u8],
    settings: DatasetSettings,
    targets: fn(u64, u64) -> u64,
) -> Result<CaseResult, String> {
    let vocab = match settings.tokens {
        TokenizerKind::Ids { vocab } => vocab,
        _ => 257,
    };
    let (opened, peak) = measured(|| Dataset::open(settings));
    let accepted = match opened.and_then(|data| Ok((epoch(&data, vocab)?, data))) {
        Err(error) => check_error(&error, path).map(|()| false)?,
        Ok((Err(what), _)) => return Err(what),
        Ok((Ok(found), data)) => {
            let train = data.census().train;
            let expected = targets(train.bytes, train.documents);
            if found != expected {
                return Err(format!("{found} targets, {expected} in the documents"));
            }
            true
        }
    };
    Ok(CaseResult { accepted, peak, allowed: BUFFERS + 16 * bytes.len() as u64 })
}

/// Number of targets of an epoch. The outer error is a refusal of the data, the inner error a finding.
fn epoch(data: &Dataset, vocab: usize) -> Result<Result<u64, String>, DataError> {
    let mut stream = data.stream(Split::Train, &data.start())?;
    let mut pack = TrainingPack::default();
    while stream.fill(&mut pack)? {
        if !pack.ids.iter().chain(&pack.targets).all(|&id| is_id(id, vocab)) {
            return Ok(Err(format!("an id out of range: {:?}", pack.ids)));
        }
        if pack.spans.last().map(|span| span[1] as usize) != Some(pack.ids.len()) {
            return Ok(Err(format!("spans {:?} for {} ids", pack.spans, pack.ids.len())));
        }
    }
    Ok(Ok(stream.counts().targets))
}

/// Whether a token id is in a vocabulary of `vocab` tokens.
fn is_id(id: i32, vocab: usize) -> bool {
    usize::try_from(id).is_ok_and(|id| id < vocab)
}

/// Opens a tokenizer and encodes a text with it.
fn check_byte_pairs(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let text = "the other's  way\n\u{e9}\u{4e2d} <|end|> <|x|>\t12".repeat(20);
    let (read, peak) = measured(|| {
        let pairs = BytePairs::from_file(path)?;
        let mut tokens = Vec::new();
        // The tokenizer may refuse the text; tokens of an accepted text must be in range.
        let encoded = pairs.encode(text.as_bytes(), &mut tokens);
        let sound = tokens.iter().all(|&id| is_id(id, pairs.size())) && tokens.len() <= 3 * text.len() + 18;
        let special = tokens.iter().any(|id| pairs.specials().contains(id) && pairs.unknown() != Some(*id));
        Ok::<_, DataError>((encoded.is_ok(), sound && !special, tokens.len()))
    });
    let accepted = match read {
        Ok((_, true, _)) => true,
        Ok((_, false, count)) => return Err(format!("{count} tokens, one of them special or out of range")),
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    Ok(CaseResult { accepted, peak, allowed: (24 << 20) + 64 * bytes.len() as u64 })
}

/// Opens a data set of rows and reads all of them.
fn check_rows(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let settings = RowSettings {
        parts: vec![RowGroupPart { files: vec![path.to_owned()], tensors: "*".to_owned() }],
        labels: path.with_file_name("labels.tsv"),
        classes: Classes::Count(2),
        validation: 0.0,
        validation_seed: 0,
        seed: 1,
        rows: 2,
    };
    let (read, peak) = measured(|| {
        let set = RowSet::open(settings)?;
        let mut pack = RowPack::default();
        let mut stream = set.stream(Split::Train, &set.start())?;
        let mut rows = 0;
        let mut finite = true;
        while stream.fill(&mut pack)? {
            rows += pack.targets.len() as u64;
            finite &= pack.parts[0].iter().all(|value| value.is_finite());
        }
        Ok::<_, DataError>(finite && rows == set.census().train.documents)
    });
    let accepted = match read {
        Ok(true) => true,
        Ok(false) => return Err("a row is missing, or not finite".to_owned()),
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    Ok(CaseResult { accepted, peak, allowed: BUFFERS + 16 * bytes.len() as u64 })
}

/// Opens records with a table and reads crops of both splits.
fn check_crops(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let settings = CropSettings {
        files: vec![path.with_file_name("records.fa")],
        table: path.to_owned(),
        tasks: vec![CropTask {
            name: "class".to_owned(),
            classes: ["other", "virus"].map(str::to_owned).into(),
        }],
        tokens: CropTokenizer::Codons,
        objective: CropObjective::Classify,
        shortest: 10,
        longest: 50,
        mutations: Mutations { substitutions: 0.1, indels: 0.05 },
        shuffled: ShuffledCrops { share: 0.1, targets: vec![("class".to_owned(), "other".to_owned())] },
        levels: vec![SamplingLevel { column: "family".to_owned(), power: 0.5 }],
        unlabelled: false,
        strict: false,
        validation: Some(ValidationCrops { crops: 3, lengths: vec![20] }),
        seed: 1,
        bounds: PackLimits { tokens: 400, sequences: 5, longest: 20 },
        workers: 1,
        prefetch: 1,
    };
    let (read, peak) = measured(|| {
        let set = CropSet::open(settings)?;
        let mut pack = set.pack();
        let mut stream = set.stream(Split::Train, &set.start())?;
        let mut sound = true;
        for _ in 0..3 {
            stream.fill(&mut pack)?;
            sound &= (1..=5).contains(&pack.spans.len()) && pack.targets[0].len() == pack.spans.len();
            sound &= pack.targets[0].iter().all(|target| (0..2).contains(target));
            sound &= pack.ids.iter().all(|id| (0..=codons::UNKNOWN).contains(id));
        }
        let mut stream = set.stream(Split::Validation, &set.start())?;
        while stream.fill(&mut pack)? {
            sound &= pack.bases.iter().all(|&bases| bases == 20);
        }
        let census = set.stats();
        let records = [census.train, census.validation].map(|size| size.records + size.short);
        Ok::<_, DataError>(sound && records.iter().sum::<u64>() + census.left_out == 4)
    });
    let accepted = match read {
        Ok(true) => true,
        Ok(false) => return Err("a crop out of range, or a record is missing".to_owned()),
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    // A row may have 6 bytes; its entry in the map of rows has 48, in a table that is at most half empty.
    Ok(CaseResult { accepted, peak, allowed: BUFFERS + 64 * bytes.len() as u64 })
}
