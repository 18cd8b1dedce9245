//! Tests of the input and output folders, models, exit codes and messages of `plimsoll predict`.

use crate::harness::{Folder, golden};
use plimsoll_data::weights::Weights;
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
        assert!(ran.assert_code(0).stdout().is_empty(), "{}", ran.stdout());
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
    assert!(ran.assert_code(0).stdout().contains("results in reads_plimsoll"), "{}", ran.stdout());
    folder.run(&["predict", "reads.fa", "--threads", "2"]).assert_code(0).matches("complete");
    folder.run(&["predict", "reads.fa", "--max-n", "0.1"]).assert_code(3).matches("other_run");
    folder.run(&["predict", "reads.fa", "--max-n", "0.1", "--force"]).assert_code(0);
}

#[test]
fn a_model_by_itself_wins_over_the_bundle() {
    let folder = Folder::new("bundle");
    let reads = golden(READS);
    let run = |words: &[&str]| {
        let ran = folder.run(&[&["predict", &reads, "--json", "--force", "-o", "out"], words].concat());
        let record: serde_json::Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
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
    ran.assert_code(1);
    assert!(ran.stderr().contains("--shard: the input must be files"), "{}", ran.stderr());
}

#[test]
fn standard_input_has_a_folder_too() {
    let folder = Folder::new("stdin");
    let reads = fs::read(golden(READS)).expect("golden");
    folder.run_with(&["predict", "-"], &reads).assert_code(0);
    assert!(folder.path("stdin_plimsoll/run.json").exists());
    folder.run_with(&["predict", "-"], &reads).assert_code(3);
}

/// An error that occurs while the input pipe is still open ends the command without waiting for the end of the
/// pipe.
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

/// Standard error is a pipe without a reader, as after `2> >(head -1)` or when a terminal is closed.
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
        assert!(ran.stderr().contains("'\\u{1b}[31mred': renamed"), "{}", ran.stderr());
        assert!(!ran.stderr().contains('\x1b'), "{}", ran.stderr());
    }
}

/// A protein model with NaN weights: every sequence fails and is listed, and repeating the command on the
/// complete result gives exit code 2 again.
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
        folder.run(&words).assert_code(2);
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
    let wanted = "300_model.pth is a head for windows of 300 bases, --length is 500; omit --length";
    assert!(ran.assert_code(1).stderr().contains(wanted), "{}", ran.stderr());
    run(&["--length", "300", "-o", "given"]).assert_code(0);
    run(&["-o", "named"]).assert_code(0);
    assert_eq!(folder.read("named/windows.tsv"), folder.read("given/windows.tsv"));
}

#[test]
fn virnucpros_heads_are_found_in_a_folder_of_weights() {
    let folder = Folder::new("virnucpro_heads");
    let words = ["predict", &golden(READS), "--weights", "w", "--dna-model", &golden("dnabert_s"), "-q"];
    let esm2 = golden("esm2");
    let run = |more: &[&str]| folder.run(&[&words[..], &["--protein-model", &esm2], more].concat());
    folder.write("w/300_model.pth", fs::read(golden("head.pth")).expect("golden"));
    run(&["-o", "one"]).assert_code(0);
    folder.write("w/500_model.pth", fs::read(golden("head.pth")).expect("golden"));
    let ran = run(&["-o", "two"]);
    assert!(ran.assert_code(1).stderr().contains("300_model.pth and 500_model.pth"), "{}", ran.stderr());
    run(&["-o", "three", "--length", "300"]).assert_code(0);
    assert_eq!(folder.read("one/windows.tsv"), folder.read("three/windows.tsv"));
}

#[test]
fn a_head_alone_takes_the_encoders_of_the_hub() {
    let folder = Folder::new("head_alone");
    fs::copy(golden("head.pth"), folder.path("500_model.pth")).expect("copied");
    // The hub cache is empty and the network is disabled, so the encoders cannot be opened.
    let ran = folder.run(&["predict", &golden(READS), "--head", "500_model.pth"]);
    assert!(ran.assert_code(1).stderr().contains("zhihan1996/DNABERT-S"), "{}", ran.stderr());
    let dna = golden("dnabert_s");
    let ran = folder.run(&["predict", &golden(READS), "--head", "500_model.pth", "--dna-model", &dna]);
    assert!(ran.assert_code(1).stderr().contains("facebook/esm2_t36_3B_UR50D"), "{}", ran.stderr());
}

