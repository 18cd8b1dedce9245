//! Tests of training graphs against PyTorch (`fixtures/training`, made by `bench/fixtures/training.py`): loss, all
//! gradients, and five steps. Invariant: the f32 error is at most 1e-5 (relative) on every device.

mod fixture;
mod steps;

use crate::rig::{ByName, On, bare, gradient, output, run};
use fixture::{Fixture, Model, check, largest};
use plimsoll_exec::Executor;
use plimsoll_graph::{Graph, OutputRole, Param};
use plimsoll_models::{Lora, Output, Training, TrainingTask};
use plimsoll_plan::{AutodiffPolicy, Precision, Weights, passes};

/// Each gradient is compared relative to at least this share of the model's largest gradient: the gradient of a key's
/// bias without rotary positions is rounding error only.
const MIN_SHARE: f32 = 0.01;

/// The graph with gradients of all of its losses.
fn differentiated(graph: &Graph) -> Graph {
    let losses = [OutputRole::Loss, OutputRole::Auxiliary].into_iter();
    let policy = AutodiffPolicy { outputs: losses.filter(|role| graph.output(role).is_some()).collect() };
    passes::autodiff(graph, &policy).unwrap_or_else(|e| panic!("{e}"))
}

fn loaded(on: On, graph: &Graph, value: impl Fn(&Param) -> Vec<f32>) -> Executor {
    let mut executor = bare(on, graph, true, Weights::Trained).unwrap_or_else(|e| panic!("{e}"));
    let mut read = |p: &Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        out.copy_from_slice(&value(p)[range.start as usize..range.end as usize]);
        Ok(())
    };
    executor.load(0, &mut read).unwrap_or_else(|e| panic!("{e}"));
    executor
}

fn loss_and_gradients(fixture: &Fixture, on: On) {
    let graph = differentiated(&fixture.graph(fixture.bounds()));
    let mut executor = loaded(on, &graph, |p| fixture.parameter(p));
    run(&mut executor, |e| fixture.give(e, 0), fixture.counts());
    let what = |name: &str| format!("{} on {}: {name}", fixture.name, on.name());
    check(&output(&mut executor, OutputRole::Loss, 1), &fixture.floats("loss"), 0.0, &what("loss"));
    if graph.output(OutputRole::Auxiliary).is_some() {
        // The answer is the loss for each target.
        let wanted: Vec<f32> = fixture.floats("aux").iter().map(|aux| aux * fixture.targets() as f32).collect();
        check(&output(&mut executor, OutputRole::Auxiliary, 1), &wanted, 0.0, &what("aux"));
    }
    let trained: Vec<&Param> =
        graph.params.iter().filter(|p| plimsoll_models::trains(plimsoll_models::Tuning::Full, p)).collect();
    let wanted: Vec<Vec<f32>> = trained.iter().map(|p| fixture.answer("grad.", p)).collect();
    let least = MIN_SHARE * wanted.iter().map(|w| largest(w)).fold(0.0, f32::max);
    for (param, wanted) in trained.iter().zip(&wanted) {
        let found = output(&mut executor, gradient(&param.name), wanted.len());
        check(&found, wanted, least, &what(&gradient(&param.name).to_string()));
    }
}

const DENSE: &[&str] = &["llama", "alibi", "qwen2", "qwen3"];
const MIXTURES: &[&str] = &["mixtral", "moe_swiglu", "moe_gelu"];
const MASKED: &[&str] = &["esm2", "dnabert_s"];

fn on(devices: &[On], names: &'static [&'static str]) {
    for name in names {
        let fixture = Fixture::open(name);
        devices.iter().for_each(|&on| loss_and_gradients(&fixture, on));
    }
}

#[test]
fn dense_decoders_on_the_reference() {
    on(&[On::Reference], DENSE);
}

#[test]
fn dense_decoders_on_the_cpu() {
    on(&On::every_cpu(), DENSE);
}

/// The first GPU, if there is one.
fn gpu() -> Vec<On> {
    On::cuda(Precision::F32).into_iter().collect()
}

#[test]
fn dense_decoders_on_a_gpu() {
    on(&gpu(), DENSE);
}

#[test]
fn mixtures_of_experts_on_a_gpu() {
    on(&gpu(), MIXTURES);
}

#[test]
fn masked_language_models_on_a_gpu() {
    on(&gpu(), MASKED);
}

#[test]
fn the_head_on_a_gpu() {
    on(&gpu(), &["head"]);
}

#[test]
fn mixtures_of_experts_on_the_reference() {
    on(&[On::Reference], MIXTURES);
}

#[test]
fn mixtures_of_experts_on_the_cpu() {
    on(&On::every_cpu(), MIXTURES);
}

#[test]
fn masked_language_models_on_the_reference() {
    on(&[On::Reference], MASKED);
}

#[test]
fn masked_language_models_on_the_cpu() {
    on(&On::every_cpu(), MASKED);
}

#[test]
fn the_head_everywhere() {
    on(&[On::Reference], &["head"]);
    on(&On::every_cpu(), &["head"]);
}

