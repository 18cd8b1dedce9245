//! Five optimizer steps by a training program: micro-step, apply, evaluation.

use super::fixture::{Fixture, Model, Value, check};
use super::{DENSE, MASKED, MIXTURES, gpu};
use crate::executor::ALLOCATOR;
use crate::rig::{ByName, On, in_own_process};
use plimsoll_cpu::Isa;
use plimsoll_cuda::CudaMachine;
use plimsoll_exec::reference::{Moves, ReferenceDevice};
use plimsoll_exec::{Executor, Machine, PersistentKind, PersistentTensor};
use plimsoll_graph::ops::{Adafactor, AdamW, Sgd};
use plimsoll_graph::{Bytes, Counts, Graph, OutputRole, Param, Space, StateKind};
use plimsoll_plan::training::plans;
use plimsoll_plan::{
    ActivationOffload, ArenaMemory, Fuse, Offload, Optimizer, ParameterGroup, Precision, RecomputePolicy,
    Target, Training, Window,
};
use stats_alloc::Region;
use std::collections::BTreeMap;

const STEPS: usize = 5;

/// A training run in progress.
struct Run<'a> {
    fixture: &'a Fixture,
    executor: Executor,
    accumulation: u64,
    what: String,
}

/// Options of a run that its fixture leaves open.
#[derive(Clone)]
struct Options {
    accumulation: u64,
    remat: RecomputePolicy,
    /// Whether gradients are clipped; a head never clips.
    clips: bool,
    optimizer: Optimizer,
    ema: Option<f32>,
    offload: Offload,
    window: Window,
    block: Option<Bytes>,
    /// Whether the reference device copies at the start of a move, not at the wait for it.
    copies_at_start: bool,
}

impl Options {
    /// The options of the fixture's reference run.
    fn of(fixture: &Fixture) -> Self {
        Self {
            accumulation: 1,
            remat: RecomputePolicy::None,
            clips: true,
            optimizer: optimizer(fixture),
            ema: None,
            offload: Offload::default(),
            window: Window::Full,
            block: None,
            copies_at_start: false,
        }
    }
}

/// Creates a run with the options of the fixture's reference run, except for the arguments, and loads its parameters.
fn start<'a>(
    fixture: &'a Fixture,
    graph: &Graph,
    on: On,
    accumulation: u64,
    remat: RecomputePolicy,
) -> Run<'a> {
    let target = on.target().expect("a target");
    start_with(fixture, graph, (on, target), Options { accumulation, remat, ..Options::of(fixture) })
}

/// Creates a run with these options on a target, and loads its parameters.
fn start_with<'a>(
    fixture: &'a Fixture,
    graph: &Graph,
    (on, target): (On, Target),
    options: Options,
) -> Run<'a> {
    let Options { accumulation, remat, clips, optimizer, ema, offload, window, block, copies_at_start } =
        options;
    let head = matches!(fixture.model, Model::Head(_));
    let precision = match on {
        On::Narrow(precision) | On::CpuNarrow(.., precision) | On::Cuda(precision) => precision,
        On::Reference | On::Cpu(..) => Precision::F32,
    };
    let training = Training {
        precision,
        remat,
        activations: ActivationOffload::All,
        optimizer,
        group: &group,
        accumulation,
        max_norm: if head || !clips { 0.0 } else { fixture.hyper("max_norm") as f32 },
        ema,
        fuse: Fuse::default(),
        offload,
        window,
        block,
    };
    let program = training.program(graph, &evaluation(graph), &target);
    let program = program.unwrap_or_else(|e| panic!("{}: {e}", fixture.name));
    let mut executor = if copies_at_start {
        Executor::new(Box::new(ReferenceDevice::moving(Moves::AtStart)), program).expect("started")
    } else {
        on.executor(program)
    };
    let mut read = |p: &Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        out.copy_from_slice(&fixture.parameter(p)[range.start as usize..range.end as usize]);
        Ok(())
    };
    for plan in 0..executor.program().plans().len() {
        executor.load(plan, &mut read).unwrap_or_else(|e| panic!("{e}"));
    }
    executor.start_states().expect("inside the arena");
    let what = format!("{} on {}, accumulation {accumulation}", fixture.name, on.name());
    Run { fixture, executor, accumulation, what }
}

