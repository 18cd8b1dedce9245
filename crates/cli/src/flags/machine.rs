//! Flags about the machine, shared by the commands that compute.

use super::at_least_one;
use super::card::Card;
use super::device::DeviceName;
use crate::error::{CliError, usage};
use clap::{Args, ValueEnum};
use runtime::{Device, Settings, Stream, machine};

/// Flags about the machine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub struct Machine {
    /// Where to compute: auto, cpu, cuda or cuda:N,M,...; cuda is all NVIDIA GPUs, which share the work (bench and
    /// verify take the first), auto those that can be used, or the CPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceName::parse)]
    device: DeviceName,

    /// Number format of the models: auto takes what the device does best, bf16 on a GPU and on a CPU with AMX, f32 on other
    /// CPUs; a CPU has these two and int8
    #[arg(long, value_enum, default_value_t = Precision::Auto)]
    precision: Precision,

    /// The most memory the run may take, like 2GiB, 500MB or 80% of what is free: on the CPU the peak resident memory of the
    /// process, code and files that are mapped included, on a GPU what the card counts for it [default: 80%]
    #[arg(long, alias = "budget", value_name = "SIZE")]
    memory_budget: Option<String>,

    /// The most memory of the host that a run on a GPU may take, like 4GiB or 50% of what is free; bounds a run on the CPU
    /// as --memory-budget does; not for bench and verify [default: no bound]
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,

    /// Tokens computed in one step; more need more memory [default: the most that fit and bring speed]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    tokens: Option<u64>,

    /// Threads that compute [default: all cores this process may use]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<u64>,

    #[command(flatten)]
    card: Card,
}

/// Steps that are open at a time where no flag says it.
const DEPTH: usize = 2;

/// The flag of the commands that can do without resident weights.
#[derive(Debug, Args)]
pub struct Streaming {
    /// Whether the weights are read from disk in every step, which takes little memory and more time
    #[arg(long, value_enum, default_value_t = When::Auto, value_name = "WHEN", help_heading = "Machine")]
    stream_weights: When,
}

/// When to stream the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// Where no step fits the memory with them
    Auto,
    /// Never: what does not fit with them in memory is refused
    Never,
    /// Always
    Always,
}

/// In which order sequences are computed.
#[derive(Debug, Args)]
pub struct Sorting {
    /// Compute sequences out of turn, by their lengths, so that steps are full (the default); results stay
    /// in the order of the input, and are the same
    #[arg(long, overrides_with = "no_sort_by_length", help_heading = "Machine")]
    sort_by_length: bool,

    /// Compute sequences in the order of the input
    #[arg(long, overrides_with = "sort_by_length", help_heading = "Machine")]
    no_sort_by_length: bool,
}

impl Sorting {
    /// As `run` takes it.
    pub fn by_length(&self) -> bool {
        !self.no_sort_by_length
    }
}

impl Streaming {
    /// As `run` takes it.
    pub fn stream(&self) -> Stream {
        match self.stream_weights {
            When::Auto => Stream::Auto,
            When::Never => Stream::Never,
            When::Always => Stream::Always,
        }
    }
}

/// Number formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    Auto,
    /// 8 bits of exponent, 8 of precision; sums, norms and means in f32
    Bf16,
    /// 5 bits of exponent, 11 of precision; sums, norms and means in f32
    Fp16,
    F32,
    /// As f32, but the models' linear layers cut what they multiply to 11 bits of precision; sums in f32. A GPU alone
    Tf32,
    /// The encoders' products of 8 bits, 4 of precision, with scales; the rest as bf16. Compute capability 8.9 and later
    Fp8,
    /// The encoders' products of integers of 8 bits, with scales; the rest as bf16. The CPU alone
    Int8,
}

impl Precision {
    /// As `run` takes it.
    pub fn chosen(self) -> Option<runtime::Precision> {
        match self {
            Self::Auto => None,
            Self::Bf16 => Some(runtime::Precision::Bf16),
            Self::Fp16 => Some(runtime::Precision::Fp16),
            Self::F32 => Some(runtime::Precision::F32),
            Self::Tf32 => Some(runtime::Precision::Tf32),
            Self::Fp8 => Some(runtime::Precision::Fp8),
            Self::Int8 => Some(runtime::Precision::Int8),
        }
    }
}

/// Threads beyond any machine are a typing error, and each takes memory.
const MOST_THREADS: u64 = 1024;

pub(super) fn threads(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= MOST_THREADS);
    number.ok_or_else(|| format!("give a number from 1 to {MOST_THREADS}"))
}

impl Machine {
    /// As `run` takes them, with so many steps open at a time.
    pub fn settings(&self, depth: u64) -> Result<Settings, CliError> {
        self.settings_on(self.device.open(self.card.options(depth as usize))?)
    }

    /// The device that was asked for.
    pub fn device(&self) -> &DeviceName {
        &self.device
    }

    /// Takes a device and threads that other flags have named.
    pub fn take(&mut self, device: Option<DeviceName>, threads: Option<u64>) {
        if let Some(device) = device {
            self.device = device;
        }
        self.threads = threads.or(self.threads);
    }

    /// The same for commands that compute on one device.
    pub fn settings_of_one(&self) -> Result<Settings, CliError> {
        if self.host_memory.is_some() {
            let text = "--host-memory: this command has no line for the host; leave it away";
            return Err(usage(text));
        }
        self.settings_on(self.device.open_one(self.card.options(DEPTH))?)
    }

    fn settings_on(&self, device: Device) -> Result<Settings, CliError> {
        let unused_flags = self.card.without_effect(&device, self.device == DeviceName::Auto)?;
        if !unused_flags.is_empty() {
            let flags = unused_flags.join(", ");
            eprintln!(
                "warning: no GPU can be used here, so this run computes on the CPU and {flags} has no effect"
            );
        }
        let precision = self.precision.chosen();
        let base = Settings { device, precision, ..Settings::default() };
        let free = base.free()?;
        let budget = self.memory_budget.as_deref().map(|text| machine::parse_budget(text, free)).transpose()?;
        let host = |text: &str| machine::parse_budget(text, machine::available().free);
        let host_memory = self.host_memory.as_deref().map(host).transpose()?;
        let threads = self.threads.map_or_else(machine::cores, |n| n as usize);
        let settings = Settings { threads, budget, host_memory, tokens: self.tokens, unused_flags, ..base };
        settings.precision()?;
        Ok(settings)
    }
}
