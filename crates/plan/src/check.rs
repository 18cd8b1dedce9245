//! Checker of finished plans: replays the schedule over a map from (space, address) to the bytes of values, and demands that
//! every read happens after the write that it depends on. Invariant: it depends only on the schedule and the addresses, and
//! shares no code with the scheduler, the packer and the liveness analysis that it checks.
//!
//! A launch and a wait happen after everything that was issued before, apart from moves in flight; a move in flight may
//! copy any byte at any instant between its start and its wait. So while a move is in flight, nothing may write the bytes
//! that it reads, and nothing may read or write those that it writes.
//!
//! A view has no instruction. Its bytes are those of the values that were written (by a launch, a move, or before the step),
//! so a read of it is a read of their ranges, and must find each at its place.

use crate::{Instr, MemoryPlan, Plan, Region, Schedule, Slice, Target};
use plimsoll_graph::{Bytes, Def, Graph, Node, NodeId, Op, Role, Space, ValueId, node_label};
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

impl CheckError {
    fn of_plan(what: String) -> Self {
        Self { instr: None, what }
    }

    fn of_instr(instr: usize, graph: &Graph, id: NodeId, what: &str) -> Self {
        Self { instr: Some(instr), what: format!("{}: {what}", node_label(graph, id)) }
    }
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

/// Bytes of a value that was written: its bytes from `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    value: ValueId,
    from: u64,
}

impl Content {
    /// The content without its first `bytes`.
    fn skip(self, bytes: u64) -> Self {
        Self { from: self.from.saturating_add(bytes), ..self }
    }
}

/// A range of addresses, without its start.
#[derive(Clone, Copy)]
struct ContentRange {
    end: u64,
    /// `None` for a workspace, and for the destination of a move in flight.
    content: Option<Content>,
}

/// Contents of a region, as disjoint ranges by their start.
#[derive(Default)]
struct RegionContents(BTreeMap<u64, ContentRange>);

impl RegionContents {
    /// Assigns the bytes of `slice` to `value`; every earlier content keeps the bytes outside of it.
    fn write(&mut self, slice: Slice, value: Option<ValueId>) {
        if slice.bytes.0 == 0 {
            return;
        }
        // The ranges are disjoint, so walking down from the end of `slice` their ends decrease too, and the
        // walk can stop at the first range that ends before `slice`.
        let descending = self.0.range(..slice.end()).rev();
        let overlapping: Vec<(u64, ContentRange)> = descending
            .take_while(|(_, range)| range.end > slice.offset)
            .map(|(start, range)| (*start, *range))
            .collect();
        for (start, range) in overlapping {
            self.0.remove(&start);
            if start < slice.offset {
                self.0.insert(start, ContentRange { end: slice.offset, ..range });
            }
            if range.end > slice.end() {
                let content = range.content.map(|content| content.skip(slice.end().saturating_sub(start)));
                self.0.insert(slice.end(), ContentRange { end: range.end, content });
            }
        }
        let content = value.map(|value| Content { value, from: 0 });
        self.0.insert(slice.offset, ContentRange { end: slice.end(), content });
    }

    /// Whether the bytes from `offset` to `end` are those of `content`; always true for an empty range. What was written in
    /// one piece may have been cut, so several ranges may hold it.
    fn holds(&self, mut offset: u64, end: u64, mut content: Content) -> bool {
        while offset < end {
            let Some((start, range)) = self.0.range(..=offset).next_back() else { return false };
            let Some(held) = range.content else { return false };
            if range.end <= offset || held.skip(offset.saturating_sub(*start)) != content {
                return false;
            }
            content = content.skip(range.end.saturating_sub(offset));
            offset = range.end;
        }
        true
    }
}

/// State of the replay of a plan.
struct PlanReplay<'a> {
    graph: &'a Graph,
    memory: &'a MemoryPlan,
    /// Contents of the regions of all spaces.
    regions: BTreeMap<(Space, Region), RegionContents>,
    /// Moves that were started and not waited for, with the slices that they read and write.
    in_flight: BTreeMap<NodeId, MoveSlices>,
    /// Number of replayed instructions of each node, indexed by node.
    issued: Vec<u32>,
    /// The new value that the storage of each state holds at the end of the step, indexed by value; `None` if the state is not
    /// updated.
    new_values: Vec<Option<ValueId>>,
    /// The updates, as pairs (new value, state): the states that a new value updates are a range.
    updated_states: BTreeSet<(ValueId, ValueId)>,
    /// The result of the join that each value is an operand of.
    joined: BTreeMap<ValueId, ValueId>,
}

/// Slices of a move in flight.
#[derive(Clone, Copy)]
struct MoveSlices {
    from: Slice,
    to: Slice,
}

