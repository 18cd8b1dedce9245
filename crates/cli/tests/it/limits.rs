//! Tests under limits of the operating system: address space, processes, open files. Invariant: a command that
//! exceeds a limit ends with exit code 1 or 4 and a message that names the limit; it neither panics nor is
//! ended by a signal.

use crate::harness::{Folder, example, golden};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// User id of nobody. The limit on processes does not apply to root.
const NOBODY: u32 = 65534;

/// The commands under test, each with a small input.
fn commands() -> Vec<Vec<String>> {
    let [reads, corpus, mini, esm] =
        [example("reads.fa"), example("corpus.txt"), example("moe-mini.yaml"), golden("esm2")];
    let proteins = golden("esm2/proteins.faa");
    let data = format!("data.train=[\"{corpus}\"]");
    let words = [
        vec!["predict", &reads, "-o", "predicted", "--force", "-q", "--threads", "4"],
        vec![
            "embed",
            "--model",
            &esm,
            &proteins,
            "-o",
            "e.npy",
            "--truncate",
            "--force",
            "-q",
            "--threads",
            "4",
        ],
        vec![
            "train",
            &mini,
            "-q",
            "--resume",
            "never",
            "-o",
            "trained",
            "--set",
            "model.hidden=64",
            "--set",
            "model.layers=1",
            "--set",
            "run.steps=1",
            "--set",
            "schedule.warmup=0",
            "--set",
            &data,
        ],
        vec!["plan", "--model", "facebook/esm2_t6_8M_UR50D"],
        vec!["plot", "results", "-o", "p.svg", "--force"],
        vec!["report", "results", "-o", "r.html", "--force"],
    ];
    words.into_iter().map(|words| words.into_iter().map(str::to_owned).collect()).collect()
}

/// Runs a command in `folder` with a limit set by `prlimit`, as the user nobody if `by_nobody`.
fn limited(folder: &Folder, limit: &str, words: &[String], by_nobody: bool) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(limit).arg(env!("CARGO_BIN_EXE_plimsoll")).args(words).current_dir(folder.path(""));
    command.env("HF_HOME", folder.path("hf")).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
    if by_nobody {
        command.uid(NOBODY);
    }
    command.output().expect("prlimit starts")
}

/// Runs every command under each value of a limit, and asserts that at least one command exceeded it.
fn check(test: &str, limit: &str, values: &[u64], by_nobody: bool) {
    if Command::new("prlimit").arg("--version").output().is_err() {
        println!("skipped: there is no prlimit here");
        return;
    }
    let folder = Folder::new(test);
    fs::set_permissions(folder.path(""), fs::Permissions::from_mode(0o777)).expect("ours");
    folder.run(&["predict", &example("reads.fa"), "-o", "results", "-q"]).assert_code(0);
    let by_nobody = by_nobody && limited(&folder, "--core=0", &["--version".to_owned()], true).status.success();
    let mut met = 0;
    for words in commands() {
        for value in values {
            let flag = format!("--{limit}={value}");
            let _ = fs::remove_dir_all(folder.path("trained"));
            let output = limited(&folder, &flag, &words, by_nobody);
            let code = output.status.code();
            let said = String::from_utf8_lossy(&output.stderr);
            // The dynamic loader failed before any code of this program ran.
            if said.contains("error while loading shared libraries") {
                continue;
            }
            assert!(matches!(code, Some(0 | 1 | 4)), "{flag} {words:?}: {:?}\n{said}", output.status);
            assert!(code == Some(0) || said.contains("ulimit -"), "{flag} {words:?} names no limit:\n{said}");
            met += u32::from(code != Some(0));
        }
    }
    // As root, no command can exceed the limit on processes.
    let counted = limit != "nproc" || by_nobody || !Path::new("/proc/1/root").exists();
    assert!(met > 0 || !counted, "no command met --{limit} in {values:?}");
}

/// Limits in bytes from barely enough to load the binary to more than enough.
#[test]
fn of_the_address_space() {
    let values = [56, 60, 66, 74, 84, 100, 120, 150, 200, 300].map(|mib: u64| mib << 20);
    check("limits_as", "as", &values, false);
}

#[test]
fn of_open_files() {
    check("limits_nofile", "nofile", &[4, 5, 6, 7, 8, 9, 10, 12, 16], false);
}

#[test]
fn of_processes() {
    check("limits_nproc", "nproc", &[1, 2, 3, 4, 5, 6, 8, 12], true);
}
