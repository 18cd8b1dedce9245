//! Limits of the sizes in a graph, and numbers that may exceed 64 bits while they are computed. Invariant: in a graph
//! within the limits, no number of bytes, elements or rows that a plan computes exceeds 64 bits, for any machine that a
//! target file may describe.

use crate::ops::{LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::{Bounds, Bytes, Counts, Dim, Op, TensorSpec};
use std::fmt;
use std::iter::{Product, Sum};
use std::ops::{Add, Mul};

/// Maximum number of tokens and of sequences of a step, and of rows per token or per sequence together: rows are
/// numbered by 32-bit integers.
pub const MAX_ROWS: u64 = i32::MAX as u64;

/// Maximum size of one dimension of a tensor.
pub const MAX_DIM: u64 = 1 << 40;

/// Maximum size of a tensor: more than any machine's memory.
pub const MAX_TENSOR: Bytes = Bytes(1 << 50);

/// Maximum size of all tensors of a graph together.
pub const MAX_GRAPH: Bytes = Bytes(1 << 53);

/// A number that is computed from others. If the result of an operation exceeds 64 bits, the count has no number, and
/// neither has any count computed from it; a number that is read is therefore exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(Option<u64>);

impl Count {
    /// The number; `None` if it, or a number that it was computed from, exceeds 64 bits.
    pub fn get(self) -> Option<u64> {
        self.0
    }

    /// The number as a size in bytes.
    pub fn bytes(self) -> Option<Bytes> {
        self.0.map(Bytes)
    }

    /// Rounds up to a multiple of `n`, which must be positive.
    pub fn next_multiple_of(self, n: u64) -> Self {
        Self(self.0.and_then(|x| x.checked_next_multiple_of(n)))
    }
}

impl From<u64> for Count {
    fn from(n: u64) -> Self {
        Self(Some(n))
    }
}

impl<T: Into<Self>> Add<T> for Count {
    type Output = Self;
    fn add(self, other: T) -> Self {
        Self(self.0.zip(other.into().0).and_then(|(a, b)| a.checked_add(b)))
    }
}

impl<T: Into<Self>> Mul<T> for Count {
    type Output = Self;
    fn mul(self, other: T) -> Self {
        Self(self.0.zip(other.into().0).and_then(|(a, b)| a.checked_mul(b)))
    }
}

impl Sum for Count {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::from(0), |sum, n| sum + n)
    }
}

impl Product for Count {
    fn product<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::from(1), |product, n| product * n)
    }
}

/// A size that exceeds a limit of graphs: no machine could hold the tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Name of the size that is too large, with its value if it can be represented.
    pub what: String,
    /// The limit, with its unit.
    pub limit: String,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} exceeds the limit of {}", self.what, self.limit)
    }
}

impl TooLarge {
    /// The size in bytes of `what` exceeds `limit`.
    pub fn bytes(what: impl Into<String>, limit: Bytes) -> Self {
        Self { what: what.into(), limit: limit.to_string() }
    }
}

impl Bounds {
    /// Checks the bounds against the limits of graphs.
    ///
    /// # Errors
    /// The number that is too large.
    pub fn check(&self) -> Result<(), TooLarge> {
        let numbers = [
            ("tokens in a step", self.tokens),
            ("sequences in a step", self.sequences),
            ("tokens in the longest sequence", self.longest),
            ("packs in a step", self.packs),
        ];
        match numbers.into_iter().find(|(_, n)| *n > MAX_ROWS) {
            None => Ok(()),
            Some((what, n)) => Err(TooLarge { what: format!("{n} {what}"), limit: MAX_ROWS.to_string() }),
        }
    }
}

impl TensorSpec {
    /// Number of bytes in the largest step if the tensor is within the limits of graphs.
    ///
    /// # Errors
    /// The tensor, named `name`, is too large.
    pub fn limited_bytes(&self, name: &dyn Fn() -> String, bounds: &Bounds) -> Result<Bytes, TooLarge> {
        for dim in &self.shape {
            let (size, max, what) = match *dim {
                Dim::Fixed(n) => (Some(n), MAX_DIM, "in a dimension"),
                Dim::Tokens(k) => (k.checked_mul(bounds.tokens), MAX_ROWS, "rows"),
                Dim::Sequences(k) => (k.checked_mul(bounds.sequences), MAX_ROWS, "rows"),
                Dim::Packs(k) => (k.checked_mul(bounds.packs), MAX_ROWS, "rows"),
            };
            if size.is_none_or(|size| size > max) {
                return Err(self.too_large(name, format!("{max} {what}")));
            }
        }
        let bytes = self.count_bytes(bounds.full()).bytes();
        let bytes = bytes.filter(|bytes| *bytes <= MAX_TENSOR);
        bytes.ok_or_else(|| self.too_large(name, MAX_TENSOR.to_string()))
    }

    fn too_large(&self, name: &dyn Fn() -> String, limit: String) -> TooLarge {
        TooLarge { what: format!("`{}` of type {self}", name()), limit }
    }
}

