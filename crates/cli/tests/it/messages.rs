//! Snapshot tests of error messages and exit codes.

use crate::harness::{Folder, golden};

const READS: &str = ">a first\nACGTACGTTGCAACGTACGTTGCAGGATCCATTGCAACGT\n>b\nTTGCAACGTACGTTGCAGGATC\n";

fn check(name: &str, prepare: impl Fn(&Folder), words: &[&str], code: i32) -> Folder {
    let folder = Folder::new(name);
    prepare(&folder);
    let ran = folder.run(words);
    ran.assert_code(code).matches(name);
    folder
}

#[test]
fn a_missing_file() {
    check("missing_file", |_| {}, &["predict", "nowhere.fa"], 1);
}

#[test]
fn a_file_of_something_else() {
    let folder =
        check("not_fasta", |f| f.write("table.xlsx", b"PK\x03\x04\x14\0"), &["predict", "table.xlsx", "-q"], 1);
    assert!(!folder.path("table.xlsx_plimsoll/run.json").exists());
}

#[test]
fn a_truncated_gzip() {
    // A gzip member with one stored block that declares 200 bytes and has fewer.
    let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 200, 0, 55, 255];
    gzip.extend(READS.as_bytes());
    check("truncated_gzip", |f| f.write("reads.fa.gz", &gzip), &["predict", "reads.fa.gz", "-q"], 1);
}

#[test]
fn weights_of_another_shape() {
    let edit = |f: &Folder| {
        f.model("esm2", "config.json", |t| {
            t.replace("\"intermediate_size\": 160", "\"intermediate_size\": 80")
        });
        f.write("p.faa", ">a\nMKV\n");
    };
    check("wrong_shape", edit, &["embed", "--model", "esm2", "p.faa", "-o", "e.npy"], 1);
}

