//! Checks of a decoder language model. Invariant: as for encoders, checks do not modify the model, and every tolerance is a
//! constant.

use super::compute::{EncoderOutputs, ModelRunner};
use super::encoder::{answers, batch_invariance, weights};
use super::sequences::{self, Golden, TestSequence};
use super::{Verdict, VerifyOptions, distance, worst};
use crate::ToolError;
use crate::list::parameters;
use plimsoll_plan::Precision;
use plimsoll_runtime::session::SessionModel;
use plimsoll_runtime::{DecoderModel, Level, Observer, RuntimeError, Settings};

/// Tolerance of the hidden states of a text that is cut off, relative to those of the whole text. The kernels may
/// divide the rows of attention in another way, so the order of the sums differs.
const PREFIX_BOUND: f32 = 1e-4;

/// Verifies an opened decoder.
pub(super) fn verify(
    model: &DecoderModel,
    options: &VerifyOptions,
    verdict: &mut Verdict,
    observer: &mut dyn Observer,
) -> Result<(), ToolError> {
    let architecture = model.architecture();
    let precision = options.settings.precision()?;
    verdict.about = format!("{} of width {}", architecture.family(), model.config.hidden_size);
    let tensors = model.weights.tensors().count();
    let count = parameters(&architecture)?;
    verdict.add("opens", true, format!("{tensors} tensors; {count} parameters"));
    if options.reference.is_some() {
        verdict.note("reference", "not compared: VirNucPro has no decoder");
    }
    let own = sequences::own(&model.tokenizer)?;
    let (letters, tokens) = own.iter().fold((0, 0), |sum, s| (sum.0 + s.letters.len(), sum.1 + s.tokens.len()));
    let bytes_per_token = letters as f64 / tokens as f64;
    verdict.note("tokens", format!("{bytes_per_token:.2} bytes a token in {} texts", own.len()));
    let golden = Golden::find(&model.weights, &model.tokenizer, verdict)?;
    let all = own.iter().chain(golden.iter().flat_map(|golden| &golden.sequences));
    let longest = all.clone().map(|s| s.tokens.len()).max().unwrap_or(0) as u64;
    let wide = Settings { precision: Some(Precision::F32), ..options.settings.clone() };
    let has_head = model.has_head();
    if !has_head {
        verdict.note("language", "prediction of tokens: not checked, because the file has no lm_head.weight");
    }
    let mut runner = ModelRunner::start(model, has_head, &wide, longest)?;
    observer.say(Level::Detail, &format!("{} is loaded", model.name));
    weights(&runner, verdict);
    if let Some(golden) = &golden {
        answers(golden, &mut runner, verdict)?;
    }
    batch_invariance(&own, &mut runner, verdict)?;
    causality(&own, &mut runner, verdict)?;
    if precision == Precision::F32 {
        return Ok(());
    }
    let wanted = runner.answers(all.clone().map(|s| &s.tokens[..]))?;
    drop(runner);
    observer.say(Level::Info, &format!("verifying {} in {}", model.name, precision.name()));
    let mut runner = ModelRunner::start(model, has_head, &options.settings, longest)?;
    let found = runner.answers(all.map(|s| &s.tokens[..]))?;
    distance::answers(precision, &wanted, &found, verdict);
    batch_invariance(&own, &mut runner, verdict)
}

/// Checks that a token does not depend on the tokens after it: the hidden states of the first half of a text are those of
/// the whole text.
fn causality(own: &[TestSequence], runner: &mut ModelRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
    let whole = runner.answers(own.iter().map(|s| &s.tokens[..]))?;
    let halves = runner.answers(own.iter().map(|s| &s.tokens[..s.tokens.len().div_ceil(2)]))?;
    let mut furthest = 0f32;
    for (whole, EncoderOutputs { hidden, .. }) in whole.iter().zip(&halves) {
        let start = whole.hidden.get(..hidden.len()).ok_or_else(|| RuntimeError::bug("a text is too short"))?;
        let size = start.iter().fold(1f32, |size, x| size.max(x.abs()));
        furthest = furthest.max(worst(hidden, start) / size);
    }
    verdict.near("causal", &format!("first halves of {} texts", own.len()), furthest, PREFIX_BOUND);
    Ok(())
}
