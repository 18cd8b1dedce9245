//! Matmuls of training that have no forward form: products summed over rows, and logits in f32. Invariant: the kernel
//! is a function of the GPU model, the library and the form, never of timing, and, for cuBLASLt, one of two algorithms
//! by the number of rows; so the same operands have the same bits in every run.

use super::description::{Descriptors, Handle, TRANSPOSED};
use super::{Gemm, GemmForm, GemmOperands, MmaTile, algorithms::AlgorithmLimits, loop_matmul, mma};
use crate::CudaError;
use crate::context::Context;
use crate::kernel::{Kernel, KernelLaunch};
use crate::loaded_kernels::LoadedKernels;
use cudarc::cublaslt::sys as lt;
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;
use std::fmt;
use std::sync::Arc;

/// Operation of a matmul of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Product {
    /// d (N, K) = y^T x with y: (R, N) and x: (R, K): a weight's gradient.
    OverRows,
    /// d (R, N) = x y^T with x: (R, K) and y: (N, K): logits.
    Logits,
}

/// A matmul of training by an algorithm of cuBLASLt with x and y of 16 bits, or of f32 rounded to TF32: everything but its
/// number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProductForm {
    pub(crate) product: Product,
    pub(crate) n: u64,
    pub(crate) k: u64,
    /// Element type of x and y.
    pub(crate) dtype: DType,
    /// Whether f32 x and y are rounded to TF32.
    pub(crate) tf32: bool,
    /// Element type of d.
    pub(crate) out: DType,
    /// Largest number of rows for which the library is asked; see [`MANY_ROWS`].
    pub(crate) rows: u64,
}

impl fmt::Display for ProductForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.product {
            Product::OverRows => "over rows",
            Product::Logits => "logits",
        };
        let factors = if self.tf32 { "tf32" } else { self.dtype.name() };
        write!(f, "{} {} {factors} {what}", self.n, self.k)
    }
}

/// Device addresses of a [`Product`], and its number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductOperands {
    pub(crate) x: u64,
    pub(crate) y: u64,
    pub(crate) d: u64,
    pub(crate) rows: u64,
    /// Whether the product is added to d.
    pub(crate) accumulate: bool,
    /// Scratch memory: (address, bytes).
    pub(crate) workspace: (u64, u64),
}

/// Number of rows for which the library is asked for the algorithm of many rows, unless a form never has as many.
pub(crate) const MANY_ROWS: u64 = 16_384;
/// Smallest number of rows that are many. Sums over many rows are split among multiprocessors, which algorithms may not
/// support for few.
const MANY: u64 = 1024;
/// Number of rows for which the library is asked for the algorithm of few rows.
const FEW_ROWS: u64 = 512;
/// Numbers of rows that an algorithm must support, if they are few, or many.
const ROWS: [u64; 20] =
    [1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 1000, 1023, 1024, 1025, 1037, 4095, 4096, 16_384, 65_536, 262_144];
