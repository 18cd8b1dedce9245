//! Report of a benchmark, as text and as JSON. Invariant: the shares of the kernels sum to one; every rate is
//! the number of operations or bytes by the ops' cost rules, divided by measured seconds.

use super::case::{BenchCase, Measurements};
use super::{BenchRequest, BenchWork, median};
use plimsoll_graph::ops::{Epilogue, Prologue};
use plimsoll_graph::{Bytes, Graph, Node, Op, PrecisionClass, node_label};
use plimsoll_plan::Instr;
use plimsoll_runtime::machine;
use plimsoll_runtime::timeline::MeasuredTimeline;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::fmt;

/// Result of a benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchReport {
    /// Work that was timed.
    pub work: BenchWork,
    /// Arithmetic of the matmuls.
    pub dtype: &'static str,
    /// Name of the device.
    pub device: String,
    /// Number of compute threads.
    pub threads: usize,
    /// Number of replicas: devices or groups of CPU threads that each compute their own steps, at the same time.
    pub replicas: usize,
    /// Number of steps in a pass over the batch.
    pub steps: u64,
    /// Tokens of the largest step.
    pub step_tokens: u64,
    /// Tokens in a pass: the sum over all sequences, or the rows of a linear layer.
    pub tokens: u64,
    /// Passes per measurement.
    pub passes: u32,
    /// Seconds per pass, for each measurement.
    pub seconds: Vec<f64>,
    /// Operations in a pass.
    pub flops: f64,
    /// Name of the peak measurement: `fma`, `dots` (bf16 dot products), `amx` (bf16), `amx/6` (f32 as six bf16
    /// matmuls), `amx/int8` or `vnni` on the CPU; `product`, large GEMMs in the precision of the work, on other
    /// devices; `None` if the CPU has no loop for the type.
    pub raw_loop: Option<&'static str>,
    /// GFLOP/s of the peak measurement, for each measurement of the work.
    pub raw_gflops: Vec<f64>,
    /// Peak memory by the plan.
    pub peak: Bytes,
    /// Resident memory of the process: at the end of the benchmark, and the maximum.
    pub resident: (Bytes, Bytes),
    /// Times by kernel, slowest first. Launches that differ only in their layer are one entry.
    pub kernels: Vec<KernelTiming>,
    /// Timeline of the largest step with what was measured, if it was requested.
    pub timeline: Option<MeasuredTimeline>,
}

/// Launches of one op with equal labels (apart from the layer) and shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTiming {
    /// Name of the op, or `load` or `copy`.
    pub op: &'static str,
    /// Label of the node, such as its parameter's name, with `*` for the layer's number; empty if it has none.
    pub label: String,
    /// Shapes of the first input and the first output, and fused ops before and after a matmul.
    pub shape: String,
    /// Number of launches in a pass.
    pub launches: u64,
    /// Seconds in a pass: the mean over the replicas, the median over the measurements.
    pub seconds: f64,
    /// Share of the sum of all kernels' seconds, from 0 to 1.
    pub share: f64,
    /// Operations in a pass.
    pub flops: f64,
    /// Bytes in a pass, where each operand is read or written once.
    pub bytes: f64,
    /// Whether the kernel is reported in GFLOP/s and not in GB/s: ops of class [`PrecisionClass::Matmul`].
    pub product: bool,
}

/// Maximum number of kernels in the text; the others are summed in one line.
const SLOWEST: usize = 12;

impl BenchReport {
    pub(super) fn new(request: &BenchRequest, case: &BenchCase, turns: Measurements) -> Self {
        let kernels = kernels(case, &turns);
        let step_tokens = case.steps.iter().map(|step| step.counts.tokens);
        Self {
            work: request.work.clone(),
            dtype: case.plan().matmul_dtype(),
            device: case.device(),
            threads: request.settings.threads,
            replicas: case.replicas(),
            steps: case.steps.len() as u64,
            step_tokens: step_tokens.clone().max().unwrap_or(0),
            tokens: step_tokens.sum(),
            passes: turns.passes,
            flops: kernels.iter().map(|k| k.flops).sum(),
            seconds: turns.seconds,
            raw_loop: turns.raw_loop,
            raw_gflops: turns.raw,
            peak: case.peak(),
            resident: machine::resident(),
            kernels,
            timeline: None,
        }
    }

    /// Tokens (or rows of a linear layer) per second, from the median time.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / median(&self.seconds)
    }

    /// TFLOP/s of the work, from the median time.
    pub fn tflops(&self) -> f64 {
        self.flops / median(&self.seconds) / 1e12
    }

    /// Median TFLOP/s of the peak measurement; `None` without one.
    pub fn raw_tflops(&self) -> Option<f64> {
        (!self.raw_gflops.is_empty()).then(|| median(&self.raw_gflops) / 1e3)
    }

    /// Rate of the work divided by the peak rate measured directly before it, as the median over the measurements.
    pub fn utilisation(&self) -> Option<f64> {
        let shares: Vec<f64> =
            self.seconds.iter().zip(&self.raw_gflops).map(|(s, raw)| self.flops / s / (raw * 1e9)).collect();
        (!shares.is_empty()).then(|| median(&shares))
    }
}

