//! Tensors of checkpoints in the arena: the model as the hub's files have it, tensor by tensor, and the state beside it.
//! Invariant: elements are read and written where they lie; a parameter of stacked tensors is as many tensors in a file.

use super::subject::Subject;
use crate::TrainError;
use crate::{Part, Stored};
use data::weights::{DType, f32_to_bf16, f32_to_f16};
use exec::{Resident, Survivor};
use graph::{Piece, StateKind};
use runtime::session::TrainSession;
use std::ops::Range;

/// Where the tensors of both files lie.
pub(super) struct Store {
    model: Vec<Tensor>,
    state: Vec<Tensor>,
    seed: u64,
}

/// A tensor of a file, which is in the arena as a whole, or with some of its rows.
struct Tensor {
    stored: Stored,
    /// Its first byte in the arena, of the elements that are there; the others are what they were.
    at: u64,
    there: Range<u64>,
    piece: Option<Piece>,
}

impl Store {
    /// The tensors of a session.
    pub fn of(session: &TrainSession, subject: &Subject, seed: u64) -> Self {
        let (mut model, mut state) = (vec![], vec![]);
        for resident in session.residents() {
            match &resident.what {
                Survivor::Param(param) => {
                    let mut at = resident.at;
                    for piece in &param.pieces {
                        let tensor = piece_of(&resident, piece, at, subject);
                        at += (piece.rows.1 - piece.rows.0) * row(piece) * resident.spec.dtype.size();
                        model.extend(tensor);
                    }
                }
                // Gradients are used up within a step.
                Survivor::State(s) if s.kind == StateKind::Gradient => {}
                Survivor::State(s) => {
                    let shape: Vec<u64> = resident.spec.shape.iter().filter_map(|d| d.fixed()).collect();
                    let stored = Stored { name: s.name.clone(), dtype: dtype(resident.spec.dtype), shape };
                    let there = 0..stored.elements();
                    state.push(Tensor { stored, at: resident.at, there, piece: None });
                }
            }
        }
        model.extend(subject.kept().into_iter().map(|kept| {
            let stored = Stored { name: kept.name, dtype: DType::F32, shape: kept.piece.shape.clone() };
            Tensor { stored, at: 0, there: 0..0, piece: Some(kept.piece) }
        }));
        // A weight that is tied is one parameter, and one tensor.
        model.sort_by(|a: &Tensor, b: &Tensor| a.stored.name.cmp(&b.stored.name));
        model.dedup_by(|a, b| a.stored.name == b.stored.name);
        state.sort_by(|a: &Tensor, b: &Tensor| a.stored.name.cmp(&b.stored.name));
        Self { model, state, seed }
    }

    fn part(&self, part: Part) -> &[Tensor] {
        match part {
            Part::Model => &self.model,
            Part::State => &self.state,
        }
    }

    /// The tensors of a file.
    pub fn tensors(&self, part: Part) -> Vec<Stored> {
        self.part(part).iter().map(|t| t.stored.clone()).collect()
    }

    /// Bytes of elements of a tensor.
    pub fn read(
        &self,
        session: &mut TrainSession,
        subject: &Subject,
        part: Part,
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
            // Rows that the model does not read stay what they were.
            let mut values = vec![0.0; (elements.end - elements.start) as usize];
            subject.tensor(self.seed, piece, elements.start, &mut values)?;
            for (x, bytes) in values.iter().zip(out.chunks_exact_mut(size as usize)) {
                if t.stored.dtype == DType::BF16 {
                    bytes.copy_from_slice(&f32_to_bf16(*x).to_le_bytes());
                } else if t.stored.dtype == DType::F16 {
                    bytes.copy_from_slice(&f32_to_f16(*x).to_le_bytes());
                } else {
                    bytes.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
        if a < b {
            let place = ((a - elements.start) * size) as usize..((b - elements.start) * size) as usize;
            session.read(t.at + (a - t.there.start) * size, &mut out[place])?;
        }
        Ok(())
    }

    /// The opposite.
    pub fn write(
        &self,
        session: &mut TrainSession,
        part: Part,
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
            session.write(t.at + (a - t.there.start) * size, &bytes[place])?;
        }
        Ok(())
    }
}

fn row(piece: &Piece) -> u64 {
    piece.shape.iter().skip(1).product()
}

/// A piece of a parameter as a tensor of the model's file, if that has it.
fn piece_of(resident: &Resident, piece: &Piece, at: u64, subject: &Subject) -> Option<Tensor> {
    let stored = Stored {
        name: subject.hub_name(&piece.tensor)?,
        dtype: dtype(resident.spec.dtype),
        shape: piece.shape.clone(),
    };
    let there = piece.rows.0 * row(piece)..piece.rows.1 * row(piece);
    Some(Tensor { stored, at, there, piece: Some(piece.clone()) })
}

fn dtype(dtype: graph::DType) -> DType {
    match dtype {
        graph::DType::F32 => DType::F32,
        graph::DType::Bf16 => DType::BF16,
        graph::DType::F16 => DType::F16,
        graph::DType::I32 => DType::I32,
        // What is trained is never in codes: the compiler refuses that.
        graph::DType::F8 | graph::DType::I8 | graph::DType::U8 => DType::U8,
    }
}
