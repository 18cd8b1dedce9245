//! Progress of the work before the first step: preparing launches and loading parameters. Invariant: progress is reported
//! on the thread that called, and never changes what is computed.

/// Progress of the work before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartProgress {
    /// The stage that this is the progress of.
    pub stage: StartStage,
    /// Units completed: kernels, launches or elements, by the stage.
    pub done: u64,
    /// Units of the whole stage.
    pub total: u64,
}

/// Stages of the work before the first step, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartStage {
    /// Kernels that are not in the cache are compiled.
    Compile,
    /// Launches are prepared; on a GPU this chooses the kernels of matmuls.
    Prepare,
    /// The elements of parameters are read or drawn, and uploaded.
    Load,
}

/// Receives the progress of the work before the first step.
pub type OnStart<'a> = &'a mut dyn FnMut(StartProgress);
