//! The sections `optimizer`, `schedule`, `loss` and `precision` of the configuration. Invariant: plain data; the
//! formulas are in `schedule`, in `hyper` and in the ops.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The optimizer and its hyperparameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// Optimizer: adamw (default), adamw8bit, adafactor or sgd; auto is adamw if it fits the memory budget,
    /// otherwise adamw8bit.
    pub kind: OptimizerKind,
    /// Peak learning rate, above 0 (default 3e-4; 1e-4 for encoders, 1e-3 for a head).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1000000))]
    pub lr: f64,
    /// Decay rates of the first and second moment of adamw and adamw8bit, below 1 (default [0.9, 0.95]; [0.9,
    /// 0.98] for encoders).
    #[schemars(inner(range(min = 0, max = 1)))]
    pub betas: [f64; 2],
    /// Epsilon of adamw and adamw8bit, which is added to the square root of the second moment (default 1e-8).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1))]
    pub eps: f64,
    /// Decoupled weight decay (default 0.1; 0.01 for encoders and a head).
    #[schemars(range(min = 0, max = 1000000))]
    pub weight_decay: f64,
    /// Parameters that weight decay applies to: matrices (default; all matrices except embeddings) or all.
    pub decay: Decay,
    /// Names of further parameters without weight decay, where * stands for any text (default none).
    pub no_decay: Vec<String>,
    /// Maximum norm of all gradients together (default 1); larger gradients are scaled down. null disables
    /// clipping. With null and one micro-step per step, each gradient is applied as soon as it is computed,
    /// which saves its memory; if a gradient is not finite, the step is counted as skipped, but parameters
    /// updated before it keep their update.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 3e38))]
    pub clip_norm: Option<f64>,
    /// Decay of an exponential moving average (EMA) of the trained weights, above 0 and below 1, such as 0.999;
    /// null (default) is no average. After t updates the decay is at most (1 + t) / (10 + t). Evaluations use the
    /// average, and a checkpoint has it as a model of its own in the folder ema.
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub ema: Option<f64>,
    /// Momentum of sgd, from 0 to below 1 (default 0.9).
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub momentum: f64,
    /// Whether sgd uses Nesterov momentum (default false); requires a momentum above 0.
    pub nesterov: bool,
    /// Maximum root mean square of an update of adafactor (default 1); a larger update is scaled down.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 3e38))]
    pub update_clip: f64,
    /// Exponent x of adafactor's decay rate 1 - t^-x of the second moment at step t, above 0 to 1 (default
    /// 0.8).
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub decay_exponent: f64,
}

/// Optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW if it fits the memory budget, otherwise 8-bit AdamW.
    Auto,
    /// AdamW (Loshchilov and Hutter 2019).
    Adamw,
    /// AdamW with 8-bit moments (Dettmers et al. 2022).
    Adamw8bit,
    /// Adafactor (Shazeer and Stern 2018), without a first moment.
    Adafactor,
    /// Stochastic gradient descent.
    Sgd,
}

/// Which parameters weight decay applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Weight matrices except embeddings; never norms and biases.
    Matrices,
    /// Every parameter.
    All,
}

