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

/// Maximum number of units of a run in the small model: the first and the last two differ from the others in what lives at
/// their borders, and one represents the others.
const MAX_SMALL_UNITS: u32 = 4;

/// Index in its run of the unit that represents all units in the middle of a longer run.
const MIDDLE: u32 = 1;

/// The layers of a model as runs of equal units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layers {
    runs: Vec<LayerRun>,
}

/// Consecutive equal units.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerRun {
    /// Number of layers per unit.
    layers: u32,
    /// Number of units.
    units: u32,
}

impl LayerRun {
    /// Number of units in the small model.
    fn small_units(&self) -> u32 {
        self.units.min(MAX_SMALL_UNITS)
    }
}

impl Layers {
    /// Layers that are all equal.
    pub fn uniform(layers: u32) -> Self {
        Self { runs: vec![LayerRun { layers: 1, units: layers }] }
    }

    /// Layers that are all different, so that the small model is the full model.
    pub fn different(layers: u32) -> Self {
        Self::of(&(0..layers).collect::<Vec<_>>())
    }

    /// Layers of the given kinds; consecutive layers of equal kind form a run.
    pub fn of<T: PartialEq>(kinds: &[T]) -> Self {
        let runs = kinds.chunk_by(|a, b| a == b).map(|run| LayerRun { layers: 1, units: run.len() as u32 });
        Self { runs: runs.collect() }
    }

    /// Layers of a model with a recomputation policy: layers that it treats equally form runs.
    pub fn with_recomputation(remat: &RecomputePolicy, layers: u32) -> Self {
        match remat {
            RecomputePolicy::None | RecomputePolicy::Full | RecomputePolicy::Selective(_) => {
                Self::uniform(layers)
            }
            RecomputePolicy::EveryN(n) => {
                let n = (*n).clamp(1, layers.max(1));
                let rest = LayerRun { layers: layers % n, units: u32::from(!layers.is_multiple_of(n)) };
                Self { runs: vec![LayerRun { layers: n, units: layers / n }, rest] }
            }
            RecomputePolicy::Layers { first, last, of }
                if !matches!(**of, RecomputePolicy::EveryN(_) | RecomputePolicy::Nodes(_)) =>
            {
                Self::of(&(0..layers).map(|layer| (*first..=*last).contains(&layer)).collect::<Vec<_>>())
            }
            // Node ids refer to the full model, so every layer is its own run and the small model is the full model.
            RecomputePolicy::Layers { .. } | RecomputePolicy::Nodes(_) => Self::different(layers),
        }
    }

    /// Number of layers of the small model.
    pub fn small_layers(&self) -> u32 {
        self.runs.iter().map(|run| run.layers * run.small_units()).sum()
    }

    /// For each layer of the small model, the corresponding layer of the full model.
    pub fn originals(&self) -> Vec<u32> {
        let mut originals = vec![];
        let mut start = 0;
        for run in &self.runs {
            let omitted = run.units - run.small_units();
            for unit in 0..run.small_units() {
                let skipped = if unit > MIDDLE { omitted } else { 0 };
                let first = start + (unit + skipped) * run.layers;
                originals.extend(first..first + run.layers);
            }
            start += run.layers * run.units;
        }
        originals
    }

    /// For each layer of the full model, the layer of the small model that represents it.
    pub fn representatives(&self) -> Vec<usize> {
        let mut representatives = vec![];
        let mut first = 0;
        for run in &self.runs {
            let omitted = run.units - run.small_units();
            for unit in 0..run.units {
                // The omitted units follow the middle one, so each of them saturates to it, and the units after them move
                // down by their number.
                let small_unit = if unit <= MIDDLE { unit } else { unit.saturating_sub(omitted).max(MIDDLE) };
                let start = (first + small_unit * run.layers) as usize;
                representatives.extend(start..start + run.layers as usize);
            }
            first += run.small_units() * run.layers;
        }
        representatives
    }

