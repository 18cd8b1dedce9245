//! Score track of a record: score against position. Invariant: a window is drawn over exactly its own bases, at
//! its score, in the colour of its call. If there are too many windows to draw each, every column shows the
//! minimum, mean and maximum of its scores.

use super::axis::{Scale, base_labels, bases, count, counted, score, separate_labels};
use super::font;
use super::scene::{Anchor, Color, Paint, PathStep, Scene, TextStyle, hatch, rectangle, segment};
use super::style::{self, AXIS, DARK, GRID, LABEL, NAME, REMARK, WHITE};
use crate::results::About;
use crate::survey::PredictionRow;
use crate::track::{Column, Track, columns, uncalled_intervals};
use plimsoll_virus::output::Call;
use std::collections::BTreeMap;

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
struct Axes {
    across: Scale,
    up: Scale,
    /// Top of the row of each strand; `None` if scores are of both strands together.
    strands: Option<[f64; 2]>,
}

/// Draws a track; returns the bottom coordinate.
pub fn draw(scene: &mut Scene, x: f64, y: f64, width: f64, track: &Track, about: &About) -> f64 {
    heading(scene, x, y, width, &track.entry, about);
    let top = y + 32.0;
    let bottom = y + 32.0 + HEIGHT;
    let end = track.entry.length.max(1) as f64;
    let first = bottom + 6.0;
    let axes = Axes {
        across: Scale { from: x + LEFT, to: x + width - RIGHT, end },
        up: Scale { from: bottom, to: top, end: 1.0 },
        strands: about.by_strand.then_some([first, first + STRAND + BETWEEN]),
    };
    grid(scene, &axes);
    let inner_width = axes.across.to - axes.across.from;
    if track.windows.len() as f64 * NARROWEST <= inner_width {
        windows(scene, &axes, track);
    } else {
        let columns = columns(&track.windows, track.entry.length, inner_width as usize);
        envelope(scene, &axes, &columns);
        let each = bases(track.entry.length / columns.len().max(1) as u64);
        let text = font::shorten(&format!("range and mean of each {each}"), REMARK, inner_width);
        // Above the bars of regions.
        let above = if track.entry.regions.is_empty() { 5.0 } else { 8.0 };
        scene.text(axes.across.to, top - above, Anchor::End, REMARK, text);
    }
    regions(scene, &axes, &track.entry);
    labels(scene, &axes, track, about);
    let foot = axes.strands.map_or(bottom, |strands| strands[1] + STRAND);
    ruler(scene, &axes, foot + 2.5);
    foot + 14.0
}

/// Draws the id, length, call and counts of the record.
fn heading(scene: &mut Scene, x: f64, y: f64, width: f64, entry: &PredictionRow, about: &About) {
    let length = bases(entry.length);
    let inner_width = width - font::width(&length, REMARK) - 10.0;
    scene.text(x, y + 7.5, Anchor::Start, NAME, font::shorten(&entry.id, NAME, inner_width));
    scene.text(x + width, y + 7.5, Anchor::End, REMARK, length);
    let kind = TextStyle { bold: true, ink: style::word_ink(entry.call), ..LABEL };
    let word = style::word(entry.call);
    scene.text(x, y + 16.5, Anchor::Start, kind, word);
    let silent = entry.windows - entry.scored;
    let mut parts = vec![];
    parts.extend(entry.score.map(|number| format!("{} {number:.3}", of_record(about).0)));
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
    scene.text(from, y + 16.5, Anchor::Start, REMARK, parts.join(" · "));
}

/// Names of the score of a record, long and short. That of a caller is calibrated for the length of the record, so it is
/// not the mean of the scores of its windows.
fn of_record(about: &About) -> (&'static str, &'static str) {
    if about.by_strand { ("mean score", "mean") } else { ("score", "record") }
}

/// Draws the score axis, its grid lines and the names of the strands.
fn grid(scene: &mut Scene, axes: &Axes) {
    let left = axes.across.from;
    let right = axes.across.to;
    for tick in [0.0, EVEN, 1.0] {
        let y = axes.up.at(tick);
        scene.line((left, y), (right, y), GRID, 0.5);
        scene.text(left - 4.0, y + 2.3, Anchor::End, REMARK, score(tick));
    }
    scene.text(left - 4.0, axes.up.to - 5.0, Anchor::End, REMARK, "score");
    for (top, name) in axes.strands.into_iter().flatten().zip(["+ strand", "− strand"]) {
        scene.text(left - 4.0, top + STRAND - 0.9, Anchor::End, REMARK, name);
    }
}

/// Draws a bar for each region, from its first to its last base, just above the line of score 1.
fn regions(scene: &mut Scene, axes: &Axes, entry: &PredictionRow) {
    let mut bars = vec![];
    for region in &entry.regions {
        let [left, right] = [region.start - 1, region.end].map(|base| axes.across.at(base as f64));
        // A region of a very long record stays visible.
        let width = (right - left).max(NARROWEST);
        bars.extend(rectangle(left.min(axes.across.to - width), axes.up.to - 4.0, width, 2.0));
    }
    scene.shape(bars, Paint::Fill(style::ink(Call::Virus)));
}

