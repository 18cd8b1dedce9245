//! Search for the largest micro-batch, layer count or width that fits the memory budget: exponential search, then
//! binary search, with a plan for every candidate. Invariant: the reported value was planned within the budget, and the
//! next larger value was rejected.

use super::super::config::{Auto, ModelKind, TrainConfig};
use super::open_trained_model;
use super::program::{self, PlanLimits};
use super::trained_model::MAX_LAYERS;
use crate::TrainError;
use crate::feed::{self, TrainFeed};
use plimsoll_data::train::DataMemory;
use plimsoll_graph::Bytes;
use plimsoll_graph::limits::MAX_ROWS;
use plimsoll_plan::{PlanError, Staging, Target, grow};
use plimsoll_runtime::process::HEAP_STEP;
use plimsoll_runtime::{Budget, Device, Observer, RuntimeError};
use plimsoll_setting::Setting;
use std::fmt;
use std::path::Path;

/// The dimension to maximise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LargestDimension {
    /// Tokens per micro-batch.
    Tokens,
    /// Number of layers.
    Layers,
    /// Hidden size; the intermediate size is scaled in proportion.
    Hidden,
}

/// Result of the search: the largest value that fits, and its plans.
#[derive(Debug)]
pub struct LargestRun {
    /// The dimension that was maximised.
    pub size: LargestDimension,
    /// The largest value that fits the budget.
    pub value: u64,
    /// The next larger value that was tried, which does not fit; `None` if the value is the largest that a run can have.
    pub refused: Option<u64>,
    /// The configuration with the largest value set.
    pub config: TrainConfig,
    /// The configuration with the refused value set.
    pub refused_config: Option<TrainConfig>,
    /// Host memory of the data with the refused value.
    refused_data: Vec<DataMemory>,
    /// The plans of the configuration with the largest value.
    pub found: plimsoll_plan::TrainingChoice,
    /// Memory of a run outside its plans.
    pub process: RunMemory,
}

/// Host memory of a run outside its plans, which is part of the budget where the plans are in host memory.
pub struct RunMemory {
    budget: Budget,
    data: Vec<DataMemory>,
    /// The data, if it is on this machine.
    feed: Option<TrainFeed>,
}

impl fmt::Debug for RunMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunMemory")
            .field("budget", &self.budget)
            .field("data", &self.data)
            .finish_non_exhaustive()
    }
}

impl RunMemory {
    /// The memory of a run on `target` under a budget. For the CPU of this machine it has the entries of the process, and those
    /// of the data if its files are on this machine; they are read then. Empty for other targets, whose plans are not in the
    /// memory of this process.
    ///
    /// # Errors
    /// Data that cannot be opened.
    pub fn of(
        config: &TrainConfig,
        target: &Target,
        budget: Bytes,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let on_host = target.name == THIS_CPU;
        let mut all =
            Self { budget: Budget { on_host, ..Budget::unlimited(budget) }, data: vec![], feed: None };
        if !on_host {
            return Ok(all);
        }
        // What a run opens is opened in the same order, so that the heap of this process is that of the run.
        open_trained_model(config, observer)?;
        if is_here(config) {
            let config = &feed::named(config)?;
            let bounds = super::data_bounds(program::pack_bounds(config));
            all.feed = Some(TrainFeed::open(config, bounds, super::tokenizer(config, observer)?.as_deref())?);
        }
        all.fit(config)?;
        all.budget.process = super::beyond_reserved(config, &config.run.settings(Device::Cpu));
        Ok(all)
    }

    /// Counts the data for the micro-steps of a configuration.
    fn fit(&mut self, config: &TrainConfig) -> Result<(), TrainError> {
        let Some(feed) = &mut self.feed else { return Ok(()) };
        // A micro-step of a head is a pack, so its data are read in other packs.
        if config.model.kind == ModelKind::Head {
            *feed =
                TrainFeed::open(&feed::named(config)?, super::data_bounds(program::pack_bounds(config)), None)?;
        }
        self.data = super::data_memory_of(config, feed, config.run.evaluate_every.is_some());
        Ok(())
    }

