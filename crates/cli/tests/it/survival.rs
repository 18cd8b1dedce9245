//! Tests of `predict` that is killed, interrupted by a signal, or fails on a full disk: the next run completes,
//! and its results equal those of an uninterrupted run byte for byte.
//!
//! `PLIMSOLL_KILLS=100 cargo test -p plimsoll-cli --test it survival::killed` runs more kills.

use crate::harness::{Folder, golden};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Number of kills if `PLIMSOLL_KILLS` is not set.
const KILLS: u64 = 10;

/// Arguments of a prediction of `reads.fa` into `out`, with small steps and a journal commit after each step.
fn words(out: &str) -> Vec<String> {
    let weights = golden("");
    let words = "predict reads.fa --tokens 502 --commit-every 0 --save-embeddings npy --keep-intermediate -q";
    let words = words.split(' ').map(str::to_owned);
    words.chain(["--weights".to_owned(), weights, "-o".to_owned(), out.to_owned()]).collect()
}

fn command(folder: &Folder, out: &str) -> Command {
    let words = words(out);
    folder.command(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Writes `reads.fa`, which takes about a second to predict.
fn reads(folder: &Folder) {
    let text = fs::read_to_string(golden("pipeline/reads.fa")).expect("reads");
    let many: String = (0..4).map(|i| text.replace('>', &format!(">r{i}_"))).collect();
    folder.write("reads.fa", many);
}

/// Runs the prediction to its end and returns its messages.
fn finish(folder: &Folder, out: &str) -> String {
    let done = command(folder, out).output().expect("it starts");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{out}: {:?}\n{said}", done.status);
    said
}

/// All files of a folder except run.json, which contains times.
fn results(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).expect("a folder").flatten().map(|file| file.path());
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = |path: &Path| fs::read(path).expect("bytes");
    files.map(|path| (name(&path), bytes(&path))).filter(|(name, _)| name != "run.json").collect()
}

fn same(folder: &Folder, out: &str, wanted: &BTreeMap<String, Vec<u8>>) {
    let found = results(&folder.path(out));
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{out}");
    for (name, bytes) in wanted {
        assert!(&found[name] == bytes, "{out}/{name} differs");
    }
}

/// Number of windows that the last run read from the journal.
fn kept(folder: &Folder, out: &str) -> u64 {
    let record: serde_json::Value =
        serde_json::from_slice(&folder.read(&format!("{out}/run.json"))).expect("a run record");
    record["windows_from_journal"].as_u64().expect("a count")
}

/// Pseudo-random numbers in 0..1 with 53 bits: splitmix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn part(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[test]
fn killed_at_any_moment_it_ends_with_the_same_bytes() {
    let folder = Folder::new("killed");
    reads(&folder);
    let start = Instant::now();
    finish(&folder, "whole");
    let whole = start.elapsed();
    let wanted = results(&folder.path("whole"));
    let kills = std::env::var("PLIMSOLL_KILLS").map_or(KILLS, |n| n.parse().expect("a number of kills"));
    let mut random = Random(1876);
    let mut went_on = 0;
    let mut broken = 0;
    for kill in 0..kills {
        let out = format!("killed{kill}");
        let mut child = command(&folder, &out).spawn().expect("it starts");
        sleep(whole.mul_f64(random.part()));
        child.kill().expect("killed");
        broken += u64::from(!child.wait().expect("it ended").success());
        finish(&folder, &out);
        same(&folder, &out, &wanted);
        went_on += u64::from(kept(&folder, &out) > 0);
        fs::remove_dir_all(folder.path(&out)).expect("removed");
    }
    println!("{kills} kills: {broken} before the end, {went_on} next starts went on behind kept windows");
    assert!(went_on > 0, "no kill of {kills} came when something was kept");
}

/// Waits until the journal of `out` has 20 kB, i.e. contains results.
fn wait_for_results(child: &mut Child, folder: &Folder, out: &str) {
    let path = folder.path(out).join("progress.journal");
    let start = Instant::now();
    while fs::metadata(&path).map_or(0, |facts| facts.len()) < 20_000 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing is kept");
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it was interrupted");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_signal_ends_the_step_and_says_how_to_go_on() {
    let folder = Folder::new("signals");
    reads(&folder);
    finish(&folder, "whole");
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let mut child = command(&folder, signal).spawn().expect("it starts");
        wait_for_results(&mut child, &folder, signal);
        let sent = Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status();
        assert!(sent.expect("kill is there").success());
        let output = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("interrupted") && said.contains("the same command resumes the run"), "{said}");
        let left: Vec<String> = results(&folder.path(signal)).into_keys().collect();
        assert_eq!(left, ["progress.journal"], "only what is finished stays");
        finish(&folder, signal);
        assert!(kept(&folder, signal) > 0);
        same(&folder, signal, &results(&folder.path("whole")));
    }
}

#[test]
fn an_embedding_that_is_interrupted_leaves_its_journal() {
    let folder = Folder::new("embedding");
    let model = golden("esm2");
    let many: String = (0..20_000).map(|i| format!(">p{i}\n{}\n", "MKVLAAGIVG".repeat(20))).collect();
    folder.write("p.faa", many);
    let words = ["embed", "--model", &model, "p.faa", "-o", "out/e.npy", "--tokens", "512", "-q"];
    fs::create_dir(folder.path("out")).expect("a folder");
    let mut child = folder.command(&words).spawn().expect("it starts");
    let start = Instant::now();
    while results(&folder.path("out")).values().map(Vec::len).sum::<usize>() < 100_000 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing is written");
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it was interrupted");
        sleep(Duration::from_millis(1));
    }
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(sent.expect("kill is there").success());
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(143), "{said}");
    assert!(said.contains("the same command continues after them"), "{said}");
    let left = results(&folder.path("out"));
    assert_eq!(left.keys().collect::<Vec<_>>(), ["e.npy.journal"], "half a result stays");
}

/// Simulates a full disk by a limit on the size of files, so that a write fails in the middle of a journal block.
#[test]
fn a_full_disk_is_said_and_nothing_kept_is_lost() {
    let folder = Folder::new("full");
    reads(&folder);
    finish(&folder, "whole");
    // `ulimit -f` counts blocks of 512 or 1024 bytes, depending on the shell.
    for limit in [20, 60, 120] {
        let out = format!("full{limit}");
        let plain = command(&folder, &out);
        let program = plain.get_program().to_string_lossy().into_owned();
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        let mut limited = Command::new("sh");
        limited.args(["-c", &script, "sh", &program]).args(plain.get_args());
        limited.current_dir(folder.path("")).env("HF_HOME", folder.path("hf"));
        let output = limited.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&out) && said.contains("cannot be written"), "{said}");
        assert!(!folder.path(&out).join("predictions.tsv").exists());
        finish(&folder, &out);
        same(&folder, &out, &results(&folder.path("whole")));
    }
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let folder = Folder::new("lock");
    reads(&folder);
    let mut first = command(&folder, "out").spawn().expect("it starts");
    wait_for_results(&mut first, &folder, "out");
    let second = command(&folder, "out").output().expect("it starts");
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("another run is writing"), "{said}");
    // The lock of a killed process is released.
    first.kill().expect("killed");
    first.wait().expect("it ended");
    finish(&folder, "out");
}
