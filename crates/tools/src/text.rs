//! Writes texts that the program generates, such as manual pages. Invariant: a file with other content is replaced only by
//! force.

use crate::ToolError;
use plimsoll_data::DataError;
use plimsoll_data::DataErrorKind;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::bounded;
use std::io::Write;
use std::path::Path;

/// Writes a file that appears complete or not at all. A file with this text stays as it is.
///
/// # Errors
/// A file with another content, unless `force` is set; a file that cannot be written.
pub fn write_text(path: &Path, text: &str, force: bool) -> Result<(), ToolError> {
    if bounded::read_text(path, text.len() as u64).is_ok_and(|there| there == text) {
        return Ok(());
    }
    if path.exists() && !force {
        return Err(DataError::at(path, DataErrorKind::Exists).into());
    }
    let mut file = AtomicFile::create(path)?;
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    Ok(file.commit()?)
}
