//! Pictures of training runs: one with all charts, runs overlaid, and one with the load of the experts. Invariant: the charts
//! are those of `plimsoll_train::charts`, which the report draws too.

use crate::draw::{curves, svg};
use crate::{Picture, PictureOutput, PlotError, PlotOptions};
use plimsoll_setting::Setting;
use plimsoll_train::charts::{self, Chart};
use plimsoll_train::history::{EXPERT_LOAD, RunHistory};

/// Maximum number of points of a line: more than a page has pixels at usual resolutions.
const MOST_POINTS: usize = 1000;

/// Reads the runs and draws their pictures.
pub fn pictures(options: &PlotOptions) -> Result<Vec<Picture>, PlotError> {
    let folder = options.results.first().cloned().unwrap_or_default();
    if !options.records.is_empty() {
        return Err(PlotError::OfPrediction { setting: Setting::Records, folder });
    }
    let runs = charts::open(&options.results).map_err(PlotError::Training)?;
    let (charts, with_loads) = choose(charts::charts(&runs, MOST_POINTS), &runs, options)?;
    if charts.is_empty() && !with_loads {
        return Err(PlotError::NothingToDraw { folder });
    }
    // An axis that is linear in spite of --log would be misread.
    if options.log && !charts.iter().any(|chart| chart.suits_log && chart.axis(true).log) {
        let names = charts.iter().map(|chart| chart.id.clone());
        let charts = names.chain(with_loads.then(|| EXPERT_LOAD.to_owned())).collect();
        return Err(PlotError::NoLogarithm { charts });
    }
    let width = options.width * svg::POINTS;
    let mut pictures = vec![];
    if !charts.is_empty() {
        let scene = curves::curves(&runs, &charts, options.log, width);
        pictures.push(Picture { name: "training".to_owned(), scene });
    }
    if with_loads {
        let scene = curves::loads(&runs, width);
        pictures.push(Picture { name: EXPERT_LOAD.to_owned(), scene });
    }
    Ok(pictures)
}

/// The charts to draw, and whether the load of the experts is drawn. A single file has one picture: the charts, unless the load
/// is all that was asked for.
fn choose(
    all: Vec<Chart>,
    runs: &[RunHistory],
    options: &PlotOptions,
) -> Result<(Vec<Chart>, bool), PlotError> {
    let has_loads = runs.iter().any(|run| !run.loads.is_empty());
    let is_file = matches!(options.output, PictureOutput::File(..));
    if options.series.is_empty() {
        let with_loads = has_loads && (!is_file || all.is_empty());
        return Ok((all, with_loads));
    }
    let (loads, names): (Vec<_>, Vec<_>) = options.series.iter().partition(|name| *name == EXPERT_LOAD);
    let names: Vec<String> = names.into_iter().cloned().collect();
    if !loads.is_empty() && is_file && !names.is_empty() {
        return Err(PlotError::TwoPictures);
    }
    if !loads.is_empty() && !has_loads {
        let known = charts::select(all, &[String::new()]).map_or_else(|unknown| unknown.known, |_| vec![]);
        return Err(unknown_series(EXPERT_LOAD, known, has_loads));
    }
    let charts = charts::select(all, &names)
        .map_err(|unknown| unknown_series(&unknown.name, unknown.known, has_loads))?;
    Ok((charts, !loads.is_empty()))
}

/// The error for a series that no run has; `known` are the series of all charts.
fn unknown_series(name: &str, mut known: Vec<String>, has_loads: bool) -> PlotError {
    known.extend(has_loads.then(|| EXPERT_LOAD.to_owned()));
    PlotError::UnknownSeries { name: name.to_owned(), hint: nearest(name, &known), known }
}

/// The known name that is most similar to `name`, as the end of a message; empty if none is similar.
fn nearest(name: &str, known: &[String]) -> String {
    let near = known.iter().map(|other| (strsim::levenshtein(name, other), other));
    let near = near.filter(|(distance, _)| *distance <= 3).min_by_key(|(distance, _)| *distance);
    near.map_or_else(String::new, |(_, other)| format!(" (did you mean {other}?)"))
}
