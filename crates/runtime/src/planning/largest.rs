//! The largest step of a model that fits a budget, and its trial on this machine. Invariant: the answer was planned within the
//! budget and the next larger step was refused, by the plan that `plimsoll plan` makes for these numbers of tokens.

use crate::machine::resident;
use crate::price::{self, PriceRequest};
use crate::session::bounds::{TOKEN_STEP, tokens};
use crate::session::{self, Next, Push, SessionModel, StageStart};
use crate::{Budget, Device, Model, Observer, RequestError, RuntimeError, Settings};
use plimsoll_data::pack::Order;
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::Bytes;
use plimsoll_plan::{PlanError, Program, Streaming, grow};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// The largest step that fits the budget of a request.
#[derive(Debug)]
pub struct LargestStep {
    /// The request with the largest number of tokens.
    pub request: PriceRequest,
    /// Its program.
    pub program: Program,
    /// The largest number of tokens.
    pub tokens: u64,
    /// The next larger number of tokens; `None` if that is more than a step can have.
    pub refused: Option<RefusedStep>,
}

/// The step that was refused.
#[derive(Debug)]
pub struct RefusedStep {
    /// Its number of tokens.
    pub tokens: u64,
    /// Its refusal.
    pub refusal: RuntimeError,
}

/// Largest number of tokens that is tried, in units of [`TOKEN_STEP`]: positions of tokens are i32.
const MOST: u64 = i32::MAX as u64 / TOKEN_STEP;

/// Searches for the largest step of `model` that fits the budget. Weights are streamed only if the request demands it, or if not
/// even the smallest step fits with resident weights.
///
/// # Errors
/// [`PlanError::OverBudget`] if even the smallest step does not fit, or a model that cannot be read.
pub fn largest(model: &str, request: &PriceRequest) -> Result<LargestStep, RuntimeError> {
    let smallest = price::LONGEST.div_ceil(TOKEN_STEP);
    let stream = match request.stream {
        Streaming::Auto if fits(model, &sized(request, smallest, Streaming::Never))? => Streaming::Never,
        Streaming::Auto => Streaming::Always,
        asked => asked,
    };
    let (low, high) = grow(smallest, MOST, &mut |n| fits(model, &sized(request, n, stream)))?;
    let found = sized(request, low, stream);
    // The bill, if not even the smallest step fits.
    let program = price::program(model, &found)?;
    let tokens = low * TOKEN_STEP;
    let Some(high) = high else {
        return Ok(LargestStep { request: found, program, tokens, refused: None });
    };
    match price::program(model, &sized(request, high, stream)) {
        Err(refusal @ RuntimeError::Plan(PlanError::OverBudget(_) | PlanError::TooLarge { .. })) => {
            let refused = Some(RefusedStep { tokens: high * TOKEN_STEP, refusal });
            Ok(LargestStep { request: found, program, tokens, refused })
        }
        Err(error) => Err(error),
        Ok(_) => Err(RuntimeError::bug("the step after the largest fits")),
    }
}

/// The request for steps of `n` times [`TOKEN_STEP`] tokens.
fn sized(request: &PriceRequest, n: u64, stream: Streaming) -> PriceRequest {
    PriceRequest { tokens: Some(n * TOKEN_STEP), stream, ..request.clone() }
}

/// Whether a step of one replica fits the budget.
fn fits(model: &str, request: &PriceRequest) -> Result<bool, RuntimeError> {
    match price::alone(model, request) {
        Ok(_) => Ok(true),
        Err(RuntimeError::Plan(PlanError::OverBudget(_) | PlanError::TooLarge { .. })) => Ok(false),
        Err(error) => Err(error),
    }
}

impl LargestStep {
    /// First line of the plan as text.
    pub fn to_text(&self) -> String {
        let next = match &self.refused {
            Some(refused) => format!("{} does not", refused.tokens),
            None => "no step can have more".to_owned(),
        };
        format!("the largest that fits: a step of {} tokens; {next}\n", self.tokens)
    }

    /// The answer for reports.
    pub fn report(&self) -> LargestReport {
        let refused = self.refused.as_ref().map(|refused| refused.tokens);
        LargestReport { of: "tokens", value: self.tokens, refused }
    }
}