/// Replays a plan: every read must find the expected value in its slice, and no value may be overwritten before
/// its last read.
pub fn check(graph: &Graph, schedule: &Schedule, memory: &MemoryPlan) -> Result<(), CheckError> {
    let values = graph.values.len();
    let instrs = schedule.instrs.len();
    if memory.slices.len() != values || memory.workspaces.len() != instrs {
        let what = format!("the memory plan is not one of {values} values and {instrs} instructions");
        return Err(CheckError::of_plan(what));
    }
    let mut new_values = vec![None; values];
    graph.updates.iter().for_each(|&(state, new)| new_values[state.index()] = Some(new));
    let mut replay = PlanReplay {
        graph,
        memory,
        regions: BTreeMap::new(),
        in_flight: BTreeMap::new(),
        issued: vec![0; graph.nodes.len()],
        new_values,
        updated_states: graph.updates.iter().map(|&(state, new)| (new, state)).collect(),
        joined: BTreeMap::new(),
    };
    replay.check_views()?;
    replay.load_sources()?;
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let id = match *instr {
            Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id) => id,
        };
        let workspace = memory.workspaces[i];
        let done = match *instr {
            Instr::Launch(_) => replay.launch(id, workspace),
            Instr::Start(_) => replay.start(id, workspace),
            Instr::Wait(_) => replay.wait(id, workspace),
        };
        done.map_err(|what| CheckError::of_instr(i, graph, id, &what))?;
    }
    replay.end().map_err(CheckError::of_plan)
}

/// Checks what kernels rely on: every node's kernel is the kernel of the target's table, slices have the target's
/// alignment, and every launch has a large enough workspace.
pub fn check_target(plan: &Plan, target: &Target) -> Result<(), CheckError> {
    let Plan { graph, schedule, memory, .. } = plan;
    let all = memory.slices.iter().chain(&memory.workspaces).flatten();
    for slice in all {
        if !slice.offset.is_multiple_of(target.alignment) {
            return Err(CheckError::of_plan(format!("{slice:?} is not aligned")));
        }
    }
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = *instr else { continue };
        check_kernel(plan, target, i, id).map_err(|what| CheckError::of_instr(i, graph, id, &what))?;
    }
    Ok(())
}

/// Checks the kernel and the workspace of instruction `i`, which launches node `id`.
fn check_kernel(plan: &Plan, target: &Target, i: usize, id: NodeId) -> Result<(), String> {
    let Plan { graph, kernels, memory, .. } = plan;
    let node = graph.node(id);
    let Some(&kernel) = kernels.get(id.index()) else { return Err("it has no kernel".to_owned()) };
    if target.kernels.of(graph, node) != Some(kernel) {
        return Err(format!("`{}` is not its kernel on `{}`", kernel.name(), target.name));
    }
    let needed = target.kernels.workspace(kernel, graph, node, target.workers);
    let planned = memory.workspaces[i].map_or(Bytes::ZERO, |s| s.bytes);
    if planned < needed {
        return Err(format!("its workspace is {planned}, not {needed}"));
    }
    Ok(())
}

