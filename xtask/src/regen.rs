//! Writes the generated files of the repository: the built-in models, the training text of the examples, and
//! the licences of dependencies. Invariant: equal sources give equal bytes.

use crate::io_error;
use plimsoll_data::weights::{StoredAs, TensorData, safetensors_bytes};
use plimsoll_graph::{Bounds, Graph};
use plimsoll_models::{Encoder, HeadConfig, Output, mlp_head};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub mod corpus;
pub mod licenses;

const BOUNDS: Bounds = Bounds { tokens: 8, sequences: 1, longest: 8, packs: 1 };

const PROTEIN: &str = r#"{
  "model_type": "esm",
  "vocab_size": 33,
  "mask_token_id": 32,
  "pad_token_id": 1,
  "hidden_act": "gelu",
  "hidden_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 384,
  "layer_norm_eps": 1e-05,
  "max_position_embeddings": 1026,
  "position_embedding_type": "rotary",
  "token_dropout": true,
  "emb_layer_norm_before": false,
  "is_folding_model": false
}
"#;

const DNA: &str = r#"{
  "model_type": "bert",
  "alibi_starting_size": 512,
  "vocab_size": 1024,
  "type_vocab_size": 2,
  "hidden_act": "gelu",
  "hidden_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 384,
  "layer_norm_eps": 1e-12
}
"#;

/// Writes the built-in models, which have random weights, to `crates/runtime/bundle`.
pub fn bundle(root: &Path) -> Result<(), String> {
    let folder = root.join("crates/runtime/bundle");
    let tokenizer = root.join("fixtures/goldens/dnabert_s/tokenizer.json");
    write(&folder.join("dnabert_s/tokenizer.json"), &fs::read(&tokenizer).map_err(|e| e.to_string())?)?;
    for (name, config) in [("dnabert_s", DNA), ("esm2", PROTEIN)] {
        let encoder = Encoder::from_json(config).map_err(|e| e.to_string())?;
        let graph = encoder.graph(BOUNDS, &[Output::Mean]).map_err(|e| e.to_string())?;
        write(&folder.join(name).join("config.json"), config.as_bytes())?;
        write(&folder.join(name).join("model.safetensors"), &weights(&graph, &[], StoredAs::F16)?)?;
    }
    let config = HeadConfig { dna: 96, protein: 96, hidden: 64, classes: 2 };
    let head = mlp_head(&config, BOUNDS).map_err(|e| e.to_string())?;
    write(&folder.join("head.safetensors"), &weights(&head, &[("trained", "false")], StoredAs::F32)?)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::create_dir_all(path.parent().unwrap_or(path)).map_err(io_error(path))?;
    fs::write(path, bytes).map_err(io_error(path))?;
    println!("{} {} bytes", path.display(), bytes.len());
    Ok(())
}

/// Random weights for every parameter of a graph. Matrices have the standard deviation 1 / sqrt(K), which keeps
/// the scale of activations; norms are the identity. Rotary frequencies are omitted, because the model computes
/// them.
fn weights(graph: &Graph, metadata: &[(&str, &str)], stored: StoredAs) -> Result<Vec<u8>, String> {
    let mut tensors: Vec<(String, Vec<u64>, Vec<f32>)> = vec![];
    for piece in graph.params.iter().flat_map(|p| &p.pieces) {
        if !piece.tensor.ends_with("inv_freq") {
            tensors.push((piece.tensor.clone(), piece.shape.clone(), values(&piece.tensor, &piece.shape)));
        }
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    let metadata: BTreeMap<String, String> =
        metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    safetensors_bytes(&data, &metadata, stored).map_err(|e| e.to_string())
}

/// Values of a tensor, which depend only on its name and shape: the seed is an FNV-style hash of the name.
fn values(name: &str, shape: &[u64]) -> Vec<f32> {
    let n: u64 = shape.iter().product();
    if shape.len() == 1 {
        let scale = name.ends_with(".weight") || name.ends_with("running_var");
        return vec![if scale { 1.0 } else { 0.0 }; n as usize];
    }
    // K, the number of inputs of a linear layer, is the second size of its matrix.
    let deviation = 1.0 / (shape[1] as f64).sqrt();
    let mut random = SplitMix64(
        name.bytes().fold(0x9E37_79B9_7F4A_7C15, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3)),
    );
    (0..n).map(|_| (random.normal() * deviation) as f32).collect()
}

/// Random number generator of Steele, Lea and Flood (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// An approximately normal number: the sum of 12 uniform numbers minus their mean has the standard
    /// deviation 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }
}
