//! The memory budget of a run, and what of it the process itself takes. Invariant: the budget is read once, so that every
//! plan and every refusal of a run is about the same number of bytes.

use crate::process::NAME;
use crate::{RuntimeError, machine};
use data::sequence::Extent;
use graph::Bytes;
use plan::{Bill, Ledger, Line, PlanError, Program, Staging};

/// The memory budget of a run in bytes, and the lines of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The budget of plans: of the card's memory, or on a CPU of the host's, where the process counts against it too.
    pub bytes: Bytes,
    /// Whether plans are in the host's memory.
    pub on_host: bool,
    /// The budget of the process, where plans are in a card's memory and the host has a budget of its own.
    pub host_memory: Option<Bytes>,
    /// What the process itself takes of the host's memory beside plans: a line of the bill for each.
    pub process: Vec<Staging>,
}

impl Budget {
    /// The same budget with these lines of the process.
    pub fn with(&self, process: Vec<Staging>) -> Self {
        Self { process, ..self.clone() }
    }

    /// The bytes that are left for plans.
    pub fn for_plans(&self) -> Bytes {
        self.bytes.saturating_sub(self.process_bytes())
    }

    /// The bytes that the process takes of the budget of plans: none where plans are in a card's memory.
    pub fn process_bytes(&self) -> Bytes {
        match self.on_host {
            true => self.process.iter().map(|line| line.bytes).sum(),
            false => Bytes::ZERO,
        }
    }

    /// The budget of the host's memory, where there is one.
    pub fn of_host(&self) -> Option<Bytes> {
        if self.on_host { Some(self.bytes) } else { self.host_memory }
    }

    /// The largest records that are planned for where the input is a pipe, which cannot be measured: a 64th of the host's
    /// budget for the longest record, a 16th for the names of all. `None` without a budget of the host.
    pub fn of_pipe(&self) -> Option<Extent> {
        let line = self.of_host()?;
        let name = (line.0 >> 22).clamp(64, 4096);
        Some(Extent {
            records: line.0 / 16 / NAME,
            longest: line.0 / 64,
            name: String::new(),
            longest_name: name,
            longest_title: 16 * name,
        })
    }

    /// Adds the lines of the process to a refusal of plans that share the host's memory with it.
    pub fn with_process(&self, error: PlanError) -> PlanError {
        match error {
            PlanError::OverBudget(bill) if self.on_host => PlanError::OverBudget(Box::new(self.billed(*bill))),
            other => other,
        }
    }

    fn billed(&self, mut bill: Bill) -> Bill {
        // What was left for plans may be nothing, of a budget that is less than the process.
        bill.budget = self.bytes;
        self.add_lines(&mut bill.ledger);
        bill
    }

    fn add_lines(&self, ledger: &mut Ledger) {
        for line in &self.process {
            ledger.add(&format!("process: {}", line.label), line.bytes);
        }
    }

    /// Checks a run that plans nothing: `what` is refused where the lines of the process are more than the host may take.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the lines of the process.
    pub fn admits_process(&self, what: &str) -> Result<(), RuntimeError> {
        let Some(budget) = self.of_host() else { return Ok(()) };
        let mut ledger = Ledger::new();
        self.add_lines(&mut ledger);
        if ledger.total() <= budget {
            return Ok(());
        }
        let budget_flag = if self.on_host { "--memory-budget" } else { "--host-memory" };
        Err(PlanError::OverBudget(Box::new(Bill {
            space: "host".to_owned(),
            line: Line::Budget,
            budget,
            ledger,
            peak_at: what.to_owned(),
            seconds_per_token: 0.0,
            memory: Bytes::ZERO,
            budget_flag,
            notes: vec![],
            remedies: vec![],
        }))
        .into())
    }

    /// Checks before the first step what the process has held so far, such as while it planned and loaded weights. On a
    /// card the budget is `--host-memory`: what the process holds by now, its queues, and the values on their way (`kept`)
    /// must be within it.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with what the process held.
    pub fn admits_held(&self, program: &Program, kept: Bytes) -> Result<(), RuntimeError> {
        let (_, peak) = machine::resident();
        if self.process.is_empty() {
            return Ok(());
        }
        let bill = match (self.on_host, self.host_memory) {
            (true, _) => {
                let mut bill = self.billed(program.bill(self.bytes, vec![]));
                // What was there in its full size by then is part of it.
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
                (bill.ledger, bill.budget_flag) = (ledger, "--host-memory");
                (bill.ledger.total() > line).then_some(bill)
            }
        };
        bill.map_or(Ok(()), |bill| Err(PlanError::OverBudget(Box::new(bill)).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;

    #[test]
    fn the_process_takes_its_part_of_the_budget() {
        let mut process = Process::default();
        process.add("heap", 70);
        process.add("nothing", 0);
        let budget = |bytes| Budget {
            bytes: Bytes(bytes),
            on_host: true,
            host_memory: None,
            process: process.lines.clone(),
        };
        assert_eq!((budget(100).process_bytes(), budget(100).for_plans()), (Bytes(70), Bytes(30)));
        assert_eq!(budget(50).for_plans(), Bytes::ZERO);
        let mut more = Process { lines: process.lines.clone() };
        more.add("stacks", 30);
        let left: Vec<u64> = more.beyond(Bytes(80)).iter().map(|line| line.bytes.0).collect();
        assert_eq!(left, [20]);
    }
}
