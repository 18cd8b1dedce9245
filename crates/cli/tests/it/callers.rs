//! Tests of `plimsoll predict --caller`: summary, flags, and runs that are killed.

use crate::harness::{Folder, golden};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Text of `count` reads of about 300 pseudo-random bases.
fn reads(count: usize) -> String {
    let mut state = 77u64;
    let mut base = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b"ACGT"[(state >> 62) as usize])
    };
    (0..count).map(|i| format!(">r{i}\n{}\n", (0..250 + i % 100).map(|_| base()).collect::<String>())).collect()
}

/// All files of a folder except run.json, which contains times.
fn results(folder: &Folder, out: &str) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder.path(out)).expect("a folder").flatten();
    let file = |file: fs::DirEntry| {
        (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).expect("bytes"))
    };
    files.map(file).filter(|(name, _)| name != "run.json").collect()
}

#[test]
fn the_summary_states_the_expected_errors() {
    let folder = Folder::new("caller-summary");
    folder.write("reads.fa", reads(40));
    let caller = golden("caller");
    let run = |words: &[&str]| {
        let ran = folder
            .run(&[&["predict", "reads.fa", "--caller", &caller, "--force", "-o", "out"], words].concat());
        ran.assert_code(0).stdout()
    };
    let said = run(&[]);
    for part in [
        "scored windows",
        "regions",
        "expected for 40 records of these lengths",
        "expected false calls",
        "preset default, threshold by length: 0.500 at 250, ",
        "; prevalence 0.5\n",
        "name  kind         length  score  fdr    reaches\n",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("open reading frames") && !said.contains(" to "), "{said}");
    // Between two measured thresholds there are bounds.
    let said = run(&["--threshold", "0.6", "--prevalence", "0.2"]);
    assert!(
        said.contains(" to ") && said.contains("threshold 0.600 at every length; prevalence 0.2\n"),
        "{said}"
    );
    let record: serde_json::Value =
        serde_json::from_str(&run(&["--preset", "conservative", "--json"])).expect("JSON");
    assert_eq!(record["calling"]["threshold"], "conservative");
    assert_eq!(record["models"]["caller"], caller);
    let rates = &record["calls"]["expected_fpr"];
    assert!(rates[0].as_f64().is_some_and(|rate| rate < 0.05) && rates[0] == rates[1], "{rates}");
}

#[test]
fn flags_that_do_not_fit_are_refused_by_name() {
    let folder = Folder::new("caller-flags");
    folder.write("reads.fa", reads(2));
    let caller = golden("caller");
    let goldens = golden("");
    let refused = |words: &[&str], says: &str| {
        let ran = folder.run(&[&["predict", "reads.fa", "-o", "out"], words].concat());
        assert!(ran.assert_code(1).stderr().contains(says), "{words:?}: {}", ran.stderr());
        assert!(!folder.path("out").exists());
    };
    for flag in [
        &["--preset", "relaxed"][..],
        &["--max-fdr", "0.1"],
        &["--prevalence", "0.1"],
        &["--paired"],
        &["--min-length", "100"],
        &["--max-n", "0.1"],
        &["--min-complexity", "0.1"],
    ] {
        let words = [&["--weights", &goldens], flag].concat();
        refused(&words, &format!("{} belongs to callers, and --weights selects VirNucPro's models", flag[0]));
    }
    // Without a model, these are refused too: the built-in caller would be used.
    for flag in [&["--original-alphabet"][..], &["--keep-intermediate"], &["--save-embeddings", "npy"]] {
        refused(flag, &format!("{} belongs to VirNucPro's models", flag[0]));
    }
    for flag in [
        &["--model-type", "500"][..],
        &["--original-alphabet"],
        &["--keep-intermediate"],
        &["--save-embeddings", "npy"],
    ] {
        let words = [&["--caller", &caller], flag].concat();
        refused(&words, &format!("{} belongs to VirNucPro's models", flag[0]));
    }
    for flag in [
        &["--weights", &goldens[..]][..],
        &["--head", "x.pth"],
        &["--dna-model", "x"],
        &["--protein-model", "x"],
    ] {
        let words = [&["--caller", &caller], flag].concat();
        refused(&words, &format!("--caller belongs to callers, and {} selects VirNucPro's models", flag[0]));
    }
    let with = |words: &[&'static str]| [&["--caller", &*caller], words].concat();
    refused(&with(&["--min-length", "99"]), "--min-length 99: a caller computes windows from 100 bases on");
    refused(&with(&["--preset", "relaxed", "--threshold", "0.5"]), "cannot be used with");
    refused(&with(&["--paired", "--per-input"]), "cannot be used with");
    refused(&with(&["--prevalence", "1"]), "above 0 and below 1");
    refused(&with(&["--max-fdr", "2"]), "from 0 to 1");
    refused(&with(&["--length", "99"]), "from 100 bases on");
    refused(&["--caller", "nowhere"], "nowhere/config.json");
    refused(&["--caller", &golden("esm2")], "model_type");
}

#[test]
fn standard_input_can_be_paired() {
    let folder = Folder::new("caller-stdin");
    let caller = golden("caller");
    let text = reads(6);
    let mates = (0..6).fold(text.clone(), |text, i| {
        text.replace(&format!(">r{i}\n"), &format!(">p{}/{}\n", i / 2, 1 + i % 2))
    });
    folder
        .run_with(&["predict", "-", "--caller", &caller, "--paired", "-o", "out"], mates.as_bytes())
        .assert_code(0);
    let table = String::from_utf8(folder.read("out/predictions.tsv")).expect("text");
    let names: Vec<&str> = table.lines().skip(1).filter_map(|line| line.split('\t').next()).collect();
    assert_eq!(names, ["p0", "p1", "p2"]);
    let ran = folder.run_with(&["predict", "-", "--caller", &caller, "--paired", "-o", "odd"], text.as_bytes());
    assert!(ran.assert_code(1).stderr().contains("is not its mate"), "{}", ran.stderr());
}

#[test]
fn killed_at_any_moment_it_ends_with_the_same_bytes() {
    let folder = Folder::new("caller-killed");
    folder.write("reads.fa", reads(3000));
    let caller = golden("caller");
    let command = |out: &str| {
        let flags = ["--tokens", "2048", "--commit-every", "0", "-q", "-o", out];
        folder.command(&[&["predict", "reads.fa", "--caller", &*caller], &flags[..]].concat())
    };
    let finish = |out: &str| {
        let done = command(out).output().expect("it starts");
        assert!(done.status.success(), "{out}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let start = Instant::now();
    finish("whole");
    let whole = start.elapsed();
    let wanted = results(&folder, "whole");
    let mut resumed = 0;
    for part in 1..8 {
        let out = format!("killed{part}");
        let mut child = command(&out).spawn().expect("it starts");
        std::thread::sleep(whole.mul_f64(f64::from(part) / 8.0) + Duration::from_millis(1));
        child.kill().expect("killed");
        child.wait().expect("it ended");
        finish(&out);
        assert!(results(&folder, &out) == wanted, "{out} differs");
        let record: serde_json::Value =
            serde_json::from_slice(&folder.read(&format!("{out}/run.json"))).expect("a run record");
        resumed += u64::from(record["windows_from_journal"].as_u64() > Some(0));
    }
    assert!(resumed > 0, "no kill came when something was kept");
}
