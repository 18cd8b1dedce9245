//! The caller: a classifier of DNA windows that reads the codons of all six reading frames with one encoder, whose
//! weights the frames share. Our own architecture; the parts are those of Llama (Touvron et al. 2023): a pre-norm
//! transformer with RMS norms, rotary position embeddings and a SwiGLU feed-forward network, without causal mask.
//!
//! A window is a sequence of tokens, the frames +1, +2, +3, -1, -2, -3 one after another with equally many codons each.
//! Attention stays within a frame. A gated mean over the codons of all frames (a linear layer and a SiLU gate before the
//! mean) gives one vector for each window: the gate can close on codons that say nothing, such as those of frames that
//! code for no protein.
//!
//! Shapes in comments: T tokens of all windows of a step, S windows, D the hidden size, F the width of the feed-forward
//! network, P the width of the pooled vector.

use crate::config::{ConfigError, ConfigKeys, decimal};
use crate::init::{DEVIATION, Init, default_init};
use crate::training::{DropoutBuilder, PacksInput, Training};
use plimsoll_graph::ops::{
    Activation, Add, Attention, Bias, Concat, Embed, Epilogue, Glu, KlDivergence, Linear, LinearCrossEntropy,
    Mask, Qkv, RotaryTable, Scale, SegmentMean,
};
use plimsoll_graph::{Bounds, Builder, DType, Dim, Graph, Op, OutputRole, ParamPiece, ValueId, VerifyError};
use serde_json::{Map, Value, json};

/// Hyperparameters of a caller.
#[derive(Clone, Debug, PartialEq)]
pub struct CallerConfig {
    /// Vocabulary size: the codons, a token for codons with unknown letters, and the mask token.
    pub vocab_size: u64,
    /// Hidden size D.
    pub hidden_size: u64,
    /// Transformer layers.
    pub layers: u64,
    /// Attention heads; D / heads is the head dimension.
    pub heads: u64,
    /// Width F of the feed-forward network.
    pub intermediate_size: u64,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Base of the rotary angles.
    pub rope_theta: f32,
    /// Classification tasks, the most important first. Empty for a model that was only pre-trained.
    pub tasks: Vec<CallerTask>,
}

/// A classification of windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerTask {
    /// Name of the task, such as `virus`.
    pub name: String,
    /// Names of the classes, in the order of their logits.
    pub classes: Vec<String>,
}

/// Number of reading frames of a window.
pub const FRAMES: u64 = 6;

/// Maximum number of tasks of a caller.
pub const MAX_TASKS: usize = 8;

/// Maximum number of classes of a task.
const MAX_CLASSES: usize = 4096;

/// Value of `model_type` in the config.json of a caller.
const MODEL_TYPE: &str = "plimsoll_caller";

/// The training objective of a caller.
#[derive(Clone, Debug, PartialEq)]
pub enum CallerObjective {
    /// Prediction of masked codons (Devlin et al. 2019); `targets`: i32 (T).
    MaskedCodons,
    /// All tasks of the configuration together; `targets.{i}`: i32 (S) for task i.
    Tasks {
        /// Factor of the loss of each task.
        weights: Vec<f32>,
        /// Teachers, whose predictions are targets as well.
        distillation: Option<Distillation>,
    },
}

/// Distillation (Hinton, Vinyals and Dean 2015): the loss of a task is `(1 - w) H + w T^2 D`, where H is the cross-entropy
/// with the classes of the windows, and D the divergence of the prediction from that of the teachers on the same windows,
/// both at the temperature T. The gradient of D falls with the square of the temperature, which the factor undoes.
#[derive(Clone, Debug, PartialEq)]
pub struct Distillation {
    /// The teachers, each with all tasks of the model that is trained. Their logits are averaged.
    pub teachers: Vec<CallerConfig>,
    /// w, above 0 and at most 1.
    pub weight: f32,
    /// T, by which logits are divided before the softmax.
    pub temperature: f32,
}

/// Prefix of the names of the parameters of a teacher.
const TEACHERS: &str = "teachers.";

