//! Plans without weights: their memory and time, the largest step that fits a budget, and the effect of every optimisation.
//! The modules are public at the root of the crate.

pub mod explain;
pub mod largest;
pub mod price;
