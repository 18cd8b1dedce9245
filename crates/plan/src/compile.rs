//! Compilation of a graph to a plan: run all passes ([`lowered`]), choose a kernel for each node, assign an address to
//! each value ([`place`]), and check the result. Invariant: the graph is verified after every pass, and every plan
//! returned from this file has been replayed by the checker.

use crate::liveness::{Buffer, buffers, homes};
use crate::pack::{PackItem, Packing, Problem, solve};
use crate::schedule::{full_window, moved, schedule};
use crate::views::Views;
use crate::{
    Fuse, Fusions, Instr, KernelId, MemoryPlan, Offload, Persistent, PlanError, Policy, Precision,
    PrecisionPolicy, RecomputePolicy, Region, RegionSizes, Schedule, Slice, Target, Weights, Window, check,
    check_target, passes,
};
use plimsoll_graph::ops::OperandFormat;
use plimsoll_graph::{Bytes, DType, Graph, Op, Role, Space, TooLarge, ValueId};
use serde::{Deserialize, Serialize};

/// A compiled step: everything that is needed to execute, print, compare and hash it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The computation, after all passes.
    pub graph: Graph,
    /// Execution order.
    pub schedule: Schedule,
    /// Kernel of each node, indexed by node.
    pub kernels: Vec<KernelId>,
    /// Address of every value.
    pub memory: MemoryPlan,
    /// Storage of the parameters between uses.
    pub weights: Weights,
}

impl Plan {
    /// Name of the type in which matmuls are computed, taken from the first linear: the element type of its
    /// weight, or TF32.
    pub fn matmul_dtype(&self) -> &'static str {
        let Some(first) = self.graph.nodes.iter().find(|node| matches!(node.op, Op::Linear(_))) else {
            return DType::F32.name();
        };
        match first.op.operands() {
            OperandFormat::Tf32 => Precision::Tf32.name(),
            OperandFormat::Stored | OperandFormat::E4m3 | OperandFormat::Int8 => {
                self.graph.spec(first.inputs[1]).dtype.name()
            }
        }
    }

    /// Bytes of the parameters that each step copies into the arena; zero if all parameters are resident.
    pub fn streamed(&self) -> Bytes {
        let moves = self.graph.nodes().filter_map(|(id, _)| moved(&self.graph, id));
        let into_arena = moves.filter(|&(from, to)| {
            matches!(self.graph.spec(from).role, Role::Param(_))
                && self.graph.spec(from).space != Space::Device
                && self.graph.spec(to).space == Space::Device
        });
        into_arena.map(|(from, _)| self.graph.spec(from).bytes(&self.graph.bounds)).sum()
    }
}

