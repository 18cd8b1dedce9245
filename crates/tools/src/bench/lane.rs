//! A lane of a bench: an executor with a thread of its own, and the line of steps from which all lanes take theirs. Invariant:
//! a step of the line is computed once, by the lane that is free first.

use super::steps::Step;
use exec::{Data, Executor, Submitted};
use plan::InputId;
use runtime::RuntimeError;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// An executor, and where its means come.
pub(super) struct Lane {
    pub(super) executor: Executor,
    means: [Vec<f32>; 1],
}

/// The steps of some passes, in line.
pub(super) struct Line<'a> {
    steps: &'a [Step],
    /// Token ids of the widest step; none where inputs are in place.
    ids: &'a [i32],
    next: AtomicUsize,
    end: usize,
}

impl<'a> Line<'a> {
    pub(super) fn new(steps: &'a [Step], ids: &'a [i32], passes: u32) -> Self {
        Self { steps, ids, next: AtomicUsize::new(0), end: passes as usize * steps.len() }
    }

    fn take(&self) -> Option<&'a Step> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.end).then(|| &self.steps[number % self.steps.len()])
    }
}

impl Lane {
    pub(super) fn new(executor: Executor) -> Self {
        Self { executor, means: [vec![]] }
    }

    /// Computes steps until the line is empty, as many open at a time as the device keeps.
    pub(super) fn steps(&mut self, line: &Line<'_>) -> Result<(), RuntimeError> {
        let mut open = VecDeque::new();
        while let Some(step) = line.take() {
            if open.len() >= self.executor.depth() {
                self.collect(&mut open, line)?;
            }
            open.push_back(self.submit(step, line)?);
        }
        while !open.is_empty() {
            self.collect(&mut open, line)?;
        }
        // Products have no outputs that are waited for.
        Ok(self.executor.wait()?)
    }

    /// The same, one step after the other, and how long each of the plan's instructions took.
    pub(super) fn instructions(&mut self, line: &Line<'_>) -> Result<Vec<Duration>, RuntimeError> {
        let instructions = self.executor.program().plans()[0].1.schedule.instrs.len();
        let mut times = vec![Duration::ZERO; instructions];
        while let Some(Step { counts, spans, .. }) = line.take() {
            if !line.ids.is_empty() {
                let [ids, spans_input] = self.inputs()?;
                self.executor.write_i32(ids, &line.ids[..counts.tokens as usize])?;
                self.executor.write_i32(spans_input, spans)?;
            }
            self.executor.run_timed(0, *counts, &mut times)?;
        }
        self.executor.wait()?;
        Ok(times)
    }

    fn submit(
        &mut self,
        Step { counts, spans, .. }: &Step,
        line: &Line<'_>,
    ) -> Result<Submitted, RuntimeError> {
        if line.ids.is_empty() {
            return Ok(self.executor.submit(0, &[], *counts, &[])?);
        }
        let mean = self.executor.output(0, "mean")?;
        let graph = &self.executor.program().plans()[0].1.graph;
        let values = graph.spec(mean.value).elements_at(*counts) as usize;
        let [ids, spans_input] = self.inputs()?;
        let tokens = Data::I32(&line.ids[..counts.tokens as usize]);
        let inputs = [(ids, tokens), (spans_input, Data::I32(spans))];
        Ok(self.executor.submit(0, &inputs, *counts, &[(mean, values)])?)
    }

    /// The token ids and the spans of a step.
    fn inputs(&self) -> Result<[InputId; 2], RuntimeError> {
        Ok([self.executor.input(0, "ids")?, self.executor.input(0, "spans")?])
    }

    fn collect(&mut self, open: &mut VecDeque<Submitted>, line: &Line<'_>) -> Result<(), RuntimeError> {
        let Some(step) = open.pop_front() else { return Ok(()) };
        let outputs = usize::from(!line.ids.is_empty());
        Ok(self.executor.collect(step, &mut self.means[..outputs])?)
    }
}
