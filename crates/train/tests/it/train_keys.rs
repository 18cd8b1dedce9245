//! Tests that every key of a training configuration has an observable effect: on the data settings, the
//! hyperparameters of an update, the training loop and its files, the plans, or the run record. Invariant: a
//! key without a row in [`ROWS`] fails, and so does a key that is never read, because effects are compared and
//! not configurations.

use crate::dynamic::changes_of;
use crate::train::{lines, names, seen};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Device, Failure, Silent};
use plimsoll_testing::{Folder, fixture};
use plimsoll_train::config::schema::{leaves, schema};
use plimsoll_train::config::{ModelKind, TrainConfig};
use plimsoll_train::schedule::{Rate, hyper};
use plimsoll_train::{Resume, TrainError, TrainRequest, feed, open, priced, train_with};
use std::path::Path;

/// The effect of a key, and thereby how it is observed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Changes {
    /// The settings with which the training data is opened.
    Data,
    /// The learning rate or another hyperparameter of an update.
    Update,
    /// Metrics, checkpoints or the record of a run of the toy model.
    Loop,
    /// The digest of the plans, or whether planning succeeds.
    Plan,
    /// [`Changes::Plan`] on a GPU.
    PlanOnGpu,
    /// The output folder of the run.
    Place,
    /// The losses of a run of a real model, or the choices in its record.
    Real,
    /// The sizes of the micro-steps of a run of a real model, while other processes take memory and give it back.
    Sizes,
}

use Changes::{Data, Loop, Place, Plan, PlanOnGpu, Real, Sizes, Update};

/// A head, with the defaults of the keys of [`BASE`] that it does not read.
const HEAD: &str = "model.kind=head data.proteins=[b] data.labels=c model.layers=4 model.intermediate=1024 \
     model.experts.count=8 data.longest=1024 batch.micro_tokens=auto";
const LABELLED: &str = "data.format=jsonl model.kind=esm2 model.experts.count=8 model.classes=2";
/// An encoder that is trained as a masked language model.
const MASKED: &str = "model.kind=esm2 model.experts.count=8";
const CALLER: &str = "model.kind=caller model.experts.count=8 data.longest=1024 data.crops.longest=20 \
     data.crops.shortest=10 data.crops.validation_lengths=[20] batch.tokens=96 batch.pack_tokens=48 batch.micro_tokens=48 data.labels=c \
     run.evaluate_every=2 model.tasks=[{\"name\":\"virus\",\"classes\":[other,virus]}]";
const SHUFFLED: &str = "model.kind=caller model.experts.count=8 data.longest=1024 data.crops.longest=20 \
     data.crops.shortest=10 data.crops.validation_lengths=[20] batch.tokens=96 batch.pack_tokens=48 batch.micro_tokens=48 data.labels=c \
     run.evaluate_every=2 model.tasks=[{\"name\":\"virus\",\"classes\":[other,virus]}] data.crops.shuffled=0.5 \
     data.crops.shuffled_class=virus";
const DISTILLED: &str = "model.kind=caller model.experts.count=8 data.longest=1024 data.crops.longest=20 \
     data.crops.shortest=10 batch.tokens=96 batch.pack_tokens=48 batch.micro_tokens=48 data.labels=c \
     model.tasks=[{\"name\":\"virus\",\"classes\":[other,virus]}] distillation.teacher=[FIXTURES/goldens/caller]";
/// A caller that is pre-trained.
const PRETRAINED: &str = "model.kind=caller model.experts.count=8 data.longest=1024 data.crops.longest=20 \
     data.crops.shortest=10 batch.tokens=96 batch.pack_tokens=48 batch.micro_tokens=48 data.labels=c data.masking.unit=nucleotide";
const IDS: &str = "data.format=bin model.vocabulary=9";
const SPARSE: &str = "model.attention.mask=block_sparse";
const CLASSIFIER: &str = "model.kind=esm2 model.hidden=40 model.heads=5 model.intermediate=160 model.experts.count=8 \
     model.from=FIXTURES/goldens/esm2 data.format=fasta model.classes=2 data.labels=c";
