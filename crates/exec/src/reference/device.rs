//! The reference device: the arena is a byte vector; every launch widens its operands to f64 and rounds its results
//! to their element types, to nearest with ties to even. Invariant: it defines correctness, so it is kept as simple
//! as possible; speed is irrelevant.

use super::half::{BF16, F16};
use super::{Data, Tensor, eval};
use crate::device::{Device, DeviceError, DeviceInfo, Launch, Operand, Recorder, Tracer};
use crate::executor::POISON;
use crate::host::HostClock;
use crate::progress::OnStart;
use crate::scaled::QuantizedFormat;
use crate::transfer::{Allocation, Transfer};
use plimsoll_graph::{Bytes, Counts, DType, Space, TensorSpec};
use plimsoll_plan::{KernelId, Kernels, Location, Queue};
use std::collections::BTreeMap;

/// Runs plans for the target `null` with the reference kernels. Its spaces are byte vectors.
#[derive(Debug)]
pub struct ReferenceDevice {
    moves: Moves,
    arena: Vec<u8>,
    host: Vec<u8>,
    file: Vec<u8>,
    /// Transfers that were started and not waited for, by id.
    started: BTreeMap<usize, Transfer>,
    clock: HostClock,
}

/// When a reference device copies the bytes of a transfer. Between its start and the wait for it a real device may copy at
/// any instant, so a plan must give the same bits both ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// At its start.
    AtStart,
    /// At the wait for it. At its start the destination is filled with NaN.
    AtWait,
}

impl Default for ReferenceDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl ReferenceDevice {
    /// A device without memory, which copies at the start of a transfer.
    pub fn new() -> Self {
        Self::moving(Moves::AtStart)
    }

    /// A device without memory.
    pub fn moving(moves: Moves) -> Self {
        Self {
            moves,
            arena: vec![],
            host: vec![],
            file: vec![],
            started: BTreeMap::new(),
            clock: HostClock::default(),
        }
    }

    /// Bytes of a range of a space.
    fn bytes(&mut self, at: Location, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
        let space = match at.space {
            Space::Device => &mut self.arena,
            Space::Host => &mut self.host,
            Space::File => &mut self.file,
        };
        let end = at.at.checked_add(bytes.0).filter(|&end| end <= space.len() as u64);
        let end = end.ok_or(DeviceError::OutsideArena { at: at.at, bytes })?;
        Ok(&mut space[at.at as usize..end as usize])
    }

    fn range(&mut self, at: u64, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
        self.bytes(Location::in_arena(at), bytes)
    }

    fn copy(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let data = self.bytes(transfer.from, transfer.bytes)?.to_vec();
        self.upload(transfer.to, &data)
    }

    fn tensor(&mut self, operand: &Operand, counts: Counts) -> Result<Tensor, DeviceError> {
        let bytes = self.range(operand.at, operand.bytes(counts))?;
        let words = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        let halves = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let shape = shape(&operand.spec, counts);
        let data = match operand.spec.dtype {
            DType::F32 => Data::Float(words.map(|b| f64::from(f32::from_le_bytes(b))).collect()),
            DType::Bf16 => Data::Float(halves.map(|b| BF16.widen(b)).collect()),
            DType::F16 => Data::Float(halves.map(|b| F16.widen(b)).collect()),
            DType::F8 => Data::Float(QuantizedFormat::E4m3.decode(bytes, shape[0], shape[1])),
            DType::I8 => Data::Float(QuantizedFormat::Int8.decode(bytes, shape[0], shape[1])),
            DType::I32 => Data::I32(words.map(i32::from_le_bytes).collect()),
            DType::U8 => Data::U8(bytes.to_vec()),
        };
        Ok(Tensor { shape, data })
    }
}

/// The bytes of a tensor in an element type; `None` if floats, integers and quantized values do not match.
fn bytes_of(tensor: &Tensor, dtype: DType) -> Option<Vec<u8>> {
    let columns = tensor.shape.get(1).copied().unwrap_or(1);
    Some(match (&tensor.data, dtype) {
        (Data::Float(data), DType::F32) => data.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        (Data::Float(data), DType::Bf16) => data.iter().flat_map(|&x| BF16.round(x).to_le_bytes()).collect(),
        (Data::Float(data), DType::F16) => data.iter().flat_map(|&x| F16.round(x).to_le_bytes()).collect(),
        (Data::Float(data), DType::F8) => QuantizedFormat::E4m3.encode(data, columns),
        (Data::Float(data), DType::I8) => QuantizedFormat::Int8.encode(data, columns),
        (Data::I32(data), DType::I32) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (Data::U8(data), DType::U8) => data.clone(),
        (Data::Float(_), DType::I32 | DType::U8)
        | (Data::I32(_) | Data::U8(_), DType::F32 | DType::Bf16 | DType::F16 | DType::F8 | DType::I8)
        | (Data::I32(_), DType::U8)
        | (Data::U8(_), DType::I32) => return None,
    })
}

fn shape(spec: &TensorSpec, counts: Counts) -> Vec<usize> {
    spec.shape.iter().map(|d| d.at(counts) as usize).collect()
}

