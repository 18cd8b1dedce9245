//! The search for bounds: the largest step that fits, up to where more brings no speed.
//! Invariant: it only asks for plans and compares them; it has no formula of its own.

use crate::{PlanError, Program, Remedy};
use graph::Bytes;

/// Where to look for the tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// The least that is of use: the longest sequence must fit.
    pub floor: u64,
    /// Beyond this more brings no speed.
    pub ceiling: u64,
    /// Above the floor tokens are a multiple of this; 0 counts as 1.
    pub step: u64,
    /// The line.
    pub budget: Bytes,
}

/// The program with the most tokens that fits, or the bill of the smallest one.
pub fn largest(
    search: Search,
    build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
) -> Result<Program, PlanError> {
    let step = search.step.max(1);
    let ceiling = search.ceiling.max(search.floor);
    let tokens = |k: u64| if k == 0 { search.floor } else { ((search.floor / step + k) * step).min(ceiling) };
    let last = if ceiling == search.floor { 0 } else { ceiling.div_ceil(step) - search.floor / step };
    let widest = build(tokens(last))?;
    if last == 0 || widest.peak() <= search.budget {
        return widest.within(search.budget);
    }
    let mut best = build(tokens(0))?.within(search.budget)?;
    // Peaks grow with the tokens, so the border is found by halving.
    let (mut low, mut high) = (0, last);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let program = build(tokens(middle))?;
        if program.peak() <= search.budget {
            (low, best) = (middle, program);
        } else {
            high = middle;
        }
    }
    Ok(best)
}

impl Program {
    /// The program with the most tokens that fits a budget; see [`largest`].
    pub fn largest_bounds(
        search: Search,
        build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
    ) -> Result<Program, PlanError> {
        largest(search, build)
    }

    /// The program of exactly `tokens`, or a bill that names the largest number of tokens that fits.
    pub fn exactly(
        tokens: u64,
        search: Search,
        build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
    ) -> Result<Program, PlanError> {
        let program = build(tokens)?;
        if program.peak() <= search.budget {
            return Ok(program);
        }
        let smaller = Search { ceiling: tokens, ..search };
        let remedies = match largest(smaller, build) {
            Ok(fitting) => vec![remedy(&program, &fitting, tokens)],
            Err(PlanError::OverBudget(_)) => vec![],
            Err(error) => return Err(error),
        };
        Err(PlanError::OverBudget(Box::new(program.bill(search.budget, remedies))))
    }
}

fn remedy(refused: &Program, fitting: &Program, tokens: u64) -> Remedy {
    let fewer = fitting.plans().iter().map(|(_, p)| p.graph.bounds.tokens).max().unwrap_or(0);
    let per_token = |p: &Program, tokens: u64| p.seconds() / tokens.max(1) as f64;
    Remedy {
        flag: format!("--tokens {fewer}"),
        saves: refused.peak().saturating_sub(fitting.peak()),
        slower: per_token(fitting, fewer) / per_token(refused, tokens) - 1.0,
    }
}
