//! Tests that checkpoints can be used by transformers and by this program's other commands. Invariant: every
//! checkpoint has the tensors and configuration keys that transformers writes (`fixtures/training/hub.json`,
//! made by `bench/fixtures/hub.py`).

use crate::rig::{golden, method};
use crate::training::{ESM, esm, root, train, try_train, values};
use plimsoll_data::weights::Weights;
use plimsoll_embed::classify::{self, classify};
use plimsoll_embed::embed;
use plimsoll_runtime::{Failure, Precision, Settings, Silent};
use plimsoll_testing::{Folder, fixture};
use plimsoll_tools::merge::{self, merge};
use plimsoll_train::config::TrainConfig;
use plimsoll_virus::predict;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const DECODER: &str = "
model:
  {hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 48, norm: rms_norm, activation: swiglu, bias: false,
   experts: {count: 4, top_k: 2}}
data: {longest: 64, validation_fraction: 0, workers: 1}
loss: {balance: 0.001, router_z: 0}
schedule: {kind: constant, warmup: 0}
batch: {tokens: 128}
run: {steps: 1, threads: 2}
";

/// Writes a table that assigns the classes 0, 1 and 2 to the training proteins in turn, and returns the flags
/// that train a classifier on it.
pub fn labels(folder: &Folder) -> String {
    let proteins = fs::read_to_string(fixture("goldens/pipeline/expected_500/protein.faa")).expect("proteins");
    let names = proteins.lines().filter_map(|line| line.strip_prefix('>')?.split_whitespace().next());
    let table: String = names.enumerate().map(|(i, name)| format!("{name}\t{}\n", i % 3)).collect();
    let path = folder.write("labels.tsv", table);
    format!("model.classes=3 data.truncate=true data.labels={} batch.micro_tokens=512", path.display())
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

fn shapes(folder: &Path) -> BTreeMap<String, Vec<u64>> {
    let weights = Weights::open(folder).expect("weights");
    weights.tensors().map(|t| (t.name().to_owned(), t.shape().to_vec())).collect()
}

/// Asserts that a checkpoint has the tensor names and shapes that transformers writes, apart from the rotary
/// frequencies that the hub's ESM-2 files have for each layer, and only configuration keys that transformers
/// writes with equal values.
fn check(checkpoint: &Path, architecture: &str) {
    let wanted = &json(&fixture("training/hub.json"))[architecture];
    let mut found = shapes(checkpoint);
    let layers = found.len();
    found.retain(|name, _| !name.ends_with("inv_freq"));
    let frequencies = if architecture.starts_with("esm2") { 2 } else { 0 };
    assert_eq!(layers - found.len(), frequencies, "{architecture}");
    let tensors: BTreeMap<String, Vec<u64>> =
        serde_json::from_value(wanted["tensors"].clone()).expect("shapes");
    assert_eq!(found, tensors, "{architecture}");
    let config = json(&checkpoint.join("config.json"));
    for (key, value) in config.as_object().expect("keys") {
        let theirs = match key.as_str() {
            // transformers 5 writes this key into `rope_parameters` and reads it in both places.
            "rope_theta" if wanted["config"]["rope_theta"].is_null() => {
                &wanted["config"]["rope_parameters"][key]
            }
            // Not compared: ids of special tokens, names of classes, and keys that only this program reads.
            "bos_token_id" | "eos_token_id" | "pad_token_id" | "id2label" | "label2id"
            | "classifier_pooling" | "plimsoll_tokenizer" => value,
            _ => &wanted["config"][key],
        };
        assert_eq!(value, theirs, "{architecture}: {key}");
    }
}

#[test]
fn checkpoints_are_as_transformers_writes_them() {
    let folder = Folder::new("interop-names");
    let text = format!("data.train=[{}]", root("examples/corpus.txt").display());
    for (architecture, flags) in [
        ("llama", "model.kind=dense_lm model.experts.count=8 loss.balance=0"),
        ("llama_tied", "model.kind=dense_lm model.experts.count=8 loss.balance=0 model.tied_head=true"),
        (
            "mistral",
            "model.kind=dense_lm model.experts.count=8 loss.balance=0 model.attention.mask=window model.attention.window=16",
        ),
        ("mixtral", "model.kind=moe_lm"),
    ] {
        let report = train(&folder.path(architecture), DECODER, &format!("{text} {flags}"));
        check(report.checkpoint.as_deref().expect("saved"), architecture);
    }
    check(&train(&folder.path("esm2"), ESM, &esm("run.steps=1")).checkpoint.expect("saved"), "esm2");
    let flags = esm(&format!("run.steps=1 {}", labels(&folder)));
    check(&train(&folder.path("classes"), ESM, &flags).checkpoint.expect("saved"), "esm2_classifier");
}

#[test]
fn tokenizers_go_with_checkpoints() {
    let folder = Folder::new("interop-tokenizers");
    let read = |path: PathBuf| fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let report = train(&folder.path("esm2"), ESM, &esm("run.steps=1"));
    assert_eq!(
        read(report.checkpoint.as_deref().expect("saved").join("vocab.txt")),
        read(fixture("goldens/esm2/vocab.txt"))
    );
    assert_eq!(
        json(&report.checkpoint.as_deref().expect("saved").join("tokenizer_config.json"))["tokenizer_class"],
        "EsmTokenizer"
    );
    // A model without tokenizer files gives a checkpoint with the files of ESM-2's tokenizer.
    fs::remove_file(report.checkpoint.as_deref().expect("saved").join("vocab.txt")).expect("there");
    let again = format!("run.steps=1 model.from={}", report.checkpoint.as_deref().expect("saved").display());
    let report = train(&folder.path("again"), ESM, &esm(&again));
    assert_eq!(
        read(report.checkpoint.as_deref().expect("saved").join("vocab.txt")),
        read(fixture("goldens/esm2/vocab.txt"))
    );
    let report = dna(&folder);
    assert_eq!(read(report.join("tokenizer.json")), read(fixture("goldens/dnabert_s/tokenizer.json")));
    assert_eq!(json(&report.join("tokenizer_config.json"))["cls_token"], "[CLS]");
    // Keys of the initial model's config.json are copied.
    let config = json(&report.join("config.json"));
    assert_eq!(config["auto_map"]["AutoModelForMaskedLM"], "bert_layers.BertForMaskedLM");
    assert_eq!(config["architectures"][0], "BertForMaskedLM");
    let text = format!("model.kind=moe_lm data.train=[{}]", root("examples/corpus.txt").display());
    let report = train(&folder.path("bytes"), DECODER, &text);
    assert!(!report.checkpoint.as_deref().expect("saved").join("tokenizer.json").exists());
}

/// Trains DNABERT-S for one step; returns the checkpoint folder.
fn dna(folder: &Folder) -> PathBuf {
    let flags = format!(
        "model.kind=dnabert_s model.from={} data.train=[{}] run.steps=1",
        fixture("goldens/dnabert_s").display(),
        fixture("goldens/pipeline/expected_500/nucleotide.fa").display()
    );
    train(&folder.path("dna"), ESM, &flags).checkpoint.expect("saved")
}

/// Settings for f32, the precision of the expected values in these tests.
fn wide() -> Settings {
    Settings { precision: Some(Precision::F32), ..Settings::default() }
}

/// Mean embeddings of the sequences in `input`, concatenated.
fn embedded(folder: &Folder, model: &Path, input: &str) -> Result<Vec<f32>, plimsoll_embed::EmbedError> {
    let output = folder.path("out.safetensors");
    let usual = plimsoll_embed::EmbedOptions::usual(model.display().to_string(), fixture(input), &output);
    embed(&plimsoll_embed::EmbedOptions { force: true, settings: wide(), ..usual }, &mut Silent)?;
    Ok(values(&output).swap_remove(0).1)
}

const PROTEINS: &str = "goldens/esm2/proteins.faa";

#[test]
fn what_was_trained_embeds() {
    let folder = Folder::new("interop-embed");
    let report = train(&folder.path("esm2"), ESM, &esm("run.steps=1 optimizer.lr=1e-2"));
    for (trained, source, input) in [
        (report.checkpoint.expect("saved"), "goldens/esm2", PROTEINS),
        (dna(&folder), "goldens/dnabert_s", "goldens/dnabert_s/reads.fa"),
    ] {
        let before = embedded(&folder, &fixture(source), input).expect("embedded");
        let after = embedded(&folder, &trained, input).expect("embedded");
        assert_eq!(before.len(), after.len());
        assert!(before != after && after.iter().all(|x| x.is_finite()), "{source}");
    }
}

fn classified(folder: &Folder, model: &Path, settings: Settings) -> Result<String, plimsoll_embed::EmbedError> {
    classified_file(folder, model, (fixture(PROTEINS), None), settings)
}

/// The table of scores of the sequences in a file, which are truncated to a number of letters.
pub fn classified_file(
    folder: &Folder,
    model: &Path,
    (input, max_length): (PathBuf, Option<usize>),
    settings: Settings,
) -> Result<String, plimsoll_embed::EmbedError> {
    let output = folder.path("classes.tsv");
    let options = classify::ClassifyOptions {
        model: model.display().to_string(),
        inputs: vec![input],
        output: output.clone(),
        force: true,
        strict: false,
        sort_by_length: true,
        max_length,
        truncate: max_length.is_some(),
        allow_dna: false,
        prefetch: 2,
        journal: false,
        commit_every: std::time::Duration::from_secs(5),
        settings,
    };
    let report = classify(&options, &mut Silent)?;
    assert_eq!((report.width, report.files), (3, vec![output.clone()]));
    Ok(fs::read_to_string(output).expect("a table"))
}

/// Asserts that the scores in `table` are the softmax of the checkpoint's classifier applied to `rows`, the
/// embeddings by `embed`.
fn check_scores(table: &str, rows: &[f32], checkpoint: &Path) {
    let tensors: BTreeMap<String, Vec<f32>> = values(checkpoint).into_iter().collect();
    let w = &tensors["classifier.weight"];
    let b = &tensors["classifier.bias"];
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some("id\tlabel\tscore.0\tscore.1\tscore.2"));
    let width = w.len() / 3;
    assert_eq!(table.lines().count() - 1, rows.len() / width);
    for (line, row) in lines.zip(rows.chunks_exact(width)) {
        let dot =
            |c: usize| w[c * width..][..width].iter().zip(row).map(|(w, x)| f64::from(w * x)).sum::<f64>();
        let exp: Vec<f64> = (0..3).map(|c| (dot(c) + f64::from(b[c])).exp()).collect();
        let fields: Vec<&str> = line.split('\t').collect();
        let scores: Vec<f64> = fields[2..].iter().map(|field| field.parse().expect("a number")).collect();
        for (score, e) in scores.iter().zip(&exp) {
            assert!((score - e / exp.iter().sum::<f64>()).abs() < 1e-5, "{line}: {exp:?}");
        }
        let label: usize = fields[1].parse().expect("a class");
        assert!(scores.iter().all(|score| *score <= scores[label]), "{line}");
    }
}

