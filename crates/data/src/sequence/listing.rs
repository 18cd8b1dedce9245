//! Lists the sequence files that paths stand for. Invariant: everything in a folder is either listed as a file to read or
//! named as skipped, but for hidden files; equal folders give equal lists, whatever the order of their entries on disk.

use crate::alphabet::Alphabet;
use crate::printable::Name;
use crate::{DataError, DataErrorKind};
use std::fs;
use std::path::{Path, PathBuf};

/// Endings of file names that sequence files have, in lower case, before that of a compression, with the alphabet where the
/// ending tells it.
const ENDINGS: [(&str, Option<Alphabet>); 16] = [
    (".fa", None),
    (".fasta", None),
    (".fas", None),
    (".fsa", None),
    (".mfa", None),
    (".fna", Some(Alphabet::Nucleotides)),
    (".ffn", Some(Alphabet::Nucleotides)),
    (".frn", Some(Alphabet::Nucleotides)),
    (".contigs", Some(Alphabet::Nucleotides)),
    (".scaffolds", Some(Alphabet::Nucleotides)),
    (".fq", Some(Alphabet::Nucleotides)),
    (".fastq", Some(Alphabet::Nucleotides)),
    (".faa", Some(Alphabet::AminoAcids)),
    (".mpfa", Some(Alphabet::AminoAcids)),
    (".pep", Some(Alphabet::AminoAcids)),
    (".prot", Some(Alphabet::AminoAcids)),
];
/// Endings of compressed files.
const COMPRESSED: [&str; 4] = [".gz", ".bz2", ".zst", ".xz"];
/// An ending that mail programs and browsers append to text files.
const APPENDED: &str = ".txt";
/// Number of skipped names that [`Listing::skipped_line`] shows.
const SHOWN: usize = 8;

/// The sequence files that a list of paths stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The files, in the order of the paths; those of a folder sorted by name.
    pub files: Vec<ListedFile>,
    /// The entries of folders that are not read.
    pub skipped: Vec<SkippedEntry>,
}

/// A sequence file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// Its path.
    pub path: PathBuf,
    /// Alphabet that the ending of its name tells, for a file of a folder; `None` if it tells none, or if the file was named.
    pub alphabet: Option<Alphabet>,
}

/// An entry of a folder that is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedEntry {
    /// Its path.
    pub path: PathBuf,
    /// The reason why it is skipped.
    pub why: SkipReason,
}

/// Reason why an entry of a folder is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A folder in the folder.
    Folder,
    /// Its name does not end like that of a sequence file.
    Ending,
    /// It holds sequences of the other alphabet.
    Alphabet(Alphabet),
}

impl SkippedEntry {
    /// The name of the entry, with the reason unless it is the ending.
    fn label(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        match self.why {
            SkipReason::Folder => format!("{}/ (a folder)", Name(&name)),
            SkipReason::Ending => Name(&name).to_string(),
            SkipReason::Alphabet(Alphabet::AminoAcids) => format!("{} (proteins)", Name(&name)),
            SkipReason::Alphabet(Alphabet::Nucleotides) => format!("{} (nucleotides)", Name(&name)),
        }
    }
}

impl Listing {
    /// Lists the files of `paths`: a file stands for itself, a folder for the files in it whose names end like those of
    /// sequence files (in upper or lower case, plain or compressed). Folders in a folder are skipped. With `alphabet`, files of
    /// a folder whose ending tells the other alphabet are skipped.
    ///
    /// # Errors
    /// A folder that cannot be read, or from which no file is read.
    pub fn of(paths: &[PathBuf], alphabet: Option<Alphabet>) -> Result<Self, DataError> {
        let mut listing = Self::default();
        for path in paths {
            if super::stored::is_stdin(path) || !path.is_dir() {
                listing.files.push(ListedFile { path: path.clone(), alphabet: None })
            } else {
                listing.add_folder(path, alphabet)?
            }
        }
        Ok(listing)
    }

