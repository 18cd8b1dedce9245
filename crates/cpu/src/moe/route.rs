//! Top-k expert routing: the experts of each token, the rows sorted by expert, and the gradient of the gates.
//!
//! Invariant: a token's experts depend on its own logits only, and which of its rows are dropped on its pack only. The
//! rows are sorted by a counting sort with one range of tokens per thread, in integer arithmetic, so the result does not
//! depend on the ranges.

use crate::Cpu;
use crate::packs::Packs;
use crate::simd::isa::SimdKernel;
use crate::simd::math::exp;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::marker::PhantomData;
use core::ops::Range;

/// Capacity of the experts.
#[derive(Clone, Copy)]
pub struct ExpertCapacity<'a> {
    /// The packs of the tokens.
    pub packs: Packs<'a>,
    /// Maximum number of rows of one expert from a pack, by the number of tokens of the pack.
    pub limit: &'a dyn Fn(usize) -> usize,
}

/// Parameters of the choice of experts.
#[derive(Clone, Copy)]
pub struct ExpertChoice<'a> {
    /// Experts per token, at least one.
    pub top_k: usize,
    /// Whether the gates of a token sum to 1.
    pub renormalise: bool,
    /// Maximum rows of the experts.
    pub capacity: ExpertCapacity<'a>,
}

/// Outputs of routing, for T tokens, k experts per token and E experts.
pub struct Routed<'a> {
    /// (T, k) gates, 0 if the row was dropped.
    pub gates: RowsMut<'a>,
    /// (T, k) chosen experts, largest gate first.
    pub experts: Option<&'a mut [i32]>,
    /// (kT) choice, t k + j, that each sorted row comes from; -1 past the last row.
    pub order: &'a mut [i32],
    /// (kT) sorted row of each choice; -1 if it was dropped.
    pub places: &'a mut [i32],
    /// (E + 1) first row of each expert, then the end of the last one's rows.
    pub offsets: &'a mut [i32],
    /// (1) number of dropped rows.
    pub dropped: Option<&'a mut [i32]>,
}

/// Number of words of the scratch of [`route`], for a step of `packs` packs on `threads` threads.
pub const fn scratch_words(experts: usize, packs: usize, threads: usize) -> usize {
    2 * experts.next_multiple_of(LANES) * (threads + packs)
}

/// Routes each token to the experts of its `top_k` largest `logits` (T, E), with ties to the lower expert. The gates
/// are their softmax. The rows are sorted by expert, and by token within an expert; the rows of a pack past an expert's
/// capacity are dropped. `scratch` holds [`scratch_words`]. Panics if the shapes do not match.
pub fn route(cpu: &Cpu, choice: ExpertChoice<'_>, logits: Rows<'_>, to: Routed<'_>, scratch: &mut [f32]) {
    let ExpertChoice { top_k, renormalise, capacity } = choice;
    let tokens = logits.rows();
    let experts = logits.cols();
    let rows = tokens * top_k;
    assert!(0 < top_k && top_k <= experts && i32::try_from(rows).is_ok(), "{top_k} of {experts} experts");
    assert!(to.gates.rows() == tokens && to.gates.cols() == top_k, "gates are (T, k)");
    assert!(to.order.len() == rows && to.places.len() == rows && to.offsets.len() == experts + 1);
    assert!(to.experts.as_ref().is_none_or(|e| e.len() == rows), "experts are (T, k)");
    assert_eq!(capacity.packs.rows(), tokens, "tokens of the packs");
    let packs = capacity.packs;
    let words = scratch_words(experts, packs.count(), cpu.threads());
    let scratch = &mut bytemuck::cast_slice_mut::<f32, i32>(scratch)[..words];
    let (counts, room) = scratch.split_at_mut(words / 2);
    counts.fill(0);
    let segments = Segments {
        tokens,
        // At least one, because it divides the rows of packs; without tokens there is nothing to divide.
        tokens_per_task: tokens.div_ceil(cpu.threads()).max(1),
        experts,
    };
    {
        let counts = SharedIntegers::new(&mut *counts);
        let places = SharedIntegers::new(to.places);
        let chosen = to.experts.map(SharedIntegers::new);
        cpu.pool().run(cpu.threads(), &|task, _| {
            let gates = &to.gates;
            let chosen = chosen.as_ref();
            let places = &places;
            for part in packs.parts(segments.tokens_of(task)) {
                let counts = counts.part(segments.words(task, part.index));
                let range = part.rows;
                cpu.isa().run(ChooseExperts { renormalise, logits, gates, chosen, places, counts, range });
            }
        });
    }
    let kept = first_rows(segments, capacity, counts, room, to.offsets);
    {
        let order = SharedIntegers::new(&mut *to.order);
        let places = SharedIntegers::new(to.places);
        let next = SharedIntegers::new(counts);
        let room = SharedIntegers::new(room);
        cpu.pool().run(cpu.threads(), &|task, _| {
            for part in packs.parts(segments.tokens_of(task)) {
                let next = next.part(segments.words(task, part.index));
                let room = room.part(segments.words(task, part.index));
                let order = &order;
                let places = &places;
                let gates = &to.gates;
                AssignRows { top_k, tokens: part.rows, next, room, order, places, gates }.run();
            }
        });
    }
    to.order[kept..].fill(-1);
    if let Some([dropped]) = to.dropped {
        *dropped = (rows - kept) as i32;
    }
}

