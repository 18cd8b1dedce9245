//! Weights on their way from files to arenas. Invariant: each parameter is read once, however many arenas it goes to.

use crate::{EncoderModel, HeadModel, RuntimeError, machine};
use data::limits;
use exec::{Executor, Param, ParamSource};
use graph::Graph;
use plan::HOST;
use std::error::Error;
use std::ops::Range;

/// A source of a model's weights.
pub trait WeightSource: Sync {
    /// Reads elements `range` of a parameter into `out`, as f32.
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError>;

    /// A source for the parameters of `graph` that every step reads; `None` where weights are always resident.
    fn stream(&self, graph: &Graph) -> Option<ParamSource>;
}

impl WeightSource for EncoderModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        EncoderModel::read(self, param, range, out)
    }

    fn stream(&self, graph: &Graph) -> Option<ParamSource> {
        Some(self.source(graph))
    }
}

impl WeightSource for HeadModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        HeadModel::read(self, param, range, out)
    }

    fn stream(&self, _: &Graph) -> Option<ParamSource> {
        None
    }
}

/// Loads plan `plan` of one executor from a function that reads its parameters, one after the other.
pub(super) fn load(
    executor: &mut Executor,
    plan: usize,
    mut read: impl FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    let mut read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        read(param, range, out).map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
    };
    Ok(executor.load(plan, &mut read)?)
}

/// Most threads that read weights: beyond, the disk or the bus is what is waited for.
const READERS: usize = 8;

/// Loads the resident weights of plan `plan` into every arena, and attaches the source of those that every step reads.
pub(crate) fn load_all(
    executors: &mut [Executor],
    plan: usize,
    source: &dyn WeightSource,
) -> Result<(), RuntimeError> {
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        source.read(param, range, out).map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
    };
    // On the CPU as many as compute; what feeds a GPU has nothing else to do yet.
    let of_host = executors.first().filter(|executor| executor.program().target().space == HOST);
    let of_all = |executor: &Executor| executors.len() * executor.device().units() as usize;
    let readers = of_host.map_or_else(machine::cores, of_all).min(READERS);
    limits::room_for_threads(readers + executors.len()).map_err(RuntimeError::thread("weights"))?;
    exec::load_all(executors, plan, readers, &read)?;
    for executor in executors {
        if let Some(stream) = source.stream(&executor.program().plans()[plan].1.graph) {
            executor.attach_loaded(plan, stream);
        }
    }
    Ok(())
}
