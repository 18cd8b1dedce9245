//! Tests of interrupted and resumed runs, merged shards, and two stages under a small memory budget. Invariant:
//! the result files equal byte for byte those of an uninterrupted run.

use crate::rig::{golden, method, read, run, virnucpro};
use plimsoll_data::journal::Journal;
use plimsoll_data::weights::{StoredAs, StoredTensor, TensorData, Weights, write_safetensors};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Failure, Level, Observer, Progress};
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::output::EmbeddingFormat;
use plimsoll_virus::{PredictOptions, PredictReport, VirusError, WindowShard, predict};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Path of the input of the golden files.
pub fn reads() -> PathBuf {
    fixture("goldens/pipeline/reads.fa")
}

/// A prediction with small steps that commits every finished window at once, so that an interruption leaves a
/// journal with some of the windows.
pub fn options(output: &Path) -> PredictOptions {
    let mut options = PredictOptions {
        commit_every: Duration::ZERO,
        ..virnucpro(golden(&reads(), output), |method| method.save_embeddings = Some(EmbeddingFormat::Npy))
    };
    options.settings.tokens = Some(502);
    options
}

/// Returns the contents of all result files except run.json, which contains durations.
pub fn results(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).expect("a folder").flatten();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    files
        .map(|file| (name(&file.path()), fs::read(file.path()).expect("bytes")))
        .filter(|(name, _)| name != "run.json")
        .collect()
}

/// Checks that the result files in the folder `found` are exactly `wanted`.
pub fn same(found: &Path, wanted: &BTreeMap<String, Vec<u8>>) {
    let found = results(found);
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    for (name, bytes) in wanted {
        assert!(&found[name] == bytes, "{name} differs");
    }
}

/// Observer that requests the end of the run (SIGTERM) at a given call of `stop`, and records the messages.
pub struct Stopper {
    /// Number of calls of `stop` until the request.
    left: Cell<usize>,
    pub said: Vec<String>,
}

impl Stopper {
    pub fn after(asked: usize) -> Self {
        Self { left: Cell::new(asked), said: vec![] }
    }

    pub fn never() -> Self {
        Self::after(usize::MAX)
    }
}

impl Observer for Stopper {
    fn say(&mut self, _: Level, text: &str) {
        self.said.push(text.to_owned());
    }

    fn progress(&mut self, _: &Progress) {}

    fn stop(&self) -> Option<u8> {
        self.left.set(self.left.get().saturating_sub(1));
        (self.left.get() == 0).then_some(15)
    }
}

/// Interrupts a run at the call number `steps` of `Observer::stop`; returns the error.
fn break_off(options: &PredictOptions, steps: usize) -> VirusError {
    let error = predict(options, &mut Stopper::after(steps)).map(|_| ()).expect_err("it was broken");
    assert_eq!(error.exit_code(), 143, "{error}");
    error
}

/// Interrupts a run repeatedly, each time later, until its journal has results. The call of `stop` at which
/// that happens is not fixed, because waiting on a busy machine calls `stop` too.
pub fn break_off_with_results(options: &PredictOptions) -> VirusError {
    let journal = options.output_dir.join("progress.journal");
    for steps in (8..).step_by(2) {
        let error = break_off(options, steps);
        if fs::metadata(&journal).is_ok_and(|journal| journal.len() > 10_000) {
            return error;
        }
    }
    unreachable!("the run ends before the numbers do");
}

/// Number of windows whose results came from the journal.
pub fn kept(report: &PredictReport) -> u64 {
    to_json(&report.run_record)["windows_from_journal"].as_u64().expect("a count")
}

#[test]
fn a_broken_run_goes_on_and_ends_with_the_same_bytes() {
    let folder = Folder::new("broken");
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let go_on = |broken: &PredictOptions| {
        let mut observer = Stopper::never();
        let report = predict(broken, &mut observer).unwrap_or_else(|e| panic!("{e}"));
        same(&broken.output_dir, &wanted);
        let told = observer.said.iter().any(|s| s.contains("windows are finished"));
        assert_eq!(told, kept(&report) > 0, "{:?}", observer.said);
        kept(&report)
    };
    let early = options(&folder.path("early"));
    break_off(&early, 1);
    assert_eq!(go_on(&early), 0);
    let late = options(&folder.path("late"));
    break_off_with_results(&late);
    assert!(go_on(&late) > 0);
}

