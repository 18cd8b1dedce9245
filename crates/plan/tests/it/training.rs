//! Tests of training programs, whose plans share parameters and states, in all combinations of training options.

use crate::cases::target;
use crate::oracle;
use plimsoll_graph::ops::{
    Activation, Adafactor, AdamW, Attention, Bias, Embed, Glu, LinearCrossEntropy, Mask, OperandFormat, Qkv,
    Sgd,
};
use plimsoll_graph::{
    Bounds, Builder, Bytes, DType, Dim, Graph, Op, OutputRole, Param, Phase, Role, Space, StateKind, StateRole,
    ValueId,
};
use plimsoll_plan::{
    ActivationOffload, ActivationPolicy, Fuse, Kernels, Offload, Optimizer, ParameterGroup, Plan, PlanError,
    Precision, Program, Rates, RecomputePolicy, Region, RematChoice, Target, Training, TrainingSearch, Window,
    check, passes, step_seconds,
    training::{Solver, plans},
};
use std::collections::{BTreeMap, BTreeSet};

pub const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// Language model with tied embedding and output weights.
pub fn language_model(layers: u32, hidden: u64, vocab: u64, tokens: u64) -> Graph {
    let mut g = Builder::new(Bounds { tokens, sequences: 8, longest: tokens.min(256), packs: 1 });
    let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
    let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
    let targets = g.input("targets", &[Dim::Tokens(1)], DType::I32);
    let table = g.param("embed.weight", &[vocab, hidden]);
    let mut x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
    for i in 0..layers {
        g.scope(format!("layers.{i}."), Some(i));
        x = block(&mut g, x, spans, hidden);
    }
    g.scope("", None);
    let x = g.rms_norm(x, "norm", 1e-5);
    let loss = Op::LinearCrossEntropy(LinearCrossEntropy { bias: false, chunk: 64, z_loss: 0.0 });
    let loss = g.one(loss, &[x, table, targets]);
    g.output(OutputRole::Loss, loss);
    g.finish().expect("verified")
}

fn block(g: &mut Builder, x: ValueId, spans: ValueId, hidden: u64) -> ValueId {
    let attention = Attention {
        heads: 4,
        kv_heads: 2,
        head_dim: (hidden / 4) as u32,
        scale: 0.5,
        mask: Mask::Causal,
        bias: Bias::None,
        rotary: false,
        qkv: Qkv::Separate,
    };
    let h = g.rms_norm(x, "norm1", 1e-5);
    let q = g.linear(h, "q", hidden, false);
    let [k, v] = ["k", "v"].map(|n| g.linear(h, n, hidden / 2, false));
    let a = g.one(Op::Attention(attention), &[q, k, v, spans]);
    let a = g.linear(a, "o", hidden, false);
    let x = g.add(x, a);
    let h = g.rms_norm(x, "norm2", 1e-5);
    let h = g.linear(h, "up", 4 * hidden, false);
    let h = g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h]);
    let h = g.linear(h, "down", hidden, false);
    g.add(x, h)
}

fn decay(param: &Param) -> ParameterGroup {
    if param.name.contains("norm") { ParameterGroup::NoDecay } else { ParameterGroup::Decay }
}

pub fn training(optimizer: Optimizer) -> Training<'static> {
    Training {
        precision: Precision::F32,
        remat: RecomputePolicy::None,
        activations: ActivationOffload::All,
        optimizer,
        group: &decay,
        accumulation: 2,
        max_norm: 1.0,
        ema: None,
        fuse: Fuse::default(),
        offload: plimsoll_plan::Offload::default(),
        window: Window::Full,
        block: None,
    }
}

/// Builds the program for the target `null` and checks every plan with the checker and the oracle.
pub fn program(t: &Training<'_>, graph: &Graph) -> Result<Program, PlanError> {
    let target = target("null");
    let program = t.program(graph, graph, &target)?;
    for (name, plan) in program.plans() {
        check(&plan.graph, &plan.schedule, &plan.memory).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(oracle::fault(plan), None, "{name}\n{}", plan.graph);
    }
    let ledger = program.ledger();
    assert_eq!(ledger.total(), program.peak(), "{ledger}");
    Ok(program)
}

