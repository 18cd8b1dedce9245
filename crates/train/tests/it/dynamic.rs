//! Tests of `memory.dynamic`: a run whose micro-steps follow the memory of a scripted machine, and a device that has too
//! little memory. Invariant: whatever the sizes are, a run trains on the samples of a run with one size, and its losses and
//! weights are the same within rounding.

use crate::train::{bits, lines};
use crate::training::{TINY, corpus, values};
use plimsoll_runtime::{Device, Failure, Level, Observer, Progress, Trained};
use plimsoll_testing::Folder;
use plimsoll_testing::tight::{Fault, FaultPlace, Script, TightMachine};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{MicroStepSizeChange, Resume, TrainError, TrainReport, TrainRequest, open, train_with};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A step of 256 tokens, in packs of 64, which are also the smallest micro-steps.
const DYNAMIC: &str = "batch.micro_tokens=auto memory.dynamic.min_batch=64 \
                       memory.dynamic.adjustment_frequency=1 run.evaluate_every=4";

/// Tells the script of the machine how many steps are finished, and keeps the messages.
struct Steps {
    script: Arc<Script>,
    said: Vec<(Level, String)>,
}

impl Observer for Steps {
    fn say(&mut self, level: Level, text: &str) {
        self.said.push((level, text.to_owned()));
    }

    fn progress(&mut self, _: &Progress) {}

    fn trained(&mut self, trained: &Trained) {
        self.script.step.store(trained.step, Ordering::Relaxed);
    }

    fn stop(&self) -> Option<u8> {
        None
    }
}

fn try_train(
    folder: &Path,
    flags: &str,
    script: &Arc<Script>,
) -> (Result<TrainReport, TrainError>, Vec<String>) {
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    let config = TrainConfig::parse(TINY, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"));
    run(folder, config, script)
}

fn run(
    folder: &Path,
    config: TrainConfig,
    script: &Arc<Script>,
) -> (Result<TrainReport, TrainError>, Vec<String>) {
    let machine = Arc::new(TightMachine(Arc::clone(script), 0));
    let device = Device::machines(vec![machine]).expect("one");
    let request = TrainRequest { config, output: folder.to_owned(), resume: Resume::Auto };
    let mut steps = Steps { script: Arc::clone(script), said: vec![] };
    let report =
        train_with(&request, &mut |config, observer| open(config, device.clone(), observer), &mut steps);
    (report, steps.said.into_iter().map(|(_, text)| text).collect())
}

/// The changes of size of a run on a machine whose memory others take and give back.
pub fn changes_of(folder: &Folder, config: &TrainConfig) -> Result<String, TrainError> {
    run(&folder.0, config.clone(), &Script::new(busy, None)).0?;
    Ok(format!("{:?}", changes(folder)))
}

fn train(folder: &Folder, flags: &str, script: &Arc<Script>) -> TrainReport {
    let (report, _) = try_train(&folder.0, flags, script);
    let report = report.unwrap_or_else(|e| panic!("{flags}: {e}: {:?}", std::error::Error::source(&e)));
    assert!(script.is_over(), "{flags}: no failure at its place");
    report
}

/// Memory that nobody else uses.
fn calm(_: u64) -> u64 {
    500
}

/// Memory in use before each step, in thousandths: a warning, an emergency, nothing of note, and memory that becomes free.
fn busy(step: u64) -> u64 {
    [500, 930, 910, 975, 910, 890, 500, 910, 960, 899, 500, 500][step as usize % 12]
}

/// (step, tokens before, tokens after, reason) of each change.
fn changes(folder: &Folder) -> Vec<(u64, u64, u64, String)> {
    let of = |line: &Value| {
        let number = |key: &str| line[key].as_u64().expect("a number");
        (line["event"] == json!("dynamic_batch")).then(|| {
            (number("step"), number("from"), number("to"), line["reason"].as_str().expect("text").to_owned())
        })
    };
    lines(folder).iter().filter_map(of).collect()
}

/// Losses of all steps and evaluations.
fn losses(folder: &Folder) -> Vec<f64> {
    let of = |line: &Value| line["loss"].as_f64().or(line["validation_loss"].as_f64());
    lines(folder).iter().filter_map(of).collect()
}

/// Panics unless two runs have the same losses, weights and position within rounding.
fn same_training(what: &str, found: (&Folder, &TrainReport), wanted: (&Folder, &TrainReport)) {
    let some = losses(found.0);
    let others = losses(wanted.0);
    assert_eq!(some.len(), others.len(), "{what}: {some:?}");
    for (some, other) in some.iter().zip(&others) {
        assert!((some - other).abs() <= 2e-5 * other, "{what}: losses {some} and {other}");
    }
    let state = |report: &TrainReport| {
        let state = &report.state;
        (state.step, state.epoch, state.tokens, state.targets, state.position.clone())
    };
    assert_eq!(state(found.1), state(wanted.1), "{what}");
    let some = values(found.1.checkpoint.as_deref().expect("saved"));
    let others = values(wanted.1.checkpoint.as_deref().expect("saved"));
    let pairs = some.iter().zip(&others).flat_map(|((_, some), (_, others))| some.iter().zip(others));
    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-4, "{what}: a weight differs by {worst}");
}

