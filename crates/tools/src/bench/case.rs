//! A compiled program with pseudo-random weights and inputs, and its timing in alternation with the peak
//! measurement. Invariant: the pseudo-random numbers are equal on every machine; a model's step is timed from
//! token ids on the host to pooled means on the host, a single linear layer with its input already on the
//! device.

use super::steps::{PackedStep, packs};
use super::{BenchWork, median};
use crate::ToolError;
use plimsoll_exec::Data;
use plimsoll_graph::ops::{Embed, SegmentMean};
use plimsoll_graph::{Bounds, Builder, Bytes, DType, Dim, Graph, Op, VerifyError};
use plimsoll_models::{Encoder, Output, SequenceModel};
use plimsoll_plan::{InputId, Instr, OutputId, Plan, Policy, Precision, PrecisionPolicy};
use plimsoll_runtime::session::bounds::{MIN_TOKENS_OF_REPLICA, bounds, with_outputs};
use plimsoll_runtime::session::{
    PlanPart, PlannedStages, ReplicaSpans, SearchStage, StagesRequest, TimedSession, TimedStep,
};
use plimsoll_runtime::timeline::MeasuredTimeline;
use plimsoll_runtime::{Machine, RuntimeError, Settings, price};
use std::time::Instant;

/// Minimum seconds of a measurement: shorter work is repeated until it takes this long.
const TURN: f64 = 0.1;

/// Length of the cycle of pseudo-random numbers that fills all weights. It is a prime, so that matrices of
/// equal size start at different positions of the cycle.
const RANDOM: usize = 1_048_573;

/// Rows of the embedding table before the GEMMs of [`BenchCase::gemm_chain`]: the vocabulary of ESM-2.
const VOCABULARY: u64 = 33;

/// Maximum number of passes in a measurement.
const MAX_PASSES: f64 = 1000.0;

/// Host copies of the outputs for each replica: outputs being fetched, and outputs handed to the caller.
const OUTPUTS: u64 = 2;

/// A program in a session that can be timed.
pub(super) struct BenchCase {
    session: TimedSession,
    /// The steps of a pass.
    pub(super) steps: Vec<PackedStep>,
    /// Inputs and output of a model's steps; `None` if the inputs are already on the device.
    model: Option<ModelInputs>,
}

/// Inputs and output of a model's steps.
struct ModelInputs {
    ids: InputId,
    spans: InputId,
    mean: OutputId,
    /// Token ids for the largest step; smaller steps use a prefix.
    tokens: Vec<i32>,
}

/// Results of a benchmark; the vectors have an entry for each measurement.
pub(super) struct Measurements {
    /// Passes per measurement.
    pub(super) passes: u32,
    /// Name of the peak measurement; `None` without one.
    pub(super) raw_loop: Option<&'static str>,
    /// GFLOP/s of the peak measurement.
    pub(super) raw: Vec<f64>,
    /// Seconds per pass.
    pub(super) seconds: Vec<f64>,
    /// Seconds of each instruction of the plan in a pass.
    pub(super) instructions: Vec<Vec<f64>>,
}

