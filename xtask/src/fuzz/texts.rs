//! Texts that describe models and machines: tokenizer.json, config.json, target files. Invariant: accepted
//! files are usable: a tokenizer encodes within its vocabulary, a configuration builds a graph, and a target
//! gives plans with values in range.

use super::{CaseResult, FuzzFormat, Seeds, check_error, check_message, measured, messages};
use plimsoll_data::bounded::read_text;
use plimsoll_data::tokenize::Bpe;
use plimsoll_graph::{Bounds, Bytes, Graph};
use plimsoll_models::{CallerConfig, CallerObjective, Encoder, Output, SequenceModel, Training};
use plimsoll_plan::{Policy, Program, Target, compile};
use std::fs;
use std::path::Path;

/// Maximum size of a target file that is read, in bytes.
const LARGEST_TARGET: u64 = 1 << 18;

/// The formats of this file.
pub fn formats(root: &Path) -> Vec<FuzzFormat> {
    let goldens = "fixtures/goldens";
    let small = br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[
        {"id":0,"content":"[UNK]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
        {"id":1,"content":"[CLS]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
        {"id":2,"content":"[SEP]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":{"type":"TemplateProcessing",
        "single":[{"SpecialToken":{"id":"[CLS]","type_id":0}},{"Sequence":{"id":"A","type_id":0}},
        {"SpecialToken":{"id":"[SEP]","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},
        {"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"[CLS]":{"id":"[CLS]","ids":[1],"tokens":["[CLS]"]},
        "[SEP]":{"id":"[SEP]","ids":[2],"tokens":["[SEP]"]}}},"decoder":null,"model":{"type":"BPE","dropout":null,
        "unk_token":"[UNK]","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
        "byte_fallback":false,"ignore_merges":false,"vocab":{"[UNK]":0,"[CLS]":1,"[SEP]":2,"A":3,"C":4,"G":5,"T":6,
        "AC":7,"GT":8,"ACGT":9},"merges":["A C","G T","AC GT"]}}"#
        .to_vec();
    let mut tokenizers = vec![small; 7];
    tokenizers.push(read(root, &format!("{goldens}/dnabert_s/tokenizer.json")));
    let models = ["esm2", "dnabert_s", "caller", "llama3", "qwen2", "qwen3"];
    let configs = models.map(|model| read(root, &format!("{goldens}/{model}/config.json")));
    let targets =
        ["null", "h200", "cpu"].map(|name| read(root, &format!("crates/plan/src/targets/{name}.toml")));
    vec![
        FuzzFormat::new("tokenizer.json", "tokenizer.json", seeds(tokenizers, TOKENIZER), check_tokenizer),
        FuzzFormat::new("config.json", "config.json", seeds(configs.to_vec(), CONFIG), check_config),
        FuzzFormat::new("target.toml", "target.toml", seeds(targets.to_vec(), TARGET), check_target),
    ]
}

/// The content of a file of the repository.
fn read(root: &Path, path: &str) -> Vec<u8> {
    fs::read(root.join(path)).unwrap_or_default()
}

fn seeds(corpus: Vec<Vec<u8>>, words: &[&str]) -> Seeds {
    Seeds { corpus, words: words.iter().map(|word| word.as_bytes().to_vec()).collect() }
}

const TOKENIZER: &[&str] = &[
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"A\"},\"content\":\"AAAAAAAA\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\"A\"},\"content\":\"AAAAAAAA\"}]},",
    "{\"type\":\"Lowercase\"}",
    "{\"type\":\"Prepend\",\"prepend\":\"A\"}",
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true}",
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a+)+$\"},\"behavior\":\"Isolated\",\"invert\":false}",
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"((((((a{1,99}){1,99}){1,99}\"},\"behavior\":\"Isolated\",\"invert\":false}",
    "\"byte_fallback\":true",
    "\"fuse_unk\":true",
    "\"dropout\":0.5",
    "\"ignore_merges\":true",
    "\"A\":4294967295",
    "\"T\":2147483648,",
    "\"A A\"",
    "\"AC ACGT\",",
    "\"\":11,",
    "\"\u{e9}\":12,",
    "null",
    "\"type\":\"WordPiece\"",
    "\"type\":\"Unigram\"",
    "[\"A\",\"C\"]",
    ",",
    "\\ud800",
    "\u{1b}[31m",
    "\\u001b[31m\\n",
    "\"continuing_subword_prefix\":\"##\"",
];

const CONFIG: &[&str] = &[
    "\"num_hidden_layers\": 16777216,",
    "\"hidden_size\": 16384,",
    "\"num_attention_heads\": 128,",
    "\"vocab_size\": 1,",
    "\"layer_norm_eps\": 1e300,",
    "\"layer_norm_eps\": -1,",
    "\"layer_norm_eps\": 0,",
    "\"mask_token_id\": 16777216,",
    "\"model_type\": \"esm\",",
    "\"model_type\": \"bert\",",
    "\"alibi_starting_size\": 1,",
    "\"token_dropout\": 1,",
    "\"rope_theta\": 1,",
    "\"rope_theta\": 1e-38,",
    "\"factor\": 1e38,",
    "\"low_freq_factor\": 1e-38,",
    "\"high_freq_factor\": 1.0000001,",
    "\"attention_factor\": 1e30,",
    "\"mscale\": 1e38, \"mscale_all_dim\": 1e-38,",
    "\"original_max_position_embeddings\": 1,",
    "\"rope_type\": \"yarn\",",
    "\"quantization_config\": {},",
    "\"model_type\": \"qwen3\",",
    "\"\u{1b}[31m\\n\"",
    "\"model_type\": \"\\u001b[2J\\nerror: none\",",
    "null",
    "[",
    "{",
    "}",
    ",",
    "\\ud800",
];

const TARGET: &[&str] = &[
    "alignment = 4611686018427387904\n",
    "units = 9223372036854775807\n",
    "saturation = 9223372036854775807\n",
    "memory = 9223372036854775807\n",
    "memory = 1\n",
    "f32 = 1e-300\n",
    "f32 = 1e300\n",
    "launch = 1e300\n",
    "memory = 5e-324\n",
    "bytes = 9223372036854775807",
    "\n[[reserved]]\nlabel = \"x\"\nbytes = 9223372036854775807\n",
    "kernels = \"reference\"\n",
    "kernels = { cuda = [9, 0] }\n",
    "kernels = { cuda = [4294967295, 0] }\n",
    "kernels = { cpu = \"amx\" }\n",
    "[",
    "]",
    "\"\"\"",
    "'",
    "=",
    "\"\\u001b[31m\\nerror: none\"",
    "\u{1b}",
    "nan",
    "-inf",
    "[a.b.c]\n",
];

/// Input of an accepted tokenizer: sequences, and bytes that are not sequences.
const SEQUENCES: &[&[u8]] = &[
    b"",
    b"A",
    b"ACGTACGTTGCAACGT",
    b"acgtn",
    b"NNNNACGTNNNN",
    b"AC GT\tAC\n",
    b"[MASK]AC[CLS]GT",
    b"\xff\xfe\0\x1b",
    b"\xc3\xa9\xe2\x80\xa8A",
    b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
];

/// Opens a tokenizer and encodes [`SEQUENCES`] with it.
fn check_tokenizer(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let long = b"ACGTTGCATCAGGATTACCA".repeat(50);
    let (read, peak) = measured(|| {
        let bpe = Bpe::from_file(path)?;
        let mut tokens = vec![];
        for sequence in SEQUENCES.iter().copied().chain([&long[..]]) {
            tokens.clear();
            // The tokenizer may refuse a sequence; tokens of accepted sequences must be in range.
            let Ok(unknown) = bpe.encode(sequence, &mut tokens) else { continue };
            let in_range = tokens
                .iter()
                .all(|&token: &i32| usize::try_from(token).is_ok_and(|token| token < bpe.vocab_size()));
            if !in_range || unknown > tokens.len() || tokens.len() > 3 * sequence.len() + 2 {
                let text = sequence.escape_ascii();
                return Ok(Err(format!("'{text}' of {} bytes gives {tokens:?}", sequence.len())));
            }
        }
        Ok::<_, plimsoll_data::DataError>(Ok(()))
    });
    let accepted = match read {
        Ok(used) => used.map(|()| true)?,
        Err(error) => check_error(&error, path).map(|()| false)?,
    };
    // The tables of the encoder take at most 9 MiB.
    Ok(CaseResult { accepted, peak, allowed: (24 << 20) + 64 * bytes.len() as u64 })
}

/// Reads a configuration and builds its graph.
fn check_config(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let bounds = Bounds { tokens: 8, sequences: 2, longest: 8, packs: 1 };
    let (read, peak) = measured(|| {
        let text = read_text(path, 1 << 20).ok()?;
        let graph = if CallerConfig::is_caller(&text) {
            CallerConfig::from_json(&text).map(|caller| {
                if caller.tasks.is_empty() {
                    // Without tasks there is no inference graph.
                    caller.train_graph(bounds, &CallerObjective::MaskedCodons, &Training::default())
                } else {
                    caller.graph(bounds)
                }
            })
        } else {
            SequenceModel::from_json(&text).map(|model| {
                let frequencies = model.derived("rotary_emb.inv_freq").unwrap_or_default();
                assert!(frequencies.iter().all(|f| f.is_finite()), "{frequencies:?}");
                model.graph(bounds, &[Output::Mean])
            })
        };
        Some(graph.map(|graph| graph.map(|graph| in_range(&graph))))
    });
    let accepted = match read {
        None => false,
        Some(Ok(graph)) => graph.map_err(|e| format!("its graph is broken: {e}"))??,
        Some(Err(error)) => messages(&error).iter().try_for_each(|text| check_message(text)).map(|()| false)?,
    };
    Ok(CaseResult { accepted, peak, allowed: (64 << 20) + 64 * bytes.len() as u64 })
}

/// Checks that the size of the parameters does not overflow and that all constants are finite.
fn in_range(graph: &Graph) -> Result<bool, String> {
    let text = graph.to_string();
    for wrong in ["NaN", "inf,", "inf)", "inf "] {
        if text.contains(wrong) {
            return Err(format!("`{wrong}` in its graph"));
        }
    }
    let mut sum = 0u64;
    for piece in graph.params.iter().flat_map(|param| &param.pieces) {
        let bytes = piece.shape.iter().try_fold(4u64, |product, &size| product.checked_mul(size));
        sum = bytes
            .and_then(|bytes| sum.checked_add(bytes))
            .ok_or_else(|| "more weights than can be counted".to_owned())?;
    }
    Ok(true)
}

/// Reads a target and plans a model for it.
fn check_target(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let name = path.display().to_string();
    let (read, peak) = measured(|| {
        let text = read_text(path, LARGEST_TARGET).ok()?;
        Some(Target::parse(&name, &text).map(|target| use_target(&target)))
    });
    let accepted = match read {
        None => false,
        Some(Ok(used)) => used.map(|()| true)?,
        // The message consists of several lines: it shows the wrong line of the file with a mark below it.
        Some(Err(error)) => {
            let text = messages(&error).concat().replace('\n', " ");
            check_message(&text)?;
            if !text.contains(&name) {
                return Err(format!("the message does not name the file: {text}"));
            }
            false
        }
    };
    Ok(CaseResult { accepted, peak, allowed: (16 << 20) + 192 * bytes.len() as u64 })
}

/// Compiles a small model for the target. The ledger must add up to the peak, and a budget of 1 KiB must be
/// refused with a bill.
fn use_target(target: &Target) -> Result<(), String> {
    let encoder = Encoder::from_json(SMALL).map_err(|e| e.to_string())?;
    let bounds = Bounds { tokens: 64, sequences: 4, longest: 64, packs: 1 };
    let graph = encoder.graph(bounds, &[Output::Mean]).map_err(|e| e.to_string())?;
    let Ok(plan) = compile(&graph, &Policy::default(), target) else { return Ok(()) };
    let program = Program::new(target.clone(), vec![("encoder".to_owned(), plan)], vec![]);
    let peak = program.peak();
    let seconds = program.seconds();
    let digest = program.digest();
    if program.ledger().total() != peak || peak < Bytes(1 << 10) || !seconds.is_finite() || digest.is_err() {
        return Err(format!("the ledger is {}, the peak {peak}, a step takes {seconds} s", program.ledger()));
    }
    match program.within(Bytes(1 << 10)) {
        Ok(_) => Err(format!("{peak} fit into a kibibyte")),
        Err(refused) => check_message(&refused.to_string().replace('\n', " ")),
    }
}

/// A configuration with one layer.
const SMALL: &str = r#"{"model_type": "esm", "vocab_size": 33, "mask_token_id": 32, "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "position_embedding_type": "rotary"}"#;
