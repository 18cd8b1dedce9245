//! Tensor types: shape, element type, layout, role and space, and the number of bytes that a tensor needs.
//! Invariant: only dimension 0 may be dynamic, so that a tensor with fewer rows is a prefix of the slice
//! reserved for it.

use crate::id::{ParamId, StateId};
use crate::limits::Count;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

/// A size in bytes, always an integer: sizes are never represented as floating-point numbers. Operations panic if the result
/// exceeds 64 bits, in every build; the sizes of a graph within the limits ([`crate::limits`]) do not reach that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Rounds up to a multiple of `align`, which may be any positive number.
    pub fn align_up(self, align: u64) -> Self {
        Self(self.0.checked_next_multiple_of(align).expect(EXACT))
    }

    /// Adds `other`; `None` if the sum exceeds 64 bits.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// Subtracts `other`; zero if `other` is larger.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The largest decimal unit of which the size is at least one, with its name.
    pub fn unit(self) -> (u64, &'static str) {
        UNITS.into_iter().find(|(unit, _)| self.0 >= *unit).unwrap_or((1, "B"))
    }

    /// Formats the size for readers, rounded to a decimal unit, with two digits at least: `3.7 GB`, `84 GB`, `270 MB`.
    pub fn rounded(self) -> String {
        self.digits(2)
    }

    /// Formats the size for readers, rounded to `digits` digits in a decimal unit; the whole part may have three in any
    /// case: with three digits `3.71 GB`, `83.6 GB`, `270 MB`.
    pub fn digits(self, digits: u32) -> String {
        if self.0 < 1000 {
            return format!("{} B", self.0);
        }
        // The smallest unit in which the size, rounded to a whole number of units, has at most three digits.
        let (unit, name) =
            UNITS.into_iter().rev().find(|(unit, _)| self.in_units(*unit, 0) < 1000).unwrap_or(UNITS[0]);
        let decimals = (1..digits)
            .rev()
            .find(|decimals| self.in_units(unit, *decimals) < 10_u128.pow(digits))
            .unwrap_or(0);
        format!("{} {name}", decimal(self.in_units(unit, decimals), decimals))
    }

    /// The size in units of `unit / 10^decimals`, rounded. In u128, so that any number of bytes can be rounded.
    fn in_units(self, unit: u64, decimals: u32) -> u128 {
        (u128::from(self.0) * 10_u128.pow(decimals) + u128::from(unit) / 2) / u128::from(unit)
    }

    /// Formats the size for readers with one decimal, rounded down, in a decimal unit: `3.6 GB`, `270.9 MB`.
    #[expect(clippy::arithmetic_side_effects, reason = "a unit of sizes is at least ten bytes")]
    pub fn tenths(self) -> String {
        match self.unit() {
            (1, name) => format!("{} {name}", self.0),
            (unit, name) => format!("{} {name}", decimal((self.0 / (unit / 10)).into(), 1)),
        }
    }
}

/// Message of the panic of an operation on sizes whose result is no size.
const EXACT: &str = "a size between 0 and 2^64 - 1 bytes";

/// Decimal units of sizes, largest first.
const UNITS: [(u64, &str); 4] =
    [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];

/// The number `n` divided by `10^decimals`, with as many decimals.
fn decimal(n: u128, decimals: u32) -> String {
    let one = 10_u128.pow(decimals);
    match decimals {
        0 => n.to_string(),
        _ => format!("{}.{:0width$}", n / one, n % one, width = decimals as usize),
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.checked_add(other.0).expect(EXACT))
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.checked_sub(other.0).expect(EXACT))
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, times: u64) -> Self {
        Self(self.0.checked_mul(times).expect(EXACT))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, |sum, bytes| sum + bytes)
    }
}

/// Formats the size with its digits in groups of three: `84 512 768 000 B`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut text = String::with_capacity(digits.len() * 4 / 3 + 2);
        for (i, c) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                text.push(' ');
            }
            text.push(c);
        }
        text.push_str(" B");
        f.pad(&text)
    }
}

