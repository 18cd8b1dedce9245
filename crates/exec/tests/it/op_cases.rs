//! The op test cases as data: every op on shapes that are difficult for kernels (single rows, ragged columns, tails
//! of panels, sequences of one token, batches below their bounds). The same cases run on every device and are
//! compared with `plimsoll_exec::reference`.
//!
//! Invariant: a case is a pure function of its name; its tolerance is c * eps(f32) * sqrt(K), with c and K stated
//! where the case is built.

pub mod attention;
pub mod experts;
pub mod linear;
mod matmuls;
pub mod optimizer;
mod quantize;
mod rows;
mod sequences;

use plimsoll_exec::reference::{Data, Tensor, eval};
use plimsoll_graph::{Bounds, Builder, Counts, DType, Dim, Graph, Op, Role, TensorSpec, packs};
use std::ops::Range;

/// Numbers of rows around the heights of row panels.
pub const ROWS: [u64; 7] = [1, 2, 13, 31, 32, 33, 70];

/// Lengths of the sequences of a batch.
pub const BATCHES: [&[u64]; 7] = [&[1], &[2], &[50], &[1, 2, 50], &[170], &[300, 33], &[2, 170, 1, 50]];

/// A test case: one launch of one op.
#[derive(Clone, Debug)]
pub struct Case {
    /// Unique name, and the seed of the case's numbers.
    pub name: String,
    /// The op.
    pub op: Op,
    /// Maximum counts of the plan.
    pub bounds: Bounds,
    /// Counts of this launch.
    pub counts: Counts,
    /// The inputs.
    pub ins: Vec<Operand>,
    /// Permitted difference between a device and the reference.
    pub tolerance: Tolerance,
}

/// An input of a [`Case`].
#[derive(Clone, Debug)]
pub struct Operand {
    /// Its type, row-major.
    pub spec: TensorSpec,
    /// Its elements at the case's counts, in C order.
    pub data: Data,
    /// Whether it is a parameter, which a device may pack when it is loaded.
    pub weight: bool,
}

/// Absolute tolerance of every element of an output: `c * eps(f32) * sqrt(k) * max(scale, largest |wanted|)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// The factor of the op; 0 if values are copied.
    pub c: f32,
    /// Number of terms of the longest sum.
    pub k: u64,
    /// Magnitude of the terms, if they are larger than their sum.
    pub scale: f32,
}

/// A distribution of numbers: `offset + amplitude u`, u in -1..1.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Mean of the numbers.
    pub offset: f32,
    /// Largest distance from the mean.
    pub amplitude: f32,
}

/// Noise in -1..1.
pub const UNIT: Noise = Noise { offset: 0.0, amplitude: 1.0 };

/// A pack of a case.
#[derive(Clone, Copy, Debug)]
pub struct CasePack {
    /// Number of its tokens.
    pub tokens: u64,
    /// Number of its sequences.
    pub sequences: u64,
    /// Number of its targets.
    pub targets: u64,
}

/// How the tokens of a case are divided into packs.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    /// One pack.
    One,
    /// An eighth, none, a quarter without targets, and the rest with twice as many targets as tokens.
    Uneven,
    /// Packs of two tokens, more than any kernel has workers.
    Many,
}

/// Every packing.
pub const PACKINGS: [Packing; 3] = [Packing::One, Packing::Uneven, Packing::Many];

impl Packing {
    /// The packs of `tokens` tokens; each that has tokens is one sequence.
    pub fn packs(self, tokens: u64) -> Vec<CasePack> {
        let pack = |tokens: u64, targets: u64| CasePack { tokens, sequences: tokens.min(1), targets };
        match self {
            Self::One => vec![pack(tokens, tokens)],
            Self::Uneven => {
                let rest = tokens - tokens / 8 - tokens / 4;
                vec![pack(tokens / 8, tokens / 8), pack(0, 0), pack(tokens / 4, 0), pack(rest, 2 * rest)]
            }
            Self::Many => {
                let size = |first: u64| (tokens - first).min(2);
                (0..tokens).step_by(2).map(|first| pack(size(first), size(first))).collect()
            }
        }
    }

    /// Lengths of the sequences of `tokens` tokens.
    pub fn lengths(self, tokens: u64) -> Vec<u64> {
        let packs = self.packs(tokens).into_iter().filter(|pack| pack.sequences > 0);
        packs.map(|pack| pack.tokens).collect()
    }
}

/// All test cases, in a fixed order.
pub fn cases() -> Vec<Case> {
    [
        rows::cases(),
        linear::cases(),
        matmuls::cases(),
        quantize::cases(),
        attention::cases(),
        sequences::cases(),
        experts::cases(),
        optimizer::cases(),
    ]
    .concat()
}

impl Tolerance {
    /// The tolerance for sums of `k` terms of magnitude 1.
    pub fn sum(c: f32, k: u64) -> Self {
        Self { c, k, scale: 1.0 }
    }

