//! A card as a device: an arena of its memory, three streams, and the kernel of each op. Invariant: what was asked for
//! later finds what was asked for earlier done, whatever runs beside it. Operands come from a checked plan; token ids and
//! spans come from outside, and what a kernel refuses of them is an error of its step's results.

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
use exec::{Device, DeviceError, Launch, Recorder, Repeat, Span, Ticket, Tracer};
use graph::{Bytes, Counts};
use plan::{Capability, OPEN_STEPS};
use std::collections::VecDeque;
use std::time::Duration;

/// How a card is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether copies run beside kernels, in streams of their own.
    pub streams: bool,
    /// Whether host memory that copies pass through is pinned; `None` is where free memory allows it.
    pub pinned: Option<bool>,
    /// Steps that may be open at a time.
    pub depth: usize,
    /// Whether the arena can grow in place.
    pub expandable: bool,
    /// Steps between two looks for memory to give back; 0 is never.
    pub cache_clear_interval: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { streams: true, pinned: None, depth: OPEN_STEPS, expandable: true, cache_clear_interval: 100 }
    }
}

/// Kernels on one card.
pub struct CudaDevice {
    options: Options,
    arena: Option<Arena>,
    /// Pinned memory for what comes and for what goes; none where copies use the caller's.
    ways: [Option<Staging>; 2],
    /// Ranges that are on their way to the host, oldest first.
    fetched: VecDeque<Fetched>,
    /// Events of those that were collected.
    spare: Vec<Event>,
    /// The number of the next.
    next: u64,
    /// Whether a range was asked for since the last launch: the next begins another step.
    asked: bool,
    graphs: Graphs,
    gemm: Gemm,
    kernels: Kernels,
    context: Context,
}

/// A range that is on its way.
struct Fetched {
    at: u64,
    bytes: Bytes,
    /// The status word of its step.
    word: usize,
    /// Where it is not in pinned memory: behind the step. It is copied when it is collected, since a copy to memory that
    /// is not pinned would hold the host until the step is over.
    done: Option<Event>,
}

impl CudaDevice {
    /// Takes a card: its context is made, nothing else is allocated.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        Self::with(ordinal, Options::default())
    }

    /// The same, used so.
    pub fn with(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Timed, options)
    }

    /// The same, where products are computed by the first kernel of their canonical order instead of the one that was timed
    /// to be the fastest: nothing is read from the disk or kept there.
    pub fn without_timing(ordinal: usize) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::First, Options::default())
    }

    /// The same, where products are computed by the kernel or algorithm of a name ([`Self::own_products`],
    /// [`Self::candidates`]), wherever it computes their form, or by the fastest of `cuBLASLt`, whose bits may be others: for
    /// tests and measurements.
    pub fn with_product(ordinal: usize, name: &str) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Named(name.to_owned()), Options::default())
    }

    /// The same, where every candidate of a product is timed and compared with the canonical kernel; see
    /// [`Self::candidates`].
    pub fn surveying(ordinal: usize) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Surveyed, Options::default())
    }

    /// All candidates of the products that were prepared on a device that surveys them.
    pub fn candidates(&self) -> &[Candidate] {
        self.gemm.candidates()
    }

    /// The names of our own kernels on Hopper that [`Self::with_product`] knows.
    pub fn own_products() -> Vec<&'static str> {
        gemm::own_products()
    }

    /// The same of products with a layer norm in front.
    pub fn own_norms() -> Vec<&'static str> {
        gemm::own_norms()
    }

    fn open(ordinal: usize, choosing: Choosing, options: Options) -> Result<Self, CudaError> {
        let context = Context::new(ordinal, options.streams)?;
        let (gemm, kernels) = (Gemm::new(&context, choosing)?, Kernels::new(&context, options.depth)?);
        let (fetched, graphs) = (VecDeque::new(), Graphs::default());
        Ok(Self {
            options,
            arena: None,
            ways: [None, None],
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

    /// What it is.
    pub fn card(&self) -> &Card {
        &self.context.card
    }

    /// (free, total) of the card's memory, all processes counted.
    pub fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        self.context.enter()?;
        self.context.memory()
    }

    /// What computes each product that was prepared, as lines: columns of the output and of the input, element type,
    /// bias, residual, and the name of our kernel or else the library's algorithm.
    pub fn products(&self) -> Vec<String> {
        self.gemm.choices()
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn call(&mut self, launch: &Launch<'_>, preparing: bool) -> Result<(), DeviceError> {
        self.context.enter()?;
        let arena = self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })?;
        let Self { context, kernels, gemm, .. } = self;
        context.trace.of_op(launch.op.name());
        launch::run(&mut Call { context, arena, kernels, gemm, launch, preparing })
    }

    /// The first launch behind a range that was asked for begins another step, with a status word of its own.
    fn begin(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.kernels.status.advance();
        }
    }

    /// Waits for the streams, and for what kernels said of their data.
    fn finish(&self) -> Result<(), CudaError> {
        self.context.synchronize()?;
        refused(self.kernels.status.take_any())
    }

    /// Host to arena in the stream for what comes; kernels that are put behind it find it there. Through pinned memory,
    /// unless there is none or it is small: then the bytes are the caller's, and the copy is waited for.
    fn send(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.arena()?.range(at, Bytes(bytes.len() as u64))?;
        let Self { context, ways: [inward, _], .. } = self;
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
            // SAFETY: the range is inside of the arena; pinned memory is kept until the event, and other memory until the
            // stream was waited for, since a card that reads all of the host's memory may still be reading.
            let code = unsafe { (api.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes.len(), stream) };
            api.check("cuMemcpyHtoDAsync", code)
        };
        context.trace.span(Track::In, stream, || format!("copy in, {}", Bytes(bytes.len() as u64)), copy)?;
        event.map_or_else(|| context.wait_for(stream), |event| event.record(stream))?;
        Ok(context.order(stream, context.stream)?)
    }

    /// The host's memory of one way: none where there is nothing to hold, or pinning is not wanted or not affordable.
    fn pinned(&self, bytes: Bytes) -> Result<Option<Staging>, CudaError> {
        let wanted = match self.options.pinned {
            Some(wanted) => wanted,
            // What is free in a container, where it limits this process.
            None => affordable(bytes, exec::memory::available().free),
        };
        match wanted && bytes > Bytes::ZERO {
            true => Ok(Some(Staging::new(self.context.api, bytes)?)),
            false => Ok(None),
        }
    }
}

