//! Kernels that compute each row, or each column, by itself: norms, activations, softmax, embeddings, conversions of
//! number formats, rotary tables.

pub(crate) mod columns;

pub mod batch_norm;
pub mod cast;
pub mod elementwise;
pub mod embed;
pub mod norm;
pub mod norm_grad;
pub mod quantize;
pub mod reduce;
pub mod rope;
