//! Flags of `plimsoll bench`. Invariant: the work is one of a model, a single GEMM or a calibration.

use super::machine::{MachineFlags, StreamingFlags};
use super::{at_least, print, print_summary};
use crate::error::{CliError, usage};
use clap::{ArgGroup, Args};
use plimsoll_report::timeline::{self, PlannedTimeline};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{InputFiles, OutputGuard, RuntimeError, Streaming, hub};
use plimsoll_tools::bench::{BenchRequest, BenchWork, Lengths, bench, calibrate};
use std::path::PathBuf;
use std::process::ExitCode;

/// Benchmark a model or a matmul: tokens per second, TFLOP/s, memory, and the slowest kernels
///
/// Weights and inputs are random. Measurements of the work alternate with measurements of the peak rate: on a CPU a
/// loop of multiply-adds on the same number of threads, on a GPU large matmuls in the same precision. The utilisation
/// is the rate of the work divided by the peak rate.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("work").required(true).args(["model", "shape", "calibrate"]))]
#[command(after_long_help = JSON_KEYS)]
pub struct BenchCommand {
    /// Model: a Hugging Face hub id such as facebook/esm2_t12_35M_UR50D, a folder, or a config.json
    #[arg(long, value_name = "PATH|HUB_ID")]
    model: Option<String>,

    /// Batch: the number of sequences and their length in tokens, or for example 1000xlognormal for lengths distributed
    /// like those of proteins (exp N(5.6, 0.75) residues, 30 to 1022) [default: 64x168]
    #[arg(long, value_name = "SEQUENCESxTOKENS", value_parser = batch, conflicts_with_all = ["shape", "calibrate"])]
    batch: Option<(u64, Lengths)>,

    /// Benchmark a single linear layer instead of a model, with M rows, N outputs and K inputs
    #[arg(long, value_name = "MxNxK", value_parser = numbers::<3>, conflicts_with = "tokens")]
    shape: Option<[u64; 3]>,

    /// Measure how fast this machine or GPU computes and copies instead, and write the rates to the target file
    /// FILE.toml for plan --target; an existing file is replaced. On a GPU, also time the matmuls of all supported
    /// models, which otherwise happens in the first run of each model
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["tokens", "precision", "memory_budget"])]
    calibrate: Option<PathBuf>,

    /// Number of measurements after one warm-up, 1 to 1000
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = repeats)]
    repeats: u64,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,

    /// Also write a timeline of every kernel and copy of two passes over the batch to FILE.json, for ui.perfetto.dev
    #[arg(long, value_name = "FILE.json", conflicts_with = "calibrate")]
    trace: Option<PathBuf>,

    /// Also write an HTML page of one more step, as plan --html writes it, with the measured time of every instruction beside
    /// the expected time, and the measured memory over the planned; replaces an existing file
    #[arg(long, value_name = "FILE.html", conflicts_with = "calibrate")]
    timeline: Option<PathBuf>,

    /// Replace the files of --calibrate, --trace and --timeline if they exist
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    machine: MachineFlags,

    #[command(flatten)]
    streaming: StreamingFlags,
}

/// Description of the keys printed by `--json`.
const JSON_KEYS: &str = "\
Keys of --json:
  side, model, batch, length | shape    the work; length may be lognormal, shape is [M, N, K]
  dtype, device, threads, replicas         number format of the matmuls, device, threads, and replicas (groups of threads,
                                        or GPUs, that each compute their own steps)
  steps, step_tokens, passes            steps in a pass over the batch, tokens of the largest step, passes per
                                        measurement
  seconds                               seconds of a pass, for each measurement
  tokens_per_s, flops, tflops           tokens per second (for --shape rows per second), operations in a pass, and
                                        TFLOP/s, from the median of seconds
  raw_loop                              measurement of the peak rate: fma, amx (bf16), amx/6 (f32 as six bf16 matmuls),
                                        amx/int8, dots (AVX512-BF16) or vnni (int8) on a CPU, gemm (8192 x 8192 x
                                        8192 matmuls in the precision of the work) on a GPU
  raw_tflops, utilisation               median peak rate, and rate of the work divided by it; null without a peak rate
  planned_peak_bytes                    peak memory of the plan
  resident_bytes, resident_peak_bytes   resident memory of the process at the end, and its maximum
  kernels                               slowest first: op, label, shape, launches, seconds (mean over replicas),
                                        share (shares sum to 1), tflops, gb_per_s