/// The largest size of a step or model that fits a budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LargestReport {
    /// Dimension that was maximised, such as `tokens`.
    pub of: &'static str,
    /// The largest value that fits.
    pub value: u64,
    /// The next larger value, which does not fit; `None` if no larger value is possible.
    pub refused: Option<u64>,
}

/// The trial of the largest step or model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ConfirmationReport<Trial> {
    /// Measurements of the trial.
    pub trial: Trial,
    /// The refusal of the next larger value; `None` if no larger value is possible.
    pub next: Option<String>,
}

/// Measurements of the trial of a step. [`confirm`] reads it as JSON from the process of the trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTrial {
    /// Tokens of the largest step that was run.
    pub tokens: u64,
    /// Whether all outputs are finite.
    pub finite: bool,
    /// Planned peak in the memory of the budget.
    pub planned_bytes: u64,
    /// Measured peak in the memory of the budget: of the process, or of the GPU.
    pub peak_bytes: u64,
    /// The budget.
    pub budget_bytes: u64,
    /// Seconds of the steps.
    pub seconds: f64,
}

/// Runs a full step of `model` on every replica of this machine as the request plans it, with sequences of the longest length,
/// and measures the peak memory.
///
/// # Errors
/// Those of a run: a model without weights, a plan that does not fit, errors of the device.
pub fn trial(
    model: &str,
    request: &PriceRequest,
    device: Device,
    observer: &mut dyn Observer,
) -> Result<StepTrial, RuntimeError> {
    let usual = Settings::default();
    let threads = match device {
        Device::Cpu => usize::try_from(request.target.workers).unwrap_or(usize::MAX),
        Device::Machines(_) => usual.threads,
    };
    let settings = Settings {
        device,
        precision: request.precision,
        threads,
        budget: Some(price::budget(request)?),
        tokens: request.tokens,
        stream: request.stream,
        ..usual
    };
    let machine = settings.machine();
    let opened = Model::open_with(model, &HubEnv::from_process(), observer)?;
    let stage = price::stage(opened.architecture(), request, settings.policy()?);
    let budget = Budget { process: price::process(request).lines().to_vec(), ..settings.read_budget()? };
    let planned = settings.plan_stages(session::StagesRequest {
        alternatives: vec![vec![stage]],
        replicas: settings.most_replicas(None),
        tokens: settings.tokens,
        budgets: vec![budget.clone()],
    })?;
    let start =
        StageStart { order: Order::Input, weights: vec![opened.weights()], running: vec![], kept: "outputs" };
    let mut session = planned.start(0, start, observer)?;
    let encoder = session.model(price::PLAN).ok_or_else(|| RuntimeError::bug("the session has no model"))?;
    let mut encoded = vec![];
    opened.tokenizer().encode(b"ACGT", &mut encoded)?;
    let full = tokens(session.program());
    let longest = session.longest(encoder);
    let sequence: Vec<i32> = encoded.iter().copied().cycle().take(longest).collect();
    let mut key = 0;
    let mut largest = 0;
    let mut finite = true;
    let began = Instant::now();
    for _ in 0..session.program().replicas() {
        let mut left = full as usize;
        while left > 0 {
            let length = left.min(longest);
            match session.push([(encoder, key, &sequence[..length])])? {
                Push::Taken => (key, left) = (key + 1, left - length),
                Push::Full => complete(&mut session, &mut largest, &mut finite).map(drop)?,
            }
        }
    }
    session.end();
    while complete(&mut session, &mut largest, &mut finite)? {}
    let seconds = began.elapsed().as_secs_f64();
    let peak = match machine.taken() {
        Ok(Some(taken)) => taken,
        Ok(None) | Err(_) => resident().1,
    };
    let planned_bytes = session.program().peak() + budget.process_bytes();
    let [planned_bytes, peak_bytes, budget_bytes] = [planned_bytes, peak, budget.bytes].map(|bytes| bytes.0);
    Ok(StepTrial { tokens: largest, finite, planned_bytes, peak_bytes, budget_bytes, seconds })
}

