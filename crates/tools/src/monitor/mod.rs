//! `plimsoll monitor`: the state of a run as lines of text, for a terminal or a log. Invariant: nothing here writes, and a
//! run is never disturbed; every number comes from the files of the run or from the run itself.

mod draw;
mod folder;

pub use draw::{columns, frame, line};
pub use folder::Watched;

use plimsoll_runtime::live::LiveState;
use plimsoll_runtime::series::Series;

/// State of a run as the monitor shows it.
#[derive(Clone, Debug, Default)]
pub struct RunView {
    /// Name of the run: its folder, or empty inside of a run.
    pub name: String,
    /// The last state.
    pub state: LiveState,
    /// Losses of the steps so far, in nats.
    pub losses: Series,
    /// Validation losses so far, in nats.
    pub validations: Series,
    /// How the run ended; `None` while it runs.
    pub end: Option<End>,
}

/// End of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The run is complete.
    Finished,
    /// A signal ended the run; the same command resumes it.
    Interrupted,
    /// An error ended the run.
    Failed(String),
    /// The process is gone, and its files do not say that the run ended.
    Gone,
}

impl RunView {
    /// Takes a state that the run itself reports.
    pub fn take(&mut self, state: &LiveState) {
        if let Some(loss) = state.loss {
            self.take_step(state.done, loss);
        }
        // Every state repeats the loss of the last evaluation.
        if let Some(loss) = state.validation_loss.filter(|&loss| loss != self.validations.last) {
            add(&mut self.validations, state.done, loss);
        }
        self.state.clone_from(state);
    }

    /// Takes the loss of a step, once.
    pub fn take_step(&mut self, step: u64, loss: f64) {
        if step > self.state.done {
            self.state.done = step;
            add(&mut self.losses, step, loss);
        }
    }
}

/// Adds the loss of a step; a loss that is not finite is left out, and so is one of an earlier step.
fn add(series: &mut Series, step: u64, loss: f64) {
    if loss.is_finite() && series.last_step().is_none_or(|last| last <= step) {
        series.add(step, loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_counts_once() {
        let mut view = RunView::default();
        for (done, loss) in [(1, 3.0), (1, 3.0), (2, 2.0)] {
            let validation_loss = Some(loss + 1.0);
            view.take(&LiveState { done, loss: Some(loss), validation_loss, ..LiveState::default() });
        }
        view.take_step(3, f64::NAN);
        let losses: Vec<(u64, f64)> = view.losses.points.iter().map(|p| (p.first, p.mean())).collect();
        assert_eq!(losses, [(1, 3.0), (2, 2.0)]);
        let validations = &view.validations;
        assert_eq!((validations.count, validations.last, validations.lowest), (2, 3.0, (3.0, 2)));
    }
}
