//! Tests that memory settings change nothing that is computed: for each kind of model a table of settings, whose runs have the
//! losses of one another. Invariant: runs with the same number of packs a micro-step have the same bits; runs with other
//! numbers differ by rounding alone.

use crate::caller::{TASKS, config as caller, genomes};
use crate::interop::labels;
use crate::train::lines;
use crate::training::{ESM, TINY, corpus, esm};
use plimsoll_runtime::{Device, Silent};
use plimsoll_testing::Folder;
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{EvaluationRequest, Resume, TrainReport, TrainRequest, evaluate, open, train_with};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest relative difference of two losses, or of a loss from the same one in other micro-steps.
const ROUNDING: f64 = 1e-6;

/// Settings of memory with the packs of a micro-step: those of the first are the reference of the others.
const SETTINGS: &[(u64, &str)] = &[
    (4, ""),
    (4, "memory.remat=full run.threads=1"),
    (4, "memory.budget=4GiB memory.remat=auto data.workers=3"),
    (2, ""),
    (2, "memory.remat=selective run.threads=1"),
    (1, ""),
    (1, "memory.remat=full"),
    (3, ""),
];

/// A kind of model: its name, its configuration and flags, and the tokens of a pack.
struct Kind {
    name: &'static str,
    text: String,
    flags: String,
    pack: u64,
}

fn run(config: TrainConfig, output: &Path) -> TrainReport {
    let request = TrainRequest { config, output: output.to_owned(), resume: Resume::Never };
    train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)
        .unwrap_or_else(|error| panic!("{}: {error}", output.display()))
}

/// The losses of all steps and evaluations, in their order.
fn losses(folder: &Folder) -> Vec<f64> {
    let keys = ["loss", "validation_loss", "balance_loss", "router_z_loss", "dropped"];
    let of = |line: &Value| keys.iter().filter_map(|key| line.get(key)?.as_f64()).collect::<Vec<f64>>();
    lines(folder).iter().flat_map(of).collect()
}

/// The tensors of the newest checkpoint, of all files.
fn bits(report: &TrainReport) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = fs::read_dir(report.checkpoint.as_deref().expect("saved"))
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    files.iter().map(|path| fs::read(path).expect("a file")).collect()
}

fn compare(what: &str, found: &[f64], wanted: &[f64]) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let difference =
        |(found, wanted): (&f64, &f64)| (found - wanted).abs() / wanted.abs().max(f64::MIN_POSITIVE);
    let worst = found.iter().zip(wanted).map(difference).fold(0.0, f64::max);
    assert!(worst <= ROUNDING, "{what}: {worst:e}\n{found:?}\n{wanted:?}");
}

#[test]
fn settings_of_memory_change_nothing_that_is_computed() {
    let (text, data) = corpus("packs-text");
    let records = Folder::new("packs-records");
    genomes(&records.0);
    let table = Folder::new("packs-table");
    let of_caller = caller(&records.0, TASKS).expect("a configuration").to_yaml().expect("text");
    let experts = "loss.balance=0.05 loss.router_z=0.01 model.experts.capacity=1.1 model.dropout=0.1";
    let decoder = |name, flags: &str| Kind {
        name,
        text: TINY.to_owned(),
        flags: format!("{data} run.evaluate_every=5 {flags}"),
        pack: 64,
    };
    let encoder = |name, flags: &str| Kind {
        name,
        text: ESM.to_owned(),
        flags: esm(&format!("model.dropout=0.1 run.evaluate_every=5 data.longest=128 {flags}")),
        pack: 128,
    };
    let kinds = [
        decoder("experts", experts),
        decoder("dense", "model.kind=dense_lm model.experts.count=8 loss.z=1e-3 optimizer.clip_norm=null"),
        encoder("masked tokens", "optimizer.kind=sgd"),
        encoder("adapters", "model.lora.rank=2"),
        encoder("classes", &labels(&table)),
        Kind { name: "caller", text: of_caller, flags: "model.dropout=0.1".to_owned(), pack: 360 },
    ];
    for kind in &kinds {
        let Kind { name, text, flags, pack } = kind;
        let parse = |more: &str| {
            let flags: Vec<String> = format!("{flags} {more}").split_whitespace().map(str::to_owned).collect();
            TrainConfig::parse(text, "test", &flags).unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let all = format!("run.steps=10 batch.tokens={} batch.pack_tokens={pack}", 4 * pack);
        let mut seen: Vec<(u64, Folder, TrainReport)> = vec![];
        for &(packs, setting) in SETTINGS {
            let what = format!("{name}, {packs} packs a micro-step, {setting}");
            let folder = Folder::new("packs-run");
            let report = run(parse(&format!("{all} batch.micro_tokens={} {setting}", packs * pack)), &folder.0);
            if let Some((_, reference, _)) = seen.first() {
                compare(&what, &losses(&folder), &losses(reference));
            }
            if let Some((_, _, same)) = seen.iter().find(|(n, ..)| *n == packs) {
                assert!(bits(&report) == bits(same), "{what}: other bits");
            } else {
                seen.push((packs, folder, report));
            }
        }
        // Micro-steps that are chosen from the memory are one of these.
        let folder = Folder::new("packs-chosen");
        let report = run(parse(&format!("{all} batch.micro_tokens=auto memory.loss_chunk=64")), &folder.0);
        let chosen = report.run_record.choices["batch.micro_tokens"].as_u64().expect("a choice") / pack;
        compare(&format!("{name}, {chosen} packs a micro-step, chosen"), &losses(&folder), &losses(&seen[0].1));

        // Adapters are merged before they are evaluated.
        if *name == "adapters" {
            continue;
        }
        // An evaluation is the same number with any micro-batch, and that of the run.
        let last = lines(&seen[0].1).into_iter().rfind(|line| line.get("validation_loss").is_some());
        let wanted = last.expect("an evaluation")["validation_loss"].as_f64().expect("a loss");
        for packs in [1, 2, 3, 4] {
            let request = EvaluationRequest {
                checkpoint: seen[0].2.checkpoint.clone().expect("saved"),
                data: vec![],
                flags: vec![format!("batch.micro_tokens={}", packs * pack)],
            };
            let config = request.configuration(&mut Silent).expect("a configuration");
            let found = evaluate(&request, &config, Device::Cpu, &mut Silent).expect("evaluated");
            compare(&format!("{name}, an evaluation of {packs} packs"), &[found.loss], &[wanted]);
        }
    }
    drop(text);
}