/// Division of the tokens: a segment is the tokens of one task in one pack. It has one word for each expert.
#[derive(Clone, Copy)]
struct Segments {
    tokens: usize,
    tokens_per_task: usize,
    experts: usize,
}

impl Segments {
    /// The tokens of a task.
    fn tokens_of(self, task: usize) -> Range<usize> {
        let first = (task * self.tokens_per_task).min(self.tokens);
        first..((task + 1) * self.tokens_per_task).min(self.tokens)
    }

    /// The tasks that have tokens among `tokens`.
    fn tasks_of(self, tokens: &Range<usize>) -> Range<usize> {
        tokens.start / self.tokens_per_task..tokens.end.div_ceil(self.tokens_per_task)
    }

    /// Index of the first word of a segment.
    fn start(self, task: usize, pack: usize) -> usize {
        // From one segment to the next, the index of the task or of the pack rises, or both, so their sum numbers the
        // segments.
        (task + pack) * self.experts.next_multiple_of(LANES)
    }

    /// The words of a segment.
    fn words(self, task: usize, pack: usize) -> Range<usize> {
        self.start(task, pack)..self.start(task, pack) + self.experts
    }
}

/// Turns the number of choices per segment and expert into the row of the segment's first choice at that expert, fills
/// `room` with the number of rows that the expert still takes from the pack at the start of the segment, and `offsets`
/// with the first row of every expert. Returns the number of rows that are not dropped.
fn first_rows(
    segments: Segments,
    capacity: ExpertCapacity<'_>,
    counts: &mut [i32],
    room: &mut [i32],
    offsets: &mut [i32],
) -> usize {
    let Some((end, offsets)) = offsets.split_last_mut() else { return 0 };
    for (index, pack) in capacity.packs.iter().enumerate().filter(|(_, pack)| !pack.rows.is_empty()) {
        let limit = (capacity.limit)(pack.rows.len()).min(i32::MAX as usize) as i32;
        let tasks = segments.tasks_of(&pack.rows);
        room[segments.start(tasks.start, index)..segments.start(tasks.end, index)].fill(limit);
    }
    let mut row = 0;
    for (expert, offset) in offsets.iter_mut().enumerate() {
        *offset = row;
        for (index, pack) in capacity.packs.iter().enumerate().filter(|(_, pack)| !pack.rows.is_empty()) {
            let mut taken = 0;
            for task in segments.tasks_of(&pack.rows) {
                let at = segments.start(task, index) + expert;
                room[at] -= taken;
                let kept = core::mem::replace(&mut counts[at], row).min(room[at]);
                taken += kept;
                row += kept;
            }
        }
    }
    *end = row;
    row as usize
}

