//! `plimsoll bench`: how fast a model or a product runs here, which kernels take the time, and how much of
//! the machine's arithmetic that is. `calibrate` writes the rates that a target is made of.
//! Invariant: the raw loop and the work take turns in one process on as many threads, so that a busy machine
//! is busy for both; operations and bytes are those of the ops' rules at the counts that really ran.

mod calibrate;
mod ceiling;
mod lengths;
mod report;
mod steps;
mod storage;
mod subject;
mod trace;
mod training;

pub use calibrate::{Calibration, calibrate};
pub use lengths::Lengths;
pub use report::{Kernel, Report};

use crate::ToolError;
use ceiling::Ceiling;
use runtime::Settings;
use std::path::PathBuf;
use subject::Subject;

/// What is timed. Weights and inputs are random, the same each time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// The forward pass of an encoder over sequences, to their means.
    Model {
        /// A known hub id, a config.json, or a model folder; weights are not read.
        model: String,
        /// Sequences of a batch.
        sequences: u64,
        /// Tokens of each.
        lengths: Lengths,
    },
    /// One linear with a bias: (rows, k) times (n, k) transposed.
    Linear {
        /// M.
        rows: u64,
        /// N.
        n: u64,
        /// K.
        k: u64,
    },
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is timed.
    pub work: Work,
    /// Where. A batch is cut into steps of at most `tokens`.
    pub settings: Settings,
    /// Turns of the raw loop and the work after one warm-up.
    pub repeats: usize,
    /// Where to write when every launch and copy of some passes ran.
    pub trace: Option<PathBuf>,
}

/// Runs it.
pub fn bench(request: &Request) -> Result<Report, ToolError> {
    let mut subject = Subject::start(&request.work, &request.settings)?;
    let mut ceiling = Ceiling::of(&request.settings)?;
    let turns = subject.time(request.repeats, &mut |dtype, seconds| ceiling.rate(dtype, seconds))?;
    if let Some(path) = &request.trace {
        trace::write(path, &mut subject)?;
    }
    Ok(Report::new(request, &subject, turns))
}

/// The middle one; of an even number the mean of the middle two. Zero of none.
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
    use graph::Bytes;

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
        let work = |sequences| Work::Model { model: config.to_owned(), sequences, lengths };
        let settings = Settings { threads: 1, tokens: Some(25), ..Settings::default() };
        let report = |sequences| {
            let (work, settings) = (work(sequences), settings.clone());
            bench(&Request { work, settings, repeats: 1, trace: None }).expect("timed")
        };
        let (five, one) = (report(5), report(1));
        assert_eq!((five.steps, five.step_tokens, one.steps, one.step_tokens), (3, 24, 1, 12));
        let attention = |r: &Report| r.kernels.iter().find(|k| k.op == "attention").map(|k| k.flops);
        // 4 operations for each pair of tokens and column: 2 layers of 40 columns.
        assert_eq!(attention(&one), Some(2.0 * 4.0 * 12.0 * 12.0 * 40.0));
        assert_eq!(attention(&five), attention(&one).map(|f| 5.0 * f));
        assert!(five.kernels.iter().all(|k| k.launches % 3 == 0));
    }

    /// A batch that is worth four lanes and no more: what is counted is that of one lane.
    #[test]
    fn lanes_share_the_steps() {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/goldens/esm2/config.json");
        let work =
            |sequences| Work::Model { model: config.to_owned(), sequences, lengths: Lengths::Equal(105) };
        let report = |threads, sequences| {
            let settings = Settings { threads, budget: Some(Bytes(1 << 30)), ..Settings::default() };
            bench(&Request { work: work(sequences), settings, repeats: 1, trace: None }).expect("timed")
        };
        let (one, four, small) = (report(1, 40), report(4, 40), report(4, 9));
        assert_eq!([&one, &four, &small].map(|r| (r.lanes, r.steps)), [(1, 2), (4, 8), (1, 1)]);
        assert_eq!((four.tokens, four.step_tokens), (40 * 105, 5 * 105));
        // Tables are made once for each step.
        let of_tokens = |k: &&Kernel| k.op != "rotary_table";
        let sorted = |r: &Report| {
            let flops = r.kernels.iter().filter(of_tokens).map(|k| (k.op, k.label.clone(), k.flops));
            let mut flops: Vec<_> = flops.collect();
            flops.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
            flops
        };
        assert_eq!(sorted(&one), sorted(&four));
        assert!(four.device.contains("4 lanes of 1 thread"), "{}", four.device);
        let text = four.to_string();
        assert!(text.contains("in 8 steps of up to 525") && text.contains("the mean of the lanes"), "{text}");
    }
}