/// Draws every window individually.
fn windows(scene: &mut Scene, axes: &Axes, track: &Track) {
    let place = |base: u64| axes.across.at(base as f64);
    let mut edges: BTreeMap<usize, (Call, Vec<PathStep>)> = BTreeMap::new();
    let mut tints = Cells::default();
    let mut cells = Cells::default();
    let even = axes.up.at(EVEN);
    for window in &track.windows {
        let left = place(window.start);
        let right = place(window.end);
        if let Some(number) = window.score {
            let y = axes.up.at(number);
            let tint = style::ink(window.call).towards(WHITE, 0.78);
            tints.add(tint, rectangle(left, y.min(even), right - left, (y - even).abs()));
            let key = crate::survey::call_index(window.call);
            edges.entry(key).or_insert((window.call, vec![])).1.extend(segment((left, y), (right, y)));
        }
        for (strand, top) in window.strands.into_iter().zip(axes.strands.into_iter().flatten()) {
            if let Some(number) = strand {
                cells.add(style::shade(number), rectangle(left, top, right - left, STRAND));
            }
        }
    }
    tints.draw(scene);
    for (call, steps) in edges.into_values() {
        scene.shape(steps, Paint::Stroke { ink: style::ink(call), width: 1.5, dash: None });
    }
    let stretches: Vec<(f64, f64)> =
        uncalled_intervals(&track.windows).into_iter().map(|(start, end)| (place(start), place(end))).collect();
    no_call(scene, axes, &stretches);
    cells.draw(scene);
}

/// Draws the range and the mean of the scores in columns, for more windows than the width can show.
fn envelope(scene: &mut Scene, axes: &Axes, columns: &[Column]) {
    let step = (axes.across.to - axes.across.from) / columns.len() as f64;
    let place = |index: usize| axes.across.from + step * index as f64;
    let high_ink = style::ink(Call::Virus);
    let low_ink = style::ink(Call::Other);
    let scored = |index: usize| columns[index].scores.count > 0;
    let mut above = vec![];
    let mut below = vec![];
    for (from, to) in runs(columns.len(), scored) {
        // The band between minimum and maximum, cut at `EVEN`: each half has the colour of its call.
        let band = |low: f64, high: f64| -> Vec<PathStep> {
            let edge = |index: usize, end: usize, number: f64| {
                (place(index + end), axes.up.at(number.clamp(low, high)))
            };
            let upper = (from..to).flat_map(|i| [0, 1].map(|end| edge(i, end, columns[i].scores.high)));
            let lower = (from..to).rev().flat_map(|i| [1, 0].map(|end| edge(i, end, columns[i].scores.low)));
            outline(upper.chain(lower), true)
        };
        above.extend(band(EVEN, 1.0));
        below.extend(band(0.0, EVEN));
    }
    let mean = |index: usize| columns[index].scores.mean();
    let line = |is_virus: bool| -> Vec<PathStep> {
        let here = |index: usize| mean(index).is_some_and(|mean| (mean >= EVEN) == is_virus);
        let step = |i: usize| [0, 1].map(|end| (place(i + end), axes.up.at(mean(i).unwrap_or(EVEN))));
        let runs = runs(columns.len(), here).into_iter();
        runs.flat_map(|(from, to)| outline((from..to).flat_map(step), false)).collect()
    };
    scene.shape(above, Paint::Fill(high_ink.towards(WHITE, 0.62)));
    scene.shape(below, Paint::Fill(low_ink.towards(WHITE, 0.62)));
    for (is_virus, ink) in [(false, low_ink), (true, high_ink)] {
        scene.shape(line(is_virus), Paint::Stroke { ink, width: 0.9, dash: None });
    }
    let silent = |index: usize| columns[index].windows > 0 && columns[index].windows == columns[index].silent;
    let stretches: Vec<(f64, f64)> =
        runs(columns.len(), silent).into_iter().map(|(from, to)| (place(from), place(to))).collect();
    no_call(scene, axes, &stretches);
    let mut cells = Cells::default();
    for (index, column) in columns.iter().enumerate() {
        for (strand, top) in column.strands.iter().zip(axes.strands.into_iter().flatten()) {
            if let Some(mean) = strand.mean() {
                cells.add(style::shade(mean), rectangle(place(index), top, step, STRAND));
            }
        }
    }
    cells.draw(scene);
}

/// Maximal ranges of consecutive indices for which `is` is true: first, and one past the last.
fn runs(count: usize, is: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = vec![];
    for index in (0..count).filter(|&index| is(index)) {
        match runs.last_mut() {
            Some(run) if run.1 == index => run.1 += 1,
            _ => runs.push((index, index + 1)),
        }
    }
    runs
}

