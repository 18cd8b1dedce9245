//! Access to the tensors of a checkpoint in the memory of a device: the model's tensors with the names of the Hugging Face Hub,
//! those of the averaged model, and the optimizer state. Invariant: elements are read and written in place; a parameter that stacks several tensors
//! is stored as several tensors of the file.

use super::trained_model::TrainedModel;
use crate::TrainError;
use crate::{StatePart, StoredTensor};
use plimsoll_data::weights::{FileDType, f32_to_bf16, f32_to_f16};
use plimsoll_exec::{PersistentKind, PersistentTensor};
use plimsoll_graph::{Param, ParamPiece, StateDef, StateRole};
use plimsoll_plan::Location;
use plimsoll_runtime::session::TrainSession;
use std::collections::BTreeMap;
use std::ops::Range;

/// Locations of the tensors of both checkpoint files.
pub(super) struct CheckpointTensors {
    model: Vec<CheckpointTensor>,
    state: Vec<CheckpointTensor>,
    /// The model with averages in place of the trained parameters; empty if the run averages no weights.
    average: Vec<CheckpointTensor>,
    seed: u64,
}

/// Some elements of a tensor of a checkpoint file.
pub(super) struct TensorSlice {
    pub part: StatePart,
    /// Number of the tensor in the part.
    pub tensor: usize,
    pub elements: Range<u64>,
}

/// A tensor of a checkpoint file, of which the device holds all rows or a contiguous range of rows.
struct CheckpointTensor {
    stored: StoredTensor,
    /// Position of the first element in `held`, the range of elements that the device holds; the other elements keep
    /// their initial values.
    at: Location,
    held: Range<u64>,
    piece: Option<ParamPiece>,
}

impl CheckpointTensors {
    /// Builds the tables from the persistent tensors of a session.
    pub fn of(session: &TrainSession, trained: &TrainedModel, seed: u64) -> Self {
        let mut model = vec![];
        let mut state = vec![];
        let mut average = vec![];
        let persistent = session.residents();
        // Averages by the name of their parameter.
        let averages: BTreeMap<&str, &PersistentTensor> = persistent
            .iter()
            .filter_map(|tensor| match &tensor.what {
                PersistentKind::State(StateDef { role: StateRole::Average { param }, .. }) => {
                    Some((param.as_str(), tensor))
                }
                PersistentKind::State(_) | PersistentKind::Param(_) => None,
            })
            .collect();
        for tensor in &persistent {
            match &tensor.what {
                PersistentKind::Param(param) => {
                    model.extend(pieces_of(tensor, param, trained));
                    if !averages.is_empty() {
                        let mean = averages.get(param.name.as_str());
                        average.extend(pieces_of(mean.unwrap_or(&tensor), param, trained));
                    }
                }
                PersistentKind::State(s) => match &s.role {
                    // The file of the averaged model has it.
                    StateRole::Average { .. } => {}
                    // Gradients are consumed within a step and therefore not part of a checkpoint.
                    StateRole::Gradient { .. } => {}
                    StateRole::Master { .. }
                    | StateRole::Moment { .. }
                    | StateRole::AveragedSteps
                    | StateRole::Buffer { .. } => {
                        let shape: Vec<u64> = tensor.spec.shape.iter().filter_map(|d| d.fixed()).collect();
                        let name = s.role.to_string();
                        let stored = StoredTensor { name, dtype: dtype(tensor.spec.dtype), shape };
                        let held = 0..stored.elements();
                        state.push(CheckpointTensor { stored, at: tensor.at, held, piece: None });
                    }
                },
            }
        }
        for file in [&mut model, &mut average] {
            if file.is_empty() {
                continue;
            }
            file.extend(trained.carried_tensors().into_iter().map(|carried| {
                let stored = StoredTensor {
                    name: carried.name,
                    dtype: FileDType::F32,
                    shape: carried.piece.shape.clone(),
                };
                CheckpointTensor { stored, at: Location::in_arena(0), held: 0..0, piece: Some(carried.piece) }
            }));
            // Tied weights are one parameter with one name, and appear once in the file.
            file.sort_by(|a: &CheckpointTensor, b: &CheckpointTensor| a.stored.name.cmp(&b.stored.name));
            file.dedup_by(|a, b| a.stored.name == b.stored.name);
        }
        state.sort_by(|a: &CheckpointTensor, b: &CheckpointTensor| a.stored.name.cmp(&b.stored.name));
        Self { model, state, average, seed }
    }

    fn part(&self, part: StatePart) -> &[CheckpointTensor] {
        match part {
            StatePart::Model => &self.model,
            StatePart::State => &self.state,
            StatePart::Average => &self.average,
        }
    }

