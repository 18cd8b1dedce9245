//! Charts of training runs, with one line for each run and series. Invariant: where a point stands for several steps, the line
//! is their mean and the band behind it reaches from their lowest to their highest value; the page says so.

use super::axis::{LinearScale, count};
use super::font;
use super::page::{GAP, MARGIN, PanelArea, PicturePage};
use super::scene::{
    Color, Paint, PathStep, Scene, ScenePoint, TextAnchor, TextStyle, point, rectangle, segment,
};
use super::style::{self, AXIS, DARK, GRID, LABEL, REMARK, SOFT, TITLE, WHITE};
use super::track::outline;
use plimsoll_runtime::series::Point;
use plimsoll_train::charts::{self, Axis, Chart, KeyEntry, Line, are_joined, dashes, names};
use plimsoll_train::history::{ExpertLoad, RunHistory};
use std::collections::BTreeMap;

/// Minimum page width, in points, for two charts side by side.
const WIDE: f64 = 340.0;
/// Space left of the axis for its labels.
const LEFT: f64 = 36.0;
const HEIGHT: f64 = 84.0;
/// Height above a chart for its unit, its key and the marks of events.
const ABOVE: f64 = 13.0;
/// Maximum number of columns of a map of expert load.
const MOST_COLUMNS: usize = 200;
/// Maximum number of layers with a map.
const MOST_MAPS: usize = 64;
/// Dashes of the second, third and further series of a chart.
const DASHES: [[f64; 2]; charts::DASHES] = [[3.0, 1.6], [1.2, 1.2], [6.0, 1.6]];
/// Maximum number of events that are marked; more would be a solid bar.
const MOST_EVENTS: usize = 200;

/// The picture of charts. `log`: charts for which it is suitable have a logarithmic axis.
pub fn curves(runs: &[RunHistory], charts: &[Chart], log: bool, width: f64) -> Scene {
    let mut page = headed_page(runs, width);
    let columns = if page.scene.width >= WIDE && charts.len() > 1 { 2 } else { 1 };
    let width = (page.inner_width() - GAP * (columns - 1) as f64) / columns as f64;
    for row in charts.chunks(columns) {
        let top = page.y + GAP;
        for (column, chart) in row.iter().enumerate() {
            let x = MARGIN + (width + GAP) * column as f64;
            page.name(x, top, width, &chart.title);
            page.y = draw(&mut page.scene, PanelArea { x, y: top + 4.0, width }, chart, runs, log);
        }
    }
    let mut remarks = vec![];
    if are_joined(charts) {
        remarks.push("a line is the mean of neighbouring steps, and its band their range".to_owned());
    }
    let events: u64 = runs.iter().map(|run| run.event_count).sum();
    let marked = runs.iter().map(|run| run.marked_events(MOST_EVENTS).count() as u64).sum::<u64>();
    if events > 0 {
        let of_all = if marked < events { format!(" of {}", count(events)) } else { String::new() };
        remarks.push(format!("triangles: {}{of_all}", super::counted(marked, "event")));
    }
    if !remarks.is_empty() {
        page.y += 8.0;
        page.remarks(&remarks);
    }
    page.finish()
}

/// The picture of the load of the experts: a map for each run and layer.
pub fn loads(runs: &[RunHistory], width: f64) -> Scene {
    let mut page = headed_page(runs, width);
    page.remarks(&[
        "expert by step".to_owned(),
        "grey: an even share of the rows, blue: less, red: more, up to twice an even share".to_owned(),
    ]);
    let names = names(runs);
    for (title, load) in charts::loads(runs, &names).take(MOST_MAPS) {
        page.panel(&title);
        let area = page.free_area();
        page.y = load_map(&mut page.scene, area, load, runs);
    }
    let all = charts::loads(runs, &names).count();
    if all > MOST_MAPS {
        page.y += 6.0;
        page.remarks(&[format!("the first {MOST_MAPS} of {all} maps")]);
    }
    page.finish()
}

/// A page with a title and the names of the runs.
fn headed_page(runs: &[RunHistory], width: f64) -> PicturePage {
    let names = names(runs);
    let title = match &names[..] {
        [only] => only.clone(),
        all => format!("{} training runs", all.len()),
    };
    let mut page = PicturePage::new(width, format!("plimsoll: {title}"));
    page.text(TITLE, &title, 10.0);
    match runs {
        [only] => page.remarks(&about(only)),
        _ => legend(&mut page, runs, &names),
    }
    page
}

/// Steps, state, device and program of a run.
fn about(run: &RunHistory) -> Vec<String> {
    [super::counted(run.last_step, "step")].into_iter().chain(run.about()).collect()
}

