//! The optimisations that are in effect in a plan, each with the bytes it saves and the time it costs. Invariant: both
//! numbers are differences of two plans, of which the second lacks this optimisation and is otherwise the same.

use crate::RuntimeError;
use crate::session::{SearchPoint, SearchStage, bounds};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Fuse, Plan, Precision, Program, Sharing, Target, Weights, plan_seconds};
use plimsoll_setting::Setting;
use serde::Serialize;

/// Memory and time of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlanCost {
    /// Peak memory.
    #[serde(rename = "peak_bytes")]
    pub bytes: Bytes,
    /// Expected seconds for each token.
    pub seconds_per_token: f64,
}

/// An optimisation in effect. In reports, [`Effect::saved`] and [`Effect::slower`] are added.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "EffectReport")]
pub struct Effect {
    /// Name of the optimisation.
    pub name: String,
    /// The plan without it, in words or as the flags that request it.
    pub instead: String,
    /// The plan with the optimisation.
    pub with: PlanCost,
    /// The plan without it.
    pub without: PlanCost,
}

impl Effect {
    /// Bytes that the optimisation saves; negative if it takes memory to save time.
    pub fn saved(&self) -> i128 {
        i128::from(self.without.bytes.0) - i128::from(self.with.bytes.0)
    }

    /// Time that the optimisation costs, relative to the plan without it; negative if it saves time.
    pub fn slower(&self) -> f64 {
        self.with.seconds_per_token / self.without.seconds_per_token - 1.0
    }

    /// Whether the plans differ in memory or time.
    pub fn is_any(&self) -> bool {
        self.with != self.without
    }
}

/// Expected seconds of one full step of a plan.
pub fn seconds(program: &Program, plan: &Plan) -> f64 {
    plan_seconds(plan, program.target(), plan.graph.bounds.full())
}

/// The sharing of memory between values, which every plan has; `with` is the cost of the program.
pub fn sharing(program: &Program, with: PlanCost) -> Result<Vec<Effect>, RuntimeError> {
    let kinds = [
        (
            Sharing::Lifetimes,
            "values share memory when their lifetimes do not overlap",
            "every value at its own addresses",
        ),
        (Sharing::Operands, "results in place of operands", "every result at other addresses"),
        (Sharing::States, "states updated in place", "new states computed at other addresses, then copied"),
    ];
    kinds
        .into_iter()
        .map(|(sharing, name, instead)| {
            let without = PlanCost { bytes: program.peak_without(sharing)?, ..with };
            Ok(Effect { name: name.to_owned(), instead: instead.to_owned(), with, without })
        })
        .collect()
}

/// The optimisations in effect in `program`, a program of a stage of inference. `stage` returns the stage with a number format,
/// of which `precision` is in use, and `target` the target of one of several replicas. Sizes of a step are held: a plan
/// without an optimisation has as many tokens, but may exceed the budget.
pub fn of_stage<'a>(
    stage: &dyn Fn(Precision) -> SearchStage<'a>,
    precision: Precision,
    target: &dyn Fn(usize) -> Result<Target, RuntimeError>,
    program: &Program,
) -> Result<Vec<Effect>, RuntimeError> {
    let present = PlanVariant {
        fuse: None,
        precision,
        weights: program.weights(),
        replicas: program.replicas(),
        depth: program.depth(),
    };
    let mut variants: Vec<(String, String, PlanVariant)> = vec![
        (
            "fused ops".to_owned(),
            "every op of the model by itself".to_owned(),
            PlanVariant { fuse: Some(Fuse::Nothing), ..present },
        ),
        (
            "fused ops that need kernels of this target".to_owned(),
            "only the fusions of every target".to_owned(),
            PlanVariant { fuse: Some(Fuse::Ops), ..present },
        ),
    ];
    if precision != Precision::F32 {
        variants.push((
            format!("precision {}", precision.name()),
            Setting::Precision.to("f32").to_string(),
            PlanVariant { precision: Precision::F32, ..present },
        ));
    }
    if program.is_streamed() {
        variants.push((
            "weights streamed from disk".to_owned(),
            Setting::StreamWeights.to("never").to_string(),
            PlanVariant { weights: Weights::Resident, ..present },
        ));
    }
    if present.replicas > 1 {
        variants.push((
            format!("{} replicas that share the weights", present.replicas),
            "one replica with all threads".to_owned(),
            PlanVariant { replicas: 1, ..present },
        ));
    }
    if present.depth > 1 {
        variants.push((
            format!("{} steps in flight (their overlap is not in the expected time)", present.depth),
            "one step at a time".to_owned(),
            PlanVariant { depth: 1, ..present },
        ));
    }
    let tokens = bounds::tokens(program);
    let with = cost(program);
    let mut effects = sharing(program, with)?;
    for (name, instead, variant) in variants {
        let target = target(variant.replicas)?;
        let without = variant.cost(stage(variant.precision), &target, tokens)?;
        effects.push(Effect { name, instead, with, without });
    }
    effects.retain(Effect::is_any);
    Ok(effects)
}

