//! A table that the page's script sorts, searches, filters and pages: columns as JSON, and their explanations. Invariant:
//! every column has an explanation, which is part of the page and is printed.

use crate::html::{escape, json, json_string};
use serde_json::json;
use std::fmt::Write;

/// A column of a table on a page.
pub struct PageColumn {
    /// Identifier, the name of the column in the file.
    pub key: String,
    /// Heading.
    pub label: String,
    /// Explanation, plain text.
    pub help: String,
    /// Kind of its cells.
    pub cells: CellKind,
    /// Whether the column is visible at first.
    pub shown: bool,
    /// Whether it can be filtered: a text by search, words by choice, numbers by range.
    pub filter: bool,
}

impl PageColumn {
    /// A column that is visible at first and has no filter.
    pub fn new(key: &str, label: &str, help: &str, cells: CellKind) -> Self {
        let key = key.to_owned();
        let label = label.to_owned();
        let help = help.to_owned();
        PageColumn { key, label, help, cells, shown: true, filter: false }
    }

    /// The column with a filter.
    pub fn filtered(self) -> Self {
        PageColumn { filter: true, ..self }
    }

    /// The column, hidden at first.
    pub fn hidden(self) -> Self {
        PageColumn { shown: false, ..self }
    }
}

/// Kind of the cells of a column.
pub enum CellKind {
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

impl CellKind {
    /// Appends a value as JSON; NaN is `null`.
    pub fn write(&self, value: f64, out: &mut String) {
        match self {
            _ if value.is_nan() => out.push_str("null"),
            CellKind::Number { stored } => {
                let scaled = (value * 10_f64.powi(*stored as i32)).round();
                out.push_str(&(scaled as i64).to_string());
            }
            CellKind::Text | CellKind::Count | CellKind::Words(_) => out.push_str(&(value as u64).to_string()),
        }
    }
}

/// A table of a page.
pub struct PageTable {
    /// Identifier of its element.
    pub id: &'static str,
    /// Caption, plain text.
    pub caption: String,
    /// Place at which a reader without JavaScript finds the rows, plain text.
    pub elsewhere: String,
    /// Columns.
    pub columns: Vec<PageColumn>,
    /// Key of the column by which rows are ordered at first.
    pub sort_key: &'static str,
    /// Whether that order is descending.
    pub sort_descending: bool,
    /// Cells of each column, as comma-separated JSON that is safe in a `script` element.
    pub values: Vec<String>,
}

impl PageTable {
    /// The element that the script fills, and the data of the script.
    pub fn html(&self) -> String {
        let columns: Vec<String> =
            self.columns.iter().zip(&self.values).map(|(c, v)| column_json(c, v)).collect();
        let sort = json!({"key": self.sort_key, "descending": self.sort_descending});
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
        let mut entries = String::new();
        for column in &self.columns {
            let _ = writeln!(
                entries,
                "<div><dt>{} <code>{}</code></dt><dd>{}</dd></div>",
                escape(&column.label),
                escape(&column.key),
                escape(&column.help)
            );
        }
        format!("<dl class=\"legend-list\">\n{entries}</dl>\n")
    }
}

fn column_json(column: &PageColumn, values: &str) -> String {
    let (kind, extra) = match &column.cells {
        CellKind::Text => ("text", String::new()),
        CellKind::Count => ("count", String::new()),
        CellKind::Number { stored } => ("number", format!(",\"stored\":{stored}")),
        CellKind::Words(words) => ("word", format!(",\"words\":{}", json(&json!(words).to_string()))),
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
