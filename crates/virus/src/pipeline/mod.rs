//! The pipeline of a prediction: reads records, computes the sequences of their windows, and writes results in input order.
//! Invariant: no module of it knows a method; what differs between methods is in `methods`.

pub(crate) mod compute;
pub(crate) mod engine;
pub(crate) mod journal;
pub(crate) mod letters;
pub(crate) mod mates;
pub(crate) mod queue;
pub(crate) mod queues;
pub(crate) mod record;
pub(crate) mod records;
pub(crate) mod resume;
pub(crate) mod run;
pub(crate) mod shape;
pub(crate) mod stage;
