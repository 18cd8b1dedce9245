//! Tests of `plimsoll plan` and `plimsoll doctor`.

use crate::harness::{Folder, example, golden};
use serde_json::Value;
use std::time::{Duration, Instant};

fn plan(folder: &Folder, words: &[&str]) -> Value {
    let ran = folder.run(&[&["plan", "--format", "json"], words].concat());
    serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON")
}

#[test]
fn every_known_model_has_a_plan_on_every_target() {
    let folder = Folder::new("plans");
    for (model, _) in plimsoll_models::KNOWN {
        for (target, threads) in [("cpu", Some("2")), ("cpu", Some("8")), ("h200", None), ("4090", None)] {
            let words = ["--model", model, "--target", target, "--tokens", "1024"];
            // The memory of a GPU target is fixed; weights that do not fit are streamed.
            let more = threads.map(|n| ["--threads", n, "--budget", "1TB"]);
            let plan = plan(&folder, &[&words[..], more.as_ref().map_or(&[], |words| words)].concat());
            let keys: Vec<&String> = plan.as_object().expect("an object").keys().collect();
            let wanted = [
                "bounds",
                "digest",
                "disk_bytes",
                "host_staging_bytes",
                "ledger",
                "lower_bound_bytes",
                "peak_bytes",
                "peak_instruction",
                "process",
                "replicas",
                "streamed_bytes_per_step",
                "target",
            ];
            assert_eq!(keys, wanted);
            let ledger = plan["ledger"].as_object().expect("an object");
            let sum: u64 = ledger.values().filter_map(Value::as_u64).sum();
            assert_eq!(Some(sum), plan["peak_bytes"].as_u64(), "{model} on {target}");
            assert_eq!(plan["bounds"]["tokens"], 1024);
            assert_eq!(plan["target"], target);
            let bound = plan["lower_bound_bytes"].as_f64();
            let peak = plan["peak_bytes"].as_f64();
            assert!(peak.zip(bound).is_some_and(|(p, b)| p >= b && p < 1.02 * b), "{model} on {target}");
        }
    }
}

#[test]
fn the_largest_model_is_planned_at_once() {
    let folder = Folder::new("largest");
    let start = Instant::now();
    plan(&folder, &["--model", "facebook/esm2_t48_15B_UR50D", "--target", "h200"]);
    let most = if cfg!(debug_assertions) { 5 } else { 1 };
    assert!(start.elapsed() < Duration::from_secs(most), "{:?}", start.elapsed());
}

#[test]
fn a_configuration_is_enough() {
    let folder = Folder::new("configuration");
    folder.write("here/config.json", std::fs::read(golden("esm2/config.json")).expect("golden"));
    for model in ["here", "here/config.json"] {
        let plan = plan(&folder, &["--model", model, "--tokens", "256"]);
        assert_eq!(plan["bounds"]["longest"], 256);
    }
}

#[test]
fn a_plan_as_text() {
    let folder = Folder::new("text");
    let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "h200"];
    folder.run(&words).assert_code(0).matches("plan_3b_h200");
    let words =
        ["plan", "--model", &golden("esm2"), "--tokens", "64", "--dump-after", "layout", "--target", "null"];
    folder.run(&words).assert_code(0).matches("plan_dump");
}

#[test]
fn the_budget_changes_the_plan() {
    let folder = Folder::new("budget_changes");
    let model = ["--model", "esm2_t12_35M_UR50D", "--precision", "f32", "--threads", "2"];
    let tokens = |words: &[&str]| plan(&folder, &[&model[..], words].concat())["bounds"]["tokens"].as_u64();
    assert!(tokens(&["--budget", "250MB"]) < tokens(&["--budget", "1GB"]));
    folder.run(&["plan", model[0], model[1], "--budget", "10MB"]).assert_code(4);
}

/// With three threads or more, the CPU's program runs in one replica per thread. `--threads` is refused for a
/// GPU target.
#[test]
fn threads_are_lanes() {
    let folder = Folder::new("plan_threads");
    let model = ["--model", "esm2_t6_8M_UR50D", "--budget", "4GB"];
    for (threads, replicas) in [("1", 1), ("2", 1), ("3", 3), ("4", 4), ("8", 8)] {
        let plan = plan(&folder, &[&model[..], &["--threads", threads]].concat());
        assert_eq!(plan["replicas"], replicas, "{threads}");
        let more = format!("{} replicas beside the first", replicas - 1);
        assert_eq!(plan["ledger"][more].is_u64(), replicas > 1, "{plan}");
    }
    let text = folder.run(&[&["plan"], &model[..], &["--threads", "8"]].concat()).assert_code(0).stdout();
    assert!(text.contains("8 replicas of 1 thread, "), "{text}");
    let said = folder
        .run(&[&["plan"], &model[..], &["--threads", "4", "--target", "h200"]].concat())
        .assert_code(1)
        .stderr();
    assert!(said.contains("`h200` is not a CPU"), "{said}");
}

