//! A machine as data: memory, kernels, rates. Invariant: a target needs no machine; a device compares its
//! kernels with these rows when it starts and refuses on any difference.

use crate::PlanError;
use graph::ops::LinearCrossEntropy;
use graph::{Bytes, DType, Graph, Layout, Node, Op};
use serde::{Deserialize, Deserializer, Serialize};
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
    /// Whether products of 16 bits compute the gate behind them.
    #[serde(default)]
    pub gates: bool,
    /// The widest rows that products of 16 bits take through a layer norm in front of them; 0 where they take none.
    #[serde(default)]
    pub norms: u64,
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
    /// The targets whose kernel rows hold here too, where this one has none of its own; the first that has a row for an op
    /// and its element types counts.
    #[serde(default, deserialize_with = "one_or_many")]
    pub kernels_of: Vec<String>,
    /// What runs each op.
    #[serde(default)]
    pub kernels: Vec<KernelRow>,
}

/// A name, or a list of them.
fn one_or_many<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Names {
        One(String),
        Many(Vec<String>),
    }
    Ok(match Names::deserialize(from)? {
        Names::One(name) => vec![name],
        Names::Many(names) => names,
    })
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

/// The kernel of an op.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRow {
    /// The op's name.
    pub op: String,
    /// Element types of its floating-point inputs.
    pub dtypes: Vec<DType>,
    /// The kernel's name.
    pub kernel: String,
    /// How it wants its weights.
    #[serde(default)]
    pub weights: Layout,
    /// Its scratch.
    #[serde(default)]
    pub workspace: Workspace,
    /// Whether it computes in f32 whatever its operands are: those of 16 bits pass through an f32 copy each, which
    /// stands before its own scratch.
    #[serde(default)]
    pub widen: bool,
    /// Whether it also multiplies factors of f32 that are cut to TF32.
    #[serde(default)]
    pub tf32: bool,
}

/// Scratch of a kernel: for each unit `per_unit + per_column * columns` bytes, where the columns are those
/// of x (K) for a linear, of x, the hidden layer or y, whichever is widest, for an MLP, of one head for attention, of the
/// logits (E) for routing, of the first output for every other op; and for all units together `per_item * items`, where the items of a linear cross-entropy are, for each
/// row of a chunk, its logits, its columns of x and two words, and of every other op the rows of its first input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workspace {
    /// Bytes for each unit.
    pub per_unit: Bytes,
    /// Bytes for each unit and column.
    pub per_column: Bytes,
    /// Bytes for each item.
    pub per_item: Bytes,
}

impl KernelRow {
    /// Whether it is for a node's op and takes all its floating-point inputs; there is one at least.
    fn takes(&self, graph: &Graph, node: &Node) -> bool {
        let mut dtypes =
            node.inputs.iter().map(|&v| graph.spec(v).dtype).filter(|dtype| dtype.is_float()).peekable();
        // Tiles hold bf16 and nothing else.
        let mut weights = node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).dtype);
        self.op == node.op.name()
            && (self.tf32 || !matches!(node.op, Op::Linear(linear) if linear.tf32))
            && dtypes.peek().is_some()
            && dtypes.all(|dtype| self.dtypes.contains(&dtype))
            && (self.weights != Layout::Tiles || weights.all(|dtype| dtype == DType::Bf16))
    }
}

impl Workspace {
    /// Bytes of a node on `units` units; each starts on a cache line of its own, and the items stand behind them.
    pub fn of(&self, graph: &Graph, node: &Node, units: u64) -> Bytes {
        let unit = Bytes(self.per_unit.0 + self.per_column.0 * columns(graph, node)).align_up(64);
        Bytes(unit.0 * units + self.per_item.0 * items(graph, node))
    }
}