    /// The paths of the files.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| file.path.clone()).collect()
    }

    /// Whether folders have files of both alphabets, so that the model decides which are read.
    pub fn is_mixed(&self) -> bool {
        let both = [Alphabet::Nucleotides, Alphabet::AminoAcids];
        both.into_iter().all(|alphabet| self.files.iter().any(|file| file.alphabet == Some(alphabet)))
    }

    /// A line with the names of the skipped entries; `None` if there are none.
    pub fn skipped_line(&self) -> Option<String> {
        if self.skipped.is_empty() {
            return None;
        }
        let names: Vec<String> = self.skipped.iter().take(SHOWN).map(SkippedEntry::label).collect();
        let more = match self.skipped.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!(
            "skipped in folders: {}{more}; give a file by its name to read it whatever its ending",
            names.join(", ")
        ))
    }

    fn add_folder(&mut self, folder: &Path, wanted: Option<Alphabet>) -> Result<(), DataError> {
        let before = self.files.len();
        let mut others = 0;
        for path in entries(folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                self.skipped.push(SkippedEntry { path: path.clone(), why: SkipReason::Folder });
                continue;
            }
            let Some((_, alphabet)) = ending(&name) else {
                self.skipped.push(SkippedEntry { path: path.clone(), why: SkipReason::Ending });
                continue;
            };
            match (alphabet, wanted) {
                (Some(found), Some(wanted)) if found != wanted => {
                    others += 1;
                    self.skipped.push(SkippedEntry { path: path.clone(), why: SkipReason::Alphabet(found) });
                }
                _ => self.files.push(ListedFile { path, alphabet }),
            }
        }
        if self.files.len() > before {
            return Ok(());
        }
        let endings: Vec<&str> = ENDINGS.iter().map(|(ending, _)| *ending).collect();
        let kind = match wanted.filter(|_| others > 0) {
            Some(Alphabet::Nucleotides) => "nucleotide sequence files (it has files of proteins)",
            Some(Alphabet::AminoAcids) => "files of proteins (it has files of nucleotide sequences)",
            None => "sequence files",
        };
        let what = format!(
            "a folder without {kind}; names of sequence files end with {}, in upper or lower case, optionally followed by {}; \
             folders in the folder are not searched",
            endings.join(", "),
            COMPRESSED.join(", ")
        );
        Err(DataError::at(folder, DataErrorKind::Malformed(what)))
    }
}

