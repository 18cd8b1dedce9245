//! Passes: pure functions from a graph to a graph. Invariant: what goes in verified comes out verified.

mod autodiff;
mod dce;
mod fp8;
mod fuse;
mod layout;
mod precision;
mod remat;
mod stream;

pub use autodiff::autodiff;
pub(crate) use autodiff::differentiate;
pub use dce::dce;
pub use fp8::fp8;
pub use fuse::fuse;
pub use layout::layout;
pub use precision::{Precision, inference, precision};
pub use remat::{Remat, remat};
pub use stream::stream;
pub(crate) use stream::streamed;
