//! Gradients of linear layers on a CUDA device: input gradients have the bits of the forward matmul with the transposed
//! weight, and f32 is rounded to TF32 only where the op says so.

use crate::matmuls::{decode, encode, found, full, on_hopper, random};
use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Allocation, Device, Launch, Operand};
use plimsoll_graph::ops::{Epilogue, Linear, LinearInputGrad, LinearWeightGrad, OperandFormat};
use plimsoll_graph::{Bytes, DType, Dim, Op, TensorSpec};
use plimsoll_plan::{CudaKernel, KernelId, Location, WORKSPACE_ALIGN, input_grad_parts, weight_grad_parts};

const T: Dim = Dim::Tokens(1);

/// A matmul of two operands, in a device's arena.
struct Product {
    device: CudaDevice,
    op: Op,
    kernel: CudaKernel,
    ins: [Operand; 2],
    out: Operand,
    workspace: (u64, Bytes),
    /// Rows of a full step.
    rows: u64,
}

impl Product {
    /// Creates a prepared product; `shapes` are those of the operands and of the result.
    fn new(
        mut device: CudaDevice,
        (op, kernel, scratch): (Op, CudaKernel, Bytes),
        shapes: [[Dim; 2]; 3],
        dtype: DType,
        rows: u64,
    ) -> Self {
        let mut end = 0;
        let [a, b, out] = shapes.map(|shape| {
            let (at, spec) = (end, TensorSpec::activation(shape, dtype));
            end += spec.bytes_at(full(rows)).align_up(256).0;
            Operand { at, spec }
        });
        device.allocate(&Allocation::arena(Bytes(end + scratch.0))).expect("memory");
        device.fill(Location::in_arena(0), Bytes(end), 0xFF).expect("fill");
        let mut made = Self { device, op, kernel, ins: [a, b], out, workspace: (end, scratch), rows };
        made.issue(rows, true);
        made
    }

    fn issue(&mut self, rows: u64, preparing: bool) {
        let outs = [Some(self.out.clone())];
        let launch = Launch {
            op: &self.op,
            kernel: KernelId::Cuda(self.kernel),
            ins: &self.ins,
            outs: &outs,
            workspace: Some(self.workspace),
            counts: full(rows),
        };
        let result = if preparing {
            self.device.prepare(std::slice::from_ref(&launch), &mut |_| {})
        } else {
            self.device.launch(&launch)
        };
        result.unwrap_or_else(|error| panic!("{}: {error}: {error:?}", self.name()));
    }

    fn name(&self) -> String {
        format!("{:?} {} x {}, {:?}", self.op, self.ins[1].spec, self.ins[0].spec, self.device.matmul_kernels())
    }

    /// Random operands of a full step.
    fn operands(&self) -> [Vec<f64>; 2] {
        [0, 1].map(|i| random(&self.ins[i], i as u64, self.rows))
    }

    /// Runs a step of `rows` rows and returns the bytes of these rows of the result.
    fn run(&mut self, values: &[Vec<f64>; 2], rows: u64) -> Vec<u8> {
        for (operand, values) in self.ins.iter().zip(values) {
            let fed = operand.spec.elements_at(full(rows)) as usize;
            self.device
                .upload(Location::in_arena(operand.at), &encode(&values[..fed], &operand.spec))
                .expect("upload");
        }
        self.issue(rows, false);
        let mut bytes = vec![0; self.out.bytes(full(rows)).0 as usize];
        self.device.download(Location::in_arena(self.out.at), &mut bytes).expect("download");
        bytes
    }
}

/// Bytes of a workspace with these parts.
fn total(parts: &[Bytes]) -> Bytes {
    parts.iter().map(|part| part.align_up(WORKSPACE_ALIGN)).sum()
}

/// dx (R, K) = dy (R, N) w (N, K).
fn input_grad(device: CudaDevice, [rows, n, k]: [u64; 3], dtype: DType, operands: OperandFormat) -> Product {
    let [n_, k_] = [n, k].map(Dim::Fixed);
    let op = Op::LinearInputGrad(LinearInputGrad { operands });
    let scratch = total(&input_grad_parts(n, k, dtype));
    Product::new(device, (op, CudaKernel::GemmInputGrad, scratch), [[T, n_], [n_, k_], [T, k_]], dtype, rows)
}

/// dw (N, K) = dy (R, N)^T x (R, K).
fn weight_grad(device: CudaDevice, [rows, n, k]: [u64; 3], dtype: DType, operands: OperandFormat) -> Product {
    let [n_, k_] = [n, k].map(Dim::Fixed);
    let op = Op::LinearWeightGrad(LinearWeightGrad { bias: false, operands });
    let scratch = total(&weight_grad_parts(rows, n, k, dtype, operands));
    Product::new(device, (op, CudaKernel::GemmWeightGrad, scratch), [[T, n_], [T, k_], [n_, k_]], dtype, rows)
}