/// Peak measurement for a type and a duration in seconds: returns its name and GFLOP/s, or `None` without one.
pub(super) type Raw<'a> = &'a mut dyn FnMut(DType, f64) -> Result<Option<(&'static str, f64)>, RuntimeError>;

impl BenchCase {
    /// Plans the work, and fills its weights and inputs with pseudo-random numbers.
    pub(super) fn start(work: &BenchWork, settings: &Settings) -> Result<Self, ToolError> {
        match *work {
            BenchWork::Model { ref model, sequences, lengths } => {
                let lengths = lengths.of(sequences);
                Ok(Self::model(settings, &price::sequence_model(model)?, &lengths)?)
            }
            BenchWork::Linear { rows, n, k } => {
                let precision = settings.precision()?;
                let dtype = element(precision)?;
                // The graph is built in bf16 or binary16 directly. TF32 is not an element type of tensors, so the
                // policy applies it to an f32 graph.
                let precision = if dtype == DType::F32 { precision } else { Precision::F32 };
                let policy = Policy { precision, ..Policy::default() };
                let mut case = Self::single(settings, &policy, rows, single_linear(rows, n, k, dtype))?;
                let numbers = numbers(1).take((rows * k) as usize);
                match dtype {
                    DType::F32 => {
                        let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
                        case.write("x", &bytes)?;
                    }
                    // The upper halves of the f32 numbers: their truncation in bf16. In binary16 they are other
                    // numbers, but not all zero; multiplying zeros can be faster.
                    DType::Bf16 | DType::F16 => {
                        let halves: Vec<u8> =
                            numbers.flat_map(|x| x.to_le_bytes().into_iter().skip(2)).collect();
                        case.write("x", &halves)?;
                    }
                    DType::F8 | DType::I8 | DType::I32 | DType::U8 => {}
                }
                Ok(case)
            }
        }
    }

    /// An encoder or decoder over a batch, with the number of replicas of a long run, but at most one per
    /// `MIN_TOKENS_OF_REPLICA` tokens of the batch: a small batch measures small steps on all threads together.
    fn model(settings: &Settings, model: &SequenceModel, lengths: &[u64]) -> Result<Self, RuntimeError> {
        let tokens: u64 = lengths.iter().sum();
        let replicas = settings.most_replicas(Some(tokens / MIN_TOKENS_OF_REPLICA));
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let equal = lengths.iter().all(|&n| n == longest);
        let graph = Box::new(|mixed: Bounds| {
            let n = (mixed.tokens / longest).clamp(1, lengths.len() as u64);
            let whole = Bounds { tokens: n * longest, sequences: n, longest, packs: 1 };
            model.graph(if equal { whole } else { mixed }, &[Output::Mean])
        });
        let planned = Self::planned(settings, replicas, longest, graph)?;
        let program = planned.programs()[0].clone();
        let bounds = program.plans()[0].1.graph.bounds;
        let steps: Vec<PackedStep> =
            packs(lengths, &bounds, program.replicas()).into_iter().map(PackedStep::of).collect();
        let session = TimedSession::start(planned.site(), program)?;
        Self::of_model(session, steps, ids(model, bounds.tokens))
    }

    /// Plans a graph for the number of tokens per step that the settings or the planner select within the
    /// memory budget.
    pub(super) fn planned<'a>(
        settings: &Settings,
        replicas: usize,
        longest: u64,
        graph: Box<dyn Fn(Bounds) -> Result<Graph, VerifyError> + 'a>,
    ) -> Result<PlannedStages<'a>, RuntimeError> {
        let part = PlanPart {
            name: "bench".to_owned(),
            graph: Box::new(move |tokens| graph(bounds(tokens, longest))),
            policy: settings.policy()?,
            streams: true,
        };
        let stage = SearchStage {
            finish: Box::new(|program, replicas| with_outputs(program, OUTPUTS * replicas as u64, 0, None)),
            ..SearchStage::new(vec![part], longest)
        };
        settings.plan_stages(StagesRequest {
            alternatives: vec![vec![stage]],
            replicas,
            tokens: settings.tokens,
            budgets: vec![settings.read_budget()?],
        })
    }

    /// A chain of `count` linear layers from `width` to `width` features on `rows` rows, in the precision of
    /// the settings and with the kernels of models. The rate of its linear layers is the attainable rate of a
    /// model's.
    pub(super) fn gemm_chain(
        settings: &Settings,
        rows: u64,
        width: u64,
        count: u32,
    ) -> Result<Self, RuntimeError> {
        let bounds = one_sequence(rows);
        let mut g = Builder::new(bounds);
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        let table = g.param("table.weight", &[VOCABULARY, width]);
        let mut x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
        for i in 0..count {
            g.scope(format!("layer.{i}."), Some(i));
            x = g.linear(x, "linear", width, true);
        }
        g.scope("", None);
        let mean = g.one(Op::SegmentMean(SegmentMean { skip_first: 0, skip_last: 0 }), &[x, spans]);
        g.output("mean", mean);
        let program = settings.single_program(&settings.policy()?, g.finish())?;
        let ids = (0..rows).map(|i| (i * 7919 % VOCABULARY) as i32).collect();
        Self::of_model(TimedSession::start_single(settings, program)?, vec![PackedStep::of(&[rows])], ids)
    }

    /// Prepares a case of one step of `rows` rows of a graph. Its inputs are uninitialized: they contain the bytes that
    /// the arena has.
    pub(super) fn single(
        settings: &Settings,
        policy: &Policy,
        rows: u64,
        graph: Result<Graph, VerifyError>,
    ) -> Result<Self, RuntimeError> {
        let program = settings.single_program(policy, graph)?;
        let session = TimedSession::start_single(settings, program)?;
        Self::new(session, vec![PackedStep::whole(one_sequence(rows).full())], None)
    }

    /// Creates a case from steps whose graph has the inputs `ids` and `spans` and the output `mean`.
    fn of_model(session: TimedSession, steps: Vec<PackedStep>, tokens: Vec<i32>) -> Result<Self, RuntimeError> {
        let program = session.program();
        let missing = || RuntimeError::bug("a graph to time lacks ids, spans or mean");
        let (ids, spans) = program.input(0, "ids").zip(program.input(0, "spans")).ok_or_else(missing)?;
        let mean = program.output(0, "mean").ok_or_else(missing)?;
        Self::new(session, steps, Some(ModelInputs { ids, spans, mean, tokens }))
    }

    fn new(
        mut session: TimedSession,
        steps: Vec<PackedStep>,
        model: Option<ModelInputs>,
    ) -> Result<Self, RuntimeError> {
        // A repeated cycle of numbers: generating billions of numbers one by one would take longer than the
        // measurements.
        let random: Vec<f32> = numbers(0).take(RANDOM).map(|x| 0.05 * x).collect();
        let mut at = 0;
        session.load(|param, _, out| {
            // Weights of norms are 1, so that activations keep their magnitude through the layers.
            if param.name.to_ascii_lowercase().ends_with("norm.weight") {
                out.fill(1.0);
                return Ok(());
            }
            // The cycle goes on where the last window of a parameter ended.
            for part in out.chunks_mut(RANDOM) {
                let (end, wrapped) = part.split_at_mut(part.len().min(RANDOM - at));
                end.copy_from_slice(&random[at..at + end.len()]);
                wrapped.copy_from_slice(&random[..wrapped.len()]);
                at = (at + part.len()) % RANDOM;
            }
            Ok(())
        })?;
        Ok(Self { session, steps, model })
    }

    /// Copies the input `name` to the device; all steps use it.
    pub(super) fn write(&mut self, name: &str, data: &[u8]) -> Result<(), RuntimeError> {
        let input = self
            .session
            .program()
            .input(0, name)
            .ok_or_else(|| RuntimeError::bug(format!("a graph to time has no input `{name}`")))?;
        self.session.write(input, data)
    }

    /// Alternates the peak measurement `raw` and the work, `repeats` times, after one pass to warm up and one to
    /// determine the number of passes per measurement.
    pub(super) fn time(&mut self, repeats: usize, raw: Raw<'_>) -> Result<Measurements, RuntimeError> {
        self.passes(1)?;
        let warm = self.passes(1)?;
        let passes = (TURN / warm).ceil().clamp(1.0, MAX_PASSES) as u32;
        let dtype = self.dtype();
        let mut turns =
            Measurements { passes, raw_loop: None, raw: vec![], seconds: vec![], instructions: vec![] };
        for _ in 0..repeats.max(1) {
            // The peak is measured for as long as the work, but at most 5 * `TURN` seconds.
            if let Some((raw_loop, rate)) = raw(dtype, (f64::from(passes) * warm).min(5.0 * TURN))? {
                turns.raw_loop = Some(raw_loop);
                turns.raw.push(rate);
            }
            turns.seconds.push(self.passes(passes)? / f64::from(passes));
            // Instructions are timed in a separate pass: some devices wait for each launch to measure its time.
            turns.instructions.push(self.instructions()?);
        }
        Ok(turns)
    }

    /// Computes every step `times` times with asynchronous submission, and returns the elapsed seconds.
    pub(super) fn passes(&mut self, times: u32) -> Result<f64, RuntimeError> {
        let Self { session, steps, model } = self;
        session.passes(&timed(steps, model.as_ref()), times)
    }

    /// Seconds of each instruction in a pass. With several replicas, each figure is the mean over them, so that
    /// the sum is about the duration of a pass.
    pub(super) fn instructions(&mut self) -> Result<Vec<f64>, RuntimeError> {
        let Self { session, steps, model } = self;
        session.instructions(&timed(steps, model.as_ref()))
    }

    /// The timeline of the largest step, with the measured times of its instructions and the memory while it ran.
    pub(super) fn timeline(&mut self, machine: &dyn Machine) -> Result<MeasuredTimeline, RuntimeError> {
        let Self { session, steps, model } = self;
        let largest = steps.iter().enumerate().max_by_key(|(_, step)| step.counts.tokens);
        let (number, _) = largest.ok_or_else(|| RuntimeError::bug("a benchmark has no step"))?;
        let largest = timed(&steps[number..=number], model.as_ref());
        session.measured(&largest[0], machine)
    }

    /// Start and duration of each launch and copy in `passes` passes, by replica.
    pub(super) fn spans(&mut self, passes: u32) -> Result<Vec<ReplicaSpans>, RuntimeError> {
        let Self { session, steps, model } = self;
        session.spans(&timed(steps, model.as_ref()), passes)
    }

    /// The plan of the steps.
    pub(super) fn plan(&self) -> &Plan {
        &self.session.program().plans()[0].1
    }

    /// Peak memory of the program.
    pub(super) fn peak(&self) -> Bytes {
        self.session.program().peak()
    }

    /// Name of the device.
    pub(super) fn device(&self) -> String {
        self.session.device_name()
    }

    /// Number of replicas: devices or groups of CPU threads that each compute their own steps, at the same time.
    pub(super) fn replicas(&self) -> usize {
        self.session.replicas()
    }

    /// Element type of the first linear layer's weight; f32 without linear layers.
    pub(super) fn dtype(&self) -> DType {
        let graph = &self.plan().graph;
        let linear = graph.nodes.iter().find(|node| matches!(node.op, Op::Linear(_)));
        linear.map_or(DType::F32, |node| graph.spec(node.inputs[1]).dtype)
    }

    /// Operations and bytes of an instruction in a pass, with the real number of attention pairs in each step.
    pub(super) fn cost(&self, instr: Instr) -> (f64, f64) {
        let graph = &self.plan().graph;
        self.steps
            .iter()
            .map(|&PackedStep { counts, longest, .. }| match instr {
                Instr::Launch(id) => {
                    let bounds = Bounds { longest, ..graph.bounds };
                    let node = graph.node(id);
                    let ins: Vec<_> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
                    let outs: Vec<_> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
                    let cost = node.op.rules().cost(&ins, &outs, &bounds, counts);
                    (cost.flops, cost.bytes)
                }
                Instr::Start(id) => {
                    (0.0, graph.node(id).inputs.iter().map(|&v| graph.spec(v).bytes_at(counts).0 as f64).sum())
                }
                Instr::Wait(_) => (0.0, 0.0),
            })
            .fold((0.0, 0.0), |(flops, bytes), step| (flops + step.0, bytes + step.1))
    }

    /// Rate of the linear layers alone in GFLOP/s, measured in passes until `seconds` have elapsed; at least
    /// one pass.
    pub(super) fn linear_gflops(&mut self, seconds: f64) -> Result<f64, RuntimeError> {
        let mut flops = 0.0;
        let mut spent = 0.0;
        let start = Instant::now();
        loop {
            let times = self.instructions()?;
            let plan = self.plan();
            let linears = plan.schedule.instrs.iter().zip(&times).filter(|(i, _)| is_linear(&plan.graph, i));
            for (&instr, time) in linears {
                (flops, spent) = (flops + self.cost(instr).0, spent + time);
            }
            if start.elapsed().as_secs_f64() >= seconds {
                return Ok(flops / spent.max(1e-12) / 1e9);
            }
        }
    }

    /// Median seconds per pass over `repeats` measurements.
    pub(super) fn seconds(&mut self, repeats: usize) -> Result<f64, RuntimeError> {
        Ok(median(&self.time(repeats, &mut |_, _| Ok(None))?.seconds))
    }
}

