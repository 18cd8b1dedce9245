//! Test cases of routing, dispatch, combine and the router losses. Invariant: the logits of a token are at
//! least 0.15 apart, so an error of 1e-5 changes no choice.

use super::{Case, Operand, PACKINGS, Packing, ROWS, Tolerance, UNIT};
use plimsoll_exec::reference::Data;
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// (E, k): one expert, one choice, all experts, and more than a vector of experts.
const EXPERTS: [(u32, u32); 10] =
    [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (32, 4), (32, 32), (33, 17)];

/// (whether gates sum to 1, capacity): no capacity, exactly the mean, less, more.
const FORMS: [(bool, u32); 4] = [(false, 0), (true, 1000), (false, 600), (true, 1250)];

const COLUMNS: [u64; 5] = [8, 33, 40, 1, 320];

/// The experts that tokens prefer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Each token has its own preference.
    Any,
    /// All tokens have the same preference, the last expert most.
    Same,
    /// All tokens like the first expert least, so it has no rows if there are others.
    NeverFirst,
}

const WISHES: [Wish; 3] = [Wish::Any, Wish::Same, Wish::NeverFirst];

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (experts, top_k)) in EXPERTS.into_iter().enumerate() {
        for (j, (renormalise, capacity)) in FORMS.into_iter().enumerate() {
            let op = Route { experts, top_k, renormalise, capacity };
            let packing = PACKINGS[(i + j) % 3];
            let routing = Routing::new(op, ROWS[(i + 2 * j) % 7], WISHES[(i + j) % 3], packing);
            cases.push(routing.route.clone());
            cases.extend(routing.gradients());
            cases.extend(routing.rows(COLUMNS[(i + j) % 5]));
        }
        for (j, wish) in WISHES.into_iter().enumerate() {
            let op = Route { experts, top_k, renormalise: false, capacity: 0 };
            cases.extend(Routing::new(op, ROWS[(i + 3 * j) % 7], wish, PACKINGS[(i + j) % 3]).losses());
        }
    }
    // More tokens than a chunk of any kernel has.
    let op = Route { experts: 8, top_k: 2, renormalise: true, capacity: 1000 };
    for packing in PACKINGS {
        let routing = Routing::new(op, 300, Wish::Any, packing);
        cases.push(routing.route.clone());
        cases.extend(routing.gradients());
        cases.extend(routing.losses());
    }
    cases
}

/// A routing op with its inputs and results.
struct Routing {
    op: Route,
    tokens: u64,
    packing: Packing,
    what: String,
    route: Case,
    gates: Vec<f64>,
    experts: Vec<i32>,
    order: Vec<i32>,
    places: Vec<i32>,
}

/// A case of routing `tokens` tokens. Tolerance as of a softmax: c = 2; `k` is the number of experts.
fn route(op: Route, tokens: u64, wish: Wish, packing: Packing) -> Case {
    let name = format!("route {tokens} tokens, {wish:?}, {packing:?}, {op:?}");
    let tolerance = Tolerance::sum(2.0, u64::from(op.experts));
    let case = Case::new(name, Op::Route(op), &packing.lengths(tokens), tokens % 2 * 3, tolerance);
    let data = logits(&case, u64::from(op.experts), wish);
    let case = case.operand(&[Dim::Tokens(1), Dim::Fixed(u64::from(op.experts))], Data::Float(data), false);
    if op.capacity > 0 { case.packs(&packing.packs(tokens)) } else { case }
}

/// Ranks of the experts, a quarter apart, and noise of 0.05.
fn logits(case: &Case, experts: u64, wish: Wish) -> Vec<f64> {
    let mut logits = Vec::new();
    let random: Vec<u64> = case.random(case.counts.tokens * experts).collect();
    for bits in random.chunks(experts as usize) {
        let mut ranks: Vec<usize> = (0..bits.len()).collect();
        match wish {
            Wish::Any => ranks.sort_by_key(|&e| bits[e]),
            Wish::Same => {}
            Wish::NeverFirst => ranks[1..].sort_by_key(|&e| bits[e]),
        }
        let mut row = vec![0.0; bits.len()];
        for (rank, &e) in ranks.iter().enumerate() {
            let noise = (bits[e] >> 40) as f32 / (1 << 24) as f32;
            row[e] = f64::from(0.25 * rank as f32 + 0.1 * noise - 1.0);
        }
        logits.extend(row);
    }
    logits
}

