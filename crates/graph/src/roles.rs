//! Roles of the outputs and states of a graph: their meaning to the planner and the trainer. Invariant: the text of a role
//! (`Display`) is the name of its output or state in text forms, saved graphs and checkpoints, and only this module reads a
//! role from a name.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// Meaning of an output of a graph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OutputRole {
    /// Minimized loss without the losses of routers: f32 (1).
    Loss,
    /// Sum of the losses of all routers, which is minimized too: f32 (1).
    Auxiliary,
    /// Cross-entropy, where the loss has other parts too: f32 (1).
    CrossEntropy,
    /// Z-loss of the output logits: f32 (1).
    ZLoss,
    /// Divergence from the teachers: f32 (1).
    DistillationLoss,
    /// Load-balancing loss of all routers: f32 (1).
    BalanceLoss,
    /// Z-loss of the logits of all routers: f32 (1).
    RouterZLoss,
    /// First row of each of the E experts of a layer, and the number of rows: i32 (E + 1).
    ExpertRows {
        /// Number of the layer, from 0.
        layer: u32,
    },
    /// Number of rows that the experts of a layer dropped: i32 (1).
    DroppedRows {
        /// Number of the layer, from 0.
        layer: u32,
    },
    /// Factor of the gradients, and the same factor or zero if a gradient was not finite: f32 (2).
    GradientScale,
    /// Global norm of the gradients: f32 (1).
    GradientNorm,
    /// Gradient of a parameter, of the parameter's shape.
    Gradient {
        /// Name of the parameter.
        param: String,
    },
    /// An output without a meaning to the planner and the trainer, such as embeddings, logits and scores. The name must not
    /// be that of another role.
    Named(String),
}

impl OutputRole {
    /// The roles that have a fixed name.
    const FIXED: [Self; 9] = [
        Self::Loss,
        Self::Auxiliary,
        Self::CrossEntropy,
        Self::ZLoss,
        Self::DistillationLoss,
        Self::BalanceLoss,
        Self::RouterZLoss,
        Self::GradientScale,
        Self::GradientNorm,
    ];

    /// The role of an output from its name.
    fn parsed(name: &str) -> Self {
        if let Some(role) = Self::FIXED.into_iter().find(|role| role.has_name(name)) {
            return role;
        }
        if let Some(param) = name.strip_prefix("grad ") {
            return Self::Gradient { param: param.to_owned() };
        }
        let layer = name.split_once('.').and_then(|(_, layer)| layer.parse().ok());
        let of_layer = layer.map(|layer| [Self::ExpertRows { layer }, Self::DroppedRows { layer }]);
        // Compared with the whole name, because a number has several texts: `load.07` is not the name of a role.
        let found = of_layer.into_iter().flatten().find(|role| role.has_name(name));
        found.unwrap_or_else(|| Self::Named(name.to_owned()))
    }

    fn has_name(&self, name: &str) -> bool {
        self.to_string() == name
    }

    /// Whether this is an output without a meaning under the name of another role.
    pub(crate) fn is_misnamed(&self) -> bool {
        matches!(self, Self::Named(name) if Self::parsed(name) != *self)
    }
}

impl fmt::Display for OutputRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss => f.write_str("loss"),
            Self::Auxiliary => f.write_str("aux"),
            Self::CrossEntropy => f.write_str("cross_entropy"),
            Self::ZLoss => f.write_str("z_loss"),
            Self::DistillationLoss => f.write_str("distillation_loss"),
            Self::BalanceLoss => f.write_str("balance_loss"),
            Self::RouterZLoss => f.write_str("router_z_loss"),
            Self::ExpertRows { layer } => write!(f, "load.{layer}"),
            Self::DroppedRows { layer } => write!(f, "dropped.{layer}"),
            Self::GradientScale => f.write_str("scale"),
            Self::GradientNorm => f.write_str("norm"),
            Self::Gradient { param } => write!(f, "grad {param}"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

/// Reads the role of an output from its name in a text form or a saved graph.
impl FromStr for OutputRole {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(Self::parsed(name))
    }
}

/// An output without a meaning to the planner and the trainer. Debug builds panic on the name of another role, and the
/// verifier refuses it.
impl From<String> for OutputRole {
    fn from(name: String) -> Self {
        let role = Self::Named(name);
        debug_assert!(!role.is_misnamed(), "`{role}` is the name of a role, which must be given in its place");
        role
    }
}

/// As `From<String>`.
impl From<&str> for OutputRole {
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

/// As `From<String>`.
impl From<&String> for OutputRole {
    fn from(name: &String) -> Self {
        name.clone().into()
    }
}

impl From<&OutputRole> for OutputRole {
    fn from(role: &OutputRole) -> Self {
        role.clone()
    }
}

impl Serialize for OutputRole {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OutputRole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|name| Self::parsed(&name))
    }
}