#[test]
fn a_run_that_is_broken_again_and_again_ends() {
    let folder = Folder::new("again-and-again");
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    let broken = options(&folder.path("broken"));
    let mut starts = 0;
    loop {
        starts += 1;
        match predict(&broken, &mut Stopper::after(8 + starts)) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.exit_code(), 143, "{error}"),
        }
        assert!(starts < 1000, "it does not get on");
    }
    same(&broken.output_dir, &results(&folder.path("whole")));
}

#[test]
fn a_journal_of_another_run_is_refused() {
    let folder = Folder::new("foreign");
    let out = folder.path("out");
    let first = options(&out);
    break_off_with_results(&first);
    let before = results(&out);
    let refused = |options: &PredictOptions, says: &str| {
        let error = run(options).expect_err("another run");
        assert_eq!(error.exit_code(), 3, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(results(&out), before, "it was touched");
    };
    refused(&PredictOptions { length: 300, ..first.clone() }, "length");
    refused(&PredictOptions { inputs: vec![folder.write("other.fa", ">x\nACGT\n")], ..first.clone() }, "input");
    let mut models = first.clone();
    method(&mut models).models.head = Some(folder.path("head.safetensors"));
    let weights = Weights::open(&fixture("goldens/head.pth")).expect("the head");
    copy_changed(&weights, &folder.path("head.safetensors"), |_, _, data| data[0] += 0.5);
    refused(&models, "weights");
    refused(&PredictOptions { shard: Some(WindowShard { number: 1, of: 2 }), ..first.clone() }, "shard");
    // A run with --force discards the journal.
    let forced = PredictOptions { length: 300, force: true, ..first };
    let report = run(&forced).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(kept(&report), 0);
}

/// Writes a copy of the f32 tensors of `weights` to `to`, after `change` was called with the name, shape and
/// values of each.
fn copy_changed(weights: &Weights, to: &Path, change: impl Fn(&str, &[u64], &mut [f32])) {
    let copy = |t: &StoredTensor| {
        let mut data = vec![0.0; t.elements() as usize];
        weights.read_f32(t.name(), 0..t.elements(), &mut data).expect("read");
        change(t.name(), t.shape(), &mut data);
        (t.name().to_owned(), t.shape().to_vec(), data)
    };
    let tensors: Vec<_> = weights.tensors().filter(|t| t.dtype().name() == "F32").map(copy).collect();
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    write_safetensors(to, &data, &BTreeMap::new(), StoredAs::F32).expect("written");
}

#[test]
fn a_journal_of_another_run_that_holds_nothing_is_no_hindrance() {
    let folder = Folder::new("nothing");
    let whole = "@a\nACGTACGTACGT\n+\nIIIIIIIIIIII\n@b\nACGT\n+\nIIII\n";
    let input = folder.write("cut.fq", &whole[..whole.len() - 3]);
    let options = PredictOptions { inputs: vec![input], ..options(&folder.path("out")) };
    assert_eq!(run(&options).expect_err("cut short").exit_code(), 1);
    // A run that fails before its first window leaves no folder; a killed run leaves a journal that holds only
    // a key.
    assert!(!folder.path("out").exists());
    fs::create_dir(folder.path("out")).expect("made");
    let key = br#"{"identity": {}, "plimsoll": "0"}"#;
    drop(Journal::create(&folder.path("out/progress.journal"), key).expect("written"));
    folder.write("cut.fq", whole);
    run(&options).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn the_same_input_under_another_name_is_another_result() {
    let folder = Folder::new("renamed");
    let (a, b) = (folder.write("a.fa", ">x\nACGTACGTACGT\n"), folder.write("b.fa", ">x\nACGTACGTACGT\n"));
    let out = folder.path("out");
    run(&PredictOptions { inputs: vec![a], ..options(&out) }).unwrap_or_else(|e| panic!("{e}"));
    let error = run(&PredictOptions { inputs: vec![b], ..options(&out) }).expect_err("its tables name a.fa");
    assert_eq!(error.exit_code(), 3, "{error}");
    assert!(error.to_string().contains("under another name"), "{error}");
}

#[test]
fn ids_that_tables_show_alike_are_told_apart() {
    let folder = Folder::new("alike");
    let input = folder.write("alike.fa", ">a\u{1b}\nACGTACGTACGT\n>a\\u{1b}\nTTGTACGTACGT\n");
    let report = run(&PredictOptions { inputs: vec![input], ..options(&folder.path("out")) });
    assert_eq!(report.unwrap_or_else(|e| panic!("{e}")).counts.records, 2);
    // The record whose id is the escaped form keeps it.
    let notes = read(folder.path("out/notes.tsv"));
    assert!(notes.contains("a\\u{1b}#1.1\trenamed\t") && !notes.contains("duplicate_id"), "{notes}");
    let table = read(folder.path("out/predictions.tsv"));
    let names: std::collections::BTreeSet<&str> =
        table.lines().skip(1).filter_map(|l| l.split('\t').next()).collect();
    assert_eq!(names.len(), 2, "{table}");
}

#[test]
fn a_forced_run_that_was_broken_goes_on_without_force() {
    let folder = Folder::new("forced");
    let out = folder.path("out");
    run(&PredictOptions { length: 300, ..options(&out) }).unwrap_or_else(|e| panic!("{e}"));
    let old = results(&out);
    let forced = PredictOptions { force: true, ..options(&out) };
    let error = break_off_with_results(&forced);
    assert!(error.to_string().contains("without force"), "{error}");
    assert_eq!(results(&out)["predictions.tsv"], old["predictions.tsv"], "the old results stay until the end");
    let report = run(&options(&out)).unwrap_or_else(|e| panic!("{e}"));
    assert!(kept(&report) > 0);
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    same(&out, &results(&folder.path("whole")));
}

#[test]
fn what_another_run_has_kept_is_only_lost_to_force() {
    let folder = Folder::new("foreign");
    let out = folder.path("out");
    let other = |name: &str| PredictOptions { length: 300, ..options(&folder.path(name)) };
    let journal = out.join("progress.journal");
    // A forced run is interrupted next to complete results of another run. A call for these results returns
    // them, and the forced run can still be resumed.
    run(&other("out")).unwrap_or_else(|e| panic!("{e}"));
    break_off_with_results(&PredictOptions { force: true, ..options(&out) });
    let left = fs::read(&journal).expect("a journal");
    assert!(run(&other("out")).unwrap_or_else(|e| panic!("{e}")).already_complete);
    assert_eq!(fs::read(&journal).expect("a journal"), left);
    assert!(kept(&run(&options(&out)).unwrap_or_else(|e| panic!("{e}"))) > 0);
    // A forced run that is refused for its budget leaves the journal unchanged.
    break_off_with_results(&PredictOptions { force: true, ..other("out") });
    let left = fs::read(&journal).expect("a journal");
    let mut narrow = PredictOptions { force: true, ..options(&out) };
    narrow.settings.budget = Some(plimsoll_graph::Bytes(1));
    assert_eq!(run(&narrow).expect_err("no room").exit_code(), 4);
    assert_eq!(fs::read(&journal).expect("a journal"), left);
    // A merge opens no journal in its output folder, and a run in one stage does not open the nucleotide
    // journal of a run in two stages: journals of another run are refused all the same.
    let shard =
        PredictOptions { shard: Some(WindowShard { number: 1, of: 1 }), ..options(&folder.path("shard")) };
    run(&shard).unwrap_or_else(|e| panic!("{e}"));
    let merge = |name: &str, force: bool| {
        let merge = vec![folder.path("shard")];
        run(&PredictOptions { merge, force, ..options(&folder.path(name)) })
    };
    for name in ["progress.journal", "nucleotide.journal"] {
        fs::remove_dir_all(&out).expect("removed");
        break_off_with_results(&other("out"));
        fs::rename(&journal, out.join(name)).expect("renamed");
        let found = fs::read(out.join(name)).expect("a journal");
        for refused in [run(&options(&out)), merge("out", false)] {
            let error = refused.expect_err("of another run");
            assert_eq!(error.exit_code(), 3, "{error}");
            assert!(error.to_string().contains(name) && error.to_string().contains("`length`"), "{error}");
        }
        assert_eq!(fs::read(out.join(name)).expect("a journal"), found);
    }
    fs::remove_dir_all(&out).expect("removed");
    let merging = PredictOptions { merge: vec![folder.path("shard")], ..options(&out) };
    assert!(break_off(&merging, 4).to_string().contains("shards are unchanged"));
    // A forced merge into the folder of a shard replaces results, and not the journal of the shard, which is
    // its input.
    fs::write(folder.path("shard/predictions.tsv"), "old").expect("written");
    merge("shard", true).unwrap_or_else(|e| panic!("{e}"));
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    same(&folder.path("shard"), &results(&folder.path("whole")));
    let error = run(&shard).expect_err("no shard any more");
    assert_eq!(error.exit_code(), 3, "{error}");
}

#[test]
fn damage_to_a_journal_is_met() {
    let folder = Folder::new("damage");
    let out = folder.path("out");
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    break_off_with_results(&options(&out));
    let path = out.join("progress.journal");
    let journal = fs::read(&path).expect("a journal");
    // A truncated journal, cut at several positions: the missing windows are computed again.
    for cut in [journal.len() - 1, journal.len() * 2 / 3, 30, 0] {
        fs::write(&path, &journal[..cut]).expect("written");
        run(&options(&out)).unwrap_or_else(|e| panic!("{e}"));
        same(&out, &wanted);
        fs::remove_dir_all(&out).expect("removed");
        fs::create_dir(&out).expect("made");
    }
    // A flipped bit in the first block of results: an error that names the file, and the file is unchanged. The
    // length of the key is at byte 16 of the frame header, and a frame header has 56 bytes.
    let mut damaged = journal.clone();
    let key = u64::from_le_bytes(std::array::from_fn(|i| journal[16 + i])) as usize;
    damaged[2 * 56 + key + 40] ^= 1;
    fs::write(&path, &damaged).expect("written");
    let error = run(&options(&out)).expect_err("damaged");
    assert_eq!(error.exit_code(), 3, "{error}");
    assert!(error.to_string().contains("progress.journal"), "{error}");
    assert_eq!(fs::read(&path).expect("a journal"), damaged);
    run(&PredictOptions { force: true, ..options(&out) }).unwrap_or_else(|e| panic!("{e}"));
    same(&out, &wanted);
}

#[test]
fn shards_put_together_are_one_run() {
    let folder = Folder::new("shards");
    let base = |name: &str| {
        let out = folder.path(name);
        let mut options = PredictOptions { length: 30, ..options(&out) };
        options.settings.tokens = None;
        options
    };
    run(&base("whole")).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let windows = read(folder.path("whole/windows.tsv")).lines().count();
    assert!(windows > 3 * 256, "{windows} windows are too few for three shards");
    let shard = |number| PredictOptions {
        shard: Some(WindowShard { number, of: 3 }),
        ..virnucpro(base(&format!("s{number}")), |method| method.keep_intermediate = false)
    };
    let merge = |shards: &[u64]| PredictOptions {
        merge: shards.iter().map(|n| folder.path(&format!("s{n}"))).collect(),
        ..virnucpro(base("merged"), |method| method.keep_intermediate = false)
    };
    for number in [3, 1] {
        // Shard 1 is interrupted once.
        if number == 1 {
            break_off(&shard(number), 3);
        }
        let report = run(&shard(number)).unwrap_or_else(|e| panic!("{e}"));
        assert!(!report.already_complete && report.shard.is_some());
        assert!(run(&shard(number)).unwrap_or_else(|e| panic!("{e}")).already_complete);
        assert!(!folder.path(&format!("s{number}/windows.tsv")).exists());
    }
    let refused = |shards: &[u64], says: &str| {
        let error = run(&merge(shards)).expect_err("refused");
        assert_eq!(error.exit_code(), 3, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    };
    refused(&[1, 2, 3], "s2");
    refused(&[1, 3], "missing is shard 2/3");
    // Interrupted repeatedly, each time later, until the journal remains.
    let breaks = |&steps: &usize| {
        break_off(&shard(2), steps);
        folder.path("s2/progress.journal").exists()
    };
    (3..).step_by(2).find(breaks).expect("windows are kept");
    refused(&[1, 2, 3], "not complete");
    run(&shard(2)).unwrap_or_else(|e| panic!("{e}"));
    run(&merge(&[2, 1, 3])).unwrap_or_else(|e| panic!("{e}"));
    let without = ["chunked.fa", "nucleotide.fa", "protein.faa"];
    let wanted = wanted.into_iter().filter(|(name, _)| !without.contains(&name.as_str())).collect();
    same(&folder.path("merged"), &wanted);
    assert!(run(&merge(&[1, 2, 3])).unwrap_or_else(|e| panic!("{e}")).already_complete);
}

/// Returns the options with the largest budget under which a prediction takes two stages, because both encoders
/// do not fit together.
pub fn tight(options: &PredictOptions) -> PredictOptions {
    let planned = |budget: u64| {
        let mut options = options.clone();
        options.settings.budget = Some(plimsoll_graph::Bytes(budget));
        let out = options.output_dir.with_extension("probe");
        let done = run(&PredictOptions { output_dir: out.clone(), ..options });
        let _ = fs::remove_dir_all(out);
        done.map(|report| to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null())
    };
    let (mut low, mut high) = (0, 1 << 30);
    // Bisection: `high` takes one stage, `low` takes two or is refused.
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match planned(middle) {
            Ok(true) => high = middle,
            Ok(false) | Err(_) => low = middle,
        }
    }
    let mut tight = options.clone();
    tight.settings.budget = Some(plimsoll_graph::Bytes(low));
    tight
}

#[test]
fn a_tight_budget_takes_two_stages_and_gives_the_same_bytes() {
    let folder = Folder::new("tight");
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let short = folder.write("short.fa", ">a\nACGTACGTACGTACGT\n");
    let mut probe = PredictOptions { inputs: vec![short], ..options(&folder.path("probe")) };
    probe.settings.tokens = Some(502);
    let line = tight(&probe).settings.budget;
    let mut stages = options(&folder.path("stages"));
    stages.settings.budget = line;
    let mut observer = Stopper::never();
    let report = predict(&stages, &mut observer).unwrap_or_else(|e| panic!("{e}"));
    assert!(!to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null(), "it took one stage");
    assert!(observer.said.iter().any(|s| s.contains("do not fit")), "{:?}", observer.said);
    same(&stages.output_dir, &wanted);
    // Interrupted at ever later points, in the first stage and in the second.
    let mut broken = options(&folder.path("broken"));
    broken.settings.budget = line;
    let mut starts = 0;
    while let Err(error) = predict(&broken, &mut Stopper::after(8 + starts)) {
        assert_eq!(error.exit_code(), 143, "{error}");
        starts += 1;
        assert!(starts < 1000, "it does not get on");
    }
    assert!(starts > 2, "broken {starts} times");
    same(&broken.output_dir, &wanted);
}

/// A frame whose nucleotide embedding is not finite has no row in the journal of the first stage, and the
/// second stage must still complete its window.
#[test]
fn what_fails_in_the_first_of_two_stages_is_listed() {
    let folder = Folder::new("first_fails");
    let model = folder.path("dna");
    fs::create_dir_all(&model).expect("a folder");
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(fixture("goldens/dnabert_s").join(file), model.join(file)).expect("copied");
    }
    let weights = Weights::open(&fixture("goldens/dnabert_s")).expect("weights");
    copy_changed(&weights, &model.join("model.safetensors"), |name, shape, data| {
        if name.ends_with("word_embeddings.weight") {
            // Every second token from 200 on, which are the longer ones.
            data.chunks_exact_mut(shape[1] as usize).skip(200).step_by(2).for_each(|row| row.fill(f32::NAN));
        }
    });
    let poisoned = |name: &str| {
        let mut options = PredictOptions { length: 60, ..options(&folder.path(name)) };
        method(&mut options).models.dna = Some(model.display().to_string());
        options
    };
    let whole = run(&poisoned("whole")).unwrap_or_else(|e| panic!("{e}"));
    assert!(whole.failed > 0 && whole.counts.orfs > 0, "{} failed", whole.failed);
    let short = folder.write("short.fa", ">a\nACGTACGTACGTACGT\n");
    let mut stages = poisoned("stages");
    stages.settings.budget =
        tight(&PredictOptions { inputs: vec![short], ..poisoned("probe") }).settings.budget;
    let report = run(&stages).unwrap_or_else(|e| panic!("{e}"));
    assert!(!to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null(), "it took one stage");
    assert_eq!(report.failed, whole.failed);
    same(&folder.path("stages"), &results(&folder.path("whole")));
}

/// Returns the smallest budget in bytes under which a prediction runs. Smaller budgets must be refused with
/// exit code 4.
pub fn smallest(options: &PredictOptions) -> u64 {
    let fits = |budget: u64| {
        let mut options = options.clone();
        options.settings.budget = Some(plimsoll_graph::Bytes(budget));
        match run(&PredictOptions { force: true, ..options }) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.exit_code(), 4, "{error}");
                false
            }
        }
    };
    let (mut low, mut high) = (0, 1 << 30);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { high = middle } else { low = middle }
    }
    high
}

