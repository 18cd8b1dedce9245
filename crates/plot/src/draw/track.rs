//! Score track of a record: score against position. Invariant: a window is drawn over exactly its own bases, at
//! its score, in the colour of its call. If there are too many windows to draw each, every column shows the
//! minimum, mean and maximum of its scores.

use super::axis::{LinearScale, base_labels, bases, count, counted, score, separate_labels};
use super::font;
use super::page::PanelArea;
use super::scene::{
    Color, Paint, PathStep, Scene, ScenePoint, TextAnchor, TextStyle, hatch, point, rectangle, segment,
};
use super::style::{self, AXIS, DARK, GRID, LABEL, NAME, REMARK, WHITE};
use crate::results::About;
use crate::survey::PredictionRow;
use crate::track::{RecordTrack, TrackColumn, columns, uncalled_intervals};
use plimsoll_virus::output::Call;
use std::collections::BTreeMap;
use std::ops::Range;

const LEFT: f64 = 32.0;
const RIGHT: f64 = 54.0;
const HEIGHT: f64 = 56.0;
/// Height of the row of one strand.
const STRAND: f64 = 6.0;
const BETWEEN: f64 = 1.2;
/// Minimum width of a window that is drawn individually, in points.
const NARROWEST: f64 = 1.0;
/// Score at which the consensus of a window changes.
const EVEN: f64 = 0.5;

/// Scales and positions of a track.
struct TrackAxes {
    across: LinearScale,
    up: LinearScale,
    /// Top of the row of each strand; `None` if scores are of both strands together.
    strands: Option<[f64; 2]>,
}

impl TrackAxes {
    /// Coordinate of a base, counted from 0.
    fn x(&self, base: u64) -> f64 {
        self.across.at(base as f64)
    }
}

/// Draws a track; returns the bottom coordinate.
pub fn draw(scene: &mut Scene, area: PanelArea, track: &RecordTrack, about: &About) -> f64 {
    heading(scene, area, &track.entry, about);
    let top = area.y + 32.0;
    let bottom = area.y + 32.0 + HEIGHT;
    let end = track.entry.length.max(1) as f64;
    let first = bottom + 6.0;
    let axes = TrackAxes {
        across: LinearScale { from: area.x + LEFT, to: area.x + area.width - RIGHT, end },
        up: LinearScale { from: bottom, to: top, end: 1.0 },
        strands: about.by_strand.then_some([first, first + STRAND + BETWEEN]),
    };
    grid(scene, &axes);
    let inner_width = axes.across.to - axes.across.from;
    if track.windows.len() as f64 * NARROWEST <= inner_width {
        windows(scene, &axes, track);
    } else {
        let columns = columns(&track.windows, track.entry.length, inner_width as usize);
        envelope(scene, &axes, &columns);
        let column_bases = bases(track.entry.length / columns.len().max(1) as u64);
        let text = font::shorten(&format!("range and mean of each {column_bases}"), REMARK, inner_width);
        // Above the bars of regions.
        let above = if track.entry.regions.is_empty() { 5.0 } else { 8.0 };
        scene.text(axes.across.to, top - above, TextAnchor::End, REMARK, text);
    }
    regions(scene, &axes, &track.entry);
    labels(scene, &axes, track, about);
    let foot = axes.strands.map_or(bottom, |strands| strands[1] + STRAND);
    ruler(scene, &axes, foot + 2.5);
    foot + 14.0
}

