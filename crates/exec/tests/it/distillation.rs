//! Tests of the distillation of a caller: loss and gradients on every device, against formulas in f64 over the logits of the
//! inference graphs. Invariant: the formulas use neither the training graph nor the ops of the loss.

use crate::evaluate::{evaluate, shape};
use crate::rig::{ByName, On, gradient, output, run};
use plimsoll_exec::Executor;
use plimsoll_exec::reference::Tensor;
use plimsoll_graph::{Bounds, Counts, Graph, OutputRole, Param, ValueId};
use plimsoll_models::{CallerConfig, CallerObjective, CallerTask, Distillation, Training, tensor_of_teacher};
use plimsoll_plan::{AutodiffPolicy, Policy, Precision, Program, Weights, compile};
use std::ops::Range;

const BOUNDS: Bounds = Bounds { tokens: 60, sequences: 4, longest: 4, packs: 1 };
const COUNTS: Counts = Counts { tokens: 54, sequences: 3, packs: 1 };
const SPANS: [i32; 6] = [0, 24, 24, 42, 42, 54];
const WEIGHT: f32 = 0.3;
const TEMPERATURE: f32 = 2.5;
/// Factor of the loss of each task of the student.
const TASKS: [f32; 2] = [1.0, 0.5];
/// Classes of the windows in each task; the last window has none in the second.
const TARGETS: [[i32; 3]; 2] = [[1, 0, 1], [2, 0, -1]];

fn task(name: &str, classes: &[&str]) -> CallerTask {
    CallerTask { name: name.to_owned(), classes: classes.iter().map(|&c| c.to_owned()).collect() }
}

fn caller(hidden_size: u64, layers: u64, tasks: Vec<CallerTask>) -> CallerConfig {
    let heads = 2;
    let intermediate_size = 24;
    let vocab_size = 66;
    let eps = 1e-5;
    let rope_theta = 10_000.0;
    CallerConfig { vocab_size, hidden_size, layers, heads, intermediate_size, eps, rope_theta, tasks }
}

/// The student, and two teachers of other sizes, of which one has the tasks in another order and one more.
fn models() -> (CallerConfig, Vec<CallerConfig>) {
    let virus = task("virus", &["other", "virus"]);
    let class = task("class", &["bacteria", "phage", "plant"]);
    let more = task("more", &["a", "b"]);
    let first = caller(20, 2, vec![class.clone(), more, virus.clone()]);
    let second = caller(12, 1, vec![virus.clone(), class.clone()]);
    (caller(16, 2, vec![virus, class]), vec![first, second])
}

/// A fixed number for element `i` of a parameter.
fn number(name: &str, i: u64) -> f32 {
    let seed =
        name.bytes().fold(i.wrapping_mul(0x9E37_79B9), |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0193));
    let unit = ((seed >> 7) % 1000) as f32 / 500.0 - 1.0;
    if name.ends_with("norm.weight") { 1.0 + 0.1 * unit } else { 0.5 * unit }
}

/// Element `i` of a parameter of a training graph.
fn value(param: &str, i: u64) -> f32 {
    let (student, teachers) = models();
    let (config, tensor) = match tensor_of_teacher(param) {
        Some((teacher, tensor)) => (&teachers[teacher], tensor),
        None => (&student, param),
    };
    config.derived(tensor).map_or_else(|| number(param, i), |values| values[i as usize])
}

fn ids() -> Vec<i32> {
    (0..COUNTS.tokens as i32).map(|i| (i * 37 + i * i) % 64).collect()
}

fn frames() -> Vec<i32> {
    let frame = |span: &[i32]| {
        let start = span[0];
        let length = (span[1] - span[0]) / 6;
        (0..6).flat_map(move |f| [start + f * length, start + (f + 1) * length]).collect::<Vec<_>>()
    };
    SPANS.chunks(2).flat_map(frame).collect()
}

fn tensor(graph: &Graph, v: ValueId, values: Vec<f64>) -> Tensor {
    Tensor::f64(&shape(graph.spec(v), COUNTS), values)
}

/// Logits of each task of the student by name, in f64, with one element of one of its parameters moved; or of the teacher
/// with this prefix.
fn logits(
    config: &CallerConfig,
    prefix: &str,
    moved: Option<(&str, u64, f64)>,
) -> Vec<(String, Vec<Vec<f64>>)> {
    let graph = config.graph(BOUNDS).expect("verified");
    let values = evaluate(&graph, COUNTS, |v| {
        if let Some((name, _)) = graph.inputs.iter().find(|(_, input)| *input == v) {
            let given = match &name[..] {
                "ids" => ids(),
                "spans" => SPANS.to_vec(),
                _ => frames(),
            };
            return Tensor::i32(&shape(graph.spec(v), COUNTS), given);
        }
        let param = graph.param_values().find(|(param, ..)| *param == v).expect("a parameter").2;
        let name = format!("{prefix}{}", param.name);
        let number = |i| {
            let by = moved.filter(|&(of, at, _)| of == name && at == i).map_or(0.0, |(.., by)| by);
            f64::from(value(&name, i)) + by
        };
        tensor(&graph, v, (0..graph.spec(v).elements_at(COUNTS)).map(number).collect())
    });
    let all = values.of(graph.output("logits").expect("logits")).floats().expect("floats");
    let mut first = 0;
    let of_task = |task: &CallerTask| {
        let from = first;
        let width = task.classes.len();
        first += width;
        let rows = all.chunks(config.logits() as usize).map(|row| row[from..from + width].to_vec());
        (task.name.clone(), rows.collect())
    };
    config.tasks.iter().map(of_task).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let sum: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / sum).collect()
}

