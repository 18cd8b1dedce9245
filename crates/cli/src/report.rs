//! Summary at the end of a command. Invariant: every number comes from the report or is the process's peak
//! memory; only percentages and units are computed here.

use plimsoll_runtime::{EscapedPath, machine};
use plimsoll_virus::{CallsSummary, LengthThreshold, VirusRow, WindowShard};

/// Summary of a prediction, or of one shard of a prediction.
pub fn predicted(report: &plimsoll_virus::PredictReport) -> String {
    if let Some(WindowShard { number, of }) = report.shard {
        let rows = speed(report.seconds, report.tokens_per_second);
        let place = EscapedPath(&report.output_dir);
        return table(&rows) + &format!("shard {number} of {of} in {place}; merge all shards with --merge");
    }
    let c = &report.counts;
    let mut rows = vec![
        ("records", c.records.to_string()),
        ("windows", c.windows.to_string()),
        ("scored windows", c.scored_windows.to_string()),
    ];
    if report.calls.is_none() {
        rows.push(("open reading frames", c.orfs.to_string()));
    }
    if report.trained {
        rows.push(("called virus", c.virus.to_string()));
        rows.push(("called other", c.other.to_string()));
    } else {
        rows.push(("untrained, not called", c.untrained.to_string()));
    }
    rows.push(("no call", c.no_call.to_string()));
    if c.skipped > 0 {
        rows.push(("skipped, without letters", c.skipped.to_string()));
    }
    if let Some(calls) = &report.calls {
        rows.push(("regions", calls.regions.to_string()));
        rows.push(("proviruses", calls.proviruses.to_string()));
    }
    if report.failed > 0 {
        let label = if report.calls.is_some() { "FAILED windows" } else { "FAILED reading frames" };
        rows.push((label, report.failed.to_string()));
    }
    if report.notes > 0 {
        rows.push(("notes", format!("{}, see notes.tsv", report.notes)));
    }
    if let [Some(dna), Some(protein)] = report.fill {
        rows.push(("packing fill", format!("{:.1} % DNA, {:.1} % protein", 100.0 * dna, 100.0 * protein)));
    }
    if let (Some(_), [Some(caller), _]) = (&report.calls, report.fill) {
        rows.push(("packing fill", format!("{:.1} %", 100.0 * caller)));
    }
    rows.extend(speed(report.seconds, report.tokens_per_second));
    let calls = report.calls.as_ref().map(|calls| listed(calls, c.virus) + &expected(calls));
    table(&rows) + &calls.unwrap_or_default() + &format!("results in {}", EscapedPath(&report.output_dir))
}

/// The viruses and proviruses of a run, or the first of them.
fn listed(calls: &CallsSummary, viruses: u64) -> String {
    if calls.viruses.is_empty() {
        return String::new();
    }
    let width = calls.viruses.iter().map(|row| row.name.chars().count().min(LONGEST_NAME)).max();
    let width = width.unwrap_or(0).max("name".len());
    let mut text = format!("{:<width$}  kind         length  score  fdr    reaches\n", "name");
    for VirusRow { name, kind, length, reaches, score, fdr } in &calls.viruses {
        let name: String = name.chars().take(LONGEST_NAME).collect();
        let fdr = fdr.map_or("NA".to_owned(), |fdr| format!("{fdr:.3}"));
        text += &format!("{name:<width$}  {kind:<8}  {length:>9}  {score:.3}  {fdr:<5}  {reaches}\n");
    }
    let all = viruses + calls.proviruses;
    match all - calls.viruses.len() as u64 {
        0 => text,
        more => text + &format!("and {more} more in viruses.tsv\n"),
    }
}

/// Characters of a name in the list of viruses.
const LONGEST_NAME: usize = 40;

