//! A second plan checker, from the definition and in quadratic time: compares every pair of values that share bytes.
//! Invariant: it uses lifetimes and overlaps only, and replays nothing, so that it is independent of the crate's
//! checker.

use plimsoll_graph::{Role, ValueId};
use plimsoll_plan::{Instr, Plan, Region, Slice};

/// The slice of a value and its lifetime, during which the bytes must not change: from the instant `birth` at which
/// they are written (0 is before the first instruction, i + 1 is instruction i) to the last read.
struct Life {
    v: ValueId,
    slice: Slice,
    birth: usize,
    death: usize,
}

/// Describes the first error in the addresses of a plan; `None` if the plan is correct.
pub fn fault(p: &Plan) -> Option<String> {
    let mut lives = vec![];
    for (v, value) in p.graph.values() {
        let Some(slice) = p.memory.slice(v) else { return Some(format!("{v} has no slice")) };
        let loaded = loads(p, v) > 0;
        if loaded && !matches!(value.spec.role, Role::Param(_)) {
            return Some(format!("{v} is not a parameter"));
        }
        if loaded && p.graph.updates.iter().any(|(state, _)| *state == v) {
            return Some(format!("{v} is loaded and updated"));
        }
        let source = matches!(value.spec.role, Role::Param(_) | Role::State(_)) && !loaded;
        let survives = source || home(p, v).is_some();
        let region = if survives { Region::Persistent } else { Region::Transient };
        let room = if survives { p.memory.persistent } else { p.memory.transient };
        if slice.region != region || slice.end() > room.0 || slice.bytes != value.spec.bytes(&p.graph.bounds) {
            return Some(format!("{v} lies at {slice:?}"));
        }
        let (birth, read) = life(p, v);
        // If the new value of a state is written directly into its storage, the old value is live up to its last read
        // only.
        let replaced = p.graph.updates.iter().any(|&(state, new)| state == v && home(p, new) == Some(v));
        let death = if survives && !replaced { usize::MAX } else { read };
        if loaded && first_read(p, v) < birth {
            return Some(format!("{v} is read before it is loaded"));
        }
        lives.push(Life { v, slice, birth, death });
    }
    for (i, a) in lives.iter().enumerate() {
        if let Some(b) = lives[i + 1..].iter().find(|b| clash(p, a, b)) {
            return Some(format!("{} and {} clash", a.v, b.v));
        }
    }
    scratch(p, &lives)
}

/// Returns the state into whose storage the new value `v` is written directly.
fn home(p: &Plan, v: ValueId) -> Option<ValueId> {
    let persistent = p.memory.slice(v).filter(|slice| slice.region == Region::Persistent);
    let mut updates = p.graph.updates.iter().filter(|(_, new)| *new == v).map(|(state, _)| *state);
    updates.find(|&state| persistent.is_some() && p.memory.slice(state) == persistent)
}

fn loads(p: &Plan, v: ValueId) -> usize {
    p.schedule.loads().filter(|&loaded| loaded == v).count()
}

/// Instant of the first instruction that reads a value; `usize::MAX` if there is none.
fn first_read(p: &Plan, v: ValueId) -> usize {
    let reads = |instr: &Instr| match *instr {
        Instr::Launch(id) => p.graph.node(id).inputs.contains(&v),
        Instr::Copy { from, .. } => from == v,
        Instr::Load(_) => false,
    };
    p.schedule.instrs.iter().position(reads).map_or(usize::MAX, |i| i + 1)
}

fn life(p: &Plan, v: ValueId) -> (usize, usize) {
    let (mut birth, mut death) = (0, 0);
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        match *instr {
            Instr::Launch(id) => {
                let node = p.graph.node(id);
                if node.inputs.contains(&v) {
                    death = i + 1;
                }
                if node.outputs.contains(&Some(v)) {
                    birth = i + 1;
                }
            }
            Instr::Copy { from, .. } if from == v => death = i + 1,
            Instr::Load(loaded) if loaded == v => birth = i + 1,
            Instr::Load(_) | Instr::Copy { .. } => {}
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

/// Describes an error in the workspaces: each must be inside the transient region and overlap no value that is live
/// at its instruction.
fn scratch(p: &Plan, lives: &[Life]) -> Option<String> {
    for (i, space) in p.memory.workspaces.iter().enumerate() {
        let Some(space) = space else { continue };
        let alive = |l: &&Life| l.birth <= i + 1 && i < l.death;
        let outside = space.region != Region::Transient || space.end() > p.memory.transient.0;
        if outside || lives.iter().filter(alive).any(|l| l.slice.overlaps(space)) {
            return Some(format!("the scratch of instruction {i} is not its own"));
        }
    }
    None
}
