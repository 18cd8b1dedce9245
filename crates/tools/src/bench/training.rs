//! Measures for each training kernel the factor between its real time and the time by the target's rates, which are
//! measured on GEMMs with prepacked weights. Times each launch of training steps of two small decoders.
//! Invariant: every step updates the weights, so that the optimizer kernels do their full work.

use super::case::numbers;
use super::median;
use plimsoll_exec::Data;
use plimsoll_graph::ops::{Adafactor, AdamW, Sgd};
use plimsoll_graph::{Bounds, Counts, OutputRole, packs};
use plimsoll_models::{DecoderConfig, Training as Loss};
use plimsoll_plan::passes::cotangent;
use plimsoll_plan::training::plans;
use plimsoll_plan::{
    ActivationOffload, Fuse, InputId, Instr, Offload, Optimizer, ParameterGroup, Plan, Precision, Program,
    RecomputePolicy, Target, Training, Window, node_seconds,
};
use plimsoll_runtime::session::{TimedSession, TimedStep};
use plimsoll_runtime::{RuntimeError, Settings};
use std::collections::BTreeMap;

/// Tokens per step.
const TOKENS: u64 = 2048;

/// Number of timed steps, which follow one step to warm up.
const STEPS: usize = 5;

const VOCABULARY: u64 = 512;

/// `config.json` of the two decoders: a dense one (Llama) and one with a mixture of experts (Mixtral).
const DENSE: &str = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 6, "intermediate_size": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": false}"#;
const SPARSE: &str = r#"{"model_type": "mixtral", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// Measured time of each kernel divided by its time by the rates of `target`: the median over the
/// configurations that use the kernel. `target` must not have such factors already, because they would be part
/// of the expected time.
pub(super) fn training_kernel_factors(
    settings: &Settings,
    target: &Target,
) -> Result<BTreeMap<String, f64>, RuntimeError> {
    let adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false };
    let mut factors: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (config, longest, optimizer) in [
        (DENSE, 1024, Optimizer::AdamW(ADAMW)),
        (SPARSE, 256, Optimizer::AdamW8bit(ADAMW)),
        (DENSE, 1024, Optimizer::Adafactor(adafactor)),
        (SPARSE, 256, Optimizer::Sgd(sgd)),
    ] {
        let config = DecoderConfig::from_json(config).map_err(|e: plimsoll_models::ConfigError| {
            RuntimeError::bug(format!("the decoder of a calibration: {e}"))
        })?;
        let decoder = CalibrationDecoder { config, longest, optimizer };
        for (kernel, KernelSeconds { measured, expected }) in times(settings, target, &decoder)? {
            if expected > 0.0 && measured > 0.0 {
                factors.entry(kernel).or_default().push(measured / expected);
            }
        }
    }
    Ok(factors.into_iter().map(|(kernel, factors)| (kernel, median(&factors))).collect())
}

/// A decoder whose training steps are timed.
struct CalibrationDecoder {
    config: DecoderConfig,
    /// Tokens of a sequence.
    longest: u64,
    optimizer: Optimizer,
}

/// Sums of the seconds of the launches of a kernel, without the launch overhead.
#[derive(Default)]
struct KernelSeconds {
    measured: f64,
    /// By the rates of the target.
    expected: f64,
}