/// The fields of predictions.tsv, without its header.
fn predictions(folder: &Folder, name: &str) -> Vec<Vec<String>> {
    let text = String::from_utf8(folder.read(name)).expect("text");
    text.lines().skip(1).map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

#[test]
fn rna_gives_what_its_dna_gives() {
    let folder = Folder::new("rna");
    // The stop codons of RNA (UAA, UAG, UGA) contain U. If codons with U were dropped, every frame would be open.
    let dna = "ATGTAACTAGTGAATTGACCGTAACGGTTAACCATGCTAGGCTTAATCGATTAGGCC".repeat(6);
    folder.write("dna.fa", format!(">a\n{dna}\n>b\n{}\n", &dna[7..200]));
    let rna = dna.replace('T', "U");
    folder.write("rna.fa", format!(">a\n{rna}\n>b\n{}\n", rna[7..200].to_lowercase()));
    let words = ["--weights", &golden(""), "--precision", "f32", "--keep-intermediate", "-q", "-o"];
    for (file, out) in [("dna.fa", "dna"), ("rna.fa", "rna")] {
        folder.run(&[&["predict", file][..], &words, &[out]].concat()).assert_code(0);
    }
    assert_eq!(predictions(&folder, "rna/predictions.tsv"), predictions(&folder, "dna/predictions.tsv"));
    let notes = String::from_utf8(folder.read("rna/notes.tsv")).expect("text");
    assert!(notes.contains("U is read as T"), "{notes}");
    // `--original-alphabet` drops codons with U, as the original does (test vectors in virnucpro.md), so every
    // frame is open.
    folder
        .run(&[&["predict", "rna.fa", "--original-alphabet"][..], &words, &["as_original"]].concat())
        .assert_code(0);
    let read = |name: &str| String::from_utf8(folder.read(name)).expect("text");
    let frames = |name: &str| read(name).matches('>').count();
    assert_eq!(frames("as_original/protein.faa"), 12, "six frames of both records");
    assert!(frames("rna/protein.faa") < 12);
    assert!(read("as_original/nucleotide.fa").contains('U') && !read("rna/nucleotide.fa").contains('U'));
}

#[test]
fn proteins_are_refused_by_the_name_of_the_first() {
    let folder = Folder::new("proteins_for_predict");
    let protein = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV";
    folder.write("first.faa", format!(">prot_1 x\n{protein}\n"));
    folder.write("later.fa", format!(">fine\n{}\n>prot_2\n{protein}\n", "ACGT".repeat(50)));
    for (file, name, line) in [("first.faa", "prot_1", "line 1"), ("later.fa", "prot_2", "line 3")] {
        let ran = folder.run(&["predict", file, "-o", "out", "-q"]);
        let text = ran.assert_code(1).stderr();
        for part in [file, name, line, "no nucleotide sequence", "plimsoll embed"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    assert!(!folder.path("out/predictions.tsv").exists());
}

#[test]
fn a_folder_stands_for_its_sequence_files() {
    let folder = Folder::new("folder_of_samples");
    let reads = String::from_utf8(fs::read(golden(READS)).expect("golden")).expect("text");
    let half = reads.match_indices("\n>").nth(2).expect("several records").0 + 1;
    folder.write("samples/b.fasta", &reads[half..]);
    folder.write("samples/a.fa", &reads[..half]);
    folder.write("samples/README.txt", "no sequences");
    folder.write("samples/.fa", "a hidden file without a name");
    folder.run(&["predict", "samples", "--weights", &golden(""), "-q"]).assert_code(0);
    folder.run(&["predict", &golden(READS), "--weights", &golden(""), "-q", "-o", "whole"]).assert_code(0);
    let got = folder.read("samples_plimsoll/predictions.tsv");
    let wanted = folder.read("whole/predictions.tsv");
    assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&wanted));
    folder.write("nothing/README.txt", "no sequences");
    let ran = folder.run(&["predict", "nothing", "-q"]);
    assert!(ran.assert_code(1).stderr().contains("a folder without sequence files"), "{}", ran.stderr());
}

#[test]
fn a_gpu_flag_under_auto_is_a_warning_where_the_cpu_computes() {
    let folder = Folder::new("gpu_flag_auto");
    let words =
        ["predict", &golden(READS), "--weights", &golden(""), "-o", "out", "--no-cuda-streams", "--json"];
    let ran = folder.run(&words);
    let record: serde_json::Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
    if record["device"].as_str().is_some_and(|name| name.contains("NVIDIA")) {
        println!("skipped: this machine has a GPU");
        return;
    }
    assert_eq!(record["settings"]["flags_without_effect"], serde_json::json!(["--no-cuda-streams"]));
    let warnings = ran.stderr().matches("these flags have no effect: --no-cuda-streams").count();
    assert_eq!(warnings, 1, "{}", ran.stderr());
}

#[test]
fn mates_and_samples_that_share_names_are_all_computed() {
    let folder = Folder::new("mates");
    let reads = String::from_utf8(fs::read(golden(READS)).expect("golden")).expect("text");
    let records: Vec<&str> = reads.split_inclusive("\n>").map(|r| r.trim_matches(['>', '\n'])).collect();
    let sequence = |i: usize| records[i].split_once('\n').expect("a title and letters").1;
    // Two files with equal record names but different sequences, and one file with the four sequences under
    // unique names.
    folder.write("r1.fa", format!(">x\n{}\n>y\n{}\n", sequence(0), sequence(1)));
    folder.write("r2.fa", format!(">x\n{}\n>y\n{}\n", sequence(2), sequence(3)));
    folder.write(
        "apart.fa",
        format!(">x\n{}\n>y\n{}\n>x#2\n{}\n>y#2\n{}\n", sequence(0), sequence(1), sequence(2), sequence(3)),
    );
    let words = ["--weights", &golden(""), "--precision", "f32", "-q", "-o"];
    folder.run(&[&["predict", "r1.fa", "r2.fa"][..], &words, &["both"]].concat()).assert_code(0);
    folder.run(&[&["predict", "apart.fa"][..], &words, &["apart"]].concat()).assert_code(0);
    for file in
        ["predictions.tsv", "windows.tsv", "prediction_results.txt", "prediction_results_highestscore.csv"]
    {
        let got = folder.read(&format!("both/{file}"));
        let wanted = folder.read(&format!("apart/{file}"));
        assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&wanted), "{file}");
    }
    let notes = String::from_utf8(folder.read("both/notes.tsv")).expect("text");
    assert!(notes.contains("x\tduplicate_id") && notes.contains("is named x#2"), "{notes}");
    // Shards give duplicate records the names that the whole run gives.
    for shard in ["1/2", "2/2"] {
        let out = format!("shard{}", &shard[..1]);
        folder
            .run(&[&["predict", "r1.fa", "r2.fa", "--shard", shard][..], &words, &[&out]].concat())
            .assert_code(0);
    }
    let merge = ["--merge", "shard1", "--merge", "shard2"];
    folder.run(&[&["predict", "r1.fa", "r2.fa"][..], &merge, &words, &["merged"]].concat()).assert_code(0);
    assert!(folder.read("merged/predictions.tsv") == folder.read("both/predictions.tsv"));
}

