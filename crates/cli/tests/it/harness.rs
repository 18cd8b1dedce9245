//! Runs the binary in a folder of its own and compares what it says with a file. Invariant: no test sees
//! another's files; `PLIMSOLL_BLESS=1` writes the files anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What would bring the cache, the hub or the token of whoever runs the tests into them.
const OF_THE_HUB: [&str; 7] = [
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
];

/// A folder of one test, removed at its end.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder for the test");
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("in the folder")).expect("a folder");
        fs::write(path, bytes).expect("written");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// A copy of a golden model under its name, one of its files changed by `edit`.
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

    /// Runs `plimsoll` here.
    pub fn run(&self, words: &[&str]) -> Ran {
        self.run_with(words, b"")
    }

    /// `plimsoll` with these words, to be started here.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.args(words).current_dir(&self.0).env("HF_HOME", self.0.join("hf")).env("HF_HUB_OFFLINE", "1");
        command.env("TORCH_HOME", self.0.join("torch"));
        for name in OF_THE_HUB {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `plimsoll` here with bytes on standard input.
    pub fn run_with(&self, words: &[&str], input: &[u8]) -> Ran {
        self.finish(words, self.command(words), input)
    }

    /// Runs `plimsoll` here with a hub at `endpoint`; no other command is allowed the network.
    pub fn run_online(&self, words: &[&str], endpoint: &str) -> Ran {
        let mut command = self.command(words);
        command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", endpoint).env("NO_PROXY", "127.0.0.1");
        self.finish(words, command, b"")
    }

    fn finish(&self, words: &[&str], mut command: Command, input: &[u8]) -> Ran {
        let mut child = command.spawn().expect("the binary starts");
        // It may end without reading.
        let _ = child.stdin.take().expect("piped").write_all(input);
        let output = child.wait_with_output().expect("it ends");
        Ran { words: words.join(" "), output, folder: self.0.clone() }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// The path of a golden file or folder.
pub fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens").join(name);
    path.display().to_string()
}

/// The path of an example.
pub fn example(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name).display().to_string()
}

/// What happened.
pub struct Ran {
    words: String,
    output: Output,
    folder: PathBuf,
}

impl Ran {
    pub fn code(&self) -> i32 {
        self.output.status.code().unwrap_or(-1)
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// What was said holds nothing that commands a terminal, and no line that begins with `forged`.
    pub fn is_plain(&self, forged: &str) -> &Self {
        for text in [self.stdout(), self.stderr()] {
            let bad = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || c == '\u{202e}';
            assert!(!text.contains(bad), "plimsoll {}: {text:?}", self.words);
            assert!(!text.lines().any(|line| line.starts_with(forged)), "plimsoll {}: {text}", self.words);
        }
        self
    }

    /// It ended with this code; otherwise the test ends and shows what was said.
    pub fn ended(&self, code: i32) -> &Self {
        assert_eq!(self.code(), code, "plimsoll {}\n{}{}", self.words, self.stdout(), self.stderr());
        self
    }

    /// All that a user saw, with the test's own paths replaced, and digests, which change with the planner.
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

    /// Compares what was seen with the file `name`.
    pub fn matches(&self, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(format!("{name}.txt"));
        let seen = self.seen();
        if std::env::var_os("PLIMSOLL_BLESS").is_some() {
            fs::write(&path, &seen).expect("written");
        }
        let wanted = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            seen == wanted,
            "{name}: wanted\n{wanted}\nseen\n{seen}\nif it is right, run with PLIMSOLL_BLESS=1"
        );
    }
}
