//! A program with random weights and inputs, and its turns with the raw loop.
//! Invariant: what is random is the same on every machine; a model's step is timed from token ids to means on the host, a
//! product's with its input in place.

use super::lane::{Lane, Line};
use super::steps::{Step, packs};
use super::{Work, median};
use crate::ToolError;
use exec::{Executor, Span};
use graph::ops::{Embed, SegmentMean};
use graph::{Bounds, Builder, Bytes, DType, Dim, Graph, Op, VerifyError};
use models::{Encoder, Output};
use plan::{Instr, Plan, PlanError, Policy, Precision, Program, Target, compile};
use runtime::session::bounds::{LEAST_OF_REPLICA, bounds, with_outputs};
use runtime::session::{Part, Planned, Request, Site, Stage, load, name};
use runtime::{RuntimeError, Settings, price};
use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

/// Seconds of a turn: shorter work is repeated until it takes this long.
const TURN: f64 = 0.1;

/// Random numbers of which all weights are made; a prime, so that equal matrices do not start at equal ones.
const RANDOM: usize = 1_048_573;

/// Rows of the table in front of products whose rate is the ceiling: those of ESM-2.
const VOCABULARY: u64 = 33;

/// As often as the shortest work is repeated in a turn.
const MOST_PASSES: f64 = 1000.0;

/// Outputs that a lane holds: those that it fetched, and those that it handed out.
const OUTPUTS: u64 = 2;

/// The machine with all threads in one replica, for work of one step.
pub(super) fn one_replica(settings: &Settings) -> Result<Site, RuntimeError> {
    Ok(Site::new(settings, 1, settings.tokens, settings.read_budget()?))
}

/// Something that can be timed.
pub(super) struct Subject {
    /// One, or several that share their weights and take steps by turns, each as soon as it is free.
    lanes: Vec<Lane>,
    /// The steps of a pass.
    pub(super) steps: Vec<Step>,
    /// Token ids of the widest step, of which each takes the beginning; none where inputs are in place.
    ids: Vec<i32>,
}

/// What was measured, an entry for each turn.
pub(super) struct Turns {
    /// Passes of a turn.
    pub(super) passes: u32,
    /// What the raw loop is; `None` where there is none.
    pub(super) raw_loop: Option<&'static str>,
    /// GFLOP/s of the raw loop.
    pub(super) raw: Vec<f64>,
    /// Seconds of a pass.
    pub(super) seconds: Vec<f64>,
    /// Seconds of each instruction in a pass.
    pub(super) instructions: Vec<Vec<f64>>,
}

