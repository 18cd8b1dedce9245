//! Fault injection: the checker accepts correct plans and rejects plans with deliberate errors.

use crate::cases::{
    MEAN, bounds, gradients, mlp, model, narrow, plan, state, streamed_plan, target, with_updates,
};
use crate::oracle;
use crate::random::{graph_of, recipes, run};
use plimsoll_graph::{Builder, Bytes, DType, Dim, Graph, ValueId};
use plimsoll_plan::{
    CpuKernel, Fuse, Instr, KernelId, Plan, Policy, Region, Slice, Target, Weights, check, check_target,
    compile,
};
use proptest::prelude::*;

/// Plans of different kinds. Those for the CPU have workspaces, so that the rules for workspaces are tested too.
fn plans() -> Vec<(&'static str, Plan)> {
    let with_scratch = |id: &str, layers, plan: fn(&Graph, &Target) -> Plan| {
        let t = target("cpu").with_workers(3);
        let graph = narrow(id, layers).graph(bounds(256), MEAN).expect("verified");
        plan(&graph, &t)
    };
    let streamed = Policy { weights: Weights::Streamed, ..gradients() };
    vec![
        ("esm2", with_scratch("facebook/esm2_t6_8M_UR50D", 3, plan)),
        ("dnabert", with_scratch("zhihan1996/DNABERT-S", 3, plan)),
        ("esm2 streamed", with_scratch("facebook/esm2_t6_8M_UR50D", 2, streamed_plan)),
        ("dnabert streamed", with_scratch("zhihan1996/DNABERT-S", 1, streamed_plan)),
        ("gradients streamed", compile(&mlp(bounds(256)), &streamed, &target("null")).expect("planned")),
        ("updates streamed", streamed_plan(&with_updates(), &target("null"))),
        ("esm2 unfused", {
            let graph = narrow("facebook/esm2_t6_8M_UR50D", 1);
            let graph = graph.graph(bounds(256), MEAN).expect("verified");
            compile(&graph, &Policy { fuse: Fuse::Nothing, ..Policy::default() }, &target("null"))
                .expect("planned")
        }),
        ("gradients", compile(&mlp(bounds(256)), &gradients(), &target("null")).expect("planned")),
        ("updates", plan(&with_updates(), &target("null"))),
    ]
}

fn verdict(p: &Plan) -> Result<(), String> {
    check(&p.graph, &p.schedule, &p.memory).map_err(|e| e.to_string())
}

/// Asserts that the checker rejects the plan after `mutate`.
fn caught(what: &str, p: &Plan, mutate: impl FnOnce(&mut Plan)) {
    let mut broken = p.clone();
    mutate(&mut broken);
    assert_ne!(*p, broken, "{what}: nothing was planted");
    assert!(verdict(&broken).is_err(), "{what}: not caught");
}

/// Asserts that the checker and the oracle agree, and returns whether the plan is broken.
fn agree(what: &str, p: &Plan) -> bool {
    let (found, wanted) = (verdict(p), oracle::fault(p));
    assert_eq!(found.is_err(), wanted.is_some(), "{what}: checker {found:?}, oracle {wanted:?}");
    wanted.is_some()
}

fn top(p: &Plan, region: Region) -> u64 {
    let slices = p.memory.slices.iter().chain(&p.memory.workspaces).flatten();
    slices.filter(|s| s.region == region).map(Slice::end).max().unwrap_or(0)
}

#[test]
fn whole_plans_pass() {
    for (name, p) in plans() {
        assert_eq!(verdict(&p), Ok(()), "{name}");
        assert_eq!(oracle::fault(&p), None, "{name}");
    }
}

#[test]
fn dropped_and_resized_slices_are_caught() {
    for (name, p) in plans() {
        for i in 0..p.memory.slices.len() {
            let what = format!("{name}: slice {i}");
            caught(&what, &p, |p| p.memory.slices[i] = None);
            let resize = |p: &mut Plan, by: i64| {
                let slice = p.memory.slices[i].as_mut().expect("has a slice");
                slice.bytes = Bytes(slice.bytes.0.checked_add_signed(by).expect("larger than a byte"));
            };
            caught(&what, &p, |p| resize(p, -1));
            caught(&what, &p, |p| resize(p, 1));
            caught(&what, &p, |p| {
                let slice = p.memory.slices[i].as_mut().expect("has a slice");
                slice.region = match slice.region {
                    Region::Persistent => Region::Transient,
                    Region::Transient => Region::Persistent,
                };
            });
        }
        caught(name, &p, |p| p.memory.slices.truncate(p.graph.values.len() - 1));
    }
}

