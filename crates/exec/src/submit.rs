//! Steps that are open: given with their inputs, collected with their outputs, in one order. Invariant: as many are open
//! as the program has room for, and once it has seen its widest step, none of this allocates.

use crate::device::{DeviceError, Span, Ticket};
use crate::executor::Executor;
use graph::{Bytes, Counts, DType, ValueId};
use plan::{InputId, OutputId, Way};
use std::collections::VecDeque;

/// What an input is given as.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Ids, spans, rows.
    I32(&'a [i32]),
    /// Activations.
    F32(&'a [f32]),
}

/// A step that was submitted and not yet collected.
#[must_use = "a step stays open until it is collected"]
#[derive(Debug)]
pub struct Submitted {
    /// Numbers count an executor's steps.
    number: u64,
    outputs: usize,
}

/// The steps that are open.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// The number of the next.
    next: u64,
    /// How many are open.
    pub(crate) steps: u64,
    /// Their outputs in the order of steps, with how many values each has.
    tickets: VecDeque<(Ticket, usize)>,
}

impl Open {
    /// An error where a step is open: it would be overwritten.
    pub(crate) fn none(&self, op: &'static str) -> Result<(), DeviceError> {
        match self.steps {
            0 => Ok(()),
            n => Err(DeviceError::Kernel { op, why: format!("{n} steps are open; collect them before") }),
        }
    }
}

impl Executor {
    /// Steps that may be open at a time.
    pub fn depth(&self) -> usize {
        self.program().depth().min(self.device().depth())
    }

