//! The columns of `predictions.tsv` that a report knows, with their labels and explanations. Invariant: every column
//! that a page shows has an explanation; columns that it does not know are listed on the page, not dropped silently.

/// Kind of the values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnKind {
    /// The name of a record.
    Name,
    /// A whole number, or `NA`.
    Count,
    /// A number from 0 to 1, or `NA`.
    Share,
    /// A word of a small set, or `NA`.
    Word,
}

/// A column of `predictions.tsv`.
#[derive(Clone, Debug)]
pub struct ResultColumn {
    /// Name in the header of the table.
    pub key: String,
    /// Heading on the page.
    pub label: String,
    /// Explanation, plain text.
    pub help: String,
    /// Kind of its values.
    pub kind: ColumnKind,
    /// Whether the page shows the column at first.
    pub shown: bool,
    /// Whether the page has a filter for the column.
    pub filter: bool,
}

impl ResultColumn {
    /// A column that the page shows at first, without a filter.
    pub fn new(key: &str, label: &str, kind: ColumnKind, help: &str) -> Self {
        let key = key.to_owned();
        let label = label.to_owned();
        let help = help.to_owned();
        ResultColumn { key, label, help, kind, shown: true, filter: false }
    }
}

/// Form of the tables of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableForm {
    /// Of a model in VirNucPro's form: scores of open reading frames.
    VirNucPro,
    /// Of a caller: calibrated probabilities.
    Caller,
}

/// Prefix of the columns with the probabilities of classes.
const CLASS: &str = "p_";

/// The column named `key` in tables of a form; `None` if it is not known.
pub fn column(key: &str, form: TableForm) -> Option<ResultColumn> {
    use ColumnKind::{Count, Name, Share, Word};
    let caller = form == TableForm::Caller;
    let column = match key {
        "seq_name" => ResultColumn::new(
            key,
            "Record",
            Name,
            "Name of the record: its title line up to the first blank. A repeated name has its file and number after a #.",
        ),
        "length" => ResultColumn::new(key, "Length", Count, "Length of the record in bases."),
        "n_windows" => ResultColumn::new(
            key,
            "Windows",
            Count,
            "Number of windows: the pieces into which the record was cut. Each window is scored by itself.",
        ),
        "n_scored" => ResultColumn::new(
            key,
            "Scored",
            Count,
            "Number of windows with an open reading frame. Only these windows have a score.",
        ),
        "n_virus" => ResultColumn::new(
            key,
            "Virus windows",
            Count,
            "Number of windows that are called virus by themselves.",
        ),
        "virus_score" if caller => ResultColumn::new(
            key,
            "Virus score",
            Share,
            "Calibrated probability, from 0 to 1, that the record is viral. It holds for the share of viral records that \
             the run assumes (parameter prevalence) and for the length of the record.",
        ),
        "virus_score" => ResultColumn::new(
            key,
            "Virus score",
            Share,
            "Mean score of the scored windows, from 0 to 1. It orders records; it is not a probability.",
        ),
        "low" => ResultColumn::new(
            key,
            "Low",
            Share,
            "Lower end of the interval of the virus score. The interval is wide where the windows of a record disagree.",
        ),
        "high" => ResultColumn::new(key, "High", Share, "Upper end of the interval of the virus score."),
        "fdr" => ResultColumn::new(
            key,
            "FDR",
            Share,
            "False discovery rate of a record called virus: the expected share of false calls among it and all records called \
             virus with the same or a higher score, which is their mean of 1 minus the virus score.",
        ),
        "threshold" => ResultColumn::new(
            key,
            "Threshold",
            Share,
            "Least virus score of a record of this length that is called virus, at the prevalence of the run.",
        ),
        "prediction" => ResultColumn::new(
            key,
            "Call",
            Word,
            if caller {
                "virus, other (not viral), or no_call (not decided; the column Reason says why)."
            } else {
                "virus if the score is at least the threshold, otherwise other; no_call without an open reading frame, \
                 skipped without letters, untrained if the weights were not trained."
            },
        ),
        "reason" => ResultColumn::new(
            key,
            "Reason",
            Word,
            "Why there is no call: empty (no letters), short, unknown_letters (such as N), low_complexity (repeats), failed \
             (not computed), uncertain (the interval contains the threshold) or fdr (above the limit of the run).",
        ),
        "class" => ResultColumn::new(key, "Class", Word, "The most probable class of the record."),
        "source" => ResultColumn::new(key, "Input file", Word, "The input file of the record."),
        _ => {
            let class = key.strip_prefix(CLASS).filter(|class| caller && !class.is_empty())?;
            let help = format!("Probability, from 0 to 1, that the record belongs to the class {class}.");
            ResultColumn { shown: false, ..ResultColumn::new(key, &format!("P({class})"), Share, &help) }
        }
    };
    let filter = matches!(key, "seq_name" | "length" | "virus_score" | "prediction" | "class" | "source");
    Some(ResultColumn { filter, ..column })
}

/// Calls in the order in which pages show them: the word in the tables and the name of its colour.
pub const CALLS: [(&str, &str); 5] = [
    ("virus", "s-virus"),
    ("no_call", "s-none"),
    ("other", "s-other"),
    ("skipped", "s-none"),
    ("untrained", "s-none"),
];

/// Number of series of the charts: virus, not decided (no call, skipped, untrained), other.
pub const SERIES: [(&str, &str); 3] = [("virus", "s-virus"), ("no call", "s-none"), ("other", "s-other")];

/// Index in [`SERIES`] of a call's index in [`CALLS`].
pub fn series_of(call: usize) -> usize {
    match call {
        0 => 0,
        2 => 2,
        _ => 1,
    }
}
