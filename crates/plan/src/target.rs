//! Description of a machine as data: memory, rates, and kernel table. Invariant: a target can be used without
//! the machine; an executor rejects a device whose kernels differ from those that the program was planned for.

use crate::kernels::op_in;
use crate::{Capability, KernelId, Kernels, PlanError};
use plimsoll_graph::ops::OperandFormat;
use plimsoll_graph::{Bytes, DType, Graph, Node};
use plimsoll_setting::{Command, Setting};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine for which plans are made.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Name on the command line.
    pub name: String,
    /// One-line description with the source of the figures.
    pub about: String,
    /// The memory that contains the arena.
    pub space: ArenaMemory,
    /// Size of that memory; zero if it must be queried from the machine.
    pub memory: Bytes,
    /// Alignment of every slice in bytes.
    pub alignment: u64,
    /// Number of workers, each with its own workspace.
    pub workers: u64,
    /// Number of tokens of a step beyond which throughput no longer grows.
    pub saturation: u64,
    /// Bytes that the process uses in that memory outside the arena.
    #[serde(default)]
    pub reserved: Vec<Reserved>,
    /// Throughput of arithmetic and memory.
    pub rates: Rates,
    /// For each kernel timed by `bench --calibrate`, its measured time divided by the time predicted from
    /// `rates`. These are training kernels: `rates` are measured on inference matmuls, whose weights are packed
    /// in advance.
    #[serde(default)]
    pub slower: BTreeMap<String, f64>,
    /// Kernel table of the machine.
    pub kernels: Kernels,
}

/// The memory that contains an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArenaMemory {
    /// Host memory, which the arena shares with the process.
    Host,
    /// The memory of a GPU.
    Device,
}

impl ArenaMemory {
    /// Name in target files and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

/// Memory used outside the arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// Purpose of the memory.
    pub label: String,
    /// Number of bytes.
    pub bytes: Bytes,
}

/// Throughput of a machine, used to predict times; sizes never depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// f32 operations per second in matmuls.
    pub f32: f64,
    /// bf16 operations per second in matmuls.
    pub bf16: f64,
    /// TF32 operations per second in matmuls; `None` if unsupported.
    #[serde(default)]
    pub tf32: Option<f64>,
    /// e4m3 operations per second in matmuls; `None` if unsupported.
    #[serde(default)]
    pub fp8: Option<f64>,
    /// 8-bit integer operations per second in matmuls; `None` if unsupported.
    #[serde(default)]
    pub int8: Option<f64>,
    /// Bytes per second between the processor and the arena's memory.
    pub memory: f64,
    /// Fixed overhead of a launch in seconds.
    pub launch: f64,
    /// Bytes per second from and to a scratch file.
    #[serde(default = "storage")]
    pub storage: f64,
    /// Bytes per second from pinned host memory to the arena, and back; `None` if the arena is host memory, or if the
    /// target file was written before they were measured.
    #[serde(default)]
    pub link: Option<Link>,
}

impl Rates {
    /// Operations per second of matmuls that multiply in a format, of operands stored as `storage`; `None` if
    /// unsupported.
    pub fn matmul(&self, operands: OperandFormat, storage: DType) -> Option<f64> {
        match operands {
            OperandFormat::Stored if storage.size() < DType::F32.size() => Some(self.bf16),
            OperandFormat::Stored => Some(self.f32),
            OperandFormat::Tf32 => self.tf32,
            OperandFormat::E4m3 => self.fp8,
            OperandFormat::Int8 => self.int8,
        }
    }
}

/// Rates of the link between pinned host memory and the memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes per second to the GPU.
    pub to_device: f64,
    /// Bytes per second from the GPU.
    pub to_host: f64,
    /// Fixed time of a copy in seconds.
    pub latency: f64,
    /// Time of kernels while copies run, divided by their time alone.
    pub slower_kernels: f64,
    /// Time of copies while copies of the other direction run, divided by their time alone.
    pub slower_copies: f64,
}

impl Default for Link {
    /// PCI Express 4.0 with 16 lanes: 31.5 GB/s in each direction, of which copies of large blocks reach about 80 %.
    fn default() -> Self {
        Self { to_device: 2.5e10, to_host: 2.5e10, latency: 1e-5, slower_kernels: 1.0, slower_copies: 1.0 }
    }
}

