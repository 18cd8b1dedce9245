//! A card as a machine that plans are made for. Invariant: the target is that of the card's name where it is known;
//! otherwise sizes are the card's own, and only rates are guessed.

use crate::context::Context;
use crate::gemm;
use crate::{Card, CudaDevice, CudaError, Libraries, Options, cards, nvml};
use exec::{Device, DeviceError, Holder, Kind, Machine};
use graph::Bytes;
use plan::{Capability, Kernels, Precision, Target};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A card, in use as long as this is.
pub struct CudaMachine {
    card: Card,
    options: Options,
    /// What was free before there was a context.
    before: Bytes,
    /// What the context took.
    taken: Bytes,
    context: Mutex<Context>,
}

/// (what a card's name holds, its target): the first that fits.
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

/// Compute capability from which on there are products of e4m3.
pub(crate) const FP8: (u32, u32) = (Capability::FP8.0, Capability::FP8.1);

/// What the first context of a process takes, where NVML does not tell.
const CONTEXT: Bytes = Bytes(548_995_072);

/// More than any context takes: a larger difference is another process's doing.
const MOST: Bytes = Bytes(2 << 30);

impl CudaMachine {
    /// The card of a number, if everything that is needed to use it is there.
    pub fn new(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        // Asked before there is a context, which takes its part at once.
        let before = cards().ok().and_then(|cards| nvml::free(cards.get(ordinal)?).ok());
        let context = Context::new(ordinal, false)?;
        let after = context.memory()?.0;
        let known = before.map(|before| before.saturating_sub(after)).filter(|&taken| taken <= MOST);
        let (card, taken) = (context.card.clone(), known.unwrap_or(CONTEXT));
        Ok(Self { card, options, before: after + taken, taken, context: Mutex::new(context) })
    }

    /// (free, total) of the card's memory, all processes counted.
    fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        context.enter()?;
        context.memory()
    }

    /// What it is.
    pub fn card(&self) -> &Card {
        &self.card
    }
}

impl Machine for CudaMachine {
    fn kind(&self) -> Kind {
        Kind { family: "cuda", model: self.card.name.clone() }
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
        let named = |name| Target::named(name).map_err(|e| DeviceError::Machine { source: Box::new(e) });
        let mut target = named(name)?;
        target.memory = self.card.memory;
        let (major, minor) = self.card.capability;
        target.kernels = Kernels::Cuda(Capability(major, minor));
        if self.card.capability < FP8 {
            target.rates.fp8 = None;
        }
        if target.reserved.is_empty() {
            // Of the card where it was measured.
            target.reserved = named("h200")?.reserved;
        }
        Ok(target)
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        // The context is there by now; the plan counts it, so it is counted as free.
        Ok((self.memory()?.0 + self.taken).min(self.card.memory))
    }

    fn taken(&self) -> Result<Option<Bytes>, DeviceError> {
        Ok(Some(self.before.saturating_sub(self.memory()?.0)))
    }

    fn options(&self) -> Vec<(&'static str, String)> {
        let Options { streams, pinned, depth, expandable, cache_clear_interval } = self.options;
        vec![
            ("cuda_streams", streams.to_string()),
            ("pin_memory", pinned.map_or("auto".to_owned(), |pinned| pinned.to_string())),
            ("steps_open", depth.to_string()),
            ("expandable_segments", expandable.to_string()),
            ("cache_clear_interval", cache_clear_interval.to_string()),
        ]
    }

    fn holders(&self) -> Vec<Holder> {
        // Without NVML nobody is known.
        nvml::holders(&self.card).unwrap_or_default()
    }

    fn depth(&self) -> usize {
        self.options.depth
    }

    fn arithmetic(&self) -> String {
        arithmetic(&self.card)
    }

    fn first_use(&self) -> Option<String> {
        gemm::nothing_is_timed(&self.card).then(|| {
            let name = &self.card.name;
            format!("first use of an {name}: products are timed once, some seconds; bench --calibrate does it for all models")
        })
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        Ok(vec![Box::new(CudaDevice::with(self.card.ordinal, self.options)?)])
    }
}

/// All that the bits of a result depend on beside its input and weights: the kind of card, what compiled the kernels, and the
/// canonical orders of products; not what was timed, nor where.
pub(crate) fn arithmetic(card: &Card) -> String {
    let Card { name, capability: (major, minor), driver, .. } = card;
    format!("{name}, sm_{major}{minor}, driver {driver}, {}, {}", Libraries::get().versions(), gemm::ORDERS)
}

impl fmt::Debug for CudaMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
