//! A page that is filled from top to bottom. Invariant: elements are added below all earlier ones, and no line
//! of text is wider than the page.

use super::font;
use super::scene::{Scene, TextAnchor, TextStyle};
use super::style::{DARK, LABEL, NAME, REMARK, WARNING};
use crate::results::About;

/// Margin on all sides, in points.
pub const MARGIN: f64 = 12.0;
/// Space between panels, in points.
pub const GAP: f64 = 16.0;
/// Distance from the letter of a panel to its title, in points.
const INDENT: f64 = 10.0;

/// Place of a panel on a page; the panel is as high as its content.
#[derive(Clone, Copy, Debug)]
pub struct PanelArea {
    /// Left edge.
    pub x: f64,
    /// Top edge.
    pub y: f64,
    /// Width, including the labels of axes.
    pub width: f64,
}

/// A page under construction.
pub struct PicturePage {
    /// The elements of the page.
    pub scene: Scene,
    /// Top of the free area.
    pub y: f64,
    /// Letters of the panels that follow.
    letters: std::ops::RangeInclusive<char>,
}

impl PicturePage {
    /// An empty page.
    pub fn new(width: f64, title: String) -> Self {
        PicturePage { scene: Scene::new(width, title), y: MARGIN, letters: 'a'..='z' }
    }

    /// Width without the margins.
    pub fn inner_width(&self) -> f64 {
        self.scene.width - 2.0 * MARGIN
    }

    /// The free area, from margin to margin.
    pub fn free_area(&self) -> PanelArea {
        PanelArea { x: MARGIN, y: self.y, width: self.inner_width() }
    }

    /// Adds a line of text.
    pub fn text(&mut self, kind: TextStyle, text: &str, height: f64) {
        let text = font::shorten(text, kind, self.inner_width());
        self.scene.text(MARGIN, self.y + kind.size * 0.8, TextAnchor::Start, kind, text);
        self.y += height + 2.0;
    }

    /// Adds remarks, separated by dots, and breaks lines only between remarks.
    pub fn remarks(&mut self, remarks: &[String]) {
        let mut line = String::new();
        for remark in remarks {
            let longer = if line.is_empty() { remark.clone() } else { format!("{line} · {remark}") };
            if !line.is_empty() && font::width(&longer, REMARK) > self.inner_width() {
                self.text(REMARK, &line, 7.0);
                line.clone_from(remark);
            } else {
                line = longer;
            }
        }
        self.text(REMARK, &line, 9.0);
    }

    /// Adds a warning if the weights are untrained, which is why there are no scores.
    pub fn warn(&mut self, about: &About) {
        if about.trained {
            return;
        }
        let inner_width = self.inner_width();
        self.scene.rectangle(MARGIN, self.y, inner_width, 14.0, WARNING);
        let bold = TextStyle { bold: true, ink: DARK, ..LABEL };
        let text = font::shorten("UNTRAINED WEIGHTS: no scores and no calls", bold, inner_width - 10.0);
        self.scene.text(MARGIN + 5.0, self.y + 9.4, TextAnchor::Start, bold, text);
        self.y += 20.0;
    }

    /// Starts the next panel with a title across the whole page.
    pub fn panel(&mut self, name: &str) {
        self.y += GAP;
        self.name(MARGIN, self.y, self.inner_width(), name);
        self.y += 7.0;
    }

    /// Draws the letter and the title of the next panel, with the baseline at `y`.
    pub fn name(&mut self, x: f64, y: f64, width: f64, name: &str) {
        // After the last letter, titles stand alone.
        let indent = match self.letters.next() {
            Some(letter) => {
                self.scene.text(x, y, TextAnchor::Start, NAME, letter);
                INDENT
            }
            None => 0.0,
        };
        let name = font::shorten(name, NAME, width - indent);
        self.scene.text(x + indent, y, TextAnchor::Start, NAME, name);
    }

    /// Returns the scene, with the height of its content.
    pub fn finish(mut self) -> Scene {
        self.scene.height = self.y + MARGIN;
        self.scene
    }
}
