//! End-to-end tests of training real models. Invariant: recomputation, the number of threads, interruption of
//! the run, and the fusion of a single micro-step with the update do not change a bit of the weights.

use crate::train::{RecordingObserver, bits, lines};
use plimsoll_data::weights::{FileDType, StoredAs, TensorData, Weights, write_safetensors};
use plimsoll_graph::Bytes;
use plimsoll_runtime::{Device, Failure, Level, Observer, Progress, Silent};
use plimsoll_setting::Setting;
use plimsoll_testing::{Folder, fixture};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::schedule::hyper;
use plimsoll_train::{
    Ended, MicroStepScalars, OpenedModel, Resume, TrainError, TrainReport, TrainRequest, open, plan_of, priced,
    train_with,
};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Configuration of a tiny mixture-of-experts model, whose steps take a few milliseconds.
pub const TINY: &str = "
model:
  {kind: moe_lm, hidden: 32, layers: 2, heads: 2, intermediate: 32, experts: {count: 4, top_k: 2}}
data: {document: paragraph, tokenizer: bytes, longest: 64, workers: 1}
optimizer: {kind: adamw, lr: 3e-3}
schedule: {kind: constant, warmup: 4}
memory: {loss_chunk: 64}
batch: {tokens: 256, micro_tokens: 128}
run: {steps: 12, threads: 2}
";

/// Writes the first 40 000 bytes of the sample text to a folder; returns the folder, and the flag for `data.train`.
pub fn corpus(name: &str) -> (Folder, String) {
    let folder = Folder::new(name);
    let text = fs::read(root("examples/corpus.txt")).expect("the sample text");
    let path = folder.write("corpus.txt", &text[..40_000]);
    (folder, format!("data.train=[{}]", path.display()))
}

pub fn root(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

pub fn try_train(
    output: &Path,
    text: &str,
    flags: &str,
    ear: &mut RecordingObserver,
) -> Result<TrainReport, TrainError> {
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    let config = TrainConfig::parse(text, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"));
    let request = TrainRequest { config, output: output.to_owned(), resume: Resume::Auto };
    train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), ear)
}

pub fn train(output: &Path, text: &str, flags: &str) -> TrainReport {
    try_train(output, text, flags, &mut RecordingObserver::default()).unwrap_or_else(|e| panic!("{flags}: {e}"))
}

/// The model and state tensors of the newest checkpoint, without the state of the loop.
fn tensors(report: &TrainReport) -> (Vec<u8>, Vec<u8>) {
    let (model, state, _) = bits(report);
    (model, state)
}

