//! A product as cuBLASLt is told of it. Invariant: its descriptors are made once; a launch changes only the number of
//! rows and the addresses of bias and scales in them, which allocates nothing.
//!
//! The library counts by columns, so a row-major matrix is its transpose there: `y = x W^T` becomes
//! `y^T (N, R) = W (N, K) x^T (K, R)`, where W is stored as (K, N) and hence transposed. Codes have a scale for each row of
//! W and each column of x^T: "outer vectors" (cublasLt.h), which its kernels for Hopper multiply the sums by.

use super::{Form, Operands};
use crate::CudaError;
use crate::api::CublasLt;
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use graph::DType;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

/// The library in use.
pub(super) struct Handle {
    pub(super) api: &'static CublasLt,
    pub(super) raw: lt::cublasLtHandle_t,
}

// SAFETY: the library's handle has no state that calls change, and may be used from any number of threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// For the context that is current.
    pub(super) fn new(api: &'static CublasLt) -> Result<Self, CudaError> {
        let mut handle = Self { api, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        let code = unsafe { (api.cublasLtCreate)(&mut handle.raw) };
        handle.check("cublasLtCreate", code).map(|()| handle)
    }

    /// Major, minor and patch in one number.
    pub(super) fn version(&self) -> usize {
        // SAFETY: it has no preconditions.
        unsafe { (self.api.cublasLtGetVersion)() }
    }

    /// An error unless the code is zero.
    pub(super) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        // Newer libraries may have codes of their own, so these are no enum.
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
            // SAFETY: it is ours; a failure changes nothing here.
            unsafe { (self.api.cublasLtDestroy)(self.raw) };
        }
    }
}

/// The longest sums of codes that the tensor cores may keep themselves, in 14 bits or so, instead of handing every few
/// terms to f32. On noise their error at k = 2560 (1.0e-3, relative L2) is below that of rounding to bf16 (1.7e-3), at
/// 10 240 above it (2.4e-3); terms of one sign lose 4 and 16 %. It saves a sixth of the time at 2560, and next to none at
/// 10 240 (H200, cuBLASLt 13.1).
const FAST_TERMS: u64 = 4096;

/// `CUBLAS_OP_T` of cublas_api.h.
const TRANSPOSED: i32 = 1;

/// Descriptors of one product; null ones were never made.
pub(super) struct Description {
    pub(super) handle: Arc<Handle>,
    form: Form,
    pub(super) operation: lt::cublasLtMatmulDesc_t,
    pub(super) w: lt::cublasLtMatrixLayout_t,
    pub(super) x: lt::cublasLtMatrixLayout_t,
    /// Of y and of the residual.
    pub(super) y: lt::cublasLtMatrixLayout_t,
}

// SAFETY: the descriptors are host memory that is owned here, and are changed through this owner's thread only.
unsafe impl Send for Description {}

impl Description {
    /// With one row, and no address of the bias yet.
    pub(super) fn new(handle: Arc<Handle>, form: Form) -> Result<Self, CudaError> {
        use lt::cublasLtEpilogue_t as E;
        use lt::cublasLtMatmulDescAttributes_t as A;
        let (Form { n, k, bias, .. }, api) = (form, handle.api);
        let (given, out) = (element(form.dtype), element(form.out()));
        let (operation, w, x, y) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut made = Self { handle, form, operation, w, x, y };
        // Operands of 16 bits are summed in f32, and those of f32 are cut to TF32 only by name: a compute type of its own.
        let compute = match form.tf32 {
            true => lt::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = lt::cudaDataType_t::CUDA_R_32F;
        // SAFETY: pointers are to fields of a local; what was made before a failure is undone by its drop.
        unsafe {
            let code = (api.cublasLtMatmulDescCreate)(&mut made.operation, compute, scale);
            made.handle.check("cublasLtMatmulDescCreate", code)?;
            for (layout, element, rows, columns) in
                [(&mut made.w, given, k, n), (&mut made.x, given, k, 1), (&mut made.y, out, n, 1)]
            {
                let code = (api.cublasLtMatrixLayoutCreate)(layout, element, rows, columns, rows as i64);
                made.handle.check("cublasLtMatrixLayoutCreate", code)?;
            }
        }
        made.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        let epilogue = if bias { E::CUBLASLT_EPILOGUE_BIAS } else { E::CUBLASLT_EPILOGUE_DEFAULT };
        made.set(A::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if form.scaled() {
            let outer = lt::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as u32;
            made.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &outer)?;
            made.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &outer)?;
            made.set(A::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(k <= FAST_TERMS))?;
        }
        Ok(made)
    }

    fn set<T: Copy>(&self, attribute: lt::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        let (value, size) = (ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the value is as large as is said; the library refuses a size that is not the attribute's.
        let code =
            unsafe { (self.handle.api.cublasLtMatmulDescSetAttribute)(self.operation, attribute, value, size) };
        self.handle.check("cublasLtMatmulDescSetAttribute", code)
    }

    /// What differs between launches. The bias has the type of y, which is what the library takes it for.
    pub(super) fn set_launch(&self, operands: &Operands) -> Result<(), CudaError> {
        use lt::cublasLtMatmulDescAttributes_t as A;
        let &Operands { scales, bias, rows, .. } = operands;
        let columns = lt::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
        let (api, value) = (self.handle.api, ptr::from_ref(&rows).cast());
        for layout in [self.x, self.y] {
            // SAFETY: the attribute is a u64, and `rows` outlives the call.
            let code =
                unsafe { (api.cublasLtMatrixLayoutSetAttribute)(layout, columns, value, size_of::<u64>()) };
            self.handle.check("cublasLtMatrixLayoutSetAttribute", code)?;
        }
        if self.form.scaled() {
            self.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales.1)?;
            self.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales.0)?;
        }
        match self.form.bias {
            true => self.set(A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias),
            false => Ok(()),
        }
    }

    /// Puts the product into the stream.
    pub(super) fn run(
        &self,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        operands: &Operands,
        stream: cu::CUstream,
    ) -> Result<(), CudaError> {
        let &Operands { x, w, residual, y, workspace: (scratch, bytes), .. } = operands;
        self.set_launch(operands)?;
        // y = 1 * W x + beta * c: c may be y itself, and is not read where beta is zero.
        let (one, beta, c) = if self.form.residual() { (1f32, 1f32, residual) } else { (1.0, 0.0, y) };
        let card = |address: u64| address as *const c_void;
        let host = |number: &f32| ptr::from_ref(number).cast::<c_void>();
        // SAFETY: addresses are the card's, of the sizes that the layouts say; the rest is ours and outlives the call.
        let code = unsafe {
            (self.handle.api.cublasLtMatmul)(
                self.handle.raw,
                self.operation,
                host(&one),
                card(w),
                self.w,
                card(x),
                self.x,
                host(&beta),
                card(c),
                self.y,
                card(y).cast_mut(),
                self.y,
                algorithm,
                card(scratch).cast_mut(),
                bytes as usize,
                stream,
            )
        };
        self.handle.check("cublasLtMatmul", code)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        let api = self.handle.api;
        for layout in [self.w, self.x, self.y].into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: it is ours; a failure changes nothing here.
            unsafe { (api.cublasLtMatrixLayoutDestroy)(layout) };
        }
        if !self.operation.is_null() {
            // SAFETY: as above.
            unsafe { (api.cublasLtMatmulDescDestroy)(self.operation) };
        }
    }
}

/// The library's name of an element type; [`super::Form::of`] lets only floats through.
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