/// The raw loop of a type over about so many seconds: what it is, and its GFLOP/s.
pub(super) type Raw<'a> = &'a mut dyn FnMut(DType, f64) -> Result<Option<(&'static str, f64)>, RuntimeError>;

impl Subject {
    /// Plans the work and fills it with random numbers.
    pub(super) fn start(work: &Work, settings: &Settings) -> Result<Self, ToolError> {
        match *work {
            Work::Model { ref model, sequences, lengths } => {
                let lengths = lengths.of(sequences);
                Ok(Self::model(settings, &price::encoder(model)?, &lengths)?)
            }
            Work::Linear { rows, n, k } => {
                let precision = settings.precision()?;
                let dtype = element(precision)?;
                // The graph is in the type; what is no type is for the policy.
                let precision = if dtype == DType::F32 { precision } else { Precision::F32 };
                let policy = Policy { precision, ..Policy::default() };
                let mut subject = Self::single(settings, &policy, rows, product(rows, n, k, dtype))?;
                let numbers = numbers(1).take((rows * k) as usize);
                match dtype {
                    DType::F32 => {
                        let x = subject.first().input(0, "x")?;
                        subject.first_mut().write_f32(x, &numbers.collect::<Vec<f32>>())?;
                    }
                    // Their upper halves: the same numbers in bf16, others in binary16, but not zeros, which are quicker.
                    DType::Bf16 | DType::F16 => {
                        let halves: Vec<u8> =
                            numbers.flat_map(|x| x.to_le_bytes().into_iter().skip(2)).collect();
                        let x = subject.first().input(0, "x")?;
                        subject.first_mut().write_u8(x, &halves)?;
                    }
                    DType::F8 | DType::I8 | DType::I32 | DType::U8 => {}
                }
                Ok(subject)
            }
        }
    }

    /// An encoder over a batch, with as many replicas as a run has whose input is many of such batches, as far as the batch
    /// has steps for them: a small one is asked for to see small steps, by all threads together.
    fn model(settings: &Settings, encoder: &Encoder, lengths: &[u64]) -> Result<Self, RuntimeError> {
        let tokens: u64 = lengths.iter().sum();
        let replicas = settings.most_replicas(Some(tokens / LEAST_OF_REPLICA));
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let equal = lengths.iter().all(|&n| n == longest);
        let graph = |mixed: Bounds| {
            let n = (mixed.tokens / longest).clamp(1, lengths.len() as u64);
            let whole = Bounds { tokens: n * longest, sequences: n, longest };
            encoder.graph(if equal { whole } else { mixed }, &[Output::Mean])
        };
        let planned = Self::planned(settings, replicas, longest, Box::new(graph))?;
        let program = planned.programs()[0].clone();
        let bounds = program.plans()[0].1.graph.bounds;
        let steps: Vec<Step> = packs(lengths, &bounds, program.lanes()).into_iter().map(Step::of).collect();
        Self::new(planned.site(), program, steps, ids(encoder, bounds.tokens))
    }

    /// The plan of a graph for the most tokens that fit and bring speed.
    pub(super) fn planned<'a>(
        settings: &Settings,
        replicas: usize,
        longest: u64,
        graph: Box<dyn Fn(Bounds) -> Result<Graph, VerifyError> + 'a>,
    ) -> Result<Planned<'a>, RuntimeError> {
        let part = Part {
            name: "bench",
            graph: Box::new(move |tokens| graph(bounds(tokens, longest))),
            policy: settings.policy()?,
            streams: false,
        };
        let stage = Stage {
            finish: Box::new(|program, replicas| with_outputs(program, OUTPUTS * replicas as u64, 0, None)),
            ..Stage::new(vec![part], longest)
        };
        settings.plan(Request {
            alternatives: vec![vec![stage]],
            replicas,
            tokens: settings.tokens,
            budgets: vec![settings.read_budget()?],
        })
    }

    /// Products in the precision of the settings, as the device computes them in models: the rate of the linears of
    /// this is what can be reached.
    pub(super) fn products(
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
            x = g.linear(x, "product", width, true);
        }
        g.scope("", None);
        let mean = g.one(Op::SegmentMean(SegmentMean { skip_first: 0, skip_last: 0 }), &[x, spans]);
        g.output("mean", mean);
        let (site, policy) = (one_replica(settings)?, settings.policy()?);
        let program = one(&settings.target()?, &policy, g.finish())?.within(site.budget().bytes)?;
        let ids = (0..rows).map(|i| (i * 7919 % VOCABULARY) as i32).collect();
        Self::new(&site, program, vec![Step::of(&[rows])], ids)
    }

    /// A graph of one step of `rows` rows, whose inputs are whatever lies in the arena.
    pub(super) fn single(
        settings: &Settings,
        policy: &Policy,
        rows: u64,
        graph: Result<Graph, VerifyError>,
    ) -> Result<Self, RuntimeError> {
        let site = one_replica(settings)?;
        let program = one(&settings.target()?, policy, graph)?.within(site.budget().bytes)?;
        Self::new(&site, program, vec![Step::whole(one_sequence(rows).full())], vec![])
    }

    fn new(site: &Site, program: Program, steps: Vec<Step>, ids: Vec<i32>) -> Result<Self, RuntimeError> {
        let executors = site.start_alone(program)?;
        let mut subject = Self { lanes: executors.into_iter().map(Lane::new).collect(), steps, ids };
        // Billions of numbers one by one would take longer than all that is timed.
        let random: Vec<f32> = numbers(0).take(RANDOM).map(|x| 0.05 * x).collect();
        let mut at = 0;
        // Lanes have the weights of the first.
        load(subject.first_mut(), 0, |param, _, out| {
            // A norm's weights are about 1, so that numbers keep their size through the layers.
            if param.name.to_ascii_lowercase().ends_with("norm.weight") {
                out.fill(1.0);
                return Ok(());
            }
            for part in out.chunks_mut(RANDOM) {
                let (end, wrapped) = part.split_at_mut(part.len().min(RANDOM - at));
                end.copy_from_slice(&random[at..at + end.len()]);
                wrapped.copy_from_slice(&random[..wrapped.len()]);
                at = (at + part.len()) % RANDOM;
            }
            Ok(())
        })?;
        Ok(subject)
    }

    /// What is the same of all lanes.
    fn first(&self) -> &Executor {
        &self.lanes[0].executor
    }

    fn first_mut(&mut self) -> &mut Executor {
        &mut self.lanes[0].executor
    }

    /// The raw loop and the work by turns, after one pass to warm up.
    pub(super) fn time(&mut self, repeats: usize, raw: Raw<'_>) -> Result<Turns, RuntimeError> {
        self.passes(1)?;
        let warm = self.passes(1)?;
        let passes = (TURN / warm).ceil().clamp(1.0, MOST_PASSES) as u32;
        let dtype = self.dtype();
        let mut turns = Turns { passes, raw_loop: None, raw: vec![], seconds: vec![], instructions: vec![] };
        for _ in 0..repeats.max(1) {
            // As long as the work, but no longer than a rate needs to be steady.
            if let Some((raw_loop, rate)) = raw(dtype, (f64::from(passes) * warm).min(5.0 * TURN))? {
                turns.raw_loop = Some(raw_loop);
                turns.raw.push(rate);
            }
            turns.seconds.push(self.passes(passes)? / f64::from(passes));
            // Apart from the passes above: a device may only be asked for the time of a launch by waiting for it.
            turns.instructions.push(self.instructions()?);
        }
        Ok(turns)
    }

    /// Every step so many times, one pass behind the other as in a run, as many steps open at a time as the device keeps; the
    /// seconds that they took together.
    pub(super) fn passes(&mut self, times: u32) -> Result<f64, RuntimeError> {
        self.lanes.iter_mut().try_for_each(|lane| lane.executor.wait())?;
        let start = Instant::now();
        self.in_lanes(times, Lane::steps)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of each instruction in a pass; of several lanes the mean, so that all together are about a pass's seconds.
    pub(super) fn instructions(&mut self) -> Result<Vec<f64>, RuntimeError> {
        let times = self.in_lanes(1, Lane::instructions)?;
        let mean = |i: usize| times.iter().map(|lane| lane[i].as_secs_f64()).sum::<f64>() / times.len() as f64;
        Ok((0..self.plan().schedule.instrs.len()).map(mean).collect())
    }

    /// Passes over the steps by all lanes beside each other, and what each of them says then.
    fn in_lanes<T: Send>(
        &mut self,
        times: u32,
        run: impl Fn(&mut Lane, &Line<'_>) -> Result<T, RuntimeError> + Sync,
    ) -> Result<Vec<T>, RuntimeError> {
        let Self { lanes, steps, ids } = self;
        let line = Line::new(steps, ids, times);
        let Some((first, others)) = lanes.split_first_mut() else { return Ok(vec![]) };
        thread::scope(|scope| {
            let (line, run) = (&line, &run);
            let start = |lane| thread::Builder::new().spawn_scoped(scope, move || run(lane, line));
            let others: Result<Vec<_>, _> = others.iter_mut().map(start).collect();
            let others = others.map_err(RuntimeError::thread("lane"))?;
            let first = run(first, line);
            let others =
                others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            std::iter::once(first).chain(others).collect()
        })
    }

    /// When everything ran in some passes, by lane, with its name.
    pub(super) fn spans(&mut self, passes: u32) -> Result<Vec<(String, Vec<Span>)>, RuntimeError> {
        self.lanes.iter_mut().try_for_each(|lane| lane.executor.trace(true))?;
        self.passes(passes)?;
        let of_lane = |Lane { executor, .. }: &mut Lane| {
            let spans = executor.spans()?;
            executor.trace(false)?;
            Ok((executor.device().name(), spans))
        };
        self.lanes.iter_mut().map(of_lane).collect()
    }

    /// What runs.
    pub(super) fn plan(&self) -> &Plan {
        &self.first().program().plans()[0].1
    }

    /// What it holds.
    pub(super) fn peak(&self) -> Bytes {
        self.first().program().peak()
    }

    /// Where it runs.
    pub(super) fn device(&self) -> String {
        name(self.first())
    }

    /// Steps that are computed beside each other.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The type of the first linear's weight.
    pub(super) fn dtype(&self) -> DType {
        let graph = &self.plan().graph;
        let linear = graph.nodes.iter().find(|node| matches!(node.op, Op::Linear(_)));
        linear.map_or(DType::F32, |node| graph.spec(node.inputs[1]).dtype)
    }

    /// Operations and bytes of an instruction in a pass. The pairs that attention counts are those that there are.
    pub(super) fn cost(&self, instr: Instr) -> (f64, f64) {
        let graph = &self.plan().graph;
        let of_step = |&Step { counts, longest, .. }: &Step| match instr {
            Instr::Launch(id) => {
                let bounds = Bounds { longest, ..graph.bounds };
                let node = graph.node(id);
                let ins: Vec<_> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
                let outs: Vec<_> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
                let cost = node.op.rules().cost(&ins, &outs, &bounds, counts);
                (cost.flops as f64, cost.bytes as f64)
            }
            Instr::Load(v) => (0.0, graph.spec(v).bytes_at(counts).0 as f64),
            Instr::Copy { from, .. } => (0.0, 2.0 * graph.spec(from).bytes_at(counts).0 as f64),
        };
        let add = |sum: (f64, f64), one: (f64, f64)| (sum.0 + one.0, sum.1 + one.1);
        self.steps.iter().map(of_step).fold((0.0, 0.0), add)
    }

    /// The rate of the linears alone, in GFLOP/s, over passes of about so many seconds.
    pub(super) fn linear_gflops(&mut self, seconds: f64) -> Result<f64, RuntimeError> {
        let linear = |graph: &Graph, instr: &Instr| match *instr {
            Instr::Launch(id) => matches!(graph.node(id).op, Op::Linear(_)),
            Instr::Load(_) | Instr::Copy { .. } => false,
        };
        let (mut flops, mut spent, start) = (0.0, 0.0, Instant::now());
        loop {
            let times = self.instructions()?;
            let plan = self.plan();
            let linears = plan.schedule.instrs.iter().zip(&times).filter(|(i, _)| linear(&plan.graph, i));
            for (&instr, time) in linears {
                (flops, spent) = (flops + self.cost(instr).0, spent + time);
            }
            if start.elapsed().as_secs_f64() >= seconds {
                return Ok(flops / spent.max(1e-12) / 1e9);
            }
        }
    }

    /// Seconds of a pass, the median.
    pub(super) fn seconds(&mut self, repeats: usize) -> Result<f64, RuntimeError> {
        Ok(median(&self.time(repeats, &mut |_, _| Ok(None))?.seconds))
    }
}

/// The type of a single product in a precision.
fn element(precision: Precision) -> Result<DType, ToolError> {
    match precision {
        Precision::F32 | Precision::Tf32 | Precision::Bf16 | Precision::Fp16 => Ok(precision.dtype()),
        Precision::Fp8 | Precision::Int8 => Err(ToolError::OnlyOfModels { precision: precision.name() }),
    }
}

/// One linear, all of whose operands are of one type.
fn product(rows: u64, n: u64, k: u64, dtype: DType) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(one_sequence(rows));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(k)], DType::F32);
    let y = g.linear(x, "product", n, true);
    g.output("y", y);
    let mut graph = g.finish()?;
    graph.values.iter_mut().for_each(|value| value.spec.dtype = dtype);
    Ok(graph)
}

/// Bounds of one sequence.
pub(super) fn one_sequence(tokens: u64) -> Bounds {
    Bounds { tokens, sequences: 1, longest: tokens }
}

/// The program of one graph.
fn one(target: &Target, policy: &Policy, graph: Result<Graph, VerifyError>) -> Result<Program, PlanError> {
    let graph = graph.map_err(|source| PlanError::Verify { after: "build", source })?;
    let plan = compile(&graph, policy, target)?;
    Ok(Program::new(target.clone(), vec![("bench".to_owned(), plan)], vec![]))
}

/// Residues for ESM-2, words for DNABERT-S: no special tokens.
fn ids(encoder: &Encoder, count: u64) -> Vec<i32> {
    let (first, end) = match encoder {
        Encoder::Esm2(_) => (4, 24),
        Encoder::DnabertS(config) => (5, config.vocab_size.max(6)),
    };
    (0..count).map(|i| (first + i * 7919 % (end - first)) as i32).collect()
}

/// Numbers from -1 to 1 (Knuth's linear congruential generator, the upper bits).
pub(super) fn numbers(mut state: u64) -> impl Iterator<Item = f32> {
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}
