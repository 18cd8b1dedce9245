//! Tests of predictions with a caller: what the tables say, that results do not depend on how they are computed, and that
//! interrupted, sharded and paired runs end with the right bytes.

use crate::resume::{Stopper, kept, results, same};
use crate::rig::{builtin, read, run};
use plimsoll_data::weights::{StoredAs, TensorData, Weights, write_safetensors};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Device, Failure, Machine, Settings};
use plimsoll_testing::cards::Card;
use plimsoll_testing::{Folder, fixture};
use plimsoll_virus::caller::{Calibration, CallLimits, Threshold};
use plimsoll_virus::output::HitsFormat;
use plimsoll_virus::{CallerOptions, MethodOptions, PredictOptions, VirusError, WindowShard, predict};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A prediction of `input` with the golden caller, windows of 1000 bases, in f32.
fn calling(input: &Path, output: &Path) -> PredictOptions {
    let caller = CallerOptions::usual(Some(fixture("goldens/caller")));
    let usual = builtin(input, output);
    PredictOptions { method: MethodOptions::Caller(caller), length: 1000, ..usual }
}

/// Returns the options with changed options of the caller.
fn with(options: PredictOptions, change: impl FnOnce(&mut CallerOptions)) -> PredictOptions {
    let mut options = options;
    match &mut options.method {
        MethodOptions::Caller(caller) => change(caller),
        MethodOptions::VirNucPro(_) => panic!("no caller"),
    }
    options
}

/// Pseudo-random bases; every record has its own share of G and C, which the golden caller reacts to.
struct Bases(u64);

impl Bases {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn sequence(&mut self, length: usize, gc: f64) -> String {
        let letter = |gc: bool, first: bool| match (gc, first) {
            (true, true) => 'G',
            (true, false) => 'C',
            (false, true) => 'A',
            (false, false) => 'T',
        };
        (0..length).map(|_| letter(self.next() < gc, self.next() < 0.5)).collect()
    }
}

/// Records of several lengths and compositions, by name.
fn records() -> Vec<(String, String)> {
    let mut bases = Bases(5);
    let lengths = [150, 300, 999, 1000, 1001, 2500, 4200];
    (0..42)
        .map(|i| {
            let gc = 0.2 + 0.12 * (i % 6) as f64;
            (format!("r{i}"), bases.sequence(lengths[i % lengths.len()], gc))
        })
        .collect()
}

fn fasta(records: &[(String, String)]) -> String {
    records.iter().map(|(name, bases)| format!(">{name}\n{bases}\n")).collect()
}

fn ran(options: &PredictOptions) -> plimsoll_virus::PredictReport {
    run(options).unwrap_or_else(|e| panic!("{e}"))
}

/// Rows of a table, each by column name.
fn rows(path: &Path) -> Vec<BTreeMap<String, String>> {
    let text = read(path);
    let mut lines = text.lines().map(|line| line.split('\t').map(str::to_owned).collect::<Vec<_>>());
    let header = lines.next().expect("a header");
    lines
        .map(|cells| {
            assert_eq!(cells.len(), header.len(), "{cells:?}");
            header.iter().cloned().zip(cells).collect()
        })
        .collect()
}

