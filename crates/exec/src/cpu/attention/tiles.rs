//! The forward pass of bf16 on the tiles of AMX: every query sees every key, nobody wants lse.
//!
//! Invariant: blocks of keys start at the sequence's start, and a row goes through them in order on its own: maximum,
//! weights, sums. Query blocks, strips and tasks only share packed keys, so the bits of a sequence depend on it alone.
//! What is not finite shows: a query's makes all its scores so, hence its maximum; a key's, which maxima and integers
//! would hide, is looked for.
//!
//! q and k are rotated in f32 and rounded to bf16; scores, maxima, sums and o are f32; weights are bf16 (see `weights`). ALiBi's bias is what the sums of scores begin with: a tile whose rows are one table, each read from one
//! element before.
//!
//! A strip is 16 queries. While the vector units make weights of one strip, the tiles multiply those of the strip before
//! by the values and make the scores of the next: a turn of them stands behind each row.

mod pack;
mod registers;
mod weights;

use super::super::Cpu;
use super::super::amx::{SIDE, STEP, TILE, Tiles, Unit};
use super::super::element::Bf16;
use super::super::simd::Simd;
use super::super::simd_x86::Avx512;
use super::super::view::{Rows, RowsMut};
use super::pack::Head;
use super::{Attention, Block, blocks, workspace_bytes};
use core::arch::x86_64::*;
use core::f32::consts::LOG2_E;
use graph::ops::Mask;
use pack::{Cut, Largest, Order, Pairs, columns};
pub(in super::super) use registers::Registers;
use weights::{Running, soften};

/// Bytes of a row of a tile.
const LINE: usize = 64;
/// Keys of a block, and the row stride of a strip of scores.
const KEYS: usize = 256;
const SCORES: usize = KEYS + SIDE;
/// Steps of a block of keys.
const STEPS: usize = KEYS / STEP;
/// Queries of a block.
const QUERIES: usize = 256;
const STRIPS: usize = QUERIES / SIDE;
/// Columns of heads that one task takes together: some cache lines.
const TOGETHER: usize = 128;
/// Tiles of columns that are summed at one time.
const WIDE: usize = 4;

/// Whether this CPU has the vector instructions that stand between the tiles: every one with AMX does, unless somebody
/// hides them.
pub(in super::super) fn has_lanes() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512bf16")
}

/// Whether this kernel takes that form: inference's. A scale that is not positive would turn maxima into minima.
pub(super) fn takes(config: Attention<'_>, lse: bool) -> bool {
    has_lanes() && config.mask == Mask::Full && !lse && config.scale > 0.0
}

/// As `attention`, for an `Isa` with tiles and a form that it takes.
pub(super) fn attention(
    cpu: &Cpu,
    config: Attention<'_>,
    qkv: [Rows<'_, Bf16>; 3],
    spans: &[[u32; 2]],
    o: &RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    assert!(cpu.isa().has_tiles() && takes(config, false), "tiles, and a form for them");
    // SAFETY: `has_tiles` proves them; a thread has no others while it runs a task.
    attention_on(cpu, config, qkv, spans, o, workspace, &|| unsafe { <Tiles>::configure() });
}

/// The same on the registers that `configure` gives each task.
pub(in super::super) fn attention_on<R: Registers>(
    cpu: &Cpu,
    config: Attention<'_>,
    [q, k, v]: [Rows<'_, Bf16>; 3],
    spans: &[[u32; 2]],
    o: &RowsMut<'_, Bf16>,
    workspace: &mut [f32],
    configure: &(dyn Fn() -> R + Sync),
) {
    config.check(&[q, o.as_rows()], [k, v], None, spans);
    let each = workspace_bytes(config.head_dim) / 4;
    assert!(has_lanes() && workspace.len() >= each * cpu.threads(), "lanes, workspace");
    let job = Job { config, q, k, v, o, order: Order::new(Cut::new(config.head_dim)) };
    let scratch = workspace.as_mut_ptr() as usize;
    blocks(cpu, spans, (config.heads, QUERIES), TOGETHER / config.head_dim, &|places, worker| {
        let scratch = (scratch as *mut f32).wrapping_add(worker * each);
        let mut tiles = configure();
        for place in places {
            // SAFETY: the instructions are there; a worker's index, hence its scratch, is its own.
            unsafe { job.run(place, scratch, &mut tiles) };
        }
    });
}

/// What is attended.
struct Job<'a> {
    config: Attention<'a>,
    q: Rows<'a, Bf16>,
    k: Rows<'a, Bf16>,
    v: Rows<'a, Bf16>,
    o: &'a RowsMut<'a, Bf16>,
    order: Order,
}

impl Job<'_> {
    /// One block of queries of one head.
    ///
    /// # Safety
    /// `has_lanes`; the block lies in what was checked; `scratch` is a workspace of this thread's own.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn run<R: Registers>(
        &self,
        (place, next): (Block, Option<Block>),
        scratch: *mut f32,
        tiles: &mut R,
    ) {
        let parts = Parts::new(self.config.head_dim);
        debug_assert!(parts.len <= workspace_bytes(self.config.head_dim), "the parts fit");
        // SAFETY: as the caller promises.
        let s = unsafe { Avx512::assume() };
        let cut = Cut::new(self.config.head_dim);
        let task = Task { job: self, place, next, parts, cut, scratch: scratch.cast(), s };
        // SAFETY: as the caller promises.
        unsafe { task.run(tiles) };
    }
}