/// FASTA and FASTQ files of viral records have the original titles, letters (RNA stays RNA) and qualities; the
/// empty record is not among them.
#[test]
fn records_called_virus_keep_their_titles_letters_and_qualities() {
    let folder = Folder::new("hits");
    let bases = "ATGACCATGATTACGGATTCACTGGCCGTCGTTTTACAACGTCGTGACTGGGAAAACCCTGGC".repeat(2);
    let rna = bases.replace('T', "U");
    let quality = "I".repeat(bases.len());
    folder.write("in.fa", format!(">a  Some virus, [note=x]  \n{bases}\n>empty nothing here\n>b\n{rna}\n"));
    folder.write("in.fastq", format!("@a Some virus\n{bases}\n+\n{quality}\n"));
    let run = |input: &str, format: &str, out: &str| {
        let weights = golden("");
        let input = folder.path(input).display().to_string();
        let mut words =
            vec!["predict", &input, "--weights", &weights, "--threshold", "0", "--hits-format", format];
        words.extend(["--precision", "f32", "-o", out]);
        folder.run(&words)
    };
    let ran = run("in.fa", "fasta", "fasta");
    ran.assert_code(0);
    let hits = String::from_utf8(folder.read("fasta/virus.fna")).expect("text");
    let titles: Vec<&str> = hits.lines().filter(|line| line.starts_with('>')).collect();
    let table = String::from_utf8(folder.read("fasta/predictions.tsv")).expect("text");
    let score =
        |row: usize| table.lines().nth(row).and_then(|row| row.split('\t').nth(5)).expect("a score").to_owned();
    let expected = [
        format!(">a Some virus, [note=x] virus_score={} prediction=virus", score(1)),
        format!(">b virus_score={} prediction=virus", score(3)),
    ];
    assert_eq!(titles, expected);
    assert!(hits.contains("AUGACC") && hits.contains("ATGACC"), "letters are those of the input: {hits}");
    assert_eq!(table.lines().nth(2), Some("empty\t0\t0\t0\t0\tNA\tskipped"), "{table}");

    let ran = run("in.fastq", "fastq.gz", "fastq");
    ran.assert_code(0);
    let packed = std::fs::File::open(folder.path("fastq/virus.fastq.gz")).expect("there");
    let mut hits = String::new();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(packed), &mut hits).expect("gzip");
    let (title, rest) = hits.split_once('\n').expect("lines");
    assert!(title.starts_with("@a Some virus virus_score=") && title.ends_with(" prediction=virus"), "{title}");
    assert_eq!(rest, format!("{bases}\n+\n{quality}\n"));
    assert!(!folder.path("fastq/virus.fna").exists());

    let ran = run("in.fa", "fastq", "refused");
    let said = ran.assert_code(1).stderr();
    assert!(said.contains("in.fa") && said.contains("--hits-format fasta"), "{said}");
}

/// A message at the start if windows are longer than most genes, and at the end if no window has an open
/// reading frame.
#[test]
fn windows_that_no_open_reading_frame_fills_are_told_of() {
    let folder = Folder::new("long_windows");
    folder.write("in.fa", format!(">a\n{}\n", "TAGCTAACTGA".repeat(200)));
    let check = |length: &str, genes: bool| {
        let goldens = golden("");
        let words = ["predict", "in.fa", "--weights", &goldens, "--length", length, "--force", "-o", "out"];
        let ran = folder.run(&words);
        let said = ran.assert_code(0).stderr();
        assert_eq!(said.contains("longer than most genes"), genes, "{said}");
        assert!(said.contains("has an open reading frame"), "{said}");
    };
    check("500", false);
    check("2000", true);
}
