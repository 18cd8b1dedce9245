//! Tests of the output files and error messages of `plimsoll plot`.

use crate::harness::{Folder, golden};

/// Writes the result files of a prediction with two records.
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
    folder.run(words).assert_code(code).matches(name);
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
    folder.run(&["plot", "out"]).assert_code(0);
    folder.run(&["plot", "out"]).assert_code(1).matches("plot_there");
    folder.run(&["plot", "out", "--force"]).assert_code(0);
}

/// Pictures are written beside the result folder, so that `predict --force` can still replace the results.
#[test]
fn a_prediction_can_be_drawn_and_then_replaced() {
    let folder = Folder::new("plot_predicted");
    let words = ["predict", &golden("pipeline/reads.fa"), "-o", "out", "-q"];
    folder.run(&words).assert_code(0);
    folder.run(&["plot", "out", "--format", "svg"]).assert_code(0);
    let picture = String::from_utf8(folder.read("out_plots/overview.svg")).expect("text");
    assert!(picture.contains(">reads.fa<"));
    folder.run(&[&words[..], &["--force"]].concat()).assert_code(0);
}

/// Writes the golden results in VirNucPro's layout: `reads_chunked500.fa` and `reads_merged/`.
fn original(folder: &Folder) {
    let golden = |file: &str| std::fs::read(golden(&format!("pipeline/expected_500/{file}"))).expect("golden");
    folder.write("o/reads_chunked500.fa", golden("chunked.fa"));
    for file in ["prediction_results.txt", "prediction_results_highestscore.csv"] {
        folder.write(&format!("o/reads_merged/{file}"), golden(file));
    }
}

/// Pictures of VirNucPro's results equal the pictures of a prediction with the same input and weights.
#[test]
fn results_of_the_original_are_drawn() {
    let folder = Folder::new("plot_original");
    original(&folder);
    let words = ["predict", &golden("pipeline/reads.fa"), "--weights", &golden(""), "--precision", "f32", "-q"];
    folder.run(&[&words[..], &["-o", "out", "--length", "500"]].concat()).assert_code(0);
    let drawn = |results: &str, output: &str| {
        let record = ["--record", "read_10", "--format", "svg"];
        folder.run(&[&["plot", results, "-o", output], &record[..]].concat()).assert_code(0);
        ["overview", "record_read_10"].map(|name| {
            let text = String::from_utf8(folder.read(&format!("{output}/{name}.svg"))).expect("text");
            assert!(text.contains("VirNucPro") != text.contains("plimsoll 0."), "{text}");
            text
        })
    };
    let ours = drawn("out", "ours");
    // Pictures of VirNucPro's results name the input after the folder, and VirNucPro as the program.
    let version = format!("plimsoll {}", env!("CARGO_PKG_VERSION"));
    let numbers = |text: &str| {
        let text = text.replace("reads.fa", "reads").replace(&version, "VirNucPro");
        // Text is left out, because the widths of the differing names move the labels behind them.
        let labels = text.lines().filter(|line| line.contains("<path") || line.contains("<rect"));
        labels.map(str::to_owned).collect::<Vec<_>>()
    };
    for (results, output) in [("o/reads_merged", "merged"), ("o", "above")] {
        let theirs = drawn(results, output);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(!numbers(ours).is_empty());
            assert_eq!(numbers(ours), numbers(theirs), "{results}");
        }
    }
}

#[test]
fn a_resolution_without_png_pictures_is_refused() {
    let folder = Folder::new("plot_dpi");
    original(&folder);
    for words in [["-o", "p.svg"], ["--format", "svg"]] {
        let words = [&["plot", "o/reads_merged", "--dpi", "300"], &words[..]].concat();
        let said = folder.run(&words).assert_code(1).stderr();
        assert!(said.contains("--dpi: only PNG pictures have a resolution"), "{said}");
    }
    folder.run(&["plot", "o/reads_merged", "--dpi", "300", "-o", "p.png"]).assert_code(0);
}

#[test]
fn results_of_the_original_that_contradict_each_other() {
    let folder = Folder::new("plot_original_torn");
    let said = |words: &str| {
        folder.run(&["plot", "o/reads_merged", "-o", "p"]).assert_code(1).stderr().contains(words)
    };
    let edit = |file: &str, from: &str, to: &str| {
        original(&folder);
        let text = String::from_utf8(folder.read(file)).expect("text");
        assert!(text.contains(from), "{file}: {from}");
        folder.write(file, text.replacen(from, to, 1));
    };
    edit("o/reads_merged/prediction_results_highestscore.csv", "read_0_chunk_1\tTrue", "read_0_chunk_1\tFalse");
    assert!(said("`read_0_chunk_1` contradicts prediction_results.txt"));
    edit("o/reads_merged/prediction_results.txt", "read_0_chunk_1F1", "read_0_chunk_1F9");
    assert!(said("prediction_results.txt, line 2: `read_0_chunk_1F9` is not an open reading frame's name"));
    original(&folder);
    let text = String::from_utf8(folder.read("o/reads_merged/prediction_results.txt")).expect("text");
    let head = text.lines().next().expect("a head");
    let row = text.lines().nth(1).expect("a row");
    let cells: Vec<&str> = row.split('\t').collect();
    let zeros = format!("{head}\n{}\t{}\t0.0\t0.0", cells[0], cells[1]);
    folder.write("o/reads_merged/prediction_results.txt", text.replacen(&format!("{head}\n{row}"), &zeros, 1));
    assert!(said("prediction_results.txt, line 2: both scores of `read_0_chunk_1F1` are 0"));
    edit("o/reads_chunked500.fa", ">read_0_chunk_1", ">other_chunk_1");
    assert!(
        said("contradicts prediction_results.txt or is missing there") || said("they belong to different runs")
    );
    edit("o/reads_chunked500.fa", ">read_0_chunk_1", ">read_0_chunk_2");
    assert!(said("`read_0_chunk_2` does not follow on window 0"));
    original(&folder);
    std::fs::remove_file(folder.path("o/reads_chunked500.fa")).expect("removed");
    assert!(said("put reads_chunkedLENGTH.fa of that run beside the folder"));
}