/// Where the parts of a thread's workspace start, in bytes; all are whole cache lines.
#[derive(Clone, Copy)]
struct Parts {
    /// [strip][step of the head] tiles
    queries: usize,
    /// [16 keys][step of the head] tiles
    keys: usize,
    /// [16 columns][step of keys] tiles
    values: usize,
    /// [2][16][SCORES] f32: two strips take turns
    scores: usize,
    /// [QUERIES][columns in whole tiles] f32
    out: usize,
    /// [2 * QUERIES + KEYS] f32: ALiBi's bias by distance
    bias: usize,
    len: usize,
}

impl Parts {
    const fn new(head_dim: usize) -> Parts {
        let cut = Cut::new(head_dim);
        let queries = 0;
        let keys = queries + STRIPS * cut.steps() * TILE;
        let values = keys + KEYS / SIDE * cut.steps() * TILE;
        let scores = values + cut.tiles() * STEPS * TILE;
        let out = scores + 2 * SIDE * SCORES * 4;
        let bias = out + QUERIES * cut.tiles() * LINE;
        Parts { queries, keys, values, scores, out, bias, len: bias + (QUERIES + KEYS + 2 * SIDE) * 4 }
    }
}

/// One block of queries of one head.
struct Task<'a> {
    job: &'a Job<'a>,
    place: Block,
    next: Option<Block>,
    parts: Parts,
    cut: Cut,
    scratch: *mut u8,
    s: Avx512,
}

/// A block of keys: those from `start` on.
#[derive(Clone, Copy)]
struct Keys {
    start: usize,
    len: usize,
}

