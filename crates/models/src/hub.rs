//! Checkpoints of trained encoders in the layout of the Hugging Face Hub: their config.json, the names of their
//! tensors, and tensors of the layout that no graph reads. Invariant: the transformers class loads such a
//! checkpoint without missing or unexpected tensors.

use crate::config::decimal;
use crate::names::esm2_inv_freq;
use crate::{Encoder, TrainingTask};
use plimsoll_graph::ParamPiece;
use serde_json::{Map, Value, json};

/// A tensor of the checkpoint that is not trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedTensor {
    /// Name in the file.
    pub name: String,
    /// The tensor whose values it has, by its canonical name.
    pub piece: ParamPiece,
}

/// The key and value of config.json that mark a classifier of whole sequences.
const POOLING: (&str, &str) = ("classifier_pooling", "mean");

/// Keys of a source configuration that describe its own file or task, so they are not copied.
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

/// Merges configurations: the keys of `own`, and the other keys of `source` except [`OF_THE_SOURCE`].
pub(crate) fn merge_config(source: &str, own: Value) -> Map<String, Value> {
    let source: Map<String, Value> = serde_json::from_str(source).unwrap_or_default();
    let copied = source.into_iter().filter(|(key, _)| !OF_THE_SOURCE.contains(&key.as_str()));
    let own = own.as_object().cloned().unwrap_or_default();
    // `own` comes last, so its values replace equal keys of the source.
    copied.chain(own).collect()
}

impl Encoder {
    /// The config.json of this model, trained for `task`. Other keys of `source`, the configuration of the
    /// pretrained model, are copied; so are its class names if their number is equal.
    ///
    /// A classifier over the mean is written as a token classifier of transformers. Both are one linear map,
    /// which commutes with the mean: the mean of the token classifier's logits, over the tokens that are
    /// pooled, equals the logits of this classifier.
    pub fn to_json(&self, task: TrainingTask, source: &str) -> String {
        let mut value = merge_config(source, self.keys());
        let source: Value = serde_json::from_str(source).unwrap_or_default();
        let labels = source.get("id2label").cloned();
        value.insert("architectures".to_owned(), json!([self.architecture(task)]));
        if let TrainingTask::Classes(classes) = task {
            let same = labels.filter(|l| l.as_object().is_some_and(|l| l.len() as u64 == classes));
            let names = same.unwrap_or_else(|| {
                let numbers = (0..classes).map(|c| (c.to_string(), json!(c.to_string())));
                Value::Object(numbers.collect())
            });
            let numbers_by_name = names.as_object().into_iter().flatten().filter_map(|(number, name)| {
                Some((name.as_str()?.to_owned(), json!(number.parse::<u64>().ok()?)))
            });
            value.insert(POOLING.0.to_owned(), json!(POOLING.1));
            value.insert("label2id".to_owned(), Value::Object(numbers_by_name.collect()));
            value.insert("id2label".to_owned(), names);
        }
        format!("{:#}\n", Value::Object(value))
    }

    /// Class names in the order of class numbers, from a config.json that was written for [`TrainingTask::Classes`];
    /// `None` for other models.
    pub fn classes(config: &str) -> Option<Vec<String>> {
        let value: Value = serde_json::from_str(config).ok()?;
        let names = value.get("id2label")?.as_object().filter(|_| value[POOLING.0] == POOLING.1)?;
        (0..names.len()).map(|c| names.get(&c.to_string())?.as_str().map(str::to_owned)).collect()
    }

    /// Name of the model class, in transformers or in DNABERT's remote code, whose tensors are those of `task`.
    fn architecture(&self, task: TrainingTask) -> &'static str {
        match (self, task) {
            (Self::Esm2(_), TrainingTask::MaskedLm) => "EsmForMaskedLM",
            (Self::Esm2(_), TrainingTask::Classes(_)) => "EsmForTokenClassification",
            (Self::DnabertS(_), TrainingTask::MaskedLm) => "BertForMaskedLM",
            (Self::DnabertS(_), TrainingTask::Classes(_)) => "BertForTokenClassification",
        }
    }

    /// The keys of config.json that describe the architecture.
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

    /// Name in the checkpoint of a tensor of a training graph: heads keep their name, other tensors get the
    /// prefix of the family.
    pub fn hub_name(&self, tensor: &str) -> String {
        let head = ["classifier.", "cls.", "lm_head."].iter().any(|head| tensor.starts_with(head));
        match self {
            _ if head => tensor.to_owned(),
            Self::Esm2(_) => format!("esm.{tensor}"),
            Self::DnabertS(_) => format!("bert.{tensor}"),
        }
    }

    /// Tensors that the transformers class has and the training graph does not: for ESM-2, the copies of the
    /// rotary frequencies in all layers after the first, and the contact prediction head.
    pub fn carried_tensors(&self) -> Vec<CarriedTensor> {
        let Self::Esm2(c) = self else { return vec![] };
        let mut all: Vec<CarriedTensor> = vec![];
        for i in 1..c.layers {
            // All layers have the same frequencies, of which the graph reads the first layer's alone.
            let piece = ParamPiece::whole(esm2_inv_freq(0), vec![c.hidden_size / c.heads / 2]);
            all.push(CarriedTensor { name: self.hub_name(&esm2_inv_freq(i)), piece });
        }
        for (name, shape) in [(CONTACTS[0], vec![1, c.layers * c.heads]), (CONTACTS[1], vec![1])] {
            let piece = ParamPiece::whole(name.to_owned(), shape);
            all.push(CarriedTensor { name: self.hub_name(name), piece });
        }
        all
    }
}

/// Tensors of ESM-2's contact prediction head, which no graph reads. They are copied from the source, or zero
/// without one.
pub(crate) const CONTACTS: [&str; 2] = ["contact_head.regression.weight", "contact_head.regression.bias"];
