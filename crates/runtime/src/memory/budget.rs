//! The memory budget of a run and the process's share of it. Invariant: the budget is read once, so that every plan and
//! every refusal of a run refers to the same number of bytes.

use crate::process::NAME;
use crate::{RuntimeError, machine};
use plimsoll_data::sequence::InputExtent;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Bill, Ledger, LimitKind, PlanError, Program, Room, Staging};
use plimsoll_setting::Setting;
use std::path::PathBuf;

/// The memory budget of a run in bytes, and the memory entries of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Budget of the plans: GPU memory, or on a CPU host memory, against which the process counts too.
    pub bytes: Bytes,
    /// Whether plans are in host memory.
    pub on_host: bool,
    /// Budget of the process in host memory, where plans are in GPU memory; `None` without a limit.
    pub host_memory: Option<Bytes>,
    /// Room for what plans keep outside the arena.
    pub room: Room,
    /// Folder for the scratch files of plans that keep anything on disk.
    pub scratch: PathBuf,
    /// Host memory that the process takes beside the plans, one labelled entry per purpose.
    pub process: Vec<Staging>,
}

impl Budget {
    /// A budget of host memory, with any room on disk and without entries of the process.
    pub fn unlimited(bytes: Bytes) -> Self {
        Self {
            bytes,
            on_host: true,
            host_memory: None,
            room: Room::UNLIMITED,
            scratch: std::env::temp_dir(),
            process: vec![],
        }
    }

    /// Returns this budget with other entries of the process.
    pub fn with(&self, process: Vec<Staging>) -> Self {
        Self { process, ..self.clone() }
    }

    /// Bytes left for plans.
    pub fn for_plans(&self) -> Bytes {
        self.bytes.saturating_sub(self.process_bytes())
    }

    /// Bytes that the process takes of the plans' budget; zero where plans are in GPU memory.
    pub(crate) fn process_bytes(&self) -> Bytes {
        if self.on_host { self.process.iter().map(|line| line.bytes).sum() } else { Bytes::ZERO }
    }

    /// The budget of host memory; `None` without a limit.
    pub fn of_host(&self) -> Option<Bytes> {
        if self.on_host { Some(self.bytes) } else { self.host_memory }
    }

    /// Record sizes to plan for where the input is a pipe, whose size cannot be measured: a 64th of the host budget for
    /// the longest record, a 16th for the names of all records. `None` without a host budget.
    pub fn of_pipe(&self) -> Option<InputExtent> {
        let budget = self.of_host()?;
        // 1 KiB for each 4 GiB of the budget; names of real records are far shorter.
        let longest_name = (budget.0 >> 22).clamp(64, 4096);
        Some(InputExtent {
            records: budget.0 / 16 / NAME,
            longest: budget.0 / 64,
            name: String::new(),
            longest_name,
            longest_title: 16 * longest_name,
        })
    }

    /// Adds the entries of the process to a refusal of plans in host memory.
    pub fn with_process(&self, error: PlanError) -> PlanError {
        match error {
            PlanError::OverBudget(bill) if self.on_host => PlanError::OverBudget(Box::new(self.billed(*bill))),
            other => other,
        }
    }

    fn billed(&self, mut bill: Bill) -> Bill {
        // `bill.budget` is what was left for plans, possibly nothing; the refusal states the whole budget instead.
        bill.budget = self.bytes;
        self.add_lines(&mut bill.ledger);
        bill
    }

    fn add_lines(&self, ledger: &mut Ledger) {
        for line in &self.process {
            ledger.add(&format!("process: {}", line.label), line.bytes);
        }
    }

    /// Checks a run without a plan: refuses `what` if the entries of the process exceed the host budget.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the entries of the process.
    pub fn admits_process(&self, what: &str) -> Result<(), RuntimeError> {
        let Some(budget) = self.of_host() else { return Ok(()) };
        let mut ledger = Ledger::new();
        self.add_lines(&mut ledger);
        if ledger.total() <= budget {
            return Ok(());
        }
        let budget_setting = if self.on_host { Setting::MemoryBudget } else { Setting::HostMemory };
        Err(PlanError::OverBudget(Box::new(Bill {
            space: "host".to_owned(),
            line: LimitKind::Budget,
            budget,
            ledger,
            peak_at: what.to_owned(),
            seconds_per_token: 0.0,
            memory: Bytes::ZERO,
            budget_setting,
            notes: vec![],
            remedies: vec![],
        }))
        .into())
    }

    /// Checks, before the first step, the peak memory of the process so far, which includes planning and loading
    /// weights. On a GPU the budget is `--host-memory`, and the sum of the memory held, the queues, and the values in
    /// transit (`kept`) must be within it.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the memory that the process held.
    pub fn admits_held(&self, program: &Program, kept: Bytes) -> Result<(), RuntimeError> {
        let (_, peak) = machine::resident();
        if self.process.is_empty() {
            return Ok(());
        }
        let bill = match (self.on_host, self.host_memory) {
            (true, _) => {
                let mut bill = self.billed(program.bill(self.bytes, vec![]));
                // The entries that were already allocated in full are part of the measured peak, so only the excess
                // is added.
                let total = bill.ledger.total();
                bill.ledger.add("process: held while it planned and loaded", peak.saturating_sub(total));
                (peak > self.bytes).then_some(bill)
            }
            (false, None) => None,
            (false, Some(line)) => {
                let mut ledger = Ledger::new();
                ledger.add("process: held by now, the driver included", peak);
                self.add_lines(&mut ledger);
                ledger.add("process: values on their way", kept);
                let mut bill = program.bill(line, vec![]);
                (bill.space, bill.peak_at) = ("host".to_owned(), "the end of loading".to_owned());
                (bill.ledger, bill.budget_setting) = (ledger, Setting::HostMemory);
                (bill.ledger.total() > line).then_some(bill)
            }
        };
        bill.map_or(Ok(()), |bill| Err(PlanError::OverBudget(Box::new(bill)).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessMemory;

    #[test]
    fn the_process_takes_its_part_of_the_budget() {
        let mut process = ProcessMemory::default();
        process.add("heap", 70);
        process.add("nothing", 0);
        let budget = |bytes| Budget::unlimited(Bytes(bytes)).with(process.lines.clone());
        assert_eq!((budget(100).process_bytes(), budget(100).for_plans()), (Bytes(70), Bytes(30)));
        assert_eq!(budget(50).for_plans(), Bytes::ZERO);
        let mut more = ProcessMemory { lines: process.lines.clone() };
        more.add("stacks", 30);
        let left: Vec<u64> = more.beyond(Bytes(80)).iter().map(|line| line.bytes.0).collect();
        assert_eq!(left, [20]);
    }
}
