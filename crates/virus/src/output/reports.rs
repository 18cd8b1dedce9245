//! Report files for workflow tools: a table and a bar graph for MultiQC, and `versions.yml` for nf-core pipelines.
//! Invariant: the files contain counts and no durations, so two runs over the same input write the same bytes.
//!
//! - MultiQC finds the files by the suffix `_mqc.tsv`, parses the lines that start with `#` as YAML, and merges
//!   the rows of all runs whose files have the same `id`. The first column is the sample name.
//! - `versions.yml` maps the process name to tool versions, as nf-core modules write it.

use super::table::{Field, TableWriter};
use super::{OutputError, ResultCounts};
use crate::pipeline::record::RunRecord;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::sequence::stem;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// Name of the MultiQC table of counts.
pub const MULTIQC: &str = "plimsoll_mqc.tsv";
/// Name of the MultiQC bar graph of calls.
pub const MULTIQC_CALLS: &str = "plimsoll_calls_mqc.tsv";
/// Name of the file with the program's version.
pub const VERSIONS: &str = "versions.yml";

const PARENT: &str = "\
# parent_id: plimsoll
# parent_name: Plimsoll
# parent_description: tells for every sequence whether it comes from a virus.
# file_format: tsv
";

/// Columns of the table: name, title and description. A name is a field name of [`ResultCounts`], or `failed`.
const COLUMNS: [[&str; 3]; 11] = [
    ["records", "Records", "Sequences of the input"],
    ["windows", "Windows", "Windows that they were cut into"],
    ["scored_windows", "Scored windows", "Windows with a scored open reading frame"],
    ["orfs", "ORFs", "Scored open reading frames"],
    ["failed", "Failed ORFs", "Open reading frames that could not be computed"],
    ["virus", "Virus", "Sequences called virus"],
    ["other", "Other", "Sequences called other"],
    ["no_call", "No call", "Sequences without a scored window"],
    ["skipped", "Skipped", "Sequences without letters"],
    ["untrained", "Untrained", "Sequences seen by untrained weights, which call nothing"],
    ["notes", "Notes", "Rows of notes.tsv"],
];

/// Categories of the bar graph: name of the field of [`ResultCounts`], title and colour. Colours are fixed, so that
/// they are equal in all reports.
const CALLS: [[&str; 3]; 5] = [
    ["virus", "Virus", "#d95f02"],
    ["other", "Other", "#1f78b4"],
    ["no_call", "No call", "#b3b3b3"],
    ["skipped", "Skipped", "#636363"],
    ["untrained", "Untrained", "#e6c229"],
];

/// Writes the three files and returns them, ready to be committed. The sample name is the stem of the first
/// input in the run record.
pub fn write(
    folder: &Path,
    run_record: &RunRecord,
    counts: &ResultCounts,
) -> Result<[AtomicFile; 3], OutputError> {
    let first = run_record.inputs.first().map_or("-", String::as_str);
    let failed = run_record.sequences.failed;
    let sample = first_cell(&stem(Path::new(first)));
    let summary = sample.clone() + &cells(&COLUMNS, *counts, failed);
    let calls = sample + &cells(&CALLS, *counts, failed);
    Ok([
        table(folder, MULTIQC, &header_of_counts(), &summary)?,
        table(folder, MULTIQC_CALLS, &header_of_calls(), &calls)?,
        versions(folder)?,
    ])
}

/// The counts of the columns, each with a tab before it.
fn cells(columns: &[[&str; 3]], mut counts: ResultCounts, failed: u64) -> String {
    let fields = counts.fields_mut();
    let mut cells = String::new();
    for [column, ..] in columns {
        // `failed` is the only column that is not a field of `ResultCounts` (see the test `every_count_has_a_column`).
        let count = fields.iter().find(|(name, _)| name == column).map_or(failed, |(_, count)| **count);
        // Writing to a String cannot fail.
        let _ = write!(cells, "\t{count}");
    }
    cells
}

/// Formats a sample name as the first cell of a row, in quotes if it starts with `#`: MultiQC would parse the
/// row as a comment.
fn first_cell(sample: &str) -> String {
    let field = Field(sample);
    if sample.starts_with('#') { format!("\"{field}\"") } else { field.to_string() }
}

fn table(folder: &Path, name: &str, header: &str, row: &str) -> Result<AtomicFile, OutputError> {
    let mut table = TableWriter::create(folder, name, header)?;
    table.row(format_args!("{row}"))?;
    Ok(table.into_file())
}

fn header_of_counts() -> String {
    let mut text = section("counts", "Counts", "table", "What each run read and called");
    text += "# headers:\n";
    for [name, title, what] in COLUMNS {
        // Writing to a String cannot fail.
        let _ = write!(text, "#   {name}:\n#     title: \"{title}\"\n#     description: \"{what}\"\n");
        text += "#     format: \"{:,.0f}\"\n";
    }
    text + &names(&COLUMNS)
}

fn header_of_calls() -> String {
    let mut text = section("calls", "Calls", "bargraph", "What the sequences of each run were called");
    text += "#   ylab: \"Sequences\"\n#   cpswitch_counts_label: \"Sequences\"\n# categories:\n";
    for [name, title, colour] in CALLS {
        let _ = write!(text, "#   {name}:\n#     name: \"{title}\"\n#     color: \"{colour}\"\n");
    }
    text + &names(&CALLS)
}

/// Returns the header comments that both sections have, up to and including the first keys of `pconfig`.
fn section(id: &str, name: &str, plot: &str, what: &str) -> String {
    format!(
        "# id: plimsoll_{id}\n{PARENT}# section_name: {name}\n# description: {what}\n# plot_type: {plot}\n\
         # pconfig:\n#   id: plimsoll_{id}_plot\n#   title: \"Plimsoll: {name}\"\n"
    )
}

fn names(columns: &[[&str; 3]]) -> String {
    columns.iter().fold("sample".to_owned(), |line, [name, ..]| line + "\t" + name)
}

fn versions(folder: &Path) -> Result<AtomicFile, OutputError> {
    let mut file = AtomicFile::create(folder.join(VERSIONS))?;
    let text = concat!("\"PLIMSOLL_PREDICT\":\n    plimsoll: ", env!("CARGO_PKG_VERSION"), "\n");
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_never_a_comment() {
        assert_eq!(first_cell("reads"), "reads");
        assert_eq!(first_cell("#1"), "\"#1\"");
        assert_eq!(first_cell("a\tb"), "a\\tb");
        assert_eq!(first_cell("=cmd|x"), "'=cmd|x");
    }

    #[test]
    fn every_count_has_a_column() {
        let mut counts = ResultCounts::default();
        let counted: Vec<&str> = counts.fields_mut().map(|(name, _)| name).to_vec();
        let columns = COLUMNS.map(|[name, ..]| name);
        let others: Vec<&str> = columns.into_iter().filter(|c| !counted.contains(c)).collect();
        assert_eq!(others, ["failed"]);
        assert_eq!(columns.len(), counted.len() + others.len());
        assert!(CALLS.iter().all(|[name, ..]| counted.contains(name)));
    }
}
