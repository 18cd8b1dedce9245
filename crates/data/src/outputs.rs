//! Which files a command may write: an output is never an input, two outputs are never one file, and a file that the
//! program did not write is replaced only by force. Invariant: files are compared by device and inode, so neither another
//! spelling of a path nor a link hides that two paths lead to one file; whether a file is ours is decided by the list of
//! outputs in a run record, never by its name.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::destination::ResolvedPath;
use crate::{DataError, DataErrorKind};

/// Identity of a file: equal for all paths that lead to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    #[cfg(unix)]
    device: u64,
    #[cfg(unix)]
    inode: u64,
    #[cfg(not(unix))]
    path: PathBuf,
}

impl FileId {
    /// The identity of the file or folder that `path` leads to; `None` if there is none, or it cannot be looked at.
    #[cfg(unix)]
    pub fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let facts = fs::metadata(path).ok()?;
        Some(Self { device: facts.dev(), inode: facts.ino() })
    }

    /// The identity of the file or folder that `path` leads to; `None` if there is none, or it cannot be looked at.
    #[cfg(not(unix))]
    pub fn of(path: &Path) -> Option<Self> {
        Some(Self { path: fs::canonicalize(path).ok()? })
    }
}

/// The files that a command reads.
#[derive(Clone, Debug, Default)]
pub struct InputFiles {
    files: HashMap<FileId, PathBuf>,
}

/// Endings of the files of a model: weights, configuration, tokenizer, calibration.
const MODEL_ENDINGS: [&str; 12] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "json", "txt", "model", "toml", "yaml"];

/// Levels of folders below a model's folder that are searched: checkpoints of runs lie in `RUN/checkpoints/STEP`.
const MODEL_LEVELS: u32 = 3;

impl InputFiles {
    /// Adds a file; a path at which there is no file, such as `-` or the name of a model on the hub, adds nothing.
    pub fn add(&mut self, path: &Path) {
        if path.is_file()
            && let Some(id) = FileId::of(path)
        {
            self.files.entry(id).or_insert_with(|| path.to_owned());
        }
    }

    /// Adds a file, or each file of a folder.
    pub fn add_file_or_folder(&mut self, path: &Path) {
        self.add(path);
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            self.add(&entry.path());
        }
    }

    /// The files of `folders` that have one of `names`.
    pub fn named_in<'a>(folders: &[PathBuf], names: impl IntoIterator<Item = &'a &'a str> + Clone) -> Self {
        let mut files = Self::default();
        for folder in folders {
            names.clone().into_iter().for_each(|name| files.add(&folder.join(name)));
        }
        files
    }

    /// Adds the files of a folder that have one of `names`.
    pub fn add_named(&mut self, folder: &Path, names: &[&str]) {
        names.iter().for_each(|name| self.add(&folder.join(name)));
    }

    /// Adds the files of a model: those of its folder and of the folders in it, or a weight file and the files beside it
    /// that are read with it.
    pub fn add_model(&mut self, path: &Path) {
        if path.is_dir() {
            return self.add_model_folder(path, MODEL_LEVELS);
        }
        self.add(path);
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "calibration.json"]
        {
            self.add(&path.with_file_name(name));
        }
    }

    fn add_model_folder(&mut self, folder: &Path, levels: u32) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            if ending.is_some_and(|ending| MODEL_ENDINGS.contains(&ending)) {
                self.add(&path);
            } else if levels > 0 && entry.file_type().is_ok_and(|of| of.is_dir()) {
                self.add_model_folder(&path, levels - 1);
            }
        }
    }

    /// Adds the files of `others`.
    pub fn extend(&mut self, others: InputFiles) {
        for (id, path) in others.files {
            self.files.entry(id).or_insert(path);
        }
    }

    /// The input that `path` leads to.
    pub fn find(&self, path: &Path) -> Option<&Path> {
        self.files.get(&FileId::of(path)?).map(PathBuf::as_path)
    }

    /// Checks that writing or removing the file `output` changes no input.
    ///
    /// # Errors
    /// [`DataErrorKind::IsInput`].
    pub fn check(&self, output: &Path) -> Result<(), DataError> {
        match self.find(output) {
            None => Ok(()),
            Some(input) => Err(DataError::at(output, DataErrorKind::IsInput { input: input.to_owned() })),
        }
    }
}