/// Bytes of workspace for which the library is asked.
const WORKSPACE: u64 = 32 << 20;
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE` of cublasLt.h: the parts of a sum that is split along k are written in f32 to
/// the workspace and added in order. The schemes that add in place or in the type of d are excluded.
const IN_WORKSPACE: u32 = 2;
/// Bytes to which the operands are aligned: chunks of rows begin at multiples of 16 bytes.
const ALIGNMENT: u32 = 16;

/// The descriptors of a form, with the pinned algorithm for fewer rows than [`MANY`], and that for others.
pub(super) struct PinnedAlgorithms {
    descriptors: Descriptors,
    few: lt::cublasLtMatmulAlgo_t,
    many: lt::cublasLtMatmulAlgo_t,
}

impl PinnedAlgorithms {
    /// Asks the library for the algorithms of a form.
    fn new(handle: Arc<Handle>, form: &ProductForm) -> Result<Self, CudaError> {
        use lt::cublasLtMatmulDescAttributes_t as A;
        let &ProductForm { product, n, k, dtype, tf32, out, rows } = form;
        // The library sees a row-major matrix (R, C) as (C, R) with leading dimension C.
        let descriptors = match product {
            // d^T (K, N) = x^T (K, R) y (R, N): the first is as stored, the second is stored as (N, R).
            Product::OverRows => {
                let made = Descriptors::new(handle, tf32, [(dtype, k, 1), (dtype, n, 1), (out, k, n)])?;
                made.set(A::CUBLASLT_MATMUL_DESC_TRANSB, &TRANSPOSED)?;
                made
            }
            // d^T (N, R) = y (N, K) x^T (K, R): the first is stored as (K, N), the second is as stored.
            Product::Logits => {
                let made = Descriptors::new(handle, tf32, [(dtype, k, n), (dtype, k, 1), (out, n, 1)])?;
                made.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
                made
            }
        };
        let few = first_algorithm(&descriptors, form, FEW_ROWS, false)?;
        let many = first_algorithm(&descriptors, form, rows.clamp(MANY, MANY_ROWS), true)?;
        Ok(Self { descriptors, few, many })
    }
}

/// Returns the first algorithm that the library proposes for `asked` rows and that supports the form, for numbers of rows
/// that are `many`, or for few.
fn first_algorithm(
    descriptors: &Descriptors,
    form: &ProductForm,
    asked: u64,
    many: bool,
) -> Result<lt::cublasLtMatmulAlgo_t, CudaError> {
    set_rows(descriptors, form.product, asked)?;
    let limits = AlgorithmLimits {
        workspace: WORKSPACE,
        reductions: IN_WORKSPACE,
        implementations: !0,
        alignment: ALIGNMENT,
    };
    let proposed = descriptors.proposed(&limits)?;
    let found = proposed.into_iter().find(|algorithm| supports(descriptors, form.product, algorithm, many));
    found.ok_or_else(|| CudaError::Unprepared {
        what: format!("the matmul {form}: cuBLASLt has no deterministic algorithm for {asked} rows"),
    })
}

/// Sets the number of rows: the columns of the stored x and y, or of x and d.
fn set_rows(descriptors: &Descriptors, product: Product, rows: u64) -> Result<(), CudaError> {
    descriptors.set_columns(if product == Product::OverRows { [0, 1] } else { [1, 2] }, rows)
}

/// Whether an algorithm adds the parts of a sum in a fixed order, and runs for the numbers of rows in [`ROWS`] that are
/// many, or for those that are few.
fn supports(
    descriptors: &Descriptors,
    product: Product,
    algorithm: &lt::cublasLtMatmulAlgo_t,
    many: bool,
) -> bool {
    let scheme = lt::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME;
    let ordered = matches!(descriptors.config(algorithm, scheme), Some(0 | IN_WORKSPACE));
    ordered
        && ROWS.into_iter().filter(|&rows| (rows >= MANY) == many).all(|rows| {
            let set = set_rows(descriptors, product, rows);
            set.is_ok() && descriptors.workspace_of(algorithm).is_some_and(|bytes| bytes <= WORKSPACE)
        })
}

impl Gemm {
    /// Pins the algorithms of a form, unless that was done before.
    pub(crate) fn prepare_product(&mut self, form: ProductForm) -> Result<(), CudaError> {
        if !self.products.contains_key(&form) {
            self.products.insert(form, PinnedAlgorithms::new(Arc::clone(&self.handle), &form)?);
        }
        Ok(())
    }

    /// Runs a matmul of training; it must have rows.
    pub(crate) fn run_product(
        &self,
        context: &Context,
        form: ProductForm,
        operands: &ProductOperands,
    ) -> Result<(), CudaError> {
        let Some(PinnedAlgorithms { descriptors, few, many }) = self.products.get(&form) else {
            return Err(CudaError::Unprepared { what: format!("the matmul {form}") });
        };
        let &ProductOperands { x, y, d, rows, accumulate, workspace } = operands;
        set_rows(descriptors, form.product, rows)?;
        let algorithm = if rows < MANY { few } else { many };
        let [a, b] = if form.product == Product::OverRows { [x, y] } else { [y, x] };
        let beta = if accumulate { 1.0 } else { 0.0 };
        let run = || descriptors.enqueue(algorithm, [a, b, d, d], beta, workspace, context.stream);
        context.trace.kernel(context.stream, || form.to_string(), run)
    }
}

/// A product by our own kernels: y (R, N) = x (R, K) w (N, K)^T in f32, with x and w of one type, f32 or 16-bit. Any widths
/// are supported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnProduct {
    pub(crate) dtype: DType,
    /// Whether f32 operands are rounded to TF32.
    pub(crate) tf32: bool,
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) y: u64,
    pub(crate) rows: u64,
    pub(crate) n: u64,
    pub(crate) k: u64,
    /// Whether the product is added to y.
    pub(crate) accumulate: bool,
}

impl OwnProduct {
    fn form(&self, accumulate: bool) -> GemmForm {
        let epilogue = if accumulate { Epilogue::Residual } else { Epilogue::None };
        GemmForm { tf32: self.tf32, epilogue, ..GemmForm::new(self.n, self.k, self.dtype) }
    }

    fn operands(&self) -> GemmOperands {
        let &Self { x, w, y, rows, accumulate, .. } = self;
        let residual = if accumulate { y } else { 0 };
        GemmOperands {
            x,
            w,
            scales: (0, 0),
            bias: 0,
            residual,
            norm: super::NormParameters::default(),
            y,
            rows,
            workspace: (0, 0),
        }
    }

    /// Whether the product is computed by plain loops; otherwise on tensor cores.
    fn by_loops(&self) -> bool {
        self.dtype == DType::F32 && !self.tf32
    }

    /// The tile on tensor cores. All have the same bits; small ones waste less of narrow matrices.
    fn tile(&self) -> MmaTile {
        let narrow = self.n.min(self.rows) <= 64;
        if narrow { mma::MMA_TILES[1] } else { mma::MMA_TILES[0] }
    }

    /// Compiles the kernels, whatever the rows.
    pub(crate) fn prepare(&self, context: &Context, kernels: &mut LoadedKernels) -> Result<(), CudaError> {
        for accumulate in [false, true] {
            if self.by_loops() {
                let matmul = loop_matmul(self.form(accumulate), &self.operands());
                kernels.prepare(context, &matmul.kernel, 0)?;
            } else {
                for tile in &mma::MMA_TILES[..2] {
                    let kernel = tile.kernel(self.form(accumulate), DType::F32);
                    kernels.prepare(context, &kernel, tile.shared())?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn run(&self, context: &Context, kernels: &LoadedKernels) -> Result<(), CudaError> {
        let form = self.form(self.accumulate);
        let operands = self.operands();
        if self.by_loops() {
            let KernelLaunch { kernel, shape, args } = loop_matmul(form, &operands);
            return kernels.call(context, &kernel, shape, &args);
        }
        self.tile().run(context, kernels, form, DType::F32, &operands)
    }
}

/// Returns a sample of the kernels with f32 results.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for (dtype, k) in [(DType::F32, 40), (DType::Bf16, 40), (DType::F16, 33), (DType::F16, 34)] {
        let tf32 = dtype == DType::F32;
        let product = OwnProduct { dtype, tf32, x: 0, w: 0, y: 0, rows: 1, n: 33, k, accumulate: false };
        for accumulate in [false, true] {
            for tile in &mma::MMA_TILES[..2] {
                kernels.push(tile.kernel(product.form(accumulate), DType::F32));
            }
        }
    }
    kernels
}
