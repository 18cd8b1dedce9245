//! Flags of `plimsoll predict` with a caller. Invariant: a flag of callers together with a flag that selects VirNucPro's models,
//! and a flag of VirNucPro's models without such a flag, are refused by name.

use super::at_least_one;
use crate::error::{CliError, usage};
use clap::{Args, ValueEnum};
use plimsoll_virus::CallerOptions;
use plimsoll_virus::caller::{CallLimits, Threshold, ThresholdPreset};
use std::path::PathBuf;

/// Flags of a caller.
#[derive(Debug, Args)]
#[command(next_help_heading = "Callers")]
pub(super) struct CallerFlags {
    /// Use the caller in this folder instead of the built-in one: a classifier that scores every window from 100 bases on
    /// and comes with a calibration (config.json, model.safetensors, calibration.json)
    #[arg(long, value_name = "DIR")]
    caller: Option<PathBuf>,

    /// Operating point of the calls. The rates below are those of the built-in caller at 500 bases, for families and phyla
    /// that are mostly new to it; those at the lengths of the input are in the summary, and those of another caller in its
    /// calibration.json. Cannot be used with --threshold [default: default]
    #[arg(long, value_enum, value_name = "PRESET", conflicts_with = "threshold")]
    preset: Option<PresetFlag>,

    /// Call no sequence whose false discovery rate (column fdr) is above this number, from 0 to 1 [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = share)]
    max_fdr: Option<f64>,

    /// Expected share of viral sequences in the input, above 0 and below 1: shifts scores and false discovery rates, but not
    /// the calls of a preset [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = prevalence)]
    prevalence: Option<f64>,

    /// Reads are mates of pairs, and both get one call: two files with the mates in the same order, or several such pairs
    /// (A_1.fq A_2.fq B_1.fq B_2.fq), or one file with the mates one after another
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
    /// Finds 48 % of the viral sequences and calls 5 % of the others virus
    Default,
    /// Finds 82 % of the viral sequences and calls 20 % of the others virus
    Relaxed,
    /// Finds 20 % of the viral sequences and calls 1 % of the others virus
    Conservative,
}

impl PresetFlag {
    fn preset(self) -> ThresholdPreset {
        match self {
            Self::Default => ThresholdPreset::Default,
            Self::Relaxed => ThresholdPreset::Relaxed,
            Self::Conservative => ThresholdPreset::Conservative,
        }
    }
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| (0.0..=1.0).contains(x));
    number.ok_or_else(|| "give a number from 0 to 1, such as 0.05".to_owned())
}

fn prevalence(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|&x| x > 0.0 && x < 1.0);
    number.ok_or_else(|| "give a number above 0 and below 1, such as 0.05".to_owned())
}

/// The first flag that was given.
fn first_given(flags: &[(bool, &'static str)]) -> Option<&'static str> {
    flags.iter().find(|(given, _)| *given).map(|(_, flag)| *flag)
}

impl CallerFlags {
    /// Whether a caller was named.
    pub(super) fn is_named(&self) -> bool {
        self.caller.is_some()
    }

    /// The options of the caller; `None` for VirNucPro's models, which one of `models` selects. `threshold` is the value of
    /// `--threshold`; `models` and `of_virnucpro` are flags that name models of VirNucPro and other flags of such models,
    /// with whether they were given.
    ///
    /// # Errors
    /// Flags of callers beside VirNucPro's models; flags of VirNucPro's models without them.
    pub(super) fn options(
        &self,
        threshold: Option<f64>,
        models: &[(bool, &'static str)],
        of_virnucpro: &[(bool, &'static str)],
    ) -> Result<Option<CallerOptions>, CliError> {
        if let Some(model) = first_given(models) {
            let given = [
                (self.caller.is_some(), "--caller"),
                (self.preset.is_some(), "--preset"),
                (self.max_fdr.is_some(), "--max-fdr"),
                (self.prevalence.is_some(), "--prevalence"),
                (self.paired, "--paired"),
                (self.min_length.is_some(), "--min-length"),
                (self.max_n.is_some(), "--max-n"),
                (self.min_complexity.is_some(), "--min-complexity"),
            ];
            return match first_given(&given) {
                None => Ok(None),
                Some(flag) => Err(usage(format!(
                    "{flag} belongs to callers, and {model} selects VirNucPro's models, whose scores are not calibrated; \
                     omit {flag}, or omit {model}"
                ))),
            };
        }
        if let Some(flag) = first_given(of_virnucpro) {
            let remedy = match self.caller {
                Some(_) => format!("omit {flag}, or give --head or --weights in place of --caller"),
                None => format!("omit {flag}, or name VirNucPro's models with --head or --weights"),
            };
            return Err(usage(format!(
                "{flag} belongs to VirNucPro's models and has no meaning for a caller; {remedy}"
            )));
        }
        let preset = self.preset.unwrap_or(PresetFlag::Default).preset();
        let usual = CallerOptions::usual(self.caller.clone());
        Ok(Some(CallerOptions {
            threshold: threshold.map_or(Threshold::Preset(preset), Threshold::Score),
            max_fdr: self.max_fdr,
            prevalence: self.prevalence.unwrap_or(usual.prevalence),
            paired: self.paired,
            limits: CallLimits {
                min_length: self.min_length,
                max_n: self.max_n.unwrap_or(usual.limits.max_n),
                min_complexity: self.min_complexity.unwrap_or(usual.limits.min_complexity),
            },
            ..usual
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_virus::caller::Calibration;

    #[test]
    fn the_help_has_the_measured_rates_of_the_built_in_caller() {
        let calibration = Calibration::builtin().expect("built in");
        for flag in PresetFlag::value_variants() {
            let point = calibration.at(500).point(flag.preset());
            let rates = format!(
                "Finds {:.0} % of the viral sequences and calls {:.0} % of the others virus",
                100.0 * point.tpr,
                100.0 * point.fpr
            );
            let value = flag.to_possible_value().expect("a value");
            assert_eq!(value.get_help().expect("a help").to_string(), rates);
        }
    }
}
