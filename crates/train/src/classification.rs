//! Metrics of classifiers: accuracy, areas under ROC curves, F1, and calibration. Invariant: equal scores count as ties,
//! so a metric does not depend on the order of the examples.

use serde::Serialize;

/// Number of bins of a calibration table.
pub const BINS: usize = 15;

/// Metrics of one task of a classifier. A metric that is not defined for the data, such as the area under the ROC curve
/// without negative examples, is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassifierMetrics {
    /// Name of the task.
    pub task: String,
    /// Number of examples that have a class.
    pub examples: u64,
    /// Mean cross-entropy, in nats.
    pub loss: f64,
    /// Share of the examples whose most probable class is right.
    pub accuracy: f64,
    /// Area under the ROC curve: of the second of two classes, or the mean over more classes, each against the others.
    pub auroc: Option<f64>,
    /// F1: of the second of two classes, or the mean over more classes.
    pub f1: Option<f64>,
    /// Mean F1 of the classes that occur.
    pub macro_f1: Option<f64>,
    /// Expected calibration error of the most probable class over the bins of `calibration`.
    pub expected_calibration_error: f64,
    /// Metrics of each class.
    pub classes: Vec<ClassMetrics>,
    /// Calibration table: bins of equal width of the probability of the most probable class.
    pub calibration: Vec<CalibrationBin>,
}

/// Metrics of a class against all others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassMetrics {
    /// Name of the class.
    pub name: String,
    /// Number of examples of the class.
    pub examples: u64,
    /// Share of the examples predicted as this class that are of this class.
    pub precision: Option<f64>,
    /// Share of the examples of this class that are predicted as this class.
    pub recall: Option<f64>,
    /// Harmonic mean of precision and recall.
    pub f1: Option<f64>,
    /// Area under the ROC curve.
    pub auroc: Option<f64>,
}

/// A bin of a calibration table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CalibrationBin {
    /// Lower end of the bin, exclusive except for 0.
    pub from: f64,
    /// Upper end of the bin, inclusive.
    pub to: f64,
    /// Number of examples in the bin.
    pub examples: u64,
    /// Mean probability of the most probable class; `None` for an empty bin.
    pub confidence: Option<f64>,
    /// Share of the examples whose most probable class is right; `None` for an empty bin.
    pub accuracy: Option<f64>,
}

/// The examples of a task with the logarithms of their class probabilities.
#[derive(Clone, Debug)]
pub struct TaskScores {
    name: String,
    classes: Vec<String>,
    /// Class of each example.
    targets: Vec<u32>,
    /// Logarithms of probabilities, a row of all classes for each example.
    log_probabilities: Vec<f64>,
}

impl TaskScores {
    /// A task without examples.
    pub fn new(name: String, classes: Vec<String>) -> Self {
        Self { name, classes, targets: vec![], log_probabilities: vec![] }
    }

    /// Number of classes.
    pub fn width(&self) -> usize {
        self.classes.len()
    }

    /// Number of examples.
    pub fn examples(&self) -> u64 {
        self.targets.len() as u64
    }

    /// Bytes that one example takes.
    pub fn bytes_of_example(&self) -> u64 {
        // The ranks of a class are sorted in a copy of one column.
        4 + 8 * self.classes.len() as u64 + 16
    }

