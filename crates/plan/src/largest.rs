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
            let mut add = |v: ValueId| {
                let at = plan.memory.slice(v).map(|slice| self.location(i, slice));
                if at.is_none_or(|at| seen.insert(at)) {
                    let label = label(&plan.graph, v);
                    let label = if self.plans().len() == 1 { label } else { format!("{name}: {label}") };
                    tensors.push(LedgerEntry { label, bytes: plan.graph.spec(v).bytes(&plan.graph.bounds) });
                }
            };
            persistent(plan).for_each(&mut add);
            if i == peak {
                plan.memory.live_at_peak.iter().copied().for_each(&mut add);
            }
        }
        let waiting = self.staging().iter().map(|s| LedgerEntry { label: s.label.clone(), bytes: s.bytes });
        tensors.extend(waiting);
        tensors.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
        tensors.truncate(n);
        tensors
    }
}

fn persistent(plan: &Plan) -> impl Iterator<Item = ValueId> + '_ {
    let stays = |v| plan.memory.persistent_slice(v).is_some_and(|slice| slice.space == Space::Device);
    plan.graph.sources().map(|(v, _)| v).filter(move |v| stays(*v))
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
