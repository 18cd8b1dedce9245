//! Tests of the exit codes of `plimsoll verify`, which scripts rely on.

use crate::harness::{Folder, golden};
use crate::torch_files::{Pickler, View, torch_file};
use plimsoll_data::weights::Weights;
use serde_json::Value;
use std::fs;

#[test]
fn the_goldens_pass() {
    let folder = Folder::new("verify");
    let ran = folder.run(&["verify", "--weights", &golden("")]);
    assert!(ran.assert_code(0).stdout().ends_with("pass: 3 of 3 models\n"), "{}", ran.stdout());
    let words = ["verify", "--model", &golden("esm2"), "--model", &golden("dnabert_s"), "--json"];
    let report: Value = serde_json::from_str(&folder.run(&words).assert_code(0).stdout()).expect("JSON");
    assert_eq!((&report["passes"], report["models"].as_array().map(Vec::len)), (&Value::Bool(true), Some(2)));
}

#[test]
fn a_model_that_does_not_pass_is_exit_code_1() {
    let folder = Folder::new("verify_fails");
    let edit = |text: &str| text.replace("\"layer_norm_eps\": 1e-05", "\"layer_norm_eps\": 1e-02");
    folder.model("esm2", "config.json", edit);
    let ran = folder.run(&["verify", "--model", "esm2", "-q", "--json"]);
    let report: Value = serde_json::from_str(&ran.assert_code(1).stdout()).expect("JSON");
    let checks = report["models"][0]["checks"].as_array().expect("checks");
    let failed: Vec<&str> =
        checks.iter().filter(|c| c["outcome"] == "FAIL").filter_map(|c| c["check"].as_str()).collect();
    assert_eq!(failed, ["answers"; 3]);
    let ran = folder.run(&["verify", "--model", "org/none"]);
    assert!(ran.assert_code(1).stdout().contains("HF_HUB_OFFLINE prevents the download"), "{}", ran.stdout());
    let ran = folder.run(&["verify"]);
    assert!(ran.assert_code(1).stderr().contains("--weights <DIR>"), "{}", ran.stderr());
    // A budget that is too small is refused with exit code 4.
    let words = ["verify", "--model", "esm2", "--memory-budget", "100kB", "--threads", "1"];
    folder.run(&words).assert_code(4);
}

/// Writes the files with the inputs and outputs of the head in a VirNucPro run on the golden reads:
/// `NAME_merged/output_1_merged.pt`, and `NAME_merged/prediction_results.txt` with its text changed by `edit`.
fn reference(folder: &Folder, name: &str, edit: impl Fn(String) -> String) {
    let results = fs::read_to_string(golden("pipeline/expected_500/prediction_results.txt")).expect("golden");
    let ids = results.lines().skip(1).filter_map(|line| line.split('\t').next());
    let answers = Weights::open(golden("pipeline/expected_500/golden.safetensors").as_ref()).expect("golden");
    let merged = answers.tensor("merged").expect("merged");
    let shape = merged.shape().to_vec();
    let elements = merged.elements();
    let mut values = vec![0.0; elements as usize];
    answers.read_f32("merged", 0..elements, &mut values).expect("read");
    let mut pickle = Pickler::new().raw(b"}(").text("ids").raw(b"](");
    for id in ids {
        pickle = pickle.text(id);
    }
    let stride = [shape[1], 1];
    let view = View {
        class: "FloatStorage",
        key: "0",
        elements: elements as i64,
        offset: 0,
        shape: &shape,
        stride: &stride,
    };
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let file = torch_file(&pickle.raw(b"e").text("data").tensor(&view).raw(b"u").stop(), &[&bytes]);
    folder.write(&format!("{name}_merged/output_1_merged.pt"), file);
    folder.write(&format!("{name}_merged/prediction_results.txt"), edit(results));
}

/// (outcome, detail) of the only model's checks against reference files.
fn of_reference(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let checks = report["models"][0]["checks"].as_array().expect("checks").iter();
    checks.filter(|c| c["check"] == "reference").map(|c| (text(&c["outcome"]), text(&c["detail"]))).collect()
}

#[test]
fn a_head_alone_is_compared_with_the_reference() {
    let folder = Folder::new("verify_head");
    fs::copy(golden("head.pth"), folder.path("500_model.pth")).expect("copied");
    fs::copy(golden("head.pth"), folder.path("300_model.pth")).expect("copied");
    reference(&folder, "r/reads", |text| text);
    folder.write("r/reads_chunked500.fa", "");
    let words = ["verify", "--head", "500_model.pth", "--reference", "r", "--json"];
    let report: Value = serde_json::from_str(&folder.run(&words).assert_code(0).stdout()).expect("JSON");
    let rows = fs::read_to_string(golden("pipeline/expected_500/prediction_results.txt")).expect("golden");
    let (outcome, detail) = of_reference(&report).pop().expect("a check");
    assert_eq!(outcome, "pass");
    assert!(detail.starts_with(&format!("reads: {} scores: off by ", rows.lines().count() - 1)), "{detail}");
    // A score in the reference that the head does not compute.
    reference(&folder, "r/reads", |text| text.replace("0.11324274\t0.8867572", "0.11320000\t0.8868000"));
    let report: Value = serde_json::from_str(&folder.run(&words).assert_code(1).stdout()).expect("JSON");
    assert_eq!(of_reference(&report)[0].0, "FAIL");
    // Scores for windows of another length are not compared, and a row that cannot be parsed is an error.
    let other = ["verify", "--head", "300_model.pth", "--reference", "r", "--json"];
    let report: Value = serde_json::from_str(&folder.run(&other).assert_code(0).stdout()).expect("JSON");
    let note = "reads: its windows have 500 bases, this head is for 300".to_owned();
    assert_eq!(of_reference(&report), [("note".to_owned(), note)]);
    reference(&folder, "r/reads", |text| format!("{text}cut off\n"));
    let said = folder.run(&words).assert_code(1).stderr();
    assert!(said.contains(&format!("prediction_results.txt, line {}: ", rows.lines().count() + 1)), "{said}");
    let said = folder.run(&["verify", "--head", "none.pth"]).assert_code(1).stderr();
    assert!(said.contains("--head none.pth: there is no such file"), "{said}");
}

#[test]
fn every_head_of_a_bundle_is_found_by_its_name() {
    let folder = Folder::new("verify_named_heads");
    folder.write("w/note.txt", "");
    for model in ["dnabert_s", "esm2"] {
        for entry in fs::read_dir(golden(model)).expect("goldens").flatten() {
            let to = format!("w/{model}/{}", entry.file_name().to_string_lossy());
            folder.write(&to, fs::read(entry.path()).expect("read"));
        }
    }
    for head in ["500_model.pth", "300_model.pth"] {
        fs::copy(golden("head.pth"), folder.path(&format!("w/{head}"))).expect("copied");
    }
    let said = folder.run(&["verify", "--weights", "w"]).assert_code(0).stdout();
    assert!(said.contains("w/300_model.pth: ") && said.contains("w/500_model.pth: "), "{said}");
    assert!(said.ends_with("pass: 4 of 4 models\n"), "{said}");
}
