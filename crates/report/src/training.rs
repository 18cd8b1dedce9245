//! The page of training runs: charts with all runs overlaid, the load of experts, values, events and configurations.
//! Invariant: a value on the page is one of metrics.jsonl or run.json, and where a point stands for several steps, the page shows
//! their mean and range and says so; the page has at most 5 MB.

use crate::curves::{Curves, load_map};
use crate::error::ReportError;
use crate::html::{decimal, escape, json, whole};
use crate::page::{Page, Section};
use plimsoll_data::printable::Name;
use plimsoll_runtime::series::{Point, Series};
use plimsoll_setting::Command;
use plimsoll_train::charts::{self, Chart, Line, Unit, number};
use plimsoll_train::history::{RunEvent, RunHistory, differences};
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
pub fn page(folders: &[PathBuf], title: Option<&str>) -> Result<Page, ReportError> {
    let runs = charts::open(folders).map_err(ReportError::Training)?;
    let names = charts::names(&runs);
    let title = match title {
        Some(title) => Name(title).to_string(),
        None if names.len() == 1 => format!("Training run {}", names[0]),
        None => format!("{} training runs: {}", names.len(), Name(&names.join(", "))),
    };
    let report = Training { runs: &runs, names: &names };
    let mut sections = vec![
        Section { id: "charts", title: "Charts", body: report.charts() },
        Section { id: "runs", title: "Results", body: report.results() },
    ];
    let loads = report.loads();
    if !loads.is_empty() {
        sections.insert(1, Section { id: "experts", title: "Load of the experts", body: loads });
    }
    sections.push(Section { id: "events", title: "Events", body: report.events() });
    sections.push(Section { id: "configuration", title: "Configuration", body: report.configuration() });
    let stages = report.stages();
    if !stages.is_empty() {
        sections.push(Section { id: "stages", title: "Memory by stage", body: stages });
    }
    let footer = format!(
        "Written by {} {} from metrics.jsonl, config.yaml and run.json.",
        Command::Report,
        env!("CARGO_PKG_VERSION")
    );
    Ok(Page { title, lead: report.lead(), sections, footer, own: (STYLE, SCRIPT) })
}

/// The runs of a page.
struct Training<'a> {
    runs: &'a [RunHistory],
    names: &'a [String],
}

