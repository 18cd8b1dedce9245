//! The timeline of a program: every tensor with its address and lifetime, and every instruction with its expected time, as
//! data for charts and traces. Invariant: at every instruction the bytes of all lines sum to at most the planned peak, and
//! they sum to it at one instruction at least.
#![expect(clippy::arithmetic_side_effects, reason = "sums of sizes of a plan, which fit its arena")]

use crate::liveness::buffers;
use crate::program::transient_label;
use crate::{Instr, Plan, Program, Staging, instruction_seconds};
use plimsoll_graph::{Bytes, Def, Graph, NodeId, Phase, Role, Space, ValueId, node_label};
use std::collections::{BTreeMap, BTreeSet};

/// Name of the ledger line of bytes that hold no tensor.
const PADDING: &str = "padding and packing";

/// Tensors and instructions of a program. The instructions of all plans are numbered consecutively, in the order of the
/// plans, each plan once.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Name of the target.
    pub target: String,
    /// Plans in order.
    pub plans: Vec<TimelinePlan>,
    /// Instructions of all plans.
    pub instructions: Vec<TimelineInstruction>,
    /// Tensors, staging buffers and workspaces with at least one byte: those that live for the whole run first, then in
    /// order of birth.
    pub tensors: Vec<TimelineTensor>,
    /// Memory outside the arena, which is in use during the whole run.
    pub outside: Vec<Staging>,
    /// Size of the arena.
    pub arena: Bytes,
    /// Alignment of addresses: the bytes from the end of a tensor to the next multiple are padding.
    pub alignment: u64,
    /// Size of the part of the arena whose tensors live for the whole run; the other tensors follow it.
    pub lasting: Bytes,
    /// Planned peak: the arena and the memory outside it.
    pub peak: Bytes,
    /// Instruction with the most live bytes, as in [`Program::peak_at`].
    pub peak_instruction: usize,
}

/// A plan of a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelinePlan {
    /// Name of the plan in the program.
    pub name: String,
    /// Number of the plan's first instruction.
    pub first: usize,
    /// Number of the plan's instructions.
    pub count: usize,
}

/// An instruction of a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineInstruction {
    /// Label, with the parameter or layer: `linear layers.3.fc1`.
    pub label: String,
    /// Name of the op; `start` and `wait` for the two instructions of a move.
    pub op: &'static str,
    /// Transformer layer, if any.
    pub layer: Option<u32>,
    /// Phase of the step.
    pub phase: Phase,
    /// Name of the kernel of a launch.
    pub kernel: Option<&'static str>,
    /// Expected seconds by which the instruction delays the kernels of a step of the largest size: of a launch those of its
    /// kernel, of a wait those of a copy that is not complete.
    pub seconds: f64,
}

/// A tensor of a timeline, or other bytes with an address in the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineTensor {
    /// Name: that of a parameter, state or input, or the label of the instruction that writes the tensor.
    pub name: String,
    /// Index of the plan; `None` for bytes that live for the whole run.
    pub plan: Option<usize>,
    /// First instruction at which the tensor is live.
    pub birth: usize,
    /// Last instruction at which the tensor is live.
    pub death: usize,
    /// Offset in the arena.
    pub address: u64,
    /// Size.
    pub bytes: Bytes,
    /// Transformer layer of the instruction that writes the tensor, or of the first that reads it; of a state, that of its
    /// parameter.
    pub layer: Option<u32>,
    /// Phase of that instruction; `None` for bytes that live for the whole run.
    pub phase: Option<Phase>,
    /// Line of the ledger that counts the bytes.
    pub line: String,
}

/// Bytes of the lines of a ledger at every instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineLines {
    /// Names of the lines. The last line is padding: bytes below the highest address in use that hold no tensor.
    pub lines: Vec<String>,
    /// Bytes of each line at each instruction.
    pub bytes: Vec<Vec<u64>>,
}