/// Draws the id, length, call and counts of the record.
fn heading(scene: &mut Scene, area: PanelArea, entry: &PredictionRow, about: &About) {
    let PanelArea { x, y, width } = area;
    let length = bases(entry.length);
    let inner_width = width - font::width(&length, REMARK) - 10.0;
    scene.text(x, y + 7.5, TextAnchor::Start, NAME, font::shorten(&entry.id, NAME, inner_width));
    scene.text(x + width, y + 7.5, TextAnchor::End, REMARK, length);
    let kind = TextStyle { bold: true, ink: style::word_ink(entry.call), ..LABEL };
    let word = style::word(entry.call);
    scene.text(x, y + 16.5, TextAnchor::Start, kind, word);
    let silent = entry.windows - entry.scored;
    let mut parts = vec![];
    parts.extend(entry.score.map(|number| format!("{} {number:.3}", score_names(about).long)));
    match entry.virus {
        Some(virus) if entry.scored > 0 => {
            parts.push(format!("{} of {} scored windows virus", count(virus), count(entry.scored)));
        }
        Some(_) | None => {
            parts.push(format!("{} of {} windows scored", count(entry.scored), count(entry.windows)))
        }
    }
    if !entry.regions.is_empty() {
        parts.push(format!("{} (bar)", counted(entry.regions.len() as u64, "region")));
    }
    if silent > 0 && entry.virus.is_some() && entry.scored > 0 {
        parts.push(format!("{} without a call", count(silent)));
    }
    let from = x + font::width(word, kind) + 5.0;
    // Omit the last parts first, because the track itself shows them too.
    while parts.len() > 1 && font::width(&parts.join(" · "), REMARK) > x + width - from {
        parts.pop();
    }
    scene.text(from, y + 16.5, TextAnchor::Start, REMARK, parts.join(" · "));
}

/// Names of the score of a record.
struct ScoreNames {
    long: &'static str,
    short: &'static str,
}

/// Names of the score of a record. That of a caller is calibrated for the length of the record, so it is not the mean of the
/// scores of its windows.
fn score_names(about: &About) -> ScoreNames {
    if about.by_strand {
        ScoreNames { long: "mean score", short: "mean" }
    } else {
        ScoreNames { long: "score", short: "record" }
    }
}

/// Draws the score axis, its grid lines and the names of the strands.
fn grid(scene: &mut Scene, axes: &TrackAxes) {
    let left = axes.across.from;
    let right = axes.across.to;
    for tick in [0.0, EVEN, 1.0] {
        let y = axes.up.at(tick);
        scene.line(point(left, y), point(right, y), GRID, 0.5);
        scene.text(left - 4.0, y + 2.3, TextAnchor::End, REMARK, score(tick));
    }
    scene.text(left - 4.0, axes.up.to - 5.0, TextAnchor::End, REMARK, "score");
    for (top, name) in axes.strands.into_iter().flatten().zip(["+ strand", "− strand"]) {
        scene.text(left - 4.0, top + STRAND - 0.9, TextAnchor::End, REMARK, name);
    }
}

/// Draws a bar for each region, from its first to its last base, just above the line of score 1.
fn regions(scene: &mut Scene, axes: &TrackAxes, entry: &PredictionRow) {
    let mut bars = vec![];
    for region in &entry.regions {
        let [left, right] = [region.start - 1, region.end].map(|base| axes.x(base));
        // A region of a very long record stays visible.
        let width = (right - left).max(NARROWEST);
        bars.extend(rectangle(left.min(axes.across.to - width), axes.up.to - 4.0, width, 2.0));
    }
    scene.shape(bars, Paint::Fill(style::ink(Call::Virus)));
}

/// Draws every window individually.
fn windows(scene: &mut Scene, axes: &TrackAxes, track: &RecordTrack) {
    let mut lines: BTreeMap<usize, (Call, Vec<PathStep>)> = BTreeMap::new();
    let mut tints = CellsByColor::default();
    let mut cells = CellsByColor::default();
    let even = axes.up.at(EVEN);
    for window in &track.windows {
        let left = axes.x(window.start);
        let right = axes.x(window.end);
        if let Some(number) = window.score {
            let y = axes.up.at(number);
            let tint = style::ink(window.call).towards(WHITE, 0.78);
            tints.add(tint, rectangle(left, y.min(even), right - left, (y - even).abs()));
            let key = crate::survey::call_index(window.call);
            let line = segment(point(left, y), point(right, y));
            lines.entry(key).or_insert((window.call, vec![])).1.extend(line);
        }
        for (strand, top) in window.strands.into_iter().zip(axes.strands.into_iter().flatten()) {
            if let Some(number) = strand {
                cells.add(style::shade(number), rectangle(left, top, right - left, STRAND));
            }
        }
    }
    tints.draw(scene);
    for (call, steps) in lines.into_values() {
        scene.shape(steps, Paint::Stroke { ink: style::ink(call), width: 1.5, dash: None });
    }
    let uncalled = uncalled_intervals(&track.windows).into_iter();
    hatch_uncalled(scene, axes, uncalled.map(|(start, end)| axes.x(start)..axes.x(end)));
    cells.draw(scene);
}

