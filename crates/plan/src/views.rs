//! Positions of values inside other values: the results of parts inside their operand, and the operands of a join inside its result.
//! All values that lie in the bytes of one value, its *root*, form a group, which has one address and one lifetime.

use crate::Slice;
use plimsoll_graph::{Bytes, Def, Graph, NodeId, Op, ValueId};

/// The root of each value, and its offset there.
pub(crate) struct Views {
    /// Root and offset in bytes, indexed by value. A value without views is its own root, at 0.
    roots: Vec<(ValueId, u64)>,
    /// Whether the group of each root has further values, indexed by value.
    shared: Vec<bool>,
}

impl Views {
    pub(crate) fn of(graph: &Graph) -> Self {
        // The value in whose bytes each value lies, and the offset there. The verifier demands that no value has two.
        let mut parents: Vec<Option<(ValueId, u64)>> = vec![None; graph.values.len()];
        for node in graph.nodes.iter().filter(|node| node.op.is_view()) {
            let Some(result) = node.outputs.first().copied().flatten() else { continue };
            if let (Op::Part(part), &[operand]) = (&node.op, &node.inputs[..]) {
                parents[result.index()] = Some((operand, offset_of_row(graph, operand, part.first)));
                continue;
            }
            let mut offset = Bytes::ZERO;
            for &operand in &node.inputs {
                parents[operand.index()] = Some((result, offset.0));
                offset += graph.spec(operand).bytes(&graph.bounds);
            }
        }
        let mut shared = vec![false; graph.values.len()];
        let mut roots = Vec::with_capacity(graph.values.len());
        for (v, _) in graph.values() {
            // Every chain ends: parts lead to earlier values, and no part is joined, so after the first join only joins
            // follow, which lead to later values.
            let mut root = v;
            let mut offset = Bytes::ZERO;
            while let Some((parent, at)) = parents[root.index()] {
                root = parent;
                offset += Bytes(at);
            }
            shared[root.index()] |= root != v;
            roots.push((root, offset.0));
        }
        Self { roots, shared }
    }

    /// The value in whose bytes `v` lies; `v` itself if it has an address of its own.
    pub(crate) fn root(&self, v: ValueId) -> ValueId {
        self.roots[v.index()].0
    }

    /// Whether `v` lies in another value or another value in it.
    pub(crate) fn is_shared(&self, v: ValueId) -> bool {
        let (root, _) = self.roots[v.index()];
        root != v || self.shared[v.index()]
    }

    /// The slice of `v` if its root lies at `root`.
    pub(crate) fn slice(&self, graph: &Graph, v: ValueId, root: Slice) -> Slice {
        let offset = Bytes(root.offset) + Bytes(self.roots[v.index()].1);
        Slice { offset: offset.0, bytes: graph.spec(v).bytes(&graph.bounds), ..root }
    }

    /// The value of a list with one entry for each value, for all values of a group the largest.
    pub(crate) fn largest<T: Copy + Ord>(&self, mut of_value: Vec<T>) -> Vec<T> {
        for (v, &(root, _)) in self.roots.iter().enumerate() {
            of_value[root.index()] = of_value[root.index()].max(of_value[v]);
        }
        self.roots.iter().map(|(root, _)| of_value[root.index()]).collect()
    }

    /// The nodes whose results hold the bytes of `v`, other than views; none for a source. Of a part of a join, these are
    /// those of the whole join.
    pub(crate) fn writers(&self, graph: &Graph, v: ValueId) -> Vec<NodeId> {
        let mut writers = vec![];
        let mut open = vec![v];
        while let Some(v) = open.pop() {
            let Def::Node(id, _) = graph.value(v).def else { continue };
            let node = graph.node(id);
            if node.op.is_view() {
                open.extend(node.inputs.iter().rev());
            } else {
                writers.push(id);
            }
        }
        writers
    }
}

/// Offset in bytes of a row of a value.
pub(crate) fn offset_of_row(graph: &Graph, v: ValueId, row: u64) -> u64 {
    let spec = graph.spec(v);
    (Bytes(spec.row_elements()) * spec.dtype.size() * row).0
}
