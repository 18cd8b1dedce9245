//! Tests of the training loop with a toy implementation of [`Batches`] and [`Stepper`]: five weights whose bits depend on
//! the seed, the position in the data and the optimizer state. Invariant: the loop is tested only through the
//! traits, so the tested guarantees hold for every implementation.

use plimsoll_data::weights::FileDType;
use plimsoll_graph::Bytes;
use plimsoll_plan::Remedy;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::session::TrainingBatch;
use plimsoll_runtime::{Failure, Level, Observer, Progress, Trained};
use plimsoll_setting::Setting;
use plimsoll_testing::Folder;
use plimsoll_train::checkpoint::{Checkpoints, VerifiedCheckpoint};
use plimsoll_train::config::{OptimizerKind, TrainConfig};
use plimsoll_train::{
    Applied, Auxiliary, Batches, Ended, MicroBatch, MicroStepResult, MicroStepScalars, MicroStepSize,
    OpenedModel, Resume, StatePart, Stepper, StoredTensor, Taken, Tensors, TrainError, TrainFacts, TrainReport,
    TrainRequest, train_with,
};
use serde_json::{Value, json};
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Five weights trained by SGD with momentum towards pseudo-random targets, which are a function of the data
/// position and the seed.
struct Toy {
    data: ToyData,
    weights: [f32; 5],
    momentum: [f32; 5],
    gradient: [f32; 5],
    seed: u64,
    log: Vec<(bool, f32)>,
    /// Position of the micro-batch whose gradient is infinite if the loss scale of the mean is above 4.
    overflow: Option<u64>,
    /// Positions of the micro-batches whose gradients are infinite at any loss scale.
    infinite: std::ops::Range<u64>,
    /// Whether its state is larger than any disk.
    is_huge: bool,
    /// Whether results are read one step late.
    late: bool,
    /// Results that were not read yet.
    found: VecDeque<MicroStepResult>,
    applied: VecDeque<Applied>,
    /// Bytes that each step keeps.
    kept_by_a_step: usize,
    kept: Vec<Vec<u8>>,
}

/// The data of a [`Toy`]: a micro-batch is its position.
#[derive(Clone, Copy)]
struct ToyData {
    /// Position in the data: the number of micro-batches taken, with the ends of epochs.
    place: u64,
    /// The position, as the only token of a micro-batch.
    token: [i32; 1],
    evaluated: u64,
    /// Number of micro-batches of an epoch; the last one is smaller.
    epoch: u64,
    /// Positions at which epochs end, for epochs of different lengths; if empty, all have the length of `epoch`.
    ends: &'static [u64],
    slow: Duration,
    /// Time of each batch of an evaluation.
    slow_evaluation: Duration,
}

impl Toy {
    fn new(config: &TrainConfig) -> Self {
        let weights = [1.0, -2.0, 3.0, 0.5, 0.0];
        let momentum = [0.0; 5];
        let gradient = [0.0; 5];
        let data = ToyData {
            place: 0,
            token: [0],
            evaluated: 0,
            epoch: 7,
            ends: &[],
            slow: Duration::ZERO,
            slow_evaluation: Duration::ZERO,
        };
        Self {
            data,
            weights,
            momentum,
            gradient,
            seed: config.run.seed,
            log: vec![],
            overflow: None,
            infinite: 0..0,
            is_huge: false,
            late: false,
            found: VecDeque::new(),
            applied: VecDeque::new(),
            kept_by_a_step: 0,
            kept: vec![],
        }
    }

    /// The toy as the training loop takes it.
    fn opened(self) -> OpenedModel {
        let peak = Bytes(60);
        let facts = TrainFacts {
            optimizer: OptimizerKind::Sgd,
            choices: vec![("memory.loss_chunk".to_owned(), json!(64))],
            parameters: None,
            trained_parameters: None,
            data: None,
            counted_steps: None,
            plan: None,
            device: "the CPU".to_owned(),
            machines: vec![],
            on_host: true,
            is_asynchronous: self.late,
            budget: Bytes(1 << 20),
            peak,
            fragmentation: 0.25,
            largest_tensors: String::new(),
            sizes: vec![MicroStepSize { tokens: 8, bytes: peak }],
        };
        OpenedModel { facts, batches: Box::new(self.data), stepper: Box::new(self) }
    }

    fn target(&self, place: u64, i: usize) -> f32 {
        let x = (place ^ self.seed.wrapping_mul(77)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (8 * i + 8);
        (x % 1000) as f32 / 1000.0
    }

    fn values(&mut self, part: StatePart, tensor: usize) -> &mut [f32] {
        match (part, tensor) {
            (StatePart::Model, 0) => &mut self.weights[..2],
            (StatePart::Model, _) => &mut self.weights[2..],
            (StatePart::State, _) => &mut self.momentum,
            (StatePart::Average, _) => &mut [],
        }
    }
}

impl ToyData {
    fn batch(&self, taken: Taken) -> MicroBatch<'_> {
        MicroBatch {
            taken,
            inputs: TrainingBatch::Tokens { packs: &[], ids: &self.token, spans: &[], targets: &[] },
        }
    }
}

impl Batches for ToyData {
    fn take(&mut self, _: u64) -> Result<Option<MicroBatch<'_>>, TrainError> {
        std::thread::sleep(self.slow);
        self.place += 1;
        self.token = [self.place as i32];
        if self.ends.contains(&self.place) {
            return Ok(None);
        }
        if !self.ends.is_empty() {
            return Ok(Some(self.batch(Taken { tokens: 8, targets: 4, packs: 1 })));
        }
        Ok(match self.place % (self.epoch + 1) {
            0 => None,
            n if n == self.epoch => Some(self.batch(Taken { tokens: 3, targets: 2, packs: 1 })),
            _ => Some(self.batch(Taken { tokens: 8, targets: 4, packs: 1 })),
        })
    }

    fn take_validation(&mut self, _: u64) -> Result<Option<MicroBatch<'_>>, TrainError> {
        self.evaluated += 1;
        std::thread::sleep(self.slow_evaluation);
        Ok((self.evaluated <= 3).then_some(self.batch(Taken { tokens: 10, targets: 10, packs: 1 })))
    }

    fn rewind(&mut self) -> Result<(), TrainError> {
        self.evaluated = 0;
        Ok(())
    }

    fn position(&self) -> Result<Value, TrainError> {
        Ok(json!(self.place))
    }

    fn seek(&mut self, position: &Value) -> Result<(), TrainError> {
        self.place = position.as_u64().expect("a place");
        Ok(())
    }
}

