//! Tests of routing with ties and invalid logits, of gradients written over their inputs, and of packs that are joined.

use super::{machines, numbers, same_bits};
use crate::moe::dispatch::{CombineInputs, combine_grad};
use crate::moe::route::{ExpertCapacity, ExpertChoice, Routed, route, scratch_words};
use crate::moe::router_loss::{RouterChoices, router_loss, router_loss_grad};
use crate::packs::{Packs, whole};
use crate::{Cpu, Rows, RowsMut};
use plimsoll_graph::packs::{TARGETS, TOKENS, WORDS};

/// Parameters of the choice of experts, without a capacity.
#[derive(Clone, Copy)]
struct Gating {
    top_k: usize,
    renormalise: bool,
}

/// All outputs of routing.
struct Routes {
    gates: Vec<f32>,
    experts: Vec<i32>,
    order: Vec<i32>,
    places: Vec<i32>,
    offsets: Vec<i32>,
    dropped: i32,
}

/// Routes logits (T, `experts`), with every output and the scratch filled with invalid values before.
fn routed(cpu: &Cpu, logits: &[f32], experts: usize, gating: Gating, capacity: ExpertCapacity<'_>) -> Routes {
    let tokens = logits.len() / experts;
    let rows = tokens * gating.top_k;
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
        gates: RowsMut::new(&mut out.gates, tokens, gating.top_k, gating.top_k),
        experts: Some(&mut out.experts),
        order: &mut out.order,
        places: &mut out.places,
        offsets: &mut out.offsets,
        dropped: Some(&mut dropped),
    };
    let mut scratch = vec![f32::NAN; scratch_words(experts, capacity.packs.count(), cpu.threads())];
    let choice = ExpertChoice { top_k: gating.top_k, renormalise: gating.renormalise, capacity };
    route(cpu, choice, Rows::new(logits, tokens, experts, experts), to, &mut scratch);
    out.dropped = dropped[0];
    out
}

/// Routes as one pack, of which every expert takes at most `limit` rows.
fn routed_as_one(cpu: &Cpu, logits: &[f32], experts: usize, gating: Gating, limit: usize) -> Routes {
    let words = whole(logits.len() / experts);
    let packs = Packs::new(&words, TOKENS, logits.len() / experts).expect("one pack");
    let routes = routed(cpu, logits, experts, gating, ExpertCapacity { packs, limit: &|_| limit });
    routes.check(experts, gating, limit);
    routes
}

impl Routes {
    /// Checks what must hold for any logits in one pack: the experts of a token differ, rows are in order, no row is lost.
    fn check(&self, experts: usize, gating: Gating, limit: usize) {
        let rows = self.places.len();
        for chosen in self.experts.chunks(gating.top_k) {
            let mut sorted = chosen.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), gating.top_k, "{chosen:?}");
            assert!(sorted.iter().all(|&e| (0..experts as i32).contains(&e)), "{chosen:?}");
        }
        let mut wanted = Vec::new();
        for expert in 0..experts as i32 {
            assert_eq!(self.offsets[expert as usize], wanted.len() as i32);
            let of_expert = (0..rows).filter(|&i| self.experts[i] == expert);
            wanted.extend(of_expert.take(limit).map(|i| i as i32));
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
                let gating = Gating { top_k, renormalise: true };
                let routes = routed_as_one(&cpu, &logits, experts, gating, 7);
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
            let gating = Gating { top_k: 3, renormalise: false };
            routed_as_one(&cpu, &logits, 4, gating, usize::MAX);
        }
    }
}

#[test]
fn without_tokens_nothing_is_routed() {
    for cpu in machines() {
        let gating = Gating { top_k: 2, renormalise: true };
        let routes = routed_as_one(&cpu, &[], 3, gating, 0);
        assert_eq!((routes.offsets, routes.dropped), (vec![0; 4], 0));
    }
}

