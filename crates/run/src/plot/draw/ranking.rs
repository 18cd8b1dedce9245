//! The first records by score: a bar each. Invariant: one line a record, no words over each other at any width.

use super::axis::{Scale, bases, count, score};
use super::font;
use super::scene::{Anchor, Scene, Type};
use super::style::{self, AXIS, DARK, GRID, LABEL, REMARK};
use crate::plot::survey::Entry;
use crate::predict::output::Call;

const LINE: f64 = 9.5;
/// The reader's own font may be wider, and an id has no white beside it.
const SPARE: f64 = 1.08;

/// Draws the records; returns where they end.
pub fn draw(scene: &mut Scene, x: f64, y: f64, width: f64, entries: &[Entry], threshold: f64) -> f64 {
    let lengths: Vec<String> = entries.iter().map(|e| bases(e.length)).collect();
    let windows: Vec<String> =
        entries.iter().map(|e| format!("{}/{}", count(e.scored), count(e.windows))).collect();
    let widest = |texts: &[String]| texts.iter().map(|t| font::width(t, REMARK)).fold(24.0, f64::max);
    let (of_lengths, of_windows) = (widest(&lengths), widest(&windows).max(26.0));
    let ids = entries.iter().map(|e| font::width(&e.id, LABEL)).fold(0.0, f64::max) * SPARE;
    let ids = ids.min(width * 0.34);
    let right = x + width;
    let across = Scale { from: x + ids + 6.0, to: right - of_lengths - of_windows - 38.0, end: 1.0 };
    let (top, bottom) = (y + LINE, y + LINE + LINE * entries.len() as f64);
    scene.text(right, y + 4.5, Anchor::End, REMARK, "scored");
    scene.text(right - of_windows - 8.0, y + 4.5, Anchor::End, REMARK, "length");
    for tick in [0.0, 0.5, 1.0] {
        let place = across.at(tick);
        scene.line((place, top), (place, bottom), if tick == 0.0 { AXIS } else { GRID }, 0.5);
        scene.text(place, bottom + 8.5, Anchor::Middle, REMARK, score(tick));
    }
    for (index, entry) in entries.iter().enumerate() {
        let line = top + LINE * index as f64;
        let foot = line + 7.0;
        scene.text(across.from - 4.0, foot, Anchor::End, LABEL, font::shorten(&entry.id, LABEL, ids / SPARE));
        match entry.score {
            Some(number) => {
                let end = across.at(number);
                scene.rectangle(across.from, line + 1.6, end - across.from, LINE - 3.2, style::ink(entry.call));
                scene.text(across.to + 5.0, foot, Anchor::Start, LABEL, format!("{number:.3}"));
            }
            None => {
                let kind = Type { ink: style::word_ink(Call::NoCall), ..LABEL };
                scene.text(across.from + 4.0, foot, Anchor::Start, kind, style::word(Call::NoCall));
            }
        }
        scene.text(right, foot, Anchor::End, REMARK, &windows[index]);
        scene.text(right - of_windows - 8.0, foot, Anchor::End, REMARK, &lengths[index]);
    }
    let place = across.at(threshold);
    scene.dashed((place, top - 2.0), (place, bottom), DARK, 0.7);
    let text = format!("threshold {}", score(threshold));
    let half = font::width(&text, REMARK) / 2.0;
    let middle = place.clamp(across.from + half, (across.to - half).max(across.from + half));
    scene.text(middle, top - 4.0, Anchor::Middle, REMARK, text);
    bottom + 11.0
}
