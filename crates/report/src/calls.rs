//! The page of viral calls: reads a folder of results and composes the sections. Invariant: histograms and counts are of
//! all records; where the page shows some of them, it says how many and which; the page has at most [`MOST_BYTES`].

use crate::chart::{Course, Histogram, Scatter, Step, Tick, bars};
use crate::columns::{CALLS, Form, Kind};
use crate::html::{bases, date, decimal, escape, json_string, percent, whole};
use crate::page::{Page, Section};
use crate::results::{Results, Window};
use crate::survey::{
    DECADE, LENGTH_BINS, MOST_REGIONS, SCORE_BINS, Selection, Survey, Tally, TrackRecord, length_position,
};
use crate::table::{Cells, PageColumn, PageTable};
use plimsoll_data::DataError;
use plimsoll_data::printable::Name;
use plimsoll_setting::Command;
use plimsoll_virus::output::RegionRow;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::Path;

/// Maximum bytes of a page.
pub const MOST_BYTES: usize = 5_000_000;
/// Maximum number of steps of a track; more windows are summarized.
const MOST_STEPS: u64 = 400;
/// Maximum number of notes that the page shows.
const MOST_NOTES: usize = 100;
/// Maximum number of viruses and proviruses that the page lists.
const MOST_VIRUSES: u64 = 1000;
/// Maximum number of regions that are listed below a track.
const LISTED_REGIONS: usize = 8;
/// Maximum number of parameters that the page shows.
const MOST_FACTS: usize = 100;
/// Maximum number of classes that the chart of classes shows.
const MOST_CLASSES: usize = 20;

/// Reads the results and composes the page.
pub fn page(mut results: Results, title: Option<&str>) -> Result<Page, DataError> {
    let mut survey = Survey::new(results.at, measured_lengths(&results.run));
    results.records(|row| survey.add(row))?;
    let tracks = read_tracks(&results, &survey)?;
    let notes = notes(&results)?;
    let viruses = viruses(&results)?;

    let run = &results.run;
    let inputs: Vec<String> = run["inputs"].as_array().into_iter().flatten().filter_map(file_name).collect();
    let title = match title {
        Some(title) => Name(title).to_string(),
        None if inputs.is_empty() => "Viral calls".to_owned(),
        None => format!("Viral calls in {}", some_of(&inputs, 3)),
    };
    let untrained = run["models"]["trained"] == false;
    let mut sections = vec![Section { id: "overview", title: "Overview", body: overview(&results, &survey) }];
    let has_viruses = !viruses.is_empty();
    if has_viruses {
        sections.push(Section { id: "viruses", title: "Viruses and proviruses", body: viruses });
    }
    sections.push(Section { id: "tracks", title: "Scores along records", body: tracks });
    sections.push(Section { id: "records", title: "Records", body: String::new() });
    sections.push(Section { id: "columns", title: "What the columns mean", body: String::new() });
    sections.push(Section { id: "errors", title: "Expected errors", body: errors(&results, &survey) });
    sections.push(Section { id: "run", title: "Parameters and versions", body: facts(&results) });
    sections.push(Section { id: "notes", title: "Notes", body: notes });
    let version = text(&run["plimsoll"]);
    let footer = format!(
        "Written by {} {} from results of plimsoll {version}.",
        Command::Report,
        env!("CARGO_PKG_VERSION")
    );
    let mut page = Page { title, lead: lead(&results, &survey, untrained), sections, footer, own: ("", "") };
    // The table takes what the rest of the page leaves; the margin is for its fixed texts and column headings.
    let room = MOST_BYTES.saturating_sub(page.html().len() + 100_000);
    let selection = survey.select();
    let (table, note) = table(&results, &selection, survey.scored > 0, room);
    let records = 2 + usize::from(has_viruses);
    page.sections[records].body = format!("<p class=\"note\">{note}</p>\n{}", table.html());
    page.sections[records + 1].body = table.legend();
    if !results.unknown.is_empty() {
        let names = escape(&some_of(&results.unknown, 10));
        let text = format!(
            "<p class=\"note\">Columns of predictions.tsv that this page does not show: {names}.</p>\n"
        );
        page.sections[records + 1].body += &text;
    }
    Ok(page)
}

