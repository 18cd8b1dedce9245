//! A GPU's primary context, its streams and its status words. Invariant: the status code of every driver call is
//! checked, and every call is made on a thread to which the context is current.

use crate::api::Driver;
use crate::capability::{FP8, OLDEST};
use crate::event::CudaEvent;
use crate::trace::StreamTrace;
use crate::{CudaError, Libraries};
use cudarc::driver::sys as cu;
use plimsoll_graph::Bytes;
use plimsoll_plan::Precision;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Device ordinal, as the driver counts.
    pub ordinal: usize,
    /// Name that the driver reports, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability (major, minor).
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Total device memory.
    pub memory: Bytes,
    /// Largest shared memory of a block in bytes, with the opt-in of `cuFuncSetAttribute`.
    pub shared: u32,
    /// The hexadecimal digits of the UUID in their usual groups, without the `GPU-` prefix.
    pub uuid: String,
    /// CUDA version of the driver, `1000 * major + 10 * minor`: 12030 is CUDA 12.3.
    pub driver: u32,
}

impl Card {
    /// Returns the number formats that models can be computed in on this GPU, the default first; empty if the GPU is
    /// not supported.
    pub fn precisions(&self) -> Vec<Precision> {
        if self.capability < OLDEST {
            return vec![];
        }
        let mut formats = vec![Precision::Bf16, Precision::Fp16, Precision::F32, Precision::Tf32];
        if self.capability >= FP8 {
            formats.push(Precision::Fp8);
        }
        formats
    }

    /// Whether a kernel may be launched before its predecessor in the stream has finished (programmatic dependent
    /// launch), in CUDA graphs too: from compute capability 9.0 on (CUDA programming guide), with a driver of CUDA
    /// 12.3 or later.
    pub(crate) fn has_early_starts(&self) -> bool {
        self.capability >= (9, 0) && self.driver >= 12_030
    }
}

/// Returns the GPUs that the driver reports.
pub fn cards() -> Result<Vec<Card>, CudaError> {
    let api = driver()?;
    let mut count = 0;
    // SAFETY: the pointer is to a local.
    api.check("cuDeviceGetCount", unsafe { (api.cuDeviceGetCount)(&mut count) })?;
    (0..count as usize).map(|ordinal| card(api, ordinal).map(|(card, _)| card)).collect()
}

/// Initialises the driver and returns its functions.
fn driver() -> Result<&'static Driver, CudaError> {
    initialised(Libraries::get())
}

fn initialised(libraries: &'static Libraries) -> Result<&'static Driver, CudaError> {
    let api = libraries.driver.as_ref().map_err(CudaError::clone)?;
    // SAFETY: `cuInit` may be called any number of times.
    api.check("cuInit", unsafe { (api.cuInit)(0) })?;
    Ok(api)
}

/// Reads the properties of the device with the given ordinal.
fn card(api: &Driver, ordinal: usize) -> Result<(Card, cu::CUdevice), CudaError> {
    use cu::CUdevice_attribute as A;
    let mut device = 0;
    let mut count = 0;
    let mut memory = 0usize;
    let mut version = 0;
    let mut name = [0; 128];
    let mut uuid = cu::CUuuid { bytes: [0; 16] };
    // SAFETY: all pointers are to locals of the sizes passed.
    unsafe {
        api.check("cuDeviceGetCount", (api.cuDeviceGetCount)(&mut count))?;
        if ordinal >= count as usize {
            return Err(CudaError::NoDevice { ordinal, found: count as usize });
        }
        api.check("cuDeviceGet", (api.cuDeviceGet)(&mut device, ordinal as c_int))?;
        api.check("cuDeviceGetName", (api.cuDeviceGetName)(name.as_mut_ptr(), 127, device))?;
        api.check("cuDeviceGetUuid", (api.cuDeviceGetUuid_v2)(&mut uuid, device))?;
        api.check("cuDeviceTotalMem", (api.cuDeviceTotalMem_v2)(&mut memory, device))?;
        api.check("cuDriverGetVersion", (api.cuDriverGetVersion)(&mut version))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (api.cuDeviceGetAttribute)(&mut value, which, device) };
        api.check("cuDeviceGetAttribute", code).map(|()| value as u32)
    };
    // SAFETY: the buffer has 128 zeroed bytes, of which the driver may write 127, so it is terminated.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let card = Card {
        ordinal,
        name,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: Bytes(memory as u64),
        shared: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        uuid: digits(uuid.bytes.map(|byte| byte as u8)),
        driver: version as u32,
    };
    Ok((card, device))
}