/// The number of the teacher that has the tensor called `tensor` of a training graph, and the tensor's name in the
/// teacher; `None` for a tensor of the model that is trained.
pub fn tensor_of_teacher(tensor: &str) -> Option<(usize, &str)> {
    let (number, name) = tensor.strip_prefix(TEACHERS)?.split_once('.')?;
    Some((number.parse().ok()?, name))
}

/// The model of a graph whose parameters and nodes are added: the model itself, or a frozen teacher.
#[derive(Clone, Copy)]
enum CallerPart {
    Model,
    Teacher(usize),
}

impl CallerPart {
    /// Sets the names of the parameters and the layer of the nodes that follow. Nodes of a teacher belong to no layer: none
    /// of their results is stored for the backward pass, and the layers of a plan are those of the model that is trained.
    fn scope(self, g: &mut Builder, prefix: &str, layer: Option<u32>) {
        match self {
            Self::Model => g.scope(prefix, layer),
            Self::Teacher(i) => g.scope(format!("{TEACHERS}{i}.{prefix}"), None),
        }
    }
}

/// Graph inputs of packed windows.
struct WindowInputs {
    ids: ValueId,
    spans: ValueId,
    frames: ValueId,
}

impl CallerConfig {
    /// Whether a config.json is that of a caller.
    pub fn is_caller(text: &str) -> bool {
        let value: Value = serde_json::from_str(text).unwrap_or_default();
        value["model_type"] == MODEL_TYPE
    }