impl Training<'_> {
    fn lead(&self) -> String {
        let [run] = self.runs else { return String::new() };
        let steps = format!("{} steps", whole(run.last_step));
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
        let mut left = vec![];
        for chart in all {
            if lines + chart.lines.len() <= MOST_LINES {
                lines += chart.lines.len();
                shown.push(chart);
            } else {
                left.push(chart.id)
            }
        }
        let room = ROOM / lines.max(1);
        let [most, drawn] = [room * 3 / 4 / POINT[0], room / 4 / POINT[1]];
        let most = most.clamp(40, 2000);
        let drawn = drawn.clamp(20, 300);
        for line in shown.iter_mut().flat_map(|chart| &mut chart.lines) {
            line.points = self.thinned(line, most);
        }
        let end = charts::last_step(self.runs);
        let events = self.marked_events();
        let mut html = self.key();
        html += "<div class=\"controls\" id=\"training-controls\"></div>\n<div class=\"charts\">\n";
        for chart in &shown {
            html += &Curves { chart, names: self.names, end, events: &events, most: drawn }.html();
        }
        html += "</div>\n";
        if charts::are_joined(&shown) {
            html += "<p class=\"note\">These runs have more steps than a page can hold: a line is the mean of neighbouring steps, \
                     and the band behind it reaches from their lowest to their highest value. metrics.jsonl has every step.</p>\n";
        }
        if !left.is_empty() {
            let names = escape(&Name(&left.join(", ")).to_string());
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

    fn thinned(&self, line: &Line, most: usize) -> Vec<Point> {
        self.runs[line.run].series(&line.series).map_or_else(Vec::new, |series| series.thinned(most))
    }

    /// Colours of the runs; boxes to hide them are added by the script.
    fn key(&self) -> String {
        let entry = |(place, name): (usize, &String)| {
            format!(
                "<li data-run=\"{place}\"><svg aria-hidden=\"true\"><rect class=\"r{place}\" width=\"100%\" \
                 height=\"100%\"/></svg>{}</li>",
                escape(name)
            )
        };
        let entries: String = self.names.iter().enumerate().map(entry).collect();
        format!("<ul class=\"key runs\" id=\"training-runs\">{entries}</ul>\n")
    }

    /// Data of the script: each distinct list of steps once, since the series of a run mostly have values at the same steps.
    fn data(&self, charts: &[Chart], end: u64) -> Value {
        let mut lists: Vec<(Vec<u64>, Vec<u64>)> = vec![];
        let mut steps_of = |line: &Line| {
            let list = (
                line.points.iter().map(|point| point.first).collect(),
                line.points.iter().map(|point| point.last).collect(),
            );
            lists.iter().position(|known| *known == list).unwrap_or_else(|| {
                lists.push(list);
                lists.len() - 1
            })
        };
        let line = |line: &Line, steps: usize| {
            let values = |of: fn(&Point) -> f64| -> Vec<Value> {
                line.points.iter().map(|point| short(of(point))).collect()
            };
            let mut data = json!({
                "run": line.run, "series": line.series, "place": line.place, "marked": line.marked, "steps": steps,
                "mean": values(Point::mean),
            });
            if line.points.iter().any(|point| point.low < point.high) {
                data["low"] = values(|point| point.low).into();
                data["high"] = values(|point| point.high).into();
            }
            data
        };
        let chart = |chart: &Chart| {
            let (factor, unit) = chart.unit.scale(chart.axis(false).high.abs());
            let limits = chart
                .limits
                .iter()
                .map(|limit| json!({"run": limit.run, "name": limit.name, "value": limit.value}));
            let lines: Vec<Value> = chart
                .lines
                .iter()
                .map(|l| (l, steps_of(l)))
                .collect::<Vec<_>>()
                .into_iter()
                .map(|(l, s)| line(l, s))
                .collect();
            json!({
                "id": chart.id, "factor": factor, "unit": unit, "log": chart.suits_log, "zero": chart.from_zero,
                "limits": limits.collect::<Vec<_>>(), "lines": lines,
            })
        };
        let charts: Vec<Value> = charts.iter().map(chart).collect();
        let events: Vec<Value> = self
            .marked_events()
            .iter()
            .map(|(run, event)| json!([run, event.step, event.name, event.text]))
            .collect();
        // The last step of a point is stored as its distance from the first one; a list of zeros is left out.
        let steps: Vec<Value> = lists
            .into_iter()
            .map(|(first, last)| {
                let spans: Vec<u64> = first.iter().zip(&last).map(|(first, last)| last - first).collect();
                if spans.iter().all(|&span| span == 0) {
                    json!({"first": first})
                } else {
                    json!({"first": first, "span": spans})
                }
            })
            .collect();
        json!({"end": end, "runs": self.names, "steps": steps, "charts": charts, "events": events})
    }

    /// The first events with a step, of all runs.
    fn marked_events(&self) -> Vec<(usize, &RunEvent)> {
        let each = MOST_EVENTS / self.runs.len().max(1);
        let of_run = |(place, run)| {
            let run: &RunHistory = run;
            run.marked_events(each).map(move |(_, event)| (place, event))
        };
        self.runs.iter().enumerate().flat_map(of_run).collect()
    }

    /// Final and best values, a column for each run.
    fn results(&self) -> String {
        let text = |run: &RunHistory, key: &str| run.record[key].as_str().map(|text| Name(text).to_string());
        let float =
            |run: &RunHistory, key: &str, unit: Unit| run.record[key].as_f64().map(|value| unit.text(value));
        let last = |run: &RunHistory, name: &str| run.series(name).map(|series| number(series.last));
        let lowest = |run: &RunHistory, name: &str| {
            run.series(name)
                .map(|series| format!("{} at step {}", number(series.lowest.0), whole(series.lowest.1)))
        };
        type Row<'a> = (&'a str, Box<dyn Fn(&RunHistory) -> Option<String> + 'a>);
        let rows: Vec<Row> = vec![
            ("Status", Box::new(move |run| text(run, "status"))),
            ("Error", Box::new(move |run| text(run, "error"))),
            ("Ended by", Box::new(move |run| text(run, "ended"))),
            ("Steps", Box::new(|run| Some(whole(run.last_step)))),
            ("Tokens", Box::new(|run| run.series("tokens").map(|series| whole(series.last as u64)))),
            ("Last loss", Box::new(move |run| last(run, "loss"))),
            ("Lowest loss of a step", Box::new(move |run| lowest(run, "loss"))),
            ("Last validation loss", Box::new(move |run| last(run, "validation_loss"))),
            ("Lowest validation loss", Box::new(move |run| lowest(run, "validation_loss"))),
            ("Last gradient norm", Box::new(move |run| last(run, "grad_norm"))),
            (
                "Tokens per second, whole run",
                Box::new(move |run| float(run, "tokens_per_second", Unit::Number)),
            ),
            ("Tokens per second, last line", Box::new(move |run| last(run, "tokens_per_second"))),
            ("Seconds", Box::new(move |run| run.record["seconds"].as_f64().map(|seconds| decimal(seconds, 1)))),
            (
                "Highest resident memory",
                Box::new(|run| run.series("memory_bytes").map(|series| Unit::Bytes.text(series.highest.0))),
            ),
            ("Planned peak", Box::new(move |run| float(run, "peak_bytes", Unit::Bytes))),
            ("Memory budget", Box::new(move |run| float(run, "budget_bytes", Unit::Bytes))),
            ("Skipped steps", Box::new(move |run| last(run, "skipped"))),
            (
                "Dropped rows in a step, at most",
                Box::new(|run| run.series("dropped").map(|series| number(series.highest.0))),
            ),
            ("Events", Box::new(|run| Some(whole(run.event_count)))),
            ("Device", Box::new(move |run| text(run, "device"))),
            ("Version", Box::new(move |run| text(run, "plimsoll"))),
            ("Folder", Box::new(|run| Some(plimsoll_data::printable::EscapedPath(&run.folder).to_string()))),
        ];
        let row = |(title, value): Row| {
            let cells: Vec<Option<String>> = self.runs.iter().map(value).collect();
            cells.iter().any(Option::is_some).then_some((title.to_owned(), cells))
        };
        self.table("Value", rows.into_iter().filter_map(row)) + &self.values()
    }

    /// Last, lowest and highest value of every series.
    fn values(&self) -> String {
        let mut names: Vec<&str> =
            self.runs.iter().flat_map(|run| &run.series).map(|s| s.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let cell = |series: &Series| {
            let at = |(value, step): (f64, u64)| format!("{} ({})", number(value), whole(step));
            format!("{}; {} to {}", number(series.last), at(series.lowest), at(series.highest))
        };
        let rows = names
            .into_iter()
            .map(|name| (name.to_owned(), self.runs.iter().map(|run| run.series(name).map(cell)).collect()));
        format!(
            "<details><summary>All series: last value; lowest (step) to highest (step)</summary>\n{}</details>\n",
            self.table("Series", rows)
        )
    }

    /// A table with a column for each run; cells are plain text.
    fn table(&self, first: &str, rows: impl Iterator<Item = (String, Vec<Option<String>>)>) -> String {
        let heads: String =
            self.names.iter().map(|name| format!("<th scope=\"col\">{}</th>", escape(name))).collect();
        let mut html = format!(
            "<div class=\"scroll\"><table class=\"plain compared\"><thead><tr><th scope=\"col\">{first}</th>{heads}</tr></thead><tbody>\n"
        );
        for (title, cells) in rows {
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
        let all = || charts::loads(self.runs, self.names);
        let count = all().count();
        if count == 0 {
            return String::new();
        }
        let mut rows = 0;
        let mut shown = vec![];
        for (title, load) in all().take(MOST_MAPS) {
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
                let step = event.step.map_or("–".to_owned(), whole);
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
            format!("<p>{} of {} events; metrics.jsonl has all of them.</p>\n", whole(shown), whole(total))
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
                html += &self.table("Key", different.into_iter().take(MOST_KEYS));
            }
        }
        let mut keys: Vec<&String> = self.runs.iter().flat_map(|run| run.settings.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let rows = keys
            .into_iter()
            .take(MOST_KEYS)
            .map(|key| (key.clone(), self.runs.iter().map(|run| run.settings.get(key).cloned()).collect()));
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
                let cell = |key: &&str| {
                    let value = stage.numbers.iter().find(|(known, _)| known == key).map(|(_, value)| *value);
                    let unit = if key.ends_with("bytes") { Unit::Bytes } else { Unit::Number };
                    format!("<td>{}</td>", value.map_or("–".to_owned(), |value| unit.text(value)))
                };
                let cells: String = keys.iter().map(cell).collect();
                let step = if with_steps {
                    format!("<td>{}</td>", stage.step.map_or("–".to_owned(), whole))
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

/// A number with seven significant digits, which is more than f32 has and a chart can show.
fn short(value: f64) -> Value {
    let rounded: f64 = format!("{value:.6e}").parse().unwrap_or(value);
    // Whole numbers without `.0`.
    if rounded.fract() == 0.0 && rounded.abs() < 1e15 { json!(rounded as i64) } else { json!(rounded) }
}
