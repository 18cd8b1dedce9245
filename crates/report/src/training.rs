//! The page of training runs: charts with all runs overlaid, the load of experts, values, events and configurations.
//! Invariant: a value on the page is one of metrics.jsonl or run.json, and where a point stands for several steps, the page shows
//! their mean and range and says so; the page has at most 5 MB.

use crate::curves::{Curves, MarkedEvent, load_map};
use crate::error::ReportError;
use crate::html::{decimal, escape, grouped, json};
use crate::page::{HtmlPage, PageSection};
use plimsoll_data::printable::Name;
use plimsoll_runtime::series::{Point, Series};
use plimsoll_setting::Command;
use plimsoll_train::charts::{self, Chart, Line, Unit, number};
use plimsoll_train::history::{RunHistory, differences};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

const STYLE: &str = include_str!("training.css");
const SCRIPT: &str = include_str!("training.js");

/// Maximum number of lines of all charts: the bytes of the page are divided among them.
const MOST_LINES: usize = 1000;
/// Bytes for the lines of all charts, as data of the script and as marks.
const ROOM: usize = 3_000_000;
/// Bytes of a point in the data of the script, and in the marks: low, mean and high.
const POINT: [usize; 2] = [36, 36];
/// Cells of all maps of expert load, of about 15 bytes.
const MOST_CELLS: usize = 60_000;
/// Maximum number of maps of expert load.
const MOST_MAPS: usize = 64;
/// Maximum number of events that are listed and marked, of all runs.
const MOST_EVENTS: usize = 300;
/// Maximum number of keys of the configuration that are listed.
const MOST_KEYS: usize = 1000;

/// Reads the runs and composes their page.
pub fn page(folders: &[PathBuf], title: Option<&str>) -> Result<HtmlPage, ReportError> {
    let runs = charts::open(folders).map_err(ReportError::Training)?;
    let names = charts::names(&runs);
    let title = match title {
        Some(title) => Name(title).to_string(),
        None if names.len() == 1 => format!("Training run {}", names[0]),
        None => format!("{} training runs: {}", names.len(), Name(&names.join(", "))),
    };
    let report = TrainingReport { runs: &runs, names: &names };
    let mut sections = vec![
        PageSection { id: "charts", title: "Charts", body: report.charts() },
        PageSection { id: "runs", title: "Results", body: report.results() },
    ];
    let loads = report.loads();
    if !loads.is_empty() {
        sections.insert(1, PageSection { id: "experts", title: "Load of the experts", body: loads });
    }
    sections.push(PageSection { id: "events", title: "Events", body: report.events() });
    sections.push(PageSection { id: "configuration", title: "Configuration", body: report.configuration() });
    let stages = report.stages();
    if !stages.is_empty() {
        sections.push(PageSection { id: "stages", title: "Memory by stage", body: stages });
    }
    let footer = format!(
        "Written by {} {} from metrics.jsonl, config.yaml and run.json.",
        Command::Report,
        env!("CARGO_PKG_VERSION")
    );
    Ok(HtmlPage { title, lead: report.lead(), sections, footer, own_style: STYLE, own_script: SCRIPT })
}

/// The runs of a page.
struct TrainingReport<'a> {
    runs: &'a [RunHistory],
    names: &'a [String],
}