fn group(param: &Param) -> ParameterGroup {
    match plimsoll_models::group(param) {
        plimsoll_models::Group::Matrix | plimsoll_models::Group::Embedding => ParameterGroup::Decay,
        plimsoll_models::Group::Vector => ParameterGroup::NoDecay,
        plimsoll_models::Group::Buffer => ParameterGroup::Frozen,
    }
}

fn optimizer(fixture: &Fixture) -> Optimizer {
    let hyper = |name| fixture.hyper(name) as f32;
    match fixture.model {
        Model::Head(_) => {
            Optimizer::Sgd(Sgd { momentum: hyper("momentum"), weight_decay: 0.0, nesterov: false })
        }
        Model::Decoder(_) | Model::Encoder(_) => Optimizer::AdamW(AdamW {
            beta1: hyper("beta1"),
            beta2: hyper("beta2"),
            eps: hyper("eps"),
            weight_decay: hyper("weight_decay"),
        }),
    }
}

/// The loss alone.
fn evaluation(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    graph.outputs.retain(|(role, _)| *role == OutputRole::Loss);
    graph.updates.clear();
    graph
}

impl Run<'_> {
    fn run(&mut self, plan: &str, counts: Counts) {
        let k = self.executor.program().index(plan).expect(plan);
        self.executor.run(k, counts).unwrap_or_else(|e| panic!("{}: {plan}: {e}", self.what));
    }

    fn number(&mut self, plan: &str, role: OutputRole) -> f32 {
        let k = self.executor.program().index(plan).expect(plan);
        let mut out = [f32::NAN];
        self.executor.output_f32(k, &role, &mut out).unwrap_or_else(|e| panic!("{}: {role}: {e}", self.what));
        out[0]
    }

    /// Writes an input, if the plan has it.
    fn set(&mut self, plan: &str, name: &str, values: &[f32]) {
        let k = self.executor.program().index(plan).expect(plan);
        if self.executor.program().plans()[k].1.graph.input(name).is_some() {
            self.executor.input_f32(k, name, values).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }

    /// The loss of the batch per target, by the plan of evaluation.
    fn evaluate(&mut self) -> f32 {
        let k = self.executor.program().index(plans::EVALUATE).expect("a plan");
        self.fixture.give(&mut self.executor, k);
        self.run(plans::EVALUATE, self.fixture.counts());
        self.number(plans::EVALUATE, OutputRole::Loss) / self.fixture.targets() as f32
    }

    /// Runs step `t` (from 1 on) with the same batch in every micro-step. Returns the loss per target and, with
    /// clipping, the gradient norm.
    fn step(&mut self, t: usize) -> (f32, Option<f32>) {
        self.executor.poison().expect("inside the arena");
        let targets = self.fixture.targets() as f32;
        let unscale = 1.0 / (targets * self.accumulation as f32);
        let hyper = self.fixture.hyper_of_step(t);
        let k = self.executor.program().index(plans::MICRO).expect("a plan");
        for micro in 0..self.accumulation {
            self.fixture.give(&mut self.executor, k);
            self.set(plans::MICRO, "keep", &[if micro == 0 { 0.0 } else { 1.0 }]);
            self.set(plans::MICRO, "unscale", &[unscale]);
            self.set(plans::MICRO, "hyper", &hyper);
            self.run(plans::MICRO, self.fixture.counts());
        }
        let loss = self.number(plans::MICRO, OutputRole::Loss) / targets;
        if self.executor.program().index(plans::APPLY).is_none() {
            return (loss, None);
        }
        self.set(plans::APPLY, "unscale", &[unscale]);
        self.set(plans::APPLY, "hyper", &hyper);
        self.run(plans::APPLY, Counts { tokens: 0, sequences: 0, packs: 1 });
        (loss, Some(self.number(plans::APPLY, OutputRole::GradientNorm)))
    }

    /// All steps, each loss and norm compared.
    fn compared(&mut self) {
        let fixture = self.fixture;
        let losses = fixture.floats("losses");
        for (t, wanted) in losses.iter().enumerate() {
            let evaluated = self.evaluate();
            let (loss, norm) = self.step(t + 1);
            let what = format!("{}: step {t}", self.what);
            check(&[loss], &[*wanted], 0.0, &what);
            // The evaluation plan uses batch statistics as training does, so it gives an equal loss.
            check(&[evaluated], &[*wanted], 0.0, &what);
            if let Some(norm) = norm.filter(|_| fixture.answers.get("norms").is_some()) {
                check(&[norm], &fixture.floats("norms")[t..=t], 0.0, &what);
            }
        }
        assert_eq!(losses.len(), STEPS);
    }

    /// The bytes of all parameters and states but gradients, which a step uses up, by name.
    fn persistent(&mut self) -> BTreeMap<String, Vec<u8>> {
        let mut all = BTreeMap::new();
        for PersistentTensor { what, at, spec } in self.executor.persistent_tensors() {
            let name = match what {
                PersistentKind::Param(param) => param.name,
                PersistentKind::State(state) if state.role.kind() == StateKind::Gradient => continue,
                PersistentKind::State(state) => state.role.to_string(),
            };
            let elements: u64 = spec.shape.iter().filter_map(|d| d.fixed()).product();
            let mut values = vec![0xFF; (elements * spec.dtype.size()) as usize];
            self.executor.download(at, &mut values).expect("inside its space");
            all.insert(name, values);
        }
        all
    }

    /// The present values of all parameters.
    fn parameters(&mut self) -> BTreeMap<String, Vec<f32>> {
        let mut all = BTreeMap::new();
        for PersistentTensor { what, at, spec } in self.executor.persistent_tensors() {
            let PersistentKind::Param(param) = what else { continue };
            let elements: u64 = spec.shape.iter().filter_map(|d| d.fixed()).product();
            let mut values = vec![f32::NAN; elements as usize];
            self.executor.download(at, bytemuck::cast_slice_mut(&mut values)).expect("inside the arena");
            all.insert(param.name, values);
        }
        all
    }
}

