//! Auxiliary losses of the router and their gradient: load balancing, which favours an even use of experts, and z
//! loss, which keeps logits small.
//!
//! Invariant: choices are counted in integers, and the probabilities of a pack are added token by token in f64, so the
//! loss of a pack depends neither on the number of threads nor on the packs beside it. A pack without tokens or without
//! targets adds nothing.

use crate::Cpu;
use crate::packs::{Pack, Packs};
use crate::simd::isa::SimdKernel;
use crate::simd::math::{exp, log_sum_exp};
use crate::simd::{LANES, Simd};
use crate::training::total::total;
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Results of [`router_loss`], each rounded from f64 separately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLossValues {
    /// The sum of both terms.
    pub sum: f32,
    /// Sum over packs of `balance E sum_e f_e P_e` times the targets of the pack.
    pub balance: f32,
    /// Sum over packs of `z mean_t lse_t^2` times the targets of the pack.
    pub z: f32,
}

/// The routing of a step, logits (T, E) and the experts of each token, and the weights of its losses.
#[derive(Clone, Copy)]
pub struct RouterChoices<'a> {
    /// (T, E).
    pub logits: Rows<'a>,
    /// (T, k), each below E.
    pub experts: &'a [u32],
    /// The packs of the tokens.
    pub packs: Packs<'a>,
    /// Weight of the load-balancing loss, `E sum_e f_e P_e`.
    pub balance: f32,
    /// Weight of the z loss, the mean of `lse^2`.
    pub z: f32,
}

impl RouterChoices<'_> {
    /// Panics if the packs have another number of tokens than the logits, or an expert is outside.
    fn check(&self) {
        let tokens = self.logits.rows();
        let experts = self.logits.cols();
        assert_eq!(self.packs.rows(), tokens, "tokens of the packs");
        assert!(self.experts.len().is_multiple_of(tokens.max(1)), "k experts of each token");
        assert!(self.experts.iter().all(|&e| (e as usize) < experts), "an expert outside");
    }

    /// The experts of the tokens of a pack.
    fn of_pack(&self, pack: &Pack) -> &[u32] {
        let k = self.experts.len() / self.logits.rows().max(1);
        &self.experts[pack.rows.start * k..pack.rows.end * k]
    }
}

/// Computes the sum over packs of `n (balance E sum_e f_e P_e + z mean_t lse_t^2)` and its two terms. n is the number of
/// targets of the pack, f_e the share of its choices that went to expert e, P_e the mean probability of e, and lse_t the
/// log-sum-exp of the logits of token t. `scratch` holds two words for each token.
pub fn router_loss(cpu: &Cpu, choices: RouterChoices<'_>, scratch: &mut [f32]) -> RouterLossValues {
    choices.check();
    let logits = choices.logits;
    let tokens = logits.rows();
    let columns = logits.cols();
    let scratch = &mut scratch[..2 * tokens];
    let sums = RowsMut::new(scratch, tokens, 2, 2);
    cpu.by_rows(tokens, columns, &|range| cpu.isa().run(Normalisers { logits, sums: &sums, range }));
    let sums = &*scratch;
    // A pack without targets is skipped and not multiplied by 0, because its logits may be infinite.
    let balance = total(cpu, choices.packs.count(), &|index| {
        let pack = choices.packs.get(index);
        if adds_nothing(&pack) {
            return 0.0;
        }
        f64::from(choices.balance) * balance_of(cpu, choices, &pack, of_pack(sums, &pack)) * target_share(&pack)
    });
    let z = total(cpu, choices.packs.count(), &|index| {
        let pack = choices.packs.get(index);
        if adds_nothing(&pack) {
            return 0.0;
        }
        let lses = of_pack(sums, &pack).chunks_exact(2).map(|pair| log_sum_exp(pair[0], f64::from(pair[1])));
        let squares = lses.map(|lse| lse * lse).sum::<f64>();
        f64::from(choices.z) * squares * target_share(&pack)
    });
    RouterLossValues { sum: (balance + z) as f32, balance: balance as f32, z: z as f32 }
}

