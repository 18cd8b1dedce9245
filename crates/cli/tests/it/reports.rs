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
