//! Updates of large parameters by blocks of rows: an update whose operands are stored outside the arena reads and writes parts
//! of them, so that one block is fetched while another is updated and a third is stored, and only those are in the arena.
//! Invariant: only ops that compute each element from the same element of their operands are split, in the same
//! arithmetic, so no bit changes.

use super::offload::fetched_sources;
use super::{Offload, dce, push_node};
use plimsoll_graph::ops::{BLOCK, Join, Part};
use plimsoll_graph::{Bytes, Def, Dim, Graph, Node, NodeId, Op, TensorSpec, Value, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Updates that fetch less are never split: a copy of 64 MiB takes about a millisecond, against which the latency of a copy
/// and of a launch is nothing.
const MIN_BLOCK: Bytes = Bytes(64 << 20);

/// Minimum number of blocks in which all updates together are fetched, unless blocks would be smaller than [`MIN_BLOCK`].
const MIN_BLOCKS: u64 = 8;

/// Operands of an elementwise update op that are split with the rows of its parameter.
struct Blockwise {
    /// Number of inputs, at the end, that every block reads whole.
    shared: usize,
    /// Inputs with one element for each [`BLOCK`] elements of the parameter.
    scales: &'static [usize],
    /// Outputs with one element for each [`BLOCK`] elements of the parameter.
    new_scales: &'static [usize],
}

impl Blockwise {
    /// `None` for an op that is not computed element by element: an element of Adafactor depends on the sums of its row and
    /// column. Gradient scales, counters and all ops of the forward and backward pass are no updates of a parameter.
    fn of(op: &Op) -> Option<Self> {
        if let Op::AdamW8bit(_) = op {
            return Some(Self { shared: 2, scales: &[3, 5], new_scales: &[2, 4] });
        }
        let shared = if matches!(op, Op::AdamW(_) | Op::Sgd(_) | Op::Ema(_)) {
            2
        } else if let Op::Accumulate(_) = op {
            1
        } else if let Op::Cast(_) = op {
            0
        } else {
            return None;
        };
        Some(Self { shared, scales: &[], new_scales: &[] })
    }

    fn is_shared(&self, node: &Node, input: usize) -> bool {
        input.saturating_add(self.shared) >= node.inputs.len()
    }
}

/// Whether a node updates states or accumulates gradients. Only such nodes decide how large blocks are.
fn is_update(op: &Op) -> bool {
    let by_elements =
        matches!(op, Op::AdamW(_) | Op::AdamW8bit(_) | Op::Sgd(_) | Op::Ema(_) | Op::Accumulate(_));
    by_elements || matches!(op, Op::Adafactor(_))
}

/// Returns the graph with every update that would fetch more than `limit` bytes at once split into blocks of rows, whose
/// parts start at multiples of `alignment`. Without a limit, blocks are as large as the update of an ordinary matrix of the
/// model: the byte-weighted median of what all updates fetch, at most an eighth of their sum, at least 64 MiB.
pub fn split_updates(graph: &Graph, offload: &Offload, limit: Option<Bytes>, alignment: u64) -> Graph {
    let is_fetched = fetched_sources(graph, offload);
    let mut updates: Vec<(NodeId, Bytes)> = vec![];
    for (id, node) in graph.nodes().filter(|(_, node)| is_update(&node.op)) {
        let inputs: BTreeSet<ValueId> = node.inputs.iter().copied().filter(|v| is_fetched[v.index()]).collect();
        updates.push((id, inputs.into_iter().map(|v| graph.spec(v).bytes(&graph.bounds)).sum()));
    }
    let limit = limit.unwrap_or_else(|| ordinary_block(updates.iter().map(|(_, bytes)| *bytes).collect()));
    let mut splitter = UpdateSplitter {
        graph,
        g: Graph { nodes: vec![], ..graph.clone() },
        readers: readers(graph),
        alignment,
        done: BTreeSet::new(),
        is_split: false,
    };
    let large: BTreeMap<NodeId, Bytes> = updates.into_iter().filter(|(_, bytes)| *bytes > limit).collect();
    for (id, node) in graph.nodes() {
        if splitter.done.contains(&id) {
            continue;
        }
        let rows = large.get(&id).and_then(|&bytes| splitter.rows_of_block(id, bytes, limit));
        match rows {
            Some(rows) => splitter.split(id, rows),
            None => push_node(&mut splitter.g, node.clone()),
        }
    }
    // The whole results that nobody reads any more.
    if splitter.is_split { dce(&splitter.g) } else { graph.clone() }
}

/// Largest number of bytes that one update fetches at once, of updates that fetch `bytes`: their median weighted by bytes, so
/// that the matrices of the layers, which are most of a model, stay whole and the embedding of a large vocabulary takes no
/// more memory than one of them. Where the embedding is most of the model, an eighth of all bytes, so that copies and
/// updates overlap.
fn ordinary_block(mut bytes: Vec<Bytes>) -> Bytes {
    bytes.sort_unstable();
    let all: Bytes = bytes.iter().copied().sum();
    let mut sum = Bytes::ZERO;
    let median = bytes.into_iter().find(|bytes| {
        sum += *bytes;
        sum.0 >= all.0.div_ceil(2)
    });
    median.unwrap_or_default().min(Bytes(all.0.div_ceil(MIN_BLOCKS))).max(MIN_BLOCK)
}

/// Readers of a value.
#[derive(Clone, Default)]
struct ValueReaders {
    nodes: Vec<NodeId>,
    /// Whether the value is an output of the graph or the new value of an update.
    is_read_outside: bool,
}

/// Readers of each value, indexed by value.
fn readers(graph: &Graph) -> Vec<ValueReaders> {
    let mut readers = vec![ValueReaders::default(); graph.values.len()];
    for (id, node) in graph.nodes() {
        node.inputs.iter().for_each(|v| readers[v.index()].nodes.push(id));
    }
    let outside = graph.outputs.iter().map(|(_, v)| v).chain(graph.updates.iter().map(|(_, new)| new));
    outside.for_each(|v| readers[v.index()].is_read_outside = true);
    readers
}

struct UpdateSplitter<'a> {
    graph: &'a Graph,
    /// The new graph.
    g: Graph,
    /// Readers of each value of `graph`, indexed by value.
    readers: Vec<ValueReaders>,
    /// Multiple at which every part starts, in bytes; a power of two.
    alignment: u64,
    /// Nodes that were split together with an earlier node.
    done: BTreeSet<NodeId>,
    is_split: bool,
}