/// Summary below the title: input, model, date and counts.
fn lead(results: &Results, survey: &Survey, untrained: bool) -> String {
    let run = &results.run;
    let mut parts = vec![format!("{} records", whole(survey.records))];
    let models = ["caller", "head"].into_iter().find_map(|key| file_name(&run["models"][key]));
    parts.extend(models.map(|model| format!("model {}", escape(&model))));
    parts.push(format!("plimsoll {}", escape(&text(&run["plimsoll"]))));
    // The run record states no date; `predict` writes it last.
    parts.extend(results.changed.map(|time| format!("run.json of {}", date(time))));
    let mut html = format!("<p class=\"sub\">{}</p>\n", parts.join(" · "));
    html += &thresholds(run);
    if untrained {
        html += "<p class=\"warning\"><strong>The models are untrained.</strong> There are no scores, and no record is \
                 called. Run predict with trained weights.</p>\n";
    }
    html
}

/// The preset and the prevalence of a run of a caller, and its thresholds by length; empty where the run record has none.
fn thresholds(run: &Value) -> String {
    let calls = &run["calls"];
    let Some(prevalence) = calls["prevalence"].as_f64() else { return String::new() };
    let at = |row: &Value| Some((row["length"].as_u64()?, row["threshold"].as_f64()?));
    let rows: Vec<(u64, f64)> = calls["thresholds"].as_array().into_iter().flatten().filter_map(at).collect();
    let said = match (calls["preset"].as_str(), &rows[..]) {
        (_, []) => return String::new(),
        (None, [(_, threshold), ..]) => format!("Threshold {} at every length", decimal(*threshold, 3)),
        (Some(preset), rows) => {
            let at =
                |(length, threshold): &(u64, f64)| format!("{} at {}", decimal(*threshold, 3), bases(*length));
            let all: Vec<String> = rows.iter().take(MOST_FACTS).map(at).collect();
            format!("Preset {}, threshold by length: {}", escape(preset), all.join(", "))
        }
    };
    format!("<p class=\"sub\">{said} · prevalence {}</p>\n", decimal(prevalence, 4))
}

/// The table of viruses and proviruses; empty if the results have none, or no such table.
fn viruses(results: &Results) -> Result<String, DataError> {
    const HEADINGS: [&str; 8] = ["Name", "Kind", "Start", "End", "Length", "Reaches", "Virus score", "FDR"];
    let mut rows = String::new();
    let mut total = 0;
    results.viruses(|cells| {
        total += 1;
        if total <= MOST_VIRUSES {
            let cells = cells.map(|cell| format!("<td>{}</td>", escape(&Name(cell).to_string())));
            let _ = writeln!(rows, "<tr>{}</tr>", cells.concat());
        }
    })?;
    if total == 0 {
        return Ok(String::new());
    }
    let which = match total {
        1 => "The record called virus, or the provirus, of this run.".to_owned(),
        _ if total <= MOST_VIRUSES => format!("All {} viruses and proviruses.", whole(total)),
        _ => format!(
            "The first {} of {} viruses and proviruses; viruses.tsv has all rows.",
            whole(MOST_VIRUSES),
            whole(total)
        ),
    };
    let headings = HEADINGS.map(|heading| format!("<th scope=\"col\">{heading}</th>")).concat();
    Ok(format!(
        "<p class=\"note\">{which} A provirus is a region of a record that is not called virus; one that reaches an end of its \
         record can go on beyond it. Their sequences are in virus.fna.</p>\n<div class=\"scroll\"><table><thead><tr>{headings}</tr></thead>\
         <tbody>\n{rows}</tbody></table></div>\n"
    ))
}

