//! Tests of predictions in bf16 and int8 on the CPU. Invariant: labels equal those of f32 unless its scores are
//! close, and a result never combines two precisions.

use crate::resume::{Stopper, break_off_with_results, kept, options, reads, results, same, smallest, tight};
use crate::rig::{golden, read, run};
use plimsoll_cpu::Isa;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Failure, Precision, Settings};
use plimsoll_testing::Folder;
use plimsoll_virus::{PredictOptions, predict};
use std::collections::BTreeMap;
use std::path::Path;

/// Difference of the f32 scores of both classes below which a label may differ.
const CLOSE: f32 = 0.3;

fn bf16(mut options: PredictOptions) -> PredictOptions {
    options.settings.precision = Some(Precision::Bf16);
    options
}

fn int8(mut options: PredictOptions) -> PredictOptions {
    options.settings.precision = Some(Precision::Int8);
    options
}

/// Returns the label and both scores by open reading frame.
fn labels(out: &Path) -> BTreeMap<String, (String, f32, f32)> {
    let text = read(out.join("prediction_results.txt"));
    let row = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let score = |i: usize| fields[i].parse().expect("a score");
        (fields[0].to_owned(), (fields[1].to_owned(), score(2), score(3)))
    };
    text.lines().skip(1).map(row).collect()
}

#[test]
fn labels_are_those_of_f32_where_its_scores_are_clear() {
    let folder = Folder::new("narrow-labels");
    for length in [300, 500] {
        let of = |name: &str, narrow: fn(PredictOptions) -> PredictOptions| {
            let out = folder.path(&format!("{name}{length}"));
            let report = run(&narrow(PredictOptions { length, ..golden(&reads(), &out) }))
                .unwrap_or_else(|e| panic!("{e}"));
            (labels(&out), to_json(&report.run_record))
        };
        let (wide, _) = of("wide", |options| options);
        for (name, narrow) in [("bf16", bf16 as fn(PredictOptions) -> PredictOptions), ("int8", int8)] {
            let (narrow, record) = of(name, narrow);
            assert_eq!(record["precision"], name);
            assert!(wide.keys().eq(narrow.keys()), "rows differ");
            let pairs = || wide.values().zip(narrow.values());
            let same = pairs().filter(|(w, n)| w.0 == n.0).count();
            println!("{length} bases: {same} of {} labels in {name} are those of f32", wide.len());
            for (w, n) in pairs().filter(|(w, _)| (w.1 - w.2).abs() >= CLOSE) {
                assert_eq!(w.0, n.0, "{w:?} is {n:?} in {name}");
            }
            assert!(pairs().any(|(w, n)| w.1 != n.1), "no bit differs: was it computed in f32?");
        }
    }
}

#[test]
fn a_journal_of_f32_is_refused() {
    let folder = Folder::new("narrow-foreign");
    let wide = options(&folder.path("out"));
    break_off_with_results(&wide);
    let before = results(&wide.output_dir);
    let error = run(&bf16(wide.clone())).expect_err("another arithmetic");
    assert_eq!(error.exit_code(), 3, "{error}");
    assert!(error.to_string().contains(r#"`precision` was "f32", is "bf16""#), "{error}");
    assert!(results(&wide.output_dir) == before, "it was touched");
}

/// Interrupted and resumed, in two stages, and with weights that are streamed in every step.
#[test]
fn a_run_in_bf16_gives_the_same_bytes_however_it_is_computed() {
    let folder = Folder::new("narrow-bytes");
    run(&bf16(options(&folder.path("whole")))).unwrap_or_else(|e| panic!("{e}"));
    let wanted = results(&folder.path("whole"));
    let broken = bf16(options(&folder.path("broken")));
    break_off_with_results(&broken);
    let report = run(&broken).unwrap_or_else(|e| panic!("{e}"));
    assert!(kept(&report) > 0, "nothing was kept");
    same(&broken.output_dir, &wanted);
    let short = folder.write("short.fa", ">a\nACGTACGTACGTACGT\n");
    let probe = PredictOptions { inputs: vec![short], ..bf16(options(&folder.path("probe"))) };
    let mut stages = bf16(options(&folder.path("stages")));
    stages.settings.budget = tight(&probe).settings.budget;
    let report = run(&stages).unwrap_or_else(|e| panic!("{e}"));
    assert!(!to_json(&report.run_record)["plan_of_nucleotide_stage"].is_null(), "it took one stage");
    same(&stages.output_dir, &wanted);
    let mut streamed = bf16(options(&folder.path("streamed")));
    streamed.settings.budget = Some(plimsoll_graph::Bytes(smallest(&probe)));
    let mut observer = Stopper::never();
    predict(&streamed, &mut observer).unwrap_or_else(|e| panic!("{e}"));
    assert!(observer.said.iter().any(|s| s.contains("weights stream from disk")), "{:?}", observer.said);
    assert!(observer.said.iter().any(|s| s.contains("precision bf16")), "{:?}", observer.said);
    same(&streamed.output_dir, &wanted);
}

#[test]
fn by_itself_bf16_is_taken_where_there_are_tiles() {
    let precision = |asked| Settings { precision: asked, ..Settings::default() }.precision();
    let best = if Isa::detect().has_tiles() { Precision::Bf16 } else { Precision::F32 };
    assert_eq!(precision(None).expect("a precision"), best);
    for asked in [Precision::F32, Precision::Bf16, Precision::Int8] {
        assert_eq!(precision(Some(asked)).expect("a precision"), asked);
    }
    for (asked, name) in [(Precision::Tf32, "tf32"), (Precision::Fp16, "fp16"), (Precision::Fp8, "fp8")] {
        let error = precision(Some(asked)).expect_err(name).to_string();
        assert!(error.contains(&format!("precision={name}")) && error.contains("bf16, f32 or int8"), "{error}");
    }
}