    /// Reads a config.json.
    ///
    /// # Errors
    /// Text that is not JSON, another `model_type`, or a key that is missing, unknown or out of range.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        const KEYS: [&str; 9] = [
            "model_type",
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "rms_norm_eps",
            "rope_theta",
            "tasks",
        ];
        let value: Value = serde_json::from_str(text).map_err(ConfigError::Json)?;
        let empty = Map::new();
        let keys = ConfigKeys(value.as_object().unwrap_or(&empty));
        keys.one_of("model_type", &[Some(MODEL_TYPE)])?;
        keys.only(&KEYS)?;
        let hidden_size = keys.size("hidden_size")?;
        Ok(Self {
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            layers: keys.layers()?,
            heads: keys.heads(hidden_size)?,
            intermediate_size: keys.size("intermediate_size")?,
            eps: keys.eps("rms_norm_eps", 1e-5)?,
            rope_theta: keys.above_zero("rope_theta", 10_000.0)?,
            tasks: tasks(&keys)?,
        })
    }

    /// The config.json of this configuration.
    pub fn to_json(&self) -> String {
        let tasks: Vec<Value> =
            self.tasks.iter().map(|task| json!({"name": task.name, "classes": task.classes})).collect();
        let value = json!({
            "model_type": MODEL_TYPE,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": decimal(self.eps),
            "rope_theta": decimal(self.rope_theta),
            "tasks": tasks,
        });
        format!("{value:#}\n")
    }

    /// Number of logits of a window: the classes of all tasks.
    pub fn logits(&self) -> u64 {
        self.tasks.iter().map(|task| task.classes.len() as u64).sum()
    }

    /// Width P of the pooled vector.
    fn pooled(&self) -> u64 {
        2 * self.hidden_size
    }

    fn head_dim(&self) -> u64 {
        self.hidden_size / self.heads
    }

    /// Builds the inference graph. `bounds.longest` is the number of codons of the longest frame. Inputs `ids`: i32 (T),
    /// `spans`: i32 (S, 2), the windows, `frames`: i32 (6 S, 2), the frames of all windows in order. Output `logits`:
    /// (S, [`CallerConfig::logits`]), the logits of all tasks, in their order.
    pub fn graph(&self, bounds: Bounds) -> Result<Graph, VerifyError> {
        let mut g = Builder::new(bounds);
        let windows = WindowInputs::inputs(&mut g);
        let mut dropout = DropoutBuilder::new(&mut g, &Training::default(), &mut PacksInput::default());
        let x = self.encode(&mut g, &windows, &mut dropout, CallerPart::Model);
        let x = self.pool(&mut g, x, &windows, CallerPart::Model);
        let logits = self.logits_of(&mut g, x, self.tasks.iter(), CallerPart::Model);
        let logits = match logits[..] {
            [one] => one,
            _ => g.one(Op::Concat(Concat {}), &logits),
        };
        g.output("logits", logits);
        g.finish()
    }

    /// Builds the training graph. Inputs as for [`Self::graph`], the targets of the objective, and with dropout `seed`:
    /// i32 (2) and `packs`: i32 (P, 6). Output `loss`: f32 (1), the sum over all targets that are not negative; of several tasks the sum of their
    /// losses times their weights. With distillation, whose sum is over all windows, the outputs `cross_entropy` (the loss
    /// without distillation) and `distillation_loss` are the two parts: `loss` is the former times 1 - w, and the latter.
    pub fn train_graph(
        &self,
        bounds: Bounds,
        objective: &CallerObjective,
        training: &Training,
    ) -> Result<Graph, VerifyError> {
        self.loss_graph(bounds, objective, training, self.tasks.len())
    }

    /// Builds the graph of the validation loss: without dropout, and of several tasks the loss of the first one alone, so
    /// that the losses of runs with other secondary tasks or weights can be compared.
    pub fn evaluation_graph(
        &self,
        bounds: Bounds,
        objective: &CallerObjective,
        training: &Training,
    ) -> Result<Graph, VerifyError> {
        let plain = Training { dropout: 0.0, z_loss: 0.0, ..*training };
        match objective {
            CallerObjective::MaskedCodons => self.loss_graph(bounds, objective, &plain, 0),
            CallerObjective::Tasks { .. } => {
                let first = CallerObjective::Tasks { weights: vec![1.0], distillation: None };
                self.loss_graph(bounds, &first, &plain, 1)
            }
        }
    }

    /// Builds the graph of the loss of the first `tasks` tasks, or of masked codons.
    fn loss_graph(
        &self,
        bounds: Bounds,
        objective: &CallerObjective,
        training: &Training,
        tasks: usize,
    ) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let windows = WindowInputs::inputs(g);
        match objective {
            CallerObjective::MaskedCodons => {
                let targets = g.input("targets", &[Dim::Tokens(1)], DType::I32);
                let mut dropout = DropoutBuilder::new(g, training, &mut PacksInput::default());
                let x = self.encode(g, &windows, &mut dropout, CallerPart::Model);
                g.scope("", None);
                let w = g.param(LM_HEAD, &[self.vocab_size, self.hidden_size]);
                training.loss(g, x, w, None, targets);
            }
            CallerObjective::Tasks { weights, distillation } => {
                let targets: Vec<ValueId> = (0..tasks)
                    .map(|i| g.input(&format!("targets.{i}"), &[Dim::Sequences(1)], DType::I32))
                    .collect();
                // Teachers come first, so that their activations are freed before the model's are stored for its backward
                // pass.
                let teachers = distillation.as_ref().map(|d| (d, d.predictions(g, &windows, &self.tasks)));
                let mut dropout = DropoutBuilder::new(g, training, &mut PacksInput::default());
                let x = self.encode(g, &windows, &mut dropout, CallerPart::Model);
                let x = self.pool(g, x, &windows, CallerPart::Model);
                let x = dropout.apply(g, x);
                let mut losses = vec![];
                for ((task, &targets), &weight) in self.tasks.iter().zip(&targets).zip(weights) {
                    let loss = self.task_loss(g, x, task, targets, training.chunk);
                    losses.push(scaled(g, loss, weight));
                }
                let loss = total(g, &losses);
                match teachers {
                    None => loss.into_iter().for_each(|loss| g.output(OutputRole::Loss, loss)),
                    Some((distillation, predictions)) => {
                        let mut divergences = vec![];
                        for ((task, &prediction), &weight) in self.tasks.iter().zip(&predictions).zip(weights) {
                            let divergence = self.divergence(g, x, task, prediction, distillation.temperature);
                            divergences.push(scaled(g, divergence, weight * distillation.factor()));
                        }
                        if let (Some(loss), Some(divergence)) = (loss, total(g, &divergences)) {
                            g.output(OutputRole::CrossEntropy, loss);
                            g.output(OutputRole::DistillationLoss, divergence);
                            // With a weight of 1 the loss does not depend on the cross-entropy, so no gradient of it is computed.
                            let both = match 1.0 - distillation.weight {
                                0.0 => divergence,
                                share => {
                                    let loss = scaled(g, loss, share);
                                    g.add(loss, divergence)
                                }
                            };
                            g.output(OutputRole::Loss, both);
                        }
                    }
                }
            }
        }
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// Cross-entropy of a task, summed over the windows that have a target: f32 (1).
    fn task_loss(
        &self,
        g: &mut Builder,
        x: ValueId,
        task: &CallerTask,
        targets: ValueId,
        chunk: u32,
    ) -> ValueId {
        let [w, b] = self.head(g, task);
        let op = LinearCrossEntropy { bias: true, chunk, z_loss: 0.0 };
        g.node(Op::LinearCrossEntropy(op), &[x, w, b, targets])[0]
    }

    /// Divergence of the prediction of a task from that of the teachers, whose logits are divided by the temperature,
    /// summed over all windows: f32 (1).
    fn divergence(
        &self,
        g: &mut Builder,
        x: ValueId,
        task: &CallerTask,
        teachers: ValueId,
        temperature: f32,
    ) -> ValueId {
        let [w, b] = self.head(g, task);
        let logits = g.one(Op::Linear(Linear::new(true, Epilogue::None)), &[x, w, b]);
        let logits = scaled(g, logits, 1.0 / temperature);
        g.one(Op::KlDivergence(KlDivergence {}), &[logits, teachers])
    }

    /// Weight and bias of the head of a task.
    fn head(&self, g: &mut Builder, task: &CallerTask) -> [ValueId; 2] {
        g.scope(TASKS, None);
        let classes = task.classes.len() as u64;
        let w = g.param(&format!("{}.weight", task.name), &[classes, self.pooled()]);
        [w, g.param(&format!("{}.bias", task.name), &[classes])]
    }

    /// Logits of some tasks from the pooled vectors: (S, C) for a task with C classes.
    fn logits_of<'a>(
        &self,
        g: &mut Builder,
        x: ValueId,
        tasks: impl Iterator<Item = &'a CallerTask>,
        part: CallerPart,
    ) -> Vec<ValueId> {
        part.scope(g, TASKS, None);
        tasks.map(|task| g.linear(x, &task.name, task.classes.len() as u64, true)).collect()
    }

    /// Initialisation of a tensor: normal with the reciprocal square root of the number of inputs as standard deviation
    /// (LeCun et al. 1998), for the embedding 1. The weights that write to the residual stream are scaled by
    /// `1/sqrt(2 L)`, because each of the L layers adds to the stream twice (Radford et al. 2019).
    pub fn init(&self, piece: &ParamPiece) -> Init {
        if let Some(values) = self.derived(&piece.tensor) {
            return Init::Values(values);
        }
        match piece.shape[..] {
            [_, _] if piece.tensor == EMBEDDING => Init::Normal(1.0),
            // Small, so that training begins with all classes about equally probable.
            [_, _] if piece.tensor.starts_with(TASKS) => Init::Normal(DEVIATION),
            [_, inputs] => {
                let adds =
                    ["attention.output.weight", "mlp.down.weight"].iter().any(|n| piece.tensor.ends_with(n));
                let scale = if adds { (2.0 * self.layers as f32).sqrt() } else { 1.0 };
                Init::Normal((inputs as f32).powf(-0.5) / scale)
            }
            _ => default_init(piece),
        }
    }

    /// Computed value of a tensor that no file contains: the rotary frequencies `theta^(-2j/d)` in f32.
    pub fn derived(&self, tensor: &str) -> Option<Vec<f32>> {
        if tensor != INV_FREQ {
            return None;
        }
        let d = self.head_dim();
        Some((0..d / 2).map(|j| 1.0 / self.rope_theta.powf((2 * j) as f32 / d as f32)).collect())
    }

    /// Builds the encoder; returns the last hidden state after the final norm: (T, D).
    fn encode(
        &self,
        g: &mut Builder,
        windows: &WindowInputs,
        dropout: &mut DropoutBuilder,
        part: CallerPart,
    ) -> ValueId {
        part.scope(g, "", None);
        let table = g.param(EMBEDDING, &[self.vocab_size, self.hidden_size]);
        let mut x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[windows.ids, table]);
        let inv_freq = g.param(INV_FREQ, &[self.head_dim() / 2]);
        let rotary = g.node(Op::RotaryTable(RotaryTable {}), &[inv_freq]); // cos, sin: (longest, d/2)
        for i in 0..self.layers {
            part.scope(g, &format!("layers.{i}."), Some(i as u32));
            x = self.block(g, x, windows, &rotary, dropout);
        }
        part.scope(g, "", None);
        g.rms_norm(x, "norm", self.eps)
    }

    /// One pre-norm transformer block: (T, D) -> (T, D).
    fn block(
        &self,
        g: &mut Builder,
        x: ValueId,
        windows: &WindowInputs,
        rotary: &[ValueId],
        dropout: &mut DropoutBuilder,
    ) -> ValueId {
        let attention = Attention {
            heads: self.heads as u32,
            kv_heads: self.heads as u32,
            head_dim: self.head_dim() as u32,
            scale: (self.head_dim() as f32).powf(-0.5),
            mask: Mask::Full,
            bias: Bias::None,
            rotary: true,
            qkv: Qkv::Separate,
        };
        let h = g.rms_norm(x, "attention.norm", self.eps);
        let [q, k, v] =
            ["query", "key", "value"].map(|n| g.linear(h, &format!("attention.{n}"), self.hidden_size, false));
        let a = g.one(Op::Attention(attention), &[q, k, v, windows.frames, rotary[0], rotary[1]]);
        let a = g.linear(a, "attention.output", self.hidden_size, false);
        let a = dropout.apply(g, a);
        let x = g.add(x, a);
        let h = g.rms_norm(x, "mlp.norm", self.eps);
        let h = g.linear(h, "mlp.gate_up", 2 * self.intermediate_size, false); // (T, 2F)
        let h = g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h]);
        let h = g.linear(h, "mlp.down", self.hidden_size, false);
        let h = dropout.apply(g, h);
        g.add(x, h)
    }

    /// Gated mean over the codons of a window, and a layer with GELU: (T, D) -> (S, P).
    fn pool(&self, g: &mut Builder, x: ValueId, windows: &WindowInputs, part: CallerPart) -> ValueId {
        part.scope(g, "pool.", None);
        let h = g.linear(x, "gate_value", 2 * self.pooled(), true); // (T, 2P)
        let h = g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h]);
        let mean = SegmentMean { skip_first: 0, skip_last: 0 };
        let h = g.one(Op::SegmentMean(mean), &[h, windows.spans]); // (S, P)
        // The mean over a thousand codons is small; the norm brings it to the size that the next layer expects.
        let h = g.layer_norm(h, "norm", self.eps);
        let h = g.linear(h, "dense", self.pooled(), true);
        g.gelu(h)
    }
}

