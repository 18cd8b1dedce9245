//! Checker of finished plans: replays the schedule over a map from addresses to values. Invariant: it depends
//! only on the schedule and the addresses, and shares no code with the packer and the liveness analysis that it
//! checks.

use crate::{Instr, MemoryPlan, Plan, Region, Schedule, Slice, Target};
use plimsoll_graph::{Bytes, Def, Graph, Node, Role, ValueId, node_label};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Error for a plan that would not compute what its schedule specifies. It indicates a bug in this program.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckError {
    /// The offending instruction, if the error concerns one.
    pub instr: Option<usize>,
    /// Description of the error.
    pub what: String,
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.instr {
            Some(i) => write!(f, "instruction {i}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for CheckError {}

/// Contents of a region, as disjoint ranges: start -> (end, value). Workspace has no value.
#[derive(Default)]
struct Holders(BTreeMap<u64, (u64, Option<ValueId>)>);

impl Holders {
    /// Assigns the bytes of `slice` to `value`; every earlier value that loses a byte is removed.
    fn write(&mut self, slice: Slice, value: Option<ValueId>) {
        // The ranges are disjoint, so walking down from the end of `slice` their ends decrease too, and the
        // walk can stop at the first range that ends before `slice`.
        let below = self.0.range(..slice.end()).rev();
        let hit: Vec<u64> =
            below.take_while(|(_, (end, _))| *end > slice.offset).map(|(start, _)| *start).collect();
        for start in hit {
            self.0.remove(&start);
        }
        if slice.bytes.0 > 0 {
            self.0.insert(slice.offset, (slice.end(), value));
        }
    }

    /// Whether the bytes of `slice` contain exactly `value`; always true for an empty slice.
    fn holds(&self, slice: Slice, value: ValueId) -> bool {
        slice.bytes.0 == 0 || self.0.get(&slice.offset) == Some(&(slice.end(), Some(value)))
    }
}

/// State of the replay of a plan.
struct Replay<'a> {
    graph: &'a Graph,
    memory: &'a MemoryPlan,
    persistent: Holders,
    transient: Holders,
    /// Whether an instruction loads the value, so that it is not in memory at the start of the step; indexed by
    /// value.
    loaded: Vec<bool>,
    /// The new value that the storage of each state holds at the end of the step, indexed by value; `None` if
    /// it keeps its own.
    news: Vec<Option<ValueId>>,
    /// The updates, as pairs (new value, state).
    homes: BTreeSet<(ValueId, ValueId)>,
    /// The updates that have been performed by a copy.
    copied: BTreeSet<(ValueId, ValueId)>,
}

/// Replays a plan: every read must find the expected value in its slice, and no value may be overwritten before
/// its last read.
pub fn check(graph: &Graph, schedule: &Schedule, memory: &MemoryPlan) -> Result<(), CheckError> {
    let (values, instrs) = (graph.values.len(), schedule.instrs.len());
    if memory.slices.len() != values || memory.workspaces.len() != instrs {
        let what = format!("the memory plan is not one of {values} values and {instrs} instructions");
        return Err(CheckError { instr: None, what });
    }
    let (persistent, transient) = (Holders::default(), Holders::default());
    let mut loaded = vec![false; values];
    for instr in &schedule.instrs {
        if let Instr::Load(v) = *instr {
            loaded[v.index()] = true;
        }
    }
    let mut news = vec![None; values];
    graph.updates.iter().for_each(|&(state, new)| news[state.index()] = Some(new));
    let homes = graph.updates.iter().map(|&(state, new)| (new, state)).collect();
    let copied = BTreeSet::new();
    let mut replay = Replay { graph, memory, persistent, transient, loaded, news, homes, copied };
    replay.load_sources()?;
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let done = match *instr {
            Instr::Launch(id) => replay
                .launch(graph.node(id), memory.workspaces[i])
                .map_err(|what| format!("{}: {what}", node_label(graph, id))),
            Instr::Load(v) => replay.load(v),
            Instr::Copy { from, to } => replay.copy(from, to),
        };
        done.map_err(|what| CheckError { instr: Some(i), what })?;
    }
    replay.end().map_err(|what| CheckError { instr: None, what })
}

/// Checks what kernels rely on: every node's kernel is the kernel of the target's table, slices have the target's
/// alignment, and every launch has a large enough workspace.
pub fn check_target(plan: &Plan, target: &Target) -> Result<(), CheckError> {
    let Plan { graph, schedule, kernels, memory } = plan;
    let all = memory.slices.iter().chain(&memory.workspaces).flatten();
    for slice in all {
        if !slice.offset.is_multiple_of(target.alignment) {
            return Err(CheckError { instr: None, what: format!("{slice:?} is not aligned") });
        }
    }
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = *instr else { continue };
        let fail =
            |what: String| CheckError { instr: Some(i), what: format!("{}: {what}", node_label(graph, id)) };
        let node = graph.node(id);
        let Some(&kernel) = kernels.get(id.index()) else { return Err(fail("it has no kernel".to_owned())) };
        if target.kernels.of(graph, node) != Some(kernel) {
            return Err(fail(format!("`{}` is not its kernel on `{}`", kernel.name(), target.name)));
        }
        let wanted = target.kernels.workspace(kernel, graph, node, target.workers);
        let given = memory.workspaces[i].map_or(Bytes::ZERO, |s| s.bytes);
        if given < wanted {
            return Err(fail(format!("its workspace is {given}, not {wanted}")));
        }
    }
    Ok(())
}

