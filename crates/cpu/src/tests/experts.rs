//! Tests of routing with ties and invalid logits, and of gradients written over their inputs.

use super::{machines, numbers, same_bits, workspace};
use crate::dispatch::{Combined, combine_grad};
use crate::route::{Choice, Routed, route};
use crate::router_loss::{Weights, router_loss, router_loss_grad};
use crate::{Cpu, Rows, RowsMut};

/// All outputs of routing.
struct Routes {
    gates: Vec<f32>,
    experts: Vec<i32>,
    order: Vec<i32>,
    places: Vec<i32>,
    offsets: Vec<i32>,
    dropped: i32,
}

/// Routes logits (T, `experts`), with every output filled with invalid values before.
fn routed(cpu: &Cpu, logits: &[f32], experts: usize, choice: Choice) -> Routes {
    let tokens = logits.len() / experts;
    let rows = tokens * choice.top_k;
    let mut out = Routes {
        gates: vec![f32::NAN; rows],
        experts: vec![-7; rows],
        order: vec![-7; rows],
        places: vec![-7; rows],
        offsets: vec![-7; experts + 1],
        dropped: -7,
    };
    let mut dropped = [-7];
    let to = Routed {
        gates: RowsMut::new(&mut out.gates, tokens, choice.top_k, choice.top_k),
        experts: Some(&mut out.experts),
        order: &mut out.order,
        places: &mut out.places,
        offsets: &mut out.offsets,
        dropped: Some(&mut dropped),
    };
    let mut scratch = workspace(cpu, 4 * experts.next_multiple_of(16));
    route(cpu, choice, Rows::new(logits, tokens, experts, experts), to, &mut scratch);
    out.dropped = dropped[0];
    out
}

impl Routes {
    /// Checks what must hold for any logits: the experts of a token differ, rows are in order, no row is lost.
    fn check(&self, experts: usize, choice: Choice) {
        let rows = self.places.len();
        for chosen in self.experts.chunks(choice.top_k) {
            let mut sorted = chosen.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), choice.top_k, "{chosen:?}");
            assert!(sorted.iter().all(|&e| (0..experts as i32).contains(&e)), "{chosen:?}");
        }
        let mut wanted = Vec::new();
        for expert in 0..experts as i32 {
            assert_eq!(self.offsets[expert as usize], wanted.len() as i32);
            let of_expert = (0..rows).filter(|&i| self.experts[i] == expert);
            wanted.extend(of_expert.take(choice.limit).map(|i| i as i32));
        }
        assert_eq!(self.offsets[experts], wanted.len() as i32);
        assert_eq!(self.dropped as usize, rows - wanted.len());
        for (r, &i) in wanted.iter().enumerate() {
            assert_eq!(self.places[i as usize], r as i32);
        }
        assert_eq!(self.places.iter().filter(|&&p| p == -1).count(), rows - wanted.len());
        wanted.resize(rows, -1);
        assert_eq!(self.order, wanted);
    }
}

#[test]
fn ties_go_to_the_lower_expert() {
    for experts in [1, 2, 5, 32] {
        // Three levels, so that nearly all choices are ties; 0 and -0 are equal.
        let logits: Vec<f32> = numbers(1, 41 * experts).iter().map(|x| (1.5 * x).round()).collect();
        for cpu in machines() {
            for top_k in [1, experts.div_ceil(2), experts] {
                let choice = Choice { top_k, renormalise: true, limit: 7 };
                let routes = routed(&cpu, &logits, experts, choice);
                routes.check(experts, choice);
                for (row, chosen) in logits.chunks(experts).zip(routes.experts.chunks(top_k)) {
                    let mut order: Vec<usize> = (0..experts).collect();
                    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).expect("numbers"));
                    assert!(order.iter().zip(chosen).all(|(&e, &c)| e as i32 == c), "{row:?}: {chosen:?}");
                }
            }
        }
    }
}

#[test]
fn logits_that_are_no_numbers_lose_no_row() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = numbers(2, 30 * 4);
        logits.iter_mut().step_by(3).for_each(|x| *x = bad);
        logits[8..12].fill(bad);
        for cpu in machines() {
            let choice = Choice { top_k: 3, renormalise: false, limit: usize::MAX };
            routed(&cpu, &logits, 4, choice).check(4, choice);
        }
    }
}

#[test]
fn without_tokens_nothing_is_routed() {
    for cpu in machines() {
        let choice = Choice { top_k: 2, renormalise: true, limit: 0 };
        let routes = routed(&cpu, &[], 3, choice);
        assert_eq!((routes.offsets, routes.dropped), (vec![0; 4], 0));
    }
}

/// The gradient of the rows may overwrite the rows: the bits are those with separate memory.
#[test]
fn rows_are_overwritten_only_once_they_were_read() {
    let (tokens, columns, top_k, experts) = (37, 83, 2, 4);
    let choice = Choice { top_k, renormalise: true, limit: 15 };
    for cpu in machines() {
        let Routes { gates, order, places, dropped, .. } =
            routed(&cpu, &numbers(3, tokens * experts), experts, choice);
        assert!(dropped > 0);
        let (mut rows, dy) = (numbers(4, tokens * top_k * columns), numbers(5, tokens * columns));
        let n = tokens * top_k;
        let grads = |rows: Rows<'_>, drows: RowsMut<'_>| {
            let of = Combined { top_k, rows, gates: &gates, order: &order, places: &places };
            let mut dgates = vec![f32::NAN; n];
            combine_grad(&cpu, of, Rows::new(&dy, tokens, columns, columns), Some(drows), Some(&mut dgates));
            dgates
        };
        let mut apart = vec![f32::NAN; n * columns];
        let wanted =
            grads(Rows::new(&rows, n, columns, columns), RowsMut::new(&mut apart, n, columns, columns));
        let start = rows.as_mut_ptr();
        // SAFETY: both views are of the whole vector, which no other code accesses; `combine_grad` allows them to be
        // equal.
        let found = unsafe {
            grads(Rows::from_raw(start, n, columns, columns), RowsMut::from_raw(start, n, columns, columns))
        };
        same_bits(&found, &wanted, "dgates");
        same_bits(&rows, &apart, "drows");
    }
}

/// With E equal logits a, the lse is a + ln E: the logarithm of `libm`, added in f64. Rounding the logarithm first, or
/// taking the platform's, gives other bits for some E.
#[test]
fn z_losses_use_the_logarithm_of_libm() {
    let (a, z) = (0.7_f32, 0.25);
    for experts in 1..200 {
        let logits = vec![a; experts];
        let lse = f64::from(a) + libm::log(experts as f64);
        let gradient = (1.0 / experts as f32) * (2.0 * z * lse as f32);
        for cpu in machines() {
            let x = Rows::new(&logits, 1, experts, experts);
            let weights = Weights { balance: 0.0, z };
            let losses = router_loss(&cpu, weights, x, &[0], &mut [f32::NAN; 2]);
            same_bits(&[losses.z], &[(f64::from(z) * (lse * lse)) as f32], "z loss");
            let mut dlogits = vec![f32::NAN; experts];
            let out = RowsMut::new(&mut dlogits, 1, experts, experts);
            router_loss_grad(&cpu, weights, 1.0, x, &[0], out, &mut vec![f32::NAN; experts]);
            same_bits(&dlogits, &vec![gradient; experts], "gradient of the z loss");
        }
    }
}
