//! Test cases of ops on sequences and indices: embedding, rotary tables, pooling, row selection. Invariant: indices
//! are in range; the first and the last index occur.

use super::{BATCHES, Case, Tolerance, UNIT};
use plimsoll_exec::reference::Data;
use plimsoll_graph::ops::*;
use plimsoll_graph::{DType, Dim, Op};

const COLUMNS: [u64; 4] = [8, 24, 33, 320];

/// Size of the vocabulary; the last token is `<mask>`.
const VOCABULARY: u64 = 33;

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, lengths) in BATCHES.into_iter().enumerate() {
        for (j, masked, row, dropout) in [
            (0, false, false, false),
            (1, false, true, false),
            (2, false, false, true),
            (3, true, false, true),
            (4, true, true, true),
        ] {
            cases.push(embed(lengths, COLUMNS[(i + j) % 4], masked, row, dropout));
            cases.push(embed_grad(lengths, COLUMNS[(i + j + 1) % 4], masked, row, dropout));
        }
        for (j, skips) in [(0, 0), (1, 1), (0, 1), (3, 60)].into_iter().enumerate() {
            cases.push(segment_mean(lengths, COLUMNS[(i + j) % 4], skips));
            cases.push(segment_mean_grad(lengths, COLUMNS[(i + j) % 4], skips));
        }
        cases.extend(select_rows(lengths, COLUMNS[i % 4]));
        cases.push(select_rows_grad(lengths, COLUMNS[i % 4]));
    }
    for half in [1, 4, 8, 12, 16, 32, 64] {
        for longest in [1, 2, 170, 1026] {
            cases.push(rotary_table(half, longest));
        }
    }
    cases
}

/// Tolerance: c = 2 for the added row and the scale of token dropout; k = 1.
fn embed(lengths: &[u64], columns: u64, masked: bool, row: bool, dropout: bool) -> Case {
    let mask_id = VOCABULARY as i32 - 1;
    let token_dropout = dropout.then_some(TokenDropout { mask_id, keep: 0.88 });
    let name = format!("embed {lengths:?} x {columns}, masks {masked}, row {row}, dropout {dropout}");
    let op = Op::Embed(Embed { token_dropout, row });
    let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(2.0, 1));
    let ids = ids(&case, lengths, masked);
    let mut case = case.integers(&[Dim::Tokens(1)], ids).weight(&[VOCABULARY, columns], UNIT);
    if row {
        case = case.weight(&[1, columns], UNIT);
    }
    if dropout { case.spans(lengths) } else { case }
}

/// Tolerance: c = 2; `k` is the number of tokens, because all tokens may have one id and be summed into one row.
fn embed_grad(lengths: &[u64], columns: u64, masked: bool, row: bool, dropout: bool) -> Case {
    let mask_id = VOCABULARY as i32 - 1;
    let token_dropout = dropout.then_some(TokenDropout { mask_id, keep: 0.88 });
    let name = format!("embed_grad {lengths:?} x {columns}, masks {masked}, row {row}, dropout {dropout}");
    let op = Op::EmbedGrad(EmbedGrad { token_dropout, row, vocab: VOCABULARY, dtype: DType::F32 });
    let tokens = lengths.iter().sum();
    let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(2.0, tokens));
    let ids = ids(&case, lengths, masked);
    let case = case.noise(&[Dim::Tokens(1), Dim::Fixed(columns)], UNIT).integers(&[Dim::Tokens(1)], ids);
    if dropout { case.spans(lengths) } else { case }
}

/// Token ids of sequences that begin with token 0. The other tokens are any but `<mask>`; with `masked`, every
/// third is `<mask>`.
fn ids(case: &Case, lengths: &[u64], masked: bool) -> Vec<i32> {
    let mut random = case.random(case.counts.tokens);
    let positions = lengths.iter().flat_map(|&n| 0..n);
    let id = |(t, bits): (u64, u64)| match t {
        0 => 0,
        _ if masked && t % 3 == 1 => VOCABULARY as i32 - 1,
        _ => (bits % (VOCABULARY - 1)) as i32,
    };
    positions.zip(&mut random).map(id).collect()
}

/// Tolerance: c = 1; `k` is the number of rows of the longest sequence.
fn segment_mean(lengths: &[u64], columns: u64, (skip_first, skip_last): (u32, u32)) -> Case {
    let name = format!("segment_mean {lengths:?} x {columns}, skip {skip_first} and {skip_last}");
    let op = Op::SegmentMean(SegmentMean { skip_first, skip_last });
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(1.0, longest));
    case.noise(&[Dim::Tokens(1), Dim::Fixed(columns)], UNIT).spans(lengths)
}

/// Tolerance: c = 2 for a reciprocal and a product; k = 1.
fn segment_mean_grad(lengths: &[u64], columns: u64, (skip_first, skip_last): (u32, u32)) -> Case {
    let name = format!("segment_mean_grad {lengths:?} x {columns}, skip {skip_first} and {skip_last}");
    let op = Op::SegmentMeanGrad(SegmentMeanGrad { skip_first, skip_last, dtype: DType::F32 });
    let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(2.0, 1));
    case.noise(&[Dim::Sequences(1), Dim::Fixed(columns)], UNIT).spans(lengths)
}

/// Forty random row indices, with repetitions. Tolerance: c = 1; k = 40, because all forty may be one row.
fn select_rows_grad(lengths: &[u64], columns: u64) -> Case {
    let name = format!("select_rows_grad of {lengths:?} x {columns}");
    let op = Op::SelectRowsGrad(SelectRowsGrad {});
    let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(1.0, 40));
    let rows = [Dim::Fixed(40), Dim::Fixed(columns)];
    let case = case.noise(&rows, UNIT);
    let count = case.counts.tokens;
    let any = case.random(40).map(|bits| (bits % count) as i32).collect();
    case.integers(&rows[..1], any)
}

/// Values are copied unchanged: the first token of every sequence, any five rows, all rows in reverse.
fn select_rows(lengths: &[u64], columns: u64) -> [Case; 3] {
    let of = |what: &str, dim: Dim| {
        let name = format!("select_rows {what} of {lengths:?} x {columns}");
        let op = Op::SelectRows(SelectRows {});
        let case = Case::new(name, op, lengths, columns % 2 * 3, Tolerance::sum(0.0, 1));
        (case.noise(&[Dim::Tokens(1), Dim::Fixed(columns)], UNIT), [dim])
    };
    let (first, sequences) = of("the first token", Dim::Sequences(1));
    let (some, five) = of("five", Dim::Fixed(5));
    let (all, tokens) = of("all", Dim::Tokens(1));
    let count = all.counts.tokens;
    let starts = lengths.iter().scan(0, |start, &n| {
        *start += n as i32;
        Some(*start - n as i32)
    });
    let any = some.random(5).map(|bits| (bits % count) as i32).collect();
    [
        first.integers(&sequences, starts.collect()),
        some.integers(&five, any),
        all.integers(&tokens, (0..count as i32).rev().collect()),
    ]
}

/// Tolerance: c = 2, k = 1, because cosines and sines are computed of equal f32 angles.
fn rotary_table(half: u32, longest: u64) -> Case {
    let op = Op::RotaryTable(RotaryTable {});
    let name = format!("rotary_table {longest} x {half}");
    let case = Case::new(name, op, &[longest], 0, Tolerance::sum(2.0, 1));
    let frequency = |j: u32| 10_000_f64.powf(-f64::from(j) / f64::from(half)) as f32;
    let data = (0..half).map(|j| f64::from(frequency(j))).collect();
    case.operand(&[Dim::Fixed(u64::from(half))], Data::Float(data), true)
}
