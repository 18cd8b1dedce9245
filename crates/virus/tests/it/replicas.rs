//! Tests of runs on several devices or CPU replicas. Invariant: results equal those of one device byte for
//! byte, whatever the number of devices, also if some of them fail.

use crate::rig::{golden, virnucpro};
use plimsoll_embed::{Pooling, embed};
use plimsoll_graph::Bytes;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{
    Device, Failure, Level, Machine, Observer, Precision, Progress, RuntimeError, Settings,
};
use plimsoll_testing::cards::Card;
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::output::EmbeddingFormat;
use plimsoll_virus::{self, VirusError, predict};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Observer that records warnings.
#[derive(Default)]
struct Listener(Vec<String>);

impl Observer for Listener {
    fn say(&mut self, level: Level, text: &str) {
        if level == Level::Warning {
            self.0.push(text.to_owned());
        }
    }

    fn progress(&mut self, _: &Progress) {}
}

/// Settings for test devices with small steps, so that a run has many steps.
fn on(cards: impl IntoIterator<Item = Card>) -> Settings {
    let machines = cards.into_iter().map(|card| Arc::new(card) as Arc<dyn Machine>).collect();
    let device = Device::machines(machines).unwrap_or_else(|e| panic!("{e}"));
    Settings { device, precision: Some(Precision::F32), tokens: Some(502), threads: 1, ..Settings::default() }
}

/// Test devices whose launches take long enough that every device gets steps.
fn cards(count: usize) -> Vec<Card> {
    (0..count).map(|number| Card::new(number).slow(Duration::from_millis(1))).collect()
}

/// Whether there are `count` devices, and at least two of them (if there are several) ran steps.
fn shared(steps: &[u64], count: usize) -> bool {
    steps.len() == count && steps.iter().filter(|&&n| n > 0).count() >= count.min(2)
}

/// Settings for the CPU with one thread.
fn on_cpu() -> Settings {
    Settings { precision: Some(Precision::F32), tokens: Some(502), threads: 1, ..Settings::default() }
}

fn prediction(output: &Path, settings: Settings) -> plimsoll_virus::PredictOptions {
    plimsoll_virus::PredictOptions {
        commit_every: Duration::ZERO,
        settings,
        ..virnucpro(golden(&fixture("goldens/pipeline/reads.fa"), output), |method| {
            method.save_embeddings = Some(EmbeddingFormat::Npy);
        })
    }
}

/// Returns the contents of all result files except run.json, which contains durations.
fn results(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let files = fs::read_dir(dir).expect("a folder").flatten();
    files
        .map(|file| (name(&file.path()), fs::read(file.path()).expect("bytes")))
        .filter(|(name, _)| name != "run.json")
        .collect()
}

fn same(found: &Path, wanted: &Path) {
    let (found, wanted) = (results(found), results(wanted));
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    for (name, bytes) in &wanted {
        assert!(&found[name] == bytes, "{name} differs");
    }
}

/// Returns the number of steps of each device from a run record.
fn steps(record: &serde_json::Value) -> Vec<u64> {
    let devices = record["devices"].as_array().expect("devices");
    devices.iter().map(|device| device["steps"].as_u64().expect("a number")).collect()
}

#[test]
fn any_number_of_devices_predicts_the_same_bytes() {
    let folder = Folder::new("replicas-predict");
    let wanted = folder.path("cpu");
    predict(&prediction(&wanted, on_cpu()), &mut Listener::default()).unwrap_or_else(|e| panic!("{e}"));
    for count in [1, 2, 3, 8] {
        let out = folder.path(&format!("{count}"));
        let report = predict(&prediction(&out, on(cards(count))), &mut Listener::default());
        let report = report.unwrap_or_else(|e| panic!("{count}: {e}"));
        same(&out, &wanted);
        let steps = steps(&to_json(&report.run_record));
        assert!(shared(&steps, count), "{steps:?}");
        assert!(report.memory_line.contains("of host memory for embeddings"), "{}", report.memory_line);
    }
}

/// The 29 kB of reads justify three replicas, which have equal numbers of threads; two threads are one replica.
#[test]
fn replicas_of_a_cpu_predict_the_bytes_of_one() {
    let folder = Folder::new("replicas-threads");
    let wanted = folder.path("one");
    predict(&prediction(&wanted, on_cpu()), &mut Listener::default()).unwrap_or_else(|e| panic!("{e}"));
    let run = |name: &str, settings: Settings| {
        let out = folder.path(name);
        let report = predict(&prediction(&out, settings), &mut Listener::default());
        let report = report.unwrap_or_else(|e| panic!("{name}: {e}"));
        same(&out, &wanted);
        (
            steps(&to_json(&report.run_record)),
            report.memory_line,
            to_json(&report.run_record)["plan"]["peak_bytes"].as_u64(),
        )
    };
    let mut peaks = vec![];
    for (threads, replicas) in [(2, 1), (3, 3), (4, 2)] {
        let (steps, line, peak) = run(&format!("{threads}"), Settings { threads, ..on_cpu() });
        assert!(shared(&steps, replicas), "{steps:?}");
        assert_eq!(line.contains(&format!(" in {replicas} replicas (")), replicas > 1, "{line}");
        peaks.extend(peak);
    }
    // A budget one byte below the plan with three replicas leaves one.
    let budget = Some(Bytes(peaks[1] - 1));
    let (steps, line, peak) = run("short", Settings { threads: 3, budget, ..on_cpu() });
    assert!(steps.len() == 1 && peak < Some(peaks[1]), "{line}");
}

