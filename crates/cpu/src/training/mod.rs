//! Kernels that only training uses: losses and their gradients, dropout, gradients of embeddings, accumulation of
//! gradients, optimizers.

pub(crate) mod total;

pub mod accumulate;
pub mod adafactor;
pub mod cross_entropy;
pub mod dropout;
pub mod kl_divergence;
pub mod optimizer;
pub mod optimizer_8bit;
pub mod optimizer_state;
pub mod scatter;
