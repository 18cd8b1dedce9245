//! Launches of norms, gates and other small ops of training, and of their gradients. Invariant: what a kernel relies on is checked here.

use super::super::Cpu;
use super::super::operands::Operands;
use crate::device::DeviceError;
use graph::ops::*;

pub(in super::super) fn batch_norm_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &BatchNormGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn batch_norm_train(
    l: &Operands<'_>,
    _: &Cpu,
    _: &BatchNormTrain,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn batch_norm_train_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &BatchNormTrainGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn cast(l: &Operands<'_>, _: &Cpu, _: &Cast) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn concat_grad(l: &Operands<'_>, _: &Cpu, _: &ConcatGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn dropout(l: &Operands<'_>, _: &Cpu, _: &Dropout) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn embed_grad(l: &Operands<'_>, _: &Cpu, _: &EmbedGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn gelu_grad(l: &Operands<'_>, _: &Cpu, _: &GeluGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn glu_grad(l: &Operands<'_>, _: &Cpu, _: &GluGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn layer_norm_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &LayerNormGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn relu_grad(l: &Operands<'_>, _: &Cpu, _: &ReluGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn rms_norm(l: &Operands<'_>, _: &Cpu, _: &RmsNorm) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn rms_norm_grad(l: &Operands<'_>, _: &Cpu, _: &RmsNormGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn scale(l: &Operands<'_>, _: &Cpu, _: &Scale) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn segment_mean_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &SegmentMeanGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn select_rows_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &SelectRowsGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn softmax_grad(l: &Operands<'_>, _: &Cpu, _: &SoftmaxGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}
