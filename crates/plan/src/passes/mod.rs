//! Compiler passes: pure functions from a graph to a graph. Invariant: a pass returns a verified graph for a verified
//! graph.

mod activations;
mod autodiff;
mod dce;
mod fuse;
mod layout;
mod offload;
mod operands;
mod precision;
mod quantize;
mod remat;
mod split;

use plimsoll_graph::{Def, Graph, Node, NodeId};

pub use activations::{ActivationOffload, offload_activations};
pub(crate) use autodiff::differentiate;
pub use autodiff::{autodiff, cotangent};
pub use dce::dce;
pub use fuse::{fuse, fuse_gates, fuse_norms};
pub use layout::layout;
pub use offload::{Offload, offload, store_updates};
pub use operands::operands;
pub use precision::{inference, precision};
pub use remat::{RecomputePolicy, remat};
pub use split::split_updates;

/// Appends a node and sets the definition of its outputs.
pub(crate) fn push_node(g: &mut Graph, node: Node) {
    let id = NodeId::at(g.nodes.len());
    for (k, out) in node.outputs.iter().enumerate() {
        if let Some(v) = out {
            g.values[v.index()].def = Def::Node(id, k as u32);
        }
    }
    g.nodes.push(node);
}