/// The learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleSection {
    /// Learning-rate schedule after the warm-up: constant, linear, cosine (default), cosine_restarts,
    /// polynomial, wsd (warm-up, stable, decay) or step.
    pub kind: ScheduleKind,
    /// Length of the warm-up, in which the learning rate rises linearly to its peak: a number of steps
    /// (default 0), or a share of the steps of the schedule above 0 and below 1, such as 0.1.
    #[schemars(extend("minimum" = 0, "maximum" = 1000000000000_u64))]
    pub warmup: Warmup,
    /// Final learning rate of a decaying schedule, as a share of the peak (default 0.1). Not used by constant
    /// and step.
    #[schemars(range(min = 0, max = 1))]
    pub min_ratio: f64,
    /// Step at which linear, cosine, polynomial and wsd end; null (default) is the last step by run.steps,
    /// run.max_tokens or run.epochs, whose steps are counted by packing the data before the first step.
    #[schemars(range(min = 1, max = 1000000000000_u64))]
    pub steps: Option<u64>,
    /// Exponent of polynomial (default 1).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1000))]
    pub power: f64,
    /// Steps of the first cycle of cosine_restarts (default 1000).
    #[schemars(range(min = 1, max = 1000000000000_u64))]
    pub cycle: u64,
    /// Factor by which each cycle of cosine_restarts is longer than the previous cycle, a whole number
    /// (default 1).
    #[schemars(range(min = 1, max = 1000000))]
    pub cycle_growth: u64,
    /// Share of the steps of the schedule in which wsd decays, at its end (default 0.2).
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub decay_share: f64,
    /// Shape of the decay of wsd: linear, sqrt (default) or cosine.
    pub decay_shape: DecayShape,
    /// Interval between two decays of step, in schedule.unit (default 10).
    #[schemars(range(min = 1, max = 1000000000000_u64))]
    pub every: u64,
    /// Unit of schedule.every: steps or epochs (default).
    pub unit: ScheduleUnit,
    /// Factor by which step multiplies the learning rate at each decay, above 0 to 1 (default 0.85).
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub gamma: f64,
    /// Scaling of the peak learning rate with batch.tokens / schedule.reference_tokens: none (default),
    /// linear, or sqrt (by the square root).
    pub scaling: Scaling,
    /// Value of batch.tokens for which optimizer.lr is meant. Required with schedule.scaling linear or sqrt,
    /// refused with none.
    #[schemars(range(min = 1, max = 1099511627776_u64))]
    pub reference_tokens: Option<u64>,
}

/// Length of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Warmup {
    /// A number of optimizer steps.
    Steps(u64),
    /// A fraction of the steps of the schedule.
    Share(f64),
}

impl fmt::Display for Warmup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(n) => write!(f, "{n}"),
            Self::Share(x) => write!(f, "{x}"),
        }
    }
}

/// Shapes of the learning-rate schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Constant learning rate.
    Constant,
    /// Linear decay.
    Linear,
    /// Cosine decay over half a period (Loshchilov and Hutter 2017).
    Cosine,
    /// Cosine decay with warm restarts.
    CosineRestarts,
    /// Polynomial decay: a power of the remaining fraction of the steps.
    Polynomial,
    /// Warm-up, stable, decay (Hu et al. 2024): constant, then a decay in the last steps.
    Wsd,
    /// Step decay: multiplied by `gamma` at fixed intervals.
    Step,
}

/// Shapes of the decay phase of `wsd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DecayShape {
    /// Linear decay.
    Linear,
    /// One minus the square root of the elapsed fraction (Hägele et al. 2024).
    Sqrt,
    /// Cosine decay over half a period.
    Cosine,
}

/// Units in which `schedule.every` is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleUnit {
    /// Optimizer steps.
    Steps,
    /// Passes over the data.
    Epochs,
}

/// How the learning rate scales with the batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// Not scaled.
    None,
    /// Proportional to the batch size (Goyal et al. 2017).
    Linear,
    /// Proportional to the square root of the batch size (Krizhevsky 2014).
    Sqrt,
}

/// Loss terms in addition to the cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LossSection {
    /// Weight of the load-balancing loss of the experts (Fedus et al. 2022), averaged over layers (default
    /// 0.01).
    #[schemars(range(min = 0, max = 1000000))]
    pub balance: f64,
    /// Weight of the router z-loss, the squared log-sum-exp of the router's logits (Zoph et al. 2022; default
    /// 0).
    #[schemars(range(min = 0, max = 1000000))]
    pub router_z: f64,
    /// Weight of the z-loss, the squared log-sum-exp of the output logits (Chowdhery et al. 2022; default 0).
    #[schemars(range(min = 0, max = 1000000))]
    pub z: f64,
}

/// Distillation (Hinton, Vinyals and Dean 2015): a model learns the predictions of larger trained models, its teachers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DistillationSection {
    /// Folders of the teachers, at most 16: callers with all tasks of model.tasks and the same classes, such as RUN/best/ema.
    /// They read the windows that the model reads, and their logits are averaged. If empty (default), there is no
    /// distillation.
    #[schemars(length(max = 16))]
    pub teacher: Vec<String>,
    /// Share w of the teachers in the loss of a task, above 0 to 1 (default 0.5): the loss is 1 - w times the cross-entropy
    /// with the classes of the records, and w times the square of the temperature times the divergence from the teachers.
    /// Windows without a class in a task have the second part alone.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub weight: f64,
    /// Temperature by which the logits of the model and of the teachers are divided, from 0.1 to 100 (default 2): the higher,
    /// the more the improbable classes count.
    #[schemars(range(min = 0.1, max = 100))]
    pub temperature: f64,
}