#[test]
fn a_classifier_classifies() {
    let folder = Folder::new("interop-classify");
    let flags = esm(&format!("optimizer.lr=1e-2 {}", labels(&folder)));
    let checkpoint = train(&folder.path("run"), ESM, &flags).checkpoint.expect("saved");
    let table = classified(&folder, &checkpoint, wide()).expect("a table");
    let rows = embedded(&folder, &checkpoint, PROTEINS).expect("embedded");
    check_scores(&table, &rows, &checkpoint);
    let narrow = Settings { precision: Some(Precision::Bf16), ..wide() };
    let narrow = classified(&folder, &checkpoint, narrow).expect("a table");
    assert_ne!(narrow, table);
    let scores = |table: &str| -> Vec<f32> {
        table
            .lines()
            .skip(1)
            .flat_map(|line| line.split('\t').skip(2))
            .map(|s| s.parse().expect("a score"))
            .collect()
    };
    let near = scores(&table).iter().zip(scores(&narrow)).all(|(wide, narrow)| (wide - narrow).abs() < 2e-2);
    assert!(near, "{narrow}");
    // The columns have the class names of config.json.
    let config = fs::read_to_string(checkpoint.join("config.json")).expect("text");
    fs::write(checkpoint.join("config.json"), config.replace("\"1\": \"1\"", "\"1\": \"virus\""))
        .expect("written");
    let named = classified(&folder, &checkpoint, wide()).expect("a table");
    assert!(named.starts_with("id\tlabel\tscore.0\tscore.virus\tscore.2\n"), "{named}");
    let small = Settings { budget: Some(plimsoll_graph::Bytes(50_000)), ..wide() };
    let error = classified(&folder, &checkpoint, small).expect_err("no room");
    assert_eq!(error.exit_code(), 4, "{error}");
    let error = classified(&folder, &fixture("goldens/esm2"), wide()).expect_err("no classifier");
    assert!(error.to_string().contains("not a classifier of sequences"), "{error}");
}

