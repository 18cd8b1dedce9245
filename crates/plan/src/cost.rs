//! Predicted execution time by the roofline model: each launch takes the longer of its arithmetic and its
//! memory traffic, multiplied by a measured slowdown of its kernel, plus a launch overhead. Invariant: no
//! tensor size is computed here.

use crate::kernels::widened;
use crate::schedule::{is_launched, queue};
use crate::{Instr, KernelId, Link, Plan, Queue, Schedule, Target};
use plimsoll_graph::ops::{Move, OperandFormat};
use plimsoll_graph::{Bytes, Counts, DType, Graph, Node, NodeId, Op, PrecisionClass, TensorSpec};
use std::collections::VecDeque;

/// Predicted seconds of a copy in a queue.
pub(crate) fn copy_seconds(target: &Target, queue: Queue, bytes: Bytes) -> f64 {
    let rates = &target.rates;
    let link = rates.link.unwrap_or_default();
    let bytes = bytes.0 as f64;
    match queue {
        // Read and written once.
        Queue::Compute => 2.0 * bytes / rates.memory + rates.launch,
        Queue::In => bytes / link.to_device + link.latency,
        Queue::Out => bytes / link.to_host + link.latency,
        Queue::Read | Queue::Write => bytes / rates.storage,
    }
}

/// Predicted seconds of a step of size `counts`: the sum of [`instruction_seconds`].
pub fn plan_seconds(plan: &Plan, target: &Target, counts: Counts) -> f64 {
    instruction_seconds(plan, target, counts).into_iter().sum()
}

/// Predicted seconds by which each instruction of a plan delays the kernels of a step of size `counts`: the instructions are
/// replayed over the queues of the device. A launch takes its own time, longer by a measured factor of the link while
/// copies run. A move takes the time of its own queue from its start on, longer by another factor while copies run in the
/// other direction, and the wait for it delays the kernels by what is left of that time. A copy within the arena runs among
/// the kernels.
pub fn instruction_seconds(plan: &Plan, target: &Target, counts: Counts) -> Vec<f64> {
    replayed(&plan.graph, &plan.schedule, target, counts)
}

/// As [`instruction_seconds`], of a schedule without kernels and addresses.
pub(crate) fn replayed(graph: &Graph, schedule: &Schedule, target: &Target, counts: Counts) -> Vec<f64> {
    let mut queues = CopyQueues::new(target.rates.link.unwrap_or_default());
    let mut delays = Vec::with_capacity(schedule.instrs.len());
    for instr in &schedule.instrs {
        delays.push(match *instr {
            Instr::Launch(id) => queues.launch(node_seconds(graph, graph.node(id), target, counts)),
            Instr::Start(id) => {
                let seconds = node_seconds(graph, graph.node(id), target, counts);
                match queue(graph, id) {
                    Some(Queue::Compute) | None => queues.launch(seconds),
                    Some(queue) => {
                        queues.queues[queue as usize].push_back(RunningCopy { id, seconds });
                        0.0
                    }
                }
            }
            Instr::Wait(id) => queues.wait(id),
        });
    }
    delays
}

/// The copies of a step that were started and are not complete.
struct CopyQueues {
    link: Link,
    /// By queue, the oldest first. Only the oldest of each queue runs.
    queues: [VecDeque<RunningCopy>; Queue::ALL.len()],
}

/// A copy that is not complete.
struct RunningCopy {
    id: NodeId,
    /// Remaining seconds if nothing else runs.
    seconds: f64,
}

impl CopyQueues {
    fn new(link: Link) -> Self {
        Self { link, queues: Default::default() }
    }

    fn is_busy(&self, queue: Queue) -> bool {
        !self.queues[queue as usize].is_empty()
    }

    /// Seconds of a launch that takes `seconds_alone` without copies.
    fn launch(&mut self, seconds_alone: f64) -> f64 {
        let mut remaining = seconds_alone;
        let mut elapsed = 0.0;
        while remaining > 0.0 {
            let link_is_busy = self.is_busy(Queue::In) || self.is_busy(Queue::Out);
            let slower = if link_is_busy { self.link.slower_kernels } else { 1.0 };
            let seconds = self.advance(remaining * slower);
            elapsed += seconds;
            // Not subtracted when the launch is complete: rounding could leave a remainder, and the loop one more turn.
            remaining = if seconds < remaining * slower { remaining - seconds / slower } else { 0.0 };
        }
        elapsed
    }

    /// Seconds until a copy is complete.
    fn wait(&mut self, id: NodeId) -> f64 {
        let mut elapsed = 0.0;
        while self.queues.iter().flatten().any(|copy| copy.id == id) {
            elapsed += self.advance(f64::INFINITY);
        }
        elapsed
    }