impl Stepper for Toy {
    fn micro_step(&mut self, batch: &MicroBatch<'_>, scalars: MicroStepScalars<'_>) -> Result<(), TrainError> {
        let MicroStepScalars { keep, loss_scale, .. } = scalars;
        let TrainingBatch::Tokens { ids: &[place], .. } = batch.inputs else { panic!("a batch of a toy") };
        let place = place as u64;
        self.log.push((keep, loss_scale));
        let mut loss = 0.0;
        for i in 0..5 {
            let error = self.weights[i] - self.target(place, i);
            let overflow = self.overflow == Some(place) && loss_scale > 4.0 / STEP;
            let overflow = overflow || self.infinite.contains(&place);
            let gradient = if overflow { f32::INFINITY } else { error * loss_scale };
            self.gradient[i] = if keep { self.gradient[i] + gradient } else { gradient };
            loss += f64::from(error * error);
        }
        let auxiliary = Auxiliary { balance: Some(0.25), ..Auxiliary::default() };
        let targets = batch.taken.targets;
        self.found.push_back(MicroStepResult { targets, loss, auxiliary, dropped: 1 });
        Ok(())
    }

    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<(), TrainError> {
        // Bytes that are not zero, so that the system maps their pages.
        self.kept.push(vec![1; self.kept_by_a_step]);
        let norm = self.gradient.iter().map(|g| f64::from(g * unscale).powi(2)).sum::<f64>().sqrt();
        if norm.is_finite() {
            for i in 0..5 {
                self.momentum[i] = 0.9 * self.momentum[i] + self.gradient[i] * unscale;
                self.weights[i] -= hyper[0] * self.momentum[i];
            }
        }
        self.applied.push_back(Applied { norm, ok: norm.is_finite() });
        Ok(())
    }

    fn finish_step(
        &mut self,
        micro_steps: u64,
        found: &mut dyn FnMut(MicroStepResult),
    ) -> Result<Applied, TrainError> {
        self.found.drain(..micro_steps as usize).for_each(found);
        Ok(self.applied.pop_front().expect("applied"))
    }

    fn abandon(&mut self) {
        self.found.clear();
    }

    fn has_begun_update(&self) -> bool {
        false
    }

    fn evaluate(&mut self, _: &MicroBatch<'_>) -> Result<f64, TrainError> {
        Ok(self.weights.iter().map(|w| f64::from(*w).powi(2)).sum())
    }

    fn set_size(&mut self, _: usize) -> Result<(), TrainError> {
        panic!("there is one size");
    }

    fn remedies(&self, _: &dyn Observer) -> Vec<Remedy> {
        vec![Remedy { settings: vec![Setting::key("memory.remat").to("auto")], saves: Bytes(20), slower: 0.1 }]
    }
}

impl Tensors for Toy {
    fn tensors(&self, part: StatePart) -> Vec<StoredTensor> {
        let stored =
            |name: &str, n: u64| StoredTensor { name: name.to_owned(), dtype: FileDType::F32, shape: vec![n] };
        match part {
            StatePart::Model => vec![stored("a", 2), stored("b", 3)],
            StatePart::State => vec![stored("momentum", if self.is_huge { 1 << 58 } else { 5 })],
            StatePart::Average => vec![],
        }
    }

    fn read(
        &mut self,
        part: StatePart,
        tensor: usize,
        range: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError> {
        out.clear();
        let values = &self.values(part, tensor)[range.start as usize..range.end as usize];
        out.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        Ok(())
    }

    fn write(&mut self, part: StatePart, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), TrainError> {
        let values = &mut self.values(part, tensor)[start as usize..];
        for (value, bytes) in values.iter_mut().zip(bytes.chunks(4)) {
            *value = f32::from_le_bytes(bytes.try_into().expect("four"));
        }
        Ok(())
    }

    fn extra_files(&self) -> Result<Vec<(String, Vec<u8>)>, TrainError> {
        Ok(vec![("config.json".to_owned(), b"{}".to_vec())])
    }
}

/// Observer that records all messages and requests the end of the run after step `stop_after`.
#[derive(Default)]
pub struct RecordingObserver {
    stop_after: Option<u64>,
    step: u64,
    heard: Vec<(Level, String)>,
}

impl RecordingObserver {
    /// All messages, a line each.
    pub fn said(&self) -> String {
        self.heard.iter().map(|(_, text)| format!("{text}\n")).collect()
    }

    pub fn until(step: u64) -> Self {
        Self { stop_after: Some(step), ..Self::default() }
    }
}

impl Observer for RecordingObserver {
    fn say(&mut self, level: Level, text: &str) {
        self.heard.push((level, text.to_owned()));
    }

    fn progress(&mut self, _: &Progress) {}

    fn trained(&mut self, trained: &Trained) {
        self.step = trained.step;
    }

