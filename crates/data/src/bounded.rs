//! Reads a small file completely, up to a size limit. Invariant: neither an endless device (`/dev/zero`) nor a large
//! file makes a reader hold more bytes than the caller allows.

use crate::foreign;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a file that is read by its name alone, and not as a stream. Opening a pipe would block until somebody writes to
/// it, and what is read from it once is gone.
///
/// # Errors
/// I/O errors of the system; `InvalidInput` for a pipe or a socket.
pub fn open(path: &Path) -> Result<File> {
    if is_pipe(path)? {
        let what = "a pipe; this file must be a regular file: write it to disk first";
        Err(Error::new(ErrorKind::InvalidInput, what))
    } else {
        File::open(path)
    }
}

/// Whether `path` leads to a pipe or a socket.
fn is_pipe(path: &Path) -> Result<bool> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = std::fs::metadata(path)?.file_type();
        Ok(kind.is_fifo() || kind.is_socket())
    }
    #[cfg(not(unix))]
    {
        std::fs::metadata(path).map(|_| false)
    }
}

/// Returns the bytes of the file at `path`, which may have at most `max_bytes` bytes.
///
/// # Errors
/// I/O errors of the system; `FileTooLarge` with the limit in its text if the file is larger; `InvalidData` if it is a pointer
/// of Git LFS instead of the file itself.
pub fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("larger than {max_bytes} bytes")));
    }
    if foreign::is_lfs_pointer(&bytes) {
        return Err(Error::new(ErrorKind::InvalidData, foreign::LFS_POINTER));
    }
    Ok(bytes)
}

/// Returns the text of the file at `path`, which may have at most `max_bytes` bytes.
///
/// # Errors
/// The errors of [`read`], and `InvalidData` if the file is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> Result<String> {
    String::from_utf8(read(path, max_bytes)?).map_err(|_| Error::new(ErrorKind::InvalidData, "not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_be_as_large_as_allowed() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let size = std::fs::metadata(&path).expect("there").len();
        assert_eq!(read_text(&path, size).expect("read").len() as u64, size);
        assert_eq!(read(&path, size - 1).expect_err("too large").kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_pointer_of_git_lfs_is_no_content() {
        let path = std::env::temp_dir().join(format!("plimsoll-pointer-{}", std::process::id()));
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n").unwrap();
        let error = read(&path, 1 << 10).expect_err("a pointer");
        assert!(
            error.kind() == ErrorKind::InvalidData && error.to_string().contains("git lfs pull"),
            "{error}"
        );
        std::fs::remove_file(&path).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_device_that_never_ends_is_left() {
        let error = read(Path::new("/dev/zero"), 1 << 16).expect_err("endless");
        assert_eq!(error.to_string(), "larger than 65536 bytes");
    }
}
