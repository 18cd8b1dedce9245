//! Text metrics and outlines of the embedded font, Noto Sans. Invariant: a width is exactly the width of the
//! text in the PNG. An SVG is displayed with fonts of the reader's system; common fonts are not wider.

use super::scene::TextStyle;
use std::sync::LazyLock;
use ttf_parser::{Face, GlyphId, OutlineBuilder};

static FACES: LazyLock<[Face<'static>; 2]> = LazyLock::new(|| {
    [notosans::REGULAR_TTF, notosans::BOLD_TTF]
        .map(|bytes| Face::parse(bytes, 0).expect("a font that is part of the program"))
});

/// Width of a text in points.
pub fn width(text: &str, kind: TextStyle) -> f64 {
    let face = face(kind);
    text.chars().map(|letter| advance(face, glyph(face, letter), kind)).sum()
}

/// Returns the text, or its beginning and its end joined by an ellipsis if it is wider than `limit` points.
pub fn shorten(text: &str, kind: TextStyle, limit: f64) -> String {
    if width(text, kind) <= limit {
        return text.to_owned();
    }
    let letters: Vec<char> = text.chars().collect();
    // Binary search for the largest number of characters that fits.
    let mut fits = 0;
    let mut beyond = letters.len();
    while fits + 1 < beyond {
        let middle = (fits + beyond) / 2;
        if width(&both_ends(&letters, middle), kind) <= limit { fits = middle } else { beyond = middle }
    }
    both_ends(&letters, fits)
}

/// The first and the last characters of a text, `count` in all, joined by an ellipsis. Both ends are shown, because ids of
/// contigs differ at their beginning, ids of reads at their end.
fn both_ends(letters: &[char], count: usize) -> String {
    let end = count / 2;
    let (start, rest) = letters.split_at(count - end);
    start.iter().chain(['…'].iter()).chain(&rest[rest.len() - end..]).collect()
}

/// Calls `draw` with the outline of each character. The text starts at `x` and has its baseline at `y`.
pub fn outline<B: OutlineBuilder + Placed>(text: &str, kind: TextStyle, x: f64, y: f64, draw: &mut B) {
    let face = face(kind);
    let mut x = x;
    for letter in text.chars() {
        let glyph = glyph(face, letter);
        draw.place(x, y, kind.size / f64::from(face.units_per_em()));
        // Space characters have no outline.
        let _ = face.outline_glyph(glyph, draw);
        x += advance(face, glyph, kind);
    }
}

/// Receiver of outlines, which are in font units.
pub trait Placed {
    /// Sets the origin of the next glyph and the number of points per font unit.
    fn place(&mut self, x: f64, y: f64, scale: f64);
}

/// The regular or the bold face.
fn face(kind: TextStyle) -> &'static Face<'static> {
    &FACES[usize::from(kind.bold)]
}

/// Glyph of a character; glyph 0 (`.notdef`, a box) if the font does not have it.
fn glyph(face: &Face<'_>, letter: char) -> GlyphId {
    face.glyph_index(letter).unwrap_or_default()
}

/// Advance width of a glyph in points.
fn advance(face: &Face<'_>, glyph: GlyphId, kind: TextStyle) -> f64 {
    let units = face.glyph_hor_advance(glyph).unwrap_or_default();
    f64::from(units) * kind.size / f64::from(face.units_per_em())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::scene::Color;

    const KIND: TextStyle = TextStyle { size: 7.0, bold: false, ink: Color(0, 0, 0) };

    #[test]
    fn a_shortened_text_fits_and_keeps_both_ends() {
        let check = |text: &str, limit: f64, wanted: &str| assert_eq!(shorten(text, KIND, limit), wanted);
        check("NC_001422.1", 100.0, "NC_001422.1");
        check("NODE_1_length_248973_cov_17.2", 60.0, "NODE_1_…v_17.2");
        check("x", 1.0, "…");
        let long = "é".repeat(1000);
        for limit in [0.0, 5.0, 33.0, 99.0] {
            let short = shorten(&long, KIND, limit);
            assert!(short.contains('…') && (width(&short, KIND) <= limit || short == "…"), "{short}");
        }
    }

    #[test]
    fn the_font_has_the_letters_of_a_picture() {
        for letter in "aZ09 …·−+%≥'<>&\"|_.".chars() {
            for face in FACES.iter() {
                assert!(face.glyph_index(letter).is_some(), "{letter}");
            }
        }
    }
}
