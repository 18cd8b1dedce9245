//! The pictures: how panels stand on a page. Invariant: panels are set below each other (side by side where
//! the page is wide), and none is drawn over another.

mod axis;
mod calls;
mod font;
mod histogram;
pub mod png;
mod ranking;
pub mod scene;
mod style;
pub mod svg;
mod track;

use super::results::About;
use super::survey::Survey;
use super::track::Track;
use axis::{counted, score};
use scene::{Anchor, Scene};
use style::{DARK, LABEL, NAME, REMARK, TITLE, WARNING};

/// White on all sides.
const MARGIN: f64 = 12.0;
/// Between panels.
const GAP: f64 = 16.0;
/// From this width on, histograms stand side by side.
const WIDE: f64 = 340.0;

/// All of a result on one page: calls, scores, the first records by score, and tracks.
pub fn overview(survey: &Survey, tracks: &[Track], about: &About, width: f64) -> Scene {
    let names = match about.inputs.is_empty() {
        true => "prediction".to_owned(),
        false => about.inputs.join(", "),
    };
    let mut page = Page::new(width, format!("plimsoll: {names}"));
    let room = page.room();
    page.text(TITLE, &names, 10.0);
    let scored = survey.window_scores.total();
    let windows =
        format!("{} of {} b, {} scored", counted(survey.windows, "window"), about.length, axis::count(scored));
    page.text(REMARK, &format!("{} · {windows} · {}", counted(survey.records, "record"), made(about)), 9.0);
    page.warn(about);
    let mut letters = 'a'..;
    let mut letter = || letters.next().unwrap_or('z');

    page.panel(letter(), "Records by call");
    page.y = calls::draw(&mut page.scene, MARGIN, page.y, room, &survey.calls);
    if survey.record_scores.total() > 0 {
        page.histograms([letter(), letter()], survey, about);
        let shown = survey.best.entries.len() as u64;
        let title = match survey.records > shown {
            true => format!("The {shown} highest scores of {}", counted(survey.records, "record")),
            false => "Records by score".to_owned(),
        };
        page.panel(letter(), &title);
        let threshold = f64::from(about.threshold);
        page.y = ranking::draw(&mut page.scene, MARGIN, page.y, room, &survey.best.entries, threshold);
    }
    if !tracks.is_empty() {
        let title = match (survey.calls[0] > 0, tracks.len()) {
            (_, 1) => "Score along a record".to_owned(),
            (true, _) => "Scores along the longest records, viruses first".to_owned(),
            (false, _) => "Scores along the longest records".to_owned(),
        };
        page.panel(letter(), &title);
    }
    for (index, one) in tracks.iter().enumerate() {
        page.y += if index > 0 { GAP * 0.7 } else { 0.0 };
        page.y = track::draw(&mut page.scene, MARGIN, page.y, room, one, about);
    }
    page.finish()
}

/// One record.
pub fn record(track: &Track, about: &About, width: f64) -> Scene {
    let mut page = Page::new(width, format!("plimsoll: {}", track.entry.id));
    let place = format!("record {} of {}", axis::count(track.entry.ordinal + 1), about.inputs.join(", "));
    page.warn(about);
    let room = page.room();
    page.y = track::draw(&mut page.scene, MARGIN, page.y, room, track, about) + 6.0;
    page.text(REMARK, &format!("{place} · windows of {} b · {}", about.length, made(about)), 3.0);
    page.finish()
}

/// By which settings, in a few words.
fn made(about: &About) -> String {
    format!("threshold {} · plimsoll {}", score(f64::from(about.threshold)), about.version)
}

/// A page that is filled from the top.
struct Page {
    scene: Scene,
    /// Where it is empty from.
    y: f64,
}

impl Page {
    fn new(width: f64, title: String) -> Self {
        Page { scene: Scene::new(width, title), y: MARGIN }
    }

    fn room(&self) -> f64 {
        self.scene.width - 2.0 * MARGIN
    }

    /// A line of text.
    fn text(&mut self, kind: scene::Type, text: &str, height: f64) {
        let text = font::shorten(text, kind, self.room());
        self.scene.text(MARGIN, self.y + kind.size * 0.8, Anchor::Start, kind, text);
        self.y += height + 2.0;
    }

    /// Says that scores mean nothing, where they do not.
    fn warn(&mut self, about: &About) {
        if about.trained {
            return;
        }
        let room = self.room();
        self.scene.rectangle(MARGIN, self.y, room, 14.0, WARNING);
        let bold = scene::Type { bold: true, ink: DARK, ..LABEL };
        let text =
            font::shorten("UNTRAINED WEIGHTS: these scores and their order mean nothing", bold, room - 10.0);
        self.scene.text(MARGIN + 5.0, self.y + 9.4, Anchor::Start, bold, text);
        self.y += 20.0;
    }

    /// The name of the next panel.
    fn panel(&mut self, letter: char, name: &str) {
        self.y += GAP;
        self.scene.text(MARGIN, self.y, Anchor::Start, NAME, letter.to_string());
        let name = font::shorten(name, NAME, self.room() - 10.0);
        self.scene.text(MARGIN + 10.0, self.y, Anchor::Start, NAME, name);
        self.y += 7.0;
    }

    fn histograms(&mut self, letters: [char; 2], survey: &Survey, about: &About) {
        let both = [
            ("Scores of records", &survey.record_scores, f64::from(about.threshold), "threshold"),
            ("Scores of windows", &survey.window_scores, 0.5, "consensus"),
        ];
        let wide = self.scene.width >= WIDE;
        let width = if wide { (self.room() - GAP) / 2.0 } else { self.room() };
        let top = self.y;
        let mut end = top;
        for (index, (letter, (name, spread, line, line_name))) in letters.into_iter().zip(both).enumerate() {
            let x = if wide { MARGIN + (width + GAP) * index as f64 } else { MARGIN };
            let y = if wide { top } else { end } + GAP;
            self.scene.text(x, y, Anchor::Start, NAME, letter.to_string());
            self.scene.text(x + 10.0, y, Anchor::Start, NAME, name);
            let place = histogram::Place { x, y: y + 5.0, width, line, line_name };
            end = histogram::draw(&mut self.scene, &place, spread);
        }
        self.y = end;
    }

    fn finish(mut self) -> Scene {
        self.scene.height = self.y + MARGIN;
        self.scene
    }
}