#[test]
fn shrunk_regions_are_caught() {
    for (name, p) in plans() {
        caught(name, &p, |p| p.memory.transient = Bytes(top(p, Region::Transient) - 1));
        if p.memory.persistent > Bytes::ZERO {
            caught(name, &p, |p| p.memory.persistent = Bytes(top(p, Region::Persistent) - 1));
        }
    }
}

/// Moves every transient slice to the address of every other slice, exactly and shifted, and swaps every pair.
#[test]
fn moved_and_swapped_slices_are_caught() {
    for (name, p) in plans() {
        let transient = |v: &ValueId| p.memory.slice(*v).is_some_and(|s| s.region == Region::Transient);
        let values: Vec<ValueId> = p.graph.values().map(|(v, _)| v).filter(transient).collect();
        let (mut broken, mut harmless) = (0, 0);
        let mut judge = |what: &str, p: &Plan| match agree(what, p) {
            true => broken += 1,
            false => harmless += 1,
        };
        for &v in &values {
            for &u in values.iter().filter(|u| **u != v) {
                for shift in [0, 64] {
                    let mut q = p.clone();
                    let offset = p.memory.slice(u).expect("a slice").offset + shift;
                    let slice = q.memory.slices[v.index()].as_mut().expect("a slice");
                    slice.offset = offset;
                    q.memory.transient = Bytes(q.memory.transient.0.max(slice.end()));
                    judge(&format!("{name}: {v} onto {u} + {shift}"), &q);
                }
                let mut q = p.clone();
                q.memory.slices.swap(v.index(), u.index());
                judge(&format!("{name}: {v} and {u} swapped"), &q);
            }
        }
        println!("{name}: {broken} broken, {harmless} harmless");
        assert!(broken > 0, "{name}");
    }
}

#[test]
fn overlapping_weights_are_caught() {
    for (name, p) in plans() {
        let survives = |v: &ValueId| p.memory.slice(*v).is_some_and(|s| s.region == Region::Persistent);
        let weights: Vec<ValueId> = p.graph.values().map(|(v, _)| v).filter(survives).collect();
        for pair in weights.windows(2) {
            caught(name, &p, |p| {
                let offset = p.memory.slice(pair[0]).expect("a slice").offset;
                let slice = p.memory.slices[pair[1].index()].as_mut().expect("a slice");
                slice.offset = offset;
                p.memory.persistent = Bytes(p.memory.persistent.0.max(slice.end()));
            });
        }
    }
}

/// Moves the workspace of every instruction onto every value: rejected exactly if the value is live at the
/// instruction.
#[test]
fn overlapping_scratch_is_caught() {
    for (name, p) in plans() {
        for i in 0..p.memory.workspaces.len() {
            if p.memory.workspaces[i].is_none() {
                continue;
            }
            for (v, _) in p.graph.values() {
                let mut q = p.clone();
                let at = p.memory.slice(v).expect("a slice");
                let space = q.memory.workspaces[i].as_mut().expect("scratch");
                (space.region, space.offset) = (at.region, at.offset);
                q.memory.transient = Bytes(q.memory.transient.0.max(space.end()));
                agree(&format!("{name}: scratch {i} onto {v}"), &q);
            }
            caught(name, &p, |p| {
                let space = p.memory.workspaces[i].as_mut().expect("scratch");
                space.offset = p.memory.transient.0;
            });
        }
    }
}

#[test]
fn schedules_out_of_order_are_caught() {
    for (name, p) in plans() {
        let instrs = &p.schedule.instrs;
        let reads = |i: usize, v: &ValueId| match instrs[i] {
            Instr::Launch(id) => p.graph.node(id).inputs.contains(v),
            Instr::Copy { from, .. } => from == *v,
            Instr::Load(_) => false,
        };
        for i in 0..instrs.len() {
            caught(&format!("{name}: {i} is dropped"), &p, |p| {
                p.schedule.instrs.remove(i);
                p.memory.workspaces.remove(i);
            });
            caught(&format!("{name}: {i} is dropped, its scratch is not"), &p, |p| {
                p.schedule.instrs.remove(i);
            });
            let written: Vec<ValueId> = match instrs[i] {
                Instr::Launch(id) => p.graph.node(id).outputs.iter().flatten().copied().collect(),
                Instr::Load(v) => vec![v],
                Instr::Copy { .. } => continue,
            };
            for j in (i + 1)..instrs.len() {
                if written.iter().any(|v| reads(j, v)) {
                    caught(&format!("{name}: {i} and {j} are swapped"), &p, |p| {
                        p.schedule.instrs.swap(i, j);
                        p.memory.workspaces.swap(i, j);
                    });
                }
            }
        }
    }
}

