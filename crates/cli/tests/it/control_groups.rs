//! A run in a memory control group whose limit is lowered while it runs, as the limit of a container is. Invariant: the run
//! gives memory back, and its results have the bytes of an undisturbed run. Skipped where no control group can be made.

use crate::harness::{Folder, golden};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A memory control group of a test, of version 1 or 2; removed when the value is dropped.
struct Group {
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Group {
    /// Makes a control group; an error with the reason if that is not possible here.
    fn new() -> Result<Self, String> {
        let name = format!("plimsoll-test-{}", std::process::id());
        let version_2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let (root, limit, usage) = if version_2 {
            ("/sys/fs/cgroup", "memory.max", "memory.current")
        } else {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        };
        let path = Path::new(root).join(name);
        fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let group = Self { path, limit, usage };
        group.set_limit(1 << 30).map_err(|e| format!("{}: {e}", group.path.join(limit).display()))?;
        Ok(group)
    }

    fn set_limit(&self, bytes: u64) -> std::io::Result<()> {
        fs::write(self.path.join(self.limit), bytes.to_string())
    }

    fn used(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.usage)).expect("the usage");
        text.trim().parse().expect("a number")
    }

    /// Starts a command in the group. The shell enters it first, so that all memory of the command counts.
    fn start(&self, command: &Command) -> Child {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.path.display());
        let mut shell = Command::new("sh");
        shell.args(["-c", &enter, "sh"]).arg(command.get_program()).args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        shell.current_dir(command.get_current_dir().expect("a folder"));
        shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a shell")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// All result files except run.json, which contains times.
fn results(folder: &Folder, out: &str) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(folder.path(out)).expect("a folder").flatten();
    let file = |file: fs::DirEntry| {
        (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).expect("bytes"))
    };
    let mut all: Vec<_> = files.map(file).filter(|(name, _)| name != "run.json").collect();
    all.sort();
    all
}

/// Work that the run has finished, from its progress.json.
fn done(folder: &Folder, out: &str) -> u64 {
    let text = fs::read(folder.path(out).join("progress.json")).unwrap_or_default();
    let state: Value = serde_json::from_slice(&text).unwrap_or_default();
    state["done"].as_u64().unwrap_or(0)
}

#[test]
fn a_prediction_gives_memory_back_when_its_limit_is_lowered() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return println!("skipped: no memory control group can be made here: {why}"),
    };
    let folder = Folder::new("control_group");
    let text = fs::read_to_string(golden("pipeline/reads.fa")).expect("reads");
    folder.write("reads.fa", (0..12).map(|i| text.replace('>', &format!(">r{i}_"))).collect::<String>());
    let weights = golden("");
    let words = |out| {
        let words = "predict reads.fa --threads 1 --precision f32 --tokens 8192 -o";
        let words: Vec<&str> = words.split(' ').chain([out, "--weights", &weights]).collect();
        words
    };
    folder.run(&words("undisturbed")).assert_code(0);
    let thresholds = "target=0.5,warning=0.6,critical=0.7,emergency=0.8,adjustment_frequency=1";
    let dynamic = ["--dynamic", thresholds];
    let command = folder.command(&[&words("lowered")[..], &dynamic].concat());
    let mut child = group.start(&command);
    let deadline = Instant::now() + Duration::from_secs(100);
    while done(&folder, "lowered") == 0 && child.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < deadline, "no step is finished");
        sleep(Duration::from_millis(2));
    }
    let before = group.used();
    // 83 % are in use then; the rest is for what the run takes before it reads the limit.
    group.set_limit(before / 100 * 120).expect("a lower limit");
    let mut least = before;
    while child.try_wait().expect("a child").is_none() {
        least = least.min(group.used());
        sleep(Duration::from_millis(2));
    }
    let ended = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{:?}: {said}", ended.status);
    assert!(results(&folder, "lowered") == results(&folder, "undisturbed"), "the results differ");
    let record: Value = serde_json::from_slice(&folder.read("lowered/run.json")).expect("a record");
    let changes = record["size_changes"].as_array().expect("a list");
    let first = changes.first().unwrap_or_else(|| panic!("no change: {said}"));
    assert!(first["reason"] != "grow" && first["from"] == 8192, "{first}");
    // The arena for steps of 8192 tokens has 20 MB more than that for 502.
    assert!(before - least > 10_000_000, "{before} B before, at least {least} B after: {said}");
}
