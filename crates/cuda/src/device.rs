//! The CUDA device: an arena of GPU memory, pinned host memory, a scratch file, three streams, and the kernels of each op.
//! Invariant: launches take effect in the order of the calls; a transfer runs between its start and the wait for it.
//! Operands come from a checked plan; token ids and spans are input data, and values that a kernel rejects are an error of
//! the step's results.

use crate::CudaError;
use crate::arena::DeviceArena;
use crate::context::{Card, Context};
use crate::event::CudaEvent;
use crate::gemm::{self, Choosing, Gemm, GemmCandidate};
use crate::graphs::Graphs;
use crate::launch::{self, OpLaunch};
use crate::loaded_kernels::LoadedKernels;
use crate::staging::{HostSpace, StagingBuffer};
use crate::trace::StreamTrack;
use cudarc::driver::sys as cu;
use plimsoll_exec::scratch_file::{FileCopy, FileQueues, ScratchFile};
use plimsoll_exec::{
    Allocation, Device, DeviceError, DeviceInfo, GraphCapture, Launch, OnStart, Recorder, Span, StartProgress,
    StartStage, Tracer, Transfer, TransferOrder,
};
use plimsoll_graph::{Bytes, Counts, DType, Space};
use plimsoll_plan::{Capability, Location, PIECE, PIPELINE_DEPTH, Queue};
use plimsoll_setting::Setting;
use std::sync::Arc;
use std::time::Duration;

/// Options of a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether copies use streams of their own, so that they overlap with kernels.
    pub streams: bool,
    /// Whether host memory for copies is pinned; `None` pins it if the driver can. Copies from and to memory that is not
    /// pinned do not overlap with anything.
    pub pinned: Option<bool>,
    /// Maximum number of in-flight steps.
    pub depth: usize,
    /// Whether the arena can grow in place.
    pub expandable: bool,
    /// Number of steps between two checks for unused memory to give back; 0 disables them.
    pub cache_clear_interval: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { streams: true, pinned: None, depth: PIPELINE_DEPTH, expandable: true, cache_clear_interval: 100 }
    }
}

/// A device that runs kernels on one GPU.
pub struct CudaDevice {
    options: Options,
    /// The threads that copy between the scratch file and host memory; before that memory, so that no thread copies from or
    /// to memory that is gone.
    file: Option<FileQueues>,
    /// The host's space.
    host: Option<HostSpace>,
    arena: Option<DeviceArena>,
    /// Pinned memory through which uploads to the arena pass; `None` before the arena is allocated, or if it is not pinned.
    staging: Option<StagingBuffer>,
    /// An event for each transfer: behind the copy of a stream, or at the start of a copy of the scratch file.
    events: Arc<[CudaEvent]>,
    /// For each transfer, the index of the status word of the step that started it last.
    words: Vec<usize>,
    /// Steps since the last check for memory to give back.
    since: u64,
    graphs: Graphs,
    gemm: Gemm,
    kernels: LoadedKernels,
    context: Context,
}

/// Most bytes of the host's space that are pageable if they cannot be pinned, unless pinning is off.
const MAX_PAGEABLE: Bytes = Bytes(1 << 30);

/// Number of pieces of weights that are on their way to the arena at a time.
const PIECES: u64 = 4;

