//! Tests of the whole pipeline: comparison with VirNucPro's results, and independence of results from the way
//! in which they are computed.

use crate::rig::{builtin, golden, method, read, run, virnucpro};
use plimsoll_data::weights::{StoredAs, TensorData, Weights, write_safetensors};
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::PredictOptions;
use plimsoll_virus::output::EmbeddingFormat;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Absolute tolerance for scores and merged embeddings.
const TOLERANCE: f32 = 1e-5;

/// Result files that must be byte-identical in runs with equal identities.
const RESULTS: &[&str] = &[
    "predictions.tsv",
    "windows.tsv",
    "windows.bed",
    "virus.fna",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "notes.tsv",
    "chunked.fa",
    "nucleotide.fa",
    "protein.faa",
];

fn reads() -> std::path::PathBuf {
    fixture("goldens/pipeline/reads.fa")
}

fn all_results(dir: &Path) -> Vec<(&'static str, String)> {
    RESULTS.iter().map(|name| (*name, read(dir.join(name)))).collect()
}

/// Checks that two tables have equal rows and texts, and numbers within the tolerance.
fn same_table(found: &str, wanted: &str) {
    assert_eq!(found.lines().count(), wanted.lines().count());
    for (f, w) in found.lines().zip(wanted.lines()) {
        for (f, w) in f.split('\t').zip(w.split('\t')) {
            match (f.parse::<f32>(), w.parse::<f32>()) {
                (Ok(a), Ok(b)) => assert!((a - b).abs() <= TOLERANCE, "{f} is not {w}"),
                _ => assert_eq!(f, w),
            }
        }
    }
}

fn against_the_original(length: usize) {
    let folder = Folder::new(&format!("golden{length}"));
    let out = folder.path("out");
    let saving = virnucpro(golden(&reads(), &out), |method| {
        method.save_embeddings = Some(EmbeddingFormat::Safetensors);
    });
    let options = PredictOptions { length, ..saving };
    let report = run(&options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.failed, 0);
    let expected = fixture("goldens/pipeline").join(format!("expected_{length}"));
    for name in ["chunked.fa", "nucleotide.fa", "protein.faa", "prediction_results_highestscore.csv"] {
        assert!(read(out.join(name)) == read(expected.join(name)), "{name} differs at {length}");
    }
    same_table(&read(out.join("prediction_results.txt")), &read(expected.join("prediction_results.txt")));

    let answers = Weights::open(&expected.join("golden.safetensors")).expect("answers");
    let found = Weights::open(&out.join("embeddings.safetensors")).expect("embeddings");
    let merged = answers.tensor("merged").expect("merged");
    let floats = |weights: &Weights, name: &str| {
        let n = weights.expect(name, merged.shape()).unwrap_or_else(|e| panic!("{e}")).elements();
        let mut values = vec![0.0; n as usize];
        weights.read_f32(name, 0..n, &mut values).expect("read");
        values
    };
    let (a, b) = (floats(&found, "embeddings"), floats(&answers, "merged"));
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= TOLERANCE, "merged embeddings are off by {worst} at {length}");
}

#[test]
fn the_pipeline_at_500() {
    against_the_original(500);
}

#[test]
fn the_pipeline_at_300() {
    against_the_original(300);
}

#[test]
fn results_do_not_depend_on_how_they_are_computed() {
    let folder = Folder::new("invariance");
    let first = folder.path("first");
    run(&golden(&reads(), &first)).unwrap_or_else(|e| panic!("{e}"));
    let wanted = all_results(&first);
    let vary = |name: &str, change: &dyn Fn(&mut PredictOptions)| {
        let out = folder.path(name);
        let mut options = golden(&reads(), &out);
        change(&mut options);
        run(&options).unwrap_or_else(|e| panic!("{name}: {e}"));
        for ((file, found), (_, wanted)) in all_results(&out).iter().zip(&wanted) {
            assert!(found == wanted, "{file} differs with {name}");
        }
    };
    vary("tokens-502", &|o| o.settings.tokens = Some(502));
    vary("tokens-8192", &|o| o.settings.tokens = Some(8192));
    vary("threads-1", &|o| o.settings.threads = 1);
    vary("threads-5", &|o| o.settings.threads = 5);
    vary("workers-1", &|o| (o.workers, o.prefetch) = (1, 1));
    vary("workers-7", &|o| o.workers = 7);
    vary("order", &|o| o.sort_by_length = false);
    vary("embeddings", &|o| method(o).save_embeddings = Some(EmbeddingFormat::Npy));
}