impl Distillation {
    /// Predictions of the teachers for some tasks: their mean logits divided by the temperature, (S, C) for a task with C
    /// classes.
    fn predictions(&self, g: &mut Builder, windows: &WindowInputs, tasks: &[CallerTask]) -> Vec<ValueId> {
        let mut sums: Vec<ValueId> = vec![];
        for (i, teacher) in self.teachers.iter().enumerate() {
            let part = CallerPart::Teacher(i);
            let mut no_dropout = DropoutBuilder::new(g, &Training::default(), &mut PacksInput::default());
            let x = teacher.encode(g, windows, &mut no_dropout, part);
            let x = teacher.pool(g, x, windows, part);
            let logits = teacher.logits_of(g, x, tasks.iter(), part);
            sums = match sums[..] {
                [] => logits,
                _ => sums.iter().zip(logits).map(|(&sum, logits)| g.add(sum, logits)).collect(),
            };
        }
        let factor = 1.0 / (self.teachers.len() as f32 * self.temperature);
        sums.into_iter().map(|sum| scaled(g, sum, factor)).collect()
    }

    /// Factor of the divergence.
    fn factor(&self) -> f32 {
        self.weight * self.temperature * self.temperature
    }
}

/// `x` times a factor.
fn scaled(g: &mut Builder, x: ValueId, factor: f32) -> ValueId {
    if factor == 1.0 { x } else { g.one(Op::Scale(Scale { factor }), &[x]) }
}

