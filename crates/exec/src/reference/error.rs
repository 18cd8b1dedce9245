//! What the reference kernels refuse. Invariant: every variant names the operand and the offending number.

use std::fmt;

/// Why an op cannot run on these tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The op takes another number of inputs.
    Inputs {
        /// What it takes; where one is missing, the number up to that one.
        wanted: usize,
        /// What it was given.
        found: usize,
    },
    /// The op has another number of outputs.
    Outputs {
        /// What was asked for.
        wanted: usize,
        /// What it has.
        found: usize,
    },
    /// A tensor has more or fewer elements than its shape says.
    Length {
        /// Position among the inputs.
        input: usize,
        /// The product of its shape (the largest number where that overflows).
        wanted: usize,
        /// Its elements.
        found: usize,
    },
    /// A tensor holds other elements.
    DType {
        /// Its name in the op's documentation.
        what: &'static str,
        /// The type that the op reads.
        wanted: &'static str,
    },
    /// A tensor has another number of dimensions.
    Rank {
        /// Its name in the op's documentation.
        what: &'static str,
        /// Number of dimensions that the op reads.
        wanted: usize,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A tensor has another shape.
    Shape {
        /// Its name in the op's documentation.
        what: &'static str,
        /// The shape that fits the others.
        wanted: Vec<usize>,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A token id or a row index points outside.
    Index {
        /// The name of the operand that holds it.
        what: &'static str,
        /// Its position there.
        position: usize,
        /// The index.
        index: i32,
        /// Indices must be in `0..limit`.
        limit: usize,
    },
    /// A span ends before it starts, or lies outside the rows.
    Span {
        /// The sequence.
        sequence: usize,
        /// Its first row.
        start: i32,
        /// The row after its last.
        end: i32,
        /// Spans must be in `0..rows`.
        rows: usize,
    },
    /// Two sequences claim one row.
    Overlap {
        /// The later sequence.
        sequence: usize,
        /// The row.
        row: usize,
    },
    /// A sequence is longer than the rotary tables.
    TooLong {
        /// The sequence.
        sequence: usize,
        /// Its tokens.
        tokens: usize,
        /// Rows of the tables.
        longest: usize,
    },
    /// The attributes of the op contradict themselves or the shapes.
    Attribute {
        /// What cannot be.
        why: &'static str,
    },
}

impl fmt::Display for ReferenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inputs { wanted, found } => write!(f, "takes {wanted} inputs, not {found}"),
            Self::Outputs { wanted, found } => write!(f, "has {found} outputs, not {wanted}"),
            Self::Length { input, wanted, found } => {
                write!(f, "input {input} has {found} elements, its shape says {wanted}")
            }
            Self::DType { what, wanted } => write!(f, "{what} must be {wanted}"),
            Self::Rank { what, wanted, found } => {
                write!(f, "{what} must have {wanted} dimensions, not {found:?}")
            }
            Self::Shape { what, wanted, found } => write!(f, "{what} must be {wanted:?}, not {found:?}"),
            Self::Index { what, position, index, limit } => {
                write!(f, "{what}[{position}] is {index}, outside 0..{limit}")
            }
            Self::Span { sequence, start, end, rows } => {
                write!(f, "sequence {sequence} is rows {start}..{end}, which are not in 0..{rows}")
            }
            Self::Overlap { sequence, row } => {
                write!(f, "sequence {sequence} claims row {row}, which belongs to another")
            }
            Self::TooLong { sequence, tokens, longest } => {
                write!(f, "sequence {sequence} has {tokens} tokens, the rotary tables {longest} rows")
            }
            Self::Attribute { why } => f.write_str(why),
        }
    }
}

impl std::error::Error for ReferenceError {}
