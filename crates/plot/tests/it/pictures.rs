//! Pictures of result folders: their content, their size, and folders that are refused.

use crate::rig::{golden, read, run};
use plimsoll_plot::{PictureFormat, PictureOutput, PlotOptions, plot};
use plimsoll_testing::{Folder, fixture};
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

const RECORDS_HEADER: &str = "seq_name\tlength\tn_windows\tn_scored\tn_virus\tvirus_score\tprediction\n";
const WINDOWS_HEADER: &str =
    "seq_name\twindow\tstart\tend\tn_orfs\tbest_frame\tscore_other\tscore_virus\tprediction\n";
const FRAMES_HEADER: &str = "Sequence_ID\tPrediction\tscore1\tscore2\n";

/// A folder with results of `predict`.
struct PredictedFolder(Folder);

impl PredictedFolder {
    /// Writes the tables of `records`. `records` are ids with the scores of consecutive windows of 500 bases, which do not overlap.
    fn new(test: &str, records: &[(&str, &[Option<f32>])]) -> Self {
        let folder = PredictedFolder(Folder::new(&format!("plot-{test}")));
        let mut tables = PredictionTables {
            predictions: RECORDS_HEADER.to_owned(),
            windows: WINDOWS_HEADER.to_owned(),
            frames: FRAMES_HEADER.to_owned(),
        };
        for (id, scores) in records {
            tables.add(id, scores);
        }
        folder.write("predictions.tsv", &tables.predictions);
        folder.write("windows.tsv", &tables.windows);
        folder.write("prediction_results.txt", &tables.frames);
        let count = records.iter().map(|(_, scores)| scores.len()).sum();
        folder.write("run.json", &run_record(true, records.len(), count));
        folder
    }

    fn write(&self, name: &str, text: &str) {
        self.0.write(name, text);
    }

    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = read(self.0.path(name));
        assert!(text.contains(from), "{name} has no {from}");
        self.write(name, &text.replacen(from, to, 1));
    }

    fn options(&self, records: &[&str]) -> PlotOptions {
        PlotOptions {
            results: vec![self.0.path("")],
            records: records.iter().map(|id| (*id).to_owned()).collect(),
            series: vec![],
            log: false,
            output: PictureOutput::Folder(self.0.path("plots"), vec![PictureFormat::Svg]),
            width: 180.0,
            dpi: 100,
            force: true,
        }
    }

    /// Draws the pictures and returns them as SVG text.
    fn pictures(&self, records: &[&str]) -> Vec<String> {
        let files = plot(&self.options(records)).expect("drawn");
        files.iter().map(read).collect()
    }

    fn fails(&self, records: &[&str]) -> String {
        let error = plot(&self.options(records)).expect_err("refused");
        let text = error.source().map_or(error.to_string(), |cause| format!("{error}: {cause}"));
        // `path` ends with a slash for the folder itself.
        let folder = self.0.path("").display().to_string();
        text.replace(&format!(" {folder};"), " FOLDER;")
            .replace(&format!("{folder}:"), "FOLDER:")
            .replace(&folder, "")
    }
}

fn run_record(trained: bool, records: usize, windows: usize) -> String {
    let record = serde_json::json!({
        "plimsoll": "0.1.0",
        "inputs": ["folder/reads.fa"],
        "models": {"trained": trained},
        "identity": {"parameters": {"threshold": 0.5, "length": 500}},
        "counts": {"records": records, "windows": windows},
    });
    record.to_string()
}

/// The call that belongs to a score.
fn call(score: f32) -> &'static str {
    if score >= 0.5 { "virus" } else { "other" }
}

/// Texts of the tables of a prediction.
struct PredictionTables {
    predictions: String,
    windows: String,
    frames: String,
}

impl PredictionTables {
    /// Adds a record with the scores of consecutive windows of 500 bases; each scored window has one open reading frame.
    fn add(&mut self, id: &str, scores: &[Option<f32>]) {
        for (index, score) in scores.iter().enumerate() {
            let window = index + 1;
            let start = index * 500 + 1;
            let end = (index + 1) * 500;
            let location = format!("{id}\t{window}\t{start}\t{end}");
            match score {
                None => writeln!(self.windows, "{location}\t0\tNA\tNA\tNA\tno_call"),
                Some(score) => {
                    let other = 1.0 - score;
                    let call = call(*score);
                    writeln!(self.frames, "{id}_chunk_{window}R1\t{call}\t{other}\t{score}").expect("a String");
                    writeln!(self.windows, "{location}\t1\tR1\t{other}\t{score}\t{call}")
                }
            }
            .expect("a String");
        }
        let scored: Vec<f32> = scores.iter().flatten().copied().collect();
        let virus = scored.iter().filter(|score| **score >= 0.5).count();
        let bases = scores.len() * 500;
        let windows = scores.len();
        let count = scored.len();
        let mean = scored.iter().sum::<f32>() / count.max(1) as f32;
        let result = if count == 0 { "NA\tno_call".to_owned() } else { format!("{mean:.6}\t{}", call(mean)) };
        writeln!(self.predictions, "{id}\t{bases}\t{windows}\t{count}\t{virus}\t{result}").expect("a String");
    }
}

