//! Measures microseconds and TFLOP/s of the input and weight gradients of the linear layers of ESM-2 650M and 3B, and
//! of the loss of its output projection, in bf16, on the first CUDA device.
//! `cargo run --release -p plimsoll-cuda --example gemm_grad [ROWS]...`; by default 16 384 and 65 536 rows.

mod timing;

use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Allocation, Device, Launch, Operand};
use plimsoll_graph::ops::{
    LinearCrossEntropy, LinearCrossEntropyGrad, LinearInputGrad, LinearWeightGrad, OperandFormat,
};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op};
use plimsoll_plan::{
    CudaKernel, KernelId, Location, LossSizes, WORKSPACE_ALIGN, input_grad_parts, weight_grad_parts,
};
use std::error::Error;

/// Number of timed batches of launches.
const BATCHES: usize = 7;
/// Columns of the hidden states of ESM-2 650M and 3B.
const WIDTHS: [u64; 2] = [1280, 2560];
/// Classes of ESM-2's output projection.
const CLASSES: u64 = 33;
/// Rows whose logits are computed at a time.
const CHUNK: u32 = 16_384;

fn main() -> Result<(), Box<dyn Error>> {
    let asked: Vec<u64> = std::env::args().skip(1).map(|rows| rows.parse()).collect::<Result<_, _>>()?;
    for rows in if asked.is_empty() { vec![16_384, 65_536] } else { asked } {
        for width in WIDTHS {
            // QKV, the attention's output, and the two layers of the MLP.
            for (k, n) in [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] {
                for bench in [input_grad(rows, n, k), weight_grad(rows, n, k, true)] {
                    bench.measure(rows, n, k)?;
                }
            }
            loss_grad(rows, width).measure(rows, CLASSES, width)?;
        }
    }
    Ok(())
}

/// A launch to be timed.
struct GradBench {
    op: Op,
    kernel: CudaKernel,
    /// Shapes of the inputs, then of the outputs.
    shapes: Vec<(Vec<Dim>, DType)>,
    outputs: usize,
    workspace: Bytes,
    operations: u64,
}

const T: Dim = Dim::Tokens(1);

fn input_grad(rows: u64, n: u64, k: u64) -> GradBench {
    let [n_, k_] = [n, k].map(Dim::Fixed);
    GradBench {
        op: Op::LinearInputGrad(LinearInputGrad { operands: OperandFormat::Stored }),
        kernel: CudaKernel::GemmInputGrad,
        shapes: [vec![T, n_], vec![n_, k_], vec![T, k_]].map(|shape| (shape, DType::Bf16)).to_vec(),
        outputs: 1,
        workspace: total(&input_grad_parts(n, k, DType::Bf16)),
        operations: 2 * rows * n * k,
    }
}

fn weight_grad(rows: u64, n: u64, k: u64, bias: bool) -> GradBench {
    let [n_, k_] = [n, k].map(Dim::Fixed);
    let shapes = [vec![T, n_], vec![T, k_], vec![n_, k_], vec![n_]];
    GradBench {
        op: Op::LinearWeightGrad(LinearWeightGrad { bias, operands: OperandFormat::Stored }),
        kernel: CudaKernel::GemmWeightGrad,
        shapes: shapes.map(|shape| (shape, DType::Bf16)).to_vec(),
        outputs: 2,
        workspace: total(&weight_grad_parts(rows, n, k, DType::Bf16, OperandFormat::Stored)),
        operations: 2 * rows * n * k,
    }
}

fn loss_grad(rows: u64, k: u64) -> GradBench {
    let forward = LinearCrossEntropy { bias: true, chunk: CHUNK, z_loss: 0.0 };
    let (v, k_, half) = (Dim::Fixed(CLASSES), Dim::Fixed(k), DType::Bf16);
    let ins = [
        (vec![Dim::Fixed(1)], DType::F32),
        (vec![T, k_], half),
        (vec![v, k_], half),
        (vec![v], half),
        (vec![T], DType::I32),
        (vec![T], DType::F32),
    ];
    let outs = [(vec![T, k_], half), (vec![v, k_], half), (vec![v], half)];
    let sizes = LossSizes { rows, k, classes: CLASSES, chunk: u64::from(CHUNK), dtype: half };
    GradBench {
        op: Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward }),
        kernel: CudaKernel::LinearCrossEntropyGrad,
        shapes: [&ins[..], &outs].concat(),
        outputs: outs.len(),
        workspace: total(&sizes.grad_parts()),
        operations: 6 * rows * CLASSES * k,
    }
}

/// Bytes of a workspace with these parts.
fn total(parts: &[Bytes]) -> Bytes {
    parts.iter().map(|part| part.align_up(WORKSPACE_ALIGN)).sum()
}

impl GradBench {
    /// Times the launch on noise, and prints a line.
    fn measure(self, rows: u64, n: u64, k: u64) -> Result<(), Box<dyn Error>> {
        let Self { op, kernel, shapes, outputs, workspace, operations } = self;
        let counts = Counts { tokens: rows, sequences: 1, packs: 1 };
        let (mut ins, end) = timing::place(shapes, counts);
        let outs: Vec<Option<Operand>> = ins.split_off(ins.len() - outputs).into_iter().map(Some).collect();
        let scratch = Some((end, workspace));
        let kernel = KernelId::Cuda(kernel);
        let launch = Launch { op: &op, kernel, ins: &ins, outs: &outs, workspace: scratch, counts };
        let mut device = CudaDevice::new(0)?;
        device.allocate(&Allocation::arena(Bytes(end) + workspace))?;
        device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
        // Noise: a GPU that multiplies zeros draws less power and runs faster.
        let mut noise = timing::noise();
        for operand in &ins {
            let elements = operand.spec.elements_at(counts) as usize;
            let bytes: Vec<u8> = match operand.spec.dtype {
                // Numbers of magnitude 1 to 2, of either sign.
                DType::Bf16 => noise
                    .by_ref()
                    .take(elements)
                    .flat_map(|x| ((x as u16 & 0x807f) | 0x3f80).to_le_bytes())
                    .collect(),
                DType::I32 => {
                    noise.by_ref().take(elements).flat_map(|x| (x % CLASSES as u32).to_le_bytes()).collect()
                }
                DType::F32 | DType::F16 | DType::F8 | DType::I8 | DType::U8 => {
                    std::iter::repeat_n(3f32.to_le_bytes(), elements).flatten().collect()
                }
            };
            device.upload(Location::in_arena(operand.at), &bytes)?;
        }
        let microseconds = 1e6 * timing::seconds(&mut device, &launch, BATCHES)?;
        println!(
            "{{\"op\": \"{}\", \"rows\": {rows}, \"n\": {n}, \"k\": {k}, \"microseconds\": {microseconds:.1}, \"tflops\": {:.1}}}",
            op.name(),
            operations as f64 / microseconds / 1e6
        );
        Ok(())
    }
}