impl Replay<'_> {
    fn slice(&self, v: ValueId) -> Result<Slice, String> {
        let slice = self.memory.slices[v.index()].ok_or_else(|| format!("{v} has no address"))?;
        let wanted = self.graph.spec(v).bytes(&self.graph.bounds);
        let region = match slice.region {
            Region::Persistent => self.memory.persistent,
            Region::Transient => self.memory.transient,
        };
        if slice.bytes != wanted || slice.end() > region.0 {
            return Err(format!("{v} needs {wanted}, has {slice:?} of {region}"));
        }
        Ok(slice)
    }

    fn holders(&mut self, region: Region) -> &mut Holders {
        match region {
            Region::Persistent => &mut self.persistent,
            Region::Transient => &mut self.transient,
        }
    }

    fn expect(&mut self, v: ValueId) -> Result<Slice, String> {
        let slice = self.slice(v)?;
        if self.holders(slice.region).holds(slice, v) {
            return Ok(slice);
        }
        Err(format!("{v} is read at {slice:?}, which does not hold it any more"))
    }

    /// Parameters and states are in memory from the start, except those that the schedule loads; inputs are
    /// uploaded into their slices before the first instruction. The second loop detects sources that overlap
    /// each other.
    fn load_sources(&mut self) -> Result<(), CheckError> {
        let sources: Vec<ValueId> =
            self.graph.values().filter(|(_, v)| v.def == Def::Source).map(|(id, _)| id).collect();
        let sources: Vec<ValueId> = sources.into_iter().filter(|v| !self.loaded[v.index()]).collect();
        let fail = |what: String| CheckError { instr: None, what };
        for &v in &sources {
            let slice = self.slice(v).map_err(fail)?;
            let region = match self.graph.spec(v).role {
                Role::Param(_) | Role::State(_) => Region::Persistent,
                Role::Input | Role::Activation | Role::Grad => Region::Transient,
            };
            if slice.region != region {
                return Err(fail(format!("{v} lies in the wrong region")));
            }
            self.holders(region).write(slice, Some(v));
        }
        for &v in &sources {
            self.expect(v).map_err(fail)?;
        }
        Ok(())
    }

    /// Replays a launch: the inputs must be intact, an output may overlap an input only in place, and outputs must be
    /// disjoint. The workspace must overlap neither inputs nor outputs.
    fn launch(&mut self, node: &Node, workspace: Option<Slice>) -> Result<(), String> {
        let ins = node.inputs.iter().map(|&v| self.expect(v)).collect::<Result<Vec<_>, _>>()?;
        let mut written: Vec<Slice> = vec![];
        for (k, out) in node.outputs.iter().enumerate() {
            let Some(v) = *out else { continue };
            let slice = self.slice(v)?;
            if slice.region != Region::Transient && !self.is_home(slice, v)? {
                return Err(format!("{v} is written outside of the transient region"));
            }
            for (j, input) in ins.iter().enumerate() {
                let in_place = *input == slice && node.op.rules().alias(k).contains(&j);
                if input.overlaps(&slice) && slice.bytes.0 > 0 && !in_place {
                    return Err(format!("{v} is written over its input {}", node.inputs[j]));
                }
            }
            written.push(slice);
        }
        for (j, a) in written.iter().enumerate() {
            if written[j + 1..].iter().any(|b| a.overlaps(b)) {
                return Err("two outputs overlap".to_owned());
            }
        }
        if let Some(space) = workspace {
            let outside = space.region != Region::Transient || space.end() > self.memory.transient.0;
            if outside || ins.iter().chain(&written).any(|s| s.overlaps(&space)) {
                return Err(format!("its scratch {space:?} overlaps an operand or the end"));
            }
            self.transient.write(space, None);
        }
        let outputs: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        for (v, slice) in outputs.into_iter().zip(written) {
            self.holders(slice.region).write(slice, Some(v));
        }
        Ok(())
    }

    /// Whether `slice` is the storage of a state that is updated to `v`.
    fn is_home(&self, slice: Slice, v: ValueId) -> Result<bool, String> {
        for &(_, state) in self.homes.range((v, ValueId::at(0))..).take_while(|(new, _)| *new == v) {
            if self.slice(state)? == slice {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A loaded parameter is read from the weight file, with the same bytes at any time, so it must never be
    /// updated.
    fn load(&mut self, v: ValueId) -> Result<(), String> {
        let updated = self.news[v.index()].is_some();
        let slice = self.slice(v)?;
        match self.graph.spec(v).role {
            Role::Param(_) if !updated && slice.region == Region::Transient => {
                self.transient.write(slice, Some(v));
                Ok(())
            }
            Role::Param(_) => Err(format!("{v} at {slice:?} survives the step and cannot be loaded in it")),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) => {
                Err(format!("{v} is not a parameter, so there is nothing to load"))
            }
        }
    }

    /// Replays the copy of the new value of an update; each update may be copied only once.
    fn copy(&mut self, from: ValueId, to: ValueId) -> Result<(), String> {
        if self.news[to.index()] != Some(from) || !self.copied.insert((from, to)) {
            return Err(format!("the copy of {from} to {to} is not an update that remains to be done"));
        }
        self.expect(from)?;
        let slice = self.slice(to)?;
        // From here on the storage holds the new value, so a later read of the old value is an error.
        self.persistent.write(slice, Some(from));
        Ok(())
    }

    /// At the end, all outputs are in memory, every state holds its new value, and all other persistent values
    /// are unchanged.
    fn end(&mut self) -> Result<(), String> {
        let outputs: Vec<ValueId> = self.graph.outputs.iter().map(|(_, v)| *v).collect();
        for v in outputs {
            self.expect(v)?;
        }
        for (v, value) in self.graph.values() {
            let survives = match value.spec.role {
                Role::Param(_) => !self.loaded[v.index()],
                Role::State(_) => true,
                Role::Input | Role::Activation | Role::Grad => false,
            };
            let wanted = self.news[v.index()].unwrap_or(v);
            if survives && !self.persistent.holds(self.slice(v)?, wanted) {
                return Err(format!("at the end of the step the storage of {v} does not hold {wanted}"));
            }
        }
        Ok(())
    }
}
