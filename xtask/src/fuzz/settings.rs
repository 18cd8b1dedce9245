//! Settings of training: one or two keys of a small configuration get extreme values, and the configuration is planned and
//! opened as a run does. Invariant: no value makes the planner panic, take long or hold much memory; an accepted plan fits its
//! budget and holds every parameter.

use super::{CaseResult, FormatTally, FuzzRequest, Random, Watchdog, measured, messages, overwrite};
use crate::io_error;
use plimsoll_graph::limits::{MAX_GRAPH, MAX_ROWS};
use plimsoll_graph::{Bytes, Dim};
use plimsoll_plan::{Program, Target};
use plimsoll_runtime::{Device, Silent};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::config::schema::{leaves, schema};
use plimsoll_train::{open, priced};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the row among the formats.
pub const NAME: &str = "settings";

/// Maximum heap memory of a case in bytes: of the configurations, of the plans and of the data of a run.
const ALLOWED: u64 = 512 << 20;

/// Budget of the plans for this machine.
const BUDGET: &str = "96MB";

/// Longest accepted text of an error: a bill has several lines.
const LONGEST_ERROR: usize = 1 << 14;

/// Configurations whose keys are changed; DATA stands for the folder of examples.
const BASES: [&str; 4] = [
    "model: {kind: moe_lm, hidden: 16, layers: 2, heads: 2, intermediate: 16, experts: {count: 3, top_k: 2}}
data: {train: [DATA/corpus.txt], longest: 16}
batch: {tokens: 64}
run: {steps: 4}
",
    "model: {kind: dense_lm, hidden: 16, layers: 6, heads: 2, intermediate: 16}
data: {train: [DATA/corpus.txt], longest: 16}
batch: {tokens: 64, micro_tokens: 32}
optimizer: {kind: auto}
memory: {remat: every_n, loss_chunk: 8}
run: {steps: 4, evaluate_every: 2}
",
    "model: {kind: head, hidden: 16}
data: {train: [DATA/head/dna.npy], proteins: [DATA/head/proteins.npy], labels: DATA/head/labels.tsv}
batch: {tokens: 32, pack_tokens: 16}
run: {steps: 4}
",
    "model: {kind: moe_lm, hidden: 16, layers: 2, heads: 2, intermediate: 16, experts: {count: 2}}
data: {train: [DATA/corpus.txt], longest: 8}
batch: {tokens: 64}
memory: {dynamic: {}}
run: {steps: 4}
",
];

/// Values as they are written in a file.
const VALUES: [&str; 40] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "127",
    "1000",
    "1024",
    "65536",
    "1048576",
    "16777216",
    "1000000000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1000000000000",
    "1099511627776",
    "9007199254740991",
    "9007199254740992",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "1e-400",
    "1e-45",
    "1e308",
    "1e999",
    ".nan",
    ".inf",
    "\"\"",
    "null",
    "[]",
    "[1, 9223372036854775807]",
    "true",
    "auto",
];

/// Keys that name a model, which is looked up on the hub.
const EXCLUDED: [&str; 1] = ["model.from"];

/// One configuration, with the machine that it is planned for.
struct SettingsCase {
    base: &'static str,
    flags: Vec<String>,
    /// Name of a target with its budget, in place of this machine and [`BUDGET`].
    target: Option<&'static str>,
    /// Whether a plan for this machine is also opened as a run.
    opens: bool,
}

impl SettingsCase {
    fn of(random: &mut Random, keys: &[String]) -> Self {
        let mut flags = vec![];
        for _ in 0..if random.once_in(3) { 2 } else { 1 } {
            flags.push(format!("{}={}", random.pick(keys), random.pick(&VALUES)));
        }
        let target = random.once_in(4).then_some("h200");
        Self { base: *random.pick(&BASES), flags, target, opens: random.once_in(3) }
    }

    /// The case as text, from which it can be made by hand.
    fn text(&self) -> String {
        let target = self.target.unwrap_or("cpu");
        format!(
            "# --target {target}, opened: {}\n{}# --set {}\n",
            self.opens,
            self.base,
            self.flags.join(" --set ")
        )
    }

    /// Whether a flag of the case sets the key.
    fn sets(&self, key: &str) -> bool {
        self.flags.iter().any(|flag| flag.starts_with(key))
    }

    /// Plans the configuration, and opens it; `Err` is a finding.
    fn check(&self, root: &Path) -> Result<CaseResult, String> {
        let text = self.base.replace("DATA", &root.join("examples").display().to_string());
        let budget = if self.target.is_some() { "100%" } else { BUDGET };
        let own = (!self.sets("memory.budget")).then(|| format!("memory.budget={budget}"));
        let flags: Vec<String> = own.into_iter().chain(self.flags.iter().cloned()).collect();
        let (outcome, peak) = measured(|| -> Result<Result<bool, Vec<String>>, String> {
            let config = match TrainConfig::parse(&text, "settings.yaml", &flags) {
                Ok(config) => config,
                Err(error) => return Ok(Err(messages(&error))),
            };
            let planned = priced::target(&config, self.target.unwrap_or("cpu"))
                .and_then(|target| Ok((priced::found(&config, &target, &mut Silent)?, target)));
            let (found, target) = match planned {
                Ok(found) => found,
                Err(error) => return Ok(Err(messages(&error))),
            };
            let budget = priced::budget(&config, &target).map_err(|error| error.to_string())?;
            believable(&found.program, budget, &target)?;
            if self.opens && self.target.is_none() && !self.sets("memory.budget") {
                return Ok(match open(&config, Device::Cpu, &mut Silent) {
                    Ok(mut run) => run.batches.take(u64::MAX).map(|_| true).map_err(|error| messages(&error)),
                    Err(error) => Err(messages(&error)),
                });
            }
            Ok(Ok(true))
        });
        let accepted = match outcome? {
            Ok(accepted) => accepted,
            Err(texts) => {
                texts.iter().try_for_each(|text| check_text(text))?;
                false
            }
        };
        Ok(CaseResult { accepted, peak, allowed: ALLOWED })
    }
}

