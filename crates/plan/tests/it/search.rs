//! Tests of the search for the largest step within a budget, and of the bill if none fits.

use crate::cases::{MEAN, bill, bounds, encoder, plan, target};
use plimsoll_graph::{Bounds, Builder, Bytes, DType, Dim};
use plimsoll_plan::{Ledger, LimitKind, PlanError, Program, Remedy, Room, Search, Target, largest};

fn tokens_of(program: &Program) -> u64 {
    program.plans()[0].1.graph.bounds.tokens
}

/// Program with 64 B of input and 64 B of output per token, so that its peak is 128 B per token.
fn synthetic(tokens: u64) -> Result<Program, PlanError> {
    let mut g = Builder::new(Bounds { tokens, sequences: 1, longest: 1, packs: 1 });
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(16)], DType::F32);
    let y = g.gelu(x);
    g.output("y", y);
    let graph = g.finish().map_err(|source| PlanError::of_graph("build", source))?;
    let t = target("null");
    Ok(Program::new(t.clone(), vec![("step".to_owned(), plan(&graph, &t))], vec![]))
}

fn esm(tokens: u64) -> Result<Program, PlanError> {
    let t = target("cpu");
    let graph = encoder("facebook/esm2_t12_35M_UR50D").graph(bounds(tokens), MEAN).expect("verified");
    Ok(Program::new(t.clone(), vec![("protein".to_owned(), plan(&graph, &t))], vec![]))
}

#[test]
fn synthetic_peaks_are_known() {
    for tokens in [1, 10, 333] {
        assert_eq!(synthetic(tokens).expect("planned").peak(), Bytes(128 * tokens));
    }
}

/// Compares the search with a linear scan over all candidates, for budgets around every peak.
#[test]
fn the_largest_that_fits_is_found() {
    for (floor, ceiling, step) in
        [(1, 40, 1), (7, 40, 5), (8, 40, 8), (10, 10, 3), (10, 3, 3), (5, 6, 100), (4, 9, 0)]
    {
        let candidates: Vec<u64> = (floor..=ceiling.max(floor))
            .filter(|t| [floor, ceiling].contains(t) || t % step.max(1) == 0)
            .collect();
        for budget in (0..=42u64).flat_map(|t| [(128 * t).saturating_sub(1), 128 * t]) {
            let search = Search { floor, ceiling, step, budget: Bytes(budget), room: Room::UNLIMITED };
            let wanted = candidates.iter().copied().filter(|t| 128 * t <= budget).max();
            let mut asked = vec![];
            let found = largest(search, &mut |t| {
                asked.push(t);
                synthetic(t)
            });
            assert!(asked.iter().all(|t| candidates.contains(t)), "{search:?} asked {asked:?}");
            let distinct: std::collections::BTreeSet<u64> = asked.iter().copied().collect();
            assert_eq!(distinct.len(), asked.len(), "{search:?} asked twice: {asked:?}");
            assert!(asked.len() <= 2 + candidates.len().ilog2() as usize + 1, "{search:?} asked {asked:?}");
            match wanted {
                Some(tokens) => assert_eq!(tokens_of(&found.expect("it fits")), tokens, "{search:?}"),
                None => {
                    let bill = bill(found);
                    assert_eq!((bill.budget, bill.ledger.total()), (Bytes(budget), Bytes(128 * floor)));
                    assert!(bill.remedies.is_empty());
                }
            }
        }
    }
}

#[test]
fn esm2_takes_what_the_budget_gives() {
    let mut before = 0;
    for budget in [200_000_000, 250_000_000, 400_000_000, 1_000_000_000u64] {
        let search =
            Search { floor: 1024, ceiling: 16384, step: 256, budget: Bytes(budget), room: Room::UNLIMITED };
        let found = Program::largest_bounds(search, &mut esm).expect("it fits");
        let tokens = tokens_of(&found);
        assert!(found.peak() <= search.budget);
        assert!(tokens >= before, "{tokens} tokens of {budget} B after {before}");
        if tokens < search.ceiling {
            let next = (tokens + search.step).min(search.ceiling);
            assert!(esm(next).expect("planned").peak() > search.budget, "{next} tokens fit {budget} B too");
        }
        before = tokens;
    }
    assert_eq!(before, 16384, "a gigabyte is enough for the ceiling");
}

#[test]
fn errors_of_the_builder_come_through() {
    let search = Search { floor: 1, ceiling: 4, step: 1, budget: Bytes(1), room: Room::UNLIMITED };
    let fail = || PlanError::BadPolicy { field: "test", why: "no".to_owned() };
    for result in [largest(search, &mut |_| Err(fail())), Program::exactly(3, search, &mut |_| Err(fail()))] {
        assert!(matches!(result, Err(PlanError::BadPolicy { field: "test", .. })));
    }
}

