//! The entropy of a text as an order-1 Markov source: what a model reaches that knows the byte before and nothing
//! else. Invariant: it is that of the text's own counts, so no order-1 model has a lower loss on it.

/// The conditional entropy of a byte given the one before, in nats a byte (Shannon 1948, section 6, for digrams).
/// A text of fewer than two bytes has none: 0.
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
        // Behind an a as often a b as a c; behind those an a.
        check(b"abacabacabaca", 0.5 * 2_f64.ln());
        check(b"aabba", 2_f64.ln());
    }
}