/// Epochs of a classifier whose classes are words: the schedule ends with the last step, evaluations and checkpoints are at the ends
/// of epochs, and config.json and evaluations name the classes.
#[test]
fn a_classifier_is_trained_by_epochs_and_names_its_classes() {
    let folder = Folder::new("interop-epochs");
    let proteins = fs::read_to_string(fixture("goldens/pipeline/expected_500/protein.faa")).expect("proteins");
    let names = proteins.lines().filter_map(|line| line.strip_prefix('>')?.split_whitespace().next());
    let words = ["virus", "host", "other"];
    let table: String = names.enumerate().map(|(i, name)| format!("{name}\t{}\n", words[i % 3])).collect();
    let labels = folder.write("labels.tsv", table);
    let flags = esm(&format!(
        "model.classes=3 data.truncate=true data.labels={} batch.micro_tokens=512 batch.tokens=512 run.steps=null run.epochs=3 \
         schedule.kind=linear schedule.min_ratio=0 schedule.warmup=0.25 run.evaluate_every=1epoch run.save_every=1epoch \
         run.keep_last=9 data.validation_fraction=0.2",
        labels.display()
    ));
    let run = folder.path("run");
    let mut ear = crate::train::RecordingObserver::default();
    let report = try_train(&run, ESM, &flags, &mut ear).expect("trained");
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
    let steps: Vec<&Value> = lines.iter().filter(|line| line.get("lr").is_some()).collect();
    let last = report.state.step;
    assert!(last > 3 && steps.len() as u64 == last, "{last} steps");
    // The steps were counted before the first: the last one has the smallest rate of a schedule of this length, which is one
    // step away from 0.
    assert_eq!(report.run_record.choices["schedule.steps"], Value::from(last));
    let warmup = (last as f64 * 0.25).round();
    let wanted = report.run_record.config["optimizer"]["lr"].as_f64().expect("a rate") / (last as f64 - warmup);
    let found = steps[steps.len() - 1]["lr"].as_f64().expect("a rate");
    assert!((found / wanted - 1.0).abs() < 1e-9, "{found} {wanted}");
    // The last step of each epoch.
    let ends: Vec<u64> = (0..3)
        .map(|epoch| {
            let of_epoch = steps.iter().filter(|line| line["epoch"] == epoch);
            of_epoch.filter_map(|line| line["step"].as_u64()).max().expect("a step")
        })
        .collect();
    let evaluations: Vec<u64> = lines
        .iter()
        .filter(|line| line.get("validation_loss").is_some())
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(evaluations, ends);
    assert!(ends.iter().all(|step| run.join(format!("checkpoints/step-{step:08}")).is_dir()), "{ends:?}");
    // The configuration in the folder of the run resumes it.
    assert_eq!(
        TrainConfig::read(&run.join("config.yaml"), &[], &mut Silent)
            .expect("read")
            .folder(&run.join("config.yaml")),
        run
    );
    let config = json(&report.checkpoint.as_deref().expect("saved").join("config.json"));
    assert_eq!(config["id2label"], serde_json::json!({"0": "host", "1": "other", "2": "virus"}));
    let request = plimsoll_train::EvaluationRequest {
        checkpoint: report.checkpoint.clone().expect("saved"),
        data: vec![],
        flags: vec![],
    };
    let config = request.configuration(&mut Silent).expect("a configuration");
    let found = plimsoll_train::evaluate(&request, &config, plimsoll_runtime::Device::Cpu, &mut Silent)
        .expect("evaluated");
    let names: Vec<&str> = found.tasks[0].classes.iter().map(|class| class.name.as_str()).collect();
    assert_eq!(names, ["host", "other", "virus"]);
    let said = ear.said();
    for wanted in [
        " documents to train on, ",
        " held out",
        " tokens an epoch",
        &format!("for 3 epochs ({last} steps in all)"),
    ] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    let frozen = format!("{flags} model.freeze_encoder=true run.epochs=1");
    let mut ear = crate::train::RecordingObserver::default();
    try_train(&folder.path("frozen"), ESM, &frozen, &mut ear).expect("trained");
    assert!(ear.said().contains(" are trained, from "), "{}", ear.said());
    // Words that are not as many as the classes.
    let error = try_train(&folder.path("other"), ESM, &format!("{flags} model.classes=2"), &mut ear)
        .expect_err("three words");
    assert!(
        error.to_string().contains("its classes are host, other, virus, 3 in all, and model.classes is 2"),
        "{error}"
    );
}