#[test]
fn exactly_is_exact_or_refused() {
    let search = Search { floor: 4, ceiling: 1000, step: 4, budget: Bytes(128 * 30), room: Room::UNLIMITED };
    assert_eq!(tokens_of(&Program::exactly(30, search, &mut synthetic).expect("it fits")), 30);
    assert_eq!(
        tokens_of(&Program::exactly(2, search, &mut synthetic).expect("below the floor it fits too")),
        2
    );
    let refused = bill(Program::exactly(31, search, &mut synthetic));
    assert_eq!(refused.short_by(), Bytes(128));
    let settings: Vec<String> = refused.remedies.iter().map(Remedy::words).collect();
    assert_eq!(settings, ["tokens=28"]);
    assert_eq!(refused.remedies[0].saves, Bytes(3 * 128));
    // If not even the smallest step fits, the bill offers no remedy, in particular no step larger than the refused
    // one.
    let hopeless = Search { budget: Bytes(100), ..search };
    assert!(bill(Program::exactly(31, hopeless, &mut synthetic)).remedies.is_empty());
    assert!(bill(Program::exactly(2, hopeless, &mut synthetic)).remedies.is_empty());
}

fn words(tokens: u64, budget: u64) -> String {
    let search =
        Search { floor: 1024, ceiling: 16384, step: 256, budget: Bytes(budget), room: Room::UNLIMITED };
    bill(Program::exactly(tokens, search, &mut synthetic_model)).to_string()
}

/// ESM-2 35M on a target defined here, so that the expected texts do not depend on the kernel tables of CPUs.
fn synthetic_model(tokens: u64) -> Result<Program, PlanError> {
    let mut t: Target = target("null");
    t.alignment = 256;
    t.reserved.push(plimsoll_plan::Reserved { label: "driver".to_owned(), bytes: Bytes(1_000_000) });
    let graph = encoder("facebook/esm2_t12_35M_UR50D").graph(bounds(tokens), MEAN).expect("verified");
    Ok(Program::new(t.clone(), vec![("protein".to_owned(), plan(&graph, &t))], vec![]))
}

#[test]
fn the_bill_in_words() {
    assert_eq!(words(8192, 200_000_000), WITH_REMEDY);
    assert_eq!(words(8192, 100_000_000), HOPELESS);
}

/// A bill for the free memory suggests no budget, because a larger budget would not help.
#[test]
fn the_bill_of_what_is_free() {
    let program = synthetic_model(8192).expect("planned");
    let mut bill = program.bill(Bytes(200_000_000), vec![]);
    bill.line = LimitKind::Free;
    bill.notes = vec!["of this card process 7 (python) holds 1 B".to_owned()];
    let text = bill.to_string();
    let start =
        "this step needs 228 559 680 B on `host`; free are 200 000 000 B (short by 28 559 680 B)\n  peak at";
    assert!(text.starts_with(start), "{text}");
    let end =
        "\n  of this card process 7 (python) holds 1 B\n  no smaller plan fits; 228 559 680 B must be free";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn the_largest_tensors_at_the_peak_have_names() {
    let program = synthetic_model(8192).expect("planned");
    let largest = Ledger { entries: program.largest_tensors(4) };
    // f32 tensors of 8192 x 1920, twice 8192 x 480, then a weight of 1920 x 480.
    let names = "what linear encoder.layer.0.intermediate.dense gives 62.9 MB, \
                 what linear encoder.layer.0.attention.output.dense gives 15.7 MB, \
                 what layer_norm encoder.layer.0.LayerNorm gives 15.7 MB, encoder.layer.0.intermediate.dense.weight 3.6 MB";
    assert_eq!(largest.line(), names);
    let all = program.largest_tensors(usize::MAX);
    assert!(all.is_sorted_by(|a, b| a.bytes >= b.bytes));
    let planned = program.ledger();
    let rest = ["padding and packing", "workspace", "reserved: driver"].map(|label| planned.get(label));
    let sum: Bytes = all.iter().map(|entry| entry.bytes).sum();
    assert_eq!(sum + rest.into_iter().sum(), program.peak(), "each byte once");
}

/// A search without a fitting step returns the bill of the smallest step.
#[test]
fn the_bill_of_the_search_is_that_of_the_floor() {
    let search =
        Search { floor: 1024, ceiling: 16384, step: 256, budget: Bytes(100_000_000), room: Room::UNLIMITED };
    let refused = bill(Program::largest_bounds(search, &mut synthetic_model));
    assert_eq!(refused, synthetic_model(1024).expect("planned").bill(search.budget, vec![]));
    let text = refused.to_string();
    let needed = refused.ledger.total();
    for part in [&needed.to_string(), "100 000 000 B", &refused.short_by().to_string(), &refused.ledger.line()]
    {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert!(text.ends_with(&format!("memory_budget={} or more", needed.0)), "{text}");
}

const WITH_REMEDY: &str = "\
this step needs 228 559 680 B on `host`; the budget is 200 000 000 B (short by 28 559 680 B)
  peak at linear encoder.layer.0.intermediate.dense: params 133.0 MB, inputs 1.0 kB, activations 94.4 MB, \
padding and packing 11.3 kB, reserved: driver 1.0 MB
  what fits, cheapest first:  tokens=5632  saves 29.4 MB, +0.0 % time";

const HOPELESS: &str = "\
this step needs 228 559 680 B on `host`; the budget is 100 000 000 B (short by 128 559 680 B)
  peak at linear encoder.layer.0.intermediate.dense: params 133.0 MB, inputs 1.0 kB, activations 94.4 MB, \
padding and packing 11.3 kB, reserved: driver 1.0 MB
  no smaller plan fits; give memory_budget=228559680 or more";
