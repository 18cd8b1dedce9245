//! Inference graphs of decoders: equal to the reference device in f64, to the forward pass of training, and with the same
//! bits alone and in any batch.

use crate::rig::{ByName, On, load, one_pack, output, run};
use plimsoll_graph::ops::Mask;
use plimsoll_graph::{Bounds, Counts, Graph, OutputRole, Param};
use plimsoll_models::{
    Biases, DecoderConfig, Experts, Mlp, Norm, Output, Positions, RopeScaling, Training, init_param,
};
use std::ops::Range;

/// Tokens, sequences and tokens of the longest sequence of a step.
const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 6, longest: 24, packs: 1 };

/// Lengths of the sequences of the test batch.
const LENGTHS: [usize; 4] = [1, 24, 7, 13];

/// A dense decoder as Llama, with grouped queries and tied embeddings.
pub fn dense() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 61,
        hidden_size: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        intermediate_size: 48,
        norm: Norm::Rms,
        eps: 1e-5,
        positions: Positions::Rotary(10_000.0),
        mask: Mask::Causal,
        mlp: Mlp::SwiGlu,
        bias: Biases::NONE,
        qk_norm: false,
        scaling: RopeScaling::None,
        tied: true,
        experts: None,
    }
}

/// The dense decoder, one with experts and shared experts, one with every other switch, and those of Qwen.
fn all() -> [DecoderConfig; 5] {
    let experts = Experts {
        experts: 4,
        top_k: 2,
        shared: 1,
        renormalise: true,
        // Inference has no capacity: with this one, training drops rows.
        capacity: 500,
        balance: 0.01,
        z: 0.001,
    };
    let mixtral = DecoderConfig { experts: Some(experts), tied: false, ..dense() };
    let other = DecoderConfig {
        norm: Norm::Layer,
        positions: Positions::Alibi,
        mask: Mask::Window(5),
        mlp: Mlp::Gelu,
        bias: Biases::all(true),
        kv_heads: 4,
        tied: false,
        ..dense()
    };
    // Heads that are wider than an even share of the hidden size, and normalised.
    let qwen3 = DecoderConfig {
        qk_norm: true,
        head_dim: 16,
        scaling: RopeScaling::Llama3 { factor: 4.0, low: 1.0, high: 4.0, original: 12 },
        ..dense()
    };
    let biases = Biases { qkv: true, ..Biases::NONE };
    let qwen2 = DecoderConfig { bias: biases, scaling: RopeScaling::Linear { factor: 2.0 }, ..dense() };
    [dense(), mixtral, other, qwen3, qwen2]
}

/// Initial weights, larger than usual so that the layers matter.
fn weights(config: &DecoderConfig) -> impl FnMut(&Param, Range<u64>, &mut [f32]) {
    let config = config.clone();
    move |param, range, out| {
        init_param(|piece| config.init(piece), 7, param, range, out);
        if !param.name.contains("norm") && !param.name.ends_with("inv_freq") {
            out.iter_mut().for_each(|x| *x *= 4.0);
        }
    }
}

/// Token ids of sequences of these lengths; a sequence of a length always has the same ids.
fn ids(lengths: &[usize]) -> Vec<Vec<i32>> {
    lengths.iter().map(|&n| (0..n).map(|i| ((i * 37 + n * 11) % 61) as i32).collect()).collect()
}

/// The outputs hidden, mean and logits of a batch.
fn computed(on: On, config: &DecoderConfig, graph: &Graph, lengths: &[usize]) -> [Vec<f32>; 3] {
    let sequences = ids(lengths);
    let flat = sequences.concat();
    let mut spans = vec![];
    let mut end = 0;
    for sequence in &sequences {
        spans.extend([end, end + sequence.len() as i32]);
        end += sequence.len() as i32;
    }
    let counts = Counts { tokens: flat.len() as u64, sequences: lengths.len() as u64, packs: 1 };
    let mut executor = load(on, graph, true, weights(config)).unwrap_or_else(|e| panic!("{e}"));
    let inputs = |executor: &mut plimsoll_exec::Executor| {
        executor.input_i32(0, "ids", &flat).expect("ids");
        executor.input_i32(0, "spans", &spans).expect("spans");
    };
    run(&mut executor, inputs, counts);
    let d = config.hidden_size as usize;
    let v = config.vocab_size as usize;
    [
        output(&mut executor, "hidden", flat.len() * d),
        output(&mut executor, "mean", lengths.len() * d),
        output(&mut executor, "logits", flat.len() * v),
    ]
}

