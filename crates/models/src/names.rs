//! Names of tensors in weight files. Invariant: graphs use one canonical name per tensor, the name of
//! transformers without its outer prefix (`esm.`, `bert.`); readers try the candidate names of a file in order.

use crate::Encoder;
use half::f16;

/// The names that the canonical `tensor` may have in a file, in the order in which they are tried.
pub fn candidates(encoder: &Encoder, tensor: &str) -> Vec<String> {
    match encoder {
        Encoder::Esm2(_) => esm2(tensor),
        Encoder::DnabertS(_) => dnabert(tensor),
    }
}

/// The names that the canonical `tensor` of a decoder may have in a file: with the prefix `model.`, as a language model is
/// saved, and without it, as `AutoModel` saves the model without its output projection.
pub fn decoder_candidates(tensor: &str) -> Vec<String> {
    let bare = tensor.strip_prefix("model.").map(str::to_owned);
    std::iter::once(tensor.to_owned()).chain(bare).collect()
}

/// Computed value of a tensor that files may omit (the rotary frequencies of ESM-2); `None` for other tensors.
pub fn derived(encoder: &Encoder, tensor: &str) -> Option<Vec<f32>> {
    match encoder {
        Encoder::Esm2(c) if tensor.ends_with("rotary_embeddings.inv_freq") => {
            Some(inv_freq(c.hidden_size / c.heads))
        }
        Encoder::Esm2(_) | Encoder::DnabertS(_) => None,
    }
}

/// Pairs of a tensor in files and a canonical tensor. If a file contains the first, its values must equal the
/// second, because the graph reads only the second.
pub fn tied_tensors(encoder: &Encoder) -> Vec<(String, String)> {
    let Encoder::Esm2(c) = encoder else { return vec![] };
    let mut tied: Vec<_> = (1..c.layers).map(|i| (esm2_inv_freq(i), esm2_inv_freq(0))).collect();
    let table = "embeddings.word_embeddings.weight";
    tied.push(("lm_head.decoder.weight".to_owned(), table.to_owned()));
    tied
}

/// Canonical name of the rotary frequencies of a layer of ESM-2.
pub(crate) fn esm2_inv_freq(layer: u64) -> String {
    format!("encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq")
}

/// Rotary frequencies `10000^(-2j/d)`, computed in f32 and rounded to binary16, because the released
/// checkpoints store them in binary16.
fn inv_freq(head_dim: u64) -> Vec<f32> {
    let mut frequencies = vec![];
    for j in 0..head_dim / 2 {
        let exponent = (2 * j) as f32 / head_dim as f32;
        frequencies.push(f16::from_f32(1.0 / 10_000f32.powf(exponent)).to_f32());
    }
    frequencies
}

/// Candidates for ESM-2: names of transformers with and without the prefix `esm.`, each with present and legacy
/// norm names, then names of fair-esm.
fn esm2(tensor: &str) -> Vec<String> {
    let mut names = vec![];
    for name in [Some(tensor.to_owned()), legacy_norm(tensor)].into_iter().flatten() {
        if !tensor.starts_with("lm_head.") {
            names.push(format!("esm.{name}"));
        }
        names.push(name);
    }
    if tensor.ends_with("rotary_embeddings.inv_freq") {
        names.push("esm.encoder.rotary_embeddings.inv_freq".to_owned());
        names.push("encoder.rotary_embeddings.inv_freq".to_owned());
    }
    if let Some(fair) = fair_esm(tensor) {
        names.extend(["", "encoder.sentence_encoder.", "encoder."].map(|prefix| format!("{prefix}{fair}")));
    }
    names
}

/// Candidates for DNABERT-S: with and without the prefix `bert.`, with present and legacy norm names.
fn dnabert(tensor: &str) -> Vec<String> {
    let mut names = vec![tensor.to_owned(), format!("bert.{tensor}")];
    if let Some(old) = legacy_norm(tensor) {
        names.push(format!("bert.{old}"));
        names.push(old);
    }
    names
}

