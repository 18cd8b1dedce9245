//! Launches of what ends a step: gradients added up, scaled and applied. Invariant: what a kernel relies on is checked here.

use super::super::Cpu;
use super::super::operands::Operands;
use crate::device::DeviceError;
use graph::ops::*;

pub(in super::super) fn accumulate(l: &Operands<'_>, _: &Cpu, _: &Accumulate) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn adafactor(l: &Operands<'_>, _: &Cpu, _: &Adafactor) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn adamw(l: &Operands<'_>, _: &Cpu, _: &AdamW) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn adamw_8bit(l: &Operands<'_>, _: &Cpu, _: &AdamW8bit) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn grad_scale(l: &Operands<'_>, _: &Cpu, _: &GradScale) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn sgd(l: &Operands<'_>, _: &Cpu, _: &Sgd) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}