/// Checks the logits that the loss of `op` computes for some rows at a time: they are in the workspace of its kernel and
/// belong to no value.
pub(crate) fn check_logits(op: &Op, ins: &[&TensorSpec], counts: Counts) -> Result<(), TooLarge> {
    let (loss, x) = if let Op::LinearCrossEntropy(loss) = op {
        (loss, 0)
    } else if let Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward }) = op {
        (forward, 1)
    } else {
        return Ok(());
    };
    let LinearCrossEntropy { chunk, .. } = loss;
    let (Some(x), Some(w)) = (ins.get(x), ins.get(x + 1)) else { return Ok(()) };
    let rows = Count::from(x.rows(counts).min((*chunk).into()));
    // For each row the logits, a row of x and its statistics, of at most eight bytes each.
    let bytes = rows * (Count::from(w.rows(counts)) + x.row_elements() + 8) * 8;
    if bytes.bytes().is_some_and(|bytes| bytes <= MAX_TENSOR) {
        return Ok(());
    }
    Err(TooLarge::bytes(format!("the logits of {chunk} rows of {w} classes"), MAX_TENSOR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Accumulate, Epilogue, Linear};
    use crate::{Builder, DType, Graph, VerifyError};

    #[test]
    fn a_count_is_exact_or_has_no_number() {
        let big = Count::from(u64::MAX);
        for (count, wanted) in [
            (Count::from(3) * 4 + 5, Some(17)),
            (big + 0, Some(u64::MAX)),
            (big + 1, None),
            (big * 2, None),
            // Not zero: a factor had no number.
            ((big + 1) * Count::from(0), None),
            ((big + 1) + 1, None),
            (big.next_multiple_of(2), None),
            (Count::from(5).next_multiple_of(4), Some(8)),
            ([1, 2, 3].into_iter().map(Count::from).sum(), Some(6)),
            ([1 << 32, 1 << 32].into_iter().map(Count::from).product(), None),
        ] {
            assert_eq!(count.get(), wanted);
        }
    }

    /// Builds a graph with one linear of `k` inputs and `n` outputs.
    fn linear(tokens: u64, k: u64, n: u64) -> Result<Graph, VerifyError> {
        let mut g = Builder::new(Bounds { tokens, sequences: 1, longest: 1, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(k)], DType::F32);
        let y = g.linear(x, "layer", n, false);
        let w = g.param("layer.weight", &[n, k]);
        let keep = g.input("keep", &[Dim::Fixed(1)], DType::F32);
        let sum = g.one(Op::Accumulate(Accumulate {}), &[w, w, keep]);
        g.output("y", y);
        g.output("sum", sum);
        g.finish()
    }

    #[test]
    fn what_exceeds_the_limits_is_named_and_what_is_within_them_is_built() {
        assert!(linear(4, 8, 16).is_ok());
        assert!(linear(MAX_ROWS, 8, 16).is_ok());
        assert!(linear(1, 1 << 24, 1 << 23).is_ok());
        let powers = [31, 32, 41, 50, 53, 61, 62, 63].map(|power| 1_u64 << power);
        let huge = || powers.into_iter().chain([u64::MAX - 1, u64::MAX]);
        for n in huge() {
            for (tokens, k, columns, wanted) in
                [(n, 8, 16, "tokens"), (4, n, 16, "`x` of type"), (4, 8, n, "`layer.weight` of type")]
            {
                let built = linear(tokens, k, columns);
                if n <= MAX_DIM && tokens <= MAX_ROWS {
                    assert!(built.is_ok(), "{tokens} {k} {columns}");
                    continue;
                }
                let error = built.expect_err("too large");
                let text = error.to_string();
                assert!(error.is_too_large && text.contains(wanted) && text.contains("limit of"), "{text}");
            }
        }
        // Each dimension is within its limit, and their product is not.
        let error = linear(4, 1 << 30, 1 << 30).expect_err("too large");
        assert!(error.to_string().contains("exceeds the limit of 1 125 899 906 842 624 B"), "{error}");
    }

    /// A value that a pass adds without the builder is checked by the verifier, and so is the sum of all values.
    #[test]
    fn a_graph_is_verified_against_the_limits() {
        let mut graph = linear(4, 8, 16).expect("small");
        graph.bounds.tokens = MAX_ROWS + 1;
        assert!(graph.verify().expect_err("tokens").is_too_large);
        let mut g = Builder::new(Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 });
        for i in 0..9 {
            let name = format!("w{i}");
            let w = g.param(&name, &[1 << 24, 1 << 24]);
            g.output(&name, w);
        }
        let error = g.finish().expect_err("nine of the largest tensors");
        assert!(error.is_too_large && error.to_string().contains("all tensors"), "{error}");
    }

    #[test]
    fn logits_are_limited() {
        let counts = Counts { tokens: 1 << 20, sequences: 1, packs: 1 };
        let x = TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(1 << 20)], DType::F32);
        let w = TensorSpec::activation([Dim::Fixed(1 << 27), Dim::Fixed(1 << 20)], DType::F32);
        let op = |chunk| Op::LinearCrossEntropy(LinearCrossEntropy { bias: false, chunk, z_loss: 0.0 });
        assert!(check_logits(&op(1024), &[&x, &w], counts).is_ok());
        assert!(check_logits(&op(u32::MAX), &[&x, &w], counts).is_err());
        let other = Op::Linear(Linear::new(false, Epilogue::None));
        assert!(check_logits(&other, &[&x, &w], counts).is_ok());
    }
}
