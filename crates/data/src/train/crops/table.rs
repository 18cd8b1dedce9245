//! The table of records: tab-separated, with a header line. Invariant: every row has a cell for each column of the header
//! and an id of its own, and every target of a row that is used is a class of its task.

use std::collections::HashMap;
use std::path::Path;

use super::super::split::Split;
use super::settings::{CropSettings, listed};
use crate::printable::Name;
use crate::{DataError, DataErrorKind};

/// Maximum size of a table in bytes; 1 GiB is enough for about ten million records.
pub(super) const LARGEST: u64 = 1 << 30;

/// A table that has been read; its names are slices of the text.
pub(super) struct RecordTable<'a> {
    path: &'a Path,
    rows: HashMap<&'a str, RecordRow>,
    /// Targets of all rows that are used, one for each task.
    targets: Vec<i32>,
    /// Values of all rows that are used, one for each level, as indices into the names of the values of the level.
    values: Vec<u32>,
    tasks: usize,
    levels: usize,
    /// Number of values of all levels.
    distinct: usize,
}

/// A row.
struct RecordRow {
    line: u64,
    /// `None` if the record is left out.
    split: Option<Split>,
    /// Number of the row among those that are used.
    number: u32,
    found: bool,
}

/// Split, targets and values of a record that is used.
pub(super) struct UsedRow<'t> {
    pub split: Split,
    pub targets: &'t [i32],
    pub values: &'t [u32],
}

/// Indices of the columns that are read.
struct RecordColumns {
    id: usize,
    split: usize,
    /// Index of the column of each task.
    tasks: Vec<usize>,
    /// Index of the column of each sampling level.
    levels: Vec<usize>,
}