/// Cards and charts.
fn overview(results: &Results, survey: &Survey) -> String {
    let mut cards = String::new();
    let mut card = |class: &str, title: &str, number: &str, detail: &str| {
        let _ = writeln!(
            cards,
            "<div class=\"{class}\"><dt>{title}</dt><dd>{number}<small>{detail}</small></dd></div>"
        );
    };
    let total = survey.records;
    card("", "Records", &whole(total), &format!("{}, {} windows", bases(survey.bases), whole(survey.windows)));
    for (place, (word, series)) in CALLS.into_iter().enumerate() {
        let count = survey.calls[place];
        // Calls that every run has; the others only where they occur.
        if count.records > 0 || place < 3 {
            let class = series.replace("s-", "c-");
            let title = ["Virus", "No call", "Other", "Skipped", "Untrained"][place];
            let detail = format!("{}, {}", percent(count.records, total), bases(count.bases));
            debug_assert!(word.eq_ignore_ascii_case(&title.replace(' ', "_")));
            card(&class, title, &whole(count.records), &detail);
        }
    }
    if results.has_regions {
        card("", "Regions", &whole(survey.regions), &bases(survey.region_bases));
    }
    let virus = survey.calls[0].records;
    if results.form == Form::Caller && virus > 0 {
        let share = 100.0 * survey.expected_false / virus as f64;
        let detail = format!("of the virus calls, {}\u{a0}%", decimal(share, 1));
        card("", "Expected false calls", &decimal(survey.expected_false, 1), &detail);
    }
    let mut charts = String::new();
    let threshold = threshold(&results.run);
    if survey.scored > 0 {
        let range = |bin: usize| {
            let edge = |bin: usize| format!("{:.3}", bin as f64 / SCORE_BINS as f64);
            format!("{} to {}", edge(bin), edge(bin + 1))
        };
        let ticks = [0.0, 0.25, 0.5, 0.75, 1.0].map(|score| (score, decimal(score, 2)));
        charts += &Histogram {
            title: "Distribution of scores",
            quantity: "virus score",
            bins: &survey.scores,
            range: &range,
            ticks: &ticks,
            line: threshold.map(|score| (score, format!("threshold {}", decimal(score, 3)))),
        }
        .html();
    }
    if let Some(axis) = LengthAxis::of(survey) {
        if survey.scored > 0 {
            let point = |&(length, score, series): &(u64, f64, usize)| {
                let text = format!("{} bases, score {score:.4}", whole(length));
                (axis.position(length), score, text, series)
            };
            let points: Vec<_> = survey.points.iter().map(point).collect();
            let grid: Vec<Vec<Tally>> =
                survey.grid[axis.low..axis.high].iter().map(|cells| cells.to_vec()).collect();
            charts += &Scatter { points: &points, grid: &grid, ticks: &axis.ticks(), threshold }.html();
        }
        let range = |bin: usize| axis.range(bin);
        charts += &Histogram {
            title: "Lengths",
            quantity: "length in bases",
            bins: &survey.lengths[axis.low..axis.high],
            range: &range,
            ticks: &axis.ticks(),
            line: None,
        }
        .html();
    }
    charts += &classes(results, survey);
    format!("<dl class=\"cards\">\n{cards}</dl>\n<div class=\"charts\">\n{charts}</div>\n")
}

/// The chart of classes, or of calls where there are no classes.
fn classes(results: &Results, survey: &Survey) -> String {
    let words = results.at.class.map(|place| &results.words[place][..]).unwrap_or_default();
    let mut rows: Vec<(String, &str, u64)> = vec![];
    for (word, tally) in words.iter().zip(&survey.classes) {
        let series = (0..tally.len()).rev().max_by_key(|&series| tally[series]).unwrap_or(0);
        rows.push((Name(word).to_string(), crate::columns::SERIES[series].1, tally.iter().sum()));
    }
    if rows.is_empty() {
        let calls = CALLS.into_iter().zip(survey.calls).filter(|(_, count)| count.records > 0);
        rows = calls.map(|((word, class), count)| (word.replace('_', " "), class, count.records)).collect();
        return bars("Calls", "Records by call", &rows, survey.records);
    }
    rows.sort_by_key(|(_, _, count)| std::cmp::Reverse(*count));
    let total = rows.iter().map(|(_, _, count)| count).sum();
    let rest: u64 = rows.iter().skip(MOST_CLASSES).map(|(_, _, count)| count).sum();
    if rest > 0 {
        rows.truncate(MOST_CLASSES);
        rows.push(("all other classes".to_owned(), "s-none", rest));
    }
    let note =
        "Records by their most probable class; the colour is that of the most frequent call in the class";
    bars("Classes", note, &rows, total)
}

/// The logarithmic axis of the lengths of a run.
struct LengthAxis {
    /// First bin.
    low: usize,
    /// One past the last bin.
    high: usize,
}

impl LengthAxis {
    /// The axis around the shortest and the longest record; `None` without records.
    fn of(survey: &Survey) -> Option<Self> {
        let occurs = |tally: &Tally| tally.iter().any(|&count| count > 0);
        let low = survey.lengths.iter().position(occurs)?;
        let high = survey.lengths.iter().rposition(occurs)? + 1;
        // At least half a factor of 10, so that records of one length are not a bar over the whole axis.
        let margin = (DECADE / 2).saturating_sub(high - low).div_ceil(2) + 1;
        Some(LengthAxis { low: low.saturating_sub(margin), high: (high + margin).min(LENGTH_BINS) })
    }

