//! A card with its context and streams. Invariant: every call's code is looked at, and every call is made on a thread
//! to which the context is current.

use crate::api::Driver;
use crate::event::Event;
use crate::machine::FP8;
use crate::trace::Trace;
use crate::{CudaError, Libraries};
use cudarc::driver::sys as cu;
use graph::Bytes;
use plan::Precision;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number, as the driver counts.
    pub ordinal: usize,
    /// As the driver calls it, such as `NVIDIA H200`.
    pub name: String,
    /// Major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// All its memory.
    pub memory: Bytes,
    /// Shared memory that a block may ask for.
    pub shared: u32,
    /// What tells it from all others, as the digits of its UUID.
    pub uuid: String,
    /// The driver's CUDA version, 1000 times the major and 10 times the minor: 12030 is 12.3.
    pub driver: u32,
}

/// The oldest compute capability whose cards can be used.
const OLDEST: (u32, u32) = (8, 0);

impl Card {
    /// Number formats that models can be computed in on this card, the one that is chosen by default first; none on a
    /// card that is too old to be used.
    pub fn precisions(&self) -> Vec<Precision> {
        let mut formats = match self.capability < OLDEST {
            true => vec![],
            false => vec![Precision::Bf16, Precision::Fp16, Precision::F32, Precision::Tf32],
        };
        if self.capability >= FP8 {
            formats.push(Precision::Fp8);
        }
        formats
    }

    /// Whether a kernel may come to it before the one in front has ended, in records of steps too: from compute capability
    /// 9.0 on (CUDA programming guide, programmatic dependent launch), with a driver of CUDA 12.3.
    pub(crate) fn has_early_starts(&self) -> bool {
        self.capability >= (9, 0) && self.driver >= 12_030
    }
}

/// The cards that the driver shows.
pub fn cards() -> Result<Vec<Card>, CudaError> {
    let api = driver()?;
    let mut count = 0;
    // SAFETY: the pointer is to a local.
    api.check("cuDeviceGetCount", unsafe { (api.cuDeviceGetCount)(&mut count) })?;
    (0..count as usize).map(|ordinal| card(api, ordinal).map(|(card, _)| card)).collect()
}

/// The driver, initialised.
fn driver() -> Result<&'static Driver, CudaError> {
    initialised(Libraries::get())
}

