//! Lists the files of a data set. Invariant: equal paths give equal files in equal order, independently of the order in
//! which the operating system lists a folder.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::settings::DatasetFormat;
use crate::alphabet::Alphabet;
use crate::sequence::{self, Compression, ListedFile, Listing, SkipReason, SkippedEntry};
use crate::{DataError, DataErrorKind};

/// Format of a file, told by the ending of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedFormat {
    /// Plain text.
    Text,
    /// JSON Lines.
    JsonLines,
    /// Token ids.
    Ids,
    /// FASTA or FASTQ.
    Sequences,
}

impl NamedFormat {
    /// The format that the ending of a file name tells, in upper or lower case and before that of a compression; `None` if it
    /// tells none.
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy();
        if sequence::ending(&name).is_some() {
            return Some(Self::Sequences);
        }
        let plain = sequence::without_compression(&name);
        match Path::new(plain).extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "txt" | "text" | "md" => Some(Self::Text),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            // Files of ids may begin with any bytes, so that compression cannot be detected, and is not supported.
            "bin" if plain.len() == name.len() => Some(Self::Ids),
            _ => None,
        }
    }

    /// The formats that the files of a folder have by their names, each once, in the order of the files.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn in_folder(path: &Path) -> Result<Vec<Self>, DataError> {
        let mut formats = vec![];
        for file in sequence::entries(path)?.iter().filter(|entry| entry.is_file()) {
            if let Some(format) = Self::of_entry(file)
                && !formats.contains(&format)
            {
                formats.push(format);
            }
        }
        Ok(formats)
    }

    /// The format of a file in a folder, of which a README.md is no data.
    fn of_entry(path: &Path) -> Option<Self> {
        let is_page = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("md"));
        Self::of(path).filter(|_| !is_page)
    }

    /// The format of the settings.
    fn of_settings(format: &DatasetFormat) -> Self {
        match format {
            DatasetFormat::Text(_) => Self::Text,
            DatasetFormat::JsonLines { .. } => Self::JsonLines,
            DatasetFormat::Ids { .. } => Self::Ids,
            DatasetFormat::Sequences => Self::Sequences,
        }
    }

    /// Endings of the names of its files, for messages.
    fn endings(self) -> &'static str {
        match self {
            Self::Text => ".txt, .text",
            Self::JsonLines => ".jsonl, .ndjson",
            Self::Ids => ".bin",
            Self::Sequences => ".fa, .fasta, .fna, .faa, .fq, .fastq and the like",
        }
    }
}

/// Expands `paths`: replaces each folder by its files that have an ending of the format, sorted by name; of sequence files only
/// those that may be of `alphabet`. Folders in a folder are skipped.
///
/// # Errors
/// A path that does not exist or is neither a folder nor a regular file; a folder without a matching file.
pub(super) fn list(
    paths: &[PathBuf],
    format: &DatasetFormat,
    alphabet: Option<Alphabet>,
) -> Result<Listing, DataError> {
    let mut all = Listing::default();
    for path in paths {
        let facts = fs::metadata(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        if facts.is_dir() {
            let inside = match format {
                DatasetFormat::Sequences => Listing::of(std::slice::from_ref(path), alphabet)?,
                DatasetFormat::Text(_) | DatasetFormat::JsonLines { .. } | DatasetFormat::Ids { .. } => {
                    folder(path, format)?
                }
            };
            all.files.extend(inside.files);
            all.skipped.extend(inside.skipped);
        } else if facts.is_file() {
            all.files.push(ListedFile { path: path.clone(), alphabet: None });
        } else {
            let what = "not a regular file; training reads its data more than once".to_owned();
            return Err(DataError::at(path, DataErrorKind::Malformed(what)));
        }
    }
    Ok(all)
}

/// Whether the file is compressed, according to its first bytes. Files of token ids are never compressed.
pub(super) fn is_compressed(path: &Path, format: &DatasetFormat) -> Result<bool, DataError> {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(6).read_to_end(&mut start));
    read.map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
    Ok(!matches!(format, DatasetFormat::Ids { .. }) && Compression::of(&start).is_some())
}

/// The files of a folder that have an ending of the format.
fn folder(path: &Path, format: &DatasetFormat) -> Result<Listing, DataError> {
    let wanted = NamedFormat::of_settings(format);
    let mut listing = Listing::default();
    for entry in sequence::entries(path)? {
        // These functions follow symbolic links, so that links to files are read.
        match (entry.is_dir(), NamedFormat::of_entry(&entry) == Some(wanted) && entry.is_file()) {
            (true, _) => listing.skipped.push(SkippedEntry { path: entry, why: SkipReason::Folder }),
            (false, true) => listing.files.push(ListedFile { path: entry, alphabet: None }),
            (false, false) => listing.skipped.push(SkippedEntry { path: entry, why: SkipReason::Ending }),
        }
    }
    if listing.files.is_empty() {
        let endings = wanted.endings();
        let what = format!("no file in this folder ends with {endings}; give the files by name");
        Err(DataError::at(path, DataErrorKind::NoData(what)))
    } else {
        Ok(listing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_its_files_by_name() {
        let folder = std::env::temp_dir().join(format!("plimsoll-files-{}", std::process::id()));
        fs::create_dir_all(folder.join("inner.txt")).unwrap();
        for name in ["b.txt", "a.txt.gz", ".hidden.txt", "c.csv", "B.TXT", "README.md"] {
            fs::write(folder.join(name), "x").unwrap();
        }
        let format = DatasetFormat::Text(super::super::TextDocuments::Lines);
        let named = folder.join("c.csv");
        let found = list(&[named.clone(), folder.clone()], &format, None).unwrap();
        let names = ["c.csv", "B.TXT", "a.txt.gz", "b.txt"];
        let expected: Vec<PathBuf> = names.iter().map(|n| folder.join(n)).collect();
        assert_eq!(found.paths(), expected);
        let line = found.skipped_line().unwrap();
        assert!(line.starts_with("skipped in folders: README.md, c.csv, inner.txt/ (a folder); "), "{line}");
        assert_eq!(NamedFormat::in_folder(&folder).unwrap(), [NamedFormat::Text]);
        for format in [DatasetFormat::Sequences, DatasetFormat::JsonLines { field: "text".to_owned() }] {
            let error = list(std::slice::from_ref(&folder), &format, None).unwrap_err().to_string();
            assert!(error.contains("end with .fa, ") || error.contains("ends with .jsonl"), "{error}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
