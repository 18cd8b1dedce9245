//! A card as a device: an arena of its memory, one stream, and the kernel of each op. Invariant: operands come from a
//! checked plan; token ids and spans come from outside, and what a kernel refuses of them is an error of the next
//! download.

use crate::arena::Arena;
use crate::context::{Card, Context};
use crate::gemm::{self, Choosing, Gemm};
use crate::kernel::Kernels;
use crate::launch::{self, Call};
use crate::{CudaError, Libraries};
use exec::{Device, DeviceError, Launch, Span, Ticket};
use graph::Bytes;
use plan::{KernelRow, Target};
use std::collections::VecDeque;

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
        Self { streams: true, pinned: None, depth: 2, expandable: true, cache_clear_interval: 100 }
    }
}

/// Kernels on one card.
pub struct CudaDevice {
    options: Options,
    arena: Option<Arena>,
    /// Ranges that were asked for and not yet collected, oldest first, with the number of the next.
    open: VecDeque<(u64, Bytes)>,
    next: u64,
    gemm: Gemm,
    kernels: Kernels,
    context: Context,
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

    /// The same, where products are computed by the library's first choice instead of the one that was timed to be the
    /// fastest: nothing is read from the disk or kept there.
    pub fn without_timing(ordinal: usize) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::First, Options::default())
    }

    /// The same, where products are computed by our own kernel in one of its forms, wherever that can, or by the fastest
    /// of `cuBLASLt`: for tests and measurements.
    pub fn with_product(ordinal: usize, name: &str) -> Result<Self, CudaError> {
        Self::open(ordinal, Choosing::Named(name.to_owned()), Options::default())
    }

    fn open(ordinal: usize, choosing: Choosing, options: Options) -> Result<Self, CudaError> {
        let context = Context::new(ordinal)?;
        let (gemm, kernels) = (Gemm::new(&context, choosing)?, Kernels::new(&context)?);
        Ok(Self { options, arena: None, open: VecDeque::new(), next: 0, gemm, kernels, context })
    }

    /// The names that [`Self::with_product`] knows.
    pub fn own_products() -> Vec<&'static str> {
        gemm::own_products()
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
    /// bias, residual, and `own` for our kernel or else the library's algorithm.
    pub fn products(&self) -> Vec<String> {
        self.gemm.choices()
    }

    /// A digest of [`Self::products`] and the library's version, for the run record: equal ones on one kind of card give
    /// equal bits.
    pub fn calibration(&self) -> String {
        self.gemm.digest()
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn call(&mut self, launch: &Launch<'_>, preparing: bool) -> Result<(), DeviceError> {
        self.context.enter()?;
        let arena = self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })?;
        let Self { context, kernels, gemm, .. } = self;
        launch::run(&mut Call { context, arena, kernels, gemm, launch, preparing })
    }

    /// Waits for the stream, and for what kernels said of their data.
    fn finish(&self) -> Result<(), CudaError> {
        self.context.synchronize()?;
        match self.kernels.status.take() {
            0 => Ok(()),
            code => Err(CudaError::Data { what: launch::refusal(code) }),
        }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let Card { ordinal, name, capability: (major, minor), .. } = &self.context.card;
        format!("cuda:{ordinal} ({name}, compute capability {major}.{minor})")
    }

    fn kernels(&self) -> Vec<KernelRow> {
        Target::named("cuda").map(|target| target.kernels).unwrap_or_default()
    }

    fn units(&self) -> u64 {
        1
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.arena = None;
        self.arena = Some(Arena::new(&self.context, bytes)?);
        Ok(())
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.call(launch, true)
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let to = self.arena()?.range(at, Bytes(bytes.len() as u64))?;
        let (api, stream) = (self.context.api, self.context.stream);
        // SAFETY: the range is inside of the arena; pageable memory is read before the call returns.
        let code = unsafe { (api.cuMemcpyHtoDAsync_v2)(to, bytes.as_ptr().cast(), bytes.len(), stream) };
        Ok(api.check("cuMemcpyHtoDAsync", code)?)
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let from = self.arena()?.range(at, Bytes(out.len() as u64))?;
        let (api, stream) = (self.context.api, self.context.stream);
        // SAFETY: the range is inside of the arena, and the stream is waited for before `out` is used.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(out.as_mut_ptr().cast(), from, out.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)?;
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
        // SAFETY: both ranges are inside of the arena.
        let code = unsafe { (api.cuMemcpyDtoDAsync_v2)(to, from, bytes.0 as usize, stream) };
        Ok(api.check("cuMemcpyDtoDAsync", code)?)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.call(launch, false)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.context.enter()?;
        Ok(self.finish()?)
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.arena()?.range(at, bytes)?;
        self.open.push_back((at, bytes));
        self.next += 1;
        Ok(Ticket(self.next - 1))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        let oldest = self.next - self.open.len() as u64;
        let open = self.open.front().filter(|(_, b)| ticket.0 == oldest && b.0 == out.len() as u64);
        let &(at, _) = open.ok_or_else(|| ticket.refused(oldest))?;
        self.open.pop_front();
        self.download(at, out)
    }

    fn depth(&self) -> usize {
        self.options.depth
    }

    fn trace(&mut self, _: bool) -> Result<(), DeviceError> {
        Ok(())
    }

    fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        Ok(vec![])
    }

    fn arithmetic(&self) -> String {
        let Card { capability: (major, minor), driver, .. } = self.context.card;
        let (versions, products) = (Libraries::get().versions(), self.calibration());
        format!("sm_{major}{minor}, driver {driver}, {versions}, products {products}")
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        Ok(Bytes::ZERO)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // What cannot be waited for is gone with the context.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
        self.kernels.unload(&self.context);
    }
}
