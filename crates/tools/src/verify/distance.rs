//! Distance between a model in a reduced precision and the same model in f32, on one device and the same
//! sequences. Invariant: both sides are computed here; the tolerances are constants of this module.

use super::Verdict;
use super::compute::EncoderOutputs;
use plimsoll_plan::Precision;

/// Difference between the two f32 scores of a row below which its label may change with the precision.
const CLOSE: f32 = 0.3;

/// Mean embeddings of the same sequences in f32 (`wide`) and in the reduced precision (`narrow`).
pub(super) struct MeanEmbeddings {
    pub(super) wide: Vec<Vec<f32>>,
    pub(super) narrow: Vec<Vec<f32>>,
}

/// Tolerance of the relative L2 distance of hidden states.
fn bound(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 0.0,
        // A fifth of the tolerance of bf16: TF32 has 10 bits of mantissa, bf16 has 7.
        Precision::Tf32 => 2e-3,
        Precision::Bf16 | Precision::Fp16 => 1e-2,
        Precision::Int8 => 2e-2,
        Precision::Fp8 => 5e-2,
    }
}

/// Compares hidden states, mean embeddings and most likely tokens of the same sequences. Only the distance of
/// the hidden states is a check; the others are notes.
pub(super) fn answers(
    precision: Precision,
    wide: &[EncoderOutputs],
    narrow: &[EncoderOutputs],
    verdict: &mut Verdict,
) -> MeanEmbeddings {
    let name = precision.name();
    let count = wide.len();
    let hidden = relative_l2(narrow.iter().flat_map(|a| &a.hidden), wide.iter().flat_map(|a| &a.hidden));
    let mean = relative_l2(narrow.iter().flat_map(|a| &a.mean), wide.iter().flat_map(|a| &a.mean));
    let tolerance = bound(precision);
    let detail = format!(
        "hidden states of {count} sequences in {name}: relative L2 {hidden:.2e} off f32, {tolerance:.0e} allowed"
    );
    verdict.add("distance", hidden < tolerance, detail);
    verdict.note("distance", format!("means of {count} sequences in {name}: relative L2 {mean:.2e} off f32"));
    let tokens: usize = wide.iter().map(EncoderOutputs::tokens).sum();
    let wanted: Vec<usize> = wide.iter().flat_map(EncoderOutputs::most_likely).collect();
    let found: Vec<usize> = narrow.iter().flat_map(EncoderOutputs::most_likely).collect();
    if !wanted.is_empty() {
        let same = wanted.iter().zip(&found).filter(|(w, f)| w == f).count();
        verdict.note("distance", format!("{same} of {tokens} most likely letters are those of f32"));
    }
    MeanEmbeddings {
        wide: wide.iter().map(|answer| answer.mean.clone()).collect(),
        narrow: narrow.iter().map(|answer| answer.mean.clone()).collect(),
    }
}

/// Compares the head's scores, two per row, for embeddings in both precisions. Fails if a score is not finite
/// or a label changes on a row with clearly different f32 scores.
pub(super) fn scores(wide: &[f32], narrow: &[f32], verdict: &mut Verdict) {
    let rows = wide.len() / 2;
    let furthest = super::worst(narrow, wide);
    let pairs = wide.chunks(2).zip(narrow.chunks(2));
    let same = pairs.clone().filter(|(w, n)| is_virus(w) == is_virus(n)).count();
    let clear = pairs.filter(|(w, _)| (w[0] - w[1]).abs() >= CLOSE);
    let wrong = clear.filter(|(w, n)| is_virus(w) != is_virus(n)).count();
    let detail = format!(
        "scores of {rows} pairs of sequences: off f32 by {furthest:.1e} at most, {same} labels of {rows} agree; of those whose \
         scores differ by {CLOSE} or more, {wrong} do not"
    );
    verdict.add("distance", wrong == 0 && furthest.is_finite(), detail);
}

/// The label of a pair of scores: P(other), P(virus).
fn is_virus(scores: &[f32]) -> bool {
    scores[1] > scores[0]
}

/// `||found - wanted|| / ||wanted||`, summed in f64.
fn relative_l2<'a>(found: impl Iterator<Item = &'a f32>, wanted: impl Iterator<Item = &'a f32>) -> f64 {
    let mut error = 0.0;
    let mut norm = 0.0;
    for (f, w) in found.zip(wanted) {
        error += f64::from(f - w).powi(2);
        norm += f64::from(*w).powi(2);
    }
    // NaN if any value is NaN; NaN is not below any tolerance, so the check fails.
    (error / norm).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::CheckOutcome;
    use super::*;

    fn answer(scale: f32) -> EncoderOutputs {
        // Two tokens of width 1, two letters.
        EncoderOutputs {
            hidden: vec![3.0, 4.0 * scale],
            mean: vec![4.0 * scale],
            logits: vec![0.0, scale, -1.0, 1.0],
        }
    }

    #[test]
    fn hidden_states_are_held_to_the_bound_of_their_precision() {
        for (precision, passes) in [(Precision::Fp8, true), (Precision::Int8, false), (Precision::Bf16, false)]
        {
            let mut verdict = Verdict::new("a model");
            let means = answers(precision, &[answer(1.0)], &[answer(1.05)], &mut verdict);
            assert_eq!((means.wide[0][0], means.narrow[0][0]), (4.0, 4.2));
            assert_eq!(verdict.passes(), passes, "{verdict:?}");
            assert!(verdict.checks[0].detail.contains("relative L2 4.00e-2"), "{verdict:?}");
            assert!(verdict.checks[2].detail.starts_with("2 of 2 "), "{verdict:?}");
        }
        let mut verdict = Verdict::new("a model");
        answers(Precision::Fp8, &[answer(1.0)], &[answer(f32::NAN)], &mut verdict);
        assert_eq!(verdict.checks[0].outcome, CheckOutcome::Fail);
    }

    #[test]
    fn labels_may_differ_where_scores_are_close() {
        for (narrow, passes) in [([0.45, 0.55, 0.1, 0.9], true), ([0.6, 0.4, 0.6, 0.4], false)] {
            let mut verdict = Verdict::new("a head");
            scores(&[0.55, 0.45, 0.1, 0.9], &narrow, &mut verdict);
            assert_eq!(verdict.passes(), passes, "{verdict:?}");
            assert!(verdict.checks[0].detail.contains("1 labels of 2 agree"), "{verdict:?}");
        }
    }
}
