//! Paths of test files. Invariant: a test writes only to its own folder under the target folder; a test that needs
//! files from outside the project prints that it is skipped if they are absent.

use std::fs;
use std::path::{Path, PathBuf};

/// Creates an empty folder for one test, replacing an existing one.
pub fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("the temporary folder can be made");
    folder
}

/// Path of a file in `fixtures/goldens`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens").join(name)
}

/// Path of a file of real data beside the project; prints a message and returns `None` if it is absent.
pub fn real(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/real").join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: {} is absent", path.display());
    None
}