    fn position(&self, length: u64) -> f64 {
        ((length_position(length) - self.low as f64) / (self.high - self.low) as f64).clamp(0.0, 1.0)
    }

    /// Labels at powers of 10, and between them where there are few.
    fn ticks(&self) -> Vec<Tick> {
        let factors: &[u64] = if self.high - self.low <= 2 * DECADE { &[1, 2, 5] } else { &[1] };
        let numbers = (0..=9).flat_map(|power| factors.iter().map(move |factor| factor * 10_u64.pow(power)));
        let inside = |number: &u64| (self.low as f64..=self.high as f64).contains(&length_position(*number));
        numbers.filter(inside).map(|number| (self.position(number), bases(number))).collect()
    }

    fn range(&self, bin: usize) -> String {
        let edge = |bin: usize| 10_f64.powf((bin + self.low) as f64 / DECADE as f64).ceil() as u64;
        format!("{} to {}", whole(edge(bin)), whole(edge(bin + 1) - 1))
    }
}

/// Reads the windows of the records with tracks and draws them.
fn read_tracks(results: &Results, survey: &Survey) -> Result<String, DataError> {
    let place_of: HashMap<u64, usize> =
        survey.tracks.iter().enumerate().map(|(n, track)| (track.ordinal, n)).collect();
    let mut steps: Vec<Vec<Step>> = vec![vec![]; survey.tracks.len()];
    let mut counts = vec![0_u64; survey.tracks.len()];
    let mut pairs = vec![false; survey.tracks.len()];
    let there = results.windows(|ordinal, number, window| {
        if let Some(&place) = place_of.get(&ordinal) {
            pairs[place] |= window.of_a_mate;
            add_step(&mut steps[place], counts[place], number, window);
            counts[place] += 1;
        }
    })?;
    if !there {
        return Ok("<p class=\"note\">The results have no windows.tsv.</p>\n".to_owned());
    }
    let drawn: Vec<usize> = (0..survey.tracks.len()).filter(|&place| !pairs[place]).collect();
    if drawn.is_empty() {
        return Ok("<p class=\"note\">No record has the scores of two windows or more of one sequence.</p>\n"
            .to_owned());
    }
    let mut html = format!(
        "<p class=\"note\">The score of each window along {}: {} Long records are drawn as the mean, lowest and highest \
         score of neighbouring windows.</p>\n<div class=\"tracks\">\n",
        if drawn.len() == 1 { "1 record".to_owned() } else { format!("{} records", drawn.len()) },
        if results.has_regions {
            "those with regions first, then those called virus, then the longest. Shaded: regions."
        } else {
            "those called virus first, by number of windows."
        }
    );
    for place in drawn {
        html += &track(results, &survey.tracks[place], std::mem::take(&mut steps[place]), counts[place]);
    }
    Ok(html + "</div>\n")
}

/// Adds window `index` of `number` to the steps of a track: each window a step, or several windows of a long record.
fn add_step(steps: &mut Vec<Step>, index: u64, number: u64, window: Window) {
    let start = (window.start - 1) as f64;
    let end = window.end as f64;
    let score = window.score;
    let place = if number <= MOST_STEPS {
        index as usize
    } else {
        (u128::from(index) * u128::from(MOST_STEPS) / u128::from(number)) as usize
    };
    if steps.len() <= place {
        steps.push(Step { start, end, ..Step::default() });
    }
    let Some(step) = steps.last_mut() else { return };
    step.end = step.end.max(end);
    if !score.is_nan() {
        (step.low, step.high) = match step.count {
            0 => (score, score),
            _ => (step.low.min(score), step.high.max(score)),
        };
        step.sum += score;
        step.count += 1;
    }
}

