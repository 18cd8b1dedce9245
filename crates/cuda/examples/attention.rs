//! Measures microseconds and TFLOP/s of the attention forward pass on the first CUDA device, in bf16, for
//! packed sequences of one length, as `bench/peers/attention.py` does for PyTorch. `cargo run --release -p
//! plimsoll-cuda --example attention`

mod timing;

use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Allocation, Device, DeviceError, Launch, Operand};
use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op};
use plimsoll_plan::{CudaKernel, KernelId, Location};
use std::error::Error;

const TOKENS: u64 = 65_536;
const LENGTHS: [u64; 5] = [51, 105, 168, 1024, 4096];
const HEAD_DIM: u32 = 64;
/// Number of timed batches of launches.
const BATCHES: usize = 7;

fn main() -> Result<(), Box<dyn Error>> {
    // ESM-2 3B with its rotary embedding and without it, and DNABERT-S.
    let forms = [(40, Bias::None, true), (40, Bias::None, false), (12, Bias::Alibi, false)];
    for length in LENGTHS {
        for (heads, bias, rotary) in forms {
            let case = Case::new(length, heads, bias, rotary);
            let microseconds = 1e6 * case.measure(CudaDevice::new(0)?)?;
            let operations = 4 * case.counts.tokens * length * u64::from(heads * HEAD_DIM);
            let layout = match (rotary, bias) {
                (true, _) => "packed QKV, with rotary embedding",
                (false, Bias::Alibi) => "packed QKV, with ALiBi",
                (false, Bias::None) => "packed QKV",
            };
            println!(
                "{{\"side\": \"plimsoll\", \"layout\": \"{layout}\", \"length\": {length}, \"sequences\": {}, \"heads\": {heads}, \
                 \"dim\": {HEAD_DIM}, \"microseconds\": {microseconds:.1}, \"tflops\": {:.1}}}",
                case.counts.sequences,
                operations as f64 / microseconds / 1e6
            );
        }
    }
    Ok(())
}

struct Case {
    op: Op,
    ins: Vec<Operand>,
    out: Operand,
    counts: Counts,
    length: u64,
    end: u64,
}

impl Case {
    fn new(length: u64, heads: u32, bias: Bias, rotary: bool) -> Self {
        let sequences = TOKENS / length;
        let counts = Counts { tokens: sequences * length, sequences, packs: 1 };
        let attention = Attention {
            heads,
            kv_heads: heads,
            head_dim: HEAD_DIM,
            scale: 0.125,
            mask: Mask::Full,
            bias,
            rotary,
            qkv: Qkv::Fused,
        };
        let (t, width) = (Dim::Tokens(1), attention.width());
        let table = (vec![Dim::Fixed(length), Dim::Fixed(u64::from(HEAD_DIM) / 2)], DType::F32);
        let mut shapes = vec![(vec![t, Dim::Fixed(3 * width)], DType::Bf16)];
        shapes.push((vec![Dim::Sequences(1), Dim::Fixed(2)], DType::I32));
        shapes.extend([table.clone(), table].into_iter().filter(|_| rotary));
        shapes.push((vec![t, Dim::Fixed(width)], DType::Bf16));
        let (mut ins, end) = timing::place(shapes, counts);
        let out = ins.pop().expect("the output");
        Self { op: Op::Attention(attention), ins, out, counts, length, end }
    }

    /// Seconds per launch, of the median batch.
    fn measure(&self, mut device: CudaDevice) -> Result<f64, DeviceError> {
        // The log-sum-exp output is not requested, as in inference.
        let (op, ins, outs, counts) = (&self.op, &self.ins[..], [Some(self.out.clone()), None], self.counts);
        let launch =
            Launch { op, kernel: KernelId::Cuda(CudaKernel::Flash), ins, outs: &outs, workspace: None, counts };
        device.allocate(&Allocation::arena(Bytes(self.end)))?;
        device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
        self.fill(&mut device)?;
        timing::seconds(&mut device, &launch, BATCHES)
    }

    /// Uploads noise for q, k and v, the spans of the sequences, and the rotary tables.
    fn fill(&self, device: &mut CudaDevice) -> Result<(), DeviceError> {
        let qkv = self.ins[0].bytes(self.counts).0 as usize;
        // Numbers in [-1, 1), truncated to 16 bits.
        let noise = timing::noise().map(|bits| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0);
        let block: Vec<u8> =
            noise.take(1 << 20).flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
        for at in (0..qkv).step_by(block.len()) {
            device
                .upload(Location::in_arena(self.ins[0].at + at as u64), &block[..block.len().min(qkv - at)])?;
        }
        let rows = (0..self.counts.sequences).flat_map(|s| [s * self.length, (s + 1) * self.length]);
        let spans: Vec<u8> = rows.flat_map(|row| (row as i32).to_le_bytes()).collect();
        device.upload(Location::in_arena(self.ins[1].at), &spans)?;
        for table in &self.ins[2..] {
            let elements = table.bytes(self.counts).0 / 4;
            let values: Vec<u8> = (0..elements).flat_map(|i| ((i as f32).cos()).to_le_bytes()).collect();
            device.upload(Location::in_arena(table.at), &values)?;
        }
        Ok(())
    }
}