/// The cross-entropy and the distillation loss by their definitions.
fn losses(moved: Option<(&str, u64, f64)>) -> (f64, f64) {
    let (student, teachers) = models();
    let of_teachers: Vec<_> =
        teachers.iter().enumerate().map(|(i, t)| logits(t, &format!("teachers.{i}."), None)).collect();
    let mut entropy = 0.0;
    let mut distillation = 0.0;
    let t = f64::from(TEMPERATURE);
    for (task, (name, rows)) in logits(&student, "", moved).iter().enumerate() {
        for (window, row) in rows.iter().enumerate() {
            let of_task = |all: &Vec<(String, Vec<Vec<f64>>)>| {
                all.iter().find(|(other, _)| other == name).expect("the task").1[window].clone()
            };
            let predictions: Vec<Vec<f64>> = of_teachers.iter().map(of_task).collect();
            let mean = |c: usize| predictions.iter().map(|p| p[c]).sum::<f64>() / predictions.len() as f64;
            let q = softmax(&(0..row.len()).map(|c| mean(c) / t).collect::<Vec<_>>());
            let p = softmax(&row.iter().map(|x| x / t).collect::<Vec<_>>());
            let factor = f64::from(TASKS[task]);
            distillation += factor
                * f64::from(WEIGHT)
                * t
                * t
                * q.iter().zip(&p).map(|(q, p)| q * (q / p).ln()).sum::<f64>();
            if let Ok(class) = usize::try_from(TARGETS[task][window]) {
                entropy -= factor * softmax(row)[class].ln();
            }
        }
    }
    (entropy, distillation)
}

/// The training graph.
fn graph() -> Graph {
    let (student, teachers) = models();
    let distillation = Some(Distillation { teachers, weight: WEIGHT, temperature: TEMPERATURE });
    let objective = CallerObjective::Tasks { weights: TASKS.to_vec(), distillation };
    student.train_graph(BOUNDS, &objective, &Training::default()).expect("verified")
}

/// An executor of the training graph with its gradients, and the differentiated graph.
fn executor(on: On) -> (Executor, Graph) {
    let target = on.target().expect("a target");
    let autodiff = Some(AutodiffPolicy { outputs: vec![OutputRole::Loss] });
    let policy = Policy { autodiff, weights: Weights::Trained, ..Policy::default() };
    let plan = compile(&graph(), &policy, &target).unwrap_or_else(|e| panic!("{}: {e}", on.name()));
    let graph = plan.graph.clone();
    let mut executor = on.executor(Program::new(target, vec![("train".to_owned(), plan)], vec![]));
    let mut read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        out.iter_mut().zip(range).for_each(|(x, i)| *x = value(&param.name, i));
        Ok(())
    };
    executor.load(0, &mut read).expect("loaded");
    (executor, graph)
}

#[test]
fn losses_and_gradients_are_those_of_the_definition() {
    let (entropy, distillation) = losses(None);
    let total = (1.0 - f64::from(WEIGHT)) * entropy + distillation;
    // Central differences of the definition.
    let checked = [
        ("embedding.weight", 37 * 16 + 3),
        ("layers.0.attention.query.weight", 21),
        ("layers.1.mlp.down.weight", 100),
        ("pool.dense.bias", 7),
        ("tasks.virus.weight", 40),
        ("tasks.virus.bias", 1),
        ("tasks.class.weight", 9),
        ("tasks.class.bias", 2),
    ];
    let loss = |moved| {
        let (entropy, distillation) = losses(Some(moved));
        (1.0 - f64::from(WEIGHT)) * entropy + distillation
    };
    const H: f64 = 1e-5;
    let slopes = checked.map(|(name, i)| (loss((name, i, H)) - loss((name, i, -H))) / (2.0 * H));
    for on in [On::Reference].into_iter().chain(On::every_cpu()).chain(On::cuda(Precision::F32)) {
        let (mut executor, graph) = executor(on);
        let of_teachers =
            graph.outputs.iter().filter(|(role, _)| role.to_string().contains("teachers")).count();
        assert_eq!(of_teachers, 0, "a teacher has a gradient");
        let give = |e: &mut Executor| {
            e.input_i32(0, "ids", &ids()).expect("ids");
            e.input_i32(0, "spans", &SPANS).expect("spans");
            e.input_i32(0, "frames", &frames()).expect("frames");
            for (i, targets) in TARGETS.iter().enumerate() {
                e.input_i32(0, &format!("targets.{i}"), targets).expect("targets");
            }
            e.input_f32(0, "d loss", &[1.0]).expect("d loss");
        };
        run(&mut executor, give, COUNTS);
        for (role, wanted) in [
            (OutputRole::Loss, total),
            (OutputRole::CrossEntropy, entropy),
            (OutputRole::DistillationLoss, distillation),
        ] {
            let found = f64::from(output(&mut executor, &role, 1)[0]);
            assert!(
                (found - wanted).abs() < 1e-5 * wanted.abs(),
                "{}: {role} {found}, not {wanted}",
                on.name()
            );
        }
        for ((name, i), slope) in checked.iter().zip(slopes) {
            let v = graph.output(gradient(name)).expect("a gradient");
            let n = graph.spec(v).elements_at(COUNTS) as usize;
            let found = f64::from(output(&mut executor, gradient(name), n)[*i as usize]);
            assert!((found - slope).abs() < 1e-5, "{}: {name}[{i}] {found}, not {slope}", on.name());
        }
    }
}