impl Fixture {
    /// A number from the fixture's description of the steps.
    fn hyper(&self, name: &str) -> f64 {
        self.answers.metadata()[name].parse().expect(name)
    }

    /// The input `hyper` of step `t`, from 1 on.
    fn hyper_of_step(&self, t: usize) -> Vec<f32> {
        let lr = self.hyper("lr");
        match self.model {
            Model::Head(_) => vec![lr as f32],
            Model::Decoder(_) | Model::Encoder(_) => {
                let rest = |beta: &str| (1.0 - self.hyper(beta).powi(t as i32)) as f32;
                vec![lr as f32, rest("beta1"), rest("beta2")]
            }
        }
    }
}

fn five_steps(name: &'static str, on: On) {
    let fixture = Fixture::open(name);
    let graph = fixture.graph(fixture.bounds());
    for accumulation in [1, 2] {
        let mut run = start(&fixture, &graph, on, accumulation, RecomputePolicy::None);
        run.compared();
        let found = run.parameters();
        // With two micro-batches the running statistics move twice in a step.
        let same = |p: &Param| accumulation == 1 || plimsoll_models::group(p) != plimsoll_models::Group::Buffer;
        for param in graph.params.iter().filter(|p| same(p) && !p.name.ends_with("inv_freq")) {
            let what = format!("{}: {}", run.what, param.name);
            check(&found[&param.name], &fixture.answer("after.", param), 0.0, &what);
        }
    }
}

