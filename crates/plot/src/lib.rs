//! `plimsoll plot`: pictures of the results of viral prediction, or of training runs. For a prediction, reads the run record,
//! scans the tables once for records and once for windows, draws the pictures and writes them; training runs are in
//! `training.rs`. Invariant: nothing is recomputed and results are not changed; equal results and options give equal bytes.
#![forbid(unsafe_code)]

mod draw;
mod error;
mod names;
mod results;
mod survey;
mod track;
mod training;
mod virnucpro;

pub use error::PlotError;

use draw::{png, scene::Scene, svg};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::outputs::{InputFiles, OutputGuard};
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_runtime::RuntimeError;
use plimsoll_setting::Setting;
use plimsoll_train::history;
use plimsoll_virus::output::FILES;
use results::ResultsFolder;
use std::io::Write;
use std::path::{Path, PathBuf};
use survey::{OverviewStatistics, PredictionRow};
use track::RecordTrack;

/// Number of records that the overview lists by score.
const NAMES: usize = 12;
/// Number of records that the overview draws with their windows.
const TRACKS: usize = 3;

/// File format of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFormat {
    /// Vector graphics, for papers and editors.
    Svg,
    /// Pixels, for slides and web pages.
    Png,
}

impl PictureFormat {
    /// All formats.
    pub const ALL: [PictureFormat; 2] = [PictureFormat::Svg, PictureFormat::Png];

    /// File name suffix of the format.
    pub fn suffix(self) -> &'static str {
        match self {
            PictureFormat::Svg => "svg",
            PictureFormat::Png => "png",
        }
    }
}

/// Destination of pictures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PictureOutput {
    /// One file with one picture: the overview, the requested record, or the charts of training runs.
    File(PathBuf, PictureFormat),
    /// A folder for the overview and every requested record, or for the pictures of training runs, in each of the formats.
    Folder(PathBuf, Vec<PictureFormat>),
}

/// Options of [`plot()`].
#[derive(Clone, Debug)]
pub struct PlotOptions {
    /// The folder that `predict` wrote, or a folder of results of VirNucPro; or the folders of training runs.
    pub results: Vec<PathBuf>,
    /// Ids of the records of a prediction to draw, as in `predictions.tsv`.
    pub records: Vec<String>,
    /// Charts or series of training runs to draw; empty for all.
    pub series: Vec<String>,
    /// Whether the charts of training runs for which it is suitable have a logarithmic axis.
    pub log: bool,
    /// Destination of the pictures.
    pub output: PictureOutput,
    /// Width of a picture in millimetres.
    pub width: f64,
    /// Resolution of PNG files in pixels per inch.
    pub dpi: u32,
    /// Whether existing files may be replaced.
    pub force: bool,
}

/// A picture to be written.
struct Picture {
    /// File name without suffix.
    name: String,
    scene: Scene,
}

/// Draws the pictures and returns the paths of the written files: of a prediction the overview first, then the requested
/// records in the order of `records`; of training runs the charts, then the load of the experts. Nothing is written unless
/// all pictures could be drawn.
///
/// # Errors
/// - [`PlotError::Mixture`], [`PlotError::SeveralPredictions`], [`PlotError::OfTraining`], [`PlotError::OfPrediction`]:
///   folders or options that do not belong together.
/// - [`PlotError::Training`], [`PlotError::UnknownSeries`], [`PlotError::NothingToDraw`]: training
///   runs that cannot be drawn.
/// - [`PlotError::NoLogarithm`]: `log` is set, and none of the chosen charts can have a logarithmic axis.
/// - [`PlotError::NoFolder`], [`PlotError::NoResult`], [`PlotError::NotARunRecord`]: the folder has no complete results.
/// - [`PlotError::SeveralRuns`], [`PlotError::NoWindows`], [`PlotError::SeveralWindows`], [`PlotError::NotAWindow`],
///   [`PlotError::WindowOutOfOrder`], [`PlotError::TornWindows`], [`PlotError::UnknownWindow`],
///   [`PlotError::Contradiction`]: results of VirNucPro that are ambiguous, incomplete or inconsistent.
/// - [`PlotError::NoSuchRecord`]: a requested record is not in the results.
/// - [`PlotError::Runtime`]: a table cannot be read, or a picture cannot be written: it is a table that is read, or it
///   exists and `force` is not set.
pub fn plot(options: &PlotOptions) -> Result<Vec<PathBuf>, PlotError> {
    let is_training = history::are_training_runs(&options.results).map_err(PlotError::Mixture)?;
    let pictures = if is_training { training::pictures(options)? } else { prediction_pictures(options)? };
    write(&pictures, options)
}

