//! Tests of opening models: what is refused by name, and what is read and noted. Each is one table of changes to a golden
//! model.

use plimsoll_data::weights::{HubEnv, StoredAs, TensorData, Weights, write_safetensors};
use plimsoll_runtime::live::LiveState;
use plimsoll_runtime::{Level, Model, Observer, Progress};
use plimsoll_testing::{Folder, fixture};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

/// A change to a copy of a golden model.
enum Change {
    /// Sets a key of config.json.
    Key(&'static str, Value),
    /// Removes a file.
    Without(&'static str),
    /// Writes a file.
    With(&'static str, String),
    /// Renames, copies or removes tensors: the new names of a tensor.
    Tensors(fn(&str) -> Vec<String>),
    /// Replaces the first value of a tensor that is stored beside it under another name.
    Twin(&'static str, &'static str),
}
use Change::{Key, Tensors, Twin, With, Without};

/// Lines that were said while a model was opened.
#[derive(Default)]
struct Said(Vec<String>);

impl Observer for Said {
    fn say(&mut self, level: Level, text: &str) {
        if level != Level::Detail {
            self.0.push(text.to_owned());
        }
    }

    fn progress(&mut self, _: &Progress) {}

    fn live(&mut self, _: &LiveState) {}
}

/// Copies the golden model `name` with `changes`.
fn changed(folder: &Folder, name: &str, changes: &[Change]) {
    let golden = fixture(&format!("goldens/{name}"));
    for file in ["config.json", "tokenizer.json", "vocab.txt", "model.safetensors"] {
        if golden.join(file).exists() {
            fs::copy(golden.join(file), folder.path(file)).expect("copied");
        }
    }
    for change in changes {
        match change {
            Key(key, value) => {
                let mut config: Value = serde_json::from_str(&folder.read("config.json")).expect("JSON");
                config[*key] = value.clone();
                folder.write("config.json", config.to_string());
            }
            Without(file) => fs::remove_file(folder.path(file)).expect("removed"),
            With(file, text) => drop(folder.write(file, text)),
            Tensors(renamed) => rewrite(&folder.path("model.safetensors"), |name, values| {
                renamed(name).into_iter().map(|name| (name, values.to_vec())).collect()
            }),
            Twin(tensor, twin) => rewrite(&folder.path("model.safetensors"), |name, values| {
                let mut other = values.to_vec();
                other[0] += 1.0;
                let own = (name.to_owned(), values.to_vec());
                if name == *tensor { vec![own, ((*twin).to_owned(), other)] } else { vec![own] }
            }),
        }
    }
}

/// A tensor of a file: its name and its values.
type Stored = (String, Vec<f32>);

fn rewrite(path: &Path, new: impl Fn(&str, &[f32]) -> Vec<Stored>) {
    let weights = Weights::open(path).expect("weights");
    let mut all: BTreeMap<String, (Vec<u64>, Vec<f32>)> = BTreeMap::new();
    for tensor in weights.tensors().filter(|tensor| tensor.dtype().is_float()) {
        let mut values = vec![0.0; tensor.elements() as usize];
        weights.read_f32(tensor.name(), 0..tensor.elements(), &mut values).expect("read");
        for (name, values) in new(tensor.name(), &values) {
            all.insert(name, (tensor.shape().to_vec(), values));
        }
    }
    drop(weights);
    let data: Vec<_> = all.iter().map(|(name, (shape, data))| TensorData { name, shape, data }).collect();
    write_safetensors(path, &data, &BTreeMap::new(), StoredAs::F32).expect("written");
}

fn open(folder: &Folder, said: &mut Said) -> Result<Model, String> {
    Model::open_with(&folder.0.display().to_string(), &HubEnv::default(), said).map_err(|error| {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    })
}

#[test]
fn what_would_compute_something_else_is_refused_by_name() {
    let other_alphabet =
        || fs::read_to_string(fixture("goldens/esm2/vocab.txt")).expect("read").replace("L\nA\n", "A\nL\n");
    let no_regex = || {
        let text = fs::read_to_string(fixture("goldens/llama3/tokenizer.json")).expect("read");
        let mut file: Value = serde_json::from_str(&text).expect("JSON");
        file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("(a+)+$");
        file.to_string()
    };
    for (model, changes, wanted) in [
        (
            "llama3",
            vec![Without("tokenizer.json")],
            "has no tokenizer.json; a language model is read with its own",
        ),
        (
            "qwen2",
            vec![
                Without("tokenizer.json"),
                With("vocab.json", "{}".to_owned()),
                With("merges.txt", String::new()),
            ],
            "has no tokenizer.json (only vocab.json, merges.txt)",
        ),
        (
            "llama3",
            vec![Without("tokenizer.json"), With("tokenizer.model", String::new())],
            "has no tokenizer.json (only tokenizer.model)",
        ),
        ("llama3", vec![With("tokenizer.json", no_regex())], "its pre-tokenizer Split has another pattern"),
        (
            "llama3",
            vec![Without("tokenizer.json"), With("vocab.txt", other_alphabet())],
            "vocab.txt, line 5: expected `L`, found `A`",
        ),
        ("esm2", vec![With("vocab.txt", other_alphabet())], "vocab.txt, line 5: expected `L`, found `A`"),
        (
            "llama3",
            vec![Key("quantization_config", json!({"quant_method": "gptq"}))],
            "config.json: the model cannot be run: `quantization_config` must be left out",
        ),
        (
            "esm2",
            vec![Key("quantization_config", json!({"load_in_8bit": true}))],
            "`quantization_config` must be",
        ),
        (
            "llama3",
            vec![Key("rope_parameters", json!({"rope_type": "dynamic", "factor": 2.0}))],
            "`rope_type` must be `default`, `linear`, `llama3` or `yarn`",
        ),
        ("qwen2", vec![Key("use_sliding_window", json!(true))], "`use_sliding_window` must be false"),
        ("qwen3", vec![Key("num_hidden_layers", json!(3))], "no tensor `model.layers.2."),
        (
            "qwen3",
            vec![Twin("model.embed_tokens.weight", "lm_head.weight")],
            "`lm_head.weight` and `model.embed_tokens.weight` must be equal",
        ),
        (
            "llama3",
            vec![Key("plimsoll_tokenizer", json!("bytes")), Key("vocab_size", json!(100))],
            "not 256 or more",
        ),
    ] {
        let folder = Folder::new("refused_model");
        changed(&folder, model, &changes);
        let error = open(&folder, &mut Said::default()).err().unwrap_or_else(|| panic!("{model}: {wanted}"));
        assert!(error.contains(wanted), "{model}: {error}");
    }
}

#[test]
fn what_is_known_is_opened_and_what_is_left_over_is_noted() {
    let bare: fn(&str) -> Vec<String> = |name| vec![name.strip_prefix("model.").unwrap_or(name).to_owned()];
    let without_head: fn(&str) -> Vec<String> =
        |name| if name == "lm_head.weight" { vec![] } else { vec![name.replacen("model.", "", 1)] };
    let more: fn(&str) -> Vec<String> = |name| match name {
        "model.norm.weight" => vec![name.to_owned(), "model.extra.weight".to_owned()],
        _ => vec![name.to_owned()],
    };
    for (model, changes, notes) in [
        ("llama3", vec![], vec![]),
        ("qwen2", vec![], vec![]),
        ("qwen3", vec![], vec![]),
        ("esm2", vec![], vec![]),
        ("dnabert_s", vec![], vec![]),
        ("llama3", vec![Tensors(bare)], vec![]),
        ("llama3", vec![Tensors(without_head)], vec![]),
        (
            "llama3",
            vec![Tensors(more)],
            vec!["the model does not read 1 of the tensors in its weights: model.extra.weight"],
        ),
        (
            "qwen3",
            vec![Key("num_hidden_layers", json!(1))],
            vec!["the weights have 2 layers, of which config.json (num_hidden_layers) takes the first 1"],
        ),
        (
            "esm2",
            vec![Key("num_hidden_layers", json!(1))],
            vec!["the weights have 2 layers, of which config.json"],
        ),
    ] {
        let folder = Folder::new("opened_model");
        if model == "dnabert_s" {
            fs::copy(fixture("goldens/dnabert_s/pytorch_model.bin"), folder.path("pytorch_model.bin"))
                .expect("copied");
        }
        changed(&folder, model, &changes);
        let mut said = Said::default();
        if let Err(error) = open(&folder, &mut said) {
            panic!("{model}: {error}");
        }
        assert_eq!(said.0.len(), notes.len(), "{model}: {:?}", said.0);
        for (said, note) in said.0.iter().zip(notes) {
            assert!(said.contains(note), "{model}: {said}");
        }
    }
}
