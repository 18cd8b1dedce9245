//! The CUDA device: an arena of GPU memory, three streams, and the kernels of each op. Invariant: operations take
//! effect in the order of the calls, even where streams overlap. Operands come from a checked plan; token ids and
//! spans are input data, and values that a kernel rejects are an error of the step's results.

use crate::arena::Arena;
use crate::context::{Card, Context};
use crate::event::Event;
use crate::gemm::{self, Candidate, Choosing, Gemm};
use crate::graphs::Graphs;
use crate::kernel::Kernels;
use crate::launch::{self, Call};
use crate::staging::{Staging, affordable};
use crate::trace::Track;
use crate::{CudaError, machine};
use cudarc::driver::sys as cu;
use plimsoll_exec::{
    Device, DeviceError, GraphCapture, Launch, OnStart, Recorder, Span, StartProgress, StartStage, Ticket,
    Tracer,
};
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Capability, PIPELINE_DEPTH};
use std::collections::VecDeque;
use std::time::Duration;

/// Options of a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether copies use streams of their own, so that they overlap with kernels.
    pub streams: bool,
    /// Whether host memory for copies is pinned; `None` decides by the free host memory.
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
    /// Sizes to which the arena will be changed.
    borders: Vec<Bytes>,
    arena: Option<Arena>,
    /// Pinned buffers for host-to-device and device-to-host copies; `None` where copies use the caller's memory.
    staging: [Option<Staging>; 2],
    /// Device-to-host copies that were requested and not collected, oldest first.
    fetched: VecDeque<Fetched>,
    /// Events of collected copies, for reuse.
    spare: Vec<Event>,
    /// Ticket number of the next requested copy.
    next: u64,
    /// Whether a copy was requested since the last launch, so that the next launch belongs to another step.
    asked: bool,
    graphs: Graphs,
    gemm: Gemm,
    kernels: Kernels,
    context: Context,
}

/// A device-to-host copy that was requested and not collected.
struct Fetched {
    at: u64,
    bytes: Bytes,
    /// Index of the status word of its step.
    word: usize,
    /// Without pinned memory: the event behind the step. The copy is then made when it is collected, since an
    /// asynchronous copy to memory that is not pinned would block the host until the step has completed.
    done: Option<Event>,
}

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
    pub fn candidates(&self) -> &[Candidate] {
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
        let (gemm, kernels) = (Gemm::new(&context, choosing)?, Kernels::new(&context, options.depth)?);
        let (fetched, graphs) = (VecDeque::new(), Graphs::default());
        Ok(Self {
            options,
            arena: None,
            borders: vec![],
            staging: [None, None],
            fetched,
            spare: vec![],
            next: 0,
            asked: false,
            graphs,
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

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    /// Prepares or runs the kernels of a launch; both take the same code path, so that a run needs nothing unprepared.
    fn call(&mut self, launch: &Launch<'_>, preparing: bool) -> Result<(), DeviceError> {
        self.context.enter()?;
        let arena = self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })?;
        let Self { context, kernels, gemm, .. } = self;
        context.trace.of_op(launch.op.name());
        launch::run(&mut Call { context, arena, kernels, gemm, launch, preparing })
    }

    /// Switches to the next status word if a copy was requested since the last launch: another step begins.
    fn begin(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.kernels.status.advance();
        }
    }

    /// Waits for all streams and returns the error that kernels reported in a status word, if any.
    fn finish(&self) -> Result<(), CudaError> {
        self.context.synchronize()?;
        refused(self.kernels.status.take_any())
    }

    /// Copies from the host to the arena in the copy stream, and makes later kernels wait for the copy. The bytes pass
    /// through pinned memory; without it, or if it is too small, they are copied from the caller's memory and the call
    /// waits.
    fn send(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.arena()?.range(at, Bytes(bytes.len() as u64))?;
        let Self { context, staging: [inward, _], .. } = self;
        let (api, stream) = (context.api, context.inward);
        let place = inward.as_mut().map(|staging| staging.wait_and_take(bytes.len())).transpose()?.flatten();
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
        context.trace.span(Track::In, stream, || format!("copy in, {}", Bytes(bytes.len() as u64)), copy)?;
        event.map_or_else(|| context.wait_for(stream), |event| event.record(stream))?;
        Ok(context.order(stream, context.stream)?)
    }

    /// Allocates pinned memory for copies in one direction; `None` if there are no bytes, or pinning is off or not
    /// affordable.
    fn pinned(&self, bytes: Bytes) -> Result<Option<Staging>, CudaError> {
        let wanted = match self.options.pinned {
            Some(wanted) => wanted,
            // Inside a container, the free memory under the container's limit.
            None => affordable(bytes, plimsoll_exec::memory::available().free),
        };
        match wanted && bytes > Bytes::ZERO {
            true => Ok(Some(Staging::new(self.context.api, bytes)?)),
            false => Ok(None),
        }
    }
}

