//! How much slower the kernels of training are than the rates of a target say, which are measured on products with prepared
//! weights. Training steps of two small decoders are timed, launch by launch. Invariant: every step moves the weights, so that the optimizers really run.

use super::median;
use super::subject::numbers;
use exec::Data;
use graph::ops::{Adafactor, AdamW, Sgd};
use graph::{Bounds, Counts};
use models::{DecoderConfig, Training as Loss};
use plan::training::plans;
use plan::{Group, InputId, Instr, Optimizer, Precision, Program, Remat, Target, Training, node_seconds};
use runtime::session::{TimedSession, TimedStep};
use runtime::{RuntimeError, Settings};
use std::collections::BTreeMap;

/// Tokens of a step.
const TOKENS: u64 = 2048;

/// Steps that are timed, after one that is not.
const STEPS: usize = 5;

const VOCABULARY: u64 = 512;

/// The decoders: with an MLP, and with experts.
const DENSE: &str = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 6, "intermediate_size": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": false}"#;
const SPARSE: &str = r#"{"model_type": "mixtral", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// For each kernel of training, its measured time divided by the time that the rates of `target` give; `target` has no
/// such factors yet.
pub(super) fn slower(settings: &Settings, target: &Target) -> Result<BTreeMap<String, f64>, RuntimeError> {
    let adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false };
    let mut factors: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (config, longest, optimizer) in [
        (DENSE, 1024, Optimizer::AdamW(ADAMW)),
        (SPARSE, 256, Optimizer::AdamW8bit(ADAMW)),
        (DENSE, 1024, Optimizer::Adafactor(adafactor)),
        (SPARSE, 256, Optimizer::Sgd(sgd)),
    ] {
        let bad = |e: models::ConfigError| RuntimeError::bug(format!("the decoder of a calibration: {e}"));
        let config = DecoderConfig::from_json(config).map_err(bad)?;
        for (kernel, (measured, expected)) in times(settings, target, (&config, longest), optimizer)? {
            if expected > 0.0 && measured > 0.0 {
                factors.entry(kernel).or_default().push(measured / expected);
            }
        }
    }
    Ok(factors.into_iter().map(|(kernel, factors)| (kernel, median(&factors))).collect())
}

/// For each kernel, the measured and the expected seconds of its launches, less what a launch costs by itself.
type Times = BTreeMap<String, (f64, f64)>;

fn times(
    settings: &Settings,
    target: &Target,
    (config, longest): (&DecoderConfig, u64),
    optimizer: Optimizer,
) -> Result<Times, RuntimeError> {
    let bounds = Bounds { tokens: TOKENS, sequences: TOKENS / longest, longest };
    let verified = |source| plan::PlanError::Verify { after: "build", source };
    let forward = config.train_graph(bounds, &Loss::default()).map_err(verified)?;
    let training = Training {
        precision: Precision::F32,
        remat: Remat::None,
        optimizer,
        group: &|_| Group::Decay,
        // Sums of gradients and a clip have kernels of their own.
        accumulation: 2,
        max_norm: 1.0,
    };
    let program = training.program(&forward, &forward, target)?;
    let mut session = TimedSession::start_single(settings, program)?;
    // Numbers of about the size of a new model's, the same each time.
    let mut random = numbers(0);
    session.load(|param, _, out| {
        match param.name.contains("norm") {
            true => out.fill(1.0),
            false => out.iter_mut().zip(&mut random).for_each(|(x, number)| *x = 0.05 * number),
        }
        Ok(())
    })?;
    session.start_states()?;
    let program = session.program().clone();
    let missing = || RuntimeError::bug("a calibration lacks a plan of training");
    let (micro, apply) = program.index(plans::MICRO).zip(program.index(plans::APPLY)).ok_or_else(missing)?;
    let scale = program.output(apply, "scale").ok_or_else(missing)?;
    let numbers = Numbers::new(longest, optimizer);
    let whole = bounds.full();
    let nothing = Counts { tokens: 0, sequences: 0 };
    let mut measured = Times::new();
    for step in 0..=STEPS {
        for (plan, counts) in [(micro, whole), (apply, nothing)] {
            let inputs = numbers.inputs(&program, plan);
            let seconds = session.instructions(&[TimedStep { plan, counts, inputs, outputs: vec![] }])?;
            if step > 0 {
                add(&mut measured, &program, (plan, counts), target, &seconds);
            }
        }
        let mut values = [0f32; 2];
        session.read(scale, &mut values)?;
        if values[1] == 0.0 {
            let text = "the decoder of a calibration has gradients that are not finite";
            return Err(RuntimeError::bug(text));
        }
    }
    Ok(measured)
}

/// Values of the inputs of the calibration's training steps.
struct Numbers {
    tokens: Vec<i32>,
    spans: Vec<i32>,
    scalars: [(&'static str, Vec<f32>); 5],
}

impl Numbers {
    fn new(longest: u64, optimizer: Optimizer) -> Self {
        // A small rate; bias corrections of a late step, or the rate at which means move.
        let hyper = match optimizer {
            Optimizer::AdamW(_) | Optimizer::AdamW8bit(_) => vec![1e-6, 1.0, 1.0],
            Optimizer::Adafactor(_) => vec![1e-6, 0.9],
            Optimizer::Sgd(_) => vec![1e-6],
        };
        let starts = (0..TOKENS).step_by(longest as usize);
        Self {
            tokens: (0..TOKENS).map(|i| (i * 7919 % VOCABULARY) as i32).collect(),
            spans: starts.flat_map(|start| [start as i32, (start + longest) as i32]).collect(),
            scalars: [
                ("d loss", vec![1.0]),
                ("d aux", vec![1.0]),
                ("keep", vec![0.0]),
                ("unscale", vec![1.0 / TOKENS as f32]),
                ("hyper", hyper),
            ],
        }
    }

    /// Inputs of a plan. They are copied for every step, because plans overwrite each other's inputs in the shared arena.
    fn inputs(&self, program: &Program, plan: usize) -> Vec<(InputId, Data<'_>)> {
        let ids = [("ids", &self.tokens), ("targets", &self.tokens), ("spans", &self.spans)];
        let ids = ids.into_iter().map(|(name, values)| (name, Data::I32(values.as_slice())));
        let scalars = self.scalars.iter().map(|(name, values)| (*name, Data::F32(values.as_slice())));
        ids.chain(scalars).filter_map(|(name, data)| Some((program.input(plan, name)?, data))).collect()
    }
}

fn add(
    measured: &mut Times,
    program: &Program,
    (plan, counts): (usize, Counts),
    target: &Target,
    seconds: &[f64],
) {
    let plan = &program.plans()[plan].1;
    for (instr, time) in plan.schedule.instrs.iter().zip(seconds) {
        let Instr::Launch(id) = *instr else { continue };
        let node = plan.graph.node(id);
        let launch = target.rates.launch;
        let expected = node_seconds(&plan.graph, node, target, counts) - launch;
        let entry = measured.entry(plan.kernels[id.index()].name().to_owned()).or_default();
        entry.0 += (time - launch).max(0.0);
        entry.1 += expected;
    }
}
