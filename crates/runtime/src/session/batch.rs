//! Batches of training and evaluation, and the inputs of a plan that take them. Invariant: a batch of the wrong kind, or
//! one that lacks the targets of a task, is an error before anything is submitted to a device.

use super::frames::FramesInput;
use crate::RuntimeError;
use plimsoll_exec::Data;
use plimsoll_graph::{Counts, packs};
use plimsoll_models::MAX_TASKS;
use plimsoll_plan::{InputId, Program};

/// Inputs of a batch.
#[derive(Clone, Copy, Debug)]
pub enum TrainingBatch<'a> {
    /// Sequences of tokens, packed end to end.
    Tokens {
        /// The packs that the sequences belong to: (P, 6), see [`packs`].
        packs: &'a [[i32; packs::WORDS]],
        /// Token ids: (T).
        ids: &'a [i32],
        /// Start and end of each sequence: (S, 2).
        spans: &'a [[i32; 2]],
        /// The id to predict at each token, or for each task the class of each sequence; -1 for none.
        targets: &'a [Vec<i32>],
    },
    /// Rows of precomputed embeddings.
    Rows {
        /// The packs that the rows belong to: (P, 6), see [`packs`].
        packs: &'a [[i32; packs::WORDS]],
        /// The nucleotide and the protein embeddings: (R, D) each.
        parts: &'a [Vec<f32>],
        /// The class of each row: (R).
        targets: &'a [i32],
    },
}

impl TrainingBatch<'_> {
    /// Numbers of tokens, sequences and packs; of rows, as many tokens as sequences.
    pub fn counts(&self) -> Counts {
        let [tokens, sequences, packs] = match self {
            Self::Tokens { packs, ids, spans, .. } => [ids.len(), spans.len(), packs.len()],
            Self::Rows { packs, targets, .. } => [targets.len(), targets.len(), packs.len()],
        };
        Counts { tokens: tokens as u64, sequences: sequences as u64, packs: packs as u64 }
    }
}

/// Batch inputs of a plan.
pub(super) struct BatchInputs {
    /// The packs, in a plan that reads them.
    packs: Option<InputId>,
    rows: RowInputs,
}

/// Batch inputs of a plan that have a row for each token or sequence.
enum RowInputs {
    Tokens { ids: InputId, spans: InputId, frames: Option<FramesInput>, targets: Vec<InputId> },
    Rows { parts: Vec<InputId>, targets: Option<InputId> },
}

/// Largest number of inputs of a plan: four of a batch, the targets of [`MAX_TASKS`] tasks, and six scalar ones of a
/// micro-step.
const MOST_INPUTS: usize = 10 + MAX_TASKS;

