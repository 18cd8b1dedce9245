//! Cosine and sine tables of rotary position embeddings.
//!
//! Invariant: an entry depends on its position and frequency only, never on `longest`.

/// Fills cos and sin, both (longest, inv_freq.len()), with the cosine and sine of `pos * inv_freq[j]`. The angle is an
/// f32 product, as in the training of the models (Su et al., 2021; RoFormer as ESM-2 has it); its cosine and sine are
/// computed in f64, by `libm`, whose bits are the same on every platform, and rounded once.
pub fn table(inv_freq: &[f32], longest: usize, cos: &mut [f32], sin: &mut [f32]) {
    let half = inv_freq.len();
    assert!(cos.len() == longest * half && sin.len() == longest * half, "tables of (longest, half)");
    if half == 0 {
        return;
    }
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (pos, (cos, sin)) in rows.enumerate() {
        for ((cos, sin), &freq) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let angle = f64::from(pos as f32 * freq);
            let (s, c) = libm::sincos(angle);
            *cos = c as f32;
            *sin = s as f32;
        }
    }
}
