//! Integration tests of the `plimsoll` binary. Invariant: tests are hermetic; every run has a folder of its
//! own, an empty hub cache and no network, and the compared output does not depend on the machine.

mod bench;
mod callers;
mod control_groups;
mod conversions;
mod decoders;
mod documents;
mod embedding_files;
mod embedding_formats;
mod embedding_layers;
mod embeddings;
mod explanations;
mod fair_esm;
mod faults;
mod harness;
mod hostile;
mod hub;
mod inputs;
mod limits;
mod manuals;
mod memory;
mod messages;
mod monitor;
mod outputs;
mod plans;
mod plots;
mod predictions;
mod readme;
mod reports;
mod streaming;
mod survival;
#[allow(dead_code, reason = "only the builders of torch files are of use here")]
#[path = "../../../data/tests/it/weights/build.rs"]
mod torch_files;
mod training;
mod training_killed;
mod training_long;
mod training_memory;
mod verify;
mod virnucpro_flags;
