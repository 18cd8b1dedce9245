//! Charts as inline SVG. Invariant: positions are percentages, so that a chart fits any width without a script; colours
//! are classes of the style sheet, so that they follow the colour scheme; every mark has a text.

use crate::columns::SERIES;
use crate::html::{bases, decimal, escape, grouped, percent};
use crate::survey::SeriesCounts;
use plimsoll_train::charts::round_step;
use std::fmt::Write;

/// A label on an axis.
#[derive(Clone, Debug)]
pub struct AxisLabel {
    /// Position on the axis, from 0 to 1.
    pub position: f64,
    /// Text.
    pub text: String,
}

/// A histogram of records with one bar for each bin, divided by series.
pub struct Histogram<'a> {
    /// Heading, plain text.
    pub title: &'a str,
    /// Name of the quantity of the bins.
    pub quantity: &'a str,
    /// Records of each bin.
    pub bins: &'a [SeriesCounts],
    /// Range of each bin, for its text.
    pub range: &'a dyn Fn(usize) -> String,
    /// Labels on the axis of the bins.
    pub ticks: &'a [AxisLabel],
    /// Position and text of a line across the bars.
    pub line: Option<AxisLabel>,
}

/// Factor between the most and the fewest records of a bin from which on heights are logarithmic.
const LOGARITHMIC: u64 = 200;

impl Histogram<'_> {
    /// The chart, with its numbers as a table.
    pub fn html(&self) -> String {
        let totals: Vec<u64> = self.bins.iter().map(|bin| bin.iter().sum()).collect();
        let highest = totals.iter().copied().max().unwrap_or(0).max(1);
        let fewest = totals.iter().copied().filter(|&n| n > 0).min().unwrap_or(1);
        let scale = BarScale::new(highest, highest / fewest >= LOGARITHMIC);
        let width = 100.0 / self.bins.len().max(1) as f64;
        let mut marks = String::new();
        let mut rows = String::new();
        for (place, (bin, &total)) in self.bins.iter().zip(&totals).enumerate() {
            if total == 0 {
                continue;
            }
            let parts: Vec<String> = SERIES
                .iter()
                .zip(bin)
                .filter(|(_, n)| **n > 0)
                .map(|((name, _), n)| format!("{} {name}", grouped(*n)))
                .collect();
            let range = (self.range)(place);
            let _ = write!(marks, "<g><title>{}: {}</title>", escape(&range), parts.join(", "));
            let height = scale.height(total);
            let mut below = 0;
            for ((_, class), &n) in SERIES.iter().zip(bin) {
                if n > 0 {
                    // The height of the bar is on the scale of the axis; series divide it by their shares.
                    let bottom = height * below as f64 / total as f64;
                    let part = height * n as f64 / total as f64;
                    let x = width * place as f64 + 0.08 * width;
                    let y = 100.0 * (1.0 - bottom - part);
                    let _ = write!(marks, "{}", rect(class, x, y, 0.84 * width, 100.0 * part));
                    below += n;
                }
            }
            marks.push_str("</g>");
            let cells: String = bin.iter().map(|&n| format!("<td>{}</td>", grouped(n))).collect();
            let _ = writeln!(rows, "<tr><th scope=\"row\">{}</th>{cells}</tr>", escape(&range));
        }
        let mut axes = scale.lines();
        axes.push_str(&bottom_labels(self.ticks));
        if let Some(line) = &self.line {
            marks.push_str(&vertical(line));
        }
        let log = if scale.logarithmic { " (logarithmic)" } else { "" };
        let label = format!("Histogram: records by {}; the table below has the numbers", self.quantity);
        let heads: String = SERIES.iter().map(|(name, _)| format!("<th scope=\"col\">{name}</th>")).collect();
        format!(
            "<figure class=\"chart\">\n<figcaption><h3>{}</h3><p>Records{log} by {}</p></figcaption>\n{}\
             <svg class=\"plot\" role=\"img\" aria-label=\"{}\">{axes}{marks}</svg>\n\
             <details><summary>Numbers</summary><div class=\"scroll\"><table class=\"numbers\"><thead><tr><th \
             scope=\"col\">{}</th>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div></details>\n</figure>\n",
            escape(self.title),
            escape(self.quantity),
            key(self.bins),
            escape(&label),
            escape(self.quantity),
        )
    }
}

