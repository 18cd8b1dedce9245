//! Reads output files of a VirNucPro run: sequences, embeddings, merged head inputs and scores. Invariant: a
//! missing file gives `None`; a file that exists and cannot be parsed is an error.

use crate::ToolError;
use plimsoll_data::sequence::Reader;
use plimsoll_data::weights::{PickleValue, PtObject, read_pt_object};
use plimsoll_runtime::RuntimeError;
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// The two encoders of VirNucPro, each with a subfolder of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunSide {
    /// Nucleotide sequences, embedded with DNABERT-S.
    Dna,
    /// Protein sequences, embedded with ESM-2.
    Protein,
}

/// The files of one VirNucPro run: `NAME_nucleotide`, `NAME_protein` and `NAME_merged`.
pub(super) struct VirNucProRun {
    folder: PathBuf,
    pub(super) name: String,
}

/// A sequence id and its embedding.
pub(super) type NamedRow = (String, Vec<f32>);

/// The runs in `folder` that have encoder files, sorted by name. `Err` if there are none.
pub(super) fn sets(folder: &Path) -> Result<Vec<VirNucProRun>, ToolError> {
    sets_with(folder, "nucleotide")
}

/// The runs in `folder` that have merged embeddings for the head, sorted by name. `Err` if there are none.
pub(super) fn merged_sets(folder: &Path) -> Result<Vec<VirNucProRun>, ToolError> {
    sets_with(folder, "merged")
}

/// The runs that have the subfolder `NAME_<part>`, sorted by name. `Err` if there are none.
fn sets_with(folder: &Path, part: &'static str) -> Result<Vec<VirNucProRun>, ToolError> {
    let entries = fs::read_dir(folder).map_err(RuntimeError::io(folder))?.flatten();
    let suffix = format!("_{part}");
    let names = entries.filter_map(|e| e.file_name().to_str()?.strip_suffix(&suffix).map(str::to_owned));
    let mut sets: Vec<VirNucProRun> =
        names.map(|name| VirNucProRun { folder: folder.to_owned(), name }).collect();
    sets.sort_by(|a, b| a.name.cmp(&b.name));
    if sets.is_empty() { Err(ToolError::NoReference { folder: folder.to_owned(), part }) } else { Ok(sets) }
}

impl VirNucProRun {
    /// Input sequences of an encoder: (id, letters).
    pub(super) fn sequences(&self, side: RunSide) -> Result<Vec<(String, Vec<u8>)>, ToolError> {
        let mut reader = Reader::open([self.path(side).join("output_1.fa")])?;
        reader.keep_bytes();
        reader.records().map(|record| record.map(|r| (r.id, r.seq)).map_err(ToolError::from)).collect()
    }

    /// Embeddings that the encoder computed; `None` if the file does not exist.
    pub(super) fn embeddings(&self, side: RunSide) -> Result<Option<Vec<NamedRow>>, ToolError> {
        let name = match side {
            RunSide::Dna => "output_1_DNABERT_S.pt",
            RunSide::Protein => "output_1_ESM.pt",
        };
        let path = self.path(side).join(name);
        if !path.exists() {
            return Ok(None);
        }
        let object = read_pt_object(&path)?;
        let rows = match side {
            RunSide::Dna => labelled(object.root()),
            RunSide::Protein => listed(&object),
        };
        rows.map(Some).ok_or_else(|| unreadable(&path))
    }

    /// Inputs of the head: for each id the concatenated nucleotide and protein embedding. `None` if there is no
    /// such file.
    pub(super) fn merged(&self) -> Result<Option<Vec<NamedRow>>, ToolError> {
        let mut rows = None;
        // VirNucPro splits its input into numbered files, without a gap in the numbers.
        for number in 1.. {
            let path = self.in_merged(&format!("output_{number}_merged.pt"));
            if !path.exists() {
                break;
            }
            let object = read_pt_object(&path)?;
            let more = matrix(&object).ok_or_else(|| unreadable(&path))?;
            rows.get_or_insert_with(Vec::new).extend(more);
        }
        Ok(rows)
    }

    /// Scores that VirNucPro's head computed, by id. `None` if there is no such file.
    pub(super) fn scores(&self) -> Result<Option<HashMap<String, [f32; 2]>>, ToolError> {
        let path = self.in_merged("prediction_results.txt");
        if !path.exists() {
            return Ok(None);
        }
        let file = plimsoll_data::bounded::open(&path).map_err(RuntimeError::io(&path))?;
        let mut scores = HashMap::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(RuntimeError::io(&path))?;
            match scores_of_line(&line) {
                Some((id, pair)) => {
                    scores.insert(id, pair);
                }
                // The column headings.
                None if number == 0 => {}
                None => {
                    return Err(ToolError::ReferenceLine { path, line: number + 1 });
                }
            }
        }
        Ok(Some(scores))
    }

    /// Window length in bases, from the name of the FASTA file of windows beside the folders:
    /// `NAME_chunked500.fa`.
    pub(super) fn length(&self) -> Option<usize> {
        let prefix = format!("{}_chunked", self.name);
        let mut names = fs::read_dir(&self.folder).ok()?.flatten().map(|entry| entry.file_name());
        names.find_map(|name| name.to_str()?.strip_prefix(&prefix)?.strip_suffix(".fa")?.parse().ok())
    }

    fn in_merged(&self, file: &str) -> PathBuf {
        self.folder.join(format!("{}_merged", self.name)).join(file)
    }

    fn path(&self, side: RunSide) -> PathBuf {
        let side = match side {
            RunSide::Dna => "nucleotide",
            RunSide::Protein => "protein",
        };
        self.folder.join(format!("{}_{side}", self.name))
    }
}