#[test]
fn the_tightest_budget_streams_weights_and_gives_the_same_bytes() {
    let folder = Folder::new("tightest");
    run(&options(&folder.path("whole"))).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let short = folder.write("short.fa", ">a\nACGTACGTACGTACGT\n");
    let line = smallest(&PredictOptions { inputs: vec![short], ..options(&folder.path("probe")) });
    let mut streamed = options(&folder.path("streamed"));
    streamed.settings.budget = Some(plimsoll_graph::Bytes(line));
    let mut observer = Stopper::never();
    let report = predict(&streamed, &mut observer).unwrap_or_else(|e| panic!("{e}"));
    let plans = ["plan", "plan_of_nucleotide_stage"].map(|stage| to_json(&report.run_record)[stage].clone());
    assert!(plans.iter().any(|p| p["streamed_bytes_per_step"].as_u64() > Some(0)), "{plans:?}");
    assert!(observer.said.iter().any(|s| s.contains("weights stream from disk")), "{:?}", observer.said);
    same(&streamed.output_dir, &wanted);
    // A budget of one byte less is refused with the shortfall.
    let mut less = options(&folder.path("less"));
    less.settings.budget = Some(plimsoll_graph::Bytes(line - 1));
    let error = run(&less).expect_err("refused");
    assert_eq!(error.exit_code(), 4, "{error}");
    assert!(error.to_string().contains("short by 1 B"), "{error}");
}

