//! Values of the tensors of a model: from its weight file, or derived from its configuration. Invariant: a parameter that is
//! concatenated from several tensors is read in ranges, never as a whole.

use crate::{ModelError, RuntimeError};
use plimsoll_data::weights::{ModelPath, Weights};
use plimsoll_graph::{Graph, Param, ParamPiece};
use std::ops::Range;

/// Checks that two tied tensors of the model `name` have equal shapes and values; reads a bounded number of elements at a
/// time.
pub(super) fn check_twin(name: &str, weights: &Weights, a: &str, b: &str) -> Result<(), RuntimeError> {
    let n = weights.tensor(b)?.elements();
    let same_shape = weights.tensor(a)?.shape() == weights.tensor(b)?.shape();
    const PART: u64 = 1 << 14;
    let mut x = vec![0f32; PART as usize];
    let mut y = vec![0f32; PART as usize];
    let mut equal = same_shape;
    for start in (0..n).step_by(PART as usize).take_while(|_| same_shape) {
        let len = (n - start).min(PART) as usize;
        weights.read_f32(a, start..start + len as u64, &mut x[..len])?;
        weights.read_f32(b, start..start + len as u64, &mut y[..len])?;
        equal &= x[..len] == y[..len];
    }
    if equal {
        return Ok(());
    }
    Err(ModelError::Untied { name: name.to_owned(), a: a.to_owned(), b: b.to_owned() }.into())
}

/// Opens the weights of a model.
pub(super) fn weights_of(name: &str, place: &ModelPath) -> Result<Weights, RuntimeError> {
    match place.weights() {
        Some(weights) => Ok(Weights::open(weights)?),
        None => Err(ModelError::WithoutWeights { name: name.to_owned() }.into()),
    }
}

/// Source of a tensor's values.
pub(super) enum TensorSource {
    /// In the weight file, under this name.
    File(String),
    /// In memory: values derived from the configuration.
    Memory(Vec<f32>),
}

impl TensorSource {
    pub(super) fn read(
        &self,
        weights: &Weights,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RuntimeError> {
        match self {
            Self::File(name) => weights.read_f32(name, range, out)?,
            Self::Memory(values) => out.copy_from_slice(&values[range.start as usize..range.end as usize]),
        }
        Ok(())
    }
}

/// Number of rows of a tensor; 0 for a scalar.
pub(super) fn rows(weights: &Weights, tensor: &str) -> Result<u64, RuntimeError> {
    Ok(weights.tensor(tensor)?.shape().first().copied().unwrap_or(0))
}

/// The pieces of all parameters of a graph; each piece is a range of rows of one tensor in the file.
pub(super) fn pieces(graph: &Graph) -> impl Iterator<Item = &ParamPiece> {
    graph.params.iter().flat_map(|p| &p.pieces)
}

/// Reads a range of one piece's tensor into a slice.
pub(super) type ReadPiece<'a> =
    &'a mut dyn FnMut(&ParamPiece, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>;

/// Reads `elements` of a parameter by splitting the range into ranges of the tensors of which the parameter is
/// concatenated.
pub(super) fn read_pieces(
    param: &Param,
    elements: Range<u64>,
    out: &mut [f32],
    read: ReadPiece<'_>,
) -> Result<(), RuntimeError> {
    // `start..end` are the parameter's elements covered by the piece; `first` is the piece's first element in its
    // tensor. Element `start + n` of the parameter is therefore element `first + n` of the tensor.
    let mut start = 0;
    for piece in &param.pieces {
        let row: u64 = piece.shape.iter().skip(1).product();
        let first = piece.rows.0 * row;
        let end = start + (piece.rows.1 - piece.rows.0) * row;
        let from = elements.start.max(start);
        let to = elements.end.min(end);
        if from < to {
            let part = (from - elements.start) as usize..(to - elements.start) as usize;
            read(piece, first + from - start..first + to - start, &mut out[part])?;
        }
        start = end;
    }
    Ok(())
}
