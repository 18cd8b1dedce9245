//! Runs the binary in a temporary folder and compares its output with snapshot files. Invariant: no test sees
//! the files of another test or of the user. `UPDATE=1` rewrites the snapshots.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Environment variables that would give the binary the hub cache, endpoint, token or certificates of the user
/// who runs the tests.
const OF_THE_HUB: [&str; 7] = [
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
];

/// Temporary folder of one test, in which it runs `plimsoll`.
pub struct Folder {
    folder: plimsoll_testing::Folder,
}

impl Folder {
    pub fn new(test: &str) -> Self {
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self { folder: plimsoll_testing::Folder::within(parent, test) }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("in the folder")).expect("a folder");
        fs::write(path, bytes).expect("written");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Copies the golden model `name` into the folder, with the contents of `file` replaced by `edit`.
    pub fn model(&self, name: &str, file: &str, edit: impl Fn(&str) -> String) {
        for entry in fs::read_dir(golden(name)).expect("goldens").flatten() {
            let from = entry.path();
            let to = format!("{name}/{}", entry.file_name().to_string_lossy());
            self.write(&to, fs::read(from).expect("read"));
        }
        let path = format!("{name}/{file}");
        let text = String::from_utf8(self.read(&path)).expect("text");
        assert_ne!(edit(&text), text, "nothing was changed in {path}");
        self.write(&path, edit(&text));
    }

    /// Runs `plimsoll` in this folder.
    pub fn run(&self, words: &[&str]) -> Finished {
        self.run_with(words, b"")
    }

    /// A command that runs `plimsoll` with these arguments in this folder, without network and with pipes for
    /// input and output.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command
            .args(words)
            .current_dir(&self.folder.0)
            .env("HF_HOME", self.path("hf"))
            .env("HF_HUB_OFFLINE", "1");
        command.env("TORCH_HOME", self.path("torch"));
        for name in OF_THE_HUB {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `plimsoll` in this folder with bytes on standard input.
    pub fn run_with(&self, words: &[&str], input: &[u8]) -> Finished {
        self.finish(words, self.command(words), input)
    }

    /// Runs `plimsoll` in this folder with a hub at `endpoint`. Only commands run by this function may use the
    /// network.
    pub fn run_online(&self, words: &[&str], endpoint: &str) -> Finished {
        let mut command = self.command(words);
        command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", endpoint).env("NO_PROXY", "127.0.0.1");
        self.finish(words, command, b"")
    }

    fn finish(&self, words: &[&str], mut command: Command, input: &[u8]) -> Finished {
        let mut child = command.spawn().expect("the binary starts");
        // Writing fails if the process ends without reading its input, which is not an error of the test.
        let _ = child.stdin.take().expect("piped").write_all(input);
        let output = child.wait_with_output().expect("it ends");
        Finished { words: words.join(" "), output, folder: self.folder.0.clone() }
    }
}

/// Path of a file or folder in `fixtures/goldens`.
pub fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens").join(name);
    path.display().to_string()
}

/// Path of a file or folder in `examples`.
pub fn example(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name).display().to_string()
}

/// Exit status and output of a finished command.
pub struct Finished {
    words: String,
    output: Output,
    folder: PathBuf,
}

impl Finished {
    pub fn code(&self) -> i32 {
        self.output.status.code().unwrap_or(-1)
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Asserts that the output has no control characters other than newline and tab, no right-to-left override,
    /// and no line that begins with `forged`.
    pub fn assert_printable(&self, forged: &str) -> &Self {
        for text in [self.stdout(), self.stderr()] {
            let bad = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || c == '\u{202e}';
            assert!(!text.contains(bad), "plimsoll {}: {text:?}", self.words);
            assert!(!text.lines().any(|line| line.starts_with(forged)), "plimsoll {}: {text}", self.words);
        }
        self
    }

    /// Asserts the exit code; on failure shows the output.
    pub fn assert_code(&self, code: i32) -> &Self {
        assert_eq!(self.code(), code, "plimsoll {}\n{}{}", self.words, self.stdout(), self.stderr());
        self
    }

    /// The command, exit code and output, with paths of the test and digests of plans replaced by placeholders.
    /// Digests change with every change of the planner.
    pub fn seen(&self) -> String {
        let text = format!(
            "$ plimsoll {}\nexit {}\n-- stdout\n{}-- stderr\n{}",
            self.words,
            self.code(),
            self.stdout(),
            self.stderr()
        );
        let text = text.replace(&self.folder.display().to_string(), "TMP").replace(&golden(""), "GOLDENS/");
        let line = |line: &str| match line.strip_prefix("digest ") {
            Some(_) => "digest DIGEST\n".to_owned(),
            None => line.to_owned(),
        };
        text.split_inclusive('\n').map(line).collect()
    }

    /// Asserts that the output equals the snapshot `name`.
    pub fn matches(&self, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(format!("{name}.txt"));
        let seen = self.seen();
        if std::env::var_os("UPDATE").is_some_and(|v| v == "1") {
            fs::write(&path, &seen).expect("written");
        }
        let wanted = fs::read_to_string(&path).unwrap_or_default();
        assert!(seen == wanted, "{name}: wanted\n{wanted}\nseen\n{seen}\nif it is right, run with UPDATE=1");
    }
}
