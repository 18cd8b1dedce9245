//! Opens callers: configuration and weights of a classifier of DNA windows. Invariant: every tensor that the inference
//! graph reads was found with the expected shape before the first byte is allocated.

use super::hub::CONFIG;
use super::tensors::{pieces, read_pieces};
use super::{bundle, read_config};
use crate::session::WeightSource;
use crate::{ModelError, RuntimeError};
use plimsoll_data::weights::Weights;
use plimsoll_graph::{Bounds, Param};
use plimsoll_models::CallerConfig;
use std::ops::Range;
use std::path::Path;

/// File of the weights in the folder of a caller.
const WEIGHTS: &str = "model.safetensors";

/// A caller with its weights.
pub struct CallerModel {
    /// The name under which the model was requested: its folder, or the name of the built-in caller.
    pub name: String,
    /// The architecture, which builds the graph, and the tasks.
    pub config: CallerConfig,
    /// The weights.
    pub weights: Weights,
    /// Text of the config.json.
    pub config_text: String,
}

impl CallerModel {
    /// Opens the caller in `folder`, which contains config.json and model.safetensors.
    ///
    /// # Errors
    /// Files that cannot be read, a configuration that is not that of a caller or has no tasks, tensors that are missing
    /// or have other shapes.
    pub fn open(folder: &Path) -> Result<Self, RuntimeError> {
        let path = folder.join(CONFIG);
        let text = read_config(&path)?;
        let config = CallerConfig::from_json(&text)
            .map_err(|source| RuntimeError::Config { path: path.clone(), source })?;
        let weights = Weights::open(&folder.join(WEIGHTS))?;
        Self::new(folder.display().to_string(), config, text, weights)
    }

    /// Opens the caller compiled into the program.
    ///
    /// # Errors
    /// Those of [`Self::open`]; none of them occurs with the files that the program contains.
    pub fn builtin() -> Result<Self, RuntimeError> {
        let name = "built-in caller";
        let text = bundle::CALLER_CONFIG;
        let config = CallerConfig::from_json(text)
            .map_err(|source| RuntimeError::Config { path: format!("{name} {CONFIG}").into(), source })?;
        let weights = Weights::from_bytes(name, bundle::CALLER)?;
        Self::new(name.to_owned(), config, text.to_owned(), weights)
    }

    /// Text of the calibration of the built-in caller.
    pub fn builtin_calibration() -> &'static str {
        bundle::CALLER_CALIBRATION
    }

    fn new(
        name: String,
        config: CallerConfig,
        config_text: String,
        weights: Weights,
    ) -> Result<Self, RuntimeError> {
        if config.tasks.is_empty() {
            return Err(ModelError::CallerWithoutTasks { name }.into());
        }
        // Shapes of parameters do not depend on the bounds.
        let graph = config.graph(Bounds { tokens: 6, sequences: 1, longest: 1, packs: 1 })?;
        for piece in pieces(&graph) {
            if config.derived(&piece.tensor).is_none() {
                weights.expect(&piece.tensor, &piece.shape)?;
            }
        }
        Ok(Self { name, config, weights, config_text })
    }
}

impl WeightSource for CallerModel {
    fn read(&self, param: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, elements, out, &mut |piece, range, out| {
            match self.config.derived(&piece.tensor) {
                Some(values) => out.copy_from_slice(&values[range.start as usize..range.end as usize]),
                None => self.weights.read_f32(&piece.tensor, range, out)?,
            }
            Ok(())
        })
    }
}
