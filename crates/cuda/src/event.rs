//! Points in streams. Invariant: an event is recorded before it is waited for or asked for its time.

use crate::CudaError;
use crate::api::Driver;
use cudarc::driver::sys as cu;
use std::ptr;

/// A point in a stream that others, or the host, can wait for.
pub(crate) struct Event {
    api: &'static Driver,
    raw: cu::CUevent,
}

// SAFETY: handles of the driver may be used from any thread to which the context is current.
unsafe impl Send for Event {}

impl Event {
    /// One that orders; the host that waits for it sleeps.
    pub(crate) fn new(api: &'static Driver) -> Result<Self, CudaError> {
        use cu::CUevent_flags as F;
        Self::with(api, F::CU_EVENT_DISABLE_TIMING as u32 | F::CU_EVENT_BLOCKING_SYNC as u32)
    }

    /// One that tells the time.
    pub(crate) fn timing(api: &'static Driver) -> Result<Self, CudaError> {
        Self::with(api, cu::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with(api: &'static Driver, flags: u32) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        api.check("cuEventCreate", unsafe { (api.cuEventCreate)(&mut raw, flags) })?;
        Ok(Self { api, raw })
    }

    /// The point behind all that is in the stream.
    pub(crate) fn record(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: both live.
        self.api.check("cuEventRecord", unsafe { (self.api.cuEventRecord)(self.raw, stream) })
    }

    /// What is put into the stream from now on comes behind the point as it was recorded last.
    pub(crate) fn before(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: both live.
        self.api.check("cuStreamWaitEvent", unsafe { (self.api.cuStreamWaitEvent)(stream, self.raw, 0) })
    }

    /// Waits here.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: it lives.
        self.api.check("cuEventSynchronize", unsafe { (self.api.cuEventSynchronize)(self.raw) })
    }

    /// Seconds from another point to this one; both have passed.
    pub(crate) fn since(&self, other: &Self) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local, and both live.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut milliseconds, other.raw, self.raw) };
        self.api.check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is ours; a failure changes nothing here.
        unsafe { (self.api.cuEventDestroy_v2)(self.raw) };
    }
}
