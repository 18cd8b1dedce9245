//! The search for bounds: the largest step that fits, up to where more brings no speed, with resident weights or
//! with streamed ones. Invariant: it only asks for plans and compares them; it has no formula of its own.

use crate::{Bill, PlanError, Program, Remedy, Weights};
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

/// When weights are streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stream {
    /// Where no step fits with resident weights.
    #[default]
    Auto,
    /// Never: what does not fit with resident weights is refused.
    Never,
    /// Always.
    Always,
}

/// How many times more tokens bring speed where a step reads the weights: their reading costs as much as the
/// arithmetic of some thousand tokens, and at sixteen times a resident step's tokens only a few per cent are left.
const STREAMED_CEILING: u64 = 16;

impl Search {
    /// The same search with streamed weights, which are read once for each step: a larger one brings speed for
    /// longer.
    fn streamed(self) -> Self {
        Self { ceiling: self.ceiling.saturating_mul(STREAMED_CEILING), ..self }
    }
}

/// Builds the program of so many tokens with its weights there.
pub type Build<'a> = &'a mut dyn FnMut(u64, Weights) -> Result<Program, PlanError>;

/// The program of `tokens`, or of the most that fit, with resident weights if any step fits so, else with
/// streamed ones as far as `stream` allows.
///
/// # Errors
/// [`PlanError::OverBudget`] where nothing fits: the bill of the least that was left to try. Where only other
/// tokens or streaming would fit what was asked for, the bill says so and what each costs.
pub fn fit(
    tokens: Option<u64>,
    search: Search,
    stream: Stream,
    build: Build<'_>,
) -> Result<Program, PlanError> {
    let streamed = |build: Build<'_>| place(tokens, search.streamed(), &mut |t| build(t, Weights::Streamed));
    if stream == Stream::Always {
        return streamed(build);
    }
    let mut refused = match place(tokens, search, &mut |t| build(t, Weights::Resident)) {
        Err(PlanError::OverBudget(bill)) => bill,
        other => return other,
    };
    if stream == Stream::Auto && refused.remedies.is_empty() {
        return streamed(build);
    }
    match streamed(build) {
        Ok(fitting) => {
            let resident = build(tokens.unwrap_or(search.floor), Weights::Resident)?;
            offer(&mut refused, remedy("--stream-weights always".to_owned(), &resident, &fitting));
        }
        Err(PlanError::OverBudget(_)) => {}
        Err(error) => return Err(error),
    }
    Err(PlanError::OverBudget(refused))
}

/// The program of `tokens`, or of the most that fit.
fn place(
    tokens: Option<u64>,
    search: Search,
    build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
) -> Result<Program, PlanError> {
    match tokens {
        None => largest(search, build),
        Some(tokens) => Program::exactly(tokens, search, build),
    }
}

fn offer(bill: &mut Bill, remedy: Remedy) {
    bill.remedies.push(remedy);
    bill.remedies.sort_by(|a, b| a.slower.total_cmp(&b.slower));
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
            Ok(fitting) => {
                let flag = format!("--tokens {}", fitting.most_tokens());
                vec![remedy(flag, &program, &fitting)]
            }
            Err(PlanError::OverBudget(_)) => vec![],
            Err(error) => return Err(error),
        };
        Err(PlanError::OverBudget(Box::new(program.bill(search.budget, remedies))))
    }
}

/// What it saves and costs to run `fitting` in place of `refused`.
fn remedy(flag: String, refused: &Program, fitting: &Program) -> Remedy {
    let per_token = |p: &Program| p.seconds() / p.most_tokens().max(1) as f64;
    Remedy {
        flag,
        saves: refused.peak().saturating_sub(fitting.peak()),
        slower: per_token(fitting) / per_token(refused) - 1.0,
    }
}
