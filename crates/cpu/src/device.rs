//! The CPU as an [`exec::Device`]: an arena in host memory, and for each op the kernel that the plan names.
//! Invariant: operands come from a checked plan, so their ranges are inside the arena and overlap only where the op's
//! alias rule allows it. Token ids, spans and packs are user input and are checked at every launch. Copies from and to the
//! scratch file run in threads of their own; everything else is synchronous.

use crate::launch::operands::LaunchOperands;
use crate::{Bf16, Cpu, Isa, launch, launch::widening, rows::reduce};
use plimsoll_exec::arena::{Arena, SharedWeights};
use plimsoll_exec::host::HostClock;
use plimsoll_exec::scratch_file::{FileCopy, FileQueues, ScratchFile};
use plimsoll_exec::{Allocation, Device, DeviceError, DeviceInfo, Launch, OnStart, Recorder, Tracer, Transfer};
use plimsoll_graph::{Bytes, Space};
use plimsoll_plan::{CpuKernel, KernelId, Kernels, Location, PlanError, Queue, Target};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A device's membership in a group of replicas that divide the host's cores and share their weights.
struct ReplicaShare {
    /// Index of this replica; replica 0 writes the weights.
    number: usize,
    /// Number of replicas.
    count: usize,
    /// The shared weights, alive while an arena of any replica uses them.
    weights: Arc<Mutex<Weak<SharedWeights>>>,
}

