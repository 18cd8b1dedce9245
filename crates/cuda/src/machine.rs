//! A GPU as a `Machine`: provides the `Target` to plan for and opens the device. Invariant: a GPU with a known name
//! gets the target of that name; for any other, sizes are read from the GPU and only rates are assumed.

use crate::capability::FP8;
use crate::context::Context;
use crate::gemm;
use crate::{Card, CudaDevice, CudaError, Options, cards, nvml};
use plimsoll_exec::memory::Memory;
use plimsoll_exec::{Device, DeviceError, DeviceKind, Holder, Machine};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Capability, Kernels, Precision, Target};
use plimsoll_setting::{Command, Setting};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A GPU that is not opened as a device yet; holds a context for as long as it exists.
pub struct CudaMachine {
    card: Card,
    options: Options,
    /// Memory that was free before this process had a context.
    before: Bytes,
    /// Memory that the context occupies.
    taken: Bytes,
    context: Mutex<Context>,
}

/// (part of the GPU's name, name of its target); the first match counts, so more specific names come first.
const KNOWN: &[(&str, &str)] = &[
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100-SXM4-40GB", "a100-40"),
    ("A100-PCIE-40GB", "a100-40"),
    ("A100", "a100-80"),
    ("RTX 4090", "4090"),
    ("RTX 3090 Ti", "3090ti"),
    ("RTX 3090", "3090"),
];

/// Memory that a process's first context occupies, assumed if NVML is not available.
const CONTEXT: Bytes = Bytes(548_995_072);

/// Upper bound for the memory of a context: a larger difference in free memory is caused by another process.
const MAX_CONTEXT: Bytes = Bytes(2 << 30);

impl CudaMachine {
    /// Creates a context on GPU `ordinal`.
    ///
    /// # Errors
    /// Fails if a library is missing or the GPU does not exist or is not supported.
    pub fn new(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        // Must be read before the context is created, which occupies its memory at once.
        let before = cards().ok().and_then(|cards| nvml::free(cards.get(ordinal)?).ok());
        let context = Context::new(ordinal, false)?;
        let after = context.memory()?.0;
        let known = before.map(|before| before.saturating_sub(after)).filter(|&taken| taken <= MAX_CONTEXT);
        let card = context.card.clone();
        let taken = known.unwrap_or(CONTEXT);
        Ok(Self { card, options, before: after + taken, taken, context: Mutex::new(context) })
    }

    /// Returns (free, total) device memory, counting all processes.
    fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        context.enter()?;
        context.memory()
    }

    /// Properties of the GPU.
    pub fn card(&self) -> &Card {
        &self.card
    }
}

/// Returns a known target.
fn named_target(name: &str) -> Result<Target, DeviceError> {
    Target::named(name).map_err(|error| DeviceError::Machine { source: Box::new(error) })
}

impl Machine for CudaMachine {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "cuda", model: self.card.name.clone() }
    }

    fn precisions(&self) -> Vec<Precision> {
        vec![Precision::Bf16, Precision::Fp16, Precision::F32, Precision::Tf32, Precision::Fp8]
    }

    fn name(&self) -> String {
        format!("cuda:{} ({})", self.card.ordinal, self.card.name)
    }

    fn target(&self) -> Result<Target, DeviceError> {
        let name =
            KNOWN.iter().find(|(part, _)| self.card.name.contains(part)).map_or("cuda", |(_, target)| target);
        let mut target = named_target(name)?;
        target.memory = self.card.memory;
        let (major, minor) = self.card.capability;
        target.kernels = Kernels::Cuda(Capability(major, minor));
        if self.card.capability < FP8 {
            target.rates.fp8 = None;
        }
        if target.reserved.is_empty() {
            // Memory reserved beside the arena; the value measured on an H200.
            target.reserved = named_target("h200")?.reserved;
        }
        Ok(target)
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        // The context exists already, but the plan counts its memory as reserved; adding it here avoids counting it
        // twice.
        Ok((self.memory()?.0 + self.taken).min(self.card.memory))
    }

    fn usage(&self) -> Result<Memory, DeviceError> {
        let (free, total) = self.memory()?;
        Ok(Memory { free, total })
    }

    fn taken(&self) -> Result<Option<Bytes>, DeviceError> {
        Ok(Some(self.before.saturating_sub(self.memory()?.0)))
    }

    fn options(&self) -> Vec<(&'static str, String)> {
        let Options { streams, pinned, depth, expandable, cache_clear_interval } = self.options;
        vec![
            ("cuda_streams", streams.to_string()),
            ("pin_memory", pinned.map_or("auto".to_owned(), |pinned| pinned.to_string())),
            ("pipeline_depth", depth.to_string()),
            ("expandable_segments", expandable.to_string()),
            ("cache_clear_interval", cache_clear_interval.to_string()),
        ]
    }

    fn holders(&self) -> Vec<Holder> {
        // Without NVML, other processes are unknown.
        nvml::holders(&self.card).unwrap_or_default()
    }

    fn depth(&self) -> usize {
        self.options.depth
    }

    fn arithmetic(&self) -> String {
        gemm::arithmetic(&self.card)
    }

    fn first_use(&self) -> Option<String> {
        gemm::nothing_is_timed(&self.card).then(|| {
            let name = &self.card.name;
            format!(
                "first use of an {name}: the algorithms of its matmuls are timed once, which takes some \
                 seconds; {:#} {} does this for all models",
                Command::Bench,
                Setting::Calibrate
            )
        })
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        Ok(vec![Box::new(CudaDevice::with(self.card.ordinal, self.options)?)])
    }
}

impl fmt::Debug for CudaMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