const SMALL: &[(&str, &[Option<f32>])] =
    &[("a", &[Some(0.9), None, Some(0.25)]), ("b<&>", &[Some(0.75), Some(0.5)]), ("c", &[None])];

#[test]
fn a_picture_is_as_it_was() {
    let folder = PredictedFolder::new("golden", SMALL);
    let found = folder.pictures(&["a"]).concat();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/plot.svg");
    if std::env::var_os("UPDATE").is_some_and(|v| v == "1") {
        fs::write(&path, &found).expect("written");
    }
    let wanted = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "the picture has changed; look at it, and if it is right, run with UPDATE=1");
}

#[test]
fn the_same_results_give_the_same_bytes() {
    let folder = PredictedFolder::new("twice", SMALL);
    let both = PictureOutput::Folder(folder.0.path("plots"), PictureFormat::ALL.to_vec());
    let options = PlotOptions { output: both, ..folder.options(&["a"]) };
    let read = |options| -> Vec<Vec<u8>> {
        plot(options).expect("drawn").iter().map(|file| fs::read(file).expect("read")).collect()
    };
    let first = read(&options);
    assert_eq!(first.len(), 4);
    assert!(first[1].starts_with(b"\x89PNG") && first[1].len() > 1000);
    assert!(first == read(&options), "other bytes the second time");
}

#[test]
fn texts_of_a_picture() {
    let folder = PredictedFolder::new("texts", SMALL);
    let [overview, record] = &folder.pictures(&["b<&>"])[..] else { panic!("two pictures") };
    for wanted in [
        ">reads.fa<",
        ">3 records · 6 windows of 500 bp, 4 scored · threshold 0.5 · plimsoll 0.1.0<",
        ">2 · 66.7 %<",
        ">Records by score<",
        ">b&lt;&amp;&gt;<",
        "1 of 2 scored windows virus · 1 without a call<",
    ] {
        assert!(overview.contains(wanted), "{wanted}");
    }
    assert!(record.contains("record 2 of reads.fa") && record.contains("mean score 0.625"), "{record}");
    assert!(!overview.contains("b<&") && !overview.contains("UNTRAINED"));
}

/// A folder with results of a caller: a record of three windows, one without a score, and a pair.
fn called(test: &str, threshold: &str) -> PredictedFolder {
    let folder = PredictedFolder::new(test, &[]);
    let head = "seq_name\tlength\tn_windows\tvirus_score\tlow\thigh\tfdr\tprediction\treason\tclass\n";
    let rows = "a\t2500\t3\t0.9\t0.8\t0.95\t0.1\tvirus\tNA\tphage\np\t600\t2\t0.4\t0.3\t0.5\t0.2\tno_call\tuncertain\tplant\n";
    folder.write("predictions.tsv", &format!("{head}{rows}"));
    let head = "seq_name\tstart\tend\tmargin\tvirus_score\tclass\n";
    let rows = "a\t1\t1000\t2.5\t0.93\tphage\na\t1001\t2000\tNA\tNA\tNA\na\t1501\t2500\t-1.0\t0.2\tplant\np/1\t1\t300\t0\t0.5\tplant\np/2\t1\t300\t0\t0.3\tplant\n";
    folder.write("windows.tsv", &format!("{head}{rows}"));
    let record = serde_json::json!({
        "plimsoll": "0.1.0",
        "inputs": ["folder/reads.fa"],
        "models": {"caller": "built-in caller", "trained": true},
        "identity": {"parameters": {"calling": {"threshold": threshold}, "length": 1000}},
        "counts": {"records": 2, "windows": 5},
    });
    folder.write("run.json", &record.to_string());
    fs::remove_file(folder.0.path("prediction_results.txt")).expect("removed");
    folder
}

#[test]
fn results_of_a_caller() {
    let [overview, record, pair] = &called("caller", "default").pictures(&["a", "p"])[..] else {
        panic!("three pictures")
    };
    let text = ">2 records · 5 windows of 1000 bp, 4 scored · threshold by length · plimsoll 0.1.0<";
    assert!(overview.contains(text), "{overview}");
    assert!(record.contains("score 0.900 · 2 of 3 windows scored<"), "{record}");
    for picture in [overview, record, pair] {
        assert!(!picture.contains("strand<") && !picture.contains("threshold 0"), "{picture}");
    }
    let stated = &called("caller-score", "0.75").pictures(&[])[0];
    assert!(stated.contains(">threshold 0.75<"), "{stated}");
}