#[test]
fn wrong_copies_are_caught() {
    let mut g = Builder::new(bounds(64));
    let shape = [Dim::Fixed(4), Dim::Fixed(8)];
    let states = ["a", "b"].map(|name| state(&mut g, name, &shape));
    let x = g.input("x", &shape, DType::F32);
    let news = states.map(|s| g.add(s, x));
    // Both old states are read after their new values are computed, so both updates need a copy.
    let y = g.add(states[0], states[1]);
    g.output("y", y);
    states.into_iter().zip(news).for_each(|(s, n)| g.update(s, n));
    let p = plan(&g.finish().expect("verified"), &target("null"));
    let is_copy = |i: &Instr| matches!(i, Instr::Copy { .. });
    let first = p.schedule.instrs.iter().position(is_copy).expect("an update");
    let (Instr::Copy { from: f0, to: t0 }, Instr::Copy { from: f1, to: t1 }) =
        (p.schedule.instrs[first], p.schedule.instrs[first + 1])
    else {
        panic!("two updates")
    };
    let put = |what: &str, a: Instr, b: Instr| {
        caught(what, &p, |p| (p.schedule.instrs[first], p.schedule.instrs[first + 1]) = (a, b));
    };
    put("crossed", Instr::Copy { from: f0, to: t1 }, Instr::Copy { from: f1, to: t0 });
    put("one of them twice", Instr::Copy { from: f0, to: t0 }, Instr::Copy { from: f0, to: t0 });
    put("into the new value", Instr::Copy { from: f0, to: f1 }, Instr::Copy { from: f1, to: t1 });
    // A copy before the last read of the old state.
    caught("too early", &p, |p| {
        let copy = p.schedule.instrs.remove(first + 1);
        let space = p.memory.workspaces.remove(first + 1);
        p.schedule.instrs.insert(first - 1, copy);
        p.memory.workspaces.insert(first - 1, space);
    });
    // A launch must not overwrite a state, even after the last read of the state.
    let y = p.graph.output("y").expect("an output");
    caught("a launch over a state", &p, |p| p.memory.slices[y.index()] = p.memory.slice(t0));
}

/// A new value is written directly into its state's storage, without a copy, if the old value is not read later.
#[test]
fn states_are_updated_in_place() {
    let p = plan(&with_updates(), &target("null"));
    let copies = p.schedule.instrs.iter().filter(|i| matches!(i, Instr::Copy { .. })).count();
    let [(a, new_a), (b, new_b)] = p.graph.updates[..] else { panic!("two updates") };
    assert_eq!((copies, p.memory.slice(a)), (1, p.memory.slice(new_a)));
    assert_eq!(p.memory.slice(new_b).map(|s| s.region), Some(Region::Transient));
    caught("a new value in the other state", &p, |p| {
        let others = p.memory.slice(b);
        p.memory.slices[new_a.index()] = others;
    });
    let last = p.schedule.instrs.len() - 1;
    caught("the old state is read after it", &p, |p| {
        let (first, second) = (0, last - 1);
        p.graph.nodes.last_mut().expect("y").inputs[0] = a;
        p.memory.workspaces.swap(first, second);
    });
}

/// Moves every load to every earlier position: rejected exactly if another value is live in its bytes in between.
#[test]
fn early_loads_are_caught_where_they_do_harm() {
    for (name, p) in plans() {
        let (mut broken, mut harmless) = (0, 0);
        for i in 0..p.schedule.instrs.len() {
            let Instr::Load(_) = p.schedule.instrs[i] else { continue };
            for j in 0..i {
                let mut q = p.clone();
                q.schedule.instrs[j..=i].rotate_right(1);
                q.memory.workspaces[j..=i].rotate_right(1);
                match agree(&format!("{name}: the load at {i} comes at {j}"), &q) {
                    true => broken += 1,
                    false => harmless += 1,
                }
            }
        }
        println!("{name}: {broken} broken, {harmless} harmless");
        assert!(p.schedule.loads().count() < 10 || (broken > 0 && harmless > 0), "{name}");
    }
}

