//! Plans as a user of the crate meets them. Invariant: no test here reads a file but its own filetests.

mod attention;
mod autodiff;
mod budgets;
mod cases;
mod faults;
mod filetests;
mod fusion;
mod known;
mod oracle;
mod precision;
mod random;
mod ring;
mod search;
mod streaming;
mod symbolic;
mod targets;
mod training;
