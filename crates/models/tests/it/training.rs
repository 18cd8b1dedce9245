//! Integration tests of training graphs: parameter counts, tensor names, trained parameters, and configurations
//! that are refused.

use plimsoll_graph::ops::Mask;
use plimsoll_graph::{Bounds, Graph, Param};
use plimsoll_models::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 8, longest: 32, packs: 1 };
const DECODERS: [&str; 7] = ["llama", "mixtral", "moe_swiglu", "moe_gelu", "alibi", "qwen2", "qwen3"];

fn fixture(name: &str, file: &str) -> Vec<u8> {
    let path = format!("{}/../../fixtures/training/{name}/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("a fixture")
}

fn config(name: &str) -> String {
    String::from_utf8(fixture(name, "config.json")).expect("text")
}

fn decoder(name: &str) -> DecoderConfig {
    DecoderConfig::from_json(&config(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn encoder(name: &str) -> Encoder {
    Encoder::from_json(&config(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Tensor shapes by name, from the header of the fixture's safetensors file.
fn tensors(name: &str) -> BTreeMap<String, Vec<u64>> {
    let file = fixture(name, "model.safetensors");
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&rest[..length]).expect("a header");
    let shape = |v: &Value| v["shape"].as_array().expect("a shape").iter().filter_map(Value::as_u64).collect();
    header.iter().filter(|(name, _)| *name != "__metadata__").map(|(n, v)| (n.clone(), shape(v))).collect()
}

fn names<T: ToString>(values: &[(T, plimsoll_graph::ValueId)]) -> Vec<String> {
    values.iter().map(|(name, _)| name.to_string()).collect()
}

fn modules(graph: &Graph, keep: impl Fn(&Param) -> bool) -> BTreeSet<String> {
    graph.params.iter().filter(|p| keep(p)).map(|p| p.name.clone()).collect()
}

#[test]
fn parameters_of_the_mixtures() {
    // 2 V h + L (4 h^2 + 4 h + E (2 h i + i + h) + E h + E + 4 h) + 2 h: 92.9 M, 317.1 M, 1.35 B, 6.68 B.
    // Active, with k in place of E in the term of the experts: 74.0 M, 140.7 M, 289.8 M, 1.04 B.
    for (size, parameters, active) in [
        ("tiny", 92_898_080u64, 73_992_992),
        ("small", 317_072_496, 140_696_688),
        ("base", 1_347_651_328, 289_826_560),
        ("large", 6_682_249_984, 1_041_664_768),
    ] {
        let c = moe(size).expect("known");
        let graph = c.train_graph(BOUNDS, &Training::default()).expect("verified");
        let frequencies = c.head_dim / 2;
        assert_eq!(graph.parameter_count() - frequencies, parameters, "{size}");
        assert_eq!(active_parameters(&graph) - frequencies, active, "{size}");
    }
    assert!(moe("huge").is_none());
}

/// The graph reads exactly the tensors of the fixture, which has the layout of the Hub, with equal shapes.
#[test]
fn weights_are_those_of_the_hub() {
    let check = |name: &str, graph: &Graph, find: &dyn Fn(&str) -> Vec<String>, unread: &[&str]| {
        let mut file = tensors(name);
        for piece in graph.params.iter().flat_map(|p| &p.pieces).filter(|p| !p.tensor.ends_with("inv_freq")) {
            let found = find(&piece.tensor).iter().find_map(|n| file.remove(n));
            assert_eq!(found.as_ref(), Some(&piece.shape), "{name}: {}", piece.tensor);
        }
        assert_eq!(file.keys().collect::<Vec<_>>(), unread, "{name}");
    };
    for name in DECODERS {
        let graph = decoder(name).train_graph(BOUNDS, &Training::default()).expect("verified");
        check(name, &graph, &|tensor| vec![tensor.to_owned()], &[]);
    }
    for name in ["esm2", "dnabert_s"] {
        let encoder = encoder(name);
        let graph =
            encoder.train_graph(BOUNDS, TrainingTask::MaskedLm, &Training::default(), None).expect("a graph");
        check(name, &graph, &|tensor| candidates(&encoder, tensor), &[]);
    }
    let head = HeadConfig { dna: 6, protein: 5, hidden: 8, classes: 2 };
    let graph = head.train_graph(BOUNDS, &Training::default()).expect("verified");
    check("head", &graph, &|tensor| vec![tensor.to_owned()], &[]);
    assert_eq!(graph.updates.len(), 2);
}

#[test]
fn inputs_and_outputs_have_the_trainers_names() {
    let plain = Training::default();
    let dropping = Training { dropout: 0.1, ..plain };
    let check = |graph: Graph, inputs: &[&str], outputs: &[&str]| {
        assert_eq!(names(&graph.inputs), inputs);
        assert_eq!(names(&graph.outputs), outputs);
    };
    let dense = |t: &Training| decoder("llama").train_graph(BOUNDS, t).expect("verified");
    check(dense(&plain), &["ids", "spans", "targets"], &["loss"]);
    check(dense(&dropping), &["ids", "spans", "targets", "seed", "packs"], &["loss"]);
    let z = Training { z_loss: 0.1, ..plain };
    check(dense(&z), &["ids", "spans", "targets"], &["loss", "cross_entropy", "z_loss"]);
    let mut c = decoder("moe_gelu");
    check(
        c.train_graph(BOUNDS, &plain).expect("verified"),
        &["ids", "spans", "targets", "packs"],
        &["load.0", "load.1", "loss", "aux", "balance_loss", "router_z_loss"],
    );
    let experts = c.experts.as_mut().expect("experts");
    (experts.capacity, experts.balance, experts.z) = (1250, 0.0, 0.0);
    let graph = c.train_graph(BOUNDS, &plain).expect("verified");
    check(
        graph,
        &["ids", "spans", "targets", "packs"],
        &["load.0", "dropped.0", "load.1", "dropped.1", "loss"],
    );
    for name in ["esm2", "dnabert_s"] {
        for task in [TrainingTask::MaskedLm, TrainingTask::Classes(3)] {
            let graph = encoder(name).train_graph(BOUNDS, task, &plain, None).expect("a graph");
            check(graph, &["ids", "spans", "targets"], &["loss"]);
            let graph = encoder(name).train_graph(BOUNDS, task, &dropping, None).expect("a graph");
            check(graph, &["ids", "spans", "seed", "packs", "targets"], &["loss"]);
        }
    }
    let head = HeadConfig { dna: 6, protein: 5, hidden: 8, classes: 2 };
    check(
        head.train_graph(BOUNDS, &dropping).expect("ok"),
        &["dna", "protein", "targets", "seed", "packs"],
        &["loss"],
    );
}

/// Every block has two dropouts; each has its own stream, because equal streams would give equal masks.
#[test]
fn dropouts_have_streams_of_their_own() {
    let training = Training { dropout: 0.1, ..Training::default() };
    let check = |graph: Graph, wanted: u32| {
        let streams = graph.nodes.iter().filter_map(|n| {
            let plimsoll_graph::Op::Dropout(op) = &n.op else { return None };
            Some(op.stream)
        });
        let streams: Vec<u32> = streams.collect();
        assert_eq!(streams, (0..wanted).collect::<Vec<_>>());
    };
    check(decoder("moe_swiglu").train_graph(BOUNDS, &training).expect("verified"), 1 + 2 * 2);
    for name in ["esm2", "dnabert_s"] {
        let graph = |task| encoder(name).train_graph(BOUNDS, task, &training, None).expect("a graph");
        check(graph(TrainingTask::MaskedLm), 2 * 2);
        check(graph(TrainingTask::Classes(2)), 2 * 2 + 1);
    }
}

#[test]
fn configurations_survive_being_written() {
    for name in DECODERS {
        let mut c = decoder(name);
        let again = DecoderConfig::from_json(&c.to_json("{}", false)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(again, c, "{name}");
        c.mask = Mask::BlockSparse { block: 16, local: 2, global: 1 };
        c.experts.iter_mut().for_each(|e| e.capacity = 1250);
        assert_eq!(DecoderConfig::from_json(&c.to_json("{}", false)).expect("our own"), c, "{name}");
    }
    let kind = |c: &DecoderConfig| {
        let value: Value = serde_json::from_str(&c.to_json("{}", false)).expect("JSON");
        value["model_type"].as_str().expect("a text").to_owned()
    };
    let [mut llama, mut mixtral] = ["llama", "mixtral"].map(decoder);
    assert_eq!([kind(&llama), kind(&mixtral)], ["llama", "mixtral"]);
    llama.mask = Mask::Window(16);
    mixtral.bias = Biases::all(true);
    assert_eq!([kind(&llama), kind(&mixtral)], ["mistral", "plimsoll_decoder"]);
    for (id, _) in KNOWN {
        let encoder = known(id).expect("known");
        assert_eq!(Encoder::from_json(&encoder.to_json(TrainingTask::MaskedLm, "{}")).expect(id), encoder);
    }
    for size in ["tiny", "small", "base", "large"] {
        let c = moe(size).expect("known");
        assert_eq!(DecoderConfig::from_json(&c.to_json("{}", false)).expect("our own"), c);
    }
}

/// Keys that are missing in a file have the default values of transformers.
#[test]
fn missing_keys_are_what_transformers_takes() {
    let read = |kind: &str, more: &str| {
        let text = format!(
            r#"{{"model_type": "{kind}", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 16, "intermediate_size": 96{more}}}"#
        );
        DecoderConfig::from_json(&text).unwrap_or_else(|e| panic!("{kind}: {e}"))
    };
    for (kind, kv_heads, eps, theta, mask) in [
        ("llama", 16, 1e-6, 1e4, Mask::Causal),
        ("mistral", 8, 1e-6, 1e4, Mask::Window(4096)),
        ("mixtral", 8, 1e-5, 1e6, Mask::Causal),
    ] {
        let c = read(kind, "");
        let found = (c.kv_heads, c.eps, c.positions, c.mask);
        assert_eq!(found, (kv_heads, eps, Positions::Rotary(theta), mask), "{kind}");
        let c = read(kind, r#", "sliding_window": null, "rope_parameters": {"rope_theta": 5e5}"#);
        assert_eq!((c.positions, c.mask), (Positions::Rotary(5e5), Mask::Causal), "{kind}");
    }
}

#[test]
fn decoders_that_would_compute_something_else_are_refused() {
    let check = |name: &str, from: &str, to: &str, wanted: &str| {
        let text = config(name);
        assert!(text.contains(from), "{from} is not in {text}");
        let error = DecoderConfig::from_json(&text.replace(from, to)).expect_err(to).to_string();
        assert!(error.starts_with(wanted), "{error}");
    };
    check("llama", "\"silu\"", "\"gelu\"", "`hidden_act` must be `silu`");
    check(
        "llama",
        "heads\": 2",
        "heads\": 3",
        "`num_key_value_heads` must be a divisor of num_attention_heads 4",
    );
    check(
        "mixtral",
        "per_tok\": 2",
        "per_tok\": 5",
        "`num_experts_per_tok` must be at most num_local_experts 4",
    );
    check("alibi", "\"block\": 2", "\"blocks\": 2", "`mask` must be \"causal\"");
    check("alibi", "\"alibi\"", "\"learned\"", "`positions` must be `rotary` or `alibi`");
    // A base of 0 would make every frequency infinite.
    for name in ["llama", "moe_gelu"] {
        for zero in ["0", "0.0", "1e-320", "-1", "\"1\""] {
            check(
                name,
                "\"rope_theta\": 10000.0",
                &format!("\"rope_theta\": {zero}"),
                "`rope_theta` must be a number",
            );
        }
    }
    let inner = "\"rope_parameters\": {\"rope_theta\": 0}, \"hidden_act\"";
    check("llama", "\"hidden_act\"", inner, "`rope_theta` must be a number above 0, found 0");
    let count = |key: &str, value: &str, wanted: &str| {
        let mut text: Value = serde_json::from_str(&config("moe_gelu")).expect("JSON");
        text[key] = serde_json::from_str(value).expect("JSON");
        let error = DecoderConfig::from_json(&text.to_string()).expect_err(key).to_string();
        assert_eq!(error, format!("`{key}` must be {wanted}, found {value}"));
    };
    for key in ["num_shared_experts", "num_local_experts"] {
        for value in ["1.5", "-1", "0.5", "true", "16777217"] {
            count(key, value, "a whole number between 0 and 16777216");
        }
        count(key, "1025", "at most 1024");
    }
}

#[test]
fn adapters_stand_beside_what_they_adapt() {
    let lora = |targets: &[&str]| Lora {
        rank: 4,
        alpha: 8.0,
        targets: targets.iter().map(|&t| t.to_owned()).collect(),
    };
    let graph = |targets: &[&str], task| {
        encoder("esm2").train_graph(BOUNDS, task, &Training::default(), Some(&lora(targets)))
    };
    let adapted = graph(&["query", "attention.self.value"], TrainingTask::Classes(3)).expect("a graph");
    let trained = modules(&adapted, |p| trains(Tuning::Adapters, p));
    assert_eq!(trained.len(), 2 * 2 * 2 + 2, "{trained:?}");
    assert!(trained.contains("encoder.layer.1.attention.self.query.lora_A.weight"), "{trained:?}");
    assert!(trained.contains("classifier.bias"), "{trained:?}");
    assert_eq!(modules(&adapted, |p| trains(Tuning::Head, p)).len(), 2);
    // Each adapter adds four nodes: two linear maps, a scaling and a sum.
    let plain = encoder("esm2")
        .train_graph(BOUNDS, TrainingTask::Classes(3), &Training::default(), None)
        .expect("a graph");
    assert_eq!(adapted.nodes.len(), plain.nodes.len() + 4 * 4);
    let refused = |targets: &[&str]| graph(targets, TrainingTask::MaskedLm).expect_err("refused").to_string();
    assert_eq!(
        refused(&["query", "uery"]),
        "the model has no linear layer `uery`; its linear layers are `attention.output.dense`, `attention.self.key`, \
         `attention.self.query`, `attention.self.value`, `intermediate.dense`, `output.dense`"
    );
    let none = Lora { rank: 0, ..lora(&["query"]) };
    let error = encoder("esm2").train_graph(BOUNDS, TrainingTask::MaskedLm, &Training::default(), Some(&none));
    assert!(matches!(error, Err(TrainingError::Rank)));
}

#[test]
fn groups_follow_names_and_shapes() {
    let graph = decoder("moe_gelu").train_graph(BOUNDS, &Training::default()).expect("verified");
    let group_of = |name: &str| {
        let found = graph.params.iter().find(|p| p.name == name);
        group(found.unwrap_or_else(|| panic!("no {name} in {:?}", modules(&graph, |_| true))))
    };
    for (name, wanted) in [
        ("model.embed_tokens.weight", Group::Embedding),
        ("lm_head.weight", Group::Matrix),
        ("model.layers.0.self_attn.q_proj.weight", Group::Matrix),
        ("model.layers.0.block_sparse_moe.gate.bias", Group::Vector),
        ("model.layers.1.block_sparse_moe.experts.w1.weight", Group::Matrix),
        ("model.layers.1.block_sparse_moe.experts.w2.bias", Group::Vector),
        ("model.norm.weight", Group::Vector),
        ("model.rotary_emb.inv_freq", Group::Buffer),
    ] {
        assert_eq!(group_of(name), wanted, "{name}");
    }
    let frozen = modules(&graph, |p| !trains(Tuning::Full, p));
    assert_eq!(frozen.into_iter().collect::<Vec<_>>(), ["model.rotary_emb.inv_freq"]);
}

#[test]
fn parameters_start_as_the_table_says() {
    let c = decoder("mixtral");
    let graph = c.train_graph(BOUNDS, &Training::default()).expect("verified");
    let rule = |tensor: &str| {
        let mut pieces = graph.params.iter().flat_map(|p| &p.pieces);
        c.init(pieces.find(|p| p.tensor == tensor).unwrap_or_else(|| panic!("no {tensor}")))
    };
    let small = Init::Normal(0.02 / 2.0);
    for (tensor, wanted) in [
        ("model.embed_tokens.weight", Init::Normal(0.02)),
        ("model.layers.0.input_layernorm.weight", Init::Ones),
        ("model.layers.0.self_attn.o_proj.weight", small.clone()),
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", small),
        ("model.layers.1.block_sparse_moe.experts.3.w3.weight", Init::Normal(0.02)),
        ("model.rotary_emb.inv_freq", Init::Values(vec![1.0, 0.01])),
    ] {
        assert_eq!(rule(tensor), wanted, "{tensor}");
    }
    for param in &graph.params {
        let rows: u64 = param.pieces.iter().map(|p| p.shape.iter().product::<u64>()).sum();
        let mut values = vec![f32::NAN; rows as usize];
        init_param(|p| c.init(p), 7, param, 0..rows, &mut values);
        assert!(values.iter().all(|x| x.is_finite()), "{}", param.name);
    }
}
