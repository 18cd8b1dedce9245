//! A card as a machine that plans are made for. Invariant: the target is that of the card's name where it is known;
//! otherwise sizes are the card's own, and only rates are guessed.

use crate::context::Context;
use crate::{Card, CudaDevice, CudaError, Libraries, Options};
use exec::{Device, DeviceError, Machine};
use graph::Bytes;
use plan::{Reserved, Target};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A card, in use as long as this is.
pub struct CudaMachine {
    card: Card,
    options: Options,
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
pub(crate) const FP8: (u32, u32) = (8, 9);

/// What the first context of a process takes, where it was not measured.
const CONTEXT: Bytes = Bytes(551_550_976);

impl CudaMachine {
    /// The card of a number, if everything that is needed to use it is there.
    pub fn new(ordinal: usize, options: Options) -> Result<Self, CudaError> {
        let context = Context::new(ordinal, false)?;
        Ok(Self { card: context.card.clone(), options, context: Mutex::new(context) })
    }

    /// What it is.
    pub fn card(&self) -> &Card {
        &self.card
    }
}

impl Machine for CudaMachine {
    fn name(&self) -> String {
        format!("cuda:{} ({})", self.card.ordinal, self.card.name)
    }

    fn target(&self) -> Result<Target, DeviceError> {
        let name =
            KNOWN.iter().find(|(part, _)| self.card.name.contains(part)).map_or("cuda", |(_, target)| target);
        let mut target =
            Target::named(name).map_err(|error| DeviceError::Machine { source: Box::new(error) })?;
        target.memory = self.card.memory;
        if self.card.capability < FP8 {
            target.rates.fp8 = None;
        }
        if target.reserved.is_empty() {
            target.reserved.push(Reserved { label: "CUDA context".to_owned(), bytes: CONTEXT });
        }
        Ok(target)
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        context.enter()?;
        // The context is there by now; the plan counts it, so it is counted as free.
        Ok((context.memory()?.0 + self.target()?.reserved()).min(self.card.memory))
    }

    fn depth(&self) -> usize {
        self.options.depth
    }

    fn arithmetic(&self) -> String {
        let (major, minor) = self.card.capability;
        format!("sm_{major}{minor}, driver {}, {}", self.card.driver, Libraries::get().versions())
    }

    fn open(&self) -> Result<Box<dyn Device>, DeviceError> {
        Ok(Box::new(CudaDevice::with(self.card.ordinal, self.options)?))
    }
}

impl fmt::Debug for CudaMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
