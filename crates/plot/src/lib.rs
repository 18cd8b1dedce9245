//! `plimsoll plot`: pictures of a prediction's results. The story: read the run record, go through the tables
//! once for the overview and once for the windows, draw, write. Invariant: nothing is computed anew and no
//! result is changed; the same results and options give the same bytes.
#![forbid(unsafe_code)]

mod draw;
mod error;
mod names;
mod original;
mod results;
mod rows;
mod survey;
mod track;

pub use error::PlotError;

use data::atomic::AtomicFile;
use data::{DataError, DataErrorKind};
use draw::{png, scene::Scene, svg};
use results::Results;
use runtime::RuntimeError;
use std::io::Write;
use std::path::{Path, PathBuf};
use survey::{Entry, Survey};

/// Records that the overview names.
const NAMES: usize = 12;
/// Records whose windows the overview shows.
const TRACKS: usize = 3;

/// How a picture is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines and letters, for papers and editors.
    Svg,
    /// Pixels, for slides and pages.
    Png,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 2] = [Format::Svg, Format::Png];

    /// The end of its files' names.
    pub fn suffix(self) -> &'static str {
        match self {
            Format::Svg => "svg",
            Format::Png => "png",
        }
    }
}

/// Where pictures go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// One picture, into this file: the overview, or the record that is asked for.
    File(PathBuf, Format),
    /// The overview and every record that is asked for, into this folder, in each format.
    Folder(PathBuf, Vec<Format>),
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder that `predict` wrote, or a folder of results of VirNucPro.
    pub results: PathBuf,
    /// Ids, as they stand in `predictions.tsv`.
    pub records: Vec<String>,
    /// Where pictures go.
    pub output: Output,
    /// Millimetres.
    pub width: f64,
    /// Pixels an inch, of PNG.
    pub dpi: u32,
    /// Whether pictures that are there may be replaced.
    pub force: bool,
}

/// A picture to be written.
struct Picture {
    /// Without a suffix.
    name: String,
    scene: Scene,
}

/// Draws; the files that were written, in order.
pub fn plot(options: &Options) -> Result<Vec<PathBuf>, PlotError> {
    let results = Results::open(&options.results)?;
    let (mut survey, asked) = look(&results, &options.records)?;
    let with_overview = matches!(options.output, Output::Folder(..)) || options.records.is_empty();
    let leading = if with_overview { survey.leading.entries.clone() } else { vec![] };
    let mut chosen: Vec<Entry> = leading.iter().chain(&asked).cloned().collect();
    chosen.sort_by_key(|entry| entry.ordinal);
    chosen.dedup_by_key(|entry| entry.ordinal);
    let tracks = results.tracks(&chosen, &mut survey)?;
    let track = |entry: &Entry| tracks.iter().find(|track| track.entry.ordinal == entry.ordinal);
    let width = options.width * svg::POINTS;
    let mut pictures = vec![];
    if with_overview {
        let leading: Vec<_> = leading.iter().filter_map(track).cloned().collect();
        let scene = draw::overview(&survey, &leading, &results.about, width);
        pictures.push(Picture { name: "overview".to_owned(), scene });
    }
    let names = names::of_files(asked.iter().map(|entry| entry.id.as_str()));
    for (track, name) in asked.iter().filter_map(track).zip(names) {
        pictures.push(Picture { name, scene: draw::record(track, &results.about, width) });
    }
    write(&pictures, options)
}

/// All records, and those that are asked for: each once, every one of an id that is there twice.
fn look(results: &Results, ids: &[String]) -> Result<(Survey, Vec<Entry>), PlotError> {
    let mut survey = Survey::new(NAMES, TRACKS);
    let mut found: Vec<Vec<Entry>> = vec![vec![]; ids.len()];
    results.records(|entry| {
        survey.add(entry);
        if let Some(place) = ids.iter().position(|id| *id == entry.id) {
            found[place].push(entry.clone());
        }
    })?;
    // An id that is asked for twice is found at its first place.
    let missing = ids
        .iter()
        .zip(&found)
        .find(|(id, all)| all.is_empty() && !found.iter().flatten().any(|entry| entry.id == **id));
    if let Some((id, _)) = missing {
        let mut nearest = names::Nearest::new(id);
        results.records(|entry| nearest.offer(&entry.id))?;
        let (id, folder, nearest) = (id.to_string(), results.folder.clone(), nearest.hint());
        return Err(PlotError::NoSuchRecord { id, folder, nearest });
    }
    Ok((survey, found.into_iter().flatten().collect()))
}

/// Nothing is written before everything is drawn and every place is free.
fn write(pictures: &[Picture], options: &Options) -> Result<Vec<PathBuf>, PlotError> {
    let mut files: Vec<(PathBuf, Vec<u8>)> = vec![];
    for Picture { name, scene } in pictures {
        let places: Vec<(PathBuf, Format)> = match &options.output {
            Output::File(path, format) => vec![(path.clone(), *format)],
            Output::Folder(folder, formats) => {
                formats.iter().map(|f| (folder.join(format!("{name}.{}", f.suffix())), *f)).collect()
            }
        };
        for (path, format) in places {
            if !options.force && path.exists() {
                return Err(PlotError::Exists { path });
            }
            let bytes = match format {
                Format::Svg => svg::write(scene).into_bytes(),
                Format::Png => png::write(scene, options.dpi).map_err(RuntimeError::io(&path))?,
            };
            files.push((path, bytes));
        }
    }
    if let Output::Folder(folder, _) = &options.output {
        std::fs::create_dir_all(folder).map_err(RuntimeError::io(folder))?;
    }
    for (path, bytes) in &files {
        save(path, bytes)?;
    }
    Ok(files.into_iter().map(|(path, _)| path).collect())
}

fn save(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|e| DataError::at(path, DataErrorKind::Write(e)))?;
    file.commit()
}