#[test]
fn a_percentage_is_of_the_target() {
    let folder = Folder::new("percentage");
    let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "4090", "--budget", "1%"];
    let ran = folder.run(&words);
    assert!(ran.assert_code(4).stderr().contains("the budget is 257 572 208 B"), "{}", ran.stderr());
}

#[test]
fn a_file_without_a_configuration_is_no_model() {
    let folder = Folder::new("no_configuration");
    folder.write("p.faa", ">a\nMKV\n");
    let ran = folder.run(&["plan", "--model", "p.faa"]);
    assert!(
        ran.assert_code(1).stderr().contains("must contain config.json and the weights"),
        "{}",
        ran.stderr()
    );
    let words = ["plan", "--model", "esm2_t6_8M_UR50D", "--dump-after", "fuse", "--format", "json"];
    folder.run(&words).assert_code(1);
}

#[test]
fn the_doctor_looks() {
    let folder = Folder::new("doctor");
    let text = folder.run(&["doctor"]).assert_code(0).stdout();
    assert!(text.contains("no models"), "{text}");
    assert!(text.contains(&folder.path("hf/hub").display().to_string()), "{text}");
    // The sections are in this order; kernels are listed only with --kernels.
    let parts = ["\nprocessor\n", "\nmemory\n", "\ngpu\n", "\nmodels\n", "\ndisk\n"];
    let places: Vec<Option<usize>> = parts.iter().map(|part| text.find(part)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{text}");
    assert!(text.contains("(--precision auto), also ") && text.contains(" free in "), "{text}");
    assert!(!text.contains("gemm_f32"), "{text}");
    let text = folder.run(&["doctor", "--kernels"]).assert_code(0).stdout();
    assert!(text.contains("\nkernels, compiled for ") && text.contains("gemm_f32"), "{text}");
    let json: Value =
        serde_json::from_str(&folder.run(&["doctor", "--json"]).assert_code(0).stdout()).expect("JSON");
    assert_eq!(json["plimsoll"], env!("CARGO_PKG_VERSION"));
    assert!(json["disk"][0]["free_bytes"].as_u64().is_some_and(|free| free > 0), "{json}");
    assert!(json.get("kernels").is_none(), "{json}");
    for (name, file) in [("whole", Some("model.safetensors")), ("planned", None)] {
        let model = format!("hf/hub/models--org--{name}");
        folder.write(&format!("{model}/refs/main"), "0123abcd");
        for file in ["config.json"].into_iter().chain(file) {
            let bytes = std::fs::read(golden("esm2") + "/" + file).expect("golden");
            folder.write(&format!("{model}/snapshots/0123abcd/{file}"), bytes);
        }
    }
    folder.write("hf/hub/models--org--partial/blobs/x.incomplete", "");
    let json: Value =
        serde_json::from_str(&folder.run(&["doctor", "--json"]).assert_code(0).stdout()).expect("JSON");
    let wanted = serde_json::json!({
        "org/whole": "ESM-2",
        "org/planned": "ESM-2, without weights",
        "org/partial": "incomplete, no snapshot of `main`",
    });
    assert_eq!(json["hub_cache"]["models"], wanted);
    assert_eq!(json["torch_hub_cache"]["checkpoints"], serde_json::json!([]));
    folder.write("torch/hub/checkpoints/esm2_t6_8M_UR50D.pt", "12345");
    let text = folder.run(&["doctor"]).assert_code(0).stdout();
    assert!(text.contains("facebook/esm2_t6_8M_UR50D: ESM-2, 5 B"), "{text}");
    folder.write("p.faa", ">a\nMKV\n");
    folder.run(&["embed", "--model", "org/whole", "p.faa", "-o", "e.npy"]).assert_code(0);
    folder.run(&["embed", "--model", "org/planned", "p.faa", "-o", "f.npy"]).assert_code(1);
}

/// A training configuration of a language model. Planning it reads no other file.
const TRAINED: &str = "\
model: {kind: dense_lm, hidden: 64, layers: 4, heads: 4, intermediate: 160, vocabulary: 512}
data: {train: [nowhere.txt], tokenizer: bytes, longest: 64}
optimizer: {kind: auto, lr: 1e-3}
batch: {tokens: 2048}
run: {steps: 10, threads: 2}
";

/// Writes the training configuration, and machine.toml: the target `cpu` under another name, for which the memory of this build of
/// the program is not counted, so that plans are the same everywhere.
fn training(folder: &Folder) {
    let target =
        include_str!("../../../plan/src/targets/cpu.toml").replace("name = \"cpu\"", "name = \"machine\"");
    let reserved = "\n[[reserved]]\nlabel = \"process\"\nbytes = 33554432\n";
    folder.write("machine.toml", target + reserved);
    folder.write("run.yaml", TRAINED);
}

fn trained(folder: &Folder, words: &[&str]) -> Value {
    training(folder);
    plan(folder, &[&["--train", "run.yaml", "--target", "machine.toml"], words].concat())
}

#[test]
fn training_as_text() {
    let folder = Folder::new("plan_train");
    training(&folder);
    let words = ["plan", "--train", "run.yaml", "--target", "machine.toml"];
    folder.run(&[&words[..], &["--budget", "45MB"]].concat()).assert_code(0).matches("plan_train");
    let set =
        ["--set", "optimizer.kind=adamw", "--set", "batch.micro_tokens=2048", "--set", "memory.remat=none"];
    let refused = [&words[..], &["--budget", "70MB"], &set].concat();
    folder.run(&refused).assert_code(4).matches("plan_train_refused");
}

/// Training is planned for a GPU on a machine without one.
#[test]
fn training_is_planned_for_a_card() {
    let folder = Folder::new("plan_train_card");
    folder.write("run.yaml", TRAINED);
    for target in ["4090", "h200", "a100-80"] {
        let ran = folder.run(&["plan", "--train", "run.yaml", "--target", target]);
        let text = ran.assert_code(0).stdout();
        assert!(text.contains(&format!(" on {target} (")) && text.contains("reserved: CUDA context"), "{text}");
    }
}

/// TF32 is planned for GPUs; a CPU refuses to plan it and to train in it, and names it.
#[test]
fn training_in_tf32_is_planned_for_a_card_and_refused_on_a_cpu() {
    let folder = Folder::new("plan_train_tf32");
    folder.write("run.yaml", TRAINED);
    folder.write("nowhere.txt", "A text to train on.");
    let tf32 = ["--set", "precision.kind=tf32"];
    let whole = ["--set", "data.validation_fraction=0", "--set", "run.evaluate_every=null"];
    let plan = |target| {
        folder.run(&[&["plan", "--train", "run.yaml", "--target", target], &tf32[..], &whole].concat())
    };
    let text = plan("h200").assert_code(0).stdout();
    assert!(text.contains("precision tf32"), "{text}");
    let whole = ["--set", "run.device=cpu", "--set", "data.validation_fraction=0"];
    let train = [&["train", "run.yaml", "--output", "out"], &whole[..]].concat();
    for ran in [plan("cpu"), folder.run(&[&train[..], &tf32[..]].concat())] {
        let text = ran.assert_code(1).stderr();
        assert!(text.contains("tf32 needs TF32 matmuls, which `") && text.contains("an NVIDIA GPU"), "{text}");
    }
    assert!(!folder.path("out").join("metrics.jsonl").exists());
}

#[test]
fn a_budget_above_the_targets_memory_is_refused() {
    let folder = Folder::new("plan_budget_above");
    for budget in ["24GiB", "106GB"] {
        let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "4090", "--budget", budget];
        let said = folder.run(&words).assert_code(4).stderr();
        assert!(said.contains("is more than `4090` has: 25 757 220 864 B"), "{said}");
    }
    let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "4090", "--budget", "22GiB"];
    folder.run(&words).assert_code(0);
    // The refusal suggests no budget above the target's memory.
    let words =
        ["plan", "--model", "facebook/esm2_t48_15B_UR50D", "--target", "4090", "--stream-weights", "never"];
    let said = folder.run(&words).assert_code(4).stderr();
    assert!(!said.contains("or more"), "{said}");
}