#[test]
fn a_run_that_follows_the_memory_trains_as_one_of_a_single_size() {
    let (_text, data) = corpus("dynamic-follows");
    for flags in [
        "",
        "loss.balance=0.1 loss.router_z=0.05 model.experts.capacity=1.1 model.dropout=0.1",
        "model.kind=dense_lm model.experts.count=8 loss.z=1e-3 optimizer.kind=sgd",
        "precision.kind=bf16 memory.remat=full",
    ] {
        let data = format!("{data} {flags}");
        let one = Folder::new("dynamic-one");
        let large = Folder::new("dynamic-large");
        let follows = Folder::new("dynamic");
        let fixed = format!("{data} batch.micro_tokens=64 run.evaluate_every=4");
        let wanted = train(&one, &fixed, &Script::new(calm, None));
        // Sixteen-bit weights are rounded in every step, so another order of sums changes them by a unit in the last place.
        let compare = |what: &str, folder: &Folder, report: &TrainReport| {
            if !flags.contains("bf16") {
                same_training(what, (folder, report), (&one, &wanted));
            }
        };
        let calm = Script::new(calm, None);
        let report = train(&large, &format!("{data} {DYNAMIC}"), &calm);
        compare("the largest size", &large, &report);
        assert_eq!(changes(&large), []);
        assert_eq!(calm.mapped.lock().expect("no panic").len(), 1);
        assert!(lines(&large).iter().filter_map(|line| line["micro_steps"].as_u64()).all(|n| n == 1));
        let busy = Script::new(busy, None);
        let report = train(&follows, &format!("{data} {DYNAMIC}"), &busy);
        compare("all sizes", &follows, &report);
        let change = |step, from, to, reason: &str| (step, from, to, reason.to_owned());
        let wanted = [
            change(2, 256, 128, "warning"),
            change(4, 128, 64, "emergency"),
            change(6, 64, 128, "grow"),
            change(7, 128, 256, "grow"),
            change(9, 256, 64, "critical"),
            change(10, 64, 128, "grow"),
            change(11, 128, 256, "grow"),
        ];
        assert_eq!(changes(&follows), wanted, "{flags}");
        let sizes: Vec<u64> = lines(&follows).iter().filter_map(|line| line["micro_steps"].as_u64()).collect();
        assert_eq!(sizes, [1, 2, 2, 4, 4, 2, 1, 1, 4, 2, 1, 1], "{flags}");
        let mapped = busy.mapped.lock().expect("no panic");
        assert!(mapped.len() == 8 && mapped[0] > mapped[1] && mapped[1] > mapped[2], "{mapped:?}");
        assert_eq!((mapped[3], mapped[4], mapped[5]), (mapped[1], mapped[0], mapped[2]), "{mapped:?}");
        assert_eq!(report.state.size, Some(MicroStepSizeChange { step: 11, tokens: 256 }));
    }
}