impl Program {
    /// The timeline of the program.
    pub fn timeline(&self) -> Timeline {
        let mut instructions = vec![];
        let mut plans = vec![];
        for (name, plan) in self.plans() {
            let count = plan.schedule.instrs.len();
            plans.push(TimelinePlan { name: name.clone(), first: instructions.len(), count });
            let seconds = instruction_seconds(plan, self.target(), plan.graph.bounds.full());
            instructions.extend(seconds.into_iter().enumerate().map(|(i, s)| instruction(plan, i, s)));
        }
        let last = instructions.len().saturating_sub(1);
        let mut tensors = self.lasting(last);
        let lasting = Bytes(self.arena_bytes().0 - self.transient().0);
        for (index, (_, plan)) in self.plans().iter().enumerate() {
            let mut own = self.transients(index, plan, plans[index].first);
            own.sort_by_key(|t| (t.birth, t.address));
            tensors.append(&mut own);
        }
        let (peak_plan, _) = self.peak_at();
        let peak_instruction =
            self.plans().get(peak_plan).map_or(0, |(_, plan)| plans[peak_plan].first + plan.memory.peak_instr);
        Timeline {
            target: self.target().name.clone(),
            plans,
            instructions,
            tensors,
            outside: self.outside(),
            arena: self.arena_bytes(),
            alignment: self.target().alignment,
            lasting,
            peak: self.peak(),
            peak_instruction,
        }
    }

    /// Parameters, states and staging buffers.
    fn lasting(&self, last: usize) -> Vec<TimelineTensor> {
        let mut tensors = vec![];
        let mut seen = BTreeSet::new();
        let mut param_layers = BTreeMap::new();
        for (index, (_, plan)) in self.plans().iter().enumerate() {
            let graph = &plan.graph;
            let layers = layers_of_readers(graph);
            for (v, _, param) in graph.param_values() {
                param_layers.entry(param.name.clone()).or_insert(layers[v.index()]);
            }
            for (v, value) in graph.sources() {
                let slice = plan.memory.persistent_slice(v).filter(|slice| slice.space == Space::Device);
                let Some(slice) = slice.filter(|s| s.bytes > Bytes::ZERO) else { continue };
                // A state has the layer of its parameter where its own readers have none, as in an optimizer step.
                let (name, param, line) = match value.spec.role {
                    Role::Param(p) => (graph.params[p.index()].name.clone(), None, "params"),
                    Role::State(s) => {
                        let role = &graph.states[s.index()].role;
                        (role.to_string(), role.param(), role.kind().label())
                    }
                    Role::Input | Role::Activation | Role::Grad => continue,
                };
                let address = self.location(index, slice).at;
                if seen.insert(address) {
                    let of_param = param.and_then(|param| param_layers.get(param).copied()).flatten();
                    tensors.push(TimelineTensor {
                        name,
                        plan: None,
                        birth: 0,
                        death: last,
                        address,
                        bytes: slice.bytes,
                        layer: layers[v.index()].or(of_param),
                        phase: None,
                        line: line.to_owned(),
                    });
                }
            }
        }
        for (k, s) in self.staging().iter().enumerate().filter(|(_, s)| s.bytes > Bytes::ZERO) {
            tensors.push(TimelineTensor {
                name: s.label.clone(),
                plan: None,
                birth: 0,
                death: last,
                address: self.staging_address(k),
                bytes: s.bytes,
                layer: None,
                phase: None,
                line: format!("staging: {}", s.label),
            });
        }
        tensors
    }

