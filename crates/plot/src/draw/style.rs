//! Colours and text styles. Invariant: the colours of the two calls differ in hue and in lightness, so that
//! they are distinct for readers with any colour vision and in greyscale; text has at least 6 points.
//!
//! Vermilion and blue are from the palette of Okabe and Ito (2008), which is safe for colour-blind readers.

use super::scene::{Color, TextStyle};
use plimsoll_virus::output::Call;

/// Primary text.
pub const DARK: Color = Color(34, 34, 34);
/// Secondary text.
pub const SOFT: Color = Color(98, 98, 98);
/// Axes.
pub const AXIS: Color = Color(140, 140, 140);
/// Grid lines behind data.
pub const GRID: Color = Color(226, 226, 226);
/// Background of the page.
pub const WHITE: Color = Color(255, 255, 255);
/// Colour of scores midway between both calls.
pub const MIDDLE: Color = Color(230, 228, 224);
/// Background of a warning.
pub const WARNING: Color = Color(255, 236, 179);

const VERMILION: Color = Color(213, 94, 0);
const BLUE: Color = Color(0, 114, 178);
const GREY: Color = Color(190, 190, 190);
const SLATE: Color = Color(120, 120, 130);

/// Style of titles.
pub const TITLE: TextStyle = TextStyle { size: 9.0, bold: true, ink: DARK };
/// Style of panel and record names.
pub const NAME: TextStyle = TextStyle { size: 7.5, bold: true, ink: DARK };
/// Style of labels.
pub const LABEL: TextStyle = TextStyle { size: 6.5, bold: false, ink: DARK };
/// Style of numbers on axes, and of remarks.
pub const REMARK: TextStyle = TextStyle { size: 6.5, bold: false, ink: SOFT };

/// Colour of the areas of a call.
pub fn ink(call: Call) -> Color {
    match call {
        Call::Virus => VERMILION,
        Call::Other => BLUE,
        Call::NoCall | Call::Skipped => GREY,
        Call::Untrained => SLATE,
    }
}

/// Text colour of a call, dark enough for contrast on white.
pub fn word_ink(call: Call) -> Color {
    match call {
        Call::Virus => Color(176, 72, 0),
        Call::Other => Color(0, 92, 148),
        Call::NoCall | Call::Skipped | Call::Untrained => SOFT,
    }
}

/// Name of a call in pictures.
pub fn word(call: Call) -> &'static str {
    match call {
        Call::Virus => "virus",
        Call::Other => "other",
        Call::NoCall => "no call",
        Call::Skipped => "skipped",
        Call::Untrained => "untrained",
    }
}

/// Colours of training runs: those of Okabe and Ito without the yellow, which is too light for a line on white.
const OF_RUNS: [Color; 8] = [
    BLUE,
    VERMILION,
    Color(0, 158, 115),
    Color(204, 121, 167),
    Color(230, 159, 0),
    Color(86, 180, 233),
    Color(80, 80, 80),
    Color(133, 92, 51),
];

/// Colour of a training run; from the ninth on, darker shades of the first colours.
pub fn run_ink(run: usize) -> Color {
    let ink = OF_RUNS[run % OF_RUNS.len()];
    if run < OF_RUNS.len() { ink } else { ink.towards(Color(0, 0, 0), 0.45) }
}

/// Colour of a score: blue at 0, a light neutral in the middle, vermilion at 1. Quantized to 16 steps, so that
/// cells of equal colour become one shape.
pub fn shade(score: f64) -> Color {
    const STEPS: f64 = 16.0;
    let score = (score * STEPS).round() / STEPS;
    if score < 0.5 { BLUE.towards(MIDDLE, score * 2.0) } else { MIDDLE.towards(VERMILION, score * 2.0 - 1.0) }
}
