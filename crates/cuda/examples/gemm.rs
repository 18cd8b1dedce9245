//! Times every candidate algorithm for the matmuls of models on the first CUDA device, and tests whether it
//! computes the canonical bits. `cargo run --release -p plimsoll-cuda --example gemm [TYPE | WIDTH |
//! rROWS]...` selects element types (bf16, f16, tf32, f32, fp8), model widths and numbers of rows; by default all.
//!
//! Prints a line per matmul: rows, K, N, element type, epilogue; milliseconds of the fastest admitted
//! candidate, of the fastest candidate, and their ratio; then for each candidate its milliseconds, `own` for
//! kernels of the canonical order or else 1 or 0 for each kind of operands (whether it had the canonical bits),
//! `+` if it is admitted, and a digest of its outputs.

// `attention.rs` uses the items that are unused here.
#[expect(dead_code)]
mod timing;

use plimsoll_cuda::CudaDevice;
use plimsoll_cuda::internals::GemmCandidate;
use plimsoll_exec::{Allocation, Device, DeviceError, Launch, Operand};
use plimsoll_graph::ops::{Epilogue, Linear, OperandFormat};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op};
use plimsoll_plan::{CudaKernel, KernelId};
use std::error::Error;

const WORKSPACE: u64 = 32 << 20;
/// Model widths: of small models, including widths that are no multiple of 8, and of published models.
const WIDTHS: [u64; 11] = [33, 64, 72, 96, 100, 320, 480, 640, 768, 1280, 2560];
const ROWS: [u64; 5] = [64, 1000, 4096, 16_384, 65_536];

fn main() -> Result<(), Box<dyn Error>> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let types = [
        ("bf16", DType::Bf16, OperandFormat::Stored),
        ("f16", DType::F16, OperandFormat::Stored),
        ("tf32", DType::F32, OperandFormat::Tf32),
        ("fp8", DType::F8, OperandFormat::E4m3),
        ("f32", DType::F32, OperandFormat::Stored),
    ];
    let mut logs = 0.0;
    let mut matmuls = 0;
    for (name, dtype, operands) in types {
        if !wanted(&asked, name, &types.map(|(name, ..)| name.to_owned())) {
            continue;
        }
        for width in WIDTHS
            .into_iter()
            .filter(|width| wanted(&asked, &width.to_string(), &WIDTHS.map(|width| width.to_string())))
        {
            for rows in ROWS
                .into_iter()
                .filter(|rows| wanted(&asked, &format!("r{rows}"), &ROWS.map(|rows| format!("r{rows}"))))
            {
                // f32 by scalar loops is slow, and larger sizes add no information.
                if name == "f32" && rows * width > 16_384 * 640 {
                    continue;
                }
                for (k, n, bias, epilogue) in [
                    (width, 3 * width, true, Epilogue::None),
                    (width, width, true, Epilogue::Residual),
                    (width, 4 * width, true, Epilogue::Gelu),
                    (4 * width, width, true, Epilogue::Residual),
                    (width, 4 * width, false, Epilogue::Gate),
                    (width, 33, true, Epilogue::None),
                ] {
                    if dtype == DType::F8 && epilogue == Epilogue::Gate {
                        continue;
                    }
                    let linear = Linear { operands, ..Linear::new(bias, epilogue) };
                    let candidates = GemmBench::new(rows, k, n, dtype, linear).survey()?;
                    let of = |admitted: bool| {
                        let all = candidates.iter().filter(|one| !admitted || one.equal != Some(false));
                        all.map(|one| one.milliseconds).fold(f32::INFINITY, f32::min)
                    };
                    let (ours, all) = (of(true), of(false));
                    let each: Vec<String> = candidates.iter().map(tell).collect();
                    logs += f64::from(all / ours).ln();
                    matmuls += 1;
                    println!(
                        "{rows:6} {k:6} {n:6} {name:5} {epilogue:?} {ours:.4} {all:.4} {:.3} {}",
                        all / ours,
                        each.join(" ")
                    );
                }
            }
        }
    }
    println!("geometric mean of the ratios: {:.4}", (logs / f64::from(matmuls)).exp());
    Ok(())
}

/// Whether an element type, width or number of rows is selected: by name, or because none of its kind is named.
fn wanted(asked: &[String], name: &str, kind: &[String]) -> bool {
    asked.iter().any(|asked| asked == name) || !asked.iter().any(|asked| kind.contains(asked))
}

fn tell(one: &GemmCandidate) -> String {
    // cuBLASLt describes algorithms by opaque numbers.
    let name = if one.name.len() > 40 { "lib" } else { one.name.trim_start_matches("wgmma ") };
    match one.equal {
        None => format!("{name}={:.4}=own", one.milliseconds),
        Some(equal) => {
            let modes: String = one.modes.iter().map(|same| if *same { '1' } else { '0' }).collect();
            let bits = one.digest & 0xfff;
            format!("{name}={:.4}={modes}{}({bits:03x})", one.milliseconds, if equal { "+" } else { "" })
        }
    }
}

struct GemmBench {
    op: Op,
    ins: Vec<Operand>,
    out: Operand,
    workspace: (u64, Bytes),
    counts: Counts,
}

impl GemmBench {
    fn new(rows: u64, k: u64, n: u64, dtype: DType, linear: Linear) -> Self {
        let counts = Counts { tokens: rows, sequences: 1, packs: 1 };
        let (t, n_, k_) = (Dim::Tokens(1), Dim::Fixed(n), Dim::Fixed(k));
        let weight_rows = if linear.epilogue == Epilogue::Gate { Dim::Fixed(2 * n) } else { n_ };
        // With quantized x and w, all other operands are bf16.
        let others = if dtype == DType::F8 { DType::Bf16 } else { dtype };
        let mut shapes = vec![(vec![t, k_], dtype), (vec![weight_rows, k_], dtype)];
        shapes.extend(linear.bias.then(|| (vec![weight_rows], others)));
        let residual = linear.epilogue == Epilogue::Residual;
        shapes.extend(residual.then(|| (vec![t, n_], others)));
        shapes.push((vec![t, n_], others));
        let (mut ins, end) = timing::place(shapes, counts);
        let out = ins.pop().expect("the output");
        Self { op: Op::Linear(linear), ins, out, workspace: (end, Bytes(WORKSPACE)), counts }
    }

    /// Times and compares all candidates.
    fn survey(&self) -> Result<Vec<GemmCandidate>, DeviceError> {
        let outs = [Some(self.out.clone())];
        let (op, ins, workspace, counts) = (&self.op, &self.ins[..], Some(self.workspace), self.counts);
        let launch = Launch { op, kernel: kernel_of(ins[0].spec.dtype), ins, outs: &outs, workspace, counts };
        let mut device = CudaDevice::surveying(0)?;
        device.allocate(&Allocation::arena(Bytes(self.workspace.0 + WORKSPACE)))?;
        device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
        Ok(device.candidates().to_vec())
    }
}

/// The kernel of a matmul with operands of this type.
fn kernel_of(dtype: DType) -> KernelId {
    KernelId::Cuda(if dtype == DType::F8 { CudaKernel::GemmFp8 } else { CudaKernel::Gemm })
}
