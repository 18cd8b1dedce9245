//! Configurations of published models, which `plan` uses without network access.

use crate::{
    Biases, DecoderConfig, DnabertConfig, Encoder, Esm2Config, Experts, Mlp, Norm, Positions, RopeScaling,
};
use plimsoll_graph::ops::Mask;

/// Hub id and one-line description of each known encoder.
pub const KNOWN: &[(&str, &str)] = &[
    ("facebook/esm2_t6_8M_UR50D", "ESM-2, 6 layers, 8 M parameters"),
    ("facebook/esm2_t12_35M_UR50D", "ESM-2, 12 layers, 35 M parameters"),
    ("facebook/esm2_t30_150M_UR50D", "ESM-2, 30 layers, 150 M parameters"),
    ("facebook/esm2_t33_650M_UR50D", "ESM-2, 33 layers, 650 M parameters"),
    ("facebook/esm2_t36_3B_UR50D", "ESM-2, 36 layers, 3 B parameters: VirNucPro's protein encoder"),
    ("facebook/esm2_t48_15B_UR50D", "ESM-2, 48 layers, 15 B parameters"),
    ("zhihan1996/DNABERT-S", "DNABERT-S, 12 layers, 117 M parameters: VirNucPro's nucleotide encoder"),
    ("zhihan1996/DNABERT-2-117M", "DNABERT-2, the same architecture"),
];

/// Configuration of a hub id, in which `facebook/` is optional; `None` if it is not known.
pub fn known(id: &str) -> Option<Encoder> {
    match id.strip_prefix("facebook/").unwrap_or(id) {
        "esm2_t6_8M_UR50D" => esm2(6, 320, 20),
        "esm2_t12_35M_UR50D" => esm2(12, 480, 20),
        "esm2_t30_150M_UR50D" => esm2(30, 640, 20),
        "esm2_t33_650M_UR50D" => esm2(33, 1280, 20),
        "esm2_t36_3B_UR50D" => esm2(36, 2560, 40),
        "esm2_t48_15B_UR50D" => esm2(48, 5120, 40),
        "zhihan1996/DNABERT-S" | "zhihan1996/DNABERT-2-117M" => Some(Encoder::DnabertS(DnabertConfig {
            vocab_size: 4096,
            type_vocab_size: 2,
            hidden_size: 768,
            layers: 12,
            heads: 12,
            intermediate_size: 3072,
            eps: 1e-12,
        })),
        _ => None,
    }
}

fn esm2(layers: u64, hidden_size: u64, heads: u64) -> Option<Encoder> {
    Some(Encoder::Esm2(Esm2Config::released(layers, hidden_size, heads)))
}

/// The mixture-of-experts language models `tiny`, `small`, `base` and `large`: LayerNorm, GELU experts, rotary
/// position embeddings, biases, an untied output projection, and a vocabulary of 65 536.
pub fn moe(size: &str) -> Option<DecoderConfig> {
    let (hidden_size, layers, heads, experts, top_k) = match size {
        "tiny" => (384, 8, 6, 4, 2),
        "small" => (512, 14, 8, 8, 2),
        "base" => (768, 16, 12, 16, 2),
        "large" => (1024, 24, 16, 32, 4),
        _ => return None,
    };
    Some(DecoderConfig {
        vocab_size: 65_536,
        hidden_size,
        layers,
        heads,
        kv_heads: heads,
        head_dim: 64,
        intermediate_size: 4 * hidden_size,
        norm: Norm::Layer,
        eps: 1e-5,
        positions: Positions::Rotary(10_000.0),
        mask: Mask::Causal,
        mlp: Mlp::Gelu,
        bias: Biases::all(true),
        qk_norm: false,
        scaling: RopeScaling::None,
        tied: false,
        experts: Some(Experts {
            experts,
            top_k,
            shared: 0,
            renormalise: true,
            capacity: 0,
            balance: 0.01,
            z: 0.001,
        }),
    })
}
