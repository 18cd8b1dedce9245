//! Text lines that a run logs at its start: devices, kernels, precision and planned memory. Invariant: every
//! number is read from the plan or the budget.

use super::bounds::tokens;
use crate::budget::Budget;
use crate::price::streamed_from;
use plimsoll_exec::{DeviceInfo, Executor};
use plimsoll_graph::{Bytes, Op, Space};
use plimsoll_plan::{Precision, Program};

/// One line per device for the reader of a run: device and precision. [`device_lines`] has the kernels.
pub(super) fn device_words(executors: &[Executor], precision: Precision) -> Vec<String> {
    one_of_each_device(executors)
        .map(|executor| format!("computes in {} on {}", precision.name(), name(executor)))
        .collect()
}

/// The plan against the budget, with rounded sizes, for the reader of a run: [`memory_line_with_host`] has the bytes. `kept`
/// is the host memory for the values named by `what` of in-flight steps on a GPU.
pub(super) fn memory_words(budget: &Budget, program: &Program, kept: Bytes, what: &str) -> String {
    let on_host = program.target().arena_in_host();
    let peak = program.peak().rounded();
    let line = budget.bytes.rounded();
    let process = match budget.process_bytes() {
        process if on_host && process > Bytes::ZERO => {
            format!(" and up to {} for the rest of the process", process.rounded())
        }
        _ => String::new(),
    };
    let host = if on_host {
        String::new()
    } else {
        format!("; up to {} of host memory for {what} in transit", kept.rounded())
    };
    let streamed = match program.streamed() {
        Bytes::ZERO => String::new(),
        streamed => {
            format!(
                "; {} of weights are copied from {} in every step",
                streamed.rounded(),
                streamed_from(program)
            )
        }
    };
    format!(
        "memory: {peak} for the model{process}, budget {line}; {} tokens a step{host}{streamed}",
        tokens(program)
    )
}

/// One line per device with its precision and kernels. All CPU replicas together are one device.
pub(super) fn device_lines(executors: &[Executor], precision: Precision) -> Vec<String> {
    one_of_each_device(executors).map(|executor| device_line(executor, precision)).collect()
}

/// One executor of each device. On the CPU all executors are replicas of one program, so the first of them stands for all.
fn one_of_each_device(executors: &[Executor]) -> impl Iterator<Item = &Executor> {
    let alike = executors.first().map_or(1, |executor| executor.program().replicas());
    executors.iter().step_by(alike)
}

/// Name of an executor's device; for one of several CPU replicas, the CPU with the number of replicas and the
/// threads of each.
pub(super) fn name(executor: &Executor) -> String {
    let DeviceInfo { name, arithmetic, workers, .. } = executor.device().info();
    match executor.program().replicas() {
        1 => name,
        replicas => format!("cpu ({arithmetic}, {replicas} replicas of {})", threads(workers)),
    }
}

/// Formats a number of threads: `1 thread`, `8 threads`.
pub fn threads(count: u64) -> String {
    if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") }
}

/// Device, precision, attention kernel, GEMM kernel, and the device properties that determine the bits of
/// results. The kernels belong to the program's first attention node and first linear node.
fn device_line(executor: &Executor, precision: Precision) -> String {
    let program = executor.program();
    let attention = first_kernel(program, |op| matches!(op, Op::Attention(_))).unwrap_or("none");
    let linear = first_kernel(program, |op| matches!(op, Op::Linear(_))).unwrap_or("none");
    let device = name(executor);
    let DeviceInfo { arithmetic: with, matmul_provider, .. } = executor.device().info();
    let by = matmul_provider.map_or_else(String::new, |by| format!(" by {by}"));
    format!("{device}: precision {}, attention: {attention}, matmuls: {linear}{by} ({with})", precision.name())
}

/// Name of the kernel of the first node whose op is of a kind.
fn first_kernel(program: &Program, is_of_kind: fn(&Op) -> bool) -> Option<&'static str> {
    let mut nodes = program.plans().iter().flat_map(|(_, plan)| plan.graph.nodes.iter().zip(&plan.kernels));
    Some(nodes.find(|(node, _)| is_of_kind(&node.op))?.1.name())
}

/// The line of `memory_line`, extended by memory outside the plan: on a CPU, the bytes of the budget reserved
/// for the process; on a GPU, the host memory (`kept`) for the values named by `what` of in-flight steps.
pub(crate) fn memory_line_with_host(budget: &Budget, program: &Program, kept: Bytes, what: &str) -> String {
    let line = memory_line(program, budget.bytes);
    if program.target().arena_in_host() {
        return match budget.process_bytes() {
            Bytes::ZERO => line,
            process => format!("{line}; the process itself up to {process}"),
        };
    }
    format!("{line}; up to {kept} of host memory for {what} in transit")
}

/// One line with the memory budget, the planned peak and its ledger, the pinned host memory, and the bytes of
/// weights that each step streams from disk; parts that are zero are left out.
fn memory_line(program: &Program, budget: Bytes) -> String {
    let tokens = tokens(program);
    let peak = program.peak();
    let ledger = program.ledger().line();
    let replicas = match program.replicas() {
        1 => String::new(),
        replicas => format!(" in {replicas} replicas"),
    };
    let line = format!("memory budget {budget}; planned {peak} at {tokens} tokens a step{replicas} ({ledger})");
    let staging = program.space_bytes(Space::Host);
    let line = match staging {
        Bytes::ZERO => line,
        staging => format!("{line}; pinned host memory {staging}"),
    };
    match program.streamed() {
        Bytes::ZERO => line,
        streamed => format!("{line}; weights stream from {}: {streamed} per step", streamed_from(program)),
    }
}
