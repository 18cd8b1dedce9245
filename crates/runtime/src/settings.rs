//! Options that decide where and how models run. Invariant: settings are read, never changed; choices derived from them
//! (replicas, tokens, streaming) are stored in the plan of a session.

use crate::budget::Budget;
use crate::dynamic::DynamicSettings;
use crate::{Device, RequestError, RuntimeError, machine};
use plimsoll_cpu::CpuMachine;
use plimsoll_exec::Machine;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Policy, Precision, Room, Streaming, Target};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// Options that decide where and how a model runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The CPU, or the GPUs to run on.
    pub device: Device,
    /// Element type of the encoders' weights and activations; `None` selects the device's best type.
    pub precision: Option<Precision>,
    /// Compute threads of the CPU.
    pub threads: usize,
    /// Number of replicas among which the CPU's threads are divided.
    pub replicas: Replicas,
    /// Memory budget of the plans; `None` is 80 % of the memory that is free now.
    pub budget: Option<Bytes>,
    /// Memory budget of the process on the host; on a CPU the smaller of the two budgets applies.
    pub host_memory: Option<Bytes>,
    /// Bytes that a run may keep in scratch files; `None` is all that is free on the disk.
    pub disk: Option<Bytes>,
    /// Folder for scratch files; `None` is the system's folder for temporary files.
    pub scratch: Option<PathBuf>,
    /// Tokens of a step; `None` is the most that fit, up to the target's saturation.
    pub tokens: Option<u64>,
    /// Whether weights may be streamed: kept in pinned host memory or on disk, and copied to the arena in every step.
    pub stream: Streaming,
    /// When the size of steps follows the free memory; `None` is one size for the whole run.
    pub dynamic: Option<DynamicSettings>,
    /// Flags that were given but have no effect on this device, for run.json.
    pub unused_flags: Vec<&'static str>,
}

/// Number of replicas among which a CPU's threads are divided. Each replica computes its own steps; all share one copy
/// of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replicas {
    /// The number that the length of the input justifies and the budget allows.
    #[default]
    Auto,
    /// At most this number; fewer if the budget does not allow them.
    AtMost(usize),
}

/// Properties of a machine on which result bits depend. Number and names of devices are left out: a run may resume on other
/// devices of the same kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Arithmetic {
    /// Kind of device.
    pub device: String,
    /// Instruction set of a CPU; versions and summation orders of a GPU.
    pub instructions: String,
    /// Element type of the weights and activations.
    pub precision: &'static str,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            precision: None,
            threads: machine::cores(),
            replicas: Replicas::Auto,
            budget: None,
            host_memory: None,
            disk: None,
            scratch: None,
            tokens: None,
            stream: Streaming::Auto,
            dynamic: None,
            unused_flags: vec![],
        }
    }
}

/// Input letters that justify another replica: with more, a replica saves more time than its memory costs.
pub const LETTERS_OF_REPLICA: u64 = 8192;

/// Tokenizer threads per GPU.
const TOKENIZERS: usize = 8;

/// Number of threads up to which a single replica is used, because dividing so few threads saves nothing.
const ONE_REPLICA: usize = 2;

impl Settings {
    /// The target to plan for, with all threads in one replica.
    pub fn target(&self) -> Result<Target, RuntimeError> {
        self.target_of(1)
    }

    /// The target of one of `replicas` replicas.
    pub(crate) fn target_of(&self, replicas: usize) -> Result<Target, RuntimeError> {
        Ok(self.machines(replicas)[0].target()?)
    }

    /// The machines of the run, all of one kind: the CPU divided into `replicas`, or the GPUs.
    pub fn machines(&self, replicas: usize) -> Vec<Arc<dyn Machine>> {
        match &self.device {
            Device::Cpu => vec![Arc::new(CpuMachine::new(replicas, threads_of_each(self.threads, replicas)))],
            Device::Machines(machines) => machines.clone(),
        }
    }

    /// The first machine.
    pub fn machine(&self) -> Arc<dyn Machine> {
        self.machines(1).swap_remove(0)
    }

    /// Whether plans are in host memory.
    pub fn is_on_host(&self) -> bool {
        self.device == Device::Cpu
    }

    /// Element type of the encoders' weights and activations.
    pub fn precision(&self) -> Result<Precision, RuntimeError> {
        match (self.is_on_host(), self.precision) {
            (true, asked) => on_cpu(asked),
            // Planning reports an element type that the GPU's kernels lack.
            (false, Some(asked)) => Ok(asked),
            (false, None) => Ok(self.machine().precisions()[0]),
        }
    }

    /// Compilation policy of the encoders.
    pub fn policy(&self) -> Result<Policy, RuntimeError> {
        Ok(Policy { precision: self.precision()?, ..Policy::default() })
    }

    /// The properties of the machine on which result bits depend.
    pub fn arithmetic(&self) -> Result<Arithmetic, RuntimeError> {
        let precision = self.precision()?.name();
        let machine = self.machine();
        Ok(Arithmetic { device: machine.kind().to_string(), instructions: machine.arithmetic(), precision })
    }