    /// Adds the growth of the heap that two processes with the same work may differ by, so that the answer of a search holds in
    /// another process.
    fn with_slack(mut self) -> Self {
        if !self.budget.process.is_empty() {
            let label = "heap, rounded up".to_owned();
            self.budget.process.push(Staging { label, bytes: Bytes(HEAP_STEP) });
        }
        self
    }

    /// Whether the data is not counted because its files are not on this machine.
    pub fn lacks_data(&self) -> bool {
        self.budget.on_host && self.feed.is_none()
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
    pub(crate) fn bill(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::Runtime(RuntimeError::Plan(error)) if self.budget.on_host => {
                let error = self.budget.with_process(error).into();
                super::bill_with_data(error, self.budget.bytes, &self.data).into()
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

/// Whether all files of the training data are on this machine.
fn is_here(config: &TrainConfig) -> bool {
    let d = &config.data;
    let files = d.train.iter().chain(&d.proteins).chain(&d.validation).chain(&d.labels);
    files.into_iter().all(|path| Path::new(path).exists())
}

/// Name of the target of this machine's CPU.
const THIS_CPU: &str = "cpu";

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
    size: LargestDimension,
    target: &Target,
    process: RunMemory,
    observer: &mut dyn Observer,
) -> Result<LargestRun, TrainError> {
    let mut process = process.with_slack();
    let decoder = matches!(config.model.kind, ModelKind::MoeLm | ModelKind::DenseLm);
    if size != LargestDimension::Tokens && !decoder {
        let kind = config.model.kind.name();
        return Err(TrainError::LargestOfKind { size: size.name(), kind });
    }
    if size != LargestDimension::Tokens && config.model.from.is_some() {
        return Err(TrainError::LargestOfModel { size: size.name() });
    }
    if size == LargestDimension::Tokens && config.memory.dynamic.is_some() {
        return Err(TrainError::PlanOfDynamic { request: Setting::Largest.to(size.name()) });
    }
    let step = size.step(config);
    // Opens the data again for each candidate where its packs depend on the candidate.
    let mut fits = |n: u64| -> Result<bool, TrainError> {
        let config = size.of(config, n * step);
        let model = open_trained_model(&config, observer)?;
        process.fit(&config)?;
        program::fits(&config, &model, target, process.for_plans(), observer)
    };
    let smallest = size.smallest(config, &mut fits)?;
    let largest = match size {
        LargestDimension::Layers => MAX_LAYERS,
        LargestDimension::Tokens => MAX_ROWS / step,
        LargestDimension::Hidden => MAX_WIDTH / step,
    };
    // If even the smallest value does not fit, the final search at `low` returns the error with the bill.
    let (low, high) = grow(smallest, largest, &mut fits)?;
    let refused = high.map(|high| high * step);
    let refused_config = refused.map(|refused| size.of(config, refused));
    let config = size.of(config, low * step);
    let mut refused_data = vec![];
    if let Some(refused) = &refused_config {
        process.fit(refused)?;
        refused_data.clone_from(&process.data);
    }
    process.fit(&config)?;
    let limits = PlanLimits::of(process.for_plans());
    let found = program::search(&config, &open_trained_model(&config, observer)?, target, limits, observer);
    let found = found.map_err(|error| process.bill(error))?;
    Ok(LargestRun { size, value: low * step, refused, config, refused_config, refused_data, found, process })
}

impl LargestRun {
    /// The refusal of the next larger value: the bill of its smallest plan, without remedies; `None` if there is none.
    ///
    /// # Errors
    /// The next larger value fits, against the result of the search; other errors of planning.
    pub fn refusal(&self, observer: &mut dyn Observer) -> Result<Option<TrainError>, TrainError> {
        let Some(config) = &self.refused_config else { return Ok(None) };
        let process =
            RunMemory { budget: self.process.budget.clone(), data: self.refused_data.clone(), feed: None };
        let model = open_trained_model(config, observer)?;
        let limits = PlanLimits::of(process.for_plans());
        match program::search_alone(config, &model, self.found.program.target(), limits, observer) {
            Err(error @ TrainError::Runtime(RuntimeError::Plan(PlanError::OverBudget(_)))) => {
                Ok(Some(process.bill(error)))
            }
            Err(error @ TrainError::Runtime(RuntimeError::Plan(PlanError::TooLarge { .. }))) => Ok(Some(error)),
            Err(error) => Err(error),
            Ok(_) => Err(RuntimeError::bug("the value after the largest fits").into()),
        }
    }

    /// The values of the keys that give the configuration, as in `--set`.
    pub fn settings(&self) -> Vec<String> {
        let model = &self.config.model;
        let batch = &self.config.batch;
        match self.size {
            LargestDimension::Tokens if model.kind == ModelKind::Head => {
                vec![format!("batch.pack_tokens={}", self.value), format!("batch.tokens={}", batch.tokens)]
            }
            LargestDimension::Tokens => {
                vec![
                    format!("batch.pack_tokens={}", self.config.pack_tokens()),
                    format!("batch.micro_tokens={}", self.value),
                    format!("batch.tokens={}", batch.tokens),
                ]
            }
            LargestDimension::Layers => vec![format!("model.layers={}", self.value)],
            LargestDimension::Hidden => {
                vec![
                    format!("model.hidden={}", self.value),
                    format!("model.intermediate={}", model.intermediate),
                ]
            }
        }
    }
}

impl LargestDimension {
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
            // A micro-step of a head is a pack.
            Self::Tokens if config.model.kind == ModelKind::Head => 1,
            Self::Tokens => config.pack_tokens(),
            Self::Layers => 1,
            Self::Hidden => config.model.heads.saturating_mul(HEAD_WIDTH),
        }
    }

    /// The smallest candidate, in units of `step`. A step of a single micro-batch need not accumulate gradients, so it
    /// can fit where a micro-batch of half the size does not; the whole step is therefore tried first.
    fn smallest(
        self,
        config: &TrainConfig,
        fits: &mut dyn FnMut(u64) -> Result<bool, TrainError>,
    ) -> Result<u64, TrainError> {
        let step = self.step(config);
        match self {
            Self::Layers | Self::Hidden => Ok(1),
            Self::Tokens => {
                let whole_step = config.batch.tokens.div_ceil(step);
                let smallest = if config.model.kind == ModelKind::Head { 2 } else { 1 };
                Ok(if whole_step > smallest && !fits(whole_step)? {
                    smallest
                } else {
                    whole_step.max(smallest)
                })
            }
        }
    }

    /// Returns the configuration with the dimension set to `n`.
    fn of(self, config: &TrainConfig, n: u64) -> TrainConfig {
        let mut grown = config.clone();
        match self {
            Self::Tokens => {
                if config.model.kind == ModelKind::Head {
                    grown.batch.pack_tokens = Auto(Some(n));
                } else {
                    // The packs stay the same when the tokens of a step grow.
                    grown.batch.pack_tokens = Auto(Some(config.pack_tokens()));
                    grown.batch.micro_tokens = Auto(Some(n));
                }
                // Rounded up so that a step is a whole number of micro-batches.
                grown.batch.tokens =
                    config.batch.tokens.checked_next_multiple_of(n).unwrap_or(config.batch.tokens);
            }
            Self::Layers => grown.model.layers = n,
            Self::Hidden => {
                let ratio = config.model.intermediate as f64 / config.model.hidden as f64;
                grown.model.hidden = n;
                // The ratio of the configuration, rounded up so that GEMM kernels have no remainder columns here either.
                grown.model.intermediate = ((n as f64 * ratio) as u64).next_multiple_of(HEAD_WIDTH);
            }
        }
        grown
    }
}