/// Names and values of all floating-point tensors of a file or folder, sorted by name.
pub fn values(folder: &Path) -> Vec<(String, Vec<f32>)> {
    let weights = Weights::open(folder).expect("weights");
    let read = |(name, elements): (String, u64)| {
        let mut values = vec![0.0; elements as usize];
        weights.read_f32(&name, 0..elements, &mut values).expect("a tensor");
        (name, values)
    };
    let mut all: Vec<_> = weights
        .tensors()
        .filter(|tensor| tensor.dtype().is_float())
        .map(|tensor| (tensor.name().to_owned(), tensor.shape().iter().product()))
        .map(read)
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn losses(folder: &Folder) -> Vec<f64> {
    lines(folder).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn a_broken_run_has_the_bits_of_a_whole_one() {
    let (_text, data) = corpus("training-resume");
    for kind in
        ["adamw", "adamw8bit", "adamw optimizer.ema=0.9", "sgd optimizer.ema=0.9 optimizer.clip_norm=null"]
    {
        let flags = format!("{data} optimizer.kind={kind} model.dropout=0.1 run.evaluate_every=4");
        let whole = Folder::new("training-whole");
        let broken = Folder::new("training-broken");
        let wanted = train(&whole.0, TINY, &flags);
        assert_eq!((wanted.steps, wanted.ended), (12, Ended::Steps));
        let mut ear = RecordingObserver::until(6);
        let error = try_train(&broken.0, TINY, &flags, &mut ear).expect_err("stopped");
        assert_eq!(error.exit_code(), 143, "{error}");
        let found = train(&broken.0, TINY, &flags);
        assert_eq!(found.steps, 6);
        assert!(bits(&found) == bits(&wanted), "{kind}: the checkpoints differ");
        assert_eq!(lines(&broken), lines(&whole), "{kind}");
        assert!(lines(&whole).iter().any(|line| line["micro_steps"] == json!(2)));
    }
}

/// Auxiliary losses change what is minimized, not what `loss` and `validation_loss` report.
#[test]
fn losses_are_cross_entropy_alone() {
    let (_text, data) = corpus("training-auxiliary");
    let still = "run.steps=1 schedule.warmup=0 optimizer.lr=1e-30 run.evaluate_every=1";
    let run = |name: &str, flags: &str| {
        let folder = Folder::new(name);
        train(&folder.0, TINY, &format!("{data} {still} {flags}"));
        let lines = lines(&folder);
        let of = |key: &str| lines.iter().find_map(|line| line.get(key)?.as_f64());
        ["loss", "validation_loss", "z_loss", "balance_loss", "router_z_loss"].map(of)
    };
    let [loss, validation, ..] = run("training-no-z", "loss.balance=0");
    let weights = "loss.z=0.1 loss.balance=0.5 loss.router_z=0.25";
    let found = run("training-z", weights);
    assert_eq!([loss, validation], found[..2], "cross-entropy alone");
    // Expected for an untrained model: logits near 0 for 259 classes, and four experts with about equal loads.
    let z = 0.1 * 259f64.ln().powi(2);
    let balance = 0.5;
    let router_z = 0.25 * 4f64.ln().powi(2);
    for (found, wanted) in found[2..].iter().zip([z, balance, router_z]) {
        let found = found.expect("a column");
        assert!((found / wanted - 1.0).abs() < 0.1, "{found} is not about {wanted}");
    }
    let none = run("training-none", "loss.balance=0");
    assert_eq!(none[2..], [None; 3], "no column for a loss that is not there");
    let alone = run("training-z-alone", "loss.z=0.1 loss.balance=0");
    assert_eq!([alone[3], alone[4]], [None; 2]);
}

/// Every token has a row for each of its experts: in all micro-steps of a step together.
#[test]
fn the_rows_of_experts_are_those_of_all_micro_steps() {
    let (_text, data) = corpus("training-expert-rows");
    let flags = format!("{data} memory.budget=1GB");
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    let config = TrainConfig::parse(TINY, "test", &flags).expect("a configuration");
    let OpenedModel { facts, mut batches, mut stepper } =
        open(&config, Device::Cpu, &mut Silent).expect("opened");
    let hyper = hyper(facts.optimizer, &config.optimizer, 1e-3, 1);
    for micro_steps in [2, 1] {
        let mut tokens = 0;
        for k in 0..micro_steps {
            let batch = batches.take(u64::MAX).expect("data").expect("a batch");
            tokens += batch.taken.tokens;
            let scalars = MicroStepScalars { keep: k > 0, loss_scale: 1.0, hyper: &hyper };
            stepper.micro_step(&batch, scalars).expect("run");
        }
        stepper.apply(&hyper, 1e-3).expect("run");
        stepper.finish_step(micro_steps, &mut |_| {}).expect("run");
        let found = stepper.expert_rows();
        let layers: Vec<(u32, usize)> = found.layers.iter().map(|layer| (layer.layer, layer.experts)).collect();
        assert_eq!(layers, [(0, 4), (1, 4)]);
        for rows in found.rows.chunks(4) {
            assert_eq!(rows.iter().sum::<u64>(), 2 * tokens, "{rows:?}");
        }
    }
}

/// The column `expert_load` has the shares of the experts of every layer, and dense models do not have it.
#[test]
fn shares_of_experts_are_in_the_metrics() {
    let (_text, data) = corpus("training-expert-load");
    let run = |name: &str, flags: &str| {
        let folder = Folder::new(name);
        train(&folder.0, TINY, &format!("{data} run.steps=2 schedule.warmup=0 {flags}"));
        lines(&folder).into_iter().map(|line| line["expert_load"].clone()).collect::<Vec<_>>()
    };
    // Where each token uses all experts, the shares are even.
    let even = json!([0.25, 0.25, 0.25, 0.25]);
    assert_eq!(run("training-load-all", "model.experts.top_k=4")[0], json!({"0": even, "1": even}));
    for line in run("training-load", "model.experts.capacity=1.0") {
        for layer in ["0", "1"] {
            let shares: Vec<f64> =
                line[layer].as_array().expect("an array").iter().filter_map(Value::as_f64).collect();
            assert_eq!(shares.len(), 4);
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 4e-6, "{shares:?}");
        }
    }
    assert_eq!(
        run("training-load-dense", "model.kind=dense_lm model.experts.count=8"),
        [Value::Null, Value::Null]
    );
}

/// The loss scale applies to the mean over targets, so the number of overflows does not depend on the tokens of a
/// micro-batch.
#[test]
fn as_many_steps_of_fp16_overflow_at_any_size_of_a_micro_batch() {
    let (_text, data) = corpus("training-fp16");
    let skipped = |tokens: u64| {
        let folder = Folder::new("training-fp16-run");
        let flags = format!(
            "{data} precision.kind=fp16 model.layers=1 model.hidden=16 model.heads=1 model.intermediate=16 \
             run.steps=4 schedule.warmup=1 data.longest=32 batch.tokens={tokens} batch.micro_tokens={tokens}"
        );
        train(&folder.0, TINY, &flags).state.skipped
    };
    let few = skipped(64);
    assert_eq!(few, skipped(4096), "of 4 steps");
    assert!(few <= 1, "{few} of 4 steps were skipped");
}

/// A signal ends the search between two plans, and a model with too many layers is refused before its graph is
/// built.
#[test]
fn planning_ends_when_it_is_asked_to_and_is_bounded() {
    struct Ended;
    impl Observer for Ended {
        fn say(&mut self, _: Level, _: &str) {}
        fn progress(&mut self, _: &Progress) {}
        fn stop(&self) -> Option<u8> {
            Some(15)
        }
    }
    let config = |flags: &str| {
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        TrainConfig::parse(TINY, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
    };
    let target = plimsoll_plan::Target::named("cpu").expect("read");
    let ask = |config: &TrainConfig, observer: &mut dyn Observer| {
        plimsoll_train::plan_of(config, &target, plimsoll_graph::Bytes(8 << 30), observer)
    };
    let vocabulary = "data.train=[nowhere.txt] model.vocabulary=512";
    ask(&config(vocabulary), &mut Silent).expect("planned");
    let error = ask(&config(vocabulary), &mut Ended).expect_err("interrupted");
    assert_eq!(error.exit_code(), 143, "{error}");
    let start = std::time::Instant::now();
    let deep = TrainConfig::parse(TINY, "test", &["model.layers=100000".to_owned()]);
    let error = deep.expect_err("too many").to_string();
    assert!(error.contains("`model.layers` is 100000; it must be a whole number from 1 to 1024"), "{error}");
    assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
}

#[test]
fn what_is_recomputed_and_by_how_many_threads_shows_in_no_bit() {
    let (_text, data) = corpus("training-remat");
    let run = |flags: &str| {
        let folder = Folder::new("training-remat-run");
        let report =
            train(&folder.0, TINY, &format!("{data} run.steps=4 model.dropout=0.1 optimizer.ema=0.9 {flags}"));
        (tensors(&report), report.run_record.peak_bytes.0)
    };
    let (wanted, most) = run("memory.remat=none");
    let (full, least) = run("memory.remat=full");
    assert!(full == wanted, "full");
    assert!(least < most, "{least} {most}");
    let tight = format!("memory.remat=auto memory.budget=\"{}\"", u64::midpoint(least, most));
    for flags in [
        "memory.remat=every_n memory.remat_every=2",
        "memory.remat=selective",
        &tight,
        "memory.remat=none run.threads=1",
        "memory.remat=full run.threads=3",
    ] {
        let (found, peak) = run(flags);
        assert!(found == wanted, "{flags}");
        assert!(flags != tight || peak < most, "{flags}: {peak} of {most}");
    }
}

/// A linear before a GELU: fused, the GELU would be applied to sums that are not rounded to 16 bits, and what is
/// recomputed decides whether the gradient reads them.
#[test]
fn recomputation_shows_in_no_bit_of_an_encoder_in_16_bits() {
    for precision in ["bf16", "fp16"] {
        let run = |remat: &str| {
            let folder = Folder::new("training-remat-esm2");
            let flags =
                format!("run.steps=3 precision.kind={precision} memory.remat={remat} optimizer.ema=0.9");
            tensors(&train(&folder.0, ESM, &esm(&flags)))
        };
        let wanted = run("none");
        for remat in ["full", "every_n", "selective"] {
            assert!(run(remat) == wanted, "{precision}, {remat}");
        }
    }
}

#[test]
fn four_small_batches_are_one_large_one() {
    let folder = Folder::new("training-sum");
    // Each line gives one sequence of 32 tokens, so that micro-batches of 64 and of 256 tokens hold whole
    // sequences.
    let text: String = fs::read_to_string(root("examples/corpus.txt")).expect("the sample text");
    let letters: Vec<char> = text.chars().filter(|c| c.is_ascii_alphanumeric() || *c == ' ').collect();
    let rows: String = letters.chunks(33).take(64).map(|line| line.iter().collect::<String>() + "\n").collect();
    let path = folder.write("rows.txt", rows.replace("\n ", "\nx").replace(" \n", "x\n"));
    let flags = format!(
        "data.train=[{}] data.document=line data.longest=32 data.shuffle_buffer=0 data.validation_fraction=0 \
         loss.balance=0 run.steps=1 schedule.warmup=0 optimizer.kind=sgd optimizer.momentum=0 optimizer.lr=0.1",
        path.display()
    );
    let run = |name: &str, micro: u64| {
        let output = Folder::new(name);
        let report = train(&output.0, TINY, &format!("{flags} batch.micro_tokens={micro}"));
        assert_eq!(lines(&output)[0]["micro_steps"], json!(256 / micro));
        (values(report.checkpoint.as_deref().expect("saved")), losses(&output)[0], report.state.targets)
    };
    let one = run("training-sum-1", 256);
    let four = run("training-sum-4", 64);
    assert_eq!((one.2, four.2), (256, 256));
    assert!((one.1 - four.1).abs() < 1e-6, "{} {}", one.1, four.1);
    for ((name, a), (_, b)) in one.0.iter().zip(&four.0) {
        let most = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-6, "{name}: {most:e}");
    }
}

#[test]
fn shorter_numbers_learn_as_well() {
    let (_text, data) = corpus("training-precision");
    let run = |flags: &str| {
        let folder = Folder::new("training-precision-run");
        train(&folder.0, TINY, &format!("{data} run.steps=40 {flags}"));
        let losses = losses(&folder);
        (losses[0], mean(&losses[30..]))
    };
    let (first, wanted) = run("precision.kind=f32");
    assert!(wanted < 0.75 * first, "{first} to {wanted}: nothing was learnt");
    for flags in
        ["precision.kind=bf16", "precision.kind=fp16 precision.initial_scale=1024", "optimizer.kind=adamw8bit"]
    {
        let (_, found) = run(flags);
        println!("{flags}: {found} for {wanted}");
        assert!((found / wanted - 1.0).abs() < 0.01, "{flags}: {found} for {wanted}");
    }
}

#[test]
fn an_overflow_is_skipped_and_overcome() {
    let (_text, data) = corpus("training-overflow");
    let run = |steps: u64| {
        let folder = Folder::new("training-overflow-run");
        let flags = format!(
            "{data} precision.kind=fp16 precision.initial_scale=16777216 run.steps={steps} optimizer.ema=0.9"
        );
        let report = train(&folder.0, TINY, &flags);
        (report.state.skipped, report.state.updates, losses(&folder))
    };
    let (skipped, updates, losses) = run(30);
    assert!(skipped >= 2 && updates >= 10 && skipped + updates == 30, "{skipped} skipped, {updates} done");
    assert!(losses[29] < losses[0], "{losses:?}");
    // A run that ends before its first update fails.
    let folder = Folder::new("training-overflow-none");
    let flags =
        format!("{data} precision.kind=fp16 precision.initial_scale=16777216 run.steps=2 optimizer.ema=0.9");
    let error = try_train(&folder.0, TINY, &flags, &mut RecordingObserver::default()).expect_err("no update");
    assert!(error.to_string().starts_with("all 2 steps of the run were skipped"), "{error}");
}

#[test]
fn a_step_at_once_has_the_bits_of_two_plans() {
    let (_text, data) = corpus("training-fused");
    let run = |flags: &str| {
        let folder = Folder::new("training-fused-run");
        let flags = format!("{data} batch.micro_tokens=256 run.steps=6 optimizer.ema=0.9 {flags}");
        let report = train(&folder.0, TINY, &flags);
        let peak = report.run_record.peak_bytes.0;
        (tensors(&report), lines(&folder)[0]["grad_norm"].is_null(), peak)
    };
    let fused = run("optimizer.clip_norm=null");
    let two = run("optimizer.clip_norm=1e30");
    assert_eq!((fused.1, two.1), (true, false), "only a plan of its own knows the norm");
    assert!(fused.0 == two.0, "the weights differ");
    assert!(fused.2 < two.2, "gradients that never live together take less: {} {}", fused.2, two.2);
}

#[test]
fn a_checkpoint_opens_again() {
    let (_text, data) = corpus("training-again");
    let validation = |folder: &Folder| {
        let all: Vec<Value> = lines(folder).iter().filter_map(|l| l.get("validation_loss").cloned()).collect();
        all.last().and_then(Value::as_f64).expect("an evaluation")
    };
    let first = Folder::new("training-first");
    let second = Folder::new("training-second");
    let report = train(&first.0, TINY, &format!("{data} run.evaluate_every=12"));
    // A learning rate of 1e-30 changes no bit of an f32 weight.
    let still = "optimizer.lr=1e-30 run.steps=1 run.evaluate_every=1";
    let from = format!("{data} model.from={} {still}", report.checkpoint.as_deref().expect("saved").display());
    let again = train(&second.0, TINY, &from);
    assert_eq!(validation(&second), validation(&first));
    assert!(bits(&again).0 == bits(&report).0, "the weights moved");
}

/// The averages of a run are those of its checkpoints after every step, by the formula in f64, for every optimizer and
/// for updates inside the micro-step; evaluations use them, and the averaged model opens as a model.
#[test]
fn weights_are_averaged() {
    let (_text, data) = corpus("training-average");
    let validation = |folder: &Folder| {
        let all: Vec<Value> = lines(folder).iter().filter_map(|l| l.get("validation_loss").cloned()).collect();
        all.last().and_then(Value::as_f64).expect("an evaluation")
    };
    let still = "optimizer.lr=1e-30 run.steps=1 run.evaluate_every=1 optimizer.weight_decay=0";
    // The first six decays of the warm-up are 2/11, 3/12, ...; 0.3 is below those from the third step on.
    for (decay, flags) in [
        (0.3, "optimizer.kind=adamw"),
        (0.9, "optimizer.kind=adamw8bit"),
        (0.9, "optimizer.kind=adafactor optimizer.lr=1e-2"),
        (0.9, "optimizer.kind=sgd optimizer.lr=0.1"),
        (0.9, "optimizer.kind=adamw optimizer.clip_norm=null batch.micro_tokens=256"),
        (0.9, "precision.kind=bf16"),
    ] {
        let flags = format!("{data} schedule.warmup=0 {flags}");
        let folder = Folder::new("training-average-run");
        let all = "run.steps=6 run.save_every=1 run.keep_last=9 run.evaluate_every=6";
        let report = train(&folder.0, TINY, &format!("{flags} optimizer.ema={decay} {all}"));
        let start = Folder::new("training-average-start");
        let first = train(&start.0, TINY, &format!("{flags} {still}"));
        let step = |step: u64| folder.path(&format!("checkpoints/step-{step:08}"));
        // In bf16 the averages are of the master weights. Those of experts are one state of several tensors, which are
        // compared by the evaluation below.
        let weights = |checkpoint: &Path| -> Vec<(String, Vec<f32>)> {
            let file = Weights::open(&checkpoint.join("model.safetensors")).expect("weights");
            let state = values(&checkpoint.join("state.safetensors"));
            let master = |name: &str| state.iter().find(|(there, _)| *there == format!("master {name}"));
            let pick = |(name, own): (String, Vec<f32>)| match master(&name) {
                Some((_, values)) => Some((name, values.clone())),
                None => {
                    (file.tensor(&name).expect("a tensor").dtype() == FileDType::F32).then_some((name, own))
                }
            };
            values(&checkpoint.join("model.safetensors")).into_iter().filter_map(pick).collect()
        };
        let mut wanted: Vec<Vec<f64>> = weights(first.checkpoint.as_deref().expect("saved"))
            .iter()
            .map(|(_, x)| x.iter().map(|&x| f64::from(x)).collect())
            .collect();
        for t in 1..=6u32 {
            let d = f64::from(decay as f32).min((1.0 + f64::from(t)) / (10.0 + f64::from(t)));
            for (mean, (_, now)) in wanted.iter_mut().zip(weights(&step(t.into()))) {
                mean.iter_mut().zip(now).for_each(|(mean, x)| *mean = d * *mean + (1.0 - d) * f64::from(x));
            }
        }
        let mut average = values(&step(6).join("ema"));
        let trained = weights(&step(6));
        let all = average.len();
        average.retain(|(name, _)| trained.iter().any(|(there, _)| there == name));
        assert_eq!(average.len(), trained.len(), "{flags}");
        assert!(all == trained.len() || (flags.contains("bf16") && 2 * trained.len() >= all), "{flags}: {all}");
        let mut most = 0.0f64;
        let mut moved = 0.0f64;
        for (((name, mean), (own, now)), wanted) in average.iter().zip(&trained).zip(&wanted) {
            assert_eq!(name, own);
            for ((&mean, &now), &wanted) in mean.iter().zip(now).zip(wanted) {
                most = most.max((f64::from(mean) - wanted).abs() / wanted.abs().max(0.1));
                moved = moved.max(f64::from((mean - now).abs()));
            }
        }
        // Six roundings to f32.
        assert!(most < 6.0 * f64::from(f32::EPSILON), "{flags}: {most:e}");
        assert!(moved > 1e-4, "{flags}: the averages are the weights");

        // Evaluations with the same types and micro-batches.
        let same: Vec<&str> = flags
            .split(' ')
            .filter(|flag| flag.starts_with("precision.") || flag.starts_with("batch."))
            .collect();
        let same = same.join(" ");
        let again = |from: &Path| {
            let folder = Folder::new("training-average-again");
            train(&folder.0, TINY, &format!("{data} {still} {same} model.from={}", from.display()));
            validation(&folder)
        };
        assert_eq!(report.checkpoint.expect("saved"), step(6));
        assert_eq!(validation(&folder), again(&folder.path("best/ema")), "{flags}");
        assert!(validation(&folder) != again(&folder.path("best")), "{flags}");
    }
}

/// The average of adapters is an adapter, that of a head a head: files with the names and shapes of the trained ones.
#[test]
fn averages_have_the_files_of_the_model() {
    let files = |folder: &Path| -> Vec<String> {
        let entries =
            fs::read_dir(folder).expect("a checkpoint").map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| !["ema", "state.safetensors", "trainer.json"].contains(&name.as_str()));
        names.sort();
        names
    };
    let ema = "optimizer.ema=0.9 run.steps=3 run.evaluate_every=3";
    let head = fs::read_to_string(root("examples/head.yaml")).expect("the example");
    let head = head.replace("examples/head/", &format!("{}/", root("examples/head").display()));
    for (name, text, flags) in [
        ("adapter", ESM, esm(&format!("model.lora.rank=2 {ema}"))),
        ("encoder", ESM, esm(ema)),
        ("head", &head, format!("{ema} run.patience=null")),
    ] {
        let folder = Folder::new("training-average-files");
        let report = train(&folder.0, text, &flags);
        let own = report.checkpoint.as_deref().expect("saved");
        let average = report.checkpoint.as_deref().expect("saved").join("ema");
        assert_eq!(files(own), files(&average), "{name}");
        let shapes = |folder: &Path| -> Vec<(String, usize)> {
            let file = files(folder).into_iter().find(|file| file.ends_with(".safetensors")).expect("weights");
            values(&folder.join(file)).into_iter().map(|(name, x)| (name, x.len())).collect()
        };
        assert_eq!(shapes(own), shapes(&average), "{name}");
        assert!(fs::read_dir(own).is_ok_and(|mut all| all.any(|e| e.is_ok_and(|e| e.file_name() == "ema"))));
    }
}