    fn stop(&self) -> Option<u8> {
        self.stop_after.filter(|&n| self.step >= n).map(|_| 15)
    }
}

/// Number of tokens of an optimizer step, `batch.tokens`.
const STEP: f32 = 24.0;

const BASE: &str = "data: {train: [x], longest: 2}\nbatch: {tokens: 24, pack_tokens: 8, micro_tokens: 8}\n\
                    optimizer: {kind: sgd, lr: 0.01}\nschedule: {kind: constant, warmup: 5}\n";

fn config(flags: &str) -> TrainConfig {
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    TrainConfig::parse(BASE, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
}

fn go(
    folder: &Path,
    flags: &str,
    ear: &mut RecordingObserver,
    change: impl Fn(&mut Toy),
) -> Result<TrainReport, TrainError> {
    let request = TrainRequest { config: config(flags), output: folder.to_owned(), resume: Resume::Auto };
    let mut open = |config: &TrainConfig, _: &mut dyn Observer| {
        let mut toy = Toy::new(config);
        change(&mut toy);
        Ok(toy.opened())
    };
    train_with(&request, &mut open, ear)
}

fn train(folder: &Path, flags: &str) -> Result<TrainReport, TrainError> {
    go(folder, flags, &mut RecordingObserver::default(), |_| {})
}

/// Everything that a run of the toy writes, except times: metrics, newest checkpoint, budget.
pub fn seen(folder: &Folder, config: &TrainConfig) -> String {
    let request = TrainRequest { config: config.clone(), output: folder.0.clone(), resume: Resume::Auto };
    let mut open = |config: &TrainConfig, _: &mut dyn Observer| Ok(Toy::new(config).opened());
    let report = train_with(&request, &mut open, &mut RecordingObserver::default()).expect("trained");
    format!("{:?} {:?} {}", lines(folder), bits(&report), report.run_record.budget_bytes.0)
}

/// The files of the newest checkpoint: model tensors, state tensors followed by averages if there are any; and the state of the loop.
pub fn bits(report: &TrainReport) -> (Vec<u8>, Vec<u8>, Value) {
    let read = |name: &str| fs::read(report.checkpoint.as_deref().expect("saved").join(name)).expect("read");
    let state = serde_json::to_value(&report.state).expect("JSON");
    let averages = fs::read(report.checkpoint.as_deref().expect("saved").join("ema/model.safetensors"))
        .unwrap_or_default();
    (read("model.safetensors"), [read("state.safetensors"), averages].concat(), state)
}

/// The lines of metrics.jsonl.
pub fn all_lines(folder: &Folder) -> Vec<Value> {
    let text = fs::read_to_string(folder.path("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Fields of a step in metrics.jsonl that differ between equal runs: times, rates and memory.
pub const OF_THIS_MOMENT: [&str; 8] = [
    "seconds",
    "tokens_per_second",
    "data_wait_seconds",
    "memory_bytes",
    "host_used_bytes",
    "status",
    "utilisation",
    "oom_risk",
];

/// The lines of steps and evaluations in metrics.jsonl, without times, rates and memory.
pub fn lines(folder: &Folder) -> Vec<Value> {
    let timeless = |mut line: Value| {
        for key in OF_THIS_MOMENT {
            line.as_object_mut().expect("an object").remove(key);
        }
        line
    };
    all_lines(folder).into_iter().filter(|line| line.get("stage").is_none()).map(timeless).collect()
}

pub fn names(folder: &Folder) -> Vec<String> {
    let list = Checkpoints::open(&folder.0).expect("open").list().expect("list");
    list.iter().map(|named| named.path.file_name().expect("a name").to_string_lossy().into_owned()).collect()
}

#[test]
fn broken_runs_have_the_bits_of_whole_ones() {
    let flags = "run.steps=40 run.evaluate_every=8";
    let whole = Folder::new("train-whole");
    let wanted = train(&whole.0, flags).expect("40 steps");
    assert_eq!((wanted.steps, wanted.ended, wanted.state.step), (40, Ended::Steps, 40));
    assert!(wanted.state.epoch > 10 && wanted.loss.is_some_and(|loss| loss < 1.0), "{wanted:?}");

    let broken = Folder::new("train-broken");
    for stop in [20, 23] {
        let mut ear = RecordingObserver::until(stop);
        let error = go(&broken.0, flags, &mut ear, |_| {}).expect_err("stopped");
        assert_eq!(error.exit_code(), 143);
        let text = error.to_string();
        assert!(text.starts_with(&format!("interrupted; step {stop} is kept in ")), "{text}");
    }
    // Metrics as a kill leaves them: lines of steps behind the last checkpoint, the last line incomplete.
    let path = broken.path("metrics.jsonl");
    let torn = fs::read_to_string(&path).expect("metrics") + "{\"step\":24,\"loss\":1.0}\n{\"step\":25,\"lo";
    fs::write(&path, torn).expect("written");
    let found = train(&broken.0, flags).expect("the rest");
    assert_eq!(found.steps, 17);
    assert_eq!(bits(&found), bits(&wanted));
    assert_eq!(lines(&broken), lines(&whole));
    assert_eq!(lines(&whole).len(), 45);

    // A complete run takes no more steps, and a run with more steps continues it.
    let again = train(&broken.0, flags).expect("complete");
    assert_eq!((again.steps, again.loss), (0, None));
    assert_eq!(bits(&again), bits(&wanted));
    assert_eq!(train(&broken.0, "run.steps=41 run.evaluate_every=8").expect("one more").steps, 1);
}

/// A run that reads the results of a step while the next one runs, interrupted or not, ends with the bits and the metrics
/// of a run that waits for each step, also with skipped steps, with and without a loss scale.
#[test]
fn results_that_are_read_late_change_nothing() {
    for (kind, infinite) in [("bf16", 0..0), ("bf16", 40..43), ("fp16", 0..0), ("fp16", 41..42)] {
        let flags = format!("precision.kind={kind} run.steps=40 run.evaluate_every=8");
        let run = |folder: &Folder, ear: &mut RecordingObserver, late| {
            let set = |toy: &mut Toy| (toy.late, toy.infinite) = (late, infinite.clone());
            go(&folder.0, &flags, ear, set)
        };
        let waits = Folder::new("train-waits");
        let late = Folder::new("train-late");
        let broken = Folder::new("train-late-broken");
        let wanted = run(&waits, &mut RecordingObserver::default(), false).expect("40 steps");
        let found = run(&late, &mut RecordingObserver::default(), true).expect("40 steps");
        assert_eq!(wanted.state.skipped > 0, !infinite.is_empty(), "{kind}");
        assert_eq!((bits(&found), &found.state), (bits(&wanted), &wanted.state), "{kind}");
        assert_eq!(lines(&late), lines(&waits), "{kind}");
        let error = run(&broken, &mut RecordingObserver::until(12), true).expect_err("stopped");
        // In fp16 no step is started before the loss scale is known.
        let stopped = if kind == "fp16" { 12 } else { 13 };
        assert!(error.to_string().contains(&format!("step {stopped} is kept")), "{kind}: {error}");
        let found = run(&broken, &mut RecordingObserver::default(), true).expect("the rest");
        assert_eq!(bits(&found), bits(&wanted), "{kind}");
        assert_eq!(lines(&broken), lines(&waits), "{kind}");
    }
}

/// The child process of the next test, which kills it.
#[test]
fn child() {
    let Some(folder) = std::env::var_os("PLIMSOLL_TRAIN_CHILD") else {
        println!("skips: it is run by the test that kills it");
        return;
    };
    let slow = |toy: &mut Toy| toy.data.slow = Duration::from_micros(200);
    go(
        Path::new(&folder),
        "run.steps=100000 run.save_every=1 run.evaluate_every=1",
        &mut RecordingObserver::default(),
        slow,
    )
    .expect("trained");
}

/// The step of the newest checkpoint, by the names of folders alone: [`Checkpoints::open`] would delete the
/// checkpoint that the child is writing.
fn reached(folder: &Folder) -> u64 {
    let entries = fs::read_dir(folder.path("checkpoints")).into_iter().flatten().flatten();
    let step = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
    entries.filter_map(step).max().unwrap_or(0)
}

#[test]
fn a_kill_at_any_moment_leaves_a_usable_checkpoint() {
    let folder = Folder::new("train-killed");
    let mut linked = BTreeSet::new();
    for round in 0..50u64 {
        let before = reached(&folder);
        let mut child = std::process::Command::new(std::env::current_exe().expect("this test"))
            .args(["train::child", "--exact", "-q"])
            .env("PLIMSOLL_TRAIN_CHILD", &folder.0)
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("a child");
        while reached(&folder) == before {
            assert!(child.try_wait().expect("a child").is_none(), "round {round}: the child ended");
            std::thread::sleep(Duration::from_micros(500));
        }
        // Delays of up to 20 ms spread the kills over the next few steps, which mostly write checkpoints.
        std::thread::sleep(Duration::from_micros(round * 7919 % 20_000));
        child.kill().expect("killed");
        child.wait().expect("gone");
        if let Ok(link) = fs::read_link(folder.path("best")) {
            linked.insert(link);
            VerifiedCheckpoint::open(&folder.path("best")).unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
    }
    assert!(linked.len() > 1, "the best checkpoint changes: {linked:?}");
    let reached = reached(&folder);
    assert!(reached >= 50, "{reached}");
    let flags = format!("run.save_every=1 run.evaluate_every=1 run.steps={}", reached + 3);
    let mut ear = RecordingObserver::default();
    let found = go(&folder.0, &flags, &mut ear, |_| {}).expect("goes on");
    assert!(ear.heard.iter().all(|(level, _)| *level != Level::Warning), "{:?}", ear.heard);
    assert_eq!(found.steps, 3);
    let whole = Folder::new("train-unkilled");
    assert_eq!(bits(&found), bits(&train(&whole.0, &flags).expect("whole")));
    assert_eq!(fs::read_link(folder.path("best")).ok(), fs::read_link(whole.path("best")).ok());
}

#[test]
fn damage_is_found_and_an_older_checkpoint_taken() {
    let folder = Folder::new("train-damaged");
    let wanted = bits(&train(&folder.0, "run.steps=9 run.save_every=3 run.keep_last=3").expect("trained"));
    assert_eq!(names(&folder), ["step-00000003", "step-00000006", "step-00000009"]);
    let damage = |step: u64, file: &str| {
        let path = folder.path(&format!("checkpoints/step-{step:08}/{file}"));
        let mut bytes = fs::read(&path).expect("read");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).expect("written");
    };
    damage(9, "state.safetensors");
    let mut ear = RecordingObserver::default();
    let report =
        go(&folder.0, "run.steps=9 run.save_every=3 run.keep_last=3", &mut ear, |_| {}).expect("again");
    assert_eq!((report.steps, bits(&report)), (3, wanted));
    let warned = ear.heard.iter().any(|(level, text)| {
        *level == Level::Warning && text.contains("step-00000009 cannot be used: state.safetensors is damaged")
    });
    assert!(warned, "{:?}", ear.heard);

    fs::remove_file(folder.path("checkpoints/step-00000009/model.safetensors")).expect("removed");
    damage(6, "config.json");
    damage(3, "trainer.json");
    let error = train(&folder.0, "run.steps=9").expect_err("none is left");
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().starts_with("no checkpoint can be used ("), "{error}");
}

#[test]
fn a_checkpoint_of_another_configuration_is_refused() {
    let folder = Folder::new("train-other");
    train(&folder.0, "run.steps=4").expect("trained");
    for (flags, wanted) in [
        ("run.steps=4 run.seed=1", "`run.seed` was 0, is 1"),
        ("run.steps=4 optimizer.lr=0.5", "`optimizer.lr` was 0.01, is 0.5"),
        ("run.steps=4 batch.pack_tokens=4", "`batch.pack_tokens` was 8, is 4"),
    ] {
        let error = train(&folder.0, flags).expect_err(wanted);
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains(wanted), "{error}");
    }
    // Keys that do not change results may differ.
    let free =
        "run.steps=5 run.log_every=2 run.keep_last=1 data.workers=3 memory.remat=none memory.budget=1GiB";
    assert_eq!(train(&folder.0, free).expect("goes on").steps, 1);
    let never = TrainRequest { config: config("run.steps=5"), output: folder.0.clone(), resume: Resume::Never };
    let mut open = |config: &TrainConfig, _: &mut dyn Observer| Ok(Toy::new(config).opened());
    let error = train_with(&never, &mut open, &mut RecordingObserver::default()).expect_err("there is one");
    assert!(error.to_string().starts_with("resume=never: "), "{error}");

    // A decaying learning rate depends on the last step of the schedule.
    let falling = Folder::new("train-falling");
    train(&falling.0, "run.steps=8 schedule.kind=cosine").expect("trained");
    let error = train(&falling.0, "run.steps=9 schedule.kind=cosine").expect_err("another end");
    assert!(error.to_string().contains("the schedule ended at step 8, ends at step 9"), "{error}");
    let same_end = "run.steps=9 schedule.kind=cosine schedule.steps=8";
    assert_eq!(train(&falling.0, same_end).expect("the same schedule").steps, 1);
}

/// `--resume never` deletes nothing; with `--force` the checkpoints and metrics of the earlier run are gone.
#[test]
fn a_run_starts_over() {
    let folder = Folder::new("train-over");
    train(&folder.0, "run.steps=4 run.save_every=2 run.evaluate_every=2").expect("trained");
    let own = folder.write("notes.txt", "of the user");
    let again = |resume| {
        let request =
            TrainRequest { config: config("run.steps=3 run.seed=5"), output: folder.0.clone(), resume };
        let mut open = |config: &TrainConfig, _: &mut dyn Observer| Ok(Toy::new(config).opened());
        train_with(&request, &mut open, &mut RecordingObserver::default())
    };
    let error = again(Resume::Never).expect_err("there are checkpoints");
    assert!(error.to_string().contains("give force to delete") && error.exit_code() == 3, "{error}");
    assert_eq!(lines(&folder).len(), 6, "four steps and two evaluations");
    let report = again(Resume::StartOver).expect("started over");
    assert_eq!((report.steps, lines(&folder).len()), (3, 3));
    assert!(own.exists() && !folder.path("checkpoints/step-00000004").exists());
    assert_eq!(fs::read_link(folder.path("best")).ok(), None, "the new run has not evaluated");
}

/// Epochs of 3, 2 and 3 micro-batches with steps of 3: the second epoch ends in the step that began at the end of the first one.
#[test]
fn an_epoch_may_be_shorter_than_a_step() {
    let folder = Folder::new("train-short-epoch");
    let change = |toy: &mut Toy| toy.data.ends = &[4, 7, 11];
    let report = go(&folder.0, "run.steps=3", &mut RecordingObserver::default(), change).expect("trained");
    assert_eq!((report.state.step, report.state.epoch), (3, 2));
    let found: Vec<_> = lines(&folder).iter().map(|l| (l["micro_steps"].clone(), l["epoch"].clone())).collect();
    assert_eq!(found, [(json!(3), json!(0)), (json!(2), json!(1)), (json!(3), json!(2))]);
}

/// (flags, micro-batches of an epoch, steps after which an evaluation ran, steps of the checkpoints): an epoch of 7
/// micro-batches has 3 steps, the last of them smaller, and an epoch of 6 has 2 whole steps.
#[test]
fn evaluations_and_checkpoints_by_epoch() {
    for (flags, epoch, evaluations, checkpoints) in [
        ("run.epochs=3 run.evaluate_every=epoch", 7, vec![3, 6, 9], vec![3, 9]),
        ("run.epochs=3 run.evaluate_every=epoch run.save_every=epoch", 7, vec![3, 6, 9], vec![3, 6, 9]),
        ("run.epochs=3 run.evaluate_every=epoch run.save_every=epoch", 6, vec![2, 4, 6], vec![2, 4, 6]),
        ("run.epochs=4 run.save_every=2epochs", 6, vec![], vec![4, 8]),
        ("run.epochs=5 run.save_every=2epochs run.evaluate_every=3epochs", 7, vec![9, 15], vec![6, 9, 12, 15]),
        ("run.steps=4 run.evaluate_every=epoch", 6, vec![2, 4], vec![2, 4]),
    ] {
        let folder = Folder::new("train-by-epoch");
        let flags = format!("{flags} run.keep_last=9");
        let change = |toy: &mut Toy| toy.data.epoch = epoch;
        let report = go(&folder.0, &flags, &mut RecordingObserver::default(), change).expect("trained");
        let found: Vec<u64> = all_lines(&folder)
            .iter()
            .filter(|line| line.get("validation_loss").is_some())
            .map(|line| line["step"].as_u64().expect("a step"))
            .collect();
        assert_eq!(found, evaluations, "{flags}");
        let names = Checkpoints::list_in(&folder.0).expect("checkpoints");
        let steps: Vec<u64> = names.iter().map(|named| named.step).collect();
        // The toy's loss falls in the first epochs alone, so the best checkpoint may be one more.
        assert!(checkpoints.iter().all(|step| steps.contains(step)), "{flags}: {steps:?}");
        // A run that is broken between two epochs has the bits of a whole one.
        let broken = Folder::new("train-by-epoch-broken");
        go(&broken.0, &flags, &mut RecordingObserver::until(checkpoints[0]), change).expect_err("stopped");
        let resumed = go(&broken.0, &flags, &mut RecordingObserver::default(), change).expect("resumed");
        assert_eq!(bits(&resumed), bits(&report), "{flags}");
    }
}

/// Rates of tokens are of training alone.
#[test]
fn evaluations_are_left_out_of_rates() {
    let folder = Folder::new("train-rates");
    let slow = |toy: &mut Toy| toy.data.slow_evaluation = Duration::from_millis(30);
    let flags = "run.steps=3 run.evaluate_every=1 run.save_every=null run.keep_best=false";
    let report = go(&folder.0, flags, &mut RecordingObserver::default(), slow).expect("trained");
    // Three evaluations of four batches.
    assert!(report.seconds > 0.36, "{}", report.seconds);
    let whole = report.state.tokens as f64 / report.seconds;
    assert!(report.tokens_per_second > 2.0 * whole, "{} {whole}", report.tokens_per_second);
    for line in all_lines(&folder).iter().filter(|line| line.get("loss").is_some()) {
        assert!(line["tokens_per_second"].as_f64().expect("a rate") > 2.0 * whole, "{line}");
    }
}

/// The first checkpoint does not fail after hours of training.
#[test]
fn a_run_needs_room_for_a_checkpoint() {
    let folder = Folder::new("train-room");
    let huge = |toy: &mut Toy| toy.is_huge = true;
    let error = go(&folder.0, "run.steps=2", &mut RecordingObserver::default(), huge).expect_err("no room");
    let text = error.to_string();
    assert!(
        text.contains("a checkpoint of this run takes 1 152 921 504 606 84") && text.contains("are free there"),
        "{text}"
    );
    assert!(!folder.path("metrics.jsonl").exists());
}

/// `run.save_every: never` needs no room for a checkpoint and writes none: not at the best loss, on a signal or at the end.
#[test]
fn a_run_without_checkpoints() {
    let folder = Folder::new("train-never");
    let flags = "run.steps=8 run.evaluate_every=2 run.save_every=never";
    let huge = |toy: &mut Toy| toy.is_huge = true;
    let error = go(&folder.0, flags, &mut RecordingObserver::until(3), huge).expect_err("stopped");
    assert!(error.to_string().contains("step 3 is lost, because run.save_every is never"), "{error}");
    let report = go(&folder.0, flags, &mut RecordingObserver::default(), huge).expect("eight steps");
    assert_eq!((report.steps, report.checkpoint, report.run_record.checkpoint), (8, None, None));
    assert_eq!(record(&folder)["status"], "finished");
    assert!(names(&folder).iter().all(|name| !name.contains("step") && name != "best"), "{:?}", names(&folder));
}

#[test]
fn a_run_without_an_update_fails() {
    let folder = Folder::new("train-skipped");
    let flags = "run.steps=2 precision.kind=fp16 precision.initial_scale=1048576";
    let infinite = |toy: &mut Toy| toy.infinite = 0..1000;
    let error =
        go(&folder.0, flags, &mut RecordingObserver::default(), infinite).expect_err("nothing was trained");
    assert!(error.to_string().starts_with("all 2 steps of the run were skipped"), "{error}");
    assert_eq!((record(&folder)["status"].as_str(), error.exit_code()), (Some("failed"), 1));
}

#[test]
fn a_run_can_begin_at_a_checkpoint_of_another_folder() {
    let first = Folder::new("train-first");
    let second = Folder::new("train-second");
    let whole = bits(&train(&first.0, "run.steps=6 run.save_every=2 run.keep_last=9").expect("trained"));
    let from = |resume: &Path, output: &Path| {
        let resume = Resume::From(resume.to_owned());
        let request = TrainRequest { config: config("run.steps=6"), output: output.to_owned(), resume };
        let mut open = |config: &TrainConfig, _: &mut dyn Observer| Ok(Toy::new(config).opened());
        train_with(&request, &mut open, &mut RecordingObserver::default())
    };
    let report = from(&first.path("checkpoints/step-00000002"), &second.0).expect("goes on");
    assert_eq!((report.steps, bits(&report)), (4, whole));
    // The other run may still be going, and be writing a checkpoint or removing one.
    let others =
        [".step-00000008.part", ".step-00000002.gone"].map(|name| first.path("checkpoints").join(name));
    others.iter().for_each(|path| std::fs::create_dir(path).expect("a folder"));
    assert_eq!(from(&first.0, &Folder::new("train-third").0).expect("the newest").steps, 0);
    assert!(others.iter().all(|path| path.is_dir()), "another run's folder was changed");
    let error = from(&first.path("checkpoints/step-00000002"), &first.0).expect_err("a newer one is there");
    assert!(error.to_string().contains("step-00000006 is newer"), "{error}");
    let fourth = Folder::new("train-fourth");
    let error = from(&second.path("nothing"), &fourth.path("run")).expect_err("nothing");
    assert!(
        error.exit_code() == 3 && error.to_string().contains("give a checkpoint, or the folder of a run"),
        "{error}"
    );
    assert!(!fourth.path("run").exists(), "a run that has written nothing leaves no folder");
    assert_eq!(from(&second.path("nothing"), &first.0).expect_err("nothing").exit_code(), 3);
}

#[test]
fn groups_end_with_their_epoch_and_weigh_their_targets() {
    let folder = Folder::new("train-groups");
    let report = train(&folder.0, "run.epochs=2").expect("trained");
    assert_eq!((report.ended, report.state.step, report.state.epoch), (Ended::Epochs, 6, 2));
    // Seven micro-batches give optimizer steps of 3, 3 and 1; the last micro-batch has 3 tokens and 2 targets.
    assert_eq!((report.state.targets, report.state.tokens), (2 * 26, 2 * 51));
    let found: Vec<_> = lines(&folder).iter().map(|l| (l["micro_steps"].clone(), l["epoch"].clone())).collect();
    let wanted = [(3, 0), (3, 0), (1, 0), (3, 1), (3, 1), (1, 1)];
    assert_eq!(found, wanted.map(|(a, b)| (json!(a), json!(b))));
    assert!(lines(&folder).iter().all(|line| line["balance_loss"] == json!(0.25)));
    let more = train(&Folder::new("train-tokens").0, "run.max_tokens=20").expect("trained");
    assert_eq!((more.ended, more.state.targets), (Ended::Tokens, 24));
}

#[test]
fn overflows_are_skipped_counted_and_overcome() {
    let folder = Folder::new("train-fp16");
    let flags = "run.steps=8 precision.kind=fp16 precision.initial_scale=16 precision.growth_interval=3";
    // Positions 1 to 7 are the first epoch and its three steps, 8 is its end; 10 is the second micro-batch of
    // step 4, the first of the second epoch.
    let mut ear = RecordingObserver::default();
    let report = go(&folder.0, flags, &mut ear, |toy| toy.overflow = Some(10)).expect("trained");
    assert_eq!((report.state.skipped, report.state.updates, report.state.step), (1, 7, 8));
    assert_eq!(report.run_record.state.skipped, 1);
    let said: Vec<&str> =
        ear.heard.iter().map(|(_, text)| &**text).filter(|text| text.contains("skipped")).collect();
    assert_eq!(said, ["step 4 skipped: gradient not finite; the loss scale is now 16"]);
    let skipped: Vec<Value> = lines(&folder).iter().map(|line| line["skipped"].clone()).collect();
    assert_eq!(skipped, [0, 0, 0, 1, 1, 1, 1, 1].map(|n| json!(n)));
    let scales: Vec<Value> = lines(&folder).iter().map(|line| line["loss_scale"].clone()).collect();
    assert_eq!(scales, [16.0, 16.0, 16.0, 32.0, 16.0, 16.0, 16.0, 32.0].map(|x| json!(x)));
    assert_eq!(lines(&folder)[3]["grad_norm"], Value::Null);
    // A skipped step is not a step of the warm-up of five steps.
    let rates: Vec<f64> = lines(&folder).iter().map(|line| line["lr"].as_f64().expect("a rate")).collect();
    let wanted = [1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0, 5.0].map(|n| 0.01 * n / 5.0);
    assert!(rates.iter().zip(wanted).all(|(rate, wanted)| (rate - wanted).abs() < 1e-12), "{rates:?}");

    let plain = Folder::new("train-inf");
    let whole = "run.steps=8 precision.kind=fp16 precision.initial_scale=1";
    assert!(go(&plain.0, whole, &mut RecordingObserver::default(), |toy| toy.overflow = Some(10)).is_ok());
    let nan = Folder::new("train-nan");
    let error = go(&nan.0, "run.steps=8 run.save_every=1", &mut RecordingObserver::default(), |toy| {
        toy.weights[0] = f32::NAN;
    })
    .expect_err("no number");
    assert!(error.to_string().starts_with("step 1: the loss is not finite"), "{error}");
}

#[test]
fn steps_whose_gradients_are_not_finite_are_skipped_and_end_the_run() {
    for precision in ["f32", "tf32", "bf16"] {
        let flags = format!("run.steps=8 precision.kind={precision}");
        let folder = Folder::new("train-skips");
        let mut ear = RecordingObserver::default();
        // Positions 4 to 7 are the micro-batches of steps 2 and 3.
        let report = go(&folder.0, &flags, &mut ear, |toy| toy.infinite = 4..8).expect("trained");
        assert_eq!((report.state.skipped, report.state.updates, report.state.step), (2, 6, 8));
        assert_eq!(report.state.skipped_in_a_row, 0);
        let skipped: Vec<Value> = lines(&folder).iter().map(|line| line["skipped"].clone()).collect();
        assert_eq!(skipped, [0, 1, 2, 2, 2, 2, 2, 2].map(|n| json!(n)));
        let said = "step 3 skipped: gradient not finite, 2 in a row; the run ends at 10";
        assert!(ear.heard.iter().any(|(_, text)| text == said), "{:?}", ear.heard);
        let whole = Folder::new("train-skips-all");
        let flags = format!("run.steps=80 precision.kind={precision}");
        let error = go(&whole.0, &flags, &mut ear, |toy| toy.infinite = 4..1000).expect_err("an end");
        assert!(error.to_string().starts_with("step 11: a gradient was not finite in 10 steps"), "{error}");
    }
}

#[test]
fn the_best_and_the_newest_are_kept() {
    let folder = Folder::new("train-best");
    // The validation loss is the sum of squared weights. They start at zero, so the first evaluation is the best.
    let flags = "run.steps=100 run.evaluate_every=2 run.patience=3 run.save_every=1 optimizer.lr=0.3 \
                 schedule.warmup=0 run.keep_last=1";
    let report =
        go(&folder.0, flags, &mut RecordingObserver::default(), |toy| toy.weights = [0.0; 5]).expect("trained");
    let best = report.state.best.expect("an evaluation");
    assert_eq!((report.ended, report.state.stale), (Ended::Patience, 3));
    assert!(report.state.step >= best.step + 6);
    assert_eq!(names(&folder), [format!("step-{:08}", best.step), format!("step-{:08}", report.state.step)]);
    let link = |folder: &Folder| fs::read_link(folder.path("best")).ok();
    let wanted = Path::new("checkpoints").join(format!("step-{:08}", best.step));
    assert_eq!(link(&folder), Some(wanted.clone()));
    assert!(report.run_record.stopped_early);
    // A link that a killed process left elsewhere is set right, and removed if the best checkpoint is not kept.
    fs::remove_file(folder.path("best")).expect("removed");
    std::os::unix::fs::symlink("checkpoints/step-99999999", folder.path("best")).expect("linked");
    std::os::unix::fs::symlink("nowhere", folder.path(".best.part")).expect("linked");
    let still = |toy: &mut Toy| toy.weights = [0.0; 5];
    let mut ear = RecordingObserver::default();
    go(&folder.0, flags, &mut ear, still).expect("complete");
    assert_eq!(link(&folder), Some(wanted));
    let said = format!("stopped early after step {}: 3 evaluations without", report.state.step);
    assert!(ear.heard.iter().any(|(_, text)| text.starts_with(&said)), "{:?}", ear.heard);
    go(&folder.0, &format!("{flags} run.keep_best=false"), &mut RecordingObserver::default(), still)
        .expect("complete");
    assert_eq!(link(&folder), None);
    // What is not a link of ours is not replaced.
    fs::create_dir(folder.path("best")).expect("created");
    let error =
        go(&folder.0, flags, &mut RecordingObserver::default(), still).expect_err("a folder").to_string();
    assert!(error.contains("best"), "{error}");
    let marks: Vec<Value> = lines(&folder).iter().filter_map(|l| l.get("best").cloned()).collect();
    assert_eq!(marks.iter().filter(|mark| **mark == json!(false)).count(), 3, "{marks:?}");
}

/// A run that is interrupted before `run.patience` ends it stops at the step at which an unbroken run stops.
#[test]
fn early_stopping_goes_on_where_it_was() {
    for delta in ["0", "0.05", "1000"] {
        let flags = format!(
            "run.steps=200 run.evaluate_every=2 run.patience=4 run.min_delta={delta} optimizer.lr=0.05 \
             schedule.warmup=0"
        );
        let whole = Folder::new("train-patience");
        let wanted = train(&whole.0, &flags).expect("trained");
        assert_eq!(wanted.ended, Ended::Patience, "{delta}");
        assert!(wanted.state.step < 200, "{delta}");
        let broken = Folder::new("train-patience-broken");
        for stop in [wanted.state.step - 5, wanted.state.step - 3, wanted.state.step - 1] {
            go(&broken.0, &flags, &mut RecordingObserver::until(stop), |_| {}).expect_err("stopped");
        }
        let found = train(&broken.0, &flags).expect("the rest");
        assert_eq!(bits(&found), bits(&wanted), "{delta}");
        assert_eq!(lines(&broken), lines(&whole), "{delta}");
    }
    let folder = Folder::new("train-not-stopped");
    let report = train(&folder.0, "run.steps=3").expect("trained");
    assert!(!report.run_record.stopped_early);
}

/// Floats in a checkpoint's record survive writing and reading as JSON without a change of a bit.
#[test]
fn numbers_are_read_back_as_they_were_written() {
    for number in [26463.619787315518, 0.1 + 0.2, 5e-324, f64::MAX, 1.0 / 3.0] {
        let text = serde_json::to_string(&number).expect("a number");
        let read: f64 = serde_json::from_str(&text).expect("a number");
        assert_eq!(read.to_bits(), number.to_bits(), "{text}");
    }
}

#[test]
fn the_folder_says_what_was_run() {
    let folder = Folder::new("train-folder");
    let report = train(&folder.0, "run.steps=3").expect("trained");
    let text = fs::read_to_string(folder.path("config.yaml")).expect("config.yaml");
    let read = TrainConfig::parse(&text, "config.yaml", &[]).expect("a configuration");
    assert_eq!(read.memory.loss_chunk.0, Some(64), "the choice is in it");
    let record: Value =
        serde_json::from_slice(&fs::read(folder.path("run.json")).expect("run.json")).expect("JSON");
    assert_eq!(record, to_json(&report.run_record));
    assert_eq!((&record["ended"], &record["choices"]["memory.loss_chunk"]), (&json!("run.steps"), &json!(64)));
    let model = plimsoll_data::weights::Weights::open(report.checkpoint.as_deref().expect("saved"))
        .expect("as others read it");
    assert_eq!(model.tensors().count(), 2);
}

fn record(folder: &Folder) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.path("run.json")).expect("run.json")).expect("JSON")
}

