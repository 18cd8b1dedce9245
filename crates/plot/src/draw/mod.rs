//! Layout of the pictures. Invariant: panels are placed below each other, or side by side on a wide page, and
//! do not overlap.

mod axis;
mod calls;
pub mod curves;
mod font;
mod histogram;
mod page;
pub mod png;
mod ranking;
pub mod scene;
mod style;
pub mod svg;
mod track;

use super::results::About;
use super::survey::{ScoreHistogram, Survey};
use super::track::Track;
use axis::{count, counted, score};
use page::{GAP, MARGIN, Page};
use scene::Scene;
use style::{LABEL, TITLE};

/// Minimum page width, in points, for histograms side by side.
const WIDE: f64 = 340.0;

/// The overview of a result: records by call, histograms of scores, the records with the highest scores, and
/// tracks. With a single record, its track and the histogram of its windows replace the comparison of records.
pub fn overview(survey: &Survey, tracks: &[Track], about: &About, width: f64) -> Scene {
    let names = if about.inputs.is_empty() { "prediction".to_owned() } else { about.inputs.join(", ") };
    let mut page = Page::new(width, format!("plimsoll: {names}"));
    page.text(TITLE, &names, 10.0);
    let scored = count(survey.window_scores.total());
    let windows = format!("{} of {} bp, {scored} scored", counted(survey.windows, "window"), about.length);
    page.remarks(&[&[counted(survey.records, "record"), windows], &made(about)[..]].concat());
    page.warn(about);
    if survey.records == 0 {
        page.text(LABEL, "The input has no records.", 9.0);
    } else if survey.records > 1 || tracks.is_empty() {
        records(&mut page, survey, about);
    } else {
        histograms(&mut page, &[("Scores of windows", &survey.window_scores, Some(0.5), name_of_half(about))]);
    }
    if !tracks.is_empty() {
        let viruses = tracks.iter().filter(|track| track.entry.is_virus_or_has_regions()).count();
        let has_regions = tracks.iter().any(|track| !track.entry.regions.is_empty());
        page.panel(match viruses {
            _ if survey.records == 1 => "Along the record",
            0 => "Along the records with most scored windows",
            n if n == tracks.len() && has_regions => "Along the records called virus or with regions",
            n if n == tracks.len() => "Along the viruses with most scored windows",
            _ if has_regions => "Along records, those called virus or with regions first",
            _ => "Along records, viruses before others",
        });
    }
    for (index, one) in tracks.iter().enumerate() {
        page.y += if index > 0 { GAP * 0.7 } else { 0.0 };
        let y = page.y;
        let inner_width = page.inner_width();
        page.y = track::draw(&mut page.scene, MARGIN, y, inner_width, one, about);
    }
    page.finish()
}

/// The picture of one record.
pub fn record(track: &Track, about: &About, width: f64) -> Scene {
    let mut page = Page::new(width, format!("plimsoll: {}", track.entry.id));
    page.warn(about);
    let y = page.y;
    let inner_width = page.inner_width();
    page.y = track::draw(&mut page.scene, MARGIN, y, inner_width, track, about) + 6.0;
    let place = format!("record {} of {}", count(track.entry.ordinal + 1), about.inputs.join(", "));
    page.remarks(&[&[place, format!("windows of {} bp", about.length)], &made(about)[..]].concat());
    page.finish()
}

/// Settings of the run: threshold and program.
fn made(about: &About) -> [String; 2] {
    let threshold = match about.threshold {
        Some(threshold) => format!("threshold {}", score(f64::from(threshold))),
        None => "threshold by length".to_owned(),
    };
    [threshold, about.made_by.clone()]
}

/// Panels about all records: counts by call, histograms, and the records with the highest scores.
fn records(page: &mut Page, survey: &Survey, about: &About) {
    let inner_width = page.inner_width();
    page.panel("Records by call");
    page.y = calls::draw(&mut page.scene, MARGIN, page.y, inner_width, &survey.calls);
    if survey.record_scores.total() == 0 {
        return;
    }
    let threshold = about.threshold.map(f64::from);
    histograms(
        page,
        &[
            ("Scores of records", &survey.record_scores, threshold, "threshold"),
            ("Scores of windows", &survey.window_scores, Some(0.5), name_of_half(about)),
        ],
    );
    let all = survey.records;
    let best = &survey.best.entries;
    if all > best.len() as u64 {
        page.panel(&format!("The {} highest scores of {}", best.len(), counted(all, "record")))
    } else {
        page.panel("Records by score")
    }
    page.y = ranking::draw(&mut page.scene, MARGIN, page.y, inner_width, best, threshold);
}

/// What a window's score of 0.5 is: the boundary of its consensus in VirNucPro's method, even odds for a caller.
fn name_of_half(about: &About) -> &'static str {
    if about.by_strand { "consensus" } else { "even" }
}

/// Title, scores, decision boundary (`None` without one) and label of the boundary.
type Histogram<'a> = (&'a str, &'a ScoreHistogram, Option<f64>, &'static str);

/// Draws histograms side by side on a wide page, else below each other.
fn histograms(page: &mut Page, all: &[Histogram<'_>]) {
    let wide = page.scene.width >= WIDE;
    let columns = if wide { all.len() } else { 1 };
    let width = (page.inner_width() - GAP * (columns - 1) as f64) / columns as f64;
    let top = page.y;
    for (index, &(name, spread, line, line_name)) in all.iter().enumerate() {
        let x = MARGIN + (width + GAP) * (index % columns) as f64;
        let y = if index < columns { top } else { page.y };
        page.name(x, y + GAP, width, name);
        let place = histogram::HistogramFrame { x, y: y + GAP + 5.0, width, line, line_name };
        page.y = histogram::draw(&mut page.scene, &place, spread);
    }
}
