//! Fault injection: the checker accepts correct plans and rejects plans with deliberate errors.

use crate::cases::{
    FROM_FILE, MEAN, bounds, gradients, mlp, model, narrow, plan, state, streamed_plan, target, with_updates,
};
use crate::oracle;
use crate::random::{graph_of, recipes, run};
use plimsoll_graph::ops::AdamW;
use plimsoll_graph::{Builder, Bytes, DType, Dim, Graph, NodeId, Space, ValueId};
use plimsoll_plan::{
    ActivationOffload, CpuKernel, Fuse, Instr, KernelId, Offload, Optimizer, ParameterGroup, Plan, Policy,
    Precision, RecomputePolicy, Region, Slice, Target, Training, Weights, Window, check, check_target, compile,
};
use proptest::prelude::*;

/// Plans of different kinds. Those for the CPU have workspaces, so that the rules for workspaces are tested too.
fn plans() -> Vec<(&'static str, Plan)> {
    let with_scratch = |id: &str, layers, plan: fn(&Graph, &Target) -> Plan| {
        let t = target("cpu").with_workers(3);
        let graph = narrow(id, layers).graph(bounds(256), MEAN).expect("verified");
        plan(&graph, &t)
    };
    let streamed = Policy { weights: FROM_FILE, ..gradients() };
    // In host memory and on disk, copied ahead and not.
    let moved = |weights: Weights, window: Window| {
        let graph = narrow("facebook/esm2_t6_8M_UR50D", 2).graph(bounds(256), MEAN).expect("verified");
        compile(&graph, &Policy { weights, window, ..Policy::default() }, &target("h200")).expect("planned")
    };
    let ways = crate::cases::streamed(&target("h200"));
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
        ("from host ahead", moved(ways[0], Window::Full)),
        ("from host", moved(ways[1], Window::Full)),
        ("from file ahead", moved(ways[2], Window::Bytes(Bytes(1 << 20)))),
        ("from file", moved(ways[3], Window::Full)),
        ("states on host", offloaded_step(Space::Host, Window::Full)),
        ("states on host, all ahead", offloaded_step(Space::Host, Window::Bytes(Bytes(1 << 30)))),
        ("states in a file", offloaded_step(Space::File, Window::CLOSED)),
        ("states on host by blocks", offloaded_by_blocks(Space::Host, Window::Bytes(Bytes(1 << 30)))),
        ("states in a file by blocks", offloaded_by_blocks(Space::File, Window::Full)),
    ]
}

/// A micro-step that updates its parameters, of which all and their states are outside the arena.
fn offloaded_step(to: Space, window: Window) -> Plan {
    offloaded(&crate::training::language_model(2, 16, 32, 32), to, window, None)
}

/// The same for an embedding alone, whose update is split into blocks.
fn offloaded_by_blocks(to: Space, window: Window) -> Plan {
    let plan = offloaded(&crate::training::language_model(0, 16, 28, 32), to, window, Some(Bytes(2048)));
    let parts = plan.graph.nodes.iter().filter(|node| node.op.is_view()).count();
    assert!(parts > 10, "{parts} views");
    plan
}

fn offloaded(graph: &Graph, to: Space, window: Window, block: Option<Bytes>) -> Plan {
    let all =
        Offload { optimizer: true, masters: true, gradients: true, parameters: true, activations: true, to };
    let adam = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let training = Training {
        precision: Precision::Bf16,
        remat: RecomputePolicy::None,
        activations: ActivationOffload::All,
        optimizer: Optimizer::AdamW(adam),
        group: &|_| ParameterGroup::Decay,
        accumulation: 1,
        max_norm: 0.0,
        ema: None,
        fuse: Fuse::default(),
        offload: all,
        window,
        block,
    };
    let program = training.program(graph, graph, &target("h200")).expect("planned");
    program.plans()[0].1.clone()
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

/// At most about 40 of the elements, spread over all: a test of every pair of a larger plan would take minutes.
fn some<T>(all: Vec<T>) -> Vec<T> {
    let step = 1 + all.len() / 40;
    all.into_iter().step_by(step).collect()
}

/// The end of the last slice of a region.
fn top(p: &Plan, space: Space, region: Region) -> u64 {
    let slices = p.memory.slices.iter().chain(&p.memory.workspaces).flatten();
    let there = slices.filter(|s| (s.space, s.region) == (space, region));
    there.map(Slice::end).max().unwrap_or(0)
}

/// The size of a region.
fn size(p: &mut Plan, space: Space, region: Region) -> &mut Bytes {
    let extent = match space {
        Space::Device => &mut p.memory.device,
        Space::Host => &mut p.memory.host,
        Space::File => &mut p.memory.file,
    };
    match region {
        Region::Persistent => &mut extent.persistent,
        Region::Transient => &mut extent.transient,
    }
}

/// Makes a region large enough for a slice.
fn make_room(p: &mut Plan, slice: Slice) {
    let size = size(p, slice.space, slice.region);
    *size = Bytes(size.0.max(slice.end()));
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
            caught(&what, &p, |p| {
                let slice = p.memory.slices[i].as_mut().expect("has a slice");
                slice.space = if slice.space == Space::Device { Space::Host } else { Space::Device };
                let slice = *slice;
                make_room(p, slice);
            });
        }
        caught(name, &p, |p| p.memory.slices.truncate(p.graph.values.len() - 1));
    }
}