/// run.json exists before the first step, and its `status` is the state of the run.
#[test]
fn the_record_says_how_a_run_goes() {
    let folder = Folder::new("train-status");
    let seen = std::rc::Rc::new(std::cell::RefCell::new(vec![]));
    let look = |toy: &mut Toy| {
        let status = record(&folder)["status"].clone();
        seen.borrow_mut().push(status);
        toy.weights[0] = f32::NAN;
    };
    let error = go(&folder.0, "run.steps=8", &mut RecordingObserver::default(), look).expect_err("no number");
    assert_eq!(*seen.borrow(), ["running"]);
    assert_eq!(
        (&record(&folder)["status"], &record(&folder)["error"]),
        (&json!("failed"), &json!(error.to_string()))
    );
    let folder = Folder::new("train-status-stopped");
    let mut ear = RecordingObserver { stop_after: Some(2), ..RecordingObserver::default() };
    go(&folder.0, "run.steps=8", &mut ear, |_| {}).expect_err("stopped");
    assert_eq!(record(&folder)["status"], "interrupted");
    train(&folder.0, "run.steps=8").expect("trained");
    assert_eq!(record(&folder)["status"], "finished");
}

/// `run.save_every` as a time, null or a number of steps. The last step is always saved.
#[test]
fn checkpoints_by_time() {
    let at = |every: &str| {
        let folder = Folder::new("train-by-time");
        train(&folder.0, &format!("run.steps=6 run.keep_last=9 run.save_every={every}")).expect("trained");
        names(&folder).into_iter().filter(|name| name.contains("step-")).count()
    };
    assert_eq!((at("0.000000001s"), at("10min"), at("1h"), at("null"), at("3")), (6, 1, 1, 1, 2));
}

