//! The page of viral calls: reads a folder of results and composes the sections. Invariant: histograms and counts are of
//! all records; where the page shows some of them, it says how many and which; the page has at most [`MOST_BYTES`].

use crate::chart::{
    AxisLabel, BarRow, Course, CourseRegion, CourseStep, Histogram, ScatterChart, ScatterPoint, bars,
};
use crate::columns::{CALLS, ColumnKind, SERIES, TableForm};
use crate::html::{bases, date, decimal, escape, grouped, json_string, percent};
use crate::page::{HtmlPage, PageSection};
use crate::results::{PredictionResults, WindowScore};
use crate::survey::{
    DECADE, KeptRow, LENGTH_BINS, LengthScore, MOST_REGIONS, PageStatistics, SCORE_BINS, Selection,
    SeriesCounts, TrackRecord, length_position,
};
use crate::table::{CellKind, PageColumn, PageTable};
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
pub fn page(mut results: PredictionResults, title: Option<&str>) -> Result<HtmlPage, DataError> {
    let mut survey = PageStatistics::new(results.at, measured_lengths(&results.folder.run));
    results.records(|row| survey.add(row))?;
    let tracks = read_tracks(&results, &survey)?;
    let notes = notes(&results)?;
    let viruses = viruses(&results)?;

    let run = &results.folder.run;
    let inputs: Vec<String> = run["inputs"].as_array().into_iter().flatten().filter_map(file_name).collect();
    let title = match title {
        Some(title) => Name(title).to_string(),
        None if inputs.is_empty() => "Viral calls".to_owned(),
        None => format!("Viral calls in {}", some_of(&inputs, 3)),
    };
    let untrained = run["models"]["trained"] == false;
    let mut sections =
        vec![PageSection { id: "overview", title: "Overview", body: overview(&results, &survey) }];
    let has_viruses = !viruses.is_empty();
    if has_viruses {
        sections.push(PageSection { id: "viruses", title: "Viruses and proviruses", body: viruses });
    }
    sections.push(PageSection { id: "tracks", title: "Scores along records", body: tracks });
    sections.push(PageSection { id: "records", title: "Records", body: String::new() });
    sections.push(PageSection { id: "columns", title: "What the columns mean", body: String::new() });
    sections.push(PageSection { id: "errors", title: "Expected errors", body: errors(&results, &survey) });
    sections.push(PageSection { id: "run", title: "Parameters and versions", body: facts(&results) });
    sections.push(PageSection { id: "notes", title: "Notes", body: notes });
    let version = text(&run["plimsoll"]);
    let footer = format!(
        "Written by {} {} from results of plimsoll {version}.",
        Command::Report,
        env!("CARGO_PKG_VERSION")
    );
    let mut page = HtmlPage {
        title,
        lead: lead(&results, &survey, untrained),
        sections,
        footer,
        own_style: "",
        own_script: "",
    };
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
fn lead(results: &PredictionResults, survey: &PageStatistics, untrained: bool) -> String {
    let run = &results.folder.run;
    let mut parts = vec![format!("{} records", grouped(survey.records))];
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
    let rows = calls["thresholds"].as_array().into_iter().flatten();
    let rows: Vec<(u64, f64)> =
        rows.filter_map(|row| Some((row["length"].as_u64()?, row["threshold"].as_f64()?))).collect();
    let rule = match (calls["preset"].as_str(), &rows[..]) {
        (_, []) => return String::new(),
        (None, [(_, threshold), ..]) => format!("Threshold {} at every length", decimal(*threshold, 3)),
        (Some(preset), rows) => {
            let all: Vec<String> = rows
                .iter()
                .take(MOST_FACTS)
                .map(|(length, threshold)| format!("{} at {}", decimal(*threshold, 3), bases(*length)))
                .collect();
            format!("Preset {}, threshold by length: {}", escape(preset), all.join(", "))
        }
    };
    format!("<p class=\"sub\">{rule} · prevalence {}</p>\n", decimal(prevalence, 4))
}

/// The table of viruses and proviruses; empty if the results have none, or no such table.
fn viruses(results: &PredictionResults) -> Result<String, DataError> {
    const HEADINGS: [&str; 8] = ["Name", "Kind", "Start", "End", "Length", "Reaches", "Virus score", "FDR"];
    let mut rows = String::new();
    let mut total = 0;
    results.folder.viruses(|cells| {
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
        _ if total <= MOST_VIRUSES => format!("All {} viruses and proviruses.", grouped(total)),
        _ => format!(
            "The first {} of {} viruses and proviruses; viruses.tsv has all rows.",
            grouped(MOST_VIRUSES),
            grouped(total)
        ),
    };
    let headings = HEADINGS.map(|heading| format!("<th scope=\"col\">{heading}</th>")).concat();
    Ok(format!(
        "<p class=\"note\">{which} A provirus is a region of a record that is not called virus; one that reaches an end of its \
         record can go on beyond it. Their sequences are in virus.fna.</p>\n<div class=\"scroll\"><table><thead><tr>{headings}</tr></thead>\
         <tbody>\n{rows}</tbody></table></div>\n"
    ))
}

/// A card of the overview: a number with its title and a detail.
fn card(class: &str, title: &str, number: &str, detail: &str) -> String {
    format!("<div class=\"{class}\"><dt>{title}</dt><dd>{number}<small>{detail}</small></dd></div>\n")
}

/// The range of scores of a bin.
fn score_range(bin: usize) -> String {
    let [low, high] = [bin, bin + 1].map(|edge| edge as f64 / SCORE_BINS as f64);
    format!("{low:.3} to {high:.3}")
}

/// Cards and charts.
fn overview(results: &PredictionResults, survey: &PageStatistics) -> String {
    let total = survey.records;
    let detail = format!("{}, {} windows", bases(survey.bases), grouped(survey.windows));
    let mut cards = card("", "Records", &grouped(total), &detail);
    for (place, (word, series)) in CALLS.into_iter().enumerate() {
        let count = survey.calls[place];
        // Calls that every run has; the others only where they occur.
        if count.records > 0 || place < 3 {
            let class = series.replace("s-", "c-");
            let title = ["Virus", "No call", "Other", "Skipped", "Untrained"][place];
            let detail = format!("{}, {}", percent(count.records, total), bases(count.bases));
            debug_assert!(word.eq_ignore_ascii_case(&title.replace(' ', "_")));
            cards += &card(&class, title, &grouped(count.records), &detail);
        }
    }
    if results.has_regions {
        cards += &card("", "Regions", &grouped(survey.regions), &bases(survey.region_bases));
    }
    let virus = survey.calls[0].records;
    if results.form == TableForm::Caller && virus > 0 {
        let share = 100.0 * survey.expected_false / virus as f64;
        let detail = format!("of the virus calls, {}\u{a0}%", decimal(share, 1));
        cards += &card("", "Expected false calls", &decimal(survey.expected_false, 1), &detail);
    }
    let mut charts = String::new();
    let threshold = threshold(&results.folder.run);
    if survey.scored > 0 {
        let ticks =
            [0.0, 0.25, 0.5, 0.75, 1.0].map(|score| AxisLabel { position: score, text: decimal(score, 2) });
        charts += &Histogram {
            title: "Distribution of scores",
            quantity: "virus score",
            bins: &survey.scores,
            range: &score_range,
            ticks: &ticks,
            line: threshold
                .map(|score| AxisLabel { position: score, text: format!("threshold {}", decimal(score, 3)) }),
        }
        .html();
    }
    if let Some(axis) = LengthAxis::of(survey) {
        if survey.scored > 0 {
            let points: Vec<ScatterPoint> = survey
                .points
                .iter()
                .map(|&LengthScore { length, score, series }| ScatterPoint {
                    x: axis.position(length),
                    y: score,
                    text: format!("{} bases, score {score:.4}", grouped(length)),
                    series,
                })
                .collect();
            let grid: Vec<Vec<SeriesCounts>> =
                survey.grid[axis.low..axis.high].iter().map(|cells| cells.to_vec()).collect();
            charts += &ScatterChart { points: &points, grid: &grid, ticks: &axis.ticks(), threshold }.html();
        }
        charts += &Histogram {
            title: "Lengths",
            quantity: "length in bases",
            bins: &survey.lengths[axis.low..axis.high],
            range: &|bin| axis.range(bin),
            ticks: &axis.ticks(),
            line: None,
        }
        .html();
    }
    charts += &classes(results, survey);
    format!("<dl class=\"cards\">\n{cards}</dl>\n<div class=\"charts\">\n{charts}</div>\n")
}

/// The chart of classes, or of calls where there are no classes.
fn classes(results: &PredictionResults, survey: &PageStatistics) -> String {
    let words = results.at.class.map(|place| &results.words[place][..]).unwrap_or_default();
    let mut rows: Vec<BarRow> = vec![];
    for (word, tally) in words.iter().zip(&survey.classes) {
        let series = (0..tally.len()).rev().max_by_key(|&series| tally[series]).unwrap_or(0);
        rows.push(BarRow { text: Name(word).to_string(), class: SERIES[series].1, count: tally.iter().sum() });
    }
    if rows.is_empty() {
        let calls = CALLS.into_iter().zip(survey.calls).filter(|(_, count)| count.records > 0);
        rows = calls
            .map(|((word, class), count)| BarRow { text: word.replace('_', " "), class, count: count.records })
            .collect();
        return bars("Calls", "Records by call", &rows, survey.records);
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.count));
    let total = rows.iter().map(|row| row.count).sum();
    let rest: u64 = rows.iter().skip(MOST_CLASSES).map(|row| row.count).sum();
    if rest > 0 {
        rows.truncate(MOST_CLASSES);
        rows.push(BarRow { text: "all other classes".to_owned(), class: "s-none", count: rest });
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
    fn of(survey: &PageStatistics) -> Option<Self> {
        let totals = survey.lengths.map(|counts| counts.iter().sum::<u64>());
        let low = totals.iter().position(|&total| total > 0)?;
        let high = totals.iter().rposition(|&total| total > 0)? + 1;
        // At least half a factor of 10, so that records of one length are not a bar over the whole axis.
        let margin = (DECADE / 2).saturating_sub(high - low).div_ceil(2) + 1;
        Some(LengthAxis { low: low.saturating_sub(margin), high: (high + margin).min(LENGTH_BINS) })
    }

    /// Position of a length on the axis, from 0 to 1.
    fn position(&self, length: u64) -> f64 {
        ((length_position(length) - self.low as f64) / (self.high - self.low) as f64).clamp(0.0, 1.0)
    }

    /// Labels at powers of 10, and between them where there are few.
    fn ticks(&self) -> Vec<AxisLabel> {
        let factors: &[u64] = if self.high - self.low <= 2 * DECADE { &[1, 2, 5] } else { &[1] };
        let numbers = (0..=9).flat_map(|power| factors.iter().map(move |factor| factor * 10_u64.pow(power)));
        numbers
            .filter(|&length| (self.low as f64..=self.high as f64).contains(&length_position(length)))
            .map(|length| AxisLabel { position: self.position(length), text: bases(length) })
            .collect()
    }

    /// The range of lengths of a bin: bins are equal on the logarithmic axis, and their limits are whole bases.
    fn range(&self, bin: usize) -> String {
        let [first, next] =
            [bin, bin + 1].map(|edge| 10_f64.powf((edge + self.low) as f64 / DECADE as f64).ceil() as u64);
        format!("{} to {}", grouped(first), grouped(next - 1))
    }
}

/// Reads the windows of the records with tracks and draws them.
fn read_tracks(results: &PredictionResults, survey: &PageStatistics) -> Result<String, DataError> {
    let place_of: HashMap<u64, usize> =
        survey.tracks.iter().enumerate().map(|(n, track)| (track.ordinal, n)).collect();
    let mut steps: Vec<Vec<CourseStep>> = vec![vec![]; survey.tracks.len()];
    let mut counts = vec![0_u64; survey.tracks.len()];
    let mut pairs = vec![false; survey.tracks.len()];
    let has_windows = results.windows(|ordinal, number, window| {
        if let Some(&place) = place_of.get(&ordinal) {
            pairs[place] |= window.of_a_mate;
            add_step(&mut steps[place], counts[place], number, window);
            counts[place] += 1;
        }
    })?;
    if !has_windows {
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
fn add_step(steps: &mut Vec<CourseStep>, index: u64, number: u64, window: WindowScore) {
    let start = (window.start - 1) as f64;
    let end = window.end as f64;
    let score = window.score;
    let place = if number <= MOST_STEPS {
        index as usize
    } else {
        (u128::from(index) * u128::from(MOST_STEPS) / u128::from(number)) as usize
    };
    if steps.len() <= place {
        steps.push(CourseStep { start, end, ..CourseStep::default() });
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

/// A region with its text, for a track.
fn course_region(region: &RegionRow) -> CourseRegion {
    let text = format!(
        "{} to {} ({}, score {})",
        grouped(region.start),
        grouped(region.end),
        bases(region.end - region.start + 1),
        decimal(region.score, 2)
    );
    // Rows count bases from 1, charts from 0.
    CourseRegion { start: region.start - 1, end: region.end, text }
}

/// The track of a record with its heading and the list of its regions.
fn track(results: &PredictionResults, record: &TrackRecord, steps: Vec<CourseStep>, windows: u64) -> String {
    let regions: Vec<CourseRegion> = record.regions.iter().map(course_region).collect();
    let call = CALLS[record.call].0.replace('_', " ");
    let mut listed: Vec<&str> =
        regions.iter().take(LISTED_REGIONS).map(|region| region.text.as_str()).collect();
    let more = match record.region_count.saturating_sub(LISTED_REGIONS) {
        0 => String::new(),
        n if record.region_count > MOST_REGIONS => {
            format!("{} more, of which {} are drawn", grouped(n as u64), MOST_REGIONS - LISTED_REGIONS)
        }
        n => format!("{} more", grouped(n as u64)),
    };
    listed.extend(Some(more.as_str()).filter(|more| !more.is_empty()));
    let below = if listed.is_empty() {
        String::new()
    } else {
        format!("<p class=\"note\">Regions: {}</p>\n", listed.join("; "))
    };
    let label = format!("Virus score of {windows} windows along {}", record.name);
    let length = record.length;
    let course = Course { length, steps, regions, threshold: threshold(&results.folder.run), label };
    format!(
        "<figure>\n<figcaption><h3>{}</h3><p>{call}, score {:.4}, {} bases, {} windows</p></figcaption>\n{}{below}</figure>\n",
        escape(&record.name),
        record.score,
        grouped(record.length),
        grouped(windows),
        course.html()
    )
}

/// The table of records within `room` bytes, and the sentence that says which records it has.
fn table(results: &PredictionResults, selection: &Selection, scored: bool, room: usize) -> (PageTable, String) {
    let mut columns: Vec<PageColumn> = (0..results.columns.len())
        .map(|place| {
            let column = &results.columns[place];
            let key = column.key.clone();
            let label = column.label.clone();
            let help = column.help.clone();
            let cells = cell_kind(results, place);
            PageColumn { key, label, help, cells, shown: column.shown, filter: column.filter }
        })
        .collect();
    let help = "Number of the record in predictions.tsv, from 1.";
    columns.push(PageColumn::new("row", "Row", help, CellKind::Count).hidden());
    // Rows are in the order of their importance, so what does not fit is the least important.
    let mut bytes = 0;
    let mut cell = String::new();
    let mut row_count = 0;
    for row in &selection.rows {
        for (place, column) in columns.iter().enumerate() {
            cell.clear();
            write_cell(row, place, &column.cells, &mut cell);
            bytes += cell.len() + 1;
        }
        if bytes > room {
            break;
        }
        row_count += 1;
    }
    let note = rows_note(selection, row_count, results.has_regions);
    let mut rows: Vec<_> = selection.rows[..row_count].iter().collect();
    rows.sort_by_key(|row| row.ordinal);
    let values = columns
        .iter()
        .enumerate()
        .map(|(place, column)| {
            let mut out = String::new();
            for (number, row) in rows.iter().enumerate() {
                if number > 0 {
                    out.push(',');
                }
                write_cell(row, place, &column.cells, &mut out);
            }
            out
        })
        .collect();
    let table = PageTable {
        id: "record-table",
        caption: "Records of the run".to_owned(),
        elsewhere: "predictions.tsv has all its rows".to_owned(),
        columns,
        sort_key: if scored { "virus_score" } else { "row" },
        sort_descending: scored,
        values,
    };
    (table, note)
}

/// Kind of the cells of a column of `predictions.tsv`.
fn cell_kind(results: &PredictionResults, place: usize) -> CellKind {
    match results.columns[place].kind {
        ColumnKind::Name => CellKind::Text,
        ColumnKind::Count => CellKind::Count,
        ColumnKind::Share => CellKind::Number { stored: if place == results.at.score { 6 } else { 4 } },
        ColumnKind::Word => {
            CellKind::Words(results.words[place].iter().map(|word| Name(word).to_string()).collect())
        }
    }
}

/// Appends the cell of a row in column `place`; the column after those of the results has the row's number.
fn write_cell(row: &KeptRow, place: usize, cells: &CellKind, out: &mut String) {
    match cells {
        CellKind::Text => out.push_str(&json_string(&row.name)),
        cells => cells.write(row.values.get(place).copied().unwrap_or((row.ordinal + 1) as f64), out),
    }
}

/// The sentence that says which records the table has.
fn rows_note(selection: &Selection, row_count: usize, has_regions: bool) -> String {
    let total = selection.listable + selection.others;
    if row_count as u64 == total {
        return "The table has all records.".to_owned();
    }
    let listed = selection.listed.min(row_count) as u64;
    let sampled = row_count as u64 - listed;
    let kind = if has_regions { "called virus or with regions" } else { "called virus" };
    let first = match selection.listable {
        0 => format!("no record is {kind}"),
        listable if listable == listed => format!("all {} {kind}", grouped(listable)),
        listable => format!("of {} {kind}, the {} with the highest scores", grouped(listable), grouped(listed)),
    };
    format!(
        "The table has {} of {} records: {first}, and an even random sample of {} of the {} others. Counts and charts are \
         of all records; predictions.tsv has all rows.",
        grouped(row_count as u64),
        grouped(total),
        grouped(sampled),
        grouped(selection.others)
    )
}

/// The section on wrong calls: expected and measured error rates.
fn errors(results: &PredictionResults, survey: &PageStatistics) -> String {
    let run = &results.folder.run;
    let rows = run["calling"]["calibration"]["lengths"].as_array().map(Vec::as_slice).unwrap_or_default();
    if results.form == TableForm::VirNucPro || rows.is_empty() {
        return "<p>The run record states no measured error rates: the scores of this model are not calibrated. A score orders \
                the records of a run; it does not say how probable it is that a record is viral, and the threshold says \
                nothing about the share of false calls.</p>\n"
            .to_owned();
    }
    let mut html = String::new();
    let calls = &run["calls"];
    if let (Some(tpr), Some(fpr)) = (share_range(&calls["expected_tpr"]), share_range(&calls["expected_fpr"])) {
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
        let _ = write!(
            html,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td>",
            bases(row["length"].as_u64().unwrap_or(0)),
            grouped(*nearest),
            row["auroc"].as_f64().map_or("–".to_owned(), |auroc| format!("{auroc:.3}")),
            row["ece"].as_f64().map_or("–".to_owned(), |error| format!("{error:.3}"))
        );
        for preset in &presets {
            let rates = &row["presets"][preset];
            for rate in ["tpr", "fpr"] {
                let _ = write!(html, "<td>{}</td>", rates[rate].as_f64().map_or("–".to_owned(), share));
            }
        }
        html += "</tr>\n";
    }
    html + "</tbody></table></div>\n"
}

/// A range of shares, or one share if its ends are displayed alike; `None` if the run record has no range.
fn share_range(value: &Value) -> Option<String> {
    let ends: Vec<f64> = value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    match ends[..] {
        [low, high] if high - low < 5e-5 => Some(share(low)),
        [low, high] => Some(format!("{} to {}", share(low), share(high))),
        _ => None,
    }
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
    let virnucpro = run["identity"]["parameters"]["threshold"].as_f64();
    let threshold = virnucpro.or_else(|| run["calling"]["threshold"].as_str()?.parse().ok());
    threshold.filter(|score| (0.0..=1.0).contains(score))
}

/// Parameters, versions, inputs and models.
fn facts(results: &PredictionResults) -> String {
    let run = &results.folder.run;
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
        let value = &run[key];
        if !value.is_null() && !value.as_array().is_some_and(Vec::is_empty) {
            facts.push((key.to_owned(), text(value)));
        }
    }
    facts.extend(run["seconds"]["total"].as_f64().map(|seconds| ("seconds".to_owned(), decimal(seconds, 1))));
    for digests in run["identity"]["models"].as_object().into_iter().flat_map(|models| models.values()) {
        for (file, digest) in digests.as_object().into_iter().flatten() {
            facts.push((format!("sha256 of {file}"), text(digest)));
        }
    }
    let mut shown = String::new();
    for (name, value) in facts.iter().take(MOST_FACTS) {
        let name = Name(name).to_string().replace('_', " ");
        let _ = writeln!(shown, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(value));
    }
    format!(
        "<dl class=\"facts\">\n{shown}</dl>\n<p class=\"note\">run.json in the folder of results has the whole record.</p>\n"
    )
}

/// The notes of the run: counts by kind and the first rows.
fn notes(results: &PredictionResults) -> Result<String, DataError> {
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    let mut rows = String::new();
    let mut total = 0;
    results.folder.notes(|cells| {
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
        kinds.iter().map(|(kind, count)| format!("{} {}", grouped(*count), escape(kind))).collect();
    let first = if total > MOST_NOTES as u64 {
        format!(" The first {MOST_NOTES} of {}; notes.tsv has all of them.", grouped(total))
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
fn some_of(texts: &[String], max_shown: usize) -> String {
    let shown = texts[..texts.len().min(max_shown)].join(", ");
    match texts.len().saturating_sub(max_shown) {
        0 => shown,
        more => format!("{shown} and {} more", grouped(more as u64)),
    }
}