pub fn optimizers() -> Vec<Optimizer> {
    let adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
    let sgd = |momentum| Sgd { momentum, weight_decay: 0.1, nesterov: false };
    vec![
        Optimizer::AdamW(ADAM),
        Optimizer::AdamW8bit(ADAM),
        Optimizer::Adafactor(adafactor),
        Optimizer::Sgd(sgd(0.9)),
        Optimizer::Sgd(sgd(0.0)),
    ]
}

/// Small model with matrices above and below 4096 elements, the minimum for 8-bit moments with AdamW8bit.
pub fn small() -> Graph {
    language_model(2, 64, 96, 128)
}

#[test]
fn plans_share_what_survives() {
    for optimizer in optimizers() {
        let sizes = [(1, 0.0, None), (1, 1.0, None), (4, 0.0, None), (1, 0.0, Some(0.9)), (4, 1.0, Some(0.9))];
        for (accumulation, max_norm, ema) in sizes {
            for precision in [Precision::F32, Precision::Bf16, Precision::Fp16] {
                let t = Training { accumulation, max_norm, ema, precision, ..training(optimizer) };
                let program = match program(&t, &small()) {
                    Ok(program) => program,
                    // The kernel table of the reference accepts every element type.
                    Err(e) => panic!("{optimizer:?} {precision:?}: {e}"),
                };
                let names: Vec<&str> = program.plans().iter().map(|(n, _)| n.as_str()).collect();
                match t.updates_immediately() {
                    true => assert_eq!(names, [plans::MICRO, plans::EVALUATE]),
                    false => assert_eq!(names, [plans::MICRO, plans::APPLY, plans::EVALUATE]),
                }
                let place = |plan: usize, name: &str| {
                    let p = &program.plans()[plan].1;
                    let found = p.graph.param_values().find(|(.., param)| param.name == name);
                    found.and_then(|(v, ..)| p.memory.slice(v)).map(|slice| program.location(plan, slice))
                };
                // With averages, the evaluation reads no parameter.
                let reads = names.len() - usize::from(ema.is_some());
                for name in ["embed.weight", "layers.1.q.weight", "norm.weight"] {
                    let places: Vec<_> = (0..names.len()).filter_map(|i| place(i, name)).collect();
                    assert_eq!(places, vec![places[0]; reads], "{name}");
                }
            }
        }
    }
}

/// A 16-bit parameter takes 16 bytes with AdamW, or 18 bytes if gradients of several micro-batches are summed in f32.
#[test]
fn bytes_of_a_parameter() {
    let graph = small();
    let norms = 64 * (2 * 2 + 1);
    let others = graph.parameter_count() - norms;
    let adam = Optimizer::AdamW(ADAM);
    for (precision, accumulation, each) in [
        (Precision::F32, 1, 16),
        (Precision::F32, 4, 16),
        (Precision::Bf16, 1, 16),
        (Precision::Bf16, 4, 18),
        (Precision::Fp16, 4, 18),
    ] {
        let t = Training { precision, accumulation, ..training(adam) };
        let ledger = program(&t, &graph).expect("planned").ledger();
        let lines = ["params", "gradients", "optimizer", "master weights"].map(|line| ledger.get(line).0);
        assert_eq!(
            lines.iter().sum::<u64>(),
            each * others + 16 * norms,
            "{precision:?} {accumulation}: {ledger}"
        );
    }
    // 8-bit moments: two bytes per element and two f32 scales per block of 256, instead of eight bytes per element.
    let t = training(Optimizer::AdamW8bit(ADAM));
    let ledger = program(&t, &graph).expect("planned").ledger();
    let large: u64 = graph
        .param_values()
        .map(|(v, ..)| graph.spec(v).elements_at(graph.bounds.full()))
        .filter(|n| *n >= 4096)
        .sum();
    let small = graph.parameter_count() - large;
    assert_eq!(ledger.get("optimizer"), Bytes(2 * large + 2 * 4 * large / 256 + 8 * small), "{ledger}");
}

#[test]
fn precisions_of_inference_are_refused() {
    let graph = language_model(2, 64, 96, 64);
    for precision in [Precision::Fp8, Precision::Int8] {
        let error =
            program(&Training { precision, ..training(Optimizer::AdamW(ADAM)) }, &graph).expect_err("refused");
        assert!(matches!(error, PlanError::BadPolicy { field: "precision", .. }), "{error}");
    }
}

