//! Keys without an effect in a configuration: those that the kind of the model does not read, or that another key disables.
//! Invariant: a key that is listed here is refused by name if its value is not the default of the kind of the model, which a
//! saved configuration states for every key.

use super::initial::at;
use super::{DataFormat, MaskKind, ModelKind, PositionChoice, TrainConfig};
use crate::feed;
use serde_json::Value;
use std::collections::BTreeSet;

/// A key without an effect, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unread {
    key: String,
    why: String,
}

/// Returns one message for each key that has no effect and a value other than the default.
pub(super) fn unread(c: &TrainConfig) -> Vec<String> {
    let usual = super::usual(c.model.kind, c.model.preset.filter(|_| c.model.kind == ModelKind::MoeLm));
    let (Ok(stated), Ok(usual)) = (serde_json::to_value(c), serde_json::to_value(usual)) else { return vec![] };
    let mut found: Vec<String> = vec![];
    let mut seen = BTreeSet::new();
    for Unread { key, why } in of_kind(c, &stated).into_iter().chain(of_keys(c)) {
        // Of several reasons the first is given.
        if !seen.insert(key.clone()) {
            continue;
        }
        let value = at(&stated, &key);
        let default = at(&usual, &key);
        // A loss that is switched off is no statement about a model that does not have it, and nothing held out is nothing.
        let is_zero = value.as_f64() == Some(0.0);
        let is_off = is_zero && (key.starts_with("loss.") || key == "data.validation_fraction");
        if value != default && !is_off {
            found.push(format!("{key} {} has no effect: {why}; remove it", super::initial::word(value)));
        }
    }
    found
}

/// Keys that the kind of the model does not read.
fn of_kind(c: &TrainConfig, stated: &Value) -> Vec<Unread> {
    let kind = c.model.kind;
    const EXPERTS: [&str; 7] = [
        "model.experts.count",
        "model.experts.top_k",
        "model.experts.capacity",
        "model.experts.renormalise",
        "model.experts.shared",
        "loss.balance",
        "loss.router_z",
    ];
    const MASKING: [&str; 3] = ["data.masking.fraction", "data.masking.mask", "data.masking.random"];
    let of_experts = without_effect(&EXPERTS, "only model.kind moe_lm has experts");
    match kind {
        ModelKind::MoeLm => without_effect(&MASKING, "a language model predicts every token"),
        ModelKind::DenseLm => {
            [of_experts, without_effect(&MASKING, "a language model predicts every token")].concat()
        }
        ModelKind::Esm2 | ModelKind::DnabertS => of_experts,
        ModelKind::Head => [
            unread_keys(
                kind,
                stated,
                SectionKeys {
                    section: "model",
                    read: &["kind", "from", "hidden", "classes", "dropout"],
                    ruled: &["preset", "tasks", "lora", "freeze_encoder"],
                },
            ),
            unread_keys(
                kind,
                stated,
                SectionKeys {
                    section: "data",
                    read: &[
                        "train",
                        "proteins",
                        "tensors",
                        "labels",
                        "format",
                        "validation_fraction",
                        "split_seed",
                        "workers",
                    ],
                    ruled: &["validation", "separator", "masking.unit", "masking.span", "crops"],
                },
            ),
            without_effect(&["batch.sequences"], "each row of a head is a sequence of its own"),
            without_effect(&["batch.micro_tokens"], "a micro-step of a head is a pack; give batch.pack_tokens"),
            without_effect(&["loss.balance", "loss.router_z"], "only model.kind moe_lm has experts"),
        ]
        .concat(),
        ModelKind::Caller => [
            unread_keys(
                kind,
                stated,
                SectionKeys {
                    section: "model",
                    read: &[
                        "kind",
                        "preset",
                        "from",
                        "hidden",
                        "layers",
                        "heads",
                        "intermediate",
                        "norm_eps",
                        "rope_theta",
                        "dropout",
                        "tasks",
                    ],
                    ruled: &["preset", "classes", "lora", "freeze_encoder"],
                },
            ),
            unread_keys(
                kind,
                stated,
                SectionKeys {
                    section: "data",
                    read: &["train", "labels", "workers", "prefetch", "masking", "crops"],
                    ruled: &["format", "proteins"],
                },
            ),
            without_effect(&["loss.balance", "loss.router_z"], "only model.kind moe_lm has experts"),
        ]
        .concat(),
    }
}