/// Messages before the first step state the model, the data, the memory and the output folder.
#[test]
fn a_run_introduces_itself() {
    let folder = Folder::new("train-introduced");
    let mut ear = RecordingObserver::default();
    go(&folder.0, "run.steps=2 data.workers=1", &mut ear, |_| {}).expect("trained");
    let said = ear.heard.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n");
    for wanted in [
        "trains a moe_lm from random weights, in f32, with sgd, for 2 steps",
        "on x, 24 tokens a step in packs of 8 and micro-steps of 8; computed by the CPU",
        " planned of a budget of ",
        "a checkpoint every 10min and at the end",
    ] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    assert!(said.contains(&format!("writes to {}", folder.0.display())), "{said}");
}

/// Memory at the end of each stage and the health of the run are in metrics.jsonl and run.json.
#[test]
fn a_run_records_its_memory_and_its_health() {
    let folder = Folder::new("train-health");
    let mut ear = RecordingObserver::default();
    let flags = "run.steps=9 run.evaluate_every=2 run.save_every=3 run.keep_best=false";
    go(&folder.0, flags, &mut ear, |_| {}).expect("trained");
    let all = all_lines(&folder);
    let steps: Vec<u64> = all.iter().map(|line| line["step"].as_u64().expect("a step")).collect();
    assert!(steps.is_sorted(), "{steps:?}");
    let stages: Vec<String> =
        all.iter().filter_map(|line| Some(format!("{} {}", line["stage"].as_str()?, line["step"]))).collect();
    let wanted = "start 0,opened 0,first step 1,evaluation 2,checkpoint 3,evaluation 4,evaluation 6,checkpoint 6,\
                  evaluation 8,checkpoint 9,evaluation 9,trained 9";
    assert_eq!(stages.join(","), wanted);
    for line in &all {
        let bytes = if line.get("stage").is_some() { "resident_bytes" } else { "memory_bytes" };
        assert!(line.get("validation_loss").is_some() || line[bytes].as_u64().is_some_and(|n| n > 0), "{line}");
    }
    // The budget of the toy is far below the memory of any process.
    let step = all.iter().find(|line| line.get("loss").is_some()).expect("a step");
    assert_eq!(step["status"], "critical");
    assert!(step["utilisation"].as_f64().is_some_and(|n| n > 1.0), "{step}");
    assert!(step["oom_risk"].as_f64().is_some_and(|n| (0.0..=1.0).contains(&n)), "{step}");

    let record = record(&folder);
    let kept = record["memory"].as_array().expect("stages").iter();
    let kept: Vec<String> =
        kept.map(|s| format!("{} {}", s["stage"].as_str().expect("a name"), s["step"])).collect();
    let wanted =
        "start null,opened 0,first step 1,evaluation 2,checkpoint 3,checkpoint 9,evaluation 9,trained 9";
    assert_eq!(kept.join(","), wanted);
    let health = &record["health"];
    assert_eq!((&health["status"], &health["fragmentation"]), (&json!("critical"), &json!(0.25)));
    assert_eq!(health["leak"], Value::Null);
    assert_eq!(health["recommendations"][0]["text"], "memory.remat=auto saves 20 B, +10 % time");
    let said =
        ear.heard.iter().filter(|(_, text)| text.starts_with("memory is critical: memory.remat")).count();
    assert_eq!(said, 1, "{:?}", ear.heard);
}

