//! Every key of a training configuration changes something: the data, the learning rate, what the loop does and writes,
//! or what is planned. Invariant: a key without a row here fails, so none can be added that nobody reads.

use crate::rig::Folder;
use crate::train::{names, seen};
use plimsoll_run::train::config::schema::{leaves, schema};
use plimsoll_run::train::config::{ModelKind, TrainConfig};
use plimsoll_run::train::feed;
use plimsoll_run::train::schedule::{Rate, hyper};

/// What a key changes, and how that is looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Changes {
    /// The settings of the data.
    Data,
    /// The learning rate or what else an update is told.
    Update,
    /// Metrics, checkpoints or the record of a run of a toy.
    Loop,
    /// The graph or its plan: looked at where programs are made.
    Plan,
}

use Changes::{Data, Loop, Plan, Update};

const HEAD: &str = "model.kind=head data.proteins=[b] data.labels=c ";
const ENDS: &str = "schedule.kind=cosine ";
const EVALUATES: &str = "run.evaluate_every=2 ";

/// A key, what is set with it, another value, what it changes.
const ROWS: &[(&str, &str, &str, Changes)] = &[
    ("batch.micro_tokens", "", "12", Loop),
    ("batch.sequences", "", "3", Plan),
    ("batch.tokens", "", "48", Loop),
    ("data.bin_end", "data.format=bin model.vocabulary=9", "5", Data),
    ("data.bin_type", "data.format=bin model.vocabulary=9", "u32", Data),
    ("data.document", "", "line", Data),
    ("data.end_token", "", "end", Data),
    ("data.field", "data.format=jsonl", "body", Data),
    ("data.format", "", "jsonl", Data),
    ("data.label_field", "data.format=jsonl model.kind=esm2 model.classes=2", "class", Data),
    ("data.labels", "data.format=fasta model.kind=esm2 model.classes=2", "classes.tsv", Data),
    ("data.longest", "", "4", Plan),
    ("data.longest_document", "", "1000", Data),
    ("data.masking.fraction", "model.kind=esm2", "0.3", Data),
    ("data.masking.mask", "model.kind=esm2", "0.5", Data),
    ("data.masking.random", "model.kind=esm2", "0.2", Data),
    ("data.prefetch", "", "5", Data),
    ("data.proteins", HEAD, "[d]", Data),
    ("data.separator", "data.document=separated data.separator=x", "y", Data),
    ("data.shuffle_buffer", "", "7", Data),
    ("data.shuffle_bytes", "", "7", Data),
    ("data.split_seed", "", "7", Data),
    ("data.tensors", HEAD, "'*.mean'", Data),
    ("data.tokenizer", "", "tokenizer.json", Data),
    ("data.train", "", "[y.txt]", Data),
    ("data.truncate", "data.format=jsonl model.kind=esm2 model.classes=2", "true", Data),
    ("data.validation", "", "[y.txt]", Data),
    ("data.validation_fraction", "", "0.5", Data),
    ("data.workers", "", "3", Data),
    ("loss.balance", "", "0.5", Plan),
    ("loss.router_z", "", "0.5", Plan),
    ("loss.z", "", "0.5", Plan),
    ("memory.budget", "", "1GiB", Loop),
    ("memory.loss_chunk", "", "7", Plan),
    ("memory.remat", "", "full", Plan),
    ("memory.remat_every", "memory.remat=every_n", "3", Plan),
    ("model.activation", "", "swiglu", Plan),
    ("model.attention.block", "model.attention.mask=block_sparse", "32", Plan),
    ("model.attention.global", "model.attention.mask=block_sparse", "2", Plan),
    ("model.attention.local", "model.attention.mask=block_sparse", "2", Plan),
    ("model.attention.mask", "", "window", Plan),
    ("model.attention.window", "model.attention.mask=window", "7", Plan),
    ("model.bias", "", "false", Plan),
    ("model.classes", "model.kind=esm2 data.format=jsonl", "3", Data),
    ("model.dropout", "", "0.1", Plan),
    ("model.experts.capacity", "", "1.25", Plan),
    ("model.experts.count", "", "4", Plan),
    ("model.experts.renormalise", "", "false", Plan),
    ("model.experts.shared", "", "1", Plan),
    ("model.experts.top_k", "", "1", Plan),
    ("model.freeze_encoder", "model.kind=esm2 model.classes=2", "true", Plan),
    ("model.from", "", "folder", Plan),
    ("model.heads", "", "8", Plan),
    ("model.hidden", "", "512", Plan),
    ("model.intermediate", "", "512", Plan),
    ("model.kind", "", "esm2", Data),
    ("model.kv_heads", "", "2", Plan),
    ("model.layers", "", "2", Plan),
    ("model.lora.alpha", "model.kind=esm2 model.from=x model.lora={}", "4", Plan),
    ("model.lora.rank", "model.kind=esm2 model.from=x model.lora={}", "4", Plan),
    ("model.lora.targets", "model.kind=esm2 model.from=x model.lora={}", "[key]", Plan),
    ("model.norm", "", "rms_norm", Plan),
    ("model.norm_eps", "", "1e-6", Plan),
    ("model.position", "", "alibi", Plan),
    ("model.preset", "", "tiny", Plan),
    ("model.rope_theta", "", "5e5", Plan),
    ("model.tied_head", "", "true", Plan),
    ("model.vocabulary", "data.format=bin model.vocabulary=9", "10", Data),
    ("optimizer.betas", "optimizer.kind=adamw", "[0.9, 0.99]", Update),
    ("optimizer.clip_norm", "", "null", Plan),
    ("optimizer.decay", "", "all", Plan),
    ("optimizer.decay_exponent", "optimizer.kind=adafactor", "0.7", Update),
    ("optimizer.eps", "", "1e-6", Plan),
    ("optimizer.kind", "", "adamw", Update),
    ("optimizer.lr", "", "0.5", Update),
    ("optimizer.momentum", "", "0.5", Plan),
    ("optimizer.nesterov", "", "true", Plan),
    ("optimizer.no_decay", "", "['*gate*']", Plan),
    ("optimizer.update_clip", "optimizer.kind=adafactor", "2", Plan),
    ("optimizer.weight_decay", "", "0.5", Plan),
    ("precision.growth_interval", "precision.kind=fp16", "2", Loop),
    ("precision.initial_scale", "precision.kind=fp16", "16", Loop),
    ("precision.kind", "", "fp16", Loop),
    ("run.device", "", "cpu", Plan),
    ("run.epochs", "", "1", Loop),
    ("run.evaluate_every", "", "3", Loop),
    ("run.evaluate_tokens", EVALUATES, "5", Loop),
    ("run.keep_best", EVALUATES, "false", Loop),
    ("run.keep_last", "run.save_every=1", "3", Loop),
    ("run.log_every", "", "2", Loop),
    ("run.max_tokens", "", "30", Loop),
    ("run.output", "", "elsewhere", Plan),
    ("run.patience", "run.steps=12 run.evaluate_every=1 optimizer.lr=0.3", "1", Loop),
    ("run.save_every", "", "2", Loop),
    ("run.seed", "", "1", Data),
    ("run.steps", "", "3", Loop),
    ("run.threads", "", "1", Plan),
    ("schedule.cycle", "schedule.kind=cosine_restarts", "3", Update),
    ("schedule.cycle_growth", "schedule.kind=cosine_restarts schedule.cycle=2", "2", Update),
    ("schedule.decay_shape", "schedule.kind=wsd schedule.decay_share=0.5", "linear", Update),
    ("schedule.decay_share", "schedule.kind=wsd", "0.5", Update),
    ("schedule.every", "schedule.kind=step", "3", Update),
    ("schedule.gamma", "schedule.kind=step schedule.every=2", "0.5", Update),
    ("schedule.kind", "", "linear", Update),
    ("schedule.min_ratio", ENDS, "0.5", Update),
    ("schedule.power", "schedule.kind=polynomial", "2", Update),
    ("schedule.reference_tokens", "schedule.scaling=sqrt schedule.reference_tokens=7", "9", Update),
    ("schedule.scaling", "schedule.scaling=sqrt schedule.reference_tokens=7", "linear", Update),
    ("schedule.steps", ENDS, "20", Update),
    ("schedule.unit", "schedule.kind=step schedule.every=2", "steps", Update),
    ("schedule.warmup", "", "2", Update),
];