impl TrainingReport<'_> {
    fn lead(&self) -> String {
        let [run] = self.runs else { return String::new() };
        let steps = format!("{} steps", grouped(run.last_step));
        let parts: Vec<String> = run.about().map(|part| escape(&part)).collect();
        format!("<p class=\"sub\">{}</p>\n", [&[steps], &parts[..]].concat().join(" · "))
    }

    /// All charts, what the script needs for them, and the key of the runs.
    fn charts(&self) -> String {
        let all = charts::charts(self.runs, usize::MAX);
        if all.is_empty() {
            return "<p>metrics.jsonl has no number yet.</p>\n".to_owned();
        }
        let mut lines = 0;
        let mut shown = vec![];
        let mut omitted = vec![];
        for chart in all {
            if lines + chart.lines.len() <= MOST_LINES {
                lines += chart.lines.len();
                shown.push(chart);
            } else {
                omitted.push(chart.id)
            }
        }
        // Three quarters of the bytes are for the data of the script, and one for the marks that are drawn without it.
        let line_bytes = ROOM / lines.max(1);
        let data_points = (line_bytes * 3 / 4 / POINT[0]).clamp(40, 2000);
        let drawn_points = (line_bytes / 4 / POINT[1]).clamp(20, 300);
        for line in shown.iter_mut().flat_map(|chart| &mut chart.lines) {
            line.points = self.thinned(line, data_points);
        }
        let end = charts::last_step(self.runs);
        let events = self.marked_events();
        let mut html = self.key();
        html += "<div class=\"controls\" id=\"training-controls\"></div>\n<div class=\"charts\">\n";
        for chart in &shown {
            html += &Curves { chart, names: self.names, end, events: &events, max_points: drawn_points }.html();
        }
        html += "</div>\n";
        if charts::are_joined(&shown) {
            html += "<p class=\"note\">These runs have more steps than a page can hold: a line is the mean of neighbouring steps, \
                     and the band behind it reaches from their lowest to their highest value. metrics.jsonl has every step.</p>\n";
        }
        if !omitted.is_empty() {
            let names = escape(&Name(&omitted.join(", ")).to_string());
            let _ = writeln!(
                html,
                "<p class=\"note\">Without charts, because the page would be too large: {names}.</p>"
            );
        }
        let _ = writeln!(
            html,
            "<script type=\"application/json\" id=\"training-data\">{}</script>",
            json(&self.data(&shown, end).to_string())
        );
        html
    }

    fn thinned(&self, line: &Line, max_points: usize) -> Vec<Point> {
        self.runs[line.run].series(&line.series).map_or_else(Vec::new, |series| series.thinned(max_points))
    }

    /// Colours of the runs; boxes to hide them are added by the script.
    fn key(&self) -> String {
        let mut entries = String::new();
        for (place, name) in self.names.iter().enumerate() {
            let _ = write!(
                entries,
                "<li data-run=\"{place}\"><svg aria-hidden=\"true\"><rect class=\"r{place}\" width=\"100%\" \
                 height=\"100%\"/></svg>{}</li>",
                escape(name)
            );
        }
        format!("<ul class=\"key runs\" id=\"training-runs\">{entries}</ul>\n")
    }

    /// Data of the script: each distinct list of steps once, since the series of a run mostly have values at the same steps.
    fn data(&self, charts: &[Chart], end: u64) -> Value {
        let mut lists = StepLists::default();
        let charts: Vec<Value> = charts.iter().map(|chart| chart_data(chart, &mut lists)).collect();
        let events = self.marked_events().into_iter();
        let events: Vec<Value> =
            events.map(|MarkedEvent { run, event }| json!([run, event.step, event.name, event.text])).collect();
        let steps: Vec<Value> = lists.0.iter().map(StepList::json).collect();
        json!({"end": end, "runs": self.names, "steps": steps, "charts": charts, "events": events})
    }

    /// The first events with a step, of all runs.
    fn marked_events(&self) -> Vec<MarkedEvent<'_>> {
        let max_of_run = MOST_EVENTS / self.runs.len().max(1);
        let mut events = vec![];
        for (run, history) in self.runs.iter().enumerate() {
            events.extend(history.marked_events(max_of_run).map(|(_, event)| MarkedEvent { run, event }));
        }
        events
    }

    /// Final and best values, a column for each run.
    fn results(&self) -> String {
        let rows = [
            self.row("Status", |run| record_text(run, "status")),
            self.row("Error", |run| record_text(run, "error")),
            self.row("Ended by", |run| record_text(run, "ended")),
            self.row("Steps", |run| Some(grouped(run.last_step))),
            self.row("Tokens", |run| run.series("tokens").map(|series| grouped(series.last as u64))),
            self.row("Last loss", |run| last(run, "loss")),
            self.row("Lowest loss of a step", |run| lowest(run, "loss")),
            self.row("Last validation loss", |run| last(run, "validation_loss")),
            self.row("Lowest validation loss", |run| lowest(run, "validation_loss")),
            self.row("Last gradient norm", |run| last(run, "grad_norm")),
            self.row("Tokens per second, whole run", |run| {
                record_number(run, "tokens_per_second", Unit::Number)
            }),
            self.row("Tokens per second, last line", |run| last(run, "tokens_per_second")),
            self.row("Seconds", |run| run.record["seconds"].as_f64().map(|seconds| decimal(seconds, 1))),
            self.row("Highest resident memory", |run| {
                run.series("memory_bytes").map(|series| Unit::Bytes.text(series.highest.0))
            }),
            self.row("Planned peak", |run| record_number(run, "peak_bytes", Unit::Bytes)),
            self.row("Memory budget", |run| record_number(run, "budget_bytes", Unit::Bytes)),
            self.row("Skipped steps", |run| last(run, "skipped")),
            self.row("Dropped rows in a step, at most", |run| {
                run.series("dropped").map(|series| number(series.highest.0))
            }),
            self.row("Events", |run| Some(grouped(run.event_count))),
            self.row("Device", |run| record_text(run, "device")),
            self.row("Version", |run| record_text(run, "plimsoll")),
            self.row("Folder", |run| Some(plimsoll_data::printable::EscapedPath(&run.folder).to_string())),
        ];
        let rows = rows.into_iter().filter(|row| row.cells.iter().any(Option::is_some));
        self.table("Value", rows) + &self.values()
    }

    /// A row of a table with a value of each run.
    fn row(&self, title: &str, value: impl Fn(&RunHistory) -> Option<String>) -> ComparedRow {
        ComparedRow { title: title.to_owned(), cells: self.runs.iter().map(value).collect() }
    }

    /// Last, lowest and highest value of every series.
    fn values(&self) -> String {
        let mut names: Vec<&str> =
            self.runs.iter().flat_map(|run| &run.series).map(|s| s.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let rows = names.into_iter().map(|name| self.row(name, |run| run.series(name).map(last_and_range)));
        format!(
            "<details><summary>All series: last value; lowest (step) to highest (step)</summary>\n{}</details>\n",
            self.table("Series", rows)
        )
    }

    /// A table with a column for each run; cells are plain text.
    fn table(&self, first: &str, rows: impl Iterator<Item = ComparedRow>) -> String {
        let heads: String =
            self.names.iter().map(|name| format!("<th scope=\"col\">{}</th>", escape(name))).collect();
        let mut html = format!(
            "<div class=\"scroll\"><table class=\"plain compared\"><thead><tr><th scope=\"col\">{first}</th>{heads}</tr></thead><tbody>\n"
        );
        for ComparedRow { title, cells } in rows {
            let cells: String = cells
                .into_iter()
                .map(|cell| {
                    format!("<td>{}</td>", cell.map_or("–".to_owned(), |text| escape(&Name(&text).to_string())))
                })
                .collect();
            let _ =
                writeln!(html, "<tr><th scope=\"row\">{}</th>{cells}</tr>", escape(&Name(&title).to_string()));
        }
        html + "</tbody></table></div>\n"
    }

    /// Maps of the load of the experts, for each run and layer; empty without experts.
    fn loads(&self) -> String {
        let count = charts::loads(self.runs, self.names).count();
        if count == 0 {
            return String::new();
        }
        let mut rows = 0;
        let mut shown = vec![];
        for (title, load) in charts::loads(self.runs, self.names).take(MOST_MAPS) {
            if rows + load.experts > MOST_CELLS / 4 {
                break;
            }
            rows += load.experts;
            shown.push((title, load));
        }
        let columns = (MOST_CELLS / rows.max(1)).clamp(4, 120);
        let mut html = "<p class=\"note\">Shares of the routed rows that each expert of a layer received. Grey is an even share, blue \
                        less, red more, up to twice an even share.</p>\n<div class=\"charts\">\n"
            .to_owned();
        for (title, load) in &shown {
            html += &load_map(title, load, charts::last_step(self.runs), columns);
        }
        html += "</div>\n";
        if shown.len() < count {
            let _ = writeln!(
                html,
                "<p class=\"note\">The first {} of {count} maps; metrics.jsonl has all layers.</p>",
                shown.len()
            );
        }
        html
    }

    fn events(&self) -> String {
        let total: u64 = self.runs.iter().map(|run| run.event_count).sum();
        if total == 0 {
            return "<p>The runs have no events.</p>\n".to_owned();
        }
        let mut rows = String::new();
        let mut shown = 0;
        for (run, name) in self.runs.iter().zip(self.names) {
            for event in run.events.iter().take(MOST_EVENTS / self.runs.len()) {
                let step = event.step.map_or("–".to_owned(), grouped);
                let _ = writeln!(
                    rows,
                    "<tr><td>{}</td><td>{step}</td><td>{}</td><td>{}</td></tr>",
                    escape(name),
                    escape(&event.name),
                    escape(&event.text)
                );
                shown += 1;
            }
        }
        let first = if shown < total {
            format!("<p>{} of {} events; metrics.jsonl has all of them.</p>\n", grouped(shown), grouped(total))
        } else {
            String::new()
        };
        format!(
            "{first}<div class=\"scroll\"><table class=\"plain\"><thead><tr><th scope=\"col\">Run</th><th scope=\"col\">Step</th><th \
             scope=\"col\">Event</th><th scope=\"col\">Detail</th></tr></thead><tbody>\n{rows}</tbody></table></div>\n"
        )
    }

    fn configuration(&self) -> String {
        let mut html = String::new();
        if self.runs.len() > 1 {
            let different = differences(self.runs);
            html += if different.is_empty() {
                "<p>The configurations are equal.</p>\n"
            } else {
                "<h3>Differences</h3>\n"
            };
            if !different.is_empty() {
                let rows = different.into_iter().take(MOST_KEYS);
                html += &self.table("Key", rows.map(|(title, cells)| ComparedRow { title, cells }));
            }
        }
        let mut keys: Vec<&String> = self.runs.iter().flat_map(|run| run.settings.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let keys = keys.into_iter().take(MOST_KEYS);
        let rows = keys.map(|key| self.row(key, |run| run.settings.get(key).cloned()));
        let all = self.table("Key", rows);
        html + &format!("<details><summary>All keys</summary>\n{all}</details>\n")
    }

    /// Numbers at the ends of the stages of each run; empty without stages.
    fn stages(&self) -> String {
        let mut html = String::new();
        for (run, name) in self.runs.iter().zip(self.names).filter(|(run, _)| !run.stages.is_empty()) {
            let mut keys: Vec<&str> =
                run.stages.iter().flat_map(|s| &s.numbers).map(|(key, _)| key.as_str()).collect();
            keys.sort_unstable();
            keys.dedup();
            keys.truncate(12);
            let with_steps = run.stages.iter().any(|stage| stage.step.is_some());
            let step_head = if with_steps { "<th scope=\"col\">Step</th>" } else { "" };
            let heads: String =
                keys.iter().map(|key| format!("<th scope=\"col\">{}</th>", escape(key))).collect();
            if self.runs.len() > 1 {
                let _ = writeln!(html, "<h3>{}</h3>", escape(name));
            }
            let _ = writeln!(
                html,
                "<div class=\"scroll\"><table class=\"numbers\"><thead><tr><th scope=\"col\">Stage</th>{step_head}{heads}</tr></thead><tbody>"
            );
            for stage in &run.stages {
                let mut cells = String::new();
                for key in &keys {
                    let value = stage.numbers.iter().find(|(known, _)| known == key).map(|(_, value)| *value);
                    let unit = if key.ends_with("bytes") { Unit::Bytes } else { Unit::Number };
                    let value = value.map_or("–".to_owned(), |value| unit.text(value));
                    let _ = write!(cells, "<td>{value}</td>");
                }
                let step = if with_steps {
                    format!("<td>{}</td>", stage.step.map_or("–".to_owned(), grouped))
                } else {
                    String::new()
                };
                let _ = writeln!(html, "<tr><th scope=\"row\">{}</th>{step}{cells}</tr>", escape(&stage.name));
            }
            html += "</tbody></table></div>\n";
        }
        html
    }
}

/// A row of a table with a column for each run.
struct ComparedRow {
    title: String,
    cells: Vec<Option<String>>,
}

/// A text of the run record.
fn record_text(run: &RunHistory, key: &str) -> Option<String> {
    run.record[key].as_str().map(|text| Name(text).to_string())
}

/// A number of the run record with its unit.
fn record_number(run: &RunHistory, key: &str, unit: Unit) -> Option<String> {
    run.record[key].as_f64().map(|value| unit.text(value))
}

/// Last value of a series.
fn last(run: &RunHistory, name: &str) -> Option<String> {
    run.series(name).map(|series| number(series.last))
}

/// Lowest value of a series with its step.
fn lowest(run: &RunHistory, name: &str) -> Option<String> {
    let (value, step) = run.series(name)?.lowest;
    Some(format!("{} at step {}", number(value), grouped(step)))
}

/// Last value of a series, and its lowest and highest values with their steps.
fn last_and_range(series: &Series) -> String {
    let [lowest, highest] =
        [series.lowest, series.highest].map(|(value, step)| format!("{} ({})", number(value), grouped(step)));
    format!("{}; {lowest} to {highest}", number(series.last))
}

/// The distinct lists of steps of all lines.
#[derive(Default)]
struct StepLists(Vec<StepList>);

/// First and last step of each point of a line.
#[derive(PartialEq)]
struct StepList {
    first: Vec<u64>,
    last: Vec<u64>,
}

impl StepLists {
    /// Index of the list of a line, which is added if it is new.
    fn index_of(&mut self, line: &Line) -> usize {
        let list = StepList {
            first: line.points.iter().map(|point| point.first).collect(),
            last: line.points.iter().map(|point| point.last).collect(),
        };
        self.0.iter().position(|known| *known == list).unwrap_or_else(|| {
            self.0.push(list);
            self.0.len() - 1
        })
    }
}

impl StepList {
    /// The list for the script: the last step of a point as its distance from the first one; a list of zeros is left out.
    fn json(&self) -> Value {
        let spans: Vec<u64> = self.first.iter().zip(&self.last).map(|(first, last)| last - first).collect();
        if spans.iter().all(|&span| span == 0) {
            json!({"first": self.first})
        } else {
            json!({"first": self.first, "span": spans})
        }
    }
}

/// Data of a chart for the script.
fn chart_data(chart: &Chart, steps: &mut StepLists) -> Value {
    let (factor, unit) = chart.unit.scale(chart.axis(false).high.abs());
    let limits =
        chart.limits.iter().map(|limit| json!({"run": limit.run, "name": limit.name, "value": limit.value}));
    let lines: Vec<Value> = chart.lines.iter().map(|line| line_data(line, steps.index_of(line))).collect();
    json!({
        "id": chart.id, "factor": factor, "unit": unit, "log": chart.suits_log, "zero": chart.from_zero,
        "limits": limits.collect::<Vec<_>>(), "lines": lines,
    })
}

/// Data of a line for the script; `steps` is the index of its list of steps.
fn line_data(line: &Line, steps: usize) -> Value {
    let mut data = json!({
        "run": line.run, "series": line.series, "place": line.place, "marked": line.marked, "steps": steps,
        "mean": line.points.iter().map(|point| short(point.mean())).collect::<Vec<_>>(),
    });
    if line.points.iter().any(|point| point.low < point.high) {
        data["low"] = line.points.iter().map(|point| short(point.low)).collect();
        data["high"] = line.points.iter().map(|point| short(point.high)).collect();
    }
    data
}

/// A number with seven significant digits, which is more than f32 has and a chart can show.
fn short(value: f64) -> Value {
    let rounded: f64 = format!("{value:.6e}").parse().unwrap_or(value);
    // Whole numbers without `.0`.
    if rounded.fract() == 0.0 && rounded.abs() < 1e15 { json!(rounded as i64) } else { json!(rounded) }
}