fn number(row: &BTreeMap<String, String>, column: &str) -> f64 {
    row[column].parse().unwrap_or_else(|_| panic!("{column}: {row:?}"))
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The tables agree with each other and with the calibration, computed here once more from `windows.tsv`.
#[test]
fn the_tables_follow_from_the_windows() {
    let folder = Folder::new("caller-tables");
    let input = folder.write("in.fa", fasta(&records()));
    let out = folder.path("out");
    let report = ran(&with(calling(&input, &out), |caller| caller.prevalence = 0.2));
    let calibration = Calibration::open(&fixture("goldens/caller")).unwrap_or_else(|e| panic!("{e}"));
    let (windows, predictions) = (rows(&out.join("windows.tsv")), rows(&out.join("predictions.tsv")));
    let shift = 0.25f64.ln();
    assert_eq!(predictions.len(), 42);
    for (row, (name, bases)) in predictions.iter().zip(records()) {
        let length = bases.len();
        assert_eq!((&row["seq_name"], number(row, "length")), (&name, length as f64));
        let own: Vec<_> = windows.iter().filter(|w| w["seq_name"] == name).collect();
        assert_eq!(number(row, "n_windows"), own.len() as f64);
        assert_eq!(own.len(), length.div_ceil(1000));
        for (i, window) in own.iter().enumerate() {
            let start = (1000 * i).min(length.saturating_sub(1000));
            let end = (start + 1000).min(length);
            assert_eq!((number(window, "start"), number(window, "end")), (start as f64 + 1.0, end as f64));
            let at = calibration.at((end - start) as u64);
            let score = sigmoid(at.log_odds(number(window, "margin")) + shift);
            assert!((number(window, "virus_score") - score).abs() < 1e-3, "{window:?}: {score}");
        }
        // The last window overlaps the one before it, and counts by its new bases.
        let new = |(i, w): (usize, &&BTreeMap<String, String>)| {
            (number(w, "end") - 1000.0 * i as f64) * number(w, "margin")
        };
        let margin = own.iter().enumerate().map(new).sum::<f64>() / length as f64;
        let score = sigmoid(calibration.at(length as u64).log_odds(margin) + shift);
        assert!((number(row, "virus_score") - score).abs() < 1e-3, "{row:?}: {score}");
        assert!(number(row, "low") <= score + 1e-3 && score <= number(row, "high") + 1e-3, "{row:?}");
        let classes = ["p_bacteria", "p_phage", "p_plant"];
        let total: f64 = classes.iter().map(|class| number(row, class)).sum();
        assert!((total - 1.0).abs() < 2e-4, "{row:?}");
        let best =
            classes.into_iter().max_by(|a, b| number(row, a).total_cmp(&number(row, b))).expect("classes");
        assert_eq!(best, format!("p_{}", row["class"]));
        // The threshold of the preset, at equal priors 0.5, is 0.2 at this prevalence.
        let wanted = match (number(row, "low") > 0.2, number(row, "high") < 0.2) {
            (true, _) => ("virus", "NA"),
            (false, true) => ("other", "NA"),
            (false, false) => ("no_call", "uncertain"),
        };
        assert_eq!((&*row["prediction"], &*row["reason"]), wanted, "{row:?}");
        assert_eq!(number(row, "threshold"), 0.2);
    }
    let of = |call: &str| predictions.iter().filter(|row| row["prediction"] == call).count() as u64;
    let counts = report.counts;
    assert_eq!((counts.virus, counts.other, counts.no_call), (of("virus"), of("other"), of("no_call")));
    assert!(counts.virus > 3 && counts.other > 3 && counts.no_call > 0, "{counts:?}");
    check_fdr(&predictions);
    let fna = read(out.join("virus.fna"));
    let calls = report.calls.expect("a caller");
    assert_eq!(fna.matches('>').count() as u64, counts.virus + calls.proviruses);
    for (name, bases) in records() {
        let is_virus = predictions.iter().any(|row| row["seq_name"] == name && row["prediction"] == "virus");
        let title = format!(">{name} virus_score=");
        assert_eq!(fna.contains(&title), is_virus, "{name}");
        let text = fna.split(&title).nth(1).and_then(|rest| rest.split_once('\n'));
        let letters = text.map(|(_, rest)| rest.split('>').next().unwrap_or_default().replace('\n', ""));
        assert_eq!(letters, is_virus.then_some(bases), "{name}");
    }
    assert_eq!(calls.ranked, 42);
    assert!(calls.tpr[0] == calls.tpr[1] && calls.tpr[0] > 0.6 && calls.fpr[1] < 0.3, "{calls:?}");
    let record = to_json(&report.run_record);
    assert_eq!(record["calling"]["prevalence"], 0.2);
    assert_eq!(record["calling"]["threshold"], "default");
    assert_eq!(record["calling"]["calibration"]["lengths"][0]["length"], 150);
    assert_eq!(record["calls"]["no_call_reasons"]["uncertain"], counts.no_call);
    // Thresholds from the shortest to the longest record, by the lengths of the calibration.
    let at = |length: u64| serde_json::json!({"length": length, "threshold": 0.2});
    let thresholds = record["calls"]["thresholds"].as_array().expect("thresholds");
    let lengths: Vec<u64> = thresholds.iter().filter_map(|row| row["length"].as_u64()).collect();
    assert_eq!((lengths.first(), lengths.last()), (Some(&150), Some(&4200)));
    for (row, length) in thresholds.iter().zip(lengths) {
        let threshold = row["threshold"].as_f64().expect("a number");
        assert!((threshold - 0.2).abs() < 1e-12, "{row} is not {}", at(length));
    }
    assert_eq!((&record["calls"]["preset"], &record["calls"]["prevalence"]), (&"default".into(), &0.2.into()));
}

/// The column `fdr` of the records called virus is the running mean of 1 - p by descending p; others have none.
fn check_fdr(predictions: &[BTreeMap<String, String>]) {
    let score = |row: &BTreeMap<String, String>| number(row, "virus_score");
    for row in predictions {
        if row["prediction"] != "virus" {
            assert_eq!(row["fdr"], "NA", "{row:?}");
            continue;
        }
        let called =
            |other: &BTreeMap<String, String>| other["prediction"] == "virus" && score(other) >= score(row);
        let wrong: Vec<f64> =
            predictions.iter().filter(|other| called(other)).map(|o| 1.0 - score(o)).collect();
        let mean = wrong.iter().sum::<f64>() / wrong.len() as f64;
        assert!((number(row, "fdr") - mean).abs() < 1e-5, "{row:?}: {mean}");
    }
}

#[test]
fn records_without_a_call_have_a_reason() {
    let folder = Folder::new("caller-reasons");
    let mut bases = Bases(9);
    let (random, unknown) = (bases.sequence(600, 0.5), "N".repeat(300));
    let input = folder.write(
        "in.fa",
        format!(
            ">tiny\n{}\n>short\n{}\n>empty\n>unknown\n{unknown}{}\n>repeat\n{}\n>plain\n{random}\n>rna\n{}\n",
            &random[..99],
            &random[..149],
            &random[..300],
            "CA".repeat(300),
            random.replace('T', "U"),
        ),
    );
    let reasons = |options: &PredictOptions| -> Vec<(String, String)> {
        ran(options);
        rows(&options.output_dir.join("predictions.tsv"))
            .into_iter()
            .map(|row| (row["seq_name"].clone(), row["reason"].clone()))
            .collect()
    };
    let out = folder.path("out");
    // Nothing is uncertain with this threshold.
    let options = with(calling(&input, &out), |caller| caller.threshold = Threshold::Score(0.0));
    let wanted = |[short, unknown, repeat]: [&str; 3]| -> Vec<(String, String)> {
        let names = ["tiny", "short", "empty", "unknown", "repeat", "plain", "rna"];
        let reasons = ["short", short, "empty", unknown, repeat, "NA", "NA"];
        names.into_iter().zip(reasons).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
    };
    assert_eq!(reasons(&options), wanted(["short", "unknown_letters", "low_complexity"]));
    let table = rows(&out.join("predictions.tsv"));
    assert_eq!((&*table[0]["virus_score"], &*table[0]["fdr"], &*table[0]["class"]), ("NA", "NA", "NA"));
    assert!(number(&table[1], "virus_score") > 0.0 && number(&table[5], "fdr") > 0.0);
    assert_eq!((&*table[4]["fdr"], &*table[4]["threshold"]), ("NA", "0.000000"));
    // U is read as T.
    assert_eq!(table[5]["virus_score"], table[6]["virus_score"]);
    let windows = rows(&out.join("windows.tsv"));
    assert_eq!((&*windows[0]["margin"], &*windows[0]["virus_score"]), ("NA", "NA"));
    let loose = with(options, |caller| {
        caller.limits = CallLimits { min_length: Some(100), max_n: 0.5, min_complexity: 0.0 };
    });
    let loose = PredictOptions { output_dir: folder.path("loose"), ..loose };
    assert_eq!(reasons(&loose), wanted(["NA", "NA", "NA"]));
}

#[test]
fn a_false_discovery_rate_above_the_limit_prevents_a_call() {
    let folder = Folder::new("caller-fdr");
    let input = folder.write("in.fa", fasta(&records()));
    let calls = |name: &str, max_fdr| {
        let options = with(calling(&input, &folder.path(name)), |caller| caller.max_fdr = max_fdr);
        let report = ran(&options);
        (rows(&folder.path(name).join("predictions.tsv")), report)
    };
    let (all, _) = calls("all", None);
    let limit = all.iter().filter(|row| row["prediction"] == "virus").map(|row| number(row, "fdr"));
    let limit = limit.fold(0.0, f64::max) / 2.0;
    let (some, report) = calls("some", Some(limit));
    let (mut kept, mut lost) = (0, 0);
    for (before, after) in all.iter().zip(&some) {
        let call = &*before["prediction"];
        let wanted = match call {
            "virus" if number(before, "fdr") > limit => ("no_call", "fdr"),
            call => (call, &*before["reason"]),
        };
        assert_eq!((&*after["prediction"], &*after["reason"]), wanted, "{before:?}");
        kept += u64::from(wanted.0 == "virus");
        lost += u64::from(wanted.1 == "fdr");
    }
    assert!(kept > 0 && lost > 0, "{kept} {lost}");
    assert_eq!(report.counts.virus, kept);
    let proviruses = report.calls.expect("a caller").proviruses;
    assert_eq!(read(folder.path("some/virus.fna")).matches('>').count() as u64, kept + proviruses);
}

/// (what is done to a record of 1 000 and one of 1 500 bases, windows of the first and of the second as start-end, whether
/// both have the scores of the unchanged records)
type Gaps<'a> = (&'a str, &'a dyn Fn(&str) -> String, [&'a str; 2], bool);

