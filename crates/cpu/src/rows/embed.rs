//! Embedding lookup: gathers rows of an embedding table by token id.
//!
//! Invariant: a token's row depends on its id and, with ESM's token dropout, on the share of mask tokens in its own
//! sequence. An id outside the table panics; memory outside the table is never read.

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// An embedding table, and a row that is added to every token's, for example BERT's token-type embedding.
#[derive(Clone, Copy)]
pub struct EmbeddingTable<'a, E> {
    /// One row per token id.
    pub table: Rows<'a, E>,
    /// The added row.
    pub plus: Option<&'a [E]>,
}

/// ESM's token dropout at inference: mask tokens have weight 0, all other tokens of a sequence the weight keep / (1 -
/// n_mask / n) over its n tokens, all in f32 (fair-esm, `esm2.py`; keep = 0.88 = 1 - 0.15 * 0.8 is the share of tokens
/// that were not masked in training).
#[derive(Clone, Copy)]
pub struct EsmTokenDropout<'a> {
    /// (start, end) of every sequence, ascending and disjoint; tokens outside of them have weight 0.
    pub spans: &'a [[u32; 2]],
    /// Id of the mask token.
    pub mask_id: u32,
    /// Share of tokens that were not masked in training.
    pub keep: f32,
}

impl EsmTokenDropout<'_> {
    /// The weight of the tokens `ids` of one sequence that are not masks.
    #[inline(always)]
    pub(crate) fn weight(&self, ids: &[u32]) -> f32 {
        let masks = ids.iter().filter(|&&id| id == self.mask_id).count();
        self.keep / (1.0 - masks as f32 / ids.len() as f32)
    }
}

/// Embedding lookup: `y[t] = table[ids[t]] + plus`. Panics if the shapes do not match or an id is out of range.
pub fn gather<E: Element>(cpu: &Cpu, ids: &[u32], embedding: EmbeddingTable<'_, E>, y: RowsMut<'_, E>) {
    check(ids, embedding, &y);
    let EmbeddingTable { table, plus } = embedding;
    cpu.by_rows(ids.len(), table.cols(), &|range| {
        for t in range {
            cpu.isa().run(EmbeddedToken { from: pick(table, ids[t]), scale: 1.0, plus, y: &y, t });
        }
    });
}

/// Embedding lookup with token dropout: `y[t] = (table[ids[t]] + plus) * weight`, and zeros for mask tokens. Rows outside
/// of the sequences are not written. Panics as [`gather`].
pub(crate) fn gather_esm<E: Element>(
    cpu: &Cpu,
    ids: &[u32],
    embedding: EmbeddingTable<'_, E>,
    dropout: EsmTokenDropout<'_>,
    y: RowsMut<'_, E>,
) {
    check(ids, embedding, &y);
    crate::check_spans(dropout.spans, ids.len());
    let EmbeddingTable { table, plus } = embedding;
    cpu.pool().run(dropout.spans.len(), &|task, _| {
        let span = dropout.spans[task][0] as usize..dropout.spans[task][1] as usize;
        let scale = dropout.weight(&ids[span.clone()]);
        for t in span {
            let from = (ids[t] != dropout.mask_id).then(|| pick(table, ids[t])).flatten();
            cpu.isa().run(EmbeddedToken { from, scale, plus, y: &y, t });
        }
    });
}

/// Panics unless the shapes match.
fn check<E: Element>(ids: &[u32], embedding: EmbeddingTable<'_, E>, y: &RowsMut<'_, E>) {
    let EmbeddingTable { table, plus } = embedding;
    assert!(plus.is_none_or(|p| p.len() == table.cols()), "the added row has the table's columns");
    assert_eq!(y.rows(), ids.len(), "one row per token");
    assert_eq!(y.cols(), table.cols(), "columns of the table");
}

/// Address of the table's row `id`. Panics if it is out of range. The result is always `Some`.
fn pick<E: Element>(table: Rows<'_, E>, id: u32) -> Option<*const E> {
    assert!((id as usize) < table.rows(), "token {id} of a table of {}", table.rows());
    Some(table.row(id as usize))
}

/// Row `t` of y: (the row `from` + `plus`) times `scale`, or zeros if `from` is `None`. For `Isa::run`.
struct EmbeddedToken<'a, E> {
    from: Option<*const E>,
    scale: f32,
    plus: Option<&'a [E]>,
    y: &'a RowsMut<'a, E>,
    t: usize,
}

impl<E: Element> SimdKernel for EmbeddedToken<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.y.cols();
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the length of the table's row `from`, of `plus` and of row t of y, which
            // only this task writes.
            unsafe {
                let v = match (self.from, self.plus) {
                    (Some(from), Some(plus)) => {
                        s.add(E::load_n(s, from.add(j), n), E::load_n(s, plus.as_ptr().add(j), n))
                    }
                    (Some(from), None) => E::load_n(s, from.add(j), n),
                    (None, _) => s.splat(0.0),
                };
                let v = if self.from.is_some() { s.mul(v, s.splat(self.scale)) } else { v };
                E::store_n(s, self.y.row(self.t).add(j), v, n);
            }
        }
    }
}