    /// Explains what delays the first step on a machine on which the program never ran before; `None` if nothing does.
    pub fn first_use(&self) -> Option<String> {
        self.machine().first_use()
    }

    /// Bytes free for an arena; with several devices, of the device with the least free memory.
    pub fn free(&self) -> Result<Bytes, RuntimeError> {
        free(&self.machines(1))
    }

    /// Number of tokenizer threads: a GPU needs several to be kept busy.
    pub fn tokenizers(&self) -> usize {
        if self.is_on_host() { 1 } else { machine::cores().min(TOKENIZERS * self.machines(1).len()) }
    }

    /// Pipeline depth: in-flight steps on each device.
    pub fn depth(&self) -> usize {
        self.machine().depth()
    }

    /// Maximum number of replicas for an input that justifies `work` replicas; `None` if the size of the input is
    /// unknown.
    pub fn most_replicas(&self, work: Option<u64>) -> usize {
        if !self.is_on_host() {
            return 1;
        }
        let useful = match (self.replicas, work) {
            (Replicas::AtMost(most), _) => most,
            (Replicas::Auto, Some(replicas)) => usize::try_from(replicas).unwrap_or(usize::MAX),
            (Replicas::Auto, None) => self.threads,
        };
        most_replicas(self.threads, useful, self.stream)
    }

    /// The memory budget, based on the memory that is free at the time of the call; without entries of the process.
    pub fn read_budget(&self) -> Result<Budget, RuntimeError> {
        let on_host = self.is_on_host();
        let host_memory = self.host_memory;
        let bytes = match self.budget {
            Some(budget) => budget,
            None => machine::parse_budget("80%", self.free()?)?,
        };
        let bytes = if on_host { host_memory.map_or(bytes, |host| host.min(bytes)) } else { bytes };
        let scratch = self.scratch.clone().unwrap_or_else(std::env::temp_dir);
        let on_disk = machine::free_on_disk(&scratch);
        let room = Room {
            host: host_memory.unwrap_or_else(|| plimsoll_exec::memory::available().free),
            file: self.disk.map_or(on_disk, |disk| disk.min(on_disk)),
        };
        Ok(Budget { bytes, on_host, host_memory, room, scratch, process: vec![] })
    }
}

/// Bytes free for an arena on every one of these machines.
pub(crate) fn free(machines: &[Arc<dyn Machine>]) -> Result<Bytes, RuntimeError> {
    let free = machines.iter().map(|machine| Ok(machine.free()?)).collect::<Result<Vec<_>, RuntimeError>>()?;
    Ok(free.into_iter().min().unwrap_or(Bytes::ZERO))
}

/// Maximum number of replicas for `threads` threads and an input that justifies `useful` replicas. With streamed weights
/// the result is 1, because each replica would read the weights.
pub(crate) fn most_replicas(threads: usize, useful: usize, stream: Streaming) -> usize {
    if threads <= ONE_REPLICA || stream == Streaming::Always {
        1
    } else {
        replicas_of_equal_size(threads, useful)
    }
}

/// The largest number of replicas, at most `replicas`, that have equal numbers of threads.
pub(crate) fn replicas_of_equal_size(threads: usize, replicas: usize) -> usize {
    threads / threads.div_ceil(replicas.clamp(1, threads))
}

/// Number of threads of each replica.
pub(crate) fn threads_of_each(threads: usize, replicas: usize) -> usize {
    (threads / replicas).max(1)
}

/// Element type of models on this CPU: the requested type, or the best one.
///
/// # Errors
/// The CPU's kernels lack the requested type.
pub fn on_cpu(asked: Option<Precision>) -> Result<Precision, RuntimeError> {
    let formats = CpuMachine::formats();
    match asked {
        None => Ok(formats[0]),
        Some(asked) if formats.contains(&asked) => Ok(asked),
        Some(asked) => Err(RequestError::PrecisionOfCpu { asked: asked.name() }.into()),
    }
}

/// Number of replicas that the size of the input files justifies, compressed or not; `None` if an input is a pipe.
pub fn replicas_for_input(inputs: &[PathBuf]) -> Option<u64> {
    inputs
        .iter()
        .map(|path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|file| file.len()))
        .sum::<Option<u64>>()
        .map(|letters| letters / LETTERS_OF_REPLICA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_have_equally_many_threads() {
        for (threads, useful, wanted) in [
            (1, 9, 1),
            (2, 9, 1),
            (3, 9, 3),
            (3, 2, 1),
            (4, 2, 2),
            (4, 3, 2),
            (5, 4, 2),
            (8, 0, 1),
            (8, 7, 4),
            (8, 8, 8),
            (64, 10, 9),
        ] {
            let replicas = most_replicas(threads, useful, Streaming::Auto);
            assert_eq!(replicas, wanted, "{threads} threads, useful replicas {useful}");
            assert!(replicas * threads_of_each(threads, replicas) <= threads);
            assert_eq!(most_replicas(threads, useful, Streaming::Always), 1);
        }
    }
}
