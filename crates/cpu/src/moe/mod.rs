//! Mixture of experts: choosing experts for tokens, moving rows of tokens to experts and back, and the losses that
//! balance the experts. The matmuls of the experts are in [`crate::matmul::grouped`].

pub mod dispatch;
pub mod route;
pub mod router_loss;
