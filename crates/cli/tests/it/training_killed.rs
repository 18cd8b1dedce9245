//! Tests of `train` that is killed: the next run continues from the newest checkpoint, and its files equal
//! those of an uninterrupted run byte for byte.
//!
//! `PLIMSOLL_KILLS=50 cargo test -p plimsoll-cli --test it training_killed` runs more kills.

use crate::harness::Folder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Number of kills if `PLIMSOLL_KILLS` is not set.
const KILLS: u64 = 3;

const STEPS: usize = 40;

/// A mixture-of-experts model with all kinds of state: dropout, two micro-steps per step, 8-bit moments,
/// evaluations.
const CONFIG: &str = "
model:
  {kind: moe_lm, hidden: 32, layers: 2, heads: 2, intermediate: 32, experts: {count: 4, top_k: 2}, dropout: 0.1}
data: {train: [corpus.txt], document: paragraph, tokenizer: bytes, longest: 64, validation_fraction: 0.1}
optimizer: {kind: adamw8bit, lr: 3e-3}
schedule: {kind: cosine, warmup: 4}
memory: {loss_chunk: 64}
batch: {tokens: 256, micro_tokens: 128}
run: {steps: 40, save_every: 1, evaluate_every: 10, evaluate_tokens: 512, threads: 2}
";

/// Flags with which nothing stays in memory between its uses.
const OFFLOAD: [&str; 4] = [
    "--set",
    "memory.offload=[optimizer, gradients, parameters, activations]",
    "--set",
    "memory.offload_to=disk",
];

fn command(folder: &Folder, out: &str) -> Command {
    folder.command(&["train", "run.yaml", "-o", out, "--resume", "auto", "-q"])
}

fn finish(mut command: Command, out: &str) {
    let done = command.output().expect("it starts");
    assert!(done.status.success(), "{out}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Names of the complete checkpoints, oldest first.
fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("step-"))
        .collect();
    names.sort();
    names
}

/// All files of the newest checkpoint.
fn newest(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = checkpoints(folder).pop().expect("a checkpoint");
    let files = fs::read_dir(folder.join("checkpoints").join(name)).expect("a folder").flatten();
    let bytes = |file: fs::DirEntry| {
        (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).expect("bytes"))
    };
    files.map(bytes).collect()
}

/// The lines of steps and evaluations in metrics.jsonl, without times, rates and memory.
fn metrics(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let timeless = |mut line: Value| {
        for key in [
            "seconds",
            "tokens_per_second",
            "data_wait_seconds",
            "memory_bytes",
            "host_used_bytes",
            "status",
            "utilisation",
            "oom_risk",
        ] {
            line.as_object_mut().expect("an object").remove(key);
        }
        line
    };
    lines.filter(|line| line.get("stage").is_none()).map(timeless).collect()
}

/// Fractional part of (i + 1) times the golden ratio: spreads any number of points evenly over 0..1.
fn spread(i: u64) -> f64 {
    ((i + 1) as f64 * 0.618_033_988_749_894_9).fract()
}

#[test]
fn killed_at_any_moment_it_ends_with_the_same_bytes() {
    let folder = Folder::new("training-killed");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/corpus.txt");
    folder.write("corpus.txt", &fs::read(corpus).expect("the sample text")[..40_000]);
    folder.write("run.yaml", CONFIG);
    let start = Instant::now();
    finish(command(&folder, "whole"), "whole");
    let whole = start.elapsed();
    let wanted = newest(&folder.path("whole"));
    let lines = metrics(&folder.path("whole"));
    assert_eq!(lines.len(), STEPS + 4);
    let kills = std::env::var("PLIMSOLL_KILLS").map_or(KILLS, |n| n.parse().expect("a number of kills"));
    let mut broken = 0;
    let mut went_on = 0;
    let mut kill = 0;
    // A kill after the end of the run does not count.
    while broken < kills {
        assert!(kill < 20 * kills, "{broken} of {kill} runs were broken");
        let out = format!("killed{kill}");
        // Two kills, so that a resumed run is killed too. One of both keeps its states on disk, which changes no bit.
        for (k, part) in [spread(2 * kill), spread(2 * kill + 1) / 2.0].into_iter().enumerate() {
            let mut command = command(&folder, &out);
            if k as u64 == kill % 2 {
                command.args(OFFLOAD);
            }
            let mut child = command.spawn().expect("it starts");
            sleep(whole.mul_f64(part));
            child.kill().expect("killed");
            broken += u64::from(!child.wait().expect("it ended").success());
        }
        went_on += u64::from(!checkpoints(&folder.path(&out)).is_empty());
        // A checkpoint records the configuration that wrote it, so the last run has that of the whole one.
        finish(command(&folder, &out), &out);
        let found = newest(&folder.path(&out));
        assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{out}");
        for (name, bytes) in &wanted {
            assert!(&found[name] == bytes, "{out}: {name} differs");
        }
        assert_eq!(metrics(&folder.path(&out)), lines, "{out}");
        fs::remove_dir_all(folder.path(&out)).expect("removed");
        kill += 1;
    }
    println!("{kill} runs: {broken} kills before the end, {went_on} went on from a checkpoint");
    assert!(went_on > 0, "no kill came when there was a checkpoint");
}

/// (signal, exit code): every signal with which a terminal, a batch system or a user ends a run saves the step, and the same command
/// resumes. A run that nohup started ignores SIGHUP.
#[test]
fn signals_save_the_step() {
    let folder = Folder::new("training-signals");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/corpus.txt");
    folder.write("corpus.txt", &fs::read(corpus).expect("the sample text")[..40_000]);
    // Long enough that the signal comes before the end, and no checkpoint before it.
    folder.write("run.yaml", CONFIG.replace("steps: 40, save_every: 1", "steps: 100000, save_every: null"));
    let has_begun = |out: &str| {
        let metrics = folder.path(out).join("metrics.jsonl");
        fs::read_to_string(metrics).is_ok_and(|text| text.contains("\"loss\""))
    };
    let send = |signal: &str, id: u32| {
        let sent = Command::new("kill").args([&format!("-{signal}"), &id.to_string()]).status();
        assert!(sent.expect("kill starts").success());
    };
    for (signal, code) in [("HUP", 129), ("USR1", 138), ("USR2", 140), ("TERM", 143)] {
        let mut child = command(&folder, signal).spawn().expect("it starts");
        while !has_begun(signal) {
            sleep(Duration::from_millis(20));
        }
        send(signal, child.id());
        assert_eq!(child.wait().expect("it ended").code(), Some(code), "{signal}");
        assert_eq!(checkpoints(&folder.path(signal)).len(), 1, "{signal}");
    }
    let mut ignoring = Command::new("sh");
    let run = command(&folder, "nohup");
    ignoring.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
    ignoring.current_dir(run.get_current_dir().unwrap_or(&folder.path(".")));
    let mut child = ignoring.spawn().expect("it starts");
    while !has_begun("nohup") {
        sleep(Duration::from_millis(20));
    }
    send("HUP", child.id());
    sleep(Duration::from_millis(500));
    assert_eq!(child.try_wait().expect("a state"), None, "it goes on");
    send("USR1", child.id());
    assert_eq!(child.wait().expect("it ended").code(), Some(138));
}
