//! Measures microseconds and TFLOP/s of the gradient of attention on the first CUDA device, in bf16, for packed sequences
//! with rotary embedding: of all gradients, of dk and dv alone, and of dq alone. TFLOP/s count the five matmuls of the
//! formula over the pairs that the mask admits. `cargo run --release -p plimsoll-cuda --example attention_grad`

mod timing;

use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Allocation, Device, DeviceError, Launch, Operand};
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Mask, Qkv};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op};
use plimsoll_plan::{CudaKernel, KernelId, Location, cuda_flash_grad_parts};
use std::error::Error;

const TOKENS: u64 = 16_384;
/// Number of timed batches of launches.
const BATCHES: usize = 7;
/// Dense TFLOP/s of an H100 or H200 (SXM) in 16 bits, by its data sheet.
const PEAK: f64 = 989.0;

fn main() -> Result<(), Box<dyn Error>> {
    let proteins: Vec<u64> = lengths(timing::noise().map(|bits| 120 + u64::from(bits % 360)));
    let long = vec![4096; 4];
    // A Llama shape of 1.35 B parameters, ESM-2 650M, and others. (name, (heads, heads of k and v, head dim), mask, lengths)
    let forms = [
        ("llama", (16, 16, 128), Mask::Causal, long.clone()),
        ("esm2", (20, 20, 64), Mask::Full, proteins.clone()),
        ("grouped", (16, 4, 128), Mask::Causal, long.clone()),
        ("window", (16, 16, 128), Mask::Window(1024), long.clone()),
        ("full 128", (16, 16, 128), Mask::Full, long.clone()),
        ("proteins 128", (10, 10, 128), Mask::Full, proteins),
        ("full 64", (20, 20, 64), Mask::Full, long.clone()),
        ("causal 64", (20, 20, 64), Mask::Causal, long),
    ];
    for (name, heads, mask, lengths) in forms {
        let case = Case::new(heads, mask, lengths);
        let [all, keys, queries] = case.measure()?;
        let tflops = case.operations / all / 1e6;
        println!(
            "{{\"form\": \"{name}\", \"microseconds\": {all:.1}, \"dk_dv\": {keys:.1}, \"dq\": {queries:.1}, \
             \"tflops\": {tflops:.1}, \"share_of_h100\": {:.3}}}",
            tflops / PEAK
        );
    }
    Ok(())
}

/// Takes lengths of sequences until they have all tokens.
fn lengths(mut next: impl Iterator<Item = u64>) -> Vec<u64> {
    let (mut left, mut lengths) = (TOKENS, vec![]);
    while left > 0 {
        let length = next.next().unwrap_or(left).min(left);
        lengths.push(length);
        left -= length;
    }
    lengths
}

struct Case {
    op: Attention,
    /// Operands of the gradient: do, q, k, v, spans, cosines, sines, o and lse.
    ins: Vec<Operand>,
    /// dq, dk, dv
    outs: Vec<Operand>,
    counts: Counts,
    lengths: Vec<u64>,
    /// The workspace, behind the operands.
    end: u64,
    workspace: Bytes,
    operations: f64,
}