#[test]
fn replicas_of_a_cpu_embed_the_bytes_of_one() {
    let folder = Folder::new("replicas-threads-embed");
    let run = |name: &str, settings| {
        let long: String = fs::read_to_string(proteins(&folder)).expect("text").repeat(4);
        let mut options = embedding(&folder, name, Pooling::Tokens, settings);
        options.inputs = vec![folder.write("long.faa", renamed(&long))];
        let report = embed(&options, &mut Listener::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(report.sequences, 480);
        let steps: Vec<u64> = report.devices.iter().map(|device| device.steps).collect();
        (fs::read(&report.files[0]).expect("bytes"), steps)
    };
    let (wanted, one) = run("one", on_cpu());
    let (found, four) = run("four", Settings { threads: 4, ..on_cpu() });
    assert!(found == wanted && one.len() == 1 && shared(&four, 4), "{four:?}");
}

/// Renames the records of a FASTA text, so that all ids differ.
fn renamed(fasta: &str) -> String {
    let line = |(i, line): (usize, &str)| match line.starts_with('>') {
        true => format!(">r{i}\n"),
        false => format!("{line}\n"),
    };
    fasta.lines().enumerate().map(line).collect()
}

/// If the device fails to record a step, the step did not run: it is run by single launches, with one warning.
#[test]
fn a_step_that_cannot_be_recorded_is_run_and_said() {
    let folder = Folder::new("replicas-unrecorded");
    let wanted = folder.path("cpu");
    predict(&prediction(&wanted, on_cpu()), &mut Listener::default()).unwrap_or_else(|e| panic!("{e}"));
    let (out, mut listener) = (folder.path("card"), Listener::default());
    let card = Card::new(0).recording_in_vain_at(2);
    predict(&prediction(&out, on([card])), &mut listener).unwrap_or_else(|e| panic!("{e}"));
    same(&out, &wanted);
    let said = listener.0.iter().filter(|text| text.ends_with("there is no room for a record")).count();
    assert_eq!(said, 1, "{:?}", listener.0);
}

fn embedding(folder: &Folder, name: &str, pool: Pooling, settings: Settings) -> plimsoll_embed::EmbedOptions {
    let model = fixture("goldens/esm2").display().to_string();
    let output = folder.path(&format!("{name}.safetensors"));
    let usual = plimsoll_embed::EmbedOptions::usual(model, proteins(folder), output);
    plimsoll_embed::EmbedOptions { force: true, pool, settings, ..usual }
}

/// Header and values of a safetensors file, without the metadata that names the device.
fn content(path: &Path) -> (serde_json::Value, Vec<u8>) {
    let bytes = fs::read(path).expect("bytes");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let metadata = header["__metadata__"].as_object_mut().expect("an object");
    metadata.retain(|key, _| !["device", "instructions", "kernels"].contains(&key.as_str()));
    (header, bytes[8 + length..].to_vec())
}

/// Writes 120 proteins of many lengths.
fn proteins(folder: &Folder) -> PathBuf {
    let letters = b"ACDEFGHIKLMNPQRSTVWY";
    let sequence =
        |i: usize| (0..3 + i * 7 % 150).map(|j| letters[(i * i + j * j) % 20] as char).collect::<String>();
    folder.write("in.faa", (0..120).map(|i| format!(">s{i}\n{}\n", sequence(i))).collect::<String>())
}

#[test]
fn any_number_of_devices_embeds_the_same_bytes() {
    let folder = Folder::new("replicas-embed");
    let run = |name: &str, pool, settings| {
        let options = embedding(&folder, name, pool, settings);
        let report = embed(&options, &mut Listener::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(report.sequences, 120);
        (content(&report.files[0]), report.devices)
    };
    for pool in [Pooling::Mean, Pooling::Cls, Pooling::Tokens] {
        let (wanted, _) = run("cpu", pool, on_cpu());
        for count in [1, 2, 3, 8] {
            let (found, devices) = run("cards", pool, on(cards(count)));
            assert!(found == wanted, "{} differs on {count}", pool.name());
            let steps: Vec<u64> = devices.iter().map(|device| device.steps).collect();
            assert!(shared(&steps, count), "{steps:?}");
        }
    }
}

#[test]
fn a_device_that_fails_is_left_out() {
    let folder = Folder::new("replicas-failing");
    let wanted = folder.path("cpu");
    predict(&prediction(&wanted, on_cpu()), &mut Listener::default()).unwrap_or_else(|e| panic!("{e}"));
    let slow = |number| Card::new(number).slow(Duration::from_millis(2));
    for launch in [1, 40, 200] {
        let out = folder.path(&format!("{launch}"));
        let settings = on([slow(0), Card::new(1).failing_at(launch), slow(2)]);
        let mut listener = Listener::default();
        let report =
            predict(&prediction(&out, settings), &mut listener).unwrap_or_else(|e| panic!("{launch}: {e}"));
        same(&out, &wanted);
        let said = listener.0.join("\n");
        assert!(said.contains("card:1 (of the tests) failed and is no longer used"), "{said}");
        assert!(said.contains("it fell off the bus; its"), "{said}");
        assert!(
            to_json(&report.run_record)["devices"][1]["failed"].is_string(),
            "{}",
            to_json(&report.run_record)["devices"]
        );
    }
    let options = embedding(&folder, "some", Pooling::Mean, on([Card::new(0).failing_at(60), slow(1)]));
    let mut listener = Listener::default();
    let report = embed(&options, &mut listener).unwrap_or_else(|e| panic!("{e}"));
    assert!(listener.0.join("\n").contains("card:0 (of the tests) failed"), "{:?}", listener.0);
    let found = content(&report.files[0]);
    let wanted = embed(&embedding(&folder, "all", Pooling::Mean, on_cpu()), &mut Listener::default());
    assert!(found == content(&wanted.unwrap_or_else(|e| panic!("{e}")).files[0]));
}

#[test]
fn without_a_device_the_run_ends_and_goes_on_later() {
    let folder = Folder::new("replicas-none");
    let (wanted, out) = (folder.path("cpu"), folder.path("out"));
    predict(&prediction(&wanted, on_cpu()), &mut Listener::default()).unwrap_or_else(|e| panic!("{e}"));
    let settings = on([Card::new(0).failing_at(350), Card::new(1).failing_at(250)]);
    let error = predict(&prediction(&out, settings), &mut Listener::default()).expect_err("no device is left");
    assert!(
        matches!(&error, VirusError::Runtime(RuntimeError::Device(_))) && error.exit_code() == 1,
        "{error}"
    );
    let (said, first) = (error.to_string(), error.source().expect("a cause").to_string());
    assert!(said.contains("all 2 devices failed") && said.contains("card:0 (of the tests)"), "{said}");
    assert!(said.contains("card:1 (of the tests)") && first == "the device failed", "{said}: {first}");
    let report = predict(&prediction(&out, on(cards(2))), &mut Listener::default());
    let report = report.unwrap_or_else(|e| panic!("{e}"));
    let kept = to_json(&report.run_record)["windows_from_journal"].as_u64().expect("a number");
    assert!(kept > 0, "nothing was kept");
    same(&out, &wanted);
}

#[test]
fn who_is_free_takes_the_next() {
    let folder = Folder::new("replicas-slow");
    let settings = on([Card::new(0).slow(Duration::from_millis(20)), Card::new(1)]);
    let report = predict(&prediction(&folder.path("out"), settings), &mut Listener::default());
    let steps = steps(&to_json(&report.unwrap_or_else(|e| panic!("{e}")).run_record));
    assert!(steps[0] > 0 && steps[1] > 2 * steps[0], "{steps:?}");
}

/// The journal does not depend on number and names of the devices.
#[test]
fn a_run_goes_on_with_other_devices() {
    let folder = Folder::new("replicas-others");
    let out = folder.path("out");
    let broken = on([Card::new(0).failing_at(600)]);
    predict(&prediction(&out, broken), &mut Listener::default()).expect_err("its device fails");
    let report = predict(&prediction(&out, on([Card::new(3), Card::new(5)])), &mut Listener::default());
    let record = to_json(&report.unwrap_or_else(|e| panic!("{e}")).run_record);
    assert!(record["windows_from_journal"].as_u64().is_some_and(|kept| kept > 0), "{record}");
}

#[test]
fn devices_of_a_run_are_of_one_kind() {
    let refused = |cards: Vec<Card>, wanted: &str| {
        let machines = cards.into_iter().map(|card| Arc::new(card) as Arc<dyn Machine>).collect();
        let error = Device::machines(machines).expect_err("refused").to_string();
        assert!(error.contains(wanted), "{error}");
    };
    refused(vec![], "there is no device");
    refused(vec![Card::new(0), Card::new(1), Card::new(0)], "card:0 (of the tests) is listed twice");
    refused(
        vec![Card::of_kind(0, "A"), Card::of_kind(1, "B")],
        "card:0 (A) and card:1 (B) are of different kinds",
    );
}
