//! Where the tests' files are. Invariant: what is written goes to the test's own folder under the
//! target folder; what is read from outside the project may be absent, and the test says so.

use std::fs;
use std::path::{Path, PathBuf};

/// A fresh folder for one test.
pub fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("the temporary folder can be made");
    folder
}

/// A file of the goldens.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens").join(name)
}

/// A file of the real material beside the project, or none, with a message, when it is absent.
pub fn real(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/real").join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: {} is absent", path.display());
    None
}