/// The sizes of the model are read from the checkpoint if the configuration sets only `model.from`.
#[test]
fn a_decoder_comes_from_its_checkpoint() {
    let (_text, data) = corpus("training-from");
    let first = Folder::new("training-from-first");
    let second = Folder::new("training-from-second");
    let report = train(&first.0, TINY, &data);
    let bare = TINY.replace(&TINY[..TINY.find("data:").expect("a section")], "\n");
    let from = format!(
        "{data} optimizer.lr=1e-30 run.steps=1 model.from={}",
        report.checkpoint.as_deref().expect("saved").display()
    );
    let again = train(&second.0, &bare, &from);
    assert!(bits(&again).0 == bits(&report).0, "the weights moved");
    let text = std::fs::read_to_string(second.path("config.yaml")).expect("config.yaml");
    let ran = TrainConfig::parse(&text, "config.yaml", &[]).expect("a configuration").model;
    assert_eq!((ran.hidden, ran.layers, ran.heads, ran.intermediate, ran.experts.count), (32, 2, 2, 32, 4));
}

/// Configuration for three steps of the golden ESM-2; the model and data are set by [`esm`].
pub const ESM: &str = "
model: {kind: esm2}
data: {format: fasta, longest: 128, workers: 1}
schedule: {kind: constant, warmup: 0}
batch: {tokens: 512, micro_tokens: 256}
run: {steps: 3, threads: 2}
";

