//! Writer of VirNucPro's two result files. Invariant: for equal scores the bytes equal the output of VirNucPro's
//! `prediction.py`: rows, their order and the format of numbers.
//!
//! `prediction_results.txt` has one row per open reading frame, in input order.
//! `prediction_results_highestscore.csv` is separated by tabs despite its name; it has one row per window
//! (window) with a scored open reading frame, sorted by name as text (`_chunk_10` before `_chunk_2`).

use super::verdict::{Consensus, label};
use crate::output::sorted::{SortLimits, Sorter};
use crate::output::table::{Field, TableWriter};
use crate::output::{OrfScore, OutputError};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::number::NumpyF32;
use std::path::{Path, PathBuf};

/// Name of the file with one row per open reading frame.
pub(crate) const ROWS: &str = "prediction_results.txt";
/// Name of the file with one row per window.
pub(crate) const CONSENSUS: &str = "prediction_results_highestscore.csv";

/// Writer of both files.
#[derive(Debug)]
pub(crate) struct VirNucProTables {
    folder: PathBuf,
    rows: TableWriter,
    consensus: Sorter,
    /// Reused buffer for a line of the second file.
    line: String,
}

impl VirNucProTables {
    /// Creates the files in `folder`; `sort_bytes` of lines are sorted in memory.
    pub(crate) fn create(folder: &Path, sort_bytes: usize) -> Result<Self, OutputError> {
        let mut consensus = Sorter::new(folder, SortLimits::default());
        consensus.set_sort_bytes(sort_bytes);
        Ok(Self {
            folder: folder.to_owned(),
            rows: TableWriter::create(folder, ROWS, "Sequence_ID\tPrediction\tscore1\tscore2")?,
            consensus,
            line: String::new(),
        })
    }

    /// Adds the window `name`, which has at least one scored frame, with its consensus.
    pub(crate) fn window(
        &mut self,
        name: &str,
        orfs: &[OrfScore],
        consensus: &Consensus,
    ) -> Result<(), OutputError> {
        use std::fmt::Write as _;
        let name = Field(name);
        for OrfScore { frame, scores } in orfs {
            let [other, virus] = scores.map(NumpyF32);
            let label = label(*scores);
            self.rows.row(format_args!("{name}{}\t{label}\t{other}\t{virus}", frame.name()))?;
        }
        self.line.clear();
        let is_virus = if consensus.is_virus() { "True" } else { "False" };
        // Writing to a String cannot fail. `Field` escapes control characters, so the tab is less than every
        // character of a name, and lines sort in the order of their names.
        let _ = write!(self.line, "{name}\t{is_virus}");
        Ok(self.consensus.push(self.line.as_bytes())?)
    }

    /// Sorts and writes the second file; returns both files, ready to be committed.
    ///
    /// # Errors
    /// Two results for one window; a file that cannot be written or read.
    pub(crate) fn finish(self) -> Result<[AtomicFile; 2], OutputError> {
        let mut table = TableWriter::create(&self.folder, CONSENSUS, "Modified_ID\tIs_Virus")?;
        let mut last: Vec<u8> = Vec::new();
        self.consensus.finish(|line| {
            let name = line.split(|&b| b == b'\t').next().unwrap_or_default();
            if name == last {
                return Err(OutputError::mismatch(
                    &String::from_utf8_lossy(name),
                    "two results for this chunk",
                ));
            }
            last.clear();
            last.extend_from_slice(name);
            table.line(line)
        })?;
        Ok([self.rows.into_file(), table.into_file()])
    }
}