    /// Adds an example with logits; an example whose `target` is no class is not counted.
    pub fn add_logits(&mut self, target: i32, logits: &[f32]) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
        self.add(target, logits.iter().map(|&x| f64::from(x - largest) - sum.ln()));
    }

    /// Adds an example with probabilities; an example whose `target` is no class is not counted.
    pub fn add_probabilities(&mut self, target: i32, probabilities: &[f32]) {
        // A probability that f32 rounds to 0 has a logarithm.
        let smallest = f64::from(f32::MIN_POSITIVE);
        self.add(target, probabilities.iter().map(|&p| f64::from(p).max(smallest).ln()));
    }

    fn add(&mut self, target: i32, log_probabilities: impl Iterator<Item = f64>) {
        if let Ok(target) = u32::try_from(target)
            && (target as usize) < self.classes.len()
        {
            self.targets.push(target);
            self.log_probabilities.extend(log_probabilities);
        }
    }

    /// Whether every score is a number.
    pub fn is_finite(&self) -> bool {
        self.log_probabilities.iter().all(|x| x.is_finite())
    }

    /// Computes the metrics; `None` without examples.
    pub fn metrics(&self) -> Option<ClassifierMetrics> {
        let n = self.targets.len();
        let width = self.classes.len();
        if n == 0 {
            return None;
        }
        // Number of examples, sum of their confidences, and number of correct ones.
        let mut bins = vec![(0u64, 0.0f64, 0u64); BINS];
        let mut predicted = vec![0u64; width];
        let mut examples = vec![0u64; width];
        let mut correct = vec![0u64; width];
        let mut loss = 0.0;
        for (row, &target) in self.log_probabilities.chunks_exact(width).zip(&self.targets) {
            let target = target as usize;
            let class = best_class(row);
            loss -= row[target];
            predicted[class] += 1;
            examples[target] += 1;
            correct[target] += u64::from(class == target);
            let confidence = row[class].exp();
            // Bins are open below and closed above, so that a confidence of 1 is in the last.
            let bin = &mut bins[((confidence * BINS as f64).ceil() as usize).clamp(1, BINS) - 1];
            bin.0 += 1;
            bin.1 += confidence;
            bin.2 += u64::from(class == target);
        }
        let classes: Vec<ClassMetrics> = (0..width)
            .map(|c| ClassMetrics {
                name: self.classes[c].clone(),
                examples: examples[c],
                precision: ratio(correct[c], predicted[c]),
                recall: ratio(correct[c], examples[c]),
                f1: ratio(2 * correct[c], predicted[c] + examples[c]),
                auroc: self.auroc(c),
            })
            .collect();
        let occurring = classes.iter().filter(|class| class.examples > 0);
        let macro_f1 = mean(occurring.filter_map(|class| class.f1));
        let (auroc, f1) = match &classes[..] {
            [_, second] => (second.auroc, second.f1),
            all => (mean(all.iter().filter_map(|class| class.auroc)), macro_f1),
        };
        let calibration: Vec<CalibrationBin> = bins
            .iter()
            .enumerate()
            .map(|(i, &(examples, confidence, correct))| CalibrationBin {
                from: i as f64 / BINS as f64,
                to: (i + 1) as f64 / BINS as f64,
                examples,
                confidence: (examples > 0).then(|| confidence / examples as f64),
                accuracy: ratio(correct, examples),
            })
            .collect();
        let gaps = bins.iter().map(|&(_, confidence, correct)| (confidence - correct as f64).abs());
        Some(ClassifierMetrics {
            task: self.name.clone(),
            examples: n as u64,
            loss: loss / n as f64,
            accuracy: correct.iter().sum::<u64>() as f64 / n as f64,
            auroc,
            f1,
            macro_f1,
            expected_calibration_error: gaps.sum::<f64>() / n as f64,
            classes,
            calibration,
        })
    }

    /// Area under the ROC curve of class `c` against all others, from the rank sum of Mann and Whitney.
    fn auroc(&self, c: usize) -> Option<f64> {
        let width = self.classes.len();
        let rows = self.log_probabilities.chunks_exact(width).zip(&self.targets);
        let mut scores: Vec<(f64, bool)> = rows
            .map(|(row, &target)| {
                // Of two classes the difference of logits orders the examples even where a probability is rounded to 1.
                let score = if width == 2 { row[c] - row[1 - c] } else { row[c] };
                (score, target as usize == c)
            })
            .collect();
        scores.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let positive = scores.iter().filter(|(_, is)| *is).count() as f64;
        let negative = scores.len() as f64 - positive;
        if positive == 0.0 || negative == 0.0 {
            return None;
        }
        let mut lower = 0.0;
        let mut sum = 0.0;
        for ties in scores.chunk_by(|a, b| a.0 == b.0) {
            let of_class = ties.iter().filter(|(_, is)| *is).count() as f64;
            let others = ties.len() as f64 - of_class;
            // A tie counts half.
            sum += of_class * (lower + others / 2.0);
            lower += others;
        }
        Some(sum / (positive * negative))
    }
}

/// The class with the highest score. Of equal scores the first class wins, as in `classify`.
fn best_class(row: &[f64]) -> usize {
    (1..row.len()).fold(0, |best, c| if row[c] > row[best] { c } else { best })
}

/// `part / whole`; `None` if `whole` is 0.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, sum) = values.fold((0u64, 0.0), |(n, sum), x| (n + 1, sum + x));
    (n > 0).then(|| sum / n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(classes: usize, rows: &[(i32, &[f32])]) -> ClassifierMetrics {
        let mut task = TaskScores::new("t".to_owned(), (0..classes).map(|c| c.to_string()).collect());
        rows.iter().for_each(|&(target, row)| task.add_probabilities(target, row));
        task.metrics().expect("examples")
    }

    fn close(found: Option<f64>, wanted: f64) {
        assert!(found.is_some_and(|x| (x - wanted).abs() < 1e-6), "{found:?} is not {wanted}");
    }

    /// Three of four pairs are in the right order, and one of four examples is classified wrongly.
    #[test]
    fn two_classes() {
        let found = task(
            2,
            &[(0, &[0.9, 0.1]), (0, &[0.7, 0.3]), (1, &[0.75, 0.25]), (1, &[0.15, 0.85]), (-1, &[1.0, 0.0])],
        );
        assert_eq!(found.examples, 4);
        close(found.auroc, 0.75);
        close(Some(found.accuracy), 0.75);
        close(found.f1, 2.0 / 3.0);
        close(found.macro_f1, (0.8 + 2.0 / 3.0) / 2.0);
        close(Some(found.loss), -(0.9f64.ln() + 0.7f64.ln() + 0.25f64.ln() + 0.85f64.ln()) / 4.0);
        // Confidences 0.9, 0.7, 0.75 (wrong) and 0.85, each in a bin of its own.
        close(Some(found.expected_calibration_error), (0.1 + 0.3 + 0.75 + 0.15) / 4.0);
        assert_eq!(found.calibration.iter().map(|bin| bin.examples).sum::<u64>(), 4);
    }

    #[test]
    fn ties_count_half_and_a_missing_class_has_no_area() {
        let half: &[f32] = &[0.5, 0.5];
        close(task(2, &[(0, half), (1, half)]).auroc, 0.5);
        assert_eq!(task(2, &[(1, half), (1, half)]).auroc, None);
        let found = task(3, &[(0, &[0.5, 0.3, 0.2]), (1, &[0.2, 0.5, 0.3]), (1, &[0.6, 0.3, 0.1])]);
        close(found.auroc, (0.5 + 0.75) / 2.0);
        close(found.f1, (2.0 / 3.0 + 2.0 / 3.0) / 2.0);
        assert_eq!(found.classes[2].f1, None);
    }

    /// Logits whose softmax rounds to 0 and 1 keep their order.
    #[test]
    fn saturated_logits_keep_their_order() {
        let mut task = TaskScores::new("t".to_owned(), vec!["a".to_owned(), "b".to_owned()]);
        for (target, margin) in [(0, 100.0), (1, 101.0), (0, 99.0), (1, 102.0)] {
            task.add_logits(target, &[0.0, margin]);
        }
        close(task.metrics().expect("examples").auroc, 1.0);
    }
}