/// Element type of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 32-bit integer: token ids, row indices and spans.
    I32,
    /// 8-bit floating point, e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): no infinities, largest value
    /// 448. Always quantized with [`Layout::Scaled`].
    F8,
    /// 8-bit integer, quantized values from -127 to 127. Always with [`Layout::Scaled`] or [`Layout::Packed`].
    I8,
    /// Unsigned 8-bit integer: quantized optimizer states.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub fn size(self) -> u64 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::F8 | Self::I8 | Self::U8 => 1,
        }
    }

    /// Whether the elements represent real numbers.
    pub fn is_float(self) -> bool {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 | Self::F8 | Self::I8 => true,
            Self::I32 | Self::U8 => false,
        }
    }

    /// Whether the elements are quantized values that represent numbers only together with the scale of their
    /// row.
    pub fn is_scaled(self) -> bool {
        match self {
            Self::F8 | Self::I8 => true,
            Self::F32 | Self::Bf16 | Self::F16 | Self::I32 | Self::U8 => false,
        }
    }

    /// Name of the type in text forms and data files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F8 => "f8",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }
}

/// Maximum size of one step of a plan. Dynamic dimensions of shapes are sized for these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bounds {
    /// Number of tokens of all packed sequences, special tokens included.
    pub tokens: u64,
    /// Number of packed sequences.
    pub sequences: u64,
    /// Number of tokens of the longest sequence.
    pub longest: u64,
    /// Number of packs ([`packs`](crate::packs)); 1 for inference, which has none. Written only if it is another, so that
    /// plans of inference keep their digests.
    #[serde(default = "one_pack", skip_serializing_if = "is_one_pack")]
    pub packs: u64,
}

fn one_pack() -> u64 {
    1
}

fn is_one_pack(packs: &u64) -> bool {
    *packs == 1
}

/// Actual size of one step; at most the [`Bounds`] of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Counts {
    /// Number of tokens of all packed sequences.
    pub tokens: u64,
    /// Number of packed sequences.
    pub sequences: u64,
    /// Number of packs.
    pub packs: u64,
}

impl Bounds {
    /// Counts of a step that is completely full.
    pub fn full(&self) -> Counts {
        Counts { tokens: self.tokens, sequences: self.sequences, packs: self.packs }
    }

    /// Whether a step of size `counts` is within these bounds.
    pub fn admits(&self, counts: Counts) -> bool {
        counts.tokens <= self.tokens && counts.sequences <= self.sequences && counts.packs <= self.packs
    }
}

/// One dimension of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dim {
    /// A constant size.
    Fixed(u64),
    /// This many rows per token.
    Tokens(u64),
    /// This many rows per sequence.
    Sequences(u64),
    /// This many rows per pack.
    Packs(u64),
}

impl Dim {
    /// Largest size of the dimension under `bounds`.
    pub fn max(self, bounds: &Bounds) -> u64 {
        self.at(bounds.full())
    }

    /// Size of the dimension in a step of size `counts`.
    pub fn at(self, counts: Counts) -> u64 {
        match self {
            Self::Fixed(n) => n,
            Self::Tokens(k) => k.checked_mul(counts.tokens).expect(IN_LIMITS),
            Self::Sequences(k) => k.checked_mul(counts.sequences).expect(IN_LIMITS),
            Self::Packs(k) => k.checked_mul(counts.packs).expect(IN_LIMITS),
        }
    }

    /// Size of the dimension if it is constant.
    pub fn fixed(self) -> Option<u64> {
        match self {
            Self::Fixed(n) => Some(n),
            Self::Tokens(_) | Self::Sequences(_) | Self::Packs(_) => None,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Fixed(n) => write!(f, "{n}"),
            Self::Tokens(1) => write!(f, "T"),
            Self::Tokens(k) => write!(f, "{k}T"),
            Self::Sequences(1) => write!(f, "S"),
            Self::Sequences(k) => write!(f, "{k}S"),
            Self::Packs(1) => write!(f, "P"),
            Self::Packs(k) => write!(f, "{k}P"),
        }
    }
}

/// Order of the elements of a tensor in its memory slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Row-major (C) order.
    #[default]
    RowMajor,
    /// A weight matrix (N, K), zero-padded to whole blocks of `rows` by `columns`, in the order in which a
    /// matmul kernel reads it; the block size comes from the kernel table. Packed once, when the weight is
    /// loaded. A quantized weight additionally stores one f32 scale per padded row after all blocks; a row's
    /// quantized values are multiplied by its scale.
    Packed {
        /// Rows of a block; a row of the weight is a column of the matmul's result.
        rows: u32,
        /// Columns of a block, along K.
        columns: u32,
    },
    /// A quantized matrix in row-major order: each row is zero-padded to a multiple of [`GRANULE`], and one f32
    /// scale per row follows after all rows.
    Scaled,
}

/// Alignment of the rows of [`Layout::Scaled`] in elements: 8-bit matmuls load 16 bytes at once, so every row
/// starts at a multiple of 16 bytes.
pub const GRANULE: u64 = 16;