/// The gradient of the rows may overwrite the rows: the bits are those with separate memory.
#[test]
fn rows_are_overwritten_only_once_they_were_read() {
    let tokens = 37;
    let columns = 83;
    let top_k = 2;
    let experts = 4;
    let gating = Gating { top_k, renormalise: true };
    for cpu in machines() {
        let Routes { gates, order, places, dropped, .. } =
            routed_as_one(&cpu, &numbers(3, tokens * experts), experts, gating, 15);
        assert!(dropped > 0);
        let mut rows = numbers(4, tokens * top_k * columns);
        let dy = numbers(5, tokens * columns);
        let n = tokens * top_k;
        let grads = |rows: Rows<'_>, drows: RowsMut<'_>| {
            let inputs = CombineInputs { top_k, rows, gates: &gates, order: &order, places: &places };
            let mut dgates = vec![f32::NAN; n];
            combine_grad(
                &cpu,
                inputs,
                Rows::new(&dy, tokens, columns, columns),
                Some(drows),
                Some(&mut dgates),
            );
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
    let a = 0.7_f32;
    let z = 0.25;
    for experts in 1..200 {
        let logits = vec![a; experts];
        let lse = f64::from(a) + libm::log(experts as f64);
        let gradient = (1.0 / experts as f32) * (2.0 * z * lse as f32);
        for cpu in machines() {
            let logits = Rows::new(&logits, 1, experts, experts);
            let mut words = whole(1);
            words[0][TARGETS] = 1;
            let packs = Packs::new(&words, TOKENS, 1).expect("one pack");
            let choices = RouterChoices { logits, experts: &[0], packs, balance: 0.0, z };
            let losses = router_loss(&cpu, choices, &mut [f32::NAN; 2]);
            same_bits(&[losses.z], &[(f64::from(z) * (lse * lse)) as f32], "z loss");
            let mut dlogits = vec![f32::NAN; experts];
            let out = RowsMut::new(&mut dlogits, 1, experts, experts);
            router_loss_grad(&cpu, choices, 1.0, out, &mut vec![f32::NAN; experts]);
            same_bits(&dlogits, &vec![gradient; experts], "gradient of the z loss");
        }
    }
}

/// Tokens of the packs that are joined: single tokens, none, and more than a block of any kernel has.
const PACKS: [u32; 6] = [1, 40, 0, 700, 1, 3];

/// Words of packs with as many tokens and targets.
fn words(tokens: &[u32], targets: &[u32]) -> Vec<[u32; WORDS]> {
    let mut end = 0;
    let words = |(number, (&tokens, &targets)): (usize, (&u32, &u32))| {
        end += tokens;
        [end - tokens, end, 0, 0, targets, number as u32]
    };
    tokens.iter().zip(targets).enumerate().map(words).collect()
}

/// A pack that is joined with others keeps the rows of its experts, in their order, and drops the same rows as alone.
#[test]
fn the_rows_of_a_pack_do_not_depend_on_others() {
    let experts = 5;
    let top_k = 2;
    let tokens: u32 = PACKS.iter().sum();
    let logits = numbers(6, tokens as usize * experts);
    let joined = words(&PACKS, &PACKS);
    let packs = Packs::new(&joined, TOKENS, tokens as usize).expect("packs");
    // A little less than the mean.
    let limit = |tokens: usize| (9 * tokens * top_k).div_ceil(10 * experts);
    let gating = Gating { top_k, renormalise: true };
    for cpu in machines() {
        let all = routed(&cpu, &logits, experts, gating, ExpertCapacity { packs, limit: &limit });
        let mut order = vec![vec![]; experts];
        for pack in packs.iter() {
            let elements = pack.rows.start * experts..pack.rows.end * experts;
            let choices = pack.rows.start * top_k..pack.rows.end * top_k;
            let alone = routed_as_one(&cpu, &logits[elements], experts, gating, limit(pack.rows.len()));
            same_bits(&all.gates[choices.clone()], &alone.gates, "gates");
            assert_eq!(all.experts[choices.clone()], alone.experts);
            for (expert, order) in order.iter_mut().enumerate() {
                let rows = alone.offsets[expert] as usize..alone.offsets[expert + 1] as usize;
                order.extend(alone.order[rows].iter().map(|i| i + choices.start as i32));
            }
        }
        let kept = order.concat();
        assert!(all.dropped > 0 && all.dropped as usize == all.order.len() - kept.len());
        assert_eq!(all.order[..kept.len()], kept);
        assert!(all.order[kept.len()..].iter().all(|&i| i == -1));
        let mut places = vec![-1; all.places.len()];
        kept.iter().enumerate().for_each(|(row, &choice)| places[choice as usize] = row as i32);
        assert_eq!(all.places, places);
        let ends = order.iter().scan(0, |end, order| {
            *end += order.len() as i32;
            Some(*end)
        });
        assert_eq!(all.offsets, [0].into_iter().chain(ends).collect::<Vec<_>>());
    }
}

/// With targets in one pack alone, the losses have the bits of that pack alone; so has every pack's gradient.
#[test]
fn the_losses_of_a_pack_have_the_same_bits_beside_others() {
    let experts = 21;
    let top_k = 2;
    let tokens = PACKS.iter().sum::<u32>() as usize;
    let logits = numbers(7, tokens * experts);
    let chosen: Vec<u32> = numbers(8, tokens * top_k).iter().map(|x| ((x + 1.0) * 10.0) as u32).collect();
    let targets: Vec<u32> = PACKS.iter().map(|tokens| tokens / 2 + 1).collect();
    let of_pack = |words: &[[u32; WORDS]], cpu: &Cpu, tokens: core::ops::Range<usize>| {
        let n = tokens.len();
        let logits = &logits[tokens.start * experts..tokens.end * experts];
        let packs = Packs::new(words, TOKENS, n).expect("packs");
        let chosen = &chosen[tokens.start * top_k..tokens.end * top_k];
        let logits = Rows::new(logits, n, experts, experts);
        let choices = RouterChoices { logits, experts: chosen, packs, balance: 0.75, z: 0.125 };
        let losses = router_loss(cpu, choices, &mut vec![f32::NAN; 2 * n]);
        let mut dlogits = vec![f32::NAN; n * experts];
        let mut shares = vec![f32::NAN; words.len() * experts];
        let out = RowsMut::new(&mut dlogits, n, experts, experts);
        router_loss_grad(cpu, choices, 1.5, out, &mut shares);
        (losses, dlogits)
    };
    for cpu in machines() {
        let (_, gradient) = of_pack(&words(&PACKS, &targets), &cpu, 0..tokens);
        let mut start = 0;
        for (pack, &n) in PACKS.iter().enumerate() {
            let rows = start..start + n as usize;
            let (alone, dlogits) = of_pack(&words(&[n], &targets[pack..=pack]), &cpu, rows.clone());
            same_bits(&gradient[rows.start * experts..rows.end * experts], &dlogits, "dlogits");
            let mut only = vec![0; PACKS.len()];
            only[pack] = targets[pack];
            let (among, _) = of_pack(&words(&PACKS, &only), &cpu, 0..tokens);
            assert_eq!(among, alone, "pack {pack}");
            assert_eq!(alone.sum > 0.0, n > 0, "pack {pack}");
            start = rows.end;
        }
    }
}