/// For the tests and measurements of this crate, which force a choice of kernels.
impl CudaDevice {
    /// Opens a GPU whose matmuls use the kernel or algorithm of the given name ([`Self::hopper_tiles`],
    /// [`Self::candidates`]) wherever it supports their form; the name `cuBLASLt` selects the library's fastest
    /// algorithm, whose bits may differ from the canonical ones.
    #[doc(hidden)]
    pub fn with_matmul(ordinal: usize, name: &str) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Named(name.to_owned()), Options::default())
    }

    /// Opens a GPU that times every candidate of a matmul and compares its result with the canonical kernel; see
    /// [`Self::candidates`].
    #[doc(hidden)]
    pub fn surveying(ordinal: usize) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Surveyed, Options::default())
    }

    /// All candidates of the matmuls prepared so far, on a device opened by [`Self::surveying`].
    #[doc(hidden)]
    pub fn candidates(&self) -> &[GemmCandidate] {
        self.gemm.candidates()
    }

    /// Names of our own Hopper matmul kernels, as accepted by [`Self::with_matmul`].
    #[doc(hidden)]
    pub fn hopper_tiles() -> Vec<&'static str> {
        gemm::hopper_tiles()
    }

    /// Names of our own Hopper kernels of matmuls with a layer norm in front, as accepted by [`Self::with_matmul`].
    #[doc(hidden)]
    pub fn hopper_norm_tiles() -> Vec<&'static str> {
        gemm::hopper_norm_tiles()
    }
}

