//! `plimsoll monitor` on finished, failed, killed and running runs, and the memory and health that runs record.

use crate::harness::{Folder, example, golden};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::time::{SystemTime, UNIX_EPOCH};

/// Trains the head of examples/head.yaml into the folder `run`.
fn train(folder: &Folder, more: &[&str]) {
    symlink(example(""), folder.path("examples")).expect("a link");
    let words =
        ["train", "examples/head.yaml", "-o", "run", "--set", "run.steps=12", "--set", "run.epochs=null"];
    folder.run(&[&words, more].concat()).assert_code(0);
}

/// A state of a run that was `seconds` ago.
fn state(seconds: u64) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    json!({
        "command": "train", "stage": "training", "process_id": 1, "updated": now - seconds, "seconds": 90.0,
        "done": 3, "total": 9, "unit": "steps", "seconds_left": 180.0, "tokens_per_second": 1500.0, "loss": 2.5,
        "budget_bytes": 4_000_000_000u64, "planned_bytes": 3_000_000_000u64, "held_bytes": 2_500_000_000u64,
        "process_bytes": 2_900_000_000u64, "host_used_bytes": 8_000_000_000u64, "host_total_bytes": 16_000_000_000u64,
        "card": null, "status": "ok", "utilisation": 0.725, "oom_risk": 0.0, "a_later_field": 7
    })
}

#[test]
fn a_finished_run() {
    let folder = Folder::new("monitor-finished");
    train(&folder, &[]);
    assert!(!folder.path("run/progress.json").exists());
    let ran = folder.run(&["monitor", "run", "--once"]);
    let said = ran.assert_code(0).stdout();
    assert!(said.starts_with("train run: finished\n[#"), "{said}");
    for wanted in ["step 12 of 12", "\nloss  ", "\nvalidation", "\nplanned", "\nprocess", "\nhost", "\nhealth"]
    {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    assert!(said.lines().all(|line| line.chars().count() <= 80), "{said}");
    // Without a terminal the command prints the last line and ends.
    let said = folder.run(&["monitor", "run"]).assert_code(0).stdout();
    assert!(said.starts_with("train: step 12 of 12, loss ") && said.ends_with(", finished\n"), "{said}");
}

#[test]
fn a_killed_run_is_gone() {
    let folder = Folder::new("monitor-killed");
    folder.write("run/progress.json", state(60).to_string());
    folder.write("run/run.json", json!({"plimsoll": "1", "status": "running", "config": {}}).to_string());
    folder.write(
        "run/metrics.jsonl",
        "{\"step\":1,\"loss\":4.0}\n{\"step\":2,\"validation_loss\":3.5}\n{\"step\":3,\"lo",
    );
    let ran = folder.run(&["monitor", "run"]);
    let said = ran.assert_code(1).stdout();
    assert_eq!(
        said,
        "train: step 3 of 9, loss 2.5000, 1500 tokens/s, process 2.9 GB, planned 3.0 GB of 4.0 GB, \
         health ok, budget 72 %, risk 0 %, killed or failed: the process is gone and recorded no end\n"
    );
    folder.run(&["monitor", "run", "--once"]).matches("monitor_killed");
    // With its lock held, the same state is that of a long step.
    let lock = File::open(folder.path("run")).expect("a folder");
    lock.lock().expect("locked");
    let said = folder.run(&["monitor", "run", "--once"]).assert_code(0).stdout();
    assert!(said.starts_with("train run: training\n"), "{said}");
    lock.unlock().expect("unlocked");
    let failed = json!({"plimsoll": "1", "status": "failed", "error": "no\u{1b}memory", "config": {}});
    folder.write("run/run.json", failed.to_string());
    let said = folder.run(&["monitor", "run"]).assert_code(1).assert_printable("?").stdout();
    assert!(said.ends_with("failed: no?memory\n"), "{said}");
}

#[test]
fn folders_without_a_run() {
    let folder = Folder::new("monitor-empty");
    fs::create_dir(folder.path("empty")).expect("a folder");
    folder.write("other/run.json", "[]");
    for (name, wanted) in [
        (
            "empty",
            "empty: there is no run in it (no run.json, no progress.json); give the output folder of train or predict",
        ),
        ("other", "run.json is not the record of a run; give the output folder of train or predict"),
        ("missing", "missing: "),
    ] {
        let ran = folder.run(&["monitor", name]);
        assert!(ran.assert_code(1).stderr().contains(wanted), "{}", ran.stderr());
    }
}

/// A prediction records its memory and health, leaves no progress.json, and can be looked at afterwards.
#[test]
fn a_prediction() {
    let folder = Folder::new("monitor-prediction");
    let reads = golden("pipeline/reads.fa");
    let goldens = golden("");
    folder.run(&["predict", &reads, "--weights", &goldens, "-o", "viral"]).assert_code(0);
    assert!(!folder.path("viral/progress.json").exists());
    let record: Value = serde_json::from_slice(&folder.read("viral/run.json")).expect("JSON");
    let stages = record["memory"].as_array().expect("stages").iter();
    let stages: Vec<&str> = stages.map(|stage| stage["stage"].as_str().expect("a name")).collect();
    assert_eq!(
        stages,
        ["start", "opened", "planned", "arena allocated", "weights loaded", "loaded", "computed"]
    );
    let health = record["health"].as_object().expect("health");
    let fields: Vec<&String> = health.keys().collect();
    assert_eq!(fields, ["fragmentation", "leak", "oom_risk", "recommendations", "status", "utilisation"]);
    assert!(health["utilisation"].as_f64().is_some_and(|share| share > 0.0 && share < 1.0), "{health:?}");
    let said = folder.run(&["monitor", "viral", "--once"]).assert_code(0).stdout();
    assert!(said.starts_with("predict viral: finished\n") && said.contains("100 % of the input"), "{said}");
}

/// With --monitor and without a terminal, a short run prints no line, and the summary is the same.
#[test]
fn a_monitor_from_inside_of_a_run() {
    let folder = Folder::new("monitor-inside");
    train(&folder, &["--monitor"]);
    let refused = folder.run(&["train", "run.yaml", "--monitor", "--quiet"]);
    assert!(
        refused.assert_code(1).stderr().contains("'--monitor' cannot be used with '--quiet'"),
        "{}",
        refused.stderr()
    );
}