#[test]
fn damaged_tables_of_a_caller() {
    for (name, from, to, wanted) in [
        (
            "windows.tsv",
            "a\t1501\t2500",
            "a\t1501\t2501",
            "windows.tsv, line 4: bases 1501 to 2501 are not in a record of 2500",
        ),
        (
            "windows.tsv",
            "p/2\t1\t300",
            "p/2\t1\t301",
            "windows.tsv, line 6: bases 1 to 301 are not in a record of 600",
        ),
        (
            "windows.tsv",
            "p/2",
            "q/2",
            "windows.tsv, line 6: expected a window of 'p' as in predictions.tsv; the tables are incomplete or belong to different runs",
        ),
        (
            "predictions.tsv",
            "3\t0.9\t",
            "3\tNA\t",
            "predictions.tsv, line 2: the columns contradict each other: virus_score, prediction",
        ),
    ] {
        let folder = called("caller-damage", "default");
        folder.edit(name, from, to);
        assert_eq!(folder.fails(&["a"]), wanted);
    }
}

#[test]
fn untrained_results_say_so() {
    let folder = PredictedFolder::new("untrained", &[]);
    let record = "a\t900\t2\t1\tNA\tNA\tuntrained";
    folder.write("predictions.tsv", &format!("{RECORDS_HEADER}{record}\n"));
    let windows = "a\t1\t1\t500\t1\tNA\tNA\tNA\tuntrained\na\t2\t401\t900\t0\tNA\tNA\tNA\tno_call";
    folder.write("windows.tsv", &format!("{WINDOWS_HEADER}{windows}\n"));
    folder.write("run.json", &run_record(false, 1, 2));
    fs::remove_file(folder.0.path("prediction_results.txt")).expect("removed");
    for picture in folder.pictures(&["a"]) {
        assert!(picture.contains("UNTRAINED WEIGHTS") && !picture.contains("best frame only"), "{picture}");
    }
}