#[test]
fn shrunk_regions_are_caught() {
    for (name, p) in plans() {
        let mut shrunk = 0;
        for space in Space::ALL {
            for region in [Region::Persistent, Region::Transient] {
                let top = top(&p, space, region);
                if top > 0 {
                    caught(name, &p, |p| *size(p, space, region) = Bytes(top - 1));
                    shrunk += 1;
                }
            }
        }
        assert!(shrunk > 1, "{name}");
    }
}

/// Moves every transient slice to the address of every other slice, exactly and shifted, and swaps every pair.
#[test]
fn moved_and_swapped_slices_are_caught() {
    for (name, p) in plans() {
        let transient = |v: &ValueId| p.memory.slice(*v).is_some_and(|s| s.region == Region::Transient);
        let values: Vec<ValueId> = some(p.graph.values().map(|(v, _)| v).filter(transient).collect());
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
                    let slice = *slice;
                    make_room(&mut q, slice);
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
        let space = |v: ValueId| p.memory.slice(v).map(|slice| slice.space);
        // The new value of a state has the address of the state.
        let apart = |pair: &&[ValueId]| {
            space(pair[0]) == space(pair[1]) && p.memory.slice(pair[0]) != p.memory.slice(pair[1])
        };
        for pair in weights.windows(2).filter(apart) {
            caught(name, &p, |p| {
                let offset = p.memory.slice(pair[0]).expect("a slice").offset;
                let slice = p.memory.slices[pair[1].index()].as_mut().expect("a slice");
                slice.offset = offset;
                let slice = *slice;
                make_room(p, slice);
            });
        }
    }
}

/// Moves the workspace of every instruction onto every value: rejected exactly if the value is live at the
/// instruction.
#[test]
fn overlapping_scratch_is_caught() {
    for (name, p) in plans() {
        let with_workspace = |i: &usize| p.memory.workspaces[*i].is_some();
        for i in some((0..p.memory.workspaces.len()).filter(with_workspace).collect()) {
            for v in some(p.graph.values().map(|(v, _)| v).collect()) {
                let mut q = p.clone();
                let at = p.memory.slice(v).expect("a slice");
                let space = q.memory.workspaces[i].as_mut().expect("scratch");
                (space.space, space.region, space.offset) = (at.space, at.region, at.offset);
                let space = *space;
                make_room(&mut q, space);
                agree(&format!("{name}: scratch {i} onto {v}"), &q);
            }
            caught(name, &p, |p| {
                let space = p.memory.workspaces[i].as_mut().expect("scratch");
                space.offset = p.memory.device.transient.0;
            });
        }
    }
}