/// TF32 is set on linears and their gradients, and nothing else changes: not the loss, the values or the other ops.
#[test]
fn tf32_changes_linears_and_their_gradients_only() {
    // Wide enough for matmuls to take longer than reading their operands.
    let (graph, h200) = (language_model(2, 512, 96, 4096), target("h200"));
    let of = |precision| {
        let training = Training { precision, ..training(Optimizer::AdamW(ADAM)) };
        training.program(&graph, &graph, &h200).expect("planned")
    };
    let (wide, cut) = (of(Precision::F32), of(Precision::Tf32));
    let mut marked = BTreeSet::new();
    for ((name, wide), (_, cut)) in wide.plans().iter().zip(cut.plans()) {
        assert_eq!(wide.graph.values, cut.graph.values, "{name}");
        for (before, after) in wide.graph.nodes.iter().zip(&cut.graph.nodes) {
            let product = matches!(before.op.name(), "linear" | "linear_input_grad" | "linear_weight_grad");
            let wanted = if product { OperandFormat::Tf32 } else { OperandFormat::Stored };
            let operands = [before.op.operands(), after.op.operands()];
            assert_eq!(operands, [OperandFormat::Stored, wanted], "{name}: {:?}", after.op);
            assert!(product || before.op == after.op, "{name}: {:?}", after.op);
            marked.extend(product.then_some(before.op.name()));
        }
        let seconds = |plan: &Plan| step_seconds(&plan.graph, &h200, graph.bounds.full());
        let faster = name != plans::APPLY;
        assert_eq!(seconds(cut) < seconds(wide), faster, "{name}");
    }
    assert_eq!(marked.len(), 3, "{marked:?}");
    assert_eq!(cut.ledger().get("weights"), wide.ledger().get("weights"));
}

#[test]
fn a_target_without_tf32_refuses_to_train_in_it() {
    let graph = language_model(2, 64, 96, 64);
    let training = Training { precision: Precision::Tf32, ..training(Optimizer::AdamW(ADAM)) };
    let old = Target { rates: Rates { tf32: None, ..target("h200").rates }, ..target("h200") };
    for target in [target("cpu"), old] {
        let error = training.program(&graph, &graph, &target).expect_err("refused").to_string();
        let wanted = format!("tf32 needs TF32 matmuls, which `{}` does not have: an NVIDIA GPU", target.name);
        assert!(error.contains(&wanted), "{error}");
        let build = |tokens, _, layers| {
            let graph = language_model(layers, 64, 96, tokens);
            Ok((graph.clone(), graph))
        };
        let search = search(Bytes(20 << 30), RematChoice::Auto);
        let training = Training { precision: Precision::Tf32, ..search.training };
        let search = TrainingSearch { training, ..search };
        let error = search.run(&target, &build).expect_err("refused").to_string();
        assert!(error.contains(&wanted), "{error}");
    }
}

/// A training step with the widest heads of a GPU is planned and priced; wider ones are refused by name before any plan
/// is searched.
#[test]
fn a_gpu_trains_heads_of_256_columns() {
    let h200 = target("h200");
    for precision in [Precision::F32, Precision::Bf16] {
        let training = Training { precision, ..training(Optimizer::AdamW(ADAM)) };
        let run = |hidden| {
            let build = |tokens, _, layers| {
                let graph = language_model(layers, hidden, 96, tokens);
                Ok((graph.clone(), graph))
            };
            let search = search(Bytes(20 << 30), RematChoice::Auto);
            TrainingSearch { training: Training { precision, ..search.training }, ..search }.run(&h200, &build)
        };
        let graph = language_model(2, 4 * 256, 96, 64);
        let program = training.program(&graph, &graph, &h200).expect("planned");
        for (name, plan) in program.plans() {
            assert!(step_seconds(&plan.graph, &h200, graph.bounds.full()).is_finite(), "{name}");
        }
        run(4 * 256).expect("found");
        let error = run(4 * 264).expect_err("too wide").to_string();
        assert!(error.contains("`attention with heads wider than 256 columns`"), "{error}");
    }
}

