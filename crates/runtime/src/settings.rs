//! The options that decide where and how models run. Invariant: a setting is read, never changed: what is chosen from it
//! (replicas, tokens, streaming) is in the plan of a session.

use crate::budget::Budget;
use crate::{Device, Level, RequestError, RuntimeError, machine};
use cpu::CpuMachine;
use exec::Machine;
use graph::Bytes;
use plan::{Policy, Precision, Stream, Target};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// Options that decide where and how a model runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The CPU, or the GPUs to run on.
    pub device: Device,
    /// The element type of encoders' weights and activations; `None` is the best that the device has.
    pub precision: Option<Precision>,
    /// Compute threads of the CPU.
    pub threads: usize,
    /// Into how many replicas the CPU's threads are divided.
    pub replicas: Replicas,
    /// The memory budget: `None` is 80 % of what is free now.
    pub budget: Option<Bytes>,
    /// The memory budget of the process on the host; on a CPU the smaller of both budgets holds.
    pub host_memory: Option<Bytes>,
    /// Tokens of a step: `None` is the most that fit, up to where more bring no speed.
    pub tokens: Option<u64>,
    /// Whether weights may stay in their files and be read in every step.
    pub stream: Stream,
    /// Flags that were given and have no effect on this device, for run.json.
    pub unused_flags: Vec<&'static str>,
}

/// Into how many replicas the threads of a CPU are divided. Each replica runs its steps alone; all share one copy of the
/// weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replicas {
    /// As many as the input is worth and the budget has room for.
    #[default]
    Auto,
    /// At most this many, fewer where the budget has no room for them.
    AtMost(usize),
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
            tokens: None,
            stream: Stream::Auto,
            unused_flags: vec![],
        }
    }
}

/// Letters of input that are worth another replica: what a replica takes of memory is less than what it saves in time.
pub const LETTERS_OF_REPLICA: u64 = 8192;

/// Threads that tokenize for each GPU.
const TOKENIZERS: usize = 8;

/// Most threads that one replica has alone: with so few, dividing them saves nothing.
const ONE_REPLICA: usize = 2;

impl Settings {
    /// The machine that plans are made for, with all threads in one replica.
    pub fn target(&self) -> Result<Target, RuntimeError> {
        self.target_of(1)
    }

    /// The target of each of this many replicas.
    pub(crate) fn target_of(&self, replicas: usize) -> Result<Target, RuntimeError> {
        Ok(self.machines(replicas)[0].target()?)
    }

    /// The machines of the run, which are of one kind: the CPU with its threads in `replicas`, or the GPUs.
    pub fn machines(&self, replicas: usize) -> Vec<Arc<dyn Machine>> {
        match &self.device {
            Device::Cpu => vec![Arc::new(CpuMachine::new(replicas, threads_of_each(self.threads, replicas)))],
            Device::Machines(machines) => machines.clone(),
        }
    }

    /// The first of the machines.
    pub fn machine(&self) -> Arc<dyn Machine> {
        self.machines(1).swap_remove(0)
    }

    /// Whether plans are in the host's memory.
    pub fn is_on_host(&self) -> bool {
        self.device == Device::Cpu
    }

    /// The element type of encoders' weights and activations.
    pub fn precision(&self) -> Result<Precision, RuntimeError> {
        match (self.is_on_host(), self.precision) {
            (true, asked) => on_cpu(asked),
            // What its kernels lack is said when it is planned.
            (false, Some(asked)) => Ok(asked),
            (false, None) => Ok(self.machine().precisions()[0]),
        }
    }

    /// How encoders are compiled.
    pub fn policy(&self) -> Result<Policy, RuntimeError> {
        Ok(Policy { precision: self.precision()?, ..Policy::default() })
    }

    /// The properties of the machine that the bits of a result depend on, as JSON: kind of device, instructions, precision.
    pub fn arithmetic(&self) -> Result<Value, RuntimeError> {
        let precision = self.precision()?.name();
        // Neither the number of devices nor their names: a run goes on with others.
        let (kind, instructions) = (self.machine().kind().to_string(), self.machine().arithmetic());
        Ok(json!({"device": kind, "instructions": instructions, "precision": precision}))
    }

    /// What delays the first step on a machine that was never used, in words.
    pub fn first_use(&self) -> Option<String> {
        self.machine().first_use()
    }