pub fn esm(flags: &str) -> String {
    let model = fixture("goldens/esm2").display().to_string();
    let proteins = fixture("goldens/pipeline/expected_500/protein.faa").display().to_string();
    format!("model.from={model} data.train=[{proteins}] {flags}")
}

/// Names of the checkpoint's tensors whose bits differ from the golden ESM-2. The contact head is left out,
/// because the golden model does not have it.
fn moved(report: &TrainReport) -> Vec<String> {
    let before = values(&fixture("goldens/esm2"));
    let same = |name: &str, now: &[f32]| {
        before.iter().any(|(other, then)| {
            other == name && then.iter().map(|x| x.to_bits()).eq(now.iter().map(|x| x.to_bits()))
        })
    };
    let now = values(report.checkpoint.as_deref().expect("saved"));
    assert!(now.len() > 10);
    let contacts = |name: &str| name.starts_with("esm.contact_head.");
    now.into_iter().filter(|(name, now)| !contacts(name) && !same(name, now)).map(|(name, _)| name).collect()
}

#[test]
fn encoders_train_as_they_were_trained() {
    let folder = Folder::new("training-esm");
    let report = train(&folder.0, ESM, &esm(""));
    assert!(report.steps == 3 && losses(&folder).iter().all(|loss| *loss > 0.0), "{:?}", losses(&folder));
    let moved = moved(&report);
    assert!(moved.iter().any(|name| name.contains("layer.0.attention.self.query.weight")), "{moved:?}");
    // The checkpoint can be the initial model of another run.
    let again = Folder::new("training-esm-again");
    let flags =
        esm(&format!("model.from={} run.steps=1", report.checkpoint.as_deref().expect("saved").display()));
    train(&again.0, ESM, &flags);

    let dna = Folder::new("training-dna");
    let flags = format!(
        "model.kind=dnabert_s model.from={} data.train=[{}]",
        fixture("goldens/dnabert_s").display(),
        fixture("goldens/pipeline/expected_500/nucleotide.fa").display()
    );
    let report = train(&dna.0, ESM, &flags);
    assert!(report.steps == 3 && losses(&dna).iter().all(|loss| *loss > 0.0), "{:?}", losses(&dna));
}

