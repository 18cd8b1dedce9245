//! Number formats as values of flags. Invariant: the names are those of [`Precision`]; only the help texts are stated here.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use plimsoll_runtime::Precision;

/// The precision of `--precision` in inference; `None` for `auto`, the default of the device. The alias keeps clap from
/// taking the field for an optional flag.
pub type PrecisionFlag = Option<Precision>;

/// Parses a number format of inference, or `auto`.
pub fn precision_flag() -> impl TypedValueParser<Value = PrecisionFlag> {
    let auto = PossibleValue::new("auto").help("The default of the device");
    let values = [auto].into_iter().chain([
        value(Precision::Bf16, "16 bits: 8 exponent bits and 8 bits of precision; sums, norms and means in f32"),
        value(
            Precision::Fp16,
            "16 bits: 5 exponent bits and 11 bits of precision; sums, norms and means in f32. GPU only",
        ),
        value(Precision::F32, "32 bits: 8 exponent bits and 24 bits of precision"),
        value(
            Precision::Tf32,
            "f32, but linear layers round their operands to 11 bits of precision; sums in f32. GPU only",
        ),
        value(
            Precision::Fp8,
            "Encoder matmuls in 8-bit floating point (e4m3, 4 bits of precision) with scales; the rest as bf16. GPUs of \
             compute capability 8.9 or later",
        ),
        value(Precision::Int8, "Encoder matmuls in 8-bit integers with scales; the rest as bf16. CPU only"),
    ]);
    PossibleValuesParser::new(values).map(|name| Precision::named(&name))
}

/// Parses a number format of training.
pub fn trained() -> impl TypedValueParser<Value = Precision> {
    let values = [
        value(Precision::Bf16, "16 bits: 8 exponent bits and 8 bits of precision"),
        value(Precision::Fp16, "16 bits: 5 exponent bits and 11 bits of precision"),
        value(Precision::F32, "32 bits: 8 exponent bits and 24 bits of precision"),
        value(Precision::Tf32, "f32, but linear layers round their operands to 11 bits of precision. GPU only"),
    ];
    // The parser accepts the names of precisions alone, so there is always one.
    PossibleValuesParser::new(values).map(|name| Precision::named(&name).unwrap_or_default())
}

fn value(precision: Precision, help: &'static str) -> PossibleValue {
    PossibleValue::new(precision.name()).help(help)
}
