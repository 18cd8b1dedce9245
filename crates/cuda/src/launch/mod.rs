//! Launches of ops: one file for each family of kernels. Invariant: preparing and running a launch take the same code
//! path, so everything that a step launches was compiled before.

mod attention;
mod attention_grad;
mod cross_entropy;
mod experts;
mod gradients;
mod kl_divergence;
mod linear;
mod linear_grad;
mod optimizer;
mod quantize;
mod rows;
mod sequence;

use crate::arena::DeviceArena;
use crate::capability::FP8;
use crate::context::Context;
use crate::gemm::{self, Gemm};
use crate::kernel::{Arg, Kernel, KernelArguments, LaunchShape};
use crate::loaded_kernels::LoadedKernels;
use crate::tensor_map::DeviceMatrix;
use plimsoll_exec::{DeviceError, Launch, Operand};
use plimsoll_graph::{Bytes, DType, GRANULE, Layout};
use plimsoll_plan::{CudaKernel, KernelId};
use plimsoll_setting::Setting;

/// The launch of an op, with everything that its kernels need.
pub(crate) struct OpLaunch<'a> {
    pub(crate) context: &'a Context,
    pub(crate) arena: &'a DeviceArena,
    pub(crate) kernels: &'a mut LoadedKernels,
    pub(crate) gemm: &'a mut Gemm,
    pub(crate) launch: &'a Launch<'a>,
    /// Whether kernels are only compiled, not run.
    pub(crate) preparing: bool,
}

/// A matrix in device memory, with the number of rows of this step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceTensor {
    pub(crate) address: u64,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) dtype: DType,
}

impl DeviceTensor {
    /// An operand that an op does not have: its address is null.
    pub(crate) const NONE: Self = Self { address: 0, rows: 0, columns: 0, dtype: DType::F32 };

    pub(crate) fn matrix(&self) -> DeviceMatrix {
        let &Self { address, rows, columns, dtype } = self;
        DeviceMatrix { address, rows, columns, dtype }
    }

    pub(crate) fn pointer(&self) -> Arg {
        Arg::pointer(self.address)
    }

    pub(crate) fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// The same elements as rows of `1 / heads` of the columns: a row for each head.
    pub(crate) fn by_heads(self, heads: u32) -> Self {
        let heads = u64::from(heads);
        Self { rows: self.rows * heads, columns: self.columns / heads, ..self }
    }

    /// Number of elements from one row to the next.
    pub(crate) fn stride(&self) -> u64 {
        match Layout::of(self.dtype) {
            Layout::Scaled => self.columns.next_multiple_of(GRANULE),
            Layout::RowMajor | Layout::Packed { .. } => self.columns,
        }
    }

    /// Address of a quantized tensor's scales: behind the rows of this step.
    pub(crate) fn scales(&self) -> u64 {
        self.address + self.rows * self.stride()
    }
}