const LORA: &str = "model.kind=esm2 model.hidden=40 model.heads=5 model.intermediate=160 \
     model.experts.count=8 model.from=FIXTURES/goldens/esm2 data.format=fasta model.lora={}";
/// A protein model with DNA.
const PROTEINS_OF_DNA: &str = "model.kind=esm2 model.hidden=40 model.heads=5 model.intermediate=160 model.experts.count=8 \
     model.from=FIXTURES/goldens/esm2 data.format=fasta data.train=[FIXTURES/goldens/pipeline/reads.fa] data.allow_dna=true \
     data.longest=24 batch.pack_tokens=24 batch.micro_tokens=24 run.steps=1";
/// Sizes of the Llama in the fixtures where they differ from [`BASE`], which would contradict `model.from`.
// The fixture has no tokenizer of its own.
const LLAMA: &str =
    "model.kind=dense_lm model.vocabulary=40 model.intermediate=24 model.experts.count=8 data.tokenizer=bytes";
const ADAMW: &str = "optimizer.kind=adamw";
const ADAFACTOR: &str = "optimizer.kind=adafactor";
const STEPS: &str = "schedule.kind=step schedule.every=2";
const SCALED: &str = "schedule.scaling=sqrt schedule.reference_tokens=7";
const ENDS: &str = "schedule.kind=cosine";
const EVALUATES: &str = "run.evaluate_every=2";
const FP16: &str = "precision.kind=fp16";
const REAL: &str = "data.train=[FIXTURES/../examples/corpus.txt] data.longest=24 batch.pack_tokens=24 batch.micro_tokens=24 run.steps=2";

const DYNAMIC: &str = "data.train=[FIXTURES/../examples/corpus.txt] data.longest=8 batch.micro_tokens=auto \
     batch.tokens=64 run.steps=12 memory.dynamic.min_batch=8 memory.dynamic.adjustment_frequency=1";