impl Task<'_> {
    /// # Safety
    /// `Job::run`'s alone.
    #[inline(always)]
    unsafe fn run<R: Registers>(&self, tiles: &mut R) {
        let count = self.place.queries.1 - self.place.queries.0;
        // SAFETY: every row and column below lies in the block's sequence and head.
        unsafe {
            for strip in 0..count.div_ceil(SIDE) {
                self.pack_queries(strip);
            }
            let mut running = [Running::new(); STRIPS];
            for start in (0..self.place.len).step_by(KEYS) {
                let keys = Keys { start, len: KEYS.min(self.place.len - start) };
                self.pack_keys(keys, &mut running);
                self.pack_bias(keys);
                self.attend(tiles, keys, count.div_ceil(SIDE), &mut running);
            }
        }
    }

    /// All strips against one block of keys.
    ///
    /// # Safety
    /// Queries, keys, values and bias are packed.
    #[inline(always)]
    unsafe fn attend<R: Registers>(
        &self,
        tiles: &mut R,
        keys: Keys,
        strips: usize,
        running: &mut [Running; STRIPS],
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            for pair in 0..pairs(keys) {
                self.score(tiles, keys, 0, pair);
            }
            for strip in 0..strips {
                self.soften(tiles, keys, strip, strips, &mut running[strip]);
                if strip > 0 {
                    self.finish(keys, strip - 1, &running[strip - 1]);
                }
            }
            for turn in 0..self.turns(keys) {
                self.gather(tiles, keys, strips - 1, turn);
            }
            self.finish(keys, strips - 1, &running[strips - 1]);
        }
    }

    /// Scores of a strip to weights. Behind each row a turn of the tiles: first the strip before is multiplied by the
    /// values, then the next one by the keys, over the weights of the one before.
    ///
    /// # Safety
    /// The strip's scores are there.
    #[inline(always)]
    unsafe fn soften<R: Registers>(
        &self,
        tiles: &mut R,
        keys: Keys,
        strip: usize,
        strips: usize,
        running: &mut Running,
    ) {
        const HALF: usize = SIDE / 2;
        let rows = self.rows(strip);
        let turns = if strip > 0 { self.turns(keys) } else { 0 };
        let pairs = if strip + 1 < strips { pairs(keys) } else { 0 };
        // SAFETY: as the caller promises; there are at most 8 pairs.
        unsafe {
            let scores = self.scores(strip);
            let scale = self.job.config.scale * LOG2_E;
            let decay = running.raise(self.s, scores, keys.len, scale);
            let mut offsets = [0.0; SIDE];
            _mm512_storeu_ps(offsets.as_mut_ptr(), running.offsets());
            let mut sums = [_mm512_setzero_ps(); SIDE];
            for (r, sums) in sums.iter_mut().enumerate() {
                if r < rows {
                    *sums = soften(scores.add(r * SCORES), keys.len, scale, offsets[r]);
                    self.ask(strip * SIDE + r);
                }
                if r < HALF {
                    for turn in r * turns / HALF..(r + 1) * turns / HALF {
                        self.gather(tiles, keys, strip - 1, turn);
                    }
                } else if r - HALF < pairs {
                    self.score(tiles, keys, strip + 1, r - HALF);
                }
            }
            running.add(self.s, decay, sums);
            if keys.start > 0 {
                self.scale(strip, decay);
            }
        }
    }

    /// Asks for what the next block has to read and write at its row `row`: a head's rows lie far apart, so nobody else
    /// does.
    #[inline(always)]
    fn ask(&self, row: usize) {
        let Some(next) = self.next else { return };
        let (rows, columns) = (next.start + next.queries.0 + row, self.cut.dim);
        if row >= next.queries.1 - next.queries.0 {
            return;
        }
        let (column, shared) = (next.head * columns, next.head / self.job.config.group() * columns);
        for (x, at) in
            [(self.job.q, column), (self.job.k, shared), (self.job.v, shared), (self.job.o.as_rows(), column)]
        {
            let x = x.row(rows).wrapping_add(at);
            for end in (0..columns).step_by(STEP) {
                self.s.prefetch_far(x.wrapping_add(end).cast());
            }
            self.s.prefetch_far(x.wrapping_add(columns - 1).cast());
        }
    }

    /// Scores of a strip with the tiles of 16 keys `2 pair` and, if it is there, the one after.
    ///
    /// # Safety
    /// Both are packed.
    #[inline(always)]
    unsafe fn score<R: Registers>(&self, tiles: &mut R, keys: Keys, strip: usize, pair: usize) {
        const BACK: isize = -4;
        let (steps, both) = (self.cut.steps(), pair * STEP + SIDE < keys.len);
        let a = self.at(self.parts.queries + strip * steps * TILE);
        let b = self.at(self.parts.keys + 2 * pair * steps * TILE);
        let to = self.scores(strip).wrapping_add(pair * STEP).cast::<u8>();
        // SAFETY: tiles in their parts.
        unsafe {
            if self.job.config.slopes.is_some() {
                let bias = self.at(self.parts.bias + 4 * (pair * STEP + QUERIES - strip * SIDE));
                tiles.load::<6>(bias, BACK);
                tiles.load::<7>(bias.add(LINE), BACK);
            } else {
                tiles.zero::<6>();
                tiles.zero::<7>();
            }
            for step in 0..steps {
                tiles.load::<4>(a.add(step * TILE), LINE as isize);
                tiles.load::<5>(b.add(step * TILE), LINE as isize);
                tiles.multiply::<6, 4, 5>();
                if both {
                    tiles.load::<5>(b.add((steps + step) * TILE), LINE as isize);
                    tiles.multiply::<7, 4, 5>();
                }
            }
            tiles.store::<6>(to, 4 * SCORES as isize);
            if both {
                tiles.store::<7>(to.add(LINE), 4 * SCORES as isize);
            }
        }
    }

    /// How many turns it takes to multiply a strip's weights by the values.
    #[inline(always)]
    fn turns(&self, keys: Keys) -> usize {
        self.cut.tiles().div_ceil(WIDE) * keys.len.div_ceil(STEP)
    }

    /// One step of keys for at most `WIDE` tiles of columns.
    ///
    /// # Safety
    /// The strip's weights are there.
    #[inline(always)]
    unsafe fn gather<R: Registers>(&self, tiles: &mut R, keys: Keys, strip: usize, turn: usize) {
        let steps = keys.len.div_ceil(STEP);
        let (wide, step) = (turn / steps * WIDE, turn % steps);
        let count = (self.cut.tiles() - wide).min(WIDE);
        let weights = self.scores(strip).cast::<u8>().wrapping_add(step * LINE);
        let values = self.at(self.parts.values + (wide * STEPS + step) * TILE);
        let row = (self.cut.tiles() * LINE) as isize;
        let out = self.out(strip * SIDE).cast::<u8>().wrapping_add(wide * LINE);
        // SAFETY: tiles in their parts.
        unsafe {
            if step == 0 && keys.start == 0 {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.zero::<2>();
                tiles.zero::<3>();
            } else if step == 0 {
                each::<R, 0>(tiles, count, |tiles| tiles.load::<0>(out, row));
                each::<R, 1>(tiles, count, |tiles| tiles.load::<1>(out.add(LINE), row));
                each::<R, 2>(tiles, count, |tiles| tiles.load::<2>(out.add(2 * LINE), row));
                each::<R, 3>(tiles, count, |tiles| tiles.load::<3>(out.add(3 * LINE), row));
            }
            tiles.load::<4>(weights, 4 * SCORES as isize);
            each::<R, 0>(tiles, count, |tiles| add::<R, 0>(tiles, values));
            each::<R, 1>(tiles, count, |tiles| add::<R, 1>(tiles, values));
            each::<R, 2>(tiles, count, |tiles| add::<R, 2>(tiles, values));
            each::<R, 3>(tiles, count, |tiles| add::<R, 3>(tiles, values));
            if step + 1 == steps {
                each::<R, 0>(tiles, count, |tiles| tiles.store::<0>(out, row));
                each::<R, 1>(tiles, count, |tiles| tiles.store::<1>(out.add(LINE), row));
                each::<R, 2>(tiles, count, |tiles| tiles.store::<2>(out.add(2 * LINE), row));
                each::<R, 3>(tiles, count, |tiles| tiles.store::<3>(out.add(3 * LINE), row));
            }
        }
    }

    /// Scales what a strip has summed so far.
    ///
    /// # Safety
    /// The strip has been through a block of keys.
    #[inline(always)]
    unsafe fn scale(&self, strip: usize, decay: __m512) {
        let mut factors = [0.0; SIDE];
        // SAFETY: the strip's rows of `out`.
        unsafe {
            _mm512_storeu_ps(factors.as_mut_ptr(), decay);
            for (r, &factor) in factors.iter().enumerate() {
                for tile in 0..self.cut.tiles() {
                    let at = self.out(strip * SIDE + r).add(tile * SIDE);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(factor)));
                }
            }
        }
    }

    /// After the last block of keys: divides a strip's rows by their sums and writes them out.
    ///
    /// # Safety
    /// The strip has been through all blocks of keys up to this one.
    #[inline(always)]
    unsafe fn finish(&self, keys: Keys, strip: usize, running: &Running) {
        if keys.start + keys.len < self.place.len {
            return;
        }
        let first = self.place.queries.0;
        let column = self.place.head * self.cut.dim;
        let mut factors = [0.0; SIDE];
        // SAFETY: this task alone writes these rows of this head.
        unsafe {
            _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_div_ps(_mm512_set1_ps(1.0), running.sum));
            for (r, &factor) in factors.iter().enumerate().take(self.rows(strip)) {
                let row = strip * SIDE + r;
                let o = self.job.o.row(self.place.start + first + row).add(column);
                columns(self.cut, self.out(row), factor, o);
            }
        }
    }

    /// # Safety
    /// The strip lies in the block.
    #[inline(always)]
    unsafe fn pack_queries(&self, strip: usize) {
        let at = self.place.queries.0 + strip * SIDE;
        let to = self.at(self.parts.queries + strip * self.cut.steps() * TILE);
        // SAFETY: positions of the sequence, and room in the parts.
        unsafe {
            let rows = (at, self.rows(strip));
            pack::queries(self.s, self.pairs(self.job.q, self.place.head), rows, to);
        }
    }

    /// Keys and values. One key that is not finite makes all sums NaN.
    ///
    /// # Safety
    /// They lie in the sequence.
    #[inline(always)]
    unsafe fn pack_keys(&self, keys: Keys, running: &mut [Running; STRIPS]) {
        let shared = self.place.head / self.job.config.group();
        let (k, v) = (self.pairs(self.job.k, shared), self.head(self.job.v, shared));
        // SAFETY: positions of the sequence, and room in the parts.
        unsafe {
            let mut largest = Largest::new();
            for tile in 0..keys.len.div_ceil(SIDE) {
                let to = self.at(self.parts.keys + tile * self.cut.steps() * TILE);
                let rows = (keys.start + tile * SIDE, SIDE.min(keys.len - tile * SIDE));
                pack::keys(self.s, k, rows, &mut largest, to);
            }
            for step in 0..keys.len.div_ceil(STEP) {
                let to = self.at(self.parts.values + step * TILE);
                let rows = (keys.start + step * STEP, STEP.min(keys.len - step * STEP));
                pack::values(self.s, self.cut, v, rows, to, STEPS * TILE);
            }
            if !largest.finite() {
                running.iter_mut().for_each(|r| r.sum = _mm512_set1_ps(f32::NAN));
            }
        }
    }

    /// ALiBi's bias of every distance between this block's queries and keys, if there is one.
    ///
    /// # Safety
    /// `Task::run`'s alone.
    #[inline(always)]
    unsafe fn pack_bias(&self, keys: Keys) {
        let Some(slopes) = self.job.config.slopes else { return };
        // Scores are scaled after it is added.
        let slope = -slopes[self.place.head] / self.job.config.scale;
        let to = self.at(self.parts.bias).cast::<f32>();
        // Entry e is for key j of the block and query i with e = QUERIES + j - i.
        let first = keys.start as isize - self.place.queries.0 as isize - QUERIES as isize;
        for e in 0..QUERIES + KEYS + SIDE {
            let distance = (first + e as isize).unsigned_abs() as f32;
            // SAFETY: an entry of the part.
            unsafe { to.add(e).write(slope * distance) };
        }
    }

    /// A head of this sequence of q or k.
    #[inline(always)]
    fn pairs<'b>(&'b self, x: Rows<'b, Bf16>, head: usize) -> Pairs<'b> {
        Pairs { cut: self.cut, head: self.head(x, head), rope: self.job.config.rope, order: &self.job.order }
    }

    /// A head of this sequence of q, k or v.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b, Bf16>, head: usize) -> Head<'b, Bf16> {
        Head { x, start: self.place.start, column: head * self.cut.dim, dim: self.cut.dim }
    }

    /// Queries of a strip.
    #[inline(always)]
    fn rows(&self, strip: usize) -> usize {
        let (first, last) = self.place.queries;
        SIDE.min(last - first - strip * SIDE)
    }

    #[inline(always)]
    fn at(&self, part: usize) -> *mut u8 {
        self.scratch.wrapping_add(part)
    }

    #[inline(always)]
    fn scores(&self, strip: usize) -> *mut f32 {
        self.at(self.parts.scores).cast::<f32>().wrapping_add(strip % 2 * SIDE * SCORES)
    }

    #[inline(always)]
    fn out(&self, row: usize) -> *mut f32 {
        self.at(self.parts.out).cast::<f32>().wrapping_add(row * self.cut.tiles() * SIDE)
    }
}

