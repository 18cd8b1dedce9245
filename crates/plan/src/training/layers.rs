//! Predicts memory and time of a model with many layers from a small model with few. A unit is one layer, or a group of
//! n layers if the policy recomputes groups of n. Consecutive equal units form a run. Of a long run the small model
//! contains four units: the first, one that represents all units in the middle, and the last two. The
//! live bytes of the full model at an instant are the sum over the live values of the small model, each multiplied by
//! the number of layers in which the corresponding value is live.
//!
//! Invariant: the full model differs from the small one only in the number of layers. The plan that a search returns
//! is compiled for all layers, so an error here may lead to a suboptimal choice but never to a plan over the budget.

use crate::cost::node_seconds;
use crate::liveness::{Buffer, buffers};
use crate::{Instr, PlanError, RecomputePolicy, Schedule, Target};
use plimsoll_graph::{Bytes, Count, Graph, Node, Op, Phase, Space, TooLarge};

/// Maximum number of units of a run in the small model.
const SHOWN: u32 = 4;

/// Index in its run of the unit that represents all units in the middle of a longer run.
const MIDDLE: u32 = 1;

/// The layers of a model as runs of equal units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layers {
    runs: Vec<Run>,
}

/// Consecutive equal units.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    /// Number of layers per unit.
    layers: u32,
    /// Number of units.
    units: u32,
}

impl Run {
    /// Number of units in the small model.
    fn shown(&self) -> u32 {
        self.units.min(SHOWN)
    }
}

impl Layers {
    /// Layers that are all equal.
    pub fn alike(layers: u32) -> Self {
        Self { runs: vec![Run { layers: 1, units: layers }] }
    }

    /// Layers of which the small model contains each.
    pub fn different(layers: u32) -> Self {
        Self::of(&(0..layers).collect::<Vec<_>>())
    }

    /// Layers of the given kinds; consecutive layers of equal kind form a run.
    pub fn of<T: PartialEq>(kinds: &[T]) -> Self {
        let runs = kinds.chunk_by(|a, b| a == b).map(|run| Run { layers: 1, units: run.len() as u32 });
        Self { runs: runs.collect() }
    }

    /// Layers of a model with a recomputation policy: layers that it treats equally form runs.
    pub fn under(remat: &RecomputePolicy, layers: u32) -> Self {
        match remat {
            RecomputePolicy::None | RecomputePolicy::Full | RecomputePolicy::Selective(_) => {
                Self::alike(layers)
            }
            RecomputePolicy::EveryN(n) => {
                let n = (*n).clamp(1, layers.max(1));
                let rest = Run { layers: layers % n, units: u32::from(!layers.is_multiple_of(n)) };
                Self { runs: vec![Run { layers: n, units: layers / n }, rest] }
            }
            RecomputePolicy::Layers { first, last, of }
                if !matches!(**of, RecomputePolicy::EveryN(_) | RecomputePolicy::Nodes(_)) =>
            {
                let inside = |layer: u32| (*first..=*last).contains(&layer);
                Self::of(&(0..layers).map(inside).collect::<Vec<_>>())
            }
            // Node ids refer to the full model, so every layer is its own run and the small model is the full model.
            RecomputePolicy::Layers { .. } | RecomputePolicy::Nodes(_) => Self::different(layers),
        }
    }

    /// Number of layers of the small model.
    pub fn shown(&self) -> u32 {
        self.runs.iter().map(|run| run.layers * run.shown()).sum()
    }

    /// For each layer of the small model, the corresponding layer of the full model.
    pub fn originals(&self) -> Vec<u32> {
        let (mut originals, mut start) = (vec![], 0);
        for run in &self.runs {
            let behind = run.units - run.shown();
            for unit in 0..run.shown() {
                let skipped = if unit > MIDDLE { behind } else { 0 };
                let first = start + (unit + skipped) * run.layers;
                originals.extend(first..first + run.layers);
            }
            start += run.layers * run.units;
        }
        originals
    }

    /// For each layer of the full model, the layer of the small model that represents it.
    pub fn likes(&self) -> Vec<usize> {
        let (mut likes, mut first) = (vec![], 0);
        for run in &self.runs {
            for unit in 0..run.units {
                let behind = run.units - run.shown();
                let like = if unit <= MIDDLE { unit } else { unit.saturating_sub(behind).max(MIDDLE) };
                let start = (first + like * run.layers) as usize;
                likes.extend(start..start + run.layers as usize);
            }
            first += run.shown() * run.layers;
        }
        likes
    }

