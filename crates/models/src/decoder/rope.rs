//! Rotary position embedding: its frequencies and their scaling for longer contexts, read from config.json. Invariant: a
//! form of scaling whose frequencies are not a function of the configuration alone is refused by name.

use crate::config::{ConfigError, ConfigKeys, decimal};
use serde_json::{Map, Value, json};
use std::f32::consts::PI;

/// Scaling of rotary frequencies for contexts that are longer than those of pretraining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// The frequencies `theta^(-2j/d)`.
    None,
    /// All frequencies divided by a factor: linear interpolation of positions (Chen et al. 2023).
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Low frequencies divided by a factor, high ones unchanged, and a linear transition between them (Llama 3.1).
    Llama3 {
        /// The divisor of low frequencies.
        factor: f32,
        /// Rotations within the original context up to which a frequency is low.
        low: f32,
        /// Rotations within the original context from which on a frequency is high.
        high: f32,
        /// Longest context of pretraining.
        original: u64,
    },
    /// NTK-by-parts interpolation with a temperature of the attention (YaRN: Peng et al. 2023).
    Yarn {
        /// The divisor of low frequencies.
        factor: f32,
        /// Factor of cosines and sines.
        attention: f32,
        /// Rotations within the original context from which on a frequency is unchanged.
        fast: f32,
        /// Rotations within the original context up to which a frequency is divided.
        slow: f32,
        /// Longest context of pretraining.
        original: u64,
        /// Whether the ends of the transition are rounded to whole dimensions.
        truncate: bool,
    },
}

/// Rotary position embedding of a configuration.
pub(super) struct RopeConfig {
    pub(super) theta: f32,
    pub(super) scaling: RopeScaling,
}

/// Default of `rope_theta` and of the longest context, which differ between architectures.
#[derive(Clone, Copy)]
pub(super) struct RopeDefaults {
    pub(super) theta: f32,
    pub(super) longest: u64,
}

impl RopeScaling {
    /// Frequencies in f32 of heads of `head_dim` columns, computed in the order of operations of transformers.
    pub(super) fn frequencies(self, theta: f32, head_dim: u64) -> Vec<f32> {
        let inverse = |j: u64| theta.powf((2 * j) as f32 / head_dim as f32);
        let unscaled = (0..head_dim / 2).map(|j| 1.0 / inverse(j));
        match self {
            Self::None => unscaled.collect(),
            Self::Linear { factor } => unscaled.map(|f| f / factor).collect(),
            Self::Llama3 { factor, low, high, original } => {
                let context = original as f32;
                let mut frequencies = vec![];
                for f in unscaled {
                    let wavelength = 2.0 * PI / f;
                    if wavelength < context / high {
                        frequencies.push(f);
                    } else if wavelength > context / low {
                        frequencies.push(f / factor);
                    } else {
                        let smooth = (context / wavelength - low) / (high - low);
                        frequencies.push((1.0 - smooth) * f / factor + smooth * f);
                    }
                }
                frequencies
            }
            Self::Yarn { factor, fast, slow, original, truncate, .. } => {
                let [first, last] = transition(theta, head_dim, [fast, slow], original, truncate);
                // Equal ends would divide by zero.
                let width = if first == last { 0.001 } else { last - first };
                let mut frequencies = vec![];
                for j in 0..head_dim / 2 {
                    let ramp = ((j as f32 - first as f32) / width as f32).clamp(0.0, 1.0);
                    let unscaled_share = 1.0 - ramp;
                    // `1 - (1 - ramp)` is not `ramp` in f32; the reference computes the first.
                    frequencies.push(
                        1.0 / (factor * inverse(j)) * (1.0 - unscaled_share)
                            + 1.0 / inverse(j) * unscaled_share,
                    );
                }
                frequencies
            }
        }
    }