/// Only streamed parameters can be loaded: not resident parameters, and no other values.
#[test]
fn loads_of_anything_else_are_caught() {
    for (name, p) in plans() {
        let once: Vec<ValueId> = p.schedule.loads().collect();
        for (v, _) in p.graph.values().filter(|(v, _)| !once.contains(v)) {
            caught(&format!("{name}: {v} is loaded"), &p, |p| {
                p.schedule.instrs.insert(0, Instr::Load(v));
                p.memory.workspaces.insert(0, None);
            });
        }
    }
}

/// The weight file contains the initial value of an updated parameter, so loading it would discard all updates.
#[test]
fn a_load_of_an_updated_parameter_is_caught() {
    let mut g = Builder::new(bounds(64));
    let (w, x) = (g.param("w", &[4, 8]), g.input("x", &[Dim::Fixed(4), Dim::Fixed(8)], DType::F32));
    let new = g.add(w, x);
    g.output("y", new);
    g.update(w, new);
    let p = streamed_plan(&g.finish().expect("verified"), &target("null"));
    assert_eq!((verdict(&p), p.schedule.loads().count()), (Ok(()), 0));
    caught("loaded and updated", &p, |p| {
        let slice = p.memory.slices[w.index()].as_mut().expect("a slice");
        *slice = Slice { region: Region::Transient, offset: p.memory.transient.0, ..*slice };
        p.memory.transient = Bytes(slice.end());
        p.schedule.instrs.insert(0, Instr::Load(w));
        p.memory.workspaces.insert(0, None);
    });
}

#[test]
fn a_model_with_another_models_memory_is_caught() {
    let (a, b) = (model("esm2_t6_8M_UR50D", 256, MEAN, "null"), model("esm2_t6_8M_UR50D", 512, MEAN, "null"));
    caught("memory of other bounds", &a, |p| p.memory = b.memory.clone());
}

/// The checker and the oracle agree on plans of random graphs with randomly changed slices.
#[test]
fn checker_and_oracle_agree_on_random_damage() {
    let damage = prop::collection::vec((any::<u16>(), any::<u16>(), 0..4u8), 1..4);
    let mut broken = 0;
    run(300, (recipes(), damage, any::<bool>()), |(recipe, damage, streams)| {
        let Ok(graph) = graph_of(&recipe) else { return Ok(()) };
        let mut p = [plan, streamed_plan][usize::from(streams)](&graph, &target("null"));
        for (a, b, kind) in damage {
            let n = p.memory.slices.len();
            let (a, b) = (usize::from(a) % n, usize::from(b) % n);
            let other = p.memory.slices[b].expect("a slice");
            let slice = p.memory.slices[a].as_mut().expect("a slice");
            match kind {
                0 => slice.offset = other.offset,
                1 => slice.offset = other.end().next_multiple_of(64),
                2 => slice.offset = other.offset.saturating_sub(64),
                _ => p.memory.slices.swap(a, b),
            }
        }
        broken += u32::from(agree("random damage", &p));
        Ok(())
    });
    println!("{broken} broken of 300");
    assert!(broken > 60);
}

#[test]
fn what_a_target_cannot_run_is_caught() {
    let t = target("cpu");
    let graph = narrow("facebook/esm2_t6_8M_UR50D", 1).graph(bounds(256), MEAN).expect("verified");
    let p = plan(&graph, &t);
    let verdict = |p: &Plan| check_target(p, &t);
    assert_eq!(verdict(&p), Ok(()));
    let mut shifted = p.clone();
    let slice = shifted.memory.slices.iter_mut().flatten().next().expect("a slice");
    slice.offset += 4;
    assert!(verdict(&shifted).is_err(), "an odd offset");
    let mut others = p.clone();
    others.kernels[0] = KernelId::Cpu(CpuKernel::SgdF32);
    assert!(verdict(&others).is_err(), "another op's kernel");
    others.kernels.clear();
    assert!(verdict(&others).is_err(), "no kernels");
    let scratch = p.memory.workspaces.iter().position(Option::is_some).expect("a kernel with scratch");
    let mut without = p.clone();
    without.memory.workspaces[scratch] = None;
    assert!(verdict(&without).is_err(), "no scratch");
    let mut small = p.clone();
    small.memory.workspaces[scratch].as_mut().expect("scratch").bytes = Bytes(64);
    assert!(verdict(&small).is_err(), "too little scratch");
}
