//! Calls of a caller, a classifier of DNA windows that scores every window: calibrated probabilities, calls with reasons,
//! false discovery rates and regions. The models and the flow of records are those of every prediction (`run.rs`).
//! Invariant: a probability is never shown without the calibration that belongs to the weights.

pub(crate) mod calibration;
pub(crate) mod fdr;
pub(crate) mod regions;
pub(crate) mod regions_table;
pub(crate) mod results;
pub(crate) mod score;
pub(crate) mod windows;

pub use calibration::{AtLength, Calibration, ErrorBounds, OperatingPoint, Preset, RegionParameters};
pub use score::{Limits, Threshold};

/// The logistic function.
pub(crate) fn sigmoid(log_odds: f64) -> f64 {
    1.0 / (1.0 + (-log_odds).exp())
}

/// Log odds of a probability: infinite for 0 and 1.
pub(crate) fn logit(probability: f64) -> f64 {
    (probability / (1.0 - probability)).ln()
}