impl Default for DistillationSection {
    fn default() -> Self {
        Self { teacher: vec![], weight: 0.5, temperature: 2.0 }
    }
}

/// Floating-point formats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionSection {
    /// Number format of weights and activations: f32 (default), tf32 (f32 with the matmuls of linear layers on a
    /// GPU's TF32 tensor cores), bf16 or fp16; master weights and optimizer moments are f32 (adamw8bit: 8
    /// bits).
    #[serde(deserialize_with = "trained")]
    #[schemars(schema_with = "kinds")]
    pub kind: plimsoll_plan::Precision,
    /// Initial loss scale of fp16 (default 65536), which multiplies the mean loss of a step. A step whose
    /// gradients overflow is skipped and counted, and halves the scale, so the first steps may be skipped.
    #[schemars(range(min = 1, max = 3e38))]
    pub initial_scale: f64,
    /// Number of consecutive steps of fp16 without overflow after which the loss scale doubles (default
    /// 2000).
    #[schemars(range(min = 1, max = 1000000000000_u64))]
    pub growth_interval: u64,
}

impl PrecisionSection {
    /// Whether the loss is multiplied by a scale that follows overflows.
    pub fn scales_loss(&self) -> bool {
        self.kind.policy().scales_loss
    }
}

/// Reads a precision, and refuses those in which no model is trained. The schema, which is checked first, has the same ones.
fn trained<'de, D: Deserializer<'de>>(from: D) -> Result<plimsoll_plan::Precision, D::Error> {
    let precision = plimsoll_plan::Precision::deserialize(from)?;
    if precision.policy().backward.is_some() {
        return Ok(precision);
    }
    Err(serde::de::Error::custom(format!("{} is for inference", precision.name())))
}

/// Schema of the precisions in which models are trained.
fn kinds(_: &mut SchemaGenerator) -> Schema {
    use plimsoll_plan::Precision::{Bf16, F32, Fp8, Fp16, Int8, Tf32};
    let words = plimsoll_plan::Precision::trained().map(|precision| {
        let about = match precision {
        F32 => "f32 throughout.",
        Tf32 => {
            "f32 throughout, with the operands of linear layers and their gradients rounded to TF32 (10 bits of\n\
             mantissa) for the tensor cores of an NVIDIA GPU. Attention, experts and the loss are computed as in f32."
        }
        Bf16 => "bfloat16 with f32 master weights.",
        Fp16 => "IEEE half precision with f32 master weights and a dynamic loss scale.",
        Fp8 => "e4m3 in linear layers, bfloat16 elsewhere.",
        Int8 => "8-bit integers in linear layers, bfloat16 elsewhere.",
        };
        json!({"description": about, "type": "string", "const": precision.name()})
    });
    let words: Vec<Value> = words.collect();
    json_schema!({"oneOf": words})
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adamw,
            lr: 3e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            decay: Decay::Matrices,
            no_decay: vec![],
            clip_norm: Some(1.0),
            ema: None,
            momentum: 0.9,
            nesterov: false,
            update_clip: 1.0,
            decay_exponent: 0.8,
        }
    }
}

impl Default for ScheduleSection {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Cosine,
            warmup: Warmup::Steps(0),
            min_ratio: 0.1,
            steps: None,
            power: 1.0,
            cycle: 1000,
            cycle_growth: 1,
            decay_share: 0.2,
            decay_shape: DecayShape::Sqrt,
            every: 10,
            unit: ScheduleUnit::Epochs,
            gamma: 0.85,
            scaling: Scaling::None,
            reference_tokens: None,
        }
    }
}

impl Default for LossSection {
    fn default() -> Self {
        Self { balance: 0.01, router_z: 0.0, z: 0.0 }
    }
}

impl Default for PrecisionSection {
    /// The initial loss scale and growth interval are PyTorch's defaults.
    fn default() -> Self {
        Self { kind: plimsoll_plan::Precision::F32, initial_scale: 65_536.0, growth_interval: 2000 }
    }
}