/// With each suggested remedy the training fits in the budget, and the stated cost equals the change of the
/// planned speed.
#[test]
fn remedies_of_training_are_true() {
    let folder = Folder::new("plan_train_remedies");
    training(&folder);
    let asked = ["optimizer.kind=adamw", "batch.micro_tokens=2048", "memory.remat=none"];
    let set = |keys: &[&str]| -> Vec<String> {
        keys.iter().flat_map(|key| ["--set".to_owned(), (*key).to_owned()]).collect()
    };
    let rate = |keys: &[&str], budget: &str| {
        let flags = [set(&asked), set(keys), vec!["--budget".to_owned(), budget.to_owned()]].concat();
        let words: Vec<&str> = flags.iter().map(String::as_str).collect();
        trained(&folder, &words)["tokens_per_second"].as_f64().expect("a number")
    };
    // All choices are fixed, so with a larger budget the planner returns the plan that was refused.
    let refused = rate(&[], "1GB");
    for (budget, least) in [("76MB", 5), ("71MB", 3), ("50MB", 1)] {
        let flags = set(&asked);
        let words = ["plan", "--train", "run.yaml", "--target", "machine.toml", "--budget", budget];
        let words: Vec<&str> = words.into_iter().chain(flags.iter().map(String::as_str)).collect();
        let said = folder.run(&words).assert_code(4).stderr();
        let (_, list) = said.trim_end().split_once("what fits, cheapest first:  ").expect("remedies");
        let mut costs = vec![];
        for remedy in list.split("   |   ") {
            let (flags, effect) = remedy.split_once("  saves ").expect("what it saves");
            let keys: Vec<&str> = flags.split_whitespace().filter(|word| *word != "--set").collect();
            let slower = 100.0 * (refused / rate(&keys, budget) - 1.0);
            assert!(effect.ends_with(&format!(", {slower:+.1} % time")), "{slower} {remedy}");
            costs.push(slower);
        }
        assert!(costs.is_sorted() && costs.len() >= least && costs.iter().any(|c| *c > 1.0), "{budget} {list}");
    }
}

