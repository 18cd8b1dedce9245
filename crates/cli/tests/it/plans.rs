//! `plimsoll plan` and `plimsoll doctor`: what they print is what the issue promises.

use crate::harness::{Folder, golden};
use serde_json::Value;
use std::time::{Duration, Instant};

fn plan(folder: &Folder, words: &[&str]) -> Value {
    let ran = folder.run(&[&["plan", "--format", "json"], words].concat());
    serde_json::from_str(&ran.ended(0).stdout()).expect("JSON")
}

#[test]
fn every_known_model_has_a_plan_on_every_target() {
    let folder = Folder::new("plans");
    for (model, _) in models::KNOWN {
        for target in ["cpu", "h200", "4090"] {
            let plan =
                plan(&folder, &["--model", model, "--target", target, "--tokens", "1024", "--budget", "1TB"]);
            let keys: Vec<&String> = plan.as_object().expect("an object").keys().collect();
            let wanted = [
                "bounds",
                "digest",
                "ledger",
                "lower_bound_bytes",
                "peak_bytes",
                "peak_instruction",
                "streamed_bytes_per_step",
                "target",
            ];
            assert_eq!(keys, wanted);
            let ledger = plan["ledger"].as_object().expect("an object");
            let sum: u64 = ledger.values().filter_map(Value::as_u64).sum();
            assert_eq!(Some(sum), plan["peak_bytes"].as_u64(), "{model} on {target}");
            assert_eq!(plan["bounds"]["tokens"], 1024);
            assert_eq!(plan["target"], target);
            let (bound, peak) = (plan["lower_bound_bytes"].as_f64(), plan["peak_bytes"].as_f64());
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
    folder.run(&words).ended(0).matches("plan_3b_h200");
    let words =
        ["plan", "--model", &golden("esm2"), "--tokens", "64", "--dump-after", "layout", "--target", "null"];
    folder.run(&words).ended(0).matches("plan_dump");
}

#[test]
fn the_budget_changes_the_plan() {
    let folder = Folder::new("budget_changes");
    let model = ["--model", "esm2_t12_35M_UR50D"];
    let tokens = |words: &[&str]| plan(&folder, &[&model, words].concat())["bounds"]["tokens"].as_u64();
    assert!(tokens(&["--budget", "150MB"]) < tokens(&["--budget", "1GB"]));
    folder.run(&["plan", model[0], model[1], "--budget", "10MB"]).ended(4);
}

#[test]
fn a_percentage_is_of_the_target() {
    let folder = Folder::new("percentage");
    let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "4090", "--budget", "1%"];
    let ran = folder.run(&words);
    assert!(ran.ended(4).stderr().contains("the budget is 257 572 208 B"), "{}", ran.stderr());
}

#[test]
fn a_file_without_a_configuration_is_no_model() {
    let folder = Folder::new("no_configuration");
    folder.write("p.faa", ">a\nMKV\n");
    let ran = folder.run(&["plan", "--model", "p.faa"]);
    assert!(ran.ended(1).stderr().contains("beside its weights"), "{}", ran.stderr());
    let words = ["plan", "--model", "esm2_t6_8M_UR50D", "--dump-after", "fuse", "--format", "json"];
    folder.run(&words).ended(1);
}

#[test]
fn the_doctor_looks() {
    let folder = Folder::new("doctor");
    let text = folder.run(&["doctor"]).ended(0).stdout();
    assert!(text.contains("no models"), "{text}");
    assert!(text.contains("gemm_f32") && text.contains(&folder.path("hf/hub").display().to_string()), "{text}");
    let json: Value = serde_json::from_str(&folder.run(&["doctor", "--json"]).ended(0).stdout()).expect("JSON");
    assert_eq!(json["plimsoll"], env!("CARGO_PKG_VERSION"));
    for (name, file) in [("whole", Some("model.safetensors")), ("planned", None)] {
        let model = format!("hf/hub/models--org--{name}");
        folder.write(&format!("{model}/refs/main"), "0123abcd");
        for file in ["config.json"].into_iter().chain(file) {
            let bytes = std::fs::read(golden("esm2") + "/" + file).expect("golden");
            folder.write(&format!("{model}/snapshots/0123abcd/{file}"), bytes);
        }
    }
    folder.write("hf/hub/models--org--partial/blobs/x.incomplete", "");
    let json: Value = serde_json::from_str(&folder.run(&["doctor", "--json"]).ended(0).stdout()).expect("JSON");
    let wanted = serde_json::json!({
        "org/whole": "ESM-2",
        "org/planned": "ESM-2, without weights",
        "org/partial": "incomplete, no snapshot of `main`",
    });
    assert_eq!(json["hub_cache"]["models"], wanted);
    folder.write("p.faa", ">a\nMKV\n");
    folder.run(&["embed", "--model", "org/whole", "p.faa", "-o", "e.npy"]).ended(0);
    folder.run(&["embed", "--model", "org/planned", "p.faa", "-o", "f.npy"]).ended(1);
}