/// Runs of unknown letters that are too long for a window end it, and are no evidence: what is left has its scores.
#[test]
fn windows_end_at_long_runs_of_unknown_letters() {
    let folder = Folder::new("caller-gaps");
    let mut bases = Bases(31);
    let records = [bases.sequence(1000, 0.4), bases.sequence(1500, 0.6)];
    let halves = |record: &str, between: &str| {
        let (first, second) = record.split_at(500);
        format!("{first}{between}{second}")
    };
    let cases: [Gaps<'_>; 6] = [
        ("none", &str::to_owned, ["1-1000", "1-1000 501-1500"], true),
        ("before", &|r| "N".repeat(150) + r, ["151-1150", "151-1150 651-1650"], true),
        ("after", &|r| format!("{r}{}", "n".repeat(101)), ["1-1000", "1-1000 501-1500"], true),
        ("short", &|r| format!("NNN{r}NN"), ["4-1003", "4-1003 504-1503"], true),
        ("join", &|r| halves(r, &"N".repeat(101)), ["1-500 602-1101", "1-500 602-1601"], false),
        ("inside", &|r| halves(r, &"NR".repeat(50)), ["1-1000 101-1100", "1-1000 601-1600"], false),
    ];
    let text: String = cases
        .iter()
        .flat_map(|(name, change, ..)| {
            records.iter().enumerate().map(move |(i, record)| format!(">{name}{i}\n{}\n", change(record)))
        })
        .collect();
    let out = folder.path("out");
    let input = folder.write("in.fa", text);
    ran(&with(calling(&input, &out), |caller| caller.threshold = Threshold::Score(0.0)));
    let (windows, predictions) = (rows(&out.join("windows.tsv")), rows(&out.join("predictions.tsv")));
    let notes = read(out.join("notes.tsv"));
    for (name, _, wanted, is_equal) in cases {
        for (i, wanted) in wanted.into_iter().enumerate() {
            let of = |name: &str| {
                let name = format!("{name}{i}");
                let own: Vec<_> = windows.iter().filter(|w| w["seq_name"] == name).collect();
                let places = own.iter().map(|w| format!("{}-{}", w["start"], w["end"])).collect::<Vec<_>>();
                let margins: Vec<f64> = own.iter().map(|w| number(w, "margin")).collect();
                let row = predictions.iter().find(|row| row["seq_name"] == name).expect("a row");
                (places.join(" "), margins, row["virus_score"].clone())
            };
            let found = of(name);
            assert_eq!(found.0, wanted, "{name}{i}");
            assert!(!is_equal || found.1 == of("none").1, "{name}{i}: {:?}", found.1);
            assert!(!is_equal || found.2 == of("none").2, "{name}{i}: {}", found.2);
            let has_note = ["before", "after", "join"].contains(&name);
            assert_eq!(notes.contains(&format!("{name}{i}\tunknown_run\t")), has_note, "{name}{i}: {notes}");
        }
    }
}

