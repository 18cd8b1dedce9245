//! A second checker, by definition and in quadratic time: what two values in common bytes may do.
//! Invariant: it knows lives and overlaps only; it never replays anything.

use plimsoll_graph::{Role, ValueId};
use plimsoll_plan::{Instr, Plan, Region, Slice};

/// A value's bytes and when they must not change: from the instant `birth` at which they are written (0 is
/// before the first instruction) up to the last read.
struct Life {
    v: ValueId,
    slice: Slice,
    birth: usize,
    death: usize,
}

/// What is wrong with the addresses of a plan in the order of its schedule, if anything is.
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
        // A state whose new value is written into its storage lives up to its last read, and the new one after it.
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

/// The state in whose storage its new value `v` is written.
fn home(p: &Plan, v: ValueId) -> Option<ValueId> {
    let persistent = p.memory.slice(v).filter(|slice| slice.region == Region::Persistent);
    let mut updates = p.graph.updates.iter().filter(|(_, new)| *new == v).map(|(state, _)| *state);
    updates.find(|&state| persistent.is_some() && p.memory.slice(state) == persistent)
}

fn loads(p: &Plan, v: ValueId) -> usize {
    p.schedule.loads().filter(|&loaded| loaded == v).count()
}

/// The instant of the first instruction that reads a value.
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
    // Read last by the very instruction that writes the other: only in place.
    old.death == new.birth && !in_place(p, old, new)
}

fn in_place(p: &Plan, old: &Life, new: &Life) -> bool {
    let Instr::Launch(id) = p.schedule.instrs[new.birth - 1] else { return false };
    let node = p.graph.node(id);
    let k = node.outputs.iter().position(|o| *o == Some(new.v)).expect("it is born here");
    let mut reads = (0..node.inputs.len()).filter(|&j| node.inputs[j] == old.v);
    old.slice == new.slice && reads.all(|j| node.op.rules().alias(k).contains(&j))
}

/// A kernel's scratch lies beside everything that is alive while it runs.
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