/// Arena to host in a stream. The caller waits for the stream before `out` is used or given back.
fn receive(context: &Context, from: u64, out: &mut [u8], stream: cu::CUstream) -> Result<(), CudaError> {
    let (api, bytes) = (context.api, Bytes(out.len() as u64));
    let copy = || {
        // SAFETY: `from` is a range of the arena that is as long as `out`.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(out.as_mut_ptr().cast(), from, out.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)
    };
    context.trace.span(Track::Out, stream, || format!("copy out, {bytes}"), copy)
}

/// What a status word says.
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

    fn kernels(&self) -> plan::Kernels {
        let (major, minor) = self.context.card.capability;
        plan::Kernels::Cuda(Capability(major, minor))
    }

    fn units(&self) -> u64 {
        1
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        // What runs may still use the one that there is.
        self.context.synchronize()?;
        self.graphs.clear(&self.context);
        match &mut self.arena {
            Some(arena) => arena.resize(bytes),
            None => {
                self.arena = Some(Arena::new(&self.context, bytes, self.options.expandable)?);
                Ok(())
            }
        }
    }

    fn stage(&mut self, [inward, outward]: [Bytes; 2]) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.context.synchronize()?;
        self.ways = [None, None];
        self.ways = [self.pinned(inward)?, self.pinned(outward)?];
        Ok(())
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.graphs.clear(&self.context);
        self.call(launch, true)
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
        // SAFETY: the range is inside of the arena.
        let code = unsafe { (api.cuMemsetD8Async)(to, byte, bytes.0 as usize, stream) };
        Ok(api.check("cuMemsetD8Async", code)?)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        let (from, to) = (self.arena()?.range(from, bytes)?, self.arena()?.range(to, bytes)?);
        let (api, stream) = (self.context.api, self.context.stream);
        let copy = || {
            // SAFETY: both ranges are inside of the arena.
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
        let Self { context, ways: [_, outward], fetched, spare, kernels, .. } = self;
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
        match (done, &mut self.ways[1]) {
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

    fn takes_weights(&self) -> bool {
        true
    }

    fn arithmetic(&self) -> String {
        machine::arithmetic(&self.context.card)
    }

    fn products_by(&self) -> Option<String> {
        self.gemm.by()
    }

    fn clear_interval(&self) -> u64 {
        self.options.cache_clear_interval
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        // Waiting costs: only where there is something to give back.
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
    fn begin(&mut self, plan: usize, counts: Counts) -> Result<Repeat, DeviceError> {
        self.context.enter()?;
        self.begin();
        if self.context.trace.is_on() {
            return Ok(Repeat::Plain);
        }
        Ok(self.graphs.repeat(&self.context, (plan, counts, self.kernels.status.current()))?)
    }

    fn end(&mut self, whole: bool) -> Result<Repeat, DeviceError> {
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
        // What cannot be waited for is gone with the context.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
        self.graphs.clear(&self.context);
        self.kernels.unload(&self.context);
    }
}
