//! Tests of `--dynamic` in predictions and embeddings: runs whose steps follow the memory of a scripted machine, and a device
//! that has too little memory. Invariant: whatever the sizes of the steps are, the results have the bytes of a run with one
//! size.

use crate::rig::{golden, read, virnucpro};
use plimsoll_embed::{EmbedReport, Pooling, embed};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Device, Failure, Level, Machine, Observer, Precision, Progress, Settings};
use plimsoll_testing::tight::{Fault, FaultPlace, Script, TightMachine};
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::output::EmbeddingFormat;
use plimsoll_virus::{PredictReport, VirusError, predict};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Observer that keeps messages, and ends the run after a number of progress reports.
#[derive(Default)]
struct Listener {
    said: Vec<(Level, String)>,
    left: Option<u32>,
}

impl Listener {
    fn said(&self, part: &str) -> bool {
        self.said.iter().any(|(_, text)| text.contains(part))
    }
}

impl Observer for Listener {
    fn say(&mut self, level: Level, text: &str) {
        self.said.push((level, text.to_owned()));
    }

    fn progress(&mut self, _: &Progress) {
        self.left = self.left.map(|left| left.saturating_sub(1));
    }

    fn stop(&self) -> Option<u8> {
        (self.left == Some(0)).then_some(15)
    }
}

/// Settings with machines of these scripts and steps of up to 2048 tokens.
fn on(scripts: &[&Arc<Script>], dynamic: Option<&str>) -> Settings {
    let machine = |(number, script): (u32, &&Arc<Script>)| {
        Arc::new(TightMachine(Arc::clone(script), number)) as Arc<dyn Machine>
    };
    let device = Device::machines((0..).zip(scripts).map(machine).collect()).unwrap_or_else(|e| panic!("{e}"));
    let dynamic = dynamic.map(|text| text.parse().unwrap_or_else(|e| panic!("{e}")));
    Settings {
        device,
        precision: Some(Precision::F32),
        tokens: Some(2048),
        threads: 1,
        dynamic,
        ..Settings::default()
    }
}

/// The golden reads, several times under other names.
fn reads(folder: &Folder) -> PathBuf {
    let text = read(fixture("goldens/pipeline/reads.fa"));
    let copies: String = (0..3).map(|copy| text.replace('>', &format!(">{copy}."))).collect();
    folder.write("reads.fa", copies)
}

fn options(input: &Path, output: &Path, settings: Settings) -> plimsoll_virus::PredictOptions {
    plimsoll_virus::PredictOptions {
        commit_every: Duration::ZERO,
        settings,
        ..virnucpro(golden(input, output), |method| method.save_embeddings = Some(EmbeddingFormat::Npy))
    }
}

/// Runs a prediction, and compares its result files with those in `wanted`.
fn predicted(
    input: &Path,
    output: &Path,
    settings: Settings,
    wanted: Option<&Path>,
) -> (PredictReport, Listener) {
    let mut listener = Listener::default();
    let report = predict(&options(input, output, settings), &mut listener);
    let report = report.unwrap_or_else(|e| panic!("{}: {e}: {:?}", output.display(), listener.said));
    wanted.iter().for_each(|wanted| same(output, wanted));
    (report, listener)
}

/// The input of a test, and the result of a run with steps of one size that nothing disturbs.
fn undisturbed(folder: &Folder) -> (PathBuf, PathBuf) {
    let (input, wanted) = (reads(folder), folder.path("one"));
    predicted(&input, &wanted, on(&[&Script::of_readings(calm, None)], None), None);
    (input, wanted)
}

/// Result files except run.json, which contains durations.
fn results(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).expect("a folder").flatten();
    let file = |file: fs::DirEntry| {
        (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).expect("bytes"))
    };
    files.map(file).filter(|(name, _)| name != "run.json").collect()
}

fn same(found: &Path, wanted: &Path) {
    let (found, wanted) = (results(found), results(wanted));
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    for (name, bytes) in &wanted {
        assert!(&found[name] == bytes, "{name} differs");
    }
}

/// (tokens before, tokens after, reason) of each change.
fn changes(record: &Value) -> Vec<(u64, u64, String)> {
    let change = |line: &Value| {
        let number = |key: &str| line[key].as_u64().expect("a number");
        (number("from"), number("to"), line["reason"].as_str().expect("text").to_owned())
    };
    record["size_changes"].as_array().expect("a list").iter().map(change).collect()
}