    /// The level at which a run reports its device and kernels: f32 on the CPU is the reference, which surprises nobody.
    pub fn computing_level(&self) -> Level {
        match (self.is_on_host(), self.precision()) {
            (true, Ok(Precision::F32)) => Level::Detail,
            (true | false, _) => Level::Info,
        }
    }

    /// Bytes that are free for an arena; of several devices, those of the device with the least.
    pub fn free(&self) -> Result<Bytes, RuntimeError> {
        free(&self.machines(1))
    }

    /// Threads that tokenize: a GPU needs several to be kept busy.
    pub fn tokenizers(&self) -> usize {
        match self.is_on_host() {
            true => 1,
            false => machine::cores().min(TOKENIZERS * self.machines(1).len()),
        }
    }

    /// Steps that may be in flight on each device.
    pub fn depth(&self) -> usize {
        self.machine().depth()
    }

    /// The most replicas that an input is worth which is worth `work` of them; `None` where its size is not known.
    pub fn most_replicas(&self, work: Option<u64>) -> usize {
        if !self.is_on_host() {
            return 1;
        }
        let worth = match (self.replicas, work) {
            (Replicas::AtMost(most), _) => most,
            (Replicas::Auto, Some(replicas)) => usize::try_from(replicas).unwrap_or(usize::MAX),
            (Replicas::Auto, None) => self.threads,
        };
        most_replicas(self.threads, worth, self.stream)
    }

    /// The memory budget, read now: what is free changes from moment to moment. It has no lines of the process yet.
    pub fn read_budget(&self) -> Result<Budget, RuntimeError> {
        let (on_host, host_memory) = (self.is_on_host(), self.host_memory);
        let bytes = match self.budget {
            Some(budget) => budget,
            None => machine::parse_budget("80%", self.free()?)?,
        };
        let bytes = if on_host { host_memory.map_or(bytes, |host| host.min(bytes)) } else { bytes };
        Ok(Budget { bytes, on_host, host_memory, process: vec![] })
    }
}

/// Bytes that are free for an arena on each of these machines.
pub(crate) fn free(machines: &[Arc<dyn Machine>]) -> Result<Bytes, RuntimeError> {
    let free = machines.iter().map(|machine| Ok(machine.free()?)).collect::<Result<Vec<_>, RuntimeError>>()?;
    Ok(free.into_iter().min().unwrap_or(Bytes::ZERO))
}

/// The most replicas of this many threads for an input that is worth `worth` of them. Streamed weights would be read by
/// each replica, so they have one.
pub(crate) fn most_replicas(threads: usize, worth: usize, stream: Stream) -> usize {
    if threads <= ONE_REPLICA || stream == Stream::Always { 1 } else { even(threads, worth) }
}

/// At most `replicas`, all with the same number of threads.
pub(crate) fn even(threads: usize, replicas: usize) -> usize {
    threads / threads.div_ceil(replicas.clamp(1, threads))
}

/// The threads of each replica.
pub(crate) fn threads_of_each(threads: usize, replicas: usize) -> usize {
    (threads / replicas).max(1)
}

/// The element type of models on this CPU.
///
/// # Errors
/// A type that its kernels lack.
pub fn on_cpu(asked: Option<Precision>) -> Result<Precision, RuntimeError> {
    let formats = CpuMachine::formats();
    match asked {
        None => Ok(formats[0]),
        Some(asked) if formats.contains(&asked) => Ok(asked),
        Some(asked) => Err(RequestError::PrecisionOfCpu { asked: asked.name() }.into()),
    }
}

/// The replicas that files are worth, compressed or not; `None` where one is a pipe.
pub fn replicas_for_input(inputs: &[PathBuf]) -> Option<u64> {
    let bytes = |path: &PathBuf| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|file| file.len());
    inputs.iter().map(bytes).sum::<Option<u64>>().map(|letters| letters / LETTERS_OF_REPLICA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_have_equally_many_threads() {
        for (threads, worth, wanted) in [
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
            let replicas = most_replicas(threads, worth, Stream::Auto);
            assert_eq!(replicas, wanted, "{threads} threads, worth {worth}");
            assert!(replicas * threads_of_each(threads, replicas) <= threads);
            assert_eq!(most_replicas(threads, worth, Stream::Always), 1);
        }
    }
}