#[test]
fn training_as_json() {
    let folder = Folder::new("plan_train_json");
    let plan = trained(&folder, &["--budget", "45MB"]);
    let ledger = plan["ledger"].as_object().expect("an object");
    let sum: u64 = ledger.values().filter_map(Value::as_u64).sum();
    assert_eq!(Some(sum), plan["peak_bytes"].as_u64());
    assert!(sum <= 45_000_000, "{sum}");
    assert!(plan["rejected"].as_array().is_some_and(|r| !r.is_empty()));
    let chosen = &plan["chosen"];
    let tokens = chosen["micro_tokens"].as_u64().zip(chosen["accumulation"].as_u64());
    assert_eq!(tokens.map(|(n, k)| n * k), Some(2048));
}

#[test]
fn more_budget_never_trains_slower() {
    let folder = Folder::new("plan_train_budgets");
    // With a fixed optimizer, because `auto` prefers AdamW to a faster optimizer with smaller states.
    let adamw = ["--set", "optimizer.kind=adamw", "--budget"];
    let rate =
        |budget: &&str| trained(&folder, &[&adamw[..], &[budget]].concat())["tokens_per_second"].as_f64();
    let rates: Vec<_> = ["40MB", "42MB", "45MB", "50MB", "60MB", "1GB"].iter().map(rate).collect();
    assert!(rates.is_sorted() && rates[0] < rates[5], "{rates:?}");
}

#[test]
fn the_largest_that_trains() {
    let folder = Folder::new("plan_train_largest");
    training(&folder);
    let words =
        ["plan", "--train", "run.yaml", "--target", "machine.toml", "--largest", "layers", "--budget", "1MB"];
    let said = folder.run(&words).assert_code(4).stderr();
    let (_, least) = said.split_once("this step needs ").expect("a bill");
    let least: String = least.split(" B on").next().expect("bytes").split(' ').collect();
    let whole = least.parse::<u64>().expect("a number") + 12_000_000;
    for (size, key) in
        [("tokens", "batch.micro_tokens"), ("layers", "model.layers"), ("hidden", "model.hidden")]
    {
        // Fixed recomputation, so that each candidate is planned only once.
        let remat = ["--set", "memory.remat=none"];
        let plan =
            trained(&folder, &[&["--budget", &whole.to_string(), "--largest", size], &remat[..]].concat());
        let process: u64 = plan["process"].as_object().expect("lines").values().filter_map(Value::as_u64).sum();
        assert!(plan["peak_bytes"].as_u64().is_some_and(|peak| peak + process <= whole), "{size}");
        let left = (whole - process).to_string();
        let budget = [&["--budget", &left], &remat[..]].concat();
        let value = &plan["largest"]["value"];
        let next = plan["largest"]["refused"].as_u64().expect("a number");
        match size {
            "tokens" => assert_eq!(&plan["chosen"]["micro_tokens"], value),
            _ => assert!(value.as_u64() < Some(next)),
        }
        let set = format!("{key}={next}");
        let tokens = format!("batch.tokens={}", next * 2048u64.div_ceil(next));
        let inner = format!("model.intermediate={}", next * 5 / 2);
        let also = match size {
            "tokens" => vec!["--set", &tokens],
            "hidden" => vec!["--set", &inner],
            _ => vec![],
        };
        let words = ["plan", "--train", "run.yaml", "--target", "machine.toml", "--set", &set];
        let refused = folder.run(&[&words[..], &budget, &also].concat());
        assert!(
            refused.assert_code(4).stderr().contains("refused: this step needs"),
            "{size}: {}",
            refused.stderr()
        );
    }
}

