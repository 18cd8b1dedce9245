//! CUDA events. Invariant: an event is recorded before anybody waits for it or reads its time.

use crate::CudaError;
use crate::api::Driver;
use cudarc::driver::sys as cu;
use std::ptr;

/// A point in a stream's work that other streams or the host can wait for.
pub(crate) struct CudaEvent {
    api: &'static Driver,
    raw: cu::CUevent,
}

// SAFETY: driver handles may be used from any thread to which the context is current.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver's functions on an event may be called concurrently.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Creates an event for ordering, without a timestamp; a host thread that waits for it sleeps instead of spinning.
    pub(crate) fn new(api: &'static Driver) -> Result<Self, CudaError> {
        use cu::CUevent_flags as F;
        Self::with(api, F::CU_EVENT_DISABLE_TIMING as u32 | F::CU_EVENT_BLOCKING_SYNC as u32)
    }

    /// Creates an event with a timestamp.
    pub(crate) fn timing(api: &'static Driver) -> Result<Self, CudaError> {
        Self::with(api, cu::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with(api: &'static Driver, flags: u32) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        api.check("cuEventCreate", unsafe { (api.cuEventCreate)(&mut raw, flags) })?;
        Ok(Self { api, raw })
    }

    /// Records the event behind all work enqueued in `stream` so far.
    pub(crate) fn record(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event and the stream are alive.
        self.api.check("cuEventRecord", unsafe { (self.api.cuEventRecord)(self.raw, stream) })
    }

    /// Makes work enqueued in `stream` from now on wait for the event's latest recording.
    pub(crate) fn before(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event and the stream are alive.
        self.api.check("cuStreamWaitEvent", unsafe { (self.api.cuStreamWaitEvent)(stream, self.raw, 0) })
    }

    /// Blocks the calling thread until the event has completed.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        self.api.check("cuEventSynchronize", unsafe { (self.api.cuEventSynchronize)(self.raw) })
    }

    /// Elapsed seconds from `other` to this event; both must be timing events that have completed.
    pub(crate) fn since(&self, other: &Self) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local, and both events are alive.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut milliseconds, other.raw, self.raw) };
        self.api.check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: the event is owned; a failure is ignored.
        unsafe { (self.api.cuEventDestroy_v2)(self.raw) };
    }
}
