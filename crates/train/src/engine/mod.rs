//! A model in training on a device: its plans, its arena, its data. Invariant: every step follows the plans; what is
//! allocated beside the arena is the batch and a few numbers.

mod largest;
mod program;
mod remedies;
mod store;
mod subject;

pub use largest::{Largest, Size, largest};

use super::config::{Device, ModelKind, OptimizerKind, TrainConfig};
use super::feed::{self, Feed};
use super::priced;
use super::trainable::{Applied, Auxiliary, Evaluated, Found, Part, Stored, Taken, Trainable};
use crate::config::PROCESS;
use data::train::Held;
use data::weights::HubEnv;
use exec::{Executor, ParamSource, Survivor};
use graph::{Bounds, Bytes, Counts, StateKind};
use plan::training::plans;
use plan::{PlanError, Program, Staging, Target};
use runtime::hub::{Need, trainable};
use runtime::machine::{available, parse_budget};
use runtime::process::Process;
use runtime::session::Site;
use runtime::{Budget, Observer, RuntimeError, Settings, price};
use serde_json::{Value, json};
use std::path::PathBuf;
use store::Store;
use subject::Subject;

/// What a configuration would take on a machine inside a line: reads no weights and no training data, but a
/// tokenizer, a head's rows, and the configuration of the model to start from.
pub fn plan_of(
    config: &TrainConfig,
    target: &Target,
    budget: Bytes,
    observer: &mut dyn Observer,
) -> Result<plan::Found, RuntimeError> {
    program::search(config, &subject(config, observer)?, target, budget, observer)
}

