//! Steps that are open: given with their inputs, collected with their outputs, in one order. Invariant: as many are open
//! as the program has room for, and once it has seen its widest step, none of this allocates.

use crate::device::{DeviceError, Span, Ticket};
use crate::executor::Executor;
use graph::{Bytes, Counts, DType, TensorSpec, ValueId};
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
    steps: u64,
    /// Their outputs in the order of steps, with how many values each has.
    tickets: VecDeque<(Ticket, usize)>,
}

impl Executor {
    /// Steps that may be open at a time.
    pub fn depth(&self) -> usize {
        1
    }

    /// Puts a step behind those that run: its inputs by name, and the first `n` values of each output that will be
    /// wanted.
    pub fn submit(
        &mut self,
        plan: usize,
        inputs: &[(&str, Data<'_>)],
        counts: Counts,
        outputs: &[(&str, usize)],
    ) -> Result<Submitted, DeviceError> {
        if self.open.steps as usize >= self.depth() {
            let why = format!("{} steps are open, as many as the program has room for", self.open.steps);
            return Err(DeviceError::Kernel { op: "submit", why });
        }
        for &(name, data) in inputs {
            let value = self.program().plans()[plan].1.graph.input(name);
            self.fits(plan, name, value, counts, data.dtype(), |elements| data.len() == elements)?;
            let at = self.input_address(plan, name)?;
            self.device_mut().feed(at, data.bytes())?;
        }
        for &(name, n) in outputs {
            let value = self.program().plans()[plan].1.graph.output(name);
            self.fits(plan, name, value, counts, DType::F32, |elements| n <= elements)?;
        }
        self.run(plan, counts)?;
        for &(name, n) in outputs {
            let at = self.output_address(plan, name)?;
            let ticket = self.device_mut().fetch(at, Bytes(DType::F32.size() * n as u64))?;
            self.open.tickets.push_back((ticket, n));
        }
        self.open.steps += 1;
        self.open.next += 1;
        Ok(Submitted { number: self.open.next - 1, outputs: outputs.len() })
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
        let mut result = Ok(());
        for out in outs {
            let Some((ticket, n)) = self.open.tickets.pop_front() else { break };
            out.resize(n, 0.0);
            // All of them, also behind an error: those of the next step come behind.
            let collected = self.device_mut().collect(ticket, bytemuck::cast_slice_mut(out));
            result = result.and(collected);
        }
        result
    }

    /// From now on (or no longer) notes when launches and copies ran.
    pub fn trace(&mut self, on: bool) -> Result<(), DeviceError> {
        self.device_mut().trace(on)
    }

    /// What was noted since, and forgets it; waits for what runs.
    pub fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        self.device_mut().spans()
    }

    /// An error unless the value is there, has this type, and its elements in a step of `counts` are right.
    fn fits(
        &self,
        plan: usize,
        name: &str,
        value: Option<ValueId>,
        counts: Counts,
        dtype: DType,
        right: impl FnOnce(usize) -> bool,
    ) -> Result<(), DeviceError> {
        let refused = |why| Err(DeviceError::Kernel { op: "submit", why });
        let Some(value) = value else { return refused(format!("there is no `{name}`")) };
        let spec: &TensorSpec = self.program().plans()[plan].1.graph.spec(value);
        match spec.dtype == dtype && right(spec.elements_at(counts) as usize) {
            true => Ok(()),
            false => refused(format!("`{name}` is {spec}, which is not what was given or asked for")),
        }
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
