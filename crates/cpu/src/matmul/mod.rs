//! Matrix products. `linear_*` multiply by weights that are packed once, when they are loaded (f32, bf16, int8; each
//! with a variant for AMX); [`row_major`] multiplies matrices that change from step to step and packs them on the
//! fly; [`grouped`] has one weight per expert.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_epilogue;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16x3;
#[cfg(target_arch = "x86_64")]
pub(crate) mod linear_bf16_amx;
pub(crate) mod linear_dots;
#[cfg(target_arch = "x86_64")]
pub(crate) mod linear_f32_amx;
pub(crate) mod quantized;
pub(crate) mod register_tile;
pub(crate) mod task_grid;

pub mod grouped;
pub mod linear;
pub mod linear_bf16;
pub mod linear_f32;
pub mod linear_int8;
pub mod row_major;

pub use linear::{Act, LinearCall, MatmulEpilogue};
