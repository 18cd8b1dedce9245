//! The columns of `predictions.tsv` that a report knows, with their labels and explanations. Invariant: every column
//! that a page shows has an explanation; columns that it does not know are listed on the page, not dropped silently.

/// Kind of the values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
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
pub struct Column {
    /// Name in the header of the table.
    pub key: String,
    /// Heading on the page.
    pub label: String,
    /// Explanation, plain text.
    pub help: String,
    /// Kind of its values.
    pub kind: Kind,
    /// Whether the page shows the column at first.
    pub shown: bool,
    /// Whether the page has a filter for the column.
    pub filter: bool,
}

/// Which of the two forms of tables a folder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of a model in VirNucPro's form: scores of open reading frames.
    VirNucPro,
    /// Of a caller: calibrated probabilities.
    Caller,
}

/// Prefix of the columns with the probabilities of classes.
const CLASS: &str = "p_";

/// The column named `key` in tables of a form; `None` if it is not known.
pub fn column(key: &str, form: Form) -> Option<Column> {
    use Kind::{Count, Name, Share, Word};
    let caller = form == Form::Caller;
    let make = |label: &str, kind, shown, filter, help: &str| Column {
        key: key.to_owned(),
        label: label.to_owned(),
        help: help.to_owned(),
        kind,
        shown,
        filter,
    };
    Some(match key {
        "seq_name" => make(
            "Record",
            Name,
            true,
            true,
            "Name of the record: its title line up to the first blank. A repeated name has its file and number after a #.",
        ),
        "length" => make("Length", Count, true, true, "Length of the record in bases."),
        "n_windows" => make(
            "Windows",
            Count,
            true,
            false,
            "Number of windows: the pieces into which the record was cut. Each window is scored by itself.",
        ),
        "n_scored" => make(
            "Scored",
            Count,
            true,
            false,
            "Number of windows with an open reading frame. Only these windows have a score.",
        ),
        "n_virus" => {
            make("Virus windows", Count, true, false, "Number of windows that are called virus by themselves.")
        }
        "virus_score" if caller => make(
            "Virus score",
            Share,
            true,
            true,
            "Calibrated probability, from 0 to 1, that the record is viral. It holds for the share of viral records that \
             the run assumes (parameter prevalence) and for the length of the record.",
        ),
        "virus_score" => make(
            "Virus score",
            Share,
            true,
            true,
            "Mean score of the scored windows, from 0 to 1. It orders records; it is not a probability.",
        ),
        "low" => make(
            "Low",
            Share,
            true,
            false,
            "Lower end of the interval of the virus score. The interval is wide where the windows of a record disagree.",
        ),
        "high" => make("High", Share, true, false, "Upper end of the interval of the virus score."),
        "fdr" => make(
            "FDR",
            Share,
            true,
            false,
            "False discovery rate of a record called virus: the expected share of false calls among it and all records called \
             virus with the same or a higher score, which is their mean of 1 minus the virus score.",
        ),
        "threshold" => make(
            "Threshold",
            Share,
            true,
            false,
            "Least virus score of a record of this length that is called virus, at the prevalence of the run.",
        ),
        "prediction" => make(
            "Call",
            Word,
            true,
            true,
            if caller {
                "virus, other (not viral), or no_call (not decided; the column Reason says why)."
            } else {
                "virus if the score is at least the threshold, otherwise other; no_call without an open reading frame, \
                 skipped without letters, untrained if the weights were not trained."
            },
        ),
        "reason" => make(
            "Reason",
            Word,
            true,
            false,
            "Why there is no call: empty (no letters), short, unknown_letters (such as N), low_complexity (repeats), failed \
             (not computed), uncertain (the interval contains the threshold) or fdr (above the limit of the run).",
        ),
        "class" => make("Class", Word, true, true, "The most probable class of the record."),
        "source" => make("Input file", Word, true, true, "The input file of the record."),
        _ => {
            let class = key.strip_prefix(CLASS).filter(|class| caller && !class.is_empty())?;
            let help = format!("Probability, from 0 to 1, that the record belongs to the class {class}.");
            make(&format!("P({class})"), Share, false, false, &help)
        }
    })
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
