//! Mixture of experts of a decoder block: route, dispatch, grouped GEMM, combine. Invariant: without a capacity
//! no token is dropped, so there are T k expert rows for every routing, and the plan is exact.

use super::{DecoderBuilder, Experts, Mlp, whole};
use plimsoll_graph::ops::{Activation, Combine, Dispatch, Glu, GroupedLinear, Route, RouterLoss};
use plimsoll_graph::{Builder, DType, Graph, Op, OutputRole, Param, ValueId};

/// Losses of one block's router: f32 (1) each.
#[derive(Clone, Copy)]
pub(super) struct RouterLosses {
    /// Sum of both terms.
    pub sum: ValueId,
    /// Weighted load-balancing loss.
    pub balance: ValueId,
    /// Weighted router z-loss.
    pub z: ValueId,
}

/// The experts of one block, computed with grouped GEMMs.
struct GroupedExperts<'a> {
    e: &'a Experts,
    /// Prefix of their tensor names.
    prefix: String,
    bias: bool,
    /// First row of each expert, and the number of rows: i32 (E + 1).
    offsets: ValueId,
}

impl DecoderBuilder<'_> {
    /// Routes each token to its experts and adds their outputs, weighted by the gates, and the outputs of
    /// shared experts. h: (T, D) -> (T, D).
    pub(super) fn moe(
        &mut self,
        g: &mut Builder,
        prefix: &str,
        h: ValueId,
        e: &Experts,
        layer: u64,
    ) -> ValueId {
        let c = self.c;
        let experts = e.experts as u32;
        let top_k = e.top_k as u32;
        let logits = g.linear(h, "block_sparse_moe.gate", e.experts, c.bias.mlp); // (T, E)
        let route = Route { experts, top_k, renormalise: e.renormalise, capacity: e.capacity };
        let packs = (e.capacity > 0).then(|| self.packs.get(g));
        let inputs: Vec<ValueId> = [logits].into_iter().chain(packs).collect();
        let route = g.node(Op::Route(route), &inputs);
        let [gates, chosen, order, places, offsets, dropped] = route[..] else { return h };
        let grouped = GroupedExperts {
            e,
            prefix: format!("{prefix}block_sparse_moe.experts."),
            bias: c.bias.mlp,
            offsets,
        };
        let rows = g.one(Op::Dispatch(Dispatch { top_k }), &[h, order, places]); // (kT, D)
        let rows = grouped.mlp(g, rows, c.mlp, c.hidden_size, c.intermediate_size);
        let mut y = g.one(Op::Combine(Combine { top_k }), &[rows, gates, order, places]); // (T, D)
        if e.shared > 0 {
            let names = ["w1", if c.mlp == Mlp::SwiGlu { "w3" } else { "w1" }, "w2"];
            let names = names.map(|n| format!("block_sparse_moe.shared_expert.{n}"));
            let shared = self.mlp(g, prefix, h, names, e.shared * c.intermediate_size);
            y = g.add(y, shared);
        }
        if let Some(aux) = self.aux.as_mut().filter(|_| e.balance != 0.0 || e.z != 0.0) {
            // Divide the weights by the number of layers: the outputs are sums over the layers, and the losses
            // are means.
            let layers = c.layers as f32;
            let loss = RouterLoss { balance: e.balance / layers, z: e.z / layers };
            let packs = self.packs.get(g);
            let losses = g.node(Op::RouterLoss(loss), &[logits, chosen, packs]);
            if let [sum, balance, z] = losses[..] {
                aux.push(RouterLosses { sum, balance, z });
            }
        }
        let layer = layer as u32;
        // Only training reads the load.
        if self.aux.is_some() {
            g.output(OutputRole::ExpertRows { layer }, offsets);
        }
        if e.capacity > 0 {
            g.output(OutputRole::DroppedRows { layer }, dropped);
        }
        y
    }
}

impl GroupedExperts<'_> {
    /// Applies each expert to its rows: (kT, D) -> (kT, D).
    fn mlp(&self, g: &mut Builder, x: ValueId, mlp: Mlp, d: u64, f: u64) -> ValueId {
        let h = match mlp {
            Mlp::SwiGlu => {
                // w1 first: the gate applies its activation to the first F columns. In the other order all shapes
                // would be right, and the result would be silu(w3 x) times w1 x.
                let h = self.linear(g, x, &["w1", "w3"], [f, d]); // (kT, 2F)
                g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h])
            }
            Mlp::Gelu => {
                let h = self.linear(g, x, &["w1"], [f, d]);
                g.gelu(h)
            }
        };
        self.linear(g, h, &["w2"], [d, f])
    }

    /// Grouped linear layer. The weights `names` of all experts, (`n`, `k`) each, are stacked, expert by
    /// expert.
    fn linear(&self, g: &mut Builder, x: ValueId, names: &[&str], [n, k]: [u64; 2]) -> ValueId {
        let mut inputs = vec![x, g.param_of(self.stacked(names, "weight", &[n, k]), DType::F32)];
        if self.bias {
            inputs.push(g.param_of(self.stacked(names, "bias", &[n]), DType::F32));
        }
        inputs.push(self.offsets);
        let op = GroupedLinear { experts: self.e.experts as u32, bias: self.bias };
        g.one(Op::GroupedLinear(op), &inputs)
    }

    /// The parameter that stacks the tensors `leaf` of the modules `names` of all experts.
    fn stacked(&self, names: &[&str], leaf: &str, shape: &[u64]) -> Param {
        // Expert-major: an expert's matrices are adjacent, so that each group of the GEMM reads one block.
        let mut pieces = vec![];
        for expert in 0..self.e.experts {
            for name in names {
                pieces.push(whole(format!("{}{expert}.{name}.{leaf}", self.prefix), shape));
            }
        }
        Param { name: format!("{}{}.{leaf}", self.prefix, names.join("+")), pieces: pieces.into() }
    }
}

/// Number of parameters that are used for one token: of the E experts only k count.
pub fn active_parameters(graph: &Graph) -> u64 {
    let top_k = graph.nodes.iter().find_map(|n| if let Op::Route(r) = n.op { Some(r.top_k) } else { None });
    let idle = graph.nodes.iter().filter_map(|n| {
        let Op::GroupedLinear(op) = n.op else { return None };
        let weights = &n.inputs[1..2 + usize::from(op.bias)];
        let dims = |w: &ValueId| graph.spec(*w).shape.iter().filter_map(|d| d.fixed()).product::<u64>();
        let of_expert = weights.iter().map(dims).sum::<u64>() / u64::from(op.experts);
        Some(of_expert * u64::from(op.experts - top_k?))
    });
    graph.parameter_count() - idle.sum::<u64>()
}