/// A device that runs kernels on the host's cores.
pub struct CpuDevice {
    cpu: Cpu,
    /// Before the arena, so that no thread copies from or to an arena that is gone.
    file: Option<FileQueues>,
    arena: Option<Arena>,
    replica: Option<ReplicaShare>,
    clock: HostClock,
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
        (0..count)
            .map(|number| {
                let replica = ReplicaShare { number, count, weights: Arc::clone(&weights) };
                Ok(Self { replica: Some(replica), ..Self::open(threads)? })
            })
            .collect()
    }

    /// A device without an arena.
    fn on(cpu: Cpu) -> Self {
        Self { cpu, file: None, arena: None, replica: None, clock: HostClock::default() }
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn arena_mut(&mut self) -> Result<&mut Arena, DeviceError> {
        self.arena.as_mut().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    /// The queues of the scratch file; `at` is the position that needs them.
    fn file(&self, at: Location) -> Result<&FileQueues, DeviceError> {
        self.file.as_ref().ok_or(DeviceError::NoSpace { at })
    }

    /// Whether weights must be uploaded to this device: of replicas, to the first alone.
    fn takes_weights(&self) -> bool {
        self.replica.as_ref().is_none_or(|replica| replica.number == 0)
    }

    /// Runs one launch: widens 16-bit operands if the kernel needs it, runs the kernel, and rounds its outputs back.
    fn compute(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let arena = self.arena()?;
        // Until the launch ends, no replica writes the shared weights.
        let _unchanged = arena.reading();
        let KernelId::Cpu(kernel) = launch.kernel else {
            return Err(launch.wrong_kernel());
        };
        let l = LaunchOperands { arena, launch, widened: kernel.widens() };
        widening::widen(&l, &self.cpu)?;
        run(kernel, &l, &self.cpu)?;
        widening::narrow(&l, &self.cpu)
    }
}

impl ReplicaShare {
    /// The shared weights of this size, the first bytes of the arena. The first replica to ask allocates them, as does any
    /// replica that asks for another size.
    fn shared(&self, bytes: Bytes) -> Result<Arc<SharedWeights>, DeviceError> {
        let mut current = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = current.upgrade().filter(|weights| weights.are(bytes)) {
            return Ok(weights);
        }
        let weights = Arc::new(SharedWeights::new(bytes)?);
        *current = Arc::downgrade(&weights);
        Ok(weights)
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let replica = match &self.replica {
            Some(replica) => format!("replica {} of {}, ", replica.number + 1, replica.count),
            None => String::new(),
        };
        let threads = if self.cpu.threads() == 1 { "thread" } else { "threads" };
        let isa = self.cpu.isa().name();
        DeviceInfo {
            name: format!("cpu ({replica}{isa}, {} {threads})", self.cpu.threads()),
            kernels: Kernels::Cpu(self.cpu.isa().set()),
            workers: self.cpu.threads() as u64,
            depth: 1,
            takes_weights: self.takes_weights(),
            arithmetic: isa.to_owned(),
            matmul_provider: None,
        }
    }

    fn allocate(&mut self, memory: &Allocation<'_>) -> Result<(), DeviceError> {
        if memory.host > Bytes::ZERO {
            return Err(DeviceError::NoSpace { at: Location { space: Space::Host, at: 0 } });
        }
        // The old memory is given back before the new one is taken.
        self.file = None;
        self.arena = None;
        if memory.file > Bytes::ZERO {
            let file = ScratchFile::create(memory.folder, memory.file)?;
            // Launches are synchronous, so the bytes may be touched as soon as a transfer is started.
            self.file = Some(FileQueues::start(file, memory.transfers, Arc::new(|_| Ok(())))?);
        }
        self.arena = Some(match &self.replica {
            Some(replica) => Arena::sharing(replica.shared(memory.weights)?, memory.weights, memory.arena)?,
            None => Arena::new(memory.arena)?,
        });
        Ok(())
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena_mut()?.give_back(bytes);
        Ok(())
    }

    fn prepare(&mut self, _: &[Launch<'_>], _: OnStart<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&mut self, to: Location, bytes: &[u8]) -> Result<(), DeviceError> {
        let start = self.clock.start();
        match to.space {
            Space::Device => self.arena_mut()?.write(to.at, bytes)?,
            Space::Host | Space::File => self.file(to)?.file().write(to.at, bytes)?,
        }
        self.clock.copied(start, Queue::In.name(), Bytes(bytes.len() as u64));
        Ok(())
    }

    fn download(&mut self, from: Location, out: &mut [u8]) -> Result<(), DeviceError> {
        let start = self.clock.start();
        let bytes = Bytes(out.len() as u64);
        match from.space {
            Space::Device => self.arena()?.read(from.at, bytes, |bytes| out.copy_from_slice(bytes))?,
            Space::Host | Space::File => self.file(from)?.file().read(from.at, out)?,
        }
        self.clock.copied(start, Queue::Out.name(), bytes);
        Ok(())
    }

    fn fill(&mut self, at: Location, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        if at.space != Space::Device {
            return self.file(at)?.file().fill(at.at, bytes, byte);
        }
        // Only the first replica fills shared bytes; the others fill their own part of the range.
        let first = if self.takes_weights() { at.at } else { self.arena()?.shared().max(at.at) };
        let end = at.at.saturating_add(bytes.0).max(first);
        self.arena_mut()?.fill(first, Bytes(end - first), byte)
    }

    fn begin_step(&mut self) -> Result<Bytes, DeviceError> {
        // `allocate` frees a larger arena, so no memory beyond the current one is mapped.
        Ok(Bytes::ZERO)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let start = self.clock.start();
        self.compute(launch)?;
        self.clock.note(start, Queue::Compute.name(), launch.op.name());
        Ok(())
    }

    fn start(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        let Transfer { id, from, to, bytes, .. } = *transfer;
        let (direction, in_file, in_arena) = match (from.space, to.space) {
            (Space::Device, Space::Device) => return self.arena_mut()?.copy(from.at, to.at, bytes),
            (Space::File, Space::Device) => (FileCopy::Read, from, to),
            (Space::Device, Space::File) => (FileCopy::Write, to, from),
            (Space::Host, _) | (_, Space::Host) | (Space::File, Space::File) => {
                return Err(DeviceError::NoSpace { at: from });
            }
        };
        let memory = self.arena()?.range(in_arena.at, bytes)?;
        // SAFETY: the arena outlives the queues, because both are dropped in this order. The plan was checked: until the
        // transfer is waited for, no launch and no other transfer touches its destination or writes its operand.
        unsafe { self.file(in_file)?.enqueue(id, direction, in_file.at, memory.as_ptr(), bytes) }
    }

    fn wait_for(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        if transfer.queue() == Queue::Compute {
            return Ok(());
        }
        let start = self.clock.start();
        self.file(transfer.from)?.wait_for(transfer.id)?;
        self.clock.copied(start, transfer.queue().name(), transfer.bytes);
        Ok(())
    }

    fn complete(&mut self, transfer: &Transfer) -> Result<(), DeviceError> {
        self.wait_for(transfer)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.file.as_ref().map_or(Ok(()), FileQueues::wait_for_all)
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        None
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        &mut self.clock
    }
}

/// Runs `kernel` on the launch's operands. `Err` if the launch has an op that the kernel does not implement, or
/// operands that it does not accept.
fn run(kernel: CpuKernel, l: &LaunchOperands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
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
        K::GemmF32 => launch::linear::packed_f32(l, cpu, l.launch.op_as()?),
        K::GemmBf16 => launch::linear::packed_bf16(l, cpu, l.launch.op_as()?),
        K::GemmInt8 => launch::linear::packed_int8(l, cpu, l.launch.op_as()?),
        K::ProductF32 => launch::linear::row_major(l, cpu, l.launch.op_as()?),
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
