//! The sections `optimizer`, `schedule`, `loss` and `precision` of the configuration. Invariant: plain data; the
//! formulas are in `schedule`, in `hyper` and in the ops.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The optimizer and its hyperparameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// Which one.
    pub kind: OptimizerKind,
    /// The learning rate at its highest.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lr: f64,
    /// Decay of the first and second moment of adamw.
    #[schemars(inner(range(min = 0, max = 1)))]
    pub betas: [f64; 2],
    /// What adamw adds to the root of the second moment.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub eps: f64,
    /// Decoupled weight decay.
    #[schemars(range(min = 0))]
    pub weight_decay: f64,
    /// What decays.
    pub decay: Decay,
    /// Further parameters without decay: names of tensors, where * is any text.
    pub no_decay: Vec<String>,
    /// The most that the norm of all gradients may be; null sets none. With null and one micro-batch to a step each gradient is
    /// used up as soon as it is there, which saves its bytes: where one is not finite, the parameters that were reached before it
    /// have moved when the step is counted as skipped.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub clip_norm: Option<f64>,
    /// Momentum of sgd.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub momentum: f64,
    /// Whether sgd looks ahead.
    pub nesterov: bool,
    /// The most that the root mean square of an update of adafactor may be.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub update_clip: f64,
    /// The second moment of adafactor decays by 1 - t^-x.
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
pub struct Schedule {
    /// The shape after the warm-up.
    pub kind: ScheduleKind,
    /// The warm-up, in which it rises linearly to its highest: a number of steps, or a share of the steps of the schedule (above 0, below 1), such as 0.1.
    #[schemars(extend("minimum" = 0))]
    pub warmup: Warmup,
    /// Where a falling one ends, as a share of its highest.
    #[schemars(range(min = 0, max = 1))]
    pub min_ratio: f64,
    /// The step where a falling one ends; null is the last step of the run.
    #[schemars(range(min = 1))]
    pub steps: Option<u64>,
    /// The exponent of polynomial.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub power: f64,
    /// Steps of the first cycle of cosine_restarts.
    #[schemars(range(min = 1))]
    pub cycle: u64,
    /// Every cycle is as many times as long as the one before.
    #[schemars(range(min = 1))]
    pub cycle_growth: u64,
    /// The share of the steps in which wsd falls, at their end.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub decay_share: f64,
    /// How wsd falls.
    pub decay_shape: DecayShape,
    /// Between two drops of step.
    #[schemars(range(min = 1))]
    pub every: u64,
    /// What that counts.
    pub unit: Unit,
    /// What the rate is multiplied by at each drop of step.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub gamma: f64,
    /// How the rate grows with the batch.
    pub scaling: Scaling,
    /// The tokens of a step for which optimizer.lr is meant; null with scaling none.
    #[schemars(range(min = 1))]
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
pub enum Unit {
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
pub struct Loss {
    /// Weight of the experts' load balance (Fedus et al. 2022), mean over layers.
    #[schemars(range(min = 0))]
    pub balance: f64,
    /// Weight of the router's squared log-sum-exp (Zoph et al. 2022).
    #[schemars(range(min = 0))]
    pub router_z: f64,
    /// Weight of the logits' squared log-sum-exp (Chowdhery et al. 2022).
    #[schemars(range(min = 0))]
    pub z: f64,
}

/// Floating-point formats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Precision {
    /// Of weights and activations; masters and moments are f32.
    pub kind: PrecisionKind,
    /// The loss scale that fp16 begins with; it multiplies the mean over a step's tokens. A step that overflows is skipped, counted, and halves it, so that the first few may be.
    #[schemars(range(min = 1))]
    pub initial_scale: f64,
    /// After this many good steps it doubles.
    #[schemars(range(min = 1))]
    pub growth_interval: u64,
}

/// Floating-point formats of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PrecisionKind {
    /// f32 throughout.
    F32,
    /// bfloat16 with f32 master weights.
    Bf16,
    /// IEEE half precision with f32 master weights and a dynamic loss scale.
    Fp16,
}

impl Default for Optimizer {
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
            momentum: 0.9,
            nesterov: false,
            update_clip: 1.0,
            decay_exponent: 0.8,
        }
    }
}

impl Default for Schedule {
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
            unit: Unit::Epochs,
            gamma: 0.85,
            scaling: Scaling::None,
            reference_tokens: None,
        }
    }
}

impl Default for Loss {
    fn default() -> Self {
        Self { balance: 0.01, router_z: 0.0, z: 0.0 }
    }
}

impl Default for Precision {
    /// The initial loss scale and growth interval are PyTorch's defaults.
    fn default() -> Self {
        Self { kind: PrecisionKind::F32, initial_scale: 65_536.0, growth_interval: 2000 }
    }
}