/// y (R, K) = x (R, N) w (K, N)^T.
fn forward(device: CudaDevice, [rows, n, k]: [u64; 3], dtype: DType, operands: OperandFormat) -> Product {
    let [n_, k_] = [n, k].map(Dim::Fixed);
    let op = Op::Linear(Linear { operands, ..Linear::new(false, Epilogue::None) });
    let scratch = Bytes(32 << 20);
    Product::new(device, (op, CudaKernel::Gemm, scratch), [[T, n_], [k_, n_], [T, k_]], dtype, rows)
}

/// Returns the transpose of a matrix with `columns` columns.
fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
}

/// Checks that an input gradient has the bits of the forward matmul whose weight is transposed, at several numbers of
/// rows.
fn check_bits(device: CudaDevice, shape @ [rows, n, k]: [u64; 3], dtype: DType, operands: OperandFormat) {
    let mut grad = input_grad(device, shape, dtype, operands);
    let mut plain = forward(CudaDevice::without_timing(0).expect("a card"), shape, dtype, operands);
    let [dy, w] = grad.operands();
    let turned = [dy.clone(), transposed(&w, k as usize)];
    let values = [dy, w];
    assert_eq!(turned[1].len() as u64, n * k);
    for rows in [rows, 1, 33, 131] {
        let (found, wanted) = (grad.run(&values, rows), plain.run(&turned, rows));
        assert!(found == wanted, "{rows} rows: {} has not the bits of {}", grad.name(), plain.name());
    }
}

#[test]
fn input_gradients_have_the_bits_of_the_forward_matmul() {
    if !found() {
        return;
    }
    let stored = OperandFormat::Stored;
    let kinds =
        [(DType::F32, stored), (DType::F32, OperandFormat::Tf32), (DType::Bf16, stored), (DType::F16, stored)];
    for (dtype, operands) in kinds {
        for (n, k) in [(320, 640), (640, 320), (33, 31), (72, 36)] {
            for timed in [false, true] {
                let device = if timed { CudaDevice::new(0) } else { CudaDevice::without_timing(0) };
                check_bits(device.expect("a card"), [1000, n, k], dtype, operands);
            }
        }
    }
}

/// On Hopper the weight is read as it is stored, by every tile, with complete and incomplete tiles, pieces and stages.
#[test]
fn every_tile_on_hopper_reads_a_weight_as_it_is_stored() {
    if !on_hopper() {
        return;
    }
    for name in CudaDevice::hopper_tiles() {
        for dtype in [DType::Bf16, DType::F16] {
            for (n, k) in [(640, 2560), (480, 320), (16, 200), (8, 8), (1288, 1032)] {
                let device = CudaDevice::with_matmul(0, name).expect("a card");
                let chosen =
                    input_grad(device, [1000, n, k], dtype, OperandFormat::Stored).device.matmul_kernels();
                assert!(chosen[0].ends_with(&format!(" by-k: wgmma {name}")), "{chosen:?}");
                check_bits(
                    CudaDevice::with_matmul(0, name).expect("a card"),
                    [1000, n, k],
                    dtype,
                    OperandFormat::Stored,
                );
            }
        }
    }
}

/// Relative L2 distance of 64 elements of a product from their sums in f64. `term` returns the indices of the factors of
/// the i-th term of an element (row, column).
fn distance(mut product: Product, terms: u64, columns: u64, term: impl Fn(u64, u64, u64) -> [u64; 2]) -> f64 {
    let (values, rows) = (product.operands(), product.rows);
    let bytes = product.run(&values, rows);
    assert!(product.run(&values, rows) == bytes, "{}: bits differ", product.name());
    let found = decode(&bytes, &product.out.spec);
    let (mut error, mut norm) = (0.0, 0.0);
    for at in 0..64 {
        let (row, column) = (at % (found.len() as u64 / columns), at % columns);
        let factor = |of: usize, index: u64| values[of][index as usize];
        let sum: f64 = (0..terms).map(|i| term(row, column, i)).map(|[a, b]| factor(0, a) * factor(1, b)).sum();
        error += (found[(row * columns + column) as usize] - sum).powi(2);
        norm += sum * sum;
    }
    let distance = (error / norm).sqrt();
    println!("{}: relative L2 {distance:.2e}", product.name());
    distance
}

#[test]
fn gradients_are_cut_to_tf32_by_name_alone() {
    if !found() {
        return;
    }
    let device = || CudaDevice::without_timing(0).expect("a card");
    // Widths that cuBLASLt sums in TF32, and others; few rows, and many.
    for [rows, n, k] in [[1000, 640, 320], [4100, 64, 320], [1000, 33, 31], [4100, 33, 31]] {
        let of = |operands| {
            let shape = [rows, n, k];
            let dx = distance(input_grad(device(), shape, DType::F32, operands), n, k, |row, column, i| {
                [row * n + i, i * k + column]
            });
            let dw = distance(weight_grad(device(), shape, DType::F32, operands), rows, k, |row, column, i| {
                [i * n + row, i * k + column]
            });
            [dx, dw]
        };
        for (whole, cut) in of(OperandFormat::Stored).into_iter().zip(of(OperandFormat::Tf32)) {
            // The limits of the forward matmul in TF32 (`f32_is_cut_to_tf32_by_name_alone`).
            assert!(whole < 2e-6 && (5e-5..1e-3).contains(&cut), "{whole} and {cut}");
        }
    }
}