/// The keys of a section that a kind of model reads.
struct SectionKeys {
    section: &'static str,
    /// Keys that are read.
    read: &'static [&'static str],
    /// Further keys, which have rules of their own.
    ruled: &'static [&'static str],
}

/// The keys of a section of the stated configuration that a kind of model does not read.
fn unread_keys(kind: ModelKind, stated: &Value, keys_of: SectionKeys) -> Vec<Unread> {
    let SectionKeys { section, read, ruled } = keys_of;
    let mut all = vec![];
    keys(&stated[section], section, &mut all);
    all.retain(|key| {
        let rest = key.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')).unwrap_or(key);
        !read.iter().chain(ruled).any(|read| rest == *read || rest.starts_with(&format!("{read}.")))
    });
    let why = format!("model.kind {} has of the section {section} only {}", kind.name(), read.join(", "));
    all.into_iter().map(|key| Unread { key, why: why.clone() }).collect()
}

fn without_effect(keys: &[&str], why: &str) -> Vec<Unread> {
    keys.iter().map(|key| Unread { key: (*key).to_owned(), why: why.to_owned() }).collect()
}

/// Keys that another key disables.
fn of_keys(c: &TrainConfig) -> Vec<Unread> {
    let m = &c.model;
    let d = &c.data;
    let tokenized = !matches!(m.kind, ModelKind::Head | ModelKind::Caller);
    let classifies = tokenized && m.classes.is_some();
    let mut found = UnreadKeys(vec![]);
    let mask = m.attention.mask;
    found.add(mask == MaskKind::Window, &["model.attention.window"], "it is for model.attention.mask window");
    found.add(
        mask == MaskKind::BlockSparse,
        &["model.attention.block", "model.attention.local", "model.attention.global"],
        "it is for model.attention.mask block_sparse",
    );
    found.add(m.position == PositionChoice::Rotary, &["model.rope_theta"], "it is for model.position rotary");
    found.add(m.kind == ModelKind::Head, &["data.tensors"], "it is for model.kind head");
    found.add(
        c.run.evaluate_every.is_some() || m.kind == ModelKind::Caller,
        &["data.validation", "data.validation_fraction", "data.split_seed"],
        "no data is held out without run.evaluate_every",
    );
    if !tokenized {
        return found.0;
    }
    found.add(classifies, &["data.labels", "data.truncate"], "it is for a classifier; give model.classes");
    let encoder = matches!(m.kind, ModelKind::Esm2 | ModelKind::DnabertS);
    found.add(
        encoder && !classifies,
        &["data.masking.fraction", "data.masking.mask", "data.masking.random"],
        "it is for a masked language model",
    );
    found.add(
        d.validation.is_empty(),
        &["data.validation_fraction", "data.split_seed"],
        "data.validation names the validation data",
    );
    let Ok(format) = feed::format_of(d) else { return found.0 };
    found.add(format == DataFormat::Txt, &["data.document"], "it is for txt files");
    found.add(format == DataFormat::Jsonl, &["data.field"], "it is for jsonl files");
    found.add(
        format == DataFormat::Jsonl && classifies,
        &["data.label_field"],
        "it is for jsonl files of a classifier",
    );
    found.add(format == DataFormat::Bin, &["data.bin_type", "data.bin_end"], "it is for bin files");
    found.add(
        format != DataFormat::Bin,
        &["data.tokenizer", "data.end_token"],
        "a bin file has token ids, and their end in data.bin_end",
    );
    found.0
}

/// The keys without an effect that were found so far.
struct UnreadKeys(Vec<Unread>);

impl UnreadKeys {
    /// Adds keys unless they have an effect; `why` says when they would.
    fn add(&mut self, has_effect: bool, keys: &[&str], why: &str) {
        if !has_effect {
            self.0.extend(without_effect(keys, why));
        }
    }
}

/// Adds the dotted keys of all values of a section.
fn keys(section: &Value, path: &str, found: &mut Vec<String>) {
    match section.as_object().filter(|object| !object.is_empty()) {
        Some(object) => object.iter().for_each(|(key, inner)| keys(inner, &format!("{path}.{key}"), found)),
        None => found.push(path.to_owned()),
    }
}
