//! The one allocation of a card's memory. Invariant: every access is checked against its bounds, here; what is mapped is
//! the planned bytes rounded up to the card's granule.

use crate::CudaError;
use crate::api::Driver;
use crate::context::Context;
use cudarc::driver::sys as cu;
use exec::DeviceError;
use graph::Bytes;
use std::ptr;

/// Bytes of a card's memory on addresses that were reserved for them.
pub(crate) struct Arena {
    api: &'static Driver,
    start: u64,
    bytes: Bytes,
    mapped: usize,
    handle: cu::CUmemGenericAllocationHandle,
}

/// CUDA's code for memory that is not there.
const OUT_OF_MEMORY: i32 = 2;

impl Arena {
    /// Takes `bytes`, at once.
    pub(crate) fn new(context: &Context, bytes: Bytes) -> Result<Self, DeviceError> {
        match Self::map(context, bytes) {
            Err(CudaError::Call { code: OUT_OF_MEMORY, .. }) => Err(DeviceError::OutOfMemory { bytes }),
            other => Ok(other?),
        }
    }

    fn map(context: &Context, bytes: Bytes) -> Result<Self, CudaError> {
        let api = context.api;
        let location =
            cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device };
        let properties = cu::CUmemAllocationProp {
            type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location,
            requestedHandleTypes: cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let access =
            cu::CUmemAccessDesc { location, flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        let (mut granule, mut start, mut handle) = (0, 0, 0);
        // SAFETY: pointers are to locals; what was made before a failure is undone.
        unsafe {
            let minimum = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            let code = (api.cuMemGetAllocationGranularity)(&mut granule, &properties, minimum);
            api.check("cuMemGetAllocationGranularity", code)?;
            let mapped = (bytes.0.max(1) as usize).next_multiple_of(granule);
            api.check("cuMemAddressReserve", (api.cuMemAddressReserve)(&mut start, mapped, 0, 0, 0))?;
            let code = (api.cuMemCreate)(&mut handle, mapped, &properties, 0);
            if let Err(error) = api.check("cuMemCreate", code) {
                (api.cuMemAddressFree)(start, mapped);
                return Err(error);
            }
            let arena = Self { api, start, bytes, mapped, handle };
            api.check("cuMemMap", (api.cuMemMap)(start, mapped, 0, handle, 0))?;
            api.check("cuMemSetAccess", (api.cuMemSetAccess)(start, mapped, &access, 1))?;
            Ok(arena)
        }
    }

    /// The card's address of a range that lies inside.
    pub(crate) fn range(&self, at: u64, bytes: Bytes) -> Result<u64, DeviceError> {
        let end = at.checked_add(bytes.0).filter(|&end| end <= self.bytes.0);
        end.map(|_| self.start + at).ok_or(DeviceError::OutsideArena { at, bytes })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is ours and the stream was waited for by the device's drop; failures change nothing here.
        unsafe {
            (self.api.cuMemUnmap)(self.start, self.mapped);
            (self.api.cuMemRelease)(self.handle);
            (self.api.cuMemAddressFree)(self.start, self.mapped);
        }
    }
}