/// A plan of a stage that differs from the program in one choice.
#[derive(Clone, Copy)]
struct PlanVariant {
    /// The fusions; `None` for those of the stage's policy.
    fuse: Option<Fuse>,
    precision: Precision,
    weights: Weights,
    replicas: usize,
    depth: usize,
}

impl PlanVariant {
    /// Plans the variant for steps of `tokens` tokens.
    fn cost(self, mut stage: SearchStage<'_>, target: &Target, tokens: u64) -> Result<PlanCost, RuntimeError> {
        if let Some(fuse) = self.fuse {
            stage.parts.iter_mut().for_each(|part| part.policy.fuse = fuse);
        }
        let point = SearchPoint { target, depth: self.depth, replicas: self.replicas };
        Ok(cost(&stage.program(&point, tokens, self.weights, &mut |_, _| {})?))
    }
}

/// Memory of a program, and its time for each token; replicas compute at the same time.
fn cost(program: &Program) -> PlanCost {
    let tokens = bounds::tokens(program) * program.replicas() as u64;
    PlanCost { bytes: program.peak(), seconds_per_token: program.seconds() / tokens.max(1) as f64 }
}

/// The form of an [`Effect`] in reports.
#[derive(Serialize)]
struct EffectReport {
    optimisation: String,
    instead: String,
    saved_bytes: i64,
    slower: f64,
    with: PlanCost,
    without: PlanCost,
}

impl From<Effect> for EffectReport {
    fn from(effect: Effect) -> Self {
        let saved_bytes = effect.saved() as i64;
        let slower = effect.slower();
        let Effect { name, instead, with, without } = effect;
        Self { optimisation: name, instead, saved_bytes, slower, with, without }
    }
}

/// The effects as a table, those that save most first.
pub fn to_text(effects: &[Effect]) -> String {
    let mut sorted: Vec<&Effect> = effects.iter().collect();
    sorted.sort_by_key(|effect| std::cmp::Reverse(effect.saved()));
    let head = ["optimisation", "without it", "saves", "time"].map(str::to_owned);
    let rows: Vec<[String; 4]> = std::iter::once(head)
        .chain(sorted.iter().map(|effect| {
            [
                effect.name.clone(),
                effect.instead.clone(),
                signed_bytes(effect.saved()),
                time_change(effect.slower()),
            ]
        }))
        .collect();
    let [name, instead, saved, slower] =
        [0, 1, 2, 3].map(|k: usize| rows.iter().map(|row| row[k].chars().count()).max().unwrap_or(0));
    let mut text = "optimisations in effect, each planned with and without it:\n".to_owned();
    for [a, b, c, d] in &rows {
        text += &format!("  {a:<name$}  {b:<instead$}  {c:>saved$}  {d:>slower$}\n");
    }
    text
}

fn signed_bytes(n: i128) -> String {
    let magnitude = Bytes(u64::try_from(n.unsigned_abs()).unwrap_or(u64::MAX));
    if n < 0 { format!("-{magnitude}") } else { magnitude.to_string() }
}

/// A relative change of time in percent; `same` if it would round to zero.
fn time_change(slower: f64) -> String {
    if slower.abs() < 0.000_05 { "same".to_owned() } else { format!("{:+.2} %", 100.0 * slower) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_what_saves_most_first() {
        let cost = |bytes, seconds_per_token| PlanCost { bytes: Bytes(bytes), seconds_per_token };
        let effect = |name: &str, with, without| Effect {
            name: name.to_owned(),
            instead: "none".to_owned(),
            with,
            without,
        };
        let effects = [
            effect("more replicas", cost(3000, 1.0), cost(1000, 2.0)),
            effect("fused ops", cost(1000, 1.0), cost(2500, 1.25)),
            effect("shared memory", cost(1000, 1.0), cost(9000, 1.0)),
        ];
        let wanted = "\
optimisations in effect, each planned with and without it:
  optimisation   without it     saves      time
  shared memory  none         8 000 B      same
  fused ops      none         1 500 B  -20.00 %
  more replicas  none        -2 000 B  -50.00 %
";
        assert_eq!(to_text(&effects), wanted);
        let json = crate::report::to_json(&effects);
        assert_eq!(json[0]["saved_bytes"], -2000);
        assert_eq!(json[0]["slower"], -0.5);
        assert_eq!(json[2]["without"]["peak_bytes"], 9000);
    }
}
