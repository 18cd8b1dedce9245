//! Access to the tensors of a checkpoint in the memory of a device: the model's tensors with the names of the Hugging Face Hub,
//! those of the averaged model, and the optimizer state. Invariant: elements are read and written in place; a parameter that stacks several tensors
//! is stored as several tensors of the file.

use super::trained_model::TrainedModel;
use crate::TrainError;
use crate::{StatePart, Stored};
use plimsoll_data::weights::{FileDType, f32_to_bf16, f32_to_f16};
use plimsoll_exec::{PersistentKind, PersistentTensor};
use plimsoll_graph::{Param, ParamPiece, StateDef, StateRole};
use plimsoll_plan::Location;
use plimsoll_runtime::session::TrainSession;
use std::collections::BTreeMap;
use std::ops::Range;

/// Locations of the tensors of both checkpoint files.
pub(super) struct Store {
    model: Vec<Tensor>,
    state: Vec<Tensor>,
    /// The model with averages in place of the trained parameters; empty if the run averages no weights.
    average: Vec<Tensor>,
    seed: u64,
}

/// A tensor of a checkpoint file, of which the device holds all rows or a contiguous range of rows.
struct Tensor {
    stored: Stored,
    /// Position of the first element in `there`, the range of elements that the device holds; the other elements keep
    /// their initial values.
    at: Location,
    there: Range<u64>,
    piece: Option<ParamPiece>,
}

impl Store {
    /// Builds the tables from the persistent tensors of a session.
    pub fn of(session: &TrainSession, subject: &TrainedModel, seed: u64) -> Self {
        let (mut model, mut state, mut average) = (vec![], vec![], vec![]);
        let residents = session.residents();
        // Averages by the name of their parameter.
        let averages: BTreeMap<&str, &PersistentTensor> = residents
            .iter()
            .filter_map(|resident| match &resident.what {
                PersistentKind::State(StateDef { role: StateRole::Average { param }, .. }) => {
                    Some((param.as_str(), resident))
                }
                PersistentKind::State(_) | PersistentKind::Param(_) => None,
            })
            .collect();
        for resident in &residents {
            match &resident.what {
                PersistentKind::Param(param) => {
                    model.extend(pieces_of(resident, param, subject));
                    if !averages.is_empty() {
                        let mean = averages.get(param.name.as_str());
                        average.extend(pieces_of(mean.unwrap_or(&resident), param, subject));
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
                        let shape: Vec<u64> = resident.spec.shape.iter().filter_map(|d| d.fixed()).collect();
                        let name = s.role.to_string();
                        let stored = Stored { name, dtype: dtype(resident.spec.dtype), shape };
                        let there = 0..stored.elements();
                        state.push(Tensor { stored, at: resident.at, there, piece: None });
                    }
                },
            }
        }
        for file in [&mut model, &mut average] {
            if file.is_empty() {
                continue;
            }
            file.extend(subject.kept().into_iter().map(|kept| {
                let stored = Stored { name: kept.name, dtype: FileDType::F32, shape: kept.piece.shape.clone() };
                Tensor { stored, at: Location::in_arena(0), there: 0..0, piece: Some(kept.piece) }
            }));
            // Tied weights are one parameter with one name, and appear once in the file.
            file.sort_by(|a: &Tensor, b: &Tensor| a.stored.name.cmp(&b.stored.name));
            file.dedup_by(|a, b| a.stored.name == b.stored.name);
        }
        state.sort_by(|a: &Tensor, b: &Tensor| a.stored.name.cmp(&b.stored.name));
        Self { model, state, average, seed }
    }

    fn part(&self, part: StatePart) -> &[Tensor] {
        match part {
            StatePart::Model => &self.model,
            StatePart::State => &self.state,
            StatePart::Average => &self.average,
        }
    }

    /// Returns the tensors of a checkpoint file, sorted by name.
    pub fn tensors(&self, part: StatePart) -> Vec<Stored> {
        self.part(part).iter().map(|t| t.stored.clone()).collect()
    }

    /// Reads the bytes of a range of elements of a tensor into `out`.
    pub fn read(
        &self,
        session: &mut TrainSession,
        subject: &TrainedModel,
        part: StatePart,
        tensor: usize,
        elements: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError> {
        let t = &self.part(part)[tensor];
        let size = t.stored.dtype.size();
        out.clear();
        out.resize(((elements.end - elements.start) * size) as usize, 0);
        let (a, b) = (elements.start.max(t.there.start), elements.end.min(t.there.end));
        if let Some(piece) = t.piece.as_ref().filter(|_| a > elements.start || b < elements.end) {
            // Rows that the device does not hold are not used by the model, so they keep their initial values.
            let mut values = vec![0.0; (elements.end - elements.start) as usize];
            subject.tensor(self.seed, piece, elements.start, &mut values)?;
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
            let place = ((a - elements.start) * size) as usize..((b - elements.start) * size) as usize;
            session.read(behind(t.at, (a - t.there.start) * size), &mut out[place])?;
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
        let (a, b) = (start.max(t.there.start), end.min(t.there.end));
        if a < b {
            let place = ((a - start) * size) as usize..((b - start) * size) as usize;
            session.write(behind(t.at, (a - t.there.start) * size), &bytes[place])?;
        }
        Ok(())
    }
}

/// The position `bytes` bytes behind another.
fn behind(start: Location, bytes: u64) -> Location {
    Location { at: start.at + bytes, ..start }
}

fn row(piece: &ParamPiece) -> u64 {
    piece.shape.iter().skip(1).product()
}

/// Describes the pieces of a parameter whose values are at `resident`: the parameter itself or its average.
fn pieces_of(resident: &PersistentTensor, param: &Param, subject: &TrainedModel) -> Vec<Tensor> {
    let (mut at, mut tensors) = (resident.at, vec![]);
    for piece in &param.pieces {
        tensors.extend(piece_of(resident, piece, at, subject));
        at = behind(at, (piece.rows.1 - piece.rows.0) * row(piece) * resident.spec.dtype.size());
    }
    tensors
}

/// Describes one piece of a stacked parameter as a tensor of the model file; `None` if the file does not contain it.
fn piece_of(
    resident: &PersistentTensor,
    piece: &ParamPiece,
    at: Location,
    subject: &TrainedModel,
) -> Option<Tensor> {
    let stored = Stored {
        name: subject.hub_name(&piece.tensor)?,
        dtype: dtype(resident.spec.dtype),
        shape: piece.shape.clone(),
    };
    let there = piece.rows.0 * row(piece)..piece.rows.1 * row(piece);
    Some(Tensor { stored, at, there, piece: Some(piece.clone()) })
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
