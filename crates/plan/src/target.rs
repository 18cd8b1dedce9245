//! A machine as data: memory, rates, and whose kernels run on it. Invariant: a target needs no machine; an executor refuses a
//! device with other kernels than those that its program was planned with.

use crate::kernels::op_in;
use crate::{Capability, KernelId, Kernels, PlanError};
use graph::{Bytes, DType, Graph, Node};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine that plans are made for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Its name on the command line.
    pub name: String,
    /// One line about it, with the source of its figures.
    pub about: String,
    /// The memory space that holds the arena.
    pub space: String,
    /// Its size; zero where the machine must be asked.
    pub memory: Bytes,
    /// Every slice starts at a multiple of this.
    pub alignment: u64,
    /// Workers with a workspace of their own.
    pub units: u64,
    /// Tokens of a step beyond which more brings no speed.
    pub saturation: u64,
    /// Bytes that the process holds there outside of the arena.
    #[serde(default)]
    pub reserved: Vec<Reserved>,
    /// What it does per second.
    pub rates: Rates,
    /// For each kernel that `bench --calibrate` timed, its measured time divided by the time that `rates` gives. These are the
    /// kernels of training: `rates` are measured on products of inference, whose weights are prepared for them.
    #[serde(default)]
    pub slower: BTreeMap<String, f64>,
    /// Whose kernels run on it.
    pub kernels: Kernels,
}

/// Bytes outside of the arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// What holds them.
    pub label: String,
    /// How many.
    pub bytes: Bytes,
}

/// Rates of a machine; sizes are never computed from them.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// f32 operations per second in matrix products.
    pub f32: f64,
    /// bf16 operations per second in matrix products.
    pub bf16: f64,
    /// Operations per second in matrix products of f32 cut to TF32; none where there are no such products.
    #[serde(default)]
    pub tf32: Option<f64>,
    /// e4m3 operations per second in matrix products; none where there are no such products.
    #[serde(default)]
    pub fp8: Option<f64>,
    /// Operations per second in matrix products of integers of 8 bits; none where there are no such products.
    #[serde(default)]
    pub int8: Option<f64>,
    /// Bytes per second to and from the arena's memory.
    pub memory: f64,
    /// Seconds that a launch costs by itself.
    pub launch: f64,
    /// Bytes of parameters per second from their file into the arena, where they are streamed.
    #[serde(default = "storage")]
    pub storage: f64,
}

/// For target files without `rates.storage`, which say nothing about disks: a SATA III SSD, which is 6 Gbit/s
/// on the wire in 8b/10b code, 600 MB/s, less what its protocol takes. Slower than NVMe, so that streaming is
/// not priced too low.
const STORAGE: f64 = 5e8;

fn storage() -> f64 {
    STORAGE
}

/// name -> file.
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

impl Target {
    /// The names of all targets.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// The target of a name.
    pub fn named(name: &str) -> Result<Self, PlanError> {
        let bad = |why: String| PlanError::BadTarget { target: name.to_owned(), why };
        let Some((_, text)) = FILES.iter().find(|(n, _)| *n == name) else {
            let known: Vec<&str> = Self::names().collect();
            return Err(bad(format!("not known; known are {}", known.join(", "))));
        };
        Self::parse(name, text)
    }

    /// The target in the text of a target file, which errors name as `file`.
    pub fn parse(file: &str, text: &str) -> Result<Self, PlanError> {
        let bad = |why: String| PlanError::BadTarget { target: file.to_owned(), why };
        let old = if text.contains("kernels_of") {
            "it is of an earlier version, which had keys for kernels; make it anew with plimsoll bench --calibrate\n"
        } else {
            ""
        };
        let target: Self = toml::from_str(text).map_err(|e| bad(format!("{old}{}", shown(&e.to_string()))))?;
        target.check().map_err(bad)?;
        Ok(target)
    }

    /// What the planner takes for granted of a target.
    fn check(&self) -> Result<(), String> {
        let Rates { f32, bf16, tf32, fp8, int8, memory, launch, storage } = self.rates;
        let [tf32, fp8, int8] = [tf32, fp8, int8].map(|rate| rate.unwrap_or(bf16));
        for (key, rate) in [
            ("f32", f32),
            ("bf16", bf16),
            ("tf32", tf32),
            ("fp8", fp8),
            ("int8", int8),
            ("memory", memory),
            ("storage", storage),
        ] {
            if !(1.0..=1e24).contains(&rate) {
                return Err(format!("rates.{key} = {rate} is no rate between 1 and 1e24"));
            }
        }
        for (kernel, &factor) in &self.slower {
            if !(1e-3..=1e6).contains(&factor) {
                return Err(format!("slower.{kernel} = {factor} is no factor between 1e-3 and 1e6"));
            }
            if !self.kernels.all().any(|id| id.name() == *kernel) {
                return Err(format!("slower.{kernel}: the target has no such kernel"));
            }
        }
        if !(0.0..=1e6).contains(&launch) {
            return Err(format!("rates.launch = {launch} is no time between 0 and 1e6 s"));
        }
        for (key, number) in [("units", self.units), ("saturation", self.saturation)] {
            if number == 0 {
                return Err(format!("{key} = 0; it must be at least 1"));
            }
        }
        self.check_sizes()?;
        self.check_texts()?;
        match self.alignment.is_power_of_two() {
            true => Ok(()),
            false => Err(format!("alignment = {} is no power of two", self.alignment)),
        }
    }

