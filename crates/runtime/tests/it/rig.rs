//! Temporary folders, fixtures, and tests that run in a process of their own.

use std::fs;
use std::path::{Path, PathBuf};

/// A temporary folder, removed when the value is dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("plimsoll-run-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Path of a file or folder in `fixtures/`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Whether the current process runs only the test `name`. If not, runs that test in a child process, which must
/// succeed, and returns false. For tests that measure the memory of the whole process.
pub fn in_own_process(name: &str) -> bool {
    const ALONE: &str = "PLIMSOLL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = std::process::Command::new(std::env::current_exe().expect("a test binary"));
    let output = child.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().expect("it starts");
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{out}");
    assert!(output.status.success(), "{err}");
    false
}
