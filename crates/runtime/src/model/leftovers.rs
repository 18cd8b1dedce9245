//! Tensors of a weight file that its model does not read. Invariant: every tensor is either read by a graph of the model,
//! known to have no effect on its results, or named in a note.

use super::tensors::pieces;
use crate::{Level, Observer, RuntimeError};
use plimsoll_data::printable::Name;
use plimsoll_data::weights::Weights;
use plimsoll_graph::Bounds;
use plimsoll_models::{Encoder, Output, SequenceModel, tied_tensors};
use std::collections::BTreeSet;

/// Number of tensors that a note names.
const NAMED: usize = 3;

/// Ends of the names of tensors without an effect: frequencies, which are computed or compared, counters, and positions.
const WITHOUT_EFFECT: [&str; 4] =
    ["inv_freq", "position_ids", "num_batches_tracked", "position_embeddings.weight"];

/// Modules of heads and poolings, which only some commands read.
const HEADS: [&str; 5] = ["lm_head", "cls", "classifier", "contact_head", "pooler"];

/// Says which tensors of the weights of the model `name` are not read: those of layers that config.json does not have, and
/// others.
pub fn note(
    name: &str,
    model: &SequenceModel,
    weights: &Weights,
    observer: &mut dyn Observer,
) -> Result<(), RuntimeError> {
    let read = read_by(model)?;
    let unread: Vec<&str> =
        weights.tensors().map(|tensor| tensor.name()).filter(|tensor| !read.contains(*tensor)).collect();
    let layers = model.layers();
    let (deeper, others): (Vec<&str>, Vec<&str>) = unread
        .into_iter()
        .filter(|tensor| is_deeper(tensor, layers) || !is_without_effect(tensor))
        .partition(|tensor| is_deeper(tensor, layers));
    if let Some(last) = deeper.iter().filter_map(|tensor| layer(tensor)).max() {
        let text = format!(
            "{name}: the weights have {} layers, of which config.json (num_hidden_layers) takes the first {layers}",
            last + 1
        );
        observer.say(Level::Warning, &text);
    }
    if !others.is_empty() {
        let text = format!(
            "{name}: the model does not read {} of the tensors in its weights: {}{}",
            others.len(),
            Name(&others[..others.len().min(NAMED)].join(", ")),
            if others.len() > NAMED { ", ..." } else { "" }
        );
        observer.say(Level::Warning, &text);
    }
    Ok(())
}

/// The names that the tensors of the model may have in a file.
fn read_by(model: &SequenceModel) -> Result<BTreeSet<String>, RuntimeError> {
    let outputs: &[Output] = match model {
        SequenceModel::Encoder(Encoder::DnabertS(_)) => &[Output::Mean],
        SequenceModel::Encoder(Encoder::Esm2(_)) | SequenceModel::Decoder(_) => &[Output::Mean, Output::Logits],
    };
    let graph = model.graph(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 }, outputs)?;
    let mut read: BTreeSet<String> = pieces(&graph).flat_map(|piece| model.candidates(&piece.tensor)).collect();
    if let SequenceModel::Encoder(encoder) = model {
        read.extend(tied_tensors(encoder).iter().flat_map(|(twin, _)| model.candidates(twin)));
    }
    Ok(read)
}

/// Whether a tensor has no effect on hidden states.
fn is_without_effect(tensor: &str) -> bool {
    WITHOUT_EFFECT.iter().any(|end| tensor.ends_with(end))
        || tensor.split('.').any(|module| HEADS.contains(&module))
}

/// Whether a tensor belongs to a layer behind the last of `layers` layers.
fn is_deeper(tensor: &str, layers: u64) -> bool {
    layer(tensor).is_some_and(|layer| layer >= layers)
}

/// The number of the layer that a tensor belongs to: the component after `layer` or `layers`.
fn layer(tensor: &str) -> Option<u64> {
    let (_, rest) = tensor.split_once("layers.").or_else(|| tensor.split_once("layer."))?;
    rest.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbered_in_names() {
        for (tensor, wanted) in [
            ("model.layers.12.mlp.up_proj.weight", Some(12)),
            ("layers.0.self_attn.q_proj.weight", Some(0)),
            ("esm.encoder.layer.5.output.dense.bias", Some(5)),
            ("encoder.sentence_encoder.layers.7.fc1.weight", Some(7)),
            ("model.norm.weight", None),
            ("lm_head.layer_norm.bias", None),
        ] {
            assert_eq!(layer(tensor), wanted, "{tensor}");
        }
    }
}