/// Whether an instruction launches a linear layer.
fn is_linear(graph: &Graph, instr: &Instr) -> bool {
    match *instr {
        Instr::Launch(id) => matches!(graph.node(id).op, Op::Linear(_)),
        Instr::Start(_) | Instr::Wait(_) => false,
    }
}

/// Element type of a single linear layer for a precision. `Err` for quantized operands, which only layers of models have.
fn element(precision: Precision) -> Result<DType, ToolError> {
    let PrecisionPolicy { storage, forward, .. } = precision.policy();
    if forward.quantized().is_some() {
        return Err(ToolError::OnlyOfModels { precision: precision.name() });
    }
    Ok(storage)
}

/// A graph of one linear layer with all operands of `dtype`.
fn single_linear(rows: u64, n: u64, k: u64, dtype: DType) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(one_sequence(rows));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(k)], DType::F32);
    let y = g.linear(x, "linear", n, true);
    g.output("y", y);
    let mut graph = g.finish()?;
    graph.values.iter_mut().for_each(|value| value.spec.dtype = dtype);
    Ok(graph)
}

/// Bounds of one sequence of `tokens` tokens.
pub(super) fn one_sequence(tokens: u64) -> Bounds {
    Bounds { tokens, sequences: 1, longest: tokens, packs: 1 }
}

