//! A program: several plans that share one arena, which consists of a persistent region with the resident
//! weights of all plans, staging buffers, and one transient region that the plans use in turn. Invariant: the
//! size of the arena is the sum of these three.

use crate::in_flight::InFlightBuffers;
use crate::{
    Bill, Instr, Ledger, LimitKind, Offload, Plan, PlanError, Region, Remedy, Slice, Target, Weights,
    plan_seconds,
};
use plimsoll_graph::{Bytes, Graph, OutputRole, Pieces, Role, Space, TensorSpec, ValueId, node_label};
use plimsoll_setting::Setting;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Plans that share an arena.
///
/// The memory of a step, and the largest step that fits a budget, are computed without access to the machine
/// and before anything is allocated:
/// ```
/// use plimsoll_graph::{Bounds, Builder, Bytes, DType, Dim};
/// use plimsoll_plan::{PlanError, Policy, Program, Room, Search, Target, compile};
///
/// let target = Target::named("cpu")?;
/// let mut build = |tokens| {
///     let mut g = Builder::new(Bounds { tokens, sequences: 8, longest: 512, packs: 1 });
///     let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(64)], DType::F32);
///     let h = g.linear(x, "up", 256, true);
///     let h = g.gelu(h);
///     let h = g.linear(h, "down", 64, true);
///     let y = g.add(x, h);
///     g.output("y", y);
///     let graph = g.finish().map_err(|source| PlanError::of_graph("build", source))?;
///     let plan = compile(&graph, &Policy::default(), &target)?;
///     Ok(Program::new(target.clone(), vec![("mlp".to_owned(), plan)], vec![]))
/// };
///
/// // Breakdown of the memory of a step.
/// let program = build(1024)?;
/// println!("{}", program.ledger());
/// assert_eq!(program.ledger().total(), program.peak());
/// assert_eq!(program.ledger().get("params"), Bytes(4 * (2 * 64 * 256 + 256 + 64)));
///
/// // The largest step that fits; if not even 512 tokens fit, the error contains a bill of the missing memory.
/// let budget = Bytes(4_000_000);
/// let search = Search { floor: 512, ceiling: target.saturation, step: 64, budget, room: Room::UNLIMITED };
/// let fitting = Program::largest_bounds(search, &mut build)?;
/// assert!(fitting.peak() <= budget);
/// assert!((512..4096).contains(&fitting.plans()[0].1.graph.bounds.tokens));
///
/// let refused = Program::largest_bounds(Search { budget: Bytes(1000), ..search }, &mut build);
/// let Err(PlanError::OverBudget(bill)) = refused else { panic!("1000 B are too few") };
/// println!("refused: {bill}");
/// # Ok::<(), PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    target: Target,
    pub(crate) plans: Vec<(String, Plan)>,
    pub(crate) staging: Vec<Staging>,
    /// Bytes in the same memory space that are outside the arena.
    host_extra: Vec<Staging>,
    /// Whether all plans were compiled with one [`Persistent`](crate::Persistent), so that they share
    /// parameters and states.
    shared: bool,
    pub(crate) in_flight: Option<InFlightBuffers>,
    /// Number of replicas: arenas that execute steps concurrently and share the weights at their start.
    replicas: usize,
    /// Indices of plans of which a run uses one at a time, the largest first.
    alternatives: Vec<usize>,
}

/// A buffer that belongs to no plan, inside or outside the arena, such as rows that wait between two plans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Staging {
    /// Purpose of the buffer.
    pub label: String,
    /// Size of the buffer.
    pub bytes: Bytes,
}

/// A position in a memory space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The memory space.
    pub space: Space,
    /// Offset in bytes from the start of the space; in [`Space::Device`], from the start of the arena.
    pub at: u64,
}

impl Location {
    /// A position in the arena.
    pub fn in_arena(at: u64) -> Self {
        Self { space: Space::Device, at }
    }

