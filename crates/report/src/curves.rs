//! A chart of training runs as inline SVG, and the map of the load of experts. Invariant: a chart is complete without a script,
//! which replaces its marks by equal ones when runs are hidden or the range of steps changes.

use crate::chart::{AxisLabel, bottom_labels, left_label};
use crate::html::{decimal, escape, grouped};
use plimsoll_runtime::series::Point;
use plimsoll_train::charts::{Axis, Chart, KeyEntry, Line, dashes};
use plimsoll_train::history::{ExpertLoad, RunEvent};
use std::fmt::Write;

/// Number of shades of a map of expert load; the middle one is an even share.
const SHADES: usize = 17;
/// Units of the inner picture, which is stretched over the plot.
const UNITS: f64 = 1000.0;

/// An event that a chart marks.
#[derive(Clone, Copy)]
pub struct MarkedEvent<'a> {
    /// Index of the run.
    pub run: usize,
    /// The event.
    pub event: &'a RunEvent,
}

/// A chart on a page.
pub struct Curves<'a> {
    /// The chart.
    pub chart: &'a Chart,
    /// Names of the runs.
    pub names: &'a [String],
    /// Last step of the axis, which begins at 0.
    pub end: u64,
    /// Events to mark.
    pub events: &'a [MarkedEvent<'a>],
    /// Maximum number of points of a line that are drawn without a script.
    pub max_points: usize,
}

impl Curves<'_> {
    /// The chart.
    pub fn html(&self) -> String {
        let chart = self.chart;
        let axis = chart.axis(false);
        let (factor, unit) = chart.unit.scale(axis.high.abs());
        let mut axes = String::new();
        for (value, label) in axis.ticks(5.0, factor) {
            axes.push_str(&axis.at(value).map_or(String::new(), |height| left_label(height, &label)));
        }
        axes.push_str(&bottom_labels(&steps(self.end)));
        let mut marks: String = self.events.iter().map(|marked| self.event(marked)).collect();
        for (limit, height) in chart.limits_on(&axis) {
            let y = decimal(100.0 * (1.0 - height), 2);
            let _ = write!(
                marks,
                "<line class=\"limit r{}\" x1=\"0\" x2=\"100%\" y1=\"{y}%\" y2=\"{y}%\"><title>{} of {}: {}</title></line>",
                limit.run,
                limit.name,
                escape(&self.names[limit.run]),
                chart.unit.text(limit.value)
            );
        }
        let mut inner = String::new();
        let mut dots = String::new();
        for line in &chart.lines {
            self.line(line, &axis, &mut inner, &mut dots);
        }
        let note = if unit.is_empty() { "by step".to_owned() } else { format!("{unit}, by step") };
        format!(
            "<figure class=\"chart curves\" data-chart=\"{}\">\n<figcaption><h3>{}</h3><p>{note}{}</p></figcaption>\n\
             <svg class=\"plot\" role=\"img\" aria-label=\"{} of {}, by step\">{axes}{marks}<svg viewBox=\"0 0 {UNITS} {UNITS}\" \
             preserveAspectRatio=\"none\">{inner}</svg>{dots}</svg>\n</figure>\n",
            escape(&chart.id),
            escape(&chart.title),
            self.key(),
            escape(&chart.title),
            escape(&self.names.join(", ")),
        )
    }

    /// The names of the series with their dashes, where the chart has several.
    fn key(&self) -> String {
        let mut entries = String::new();
        for KeyEntry { name, dashes, marked } in self.chart.key() {
            let dot = if marked { "<circle cx=\"50%\" cy=\"50%\" r=\"3\"/>" } else { "" };
            let _ = write!(
                entries,
                "<span class=\"series\"><svg aria-hidden=\"true\"><line class=\"{}\" x1=\"0\" x2=\"100%\" y1=\"50%\" \
                 y2=\"50%\"/>{dot}</svg>{}</span>",
                class(dashes),
                escape(name)
            );
        }
        entries
    }

    /// Position of a step, from 0 to 1.
    fn x(&self, step: f64) -> f64 {
        step / self.end.max(1) as f64
    }

    /// The mark of an event: a line across the plot with a square above it.
    fn event(&self, marked: &MarkedEvent<'_>) -> String {
        let MarkedEvent { run, event } = *marked;
        let Some(step) = event.step else { return String::new() };
        let x = decimal(100.0 * self.x(step as f64), 2);
        format!(
            "<g class=\"event r{run}\"><title>{}, step {}: {} {}</title><line x1=\"{x}%\" x2=\"{x}%\" y1=\"0\" y2=\"100%\"/><rect \
             x=\"{x}%\" y=\"-8\" width=\"4\" height=\"8\" transform=\"translate(-2 0)\"/></g>",
            escape(&self.names[run]),
            grouped(step),
            escape(&event.name),
            escape(&event.text)
        )
    }

    /// Appends the band and the line to `inner`, and the dots of a marked line to `dots`.
    fn line(&self, line: &Line, axis: &Axis, inner: &mut String, dots: &mut String) {
        let points = Point::in_groups(&line.points, self.max_points);
        let mut curve = String::new();
        let mut upper = String::new();
        let mut lower = vec![];
        for point in &points {
            let [Some(high), Some(low), Some(mean)] =
                [point.high, point.low, point.mean()].map(|v| inner_y(axis, v))
            else {
                continue;
            };
            let letter = if curve.is_empty() { "M" } else { "L" };
            let x = decimal(UNITS * self.x(point.first.midpoint(point.last) as f64), 1);
            let _ = write!(curve, "{letter}{x} {}", decimal(mean, 1));
            let _ = write!(upper, "{letter}{x} {}", decimal(high, 1));
            lower.push(format!("L{x} {}", decimal(low, 1)));
            if line.marked {
                let x = decimal(100.0 * self.x(point.first as f64), 2);
                let y = decimal(mean / UNITS * 100.0, 2);
                let _ = write!(dots, "<circle class=\"r{}\" cx=\"{x}%\" cy=\"{y}%\" r=\"3\"/>", line.run);
            }
        }
        if points.iter().any(|point| point.low < point.high) {
            let lower: String = lower.iter().rev().map(String::as_str).collect();
            let _ = write!(inner, "<path class=\"range r{}\" d=\"{upper}{lower}Z\"/>", line.run);
        }
        let class = class(dashes(line.place, line.marked));
        let _ = write!(inner, "<path class=\"{class} r{}\" d=\"{curve}\"/>", line.run);
    }
}

