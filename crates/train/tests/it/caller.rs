//! Tests of training a caller: it learns, its checkpoints continue with equal bits, a pre-trained encoder is a start, and
//! bad requests are refused by name. Invariant: the data is generated, so that the tests need no genomes.

use crate::rig::Folder;
use plimsoll_runtime::{CallerModel, Device, Silent};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{Request, Resume, TrainError, TrainReport, open, train_with};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Writes 24 records of two classes, which use different codons, and the table of records.
pub fn genomes(folder: &Path) {
    // A multiplicative generator (Lehmer 1951), so that the data is the same everywhere.
    let mut state = 1_u64;
    let mut next = move |n: u64| {
        state = state * 48_271 % 2_147_483_647;
        state % n
    };
    let codons = [["GCC", "CTG", "GGC", "CGC", "GTG", "ACC"], ["GCA", "TTA", "GGA", "AGA", "GTA", "ACA"]];
    let (mut fasta, mut table) = (String::new(), "id\tsplit\tvirus\tgroup\n".to_owned());
    for record in 0..24 {
        let class = record % 2;
        let split = if record < 20 { "train" } else { "validation" };
        let name = ["other", "virus"][class];
        writeln!(table, "r{record}\t{split}\t{name}\tg{}", record / 4).expect("a string");
        writeln!(fasta, ">r{record}").expect("a string");
        for _ in 0..60 {
            fasta.push_str(codons[class][next(6) as usize]);
        }
        fasta.push('\n');
    }
    fs::write(folder.join("genomes.fa"), fasta).expect("written");
    fs::write(folder.join("records.tsv"), table).expect("written");
}

pub fn config(folder: &Path, flags: &str) -> Result<TrainConfig, TrainError> {
    let text = format!(
        "model: {{kind: caller, hidden: 16, layers: 1, heads: 2, intermediate: 24}}\n\
         data:\n  train: [{0}/genomes.fa]\n  labels: {0}/records.tsv\n\
         \x20 crops: {{shortest: 60, longest: 90, validation_windows: 20, validation_lengths: [90]}}\n\
         optimizer: {{kind: adamw, lr: 0.01}}\nbatch: {{tokens: 1440, micro_tokens: 720}}\n\
         run: {{steps: 12, evaluate_every: 6, threads: 1}}\nmemory: {{budget: 1GiB}}\n",
        folder.display()
    );
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    TrainConfig::parse(&text, "test", &flags)
}

pub const TASKS: &str = "model.tasks=[{\"name\":\"virus\",\"classes\":[other,virus]},{\"name\":\"group\",\"classes\":[g0,g1,g2,g3,g4,g5],\"weight\":0.5}]";

fn train(config: TrainConfig, output: &Path, resume: Resume) -> Result<TrainReport, TrainError> {
    let request = Request { config, output: output.to_owned(), resume };
    train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)
}

#[test]
fn a_caller_learns_and_its_checkpoint_is_a_model() {
    let folder = Folder::new("train-caller");
    genomes(&folder.0);
    let run = folder.0.join("run");
    let flags = format!(
        "{TASKS} run.steps=40 run.evaluate_every=20 data.crops.shuffled=0.1 data.crops.shuffled_class=other data.crops.substitutions=0.05"
    );
    train(config(&folder.0, &flags).expect("a configuration"), &run, Resume::Never).expect("trained");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let found = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let losses: Vec<f64> = found.filter_map(|line| line["validation_loss"].as_f64()).collect();
    // Chance is ln 2 = 0.69.
    assert!(losses.len() == 2 && losses[1] < 0.3 && losses[1] < losses[0], "{losses:?}");
    let model = CallerModel::open(&run.join("checkpoints/step-00000040")).expect("a caller");
    assert_eq!(model.config.logits(), 8);
}

/// A run that stops after a checkpoint and is resumed ends with the bytes of an unbroken run, in any number of threads.
#[test]
fn a_resumed_caller_has_the_bytes_of_an_unbroken_run() {
    let folder = Folder::new("train-caller-resume");
    genomes(&folder.0);
    let weights =
        |run: &Path| fs::read(run.join("checkpoints/step-00000012/model.safetensors")).expect("a checkpoint");
    let (whole, broken) = (folder.0.join("whole"), folder.0.join("broken"));
    let dropout = format!("{TASKS} model.dropout=0.1 data.crops.indels=0.01");
    train(config(&folder.0, &dropout).expect("a configuration"), &whole, Resume::Never).expect("trained");
    let short = format!("{dropout} run.steps=5 schedule.steps=12 run.save_every=5 data.workers=3");
    train(config(&folder.0, &short).expect("a configuration"), &broken, Resume::Never).expect("trained");
    let long = format!("{dropout} schedule.steps=12 run.save_every=5 data.workers=2");
    train(config(&folder.0, &long).expect("a configuration"), &broken, Resume::Auto).expect("resumed");
    assert!(weights(&whole) == weights(&broken), "the resumed run has other weights");
}