impl PlanReplay<'_> {
    fn slice(&self, v: ValueId) -> Result<Slice, String> {
        let slice = self.memory.slices[v.index()].ok_or_else(|| format!("{v} has no address"))?;
        let spec = self.graph.spec(v);
        let wanted = spec.bytes(&self.graph.bounds);
        let region = self.memory.region_sizes(slice.space).of(slice.region);
        if slice.bytes != wanted || slice.space != spec.space || slice.end() > region.0 {
            return Err(format!("{v} needs {wanted} in {}, has {slice:?} of {region}", spec.space.name()));
        }
        Ok(slice)
    }

    fn contents_at(&mut self, slice: Slice) -> &mut RegionContents {
        self.regions.entry((slice.space, slice.region)).or_default()
    }

    /// The slice of a value that is about to be read.
    fn expect(&mut self, v: ValueId) -> Result<Slice, String> {
        let slice = self.slice(v)?;
        if self.is_at(v, slice)? {
            return Ok(slice);
        }
        Err(format!("{v} is read at {slice:?}, which does not hold it any more, or not yet"))
    }

    /// Whether the bytes of `slice` are those of `v`.
    fn is_at(&mut self, v: ValueId, slice: Slice) -> Result<bool, String> {
        let mut offset = slice.offset;
        let mut written = vec![];
        self.contents(v, 0, slice.bytes.0, &mut written)?;
        for (content, bytes) in written {
            let end = offset.saturating_add(bytes);
            if !self.contents_at(slice).holds(offset, end, content) {
                return Ok(false);
            }
            offset = end;
        }
        Ok(true)
    }

    /// Adds the contents of `bytes` bytes of `v` from `from` on, each with its number of bytes, in terms of values that were
    /// written. A part has those of a range of its operand, a join those of its operands one behind another.
    fn contents(&self, v: ValueId, from: u64, bytes: u64, all: &mut Vec<(Content, u64)>) -> Result<(), String> {
        let node = match self.graph.value(v).def {
            Def::Node(id, _) if self.graph.node(id).op.is_view() => self.graph.node(id),
            Def::Node(..) | Def::Source => {
                all.push((Content { value: v, from }, bytes));
                return Ok(());
            }
        };
        if let (Op::Part(part), &[operand]) = (&node.op, &node.inputs[..]) {
            return self.contents(
                operand,
                self.row_offset(operand, part.first).saturating_add(from),
                bytes,
                all,
            );
        }
        let mut start: u64 = 0;
        for &operand in &node.inputs {
            let end = start.saturating_add(self.graph.spec(operand).bytes(&self.graph.bounds).0);
            let first = from.max(start);
            let last = from.saturating_add(bytes).min(end);
            if first < last {
                self.contents(operand, first.saturating_sub(start), last.saturating_sub(first), all)?;
            }
            start = end;
        }
        if from.saturating_add(bytes) > start {
            return Err(format!("{v} is no join of its operands"));
        }
        Ok(())
    }

    /// Offset in bytes of a row of a value.
    fn row_offset(&self, v: ValueId, row: u64) -> u64 {
        let spec = self.graph.spec(v);
        spec.row_elements().saturating_mul(spec.dtype.size()).saturating_mul(row)
    }

    /// Checks that every part lies at its rows of its operand, and that the operands of a join lie in its result, one behind
    /// another.
    fn check_views(&mut self) -> Result<(), CheckError> {
        for (id, node) in self.graph.nodes().filter(|(_, node)| node.op.is_view()) {
            let Some(result) = node.outputs.first().copied().flatten() else { continue };
            let result_slice = self.slice(result).map_err(CheckError::of_plan)?;
            let mut offset = result_slice.offset;
            for &operand in &node.inputs {
                let slice = self.slice(operand).map_err(CheckError::of_plan)?;
                // The offset of the value inside the other one, as it is and as it must be.
                let (found, wanted) = if let Op::Part(part) = &node.op {
                    (result_slice.offset, slice.offset.saturating_add(self.row_offset(operand, part.first)))
                } else {
                    (slice.offset, offset)
                };
                if found != wanted || (slice.space, slice.region) != (result_slice.space, result_slice.region) {
                    let label = node_label(self.graph, id);
                    return Err(CheckError::of_plan(format!(
                        "{label} ({id}): {result} at {result_slice:?} is no view of {operand} at {slice:?}"
                    )));
                }
                if matches!(node.op, Op::Join(_)) {
                    self.joined.insert(operand, result);
                }
                offset = slice.end();
            }
        }
        Ok(())
    }

    /// Checks that no move in flight reads or writes bytes that are about to be written.
    fn may_write(&self, slice: Slice) -> Result<(), String> {
        for (id, copy) in &self.in_flight {
            if copy.from.overlaps(&slice) || copy.to.overlaps(&slice) {
                let label = node_label(self.graph, *id);
                return Err(format!("{slice:?} is written while `{label}` is in flight"));
            }
        }
        Ok(())
    }

    /// Parameters and states are in memory from the start; inputs are uploaded into their slices before the first
    /// instruction. The second loop detects sources that overlap each other.
    fn load_sources(&mut self) -> Result<(), CheckError> {
        let sources: Vec<ValueId> = self.graph.sources().map(|(id, _)| id).collect();
        for &v in &sources {
            let slice = self.slice(v).map_err(CheckError::of_plan)?;
            let region = match self.graph.spec(v).role {
                Role::Param(_) | Role::State(_) => Region::Persistent,
                Role::Input | Role::Activation | Role::Grad => Region::Transient,
            };
            if slice.region != region {
                return Err(CheckError::of_plan(format!("{v} lies in the wrong region")));
            }
            self.contents_at(slice).write(slice, Some(v));
        }
        for &v in &sources {
            self.expect(v).map_err(CheckError::of_plan)?;
        }
        Ok(())
    }

    /// The slice that a node writes its result `v` to: in a transient region, or the storage of a state that `v` updates.
    fn written(&self, v: ValueId) -> Result<Slice, String> {
        let slice = self.slice(v)?;
        if slice.region == Region::Transient || self.is_storage_of(slice, v)? {
            return Ok(slice);
        }
        Err(format!("{v} is written outside of the transient region"))
    }

    /// Replays a launch: the inputs must be intact, an output may overlap an input only in place, and outputs must be
    /// disjoint. The workspace must overlap neither inputs nor outputs.
    fn launch(&mut self, id: NodeId, workspace: Option<Slice>) -> Result<(), String> {
        let node: &Node = self.graph.node(id);
        if matches!(node.op, Op::Move(_)) || node.op.is_view() {
            return Err(format!("a {} is launched as a kernel", node.op.name()));
        }
        let ins = node.inputs.iter().map(|&v| self.expect(v)).collect::<Result<Vec<_>, _>>()?;
        let mut written: Vec<Slice> = vec![];
        for (k, out) in node.outputs.iter().enumerate() {
            let Some(v) = *out else { continue };
            let slice = self.written(v)?;
            self.may_write(slice)?;
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
            let outside = (space.space, space.region) != (Space::Device, Region::Transient)
                || space.end() > self.memory.device.transient.0;
            if outside || ins.iter().chain(&written).any(|s| s.overlaps(&space)) {
                return Err(format!("its scratch {space:?} overlaps an operand or the end"));
            }
            self.may_write(space)?;
            self.contents_at(space).write(space, None);
        }
        let outputs: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        for (v, slice) in outputs.into_iter().zip(written) {
            self.contents_at(slice).write(slice, Some(v));
        }
        self.issued[id.index()] += 1;
        Ok(())
    }

    /// Operand and result of a move.
    fn operands(&self, id: NodeId, workspace: Option<Slice>) -> Result<(ValueId, ValueId), String> {
        let node = self.graph.node(id);
        let is_move = matches!(node.op, Op::Move(_)) && workspace.is_none();
        if let (true, &[from], &[Some(to)]) = (is_move, &node.inputs[..], &node.outputs[..]) {
            return Ok((from, to));
        }
        Err("it is no move of one value, or has a workspace".to_owned())
    }

    /// Replays the start of a move: the operand must be intact. Until the move is waited for, its destination holds
    /// nothing.
    fn start(&mut self, id: NodeId, workspace: Option<Slice>) -> Result<(), String> {
        let (operand, result) = self.operands(id, workspace)?;
        if self.issued[id.index()] != 0 {
            return Err("it is started twice".to_owned());
        }
        let from = self.expect(operand)?;
        let to = self.written(result)?;
        if from.overlaps(&to) {
            return Err(format!("{result} is written over its operand {operand}"));
        }
        self.may_write(to)?;
        self.contents_at(to).write(to, None);
        self.in_flight.insert(id, MoveSlices { from, to });
        self.issued[id.index()] = 1;
        Ok(())
    }

    /// Replays the wait for a move: from here on the destination holds the result.
    fn wait(&mut self, id: NodeId, workspace: Option<Slice>) -> Result<(), String> {
        let (_, result) = self.operands(id, workspace)?;
        let Some(MoveSlices { to, .. }) = self.in_flight.remove(&id) else {
            return Err("it is waited for without a start, or twice".to_owned());
        };
        self.contents_at(to).write(to, Some(result));
        self.issued[id.index()] = 2;
        Ok(())
    }

    /// Whether `slice` is the storage of a state that is updated to `v`, or the place of `v` in that of a state that is updated
    /// to a join.
    fn is_storage_of(&self, slice: Slice, v: ValueId) -> Result<bool, String> {
        if let Some(&join) = self.joined.get(&v) {
            // `check_views` has found `v` at its place in the join.
            return self.is_storage_of(self.slice(join)?, join);
        }
        for &(_, state) in self.updated_states.range((v, ValueId::at(0))..).take_while(|(new, _)| *new == v) {
            if self.slice(state)? == slice {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// At the end, every move is complete, all outputs are in memory, every state holds its new value, and all other
    /// persistent values are unchanged.
    fn end(&mut self) -> Result<(), String> {
        for (id, node) in self.graph.nodes() {
            let wanted = if node.op.is_view() {
                0
            } else if matches!(node.op, Op::Move(_)) {
                2
            } else {
                1
            };
            if self.issued[id.index()] != wanted {
                let label = node_label(self.graph, id);
                return Err(format!(
                    "{label} ({id}) has {} of its {wanted} instructions",
                    self.issued[id.index()]
                ));
            }
        }
        let outputs: Vec<ValueId> = self.graph.outputs.iter().map(|(_, v)| *v).collect();
        for v in outputs {
            self.expect(v)?;
        }
        for (v, value) in self.graph.sources() {
            let survives = match value.spec.role {
                Role::Param(_) | Role::State(_) => true,
                Role::Input | Role::Activation | Role::Grad => false,
            };
            let wanted = self.new_values[v.index()].unwrap_or(v);
            let slice = self.slice(v)?;
            if survives && !self.is_at(wanted, slice)? {
                return Err(format!("at the end of the step the storage of {v} does not hold {wanted}"));
            }
        }
        Ok(())
    }
}
