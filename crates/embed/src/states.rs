//! Resolves the requested layers of hidden states. Invariant: every layer exists in the model and is requested
//! once; results contain the layers in the order of the request.

use super::Pooling;
use crate::EmbedError;
use plimsoll_data::rows::SafetensorsLayout;
use plimsoll_models::Output;

/// The requested layers and their pooling.
pub(super) struct LayerSelection {
    pub(super) pool: Pooling,
    /// `None` is the last layer, and results have no layer dimension.
    layers: Option<Vec<u32>>,
}

impl LayerSelection {
    /// Layers are numbered as in [`Output::HiddenOf`] up to `last`; negative numbers count from the last layer. `Err` if a
    /// layer does not exist or is given twice.
    pub(super) fn new(pool: Pooling, asked: Option<&[i64]>, last: u64) -> Result<Self, EmbedError> {
        let layers = asked.map(|asked| resolve(asked, last)).transpose()?;
        Ok(Self { pool, layers })
    }

    /// The outputs that the graph must have, in the order of the results.
    pub(super) fn outputs(&self) -> Vec<Output> {
        match (&self.layers, self.pool) {
            (Some(layers), _) => layers
                .iter()
                .map(|layer| match self.pool {
                    Pooling::Mean => Output::MeanOf(*layer),
                    Pooling::Cls => Output::ClsOf(*layer),
                    Pooling::Last => Output::LastOf(*layer),
                    Pooling::Tokens => Output::HiddenOf(*layer),
                })
                .collect(),
            (None, Pooling::Mean) => vec![Output::Mean],
            (None, Pooling::Cls) => vec![Output::Cls],
            (None, Pooling::Last) => vec![Output::Last],
            (None, Pooling::Tokens) => vec![Output::Hidden],
        }
    }

    /// Shape of the result of one sequence, or of one of its tokens: `(width)`, or `(layers, width)` if layers
    /// are requested.
    pub(super) fn row(&self, width: usize) -> Vec<usize> {
        self.layers.iter().map(Vec::len).chain([width]).collect()
    }

    /// Names of the embedding columns of a table.
    pub(super) fn columns(&self) -> Vec<String> {
        match &self.layers {
            Some(layers) => layers.iter().map(|layer| format!("layer_{layer}")).collect(),
            None => vec!["embedding".to_owned()],
        }
    }

    /// The layers for metadata; `None` if none are requested.
    pub(super) fn numbers(&self) -> Option<&[u32]> {
        self.layers.as_deref()
    }

    /// Layout of the tensors in a safetensors file.
    pub(super) fn safetensors(&self) -> SafetensorsLayout {
        match self.pool {
            Pooling::Mean | Pooling::Cls | Pooling::Last => SafetensorsLayout::Matrix,
            Pooling::Tokens => SafetensorsLayout::TensorPerId,
        }
    }
}

/// Converts layer numbers to numbers from 0 to `last`.
fn resolve(asked: &[i64], last: u64) -> Result<Vec<u32>, EmbedError> {
    let mut layers = vec![];
    let known = last as i64 + 1;
    for &layer in asked {
        let from_start = if layer < 0 { known + layer } else { layer };
        if !(0..known).contains(&from_start) {
            return Err(EmbedError::NoSuchLayer { layer, last });
        }
        if layers.contains(&(from_start as u32)) {
            return Err(EmbedError::LayerTwice { layer: from_start });
        }
        layers.push(from_start as u32);
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_count_from_both_ends() {
        let check = |asked: &[i64], wanted: &[u32]| {
            assert_eq!(resolve(asked, 33).expect("a layer"), wanted, "{asked:?}");
        };
        check(&[0, 6, -1], &[0, 6, 33]);
        check(&[33, -2, -34], &[33, 32, 0]);
        let refused = |asked: &[i64], wanted: &str| {
            let error = resolve(asked, 33).expect_err("refused").to_string();
            assert!(error.contains(wanted), "{error}");
        };
        refused(&[34], "layers=34: the model has layers 0 (the embedding) to 33");
        refused(&[0, -35], "layers=-35: ");
        refused(&[-35], "or -34 to -1");
        refused(&[i64::MIN], "the model has layers");
        refused(&[33, 2, -1], "layer 33 is listed twice");
    }
}