#[test]
fn rows_that_no_model_reads_stay_what_they_were() {
    let folder = Folder::new("training-rows");
    let from = fixture("goldens/dnabert_s");
    let reads = fixture("goldens/pipeline/expected_500/nucleotide.fa");
    let row = |folder: &Path| {
        let find = |(name, _): &(String, Vec<f32>)| name.ends_with("token_type_embeddings.weight");
        let (_, both) = values(folder).into_iter().find(find).expect("types of tokens");
        both[both.len() / 2..].to_vec()
    };
    for kind in ["f32", "bf16", "fp16"] {
        let output = folder.path(kind);
        let flags = format!(
            "model.kind=dnabert_s model.from={} data.train=[{}] precision.kind={kind} run.steps=1",
            from.display(),
            reads.display()
        );
        let report = train(&output, ESM, &flags);
        let wanted = row(&from);
        let found = row(report.checkpoint.as_deref().expect("saved"));
        assert!(wanted.iter().any(|x| *x != 0.0));
        for (a, b) in wanted.iter().zip(&found) {
            let most = if kind == "f32" { 0.0 } else { a.abs() / 256.0 + 1e-7 };
            assert!((a - b).abs() <= most, "{kind}: {b} for {a}");
        }
    }
}

#[test]
fn adapters_train_alone() {
    let folder = Folder::new("training-lora");
    let report = train(&folder.0, ESM, &esm("model.lora.rank=2"));
    let written = values(&report.checkpoint.as_deref().expect("saved").join("adapter_model.safetensors"));
    // Two matrices for each adapter of query and value, in two layers.
    assert!(written.len() == 8 && written.iter().all(|(name, _)| name.contains(".lora_")), "{written:?}");
    let up = written.into_iter().find(|(name, _)| name.contains(".lora_B"));
    assert!(up.is_some_and(|(_, up)| up.iter().any(|x| *x != 0.0)), "an adapter begins at zero and moves");
}

