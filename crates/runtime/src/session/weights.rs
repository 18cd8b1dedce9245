//! Loading of weights from files into the memory of devices. Invariant: each parameter is read from its file once,
//! whatever the number of devices.

use crate::observer::on_start;
use crate::{EncoderModel, HeadModel, Observer, RuntimeError, machine};
use plimsoll_data::limits;
use plimsoll_exec::{Copies, Executor, Param, ReadShared};
use plimsoll_plan::Location;
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;

/// Provider of a model's weights.
pub trait WeightSource: Sync {
    /// Reads elements `range` of a parameter into `out`, as f32.
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError>;
}

impl WeightSource for EncoderModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        EncoderModel::read(self, param, range, out)
    }
}

impl WeightSource for HeadModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        HeadModel::read(self, param, range, out)
    }
}

/// Loads the parameters of plan `plan` into one executor. `read` is called on the current thread, for one
/// parameter at a time, and fills its last argument with the elements of the given range.
pub(super) fn load(
    executor: &mut Executor,
    plan: usize,
    mut read: impl FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    Ok(executor.load(plan, &mut |param: &Param, range: Range<u64>, out: &mut [f32]| {
        read(param, range, out).map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
    })?)
}

/// Maximum number of threads that read weights; with more, the disk or the bus is the bottleneck.
const MAX_READER_THREADS: usize = 8;

/// Maximum number of threads that draw or read the initial values of parameters in GPU memory. A random number takes
/// several times as long as reading one, so more threads than [`MAX_READER_THREADS`] are of use.
const MAX_DRAWING_THREADS: usize = 16;

/// Number of threads that may load weights: on the CPU the number of compute threads, which the user may have limited.
/// Before a GPU run starts, all cores of the host are idle.
fn readers(executors: &[Executor]) -> usize {
    match executors.first() {
        Some(executor) if executor.program().target().arena_in_host() => {
            executors.len() * executor.device().info().workers as usize
        }
        Some(_) | None => machine::cores(),
    }
}

/// Loads the parameters of every plan of a training program, and their further copies ([`Executor::load_all_plans`]).
pub(super) fn load_training(
    executor: &mut Executor,
    copies: &BTreeMap<Location, Copies>,
    read: ReadShared<'_>,
    observer: &mut dyn Observer,
) -> Result<(), RuntimeError> {
    // The ledger of a process on the host has the buffers of at most `MAX_READER_THREADS` readers.
    let on_host = executor.program().target().arena_in_host();
    let max_readers = if on_host { MAX_READER_THREADS } else { MAX_DRAWING_THREADS };
    let readers = readers(std::slice::from_ref(executor)).min(max_readers);
    limits::room_for_threads(readers + 1).map_err(RuntimeError::thread("weights"))?;
    Ok(executor.load_all_plans(copies, readers, read, &mut on_start(observer))?)
}

/// Loads the weights of plan `plan` into the memory of every device.
pub(crate) fn load_all(
    executors: &mut [Executor],
    plan: usize,
    source: &dyn WeightSource,
) -> Result<(), RuntimeError> {
    let readers = readers(executors).min(MAX_READER_THREADS);
    limits::room_for_threads(readers + executors.len()).map_err(RuntimeError::thread("weights"))?;
    Ok(plimsoll_exec::load_all(
        executors,
        plan,
        readers,
        &|param: &Param, range: Range<u64>, out: &mut [f32]| {
            source.read(param, range, out).map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
        },
    )?)
}