/// Enqueues a copy from the device to `out` in a stream. The caller must wait for the stream before it reads `out` or
/// lets it go.
fn receive(context: &Context, from: u64, out: &mut [u8], stream: cu::CUstream) -> Result<(), CudaError> {
    let (api, bytes) = (context.api, Bytes(out.len() as u64));
    let copy = || {
        // SAFETY: `from` is a range inside the arena, as long as `out`.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(out.as_mut_ptr().cast(), from, out.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)
    };
    context.trace.span(Track::Out, stream, || format!("copy out, {bytes}"), copy)
}

/// Converts the code in a status word to an error.
fn refused(code: u32) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        code => Err(CudaError::Data { what: launch::refusal(code) }),
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let Card { ordinal, name, capability: (major, minor), .. } = &self.context.card;
        format!("cuda:{ordinal} ({name}, compute capability {major}.{minor})")
    }

    fn kernels(&self) -> plimsoll_plan::Kernels {
        let (major, minor) = self.context.card.capability;
        plimsoll_plan::Kernels::Cuda(Capability(major, minor))
    }

    fn workers(&self) -> u64 {
        1
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        // Enqueued work may still use the old arena.
        self.context.synchronize()?;
        self.graphs.clear(&self.context);
        match &mut self.arena {
            Some(arena) => arena.resize(bytes, &self.borders),
            None => {
                let expandable = self.options.expandable;
                self.arena = Some(Arena::new(&self.context, bytes, &self.borders, expandable)?);
                Ok(())
            }
        }
    }

    fn stage(&mut self, [inward, outward]: [Bytes; 2]) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.context.synchronize()?;
        self.staging = [None, None];
        self.staging = [self.pinned(inward)?, self.pinned(outward)?];
        Ok(())
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.graphs.clear(&self.context);
        self.call(launch, true)
    }

    fn prepare_all(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError> {
        // The launches pass through the same code twice: first their kernels are only collected, so that several threads
        // can compile them, then they are prepared one after the other.
        self.kernels.collect();
        let collected = launches.iter().try_for_each(|launch| self.call(launch, true));
        self.kernels.compile_collected(report);
        collected?;
        let total = launches.len() as u64;
        for (done, launch) in (1..).zip(launches) {
            self.prepare(launch)?;
            report(StartProgress { stage: StartStage::Prepare, done, total });
        }
        self.kernels.drop_compiled();
        Ok(())
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.context.order(self.context.stream, self.context.inward)?;
        self.send(at, bytes)
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.send(at, bytes)
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let from = self.arena()?.range(at, Bytes(out.len() as u64))?;
        receive(&self.context, from, out, self.context.stream)?;
        Ok(self.finish()?)
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.context.enter()?;
        let to = self.arena()?.range(at, bytes)?;
        let (api, stream) = (self.context.api, self.context.stream);
        // SAFETY: the range is inside the arena.
        let code = unsafe { (api.cuMemsetD8Async)(to, byte, bytes.0 as usize, stream) };
        Ok(api.check("cuMemsetD8Async", code)?)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        let (from, to) = (self.arena()?.range(from, bytes)?, self.arena()?.range(to, bytes)?);
        let (api, stream) = (self.context.api, self.context.stream);
        let copy = || {
            // SAFETY: both ranges are inside the arena.
            let code = unsafe { (api.cuMemcpyDtoDAsync_v2)(to, from, bytes.0 as usize, stream) };
            api.check("cuMemcpyDtoDAsync", code)
        };
        Ok(self.context.trace.span(Track::Compute, stream, || format!("copy, {bytes}"), copy)?)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.begin();
        self.call(launch, false)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.context.enter()?;
        Ok(self.finish()?)
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.context.enter()?;
        let from = self.arena()?.range(at, bytes)?;
        let Self { context, staging: [_, outward], fetched, spare, kernels, .. } = self;
        let place = outward.as_mut().map(|staging| staging.take(bytes.0 as usize)).transpose()?.flatten();
        let done = match place {
            Some((pinned, event)) => {
                context.order(context.stream, context.outward)?;
                receive(context, from, pinned, context.outward)?;
                event.record(context.outward)?;
                None
            }
            None => {
                let event = spare.pop().map_or_else(|| Event::new(context.api), Ok)?;
                event.record(context.stream)?;
                Some(event)
            }
        };
        fetched.push_back(Fetched { at, bytes, word: kernels.status.current(), done });
        self.asked = true;
        self.next += 1;
        Ok(Ticket(self.next - 1))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let oldest = self.next - self.fetched.len() as u64;
        let open = self.fetched.front().filter(|f| ticket.0 == oldest && f.bytes.0 == out.len() as u64);
        open.ok_or_else(|| ticket.refused(oldest))?;
        let Some(Fetched { at, bytes, word, done }) = self.fetched.pop_front() else { return Ok(()) };
        match (done, &mut self.staging[1]) {
            (None, Some(staging)) => {
                staging.wait_and_give(|pinned| out.copy_from_slice(&pinned[..out.len()]))?
            }
            (done, _) => {
                done.as_ref().map_or(Ok(()), Event::wait)?;
                self.spare.extend(done);
                let (context, from) = (&self.context, self.arena()?.range(at, bytes)?);
                receive(context, from, out, context.outward)?;
                context.wait_for(context.outward)?;
            }
        }
        Ok(refused(self.kernels.status.take(word))?)
    }

    fn depth(&self) -> usize {
        self.options.depth.max(1)
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        Some(self)
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self
    }

    fn persistent(&mut self, _: Bytes) {}

    fn set_borders(&mut self, borders: &[Bytes]) -> Result<(), DeviceError> {
        if !borders.is_empty() && !self.options.expandable {
            let why =
                "memory.dynamic and --dynamic need expandable segments; remove the flag that turns them off"
                    .to_owned();
            return Err(DeviceError::Kernel { op: "set_borders", why });
        }
        self.borders = borders.to_vec();
        Ok(())
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

    fn takes_weights(&self) -> bool {
        true
    }

    fn arithmetic(&self) -> String {
        machine::arithmetic(&self.context.card)
    }

    fn matmul_provider(&self) -> Option<String> {
        self.gemm.by()
    }

    fn clear_interval(&self) -> u64 {
        self.options.cache_clear_interval
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        // Synchronising is expensive, so only if there is memory to give back.
        if self.arena.as_ref().is_none_or(|arena| arena.spare() == Bytes::ZERO) {
            return Ok(Bytes::ZERO);
        }
        self.context.enter()?;
        self.context.synchronize()?;
        self.graphs.given_back();
        Ok(self.arena.as_mut().map_or(Bytes::ZERO, Arena::trim))
    }
}

impl Recorder for CudaDevice {
    fn begin(&mut self, plan: usize, counts: Counts) -> Result<GraphCapture, DeviceError> {
        self.context.enter()?;
        self.begin();
        if self.context.trace.is_on() {
            return Ok(GraphCapture::Plain);
        }
        Ok(self.graphs.repeat(&self.context, (plan, counts, self.kernels.status.current()))?)
    }

    fn end(&mut self, whole: bool) -> Result<GraphCapture, DeviceError> {
        self.context.enter()?;
        Ok(self.graphs.recorded(&self.context, whole)?)
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
        self.wait()?;
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