/// Draws the range and the mean of the scores in columns, for more windows than the width can show.
fn envelope(scene: &mut Scene, axes: &TrackAxes, columns: &[TrackColumn]) {
    let width = (axes.across.to - axes.across.from) / columns.len() as f64;
    let envelope = Envelope { axes, columns, width };
    // The band between minimum and maximum is cut at `EVEN`: each half has the colour of its call.
    let mut above = vec![];
    let mut below = vec![];
    for run in runs(columns.len(), |index| columns[index].scores.count > 0) {
        above.extend(envelope.band(run.clone(), EVEN, 1.0));
        below.extend(envelope.band(run, 0.0, EVEN));
    }
    let high_ink = style::ink(Call::Virus);
    let low_ink = style::ink(Call::Other);
    scene.shape(above, Paint::Fill(high_ink.towards(WHITE, 0.62)));
    scene.shape(below, Paint::Fill(low_ink.towards(WHITE, 0.62)));
    for (is_virus, ink) in [(false, low_ink), (true, high_ink)] {
        scene.shape(envelope.mean_line(is_virus), Paint::Stroke { ink, width: 0.9, dash: None });
    }
    let is_uncalled =
        |index: usize| columns[index].windows > 0 && columns[index].windows == columns[index].silent;
    let uncalled = runs(columns.len(), is_uncalled).into_iter();
    hatch_uncalled(scene, axes, uncalled.map(|run| envelope.left(run.start)..envelope.left(run.end)));
    let mut cells = CellsByColor::default();
    for (index, column) in columns.iter().enumerate() {
        for (strand, top) in column.strands.iter().zip(axes.strands.into_iter().flatten()) {
            if let Some(mean) = strand.mean() {
                cells.add(style::shade(mean), rectangle(envelope.left(index), top, width, STRAND));
            }
        }
    }
    cells.draw(scene);
}

/// The columns of a track, from left to right.
struct Envelope<'a> {
    axes: &'a TrackAxes,
    columns: &'a [TrackColumn],
    /// Width of a column in points.
    width: f64,
}

impl Envelope<'_> {
    /// Left edge of a column, which is the right edge of the column before it.
    fn left(&self, index: usize) -> f64 {
        self.axes.across.from + self.width * index as f64
    }

    /// Upper or lower edge of a column at a score: its left and its right end.
    fn edge(&self, index: usize, score: f64) -> [ScenePoint; 2] {
        let y = self.axes.up.at(score);
        [point(self.left(index), y), point(self.left(index + 1), y)]
    }

    /// Area between the lowest and the highest scores of the columns of `run`, as far as they are in `low..=high`.
    fn band(&self, run: Range<usize>, low: f64, high: f64) -> Vec<PathStep> {
        let upper = run.clone().flat_map(|i| self.edge(i, self.columns[i].scores.high.clamp(low, high)));
        // Back from the right end to the left one.
        let lower = run.rev().flat_map(|i| {
            let [left, right] = self.edge(i, self.columns[i].scores.low.clamp(low, high));
            [right, left]
        });
        outline(upper.chain(lower), true)
    }

    /// Line through the means of the columns whose mean has the call "virus", or of the other columns with a score.
    fn mean_line(&self, is_virus: bool) -> Vec<PathStep> {
        let mean = |index: usize| self.columns[index].scores.mean();
        let runs = runs(self.columns.len(), |i| mean(i).is_some_and(|mean| (mean >= EVEN) == is_virus));
        let runs = runs.into_iter();
        runs.flat_map(|run| outline(run.flat_map(|i| self.edge(i, mean(i).unwrap_or(EVEN))), false)).collect()
    }
}

