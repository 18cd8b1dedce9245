//! Several plans over one arena: one persistent region with the resident weights of all, staging, and one transient
//! region that they take turns in. Invariant: the arena is the sum of these three and nothing else.

use crate::ring::Ring;
use crate::{Bill, Instr, Ledger, Line, Plan, PlanError, Region, Remedy, Slice, Target, step_seconds};
use graph::{Bytes, Def, Graph, Role, ValueId, node_label};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Plans that share an arena.
///
/// What a step takes, and how much fits a budget, without the machine and before anything is allocated:
/// ```
/// use graph::{Bounds, Builder, Bytes, DType, Dim};
/// use plimsoll_plan::{PlanError, Policy, Program, Search, Target, compile};
///
/// let target = Target::named("cpu")?;
/// let mut build = |tokens| {
///     let mut g = Builder::new(Bounds { tokens, sequences: 8, longest: 512 });
///     let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(64)], DType::F32);
///     let h = g.linear(x, "up", 256, true);
///     let h = g.gelu(h);
///     let h = g.linear(h, "down", 64, true);
///     let y = g.add(x, h);
///     g.output("y", y);
///     let graph = g.finish().map_err(|source| PlanError::Verify { after: "build", source })?;
///     let plan = compile(&graph, &Policy::default(), &target)?;
///     Ok(Program::new(target.clone(), vec![("mlp".to_owned(), plan)], vec![]))
/// };
///
/// // The bytes of a step, line by line.
/// let program = build(1024)?;
/// println!("{}", program.ledger());
/// assert_eq!(program.ledger().total(), program.peak());
/// assert_eq!(program.ledger().get("params"), Bytes(4 * (2 * 64 * 256 + 256 + 64)));
///
/// // The most tokens that fit; where not even 512 do, the error is a bill that says what is missing.
/// let budget = Bytes(4_000_000);
/// let search = Search { floor: 512, ceiling: target.saturation, step: 64, budget };
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
    plans: Vec<(String, Plan)>,
    pub(crate) staging: Vec<Staging>,
    /// Bytes of the same memory that are not of the arena.
    beside: Vec<Staging>,
    /// Whether all plans were made with one [`Persistent`](crate::Persistent).
    shared: bool,
    pub(crate) ring: Option<Ring>,
    /// Arenas that begin with the same weights: steps that run beside each other.
    lanes: usize,
}

/// Bytes that belong to no plan, of the arena or beside it: rows that wait between two of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staging {
    /// What waits there.
    pub label: String,
    /// How many bytes.
    pub bytes: Bytes,
}

/// An input of one of a program's plans, resolved from its name once by [`Program::input`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InputId {
    /// The plan's position in the program.
    pub plan: usize,
    /// The input's value in the plan's graph.
    pub value: ValueId,
}

/// An output of one of a program's plans, resolved from its name once by [`Program::output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputId {
    /// The plan's position in the program.
    pub plan: usize,
    /// The output's value in the plan's graph.
    pub value: ValueId,
}

impl Program {
    /// Puts plans for one target together.
    pub fn new(target: Target, plans: Vec<(String, Plan)>, staging: Vec<Staging>) -> Self {
        Self { target, plans, staging, beside: vec![], shared: false, ring: None, lanes: 1 }
    }

    /// Puts plans together that were made with one [`Persistent`](crate::Persistent): their parameters and states
    /// are the same bytes.
    pub fn sharing(target: Target, plans: Vec<(String, Plan)>) -> Self {
        Self { target, plans, staging: vec![], beside: vec![], shared: true, ring: None, lanes: 1 }
    }

    /// The same with what a run keeps beside the arena in the memory that the line is about. Such bytes count as the
    /// arena's do.
    pub fn beside(self, beside: Vec<Staging>) -> Self {
        Self { beside, ..self }
    }

    /// The same in so many lanes, which share their weights; each has staging and a transient region of its own.
    pub fn with_lanes(self, lanes: usize) -> Self {
        Self { lanes: lanes.max(1), ..self }
    }

    /// Lanes that run it beside each other.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The machine.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Names and plans.
    pub fn plans(&self) -> &[(String, Plan)] {
        &self.plans
    }

