//! Low-rank adapters in the file format of peft: `adapter_config.json` and `adapter_model.safetensors`. Invariant: a
//! key that would change an adapter's result is honoured or refused by name, and a folder that holds only an adapter is
//! never opened as a model.

use crate::{ModelError, RuntimeError};
use plimsoll_data::bounded;
use plimsoll_data::printable::Name;
use plimsoll_data::weights::FOLDER_FILES;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::Path;

/// File name of an adapter's configuration.
pub const CONFIG: &str = "adapter_config.json";
/// File name of an adapter's tensors.
pub const WEIGHTS: &str = "adapter_model.safetensors";
/// Prefix that peft puts before the base model's tensor names.
pub const PREFIX: &str = "base_model.model.";

/// Largest accepted configuration, in bytes.
const LARGEST: u64 = 16 << 20;

/// Keys that select unsupported variants of LoRA, each with the values that leave plain LoRA unchanged.
const PLAIN: [(&str, &[Value]); 8] = [
    ("use_rslora", &[Value::Null, Value::Bool(false)]),
    ("use_dora", &[Value::Null, Value::Bool(false)]),
    ("fan_in_fan_out", &[Value::Null, Value::Bool(false)]),
    ("lora_bias", &[Value::Null, Value::Bool(false)]),
    ("layer_replication", &[Value::Null]),
    ("target_parameters", &[Value::Null]),
    ("megatron_config", &[Value::Null]),
    ("trainable_token_indices", &[Value::Null]),
];

/// The contents of `adapter_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Name or path of the base model.
    pub base: String,
    /// The rank: rows of A.
    pub rank: u64,
    /// Numerator of the output's scale, alpha / rank.
    pub alpha: f64,
    /// Full names of the adapted modules; suffixes, which peft also allows, could match modules without an adapter.
    pub modules: Vec<String>,
    /// Whether a classifier was trained together with the adapter.
    pub classifier: bool,
}

impl Adapter {
    /// The configuration as JSON that peft reads.
    pub fn to_json(&self) -> String {
        let value = json!({
            "peft_type": "LORA",
            "task_type": self.classifier.then_some("TOKEN_CLS"),
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "use_rslora": false,
            "use_dora": false,
            "target_modules": self.modules,
            "modules_to_save": self.classifier.then_some(["classifier"]),
        });
        format!("{value:#}\n")
    }

    /// Reads the configuration of an adapter's folder.
    pub fn open(folder: &Path) -> Result<Self, RuntimeError> {
        let path = folder.join(CONFIG);
        let text = bounded::read_text(&path, LARGEST).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ModelError::NoAdapter { path: path.clone() }.into(),
            _ => RuntimeError::io(&path)(source),
        })?;
        Self::from_json(&text).map_err(|why| ModelError::AdapterConfig { path, why }.into())
    }

    fn from_json(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {e}"))?;
        if value["peft_type"] != "LORA" {
            return Err(unexpected(&value, "peft_type", "LORA"));
        }
        for (key, plain) in PLAIN {
            if !plain.contains(&value[key]) {
                return Err(format!("`{key}` {} is not supported", printed(&value[key])));
            }
        }
        for key in ["rank_pattern", "alpha_pattern"] {
            if value[key].as_object().is_some_and(|patterns| !patterns.is_empty()) {
                let found = printed(&value[key]);
                return Err(format!("`{key}` {found} is not supported: one rank and one alpha"));
            }
        }
        if !value["bias"].is_null() && value["bias"] != "none" {
            return Err(unexpected(&value, "bias", "none"));
        }
        let rank = value["r"].as_u64().filter(|&r| r > 0);
        let alpha = value["lora_alpha"].as_f64().filter(|a| a.is_finite());
        Ok(Self {
            base: value["base_model_name_or_path"].as_str().unwrap_or_default().to_owned(),
            rank: rank.ok_or_else(|| unexpected(&value, "r", "a rank from 1 on"))?,
            alpha: alpha.ok_or_else(|| unexpected(&value, "lora_alpha", "a number"))?,
            modules: strings(&value["target_modules"]).map(str::to_owned).collect(),
            classifier: strings(&value["modules_to_save"]).any(|name| name == "classifier"),
        })
    }
}

/// A value in a message, escaped and cut.
fn printed(value: &Value) -> String {
    Name(&value.to_string()).to_string()
}

/// Message for a key with another value than the `wanted` one.
fn unexpected(config: &Value, key: &str, wanted: &str) -> String {
    format!("`{key}` must be {wanted}, found {}", printed(&config[key]))
}

/// The strings of a list; none for any other value.
fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Refuses a folder that holds an adapter but no model.
///
/// # Errors
/// [`ModelError::Adapter`] with the base model's name, or an unreadable `adapter_config.json`.
pub fn refuse(folder: &Path) -> Result<(), RuntimeError> {
    if !folder.join(CONFIG).exists() || FOLDER_FILES.iter().any(|name| folder.join(name).exists()) {
        return Ok(());
    }
    let base = Adapter::open(folder)?.base;
    Err(ModelError::Adapter { folder: folder.to_owned(), base }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for classifier in [false, true] {
            let modules = vec!["esm.encoder.layer.0.attention.self.query".to_owned()];
            let adapter = Adapter { base: "a/b".into(), rank: 4, alpha: 12.5, modules, classifier };
            assert_eq!(Adapter::from_json(&adapter.to_json()), Ok(adapter));
        }
    }

    #[test]
    fn what_would_compute_something_else_is_refused() {
        for (key, value, why) in [
            ("peft_type", json!("IA3"), "`peft_type` must be LORA, found \"IA3\""),
            ("use_dora", json!(true), "`use_dora` true is not supported"),
            ("use_rslora", json!(true), "`use_rslora` true is not supported"),
            ("bias", json!("all"), "`bias` must be none, found \"all\""),
            ("rank_pattern", json!({"query": 2}), "`rank_pattern` {\"query\":2} is not supported"),
            ("r", json!(0), "`r` must be a rank from 1 on, found 0"),
            ("lora_alpha", json!(null), "`lora_alpha` must be a number, found null"),
        ] {
            let mut file = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"});
            file[key] = value;
            let error = Adapter::from_json(&file.to_string()).expect_err(key);
            assert!(error.starts_with(why), "{error}");
        }
    }
}