impl OpLaunch<'_> {
    /// Returns input `i`.
    pub(crate) fn input(&self, i: usize) -> Result<DeviceTensor, DeviceError> {
        let operand = self.launch.ins.get(i).ok_or_else(|| self.refused(format!("it has no input {i}")))?;
        self.tensor(operand)
    }

    /// Returns output `i`; an error if it is not used.
    pub(crate) fn output(&self, i: usize) -> Result<DeviceTensor, DeviceError> {
        self.output_if(i)?.ok_or_else(|| self.refused(format!("it has no output {i}")))
    }

    /// Returns output `i`, or `None` if it is not used.
    pub(crate) fn output_if(&self, i: usize) -> Result<Option<DeviceTensor>, DeviceError> {
        self.launch.outs.get(i).and_then(Option::as_ref).map(|operand| self.tensor(operand)).transpose()
    }

    /// Returns the workspace as (address, size); (0, 0) if there is none.
    pub(crate) fn workspace(&self) -> Result<(u64, Bytes), DeviceError> {
        match self.launch.workspace {
            None => Ok((0, Bytes::ZERO)),
            Some((at, bytes)) => Ok((self.arena.range(at, bytes)?, bytes)),
        }
    }

    fn tensor(&self, operand: &Operand) -> Result<DeviceTensor, DeviceError> {
        let (rows, columns) = operand.matrix(self.launch.counts);
        if !counted(rows, columns) {
            return Err(
                self.refused(format!("{rows} rows of {columns} columns are more than its kernels count"))
            );
        }
        let address = self.arena.range(operand.at, operand.bytes(self.launch.counts))?;
        Ok(DeviceTensor { address, rows: rows as u64, columns: columns as u64, dtype: operand.spec.dtype })
    }

    /// Launches a kernel, or compiles it while preparing.
    pub(crate) fn kernel(
        &mut self,
        kernel: &Kernel,
        shape: LaunchShape,
        args: &impl KernelArguments,
    ) -> Result<(), DeviceError> {
        if self.preparing {
            return Ok(self.kernels.prepare(self.context, kernel, shape.shared)?);
        }
        Ok(self.kernels.call(self.context, kernel, shape, args)?)
    }

    /// Address of the status word, to which kernels write a code for invalid input data ([`refusal`]).
    pub(crate) fn status(&self) -> u64 {
        self.kernels.status.address()
    }

    /// Checks that the GPU has matmuls of this quantized element type.
    pub(crate) fn check_quantized_type(&self, of: DType) -> Result<(), DeviceError> {
        if of != DType::F8 {
            return Err(self.refused(format!("GPUs compute with f8, not with {}", of.name())));
        }
        let (major, minor) = self.context.card.capability;
        if (major, minor) < FP8 {
            return Err(self.refused(format!(
                "e4m3 needs compute capability {}.{}, and this card has {major}.{minor}; use {}",
                FP8.0,
                FP8.1,
                Setting::Precision.to("bf16")
            )));
        }
        Ok(())
    }

    /// Creates an error of this op.
    pub(crate) fn refused(&self, why: String) -> DeviceError {
        DeviceError::Kernel { op: self.launch.op.name(), why }
    }
}

/// Whether kernels can index these rows and columns, which are `int` there; elements and bytes are `long long`.
fn counted(rows: usize, columns: usize) -> bool {
    rows.max(columns) <= i32::MAX as usize
}

/// Returns the message of a status code; the codes are defined in `common.cuh`.
pub(crate) fn refusal(code: u32) -> &'static str {
    match code {
        1 => "a token id lies outside of its table",
        2 => "a sequence's rows lie outside of the step",
        3 => "a row index lies outside of its matrix",
        4 => "a target is not smaller than the number of classes",
        5 => "packs do not follow one another, or do not cover the step",
        _ => "a kernel refused its data",
    }
}