fn merged(
    adapter: &Path,
    base: Option<&Path>,
    output: &Path,
) -> Result<merge::MergeReport, plimsoll_tools::ToolError> {
    let base = base.map(|path| path.display().to_string());
    let options = merge::MergeOptions { adapter: adapter.to_owned(), base, output: output.to_owned() };
    merge(&options, &mut Silent)
}

#[test]
fn adapters_merge_into_a_model() {
    let folder = Folder::new("interop-merge");
    let flags = "optimizer.lr=1e-2 model.lora.rank=2 model.lora.alpha=6";
    let adapter = train(&folder.path("run"), ESM, &esm(flags)).checkpoint.expect("saved");
    let error = embedded(&folder, &adapter, PROTEINS).expect_err("no model").to_string();
    assert!(error.contains("is an adapter of") && error.contains("`merge "), "{error}");
    let output = folder.path("merged");
    let report = merged(&adapter, None, &output).expect("merged");
    assert_eq!((report.adapted, report.tensors as usize), (4, shapes(&fixture("goldens/esm2")).len()));
    let by_name = |path: &Path| values(path).into_iter().collect::<BTreeMap<String, Vec<f32>>>();
    let before = by_name(&fixture("goldens/esm2"));
    let after = by_name(&output);
    let low = by_name(&adapter.join("adapter_model.safetensors"));
    for (name, was) in &before {
        let module = format!("base_model.model.{}", name.trim_end_matches(".weight"));
        let Some(a) = low.get(&format!("{module}.lora_A.weight")) else {
            assert!(after[name] == *was, "{name} has no adapter");
            continue;
        };
        let b = &low[&format!("{module}.lora_B.weight")];
        let k = a.len() / 2;
        assert!(after[name] != *was, "{name}");
        for (i, w) in was.iter().enumerate() {
            let wanted = w + 3.0 * (0..2).map(|r| b[i / k * 2 + r] * a[r * k + i % k]).sum::<f32>();
            assert!((after[name][i] - wanted).abs() < 1e-6, "{name}: {} for {wanted}", after[name][i]);
        }
    }
    assert!(output.join("vocab.txt").exists());
    let plain = embedded(&folder, &fixture("goldens/esm2"), PROTEINS).expect("embedded");
    assert!(embedded(&folder, &output, PROTEINS).expect("embedded") != plain);
    let refused = |adapter: &Path, base: Option<&Path>, output: &Path, why: &str| {
        let error = merged(adapter, base, output).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    };
    let other = folder.path("other");
    refused(&adapter, None, &output, "already exists");
    refused(&adapter, Some(&fixture("goldens/dnabert_s")), &other, "does not exist in");
    refused(&fixture("goldens/esm2"), None, &other, "adapter_config.json");
    assert!(!other.exists());
}