/// Random bases in a repeat. The golden caller gives random bases a margin of about 1 and the repeat one of about 0; the
/// calibration of this test puts equal odds in between.
#[test]
fn a_region_has_its_place_in_all_files() {
    let folder = Folder::new("caller-regions");
    let mut bases = Bases(11);
    let (host, insert, tail) = ("AT".repeat(4000), bases.sequence(3000, 0.5), "AT".repeat(3000));
    let input = folder.write("in.fa", format!(">contig\n{host}{insert}{tail}\n>rest\n{host}\n"));
    let (model, out) = (folder.path("model"), folder.path("out"));
    copy(&model, |_, _| {});
    let text = read(model.join("calibration.json"));
    assert!(text.contains("\"intercept\": -4.0"), "{text}");
    fs::write(model.join("calibration.json"), text.replace("\"intercept\": -4.0", "\"intercept\": -2.0"))
        .expect("written");
    let report = ran(&with(calling(&input, &out), |caller| caller.folder = Some(model.clone())));
    let regions = rows(&out.join("regions.tsv"));
    assert_eq!(regions.len(), 1, "{regions:?}");
    let region = &regions[0];
    assert_eq!(&*region["seq_name"], "contig");
    let columns = ["start", "end", "length", "n_windows"].map(|column| number(region, column));
    assert_eq!(columns, [8001.0, 11000.0, 3000.0, 3.0]);
    assert_eq!(region["reaches"], "none");
    let windows = rows(&out.join("windows.tsv"));
    let calibration = Calibration::open(&model).unwrap_or_else(|e| panic!("{e}"));
    let score: f64 = windows[8..11].iter().map(|w| calibration.at(1000).log_odds(number(w, "margin"))).sum();
    assert!((number(region, "score") - score).abs() < 1e-2, "{region:?}: {score}");
    let bed = read(out.join("regions.bed"));
    let cells: Vec<&str> = bed.trim_end().split('\t').collect();
    assert_eq!(cells[..4], ["contig", "8000", "11000", "contig:8001-11000"]);
    assert_eq!(cells[5], ".");
    let fna = read(out.join("regions.fna"));
    let (title, letters) = fna.split_once('\n').expect("a title");
    assert!(title.starts_with(">contig:8001-11000 score="), "{title}");
    assert_eq!(letters.replace('\n', ""), insert);
    // The contig is not called, so its region is a provirus.
    let predictions = rows(&out.join("predictions.tsv"));
    assert!(predictions.iter().all(|row| row["prediction"] != "virus"), "{predictions:?}");
    let hits = read(out.join("virus.fna"));
    let (title, letters) = hits.split_once('\n').expect("a title");
    assert!(title.starts_with(">contig:8001-11000 virus_score="), "{title}");
    assert!(title.ends_with(" prediction=provirus"), "{title}");
    assert_eq!(letters.replace('\n', ""), insert);
    let viruses = rows(&out.join("viruses.tsv"));
    let names = ["seq_name", "source_seq", "kind", "start", "end", "length", "reaches", "fdr", "n_windows"];
    let cells: Vec<[&str; 9]> = viruses.iter().map(|row| names.map(|name| &*row[name])).collect();
    let place = ["contig:8001-11000", "contig", "provirus", "8001", "11000", "3000", "none", "NA", "3"];
    assert_eq!(cells, [place]);
    assert!(title.contains(&format!("virus_score={} ", viruses[0]["virus_score"])), "{title}");
    let calls = report.calls.expect("a caller");
    assert_eq!((calls.regions, calls.proviruses, calls.viruses.len()), (1, 1, 1));
    // A record that is called has its row, and no rows of its regions.
    let called = folder.path("called");
    let options = with(calling(&input, &called), |caller| {
        caller.folder = Some(model.clone());
        caller.threshold = Threshold::Score(0.0);
        caller.limits.min_complexity = 0.0;
    });
    ran(&options);
    let viruses = rows(&called.join("viruses.tsv"));
    let kinds: Vec<[&str; 3]> =
        viruses.iter().map(|row| ["seq_name", "kind", "reaches"].map(|name| &*row[name])).collect();
    assert!(
        kinds.contains(&["contig", "virus", "NA"]) && !kinds.iter().any(|k| k[1] == "provirus"),
        "{kinds:?}"
    );
    assert_eq!(read(called.join("virus.fna")).matches('>').count(), viruses.len());
}