    /// The position of a plan.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.plans.iter().position(|(n, _)| n == name)
    }

    /// The input `name` of plan `plan`; `None` where the plan's graph has no such input.
    pub fn input(&self, plan: usize, name: &str) -> Option<InputId> {
        self.plans[plan].1.graph.input(name).map(|value| InputId { plan, value })
    }

    /// The output `name` of plan `plan`; `None` where the plan's graph has no such output.
    pub fn output(&self, plan: usize, name: &str) -> Option<OutputId> {
        self.plans[plan].1.graph.output(name).map(|value| OutputId { plan, value })
    }

    /// What waits between plans.
    pub fn staging(&self) -> &[Staging] {
        &self.staging
    }

    /// Where in the arena a slice of plan `plan` begins.
    pub fn address(&self, plan: usize, slice: Slice) -> u64 {
        slice.offset
            + match slice.region {
                Region::Persistent => self.persistent_before(plan).0,
                Region::Transient => self.transient_base().0,
            }
    }

    /// Where in the arena staging `k` begins.
    pub fn staging_address(&self, k: usize) -> u64 {
        self.persistent().0 + self.staging_before(k).0
    }

    /// The one allocation, to the byte; of several lanes, what each addresses.
    pub fn arena_bytes(&self) -> Bytes {
        self.transient_base() + self.transient()
    }

    /// What the process holds: the arena, what is kept beside it, and what the target reserves.
    pub fn peak(&self) -> Bytes {
        self.arena_bytes() + self.more_lanes() + self.kept_beside() + self.target.reserved()
    }

    /// What lanes beside the first allocate.
    fn more_lanes(&self) -> Bytes {
        let each = self.arena_bytes() - self.persistent();
        Bytes(each.0 * (self.lanes as u64 - 1))
    }

    /// What no packing can go below: weights, staging, what is kept beside, reserved and the largest sum of live bytes.
    pub fn lower_bound(&self) -> Bytes {
        let live = self.plans.iter().map(|(_, p)| p.memory.lower_bound).max().unwrap_or_default();
        let each = self.transient_base() - self.persistent() + live;
        let all = Bytes(each.0 * self.lanes as u64);
        self.persistent() + all + self.kept_beside() + self.target.reserved()
    }

    /// The plan in which the peak falls, and the label of its instruction there.
    pub fn peak_at(&self) -> (usize, String) {
        let by_size = |(i, (_, p)): &(usize, &(String, Plan))| (p.memory.transient, std::cmp::Reverse(*i));
        let Some((i, (name, plan))) = self.plans.iter().enumerate().max_by_key(by_size) else {
            return (0, "nothing".to_owned());
        };
        let label = match plan.schedule.instrs.get(plan.memory.peak_instr) {
            Some(Instr::Launch(id)) => node_label(&plan.graph, *id),
            Some(Instr::Load(v)) => load_label(&plan.graph, *v),
            Some(Instr::Copy { to, .. }) => format!("update of {to}"),
            None => "load".to_owned(),
        };
        (i, if self.plans.len() == 1 { label } else { format!("{name}: {label}") })
    }

    /// What the bytes at the peak are for; sums to [`Program::peak`] exactly.
    pub fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::new();
        let mut padding = self.persistent() - self.add_persistent(&mut ledger);
        let (peak, _) = self.peak_at();
        if let Some((_, plan)) = self.plans.get(peak) {
            let live = add_transient(plan, &mut ledger);
            padding += self.transient() - live;
        }
        for s in &self.staging {
            ledger.add(&format!("staging: {}", s.label), s.bytes);
            padding += s.bytes.align_up(self.target.alignment) - s.bytes;
        }
        for s in &self.beside {
            ledger.add(&format!("beside the arena: {}", s.label), s.bytes);
        }
        if self.lanes > 1 {
            let more = if self.lanes == 2 { "1 lane".to_owned() } else { format!("{} lanes", self.lanes - 1) };
            ledger.add(&format!("{more} beside the first"), self.more_lanes());
        }
        ledger.add("padding and packing", padding);
        for r in &self.target.reserved {
            ledger.add(&format!("reserved: {}", r.label), r.bytes);
        }
        ledger
    }

    /// Over everything that is planned and what the target adds to it (kernels, units, alignment, reserved;
    /// not rates or memory size, which move no byte): equal digests are equal programs.
    pub fn digest(&self) -> Result<String, PlanError> {
        let t = &self.target;
        let mut hash = Sha256::new();
        hash.update(saved(&(&t.name, t.alignment, t.units, &t.reserved, &t.kernels))?);
        for named in &self.plans {
            hash.update(saved(named)?);
        }
        if self.lanes > 1 {
            hash.update(self.lanes.to_le_bytes());
        }
        for s in self.staging.iter().chain(&self.beside) {
            hash.update(s.label.as_bytes());
            hash.update(s.bytes.0.to_le_bytes());
        }
        Ok(hash.finalize().iter().fold(String::new(), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        }))
    }

    /// Expected seconds of one full step of every plan.
    pub fn seconds(&self) -> f64 {
        let computing = |p: &Plan| step_seconds(&p.graph, &self.target, p.graph.bounds.full());
        let reading = self.streamed().0 as f64 / self.target.rates.storage;
        self.plans.iter().map(|(_, p)| computing(p)).sum::<f64>() + reading
    }

    /// Tokens of the largest of the plans.
    pub(crate) fn most_tokens(&self) -> u64 {
        self.plans.iter().map(|(_, p)| p.graph.bounds.tokens).max().unwrap_or(0)
    }

    /// Bytes of the parameters that one step of every plan reads from their files; zero where all are resident.
    pub fn streamed(&self) -> Bytes {
        self.plans.iter().map(|(_, p)| p.streamed()).sum()
    }

    /// Whether any plan reads parameters in its steps.
    pub fn is_streamed(&self) -> bool {
        self.streamed() > Bytes::ZERO
    }

    /// The refusal of this program under `budget`.
    pub fn bill(&self, budget: Bytes, remedies: Vec<Remedy>) -> Bill {
        Bill {
            space: self.target.space.clone(),
            line: Line::Budget,
            budget,
            ledger: self.ledger(),
            peak_at: self.peak_at().1,
            seconds_per_token: self.seconds() / self.most_tokens().max(1) as f64,
            memory: self.target.memory,
            budget_flag: "--memory-budget",
            notes: vec![],
            remedies,
        }
    }

    /// This program, or its bill where it does not fit.
    pub fn within(self, budget: Bytes) -> Result<Self, PlanError> {
        if self.peak() <= budget {
            return Ok(self);
        }
        Err(PlanError::OverBudget(Box::new(self.bill(budget, vec![]))))
    }

    /// What lies in the persistent region, each byte once.
    fn add_persistent(&self, ledger: &mut Ledger) -> Bytes {
        let mut seen = BTreeSet::new();
        let mut sum = Bytes::ZERO;
        for (i, (_, plan)) in self.plans.iter().enumerate() {
            for (v, value) in plan.graph.values().filter(|(_, v)| v.def == Def::Source) {
                let slice = plan.memory.slice(v).filter(|slice| slice.region == Region::Persistent);
                let Some(slice) = slice else { continue };
                let label = match value.spec.role {
                    Role::Param(_) => "params",
                    Role::State(s) => plan.graph.states[s.index()].kind.label(),
                    Role::Input | Role::Activation | Role::Grad | Role::Scratch => continue,
                };
                if slice.bytes > Bytes::ZERO && seen.insert(self.address(i, slice)) {
                    ledger.add(label, slice.bytes);
                    sum += slice.bytes;
                }
            }
        }
        sum
    }

    /// Bytes of weights and states: the arena's first region.
    pub fn persistent(&self) -> Bytes {
        self.persistent_before(self.plans.len())
    }

    fn persistent_before(&self, plan: usize) -> Bytes {
        let all = self.plans.iter().map(|(_, p)| p.memory.persistent);
        match self.shared {
            false => all.take(plan).sum(),
            true if plan == self.plans.len() => all.max().unwrap_or_default(),
            true => Bytes::ZERO,
        }
    }

    fn staging_before(&self, k: usize) -> Bytes {
        self.staging[..k].iter().map(|s| s.bytes.align_up(self.target.alignment)).sum()
    }

    fn kept_beside(&self) -> Bytes {
        self.beside.iter().map(|s| s.bytes).sum()
    }

    fn transient_base(&self) -> Bytes {
        self.persistent() + self.staging_before(self.staging.len())
    }

    fn transient(&self) -> Bytes {
        self.plans.iter().map(|(_, p)| p.memory.transient).max().unwrap_or_default()
    }
}

