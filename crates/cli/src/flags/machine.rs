//! Flags that select the machine, shared by all commands that compute. Invariant: each flag has one definition and
//! default.

use super::device::DeviceName;
use super::gpu::GpuFlags;
use super::precision::{PrecisionFlag, precision_flag};
use super::{at_least_one, step_tokens};
use crate::error::{CliError, usage};
use clap::{Args, ValueEnum};
use plimsoll_runtime::dynamic::DynamicSettings;
use plimsoll_runtime::{Bytes, Device, RuntimeError, Settings, Streaming, machine};
use std::path::PathBuf;

/// Flags that select the machine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineFlags {
    /// Device: auto, cpu, cuda (all NVIDIA GPUs) or cuda:N,M,... (GPUs by ordinal); auto uses the GPUs that can be
    /// used, otherwise the CPU. Several GPUs share the work; bench and verify use only the first
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceName::parse)]
    device: DeviceName,

    /// Number format of the models: auto is bf16 on a GPU and on a CPU with AMX, f32 on other CPUs; a CPU supports
    /// bf16, f32 and int8
    #[arg(long, value_parser = precision_flag(), default_value = "auto")]
    precision: PrecisionFlag,

    /// Memory budget of the run, such as 2GiB, 500MB or 80% of the free memory. On the CPU it bounds the peak resident
    /// memory of the process, including code and mapped files; on a GPU it bounds the memory of the process on that GPU
    /// [default: 80%]
    #[arg(long, alias = "budget", value_name = "SIZE")]
    memory_budget: Option<String>,

    /// Host memory budget of a run on a GPU, such as 4GiB or 50% of the free memory; on the CPU the smaller of this and
    /// --memory-budget applies. Not supported by bench and verify [default: no limit]
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,

    /// Maximum number of tokens in a step, which is one batch through the model; more tokens take more memory [default:
    /// the most that fit the budget and increase speed]
    #[arg(long, value_name = "N", value_parser = step_tokens)]
    tokens: Option<u64>,

    /// Compute threads of the CPU, 1 to 1024 [default: all cores available to this process]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<u64>,

    #[command(flatten)]
    gpu: GpuFlags,
}

/// Default number of in-flight steps.
const DEPTH: usize = 2;

/// Flag of the commands that can stream weights.
#[derive(Debug, Args)]
pub struct StreamingFlags {
    /// When to keep weights outside the memory of the device and copy them to it in every step, which takes less memory and
    /// may take more time: on a GPU they are kept in pinned host memory, or on disk where that has no room; on a CPU on disk
    #[arg(long, value_enum, default_value_t = StreamWhen::Auto, value_name = "WHEN", help_heading = "Machine")]
    stream_weights: StreamWhen,

    /// Maximum size of the scratch file in which streamed weights are kept on disk, such as 60GB [default: what is free]
    #[arg(long, value_name = "SIZE", help_heading = "Machine")]
    disk: Option<String>,

    /// Folder for the scratch file, which disappears with the process in any case [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER", help_heading = "Machine")]
    scratch: Option<PathBuf>,
}

/// Flag of the commands whose steps can follow the free memory.
#[derive(Debug, Args)]
pub struct DynamicFlag {
    /// Make steps smaller while other processes use the memory, and larger again afterwards; the results do not change.
    /// aggressive, balanced or conservative, then key=value pairs, separated by commas: target, warning, critical and
    /// emergency (shares of the memory in use), adjustment_frequency (steps between two readings), smooth_transitions
    /// [default: one size for the whole run]
    #[arg(long, value_name = "PROFILE", value_parser = str::parse::<DynamicSettings>, help_heading = "Machine")]
    pub dynamic: Option<DynamicSettings>,
}

/// When to stream weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StreamWhen {
    /// Only if no step fits the memory budget with all weights in memory
    Auto,
    /// Never; a run that does not fit with all weights in memory is refused
    Never,
    /// In every run
    Always,
}

/// Order in which sequences are computed.
#[derive(Debug, Args)]
pub struct SortingFlags {
    /// Compute sequences sorted by length, which is faster because steps are filled better (the default); the results
    /// are equal to those of the unsorted input, and are written in the order of the input
    #[arg(long, overrides_with = "no_sort_by_length", help_heading = "Machine")]
    sort_by_length: bool,