impl CudaDevice {
    /// Opens a GPU with default options: creates a context, allocates no arena.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        Self::with(ordinal, Options::default())
    }

    /// Opens a GPU with the given options.
    pub fn with(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Timed, options)
    }

    /// Opens a GPU without timing matmuls: each one uses the first kernel of its canonical summation order instead of
    /// the fastest. The cache of choices is neither read nor written.
    pub fn without_timing(ordinal: usize) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::First, Options::default())
    }

    fn open(ordinal: usize, choosing: Choosing, options: Options) -> Result<Self, CudaError> {
        let context = Context::new(ordinal, options.streams)?;
        let gemm = Gemm::new(&context, choosing)?;
        let kernels = LoadedKernels::new(&context, options.depth)?;
        Ok(Self {
            options,
            file: None,
            host: None,
            arena: None,
            staging: None,
            events: Arc::new([]),
            words: vec![],
            since: 0,
            graphs: Graphs::default(),
            gemm,
            kernels,
            context,
        })
    }

    /// Properties of the GPU.
    pub fn card(&self) -> &Card {
        &self.context.card
    }

    /// Returns (free, total) device memory, counting all processes.
    pub fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        self.context.enter()?;
        self.context.memory()
    }

    /// Returns a line for each prepared matmul: output and input columns, element type, bias, residual, and the name
    /// of our kernel or of the library's algorithm that computes it.
    pub fn matmul_kernels(&self) -> Vec<String> {
        self.gemm.choices()
    }

    fn arena(&self) -> Result<&DeviceArena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    /// Prepares or runs the kernels of a launch; both take the same code path, so that a run needs nothing unprepared.
    fn call(&mut self, launch: &Launch<'_>, preparing: bool) -> Result<(), DeviceError> {
        self.context.enter()?;
        let arena = self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })?;
        let Self { context, kernels, gemm, .. } = self;
        context.trace.of_op(launch.op.name());
        launch::run(&mut OpLaunch { context, arena, kernels, gemm, launch, preparing })
    }

    /// Waits for all streams and returns the error that kernels reported in a status word, if any.
    fn finish(&self) -> Result<(), CudaError> {
        self.context.synchronize()?;
        refused(self.kernels.status.take_any())
    }

    /// Copies from the caller's memory to the arena in the copy stream, and makes later kernels wait for the copy. The bytes
    /// pass through pinned memory; without it, or if it is too small, they are copied from the caller's memory and the call
    /// waits.
    fn send(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.arena()?.range(at, Bytes(bytes.len() as u64))?;
        let Self { context, staging, .. } = self;
        let api = context.api;
        let stream = context.inward;
        let place = staging.as_mut().map(|staging| staging.wait_and_take(bytes.len())).transpose()?.flatten();
        let (from, event) = match place {
            Some((pinned, event)) => {
                pinned.copy_from_slice(bytes);
                (pinned.as_ptr(), Some(event))
            }
            None => (bytes.as_ptr(), None),
        };
        let copy = || {
            // SAFETY: the range is inside the arena; pinned memory is reserved until the event, and the call waits for
            // the stream before the caller's memory can change. It must wait even if a copy of pageable memory usually
            // returns after staging: a GPU that can access all host memory may still be reading.
            let code = unsafe { (api.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes.len(), stream) };
            api.check("cuMemcpyHtoDAsync", code)
        };
        context.trace.span(
            StreamTrack::In,
            stream,
            || format!("copy in, {}", Bytes(bytes.len() as u64)),
            copy,
        )?;
        event.map_or_else(|| context.wait_for(stream), |event| event.record(stream))?;
        Ok(context.order(stream, context.stream)?)
    }

    /// The host's space; `at` is the position that needs it.
    fn host(&self, at: Location) -> Result<&HostSpace, DeviceError> {
        self.host.as_ref().ok_or(DeviceError::NoSpace { at })
    }

    /// The queues of the scratch file; `at` is the position that needs them.
    fn file(&self, at: Location) -> Result<&FileQueues, DeviceError> {
        self.file.as_ref().ok_or(DeviceError::NoSpace { at })
    }

    /// The event of a transfer.
    fn event(&self, transfer: &Transfer) -> Result<&CudaEvent, DeviceError> {
        self.events.get(transfer.id).ok_or_else(|| DeviceError::Kernel {
            op: "move",
            why: format!("transfer {} is unknown", transfer.id),
        })
    }

    /// Enqueues the copy of a transfer within the arena, among the launches.
    fn copy_in_arena(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let Transfer { from, to, bytes, .. } = *transfer;
        if (from.space, to.space) != (Space::Device, Space::Device) {
            return Err(DeviceError::NoSpace { at: from });
        }
        let [from, to] = [self.arena()?.range(from.at, bytes)?, self.arena()?.range(to.at, bytes)?];
        let api = self.context.api;
        let stream = self.context.stream;
        let copy = || {
            // SAFETY: both ranges are inside the arena.
            let code = unsafe { (api.cuMemcpyDtoDAsync_v2)(to, from, bytes.0 as usize, stream) };
            api.check("cuMemcpyDtoDAsync", code)
        };
        Ok(self.context.trace.span(StreamTrack::Compute, stream, || format!("copy, {bytes}"), copy)?)
    }

    /// Unmaps memory that was mapped for a larger arena than the current one. Returns the number of bytes.
    #[doc(hidden)]
    pub fn trim(&mut self) -> Result<Bytes, DeviceError> {
        // Synchronising is expensive, so only if there is memory to give back.
        if self.arena.as_ref().is_none_or(|arena| arena.spare() == Bytes::ZERO) {
            return Ok(Bytes::ZERO);
        }
        self.context.enter()?;
        self.context.synchronize()?;
        self.graphs.given_back();
        Ok(self.arena.as_mut().map_or(Bytes::ZERO, DeviceArena::trim))
    }

    /// Pinned memory for uploads to the arena; `None` if pinning is off or, where it is not demanded, fails.
    fn upload_staging(&self) -> Result<Option<StagingBuffer>, CudaError> {
        if self.options.pinned == Some(false) {
            return Ok(None);
        }
        let buffer = StagingBuffer::new(self.context.api, Bytes(PIECES * PIECE * DType::F32.size()));
        if self.options.pinned == Some(true) { buffer.map(Some) } else { Ok(buffer.ok()) }
    }

    /// Allocates the host's space: pinned memory, or pageable memory if pinning is off. Where pinning is not demanded and
    /// fails, at most [`MAX_PAGEABLE`] is pageable, and each step waits for its copies. Failing to pin more is an error, because
    /// copies of offloaded states or streamed weights would then take most of the time.
    fn host_memory(&self, bytes: Bytes) -> Result<Option<HostSpace>, DeviceError> {
        if bytes == Bytes::ZERO {
            return Ok(None);
        }
        if self.options.pinned == Some(false) {
            return Ok(Some(HostSpace::pageable(bytes)?));
        }
        let pinned = HostSpace::pinned(self.context.api, bytes);
        if pinned.is_err() && self.options.pinned.is_none() && bytes <= MAX_PAGEABLE {
            return Ok(Some(HostSpace::pageable(bytes)?));
        }
        Ok(Some(pinned?))
    }

    /// Starts the queues of a scratch file. A copy waits for the event that its start has recorded behind all launches.
    fn file_queues(&self, memory: &Allocation<'_>) -> Result<Option<FileQueues>, DeviceError> {
        if memory.file == Bytes::ZERO {
            return Ok(None);
        }
        let file = ScratchFile::create(memory.folder, memory.file)?;
        let events = Arc::clone(&self.events);
        let current = self.context.current();
        let before = move |id: usize| {
            current.enter()?;
            Ok(events[id].wait()?)
        };
        Ok(Some(FileQueues::start(file, memory.transfers, Arc::new(before))?))
    }

    /// Enqueues the copy of a transfer between the arena and host memory in the stream of its queue, and its event behind
    /// it. The call waits for the copy if the memory is not pinned.
    fn copy_to_or_from_host(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let Transfer { from, to, bytes, order, .. } = *transfer;
        let context = &self.context;
        let is_in = to.space == Space::Device;
        let (in_arena, in_host) = if is_in { (to, from) } else { (from, to) };
        let device = self.arena()?.range(in_arena.at, bytes)?;
        let host = self.host(in_host)?;
        let start = host.range(in_host.at, bytes)?;
        let (stream, track) =
            if is_in { (context.inward, StreamTrack::In) } else { (context.outward, StreamTrack::Out) };
        if order == TransferOrder::AfterLaunches {
            context.order(context.stream, stream)?;
        }
        let api = context.api;
        let copy = || {
            // SAFETY: both ranges are inside their memory. The plan was checked: until the transfer is waited for, nothing
            // touches its destination or writes its operand.
            unsafe {
                if is_in {
                    let code = (api.cuMemcpyHtoDAsync_v2)(device, start.cast(), bytes.0 as usize, stream);
                    api.check("cuMemcpyHtoDAsync", code)
                } else {
                    let code = (api.cuMemcpyDtoHAsync_v2)(start.cast(), device, bytes.0 as usize, stream);
                    api.check("cuMemcpyDtoHAsync", code)
                }
            }
        };
        context.trace.span(track, stream, || format!("copy {}, {bytes}", track.name()), copy)?;
        self.event(transfer)?.record(stream)?;
        if !host.is_pinned() {
            context.wait_for(stream)?;
        }
        Ok(())
    }

    /// Gives the copy of a transfer between the scratch file and host memory to a thread, behind all launches so far.
    fn copy_to_or_from_file(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let Transfer { id, from, to, bytes, .. } = *transfer;
        let (direction, in_file, in_host) = match (from.space, to.space) {
            (Space::File, Space::Host) => (FileCopy::Read, from, to),
            (Space::Host, Space::File) => (FileCopy::Write, to, from),
            (Space::Device | Space::File, _) | (Space::Host, Space::Device | Space::Host) => {
                return Err(DeviceError::NoSpace { at: to });
            }
        };
        let memory = self.host(in_host)?.range(in_host.at, bytes)?;
        self.event(transfer)?.record(self.context.stream)?;
        // SAFETY: the queues are dropped before the host's memory. The plan was checked: until the transfer is waited for,
        // nothing touches its destination or writes its operand.
        unsafe { self.file(in_file)?.enqueue(id, direction, in_file.at, memory, bytes) }
    }
}