    /// Advances to the completion of the next copy, at most by `limit` seconds. Returns the elapsed seconds.
    fn advance(&mut self, limit: f64) -> f64 {
        let slower = Queue::ALL.map(|queue| {
            let other = match queue {
                Queue::In => Queue::Out,
                Queue::Out => Queue::In,
                Queue::Compute | Queue::Read | Queue::Write => return 1.0,
            };
            if self.is_busy(other) { self.link.slower_copies } else { 1.0 }
        });
        let running = self.queues.iter().zip(slower);
        let completions = running.filter_map(|(queue, slower)| Some(queue.front()?.seconds * slower));
        let elapsed = completions.fold(limit, f64::min);
        for (queue, slower) in self.queues.iter_mut().zip(slower) {
            let Some(copy) = queue.front_mut() else { continue };
            // Compared, not subtracted: the copy that decided `elapsed` is complete whatever the rounding.
            if copy.seconds * slower <= elapsed {
                queue.pop_front();
            } else {
                copy.seconds -= elapsed / slower;
            }
        }
        elapsed
    }
}

/// Predicted seconds of the kernels of a graph without moves, in a step of size `counts` on `target`.
pub fn step_seconds(graph: &Graph, target: &Target, counts: Counts) -> f64 {
    let kernels = graph.nodes.iter().filter(|node| is_launched(node));
    kernels.map(|node| node_seconds(graph, node, target, counts)).sum()
}