#[test]
fn a_classifier_leaves_a_frozen_encoder_as_it_is() {
    let folder = Folder::new("training-frozen");
    let proteins = fs::read_to_string(fixture("goldens/pipeline/expected_500/protein.faa")).expect("proteins");
    let names = proteins.lines().filter_map(|line| line.strip_prefix('>')?.split_whitespace().next());
    let labels: String = names.enumerate().map(|(i, name)| format!("{name}\t{}\n", i % 2)).collect();
    let labels = folder.write("labels.tsv", labels);
    let flags = format!(
        "model.classes=2 model.freeze_encoder=true data.truncate=true data.labels={} batch.micro_tokens=512",
        labels.display()
    );
    let output = Folder::new("training-classifier");
    let report = train(&output.0, ESM, &esm(&flags));
    let moved = moved(&report);
    assert!(!moved.is_empty() && moved.iter().all(|name| name.starts_with("classifier.")), "{moved:?}");
}

#[test]
fn the_head_of_the_example_learns() {
    let folder = Folder::new("training-head");
    let text = fs::read_to_string(root("examples/head.yaml")).expect("the example");
    let text = text.replace("examples/head/", &format!("{}/", root("examples/head").display()));
    let report = train(&folder.0, &text, "run.patience=null");
    let losses = losses(&folder);
    let first = mean(&losses[..4]);
    let last = mean(&losses[losses.len() - 4..]);
    assert!(report.ended == Ended::Epochs && last < 0.8 * first, "{first} to {last}");
}