impl Routing {
    fn new(op: Route, tokens: u64, wish: Wish, packing: Packing) -> Self {
        let route = route(op, tokens, wish, packing);
        let outs = route.reference();
        let integers = |i: usize| outs[i].integers().expect("integers").to_vec();
        let gates = outs[0].rounded().expect("gates").into_iter().map(f64::from).collect();
        let experts = integers(1);
        let order = integers(2);
        let places = integers(3);
        let what = format!("{tokens} tokens, {wish:?}, {packing:?}, {op:?}");
        Self { op, tokens, packing, what, route, gates, experts, order, places }
    }

    fn case(&self, op: Op, detail: &str, tolerance: Tolerance) -> Case {
        let name = format!("{}{detail}, {}", op.name(), self.what);
        Case::new(name, op, &self.packing.lengths(self.tokens), self.tokens % 2 * 3, tolerance)
    }

    fn k(&self) -> u64 {
        u64::from(self.op.top_k)
    }

    fn choices(&self) -> [Dim; 2] {
        [Dim::Tokens(1), Dim::Fixed(self.k())]
    }

    /// The operands of the forward op.
    fn logits(&self) -> Operand {
        self.route.ins[0].clone()
    }

    /// The gradient of routing. Tolerance: c = 4 for a softmax and the subtraction of a mean; `k` is the number
    /// of experts.
    fn gradients(&self) -> [Case; 1] {
        let op = Op::RouteGrad(RouteGrad { renormalise: self.op.renormalise });
        let case = self.case(op, "", Tolerance::sum(4.0, u64::from(self.op.experts)));
        let mut case = case.noise(&self.choices(), UNIT);
        case.ins.push(self.logits());
        [case
            .integers(&self.choices(), self.experts.clone())
            .integers(&[Dim::Tokens(self.k())], self.places.clone())]
    }

    /// Dispatch, combine and their gradients. Tolerance: c = 0 for copied rows, 1 for sums of top_k terms, 2
    /// for the gradient of the gates, which sums over the columns.
    fn rows(&self, columns: u64) -> [Case; 4] {
        let k = self.k();
        let top_k = self.op.top_k;
        let x = [Dim::Tokens(1), Dim::Fixed(columns)];
        let rows = [Dim::Tokens(k), Dim::Fixed(columns)];
        let of = |op, c, terms| self.case(op, &format!(" x {columns}"), Tolerance::sum(c, terms));
        let indices = |case: Case, which: &[&Vec<i32>]| {
            which.iter().fold(case, |case, i| case.integers(&[Dim::Tokens(k)], (*i).clone()))
        };
        let gates = |case: Case| case.operand(&self.choices(), Data::Float(self.gates.clone()), false);
        let both = [&self.order, &self.places];
        let dispatch = of(Op::Dispatch(Dispatch { top_k }), 0.0, 1).noise(&x, UNIT);
        let dispatch_grad = of(Op::DispatchGrad(DispatchGrad { top_k }), 1.0, k).noise(&rows, UNIT);
        let combine = of(Op::Combine(Combine { top_k }), 1.0, k).noise(&rows, UNIT);
        let combine_grad = of(Op::CombineGrad(CombineGrad { top_k }), 2.0, columns);
        [
            indices(dispatch, &both),
            indices(dispatch_grad, &[&self.places]),
            indices(gates(combine), &both),
            indices(gates(combine_grad.noise(&x, UNIT).noise(&rows, UNIT)), &both),
        ]
    }

    /// The router losses and their gradient. Tolerance: c = 4; `k` is the number of experts. A pack has about as many
    /// targets as tokens, which cancel the mean over its tokens, so that the gradient does not get smaller with more tokens.
    fn losses(&self) -> [Case; 2] {
        let balance = 0.75;
        let z = 0.125;
        let tolerance = Tolerance::sum(4.0, u64::from(self.op.experts));
        let loss = self.case(Op::RouterLoss(RouterLoss { balance, z }), "", tolerance);
        let grad = self.case(Op::RouterLossGrad(RouterLossGrad { balance, z }), "", tolerance);
        let grad = grad.operand(&[Dim::Fixed(1)], Data::Float(vec![1.5]), false);
        [loss, grad].map(|mut case| {
            case.ins.push(self.logits());
            case.integers(&self.choices(), self.experts.clone()).packs(&self.packing.packs(self.tokens))
        })
    }
}
