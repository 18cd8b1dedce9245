//! `plimsoll verify`: runs known sequences through real weights and checks the outputs. For each model it
//! compares the sizes, files and numbers with published values and with reference outputs beside the weights,
//! and checks properties that hold for any model. Invariant: every tolerance is a constant of this module,
//! never read from a model; a note neither passes nor fails.

mod compute;
mod decoder;
mod distance;
mod encoder;
mod facts;
mod head;
mod reference;
mod sequences;

use crate::ToolError;
use encoder::OpenedEncoder;
use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_data::weights::HubEnv;
use plimsoll_runtime::model::HEAD_NAMES;
use plimsoll_runtime::{HeadModel, Level, Observer, RuntimeError, Settings};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

/// Options of a verification.
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// A bundle folder with `dnabert_s/`, `esm2/` and its heads, or a model folder.
    pub weights: Option<PathBuf>,
    /// Encoders and decoders to verify: paths or hub ids.
    pub models: Vec<String>,
    /// Weight files of heads to verify without their encoders.
    pub heads: Vec<PathBuf>,
    /// A folder with the files of VirNucPro runs: sequences with their embeddings and scores.
    pub reference: Option<PathBuf>,
    /// Device, precision and memory settings.
    pub settings: Settings,
}

/// Result of a verification.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyReport {
    /// One verdict per model.
    pub models: Vec<Verdict>,
}

/// Result of the checks of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Name or path as the user gave it.
    pub model: String,
    /// Architecture and width; "not opened" if it could not be opened.
    pub about: String,
    /// The checks, in execution order.
    pub checks: Vec<Check>,
}

/// One check of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Short name of the checked property.
    #[serde(rename = "check")]
    pub name: &'static str,
    /// Outcome of the check.
    pub outcome: CheckOutcome,
    /// Measured values and tolerances as text.
    pub detail: String,
}

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum CheckOutcome {
    /// The property holds.
    #[serde(rename = "pass")]
    Pass,
    /// The property does not hold.
    #[serde(rename = "FAIL")]
    Fail,
    /// Information without an expected value.
    #[serde(rename = "note")]
    Note,
}

/// Subfolders of a bundle, as `predict --weights` expects them.
pub(crate) const DNA: &str = "dnabert_s";
pub(crate) const PROTEIN: &str = "esm2";

/// Verifies the given folder, encoders and heads, in this order. A model that cannot be opened is a failed
/// check, not an `Err`.
pub fn verify(options: &VerifyOptions, observer: &mut dyn Observer) -> Result<VerifyReport, ToolError> {
    let mut verification =
        Verification { options, env: HubEnv::from_process(), observer, report: VerifyReport::default() };
    if let Some(folder) = &options.weights {
        verification.folder(folder)?;
    }
    for model in &options.models {
        verification.encoder(model)?;
    }
    for path in &options.heads {
        if !path.exists() {
            return Err(ToolError::NoHead { path: path.clone() });
        }
        let bundle = path.parent().unwrap_or(Path::new("."));
        verification.head(&head::HeadCase { path, encoders: head::Encoders::Unknown, bundle })?;
    }
    Ok(verification.report)
}

/// State of a verification in progress.
struct Verification<'a> {
    options: &'a VerifyOptions,
    env: HubEnv,
    observer: &'a mut dyn Observer,
    report: VerifyReport,
}

impl Verification<'_> {
    /// Verifies a model folder, or a bundle of two encoders and its heads.
    fn folder(&mut self, folder: &Path) -> Result<(), ToolError> {
        if folder.join(plimsoll_runtime::hub::CONFIG).exists() {
            return self.encoder(&folder.display().to_string()).map(drop);
        }
        let heads = HeadModel::in_folder(folder);
        let [dna, protein] = [DNA, PROTEIN].map(|name| folder.join(name));
        if heads.is_empty() && !dna.exists() && !protein.exists() {
            return Err(ToolError::NothingToVerify { folder: folder.to_owned() });
        }
        let dna = self.part(&dna)?;
        let protein = self.part(&protein)?;
        let encoders = match dna.as_ref().zip(protein.as_ref()) {
            Some((dna, protein)) => head::Encoders::Opened(dna, protein),
            None => head::Encoders::Missing,
        };
        if heads.is_empty() {
            let mut verdict = Verdict::new(&folder.join("head.safetensors").display().to_string());
            let text = format!(
                "no head was found; a folder of weights must contain all three models, the head as \
                    {HEAD_NAMES}"
            );
            verdict.add("opens", false, text);
            self.report.models.push(verdict);
        }
        for path in &heads {
            self.head(&head::HeadCase { path, encoders, bundle: folder })?;
        }
        Ok(())
    }

    fn head(&mut self, case: &head::HeadCase<'_>) -> Result<(), ToolError> {
        self.observer.say(Level::Info, &format!("verifying {}", EscapedPath(case.path)));
        self.report.models.push(head::verify(case, self.options)?);
        Ok(())
    }

    /// Verifies an encoder of a bundle; a missing folder is a failed check.
    fn part(&mut self, path: &Path) -> Result<Option<OpenedEncoder>, ToolError> {
        if path.exists() {
            return self.encoder(&path.display().to_string());
        }
        // Not opened: a path that does not exist might be taken for a hub id.
        let mut verdict = Verdict::new(&path.display().to_string());
        verdict.add("opens", false, "it was not found; a folder of weights must contain all three models");
        self.report.models.push(verdict);
        Ok(None)
    }

    fn encoder(&mut self, model: &str) -> Result<Option<OpenedEncoder>, ToolError> {
        self.observer.say(Level::Info, &format!("verifying {model}"));
        let (verdict, opened) = encoder::verify(model, self.options, &self.env, self.observer)?;
        self.report.models.push(verdict);
        Ok(opened)
    }
}