/// The keys that `plimsoll bench --help` lists, with the rates that follow from the times.
impl Serialize for BenchReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut report = serializer.serialize_map(None)?;
        report.serialize_entry("side", "plimsoll")?;
        report.serialize_entry("dtype", self.dtype)?;
        report.serialize_entry("device", &self.device)?;
        report.serialize_entry("threads", &self.threads)?;
        report.serialize_entry("replicas", &self.replicas)?;
        report.serialize_entry("steps", &self.steps)?;
        report.serialize_entry("step_tokens", &self.step_tokens)?;
        report.serialize_entry("passes", &self.passes)?;
        report.serialize_entry("seconds", &self.seconds)?;
        report.serialize_entry("tokens_per_s", &self.tokens_per_second())?;
        report.serialize_entry("flops", &self.flops)?;
        report.serialize_entry("tflops", &self.tflops())?;
        report.serialize_entry("raw_loop", &self.raw_loop)?;
        report.serialize_entry("raw_tflops", &self.raw_tflops())?;
        report.serialize_entry("utilisation", &self.utilisation())?;
        report.serialize_entry("planned_peak_bytes", &self.peak)?;
        report.serialize_entry("resident_bytes", &self.resident.0)?;
        report.serialize_entry("resident_peak_bytes", &self.resident.1)?;
        report.serialize_entry("kernels", &self.kernels)?;
        match &self.work {
            BenchWork::Model { model, sequences, lengths } => {
                report.serialize_entry("model", model)?;
                report.serialize_entry("batch", sequences)?;
                report.serialize_entry("length", lengths)?;
            }
            BenchWork::Linear { rows, n, k } => report.serialize_entry("shape", &[rows, n, k])?,
        }
        report.end()
    }
}

impl KernelTiming {
    /// GFLOP/s of the kernel; zero if its time is zero.
    pub fn gflops(&self) -> f64 {
        rate(self.flops, self.seconds)
    }

    /// GB/s of the kernel; zero if its time is zero.
    pub fn gigabytes(&self) -> f64 {
        rate(self.bytes, self.seconds)
    }
}

/// Serializes the timing with the rates of the kernel.
impl Serialize for KernelTiming {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut kernel = serializer.serialize_map(None)?;
        kernel.serialize_entry("op", self.op)?;
        kernel.serialize_entry("label", &self.label)?;
        kernel.serialize_entry("shape", &self.shape)?;
        kernel.serialize_entry("launches", &self.launches)?;
        kernel.serialize_entry("seconds", &self.seconds)?;
        kernel.serialize_entry("share", &self.share)?;
        kernel.serialize_entry("tflops", &(self.gflops() / 1e3))?;
        kernel.serialize_entry("gb_per_s", &self.gigabytes())?;
        kernel.end()
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.work {
            BenchWork::Model { model, sequences, lengths } => write!(
                f,
                "{model}, {sequences} x {lengths} tokens in {}",
                match self.steps {
                    1 => "one step".to_owned(),
                    n => format!("{n} steps of up to {}", self.step_tokens),
                }
            )?,
            BenchWork::Linear { rows, n, k } => write!(f, "linear, {rows} rows, {n} x {k} weights")?,
        }
        writeln!(f, "; {} on {}; medians of {}", self.dtype, self.device, self.seconds.len())?;
        let unit = match self.work {
            BenchWork::Model { .. } => "tokens per second",
            BenchWork::Linear { .. } => "rows per second",
        };
        writeln!(f, "  {unit:<18} {:>20.0}", self.tokens_per_second())?;
        writeln!(f, "  {:<18} {:>20.3}", "TFLOP/s", self.tflops())?;
        if let Some((raw, utilisation)) = self.raw_tflops().zip(self.utilisation()) {
            let name = format!("  raw loop, {}", self.raw_loop.unwrap_or_default());
            writeln!(f, "  {name:<18} {raw:>20.3}")?;
            writeln!(f, "  {:<18} {:>18.1} %", "  utilisation", 100.0 * utilisation)?;
        }
        for (name, bytes) in
            [("planned peak", self.peak), ("resident", self.resident.0), ("  at its highest", self.resident.1)]
        {
            writeln!(f, "  {name:<18} {bytes:>20}")?;
        }
        write!(f, "\n   share  launches        ms            rate  kernel")?;
        if self.replicas > 1 {
            write!(f, " (times are means over the replicas)")?;
        }
        self.kernels.iter().take(SLOWEST).try_for_each(|kernel| write!(f, "\n{kernel}"))?;
        let others = self.kernels.get(SLOWEST..).unwrap_or_default();
        if others.is_empty() {
            return Ok(());
        }
        let share = others.iter().map(|k| k.share).sum::<f64>();
        let launches = others.iter().map(|k| k.launches);
        write!(f, "\n{:>6.1} %  {:>8}  others", 100.0 * share, launches.sum::<u64>())
    }
}

