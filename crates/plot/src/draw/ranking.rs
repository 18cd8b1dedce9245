//! Bar chart of the records with the highest scores. Invariant: one line per record, and texts do not overlap
//! at any width.

use super::axis::{Scale, bases, count, score};
use super::font;
use super::histogram::boundary;
use super::scene::{Anchor, Scene, TextStyle};
use super::style::{self, AXIS, GRID, LABEL, REMARK};
use crate::survey::PredictionRow;
use plimsoll_virus::output::Call;

const LINE: f64 = 9.5;
/// Factor for the width of the column of ids. The ids end at the margin of the page, and a font of the reader's system
/// may be wider than ours.
const SPARE: f64 = 1.08;
/// Space between two columns of numbers.
const BETWEEN: f64 = 9.0;
/// Width of the column of scores.
const SCORE: f64 = 30.0;
/// Below this width the last column is omitted, to leave space for the bars.
const NARROW: f64 = 300.0;

/// Positions of the columns.
struct Columns {
    /// Width of the column of ids, left of the bars.
    ids: f64,
    bars: Scale,
    /// Right edge of the column of record lengths.
    lengths: f64,
    /// Right edge of the column with the numbers of scored windows; `None` on a narrow page.
    windows: Option<f64>,
}

/// Draws the records; returns the bottom coordinate.
pub fn draw(
    scene: &mut Scene,
    x: f64,
    y: f64,
    width: f64,
    entries: &[PredictionRow],
    threshold: Option<f64>,
) -> f64 {
    let columns = columns(x, width, entries);
    let bars = &columns.bars;
    let top = y + LINE;
    let bottom = top + LINE * entries.len() as f64;
    scene.text(columns.lengths, y + 4.5, Anchor::End, REMARK, "length");
    if let Some(end) = columns.windows {
        scene.text(end, y + 4.5, Anchor::End, REMARK, "scored");
    }
    for tick in [0.0, 0.5, 1.0] {
        let place = bars.at(tick);
        scene.line((place, top), (place, bottom), if tick == 0.0 { AXIS } else { GRID }, 0.5);
        scene.text(place, bottom + 8.5, Anchor::Middle, REMARK, score(tick));
    }
    for (index, entry) in entries.iter().enumerate() {
        row(scene, &columns, top + LINE * index as f64, entry);
    }
    if let Some(threshold) = threshold {
        boundary(scene, bars, (top - 2.0, bottom), threshold, "threshold");
    }
    bottom + 11.0
}

fn columns(x: f64, width: f64, entries: &[PredictionRow]) -> Columns {
    let widest = |text: fn(&PredictionRow) -> String, least: f64| {
        entries.iter().map(|entry| font::width(&text(entry), REMARK)).fold(least, f64::max)
    };
    let ids = entries.iter().map(|entry| font::width(&entry.id, LABEL) * SPARE).fold(0.0, f64::max);
    let ids = ids.min(width * 0.36);
    let right = x + width;
    let windows = (width >= NARROW).then_some(right);
    let lengths = right - windows.map_or(0.0, |_| widest(of_windows, 24.0) + BETWEEN);
    let end = lengths - widest(|entry| bases(entry.length), 24.0) - SCORE;
    Columns { ids, bars: Scale { from: x + ids + 6.0, to: end, end: 1.0 }, lengths, windows }
}

fn row(scene: &mut Scene, columns: &Columns, y: f64, entry: &PredictionRow) {
    let bars = &columns.bars;
    let foot = y + 7.0;
    let id = font::shorten(&entry.id, LABEL, columns.ids / SPARE);
    scene.text(bars.from - 4.0, foot, Anchor::End, LABEL, id);
    match entry.score {
        Some(number) => {
            let length = bars.at(number) - bars.from;
            scene.rectangle(bars.from, y + 1.6, length, LINE - 3.2, style::ink(entry.call));
            scene.text(bars.to + 5.0, foot, Anchor::Start, LABEL, format!("{number:.3}"));
        }
        None => {
            let kind = TextStyle { ink: style::word_ink(Call::NoCall), ..LABEL };
            scene.text(bars.to + 5.0, foot, Anchor::Start, kind, style::word(Call::NoCall));
        }
    }
    scene.text(columns.lengths, foot, Anchor::End, REMARK, bases(entry.length));
    if let Some(end) = columns.windows {
        scene.text(end, foot, Anchor::End, REMARK, of_windows(entry));
    }
}

fn of_windows(entry: &PredictionRow) -> String {
    format!("{}/{}", count(entry.scored), count(entry.windows))
}
