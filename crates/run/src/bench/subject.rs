//! A program with random weights and inputs, and its turns with the raw loop.
//! Invariant: what is random is the same on every machine; uploads are not timed.

use super::{Work, median};
use crate::session::load;
use crate::{RunError, Settings, price};
use exec::Executor;
use graph::{Bounds, Builder, Bytes, Counts, DType, Dim, Graph, Op, VerifyError};
use models::{Encoder, Output};
use plan::{Instr, Plan, PlanError, Policy, Program, Target, compile};
use std::time::{Duration, Instant};

/// Seconds of a turn: shorter work is repeated until it takes this long.
const TURN: f64 = 0.1;

/// As often as the shortest work is repeated in a turn.
const MOST_PASSES: f64 = 1000.0;

/// Something that can be timed.
pub(super) struct Subject {
    executor: Executor,
    /// The steps of a pass.
    pub(super) steps: Vec<Counts>,
    inputs: Vec<(&'static str, Data)>,
}

/// An input of the widest step; smaller steps take its beginning.
pub(super) enum Data {
    /// Ids and spans.
    I32(Vec<i32>),
    /// Activations.
    F32(Vec<f32>),
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
pub(super) type Raw<'a> = &'a dyn Fn(DType, f64) -> Option<(&'static str, f64)>;

impl Subject {
    /// Plans the work and fills it with random numbers.
    pub(super) fn start(work: &Work, settings: &Settings) -> Result<Self, RunError> {
        match *work {
            Work::Model { ref model, sequences, length } => {
                Self::model(settings, &price::encoder(model)?, sequences, length)
            }
            Work::Linear { rows, n, k } => {
                let mut g = Builder::new(one_sequence(rows));
                let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(k)], DType::F32);
                let y = g.linear(x, "product", n, true);
                g.output("y", y);
                let x = |elements| vec![("x", Data::F32(numbers(1).take(elements).collect()))];
                Self::single(settings, rows, g.finish(), x)
            }
        }
    }

    fn model(settings: &Settings, encoder: &Encoder, sequences: u64, length: u64) -> Result<Self, RunError> {
        let (target, policy) = (settings.target()?, settings.policy()?);
        let program = settings.fit(length, &mut |tokens| {
            let n = (tokens / length).clamp(1, sequences);
            let bounds = Bounds { tokens: n * length, sequences: n, longest: length };
            one(&target, &policy, encoder.graph(bounds, &[Output::Mean]))
        })?;
        let most = program.plans()[0].1.graph.bounds.sequences;
        let step = |n| Counts { tokens: n * length, sequences: n };
        let starts = (0..sequences).step_by(most as usize);
        let steps = starts.map(|done| step(most.min(sequences - done))).collect();
        let ids = Data::I32(ids(encoder, most * length));
        Self::new(settings, program, steps, vec![("ids", ids), ("spans", Data::I32(spans(most, length)))])
    }