impl fmt::Display for KernelTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, unit) = if self.product { (self.gflops(), "GFLOP/s") } else { (self.gigabytes(), "GB/s") };
        let share = 100.0 * self.share;
        let ms = 1e3 * self.seconds;
        write!(f, "{share:>6.1} %  {:>8}  {ms:>8.2}  {rate:>6.1} {unit:<7}  {}", self.launches, self.op)?;
        if !self.label.is_empty() {
            write!(f, " {}", self.label)?;
        }
        write!(f, " {}", self.shape)
    }
}

fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds / 1e9 } else { 0.0 }
}

/// Groups the plan's instructions by (op, label, shape), slowest first. A group's time is the median over the
/// measurements of the sum of its instructions.
fn kernels(case: &BenchCase, turns: &Measurements) -> Vec<KernelTiming> {
    let plan = case.plan();
    let mut kernels: Vec<(KernelTiming, Vec<f64>)> = vec![];
    for (i, &instr) in plan.schedule.instrs.iter().enumerate() {
        let (op, label, shape, product) = kind(&plan.graph, instr);
        let (flops, bytes) = case.cost(instr);
        let seconds = turns.instructions.iter().map(|turn| turn[i]);
        let launches = case.steps.len() as u64;
        if let Some((kernel, sums)) =
            kernels.iter_mut().find(|(k, _)| k.op == op && k.label == label && k.shape == shape)
        {
            kernel.launches += launches;
            kernel.flops += flops;
            kernel.bytes += bytes;
            sums.iter_mut().zip(seconds).for_each(|(sum, s)| *sum += s);
        } else {
            let kernel =
                KernelTiming { op, label, shape, launches, seconds: 0.0, share: 0.0, flops, bytes, product };
            kernels.push((kernel, seconds.collect()));
        }
    }
    let mut kernels: Vec<KernelTiming> =
        kernels.into_iter().map(|(k, seconds)| KernelTiming { seconds: median(&seconds), ..k }).collect();
    let total: f64 = kernels.iter().map(|k| k.seconds).sum();
    kernels.iter_mut().for_each(|k| k.share = k.seconds / total);
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

/// (op, label, shape, whether the op is of class [`PrecisionClass::Matmul`]) of an instruction.
fn kind(graph: &Graph, instr: Instr) -> (&'static str, String, String, bool) {
    match instr {
        Instr::Launch(id) => {
            let node = graph.node(id);
            let op = node.op.name();
            let label = node_label(graph, id);
            let label = label.strip_prefix(op).unwrap_or(&label).trim_start();
            let product = match node.op.rules().precision() {
                PrecisionClass::Matmul => true,
                PrecisionClass::Elementwise | PrecisionClass::Sensitive => false,
            };
            (op, any_layer(label, node.layer), shape(graph, node), product)
        }
        Instr::Start(id) => ("start of move", String::new(), shape(graph, graph.node(id)), false),
        Instr::Wait(id) => ("wait for move", String::new(), shape(graph, graph.node(id)), false),
    }
}

/// The label with the words that equal the layer's number replaced by `*`.
fn any_layer(label: &str, layer: Option<u32>) -> String {
    let Some(layer) = layer.map(|l| l.to_string()) else { return label.to_owned() };
    // Labels are dotted names of parameters (`encoder.layer.3.output.dense`) or, for ops without parameters,
    // `layer 3`.
    let between = if label.contains('.') { "." } else { " " };
    label
        .split(between)
        .map(|word| if word == layer { "*".to_owned() } else { word.to_owned() })
        .collect::<Vec<_>>()
        .join(between)
}

/// Shapes of the first input and the first output, with the prologue and epilogue of a linear layer.
fn shape(graph: &Graph, node: &Node) -> String {
    let from = node.inputs.first().map_or(String::new(), |&v| graph.spec(v).to_string());
    let to = node.outputs.iter().flatten().next().map_or(String::new(), |&v| graph.spec(v).to_string());
    let (before, behind) = around(&node.op);
    format!("{from}{before} -> {to}{behind}")
}

fn around(op: &Op) -> (&'static str, &'static str) {
    let Op::Linear(linear) = op else { return ("", "") };
    let before = match linear.prologue {
        Prologue::None => "",
        Prologue::LayerNorm(_) => ", normed",
    };
    let behind = match linear.epilogue {
        Epilogue::None => "",
        Epilogue::Gelu => ", gelu",
        Epilogue::Residual => ", residual",
        Epilogue::Gate => ", gate",
        Epilogue::SiluGate => ", silu gate",
    };
    (before, behind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_one_kernel() {
        for (label, layer, wanted) in [
            ("encoder.layer.3.output.dense", Some(3), "encoder.layer.*.output.dense"),
            ("layer 11", Some(11), "layer *"),
            ("encoder.layer.13.dense", Some(3), "encoder.layer.13.dense"),
            ("head.3", None, "head.3"),
            ("", Some(1), ""),
        ] {
            assert_eq!(any_layer(label, layer), wanted);
        }
    }
}