impl Case {
    fn new((heads, kv_heads, head_dim): (u32, u32, u32), mask: Mask, lengths: Vec<u64>) -> Self {
        let counts = Counts { tokens: TOKENS, sequences: lengths.len() as u64, packs: 1 };
        let (scale, bias, rotary, qkv) = ((head_dim as f32).sqrt().recip(), Bias::None, true, Qkv::Separate);
        let op = Attention { heads, kv_heads, head_dim, scale, mask, bias, rotary, qkv };
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (t, wide, narrow) = (Dim::Tokens(1), Dim::Fixed(op.width()), Dim::Fixed(op.kv_width()));
        let table = (vec![Dim::Fixed(longest), Dim::Fixed(u64::from(head_dim) / 2)], DType::F32);
        let rows = |columns: Dim| (vec![t, columns], DType::Bf16);
        let shapes = vec![
            rows(wide),
            rows(wide),
            rows(narrow),
            rows(narrow),
            (vec![Dim::Sequences(1), Dim::Fixed(2)], DType::I32),
            table.clone(),
            table,
            rows(wide),
            (vec![t, Dim::Fixed(u64::from(heads))], DType::F32),
            rows(wide),
            rows(narrow),
            rows(narrow),
        ];
        let (mut ins, end) = timing::place(shapes, counts);
        let outs = ins.split_off(9);
        let workspace = cuda_flash_grad_parts(&op, TOKENS, DType::Bf16).into_iter().sum();
        let pairs = |length: &u64| match mask {
            Mask::Causal => length * (length + 1) / 2,
            Mask::Window(w) => (1..=*length).map(|keys| keys.min(u64::from(w))).sum(),
            Mask::Full | Mask::BlockSparse { .. } => length * length,
        };
        let operations = 10.0 * (lengths.iter().map(pairs).sum::<u64>() * op.width()) as f64;
        Self { op, ins, outs, counts, lengths, end, workspace, operations }
    }

    /// Microseconds of a launch of all gradients, of dk and dv, and of dq, each after the kernel that prepares the rows.
    fn measure(&self) -> Result<[f64; 3], DeviceError> {
        let mut device = CudaDevice::new(0)?;
        device.allocate(&Allocation::arena(Bytes(self.end) + self.workspace))?;
        self.fill(&mut device)?;
        let [o, lse] = [7, 8].map(|i| Some(self.ins[i].clone()));
        let (forward, of_forward) = (Op::Attention(self.op), [o, lse]);
        let launch = Launch {
            op: &forward,
            kernel: KernelId::Cuda(CudaKernel::Flash),
            ins: &self.ins[1..7],
            outs: &of_forward,
            workspace: None,
            counts: self.counts,
        };
        device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
        device.launch(&launch)?;
        let backward = Op::AttentionGrad(AttentionGrad { forward: self.op });
        let mut times = [0.0; 3];
        for (time, used) in times.iter_mut().zip([[true; 3], [false, true, true], [true, false, false]]) {
            let outs: Vec<_> =
                self.outs.iter().zip(used).map(|(out, used)| used.then(|| out.clone())).collect();
            let launch = Launch {
                op: &backward,
                kernel: KernelId::Cuda(CudaKernel::FlashGrad),
                ins: &self.ins,
                outs: &outs,
                workspace: Some((self.end, self.workspace)),
                counts: self.counts,
            };
            device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
            *time = 1e6 * timing::seconds(&mut device, &launch, BATCHES)?;
        }
        Ok(times)
    }

    /// Uploads noise in [-1, 1) for do, q, k and v, the spans of the sequences, and the rotary tables.
    fn fill(&self, device: &mut CudaDevice) -> Result<(), DeviceError> {
        let mut noise = timing::noise().map(|bits| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0);
        for operand in &self.ins[..4] {
            let elements = operand.spec.elements_at(self.counts) as usize;
            let bytes: Vec<u8> = noise
                .by_ref()
                .take(elements)
                .flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes())
                .collect();
            device.upload(Location::in_arena(operand.at), &bytes)?;
        }
        let mut row = 0;
        let spans = self.lengths.iter().flat_map(|length| {
            row += length;
            [row - length, row]
        });
        let spans: Vec<u8> = spans.flat_map(|row| (row as i32).to_le_bytes()).collect();
        device.upload(Location::in_arena(self.ins[4].at), &spans)?;
        for (table, of) in self.ins[5..7].iter().zip([f32::cos, f32::sin]) {
            let elements = table.bytes(self.counts).0 / 4;
            let values: Vec<u8> = (0..elements).flat_map(|i| of(i as f32).to_le_bytes()).collect();
            device.upload(Location::in_arena(table.at), &values)?;
        }
        Ok(())
    }
}