fn track(results: &Results, record: &TrackRecord, steps: Vec<Step>, windows: u64) -> String {
    let region = |region: &RegionRow| {
        let length = region.end - region.start + 1;
        let text = format!(
            "{} to {} ({}, score {})",
            whole(region.start),
            whole(region.end),
            bases(length),
            decimal(region.score, 2)
        );
        (region.start - 1, region.end, text)
    };
    let regions: Vec<(u64, u64, String)> = record.regions.iter().map(region).collect();
    let call = CALLS[record.call].0.replace('_', " ");
    let mut listed: Vec<&str> = regions.iter().take(LISTED_REGIONS).map(|(_, _, text)| text.as_str()).collect();
    let more = match record.region_count.saturating_sub(LISTED_REGIONS) {
        0 => String::new(),
        n if record.region_count > MOST_REGIONS => {
            format!("{} more, of which {} are drawn", whole(n as u64), MOST_REGIONS - LISTED_REGIONS)
        }
        n => format!("{} more", whole(n as u64)),
    };
    listed.extend(Some(more.as_str()).filter(|more| !more.is_empty()));
    let below = if listed.is_empty() {
        String::new()
    } else {
        format!("<p class=\"note\">Regions: {}</p>\n", listed.join("; "))
    };
    let label = format!("Virus score of {windows} windows along {}", record.name);
    let length = record.length;
    let course = Course { length, steps, regions, threshold: threshold(&results.run), label };
    format!(
        "<figure>\n<figcaption><h3>{}</h3><p>{call}, score {:.4}, {} bases, {} windows</p></figcaption>\n{}{below}</figure>\n",
        escape(&record.name),
        record.score,
        whole(record.length),
        whole(windows),
        course.html()
    )
}

/// The table of records within `room` bytes, and the sentence that says which records it has.
fn table(results: &Results, selection: &Selection, scored: bool, room: usize) -> (PageTable, String) {
    let cells = |place: usize| match results.columns[place].kind {
        Kind::Name => Cells::Text,
        Kind::Count => Cells::Count,
        Kind::Share => Cells::Number { stored: if place == results.at.score { 6 } else { 4 } },
        Kind::Word => Cells::Words(results.words[place].iter().map(|word| Name(word).to_string()).collect()),
    };
    let mut columns: Vec<PageColumn> = (0..results.columns.len())
        .map(|place| {
            let column = &results.columns[place];
            let key = column.key.clone();
            let label = column.label.clone();
            let help = column.help.clone();
            PageColumn { key, label, help, cells: cells(place), shown: column.shown, filter: column.filter }
        })
        .collect();
    columns.push(PageColumn {
        key: "row".to_owned(),
        label: "Row".to_owned(),
        help: "Number of the record in predictions.tsv, from 1.".to_owned(),
        cells: Cells::Count,
        shown: false,
        filter: false,
    });
    let write = |row: &crate::survey::KeptRow, place: usize, out: &mut String| match &columns[place].cells {
        Cells::Text => out.push_str(&json_string(&row.name)),
        cells => cells.write(row.values.get(place).copied().unwrap_or((row.ordinal + 1) as f64), out),
    };
    // Rows are in the order of their importance, so what does not fit is the least important.
    let mut bytes = 0;
    let mut cell = String::new();
    let mut kept = 0;
    for row in &selection.rows {
        for place in 0..columns.len() {
            cell.clear();
            write(row, place, &mut cell);
            bytes += cell.len() + 1;
        }
        if bytes > room {
            break;
        }
        kept += 1;
    }
    let note = which(selection, kept, results.has_regions);
    let mut rows: Vec<_> = selection.rows[..kept].iter().collect();
    rows.sort_by_key(|row| row.ordinal);
    let values = (0..columns.len())
        .map(|place| {
            let mut out = String::new();
            for (number, row) in rows.iter().enumerate() {
                if number > 0 {
                    out.push(',');
                }
                write(row, place, &mut out);
            }
            out
        })
        .collect();
    let sort = if scored { ("virus_score", true) } else { ("row", false) };
    let table = PageTable {
        id: "record-table",
        caption: "Records of the run".to_owned(),
        elsewhere: "predictions.tsv has all its rows".to_owned(),
        columns,
        sort,
        values,
    };
    (table, note)
}

/// Says which records the table has.
fn which(selection: &Selection, kept: usize, has_regions: bool) -> String {
    let total = selection.listable + selection.others;
    if kept as u64 == total {
        return "The table has all records.".to_owned();
    }
    let listed = selection.listed.min(kept) as u64;
    let sampled = kept as u64 - listed;
    let kind = if has_regions { "called virus or with regions" } else { "called virus" };
    let first = match selection.listable {
        0 => format!("no record is {kind}"),
        listable if listable == listed => format!("all {} {kind}", whole(listable)),
        listable => format!("of {} {kind}, the {} with the highest scores", whole(listable), whole(listed)),
    };
    format!(
        "The table has {} of {} records: {first}, and an even random sample of {} of the {} others. Counts and charts are \
         of all records; predictions.tsv has all rows.",
        whole(kept as u64),
        whole(total),
        whole(sampled),
        whole(selection.others)
    )
}

