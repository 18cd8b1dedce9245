//! A trained encoder as the hub's files have it: what its config.json says, what its tensors are called, and which
//! tensors others want that no graph of ours reads. Invariant: transformers opens what is written here without a key
//! too few or too many.

use crate::config::decimal;
use crate::{Encoder, Task};
use graph::Piece;
use serde_json::{Map, Value, json};

/// A tensor of a file that is not trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its name in the file.
    pub name: String,
    /// Whose values it has.
    pub piece: Piece,
}

/// What says that a classifier is one of whole sequences.
const POOLING: (&str, &str) = ("classifier_pooling", "mean");

/// Keys of a source that speak of the source's own file or task.
const OF_THE_SOURCE: [&str; 9] = [
    "_name_or_path",
    "architectures",
    POOLING.0,
    "dtype",
    "id2label",
    "label2id",
    "num_labels",
    "torch_dtype",
    "transformers_version",
];

/// The keys of `own`, and of `source` those that speak of the model and are not among them.
pub(crate) fn over(source: &str, own: Value) -> Map<String, Value> {
    let source: Map<String, Value> = serde_json::from_str(source).unwrap_or_default();
    let kept = source.into_iter().filter(|(key, _)| !OF_THE_SOURCE.contains(&key.as_str()));
    let own = own.as_object().cloned().unwrap_or_default();
    kept.chain(own).collect()
}

impl Encoder {
    /// The config.json of this model, trained for `task`. What `source`, the config.json that it came from, says
    /// beside is kept, and the names of its classes, if it has as many.
    ///
    /// A classifier over the mean is written as a token classifier: both are one linear map, so the mean of a token
    /// classifier's logits over the tokens of the mean are the logits here.
    pub fn to_json(&self, task: Task, source: &str) -> String {
        let mut value = over(source, self.keys());
        let source: Value = serde_json::from_str(source).unwrap_or_default();
        let labels = source.get("id2label").cloned();
        value.insert("architectures".to_owned(), json!([self.architecture(task)]));
        if let Task::Classes(classes) = task {
            let same = labels.filter(|l| l.as_object().is_some_and(|l| l.len() as u64 == classes));
            let numbers = || (0..classes).map(|c| (c.to_string(), json!(c.to_string()))).collect();
            let names = same.unwrap_or_else(|| Value::Object(numbers()));
            let back = names.as_object().into_iter().flatten().filter_map(|(number, name)| {
                Some((name.as_str()?.to_owned(), json!(number.parse::<u64>().ok()?)))
            });
            value.insert(POOLING.0.to_owned(), json!(POOLING.1));
            value.insert("label2id".to_owned(), Value::Object(back.collect()));
            value.insert("id2label".to_owned(), names);
        }
        format!("{:#}\n", Value::Object(value))
    }

    /// The names of the classes of a config.json that was written for [`Task::Classes`], in order.
    pub fn classes(config: &str) -> Option<Vec<String>> {
        let value: Value = serde_json::from_str(config).ok()?;
        let names = value.get("id2label")?.as_object().filter(|_| value[POOLING.0] == POOLING.1)?;
        (0..names.len()).map(|c| names.get(&c.to_string())?.as_str().map(str::to_owned)).collect()
    }

    /// The class of transformers, or of the model's own code, that has the tensors of `task`.
    fn architecture(&self, task: Task) -> &'static str {
        match (self, task) {
            (Self::Esm2(_), Task::MaskedLm) => "EsmForMaskedLM",
            (Self::Esm2(_), Task::Classes(_)) => "EsmForTokenClassification",
            (Self::DnabertS(_), Task::MaskedLm) => "BertForMaskedLM",
            (Self::DnabertS(_), Task::Classes(_)) => "BertForTokenClassification",
        }
    }

    /// What it is in itself.
    fn keys(&self) -> Value {
        match self {
            Self::Esm2(c) => json!({
                "model_type": "esm",
                "vocab_size": c.vocab_size,
                "hidden_size": c.hidden_size,
                "num_hidden_layers": c.layers,
                "num_attention_heads": c.heads,
                "intermediate_size": c.intermediate_size,
                "layer_norm_eps": decimal(c.eps),
                "token_dropout": c.token_dropout,
                "mask_token_id": c.mask_token_id,
                "pad_token_id": 1,
                "hidden_act": "gelu",
                "position_embedding_type": "rotary",
                "emb_layer_norm_before": false,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            }),
            Self::DnabertS(c) => json!({
                "model_type": "bert",
                "alibi_starting_size": 512,
                "vocab_size": c.vocab_size,
                "type_vocab_size": c.type_vocab_size,
                "hidden_size": c.hidden_size,
                "num_hidden_layers": c.layers,
                "num_attention_heads": c.heads,
                "intermediate_size": c.intermediate_size,
                "layer_norm_eps": decimal(c.eps),
                "hidden_act": "gelu",
            }),
        }
    }

    /// What the hub calls a tensor of a training graph.
    pub fn hub_name(&self, tensor: &str) -> String {
        let head = ["classifier.", "cls.", "lm_head."].iter().any(|head| tensor.starts_with(head));
        match self {
            _ if head => tensor.to_owned(),
            Self::Esm2(_) => format!("esm.{tensor}"),
            Self::DnabertS(_) => format!("bert.{tensor}"),
        }
    }

    /// Tensors that transformers' class has and a training graph has not: ESM-2's frequencies of every layer but the
    /// first, which are all the same, and its head for contacts.
    pub fn kept(&self) -> Vec<Kept> {
        let Self::Esm2(c) = self else { return vec![] };
        let kept = |name: String, tensor: &str, shape: &[u64]| Kept {
            name: self.hub_name(&name),
            piece: Piece::whole(tensor.to_owned(), shape.to_vec()),
        };
        let rotary = |i: u64| format!("encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq");
        let mut all: Vec<Kept> =
            (1..c.layers).map(|i| kept(rotary(i), &rotary(0), &[c.hidden_size / c.heads / 2])).collect();
        for (name, shape) in [(CONTACTS[0], &[1, c.layers * c.heads][..]), (CONTACTS[1], &[1])] {
            all.push(kept(name.to_owned(), name, shape));
        }
        all
    }
}

/// The head for contacts, which nothing here reads: it passes through, or is zero.
pub(crate) const CONTACTS: [&str; 2] = ["contact_head.regression.weight", "contact_head.regression.bias"];