impl Layout {
    /// Default layout of an element type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F8 | DType::I8 => Self::Scaled,
            DType::F32 | DType::Bf16 | DType::F16 | DType::I32 | DType::U8 => Self::RowMajor,
        }
    }
}

/// Purpose of a tensor, which decides when it is written and how long it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Parameter, read from the weight file once.
    Param(ParamId),
    /// Input, supplied with every step.
    Input,
    /// Result of a forward, recomputation or update node.
    Activation,
    /// Gradient: result of a backward node.
    Grad,
    /// State that persists across steps: optimizer moments, running statistics, accumulated gradients.
    State(StateId),
}

/// The memory that holds a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    // In the order of their distance from the kernels: the scheduler compares spaces to tell fetches from stores,
    // and passes take the farther of two with `max`.
    /// The arena in which kernels read and write: memory of the GPU, or host memory on a CPU.
    #[default]
    Device,
    /// Pinned host memory, which a GPU copies from and to while it computes. A CPU has no such space: its arena is
    /// host memory.
    Host,
    /// A scratch file on a local disk.
    File,
}

impl Space {
    /// All spaces, the one that kernels use first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::File];

    /// Name in text forms and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::File => "file",
        }
    }

    fn is_device(&self) -> bool {
        *self == Self::Device
    }
}

/// Message of the panic for a tensor that no verified graph has.
const IN_LIMITS: &str = "the tensors of a verified graph are within the limits";

/// Type of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Dimensions, outermost first; only the first may be dynamic.
    pub shape: Vec<Dim>,
    /// Element type.
    pub dtype: DType,
    /// Order of the elements in memory.
    pub layout: Layout,
    /// Purpose of the tensor.
    pub role: Role,
    /// The memory that holds the tensor.
    #[serde(default, skip_serializing_if = "Space::is_device")]
    pub space: Space,
}

