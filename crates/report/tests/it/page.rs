//! Pages in Chromium: what they show after clicks equals what is computed from the tables here.

use crate::browser::Browser;
use plimsoll_report::{ReportOptions, report};
use plimsoll_testing::Folder;
use serde_json::{Value, json};

/// A record as in predictions.tsv.
#[derive(Clone, Debug)]
struct Record {
    name: String,
    length: u64,
    score: Option<u64>,
    call: &'static str,
    class: Option<&'static str>,
}

/// Records with different lengths and scores; every ninth has no score, and one has a hostile name.
fn records() -> Vec<Record> {
    let record = |n: u64| {
        let score = (n % 9 != 4).then_some(n * 7_919 % 10_000);
        Record {
            name: match n {
                17 => "</script><img/src=x/onerror=document.title='broken'>\u{202e}".to_owned(),
                _ => format!("contig_{}", n * 31 % 211),
            },
            length: 100 + n * n * 37 % 20_011,
            score,
            call: score.map_or("no_call", |score| if score >= 5_000 { "virus" } else { "other" }),
            class: score.map(|score| ["phage", "bacteria", "animal"][(score % 3) as usize]),
        }
    };
    (0..130).map(record).collect()
}

/// Text of a record's score on the page.
fn shown(record: &Record) -> String {
    record.score.map_or("NA".to_owned(), |score| format!("{}.{:04}", score / 10_000, score % 10_000))
}

/// Writes the tables of the records and the page; returns their folder.
fn folder_with_page(records: &[Record]) -> Folder {
    let folder = Folder::new("page");
    let mut predictions =
        "seq_name\tlength\tn_windows\tvirus_score\tlow\thigh\tfdr\tprediction\treason\tclass\n".to_owned();
    let mut windows = "seq_name\tstart\tend\tmargin\tvirus_score\tclass\n".to_owned();
    for record in records {
        let name = &record.name;
        let length = record.length;
        let score = shown(record);
        let reason = if record.score.is_none() { "short" } else { "NA" };
        let class = record.class.unwrap_or("NA");
        predictions += &format!(
            "{name}\t{length}\t2\t{score}\t{score}\t{score}\t{score}\t{}\t{reason}\t{class}\n",
            record.call
        );
        windows += &format!("{name}\t1\t50\tNA\t{score}\tNA\n{name}\t51\t{length}\tNA\t{score}\tNA\n");
    }
    let run = json!({
        "plimsoll": "0.1.0", "inputs": ["reads.fa"], "models": {"caller": "small", "trained": true},
        "counts": {"records": records.len(), "windows": 2 * records.len()}, "calling": {"threshold": "0.5"},
    });
    folder.write("predictions.tsv", predictions);
    folder.write("windows.tsv", windows);
    folder.write("run.json", run.to_string());
    let results = vec![folder.0.clone()];
    let output = folder.path("page.html");
    report(&ReportOptions { results, output, title: None, force: false }).expect("a page");
    folder
}

/// Names, lengths and scores of the rows that the page shows.
const ROWS: &str = "[...document.querySelectorAll('.data tbody tr')].map((row) => \
    [...row.children].filter((cell) => ['Record', 'Length', 'Virus score', 'Call', 'Class'].includes(cell.dataset.label))\
    .map((cell) => cell.textContent))";

/// Asserts that the page shows the first `most` of the records.
fn expect(browser: &mut Browser, wanted: &[Record], most: usize) {
    let grouped = |number: u64| match number {
        0..10_000 => number.to_string(),
        _ => format!("{}\u{202f}{:03}", number / 1000, number % 1000),
    };
    let row = |r: &Record| {
        let name = r.name.replace('\u{202e}', "\\u{202e}");
        json!([name, grouped(r.length), shown(r), r.call, r.class.unwrap_or("NA")])
    };
    let wanted_rows: Vec<Value> = wanted.iter().take(most).map(row).collect();
    assert_eq!(browser.value(ROWS), Value::from(wanted_rows));
}

fn status(browser: &mut Browser) -> String {
    browser.value("document.querySelector('.status').textContent").as_str().expect("text").to_owned()
}

/// Records by descending score, those without a score at the end.
fn by_score(records: &[Record]) -> Vec<Record> {
    let mut sorted = records.to_vec();
    sorted.sort_by_key(|record| std::cmp::Reverse(record.score.map_or(-1, |score| score as i64)));
    sorted
}

