//! Integration tests of `exec`. Invariant: tests are hermetic and deterministic; every input is generated here
//! or stored in the fixtures.
#![forbid(unsafe_code)]

mod autodiff;
mod caller;
mod decoders;
mod devices;
mod differences;
mod distillation;
mod evaluate;
mod executor;
mod experts;
mod faulty;
mod goldens;
mod halves;
mod op_cases;
mod optimizers;
mod packs;
mod rig;
mod submit;
mod switch;
mod training;