/// The colours of the runs, in lines.
fn legend(page: &mut PicturePage, runs: &[RunHistory], names: &[String]) {
    let mut x = MARGIN;
    let right = MARGIN + page.inner_width();
    for (place, (run, name)) in runs.iter().zip(names).enumerate() {
        let about = about(run)[..].iter().take(2).cloned().collect::<Vec<_>>().join(", ");
        let text = font::shorten(&format!("{name} ({about})"), LABEL, page.inner_width() - 18.0);
        let wide = 14.0 + font::width(&text, LABEL);
        if x > MARGIN && x + wide > right {
            x = MARGIN;
            page.y += 9.5;
        }
        page.scene.rectangle(x, page.y + 2.4, 10.0, 2.4, style::run_ink(place));
        page.scene.text(x + 14.0, page.y + 5.8, TextAnchor::Start, LABEL, text);
        x += wide + 12.0;
    }
    page.y += 11.0;
}

/// Scales of a chart of training runs.
struct ChartAxes {
    across: LinearScale,
    up: Axis,
    top: f64,
    bottom: f64,
}

impl ChartAxes {
    /// Coordinate of a value; `None` if the axis has no place for it.
    fn y(&self, value: f64) -> Option<f64> {
        self.up.at(value).map(|height| self.at(height))
    }

    /// Coordinate of a height from 0 to 1.
    fn at(&self, height: f64) -> f64 {
        self.bottom - height.clamp(0.0, 1.0) * (self.bottom - self.top)
    }

    /// Coordinate of the middle of a point's steps.
    fn x(&self, point: &Point) -> f64 {
        self.across.at(point.first.midpoint(point.last) as f64)
    }

    /// Point of the picture at which a value is drawn: at the bottom if the axis has no place for it.
    fn place(&self, series_point: &Point, value: f64) -> ScenePoint {
        point(self.x(series_point), self.y(value).unwrap_or(self.bottom))
    }
}

/// Draws a chart; returns the bottom coordinate.
fn draw(scene: &mut Scene, area: PanelArea, chart: &Chart, runs: &[RunHistory], log: bool) -> f64 {
    let top = area.y + ABOVE;
    let bottom = area.y + ABOVE + HEIGHT;
    let across = step_scale(area, runs);
    let axes = ChartAxes { across, up: chart.axis(log && chart.suits_log), top, bottom };
    grid(scene, &axes, chart);
    ruler(scene, &axes.across, bottom);
    for (limit, height) in chart.limits_on(&axes.up) {
        let y = axes.at(height);
        let ink = if runs.len() > 1 { style::run_ink(limit.run) } else { DARK };
        scene.dashed(point(axes.across.from, y), point(axes.across.to, y), ink, 0.6);
        scene.text(axes.across.to, y - 2.0, TextAnchor::End, REMARK, limit.name);
    }
    events(scene, &axes, runs);
    for line in &chart.lines {
        band(scene, &axes, line);
    }
    for line in &chart.lines {
        curve(scene, &axes, line);
    }
    key(scene, &axes, chart, runs.len());
    bottom + 12.0
}

/// The axis of the steps of all runs, which begins at 0 and lies right of the labels of the other axis.
fn step_scale(area: PanelArea, runs: &[RunHistory]) -> LinearScale {
    LinearScale { from: area.x + LEFT, to: area.x + area.width, end: charts::last_step(runs) as f64 }
}

/// Draws the labelled lines of the values, and the unit.
fn grid(scene: &mut Scene, axes: &ChartAxes, chart: &Chart) {
    let (factor, unit) = chart.unit.scale(axes.up.high.abs());
    for (value, label) in axes.up.ticks(5.0, factor) {
        let Some(y) = axes.y(value) else { continue };
        scene.line(point(axes.across.from, y), point(axes.across.to, y), GRID, 0.5);
        scene.text(axes.across.from - 4.0, y + 2.3, TextAnchor::End, REMARK, label);
    }
    let words = [unit, if axes.up.log { "log" } else { "" }];
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    scene.text(axes.across.from, axes.top - 4.5, TextAnchor::Start, REMARK, words.join(", "));
}

/// Draws the axis of the steps below a chart.
fn ruler(scene: &mut Scene, across: &LinearScale, bottom: f64) {
    scene.line(point(across.from, bottom), point(across.to, bottom), AXIS, 0.6);
    let ticks = across.ticks(((across.to - across.from) / 42.0) as u64);
    for (place, &tick) in ticks.iter().enumerate() {
        let x = across.at(tick as f64);
        scene.line(point(x, bottom), point(x, bottom + 2.0), AXIS, 0.6);
        let text = if place == 0 { "step 0".to_owned() } else { count(tick) };
        // The label of the last tick ends with the axis, so that it does not leave the page.
        let is_last = x + font::width(&text, REMARK) / 2.0 > across.to;
        let (x, anchor) = if is_last { (across.to, TextAnchor::End) } else { (x, TextAnchor::Middle) };
        scene.text(x, bottom + 9.5, anchor, REMARK, text);
    }
}

/// Marks the steps of events by triangles above the chart.
fn events(scene: &mut Scene, axes: &ChartAxes, runs: &[RunHistory]) {
    for (place, run) in runs.iter().enumerate() {
        let ink = if runs.len() > 1 { style::run_ink(place) } else { SOFT };
        let mut triangles = vec![];
        for (step, _) in run.marked_events(MOST_EVENTS) {
            let x = axes.across.at(step as f64).min(axes.across.to);
            let y = axes.top;
            let corners = [point(x - 1.8, y - 3.4), point(x + 1.8, y - 3.4), point(x, y)];
            triangles.extend(outline(corners.into_iter(), true));
        }
        scene.shape(triangles, Paint::Fill(ink));
    }
}

