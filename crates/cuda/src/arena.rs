//! The arena: the single allocation of device memory that a plan's addresses refer to. Invariant: every access is
//! checked against the arena's bounds here. The memory mapped is the planned bytes rounded up to the GPU's allocation
//! granularity, plus, after the arena shrank, the memory mapped before, until `trim` unmaps it.
//!
//! An expandable arena reserves addresses once, for all of the GPU's memory. Physical memory is mapped behind the
//! mapped range and unmapped from its end, so the arena grows in place and its base address never changes.

use crate::CudaError;
use crate::api::Driver;
use crate::context::Context;
use crate::error::OUT_OF_MEMORY;
use cudarc::driver::sys as cu;
use plimsoll_exec::DeviceError;
use plimsoll_graph::Bytes;
use std::ptr;

/// A range of device memory, addressed by offsets from its start.
pub(crate) struct DeviceArena {
    bytes: Bytes,
    memory: ArenaAllocation,
}

/// How the memory is allocated.
enum ArenaAllocation {
    Plain(PlainAllocation),
    Segment(ReservedSegment),
}

/// A single allocation, freed and allocated again to change its size.
struct PlainAllocation {
    api: &'static Driver,
    start: u64,
}

/// Reserved addresses for all of the GPU's memory, of which the front is mapped.
struct ReservedSegment {
    api: &'static Driver,
    device: cu::CUdevice,
    start: u64,
    reserved: usize,
    granule: usize,
    /// Positions at which a chunk ends, in ascending order, so that the memory behind can be unmapped.
    borders: Vec<usize>,
    /// Mapped memory, contiguous from `start`.
    chunks: Vec<MappedChunk>,
}

/// A physical allocation and its mapping; CUDA can only unmap it whole.
struct MappedChunk {
    at: u64,
    bytes: usize,
    handle: cu::CUmemGenericAllocationHandle,
}

impl DeviceArena {
    /// Allocates `bytes`; an `expandable` arena can grow in place, and shrink to its `borders` with its content.
    pub(crate) fn new(
        context: &Context,
        bytes: Bytes,
        borders: &[Bytes],
        expandable: bool,
    ) -> Result<Self, DeviceError> {
        let memory = if expandable {
            ReservedSegment::with_mapped(context, bytes, borders).map(ArenaAllocation::Segment)
        } else {
            PlainAllocation::new(context.api, bytes).map(ArenaAllocation::Plain)
        };
        Ok(Self { bytes, memory: memory.map_err(|error| refused(error, bytes))? })
    }

    /// Changes the size to `bytes`; the contents are lost. An expandable arena that shrinks keeps its memory mapped
    /// until `trim`. After an error the arena has zero bytes.
    pub(crate) fn resize(&mut self, bytes: Bytes, borders: &[Bytes]) -> Result<(), DeviceError> {
        // Set before the attempt: a failed resize may already have unmapped a chunk or freed the plain allocation,
        // which is freed first because both sizes at once may not fit.
        self.bytes = Bytes::ZERO;
        let resized = match &mut self.memory {
            ArenaAllocation::Segment(segment) => {
                // Chunks that were mapped with other borders cannot be split.
                if segment.set_borders(borders) {
                    segment.shrink(0);
                }
                segment.resize(bytes)
            }
            ArenaAllocation::Plain(plain) => plain.replace(bytes),
        };
        resized.map_err(|error| refused(error, bytes))?;
        self.bytes = bytes;
        Ok(())
    }

