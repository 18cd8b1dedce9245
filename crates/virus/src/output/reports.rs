//! What a pipeline reads of a run: a row and a bar for MultiQC, and the version for nf-core's collectors.
//! Invariant: every figure is counted, none is timed, so two runs over the same input write the same bytes.
//!
//! - MultiQC finds files by `_mqc.tsv`, reads the lines behind `#` as YAML, and joins the rows of all runs
//!   that carry the same `id`. The first column is the sample's name.
//! - `versions.yml` is keyed by process, as nf-core's modules write it.

use super::table::{Field, Table};
use super::{Counts, OutputError};
use data::atomic::AtomicFile;
use data::sequence::stem;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// A table of counts.
pub const MULTIQC: &str = "plimsoll_mqc.tsv";
/// A bar of the calls.
pub const MULTIQC_CALLS: &str = "plimsoll_calls_mqc.tsv";
/// The version of the program.
pub const VERSIONS: &str = "versions.yml";

const PARENT: &str = "\
# parent_id: plimsoll
# parent_name: Plimsoll
# parent_description: tells for every sequence whether it comes from a virus.
# file_format: tsv
";

/// Name in the run record's counts, title, what it counts.
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

/// Name, title, colour: a colour for each call, the same in every report.
const CALLS: [[&str; 3]; 5] = [
    ["virus", "Virus", "#d95f02"],
    ["other", "Other", "#1f78b4"],
    ["no_call", "No call", "#b3b3b3"],
    ["skipped", "Skipped", "#636363"],
    ["untrained", "Untrained", "#e6c229"],
];

/// The three files, complete but for the commit. What the run record does not say counts as 0.
pub fn write(folder: &Path, run_record: &Value, counts: &Counts) -> Result<[AtomicFile; 3], OutputError> {
    let first = run_record["inputs"][0].as_str().unwrap_or("-");
    let failed = run_record["sequences"]["failed"].as_u64().unwrap_or(0);
    let count = |name: &str| {
        let mut counts = *counts;
        let known = counts.by_name().into_iter().find(|(known, _)| *known == name);
        known.map_or(failed, |(_, count)| *count)
    };
    let row = |columns: &[[&str; 3]]| {
        let counts: String = columns.iter().map(|[name, ..]| format!("\t{}", count(name))).collect();
        first_cell(&stem(Path::new(first))) + &counts
    };
    Ok([
        table(folder, MULTIQC, &header_of_counts(), &row(&COLUMNS))?,
        table(folder, MULTIQC_CALLS, &header_of_calls(), &row(&CALLS))?,
        versions(folder)?,
    ])
}

/// A sample as the first cell of a row. In quotes where MultiQC would take the row for a comment.
fn first_cell(sample: &str) -> String {
    let field = Field(sample);
    if sample.starts_with('#') { format!("\"{field}\"") } else { field.to_string() }
}

fn table(folder: &Path, name: &str, header: &str, row: &str) -> Result<AtomicFile, OutputError> {
    let mut table = Table::create(folder, name, header)?;
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

/// The comments that every section has, up to its `pconfig`.
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
    }

    #[test]
    fn every_count_has_a_column() {
        let mut counts = Counts::default();
        let counted: Vec<&str> = counts.by_name().map(|(name, _)| name).to_vec();
        let columns = COLUMNS.map(|[name, ..]| name);
        let others: Vec<&str> = columns.into_iter().filter(|c| !counted.contains(c)).collect();
        assert_eq!(others, ["failed"]);
        assert_eq!(columns.len(), counted.len() + others.len());
        assert!(CALLS.iter().all(|[name, ..]| counted.contains(name)));
    }
}
