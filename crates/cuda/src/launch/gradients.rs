//! Gradients of row-wise ops, dropout, and the sums over rows that they need.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{
    BatchNormGrad, BatchNormTrain, ConcatGrad, Dropout, EmbedGrad, GluGrad, RmsNorm, Scale, SegmentMeanGrad,
};

pub(super) fn accumulate(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn batch_norm_grad(call: &mut Call<'_>, _: &BatchNormGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn batch_norm_train(call: &mut Call<'_>, _: &BatchNormTrain) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn batch_norm_train_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn concat_grad(call: &mut Call<'_>, _: &ConcatGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn dropout(call: &mut Call<'_>, _: &Dropout) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn embed_grad(call: &mut Call<'_>, _: &EmbedGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn gelu_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn glu_grad(call: &mut Call<'_>, _: &GluGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn layer_norm_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn relu_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn rms_norm(call: &mut Call<'_>, _: &RmsNorm) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn rms_norm_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn scale(call: &mut Call<'_>, _: &Scale) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn segment_mean_grad(call: &mut Call<'_>, _: &SegmentMeanGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn select_rows_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn softmax_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
