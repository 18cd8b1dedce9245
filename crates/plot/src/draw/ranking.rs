//! Bar chart of the records with the highest scores. Invariant: one line per record, and texts do not overlap
//! at any width.

use super::axis::{LinearScale, bases, count, score};
use super::font;
use super::histogram::ScoreBoundary;
use super::page::PanelArea;
use super::scene::{Scene, TextAnchor, TextStyle, point};
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
struct RankingColumns {
    /// Width of the column of ids, left of the bars.
    ids: f64,
    bars: LinearScale,
    /// Right edge of the column of record lengths.
    lengths: f64,
    /// Right edge of the column with the numbers of scored windows; `None` on a narrow page.
    windows: Option<f64>,
}

/// Draws the records; returns the bottom coordinate.
pub fn draw(scene: &mut Scene, area: PanelArea, entries: &[PredictionRow], threshold: Option<f64>) -> f64 {
    let columns = columns(area, entries);
    let bars = &columns.bars;
    let top = area.y + LINE;
    let bottom = top + LINE * entries.len() as f64;
    scene.text(columns.lengths, area.y + 4.5, TextAnchor::End, REMARK, "length");
    if let Some(end) = columns.windows {
        scene.text(end, area.y + 4.5, TextAnchor::End, REMARK, "scored");
    }
    for tick in [0.0, 0.5, 1.0] {
        let x = bars.at(tick);
        scene.line(point(x, top), point(x, bottom), if tick == 0.0 { AXIS } else { GRID }, 0.5);
        scene.text(x, bottom + 8.5, TextAnchor::Middle, REMARK, score(tick));
    }
    for (index, entry) in entries.iter().enumerate() {
        row(scene, &columns, top + LINE * index as f64, entry);
    }
    if let Some(score) = threshold {
        ScoreBoundary { score, name: "threshold" }.draw(scene, bars, top - 2.0, bottom);
    }
    bottom + 11.0
}

/// Lays out the columns from the right: the numbers take the width of their longest text, the ids at most 36 % of the area,
/// and the bars get the rest.
fn columns(area: PanelArea, entries: &[PredictionRow]) -> RankingColumns {
    let ids = entries.iter().map(|entry| font::width(&entry.id, LABEL) * SPARE).fold(0.0, f64::max);
    let ids = ids.min(area.width * 0.36);
    let right = area.x + area.width;
    let windows = (area.width >= NARROW).then_some(right);
    let lengths = right - windows.map_or(0.0, |_| widest(entries, scored_windows) + BETWEEN);
    let end = lengths - widest(entries, |entry| bases(entry.length)) - SCORE;
    RankingColumns { ids, bars: LinearScale { from: area.x + ids + 6.0, to: end, end: 1.0 }, lengths, windows }
}

/// Width of the longest text of a column of numbers, at least that of its heading.
fn widest(entries: &[PredictionRow], text: fn(&PredictionRow) -> String) -> f64 {
    entries.iter().map(|entry| font::width(&text(entry), REMARK)).fold(24.0, f64::max)
}

fn row(scene: &mut Scene, columns: &RankingColumns, y: f64, entry: &PredictionRow) {
    let bars = &columns.bars;
    let foot = y + 7.0;
    let id = font::shorten(&entry.id, LABEL, columns.ids / SPARE);
    scene.text(bars.from - 4.0, foot, TextAnchor::End, LABEL, id);
    match entry.score {
        Some(number) => {
            let length = bars.at(number) - bars.from;
            scene.rectangle(bars.from, y + 1.6, length, LINE - 3.2, style::ink(entry.call));
            scene.text(bars.to + 5.0, foot, TextAnchor::Start, LABEL, format!("{number:.3}"));
        }
        None => {
            let kind = TextStyle { ink: style::word_ink(Call::NoCall), ..LABEL };
            scene.text(bars.to + 5.0, foot, TextAnchor::Start, kind, style::word(Call::NoCall));
        }
    }
    scene.text(columns.lengths, foot, TextAnchor::End, REMARK, bases(entry.length));
    if let Some(end) = columns.windows {
        scene.text(end, foot, TextAnchor::End, REMARK, scored_windows(entry));
    }
}

/// Numbers of scored and of all windows of a record.
fn scored_windows(entry: &PredictionRow) -> String {
    format!("{}/{}", count(entry.scored), count(entry.windows))
}