fn calm(_: u64) -> u64 {
    500
}

/// Thousandths of the memory in use at each reading: a warning, an emergency, nothing of note, memory that becomes free.
fn busy(reading: u64) -> u64 {
    [500, 930, 910, 975, 910, 890, 500, 910, 960, 899, 500, 500][reading as usize % 12]
}

/// Reads the memory before every step.
const EVERY_STEP: &str = "balanced,adjustment_frequency=1";

#[test]
fn a_prediction_that_follows_the_memory_has_the_bytes_of_one_size() {
    let folder = Folder::new("dynamic-predict");
    let (input, wanted) = undisturbed(&folder);
    let calm = Script::of_readings(calm, None);
    let (report, _) = predicted(&input, &folder.path("largest"), on(&[&calm], Some(EVERY_STEP)), Some(&wanted));
    assert_eq!(changes(&to_json(&report.run_record)), []);

    let script = Script::of_readings(busy, None);
    let (report, listener) =
        predicted(&input, &folder.path("follows"), on(&[&script], Some(EVERY_STEP)), Some(&wanted));
    let change = |from, to, reason: &str| (from, to, reason.to_owned());
    let found = changes(&to_json(&report.run_record));
    assert!(
        found.starts_with(&[
            change(2048, 1024, "warning"),
            change(1024, 502, "emergency"),
            change(502, 512, "grow"),
            change(512, 1024, "grow"),
            change(1024, 502, "critical"),
        ]),
        "{found:?}"
    );
    let words = "steps of 1024 tokens instead of 2048 (93 % of the memory is in use, warning from 92 %)";
    assert!(listener.said(words), "{:?}", listener.said);
    // Memory is given back and taken again.
    let mapped = script.mapped.lock().expect("no panic").clone();
    assert_eq!(mapped.len(), 1 + found.len());
    assert!(mapped[1] < mapped[0] && mapped[2] < mapped[1] && mapped[3] > mapped[2], "{mapped:?}");
}

/// Every place at which memory can be short is met with smaller steps, and the results do not change.
#[test]
fn a_lack_of_memory_is_met_with_smaller_steps() {
    let folder = Folder::new("dynamic-memory");
    let (input, wanted) = undisturbed(&folder);
    let launch = |op| Fault { skip: 3, ..Fault::once(FaultPlace::Launch(op), 0) };
    for (what, fault, steps) in [
        ("arena", Fault::once(FaultPlace::Arena, 0), vec![]),
        ("load", Fault { skip: 3, ..Fault::once(FaultPlace::Upload, 0) }, vec![]),
        ("inputs", Fault::once(FaultPlace::Upload, 3), vec![1024]),
        ("first launch", launch("embed"), vec![1024]),
        ("attention", launch("attention"), vec![1024]),
        ("head", Fault { skip: 1, ..launch("relu") }, vec![1024]),
        ("outputs", Fault { skip: 5, ..Fault::once(FaultPlace::Fetch, 0) }, vec![1024]),
        ("twice", Fault { times: 2, ..launch("embed") }, vec![1024, 512]),
    ] {
        let script = Script::of_readings(calm, Some(fault));
        let out = folder.path(what);
        let (report, listener) = predicted(&input, &out, on(&[&script], Some("balanced")), Some(&wanted));
        assert!(script.is_over(), "{what}: no failure at its place");
        let lacks: Vec<u64> = changes(&to_json(&report.run_record))
            .into_iter()
            .filter_map(|(_, to, reason)| (reason == "out_of_memory").then_some(to))
            .collect();
        assert_eq!(lacks, steps, "{what}: {:?}", listener.said);
    }
}

