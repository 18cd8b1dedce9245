//! Tests of packs: joining packs in a step changes nothing but rounding, and packs that do not cover a step are refused.
//! Invariant: the model has all that belongs to a pack: balance and router z losses, an expert capacity that drops rows,
//! and dropout.

use crate::decoders::dense;
use crate::evaluate::{evaluate, shape};
use crate::rig::{ByName, On, bare, run};
use plimsoll_cpu::Isa;
use plimsoll_exec::DeviceError;
use plimsoll_exec::reference::Tensor;
use plimsoll_graph::ops::{Dropout, Route, RouterLoss};
use plimsoll_graph::{Bounds, Builder, Counts, DType, Dim, Graph, Op, OutputRole, ValueId, packs};
use plimsoll_models::{DecoderConfig, Experts, Training, init_param};
use plimsoll_plan::{AutodiffPolicy, Precision, Weights, passes};
use std::collections::BTreeMap;

const BOUNDS: Bounds = Bounds { tokens: 60, sequences: 9, longest: 20, packs: 5 };

/// Lengths of the sequences of each pack. The last token of a sequence has no target, so the packs have 15, 21, 0 and 9
/// targets.
const PACKS: [&[usize]; 4] = [&[1, 16], &[9, 11, 4], &[1, 1], &[10]];

/// All outputs by role.
type Outputs = BTreeMap<OutputRole, Vec<f64>>;

/// A decoder with experts.
fn config() -> DecoderConfig {
    let experts =
        Experts { experts: 4, top_k: 2, shared: 1, renormalise: true, capacity: 900, balance: 0.5, z: 0.25 };
    DecoderConfig {
        vocab_size: 31,
        hidden_size: 24,
        head_dim: 6,
        intermediate_size: 20,
        experts: Some(experts),
        ..dense()
    }
}

/// The decoder's losses and their gradients.
fn graph() -> Graph {
    let training = Training { chunk: 8, z_loss: 0.0, dropout: 0.2 };
    let graph = config().train_graph(BOUNDS, &training).expect("verified");
    let policy = AutodiffPolicy { outputs: vec![OutputRole::Loss, OutputRole::Auxiliary] };
    passes::autodiff(&graph, &policy).expect("differentiable")
}

/// The step that joins consecutive packs: its counts and its inputs of integers.
struct Step {
    counts: Counts,
    inputs: BTreeMap<&'static str, Vec<i32>>,
}

impl Step {
    /// Joins the packs with numbers `first..first + lengths.len()`, whose sequences have these lengths.
    fn new(lengths: &[&[usize]], first: usize) -> Self {
        let mut ids = vec![];
        let mut targets = vec![];
        let mut spans = vec![];
        let mut packs = vec![];
        for (i, pack) in lengths.iter().enumerate() {
            let number = first + i;
            let start = [ids.len(), spans.len() / 2];
            for (sequence, &tokens) in pack.iter().enumerate() {
                let id = |t: usize| ((t * 7 + sequence * 5 + number * 3 + t * t) % 31) as i32;
                spans.extend([ids.len() as i32, (ids.len() + tokens) as i32]);
                ids.extend((0..tokens).map(id));
                targets.extend((1..tokens).map(id).chain([-1]));
            }
            let count = pack.iter().map(|tokens| tokens - 1).sum();
            let words = [start[0], ids.len(), start[1], spans.len() / 2, count, number];
            packs.extend(words.map(|word| word as i32));
        }
        let counts =
            Counts { tokens: ids.len() as u64, sequences: spans.len() as u64 / 2, packs: lengths.len() as u64 };
        let inputs = BTreeMap::from([
            ("ids", ids),
            ("targets", targets),
            ("spans", spans),
            ("packs", packs),
            ("seed", vec![7, -9]),
        ]);
        Self { counts, inputs }
    }
}

/// Initial weights, larger than usual so that layers and experts matter.
fn weights(param: &plimsoll_graph::Param, range: std::ops::Range<u64>, out: &mut [f32]) {
    let config = config();
    init_param(|piece| config.init(piece), 7, param, range, out);
    if !param.name.contains("norm") && !param.name.ends_with("inv_freq") {
        out.iter_mut().for_each(|x| *x *= 4.0);
    }
}

/// Whether an output has the same number of elements in every step, and so can be added over steps.
fn is_sum(role: &OutputRole) -> bool {
    !matches!(role, OutputRole::ExpertRows { .. })
}