/// Consecutive rows of a parameter.
#[derive(Clone, Copy)]
struct RowBlock {
    first: u64,
    count: u64,
}

impl RowBlock {
    /// The elements of the scales, of which there is one for each [`BLOCK`] elements of the parameter, that belong to these
    /// rows of `columns` elements. The first row begins at a multiple of [`BLOCK`], so no scale belongs to two blocks of
    /// rows.
    fn of_scales(self, columns: u64) -> Self {
        Self {
            first: self.first.saturating_mul(columns).div_ceil(BLOCK),
            count: self.count.saturating_mul(columns).div_ceil(BLOCK),
        }
    }
}

impl UpdateSplitter<'_> {
    /// Shape of a parameter by its value: rows, and elements of a row. `None` if the rows are not fixed.
    fn rows_and_columns(&self, v: ValueId) -> Option<(u64, u64)> {
        let spec = self.graph.spec(v);
        let rows = spec.shape.first()?.fixed()?;
        Some((rows, spec.row_elements()))
    }

    /// Number of rows of a block of an update that fetches `bytes`; `None` if it cannot be split. All blocks but the last are
    /// equal.
    fn rows_of_block(&self, id: NodeId, bytes: Bytes, limit: Bytes) -> Option<u64> {
        Blockwise::of(&self.graph.node(id).op)?;
        let (rows, _) = self.rows_and_columns(*self.graph.node(id).inputs.first()?)?;
        let row_bytes = bytes.0.div_ceil(rows.max(1)).max(1);
        let granule = self.cluster(id).into_iter().map(|id| self.granule(id)).max().unwrap_or(1);
        let max_rows = limit.0.checked_div(row_bytes)?.checked_div(granule)?.max(1).checked_mul(granule)?;
        let blocks = rows.div_ceil(max_rows);
        let block = rows.div_ceil(blocks.max(1)).checked_next_multiple_of(granule)?;
        (block < rows).then_some(block)
    }

    /// The number of rows at whose multiples blocks of a node may start: every part is aligned, and no block of 8-bit moments
    /// is cut. All of these numbers are powers of two, so the largest is a multiple of the others.
    fn granule(&self, id: NodeId) -> u64 {
        let node = self.graph.node(id);
        let Some(blockwise) = Blockwise::of(&node.op) else { return 1 };
        let Some((_, columns)) = node.inputs.first().and_then(|v| self.rows_and_columns(*v)) else { return 1 };
        // An element of the scales belongs to `BLOCK` elements, and has four bytes.
        let scales_granule = rows_between(BLOCK.saturating_mul(self.alignment.div_ceil(4)), columns);
        let inputs = node.inputs.iter().enumerate().filter(|(k, _)| !blockwise.is_shared(node, *k));
        let inputs = inputs.map(|(k, &v)| (blockwise.scales.contains(&k), v));
        let outputs = node.outputs.iter().enumerate();
        let outputs = outputs.filter_map(|(k, out)| Some((blockwise.new_scales.contains(&k), (*out)?)));
        let operands = inputs.chain(outputs).map(|(is_scales, v)| {
            if is_scales {
                return scales_granule;
            }
            rows_between(self.alignment, columns.saturating_mul(self.graph.spec(v).dtype.size()))
        });
        operands.max().unwrap_or(1)
    }

    /// A node to be split with the nodes that read its results and can be split with it: the conversion to the type of the
    /// parameter, and the average of the weights. Split alone, they would read the whole new value, which would have to be in
    /// the arena.
    fn cluster(&self, id: NodeId) -> Vec<NodeId> {
        let node = self.graph.node(id);
        let mut cluster = vec![id];
        let rows = node.inputs.first().and_then(|v| self.rows_and_columns(*v));
        let results: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        let all: BTreeSet<NodeId> =
            results.iter().flat_map(|v| self.readers[v.index()].nodes.iter().copied()).collect();
        for reader in all {
            let other = self.graph.node(reader);
            if !matches!(other.op, Op::Cast(_) | Op::Ema(_)) {
                continue;
            }
            let blockwise = Blockwise::of(&other.op);
            let mut joins_cluster = true;
            for (k, v) in other.inputs.iter().enumerate() {
                // The node moves to the place of the update, where its other inputs must exist.
                let exists = match self.graph.value(*v).def {
                    Def::Source => true,
                    Def::Node(definer, _) => definer < id || results.contains(v),
                };
                // A block reads a shared input whole, and of the results there is only one block yet.
                let is_shared = blockwise.as_ref().is_none_or(|blockwise| blockwise.is_shared(other, k));
                let is_available =
                    if is_shared { !results.contains(v) } else { self.rows_and_columns(*v) == rows };
                joins_cluster &= exists && is_available;
            }
            if joins_cluster {
                cluster.push(reader);
            }
        }
        cluster
    }

    /// Adds the blocks of a node and of its cluster, each of `block` rows but the last, and then the joins of their results.
    fn split(&mut self, id: NodeId, block: u64) {
        self.is_split = true;
        let cluster = self.cluster(id);
        let Some((rows, columns)) = self.graph.node(id).inputs.first().and_then(|v| self.rows_and_columns(*v))
        else {
            return;
        };
        // The blocks of each result of the cluster.
        let mut blocks: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
        let mut first: u64 = 0;
        while first < rows {
            let count = block.min(rows.saturating_sub(first));
            let mut parts: BTreeMap<ValueId, ValueId> = BTreeMap::new();
            for &member in &cluster {
                self.push_block(member, RowBlock { first, count }, columns, &mut parts);
                for v in self.graph.node(member).outputs.iter().flatten() {
                    blocks.entry(*v).or_default().push(parts[v]);
                }
            }
            first = first.saturating_add(count);
        }
        for &member in &cluster {
            let node = self.graph.node(member);
            for &v in node.outputs.iter().flatten() {
                let readers = &self.readers[v.index()];
                if readers.is_read_outside || readers.nodes.iter().any(|reader| !cluster.contains(reader)) {
                    let inputs = blocks.remove(&v).unwrap_or_default();
                    push_node(
                        &mut self.g,
                        Node { op: Op::Join(Join {}), inputs, outputs: vec![Some(v)], ..node.clone() },
                    );
                }
            }
            self.done.insert(member);
        }
    }

    /// Adds one block of a node. `parts` has the parts of all values in this block so far, and gets the new ones.
    fn push_block(&mut self, id: NodeId, rows: RowBlock, columns: u64, parts: &mut BTreeMap<ValueId, ValueId>) {
        let node = self.graph.node(id);
        let Some(blockwise) = Blockwise::of(&node.op) else { return };
        let mut inputs = vec![];
        for (k, &v) in node.inputs.iter().enumerate() {
            if blockwise.is_shared(node, k) {
                inputs.push(v);
                continue;
            }
            let rows = if blockwise.scales.contains(&k) { rows.of_scales(columns) } else { rows };
            let part = match parts.get(&v) {
                Some(&part) => part,
                None => self.push_part(node, v, rows),
            };
            parts.insert(v, part);
            inputs.push(part);
        }
        let mut outputs = vec![];
        for (k, out) in node.outputs.iter().enumerate() {
            let rows = if blockwise.new_scales.contains(&k) { rows.of_scales(columns) } else { rows };
            outputs.push(out.map(|v| {
                let part = self.new_value(v, rows);
                parts.insert(v, part);
                part
            }));
        }
        push_node(&mut self.g, Node { inputs, outputs, ..node.clone() });
    }

    /// Adds the part of `v` for a block of `reader`.
    fn push_part(&mut self, reader: &Node, v: ValueId, rows: RowBlock) -> ValueId {
        let part = self.new_value(v, rows);
        let spec = &mut self.g.values[part.index()].spec;
        spec.role = plimsoll_graph::ops::Move::role(spec.role);
        let op = Op::Part(Part { first: rows.first, rows: rows.count });
        push_node(&mut self.g, Node { op, inputs: vec![v], outputs: vec![Some(part)], ..reader.clone() });
        part
    }

    /// Adds a value with the type of rows of `v`, which is defined when its node is pushed.
    fn new_value(&mut self, v: ValueId, rows: RowBlock) -> ValueId {
        let mut spec: TensorSpec = self.graph.spec(v).clone();
        spec.shape[0] = Dim::Fixed(rows.count);
        let part = ValueId::at(self.g.values.len());
        self.g.values.push(Value { spec, def: Def::Source });
        part
    }
}

/// The least number of rows of `row_size` whose size is a multiple of `unit`, a power of two.
fn rows_between(unit: u64, row_size: u64) -> u64 {
    unit.checked_div(power_of_two_factor(row_size).min(unit)).unwrap_or(1)
}

/// The largest power of two that divides `n`; of zero, the largest of all.
fn power_of_two_factor(n: u64) -> u64 {
    1_u64.checked_shl(n.trailing_zeros()).unwrap_or(1 << 63)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_large_as_an_ordinary_matrix() {
        let mib = |n: u64| Bytes(n << 20);
        for (what, bytes, wanted) in [
            ("nothing", vec![], mib(64)),
            ("small matrices", vec![mib(1); 9], mib(64)),
            ("layers and an embedding", [vec![mib(200); 30], vec![mib(0), mib(6000)]].concat(), mib(200)),
            ("two sizes", [vec![mib(100); 10], vec![mib(300); 10]].concat(), mib(300)),
            (
                "an embedding above all",
                vec![mib(100), mib(100), mib(4000)],
                Bytes((4200_u64 << 20).div_ceil(8)),
            ),
        ] {
            assert_eq!(ordinary_block(bytes), wanted, "{what}");
        }
    }
}
