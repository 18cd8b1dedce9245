//! Free disk space. Invariant: this module only reads; anything the system does not report is `None`.

use plimsoll_graph::Bytes;
use std::path::Path;

/// Free bytes that this process may use on the file system of `path`, or of its nearest existing parent.
#[cfg(unix)]
pub fn free(path: &Path) -> Option<Bytes> {
    use std::ffi::CString;
    use std::mem::MaybeUninit;
    use std::os::unix::ffi::OsStrExt;

    let absolute = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    let name = CString::new(existing.as_os_str().as_bytes()).ok()?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name ends with a zero byte, and the pointer is to a local of the C struct's layout.
    if unsafe { libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it initialised all of the struct.
    let stat = unsafe { stat.assume_init() };
    // `f_bavail`, not `f_bfree`: blocks reserved for the superuser cannot be written.
    #[allow(clippy::unnecessary_cast, reason = "the fields have other widths on other systems")]
    Some(Bytes((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64)))
}

/// Unknown on this system: `None`.
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
