//! The largest tensors in memory at a program's peak, by name, which a refusal prints in addition to the
//! ledger. Invariant: each tensor is in memory at the peak, and storage shared by several values is listed
//! once.

use crate::{LedgerEntry, Plan, Program};
use plimsoll_graph::{Def, Graph, Role, Space, ValueId, node_label};
use std::collections::BTreeSet;

impl Program {
    /// Returns the `n` largest tensors in the arena at the peak, largest first.
    pub fn largest_tensors(&self, n: usize) -> Vec<LedgerEntry> {
        let (peak, _) = self.peak_at();
        let mut seen = BTreeSet::new();
        let mut tensors: Vec<LedgerEntry> = vec![];
        for (i, (name, plan)) in self.plans().iter().enumerate() {
            let live_at_peak: &[ValueId] = if i == peak { &plan.memory.live_at_peak } else { &[] };
            for v in persistent_values(plan).chain(live_at_peak.iter().copied()) {
                let location = plan.memory.slice(v).map(|slice| self.location(i, slice));
                if location.is_none_or(|location| seen.insert(location)) {
                    let label = label(&plan.graph, v);
                    let label = if self.plans().len() == 1 { label } else { format!("{name}: {label}") };
                    tensors.push(LedgerEntry { label, bytes: plan.graph.spec(v).bytes(&plan.graph.bounds) });
                }
            }
        }
        let waiting = self.staging().iter().map(|s| LedgerEntry { label: s.label.clone(), bytes: s.bytes });
        tensors.extend(waiting);
        tensors.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
        tensors.truncate(n);
        tensors
    }
}

/// The parameters and states in the arena.
fn persistent_values(plan: &Plan) -> impl Iterator<Item = ValueId> + '_ {
    plan.graph
        .sources()
        .map(|(v, _)| v)
        .filter(move |v| plan.memory.persistent_slice(*v).is_some_and(|slice| slice.space == Space::Device))
}

/// Label of a value: its own name, or the name of the node that computes it.
fn label(graph: &Graph, v: ValueId) -> String {
    match graph.spec(v).role {
        Role::Param(p) => return graph.params[p.index()].name.clone(),
        Role::State(s) => return graph.states[s.index()].role.to_string(),
        Role::Input | Role::Activation | Role::Grad => {}
    }
    match (graph.interface_name(v), graph.value(v).def) {
        (Some(name), _) => name,
        (None, Def::Node(id, _)) => format!("what {} gives", node_label(graph, id)),
        (None, Def::Source) => v.to_string(),
    }
}