    /// Converts a recomputation policy of the full model to the layer numbers of the small model.
    pub fn shrunk(&self, remat: &RecomputePolicy) -> RecomputePolicy {
        let RecomputePolicy::Layers { first, last, of } = remat else { return remat.clone() };
        let originals = self.originals();
        let inside = |layer: &u32| (first..=last).contains(&layer);
        let start = originals.iter().position(inside);
        let end = originals.iter().rposition(inside);
        match start.zip(end) {
            Some((start, end)) => {
                RecomputePolicy::Layers { first: start as u32, last: end as u32, of: of.clone() }
            }
            None => RecomputePolicy::None,
        }
    }

    /// Unit of each layer of the small model, counted over all runs.
    fn units(&self) -> Vec<usize> {
        let (mut units, mut next) = (vec![], 0);
        for run in &self.runs {
            for _ in 0..run.shown() {
                units.extend(std::iter::repeat_n(next, run.layers as usize));
                next += 1;
            }
        }
        units
    }

    /// Units of the small model that represent further units, as (unit, number of further units).
    fn repeated(&self) -> Vec<(usize, u64)> {
        let (mut repeated, mut next) = (vec![], 0);
        for run in &self.runs {
            if run.units > SHOWN {
                repeated.push((next + MIDDLE as usize, u64::from(run.units - SHOWN)));
            }
            next += run.shown() as usize;
        }
        repeated
    }

    /// Returns a function that gives the number of nodes of the full model that a node of the small model represents.
    fn times(&self) -> impl Fn(&Node) -> u64 {
        let (units, repeated) = (self.units(), self.repeated());
        move |node| {
            let unit = node.layer.and_then(|layer| units.get(layer as usize));
            repeated.iter().find(|(r, _)| Some(r) == unit).map_or(1, |(_, others)| others.saturating_add(1))
        }
    }

    /// Number of recomputation nodes of the full model, and their predicted seconds.
    pub fn recomputed(&self, graph: &Graph, target: &Target) -> (usize, f64) {
        let times = self.times();
        let is_recomputed = |node: &&Node| node.phase == Phase::Recompute && !matches!(node.op, Op::Move(_));
        let nodes = graph.nodes.iter().filter(is_recomputed);
        nodes.fold((0, 0.0), |(count, seconds), node| {
            let each = node_seconds(graph, node, target, graph.bounds.full());
            (count + times(node) as usize, seconds + times(node) as f64 * each)
        })
    }

    /// Checks that the sizes of the full model, of which `graph` has some layers, do not exceed 64 bits.
    fn check(
        &self,
        graph: &Graph,
        schedule: &Schedule,
        buffers: &[Buffer],
        target: &Target,
    ) -> Result<(), PlanError> {
        let align = target.alignment;
        let mut all = Count::from(0);
        for buffer in buffers {
            all = all + Count::from(buffer.bytes.0).next_multiple_of(align);
        }
        for instr in &schedule.instrs {
            if let Instr::Launch(id) = instr {
                all = all + Count::from(target.workspace(graph, graph.node(*id))?.0).next_multiple_of(align);
            }
        }
        let most = self.runs.iter().map(|run| u64::from(run.units)).max().unwrap_or(1);
        match (all * most).get() {
            Some(_) => Ok(()),
            None => Err(TooLarge::bytes("the size of all buffers of a step together", Bytes(u64::MAX)).into()),
        }
    }