/// What is known about wrong calls of the run.
fn errors(results: &Results, survey: &Survey) -> String {
    let run = &results.run;
    let rows = run["calling"]["calibration"]["lengths"].as_array().map(Vec::as_slice).unwrap_or_default();
    if results.form == Form::VirNucPro || rows.is_empty() {
        return "<p>The run record states no measured error rates: the scores of this model are not calibrated. A score orders \
                the records of a run; it does not say how probable it is that a record is viral, and the threshold says \
                nothing about the share of false calls.</p>\n"
            .to_owned();
    }
    let mut html = String::new();
    let range = |value: &Value| {
        let ends: Vec<f64> = value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        match ends[..] {
            [low, high] if high - low < 5e-5 => Some(share(low)),
            [low, high] => Some(format!("{} to {}", share(low), share(high))),
            _ => None,
        }
    };
    let calls = &run["calls"];
    if let (Some(tpr), Some(fpr)) = (range(&calls["expected_tpr"]), range(&calls["expected_fpr"])) {
        let _ = write!(
            html,
            "<p>At the lengths of the records of this run, {tpr} of viral records and {fpr} of other records are expected to \
             reach the threshold."
        );
        if let Some(false_calls) = calls["expected_false_calls"].as_f64() {
            let _ = write!(html, " Of the virus calls, {} are expected to be wrong", share(false_calls));
            let prevalence = run["calling"]["prevalence"].as_f64();
            let _ = match prevalence {
                Some(prevalence) => {
                    write!(html, " if {} of the records are viral (prevalence).", share(prevalence))
                }
                None => write!(html, "."),
            };
        }
        html += "</p>\n";
    }
    html += "<p class=\"note\">From the calibration of the model, measured at each length. Sequences that resemble none of \
             those that it was measured on can have higher errors. AUROC: probability that a viral record scores above another one. Calibration \
             error: mean difference between the score and the share of viral records. Found: share of viral records that are \
             called virus. False: share of other records that are called virus.</p>\n";
    let chosen = run["calling"]["threshold"].as_str().unwrap_or_default();
    let presets: Vec<&str> = ["default", "relaxed", "conservative"]
        .into_iter()
        .filter(|preset| !["default", "relaxed", "conservative"].contains(&chosen) || *preset == chosen)
        .collect();
    html += "<div class=\"scroll\"><table class=\"numbers\"><thead><tr><th scope=\"col\">Length</th><th \
             scope=\"col\">Records of this run nearest to it</th><th scope=\"col\">AUROC</th><th scope=\"col\">Calibration \
             error</th>";
    for preset in &presets {
        let _ = write!(html, "<th scope=\"col\">Found, {preset}</th><th scope=\"col\">False, {preset}</th>");
    }
    html += "</tr></thead><tbody>\n";
    for (row, nearest) in rows.iter().zip(&survey.nearest) {
        let number =
            |value: &Value, digits| value.as_f64().map_or("–".to_owned(), |n| format!("{n:.digits$}"));
        let _ = write!(
            html,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td>",
            bases(row["length"].as_u64().unwrap_or(0)),
            whole(*nearest),
            number(&row["auroc"], 3),
            number(&row["ece"], 3)
        );
        for preset in &presets {
            let point = &row["presets"][preset];
            let rate = |value: &Value| value.as_f64().map_or("–".to_owned(), share);
            let _ = write!(html, "<td>{}</td><td>{}</td>", rate(&point["tpr"]), rate(&point["fpr"]));
        }
        html += "</tr>\n";
    }
    html + "</tbody></table></div>\n"
}

/// A share as a percentage with one decimal, or two below 1 %.
fn share(share: f64) -> String {
    let digits = if share > 0.0 && share < 0.01 { 2 } else { 1 };
    format!("{} %", decimal(100.0 * share, digits))
}

/// Ascending lengths of the calibration in the run record.
fn measured_lengths(run: &Value) -> Vec<u64> {
    let rows = run["calling"]["calibration"]["lengths"].as_array();
    rows.into_iter().flatten().take(1000).map(|row| row["length"].as_u64().unwrap_or(0)).collect()
}

