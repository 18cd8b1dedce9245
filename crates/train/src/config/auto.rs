//! [`Auto`], a configuration value that may be left to the planner. Invariant: serialised either as the word `auto` or
//! as the value, never as null.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A configuration value; `None` if the planner chooses it (`auto`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Written<T>", into = "Written<T>", bound(serialize = "T: Serialize + Clone"))]
#[schemars(with = "Written<T>", inline)]
pub struct Auto<T>(pub Option<T>);

/// Serialised form of [`Auto`]: the word `auto` or a value.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum Written<T> {
    Auto(Word),
    Value(T),
}

/// The word `auto`.
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
