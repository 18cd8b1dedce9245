//! `plimsoll bench`: measures the speed of a model or a matmul on this machine, the time of each kernel, and
//! the utilisation of the machine's peak arithmetic rate. `calibrate` writes the measured rates as a target
//! file. Invariant: the peak loop and the work alternate in one process on the same number of threads, so that
//! other load on the machine affects both; operations and bytes follow from the cost rules of the ops at the
//! real counts of each step.

mod calibrate;
mod case;
mod ceiling;
mod lengths;
mod link;
mod report;
mod steps;
mod storage;
mod trace;
mod training;

pub use calibrate::{CalibrationReport, calibrate};
pub use lengths::Lengths;
pub use link::CopyRates;
pub use report::{BenchReport, KernelTiming};

use crate::ToolError;
use case::BenchCase;
use ceiling::PeakRate;
use plimsoll_runtime::Settings;
use std::path::PathBuf;

/// Work that a benchmark times. Weights and inputs are pseudo-random with fixed seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BenchWork {
    /// The forward pass of an encoder or decoder over a batch of sequences, including mean pooling.
    Model {
        /// A known hub id, a config.json, or a model folder; weights are not read.
        model: String,
        /// Number of sequences in the batch.
        sequences: u64,
        /// Lengths of the sequences.
        lengths: Lengths,
    },
    /// One linear layer with a bias: `(rows, k)` times the transpose of `(n, k)`.
    Linear {
        /// Rows of the input (M).
        rows: u64,
        /// Output features (N).
        n: u64,
        /// Input features (K).
        k: u64,
    },
}

/// Request of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchRequest {
    /// Work to time.
    pub work: BenchWork,
    /// Device, threads, precision and memory budget. A batch is split into steps of at most `tokens` tokens.
    pub settings: Settings,
    /// Number of measurements, each of the peak loop and then of the work, after the warm-up; at least one is made.
    pub repeats: usize,
    /// File for a trace with the times of every launch and copy of additional passes; `None` for no trace.
    pub trace: Option<PathBuf>,
    /// Whether the report has the timeline of an additional step, with what was measured.
    pub timeline: bool,
}

/// Runs a benchmark and writes the trace if one was requested.
pub fn bench(request: &BenchRequest) -> Result<BenchReport, ToolError> {
    let mut case = BenchCase::start(&request.work, &request.settings)?;
    let mut ceiling = PeakRate::of(&request.settings)?;
    let turns = case.time(request.repeats, &mut |dtype, seconds| ceiling.rate(dtype, seconds))?;
    if let Some(path) = &request.trace {
        trace::write(path, &mut case)?;
    }
    let timeline =
        if request.timeline { Some(case.timeline(request.settings.machine().as_ref())?) } else { None };
    Ok(BenchReport { timeline, ..BenchReport::new(request, &case, turns) })
}

/// Median: for an even number of values the mean of the two in the middle, and zero for no values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::Bytes;

    #[test]
    fn medians() {
        for (values, wanted) in [(&[][..], 0.0), (&[3.0, 1.0, 2.0], 2.0), (&[4.0, 1.0, 3.0, 2.0], 2.5)] {
            assert_eq!(median(values), wanted);
        }
    }

    #[test]
    fn operations_are_those_of_the_real_counts() {
        // 5 sequences of 12 tokens in steps of 2, 2 and 1: the last step is smaller.
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/goldens/esm2/config.json");
        let lengths = Lengths::Equal(12);
        let work = |sequences| BenchWork::Model { model: config.to_owned(), sequences, lengths };
        let settings = Settings { threads: 1, tokens: Some(25), ..Settings::default() };
        let report = |sequences| {
            let (work, settings) = (work(sequences), settings.clone());
            bench(&BenchRequest { work, settings, repeats: 1, trace: None, timeline: false }).expect("timed")
        };
        let (five, one) = (report(5), report(1));
        assert_eq!((five.steps, five.step_tokens, one.steps, one.step_tokens), (3, 24, 1, 12));
        let attention = |r: &BenchReport| r.kernels.iter().find(|k| k.op == "attention").map(|k| k.flops);
        // 4 operations (2 in each of the 2 matmuls) for each pair of tokens and each column; 2 layers with 40
        // columns.
        assert_eq!(attention(&one), Some(2.0 * 4.0 * 12.0 * 12.0 * 40.0));
        assert_eq!(attention(&five), attention(&one).map(|f| 5.0 * f));
        assert!(five.kernels.iter().all(|k| k.launches % 3 == 0));
    }

    /// A batch with enough tokens for four replicas: operations, launches and shapes add up to the figures of
    /// one replica.
    #[test]
    fn lanes_share_the_steps() {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/goldens/esm2/config.json");
        let work =
            |sequences| BenchWork::Model { model: config.to_owned(), sequences, lengths: Lengths::Equal(105) };
        let report = |threads, sequences| {
            let settings = Settings { threads, budget: Some(Bytes(1 << 30)), ..Settings::default() };
            bench(&BenchRequest { work: work(sequences), settings, repeats: 1, trace: None, timeline: false })
                .expect("timed")
        };
        let (one, four, small) = (report(1, 40), report(4, 40), report(4, 9));
        assert_eq!([&one, &four, &small].map(|r| (r.replicas, r.steps)), [(1, 2), (4, 8), (1, 1)]);
        assert_eq!((four.tokens, four.step_tokens), (40 * 105, 5 * 105));
        // Rotary tables are computed once per step, so their operations depend on the number of steps.
        let of_tokens = |k: &&KernelTiming| k.op != "rotary_table";
        let sorted = |r: &BenchReport| {
            let flops = r.kernels.iter().filter(of_tokens).map(|k| (k.op, k.label.clone(), k.flops));
            let mut flops: Vec<_> = flops.collect();
            flops.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
            flops
        };
        assert_eq!(sorted(&one), sorted(&four));
        assert!(four.device.contains("4 replicas of 1 thread"), "{}", four.device);
        let text = four.to_string();
        assert!(text.contains("in 8 steps of up to 525") && text.contains("means over the replicas"), "{text}");
    }
}