/// Least score of a record that is called virus; `None` where it depends on the length.
fn threshold(run: &Value) -> Option<f64> {
    let of_virnucpro = run["identity"]["parameters"]["threshold"].as_f64();
    let of_caller = || run["calling"]["threshold"].as_str()?.parse().ok();
    of_virnucpro.or_else(of_caller).filter(|score| (0.0..=1.0).contains(score))
}

/// Parameters, versions, inputs and models.
fn facts(results: &Results) -> String {
    let run = &results.run;
    let mut facts: Vec<(String, String)> = vec![("version".to_owned(), text(&run["plimsoll"]))];
    let inputs: Vec<String> = run["inputs"].as_array().into_iter().flatten().map(text).collect();
    facts.push(("input".to_owned(), some_of(&inputs, 10)));
    let groups = [&run["models"], &run["calling"], &run["identity"]["parameters"], &run["settings"]];
    for (name, value) in groups.into_iter().filter_map(Value::as_object).flatten() {
        // The calibration has its own section, and `calling` repeats parameters.
        let known = facts.iter().any(|(known, _)| known == name);
        if !known && !value.is_object() && !value.is_null() {
            facts.push((name.clone(), text(value)));
        }
    }
    for key in ["device", "precision", "merged", "windows_from_journal"] {
        let empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
        if !empty(&run[key]) {
            facts.push((key.to_owned(), text(&run[key])));
        }
    }
    facts.extend(run["seconds"]["total"].as_f64().map(|seconds| ("seconds".to_owned(), decimal(seconds, 1))));
    for digests in run["identity"]["models"].as_object().into_iter().flat_map(|models| models.values()) {
        for (file, digest) in digests.as_object().into_iter().flatten() {
            facts.push((format!("sha256 of {file}"), text(digest)));
        }
    }
    let entry = |(name, value): &(String, String)| {
        format!("<dt>{}</dt><dd>{}</dd>\n", escape(&Name(name).to_string().replace('_', " ")), escape(value))
    };
    let shown: String = facts.iter().take(MOST_FACTS).map(entry).collect();
    format!(
        "<dl class=\"facts\">\n{shown}</dl>\n<p class=\"note\">run.json in the folder of results has the whole record.</p>\n"
    )
}

/// The notes of the run: counts by kind and the first rows.
fn notes(results: &Results) -> Result<String, DataError> {
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    let mut rows = String::new();
    let mut total = 0;
    results.notes(|cells| {
        let cells = cells.map(|cell| Name(cell).to_string());
        // The kinds are a small set; a file with more is cut, so that memory stays bounded.
        if kinds.len() < MOST_NOTES || kinds.contains_key(&cells[1]) {
            *kinds.entry(cells[1].clone()).or_default() += 1;
        }
        if total < MOST_NOTES as u64 {
            let cells = cells.map(|cell| format!("<td>{}</td>", escape(&cell)));
            let _ = writeln!(rows, "<tr>{}</tr>", cells.concat());
        }
        total += 1;
    })?;
    if total == 0 {
        return Ok("<p>The run has no notes.</p>\n".to_owned());
    }
    let kinds: Vec<String> =
        kinds.iter().map(|(kind, count)| format!("{} {}", whole(*count), escape(kind))).collect();
    let first = if total > MOST_NOTES as u64 {
        format!(" The first {MOST_NOTES} of {}; notes.tsv has all of them.", whole(total))
    } else {
        String::new()
    };
    Ok(format!(
        "<p>{}.{first}</p>\n<div class=\"scroll\"><table class=\"plain\"><thead><tr><th scope=\"col\">Record</th><th \
         scope=\"col\">Kind</th><th scope=\"col\">Detail</th><th scope=\"col\">Action</th></tr></thead><tbody>\n{rows}\
         </tbody></table></div>\n",
        kinds.join(", ")
    ))
}

/// Text of a JSON value, escaped and cut.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => Name(text).to_string(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Array(values) => some_of(&values.iter().map(text).collect::<Vec<_>>(), 10),
        Value::Null | Value::Number(_) | Value::Object(_) => Name(&value.to_string()).to_string(),
    }
}

/// The last part of a path.
fn file_name(path: &Value) -> Option<String> {
    let path = Path::new(path.as_str()?);
    Some(Name(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()).to_string())
}

/// The first texts, and the number of the others.
fn some_of(texts: &[String], most: usize) -> String {
    let shown = texts[..texts.len().min(most)].join(", ");
    match texts.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {} more", whole(more as u64)),
    }
}