/// Without `--dynamic` and `--tokens`, smaller steps are planned after a lack of memory, and the weights are loaded again.
#[test]
fn without_sizes_the_weights_are_loaded_again() {
    let folder = Folder::new("dynamic-reload");
    let (input, wanted) = undisturbed(&folder);
    let launch = |op| Fault { skip: 3, ..Fault::once(FaultPlace::Launch(op), 0) };
    for (what, fault, count) in [
        ("arena", Fault::once(FaultPlace::Arena, 0), 0),
        ("load", Fault { skip: 3, ..Fault::once(FaultPlace::Upload, 0) }, 0),
        ("first launch", launch("embed"), 1),
        ("head", Fault { skip: 1, ..launch("relu") }, 1),
        ("outputs", Fault { skip: 5, ..Fault::once(FaultPlace::Fetch, 0) }, 1),
        // The second failure comes in the first steps of the smaller size.
        ("thrice", Fault { times: 3, ..launch("embed") }, 3),
    ] {
        for devices in [1, 2] {
            let scripts = [Script::of_readings(calm, Some(fault)), Script::of_readings(calm, None)];
            let all: Vec<&Arc<Script>> = scripts.iter().take(devices).collect();
            let settings = Settings { tokens: None, ..on(&all, None) };
            let out = folder.path(&format!("{what} {devices}"));
            let (report, listener) = predicted(&input, &out, settings, Some(&wanted));
            assert!(scripts[0].is_over() || devices == 2, "{what}: no failure at its place");
            let found = changes(&to_json(&report.run_record));
            let halved = |(from, to, reason): &(u64, u64, String)| to < from && reason == "out_of_memory";
            assert!(found.iter().all(halved), "{what}: {found:?}");
            assert!(found.len() == count || devices == 2, "{what}: {found:?}: {:?}", listener.said);
            let record = to_json(&report.run_record);
            let devices = record["devices"].as_array().expect("devices");
            assert!(devices.iter().all(|device| device["failed"].is_null()), "{what}: {devices:?}");
        }
    }
    // A fourth failure without a step between them ends the run.
    let script = Script::of_readings(calm, Some(Fault { times: 100, ..launch("embed") }));
    let settings = Settings { tokens: None, ..on(&[&script], None) };
    let error = predict(&options(&input, &folder.path("always"), settings), &mut Listener::default());
    let text = error.expect_err("no size is small enough").to_string();
    let tried = text.split("also with steps of ").nth(1).and_then(|rest| rest.split(" tokens").next());
    assert_eq!(tried.map(|tried| tried.split(", ").count()), Some(3), "{text}");
}

/// A lack of memory that smaller steps cannot meet ends the run with exit code 4, and says what to do.
#[test]
fn a_lack_of_memory_that_stays_is_an_error() {
    let folder = Folder::new("dynamic-short");
    let input = reads(&folder);
    let always = |place| Fault { times: 100, ..Fault::once(place, 0) };
    for (what, dynamic, fault, wanted) in [
        (
            "step",
            Some("balanced"),
            always(FaultPlace::Launch("embed")),
            "the device ran out of memory in the computation of a step, also with steps of 1024, 512, 502 tokens; ",
        ),
        ("one size", None, always(FaultPlace::Launch("embed")), "or give dynamic"),
        (
            "load",
            Some("balanced"),
            always(FaultPlace::Upload),
            "in the load of the weights, also with steps of 1024, 512, 502 tokens; the largest",
        ),
        ("arena", Some("balanced"), always(FaultPlace::Arena), "at start: an arena of "),
    ] {
        let script = Script::of_readings(calm, Some(fault));
        let options = options(&input, &folder.path(what), on(&[&script], dynamic));
        let error = predict(&options, &mut Listener::default()).expect_err(what);
        assert_eq!(error.exit_code(), 4, "{what}: {error}");
        let text = error.to_string();
        assert!(text.contains(wanted), "{what}: {text}");
        assert!(text.contains("process 7 (python) holds 5 B") && text.contains("largest tensors"), "{text}");
    }
}

/// A larger size that finds no memory is not used; the run goes on.
#[test]
fn a_run_that_cannot_grow_keeps_its_size() {
    let folder = Folder::new("dynamic-growth");
    let (input, wanted) = undisturbed(&folder);
    let script = Script::of_readings(busy, Some(Fault::once(FaultPlace::Growth, 0)));
    let (report, listener) =
        predicted(&input, &folder.path("kept"), on(&[&script], Some(EVERY_STEP)), Some(&wanted));
    assert!(listener.said("there is no memory for steps of 512 tokens; 502 are kept"), "{:?}", listener.said);
    let found = changes(&to_json(&report.run_record));
    assert_eq!(found[1].1, 502, "{found:?}");
    assert!(found.get(2).is_none_or(|(_, _, reason)| reason == "grow"), "{found:?}");
}