/// On the CPU of this machine a plan counts the process and the data as the run does: with a budget just below what the plan needs
/// both are refused, and with more both go.
#[test]
fn a_planned_training_is_the_one_that_runs() {
    let folder = Folder::new("plan_train_run");
    folder.write("run.yaml", TRAINED);
    let texts: String = (0..400).map(|i| format!("Text {i} to train on.\n\n")).collect();
    folder.write("nowhere.txt", texts);
    let words = ["--train", "run.yaml", "--target", "cpu", "--set", "optimizer.kind=adamw"];
    let fixed = ["--set", "batch.micro_tokens=512", "--set", "memory.remat=none", "--set", "run.steps=1"];
    let all = plan(&folder, &[&words[..], &fixed, &["--budget", "2GB"]].concat());
    let bytes =
        |lines: &Value| lines.as_object().expect("lines").values().filter_map(Value::as_u64).sum::<u64>();
    let data: u64 = bytes(&all["process"]);
    assert!(all["process"]["data: parcels"].as_u64().is_some_and(|n| n > 0), "{}", all["process"]);
    let whole = all["peak_bytes"].as_u64().expect("bytes") + data;
    // The heap of two processes differs by a step of 4 MiB at most.
    for (budget, code) in [(whole - (9 << 20), 4), (whole + (9 << 20), 0)] {
        let budget = budget.to_string();
        folder.run(&[&["plan"], &words[..], &fixed, &["--budget", &budget]].concat()).assert_code(code);
        let train =
            ["train", "run.yaml", "--set", "optimizer.kind=adamw", "--set", "run.device=cpu", "-o", "out"];
        folder.run(&[&train[..], &fixed, &["--budget", &budget]].concat()).assert_code(code);
    }
}

/// A file of another trainer is planned and trained as it is, once it has all that a run needs.
#[test]
fn configurations_of_other_trainers_are_planned_and_trained() {
    let folder = Folder::new("plan_from_config");
    let text =
        r#"{"output_dir": "out", "max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 2}"#;
    folder.write("theirs.json", text);
    folder.write("text.txt", "A text to train on.\n\n".repeat(40));
    let sizes =
        ["model.kind=dense_lm", "model.hidden=32", "model.layers=1", "model.heads=2", "model.intermediate=64"];
    let sizes =
        sizes.into_iter().chain(["data.longest=32", "data.train=[text.txt]", "data.validation_fraction=0"]);
    let set: Vec<&str> = sizes.flat_map(|set| ["--set", set]).collect();
    for command in ["plan", "train"] {
        let flag = if command == "plan" { "--train" } else { "" };
        let own: Vec<&str> =
            [command, flag, "theirs.json"].into_iter().filter(|word| !word.is_empty()).collect();
        let said = folder.run(&own).assert_code(1).stderr();
        assert!(
            said.contains("this is a configuration of Hugging Face Trainer; give it as --from-config"),
            "{said}"
        );
        let said = folder.run(&[command, "--from-config", "theirs.json"]).assert_code(1).stderr();
        assert!(said.contains("does not have all that a run needs") && said.contains("data.train"), "{said}");
        let ran = folder.run(&[&[command, "--from-config", "theirs.json"], &set[..]].concat());
        let said = ran.assert_code(0).stderr();
        assert!(said.contains("`schedule.min_ratio` 0"), "{said}");
    }
    assert!(folder.path("out/checkpoints/step-00000002").is_dir());
}

#[test]
fn flags_of_the_other_plan() {
    let folder = Folder::new("plan_train_flags");
    folder.write("run.yaml", TRAINED);
    for words in [
        &["--train", "run.yaml", "--model", "esm2_t6_8M_UR50D"][..],
        &["--train", "run.yaml", "--tokens", "64"],
        &["--train", "run.yaml", "--threads", "4"],
        &["--train", "run.yaml", "--stream-weights", "never"],
        &["--train", "run.yaml", "--dump-after", "fuse"],
        &["--model", "esm2_t6_8M_UR50D", "--largest", "layers"],
        &["--model", "esm2_t6_8M_UR50D", "--set", "run.steps=1"],
        &[],
    ] {
        folder.run(&[&["plan"], words].concat()).assert_code(1);
    }
}

/// Arguments for the golden models that `predict` and `plan --predict` share.
fn prediction(words: &[&str]) -> Vec<String> {
    let base = ["--weights", &golden(""), "--length", "300", "--threads", "2", "--precision", "f32"];
    base.iter().chain(words).map(|word| (*word).to_owned()).collect()
}

