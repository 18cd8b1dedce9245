//! Tests of weight files through the public API. Invariant: every file is created by a test or belongs to the goldens,
//! and a test writes only to its own temporary folder.

mod build;
mod damage;
mod hub;
mod pickles;
mod sources;
mod writing;

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{folder, golden};
use plimsoll_data::weights::{Weights, WeightsError};

/// Writes `bytes` to the file `name` in a new folder for one test.
fn file(test: &str, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder(test).join(name);
    fs::write(&path, bytes).expect("the temporary file can be written");
    path
}

/// Formats the error and its causes as the command line does, without the path of the temporary folder.
fn message(error: &WeightsError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text.replace(&format!("{}/data/", env!("CARGO_TARGET_TMPDIR")), "")
}

/// Opens a file that must be refused, and returns the message.
fn refusal(path: &Path) -> String {
    message(&Weights::open(path).expect_err("it must not open"))
}

/// All elements of a floating-point tensor, as f32.
fn all(weights: &Weights, name: &str) -> Vec<f32> {
    let count = weights.tensor(name).expect("the tensor is there").elements();
    let mut out = vec![f32::NAN; count as usize];
    weights.read_f32(name, 0..count, &mut out).expect("the tensor can be read");
    out
}
