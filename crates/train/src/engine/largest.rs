//! The largest micro-batch, depth or width that fits a line: by planning, doubling and then halving. Invariant: what
//! is answered was planned inside the line, and the next larger one was refused.

use super::super::config::{Auto, ModelKind, TrainConfig};
use super::subject::MOST_LAYERS;
use super::{program, subject};
use crate::TrainError;
use graph::Bytes;
use plan::Target;
use runtime::Observer;

/// What is grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Tokens of a micro-batch.
    Tokens,
    /// Blocks.
    Layers,
    /// The width, and the inner width in proportion.
    Hidden,
}

/// The largest, and its plans.
#[derive(Debug)]
pub struct Largest {
    /// What was grown.
    pub size: Size,
    /// How large it may be.
    pub value: u64,
    /// The next larger one, which does not fit.
    pub refused: u64,
    /// The configuration with it.
    pub config: TrainConfig,
    /// Its plans.
    pub found: plan::Found,
}

/// Tokens of a micro-batch are a multiple of this; of a head's rows every number is tried.
const TOKENS: u64 = 64;

/// The width of a head is a multiple of this: what products on tiles take without a rest.
const HEAD_WIDTH: u64 = 8;

/// Beyond this nothing is looked for.
const MOST: u64 = 1 << 32;

/// The largest `size` of a configuration on a machine inside a line.
///
/// # Errors
/// The bill of the smallest one, where not even that fits.
pub fn largest(
    config: &TrainConfig,
    size: Size,
    target: &Target,
    budget: Bytes,
    observer: &mut dyn Observer,
) -> Result<Largest, TrainError> {
    let decoder = matches!(config.model.kind, ModelKind::MoeLm | ModelKind::DenseLm);
    if size != Size::Tokens && !decoder {
        let kind = config.model.kind.name();
        return Err(TrainError::LargestOfKind { size: size.name(), kind });
    }
    if size != Size::Tokens && config.model.from.is_some() {
        return Err(TrainError::LargestOfModel { size: size.name() });
    }
    let step = size.step(config);
    let mut fits = |n: u64| -> Result<bool, TrainError> {
        let config = size.of(config, n * step);
        let subject = subject(&config, observer)?;
        program::fits(&config, &subject, target, budget, observer)
    };
    let least = size.least(config, &mut fits)?;
    let most = match size {
        Size::Layers => MOST_LAYERS,
        Size::Tokens | Size::Hidden => MOST / step,
    };
    let mut low = least;
    // `low` fits; if not even the least does, its search below returns the bill.
    let mut high = least + 1;
    if fits(least)? {
        let mut gap = 1;
        while high <= most && fits(high)? {
            (low, gap) = (high, 2 * gap);
            high = (low + gap).min(most + 1);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match fits(middle)? {
                true => low = middle,
                false => high = middle,
            }
        }
    }
    let config = size.of(config, low * step);
    let found = program::search(&config, &subject(&config, observer)?, target, budget, observer)?;
    Ok(Largest { size, value: low * step, refused: high * step, config, found })
}

impl Size {
    /// Its word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Layers => "layers",
            Self::Hidden => "hidden",
        }
    }

    /// It is a multiple of this.
    fn step(self, config: &TrainConfig) -> u64 {
        match self {
            Self::Tokens if config.model.kind == ModelKind::Head => 1,
            Self::Tokens => TOKENS,
            Self::Layers => 1,
            Self::Hidden => config.model.heads * HEAD_WIDTH,
        }
    }

    /// Where to begin, in steps. A step of one micro-batch need not add gradients up, so that it may fit where half of
    /// it does not: it is tried first.
    fn least(
        self,
        config: &TrainConfig,
        fits: &mut dyn FnMut(u64) -> Result<bool, TrainError>,
    ) -> Result<u64, TrainError> {
        let step = self.step(config);
        match self {
            Self::Layers | Self::Hidden => Ok(1),
            Self::Tokens => {
                let whole = config.batch.tokens.div_ceil(step);
                let head = config.model.kind == ModelKind::Head;
                let least = if head { 2 } else { config.data.longest.div_ceil(step) };
                Ok(if whole > least && !fits(whole)? { least } else { whole.max(least) })
            }
        }
    }

    /// The configuration with so much.
    fn of(self, config: &TrainConfig, n: u64) -> TrainConfig {
        let mut grown = config.clone();
        match self {
            Self::Tokens => {
                grown.batch.micro_tokens = Auto(Some(n));
                // A whole number of micro-batches.
                grown.batch.tokens = config.batch.tokens.next_multiple_of(n);
            }
            Self::Layers => grown.model.layers = n,
            Self::Hidden => {
                let ratio = config.model.intermediate as f64 / config.model.hidden as f64;
                grown.model.hidden = n;
                grown.model.intermediate = ((n as f64 * ratio) as u64).next_multiple_of(HEAD_WIDTH);
            }
        }
        grown
    }
}
