//! Sessions that compute one output of given batches: the loss of an evaluation graph, or the logits or scores of a
//! classifier. Invariant: a batch is computed alone and in the order in which it is given, so an output does not depend
//! on other batches.

use super::admission::Site;
use super::frames::FramesInput;
use super::training::Batch;
use super::weights::load_training;
use crate::{Observer, RuntimeError};
use plimsoll_exec::{Data, Executor, ReadShared};
use plimsoll_graph::Dim;
use plimsoll_models::MAX_TASKS;
use plimsoll_plan::{InputId, OutputId, Program};
use std::collections::BTreeMap;

/// A program of one plan without gradients, running on a device.
pub struct ForwardSession {
    executor: Executor,
    inputs: ForwardInputs,
    output: ForwardOutput,
    /// Memory for the output of a batch, reused.
    values: [Vec<f32>; 1],
    /// Memory for the frames of a batch, reused; empty for models without frames.
    frames: Vec<[i32; 2]>,
}

/// Inputs of the plan. A graph of scores has no targets.
enum ForwardInputs {
    Tokens { ids: InputId, spans: InputId, frames: Option<FramesInput>, targets: Vec<InputId> },
    Rows { parts: Vec<InputId>, targets: Option<InputId> },
}

/// The output that is read.
struct ForwardOutput {
    id: OutputId,
    /// Number of values of a sequence, or of the whole batch.
    width: usize,
    /// Whether the output has a row for each sequence.
    by_sequence: bool,
}

impl ForwardSession {
    /// Opens the only device of `site`, and loads the parameters that `read` returns. `output` is the name of the output
    /// that [`ForwardSession::compute`] returns.
    ///
    /// # Errors
    /// Too little free memory, errors of the device or of `read`, or a program that lacks the output or an input.
    pub fn start(
        site: &Site,
        program: Program,
        output: &str,
        read: ReadShared<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Self, RuntimeError> {
        let inputs = ForwardInputs::of(&program)?;
        let output = ForwardOutput::of(&program, output)?;
        let mut executor = site.start_one(program, observer)?;
        load_training(&mut executor, &BTreeMap::new(), read, observer)?;
        Ok(Self { executor, inputs, output, values: [vec![]], frames: vec![] })
    }

    /// The program that the device runs.
    pub fn program(&self) -> &Program {
        self.executor.program()
    }

    /// Number of values of a sequence, or of the whole batch for an output such as a loss.
    pub fn width(&self) -> usize {
        self.output.width
    }

    /// Computes the output of a batch.
    ///
    /// # Errors
    /// A batch of the wrong kind or larger than the plan's bounds; device errors.
    pub fn compute(&mut self, batch: Batch<'_>) -> Result<&[f32], RuntimeError> {
        let Self { executor, inputs, output, values, frames } = self;
        let counts = batch.counts();
        let given = inputs.with(batch, frames)?;
        let rows = if output.by_sequence { counts.sequences as usize } else { 1 };
        let wanted = [(output.id, rows * output.width)];
        let submitted = executor.submit(0, &given, counts, &wanted)?;
        executor.collect(submitted, values)?;
        Ok(&values[0])
    }
}

impl ForwardInputs {
    fn of(program: &Program) -> Result<Self, RuntimeError> {
        let input = |name: &str| program.input(0, name);
        let of_tasks = (0..MAX_TASKS).map_while(|task| input(&format!("targets.{task}")));
        let targets: Vec<InputId> = input("targets").into_iter().chain(of_tasks).collect();
        if let (Some(ids), Some(spans)) = (input("ids"), input("spans")) {
            return Ok(Self::Tokens { ids, spans, frames: FramesInput::of(program, 0), targets });
        }
        let lacks = || RuntimeError::bug("the plan of an evaluation lacks an input");
        let parts = ["dna", "protein"].map(|name| input(name).ok_or_else(lacks));
        let parts = parts.into_iter().collect::<Result<_, _>>()?;
        Ok(Self::Rows { parts, targets: targets.first().copied() })
    }

    /// The inputs with the values of a batch. `frames` is memory for the frames of its sequences.
    fn with<'a>(
        &self,
        batch: Batch<'a>,
        frames: &'a mut Vec<[i32; 2]>,
    ) -> Result<Vec<(InputId, Data<'a>)>, RuntimeError> {
        match (self, batch) {
            (
                Self::Tokens { ids, spans, frames: of_frames, targets },
                Batch::Tokens { ids: i, spans: s, targets: t },
            ) => {
                let mut given = vec![(*ids, Data::I32(i)), (*spans, Data::I32(s.as_flattened()))];
                if let Some(of_frames) = of_frames {
                    s.iter().try_for_each(|[start, end]| of_frames.check((end - start) as usize))?;
                    frames.clear();
                    frames.extend(of_frames.of_spans(s));
                    given.push((of_frames.input, Data::I32(frames.as_flattened())));
                }
                if t.len() < targets.len() {
                    return Err(RuntimeError::bug("a batch lacks the targets of a task"));
                }
                given.extend(targets.iter().zip(t).map(|(&input, targets)| (input, Data::I32(targets))));
                Ok(given)
            }
            (Self::Rows { parts, targets }, Batch::Rows { parts: rows, targets: t }) => {
                let parts = parts.iter().zip(rows).map(|(&part, rows)| (part, Data::F32(rows)));
                Ok(parts.chain(targets.map(|input| (input, Data::I32(t)))).collect())
            }
            (Self::Tokens { .. }, Batch::Rows { .. }) | (Self::Rows { .. }, Batch::Tokens { .. }) => {
                Err(RuntimeError::bug("a batch is not of the kind that the model takes"))
            }
        }
    }
}

impl ForwardOutput {
    fn of(program: &Program, name: &str) -> Result<Self, RuntimeError> {
        let missing = || RuntimeError::bug(format!("the plan of an evaluation has no output `{name}`"));
        let id = program.output(0, name).ok_or_else(missing)?;
        let shape = &program.plans()[0].1.graph.spec(id.value).shape;
        let by_sequence = matches!(shape.first(), Some(Dim::Sequences(_)));
        let width = shape.iter().filter_map(|dim| dim.fixed()).product::<u64>() as usize;
        Ok(Self { id, width, by_sequence })
    }
}