#[test]
fn a_record_of_100_000_windows_is_a_small_picture() {
    let score =
        |i: u32| (!i.is_multiple_of(3)).then_some((i.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0);
    let scores: Vec<Option<f32>> = (0..100_000).map(score).collect();
    let folder = PredictedFolder::new("long", &[("chr1", &scores)]);
    for picture in folder.pictures(&["chr1"]) {
        assert!((10_000..200_000).contains(&picture.len()), "{}", picture.len());
    }
}

#[test]
fn any_number_of_records_is_a_small_picture() {
    for count in [0, 1, 3, 50, 5000] {
        let ids: Vec<String> = (0..count).map(|i| format!("read_{i}")).collect();
        let records: Vec<(&str, &[Option<f32>])> =
            ids.iter().map(|id| (id.as_str(), &[Some(0.75_f32), None][..])).collect();
        let folder = PredictedFolder::new("many", &records);
        let picture = &folder.pictures(&[])[0];
        assert!(picture.len() < 40_000, "{count}: {}", picture.len());
    }
}

/// Expects the error `wanted` after one edit of a table.
fn check(name: &str, from: &str, to: &str, wanted: &str) {
    let folder = PredictedFolder::new("damage", SMALL);
    folder.edit(name, from, to);
    assert_eq!(folder.fails(&["a"]), wanted);
}

#[test]
fn damaged_and_foreign_tables_are_found_with_their_line() {
    let records = "predictions.tsv";
    let windows = "windows.tsv";
    let frames = "prediction_results.txt";
    check(
        records,
        "c\t500\t1",
        "c\t500",
        "predictions.tsv, line 4: 6 columns, the header has 7; the table is incomplete",
    );
    check(
        records,
        "no_call\n",
        "no_c",
        "predictions.tsv, line 4: the line has no end; the table is incomplete",
    );
    check(
        records,
        "a\t1500\t3",
        "a\t1500\tthree",
        "predictions.tsv, line 2: n_windows is `three`, expected a whole number",
    );
    check(
        records,
        "virus\nb",
        "maybe\nb",
        "predictions.tsv, line 2: prediction is `maybe`, expected virus, other, no_call, skipped or untrained",
    );
    check(
        records,
        "virus\nb",
        "no_call\nb",
        "predictions.tsv, line 2: the columns contradict each other: n_windows, n_scored, virus_score, prediction",
    );
    check(
        records,
        "c\t500\t1\t0\t0\tNA\tno_call\n",
        "",
        "predictions.tsv, line 3: 2 rows, run.json says 3; the table is incomplete or belongs to another run",
    );
    check(
        windows,
        "n_orfs",
        "orfs",
        "windows.tsv, line 1: there is no column `n_orfs`: this is not a table of predict",
    );
    check(
        windows,
        "a\t2\t",
        "a\t3\t",
        "windows.tsv, line 3: expected window 2 of 'a' as in predictions.tsv; the tables are incomplete or \
            belong to different runs",
    );
    check(
        windows,
        "501\t1000",
        "501\t9000",
        "windows.tsv, line 3: bases 501 to 9000 are not in a record of 1500",
    );
    check(windows, "\tR1", "\tX1", "windows.tsv, line 2: best_frame is `X1`, expected F1 to R3");
    check(windows, "0.9", "1.9", "windows.tsv, line 2: score_virus is `1.9`, expected a number from 0 to 1");
    check(
        windows,
        "c\t1\t1\t500\t0\tNA\tNA\tNA\tno_call\n",
        "",
        "windows.tsv, line 6: the table ends here, but the other results continue; it is incomplete or belongs \
            to another run",
    );
    check(
        frames,
        "a_chunk_3R1",
        "z_chunk_3R1",
        "prediction_results.txt, line 3: expected an open reading frame of 'a_chunk_3', found 'z_chunk_3R1'",
    );
    let more = "the table has more rows than the other results; they belong to different runs";
    check(
        frames,
        "2R1\tvirus\t0.5\t0.5\n",
        "2R1\tvirus\t0.5\t0.5\nb\tx\t0.5\t0.5\n",
        &format!("prediction_results.txt, line 6: {more}"),
    );
}

#[test]
fn what_is_no_result_is_refused() {
    let folder = PredictedFolder::new("refused", SMALL);
    let hint = "the nearest ids in predictions.tsv: `a`, `c`, `b<&>`";
    assert_eq!(folder.fails(&["a", "aa"]), format!("records=aa: no such record in FOLDER; {hint}"));
    folder.write("run.json", "{\"counts\": 1}");
    let again = "run predict again";
    assert_eq!(
        folder.fails(&[]),
        format!("run.json is not the run record of a prediction (no `plimsoll` in it); {again}")
    );
    folder.write("run.json", "{\"counts\"");
    assert_eq!(
        folder.fails(&[]),
        format!("run.json is not the run record of a prediction (no JSON in it); {again}")
    );
    fs::remove_file(folder.0.path("run.json")).expect("removed");
    assert!(folder.fails(&[]).starts_with("FOLDER: there is no run.json in it"), "{}", folder.fails(&[]));
}

#[test]
fn nothing_is_replaced_unasked_and_nothing_half_written() {
    let folder = PredictedFolder::new("there", SMALL);
    let options = PlotOptions { force: false, ..folder.options(&["a", "c"]) };
    folder.write("x.svg", "mine");
    let file = PlotOptions {
        output: PictureOutput::File(folder.0.path("x.svg"), PictureFormat::Svg),
        ..folder.options(&["a"])
    };
    let text = plot(&PlotOptions { force: false, ..file.clone() }).expect_err("refused").to_string();
    assert!(text.contains("x.svg: the file already exists; use force"), "{text}");
    assert_eq!(read(folder.0.path("x.svg")), "mine");
    plot(&file).expect("replaced");
    assert!(read(folder.0.path("x.svg")).contains("record 1 of"));
    // If one of three pictures exists, none is written.
    fs::create_dir_all(folder.0.path("plots")).expect("made");
    folder.write("plots/record_c.svg", "mine");
    plot(&options).expect_err("refused");
    assert_eq!(fs::read_dir(folder.0.path("plots")).expect("read").count(), 1);
    plot(&PlotOptions { force: true, ..options }).expect("replaced");
    assert_eq!(fs::read_dir(folder.0.path("plots")).expect("read").count(), 3);
}

/// `plot` reads the tables that `predict` writes.
#[test]
fn results_of_predict_are_read() {
    let folder = Folder::new("plot-predicted");
    let out = folder.path("out");
    run(&golden(&fixture("goldens/pipeline/reads.fa"), &out)).expect("predicted");
    let output = PictureOutput::Folder(folder.path("plots"), vec![PictureFormat::Svg]);
    let records = vec!["read_2".to_owned()];
    let results = vec![out];
    let series = vec![];
    let options =
        PlotOptions { results, records, series, log: false, output, width: 89.0, dpi: 72, force: false };
    let files = plot(&options).expect("drawn");
    let names: Vec<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    assert_eq!(names, ["overview.svg", "record_read_2.svg"]);
    let picture = read(&files[1]);
    assert!(picture.contains(">read_2<") && picture.contains("record 3 of reads.fa"), "{picture}");
}