/// `plan --predict` and `predict` with equal budgets have identical plans and identical process lines. Only the
/// line of the heap may differ, because it is measured in the running process.
#[test]
fn a_planned_prediction_is_the_one_that_runs() {
    let folder = Folder::new("plan_predict");
    let reads = golden("pipeline/reads.fa");
    let caller = ["--caller", &golden("caller"), "--threads", "2", "--precision", "f32"].map(str::to_owned);
    let virnucpro = prediction(&[]);
    for (models, budget) in [
        (&caller[..], "2GB"),
        (&caller, "120MB"),
        (&virnucpro, "2GB"),
        (&virnucpro, "250MB"),
        (&virnucpro, "120MB"),
    ] {
        for tokens in [None, Some("2048")] {
            let mut words = models.to_vec();
            words.extend(["--memory-budget", budget].map(str::to_owned));
            words.extend(tokens.iter().flat_map(|tokens| ["--tokens".to_owned(), (*tokens).to_owned()]));
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let of_run = [&["predict", &reads, "-o", "out", "--force", "-q"], &words[..]].concat();
            folder.run(&of_run).assert_code(0);
            let record: Value = serde_json::from_slice(&folder.read("out/run.json")).expect("JSON");
            let planned = plan(&folder, &[&["--predict", "--input", &reads], &words[..]].concat());
            let stages = planned["stages"].as_array().expect("stages");
            let last = stages.last().expect("a stage");
            for key in ["ledger", "peak_bytes", "bounds", "replicas", "digest", "host_staging_bytes"] {
                assert_eq!(last[key], record["plan"][key], "{budget}: {key}");
            }
            let labels = |process: &Value| -> Vec<String> {
                process.as_object().expect("an object").keys().cloned().collect()
            };
            let ours = &planned["process"];
            let theirs = &record["process"];
            assert_eq!(labels(ours), labels(theirs), "{budget}");
            for label in labels(ours).iter().filter(|label| *label != "heap") {
                assert_eq!(ours[label], theirs[label], "{budget}: {label}");
            }
            let heaps = [ours, theirs].map(|process| process["heap"].as_u64().expect("bytes"));
            assert!(heaps[0].abs_diff(heaps[1]) <= 16 << 20, "{heaps:?}");
        }
    }
}