    /// Factor of the attention's scores: that of cosines and sines, once for queries and once for keys.
    pub(super) fn score_factor(self) -> f32 {
        match self {
            Self::Yarn { attention, .. } => attention * attention,
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } => 1.0,
        }
    }

    /// The object `rope_scaling` of config.json; `None` without scaling.
    pub(super) fn to_json(self) -> Option<Value> {
        match self {
            Self::None => None,
            Self::Linear { factor } => Some(json!({"rope_type": "linear", "factor": decimal(factor)})),
            Self::Llama3 { factor, low, high, original } => Some(json!({
                "rope_type": "llama3",
                "factor": decimal(factor),
                "low_freq_factor": decimal(low),
                "high_freq_factor": decimal(high),
                "original_max_position_embeddings": original,
            })),
            Self::Yarn { factor, attention, fast, slow, original, truncate } => Some(json!({
                "rope_type": "yarn",
                "factor": decimal(factor),
                "attention_factor": decimal(attention),
                "beta_fast": decimal(fast),
                "beta_slow": decimal(slow),
                "original_max_position_embeddings": original,
                "truncate": truncate,
            })),
        }
    }
}

/// The dimensions at which YaRN's transition begins and ends: they rotate `rotations` times within the original
/// context. In f64, as in the reference, because they are rounded.
fn transition(theta: f32, head_dim: u64, rotations: [f32; 2], original: u64, truncate: bool) -> [f64; 2] {
    let d = head_dim as f64;
    let ends = rotations.map(|rotations| {
        let turn = f64::from(rotations) * 2.0 * std::f64::consts::PI;
        d * (original as f64 / turn).ln() / (2.0 * f64::from(theta).ln())
    });
    let [first, last] = if truncate { [ends[0].floor(), ends[1].ceil()] } else { ends };
    [first.max(0.0), last.min(d - 1.0)]
}

/// Reads the rotary embedding of an architecture of transformers: `rope_parameters` (version 5), or `rope_theta` and
/// `rope_scaling` (version 4).
pub(super) fn read(keys: &ConfigKeys<'_>, defaults: RopeDefaults) -> Result<RopeConfig, ConfigError> {
    check_whole_heads(keys)?;
    let theta = keys.above_zero("rope_theta", defaults.theta)?;
    let longest = keys.or("max_position_embeddings", defaults.longest)?;
    let parts = [object(keys, "rope_parameters")?, object(keys, "rope_scaling")?];
    let inner = match parts {
        [None, None] => return Ok(RopeConfig { theta, scaling: RopeScaling::None }),
        [Some(one), None] | [None, Some(one)] => ConfigKeys(one),
        [Some(new), Some(old)] if new == old => ConfigKeys(new),
        [Some(_), Some(_)] => return Err(keys.bad("rope_scaling", "left out beside `rope_parameters`")),
    };
    check_whole_heads(&inner)?;
    let theta = inner.above_zero("rope_theta", theta)?;
    Ok(RopeConfig { theta, scaling: scaling(&inner, longest)? })
}

/// Refuses heads of which only a part of the columns is rotated.
fn check_whole_heads(keys: &ConfigKeys<'_>) -> Result<(), ConfigError> {
    if keys.number("partial_rotary_factor", 1.0)? == 1.0 {
        return Ok(());
    }
    Err(keys.bad("partial_rotary_factor", "1 or left out"))
}

/// The object at `key`; `None` if the key is missing or null.
fn object<'a>(keys: &ConfigKeys<'a>, key: &'static str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
    match keys.0.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(inner)) => Ok(Some(inner)),
        Some(_) => Err(keys.bad(key, "an object or null")),
    }
}

/// Reads the object that describes the scaling; `longest` is the longest context of the model.
pub(super) fn scaling(inner: &ConfigKeys<'_>, longest: u64) -> Result<RopeScaling, ConfigError> {
    // Older files call the key `type`.
    let key = if inner.has("rope_type") { "rope_type" } else { "type" };
    let kind = match inner.0.get(key) {
        None | Some(Value::Null) if !inner.has("factor") => "default",
        None | Some(Value::Null) => return Err(inner.bad("rope_type", FORMS)),
        Some(kind) => kind.as_str().unwrap_or_default(),
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: factor(inner)? }),
        "llama3" => {
            let low = required(inner, "low_freq_factor")?;
            let high = required(inner, "high_freq_factor")?;
            if high <= low {
                return Err(inner.bad("high_freq_factor", format!("above low_freq_factor {low}")));
            }
            let factor = factor(inner)?;
            let original = inner.or("original_max_position_embeddings", longest)?;
            Ok(RopeScaling::Llama3 { factor, low, high, original })
        }
        "yarn" => {
            let factor = factor(inner)?;
            let fast = inner.above_zero("beta_fast", 32.0)?;
            let slow = inner.above_zero("beta_slow", 1.0)?;
            if fast <= slow {
                return Err(inner.bad("beta_fast", format!("above beta_slow {slow}")));
            }
            let attention = if inner.has("attention_factor") {
                inner.above_zero("attention_factor", 1.0)?
            } else {
                temperature(inner, factor)?
            };
            // Scores have its square as a factor.
            if !(attention.is_normal() && attention < LARGEST_ATTENTION_FACTOR) {
                return Err(inner.bad("attention_factor", "a number above 0 and below 10000, or left out"));
            }
            Ok(RopeScaling::Yarn {
                factor,
                attention,
                fast,
                slow,
                original: inner.or("original_max_position_embeddings", longest)?,
                truncate: inner.flag("truncate", true)?,
            })
        }
        _ => Err(inner.bad(key, FORMS)),
    }
}