/// The outputs of a step on the reference in f64.
fn evaluated(graph: &Graph, step: &Step) -> Outputs {
    let values = evaluate(graph, step.counts, |v| {
        let shape = shape(graph.spec(v), step.counts);
        if let Some((.., param)) = graph.param_values().find(|(p, ..)| *p == v) {
            let mut values = vec![0.0; shape.iter().product()];
            weights(param, 0..values.len() as u64, &mut values);
            return Tensor::f32(&shape, values);
        }
        let (name, _) = graph.inputs.iter().find(|(_, input)| *input == v).expect("an input");
        match step.inputs.get(&name[..]) {
            Some(values) => Tensor::i32(&shape, values.clone()),
            None => Tensor::f64(&shape, vec![1.0]),
        }
    });
    let output = |(role, v): &(OutputRole, ValueId)| {
        let tensor = values.of(*v);
        let integers = || tensor.integers().expect("numbers").iter().map(|&x| f64::from(x)).collect();
        (role.clone(), tensor.floats().map_or_else(integers, <[f64]>::to_vec))
    };
    graph.outputs.iter().map(output).filter(|(role, _)| is_sum(role)).collect()
}

/// The outputs of a step on a device.
fn computed(graph: &Graph, on: On, step: &Step) -> Outputs {
    let mut executor = bare(on, graph, true, Weights::Trained).unwrap_or_else(|e| panic!("{e}"));
    let mut read = |p: &plimsoll_graph::Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        weights(p, range, out);
        Ok(())
    };
    executor.load(0, &mut read).unwrap_or_else(|e| panic!("{e}"));
    let give = |e: &mut plimsoll_exec::Executor| {
        for (name, values) in &step.inputs {
            e.input_i32(0, name, values).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        for name in ["d loss", "d aux"] {
            e.input_f32(0, name, &[1.0]).expect("a cotangent");
        }
    };
    run(&mut executor, give, step.counts);
    let output = |(role, v): &(OutputRole, ValueId)| {
        let spec = graph.spec(*v);
        let elements = spec.elements_at(step.counts) as usize;
        if spec.dtype == DType::I32 {
            let values = crate::rig::output_i32(&mut executor, role, elements);
            return (role.clone(), values.into_iter().map(f64::from).collect());
        }
        let values = crate::rig::output(&mut executor, role, elements);
        (role.clone(), values.into_iter().map(f64::from).collect())
    };
    graph.outputs.iter().map(output).filter(|(role, _)| is_sum(role)).collect()
}

/// Asserts that the outputs of all packs in one step are the sums of those of steps of some of the packs, within
/// `tolerance` relative to the largest element of each output.
fn joining_changes_nothing(of: impl Fn(&Step) -> Outputs, tolerance: f64, what: &str) {
    let joined = of(&Step::new(&PACKS, 0));
    assert!(
        joined[&OutputRole::Auxiliary][0] > 0.0 && joined[&OutputRole::DroppedRows { layer: 0 }][0] > 0.0,
        "{what}: nothing belongs to packs"
    );
    for each in [1, 2, 3] {
        let mut sums: Outputs = joined.iter().map(|(role, x)| (role.clone(), vec![0.0; x.len()])).collect();
        for (i, lengths) in PACKS.chunks(each).enumerate() {
            for (role, values) in of(&Step::new(lengths, i * each)) {
                let sum = sums.get_mut(&role).expect("an output of the joined step");
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        }
        for (role, joined) in &joined {
            let largest = joined.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            assert!(largest > 0.0 || matches!(role, OutputRole::DroppedRows { .. }), "{what}: {role} is 0");
            for (i, (sum, x)) in sums[role].iter().zip(joined).enumerate() {
                let off = (sum - x).abs();
                assert!(
                    off <= tolerance * largest,
                    "{what}, {each} packs a step: {role}[{i}] is off by {off:e}"
                );
            }
        }
    }
}

#[test]
fn joining_packs_changes_nothing_on_the_reference() {
    let graph = graph();
    joining_changes_nothing(|step| evaluated(&graph, step), 1e-12, "reference");
}

#[test]
fn joining_packs_changes_rounding_only_on_the_cpu() {
    let graph = graph();
    for on in On::every_cpu() {
        joining_changes_nothing(|step| computed(&graph, on, step), 1e-6, &on.name());
    }
}

#[test]
fn joining_packs_changes_rounding_only_on_a_gpu() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    let graph = graph();
    joining_changes_nothing(|step| computed(&graph, on, step), 1e-6, &on.name());
}