/// Assigns rows to the choices of the tokens of a segment.
struct AssignRows<'a> {
    top_k: usize,
    tokens: Range<usize>,
    /// For each expert, the row in which the next token that chose it is placed.
    next: SharedIntegers<'a>,
    /// The number of rows that each expert still takes.
    room: SharedIntegers<'a>,
    order: &'a SharedIntegers<'a>,
    /// The expert of each choice, replaced by its row.
    places: &'a SharedIntegers<'a>,
    gates: &'a RowsMut<'a>,
}

impl AssignRows<'_> {
    fn run(self) {
        for t in self.tokens {
            for j in 0..self.top_k {
                let i = t * self.top_k + j;
                // SAFETY: the words of this segment and the choices of its tokens belong to this task; the rows of a
                // segment at an expert are followed by those of the next, so no other choice has this row; gate (t, j)
                // is inside the matrix.
                unsafe {
                    let expert = self.places.get(i) as usize;
                    let room = self.room.get(expert);
                    if room > 0 {
                        let row = self.next.get(expert);
                        self.next.set(expert, row + 1);
                        self.room.set(expert, room - 1);
                        self.order.set(row as usize, i as i32);
                        self.places.set(i, row);
                    } else {
                        self.places.set(i, -1);
                        self.gates.row(t).add(j).write(0.0);
                    }
                }
            }
        }
    }
}

/// A slice of i32 that the threads of a kernel access concurrently, at disjoint elements.
struct SharedIntegers<'a> {
    start: *mut i32,
    len: usize,
    life: PhantomData<&'a mut [i32]>,
}

// SAFETY: the callers of `get` and `set` promise that no two threads access the same element.
unsafe impl Sync for SharedIntegers<'_> {}

impl<'a> SharedIntegers<'a> {
    /// Borrows all of `data`.
    fn new(data: &'a mut [i32]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), life: PhantomData }
    }

    /// Borrows the elements `range`. Panics if the range exceeds the data.
    fn part(&self, range: Range<usize>) -> SharedIntegers<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "inside");
        SharedIntegers { start: self.start.wrapping_add(range.start), len: range.len(), life: PhantomData }
    }

    /// Reads element `i`.
    ///
    /// # Safety
    /// No thread writes element `i` at the same time.
    unsafe fn get(&self, i: usize) -> i32 {
        assert!(i < self.len, "element {i} of {}", self.len);
        // SAFETY: inside; the caller promises that no other thread writes it.
        unsafe { self.start.add(i).read() }
    }

    /// Writes element `i`.
    ///
    /// # Safety
    /// No other thread accesses element `i` at the same time.
    unsafe fn set(&self, i: usize, value: i32) {
        assert!(i < self.len, "element {i} of {}", self.len);
        // SAFETY: inside; the caller promises that no other thread accesses it.
        unsafe { self.start.add(i).write(value) }
    }
}

/// Computes gates and experts for a range of tokens. `places` holds the experts until rows are assigned.
struct ChooseExperts<'a> {
    renormalise: bool,
    logits: Rows<'a>,
    gates: &'a RowsMut<'a>,
    chosen: Option<&'a SharedIntegers<'a>>,
    places: &'a SharedIntegers<'a>,
    counts: SharedIntegers<'a>,
    range: Range<usize>,
}

