//! Asynchronous steps. `submit` enqueues a step with its inputs, `collect` returns its outputs; steps complete in
//! submission order. Invariant: at most `depth` steps are in flight, and after the largest step has been seen,
//! nothing here allocates. The oldest pending output belongs to the oldest step that can be collected.

use crate::device::{DeviceError, Span};
use crate::executor::Executor;
use crate::output::OutputBuffer;
use crate::transfer::{Transfer, TransferOrder};
use plimsoll_graph::{Bytes, Counts, DType, ValueId};
use plimsoll_plan::{Direction, InFlightPlace, InputId, Location, OutputId};
use std::collections::VecDeque;

/// Values of an input.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Token ids, spans or row indices.
    I32(&'a [i32]),
    /// Activations.
    F32(&'a [f32]),
}

/// Handle of a step that was submitted and not yet collected.
#[must_use = "a step stays open until it is collected"]
#[derive(Debug)]
pub struct Submitted {
    /// Sequence number among the executor's steps.
    number: u64,
}

/// The in-flight steps.
#[derive(Debug, Default)]
pub(crate) struct InFlightSteps {
    /// Sequence number of the next step.
    next: u64,
    /// In-flight steps, oldest first.
    steps: VecDeque<InFlightStep>,
    /// Pending outputs in the order of steps.
    outputs: VecDeque<PendingOutput>,
}

/// A step whose outputs are pending.
#[derive(Debug)]
struct InFlightStep {
    number: u64,
    /// Number of outputs that were requested.
    outputs: usize,
    /// Whether the step failed before all of its outputs were requested. Nobody collects it; it counts as in flight, because
    /// the device still writes to its staging slot.
    is_abandoned: bool,
}

/// An output that was not collected.
#[derive(Clone, Copy, Debug)]
struct PendingOutput {
    /// Where it is read.
    at: Location,
    /// The transfer that brings it there; `None` if it is read in the arena, where the plan puts it.
    transfer: Option<Transfer>,
    /// Element type: f32 or i32.
    dtype: DType,
    /// Number of values.
    values: usize,
}

impl InFlightSteps {
    /// `Err` if a step is in flight, because `op` would overwrite its memory.
    pub(crate) fn none(&self, op: &'static str) -> Result<(), DeviceError> {
        match self.steps.len() {
            0 => Ok(()),
            n => Err(DeviceError::Kernel { op, why: format!("{n} steps are open; collect them before") }),
        }
    }
}

impl Executor {
    /// Enqueues a step of a plan with its inputs, and requests the first `n` values of each of `outputs`, which are f32 or
    /// i32. All inputs and outputs must belong to this plan. `Err` if `depth` steps are in flight.
    pub fn submit(
        &mut self,
        plan: usize,
        inputs: &[(InputId, Data<'_>)],
        counts: Counts,
        outputs: &[(OutputId, usize)],
    ) -> Result<Submitted, DeviceError> {
        self.check(plan, inputs, counts, outputs)?;
        // If the copy of an input fails, this step has no launch; the count was that of the step before.
        self.launched = 0;
        self.give(inputs)?;
        self.follow(plan, counts)?;
        let before = self.open.outputs.len();
        let requested = self.request_outputs(outputs);
        let number = self.open.next;
        let count = self.open.outputs.len() - before;
        if requested.is_ok() || count > 0 {
            let is_abandoned = requested.is_err();
            self.open.steps.push_back(InFlightStep { number, outputs: count, is_abandoned });
            self.open.next += 1;
        }
        self.drop_abandoned();
        requested.map(|()| Submitted { number })
    }

    /// Number of the transfers of this step's inputs or outputs, behind those of the moves of the plans.
    fn transfer_id(&self, direction: Direction) -> usize {
        let depth = self.program().depth();
        let slot = (self.open.next % depth as u64) as usize;
        self.moves() + slot + depth * direction as usize
    }

    /// Copies the inputs through pinned host memory to a staging slot of this step, concurrently with running work, and
    /// enqueues the copy from there to the plan's inputs. Without staging, uploads to the plan's inputs directly.
    fn give(&mut self, inputs: &[(InputId, Data<'_>)]) -> Result<(), DeviceError> {
        let id = self.transfer_id(Direction::In);
        let mut place = self.program().in_flight_place(self.open.next, Direction::In);
        for (input, data) in inputs {
            let at = self.input_location(*input)?;
            let data = data.bytes();
            let Some(InFlightPlace { arena, host }) = place else {
                self.device_mut().upload(at, data)?;
                continue;
            };
            let bytes = Bytes(data.len() as u64);
            // The step that used these bytes before was collected, so nothing that is enqueued uses them.
            let transfer = Transfer { id, from: host, to: arena, bytes, order: TransferOrder::Free };
            let device = self.device_mut();
            device.upload(host, data)?;
            device.start(&transfer)?;
            device.wait_for(&transfer)?;
            device.start(&Transfer::in_arena(arena.at, at.at, bytes))?;
            place = place.map(|place| place.behind(self.program().padded(bytes)));
        }
        Ok(())
    }

    /// Copies the outputs to a staging slot of this step and requests their transfer to the host, which runs
    /// concurrently with later steps.
    fn request_outputs(&mut self, outputs: &[(OutputId, usize)]) -> Result<(), DeviceError> {
        let id = self.transfer_id(Direction::Out);
        let mut place = self.program().in_flight_place(self.open.next, Direction::Out);
        for &(output, values) in outputs {
            let at = self.output_location(output)?;
            let dtype = self.output_dtype(output);
            let Some(InFlightPlace { arena, host }) = place else {
                self.open.outputs.push_back(PendingOutput { at, transfer: None, dtype, values });
                continue;
            };
            let bytes = Bytes(DType::F32.size() * values as u64);
            // All outputs of a step have the same id. Their copies run in order in one queue, so completing the
            // id, which waits for the copy that was started last, completes all of them.
            let transfer = Transfer { id, from: arena, to: host, bytes, order: TransferOrder::AfterLaunches };
            let device = self.device_mut();
            device.start(&Transfer::in_arena(at.at, arena.at, bytes))?;
            device.start(&transfer)?;
            self.open.outputs.push_back(PendingOutput { at: host, transfer: Some(transfer), dtype, values });
            place = place.map(|place| place.behind(self.program().padded(bytes)));
        }
        Ok(())
    }

    /// `Err` unless another step may be in flight, the counts are within bounds, and the inputs and outputs fit the
    /// plan.
    fn check(
        &self,
        plan: usize,
        inputs: &[(InputId, Data<'_>)],
        counts: Counts,
        outputs: &[(OutputId, usize)],
    ) -> Result<(), DeviceError> {
        if self.open.steps.len() >= self.depth() {
            let why = format!("{} steps are in flight, which is the maximum", self.open.steps.len());
            return Err(DeviceError::Kernel { op: "submit", why });
        }
        self.admits(plan, counts)?;
        for (i, &(input, data)) in inputs.iter().enumerate() {
            let given = inputs[..i].iter().any(|(other, _)| *other == input);
            self.check_owner(plan, input.plan, input.value, given)?;
            let spec = self.program().plans()[input.plan].1.graph.spec(input.value);
            if spec.dtype != data.dtype() || data.len() != spec.elements_at(counts) as usize {
                return Err(self.unfit(input.plan, input.value));
            }
        }
        for (i, &(output, n)) in outputs.iter().enumerate() {
            let given = outputs[..i].iter().any(|(other, _)| *other == output);
            self.check_owner(plan, output.plan, output.value, given)?;
            let spec = self.program().plans()[output.plan].1.graph.spec(output.value);
            if spec.dtype != self.output_dtype(output) || n > spec.elements_at(counts) as usize {
                return Err(self.unfit(output.plan, output.value));
            }
        }
        Ok(())
    }

    /// Element type in which an output is collected.
    fn output_dtype(&self, output: OutputId) -> DType {
        let is_i32 = self.program().plans()[output.plan].1.graph.spec(output.value).dtype == DType::I32;
        if is_i32 { DType::I32 } else { DType::F32 }
    }

    /// `Err` unless a value of plan `owner` is one of the step's `plan`, and was not `given` before.
    fn check_owner(&self, plan: usize, owner: usize, value: ValueId, given: bool) -> Result<(), DeviceError> {
        // The name is made only for an error: a step that is submitted allocates nothing.
        if owner != plan {
            let name = self.interface_name(owner, value);
            return Err(refused(format!("`{name}` is of plan {owner}, the step of plan {plan}")));
        }
        if given {
            let name = self.interface_name(owner, value);
            return Err(refused(format!("`{name}` was given twice")));
        }
        Ok(())
    }

    /// Name of an input or output of a plan.
    fn interface_name(&self, plan: usize, value: ValueId) -> String {
        let graph = &self.program().plans()[plan].1.graph;
        graph.interface_name(value).unwrap_or_else(|| value.to_string())
    }

    /// The error for a value of another element type or size than its data or buffer.
    fn unfit(&self, plan: usize, value: ValueId) -> DeviceError {
        let spec = self.program().plans()[plan].1.graph.spec(value);
        let name = self.interface_name(plan, value);
        refused(format!("`{name}` is {spec}, which is not what was given or asked for"))
    }

    /// Waits for the oldest submitted step and writes its outputs to `outs`, in the order of `submit`. `Err` if `step` is
    /// not the oldest or has another number of outputs, or if a buffer does not take the element type of its output.
    pub fn collect(&mut self, step: Submitted, outs: &mut [impl OutputBuffer]) -> Result<(), DeviceError> {
        let oldest = self.open.steps.front();
        if !oldest.is_some_and(|oldest| oldest.number == step.number && oldest.outputs == outs.len()) {
            let why =
                format!("step {} into {} places; the oldest step is {:?}", step.number, outs.len(), oldest);
            return Err(DeviceError::Kernel { op: "collect", why });
        }
        let mut pairs = outs.iter().zip(&self.open.outputs);
        if let Some((_, pending)) = pairs.find(|(out, pending)| !out.takes(pending.dtype)) {
            let why = format!("an output is in {}, which its buffer does not take", pending.dtype.name());
            return Err(DeviceError::Kernel { op: "collect", why });
        }
        self.open.steps.pop_front();
        // A step without outputs must be waited for here, because its staging slot for inputs is reused.
        let mut result = if outs.is_empty() { self.device_mut().synchronize() } else { Ok(()) };
        for out in outs {
            let Some(pending) = self.open.outputs.pop_front() else { break };
            // All outputs are collected even after an error: the next step's outputs follow in the same queue.
            let collected = self.read_pending(pending, out.resize(pending.dtype, pending.values));
            result = result.and(collected);
        }
        self.drop_abandoned();
        result
    }

    /// Waits for a pending output, and copies it to `out`.
    fn read_pending(&mut self, pending: PendingOutput, out: &mut [u8]) -> Result<(), DeviceError> {
        let device = self.device_mut();
        if let Some(transfer) = &pending.transfer {
            device.complete(transfer)?;
        }
        device.download(pending.at, out)
    }

    /// Drops the outputs of the abandoned steps before the oldest step that somebody will collect.
    fn drop_abandoned(&mut self) {
        while let Some(step) = self.open.steps.pop_front_if(|step| step.is_abandoned) {
            for _ in 0..step.outputs {
                let Some(pending) = self.open.outputs.pop_front() else { break };
                // An error belongs to the step, whose submission has failed already, and not to the step that is collected
                // next. If the device itself has failed, the next step fails too.
                let _ = pending.transfer.map(|transfer| self.device_mut().complete(&transfer));
            }
        }
    }

    /// Turns the recording of launch and copy times on or off.
    pub fn trace(&mut self, on: bool) -> Result<(), DeviceError> {
        self.device_mut().tracer().set(on)
    }

    /// Waits for enqueued work, then returns and clears the spans recorded so far.
    pub fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        self.device_mut().tracer().spans()
    }
}

/// The error of a step that is not submitted.
fn refused(why: String) -> DeviceError {
    DeviceError::Kernel { op: "submit", why }
}

impl Data<'_> {
    /// Element type of the values.
    fn dtype(self) -> DType {
        match self {
            Self::I32(_) => DType::I32,
            Self::F32(_) => DType::F32,
        }
    }

    /// Number of values.
    fn len(self) -> usize {
        match self {
            Self::I32(data) => data.len(),
            Self::F32(data) => data.len(),
        }
    }

    /// The values as bytes.
    fn bytes(&self) -> &[u8] {
        match self {
            Self::I32(data) => bytemuck::cast_slice(data),
            Self::F32(data) => bytemuck::cast_slice(data),
        }
    }
}
