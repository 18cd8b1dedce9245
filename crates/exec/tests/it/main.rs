//! The integration tests of `exec`. Invariant: hermetic and deterministic; every input is made here or stands
//! in the fixtures.
#![forbid(unsafe_code)]

mod op_cases;