fn on(devices: &[On], names: &[&'static str]) {
    for name in names {
        devices.iter().for_each(|&on| five_steps(name, on));
    }
}

#[test]
fn of_dense_decoders() {
    on(&[On::Reference], DENSE);
    on(&On::every_cpu(), DENSE);
}

#[test]
fn of_mixtures_of_experts() {
    on(&[On::Reference], MIXTURES);
    on(&On::every_cpu(), MIXTURES);
}

#[test]
fn of_masked_language_models() {
    on(&[On::Reference], MASKED);
    on(&On::every_cpu(), MASKED);
}

#[test]
fn of_the_head() {
    on(&[On::Reference], &["head"]);
    on(&On::every_cpu(), &["head"]);
}

#[test]
fn of_every_fixture_on_a_gpu() {
    for names in [DENSE, MIXTURES, MASKED, &["head"]] {
        on(&gpu(), names);
    }
}

/// Without clipping, each gradient is applied in the micro-step. If a gradient is not finite, the weights stay
/// finite and the output `scale` reports that the step was skipped.
#[test]
fn a_gradient_that_is_not_finite_moves_nothing_behind_it() {
    let fixture = Fixture::open("head");
    let graph = fixture.graph(fixture.bounds());
    for on in std::iter::once(On::Reference).chain(On::every_cpu()).chain(gpu()) {
        let mut run = start(&fixture, &graph, on, 1, RecomputePolicy::None);
        let k = run.executor.program().index(plans::MICRO).expect("a plan");
        assert!(run.executor.program().index(plans::APPLY).is_none(), "updates follow their gradients");
        let weights = |run: &mut Run<'_>| {
            let mut all = run.parameters();
            // Running statistics follow the activations, which are finite.
            all.retain(|name, _| !name.contains("running_"));
            all
        };
        let step = |run: &mut Run<'_>, dloss: f32| {
            run.fixture.give(&mut run.executor, k);
            run.set(plans::MICRO, "d loss", &[dloss]);
            run.set(plans::MICRO, "unscale", &[1.0 / fixture.targets() as f32]);
            run.set(plans::MICRO, "hyper", &fixture.hyper_of_step(1));
            run.run(plans::MICRO, fixture.counts());
            let mut scale = [f32::NAN; 2];
            run.executor.output_f32(k, OutputRole::GradientScale, &mut scale).expect("an output");
            assert!(run.number(plans::MICRO, OutputRole::Loss).is_finite());
            scale[1]
        };
        let before = weights(&mut run);
        assert_eq!(step(&mut run, f32::INFINITY), 0.0, "{}", run.what);
        assert!(weights(&mut run) == before, "{}: the weights moved", run.what);
        assert_eq!(step(&mut run, 1.0), 1.0, "{}", run.what);
        assert!(weights(&mut run) != before, "{}: the weights were not changed", run.what);
    }
}

/// Recomputation performs the same arithmetic, including dropout masks, and so gives the same bits.
#[test]
fn recomputation_changes_no_bit() {
    let selective =
        RecomputePolicy::Selective(["glu", "gelu", "rms_norm", "dropout"].map(str::to_owned).to_vec());
    for name in ["moe_swiglu", "dnabert_s"] {
        let fixture = Fixture::open(name);
        let graph = fixture.dropping(fixture.bounds(), 0.2);
        for on in [On::Reference, On::every_cpu()[0]].into_iter().chain(gpu()) {
            let steps = |remat| {
                let mut run = start(&fixture, &graph, on, 1, remat);
                let losses = [1, 2].map(|t| run.step(t));
                (losses, run.parameters())
            };
            let plain = steps(RecomputePolicy::None);
            assert!(
                plain.0[0].0.is_finite() && plain.0[0].0 != fixture.floats("losses")[0],
                "nothing is dropped"
            );
            for remat in [RecomputePolicy::Full, RecomputePolicy::EveryN(2), selective.clone()] {
                assert!(steps(remat.clone()) == plain, "{name} on {}: {remat:?}", on.name());
            }
        }
    }
}

