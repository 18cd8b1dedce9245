//! The CPU as an [`exec::Device`]: an arena in host memory, and for each op the kernel that the plan names.
//! Invariant: operands come from a checked plan, so their ranges are inside the arena and overlap only where the op's
//! alias rule allows it. Token ids, spans and packs are user input and are checked at every launch.

use super::operands::Operands;
use super::{Bf16, Cpu, Isa, launch, reduce, widening};
use plimsoll_exec::arena::{Arena, Weights};
use plimsoll_exec::host::{Clock, Fetched};
use plimsoll_exec::{Device, DeviceError, Launch, Recorder, Ticket, Tracer};
use plimsoll_graph::Bytes;
use plimsoll_plan::{CpuKernel, KernelId, Kernels, PlanError, Target};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A device's membership in a group of replicas that divide the host's cores and share their weights.
struct Lane {
    /// Index of this replica; replica 0 writes the weights.
    number: usize,
    /// Number of replicas.
    count: usize,
    /// The shared weights, alive while an arena of any replica uses them.
    weights: Arc<Mutex<Weak<Weights>>>,
    /// Size of the weights, the first bytes of the arena.
    persistent: Bytes,
}

/// A device that runs kernels on the host's cores. Every call is synchronous.
pub struct CpuDevice {
    cpu: Cpu,
    arena: Option<Arena>,
    lane: Option<Lane>,
    fetched: Fetched,
    clock: Clock,
}

impl CpuDevice {
    /// Creates a device with `threads` threads and the best instruction set of this machine. Panics if the operating
    /// system refuses a thread.
    pub fn new(threads: usize) -> Self {
        Self::on(Cpu::new(threads))
    }

    /// As [`CpuDevice::new`], but returns an error if the operating system refuses a thread.
    pub fn open(threads: usize) -> Result<Self, DeviceError> {
        Ok(Self::on(Cpu::start(threads).map_err(|source| DeviceError::Thread { source })?))
    }