    /// Values and workspaces of a plan in the transient region.
    fn transients(&self, index: usize, plan: &Plan, first: usize) -> Vec<TimelineTensor> {
        let graph = &plan.graph;
        let last = plan.schedule.instrs.len().saturating_sub(1);
        let layers = layers_of_readers(graph);
        let mut tensors = vec![];
        for buffer in buffers(graph, &plan.schedule, true).iter().filter(|buffer| buffer.space == Space::Device)
        {
            for (k, &(from, v)) in buffer.values.iter().enumerate() {
                // A value that is overwritten in place is replaced at the instant of the next one.
                let until = buffer.values.get(k + 1).map_or(buffer.death, |(next, _)| next.saturating_sub(1));
                // Instants are instructions plus 1; the upload belongs to the first instruction, and the download to the
                // last.
                let birth = (from as usize).saturating_sub(1).min(last);
                let death = (until as usize).saturating_sub(1).min(last);
                let Some(slice) = plan.memory.slice(v).filter(|_| from <= until) else { continue };
                if slice.bytes == Bytes::ZERO {
                    continue;
                }
                let (name, layer, phase) = match graph.values[v.index()].def {
                    Def::Node(id, k) => written_by(graph, id, k),
                    Def::Source => (source_name(graph, v), layers[v.index()], Phase::Forward),
                };
                tensors.push(TimelineTensor {
                    name,
                    plan: Some(index),
                    birth: first + birth,
                    death: first + death,
                    address: self.location(index, slice).at,
                    bytes: slice.bytes,
                    layer,
                    phase: Some(phase),
                    line: transient_label(graph, v).to_owned(),
                });
            }
        }
        for (i, workspace) in plan.memory.workspaces.iter().enumerate() {
            let (Some(slice), Instr::Launch(id)) = (workspace, plan.schedule.instrs[i]) else { continue };
            if slice.bytes == Bytes::ZERO {
                continue;
            }
            let node = graph.node(id);
            tensors.push(TimelineTensor {
                name: format!("workspace of {}", node_label(graph, id)),
                plan: Some(index),
                birth: first + i,
                death: first + i,
                address: self.location(index, *slice).at,
                bytes: slice.bytes,
                layer: node.layer,
                phase: Some(node.phase),
                line: "workspace".to_owned(),
            });
        }
        tensors
    }
}

impl Timeline {
    /// Raises `tops`, one for each instruction, to the highest end of the tensors of a step that are live at it. The tensors are
    /// taken from the highest end down, so the first one that reaches an instruction decides, and each instruction is visited
    /// once.
    fn raise_to_ends(&self, tops: &mut [u64]) {
        let mut ends: Vec<(u64, &TimelineTensor)> = vec![];
        for tensor in self.tensors.iter().filter(|tensor| tensor.plan.is_some()) {
            ends.push((Bytes(tensor.address + tensor.bytes.0).align_up(self.alignment).0, tensor));
        }
        ends.sort_by_key(|(end, _)| std::cmp::Reverse(*end));
        let mut unreached = UnreachedInstructions::new(tops.len());
        for (end, tensor) in ends {
            let mut i = unreached.next_from(tensor.birth);
            while i <= tensor.death && i < tops.len() {
                tops[i] = tops[i].max(end);
                unreached.remove(i);
                i = unreached.next_from(i);
            }
        }
    }

    /// Bytes of each line at each instruction: first the memory outside the arena, then the lines of the tensors in the
    /// order of the tensors, then padding. Their sum is the memory in use up to the highest address, at most the peak.
    pub fn lines(&self) -> TimelineLines {
        let mut lines: Vec<String> = self.outside.iter().map(|s| s.label.clone()).collect();
        for tensor in &self.tensors {
            if !lines.contains(&tensor.line) {
                lines.push(tensor.line.clone());
            }
        }
        let count = self.instructions.len();
        // Births add bytes and deaths take them away; their running sums are the bytes in use.
        let mut born: Vec<Vec<u64>> = vec![vec![0; count + 1]; lines.len()];
        let mut dead = born.clone();
        for (line, s) in self.outside.iter().enumerate() {
            born[line][0] = s.bytes.0;
        }
        let mut padding = vec![self.lasting.0; count];
        for tensor in self.tensors.iter().filter(|_| count > 0) {
            let line = lines.iter().position(|line| *line == tensor.line).unwrap_or(0);
            born[line][tensor.birth] += tensor.bytes.0;
            dead[line][tensor.death + 1] += tensor.bytes.0;
        }
        self.raise_to_ends(&mut padding);
        let mut bytes: Vec<Vec<u64>> =
            born.iter().zip(&dead).map(|(born, dead)| running_sums(&born[..count], &dead[..count])).collect();
        let inside = self.outside.len()..lines.len();
        for (i, top) in padding.iter_mut().enumerate() {
            *top -= bytes[inside.clone()].iter().map(|line| line[i]).sum::<u64>();
        }
        lines.push(PADDING.to_owned());
        bytes.push(padding);
        TimelineLines { lines, bytes }
    }
}

