//! Tests of `plimsoll embed --layers`, with the layers numbered as in transformers. The reference hidden states
//! of two proteins are in `layers.safetensors` beside the golden; other values are compared with other models
//! and layers.

use crate::embeddings::{PROTEINS, READS, assert_close, embed, npy, tensor};
use crate::harness::{Folder, golden};
use plimsoll_data::weights::Weights;
use std::path::Path;

fn open(path: impl AsRef<Path>) -> Weights {
    Weights::open(path.as_ref()).expect("opened")
}

/// The layers of the tensor `id` of shape (layers, rows, width), each as one vector.
fn layers(weights: &Weights, id: &str) -> Vec<Vec<f32>> {
    let values = tensor(weights, id);
    let count = weights.tensor(id).expect("there").shape()[0] as usize;
    values.chunks_exact(values.len() / count).map(<[f32]>::to_vec).collect()
}

#[test]
fn layers_are_those_of_transformers() {
    let folder = Folder::new("layers_golden");
    embed(
        &folder,
        "esm2",
        &[&golden(PROTEINS), "-o", "t.safetensors", "--pool", "tokens", "--layers", "0,1,-1"],
    );
    let found = open(folder.path("t.safetensors"));
    assert_eq!(found.metadata()["layers"], "0,1,2");
    let states = open(golden("esm2/layers.safetensors"));
    let last = open(golden("esm2/golden.safetensors"));
    for id in ["p2", "p3"] {
        let residues = |weights: &Weights, name: &str| {
            let all = tensor(weights, name);
            all[40..all.len() - 40].to_vec()
        };
        let wanted = [
            residues(&states, &format!("{id}.hidden.0")),
            residues(&states, &format!("{id}.hidden.1")),
            residues(&last, &format!("{id}.hidden")),
        ];
        for (i, (found, wanted)) in layers(&found, id).iter().zip(&wanted).enumerate() {
            assert_close(found, wanted, &format!("{id}, layer {i}"));
        }
        assert_eq!(found.tensor(id).expect("there").shape(), [3, wanted[0].len() as u64 / 40, 40]);
    }
}

