//! Flags of `plimsoll predict` with a caller. Invariant: a flag of callers without a caller, and a flag of VirNucPro's models
//! with one, are refused by name.

use super::at_least_one;
use crate::error::{CliError, usage};
use clap::{Args, ValueEnum};
use plimsoll_virus::CallerOptions;
use plimsoll_virus::caller::{Limits, Preset, Threshold};
use std::path::PathBuf;

/// Flags of a caller.
#[derive(Debug, Args)]
#[command(next_help_heading = "Callers")]
pub(super) struct CallerFlags {
    /// Use the caller in this folder instead of VirNucPro's models: a classifier that scores every window from 100 bases on
    /// and comes with a calibration (config.json, model.safetensors, calibration.json)
    #[arg(long, value_name = "DIR")]
    caller: Option<PathBuf>,

    /// Operating point of the calls; true and false positive rates of each were measured with the caller and are in its
    /// calibration.json and in the summary. Cannot be used with --threshold [default: default]
    #[arg(long, value_enum, value_name = "PRESET", conflicts_with = "threshold")]
    preset: Option<PresetFlag>,

    /// Call no sequence whose false discovery rate (column fdr) is above this number, from 0 to 1 [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = share)]
    max_fdr: Option<f64>,

    /// Expected share of viral sequences in the input, above 0 and below 1: shifts scores and false discovery rates, but not
    /// the calls of a preset [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = prevalence)]
    prevalence: Option<f64>,

    /// Reads are mates of pairs, and both get one call: two files with the mates in the same order, or one file with the
    /// mates one after another
    #[arg(long, conflicts_with = "per_input")]
    paired: bool,

    /// Call no sequence (no pair) shorter than this number of bases [default: the shortest length of the calibration]
    #[arg(long, value_name = "BASES", value_parser = at_least_one)]
    min_length: Option<u64>,

    /// Call no sequence with a larger share of letters other than A, C, G, T and U, from 0 to 1 [default: 0.3]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    max_n: Option<f64>,

    /// Call no sequence with a lower complexity, from 0 to 1: the share of its pieces of 64 bases that DUST does not mask
    /// [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    min_complexity: Option<f64>,
}

/// Presets by name.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PresetFlag {
    /// A balance between found viruses and false calls
    Default,
    /// More viruses, more false calls
    Relaxed,
    /// Fewer false calls, fewer viruses
    Conservative,
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| (0.0..=1.0).contains(x));
    number.ok_or_else(|| "give a number from 0 to 1, such as 0.05".to_owned())
}

fn prevalence(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|&x| x > 0.0 && x < 1.0);
    number.ok_or_else(|| "give a number above 0 and below 1, such as 0.05".to_owned())
}

impl CallerFlags {
    /// Whether a caller was selected.
    pub(super) fn is_given(&self) -> bool {
        self.caller.is_some()
    }

    /// The options of the caller; `None` for VirNucPro's models. `threshold` is the value of `--threshold`, and `of_virnucpro`
    /// are flags of VirNucPro's models with whether they were given.
    ///
    /// # Errors
    /// Flags of callers without a caller; flags of VirNucPro's models with one.
    pub(super) fn options(
        &self,
        threshold: Option<f64>,
        of_virnucpro: &[(bool, &str)],
    ) -> Result<Option<CallerOptions>, CliError> {
        let Some(folder) = &self.caller else {
            let given = [
                (self.preset.is_some(), "--preset"),
                (self.max_fdr.is_some(), "--max-fdr"),
                (self.prevalence.is_some(), "--prevalence"),
                (self.paired, "--paired"),
                (self.min_length.is_some(), "--min-length"),
                (self.max_n.is_some(), "--max-n"),
                (self.min_complexity.is_some(), "--min-complexity"),
            ];
            return match given.into_iter().find(|(given, _)| *given) {
                None => Ok(None),
                Some((_, flag)) => Err(usage(format!(
                    "{flag} needs a caller, whose scores are calibrated probabilities; add --caller, or omit {flag}"
                ))),
            };
        };
        if let Some((_, flag)) = of_virnucpro.iter().find(|(given, _)| *given) {
            return Err(usage(format!(
                "{flag} belongs to VirNucPro's models and has no meaning for a caller; omit {flag}, or omit --caller"
            )));
        }
        let preset = match self.preset {
            None | Some(PresetFlag::Default) => Preset::Default,
            Some(PresetFlag::Relaxed) => Preset::Relaxed,
            Some(PresetFlag::Conservative) => Preset::Conservative,
        };
        let usual = Limits::default();
        Ok(Some(CallerOptions {
            folder: folder.clone(),
            threshold: threshold.map_or(Threshold::Preset(preset), Threshold::Score),
            max_fdr: self.max_fdr,
            prevalence: self.prevalence.unwrap_or(0.5),
            paired: self.paired,
            limits: Limits {
                min_length: self.min_length,
                max_n: self.max_n.unwrap_or(usual.max_n),
                min_complexity: self.min_complexity.unwrap_or(usual.min_complexity),
            },
        }))
    }
}
