//! Scores and calls of a caller: the margin of a record from its windows, its calibrated probability with an interval, the
//! shift to another prevalence, and the call with its reason. Invariant: all results are pure functions of the windows'
//! logits in their order, the calibration and the options.

use super::calibration::{Calibration, ErrorBounds, LengthCalibration, ThresholdPreset};
use super::regions::RegionWindow;
use super::{logit, sigmoid};
use crate::pipeline::letters::{LetterTotals, WindowLetters};
use serde::Serialize;

/// Number of windows from which on their spread is part of the interval. With fewer, the normal quantile would be far too small
/// for the standard error.
const MIN_WINDOWS: u64 = 5;

/// Half the width of a normal distribution's central 95 %, in standard deviations.
const DEVIATIONS: f64 = 1.96;

/// Threshold on the score, from which on a record is called virus.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// The operating point of a preset. It is a point on the scale of probabilities at equal priors, so that the measured
    /// error rates hold at every prevalence.
    Preset(ThresholdPreset),
    /// Least `virus_score`, at the prevalence of the run.
    Score(f64),
}

impl Threshold {
    /// Text for run.json: the preset's name or the score.
    pub fn name(self) -> String {
        match self {
            Self::Preset(preset) => preset.name().to_owned(),
            Self::Score(score) => score.to_string(),
        }
    }

    /// Parses the text of [`Self::name`]; `None` for any other text.
    pub fn of_name(name: &str) -> Option<Self> {
        let preset = ThresholdPreset::ALL.into_iter().find(|preset| preset.name() == name).map(Self::Preset);
        preset.or_else(|| name.parse().ok().map(Self::Score))
    }
}

/// Limits on records that can be called.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallLimits {
    /// Least length in bases; `None` is the shortest length of the calibration.
    pub min_length: Option<u64>,
    /// Largest share of unknown letters.
    pub max_n: f64,
    /// Least complexity, see `pipeline/letters.rs`.
    pub min_complexity: f64,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self { min_length: None, max_n: 0.3, min_complexity: 0.5 }
    }
}

/// Why a record has no call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoCallReason {
    /// The record has no letters.
    Empty,
    /// The record is shorter than the limit.
    Short,
    /// The share of unknown letters is above the limit.
    UnknownLetters,
    /// The complexity is below the limit.
    LowComplexity,
    /// No window of the record has finite values.
    Failed,
    /// The interval of the score contains the threshold.
    Uncertain,
    /// The score is above the threshold and the false discovery rate above `--max-fdr`.
    Fdr,
}

impl NoCallReason {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::Empty,
        Self::Short,
        Self::UnknownLetters,
        Self::LowComplexity,
        Self::Failed,
        Self::Uncertain,
        Self::Fdr,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Short => "short",
            Self::UnknownLetters => "unknown_letters",
            Self::LowComplexity => "low_complexity",
            Self::Failed => "failed",
            Self::Uncertain => "uncertain",
            Self::Fdr => "fdr",
        }
    }
}

/// The call of a record before the false discovery rate is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreliminaryCall {
    /// The score is at least the threshold; a false discovery rate above the limit can still prevent the call.
    Virus,
    /// The score is below the threshold.
    Other,
    /// No call.
    None(NoCallReason),
}

impl PreliminaryCall {
    /// Whether the record counts in the false discovery rate: its score may lead to a call.
    pub fn is_ranked(self) -> bool {
        match self {
            Self::Virus | Self::Other | Self::None(NoCallReason::Uncertain | NoCallReason::Fdr) => true,
            Self::None(_) => false,
        }
    }
}

/// Probability of virus, and the interval in which it lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibratedScore {
    /// Log odds at the prevalence of the run.
    pub log_odds: f64,
    /// The probability.
    pub probability: f64,
    /// Bounds of the log odds.
    pub interval: [f64; 2],
    /// Threshold on the log odds at the prevalence of the run.
    pub threshold: f64,
}

/// Rules of a run: calibration, prevalence, threshold and limits.
#[derive(Clone, Debug)]
pub struct CallRules {
    calibration: Calibration,
    threshold: Threshold,
    prevalence: f64,
    /// Log odds of the prevalence, which are added to log odds at equal priors.
    shift: f64,
    limits: CallLimits,
}