    /// Largest error permitted in an output with the values `wanted`.
    pub fn limit(&self, wanted: &[f32]) -> f32 {
        let largest = wanted.iter().fold(self.scale, |m, w| m.max(w.abs()));
        self.c * f32::EPSILON * (self.k as f32).sqrt() * largest
    }
}

impl Case {
    /// A case without operands, for sequences of `lengths`; each bound is `slack` above the counts.
    pub fn new(name: String, op: Op, lengths: &[u64], slack: u64, tolerance: Tolerance) -> Self {
        let counts = Counts { tokens: lengths.iter().sum(), sequences: lengths.len() as u64, packs: 1 };
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let bounds = Bounds {
            tokens: counts.tokens + slack,
            sequences: counts.sequences + slack,
            longest: longest + slack,
            packs: 1,
        };
        Self { name, op, bounds, counts, ins: vec![], tolerance }
    }

    /// Adds an activation of noise.
    pub fn noise(self, shape: &[Dim], noise: Noise) -> Self {
        let data = self.numbers(shape, noise);
        self.operand(shape, Data::Float(data), false)
    }

    /// Adds a parameter of noise.
    pub fn weight(self, shape: &[u64], noise: Noise) -> Self {
        let shape: Vec<Dim> = shape.iter().copied().map(Dim::Fixed).collect();
        let data = self.numbers(&shape, noise);
        self.operand(&shape, Data::Float(data), true)
    }

    /// Adds an operand of integers.
    pub fn integers(self, shape: &[Dim], data: Vec<i32>) -> Self {
        self.operand(shape, Data::I32(data), false)
    }

    /// Adds the (start, end) spans of packed sequences of `lengths`, or of as many spans in each sequence as there are for
    /// one.
    pub fn spans(self, lengths: &[u64]) -> Self {
        let each = lengths.len() as u64 / self.counts.sequences.max(1);
        let mut end = 0;
        let pair = |&n: &u64| {
            end += n as i32;
            [end - n as i32, end]
        };
        let data = lengths.iter().flat_map(pair).collect();
        self.integers(&[Dim::Sequences(each), Dim::Fixed(2)], data)
    }

    /// Adds the packs of the case's tokens and sequences. Their numbers pass 2^32 and are 0 again from the third pack on.
    pub fn packs(mut self, packs: &[CasePack]) -> Self {
        let slack = self.bounds.sequences - self.counts.sequences;
        self.counts.packs = packs.len() as u64;
        self.bounds.packs = self.counts.packs + slack;
        let mut tokens = 0;
        let mut sequences = 0;
        let mut data = vec![];
        for (i, pack) in packs.iter().enumerate() {
            let number = (i as u32).wrapping_sub(2);
            let rows = [tokens, tokens + pack.tokens, sequences, sequences + pack.sequences, pack.targets];
            data.extend(rows.map(|word| word as i32));
            data.push(number as i32);
            tokens += pack.tokens;
            sequences += pack.sequences;
        }
        assert_eq!((tokens, sequences), (self.counts.tokens, self.counts.sequences), "{}", self.name);
        self.integers(&[Dim::Packs(1), Dim::Fixed(packs::WORDS as u64)], data)
    }

    /// The case with `each` consecutive spans of attention in a sequence.
    pub fn with_spans_of_a_sequence(mut self, each: u64) -> Self {
        let slack = self.bounds.sequences - self.counts.sequences;
        self.counts.sequences /= each;
        self.bounds.sequences = self.counts.sequences + slack;
        self
    }

    /// Adds an operand.
    pub fn operand(mut self, shape: &[Dim], data: Data, weight: bool) -> Self {
        let dtype = match data {
            Data::Float(_) => DType::F32,
            Data::I32(_) => DType::I32,
            Data::U8(_) => DType::U8,
        };
        let spec = TensorSpec::activation(shape, dtype).with_role(Role::Input);
        self.ins.push(Operand { spec, data, weight });
        self
    }

    /// The case of one of the sequences alone; the plan's bounds are the same.
    pub fn alone(&self, sequence: usize) -> Self {
        let rows = self.sequence_rows(sequence);
        let counts = Counts { tokens: rows.len() as u64, sequences: 1, packs: 1 };
        let cut = |o: &Operand| {
            let data = match (&o.data, o.spec.shape[0]) {
                (data, Dim::Tokens(_)) => self.rows_of(data, &rows),
                (_, Dim::Sequences(_)) => Data::I32(vec![0, rows.len() as i32]),
                (data, _) => data.clone(),
            };
            Operand { data, ..o.clone() }
        };
        let ins = self.ins.iter().map(cut).collect();
        Self { name: format!("{}: sequence {sequence} alone", self.name), counts, ins, ..self.clone() }
    }

    /// The rows of a sequence in the batch, from the case's spans.
    pub fn sequence_rows(&self, sequence: usize) -> Range<usize> {
        let is_spans = |o: &&Operand| matches!(o.spec.shape[0], Dim::Sequences(_));
        let Some(Data::I32(spans)) = self.ins.iter().find(is_spans).map(|o| &o.data) else {
            panic!("{}: no spans", self.name)
        };
        spans[2 * sequence] as usize..spans[2 * sequence + 1] as usize
    }