/// Where parameters and states lie changes no bit: of losses, norms, parameters and states, with updates in the micro-step
/// and after it, for every optimizer, whatever is copied ahead, and whether updates are split into blocks. The reference
/// device copies at the wait and fills what it copies to with NaN before, or copies at the start.
#[test]
fn offload_changes_no_bit() {
    const NOTHING: Offload = Offload {
        optimizer: false,
        masters: false,
        gradients: false,
        parameters: false,
        activations: false,
        to: Space::Device,
    };
    let one = |offload: fn(&mut Offload)| {
        let mut one = NOTHING;
        offload(&mut one);
        one
    };
    let kinds = [
        one(|o| o.optimizer = true),
        one(|o| o.masters = true),
        one(|o| o.gradients = true),
        one(|o| o.parameters = true),
        one(|o| o.activations = true),
        Offload {
            optimizer: true,
            masters: true,
            gradients: true,
            parameters: true,
            activations: true,
            to: Space::Device,
        },
    ];
    let adam = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
    let optimizers = [
        Optimizer::AdamW(adam),
        Optimizer::AdamW8bit(adam),
        Optimizer::Adafactor(adafactor),
        Optimizer::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true }),
    ];
    let isa = Isa::detect();
    let cpus = [On::Cpu(isa, 2), On::CpuNarrow(isa, 2, Precision::Bf16)];
    let references = [On::Reference, On::Narrow(Precision::Bf16), On::Narrow(Precision::Fp16)];
    let fixture = Fixture::open("llama");
    let graph = fixture.graph(fixture.bounds());
    let mut compared = 0;
    let mut split = 0;
    for (n, on) in references.into_iter().chain(cpus).chain(gpu()).enumerate() {
        let has_host = !matches!(on, On::Cpu(..) | On::CpuNarrow(..));
        // The reference device has the host's space of a GPU if its target says so.
        let target = on.target().expect("a target");
        let space = if has_host { ArenaMemory::Device } else { ArenaMemory::Host };
        let target = Target { space, ..target };
        for (k, &optimizer) in optimizers.iter().enumerate() {
            for (accumulation, clips) in [(1, false), (1, true), (3, true)] {
                // Each combination is with one of the devices at least.
                if (k + accumulation as usize + n) % 2 == 1 && n != 1 {
                    continue;
                }
                let ema = (k == 0).then_some(0.9);
                let options = Options { accumulation, clips, optimizer, ema, ..Options::of(&fixture) };
                let mut ran = |offload, window, block, copies_at_start| {
                    let options = Options { offload, window, block, copies_at_start, ..options.clone() };
                    let mut run = start_with(&fixture, &graph, (on, target.clone()), options);
                    let steps = [1, 2, 3].map(|t| run.step(t));
                    compared += 1;
                    let plans = run.executor.program().plans();
                    split += u32::from(
                        plans.iter().any(|(_, p)| p.graph.nodes.iter().any(|node| node.op.is_view())),
                    );
                    (steps, run.evaluate(), run.persistent())
                };
                let wanted = ran(NOTHING, Window::Full, None, false);
                let spaces: &[Space] = if has_host { &[Space::Host, Space::File] } else { &[Space::File] };
                for (j, &to) in spaces.iter().enumerate() {
                    for (i, kind) in kinds.into_iter().enumerate() {
                        let window =
                            [Window::CLOSED, Window::Full, Window::Part(4), Window::Bytes(Bytes(1 << 30))]
                                [(i + j + k) % 4];
                        // Blocks of a few rows, of most of a matrix, and none.
                        let block = [Some(Bytes(1)), Some(Bytes(9000)), None][(i + n + k) % 3];
                        let copies_at_start = n < 3 && (i + accumulation as usize).is_multiple_of(2);
                        let found = ran(Offload { to, ..kind }, window, block, copies_at_start);
                        let what = format!(
                            "{} {optimizer:?} {accumulation} {kind:?} in {to:?}, {window:?}, {block:?}, {copies_at_start}",
                            on.name()
                        );
                        assert!(found == wanted, "{what}");
                    }
                }
            }
        }
    }
    println!("{compared} runs, {split} with blocks");
    assert!(split > 60, "{split} of {compared}");
}