    /// Shrinks or grows the mapped memory to `bytes`, which is one of the borders. Contents in front of the smaller of both
    /// sizes are preserved. After an error the arena is unchanged. No work may be running on the GPU.
    pub(crate) fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        let ArenaAllocation::Segment(segment) = &mut self.memory else {
            let why = "the arena is one allocation".to_owned();
            return Err(DeviceError::Kernel { op: "set_mapped", why });
        };
        let before = segment.mapped();
        let wanted = segment.rounded(bytes);
        segment.shrink(wanted);
        if let Err(error) = segment.map(wanted.saturating_sub(segment.mapped())) {
            segment.shrink(before);
            return Err(refused(error, bytes));
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Number of bytes that [`DeviceArena::trim`] would give back.
    pub(crate) fn spare(&self) -> Bytes {
        match &self.memory {
            ArenaAllocation::Segment(segment) => {
                Bytes(segment.mapped().saturating_sub(segment.rounded(self.bytes)) as u64)
            }
            ArenaAllocation::Plain(_) => Bytes::ZERO,
        }
    }

    /// Unmaps the memory behind the arena and returns its size; no work may be running on the GPU.
    pub(crate) fn trim(&mut self) -> Bytes {
        let spare = self.spare();
        if let ArenaAllocation::Segment(segment) = &mut self.memory {
            segment.shrink(segment.rounded(self.bytes));
        }
        spare
    }

    /// Translates a range of offsets to a device address; an error unless the whole range lies inside the arena.
    pub(crate) fn range(&self, at: u64, bytes: Bytes) -> Result<u64, DeviceError> {
        let start = match &self.memory {
            ArenaAllocation::Segment(segment) => segment.start,
            ArenaAllocation::Plain(plain) => plain.start,
        };
        let end = at.checked_add(bytes.0).filter(|&end| end <= self.bytes.0);
        end.map(|_| start + at).ok_or(DeviceError::OutsideArena { at, bytes })
    }
}

fn refused(error: CudaError, bytes: Bytes) -> DeviceError {
    match error {
        CudaError::Call { code: OUT_OF_MEMORY, .. } => DeviceError::OutOfMemory { bytes },
        other => other.into(),
    }
}

impl PlainAllocation {
    fn new(api: &'static Driver, bytes: Bytes) -> Result<Self, CudaError> {
        let mut plain = Self { api, start: 0 };
        plain.replace(bytes).map(|()| plain)
    }

    fn replace(&mut self, bytes: Bytes) -> Result<(), CudaError> {
        self.free();
        // SAFETY: the pointer is to a field.
        let code = unsafe { (self.api.cuMemAlloc_v2)(&mut self.start, bytes.0.max(1) as usize) };
        self.api.check("cuMemAlloc", code)
    }

    fn free(&mut self) {
        if self.start != 0 {
            // SAFETY: the address came from `cuMemAlloc`, and the driver waits for work that uses it; a failure is
            // ignored.
            unsafe { (self.api.cuMemFree_v2)(self.start) };
            self.start = 0;
        }
    }
}

impl ReservedSegment {
    /// Reserves addresses for all of the GPU's memory, and maps `bytes` in chunks that end at the borders.
    fn with_mapped(context: &Context, bytes: Bytes, borders: &[Bytes]) -> Result<Self, CudaError> {
        let mut segment = Self::reserve(context)?;
        segment.set_borders(borders);
        segment.resize(bytes)?;
        Ok(segment)
    }

    /// Reserves addresses for all of the GPU's memory, without mapping any.
    fn reserve(context: &Context) -> Result<Self, CudaError> {
        let api = context.api;
        let device = context.device;
        let mut granule = 0;
        let mut start = 0;
        let minimum = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: all pointers are to locals.
        unsafe {
            let code = (api.cuMemGetAllocationGranularity)(&mut granule, &properties(device), minimum);
            api.check("cuMemGetAllocationGranularity", code)?;
            let reserved = (context.card.memory.0 as usize).next_multiple_of(granule);
            api.check("cuMemAddressReserve", (api.cuMemAddressReserve)(&mut start, reserved, 0, 0, 0))?;
            Ok(Self { api, device, start, reserved, granule, borders: vec![], chunks: vec![] })
        }
    }

    /// Sets the borders at which chunks end that are mapped from now on. Returns whether they changed.
    fn set_borders(&mut self, borders: &[Bytes]) -> bool {
        let mut borders: Vec<usize> = borders.iter().map(|&border| self.rounded(border)).collect();
        borders.sort_unstable();
        let changed = borders != self.borders;
        self.borders = borders;
        changed
    }

    fn rounded(&self, bytes: Bytes) -> usize {
        (bytes.0.max(1) as usize).next_multiple_of(self.granule)
    }

    fn mapped(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes).sum()
    }

    /// Maps the missing memory; or, for a smaller size, splits the chunk that contains the new end, so that the memory
    /// behind the end can be unmapped by `trim`.
    fn resize(&mut self, bytes: Bytes) -> Result<(), CudaError> {
        let sizes: Vec<usize> = self.chunks.iter().map(|chunk| chunk.bytes).collect();
        match change(&sizes, self.rounded(bytes)) {
            ChunkChange::Nothing => Ok(()),
            ChunkChange::Grow(more) => self.map(more),
            ChunkChange::Border { chunk, first } => {
                let behind: Vec<usize> = sizes[chunk + 1..].to_vec();
                self.shrink(sizes[..chunk].iter().sum());
                [first, sizes[chunk] - first].into_iter().chain(behind).try_for_each(|more| self.map(more))
            }
        }
    }

