//! The place that the path of an output leads to: a file, or a stream such as a pipe. Invariant: finding the place
//! changes nothing and does not open a pipe, whose reader would see its end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Symbolic links that are followed before a path is refused, as on Linux.
const MAX_LINKS: usize = 40;

/// The place that a path leads to after all symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResolvedPath {
    /// A regular file, or a name at which nothing exists. The path is no symbolic link.
    File(PathBuf),
    /// A character device, a pipe, or an open file of this process (`/dev/stdout`).
    Stream(OutputStream),
    /// A folder, a block device or a socket.
    Unsuitable,
}

/// A place that takes bytes one after another and has no name that could be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output of this process.
    StandardOutput,
    /// Standard error of this process.
    StandardError,
    /// Another open file of this process, a character device, or a pipe with a name.
    Path(PathBuf),
}

impl ResolvedPath {
    /// Follows the links of `path`.
    ///
    /// # Errors
    /// Errors of the system, apart from a missing file: a folder that cannot be searched, or links in a circle.
    pub fn of(path: &Path) -> io::Result<Self> {
        let mut place = path.to_owned();
        for _ in 0..MAX_LINKS {
            // Before the link is followed: `/proc/self/fd/1` leads to the path of the file that is open as standard
            // output. A rename to that path would part the file from everybody who writes to it.
            if let Some(stream) = OutputStream::of_descriptor(&place) {
                return Ok(Self::Stream(stream));
            }
            let facts = match fs::symlink_metadata(&place) {
                // A folder that does not exist is an error when the file is created.
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Self::File(place)),
                facts => facts?,
            };
            if !facts.file_type().is_symlink() {
                return Ok(Self::of_type(place, facts.file_type()));
            }
            let target = fs::read_link(&place)?;
            place = place.parent().map_or_else(|| target.clone(), |folder| folder.join(&target));
        }
        Err(io::Error::new(ErrorKind::InvalidInput, "too many symbolic links"))
    }

    #[cfg(unix)]
    fn of_type(place: PathBuf, of: fs::FileType) -> Self {
        use std::os::unix::fs::FileTypeExt;
        match of {
            _ if of.is_file() => Self::File(place),
            _ if of.is_char_device() || of.is_fifo() => Self::Stream(OutputStream::Path(place)),
            _ => Self::Unsuitable,
        }
    }

    #[cfg(not(unix))]
    fn of_type(place: PathBuf, of: fs::FileType) -> Self {
        if of.is_file() { Self::File(place) } else { Self::Unsuitable }
    }
}

impl OutputStream {
    /// The open file that a path in `/dev` or `/proc` stands for.
    fn of_descriptor(path: &Path) -> Option<Self> {
        let folder = path.parent()?.to_str()?;
        let name = path.file_name()?.to_str()?;
        let is_number = !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
        let is_of_descriptors =
            folder == "/dev/fd" || (folder.starts_with("/proc/") && folder.ends_with("/fd"));
        match (folder, name) {
            ("/dev", "stdout") => Some(Self::StandardOutput),
            ("/dev", "stderr") => Some(Self::StandardError),
            ("/dev/fd" | "/proc/self/fd", "1") => Some(Self::StandardOutput),
            ("/dev/fd" | "/proc/self/fd", "2") => Some(Self::StandardError),
            _ if is_of_descriptors && is_number => Some(Self::Path(path.to_owned())),
            _ => None,
        }
    }

    /// Copies all bytes from `file` to the stream.
    pub(crate) fn write_all_of(&self, file: &mut File) -> io::Result<()> {
        let mut out = self.open()?;
        match io::copy(file, &mut out).and_then(|_| out.flush()) {
            // A reader that has seen enough, such as `head`, is no error.
            Err(e) if e.kind() == ErrorKind::BrokenPipe && *self == Self::StandardOutput => Ok(()),
            done => done,
        }
    }

    #[cfg(unix)]
    fn open(&self) -> io::Result<File> {
        use std::os::fd::AsFd;
        match self {
            Self::StandardOutput => {
                // Texts that were printed before come first.
                io::stdout().flush()?;
                Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
            }
            Self::StandardError => Ok(File::from(io::stderr().as_fd().try_clone_to_owned()?)),
            Self::Path(path) => OpenOptions::new().append(true).open(path),
        }
    }

    #[cfg(not(unix))]
    fn open(&self) -> io::Result<File> {
        match self {
            Self::StandardOutput | Self::StandardError => Err(ErrorKind::Unsupported.into()),
            Self::Path(path) => OpenOptions::new().append(true).open(path),
        }
    }
}

/// Whether a file written to `path` goes to a device or a pipe.
pub fn is_stream(path: &Path) -> bool {
    matches!(ResolvedPath::of(path), Ok(ResolvedPath::Stream(_)))
}

/// Whether a file written to `path` goes to standard output.
pub fn is_standard_output(path: &Path) -> bool {
    matches!(ResolvedPath::of(path), Ok(ResolvedPath::Stream(OutputStream::StandardOutput)))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A temporary folder with a file, links, a circle of links and a subfolder.
    fn folder() -> PathBuf {
        let folder = std::env::temp_dir().join(format!("plimsoll-destination-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("inner")).expect("created");
        fs::write(folder.join("file"), "x").expect("written");
        for (target, name) in [
            ("file", "link"),
            ("link", "second"),
            ("new", "dangling"),
            ("../file", "inner/up"),
            ("circle", "circle"),
            ("/dev/stdout", "out"),
        ] {
            symlink(target, folder.join(name)).expect("linked");
        }
        folder
    }

    #[test]
    fn links_are_followed_and_open_files_are_streams() {
        let folder = folder();
        let file = |name: &str| Some(ResolvedPath::File(folder.join(name)));
        let stream = |path: &str| Some(ResolvedPath::Stream(OutputStream::Path(path.into())));
        let standard = Some(ResolvedPath::Stream(OutputStream::StandardOutput));
        for (path, wanted) in [
            ("file", file("file")),
            ("absent", file("absent")),
            ("absent/inner", file("absent/inner")),
            ("link", file("file")),
            ("second", file("file")),
            ("dangling", file("new")),
            ("inner/up", file("inner/../file")),
            ("inner", Some(ResolvedPath::Unsuitable)),
            ("circle", None),
            ("out", standard.clone()),
            ("/dev/stdout", standard.clone()),
            ("/dev/fd/1", standard.clone()),
            ("/proc/self/fd/1", standard),
            ("/dev/stderr", Some(ResolvedPath::Stream(OutputStream::StandardError))),
            ("/dev/fd/7", stream("/dev/fd/7")),
            ("/dev/null", stream("/dev/null")),
        ] {
            assert_eq!(ResolvedPath::of(&folder.join(path)).ok(), wanted, "{path}");
        }
        fs::remove_dir_all(folder).expect("removed");
    }
}
