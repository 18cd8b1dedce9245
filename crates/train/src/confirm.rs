//! Confirms a plan by running it: a trial of at most two micro-steps and the update in a process of its own, whose peak memory is compared with
//! the budget. Invariant: a trial opens the model and the data as a run does, and writes no file.

use crate::config::TrainConfig;
use crate::engine::{LargestRun, open};
use crate::opened_model::{MicroStepScalars, OpenedModel};
use crate::schedule::{Rate, hyper};
use crate::{RunState, TrainError};
use plimsoll_graph::Bytes;
use plimsoll_runtime::largest::{ConfirmationReport, TrialCommand};
use plimsoll_runtime::machine::resident;
use plimsoll_runtime::{Device, Observer, Silent};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Largest number of micro-steps of a trial: the first starts the sum of the gradients, the second adds to it, and all
/// others repeat the second.
const MICRO_STEPS: u64 = 2;

/// Measurements of a trial. [`confirm`] reads them as JSON from the process of the trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainTrial {
    /// Micro-steps that were run, and micro-steps of a whole optimizer step.
    pub micro_steps: [u64; 2],
    /// Tokens of the largest micro-batch that was run.
    pub tokens: u64,
    /// Mean cross-entropy per target.
    pub loss: f64,
    /// Whether the update was applied, that is whether every gradient was finite.
    pub updated: bool,
    /// Planned peak in the memory of the budget.
    pub planned_bytes: u64,
    /// Measured peak in the memory of the budget: of the process, or of the GPU.
    pub peak_bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
    /// Seconds from the first micro-step to the result of the update.
    pub seconds: f64,
}

/// Runs an optimizer step of at most two micro-steps, and an evaluation batch if the run evaluates, and measures the peak
/// memory.
///
/// # Errors
/// The errors of a run: a plan that does not fit, data that cannot be read, errors of the device.
pub fn trial(
    config: &TrainConfig,
    device: Device,
    observer: &mut dyn Observer,
) -> Result<TrainTrial, TrainError> {
    let machine = config.run.settings(device.clone()).machine();
    let mut config = config.clone();
    if config.epochs_to_count().is_some() {
        // The steps of the epochs need not be counted for one step.
        config.schedule.steps = Some(u64::from(u32::MAX));
    }
    let OpenedModel { facts, mut batches, mut stepper } = open(&config, device, observer)?;
    let config = config.with(facts.choices.iter().map(|(key, value)| (key, value)))?;
    let batch = &config.batch;
    let largest = config.memory.dynamic.as_ref().and_then(|dynamic| dynamic.max_batch.0);
    let micro = batch.micro_tokens.0.or(largest).unwrap_or_else(|| config.pack_tokens());
    let all_micro_steps = batch.tokens.div_ceil(micro.max(1));
    let state = RunState::new(&config.precision, batches.position()?);
    let hyper = hyper(facts.optimizer, &config.optimizer, Rate::new(&config).at(0, 0), 1);
    let scale = state.scale.of_micro_batch(&config.precision, batch.tokens);
    let start = Instant::now();
    let mut run = 0;
    let mut tokens = 0;
    let mut targets = 0;
    let mut ends = 0;
    while run < all_micro_steps.clamp(1, MICRO_STEPS) {
        let Some(batch) = batches.take(u64::MAX)? else {
            ends += 1;
            if ends > 1 {
                return Err(TrainError::EmptyEpoch);
            }
            continue;
        };
        stepper.micro_step(&batch, MicroStepScalars { keep: run > 0, loss_scale: scale, hyper: &hyper })?;
        run += 1;
        tokens = tokens.max(batch.taken.tokens);
        targets += batch.taken.targets;
    }
    stepper.apply(&hyper, (1.0 / (f64::from(scale) * targets as f64)) as f32)?;
    let mut loss = 0.0;
    let applied = stepper.finish_step(run, &mut |found| loss += found.loss)?;
    let seconds = start.elapsed().as_secs_f64();
    if config.run.evaluate_every.is_some() {
        batches.rewind()?;
        if let Some(batch) = batches.take_validation(u64::MAX)? {
            stepper.evaluate(&batch)?;
        }
    }
    let peak = match machine.taken() {
        Ok(Some(taken)) => taken,
        Ok(None) | Err(_) => resident().1,
    };
    Ok(TrainTrial {
        micro_steps: [run, all_micro_steps],
        tokens,
        loss: loss / targets.max(1) as f64,
        updated: applied.ok,
        planned_bytes: facts.peak.0,
        peak_bytes: peak.0,
        budget_bytes: facts.budget.0,
        seconds,
    })
}

/// A confirmed answer of a search for the largest value.
#[derive(Debug)]
pub struct TrainConfirmation {
    /// Measurements of the trial of the answer.
    pub trial: TrainTrial,
    /// The refusal of the next larger value; `None` if no value can be larger.
    pub refusal: Option<TrainError>,
}

/// Runs the answer of a search in a process of its own, to whose arguments the keys of the answer are added, with the same budget, and asks for the refusal of the next larger
/// value.
///
/// # Errors
/// A trial that fails, exceeds the budget, or gives a loss that is not finite; errors of planning the next value.
pub fn confirm(largest: &LargestRun, command: &TrialCommand) -> Result<TrainConfirmation, TrainError> {
    let mut overrides = largest.settings();
    overrides.push(format!("memory.budget=\"{}\"", largest.process.budget().0));
    let trial: TrainTrial = command.run(&overrides)?.map_err(|why| not_confirmed(largest, why))?;
    if trial.peak_bytes > trial.budget_bytes {
        let [peak, budget] = [trial.peak_bytes, trial.budget_bytes].map(Bytes);
        return Err(not_confirmed(largest, format!("its trial took {peak}, above the budget of {budget}")));
    }
    if !trial.loss.is_finite() {
        return Err(not_confirmed(largest, "the loss of its trial is not finite".to_owned()));
    }
    Ok(TrainConfirmation { trial, refusal: largest.refusal(&mut Silent)? })
}

fn not_confirmed(largest: &LargestRun, why: String) -> TrainError {
    TrainError::NotConfirmed { what: format!("{} {}", largest.size.name(), largest.value), why }
}

impl TrainConfirmation {
    /// The confirmation for reports.
    pub fn report(&self) -> ConfirmationReport<TrainTrial> {
        ConfirmationReport { trial: self.trial.clone(), next: self.refusal.as_ref().map(TrainError::to_string) }
    }

    /// The confirmation as text: the trial, then the refusal of the next larger value.
    pub fn to_text(&self, largest: &LargestRun) -> String {
        let TrainTrial {
            micro_steps: [run, whole],
            tokens,
            loss,
            updated,
            planned_bytes,
            peak_bytes,
            budget_bytes,
            seconds,
        } = self.trial;
        let update = if updated { "updated" } else { "update skipped, a gradient overflowed" };
        let [planned, peak, budget] = [planned_bytes, peak_bytes, budget_bytes].map(Bytes);
        let name = largest.size.name();
        let next = match (&self.refusal, largest.refused) {
            (Some(refusal), Some(refused)) => format!("the next, {name} {refused}, is {refusal}"),
            (_, _) => format!("no larger number of {name} can be given"),
        };
        format!(
            "confirmed {name} {}: {run} of {whole} micro-steps, of up to {tokens} tokens, and the update in {seconds:.1} s; loss {loss:.4}, {update}\n  \
             peak {peak} measured, {planned} planned, budget {budget}\n{next}\n",
            largest.value,
        )
    }
}