impl Device for ReferenceDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "reference".to_owned(),
            kernels: Kernels::Reference,
            workers: 1,
            depth: 1,
            takes_weights: true,
            arithmetic: "reference".to_owned(),
            matmul_provider: None,
        }
    }

    fn allocate(&mut self, memory: &Allocation<'_>) -> Result<(), DeviceError> {
        self.arena = vec![0; memory.arena.0 as usize];
        self.host = vec![POISON; memory.host.0 as usize];
        self.file = vec![POISON; memory.file.0 as usize];
        self.started.clear();
        Ok(())
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        // The arena is a vector, of which no part can be given back. What is behind the border is overwritten instead, so
        // that a step that reads it fails a test.
        let rest = Bytes(self.arena.len() as u64).saturating_sub(bytes);
        self.fill(Location::in_arena(bytes.0), rest, POISON)
    }

    fn prepare(&mut self, _: &[Launch<'_>], _: OnStart<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&mut self, to: Location, bytes: &[u8]) -> Result<(), DeviceError> {
        self.bytes(to, Bytes(bytes.len() as u64))?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, from: Location, out: &mut [u8]) -> Result<(), DeviceError> {
        out.copy_from_slice(self.bytes(from, Bytes(out.len() as u64))?);
        Ok(())
    }

    fn fill(&mut self, at: Location, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.bytes(at, bytes)?.fill(byte);
        Ok(())
    }

    fn begin_step(&mut self) -> Result<Bytes, DeviceError> {
        Ok(Bytes::ZERO)
    }

    fn start(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        if self.moves == Moves::AtStart || transfer.queue() == Queue::Compute {
            return self.copy(transfer);
        }
        self.fill(transfer.to, transfer.bytes, POISON)?;
        self.started.insert(transfer.id, *transfer);
        Ok(())
    }

    fn wait_for(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        match self.started.remove(&transfer.id) {
            Some(started) => self.copy(&started),
            None => Ok(()),
        }
    }

    fn complete(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        self.wait_for(transfer)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        None
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        &mut self.clock
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        match launch.kernel {
            KernelId::Reference(_) => {}
            KernelId::Cpu(_) | KernelId::Cuda(_) | KernelId::Move | KernelId::View => {
                return Err(launch.wrong_kernel());
            }
        }
        let start = self.clock.start();
        let counts = launch.counts;
        let ins = launch.ins.iter().map(|o| self.tensor(o, counts)).collect::<Result<Vec<_>, _>>()?;
        let ins: Vec<&Tensor> = ins.iter().collect();
        let wanted: Vec<_> = launch.outs.iter().map(|o| o.as_ref().map(|o| shape(&o.spec, counts))).collect();
        let results = eval(launch.op, &ins, &wanted)
            .map_err(|e| DeviceError::Kernel { op: launch.op.name(), why: e.to_string() })?;
        for (operand, result) in launch.outs.iter().flatten().zip(results.into_iter().flatten()) {
            let bytes = bytes_of(&result, operand.spec.dtype).ok_or_else(|| DeviceError::Kernel {
                op: launch.op.name(),
                why: format!("its result is no {}", operand.spec),
            })?;
            self.upload(Location::in_arena(operand.at), &bytes)?;
        }
        self.clock.note(start, "compute", launch.op.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::ops::Add;
    use plimsoll_graph::{Dim, Op};

    /// In units of the last place: 1.5 is a tie and rounds to the even value, 1.75 rounds up, and the next tie rounds
    /// up to the even value.
    #[test]
    fn sums_are_rounded_once_to_their_element_type() {
        let counts = Counts { tokens: 0, sequences: 0, packs: 1 };
        for (dtype, half, ulp) in [(DType::Bf16, BF16, 2.0_f64.powi(-7)), (DType::F16, F16, 2.0_f64.powi(-10))]
        {
            let mut device = ReferenceDevice::new();
            device.allocate(&Allocation::arena(Bytes(192))).expect("an arena");
            let spec = TensorSpec::activation([Dim::Fixed(3)], dtype);
            let place = |at| Operand { at, spec: spec.clone() };
            let give = |device: &mut ReferenceDevice, at, data: [f64; 3]| {
                let bytes = bytes_of(&Tensor::f64(&[3], data.to_vec()), dtype).expect("floats");
                device.upload(Location::in_arena(at), &bytes).expect("inside");
            };
            give(&mut device, 0, [1.0, 1.0, 1.0 + ulp]);
            give(&mut device, 64, [0.5 * ulp, 0.75 * ulp, 0.5 * ulp]);
            let ins = [place(0), place(64)];
            let outs = [Some(place(128))];
            let op = Op::Add(Add {});
            device
                .launch(&Launch {
                    op: &op,
                    kernel: KernelId::Reference(plimsoll_plan::ReferenceKernel::Any),
                    ins: &ins,
                    outs: &outs,
                    workspace: None,
                    counts,
                })
                .expect("launched");
            let mut out = [0; 6];
            device.download(Location::in_arena(128), &mut out).expect("inside");
            let found = out.chunks_exact(2).map(|b| half.widen(u16::from_le_bytes([b[0], b[1]])));
            assert_eq!(found.collect::<Vec<_>>(), [1.0, 1.0 + ulp, 1.0 + 2.0 * ulp]);
        }
    }
}