/// The parts of a line between points that have no place on the axis.
fn drawn_parts<'a>(axes: &ChartAxes, line: &'a Line) -> Vec<&'a [Point]> {
    line.points.split(|point| axes.y(point.high).is_none()).filter(|part| !part.is_empty()).collect()
}

/// Fills the range of points that stand for several steps.
fn band(scene: &mut Scene, axes: &ChartAxes, line: &Line) {
    let ink = style::run_ink(line.run).towards(WHITE, 0.72);
    let lowest = axes.up.low;
    for part in drawn_parts(axes, line) {
        if part.iter().all(|point| point.low == point.high) {
            continue;
        }
        let upper = part.iter().map(|p| axes.place(p, p.high));
        let lower = part.iter().rev().map(|p| axes.place(p, p.low.max(lowest)));
        scene.shape(outline(upper.chain(lower), true), Paint::Fill(ink));
    }
}

/// Draws the line through the means of the points, and a square at each point of a marked line.
fn curve(scene: &mut Scene, axes: &ChartAxes, line: &Line) {
    let ink = style::run_ink(line.run);
    let dash = dashes(line.place, line.marked).map(|number| DASHES[number]);
    let mut marks = vec![];
    for part in drawn_parts(axes, line) {
        let places: Vec<ScenePoint> =
            part.iter().filter_map(|p| Some(point(axes.x(p), axes.y(p.mean())?))).collect();
        if line.marked {
            marks.extend(places.iter().flat_map(|p| rectangle(p.x - 1.5, p.y - 1.5, 3.0, 3.0)));
        }
        scene.shape(outline(places.into_iter(), false), Paint::Stroke { ink, width: 1.0, dash });
    }
    scene.shape(marks, Paint::Fill(ink));
}

/// Names the series of a chart with several series, to the right above it.
fn key(scene: &mut Scene, axes: &ChartAxes, chart: &Chart, runs: usize) {
    let series = chart.key();
    if series.is_empty() {
        return;
    }
    let ink = if runs > 1 { SOFT } else { style::run_ink(chart.lines[0].run) };
    let mut x = axes.across.to;
    let y = axes.top - 4.5;
    let text_width = (axes.across.to - axes.across.from - 30.0) / series.len() as f64 - 18.0;
    for KeyEntry { name, dashes, marked } in series.into_iter().rev() {
        let text = font::shorten(name, REMARK, text_width);
        scene.text(x, y, TextAnchor::End, REMARK, &*text);
        x -= font::width(&text, REMARK) + 14.0;
        let dash = dashes.map(|number| DASHES[number]);
        let middle = y - 2.3;
        let line = segment(point(x, middle), point(x + 11.0, middle)).to_vec();
        scene.shape(line, Paint::Stroke { ink, width: 1.0, dash });
        if marked {
            scene.rectangle(x + 4.0, middle - 1.5, 3.0, 3.0, ink);
        }
        x -= 7.0;
    }
}

/// Draws the shares of the experts of a layer; returns the bottom coordinate.
fn load_map(scene: &mut Scene, area: PanelArea, load: &ExpertLoad, runs: &[RunHistory]) -> f64 {
    let y = area.y;
    let across = step_scale(area, runs);
    let row = (64.0 / load.experts as f64).clamp(0.75, 8.0);
    let bottom = y + row * load.experts as f64;
    let mut cells: BTreeMap<Color, Vec<PathStep>> = BTreeMap::new();
    let columns = load.thinned(MOST_COLUMNS);
    for (place, column) in columns.iter().enumerate() {
        // A step fills the space from the step before it, as it does in the time of the run.
        let end = columns.get(place + 1).map_or(column.last, |next| next.first.saturating_sub(1));
        let [left, right] = [column.first.saturating_sub(1), end].map(|step| across.at(step as f64));
        for (expert, share) in column.shares().enumerate() {
            let ink = style::shade((share * load.experts as f64 / 2.0).clamp(0.0, 1.0));
            let cell = rectangle(left, y + row * expert as f64, right - left, row);
            cells.entry(ink).or_default().extend(cell);
        }
    }
    for (ink, steps) in cells {
        scene.shape(steps, Paint::Cells(ink));
    }
    let label = TextStyle { size: 6.0, ..REMARK };
    for expert in [0, load.experts - 1] {
        let middle = y + row * (expert as f64 + 0.5) + 2.1;
        let middle = if expert == 0 { middle.max(y + 4.4) } else { middle.max(y + 10.4) };
        if expert == 0 || load.experts > 1 {
            scene.text(across.from - 4.0, middle, TextAnchor::End, label, format!("expert {expert}"));
        }
    }
    ruler(scene, &across, bottom + 1.0);
    bottom + 13.0
}