/// The pictures of a prediction.
fn prediction_pictures(options: &PlotOptions) -> Result<Vec<Picture>, PlotError> {
    let setting =
        if options.log { Some(Setting::Log) } else { (!options.series.is_empty()).then_some(Setting::Series) };
    let [folder] = &options.results[..] else { return Err(PlotError::SeveralPredictions) };
    // A folder that does not exist is reported as such below.
    if let Some(setting) = setting.filter(|_| folder.exists()) {
        return Err(PlotError::OfTraining { setting, folder: folder.clone() });
    }
    let results = ResultsFolder::open(folder)?;
    let (mut survey, requested) = scan_records(&results, &options.records)?;
    let with_overview = matches!(options.output, PictureOutput::Folder(..)) || options.records.is_empty();
    let leading = if with_overview { survey.leading.entries.clone() } else { vec![] };
    let mut chosen: Vec<PredictionRow> = leading.iter().chain(&requested).cloned().collect();
    chosen.sort_by_key(|entry| entry.ordinal);
    chosen.dedup_by_key(|entry| entry.ordinal);
    let tracks = results.tracks(&chosen, &mut survey)?;
    let width = options.width * svg::POINTS;
    let mut pictures = vec![];
    if with_overview {
        let leading: Vec<_> = leading.iter().filter_map(|entry| track_of(entry, &tracks)).cloned().collect();
        let scene = draw::overview(&survey, &leading, &results.about, width);
        pictures.push(Picture { name: "overview".to_owned(), scene });
    }
    let names = names::file_names(requested.iter().map(|entry| entry.id.as_str()));
    for (track, name) in requested.iter().filter_map(|entry| track_of(entry, &tracks)).zip(names) {
        pictures.push(Picture { name, scene: draw::record(track, &results.about, width) });
    }
    Ok(pictures)
}

/// The track of a record, found by its row number, because an id may occur in several rows.
fn track_of<'a>(record: &PredictionRow, tracks: &'a [RecordTrack]) -> Option<&'a RecordTrack> {
    tracks.iter().find(|track| track.entry.ordinal == record.ordinal)
}

/// Scans all records; returns their statistics and the records with the requested ids, in the order of `ids`. A record
/// is returned once even if its id is requested twice; if several records share a requested id, all are returned.
///
/// # Errors
/// [`PlotError::NoSuchRecord`] for the first id without a record; results that cannot be read.
fn scan_records(
    results: &ResultsFolder,
    ids: &[String],
) -> Result<(OverviewStatistics, Vec<PredictionRow>), PlotError> {
    let mut survey = OverviewStatistics::new(NAMES, TRACKS);
    let mut found: Vec<Vec<PredictionRow>> = vec![vec![]; ids.len()];
    results.records(|entry| {
        survey.add(entry);
        if let Some(place) = ids.iter().position(|id| *id == entry.id) {
            found[place].push(entry.clone());
        }
    })?;
    // A repeated id in `ids` collects its records at its first position only, so its later positions stay
    // empty.
    let missing = ids
        .iter()
        .zip(&found)
        .find(|(id, all)| all.is_empty() && !found.iter().flatten().any(|entry| entry.id == **id));
    if let Some((id, _)) = missing {
        let mut nearest = names::Nearest::new(id);
        results.records(|entry| nearest.offer(&entry.id))?;
        let id = id.to_string();
        let folder = results.folder.clone();
        let nearest = nearest.hint();
        return Err(PlotError::NoSuchRecord { id, folder, nearest });
    }
    Ok((survey, found.into_iter().flatten().collect()))
}

/// The files that are read from folders of results: those that predictions and training runs write.
fn results_read(folders: &[PathBuf]) -> InputFiles {
    InputFiles::named_in(folders, FILES.iter().chain(&history::FILES))
}

/// Writes the pictures. Encodes all of them and checks all destinations before the first write.
fn write(pictures: &[Picture], options: &PlotOptions) -> Result<Vec<PathBuf>, PlotError> {
    let mut guard = OutputGuard::new(results_read(&options.results), options.force);
    let mut files: Vec<(PathBuf, Vec<u8>)> = vec![];
    for Picture { name, scene } in pictures {
        let places: Vec<(PathBuf, PictureFormat)> = match &options.output {
            PictureOutput::File(path, format) => vec![(path.clone(), *format)],
            PictureOutput::Folder(folder, formats) => {
                formats.iter().map(|f| (folder.join(format!("{name}.{}", f.suffix())), *f)).collect()
            }
        };
        for (path, format) in places {
            guard.file(&path)?;
            let bytes = match format {
                PictureFormat::Svg => svg::write(scene).into_bytes(),
                PictureFormat::Png => png::write(scene, options.dpi).map_err(RuntimeError::io(&path))?,
            };
            files.push((path, bytes));
        }
    }
    if let PictureOutput::Folder(folder, _) = &options.output {
        std::fs::create_dir_all(folder).map_err(RuntimeError::io(folder))?;
    }
    for (path, bytes) in &files {
        save(path, bytes)?;
    }
    Ok(files.into_iter().map(|(path, _)| path).collect())
}

/// Writes a file atomically: it appears complete or not at all.
fn save(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|e| DataError::at(path, DataErrorKind::Write(e)))?;
    file.commit()
}
