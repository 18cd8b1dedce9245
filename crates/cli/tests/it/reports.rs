//! Tests of the files and messages of `plimsoll report`. What a page shows is tested in the crate `report`.

use crate::harness::{Folder, golden};

#[test]
fn a_prediction_becomes_a_page() {
    let folder = Folder::new("report");
    let words = ["predict", &golden("pipeline/reads.fa"), "--weights", &golden(""), "-o", "out", "-q"];
    folder.run(&words).assert_code(0);
    folder.run(&["report", "out", "-o", "page.html"]).assert_code(0).matches("report");
    folder.run(&["report", "out"]).assert_code(0).matches("report_default");
    let page = String::from_utf8(folder.read("page.html")).expect("text");
    let table = String::from_utf8(folder.read("out/predictions.tsv")).expect("text");
    let called = table.lines().filter(|line| line.ends_with("\tvirus")).count();
    assert!(page.contains(&format!("<dt>Virus</dt><dd>{called}<small>")), "{called}");
    assert!(page.contains("<title>Viral calls in reads.fa</title>"));
    assert_eq!(folder.read("out_report.html"), page.as_bytes());
}

#[test]
fn what_cannot_be_reported() {
    let folder = Folder::new("report_refused");
    folder.run(&["report", "nowhere"]).assert_code(1).matches("report_no_results");
    folder.write("out/run.json", r#"{"plimsoll": "0.1.0", "inputs": ["a.fa"], "counts": {"records": 1}}"#);
    folder.write(
        "out/predictions.tsv",
        "seq_name\tlength\tn_windows\tvirus_score\tprediction\na\t9\t1\tmuch\tvirus\n",
    );
    folder.run(&["report", "out"]).assert_code(1).matches("report_damaged");
    folder.write("there.html", "");
    folder.run(&["report", "out", "-o", "there.html"]).assert_code(1).matches("report_there");
}

/// Writes the folder of a training run with two steps.
fn run(folder: &Folder, name: &str) {
    folder.write(
        &format!("{name}/metrics.jsonl"),
        "{\"step\":1,\"loss\":3.5,\"lr\":0.001}\n{\"step\":2,\"loss\":2.5,\"lr\":0.002}\n",
    );
}

#[test]
fn training_runs_become_a_page_and_pictures() {
    let folder = Folder::new("report_training");
    run(&folder, "a");
    run(&folder, "b");
    folder.run(&["report", "a", "b"]).assert_code(0).matches("report_training");
    folder.run(&["report", "a", "-o", "a.html", "--title", "Mine"]).assert_code(0);
    let page = String::from_utf8(folder.read("a.html")).expect("text");
    assert!(page.contains("<title>Mine</title>") && page.contains("data-chart=\"loss\""));
    folder.run(&["plot", "a", "b", "--log"]).assert_code(0).matches("plot_training");
    folder.run(&["plot", "a", "--series", "lr", "-o", "lr.svg"]).assert_code(0);
    let picture = String::from_utf8(folder.read("lr.svg")).expect("text");
    assert!(picture.contains(">Learning rate<") && !picture.contains(">Loss<"));
}

#[test]
fn training_runs_that_cannot_be_reported() {
    let folder = Folder::new("report_training_refused");
    run(&folder, "a");
    folder.write("other/run.json", "{}");
    folder.run(&["report", "a", "other"]).assert_code(1).matches("report_mixture");
    folder.run(&["report", "other", "other"]).assert_code(1).matches("report_predictions");
    folder.run(&["plot", "a", "--series", "los"]).assert_code(1).matches("plot_series");
    folder.write("a/metrics.jsonl", "{\"step\":1,\"loss\":3.5}\n{\"step\":1,\n{}\n");
    folder.run(&["report", "a"]).assert_code(1).matches("report_metrics");
    folder.write("early/run.json", r#"{"status": "failed", "config": {}}"#);
    folder.run(&["report", "early"]).assert_code(1).matches("report_early");
}