/// A failed run has the memory until its end too.
#[test]
fn a_failed_run_records_its_memory() {
    let folder = Folder::new("train-health-failed");
    let change = |toy: &mut Toy| toy.weights[0] = f32::NAN;
    go(&folder.0, "run.steps=8", &mut RecordingObserver::default(), change).expect_err("no number");
    let record = record(&folder);
    assert_eq!((&record["status"], &record["memory"][1]["stage"]), (&json!("failed"), &json!("opened")));
    assert_eq!(record["health"]["status"], "critical");
}

/// Environment variable that makes the test below train in a process of its own, with this number of bytes that each
/// step keeps.
const KEPT_BY_A_STEP: &str = "PLIMSOLL_TEST_KEPT_BY_A_STEP";

/// A step that keeps a megabyte is reported within 20 steps, and 1000 steps that keep nothing are not. Each case is a
/// process of its own, because the tests of this binary share the memory that is measured.
#[test]
fn a_planted_leak_is_found() {
    if let Some(kept) = std::env::var(KEPT_BY_A_STEP).ok().and_then(|n| n.parse().ok()) {
        return train_with_leak(kept);
    }
    for kept in [0, 1 << 20] {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this test"));
        child.args(["--exact", "train::a_planted_leak_is_found", "--nocapture"]);
        let done = child.env(KEPT_BY_A_STEP, kept.to_string()).output().expect("it starts");
        let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(done.status.success(), "{kept}: {said:?}");
    }
}

/// Trains a toy of which each step keeps memory, and checks what is reported.
fn train_with_leak(kept: usize) {
    let folder = Folder::new(&format!("train-leak-{kept}"));
    let steps = if kept > 0 { 20 } else { 1000 };
    let mut ear = RecordingObserver::default();
    let flags = format!("run.steps={steps} run.evaluate_every=50 run.save_every=100");
    go(&folder.0, &flags, &mut ear, |toy| toy.kept_by_a_step = kept).expect("trained");
    let leak = record(&folder)["health"]["leak"].clone();
    let warned = ear.heard.iter().filter(|(level, text)| *level == Level::Warning && text.contains("grows by"));
    let warned = warned.count();
    if kept == 0 {
        assert_eq!((leak, warned), (Value::Null, 0));
        return;
    }
    let rate = leak["bytes_per_step"].as_f64().expect("a leak") / kept as f64;
    assert!(warned == 1 && (0.8..1.2).contains(&rate), "{leak} {warned}");
    assert!(leak["found_after_steps"].as_u64().is_some_and(|n| n <= 20), "{leak}");
}
