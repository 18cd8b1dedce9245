//! Stacked bar of the number of records by call. Invariant: lengths are proportional to counts, and the label
//! of each call stands below its segment without overlapping others.

use super::axis::{count, percent, separate_labels};
use super::font;
use super::page::PanelArea;
use super::scene::{Scene, TextAnchor, TextStyle, point};
use super::style::{self, LABEL, REMARK};
use crate::survey::{CALLS, CallCounts};

const BAR: f64 = 11.0;
const LINE: f64 = 8.0;

/// Draws the bar and its labels; returns the bottom coordinate.
pub fn draw(scene: &mut Scene, area: PanelArea, tally: &CallCounts) -> f64 {
    let PanelArea { x, y, width } = area;
    let all: u64 = tally.iter().sum();
    let mut from = x;
    let mut labels = vec![];
    let mut places = vec![];
    let mut widths = vec![];
    for (call, &part) in CALLS.into_iter().zip(tally) {
        let length = if all == 0 { 0.0 } else { width * part as f64 / all as f64 };
        scene.rectangle(from, y, length, BAR, style::ink(call));
        if part > 0 {
            let words = [style::word(call).to_owned(), format!("{} · {}", count(part), percent(part, all))];
            widths.push(words.iter().map(|w| font::width(w, LABEL)).fold(0.0, f64::max) + 8.0);
            places.push(from + length / 2.0);
            labels.push((call, words));
        }
        from += length;
    }
    let middles = places.clone();
    separate_labels(&mut places, &widths, x - 4.0, x + width + 4.0);
    for (((call, words), place), middle) in labels.into_iter().zip(places).zip(middles) {
        // A short line connects a segment with its label, which may have been moved.
        scene.line(point(middle, y + BAR), point(place, y + BAR + 4.0), style::ink(call), 0.6);
        let kind = TextStyle { ink: style::word_ink(call), bold: true, ..LABEL };
        let [name, number] = words;
        scene.text(place, y + BAR + 4.0 + LINE - 1.0, TextAnchor::Middle, kind, name);
        scene.text(place, y + BAR + 4.0 + 2.0 * LINE - 1.0, TextAnchor::Middle, REMARK, number);
    }
    y + BAR + 4.0 + 2.0 * LINE
}