/// Id and scores of a line of `prediction_results.txt`; `None` for a line in another form.
fn scores_of_line(line: &str) -> Option<(String, [f32; 2])> {
    let mut cells = line.split('\t');
    let id = cells.next()?.to_owned();
    let [_, first, second] = [cells.next()?, cells.next()?, cells.next()?];
    Some((id, [first.parse().ok()?, second.parse().ok()?]))
}

/// Error for a file that exists and does not have the expected structure.
fn unreadable(path: &Path) -> ToolError {
    ToolError::ReferenceFile { path: path.to_owned() }
}

/// Rows of DNABERT-S's file: `{data: [{label, mean_representation: [float]}]}`.
fn labelled(root: PickleValue<'_>) -> Option<Vec<NamedRow>> {
    root.get("data")?
        .items()
        .map(|item| {
            let values = item.get("mean_representation")?.items();
            let values: Option<Vec<f32>> = values.map(|v| Some(v.as_f64()? as f32)).collect();
            Some((item.get("label")?.as_str()?.to_owned(), values?))
        })
        .collect()
}

/// Rows of ESM-2's file: `{proteins: [id], data: [tensor]}`.
fn listed(object: &PtObject) -> Option<Vec<NamedRow>> {
    let ids = object.root().get("proteins")?;
    let data = object.root().get("data")?;
    let same = ids.items().len() == data.items().len();
    ids.items()
        .zip(data.items())
        .map(|(id, tensor)| Some((id.as_str()?.to_owned(), object.read_f32(tensor).ok()?)))
        .collect::<Option<Vec<NamedRow>>>()
        .filter(|_| same)
}

/// Rows of the merged file: `{ids: [id], data: tensor (n, columns)}`.
fn matrix(object: &PtObject) -> Option<Vec<NamedRow>> {
    let ids = object.root().get("ids")?;
    let data = object.root().get("data")?;
    let values = object.read_f32(data).ok()?;
    if values.is_empty() && ids.items().len() == 0 {
        return Some(vec![]);
    }
    let columns = values.len().checked_div(ids.items().len()).filter(|&columns| columns > 0)?;
    ids.items()
        .zip(values.chunks(columns))
        .map(|(id, values)| Some((id.as_str()?.to_owned(), values.to_vec())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::facts::{ANCHORS, DNA_WIDTH, MEAN_BOUND, PROTEIN_WIDTH, SUM_BOUND};
    use super::*;

    fn close(row: &[f32], (first, sum, norm): &([f32; 3], f32, f32)) {
        let values = row.iter().map(|&x| f64::from(x));
        let found = [values.clone().sum::<f64>(), values.map(|x| x * x).sum::<f64>().sqrt()];
        assert!(row.iter().zip(first).all(|(x, y)| (x - y).abs() < MEAN_BOUND / 10.0), "{first:?}");
        let totals = found.iter().zip([sum, norm]);
        assert!(totals.into_iter().all(|(x, y)| (x - f64::from(*y)).abs() < f64::from(SUM_BOUND) / 10.0));
    }

    #[test]
    fn the_anchors_are_those_of_the_files() {
        let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let Some(folder) = above.map(|a| a.join("shared/real/virnucpro")).find(|f| f.is_dir()) else {
            println!("skipped: VirNucPro's test files are not there");
            return;
        };
        let mut anchors = 0;
        for set in sets(&folder).expect("sets") {
            let [dna, protein] = [RunSide::Dna, RunSide::Protein].map(|side| {
                let (ids, rows) =
                    (set.sequences(side).expect("sequences"), set.embeddings(side).expect("rows"));
                let mut rows = rows.expect("embeddings");
                assert_eq!(ids.len(), rows.len());
                rows.sort_by(|a, b| a.0.cmp(&b.0));
                rows
            });
            for (id, row) in set.merged().expect("rows").expect("merged") {
                let of =
                    |rows: &[NamedRow]| rows.iter().find(|(other, _)| *other == id).expect("a row").1.clone();
                let (dna, protein) = (of(&dna), of(&protein));
                assert_eq!((dna.len() as u64, protein.len() as u64), (DNA_WIDTH, PROTEIN_WIDTH));
                assert_eq!(row, [&dna[..], &protein].concat());
                let anchor = ANCHORS.iter().find(|anchor| anchor.id == id).expect("an anchor");
                close(&dna, &anchor.dna);
                close(&protein, &anchor.protein);
                anchors += 1;
            }
        }
        assert_eq!(anchors, ANCHORS.len());
    }
}