/// Prepares or runs the kernels of a launch.
pub(crate) fn run(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    use CudaKernel as K;
    let KernelId::Cuda(kernel) = call.launch.kernel else { return Err(call.launch.wrong_kernel()) };
    match kernel {
        K::Add => rows::add(call),
        K::Flash => attention::attention(call, call.launch.op_as()?),
        K::BatchNorm => rows::batch_norm(call, call.launch.op_as()?),
        K::Cast => rows::cast(call),
        K::Concat => rows::concat(call),
        K::Embed => sequence::embed(call, call.launch.op_as()?),
        K::Gelu => rows::gelu(call),
        K::Glu => rows::glu(call, call.launch.op_as()?),
        K::LayerNorm => rows::layer_norm(call, call.launch.op_as()?),
        K::Gemm => linear::linear(call, call.launch.op_as()?),
        K::GemmFp8 => linear::quantized(call, call.launch.op_as()?),
        K::Quantize => quantize::quantize(call, call.launch.op_as()?),
        K::Relu => rows::relu(call),
        K::RotaryTable => sequence::rotary_table(call),
        K::SegmentMean => sequence::segment_mean(call, call.launch.op_as()?),
        K::SelectRows => sequence::select_rows(call),
        K::Softmax => rows::softmax(call),
        K::Accumulate => gradients::accumulate(call),
        K::BatchNormGrad => gradients::batch_norm_grad(call, call.launch.op_as()?),
        K::BatchNormTrain => gradients::batch_norm_train(call, call.launch.op_as()?),
        K::BatchNormTrainGrad => gradients::batch_norm_train_grad(call),
        K::ConcatGrad => gradients::concat_grad(call, call.launch.op_as()?),
        K::Dropout => gradients::dropout(call, call.launch.op_as()?),
        K::EmbedGrad => gradients::embed_grad(call, call.launch.op_as()?),
        K::GeluGrad => gradients::gelu_grad(call),
        K::GluGrad => gradients::glu_grad(call, call.launch.op_as()?),
        K::LayerNormGrad => gradients::layer_norm_grad(call),
        K::ReluGrad => gradients::relu_grad(call),
        K::RmsNorm => gradients::rms_norm(call, call.launch.op_as()?),
        K::RmsNormGrad => gradients::rms_norm_grad(call, call.launch.op_as()?),
        K::Scale => gradients::scale(call, call.launch.op_as()?),
        K::SegmentMeanGrad => gradients::segment_mean_grad(call, call.launch.op_as()?),
        K::SelectRowsGrad => gradients::select_rows_grad(call),
        K::SoftmaxGrad => gradients::softmax_grad(call),
        K::Adafactor => optimizer::adafactor(call, call.launch.op_as()?),
        K::AdamW => optimizer::adamw(call, call.launch.op_as()?),
        K::AdamW8bit => optimizer::adamw_8bit(call, call.launch.op_as()?),
        K::CountSteps => optimizer::count_steps(call),
        K::Ema => optimizer::ema(call, call.launch.op_as()?),
        K::GradScale => optimizer::grad_scale(call, call.launch.op_as()?),
        K::Sgd => optimizer::sgd(call, call.launch.op_as()?),
        K::GemmInputGrad => linear_grad::input_grad(call, call.launch.op_as()?),
        K::GemmWeightGrad => linear_grad::weight_grad(call, call.launch.op_as()?),
        K::KlDivergence => kl_divergence::kl_divergence(call),
        K::KlDivergenceGrad => kl_divergence::kl_divergence_grad(call),
        K::LinearCrossEntropy => cross_entropy::linear_cross_entropy(call, call.launch.op_as()?),
        K::LinearCrossEntropyGrad => cross_entropy::linear_cross_entropy_grad(call, call.launch.op_as()?),
        K::FlashGrad => attention_grad::attention_grad(call, call.launch.op_as()?),
        K::Combine => experts::combine(call, call.launch.op_as()?),
        K::CombineGrad => experts::combine_grad(call, call.launch.op_as()?),
        K::Dispatch => experts::dispatch(call, call.launch.op_as()?),
        K::DispatchGrad => experts::dispatch_grad(call, call.launch.op_as()?),
        K::GroupedGemm => experts::grouped_linear(call, call.launch.op_as()?),
        K::GroupedGemmInputGrad => experts::grouped_input_grad(call, call.launch.op_as()?),
        K::GroupedGemmWeightGrad => experts::grouped_weight_grad(call, call.launch.op_as()?),
        K::Route => experts::route(call, call.launch.op_as()?),
        K::RouteGrad => experts::route_grad(call, call.launch.op_as()?),
        K::RouterLoss => experts::router_loss(call, call.launch.op_as()?),
        K::RouterLossGrad => experts::router_loss_grad(call, call.launch.op_as()?),
    }
}

/// Returns a sample of every kernel in every form that models use, for compiling all of them without a GPU.
pub fn every_kernel() -> Vec<Kernel> {
    [
        rows::every_kernel(),
        quantize::every_kernel(),
        sequence::every_kernel(),
        attention::every_kernel(),
        attention_grad::every_kernel(),
        cross_entropy::every_kernel(),
        experts::every_kernel(),
        gradients::every_kernel(),
        kl_divergence::every_kernel(),
        linear_grad::every_kernel(),
        optimizer::every_kernel(),
        gemm::every_kernel(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_counted_in_int() {
        let most = i32::MAX as usize;
        assert!(counted(0, most) && counted(most, 1));
        assert!(!counted(most + 1, 1) && !counted(1, most + 1));
    }
}