/// A submitted micro-step and update allocate no memory of the host and none of a GPU. The counters include other
/// threads and processes, so the steps are repeated until one is without an allocation, which proves the claim.
#[test]
fn a_step_of_training_allocates_nothing() {
    if !in_own_process("training::steps::a_step_of_training_allocates_nothing") {
        return;
    }
    const MAX_STEPS: usize = 50;
    let machine = gpu().first().map(|_| CudaMachine::new(0, plimsoll_cuda::Options::default()).expect("a GPU"));
    let devices = [Some(On::Cpu(Isa::detect(), 2)), On::cuda(Precision::F32), On::cuda(Precision::Bf16)];
    for (name, on) in ["llama", "moe_swiglu", "esm2"].iter().flat_map(|name| devices.map(|on| (name, on))) {
        let Some(on) = on else { continue };
        let fixture = Fixture::open(name);
        let mut run = start(&fixture, &fixture.graph(fixture.bounds()), on, 2, RecomputePolicy::None);
        run.step(1);
        let plan = |what: &str| run.executor.program().index(what).expect("a plan");
        let micro = plan(plans::MICRO);
        let apply = plan(plans::APPLY);
        let values = [micro, apply].map(|k| {
            let inputs = &run.executor.program().plans()[k].1.graph.inputs;
            let value = |name: &str| match name {
                "keep" => Value::F32(vec![0.0]),
                "unscale" => Value::F32(vec![1.0 / fixture.targets() as f32]),
                "hyper" => Value::F32(fixture.hyper_of_step(2)),
                _ => fixture.value(name).unwrap_or_else(|| panic!("{name}")),
            };
            let id = |name: &str| run.executor.input(k, name).expect("an input");
            inputs.iter().map(|(name, _)| (id(name), value(name))).collect::<Vec<_>>()
        });
        let inputs = values.each_ref().map(|all| all.iter().map(|(id, v)| (*id, v.data())).collect::<Vec<_>>());
        let loss = run.executor.output(micro, OutputRole::Loss);
        let norm = run.executor.output(apply, OutputRole::GradientNorm);
        let loss = [(loss.expect("an output"), 1)];
        let norm = [(norm.expect("an output"), 1)];
        let counts = fixture.counts();
        let mut losses = [vec![]];
        let mut norms = [vec![]];
        let free = || machine.as_ref().map(|machine| machine.free().expect("the driver answers"));
        let mut found = vec![];
        for _ in 0..MAX_STEPS {
            let before = free();
            let region = Region::new(ALLOCATOR);
            let e = &mut run.executor;
            let step = e.submit(micro, &inputs[0], counts, &loss).expect("submitted");
            e.collect(step, &mut losses).expect("collected");
            let step = e
                .submit(apply, &inputs[1], Counts { tokens: 0, sequences: 0, packs: 1 }, &norm)
                .expect("submitted");
            e.collect(step, &mut norms).expect("collected");
            let change = region.change();
            found.push((change.allocations, free() == before));
            if found.last() == Some(&(0, true)) {
                break;
            }
        }
        assert!(losses[0][0].is_finite() && norms[0][0].is_finite(), "{}: {losses:?} {norms:?}", run.what);
        assert!(found.contains(&(0, true)), "{}: (allocations, card unchanged) of steps: {found:?}", run.what);
    }
}
