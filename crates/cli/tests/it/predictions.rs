//! `plimsoll predict` from the outside: folders, models, exit codes. What it computes is tested in `run`.

use crate::harness::{Folder, golden};
use std::fs;

const READS: &str = "pipeline/reads.fa";

#[test]
fn the_goldens() {
    let folder = Folder::new("goldens");
    for length in ["300", "500"] {
        let words = ["predict", &golden(READS), "--weights", &golden(""), "--length", length, "-o", length];
        let ran = folder.run(&[&words[..], &["--keep-intermediate", "-q"]].concat());
        assert!(ran.ended(0).stdout().is_empty(), "{}", ran.stdout());
        for file in ["chunked.fa", "nucleotide.fa", "protein.faa", "prediction_results_highestscore.csv"] {
            let wanted = fs::read(golden(&format!("pipeline/expected_{length}/{file}"))).expect("golden");
            assert!(folder.read(&format!("{length}/{file}")) == wanted, "{length}/{file}");
        }
    }
}

#[test]
fn a_second_run_is_complete_and_another_is_refused() {
    let folder = Folder::new("folders");
    fs::copy(golden(READS), folder.path("reads.fa")).expect("copied");
    let ran = folder.run(&["predict", "reads.fa", "--threads", "1"]);
    let warning = "warning: the built-in models are UNTRAINED";
    assert!(ran.ended(0).stderr().contains(warning), "{}", ran.stderr());
    assert!(ran.stdout().contains("results in reads_plimsoll"), "{}", ran.stdout());
    folder.run(&["predict", "reads.fa", "--threads", "2"]).ended(0).matches("complete");
    folder.run(&["predict", "reads.fa", "--length", "300"]).ended(1).matches("other_run");
    folder.run(&["predict", "reads.fa", "--length", "300", "--force"]).ended(0);
}

#[test]
fn a_model_by_itself_wins_over_the_bundle() {
    let folder = Folder::new("bundle");
    let reads = golden(READS);
    let run = |words: &[&str]| {
        let ran = folder.run(&[&["predict", &reads, "--json", "--force", "-o", "out"], words].concat());
        let record: serde_json::Value = serde_json::from_str(&ran.ended(0).stdout()).expect("JSON");
        record["models"].clone()
    };
    fs::copy(golden("head.pth"), folder.path("500_model.pth")).expect("copied");
    let bundle = run(&["--weights", &golden("")]);
    assert_eq!(bundle["trained"], true);
    let mixed = run(&["--weights", &golden(""), "--head", "500_model.pth"]);
    assert_eq!(mixed["head"], "500_model.pth");
    assert_eq!(mixed["dna"], bundle["dna"]);
}

#[test]
fn standard_input_has_a_folder_too() {
    let folder = Folder::new("stdin");
    let reads = fs::read(golden(READS)).expect("golden");
    folder.run_with(&["predict", "-"], &reads).ended(0);
    assert!(folder.path("stdin_plimsoll/run.json").exists());
    folder.run_with(&["predict", "-"], &reads).ended(1);
}