    /// As [`CpuDevice::new`], with a given instruction set.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        Self::on(Cpu::with_isa(threads, isa))
    }

    /// The target to plan for: the host CPU with `threads` threads and the instruction set `isa`.
    pub fn target(threads: usize, isa: Isa) -> Result<Target, PlanError> {
        let target = Target::named("cpu")?.with_workers(threads as u64);
        Ok(Target { kernels: Kernels::Cpu(isa.set()), ..target })
    }

    /// Creates `count` replicas of `threads` threads each that share one copy of the weights. Replicas run whole steps
    /// independently of each other, while the threads of one device synchronise after every op.
    pub fn replicas(count: usize, threads: usize) -> Result<Vec<Self>, DeviceError> {
        let weights = Arc::new(Mutex::new(Weak::new()));
        let lane = |number| {
            let weights = Arc::clone(&weights);
            let lane = Lane { number, count, weights, persistent: Bytes::ZERO };
            Ok(Self { lane: Some(lane), ..Self::open(threads)? })
        };
        (0..count).map(lane).collect()
    }

    /// A device without an arena.
    fn on(cpu: Cpu) -> Self {
        Self { cpu, arena: None, lane: None, fetched: Fetched::default(), clock: Clock::default() }
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn arena_mut(&mut self) -> Result<&mut Arena, DeviceError> {
        self.arena.as_mut().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    /// Runs one launch: widens 16-bit operands if the kernel needs it, runs the kernel, and rounds its outputs back.
    fn compute(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let arena = self.arena()?;
        // Until the launch ends, no replica writes the shared weights.
        let _unchanged = arena.reading();
        let KernelId::Cpu(kernel) = launch.kernel else {
            return Err(launch.wrong_kernel());
        };
        let l = Operands { arena, launch, widened: kernel.widens() };
        widening::widen(&l, &self.cpu)?;
        run(kernel, &l, &self.cpu)?;
        widening::narrow(&l, &self.cpu)
    }
}

impl Lane {
    /// The shared weights. The first replica to ask allocates them, as does any replica that asks for another size.
    fn shared(&self) -> Result<Arc<Weights>, DeviceError> {
        let mut current = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = current.upgrade().filter(|weights| weights.are(self.persistent)) {
            return Ok(weights);
        }
        let weights = Arc::new(Weights::new(self.persistent)?);
        *current = Arc::downgrade(&weights);
        Ok(weights)
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        let lane = self.lane.as_ref().map(|lane| format!("replica {} of {}, ", lane.number + 1, lane.count));
        let threads = if self.cpu.threads() == 1 { "thread" } else { "threads" };
        let (isa, lane) = (self.cpu.isa().name(), lane.unwrap_or_default());
        format!("cpu ({lane}{isa}, {} {threads})", self.cpu.threads())
    }

    fn kernels(&self) -> Kernels {
        Kernels::Cpu(self.cpu.isa().set())
    }

    fn workers(&self) -> u64 {
        self.cpu.threads() as u64
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena = None;
        self.arena = Some(match &self.lane {
            Some(lane) => Arena::sharing(lane.shared()?, lane.persistent, bytes)?,
            None => Arena::new(bytes)?,
        });
        Ok(())
    }

    fn set_borders(&mut self, _: &[Bytes]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena_mut()?.give_back(bytes);
        Ok(())
    }

    fn persistent(&mut self, bytes: Bytes) {
        if let Some(lane) = &mut self.lane {
            lane.persistent = bytes;
        }
    }

    fn takes_weights(&self) -> bool {
        self.lane.as_ref().is_none_or(|lane| lane.number == 0)
    }

    fn prepare(&mut self, _: &Launch<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let start = self.clock.start();
        self.arena_mut()?.write(at, bytes)?;
        self.clock.copied(start, "in", Bytes(bytes.len() as u64));
        Ok(())
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.arena()?.read(at, Bytes(out.len() as u64), |bytes| out.copy_from_slice(bytes))
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        // Only the first replica fills shared bytes; the others fill their own part of the range.
        let first = if self.takes_weights() { at } else { self.arena()?.shared().max(at) };
        let end = at.saturating_add(bytes.0).max(first);
        self.arena_mut()?.fill(first, Bytes(end - first), byte)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena_mut()?.copy(from, to, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let start = self.clock.start();
        self.compute(launch)?;
        self.clock.note(start, "compute", launch.op.name());
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        let start = self.clock.start();
        let arena = self.arena.as_ref().ok_or(DeviceError::OutsideArena { at, bytes })?;
        let ticket = arena.read(at, bytes, |bytes| self.fetched.put(bytes))?;
        self.clock.copied(start, "out", bytes);
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.fetched.take(ticket, out)
    }

    fn depth(&self) -> usize {
        1
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        None
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        &mut self.clock
    }

    fn stage(&mut self, _: [Bytes; 2]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.upload(at, bytes)
    }

    fn matmul_provider(&self) -> Option<String> {
        None
    }

    fn clear_interval(&self) -> u64 {
        0
    }

    fn arithmetic(&self) -> String {
        self.cpu.isa().name().to_owned()
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        // `alloc_arena` frees a larger arena, so no memory beyond the current one is mapped.
        Ok(Bytes::ZERO)
    }
}

/// Runs `kernel` on the launch's operands. `Err` if the launch has an op that the kernel does not implement, or
/// operands that it does not accept.
fn run(kernel: CpuKernel, l: &Operands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    use CpuKernel as K;
    match kernel {
        K::AccumulateF32 => launch::optimizer::accumulate(l, cpu, l.launch.op_as()?),
        K::AdafactorF32 => launch::optimizer::adafactor(l, cpu, l.launch.op_as()?),
        K::AdamWF32 => launch::optimizer::adamw(l, cpu, l.launch.op_as()?),
        K::AdamW8bitF32 => launch::optimizer::adamw_8bit(l, cpu, l.launch.op_as()?),
        K::AddF32 => launch::forward::add::<f32>(l, cpu, l.launch.op_as()?),
        K::AddBf16 => launch::forward::add::<Bf16>(l, cpu, l.launch.op_as()?),
        K::FlashF32 => launch::attention::attention_f32(l, cpu, l.launch.op_as()?),
        K::FlashBf16 => launch::attention::attention_bf16(l, cpu, l.launch.op_as()?),
        K::FlashGradF32 => launch::attention::attention_grad(l, cpu, l.launch.op_as()?),
        K::BatchNormF32 => launch::forward::batch_norm(l, cpu, l.launch.op_as()?),
        K::BatchNormGradF32 => launch::backward::batch_norm_grad(l, cpu, l.launch.op_as()?),
        K::BatchNormTrainF32 => launch::backward::batch_norm_train(l, cpu, l.launch.op_as()?),
        K::BatchNormTrainGradF32 => launch::backward::batch_norm_train_grad(l, cpu, l.launch.op_as()?),
        K::Cast => launch::backward::cast(l, cpu, l.launch.op_as()?),
        K::CombineF32 => launch::moe::combine(l, cpu, l.launch.op_as()?),
        K::CombineGradF32 => launch::moe::combine_grad(l, cpu, l.launch.op_as()?),
        K::CopyF32 => launch::forward::concat::<f32>(l, cpu, l.launch.op_as()?),
        K::CopyBf16 => launch::forward::concat::<Bf16>(l, cpu, l.launch.op_as()?),
        K::ConcatGradF32 => launch::backward::concat_grad(l, cpu, l.launch.op_as()?),
        K::CountStepsF32 => launch::optimizer::count_steps(l, l.launch.op_as()?),
        K::DispatchF32 => launch::moe::dispatch(l, cpu, l.launch.op_as()?),
        K::DispatchGradF32 => launch::moe::dispatch_grad(l, cpu, l.launch.op_as()?),
        K::DropoutF32 => launch::backward::dropout(l, cpu, l.launch.op_as()?),
        K::EmaF32 => launch::optimizer::ema(l, cpu, l.launch.op_as()?),
        K::EmbedF32 => launch::forward::embed::<f32>(l, cpu, l.launch.op_as()?),
        K::EmbedBf16 => launch::forward::embed::<Bf16>(l, cpu, l.launch.op_as()?),
        K::EmbedGradF32 => launch::backward::embed_grad(l, cpu, l.launch.op_as()?),
        K::GeluF32 => launch::forward::gelu::<f32>(l, cpu, l.launch.op_as()?),
        K::GeluBf16 => launch::forward::gelu::<Bf16>(l, cpu, l.launch.op_as()?),
        K::GeluGradF32 => launch::backward::gelu_grad(l, cpu, l.launch.op_as()?),
        K::GluF32 => launch::forward::glu::<f32>(l, cpu, l.launch.op_as()?),
        K::GluBf16 => launch::forward::glu::<Bf16>(l, cpu, l.launch.op_as()?),
        K::GluGradF32 => launch::backward::glu_grad(l, cpu, l.launch.op_as()?),
        K::GradScaleF32 => launch::optimizer::grad_scale(l, cpu, l.launch.op_as()?),
        K::GroupedLinearF32 => launch::matmul::grouped_linear(l, cpu, l.launch.op_as()?),
        K::GroupedLinearInputGradF32 => launch::matmul::grouped_linear_input_grad(l, cpu, l.launch.op_as()?),
        K::GroupedLinearWeightGradF32 => launch::matmul::grouped_linear_weight_grad(l, cpu, l.launch.op_as()?),
        K::KlDivergenceF32 => launch::backward::kl_divergence(l, cpu, l.launch.op_as()?),
        K::KlDivergenceGradF32 => launch::backward::kl_divergence_grad(l, cpu, l.launch.op_as()?),
        K::LayerNormF32 => launch::forward::layer_norm::<f32>(l, cpu, l.launch.op_as()?),
        K::LayerNormBf16 => launch::forward::layer_norm::<Bf16>(l, cpu, l.launch.op_as()?),
        K::LayerNormGradF32 => launch::backward::layer_norm_grad(l, cpu, l.launch.op_as()?),
        K::GemmF32 => launch::linear::panels(l, cpu, l.launch.op_as()?),
        K::GemmBf16 => launch::linear::tiles(l, cpu, l.launch.op_as()?),
        K::GemmInt8 => launch::linear::codes(l, cpu, l.launch.op_as()?),
        K::ProductF32 => launch::linear::rows(l, cpu, l.launch.op_as()?),
        K::LinearCrossEntropyF32 => launch::matmul::linear_cross_entropy(l, cpu, l.launch.op_as()?),
        K::LinearCrossEntropyGradF32 => launch::matmul::linear_cross_entropy_grad(l, cpu, l.launch.op_as()?),
        K::LinearInputGradF32 => launch::matmul::linear_input_grad(l, cpu, l.launch.op_as()?),
        K::LinearWeightGradF32 => launch::matmul::linear_weight_grad(l, cpu, l.launch.op_as()?),
        K::QuantizeF32 => launch::forward::quantize::<f32>(l, cpu, l.launch.op_as()?),
        K::QuantizeBf16 => launch::forward::quantize::<Bf16>(l, cpu, l.launch.op_as()?),
        K::ReluF32 => launch::forward::relu::<f32>(l, cpu, l.launch.op_as()?),
        K::ReluBf16 => launch::forward::relu::<Bf16>(l, cpu, l.launch.op_as()?),
        K::ReluGradF32 => launch::backward::relu_grad(l, cpu, l.launch.op_as()?),
        K::RmsNormF32 => launch::forward::rms_norm::<f32>(l, cpu, l.launch.op_as()?),
        K::RmsNormBf16 => launch::forward::rms_norm::<Bf16>(l, cpu, l.launch.op_as()?),
        K::RmsNormGradF32 => launch::backward::rms_norm_grad(l, cpu, l.launch.op_as()?),
        K::RotaryTableF32 => launch::forward::rotary_table(l, l.launch.op_as()?),
        K::RouteF32 => launch::moe::route(l, cpu, l.launch.op_as()?),
        K::RouteGradF32 => launch::moe::route_grad(l, cpu, l.launch.op_as()?),
        K::RouterLossF32 => launch::moe::router_loss(l, cpu, l.launch.op_as()?),
        K::RouterLossGradF32 => launch::moe::router_loss_grad(l, cpu, l.launch.op_as()?),
        K::ScaleF32 => launch::forward::scale::<f32>(l, cpu, l.launch.op_as()?),
        K::ScaleBf16 => launch::forward::scale::<Bf16>(l, cpu, l.launch.op_as()?),
        K::SegmentMeanF32 => launch::forward::segment_mean::<f32>(l, cpu, l.launch.op_as()?),
        K::SegmentMeanBf16 => launch::forward::segment_mean::<Bf16>(l, cpu, l.launch.op_as()?),
        K::SegmentMeanGradF32 => launch::backward::segment_mean_grad(l, cpu, l.launch.op_as()?),
        K::SelectRowsF32 => launch::forward::select_rows::<f32>(l, cpu, l.launch.op_as()?),
        K::SelectRowsBf16 => launch::forward::select_rows::<Bf16>(l, cpu, l.launch.op_as()?),
        K::SelectRowsGradF32 => launch::backward::select_rows_grad(l, cpu, l.launch.op_as()?),
        K::SgdF32 => launch::optimizer::sgd(l, cpu, l.launch.op_as()?),
        K::SoftmaxF32 => {
            reduce::softmax(cpu, l.input(0)?, l.output(0)?);
            Ok(())
        }
        K::SoftmaxGradF32 => launch::backward::softmax_grad(l, cpu, l.launch.op_as()?),
    }
}