/// Inputs of a plan with their values, without memory of the heap.
pub(super) struct BoundInputs<'a> {
    entries: [Option<(InputId, Data<'a>)>; MOST_INPUTS],
}

/// The error for a plan that has no `what`.
pub(super) fn lacks(program: &Program, plan: usize, what: &str) -> RuntimeError {
    let name = &program.plans()[plan].0;
    RuntimeError::bug(format!("the plan `{name}` of a training program has no {what}"))
}

/// The inputs of a plan that take targets: one, or one for each task; none in a plan that computes scores.
pub(super) fn targets(program: &Program, plan: usize) -> Vec<InputId> {
    let task_targets = (0..MAX_TASKS).map_while(|task| program.input(plan, &format!("targets.{task}")));
    program.input(plan, "targets").into_iter().chain(task_targets).collect()
}

impl BatchInputs {
    /// The inputs of a plan.
    pub(super) fn of(program: &Program, plan: usize) -> Result<Self, RuntimeError> {
        let packs = program.input(plan, "packs");
        let targets = targets(program, plan);
        if let (Some(ids), Some(spans)) = (program.input(plan, "ids"), program.input(plan, "spans")) {
            let frames = FramesInput::of(program, plan);
            return Ok(Self { packs, rows: RowInputs::Tokens { ids, spans, frames, targets } });
        }
        let parts = ["dna", "protein"]
            .map(|name| program.input(plan, name).ok_or_else(|| lacks(program, plan, "input of rows")))
            .into_iter()
            .collect::<Result<_, _>>()?;
        Ok(Self { packs, rows: RowInputs::Rows { parts, targets: targets.first().copied() } })
    }

    /// Number of frames of a sequence; 0 for a model without frames.
    pub(super) fn frames_of_a_sequence(&self) -> usize {
        match &self.rows {
            RowInputs::Tokens { frames, .. } => frames.map_or(0, |frames| frames.count),
            RowInputs::Rows { .. } => 0,
        }
    }

    /// The inputs with the values of a batch, and the batch's numbers of tokens, sequences and packs. `frames` is memory for the
    /// frames of the sequences.
    pub(super) fn bind<'a>(
        &self,
        batch: TrainingBatch<'a>,
        frames: &'a mut Vec<[i32; 2]>,
    ) -> Result<(BoundInputs<'a>, Counts), RuntimeError> {
        let mut inputs = BoundInputs { entries: [None; MOST_INPUTS] };
        match (&self.rows, batch) {
            (
                RowInputs::Tokens {
                    ids: ids_input,
                    spans: spans_input,
                    frames: frames_input,
                    targets: targets_inputs,
                },
                TrainingBatch::Tokens { packs, ids, spans, targets },
            ) => {
                inputs.add(self.packs, Data::I32(packs.as_flattened()))?;
                inputs.add(Some(*ids_input), Data::I32(ids))?;
                inputs.add(Some(*spans_input), Data::I32(spans.as_flattened()))?;
                if let Some(frames_input) = frames_input {
                    spans.iter().try_for_each(|[start, end]| frames_input.check((end - start) as usize))?;
                    frames.clear();
                    frames.extend(frames_input.of_spans(spans));
                    inputs.add(Some(frames_input.input), Data::I32(frames.as_flattened()))?;
                }
                // An evaluation reads the targets of the first task alone.
                if targets.len() < targets_inputs.len() {
                    return Err(RuntimeError::bug("a batch lacks the targets of a task"));
                }
                for (&input, targets) in targets_inputs.iter().zip(targets) {
                    inputs.add(Some(input), Data::I32(targets))?;
                }
            }
            (
                RowInputs::Rows { parts: parts_inputs, targets: targets_input },
                TrainingBatch::Rows { packs, parts, targets },
            ) => {
                inputs.add(self.packs, Data::I32(packs.as_flattened()))?;
                for (&input, rows) in parts_inputs.iter().zip(parts) {
                    inputs.add(Some(input), Data::F32(rows))?;
                }
                inputs.add(*targets_input, Data::I32(targets))?;
            }
            (RowInputs::Tokens { .. }, TrainingBatch::Rows { .. })
            | (RowInputs::Rows { .. }, TrainingBatch::Tokens { .. }) => {
                return Err(RuntimeError::bug("a batch is not of the kind that the model takes"));
            }
        }
        Ok((inputs, batch.counts()))
    }
}

impl<'a> BoundInputs<'a> {
    /// Adds an input, if the plan has it.
    pub(super) fn add(&mut self, input: Option<InputId>, data: Data<'a>) -> Result<(), RuntimeError> {
        let Some(input) = input else { return Ok(()) };
        let free = self.entries.iter_mut().find(|entry| entry.is_none());
        *free.ok_or_else(|| RuntimeError::bug("a plan has more inputs than MOST_INPUTS"))? =
            Some((input, data));
        Ok(())
    }

    /// Calls `f` with the inputs as a slice.
    pub(super) fn with<T>(&self, f: impl FnOnce(&[(InputId, Data<'a>)]) -> T) -> T {
        let Some(first) = self.entries[0] else { return f(&[]) };
        let mut all = [first; MOST_INPUTS];
        let mut n = 0;
        for entry in self.entries.iter().flatten() {
            all[n] = *entry;
            n += 1;
        }
        f(&all[..n])
    }
}
