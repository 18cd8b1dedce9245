//! Sessions that compute one output of given batches: the loss of an evaluation graph, or the logits or scores of a
//! classifier. Invariant: a batch is computed alone and in the order in which it is given, so an output does not depend
//! on other batches.

use super::admission::Site;
use super::batch::{BatchInputs, TrainingBatch};
use super::weights::load_training;
use crate::{Observer, RuntimeError};
use plimsoll_exec::{Executor, ReadShared};
use plimsoll_graph::{Dim, OutputRole};
use plimsoll_plan::{OutputId, Program};
use std::collections::BTreeMap;

/// A program of one plan without gradients, running on a device.
pub struct ForwardSession {
    executor: Executor,
    inputs: BatchInputs,
    output: ForwardOutput,
    /// Memory for the output of a batch, reused.
    values: [Vec<f32>; 1],
    /// Memory for the frames of a batch, reused; empty for models without frames.
    frames: Vec<[i32; 2]>,
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
    /// Opens the only device of `site`, and loads the parameters that `read` returns. [`ForwardSession::compute`] returns
    /// the output with the role `output`.
    ///
    /// # Errors
    /// Too little free memory, errors of the device or of `read`, or a program that lacks the output or an input.
    pub fn start(
        site: &Site,
        program: Program,
        output: &OutputRole,
        read: ReadShared<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Self, RuntimeError> {
        let inputs = BatchInputs::of(&program, 0)?;
        let output = ForwardOutput::of(&program, output)?;
        let mut executor = site.start_one(program, observer)?;
        // No states of an optimizer: only the parameters are loaded.
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
    pub fn compute(&mut self, batch: TrainingBatch<'_>) -> Result<&[f32], RuntimeError> {
        let Self { executor, inputs, output, values, frames } = self;
        let (inputs, counts) = inputs.bind(batch, frames)?;
        let rows = if output.by_sequence { counts.sequences as usize } else { 1 };
        let wanted = [(output.id, rows * output.width)];
        let submitted = inputs.with(|inputs| executor.submit(0, inputs, counts, &wanted))?;
        executor.collect(submitted, values)?;
        Ok(&values[0])
    }
}

impl ForwardOutput {
    fn of(program: &Program, role: &OutputRole) -> Result<Self, RuntimeError> {
        let id = program
            .output(0, role)
            .ok_or_else(|| RuntimeError::bug(format!("the plan of an evaluation has no output `{role}`")))?;
        let shape = &program.plans()[0].1.graph.spec(id.value).shape;
        let by_sequence = matches!(shape.first(), Some(Dim::Sequences(_)));
        let width = shape.iter().filter_map(|dim| dim.fixed()).product::<u64>() as usize;
        Ok(Self { id, width, by_sequence })
    }
}
