//! Validates a `tokenizer.json` before the `tokenizers` crate parses it. Invariant: with an accepted file the crate
//! does not panic and runs no regular expression of the file, an encoding has at most three tokens per byte and ids
//! that fit an embedding table; components that encoding does not use are removed.

use std::error::Error;

use serde_json::{Map, Value, json};

/// Reason why a file is refused.
pub(super) type BpeRefusal = Box<dyn Error + Send + Sync>;

/// Exclusive upper bound of token ids, because the crate iterates up to the largest id. DNABERT-2 has 4096 tokens.
const MAX_IDS: u64 = 1 << 20;

/// Checks a `tokenizer.json` and returns it for the crate: without truncation and padding, which are settings of the
/// authors' training, without the decoder from ids to text, and with the crate's default template for pairs.
pub(super) fn checked(bytes: &[u8]) -> Result<Vec<u8>, BpeRefusal> {
    let mut file: Value = serde_json::from_slice(bytes)?;
    check(&file)?;
    for unused in ["truncation", "padding", "decoder"] {
        file[unused] = Value::Null;
    }
    let template = &mut file["post_processor"];
    if template["type"] == "TemplateProcessing" {
        let special = ["[CLS]", "[SEP]"].map(|name| (name.to_owned(), template["special_tokens"][name].take()));
        template["special_tokens"] = Value::Object(special.into_iter().collect());
        template["pair"] = json!([sequence_part("A", 0), sequence_part("B", 1)]);
    }
    Ok(serde_json::to_vec(&file)?)
}

/// A sequence in a template of the post-processor.
fn sequence_part(id: &str, number: u8) -> Value {
    json!({"Sequence": {"id": id, "type_id": number}})
}

fn check(file: &Value) -> Result<(), &'static str> {
    let model = &file["model"];
    let Some(vocab) = model["vocab"].as_object() else { return Err("it has no model with a vocabulary") };
    let added = file["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let merges = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rules = [
        (model["type"].is_null() || model["type"] == "BPE", "its model is not of the type BPE"),
        (vocab.values().all(is_id), "an id of its vocabulary is not a whole number below 2^20"),
        (
            added.iter().all(|token| is_id(&token["id"])),
            "the id of an added token is not a whole number below 2^20",
        ),
        (model["continuing_subword_prefix"].is_null(), "its pieces of words have a prefix"),
        (merges.iter().all(|merge| makes_token(merge, vocab)), "a merge does not produce a token"),
        (
            is_null_or_one_of(&file["normalizer"], &["Lowercase"]),
            "its normalizer is neither none nor Lowercase",
        ),
        (
            is_null_or_one_of(&file["pre_tokenizer"], &["Whitespace", "WhitespaceSplit"]),
            "its pre-tokenizer is neither none, Whitespace nor WhitespaceSplit",
        ),
        (puts_ends(&file["post_processor"]), "it does not put [CLS] before and [SEP] after a sequence"),
    ];
    rules.into_iter().find(|(kept, _)| !kept).map_or(Ok(()), |(_, why)| Err(why))
}

/// Whether a part of the file is null or of one of the `known` types.
fn is_null_or_one_of(part: &Value, known: &[&str]) -> bool {
    part.is_null() || part["type"].as_str().is_some_and(|kind| known.contains(&kind))
}

/// Whether a value is a token id below [`MAX_IDS`].
fn is_id(id: &Value) -> bool {
    id.as_u64().is_some_and(|id| id < MAX_IDS)
}

/// Returns whether the product of a merge, written as an array of two strings or as a string with a space between the
/// parts, is in the vocabulary. Also true for a value of any other form, which the crate reports.
pub(crate) fn makes_token(merge: &Value, vocab: &Map<String, Value>) -> bool {
    let parts = match merge {
        Value::String(text) => text.split_once(' '),
        merge => merge[0].as_str().zip(merge[1].as_str()),
    };
    parts.is_none_or(|(left, right)| vocab.contains_key(&(left.to_owned() + right)))
}

/// Returns whether the post-processor is one of the two forms of `[CLS] A [SEP]`. The ids of `[CLS]` and `[SEP]` are
/// checked later, by encoding an empty sequence.
fn puts_ends(processor: &Value) -> bool {
    let special = &processor["special_tokens"];
    match processor["type"].as_str() {
        Some("BertProcessing") => true,
        Some("TemplateProcessing") => {
            let single = &processor["single"];
            let found = [&single[0]["SpecialToken"], &single[1]["Sequence"], &single[2]["SpecialToken"]];
            single.as_array().is_some_and(|parts| parts.len() == 3)
                && found.map(|part| part["id"].as_str()) == [Some("[CLS]"), Some("A"), Some("[SEP]")]
                && has_one_id(&special["[CLS]"])
                && has_one_id(&special["[SEP]"])
        }
        Some(_) | None => false,
    }
}

/// Whether a special token stands for one id.
fn has_one_id(token: &Value) -> bool {
    token["ids"].as_array().is_some_and(|ids| ids.len() == 1)
}