/// The model of a configuration with its data, ready for its first step.
pub fn open(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Box<dyn Trainable>, RuntimeError> {
    let target = config.run.target()?;
    let budget = parse_budget(&config.memory.budget, available().free)?;
    let subject = subject(config, observer)?;
    let most = of_data(program::largest(config));
    let mut feed = Feed::open(config, most, tokenizer(config, observer)?.as_deref())?;
    let held = feed.host_bytes(config.run.evaluate_every.is_some());
    let settings = config.run.machine();
    let process = beyond_reserved(config, &settings);
    let whole = Budget { bytes: budget, on_host: true, host_memory: None, process };
    let data: Bytes = held.iter().map(|h| Bytes(h.bytes)).sum();
    let line = whole.for_plans().saturating_sub(data);
    let found = program::search(config, &subject, &target, line, observer).map_err(|error| match error {
        RuntimeError::Plan(error) => with_data(whole.with_process(error).into(), budget, &held),
        other => other,
    })?;
    let bounds = program::bounds(config, found.candidate.tokens);
    feed.bound(of_data(bounds))?;
    let plan::Found { program, candidate, .. } = found;
    let site = Site::new(&settings, 1, None, whole);
    let mut executor = site.start_one(program)?;
    start(&mut executor, subject.source(config.run.seed))?;
    site.budget().admits_held(executor.program(), Bytes::ZERO)?;
    let store = Store::of(&executor, &subject, config.run.seed);
    let asked = |auto: bool, key: &str, value: Value| auto.then(|| (key.to_owned(), value));
    let kind = program::kind_of(&candidate.optimizer);
    let choices = [
        asked(config.batch.micro_tokens.0.is_none(), "batch.micro_tokens", json!(candidate.tokens)),
        asked(config.batch.sequences.0.is_none(), "batch.sequences", json!(bounds.sequences)),
        asked(config.memory.loss_chunk.0.is_none(), "memory.loss_chunk", json!(candidate.chunk)),
        asked(config.optimizer.kind == OptimizerKind::Auto, "optimizer.kind", json!(kind)),
        asked(config.run.device == Device::Auto, "run.device", json!(Device::Cpu)),
        asked(config.run.threads.0.is_none(), "run.threads", json!(settings.threads)),
    ];
    let indices = Indices::of(executor.program())?;
    let outputs =
        executor.program().plans()[indices.micro].1.graph.outputs.iter().map(|(name, _)| name.clone());
    let counters = outputs.filter(|name| name.starts_with("dropped.")).collect();
    Ok(Box::new(Engine {
        choices: choices.into_iter().flatten().collect(),
        seed: config.run.seed,
        held,
        kind,
        bounds,
        taken: None,
        micro_steps: 0,
        at_once: None,
        hyper: vec![],
        counters,
        indices,
        subject,
        store,
        feed,
        executor,
    }))
}

/// The lines of the process that are more than plans of training reserve for it. What the data holds by now is counted by its
/// own lines too.
fn beyond_reserved(config: &TrainConfig, settings: &Settings) -> Vec<Staging> {
    let workers = config.data.workers.0.unwrap_or(8) as usize;
    let Some(mut process) = Process::now(settings) else { return vec![] };
    process.add_threads(settings, workers + 2);
    process.add_queues(settings, CHECKPOINT);
    process.beyond(PROCESS)
}

/// What passes through the host when a checkpoint is written or read.
const CHECKPOINT: u64 = 4 << 20;

/// Bounds as data knows them.
fn of_data(bounds: Bounds) -> data::train::Bounds {
    let Bounds { tokens, sequences, longest } = bounds;
    data::train::Bounds { tokens: tokens as usize, sequences: sequences as usize, longest: longest as usize }
}

/// A refusal of the plans as one of the whole: what the data holds beside them has its lines in the bill.
fn with_data(error: RuntimeError, budget: Bytes, held: &[Held]) -> RuntimeError {
    let RuntimeError::Plan(PlanError::OverBudget(mut bill)) = error else { return error };
    bill.budget = budget;
    held.iter().for_each(|h| bill.ledger.add(&format!("data: {}", h.what), Bytes(h.bytes)));
    RuntimeError::Plan(PlanError::OverBudget(bill))
}

/// What a configuration trains. Of a head's data the widths are read.
fn subject(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Subject, RuntimeError> {
    if config.model.kind != ModelKind::Head {
        return Subject::open(
            config,
            feed::vocabulary(config, tokenizer(config, observer)?.as_deref())?,
            &[],
            observer,
        );
    }
    let rows = data::train::rows::RowSet::open(feed::row_settings(config, 2)?)?;
    let widths: Vec<u64> = rows.widths().iter().map(|&w| w as u64).collect();
    Subject::open(config, 0, &widths, observer)
}

/// The tokenizer that came with the weights to start from, if one did.
fn tokenizer(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Option<PathBuf>, RuntimeError> {
    let Some(from) = &config.model.from else { return Ok(None) };
    if config.model.kind == ModelKind::Head {
        return Ok(None);
    }
    let folder = trainable(from, Need::Model, &HubEnv::from_process(), observer)?.config();
    Ok(Some(folder.with_file_name(runtime::hub::TOKENIZER)).filter(|path| path.is_file()))
}

/// Parameters at their start, states at theirs, masters equal to their parameters.
fn start(executor: &mut Executor, mut source: ParamSource) -> Result<(), RuntimeError> {
    for plan in 0..executor.program().plans().len() {
        executor.load(plan, &mut *source)?;
    }
    executor.start_states()?;
    let residents = executor.residents();
    let params: Vec<_> = residents
        .iter()
        .filter_map(|r| match &r.what {
            Survivor::Param(param) => Some(param),
            Survivor::State(_) => None,
        })
        .collect();
    let mut part = vec![0f32; 1 << 16];
    for master in &residents {
        let Survivor::State(state) = &master.what else { continue };
        if state.kind != StateKind::Master {
            continue;
        }
        let of = params.iter().find(|p| state.name.strip_prefix("master ") == Some(&p.name));
        let Some(param) = of else { continue };
        let elements = master.spec.shape.iter().filter_map(|d| d.fixed()).product::<u64>();
        for first in (0..elements).step_by(part.len()) {
            let values = &mut part[..(elements - first).min(1 << 16) as usize];
            source(param, first..first + values.len() as u64, values)
                .map_err(|source| exec::DeviceError::Load { param: param.name.clone(), source })?;
            executor.upload_f32(master.at + 4 * first, values)?;
        }
    }
    Ok(())
}

/// Positions of the plans; where a micro-step is a whole step there is none to apply.
struct Indices {
    micro: usize,
    apply: Option<usize>,
    evaluate: usize,
}

impl Indices {
    fn of(program: &Program) -> Result<Self, RuntimeError> {
        let index = |name: &str| {
            let missing = || RuntimeError::Refused(format!("the training program has no plan `{name}`"));
            program.index(name).ok_or_else(missing)
        };
        Ok(Self {
            micro: index(plans::MICRO)?,
            apply: program.index(plans::APPLY),
            evaluate: index(plans::EVALUATE)?,
        })
    }
}

/// The micro-steps of a position in a checkpoint: dropout goes on from there.
fn micro_steps(position: &Value) -> Result<u64, RuntimeError> {
    let found = &position["micro_steps"];
    found.as_u64().ok_or_else(|| {
        let text =
            format!("the checkpoint's `position.micro_steps` is {found}, not a whole number: it is damaged");
        RuntimeError::Refused(text)
    })
}

struct Engine {
    executor: Executor,
    feed: Feed,
    subject: Subject,
    store: Store,
    indices: Indices,
    bounds: Bounds,
    kind: OptimizerKind,
    choices: Vec<(String, Value)>,
    seed: u64,
    /// What the data holds beside the arena.
    held: Vec<Held>,
    taken: Option<Taken>,
    /// Of this run, for dropout: never the same twice.
    micro_steps: u64,
    /// Outputs of a micro-step that count rows which experts dropped.
    counters: Vec<String>,
    /// Where a micro-step is a whole step: how it went.
    at_once: Option<Applied>,
    /// What the optimizer is told in the step that begins.
    hyper: Vec<f32>,
}

impl Engine {
    /// Uploads the batch as the inputs of a plan: what it holds.
    fn upload(&mut self, plan: usize) -> Result<Counts, RuntimeError> {
        let executor = &mut self.executor;
        match &self.feed {
            Feed::Tokens(feed) => {
                let batch = &feed.batch;
                executor.write_i32(executor.input(plan, "ids")?, &batch.ids)?;
                executor.write_i32(executor.input(plan, "spans")?, batch.spans.as_flattened())?;
                executor.write_i32(executor.input(plan, "targets")?, &batch.targets)?;
                Ok(Counts { tokens: batch.ids.len() as u64, sequences: batch.spans.len() as u64 })
            }
            Feed::Rows(feed) => {
                let batch = &feed.batch;
                for (name, values) in ["dna", "protein"].iter().zip(&batch.parts) {
                    executor.write_f32(executor.input(plan, name)?, values)?;
                }
                executor.write_i32(executor.input(plan, "targets")?, &batch.targets)?;
                let rows = batch.targets.len() as u64;
                Ok(Counts { tokens: rows, sequences: rows })
            }
        }
    }

    fn has(&self, plan: usize, input: &str) -> bool {
        self.executor.program().plans()[plan].1.graph.input(input).is_some()
    }

    fn scalar(&mut self, plan: usize, output: &str) -> Result<Option<f64>, RuntimeError> {
        if self.executor.program().plans()[plan].1.graph.output(output).is_none() {
            return Ok(None);
        }
        let mut value = [0f32];
        self.executor.read_f32(self.executor.output(plan, output)?, &mut value)?;
        Ok(Some(f64::from(value[0])))
    }

    /// The cross-entropy of the step that `plan` ran, summed over targets: an output of its own where a z-loss is
    /// minimized with it.
    fn cross_entropy(&mut self, plan: usize) -> Result<f64, RuntimeError> {
        let alone = self.scalar(plan, "cross_entropy")?;
        let loss = if alone.is_some() { alone } else { self.scalar(plan, "loss")? };
        loss.ok_or_else(|| RuntimeError::Refused("the plan of a training step has no output `loss`".to_owned()))
    }

    /// Whether the update that `plan` ran moved the weights: every gradient was finite.
    fn moved(&mut self, plan: usize) -> Result<bool, RuntimeError> {
        let mut scale = [0f32; 2];
        self.executor.read_f32(self.executor.output(plan, "scale")?, &mut scale)?;
        Ok(scale[1] != 0.0)
    }

    /// Rows that experts dropped, over all layers.
    fn dropped(&mut self) -> Result<u64, RuntimeError> {
        let mut dropped = 0;
        for name in &self.counters {
            let mut value = [0];
            self.executor.read_i32(self.executor.output(self.indices.micro, name)?, &mut value)?;
            dropped += value[0].max(0) as u64;
        }
        Ok(dropped)
    }
}

impl Trainable for Engine {
    fn take(&mut self) -> Result<Option<Taken>, RuntimeError> {
        self.taken = self.feed.take()?;
        Ok(self.taken)
    }

    fn prepare(&mut self, hyper: &[f32]) {
        hyper.clone_into(&mut self.hyper);
    }

    fn micro_step(&mut self, keep: bool, loss_scale: f32) -> Result<Found, RuntimeError> {
        let plan = self.indices.micro;
        let targets = self.taken.map_or(0, |taken| taken.targets) as f32;
        let counts = self.upload(plan)?;
        let hyper = std::mem::take(&mut self.hyper);
        let unscale = [1.0 / (loss_scale * targets)];
        for (name, values) in [
            ("d loss", &[loss_scale][..]),
            ("d aux", &[loss_scale * targets]),
            ("keep", &[f32::from(u8::from(keep))]),
            ("unscale", &unscale),
            ("hyper", &hyper),
        ] {
            if self.has(plan, name) {
                self.executor.write_f32(self.executor.input(plan, name)?, values)?;
            }
        }
        self.hyper = hyper;
        if self.has(plan, "seed") {
            let word = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) as i32;
            self.executor.write_i32(self.executor.input(plan, "seed")?, &[word, self.micro_steps as i32])?;
        }
        self.micro_steps += 1;
        self.executor.run(plan, counts)?;
        let loss = self.cross_entropy(plan)?;
        if self.indices.apply.is_none() {
            // No norm of all gradients: they never live together.
            self.at_once = Some(Applied { norm: f64::NAN, ok: loss.is_finite() && self.moved(plan)? });
        }
        let auxiliary = Auxiliary {
            z: self.scalar(plan, "z_loss")?.map(|z| z / f64::from(targets)),
            balance: self.scalar(plan, "balance_loss")?,
            router_z: self.scalar(plan, "router_z_loss")?,
        };
        Ok(Found { loss, auxiliary, dropped: self.dropped()? })
    }

    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<Applied, RuntimeError> {
        let Some(plan) = self.indices.apply else {
            let none = || RuntimeError::Refused("a step without a micro-step".to_owned());
            return self.at_once.take().ok_or_else(none);
        };
        self.executor.write_f32(self.executor.input(plan, "hyper")?, hyper)?;
        self.executor.write_f32(self.executor.input(plan, "unscale")?, &[unscale])?;
        self.executor.run(plan, Counts { tokens: 0, sequences: 0 })?;
        let norm = self.scalar(plan, "norm")?.unwrap_or(f64::NAN);
        Ok(Applied { norm, ok: self.moved(plan)? })
    }

    fn evaluate(&mut self) -> Result<Option<Evaluated>, RuntimeError> {
        let Some(Taken { targets, .. }) = self.feed.take_validation()? else { return Ok(None) };
        let plan = self.indices.evaluate;
        let counts = self.upload(plan)?;
        self.executor.run(plan, counts)?;
        let loss = self.cross_entropy(plan)?;
        Ok(Some(Evaluated { loss, targets }))
    }

    fn rewind(&mut self) -> Result<(), RuntimeError> {
        self.feed.rewind()
    }

    fn position(&self) -> Result<Value, RuntimeError> {
        Ok(json!({"data": self.feed.position()?, "micro_steps": self.micro_steps}))
    }

    fn seek(&mut self, position: &Value) -> Result<(), RuntimeError> {
        self.micro_steps = micro_steps(position)?;
        self.feed.seek(&position["data"])
    }

    fn optimizer(&self) -> OptimizerKind {
        self.kind
    }

    fn choices(&self) -> Vec<(String, Value)> {
        self.choices.clone()
    }

    fn parameters(&self) -> Option<u64> {
        Some(priced::parameters(&self.program().plans()[self.indices.micro].1.graph))
    }

    fn plan(&self) -> Result<Value, RuntimeError> {
        let mut plan = price::to_json(self.program())?;
        let held = self.held.iter();
        plan["host"] =
            held.map(|h| (h.what.to_owned(), json!(h.bytes))).collect::<serde_json::Map<_, _>>().into();
        plan["sequences"] = json!(self.bounds.sequences);
        Ok(plan)
    }

    fn peak(&self) -> Bytes {
        self.program().peak() + self.held.iter().map(|h| Bytes(h.bytes)).sum()
    }

    fn tensors(&self, part: Part) -> Vec<Stored> {
        self.store.tensors(part)
    }

    fn file(&self, part: Part) -> &'static str {
        self.subject.file(part)
    }

    fn read(
        &mut self,
        part: Part,
        tensor: usize,
        elements: std::ops::Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), RuntimeError> {
        self.store.read(&mut self.executor, &self.subject, part, tensor, elements, out)
    }

    fn write(&mut self, part: Part, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.store.write(&mut self.executor, part, tensor, start, bytes)
    }

    fn beside(&self) -> Result<Vec<(String, Vec<u8>)>, RuntimeError> {
        Ok(self.subject.beside(&self.store.tensors(Part::Model)))
    }
}

impl Engine {
    fn program(&self) -> &Program {
        self.executor.program()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{Builder, DType, Dim};
    use plan::{Policy, compile};

    #[test]
    fn a_program_without_its_plans_is_refused() {
        let target = Target::named("null").expect("read");
        let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(2)], DType::F32);
        let y = g.gelu(x);
        g.output("y", y);
        let plan = compile(&g.finish().expect("verified"), &Policy::default(), &target).expect("planned");
        let program = |names: &[&str]| {
            let plans = names.iter().map(|name| ((*name).to_owned(), plan.clone())).collect();
            Program::new(target.clone(), plans, vec![])
        };
        Indices::of(&program(&[plans::EVALUATE, plans::MICRO])).expect("both are there");
        for (names, missing) in
            [([plans::MICRO, "other"], plans::EVALUATE), (["other", plans::EVALUATE], plans::MICRO)]
        {
            let error = Indices::of(&program(&names)).err().expect("refused").to_string();
            assert!(error.contains(&format!("has no plan `{missing}`")), "{error}");
        }
    }

    #[test]
    fn micro_steps_that_cannot_be_read_are_refused() {
        assert_eq!(micro_steps(&json!({"micro_steps": 7})).expect("a number"), 7);
        for position in [json!({}), json!({"micro_steps": -1}), json!({"micro_steps": "7"}), json!(null)] {
            let error = micro_steps(&position).expect_err("refused").to_string();
            assert!(error.contains("position.micro_steps"), "{error}");
        }
    }
}
