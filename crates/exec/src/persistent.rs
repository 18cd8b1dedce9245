//! Persistent tensors by name: initial values of states, and access to parameters and states for checkpoints.
//! Invariant: bytes are transferred as they are in the arena, one part at a time; there is never a second copy of the
//! whole.

use crate::device::DeviceError;
use crate::executor::Executor;
use crate::half::{f32_to_bf16, f32_to_f16};
use crate::reference::{BF16, F16};
use plimsoll_graph::{Bytes, DType, Param, Role, Space, StateDef, TensorSpec};
use plimsoll_plan::Location;
use std::collections::BTreeSet;

/// A persistent tensor (a parameter or state) and its place in the memory of the device.
#[derive(Clone, Debug)]
pub struct PersistentTensor {
    /// The parameter or state.
    pub what: PersistentKind,
    /// Where its first byte lies between its uses.
    pub at: Location,
    /// Type and shape of the tensor. The shape has no dynamic dimension.
    pub spec: TensorSpec,
}

/// Kind of a persistent tensor: its values survive from one step to the next.
#[derive(Clone, Debug)]
pub enum PersistentKind {
    /// A parameter.
    Param(Param),
    /// An optimizer or other training state.
    State(StateDef),
}

/// Maximum number of elements initialised with one upload.
const PART: usize = 1 << 16;

impl Executor {
    /// The parameters and states of all plans, each once, in the order of the program's plans.
    pub fn persistent_tensors(&self) -> Vec<PersistentTensor> {
        let program = self.program();
        let mut seen = BTreeSet::new();
        let mut residents = vec![];
        for (i, (_, plan)) in program.plans().iter().enumerate() {
            for (v, value) in plan.graph.sources() {
                let what = match value.spec.role {
                    Role::Param(p) => PersistentKind::Param(plan.graph.params[p.index()].clone()),
                    Role::State(s) => PersistentKind::State(plan.graph.states[s.index()].clone()),
                    Role::Input | Role::Activation | Role::Grad => continue,
                };
                let slice = plan.memory.persistent_slice(v);
                let Some(at) = slice.map(|slice| program.location(i, slice)) else { continue };
                if seen.insert(at) {
                    residents.push(PersistentTensor { what, at, spec: value.spec.clone() });
                }
            }
        }
        residents
    }

    /// Sets every state to its initial value.
    pub fn start_states(&mut self) -> Result<(), DeviceError> {
        for PersistentTensor { what, at, spec } in self.persistent_tensors() {
            let PersistentKind::State(state) = what else { continue };
            let elements: u64 = spec.shape.iter().filter_map(|d| d.fixed()).product();
            let one = element(state.init, spec.dtype);
            // Zeros, the usual case, need no transfer to the device.
            if let [byte, rest @ ..] = one.as_slice()
                && rest.iter().all(|other| other == byte)
            {
                let bytes = Bytes(elements * one.len() as u64);
                self.device_mut().fill(at, bytes, *byte)?;
                continue;
            }
            let part = one.repeat(PART.min(elements as usize));
            for first in (0..elements).step_by(PART) {
                let bytes = one.len() * (elements - first).min(PART as u64) as usize;
                let there = Location { at: at.at + first * one.len() as u64, ..at };
                self.upload(there, &part[..bytes])?;
            }
        }
        Ok(())
    }

    /// Waits for enqueued work that may access a position outside the arena: a device orders its own accesses of the arena
    /// alone.
    fn before_access(&mut self, at: Location) -> Result<(), DeviceError> {
        match at.space {
            Space::Device => Ok(()),
            Space::Host | Space::File => self.device_mut().synchronize(),
        }
    }

    /// Reads bytes from any position in the memory of the device, after all enqueued work.
    pub fn download(&mut self, at: Location, out: &mut [u8]) -> Result<(), DeviceError> {
        self.before_access(at)?;
        self.device_mut().download(at, out)
    }

    /// Writes bytes to any position in the memory of the device, after all enqueued work.
    pub fn upload(&mut self, at: Location, bytes: &[u8]) -> Result<(), DeviceError> {
        self.before_access(at)?;
        self.device_mut().upload(at, bytes)
    }
}

/// Converts f32 to a 16-bit float, rounding to nearest with ties to even.
pub(crate) fn round(from: &[f32], dtype: DType, to: &mut [u16]) {
    let pairs = to.iter_mut().zip(from);
    match dtype {
        DType::Bf16 => pairs.for_each(|(to, &x)| *to = f32_to_bf16(x)),
        DType::F16 => pairs.for_each(|(to, &x)| *to = f32_to_f16(x)),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {}
    }
}

/// The little-endian bytes of a number in an element type, rounded to nearest with ties to even if the type is
/// narrower.
pub(crate) fn element(x: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::Bf16 => BF16.round(f64::from(x)).to_le_bytes().to_vec(),
        DType::F16 => F16.round(f64::from(x)).to_le_bytes().to_vec(),
        // No state has a quantized type; graph verification rejects it.
        DType::F8 | DType::I8 => vec![],
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::U8 => vec![x as u8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::half::{bf16_to_f32, f16_to_f32};

    /// Both implementations of rounding agree on numbers of every exponent, on ties and on infinities, and keep NaN.
    #[test]
    fn numbers_are_rounded_alike() {
        let near =
            (0..=0xFFFFu32).flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| high << 16 | low));
        let numbers: Vec<f32> = near.map(f32::from_bits).collect();
        for dtype in [DType::Bf16, DType::F16] {
            let mut narrow = vec![0; numbers.len()];
            round(&numbers, dtype, &mut narrow);
            let widen = if dtype == DType::Bf16 { bf16_to_f32 } else { f16_to_f32 };
            let back: Vec<f32> = narrow.iter().map(|&x| widen(x)).collect();
            for ((&x, &found), back) in numbers.iter().zip(&narrow).zip(back) {
                if x.is_nan() {
                    assert!(back.is_nan(), "{:#x} as {}", x.to_bits(), dtype.name());
                    continue;
                }
                assert_eq!(found.to_le_bytes().to_vec(), element(x, dtype), "{x} as {}", dtype.name());
            }
        }
    }
}
