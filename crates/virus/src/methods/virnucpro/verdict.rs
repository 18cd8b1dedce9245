//! Classification from scores: the label of an open reading frame, the consensus of a window, the score and the
//! call of a record. Invariant: all results are pure functions of the scores and their order.
//!
//! Sources: label and consensus follow VirNucPro's `prediction.py`. For the label, `torch.max` returns the
//! first of equal values, so a tie is `others`; in the consensus over the frames of a window, a tie is virus.
//! The call of a record is Plimsoll's own: neither public implementation of VirNucPro combines windows.

use crate::output::OrfScore;
use plimsoll_data::translate::Frame;

/// The classification of a window or a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// Viral.
    Virus,
    /// Not viral.
    Other,
    /// No scored open reading frame.
    NoCall,
    /// The record has no letters.
    Skipped,
    /// Scored with untrained weights, so neither score nor call is meaningful.
    Untrained,
}

impl Call {
    /// Name of the call in tables.
    pub fn name(self) -> &'static str {
        match self {
            Call::Virus => "virus",
            Call::Other => "other",
            Call::NoCall => "no_call",
            Call::Skipped => "skipped",
            Call::Untrained => "untrained",
        }
    }

    pub(crate) fn of(is_virus: bool) -> Self {
        if is_virus { Call::Virus } else { Call::Other }
    }
}

/// VirNucPro's label of one open reading frame: the larger score, `others` on a tie.
pub fn label([other, virus]: [f32; 2]) -> &'static str {
    if virus > other { "virus" } else { "others" }
}

/// Combined scores of the frames of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Consensus {
    /// The largest P(others) and the largest P(virus) over the frames; they can come from different frames.
    pub maxima: [f32; 2],
    /// The frame with the largest P(virus), the first one on a tie.
    pub best: Frame,
}

impl Consensus {
    /// Combines the frames of a window; `None` if there are none.
    pub fn of(orfs: &[OrfScore]) -> Option<Self> {
        let (first, rest) = orfs.split_first()?;
        let mut consensus = Consensus { maxima: first.scores, best: first.frame };
        for orf in rest {
            let [other, virus] = orf.scores;
            if virus > consensus.maxima[1] {
                consensus.best = orf.frame;
            }
            consensus.maxima = [consensus.maxima[0].max(other), consensus.maxima[1].max(virus)];
        }
        Some(consensus)
    }

    /// VirNucPro's consensus: whether max P(virus) >= max P(others).
    pub fn is_virus(&self) -> bool {
        self.maxima[1] >= self.maxima[0]
    }

    /// Score of the window: max P(virus) / (max P(others) + max P(virus)), from 0 to 1. At least 0.5 if and only if
    /// [`Consensus::is_virus`].
    pub fn virus_score(&self) -> f64 {
        let [other, virus] = self.maxima.map(f64::from);
        virus / (other + virus)
    }
}

/// Accumulated results of the windows of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecordScore {
    /// Number of windows.
    pub windows: u64,
    /// Number of windows with a scored frame.
    pub scored: u64,
    /// Number of windows whose consensus is virus.
    pub virus: u64,
    /// Sum of the windows' scores in f64, added in the order of the windows.
    sum: f64,
}

impl RecordScore {
    /// Adds the next window; `None` for a window without a scored frame.
    pub fn add(&mut self, consensus: Option<&Consensus>) {
        self.windows += 1;
        if let Some(consensus) = consensus {
            self.scored += 1;
            self.virus += u64::from(consensus.is_virus());
            self.sum += consensus.virus_score();
        }
    }

    /// Mean score of the scored windows, 0 to 1; `None` if there are none.
    pub fn virus_score(&self) -> Option<f64> {
        // The conversion of the count to f64 is exact below 2^53 windows.
        (self.scored > 0).then(|| self.sum / self.scored as f64)
    }

    /// Returns `Virus` if the score, unrounded, is at least `threshold`, and `NoCall` if no window was scored.
    pub fn call(&self, threshold: f32) -> Call {
        match self.virus_score() {
            Some(score) => Call::of(score >= f64::from(threshold)),
            None => Call::NoCall,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tie_of_one_frame_is_others() {
        assert_eq!(label([0.5, 0.5]), "others");
        assert_eq!(label([0.49999997, 0.5]), "virus");
        assert_eq!(label([0.5, 0.49999997]), "others");
    }

    /// Checks the consensus of frames F1, F2, ... with these scores: best frame, whether it is virus, and score.
    fn check(scores: &[[f32; 2]], best: Frame, is_virus: bool, score: f64) {
        let consensus = Consensus::of(&frames(scores)).unwrap();
        assert_eq!(consensus.best, best, "{scores:?}");
        assert_eq!(consensus.is_virus(), is_virus, "{scores:?}");
        assert_eq!(consensus.virus_score(), score, "{scores:?}");
        assert_eq!(consensus.virus_score() >= 0.5, is_virus, "{scores:?}");
    }

    fn frames(scores: &[[f32; 2]]) -> Vec<OrfScore> {
        scores.iter().zip(Frame::ALL).map(|(&scores, frame)| OrfScore { frame, scores }).collect()
    }

    #[test]
    fn the_consensus_takes_each_maximum_by_itself() {
        check(&[[0.25, 0.75]], Frame::F1, true, 0.75);
        check(&[[0.75, 0.25], [0.25, 0.75]], Frame::F2, true, 0.5);
        check(&[[0.25, 0.5], [0.25, 0.5], [0.75, 0.25]], Frame::F1, false, 0.4);
        check(&[[0.50000006, 0.5]], Frame::F1, false, 0.5 / (f64::from(0.50000006f32) + 0.5));
        check(&[[1.0, 0.0]], Frame::F1, false, 0.0);
        check(&[[0.0, 1.0]], Frame::F1, true, 1.0);
        assert_eq!(Consensus::of(&[]), None);
    }

    /// Checks the call at `threshold` of a record whose windows have one scored frame or none.
    fn check_record(windows: &[Option<[f32; 2]>], threshold: f32, expected: Call) {
        let mut score = RecordScore::default();
        for window in windows {
            score.add(window.and_then(|scores| Consensus::of(&frames(&[scores]))).as_ref());
        }
        assert_eq!(score.call(threshold), expected, "{windows:?} at {threshold}");
    }

    #[test]
    fn a_record_is_virus_from_the_threshold_on() {
        check_record(&[], 0.5, Call::NoCall);
        check_record(&[None, None], 0.0, Call::NoCall);
        check_record(&[Some([0.5, 0.5])], 0.5, Call::Virus);
        check_record(&[Some([0.50000006, 0.5])], 0.5, Call::Other);
        check_record(&[Some([0.25, 0.75]), None, Some([0.75, 0.25])], 0.5, Call::Virus);
        check_record(&[Some([0.25, 0.75]), Some([0.75, 0.25])], 0.50000006, Call::Other);
        check_record(&[Some([1.0, 0.0])], 0.0, Call::Virus);
        check_record(&[Some([0.0, 1.0])], 1.0, Call::Virus);
        check_record(&[Some([0.00001, 1.0])], 1.0, Call::Other);
    }
}