/// A linear map with an adapter equals a plain map with the merged weight W + s B A. The losses are therefore equal,
/// and with the gradient dW of the merged weight: dB = s dW A^T and dA = s B^T dW.
#[test]
fn adapters_equal_merged_weights() {
    const RANK: usize = 2;
    const SCALE: f32 = 1.5;
    let fixture = Fixture::open("esm2");
    let Model::Encoder(encoder) = &fixture.model else { panic!("an encoder") };
    let lora = Lora {
        rank: RANK as u64,
        alpha: SCALE * RANK as f32,
        targets: ["query", "intermediate.dense"].map(str::to_owned).to_vec(),
    };
    let training = Training::default();
    let graph = |lora| {
        let graph =
            encoder.train_graph(fixture.bounds(), TrainingTask::MaskedLm, &training, lora).expect("a graph");
        differentiated(&graph)
    };
    // Arbitrary numbers, so that neither A nor B is zero.
    let adapter = |p: &Param| {
        let n: u64 = p.pieces[0].shape.iter().product();
        let mut values = vec![0.0; n as usize];
        plimsoll_models::init(&plimsoll_models::Init::Normal(0.3), 5, &p.name, 0, &mut values);
        values
    };
    let adapted = graph(Some(&lora));
    let of = |module: &str, leaf: &str| {
        let found = adapted.params.iter().find(|p| p.name == format!("{module}.{leaf}.weight"));
        found.map(|p| (p.clone(), adapter(p)))
    };
    let merged = |p: &Param| {
        let mut w = fixture.parameter(p);
        let module = p.name.trim_end_matches(".weight");
        if let (Some((_, a)), Some((_, b))) = (of(module, "lora_A"), of(module, "lora_B")) {
            let k = a.len() / RANK;
            for (i, w) in w.iter_mut().enumerate() {
                let sum: f32 = (0..RANK).map(|r| b[i / k * RANK + r] * a[r * k + i % k]).sum();
                *w += SCALE * sum;
            }
        }
        w
    };
    let on = On::Reference;
    let mut plain = loaded(on, &graph(None), merged);
    run(&mut plain, |e| fixture.give(e, 0), fixture.counts());
    let value = |p: &Param| if p.name.contains(".lora_") { adapter(p) } else { fixture.parameter(p) };
    let mut with = loaded(on, &adapted, value);
    run(&mut with, |e| fixture.give(e, 0), fixture.counts());
    let losses = [&mut with, &mut plain].map(|executor| output(executor, OutputRole::Loss, 1));
    check(&losses[0], &losses[1], 0.0, "loss");
    let adapters = adapted.params.iter().filter(|p| p.name.ends_with(".lora_A.weight"));
    let modules: Vec<&str> = adapters.map(|p| p.name.trim_end_matches(".lora_A.weight")).collect();
    assert_eq!(modules.len(), 2 * 2);
    for module in modules {
        let (Some((_, a)), Some((_, b))) = (of(module, "lora_A"), of(module, "lora_B")) else { panic!("both") };
        let k = a.len() / RANK;
        let n = b.len() / RANK;
        let dw = output(&mut plain, gradient(&format!("{module}.weight")), n * k);
        let da = (0..RANK * k).map(|i| (i / k, i % k));
        let da = da.map(|(r, c)| SCALE * (0..n).map(|j| b[j * RANK + r] * dw[j * k + c]).sum::<f32>());
        let db = (0..n * RANK).map(|i| (i / RANK, i % RANK));
        let db = db.map(|(j, r)| SCALE * (0..k).map(|c| a[r * k + c] * dw[j * k + c]).sum::<f32>());
        for (leaf, wanted) in [("lora_A", da.collect::<Vec<_>>()), ("lora_B", db.collect())] {
            let name = format!("{module}.{leaf}.weight");
            check(&output(&mut with, gradient(&name), wanted.len()), &wanted, 0.0, &name);
        }
    }
}

/// The loss of a classifier equals the cross-entropy of an affine map of the mean embedding that inference computes.
#[test]
fn classifiers_read_the_pooled_state() {
    const CLASSES: usize = 3;
    for name in ["esm2", "dnabert_s"] {
        let fixture = Fixture::open(name);
        let Model::Encoder(encoder) = &fixture.model else { panic!("an encoder") };
        let counts = fixture.counts();
        let d = encoder.hidden_size() as usize;
        let targets: Vec<i32> = (0..counts.sequences as i32).map(|s| s % 4 - 1).collect();
        let value = |p: &Param| {
            if !p.name.starts_with("classifier.") {
                return fixture.parameter(p);
            }
            let mut values = vec![0.0; p.pieces[0].shape.iter().product::<u64>() as usize];
            plimsoll_models::init(&plimsoll_models::Init::Normal(0.5), 6, &p.name, 0, &mut values);
            values
        };
        let tokens = |e: &mut Executor| {
            e.input_i32(0, "ids", &fixture.integers("ids")).expect("ids");
            e.input_i32(0, "spans", &fixture.integers("spans")).expect("spans");
        };
        let mut pooled =
            loaded(On::Reference, &encoder.graph(fixture.bounds(), &[Output::Mean]).expect("ok"), value);
        run(&mut pooled, tokens, counts);
        let mean = output(&mut pooled, "mean", counts.sequences as usize * d);
        let task = TrainingTask::Classes(CLASSES as u64);
        let graph = encoder.train_graph(fixture.bounds(), task, &Training::default(), None).expect("a graph");
        let of = |leaf: &str| value(graph.params.iter().find(|p| p.name == leaf).expect(leaf));
        let w = of("classifier.weight");
        let b = of("classifier.bias");
        let row = |(x, &target): (&[f32], &i32)| {
            let logit = |c: usize| {
                f64::from(b[c]) + x.iter().zip(&w[c * d..]).map(|(x, w)| f64::from(x * w)).sum::<f64>()
            };
            let lse = (0..CLASSES).map(|c| logit(c).exp()).sum::<f64>().ln();
            if target < 0 { 0.0 } else { lse - logit(target as usize) }
        };
        let wanted: f64 = mean.chunks(d).zip(&targets).map(row).sum();
        let mut executor = loaded(On::Reference, &graph, value);
        let give = |e: &mut Executor| {
            tokens(e);
            e.input_i32(0, "targets", &targets).expect("targets");
        };
        run(&mut executor, give, counts);
        check(&output(&mut executor, OutputRole::Loss, 1), &[wanted as f32], 0.0, name);
    }
}