    /// The position `bytes` bytes after this one.
    pub(crate) fn behind(self, bytes: Bytes) -> Self {
        Self { at: (Bytes(self.at) + bytes).0, ..self }
    }
}

/// A parameter of a plan with its type and its address; programs of equal ones can share their weights.
#[derive(PartialEq)]
struct PlacedParam {
    name: String,
    pieces: Pieces,
    spec: TensorSpec,
    location: Option<(Location, Bytes)>,
}

/// An input of one of a program's plans, resolved from its name by [`Program::input`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InputId {
    /// Index of the plan in the program.
    pub plan: usize,
    /// The input's value in the plan's graph.
    pub value: ValueId,
}

/// An output of one of a program's plans, resolved from its name by [`Program::output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputId {
    /// Index of the plan in the program.
    pub plan: usize,
    /// The output's value in the plan's graph.
    pub value: ValueId,
}

impl Program {
    /// Combines named plans for one target into a program.
    pub fn new(target: Target, plans: Vec<(String, Plan)>, staging: Vec<Staging>) -> Self {
        Self {
            target,
            plans,
            staging,
            host_extra: vec![],
            shared: false,
            in_flight: None,
            replicas: 1,
            alternatives: vec![],
        }
    }

    /// Combines plans that were compiled with one [`Persistent`](crate::Persistent) and therefore share their
    /// parameters and states.
    pub fn sharing(target: Target, plans: Vec<(String, Plan)>) -> Self {
        Self { shared: true, ..Self::new(target, plans, vec![]) }
    }

    /// Adds memory that a run uses outside the arena, in the memory space to which the budget applies. It
    /// counts towards the peak like the arena.
    pub fn host_extra(self, host_extra: Vec<Staging>) -> Self {
        Self { host_extra, ..self }
    }

    /// Sets the number of replicas. Replicas share their weights; each has its own staging and transient
    /// region.
    pub fn with_replicas(self, replicas: usize) -> Self {
        Self { replicas: replicas.max(1), ..self }
    }

    /// Sets the plans of which a run uses one at a time, by index, the largest first.
    pub(crate) fn with_alternatives(self, alternatives: Vec<usize>) -> Self {
        Self { alternatives, ..self }
    }

    /// Indices of the plans of which a run uses one at a time, the largest first; empty if it uses all of them.
    pub fn alternatives(&self) -> &[usize] {
        &self.alternatives
    }

    /// Bytes of the arena that all plans need except the alternatives before number `k`, which are larger. The transient
    /// region is at the end of the arena, so the memory behind is needed by larger alternatives alone.
    pub fn arena_bytes_from(&self, k: usize) -> Bytes {
        let unused = &self.alternatives[..k];
        let used = self.plans.iter().enumerate().filter(|(i, _)| !unused.contains(i));
        self.transient_base(Space::Device)
            + used.map(|(_, (_, p))| p.memory.device.transient).max().unwrap_or_default()
    }

    /// Whether the plans are those of `other` for steps of another size: the same names, and every resident parameter at the
    /// same address in the same layout, so that weights loaded for one program serve the other.
    pub fn has_weights_of(&self, other: &Self) -> bool {
        self.persistent() == other.persistent()
            && self.replicas == other.replicas
            && self.plans.iter().map(|(name, _)| name).eq(other.plans.iter().map(|(name, _)| name))
            && (0..self.plans.len()).all(|plan| self.placed_params(plan) == other.placed_params(plan))
    }

    /// The parameters of plan number `plan` with their types and addresses.
    fn placed_params(&self, plan: usize) -> Vec<PlacedParam> {
        let (_, Plan { graph, memory, .. }) = &self.plans[plan];
        let mut params = vec![];
        for (v, _, param) in graph.param_values() {
            let slice = memory.persistent_slice(v);
            params.push(PlacedParam {
                name: param.name.clone(),
                pieces: param.pieces.clone(),
                // The role holds an index into the tables of one graph.
                spec: graph.spec(v).clone().with_role(Role::Input),
                location: slice.map(|slice| (self.location(plan, slice), slice.bytes)),
            });
        }
        params
    }

