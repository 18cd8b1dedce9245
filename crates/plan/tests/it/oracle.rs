//! A second plan checker, from the definition and in quadratic time: compares every pair of values that share bytes.
//! Invariant: it uses lifetimes and overlaps only, and replays nothing, so that it is independent of the crate's
//! checker.

use plimsoll_graph::{Bytes, Def, Op, Role, Space, ValueId};
use plimsoll_plan::{Instr, Plan, Region, Slice};
use std::collections::BTreeSet;
use std::ops::Range;

/// Bytes of a value that views cut nowhere, and their lifetime, during which they must not change: from the instant `birth`
/// from which on they are written (0 is before the first instruction, i + 1 is instruction i) to the last read.
struct Life {
    v: ValueId,
    /// The bytes as a range of the value.
    range: Range<u64>,
    slice: Slice,
    birth: usize,
    death: usize,
}

/// Bytes of a value that is no view.
#[derive(Clone)]
struct Piece {
    v: ValueId,
    range: Range<u64>,
}

impl Piece {
    fn overlaps(&self, v: ValueId, range: &Range<u64>) -> bool {
        // An empty value has one empty piece.
        let is_empty = self.range.is_empty() && range.is_empty();
        self.v == v && (is_empty || self.range.start < range.end && range.start < self.range.end)
    }
}

/// The bytes of every value in terms of values that are no views, indexed by value.
fn pieces(p: &Plan) -> Vec<Vec<Piece>> {
    let bytes = |v: ValueId| p.graph.spec(v).bytes(&p.graph.bounds).0;
    let mut all: Vec<Vec<Piece>> =
        p.graph.values().map(|(v, _)| vec![Piece { v, range: 0..bytes(v) }]).collect();
    for node in p.graph.nodes.iter().filter(|node| node.op.is_view()) {
        let result = node.outputs[0].expect("a view has a result");
        let joined: Vec<Piece> = node.inputs.iter().flat_map(|v| all[v.index()].clone()).collect();
        let first = if let Op::Part(part) = node.op { first_byte(p, node.inputs[0], part.first) } else { 0 };
        all[result.index()] = cut(&joined, first..first + bytes(result));
    }
    all
}

/// A range of the bytes of pieces that lie one behind another.
fn cut(pieces: &[Piece], range: Range<u64>) -> Vec<Piece> {
    let mut start = 0;
    let mut found = vec![];
    for piece in pieces {
        let end = start + piece.range.end - piece.range.start;
        let first = range.start.max(start);
        let last = range.end.min(end);
        if first < last {
            let at = |byte: u64| piece.range.start + byte - start;
            found.push(Piece { v: piece.v, range: at(first)..at(last) });
        }
        start = end;
    }
    found
}

fn first_byte(p: &Plan, v: ValueId, row: u64) -> u64 {
    p.graph.spec(v).row_elements() * p.graph.spec(v).dtype.size() * row
}

/// Describes a view that is not where its operand is.
fn misplaced_view(p: &Plan) -> Option<String> {
    let inside = |whole: Slice, offset: u64, v: ValueId| Slice {
        offset: whole.offset + offset,
        bytes: p.graph.spec(v).bytes(&p.graph.bounds),
        ..whole
    };
    for node in p.graph.nodes.iter().filter(|node| node.op.is_view()) {
        let result = node.outputs[0].expect("a view has a result");
        let mut offset = 0;
        for &operand in &node.inputs {
            let (Some(of_result), Some(of_operand)) = (p.memory.slice(result), p.memory.slice(operand)) else {
                return Some(format!("{result} has no slice"));
            };
            let fits = if let Op::Part(part) = node.op {
                of_result == inside(of_operand, first_byte(p, operand, part.first), result)
            } else {
                of_operand == inside(of_result, offset, operand)
            };
            if !fits {
                return Some(format!("{result} is not in {operand}"));
            }
            offset += of_operand.bytes.0;
        }
    }
    None
}

/// Describes the first error in the addresses of a plan; `None` if the plan is correct.
pub fn fault(p: &Plan) -> Option<String> {
    let pieces = pieces(p);
    if let Some(fault) = misplaced_view(p).or_else(|| moves(p, &pieces)) {
        return Some(fault);
    }
    let mut lives = vec![];
    let last = last_reads(p);
    let written = written(p);
    // The pieces of each value, with the values that have them.
    let mut of_value: Vec<Vec<(usize, &Piece)>> = p.graph.values.iter().map(|_| vec![]).collect();
    for (reader, pieces) in pieces.iter().enumerate() {
        pieces.iter().for_each(|piece| of_value[piece.v.index()].push((reader, piece)));
    }
    let is_view = |v: ValueId| match p.graph.value(v).def {
        Def::Node(id, _) => p.graph.node(id).op.is_view(),
        Def::Source => false,
    };
    for (v, value) in p.graph.values().filter(|(v, _)| !is_view(*v)) {
        let Some(slice) = p.memory.slice(v) else { return Some(format!("{v} has no slice")) };
        let is_kept = value.def == Def::Source && matches!(value.spec.role, Role::Param(_) | Role::State(_));
        let survives = is_kept || home(p, &pieces, v).is_some();
        let region = if survives { Region::Persistent } else { Region::Transient };
        let room = p.memory.region_sizes(value.spec.space).of(region);
        let fits = slice.space == value.spec.space && slice.region == region && slice.end() <= room.0;
        if !fits || slice.bytes != value.spec.bytes(&p.graph.bounds) {
            return Some(format!("{v} lies at {slice:?}"));
        }
        // Views read ranges of the value, whose borders cut it.
        let of_v = &of_value[v.index()];
        let mut borders: BTreeSet<u64> =
            of_v.iter().flat_map(|(_, piece)| [piece.range.start, piece.range.end]).collect();
        borders.extend([0, slice.bytes.0]);
        let borders: Vec<u64> = borders.into_iter().collect();
        let (birth, complete) = written[v.index()];
        // If the new value of a state is written directly into its storage, the old value is live up to its last read
        // only.
        let replaced = p.graph.updates.iter().any(|&(state, new)| {
            state == v && p.memory.persistent_slice(new).is_some() && p.memory.slice(new) == p.memory.slice(v)
        });
        let ranges = borders.windows(2).map(|pair| pair[0]..pair[1]);
        let empty = (slice.bytes == Bytes::ZERO).then_some(0..0);
        for range in ranges.chain(empty) {
            let readers = of_v.iter().filter(|(_, piece)| piece.overlaps(v, &range));
            let read = readers.map(|(reader, _)| last[*reader]).max().unwrap_or(0);
            let death = if survives && !replaced { usize::MAX } else { read.max(complete).max(birth) };
            let part =
                Slice { offset: slice.offset + range.start, bytes: Bytes(range.end - range.start), ..slice };
            lives.push(Life { v, range, slice: part, birth, death });
        }
    }
    for (i, a) in lives.iter().enumerate() {
        if let Some(b) = lives[i + 1..].iter().find(|b| clash(p, &pieces, a, b)) {
            return Some(format!("{} and {} clash", a.v, b.v));
        }
    }
    scratch(p, &lives)
}