/// Default for target files without `rates.storage`: a SATA III SSD, 6 Gbit/s in 8b/10b code, that is 600 MB/s
/// minus protocol overhead. It is slower than NVMe, so that the cost of streaming is not underestimated.
const STORAGE: f64 = 5e8;

fn storage() -> f64 {
    STORAGE
}

/// Pairs (name, text of the target file).
const FILES: &[(&str, &str)] = &[
    ("null", include_str!("targets/null.toml")),
    ("cpu", include_str!("targets/cpu.toml")),
    ("cuda", include_str!("targets/cuda.toml")),
    ("3090", include_str!("targets/rtx3090.toml")),
    ("3090ti", include_str!("targets/rtx3090ti.toml")),
    ("4090", include_str!("targets/rtx4090.toml")),
    ("a100-40", include_str!("targets/a100_40.toml")),
    ("a100-80", include_str!("targets/a100_80.toml")),
    ("h100", include_str!("targets/h100.toml")),
    ("h200", include_str!("targets/h200.toml")),
];

/// Bytes of pinned host memory for each byte of their page tables: an entry of 8 bytes for a page of 4 KiB. Measured on an
/// H100, driver 580, for 16 to 96 GB on small and on huge pages.
const PINNED_BYTES_PER_TABLE_BYTE: u64 = 512;

impl Target {
    /// Names of all built-in targets.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// Returns the built-in target named `name`.
    pub fn named(name: &str) -> Result<Self, PlanError> {
        let Some((_, text)) = FILES.iter().find(|(n, _)| *n == name) else {
            let known: Vec<&str> = Self::names().collect();
            return Err(bad_target(name, format!("not known; known are {}", known.join(", "))));
        };
        Self::parse(name, text)
    }

    /// Parses the text of a target file; `file` is its name in errors.
    pub fn parse(file: &str, text: &str) -> Result<Self, PlanError> {
        let hint = if text.contains("kernels_of") {
            format!(
                "it was written by an earlier version of plimsoll; write it again with {} {}\n",
                Command::Bench,
                Setting::Calibrate
            )
        } else {
            String::new()
        };
        let target: Self = toml::from_str(text)
            .map_err(|e| bad_target(file, format!("{hint}{}", printable(&e.to_string()))))?;
        target.check().map_err(|why| bad_target(file, why))?;
        Ok(target)
    }

    /// Checks the values that the planner relies on.
    fn check(&self) -> Result<(), String> {
        let Rates { f32, bf16, tf32, fp8, int8, memory, launch, storage, link } = self.rates;
        let Link { to_device, to_host, latency, slower_kernels, slower_copies } = link.unwrap_or_default();
        let [tf32, fp8, int8] = [tf32, fp8, int8].map(|rate| rate.unwrap_or(bf16));
        for (key, rate) in [
            ("f32", f32),
            ("bf16", bf16),
            ("tf32", tf32),
            ("fp8", fp8),
            ("int8", int8),
            ("memory", memory),
            ("storage", storage),
            ("link.to_device", to_device),
            ("link.to_host", to_host),
        ] {
            if !(1.0..=1e24).contains(&rate) {
                return Err(format!("rates.{key} = {rate} is not a rate between 1 and 1e24"));
            }
        }
        for (kernel, &factor) in &self.slower {
            if !self.kernels.all().any(|id| id.name() == *kernel) {
                // The file may have any key; no kernel has a longer name.
                let start: String = kernel.chars().take(40).collect();
                return Err(format!("slower.{start}: the target has no such kernel"));
            }
            if !(1e-3..=1e6).contains(&factor) {
                return Err(format!("slower.{kernel} = {factor} is not a factor between 1e-3 and 1e6"));
            }
        }
        for (key, time) in [("launch", launch), ("link.latency", latency)] {
            if !(0.0..=1e6).contains(&time) {
                return Err(format!("rates.{key} = {time} is not a time between 0 and 1e6 s"));
            }
        }
        for (key, factor) in [("slower_kernels", slower_kernels), ("slower_copies", slower_copies)] {
            if !(1.0..=1e3).contains(&factor) {
                return Err(format!("rates.link.{key} = {factor} is not a factor between 1 and 1e3"));
            }
        }
        for (key, number) in [("workers", self.workers), ("saturation", self.saturation)] {
            if number == 0 {
                return Err(format!("{key} = 0; it must be at least 1"));
            }
        }
        self.check_sizes()?;
        self.check_texts()?;
        if !self.alignment.is_power_of_two() {
            return Err(format!("alignment = {} is not a power of two", self.alignment));
        }
        Ok(())
    }