/// The ledger's line of parameters that live in the transient region.
const STREAMED: &str = "streamed params";

fn load_label(graph: &Graph, v: ValueId) -> String {
    let of = graph.param_values().find(|(value, ..)| *value == v);
    of.map_or_else(|| format!("load of {v}"), |(.., param)| format!("load of {}", param.name))
}

fn saved(what: &impl Serialize) -> Result<Vec<u8>, PlanError> {
    let unsaved = |e| PlanError::BadPolicy { field: "plan", why: format!("it cannot be saved: {e}") };
    serde_json::to_vec(what).map_err(unsaved)
}

/// What is alive at a plan's peak, by kind.
fn add_transient(plan: &Plan, ledger: &mut Ledger) -> Bytes {
    let graph = &plan.graph;
    let mut sum = Bytes::ZERO;
    let mut add = |label: &str, bytes: Bytes| {
        ledger.add(label, bytes);
        sum += bytes;
    };
    let is_output = |v: ValueId| graph.outputs.iter().any(|(_, o)| *o == v);
    for &v in &plan.memory.live_at_peak {
        let label = match graph.spec(v).role {
            Role::Input => "inputs",
            Role::Activation | Role::Grad | Role::Scratch if is_output(v) => "outputs",
            Role::Activation | Role::Scratch => "activations",
            Role::Grad => "activation gradients",
            Role::Param(_) => STREAMED,
            Role::State(s) => graph.states[s.index()].kind.label(),
        };
        add(label, graph.spec(v).bytes(&graph.bounds));
    }
    if let Some(Some(scratch)) = plan.memory.workspaces.get(plan.memory.peak_instr) {
        add("workspace", scratch.bytes);
    }
    sum
}
