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
use super::survey::{OverviewStatistics, ScoreHistogram};
use super::track::RecordTrack;
use axis::{count, counted, score};
use histogram::ScoreBoundary;
use page::{GAP, MARGIN, PanelArea, PicturePage};
use scene::Scene;
use style::{LABEL, TITLE};

/// Minimum page width, in points, for histograms side by side.
const WIDE: f64 = 340.0;

/// The overview of a result: records by call, histograms of scores, the records with the highest scores, and
/// tracks. With a single record, its track and the histogram of its windows replace the comparison of records.
pub fn overview(survey: &OverviewStatistics, tracks: &[RecordTrack], about: &About, width: f64) -> Scene {
    let names = if about.inputs.is_empty() { "prediction".to_owned() } else { about.inputs.join(", ") };
    let mut page = PicturePage::new(width, format!("plimsoll: {names}"));
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
        histograms(&mut page, &[window_scores(survey, about)]);
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
    for (index, track) in tracks.iter().enumerate() {
        page.y += if index > 0 { GAP * 0.7 } else { 0.0 };
        let area = page.free_area();
        page.y = track::draw(&mut page.scene, area, track, about);
    }
    page.finish()
}

/// The picture of one record.
pub fn record(track: &RecordTrack, about: &About, width: f64) -> Scene {
    let mut page = PicturePage::new(width, format!("plimsoll: {}", track.entry.id));
    page.warn(about);
    let area = page.free_area();
    page.y = track::draw(&mut page.scene, area, track, about) + 6.0;
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
fn records(page: &mut PicturePage, survey: &OverviewStatistics, about: &About) {
    page.panel("Records by call");
    let area = page.free_area();
    page.y = calls::draw(&mut page.scene, area, &survey.calls);
    if survey.record_scores.total() == 0 {
        return;
    }
    let threshold = about.threshold.map(f64::from);
    let record_scores = HistogramPanel {
        title: "Scores of records",
        histogram: &survey.record_scores,
        boundary: threshold.map(|score| ScoreBoundary { score, name: "threshold" }),
    };
    histograms(page, &[record_scores, window_scores(survey, about)]);
    let all = survey.records;
    let best = &survey.best.entries;
    if all > best.len() as u64 {
        page.panel(&format!("The {} highest scores of {}", best.len(), counted(all, "record")))
    } else {
        page.panel("Records by score")
    }
    let area = page.free_area();
    page.y = ranking::draw(&mut page.scene, area, best, threshold);
}

/// A histogram of the overview.
struct HistogramPanel<'a> {
    title: &'static str,
    histogram: &'a ScoreHistogram,
    /// Score from which the call is virus; `None` if it depends on the record.
    boundary: Option<ScoreBoundary>,
}

/// The histogram of the scores of windows. A score of 0.5 is the boundary of the consensus in VirNucPro's method, and even
/// odds for a caller.
fn window_scores<'a>(survey: &'a OverviewStatistics, about: &About) -> HistogramPanel<'a> {
    let name = if about.by_strand { "consensus" } else { "even" };
    HistogramPanel {
        title: "Scores of windows",
        histogram: &survey.window_scores,
        boundary: Some(ScoreBoundary { score: 0.5, name }),
    }
}

/// Draws histograms side by side on a wide page, else below each other.
fn histograms(page: &mut PicturePage, panels: &[HistogramPanel<'_>]) {
    let wide = page.scene.width >= WIDE;
    let columns = if wide { panels.len() } else { 1 };
    let width = (page.inner_width() - GAP * (columns - 1) as f64) / columns as f64;
    let top = page.y;
    for (index, panel) in panels.iter().enumerate() {
        let x = MARGIN + (width + GAP) * (index % columns) as f64;
        let y = if index < columns { top } else { page.y };
        page.name(x, y + GAP, width, panel.title);
        let area = PanelArea { x, y: y + GAP + 5.0, width };
        page.y = histogram::draw(&mut page.scene, area, panel.histogram, panel.boundary);
    }
}
