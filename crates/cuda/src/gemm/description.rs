//! cuBLASLt descriptors of a matmul. Invariant: descriptors are created once; a launch only sets the number of rows
//! and the addresses of bias and scales in them, which allocates nothing.
//!
//! The library is column-major, so it sees a row-major matrix as the transpose: `y = x W^T` becomes `y^T (N, R) = W
//! (N, K) x^T (K, R)`, where W is stored as (K, N) and hence passed as transposed. Quantized operands have a scale for
//! each row of W and each column of x^T: "outer vectors" (cublasLt.h), by which its Hopper kernels multiply the sums.

use super::{GemmForm, GemmOperands};
use crate::CudaError;
use crate::api::CublasLt;
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use plimsoll_graph::DType;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

/// A cuBLASLt handle.
pub(super) struct Handle {
    pub(super) api: &'static CublasLt,
    pub(super) raw: lt::cublasLtHandle_t,
}

// SAFETY: calls do not change the state of the library's handle, which may be used from any number of threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Creates a handle for the current context.
    pub(super) fn new(api: &'static CublasLt) -> Result<Self, CudaError> {
        let mut handle = Self { api, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        let code = unsafe { (api.cublasLtCreate)(&mut handle.raw) };
        handle.check("cublasLtCreate", code).map(|()| handle)
    }

    /// The library's version, with major, minor and patch in one number.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the function has no preconditions.
        unsafe { (self.api.cublasLtGetVersion)() }
    }

    /// Returns an error with a description unless `code` is zero.
    pub(super) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        // Integers rather than an enum, since newer libraries may have further codes.
        let message = match code {
            0 => return Ok(()),
            1 => "not initialised",
            3 => "out of memory",
            7 => "an invalid value",
            8 => "the wrong architecture",
            11 => "a failed mapping",
            13 => "a failed execution",
            14 => "an internal error",
            15 => "not supported",
            16 => "a missing licence",
            _ => "a code that the headers do not have",
        };
        Err(CudaError::Call { function, code, message: message.to_owned() })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the handle is owned; a failure is ignored.
            unsafe { (self.api.cublasLtDestroy)(self.raw) };
        }
    }
}

/// Largest K of quantized operands for which the tensor cores may accumulate on their own, with about 14 bits, instead
/// of adding every few terms in f32 (`FAST_ACCUM`). On noise the error at K = 2560 (1.0e-3, relative L2) is below that
/// of rounding to bf16 (1.7e-3), at 10 240 above it (2.4e-3); with terms of one sign the errors are 4 and 16 %. Fast
/// accumulation saves a sixth of the time at 2560, and next to nothing at 10 240 (H200, cuBLASLt 13.1).
const FAST_TERMS: u64 = 4096;

/// `CUBLAS_OP_T` of cublas_api.h.
pub(super) const TRANSPOSED: i32 = 1;

/// A column-major matrix as stored: (element type, rows, columns); rows are also its leading dimension.
pub(super) type StoredMatrix = (DType, u64, u64);

/// cuBLASLt descriptors of a matmul `d = a b + beta c`: the operation, and the layouts of a, of b, and of c and d, which
/// have one. Descriptors not created yet are null.
pub(super) struct Descriptors {
    pub(super) handle: Arc<Handle>,
    pub(super) operation: lt::cublasLtMatmulDesc_t,
    pub(super) layouts: [lt::cublasLtMatrixLayout_t; 3],
}

// SAFETY: the descriptors are host memory owned by `self`, and are changed only by the thread that has `self`.
unsafe impl Send for Descriptors {}

impl Descriptors {
    /// Creates descriptors of untransposed matrices a, b and d with f32 sums. 16-bit operands are summed in f32. Rounding
    /// f32 to TF32 is a compute type of its own, so f32 is never rounded silently.
    pub(super) fn new(handle: Arc<Handle>, tf32: bool, matrices: [StoredMatrix; 3]) -> Result<Self, CudaError> {
        let api = handle.api;
        let mut made = Self { handle, operation: ptr::null_mut(), layouts: [ptr::null_mut(); 3] };
        let compute = if tf32 {
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F
        };
        let scale = lt::cudaDataType_t::CUDA_R_32F;
        // SAFETY: all pointers are to fields of a local, whose drop destroys what was created before a failure.
        unsafe {
            let code = (api.cublasLtMatmulDescCreate)(&mut made.operation, compute, scale);
            made.handle.check("cublasLtMatmulDescCreate", code)?;
            for (layout, (dtype, rows, columns)) in made.layouts.iter_mut().zip(matrices) {
                let code = (api.cublasLtMatrixLayoutCreate)(layout, element(dtype), rows, columns, rows as i64);
                made.handle.check("cublasLtMatrixLayoutCreate", code)?;
            }
        }
        Ok(made)
    }

    /// Sets an attribute of the operation.
    pub(super) fn set<T: Copy>(
        &self,
        attribute: lt::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        let size = size_of::<T>();
        let value = ptr::from_ref(value).cast();
        // SAFETY: the value has the size passed; the library rejects a size that is not the attribute's.
        let code =
            unsafe { (self.handle.api.cublasLtMatmulDescSetAttribute)(self.operation, attribute, value, size) };
        self.handle.check("cublasLtMatmulDescSetAttribute", code)
    }