/// A resumed run repeats the sizes of the steps that it repeats, whatever its readings are, and goes on by readings.
#[test]
fn a_resumed_run_replays_its_changes() {
    let (_text, data) = corpus("dynamic-replay");
    let flags = format!("{data} {DYNAMIC} model.dropout=0.1 run.save_every=5 run.keep_best=false");
    let whole = Folder::new("dynamic-whole");
    let broken = Folder::new("dynamic-broken");
    let wanted = train(&whole, &flags, &Script::new(busy, None));
    let fault = Fault { of_memory: false, ..Fault::once(FaultPlace::Launch("embed"), 9) };
    let (failed, _) = try_train(&broken.0, &flags, &Script::new(busy, Some(fault)));
    let error = failed.expect_err("the device failed");
    assert_eq!(error.exit_code(), 1, "{error}");
    // Steps 6 to 10 are repeated; for these, the machine now reads otherwise.
    fn other(step: u64) -> u64 {
        if step < 10 { 940 } else { busy(step) }
    }
    let found = train(&broken, &flags, &Script::new(other, None));
    assert!(bits(&found) == bits(&wanted), "the checkpoints differ");
    let reasons: Vec<_> =
        changes(&broken).into_iter().map(|(step, _, to, reason)| (step, to, reason)).collect();
    let change = |step, to, reason: &str| (step, to, reason.to_owned());
    let replayed = [(6, 128), (7, 256), (9, 64), (10, 128)].map(|(step, to)| change(step, to, "replay"));
    assert_eq!(reasons[2..6], replayed);
    let sizes = |folder| -> Vec<(u64, u64)> { changes(folder).iter().map(|c| (c.0, c.2)).collect() };
    assert_eq!(sizes(&broken), sizes(&whole));
}

/// Every phase is repeated with smaller micro-steps, and the result is that of a run that never lacked memory.
#[test]
fn a_lack_of_memory_is_met_with_smaller_micro_steps() {
    let (_text, data) = corpus("dynamic-memory-text");
    let flags = format!("{data} {DYNAMIC} run.save_every=3");
    let calm = |fault| Script::new(calm, fault);
    let one = Folder::new("dynamic-memory-calm");
    let wanted = train(&one, &flags, &calm(None));
    let launch = |op| Fault::once(FaultPlace::Launch(op), 5);
    let late = |fault: Fault, skip| Fault { skip, ..fault };
    // The other inputs of the step, those of the update among them.
    let inputs = (1..=5).map(|skip| ("later inputs", late(Fault::once(FaultPlace::Upload, 5), skip), vec![6]));
    let cases = [
        ("arena", Fault::once(FaultPlace::Arena, 0), vec![]),
        ("load", late(Fault::once(FaultPlace::Upload, 0), 3), vec![]),
        ("inputs", Fault::once(FaultPlace::Upload, 5), vec![6]),
        ("first launch", launch("embed"), vec![6]),
        ("backward", late(launch("attention_grad"), 1), vec![6]),
        ("accumulation", late(launch("accumulate"), 5), vec![6]),
        ("first launch of the update", launch("grad_scale"), vec![6]),
        ("checkpoint", late(Fault::once(FaultPlace::Download, 3), 2), vec![4]),
        // Behind step 4, an evaluation runs first.
        ("evaluation", Fault::once(FaultPlace::Launch("embed"), 4), vec![5]),
        ("twice", Fault { times: 2, ..launch("embed") }, vec![6, 6]),
    ];
    for (what, fault, steps) in cases.into_iter().chain(inputs) {
        let folder = Folder::new("dynamic-memory");
        let report = train(&folder, &flags, &calm(Some(fault)));
        let found = changes(&folder);
        let lacks: Vec<u64> = found.iter().filter(|c| c.3 == "out_of_memory").map(|c| c.0).collect();
        assert_eq!(lacks, steps, "{what}: {found:?}");
        assert!(found.iter().all(|c| c.3 != "grow"), "{what}: grown too soon: {found:?}");
        same_training(what, (&folder, &report), (&one, &wanted));
    }
}