/// A record of a [`ScatterChart`].
pub struct ScatterPoint {
    /// Position on the axis of lengths, from 0 to 1.
    pub x: f64,
    /// Position on the axis of scores, from 0 to 1.
    pub y: f64,
    /// Text of the mark.
    pub text: String,
    /// Index in [`SERIES`].
    pub series: usize,
}

/// The records of a run by length and score.
pub struct ScatterChart<'a> {
    /// Records; empty if there are too many.
    pub points: &'a [ScatterPoint],
    /// Records in a grid: for each column of lengths, the cells by score.
    pub grid: &'a [Vec<SeriesCounts>],
    /// Labels on the axis of lengths.
    pub ticks: &'a [AxisLabel],
    /// Score at which a line is drawn.
    pub threshold: Option<f64>,
}

impl ScatterChart<'_> {
    /// The chart.
    pub fn html(&self) -> String {
        let mut marks = String::new();
        let mut sums = SeriesCounts::default();
        for cell in self.grid.iter().flatten() {
            sums.iter_mut().zip(cell).for_each(|(sum, n)| *sum += n);
        }
        let shape = if self.points.is_empty() { self.cells(&mut marks) } else { "Each point is a record" };
        for point in self.points {
            let class = SERIES[point.series].1;
            let x = decimal(100.0 * point.x, 2);
            let y = decimal(100.0 * (1.0 - point.y), 2);
            let _ = write!(
                marks,
                "<circle class=\"{class}\" cx=\"{x}%\" cy=\"{y}%\" r=\"3.5\"><title>{}</title></circle>",
                escape(&point.text)
            );
        }
        let mut axes = score_lines(&[0.0, 0.25, 0.5, 0.75, 1.0]);
        axes.push_str(&bottom_labels(self.ticks));
        axes.push_str(&self.threshold.map_or(String::new(), horizontal));
        format!(
            "<figure class=\"chart\">\n<figcaption><h3>Score and length</h3><p>Virus score by length in bases \
             (logarithmic). {shape}</p></figcaption>\n{}<svg class=\"plot\" role=\"img\" aria-label=\"Virus score of \
             records by their length\">{axes}{marks}</svg>\n</figure>\n",
            key(&[sums]),
        )
    }

    /// Draws the grid: the colour of a cell is that of its most frequent series, its opacity grows with the logarithm of
    /// its records.
    fn cells(&self, marks: &mut String) -> &'static str {
        let highest = self.grid.iter().flatten().map(|cell| cell.iter().sum::<u64>()).max().unwrap_or(1);
        let width = 100.0 / self.grid.len().max(1) as f64;
        for (column, cells) in self.grid.iter().enumerate() {
            let height = 100.0 / cells.len().max(1) as f64;
            for (row, cell) in cells.iter().enumerate() {
                let total: u64 = cell.iter().sum();
                if total == 0 {
                    continue;
                }
                let series = (0..SERIES.len()).rev().max_by_key(|&s| cell[s]).unwrap_or(0);
                let depth = 0.2 + 0.8 * (total as f64).ln_1p() / (highest as f64).ln_1p();
                let x = width * column as f64;
                let y = 100.0 - height * (row + 1) as f64;
                let _ = write!(
                    marks,
                    "<g opacity=\"{}\"><title>{} records</title>{}</g>",
                    decimal(depth, 2),
                    grouped(total),
                    rect(SERIES[series].1, x, y, width, height)
                );
            }
        }
        "Dark cells have many records; the colour is that of the most frequent call"
    }
}

/// A row of a chart of horizontal bars.
pub struct BarRow {
    /// Text before the bar.
    pub text: String,
    /// Class of the bar in the style sheet.
    pub class: &'static str,
    /// Length of the bar in records.
    pub count: u64,
}

/// Horizontal bars with their numbers, as a table.
pub fn bars(title: &str, note: &str, rows: &[BarRow], total: u64) -> String {
    let highest = rows.iter().map(|row| row.count).max().unwrap_or(0).max(1);
    let mut body = String::new();
    for row in rows {
        let _ = writeln!(
            body,
            "<tr><th scope=\"row\">{}</th><td class=\"bar\" aria-hidden=\"true\"><svg>{}</svg></td><td>{}</td>\
             <td>{}</td></tr>",
            escape(&row.text),
            rect(row.class, 0.0, 0.0, 100.0 * row.count as f64 / highest as f64, 100.0),
            grouped(row.count),
            percent(row.count, total)
        );
    }
    format!(
        "<figure class=\"chart\">\n<figcaption><h3>{}</h3><p>{}</p></figcaption>\n<table class=\"bars\"><thead \
         class=\"quiet\"><tr><th scope=\"col\">{}</th><td></td><th scope=\"col\">Records</th><th \
         scope=\"col\">Share</th></tr></thead><tbody>\n{body}</tbody></table>\n</figure>\n",
        escape(title),
        escape(note),
        escape(title),
    )
}