    /// A graph of one step of `rows` rows. `inputs` gets the elements of the first.
    pub(super) fn single(
        settings: &Settings,
        rows: u64,
        graph: Result<Graph, VerifyError>,
        inputs: impl FnOnce(usize) -> Vec<(&'static str, Data)>,
    ) -> Result<Self, RunError> {
        let program = one(&settings.target()?, &Policy::default(), graph)?.within(settings.line()?)?;
        let step = one_sequence(rows).full();
        let elements = program.plans().first().and_then(|(_, p)| {
            let (_, v) = p.graph.inputs.first()?;
            Some(p.graph.spec(*v).elements_at(step))
        });
        Self::new(settings, program, vec![step], inputs(elements.unwrap_or(0) as usize))
    }

    fn new(
        settings: &Settings,
        program: Program,
        steps: Vec<Counts>,
        inputs: Vec<(&'static str, Data)>,
    ) -> Result<Self, RunError> {
        let mut executor = settings.start_one(program)?;
        let mut weights = numbers(0);
        load(&mut executor, 0, |param, _, out| {
            // A norm's weights are about 1, so that numbers keep their size through the layers.
            let norm = param.name.to_ascii_lowercase().ends_with("norm.weight");
            for (x, random) in out.iter_mut().zip(&mut weights) {
                *x = if norm { 1.0 } else { 0.05 * random };
            }
            Ok(())
        })?;
        Ok(Self { executor, steps, inputs })
    }

    /// The raw loop and the work by turns, after one pass to warm up.
    pub(super) fn time(&mut self, repeats: usize, raw: Raw<'_>) -> Result<Turns, RunError> {
        let mut times = vec![Duration::ZERO; self.plan().schedule.instrs.len()];
        self.pass(None)?;
        let warm = self.pass(None)?;
        let passes = (TURN / warm).ceil().clamp(1.0, MOST_PASSES) as u32;
        let dtype = self.dtype();
        let mut turns = Turns { passes, raw_loop: None, raw: vec![], seconds: vec![], instructions: vec![] };
        for _ in 0..repeats.max(1) {
            // As long as the work, but no longer than a rate needs to be steady.
            if let Some((raw_loop, rate)) = raw(dtype, (f64::from(passes) * warm).min(5.0 * TURN)) {
                turns.raw_loop = Some(raw_loop);
                turns.raw.push(rate);
            }
            let mut seconds = 0.0;
            for _ in 0..passes {
                seconds += self.pass(None)?;
            }
            turns.seconds.push(seconds / f64::from(passes));
            // Apart from the passes above: a device may only be asked for the time of a launch by waiting for it.
            times.fill(Duration::ZERO);
            self.pass(Some(&mut times))?;
            turns.instructions.push(times.iter().map(Duration::as_secs_f64).collect());
        }
        Ok(turns)
    }

    /// Every step once; the seconds that they took together. Each instruction's are added to `times`.
    fn pass(&mut self, mut times: Option<&mut [Duration]>) -> Result<f64, RunError> {
        let mut seconds = 0.0;
        for i in 0..self.steps.len() {
            let counts = self.steps[i];
            for (name, data) in &self.inputs {
                let graph = &self.executor.program().plans()[0].1.graph;
                let n = graph.input(name).map_or(0, |v| graph.spec(v).elements_at(counts)) as usize;
                match data {
                    Data::I32(values) => self.executor.input_i32(0, name, &values[..n])?,
                    Data::F32(values) => self.executor.input_f32(0, name, &values[..n])?,
                }
            }
            self.executor.wait()?;
            let start = Instant::now();
            match &mut times {
                Some(times) => self.executor.run_timed(0, counts, times)?,
                None => self.executor.run(0, counts)?,
            }
            self.executor.wait()?;
            seconds += start.elapsed().as_secs_f64();
        }
        Ok(seconds)
    }

    /// What runs.
    pub(super) fn plan(&self) -> &Plan {
        &self.executor.program().plans()[0].1
    }

    /// What it holds.
    pub(super) fn peak(&self) -> Bytes {
        self.executor.program().peak()
    }

    /// Where it runs.
    pub(super) fn device(&self) -> String {
        self.executor.device().name()
    }

    /// What its products are computed in: the type of the first linear's weight.
    pub(super) fn dtype(&self) -> DType {
        let graph = &self.plan().graph;
        let linear = graph.nodes.iter().find(|node| matches!(node.op, Op::Linear(_)));
        linear.map_or(DType::F32, |node| graph.spec(node.inputs[1]).dtype)
    }

    /// Operations and bytes of an instruction in a pass. All sequences of a step are as long as its bounds
    /// say, so the pairs that attention counts are those that there are.
    pub(super) fn cost(&self, instr: Instr) -> (f64, f64) {
        let graph = &self.plan().graph;
        let of_step = |&counts: &Counts| match instr {
            Instr::Launch(id) => {
                let node = graph.node(id);
                let ins: Vec<_> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
                let outs: Vec<_> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
                let cost = node.op.rules().cost(&ins, &outs, &graph.bounds, counts);
                (cost.flops as f64, cost.bytes as f64)
            }
            Instr::Load(v) => (0.0, graph.spec(v).bytes_at(counts).0 as f64),
            Instr::Copy { from, .. } => (0.0, 2.0 * graph.spec(from).bytes_at(counts).0 as f64),
        };
        let add = |sum: (f64, f64), one: (f64, f64)| (sum.0 + one.0, sum.1 + one.1);
        self.steps.iter().map(of_step).fold((0.0, 0.0), add)
    }

    /// Seconds of a pass, the median.
    pub(super) fn seconds(&mut self, repeats: usize) -> Result<f64, RunError> {
        Ok(median(&self.time(repeats, &|_, _| None)?.seconds))
    }
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

fn spans(sequences: u64, length: u64) -> Vec<i32> {
    (0..sequences).flat_map(|s| [s * length, (s + 1) * length]).map(|row| row as i32).collect()
}

/// Numbers from -1 to 1 (Knuth's linear congruential generator, the upper bits).
fn numbers(mut state: u64) -> impl Iterator<Item = f32> {
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}
