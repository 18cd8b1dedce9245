//! How much slower the kernels of training are than the rates of a target say, which are measured on products with prepared
//! weights. Training steps of two small decoders are timed, launch by launch. Invariant: every step moves the weights, so that the optimizers really run.

use super::median;
use super::subject::{numbers, one_replica};
use exec::Executor;
use graph::ops::{Adafactor, AdamW, Sgd};
use graph::{Bounds, Counts};
use models::{DecoderConfig, Training as Loss};
use plan::training::plans;
use plan::{Group, Instr, Optimizer, Precision, Remat, Target, Training, node_seconds};
use runtime::session::load;
use runtime::{RuntimeError, Settings};
use std::collections::BTreeMap;
use std::time::Duration;

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
    let site = one_replica(settings)?;
    let mut executor = site.start_one(program.within(site.budget().bytes)?)?;
    // Numbers of about the size of a new model's, the same each time.
    let mut random = numbers(0);
    load(&mut executor, 0, |param, _, out| {
        match param.name.contains("norm") {
            true => out.fill(1.0),
            false => out.iter_mut().zip(&mut random).for_each(|(x, number)| *x = 0.05 * number),
        }
        Ok(())
    })?;
    executor.start_states()?;
    let whole = bounds.full();
    let nothing = Counts { tokens: 0, sequences: 0 };
    let (micro, apply) = (index(&executor, plans::MICRO)?, index(&executor, plans::APPLY)?);
    let mut measured = Times::new();
    for step in 0..=STEPS {
        for (plan, counts) in [(micro, whole), (apply, nothing)] {
            inputs(&mut executor, plan, longest, optimizer)?;
            let mut seconds = vec![Duration::ZERO; executor.program().plans()[plan].1.schedule.instrs.len()];
            executor.run_timed(plan, counts, &mut seconds)?;
            if step > 0 {
                add(&mut measured, &executor, (plan, counts), target, &seconds);
            }
        }
        let mut scale = [0f32; 2];
        executor.read_f32(executor.output(apply, "scale")?, &mut scale)?;
        if scale[1] == 0.0 {
            let text = "the decoder of a calibration has gradients that are not finite";
            return Err(RuntimeError::bug(text));
        }
    }
    Ok(measured)
}

fn index(executor: &Executor, name: &str) -> Result<usize, RuntimeError> {
    let missing = || RuntimeError::bug(format!("a calibration has no plan `{name}`"));
    executor.program().index(name).ok_or_else(missing)
}

/// Tokens, what is predicted, and scalars, where a plan has them. Right before it runs: plans share their memory.
fn inputs(
    executor: &mut Executor,
    plan: usize,
    longest: u64,
    optimizer: Optimizer,
) -> Result<(), RuntimeError> {
    let ids: Vec<i32> = (0..TOKENS).map(|i| (i * 7919 % VOCABULARY) as i32).collect();
    let spans: Vec<i32> = (0..TOKENS)
        .step_by(longest as usize)
        .flat_map(|start| [start as i32, (start + longest) as i32])
        .collect();
    // A small rate; bias corrections of a late step, or the rate at which means move.
    let hyper: &[f32] = match optimizer {
        Optimizer::AdamW(_) | Optimizer::AdamW8bit(_) => &[1e-6, 1.0, 1.0],
        Optimizer::Adafactor(_) => &[1e-6, 0.9],
        Optimizer::Sgd(_) => &[1e-6],
    };
    let unscale = [1.0 / TOKENS as f32];
    let has = |executor: &Executor, name| executor.program().plans()[plan].1.graph.input(name).is_some();
    for (name, values) in [("ids", &ids), ("targets", &ids), ("spans", &spans)] {
        if has(executor, name) {
            executor.write_i32(executor.input(plan, name)?, values)?;
        }
    }
    let scalars: [(&str, &[f32]); 5] =
        [("d loss", &[1.0]), ("d aux", &[1.0]), ("keep", &[0.0]), ("unscale", &unscale), ("hyper", hyper)];
    for (name, values) in scalars {
        if has(executor, name) {
            executor.write_f32(executor.input(plan, name)?, values)?;
        }
    }
    Ok(())
}

fn add(
    measured: &mut Times,
    executor: &Executor,
    (plan, counts): (usize, Counts),
    target: &Target,
    seconds: &[Duration],
) {
    let plan = &executor.program().plans()[plan].1;
    for (instr, time) in plan.schedule.instrs.iter().zip(seconds) {
        let Instr::Launch(id) = *instr else { continue };
        let node = plan.graph.node(id);
        let launch = target.rates.launch;
        let expected = node_seconds(&plan.graph, node, target, counts) - launch;
        let entry = measured.entry(plan.kernels[id.index()].name().to_owned()).or_default();
        entry.0 += (time.as_secs_f64() - launch).max(0.0);
        entry.1 += expected;
    }
}