/// A killed merge leaves its temporary folder, which the next merge replaces, unless the other one still runs.
#[test]
fn a_merge_replaces_what_a_killed_merge_left() {
    let folder = Folder::new("interop-merge-killed");
    let adapter =
        train(&folder.path("run"), ESM, &esm("optimizer.lr=1e-2 model.lora.rank=2")).checkpoint.expect("saved");
    let output = folder.path("merged");
    let left = folder.path(".merged.part");
    let rest = left.join(".model.safetensors.1-0.part");
    std::fs::create_dir(&left).expect("a folder");
    std::fs::write(&rest, "half").expect("written");
    let running = std::fs::File::open(&left).expect("the folder");
    running.try_lock().expect("locked");
    let error = merged(&adapter, None, &output).expect_err("another merge runs").to_string();
    assert!(error.contains("another run is writing to") && error.contains(".merged.part"), "{error}");
    assert_eq!(std::fs::read(&rest).expect("untouched"), b"half");
    drop(running);
    std::fs::create_dir(left.join("own")).expect("a folder");
    let error = merged(&adapter, None, &output).expect_err("a folder of somebody else").to_string();
    assert!(error.contains(".merged.part"), "{error}");
    std::fs::remove_dir(left.join("own")).expect("removed");
    merged(&adapter, None, &output).expect("merged");
    assert!(!left.exists() && !output.join(".model.safetensors.1-0.part").exists());
    let other = folder.path("other");
    merged(&adapter, None, &other).expect("merged");
    let weights = |of: &Path| std::fs::read(of.join("model.safetensors")).expect("weights");
    assert!(weights(&output) == weights(&other));
}

