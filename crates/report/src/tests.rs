//! Tests of pages and of damaged results. Every test writes its own folder of results.

use crate::results::PredictionResults;
use crate::survey::{MOST_LISTED, MOST_ROWS, PageStatistics};
use crate::{ReportError, ReportOptions, calls, report};
use plimsoll_testing::Folder;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

const HEADER: &str = "seq_name\tlength\tn_windows\tvirus_score\tlow\thigh\tfdr\tprediction\treason\tclass\tp_phage\tp_bacteria\n";
const WINDOWS: &str = "seq_name\tstart\tend\tmargin\tvirus_score\tclass\n";
const REGIONS: &str = "seq_name\tstart\tend\tlength\tscore\tn_windows\n";

/// A folder of results.
struct ResultFolder {
    folder: Folder,
}

impl ResultFolder {
    fn new() -> Self {
        Self { folder: Folder::new("report") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    fn write(&self, name: &str, text: &str) {
        self.folder.write(name, text);
    }

    /// Writes the tables of a caller.
    fn caller(&self, predictions: &str, windows: &str, regions: &str) {
        self.write("predictions.tsv", &format!("{HEADER}{predictions}"));
        self.write("windows.tsv", &format!("{WINDOWS}{windows}"));
        self.write("regions.tsv", &format!("{REGIONS}{regions}"));
        let counts = json!({"records": predictions.lines().count(), "windows": windows.lines().count()});
        let lengths = json!([
            {"length": 300, "auroc": 0.84, "ece": 0.021, "presets": {"default": {"tpr": 0.7, "fpr": 0.15}}},
            {"length": 3000, "auroc": 0.95, "ece": 0.01, "presets": {"default": {"tpr": 0.9, "fpr": 0.005}}},
        ]);
        let calls = json!({
            "expected_tpr": [0.81, 0.83], "expected_fpr": [0.08, 0.08], "expected_false_calls": 0.072,
            "regions": regions.lines().count(),
        });
        let run = json!({
            "plimsoll": "0.1.0", "inputs": ["pond/<b>.fa"], "counts": counts,
            "models": {"caller": "callers/small", "trained": true}, "calls": calls,
            "calling": {"threshold": "default", "prevalence": 0.2, "calibration": {"lengths": lengths}},
        });
        self.write("run.json", &run.to_string());
    }

    fn page(&self) -> Result<String, ReportError> {
        let results = PredictionResults::open(&self.folder.0)?;
        Ok(calls::page(results, None)?.html())
    }

    /// Asserts that there is no page, and that the message has the text.
    fn refuses(&self, text: &str) {
        let message = self.page().expect_err("damaged").to_string();
        assert!(message.contains(text), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

/// The data of the table of a page.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"record-table-data\">").expect("data");
    serde_json::from_str(rest.split_once("</script>").expect("an end").0).expect("JSON")
}

fn column(data: &Value, key: &str) -> Vec<Value> {
    let columns = data["columns"].as_array().expect("columns");
    let found = columns.iter().find(|column| column["key"] == key).unwrap_or_else(|| panic!("{key}"));
    found["values"].as_array().expect("values").clone()
}

const PREDICTIONS: &str = "a\t2000\t2\t0.912345\t0.8000\t0.9500\t0.0500\tvirus\tNA\tphage\t0.9000\t0.1000\n\
    </script><img src=x>\t90\t1\tNA\tNA\tNA\tNA\tno_call\tshort\tNA\tNA\tNA\n\
    c\t2500\t3\t0.200000\t0.1000\t0.3000\t0.4000\tother\tNA\tbacteria\t0.2000\t0.8000\n";
const OF_WINDOWS: &str = "a\t1\t1000\t1.0\t0.9\tphage\na\t1001\t2000\t1.0\t0.95\tphage\n\
    </script><img src=x>\t1\t90\tNA\tNA\tNA\nc\t1\t1000\t1.0\t0.1\tphage\nc\t1001\t2000\t1.0\t0.8\tphage\n\
    c\t2001\t2500\t1.0\t0.2\tphage\n";
const OF_REGIONS: &str = "c\t1001\t2000\t1000\t12.5\t1\n";

#[test]
fn a_page_of_a_caller_has_the_values_of_the_tables() {
    let folder = ResultFolder::new();
    folder.caller(PREDICTIONS, OF_WINDOWS, OF_REGIONS);
    let page = folder.page().expect("a page");
    let data = data(&page);
    assert_eq!(column(&data, "seq_name"), ["a", "</script><img src=x>", "c"]);
    assert_eq!(column(&data, "virus_score"), [json!(912_345), Value::Null, json!(200_000)]);
    assert_eq!(column(&data, "fdr"), [json!(500), Value::Null, json!(4000)]);
    assert_eq!(column(&data, "n_regions"), [0, 0, 1]);
    assert_eq!(column(&data, "p_bacteria"), [json!(1000), Value::Null, json!(8000)]);
    assert_eq!(column(&data, "row"), [1, 2, 3]);
    // Names are text everywhere.
    assert!(!page.contains("<img") && !page.contains("<b>.fa") && page.contains("&lt;b&gt;.fa"));
    assert_eq!(page.matches("</script>").count(), 2);
    for text in [
        "The table has all records.",
        "1001 to 2000 (1 kb, score 12.5)",
        "81 % to 83 % of viral records and 8 % of other records",
        "7.2 % are expected to be wrong if 20 % of the records are viral",
        // Nearest to 300 bases: one record; to 3000: two (the boundary is the geometric mean, 949).
        "<tr><th scope=\"row\">300 b</th><td>1</td><td>0.840</td><td>0.021</td><td>70 %</td><td>15 %</td></tr>",
        "<tr><th scope=\"row\">3 kb</th><td>2</td><td>0.950</td><td>0.010</td><td>90 %</td><td>0.5 %</td></tr>",
        "<dt>Virus</dt><dd>1<small>33.3 %, 2 kb</small></dd>",
    ] {
        assert!(page.contains(text), "{text}");
    }
    // Both records with two windows or more have tracks, the one with a region first.
    let tracks: Vec<&str> = page.match_indices("<h3>").map(|(at, _)| &page[at + 4..at + 5]).collect();
    assert!(tracks.ends_with(&["c", "a"]), "{tracks:?}");
}

/// The table of viruses and proviruses, and what decided about calls, stand on the page; names are text.
#[test]
fn viruses_proviruses_and_thresholds_are_listed() {
    let folder = ResultFolder::new();
    folder.caller(PREDICTIONS, OF_WINDOWS, OF_REGIONS);
    let page = folder.page().expect("a page");
    assert!(!page.contains("Viruses and proviruses") && !page.contains("Preset"));
    let header = "seq_name\tsource_seq\tkind\tstart\tend\tlength\treaches\tvirus_score\tfdr\tn_windows\n";
    let rows = "a\ta\tvirus\t1\t2000\t2000\tNA\t0.912345\t0.05\t2\n\
        <i>c:1001-2000\tc\tprovirus\t1001\t2000\t1000\tend\t0.8\tNA\t1\n";
    folder.write("viruses.tsv", &format!("{header}{rows}"));
    let run = fs::read_to_string(folder.path("run.json")).expect("there");
    let mut run: Value = serde_json::from_str(&run).expect("JSON");
    run["calls"]["preset"] = json!("relaxed");
    run["calls"]["prevalence"] = json!(0.25);
    run["calls"]["thresholds"] =
        json!([{"length": 300, "threshold": 0.7}, {"length": 2500, "threshold": 0.4567}]);
    folder.write("run.json", &run.to_string());
    let page = folder.page().expect("a page");
    for text in [
        "All 2 viruses and proviruses.",
        "<tr><td>a</td><td>virus</td><td>1</td><td>2000</td><td>2000</td><td>NA</td><td>0.912345</td><td>0.05</td></tr>",
        "<tr><td>&lt;i&gt;c:1001-2000</td><td>provirus</td><td>1001</td><td>2000</td><td>1000</td><td>end</td>",
        "Preset relaxed, threshold by length: 0.7 at 300 b, 0.457 at 2.5 kb · prevalence 0.25",
    ] {
        assert!(page.contains(text), "{text}");
    }
    run["calls"]["preset"] = Value::Null;
    folder.write("run.json", &run.to_string());
    assert!(folder.page().expect("a page").contains("Threshold 0.7 at every length · prevalence 0.25"));
}

/// A pair of mates is one record; its windows and regions have the names of the mates.
#[test]
fn pairs_have_the_windows_of_their_mates() {
    let folder = ResultFolder::new();
    let record = |name: &str| format!("{name}\t300\t2\t0.9\t0.8\t0.95\t0.1\tvirus\tNA\tphage\t0.9\t0.1\n");
    let windows = "a/1\t1\t150\t1.0\t0.9\tphage\na/2\t1\t150\t1.0\t0.9\tphage\n";
    folder.caller(&record("a"), windows, "a/2\t1\t150\t150\t9.5\t1\n");
    folder.refuses("regions.tsv, line 2: a region of 'a/2', which is not in predictions.tsv");
    let run = fs::read_to_string(folder.path("run.json")).expect("there");
    folder.write("run.json", &run.replace("\"prevalence\"", "\"paired\":true,\"prevalence\""));
    let page = folder.page().expect("a page");
    assert_eq!(column(&data(&page), "n_regions"), [1]);
    // Positions are those in a mate, so there is no track.
    assert!(page.contains("No record has the scores of two windows or more of one sequence."));
}

#[test]
fn a_page_of_virnucpro_has_no_error_rates() {
    let folder = ResultFolder::new();
    folder.write(
        "predictions.tsv",
        "seq_name\tlength\tn_windows\tn_scored\tn_virus\tvirus_score\tprediction\tsource\textra\n\
         a\t900\t2\t1\t1\t0.800000\tvirus\tx.fa\t7\nb\t300\t1\t0\t0\tNA\tno_call\ty.fa\t8\n",
    );
    folder.write(
        "windows.tsv",
        "seq_name\twindow\tstart\tend\tn_orfs\tbest_frame\tscore_other\tscore_virus\tprediction\n\
         a\t1\t1\t500\t1\tF2\t0.2\t0.8\tvirus\na\t2\t401\t900\t0\tNA\tNA\tNA\tno_call\nb\t1\t1\t300\t0\tNA\tNA\tNA\tno_call\n",
    );
    let parameters = json!({"threshold": 0.6, "length": 500});
    let run = json!({
        "plimsoll": "0.1.0", "inputs": ["reads.fa"], "models": {"head": "w/head.pth", "trained": true},
        "identity": {"parameters": parameters}, "counts": {"records": 2, "windows": 3},
    });
    folder.write("run.json", &run.to_string());
    folder.write("notes.tsv", "seq_name\tkind\tdetail\taction\nb\tall_n\twindow 1\tno <call>\n");
    let page = folder.page().expect("a page");
    for text in [
        "threshold 0.6",
        "states no measured error rates",
        "does not show: extra",
        "<td>no &lt;call&gt;</td>",
        "1 all_n",
        "model head.pth",
        "<dt>length</dt><dd>500</dd>",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert_eq!(column(&data(&page), "source"), [0, 1]);
}

#[test]
fn damaged_tables_are_named_with_their_lines() {
    let check = |name: &str, from: &str, to: &str, text: &str| {
        let folder = ResultFolder::new();
        folder.caller(PREDICTIONS, OF_WINDOWS, OF_REGIONS);
        let path = folder.path(name);
        let before = fs::read_to_string(&path).expect("there");
        assert!(before.contains(from), "{from}");
        folder.write(name, &before.replacen(from, to, 1));
        folder.refuses(text);
    };
    check(
        "predictions.tsv",
        "0.912345",
        "1.5",
        "predictions.tsv, line 2: virus_score is `1.5`, expected a number from 0 to 1",
    );
    check(
        "predictions.tsv",
        "\t2500\t",
        "\tmany\t",
        "predictions.tsv, line 4: length is `many`, expected a whole number",
    );
    check(
        "predictions.tsv",
        "\tother\t",
        "\tperhaps\t",
        "predictions.tsv, line 4: prediction is `perhaps`, expected virus",
    );
    check("predictions.tsv", "\tother\t", "\tNA\t", "predictions.tsv, line 4: prediction is `NA`");
    check(
        "predictions.tsv",
        "\tphage\t0.9000",
        "\tphage",
        "predictions.tsv, line 2: 11 columns, the header has 12",
    );
    check(
        "predictions.tsv",
        "virus_score",
        "score",
        "predictions.tsv, line 1: there is no column `virus_score`",
    );
    check("predictions.tsv", "0.8000\n", "0.8000", "predictions.tsv, line 4: the line has no end");
    check(
        "predictions.tsv",
        "c\t2500\t3",
        "d\t2500\t3",
        "regions.tsv, line 2: a region of 'c', which is not in",
    );
    check("windows.tsv", "c\t1\t", "a\t1\t", "windows.tsv, line 5: expected a window of 'c'");
    check(
        "windows.tsv",
        "\t2500\t",
        "\t2501\t",
        "windows.tsv, line 7: bases 2001 to 2501 are not in a record of 2500",
    );
    check(
        "windows.tsv",
        "c\t2001\t2500\t1.0\t0.2\tphage\n",
        "",
        "the table ends here, but the other results continue",
    );
    check(
        "windows.tsv",
        "c\t2001",
        "c\t2001\t2002\t1.0\t0.1\tphage\nc\t2001",
        "windows.tsv, line 8: the table has more rows",
    );
    check("regions.tsv", "c\t1001", "c\t0", "regions.tsv, line 2: bases 0 to 2000 are not in a record of 2500");
    check("regions.tsv", "\t12.5\t", "\tNaN\t", "regions.tsv, line 2: score is `NaN`, expected a number");
    check("run.json", "\"records\":3", "\"records\":4", "predictions.tsv, line 4: 3 rows, run.json says 4");
    check("run.json", "\"regions\":1", "\"regions\":2", "regions.tsv, line 2: 1 rows, run.json says 2");
    check("run.json", "{", "[", "run.json is not the run record of a prediction (no JSON in it)");
    check("run.json", "\"plimsoll\"", "\"other\"", "(no `plimsoll` in it)");
}

/// Every prefix of a table is refused, and none makes the reader panic.
#[test]
fn truncated_tables_are_refused() {
    let folder = ResultFolder::new();
    folder.caller(PREDICTIONS, OF_WINDOWS, OF_REGIONS);
    for name in ["predictions.tsv", "windows.tsv"] {
        let whole = fs::read(folder.path(name)).expect("there");
        for length in 0..whole.len() {
            fs::write(folder.path(name), &whole[..length]).expect("written");
            assert!(folder.page().is_err(), "{name} of {length} bytes");
        }
        fs::write(folder.path(name), &whole).expect("written");
    }
    folder.page().expect("whole again");
}

#[test]
fn folders_without_results_and_existing_files_are_refused() {
    let folder = ResultFolder::new();
    folder.refuses("there is no run.json in it");
    folder.caller(PREDICTIONS, OF_WINDOWS, OF_REGIONS);
    let output = folder.path("page.html");
    let title = Some("A <title>".to_owned());
    let mut options = ReportOptions { results: vec![folder.folder.0.clone()], output, title, force: false };
    report(&options).expect("written");
    let page = fs::read_to_string(&options.output).expect("there");
    assert!(page.contains("<h1>A &lt;title&gt;</h1>"));
    let message = report(&options).expect_err("it exists").to_string();
    assert!(message.contains("already exists; use force"), "{message}");
    options.force = true;
    report(&options).expect("replaced");
}

/// Records of a run as lines of predictions.tsv: `virus` of them are called virus, with ascending scores.
fn many(records: usize, virus: usize, name: impl Fn(usize) -> String) -> String {
    let line = |n: usize| {
        let (score, call) =
            if n < virus { (0.5 + 0.4 * n as f64 / virus as f64, "virus") } else { (0.1, "other") };
        format!("{}\t150\t1\t{score:.6}\t0.1\t0.9\t0.1\t{call}\tNA\tphage\t0.5\t0.5\n", name(n))
    };
    (0..records).map(line).collect()
}

fn check_many(records: usize, virus: usize, name: impl Fn(usize) -> String) -> (String, usize) {
    let folder = ResultFolder::new();
    folder.caller(&many(records, virus, name), "", "");
    fs::remove_file(folder.path("windows.tsv")).expect("there");
    let page = folder.page().expect("a page");
    assert!(page.len() <= calls::MOST_BYTES, "{} bytes", page.len());
    let data = data(&page);
    let rows = column(&data, "row").len();
    assert!(rows <= MOST_ROWS);
    let (_, note) = page.split_once("The table has ").expect("a sentence");
    (note.split_once("</p>").expect("an end").0.replace('\u{202f}', " "), rows)
}

#[test]
fn the_table_says_which_records_it_has() {
    let (note, rows) = check_many(300, 20, |n| format!("r{n}"));
    assert_eq!((note.as_str(), rows), ("all records.", 300));
    let (note, rows) = check_many(60_000, 100, |n| format!("r{n}"));
    assert_eq!(rows, MOST_ROWS);
    let wanted = "25 000 of 60 000 records: all 100 called virus or with regions, and an even random sample of 24 900 of the \
                  59 900 others.";
    assert!(note.starts_with(wanted), "{note}");
    let (note, _) = check_many(60_000, 30_000, |n| format!("r{n}"));
    let wanted = "25 000 of 60 000 records: of 30 000 called virus or with regions, the 20 000 with the highest scores, and an \
                  even random sample of 5000 of the 30 000 others.";
    assert!(note.starts_with(wanted), "{note}");
}

/// Long names shorten the table, not the bound on the page.
#[test]
fn a_page_stays_below_its_bound_with_long_names() {
    let (note, rows) = check_many(30_000, 29_000, |n| format!("{n}{}", "<".repeat(400)));
    assert!((1000..MOST_ROWS).contains(&rows), "{rows}");
    assert!(note.contains("of 29 000 called virus or with regions, the "), "{note}");
}

/// The sample is even over the input, and the kept viruses are those with the highest scores.
#[test]
fn the_best_are_listed_and_the_others_sampled_evenly() {
    let folder = ResultFolder::new();
    folder.caller(&many(100_000, 30_000, |n| format!("r{n}")), "", "");
    let mut results = PredictionResults::open(&folder.folder.0).expect("open");
    let mut survey = PageStatistics::new(results.at, vec![]);
    results.records(|row| survey.add(row)).expect("read");
    let selection = survey.select();
    let (listed, sampled) = selection.rows.split_at(selection.listed);
    assert_eq!((listed.len(), sampled.len()), (MOST_LISTED, MOST_ROWS - MOST_LISTED));
    assert!(listed.iter().all(|row| (10_000..30_000).contains(&row.ordinal)));
    // 5000 of 70 000 records: each of 7 parts of the input has 714 expected, with a standard deviation of 24.
    for part in 3..10 {
        let count = sampled.iter().filter(|row| row.ordinal / 10_000 == part).count();
        assert!((600..830).contains(&count), "{part}: {count}");
    }
}
