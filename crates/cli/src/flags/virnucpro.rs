//! Flags of virnucpro-broad's `predict` that have another name in this program, so that scripts written for
//! virnucpro-broad keep working. Invariant: each flag has the effect that it has in virnucpro-broad, or is refused with
//! the name of the flag to use; none is ignored. Source: virnucpro/cli/predict.py of broadinstitute/virnucpro-broad.
//! Flags with equal names in both programs are in the other files of this folder.

use super::device::DeviceName;
use super::machine::threads;
use crate::error::{CliError, usage};
use clap::Args;
use std::path::PathBuf;

/// Flags of virnucpro-broad.
#[derive(Debug, Default, Args)]
pub struct VirnucproFlags {
    /// Head: 300, 500 or custom
    #[arg(short, long, hide = true, value_parser = ["300", "500", "custom"])]
    model_type: Option<String>,

    /// Device
    #[arg(short, hide = true, id = "d", value_parser = device, conflicts_with = "device")]
    d: Option<DeviceName>,

    /// Ordinals of the GPUs, such as 0,2
    #[arg(long, hide = true, value_parser = gpus, conflicts_with_all = ["device", "d"])]
    gpus: Option<DeviceName>,

    /// Use all GPUs
    #[arg(long, hide = true)]
    parallel: bool,

    /// Compute threads of the CPU
    #[arg(short = 't', long, hide = true, value_parser = threads, conflicts_with = "threads")]
    merge_threads: Option<u64>,

    /// Resume an interrupted run, as every run without --force does
    #[arg(long, hide = true, conflicts_with = "force")]
    resume: bool,

    #[arg(short, long, hide = true, value_name = "N")]
    batch_size: Option<String>,

    #[arg(long, hide = true, value_name = "N")]
    dnabert_batch_size: Option<String>,

    #[arg(long, hide = true, value_name = "N")]
    esm_batch_size: Option<String>,

    #[arg(long, hide = true)]
    v1_fallback: bool,

    #[arg(long, hide = true)]
    v1_attention: bool,

    #[arg(long, hide = true)]
    skip_checkpoint_validation: bool,

    #[arg(long, hide = true)]
    force_resume: bool,

    #[arg(long, hide = true)]
    persistent_models: bool,

    #[arg(long, hide = true)]
    no_persistent_models: bool,
}

/// Parses a device as virnucpro-broad does: the values of `--device`, or the ordinal of a GPU alone.
fn device(word: &str) -> Result<DeviceName, String> {
    match word.parse::<usize>() {
        Ok(number) => Ok(DeviceName::Cuda(vec![number])),
        Err(_) => DeviceName::parse(word),
    }
}

/// Parses ordinals of GPUs separated by commas, such as `0,2`.
fn gpus(list: &str) -> Result<DeviceName, String> {
    DeviceName::parse(&format!("cuda:{list}")).map_err(|_| {
        "give the ordinals of the GPUs, such as 0,2, which is --device cuda:0,2 in plimsoll".to_owned()
    })
}

impl VirnucproFlags {
    /// Whether `--model-type` was given.
    pub fn has_model_type(&self) -> bool {
        self.model_type.is_some()
    }

    /// Refuses flags that this program does not have; the error names the replacement.
    pub fn refuse(&self) -> Result<(), CliError> {
        let tokens = "steps are as large as --memory-budget allows; --tokens N sets the tokens of a step of both encoders";
        let precise = "use --precision f32 to compute as virnucpro-broad does";
        let stages = "models stay in memory where --memory-budget allows it";
        let resumed =
            "the results of an interrupted run are always checked; --force discards them and starts over";
        let table = [
            (self.batch_size.is_some(), "--batch-size", tokens),
            (self.dnabert_batch_size.is_some(), "--dnabert-batch-size", tokens),
            (self.esm_batch_size.is_some(), "--esm-batch-size", tokens),
            (self.v1_fallback, "--v1-fallback", precise),
            (self.v1_attention, "--v1-attention", precise),
            (self.skip_checkpoint_validation, "--skip-checkpoint-validation", resumed),
            (self.force_resume, "--force-resume", resumed),
            (self.persistent_models, "--persistent-models", stages),
            (self.no_persistent_models, "--no-persistent-models", stages),
        ];
        match table.into_iter().find(|(given, ..)| *given) {
            Some((_, flag, instead)) => Err(usage(format!(
                "{flag} is a flag of virnucpro-broad that plimsoll does not have: {instead}; omit {flag}"
            ))),
            None => Ok(()),
        }
    }

    /// The window length of the head that `--model-type` selects; `None` if the flag was not given or is `custom`.
    /// `head` is the value of `--head`, and `has_weights` says whether `--weights` was given.
    ///
    /// # Errors
    /// No file or folder of the head was given: unlike virnucpro-broad, this program has no folder of models beside it.
    pub fn length(&self, head: Option<&PathBuf>, has_weights: bool) -> Result<Option<u64>, CliError> {
        match self.model_type.as_deref() {
            None => Ok(None),
            Some("custom") if head.is_none() => Err(usage(
                "--model-type custom needs a head; give its file with --head (or --model-path), such as --head my_model.pth",
            )),
            Some("custom") => Ok(None),
            Some(length) if head.is_none() && !has_weights => Err(usage(format!(
                "--model-type {length}: plimsoll does not include the head; give its file with --head {length}_model.pth, or \
                 its folder with --weights"
            ))),
            Some(length) => Ok(length.parse().ok()),
        }
    }

    /// The device selected by `--gpus` or `-d`; `None` if neither was given. `ours` is the value of `--device`.
    ///
    /// # Errors
    /// `--parallel`, which uses several GPUs, was given together with a single device.
    pub fn device(&self, ours: &DeviceName) -> Result<Option<DeviceName>, CliError> {
        let device = self.gpus.as_ref().or(self.d.as_ref());
        let one = match device.unwrap_or(ours) {
            DeviceName::Auto | DeviceName::AllCuda => false,
            DeviceName::Cpu => true,
            DeviceName::Cuda(numbers) => numbers.len() == 1,
        };
        if self.parallel && one {
            let text = "--parallel uses several GPUs, but only one device was selected; give --device cuda for all GPUs, \
                        or omit --parallel";
            return Err(usage(text));
        }
        Ok(device.cloned())
    }

    /// Number of compute threads selected by `--merge-threads`; `None` if it was not given.
    pub fn threads(&self) -> Option<u64> {
        self.merge_threads
    }
}
