//! Loading of weights from files into the arenas of executors. Invariant: each resident parameter is read from
//! its file once, whatever the number of arenas.

use crate::{EncoderModel, HeadModel, RuntimeError, machine};
use plimsoll_data::limits;
use plimsoll_exec::{Executor, Param, ParamSource};
use plimsoll_graph::Graph;
use plimsoll_plan::HOST;
use std::error::Error;
use std::ops::Range;

/// Provider of a model's weights.
pub trait WeightSource: Sync {
    /// Reads elements `range` of a parameter into `out`, as f32.
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError>;

    /// Reader of the streamed parameters of `graph`, which every step reads from disk again; `None` if the
    /// model's weights are always resident.
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

/// Loads the parameters of plan `plan` into one executor. `read` is called on the current thread, for one
/// parameter at a time, and fills its last argument with the elements of the given range.
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

/// Maximum number of threads that read weights; with more, the disk or the bus is the bottleneck.
const MAX_READER_THREADS: usize = 8;

/// Loads the resident weights of plan `plan` into every arena, and attaches the source of streamed weights to every
/// executor.
pub(crate) fn load_all(
    executors: &mut [Executor],
    plan: usize,
    source: &dyn WeightSource,
) -> Result<(), RuntimeError> {
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        source.read(param, range, out).map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
    };
    // On the CPU, the number of compute threads, which the user may have limited. Before a GPU run starts, all
    // cores of the host are idle.
    let of_host = executors.first().filter(|executor| executor.program().target().space == HOST);
    let of_all = |executor: &Executor| executors.len() * executor.device().workers() as usize;
    let readers = of_host.map_or_else(machine::cores, of_all).min(MAX_READER_THREADS);
    limits::room_for_threads(readers + executors.len()).map_err(RuntimeError::thread("weights"))?;
    plimsoll_exec::load_all(executors, plan, readers, &read)?;
    for executor in executors {
        if let Some(stream) = source.stream(&executor.program().plans()[plan].1.graph) {
            executor.attach_loaded(plan, stream);
        }
    }
    Ok(())
}