/// Drops every instruction, and swaps every instruction that completes a value with every later one that reads it.
#[test]
fn schedules_out_of_order_are_caught() {
    for (name, p) in plans() {
        let instrs = &p.schedule.instrs;
        let reads = |i: usize, v: &ValueId| match instrs[i] {
            Instr::Launch(id) | Instr::Start(id) => p.graph.node(id).inputs.contains(v),
            Instr::Wait(_) => false,
        };
        for i in 0..instrs.len() {
            caught(&format!("{name}: {i} is dropped"), &p, |p| {
                p.schedule.instrs.remove(i);
                p.memory.workspaces.remove(i);
            });
            caught(&format!("{name}: {i} is dropped, its scratch is not"), &p, |p| {
                p.schedule.instrs.remove(i);
            });
            caught(&format!("{name}: {i} is done twice"), &p, |p| {
                p.schedule.instrs.insert(i, p.schedule.instrs[i]);
                p.memory.workspaces.insert(i, p.memory.workspaces[i]);
            });
            let written: Vec<ValueId> = match instrs[i] {
                Instr::Launch(id) | Instr::Wait(id) => {
                    p.graph.node(id).outputs.iter().flatten().copied().collect()
                }
                Instr::Start(_) => continue,
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

/// Moves every start to every earlier position and every wait to every later one, where another value may be in the bytes of
/// the move, and every wait before its start: the checker and the oracle agree, some of it does harm, and some does not.
#[test]
fn moves_that_take_longer_are_caught_where_they_do_harm() {
    let (mut all_broken, mut all_harmless) = (0, 0);
    for (name, p) in plans() {
        let (mut broken, mut harmless) = (0, 0);
        let mut judge = |what: &str, q: &Plan| match agree(&format!("{name}: {what}"), q) {
            true => broken += 1,
            false => harmless += 1,
        };
        let last = p.schedule.instrs.len() - 1;
        for i in 0..=last {
            match p.schedule.instrs[i] {
                Instr::Launch(_) => {}
                Instr::Start(id) => {
                    for j in (0..i).rev().step_by(1 + i / 8) {
                        judge(&format!("the start at {i} comes at {j}"), &shifted(&p, i, j));
                    }
                    let wait = p.schedule.instrs.iter().position(|instr| *instr == Instr::Wait(id));
                    let wait = wait.expect("a wait");
                    caught(&format!("{name}: {i} waits before it starts"), &p, |p| {
                        p.schedule.instrs.swap(i, wait)
                    });
                }
                Instr::Wait(_) => {
                    for j in (i + 1..=last).step_by(1 + (last - i) / 8) {
                        judge(&format!("the wait at {i} comes at {j}"), &shifted(&p, i, j));
                    }
                }
            }
        }
        println!("{name}: {broken} broken, {harmless} harmless");
        all_broken += broken;
        all_harmless += harmless;
    }
    assert!(all_broken > 100 && all_harmless > 100);
}

/// The plan with instruction `from` at position `to`.
fn shifted(p: &Plan, from: usize, to: usize) -> Plan {
    let mut q = p.clone();
    let instr = q.schedule.instrs.remove(from);
    let space = q.memory.workspaces.remove(from);
    q.schedule.instrs.insert(to, instr);
    q.memory.workspaces.insert(to, space);
    q
}

/// Updates whose new value cannot be written over the old one: the move must bring the right value, once, to the right
/// state, after the last read of the old value.
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
    let moves: Vec<NodeId> = p.graph.nodes().filter(|(_, n)| n.op.name() == "move").map(|(id, _)| id).collect();
    assert_eq!((p.schedule.moves(), moves.len()), (2, 2));
    assert_eq!(p.graph.updates.len(), 2);
    caught("crossed", &p, |p| {
        let [a, b] = [0, 1].map(|k| p.graph.node(moves[k]).inputs[0]);
        p.graph.nodes[moves[0].index()].inputs[0] = b;
        p.graph.nodes[moves[1].index()].inputs[0] = a;
        let [(s0, n0), (s1, n1)] = p.graph.updates[..] else { panic!("two updates") };
        p.graph.updates = vec![(s0, n1), (s1, n0)];
    });
    let first = p.schedule.instrs.iter().position(|i| *i == Instr::Start(moves[0])).expect("started");
    // Before the last read of the old state.
    for k in 0..2 {
        caught("too early", &p, |p| *p = shifted(p, first + k, first - 1));
    }
    // A launch must not overwrite a state, even after the last read of the state.
    let y = p.graph.output("y").expect("an output");
    let home = p.graph.updates[0].0;
    caught("a launch over a state", &p, |p| p.memory.slices[y.index()] = p.memory.slice(home));
}

/// A new value is written directly into its state's storage, without a copy, if the old value is not read later.
#[test]
fn states_are_updated_in_place() {
    let p = plan(&with_updates(), &target("null"));
    let [(a, new_a), (b, new_b)] = p.graph.updates[..] else { panic!("two updates") };
    let is_moved = |v: ValueId| p.graph.nodes.iter().any(|n| n.op.name() == "move" && n.outputs == [Some(v)]);
    assert_eq!((p.schedule.moves(), is_moved(new_a), is_moved(new_b)), (1, false, true));
    assert_eq!(p.memory.slice(a), p.memory.slice(new_a));
    assert_eq!(p.memory.slice(b), p.memory.slice(new_b));
    caught("a new value in the other state", &p, |p| {
        let others = p.memory.slice(b);
        p.memory.slices[new_a.index()] = others;
    });
    caught("the old state is read after it", &p, |p| {
        let y = p.graph.output("y").expect("an output");
        let reader = p.graph.nodes.iter().position(|n| n.outputs == [Some(y)]).expect("it is computed");
        p.graph.nodes[reader].inputs[0] = a;
    });
}

/// A parameter that an update changes, or that is an output, stays in the arena.
#[test]
fn a_parameter_that_is_read_after_the_step_is_not_streamed() {
    let mut g = Builder::new(bounds(64));
    let (w, x) = (g.param("w", &[4, 8]), g.input("x", &[Dim::Fixed(4), Dim::Fixed(8)], DType::F32));
    let y = g.add(w, x);
    g.output("y", y);
    g.output("w", w);
    let p = streamed_plan(&g.finish().expect("verified"), &target("null"));
    assert_eq!((verdict(&p), p.schedule.moves(), p.streamed()), (Ok(()), 0, Bytes::ZERO));
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
    run(600, (recipes(), damage, any::<bool>(), any::<bool>()), |(recipe, damage, streams, host)| {
        let Ok(graph) = graph_of(&recipe) else { return Ok(()) };
        let t = target(if host { "h200" } else { "null" });
        let weights = match crate::cases::streamed(&t)[..] {
            [_, direct] if streams => direct,
            [from_host, .., from_file] if streams => {
                if graph.nodes.len() % 2 == 0 {
                    from_host
                } else {
                    from_file
                }
            }
            _ => Weights::Resident,
        };
        let policy = Policy { weights, ..Policy::default() };
        // A GPU has no kernel for some of the ops.
        let Ok(mut p) = compile(&graph, &policy, &t) else { return Ok(()) };
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
    println!("{broken} broken of 600");
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