/// The forms of scaling that are supported, and why others are not.
const FORMS: &str = "`default`, `linear`, `llama3` or `yarn` (in `rope_scaling` or `rope_parameters`; the frequencies of \
                     `dynamic` and `longrope` depend on the length of a sequence)";

/// Exclusive upper bound of YaRN's factor of cosines and sines; published models have less than 2.
const LARGEST_ATTENTION_FACTOR: f32 = 1e4;

/// The required factor of the scaling, at least 1.
fn factor(inner: &ConfigKeys<'_>) -> Result<f32, ConfigError> {
    let factor = inner.number("factor", 0.0)?;
    if factor >= 1.0 { Ok(factor) } else { Err(inner.bad("factor", "a number from 1 on")) }
}

/// A required number above 0.
fn required(inner: &ConfigKeys<'_>, key: &'static str) -> Result<f32, ConfigError> {
    if !inner.has(key) {
        return Err(inner.bad(key, "a number above 0"));
    }
    inner.above_zero(key, 1.0)
}

/// YaRN's default factor of cosines and sines.
fn temperature(inner: &ConfigKeys<'_>, factor: f32) -> Result<f32, ConfigError> {
    let scale = f64::from(inner.number("mscale", 0.0)?);
    let scale_all_dim = f64::from(inner.number("mscale_all_dim", 0.0)?);
    let temperature = if scale != 0.0 && scale_all_dim != 0.0 {
        yarn_mscale(factor, scale) / yarn_mscale(factor, scale_all_dim)
    } else {
        yarn_mscale(factor, 1.0)
    };
    Ok(temperature as f32)
}

/// The function `get_mscale` of the reference.
fn yarn_mscale(factor: f32, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * f64::from(factor).ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of transformers 5 for heads of 16 columns and a base of 10 000.
    #[test]
    fn frequencies_are_those_of_the_reference() {
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64 };
        let found = llama3.frequencies(10_000.0, 16);
        assert_eq!(found[0], 1.0);
        let wavelength = 2.0 * PI / 10_000f32.powf(-4.0 / 16.0);
        assert!(wavelength > 16.0 && wavelength < 64.0, "{wavelength}");
        let smooth = (64.0 / wavelength - 1.0) / 3.0;
        let wanted = 10_000f32.powf(-4.0 / 16.0) * ((1.0 - smooth) / 8.0 + smooth);
        assert!((found[2] - wanted).abs() < 1e-7, "{found:?}");
        assert_eq!(found[7], 1.0 / 10_000f32.powf(14.0 / 16.0) / 8.0);
        assert_eq!(RopeScaling::Linear { factor: 4.0 }.frequencies(10_000.0, 4), [0.25, 0.0025]);
    }

    #[test]
    fn what_is_written_is_read() {
        for scaling in [
            RopeScaling::Linear { factor: 2.5 },
            RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 },
            RopeScaling::Yarn {
                factor: 4.0,
                attention: 1.138_629_4,
                fast: 32.0,
                slow: 1.0,
                original: 32_768,
                truncate: true,
            },
        ] {
            let value = scaling.to_json().expect("an object");
            let read = super::scaling(&ConfigKeys(value.as_object().expect("an object")), 1).expect("read");
            assert_eq!(read, scaling);
        }
    }
}
