//! Tests of the flags of virnucpro-broad's `predict`: a script that calls it works with `plimsoll predict`, or
//! gets an error with the flag to use instead.

use crate::harness::{Folder, golden};
use serde_json::Value;

/// Effect of a flag of virnucpro-broad.
enum Here {
    /// The run equals a run with these arguments of `plimsoll`.
    Is(&'static [&'static str]),
    /// The run is refused, and the message names this flag of `plimsoll`.
    Refused(&'static str),
}
use Here::{Is, Refused};

/// All flags of virnucpro-broad's `predict`, in each of their forms. `HEAD` is replaced by the path of a head's
/// weights.
const FLAGS: &[(&[&str], Here)] = &[
    (&["--model-type", "500"], Is(&["--length", "500"])),
    (&["-m", "300"], Is(&["--length", "300"])),
    (&["-m", "300", "-e", "300"], Is(&["--length", "300"])),
    (&["-m", "300", "-e", "500"], Refused("--length 500")),
    (&["-m", "custom"], Refused("--head")),
    (&["-m", "custom", "--model-path", "HEAD"], Is(&["--head", "HEAD"])),
    (&["--model-path", "HEAD"], Is(&["--head", "HEAD"])),
    (&["-p", "HEAD"], Is(&["--head", "HEAD"])),
    (&["--expected-length", "300"], Is(&["--length", "300"])),
    (&["-e", "300"], Is(&["--length", "300"])),
    (&["--device", "cpu"], Is(&["--device", "cpu"])),
    (&["-d", "cpu"], Is(&["--device", "cpu"])),
    // A number that no GPU of any machine has.
    (&["-d", "4000"], Refused("--device cuda:4000")),
    (&["--gpus", "4000"], Refused("--device cuda:4000")),
    (&["--gpus", "first"], Refused("--device cuda:0,2")),
    (&["--batch-size", "256"], Refused("--tokens")),
    (&["-b", "256"], Refused("--tokens")),
    (&["--dnabert-batch-size", "2048"], Refused("--tokens")),
    (&["--esm-batch-size", "2048"], Refused("--tokens")),
    (&["--num-workers", "3"], Is(&["--dataloader-workers", "3"])),
    (&["-w", "3"], Is(&["--dataloader-workers", "3"])),
    (&["--dataloader-workers", "3"], Is(&["--dataloader-workers", "3"])),
    (&["--keep-intermediate"], Is(&["--keep-intermediate"])),
    (&["-k"], Is(&["--keep-intermediate"])),
    (&["--resume"], Is(&[])),
    (&["--resume", "--force"], Refused("--force")),
    (&["--force"], Is(&["--force"])),
    (&["-f"], Is(&["--force"])),
    (&["--force-resume"], Refused("--force")),
    (&["--skip-checkpoint-validation"], Refused("--force")),
    (&["--no-progress"], Is(&["--no-progress"])),
    (&["--parallel"], Is(&["--device", "auto"])),
    (&["--parallel", "-d", "cpu"], Refused("--device cuda")),
    (&["--v1-fallback"], Refused("--precision f32")),
    (&["--v1-attention"], Refused("--precision f32")),
    (&["--threads", "1"], Is(&["--threads", "1"])),
    (&["--merge-threads", "1"], Is(&["--threads", "1"])),
    (&["-t", "1"], Is(&["--threads", "1"])),
    (&["--verbose"], Is(&["--verbose"])),
    (&["--quiet"], Is(&["--quiet"])),
    (&["--pin-memory", "--device", "cpu"], Refused("--pin-memory")),
    (&["--expandable-segments", "--device", "cpu"], Refused("--expandable-segments")),
    (&["--cache-clear-interval", "7", "--device", "cpu"], Refused("--cache-clear-interval")),
    (&["--cuda-streams", "--device", "cpu"], Refused("--cuda-streams")),
    (&["--no-cuda-streams", "--device", "cpu"], Refused("--no-cuda-streams")),
    (&["--persistent-models"], Refused("--memory-budget")),
    (&["--no-persistent-models"], Refused("--memory-budget")),
    (&["--output-dir", "named"], Is(&["-o", "named"])),
];

/// Settings and identity in the record of a run, and the names of the files in its folder.
fn ran(folder: &Folder, words: &[&str]) -> (Value, Vec<String>) {
    let named = words.iter().any(|word| matches!(*word, "-o" | "--output-dir"));
    let output = if named { "named" } else { "out" };
    let _ = std::fs::remove_dir_all(folder.path(output));
    let to: &[&str] = if named { &[] } else { &["-o", "out"] };
    let base = ["predict", "read.fa", "--weights", "w"];
    let threads: &[&str] = if words.iter().any(|word| matches!(*word, "-t" | "--threads" | "--merge-threads")) {
        &[]
    } else {
        &["--threads", "2"]
    };
    folder.run(&[&base[..], to, threads, words].concat()).assert_code(0);
    let record: Value = serde_json::from_slice(&folder.read(&format!("{output}/run.json"))).expect("JSON");
    let mut settings = record["settings"].clone();
    // The budget is 80 % of the memory that is free when the run starts.
    settings["budget_bytes"] = Value::Null;
    let files = std::fs::read_dir(folder.path(output)).expect("a folder").flatten();
    let mut files: Vec<String> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    files.sort();
    (serde_json::json!([settings, record["identity"], record["models"]]), files)
}

#[test]
fn every_flag_works_or_names_ours() {
    let folder = Folder::new("virnucpro_flags");
    for model in ["dnabert_s", "esm2"] {
        for entry in std::fs::read_dir(golden(model)).expect("goldens").flatten() {
            let to = format!("w/{model}/{}", entry.file_name().to_string_lossy());
            folder.write(&to, std::fs::read(entry.path()).expect("read"));
        }
    }
    std::fs::copy(golden("head.pth"), folder.path("w/head.pth")).expect("copied");
    std::fs::copy(golden("head.pth"), folder.path("other.pth")).expect("copied");
    folder.write("read.fa", format!(">a\n{}\n", "ACGGCATTC".repeat(70)));
    for (words, here) in FLAGS {
        let with_head = |words: &[&'static str]| -> Vec<&'static str> {
            words.iter().map(|word| if *word == "HEAD" { "other.pth" } else { word }).collect()
        };
        let words = with_head(words);
        match here {
            Is(ours) => {
                assert_eq!(ran(&folder, &words), ran(&folder, &with_head(ours)), "{words:?}");
            }
            Refused(ours) => {
                let base = ["predict", "read.fa", "--weights", "w", "-o", "refused"];
                let said = folder.run(&[&base[..], &words].concat()).assert_code(1).stderr();
                assert!(said.contains(ours), "{words:?}: {said}");
                assert!(!folder.path("refused/run.json").exists(), "{words:?}");
            }
        }
    }
}

/// virnucpro-broad uses the head stored with its program. Here a head must be named, so that the built-in caller is not
/// used by mistake.
#[test]
fn a_model_type_alone_names_the_heads_file() {
    let folder = Folder::new("virnucpro_model_type");
    folder.write("read.fa", ">a\nACGT\n");
    let said = folder.run(&["predict", "read.fa", "-m", "300"]).assert_code(1).stderr();
    assert!(said.contains("--head 300_model.pth"), "{said}");
    let help = folder.run(&["predict", "--help"]).assert_code(0).stdout();
    for hidden in ["--model-type", "--gpus", "--parallel", "--resume", "--esm-batch-size"] {
        assert!(!help.contains(hidden), "{hidden}: {help}");
    }
}