/// Maximal ranges of consecutive indices for which `is` is true.
fn runs(count: usize, is: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = vec![];
    for index in (0..count).filter(|&index| is(index)) {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

/// Path through the points.
pub fn outline(points: impl Iterator<Item = ScenePoint>, close: bool) -> Vec<PathStep> {
    let mut steps: Vec<PathStep> = points.map(|point| PathStep::Line(point.x, point.y)).collect();
    if let Some(first) = steps.first_mut()
        && let PathStep::Line(x, y) = *first
    {
        *first = PathStep::Move(x, y);
    }
    if close && !steps.is_empty() {
        steps.push(PathStep::Close);
    }
    steps
}

/// Hatches the intervals without a call, across both strands.
fn hatch_uncalled(scene: &mut Scene, axes: &TrackAxes, intervals: impl Iterator<Item = Range<f64>>) {
    // Without rows for strands, a gap in the track says the same.
    let Some([top, _]) = axes.strands else { return };
    let height = 2.0 * STRAND + BETWEEN;
    let lines = intervals.flat_map(|x| hatch(x.start, top, x.end - x.start, height, 2.6));
    scene.shape(lines.collect(), Paint::Stroke { ink: style::ink(Call::NoCall), width: 0.5, dash: None });
}

/// Rectangles grouped by colour, so that each colour is one path.
#[derive(Default)]
struct CellsByColor(BTreeMap<Color, Vec<PathStep>>);

impl CellsByColor {
    fn add(&mut self, ink: Color, outline: [PathStep; 5]) {
        self.0.entry(ink).or_default().extend(outline);
    }

    fn draw(self, scene: &mut Scene) {
        for (ink, steps) in self.0 {
            scene.shape(steps, Paint::Cells(ink));
        }
    }
}

/// A text of the legend at the height of what it names.
struct LegendText {
    y: f64,
    text: String,
    kind: TextStyle,
}

/// Draws the legend to the right of the track: threshold, mean, calls and hatching.
fn labels(scene: &mut Scene, axes: &TrackAxes, track: &RecordTrack, about: &About) {
    let left = axes.across.from;
    let right = axes.across.to;
    let mut texts = vec![];
    if let Some(threshold) = about.threshold.map(f64::from) {
        let y = axes.up.at(threshold);
        scene.dashed(point(left, y), point(right + 3.0, y), DARK, 0.7);
        texts.push(LegendText { y, text: format!("threshold {}", score(threshold)), kind: REMARK });
    }
    if let Some(mean) = track.entry.score {
        let y = axes.up.at(mean);
        scene.line(point(right, y), point(right + 3.0, y), DARK, 1.4);
        texts.push(LegendText { y, text: format!("{} {mean:.3}", score_names(about).short), kind: LABEL });
    }
    for (y, call) in [(axes.up.to, Call::Virus), (axes.up.from, Call::Other)] {
        let ink = style::word_ink(if about.trained { call } else { Call::Untrained });
        texts.push(LegendText {
            y,
            text: style::word(call).to_owned(),
            kind: TextStyle { bold: true, ink, ..LABEL },
        });
    }
    texts.sort_by(|a, b| a.y.total_cmp(&b.y));
    let mut places: Vec<f64> = texts.iter().map(|text| text.y).collect();
    separate_labels(&mut places, &vec![7.6; texts.len()], axes.up.to - 3.8, axes.up.from + 3.8);
    for (LegendText { text, kind, .. }, y) in texts.into_iter().zip(places) {
        scene.text(right + 5.0, y + 2.3, TextAnchor::Start, kind, text);
    }
    let Some(strands) = axes.strands else { return };
    if track.windows.iter().any(|window| window.call == Call::NoCall) {
        let lines = hatch(right + 5.0, strands[0], 8.0, STRAND, 2.6);
        scene.shape(lines, Paint::Stroke { ink: style::ink(Call::NoCall), width: 0.5, dash: None });
        scene.text(
            right + 15.5,
            strands[0] + STRAND - 0.9,
            TextAnchor::Start,
            REMARK,
            style::word(Call::NoCall),
        );
    }
    if !track.every_frame && about.trained {
        scene.text(right + 5.0, strands[1] + STRAND - 0.9, TextAnchor::Start, REMARK, "best frame only");
    }
}

/// Draws the position axis.
fn ruler(scene: &mut Scene, axes: &TrackAxes, y: f64) {
    scene.line(point(axes.across.from, y), point(axes.across.to, y), AXIS, 0.6);
    // A tick in 42 points leaves room for its label.
    let max_ticks = ((axes.across.to - axes.across.from) / 42.0) as u64;
    let ticks = axes.across.ticks(max_ticks);
    for (tick, label) in ticks.iter().zip(base_labels(&ticks)) {
        let x = axes.x(*tick);
        scene.line(point(x, y), point(x, y + 2.0), AXIS, 0.6);
        scene.text(x, y + 9.5, TextAnchor::Middle, REMARK, label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::track::TrackWindow;
    use plimsoll_virus::output::RegionRow;

    const WIDTH: f64 = LEFT + 400.0 + RIGHT;

    fn drawn(length: u64, windows: &[(u64, u64, Option<f64>)]) -> Scene {
        drawn_with(length, windows, vec![])
    }

    fn drawn_with(length: u64, windows: &[(u64, u64, Option<f64>)], regions: Vec<RegionRow>) -> Scene {
        let window = |&(start, end, score): &(u64, u64, Option<f64>)| {
            let call = score.map_or(Call::NoCall, |s| if s >= 0.5 { Call::Virus } else { Call::Other });
            TrackWindow { start, end, score, call, strands: [score, None] }
        };
        let windows: Vec<TrackWindow> = windows.iter().map(window).collect();
        let call = Call::Virus;
        let score = Some(0.5);
        let count = windows.len() as u64;
        let entry = PredictionRow {
            ordinal: 0,
            id: "r".into(),
            length,
            windows: count,
            scored: 1,
            virus: Some(1),
            score,
            call,
            regions,
        };
        let about = serde_json::json!({
            "plimsoll": "1", "inputs": [], "models": {"trained": true},
            "identity": {"parameters": {"threshold": 0.5, "length": 500}},
            "counts": {"records": 1, "windows": count},
        });
        let about = crate::results::about(&about).unwrap();
        let mut scene = Scene::new(WIDTH, String::new());
        let area = PanelArea { x: 0.0, y: 0.0, width: WIDTH };
        draw(&mut scene, area, &RecordTrack { entry, windows, every_frame: true }, &about);
        scene
    }

    /// The steps of all paths whose paint is `wanted`.
    fn painted(scene: &Scene, wanted: impl Fn(&Paint) -> bool) -> Vec<PathStep> {
        let shapes = scene.items.iter().filter_map(|item| match item {
            super::super::scene::SceneItem::Shape(steps, paint) if wanted(paint) => Some(steps.clone()),
            _ => None,
        });
        shapes.flatten().collect()
    }

    /// Compares the drawn windows of a call: left, right, and score.
    fn check(length: u64, windows: &[(u64, u64, Option<f64>)], call: Call, wanted: &[(f64, f64, f64)]) {
        let scene = drawn(length, windows);
        let edge =
            |paint: &Paint| matches!(paint, Paint::Stroke { ink, width: 1.5, .. } if *ink == style::ink(call));
        let found: Vec<(f64, f64, f64)> = painted(&scene, edge)
            .chunks(2)
            .map(|pair| match pair {
                [PathStep::Move(left, y), PathStep::Line(right, _)] => {
                    (left - LEFT, right - LEFT, (32.0 + HEIGHT - y) / HEIGHT)
                }
                other => panic!("{other:?}"),
            })
            .collect();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let same =
            |(a, b): (&(f64, f64, f64), &(f64, f64, f64))| near(a.0, b.0) && near(a.1, b.1) && near(a.2, b.2);
        assert!(found.len() == wanted.len() && found.iter().zip(wanted).all(same), "{found:?}");
    }

    #[test]
    fn a_window_lies_over_its_own_bases() {
        let windows = [(0, 500, Some(0.9)), (400, 900, Some(0.1)), (500, 1000, Some(0.5))];
        check(1000, &windows, Call::Virus, &[(0.0, 200.0, 0.9), (200.0, 400.0, 0.5)]);
        check(1000, &windows, Call::Other, &[(160.0, 360.0, 0.1)]);
        check(5, &[(0, 5, Some(1.0))], Call::Virus, &[(0.0, 400.0, 1.0)]);
        check(1000, &[(0, 500, None)], Call::Other, &[]);
    }

    #[test]
    fn a_region_has_a_bar_over_its_own_bases() {
        let region = RegionRow { start: 501, end: 1000, score: 30.0, in_second_mate: false };
        let scene = drawn_with(1000, &[(0, 1000, Some(0.9))], vec![region]);
        let bar = painted(&scene, |paint| matches!(paint, Paint::Fill(ink) if *ink == style::ink(Call::Virus)));
        let at = |step: &PathStep| match *step {
            PathStep::Move(x, y) | PathStep::Line(x, y) => Some((x - LEFT, 32.0 - y)),
            PathStep::Close => None,
        };
        let corners: Vec<(f64, f64)> = bar.iter().filter_map(at).collect();
        assert_eq!(corners.len(), 4, "{corners:?}");
        let over = |&(x, above): &(f64, f64)| (200.0..=400.0).contains(&x) && (2.0..=4.0).contains(&above);
        assert!(corners.iter().all(over) && corners.iter().any(|c| c.0 == 200.0), "{corners:?}");
    }

    #[test]
    fn windows_without_a_call_are_hatched_and_nothing_else() {
        let hatched = |windows: &[(u64, u64, Option<f64>)]| {
            let scene = drawn(1000, windows);
            let lines =
                painted(&scene, |p| matches!(p, Paint::Stroke { ink, .. } if *ink == style::ink(Call::NoCall)));
            let x = |step: &PathStep| match *step {
                PathStep::Move(x, _) | PathStep::Line(x, _) => x - LEFT,
                PathStep::Close => panic!("closed"),
            };
            // The hatching to the right of the axis belongs to the legend.
            let inside: Vec<f64> = lines.iter().map(x).filter(|x| *x <= 400.0 + 1e-9).collect();
            (inside.iter().copied().fold(f64::MAX, f64::min), inside.iter().copied().fold(f64::MIN, f64::max))
        };
        let (left, right) = hatched(&[(0, 500, Some(0.9)), (400, 900, None), (800, 1000, Some(0.5))]);
        assert!((200.0..203.0).contains(&left) && (317.0..=320.0).contains(&right), "{left} {right}");
        assert_eq!(hatched(&[(0, 1000, Some(0.5))]), (f64::MAX, f64::MIN));
    }

    #[test]
    fn an_envelope_reaches_the_highest_and_the_lowest_score() {
        let score = |i: u64| match i {
            7_000 => 0.97,
            90_000 => 0.03,
            _ => 0.45 + 0.1 * (i % 2) as f64,
        };
        let windows: Vec<(u64, u64, Option<f64>)> =
            (0..100_000).map(|i| (i * 500, (i + 1) * 500, Some(score(i)))).collect();
        let scene = drawn(50_000_000, &windows);
        let heights = |steps: Vec<PathStep>| -> Vec<(f64, f64)> {
            let at = |step: &PathStep| match *step {
                PathStep::Move(x, y) | PathStep::Line(x, y) => Some((x - LEFT, (32.0 + HEIGHT - y) / HEIGHT)),
                PathStep::Close => None,
            };
            steps.iter().filter_map(at).collect()
        };
        let band = heights(painted(&scene, |paint| matches!(paint, Paint::Fill(_))));
        let of = |wanted: f64| band.iter().find(|(_, y)| (y - wanted).abs() < 1e-9).map(|(x, _)| *x);
        assert_eq!([of(0.97), of(0.03)].map(|x| x.map(f64::round)), [Some(28.0), Some(361.0)]);
        assert!(band.iter().all(|(x, _)| (-1e-9..=400.0 + 1e-9).contains(x)));
    }
}
