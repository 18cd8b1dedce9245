//! Tests that the peak memory of a training process is within the planned memory: arena, data, and memory
//! reserved for the process. Invariant: the peak of the binary is measured by the kernel (VmHWM).

use crate::harness::{Folder, example};
use serde_json::Value;
use std::fs;

/// Trains examples/moe-mini.yaml with further settings; returns the run record.
fn run(name: &str, more: &[&str]) -> Value {
    let folder = Folder::new(name);
    folder.write("run.yaml", fs::read(example("moe-mini.yaml")).expect("the example"));
    let data = format!("data.train=[{}]", example("corpus.txt"));
    let base = [&data, "schedule.warmup=0", "run.steps=2", "run.evaluate_every=2", "run.evaluate_tokens=300"];
    let mut words = vec!["train", "run.yaml", "-o", "out", "-q"];
    for value in base.iter().chain(more) {
        words.extend(["--set", value]);
    }
    folder.run(&words).assert_code(0);
    serde_json::from_slice(&folder.read("out/run.json")).expect("a record")
}

#[test]
fn a_process_takes_what_was_planned() {
    for (name, more) in [
        ("training-memory-small", &["model.hidden=32", "model.layers=1", "batch.micro_tokens=1024"][..]),
        (
            "training-memory-deep",
            &["model.hidden=16", "model.intermediate=16", "model.layers=24", "data.longest=32"],
        ),
        ("training-memory-mini", &["batch.tokens=512", "precision.kind=bf16"]),
        ("training-memory-text", &["batch.tokens=512", "model.hidden=32", "run.threads=4", "data.workers=4"]),
    ] {
        let record = run(name, more);
        let number = |value: &Value| value.as_u64().expect("bytes");
        let stages = record["memory"].as_array().expect("stages");
        let measured = number(&stages.last().expect("a stage")["peak_bytes"]);
        let planned = number(&record["peak_bytes"]);
        let data: u64 = record["plan"]["host"].as_object().expect("lines").values().map(number).sum();
        let reserved = number(&record["plan"]["ledger"]["reserved: process"]);
        println!("{name}: {measured} B of {planned} B, of which {reserved} B reserved and {data} B data");
        assert!(measured <= planned, "{name}: {measured} B, planned {planned} B");
        assert!(measured > planned - reserved - data, "{name}: {measured} B are less than the arena");
    }
}
