//! Flags about the machine, shared by the commands that compute.

use super::at_least_one;
use clap::{Args, ValueEnum};
use run::{RunError, Settings, Stream, machine};

/// Flags about the machine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub struct Machine {
    /// Where to compute: auto takes the fastest device that is there (today the CPU)
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,

    /// Number format of the models: auto takes what the device does best (today f32)
    #[arg(long, value_enum, default_value_t = Precision::Auto)]
    precision: Precision,

    /// The most memory the run may take, like 2GiB, 500MB or 80% of what is free [default: 80%]
    #[arg(long, alias = "budget", value_name = "SIZE")]
    memory_budget: Option<String>,

    /// Tokens computed in one step; more need more memory [default: the most that fit and bring speed]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    tokens: Option<u64>,

    /// Threads that compute [default: all cores this process may use]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<u64>,
}

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

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    Auto,
    Cpu,
}

/// Number formats. Both are f32 on the only device there is today.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Precision {
    Auto,
    F32,
}

/// Threads beyond any machine are a typing error, and each takes memory.
const MOST_THREADS: u64 = 1024;

fn threads(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= MOST_THREADS);
    number.ok_or_else(|| format!("give a number from 1 to {MOST_THREADS}"))
}

impl Machine {
    /// As `run` takes them.
    pub fn settings(&self) -> Result<Settings, RunError> {
        let device = match self.device {
            DeviceName::Auto => run::Device::Auto,
            DeviceName::Cpu => run::Device::Cpu,
        };
        // The plans of today are f32 throughout, so both words mean the same.
        match self.precision {
            Precision::Auto | Precision::F32 => {}
        }
        let free = machine::available().free;
        let budget = self.memory_budget.as_deref().map(|text| machine::parse_budget(text, free)).transpose()?;
        let threads = self.threads.map_or_else(machine::cores, |n| n as usize);
        Ok(Settings { device, threads, budget, tokens: self.tokens, ..Settings::default() })
    }
}