/// Enqueues a copy from the device to `out` in a stream. The caller must wait for the stream before it reads `out` or
/// lets it go.
fn receive(context: &Context, from: u64, out: &mut [u8], stream: cu::CUstream) -> Result<(), CudaError> {
    let api = context.api;
    let bytes = Bytes(out.len() as u64);
    let copy = || {
        // SAFETY: `from` is a range inside the arena, as long as `out`.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(out.as_mut_ptr().cast(), from, out.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)
    };
    context.trace.span(StreamTrack::Out, stream, || format!("copy out, {bytes}"), copy)
}

/// Converts the code in a status word to an error.
fn refused(code: u32) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        code => Err(CudaError::Data { what: launch::refusal(code) }),
    }
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let Card { ordinal, name, capability: (major, minor), .. } = &self.context.card;
        DeviceInfo {
            name: format!("cuda:{ordinal} ({name}, compute capability {major}.{minor})"),
            kernels: plimsoll_plan::Kernels::Cuda(Capability(*major, *minor)),
            workers: 1,
            depth: self.options.depth.max(1),
            takes_weights: true,
            arithmetic: gemm::arithmetic(&self.context.card),
            matmul_provider: self.gemm.kernel_summary(),
        }
    }

    fn allocate(&mut self, memory: &Allocation<'_>) -> Result<(), DeviceError> {
        if !memory.borders.is_empty() && !self.options.expandable {
            let why = format!(
                "memory.dynamic and {} need expandable segments; remove the flag that turns them off",
                Setting::Dynamic
            );
            return Err(DeviceError::Kernel { op: "allocate", why });
        }
        self.context.enter()?;
        // Enqueued work may still use the old memory.
        self.context.synchronize()?;
        self.graphs.clear(&self.context);
        // The old memory of the host is given back before the new one is taken.
        self.file = None;
        self.host = None;
        self.events = (0..memory.transfers)
            .map(|_| CudaEvent::new(self.context.api))
            .collect::<Result<Vec<_>, _>>()?
            .into();
        self.words = vec![0; memory.transfers];
        if self.staging.is_none() {
            self.staging = self.upload_staging()?;
        }
        self.host = self.host_memory(memory.host)?;
        self.file = self.file_queues(memory)?;
        match &mut self.arena {
            Some(arena) => arena.resize(memory.arena, memory.borders),
            None => {
                let expandable = self.options.expandable;
                self.arena = Some(DeviceArena::new(&self.context, memory.arena, memory.borders, expandable)?);
                Ok(())
            }
        }
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        // Enqueued work, and copies in other streams, may still use the memory that is given back.
        self.context.synchronize()?;
        // Captured copies refer to the mapping, not only to its address.
        self.graphs.clear(&self.context);
        let arena = self.arena.as_mut().ok_or(DeviceError::OutsideArena { at: 0, bytes })?;
        arena.set_mapped(bytes)
    }

    fn prepare(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.graphs.clear(&self.context);
        // The launches pass through the same code twice: first their kernels are only collected, so that several threads
        // can compile them, then they are prepared one after the other.
        self.kernels.collect();
        let collected = launches.iter().try_for_each(|launch| self.call(launch, true));
        self.kernels.compile_collected(report);
        collected?;
        let total = launches.len() as u64;
        for (done, launch) in (1..).zip(launches) {
            self.call(launch, true)?;
            report(StartProgress { stage: StartStage::Prepare, done, total });
        }
        self.kernels.drop_compiled();
        Ok(())
    }

    fn upload(&mut self, to: Location, bytes: &[u8]) -> Result<(), DeviceError> {
        match to.space {
            Space::Device => {
                self.context.enter()?;
                // Launches that were enqueued before may still read what the copy overwrites.
                self.context.order(self.context.stream, self.context.inward)?;
                self.send(to.at, bytes)
            }
            Space::Host => self.host(to)?.write(to.at, bytes),
            Space::File => self.file(to)?.file().write(to.at, bytes),
        }
    }

    fn download(&mut self, from: Location, out: &mut [u8]) -> Result<(), DeviceError> {
        match from.space {
            Space::Device => {
                self.context.enter()?;
                let at = self.arena()?.range(from.at, Bytes(out.len() as u64))?;
                receive(&self.context, at, out, self.context.stream)?;
                Ok(self.finish()?)
            }
            Space::Host => self.host(from)?.read(from.at, out),
            Space::File => self.file(from)?.file().read(from.at, out),
        }
    }

    fn fill(&mut self, at: Location, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        match at.space {
            Space::Device => {
                self.context.enter()?;
                let to = self.arena()?.range(at.at, bytes)?;
                let api = self.context.api;
                // SAFETY: the range is inside the arena.
                let code = unsafe { (api.cuMemsetD8Async)(to, byte, bytes.0 as usize, self.context.stream) };
                Ok(api.check("cuMemsetD8Async", code)?)
            }
            Space::Host => self.host(at)?.fill(at.at, bytes, byte),
            Space::File => self.file(at)?.file().fill(at.at, bytes, byte),
        }
    }

    fn begin_step(&mut self) -> Result<Bytes, DeviceError> {
        self.kernels.status.advance();
        self.since += 1;
        let interval = self.options.cache_clear_interval;
        if interval == 0 || self.since < interval {
            return Ok(Bytes::ZERO);
        }
        self.since = 0;
        self.trim()
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.call(launch, false)
    }

    fn start(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        self.context.enter()?;
        if let Some(word) = self.words.get_mut(transfer.id) {
            *word = self.kernels.status.current();
        }
        match transfer.queue() {
            Queue::Compute => self.copy_in_arena(transfer),
            Queue::In | Queue::Out => self.copy_to_or_from_host(transfer),
            Queue::Read | Queue::Write => self.copy_to_or_from_file(transfer),
        }
    }

    fn wait_for(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        match transfer.queue() {
            Queue::Compute => Ok(()),
            Queue::In | Queue::Out => {
                self.context.enter()?;
                Ok(self.event(transfer)?.before(self.context.stream)?)
            }
            Queue::Read | Queue::Write => self.file(transfer.from)?.wait_for(transfer.id),
        }
    }

    fn complete(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        self.context.enter()?;
        match transfer.queue() {
            Queue::Compute => return self.synchronize(),
            Queue::In | Queue::Out => self.event(transfer)?.wait()?,
            Queue::Read | Queue::Write => self.file(transfer.from)?.wait_for(transfer.id)?,
        }
        Ok(refused(self.kernels.status.take(self.words[transfer.id]))?)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.context.enter()?;
        let finished = self.finish();
        // Also after a step that was refused: no copy may run when this call returns.
        let copied = self.file.as_ref().map_or(Ok(()), FileQueues::wait_for_all);
        finished?;
        copied
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        Some(self)
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self
    }
}