    /// Returns the tensors of a checkpoint file, sorted by name.
    pub fn tensors(&self, part: StatePart) -> Vec<StoredTensor> {
        self.part(part).iter().map(|t| t.stored.clone()).collect()
    }

    /// Reads the bytes of some elements of a tensor into `out`. The device has them in `session`; the elements that it does not
    /// hold are those of `trained`.
    pub fn read(
        &self,
        session: &mut TrainSession,
        trained: &TrainedModel,
        slice: TensorSlice,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError> {
        let TensorSlice { part, tensor, elements } = slice;
        let t = &self.part(part)[tensor];
        let size = t.stored.dtype.size();
        out.clear();
        out.resize(((elements.end - elements.start) * size) as usize, 0);
        // The elements from `a` to `b` are on the device; there are none if `a` is not below `b`.
        let a = elements.start.max(t.held.start);
        let b = elements.end.min(t.held.end);
        if let Some(piece) = t.piece.as_ref().filter(|_| a > elements.start || b < elements.end) {
            // Rows that the device does not hold are not used by the model, so they keep their initial values.
            let mut values = vec![0.0; (elements.end - elements.start) as usize];
            trained.tensor(self.seed, piece, elements.start, &mut values)?;
            for (x, bytes) in values.iter().zip(out.chunks_exact_mut(size as usize)) {
                if t.stored.dtype == FileDType::BF16 {
                    bytes.copy_from_slice(&f32_to_bf16(*x).to_le_bytes());
                } else if t.stored.dtype == FileDType::F16 {
                    bytes.copy_from_slice(&f32_to_f16(*x).to_le_bytes());
                } else {
                    bytes.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
        if a < b {
            let bytes = ((a - elements.start) * size) as usize..((b - elements.start) * size) as usize;
            session.read(bytes_after(t.at, (a - t.held.start) * size), &mut out[bytes])?;
        }
        Ok(())
    }

    /// Writes the elements from `start` on; elements that the device does not hold are ignored.
    pub fn write(
        &self,
        session: &mut TrainSession,
        part: StatePart,
        tensor: usize,
        start: u64,
        bytes: &[u8],
    ) -> Result<(), TrainError> {
        let t = &self.part(part)[tensor];
        let size = t.stored.dtype.size();
        let end = start + bytes.len() as u64 / size;
        let a = start.max(t.held.start);
        let b = end.min(t.held.end);
        if a < b {
            let range = ((a - start) * size) as usize..((b - start) * size) as usize;
            session.write(bytes_after(t.at, (a - t.held.start) * size), &bytes[range])?;
        }
        Ok(())
    }
}

/// The position `bytes` bytes behind another.
fn bytes_after(start: Location, bytes: u64) -> Location {
    Location { at: start.at + bytes, ..start }
}

/// Number of elements of a row of a tensor.
fn row_elements(piece: &ParamPiece) -> u64 {
    piece.shape.iter().skip(1).product()
}

/// Describes the pieces of a parameter whose values are at `tensor`: the parameter itself or its average.
fn pieces_of(tensor: &PersistentTensor, param: &Param, trained: &TrainedModel) -> Vec<CheckpointTensor> {
    let mut at = tensor.at;
    let mut tensors = vec![];
    for piece in &param.pieces {
        tensors.extend(piece_of(tensor, piece, at, trained));
        at = bytes_after(at, (piece.rows.1 - piece.rows.0) * row_elements(piece) * tensor.spec.dtype.size());
    }
    tensors
}

/// Describes one piece of a stacked parameter as a tensor of the model file; `None` if the file does not contain it.
fn piece_of(
    tensor: &PersistentTensor,
    piece: &ParamPiece,
    at: Location,
    trained: &TrainedModel,
) -> Option<CheckpointTensor> {
    let stored = StoredTensor {
        name: trained.hub_name(&piece.tensor)?,
        dtype: dtype(tensor.spec.dtype),
        shape: piece.shape.clone(),
    };
    let held = piece.rows.0 * row_elements(piece)..piece.rows.1 * row_elements(piece);
    Some(CheckpointTensor { stored, at, held, piece: Some(piece.clone()) })
}

fn dtype(dtype: plimsoll_graph::DType) -> FileDType {
    match dtype {
        plimsoll_graph::DType::F32 => FileDType::F32,
        plimsoll_graph::DType::Bf16 => FileDType::BF16,
        plimsoll_graph::DType::F16 => FileDType::F16,
        plimsoll_graph::DType::I32 => FileDType::I32,
        // Trained tensors are never quantized: the compiler rejects that.
        plimsoll_graph::DType::F8 | plimsoll_graph::DType::I8 | plimsoll_graph::DType::U8 => FileDType::U8,
    }
}
