//! `plimsoll plot` from the outside: what it writes, and what a user meets when something is wrong. What a
//! picture holds is tested in `run`.

use crate::harness::{Folder, golden};

/// Two records, as `predict` leaves them.
fn results(folder: &Folder) {
    folder.write(
        "out/predictions.tsv",
        "seq_name\tlength\tn_windows\tn_scored\tn_virus\tvirus_score\tprediction\n\
         contig_1\t900\t2\t1\t1\t0.800000\tvirus\ncontig_2\t300\t1\t0\t0\tNA\tno_call\n",
    );
    folder.write(
        "out/windows.tsv",
        "seq_name\twindow\tstart\tend\tn_orfs\tbest_frame\tscore_other\tscore_virus\tprediction\n\
         contig_1\t1\t1\t500\t1\tF2\t0.2\t0.8\tvirus\ncontig_1\t2\t401\t900\t0\tNA\tNA\tNA\tno_call\n\
         contig_2\t1\t1\t300\t0\tNA\tNA\tNA\tno_call\n",
    );
    folder.write(
        "out/run.json",
        r#"{"plimsoll": "0.1.0", "inputs": ["reads.fa"], "models": {"trained": true},
            "identity": {"parameters": {"threshold": 0.5, "length": 500}},
            "counts": {"records": 2, "windows": 3}}"#,
    );
}

fn check(name: &str, words: &[&str], code: i32) {
    let folder = Folder::new(name);
    results(&folder);
    folder.run(words).ended(code).matches(name);
}

#[test]
fn pictures_are_named() {
    check("plot", &["plot", "out", "--record", "contig_1", "--format", "svg"], 0);
    check("plot_file", &["plot", "out", "-o", "one.png", "--width", "89"], 0);
}

#[test]
fn what_cannot_be_drawn() {
    check("plot_no_results", &["plot", "nowhere"], 1);
    check("plot_no_record", &["plot", "out", "--record", "contig_3"], 1);
    check("plot_width", &["plot", "out", "--width", "8"], 1);
    check("plot_dpi", &["plot", "out", "--dpi", "10000"], 1);
    check("plot_format", &["plot", "out", "-o", "x.png", "--format", "svg"], 1);
    check("plot_one_file", &["plot", "out", "-o", "x.png", "--record", "contig_1", "--record", "contig_2"], 1);
}

#[test]
fn pictures_that_are_there_are_kept() {
    let folder = Folder::new("plot_there");
    results(&folder);
    folder.run(&["plot", "out"]).ended(0);
    folder.run(&["plot", "out"]).ended(1).matches("plot_there");
    folder.run(&["plot", "out", "--force"]).ended(0);
}

/// Pictures are beside the results, so that these stay what they were.
#[test]
fn a_prediction_can_be_drawn_and_then_replaced() {
    let folder = Folder::new("plot_predicted");
    let words = ["predict", &golden("pipeline/reads.fa"), "-o", "out", "-q"];
    folder.run(&words).ended(0);
    folder.run(&["plot", "out", "--format", "svg"]).ended(0);
    let picture = String::from_utf8(folder.read("out_plots/overview.svg")).expect("text");
    assert!(picture.contains(">reads.fa<"));
    folder.run(&[&words[..], &["--force"]].concat()).ended(0);
}