    /// Sets the number of columns of the stored matrices of these indices in `layouts`.
    pub(super) fn set_columns(&self, of: [usize; 2], columns: u64) -> Result<(), CudaError> {
        let attribute = lt::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
        let api = self.handle.api;
        let value = ptr::from_ref(&columns).cast();
        for layout in of.map(|i| self.layouts[i]) {
            // SAFETY: the attribute is a u64, and `columns` outlives the call.
            let code =
                unsafe { (api.cublasLtMatrixLayoutSetAttribute)(layout, attribute, value, size_of::<u64>()) };
            self.handle.check("cublasLtMatrixLayoutSetAttribute", code)?;
        }
        Ok(())
    }

    /// Enqueues `d = a b + beta c` in the stream; [a, b, c, d] are device addresses, and c may be d. c is not read if
    /// beta is zero.
    pub(super) fn enqueue(
        &self,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        [a, b, c, d]: [u64; 4],
        beta: f32,
        (scratch, bytes): (u64, u64),
        stream: cu::CUstream,
    ) -> Result<(), CudaError> {
        let [of_a, of_b, of_d] = self.layouts;
        let alpha = 1.0f32;
        // SAFETY: the addresses are device memory of the sizes in the layouts; everything else is owned and outlives
        // the call.
        let code = unsafe {
            (self.handle.api.cublasLtMatmul)(
                self.handle.raw,
                self.operation,
                ptr::from_ref(&alpha).cast(),
                device_pointer(a),
                of_a,
                device_pointer(b),
                of_b,
                ptr::from_ref(&beta).cast(),
                device_pointer(c),
                of_d,
                device_pointer(d).cast_mut(),
                of_d,
                algorithm,
                device_pointer(scratch).cast_mut(),
                bytes as usize,
                stream,
            )
        };
        self.handle.check("cublasLtMatmul", code)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let api = self.handle.api;
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: the layout is owned; a failure is ignored.
            unsafe { (api.cublasLtMatrixLayoutDestroy)(layout) };
        }
        if !self.operation.is_null() {
            // SAFETY: as above.
            unsafe { (api.cublasLtMatmulDescDestroy)(self.operation) };
        }
    }
}

/// Descriptors of the matmul of a form: a is W, b is x, and d is y; c is the residual.
pub(super) struct Description {
    pub(super) descriptors: Descriptors,
    form: GemmForm,
}

impl Description {
    /// Creates descriptors for one row, without addresses of bias and scales.
    pub(super) fn new(handle: Arc<Handle>, form: GemmForm) -> Result<Self, CudaError> {
        use lt::cublasLtEpilogue_t as E;
        use lt::cublasLtMatmulDescAttributes_t as A;
        let GemmForm { n, k, bias, dtype, tf32, by_k, .. } = form;
        // The library sees a row-major w (N, K) as (K, N), which it transposes, and one that is stored by k as (N, K).
        let w = if by_k { (dtype, n, k) } else { (dtype, k, n) };
        let descriptors = Descriptors::new(handle, tf32, [w, (dtype, k, 1), (form.output_dtype(), n, 1)])?;
        if !by_k {
            descriptors.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        }
        let epilogue = if bias { E::CUBLASLT_EPILOGUE_BIAS } else { E::CUBLASLT_EPILOGUE_DEFAULT };
        descriptors.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if form.scaled() {
            let outer = lt::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as u32;
            descriptors.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &outer)?;
            descriptors.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &outer)?;
            descriptors.set(A::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(k <= FAST_TERMS))?;
        }
        Ok(Self { descriptors, form })
    }

    /// Sets the number of rows and the addresses that differ between launches. The bias has the element type of y,
    /// which is the library's default.
    pub(super) fn set_launch(&self, operands: &GemmOperands) -> Result<(), CudaError> {
        use lt::cublasLtMatmulDescAttributes_t as A;
        let &GemmOperands { scales, bias, rows, .. } = operands;
        self.descriptors.set_columns([1, 2], rows)?;
        if self.form.scaled() {
            self.descriptors.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales.1)?;
            self.descriptors.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales.0)?;
        }
        if self.form.bias {
            self.descriptors.set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(())
    }

    /// Enqueues the matmul in the stream.
    pub(super) fn run(
        &self,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        operands: &GemmOperands,
        stream: cu::CUstream,
    ) -> Result<(), CudaError> {
        let &GemmOperands { x, w, residual, y, workspace, .. } = operands;
        self.set_launch(operands)?;
        let (beta, c) = if self.form.residual() { (1.0, residual) } else { (0.0, y) };
        self.descriptors.enqueue(algorithm, [w, x, c, y], beta, workspace, stream)
    }
}

/// A device address as the library takes it.
fn device_pointer(address: u64) -> *const c_void {
    address as *const c_void
}

/// Returns cuBLASLt's constant for an element type; only floating-point types are passed to it.
fn element(dtype: DType) -> lt::cudaDataType_t {
    match dtype {
        DType::F32 => lt::cudaDataType_t::CUDA_R_32F,
        DType::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => lt::cudaDataType_t::CUDA_R_16F,
        DType::F8 => lt::cudaDataType_t::CUDA_R_8F_E4M3,
        DType::I8 => lt::cudaDataType_t::CUDA_R_8I,
        DType::I32 => lt::cudaDataType_t::CUDA_R_32I,
        DType::U8 => lt::cudaDataType_t::CUDA_R_8U,
    }
}