const BASE: &str = "data: {train: [x.txt], longest: 2}\nbatch: {tokens: 24, micro_tokens: 8}\nrun: {steps: 6}\nmemory: {budget: 2GiB}\n\
                    optimizer: {kind: sgd, lr: 0.01}\nschedule: {kind: constant}\n";

fn config(flags: &[String]) -> TrainConfig {
    TrainConfig::parse(BASE, "test", flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
}

/// What of a configuration is looked at.
fn look(changes: Changes, key: &str, flags: &[String]) -> String {
    let c = config(flags);
    let bounds = data::train::Bounds { tokens: 8, sequences: 1, longest: 2 };
    match changes {
        Data if c.model.kind == ModelKind::Head => format!("{:?}", feed::row_settings(&c, 8).expect("rows")),
        Data => format!("{:?}", feed::settings(&c, bounds, None).expect("documents")),
        Update => {
            let rates: Vec<f64> = (0..8).map(|step| Rate::new(&c).at(step, step / 2)).collect();
            format!("{rates:?} {:?}", hyper(c.optimizer.kind, &c.optimizer, 1.0, 3))
        }
        Loop => {
            let folder = Folder::new(&format!("train-key-{key}"));
            let seen = seen(&folder, &c);
            format!("{seen} {:?}", names(&folder))
        }
        // The configuration itself: what is planned from it is looked at beside the programs.
        Plan => c.to_yaml().expect("YAML"),
    }
}

#[test]
fn every_key_changes_something() {
    let known: Vec<String> = leaves(&schema()).into_iter().map(|leaf| leaf.path).collect();
    let rows: Vec<&str> = ROWS.iter().map(|(key, ..)| *key).collect();
    assert_eq!(rows, known, "a row for each key, in the order of the schema");
    for &(key, with, value, changes) in ROWS {
        let base: Vec<String> = with.split_whitespace().map(str::to_owned).collect();
        let changed = [&base[..], &[format!("{key}={value}")]].concat();
        assert!(look(changes, key, &base) != look(changes, key, &changed), "{key} changes nothing");
    }
}
