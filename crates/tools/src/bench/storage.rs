//! Sequential read rate of the disk of a folder. Invariant: the rate is measured without the page cache
//! (`O_DIRECT`), or no rate is returned.

use std::fs::{File, OpenOptions, remove_file};
use std::io::{Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

/// Size of the test file in bytes.
const FILE: usize = 128 << 20;
/// Size of one read or write in bytes.
const READ: usize = 8 << 20;

/// Alignment in bytes of the buffer for `O_DIRECT`, which requires multiples of the disk's logical block size.
const PAGE: usize = 4096;

/// Value of `O_DIRECT` on Linux, which depends on the architecture (fcntl.h); `None` elsewhere.
const DIRECT: Option<i32> =
    match (cfg!(target_os = "linux"), cfg!(target_arch = "x86_64"), cfg!(target_arch = "aarch64")) {
        (true, true, _) => Some(0o40_000),
        (true, _, true) => Some(0o200_000),
        _ => None,
    };

/// Bytes per second of a sequential read from the disk of `folder`; `None` if the test file cannot be written
/// or cannot be read with `O_DIRECT`, as on some file systems in memory.
pub(super) fn rate(folder: &Path) -> Option<f64> {
    let path = folder.join(format!(".plimsoll-{}.storage", std::process::id()));
    let mut file = File::create_new(&path).ok()?;
    let reader = open_direct(&path);
    // Both handles stay usable, and the system frees the file when the process ends, however it ends.
    remove_file(&path).ok()?;
    let mut reader = reader.ok()?;
    write(&mut file).and_then(|()| read(&mut reader)).ok()
}

/// Opens a file for reads that bypass the cache of the system.
fn open_direct(path: &Path) -> Result<File> {
    let flags = DIRECT.ok_or(std::io::ErrorKind::Unsupported)?;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Writes pseudo-random bytes, which a compressing disk or file system cannot shrink, and syncs them to the disk.
fn write(file: &mut File) -> Result<()> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0; READ];
    for _ in 0..FILE / READ {
        for bytes in block.chunks_exact_mut(8) {
            // xorshift64 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block)?;
    }
    file.sync_all()
}

fn read(file: &mut File) -> Result<f64> {
    let mut buffer = vec![0u8; READ + PAGE];
    // A page more than a read is allocated, so an aligned range of the size of a read lies inside.
    let start = buffer.as_ptr().align_offset(PAGE);
    let buffer = &mut buffer[start..start + READ];
    let mut bytes = 0;
    let clock = Instant::now();
    loop {
        match file.read(buffer)? {
            0 => return Ok(bytes as f64 / clock.elapsed().as_secs_f64()),
            n => bytes += n,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    #[test]
    fn a_folder_that_is_not_there_has_no_rate_and_nothing_is_left() {
        let folder = Folder::new("storage");
        assert_eq!(rate(&folder.path("absent")), None);
        assert!(rate(&folder.0).is_none_or(|rate| rate > 0.0));
        assert_eq!(folder.names(), Vec::<String>::new());
    }
}