    /// Enqueues a step of a plan with its inputs, and asks for the first `n` values of each of `outputs`. Inputs and outputs
    /// are of this plan.
    pub fn submit(
        &mut self,
        plan: usize,
        inputs: &[(InputId, Data<'_>)],
        counts: Counts,
        outputs: &[(OutputId, usize)],
    ) -> Result<Submitted, DeviceError> {
        self.check(plan, inputs, counts, outputs)?;
        self.give(inputs)?;
        self.follow(plan, counts)?;
        self.ask(outputs)?;
        self.open.steps += 1;
        self.open.next += 1;
        Ok(Submitted { number: self.open.next - 1, outputs: outputs.len() })
    }

    /// Inputs travel beside what runs, to a place of their own, and from there behind it to the plan's.
    fn give(&mut self, inputs: &[(InputId, Data<'_>)]) -> Result<(), DeviceError> {
        let mut place = self.program().ring_address(self.open.next, Way::In);
        for (input, data) in inputs {
            let (at, bytes) = (self.input_address(*input)?, data.bytes());
            let Some(from) = place else {
                self.device_mut().upload(at, bytes)?;
                continue;
            };
            let size = Bytes(bytes.len() as u64);
            self.device_mut().feed(from, bytes)?;
            self.device_mut().copy(from, at, size)?;
            place = Some(from + self.program().padded(size).0);
        }
        Ok(())
    }

    /// Outputs are copied from the plan's places, and travel beside what comes next.
    fn ask(&mut self, outputs: &[(OutputId, usize)]) -> Result<(), DeviceError> {
        let mut place = self.program().ring_address(self.open.next, Way::Out);
        for &(output, n) in outputs {
            let (mut at, size) = (self.output_address(output)?, Bytes(DType::F32.size() * n as u64));
            if let Some(to) = place {
                self.device_mut().copy(at, to, size)?;
                at = to;
                place = Some(to + self.program().padded(size).0);
            }
            let ticket = self.device_mut().fetch(at, size)?;
            self.open.tickets.push_back((ticket, n));
        }
        Ok(())
    }

    /// An error unless there is room, and inputs and outputs are those of the plan.
    fn check(
        &self,
        plan: usize,
        inputs: &[(InputId, Data<'_>)],
        counts: Counts,
        outputs: &[(OutputId, usize)],
    ) -> Result<(), DeviceError> {
        if self.open.steps as usize >= self.depth() {
            let why = format!("{} steps are open, as many as there is room for", self.open.steps);
            return Err(DeviceError::Kernel { op: "submit", why });
        }
        self.admits(plan, counts)?;
        for (i, &(input, data)) in inputs.iter().enumerate() {
            let given = inputs[..i].iter().any(|(other, _)| *other == input);
            let right = |elements| data.len() == elements;
            self.fits((plan, input.plan, input.value), given, counts, data.dtype(), &right)?;
        }
        for (i, &(output, n)) in outputs.iter().enumerate() {
            let given = outputs[..i].iter().any(|(other, _)| *other == output);
            let right = |elements| n <= elements;
            self.fits((plan, output.plan, output.value), given, counts, DType::F32, &right)?;
        }
        Ok(())
    }

    /// An error unless the value is of the plan that runs, was not `given` before, has this type, and its elements in a step
    /// of `counts` are right.
    fn fits(
        &self,
        (plan, of, value): (usize, usize, ValueId),
        given: bool,
        counts: Counts,
        dtype: DType,
        right: &dyn Fn(usize) -> bool,
    ) -> Result<(), DeviceError> {
        let refused = |why| Err(DeviceError::Kernel { op: "submit", why });
        let graph = &self.program().plans()[of].1.graph;
        let name = || {
            let named = graph.inputs.iter().chain(&graph.outputs).find(|(_, v)| *v == value);
            named.map_or_else(|| value.to_string(), |(name, _)| name.clone())
        };
        let spec = graph.spec(value);
        match () {
            () if of != plan => refused(format!("`{}` is of plan {of}, the step of plan {plan}", name())),
            () if given => refused(format!("`{}` was given twice", name())),
            () if spec.dtype == dtype && right(spec.elements_at(counts) as usize) => Ok(()),
            () => refused(format!("`{}` is {spec}, which is not what was given or asked for", name())),
        }
    }

    /// The outputs of the oldest submitted step, in the order in which they were named.
    pub fn collect(&mut self, step: Submitted, outs: &mut [Vec<f32>]) -> Result<(), DeviceError> {
        let oldest = self.open.next - self.open.steps;
        if step.number != oldest || outs.len() != step.outputs {
            let why = format!(
                "step {} with {} outputs into {} places; the oldest step is {oldest}",
                step.number,
                step.outputs,
                outs.len()
            );
            return Err(DeviceError::Kernel { op: "collect", why });
        }
        self.open.steps -= 1;
        // A step of which nothing is read is waited for, since its inputs' places are given to another.
        let mut result = if outs.is_empty() { self.device_mut().wait() } else { Ok(()) };
        for out in outs {
            let Some((ticket, n)) = self.open.tickets.pop_front() else { break };
            // To the byte: what is held of a step is in the ledger.
            out.reserve_exact(n.saturating_sub(out.len()));
            out.resize(n, 0.0);
            // All of them, also behind an error: those of the next step come behind.
            let collected = self.device_mut().collect(ticket, bytemuck::cast_slice_mut(out));
            result = result.and(collected);
        }
        result
    }

    /// From now on (or no longer) notes when launches and copies ran.
    pub fn trace(&mut self, on: bool) -> Result<(), DeviceError> {
        self.device_mut().tracer().set(on)
    }

    /// What was noted since, and forgets it; waits for what runs.
    pub fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        self.device_mut().tracer().spans()
    }
}

impl Data<'_> {
    fn dtype(self) -> DType {
        match self {
            Self::I32(_) => DType::I32,
            Self::F32(_) => DType::F32,
        }
    }

    fn len(self) -> usize {
        match self {
            Self::I32(data) => data.len(),
            Self::F32(data) => data.len(),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::I32(data) => bytemuck::cast_slice(data),
            Self::F32(data) => bytemuck::cast_slice(data),
        }
    }
}
