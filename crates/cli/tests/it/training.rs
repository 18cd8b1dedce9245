//! Tests of `plimsoll train`: printed, refused and translated configurations, and messages of skipped steps.

use crate::harness::Folder;
use std::path::Path;

/// A configuration file with keys of the Ava guide.
const AVA: &str = "\
model:
  hidden_size: 512
  num_experts: 8
memory:
  pool_size_gb: 20
  clear_cache_frequency: 100
  silent_mode: true
training:
  eval_batch_size: 4
  adjustment_frequency: 10
  smooth_transitions: true
  float32_matmul_precision: high
  torch_compile: {mode: max-autotune}
attention:
  sparse_block_size: 64
  num_local_blocks: 4
deepspeed:
  zero_stage: 2
  nvme_offload: true
data:
  persistent_workers: true
thresholds:
  warning: 0.92
";

#[test]
fn keys_of_another_trainer() {
    let folder = Folder::new("train_ava");
    folder.write("ava.yaml", AVA);
    folder.run(&["train", "ava.yaml", "--print-config"]).assert_code(1).matches("train_ava");
}

#[test]
fn values_that_make_no_sense() {
    let folder = Folder::new("train_values");
    folder.write(
        "run.yaml",
        "data: {train: [a.txt]}\nrun: {steps: 10}\nmodel: {heads: 7}\noptimizer: {lr: -1}\n",
    );
    let words = ["train", "run.yaml", "--print-config", "--set", "batch.tokens=many"];
    folder.run(&words).assert_code(1).matches("train_values");
    let words = ["train", "run.yaml", "--print-config", "--set", "optimizer.lr=1e-4", "--budget", "much"];
    folder.run(&words).assert_code(1).matches("train_rules");
    folder.run(&["train", "nowhere.yaml", "--print-config"]).assert_code(1).matches("train_nowhere");
}

#[test]
fn a_configuration_with_every_key() {
    let folder = Folder::new("train_printed");
    folder.write("run.yaml", "data: {train: [a.txt]}\nrun: {steps: 10}\n");
    let words = ["train", "run.yaml", "--print-config", "--set", "model.preset=small", "--budget", "24GiB"];
    let printed = folder.run(&words).assert_code(0).stdout();
    for line in ["  hidden: 512\n", "  preset: small\n", "  budget: \"24GiB\"\n", "  micro_tokens: auto\n"] {
        assert!(printed.contains(line), "{line}: {printed}");
    }
    folder.write("again.yaml", &printed);
    assert_eq!(folder.run(&["train", "again.yaml", "--print-config"]).assert_code(0).stdout(), printed);
    let schema: serde_json::Value =
        serde_json::from_str(&folder.run(&["train", "--schema"]).assert_code(0).stdout()).expect("JSON");
    assert_eq!(schema["properties"]["optimizer"]["properties"]["lr"]["exclusiveMinimum"], 0);
}

#[test]
fn an_own_configuration_is_not_translated() {
    let folder = Folder::new("train_own");
    folder.write("run.yaml", "data: {train: [a.txt]}\nrun: {steps: 10}\nmodel: {kind: esm2}\n");
    let said = folder.run(&["train", "--from-config", "run.yaml", "--print-config"]).assert_code(1).stderr();
    assert!(said.contains("run.yaml: this is a configuration of plimsoll already"), "{said}");
}

/// A flag that has no effect together with another one is refused, and -o is part of the printed configuration.
#[test]
fn flags_of_a_printed_configuration_act_or_are_refused() {
    let folder = Folder::new("train_printed_flags");
    folder.write("run.yaml", "data: {train: [a.txt]}\nrun: {steps: 10}\n");
    let words = ["train", "run.yaml", "--print-config", "-o", "a: 'b' \"c\" \u{e9}"];
    let printed = folder.run(&words).assert_code(0).stdout();
    assert!(printed.contains("  output: \"a: 'b' \\\"c\\\" \u{e9}\"\n"), "{printed}");
    folder.write("again.yaml", &printed);
    assert_eq!(folder.run(&["train", "again.yaml", "--print-config"]).assert_code(0).stdout(), printed);
    for words in [
        &["train", "--schema", "run.yaml"][..],
        &["train", "--schema", "--set", "optimizer.lr=1"],
        &["train", "--schema", "-o", "x"],
        &["train", "run.yaml", "--print-config", "--resume", "never"],
        &["train", "run.yaml", "--print-config", "--json"],
        &["bench", "--calibrate", "x.toml", "--precision", "bf16"],
        &["bench", "--calibrate", "x.toml", "--memory-budget", "1GB"],
    ] {
        let said = folder.run(words).assert_code(1).stderr();
        assert!(said.contains("cannot be used with"), "{words:?}: {said}");
    }
    let words = ["train", "run.yaml", "--print-config", "--set", "optimizer.lr=1e-4\nother: 2"];
    let said = folder.run(&words).assert_code(1).stderr();
    assert!(said.contains("is not a YAML value"), "{said}");
}