/// Legacy name of a norm's parameter: `LayerNorm.weight` -> `LayerNorm.gamma`, `.bias` -> `.beta`; `None` for
/// other tensors.
fn legacy_norm(tensor: &str) -> Option<String> {
    let (module, leaf) = tensor.rsplit_once('.')?;
    let norm =
        module.ends_with("LayerNorm") || module.ends_with("layer_norm") || module.ends_with("norm_after");
    match leaf {
        "weight" if norm => Some(format!("{module}.gamma")),
        "bias" if norm => Some(format!("{module}.beta")),
        _ => None,
    }
}

/// Modules of a layer: (name in transformers, name in fair-esm).
const FAIR_ESM_MODULES: [(&str, &str); 9] = [
    ("attention.self.query.", "self_attn.q_proj."),
    ("attention.self.key.", "self_attn.k_proj."),
    ("attention.self.value.", "self_attn.v_proj."),
    ("attention.self.rotary_embeddings.", "self_attn.rot_emb."),
    ("attention.output.dense.", "self_attn.out_proj."),
    ("attention.LayerNorm.", "self_attn_layer_norm."),
    ("intermediate.dense.", "fc1."),
    ("output.dense.", "fc2."),
    ("LayerNorm.", "final_layer_norm."),
];

/// Prefixes in fair-esm checkpoints. The longer prefix comes first, because the shorter is its beginning.
const FAIR_ESM_PREFIXES: [&str; 2] = ["encoder.sentence_encoder.", "encoder."];

