//! Searches of a thousand random training configurations with a budget: the program found is within the budget, a
//! larger budget never gives a slower program of the same optimizer, and the bytes that a bill requires suffice while
//! one byte less does not. Invariant: random values come from a fixed seed.

use crate::cases::target;
use crate::random::run;
use crate::training::{language_model, search};
use plimsoll_graph::ops::{AdamW, Sgd};
use plimsoll_graph::{Bytes, Graph, Param};
use plimsoll_plan::{
    ActivationPolicy, Optimizer, ParameterGroup, PlanError, Precision, RecomputePolicy, RematChoice, Training,
    TrainingChoice, TrainingSearch,
};
use proptest::prelude::*;

/// Number of models, and of budgets for each: 1000 configurations together.
const MODELS: u32 = 125;
const LINES: u64 = 8;

/// Random model, training options and search options.
#[derive(Clone, Debug)]
struct Recipe {
    layers: u32,
    hidden: u64,
    vocab: u64,
    /// Tokens of the larger of the two candidate micro-batches.
    tokens: u64,
    accumulation: u64,
    optimizer: usize,
    precision: usize,
    clip: bool,
    remat: usize,
}

fn recipes() -> impl Strategy<Value = Recipe> {
    let sizes = (1..9u32, 1..5u64, 16..200u64, 1..9u64, 1..4u64);
    (sizes, 0..3usize, 0..3usize, any::<bool>(), 0..4usize).prop_map(
        |((layers, hidden, vocab, tokens, accumulation), optimizer, precision, clip, remat)| Recipe {
            layers,
            hidden: 16 * hidden,
            vocab,
            tokens: 32 * tokens,
            accumulation,
            optimizer,
            precision,
            clip,
            remat,
        },
    )
}

fn everything_decays(_: &Param) -> ParameterGroup {
    ParameterGroup::Decay
}

impl Recipe {
    fn graph(&self, tokens: u64, layers: u32) -> Graph {
        language_model(layers, self.hidden, self.vocab, tokens)
    }

    fn search(&self, budget: Bytes) -> TrainingSearch<'static> {
        let adam = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false };
        let optimizers = match self.optimizer {
            0 => vec![Optimizer::AdamW(adam), Optimizer::AdamW8bit(adam)],
            1 => vec![Optimizer::AdamW8bit(adam)],
            _ => vec![Optimizer::Sgd(sgd)],
        };
        // Three of four recipes leave recomputation to the search.
        let remat = match self.remat {
            0 => RematChoice::Fixed(RecomputePolicy::Full),
            _ => RematChoice::Auto,
        };
        let base = search(budget, remat);
        let training = Training {
            precision: [Precision::F32, Precision::Bf16, Precision::Fp16][self.precision],
            group: &everything_decays,
            max_norm: if self.clip { 1.0 } else { 0.0 },
            ..base.training
        };
        let tokens = vec![self.tokens / 2, self.tokens];
        let step_tokens = self.tokens * self.accumulation;
        TrainingSearch {
            training,
            step_tokens,
            tokens,
            chunk: &|_| 16,
            optimizers,
            layers: self.layers,
            ..base
        }
    }

    fn run(&self, budget: Bytes) -> Result<TrainingChoice, PlanError> {
        let build = |tokens, _, layers| Ok((self.graph(tokens, layers), self.graph(tokens, layers)));
        self.search(budget).run(&target("null"), &build)
    }
}

/// Bytes that the bill of a refused search requires, after checking the bill against its ledger and budget.
fn least(recipe: &Recipe, budget: Bytes) -> Bytes {
    let Err(PlanError::OverBudget(bill)) = recipe.run(budget) else { panic!("{recipe:?} fits {budget}") };
    let total = bill.ledger.entries.iter().map(|entry| entry.bytes).sum();
    assert_eq!((bill.ledger.total(), bill.budget), (total, budget), "{recipe:?}");
    assert_eq!(bill.short_by(), total - budget, "{recipe:?}");
    assert!(bill.to_string().contains(&total.to_string()), "{recipe:?}: {bill}");
    total
}

#[test]
fn a_thousand_configurations_stay_inside_their_lines() {
    let (mut recomputing, mut smaller, mut planned) = (0, 0, 0);
    run(MODELS, recipes(), |recipe| {
        let whole = recipe.run(Bytes(u64::MAX)).unwrap_or_else(|e| panic!("{recipe:?}: {e}"));
        let least = least(&recipe, Bytes(1));
        let most = whole.program.peak().0.max(least.0);
        let (mut before, mut preferred) = (0.0, false);
        for k in 0..LINES {
            let budget = Bytes(least.0 + (most - least.0) * k / (LINES - 1));
            let found = recipe.run(budget).unwrap_or_else(|e| panic!("{recipe:?}: {budget}: {e}"));
            let program = &found.program;
            assert!(program.peak() <= budget, "{recipe:?}: {} in {budget}", program.peak());
            assert_eq!(program.ledger().total(), program.peak(), "{recipe:?}: {budget}");
            // The search takes the first optimizer as soon as it fits, even if the second one would be faster.
            let first = matches!(found.candidate.optimizer, Optimizer::AdamW(_)) && recipe.optimizer == 0;
            assert!(first || !preferred, "{recipe:?}: {budget} has a later optimizer than less");
            let before_it = if first && !preferred { 0.0 } else { before };
            preferred = first;
            assert!(found.tokens_per_second >= before_it, "{recipe:?}: {budget} is slower than less");
            before = found.tokens_per_second;
            planned += 1;
            recomputing += u32::from(found.activations != ActivationPolicy::STORED && recipe.remat != 0);
            smaller += u32::from(found.candidate.tokens < recipe.tokens);
        }
        assert!((before - whole.tokens_per_second).abs() <= 1e-9 * before, "{recipe:?}");
        Ok(())
    });
    println!("{planned} planned, of which {recomputing} recompute and {smaller} take a smaller micro-batch");
    assert!(planned == 1000 && recomputing > 50 && smaller > 50, "{planned} {recomputing} {smaller}");
}

/// The bytes that a bill requires suffice, and one byte less does not.
#[test]
fn a_bill_is_right_to_the_byte() {
    run(MODELS / 5, recipes(), |recipe| {
        let needed = least(&recipe, Bytes(1));
        assert_eq!(least(&recipe, needed - Bytes(1)), needed, "{recipe:?}");
        let found = recipe.run(needed).unwrap_or_else(|e| panic!("{recipe:?}: {e}"));
        assert!(found.program.peak() <= needed, "{recipe:?}: {} of {needed}", found.program.peak());
        Ok(())
    });
}