/// Least score of a record of some length that is called virus.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LengthThreshold {
    /// Number of known letters.
    pub length: u64,
    /// The score, at the prevalence of the run.
    pub threshold: f64,
}

/// Sums over the windows of a record.
#[derive(Clone, Debug, Default)]
pub struct RecordSums {
    /// Number of windows.
    pub windows: u64,
    /// Number of windows with finite logits.
    pub scored: u64,
    /// Number of windows whose logits are not finite.
    pub failed: u64,
    /// Bases of the scored windows.
    bases: f64,
    /// Sum of the margins, each weighted by the bases of its window.
    margins: f64,
    /// Sum of the squares of the weights, and weighted sum of squared differences from the mean margin (West 1979), for
    /// the spread.
    squared_weights: f64,
    squares: f64,
    /// Sums of the logits of the classes, weighted by bases.
    classes: Vec<f64>,
    pub(crate) letters: LetterTotals,
}

impl RecordSums {
    /// Adds a window with `bases` known letters that are not in the window before it.
    pub fn add(&mut self, bases: u64, margin: f64, classes: &[f32]) {
        self.windows += 1;
        self.scored += 1;
        let weight = bases as f64;
        // `max(1.0)`: a window may have no new known letter; its weight is then 0, and so is every term that it adds.
        let mean_before = self.margins / self.bases.max(1.0);
        self.bases += weight;
        self.squared_weights += weight * weight;
        self.margins += weight * margin;
        self.squares += weight * (margin - mean_before) * (margin - self.margins / self.bases.max(1.0));
        self.classes.resize(classes.len(), 0.0);
        for (sum, &logit) in self.classes.iter_mut().zip(classes) {
            *sum += weight * f64::from(logit);
        }
    }

    /// Adds a window that has no score: too short, or `failed`.
    pub fn add_without_score(&mut self, failed: bool) {
        self.windows += 1;
        self.failed += u64::from(failed);
    }

    /// Mean margin weighted by bases; `None` without a scored window.
    pub fn margin(&self) -> Option<f64> {
        (self.scored > 0).then(|| self.margins / self.bases)
    }

    /// Standard error of the mean margin; 0 with fewer than [`MIN_WINDOWS`] windows, whose spread tells too little.
    fn standard_error(&self) -> f64 {
        if self.scored < MIN_WINDOWS {
            return 0.0;
        }
        // The number of windows of equal weight with the same information (Kish 1965).
        let n = self.bases * self.bases / self.squared_weights;
        (self.squares / self.bases / (n - 1.0)).sqrt()
    }

    /// Probabilities of the classes: softmax of the mean logits divided by the temperature. Empty without a scored window.
    pub fn classes(&self, temperature: f64) -> Vec<f64> {
        if self.scored == 0 {
            vec![]
        } else {
            softmax(self.classes.iter().map(|sum| sum / self.bases / temperature))
        }
    }

    /// Starts the next record.
    pub fn clear(&mut self) {
        let mut classes = std::mem::take(&mut self.classes);
        classes.clear();
        *self = Self { classes, ..Self::default() };
    }
}

