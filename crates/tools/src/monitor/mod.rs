//! `plimsoll monitor`: the state of a run as lines of text, for a terminal or a log. Invariant: nothing here writes, and a
//! run is never disturbed; every number comes from the files of the run or from the run itself.

mod draw;
mod folder;

pub use draw::{frame, line};
pub use folder::Watched;

use plimsoll_runtime::live::LiveState;

/// Most losses that a view keeps; of a longer run, the means of neighbours.
const LOSSES: usize = 512;

/// What is shown of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Name of the run: its folder, or empty inside of a run.
    pub name: String,
    /// The last state.
    pub state: LiveState,
    /// Losses of the steps so far.
    pub losses: Losses,
    /// Last and lowest validation loss.
    pub validation: Option<Validation>,
    /// How the run ended; `None` while it runs.
    pub end: Option<End>,
}

/// Validation losses of a run, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Validation {
    /// Loss of the last evaluation.
    pub last: f64,
    /// Lowest loss of an evaluation.
    pub lowest: f64,
}

impl Validation {
    /// Adds the loss of a later evaluation.
    fn with(found: Option<Self>, loss: f64) -> Self {
        Self { last: loss, lowest: found.map_or(loss, |before| before.lowest.min(loss)) }
    }
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

/// The losses of a run in a bounded number of points: when there are too many, each two neighbours become their mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Losses {
    points: Vec<f64>,
    /// Steps of a point.
    each: u64,
    /// Sum and number of the losses of the point that is not complete.
    open: (f64, u64),
    first: Option<f64>,
    last: Option<f64>,
}

impl Default for Losses {
    fn default() -> Self {
        Self { points: vec![], each: 1, open: (0.0, 0), first: None, last: None }
    }
}

impl Losses {
    /// Adds the loss of a step; a loss that is not finite is left out.
    pub fn add(&mut self, loss: f64) {
        if !loss.is_finite() {
            return;
        }
        self.first.get_or_insert(loss);
        self.last = Some(loss);
        self.open = (self.open.0 + loss, self.open.1 + 1);
        if self.open.1 < self.each {
            return;
        }
        let (sum, count) = std::mem::take(&mut self.open);
        self.points.push(sum / count as f64);
        if self.points.len() == LOSSES {
            self.points =
                self.points.chunks(2).map(|pair| pair.iter().sum::<f64>() / pair.len() as f64).collect();
            self.each *= 2;
        }
    }

    /// The first and the last loss.
    fn ends(&self) -> Option<(f64, f64)> {
        self.first.zip(self.last)
    }

    /// The losses in at most `most` points.
    fn in_points(&self, most: usize) -> Vec<f64> {
        let open = (self.open.1 > 0).then(|| self.open.0 / self.open.1 as f64);
        let points: Vec<f64> = self.points.iter().copied().chain(open).collect();
        let of_point = points.len().div_ceil(most.max(1)).max(1);
        points.chunks(of_point).map(|part| part.iter().sum::<f64>() / part.len() as f64).collect()
    }
}

impl View {
    /// Takes a state that the run itself reports.
    pub fn take(&mut self, state: &LiveState) {
        if let Some(loss) = state.loss {
            self.take_step(state.done, loss);
        }
        if let Some(loss) = state.validation_loss {
            self.validation = Some(Validation::with(self.validation, loss));
        }
        self.state.clone_from(state);
    }

    /// Takes the loss of a step, once.
    pub fn take_step(&mut self, step: u64, loss: f64) {
        if step > self.state.done {
            self.state.done = step;
            self.losses.add(loss);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_kept_in_few_points() {
        let mut losses = Losses::default();
        for step in 0..100_000 {
            losses.add(f64::from(step));
        }
        losses.add(f64::NAN);
        assert_eq!(losses.ends(), Some((0.0, 99_999.0)));
        assert!(losses.points.len() < LOSSES && losses.points.is_sorted());
        let shown = losses.in_points(40);
        assert!(shown.len() <= 40 && shown.len() > 30 && shown.is_sorted(), "{}", shown.len());
        assert!(shown[0] < 3000.0 && shown[shown.len() - 1] > 97_000.0);
        assert_eq!(Losses::default().in_points(40), Vec::<f64>::new());
    }

    #[test]
    fn a_loss_counts_once() {
        let mut view = View::default();
        for (done, loss) in [(1, 3.0), (1, 3.0), (2, 2.0)] {
            let validation_loss = Some(loss + 1.0);
            view.take(&LiveState { done, loss: Some(loss), validation_loss, ..LiveState::default() });
        }
        assert_eq!(view.losses.in_points(9), [3.0, 2.0]);
        assert_eq!(view.validation, Some(Validation { last: 3.0, lowest: 3.0 }));
    }
}
