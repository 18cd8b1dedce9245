//! Tests of predictions on devices with too little free memory: refusal before the first allocation, smaller
//! steps after another process took memory, and one device whose arena is changed from stage to stage.

use crate::rig::golden;
use plimsoll_graph::Bytes;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Device, Failure, Level, Machine, Observer, Precision, Progress, Settings};
use plimsoll_testing::cards::{Card, CardMemory};
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::{self, predict};
use std::path::Path;
use std::sync::Arc;

/// Observer that records messages with their levels.
#[derive(Default)]
struct Listener(Vec<(Level, String)>);

impl Listener {
    /// Returns the first message of a level that contains `part`.
    fn said(&self, level: Level, part: &str) -> Option<&str> {
        let mut lines = self.0.iter().filter(|(at, _)| *at == level).map(|(_, text)| text.as_str());
        lines.find(|text| text.contains(part))
    }
}

impl Observer for Listener {
    fn say(&mut self, level: Level, text: &str) {
        self.0.push((level, text.to_owned()));
    }

    fn progress(&mut self, _: &Progress) {}
}

/// A prediction of the golden input on a test device with the given memory.
fn on(memory: &Arc<CardMemory>, output: &Path) -> plimsoll_virus::PredictOptions {
    let card = Arc::new(Card::new(0).with(Arc::clone(memory))) as Arc<dyn Machine>;
    let device = Device::machines(vec![card]).unwrap_or_else(|e| panic!("{e}"));
    let budget = Some(Bytes(1 << 30));
    let settings =
        Settings { device, precision: Some(Precision::F32), threads: 1, budget, ..Settings::default() };
    plimsoll_virus::PredictOptions { settings, ..golden(&fixture("goldens/pipeline/reads.fa"), output) }
}

/// Returns the plan's peak in bytes according to the run record.
fn planned(report: &plimsoll_virus::PredictReport) -> u64 {
    to_json(&report.run_record)["plan"]["peak_bytes"].as_u64().expect("a number")
}

#[test]
fn what_is_not_free_is_refused_before_anything_is_allocated() {
    let folder = Folder::new("memory-free");
    let memory = Arc::new(CardMemory::of(4 << 30));
    let whole = predict(&on(&memory, &folder.path("whole")), &mut Listener::default());
    let peak = planned(&whole.unwrap_or_else(|e| panic!("{e}")));
    let arenas = memory.arenas();

    // The budget admits the plan, but one byte too little is free on the device.
    memory.free(peak - 1);
    let options = on(&memory, &folder.path("short"));
    let error = predict(&options, &mut Listener::default()).expect_err("too little is free");
    assert_eq!(error.exit_code(), 4, "{error}");
    assert_eq!(memory.arenas(), arenas, "nothing was allocated");
    let text = error.to_string();
    for part in [
        "free are",
        "before the first allocation",
        "largest tensors: ",
        "process 7 (python) holds 5 B",
        "what fits, cheapest first:  tokens=",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // The proposed number of tokens is the largest that fits: 128 more, one step of the search, are refused.
    let tokens = text.split("  tokens=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
    let tokens: u64 = tokens.parse().expect("a number");
    for (tokens, fits) in [(tokens + 128, false), (tokens, true)] {
        let mut with = options.clone();
        with.settings.tokens = Some(tokens);
        let ran = predict(&with, &mut Listener::default());
        assert_eq!(ran.is_ok(), fits, "{tokens} tokens");
    }
}

#[test]
fn what_another_process_takes_in_between_makes_steps_smaller() {
    let folder = Folder::new("memory-between");
    let memory = Arc::new(CardMemory::of(4 << 30));
    let whole = predict(&on(&memory, &folder.path("whole")), &mut Listener::default());
    let whole = whole.unwrap_or_else(|e| panic!("{e}"));

    memory.refuse(2);
    let mut listener = Listener::default();
    let smaller = predict(&on(&memory, &folder.path("smaller")), &mut listener);
    let smaller = smaller.unwrap_or_else(|e| panic!("{e}"));
    assert!(planned(&smaller) < planned(&whole));
    let said = listener.said(Level::Warning, "another process took memory").expect("it is said");
    assert!(said.contains(&Bytes(planned(&whole)).to_string()), "{said}");
    let text = |folder: &Path, name| std::fs::read_to_string(folder.join(name)).expect("text");
    for name in ["prediction_results.txt", "prediction_results_highestscore.csv"] {
        assert_eq!(text(&whole.output_dir, name), text(&smaller.output_dir, name), "{name}");
    }
}

#[test]
fn a_card_that_gives_nothing_is_refused_with_all_that_is_known() {
    let folder = Folder::new("memory-nothing");
    for tokens in [None, Some(502)] {
        let memory = Arc::new(CardMemory::of(4 << 30));
        memory.refuse(u64::MAX);
        let mut options = on(&memory, &folder.path("none"));
        options.settings.tokens = tokens;
        let error = predict(&options, &mut Listener::default()).expect_err("nothing is given");
        assert_eq!(error.exit_code(), 4, "{error}");
        let text = error.to_string();
        for part in ["at start: an arena of", "largest tensors: ", "process 7 (python) holds 5 B"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // A requested number of tokens is never lowered, so there is only one attempt.
        let tries = memory.refused();
        assert!(if tokens.is_some() { tries == 1 } else { tries > 2 }, "{tries} tries");
    }
}

/// The nucleotide encoder and then the protein encoder run on one device, whose arena is resized between the
/// stages; pages are given back if the second arena is smaller.
#[test]
fn two_stages_share_a_device() {
    let folder = Folder::new("memory-stages");
    let memory = Arc::new(CardMemory::of(4 << 30));
    memory.clear_every(1);
    let mut options = on(&memory, &folder.path("stages"));
    options.settings.tokens = Some(502);
    let stages = |budget: u64| {
        let mut options = options.clone();
        (options.settings.budget, options.force) = (Some(Bytes(budget)), true);
        let report = predict(&options, &mut Listener::default()).ok()?;
        Some(!to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null())
    };
    let (mut low, mut high) = (0, 1 << 30);
    while high - low > 1024 {
        let middle = low + (high - low) / 2;
        match stages(middle) {
            Some(false) => high = middle,
            Some(true) | None => low = middle,
        }
    }
    (options.settings.budget, options.force) = (Some(Bytes(low)), true);
    let (devices, arenas) = (memory.devices(), memory.arenas());
    let mut listener = Listener::default();
    let report = predict(&options, &mut listener).unwrap_or_else(|e| panic!("{e}"));
    assert!(!to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null(), "it took one stage");
    assert_eq!(memory.devices() - devices, 1, "one device for both");
    assert_eq!(memory.arenas() - arenas, 2, "with an arena for each");
    assert!(listener.said(Level::Detail, "continues with an arena of").is_some(), "{:?}", listener.0);
    assert_eq!(
        memory.given_back() > 0,
        listener.said(Level::Info, "were freed between steps").is_some(),
        "{:?}",
        listener.0
    );
    assert!(memory.given_back() > 0, "the protein encoder's arena is the smaller here");
}