    /// Converts a recomputation policy of the full model to the layer numbers of the small model.
    pub fn small_policy(&self, remat: &RecomputePolicy) -> RecomputePolicy {
        let RecomputePolicy::Layers { first, last, of } = remat else { return remat.clone() };
        let originals = self.originals();
        let start = originals.iter().position(|layer| (first..=last).contains(&layer));
        let end = originals.iter().rposition(|layer| (first..=last).contains(&layer));
        match start.zip(end) {
            Some((start, end)) => {
                RecomputePolicy::Layers { first: start as u32, last: end as u32, of: of.clone() }
            }
            None => RecomputePolicy::None,
        }
    }

    /// Unit of each layer of the small model, counted over all runs.
    fn units(&self) -> Vec<usize> {
        let mut units = vec![];
        let mut next = 0;
        for run in &self.runs {
            for _ in 0..run.small_units() {
                units.extend(std::iter::repeat_n(next, run.layers as usize));
                next += 1;
            }
        }
        units
    }

    /// Units of the small model that represent further units, as (unit, number of further units).
    fn repeated(&self) -> Vec<(usize, u64)> {
        let mut repeated = vec![];
        let mut next = 0;
        for run in &self.runs {
            if run.units > MAX_SMALL_UNITS {
                repeated.push((next + MIDDLE as usize, u64::from(run.units - MAX_SMALL_UNITS)));
            }
            next += run.small_units() as usize;
        }
        repeated
    }

    /// Returns a function that gives the number of nodes of the full model that a node of the small model represents.
    fn multiplicity(&self) -> impl Fn(&Node) -> u64 {
        let units = self.units();
        let repeated = self.repeated();
        move |node| {
            let unit = node.layer.and_then(|layer| units.get(layer as usize));
            let represented = repeated.iter().find(|(middle, _)| Some(middle) == unit);
            represented.map_or(1, |(_, others)| others.saturating_add(1))
        }
    }

