//! How a story tells what it does. Invariant: stories never print; they tell an observer.

use crate::RuntimeError;
use graph::Bytes;

/// Hears what happens in a run.
pub trait Observer {
    /// Something worth a line: the memory line, a warning, what was skipped.
    fn say(&mut self, level: Level, text: &str);

    /// How far it is. Called often; an observer decides how often it draws.
    fn progress(&mut self, progress: &Progress);

    /// How far a training run is. Called after every step.
    fn trained(&mut self, _: &Trained) {}

    /// The number of a signal that asks the run to end early. Asked between two steps: what is finished by then
    /// is kept.
    fn stop(&self) -> Option<u8> {
        None
    }

    /// How far a file of a model is that is being fetched or written. Called often.
    fn transfer(&mut self, _: &Transfer<'_>) {}
}

/// An error where a signal asks for the end; `kept` says what it leaves.
pub fn stopped(observer: &dyn Observer, kept: &str) -> Result<(), RuntimeError> {
    match observer.stop() {
        Some(signal) => Err(RuntimeError::Interrupted { signal, kept: kept.to_owned() }),
        None => Ok(()),
    }
}

/// How loud a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something that changes what the results mean.
    Warning,
    /// What a user wants to see.
    Info,
    /// What helps to understand a run.
    Detail,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Bytes of the inputs read, as stored.
    pub bytes: u64,
    /// Bytes of the inputs; unknown with a pipe.
    pub bytes_total: Option<u64>,
    /// Records finished.
    pub records: u64,
    /// Sequences (open reading frames) through the models.
    pub sequences: u64,
    /// Tokens through the encoders.
    pub tokens: u64,
    /// Seconds since the encoders began.
    pub seconds: f64,
}

/// How far a training run is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trained {
    /// Steps done.
    pub step: u64,
    /// Steps of the run, where they are known.
    pub steps: Option<u64>,
    /// Cross-entropy of a target of the last step, in nats.
    pub loss: f64,
    /// Since this process began the run.
    pub tokens_per_second: f64,
    /// Resident memory of the process.
    pub memory: Bytes,
    /// The line.
    pub line: Bytes,
}

/// How far a file is that is being fetched or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer<'a> {
    /// Its name.
    pub file: &'a str,
    /// Bytes that are done.
    pub bytes: u64,
    /// Bytes of the file.
    pub total: u64,
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn say(&mut self, _: Level, _: &str) {}

    fn progress(&mut self, _: &Progress) {}
}