/// If each gradient is applied immediately, no gradients are stored.
#[test]
fn a_step_at_once_keeps_no_gradients() {
    let graph = language_model(6, 64, 96, 64);
    let at_once = Training { accumulation: 1, max_norm: 0.0, ..training(Optimizer::AdamW(ADAM)) };
    let clipped = Training { max_norm: 1.0, ..training(Optimizer::AdamW(ADAM)) };
    let (a, b) = (program(&at_once, &graph).expect("planned"), program(&clipped, &graph).expect("planned"));
    assert_eq!(a.ledger().get("gradients"), Bytes::ZERO);
    assert_eq!(b.ledger().get("gradients"), Bytes(4 * graph.parameter_count()));
    assert!(a.peak() < b.peak());
    let micro = &a.plans()[0].1;
    let copies = micro.schedule.moves();
    assert_eq!(copies, 0, "every state is updated in place");
}

#[test]
fn what_is_frozen_has_no_gradient_and_no_state() {
    let graph = small();
    let second = |param: &Param| param.name.starts_with("layers.1.");
    let group = |param: &Param| if second(param) { ParameterGroup::Decay } else { ParameterGroup::Frozen };
    let t = Training { group: &group, ..training(Optimizer::AdamW(ADAM)) };
    let program = program(&t, &graph).expect("planned");
    let micro = &program.plans()[0].1.graph;
    let states: Vec<&StateRole> = micro.state_values().map(|(.., state)| &state.role).collect();
    let is_second =
        |role: &StateRole| matches!(role, StateRole::Gradient { param } if param.starts_with("layers.1."));
    assert!(states.iter().all(|role| is_second(role)) && states.len() == 8, "{states:?}");
    // The frozen first layer has no backward nodes.
    let backward = micro.nodes.iter().filter(|n| n.phase == Phase::Backward);
    assert!(backward.clone().all(|n| n.layer != Some(0)) && backward.count() > 0);
    let all = Training { group: &|_| ParameterGroup::Frozen, ..training(Optimizer::AdamW(ADAM)) };
    let error = all.program(&graph, &graph, &target("null")).expect_err("nothing to train");
    assert_eq!(error.to_string(), "policy `group`: no parameter is trained: all are frozen");
}

#[test]
fn recomputation_keeps_less_and_computes_more() {
    let graph = language_model(8, 64, 96, 256);
    let of = |remat| {
        let t = Training { remat, ..training(Optimizer::AdamW(ADAM)) };
        program(&t, &graph).expect("planned")
    };
    let none = of(RecomputePolicy::None);
    let recomputed =
        |p: &Program| p.plans()[0].1.graph.nodes.iter().filter(|n| n.phase == Phase::Recompute).count();
    assert_eq!(recomputed(&none), 0);
    let selective = |ops: &[&str]| RecomputePolicy::Selective(ops.iter().map(|op| (*op).to_owned()).collect());
    let mut before = none.plans()[0].1.memory.device.transient;
    for remat in [selective(&["rms_norm"]), selective(&["rms_norm", "glu", "attention"]), RecomputePolicy::Full]
    {
        let program = of(remat.clone());
        let after = program.plans()[0].1.memory.device.transient;
        assert!(after < before && recomputed(&program) > 0, "{remat:?}: {after}, before {before}");
        before = after;
    }
    // Groups of two layers store half of the layer inputs, but hold the activations of two layers at a time, so the
    // memory is not compared.
    assert!(recomputed(&of(RecomputePolicy::EveryN(2))) > 0);
    for (remat, why) in [
        (RecomputePolicy::EveryN(0), "policy `remat`: groups of 0 layers"),
        (selective(&["norms"]), "policy `remat`: there is no op `norms`; ops are "),
    ] {
        let t = Training { remat, ..training(Optimizer::AdamW(ADAM)) };
        let error = t.program(&graph, &graph, &target("null")).expect_err(why).to_string();
        assert!(error.starts_with(why), "{error}");
    }
}