    /// Number of replicas that execute steps concurrently.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// The target that the plans were made for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The plans with their names.
    pub fn plans(&self) -> &[(String, Plan)] {
        &self.plans
    }

    /// Index of the plan named `name`, if it exists.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.plans.iter().position(|(n, _)| n == name)
    }

    /// Returns the input `name` of plan number `plan`, if it exists.
    pub fn input(&self, plan: usize, name: &str) -> Option<InputId> {
        self.plans[plan].1.graph.input(name).map(|value| InputId { plan, value })
    }

    /// Returns the output of plan number `plan` with a role, if it exists; see [`Graph::output`].
    pub fn output(&self, plan: usize, role: impl Into<OutputRole>) -> Option<OutputId> {
        self.plans[plan].1.graph.output(role).map(|value| OutputId { plan, value })
    }

    /// Staging buffers in the arena.
    pub fn staging(&self) -> &[Staging] {
        &self.staging
    }

    /// Position of a slice of plan number `plan`.
    pub fn location(&self, plan: usize, slice: Slice) -> Location {
        let region = match slice.region {
            Region::Persistent => self.persistent_before(slice.space, plan),
            Region::Transient => self.transient_base(slice.space),
        };
        Location { space: slice.space, at: (region + Bytes(slice.offset)).0 }
    }

    /// Offset in the arena of staging buffer `k`.
    pub fn staging_address(&self, k: usize) -> u64 {
        (self.persistent() + self.staging_before(k)).0
    }

    /// Exact size of the arena, which is a single allocation; with several replicas, the bytes that one replica
    /// addresses.
    pub fn arena_bytes(&self) -> Bytes {
        self.transient_base(Space::Device) + self.transient()
    }

    /// Exact size of a space: of the arena, of pinned host memory, or of the scratch file.
    pub fn space_bytes(&self, space: Space) -> Bytes {
        match space {
            Space::Device => self.arena_bytes(),
            Space::Host => self.transient_base(space) + self.transient_of(space) + self.in_flight_bytes(),
            Space::File => self.transient_base(space) + self.transient_of(space),
        }
    }

    /// Contents of a space other than the arena, by purpose; the entries sum to [`Program::space_bytes`].
    pub fn space_ledger(&self, space: Space) -> Ledger {
        let mut ledger = Ledger::new();
        let counted = self.add_persistent(space, &mut ledger);
        ledger.add("copies on their way", self.transient_of(space));
        if space == Space::Host {
            ledger.add("inputs and outputs of steps in flight", self.in_flight_bytes());
        }
        ledger.add("padding", self.persistent_before(space, self.plans.len()) - counted);
        ledger
    }

    /// Total memory use: the arena, the memory outside it, and the memory reserved by the target.
    pub fn peak(&self) -> Bytes {
        self.arena_bytes() + self.further_replicas_bytes() + self.outside_bytes()
    }

    /// Memory outside the arenas.
    fn outside_bytes(&self) -> Bytes {
        self.host_extra_bytes() + self.page_tables() + self.target.reserved()
    }

    /// Memory of the device for the page tables of the pinned host memory.
    fn page_tables(&self) -> Bytes {
        self.target.page_tables(self.in_flight_base() + self.in_flight_bytes())
    }

    /// Size of the arenas of all replicas, with the shared weights counted once.
    pub fn all_arenas_bytes(&self) -> Bytes {
        self.arena_bytes() + self.further_replicas_bytes()
    }

    /// Memory of the replicas after the first, which do not allocate the shared weights again.
    fn further_replicas_bytes(&self) -> Bytes {
        let of_replica = self.arena_bytes() - self.persistent();
        of_replica * (self.replicas as u64).saturating_sub(1)
    }

    /// Smallest memory use that any packing could reach: weights, staging, memory outside the arena, reserved
    /// memory, and the largest sum of live bytes.
    pub fn lower_bound(&self) -> Bytes {
        let live = self.plans.iter().map(|(_, p)| p.memory.lower_bound).max().unwrap_or_default();
        let of_replica = self.transient_base(Space::Device) - self.persistent() + live;
        self.persistent() + of_replica * self.replicas as u64 + self.outside_bytes()
    }

    /// Fragmentation of the arena: the share by which the peak exceeds [`Program::lower_bound`], the memory of a packing
    /// without gaps.
    pub fn packing_waste(&self) -> f64 {
        let bound = self.lower_bound();
        self.peak().saturating_sub(bound).0 as f64 / bound.0.max(1) as f64
    }

    /// Index of the plan with the largest transient region, and the label of the instruction at its peak.
    pub fn peak_at(&self) -> (usize, String) {
        // On equal sizes the first plan is chosen, hence the reversed index.
        let largest = self
            .plans
            .iter()
            .enumerate()
            .max_by_key(|(i, (_, plan))| (plan.memory.device.transient, std::cmp::Reverse(*i)));
        let Some((i, (name, plan))) = largest else { return (0, "nothing".to_owned()) };
        let label = match plan.schedule.instrs.get(plan.memory.peak_instr) {
            Some(Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) => node_label(&plan.graph, *id),
            None => "load".to_owned(),
        };
        (i, if self.plans.len() == 1 { label } else { format!("{name}: {label}") })
    }

    /// Breakdown of the memory at the peak; it sums to [`Program::peak`] exactly.
    pub fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::new();
        let mut padding = self.persistent() - self.add_persistent(Space::Device, &mut ledger);
        let (peak, _) = self.peak_at();
        if let Some((_, plan)) = self.plans.get(peak) {
            let live = add_transient(plan, &mut ledger);
            padding += self.transient() - live;
        }
        for s in &self.staging {
            ledger.add(&format!("staging: {}", s.label), s.bytes);
            padding += s.bytes.align_up(self.target.alignment) - s.bytes;
        }
        for s in self.extra_entries() {
            ledger.add(&s.label, s.bytes);
        }
        ledger.add("padding and packing", padding);
        for s in self.reserved() {
            ledger.add(&s.label, s.bytes);
        }
        ledger
    }

    /// Ledger entries of the memory outside the arena.
    pub(crate) fn outside(&self) -> Vec<Staging> {
        let all = self.extra_entries().into_iter().chain(self.reserved());
        all.filter(|s| s.bytes > Bytes::ZERO).collect()
    }

    /// Ledger entries of buffers outside the arena and of the replicas after the first.
    fn extra_entries(&self) -> Vec<Staging> {
        let mut entries = vec![];
        for s in &self.host_extra {
            entries.push(Staging { label: format!("beside the arena: {}", s.label), bytes: s.bytes });
        }
        if self.replicas > 1 {
            let further = if self.replicas == 2 {
                "1 replica".to_owned()
            } else {
                format!("{} replicas", self.replicas - 1)
            };
            let label = format!("{further} beside the first");
            entries.push(Staging { label, bytes: self.further_replicas_bytes() });
        }
        entries
    }

    /// Ledger entries of the memory reserved by the target, and by its driver.
    fn reserved(&self) -> Vec<Staging> {
        let mut entries = vec![];
        for reserved in &self.target.reserved {
            entries.push(Staging { label: format!("reserved: {}", reserved.label), bytes: reserved.bytes });
        }
        let label = "reserved: page tables of pinned host memory".to_owned();
        entries.push(Staging { label, bytes: self.page_tables() });
        entries
    }

    /// Hash of all plans and of the properties of the target that affect addresses (kernels, workers,
    /// alignment, reserved memory). Rates and the total memory are excluded because they do not affect
    /// addresses. Equal digests mean equal programs.
    pub fn digest(&self) -> Result<String, PlanError> {
        let t = &self.target;
        let mut hash = Sha256::new();
        hash.update(saved(&(&t.name, t.alignment, t.workers, &t.reserved, &t.kernels))?);
        for named in &self.plans {
            hash.update(saved(named)?);
        }
        // Saved as one value, in which every list and every label ends visibly: hashed one after another, a buffer in
        // the arena and the same buffer outside it would be equal.
        hash.update(saved(&(self.shared, self.replicas, &self.staging, &self.host_extra))?);
        Ok(hash.finalize().iter().fold(String::new(), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        }))
    }

    /// Predicted seconds of one full step of every plan.
    pub fn seconds(&self) -> f64 {
        self.plans.iter().map(|(_, p)| plan_seconds(p, &self.target, p.graph.bounds.full())).sum()
    }

    /// Predicted seconds of one full step of the plan named `name`; `None` if there is none.
    pub fn seconds_of(&self, name: &str) -> Option<f64> {
        let (_, plan) = self.plans.iter().find(|(of, _)| of == name)?;
        Some(plan_seconds(plan, &self.target, plan.graph.bounds.full()))
    }

    /// Largest token bound of all plans.
    pub(crate) fn max_tokens(&self) -> u64 {
        self.plans.iter().map(|(_, p)| p.graph.bounds.tokens).max().unwrap_or(0)
    }

    /// Bytes of the parameters that one step of every plan copies into the arena; zero if all are resident.
    pub fn streamed(&self) -> Bytes {
        self.plans.iter().map(|(_, p)| p.streamed()).sum()
    }

    /// Storage of the parameters between uses: streamed if any plan streams its parameters.
    pub fn weights(&self) -> Weights {
        let mut all = self.plans.iter().map(|(_, plan)| plan.weights);
        let first = all.clone().next().unwrap_or_default();
        all.find(|weights| matches!(weights, Weights::Streamed { .. })).unwrap_or(first)
    }

    /// Tensors that the plans store outside the arena between their uses.
    pub fn offload(&self) -> Offload {
        self.plans.iter().fold(Offload::default(), |all, (_, plan)| all.and(Offload::of(&plan.graph)))
    }

    /// Whether any plan streams parameters.
    pub fn is_streamed(&self) -> bool {
        self.streamed() > Bytes::ZERO
    }

    /// Creates the error message for a program that exceeds `budget`.
    pub fn bill(&self, budget: Bytes, remedies: Vec<Remedy>) -> Bill {
        Bill {
            space: self.target.space.name().to_owned(),
            line: LimitKind::Budget,
            budget,
            ledger: self.ledger(),
            peak_at: self.peak_at().1,
            seconds_per_token: self.seconds() / self.max_tokens().max(1) as f64,
            memory: self.target.memory,
            budget_setting: Setting::MemoryBudget,
            notes: vec![],
            remedies,
        }
    }

    /// Returns the program if it fits into `budget`, otherwise an error with its bill.
    pub fn within(self, budget: Bytes) -> Result<Self, PlanError> {
        if self.peak() <= budget {
            return Ok(self);
        }
        Err(PlanError::OverBudget(Box::new(self.bill(budget, vec![]))))
    }

    /// Adds the contents of the persistent region of a space to the ledger, counting shared bytes once.
    fn add_persistent(&self, space: Space, ledger: &mut Ledger) -> Bytes {
        let mut seen = BTreeSet::new();
        let mut sum = Bytes::ZERO;
        for (i, (_, plan)) in self.plans.iter().enumerate() {
            for (v, value) in plan.graph.sources() {
                let slice = plan.memory.persistent_slice(v).filter(|slice| slice.space == space);
                let Some(slice) = slice else { continue };
                let label = match value.spec.role {
                    Role::Param(_) => "params",
                    Role::State(s) => plan.graph.states[s.index()].role.kind().label(),
                    Role::Input | Role::Activation | Role::Grad => continue,
                };
                if slice.bytes > Bytes::ZERO && seen.insert(self.location(i, slice)) {
                    ledger.add(label, slice.bytes);
                    sum += slice.bytes;
                }
            }
        }
        sum
    }

    /// Size of the persistent region of the arena, which is its first region: weights and states.
    pub fn persistent(&self) -> Bytes {
        self.persistent_before(Space::Device, self.plans.len())
    }

    /// Offset of the weights of plan number `plan` in a space: plans that share their weights all start at 0,
    /// others follow each other. For the number of plans, the size of the persistent region.
    fn persistent_before(&self, space: Space, plan: usize) -> Bytes {
        let all = self.plans.iter().map(|(_, p)| p.memory.region_sizes(space).persistent);
        if !self.shared {
            return all.take(plan).sum();
        }
        if plan == self.plans.len() { all.max().unwrap_or_default() } else { Bytes::ZERO }
    }

    /// Size of the staging buffers before buffer `k`.
    fn staging_before(&self, k: usize) -> Bytes {
        self.staging[..k].iter().map(|s| s.bytes.align_up(self.target.alignment)).sum()
    }

    /// Size of the memory outside the arena.
    fn host_extra_bytes(&self) -> Bytes {
        self.host_extra.iter().map(|s| s.bytes).sum()
    }

    /// Offset of the transient region in a space. In the arena, staging buffers lie before it.
    fn transient_base(&self, space: Space) -> Bytes {
        let persistent = self.persistent_before(space, self.plans.len());
        match space {
            Space::Device => persistent + self.staging_before(self.staging.len()),
            Space::Host | Space::File => persistent,
        }
    }

    /// Size of the transient region of the arena, which plans use in turn: the largest transient size of a plan.
    pub(crate) fn transient(&self) -> Bytes {
        self.transient_of(Space::Device)
    }

    /// Size of the transient region of a space.
    fn transient_of(&self, space: Space) -> Bytes {
        self.plans.iter().map(|(_, p)| p.memory.region_sizes(space).transient).max().unwrap_or_default()
    }

    /// Offset in pinned host memory of the buffers of steps in flight, which lie behind the regions of the plans.
    pub(crate) fn in_flight_base(&self) -> Bytes {
        self.transient_base(Space::Host) + self.transient_of(Space::Host)
    }
}

