//! The CPU as a device: an arena of host memory and, for each op, the kernel that the target's table names.
//! Invariant: operands come from a checked plan, so their ranges are inside the arena and overlap only where
//! the op's alias rule allows it; token ids and spans come from outside and are checked at every launch.

use super::operands::Operands;
use super::{Bf16, Cpu, Element, Isa, kernels, launch, reduce, widening};
use crate::arena::{Arena, Weights};
use crate::device::{Device, DeviceError, Launch, Span, Ticket};
use crate::host::{Clock, Fetched};
use graph::{Bytes, Op};
use plan::KernelRow;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One of several devices that share the host's cores and their weights.
struct Lane {
    number: usize,
    count: usize,
    /// Those of the program that they follow, while one of them does.
    weights: Arc<Mutex<Weak<Weights>>>,
    persistent: Bytes,
}

/// Kernels on the host's cores.
pub struct CpuDevice {
    cpu: Cpu,
    arena: Option<Arena>,
    lane: Option<Lane>,
    fetched: Fetched,
    clock: Clock,
}

impl CpuDevice {
    /// On `threads` threads with the best instructions of this machine.
    pub fn new(threads: usize) -> Self {
        Self::on(Cpu::new(threads))
    }

    /// As [`CpuDevice::new`]; an error if the system refuses a thread.
    pub fn open(threads: usize) -> Result<Self, DeviceError> {
        Ok(Self::on(Cpu::start(threads).map_err(|source| DeviceError::Thread { source })?))
    }

    /// On `threads` threads with chosen instructions.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        Self::on(Cpu::with_isa(threads, isa))
    }

    /// So many devices of `threads` threads each, whose weights are the same bytes: steps run beside each other from their
    /// first op to their last, where threads of one device meet behind every op.
    pub fn lanes(count: usize, threads: usize) -> Result<Vec<Self>, DeviceError> {
        let weights = Arc::new(Mutex::new(Weak::new()));
        let lane = |number| {
            let weights = Arc::clone(&weights);
            let lane = Lane { number, count, weights, persistent: Bytes::ZERO };
            Ok(Self { lane: Some(lane), ..Self::open(threads)? })
        };
        (0..count).map(lane).collect()
    }

    fn on(cpu: Cpu) -> Self {
        Self { cpu, arena: None, lane: None, fetched: Fetched::default(), clock: Clock::default() }
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn arena_mut(&mut self) -> Result<&mut Arena, DeviceError> {
        self.arena.as_mut().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn compute(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let arena = self.arena()?;
        let _unchanged = arena.reading();
        let l = Operands { arena, launch, widened: kernels::widens(launch) };
        widening::widen(&l, &self.cpu)?;
        if l.in_bf16() {
            run::<Bf16>(&l, &self.cpu)?;
        } else {
            run::<f32>(&l, &self.cpu)?;
        }
        widening::narrow(&l, &self.cpu)
    }
}

impl Lane {
    /// The weights that all lanes have, made by the first that asks.
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
        let lane = self.lane.as_ref().map(|lane| format!("lane {} of {}, ", lane.number + 1, lane.count));
        let threads = if self.cpu.threads() == 1 { "thread" } else { "threads" };
        let (isa, lane) = (self.cpu.isa().name(), lane.unwrap_or_default());
        format!("cpu ({lane}{isa}, {} {threads})", self.cpu.threads())
    }

    fn kernels(&self) -> Vec<KernelRow> {
        kernels::rows()
    }

    fn units(&self) -> u64 {
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
        // What lanes share is the first one's to fill.
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

    fn trace(&mut self, on: bool) -> Result<(), DeviceError> {
        self.clock.set(on);
        Ok(())
    }

    fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        Ok(self.clock.take())
    }

    fn arithmetic(&self) -> String {
        self.cpu.isa().name().to_owned()
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        // The arena is as large as it is asked for.
        Ok(Bytes::ZERO)
    }
}

