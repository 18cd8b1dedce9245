//! Commits files that belong together, such as a matrix and the names of its rows. Invariant: at no moment does a file of
//! the new set stand beside a file of an older set, and a set that cannot be committed leaves the older set as it was.

use super::{AtomicFile, rename_to_new, sync_folder};
use crate::destination::ResolvedPath;
use crate::{DataError, DataErrorKind};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

/// Moves the files to their targets in the given order; put the file that describes the others last. They are on disk
/// when this returns. A file whose target is a device or a pipe is copied to it when the others have arrived.
///
/// # Errors
/// A file that cannot be written or moved; [`DataErrorKind::Exists`] if a file appeared at a target since its file was
/// created. The targets then are as they were before.
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
        let ResolvedPath::File(place) = &file.destination else { continue };
        let place = place.clone();
        // The place is free now: a file that is there appeared since, and is not replaced.
        rename_to_new(&file.temporary, &place).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => DataError::at(&file.target, DataErrorKind::Exists),
            _ => file.error(e),
        })?;
        file.file = None;
        replaced.arrived.push(place);
    }
    for place in &replaced.arrived {
        sync_folder(place).map_err(|e| DataError::at(place, DataErrorKind::Write(e)))?;
    }
    replaced.remove();
    let mut streams = files.into_iter().filter(|file| !matches!(file.destination, ResolvedPath::File(_)));
    streams.try_for_each(AtomicFile::commit)
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
        let ResolvedPath::File(target) = &file.destination else { return Ok(()) };
        // A file that appeared since is not replaced, which the move of the new file finds out.
        if !file.replaces {
            return Ok(());
        }
        let place = file.temporary.with_extension("old");
        match fs::rename(target, &place) {
            Ok(()) => self.aside.push(Aside { target: target.clone(), place }),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::Path;

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
}