/// A tensor that persists across steps and is not stored in a weight file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "SavedState", try_from = "SavedState")]
pub struct StateDef {
    /// Meaning of the state, unique within a graph; graphs of one program that have the same role share the storage.
    pub role: StateRole,
    /// Initial value of every element before the first step.
    pub init: f32,
}

impl StateDef {
    /// A state that is zero before the first step.
    pub fn zeros(role: StateRole) -> Self {
        Self { role, init: 0.0 }
    }
}

/// A state in a saved graph.
#[derive(Serialize, Deserialize)]
struct SavedState {
    name: String,
    kind: StateKind,
    init: f32,
}

impl From<StateDef> for SavedState {
    fn from(state: StateDef) -> Self {
        Self { name: state.role.to_string(), kind: state.role.kind(), init: state.init }
    }
}

impl TryFrom<SavedState> for StateDef {
    type Error = String;

    fn try_from(saved: SavedState) -> Result<Self, String> {
        Ok(Self { role: StateRole::parsed(saved.kind, &saved.name)?, init: saved.init })
    }
}

/// Meaning of a state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateRole {
    /// Gradient of a parameter, summed over the micro-batches of a step if there are several.
    Gradient {
        /// Name of the parameter.
        param: String,
    },
    /// f32 master copy of a 16-bit parameter, which the optimizer updates.
    Master {
        /// Name of the parameter.
        param: String,
    },
    /// State of the optimizer for a parameter.
    Moment {
        /// Name of the parameter.
        param: String,
        /// Which of the optimizer's states.
        which: Moment,
    },
    /// f32 average of a trained parameter.
    Average {
        /// Name of the parameter.
        param: String,
    },
    /// Number of steps that the averages of the parameters have seen.
    AveragedSteps,
    /// Running statistics that no parameter has.
    Buffer {
        /// Name of the state.
        name: String,
    },
}

/// Optimizer state of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// Running mean of the gradient.
    First,
    /// Scales of the blocks of a quantized [`Moment::First`].
    FirstScales,
    /// Running mean of the squared gradient.
    Second,
    /// Scales of the blocks of a quantized [`Moment::Second`].
    SecondScales,
    /// Means of the rows of [`Moment::Second`], where it is factored.
    SecondRows,
    /// Means of the columns of [`Moment::Second`], where it is factored.
    SecondColumns,
    /// Momentum of stochastic gradient descent.
    Momentum,
}

impl Moment {
    const ALL: [Self; 7] = [
        Self::First,
        Self::FirstScales,
        Self::Second,
        Self::SecondScales,
        Self::SecondRows,
        Self::SecondColumns,
        Self::Momentum,
    ];

    /// First word of the state's name.
    fn name(self) -> &'static str {
        match self {
            Self::First => "m",
            Self::FirstScales => "m_absmax",
            Self::Second => "v",
            Self::SecondScales => "v_absmax",
            Self::SecondRows => "row",
            Self::SecondColumns => "column",
            Self::Momentum => "momentum",
        }
    }
}

/// Name of [`StateRole::AveragedSteps`].
const AVERAGED_STEPS: &str = "steps of ema";

impl StateRole {
    /// The state's line in the memory ledger.
    pub fn kind(&self) -> StateKind {
        match self {
            Self::Gradient { .. } => StateKind::Gradient,
            Self::Master { .. } => StateKind::Master,
            Self::Moment { .. } => StateKind::Optimizer,
            Self::Average { .. } | Self::AveragedSteps => StateKind::Average,
            Self::Buffer { .. } => StateKind::Buffer,
        }
    }

    /// Name of the parameter that the state belongs to.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Gradient { param }
            | Self::Master { param }
            | Self::Moment { param, .. }
            | Self::Average { param } => Some(param),
            Self::AveragedSteps | Self::Buffer { .. } => None,
        }
    }

    /// Reads the role of a state from its kind and its name in a text form or a saved graph.
    pub(crate) fn parsed(kind: StateKind, name: &str) -> Result<Self, String> {
        let role = match kind {
            StateKind::Gradient => param_after("grad", name).map(|param| Self::Gradient { param }),
            StateKind::Master => param_after("master", name).map(|param| Self::Master { param }),
            StateKind::Optimizer => Moment::ALL
                .into_iter()
                .find_map(|which| param_after(which.name(), name).map(|param| Self::Moment { param, which })),
            StateKind::Average if name == AVERAGED_STEPS => Some(Self::AveragedSteps),
            StateKind::Average => param_after("ema", name).map(|param| Self::Average { param }),
            StateKind::Buffer => Some(Self::Buffer { name: name.to_owned() }),
        };
        role.ok_or_else(|| format!("`{name}` is not the name of a state of the kind `{}`", kind.label()))
    }
}

/// Name of the parameter in the name of a state, which begins with `word` and a space.
fn param_after(word: &str, name: &str) -> Option<String> {
    name.strip_prefix(word)?.strip_prefix(' ').map(str::to_owned)
}