/// Neighbouring windows of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CourseStep {
    /// First base, from 0.
    pub start: f64,
    /// One past the last base.
    pub end: f64,
    /// Number of windows with a score.
    pub count: u64,
    /// Sum of their scores.
    pub sum: f64,
    /// Lowest score.
    pub low: f64,
    /// Highest score.
    pub high: f64,
}

/// A region of a record.
pub struct CourseRegion {
    /// First base, from 0.
    pub start: u64,
    /// One past the last base.
    pub end: u64,
    /// Text of the mark.
    pub text: String,
}

/// The course of the score along a record.
pub struct Course {
    /// Length of the record in bases.
    pub length: u64,
    /// Windows, or summaries of neighbouring windows, in order.
    pub steps: Vec<CourseStep>,
    /// Regions, drawn as shaded stretches.
    pub regions: Vec<CourseRegion>,
    /// Score at which a line is drawn.
    pub threshold: Option<f64>,
    /// Text for readers that cannot see the chart.
    pub label: String,
}

impl Course {
    /// The chart.
    pub fn html(&self) -> String {
        let length = self.length.max(1) as f64;
        let mut marks = String::new();
        for CourseRegion { start, end, text } in &self.regions {
            // A region has at least a visible width.
            let x = 100.0 * *start as f64 / length;
            let width = (100.0 * (end - start) as f64 / length).max(0.3);
            let _ = write!(marks, "<g><title>{}</title>{}", escape(text), rect("region", x, 0.0, width, 100.0));
            let _ = write!(
                marks,
                "<rect class=\"region-bar\" x=\"{}%\" y=\"-6\" width=\"{}%\" height=\"4\"/></g>",
                decimal(x, 3),
                decimal(width, 3)
            );
        }
        let mut band = String::new();
        let mut line = String::new();
        let mut steps = [String::new(), String::new()];
        let cut = self.threshold.unwrap_or(0.5);
        let mut joined = false;
        for &CourseStep { start, end, count, sum, low, high } in &self.steps {
            if count == 0 {
                joined = false;
                continue;
            }
            let mean = sum / count as f64;
            // Coordinates of the inner picture of 1000 by 100 units, which is stretched over the plot.
            let [left, middle, right] =
                [start, (start + end) / 2.0, end].map(|base| decimal(1000.0 * base / length, 2));
            let [top, y, bottom] = [high, mean, low].map(|score| decimal(100.0 * (1.0 - score), 2));
            if high > low {
                let _ = write!(band, "M{left} {top}H{right}V{bottom}H{left}Z");
            }
            let _ = write!(steps[usize::from(mean < cut)], "M{left} {y}H{right}");
            let _ = write!(line, "{}{middle} {y}", if joined { "L" } else { "M" });
            joined = true;
        }
        let _ = write!(
            marks,
            "<svg viewBox=\"0 0 1000 100\" preserveAspectRatio=\"none\"><path class=\"band\" d=\"{band}\"/><path \
             class=\"course\" d=\"{line}\"/><path class=\"step l-other\" d=\"{}\"/><path class=\"step l-virus\" \
             d=\"{}\"/></svg>",
            steps[1], steps[0]
        );
        let mut axes = score_lines(&[0.0, 0.5, 1.0]);
        axes.push_str(&self.threshold.map_or(String::new(), horizontal));
        axes.push_str(&bottom_labels(&round_positions(self.length)));
        format!(
            "<svg class=\"plot track\" role=\"img\" aria-label=\"{}\">{axes}{marks}</svg>\n",
            escape(&self.label)
        )
    }
}

/// Labels at 3 to 6 round positions of a record.
fn round_positions(length: u64) -> Vec<AxisLabel> {
    let step = round_step(length as f64, 5.0).max(1.0);
    let numbers = (0..=6).map(|n| n as f64 * step).take_while(|&base| base <= length as f64);
    let label = |base: f64| AxisLabel { position: base / length.max(1) as f64, text: bases(base as u64) };
    numbers.map(label).collect()
}