/// Waits for a step, and notes its tokens and whether its outputs are finite; false if none is in flight.
fn complete(
    session: &mut session::StepSession<'_>,
    largest: &mut u64,
    finite: &mut bool,
) -> Result<bool, RuntimeError> {
    let Next::Ready(step) = session.next(&|| Ok(()))? else { return Ok(false) };
    *largest = step.counts.tokens.max(*largest);
    *finite &= (0..step.keys.len()).all(|i| step.values(0, i).iter().all(|x| x.is_finite()));
    session.recycle(step);
    Ok(true)
}

/// How to start a trial in a process of its own.
#[derive(Clone, Debug)]
pub struct TrialCommand {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The argument before each `key=value` that overrides a key of a training configuration.
    pub override_flag: &'static str,
}

impl TrialCommand {
    /// Runs the trial with overrides of keys and reads its result. The inner error says why there is none.
    ///
    /// # Errors
    /// The executable cannot be started.
    pub fn run<T: DeserializeOwned>(&self, overrides: &[String]) -> Result<Result<T, String>, RuntimeError> {
        let overrides = overrides.iter().flat_map(|text| [self.override_flag, text]);
        let done = Command::new(&self.program).args(&self.arguments).args(overrides).output();
        let done = done.map_err(RuntimeError::io(&self.program))?;
        if !done.status.success() {
            let stderr = String::from_utf8_lossy(&done.stderr);
            return Ok(Err(format!("its trial ended with {}: {}", done.status, stderr.trim())));
        }
        Ok(serde_json::from_slice(&done.stdout).map_err(|error| format!("its trial: {error}")))
    }
}

/// A confirmed answer of [`largest`].
#[derive(Debug)]
pub struct StepConfirmation<'a> {
    largest: &'a LargestStep,
    trial: StepTrial,
}

/// Runs the trial of the answer in a process of its own.
///
/// # Errors
/// [`RequestError::NotConfirmed`]: a trial that fails, exceeds the budget, or gives outputs that are not finite.
pub fn confirm<'a>(
    largest: &'a LargestStep,
    command: &TrialCommand,
) -> Result<StepConfirmation<'a>, RuntimeError> {
    let trial: StepTrial = command.run(&[])?.map_err(|why| not_confirmed(largest, why))?;
    let StepTrial { tokens, finite, peak_bytes, budget_bytes, .. } = trial;
    if peak_bytes > budget_bytes {
        let [peak, budget] = [peak_bytes, budget_bytes].map(Bytes);
        let why = format!("its trial took {peak}, above the budget of {budget}");
        return Err(not_confirmed(largest, why));
    }
    if tokens != largest.tokens {
        return Err(not_confirmed(largest, format!("its trial ran steps of up to {tokens} tokens")));
    }
    if !finite {
        return Err(not_confirmed(largest, "an output of its trial is not finite".to_owned()));
    }
    Ok(StepConfirmation { largest, trial })
}

fn not_confirmed(largest: &LargestStep, why: String) -> RuntimeError {
    let what = format!("a step of {} tokens", largest.tokens);
    RequestError::NotConfirmed { what, why }.into()
}

impl StepConfirmation<'_> {
    /// The confirmation for reports.
    pub fn report(&self) -> ConfirmationReport<StepTrial> {
        let next = self.largest.refused.as_ref().map(|refused| refused.refusal.to_string());
        ConfirmationReport { trial: self.trial.clone(), next }
    }

    /// The confirmation as text: the trial, then the refusal of the next larger step.
    pub fn to_text(&self) -> String {
        let StepTrial { tokens, planned_bytes, peak_bytes, budget_bytes, seconds, .. } = self.trial;
        let [planned, peak, budget] = [planned_bytes, peak_bytes, budget_bytes].map(Bytes);
        let next = match &self.largest.refused {
            Some(RefusedStep { tokens, refusal }) => format!("the next, {tokens} tokens, is {refusal}"),
            None => "no step can have more tokens".to_owned(),
        };
        format!(
            "confirmed: a step of {tokens} tokens in {seconds:.1} s\n  peak {peak} measured, {planned} planned, budget \
             {budget}\n{next}\n"
        )
    }
}