impl fmt::Display for StateRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gradient { param } => write!(f, "grad {param}"),
            Self::Master { param } => write!(f, "master {param}"),
            Self::Moment { param, which } => write!(f, "{} {param}", which.name()),
            Self::Average { param } => write!(f, "ema {param}"),
            Self::AveragedSteps => f.write_str(AVERAGED_STEPS),
            Self::Buffer { name } => f.write_str(name),
        }
    }
}

/// Purpose of a state: its line in the memory ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// Gradients accumulated over the micro-batches of a step.
    Gradient,
    /// Optimizer state: moments and their quantization scales.
    Optimizer,
    /// f32 master copy of a 16-bit parameter.
    Master,
    /// Averages of the trained weights, in f32, and the number of steps that they average.
    Average,
    /// Running statistics of batch normalisation.
    Buffer,
}

impl StateKind {
    /// Name of the line in the memory ledger.
    pub fn label(self) -> &'static str {
        match self {
            Self::Gradient => "gradients",
            Self::Optimizer => "optimizer",
            Self::Master => "master weights",
            Self::Average => "averaged weights",
            Self::Buffer => "buffers",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bounds, Builder, DType, Dim};

    #[test]
    fn the_name_of_an_output_gives_its_role() {
        let param = || "layers.3.fc1.weight".to_owned();
        let typed = [
            (OutputRole::ExpertRows { layer: 3 }, "load.3"),
            (OutputRole::DroppedRows { layer: 0 }, "dropped.0"),
            (OutputRole::Gradient { param: param() }, "grad layers.3.fc1.weight"),
            (OutputRole::Loss, "loss"),
            (OutputRole::Auxiliary, "aux"),
            (OutputRole::GradientScale, "scale"),
            (OutputRole::GradientNorm, "norm"),
        ];
        for (role, name) in typed {
            assert_eq!(role.to_string(), name);
            assert_eq!(name.parse(), Ok(role));
            assert!(OutputRole::Named(name.to_owned()).is_misnamed(), "{name}");
        }
        for role in OutputRole::FIXED {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        for name in
            ["mean", "mean.3", "load", "load.", "load.07", "load.+3", "load.4294967296", "lost", "gradient w"]
        {
            let role = OutputRole::Named(name.to_owned());
            assert_eq!(name.parse(), Ok(role.clone()));
            assert_eq!(role.to_string(), name);
            assert!(!role.is_misnamed(), "{name}");
        }
    }

    /// Every output is found by its role.
    #[test]
    fn outputs_have_different_roles() {
        let built = |roles: [OutputRole; 2]| {
            let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 });
            let x = g.input("x", &[Dim::Fixed(1)], DType::F32);
            let y = g.gelu(x);
            roles.into_iter().for_each(|role| g.output(role, y));
            g.finish().map_err(|error| error.to_string())
        };
        let graph = built([OutputRole::Loss, "y".into()]).expect("verified");
        assert_eq!(graph.output(&OutputRole::Loss), graph.output("y"));
        assert_eq!(graph.output(OutputRole::Auxiliary), None);
        for (roles, wanted) in [
            (["y".into(), "y".into()], "there are two outputs y"),
            ([OutputRole::Loss, OutputRole::Loss], "there are two outputs loss"),
            (
                [OutputRole::Loss, OutputRole::Named("loss".to_owned())],
                "output loss has the name of another role",
            ),
        ] {
            assert_eq!(built(roles).expect_err("refused"), wanted);
        }
    }

    #[test]
    fn the_kind_and_name_of_a_state_give_its_role() {
        let param = || "layers.3.fc1.weight".to_owned();
        let moments = Moment::ALL.map(|which| StateRole::Moment { param: param(), which });
        let others = [
            StateRole::Gradient { param: param() },
            StateRole::Master { param: param() },
            StateRole::Average { param: param() },
            StateRole::AveragedSteps,
            StateRole::Buffer { name: "grad w".to_owned() },
        ];
        for role in moments.into_iter().chain(others) {
            assert_eq!(StateRole::parsed(role.kind(), &role.to_string()), Ok(role.clone()));
            let saved = serde_json::to_string(&StateDef { role: role.clone(), init: 0.5 }).expect("JSON");
            assert!(saved.starts_with(&format!("{{\"name\":\"{role}\",\"kind\":")), "{saved}");
            let read: StateDef = serde_json::from_str(&saved).expect("a state");
            assert_eq!(read, StateDef { role, init: 0.5 });
        }
        for (kind, name) in [
            (StateKind::Gradient, "gradw"),
            (StateKind::Gradient, "m w"),
            (StateKind::Optimizer, "ema w"),
            (StateKind::Average, "steps of"),
            (StateKind::Master, "w"),
        ] {
            let error = StateRole::parsed(kind, name).expect_err(name);
            assert_eq!(error, format!("`{name}` is not the name of a state of the kind `{}`", kind.label()));
        }
    }
}