#[test]
fn results_do_not_depend_on_how_they_are_computed() {
    let folder = Folder::new("caller-invariance");
    let input = folder.write("in.fa", fasta(&records()));
    let first = folder.path("first");
    let with_source = |out: &Path| PredictOptions { source: true, ..calling(&input, out) };
    ran(&with_source(&first));
    let wanted = results(&first);
    assert!(wanted.keys().any(|name| name == "predictions.tsv"));
    let vary = |name: &str, change: &dyn Fn(&mut PredictOptions)| {
        let mut options = with_source(&folder.path(name));
        change(&mut options);
        ran(&options);
        same(&options.output_dir, &wanted);
    };
    vary("tokens", &|o| o.settings.tokens = Some(2048));
    vary("threads", &|o| o.settings.threads = 5);
    vary("workers", &|o| (o.workers, o.prefetch) = (1, 1));
    vary("order", &|o| o.sort_by_length = false);
    let device = |cards: usize| {
        let machines =
            (0..cards).map(|n| Arc::new(Card::new(n).slow(Duration::from_millis(1))) as Arc<dyn Machine>);
        Device::machines(machines.collect()).unwrap_or_else(|e| panic!("{e}"))
    };
    for count in [1, 3] {
        vary(&format!("cards-{count}"), &|o| {
            o.settings =
                Settings { device: device(count), tokens: Some(2048), threads: 1, ..o.settings.clone() };
        });
    }
}