/// Softmax of finite values.
pub(crate) fn softmax(values: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    // Less the largest value, so that no power overflows.
    let largest = values.clone().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = values.map(|x| (x - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|x| x / sum).collect()
}

/// Index of the largest value, the first one on a tie; `None` without values.
pub(crate) fn largest<T: PartialOrd + Copy>(values: &[T]) -> Option<usize> {
    let mut best: Option<(usize, T)> = None;
    for (i, &value) in values.iter().enumerate() {
        if best.is_none_or(|(_, other)| value > other) {
            best = Some((i, value));
        }
    }
    best.map(|(i, _)| i)
}

impl CallRules {
    /// Rules of a run; `prevalence` is above 0 and below 1.
    pub fn new(calibration: Calibration, threshold: Threshold, prevalence: f64, limits: CallLimits) -> Self {
        Self { calibration, threshold, prevalence, shift: logit(prevalence), limits }
    }

    /// Expected share of viral records.
    pub fn prevalence(&self) -> f64 {
        self.prevalence
    }

    /// The threshold from which on a record is called virus.
    pub fn call_threshold(&self) -> Threshold {
        self.threshold
    }

    /// Least scores of records that are called virus, at lengths from `shortest` to `longest`: at both, and at the lengths of
    /// the calibration between them. One for a threshold that holds at every length.
    pub fn thresholds(&self, shortest: u64, longest: u64) -> Vec<LengthThreshold> {
        let mut lengths = vec![shortest];
        if matches!(self.threshold, Threshold::Preset(_)) {
            lengths.extend(self.calibration.lengths().filter(|l| (shortest + 1..longest).contains(l)));
            lengths.extend((longest > shortest).then_some(longest));
        }
        let mut thresholds = vec![];
        for length in lengths {
            let log_odds = self.threshold(&self.calibration.at(length)) + self.shift;
            thresholds.push(LengthThreshold { length, threshold: sigmoid(log_odds) });
        }
        thresholds
    }

    /// The calibration.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// Least length of a record that is called.
    pub fn min_length(&self) -> u64 {
        self.limits.min_length.unwrap_or(self.calibration.shortest())
    }

    /// Probability of a single window with `known` known letters, at the prevalence of the run.
    pub fn window(&self, known: u64, margin: f64) -> f64 {
        sigmoid(self.calibration.at(known).log_odds(margin) + self.shift)
    }

    /// The window as input of the search for regions: its log odds at equal priors, because the prevalence of viral records says
    /// nothing about the windows within one record, and whether it can have a call by its letters.
    pub(crate) fn region_window(
        &self,
        start: u64,
        end: u64,
        letters: WindowLetters,
        margin: f64,
    ) -> RegionWindow {
        let mut totals = LetterTotals::default();
        totals.add(letters.new);
        RegionWindow {
            start,
            end,
            known: f64::from(letters.new.known()),
            log_odds: self.calibration.at(letters.known.into()).log_odds(margin),
            is_callable: self.refused(&totals).is_none(),
            windows: 1,
        }
    }

    /// Why letters like these have no call.
    fn refused(&self, letters: &LetterTotals) -> Option<NoCallReason> {
        if letters.unknown() > self.limits.max_n {
            Some(NoCallReason::UnknownLetters)
        } else if letters.complexity() < self.limits.min_complexity {
            Some(NoCallReason::LowComplexity)
        } else {
            None
        }
    }

    /// Threshold on the log odds at equal priors for records with the calibration `at`.
    fn threshold(&self, at: &LengthCalibration) -> f64 {
        match self.threshold {
            Threshold::Preset(preset) => logit(at.point(preset).threshold),
            Threshold::Score(score) => logit(score) - self.shift,
        }
    }

    /// Bounds of the error rates for records of `length` known letters.
    pub fn errors(&self, length: u64) -> ErrorBounds {
        let at = self.calibration.at(length);
        at.errors(self.threshold(&at))
    }

    /// Score of a record of `length` known letters; `None` without a scored window.
    ///
    /// The interval is one of log odds and has two parts on either side. The mean margin of five or more windows is uncertain
    /// by its standard error, of which the interval covers 1.96. The calibration is off by `ece` on average: that is taken for
    /// an error of the log odds that moves a probability of 1/2 by `ece`, and other probabilities by less.
    pub fn score(&self, length: u64, sums: &RecordSums) -> Option<CalibratedScore> {
        let margin = sums.margin()?;
        let at = self.calibration.at(length);
        let width = DEVIATIONS * at.slope * sums.standard_error() + logit(0.5 + at.ece.min(0.5));
        let log_odds = at.log_odds(margin) + self.shift;
        Some(CalibratedScore {
            log_odds,
            probability: sigmoid(log_odds),
            interval: [log_odds - width, log_odds + width],
            threshold: self.threshold(&at) + self.shift,
        })
    }

    /// The call of a record with this score. `known` is the number of its known letters, of a pair that of the mate with the
    /// most; the letters of `sums` are those of the record or of both mates.
    pub fn call(&self, known: u64, sums: &RecordSums, score: Option<&CalibratedScore>) -> PreliminaryCall {
        let refused = self.refused(&sums.letters);
        let reason = if known == 0 && sums.letters.letters() == 0 {
            Some(NoCallReason::Empty)
        } else if refused == Some(NoCallReason::UnknownLetters) {
            refused
        } else if known < self.min_length() {
            Some(NoCallReason::Short)
        } else {
            refused
        };
        match (reason, score) {
            (Some(reason), _) => PreliminaryCall::None(reason),
            // A record of 100 known letters in a row has a window that is computed, so its values were not finite.
            (None, None) => {
                PreliminaryCall::None(if sums.failed > 0 { NoCallReason::Failed } else { NoCallReason::Short })
            }
            (None, Some(score)) => {
                let [low, high] = score.interval;
                if low < score.threshold && score.threshold <= high {
                    PreliminaryCall::None(NoCallReason::Uncertain)
                } else if score.log_odds >= score.threshold {
                    PreliminaryCall::Virus
                } else {
                    PreliminaryCall::Other
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::calibration::tests::{parsed, table};
    use super::*;
    use crate::pipeline::letters::LetterCounts;

    fn rules(threshold: Threshold, prevalence: f64) -> CallRules {
        let calibration = parsed(&table(&[(100, 1.0, 0.0), (400, 3.0, -1.0)])).expect("read");
        CallRules::new(calibration, threshold, prevalence, CallLimits::default())
    }

    const DEFAULT: Threshold = Threshold::Preset(ThresholdPreset::Default);

    fn sums(windows: &[(u64, f64)]) -> RecordSums {
        let mut sums = RecordSums::default();
        for &(bases, margin) in windows {
            sums.add(bases, margin, &[]);
        }
        sums
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn a_probability_is_calibrated_by_length_and_shifted_by_prevalence() {
        for (prevalence, length, margin, log_odds) in [
            (0.5, 100, 2.0, 2.0),
            (0.5, 200, 2.0, 3.5),
            (0.1, 100, 2.0, 2.0 - 9f64.ln()),
            (0.9, 400, 0.0, -1.0 + 9f64.ln()),
        ] {
            let score = rules(DEFAULT, prevalence).score(length, &sums(&[(100, margin)])).expect("a score");
            close(score.log_odds, log_odds);
            close(score.probability, 1.0 / (1.0 + (-log_odds).exp()));
        }
        // Bayes: odds of 3 at equal priors are odds of 3 / 99 at a prevalence of 1 %.
        let score = rules(DEFAULT, 0.01).score(100, &sums(&[(100, 3f64.ln())])).expect("a score");
        close(score.probability, 3.0 / 102.0);
    }

    #[test]
    fn mates_are_weighted_by_their_bases() {
        close(sums(&[(100, 4.0), (300, 0.0)]).margin().expect("scored"), 1.0);
        let mut none = RecordSums::default();
        none.add_without_score(false);
        assert!(none.margin().is_none() && rules(DEFAULT, 0.5).score(50, &none).is_none());
    }

    /// Margins 0 to 4 have a variance of 2.5 and a standard error of sqrt(1/2). Fewer than five windows have no spread.
    #[test]
    fn the_interval_has_the_spread_of_the_windows_and_the_error_of_the_calibration() {
        let rules = rules(DEFAULT, 0.5);
        let five: Vec<(u64, f64)> = (0..5).map(|margin| (100, f64::from(margin))).collect();
        let score = rules.score(100, &sums(&five)).expect("a score");
        let (error, spread) = ((0.52f64 / 0.48).ln(), 1.96 * 0.5f64.sqrt());
        close(score.interval[0], 2.0 - spread - error);
        close(score.interval[1], 2.0 + spread + error);
        for few in [&[(100, 2.0)][..], &[(100, 0.0), (100, 4.0)]] {
            let score = rules.score(100, &sums(few)).expect("a score");
            close(score.interval[0], 2.0 - error);
            close(score.interval[1], 2.0 + error);
        }
        // A last window of which one base is new hardly counts: not in the mean, not in the spread.
        let overlapping = [&five[..], &[(1, 1000.0)]].concat();
        let score = rules.score(100, &sums(&overlapping[..])).expect("a score");
        close(score.log_odds, (500.0 * 2.0 + 1000.0) / 501.0);
    }

    fn call(rules: &CallRules, length: u64, margin: f64, sequence: &[u8]) -> PreliminaryCall {
        let mut sums = sums(&[(length, margin)]);
        sums.letters.add(LetterCounts::of(sequence));
        let score = rules.score(length, &sums);
        rules.call(length, &sums, score.as_ref())
    }

    #[test]
    fn calls_and_their_reasons() {
        let rules = rules(DEFAULT, 0.5);
        let plain = b"ACGTTGCATCAGGACT";
        assert_eq!(call(&rules, 100, 2.0, plain), PreliminaryCall::Virus);
        assert_eq!(call(&rules, 100, -2.0, plain), PreliminaryCall::Other);
        // The log odds are known to 0.08, which 0.02 around 0.5 is.
        for (margin, wanted) in [
            (0.05, PreliminaryCall::None(NoCallReason::Uncertain)),
            (-0.05, PreliminaryCall::None(NoCallReason::Uncertain)),
            (0.1, PreliminaryCall::Virus),
            (-0.1, PreliminaryCall::Other),
        ] {
            assert_eq!(call(&rules, 100, margin, plain), wanted, "{margin}");
        }
        assert_eq!(call(&rules, 99, 9.0, plain), PreliminaryCall::None(NoCallReason::Short));
        assert_eq!(call(&rules, 100, 9.0, b"ACGTNNNN"), PreliminaryCall::None(NoCallReason::UnknownLetters));
        assert_eq!(call(&rules, 99, 9.0, b"ACGTNNNN"), PreliminaryCall::None(NoCallReason::UnknownLetters));
        assert_eq!(
            call(&rules, 100, 9.0, &b"AT".repeat(50)),
            PreliminaryCall::None(NoCallReason::LowComplexity)
        );
        let nothing = RecordSums::default();
        assert_eq!(rules.call(0, &nothing, None), PreliminaryCall::None(NoCallReason::Empty));
        let mut failed = RecordSums::default();
        failed.add_without_score(true);
        assert_eq!(rules.call(100, &failed, None), PreliminaryCall::None(NoCallReason::Failed));
    }

    #[test]
    fn a_preset_calls_the_same_records_at_every_prevalence_and_a_score_does_not() {
        for prevalence in [0.01, 0.5, 0.9] {
            let preset = rules(DEFAULT, prevalence);
            assert_eq!(call(&preset, 100, 2.0, b""), PreliminaryCall::Virus, "{prevalence}");
            assert_eq!(call(&preset, 100, -2.0, b""), PreliminaryCall::Other, "{prevalence}");
            let same = preset.errors(100);
            assert_eq!(same, ErrorBounds { tpr: [0.8, 0.8], fpr: [0.1, 0.1] });
        }
        let score = rules(Threshold::Score(0.5), 0.01);
        assert_eq!(call(&score, 100, 2.0, b""), PreliminaryCall::Other);
        assert_eq!(call(&score, 100, 6.0, b""), PreliminaryCall::Virus);
        // At a prevalence of 1 % a score of 0.5 is 0.99 at equal priors, above all presets.
        assert_eq!(score.errors(100), ErrorBounds { tpr: [0.0, 0.5], fpr: [0.0, 0.01] });
        assert_eq!(call(&rules(Threshold::Score(1.0), 0.5), 100, 20.0, b""), PreliminaryCall::Other);
        assert_eq!(call(&rules(Threshold::Score(0.0), 0.5), 100, -20.0, b""), PreliminaryCall::Virus);
    }

    #[test]
    fn classes_are_a_softmax_of_the_mean_logits() {
        let mut sums = RecordSums::default();
        sums.add(100, 0.0, &[2.0, 0.0]);
        sums.add(300, 0.0, &[-2.0, 0.0]);
        // Mean logits -1 and 0; temperature 2.
        let classes = sums.classes(2.0);
        close(classes[0], sigmoid(-0.5));
        close(classes[0] + classes[1], 1.0);
        assert_eq!(largest(&classes), Some(1));
        assert_eq!((largest(&[1.0, 1.0]), largest::<f64>(&[])), (Some(0), None));
        sums.clear();
        assert!(sums.classes(2.0).is_empty() && sums.windows == 0);
    }
}