impl Recorder for CudaDevice {
    fn begin(&mut self, plan: usize, counts: Counts) -> Result<GraphCapture, DeviceError> {
        self.context.enter()?;
        if self.context.trace.is_on() {
            return Ok(GraphCapture::Plain);
        }
        Ok(self.graphs.repeat(&self.context, (plan, counts, self.kernels.status.current()))?)
    }

    fn end(&mut self, complete: bool) -> Result<GraphCapture, DeviceError> {
        self.context.enter()?;
        Ok(self.graphs.recorded(&self.context, complete)?)
    }

    fn note(&mut self) -> Option<String> {
        self.graphs.note()
    }
}

impl Tracer for CudaDevice {
    fn mark(&mut self, n: usize) -> Result<bool, DeviceError> {
        self.context.enter()?;
        Ok(self.context.trace.mark(n, self.context.stream).map(|()| true)?)
    }

    fn marked(&mut self, times: &mut [Duration]) -> Result<(), DeviceError> {
        self.synchronize()?;
        Ok(self.context.trace.marked(times)?)
    }

    fn set(&mut self, on: bool) -> Result<(), DeviceError> {
        self.context.enter()?;
        Ok(self.context.trace.set(on, self.context.stream)?)
    }

    fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        self.context.enter()?;
        self.context.synchronize()?;
        Ok(self.context.trace.take()?)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A failure cannot be handled here; the context's destruction ends all work.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
        self.graphs.clear(&self.context);
        self.kernels.unload(&self.context);
    }
}
