//! Integration tests of planning through the public API. Invariant: no test reads a file except `tests/filetests`.

mod attention;
mod autodiff;
mod budgets;
mod cases;
mod faults;
mod filetests;
mod fusion;
mod in_flight;
mod known;
mod oracle;
mod precision;
mod random;
mod search;
mod sharing;
mod streaming;
mod symbolic;
mod targets;
mod timeline;
mod training;
mod views;