/// Vertical coordinate of a value in the inner picture; `None` if the axis has no place for it.
fn inner_y(axis: &Axis, value: f64) -> Option<f64> {
    axis.at(value).map(|height| UNITS * (1.0 - height.clamp(0.0, 1.0)))
}

/// Class of a line with these dashes.
fn class(dashes: Option<usize>) -> String {
    dashes.map_or("line".to_owned(), |number| format!("line d{}", number + 1))
}

/// Labels at round steps.
pub fn steps(end: u64) -> Vec<AxisLabel> {
    let axis = Axis::new(0.0, end.max(1) as f64, false);
    let ticks = axis.ticks(5.0, 1.0).into_iter();
    let whole_only = ticks.filter(|(step, _)| step.fract() == 0.0);
    whole_only
        .map(|(step, _)| AxisLabel { position: step / end.max(1) as f64, text: grouped(step as u64) })
        .collect()
}

/// The map of the load of the experts of a layer: a row for each expert, a column for each range of steps.
pub fn load_map(title: &str, load: &ExpertLoad, end: u64, max_columns: usize) -> String {
    let columns = load.thinned(max_columns);
    let mut paths = vec![String::new(); SHADES];
    // A step fills the space from the step before it, so a column begins where the last step of the one before it ends.
    let edges =
        columns.iter().map(|column| column.first.saturating_sub(1)).chain(columns.last().map(|last| last.last));
    let edges: Vec<f64> = edges.map(|step| UNITS * step as f64 / end.max(1) as f64).collect();
    let shades: Vec<Vec<usize>> = columns
        .iter()
        .map(|column| column.shares().map(|share| shade(share * load.experts as f64)).collect())
        .collect();
    for expert in 0..load.experts {
        let of_expert: Vec<usize> = shades.iter().map(|column| column[expert]).collect();
        let mut column = 0;
        while column < columns.len() {
            // Neighbours of one shade are one rectangle.
            let first = column;
            let shade = of_expert[column];
            while column + 1 < columns.len() && of_expert[column + 1] == shade {
                column += 1;
            }
            let from = edges[first];
            let to = edges[column + 1];
            let _ = write!(paths[shade], "M{} {expert}H{}v1H{0}z", decimal(from, 1), decimal(to, 1));
            column += 1;
        }
    }
    let drawn = paths.iter().enumerate().filter(|(_, path)| !path.is_empty());
    let drawn: String = drawn.map(|(shade, path)| format!("<path class=\"e{shade}\" d=\"{path}\"/>")).collect();
    let last = load.experts - 1;
    let first_label = expert_label(0, load.experts);
    let labels = if last == 0 { first_label } else { first_label + &expert_label(last, load.experts) };
    format!(
        "<figure class=\"chart load\">\n<figcaption><h3>{}</h3></figcaption>\n<svg class=\"plot map\" role=\"img\" \
         aria-label=\"Load of the experts, {}\"><svg viewBox=\"0 0 {UNITS} {}\" preserveAspectRatio=\"none\" \
         shape-rendering=\"crispEdges\">{drawn}</svg>{labels}{}</svg>\n</figure>\n",
        escape(title),
        escape(title),
        load.experts,
        bottom_labels(&steps(end)),
    )
}

/// The label of an expert beside its row: that of a chart's axis without the line.
fn expert_label(expert: usize, experts: usize) -> String {
    let height = 1.0 - (expert as f64 + 0.5) / experts as f64;
    let label = left_label(height, &format!("expert {expert}"));
    label.split_once("<text").map_or(String::new(), |(_, text)| format!("<text{text}"))
}

/// The shade of a share in even shares: 0 for none, the middle for an even share, the last for twice an even share and more.
fn shade(even: f64) -> usize {
    let last = (SHADES - 1) as f64;
    (even * last / 2.0).round().clamp(0.0, last) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_are_centred_on_an_even_share() {
        for (even, wanted) in [(0.0, 0), (0.5, 4), (1.0, 8), (1.5, 12), (2.0, 16), (7.0, 16), (f64::NAN, 0)] {
            assert_eq!(shade(even), wanted, "{even}");
        }
    }

    #[test]
    fn labels_of_steps_are_whole() {
        let labels = |end| steps(end).into_iter().map(|label| label.text).collect::<Vec<_>>().join(" ");
        assert_eq!(labels(3), "0 1 2 3");
        assert_eq!(labels(200), "0 50 100 150 200");
        assert_eq!(labels(11_500), "0 5000 10\u{202f}000");
        assert_eq!(labels(0), "0 1");
    }
}