impl SimdKernel for ChooseExperts<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let experts = self.logits.cols();
        let k = self.gates.cols();
        for t in self.range.clone() {
            let choices = self.places.part(t * k..(t + 1) * k);
            // SAFETY: row t of the logits, which no output overlaps, and row t of the gates, the choices and the
            // counts, which belong to this task.
            unsafe {
                let logits = core::slice::from_raw_parts(self.logits.row(t), experts);
                let gates = core::slice::from_raw_parts_mut(self.gates.row(t), k);
                largest(logits, gates, &choices);
                for j in 0..k {
                    let expert = choices.get(j);
                    self.counts.set(expert as usize, self.counts.get(expert as usize) + 1);
                    if let Some(chosen) = self.chosen {
                        chosen.set(t * k + j, expert);
                    }
                }
                let top = s.splat(gates[0]);
                // The gates hold the chosen logits here: renormalised gates are a softmax over these, others over all
                // logits.
                let over = if self.renormalise { &*gates } else { logits };
                let sum = s.splat(exponentials(s, over, top));
                for part in gates.chunks_mut(LANES) {
                    let e = exp(s, s.sub(s.load_n(part.as_ptr(), part.len()), top));
                    s.store_n(part.as_mut_ptr(), s.div(e, sum), part.len());
                }
            }
        }
    }
}

/// Selects the largest `logits` into `best`, and their indices into `indices`, by insertion. `>` keeps the lower of
/// two equal logits' indices first. With NaN logits the result still has as many indices, all different.
///
/// # Safety
/// No other thread accesses `indices`, which has the length of `best`.
#[inline(always)]
unsafe fn largest(logits: &[f32], best: &mut [f32], indices: &SharedIntegers<'_>) {
    for (e, &logit) in logits.iter().enumerate() {
        let mut at = e.min(best.len());
        if at == best.len() {
            at -= 1;
            if logit.partial_cmp(&best[at]) != Some(core::cmp::Ordering::Greater) {
                continue;
            }
        }
        while at > 0 && logit > best[at - 1] {
            best[at] = best[at - 1];
            // SAFETY: the caller's promise.
            unsafe { indices.set(at, indices.get(at - 1)) };
            at -= 1;
        }
        best[at] = logit;
        // SAFETY: the caller's promise.
        unsafe { indices.set(at, e as i32) };
    }
}

/// `sum exp(x - top)` over a slice.
#[inline(always)]
fn exponentials<S: Simd>(s: S, x: &[f32], top: S::V) -> f32 {
    let mut sum = s.splat(0.0);
    for part in x.chunks(LANES) {
        // SAFETY: a chunk of the slice.
        let e = exp(s, s.sub(unsafe { s.load_n(part.as_ptr(), part.len()) }, top));
        sum = s.add(sum, s.first(e, s.splat(0.0), part.len()));
    }
    s.sum(sum)
}

/// Results of the forward pass that the gradient of the gates needs.
#[derive(Clone, Copy)]
pub struct ChosenExperts<'a> {
    /// Whether the gates of a token sum to 1.
    pub renormalise: bool,
    /// Logits (T, E).
    pub logits: Rows<'a>,
    /// Chosen experts (T, k), below E.
    pub experts: &'a [u32],
    /// Sorted rows (kT), below zero if the row was dropped: its gate is constant.
    pub places: &'a [i32],
}

/// Gradient of the gates: dlogits (T, E) for dgates (T, k). It is `p (d - sum p d)`, where p are the gates before
/// rows were dropped, over the chosen experts (renormalised) or over all, and d is zero for experts that were not
/// chosen. Panics if the shapes do not match.
pub fn route_grad(cpu: &Cpu, chosen: ChosenExperts<'_>, dgates: Rows<'_>, dlogits: RowsMut<'_>) {
    let tokens = dlogits.rows();
    let experts = dlogits.cols();
    let k = dgates.cols();
    assert!(chosen.logits.rows() == tokens && chosen.logits.cols() == experts, "logits are (T, E)");
    assert!(dgates.rows() == tokens, "dgates are (T, k)");
    assert!(chosen.experts.len() == tokens * k && chosen.places.len() == tokens * k, "k choices of each token");
    assert!(chosen.experts.iter().all(|&e| (e as usize) < experts), "an expert outside");
    cpu.by_rows(tokens, experts, &|range| {
        cpu.isa().run(RouteGradRows { chosen, dgates, dlogits: &dlogits, range });
    });
}

