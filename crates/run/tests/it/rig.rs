//! Folders and requests for tests.

use plimsoll_run::predict::output::HitsFormat;
use plimsoll_run::predict::{Models, Options, Report, predict};
use plimsoll_run::{Precision, RunError, Settings, Silent};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A folder that goes with its owner.
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

/// A file or folder of the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// A prediction of `input` into `output` with the golden models, at 500 bases, in f32 as their answers are.
pub fn golden(input: &Path, output: &Path) -> Options {
    let model = |name: &str| Some(fixture("goldens").join(name).display().to_string());
    Options {
        models: Models {
            dna: model("dnabert_s"),
            protein: model("esm2"),
            head: Some(fixture("goldens/head.pth")),
        },
        ..builtin(input, output)
    }
}

/// A prediction with the built-in models in f32.
pub fn builtin(input: &Path, output: &Path) -> Options {
    Options {
        inputs: vec![input.to_owned()],
        output_dir: output.to_owned(),
        force: false,
        models: Models::default(),
        length: 500,
        original_alphabet: false,
        threshold: 0.5,
        keep_intermediate: true,
        save_embeddings: None,
        hits_format: HitsFormat::Fasta,
        strict: false,
        workers: 2,
        prefetch: 2,
        commit_every: Duration::from_secs(5),
        shard: None,
        merge: vec![],
        source: false,
        sort_by_length: true,
        settings: Settings { threads: 2, precision: Some(Precision::F32), ..Settings::default() },
    }
}

pub fn run(options: &Options) -> Result<Report, RunError> {
    predict(options, &mut Silent)
}

pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Whether this process is for the test `name` alone; if not, a process is made in which it is, and has to succeed. For
/// what counts the memory of the whole process.
pub fn alone(name: &str) -> bool {
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