#[test]
fn in_chromium_a_page_shows_the_tables_after_clicks() {
    let records = records();
    let folder = folder_with_page(&records);
    let Some(mut browser) = Browser::start("clicks", 1280) else { return };
    browser.open(&folder.path("page.html"));
    let sorted = by_score(&records);
    expect(&mut browser, &sorted, 25);
    assert_eq!(status(&mut browser), "Rows 1 to 25 of 130");
    assert_eq!(browser.value("document.title"), "Viral calls in reads.fa");
    assert_eq!(browser.value("document.querySelectorAll('img, iframe, object').length"), 0);
    let count = |call: &str| records.iter().filter(|record| record.call == call).count();
    let cards =
        browser.value("[...document.querySelectorAll('.cards dd')].map((card) => card.firstChild.textContent)");
    let wanted = [records.len(), count("virus"), count("no_call"), count("other")].map(|n| n.to_string());
    assert_eq!(cards.as_array().expect("cards")[..4], wanted);

    // Pages.
    browser.click("[data-action=next]");
    expect(&mut browser, &sorted[25..], 25);
    for _ in 0..4 {
        browser.click("[data-action=next]");
    }
    expect(&mut browser, &sorted[125..], 25);
    assert_eq!(browser.value("document.querySelector('[data-action=next]').disabled"), true);
    browser.click("[data-action=previous]");
    expect(&mut browser, &sorted[100..], 25);
    browser.choose("#record-table-size", "100");
    expect(&mut browser, &sorted, 100);

    // Sorting: the same heading again reverses the order, and missing values stay at the end.
    browser.click("th[data-key=virus_score] button");
    let scored = sorted.iter().filter(|record| record.score.is_some()).count();
    let mut ascending = sorted.clone();
    ascending[..scored].reverse();
    expect(&mut browser, &ascending, 100);
    let order = "document.querySelector('th[data-key=virus_score]').getAttribute('aria-sort')";
    assert_eq!(browser.value(order), "ascending");
    browser.click("th[data-key=length] button");
    assert_eq!(browser.value(order), "none");
    let mut by_length = records.clone();
    by_length.sort_by_key(|record| std::cmp::Reverse(record.length));
    expect(&mut browser, &by_length, 100);
    // The heading is a button: the keyboard sorts too.
    browser.press("Enter", "\r");
    by_length.sort_by_key(|record| record.length);
    expect(&mut browser, &by_length, 100);

    // Search, filters, and both together.
    browser.type_into("[data-filter=seq_name]", "TIG_12");
    let mut found: Vec<Record> =
        by_length.iter().filter(|record| record.name.contains("tig_12")).cloned().collect();
    expect(&mut browser, &found, 100);
    assert_eq!(
        status(&mut browser),
        format!("Rows 1 to {} of {} that match, of 130", found.len(), found.len())
    );
    browser.choose("[data-filter=prediction]", "virus");
    found.retain(|record| record.call == "virus");
    assert!(found.len() > 1);
    expect(&mut browser, &found, 100);
    browser.click("[data-action=reset]");
    expect(&mut browser, &by_length, 100);
    browser.type_into("[data-filter=length-least]", "900");
    browser.type_into("[data-filter=length-most]", "9000");
    browser.type_into("[data-filter=virus_score-least]", "0,25");
    browser.choose("[data-filter=class]", "phage");
    let inside = |record: &&Record| {
        (900..=9000).contains(&record.length)
            && record.score.is_some_and(|score| score >= 2_500)
            && record.class == Some("phage")
    };
    let found: Vec<Record> = by_length.iter().filter(inside).cloned().collect();
    assert!(found.len() > 5);
    expect(&mut browser, &found, 100);
    browser.type_into("[data-filter=virus_score-most]", "x");
    assert_eq!(browser.value("document.querySelector('[data-filter=virus_score-most]').ariaInvalid"), "true");
    expect(&mut browser, &found, 100);
    browser.type_into("[data-filter=seq_name]", "no such record");
    assert_eq!(status(&mut browser), "No row matches; the table has 130.");

    // Columns.
    browser.click(".columns summary");
    browser.click("[data-column=fdr]");
    assert!(browser.value("document.querySelector('th[data-key=fdr]')").is_null());
    browser.click("[data-column=row]");
    assert_eq!(browser.value("document.querySelector('th[data-key=row]').textContent"), "Row");
}

/// A page fits the width of a phone, every column is explained, and printing shows the explanations.
#[test]
fn in_chromium_a_page_fits_a_phone_and_prints_its_explanations() {
    let records = records();
    let folder = folder_with_page(&records);
    let Some(mut browser) = Browser::start("phone", 390) else { return };
    browser.open(&folder.path("page.html"));
    let root = "document.documentElement";
    assert_eq!(browser.value(&format!("{root}.scrollWidth - {root}.clientWidth")), 0);
    let label = "getComputedStyle(document.querySelector('.data td'), '::before').content";
    assert_ne!(browser.value(label), "none");
    browser.choose("#record-table-order", "Length ↑");
    let mut by_length = records.clone();
    by_length.sort_by_key(|record| record.length);
    expect(&mut browser, &by_length, 25);
    let explained = "[...document.querySelectorAll('[data-column]')].every((box) => \
        [...document.querySelectorAll('.legend-list code')].some((code) => code.textContent === box.dataset.column))";
    assert_eq!(browser.value(explained), true);
    browser.call("Emulation.setEmulatedMedia", json!({"media": "print"}));
    let visible = |selector: &str| format!("document.querySelector('{selector}').getClientRects().length > 0");
    for selector in [".cards", ".legend-list", ".track", ".data tbody tr", ".facts"] {
        assert_eq!(browser.value(&visible(selector)), true, "{selector}");
    }
    for selector in [".controls", ".pager", "nav"] {
        assert_eq!(browser.value(&visible(selector)), false, "{selector}");
    }
}