/// A budget that `predict` refuses is refused by `plan --predict` too; both bills have the process lines.
#[test]
fn a_prediction_that_does_not_fit_has_a_refused_plan() {
    let folder = Folder::new("plan_predict_refused");
    let reads = golden("pipeline/reads.fa");
    let words = prediction(&["--memory-budget", "20MB"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ran =
        folder.run(&[&["predict", &reads, "-o", "out", "-q"], &words[..]].concat()).assert_code(4).stderr();
    let planned =
        folder.run(&[&["plan", "--predict", "--input", &reads], &words[..]].concat()).assert_code(4).stderr();
    for said in [ran, planned] {
        assert!(
            said.contains("the budget is 20 000 000 B") && said.contains("process: code and tables "),
            "{said}"
        );
    }
}

#[test]
fn a_prediction_is_planned_for_cards_that_are_not_here() {
    let folder = Folder::new("plan_predict_cards");
    let speed = |words: &[&str]| {
        let planned = plan(&folder, &[&["--predict"], words].concat());
        let peak = planned["stages"].as_array().expect("stages").iter().map(|stage| &stage["peak_bytes"]);
        let peak = peak.filter_map(Value::as_u64).max();
        assert_eq!(planned["process"], serde_json::json!({}), "{planned}");
        assert_eq!(planned["peak_bytes"].as_u64(), peak);
        assert!(peak <= planned["budget_bytes"].as_u64(), "{planned}");
        (planned["reads"]["per_second"].as_f64().expect("a speed"), planned["stages"].as_array().map(Vec::len))
    };
    let (h200, stages) = speed(&["--target", "h200"]);
    assert_eq!(stages, Some(1));
    let (small, _) = speed(&["--target", "4090"]);
    assert!(h200 > small && small > 0.0, "{h200} {small}");
    // Longer reads have more windows and tokens, so fewer are processed per second. Half the number of open reading
    // frames doubles the speed.
    let (long, _) = speed(&["--target", "h200", "--read-length", "1000"]);
    assert!(long < h200 / 3.0, "{long} {h200}");
    let (half, _) = speed(&["--target", "h200", "--orfs", "0.5"]);
    assert!((half / h200 - 2.0).abs() < 1e-6, "{half} {h200}");
    // In 6.5 GB each encoder fits alone, but not both together, so the prediction runs in two stages.
    let (_, stages) = speed(&["--target", "4090", "--budget", "6.5GB"]);
    assert_eq!(stages, Some(2));
    folder.run(&["plan", "--predict", "--target", "4090", "--budget", "100MB"]).assert_code(4);
    let text = folder.run(&["plan", "--predict", "--target", "h200"]).assert_code(0).stdout();
    assert!(text.contains("stage 1 of 1: both encoders and the head"), "{text}");
    assert!(
        text.contains(" reads/s of 150 bases, at 1 window a read and 1 open reading frame a window"),
        "{text}"
    );
    let said = folder.run(&["plan", "--predict", "--target", "cuda"]).assert_code(1).stderr();
    assert!(said.contains("give --budget"), "{said}");
    let said = folder.run(&["plan", "--predict", "--target", "null"]).assert_code(1).stderr();
    assert!(said.contains("--target cpu"), "{said}");
    for flag in [["--read-length", "100"], ["--orfs", "2"], ["--length", "300"], ["--input", "reads.fa"]] {
        folder.run(&[&["plan", "--model", "esm2_t6_8M_UR50D"], &flag[..]].concat()).assert_code(1);
    }
}

/// A plan for the CPU lists the memory of the process itself, which is part of the budget; a plan for a GPU
/// does not.
#[test]
fn a_plan_has_the_lines_of_the_process() {
    let folder = Folder::new("plan_process");
    let model = ["--model", &golden("esm2"), "--threads", "2", "--budget", "1GB"];
    let here = plan(&folder, &[&model[..], &["--target", "cpu"]].concat());
    for label in ["code and tables", "heap", "thread stacks"] {
        assert!(here["process"][label].as_u64().is_some_and(|bytes| bytes > 0), "{label}: {here}");
    }
    let text = folder.run(&[&["plan"], &model[..]].concat()).assert_code(0).stdout();
    let (_, process) = text.split_once("of the budget the process takes").expect("the lines of the process");
    assert!(process.contains("\n  code and tables ") && process.contains("\n  thread stacks "), "{text}");
    // The budget covers the process and the plan: with 8 MiB more than the process lines, the plan has at most
    // 8 MiB.
    let sum: u64 =
        here["process"].as_object().expect("lines").values().map(|b| b.as_u64().expect("bytes")).sum();
    let tight = (sum + (8 << 20)).to_string();
    let model = ["--model", &golden("esm2"), "--threads", "2", "--budget", &tight];
    let here = plan(&folder, &[&model[..], &["--target", "cpu"]].concat());
    let peak = here["peak_bytes"].as_u64().expect("bytes");
    assert!(peak <= 8 << 20, "{here}");
    let none = ["--model", &golden("esm2"), "--threads", "2", "--budget", "20MB"];
    let said = folder.run(&[&["plan"], &none[..]].concat()).assert_code(4).stderr();
    assert!(said.contains("process: code and tables"), "{said}");
    let proteins = golden("esm2/proteins.faa");
    let words = ["embed", "--model", &golden("esm2"), &proteins, "-o", "e.npy", "--threads", "2", "--json"];
    let report: Value = serde_json::from_str(&folder.run(&words).assert_code(0).stdout()).expect("JSON");
    assert_eq!(report["process"]["thread stacks"], here["process"]["thread stacks"], "{report}");
    let card = plan(&folder, &["--model", &golden("esm2"), "--target", "h200"]);
    assert_eq!(card["process"], serde_json::json!({}));
}

/// The most bytes of a trace's counters.
fn most_bytes(trace: &[u8]) -> u64 {
    let trace: Value = serde_json::from_slice(trace).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let sum = |event: &Value| -> u64 {
        event["args"].as_object().expect("series").values().filter_map(Value::as_u64).sum()
    };
    events.iter().filter(|event| event["ph"] == "C").map(sum).max().expect("counters")
}

/// Files of timelines have the peak that the plan prints, for models, predictions and training.
#[test]
fn timelines_have_the_bytes_of_the_plan() {
    let folder = Folder::new("plan_timelines");
    let mini = example("moe-mini.yaml");
    for (name, words) in [
        ("model", vec!["--model", "facebook/esm2_t6_8M_UR50D", "--target", "h200", "--tokens", "4096"]),
        ("predict", vec!["--predict", "--target", "4090"]),
        ("train", vec!["--train", &mini, "--target", "4090"]),
    ] {
        let [page, pickle, trace] = ["html", "pickle", "json"].map(|ending| format!("{name}.{ending}"));
        let files = ["--html", &page, "--memory-viz", &pickle, "--trace", &trace];
        let bare = plan(&folder, &words);
        let with = plan(&folder, &[&words[..], &files].concat());
        assert_eq!(bare, with, "{name}: the files change no plan");
        let peak = with["peak_bytes"].as_u64().expect("a peak");
        assert_eq!(most_bytes(&folder.read(&trace)), peak, "{name}");
        let bytes = folder.read(&pickle);
        assert!(bytes.starts_with(b"\x80\x02") && bytes.ends_with(b"."), "{name}");
        let page = String::from_utf8(folder.read(&page)).expect("text");
        assert_eq!(page.matches("<figure class=\"timeline\"").count(), 1, "{name}");
        assert!(page.contains(&format!("\"peak\":{peak},")), "{name}");
    }
}

#[test]
fn a_second_plan_is_compared_on_the_page() {
    let folder = Folder::new("plan_compared");
    let mini = example("moe-mini.yaml");
    let base = example("moe-base.yaml");
    let small = ["--model", "facebook/esm2_t6_8M_UR50D", "--tokens", "4096"];
    let second = "facebook/esm2_t12_35M_UR50D";
    for (words, second) in [(&["--train", &mini][..], base.as_str()), (&small, second)] {
        let words = [words, &["--target", "h200"]].concat();
        let first =
            plan(&folder, &[&words[..], &["--html", "page.html", "--force", "--compare", second]].concat());
        let mut other: Vec<&str> = words.clone();
        other[1] = second;
        let other = plan(&folder, &other);
        let page = String::from_utf8(folder.read("page.html")).expect("text");
        assert_eq!(page.matches("<figure class=\"timeline\"").count(), 2);
        for plan in [first, other] {
            assert!(page.contains(&format!("\"peak\":{},", plan["peak_bytes"])), "{}", plan["peak_bytes"]);
        }
    }
}

#[test]
fn flags_of_timelines_that_have_no_meaning_are_refused() {
    let folder = Folder::new("plan_timelines_refused");
    let mini = example("moe-mini.yaml");
    let model = ["plan", "--model", "facebook/esm2_t6_8M_UR50D", "--tokens", "64"];
    let train = ["plan", "--train", &mini];
    for (words, flags, part) in [
        (&model[..], &["--compare", "facebook/esm2_t6_8M_UR50D"][..], "--html"),
        (&["plan", "--predict"], &["--html", "x.html", "--compare", "y"], "--predict"),
        (&train, &["--largest", "tokens", "--html", "x.html"], "--largest"),
        (&model, &["--dump-after", "fuse", "--trace", "x.json"], "--dump-after"),
        (&model, &["--trace", "nowhere/x.json"], "nowhere"),
        (&model, &["--html", "x.html", "--compare", "nowhere/config.json"], "nowhere"),
    ] {
        let ran = folder.run(&[words, flags].concat());
        assert!(ran.assert_code(1).stderr().contains(part), "{flags:?}: {}", ran.stderr());
    }
    assert!(!folder.path("x.html").exists() && !folder.path("x.json").exists());
}

/// Numbers beyond what a machine can hold, and beyond 64 bits when they are multiplied: (words, exit code, what is said).
#[test]
fn sizes_that_no_machine_holds_are_refused_and_searches_end() {
    let folder = Folder::new("plan_sizes");
    let [head, moe] = ["head.yaml", "moe-mini.yaml"].map(example);
    let esm = "facebook/esm2_t6_8M_UR50D";
    for (words, code, wanted) in [
        (
            format!("--train {head} --set batch.tokens=4611686018427387904 --budget 2GB"),
            1,
            "`batch.tokens` is 4611686018427387904; it must be a whole number from 1 to 1099511627776",
        ),
        (format!("--train {head} --set model.layers=2"), 1, "model.layers 2 has no effect"),
        (
            format!("--train {moe} --set batch.tokens=1000000000000000000"),
            1,
            "`batch.tokens` is 1000000000000000000",
        ),
        (
            format!("--train {moe} --set model.hidden=4611686018427387904"),
            1,
            "`model.hidden` is 4611686018427387904",
        ),
        (format!("--train {moe} --set model.experts.count=100000 --budget 1GB"), 1, "from 1 to 1024"),
        (format!("--train {moe} --set model.experts.count=1024 --budget 1GB"), 4, "this step needs"),
        (
            format!("--model {esm} --tokens 4611686018427387904"),
            1,
            "give a number of tokens from 1 to 2147483647",
        ),
        (
            format!("--model {esm} --largest tokens --budget 10000000TB"),
            0,
            "the largest that fits: a step of 2147483520 tokens; no step can have more",
        ),
        (
            format!(
                "--train {moe} --largest tokens --budget 10000000TB --set memory.remat=none --set memory.loss_chunk=64"
            ),
            0,
            "the largest that fits: a micro-batch of",
        ),
        (format!("--model {esm} --target 4090 --budget 30GB"), 4, "is more than `4090` has"),
    ] {
        let words: Vec<&str> = ["plan"].into_iter().chain(words.split_whitespace()).collect();
        let ran = folder.run(&words);
        ran.assert_code(code);
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        assert!(said.contains(wanted), "{words:?}: {said}");
    }
}