/// Many short reads, so that a run has many steps.
fn reads() -> String {
    let mut bases = Bases(21);
    let reads: Vec<_> =
        (0..400).map(|i| (format!("read{i}"), bases.sequence(100 + 7 * (i % 40), 0.5))).collect();
    fasta(&reads)
}

/// Interrupts a run at later and later moments until it ends by itself; some of the interruptions leave results.
#[test]
fn a_run_that_is_interrupted_ends_with_the_same_bytes() {
    let folder = Folder::new("caller-resume");
    let input = folder.write("in.fa", reads());
    let small = |out: &str| {
        let mut options = calling(&input, &folder.path(out));
        (options.settings.tokens, options.commit_every) = (Some(2048), Duration::ZERO);
        options
    };
    ran(&small("whole"));
    let wanted = results(&folder.path("whole"));
    let mut resumed = 0;
    for steps in [1, 10, 20, 40, 80] {
        let broken = small(&format!("broken{steps}"));
        let Err(error) = predict(&broken, &mut Stopper::after(steps)) else { continue };
        assert_eq!(error.exit_code(), 143, "{error}");
        assert!(!broken.output_dir.join("predictions.tsv").exists());
        let report = ran(&broken);
        same(&broken.output_dir, &wanted);
        resumed += u64::from(kept(&report) > 0);
        // Another threshold is another run.
        let error = run(&with(broken, |caller| caller.prevalence = 0.1)).expect_err("another run");
        assert!(error.to_string().contains("calling"), "{error}");
    }
    assert!(resumed > 0, "no interruption left results");
}

#[test]
fn shards_merge_to_the_same_bytes() {
    let folder = Folder::new("caller-shards");
    let input = folder.write("in.fa", reads());
    let options = |out: &str| calling(&input, &folder.path(out));
    ran(&options("whole"));
    for number in 1..=2 {
        let shard = Some(WindowShard { number, of: 2 });
        let report = ran(&PredictOptions { shard, ..options(&format!("shard{number}")) });
        assert!(report.shard.is_some() && report.calls.is_none());
    }
    let merge = vec![folder.path("shard1"), folder.path("shard2")];
    let report = ran(&PredictOptions { merge, ..options("merged") });
    assert!(report.calls.is_some());
    same(&folder.path("merged"), &results(&folder.path("whole")));
}

/// Returns pairs of reads as first and second file, and interleaved, with names of the given ends.
fn pairs(ends: [&str; 2]) -> [String; 3] {
    let mut bases = Bases(31);
    let mut texts = [String::new(), String::new(), String::new()];
    for i in 0..30 {
        for (mate, end) in ends.into_iter().enumerate() {
            let length = [150, 240][(i + mate) % 2];
            let record = format!("@pair{i}{end}\n{}\n+\n{}\n", bases.sequence(length, 0.5), "I".repeat(length));
            texts[mate] += &record;
            texts[2] += &record;
        }
    }
    texts
}

#[test]
fn mates_get_one_call() {
    let folder = Folder::new("caller-pairs");
    let [first, second, both] = pairs(["/1", "/2"]);
    let files = [folder.write("1.fq", first), folder.write("2.fq", second)];
    let both = folder.write("both.fq", both);
    let paired = |inputs: &[PathBuf], out: &str| {
        let options = with(calling(&both, &folder.path(out)), |caller| caller.paired = true);
        ran(&PredictOptions { inputs: inputs.to_vec(), hits_format: HitsFormat::Fastq, ..options })
    };
    paired(&files, "two");
    paired(std::slice::from_ref(&both), "interleaved");
    let wanted = results(&folder.path("two"));
    for (name, bytes) in results(&folder.path("interleaved")) {
        // The reports for MultiQC have the name of the first file.
        assert!(name.ends_with("_mqc.tsv") || wanted[&name] == bytes, "{name} differs");
    }
    let plain = [pairs(["", ""])[0].clone(), pairs(["", ""])[1].clone()];
    let plain = [folder.write("p1.fq", &plain[0]), folder.write("p2.fq", &plain[1])];
    paired(&plain, "plain");
    assert!(results(&folder.path("plain"))["predictions.tsv"] == wanted["predictions.tsv"]);

    let predictions = rows(&folder.path("two/predictions.tsv"));
    let windows = rows(&folder.path("two/windows.tsv"));
    assert_eq!((predictions.len(), windows.len()), (30, 60));
    let calibration = Calibration::open(&fixture("goldens/caller")).unwrap_or_else(|e| panic!("{e}"));
    for (i, (row, mates)) in predictions.iter().zip(windows.chunks(2)).enumerate() {
        assert_eq!(row["seq_name"], format!("pair{i}"));
        assert_eq!((number(row, "length"), number(row, "n_windows")), (390.0, 2.0));
        assert_eq!(mates[0]["seq_name"], format!("pair{i}/1"));
        assert_eq!(mates[1]["seq_name"], format!("pair{i}/2"));
        let weighted: f64 = mates.iter().map(|w| number(w, "margin") * number(w, "end")).sum();
        // Calibrated as a record of the length of the longer mate.
        let score = sigmoid(calibration.at(240).log_odds(weighted / 390.0));
        assert!((number(row, "virus_score") - score).abs() < 1e-3, "{row:?}: {score}");
    }
    let virus = predictions.iter().filter(|row| row["prediction"] == "virus").count();
    assert!(virus > 0);
    assert_eq!(read(folder.path("two/virus.fastq")).matches("\n+\n").count(), 2 * virus);
}