#[test]
fn an_input_that_changes_is_refused() {
    let folder = Folder::new("changes");
    let input = folder.write("reads.fa", read(reads()));
    let out = folder.path("out");
    let changing = PredictOptions { inputs: vec![input.clone()], ..options(&out) };
    break_off_with_results(&changing);
    folder.write("reads.fa", format!("{}>more\nACGTACGT\n", read(reads())));
    let error = run(&changing).expect_err("another input");
    assert_eq!(error.exit_code(), 3, "{error}");
    assert!(error.to_string().contains("input files"), "{error}");
}

/// Observer that calls a function at the first report of progress.
struct Meddler<F: FnMut()>(Option<F>);

impl<F: FnMut()> Observer for Meddler<F> {
    fn say(&mut self, _: Level, _: &str) {}

    fn progress(&mut self, _: &Progress) {
        if let Some(mut meddle) = self.0.take() {
            meddle();
        }
    }
}

#[test]
fn an_input_that_shrinks_or_vanishes_on_the_way_is_an_error_and_nothing_kept_is_lost() {
    let folder = Folder::new("shrinks");
    // More input than is read ahead, so that the file is still being read at the first report of progress.
    // Windows of N have no open reading frame and cost little.
    let empty = |i: usize| format!(">n{i}\n{}\n", "N".repeat(20_000));
    let long = || folder.write("long.fa", read(reads()) + &(0..200).map(empty).collect::<String>());
    let more = || folder.write("more.fa", ">m\nACGTACGTACGT\n");
    let (a, b) = (long(), more());
    let two = |name: &str| PredictOptions {
        inputs: vec![a.clone(), b.clone()],
        ..virnucpro(options(&folder.path(name)), |method| method.save_embeddings = None)
    };
    run(&two("whole")).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let check = |name: &str, meddle: &dyn Fn(), says: &str| {
        let meddled = two(name);
        let error = predict(&meddled, &mut Meddler(Some(meddle))).map(|_| ()).expect_err("meddled with");
        assert_eq!(error.exit_code(), 1, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        assert!(!meddled.output_dir.join("predictions.tsv").exists());
        long();
        more();
        let report = run(&meddled).unwrap_or_else(|e| panic!("{e}"));
        assert!(kept(&report) > 0, "{name}: what was finished is lost");
        same(&meddled.output_dir, &wanted);
    };
    let shrink =
        || fs::OpenOptions::new().write(true).open(&a).and_then(|f| f.set_len(1 << 20)).expect("shrunk");
    check("shrunk", &shrink, "long.fa: the file changed while it was read");
    check("vanished", &|| fs::remove_file(&b).expect("removed"), "more.fa: there is no such file");
}

/// Observer that keeps all reports of progress.
#[derive(Default)]
struct Reports(Vec<Progress>);

impl Observer for Reports {
    fn say(&mut self, _: Level, _: &str) {}

    fn progress(&mut self, progress: &Progress) {
        self.0.push(*progress);
    }
}

#[test]
fn progress_counts_finished_work_also_in_two_stages() {
    let folder = Folder::new("progress");
    let alone = options(&folder.path("alone"));
    let two = tight(&options(&folder.path("two")));
    for (options, stages) in [(alone, 1), (two, 2)] {
        let mut reports = Reports::default();
        predict(&options, &mut reports).unwrap_or_else(|e| panic!("{e}"));
        let total = reports.0[0].bytes_total.expect("a file");
        let (last, before) = reports.0.split_last().expect("reports");
        assert_eq!(last.bytes, total);
        assert!(reports.0.is_sorted_by_key(|progress| progress.bytes), "{:?}", reports.0);
        assert!(before.iter().all(|p| p.bytes < total), "{before:?}");
        // The input is one batch, which is read to its end before the first report. Each stage is half of the run.
        let stage = |p: &Progress| u64::from(stages == 2 && p.bytes * 2 >= total);
        for (p, end) in
            before.iter().map(|p| (p, reports.0.iter().rfind(|q| stage(q) == stage(p)).unwrap_or(p)))
        {
            let share = (stage(p) as f64 + p.tokens as f64 / end.tokens as f64) / stages as f64;
            let shown = p.bytes as f64 / total as f64;
            assert!((shown - share).abs() < 0.01, "{shown} instead of {share}: {before:?}");
        }
    }
}

#[test]
fn results_by_input_are_those_of_the_inputs() {
    let folder = Folder::new("each");
    let text = read(reads());
    let (a, b) = (folder.write("a.fa", &text), folder.write("b.fq", "@x\nACGTACGTACGT\n+\nIIIIIIIIIIII\n"));
    let all = PredictOptions { inputs: vec![a.clone(), b.clone()], ..options(&folder.path("all")) };
    let reports = plimsoll_virus::predict_each(&all, &mut Stopper::never()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(reports.len(), 2);
    for (input, name) in [(&a, "a"), (&b, "b")] {
        let alone =
            PredictOptions { inputs: vec![input.clone()], ..options(&folder.path(&format!("alone-{name}"))) };
        run(&alone).unwrap_or_else(|e| panic!("{e}"));
        same(&folder.path("all").join(name), &results(&alone.output_dir));
    }
    let twins = PredictOptions { inputs: vec![a.clone(), folder.write("a.fq", "@x\nACGT\n+\nIIII\n")], ..all };
    let error = plimsoll_virus::predict_each(&twins, &mut Stopper::never()).expect_err("one folder");
    assert!(error.to_string().contains("both"), "{error}");
}

#[test]
fn tables_can_name_the_source() {
    let folder = Folder::new("source");
    let (a, b) =
        (folder.write("a.fa", ">a\nACGTACGTACGT\n"), folder.write("b.fa", ">b\nACGTACGTACGT\n>n\nNNN\n"));
    let out = folder.path("out");
    let options = PredictOptions { inputs: vec![a.clone(), b.clone()], source: true, ..options(&out) };
    run(&options).unwrap_or_else(|e| panic!("{e}"));
    for file in ["predictions.tsv", "windows.tsv"] {
        let text = read(out.join(file));
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
        assert_eq!(rows[0].last(), Some(&"source"));
        assert!(rows.iter().all(|r| r.len() == rows[0].len()), "{text}");
        let sources: Vec<&str> = rows[1..].iter().filter_map(|r| r.last().copied()).collect();
        let (a, b) = (a.display().to_string(), b.display().to_string());
        assert_eq!(sources, [a.as_str(), &b, &b], "{text}");
    }
}
