//! Histogram of scores. Invariant: the height of a bar is proportional to its count and stacked by call, and
//! the decision boundary is drawn at its exact score.

use super::axis::{LinearScale, count, score};
use super::font;
use super::page::PanelArea;
use super::scene::{Scene, TextAnchor, point};
use super::style::{self, AXIS, DARK, GRID, REMARK};
use crate::survey::{BINS, CALLS, ScoreHistogram};

/// Score from which the call is virus, with its label.
#[derive(Clone, Copy, Debug)]
pub struct ScoreBoundary {
    /// The score.
    pub score: f64,
    /// Label of the score.
    pub name: &'static str,
}

const LEFT: f64 = 30.0;
const HEIGHT: f64 = 58.0;
/// Height above the bars for the label of the decision boundary.
const ABOVE: f64 = 9.0;

impl ScoreBoundary {
    /// Draws a dashed line at the score, from `top` to `bottom`, with its name and number above it.
    pub fn draw(self, scene: &mut Scene, across: &LinearScale, top: f64, bottom: f64) {
        let x = across.at(self.score);
        scene.dashed(point(x, top), point(x, bottom), DARK, 0.7);
        let text = format!("{} {}", self.name, score(self.score));
        // The text stays within the axis; on an axis narrower than the text it starts where the axis starts.
        let half = font::width(&text, REMARK) / 2.0;
        let middle = x.clamp(across.from + half, (across.to - half).max(across.from + half));
        scene.text(middle, top - 2.0, TextAnchor::Middle, REMARK, text);
    }
}

/// Draws the histogram, with a line at `boundary`; returns the bottom coordinate.
pub fn draw(
    scene: &mut Scene,
    area: PanelArea,
    histogram: &ScoreHistogram,
    boundary: Option<ScoreBoundary>,
) -> f64 {
    let top = area.y + ABOVE;
    let bottom = area.y + ABOVE + HEIGHT;
    let across = LinearScale { from: area.x + LEFT, to: area.x + area.width, end: 1.0 };
    let up = LinearScale { from: bottom, to: top, end: histogram.highest().max(1) as f64 };
    for tick in up.ticks(4) {
        let y = up.at(tick as f64);
        if tick > 0 {
            scene.line(point(across.from, y), point(across.to, y), GRID, 0.5);
        }
        scene.text(across.from - 4.0, y + 2.3, TextAnchor::End, REMARK, count(tick));
    }
    for (bin, tally) in histogram.bins.iter().enumerate() {
        let [left, right] = [bin, bin + 1].map(|edge| across.at(edge as f64 / BINS as f64));
        let mut below = 0;
        for (call, &part) in CALLS.into_iter().zip(tally).rev() {
            let from = up.at(below as f64);
            let to = up.at((below + part) as f64);
            scene.rectangle(left + 0.4, to, right - left - 0.8, from - to, style::ink(call));
            below += part;
        }
    }
    scene.line(point(across.from, bottom), point(across.to, bottom), AXIS, 0.6);
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        scene.line(point(across.at(tick), bottom), point(across.at(tick), bottom + 2.0), AXIS, 0.6);
        scene.text(across.at(tick), bottom + 9.5, TextAnchor::Middle, REMARK, score(tick));
    }
    if let Some(boundary) = boundary {
        boundary.draw(scene, &across, top - 3.0, bottom);
    }
    bottom + 12.0
}
