//! A second plan checker, from the definition and in quadratic time: compares every pair of values that share bytes.
//! Invariant: it uses lifetimes and overlaps only, and replays nothing, so that it is independent of the crate's
//! checker.

use plimsoll_graph::{Def, Op, Role, Space, ValueId};
use plimsoll_plan::{Instr, Plan, Region, Slice};

/// The slice of a value and its lifetime, during which the bytes must not change: from the instant `birth` from which on
/// they are written (0 is before the first instruction, i + 1 is instruction i) to the last read.
struct Life {
    v: ValueId,
    slice: Slice,
    birth: usize,
    death: usize,
}

/// Describes the first error in the addresses of a plan; `None` if the plan is correct.
pub fn fault(p: &Plan) -> Option<String> {
    if let Some(fault) = moves(p) {
        return Some(fault);
    }
    let mut lives = vec![];
    for (v, value) in p.graph.values() {
        let Some(slice) = p.memory.slice(v) else { return Some(format!("{v} has no slice")) };
        let is_kept = value.def == Def::Source && matches!(value.spec.role, Role::Param(_) | Role::State(_));
        let survives = is_kept || home(p, v).is_some();
        let region = if survives { Region::Persistent } else { Region::Transient };
        let room = p.memory.extent(value.spec.space).of(region);
        let fits = slice.space == value.spec.space && slice.region == region && slice.end() <= room.0;
        if !fits || slice.bytes != value.spec.bytes(&p.graph.bounds) {
            return Some(format!("{v} lies at {slice:?}"));
        }
        let (birth, read) = life(p, v);
        // If the new value of a state is written directly into its storage, the old value is live up to its last read
        // only.
        let replaced = p.graph.updates.iter().any(|&(state, new)| state == v && home(p, new) == Some(v));
        let death = if survives && !replaced { usize::MAX } else { read };
        lives.push(Life { v, slice, birth, death });
    }
    for (i, a) in lives.iter().enumerate() {
        if let Some(b) = lives[i + 1..].iter().find(|b| clash(p, a, b)) {
            return Some(format!("{} and {} clash", a.v, b.v));
        }
    }
    scratch(p, &lives)
}

/// Describes an error in the order of instructions: each move is started once and waited for once, after its operand is complete and
/// before its result is read.
fn moves(p: &Plan) -> Option<String> {
    for (id, node) in p.graph.nodes() {
        let (Op::Move(_), Some(v)) = (&node.op, node.outputs[0]) else { continue };
        let at = |wanted: Instr| {
            let all = p.schedule.instrs.iter().enumerate().filter(|(_, instr)| **instr == wanted);
            all.map(|(i, _)| i).collect::<Vec<_>>()
        };
        let [starts, waits] = [at(Instr::Start(id)), at(Instr::Wait(id))];
        let (&[start], &[wait]) = (&starts[..], &waits[..]) else {
            return Some(format!("{id} has {} starts and {} waits", starts.len(), waits.len()));
        };
        if start > wait || first_read(p, v) <= wait {
            return Some(format!("{v} is read before the wait for {id}"));
        }
    }
    // What a launch writes is read after the launch.
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = *instr else { continue };
        if let Some(v) = p.graph.node(id).outputs.iter().flatten().find(|v| first_read(p, **v) <= i) {
            return Some(format!("{v} is read before it is computed"));
        }
    }
    None
}

/// Returns the state into whose storage the new value `v` is written directly.
fn home(p: &Plan, v: ValueId) -> Option<ValueId> {
    let persistent = p.memory.persistent_slice(v);
    let mut updates = p.graph.updates.iter().filter(|(_, new)| *new == v).map(|(state, _)| *state);
    updates.find(|&state| persistent.is_some() && p.memory.slice(state) == persistent)
}

/// Index of the first launch or start that reads a value; `usize::MAX` if there is none.
fn first_read(p: &Plan, v: ValueId) -> usize {
    let reads = |instr: &Instr| match *instr {
        Instr::Launch(id) | Instr::Start(id) => p.graph.node(id).inputs.contains(&v),
        Instr::Wait(_) => false,
    };
    p.schedule.instrs.iter().position(reads).unwrap_or(usize::MAX)
}

fn life(p: &Plan, v: ValueId) -> (usize, usize) {
    let (mut birth, mut death) = (0, 0);
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let (Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) = *instr;
        let node = p.graph.node(id);
        if node.inputs.contains(&v) {
            death = i + 1;
        }
        if node.outputs.contains(&Some(v)) {
            // A move may write at any instant until it was waited for.
            match instr {
                Instr::Launch(_) | Instr::Start(_) => birth = i + 1,
                Instr::Wait(_) => death = i + 1,
            }
        }
    }
    if p.graph.outputs.iter().any(|(_, o)| *o == v) {
        death = p.schedule.instrs.len() + 1;
    }
    (birth, death.max(birth))
}

fn clash(p: &Plan, a: &Life, b: &Life) -> bool {
    if !a.slice.overlaps(&b.slice) {
        return false;
    }
    let (old, new) = if a.birth <= b.birth { (a, b) } else { (b, a) };
    if old.birth == new.birth || old.death > new.birth {
        return true;
    }
    // The instruction that writes the new value is the last reader of the old one: allowed only for in-place ops.
    old.death == new.birth && !in_place(p, old, new)
}

fn in_place(p: &Plan, old: &Life, new: &Life) -> bool {
    let Instr::Launch(id) = p.schedule.instrs[new.birth - 1] else { return false };
    let node = p.graph.node(id);
    let k = node.outputs.iter().position(|o| *o == Some(new.v)).expect("it is born here");
    let mut reads = (0..node.inputs.len()).filter(|&j| node.inputs[j] == old.v);
    old.slice == new.slice && reads.all(|j| node.op.rules().alias(k).contains(&j))
}

/// Describes an error in the workspaces: each must be inside the transient region of the arena and overlap no value that is
/// live at its instruction. A move has none.
fn scratch(p: &Plan, lives: &[Life]) -> Option<String> {
    for (i, space) in p.memory.workspaces.iter().enumerate() {
        let Some(space) = space else { continue };
        let alive = |l: &&Life| l.birth <= i + 1 && i < l.death;
        let outside = (space.space, space.region) != (Space::Device, Region::Transient)
            || space.end() > p.memory.device.transient.0;
        let of_move = !matches!(p.schedule.instrs[i], Instr::Launch(_));
        if outside || of_move || lives.iter().filter(alive).any(|l| l.slice.overlaps(space)) {
            return Some(format!("the scratch of instruction {i} is not its own"));
        }
    }
    None
}