/// Several pairs of files are read in turn, with the names of SRA, and the files of a pair must end together.
#[test]
fn several_pairs_of_files_are_read_in_turn() {
    let folder = Folder::new("caller-several-pairs");
    let bases = Bases(43).sequence(150, 0.5);
    let file = |name: &str, ids: &[&str]| {
        folder.write(name, ids.iter().map(|id| format!(">{id}\n{bases}\n")).collect::<String>())
    };
    let files = [
        file("a_1.fa", &["R1.1.1", "R1.2.1"]),
        file("a_2.fa", &["R1.1.2", "R1.2.2"]),
        file("b_1.fa", &["x/1"]),
        file("b_2.fa", &["x/2"]),
    ];
    let options = |inputs: Vec<PathBuf>, out: &str| {
        let options = with(calling(&inputs[0], &folder.path(out)), |caller| caller.paired = true);
        PredictOptions { inputs, ..options }
    };
    ran(&options(files.to_vec(), "out"));
    let table = rows(&folder.path("out/predictions.tsv"));
    let names: Vec<&str> = table.iter().map(|row| &*row["seq_name"]).collect();
    assert_eq!(names, ["R1.1", "R1.2", "x"]);
    let [one, two] = [file("c_1.fa", &["y", "z"]), file("c_2.fa", &["y"])];
    for (inputs, says) in [
        (
            vec![one.clone(), two.clone(), files[2].clone(), files[3].clone()],
            "c_1.fa, line 3: this record has no mate",
        ),
        (vec![two, one, files[2].clone(), files[3].clone()], "c_1.fa, line 3: this record has no mate"),
    ] {
        let error = run(&options(inputs, "refused")).expect_err("refused").to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// Pairs with one name are all computed, and so is a pair with an empty mate.
#[test]
fn repeated_pairs_get_names_of_their_own() {
    let folder = Folder::new("caller-pair-names");
    let bases = Bases(51).sequence(200, 0.5);
    let input = folder
        .write("in.fa", format!(">x/1\n{bases}\n>x/2\n{bases}\n").repeat(2) + &format!(">y\n{bases}\n>y\n"));
    let out = folder.path("out");
    ran(&with(calling(&input, &out), |caller| caller.paired = true));
    let table = rows(&out.join("predictions.tsv"));
    let found: Vec<(&str, f64)> = table.iter().map(|row| (&*row["seq_name"], number(row, "length"))).collect();
    assert_eq!(found, [("x", 400.0), ("x#1.3", 400.0), ("y", 200.0)]);
    assert_eq!(table[0]["virus_score"], table[1]["virus_score"]);
    let notes = read(out.join("notes.tsv"));
    assert!(notes.contains("x\tduplicate_id\t") && notes.contains("y/2\tempty\t"), "{notes}");
}

#[test]
fn records_that_are_no_mates_are_refused() {
    let folder = Folder::new("caller-no-mates");
    let refused = |inputs: Vec<PathBuf>, says: &str| {
        let options = with(calling(&inputs[0], &folder.path("out")), |caller| caller.paired = true);
        let error = run(&PredictOptions { inputs, ..options }).expect_err("refused").to_string();
        assert!(error.contains(says), "{error}");
        assert!(!folder.path("out").exists());
    };
    let bases = Bases(41).sequence(150, 0.5);
    let file = |name: &str, ids: &[&str]| {
        folder.write(name, ids.iter().map(|id| format!(">{id}\n{bases}\n")).collect::<String>())
    };
    refused(vec![file("a.fa", &["x/1", "y/2"])], "a.fa, line 3: 'y/2' follows 'x/1'");
    refused(vec![file("b.fa", &["x/1", "x/2", "y/1"])], "b.fa, line 5: this record has no mate");
    let (one, two) = (file("c.fa", &["x", "y"]), file("d.fa", &["x"]));
    refused(vec![one.clone(), two.clone()], "c.fa, line 3: this record has no mate");
    refused(vec![two, one.clone()], "c.fa, line 3: this record has no mate");
    refused(vec![one.clone(), one.clone(), one], "3 files were given");
}

/// A caller with NaN weights: every window fails, is listed, and leads to no call.
#[test]
fn windows_that_fail_are_listed() {
    let folder = Folder::new("caller-failed");
    let input = folder.write("in.fa", fasta(&records()[..3]));
    let model = folder.path("model");
    copy(&model, |name, data| {
        if name == "tasks.virus.bias" {
            data[0] = f32::NAN;
        }
    });
    let out = folder.path("out");
    let report = ran(&with(calling(&input, &out), |caller| caller.folder = Some(model)));
    assert_eq!(report.failed, 3);
    assert!(read(out.join("notes.tsv")).contains("r0\tfailed\twindow 1: a value is not a number\tnot scored"));
    for row in rows(&out.join("predictions.tsv")) {
        assert_eq!((&*row["virus_score"], &*row["prediction"], &*row["reason"]), ("NA", "no_call", "failed"));
    }
}

/// Copies the golden caller to `to`, after `change` was called with every tensor.
fn copy(to: &Path, change: impl Fn(&str, &mut [f32])) {
    fs::create_dir_all(to).expect("a folder");
    for name in ["config.json", "calibration.json"] {
        fs::copy(fixture("goldens/caller").join(name), to.join(name)).expect("copied");
    }
    let weights = Weights::open(&fixture("goldens/caller/model.safetensors")).expect("weights");
    let tensors: Vec<(String, Vec<u64>, Vec<f32>)> = weights
        .tensors()
        .map(|t| {
            let mut data = vec![0.0; t.elements() as usize];
            weights.read_f32(t.name(), 0..t.elements(), &mut data).expect("read");
            change(t.name(), &mut data);
            (t.name().to_owned(), t.shape().to_vec(), data)
        })
        .collect();
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    write_safetensors(&to.join("model.safetensors"), &data, &BTreeMap::new(), StoredAs::F32).expect("written");
}

/// A changed file of the caller makes another run, and a caller that does not fit is refused.
#[test]
fn a_caller_is_its_files() {
    let folder = Folder::new("caller-files");
    let input = folder.write("in.fa", fasta(&records()[..2]));
    let (model, out) = (folder.path("model"), folder.path("out"));
    copy(&model, |_, _| {});
    let options = with(calling(&input, &out), |caller| caller.folder = Some(model.clone()));
    ran(&options);
    assert!(ran(&options).already_complete);
    let edit = |file: &str, from: &str, to: &str| {
        let path = model.join(file);
        let text = read(&path);
        assert!(text.contains(from), "{file}");
        fs::write(&path, text.replacen(from, to, 1)).expect("written");
        let error = run(&options).map(|_| ()).expect_err("refused").to_string();
        fs::write(&path, text).expect("written");
        error
    };
    let other = edit("calibration.json", "\"ece\": 0.05", "\"ece\": 0.04");
    assert!(other.contains("another run") && other.contains("caller"), "{other}");
    for (file, from, to, says) in [
        ("calibration.json", "\"version\": 2", "\"version\": 1", "`version` must be 2"),
        ("calibration.json", "\"slope\"", "\"slop\"", "`lengths[0].slop` is not a key"),
        ("config.json", "\"virus\",\n      \"classes\"", "\"virus2\",\n      \"classes\"", "virus2"),
        ("config.json", "\"other\"", "\"host\"", "`other` and `virus`"),
    ] {
        let error = edit(file, from, to);
        assert!(error.contains(says), "{file}: {error}");
    }
    fs::remove_file(model.join("calibration.json")).expect("removed");
    let error = run(&options).map(|_| ()).expect_err("refused").to_string();
    assert!(error.contains("calibration.json"), "{error}");
}

#[test]
fn windows_shorter_than_the_shortest_are_refused() {
    let folder = Folder::new("caller-refused");
    let input = folder.write("in.fa", ">a\nACGT\n");
    let short = PredictOptions { length: 99, ..calling(&input, &folder.path("out")) };
    let error = run(&short).expect_err("refused");
    assert!(error.to_string().contains("length=99"), "{error}");
    assert!(matches!(error, VirusError::ShortWindows { .. }));
}
