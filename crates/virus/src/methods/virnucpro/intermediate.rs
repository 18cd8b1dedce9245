//! Writers of the intermediate files of VirNucPro's stages, for `--keep-intermediate`. Invariant: the files contain the
//! given bytes in the given order (`plimsoll_data::intermediate` formats them).

use crate::output::OutputError;
use plimsoll_data::atomic::AtomicFile;
use std::io::Write;
use std::path::Path;

/// Name of the file with the windows.
pub(crate) const CHUNKED: &str = "chunked.fa";
/// Name of the file with the nucleotide sequences of the open reading frames.
pub(crate) const NUCLEOTIDE: &str = "nucleotide.fa";
/// Name of the file with the protein sequences of the open reading frames.
pub(crate) const PROTEIN: &str = "protein.faa";

/// Writer of the three files.
#[derive(Debug)]
pub(crate) struct IntermediateFiles {
    files: [AtomicFile; 3],
}

impl IntermediateFiles {
    /// Creates the files in `folder`.
    pub(crate) fn create(folder: &Path) -> Result<Self, OutputError> {
        let [chunked, nucleotide, protein] =
            [CHUNKED, NUCLEOTIDE, PROTEIN].map(|name| AtomicFile::create(folder.join(name)));
        Ok(IntermediateFiles { files: [chunked?, nucleotide?, protein?] })
    }

    /// Appends a text to each of `chunked.fa`, `nucleotide.fa` and `protein.faa`.
    pub(crate) fn append(&mut self, texts: &[Vec<u8>; 3]) -> Result<(), OutputError> {
        for (file, text) in self.files.iter_mut().zip(texts) {
            file.write_all(text).map_err(|e| file.error(e))?;
        }
        Ok(())
    }

    /// Returns the files, ready to be committed.
    pub(crate) fn into_files(self) -> [AtomicFile; 3] {
        self.files
    }
}
