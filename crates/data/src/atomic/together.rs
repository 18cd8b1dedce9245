//! Commits files that belong together, such as a matrix and the names of its rows. Invariant: at no moment does a file of
//! the new set stand beside a file of an older set, and a set that cannot be committed leaves the older set as it was.

use super::{AtomicFile, sync_folder};
use crate::{DataError, DataErrorKind};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Moves the files to their targets in the given order; put the file that describes the others last. They are on disk
/// when this returns.
///
/// # Errors
/// A file that cannot be written or moved. The targets then are as they were before.
pub fn commit_together(mut files: Vec<AtomicFile>) -> Result<(), DataError> {
    // A full disk is an error here, before any target has changed.
    for file in &mut files {
        file.sync().map_err(|e| file.error(e))?;
    }
    // The older files leave their places before the first new one arrives, so that a process that is killed between two
    // renames leaves no mixture.
    let mut replaced = Replaced::default();
    for file in &files {
        replaced.set_aside(file).map_err(|e| file.error(e))?;
    }
    for file in &mut files {
        fs::rename(&file.temporary, &file.target).map_err(|e| file.error(e))?;
        file.file = None;
        replaced.arrived.push(file.target.clone());
    }
    for file in &files {
        sync_folder(&file.target).map_err(|e| file.error(e))?;
    }
    replaced.remove();
    Ok(())
}

/// An older file that was moved aside.
struct Aside {
    target: PathBuf,
    place: PathBuf,
}

/// Undoes an incomplete commit when it is dropped.
#[derive(Default)]
struct Replaced {
    aside: Vec<Aside>,
    arrived: Vec<PathBuf>,
}

impl Replaced {
    fn set_aside(&mut self, file: &AtomicFile) -> io::Result<()> {
        let place = file.temporary.with_extension(OLD);
        match fs::rename(&file.target, &place) {
            Ok(()) => self.aside.push(Aside { target: file.target.clone(), place }),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Removes the older files: the commit is complete. A file that cannot be removed is one that the next run removes.
    fn remove(mut self) {
        self.arrived.clear();
        for Aside { place, .. } in self.aside.drain(..) {
            let _ = fs::remove_file(place);
        }
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        // The error that ended the commit is reported; these are only attempts to restore.
        for target in &self.arrived {
            let _ = fs::remove_file(target);
        }
        for Aside { target, place } in &self.aside {
            let _ = fs::rename(place, target);
        }
    }
}

/// Extension of a temporary file, and of an older file that a commit moved aside.
const PART: &str = "part";
const OLD: &str = "old";

/// Removes the temporary files of `target` that killed processes left behind. Call it only under a lock that excludes
/// other writers of the target.
pub fn remove_temporaries(target: &Path) -> Result<(), DataError> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        // A folder that cannot be listed may still be written.
        Err(_) => return Ok(()),
    };
    for entry in entries.flatten().filter(|entry| is_leftover(&entry.file_name().to_string_lossy(), &name)) {
        fs::remove_file(entry.path()).map_err(|e| DataError::at(entry.path(), DataErrorKind::Write(e)))?;
    }
    Ok(())
}

/// Whether `found` is `.NAME.PID-N.part` or `.NAME.PID-N.old`.
fn is_leftover(found: &str, name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let middle = found.strip_prefix('.').and_then(|rest| rest.strip_prefix(name)?.strip_prefix('.'));
    let number = middle.and_then(|rest| rest.split_once('.'));
    number.is_some_and(|(number, extension)| {
        [PART, OLD].contains(&extension)
            && number.split_once('-').is_some_and(|(process, count)| is_number(process) && is_number(count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const NAMES: [&str; 3] = ["e.npy", "e.ids.txt", "e.json"];

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("plimsoll-together-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("created");
        folder
    }

    fn files(folder: &Path, content: &str) -> Vec<AtomicFile> {
        let create = |name: &&str| {
            let mut file = AtomicFile::create(folder.join(name)).expect("created");
            file.write_all(content.as_bytes()).expect("written");
            file
        };
        NAMES.iter().map(create).collect()
    }

    /// The names in a folder, each with its content.
    fn content(folder: &Path) -> Vec<String> {
        let mut all: Vec<String> = fs::read_dir(folder)
            .expect("listed")
            .map(|entry| entry.expect("entry").path())
            .map(|path| {
                let text = fs::read_to_string(&path).unwrap_or_else(|_| "a folder".to_owned());
                format!("{} {text}", path.file_name().expect("a name").to_string_lossy())
            })
            .collect();
        all.sort();
        all
    }

    fn all_are(content: &str) -> [String; 3] {
        ["e.ids.txt", "e.json", "e.npy"].map(|name| format!("{name} {content}"))
    }

    #[test]
    fn a_set_replaces_a_set() {
        let folder = folder("whole");
        commit_together(files(&folder, "A")).expect("committed");
        assert_eq!(content(&folder), all_are("A"));
        commit_together(files(&folder, "B")).expect("committed");
        assert_eq!(content(&folder), all_are("B"));
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_set_that_cannot_be_committed_leaves_the_older_one() {
        for broken in NAMES {
            let folder = folder(&format!("broken-{broken}"));
            commit_together(files(&folder, "A")).expect("committed");
            let files = files(&folder, "B");
            // A temporary file that is gone cannot be renamed.
            let file = files.iter().find(|file| file.target.ends_with(broken)).expect("one of the files");
            fs::remove_file(&file.temporary).expect("removed");
            let error = commit_together(files).expect_err("cannot be renamed").to_string();
            assert!(error.contains(broken), "{error}");
            assert_eq!(content(&folder), all_are("A"), "{broken}");
            fs::remove_dir_all(folder).expect("removed");
        }
    }

    #[test]
    fn a_first_set_that_cannot_be_committed_leaves_nothing() {
        let folder = folder("first");
        let files = files(&folder, "A");
        fs::remove_file(&files[2].temporary).expect("removed");
        commit_together(files).expect_err("cannot be renamed");
        assert_eq!(content(&folder), [""; 0]);
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn leftovers_of_the_target_are_removed_and_nothing_else() {
        let folder = folder("leftovers");
        let kept = [
            ".e.npy.part",
            ".e.npy.1-x.part",
            ".e.npy.2.1-0.part",
            ".f.npy.1-0.part",
            "e.npy",
            ".e.npy.1-0.partly",
        ];
        let left = [".e.npy.1-0.part", ".e.npy.4711-12.part", ".e.npy.3-1.old"];
        kept.iter().chain(&left).for_each(|name| fs::write(folder.join(name), "").expect("written"));
        remove_temporaries(&folder.join("e.npy")).expect("removed");
        let mut wanted = kept.map(|name| format!("{name} "));
        wanted.sort();
        assert_eq!(content(&folder), wanted);
        remove_temporaries(&folder.join("nowhere/e.npy")).expect("no folder");
        fs::remove_dir_all(folder).expect("removed");
    }
}