/// Runs the kernel of an op; `E` is what those read that take matrices as they lie.
fn run<E: Element>(l: &Operands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    match l.launch.op {
        Op::Add(op) => launch::forward::add::<E>(l, cpu, op)?,
        Op::Attention(op) => launch::attention::attention(l, cpu, op)?,
        Op::AttentionGrad(op) => launch::attention::attention_grad(l, cpu, op)?,
        Op::BatchNorm(op) => launch::forward::batch_norm(l, cpu, op)?,
        Op::Concat(op) => launch::forward::concat::<E>(l, cpu, op)?,
        Op::Embed(op) => l.embed::<E>(cpu, op)?,
        Op::Gelu(op) => launch::forward::gelu::<E>(l, cpu, op)?,
        Op::Glu(op) => launch::forward::glu::<E>(l, cpu, op)?,
        Op::LayerNorm(op) => launch::forward::layer_norm::<E>(l, cpu, op)?,
        Op::Linear(op) => l.linear(cpu, op)?,
        Op::Mlp(op) => launch::mlp::mlp(l, cpu, op)?,
        Op::Quantize(op) => launch::forward::quantize::<E>(l, cpu, op)?,
        Op::Relu(op) => launch::forward::relu::<E>(l, cpu, op)?,
        Op::RotaryTable(op) => launch::forward::rotary_table(l, op)?,
        Op::SegmentMean(op) => launch::forward::segment_mean::<E>(l, cpu, op)?,
        Op::SelectRows(op) => launch::forward::select_rows::<E>(l, cpu, op)?,
        Op::Softmax(_) => reduce::softmax(cpu, l.input(0)?, l.output(0)?),
        Op::BatchNormGrad(op) => launch::backward::batch_norm_grad(l, cpu, op)?,
        Op::BatchNormTrain(op) => launch::backward::batch_norm_train(l, cpu, op)?,
        Op::BatchNormTrainGrad(op) => launch::backward::batch_norm_train_grad(l, cpu, op)?,
        Op::Cast(op) => launch::backward::cast(l, cpu, op)?,
        Op::ConcatGrad(op) => launch::backward::concat_grad(l, cpu, op)?,
        Op::Dropout(op) => launch::backward::dropout(l, cpu, op)?,
        Op::EmbedGrad(op) => launch::backward::embed_grad(l, cpu, op)?,
        Op::GeluGrad(op) => launch::backward::gelu_grad(l, cpu, op)?,
        Op::GluGrad(op) => launch::backward::glu_grad(l, cpu, op)?,
        Op::LayerNormGrad(op) => launch::backward::layer_norm_grad(l, cpu, op)?,
        Op::ReluGrad(op) => launch::backward::relu_grad(l, cpu, op)?,
        Op::RmsNorm(op) => launch::forward::rms_norm::<E>(l, cpu, op)?,
        Op::RmsNormGrad(op) => launch::backward::rms_norm_grad(l, cpu, op)?,
        Op::Scale(op) => launch::forward::scale::<E>(l, cpu, op)?,
        Op::SegmentMeanGrad(op) => launch::backward::segment_mean_grad(l, cpu, op)?,
        Op::SelectRowsGrad(op) => launch::backward::select_rows_grad(l, cpu, op)?,
        Op::SoftmaxGrad(op) => launch::backward::softmax_grad(l, cpu, op)?,
        Op::Combine(op) => launch::moe::combine(l, cpu, op)?,
        Op::CombineGrad(op) => launch::moe::combine_grad(l, cpu, op)?,
        Op::Dispatch(op) => launch::moe::dispatch(l, cpu, op)?,
        Op::DispatchGrad(op) => launch::moe::dispatch_grad(l, cpu, op)?,
        Op::Route(op) => launch::moe::route(l, cpu, op)?,
        Op::RouteGrad(op) => launch::moe::route_grad(l, cpu, op)?,
        Op::RouterLoss(op) => launch::moe::router_loss(l, cpu, op)?,
        Op::RouterLossGrad(op) => launch::moe::router_loss_grad(l, cpu, op)?,
        Op::GroupedLinear(op) => launch::product::grouped_linear(l, cpu, op)?,
        Op::GroupedLinearInputGrad(op) => launch::product::grouped_linear_input_grad(l, cpu, op)?,
        Op::GroupedLinearWeightGrad(op) => launch::product::grouped_linear_weight_grad(l, cpu, op)?,
        Op::LinearCrossEntropy(op) => launch::product::linear_cross_entropy(l, cpu, op)?,
        Op::LinearCrossEntropyGrad(op) => launch::product::linear_cross_entropy_grad(l, cpu, op)?,
        Op::LinearInputGrad(op) => launch::product::linear_input_grad(l, cpu, op)?,
        Op::LinearWeightGrad(op) => launch::product::linear_weight_grad(l, cpu, op)?,
        Op::Accumulate(op) => launch::optimizer::accumulate(l, cpu, op)?,
        Op::Adafactor(op) => launch::optimizer::adafactor(l, cpu, op)?,
        Op::AdamW(op) => launch::optimizer::adamw(l, cpu, op)?,
        Op::AdamW8bit(op) => launch::optimizer::adamw_8bit(l, cpu, op)?,
        Op::GradScale(op) => launch::optimizer::grad_scale(l, cpu, op)?,
        Op::Sgd(op) => launch::optimizer::sgd(l, cpu, op)?,
    }
    Ok(())
}