    /// Sums and products of these fit 64 bits, for any model.
    fn check_sizes(&self) -> Result<(), String> {
        let at_most = |key: &str, number: u64, most: u64| match number <= most {
            true => Ok(()),
            false => Err(format!("{key} = {number}; at most {most} is taken")),
        };
        at_most("alignment", self.alignment, 1 << 30)?;
        at_most("units", self.units, 1 << 16)?;
        at_most("saturation", self.saturation, 1 << 40)?;
        if let Kernels::Cuda(Capability(major, minor)) = self.kernels
            && Capability(major, minor) < Capability::LEAST
        {
            let Capability(least, _) = Capability::LEAST;
            return Err(format!(
                "kernels.cuda = [{major}, {minor}]; the kernels need compute capability {least}.0"
            ));
        }
        let reserved = self.reserved.iter().fold(0, |sum: u64, row| sum.saturating_add(row.bytes.0));
        at_most("the sum of reserved", reserved, 1 << 60)
    }

    /// Names are printed, and stay on their line.
    fn check_texts(&self) -> Result<(), String> {
        let labels = self.reserved.iter().map(|row| &row.label);
        let mut texts = [&self.name, &self.about, &self.space].into_iter().chain(labels);
        match texts.find(|text| text.chars().any(char::is_control) || text.len() > 1000) {
            Some(text) => {
                Err(format!("the text {} is not printable, or too long", shown(&format!("{text:?}"))))
            }
            None => Ok(()),
        }
    }

    /// The same machine with this many workers, of which each computes and moves as much as each did before.
    pub fn with_units(mut self, units: u64) -> Self {
        let more = units as f64 / self.units.max(1) as f64;
        let Rates { f32, bf16, tf32, fp8, int8, memory, launch: _, storage: _ } = &mut self.rates;
        let rates = [f32, bf16, memory].into_iter().chain([tf32, fp8, int8].into_iter().flatten());
        rates.for_each(|rate| *rate *= more);
        self.units = units;
        self
    }

    /// The kernel of a node.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] where none accepts it.
    pub fn kernel_of(&self, graph: &Graph, node: &Node) -> Result<KernelId, PlanError> {
        self.kernels.of(graph, node).ok_or_else(|| self.unsupported(graph, node))
    }

    /// The error of a node that no kernel takes.
    pub(crate) fn unsupported(&self, graph: &Graph, node: &Node) -> PlanError {
        PlanError::Unsupported { ops: vec![op_in(graph, node)], target: self.name.clone() }
    }

    /// Whether it has a kernel for every op of some graphs.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] with all ops that it has none for, each once, in alphabetical order.
    pub fn supports<'a>(&self, graphs: impl IntoIterator<Item = &'a Graph>) -> Result<(), PlanError> {
        let mut ops: Vec<(&'static str, DType)> = vec![];
        for graph in graphs {
            let missing =
                graph.nodes.iter().filter(|node| self.kernels.accepting(graph, node).next().is_none());
            ops.extend(missing.map(|node| op_in(graph, node)));
        }
        ops.sort_unstable_by_key(|(op, dtype)| (*op, dtype.name()));
        ops.dedup();
        match ops.is_empty() {
            true => Ok(()),
            false => Err(PlanError::Unsupported { ops, target: self.name.clone() }),
        }
    }

    /// The workspace of a node.
    pub fn workspace(&self, graph: &Graph, node: &Node) -> Result<Bytes, PlanError> {
        let kernel = self.kernel_of(graph, node)?;
        Ok(self.kernels.workspace(kernel, graph, node, self.units))
    }

    /// What the process holds outside of the arena.
    pub fn reserved(&self) -> Bytes {
        self.reserved.iter().map(|r| r.bytes).sum()
    }
}

/// What a parser says of a file whose lines it quotes: printable lines, none of them long.
fn shown(text: &str) -> String {
    let line = |line: &str| line.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect();
    text.lines().map(line).collect::<Vec<String>>().join("\n")
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
        let eight = two.clone().with_units(8);
        let (a, b) = (two.rates, eight.rates);
        assert_eq!([b.f32, b.bf16, b.memory], [a.f32, a.bf16, a.memory].map(|rate| 4.0 * rate));
        assert_eq!((b.int8, b.launch, b.storage), (a.int8.map(|rate| 4.0 * rate), a.launch, a.storage));
        assert_eq!(eight.with_units(2), two);
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
            ("units", "cores", "unknown field `cores`"),
            ("units = 1", "units = 0", "units = 0"),
            ("alignment = 256", "alignment = 100", "no power of two"),
            ("launch = 4e-6", "launch = nan", "rates.launch"),
            ("f32 = 6.7e+13", "f32 = 0.0", "rates.f32"),
            ("storage = 5e8", "storage = 0.0", "rates.storage"),
            ("kernels = { cuda = [9, 0] }", "kernels = { tpu = [9, 0] }", "unknown variant `tpu`"),
            ("kernels = { cuda = [9, 0] }", "kernels = { cuda = [7, 5] }", "need compute capability 8.0"),
            (
                "kernels = { cuda = [9, 0] }",
                "kernels_of = [\"cuda\"]",
                "make it anew with plimsoll bench --calibrate",
            ),
            ("name", "= name", "TOML"),
            ("units = 1", "units = 70000", "units = 70000; at most 65536 is taken"),
            ("alignment = 256", "alignment = 2147483648", "at most 1073741824 is taken"),
            ("launch = 4e-6", "launch = 1e300", "rates.launch"),
            ("f32 = 6.7e+13", "f32 = 1e-300", "rates.f32"),
            ("name = \"h200\"", "name = \"\\u001b[2J\\nerror: none\"", "is not printable"),
            ("units", "units\x1b[2J", "units?[2J"),
        ] {
            let error = Target::parse("h.toml", &text.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.starts_with("target `h.toml`: ") && error.contains(says), "{error}");
        }
    }
}