/// With an initial loss scale of 1e9 all fp16 gradients overflow: both steps are skipped, reported and counted.
#[test]
fn steps_that_overflow_are_said_and_counted() {
    let folder = Folder::new("train_overflow");
    let text: String = (0..400).map(|i| format!("The number {i} has a square, {}.\n\n", i * i)).collect();
    folder.write("text.txt", text);
    folder.write(
        "run.yaml",
        "model: {kind: dense_lm, hidden: 16, layers: 1, heads: 2, intermediate: 32}\n\
         data: {train: [text.txt], longest: 32, workers: 1, validation_fraction: 0}\n\
         precision: {kind: fp16, initial_scale: 1e9}\n\
         batch: {tokens: 64}\n\
         run: {steps: 2, threads: 1, output: out, evaluate_every: null}\n",
    );
    let ran = folder.run(&["train", "run.yaml", "--budget", "2GB"]);
    ran.assert_code(1);
    assert!(ran.stderr().contains("error: all 2 steps of the run were skipped"), "{}", ran.stderr());
    for (step, scale) in [(1, 500_000_000u64), (2, 250_000_000)] {
        let line = format!("step {step} skipped: gradient not finite; the loss scale is now {scale}");
        assert!(ran.stderr().contains(&line), "{line}: {}", ran.stderr());
    }
    let record: serde_json::Value = serde_json::from_slice(&folder.read("out/run.json")).expect("JSON");
    assert_eq!(record["status"], "failed");
}

#[test]
fn the_examples_are_configurations() {
    let folder = Folder::new("train_examples");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    for name in ["moe-mini.yaml", "moe-base.yaml", "moe-4b.yaml", "dense-7b.yaml", "head.yaml"] {
        let path = examples.join(name).display().to_string();
        folder.run(&["train", &path, "--print-config"]).assert_code(0);
    }
}

/// `--from-config` prints a valid configuration on stdout and the translation of each key on stderr.
#[test]
fn a_file_of_another_trainer_is_translated() {
    let folder = Folder::new("train_translated");
    folder.write(
        "ds.json",
        "{\"train_micro_batch_size_per_gpu\": 2, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 3},\n\
         \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-5}}}",
    );
    let words = ["train", "--from-config", "ds.json", "--print-config", "--set", "data.train=[a.txt]"];
    let ran = folder.run(&[&words[..], &["--set", "run.steps=10"]].concat());
    let said = ran.assert_code(0).stderr();
    for line in [
        "ds.json: a configuration of deepspeed",
        "`optimizer.params.lr` 3e-5: `optimizer.lr` 3e-5",
        "`train_micro_batch_size_per_gpu` 2: `batch.micro_tokens` 2048",
        "`bf16.enabled` true: `precision.kind` bf16",
        "warning: `zero_optimization.stage` 3: not supported: training uses a single device",
        "warning: `model.from`: the file does not name the model",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let printed = ran.stdout();
    assert!(printed.contains("  lr: 3e-5\n") && printed.contains("  kind: bf16\n"), "{printed}");
    folder.write("run.yaml", &printed);
    assert_eq!(folder.run(&["train", "run.yaml", "--print-config"]).assert_code(0).stdout(), printed);
    // A file that is not recognised needs `--from-format`.
    folder.write("other.json", "{\"max_steps\": 5}");
    let words = ["train", "--from-config", "other.json", "--print-config"];
    assert!(
        folder
            .run(&words)
            .assert_code(1)
            .stderr()
            .contains("--from-format: ava, deepspeed, huggingface, torchtitan")
    );
    folder.run(&[&words[..], &["--from-format", "huggingface"]].concat()).assert_code(0);
    folder.run(&["train", "--from-config", "other.json"]).assert_code(1);
}