/// A pack with other targets, another number or other tokens beside it changes nothing but its own part: without this, the
/// sums above would also be equal if all packs were read as the first.
#[test]
fn the_number_and_the_targets_of_a_pack_matter() {
    let graph = graph();
    let of = |change: &dyn Fn(&mut [i32])| {
        let mut step = Step::new(&PACKS[1..2], 1);
        change(step.inputs.get_mut("packs").expect("packs"));
        evaluated(&graph, &step)
    };
    let plain = of(&|_| {});
    let number = of(&|words| words[packs::NUMBER] = 2);
    assert!(number[&OutputRole::Loss] != plain[&OutputRole::Loss], "the number of a pack seeds its dropout");
    let targets = of(&|words| words[packs::TARGETS] *= 3);
    assert_eq!(targets[&OutputRole::Loss], plain[&OutputRole::Loss]);
    let off = targets[&OutputRole::Auxiliary][0] / plain[&OutputRole::Auxiliary][0] - 3.0;
    assert!(off.abs() < 1e-12, "the targets of a pack weight its router losses");
}

/// A graph of one op that reads packs of tokens.
fn graph_of(op: Op) -> Graph {
    let mut g = Builder::new(Bounds { tokens: 8, sequences: 2, longest: 8, packs: 3 });
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(3)], DType::F32);
    let second = if let Op::Dropout(_) = op {
        Some(g.input("seed", &[Dim::Fixed(2)], DType::I32))
    } else if let Op::RouterLoss(_) = op {
        Some(g.input("experts", &[Dim::Tokens(1), Dim::Fixed(2)], DType::I32))
    } else {
        None
    };
    let packs = g.input("packs", &[Dim::Packs(1), Dim::Fixed(packs::WORDS as u64)], DType::I32);
    let inputs: Vec<ValueId> = [x].into_iter().chain(second).chain([packs]).collect();
    for (i, out) in g.node(op, &inputs).into_iter().enumerate() {
        g.output(format!("out{i}"), out);
    }
    g.finish().expect("verified")
}

/// Packs of six tokens: the rows of their tokens, and whether they are accepted.
#[test]
fn packs_that_do_not_cover_the_tokens_are_refused() {
    let ops = [
        Op::Dropout(Dropout { p: 0.5, stream: 0 }),
        Op::Route(Route { experts: 3, top_k: 2, renormalise: true, capacity: 900 }),
        Op::RouterLoss(RouterLoss { balance: 1.0, z: 1.0 }),
    ];
    let packings: [(&[[i32; 2]], bool); 9] = [
        (&[[0, 6]], true),
        (&[[0, 0], [0, 2], [2, 6]], true),
        (&[[0, 5]], false),
        (&[[0, 7]], false),
        (&[[1, 6]], false),
        (&[[-1, 6]], false),
        (&[[0, 3], [2, 6]], false),
        (&[[0, 3], [4, 6]], false),
        (&[[0, i32::MAX], [i32::MIN, 6]], false),
    ];
    for op in ops {
        let graph = graph_of(op);
        for on in [On::Reference, On::Cpu(Isa::detect(), 2)] {
            let mut executor = bare(on, &graph, true, Weights::Resident).expect("planned");
            for (rows, is_fine) in packings {
                let words: Vec<i32> = rows.iter().flat_map(|&[first, end]| [first, end, 0, 2, 5, 0]).collect();
                for (name, _) in &graph.inputs {
                    match &name[..] {
                        "x" => executor.input_f32(0, name, &[0.5; 18]),
                        "packs" => executor.input_i32(0, name, &words),
                        "experts" => executor.input_i32(0, name, &[1; 12]),
                        _ => executor.input_i32(0, name, &[1, 2]),
                    }
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                }
                let ran = executor.run(0, Counts { tokens: 6, sequences: 2, packs: rows.len() as u64 });
                let what = format!("{} of {rows:?} on {}: {ran:?}", op.name(), on.name());
                assert!(matches!(ran, Ok(()) | Err(DeviceError::Kernel { .. })), "{what}");
                assert_eq!(ran.is_ok(), is_fine, "{what}");
            }
        }
    }
}
