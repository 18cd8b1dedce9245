//! Tests of `verify`: the goldens pass all checks, and each defect of damaged or unreleased weights fails the
//! expected checks.

use plimsoll_data::weights::{StoredAs, TensorData, Weights, write_safetensors};
use plimsoll_graph::Bounds;
use plimsoll_models::{Encoder, Output, candidates};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Precision, Settings, Silent};
use plimsoll_testing::{Folder, fixture};
use plimsoll_tools::verify::{CheckOutcome, VerifyOptions, VerifyReport, verify};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn options() -> VerifyOptions {
    let settings = Settings { threads: 2, precision: Some(Precision::F32), ..Settings::default() };
    VerifyOptions { weights: None, models: vec![], heads: vec![], reference: None, settings }
}

fn folder(weights: &Path) -> VerifyReport {
    verify(&VerifyOptions { weights: Some(weights.to_owned()), ..options() }, &mut Silent)
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Token ids equal those of `tokenizers`, and hidden states those of transformers to the bound of the answers.
#[test]
fn decoders_answer_as_transformers_does() {
    for model in ["llama3", "qwen2", "qwen3"] {
        let report = folder(&fixture(&format!("goldens/{model}")));
        assert!(report.passes(), "{model}: {report}");
        let passed = ended(&report, CheckOutcome::Pass);
        let has = |name: &str, part: &str| passed.iter().any(|(n, detail)| *n == name && detail.contains(part));
        assert!(has("tokens", "5 of 5 sequences have the ids beside the weights"), "{model}: {report}");
        assert!(has("answers", "hidden"), "{model}: {report}");
    }
}

/// (name, detail) of the checks of all models that have this outcome.
fn ended(report: &VerifyReport, outcome: CheckOutcome) -> Vec<(&'static str, String)> {
    let checks = report.models.iter().flat_map(|v| &v.checks).filter(|c| c.outcome == outcome);
    checks.map(|c| (c.name, c.detail.clone())).collect()
}

fn failed(report: &VerifyReport) -> Vec<&'static str> {
    ended(report, CheckOutcome::Fail).into_iter().map(|(name, _)| name).collect()
}

/// Copies the golden ESM-2 with the first element of a tensor replaced by `value`; returns the folder.
fn damaged(folder: &Folder, tensor: &str, value: f32) -> PathBuf {
    let to = folder.path("esm2");
    fs::create_dir_all(&to).expect("a folder");
    for entry in fs::read_dir(fixture("goldens/esm2")).expect("goldens").flatten() {
        fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
    let weights = Weights::open(&to.join("model.safetensors")).expect("weights");
    let read = |name: &str, elements: u64| {
        let mut values = vec![0.0; elements as usize];
        weights.read_f32(name, 0..elements, &mut values).expect("read");
        values
    };
    let mut all: BTreeMap<String, (Vec<u64>, Vec<f32>)> = weights
        .tensors()
        .filter(|t| t.dtype().is_float())
        .map(|t| (t.name().to_owned(), (t.shape().to_vec(), read(t.name(), t.elements()))))
        .collect();
    all.get_mut(tensor).expect("a tensor").1[0] = value;
    write(&to, &all, StoredAs::F32);
    to
}

fn write(folder: &Path, tensors: &BTreeMap<String, (Vec<u64>, Vec<f32>)>, stored: StoredAs) {
    let data = tensors.iter().map(|(name, (shape, data))| TensorData { name, shape, data });
    let data: Vec<_> = data.collect();
    write_safetensors(&folder.join("model.safetensors"), &data, &BTreeMap::new(), stored).expect("written");
}

/// Writes a language model whose logits are largest for the input token: embeddings are unit vectors, and all
/// matrices of the layers are zero. A masked token cannot be predicted.
fn copying(folder: &Folder, config: &str) -> PathBuf {
    let encoder = Encoder::from_json(config).expect("a configuration");
    let bounds = Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 };
    let graph = encoder.graph(bounds, &[Output::Hidden, Output::Logits]).expect("a graph");
    let mut tensors = BTreeMap::new();
    for piece in graph.params.iter().flat_map(|p| &p.pieces).filter(|p| !p.tensor.ends_with("inv_freq")) {
        let columns = piece.shape.last().copied().unwrap_or(1);
        let is_norm = piece.tensor.to_lowercase().contains("norm") && piece.tensor.ends_with("weight");
        let is_unit = piece.tensor.contains("word_embeddings") || piece.tensor == "lm_head.dense.weight";
        let value = |i: u64| f32::from(is_norm || (is_unit && i / columns == i % columns));
        let values = (0..piece.shape.iter().product()).map(value).collect();
        let name = candidates(&encoder, &piece.tensor).swap_remove(0);
        tensors.insert(name, (piece.shape.clone(), values));
    }
    let to = folder.path("copying");
    fs::create_dir_all(&to).expect("a folder");
    fs::write(to.join("config.json"), config).expect("written");
    write(&to, &tensors, StoredAs::F16);
    to
}

