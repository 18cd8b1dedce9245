//! Folders and files of tests. Invariant: a test writes only to its own folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// A temporary folder, and its path. Removed when the value is dropped, unless the test panicked.
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates an empty folder whose name contains `name`; every folder of all running tests has another path.
    pub fn new(name: &str) -> Self {
        Self::within(&std::env::temp_dir(), &format!("plimsoll-{name}"))
    }

    /// Creates the folder in `parent`; [`Folder::new`] creates it in the system's folder for temporary files.
    pub fn within(parent: &Path, name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{name}-{}-{number}", process::id()));
        // An earlier process with this id may have left a folder.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    /// Path of a file or folder in this folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).expect("written");
        path
    }

    /// Text of a file.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Sorted names of the files and folders in this folder.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("read");
        let names = entries.map(|entry| entry.expect("read").file_name().into_string().expect("UTF-8"));
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// Path of a file or folder in `fixtures/`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_unless_the_test_panicked() {
        let first = Folder::new("folder");
        let second = Folder::new("folder");
        let removed = first.0.clone();
        let kept = second.0.clone();
        second.write("b", "text");
        assert_eq!(
            (first.names(), second.names(), second.read("b").as_str()),
            (vec![], vec!["b".to_owned()], "text")
        );
        drop(first);
        let ended = std::thread::spawn(move || {
            let _second = second;
            panic!("as a failed test does");
        });
        assert!(ended.join().is_err());
        assert!(!removed.exists() && kept.join("b").exists());
        fs::remove_dir_all(kept).expect("removed");
    }
}
