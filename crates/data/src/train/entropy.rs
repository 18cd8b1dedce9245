//! Entropy of a text as an order-1 Markov source: the loss of the best model that sees only the preceding byte.
//! Invariant: probabilities are the text's own bigram frequencies, so no order-1 model has a lower loss on it.

/// Conditional entropy of a byte given the preceding byte, in nats per byte (Shannon 1948, section 6, for digrams);
/// 0 for a text of fewer than two bytes.
pub fn order_1(text: &[u8]) -> f64 {
    let mut pairs = vec![0_u64; 256 * 256];
    for pair in text.windows(2) {
        pairs[usize::from(pair[0]) * 256 + usize::from(pair[1])] += 1;
    }
    let all = text.len().saturating_sub(1);
    let mut nats = 0.0;
    for row in pairs.chunks_exact(256) {
        let before: u64 = row.iter().sum();
        let terms = row.iter().filter(|&&n| n > 0).map(|&n| n as f64 * (before as f64 / n as f64).ln());
        nats += terms.sum::<f64>();
    }
    nats / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &[u8], expected: f64) {
        assert!((order_1(text) - expected).abs() < 1e-12, "{}", order_1(text));
    }

    #[test]
    fn known_texts() {
        check(b"", 0.0);
        check(b"abababab", 0.0);
        // `a` is followed by `b` and `c` equally often; `b` and `c` are always followed by `a`.
        check(b"abacabacabaca", 0.5 * 2_f64.ln());
        check(b"aabba", 2_f64.ln());
    }
}