    /// Limits sizes such that sums and products of them fit into 64 bits for any model.
    fn check_sizes(&self) -> Result<(), String> {
        at_most("alignment", self.alignment, 1 << 30)?;
        at_most("workers", self.workers, 1 << 16)?;
        at_most("saturation", self.saturation, 1 << 40)?;
        if let Kernels::Cuda(Capability(major, minor)) = self.kernels
            && Capability(major, minor) < Capability::MIN
        {
            let Capability(min_major, _) = Capability::MIN;
            return Err(format!(
                "kernels.cuda = [{major}, {minor}]; the kernels need compute capability {min_major}.0"
            ));
        }
        let reserved = self.reserved.iter().fold(0, |sum: u64, row| sum.saturating_add(row.bytes.0));
        at_most("the sum of reserved", reserved, 1 << 60)
    }

    /// Checks that names, which are printed, fit on one line and are printable.
    fn check_texts(&self) -> Result<(), String> {
        let labels = self.reserved.iter().map(|row| &row.label);
        let mut texts = [&self.name, &self.about].into_iter().chain(labels);
        match texts.find(|text| text.chars().any(char::is_control) || text.len() > 1000) {
            Some(text) => {
                Err(format!("the text {} is not printable, or too long", printable(&format!("{text:?}"))))
            }
            None => Ok(()),
        }
    }

    /// Returns the machine with `workers` workers, each of which computes and moves as much as before.
    pub fn with_workers(mut self, workers: u64) -> Self {
        let factor = workers as f64 / self.workers.max(1) as f64;
        let Rates { f32, bf16, tf32, fp8, int8, memory, launch: _, storage: _, link: _ } = &mut self.rates;
        let rates = [f32, bf16, memory].into_iter().chain([tf32, fp8, int8].into_iter().flatten());
        rates.for_each(|rate| *rate *= factor);
        self.workers = workers;
        self
    }

    /// Whether the arena is host memory. Pinned host memory is then no space of its own.
    pub fn arena_in_host(&self) -> bool {
        self.space == ArenaMemory::Host
    }

    /// Returns the kernel of a node.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] if no kernel accepts the node.
    pub fn kernel_of(&self, graph: &Graph, node: &Node) -> Result<KernelId, PlanError> {
        self.kernels.of(graph, node).ok_or_else(|| self.unsupported(graph, node))
    }

    /// The error for a node that no kernel accepts.
    pub(crate) fn unsupported(&self, graph: &Graph, node: &Node) -> PlanError {
        PlanError::Unsupported { ops: vec![op_in(self.kernels, graph, node)], target: self.name.clone() }
    }

    /// Checks that the target has a kernel for every op of `graphs`.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] with all unsupported ops, each once, in alphabetical order.
    pub fn supports<'a>(&self, graphs: impl IntoIterator<Item = &'a Graph>) -> Result<(), PlanError> {
        let mut ops: Vec<(&'static str, DType)> = vec![];
        for graph in graphs {
            let missing =
                graph.nodes.iter().filter(|node| self.kernels.accepting(graph, node).next().is_none());
            ops.extend(missing.map(|node| op_in(self.kernels, graph, node)));
        }
        ops.sort_unstable_by_key(|(op, dtype)| (*op, dtype.name()));
        ops.dedup();
        if ops.is_empty() {
            return Ok(());
        }
        Err(PlanError::Unsupported { ops, target: self.name.clone() })
    }

    /// Workspace of a node in bytes.
    pub fn workspace(&self, graph: &Graph, node: &Node) -> Result<Bytes, PlanError> {
        let kernel = self.kernel_of(graph, node)?;
        Ok(self.kernels.workspace(kernel, graph, node, self.workers))
    }

    /// Memory of the device that its driver takes for the page tables of `pinned` bytes of host memory.
    pub(crate) fn page_tables(&self, pinned: Bytes) -> Bytes {
        if self.arena_in_host() {
            return Bytes::ZERO;
        }
        Bytes(pinned.0.div_ceil(PINNED_BYTES_PER_TABLE_BYTE))
    }

    /// Total memory that the process uses outside the arena.
    pub fn reserved(&self) -> Bytes {
        self.reserved.iter().map(|r| r.bytes).sum()
    }
}

