//! `plimsoll verify`: exit codes that scripts can rely on.

use crate::harness::{Folder, golden};
use serde_json::Value;

#[test]
fn the_goldens_pass() {
    let folder = Folder::new("verify");
    let ran = folder.run(&["verify", "--weights", &golden("")]);
    assert!(ran.ended(0).stdout().ends_with("pass: 3 of 3 models\n"), "{}", ran.stdout());
    let words = ["verify", "--model", &golden("esm2"), "--model", &golden("dnabert_s"), "--json"];
    let report: Value = serde_json::from_str(&folder.run(&words).ended(0).stdout()).expect("JSON");
    assert_eq!((&report["passes"], report["models"].as_array().map(Vec::len)), (&Value::Bool(true), Some(2)));
}

#[test]
fn a_model_that_does_not_pass_is_exit_code_1() {
    let folder = Folder::new("verify_fails");
    let edit = |text: &str| text.replace("\"layer_norm_eps\": 1e-05", "\"layer_norm_eps\": 1e-02");
    folder.model("esm2", "config.json", edit);
    let ran = folder.run(&["verify", "--model", "esm2", "-q", "--json"]);
    let report: Value = serde_json::from_str(&ran.ended(1).stdout()).expect("JSON");
    let checks = report["models"][0]["checks"].as_array().expect("checks");
    let failed: Vec<&str> =
        checks.iter().filter(|c| c["outcome"] == "FAIL").filter_map(|c| c["check"].as_str()).collect();
    assert_eq!(failed, ["answers"; 3]);
    let ran = folder.run(&["verify", "--model", "org/none"]);
    assert!(ran.ended(1).stdout().contains("HF_HUB_OFFLINE keeps it from being fetched"), "{}", ran.stdout());
    let ran = folder.run(&["verify"]);
    assert!(ran.ended(1).stderr().contains("--weights <DIR>"), "{}", ran.stderr());
    // What does not fit is refused, as everywhere.
    let words = ["verify", "--model", "esm2", "--memory-budget", "100kB", "--threads", "1"];
    folder.run(&words).ended(4);
}
