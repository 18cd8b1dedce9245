//! Rows of tokens to their experts and back: gathers and weighted sums.
//!
//! Invariant: every output row is gathered by the task that owns it, a sum over a token's choices in their order, so
//! nothing is scattered and no bit depends on the number of threads.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// `rows[r] = x[order[r] / k]`, zeros where order is below zero.
pub fn dispatch(cpu: &Cpu, top_k: usize, x: Rows<'_>, order: &[i32], rows: RowsMut<'_>) {
    let columns = x.cols();
    assert!(rows.rows() == order.len() && rows.cols() == columns, "a row for each choice");
    check_indices(order, x.rows() * top_k);
    cpu.by_rows(order.len(), columns, &|range| {
        for r in range {
            // SAFETY: row r of the output is this task's own; x has the token's row, and does not overlap it.
            unsafe {
                match usize::try_from(order[r]) {
                    Ok(choice) => core::ptr::copy_nonoverlapping(x.row(choice / top_k), rows.row(r), columns),
                    Err(_) => core::slice::from_raw_parts_mut(rows.row(r), columns).fill(0.0),
                }
            }
        }
    });
}

/// Gradient of the dispatch of tokens to experts: `dx[t] = sum_j drows[places[t k + j]]` over the k choices j of token
/// t. A place below zero is a dropped choice and adds nothing.
pub fn dispatch_grad(cpu: &Cpu, top_k: usize, drows: Rows<'_>, places: &[i32], dx: RowsMut<'_>) {
    sum_choices(cpu, DispatchedRows { top_k, rows: drows, places }, None, dx);
}

/// Rows of the experts, and where the rows of a token's choices are among them.
#[derive(Clone, Copy)]
pub struct DispatchedRows<'a> {
    /// Choices of a token, k.
    pub top_k: usize,
    /// (kT, D).
    pub rows: Rows<'a>,
    /// (kT), the row of each choice; below zero for a dropped choice, which adds nothing.
    pub places: &'a [i32],
}

/// Combines the outputs of experts: `y[t] = sum_j gates[t k + j] rows[places[t k + j]]` over the k choices j of token
/// t.
pub fn combine(cpu: &Cpu, outputs: DispatchedRows<'_>, gates: &[f32], y: RowsMut<'_>) {
    assert_eq!(gates.len(), outputs.places.len(), "a gate for each choice");
    sum_choices(cpu, outputs, Some(gates), y);
}

/// `y[t] = sum over j < k of gates[t k + j] rows[places[t k + j]]`, with gates of 1 if none are given: the sum of the rows that
/// the chosen experts computed for a token.
fn sum_choices(cpu: &Cpu, experts: DispatchedRows<'_>, gates: Option<&[f32]>, y: RowsMut<'_>) {
    let DispatchedRows { top_k, rows, places } = experts;
    assert!(y.rows() * top_k == places.len() && y.cols() == rows.cols(), "k choices of each token");
    check_indices(places, rows.rows());
    cpu.by_rows(y.rows(), y.cols() * top_k, &|range| {
        cpu.isa().run(SumChoices { experts, gates, y: &y, range });
    });
}

/// Inputs of a combination of expert outputs: rows (kT, D), gates (kT), and the source of each row.
#[derive(Clone, Copy)]
pub struct CombineInputs<'a> {
    /// Choices of a token.
    pub top_k: usize,
    /// (kT, D).
    pub rows: Rows<'a>,
    /// (kT).
    pub gates: &'a [f32],
    /// (kT), the choice t k + j that each row belongs to; below zero for a row without a choice. No choice occurs
    /// twice.
    pub order: &'a [i32],
    /// (kT), the row of each choice; below zero for a dropped choice.
    pub places: &'a [i32],
}

