//! Tests of `plimsoll plan --explain` and `--confirm`: every difference is that of two plans, and an answer is run.

use crate::harness::{Folder, example, golden};
use serde_json::Value;

const TRAINED: &str = "\
model: {kind: dense_lm, hidden: 64, layers: 4, heads: 4, intermediate: 160, vocabulary: 512}
data: {train: [corpus.txt], tokenizer: bytes, longest: 64}
optimizer: {kind: adamw8bit, lr: 1e-3}
precision: {kind: bf16}
batch: {tokens: 2048, micro_tokens: 512}
memory: {remat: full, loss_chunk: 64}
run: {steps: 10, threads: 2}
";

fn json(folder: &Folder, words: &[&str]) -> Value {
    let ran = folder.run(&[&["plan", "--json"], words].concat());
    serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn what_an_optimisation_of_training_saves_is_the_difference_to_the_plan_without_it() {
    let folder = Folder::new("explain_train");
    folder.write("run.yaml", TRAINED);
    let base = ["--train", "run.yaml", "--target", "cpu", "--budget", "4GB"];
    let plan = json(&folder, &[&base[..], &["--explain"]].concat());
    let peak = number(&plan["peak_bytes"]);
    let rate = number(&plan["tokens_per_second"]);
    let effects = plan["explain"].as_array().expect("a list");
    let mut found = 0;
    for effect in effects {
        let [with, without] = ["with", "without"].map(|side| number(&effect[side]["peak_bytes"]));
        assert_eq!(with, peak, "{effect}");
        assert_eq!(number(&effect["saved_bytes"]), without - with, "{effect}");
        let Some(key) = effect["instead"].as_str().and_then(|text| text.strip_prefix("--set ")) else {
            continue;
        };
        found += 1;
        let other = json(&folder, &[&base[..], &["--set", key]].concat());
        assert_eq!(number(&other["peak_bytes"]), without, "{key}");
        let slower = number(&other["tokens_per_second"]) / rate - 1.0;
        // The search estimates times before ops are fused, so the estimates are not equal.
        assert!((number(&effect["slower"]) - slower).abs() < 0.1, "{key}: {slower} {effect}");
    }
    assert!(found >= 4, "recomputation, logits, micro-batches, moments, precision: {effects:?}");
    let name = |part: &str| {
        let named = effects.iter().find(|e| e["optimisation"].as_str().is_some_and(|name| name.contains(part)));
        number(&named.unwrap_or_else(|| panic!("{part}: {effects:?}"))["saved_bytes"])
    };
    for part in ["recomputation", "micro-batches", "8-bit moments", "lifetimes"] {
        assert!(name(part) > 0.0, "{part}");
    }
    let text = folder.run(&[&["plan"], &base[..], &["--explain"]].concat()).assert_code(0).stdout();
    assert!(text.contains("optimisations in effect, each planned with and without it:"), "{text}");
    assert!(text.contains("--set memory.remat=none"), "{text}");
}

#[test]
fn what_an_optimisation_of_a_step_saves_is_the_difference_to_the_plan_without_it() {
    let folder = Folder::new("explain_model");
    let base = ["--model", "facebook/esm2_t12_35M_UR50D", "--target", "h200", "--tokens", "4096"];
    let plan = json(&folder, &[&base[..], &["--explain"]].concat());
    let effects = plan["explain"].as_array().expect("a list");
    let of = |part: &str| {
        let named = effects.iter().find(|e| e["optimisation"].as_str().is_some_and(|name| name.contains(part)));
        named.unwrap_or_else(|| panic!("{part}: {effects:?}"))
    };
    let wide = json(&folder, &[&base[..], &["--precision", "f32"]].concat());
    assert_eq!(of("precision bf16")["without"]["peak_bytes"], wide["peak_bytes"]);
    for effect in effects {
        assert_eq!(effect["with"]["peak_bytes"], plan["peak_bytes"], "{effect}");
    }
    assert!(number(&of("lifetimes")["saved_bytes"]) > 1e8);
    assert!(number(&of("fused ops")["slower"]) < 0.0);
    // Two steps in flight take memory.
    assert!(number(&of("in flight")["saved_bytes"]) < 0.0);
    // Replicas of a CPU share the weights, and each has its own activations.
    let words =
        ["--model", "esm2_t6_8M_UR50D", "--threads", "4", "--budget", "4GB", "--precision", "f32", "--explain"];
    let plan = json(&folder, &words);
    let replicas = plan["explain"].as_array().expect("a list");
    let replicas = replicas.iter().find(|e| e["optimisation"] == "4 replicas that share the weights");
    assert!(number(&replicas.expect("replicas")["saved_bytes"]) < 0.0);
    folder.run(&["plan", "--model", "esm2_t6_8M_UR50D", "--explain", "--dump-after", "fuse"]).assert_code(1);
}

#[test]
fn what_an_optimisation_of_a_prediction_saves_is_the_difference_to_the_plan_without_it() {
    let folder = Folder::new("explain_predict");
    let base = ["--predict", "--target", "h200", "--tokens", "4096"];
    let plan = json(&folder, &[&base[..], &["--explain"]].concat());
    let wide = json(&folder, &[&base[..], &["--precision", "f32"]].concat());
    let stage = &plan["stages"][0];
    let wide = &wide["stages"][0];
    let effects = stage["explain"].as_array().expect("a list");
    for effect in effects {
        assert_eq!(effect["with"]["peak_bytes"], stage["peak_bytes"], "{effect}");
    }
    let precision = effects.iter().find(|effect| effect["optimisation"] == "precision bf16");
    assert_eq!(precision.expect("16 bits")["without"]["peak_bytes"], wide["peak_bytes"]);
    // Under a budget for one encoder at a time, each stage has its own table.
    let words = ["plan", "--predict", "--target", "4090", "--budget", "6.2GB", "--explain"];
    let text = folder.run(&words).assert_code(0).stdout();
    let tables = text.matches("optimisations in effect, each planned with and without it:").count();
    assert_eq!(tables, text.matches("\n  steps of up to ").count(), "{text}");
}

/// The answer is the largest: a plan for its tokens fits, and a plan for the next is refused.
#[test]
fn the_largest_step_of_a_model_fits_and_the_next_is_refused() {
    let folder = Folder::new("largest_step");
    for base in [
        &["--model", "esm2_t6_8M_UR50D", "--target", "h200", "--budget", "2GB"][..],
        &["--model", "esm2_t6_8M_UR50D", "--threads", "4", "--budget", "2GB", "--precision", "f32"],
        // Fits only with streamed weights.
        &["--model", "esm2_t36_3B_UR50D", "--target", "4090", "--budget", "2GB"],
    ] {
        let plan = json(&folder, &[base, &["--largest", "tokens"]].concat());
        let [value, refused] = ["value", "refused"].map(|key| number(&plan["largest"][key]) as u64);
        assert_eq!((refused - value, number(&plan["bounds"]["tokens"]) as u64), (128, value), "{base:?}");
        let planned = |tokens: u64, code| {
            let tokens = tokens.to_string();
            folder.run(&[&["plan"], base, &["--tokens", &tokens]].concat()).assert_code(code).stderr()
        };
        planned(value, 0);
        if plan["streamed_bytes_per_step"] != 0 {
            continue;
        }
        let never = ["--stream-weights", "never", "--tokens", &refused.to_string()];
        folder.run(&[&["plan"], base, &never].concat()).assert_code(4);
    }
    let least = folder.run(&["plan", "--model", "esm2_t6_8M_UR50D", "--budget", "1MB", "--largest", "tokens"]);
    assert!(least.assert_code(4).stderr().contains("short by"));
    for (words, wanted) in [
        (&["--model", "esm2_t6_8M_UR50D", "--largest", "layers"][..], "need --train"),
        (&["--model", "esm2_t6_8M_UR50D", "--largest", "tokens", "--tokens", "8"], "cannot be used with"),
        (&["--predict", "--largest", "tokens"], "cannot be used with"),
    ] {
        let said = folder.run(&[&["plan"], words].concat()).assert_code(1).stderr();
        assert!(said.contains(wanted), "{words:?}: {said}");
    }
}

#[test]
fn the_largest_step_is_run_and_the_next_is_refused() {
    let folder = Folder::new("confirm_step");
    let model = golden("esm2");
    let base = ["--model", &model, "--threads", "2", "--largest", "tokens", "--confirm"];
    let refused = folder.run(&[&["plan", "--budget", "1MB"], &base[..]].concat()).assert_code(4).stderr();
    let (_, least) = refused.split_once("this step needs ").expect("a bill");
    let least: String = least.split(" B on").next().expect("bytes").split(' ').collect();
    let budget = least.parse::<u64>().expect("a number") + 16_000_000;
    let size = budget.to_string();
    let words = [&["--budget", &size], &base[..]].concat();
    let plan = json(&folder, &words);
    let trial = &plan["confirmed"]["trial"];
    assert_eq!((&trial["budget_bytes"], &trial["finite"]), (&budget.into(), &true.into()), "{trial}");
    assert_eq!(trial["tokens"], plan["largest"]["value"]);
    let [peak, planned] = ["peak_bytes", "planned_bytes"].map(|key| number(&trial[key]));
    assert!(peak <= budget as f64 && planned <= budget as f64 && peak > 16e6, "{trial}");
    let next = plan["confirmed"]["next"].as_str().expect("a text");
    assert!(next.starts_with("refused: this step needs "), "{next}");
    let text = folder.run(&[&["plan"], &words[..]].concat()).assert_code(0).stdout();
    assert!(text.contains("confirmed: a step of ") && text.contains(" measured, "), "{text}");
    // A model without weights on this machine has no trial.
    let words = ["plan", "--model", "esm2_t6_8M_UR50D", "--budget", "1GB", "--largest", "tokens", "--confirm"];
    let said = folder.run(&words).assert_code(1).stderr();
    assert!(said.contains("is not confirmed: its trial ended with"), "{said}");
    let words = ["plan", "--model", &model, "--target", "h200", "--largest", "tokens", "--confirm"];
    let said = folder.run(&words).assert_code(1).stderr();
    assert!(said.contains("--confirm runs the answer on this machine"), "{said}");
}

#[test]
fn the_largest_micro_batch_is_run_and_the_next_is_refused() {
    let folder = Folder::new("confirm_train");
    folder.write("run.yaml", TRAINED);
    folder.write("corpus.txt", std::fs::read(example("corpus.txt")).expect("the example"));
    let keys = ["data.validation_fraction=0", "batch.tokens=512", "batch.micro_tokens=auto", "data.workers=1"];
    let keys: Vec<&str> = keys.iter().flat_map(|key| ["--set", key]).collect();
    let base =
        [&["--train", "run.yaml", "--target", "cpu", "--largest", "tokens", "--confirm"], &keys[..]].concat();
    // What the smallest plan needs with the process and the data, whose sizes depend on the build.
    let refused = folder.run(&[&["plan", "--budget", "1MB"], &base[..]].concat()).assert_code(4).stderr();
    for line in ["process: code and tables", "data: "] {
        assert!(refused.contains(line), "{line}: {refused}");
    }
    let (_, least) = refused.split_once("this step needs ").expect("a bill");
    let least: String = least.split(" B on").next().expect("bytes").split(' ').collect();
    let budget = least.parse::<u64>().expect("a number") + 16_000_000;
    let plan = json(&folder, &[&["--budget", &budget.to_string()], &base[..]].concat());
    let trial = &plan["confirmed"]["trial"];
    assert_eq!(trial["budget_bytes"], budget);
    let [peak, planned] = ["peak_bytes", "planned_bytes"].map(|key| number(&trial[key]));
    assert!(peak <= budget as f64 && planned <= budget as f64 && peak > 16e6, "{trial}");
    assert!(number(&trial["loss"]).is_finite() && trial["updated"] == true, "{trial}");
    let value = number(&plan["largest"]["value"]);
    assert!(number(&trial["tokens"]) <= value && number(&trial["tokens"]) > 0.8 * value, "{trial}");
    // The process and the data are a part of the budget.
    let outside: f64 = plan["process"].as_object().expect("lines").values().map(number).sum();
    assert!(outside > 0.0 && number(&plan["peak_bytes"]) + outside <= budget as f64, "{plan}");
    let next = plan["confirmed"]["next"].as_str().expect("a text");
    assert!(next.contains("this step needs") && next.contains("process: code and tables"), "{next}");
    // A target that is not this machine, and data that is not there, are refused.
    let words = ["plan", "--train", "run.yaml", "--target", "h200", "--largest", "tokens", "--confirm"];
    let said = folder.run(&words).assert_code(1).stderr();
    assert!(said.contains("--confirm runs the answer on this machine"), "{said}");
    std::fs::remove_file(folder.path("corpus.txt")).expect("removed");
    folder.run(&[&["plan"], &base[..]].concat()).assert_code(1);
    folder.run(&["plan", "--train", "run.yaml", "--confirm"]).assert_code(1);
}