    /// Largest sum of live bytes during a step of the full model: a lower bound on every packing. `graph` and
    /// `schedule` belong to the small model.
    #[expect(clippy::arithmetic_side_effects, reason = "`check` has summed all sizes")]
    pub fn live(&self, graph: &Graph, schedule: &Schedule, target: &Target) -> Result<Bytes, PlanError> {
        let buffers: Vec<Buffer> =
            buffers(graph, schedule, true).into_iter().filter(|buffer| buffer.space == Space::Device).collect();
        self.check(graph, schedule, &buffers, target)?;
        let mut live = Timeline::new(schedule.instrs.len() + 2);
        for (i, instr) in schedule.instrs.iter().enumerate() {
            if let Instr::Launch(id) = instr {
                let bytes = target.workspace(graph, graph.node(*id))?.align_up(target.alignment);
                live.add(i + 1, i + 1, bytes.0);
            }
        }
        let size = |buffer: &Buffer| buffer.bytes.align_up(target.alignment).0;
        for buffer in &buffers {
            live.add(buffer.birth as usize, buffer.death as usize, size(buffer));
        }
        let spans = spans(graph, schedule, &self.units());
        let mut ends: Vec<(Span, Vec<u64>, Vec<u64>)> = vec![];
        for (unit, others) in self.repeated() {
            let [forward, backward] = spans[unit];
            let (Some(forward), Some(next)) = (forward, spans[unit + 1][0]) else { continue };
            // The backward passes of all represented units run during the backward span of this unit, last unit
            // first. At the first of them all activations stored for the backward passes are still live (`waiting`),
            // at the last of them all values left for later instructions (`left`). The larger sum is the peak of the
            // span.
            let (mut waiting, mut left) = (Timeline::new(live.at.len()), Timeline::new(live.at.len()));
            for buffer in &buffers {
                let (birth, death) = (buffer.birth as usize, buffer.death as usize);
                let bytes = others * size(buffer);
                if forward.contains(birth) && death > next.end {
                    match (backward, spans[unit + 1][1]) {
                        (Some(own), Some(first)) if death >= first.start && death <= own.end => {
                            live.add(forward.start, own.start - 1, bytes);
                            waiting.add(own.start, own.end, bytes);
                        }
                        _ => live.add(forward.start, death, bytes),
                    }
                } else if let (Some(own), Some(next)) = (backward, spans[unit - 1][1])
                    && own.contains(birth)
                    && death > next.end
                {
                    left.add(own.start, own.end, bytes);
                    live.add(own.end + 1, death, bytes);
                }
            }
            ends.extend(backward.map(|own| (own, waiting.sums(), left.sums())));
        }
        let mut sums = live.sums();
        for (own, waiting, left) in ends {
            for t in own.start..=own.end {
                sums[t] += waiting[t].max(left[t]);
            }
        }
        Ok(Bytes(sums.into_iter().max().unwrap_or(0)))
    }
}

/// Quantities to which each layer of a model adds an equal amount.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Size {
    /// Bytes of parameters and states in the arena.
    pub persistent: Bytes,
    /// Those in pinned host memory.
    pub pinned: Bytes,
    /// Predicted seconds.
    pub seconds: f64,
}

impl Size {
    /// Extrapolates linearly to a model with `layers` layers from models with fewer layers, whose sizes `of` returns.
    pub fn extended(layers: u32, of: impl Fn(u32) -> Result<Self, PlanError>) -> Result<Self, PlanError> {
        let small = layers.min(SHOWN);
        let size = of(small)?;
        if layers == small {
            return Ok(size);
        }
        let (more, others) = (of(small + 1)?, layers - small);
        // A model with more layers has no fewer parameters.
        let extended = |small: Bytes, more: Bytes| {
            let each = more.saturating_sub(small);
            let all = (Count::from(each.0) * u64::from(others) + small.0).bytes();
            all.ok_or_else(|| TooLarge::bytes("the size of all parameters and states", Bytes(u64::MAX)))
        };
        Ok(Self {
            persistent: extended(size.persistent, more.persistent)?,
            pinned: extended(size.pinned, more.pinned)?,
            seconds: size.seconds + f64::from(others) * (more.seconds - size.seconds),
        })
    }
}

/// Interval of instants, both ends inclusive.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

impl Span {
    fn contains(self, instant: usize) -> bool {
        (self.start..=self.end).contains(&instant)
    }
}

/// Instants of the forward and of the backward pass of each unit; recomputation and updates belong to the backward
/// pass.
fn spans(graph: &Graph, schedule: &Schedule, units: &[usize]) -> Vec<[Option<Span>; 2]> {
    let mut spans = vec![[None; 2]; units.last().map_or(0, |last| last + 1)];
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = instr else { continue };
        let node = graph.node(*id);
        let Some(&unit) = node.layer.and_then(|layer| units.get(layer as usize)) else { continue };
        let span: &mut Option<Span> = &mut spans[unit][usize::from(node.phase != Phase::Forward)];
        let start = span.map_or(i + 1, |span| span.start);
        *span = Some(Span { start, end: i + 1 });
    }
    spans
}

/// Sums over time of amounts that are added to intervals.
struct Timeline {
    /// Difference of each instant from the previous one, modulo 2^64: differences may be negative, and wrapping
    /// arithmetic gives the correct sums.
    at: Vec<u64>,
}

impl Timeline {
    fn new(instants: usize) -> Self {
        Self { at: vec![0; instants + 1] }
    }

    /// Adds `bytes` to the instants `first..=last`; does nothing if the interval is empty.
    fn add(&mut self, first: usize, last: usize, bytes: u64) {
        if first <= last {
            self.at[first] = self.at[first].wrapping_add(bytes);
            self.at[last + 1] = self.at[last + 1].wrapping_sub(bytes);
        }
    }

    /// Sum at each instant.
    fn sums(self) -> Vec<u64> {
        self.at
            .into_iter()
            .scan(0u64, |sum, more| {
                *sum = sum.wrapping_add(more);
                Some(*sum)
            })
            .collect()
    }
}
