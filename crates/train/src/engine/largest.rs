//! Search for the largest micro-batch, layer count or width that fits the memory budget: exponential search, then
//! binary search, with a plan for every candidate. Invariant: the reported value was planned within the budget, and the
//! next larger value was rejected.

use super::super::config::{Auto, ModelKind, TrainConfig};
use super::trained_model::MAX_LAYERS;
use super::{program, subject};
use crate::TrainError;
use crate::feed::{self, Feed};
use plimsoll_data::train::HostMemory;
use plimsoll_graph::Bytes;
use plimsoll_graph::limits::MAX_ROWS;
use plimsoll_plan::{PlanError, Staging, Target, grow};
use plimsoll_runtime::{Budget, Device, Observer, RuntimeError};

/// The dimension to maximise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Tokens per micro-batch.
    Tokens,
    /// Number of layers.
    Layers,
    /// Hidden size; the intermediate size is scaled in proportion.
    Hidden,
}

/// Result of the search: the largest value that fits, and its plans.
#[derive(Debug)]
pub struct Largest {
    /// The dimension that was maximised.
    pub size: Size,
    /// The largest value that fits the budget.
    pub value: u64,
    /// The next larger value that was tried, which does not fit; `None` if the value is the largest that a run can have.
    pub refused: Option<u64>,
    /// The configuration with the largest value set.
    pub config: TrainConfig,
    /// The configuration with the refused value set.
    pub refused_config: Option<TrainConfig>,
    /// The plans of the configuration with the largest value.
    pub found: plimsoll_plan::TrainingChoice,
    /// Memory of a run outside its plans.
    pub process: RunMemory,
}

/// Host memory of a run outside its plans, which is part of the budget where the plans are in host memory.
#[derive(Clone, Debug)]
pub struct RunMemory {
    budget: Budget,
    data: Vec<HostMemory>,
}

impl RunMemory {
    /// The memory of a run on `target` under a budget. For the CPU of this machine it has the entries of the process, and
    /// if `with_data` those of the data, which is then opened. Empty for other targets, whose plans are not in the memory of
    /// this process.
    ///
    /// # Errors
    /// Data that cannot be opened.
    pub fn of(
        config: &TrainConfig,
        target: &Target,
        budget: Bytes,
        with_data: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let on_host = target.name == THIS_CPU;
        let mut all = Self {
            budget: Budget { bytes: budget, on_host, host_memory: None, process: vec![] },
            data: vec![],
        };
        if on_host && with_data {
            let config = &feed::named(config)?;
            let bounds = super::of_data(program::largest(config));
            let feed = Feed::open(config, bounds, super::tokenizer(config, observer)?.as_deref())?;
            all.data = super::held_by_data(config, &feed, config.run.evaluate_every.is_some());
        }
        if on_host {
            all.budget.process = super::beyond_reserved(config, &config.run.settings(Device::Cpu));
        }
        Ok(all)
    }

    /// The whole budget.
    pub fn budget(&self) -> Bytes {
        self.budget.bytes
    }

    /// Bytes left for plans.
    pub fn for_plans(&self) -> Bytes {
        self.budget.for_plans().saturating_sub(self.data.iter().map(|held| Bytes(held.bytes)).sum())
    }

    /// Adds the memory outside the plans to the bill of an over-budget error.
    fn bill(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::Runtime(RuntimeError::Plan(error)) if self.budget.on_host => {
                let error = self.budget.with_process(error).into();
                super::with_data(error, self.budget.bytes, &self.data).into()
            }
            other => other,
        }
    }

    /// The entries with their labels.
    pub fn lines(&self) -> Vec<Staging> {
        let data = self
            .data
            .iter()
            .map(|held| Staging { label: format!("data: {}", held.what), bytes: Bytes(held.bytes) });
        self.budget.process.iter().cloned().chain(data).collect()
    }
}

/// Name of the target of this machine's CPU.
const THIS_CPU: &str = "cpu";

/// Tokens of a micro-batch are searched in multiples of this number; rows of a head are searched one by one.
const TOKENS: u64 = 64;

/// The width of an attention head is a multiple of this number, so that tiled GEMM kernels have no remainder columns.
const HEAD_WIDTH: u64 = 8;

/// Largest width that the configuration of a model may have.
const MAX_WIDTH: u64 = 1 << 20;

