//! The host CPU as a `plimsoll_exec::Machine`. Invariant: its planning target has the instruction set that its devices use.

use crate::{CpuDevice, Isa};
use plimsoll_exec::{Device, DeviceError, DeviceKind, Machine, memory};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Precision, Target};

/// The host CPU: a number of replicas, each with its own threads, that compute steps concurrently.
#[derive(Clone, Copy, Debug)]
pub struct CpuMachine {
    replicas: usize,
    /// Threads of each replica.
    threads: usize,
}

impl CpuMachine {
    /// Describes `replicas` replicas of `threads` threads each.
    pub fn new(replicas: usize, threads: usize) -> Self {
        Self { replicas, threads }
    }

    /// Precisions for an encoder's weights and activations, best first. bf16 comes first only where matmuls run on
    /// AMX tiles: there, an f32 matmul costs six bf16 matmuls. Elsewhere f32 takes at most twice the time of bf16,
    /// and it is the arithmetic of the reference implementations.
    pub fn formats() -> [Precision; 3] {
        if Isa::detect().has_tiles() {
            [Precision::Bf16, Precision::F32, Precision::Int8]
        } else {
            [Precision::F32, Precision::Bf16, Precision::Int8]
        }
    }
}

impl Machine for CpuMachine {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "cpu", model: String::new() }
    }

    fn name(&self) -> String {
        self.kind().to_string()
    }

    fn precisions(&self) -> Vec<Precision> {
        Self::formats().to_vec()
    }

    fn target(&self) -> Result<Target, DeviceError> {
        CpuDevice::target(self.threads, Isa::detect()).map_err(|e| DeviceError::Machine { source: Box::new(e) })
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(memory::available().free)
    }

    fn arithmetic(&self) -> String {
        Isa::detect().name().to_owned()
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        if self.replicas == 1 {
            return Ok(vec![Box::new(CpuDevice::open(self.threads)?)]);
        }
        let replicas = CpuDevice::replicas(self.replicas, self.threads)?;
        Ok(replicas.into_iter().map(|replica| Box::new(replica) as Box<dyn Device>).collect())
    }
}