#[test]
fn a_pretrained_encoder_is_a_start() {
    let folder = Folder::new("train-caller-from");
    genomes(&folder.0);
    let (first, second) = (folder.0.join("first"), folder.0.join("second"));
    train(config(&folder.0, "").expect("a configuration"), &first, Resume::Never).expect("pre-trained");
    let checkpoint = first.join("checkpoints/step-00000012");
    let error = CallerModel::open(&checkpoint).err().expect("no tasks").to_string();
    assert!(error.contains("lists no tasks"), "{error}");
    let from = format!("model.from={}", checkpoint.display());
    let begun = config(&folder.0, &format!("{TASKS} {from} optimizer.lr=1e-12")).expect("a configuration");
    train(begun, &second, Resume::Never).expect("trained");
    let read = |run: &Path, tensor: &str| {
        let weights =
            plimsoll_data::weights::Weights::open(&run.join("checkpoints/step-00000012/model.safetensors"));
        let weights = weights.expect("weights");
        let n = weights.tensor(tensor).expect("a tensor").elements();
        let mut out = vec![0.0; n as usize];
        weights.read_f32(tensor, 0..n, &mut out).expect("read");
        out
    };
    let [a, b] = [&first, &second].map(|run| read(run, "layers.0.mlp.gate_up.weight"));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6), "the encoder was not taken over");
    // Another model than the pre-trained one is refused.
    let error = config(&folder.0, &format!("{TASKS} {from} model.layers=2")).expect_err("refused").to_string();
    assert!(error.contains("model.layers"), "{error}");
    // Classes of a task that the model has in another order.
    let from = format!("model.from={}", second.join("checkpoints/step-00000012").display());
    let flags = format!("model.tasks=[{{\"name\":\"virus\",\"classes\":[virus,other]}}] {from}");
    let other = config(&folder.0, &flags).expect("a configuration");
    let error = train(other, &folder.0.join("third"), Resume::Never).expect_err("refused").to_string();
    assert!(error.contains("the task virus") && error.contains("other, virus"), "{error}");
}

#[test]
fn bad_requests_are_refused_by_name() {
    let folder = Folder::new("train-caller-bad");
    genomes(&folder.0);
    for (flags, named) in [
        ("model.tasks=[{\"name\":\"virus\"}]", "model.tasks[0]"),
        ("model.tasks=[{\"name\":\"a.b\",\"classes\":[x,y]}]", "model.tasks[0]"),
        ("model.tasks=[{\"nam\":\"virus\",\"classes\":[x,y]}]", "model.tasks[0].nam"),
        ("model.tasks=[{\"name\":\"virus\",\"classes\":[x,y],\"weight\":0}]", "model.tasks[0].weight"),
        ("model.tasks=[{\"name\":\"v\",\"classes\":[x,y]},{\"name\":\"v\",\"classes\":[x,y]}]", "model.tasks"),
        ("model.norm=layer_norm", "of the section model"),
        ("model.experts.count=4", "of the section model"),
        ("data.longest=100", "of the section data"),
        ("data.validation=[x.fa]", "of the section data"),
        ("data.crops.shortest=95", "data.crops.shortest 95"),
        ("data.crops.shuffled=0.1", "data.crops.shuffled"),
        ("data.crops.shuffled_class=other", "data.crops.shuffled_class"),
        ("data.crops.shuffled=0.1 data.crops.shuffled_class=other", "must be a class of the first task"),
        ("run.evaluate_every=null", "validation_windows"),
        ("data.masking.fraction=0.5 model.tasks=[{\"name\":\"v\",\"classes\":[x,y]}]", "data.masking"),
        ("data.crops.levels=[{\"power\":0.5}]", "data.crops.levels"),
        ("data.crops.validation_lengths=[4]", "data.crops.validation_lengths"),
        ("run.epochs=2", "run.epochs"),
        ("model.kind=moe_lm model.hidden=16", "data.crops"),
        ("batch.micro_tokens=60", "data.crops.longest"),
    ] {
        let error = config(&folder.0, flags).map(|_| ()).expect_err(flags).to_string();
        assert!(error.contains(named), "{flags}: {error}");
    }
    // A class that the table has and the task lacks: the reader names file, line and column.
    let flags = "model.tasks=[{\"name\":\"virus\",\"classes\":[other,phage]}]";
    let run = config(&folder.0, flags).expect("a configuration");
    let error = train(run, &folder.0.join("run"), Resume::Never).expect_err("refused").to_string();
    assert!(error.contains("records.tsv") && error.contains("virus"), "{error}");
}