/// Times the training steps of a decoder; returns the seconds by kernel.
fn times(
    settings: &Settings,
    target: &Target,
    decoder: &CalibrationDecoder,
) -> Result<BTreeMap<String, KernelSeconds>, RuntimeError> {
    let CalibrationDecoder { ref config, longest, optimizer } = *decoder;
    let bounds = Bounds { tokens: TOKENS, sequences: TOKENS / longest, longest, packs: 1 };
    let forward = config
        .train_graph(bounds, &Loss::default())
        .map_err(|source| plimsoll_plan::PlanError::of_graph("build", source))?;
    let training = Training {
        precision: Precision::F32,
        remat: RecomputePolicy::None,
        activations: ActivationOffload::NONE,
        optimizer,
        group: &|_| ParameterGroup::Decay,
        // Accumulation and clipping are enabled, because they have their own kernels, which are timed too.
        accumulation: 2,
        max_norm: 1.0,
        ema: None,
        fuse: Fuse::default(),
        offload: Offload::default(),
        window: Window::Full,
        block: None,
    };
    let program = training.program(&forward, &forward, target)?;
    let mut session = TimedSession::start_single(settings, program)?;
    // Weights of about the magnitude of an initialized model, equal in every calibration.
    let mut random = numbers(0);
    session.load(|param, _, out| {
        if param.name.contains("norm") {
            out.fill(1.0)
        } else {
            out.iter_mut().zip(&mut random).for_each(|(x, number)| *x = 0.05 * number)
        }
        Ok(())
    })?;
    session.start_states()?;
    let program = session.program().clone();
    let missing = || RuntimeError::bug("a calibration lacks a plan of training");
    let (micro, apply) = program.index(plans::MICRO).zip(program.index(plans::APPLY)).ok_or_else(missing)?;
    let scale = program.output(apply, OutputRole::GradientScale).ok_or_else(missing)?;
    let numbers = CalibrationInputs::new(longest, optimizer);
    let whole = bounds.full();
    let nothing = Counts { tokens: 0, sequences: 0, packs: 1 };
    let mut sums: BTreeMap<String, KernelSeconds> = BTreeMap::new();
    for step in 0..=STEPS {
        for (plan, counts) in [(micro, whole), (apply, nothing)] {
            let inputs = numbers.inputs(&program, plan);
            let seconds = session.instructions(&[TimedStep { plan, counts, inputs, outputs: vec![] }])?;
            if step > 0 {
                add_launches(&mut sums, &program.plans()[plan].1, target, counts, &seconds);
            }
        }
        let mut values = [0f32; 2];
        session.read(scale, &mut values)?;
        if values[1] == 0.0 {
            let text = "the decoder of a calibration has gradients that are not finite";
            return Err(RuntimeError::bug(text));
        }
    }
    Ok(sums)
}

/// Values of the inputs of the calibration's training steps.
struct CalibrationInputs {
    tokens: Vec<i32>,
    spans: Vec<i32>,
    /// One pack with all tokens.
    packs: [i32; packs::WORDS],
    scalars: [(String, Vec<f32>); 5],
}

impl CalibrationInputs {
    fn new(longest: u64, optimizer: Optimizer) -> Self {
        // The learning rate is small, so that values stay finite. It is followed by the bias corrections of a
        // late step for AdamW, and by the decay rate of the second moments for Adafactor.
        let hyper = match optimizer {
            Optimizer::AdamW(_) | Optimizer::AdamW8bit(_) => vec![1e-6, 1.0, 1.0],
            Optimizer::Adafactor(_) => vec![1e-6, 0.9],
            Optimizer::Sgd(_) => vec![1e-6],
        };
        let starts = (0..TOKENS).step_by(longest as usize);
        Self {
            tokens: (0..TOKENS).map(|i| (i * 7919 % VOCABULARY) as i32).collect(),
            packs: [0, TOKENS as i32, 0, (TOKENS / longest) as i32, TOKENS as i32, 0],
            spans: starts.flat_map(|start| [start as i32, (start + longest) as i32]).collect(),
            scalars: [
                (cotangent(&OutputRole::Loss), vec![1.0]),
                (cotangent(&OutputRole::Auxiliary), vec![1.0]),
                ("keep".to_owned(), vec![0.0]),
                ("unscale".to_owned(), vec![1.0 / TOKENS as f32]),
                ("hyper".to_owned(), hyper),
            ],
        }
    }

    /// Inputs of a plan. They are copied for every step, because plans in the shared arena overwrite each
    /// other's inputs.
    fn inputs(&self, program: &Program, plan: usize) -> Vec<(InputId, Data<'_>)> {
        let ids = [
            ("ids", self.tokens.as_slice()),
            ("targets", self.tokens.as_slice()),
            ("spans", self.spans.as_slice()),
            ("packs", self.packs.as_slice()),
        ];
        let ids = ids.into_iter().map(|(name, values)| (name, Data::I32(values)));
        let scalars = self.scalars.iter().map(|(name, values)| (name.as_str(), Data::F32(values.as_slice())));
        ids.chain(scalars).filter_map(|(name, data)| Some((program.input(plan, name)?, data))).collect()
    }
}

/// Adds the seconds of each instruction of a plan in a step to the sums of its kernel.
fn add_launches(
    sums: &mut BTreeMap<String, KernelSeconds>,
    plan: &Plan,
    target: &Target,
    counts: Counts,
    seconds: &[f64],
) {
    for (instr, time) in plan.schedule.instrs.iter().zip(seconds) {
        let Instr::Launch(id) = *instr else { continue };
        let node = plan.graph.node(id);
        let launch = target.rates.launch;
        let expected = node_seconds(&plan.graph, node, target, counts) - launch;
        let sum = sums.entry(plan.kernels[id.index()].name().to_owned()).or_default();
        sum.measured += (time - launch).max(0.0);
        sum.expected += expected;
    }
}
