//! Health of a run: how close its memory is to its limits. Invariant: a function of readings and of the plan alone, so the
//! same readings give the same health.

use crate::Budget;
use crate::leak::Leak;
use crate::machine::Reading;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Remedy};
use serde::Serialize;

/// How close a run is to its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// Nothing to do.
    #[default]
    Ok,
    /// Little memory is left, or host memory grows with every step.
    Tight,
    /// The budget is exceeded, or almost no memory is left for what the run still needs.
    Critical,
}

impl HealthStatus {
    /// Word for the status in files.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Tight => "tight",
            Self::Critical => "critical",
        }
    }
}

/// The planned memory of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlannedMemory {
    /// The memory budget: of the process on a CPU, of the memory of the GPU on a GPU.
    pub budget: Bytes,
    /// The planned peak.
    pub peak: Bytes,
    /// Bytes of the arenas that the run holds.
    pub held: Bytes,
    /// Share of the planned memory that is lost to packing, see [`plimsoll_plan::Program::packing_waste`].
    pub fragmentation: f64,
}

impl PlannedMemory {
    /// The planned memory of a program under a budget, with the entries of the process where both are in host memory.
    pub fn of(program: &Program, budget: &Budget) -> Self {
        Self {
            budget: budget.bytes,
            peak: program.peak() + budget.process_bytes(),
            held: program.all_arenas_bytes(),
            fragmentation: program.packing_waste(),
        }
    }
}

/// Health of a run at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Health {
    /// How close the run is to its limits.
    pub status: HealthStatus,
    /// Measured memory divided by the budget: resident memory of the process on a CPU, memory of the process on the
    /// card on a GPU.
    pub utilisation: f64,
    /// Risk, from 0 to 1, that memory runs out: the larger of two shares. The first is the memory that the run still
    /// takes (the rest of the plan, and [`LEAK_STEPS`] steps of a leak) in the free memory; the second is the used
    /// share of all memory, 0 up to [`PRESSURE`] and 1 where all is used, because other processes grow too.
    pub oom_risk: f64,
}

/// Steps of a leak that count as memory that the run still takes.
pub const LEAK_STEPS: u64 = 1000;

/// Share of all memory in use from which others are a risk.
pub const PRESSURE: f64 = 0.9;

/// Utilisation above which a run is tight.
const TIGHT_UTILISATION: f64 = 0.97;

/// Risks from which a run is tight, and critical.
const RISKS: [f64; 2] = [0.5, 0.9];

impl Health {
    /// The health of a run with these readings.
    pub fn of(planned: &PlannedMemory, reading: &Reading, leak: Option<Leak>) -> Self {
        let (used, limits) = match &reading.card {
            Some(card) => (card.process, card.all),
            None => (reading.process, reading.host),
        };
        let utilisation = ratio(used, planned.budget);
        let leaked = leak.map_or(0, |leak| leak.bytes_per_step * LEAK_STEPS);
        let rest = planned.peak.saturating_sub(used);
        // A leak is of host memory; on a CPU the plan is in the same memory.
        let needs = match &reading.card {
            Some(_) => ratio(rest, limits.free).max(ratio(Bytes(leaked), reading.host.free)),
            None => ratio(rest + Bytes(leaked), limits.free),
        };
        let pressure = pressure(limits.share()).max(pressure(reading.host.share()));
        let oom_risk = needs.min(1.0).max(pressure);
        let status = if utilisation > 1.0 || oom_risk >= RISKS[1] {
            HealthStatus::Critical
        } else if utilisation > TIGHT_UTILISATION || oom_risk >= RISKS[0] || leak.is_some() {
            HealthStatus::Tight
        } else {
            HealthStatus::Ok
        };
        Self { status, utilisation, oom_risk }
    }

    /// The worse of two states, in each field.
    pub fn worse(self, other: Self) -> Self {
        Self {
            status: self.status.max(other.status),
            utilisation: self.utilisation.max(other.utilisation),
            oom_risk: self.oom_risk.max(other.oom_risk),
        }
    }
}

/// Risk from the memory of all processes, of which `used_share` is in use: 0 up to [`PRESSURE`], 1 where all is used.
fn pressure(used_share: f64) -> f64 {
    ((used_share - PRESSURE) / (1.0 - PRESSURE)).clamp(0.0, 1.0)
}

/// `part` divided by `whole`; 0 for nothing, and at most a million if there is no whole.
fn ratio(part: Bytes, whole: Bytes) -> f64 {
    if part == Bytes::ZERO { 0.0 } else { (part.0 as f64 / whole.0.max(1) as f64).min(1e6) }
}

/// Health of a whole run, for its record: the worst state of its readings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HealthRecord {
    /// The worst state.
    #[serde(flatten)]
    pub worst: Health,
    /// The leak of host memory that was found.
    pub leak: Option<Leak>,
    /// Share of the planned memory that is lost to packing.
    pub fragmentation: f64,
    /// Settings that would need less memory, the fastest first; empty if the status is ok.
    pub recommendations: Vec<Recommendation>,
}

/// A setting that would need less memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Settings to give.
    pub setting: String,
    /// Bytes that the setting saves against the plan in use.
    pub saves_bytes: Bytes,
    /// Relative slowdown per token against the plan in use: 0.008 is 0.8 % slower.
    pub slower: f64,
    /// The recommendation in words, such as `optimizer.kind=adamw8bit saves 1.3 GB, +2 % time`.
    pub text: String,
}