/// Heights of bars: linear, or logarithmic so that bins with few records stay visible beside those with many.
struct BarScale {
    highest: f64,
    logarithmic: bool,
}

impl BarScale {
    fn new(highest: u64, logarithmic: bool) -> Self {
        BarScale { highest: highest as f64, logarithmic }
    }

    /// Height of a bar, from 0 to 1. On the logarithmic scale a single record is visible.
    fn height(&self, count: u64) -> f64 {
        let count = count as f64;
        if count == 0.0 {
            return 0.0;
        }
        if self.logarithmic {
            // log10(1) is 0, so 0.3 is the height of one record in decades.
            (count.log10() + 0.3) / (self.highest.log10() + 0.3)
        } else {
            count / self.highest
        }
    }

    /// Lines and labels at round numbers.
    fn lines(&self) -> String {
        let mut numbers = vec![];
        if self.logarithmic {
            let decades = self.highest.log10() as u32;
            let step = decades / 4 + 1;
            numbers.extend((0..=decades).step_by(step as usize).map(|power| 10_u64.pow(power)));
        } else {
            let step = round_step(self.highest, 4.0).max(1.0) as u64;
            numbers.extend((0..).map(|n| n * step).take_while(|&n| n as f64 <= self.highest));
        }
        numbers.into_iter().map(|n| left_label(self.height(n), &grouped(n))).collect()
    }
}

/// A rectangle in percent of the plot.
fn rect(class: &str, x: f64, y: f64, width: f64, height: f64) -> String {
    let [x, y, width, height] = [x, y, width, height].map(|n| decimal(n, 3));
    format!("<rect class=\"{class}\" x=\"{x}%\" y=\"{y}%\" width=\"{width}%\" height=\"{height}%\"/>")
}

/// Lines and labels at scores.
fn score_lines(scores: &[f64]) -> String {
    scores.iter().map(|&score| left_label(score, &decimal(score, 2))).collect()
}

/// A thin line across the plot with its label on the left; `height` is from 0 to 1.
pub fn left_label(height: f64, text: &str) -> String {
    let y = decimal(100.0 * (1.0 - height), 2);
    format!(
        "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{y}%\" y2=\"{y}%\"/><text x=\"0\" dx=\"-8\" y=\"{y}%\" \
         dy=\".32em\" text-anchor=\"end\">{text}</text>"
    )
}

/// Ticks below the plot with their labels.
pub fn bottom_labels(ticks: &[AxisLabel]) -> String {
    let mut html = String::new();
    for AxisLabel { position, text } in ticks {
        let x = decimal(100.0 * position, 2);
        let _ = write!(
            html,
            "<line class=\"tick\" x1=\"{x}%\" x2=\"{x}%\" y1=\"100%\" y2=\"100%\"/><text x=\"{x}%\" y=\"100%\" dy=\"18\" \
             text-anchor=\"middle\">{}</text>",
            escape(text)
        );
    }
    html
}

/// A vertical line across the plot with its text.
fn vertical(line: &AxisLabel) -> String {
    let x = decimal(100.0 * line.position, 2);
    format!(
        "<line class=\"threshold\" x1=\"{x}%\" x2=\"{x}%\" y1=\"0\" y2=\"100%\"/><text x=\"{x}%\" y=\"0\" dx=\"5\" \
         dy=\".7em\" class=\"halo\">{}</text>",
        escape(&line.text)
    )
}

/// A horizontal line across the plot at a score.
fn horizontal(score: f64) -> String {
    let y = decimal(100.0 * (1.0 - score), 2);
    format!("<line class=\"threshold\" x1=\"0\" x2=\"100%\" y1=\"{y}%\" y2=\"{y}%\"/>")
}

/// The key of the colours of the series that occur.
fn key(bins: &[SeriesCounts]) -> String {
    let mut entries = String::new();
    for (series, (name, class)) in SERIES.iter().enumerate() {
        if bins.iter().any(|bin| bin[series] > 0) {
            let colour = rect(class, 0.0, 0.0, 100.0, 100.0);
            let _ = write!(entries, "<li><svg aria-hidden=\"true\">{colour}</svg>{name}</li>");
        }
    }
    format!("<ul class=\"key\">{entries}</ul>\n")
}