/// Running sums of `born - dead`.
fn running_sums(born: &[u64], dead: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let mut sums = vec![];
    for (born, dead) in born.iter().zip(dead) {
        sum = sum + born - dead;
        sums.push(sum);
    }
    sums
}

/// Instructions that no tensor has reached: a disjoint-set forest, in which an instruction that was reached points to a later
/// one.
struct UnreachedInstructions {
    next: Vec<usize>,
}

impl UnreachedInstructions {
    fn new(count: usize) -> Self {
        Self { next: (0..=count).collect() }
    }

    /// The first unreached instruction from `i` on; their number if there is none.
    fn next_from(&mut self, mut i: usize) -> usize {
        while self.next[i] != i {
            // Paths are halved when they are followed, so that all calls together take almost linear time.
            self.next[i] = self.next[self.next[i]];
            i = self.next[i];
        }
        i
    }

    /// Marks instruction `i` as reached.
    fn remove(&mut self, i: usize) {
        self.next[i] = i + 1;
    }
}

impl TimelineLines {
    /// Sum of all lines at instruction `i`.
    pub fn total(&self, i: usize) -> Bytes {
        Bytes(self.bytes.iter().map(|line| line[i]).sum())
    }
}

/// Instruction `i` of a plan, which delays the kernels by `seconds`.
fn instruction(plan: &Plan, i: usize, seconds: f64) -> TimelineInstruction {
    let graph = &plan.graph;
    let (Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) = plan.schedule.instrs[i];
    let node = graph.node(id);
    let launch = TimelineInstruction {
        label: node_label(graph, id),
        op: node.op.name(),
        layer: node.layer,
        phase: node.phase,
        kernel: Some(plan.kernels[id.index()].name()),
        seconds,
    };
    match plan.schedule.instrs[i] {
        Instr::Launch(_) => launch,
        Instr::Start(_) => TimelineInstruction { op: "start", kernel: None, ..launch },
        Instr::Wait(_) => TimelineInstruction { op: "wait", kernel: None, ..launch },
    }
}

/// Layer of the first node that reads each value, indexed by value.
fn layers_of_readers(graph: &Graph) -> Vec<Option<u32>> {
    let mut layers = vec![None; graph.values.len()];
    for node in graph.nodes.iter().rev().filter(|node| node.layer.is_some()) {
        node.inputs.iter().for_each(|v| layers[v.index()] = node.layer);
    }
    layers
}

/// Name, layer and phase of output `k` of a node.
fn written_by(graph: &Graph, id: NodeId, k: u32) -> (String, Option<u32>, Phase) {
    let node = graph.node(id);
    let label = node_label(graph, id);
    let name = if node.outputs.iter().flatten().count() > 1 { format!("{label} [{k}]") } else { label };
    (name, node.layer, node.phase)
}

/// Name of a value that exists before the step.
fn source_name(graph: &Graph, v: ValueId) -> String {
    match graph.spec(v).role {
        Role::Param(p) => graph.params[p.index()].name.clone(),
        Role::State(s) => graph.states[s.index()].role.to_string(),
        Role::Input | Role::Activation | Role::Grad => {
            let input = graph.inputs.iter().find(|(_, input)| *input == v);
            input.map_or_else(|| v.to_string(), |(name, _)| format!("input {name}"))
        }
    }
}
