//! Lists the files of a data set. Invariant: equal paths give equal files in equal order, independently of the order in
//! which the operating system lists a folder.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::settings::Format;
use crate::sequence::Compression;
use crate::{DataError, DataErrorKind};

/// File name extensions of compressed files; they follow the extension of the format.
const COMPRESSED: [&str; 4] = [".gz", ".bz2", ".zst", ".xz"];

/// File name extensions by which the files of a format are found in a folder. A file given by its own path may have
/// any name.
fn endings(format: &Format) -> &'static [&'static str] {
    match format {
        Format::Text(_) => &[".txt", ".text"],
        Format::JsonLines { .. } => &[".jsonl", ".ndjson"],
        Format::Ids { .. } => &[".bin"],
        Format::Sequences => &[".fa", ".fasta", ".fas", ".fna", ".ffn", ".frn", ".faa", ".fq", ".fastq"],
    }
}

/// Expands `paths`: replaces each folder by its files that have an extension of the format, sorted by name.
/// Subfolders are not searched.
///
/// # Errors
/// A path that does not exist or is neither a folder nor a regular file; a folder without a matching file.
pub(super) fn list(paths: &[PathBuf], format: &Format) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for path in paths {
        let facts = fs::metadata(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        match facts.is_dir() {
            true => files.extend(folder(path, format)?),
            false if facts.is_file() => files.push(path.clone()),
            false => {
                let what = "not a regular file; training reads its data more than once".to_owned();
                return Err(DataError::at(path, DataErrorKind::Malformed(what)));
            }
        }
    }
    Ok(files)
}

/// Whether the file is compressed, according to its first bytes. Files of token ids are never compressed.
pub(super) fn is_compressed(path: &Path, format: &Format) -> Result<bool, DataError> {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(6).read_to_end(&mut start));
    read.map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
    Ok(!matches!(format, Format::Ids { .. }) && Compression::of(&start).is_some())
}

/// The files of a folder that have an extension of the format, sorted by name; hidden files are skipped.
fn folder(path: &Path, format: &Format) -> Result<Vec<PathBuf>, DataError> {
    let endings = endings(format);
    // Raw ids may start with any bytes, so compression cannot be detected reliably and is not supported for them.
    let compressed = if matches!(format, Format::Ids { .. }) { &[][..] } else { &COMPRESSED };
    let read = |e| DataError::at(path, DataErrorKind::Read(e));
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(read)? {
        let entry = entry.map_err(read)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let plain = compressed.iter().find_map(|c| name.strip_suffix(c)).unwrap_or(&name);
        // `Path::is_file` follows symbolic links, so links to files are included.
        if !name.starts_with('.') && endings.iter().any(|e| plain.ends_with(e)) && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort();
    match files.is_empty() {
        false => Ok(files),
        true => {
            let what =
                format!("no file in this folder ends with {}; give the files by name", endings.join(", "));
            Err(DataError::at(path, DataErrorKind::NoData(what)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_its_files_by_name() {
        let folder = std::env::temp_dir().join(format!("plimsoll-files-{}", std::process::id()));
        fs::create_dir_all(folder.join("inner.txt")).unwrap();
        for name in ["b.txt", "a.txt.gz", ".hidden.txt", "c.md", "B.txt"] {
            fs::write(folder.join(name), "x").unwrap();
        }
        let format = Format::Text(super::super::TextDocuments::Lines);
        let named = folder.join("c.md");
        let found = list(&[named.clone(), folder.clone()], &format).unwrap();
        let expected: Vec<PathBuf> = ["B.txt", "a.txt.gz", "b.txt"].iter().map(|n| folder.join(n)).collect();
        assert_eq!(found[0], named);
        assert_eq!(found[1..], expected);
        let error = list(std::slice::from_ref(&folder), &Format::Sequences).unwrap_err();
        assert!(error.to_string().contains("no file in this folder ends with .fa, "), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
