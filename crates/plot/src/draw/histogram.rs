//! How scores are spread. Invariant: a bar is as high as its count, in parts by call, and the line where the
//! call changes is where it is.

use super::axis::{Scale, count, score};
use super::font;
use super::scene::{Anchor, Scene};
use super::style::{self, AXIS, DARK, GRID, REMARK};
use crate::survey::{BINS, CALLS, Spread};

/// Where a histogram is, and its line.
pub struct Place {
    /// Left end, room for numbers included.
    pub x: f64,
    /// Top.
    pub y: f64,
    /// All of it.
    pub width: f64,
    /// The score from which on it is a virus.
    pub line: f64,
    /// What that is called.
    pub line_name: &'static str,
}

const LEFT: f64 = 30.0;
const HEIGHT: f64 = 58.0;
/// The line's name is above the bars.
const ABOVE: f64 = 9.0;

/// Draws the histogram; returns where it ends.
pub fn draw(scene: &mut Scene, place: &Place, spread: &Spread) -> f64 {
    let (top, bottom) = (place.y + ABOVE, place.y + ABOVE + HEIGHT);
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
            let (from, to) = (up.at(below as f64), up.at((below + part) as f64));
            scene.rectangle(left + 0.4, to, right - left - 0.8, from - to, style::ink(call));
            below += part;
        }
    }
    scene.line((across.from, bottom), (across.to, bottom), AXIS, 0.6);
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        scene.line((across.at(tick), bottom), (across.at(tick), bottom + 2.0), AXIS, 0.6);
        scene.text(across.at(tick), bottom + 9.5, Anchor::Middle, REMARK, score(tick));
    }
    let x = across.at(place.line);
    scene.dashed((x, top - 3.0), (x, bottom), DARK, 0.7);
    let text = format!("{} {}", place.line_name, score(place.line));
    let half = font::width(&text, REMARK) / 2.0;
    let middle = x.clamp(across.from + half, (across.to - half).max(across.from + half));
    scene.text(middle, top - 5.0, Anchor::Middle, REMARK, text);
    bottom + 12.0
}