fn graph(config: &DecoderConfig) -> Graph {
    config.graph(BOUNDS, &[Output::Hidden, Output::Mean, Output::Logits]).expect("verified")
}

/// Largest difference, relative to the largest value.
fn apart(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    let size = wanted.iter().fold(0f32, |size, x| size.max(x.abs()));
    let difference = found.iter().zip(wanted).map(|(f, w)| (f - w).abs()).fold(0f32, f32::max);
    difference / size
}

#[test]
fn every_cpu_computes_what_the_reference_computes() {
    for config in all() {
        let graph = graph(&config);
        let wanted = computed(On::Reference, &config, &graph, &LENGTHS);
        for on in On::every_cpu() {
            let found = computed(on, &config, &graph, &LENGTHS);
            for (name, (found, wanted)) in
                ["hidden", "mean", "logits"].into_iter().zip(found.iter().zip(&wanted))
            {
                let apart = apart(found, wanted);
                assert!(apart < 1e-5, "{name} on {}: {apart:e} off for {config:?}", on.name());
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_any_batch() {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for config in all() {
        let graph = graph(&config);
        let d = config.hidden_size as usize;
        let v = config.vocab_size as usize;
        for on in On::every_cpu() {
            let together = computed(on, &config, &graph, &LENGTHS);
            let mut start = 0;
            for (k, &length) in LENGTHS.iter().enumerate() {
                let alone = computed(on, &config, &graph, &[length]);
                let rows = start..start + length;
                for (name, alone, part) in [
                    ("hidden", &alone[0], &together[0][rows.start * d..rows.end * d]),
                    ("mean", &alone[1], &together[1][k * d..(k + 1) * d]),
                    ("logits", &alone[2], &together[2][rows.start * v..rows.end * v]),
                ] {
                    assert_eq!(bits(alone), bits(part), "{name} of sequence {k} on {}: {config:?}", on.name());
                }
                start += length;
            }
        }
    }
}

/// The cross-entropy of the logits is the loss of the graph that evaluations run.
#[test]
fn the_logits_are_those_of_the_evaluation_of_training() {
    for config in all() {
        // A capacity drops rows in an evaluation, and is off in inference.
        let experts = config.experts.clone().map(|e| Experts { capacity: 0, ..e });
        let config = DecoderConfig { experts, ..config };
        let sequences = ids(&LENGTHS);
        let flat = sequences.concat();
        let targets: Vec<i32> =
            sequences.iter().flat_map(|s| s[1..].iter().copied().chain([-1]).collect::<Vec<_>>()).collect();
        let v = config.vocab_size as usize;
        for on in [vec![On::Reference], On::every_cpu()].concat() {
            let [_, _, logits] = computed(on, &config, &graph(&config), &LENGTHS);
            let loss: f64 = logits
                .chunks(v)
                .zip(&targets)
                .filter(|(_, target)| **target >= 0)
                .map(|(row, &target)| {
                    let most = row.iter().copied().fold(f32::MIN, f32::max);
                    let sum: f64 = row.iter().map(|&x| f64::from(x - most).exp()).sum();
                    sum.ln() - f64::from(row[target as usize] - most)
                })
                .sum();
            let evaluation = config.train_graph(BOUNDS, &Training::default()).expect("verified");
            let mut executor = load(on, &evaluation, true, weights(&config)).unwrap_or_else(|e| panic!("{e}"));
            let mut spans = vec![];
            let mut end = 0;
            for sequence in &sequences {
                spans.extend([end, end + sequence.len() as i32]);
                end += sequence.len() as i32;
            }
            let counts = Counts { tokens: flat.len() as u64, sequences: LENGTHS.len() as u64, packs: 1 };
            let inputs = |executor: &mut plimsoll_exec::Executor| {
                executor.input_i32(0, "ids", &flat).expect("ids");
                executor.input_i32(0, "spans", &spans).expect("spans");
                executor.input_i32(0, "targets", &targets).expect("targets");
                if evaluation.input("packs").is_some() {
                    executor.input_i32(0, "packs", &one_pack(counts, targets.len())).expect("packs");
                }
            };
            run(&mut executor, inputs, counts);
            let wanted = f64::from(output(&mut executor, OutputRole::Loss, 1)[0]);
            let apart = (loss - wanted).abs() / wanted;
            assert!(apart < 1e-5, "{loss} and {wanted} on {}: {config:?}", on.name());
        }
    }
}