    /// Maps `bytes` of new memory behind the mapped range, in chunks that end at the borders. Chunks that were mapped before
    /// an error stay.
    fn map(&mut self, bytes: usize) -> Result<(), CudaError> {
        let end = self.mapped() + bytes;
        while self.mapped() < end {
            let at = self.mapped();
            let border = self.borders.iter().copied().find(|&border| border > at);
            self.map_chunk(border.map_or(end, |border| border.min(end)) - at)?;
        }
        Ok(())
    }

    /// Maps one chunk of `bytes` behind the mapped range.
    fn map_chunk(&mut self, bytes: usize) -> Result<(), CudaError> {
        let api = self.api;
        let at = self.start + self.mapped() as u64;
        if self.mapped() + bytes > self.reserved {
            let message = "it is more than the memory of the GPU".to_owned();
            return Err(CudaError::Call { function: "cuMemMap", code: OUT_OF_MEMORY, message });
        }
        let properties = properties(self.device);
        let flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = cu::CUmemAccessDesc { location: properties.location, flags };
        let mut handle = 0;
        // SAFETY: the addresses are reserved and not mapped; all pointers are to locals; every step taken before a
        // failure is undone.
        unsafe {
            api.check("cuMemCreate", (api.cuMemCreate)(&mut handle, bytes, &properties, 0))?;
            if let Err(error) = api.check("cuMemMap", (api.cuMemMap)(at, bytes, 0, handle, 0)) {
                (api.cuMemRelease)(handle);
                return Err(error);
            }
            // Before the access is set, so that `pop` undoes both steps if that fails.
            self.chunks.push(MappedChunk { at, bytes, handle });
            let code = (api.cuMemSetAccess)(at, bytes, &access, 1);
            api.check("cuMemSetAccess", code).inspect_err(|_| self.pop())
        }
    }

    /// Unmaps chunks from the end until `bytes` are mapped; a chunk must end exactly there.
    fn shrink(&mut self, bytes: usize) {
        while self.mapped() > bytes {
            self.pop();
        }
    }

    fn pop(&mut self) {
        let Some(MappedChunk { at, bytes, handle }) = self.chunks.pop() else { return };
        // SAFETY: the chunk was mapped as this one range, and no running work uses it; a failure is ignored.
        unsafe {
            (self.api.cuMemUnmap)(at, bytes);
            (self.api.cuMemRelease)(handle);
        }
    }
}

/// Allocation properties of ordinary device memory.
fn properties(device: cu::CUdevice) -> cu::CUmemAllocationProp {
    cu::CUmemAllocationProp {
        type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        requestedHandleTypes: cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The change of the chunks that makes one of them end at a given number of bytes.
#[derive(Debug, PartialEq, Eq)]
enum ChunkChange {
    /// A chunk already ends there.
    Nothing,
    /// Map this number of additional bytes.
    Grow(usize),
    /// Split chunk `chunk` behind its first `first` bytes.
    Border { chunk: usize, first: usize },
}

/// Returns the change for chunks of the given sizes so that one of them ends at `bytes`.
fn change(chunks: &[usize], bytes: usize) -> ChunkChange {
    let mut before = 0;
    for (chunk, size) in chunks.iter().enumerate() {
        if bytes == before {
            return ChunkChange::Nothing;
        }
        if bytes < before + size {
            return ChunkChange::Border { chunk, first: bytes - before };
        }
        before += size;
    }
    if bytes == before { ChunkChange::Nothing } else { ChunkChange::Grow(bytes - before) }
}

impl Drop for PlainAllocation {
    fn drop(&mut self) {
        self.free();
    }
}

impl Drop for ReservedSegment {
    fn drop(&mut self) {
        self.shrink(0);
        // SAFETY: the addresses were reserved by `self` and nothing is mapped there; a failure is ignored.
        unsafe { (self.api.cuMemAddressFree)(self.start, self.reserved) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_grows_behind_its_end_and_is_cut_where_it_shall_end() {
        assert_eq!(change(&[], 6), ChunkChange::Grow(6));
        assert_eq!(change(&[6], 6), ChunkChange::Nothing);
        assert_eq!(change(&[6], 16), ChunkChange::Grow(10));
        assert_eq!(change(&[6, 10], 6), ChunkChange::Nothing);
        assert_eq!(change(&[6, 10], 8), ChunkChange::Border { chunk: 1, first: 2 });
        assert_eq!(change(&[6, 10], 2), ChunkChange::Border { chunk: 0, first: 2 });
        assert_eq!(change(&[2, 4, 10], 20), ChunkChange::Grow(4));
    }
}
