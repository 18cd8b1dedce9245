//! TFLOP/s of linears on the first card, with all that stands behind the product: the algorithm that cuBLASLt's heuristic
//! puts first, its fastest, our own kernel in each of its forms, and what timing chooses among all. `cargo run --release -p plimsoll-cuda --example gemm`

mod timing;

use exec::{Device, DeviceError, Launch, Operand};
use graph::ops::{Epilogue, Linear};
use graph::{Bytes, Counts, DType, Dim, Op};
use plimsoll_cuda::CudaDevice;
use std::error::Error;
use std::time::Instant;

/// (K, N) of ESM-2 3B and 650M.
const SHAPES: [(u64, u64); 7] =
    [(2560, 7680), (2560, 2560), (2560, 10240), (10240, 2560), (1280, 3840), (1280, 5120), (5120, 1280)];
/// Batches of launches that are timed.
const BATCHES: usize = 5;
const WORKSPACE: u64 = 32 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let own = CudaDevice::own_products();
    let heads: String = own.iter().map(|name| format!("{name:>15}")).collect();
    println!("dtype      rows      K ->      N   epilogue    first cuBLASLt{heads}   chosen  prepared in");
    for (dtype, rows) in
        [(DType::Bf16, 16_384), (DType::Bf16, 65_536), (DType::F16, 16_384), (DType::F32, 16_384)]
    {
        for (k, n) in SHAPES {
            // In the models, what gives the width of the stream is added to it, and what widens it passes a GELU.
            let epilogue = match n / k {
                0 | 1 => Epilogue::Residual,
                4 => Epilogue::Gelu,
                _ => Epilogue::None,
            };
            let product = Product::new(rows, k, n, dtype, Linear::new(true, epilogue));
            let (first, _, _) = product.measure(CudaDevice::without_timing(0)?)?;
            let (library, _, _) = product.measure(CudaDevice::with_product(0, "cuBLASLt")?)?;
            let mut line = String::new();
            for name in &own {
                let (rate, _, choice) = product.measure(CudaDevice::with_product(0, name)?)?;
                line += &if choice.contains(name) { format!("{rate:15.1}") } else { format!("{:>15}", "-") };
            }
            let (best, seconds, choice) = product.measure(CudaDevice::new(0)?)?;
            println!(
                "{:5} {rows:9} {k:6} -> {n:6} {epilogue:?}{:>w$} {first:8.1} {library:8.1}{line} {best:8.1} {seconds:8.2} s   {choice}",
                dtype.name(),
                "",
                w = 9 - format!("{epilogue:?}").len(),
            );
        }
    }
    Ok(())
}

struct Product {
    op: Op,
    ins: Vec<Operand>,
    out: Operand,
    workspace: (u64, Bytes),
    counts: Counts,
    operations: f64,
}

impl Product {
    fn new(rows: u64, k: u64, n: u64, dtype: DType, linear: Linear) -> Self {
        let counts = Counts { tokens: rows, sequences: 1 };
        let (t, n_, k_) = (Dim::Tokens(1), Dim::Fixed(n), Dim::Fixed(k));
        let mut shapes = vec![vec![t, k_], vec![n_, k_], vec![n_], vec![t, n_]];
        if linear.epilogue == Epilogue::Residual {
            shapes.push(vec![t, n_]);
        }
        let shapes = shapes.into_iter().map(|shape| (shape, dtype)).collect();
        let (mut ins, end) = timing::place(shapes, counts);
        let out = ins.pop().expect("the output");
        let (workspace, operations) = ((end, Bytes(WORKSPACE)), 2.0 * (rows * k * n) as f64);
        Self { op: Op::Linear(linear), ins, out, workspace, counts, operations }
    }

    /// TFLOP/s by the median batch, seconds of preparing, and what was chosen.
    fn measure(&self, mut device: CudaDevice) -> Result<(f64, f64, String), DeviceError> {
        let outs = [Some(self.out.clone())];
        let (op, ins, workspace, counts) = (&self.op, &self.ins[..], Some(self.workspace), self.counts);
        let launch = Launch { op, ins, outs: &outs, workspace, counts };
        device.alloc_arena(Bytes(self.workspace.0 + WORKSPACE))?;
        let start = Instant::now();
        device.prepare(&launch)?;
        let prepared = start.elapsed().as_secs_f64();
        self.fill(&mut device)?;
        let seconds = timing::seconds(&mut device, &launch, BATCHES)?;
        Ok((self.operations / seconds / 1e12, prepared, device.products().join("; ")))
    }

    /// Noise in all operands: a block from here, doubled on the card.
    fn fill(&self, device: &mut CudaDevice) -> Result<(), DeviceError> {
        let size = self.out.spec.dtype.size() as usize;
        // The bits as sign and fraction of a number in [0.5, 1): whole mantissas, since those with zeros draw less power.
        let numbers = timing::noise().take((1 << 20) / size);
        let numbers = numbers.map(|bits| f32::from_bits(bits & 0x807f_ffff | 0x3f00_0000));
        let block: Vec<u8> = numbers.flat_map(|number| encode(number, self.out.spec.dtype)).collect();
        let (mut filled, end) = (block.len() as u64, self.workspace.0);
        device.upload(0, &block[..end.min(filled) as usize])?;
        while filled < end {
            let more = filled.min(end - filled);
            device.copy(0, filled, Bytes(more))?;
            filled += more;
        }
        Ok(())
    }
}

/// A number that is normal in every type, cut.
fn encode(number: f32, dtype: DType) -> Vec<u8> {
    let bits = number.to_bits();
    match dtype {
        DType::F32 => bits.to_le_bytes().to_vec(),
        DType::Bf16 => ((bits >> 16) as u16).to_le_bytes().to_vec(),
        DType::F16 => {
            // The exponent's bias is 15 instead of 127.
            let magnitude = ((bits >> 23 & 0xff) - 112) << 10 | bits >> 13 & 0x3ff;
            ((bits >> 16 & 0x8000 | magnitude) as u16).to_le_bytes().to_vec()
        }
        DType::F8 | DType::I8 | DType::I32 | DType::U8 => panic!("no product"),
    }
}