fn golden_config() -> String {
    fs::read_to_string(fixture("goldens/esm2/config.json")).expect("a golden")
}

#[test]
fn the_goldens_pass() {
    let report = folder(&fixture("goldens"));
    assert_eq!(failed(&report), [""; 0], "{report}");
    assert_eq!(report.models.len(), 3);
    let passed = ended(&report, CheckOutcome::Pass);
    let about = |name: &str| passed.iter().filter(|(n, _)| *n == name).count();
    // `answers`: hidden and mean of DNABERT-S; hidden, mean and logits of ESM-2; two window lengths of the head.
    assert_eq!((about("answers"), about("company"), about("rotary")), (7, 3, 1), "{report}");
    let ids = "7 of 7 sequences have the ids beside the weights".to_owned();
    assert!(passed.contains(&("tokens", ids)), "{report}");
    assert_eq!(to_json(&report)["passes"], true);
}

/// A reference of other encoders is not silently ignored.
#[test]
fn a_reference_that_is_not_compared_is_named() {
    let models = vec![fixture("goldens/esm2").display().to_string()];
    let options = VerifyOptions { models, reference: Some(fixture("goldens")), ..options() };
    let report = verify(&options, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
    let notes = ended(&report, CheckOutcome::Note);
    let (_, note) = notes.iter().find(|(name, _)| *name == "reference").expect("a note");
    assert!(note.starts_with("not compared: ") && note.ends_with("this model's have 40"), "{report}");
}

#[test]
fn the_goldens_pass_in_bf16_as_well() {
    let settings = Settings { precision: Some(Precision::Bf16), ..options().settings };
    let options = VerifyOptions { weights: Some(fixture("goldens")), settings, ..options() };
    let report = verify(&options, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(failed(&report), [""; 0], "{report}");
    let passed = ended(&report, CheckOutcome::Pass);
    let about = |name: &str| passed.iter().filter(|(n, _)| *n == name).count();
    // `distance`: hidden states of both encoders and the head's labels. `batch_invariance` is checked in both precisions
    // for the encoders.
    assert_eq!((about("distance"), about("answers"), about("company")), (3, 7, 5), "{report}");
}

#[test]
fn damaged_weights_fail() {
    let check = |tensor: &str, value: f32, wanted: &[&str]| {
        let f = Folder::new(&format!("verify-{tensor}"));
        let report = folder(&damaged(&f, tensor, value));
        assert_eq!(failed(&report), wanted, "{tensor}: {report}");
        assert!(!report.passes());
    };
    check("lm_head.bias", 0.5, &["answers"]);
    check("esm.encoder.layer.0.LayerNorm.bias", 0.5, &["answers"; 3]);
    check(
        "esm.encoder.layer.1.output.dense.bias",
        f32::NAN,
        &["weights", "answers", "answers", "answers", "finite"],
    );
}

#[test]
fn a_language_model_names_what_it_sees() {
    let f = Folder::new("verify-copying");
    let report = folder(&copying(&f, &golden_config()));
    assert_eq!(failed(&report), [""; 0], "{report}");
    let named = "443 of 443 residues of known proteins are named, more than half is needed".to_owned();
    assert!(ended(&report, CheckOutcome::Pass).contains(&("language", named)), "{report}");
    let notes = ended(&report, CheckOutcome::Note);
    assert!(
        notes.iter().any(|(name, detail)| *name == "rotary" && detail.contains("no frequencies")),
        "{report}"
    );
    let (_, masked) = notes.iter().find(|(name, _)| *name == "masked").expect("a note");
    let right: u32 = masked.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    assert!(right < 20, "it cannot know what it does not see: {masked}");
}

/// The configuration of ESM-2 8M.
fn released_config() -> String {
    golden_config()
        .replace("\"hidden_size\": 40", "\"hidden_size\": 320")
        .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 6")
        .replace("\"num_attention_heads\": 5", "\"num_attention_heads\": 20")
        .replace("\"intermediate_size\": 160", "\"intermediate_size\": 1280")
}

#[test]
fn other_weights_of_a_released_size_are_found() {
    let f = Folder::new("verify-released");
    let report = folder(&copying(&f, &released_config()));
    assert_eq!(failed(&report), ["published"; 2], "{report}");
    let notes = ended(&report, CheckOutcome::Note);
    assert!(notes.contains(&("sizes", "those of facebook/esm2_t6_8M_UR50D".to_owned())), "{report}");
    assert!(
        notes.iter().any(|(name, detail)| *name == "digest" && detail.contains("another file")),
        "{report}"
    );
}

/// Drops the tensors whose names begin with `prefix` from the model in `folder`.
fn drop_tensors(folder: &Path, prefix: &str) {
    let path = folder.join("model.safetensors");
    let weights = Weights::open(&path).expect("weights");
    let kept = weights.tensors().filter(|t| t.dtype().is_float() && !t.name().starts_with(prefix));
    let tensors = kept.map(|t| {
        let mut values = vec![0.0; t.elements() as usize];
        weights.read_f32(t.name(), 0..t.elements(), &mut values).expect("read");
        (t.name().to_owned(), (t.shape().to_vec(), values))
    });
    let tensors = tensors.collect();
    write(folder, &tensors, StoredAs::F32);
}

/// An encoder without its language-model head is verified as far as it goes, and the report says what was not checked.
#[test]
fn a_model_without_its_head_is_verified_without_logits() {
    let f = Folder::new("verify-headless");
    let golden = damaged(&f, "esm.encoder.layer.0.LayerNorm.bias", 0.5);
    fs::copy(fixture("goldens/esm2/model.safetensors"), golden.join("model.safetensors")).expect("copied");
    drop_tensors(&golden, "lm_head.");
    let report = folder(&golden);
    assert_eq!(failed(&report), [""; 0], "{report}");
    let skipped = |report: &VerifyReport| {
        let notes = ended(report, CheckOutcome::Note).into_iter();
        let notes = notes.filter(|(_, detail)| detail.contains("not checked, because the file has no"));
        notes.map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(skipped(&report), ["answers", "language"], "{report}");
    let released = copying(&f, &released_config());
    drop_tensors(&released, "lm_head.dense.");
    let report = folder(&released);
    assert_eq!(failed(&report), ["weights", "published"], "{report}");
    assert!(report.to_string().contains("lacks lm_head.dense.weight, lm_head.dense.bias"), "{report}");
    drop_tensors(&released, "lm_head.");
    let report = folder(&released);
    // Only the hidden states can differ from the published ones.
    assert_eq!(failed(&report), ["published"], "{report}");
    assert_eq!(skipped(&report), ["published", "language"], "{report}");
}

#[test]
fn what_is_missing_is_a_failure_of_that_model() {
    let f = Folder::new("verify-missing");
    fs::create_dir_all(f.path("esm2")).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("goldens/esm2").join(file), f.path("esm2").join(file)).expect("copied");
    }
    let report = folder(&f.0);
    let passes: Vec<bool> = report.models.iter().map(|v| v.passes()).collect();
    assert_eq!(passes, [false, false, false], "{report}");
    // The golden ESM-2 has random weights. Without reference outputs it is held to the properties of a trained
    // model, and the check `language` fails.
    assert_eq!(failed(&report), ["opens", "language", "opens"], "{report}");
    let model = fixture("goldens/dnabert_s").display().to_string();
    let broken = f.write("broken.safetensors", "x").display().to_string();
    let models = vec![model, broken];
    let report = verify(&VerifyOptions { models, ..options() }, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.models.iter().map(|v| v.passes()).collect::<Vec<_>>(), [true, false], "{report}");
    let empty = VerifyOptions { weights: Some(f.path("nowhere")), ..options() };
    let error = verify(&empty, &mut Silent).expect_err("nothing is there").to_string();
    assert!(error.contains("the folder contains no model"), "{error}");
}

#[test]
fn the_cpu_refuses_what_it_does_not_compute_in() {
    for (precision, name) in [(Precision::Tf32, "tf32"), (Precision::Fp16, "fp16"), (Precision::Fp8, "fp8")] {
        let settings = Settings { precision: Some(precision), ..options().settings };
        let models = vec![fixture("goldens/esm2").display().to_string()];
        let error =
            verify(&VerifyOptions { models, settings, ..options() }, &mut Silent).expect_err(name).to_string();
        assert!(error.contains(&format!("precision={name}")) && error.contains("device=cuda"), "{error}");
    }
}