/// All devices change together, at the reading of the fullest; one that lacks memory makes all smaller.
#[test]
fn several_devices_change_together() {
    let folder = Folder::new("dynamic-several");
    let (input, wanted) = undisturbed(&folder);
    let fault = Fault { skip: 3, ..Fault::once(FaultPlace::Launch("embed"), 0) };
    for (name, scripts) in [
        ("readings", [Script::of_readings(calm, None), Script::of_readings(busy, None)]),
        ("memory", [Script::of_readings(calm, None), Script::of_readings(calm, Some(fault))]),
    ] {
        let settings = on(&[&scripts[0], &scripts[1]], Some(EVERY_STEP));
        let (report, _) = predicted(&input, &folder.path(name), settings, Some(&wanted));
        let found = changes(&to_json(&report.run_record));
        assert!(!found.is_empty(), "{name}");
        let mapped = scripts.map(|script| script.mapped.lock().expect("no panic").clone());
        assert_eq!(mapped[0], mapped[1], "{name}");
    }
}

/// A run that was interrupted among its changes resumes to the bytes of an unbroken one, with whatever sizes.
#[test]
fn an_interrupted_run_resumes_to_equal_bytes() {
    let folder = Folder::new("dynamic-resume");
    let input = reads(&folder);
    let (wanted, out) = (folder.path("one"), folder.path("broken"));
    predicted(&input, &wanted, on(&[&Script::of_readings(calm, None)], None), None);
    let settings = || on(&[&Script::of_readings(busy, None)], Some(EVERY_STEP));
    let mut listener = Listener { left: Some(2), ..Listener::default() };
    let error = predict(&options(&input, &out, settings()), &mut listener).expect_err("stopped");
    assert!(matches!(error, VirusError::Runtime(_)) && error.exit_code() == 128 + 15, "{error}");
    let (report, _) = predicted(&input, &out, settings(), Some(&wanted));
    assert!(to_json(&report.run_record)["windows_from_journal"].as_u64() > Some(0));
}

fn embedded(input: &Path, output: PathBuf, settings: Settings) -> (EmbedReport, Listener) {
    let usual =
        plimsoll_embed::EmbedOptions::usual(fixture("goldens/dnabert_s").display().to_string(), input, output);
    let options = plimsoll_embed::EmbedOptions {
        pool: Pooling::Tokens,
        max_length: Some(500),
        truncate: true,
        settings,
        ..usual
    };
    let mut listener = Listener::default();
    let report = embed(&options, &mut listener);
    (report.unwrap_or_else(|e| panic!("{e}: {:?}", listener.said)), listener)
}

#[test]
fn embeddings_follow_the_memory() {
    let folder = Folder::new("dynamic-embed");
    // Without the records of unknown letters, which have no embedding.
    let text = fs::read_to_string(reads(&folder)).expect("text");
    let known = text.split('>').skip(1).filter(|record| !record.contains("all_n"));
    let input = folder.write("known.fa", known.map(|record| format!(">{record}")).collect::<String>());
    let (one, follows, short) =
        (folder.path("one.safetensors"), folder.path("follows.safetensors"), folder.path("short.safetensors"));
    let (report, _) = embedded(&input, one.clone(), on(&[&Script::of_readings(calm, None)], None));
    assert_eq!(report.size_changes, []);
    let (report, _) =
        embedded(&input, follows.clone(), on(&[&Script::of_readings(busy, None)], Some(EVERY_STEP)));
    let reasons: Vec<String> = changes(&to_json(&report)).into_iter().map(|change| change.2).collect();
    assert!(reasons.starts_with(&["warning", "emergency", "grow"].map(str::to_owned)), "{reasons:?}");
    let fault = Fault { skip: 2, times: 2, ..Fault::once(FaultPlace::Launch("attention"), 0) };
    let script = Script::of_readings(calm, Some(fault));
    embedded(&input, short.clone(), on(&[&script], Some("conservative")));
    assert!(script.is_over());
    let wanted = fs::read(one).expect("bytes");
    assert!(fs::read(follows).expect("bytes") == wanted && fs::read(short).expect("bytes") == wanted);
}