/// Formats a UUID as hexadecimal digits in groups of 8, 4, 4, 4 and 12.
fn digits(bytes: [u8; 16]) -> String {
    let mut text = String::new();
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

/// A GPU in use: its primary context and three streams; without separate copy streams all three are the same stream.
pub(crate) struct Context {
    /// Functions of the driver.
    pub(crate) api: &'static Driver,
    /// Properties of the GPU.
    pub(crate) card: Card,
    /// Driver handle of the GPU.
    pub(crate) device: cu::CUdevice,
    /// Stream of kernels.
    pub(crate) stream: cu::CUstream,
    /// Stream of host-to-device copies.
    pub(crate) inward: cu::CUstream,
    /// Stream of device-to-host copies.
    pub(crate) outward: cu::CUstream,
    /// Times of kernels and copies, recorded while tracing is on.
    pub(crate) trace: StreamTrace,
    /// Event that orders two streams in `order`: recorded in one and waited for by the other in the same call, so one
    /// event can be reused for every pair.
    link: Option<CudaEvent>,
    context: cu::CUcontext,
}

// SAFETY: driver handles may be used from any thread to which the context is current; `enter` makes it current.
unsafe impl Send for Context {}

impl Context {
    /// Retains the primary context of device `ordinal` and creates its streams. With `streams`, copies in either
    /// direction get a stream of their own.
    ///
    /// # Errors
    /// Fails if a library is missing, if there is no such device, or if its compute capability is below 8.0.
    pub(crate) fn new(ordinal: usize, streams: bool) -> Result<Self, CudaError> {
        let api = initialised(Libraries::complete()?)?;
        let (card, device) = card(api, ordinal)?;
        if card.capability < OLDEST {
            return Err(CudaError::TooOld { card: card.name, capability: card.capability });
        }
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe {
            api.check("cuDevicePrimaryCtxRetain", (api.cuDevicePrimaryCtxRetain)(&mut context, device))?;
        }
        // From here on, dropping `new` undoes the steps already taken.
        let mut new = Self {
            api,
            card,
            device,
            stream: ptr::null_mut(),
            inward: ptr::null_mut(),
            outward: ptr::null_mut(),
            trace: StreamTrace::new(api),
            link: None,
            context,
        };
        new.enter()?;
        new.stream = new.create_stream()?;
        if streams {
            new.inward = new.create_stream()?;
            new.outward = new.create_stream()?;
        } else {
            new.inward = new.stream;
            new.outward = new.stream;
        }
        new.link = Some(CudaEvent::new(api)?);
        Ok(new)
    }

    fn create_stream(&self) -> Result<cu::CUstream, CudaError> {
        let mut stream = ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a local, and the context is current.
        self.api.check("cuStreamCreate", unsafe { (self.api.cuStreamCreate)(&mut stream, flags) })?;
        Ok(stream)
    }

    /// Makes all work enqueued in `second` from now on wait for the work already enqueued in `first`.
    pub(crate) fn order(&self, first: cu::CUstream, second: cu::CUstream) -> Result<(), CudaError> {
        match &self.link {
            Some(link) if first != second => link.record(first).and_then(|()| link.before(second)),
            Some(_) | None => Ok(()),
        }
    }

    /// A handle with which other threads make the context current to them.
    pub(crate) fn current(&self) -> Current {
        Current { api: self.api, context: self.context }
    }

    /// Makes the context current to the calling thread.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        self.current().enter()
    }

    /// Blocks until all streams are idle.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        [self.inward, self.stream, self.outward].into_iter().try_for_each(|stream| self.wait_for(stream))
    }

    /// Blocks until `stream` is idle.
    pub(crate) fn wait_for(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: the stream is not destroyed before `self`.
        self.api.check("cuStreamSynchronize", unsafe { (self.api.cuStreamSynchronize)(stream) })
    }

    /// Returns (free, total) device memory, counting all processes.
    pub(crate) fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let mut free = 0;
        let mut total = 0;
        // SAFETY: both pointers are to locals.
        self.api.check("cuMemGetInfo", unsafe { (self.api.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }
}

/// A context that threads other than its owner's make current. It must not outlive its [`Context`].
pub(crate) struct Current {
    api: &'static Driver,
    context: cu::CUcontext,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Current {}
// SAFETY: as above.
unsafe impl Sync for Current {}

impl Current {
    /// Makes the context current to the calling thread.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for the life of the `Context` that this handle is from.
        self.api.check("cuCtxSetCurrent", unsafe { (self.api.cuCtxSetCurrent)(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let mut streams = [self.stream, self.inward, self.outward].to_vec();
        streams.dedup();
        // Events must be destroyed before their context.
        self.link = None;
        self.trace = StreamTrace::new(self.api);
        // SAFETY: no work of this crate uses the streams any more; a failure cannot be handled in `drop` and is
        // ignored.
        unsafe {
            (self.api.cuCtxSetCurrent)(self.context);
            for stream in streams.into_iter().filter(|stream| !stream.is_null()) {
                (self.api.cuStreamDestroy_v2)(stream);
            }
            (self.api.cuDevicePrimaryCtxRelease_v2)(self.device);
        }
    }
}

/// Status words in pinned host memory, to which kernels write a code when they find invalid input data. Each in-flight
/// step has its own word.
pub(crate) struct StatusWords {
    api: &'static Driver,
    start: *mut u64,
    words: usize,
    /// Index of the word of the step that is being enqueued.
    current: usize,
}

// SAFETY: the words are owned, and a word is read only after the kernels that may write it have completed.
unsafe impl Send for StatusWords {}

impl StatusWords {
    /// Allocates `words` words (at least one), all zero.
    pub(crate) fn new(context: &Context, words: usize) -> Result<Self, CudaError> {
        let api = context.api;
        let mut start = ptr::null_mut::<c_void>();
        let words = words.max(1);
        // SAFETY: the pointer is to a local; the words are written here before anybody reads them.
        unsafe {
            let portable = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
            api.check("cuMemHostAlloc", (api.cuMemHostAlloc)(&mut start, words * size_of::<u64>(), portable))?;
            ptr::write_bytes(start.cast::<u64>(), 0, words);
        }
        Ok(Self { api, start: start.cast(), words, current: 0 })
    }

    /// Address of the current step's word, valid on host and device (unified addressing).
    pub(crate) fn address(&self) -> u64 {
        self.start as u64 + (self.current * size_of::<u64>()) as u64
    }

    /// Index of the current step's word.
    pub(crate) fn current(&self) -> usize {
        self.current
    }

    /// Switches to the next word, for the next step.
    pub(crate) fn advance(&mut self) {
        self.current = (self.current + 1) % self.words;
    }

    /// Returns the code in a word and clears the word; the word's step must have completed. 0 means no error.
    pub(crate) fn take(&self, word: usize) -> u32 {
        assert!(word < self.words, "a word for each in-flight step");
        // SAFETY: the word is in bounds by the assertion, aligned and initialised; volatile because a kernel wrote it.
        unsafe {
            let word = self.start.add(word).cast::<u32>();
            let value = word.read_volatile();
            word.write_volatile(0);
            value
        }
    }

    /// Clears all words and returns the first code that is not zero, otherwise 0; the streams must be idle.
    pub(crate) fn take_any(&self) -> u32 {
        (0..self.words).map(|word| self.take(word)).fold(0, |first, code| if first == 0 { code } else { first })
    }
}

impl Drop for StatusWords {
    fn drop(&mut self) {
        // SAFETY: the memory came from `cuMemHostAlloc` and is freed once.
        unsafe { (self.api.cuMemFreeHost)(self.start.cast()) };
    }
}

impl Driver {
    /// Returns an error with the driver's message unless `code` is zero.
    pub(crate) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the driver stores a pointer to a constant string, or leaves null.
        let message = unsafe {
            (self.cuGetErrorString)(code, &mut text);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(CudaError::Call { function, code, message })
    }
}
