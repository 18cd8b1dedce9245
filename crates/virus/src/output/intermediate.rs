//! The files between VirNucPro's stages, for `--keep-intermediate`. Invariant: bytes stand in the
//! files as they were given, in that order (`data::intermediate` formats them).

use super::OutputError;
use data::atomic::AtomicFile;
use std::io::Write;
use std::path::Path;

/// The chunks.
pub const CHUNKED: &str = "chunked.fa";
/// The open reading frames as nucleotides.
pub const NUCLEOTIDE: &str = "nucleotide.fa";
/// The open reading frames as proteins.
pub const PROTEIN: &str = "protein.faa";

/// The three files, being written.
#[derive(Debug)]
pub struct Intermediate {
    files: [AtomicFile; 3],
}

impl Intermediate {
    /// Starts them in `folder`.
    pub fn create(folder: &Path) -> Result<Self, OutputError> {
        let [chunked, nucleotide, protein] =
            [CHUNKED, NUCLEOTIDE, PROTEIN].map(|name| AtomicFile::create(folder.join(name)));
        Ok(Intermediate { files: [chunked?, nucleotide?, protein?] })
    }

    /// Appends a text to each: to `chunked.fa`, `nucleotide.fa`, `protein.faa`.
    pub fn append(&mut self, texts: &[Vec<u8>; 3]) -> Result<(), OutputError> {
        for (file, text) in self.files.iter_mut().zip(texts) {
            file.write_all(text).map_err(|e| file.error(e))?;
        }
        Ok(())
    }

    /// The files, to be committed.
    pub fn into_files(self) -> [AtomicFile; 3] {
        self.files
    }
}
