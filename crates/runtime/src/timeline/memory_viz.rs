//! Snapshots in the format of `torch.cuda.memory._snapshot`, for the viewer at pytorch.org/memory_viz: the arena of each
//! program is a segment of a device, and its tensors are allocated and freed in a trace. Invariant: the blocks of a segment
//! fill it from its first to its last byte, and hold the tensors that live for the whole run.

use super::pickle::PickleValue;
use plimsoll_plan::{Timeline, TimelineTensor};

/// Address of the first byte of an arena in a snapshot. Offsets are the lower digits of an address in hexadecimal.
pub const BASE: u64 = 1 << 40;

/// The pickle of a snapshot, with a device for each timeline. A title names each timeline in the stack of its tensors.
pub fn to_pickle(timelines: &[(String, &Timeline)]) -> Vec<u8> {
    let segments = timelines.iter().enumerate().map(|(device, (title, t))| segment(device, title, t)).collect();
    let traces = timelines.iter().map(|(title, timeline)| PickleValue::List(trace(title, timeline))).collect();
    PickleValue::Dict(vec![
        ("segments", PickleValue::List(segments)),
        ("device_traces", PickleValue::List(traces)),
    ])
    .to_bytes()
}

fn segment(device: usize, title: &str, timeline: &Timeline) -> PickleValue {
    let mut lasting: Vec<&TimelineTensor> = timeline.tensors.iter().filter(|t| t.plan.is_none()).collect();
    lasting.sort_by_key(|t| t.address);
    let mut blocks = vec![];
    let mut end = 0;
    for tensor in lasting {
        if tensor.address > end {
            blocks.push(block(end, tensor.address - end, None));
        }
        let frames = frames(title, timeline, tensor);
        blocks.push(block(tensor.address, tensor.bytes.0, Some(frames)));
        end = tensor.address + tensor.bytes.0;
    }
    if timeline.arena.0 > end {
        blocks.push(block(end, timeline.arena.0 - end, None));
    }
    let used: u64 = timeline.tensors.iter().filter(|t| t.plan.is_none()).map(|t| t.bytes.0).sum();
    PickleValue::Dict(vec![
        ("device", PickleValue::count(device as u64)),
        ("address", PickleValue::count(BASE)),
        ("total_size", PickleValue::count(timeline.arena.0)),
        ("allocated_size", PickleValue::count(used)),
        ("active_size", PickleValue::count(used)),
        ("requested_size", PickleValue::count(used)),
        ("stream", PickleValue::Int(0)),
        ("segment_type", PickleValue::text("large")),
        ("segment_pool_id", PickleValue::List(vec![PickleValue::Int(0), PickleValue::Int(0)])),
        ("is_expandable", PickleValue::Bool(false)),
        ("frames", PickleValue::List(vec![])),
        ("blocks", PickleValue::List(blocks)),
    ])
}

/// A block of a segment; without frames a free one.
fn block(offset: u64, bytes: u64, frames: Option<PickleValue>) -> PickleValue {
    let (state, requested) = if frames.is_some() { ("active_allocated", bytes) } else { ("inactive", 0) };
    PickleValue::Dict(vec![
        ("address", PickleValue::count(BASE + offset)),
        ("size", PickleValue::count(bytes)),
        ("requested_size", PickleValue::count(requested)),
        ("state", PickleValue::text(state)),
        ("frames", frames.unwrap_or(PickleValue::List(vec![]))),
    ])
}

/// The stack that the viewer shows for a tensor: its name, its ledger line, and its plan with the instruction that writes it.
fn frames(title: &str, timeline: &Timeline, tensor: &TimelineTensor) -> PickleValue {
    let plan = tensor.plan.map_or(title, |plan| &timeline.plans[plan].name);
    let phase = tensor.phase.map_or("whole run", |phase| super::trace::name(phase));
    let mut frames = vec![frame(plan, tensor.birth, &tensor.name), frame(plan, tensor.birth, &tensor.line)];
    if let Some(layer) = tensor.layer {
        frames.push(frame(plan, tensor.birth, &format!("layer {layer}")));
    }
    frames.push(frame(plan, tensor.birth, phase));
    PickleValue::List(frames)
}

fn frame(filename: &str, line: usize, name: &str) -> PickleValue {
    let line = PickleValue::count(line as u64);
    PickleValue::Dict(vec![
        ("filename", PickleValue::text(filename)),
        ("line", line),
        ("name", PickleValue::text(name)),
    ])
}

/// Allocations and frees in the order of the instructions. Before the tensors that an instruction writes are allocated,
/// those that were last live at an earlier one are freed, because they may have the same addresses.
fn trace(title: &str, timeline: &Timeline) -> Vec<PickleValue> {
    let count = timeline.instructions.len();
    let mut born = vec![vec![]; count];
    let mut dead = vec![vec![]; count + 1];
    for tensor in timeline.tensors.iter().filter(|_| count > 0) {
        born[tensor.birth].push(tensor);
        // A tensor is live during its last instruction, so it is freed before the next. Persistent tensors are never freed.
        if tensor.plan.is_some() {
            dead[tensor.death + 1].push(tensor);
        }
    }
    let mut events = vec![event("segment_alloc", 0, timeline.arena.0, 0.0, PickleValue::List(vec![]))];
    let mut seconds = 0.0;
    for i in 0..=count {
        for &tensor in &dead[i] {
            for action in ["free_requested", "free_completed"] {
                let frames = frames(title, timeline, tensor);
                events.push(event(action, tensor.address, tensor.bytes.0, seconds, frames));
            }
        }
        if i < count {
            for &tensor in &born[i] {
                let frames = frames(title, timeline, tensor);
                events.push(event("alloc", tensor.address, tensor.bytes.0, seconds, frames));
            }
            seconds += timeline.instructions[i].seconds;
        }
    }
    events
}

/// An entry of `device_traces`. `seconds` is the time since the start of the first instruction.
fn event(action: &str, offset: u64, bytes: u64, seconds: f64, frames: PickleValue) -> PickleValue {
    PickleValue::Dict(vec![
        ("action", PickleValue::text(action)),
        ("addr", PickleValue::count(BASE + offset)),
        ("size", PickleValue::count(bytes)),
        ("stream", PickleValue::Int(0)),
        ("time_us", PickleValue::Int((1e6 * seconds) as i64)),
        ("frames", frames),
    ])
}
