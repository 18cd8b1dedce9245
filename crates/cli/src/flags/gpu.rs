//! Flags that set how a GPU is used. Invariant: none of them changes results. On the CPU they have no effect: they are
//! refused with `--device cpu`, and reported by one warning and recorded where `--device auto` chose the CPU.

use crate::error::{CliError, usage};
use clap::Args;
use plimsoll_runtime::Device;

/// Flags that set how a GPU is used.
#[derive(Debug, Args)]
pub struct GpuFlags {
    /// Copy to and from the GPU in separate streams, which overlap with kernels (the default)
    #[arg(long, overrides_with = "no_cuda_streams", help_heading = "GPU")]
    cuda_streams: bool,

    /// Copy and compute in a single stream, without overlap
    #[arg(long, overrides_with = "cuda_streams", help_heading = "GPU")]
    no_cuda_streams: bool,

    /// Copy through pinned (page-locked) host memory [default: if this takes at most a quarter of the free host memory]
    #[arg(long, overrides_with = "no_pin_memory", help_heading = "GPU")]
    pin_memory: bool,

    /// Copy through pageable host memory
    #[arg(long, overrides_with = "pin_memory", help_heading = "GPU")]
    no_pin_memory: bool,

    /// Reserve an address range, in which the allocation on the GPU can grow in place when a later plan is larger (the
    /// default)
    #[arg(long, overrides_with = "no_expandable_segments", help_heading = "GPU")]
    expandable_segments: bool,

    /// Use one ordinary allocation on the GPU, which is replaced as a whole when a later plan is larger
    #[arg(long, overrides_with = "expandable_segments", help_heading = "GPU")]
    no_expandable_segments: bool,

    /// Every N steps, return to the driver the GPU memory that the current plan does not use; 0 never returns it
    /// [default: 100]
    #[arg(long, value_name = "N", help_heading = "GPU")]
    cache_clear_interval: Option<u64>,
}

/// The GPU options that result from the flags.
#[cfg(feature = "cuda")]
pub type GpuOptions = plimsoll_cuda::Options;
/// Placeholder without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub type GpuOptions = ();

/// The GPU options of a training run.
#[cfg(feature = "cuda")]
pub fn training_options() -> GpuOptions {
    GpuOptions { depth: plimsoll_train::TRAINING_DEPTH, ..GpuOptions::default() }
}

/// Placeholder without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn training_options() -> GpuOptions {}

impl GpuFlags {
    /// Converts the flags to GPU options with a pipeline depth of `depth`.
    #[cfg(feature = "cuda")]
    pub fn options(&self, depth: usize) -> GpuOptions {
        let default = GpuOptions::default();
        // `None` leaves the choice to the device, which knows the free host memory.
        let pinned = self.pin_memory.then_some(true).or(self.no_pin_memory.then_some(false));
        GpuOptions {
            streams: !self.no_cuda_streams,
            pinned,
            depth,
            expandable: !self.no_expandable_segments,
            cache_clear_interval: self.cache_clear_interval.unwrap_or(default.cache_clear_interval),
        }
    }

    /// Placeholder without the feature `cuda`.
    #[cfg(not(feature = "cuda"))]
    pub fn options(&self, _: usize) -> GpuOptions {}

    /// Returns the given flags that have no effect on `device`; `automatic` says whether `--device auto` chose the
    /// device.
    ///
    /// # Errors
    /// A flag was given, and the CPU was requested by name.
    pub fn without_effect(&self, device: &Device, automatic: bool) -> Result<Vec<&'static str>, CliError> {
        let given = match device {
            Device::Cpu => self.given(),
            Device::Machines(_) => vec![],
        };
        match given.first() {
            Some(flag) if !automatic => Err(usage(format!(
                "{flag} applies only to GPUs, and this run uses the CPU; omit the flag, or give --device cuda"
            ))),
            _ => Ok(given),
        }
    }

    /// Names of all flags that were given.
    fn given(&self) -> Vec<&'static str> {
        let flags = [
            (self.cuda_streams, "--cuda-streams"),
            (self.no_cuda_streams, "--no-cuda-streams"),
            (self.pin_memory, "--pin-memory"),
            (self.no_pin_memory, "--no-pin-memory"),
            (self.expandable_segments, "--expandable-segments"),
            (self.no_expandable_segments, "--no-expandable-segments"),
            (self.cache_clear_interval.is_some(), "--cache-clear-interval"),
        ];
        flags.into_iter().filter_map(|(given, flag)| given.then_some(flag)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        gpu: GpuFlags,
    }

    fn gpu(words: &[&str]) -> GpuFlags {
        Command::try_parse_from(["it"].iter().chain(words)).expect("flags").gpu
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn every_flag_reaches_the_device() {
        let default = GpuOptions::default();
        let same = GpuOptions { depth: 3, ..default };
        for (words, wanted) in [
            (&[][..], same),
            (&["--cuda-streams", "--expandable-segments"], same),
            (&["--no-cuda-streams"], GpuOptions { streams: false, ..same }),
            (&["--no-cuda-streams", "--cuda-streams"], same),
            (&["--pin-memory"], GpuOptions { pinned: Some(true), ..same }),
            (&["--no-pin-memory"], GpuOptions { pinned: Some(false), ..same }),
            (&["--no-expandable-segments"], GpuOptions { expandable: false, ..same }),
            (&["--cache-clear-interval", "0"], GpuOptions { cache_clear_interval: 0, ..same }),
            (&["--cache-clear-interval", "7"], GpuOptions { cache_clear_interval: 7, ..same }),
        ] {
            assert_eq!(gpu(words).options(3), wanted, "{words:?}");
        }
        assert!(default.streams && default.expandable, "as the help texts say");
        assert_eq!((default.pinned, default.cache_clear_interval), (None, 100), "as the help texts say");
    }

    #[test]
    fn on_the_cpu_each_is_refused_by_name_and_listed_where_auto_chose_it() {
        assert!(gpu(&[]).without_effect(&Device::Cpu, false).is_ok());
        for flag in [
            "--cuda-streams",
            "--no-cuda-streams",
            "--pin-memory",
            "--no-pin-memory",
            "--expandable-segments",
            "--no-expandable-segments",
        ] {
            let error = gpu(&[flag]).without_effect(&Device::Cpu, false).expect_err(flag).to_string();
            assert!(error.starts_with(&format!("{flag} applies only to GPUs")), "{error}");
            assert_eq!(gpu(&[flag]).without_effect(&Device::Cpu, true).expect("listed"), [flag]);
        }
        assert!(gpu(&["--cache-clear-interval", "0"]).without_effect(&Device::Cpu, false).is_err());
    }
}