/// Gradient for the tokens `range`, for `Isa::run`.
struct RouteGradRows<'a> {
    chosen: ChosenExperts<'a>,
    dgates: Rows<'a>,
    dlogits: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for RouteGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let experts = self.dlogits.cols();
        for t in self.range.clone() {
            // SAFETY: row t of the logits, which the output does not overlap, and row t of the output, which belongs
            // to this task.
            let (logits, dlogits) = unsafe {
                let logits = core::slice::from_raw_parts(self.chosen.logits.row(t), experts);
                (logits, core::slice::from_raw_parts_mut(self.dlogits.row(t), experts))
            };
            self.token(s, t, logits, dlogits);
        }
    }
}

impl RouteGradRows<'_> {
    /// Writes the gradient of one token's logits.
    #[inline(always)]
    fn token<S: Simd>(&self, s: S, t: usize, logits: &[f32], dlogits: &mut [f32]) {
        let choices = t * self.dgates.cols()..(t + 1) * self.dgates.cols();
        let top = logits.iter().fold(f32::NEG_INFINITY, |top, &l| if l > top { l } else { top });
        let mut sum = s.splat(0.0);
        let mut dots = s.splat(0.0);
        for first in choices.clone().step_by(LANES) {
            let (e, d) = self.lanes(s, t, logits, top, first..choices.end.min(first + LANES));
            sum = s.add(sum, e);
            dots = s.fma(e, d, dots);
        }
        let sum = if self.chosen.renormalise { s.sum(sum) } else { exponentials(s, logits, s.splat(top)) };
        let mean = s.splat(s.sum(dots) / sum);
        let sum = s.splat(sum);
        if self.chosen.renormalise {
            dlogits.fill(0.0);
        } else {
            let minus = s.sub(s.splat(0.0), mean);
            for (x, y) in logits.chunks(LANES).zip(dlogits.chunks_mut(LANES)) {
                // SAFETY: parts of the two rows, of one length.
                unsafe {
                    let e = exp(s, s.sub(s.load_n(x.as_ptr(), x.len()), s.splat(top)));
                    s.store_n(y.as_mut_ptr(), s.mul(s.div(e, sum), minus), y.len());
                }
            }
        }
        // Last, because the chosen experts' gradients replace the values written above, which assume d = 0.
        for first in choices.clone().step_by(LANES) {
            let some = first..choices.end.min(first + LANES);
            let (e, d) = self.lanes(s, t, logits, top, some.clone());
            let mut out = [0.0; LANES];
            // SAFETY: sixteen f32.
            unsafe { s.store(out.as_mut_ptr(), s.mul(s.div(e, sum), s.sub(d, mean))) };
            for (&expert, &grad) in self.chosen.experts[some].iter().zip(&out) {
                dlogits[expert as usize] = grad;
            }
        }
    }

    /// `exp(logit - top)` and the gradients of the gates, for at most sixteen choices of token t; zeros in the other
    /// lanes.
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S, t: usize, logits: &[f32], top: f32, choices: Range<usize>) -> (S::V, S::V) {
        let k = self.dgates.cols();
        let mut l = [f32::NEG_INFINITY; LANES];
        let mut d = [0.0; LANES];
        for (lane, i) in choices.enumerate() {
            l[lane] = logits[self.chosen.experts[i] as usize];
            if self.chosen.places[i] >= 0 {
                // SAFETY: gate i - t k of token t.
                d[lane] = unsafe { self.dgates.row(t).add(i - t * k).read() };
            }
        }
        // SAFETY: sixteen f32 each.
        unsafe { (exp(s, s.sub(s.load(l.as_ptr()), s.splat(top))), s.load(d.as_ptr())) }
    }
}
