//! Errors of the reference kernels. Invariant: every variant names the operand and the offending number.

use std::fmt;

/// The reason why an op cannot run on the given tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The number of inputs is wrong.
    Inputs {
        /// Number of inputs that the op takes; if one is missing, the number up to and including it.
        wanted: usize,
        /// Number of inputs given.
        found: usize,
    },
    /// The number of outputs is wrong.
    Outputs {
        /// Number of outputs requested.
        wanted: usize,
        /// Number of outputs of the op.
        found: usize,
    },
    /// The number of elements of a tensor differs from its shape.
    Length {
        /// Position among the inputs.
        input: usize,
        /// Product of the shape (`usize::MAX` if it overflows).
        wanted: usize,
        /// Number of elements.
        found: usize,
    },
    /// A tensor has another element type than the op reads.
    DType {
        /// Name of the operand in the op's documentation.
        what: &'static str,
        /// The type that the op reads.
        wanted: &'static str,
    },
    /// A tensor has the wrong number of dimensions.
    Rank {
        /// Name of the operand in the op's documentation.
        what: &'static str,
        /// Number of dimensions that the op reads.
        wanted: usize,
        /// Shape of the tensor.
        found: Vec<usize>,
    },
    /// A tensor has the wrong shape.
    Shape {
        /// Name of the operand in the op's documentation.
        what: &'static str,
        /// Shape that matches the other operands.
        wanted: Vec<usize>,
        /// Shape of the tensor.
        found: Vec<usize>,
    },
    /// A token id or row index is out of range.
    Index {
        /// Name of the operand that contains the index.
        what: &'static str,
        /// Position of the index in the operand.
        position: usize,
        /// The index.
        index: i32,
        /// Indices must be in `0..limit`.
        limit: usize,
    },
    /// A span ends before it starts, or lies outside of the rows.
    Span {
        /// Index of the sequence.
        sequence: usize,
        /// Its first row.
        start: i32,
        /// Row after its last row.
        end: i32,
        /// Spans must be in `0..rows`.
        rows: usize,
    },
    /// A row belongs to two sequences.
    Overlap {
        /// Index of the later sequence.
        sequence: usize,
        /// The shared row.
        row: usize,
    },
    /// The rows of a pack do not follow those of the pack before it, or lie outside of the rows.
    Pack {
        /// Index of the pack.
        pack: usize,
        /// Its first row.
        start: i32,
        /// Row after its last row.
        end: i32,
        /// Row at which the pack must start.
        next: usize,
        /// Packs must be in `0..rows`.
        rows: usize,
    },
    /// The packs do not cover all rows.
    Uncovered {
        /// Row after the last row of the last pack.
        end: usize,
        /// Number of rows.
        rows: usize,
    },
    /// A pack has a negative number of targets.
    Targets {
        /// Index of the pack.
        pack: usize,
        /// The number.
        targets: i32,
    },
    /// A sequence is longer than the rotary tables.
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Number of its tokens.
        tokens: usize,
        /// Number of rows of the tables.
        longest: usize,
    },
    /// The attributes of the op contradict each other or the shapes.
    Attribute {
        /// The contradiction.
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
            Self::Pack { pack, start, end, next, rows } => {
                write!(f, "pack {pack} is rows {start}..{end}, not rows from {next} on in 0..{rows}")
            }
            Self::Uncovered { end, rows } => write!(f, "packs are rows 0..{end} of {rows}"),
            Self::Targets { pack, targets } => write!(f, "pack {pack} has {targets} targets"),
            Self::TooLong { sequence, tokens, longest } => {
                write!(f, "sequence {sequence} has {tokens} tokens, the rotary tables {longest} rows")
            }
            Self::Attribute { why } => f.write_str(why),
        }
    }
}

impl std::error::Error for ReferenceError {}
