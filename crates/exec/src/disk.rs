//! Free space on file systems. Invariant: it only reads; what the system does not tell is `None`.

use graph::Bytes;
use std::path::Path;

/// Bytes that this process may still write on the file system of `path`, or of its nearest parent that exists.
#[cfg(unix)]
pub fn free(path: &Path) -> Option<Bytes> {
    use std::ffi::CString;
    use std::mem::MaybeUninit;
    use std::os::unix::ffi::OsStrExt;

    let absolute = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    let name = CString::new(existing.as_os_str().as_bytes()).ok()?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name ends with a zero byte and the pointer is to a local of the header's layout.
    if unsafe { libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it filled all of it.
    let stat = unsafe { stat.assume_init() };
    // `f_bavail`, not `f_bfree`: blocks that are reserved for the superuser cannot be written.
    #[allow(clippy::unnecessary_cast, reason = "the fields have other widths on other systems")]
    Some(Bytes((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64)))
}

/// Not known on this system.
#[cfg(not(unix))]
pub fn free(_: &Path) -> Option<Bytes> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_folder_that_is_not_there_yet_has_the_space_of_its_parent() {
        let here = free(Path::new(".")).expect("this folder is on a file system");
        assert!(here > Bytes::ZERO);
        assert!(free(Path::new("no/such/folder")).is_some());
    }
}