/// Predicted seconds of one node in a step of size `counts`; of a move, those of the copy alone; zero for a view, which
/// has no instruction.
pub fn node_seconds(graph: &Graph, node: &Node, target: &Target, counts: Counts) -> f64 {
    if let Op::Move(Move { to }) = node.op {
        let from = graph.spec(node.inputs[0]);
        return copy_seconds(target, Queue::of(from.space, to), from.bytes_at(counts));
    }
    let ins: Vec<&TensorSpec> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
    let outs: Vec<&TensorSpec> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
    if outs.is_empty() || node.op.is_view() {
        return 0.0;
    }
    let rules = node.op.rules();
    let cost = rules.cost(&ins, &outs, &graph.bounds, counts);
    let kernel = target.kernel_of(graph, node).ok();
    let is_widened = kernel.is_some_and(KernelId::widens);
    let rates = &target.rates;
    let rate = match rules.precision() {
        PrecisionClass::Matmul if !is_widened => {
            // A training matmul may mix 16-bit operands with an f32 accumulator; the narrowest operand decides the rate.
            let narrowest = ins.iter().map(|spec| spec.dtype).min_by_key(|dtype| dtype.size());
            let storage = narrowest.unwrap_or(DType::F32);
            let stored = rates.matmul(OperandFormat::Stored, storage);
            rates.matmul(node.op.operands(), storage).or(stored).unwrap_or(rates.f32)
        }
        PrecisionClass::Matmul | PrecisionClass::Elementwise | PrecisionClass::Sensitive => rates.f32,
    };
    let arithmetic = cost.flops / rate;
    // Each f32 copy of an operand is written once and read once.
    let copies = if is_widened { 2.0 * widened(graph, node).0 as f64 } else { 0.0 };
    let traffic = (cost.bytes + copies) / target.rates.memory;
    let slower = kernel.and_then(|kernel| target.slower.get(kernel.name())).copied().unwrap_or(1.0);
    arithmetic.max(traffic) * slower + target.rates.launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::ops::Epilogue;
    use plimsoll_graph::ops::Linear;
    use plimsoll_graph::{Bounds, Builder, Dim, Op, Space};

    /// Seconds of one linear with operands of type `dtype`.
    fn product(target: &Target, dtype: DType) -> f64 {
        let mut g = Builder::new(Bounds { tokens: 1000, sequences: 1, longest: 1000, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(512)], dtype);
        let w = g.input("w", &[Dim::Fixed(512), Dim::Fixed(512)], dtype);
        let y = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[x, w]);
        g.output("y", y);
        let graph = g.finish().unwrap();
        node_seconds(&graph, &graph.nodes[0], target, graph.bounds.full()) - target.rates.launch
    }

    #[test]
    fn what_was_measured_of_a_kernel_counts() {
        let mut target = Target::named("cpu").unwrap();
        let before = product(&target, DType::F32);
        target.slower.insert("product_f32".to_owned(), 2.5);
        let ratio = product(&target, DType::F32) / before;
        assert!((ratio - 2.5).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn what_a_kernel_widens_is_computed_in_f32() {
        let target = Target::named("cpu").unwrap();
        let (narrow, wide) = (product(&target, DType::Bf16), product(&target, DType::F32));
        assert!(narrow >= wide, "{narrow} {wide}");
    }

    /// Nodes 0 and 1 are moves to the host, node 2 is a move to the device, and node 3 a linear layer.
    fn moves_and_a_launch() -> Graph {
        let mut g = Builder::new(Bounds { tokens: 1000, sequences: 1, longest: 1000, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(512)], DType::F32);
        let w = g.input("w", &[Dim::Fixed(512), Dim::Fixed(512)], DType::F32);
        let in_host = g.one(Op::Move(Move { to: Space::Host }), &[x]);
        g.one(Op::Move(Move { to: Space::Host }), &[x]);
        let back = g.one(Op::Move(Move { to: Space::Device }), &[in_host]);
        let y = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[back, w]);
        g.output("y", y);
        g.finish().unwrap()
    }

    /// Copies delay and slow the launches and the copies of the other direction that run beside them, and no others. Times
    /// are in units of the launch alone.
    #[test]
    fn launches_are_slower_while_a_copy_is_in_flight() {
        use Instr::{Launch, Start, Wait};
        let graph = moves_and_a_launch();
        let [out, out_too, back, layer] = [0, 1, 2, 3].map(NodeId::at);
        let full = graph.bounds.full();
        let mut target = Target::named("h100").unwrap();
        let alone = node_seconds(&graph, graph.node(layer), &target, full);
        let bytes = graph.spec(graph.node(out).inputs[0]).bytes_at(full).0 as f64;
        // (instructions, seconds of a copy, of which latency, factors of slower kernels and copies, expected seconds)
        type Case<'a> = (&'a [Instr], f64, f64, [f64; 2], &'a [f64]);
        let cases: [Case<'_>; 12] = [
            (&[Launch(layer)], 1.0, 0.5, [2.0, 1.0], &[1.0]),
            // The copy runs longer than the launch.
            (&[Start(out), Launch(layer), Wait(out)], 10.0, 0.5, [2.0, 1.0], &[0.0, 2.0, 8.0]),
            // The copy ends when the launch has done half of its work; the rest takes its usual time.
            (&[Start(out), Launch(layer), Wait(out)], 1.0, 0.5, [2.0, 1.0], &[0.0, 1.5, 0.0]),
            (&[Start(out), Launch(layer), Launch(layer)], 1.0, 0.5, [2.0, 1.0], &[0.0, 1.5, 1.0]),
            // The copy is complete before the launch.
            (&[Start(out), Wait(out), Launch(layer)], 3.0, 0.5, [2.0, 1.0], &[0.0, 3.0, 1.0]),
            (&[Start(out), Launch(layer), Wait(out)], 10.0, 0.5, [1.0, 1.0], &[0.0, 1.0, 9.0]),
            // Copies of one queue run one after another, each with its latency; those of two queues run at the same time.
            (
                &[Start(out), Start(out_too), Wait(out), Wait(out_too)],
                3.0,
                2.0,
                [2.0, 1.0],
                &[0.0, 0.0, 3.0, 3.0],
            ),
            (&[Start(out), Start(back), Wait(out), Wait(back)], 3.0, 2.0, [2.0, 1.0], &[0.0, 0.0, 3.0, 0.0]),
            // The copy of the other direction begins with the first, or when a launch has taken a second of its three.
            (&[Start(out), Start(back), Wait(out), Wait(back)], 3.0, 2.0, [1.0, 1.5], &[0.0, 0.0, 4.5, 0.0]),
            (
                &[Start(out), Launch(layer), Start(back), Wait(out), Wait(back)],
                3.0,
                2.0,
                [1.0, 1.5],
                &[0.0, 1.0, 0.0, 3.0, 1.0],
            ),
            (
                &[Start(out), Start(out_too), Wait(out), Wait(out_too)],
                3.0,
                2.0,
                [1.0, 1.5],
                &[0.0, 0.0, 3.0, 3.0],
            ),
            (&[Start(out), Start(out_too), Wait(out_too)], 2.0, 2.0 - 1e-9, [2.0, 1.0], &[0.0, 0.0, 4.0]),
        ];
        for (instrs, copy, latency, [slower_kernels, slower_copies], expected) in cases {
            let rate = bytes / ((copy - latency) * alone);
            let latency = latency * alone;
            let link = Link { to_device: rate, to_host: rate, latency, slower_kernels, slower_copies };
            target.rates.link = Some(link);
            let found = replayed(&graph, &Schedule { instrs: instrs.to_vec() }, &target, full);
            let equal = found.iter().zip(expected).all(|(found, wanted)| (found / alone - wanted).abs() < 1e-6);
            assert!(
                equal && found.len() == expected.len(),
                "{instrs:?}: {found:?} / {alone}, not {expected:?}"
            );
        }
    }
}