/// (key, settings of both configurations, value of the key in the second configuration, effect).
const ROWS: &[(&str, &str, &str, Changes)] = &[
    ("batch.micro_tokens", "", "16", Plan),
    ("batch.pack_tokens", "", "4", Loop),
    ("batch.sequences", "", "3", Plan),
    ("batch.tokens", "", "48", Loop),
    ("data.allow_dna", PROTEINS_OF_DNA, "false", Real),
    ("data.bin_end", IDS, "5", Data),
    ("data.bin_type", IDS, "u32", Data),
    ("data.crops.indels", CALLER, "0.01", Data),
    ("data.crops.levels", CALLER, "[{\"column\":\"group\",\"power\":0.5}]", Data),
    ("data.crops.longest", CALLER, "16", Data),
    ("data.crops.shortest", CALLER, "12", Data),
    ("data.crops.shuffled", SHUFFLED, "0.1", Data),
    ("data.crops.shuffled_class", SHUFFLED, "other", Data),
    ("data.crops.substitutions", CALLER, "0.1", Data),
    ("data.crops.validation_lengths", CALLER, "[15]", Data),
    ("data.crops.validation_windows", CALLER, "7", Data),
    ("data.document", "", "line", Data),
    ("data.end_token", "", "end", Data),
    ("data.field", "data.format=jsonl", "body", Data),
    ("data.format", "", "jsonl", Data),
    ("data.label_field", LABELLED, "class", Data),
    (
        "data.labels",
        "data.format=fasta model.kind=esm2 model.experts.count=8 model.classes=2",
        "classes.tsv",
        Data,
    ),
    ("data.longest", "", "4", Plan),
    ("data.longest_document", "", "1000", Data),
    ("data.masking.fraction", MASKED, "0.3", Data),
    ("data.masking.mask", MASKED, "0.5", Data),
    ("data.masking.random", MASKED, "0.2", Data),
    ("data.masking.span", PRETRAINED, "4", Data),
    ("data.masking.unit", PRETRAINED, "token", Data),
    ("data.prefetch", "", "5", Data),
    ("data.proteins", HEAD, "[d]", Data),
    ("data.separator", "data.document=separated data.separator=x", "y", Data),
    ("data.shuffle_buffer", "", "7", Data),
    ("data.shuffle_bytes", "", "7", Data),
    ("data.split_seed", EVALUATES, "7", Data),
    ("data.strict", "", "true", Data),
    ("data.tensors", HEAD, "'*.mean'", Data),
    ("data.tokenizer", "", "tokenizer.json", Data),
    ("data.train", "", "[y.txt]", Data),
    ("data.truncate", LABELLED, "true", Data),
    ("data.validation", EVALUATES, "[y.txt]", Data),
    ("data.validation_fraction", EVALUATES, "0.5", Data),
    ("data.workers", "", "3", Data),
    ("distillation.teacher", CALLER, "[FIXTURES/goldens/caller]", Plan),
    ("distillation.temperature", DISTILLED, "4", Plan),
    ("distillation.weight", DISTILLED, "0.25", Plan),
    ("loss.balance", "", "0.5", Plan),
    ("loss.router_z", "", "0.5", Plan),
    ("loss.z", "", "0.5", Plan),
    ("memory.budget", "", "100kB", Plan),
    ("memory.dynamic.adjustment_frequency", DYNAMIC, "3", Sizes),
    ("memory.dynamic.critical", DYNAMIC, "0.965", Sizes),
    ("memory.dynamic.emergency", DYNAMIC, "0.98", Sizes),
    ("memory.dynamic.max_batch", DYNAMIC, "32", Sizes),
    ("memory.dynamic.min_batch", DYNAMIC, "16", Sizes),
    ("memory.dynamic.profile", DYNAMIC, "aggressive", Sizes),
    ("memory.dynamic.smooth_transitions", DYNAMIC, "false", Sizes),
    ("memory.dynamic.target", DYNAMIC, "0.8", Sizes),
    ("memory.dynamic.warning", DYNAMIC, "0.94", Sizes),
    ("memory.loss_chunk", "", "7", Plan),
    ("memory.offload", ADAMW, "[optimizer]", PlanOnGpu),
    ("memory.offload_to", "optimizer.kind=adamw memory.offload=[optimizer]", "disk", PlanOnGpu),
    ("memory.remat", "", "full", Plan),
    ("memory.remat_every", "memory.remat=every_n", "1", Plan),
    ("memory.remat_layers", "memory.remat=full", "[1,1]", Plan),
    ("model.activation", "", "swiglu", Plan),
    ("model.attention.block", SPARSE, "32", Plan),
    ("model.attention.global", SPARSE, "2", Plan),
    ("model.attention.local", SPARSE, "2", Plan),
    ("model.attention.mask", "", "window", Plan),
    ("model.attention.window", "model.attention.mask=window", "7", Plan),
    ("model.bias", "", "false", Plan),
    ("model.class_names", LABELLED, "[host,virus]", Data),
    ("model.classes", CLASSIFIER, "3", Plan),
    ("model.dropout", "", "0.1", Plan),
    ("model.experts.capacity", "", "1.25", Plan),
    ("model.experts.count", "", "8", Plan),
    ("model.experts.renormalise", "", "false", Plan),
    ("model.experts.shared", "", "1", Plan),
    ("model.experts.top_k", "", "1", Plan),
    ("model.freeze_encoder", CLASSIFIER, "true", Plan),
    ("model.from", LLAMA, "FIXTURES/training/llama", Plan),
    ("model.heads", "", "2", Plan),
    ("model.hidden", "", "32", Plan),
    ("model.intermediate", "", "64", Plan),
    ("model.kind", "model.experts.count=8", "dense_lm", Plan),
    ("model.kv_heads", "", "2", Plan),
    ("model.layers", "", "3", Plan),
    ("model.lora.alpha", LORA, "4", Plan),
    ("model.lora.rank", LORA, "4", Plan),
    ("model.lora.targets", LORA, "[key]", Plan),
    ("model.norm", "", "rms_norm", Plan),
    ("model.norm_eps", "", "1e-6", Plan),
    ("model.position", "", "alibi", Plan),
    ("model.preset", "", "tiny", Plan),
    ("model.rope_theta", REAL, "10", Real),
    ("model.tasks", CALLER, "[{\"name\":\"virus\",\"classes\":[other,virus],\"weight\":0.5}]", Plan),
    ("model.tied_head", "", "true", Plan),
    ("model.vocabulary", IDS, "10", Data),
    ("optimizer.betas", ADAMW, "[0.9, 0.99]", Update),
    ("optimizer.clip_norm", "", "null", Plan),
    ("optimizer.decay", "", "all", Plan),
    ("optimizer.decay_exponent", ADAFACTOR, "0.7", Update),
    ("optimizer.ema", "", "0.9", Plan),
    ("optimizer.eps", ADAMW, "1e-6", Plan),
    ("optimizer.kind", "", "adamw", Plan),
    ("optimizer.lr", "", "0.5", Update),
    ("optimizer.momentum", "", "0.5", Plan),
    ("optimizer.nesterov", "", "true", Plan),
    ("optimizer.no_decay", "", "['*gate*']", Plan),
    ("optimizer.update_clip", ADAFACTOR, "2", Plan),
    ("optimizer.weight_decay", "", "0.5", Plan),
    ("precision.growth_interval", FP16, "2", Loop),
    ("precision.initial_scale", FP16, "16", Loop),
    ("precision.kind", "", "bf16", Plan),
    ("run.device", REAL, "cpu", Real),
    ("run.epochs", "", "1", Loop),
    ("run.evaluate_every", "", "3", Loop),
    ("run.evaluate_tokens", EVALUATES, "5", Loop),
    ("run.keep_best", EVALUATES, "false", Loop),
    ("run.keep_last", "run.save_every=1", "3", Loop),
    ("run.log_every", "", "2", Loop),
    ("run.max_tokens", "", "30", Loop),
    ("run.min_delta", "run.steps=12 run.evaluate_every=1 run.patience=2", "100", Loop),
    ("run.output", "", "elsewhere", Place),
    ("run.patience", "run.steps=12 run.evaluate_every=1 optimizer.lr=0.3", "1", Loop),
    ("run.save_every", "", "2", Loop),
    ("run.seed", "", "1", Data),
    ("run.steps", "", "3", Loop),
    ("run.tensorboard", "", "true", Loop),
    ("run.threads", "", "1", Plan),
    ("schedule.cycle", "schedule.kind=cosine_restarts", "3", Update),
    ("schedule.cycle_growth", "schedule.kind=cosine_restarts schedule.cycle=2", "2", Update),
    ("schedule.decay_shape", "schedule.kind=wsd schedule.decay_share=0.5", "linear", Update),
    ("schedule.decay_share", "schedule.kind=wsd", "0.5", Update),
    ("schedule.every", "schedule.kind=step", "3", Update),
    ("schedule.gamma", STEPS, "0.5", Update),
    ("schedule.kind", "", "linear", Update),
    ("schedule.min_ratio", ENDS, "0.5", Update),
    ("schedule.power", "schedule.kind=polynomial", "2", Update),
    ("schedule.reference_tokens", SCALED, "9", Update),
    ("schedule.scaling", SCALED, "linear", Update),
    ("schedule.steps", ENDS, "20", Update),
    ("schedule.unit", STEPS, "steps", Update),
    ("schedule.warmup", "", "2", Update),
];