/// Checks the sizes of an accepted plan with arithmetic of its own.
fn believable(program: &Program, budget: Bytes, target: &Target) -> Result<(), String> {
    let peak = program.peak();
    if peak > budget {
        return Err(format!("the plan of {peak} exceeds the budget of {budget} on {}", target.name));
    }
    if program.ledger().total() != peak {
        return Err(format!("the ledger has {}, the plan {peak}", program.ledger().total()));
    }
    for (name, plan) in program.plans() {
        let bounds = plan.graph.bounds;
        if bounds.tokens > MAX_ROWS || bounds.sequences > MAX_ROWS {
            return Err(format!("{name} has bounds of {bounds:?}"));
        }
        let mut sum = 0_u128;
        for (v, _, param) in plan.graph.param_values() {
            let spec = plan.graph.spec(v);
            let elements = spec.shape.iter().map(|dim| match *dim {
                Dim::Fixed(n) => u128::from(n),
                Dim::Tokens(k) => u128::from(k) * u128::from(bounds.tokens),
                Dim::Sequences(k) => u128::from(k) * u128::from(bounds.sequences),
                Dim::Packs(k) => u128::from(k) * u128::from(bounds.packs),
            });
            let bytes = elements.product::<u128>() * u128::from(spec.dtype.size());
            let planned = plan.memory.slice(v).map_or(0, |slice| u128::from(slice.bytes.0));
            if planned != bytes {
                return Err(format!("{name}: {} of {spec} has {planned} bytes, and needs {bytes}", param.name));
            }
            sum += bytes;
        }
        if sum > u128::from(peak.0) || peak > MAX_GRAPH {
            return Err(format!("{name}: parameters of {sum} bytes in a peak of {peak}"));
        }
    }
    Ok(())
}

/// Checks the text of an error: printable lines, and not too many.
fn check_text(text: &str) -> Result<(), String> {
    if text.chars().any(|c| c.is_control() && c != '\n') {
        return Err(format!("control characters in a message: {text:?}"));
    }
    match text.len() {
        0 => Err("an error without a text".to_owned()),
        1..=LONGEST_ERROR => Ok(()),
        len => Err(format!("a message of {len} bytes: {}", text.chars().take(200).collect::<String>())),
    }
}

/// The keys whose values are changed.
fn keys() -> Vec<String> {
    let mut keys: Vec<String> = leaves(&schema()).into_iter().map(|leaf| leaf.path).collect();
    keys.retain(|key| !EXCLUDED.contains(&key.as_str()));
    keys
}

/// Runs the cases. Cases with findings are stored under their seed and number.
pub fn try_settings(
    root: &Path,
    request: &FuzzRequest<'_>,
    folder: &Path,
    watch: &Watchdog,
) -> Result<FormatTally, String> {
    fs::create_dir_all(folder).map_err(io_error(folder))?;
    let keys = keys();
    let mut tally = FormatTally::default();
    let path: PathBuf = folder.join("settings.yaml");
    for number in 0..request.count {
        let case = SettingsCase::of(&mut Random::of(request.seed, NAME, number), &keys);
        overwrite(&path, case.text().as_bytes()).map_err(io_error(folder))?;
        if let Err(what) = tally.run_case(&path, watch, case.text().len(), || case.check(root)) {
            let saved = folder.join(format!("found-{}-{number}", request.seed));
            fs::write(&saved, case.text()).map_err(io_error(folder))?;
            tally.findings.push(format!("{}: {what}: {}", saved.display(), case.flags.join(" ")));
        }
        if tally.is_given_up() {
            break;
        }
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bases themselves are planned and opened; otherwise the fuzzer would test nothing.
    #[test]
    fn bases_are_accepted() {
        for base in BASES {
            for target in [None, Some("h200")] {
                let case = SettingsCase { base, flags: vec![], target, opens: true };
                let result = case.check(&crate::root()).unwrap_or_else(|finding| panic!("{finding}"));
                assert!(result.accepted && result.peak < ALLOWED, "{base} {target:?}: {}", result.peak);
            }
        }
    }

    /// The settings that planned sizes modulo 2^64.
    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let keys = ["batch.tokens", "model.hidden", "model.intermediate", "data.longest", "model.vocabulary"];
        for base in BASES {
            for key in keys {
                for value in ["1000000000000000000", "4611686018427387904", "9223372036854775807"] {
                    let flags = vec![format!("{key}={value}")];
                    let case = SettingsCase { base, flags, target: None, opens: false };
                    let result = case.check(&crate::root()).unwrap_or_else(|finding| panic!("{finding}"));
                    assert!(!result.accepted, "{base} {key}={value}");
                }
            }
        }
    }
}