fn bad_target(target: &str, why: String) -> PlanError {
    PlanError::BadTarget { target: target.to_owned(), why }
}

/// Checks the upper limit of a number of a target file.
fn at_most(key: &str, number: u64, limit: u64) -> Result<(), String> {
    if number <= limit {
        return Ok(());
    }
    Err(format!("{key} = {number}; at most {limit} is taken"))
}

/// Shortens a parser message that quotes lines of a file: printable characters only, and no long lines.
fn printable(text: &str) -> String {
    let mut lines: Vec<String> = vec![];
    for line in text.lines() {
        lines.push(line.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_read() {
        for name in Target::names() {
            let target = Target::named(name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(target.name, name);
        }
        assert!(Target::named("tpu").is_err());
    }

    #[test]
    fn rates_follow_the_workers_but_for_what_none_of_them_does() {
        let two = Target::named("cpu").expect("read");
        let eight = two.clone().with_workers(8);
        let (a, b) = (two.rates, eight.rates);
        assert_eq!([b.f32, b.bf16, b.memory], [a.f32, a.bf16, a.memory].map(|rate| 4.0 * rate));
        assert_eq!((b.int8, b.launch, b.storage), (a.int8.map(|rate| 4.0 * rate), a.launch, a.storage));
        assert_eq!(eight.with_workers(2), two);
    }

    /// Files of `bench --calibrate` from before weights could be streamed.
    #[test]
    fn a_file_without_storage_has_the_usual_disk() {
        let text = include_str!("targets/h200.toml");
        let old = text.replacen("storage = 5e8\n", "", 1);
        assert_ne!(text, old);
        assert_eq!(Target::parse("h.toml", &old).expect("read"), Target::parse("h.toml", text).expect("read"));
    }

    #[test]
    fn a_bad_file_is_refused_by_name() {
        let text = include_str!("targets/h200.toml");
        assert!(Target::parse("h.toml", text).is_ok());
        for (from, to, says) in [
            ("workers", "cores", "unknown field `cores`"),
            ("workers = 1", "workers = 0", "workers = 0"),
            ("alignment = 256", "alignment = 100", "not a power of two"),
            ("launch = 4e-6", "launch = nan", "rates.launch"),
            ("f32 = 6.7e+13", "f32 = 0.0", "rates.f32"),
            ("storage = 5e8", "storage = 0.0", "rates.storage"),
            ("kernels = { cuda = [9, 0] }", "kernels = { tpu = [9, 0] }", "unknown variant `tpu`"),
            ("kernels = { cuda = [9, 0] }", "kernels = { cuda = [7, 5] }", "need compute capability 8.0"),
            ("kernels = { cuda = [9, 0] }", "kernels_of = [\"cuda\"]", "write it again with bench calibrate"),
            ("name", "= name", "TOML"),
            ("workers = 1", "workers = 70000", "workers = 70000; at most 65536 is taken"),
            ("alignment = 256", "alignment = 2147483648", "at most 1073741824 is taken"),
            ("launch = 4e-6", "launch = 1e300", "rates.launch"),
            ("f32 = 6.7e+13", "f32 = 1e-300", "rates.f32"),
            ("name = \"h200\"", "name = \"\\u001b[2J\\nerror: none\"", "is not printable"),
            ("workers", "workers\x1b[2J", "workers?[2J"),
        ] {
            let error = Target::parse("h.toml", &text.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.starts_with("target `h.toml`: ") && error.contains(says), "{error}");
        }
    }
}
