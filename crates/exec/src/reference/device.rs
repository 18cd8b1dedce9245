//! A device of reference kernels: the arena is a byte vector and every launch copies its operands out and
//! its results in. Invariant: it is the yardstick, so it is as plain as it can be; speed is nobody's concern.

use super::{Data, Tensor, eval};
use crate::device::{Device, DeviceError, Launch, Operand};
use graph::{Bytes, Counts, DType, TensorSpec};
use plan::{KernelRow, Target};

/// Runs plans for the target `null`.
#[derive(Debug, Default)]
pub struct ReferenceDevice {
    arena: Vec<u8>,
}

impl ReferenceDevice {
    /// A device without an arena.
    pub fn new() -> Self {
        Self::default()
    }

    fn range(&mut self, at: u64, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
        let end = at.checked_add(bytes.0).filter(|&end| end <= self.arena.len() as u64);
        let end = end.ok_or(DeviceError::OutsideArena { at, bytes })?;
        Ok(&mut self.arena[at as usize..end as usize])
    }

    fn tensor(&mut self, operand: &Operand, counts: Counts) -> Result<Tensor, DeviceError> {
        let bytes = self.range(operand.at, operand.bytes(counts))?;
        let words = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        let data = match operand.spec.dtype {
            DType::F32 => Data::F32(words.map(f32::from_le_bytes).collect()),
            DType::I32 => Data::I32(words.map(i32::from_le_bytes).collect()),
            DType::Bf16 | DType::F16 => {
                let why = format!("the reference computes in f32, not {}", operand.spec);
                return Err(DeviceError::Kernel { op: "reference", why });
            }
        };
        Ok(Tensor { shape: shape(&operand.spec, counts), data })
    }
}

fn shape(spec: &TensorSpec, counts: Counts) -> Vec<usize> {
    spec.shape.iter().map(|d| d.at(counts) as usize).collect()
}

impl Device for ReferenceDevice {
    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn kernels(&self) -> Vec<KernelRow> {
        // The reference defines the target `null`: one kernel for every op.
        Target::named("null").map(|t| t.kernels).unwrap_or_default()
    }

    fn units(&self) -> u64 {
        1
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena = vec![0; bytes.0 as usize];
        Ok(())
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.range(at, Bytes(bytes.len() as u64))?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        out.copy_from_slice(self.range(at, Bytes(out.len() as u64))?);
        Ok(())
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.range(at, bytes)?.fill(byte);
        Ok(())
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        let data = self.range(from, bytes)?.to_vec();
        self.upload(to, &data)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let counts = launch.counts;
        let ins = launch.ins.iter().map(|o| self.tensor(o, counts)).collect::<Result<Vec<_>, _>>()?;
        let ins: Vec<&Tensor> = ins.iter().collect();
        let wanted: Vec<_> = launch.outs.iter().map(|o| o.as_ref().map(|o| shape(&o.spec, counts))).collect();
        let results = eval(launch.op, &ins, &wanted)
            .map_err(|e| DeviceError::Kernel { op: launch.op.name(), why: e.to_string() })?;
        for (operand, result) in launch.outs.iter().flatten().zip(results.into_iter().flatten()) {
            match &result.data {
                Data::F32(data) => self.upload(operand.at, bytemuck::cast_slice(data))?,
                Data::I32(data) => self.upload(operand.at, bytemuck::cast_slice(data))?,
            }
        }
        Ok(())
    }
}
