//! Test cases of quantized rows. Invariant: rows are of order 1, so that one tolerance fits all.

use super::{Case, Noise, Tolerance, UNIT};
use plimsoll_graph::ops::*;
use plimsoll_graph::{DType, Dim, Op};

/// (rows, columns): with and without padding, for every width of memory access, and the widest row of the models.
const SIZES: [(u64, u64); 9] =
    [(1, 8), (3, 16), (70, 40), (33, 33), (13, 160), (2, 320), (31, 1280), (9, 2560), (2, 10240)];

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ((rows, columns), to) in SIZES.into_iter().flat_map(|size| [(size, DType::F8), (size, DType::I8)]) {
        let norm = Quantized::LayerNorm(LayerNorm { eps: 1e-5 });
        let case = |of: Quantized, word: &str, wide: u64| {
            let name = format!("quantize {word} {rows} x {columns} to {}", to.name());
            let op = Op::Quantize(Quantize { of, to });
            let tolerance = Tolerance::sum(2.0, columns);
            let case = Case::new(name, op, &[rows], rows % 2 * 3, tolerance);
            case.noise(&[Dim::Tokens(1), Dim::Fixed(wide * columns)], UNIT)
        };
        cases.push(case(Quantized::Rows, "rows", 1));
        let scales = Noise { offset: 1.0, amplitude: 0.5 };
        cases.push(case(norm, "layer_norm", 1).weight(&[columns], scales).weight(&[columns], UNIT));
        cases.push(case(Quantized::Gelu(Gelu {}), "gelu", 1));
        for activation in [Activation::Gelu, Activation::Silu] {
            cases.push(case(Quantized::Glu(Glu { activation }), &format!("glu {activation:?}"), 2));
        }
    }
    cases
}