/// The precision is visible as element types in the graph; states and the parameters of norms stay f32.
#[test]
fn precision_is_in_the_graph() {
    let graph = passes::precision(&small(), Precision::Bf16).expect("typed");
    graph.verify().expect("verified");
    for (v, _, param) in graph.param_values() {
        let wanted = if param.name.contains("norm") { DType::F32 } else { DType::Bf16 };
        assert_eq!(graph.spec(v).dtype, wanted, "{}", param.name);
    }
    let loss = graph.output(OutputRole::Loss).expect("a loss");
    assert_eq!(graph.spec(loss).dtype, DType::F32);
    let t = Training { precision: Precision::Bf16, ..training(Optimizer::AdamW(ADAM)) };
    let program = program(&t, &small()).expect("planned");
    for (_, plan) in program.plans() {
        for (v, _, state) in plan.graph.state_values() {
            let dtype = plan.graph.spec(v).dtype;
            assert_eq!(dtype, DType::F32, "{}", state.role);
            assert!(matches!(
                state.role.kind(),
                StateKind::Gradient | StateKind::Optimizer | StateKind::Master
            ));
        }
        let in_region = |v: ValueId, region| plan.memory.slice(v).is_some_and(|s| s.region == region);
        let states = plan.graph.values().filter(|(_, v)| matches!(v.spec.role, Role::State(_)));
        assert!(states.into_iter().all(|(v, _)| in_region(v, Region::Persistent)));
    }
}

pub fn search(budget: Bytes, remat: RematChoice) -> TrainingSearch<'static> {
    TrainingSearch {
        training: training(Optimizer::AdamW(ADAM)),
        budget,
        step_tokens: 2048,
        tokens: vec![256, 1024, 2048],
        chunk: &|_| 64,
        optimizers: vec![Optimizer::AdamW(ADAM), Optimizer::AdamW8bit(ADAM)],
        layers: 4,
        remat,
        dynamic: vec![],
        stopped: &|| false,
    }
}

/// Averages are f32 states of the trained parameters alone; the plan that updates the weights updates them, and the
/// evaluation reads them in place of the parameters, rounded where these are 16-bit.
#[test]
fn evaluations_read_the_averages() {
    let group = |param: &Param| match param.name.starts_with("layers.0") {
        true => ParameterGroup::Frozen,
        false => ParameterGroup::Decay,
    };
    for (accumulation, max_norm) in [(1, 0.0), (2, 1.0)] {
        for precision in [Precision::F32, Precision::Tf32, Precision::Bf16] {
            let ema = Some(0.9);
            let t = Training {
                precision,
                accumulation,
                max_norm,
                ema,
                group: &group,
                ..training(Optimizer::AdamW(ADAM))
            };
            let all = program(&t, &small()).expect("planned");
            let plan = |name: &str| &all.plans()[all.index(name).expect("a plan")].1.graph;
            let averages = |graph: &Graph| -> Vec<String> {
                let states = graph.state_values().filter(|(.., state)| state.role.kind() == StateKind::Average);
                let mut names: Vec<String> = states
                    .map(|(v, _, state)| {
                        assert_eq!(graph.spec(v).dtype, DType::F32, "{}", state.role);
                        state.role.to_string()
                    })
                    .collect();
                names.sort();
                names
            };
            let update = plan(if t.updates_immediately() { plans::MICRO } else { plans::APPLY });
            let (mut updated, read) = (averages(update), averages(plan(plans::EVALUATE)));
            updated.retain(|name| name != "steps of ema");
            assert_eq!(updated, read, "{precision:?}");
            assert!(read.contains(&"ema layers.1.q.weight".to_owned()), "{read:?}");
            assert!(read.iter().all(|name| !name.contains("layers.0")), "{read:?}");
            let params: Vec<String> =
                plan(plans::EVALUATE).param_values().map(|(.., param)| param.name.clone()).collect();
            assert!(!params.is_empty() && params.iter().all(|name| name.contains("layers.0")), "{params:?}");
            let without = program(&Training { ema: None, ..t }, &small()).expect("planned");
            let line = |program: &Program| program.ledger().get(StateKind::Average.label());
            assert_eq!(line(&without), Bytes::ZERO);
            let elements = |graph: &Graph| -> u64 {
                let states = graph.state_values().filter(|(.., state)| state.role.kind() == StateKind::Average);
                states.map(|(v, ..)| graph.spec(v).elements_at(graph.bounds.full())).sum()
            };
            assert_eq!(line(&all), Bytes(4 * elements(update)));
        }
    }
}