/// Pairs of tiles of 16 keys.
#[inline(always)]
fn pairs(keys: Keys) -> usize {
    keys.len.div_ceil(STEP)
}

/// `of` if there are more than `N`.
#[inline(always)]
fn each<R: Registers, const N: usize>(tiles: &mut R, count: usize, of: impl FnOnce(&mut R)) {
    if N < count {
        of(tiles);
    }
}

/// Adds the weights in register 4 times the values of the `C`th tile of columns.
///
/// # Safety
/// Its values are packed.
#[inline(always)]
unsafe fn add<R: Registers, const C: usize>(tiles: &mut R, values: *const u8) {
    // SAFETY: as the caller promises.
    unsafe { tiles.load::<5>(values.add(C * STEPS * TILE), LINE as isize) };
    tiles.multiply::<C, 4, 5>();
}

#[cfg(test)]
mod tests {
    use super::super::MAX_HEAD_DIM;
    use super::*;

    #[test]
    fn the_parts_fit_in_the_workspace() {
        for head_dim in 1..=MAX_HEAD_DIM {
            let parts = Parts::new(head_dim);
            assert!(parts.len <= workspace_bytes(head_dim), "{head_dim}");
            assert!([parts.queries, parts.out, parts.bias].iter().all(|at| at % LINE == 0));
        }
    }
}
