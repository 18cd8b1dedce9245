//! Flags of `plimsoll plot`. Invariant: by default, no file is written into a folder of results.

use super::{at_least, print_summary};
use crate::error::{CliError, usage};
use clap::{Args, ValueEnum};
use plimsoll_plot::{PictureOutput, PlotOptions, plot};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Draw the results of a prediction, or the curves of training runs
///
/// Recomputes nothing. Of a prediction, reads the output folder of plimsoll predict, or a results folder of VirNucPro, and draws
/// an overview (the number of records per call, the distribution of scores, the highest scores, and the score along the
/// records with most scored windows), and each record given with --record. Of training, reads the output folders of one or
/// several runs of plimsoll train, finished or not, and draws their numbers over the steps, all runs in the same charts, and
/// the load of the experts. The names of the written files are printed to standard output.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct PlotCommand {
    /// Results to draw: an output folder of `plimsoll predict`, or VirNucPro's NAME_merged with NAME_chunkedLENGTH.fa
    /// beside it; or the output folders of one or several runs of `plimsoll train`
    #[arg(value_name = "RESULT_DIR", required = true)]
    results: Vec<PathBuf>,

    /// Also draw the record with this name (column seq_name of predictions.tsv); can be given several times
    #[arg(long = "record", value_name = "ID")]
    records: Vec<String>,

    /// Charts or series of training to draw, separated by commas, such as loss,lr,memory,expert_load: names in metrics.jsonl
    /// [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    series: Vec<String>,

    /// Logarithmic axes for losses, learning rate, gradient norm and loss scale
    #[arg(long)]
    log: bool,

    /// Output folder, or one file that ends in .svg or .png [default: the name of RESULT_DIR with _plots appended, in
    /// the current folder; of several runs, training_plots]
    #[arg(short, long, value_name = "DIR|FILE")]
    output: Option<PathBuf>,

    /// File formats of the pictures in an output folder, separated by commas [default: svg,png]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FORMAT")]
    format: Vec<PictureFormat>,

    /// Width of a picture in millimetres, 80 to 500: a column of a journal is about 89 wide, a page about 183
    #[arg(long, default_value_t = 180.0, value_name = "MM", value_parser = width)]
    width: f64,

    /// Resolution of PNG pictures in pixels per inch, 72 to 600 [default: 200]
    #[arg(long, value_name = "N", value_parser = dpi)]
    dpi: Option<u32>,

    /// Replace existing pictures
    #[arg(long)]
    force: bool,
}

/// Default resolution of PNG pictures in pixels per inch.
const DPI: u32 = 200;

/// File formats of pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PictureFormat {
    Svg,
    Png,
}

impl PictureFormat {
    fn kind(self) -> plimsoll_plot::PictureFormat {
        match self {
            PictureFormat::Svg => plimsoll_plot::PictureFormat::Svg,
            PictureFormat::Png => plimsoll_plot::PictureFormat::Png,
        }
    }
}

fn width(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| (80.0..=500.0).contains(n));
    number.ok_or_else(|| "give a width from 80 to 500 millimetres, such as 89 or 180".to_owned())
}

fn dpi(text: &str) -> Result<u32, String> {
    let number = at_least(72, text).ok().filter(|&n| n <= 600);
    number
        .map(|n| n as u32)
        .ok_or_else(|| "give a resolution from 72 to 600 pixels per inch, such as 300".to_owned())
}

impl PlotCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let output = self.output()?;
        let is_png = match &output {
            PictureOutput::File(_, format) => *format == plimsoll_plot::PictureFormat::Png,
            PictureOutput::Folder(_, formats) => formats.contains(&plimsoll_plot::PictureFormat::Png),
        };
        if self.dpi.is_some() && !is_png {
            return Err(usage("--dpi: only PNG pictures have a resolution; omit --dpi, or draw PNG pictures"));
        }
        let Self { results, records, series, log, width, force, .. } = self;
        let dpi = self.dpi.unwrap_or(DPI);
        let files = plot(&PlotOptions { results, records, series, log, output, width, dpi, force })?;
        let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        print_summary(&files, &names.join("\n"))?;
        Ok(ExitCode::SUCCESS)
    }

    fn output(&self) -> Result<PictureOutput, CliError> {
        let path = self.output.clone().unwrap_or_else(|| default_folder(&self.results));
        let Some(format) = picture(&path) else {
            let mut formats: Vec<plimsoll_plot::PictureFormat> =
                self.format.iter().map(|format| format.kind()).collect();
            formats.dedup();
            return Ok(PictureOutput::Folder(
                path,
                if formats.is_empty() { plimsoll_plot::PictureFormat::ALL.to_vec() } else { formats },
            ));
        };
        let name = path.display();
        if self.format.iter().any(|other| other.kind() != format) {
            let text = format!(
                "{name}: the extension of this file contradicts --format; omit --format, or change the extension"
            );
            return Err(usage(text));
        }
        if self.records.len() > 1 {
            let text = format!(
                "{name} is a single file, but --record was given {} times; give a folder with -o",
                self.records.len()
            );
            return Err(usage(text));
        }
        Ok(PictureOutput::File(path, format))
    }
}

/// File format implied by the extension; `None` for a folder.
fn picture(path: &Path) -> Option<plimsoll_plot::PictureFormat> {
    let suffix = path.extension()?.to_ascii_lowercase();
    let named = plimsoll_plot::PictureFormat::ALL.into_iter().find(|format| suffix == format.suffix());
    named.filter(|_| !path.is_dir())
}

/// The default output folder, `RESULT_DIR_plots`, in the current folder, since a folder of results holds only results.
fn default_folder(results: &[PathBuf]) -> PathBuf {
    let [results] = results else { return PathBuf::from("training_plots") };
    let full = results.canonicalize().unwrap_or_else(|_| results.clone());
    let name = full.file_name().unwrap_or_default().to_string_lossy();
    PathBuf::from(format!("{name}_plots"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_ranges() {
        for (text, wanted) in
            [("89", true), ("183.5", true), ("500", true), ("8", false), ("NaN", false), ("a", false)]
        {
            assert_eq!(width(text).is_ok(), wanted, "{text}");
        }
        for (text, wanted) in [("72", true), ("600", true), ("71", false), ("1200", false), ("x", false)] {
            assert_eq!(dpi(text).is_ok(), wanted, "{text}");
        }
    }

    #[test]
    fn names_say_what_they_are() {
        let check = |name: &str, wanted| assert_eq!(picture(Path::new(name)), wanted, "{name}");
        check("a.svg", Some(plimsoll_plot::PictureFormat::Svg));
        check("x/a.b.PNG", Some(plimsoll_plot::PictureFormat::Png));
        check("plots", None);
        check("a.pdf", None);
        check(".svg", None);
    }
}