    /// Number of recomputation nodes of the full model, and their predicted seconds.
    pub fn recomputed(&self, graph: &Graph, target: &Target) -> (usize, f64) {
        let multiplicity = self.multiplicity();
        let mut count = 0;
        let mut seconds = 0.0;
        for node in graph.nodes.iter().filter(|node| node.phase == Phase::Recompute) {
            if matches!(node.op, Op::Move(_)) {
                continue;
            }
            let times = multiplicity(node);
            count += times as usize;
            seconds += times as f64 * node_seconds(graph, node, target, graph.bounds.full());
        }
        (count, seconds)
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
        let most_units = self.runs.iter().map(|run| u64::from(run.units)).max().unwrap_or(1);
        match (all * most_units).get() {
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
        let mut live = IntervalSums::new(schedule.instrs.len() + 2);
        for (i, instr) in schedule.instrs.iter().enumerate() {
            if let Instr::Launch(id) = instr {
                let bytes = target.workspace(graph, graph.node(*id))?.align_up(target.alignment);
                live.add(i + 1, i + 1, bytes.0);
            }
        }
        for buffer in &buffers {
            live.add(buffer.birth as usize, buffer.death as usize, aligned_bytes(buffer, target));
        }
        let spans = spans(graph, schedule, &self.units());
        let mut backward_spans: Vec<RepeatedBackward> = vec![];
        for (unit, others) in self.repeated() {
            let [forward, backward] = spans[unit];
            let (Some(forward), Some(next)) = (forward, spans[unit + 1][0]) else { continue };
            // The backward passes of all represented units run during the backward span of this unit, last unit
            // first. At the first of them all activations stored for the backward passes are still live (`waiting`),
            // at the last of them all values left for later instructions (`left`). The larger sum is the peak of the
            // span.
            let mut waiting = IntervalSums::new(live.at.len());
            let mut left = IntervalSums::new(live.at.len());
            for buffer in &buffers {
                let birth = buffer.birth as usize;
                let death = buffer.death as usize;
                let bytes = others * aligned_bytes(buffer, target);
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
            if let Some(span) = backward {
                backward_spans.push(RepeatedBackward { span, waiting: waiting.sums(), left: left.sums() });
            }
        }
        let mut sums = live.sums();
        for RepeatedBackward { span, waiting, left } in backward_spans {
            for t in span.start..=span.end {
                sums[t] += waiting[t].max(left[t]);
            }
        }
        Ok(Bytes(sums.into_iter().max().unwrap_or(0)))
    }
}

/// Bytes of a buffer, rounded up to the alignment.
fn aligned_bytes(buffer: &Buffer, target: &Target) -> u64 {
    buffer.bytes.align_up(target.alignment).0
}

/// Bytes that further units add during the backward span of the unit that represents them.
struct RepeatedBackward {
    span: InstantSpan,
    /// Bytes at each instant that wait for the backward passes of the further units.
    waiting: Vec<u64>,
    /// Bytes at each instant that the backward passes of the further units left for later instructions.
    left: Vec<u64>,
}

/// Memory and time of a model, to which each layer adds an equal amount.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModelCost {
    /// Bytes of parameters and states in the arena.
    pub persistent: Bytes,
    /// Bytes of parameters and states in pinned host memory.
    pub pinned: Bytes,
    /// Predicted seconds.
    pub seconds: f64,
}

impl ModelCost {
    /// Extrapolates linearly to a model with `layers` layers from models with fewer layers, whose costs `of` returns.
    pub fn extrapolated(layers: u32, of: impl Fn(u32) -> Result<Self, PlanError>) -> Result<Self, PlanError> {
        let small_layers = layers.min(MAX_SMALL_UNITS);
        let small = of(small_layers)?;
        if layers == small_layers {
            return Ok(small);
        }
        let larger = of(small_layers + 1)?;
        let others = layers - small_layers;
        Ok(Self {
            persistent: extrapolated_bytes(small.persistent, larger.persistent, others)?,
            pinned: extrapolated_bytes(small.pinned, larger.pinned, others)?,
            seconds: small.seconds + f64::from(others) * (larger.seconds - small.seconds),
        })
    }
}

/// Bytes of a model with `others` more layers than a model of `small` bytes, given the bytes of the model with one more.
fn extrapolated_bytes(small: Bytes, larger: Bytes, others: u32) -> Result<Bytes, TooLarge> {
    // A model with more layers has no fewer parameters.
    let of_layer = larger.saturating_sub(small);
    let all = (Count::from(of_layer.0) * u64::from(others) + small.0).bytes();
    all.ok_or_else(|| TooLarge::bytes("the size of all parameters and states", Bytes(u64::MAX)))
}

/// Interval of instants, both ends inclusive.
#[derive(Clone, Copy)]
struct InstantSpan {
    start: usize,
    end: usize,
}

impl InstantSpan {
    fn contains(self, instant: usize) -> bool {
        (self.start..=self.end).contains(&instant)
    }
}

/// Instants of the forward and of the backward pass of each unit; recomputation and updates belong to the backward
/// pass.
fn spans(graph: &Graph, schedule: &Schedule, units: &[usize]) -> Vec<[Option<InstantSpan>; 2]> {
    let mut spans = vec![[None; 2]; units.last().map_or(0, |last| last + 1)];
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let Instr::Launch(id) = instr else { continue };
        let node = graph.node(*id);
        let Some(&unit) = node.layer.and_then(|layer| units.get(layer as usize)) else { continue };
        let span: &mut Option<InstantSpan> = &mut spans[unit][usize::from(node.phase != Phase::Forward)];
        let start = span.map_or(i + 1, |span| span.start);
        *span = Some(InstantSpan { start, end: i + 1 });
    }
    spans
}

/// Sums over time of amounts that are added to intervals.
struct IntervalSums {
    /// Difference of each instant from the previous one, modulo 2^64: differences may be negative, and wrapping
    /// arithmetic gives the correct sums.
    at: Vec<u64>,
}

impl IntervalSums {
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