#[test]
fn an_adapted_classifier_classifies_once_it_is_merged() {
    let folder = Folder::new("interop-merge-classes");
    let flags = esm(&format!("optimizer.lr=1e-2 model.lora.rank=2 {}", labels(&folder)));
    let adapter = train(&folder.path("run"), ESM, &flags).checkpoint.expect("saved");
    let config = json(&adapter.join("adapter_config.json"));
    assert_eq!(config["modules_to_save"][0], "classifier");
    let output = folder.path("merged");
    merged(&adapter, None, &output).expect("merged");
    assert!(shapes(&output).keys().all(|name| !name.starts_with("lm_head.")));
    let table = classified(&folder, &output, wide()).expect("a table");
    check_scores(&table, &embedded(&folder, &output, PROTEINS).expect("embedded"), &output);
}

#[test]
fn adapters_of_a_model_without_its_head_are_refused() {
    let folder = Folder::new("interop-headless");
    let flags = format!(
        "model.kind=dnabert_s model.from={} data.train=[{}] model.lora.rank=2",
        fixture("goldens/dnabert_s").display(),
        fixture("goldens/pipeline/expected_500/nucleotide.fa").display()
    );
    let error = try_train(&folder.path("run"), ESM, &flags, &mut crate::train::RecordingObserver::default())
        .expect_err("refused");
    let why = "has no `cls.predictions.transform.dense.weight`, and adapters would leave it untrained";
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn a_head_that_was_trained_predicts() {
    let folder = Folder::new("interop-head");
    let text = fs::read_to_string(root("examples/head.yaml")).expect("the example");
    let text = text.replace("examples/head/", &format!("{}/", root("examples/head").display()));
    let head = train(&folder.path("run"), &text, "run.epochs=1 run.patience=null").checkpoint.expect("saved");
    let scores = |head: PathBuf, output: &str| {
        let output = folder.path(output);
        let mut options = golden(&fixture("goldens/pipeline/reads.fa"), &output);
        method(&mut options).models.head = Some(head);
        let report = predict(&options, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
        assert!(report.trained);
        fs::read_to_string(output.join("windows.tsv")).expect("a table")
    };
    // The folder and the file in it give equal scores, which differ from the scores of the golden head.
    let found = scores(head.clone(), "folder");
    assert_eq!(found, scores(head.join("model.safetensors"), "file"));
    assert!(found != scores(fixture("goldens/head.pth"), "golden"));
}