const BASE: &str = "model: {hidden: 16, layers: 2, heads: 4, intermediate: 32, experts: {count: 4}}\n\
                    data: {train: [x.txt], longest: 2}\nbatch: {tokens: 24, pack_tokens: 8, micro_tokens: 8}\nrun: {steps: 6}\n\
                    memory: {budget: 2GiB}\noptimizer: {kind: sgd, lr: 0.01}\nschedule: {kind: constant}\n";

fn config(flags: &[String]) -> TrainConfig {
    TrainConfig::parse(BASE, "test", flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
}

/// Runs or plans a configuration as far as `changes` needs, and returns its observable effect as text.
fn look(changes: Changes, key: &str, c: &TrainConfig) -> Result<String, TrainError> {
    let bounds = plimsoll_data::train::PackLimits { tokens: 8, sequences: 1, longest: 2 };
    Ok(match changes {
        Data if c.model.kind == ModelKind::Head => format!("{:?}", feed::row_settings(c, 8)?),
        Data if c.model.kind == ModelKind::Caller => format!("{:?}", feed::crop_settings(c, bounds)?),
        Data => format!("{:?}", feed::settings(c, bounds, None)?),
        Update => {
            let rates: Vec<f64> = (0..8).map(|step| Rate::new(c).at(step, step / 2)).collect();
            format!("{rates:?} {:?}", hyper(c.optimizer.kind, &c.optimizer, 1.0, 3))
        }
        Loop => {
            let folder = Folder::new(&format!("train-key-{key}"));
            let seen = seen(&folder, c);
            format!("{seen} {:?} {}", names(&folder), folder.0.join("tensorboard").exists())
        }
        Plan => priced::found(c, &priced::target(c, "cpu")?, &mut Silent)?.program.digest()?,
        PlanOnGpu => priced::found(c, &priced::target(c, "h100")?, &mut Silent)?.program.digest()?,
        Place => c.folder(Path::new("run.yaml")).display().to_string(),
        Real => {
            let folder = Folder::new(&format!("train-key-{key}"));
            let request = TrainRequest { config: c.clone(), output: folder.0.clone(), resume: Resume::Never };
            let report =
                train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)?;
            format!("{:?} {}", lines(&folder), to_json(&report.run_record.choices))
        }
        Sizes => changes_of(&Folder::new(&format!("train-key-{key}")), c)?,
    })
}