/// Check of the files that a command is going to write.
#[derive(Clone, Debug, Default)]
pub struct OutputGuard {
    inputs: InputFiles,
    /// Whether files that exist may be replaced.
    force: bool,
    outputs: Vec<(OutputPlace, PathBuf)>,
}

/// A place in the file system at which a file is or will be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OutputPlace {
    /// A file that exists.
    File(FileId),
    /// A new name in a folder; without an identity, the folder does not exist yet.
    New(Option<FileId>, PathBuf),
}

impl OutputPlace {
    /// The place of `path`; `None` for a stream, of which two outputs are not in each other's way.
    fn of(path: &Path) -> Option<Self> {
        let place = match ResolvedPath::of(path) {
            Ok(ResolvedPath::File(place)) => place,
            Ok(ResolvedPath::Stream(_)) => return None,
            // Refused when the file is created.
            Ok(ResolvedPath::Unsuitable) | Err(_) => path.to_owned(),
        };
        if let Some(id) = FileId::of(&place) {
            return Some(Self::File(id));
        }
        let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(match FileId::of(folder) {
            Some(id) => Self::New(Some(id), place.file_name().unwrap_or_default().into()),
            None => Self::New(None, std::path::absolute(&place).unwrap_or(place)),
        })
    }
}

impl OutputGuard {
    /// A guard for a command that reads `inputs`. With `force`, files that exist may be replaced, unless they are inputs.
    pub fn new(inputs: InputFiles, force: bool) -> Self {
        Self { inputs, force, outputs: vec![] }
    }

    /// Whether files that exist may be replaced.
    pub fn force(&self) -> bool {
        self.force
    }

    /// Checks a file that the command is going to write, and that is replaced only by force.
    ///
    /// # Errors
    /// [`DataErrorKind::IsInput`]; [`DataErrorKind::SameOutput`] for the place of an earlier output;
    /// [`DataErrorKind::Exists`].
    pub fn file(&mut self, path: &Path) -> Result<(), DataError> {
        self.own_file(path)?;
        let is_new = match ResolvedPath::of(path) {
            Ok(ResolvedPath::File(place)) => !place.exists(),
            // Not replaced, but written to; what cannot be written is refused when the file is created.
            Ok(ResolvedPath::Stream(_) | ResolvedPath::Unsuitable) | Err(_) => true,
        };
        if is_new || self.force { Ok(()) } else { Err(DataError::at(path, DataErrorKind::Exists)) }
    }

    /// Checks a file that the command is going to replace, append to or remove, and that earlier runs of the program wrote.
    ///
    /// # Errors
    /// [`DataErrorKind::IsInput`]; [`DataErrorKind::SameOutput`] for the place of an earlier output.
    pub fn own_file(&mut self, path: &Path) -> Result<(), DataError> {
        self.inputs.check(path)?;
        let Some(place) = OutputPlace::of(path) else { return Ok(()) };
        if let Some((_, other)) = self.outputs.iter().find(|(other, _)| *other == place) {
            return Err(DataError::at(path, DataErrorKind::SameOutput { other: other.clone() }));
        }
        self.outputs.push((place, path.to_owned()));
        Ok(())
    }
}

/// Size and time of the last change of a file that a run wrote, by which the file is recognized. A copy that keeps times,
/// such as that of `cp -a` or rsync, is recognized too; a file that was edited is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    bytes: u64,
    /// Nanoseconds from the Unix epoch to the last change.
    modified_ns: u64,
}

impl WrittenFile {
    /// Size and time of the regular file at `path`; `None` if there is none. A link is none: runs write files.
    pub fn of(path: &Path) -> Option<Self> {
        Self::of_metadata(&fs::symlink_metadata(path).ok()?)
    }

    /// Size and time of an open file; `None` if it is no regular file.
    pub fn of_metadata(facts: &Metadata) -> Option<Self> {
        let since = facts.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let modified_ns = u64::try_from(since.as_nanos()).ok()?;
        facts.is_file().then_some(Self { bytes: facts.len(), modified_ns })
    }
}

/// The files that a run wrote, by their paths relative to the folder of the run record that lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WrittenFiles(BTreeMap<String, WrittenFile>);

impl WrittenFiles {
    /// Key of the list in a run record.
    pub const KEY: &'static str = "outputs";

    /// The list in a run record, given as JSON text; empty for another text, and for the record of a version without it.
    pub fn of_record(text: &str) -> Self {
        #[derive(Deserialize)]
        struct ListedOutputs {
            #[serde(default)]
            outputs: WrittenFiles,
        }
        serde_json::from_str::<ListedOutputs>(text).map(|record| record.outputs).unwrap_or_default()
    }