/// Resolves the inputs and outputs of the steps of a pass.
fn timed<'a>(steps: &'a [PackedStep], model: Option<&'a ModelInputs>) -> Vec<TimedStep<'a>> {
    steps
        .iter()
        .map(|PackedStep { counts, spans, .. }| {
            let (inputs, outputs) = match model {
                Some(model) => (
                    vec![
                        (model.ids, Data::I32(&model.tokens[..counts.tokens as usize])),
                        (model.spans, Data::I32(spans)),
                    ],
                    vec![model.mean],
                ),
                None => (vec![], vec![]),
            };
            TimedStep { plan: 0, counts: *counts, inputs, outputs }
        })
        .collect()
}

/// `count` token ids without special tokens: residues for ESM-2, words of the vocabulary for DNABERT-S, any id for a
/// decoder.
fn ids(model: &SequenceModel, count: u64) -> Vec<i32> {
    let (first, end) = match model {
        SequenceModel::Encoder(Encoder::Esm2(_)) => (4, 24),
        SequenceModel::Encoder(Encoder::DnabertS(config)) => (5, config.vocab_size.max(6)),
        SequenceModel::Decoder(config) => (0, config.vocab_size),
    };
    (0..count).map(|i| (first + i * 7919 % (end - first)) as i32).collect()
}

/// Pseudo-random numbers in [-1, 1): the upper 24 bits of Knuth's linear congruential generator (MMIX), which
/// have the longest periods.
pub(super) fn numbers(mut state: u64) -> impl Iterator<Item = f32> {
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}