/// Searches the largest value of `size` for which a configuration can be planned within the budget on a machine.
///
/// # Errors
/// `PlanError::OverBudget` with the memory bill of the smallest candidate if even that does not fit, and an error if
/// the configuration does not determine `size`.
pub fn largest(
    config: &TrainConfig,
    size: Size,
    target: &Target,
    process: RunMemory,
    observer: &mut dyn Observer,
) -> Result<Largest, TrainError> {
    let budget = process.for_plans();
    let decoder = matches!(config.model.kind, ModelKind::MoeLm | ModelKind::DenseLm);
    if size != Size::Tokens && !decoder {
        let kind = config.model.kind.name();
        return Err(TrainError::LargestOfKind { size: size.name(), kind });
    }
    if size != Size::Tokens && config.model.from.is_some() {
        return Err(TrainError::LargestOfModel { size: size.name() });
    }
    if size == Size::Tokens && config.memory.dynamic.is_some() {
        return Err(TrainError::PlanOfDynamic { flag: "--largest tokens" });
    }
    let step = size.step(config);
    let mut fits = |n: u64| -> Result<bool, TrainError> {
        let config = size.of(config, n * step);
        let subject = subject(&config, observer)?;
        program::fits(&config, &subject, target, budget, observer)
    };
    let least = size.least(config, &mut fits)?;
    let most = match size {
        Size::Layers => MAX_LAYERS,
        Size::Tokens => MAX_ROWS / step,
        Size::Hidden => MAX_WIDTH / step,
    };
    // If even the smallest value does not fit, the final search at `low` returns the error with the bill.
    let (low, high) = grow(least, most, &mut fits)?;
    let refused = high.map(|high| high * step);
    let refused_config = refused.map(|refused| size.of(config, refused));
    let config = size.of(config, low * step);
    let found = program::search(&config, &subject(&config, observer)?, target, budget, observer);
    let found = found.map_err(|error| process.bill(error))?;
    Ok(Largest { size, value: low * step, refused, config, refused_config, found, process })
}

impl Largest {
    /// The refusal of the next larger value: the bill of its smallest plan, without remedies; `None` if there is none.
    ///
    /// # Errors
    /// The next larger value fits, against the result of the search; other errors of planning.
    pub fn refusal(&self, observer: &mut dyn Observer) -> Result<Option<TrainError>, TrainError> {
        let Some(config) = &self.refused_config else { return Ok(None) };
        let (subject, budget) = (subject(config, observer)?, self.process.for_plans());
        match program::search_alone(config, &subject, self.found.program.target(), budget, observer) {
            Err(error @ TrainError::Runtime(RuntimeError::Plan(PlanError::OverBudget(_)))) => {
                Ok(Some(self.process.bill(error)))
            }
            Err(error @ TrainError::Runtime(RuntimeError::Plan(PlanError::TooLarge { .. }))) => Ok(Some(error)),
            Err(error) => Err(error),
            Ok(_) => Err(RuntimeError::bug("the value after the largest fits").into()),
        }
    }

    /// The values of the keys that give the configuration, as in `--set`.
    pub fn settings(&self) -> Vec<String> {
        let (model, batch) = (&self.config.model, &self.config.batch);
        match self.size {
            Size::Tokens => {
                vec![format!("batch.micro_tokens={}", self.value), format!("batch.tokens={}", batch.tokens)]
            }
            Size::Layers => vec![format!("model.layers={}", self.value)],
            Size::Hidden => {
                vec![
                    format!("model.hidden={}", self.value),
                    format!("model.intermediate={}", model.intermediate),
                ]
            }
        }
    }
}

impl Size {
    /// The name of the dimension as a value of `--largest`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Layers => "layers",
            Self::Hidden => "hidden",
        }
    }

    /// The step of the search: candidates are multiples of it.
    fn step(self, config: &TrainConfig) -> u64 {
        match self {
            Self::Tokens if config.model.kind == ModelKind::Head => 1,
            Self::Tokens => TOKENS,
            Self::Layers => 1,
            Self::Hidden => config.model.heads.saturating_mul(HEAD_WIDTH),
        }
    }

    /// The smallest candidate, in units of `step`. A step of a single micro-batch need not accumulate gradients, so it
    /// can fit where a micro-batch of half the size does not; the whole step is therefore tried first.
    fn least(
        self,
        config: &TrainConfig,
        fits: &mut dyn FnMut(u64) -> Result<bool, TrainError>,
    ) -> Result<u64, TrainError> {
        let step = self.step(config);
        match self {
            Self::Layers | Self::Hidden => Ok(1),
            Self::Tokens => {
                let whole = config.batch.tokens.div_ceil(step);
                let head = config.model.kind == ModelKind::Head;
                let least = if head { 2 } else { config.longest_sequence().div_ceil(step) };
                Ok(if whole > least && !fits(whole)? { least } else { whole.max(least) })
            }
        }
    }

    /// Returns the configuration with the dimension set to `n`.
    fn of(self, config: &TrainConfig, n: u64) -> TrainConfig {
        let mut grown = config.clone();
        match self {
            Self::Tokens => {
                grown.batch.micro_tokens = Auto(Some(n));
                // Rounded up so that a step is a whole number of micro-batches.
                grown.batch.tokens =
                    config.batch.tokens.checked_next_multiple_of(n).unwrap_or(config.batch.tokens);
            }
            Self::Layers => grown.model.layers = n,
            Self::Hidden => {
                let ratio = config.model.intermediate as f64 / config.model.hidden as f64;
                grown.model.hidden = n;
                grown.model.intermediate = ((n as f64 * ratio) as u64).next_multiple_of(HEAD_WIDTH);
            }
        }
        grown
    }
}