/// Asserts for the pools mean and cls and both matrix formats that the last layer equals the output without
/// `--layers`, and that layers are in the requested order.
fn check_pools(model: &str, input: &str) {
    let folder = Folder::new(&format!("layers_{model}"));
    let input = golden(input);
    for pool in ["mean", "cls"] {
        let words = |rest: &[&'static str]| [&[&input, "--force", "--pool", pool], rest].concat();
        embed(&folder, model, &words(&["-o", "last.npy"]));
        embed(&folder, model, &words(&["-o", "all.npy", "--layers", "-1,0,1"]));
        embed(&folder, model, &words(&["-o", "all.safetensors", "--layers", "2,0,1", "--tokens", "1100"]));
        embed(&folder, model, &words(&["-o", "one.npy", "--layers", "1"]));
        let last = npy(&folder, "last");
        let all = npy(&folder, "all");
        let one = npy(&folder, "one");
        let header = |file: &str| String::from_utf8_lossy(&folder.read(file)[..128]).into_owned();
        let width = last[0].1.len();
        assert!(header("all.npy").contains(&format!("({}, 3, {width})", last.len())), "{}", header("all.npy"));
        assert!(header("one.npy").contains(&format!("({}, 1, {width})", last.len())), "{}", header("one.npy"));
        for ((last, all), one) in last.iter().zip(&all).zip(&one) {
            assert_eq!((&last.0, &last.1[..]), (&all.0, &all.1[..width]), "{pool}");
            assert_eq!((&one.0, &one.1[..]), (&all.0, &all.1[2 * width..]), "{pool}");
            assert_ne!(all.1[width..2 * width], all.1[2 * width..], "{pool}");
        }
        let weights = open(folder.path("all.safetensors"));
        assert_eq!(weights.tensor("embeddings").expect("there").shape(), [last.len() as u64, 3, width as u64]);
        let values: Vec<f32> = all.into_iter().flat_map(|(_, values)| values).collect();
        assert_eq!(tensor(&weights, "embeddings"), values, "{pool}");
    }
    check_means(&folder, model, &input);
}

/// Asserts that the mean embedding of each layer is the mean of the layer's token rows.
fn check_means(folder: &Folder, model: &str, input: &str) {
    embed(folder, model, &[input, "-o", "t.safetensors", "--pool", "tokens", "--layers", "0,1"]);
    embed(folder, model, &[input, "-o", "m.npy", "--layers", "0,1"]);
    let rows = open(folder.path("t.safetensors"));
    for (id, means) in npy(folder, "m") {
        let width = means.len() / 2;
        for (rows, mean) in layers(&rows, &id).iter().zip(means.chunks_exact(width)) {
            let n = (rows.len() / width) as f64;
            let column = |j: usize| rows.iter().skip(j).step_by(width).map(|&x| f64::from(x)).sum::<f64>();
            let wanted: Vec<f32> = (0..width).map(|j| (column(j) / n) as f32).collect();
            assert_close(mean, &wanted, &id);
        }
    }
}

#[test]
fn every_pool_of_every_layer_of_proteins() {
    check_pools("esm2", PROTEINS);
}

#[test]
fn every_pool_of_every_layer_of_reads() {
    check_pools("dnabert_s", READS);
}

/// Layer norm of each row in f64: `(x - mean) / sqrt(var + eps) * gamma + beta`.
fn layer_norm(rows: &[f32], gamma: &[f32], beta: &[f32], eps: f64) -> Vec<f32> {
    let d = gamma.len();
    let norm = |row: &[f32]| -> Vec<f32> {
        let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / d as f64;
        let var = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / d as f64;
        let scale = 1.0 / (var + eps).sqrt();
        let value = |j: usize| (f64::from(row[j]) - mean) * scale * f64::from(gamma[j]) + f64::from(beta[j]);
        (0..d).map(|j| value(j) as f32).collect()
    };
    rows.chunks_exact(d).flat_map(norm).collect()
}

/// Token embeddings of a copy of `model` that has only the first block. Its output corresponds to layer 1 of
/// the whole model.
fn first_block(folder: &Folder, model: &str, input: &str) -> Weights {
    folder.model(model, "config.json", |text| {
        text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1")
    });
    let words =
        ["embed", "--precision", "f32", "--model", model, input, "-o", "one.safetensors", "--pool", "tokens"];
    folder.run(&words).assert_code(0);
    open(folder.path("one.safetensors"))
}

#[test]
fn a_layer_of_a_protein_comes_before_the_final_norm() {
    let folder = Folder::new("layers_norm");
    let input = golden(PROTEINS);
    let wanted = first_block(&folder, "esm2", &input);
    embed(&folder, "esm2", &[&input, "-o", "t.safetensors", "--pool", "tokens", "--layers", "1"]);
    let found = open(folder.path("t.safetensors"));
    let weights = open(golden("esm2"));
    let [gamma, beta] =
        ["weight", "bias"].map(|n| tensor(&weights, &format!("esm.encoder.emb_layer_norm_after.{n}")));
    for id in ["p0", "p3", "p8"] {
        let normed = layer_norm(&tensor(&found, id), &gamma, &beta, 1e-5);
        assert_close(&normed, &tensor(&wanted, id), id);
    }
}

#[test]
fn a_layer_of_a_read_is_what_its_block_gives() {
    let folder = Folder::new("layers_post");
    let input = golden(READS);
    let wanted = first_block(&folder, "dnabert_s", &input);
    embed(&folder, "dnabert_s", &[&input, "-o", "t.safetensors", "--pool", "tokens", "--layers", "1,0"]);
    let found = open(folder.path("t.safetensors"));
    let weights = open(golden("dnabert_s"));
    let answers = open(golden("dnabert_s/golden.safetensors"));
    let find = |name: &str| {
        let names = [format!("bert.embeddings.{name}"), format!("embeddings.{name}")];
        tensor(&weights, names.iter().find(|n| weights.get(n).is_some()).expect("a tensor"))
    };
    let table = find("word_embeddings.weight");
    let types = find("token_type_embeddings.weight");
    let gamma = find("LayerNorm.weight");
    let beta = find("LayerNorm.bias");
    for id in ["d0", "d2"] {
        let both = layers(&found, id);
        assert_eq!(both[0], tensor(&wanted, id), "{id}");
        // Layer 0 is the layer norm of the token's embedding plus the embedding of token type 0.
        let mut tokens = vec![0; both[1].len() / 96];
        answers.read_i64(&format!("{id}.ids"), 0..tokens.len() as u64, &mut tokens).expect("read");
        let rows = tokens.iter().flat_map(|&t| &table[t as usize * 96..][..96]);
        let rows: Vec<f32> = rows.zip(types[..96].iter().cycle()).map(|(a, b)| a + b).collect();
        assert_close(&both[1], &layer_norm(&rows, &gamma, &beta, 1e-12), id);
    }
}