/// A lack of memory that smaller micro-steps cannot meet ends the run with exit code 4, and says what to do.
#[test]
fn a_lack_of_memory_that_stays_is_an_error() {
    let (_text, data) = corpus("dynamic-short-text");
    let dynamic = format!("{data} {DYNAMIC}");
    let fixed = format!("{data} run.evaluate_every=4");
    let always = |place, after| Fault { times: 100, ..Fault::once(place, after) };
    for (what, flags, fault, wanted) in [
        (
            "no size left",
            &dynamic,
            always(FaultPlace::Launch("embed"), 5),
            "step 6: the device ran out of memory in the micro-step",
        ),
        (
            "update begun",
            &dynamic,
            always(FaultPlace::Launch("adamw"), 4),
            "in the update of the weights; the largest",
        ),
        ("a single size", &fixed, always(FaultPlace::Launch("embed"), 5), "give memory.dynamic"),
        ("evaluation", &fixed, always(FaultPlace::Launch("embed"), 4), "in the evaluation"),
        ("checkpoint", &fixed, always(FaultPlace::Download, 0), "in the checkpoint"),
        (
            "start",
            &dynamic,
            always(FaultPlace::Arena, 0),
            "in the allocation of the arena, also with micro-steps of 128, 64 tokens",
        ),
    ] {
        let folder = Folder::new("dynamic-short");
        let (report, _) = try_train(&folder.0, flags, &Script::new(calm, Some(fault)));
        let error = report.expect_err(what);
        assert_eq!(error.exit_code(), 4, "{what}: {error}");
        let text = error.to_string();
        assert!(text.contains(wanted), "{what}: {text}");
        assert!(
            text.contains("process 7 (python) holds 5 B") && text.contains("the largest tensors are"),
            "{text}"
        );
    }
}

/// A larger size that finds no memory is not used; the run goes on.
#[test]
fn a_run_that_cannot_grow_keeps_its_size() {
    let (_text, data) = corpus("dynamic-growth-text");
    let folder = Folder::new("dynamic-growth");
    let fault = Fault::once(FaultPlace::Growth, 0);
    let (report, said) = try_train(&folder.0, &format!("{data} {DYNAMIC}"), &Script::new(busy, Some(fault)));
    report.expect("trained");
    let change = |step, from, to, reason: &str| (step, from, to, reason.to_owned());
    assert_eq!(changes(&folder), [change(2, 256, 128, "warning"), change(4, 128, 64, "emergency")]);
    let kept = "step 6: there is no memory for micro-steps of 128 tokens; 64 are kept";
    assert!(said.iter().any(|text| text == kept), "{said:?}");
}

/// Values that contradict each other are refused by name.
#[test]
fn sizes_that_contradict_each_other_are_refused() {
    let base = "batch.micro_tokens=auto memory.dynamic.min_batch=64 data.train=[x]";
    for (flags, wanted) in [
        ("batch.micro_tokens=128", "batch.micro_tokens is one size"),
        ("memory.dynamic.warning=0.5", "memory.dynamic: target 0.9, warning 0.5"),
        ("memory.dynamic.max_batch=512", "memory.dynamic.max_batch 512 is greater than batch.tokens 256"),
        (
            "memory.dynamic.max_batch=128 memory.dynamic.min_batch=192",
            "192 is greater than the largest micro-step of 128",
        ),
        ("memory.dynamic.max_batch=64", "memory.dynamic has nothing to change to"),
        ("memory.dynamic.min_batch=32", "is not a multiple of the 64 tokens of a pack (batch.pack_tokens)"),
        ("memory.dynamic.min_batch=96", "is not a multiple of the 64 tokens of a pack (batch.pack_tokens)"),
        ("memory.dynamic.adjustment_frequency=0", "a whole number from 1 to 1000000000000"),
        ("memory.dynamic.emergency=1.5", "a number above 0 to 1"),
    ] {
        let flags: Vec<String> = format!("{base} {flags}").split_whitespace().map(str::to_owned).collect();
        let error = TrainConfig::parse(TINY, "test", &flags).expect_err("refused").to_string();
        assert!(error.contains(wanted), "{flags:?}: {error}");
    }
    let head = "model: {kind: head}\ndata: {train: [x], proteins: [y], labels: z, longest: 2}\nrun: {steps: 1}\n\
                memory: {dynamic: {min_batch: 64}}";
    let error = TrainConfig::parse(head, "test", &[]).expect_err("refused").to_string();
    assert!(error.contains("a micro-step of model.kind head is a pack"), "{error}");
}