/// Whether the search fell back on the second optimizer.
pub fn is_8bit(optimizer: &Optimizer) -> bool {
    matches!(optimizer, Optimizer::AdamW8bit(_))
}

#[test]
fn a_search_that_is_stopped_ends() {
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 64, 512, tokens);
        Ok((graph.clone(), graph))
    };
    let target = target("cpu");
    for after in [0, 1, 5, 20] {
        let asked = std::cell::Cell::new(0);
        let stopped = || asked.replace(asked.get() + 1) >= after;
        // A budget for which the search compares many candidates.
        let search = TrainingSearch { stopped: &stopped, ..search(Bytes(19_000_000), RematChoice::Auto) };
        let error = search.run(&target, &build).expect_err("stopped");
        assert!(matches!(error, PlanError::Stopped), "{after}: {error}");
        assert_eq!(asked.get(), after + 1, "nothing goes on behind it");
    }
}

/// Every target has the kernels of training.
#[test]
fn every_target_plans_training() {
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 64, 512, tokens);
        Ok((graph.clone(), graph))
    };
    let asked = search(Bytes(20 << 30), RematChoice::Auto);
    for name in Target::names() {
        let found = asked.run(&target(name), &build).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(found.program.peak() <= Bytes(20 << 30), "{name}");
    }
}

/// GPU target with the kernels of the reference, which need no workspace: for a small model the workspace of matmuls
/// would hide the effect of the budget.
fn without_workspace(name: &str) -> Target {
    Target { kernels: Kernels::Reference, ..target(name) }
}

/// With offload of activations the search has a third choice: it is never slower than without, needs less memory, and moves
/// nothing where everything fits. If recomputation is given, all large activations of the layers but the last are moved.
#[test]
fn activations_are_stored_recomputed_or_offloaded() {
    let target = without_workspace("4090");
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 64, 512, tokens);
        Ok((graph.clone(), graph))
    };
    for to in [Space::Host, Space::File] {
        let offload = Offload { activations: true, to, ..Offload::default() };
        let with = |budget, remat| {
            let without = search(budget, remat);
            TrainingSearch {
                training: Training { offload, ..training(Optimizer::AdamW(ADAM)) },
                optimizers: vec![Optimizer::AdamW(ADAM)],
                tokens: vec![2048],
                layers: 12,
                ..without
            }
        };
        let without = |budget| TrainingSearch {
            training: training(Optimizer::AdamW(ADAM)),
            ..with(budget, RematChoice::Auto)
        };
        let whole = with(Bytes(u64::MAX), RematChoice::Auto).run(&target, &build).expect("any fits");
        assert_eq!(whole.activations, ActivationPolicy::STORED);
        let least = |search: TrainingSearch<'_>| match search.run(&target, &build) {
            Err(PlanError::OverBudget(bill)) => bill.ledger.total(),
            other => panic!("{other:?}"),
        };
        let [least_with, least_without] =
            [with(Bytes(1000), RematChoice::Auto), without(Bytes(1000))].map(least);
        assert!(least_with < least_without, "{to:?}: {least_with}, without {least_without}");
        let mut moving = 0;
        for k in 0..=8 {
            let budget = Bytes(least_with.0 + (whole.program.peak().0 - least_with.0) * k / 8);
            let found = with(budget, RematChoice::Auto).run(&target, &build).unwrap_or_else(|e| panic!("{e}"));
            assert!(found.program.peak() <= budget, "{budget}");
            moving += usize::from(found.program.offload().activations);
            if let Ok(without) = without(budget).run(&target, &build) {
                let ratio = found.tokens_per_second / without.tokens_per_second;
                assert!(ratio > 0.98, "{to:?} {budget}: {ratio}");
            }
        }
        // A disk is much slower than recomputation.
        let least = if to == Space::Host { 3 } else { 1 };
        assert!(moving >= least, "{to:?}: {moving} of 9 budgets");
        for remat in [RecomputePolicy::None, RecomputePolicy::Full] {
            let given = with(Bytes(u64::MAX), RematChoice::Fixed(remat.clone())).run(&target, &build);
            let given = given.unwrap_or_else(|e| panic!("{e}"));
            let graph = &given.program.plans()[0].1.graph;
            let moved: BTreeSet<u32> = graph
                .nodes
                .iter()
                .filter(|node| node.phase == Phase::Forward && matches!(node.op, Op::Move(_)))
                .filter_map(|node| node.layer)
                .collect();
            assert_eq!(moved, (0..11).collect(), "{remat:?}");
        }
    }
}