/// The sum of `values`; `None` if there are none.
fn total(g: &mut Builder, values: &[ValueId]) -> Option<ValueId> {
    values.iter().copied().reduce(|sum, value| g.one(Op::Add(Add {}), &[sum, value]))
}

/// Name of the weight with which a caller predicts masked codons; only pre-trained models have it.
pub const LM_HEAD: &str = "lm_head.weight";

/// Prefix of the names of the tasks' heads.
const TASKS: &str = "tasks.";

/// Name of the embedding table.
const EMBEDDING: &str = "embedding.weight";

/// Name of the rotary frequencies, which no file contains.
const INV_FREQ: &str = "rotary.inv_freq";

impl WindowInputs {
    fn inputs(g: &mut Builder) -> Self {
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        let frames = g.input("frames", &[Dim::Sequences(FRAMES), Dim::Fixed(2)], DType::I32);
        Self { ids, spans, frames }
    }
}

/// Reads the key `tasks`.
fn tasks(keys: &ConfigKeys<'_>) -> Result<Vec<CallerTask>, ConfigError> {
    let list = keys.0.get("tasks").and_then(Value::as_array).ok_or_else(|| bad_tasks(keys))?;
    let mut tasks: Vec<CallerTask> = vec![];
    for value in list {
        let task = task(value).ok_or_else(|| bad_tasks(keys))?;
        if tasks.iter().any(|other| other.name == task.name) {
            return Err(bad_tasks(keys));
        }
        tasks.push(task);
    }
    if tasks.len() > MAX_TASKS { Err(bad_tasks(keys)) } else { Ok(tasks) }
}