fn columns(graph: &Graph, node: &Node) -> u64 {
    let first_output = || node.outputs.iter().flatten().next().map_or(0, |&v| graph.spec(v).row_elements());
    match node.op {
        Op::Attention(attention) => u64::from(attention.head_dim),
        Op::AttentionGrad(gradient) => u64::from(gradient.forward.head_dim),
        Op::Route(route) => u64::from(route.experts),
        Op::Linear(_) | Op::LinearInputGrad(_) | Op::LinearWeightGrad(_) => {
            graph.spec(node.inputs[0]).row_elements()
        }
        Op::Mlp(mlp) => {
            let hidden = graph.spec(node.inputs[mlp.weights()[1]]).row_elements();
            graph.spec(node.inputs[0]).row_elements().max(hidden).max(first_output())
        }
        Op::Accumulate(_)
        | Op::Adafactor(_)
        | Op::AdamW(_)
        | Op::AdamW8bit(_)
        | Op::Add(_)
        | Op::BatchNorm(_)
        | Op::BatchNormGrad(_)
        | Op::BatchNormTrain(_)
        | Op::BatchNormTrainGrad(_)
        | Op::Cast(_)
        | Op::Combine(_)
        | Op::CombineGrad(_)
        | Op::Concat(_)
        | Op::ConcatGrad(_)
        | Op::Dispatch(_)
        | Op::DispatchGrad(_)
        | Op::Dropout(_)
        | Op::Embed(_)
        | Op::EmbedGrad(_)
        | Op::Gelu(_)
        | Op::GeluGrad(_)
        | Op::Glu(_)
        | Op::GluGrad(_)
        | Op::GradScale(_)
        | Op::GroupedLinear(_)
        | Op::GroupedLinearInputGrad(_)
        | Op::GroupedLinearWeightGrad(_)
        | Op::LayerNorm(_)
        | Op::LayerNormGrad(_)
        | Op::LinearCrossEntropy(_)
        | Op::LinearCrossEntropyGrad(_)
        | Op::Relu(_)
        | Op::ReluGrad(_)
        | Op::Quantize(_)
        | Op::RmsNorm(_)
        | Op::RmsNormGrad(_)
        | Op::RotaryTable(_)
        | Op::RouteGrad(_)
        | Op::RouterLoss(_)
        | Op::RouterLossGrad(_)
        | Op::Scale(_)
        | Op::SegmentMean(_)
        | Op::SegmentMeanGrad(_)
        | Op::SelectRows(_)
        | Op::SelectRowsGrad(_)
        | Op::Sgd(_)
        | Op::Softmax(_)
        | Op::SoftmaxGrad(_) => first_output(),
    }
}

/// Items are counted in a full step.
fn items(graph: &Graph, node: &Node) -> u64 {
    let rows = |input: usize| graph.spec(node.inputs[input]).rows(graph.bounds.full());
    let chunk = |op: LinearCrossEntropy, x: usize| {
        u64::from(op.chunk).min(rows(x)) * (rows(x + 1) + graph.spec(node.inputs[x]).row_elements() + 2)
    };
    if let Op::LinearCrossEntropy(op) = node.op {
        chunk(op, 0)
    } else if let Op::LinearCrossEntropyGrad(op) = node.op {
        chunk(op.forward, 1)
    } else {
        node.inputs.first().map_or(0, |_| rows(0))
    }
}

