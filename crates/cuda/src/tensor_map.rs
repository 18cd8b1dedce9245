//! Tensor maps: descriptors of matrices for Hopper's TMA (tensor memory accelerator). Invariant: a box is 128 bytes
//! wide, the width of the 128-byte shared-memory swizzle.

use crate::CudaError;
use crate::context::Context;
use cudarc::driver::sys as cu;
use plimsoll_graph::DType;
use std::ptr;

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceMatrix {
    pub(crate) address: u64,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) dtype: DType,
}

/// Describes a matrix that is copied in boxes of `height` rows by 128 bytes.
pub(crate) fn tensor_map(
    context: &Context,
    matrix: &DeviceMatrix,
    height: u32,
) -> Result<cu::CUtensorMap, CudaError> {
    use cu::CUtensorMapDataType_enum as D;
    let &DeviceMatrix { address, rows, columns, dtype } = matrix;
    let element = match dtype {
        DType::F32 => D::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::Bf16 => D::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => D::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::I32 => D::CU_TENSOR_MAP_DATA_TYPE_INT32,
        DType::F8 | DType::I8 | DType::U8 => D::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let mut map = cu::CUtensorMap { opaque: [0; 16] };
    // A box is as wide as the 128-byte swizzle, in elements.
    let width = 128 / dtype.size() as u32;
    let extents = [columns, rows];
    let stride = columns * dtype.size();
    let boxes = [width, height];
    let steps = [1, 1];
    // SAFETY: all pointers are to locals whose sizes match the rank of 2; the device address is not dereferenced here.
    let code = unsafe {
        (context.api.cuTensorMapEncodeTiled)(
            &mut map,
            element,
            2,
            ptr::without_provenance_mut(address as usize),
            extents.as_ptr(),
            &stride,
            boxes.as_ptr(),
            steps.as_ptr(),
            cu::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            cu::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            // Elements outside the matrix are read as zeros, so tiles at its borders need no masks.
            cu::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    context.api.check("cuTensorMapEncodeTiled", code).map(|()| map)
}