impl TensorSpec {
    /// Creates the type of an activation in the arena in the default layout of `dtype`.
    pub fn activation(shape: impl Into<Vec<Dim>>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            layout: Layout::of(dtype),
            role: Role::Activation,
            space: Space::Device,
        }
    }

    /// Returns the same type with another role.
    pub fn with_role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// Returns the same type in another space.
    pub fn in_space(mut self, space: Space) -> Self {
        self.space = space;
        self
    }

    /// Number of elements in a step of size `counts`, including the padding of the layout.
    ///
    /// # Panics
    /// If the number exceeds 64 bits, which it does not in a verified graph.
    pub fn elements_at(&self, counts: Counts) -> u64 {
        self.count_elements(counts).get().expect(IN_LIMITS)
    }

    /// Number of bytes in a step of size `counts`, including padding and scales.
    ///
    /// # Panics
    /// If the number exceeds 64 bits, which it does not in a verified graph.
    pub fn bytes_at(&self, counts: Counts) -> Bytes {
        self.count_bytes(counts).bytes().expect(IN_LIMITS)
    }

    fn count_elements(&self, counts: Counts) -> Count {
        let rows = Count::from(self.rows(counts));
        let columns = self.count_row_elements();
        match self.layout {
            Layout::RowMajor => rows * columns,
            Layout::Packed { rows: n, columns: k } => {
                rows.next_multiple_of(u64::from(n)) * columns.next_multiple_of(u64::from(k))
            }
            Layout::Scaled => rows * columns.next_multiple_of(GRANULE),
        }
    }

    /// [`Self::bytes_at`] of a type whose size may exceed 64 bits.
    pub(crate) fn count_bytes(&self, counts: Counts) -> Count {
        let elements = self.count_elements(counts) * self.dtype.size();
        let rows = Count::from(self.rows(counts));
        match self.layout {
            // A kernel reads whole blocks, so the padded rows of the last block have scales too.
            Layout::Packed { rows: n, .. } if self.dtype.is_scaled() => {
                elements + rows.next_multiple_of(u64::from(n)) * DType::F32.size()
            }
            Layout::RowMajor | Layout::Packed { .. } => elements,
            Layout::Scaled => elements + rows * DType::F32.size(),
        }
    }

    fn count_row_elements(&self) -> Count {
        self.shape.iter().skip(1).filter_map(|d| d.fixed()).map(Count::from).product()
    }

    /// Number of bytes in the largest step: the size that a plan reserves.
    pub fn bytes(&self, bounds: &Bounds) -> Bytes {
        self.bytes_at(bounds.full())
    }

    /// Number of rows (dimension 0) in a step of size `counts`.
    pub fn rows(&self, counts: Counts) -> u64 {
        self.shape.first().map_or(1, |d| d.at(counts))
    }

    /// Number of elements of one row: the product of all dimensions after the first, which are constant.
    ///
    /// # Panics
    /// If the number exceeds 64 bits, which it does not in a verified graph.
    pub fn row_elements(&self) -> u64 {
        self.count_row_elements().get().expect(IN_LIMITS)
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype.name())?;
        for (i, d) in self.shape.iter().enumerate() {
            if i > 0 {
                write!(f, ", ")?;
            }
            write!(f, "{d}")?;
        }
        write!(f, "]")?;
        match self.layout {
            Layout::RowMajor => Ok(()),
            Layout::Packed { rows, columns } => write!(f, " packed {rows}x{columns}"),
            Layout::Scaled => f.write_str(" scaled"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_grouped() {
        for (n, text) in [(0, "0 B"), (999, "999 B"), (1000, "1 000 B"), (84_512_768_000, "84 512 768 000 B")] {
            assert_eq!(Bytes(n).to_string(), text);
        }
    }

    #[test]
    fn bytes_are_rounded_for_readers() {
        for (n, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (9_949_999, "9.9 MB"),
            (9_950_000, "10 MB"),
            (268_073_115, "268 MB"),
            (950_000_000, "950 MB"),
            (999_499_999, "999 MB"),
            (999_600_000, "1.0 GB"),
            (19_459_122_790, "19 GB"),
            (999_600_000_000, "1.0 TB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(Bytes(n).rounded(), text);
        }
        for (n, three, tenths) in [
            (999, "999 B", "999 B"),
            (1000, "1.00 kB", "1.0 kB"),
            (9_996, "10.0 kB", "9.9 kB"),
            (12_345_678, "12.3 MB", "12.3 MB"),
            (133_099_999, "133 MB", "133.0 MB"),
            (999_960_000, "1.00 GB", "999.9 MB"),
            (2_050_000_000_000, "2.05 TB", "2.0 TB"),
        ] {
            assert_eq!((Bytes(n).digits(3).as_str(), Bytes(n).tenths().as_str()), (three, tenths));
        }
        assert_eq!([0, 999, 1000, 1 << 40].map(|n| Bytes(n).unit().1), ["B", "B", "kB", "TB"]);
    }

    #[test]
    fn blocks_pad_rows() {
        let bounds = Bounds { tokens: 7, sequences: 2, longest: 4, packs: 1 };
        let mut w = TensorSpec::activation([Dim::Fixed(33), Dim::Fixed(10)], DType::F32);
        assert_eq!(w.bytes(&bounds), Bytes(33 * 10 * 4));
        w.layout = Layout::Packed { rows: 32, columns: 1 };
        assert_eq!(w.bytes(&bounds), Bytes(64 * 10 * 4));
        let x = TensorSpec::activation([Dim::Tokens(2), Dim::Fixed(3)], DType::F32);
        assert_eq!(x.bytes(&bounds), Bytes(14 * 3 * 4));
        assert_eq!(x.to_string(), "f32[2T, 3]");
    }

    #[test]
    fn blocks_pad_rows_and_columns() {
        let counts = Counts { tokens: 1, sequences: 1, packs: 1 };
        let mut w = TensorSpec::activation([Dim::Fixed(33), Dim::Fixed(10)], DType::Bf16);
        w.layout = Layout::Packed { rows: 32, columns: 32 };
        assert_eq!((w.elements_at(counts), w.bytes_at(counts)), (64 * 32, Bytes(2 * 2048)));
        assert_eq!(w.to_string(), "bf16[33, 10] packed 32x32");
    }

    #[test]
    fn codes_have_padded_rows_and_their_scales() {
        let x = TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(40)], DType::F8);
        let counts = Counts { tokens: 7, sequences: 1, packs: 1 };
        assert_eq!((x.elements_at(counts), x.bytes_at(counts)), (7 * 48, Bytes(7 * 48 + 7 * 4)));
        assert_eq!(x.to_string(), "f8[T, 40] scaled");
        let mut w = TensorSpec::activation([Dim::Fixed(33), Dim::Fixed(70)], DType::I8);
        assert_eq!(w.bytes_at(counts), Bytes(33 * 80 + 33 * 4));
        w.layout = Layout::Packed { rows: 32, columns: 64 };
        assert_eq!(w.bytes_at(counts), Bytes(64 * 128 + 64 * 4));
        assert_eq!(w.to_string(), "i8[33, 70] packed 32x64");
    }
}