/// Ledger entry of parameters in the transient region.
const STREAMED: &str = "streamed params";

/// Serializes a value for the digest.
fn saved(value: &impl Serialize) -> Result<Vec<u8>, PlanError> {
    let bytes = serde_json::to_vec(value);
    bytes.map_err(|e| PlanError::BadPolicy { field: "plan", why: format!("it cannot be saved: {e}") })
}

/// Adds the values that are live at the peak of a plan to the ledger, by kind.
fn add_transient(plan: &Plan, ledger: &mut Ledger) -> Bytes {
    let graph = &plan.graph;
    let mut sum = Bytes::ZERO;
    for &v in &plan.memory.live_at_peak {
        let bytes = graph.spec(v).bytes(&graph.bounds);
        ledger.add(transient_label(graph, v), bytes);
        sum += bytes;
    }
    if let Some(Some(workspace)) = plan.memory.workspaces.get(plan.memory.peak_instr) {
        ledger.add("workspace", workspace.bytes);
        sum += workspace.bytes;
    }
    sum
}

/// Label of the ledger entry that counts a value in the transient region.
pub(crate) fn transient_label(graph: &Graph, v: ValueId) -> &'static str {
    match graph.spec(v).role {
        Role::Input => "inputs",
        Role::Activation | Role::Grad if graph.outputs.iter().any(|(_, output)| *output == v) => "outputs",
        Role::Activation => "activations",
        Role::Grad => "activation gradients",
        Role::Param(_) => STREAMED,
        Role::State(_) => "fetched states",
    }
}
