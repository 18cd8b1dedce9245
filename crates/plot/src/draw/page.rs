//! A page that is filled from the top. Invariant: what is added stands below everything that was there, and
//! no line of text is wider than the page.

use super::font;
use super::scene::{Anchor, Scene, Type};
use super::style::{DARK, LABEL, NAME, REMARK, WARNING};
use crate::results::About;

/// White on all sides.
pub const MARGIN: f64 = 12.0;
/// Between panels.
pub const GAP: f64 = 16.0;
/// Between the letter of a panel and its name.
const INDENT: f64 = 10.0;

/// A page that is being filled.
pub struct Page {
    /// What is on it.
    pub scene: Scene,
    /// Where it is empty from.
    pub y: f64,
    letters: std::ops::RangeInclusive<char>,
}

impl Page {
    /// An empty one.
    pub fn new(width: f64, title: String) -> Self {
        Page { scene: Scene::new(width, title), y: MARGIN, letters: 'a'..='z' }
    }

    /// Its width without the white.
    pub fn room(&self) -> f64 {
        self.scene.width - 2.0 * MARGIN
    }

    /// Adds a line of text.
    pub fn text(&mut self, kind: Type, text: &str, height: f64) {
        let text = font::shorten(text, kind, self.room());
        self.scene.text(MARGIN, self.y + kind.size * 0.8, Anchor::Start, kind, text);
        self.y += height + 2.0;
    }

    /// Adds remarks on as few lines as they fit on.
    pub fn remarks(&mut self, remarks: &[String]) {
        let mut line = String::new();
        for remark in remarks {
            let longer = if line.is_empty() { remark.clone() } else { format!("{line} · {remark}") };
            if !line.is_empty() && font::width(&longer, REMARK) > self.room() {
                self.text(REMARK, &line, 7.0);
                line.clone_from(remark);
            } else {
                line = longer;
            }
        }
        self.text(REMARK, &line, 9.0);
    }

    /// Says why there are no scores, where there are none.
    pub fn warn(&mut self, about: &About) {
        if about.trained {
            return;
        }
        let room = self.room();
        self.scene.rectangle(MARGIN, self.y, room, 14.0, WARNING);
        let bold = Type { bold: true, ink: DARK, ..LABEL };
        let text = font::shorten("UNTRAINED WEIGHTS: no scores and no calls", bold, room - 10.0);
        self.scene.text(MARGIN + 5.0, self.y + 9.4, Anchor::Start, bold, text);
        self.y += 20.0;
    }

    /// Starts the next panel, across the whole page.
    pub fn panel(&mut self, name: &str) {
        self.y += GAP;
        self.name(MARGIN, self.y, self.room(), name);
        self.y += 7.0;
    }

    /// Names the next panel, the letters standing on `y`.
    pub fn name(&mut self, x: f64, y: f64, width: f64, name: &str) {
        let letter = self.letters.next().unwrap_or('z');
        self.scene.text(x, y, Anchor::Start, NAME, letter);
        let name = font::shorten(name, NAME, width - INDENT);
        self.scene.text(x + INDENT, y, Anchor::Start, NAME, name);
    }

    /// The picture, as high as what is on it.
    pub fn finish(mut self) -> Scene {
        self.scene.height = self.y + MARGIN;
        self.scene
    }
}