/// The normalisers of the tokens of a pack, two words for each token.
fn of_pack<'a>(sums: &'a [f32], pack: &Pack) -> &'a [f32] {
    &sums[2 * pack.rows.start..2 * pack.rows.end]
}

/// Whether a pack has no part in the loss.
fn adds_nothing(pack: &Pack) -> bool {
    pack.targets == 0 || pack.rows.is_empty()
}

/// Number of targets of a pack for each of its tokens.
fn target_share(pack: &Pack) -> f64 {
    f64::from(pack.targets) / pack.rows.len().max(1) as f64
}

/// `T E sum_e f_e P_e` of a pack with T tokens. `sums` holds the softmax normalisers of its tokens.
fn balance_of(cpu: &Cpu, choices: RouterChoices<'_>, pack: &Pack, sums: &[f32]) -> f64 {
    let columns = choices.logits.cols();
    let logits = choices.logits.part(pack.rows.start, pack.rows.len());
    let experts = choices.of_pack(pack);
    let mut balance = 0.0;
    for first in (0..columns).step_by(LANES) {
        let mut probabilities = [0.0; LANES];
        cpu.isa().run(Probabilities { logits, sums, first, out: &mut probabilities });
        let mut counts = [0_u64; LANES];
        for &expert in experts {
            if let Some(count) = (expert as usize).checked_sub(first).and_then(|lane| counts.get_mut(lane)) {
                *count += 1;
            }
        }
        balance += counts.iter().zip(&probabilities).map(|(&n, p)| n as f64 * p).sum::<f64>();
    }
    balance * columns as f64 / experts.len().max(1) as f64
}

/// Gradient of [`router_loss`]: dlogits (T, E) for a scalar dloss. `shares` is scratch of one f32 for each pack and
/// expert.
pub fn router_loss_grad(
    cpu: &Cpu,
    choices: RouterChoices<'_>,
    dloss: f32,
    dlogits: RowsMut<'_>,
    shares: &mut [f32],
) {
    choices.check();
    let logits = choices.logits;
    let tokens = logits.rows();
    let columns = logits.cols();
    assert!(dlogits.rows() == tokens && dlogits.cols() == columns, "dlogits are (T, E)");
    let shares = &mut shares[..choices.packs.count() * columns];
    for (pack, shares) in choices.packs.iter().zip(shares.chunks_exact_mut(columns)) {
        // The counts share their memory with the f32 shares: each is replaced by the bits of its share below.
        let counts: &mut [u32] = bytemuck::cast_slice_mut(shares);
        counts.fill(0);
        let experts = choices.of_pack(&pack);
        for &expert in experts {
            counts[expert as usize] += 1;
        }
        for count in counts {
            *count = (*count as f32 / experts.len().max(1) as f32).to_bits();
        }
    }
    let shares = &*shares;
    cpu.by_rows(tokens, columns, &|range| {
        for part in choices.packs.parts(range) {
            let shares = &shares[part.index * columns..(part.index + 1) * columns];
            let share = (f64::from(dloss) * target_share(&part.pack)) as f32;
            let balance = choices.balance * columns as f32 * share;
            let z = 2.0 * choices.z * share;
            cpu.isa().run(RouterLossGradRows {
                logits,
                shares,
                balance,
                z,
                dlogits: &dlogits,
                range: part.rows,
            });
        }
    });
}

/// The largest element; NaN is ignored.
fn top_of(row: &[f32]) -> f32 {
    row.iter().fold(f32::NEG_INFINITY, |top, &x| if x > top { x } else { top })
}