/// The expected errors of a caller's calls, for the lengths of the input, and the reasons of missing calls.
fn expected(calls: &CallsSummary) -> String {
    let mut text = thresholds(calls);
    if calls.ranked > 0 {
        let [tpr, fpr] = [calls.tpr, calls.fpr].map(percent);
        let records = match calls.ranked {
            1 => "1 record of its length".to_owned(),
            records => format!("{records} records of these lengths"),
        };
        text += &format!(
            "expected for {records}, from the caller's calibration: {tpr} of the viral records and {fpr} of \
             the others reach the threshold\n"
        );
    }
    if let Some(wrong) = calls.false_calls {
        text += &format!(
            "expected false calls at this prevalence: {:.1} % of the records called virus\n",
            100.0 * wrong
        );
    }
    if !calls.reasons.is_empty() {
        let reasons = calls.reasons.iter().map(|(reason, count)| format!("{count} {reason}"));
        text += &format!("no call: {}\n", reasons.collect::<Vec<_>>().join(", "));
    }
    text
}

/// The preset and the prevalence of a run, and its thresholds by length.
fn thresholds(calls: &CallsSummary) -> String {
    let values = match (calls.preset, &calls.thresholds[..]) {
        (_, []) => return String::new(),
        (None, [only, ..]) => format!("threshold {:.3} at every length", only.threshold),
        (Some(preset), all) => {
            let all: Vec<String> = all
                .iter()
                .map(|LengthThreshold { threshold, length }| format!("{threshold:.3} at {length}"))
                .collect();
            format!("preset {preset}, threshold by length: {} bases", all.join(", "))
        }
    };
    format!("{values}; prevalence {}\n", calls.prevalence)
}

/// A rate in percent, or its bounds.
fn percent([lower, upper]: [f64; 2]) -> String {
    let lower = format!("{:.1}", 100.0 * lower);
    let upper = format!("{:.1}", 100.0 * upper);
    if lower == upper { format!("{upper} %") } else { format!("{lower} to {upper} %") }
}

/// Summary of an embedding or a classification; `values` names the numbers in a row.
pub fn embedded(report: &plimsoll_embed::EmbedReport, values: &'static str) -> String {
    let mut rows = vec![("sequences", report.sequences.to_string()), (values, report.width.to_string())];
    if report.empty > 0 {
        rows.push(("skipped, empty", report.empty.to_string()));
    }
    if report.renamed > 0 {
        rows.push(("renamed in the results", report.renamed.to_string()));
    }
    if report.truncated > 0 {
        rows.push(("truncated to --max-length", report.truncated.to_string()));
    }
    if report.unknown > 0 {
        rows.push(("unknown tokens", report.unknown.to_string()));
    }
    rows.push(("tokens", report.tokens.to_string()));
    if let Some(fill) = report.fill {
        rows.push(("packing fill", format!("{:.1} %", 100.0 * fill)));
    }
    rows.extend(speed(report.seconds, report.tokens_per_second));
    let files: Vec<String> = report.files.iter().map(|p| EscapedPath(p).to_string()).collect();
    let files = match &files[..] {
        [first @ .., second, last] => [first, &[format!("{second} and {last}")]].concat().join(", "),
        all => all.concat(),
    };
    table(&rows) + &format!("results in {files}")
}

fn speed(seconds: f64, tokens_per_second: f64) -> [(&'static str, String); 3] {
    let (_, peak) = machine::resident();
    [
        ("seconds", format!("{seconds:.1}")),
        ("tokens per second", format!("{tokens_per_second:.0}")),
        ("peak memory", peak.rounded()),
    ]
}

/// Formats rows with left-aligned names and right-aligned values.
fn table(rows: &[(&str, String)]) -> String {
    let name = rows.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
    let value = rows.iter().map(|(_, v)| v.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(n, v)| format!("  {n:<name$}  {v:>value$}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [("a", "1".to_owned()), ("long name", "1000".to_owned())];
        assert_eq!(table(&rows), "  a             1\n  long name  1000\n");
    }
}
