//! Text lines about devices, kernels and memory printed at the start of a run. Invariant: every figure is read from
//! the plan.

use super::bounds::tokens;
use crate::budget::Budget;
use exec::Executor;
use graph::{Bytes, Op};
use plan::HOST;
use plan::{Precision, Program};

/// One line per device about its arithmetic and kernels; the identical replicas of a CPU get one line.
pub(super) fn computing_lines(executors: &[Executor], precision: Precision) -> Vec<String> {
    let alike = executors.first().map_or(1, |executor| executor.program().lanes());
    executors.iter().step_by(alike).map(|executor| computing_line(executor, precision)).collect()
}

/// Name of an executor's device, or of the whole CPU if the executor is one of several replicas.
pub fn name(executor: &Executor) -> String {
    let device = executor.device();
    match executor.program().lanes() {
        1 => device.name(),
        lanes => format!("cpu ({}, {lanes} lanes of {})", device.arithmetic(), threads(device.units())),
    }
}

/// Formats a number of threads.
pub fn threads(count: u64) -> String {
    if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") }
}

/// Describes how an executor computes: precision, attention kernel, matmul kernel, and the arithmetic that result
/// bits depend on.
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

/// Compares the plan with the budget in one line. For a CPU the line adds the process's share of the budget, for a
/// GPU the
/// `kept` bytes of host memory held for values that `what` names.
pub(crate) fn memory_lines(budget: &Budget, program: &Program, kept: Bytes, what: &str) -> String {
    let line = memory_line(program, budget.bytes);
    if program.target().space == HOST {
        return match budget.process_bytes() {
            Bytes::ZERO => line,
            process => format!("{line}; the process itself up to {process}"),
        };
    }
    format!("{line}; up to {kept} of the host's memory for {what} on their way")
}

/// Compares the plan with the budget.
fn memory_line(program: &Program, budget: Bytes) -> String {
    let (tokens, peak, ledger) = (tokens(program), program.peak(), program.ledger().line());
    let lanes = match program.lanes() {
        1 => String::new(),
        lanes => format!(" in {lanes} lanes"),
    };
    let line = format!("memory line {budget}; planned {peak} at {tokens} tokens a step{lanes} ({ledger})");
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