Keys of --calibrate --json:
  target, about                         target file, and its description
  rates                                 f32, tf32, bf16, fp8, int8, memory, launch, and storage (null where the cache of
                                        the disk cannot be bypassed); on a GPU link (to_device, to_host, latency,
                                        slower_kernels, slower_copies) of pinned host memory
  copies                                on a GPU, by size: bytes, and the bytes per second to_device and to_host, each
                                        alone and beside_matmuls
  matmuls                               on a GPU, by model: the matmul algorithms that the bits of its results depend on";

/// Default batch: number of sequences and their lengths in tokens.
const BATCH: (u64, Lengths) = (64, Lengths::Equal(168));

/// Largest accepted size of a batch or GEMM dimension, so that multiplied sizes cannot overflow.
const LARGEST: u64 = 1 << 20;

/// Parses numbers separated by `x`, such as `2x20` or `4x5x6`.
fn numbers<const N: usize>(text: &str) -> Result<[u64; N], String> {
    let numbers: Option<Vec<u64>> = text.split('x').map(|n| n.parse().ok()).collect();
    let numbers = numbers.filter(|all| all.iter().all(|n| (1..=LARGEST).contains(n)));
    numbers
        .and_then(|all| all.try_into().ok())
        .ok_or_else(|| format!("give {N} whole numbers from 1 to {LARGEST}, separated by x"))
}

/// Parses a batch such as `2x20` or `2xlognormal`.
fn batch(text: &str) -> Result<(u64, Lengths), String> {
    if let Some((sequences, "lognormal")) = text.split_once('x') {
        return numbers::<1>(sequences).map(|[sequences]| (sequences, Lengths::LogNormal));
    }
    numbers::<2>(text).map(|[sequences, length]| (sequences, Lengths::Equal(length)))
}

fn repeats(text: &str) -> Result<u64, String> {
    const MAX_REPEATS: u64 = 1000;
    let number = at_least(1, text).ok().filter(|&n| n <= MAX_REPEATS);
    number.ok_or_else(|| format!("give a number of measurements from 1 to {MAX_REPEATS}"))
}

impl BenchCommand {
    /// Checks that no output is a file of the model, or exists without --force.
    fn check_outputs(&self) -> Result<(), CliError> {
        let mut inputs = InputFiles::default();
        self.model.iter().for_each(|model| hub::add_model_files(model, &mut inputs));
        let mut guard = OutputGuard::new(inputs, self.force);
        let mut files = self.calibrate.iter().chain(&self.trace).chain(&self.timeline);
        Ok(files.try_for_each(|path| guard.file(path)).map_err(RuntimeError::from)?)
    }

    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        self.check_outputs()?;
        let repeats = self.repeats as usize;
        let settings = self.streaming.applied_to(self.machine.settings_of_one()?)?;
        if settings.stream != Streaming::Auto && self.model.is_none() {
            return Err(usage("--stream-weights: only the weights of a --model are streamed; omit the flag"));
        }
        if let Some(path) = &self.calibrate {
            let done = calibrate(path, &settings, repeats)?;
            print(&if self.json { format!("{:#}", to_json(&done)) } else { done.to_string() })?;
            return Ok(ExitCode::SUCCESS);
        }
        let work = match (self.shape, self.model) {
            (Some([rows, n, k]), _) => BenchWork::Linear { rows, n, k },
            (None, model) => {
                let (sequences, lengths) = self.batch.unwrap_or(BATCH);
                BenchWork::Model { model: model.unwrap_or_default(), sequences, lengths }
            }
        };
        let budget = settings.read_budget()?.bytes.0;
        self.timeline.as_deref().map_or(Ok(()), timeline::check)?;
        let timeline = self.timeline.is_some();
        let trace = self.trace.clone();
        let mut report = bench(&BenchRequest { work, settings, repeats, trace: self.trace, timeline })?;
        // Printed before the page is written, so that a full disk does not cost the report.
        let found = report.timeline.take();
        let outputs: Vec<PathBuf> = trace.into_iter().chain(self.timeline.clone()).collect();
        print_summary(&outputs, &if self.json { to_json(&report).to_string() } else { report.to_string() })?;
        if let (Some(path), Some(found)) = (&self.timeline, found) {
            let title = match &report.work {
                BenchWork::Model { model, .. } => model.clone(),
                BenchWork::Linear { rows, n, k } => format!("linear layer {rows}x{n}x{k}"),
            };
            // The process is a part of the measured memory, so it is not subtracted from the budget.
            timeline::write(path, &[PlannedTimeline::measured(title, found, Some(budget), 0)])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