/// An initial model whose file lacks a tensor is refused, because the tensor would start from random values.
#[test]
fn an_initial_decoder_has_every_tensor() {
    let folder = Folder::new("training-lacks");
    let llama = fixture("training/llama");
    let whole = Weights::open(&llama).expect("the fixture");
    let missing = whole.tensors().last().expect("a tensor").name().to_owned();
    let kept: Vec<(String, Vec<u64>, Vec<f32>)> = (whole.tensors().filter(|tensor| tensor.name() != missing))
        .map(|tensor| {
            let mut values = vec![0.0; tensor.elements() as usize];
            whole.read_f32(tensor.name(), 0..tensor.elements(), &mut values).expect("read");
            (tensor.name().to_owned(), tensor.shape().to_vec(), values)
        })
        .collect();
    let tensors: Vec<TensorData<'_>> =
        kept.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    let path = folder.path("model.safetensors");
    write_safetensors(&path, &tensors, &Default::default(), StoredAs::F32).expect("written");
    fs::copy(llama.join("config.json"), folder.path("config.json")).expect("copied");
    let flags = [format!("model.from={}", folder.0.display())];
    let text = "data: {train: [x.bin], longest: 8}\nbatch: {tokens: 64}\nrun: {steps: 1}\n";
    let config = TrainConfig::parse(text, "test", &flags).expect("a configuration");
    let target = priced::target(&config, "cpu").expect("a target");
    let error = priced::found(&config, &target, &mut Silent).expect_err("a tensor is missing").to_string();
    assert!(error.contains(&missing), "{error}");
}

