//! `plimsoll predict` from the outside: folders, models, exit codes. What it computes is tested in `run`.

use crate::harness::{Folder, golden};
use data::weights::Weights;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const READS: &str = "pipeline/reads.fa";

#[test]
fn the_goldens() {
    let folder = Folder::new("goldens");
    for length in ["300", "500"] {
        let words = ["predict", &golden(READS), "--weights", &golden(""), "--length", length, "-o", length];
        let ran = folder.run(&[&words[..], &["--precision", "f32", "--keep-intermediate", "-q"]].concat());
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
    folder.run(&["predict", "reads.fa", "--length", "300"]).ended(3).matches("other_run");
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
fn a_shard_of_standard_input_is_refused() {
    let folder = Folder::new("shard_of_a_pipe");
    let ran = folder.run_with(&["predict", "-", "--shard", "1/2", "-o", "out"], b">a\nACGTACGTACGT\n");
    ran.ended(1);
    assert!(ran.stderr().contains("--shard: the input must be files"), "{}", ran.stderr());
}

#[test]
fn standard_input_has_a_folder_too() {
    let folder = Folder::new("stdin");
    let reads = fs::read(golden(READS)).expect("golden");
    folder.run_with(&["predict", "-"], &reads).ended(0);
    assert!(folder.path("stdin_plimsoll/run.json").exists());
    folder.run_with(&["predict", "-"], &reads).ended(3);
}

/// An error is met while the pipe is still open: the command must not wait for its end.
#[test]
fn an_error_does_not_wait_for_the_pipe() {
    let folder = Folder::new("open_pipe");
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["predict", "--strict", "-q", "-"])
        .current_dir(folder.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let mut pipe = child.stdin.take().expect("piped");
    let long = "ACGTTGCA".repeat(1 << 15);
    write!(pipe, ">a\nACGT\n>a\nACGT\n>b\n{long}\n>c\nACGT\n").expect("written");
    let start = Instant::now();
    let code = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status.code(),
            None if start.elapsed() > Duration::from_secs(60) => {
                child.kill().expect("killed");
                panic!("it waits for the pipe");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(code, Some(1));
    drop(pipe);
}

/// As after `2> >(head -1)`, or when a terminal is closed.
#[test]
fn a_run_goes_on_when_nobody_reads_its_messages() {
    let folder = Folder::new("no_reader");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let status = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["predict", &golden(READS), "-o", "out", "-v"])
        .current_dir(folder.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(writer)
        .status()
        .expect("the binary starts");
    assert_eq!(status.code(), Some(0));
    assert!(folder.path("out/run.json").exists());
}

#[test]
fn ids_cannot_command_the_terminal() {
    let folder = Folder::new("escapes");
    let reads = ">\x1b[31mred\nACGT\n>\x1b[31mred\nACGT\n";
    for words in [&["predict", "-", "-v"][..], &["predict", "-", "--strict", "-o", "out"]] {
        let ran = folder.run_with(words, reads.as_bytes());
        assert!(ran.stderr().contains("'\\u{1b}[31mred': duplicate_id"), "{}", ran.stderr());
        assert!(!ran.stderr().contains('\x1b'), "{}", ran.stderr());
    }
}

/// A protein model that gives no numbers: every sequence fails, all of it is said, and a second look at the
/// result is no success either.
#[test]
fn sequences_that_fail_are_exit_code_2() {
    let folder = Folder::new("failed");
    let model = golden("esm2/model.safetensors");
    let mut file = fs::read(&model).expect("golden");
    let weights = Weights::open(Path::new(&model)).expect("opened");
    let norm = weights.tensor("esm.encoder.emb_layer_norm_after.bias").expect("there");
    file[norm.offset() as usize..][..4].fill(0xff);
    folder.write("esm2/model.safetensors", file);
    folder.write("esm2/config.json", fs::read(golden("esm2/config.json")).expect("golden"));
    folder.write("reads.fa", ">a\nACGAAAGCAGCAGCAGCA\n");
    let words = ["predict", "reads.fa", "--weights", &golden(""), "--protein-model", "esm2"];
    for _ in 0..2 {
        folder.run(&words).ended(2);
    }
    let notes = String::from_utf8(folder.read("reads_plimsoll/notes.tsv")).expect("text");
    assert!(notes.contains("a\tfailed\twindow 1 frame F1"), "{notes}");
    let table = String::from_utf8(folder.read("reads_plimsoll/predictions.tsv")).expect("text");
    assert!(table.contains("\tno_call"), "{table}");
}

#[test]
fn the_head_names_the_length_of_windows() {
    let folder = Folder::new("length");
    fs::copy(golden("head.pth"), folder.path("300_model.pth")).expect("copied");
    let run = |more: &[&str]| {
        let words = ["predict", &golden(READS), "--weights", &golden(""), "--head", "300_model.pth", "-q"];
        folder.run(&[&words[..], more].concat())
    };
    let ran = run(&["--length", "500", "-o", "refused"]);
    let wanted = "300_model.pth is a head for windows of 300 bases, --length is 500; leave --length out";
    assert!(ran.ended(1).stderr().contains(wanted), "{}", ran.stderr());
    run(&["--length", "300", "-o", "given"]).ended(0);
    run(&["-o", "named"]).ended(0);
    assert_eq!(folder.read("named/windows.tsv"), folder.read("given/windows.tsv"));
}

#[test]
fn virnucpros_heads_are_found_in_a_folder_of_weights() {
    let folder = Folder::new("virnucpro_heads");
    let words = ["predict", &golden(READS), "--weights", "w", "--dna-model", &golden("dnabert_s"), "-q"];
    let esm2 = golden("esm2");
    let run = |more: &[&str]| folder.run(&[&words[..], &["--protein-model", &esm2], more].concat());
    folder.write("w/300_model.pth", fs::read(golden("head.pth")).expect("golden"));
    run(&["-o", "one"]).ended(0);
    folder.write("w/500_model.pth", fs::read(golden("head.pth")).expect("golden"));
    let ran = run(&["-o", "two"]);
    assert!(ran.ended(1).stderr().contains("300_model.pth and 500_model.pth"), "{}", ran.stderr());
    run(&["-o", "three", "--length", "300"]).ended(0);
    assert_eq!(folder.read("one/windows.tsv"), folder.read("three/windows.tsv"));
}

#[test]
fn a_head_alone_takes_the_encoders_of_the_hub() {
    let folder = Folder::new("head_alone");
    fs::copy(golden("head.pth"), folder.path("500_model.pth")).expect("copied");
    // The cache is empty, and the network is off.
    let ran = folder.run(&["predict", &golden(READS), "--head", "500_model.pth"]);
    assert!(ran.ended(1).stderr().contains("zhihan1996/DNABERT-S"), "{}", ran.stderr());
    let dna = golden("dnabert_s");
    let ran = folder.run(&["predict", &golden(READS), "--head", "500_model.pth", "--dna-model", &dna]);
    assert!(ran.ended(1).stderr().contains("facebook/esm2_t36_3B_UR50D"), "{}", ran.stderr());
}
