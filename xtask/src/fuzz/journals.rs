//! Journals of interrupted runs. Invariant: the blocks that are read are a prefix of the blocks that were
//! written under the journal's key; a damaged journal gives fewer blocks or an error.

use super::{CaseResult, FuzzFormat, Seeds, check_error, measured};
use plimsoll_data::DataError;
use plimsoll_data::journal::{Blocks, Journal};
use std::fs;
use std::path::Path;

/// Keys of the journals in the corpus, with their blocks.
const JOURNALS: [(&[u8], &[&[u8]]); 4] = [
    (b"", &[]),
    (b"{\"identity\": 1}", &[b"first", b"", b"third, which is longer"]),
    (b"{\"identity\": 2}", &[b"first", b"plimjnl1", b"plimjnl1\x03\0\0\0\0\0\0\0"]),
    (b"many", &[b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]),
];

/// The format `journal`, with a corpus that the journal writer creates.
pub fn formats(folder: &Path) -> Vec<FuzzFormat> {
    let path = folder.join("sound.journal");
    // If the folder cannot be created, the corpus has only an empty file, and `run` reports the error.
    let _ = fs::create_dir_all(folder);
    let journals = JOURNALS.into_iter().filter_map(|(key, blocks)| journal(&path, key, blocks).ok());
    let corpus = journals.chain([vec![]]).collect();
    let words: [&[u8]; 5] = [
        b"plimjnl1",
        b"plimjnl1\x01\0\0\0\0\0\0\0",
        b"\0\0\0\0\0\0\0\0",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01",
    ];
    let seeds = Seeds { corpus, words: words.map(<[u8]>::to_vec).to_vec() };
    vec![FuzzFormat::new("journal", "progress.journal", seeds, check)]
}

/// Writes a journal to `path` and returns its bytes.
fn journal(path: &Path, key: &[u8], blocks: &[&[u8]]) -> Result<Vec<u8>, DataError> {
    let mut journal = Journal::create(path, key)?;
    blocks.iter().try_for_each(|block| journal.append(block))?;
    Ok(fs::read(path).unwrap_or_default())
}

/// Reads a case and compares its blocks with the blocks of its key in [`JOURNALS`].
fn check(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let (read, peak) = measured(|| blocks(path));
    let (accepted, key, found) = match read {
        Ok(None) => (true, vec![], vec![]),
        Ok(Some((key, found, None))) => (true, key, found),
        Ok(Some((key, found, Some(error)))) => {
            check_error(&error, path)?;
            (false, key, found)
        }
        Err(error) => {
            check_error(&error, path)?;
            (false, vec![], vec![])
        }
    };
    let written = JOURNALS.iter().find(|(known, _)| *known == key).map_or(&[][..], |(_, blocks)| *blocks);
    if found.len() > written.len() || found.iter().zip(written).any(|(found, written)| found != written) {
        return Err(format!("under the key '{}' it reads {found:?}", key.escape_ascii()));
    }
    Ok(CaseResult { accepted, peak, allowed: (1 << 20) + 8 * bytes.len() as u64 })
}

/// Key and blocks, and the error that ended reading.
type JournalContent = (Vec<u8>, Vec<Vec<u8>>, Option<DataError>);

/// Reads all blocks; `None` if the file ends before its key is complete.
fn blocks(path: &Path) -> Result<Option<JournalContent>, DataError> {
    let Some(mut blocks) = Blocks::open(path)? else { return Ok(None) };
    let mut found = vec![];
    let mut block = vec![];
    loop {
        match blocks.next_into(&mut block) {
            Ok(true) => found.push(block.clone()),
            Ok(false) => return Ok(Some((blocks.key().to_vec(), found, None))),
            Err(error) => return Ok(Some((blocks.key().to_vec(), found, Some(error)))),
        }
    }
}