/// A larger budget never gives a slower program of the same optimizer, the first optimizer that fits is used, every
/// program is within its budget, and a budget below the minimum is refused.
#[test]
fn the_search_is_monotone_in_the_budget() {
    let target = without_workspace("4090");
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 64, 512, tokens);
        Ok((graph.clone(), graph))
    };
    let whole = search(Bytes(u64::MAX), RematChoice::Auto).run(&target, &build).expect("any fits");
    assert_eq!(whole.activations, ActivationPolicy::STORED);
    let error = search(Bytes(1000), RematChoice::Auto).run(&target, &build).expect_err("too little");
    let PlanError::OverBudget(bill) = error else { panic!("{error}") };
    let (least, most) = (bill.ledger.total().0, whole.program.peak().0);
    let mut before = 0.0;
    let (mut recomputing, mut eight_bits) = (0, 0);
    for k in 0..=12 {
        let budget = Bytes(least + (most - least) * k / 12);
        let found = search(budget, RematChoice::Auto).run(&target, &build).unwrap_or_else(|e| panic!("{e}"));
        assert!(found.program.peak() <= budget, "{budget}");
        let is_8bit = is_8bit(&found.candidate.optimizer);
        let first =
            TrainingSearch { optimizers: vec![Optimizer::AdamW(ADAM)], ..search(budget, RematChoice::Auto) };
        assert_eq!(is_8bit, first.run(&target, &build).is_err(), "{budget}: adamw where it fits");
        if !is_8bit && eight_bits == k {
            before = 0.0;
        }
        eight_bits += u64::from(is_8bit);
        assert!(found.tokens_per_second >= before, "{budget}: {} after {before}", found.tokens_per_second);
        before = found.tokens_per_second;
        recomputing += usize::from(found.activations != ActivationPolicy::STORED);
        // A recomputation policy fixed by the caller is not faster than the choice of the search.
        let full = search(budget, RematChoice::Fixed(RecomputePolicy::Full)).run(&target, &build);
        if let Ok(full) = full
            && full.candidate.optimizer == found.candidate.optimizer
        {
            assert!(found.tokens_per_second >= full.tokens_per_second, "{budget}");
        }
    }
    assert!((2..13).contains(&recomputing), "{recomputing} of 13 budgets recompute");
    assert!((1..13).contains(&eight_bits), "{eight_bits} of 13 budgets hold adamw8bit alone");
    assert!((before - whole.tokens_per_second).abs() < 1e-9 * before);
    let below = search(Bytes(least - 1), RematChoice::Auto).run(&target, &build);
    assert!(matches!(below, Err(PlanError::OverBudget(_))));
}

/// The stored bytes of a choice are a lower bound on its plan, so that a search may skip choices above the budget.
#[test]
fn stored_bytes_bound_every_plan() {
    let target = without_workspace("4090");
    for (accumulation, precision) in [(1, Precision::F32), (4, Precision::Bf16)] {
        let t = Training { accumulation, precision, ..training(Optimizer::AdamW(ADAM)) };
        let graph = language_model(5, 64, 512, 1024);
        let micro = t.micro_step(&graph).expect("differentiated");
        let frontier = Solver::default().frontier(&micro, &[0, 1, 2, 3, 4], &target);
        assert!(frontier.len() > 20, "{}", frontier.len());
        let mut tight = 0;
        for k in (0..frontier.len()).step_by(frontier.len() / 12) {
            let stored = frontier.policy(&micro, &frontier.layer_choices(k));
            let program = t.program_of(vec![(micro.clone(), stored)], &graph, &target).expect("planned");
            let floor = program.persistent() + target.reserved() + frontier.stored_bytes(k);
            let peak = program.peak();
            assert!(floor <= peak, "{k}: {floor}, {peak}");
            tight += usize::from(10 * (peak - floor).0 < 4 * frontier.stored_bytes(k).0);
        }
        assert!(tight > 6, "{tight}: a bound that is far below passes over nothing");
    }
}