/// The target of the reference kernels. No other target has them, so that what is planned can run.
const REFERENCE: &str = "null";

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
        let mut target: Self = toml::from_str(text).map_err(|e| bad(shown(&e.to_string())))?;
        if !target.kernels_of.is_empty() && !target.kernels.is_empty() {
            return Err(bad("it has kernels of its own and `kernels_of`; one of them".to_owned()));
        }
        for other in &target.kernels_of {
            if other == REFERENCE {
                return Err(bad(format!(
                    "kernels_of names `{REFERENCE}`, whose kernels run on no machine of this target; remove it from \
                     the list (files of `bench --calibrate` from before had it)"
                )));
            }
            let (_, text) = FILES.iter().find(|(n, _)| n == other).ok_or_else(|| {
                let (known, other): (Vec<&str>, _) = (Self::names().collect(), shown(other));
                bad(format!("kernels_of `{other}` is not known; known are {}", known.join(", ")))
            })?;
            target.kernels.extend(Self::parse(other, text)?.kernels);
        }
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
            if !self.kernels.iter().any(|row| row.kernel == *kernel) {
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
        for Workspace { per_unit, per_column, per_item } in self.kernels.iter().map(|row| row.workspace) {
            at_most("workspace.per_unit", per_unit.0, 1 << 36)?;
            at_most("workspace.per_column", per_column.0, 1 << 16)?;
            at_most("workspace.per_item", per_item.0, 1 << 16)?;
        }
        let reserved = self.reserved.iter().fold(0, |sum: u64, row| sum.saturating_add(row.bytes.0));
        at_most("the sum of reserved", reserved, 1 << 60)
    }

    /// Names are printed, and stay on their line.
    fn check_texts(&self) -> Result<(), String> {
        let rows = self.kernels.iter().flat_map(|row| [&row.op, &row.kernel]);
        let labels = self.reserved.iter().map(|row| &row.label);
        let mut texts = [&self.name, &self.about, &self.space].into_iter().chain(rows).chain(labels);
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

    /// The kernels that take the element types of a node's inputs, the preferred one first: they differ in how they want
    /// their weights.
    pub fn kernels_for<'a>(&'a self, graph: &'a Graph, node: &'a Node) -> impl Iterator<Item = &'a KernelRow> {
        self.kernels.iter().filter(|row| row.takes(graph, node))
    }

    /// The kernel of a node: by its op, the element types of its inputs and, for a product, the layout of its weights.
    pub fn kernel_of(&self, graph: &Graph, node: &Node) -> Result<&KernelRow, PlanError> {
        let weights = node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).layout);
        let as_wanted = |row: &KernelRow| match node.op.weights() {
            [] => row.weights == Layout::RowMajor,
            _ => weights.clone().all(|layout| layout == row.weights),
        };
        let row = self.kernels.iter().find(|row| as_wanted(row) && row.takes(graph, node));
        row.ok_or_else(|| self.unsupported(graph, node))
    }

    /// Whether it has a kernel that keeps an MLP's hidden layer in its workspace: that takes its weights in tiles. The
    /// reference takes rows.
    pub(crate) fn has_mlp(&self) -> bool {
        self.kernels.iter().any(|row| row.op == "mlp" && row.weights == Layout::Tiles)
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
            let missing = graph.nodes.iter().filter(|node| self.kernels_for(graph, node).next().is_none());
            ops.extend(missing.map(|node| op_in(graph, node)));
        }
        ops.sort_unstable_by_key(|(op, dtype)| (*op, dtype.name()));
        ops.dedup();
        match ops.is_empty() {
            true => Ok(()),
            false => Err(PlanError::Unsupported { ops, target: self.name.clone() }),
        }
    }

    /// The scratch of a node.
    pub fn workspace(&self, graph: &Graph, node: &Node) -> Result<Bytes, PlanError> {
        let row = self.kernel_of(graph, node)?;
        let widened = if row.widen { widened(graph, node) } else { Bytes::ZERO };
        Ok(widened + row.workspace.of(graph, node, self.units))
    }

    /// What the process holds outside of the arena.
    pub fn reserved(&self) -> Bytes {
        self.reserved.iter().map(|r| r.bytes).sum()
    }
}

/// The op of a node with the element type of its inputs.
fn op_in(graph: &Graph, node: &Node) -> (&'static str, DType) {
    let mut dtypes = node.inputs.iter().map(|&v| graph.spec(v).dtype);
    (node.op.name(), dtypes.find(|d| d.is_float()).unwrap_or(DType::I32))
}

/// f32 copies of the operands of 16 bits, each on a cache line of its own.
pub(crate) fn widened(graph: &Graph, node: &Node) -> Bytes {
    let operands = node.inputs.iter().chain(node.outputs.iter().flatten()).map(|&v| graph.spec(v));
    let narrow = operands.filter(|spec| matches!(spec.dtype, DType::Bf16 | DType::F16));
    narrow.map(|spec| Bytes(spec.elements_at(graph.bounds.full()) * DType::F32.size()).align_up(64)).sum()
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
    fn every_target_is_read_and_covers_every_op() {
        for name in Target::names() {
            let target = Target::named(name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(target.name, name);
            for row in &target.kernels {
                assert!(Op::NAMES.contains(&row.op.as_str()), "{name}: {}", row.op);
            }
        }
        let null = Target::named("null").expect("read");
        for op in Op::NAMES {
            assert!(null.kernels.iter().any(|k| k.op == *op), "null lacks {op}");
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
            ("kernels_of = [\"cuda\"", "kernels_of = [\"tpu\"", "kernels_of `tpu`"),
            ("kernels_of = [\"cuda\"", "kernels_of = [\"cuda\", \"null\"", "kernels_of names `null`"),
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