/// Softmax normalisers of the tokens `range`: (largest logit, sum of exp(logit - largest)) per token.
struct Normalisers<'a> {
    logits: Rows<'a>,
    sums: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for Normalisers<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for t in self.range.clone() {
            // SAFETY: row t of the logits.
            let row = unsafe { core::slice::from_raw_parts(self.logits.row(t), self.logits.cols()) };
            let top = top_of(row);
            let mut sum = s.splat(0.0);
            for part in row.chunks(LANES) {
                // SAFETY: a chunk of the row.
                let e = exp(s, s.sub(unsafe { s.load_n(part.as_ptr(), part.len()) }, s.splat(top)));
                sum = s.add(sum, s.first(e, s.splat(0.0), part.len()));
            }
            // SAFETY: row t holds two f32 and belongs to this task.
            unsafe {
                self.sums.row(t).write(top);
                self.sums.row(t).add(1).write(s.sum(sum));
            }
        }
    }
}

/// Sums over the tokens of a pack of the probabilities of sixteen experts, from expert `first` on.
struct Probabilities<'a> {
    logits: Rows<'a>,
    sums: &'a [f32],
    first: usize,
    out: &'a mut [f64; LANES],
}

impl SimdKernel for Probabilities<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = LANES.min(self.logits.cols() - self.first);
        for (t, pair) in self.sums.chunks_exact(2).enumerate() {
            let mut p = [0.0_f32; LANES];
            // SAFETY: n columns from `first` on of row t; sixteen f32.
            unsafe {
                let x = s.load_n(self.logits.row(t).add(self.first), n);
                let e = exp(s, s.sub(x, s.splat(pair[0])));
                s.store(p.as_mut_ptr(), s.div(e, s.splat(pair[1])));
            }
            self.out.iter_mut().zip(&p[..n]).for_each(|(sum, &p)| *sum += f64::from(p));
        }
    }
}

/// Gradient for the tokens `range`: `p_e (balance (f_e - sum_i f_i p_i) + z lse)`.
struct RouterLossGradRows<'a> {
    logits: Rows<'a>,
    shares: &'a [f32],
    balance: f32,
    z: f32,
    dlogits: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for RouterLossGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.shares.len();
        for t in self.range.clone() {
            // SAFETY: row t of the logits, which the output does not overlap, and row t of the output, which belongs
            // to this task.
            let (row, out) = unsafe {
                let row = core::slice::from_raw_parts(self.logits.row(t), columns);
                (row, core::slice::from_raw_parts_mut(self.dlogits.row(t), columns))
            };
            if self.balance == 0.0 && self.z == 0.0 {
                // As for the loss: not multiplied by 0.
                out.fill(0.0);
                continue;
            }
            let top = top_of(row);
            let mut sum = s.splat(0.0);
            let mut dot = s.splat(0.0);
            let parts = row.chunks(LANES).zip(self.shares.chunks(LANES));
            for ((x, f), e) in parts.zip(out.chunks_mut(LANES)) {
                let n = x.len();
                // SAFETY: three chunks of one length.
                unsafe {
                    let v = exp(s, s.sub(s.load_n(x.as_ptr(), n), s.splat(top)));
                    s.store_n(e.as_mut_ptr(), v, n);
                    sum = s.add(sum, s.first(v, s.splat(0.0), n));
                    dot = s.fma(v, s.load_n(f.as_ptr(), n), dot);
                }
            }
            let sum = s.sum(sum);
            let mean = s.splat(s.sum(dot) / sum);
            let z = s.splat(self.z * log_sum_exp(top, f64::from(sum)) as f32);
            for (f, out) in self.shares.chunks(LANES).zip(out.chunks_mut(LANES)) {
                let n = f.len();
                // SAFETY: two chunks of one length; the output holds the exponentials.
                unsafe {
                    let p = s.div(s.load_n(out.as_ptr(), n), s.splat(sum));
                    let slope = s.fma(s.splat(self.balance), s.sub(s.load_n(f.as_ptr(), n), mean), z);
                    s.store_n(out.as_mut_ptr(), s.mul(p, slope), n);
                }
            }
        }
    }
}
