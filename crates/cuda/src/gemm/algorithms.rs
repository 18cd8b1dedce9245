//! cuBLASLt's algorithms for a matmul: those that its heuristic proposes, and the workspace and configuration of one.

use super::description::Descriptors;
use crate::CudaError;
use cudarc::cublaslt::sys as lt;
use std::ffi::{c_float, c_int};
use std::ptr;

/// Maximum number of algorithms requested from the library.
const CANDIDATES: usize = 16;

/// `cublasLtMatmulHeuristicResult_t`, except that `state` is an integer, since the library may return states that the
/// bindings' enum lacks.
#[repr(C)]
#[derive(Clone, Copy)]
struct FoundAlgorithm {
    algorithm: lt::cublasLtMatmulAlgo_t,
    workspace: usize,
    state: c_int,
    waves: c_float,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<FoundAlgorithm>() == size_of::<lt::cublasLtMatmulHeuristicResult_t>());

const NOTHING: FoundAlgorithm = FoundAlgorithm {
    algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspace: 0,
    state: 0,
    waves: 0.0,
    reserved: [0; 4],
};

/// `CUBLAS_STATUS_INVALID_VALUE`, returned for a form without an algorithm.
const INVALID_VALUE: c_int = 7;
/// `CUBLAS_STATUS_NOT_SUPPORTED`, returned for a form without an algorithm.
const NOT_SUPPORTED: c_int = 15;

/// Limits on the algorithms that the heuristic proposes.
pub(super) struct AlgorithmLimits {
    /// Most bytes of workspace.
    pub(super) workspace: u64,
    /// Mask of reduction schemes for sums that are split along k (cublasLt.h: `cublasLtReductionScheme_t`).
    pub(super) reductions: u32,
    /// Mask of numerical implementations (cublasLt.h: `cublasLtNumericalImplFlags_t`).
    pub(super) implementations: u64,
    /// Bytes to which the addresses of all matrices are aligned.
    pub(super) alignment: u32,
}

impl Descriptors {
    /// Returns the algorithms that the heuristic proposes for the layouts as they are, in its order; none for sizes or
    /// strides that the library does not support.
    pub(super) fn proposed(
        &self,
        limits: &AlgorithmLimits,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CudaError> {
        let Self { handle, operation, layouts: [a, b, d] } = self;
        let preference = Preference::new(self, limits)?;
        let mut found = [NOTHING; CANDIDATES];
        let mut count = 0;
        // SAFETY: the descriptors are alive; at most `CANDIDATES` results are written.
        let code = unsafe {
            let to = found.as_mut_ptr().cast();
            let limit = CANDIDATES as c_int;
            let get_heuristic = handle.api.cublasLtMatmulAlgoGetHeuristic;
            get_heuristic(handle.raw, *operation, *a, *b, *d, *d, preference.raw, limit, to, &mut count)
        };
        match handle.check("cublasLtMatmulAlgoGetHeuristic", code) {
            // No algorithm: odd sizes or strides of 16-bit elements.
            Err(CudaError::Call { code: NOT_SUPPORTED | INVALID_VALUE, .. }) => return Ok(vec![]),
            other => other?,
        }
        let found = found.into_iter().take(count as usize).filter(|found| found.state == 0);
        Ok(found.map(|found| found.algorithm).collect())
    }

    /// Returns the bytes of workspace that an algorithm needs for the layouts as they are; `None` if it does not run.
    pub(super) fn workspace_of(&self, algorithm: &lt::cublasLtMatmulAlgo_t) -> Option<u64> {
        let Self { handle, operation, layouts: [a, b, d] } = self;
        let mut found = NOTHING;
        // SAFETY: the descriptors are alive; the result is written to a local of its size.
        let code = unsafe {
            let found = ptr::from_mut(&mut found).cast();
            (handle.api.cublasLtMatmulAlgoCheck)(handle.raw, *operation, *a, *b, *d, *d, algorithm, found)
        };
        (code == 0).then_some(found.workspace as u64)
    }

    /// Reads a 32-bit attribute of an algorithm's configuration.
    pub(super) fn config(
        &self,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        which: lt::cublasLtMatmulAlgoConfigAttributes_t,
    ) -> Option<u32> {
        let mut value = 0u32;
        let mut written = 0;
        // SAFETY: at most four bytes are written to a local of four bytes.
        let code = unsafe {
            let to = ptr::from_mut(&mut value).cast();
            let get_attribute = self.handle.api.cublasLtMatmulAlgoConfigGetAttribute;
            get_attribute(algorithm, which, to, size_of::<u32>(), &mut written)
        };
        (code == 0).then_some(value)
    }
}

/// Preferences for cuBLASLt's heuristic.
struct Preference<'a> {
    descriptors: &'a Descriptors,
    raw: lt::cublasLtMatmulPreference_t,
}

impl<'a> Preference<'a> {
    fn new(descriptors: &'a Descriptors, limits: &AlgorithmLimits) -> Result<Self, CudaError> {
        use lt::cublasLtMatmulPreferenceAttributes_t as A;
        let mut made = Self { descriptors, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        let code = unsafe { (descriptors.handle.api.cublasLtMatmulPreferenceCreate)(&mut made.raw) };
        descriptors.handle.check("cublasLtMatmulPreferenceCreate", code)?;
        made.set(A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limits.workspace)?;
        made.set(A::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &limits.reductions)?;
        made.set(A::CUBLASLT_MATMUL_PREF_IMPL_MASK, &limits.implementations)?;
        for of in [
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            made.set(of, &limits.alignment)?;
        }
        Ok(made)
    }

    fn set<T: Copy>(
        &self,
        which: lt::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        let handle = &self.descriptors.handle;
        let size = size_of::<T>();
        let value = ptr::from_ref(value).cast();
        // SAFETY: the value has the size passed; the library rejects a size that is not the attribute's.
        let code = unsafe { (handle.api.cublasLtMatmulPreferenceSetAttribute)(self.raw, which, value, size) };
        handle.check("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the preference is owned; a failure is ignored.
            unsafe { (self.descriptors.handle.api.cublasLtMatmulPreferenceDestroy)(self.raw) };
        }
    }
}
