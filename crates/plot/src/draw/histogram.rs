//! Histogram of scores. Invariant: the height of a bar is proportional to its count and stacked by call, and
//! the decision boundary is drawn at its exact score.

use super::axis::{Scale, count, score};
use super::font;
use super::scene::{Anchor, Scene};
use super::style::{self, AXIS, DARK, GRID, REMARK};
use crate::survey::{BINS, CALLS, ScoreHistogram};

/// Position of a histogram, and its decision boundary.
pub struct HistogramFrame {
    /// Left edge, including the axis labels.
    pub x: f64,
    /// Top edge.
    pub y: f64,
    /// Total width.
    pub width: f64,
    /// Score from which the call is virus; `None` if it is not the same for all.
    pub line: Option<f64>,
    /// Label of this score.
    pub line_name: &'static str,
}

const LEFT: f64 = 30.0;
const HEIGHT: f64 = 58.0;
/// Height above the bars for the label of the decision boundary.
const ABOVE: f64 = 9.0;

/// Draws a dashed line at a score, from `top` to `bottom`, with its name and number above it.
pub fn boundary(scene: &mut Scene, across: &Scale, (top, bottom): (f64, f64), line: f64, name: &str) {
    let x = across.at(line);
    scene.dashed((x, top), (x, bottom), DARK, 0.7);
    let text = format!("{name} {}", score(line));
    let half = font::width(&text, REMARK) / 2.0;
    let middle = x.clamp(across.from + half, (across.to - half).max(across.from + half));
    scene.text(middle, top - 2.0, Anchor::Middle, REMARK, text);
}

/// Draws the histogram; returns the bottom coordinate.
pub fn draw(scene: &mut Scene, place: &HistogramFrame, spread: &ScoreHistogram) -> f64 {
    let top = place.y + ABOVE;
    let bottom = place.y + ABOVE + HEIGHT;
    let across = Scale { from: place.x + LEFT, to: place.x + place.width, end: 1.0 };
    let up = Scale { from: bottom, to: top, end: spread.highest().max(1) as f64 };
    for tick in up.ticks(4) {
        let y = up.at(tick as f64);
        if tick > 0 {
            scene.line((across.from, y), (across.to, y), GRID, 0.5);
        }
        scene.text(across.from - 4.0, y + 2.3, Anchor::End, REMARK, count(tick));
    }
    for (bin, tally) in spread.bins.iter().enumerate() {
        let [left, right] = [bin, bin + 1].map(|edge| across.at(edge as f64 / BINS as f64));
        let mut below = 0;
        for (call, &part) in CALLS.into_iter().zip(tally).rev() {
            let from = up.at(below as f64);
            let to = up.at((below + part) as f64);
            scene.rectangle(left + 0.4, to, right - left - 0.8, from - to, style::ink(call));
            below += part;
        }
    }
    scene.line((across.from, bottom), (across.to, bottom), AXIS, 0.6);
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        scene.line((across.at(tick), bottom), (across.at(tick), bottom + 2.0), AXIS, 0.6);
        scene.text(across.at(tick), bottom + 9.5, Anchor::Middle, REMARK, score(tick));
    }
    if let Some(line) = place.line {
        boundary(scene, &across, (top - 3.0, bottom), line, place.line_name);
    }
    bottom + 12.0
}