fn bad_tasks(keys: &ConfigKeys<'_>) -> ConfigError {
    let wanted = format!(
        "a list of at most {MAX_TASKS} tasks, each with a `name` (letters, digits and _) and 2 to {MAX_CLASSES} \
         names of `classes`, all different"
    );
    keys.bad("tasks", wanted)
}

/// Reads a task; `None` if it is not one.
fn task(value: &Value) -> Option<CallerTask> {
    let object = value.as_object()?;
    if object.len() != 2 {
        return None;
    }
    let task = CallerTask {
        name: object.get("name")?.as_str()?.to_owned(),
        classes: object
            .get("classes")?
            .as_array()?
            .iter()
            .map(|c| c.as_str().map(str::to_owned))
            .collect::<Option<_>>()?,
    };
    task.is_valid().then_some(task)
}

impl CallerTask {
    /// Whether the name and the classes can be those of a task: a name of letters, digits and `_`, and 2 to 4096
    /// printable class names without white space, all different.
    pub fn is_valid(&self) -> bool {
        let named = (1..=64).contains(&self.name.len())
            && self.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let sorted: std::collections::BTreeSet<&String> = self.classes.iter().collect();
        named
            && (2..=MAX_CLASSES).contains(&self.classes.len())
            && sorted.len() == self.classes.len()
            && self
                .classes
                .iter()
                .all(|class| (1..=64).contains(&class.len()) && class.chars().all(|c| c.is_ascii_graphic()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> CallerConfig {
        let task = |name: &str, classes: &[&str]| CallerTask {
            name: name.to_owned(),
            classes: classes.iter().map(|&c| c.to_owned()).collect(),
        };
        CallerConfig {
            vocab_size: 66,
            hidden_size: 16,
            layers: 2,
            heads: 2,
            intermediate_size: 24,
            eps: 1e-5,
            rope_theta: 10_000.0,
            tasks: vec![task("virus", &["other", "virus"]), task("class", &["bacteria", "phage", "plant"])],
        }
    }

    #[test]
    fn a_configuration_is_written_and_read() {
        let c = small();
        assert_eq!(CallerConfig::from_json(&c.to_json()).expect("read"), c);
        assert!(CallerConfig::is_caller(&c.to_json()));
        assert!(!CallerConfig::is_caller("{\"model_type\": \"esm\"}") && !CallerConfig::is_caller("["));
        assert_eq!(c.logits(), 5);
    }

    /// Each fault is refused with a message that names the key.
    #[test]
    fn faulty_configurations_are_refused() {
        let cases: [(&str, Value, &str); 11] = [
            ("model_type", json!("esm"), "model_type"),
            ("hidden_size", json!(15), "num_attention_heads"),
            ("hidden_size", json!(0), "hidden_size"),
            ("num_hidden_layers", json!(5000), "num_hidden_layers"),
            ("rms_norm_eps", json!(2), "rms_norm_eps"),
            ("pooling", json!("mean"), "pooling"),
            ("tasks", json!(null), "tasks"),
            ("tasks", json!([{"name": "virus", "classes": ["one"]}]), "tasks"),
            ("tasks", json!([{"name": "virus", "classes": ["a", "a"]}]), "tasks"),
            ("tasks", json!([{"name": "a.b", "classes": ["a", "b"]}]), "tasks"),
            (
                "tasks",
                json!([{"name": "v", "classes": ["a", "b"]}, {"name": "v", "classes": ["a", "b"]}]),
                "tasks",
            ),
        ];
        for (key, value, named) in cases {
            let mut config: Value = serde_json::from_str(&small().to_json()).expect("JSON");
            config[key] = value;
            let error = CallerConfig::from_json(&config.to_string()).expect_err("refused").to_string();
            assert!(error.contains(&format!("`{named}`")), "{key}: {error}");
        }
    }

    /// Training and inference have the same parameters, but for the head of the masked language model.
    #[test]
    fn graphs_share_their_parameters() {
        let c = small();
        let bounds = Bounds { tokens: 60, sequences: 2, longest: 8, packs: 1 };
        let names = |graph: &Graph| {
            let names = graph.params.iter().flat_map(|p| &p.pieces).map(|piece| piece.tensor.clone());
            names.collect::<std::collections::BTreeSet<_>>()
        };
        let inference = names(&c.graph(bounds).expect("built"));
        let training = Training { dropout: 0.1, ..Training::default() };
        let tasks = CallerObjective::Tasks { weights: vec![1.0, 0.5], distillation: None };
        assert_eq!(names(&c.train_graph(bounds, &tasks, &training).expect("built")), inference);
        let masked = c.train_graph(bounds, &CallerObjective::MaskedCodons, &training).expect("built");
        let other: Vec<String> = names(&masked).difference(&inference).cloned().collect();
        assert_eq!(other, ["lm_head.weight"]);
        // Distillation adds teachers under names of their own, in no layer, and its loss.
        let teachers = vec![CallerConfig { layers: 3, ..small() }, small()];
        let distillation = Some(Distillation { teachers, weight: 0.5, temperature: 2.0 });
        let distilled = CallerObjective::Tasks { weights: vec![1.0, 0.5], distillation };
        let graph = c.train_graph(bounds, &distilled, &training).expect("built");
        let (own, of_teachers): (Vec<String>, _) =
            names(&graph).into_iter().partition(|name| tensor_of_teacher(name).is_none());
        assert!(own.iter().eq(&inference));
        let of =
            |i| of_teachers.iter().filter(move |name| tensor_of_teacher(name).is_some_and(|(n, _)| n == i));
        assert_eq!(of(1).count(), inference.len());
        assert!(of(0).any(|name| tensor_of_teacher(name) == Some((0, "layers.2.mlp.down.weight"))));
        assert_eq!(graph.nodes.iter().filter_map(|node| node.layer).max(), Some(1));
        let outputs: Vec<&OutputRole> = graph.outputs.iter().map(|(role, _)| role).collect();
        let losses = [OutputRole::CrossEntropy, OutputRole::DistillationLoss, OutputRole::Loss];
        assert!(outputs.into_iter().eq(&losses));
        // The evaluation of several tasks is that of the first.
        let evaluated = c.evaluation_graph(bounds, &tasks, &training).expect("built");
        assert!(!names(&evaluated).contains("tasks.class.weight"));
        assert!(names(&evaluated).contains("tasks.virus.weight"));
    }
}
