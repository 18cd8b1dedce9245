//! A value that the planner may decide. Invariant: it is written as `auto` or as the value, never as nothing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A value, or nothing where the planner decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Written<T>", into = "Written<T>", bound(serialize = "T: Serialize + Clone"))]
#[schemars(with = "Written<T>", inline)]
pub struct Auto<T>(pub Option<T>);

/// As it stands in a file.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum Written<T> {
    Auto(Word),
    Value(T),
}

/// The word.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Word {
    Auto,
}

impl<T> From<Written<T>> for Auto<T> {
    fn from(written: Written<T>) -> Self {
        match written {
            Written::Auto(Word::Auto) => Self(None),
            Written::Value(value) => Self(Some(value)),
        }
    }
}

impl<T> From<Auto<T>> for Written<T> {
    fn from(auto: Auto<T>) -> Self {
        auto.0.map_or(Self::Auto(Word::Auto), Self::Value)
    }
}