/// A tokenizer.json with a Unigram model as SentencePiece makes it: pieces with log-probabilities, and blanks
/// replaced by U+2581.
fn pieces() -> Value {
    let special = |id: u32, name: &str| {
        json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let mut vocab = vec![("<unk>".to_owned(), 0.0), ("</s>".to_owned(), 0.0), ("\u{2581}".to_owned(), -3.0)];
    vocab.extend(('a'..='z').chain('0'..='9').map(|c| (c.to_string(), -5.0)));
    vocab.extend([("th".to_owned(), -3.0), ("\u{2581}the".to_owned(), -2.0), ("he".to_owned(), -3.5)]);
    json!({"version": "1.0", "added_tokens": [special(0, "<unk>"), special(1, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}})
}

/// A language model trained with a Unigram tokenizer, which is copied into the checkpoint. A run does not
/// continue with a different tokenizer.
#[test]
fn a_language_model_reads_sentence_pieces() {
    let (_text, data) = corpus("training-pieces");
    let folder = Folder::new("training-pieces-run");
    folder.write("tokenizer.json", pieces().to_string());
    let tokenizer = folder.path("tokenizer.json");
    let read = plimsoll_data::train::BytePairs::from_file(&tokenizer).expect("a tokenizer");
    let mut tokens = vec![];
    // By hand: "\u{2581}the" as one piece has the highest score (-2); "tha" as th + a (-8) beats three letters
    // (-15); NFKC turns the full-width letter into a plain letter; the dot is unknown.
    let unknown = read.encode("The tha\u{ff42}.".as_bytes(), &mut tokens).expect("tokens");
    assert_eq!((tokens, unknown), (vec![40, 2, 39, 3, 4, 0], 1));
    assert_eq!((read.size(), read.unknown()), (42, Some(0)));
    let flags = format!("{data} data.tokenizer={} data.end_token=</s>", tokenizer.display());
    let report = train(&folder.path("run"), TINY, &flags);
    assert!(report.loss.is_some_and(f64::is_finite));
    let kept = std::fs::read(report.checkpoint.as_deref().expect("saved").join("tokenizer.json"))
        .expect("in the checkpoint");
    assert_eq!(kept, pieces().to_string().into_bytes());
    let config = std::fs::read_to_string(report.checkpoint.as_deref().expect("saved").join("config.json"))
        .expect("config.json");
    assert!(config.contains("\"vocab_size\": 42"), "{config}");
    // A run from the checkpoint uses the checkpoint's tokenizer.
    let from = format!(
        "{data} model.from={} data.end_token=</s> run.steps=1",
        report.checkpoint.as_deref().expect("saved").display()
    );
    train(&folder.path("again"), &TINY.replace("tokenizer: bytes, ", ""), &from);
    // The run does not continue with other scores of the pieces.
    let mut other = pieces();
    other["model"]["vocab"][4][1] = json!(-4.0);
    folder.write("tokenizer.json", other.to_string());
    let config: Vec<String> = format!("{flags} run.steps=13").split_whitespace().map(str::to_owned).collect();
    let config = TrainConfig::parse(TINY, "test", &config).expect("a configuration");
    let request = TrainRequest { config, output: folder.path("run"), resume: Resume::Auto };
    let error = train_with(
        &request,
        &mut |config, observer| open(config, Device::Cpu, observer),
        &mut RecordingObserver::default(),
    )
    .expect_err("other data");
    assert!(error.to_string().contains("the saved position belongs to other data"), "{error}");
}

/// The recommendations of a run are priced by planning with and without each setting.
#[test]
fn settings_that_save_memory_are_priced() {
    let (_text, data) = corpus("train-remedies");
    let flags = [&*data, "model.hidden=384", "model.heads=6", "model.intermediate=384", "model.layers=3"]
        .map(str::to_owned);
    let config = TrainConfig::parse(TINY, "test", &flags).expect("a configuration");
    let model = open(&config, Device::Cpu, &mut Silent).expect("opened");
    let before = model.facts.plan.as_ref().expect("a plan").plan.peak_bytes;
    let remedies = model.stepper.remedies(&Silent);
    assert!(remedies.is_sorted_by(|a, b| a.slower <= b.slower), "{remedies:?}");
    let target = priced::target(&config, "cpu").expect("this machine");
    let planned =
        |config: &TrainConfig, budget| plan_of(config, &target, budget, &mut Silent).expect("it fits");
    let now = planned(&config, before);
    for kind in ["adamw8bit", "adafactor"] {
        let wanted = [Setting::key("optimizer.kind").to(kind)];
        let remedy = remedies.iter().find(|remedy| remedy.settings == wanted);
        let remedy = remedy.unwrap_or_else(|| panic!("{kind} is not in {remedies:?}"));
        let other = config.with([(&"optimizer.kind".to_owned(), &json!(kind))]).expect("a configuration");
        let found = planned(&other, Bytes(before.0 / 10 * 9));
        assert_eq!(remedy.saves, before - found.program.peak(), "{kind}");
        assert!(remedy.saves.0 >= before.0 / 10, "{kind}: {} of {before}", remedy.saves);
        let slower = now.tokens_per_second / found.tokens_per_second - 1.0;
        assert!((remedy.slower - slower).abs() < 1e-9, "{kind}: {} {slower}", remedy.slower);
    }
}