impl From<Remedy> for Recommendation {
    fn from(remedy: Remedy) -> Self {
        let setting = remedy.words();
        let Remedy { saves, slower, .. } = remedy;
        let text = format!("{setting} saves {}, {:+.0} % time", saves.rounded(), 100.0 * slower);
        Self { setting, saves_bytes: saves, slower, text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::CardReading;
    use crate::report::to_json;
    use plimsoll_exec::memory::Memory;
    use plimsoll_setting::Setting;
    use serde_json::{Value, json};

    const GB: u64 = 1_000_000_000;

    fn in_use(used: u64, total: u64) -> Memory {
        Memory { free: Bytes((total - used) * GB), total: Bytes(total * GB) }
    }

    fn planned(budget: u64, peak: u64) -> PlannedMemory {
        PlannedMemory { budget: Bytes(budget * GB), peak: Bytes(peak * GB), ..PlannedMemory::default() }
    }

    /// A leak with this growth in GB over [`LEAK_STEPS`] steps.
    fn leak(gb: u64) -> Leak {
        Leak { found_after: 20, bytes_per_step: gb * GB / LEAK_STEPS }
    }

    #[test]
    fn health_on_a_cpu() {
        use HealthStatus::{Critical, Ok, Tight};
        // (budget, peak, process, (used, total), leak), (status, utilisation, risk)
        for (given, wanted) in [
            ((10, 8, 8, (20, 64), None), (Ok, 0.8, 0.0)),
            // Half of the plan is still to be taken, in 44 GB of free memory.
            ((16, 8, 4, (20, 64), None), (Ok, 0.25, 4.0 / 44.0)),
            ((16, 8, 4, (58, 64), None), (Tight, 0.25, 4.0 / 6.0)),
            ((16, 8, 4, (60, 64), None), (Critical, 0.25, 1.0)),
            ((100, 100, 98, (98, 200), None), (Tight, 0.98, 2.0 / 102.0)),
            ((8, 8, 9, (20, 64), None), (Critical, 1.125, 0.0)),
            // Other processes use almost everything.
            ((10, 8, 8, (96, 100), None), (Tight, 0.8, 0.6)),
            ((10, 8, 8, (100, 100), None), (Critical, 0.8, 1.0)),
            ((10, 8, 8, (24, 64), Some(leak(10))), (Tight, 0.8, 10.0 / 40.0)),
            ((10, 8, 8, (24, 64), Some(leak(40))), (Critical, 0.8, 1.0)),
            ((10, 8, 0, (64, 64), None), (Critical, 0.0, 1.0)),
        ] {
            let (budget, peak, process, (used, total), leak) = given;
            let reading =
                Reading { process: Bytes(process * GB), host: in_use(used, total), ..Reading::default() };
            let found = Health::of(&planned(budget, peak), &reading, leak);
            assert_eq!(found.status, wanted.0, "{given:?}: {found:?}");
            assert!((found.utilisation - wanted.1).abs() < 1e-9, "{given:?}: {found:?}");
            assert!((found.oom_risk - wanted.2).abs() < 1e-9, "{given:?}: {found:?}");
        }
    }

    #[test]
    fn health_on_a_gpu() {
        use HealthStatus::{Critical, Ok, Tight};
        // (process on the card, used of 80 GB of the card, used of 64 GB of the host, leak), (status, utilisation, risk)
        for (given, wanted) in [
            ((70, 70, 10, None), (Ok, 0.875, 0.0)),
            ((60, 70, 10, None), (Critical, 0.75, 1.0)),
            ((35, 35, 10, None), (Tight, 35.0 / 80.0, 35.0 / 45.0)),
            // Another process fills the card.
            ((70, 79, 10, None), (Tight, 0.875, 0.875)),
            ((70, 70, 62, None), (Tight, 0.875, 0.6875)),
            ((70, 70, 24, Some(leak(10))), (Tight, 0.875, 0.25)),
        ] {
            let (process, card, host, leak) = given;
            let card = CardReading { process: Bytes(process * GB), all: in_use(card, 80) };
            let reading = Reading { card: Some(card), host: in_use(host, 64), ..Reading::default() };
            let found = Health::of(&planned(80, 70), &reading, leak);
            assert_eq!(found.status, wanted.0, "{given:?}: {found:?}");
            assert!((found.utilisation - wanted.1).abs() < 1e-9, "{given:?}: {found:?}");
            assert!((found.oom_risk - wanted.2).abs() < 1e-9, "{given:?}: {found:?}");
        }
    }

    #[test]
    fn the_record_has_the_worst_state() {
        let health = |status, utilisation, oom_risk| Health { status, utilisation, oom_risk };
        let worst = health(HealthStatus::Tight, 0.5, 0.6).worse(health(HealthStatus::Ok, 0.9, 0.1));
        assert_eq!(worst, health(HealthStatus::Tight, 0.9, 0.6));
        let remedy = Remedy {
            settings: vec![Setting::key("optimizer.kind").to("adamw8bit")],
            saves: Bytes(1_300_000_000),
            slower: 0.02,
        };
        let recommendation = Recommendation::from(remedy);
        assert_eq!(recommendation.text, "optimizer.kind=adamw8bit saves 1.3 GB, +2 % time");
        let record =
            HealthRecord { worst, leak: None, fragmentation: 0.25, recommendations: vec![recommendation] };
        let json = to_json(&record);
        assert_eq!((&json["status"], &json["leak"]), (&json!("tight"), &Value::Null));
        assert_eq!(json["recommendations"][0]["saves_bytes"], json!(1_300_000_000u64));
    }
}