fn initialised(libraries: &'static Libraries) -> Result<&'static Driver, CudaError> {
    let api = libraries.driver.as_ref().map_err(CudaError::clone)?;
    // SAFETY: may be called any number of times.
    api.check("cuInit", unsafe { (api.cuInit)(0) })?;
    Ok(api)
}

fn card(api: &Driver, ordinal: usize) -> Result<(Card, cu::CUdevice), CudaError> {
    use cu::CUdevice_attribute as A;
    let (mut device, mut count, mut memory, mut version) = (0, 0, 0usize, 0);
    let (mut name, mut uuid) = ([0; 128], cu::CUuuid { bytes: [0; 16] });
    // SAFETY: pointers are to locals of the sizes that are given.
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
    // SAFETY: the last of its bytes is zero, whatever the driver wrote.
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

/// The digits of a UUID, in its groups.
fn digits(bytes: [u8; 16]) -> String {
    let digit = |(i, byte): (usize, &u8)| {
        let dash = if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
        format!("{dash}{byte:02x}")
    };
    bytes.iter().enumerate().map(digit).collect()
}

/// A card that is in use: its primary context and three streams, or one that stands for all.
pub(crate) struct Context {
    pub(crate) api: &'static Driver,
    pub(crate) card: Card,
    pub(crate) device: cu::CUdevice,
    /// Where kernels run.
    pub(crate) stream: cu::CUstream,
    /// Copies from the host.
    pub(crate) inward: cu::CUstream,
    /// Copies to the host.
    pub(crate) outward: cu::CUstream,
    pub(crate) trace: Trace,
    /// Orders two streams: recorded in one, and waited for by the other at once, so it is free again.
    link: Option<Event>,
    context: cu::CUcontext,
}

// SAFETY: handles of the driver may be used from any thread to which the context is current; `enter` sees to that.
unsafe impl Send for Context {}

impl Context {
    /// Takes a card, if it and everything that is needed to use it is there; with streams of their own for copies, if
    /// these are wanted.
    pub(crate) fn new(ordinal: usize, streams: bool) -> Result<Self, CudaError> {
        let api = initialised(Libraries::whole()?)?;
        let (card, device) = card(api, ordinal)?;
        if card.capability < OLDEST {
            return Err(CudaError::TooOld { card: card.name, capability: card.capability });
        }
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe {
            api.check("cuDevicePrimaryCtxRetain", (api.cuDevicePrimaryCtxRetain)(&mut context, device))?;
        }
        let (none, trace) = (ptr::null_mut(), Trace::new(api));
        let (stream, inward, outward) = (none, none, none);
        // From here on its drop undoes what was done.
        let mut new = Self { api, card, device, stream, inward, outward, trace, link: None, context };
        new.enter()?;
        new.stream = new.create_stream()?;
        (new.inward, new.outward) = match streams {
            true => (new.create_stream()?, new.create_stream()?),
            false => (new.stream, new.stream),
        };
        new.link = Some(Event::new(api)?);
        Ok(new)
    }

    fn create_stream(&self) -> Result<cu::CUstream, CudaError> {
        let mut stream = ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a local, and the context is current.
        self.api.check("cuStreamCreate", unsafe { (self.api.cuStreamCreate)(&mut stream, flags) })?;
        Ok(stream)
    }

    /// What is put into `second` from now on comes behind what is in `first`.
    pub(crate) fn order(&self, first: cu::CUstream, second: cu::CUstream) -> Result<(), CudaError> {
        match &self.link {
            Some(link) if first != second => link.record(first).and_then(|()| link.before(second)),
            Some(_) | None => Ok(()),
        }
    }

    /// Makes the context current to the calling thread.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        self.api.check("cuCtxSetCurrent", unsafe { (self.api.cuCtxSetCurrent)(self.context) })
    }

    /// Waits for everything in all streams.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        [self.inward, self.stream, self.outward].into_iter().try_for_each(|stream| self.wait_for(stream))
    }

    /// Waits for everything in a stream.
    pub(crate) fn wait_for(&self, stream: cu::CUstream) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        self.api.check("cuStreamSynchronize", unsafe { (self.api.cuStreamSynchronize)(stream) })
    }

    /// (free, total) of the card's memory, all processes counted.
    pub(crate) fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers are to locals.
        self.api.check("cuMemGetInfo", unsafe { (self.api.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let mut streams = [self.stream, self.inward, self.outward].to_vec();
        streams.dedup();
        // Events go before the context.
        (self.link, self.trace) = (None, Trace::new(self.api));
        // SAFETY: nothing of ours uses the streams any more; failures change nothing here.
        unsafe {
            (self.api.cuCtxSetCurrent)(self.context);
            for stream in streams.into_iter().filter(|stream| !stream.is_null()) {
                (self.api.cuStreamDestroy_v2)(stream);
            }
            (self.api.cuDevicePrimaryCtxRelease_v2)(self.device);
        }
    }
}

/// Words of host memory that kernels can write: what they met that they refuse. Open steps have a word each.
pub(crate) struct Status {
    api: &'static Driver,
    start: *mut u64,
    words: usize,
    /// The word of the step that is being put into the stream.
    current: usize,
}

// SAFETY: the words are owned, and one is only read when no kernel has it.
unsafe impl Send for Status {}

impl Status {
    pub(crate) fn new(context: &Context, words: usize) -> Result<Self, CudaError> {
        let (api, mut start) = (context.api, ptr::null_mut::<c_void>());
        let words = words.max(1);
        // SAFETY: the pointer is to a local; the words are written before anyone reads them.
        unsafe {
            let portable = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
            api.check("cuMemHostAlloc", (api.cuMemHostAlloc)(&mut start, words * size_of::<u64>(), portable))?;
            ptr::write_bytes(start.cast::<u64>(), 0, words);
        }
        Ok(Self { api, start: start.cast(), words, current: 0 })
    }

    /// Where the step's kernels write: one address for host and device.
    pub(crate) fn address(&self) -> u64 {
        self.start as u64 + (self.current * size_of::<u64>()) as u64
    }

    /// The step's word.
    pub(crate) fn current(&self) -> usize {
        self.current
    }

    /// Another step begins.
    pub(crate) fn advance(&mut self) {
        self.current = (self.current + 1) % self.words;
    }

    /// What was written to a word since the last look; its step is over.
    pub(crate) fn take(&self, word: usize) -> u32 {
        assert!(word < self.words, "a word for each open step");
        // SAFETY: the word is ours, aligned and initialised.
        unsafe {
            let word = self.start.add(word).cast::<u32>();
            let value = word.read_volatile();
            word.write_volatile(0);
            value
        }
    }

    /// The same of any word; the streams are idle.
    pub(crate) fn take_any(&self) -> u32 {
        (0..self.words).map(|word| self.take(word)).fold(0, |first, code| if first == 0 { code } else { first })
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: it came from `cuMemHostAlloc`.
        unsafe { (self.api.cuMemFreeHost)(self.start.cast()) };
    }
}

impl Driver {
    /// An error unless the code is zero.
    pub(crate) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the driver gives a constant string, or leaves null.
        let message = unsafe {
            (self.cuGetErrorString)(code, &mut text);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(CudaError::Call { function, code, message })
    }
}