/// The entries of a folder without hidden ones, sorted by name.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut paths = vec![];
    for entry in fs::read_dir(folder).map_err(DataError::reading(folder))? {
        let entry = entry.map_err(DataError::reading(folder))?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Length of the ending of a file name that says that the file has sequences, with the ending of its compression, and the
/// alphabet that it tells; `None` if the name does not end so, or consists of the ending.
pub(crate) fn ending(name: &str) -> Option<(usize, Option<Alphabet>)> {
    let plain = without_compression(name);
    let lower = plain.to_ascii_lowercase();
    let found = plain_ending(&lower).or_else(|| plain_ending(lower.strip_suffix(APPENDED)?));
    found.map(|(stem, alphabet)| (name.len() - stem, alphabet))
}

/// Length of a file name in lower case without its ending in [`ENDINGS`], and the alphabet that the ending tells.
fn plain_ending(name: &str) -> Option<(usize, Option<Alphabet>)> {
    let (ending, alphabet) =
        ENDINGS.iter().find(|(ending, _)| name.ends_with(ending) && name.len() > ending.len())?;
    Some((name.len() - ending.len(), *alphabet))
}

/// A file name without the ending of a compression.
pub(crate) fn without_compression(name: &str) -> &str {
    COMPRESSED
        .iter()
        .find_map(|ending| {
            let at = name.len().checked_sub(ending.len())?;
            name.get(at..).filter(|end| end.eq_ignore_ascii_case(ending)).and(name.get(..at))
        })
        .unwrap_or(name)
}

/// Returns a base name for the outputs made from the file at `path`: its name without the endings of its format, `stdin` for
/// `-` and for a descriptor of the process. Never dots alone, which would name a parent folder.
pub fn stem(path: &Path) -> String {
    if super::stored::is_stdin(path) || is_descriptor(path) {
        return "stdin".to_owned();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = Some(without_compression(&name)).filter(|plain| has_other_than_dots(plain)).unwrap_or(&name);
    let stem = ending(plain).map(|(length, _)| &plain[..plain.len() - length]);
    stem.filter(|stem| has_other_than_dots(stem)).unwrap_or(plain).to_owned()
}

/// Whether a name has a character other than dots.
fn has_other_than_dots(name: &str) -> bool {
    name.bytes().any(|b| b != b'.')
}

/// Whether a path names an open file of this process, such as a pipe that a shell made for `<(command)`.
fn is_descriptor(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let number = text.strip_prefix("/dev/fd/").or_else(|| {
        let (process, number) = text.strip_prefix("/proc/")?.split_once("/fd/")?;
        (process == "self" || process.bytes().all(|b| b.is_ascii_digit())).then_some(number)
    });
    text == "/dev/stdin" || number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_their_endings() {
        for (path, wanted) in [
            ("examples/reads.fa", "reads"),
            ("a.b.fastq.gz", "a.b"),
            ("x/y.fna.zst", "y"),
            ("y.faa.xz", "y"),
            ("y.fa.bz2", "y"),
            ("y.FA", "y"),
            ("y.Fasta.GZ", "y"),
            ("y.fsa", "y"),
            ("y.contigs", "y"),
            ("y.fa.txt", "y"),
            ("y.FNA.TXT.gz", "y"),
            ("y.txt", "y.txt"),
            ("y.txt.gz", "y.txt"),
            ("é.fa", "é"),
            (".fa", ".fa"),
            ("...fa", "...fa"),
            ("..fa.gz", "..fa"),
            ("-", "stdin"),
            ("/dev/stdin", "stdin"),
            ("/dev/fd/63", "stdin"),
            ("/proc/self/fd/11", "stdin"),
            ("/proc/17/fd/3", "stdin"),
            ("fd/63", "63"),
            ("/dev/fd/x", "x"),
        ] {
            assert_eq!(stem(Path::new(path)), wanted, "{path}");
        }
    }

    /// The kind that each entry of a folder is read as, for either alphabet: `+` read, `-` skipped.
    #[test]
    fn a_folder_is_read_by_its_endings_and_the_rest_is_named() {
        let folder = std::env::temp_dir().join(format!("plimsoll-listing-{}", std::process::id()));
        fs::create_dir_all(folder.join("sub.fa")).unwrap();
        let table = [
            ("a.FA", true, true),
            ("b.fsa", true, true),
            ("c.contigs", true, false),
            ("c.Scaffolds.XZ", true, false),
            ("d.fa.txt", true, true),
            ("e.fasta", true, true),
            ("e.fna.gz", true, false),
            ("f.FAA", false, true),
            ("f.pep.bz2", false, true),
            ("g.fq.zst", true, false),
            (".hidden.fa", false, false),
            ("notes.txt", false, false),
            ("seqs.gbk", false, false),
        ];
        for (name, _, _) in table {
            fs::write(folder.join(name), "").unwrap();
        }
        let read = |alphabet| Listing::of(std::slice::from_ref(&folder), alphabet).unwrap();
        let of = |read: fn(&(&str, bool, bool)) -> bool| {
            let mut paths: Vec<PathBuf> =
                table.iter().filter(|row| read(row)).map(|(name, _, _)| folder.join(name)).collect();
            paths.sort();
            paths
        };
        let dna = read(Some(Alphabet::Nucleotides));
        let proteins = read(Some(Alphabet::AminoAcids));
        assert_eq!(dna.paths(), of(|row| row.1));
        assert_eq!(proteins.paths(), of(|row| row.2));
        assert_eq!(read(None).paths(), of(|row| row.1 || row.2));
        assert!(read(None).is_mixed() && !dna.is_mixed() && !proteins.is_mixed());
        let line = dna.skipped_line().unwrap();
        for part in ["f.FAA (proteins)", "f.pep.bz2 (proteins)", "notes.txt", "seqs.gbk", "sub.fa/ (a folder)"]
        {
            assert!(line.contains(part) && !line.contains("hidden"), "{line}");
        }
        for (name, _, _) in table {
            fs::remove_file(folder.join(name)).unwrap();
        }
        fs::write(folder.join("x.faa"), "").unwrap();
        let error = Listing::of(std::slice::from_ref(&folder), Some(Alphabet::Nucleotides)).unwrap_err();
        assert!(error.to_string().contains("it has files of proteins"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