    /// Adds the file `name`, or changes its entry; removes the entry without a file.
    pub fn insert(&mut self, name: &str, file: Option<WrittenFile>) {
        match file {
            Some(file) => self.0.insert(name.to_owned(), file),
            None => self.0.remove(name),
        };
    }

    /// Whether the file `name` in `folder` is the one that was written.
    pub fn has(&self, folder: &Path, name: &str) -> bool {
        self.0.get(name).is_some_and(|written| WrittenFile::of(&folder.join(name)) == Some(*written))
    }

    /// The names in the list.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A temporary folder with an input, links to it, and files of somebody else.
    fn folder() -> PathBuf {
        let folder = std::env::temp_dir().join(format!("plimsoll-outputs-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("model/checkpoints/step")).expect("created");
        for name in [
            "reads.fa",
            "theirs",
            "model/config.json",
            "model/page.html",
            "model/checkpoints/step/m.safetensors",
        ] {
            fs::write(folder.join(name), "x").expect("written");
        }
        for (target, name) in
            [("reads.fa", "link"), ("link", "second"), ("new", "dangling"), ("model", "other")]
        {
            symlink(target, folder.join(name)).expect("linked");
        }
        fs::hard_link(folder.join("reads.fa"), folder.join("hard")).expect("linked");
        folder
    }

    /// An output, what is wrong with it without force, and with force.
    const OUTPUTS: [[&str; 3]; 18] = [
        ["reads.fa", "input", "input"],
        ["./model/../reads.fa", "input", "input"],
        ["link", "input", "input"],
        ["second", "input", "input"],
        ["hard", "input", "input"],
        ["model/config.json", "input", "input"],
        ["other/config.json", "input", "input"],
        ["model/checkpoints/step/m.safetensors", "input", "input"],
        ["model/page.html", "exists", ""],
        ["model/page.new", "", ""],
        ["theirs", "exists", ""],
        ["new", "", ""],
        ["dangling", "", ""],
        ["absent/new", "", ""],
        ["/dev/null", "", ""],
        ["/dev/stdout", "", ""],
        ["taken", "same", "same"],
        ["model/../taken", "same", "same"],
    ];

    #[test]
    fn an_output_is_no_input_and_replaces_only_by_force() {
        let folder = folder();
        let mut inputs = InputFiles::default();
        inputs.add(&folder.join("reads.fa"));
        inputs.add(Path::new("-"));
        inputs.add_model(&folder.join("model"));
        for [output, without, with] in OUTPUTS {
            for (force, wanted) in [(false, without), (true, with)] {
                let mut guard = OutputGuard::new(inputs.clone(), force);
                guard.file(&folder.join("taken")).expect("new");
                let found = match guard.file(&folder.join(output)).map_err(|error| error.kind) {
                    Ok(()) => "",
                    Err(DataErrorKind::IsInput { .. }) => "input",
                    Err(DataErrorKind::SameOutput { .. }) => "same",
                    Err(DataErrorKind::Exists) => "exists",
                    Err(other) => panic!("{output}: {other:?}"),
                };
                assert_eq!(found, wanted, "{output}, force {force}");
            }
        }
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_written_file_is_recognized_until_it_changes() {
        let folder = std::env::temp_dir().join(format!("plimsoll-written-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("created");
        let path = folder.join("a");
        let mut written = WrittenFiles::default();
        fs::write(&path, "ours").expect("written");
        written.insert("a", WrittenFile::of(&path));
        let record = serde_json::json!({"outputs": written}).to_string();
        let read = WrittenFiles::of_record(&record);
        assert_eq!(read, written);
        assert!(read.has(&folder, "a") && !read.has(&folder, "b"));
        fs::rename(&path, folder.join("b")).expect("renamed");
        fs::rename(folder.join("b"), &path).expect("renamed");
        assert!(read.has(&folder, "a"), "a rename changes no file");
        fs::write(&path, "edited").expect("written");
        assert!(!read.has(&folder, "a"));
        for text in ["", "[]", "{}", r#"{"outputs": 7}"#, r#"{"outputs": ["a"]}"#] {
            assert_eq!(WrittenFiles::of_record(text), WrittenFiles::default(), "{text}");
        }
        fs::remove_dir_all(folder).expect("removed");
    }
}
