//! A table that the page's script sorts, searches, filters and pages: columns as JSON, and their explanations. Invariant:
//! every column has an explanation, which is part of the page and is printed.

use crate::html::{escape, json, json_string};
use serde_json::json;

/// A column of a table on a page.
pub struct PageColumn {
    /// Identifier, the name of the column in the file.
    pub key: String,
    /// Heading.
    pub label: String,
    /// Explanation, plain text.
    pub help: String,
    /// Kind of its cells.
    pub cells: Cells,
    /// Whether the column is visible at first.
    pub shown: bool,
    /// Whether it can be filtered: a text by search, words by choice, numbers by range.
    pub filter: bool,
}

/// Kind of the cells of a column.
pub enum Cells {
    /// Texts.
    Text,
    /// Whole numbers.
    Count,
    /// Numbers that are displayed with four decimals and stored as multiples of 10^-`stored`.
    Number {
        /// Number of decimals.
        stored: u32,
    },
    /// Indices of words.
    Words(Vec<String>),
}

impl Cells {
    /// Appends a value as JSON; NaN is `null`.
    pub fn write(&self, value: f64, out: &mut String) {
        match self {
            _ if value.is_nan() => out.push_str("null"),
            Cells::Number { stored } => {
                let scaled = (value * 10_f64.powi(*stored as i32)).round();
                out.push_str(&(scaled as i64).to_string());
            }
            Cells::Text | Cells::Count | Cells::Words(_) => out.push_str(&(value as u64).to_string()),
        }
    }
}

/// A table of a page.
pub struct PageTable {
    /// Identifier of its element.
    pub id: &'static str,
    /// Caption, plain text.
    pub caption: String,
    /// Where a reader without JavaScript finds the rows, plain text.
    pub elsewhere: String,
    /// Columns.
    pub columns: Vec<PageColumn>,
    /// Key of the column by which rows are ordered at first, and whether in descending order.
    pub sort: (&'static str, bool),
    /// Cells of each column, as comma-separated JSON that is safe in a `script` element.
    pub values: Vec<String>,
}

impl PageTable {
    /// The element that the script fills, and the data of the script.
    pub fn html(&self) -> String {
        let columns: Vec<String> =
            self.columns.iter().zip(&self.values).map(|(c, v)| column_json(c, v)).collect();
        let sort = json!({"key": self.sort.0, "descending": self.sort.1});
        format!(
            "<div class=\"records\" id=\"{id}\" data-table=\"{id}-data\" data-caption=\"{caption}\"></div>\n\
             <noscript><p class=\"note\">Without JavaScript the page cannot show this table; {elsewhere}.</p></noscript>\n\
             <script type=\"application/json\" id=\"{id}-data\">{{\"sort\":{sort},\"columns\":[{columns}]}}</script>\n",
            id = self.id,
            caption = escape(&self.caption),
            elsewhere = escape(&self.elsewhere),
            columns = columns.join(","),
        )
    }

    /// The explanations of all columns.
    pub fn legend(&self) -> String {
        let entry = |column: &PageColumn| {
            format!(
                "<div><dt>{} <code>{}</code></dt><dd>{}</dd></div>\n",
                escape(&column.label),
                escape(&column.key),
                escape(&column.help)
            )
        };
        format!("<dl class=\"legend-list\">\n{}</dl>\n", self.columns.iter().map(entry).collect::<String>())
    }
}

fn column_json(column: &PageColumn, values: &str) -> String {
    let (kind, extra) = match &column.cells {
        Cells::Text => ("text", String::new()),
        Cells::Count => ("count", String::new()),
        Cells::Number { stored } => ("number", format!(",\"stored\":{stored}")),
        Cells::Words(words) => ("word", format!(",\"words\":{}", json(&json!(words).to_string()))),
    };
    format!(
        "{{\"key\":{},\"label\":{},\"help\":{},\"kind\":\"{kind}\"{extra},\"shown\":{},\"filter\":{},\"values\":[{values}]}}",
        json_string(&column.key),
        json_string(&column.label),
        json_string(&column.help),
        column.shown,
        column.filter
    )
}