impl Verdict {
    fn new(model: &str) -> Self {
        Self { model: model.to_owned(), about: "not opened".to_owned(), checks: vec![] }
    }

    fn add(&mut self, name: &'static str, passes: bool, detail: impl Into<String>) {
        let outcome = if passes { CheckOutcome::Pass } else { CheckOutcome::Fail };
        self.checks.push(Check { name, outcome, detail: detail.into() });
    }

    fn note(&mut self, name: &'static str, detail: impl Into<String>) {
        self.checks.push(Check { name, outcome: CheckOutcome::Note, detail: detail.into() });
    }

    /// Adds a check that passes if `worst`, the largest difference, is at most `bound`.
    fn near(&mut self, name: &'static str, what: &str, worst: f32, bound: f32) {
        self.add(name, worst <= bound, format!("{what}: off by {worst:.1e} at most, {bound:.0e} allowed"));
    }

    /// Whether no check failed.
    pub fn passes(&self) -> bool {
        self.checks.iter().all(|check| check.outcome != CheckOutcome::Fail)
    }
}

/// Largest absolute difference; infinite if the lengths differ or a difference is NaN.
fn worst(found: &[f32], wanted: &[f32]) -> f32 {
    if found.len() != wanted.len() {
        return f32::INFINITY;
    }
    let differences = found.iter().zip(wanted).map(|(f, w)| (f - w).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// An error and its sources, joined in one line.
fn chain(error: &RuntimeError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

impl VerifyReport {
    /// Whether no check of any model failed.
    pub fn passes(&self) -> bool {
        self.models.iter().all(Verdict::passes)
    }
}

/// Serializes the report with the version of Plimsoll and [`VerifyReport::passes`].
impl Serialize for VerifyReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut report = serializer.serialize_struct("VerifyReport", 3)?;
        report.serialize_field("plimsoll", env!("CARGO_PKG_VERSION"))?;
        report.serialize_field("passes", &self.passes())?;
        report.serialize_field("models", &self.models)?;
        report.end()
    }
}

/// Serializes the verdict with [`Verdict::passes`].
impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut verdict = serializer.serialize_struct("Verdict", 4)?;
        verdict.serialize_field("model", &self.model)?;
        verdict.serialize_field("about", &self.about)?;
        verdict.serialize_field("passes", &self.passes())?;
        verdict.serialize_field("checks", &self.checks)?;
        verdict.end()
    }
}

impl CheckOutcome {
    fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "FAIL",
            Self::Note => "note",
        }
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for verdict in &self.models {
            writeln!(f, "{}: {}", Name(&verdict.model), verdict.about)?;
            for Check { name, outcome, detail } in &verdict.checks {
                writeln!(f, "  {}  {name:<14}  {detail}", outcome.word())?;
            }
        }
        let passed = self.models.iter().filter(|verdict| verdict.passes()).count();
        let word = if self.passes() { "pass" } else { "FAIL" };
        write!(f, "{word}: {passed} of {} models", self.models.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences() {
        assert_eq!(worst(&[1.0, 2.0], &[1.5, 2.0]), 0.5);
        assert_eq!(worst(&[], &[]), 0.0);
        for (found, wanted) in [(&[1.0][..], &[][..]), (&[f32::NAN], &[1.0]), (&[f32::INFINITY], &[1.0])] {
            assert_eq!(worst(found, wanted), f32::INFINITY);
        }
    }
}
