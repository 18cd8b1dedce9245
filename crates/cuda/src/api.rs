//! Foreign function tables of the driver, NVRTC, cuBLASLt and NVML, resolved by symbol name. Invariant: a table is
//! either complete or an error. Signatures are as in the headers, except that status codes are plain integers: a
//! newer library may return a code that has no variant in the bindings' enums.

use crate::CudaError;
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use cudarc::nvrtc::sys as rtc;
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// Declares a table of function pointers and its constructor, so that each symbol name meets its signature in one
/// place.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident($($arg:ty),*) -> $out:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the names are theirs")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        impl $table {
            /// Resolves every function of the table. The library must never be unloaded ([`crate::Libraries`] leaks
            /// it).
            pub(crate) fn of(library: &'static Library, name: &'static str) -> Result<Self, CudaError> {
                let missing = |function: &str| CudaError::Library {
                    name,
                    tried: vec![format!("it has no function `{function}`")],
                    remedy: "install a newer one",
                };
                Ok(Self {
                    $($name: {
                        // SAFETY: the field's type is the function's signature in the library's header.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| missing(stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

functions! {
    /// libcuda, the driver API; installed with the NVIDIA driver.
    Driver {
        cuInit(c_uint) -> c_int;
        cuDriverGetVersion(*mut c_int) -> c_int;
        cuGetErrorString(c_int, *mut *const c_char) -> c_int;
        cuDeviceGetCount(*mut c_int) -> c_int;
        cuDeviceGet(*mut cu::CUdevice, c_int) -> c_int;
        cuDeviceGetName(*mut c_char, c_int, cu::CUdevice) -> c_int;
        cuDeviceGetUuid_v2(*mut cu::CUuuid, cu::CUdevice) -> c_int;
        cuDeviceGetAttribute(*mut c_int, cu::CUdevice_attribute, cu::CUdevice) -> c_int;
        cuDeviceTotalMem_v2(*mut usize, cu::CUdevice) -> c_int;
        cuDevicePrimaryCtxRetain(*mut cu::CUcontext, cu::CUdevice) -> c_int;
        cuDevicePrimaryCtxRelease_v2(cu::CUdevice) -> c_int;
        cuCtxSetCurrent(cu::CUcontext) -> c_int;
        cuMemGetInfo_v2(*mut usize, *mut usize) -> c_int;
        cuMemAddressReserve(*mut cu::CUdeviceptr, usize, usize, cu::CUdeviceptr, c_ulonglong) -> c_int;
        cuMemAddressFree(cu::CUdeviceptr, usize) -> c_int;
        cuMemCreate(*mut cu::CUmemGenericAllocationHandle, usize, *const cu::CUmemAllocationProp, c_ulonglong) -> c_int;
        cuMemRelease(cu::CUmemGenericAllocationHandle) -> c_int;
        cuMemMap(cu::CUdeviceptr, usize, usize, cu::CUmemGenericAllocationHandle, c_ulonglong) -> c_int;
        cuMemUnmap(cu::CUdeviceptr, usize) -> c_int;
        cuMemSetAccess(cu::CUdeviceptr, usize, *const cu::CUmemAccessDesc, usize) -> c_int;
        cuMemGetAllocationGranularity(*mut usize, *const cu::CUmemAllocationProp, cu::CUmemAllocationGranularity_flags) -> c_int;
        cuMemAlloc_v2(*mut cu::CUdeviceptr, usize) -> c_int;
        cuMemFree_v2(cu::CUdeviceptr) -> c_int;
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> c_int;
        cuMemFreeHost(*mut c_void) -> c_int;
        cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> c_int;
        cuMemHostUnregister(*mut c_void) -> c_int;
        cuMemcpyHtoDAsync_v2(cu::CUdeviceptr, *const c_void, usize, cu::CUstream) -> c_int;
        cuMemcpyDtoHAsync_v2(*mut c_void, cu::CUdeviceptr, usize, cu::CUstream) -> c_int;
        cuMemcpyDtoDAsync_v2(cu::CUdeviceptr, cu::CUdeviceptr, usize, cu::CUstream) -> c_int;
        cuMemsetD8Async(cu::CUdeviceptr, u8, usize, cu::CUstream) -> c_int;
        cuStreamCreate(*mut cu::CUstream, c_uint) -> c_int;
        cuStreamDestroy_v2(cu::CUstream) -> c_int;
        cuStreamSynchronize(cu::CUstream) -> c_int;
        cuEventCreate(*mut cu::CUevent, c_uint) -> c_int;
        cuEventDestroy_v2(cu::CUevent) -> c_int;
        cuEventRecord(cu::CUevent, cu::CUstream) -> c_int;
        cuEventSynchronize(cu::CUevent) -> c_int;
        cuStreamWaitEvent(cu::CUstream, cu::CUevent, c_uint) -> c_int;
        cuStreamBeginCapture_v2(cu::CUstream, cu::CUstreamCaptureMode) -> c_int;
        cuStreamEndCapture(cu::CUstream, *mut cu::CUgraph) -> c_int;
        cuGraphInstantiateWithFlags(*mut cu::CUgraphExec, cu::CUgraph, c_ulonglong) -> c_int;
        cuGraphLaunch(cu::CUgraphExec, cu::CUstream) -> c_int;
        cuGraphDestroy(cu::CUgraph) -> c_int;
        cuGraphExecDestroy(cu::CUgraphExec) -> c_int;
        cuEventElapsedTime(*mut f32, cu::CUevent, cu::CUevent) -> c_int;
        cuModuleLoadData(*mut cu::CUmodule, *const c_void) -> c_int;
        cuModuleUnload(cu::CUmodule) -> c_int;
        cuModuleGetFunction(*mut cu::CUfunction, cu::CUmodule, *const c_char) -> c_int;
        cuFuncSetAttribute(cu::CUfunction, cu::CUfunction_attribute, c_int) -> c_int;
        cuTensorMapEncodeTiled(*mut cu::CUtensorMap, cu::CUtensorMapDataType, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, cu::CUtensorMapInterleave, cu::CUtensorMapSwizzle, cu::CUtensorMapL2promotion, cu::CUtensorMapFloatOOBfill) -> c_int;
        cuLaunchKernelEx(*const cu::CUlaunchConfig, cu::CUfunction, *mut *mut c_void, *mut *mut c_void) -> c_int;
    }
}

functions! {
    /// libnvrtc, the run-time compiler of CUDA C++.
    Nvrtc {
        nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        nvrtcGetErrorString(c_int) -> *const c_char;
        nvrtcCreateProgram(*mut rtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
        nvrtcDestroyProgram(*mut rtc::nvrtcProgram) -> c_int;
        nvrtcCompileProgram(rtc::nvrtcProgram, c_int, *const *const c_char) -> c_int;
        nvrtcGetProgramLogSize(rtc::nvrtcProgram, *mut usize) -> c_int;
        nvrtcGetProgramLog(rtc::nvrtcProgram, *mut c_char) -> c_int;
        nvrtcGetCUBINSize(rtc::nvrtcProgram, *mut usize) -> c_int;
        nvrtcGetCUBIN(rtc::nvrtcProgram, *mut c_char) -> c_int;
    }
}

/// `nvmlDevice_t`, an opaque handle of a GPU.
pub(crate) type NvmlDevice = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct NvmlMemory {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// `nvmlProcessInfo_t`, as `nvmlDeviceGetComputeRunningProcesses_v3` writes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct NvmlProcess {
    pub(crate) pid: c_uint,
    pub(crate) used: c_ulonglong,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

functions! {
    /// libnvidia-ml (NVML), which reports the state of GPUs; installed with the NVIDIA driver.
    Nvml {
        nvmlInit_v2() -> c_int;
        nvmlErrorString(c_int) -> *const c_char;
        nvmlDeviceGetHandleByUUID(*const c_char, *mut NvmlDevice) -> c_int;
        nvmlDeviceGetMemoryInfo(NvmlDevice, *mut NvmlMemory) -> c_int;
        nvmlDeviceGetComputeRunningProcesses_v3(NvmlDevice, *mut c_uint, *mut NvmlProcess) -> c_int;
    }
}

functions! {
    /// libcublasLt, the matrix multiplications of cuBLASLt.
    CublasLt {
        cublasLtGetVersion() -> usize;
        cublasLtCreate(*mut lt::cublasLtHandle_t) -> c_int;
        cublasLtDestroy(lt::cublasLtHandle_t) -> c_int;
        cublasLtMatmulDescCreate(*mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType_t) -> c_int;
        cublasLtMatmulDescDestroy(lt::cublasLtMatmulDesc_t) -> c_int;
        cublasLtMatmulDescSetAttribute(lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> c_int;
        cublasLtMatrixLayoutCreate(*mut lt::cublasLtMatrixLayout_t, lt::cudaDataType_t, u64, u64, i64) -> c_int;
        cublasLtMatrixLayoutDestroy(lt::cublasLtMatrixLayout_t) -> c_int;
        cublasLtMatrixLayoutSetAttribute(lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayoutAttribute_t, *const c_void, usize) -> c_int;
        cublasLtMatmulPreferenceCreate(*mut lt::cublasLtMatmulPreference_t) -> c_int;
        cublasLtMatmulPreferenceDestroy(lt::cublasLtMatmulPreference_t) -> c_int;
        cublasLtMatmulPreferenceSetAttribute(lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> c_int;
        cublasLtMatmulAlgoGetHeuristic(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatmulPreference_t, c_int, *mut lt::cublasLtMatmulHeuristicResult_t, *mut c_int) -> c_int;
        cublasLtMatmulAlgoConfigGetAttribute(*const lt::cublasLtMatmulAlgo_t, lt::cublasLtMatmulAlgoConfigAttributes_t, *mut c_void, usize, *mut usize) -> c_int;
        cublasLtMatmulAlgoCheck(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut lt::cublasLtMatmulHeuristicResult_t) -> c_int;
        cublasLtMatmul(lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t, *mut c_void, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut c_void, usize, cu::CUstream) -> c_int;
    }
}