/// `drows[r] = gates[order[r]] dy[order[r] / k]`, zeros where order is below zero; `dgates[i] = dy[i / k] .
/// rows[places[i]]`, 0 where places is below zero. `drows` may be exactly `rows`.
pub fn combine_grad(
    cpu: &Cpu,
    inputs: CombineInputs<'_>,
    dy: Rows<'_>,
    drows: Option<RowsMut<'_>>,
    dgates: Option<&mut [f32]>,
) {
    let choices = inputs.order.len();
    let columns = dy.cols();
    assert!(inputs.rows.rows() == choices && inputs.rows.cols() == columns, "rows are (kT, D)");
    assert!(drows.as_ref().is_none_or(|d| d.rows() == choices && d.cols() == columns), "drows are (kT, D)");
    assert!(inputs.gates.len() == choices && inputs.places.len() == choices, "k choices of each token");
    check_indices(inputs.order, choices.min(dy.rows() * inputs.top_k));
    let dgates = dgates.map(|dgates| {
        // Kept choices are written below, by the task of their row.
        dgates.iter_mut().zip(inputs.places).filter(|(_, place)| **place < 0).for_each(|(d, _)| *d = 0.0);
        RowsMut::new(dgates, choices, 1, 1)
    });
    cpu.by_rows(choices, columns, &|range| {
        cpu.isa().run(CombineGradRows { inputs, dy, drows: drows.as_ref(), dgates: dgates.as_ref(), range });
    });
}

/// Indices from outside: none at or above `limit`.
fn check_indices(indices: &[i32], limit: usize) {
    assert!(
        indices.iter().all(|&i| usize::try_from(i).map_or(true, |i| i < limit)),
        "an index outside {limit}"
    );
}

/// Sums of the choices of the tokens `range`, for `Isa::run`.
struct SumChoices<'a> {
    experts: DispatchedRows<'a>,
    gates: Option<&'a [f32]>,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for SumChoices<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.y.cols();
        let DispatchedRows { top_k, rows, places } = self.experts;
        for t in self.range.clone() {
            let choices = t * top_k..(t + 1) * top_k;
            for c in (0..columns).step_by(LANES) {
                let n = LANES.min(columns - c);
                let mut sum = s.splat(0.0);
                for i in choices.clone() {
                    let Ok(place) = usize::try_from(places[i]) else { continue };
                    // SAFETY: columns c..c + n of a row inside.
                    let row = unsafe { s.load_n(rows.row(place).add(c), n) };
                    sum = match self.gates {
                        Some(gates) => s.fma(s.splat(gates[i]), row, sum),
                        None => s.add(sum, row),
                    };
                }
                // SAFETY: as above; row t is this task's own.
                unsafe { s.store_n(self.y.row(t).add(c), sum, n) };
            }
        }
    }
}

/// Gradients for the rows `range`, for `Isa::run`.
struct CombineGradRows<'a> {
    inputs: CombineInputs<'a>,
    dy: Rows<'a>,
    drows: Option<&'a RowsMut<'a>>,
    dgates: Option<&'a RowsMut<'a>>,
    range: Range<usize>,
}

impl SimdKernel for CombineGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.dy.cols();
        for r in self.range.clone() {
            let choice = usize::try_from(self.inputs.order[r]).ok();
            let mut dot = s.splat(0.0);
            for c in (0..columns).step_by(LANES) {
                let n = LANES.min(columns - c);
                // SAFETY: columns c..c + n of rows inside each view. Row r of drows is this task's own, and where
                // it is row r of rows, these columns of it were read before.
                unsafe {
                    let mut scaled = s.splat(0.0);
                    if let Some(i) = choice {
                        let dy = s.load_n(self.dy.row(i / self.inputs.top_k).add(c), n);
                        dot = s.fma(dy, s.load_n(self.inputs.rows.row(r).add(c), n), dot);
                        scaled = s.mul(s.splat(self.inputs.gates[i]), dy);
                    }
                    if let Some(drows) = self.drows {
                        s.store_n(drows.row(r).add(c), scaled, n);
                    }
                }
            }
            if let (Some(dgates), Some(i)) = (self.dgates, choice) {
                // SAFETY: one f32; no other row is of this choice.
                unsafe { dgates.row(i).write(s.sum(dot)) };
            }
        }
    }
}