/// Path through the points.
pub fn outline(points: impl Iterator<Item = (f64, f64)>, close: bool) -> Vec<PathStep> {
    let mut steps: Vec<PathStep> = points.map(|(x, y)| PathStep::Line(x, y)).collect();
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
fn no_call(scene: &mut Scene, axes: &Axes, stretches: &[(f64, f64)]) {
    // Without rows for strands, a gap in the track says the same.
    let Some([top, _]) = axes.strands else { return };
    let height = 2.0 * STRAND + BETWEEN;
    let lines = stretches.iter().flat_map(|&(left, right)| hatch(left, top, right - left, height, 2.6));
    scene.shape(lines.collect(), Paint::Stroke { ink: style::ink(Call::NoCall), width: 0.5, dash: None });
}

/// Rectangles grouped by colour, so that each colour is one path.
#[derive(Default)]
struct Cells(BTreeMap<Color, Vec<PathStep>>);

impl Cells {
    fn add(&mut self, ink: Color, outline: [PathStep; 5]) {
        self.0.entry(ink).or_default().extend(outline);
    }

    fn draw(self, scene: &mut Scene) {
        for (ink, steps) in self.0 {
            scene.shape(steps, Paint::Cells(ink));
        }
    }
}

/// Draws the legend to the right of the track: threshold, mean, calls and hatching.
fn labels(scene: &mut Scene, axes: &Axes, track: &Track, about: &About) {
    let left = axes.across.from;
    let right = axes.across.to;
    let mut words = vec![];
    if let Some(threshold) = about.threshold.map(f64::from) {
        let line = axes.up.at(threshold);
        scene.dashed((left, line), (right + 3.0, line), DARK, 0.7);
        words.push((line, format!("threshold {}", score(threshold)), REMARK));
    }
    if let Some(mean) = track.entry.score {
        let y = axes.up.at(mean);
        scene.line((right, y), (right + 3.0, y), DARK, 1.4);
        words.push((y, format!("{} {mean:.3}", of_record(about).1), LABEL));
    }
    let shown = |call| TextStyle {
        bold: true,
        ink: style::word_ink(if about.trained { call } else { Call::Untrained }),
        ..LABEL
    };
    words.push((axes.up.to, style::word(Call::Virus).to_owned(), shown(Call::Virus)));
    words.push((axes.up.from, style::word(Call::Other).to_owned(), shown(Call::Other)));
    words.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut places: Vec<f64> = words.iter().map(|(y, _, _)| *y).collect();
    separate_labels(&mut places, &vec![7.6; words.len()], axes.up.to - 3.8, axes.up.from + 3.8);
    for ((_, word, kind), y) in words.into_iter().zip(places) {
        scene.text(right + 5.0, y + 2.3, Anchor::Start, kind, word);
    }
    let Some(strands) = axes.strands else { return };
    if track.windows.iter().any(|window| window.call == Call::NoCall) {
        let box_of = (right + 5.0, strands[0], 8.0, STRAND);
        let lines = hatch(box_of.0, box_of.1, box_of.2, box_of.3, 2.6);
        scene.shape(lines, Paint::Stroke { ink: style::ink(Call::NoCall), width: 0.5, dash: None });
        scene.text(right + 15.5, strands[0] + STRAND - 0.9, Anchor::Start, REMARK, style::word(Call::NoCall));
    }
    if !track.every_frame && about.trained {
        scene.text(right + 5.0, strands[1] + STRAND - 0.9, Anchor::Start, REMARK, "best frame only");
    }
}

/// Draws the position axis.
fn ruler(scene: &mut Scene, axes: &Axes, y: f64) {
    scene.line((axes.across.from, y), (axes.across.to, y), AXIS, 0.6);
    let most = ((axes.across.to - axes.across.from) / 42.0) as u64;
    let ticks = axes.across.ticks(most);
    for (tick, label) in ticks.iter().zip(base_labels(&ticks)) {
        let x = axes.across.at(*tick as f64);
        scene.line((x, y), (x, y + 2.0), AXIS, 0.6);
        scene.text(x, y + 9.5, Anchor::Middle, REMARK, label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::track::Window;
    use plimsoll_virus::output::RegionRow;

    const WIDTH: f64 = LEFT + 400.0 + RIGHT;

    fn drawn(length: u64, windows: &[(u64, u64, Option<f64>)]) -> Scene {
        drawn_with(length, windows, vec![])
    }

    fn drawn_with(length: u64, windows: &[(u64, u64, Option<f64>)], regions: Vec<RegionRow>) -> Scene {
        let window = |&(start, end, score): &(u64, u64, Option<f64>)| {
            let call = score.map_or(Call::NoCall, |s| if s >= 0.5 { Call::Virus } else { Call::Other });
            Window { start, end, score, call, strands: [score, None] }
        };
        let windows: Vec<Window> = windows.iter().map(window).collect();
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
        let (about, _) = crate::results::about(&about).unwrap();
        let mut scene = Scene::new(WIDTH, String::new());
        draw(&mut scene, 0.0, 0.0, WIDTH, &Track { entry, windows, every_frame: true }, &about);
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