    /// Some rows of a matrix that has a row for each token.
    pub fn rows_of(&self, data: &Data, rows: &Range<usize>) -> Data {
        let Data::Float(data) = data else { panic!("{}: no floats", self.name) };
        let columns = data.len() / self.counts.tokens as usize;
        Data::Float(data[rows.start * columns..rows.end * columns].to_vec())
    }

    /// The operands as tensors of the reference kernels.
    pub fn tensors(&self) -> Vec<Tensor> {
        let tensor = |o: &Operand| Tensor { shape: self.shape(&o.spec), data: o.data.clone() };
        self.ins.iter().map(tensor).collect()
    }

    /// Types of the outputs.
    pub fn outs(&self) -> Vec<TensorSpec> {
        let specs: Vec<&TensorSpec> = self.ins.iter().map(|o| &o.spec).collect();
        let outs = self.op.rules().infer(&specs, &self.bounds);
        outs.unwrap_or_else(|rule| panic!("{}: {rule}", self.name))
    }

    /// Shapes of the outputs in this launch.
    pub fn out_shapes(&self) -> Vec<Vec<usize>> {
        self.outs().iter().map(|spec| self.shape(spec)).collect()
    }

    /// All outputs of the reference kernels.
    pub fn reference(&self) -> Vec<Tensor> {
        let tensors = self.tensors();
        let outs: Vec<_> = self.out_shapes().into_iter().map(Some).collect();
        let results = eval(&self.op, &tensors.iter().collect::<Vec<_>>(), &outs);
        let results = results.unwrap_or_else(|error| panic!("{}: {error}", self.name));
        results.into_iter().flatten().collect()
    }

    /// A graph of the op alone: input or parameter `in{i}` for operand i, output `out{i}` for output i.
    pub fn graph(&self) -> Graph {
        let mut builder = Builder::new(self.bounds);
        let mut values = Vec::new();
        for (i, operand) in self.ins.iter().enumerate() {
            let name = format!("in{i}");
            values.push(if operand.weight {
                let shape: Vec<u64> = operand.spec.shape.iter().filter_map(|d| d.fixed()).collect();
                builder.param(&name, &shape)
            } else {
                builder.input(&name, &operand.spec.shape, operand.spec.dtype)
            });
        }
        for (i, out) in builder.node(self.op, &values).into_iter().enumerate() {
            builder.output(format!("out{i}"), out);
        }
        builder.finish().unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn shape(&self, spec: &TensorSpec) -> Vec<usize> {
        spec.shape.iter().map(|d| d.at(self.counts) as usize).collect()
    }

    /// Numbers that f32 holds exactly, so that every device receives the same values.
    fn numbers(&self, shape: &[Dim], noise: Noise) -> Vec<f64> {
        let elements = shape.iter().map(|d| d.at(self.counts)).product();
        let numbers = self.random(elements).map(|bits| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0);
        numbers.map(|u| f64::from(noise.offset + noise.amplitude * u)).collect()
    }

    /// `n` random numbers for the next operand: splitmix64 (Steele, Lea and Flood 2014), seeded by the FNV-1a
    /// hash of the case's name and the operand's position.
    pub fn random(&self, n: u64) -> impl Iterator<Item = u64> + use<> {
        let seed = self
            .name
            .bytes()
            .chain([self.ins.len() as u8])
            .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        (1..=n).map(move |i| {
            let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
    }
}

#[test]
fn every_op_has_a_case() {
    let cases = cases();
    // Moves and views are no kernels; tests of streamed weights and of offload run them.
    for name in Op::NAMES.iter().filter(|name| !["join", "move", "part"].contains(name)) {
        assert!(cases.iter().any(|case| case.op.name() == *name), "{name} has no case");
    }
    let mut names: Vec<&str> = cases.iter().map(|case| &case.name[..]).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "names are seeds and must differ");
}

#[test]
fn cases_are_graphs_inside_their_bounds() {
    for case in cases() {
        assert!(case.bounds.admits(case.counts), "{}", case.name);
        for operand in &case.ins {
            assert_eq!(operand.spec.elements_at(case.counts), operand.data.len() as u64, "{}", case.name);
        }
        let graph = case.graph();
        assert_eq!((graph.nodes.len(), graph.outputs.len()), (1, case.out_shapes().len()), "{}", case.name);
    }
}

#[test]
fn the_reference_runs_every_case() {
    for case in cases() {
        for out in case.reference() {
            // Integers and quantized values must be equal, and are finite.
            let Some(values) = out.rounded() else { continue };
            assert!(values.iter().all(|x| x.is_finite()), "{}: {values:?}", case.name);
            // A tolerance in the fourth digit would test nothing.
            let largest = values.iter().fold(case.tolerance.scale, |m, x| m.max(x.abs()));
            assert!(case.tolerance.limit(&values) <= 5e-5 * largest, "{}", case.name);
        }
    }
}