impl RecordColumns {
    /// Finds the columns by their names. `Err` says which is missing or ambiguous.
    fn find(names: &[String], settings: &CropSettings) -> Result<Self, String> {
        Ok(Self {
            id: column(names, "id")?,
            split: column(names, "split")?,
            tasks: settings.tasks.iter().map(|task| column(names, &task.name)).collect::<Result<_, _>>()?,
            levels: settings
                .levels
                .iter()
                .map(|level| column(names, &level.column))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Index of the column called `name`.
fn column(names: &[String], name: &str) -> Result<usize, String> {
    let mut found = (0..names.len()).filter(|&at| names[at] == name);
    match (found.next(), found.next()) {
        (Some(at), None) => Ok(at),
        (Some(_), Some(_)) => Err(format!("two columns are called '{}'; rename one", Name(name))),
        (None, _) => Err(format!("no column '{}'; the columns are {}", Name(name), listed(names))),
    }
}

impl<'a> RecordTable<'a> {
    /// Parses the text of the table at `path`. Also returns the names of the values of each level, sorted, so that drawing
    /// does not depend on the order of the rows.
    ///
    /// # Errors
    /// No header; a missing column, or two of one name; a row with more or fewer cells than the header, without an id,
    /// with the id of another row, or with an unknown split; a row that is used with an unknown class.
    pub(super) fn parse(
        path: &'a Path,
        text: &'a str,
        settings: &CropSettings,
    ) -> Result<(Self, Vec<Vec<&'a str>>), DataError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty());
        let Some((line, header)) = lines.next() else {
            return Err(DataError::malformed(
                path,
                "no header; the first line names the columns, at least id and split".to_owned(),
            )
            .with_line(1));
        };
        let names: Vec<String> = header.split('\t').map(str::to_owned).collect();
        let columns = match RecordColumns::find(&names, settings) {
            Ok(columns) => columns,
            Err(what) => return Err(DataError::malformed(path, what).with_line(line)),
        };
        let RecordColumns { id, split, tasks, levels } = columns;
        let mut table = RecordTable {
            path,
            // Allocated once: a map that grows holds its old and its new buckets at the same time.
            rows: HashMap::with_capacity(lines.clone().count()),
            targets: Vec::new(),
            values: Vec::new(),
            tasks: tasks.len(),
            levels: levels.len(),
            distinct: 0,
        };
        let mut interned: Vec<HashMap<&str, u32>> = vec![HashMap::new(); levels.len()];
        let mut cells = Vec::with_capacity(names.len());
        let mut number = 0;
        for (line, text) in lines {
            cells.clear();
            // One cell more than the header has columns is enough to refuse the row.
            cells.extend(text.split('\t').take(names.len() + 1));
            if cells.len() != names.len() {
                let found = text.split('\t').count();
                return Err(DataError::malformed(
                    path,
                    format!("{found} cells for the {} columns of the header", names.len()),
                )
                .with_line(line));
            }
            let id = cells[id];
            let split = match cells[split] {
                _ if id.is_empty() => {
                    return Err(DataError::malformed(
                        path,
                        "column 'id': the name of a record is missing".to_owned(),
                    )
                    .with_line(line));
                }
                "train" => Some(Split::Train),
                "validation" => Some(Split::Validation),
                "-" => None,
                other => {
                    let what = format!("column 'split': '{}' is not train, validation or -", Name(other));
                    return Err(DataError::malformed(path, what).with_line(line));
                }
            };
            if let Some(RecordRow { line: first, .. }) =
                table.rows.insert(id, RecordRow { line, split, number, found: false })
            {
                return Err(DataError::malformed(
                    path,
                    format!("column 'id': '{}' has a row before, in line {first}", Name(id)),
                )
                .with_line(line));
            }
            if split.is_none() {
                continue;
            }
            number += 1;
            for (task, &at) in settings.tasks.iter().zip(&tasks) {
                let Some(target) = task.target(cells[at]) else {
                    let what = format!(
                        "column '{}': '{}' is not one of {}; give one of them, or ? for no target",
                        Name(&task.name),
                        Name(cells[at]),
                        listed(&task.classes)
                    );
                    return Err(DataError::malformed(path, what).with_line(line));
                };
                table.targets.push(target);
            }
            for (interned, &at) in interned.iter_mut().zip(&levels) {
                let next = interned.len() as u32;
                table.values.push(*interned.entry(cells[at]).or_insert(next));
            }
        }
        let names = table.sort_values(&interned);
        Ok((table, names))
    }

    /// Numbers the values of each level in the order of their names.
    fn sort_values(&mut self, interned: &[HashMap<&'a str, u32>]) -> Vec<Vec<&'a str>> {
        let mut all = Vec::with_capacity(interned.len());
        for (level, numbers) in interned.iter().enumerate() {
            let mut names: Vec<(&str, u32)> = numbers.iter().map(|(&name, &number)| (name, number)).collect();
            names.sort_unstable();
            let mut ranks = vec![0; names.len()];
            (0..).zip(&names).for_each(|(rank, &(_, number))| ranks[number as usize] = rank);
            let values = self.values.iter_mut().skip(level).step_by(interned.len());
            values.for_each(|value| *value = ranks[*value as usize]);
            self.distinct += names.len();
            all.push(names.into_iter().map(|(name, _)| name).collect());
        }
        all
    }

    /// Marks the row of a record as found and returns it; `None` if the record is left out.
    ///
    /// # Errors
    /// A record without a row, or with the name of a record before; the text says which.
    pub(super) fn take(&mut self, id: &str) -> Result<Option<UsedRow<'_>>, String> {
        let Some(row) = self.rows.get_mut(id) else {
            return Err(format!(
                "no row in the table {}; add one, with - in the column 'split' to leave the record out",
                crate::printable::EscapedPath(self.path)
            ));
        };
        if std::mem::replace(&mut row.found, true) {
            return Err("a second record of this name; rename or remove one".to_owned());
        }
        let number = row.number as usize;
        Ok(row.split.map(|split| UsedRow {
            split,
            targets: cells_of(&self.targets, self.tasks, number),
            values: cells_of(&self.values, self.levels, number),
        }))
    }

    /// Checks that every row that is used was found.
    ///
    /// # Errors
    /// The first row without a record.
    pub(super) fn check_found(&self) -> Result<(), DataError> {
        let missing = self.rows.iter().filter(|(_, row)| row.split.is_some() && !row.found);
        match missing.min_by_key(|(_, row)| row.line) {
            None => Ok(()),
            Some((id, row)) => {
                let what = format!(
                    "no record '{}' in the files; give its file, remove the row, or put - in the column 'split'",
                    Name(id)
                );
                Err(DataError::at(self.path, DataErrorKind::Malformed(what)).with_line(row.line))
            }
        }
    }

    /// Upper bound of the heap bytes apart from the text, while it is read and after.
    pub(super) fn bytes(&self) -> usize {
        // `capacity` does not count the empty buckets of a hash table, hence the factor of two. A vector that grows holds
        // its old buffer too, and so does the map of the values of a level, whose copy is sorted in the end.
        let rows = 2 * self.rows.capacity() * (size_of::<(&str, RecordRow)>() + 1);
        let cells = 2 * (self.targets.capacity() + self.values.capacity()) * size_of::<u32>();
        rows + cells + 6 * self.distinct * (size_of::<(&str, u32)>() + 1) + 1024
    }
}

/// Slice of row `number` in the concatenated rows of `width` cells.
fn cells_of<T>(cells: &[T], width: usize, number: usize) -> &[T] {
    &cells[number * width..(number + 1) * width]
}