#[test]
fn weights_without_a_tensor() {
    let edit = |f: &Folder| {
        f.model("esm2", "config.json", |t| t.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"));
        f.write("p.faa", ">a\nMKV\n");
    };
    check("missing_tensor", edit, &["embed", "--model", "esm2", "p.faa", "-o", "e.npy"], 1);
}

/// A pickle that would create the file PWNED if it were executed.
const PAYLOAD: &[u8] = b"\x80\x02cos\nsystem\nX\x0b\0\0\0touch PWNED\x85R.";

fn malicious(name: &str, head: &[u8]) {
    let words =
        ["predict", "reads.fa", "--dna-model", &golden("dnabert_s"), "--protein-model", &golden("esm2")];
    let words = [&words[..], &["--head", "head.pth"]].concat();
    let folder = Folder::new(name);
    folder.write("reads.fa", READS);
    folder.write("head.pth", head);
    folder.run(&words).assert_code(1).matches(name);
    assert!(!folder.path("PWNED").exists(), "the payload was executed");
}

#[test]
fn a_pickle_that_runs_a_command() {
    malicious("pickle_in_zip", &zip("archive/data.pkl", PAYLOAD));
}

#[test]
fn a_bare_pickle_that_runs_a_command() {
    malicious("pickle_bare", PAYLOAD);
}

/// A zip file with one uncompressed entry.
fn zip(name: &str, bytes: &[u8]) -> Vec<u8> {
    let le16 = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let le32 = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let name = name.as_bytes();
    let size = bytes.len() as u32;
    // Version, flags, method, time, date; checksum and sizes; lengths of the name and the extra field.
    let common = [le16(&[20, 0, 0, 0, 0]), le32(&[0, size, size]), le16(&[name.len() as u16, 0])].concat();
    let local = [&b"PK\x03\x04"[..], &common, name, bytes].concat();
    let rest = [le16(&[0, 0, 0]), le32(&[0, 0])].concat();
    let central = [&b"PK\x01\x02"[..], &le16(&[20]), &common, &rest, name].concat();
    let place = [le32(&[central.len() as u32, local.len() as u32]), le16(&[0])].concat();
    [&local[..], &central, b"PK\x05\x06", &le16(&[0, 0, 1, 1]), &place].concat()
}

#[test]
fn a_hub_id_that_is_not_there() {
    let words = ["embed", "--model", "facebook/esm2_t99_1T", "p.faa", "-o", "e.npy"];
    check("unknown_hub_id", |f| f.write("p.faa", ">a\nMKV\n"), &words, 1);
}

#[test]
fn something_that_is_no_model() {
    let words = ["embed", "--model", "esm2", "p.faa", "-o", "e.npy"];
    check("not_a_model", |f| f.write("p.faa", ">a\nMKV\n"), &words, 1);
}

/// The bill's lines for the process depend on the binary and the machine, so the message is not compared with a
/// snapshot.
#[test]
fn a_budget_that_is_too_small() {
    let bundle = golden("");
    let folder = Folder::new("budget");
    folder.write("reads.fa", READS);
    let words = ["predict", "reads.fa", "--weights", &bundle, "--memory-budget", "1MB", "--threads", "1"];
    let said = folder.run(&words).assert_code(4).stderr();
    for part in [
        "error: refused: this step needs ",
        "the budget is 1 000 000 B (short by ",
        "process: code and tables ",
        "process: heap ",
        "process: thread stacks ",
        "  no smaller plan fits; give --memory-budget ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!folder.path("reads_plimsoll/run.json").exists());
}

#[test]
fn a_budget_that_is_too_small_for_the_tokens() {
    let esm = golden("esm2");
    let folder = Folder::new("budget_for_tokens");
    folder.write("p.faa", ">a\nMKV\n");
    let refused = |budget: &str| {
        let words = ["embed", "--model", &esm, "p.faa", "-o", "e.npy", "--tokens", "4096", "--threads", "1"];
        folder
            .run(&[&words[..], &["--memory-budget", budget, "--precision", "f32"]].concat())
            .assert_code(4)
            .stderr()
    };
    let said = refused("1kB");
    let needs = said.split("this step needs ").nth(1).and_then(|text| text.split(" B on").next());
    let needs: u64 =
        needs.map(|text| text.replace(' ', "")).and_then(|text| text.parse().ok()).expect("a number");
    let said = refused(&(needs - 2_000_000).to_string());
    assert!(said.contains("  what fits, cheapest first:  --tokens "), "{said}");
}

#[test]
fn flags_that_do_not_exist() {
    check("bad_flag", |_| {}, &["predict", "reads.fa", "--treshold", "0.5"], 1);
    check("bad_number", |_| {}, &["predict", "reads.fa", "--threshold", "5"], 1);
    check("bad_length", |_| {}, &["predict", "reads.fa", "--length", "2"], 1);
    check("bad_size", |_| {}, &["predict", "reads.fa", "--memory-budget", "much"], 1);
    check("bad_target", |_| {}, &["plan", "--model", "esm2_t6_8M_UR50D", "--target", "tpu"], 1);
    check("no_input", |_| {}, &["predict"], 1);
    check("no_command", |_| {}, &[], 1);
}

#[test]
fn flags_of_a_gpu_on_the_cpu() {
    let words = ["predict", "reads.fa", "--device", "cpu", "--no-cuda-streams"];
    check("gpu_flag", |f| f.write("reads.fa", READS), &words, 1);
}

#[test]
fn a_part_of_the_models() {
    check("half_a_bundle", |_| {}, &["predict", "reads.fa", "--dna-model", "dnabert_s"], 1);
    check(
        "part_of_a_bundle",
        |f| f.write("w/esm2/config.json", "{}"),
        &["predict", "reads.fa", "--weights", "w"],
        1,
    );
    check("no_bundle", |_| {}, &["predict", "reads.fa", "--weights", "nowhere"], 1);
}

#[test]
fn a_pass_that_does_not_exist() {
    check(
        "bad_pass",
        |_| {},
        &[
            "plan",
            "--model",
            "esm2_t6_8M_UR50D",
            "--precision",
            "f32",
            "--tokens",
            "64",
            "--dump-after",
            "loop",
        ],
        1,
    );
}

#[test]
fn results_that_cannot_be_named_so() {
    let esm = golden("esm2");
    let words = |out, pool| ["embed", "--model", &esm, "p.faa", "-o", out, "--pool", pool].map(str::to_owned);
    for (name, out, pool) in [("embed_suffix", "e.txt", "mean"), ("embed_tokens_npy", "e.npy", "tokens")] {
        let words = words(out, pool);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        check(name, |f| f.write("p.faa", ">a\nMKV\n"), &words, 1);
    }
}

#[test]
fn a_result_that_is_there() {
    let esm = golden("esm2");
    let prepare = |f: &Folder| {
        f.write("p.faa", ">a\nMKV\n");
        f.write("e.npy", "");
    };
    check("embed_there", prepare, &["embed", "--model", &esm, "p.faa", "-o", "e.npy"], 1);
}

#[test]
fn a_sequence_that_is_too_long() {
    let esm = golden("esm2");
    let prepare = |f: &Folder| f.write("p.faa", ">a\nMKV\n>b\nMKVMKVM\n");
    let words = ["embed", "--model", &esm, "p.faa", "-o", "e.npy", "--max-length", "6"];
    let folder = check("embed_too_long", prepare, &words, 1);
    assert!(!folder.path("e.npy").exists());
}

#[test]
fn help_is_a_success() {
    let folder = Folder::new("help");
    for words in [
        &["--help"][..],
        &["predict", "--help"],
        &["embed", "-h"],
        &["plan", "-h"],
        &["plot", "--help"],
        &["--version"],
    ] {
        let ran = folder.run(words);
        ran.assert_code(0);
        assert!(ran.stdout().contains("plimsoll") && ran.stderr().is_empty(), "{words:?}");
    }
    for flag in ["--expected-length", "--length"] {
        let ran = folder.run(&["predict", "nowhere.fa", flag, "300"]);
        assert!(ran.assert_code(1).stderr().contains("no such file"), "{}", ran.stderr());
    }
}