/// Describes an error in the order of instructions: each move is started once and waited for once, after its operand is complete and
/// before its result is read.
fn moves(p: &Plan, pieces: &[Vec<Piece>]) -> Option<String> {
    let first_read = first_reads(p, pieces);
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
        if start > wait || first_read[v.index()] <= wait {
            return Some(format!("{v} is read before the wait for {id}"));
        }
    }
    // What a launch writes is read after the launch.
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = *instr else { continue };
        if let Some(v) = p.graph.node(id).outputs.iter().flatten().find(|v| first_read[v.index()] <= i) {
            return Some(format!("{v} is read before it is computed"));
        }
    }
    None
}

/// Returns the state into whose storage `v`, which is its new value or joined to it, is written directly.
fn home(p: &Plan, pieces: &[Vec<Piece>], v: ValueId) -> Option<ValueId> {
    let persistent = p.memory.persistent_slice(v)?;
    let has_place = |&&(state, new): &&(ValueId, ValueId)| {
        let Some(whole) = p.memory.persistent_slice(state) else { return false };
        let mut offset = whole.offset;
        pieces[new.index()].iter().any(|piece| {
            let bytes = piece.range.end - piece.range.start;
            let found = Slice { offset, bytes: Bytes(bytes), ..whole } == persistent;
            offset += bytes;
            piece.v == v && found
        })
    };
    p.graph.updates.iter().find(has_place).map(|(state, _)| *state)
}

/// Index of the first launch or start that reads each value, or a view with bytes of it; `usize::MAX` if there is none.
fn first_reads(p: &Plan, pieces: &[Vec<Piece>]) -> Vec<usize> {
    let mut first = vec![usize::MAX; p.graph.values.len()];
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let (Instr::Launch(id) | Instr::Start(id)) = *instr else { continue };
        for input in &p.graph.node(id).inputs {
            for v in pieces[input.index()].iter().map(|piece| piece.v).chain([*input]) {
                first[v.index()] = first[v.index()].min(i);
            }
        }
    }
    first
}

/// The instants at which each value begins to be written, and at which it is complete.
fn written(p: &Plan) -> Vec<(usize, usize)> {
    let mut written = vec![(0, 0); p.graph.values.len()];
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let (Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) = *instr;
        for v in p.graph.node(id).outputs.iter().flatten() {
            // A move may write at any instant until it was waited for.
            match instr {
                Instr::Launch(_) | Instr::Start(_) => written[v.index()].0 = i + 1,
                Instr::Wait(_) => written[v.index()].1 = i + 1,
            }
        }
    }
    written
}

/// The last instant at which an instruction reads each value as such; zero if there is none.
fn last_reads(p: &Plan) -> Vec<usize> {
    let mut last = vec![0; p.graph.values.len()];
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let (Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) = *instr;
        p.graph.node(id).inputs.iter().for_each(|v| last[v.index()] = i + 1);
    }
    p.graph.outputs.iter().for_each(|(_, v)| last[v.index()] = p.schedule.instrs.len() + 1);
    last
}

fn clash(p: &Plan, pieces: &[Vec<Piece>], a: &Life, b: &Life) -> bool {
    if !a.slice.overlaps(&b.slice) {
        return false;
    }
    let (old, new) = if a.birth <= b.birth { (a, b) } else { (b, a) };
    if old.birth == new.birth || old.death > new.birth {
        return true;
    }
    // The instruction that writes the new value is the last reader of the old one: allowed only for in-place ops.
    old.death == new.birth && !in_place(p, pieces, old, new)
}

fn in_place(p: &Plan, pieces: &[Vec<Piece>], old: &Life, new: &Life) -> bool {
    let Instr::Launch(id) = p.schedule.instrs[new.birth - 1] else { return false };
    let node = p.graph.node(id);
    let k = node.outputs.iter().position(|o| *o == Some(new.v)).expect("it is born here");
    let reads_old = |v: &ValueId| pieces[v.index()].iter().any(|piece| piece.overlaps(old.v, &old.range));
    let mut readers = (0..node.inputs.len()).filter(|&j| reads_old(&node.inputs[j]));
    readers.all(|j| {
        node.op.rules().alias(k).contains(&j) && p.memory.slice(node.inputs[j]) == p.memory.slice(new.v)
    })
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