/// A search compares models with few layers; the full model is built only for the result, or for the bill of a
/// refusal.
#[test]
fn only_the_choice_is_planned_with_all_layers() {
    let target = target("cpu");
    for budget in [Bytes(1), Bytes(300_000_000), Bytes(u64::MAX)] {
        let whole = std::cell::Cell::new(0);
        let build = |tokens, _, layers| {
            whole.set(whole.get() + u32::from(layers > 20));
            let graph = language_model(layers, 64, 512, tokens);
            Ok((graph.clone(), graph))
        };
        let search = TrainingSearch { layers: 64, ..search(budget, RematChoice::Auto) };
        assert_eq!(search.run(&target, &build).is_ok(), budget.0 > 1);
        assert_eq!(whole.get(), 1, "{budget}");
    }
}

#[test]
fn forty_layers_are_searched_within_a_second() {
    let target = without_workspace("4090");
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 1024, 32_000, tokens);
        Ok((graph.clone(), graph))
    };
    let start = std::time::Instant::now();
    let tokens = vec![1024, 2048, 4096, 8192];
    let search = TrainingSearch {
        tokens,
        layers: 40,
        step_tokens: 65_536,
        ..search(Bytes(24 << 30), RematChoice::Auto)
    };
    let found = search.run(&target, &build).expect("fits");
    assert!(found.program.peak() <= Bytes(24 << 30));
    // Takes about 0.25 s in a dev build; the limit allows for other load on the machine.
    assert!(start.elapsed().as_secs_f64() < 4.0, "{:?}", start.elapsed());
}

/// All sizes of a dynamic program share parameters, states and gradients, and the memory that only larger sizes use is at the
/// end of the arena.
#[test]
fn a_program_of_several_sizes_shares_all_that_persists() {
    let target = target("null");
    let build = |tokens, _, layers| {
        let graph = language_model(layers, 64, 300, tokens);
        Ok((graph.clone(), graph))
    };
    let of = |budget| TrainingSearch {
        dynamic: vec![1024, 256, 512],
        tokens: vec![1024, 256, 512],
        step_tokens: 1024,
        ..search(Bytes(budget), RematChoice::Auto)
    };
    let found = of(1 << 40).run(&target, &build).expect("fits");
    let program = &found.program;
    assert_eq!((found.candidate.tokens, found.candidate.accumulation), (1024, 1));
    let names: Vec<&str> = program.plans().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["micro-step", "apply", "evaluate", "micro-step of 512 tokens", "micro-step of 256 tokens"]
    );
    assert_eq!(program.alternatives(), [0, 3, 4]);
    assert_eq!(program.plans()[2].1.graph.bounds.tokens, 256, "evaluations have the smallest size");
    let persistent = |plan: usize| -> BTreeMap<String, u64> {
        let (_, of) = &program.plans()[plan];
        let states = of.graph.state_values().map(|(v, _, state)| (v, state.role.to_string()));
        let all = of.graph.param_values().map(|(v, _, param)| (v, param.name.clone())).chain(states);
        all.map(|(v, name)| (name, program.location(plan, of.memory.slice(v).expect("a place")).at)).collect()
    };
    let first = persistent(0);
    assert!(first.keys().any(|name| name.starts_with("grad ")));
    assert!([3, 4].iter().all(|&plan| persistent(plan) == first));
    let bytes = [0, 1, 2].map(|k| program.arena_bytes_from(k));
    assert!(bytes[0] == program.arena_bytes() && bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
    // The smallest budgets leave smaller sizes, down to one.
    let least = of(0).run(&target, &build).expect_err("nothing fits");
    let PlanError::OverBudget(bill) = least else { panic!("{least}") };
    let least = bill.budget + bill.short_by();
    let small = of(least.0).run(&target, &build).expect("the bill names what fits");
    assert!(small.program.peak() <= least && small.program.alternatives().len() < 3);
}