/// Called after each pass with the pass's name and the resulting graph (`--dump-after`).
pub type Dump<'a> = &'a mut dyn FnMut(&'static str, &Graph);

/// Compiles a graph to a plan.
pub fn compile(graph: &Graph, policy: &Policy, target: &Target) -> Result<Plan, PlanError> {
    compile_with(graph, policy, target, &mut |_, _| {})
}

/// Compiles a graph to a plan and calls `dump` after every pass.
pub fn compile_with(
    graph: &Graph,
    policy: &Policy,
    target: &Target,
    dump: Dump<'_>,
) -> Result<Plan, PlanError> {
    compile_shared(graph, policy, target, &mut Persistent::new(), dump)
}

/// Compiles a graph to a plan whose parameters and states use the addresses assigned in `persistent` by earlier
/// plans, or get new addresses there; calls `dump` after every pass.
pub fn compile_shared(
    graph: &Graph,
    policy: &Policy,
    target: &Target,
    persistent: &mut Persistent,
    dump: Dump<'_>,
) -> Result<Plan, PlanError> {
    compile_owned(graph.clone(), policy, target, persistent, dump)
}

/// Like [`compile_shared`], consuming the graph instead of copying it.
pub(crate) fn compile_owned(
    graph: Graph,
    policy: &Policy,
    target: &Target,
    persistent: &mut Persistent,
    dump: Dump<'_>,
) -> Result<Plan, PlanError> {
    let (graph, schedule) = lowered(graph, policy, target, dump)?;
    let kernels =
        graph.nodes.iter().map(|node| target.kernel_of(&graph, node)).collect::<Result<Vec<_>, _>>()?;
    let memory = place(&graph, &schedule, &kernels, target, persistent)?;
    let plan = Plan { graph, schedule, kernels, memory, weights: policy.weights };
    check(&plan.graph, &plan.schedule, &plan.memory)?;
    check_target(&plan, target)?;
    Ok(plan)
}

/// Runs all passes and schedules the resulting graph. Kernels and addresses are assigned later, by [`compile_owned`].
pub(crate) fn lowered(
    graph: Graph,
    policy: &Policy,
    target: &Target,
    dump: Dump<'_>,
) -> Result<(Graph, Schedule), PlanError> {
    // "build" is no pass: the graph as the model built it, for `--dump-after build`.
    let mut graph = verified("build", graph, dump)?;
    has_precision(policy, target)?;
    let formats = policy.precision.policy();
    if formats.storage != DType::F32 {
        graph = verified("precision", passes::inference(&graph, policy.precision)?, dump)?;
    }
    if let Some(policy) = &policy.autodiff {
        graph = verified("autodiff", passes::autodiff(&graph, policy)?, dump)?;
    }
    let offload = match policy.weights {
        Weights::Streamed { from, .. } => Offload::parameters(from),
        Weights::Resident | Weights::Trained => policy.offload,
    };
    if offload.to == Space::Host && !offload.is_empty() && target.arena_in_host() {
        return Err(PlanError::NoSpace { space: offload.to, target: target.name.clone() });
    }
    if policy.remat != RecomputePolicy::None {
        graph = verified("remat", passes::remat(&graph, &policy.remat)?, dump)?;
    }
    // Before fusion, so that the forward nodes have the numbers that the search for the fastest plan has seen.
    if offload.activations {
        let which = &policy.activations;
        let moved = passes::offload_activations(&graph, which, offload.to, target.arena_in_host());
        graph = verified("offload_activations", moved, dump)?;
    }
    if policy.fuse != Fuse::Nothing {
        graph = verified("fuse", passes::fuse(graph, policy.weights), dump)?;
    }
    // Fusions that depend on the kernels of the target. They are for inference only, because fused ops have no
    // gradient.
    let Fusions { fuse_gates, fuse_norms } = target.kernels.fusions();
    let fuses_for_kernels = policy.fuse == Fuse::Kernels
        && policy.autodiff.is_none()
        && formats.storage.size() == 2
        && formats.forward == OperandFormat::Stored;
    if let Some(gates) = fuse_gates.filter(|_| fuses_for_kernels) {
        graph = verified("fuse_gates", passes::fuse_gates(&graph, gates), dump)?;
    }
    if fuses_for_kernels && fuse_norms > 0 {
        graph = verified("fuse_norms", passes::fuse_norms(&graph, fuse_norms), dump)?;
    }
    // The fusion pass already removes unread values, so a separate dead-code elimination is needed only without
    // it.
    if policy.fuse == Fuse::Nothing {
        graph = passes::dce(&graph);
    }
    graph = verified("dce", graph, dump)?;
    // After fusion: quantization takes the place of the ops that compute its inputs, and no fusion depends on operands.
    if formats.forward != OperandFormat::Stored {
        graph = verified("operands", passes::operands(&graph, policy.precision)?, dump)?;
    }
    match policy.weights {
        Weights::Trained => {}
        Weights::Resident | Weights::Streamed { .. } => {
            graph = verified("layout", passes::layout(&graph, target)?, dump)?;
        }
    }
    if !offload.is_empty() {
        let split = passes::split_updates(&graph, &offload, policy.block, target.alignment);
        graph = verified("split_updates", split, dump)?;
        graph = verified("offload", passes::offload(&graph, &offload, target.arena_in_host()), dump)?;
    }
    if !graph.updates.is_empty() {
        graph = verified("updates", passes::store_updates(graph), dump)?;
    }
    let window = match (policy.weights, policy.window) {
        (Weights::Streamed { prefetch: false, .. }, _) => Bytes::ZERO,
        (_, Window::Bytes(bytes)) => bytes,
        (_, Window::Part(part)) => Bytes(full_window(&graph).0.checked_div(part).unwrap_or(0)),
        (_, Window::Full) => full_window(&graph),
    };
    let schedule = schedule(&graph, window);
    Ok((graph, schedule))
}

/// Verifies the graph after a pass and dumps it.
fn verified(after: &'static str, graph: Graph, dump: Dump<'_>) -> Result<Graph, PlanError> {
    graph.verify().map_err(|source| PlanError::of_graph(after, source))?;
    dump(after, &graph);
    Ok(graph)
}

/// Checks that the target has the matmuls of a precision, and that a precision for inference has no gradients.
fn has_precision(policy: &Policy, target: &Target) -> Result<(), PlanError> {
    has_matmuls(policy.precision, target)?;
    let trained = policy.autodiff.is_some() || policy.weights == Weights::Trained;
    if trained && policy.precision.policy().backward.is_none() {
        let why = format!("{} is for inference", policy.precision.name());
        return Err(PlanError::BadPolicy { field: "precision", why });
    }
    Ok(())
}

/// Checks that the target has matmuls with the operands of a precision, which only targets with a rate for them do.
/// Stored operands need no check here: a node without a kernel is refused when kernels are chosen.
pub(crate) fn has_matmuls(precision: Precision, target: &Target) -> Result<(), PlanError> {
    let PrecisionPolicy { storage, forward, backward, .. } = precision.policy();
    for operands in [forward].into_iter().chain(backward) {
        let (what, who) = match operands {
            OperandFormat::Stored => continue,
            OperandFormat::Tf32 => ("TF32 matmuls", "an NVIDIA GPU; of a calibrated file, one by this version"),
            OperandFormat::E4m3 => ("e4m3 matmuls", "an NVIDIA GPU of compute capability 8.9 or later"),
            OperandFormat::Int8 => ("int8 matmuls", "a CPU, calibrated by this version"),
        };
        if target.rates.matmul(operands, storage).is_none() {
            let name = precision.name();
            let why = format!("{name} needs {what}, which `{}` does not have: {who}", target.name);
            return Err(PlanError::BadPolicy { field: "precision", why });
        }
    }
    Ok(())
}

/// Assigns an address to every value and workspace. Parameters and states are placed in the persistent regions; all
/// other values, and the workspaces, share the transient regions, where two of them overlap only if their lifetimes do
/// not.
fn place(
    graph: &Graph,
    schedule: &Schedule,
    kernels: &[KernelId],
    target: &Target,
    shared: &mut Persistent,
) -> Result<MemoryPlan, PlanError> {
    let mut slices: Vec<Option<Slice>> = vec![None; graph.values.len()];
    place_persistent(graph, target, shared, &mut slices);
    let buffers = buffers(graph, schedule, true);
    let mut transient = [Bytes::ZERO; 2];
    for (k, space) in [Space::Host, Space::File].into_iter().enumerate() {
        let items = buffers.iter().filter(|buffer| buffer.space == space).map(item).collect();
        let packing = packed(&Problem { items, align: target.alignment })?;
        for (buffer, &offset) in buffers.iter().filter(|buffer| buffer.space == space).zip(&packing.offsets) {
            place_buffer(buffer, offset, &mut slices);
        }
        transient[k] = Bytes(packing.height);
    }
    let [host, file] = transient;
    let arena: Vec<&Buffer> = buffers.iter().filter(|buffer| buffer.space == Space::Device).collect();
    let scratch = workspaces(graph, schedule, kernels, target);
    let items = arena.iter().copied().map(item).chain(scratch.iter().map(Workspace::item)).collect();
    let problem = Problem { items, align: target.alignment };
    let packing = packed(&problem)?;
    for (buffer, &offset) in arena.iter().zip(&packing.offsets) {
        place_buffer(buffer, offset, &mut slices);
    }
    place_views(graph, &mut slices);
    let mut workspaces = vec![None; schedule.instrs.len()];
    for (workspace, &offset) in scratch.iter().zip(&packing.offsets[arena.len()..]) {
        let slice = Slice { space: Space::Device, region: Region::Transient, offset, bytes: workspace.bytes };
        workspaces[workspace.instr] = Some(slice);
    }
    // The bill names the values that are live at the instant of the peak. Items with an index past the buffers are
    // workspaces, which are no values.
    let bound = problem.lower_bound();
    let live: Vec<usize> = problem.live_at(bound.instant);
    let live_at_peak: Vec<ValueId> =
        live.iter().filter_map(|&k| arena.get(k)).map(|buffer| buffer.holder(bound.instant)).collect();
    Ok(MemoryPlan {
        device: RegionSizes { persistent: shared.bytes(Space::Device), transient: Bytes(packing.height) },
        host: RegionSizes { persistent: shared.bytes(Space::Host), transient: host },
        file: RegionSizes { persistent: shared.bytes(Space::File), transient: file },
        slices,
        workspaces,
        lower_bound: Bytes(bound.bytes),
        live_at_peak,
        // Back from instants to instructions. A peak at the upload (instant 0) is counted for the first instruction,
        // where the inputs are still live (see `buffers`).
        peak_instr: (bound.instant as usize).clamp(1, schedule.instrs.len().max(1)) - 1,
    })
}

/// A buffer as an item of a packing.
pub(crate) fn item(buffer: &Buffer) -> PackItem {
    PackItem { size: buffer.bytes.0, birth: buffer.birth, death: buffer.death }
}

/// Solves a packing problem.
pub(crate) fn packed(problem: &Problem) -> Result<Packing, PlanError> {
    let packing = solve(problem);
    Ok(packing.ok_or_else(|| TooLarge::bytes("the size of all buffers of a step together", Bytes(u64::MAX)))?)
}

/// Gives all values of a buffer the address of the buffer.
fn place_buffer(buffer: &Buffer, offset: u64, slices: &mut [Option<Slice>]) {
    for (_, v) in &buffer.values {
        let slice = Slice { space: buffer.space, region: Region::Transient, offset, bytes: buffer.bytes };
        slices[v.index()] = Some(slice);
    }
}

/// Gives every value that lies in another one, whose address is known, its address there.
fn place_views(graph: &Graph, slices: &mut [Option<Slice>]) {
    let views = Views::of(graph);
    for (v, _) in graph.values().filter(|(v, _)| views.is_shared(*v)) {
        slices[v.index()] = slices[views.root(v).index()].map(|root| views.slice(graph, v, root));
    }
}

/// Gives parameters and states consecutive addresses in their spaces, in the order of the graph. The new value of a state
/// has the address of the state.
fn place_persistent(graph: &Graph, target: &Target, shared: &mut Persistent, slices: &mut [Option<Slice>]) {
    for (id, value) in graph.sources() {
        slices[id.index()] = shared.place(graph, &value.spec, target.alignment);
    }
    for (v, home) in homes(graph).iter().enumerate() {
        if let Some(state) = home {
            slices[v] = slices[state.index()];
        }
    }
}

/// The workspace of a launch.
pub(crate) struct Workspace {
    /// Index of the instruction.
    pub(crate) instr: usize,
    pub(crate) bytes: Bytes,
}

impl Workspace {
    /// The workspace as an item of a packing. Lifetimes are counted in instants (see [`Buffer`]): instant 0 is the upload of
    /// the inputs, so instruction i is instant i + 1, and a workspace lives for the instant of its launch only.
    pub(crate) fn item(&self) -> PackItem {
        let instant = self.instr as u32 + 1;
        PackItem { size: self.bytes.0, birth: instant, death: instant }
    }
}

/// The workspaces of all launches whose kernels need one.
pub(crate) fn workspaces(
    graph: &Graph,
    schedule: &Schedule,
    kernels: &[KernelId],
    target: &Target,
) -> Vec<Workspace> {
    let mut workspaces = vec![];
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = *instr else { continue };
        let bytes = target.kernels.workspace(kernels[id.index()], graph, graph.node(id), target.workers);
        if bytes > Bytes::ZERO {
            workspaces.push(Workspace { instr: i, bytes });
        }
    }
    workspaces
}
