//! What a run says of its devices, kernels and memory when it begins. Invariant: every figure is read from the plan.

use super::bounds::tokens;
use crate::budget::Budget;
use exec::Executor;
use graph::{Bytes, Op};
use plan::HOST;
use plan::{Precision, Program};

/// How each device computes, for a line each; replicas of the CPU are alike.
pub(super) fn computing_lines(executors: &[Executor], precision: Precision) -> Vec<String> {
    let alike = executors.first().map_or(1, |executor| executor.program().lanes());
    executors.iter().step_by(alike).map(|executor| computing_line(executor, precision)).collect()
}

/// The device of an executor, or the CPU of which it is one of several lanes.
pub(super) fn name(executor: &Executor) -> String {
    let device = executor.device();
    match executor.program().lanes() {
        1 => device.name(),
        lanes => format!("cpu ({}, {lanes} replicas of {})", device.arithmetic(), threads(device.units())),
    }
}

/// So many threads, in words.
pub fn threads(count: u64) -> String {
    if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") }
}

/// How a program is computed, as a run prints it when it begins: attention, products, precision, and what bits depend on.
fn computing_line(executor: &Executor, precision: Precision) -> String {
    let program = executor.program();
    let nodes = || program.plans().iter().flat_map(|(_, p)| p.graph.nodes.iter().zip(&p.kernels));
    let kernel = |is: fn(&Op) -> bool| Some(nodes().find(|(node, _)| is(&node.op))?.1.name());
    let attention = kernel(|op| matches!(op, Op::Attention(_))).unwrap_or("none");
    let linear = kernel(|op| matches!(op, Op::Linear(_))).unwrap_or("none");
    let (device, with) = (name(executor), executor.device().arithmetic());
    let by = executor.device().products_by().map_or_else(String::new, |by| format!(" by {by}"));
    format!("{device}: precision {}, attention: {attention}, products: {linear}{by} ({with})", precision.name())
}

/// The plan beside the budget, in one line, with what the process takes of a CPU's budget, or what a GPU's run keeps of
/// values (`kept`) in the host's memory.
pub(crate) fn memory_lines(budget: &Budget, program: &Program, kept: Bytes, what: &str) -> String {
    let line = memory_line(program, budget.bytes);
    if program.target().space == HOST {
        return match budget.process_bytes() {
            Bytes::ZERO => line,
            process => format!("{line}; the process itself up to {process}"),
        };
    }
    format!("{line}; up to {kept} of host memory for {what} in transit")
}

/// The plan beside the budget.
fn memory_line(program: &Program, budget: Bytes) -> String {
    let (tokens, peak, ledger) = (tokens(program), program.peak(), program.ledger().line());
    let lanes = match program.lanes() {
        1 => String::new(),
        lanes => format!(" in {lanes} replicas"),
    };
    let line = format!("memory budget {budget}; planned {peak} at {tokens} tokens a step{lanes} ({ledger})");
    let staging: Bytes = program.host_staging().into_iter().sum();
    let line = match staging {
        Bytes::ZERO => line,
        staging => format!("{line}; host staging {staging}"),
    };
    match program.streamed() {
        Bytes::ZERO => line,
        streamed => format!("{line}; weights stream from disk: {streamed} per step"),
    }
}