#[test]
fn a_record_scores_the_same_in_any_order() {
    let folder = Folder::new("order");
    let text = read(reads());
    let mut records: Vec<&str> = text.split_inclusive("\n>").map(|r| r.trim_end_matches('>')).collect();
    records[0] = &records[0][1..];
    records.reverse();
    let reversed: String = records.iter().map(|r| format!(">{}\n", r.trim_end())).collect();
    let input = folder.write("reversed.fa", reversed);
    run(&golden(&reads(), &folder.path("a"))).unwrap_or_else(|e| panic!("{e}"));
    run(&golden(&input, &folder.path("b"))).unwrap_or_else(|e| panic!("{e}"));
    let sorted = |dir: &str, file: &str| {
        let text = read(folder.path(dir).join(file));
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    for file in ["predictions.tsv", "windows.tsv", "prediction_results.txt"] {
        assert_eq!(sorted("a", file), sorted("b", file), "{file}");
    }
}

#[test]
fn untrained_models_call_nothing() {
    let folder = Folder::new("untrained");
    let out = folder.path("out");
    let report = run(&builtin(&reads(), &out)).unwrap_or_else(|e| panic!("{e}"));
    assert!(!report.trained);
    let table = read(out.join("predictions.tsv"));
    let calls: Vec<&str> = table.lines().skip(1).filter_map(|l| l.rsplit('\t').next()).collect();
    assert!(calls.iter().all(|c| ["untrained", "no_call"].contains(c)), "{calls:?}");
    for name in ["virus.fna", "prediction_results.txt", "prediction_results_highestscore.csv"] {
        assert!(!out.join(name).exists(), "{name} was written");
    }
}

#[test]
fn a_second_run_finds_the_result() {
    let folder = Folder::new("again");
    let out = folder.path("out");
    let options = golden(&reads(), &out);
    let first = run(&options).unwrap_or_else(|e| panic!("{e}"));
    let before = all_results(&out);
    let again = run(&options).unwrap_or_else(|e| panic!("{e}"));
    assert!(!first.already_complete && again.already_complete);
    assert_eq!(first.counts.records, again.counts.records);
    let other = run(&PredictOptions { length: 300, ..options.clone() }).expect_err("another run");
    assert!(other.to_string().contains("another run") && other.to_string().contains("length"), "{other}");
    assert_eq!(before, all_results(&out));
    let input = folder.write("other.fa", ">x\nACGT\n");
    let other = run(&golden(&input, &out)).expect_err("another input");
    assert!(other.to_string().contains("input"), "{other}");
    run(&PredictOptions { length: 300, force: true, ..options }).unwrap_or_else(|e| panic!("{e}"));
    assert_ne!(before, all_results(&out));
}

#[test]
fn a_folder_of_others_is_left_alone() {
    let folder = Folder::new("others");
    folder.write("thesis.tex", "years of work");
    let error = run(&golden(&reads(), &folder.0)).expect_err("refused");
    assert!(error.to_string().contains("thesis.tex"), "{error}");
}

#[test]
fn leftovers_are_removed_only_from_a_folder_of_ours() {
    let folder = Folder::new("leftovers");
    let (ours, theirs) = (".predictions.tsv.1-0.part", ".download.part");
    folder.write(ours, "half");
    folder.write(theirs, "half a film");
    run(&golden(&reads(), &folder.0)).expect_err("refused");
    assert!(folder.path(ours).exists() && folder.path(theirs).exists());
    fs::remove_file(folder.path(theirs)).expect("removed");
    run(&golden(&reads(), &folder.0)).unwrap_or_else(|e| panic!("{e}"));
    assert!(!folder.path(ours).exists());
}

#[test]
fn a_folder_is_one_runs_at_a_time() {
    let folder = Folder::new("lock");
    let other = fs::File::open(&folder.0).expect("the folder");
    other.lock().expect("another run");
    let error = run(&golden(&reads(), &folder.0)).expect_err("taken");
    assert!(error.to_string().contains("another run is writing"), "{error}");
    drop(other);
    run(&golden(&reads(), &folder.0)).unwrap_or_else(|e| panic!("{e}"));
}

/// A changed configuration or tokenizer makes another run, even if the weights are unchanged.
#[test]
fn configuration_and_tokenizer_are_part_of_a_run() {
    let folder = Folder::new("described");
    let (model, out) = (folder.path("dnabert_s"), folder.path("out"));
    fs::create_dir_all(&model).expect("a folder");
    for file in fs::read_dir(fixture("goldens/dnabert_s")).expect("goldens").flatten() {
        fs::copy(file.path(), model.join(file.file_name())).expect("copied");
    }
    let mut options = golden(&reads(), &out);
    method(&mut options).models.dna = Some(model.display().to_string());
    run(&options).unwrap_or_else(|e| panic!("{e}"));
    assert!(run(&options).unwrap_or_else(|e| panic!("{e}")).already_complete);
    for file in ["config.json", "tokenizer.json"] {
        let text = read(model.join(file));
        fs::write(model.join(file), format!("{text} ")).expect("written");
        let error = run(&options).expect_err("another model");
        assert!(error.to_string().contains(file), "{error}");
        fs::write(model.join(file), text).expect("written");
    }
}

#[test]
fn what_is_odd_is_noted() {
    let folder = Folder::new("odd");
    let input = folder.write("odd.fa", ">a\nACGTACGTACGT\n>empty\n>a\nACGT\n>n\nNNNNNNNNN\n>odd\nACGTEACGTF\n");
    let out = folder.path("out");
    let options = golden(&input, &out);
    let report = run(&options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.notes, 5);
    let notes = read(out.join("notes.tsv"));
    for wanted in [
        "empty\tempty",
        "a\tduplicate_id",
        "n\tall_n",
        "odd\tnon_iupac",
        "n\tunknown_letters\tthe input: unknown letters: 11 in 2 records",
    ] {
        assert!(notes.contains(wanted), "{notes}");
    }
    let table = read(out.join("predictions.tsv"));
    let names: Vec<&str> = table.lines().skip(1).filter_map(|l| l.split('\t').next()).collect();
    assert_eq!(names, ["a", "empty", "a#1.3", "n", "odd"]);
    assert!(table.contains("empty\t0\t0\t0\t0\tNA\tskipped\n"), "{table}");
    // The complete result has notes, so a strict run that finds it fails too.
    let error = run(&PredictOptions { strict: true, ..options.clone() }).expect_err("strict");
    assert!(error.to_string().contains("5 notes"), "{error}");
    let strict = PredictOptions { strict: true, output_dir: folder.path("strict"), ..options };
    let error = run(&strict).expect_err("strict");
    assert!(error.to_string().contains("strict"), "{error}");
    assert!(!folder.path("strict").exists());
    // A folder that existed before the failed run is not removed.
    fs::create_dir(folder.path("strict")).expect("made");
    run(&strict).expect_err("strict");
    assert_eq!(fs::read_dir(folder.path("strict")).expect("a folder").count(), 0);
}

/// With a protein encoder whose token embedding of tryptophan is NaN, exactly the sequences with a W fail.
#[test]
fn a_poisoned_sequence_is_listed() {
    let folder = Folder::new("poison");
    let model = folder.path("esm2");
    fs::create_dir_all(&model).expect("a folder");
    fs::copy(fixture("goldens/esm2/config.json"), model.join("config.json")).expect("copied");
    let weights = Weights::open(&fixture("goldens/esm2")).expect("weights");
    let floats = weights.tensors().filter(|t| t.dtype().name() == "F32");
    let mut tensors: Vec<(String, Vec<u64>, Vec<f32>)> = floats
        .map(|t| {
            let mut data = vec![0.0; t.elements() as usize];
            weights.read_f32(t.name(), 0..t.elements(), &mut data).expect("read");
            (t.name().to_owned(), t.shape().to_vec(), data)
        })
        .collect();
    for (name, shape, data) in &mut tensors {
        if name.ends_with("word_embeddings.weight") {
            let d = shape[1] as usize;
            data[22 * d..23 * d].fill(f32::NAN); // W is token 22
        }
    }
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    write_safetensors(&model.join("model.safetensors"), &data, &BTreeMap::new(), StoredAs::F32)
        .expect("written");

    let out = folder.path("out");
    let mut options = golden(&reads(), &out);
    method(&mut options).models.protein = Some(model.display().to_string());
    // Few slots and short windows: frames fail while others are still being admitted.
    let mut crowded = PredictOptions { length: 9, output_dir: folder.path("crowded"), ..options.clone() };
    crowded.settings.tokens = Some(64);
    method(&mut crowded).save_embeddings = Some(EmbeddingFormat::Npy);
    let report = run(&crowded).unwrap_or_else(|e| panic!("{e}"));
    let noted = read(crowded.output_dir.join("notes.tsv")).matches("\tfailed\t").count() as u64;
    assert!(report.failed > 100 && noted == report.failed);

    let report = run(&options).unwrap_or_else(|e| panic!("{e}"));
    let proteins = read(out.join("protein.faa"));
    let with_w = |on: bool| {
        let pairs: Vec<&str> = proteins.lines().collect();
        let ids = pairs.chunks(2).filter(|p| p[1].contains('W') == on).map(|p| p[0][1..].to_owned());
        ids.collect::<Vec<_>>()
    };
    assert!(!with_w(true).is_empty() && !with_w(false).is_empty());
    assert_eq!(report.failed, with_w(true).len() as u64);
    let results = read(out.join("prediction_results.txt"));
    let scored: Vec<String> =
        results.lines().skip(1).map(|l| l.split('\t').next().unwrap_or("").to_owned()).collect();
    assert_eq!(scored, with_w(false));
    assert_eq!(read(out.join("notes.tsv")).matches("\tfailed\t").count() as u64, report.failed);
}

#[test]
fn the_run_record_adds_up() {
    let folder = Folder::new("record");
    let report = run(&golden(&reads(), &folder.path("out"))).unwrap_or_else(|e| panic!("{e}"));
    let record: serde_json::Value = serde_json::from_str(&read(folder.path("out/run.json"))).expect("JSON");
    let plan = &record["plan"];
    let sum: u64 = plan["ledger"].as_object().expect("a ledger").values().filter_map(|v| v.as_u64()).sum();
    assert_eq!(Some(sum), plan["peak_bytes"].as_u64());
    assert_eq!(record["counts"]["records"], report.counts.records);
    for key in ["plimsoll", "device", "kernels", "precision", "tokens_per_second", "memory", "packing_fill"] {
        assert!(!record[key].is_null(), "{key} is missing");
    }
    assert_eq!(record["identity"]["inputs"][0]["sha256"].as_str().map(str::len), Some(64));
    let seconds = |key: &str| record["seconds"][key].as_f64().unwrap_or_else(|| panic!("{key} is missing"));
    let parts = ["starting", "waiting_for_input", "waiting_for_devices", "between", "writing"];
    let sum: f64 = parts.into_iter().map(seconds).sum();
    assert!((sum - seconds("total")).abs() < 1e-6, "{}", record["seconds"]);
}

#[test]
fn short_and_strange_inputs_run() {
    let folder = Folder::new("strange");
    for (name, text) in [
        ("one-base", ">x\nA\n"),
        ("crlf", ">x desc\r\nACGTACGTACGTACG\r\nACGT\r\n"),
        ("no-newline", ">x\nACGTACGTACGT"),
        ("gaps", ">x\nACG---ACGTTT\n"),
        ("lower", ">x\nacgtacgtacgtaaa\n"),
        ("fastq", "@x\nACGTACGTACGT\n+\nIIIIIIIIIIII\n"),
    ] {
        let input = folder.write(name, text);
        let report = run(&golden(&input, &folder.path(&format!("{name}-out"))))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(report.counts.records, 1, "{name}");
    }
}

/// A few records have more open reading frames than there are slots at the smallest step size, so windows wait
/// for frames that are not admitted yet.
#[test]
fn every_frame_is_scored_when_slots_are_few() {
    let folder = Folder::new("slots");
    let out = folder.path("out");
    let mut options = PredictOptions { length: 9, ..golden(&reads(), &out) };
    options.settings.tokens = Some(16);
    let report = run(&options).unwrap_or_else(|e| panic!("{e}"));
    let orfs = read(out.join("protein.faa")).lines().filter(|l| l.starts_with('>')).count() as u64;
    assert!(orfs > 10_000, "{orfs}");
    assert_eq!(report.counts.orfs, orfs);
    assert_eq!(read(out.join("prediction_results.txt")).lines().count() as u64, orfs + 1);
}

#[test]
fn what_was_computed_otherwise_is_another_result() {
    let folder = Folder::new("computed-otherwise");
    let options = golden(&reads(), &folder.path("out"));
    run(&options).expect("complete");
    let file = folder.path("out/run.json");
    let text = read(&file);
    let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (&record["identity"]["arithmetic"]["precision"], &record["precision"]),
        (&"f32".into(), &"f32".into())
    );
    for (key, value) in [("precision", "bf16"), ("device", "cuda (a card)"), ("instructions", "others")] {
        let mut other = record.clone();
        other["identity"]["arithmetic"][key] = value.into();
        fs::write(&file, other.to_string()).expect("written");
        let error = run(&options).expect_err("another result").to_string();
        for part in ["computed otherwise", key, value, "use force"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    fs::write(&file, text).expect("written");
    assert!(run(&options).expect("there").already_complete);
}