    /// Compute sequences in the order of the input
    #[arg(long, overrides_with = "sort_by_length", help_heading = "Machine")]
    no_sort_by_length: bool,
}

impl SortingFlags {
    /// Whether sequences are sorted by length.
    pub fn by_length(&self) -> bool {
        !self.no_sort_by_length
    }
}

impl StreamingFlags {
    /// The streaming mode, as the planner's type.
    pub fn stream(&self) -> Streaming {
        match self.stream_weights {
            StreamWhen::Auto => Streaming::Auto,
            StreamWhen::Never => Streaming::Never,
            StreamWhen::Always => Streaming::Always,
        }
    }

    /// The room for scratch files; `None` if it is not given.
    pub fn disk(&self) -> Result<Option<Bytes>, CliError> {
        let Some(text) = &self.disk else { return Ok(None) };
        let folder = self.scratch.clone().unwrap_or_else(std::env::temp_dir);
        Ok(Some(machine::parse_budget(text, machine::free_on_disk(&folder))?))
    }

    /// The room for scratch files of a plan, which writes none itself.
    pub fn disk_of_plan(&self) -> Result<Option<Bytes>, CliError> {
        match self.scratch {
            Some(_) => Err(usage("--scratch: a plan writes no scratch file; omit the flag")),
            None => self.disk(),
        }
    }

    /// The settings of a run, with the values of these flags.
    pub fn applied_to(&self, settings: Settings) -> Result<Settings, CliError> {
        if let Some(folder) = self.scratch.as_ref().filter(|folder| !folder.is_dir()) {
            return Err(usage(format!("--scratch: {} is no folder", folder.display())));
        }
        Ok(Settings { stream: self.stream(), disk: self.disk()?, scratch: self.scratch.clone(), ..settings })
    }
}

/// Largest accepted number of threads: more is taken for a typing error, and each thread takes memory.
const MAX_THREADS: u64 = 1024;

pub(super) fn threads(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= MAX_THREADS);
    number.ok_or_else(|| format!("give a number of threads from 1 to {MAX_THREADS}"))
}

/// Parses a budget of host memory.
pub(super) fn host_budget(text: &str) -> Result<Bytes, RuntimeError> {
    machine::parse_budget(text, machine::available().free)
}

impl MachineFlags {
    /// The runtime's settings, with a pipeline depth of `depth`.
    pub fn settings(&self, depth: u64) -> Result<Settings, CliError> {
        self.settings_on(self.device.open(self.gpu.options(depth as usize))?)
    }

    /// The requested device.
    pub fn device(&self) -> &DeviceName {
        &self.device
    }

    /// Overrides device and threads with the values of other flags.
    pub fn override_with(&mut self, device: Option<DeviceName>, threads: Option<u64>) {
        if let Some(device) = device {
            self.device = device;
        }
        self.threads = threads.or(self.threads);
    }

    /// The runtime's settings for commands that compute on one device.
    pub fn settings_of_one(&self) -> Result<Settings, CliError> {
        if self.host_memory.is_some() {
            let text = "--host-memory: this command has no host memory budget; omit the flag";
            return Err(usage(text));
        }
        self.settings_on(self.device.open_one(self.gpu.options(DEPTH))?)
    }

    fn settings_on(&self, device: Device) -> Result<Settings, CliError> {
        let unused_flags = self.gpu.without_effect(&device, self.device == DeviceName::Auto)?;
        if !unused_flags.is_empty() {
            let flags = unused_flags.join(", ");
            eprintln!(
                "warning: no GPU can be used, so this run uses the CPU, and these flags have no effect: {flags}"
            );
        }
        let base = Settings { device, precision: self.precision, ..Settings::default() };
        let free = base.free()?;
        let budget = self.memory_budget.as_deref().map(|text| machine::parse_budget(text, free)).transpose()?;
        let host_memory = self.host_memory.as_deref().map(host_budget).transpose()?;
        let threads = self.threads.map_or_else(machine::cores, |n| n as usize);
        let settings = Settings { threads, budget, host_memory, tokens: self.tokens, unused_flags, ..base };
        settings.precision()?;
        Ok(settings)
    }
}