/// Converts the name of a tensor in a fair-esm checkpoint of ESM-2, with or without prefix, to its name in
/// transformers; `None` for tensors that ESM-2 does not have.
pub fn from_fair_esm(tensor: &str) -> Option<String> {
    let stripped = FAIR_ESM_PREFIXES.iter().find_map(|prefix| tensor.strip_prefix(prefix));
    let name = stripped.unwrap_or(tensor);
    match name {
        "lm_head.weight" => return Some("lm_head.decoder.weight".to_owned()),
        "lm_head.bias"
        | "lm_head.dense.weight"
        | "lm_head.dense.bias"
        | "lm_head.layer_norm.weight"
        | "lm_head.layer_norm.bias" => return Some(name.to_owned()),
        "embed_tokens.weight" => return Some("esm.embeddings.word_embeddings.weight".to_owned()),
        "emb_layer_norm_after.weight" | "emb_layer_norm_after.bias" => {
            return Some(format!("esm.encoder.{name}"));
        }
        "contact_head.regression.weight" | "contact_head.regression.bias" => {
            return Some(format!("esm.{name}"));
        }
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    layer.parse::<u32>().ok()?;
    FAIR_ESM_MODULES.iter().find_map(|(hub, fair)| {
        let leaf = rest.strip_prefix(fair)?;
        Some(format!("esm.encoder.layer.{layer}.{hub}{leaf}"))
    })
}

/// Name in fair-esm 2.0.0, without the prefixes of older checkpoints.
fn fair_esm(tensor: &str) -> Option<String> {
    // fair-esm ties `lm_head.weight` to the embedding table and has no module `decoder`.
    if tensor == "lm_head.decoder.weight" {
        return Some("lm_head.weight".to_owned());
    }
    if tensor.starts_with("lm_head.") {
        return Some(tensor.to_owned());
    }
    let plain = match tensor {
        "embeddings.word_embeddings.weight" => Some("embed_tokens.weight"),
        "encoder.emb_layer_norm_after.weight" => Some("emb_layer_norm_after.weight"),
        "encoder.emb_layer_norm_after.bias" => Some("emb_layer_norm_after.bias"),
        "lm_head.decoder.weight" => Some("lm_head.weight"),
        head if head.starts_with("lm_head.") => Some(head),
        _ => None,
    };
    if let Some(name) = plain {
        return Some(name.to_owned());
    }
    let (layer, rest) = tensor.strip_prefix("encoder.layer.")?.split_once('.')?;
    FAIR_ESM_MODULES.iter().find_map(|(hub, fair)| {
        let leaf = rest.strip_prefix(hub)?;
        Some(format!("layers.{layer}.{fair}{leaf}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::known;

    #[test]
    fn names_of_the_world() {
        let esm = known("facebook/esm2_t6_8M_UR50D").expect("known");
        let has = |tensor: &str, name: &str| candidates(&esm, tensor).iter().any(|c| c == name);
        for (tensor, name) in [
            ("encoder.layer.3.attention.self.query.weight", "esm.encoder.layer.3.attention.self.query.weight"),
            (
                "encoder.layer.3.attention.self.query.weight",
                "encoder.sentence_encoder.layers.3.self_attn.q_proj.weight",
            ),
            ("encoder.layer.3.attention.self.query.bias", "layers.3.self_attn.q_proj.bias"),
            ("encoder.layer.3.LayerNorm.weight", "esm.encoder.layer.3.LayerNorm.gamma"),
            ("encoder.layer.3.LayerNorm.weight", "encoder.layers.3.final_layer_norm.weight"),
            (
                "encoder.layer.0.attention.self.rotary_embeddings.inv_freq",
                "esm.encoder.rotary_embeddings.inv_freq",
            ),
            ("lm_head.layer_norm.bias", "lm_head.layer_norm.bias"),
            ("embeddings.word_embeddings.weight", "embed_tokens.weight"),
            ("lm_head.dense.weight", "encoder.lm_head.dense.weight"),
            ("lm_head.layer_norm.bias", "encoder.lm_head.layer_norm.bias"),
            ("lm_head.bias", "encoder.lm_head.bias"),
            ("lm_head.decoder.weight", "lm_head.weight"),
            ("lm_head.decoder.weight", "encoder.lm_head.weight"),
        ] {
            assert!(has(tensor, name), "{tensor} is not looked for as {name}");
        }
    }

    #[test]
    fn frequencies_are_rounded_to_binary16() {
        let f = inv_freq(64);
        assert_eq!(f.len(), 32);
        assert_eq!(f[0], 1.0);
        assert!(f.iter().all(|&x| f16::from_f32(x).to_f32() == x));
    }

    #[test]
    fn fair_esm_names_become_the_hubs_and_are_found_again() {
        let encoder = known("esm2_t6_8M_UR50D").expect("known");
        for (fair, hub) in [
            ("encoder.sentence_encoder.embed_tokens.weight", "esm.embeddings.word_embeddings.weight"),
            (
                "encoder.sentence_encoder.layers.3.self_attn.out_proj.bias",
                "esm.encoder.layer.3.attention.output.dense.bias",
            ),
            (
                "encoder.sentence_encoder.layers.0.self_attn.rot_emb.inv_freq",
                "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq",
            ),
            (
                "encoder.sentence_encoder.layers.5.final_layer_norm.weight",
                "esm.encoder.layer.5.LayerNorm.weight",
            ),
            ("encoder.emb_layer_norm_after.bias", "esm.encoder.emb_layer_norm_after.bias"),
            ("layers.1.fc2.weight", "esm.encoder.layer.1.output.dense.weight"),
            ("encoder.lm_head.weight", "lm_head.decoder.weight"),
            ("encoder.lm_head.dense.weight", "lm_head.dense.weight"),
            ("encoder.lm_head.layer_norm.bias", "lm_head.layer_norm.bias"),
        ] {
            assert_eq!(from_fair_esm(fair).as_deref(), Some(hub), "{fair}");
            let canonical = hub.strip_prefix("esm.").unwrap_or(hub);
            assert!(candidates(&encoder, canonical).iter().any(|name| name == fair), "{fair}");
        }
        for unknown in
            ["encoder.sentence_encoder.embed_positions.weight", "layers.x.fc1.weight", "lm_head.more"]
        {
            assert_eq!(from_fair_esm(unknown), None, "{unknown}");
        }
    }
}