/// `memory.remat` as a list of ops, and `memory.remat_layers`, determine the recomputed ops of the plan; an op
/// that the model does not have is refused.
#[test]
fn recomputation_by_op_and_layer() {
    let plan = |flags: &str| {
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let c = config(&flags);
        let found = priced::found(&c, &priced::target(&c, "cpu").expect("a target"), &mut Silent)?;
        Ok::<_, TrainError>(to_json(&priced::report(&c, &found, vec![])?.recomputed))
    };
    let recomputed = |flags: &str| plan(flags).unwrap_or_else(|e| panic!("{flags}: {e}")).to_string();
    assert_eq!(recomputed("memory.remat=none"), "[]");
    let norms = recomputed("memory.remat=[layer_norm]");
    assert!(norms.contains("layers 0 to 1 2 layer_norm") && !norms.contains("linear"), "{norms}");
    let one = recomputed("memory.remat=[layer_norm] memory.remat_layers=[1,1]");
    assert_eq!(one, "[\"layer 1 2 layer_norm\"]");
    let full = recomputed("memory.remat=full memory.remat_layers=[0,0]");
    assert!(full.starts_with("[\"layer 0 ") && full.contains("linear") && !full.contains("layers"), "{full}");
    let error = plan("memory.remat=[glu]").expect_err("a model with GELU").to_string();
    assert!(error.contains("memory.remat") && error.contains("the model has no op `glu`"), "{error}");
}

#[test]
fn every_key_changes_something() {
    let known: Vec<String> = leaves(&schema()).into_iter().map(|leaf| leaf.path).collect();
    let rows: Vec<&str> = ROWS.iter().map(|(key, ..)| *key).collect();
    assert_eq!(rows, known, "a row for each key, in the order of the schema");
    let fixtures = fixture("").display().to_string();
    for &(key, with, value, changes) in ROWS {
        let flags = |text: &str| text.replace("FIXTURES/", &fixtures);
        let base: Vec<String> = with.split_whitespace().map(flags).collect();
        let changed = [&base[..], &[flags(&format!("{key}={value}"))]].concat();
        let before = look(changes, key, &config(&base)).unwrap_or_else(|e| panic!("{key}, {base:?}: {e}"));
        match look(changes, key, &config(&changed)) {
            Ok(after) => assert!(before != after, "{key} changes nothing"),
            // A budget that is too small has the effect that planning is refused.
            Err(error) if key == "data.allow_dna" => assert!(error.to_string().contains("DNA"), "{error}"),
            Err(error) => assert!(key == "memory.budget" && error.exit_code() == 4, "{key}={value}: {error}"),
        }
    }
}
